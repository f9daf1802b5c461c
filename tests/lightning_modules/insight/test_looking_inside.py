"""What callbacks see of gates, memory, mixers and experts, against float64 loops written from the definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dsv41 import BackendConfig, DeepseekV41Config
from dsv41.config import IGNORE_INDEX
from dsv41.engram.hash import hashed_tokens
from dsv41.ops import engram_gate
from lightning_modules.callbacks import EngramGates, EngramMemory, ExpertLoad, StreamMixers
from lightning_modules.cli import DeepseekV41CLI
from lightning_modules.insight import engram_gates as gates_file
from lightning_modules.insight import expert_load as load_file
from lightning_modules.insight import mixers as mixers_file
from lightning_modules.insight.drawing import pixels
from lightning_modules.insight.hooks import ValidationObserver
from lightning_modules.inspecting import Parsed
from lightning_modules.task import DeepseekV41Task
from lightning_modules.text import readable

MakeConfig = Callable[..., DeepseekV41Config]
Batch = dict[str, Tensor]
OBSERVERS = (EngramGates, EngramMemory, StreamMixers, ExpertLoad)
NO_PICTURES = [f"--{name}.pictures=false" for name in ("engram_gates", "stream_mixers", "expert_load")]
PICTURES = [option.replace("false", "true") for option in NO_PICTURES]  # the smallest run has none
ENGRAM_LAYERS, STREAMS, LAYERS, EXPERTS = (1, 3), 4, 6, 8  # of the golden-tiny model


def make_batches(count: int = 3, rows: int = 2, length: int = 24) -> list[Batch]:
    """Batches with more and more padding in their second row; words come back, so that n-grams do too."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for index in range(count):
        ids = torch.randint(3, 500, (rows, length), generator=generator)
        ids[:, 10:16] = torch.arange(40, 46)
        mask = torch.ones_like(ids)
        mask[1, length - 5 * index :] = 0
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "row_id": torch.arange(rows)})
    return batches


def make_task(config: DeepseekV41Config, tokenizer: Any, **options: Any) -> DeepseekV41Task:
    """Weights large enough for gates that open and close, mixers that mix and experts that differ."""
    task = DeepseekV41Task(config.text_config, **options)
    task.tokenizer = tokenizer
    task.register_buffer("token_bytes", torch.ones(512, dtype=torch.int64), persistent=False)
    task.configure_model()
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, parameter in task.built.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "engram" in name or "_hc.fn" in name or "gate.weight" in name:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif "_hc." in name:
                parameter.add_(noise * 0.5)
    return task


class Watch(L.Callback):
    """Keeps arguments and results of modules in validation, by name, and what hooks there are meanwhile."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.seen: dict[str, list[tuple[Any, Any]]] = {}
        self.hooks_while_running = -1

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.handles = [
            module.register_forward_hook(lambda *given, name=name: self.seen.setdefault(name, []).append(given[1:]))
            for name, module in pl_module.built.model.named_modules()
            if name.endswith(self.kinds)
        ]

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.hooks_while_running = hooks(pl_module) - len(self.handles)
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        for handle in self.handles:
            handle.remove()


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def make_trainer(folder: Path | None, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False if folder is None else TensorBoardLogger(folder, "run", version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def validate(
    folder: Path | None, task: DeepseekV41Task, batches: list[Batch], *callbacks: L.Callback, **options: Any
) -> dict[str, float]:
    """What is returned, in double precision, so that a loop can be compared with it."""
    trainer = make_trainer(folder, *callbacks, **{"precision": "64-true"} | options)
    data: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    return dict(trainer.validate(task, data, verbose=False)[0])


def board(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "run" / "version_0"), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, float]:
    """The last value of every curve."""
    events = board(folder)
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}


def constants(folder: Path) -> dict[str, str]:
    """Texts of what does not change in a run."""
    events = board(folder)
    prefix, suffix = "within/constants/", "/text_summary"
    return {
        tag.removeprefix(prefix).removesuffix(suffix): events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
        if tag.startswith(prefix)
    }


def live_tokens(batches: list[Batch]) -> Iterator[tuple[int, int, int]]:
    for index, batch in enumerate(batches):
        for b, s in batch["attention_mask"].nonzero().tolist():
            yield index, b, s


class Shown:
    """Keeps figures by tag, in place of `show`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.figures: dict[str, Any] = {}
        monkeypatch.setattr(module, "show", self)

    def __call__(self, trainer: L.Trainer, tag: str, figure: Any) -> None:
        self.figures[tag] = figure
        assert pixels(figure).std() > 10, "not a blank sheet"


def texts(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


# ------------------------------------------------------------------ gates


def gate_by_hand(layer: Any, given: tuple[Any, ...], b: int, s: int) -> list[float]:
    """The gates of a token, from the definition in `engram.py`."""
    streams, ids = given[0][b, s].double(), given[1][b, s]
    rows = layer.embed.weight.detach().double()[ids].flatten()
    key = layer.wkv.weight.detach().double()[: streams.numel()] @ rows
    found = []
    for c, k in enumerate(key.view(streams.shape)):
        h = streams[c]
        q = h / math.sqrt(float(h @ h) / len(h) + layer.eps) * layer.q_weight[c].detach().double()
        k = k / math.sqrt(float(k @ k) / len(k) + layer.eps) * layer.k_weight[c].detach().double()
        dot = float(q @ k) / math.sqrt(len(h))
        found.append(1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot))))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_are_those_that_the_core_applies(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    streams, key, value, q, k = (
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape in ((2, 5, 3, 8), (2, 5, 24), (2, 5, 8), (3, 8), (3, 8))
    )
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    gates = engram_gate.engram_gates(streams, key, q, k, 1e-6)
    assert gates.shape == (2, 5, 3)
    applied = streams + (gates * mask.unsqueeze(-1)).unsqueeze(-1) * value.unsqueeze(2)
    assert torch.equal(applied, engram_gate.gate_memory(streams, key, value, q, k, 1e-6, mask))


@pytest.mark.parametrize("batches", [1, 2, 9])
def test_gate_statistics_equal_a_loop_over_tokens(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, watch, shown = make_task(tiny_config(), golden_tokenizer), Watch(".engram"), Shown(monkeypatch, gates_file)
    found = validate(tmp_path, task, make_batches(), EngramGates(batches, tokens=20), watch)
    curves, events = scalars(tmp_path), board(tmp_path)
    means, shares = [], []
    for layer in ENGRAM_LAYERS:
        module, seen = task.built.model.layers[layer].engram, watch.seen[f"layers.{layer}.engram"]
        gates = {(i, b, s): gate_by_hand(module, seen[i][0], b, s) for i, b, s in live_tokens(make_batches()[:batches])}
        assert len(gates) == {1: 48, 2: 91, 9: 129}[batches]
        for stream in range(STREAMS):
            values = [gate[stream] for gate in gates.values()]
            means.append(sum(values) / len(values))
            shares.append(sum(value > 0.5 for value in values) / len(values))
            name = f"layer_{layer}_stream_{stream}"
            assert curves[f"within/engram_gate_mean/{name}"] == pytest.approx(means[-1], rel=1e-6)
            assert curves[f"within/engram_gate_open/{name}"] == pytest.approx(shares[-1], rel=1e-6)
            histogram = events.Histograms(f"within/engram_gate/{name}")[-1].histogram_value
            assert histogram.num == len(values)
            assert histogram.sum == pytest.approx(sum(values))
            assert histogram.sum_squares == pytest.approx(sum(value**2 for value in values))
            counts = Counter(int(value * 40) for value in values)
            expected = {round((part + 1) / 40, 3): count for part, count in counts.items()}
            limits = {round(x, 3): n for x, n in zip(histogram.bucket_limit, histogram.bucket, strict=True) if n}
            assert limits == expected
        figure = shown.figures[f"engram_gate/layer_{layer}"]
        (axes, bar), (image,) = figure.axes, figure.axes[0].images
        piece = torch.tensor([gates[0, 0, s] for s in range(20)]).t()
        torch.testing.assert_close(torch.tensor(image.get_array().data), piece, rtol=1e-5, atol=0, check_dtype=False)
        assert image.get_clim() == (0.0, 1.0)
        assert texts(axes.get_yticklabels()) == [f"stream {stream}" for stream in range(STREAMS)]
        ids = make_batches()[0]["input_ids"][0, :20].tolist()
        words = [golden_tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        assert texts(axes.get_xticklabels()) == [readable(word) for word in words]
        assert figure.get_suptitle() == f"Engram gates of layer {layer}"
        assert bar.get_ylabel() == "gate"
    assert found["within/engram_gate"] == pytest.approx(sum(means) / len(means), rel=1e-6)
    assert found["within/engram_gate_open"] == pytest.approx(sum(shares) / len(shares), rel=1e-6)
    assert len({round(value, 4) for value in means + shares}) > 12, "numbers that could not be mistaken"
    assert 0.1 < min(shares) < max(shares) < 0.9


def test_tokens_of_a_picture_are_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"^tokens: must be at least 1, got 0$"):
        EngramGates(tokens=0)


def test_a_picture_takes_any_text_as_it_is() -> None:
    """Formulas and scripts without a font are no error, and no warning."""
    figure = gates_file.gate_picture(torch.rand(2, 3).numpy(), ["$^^$", "ॐ", "$a$"], 0)
    assert pixels(figure).shape[2] == 3
    labels = figure.axes[0].get_xticklabels()
    assert texts(labels) == ["$^^$", "ॐ", "$a$"]
    assert not any(label.get_parse_math() for label in labels)


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("token_map", ["compressed", "raw"])
@pytest.mark.parametrize("batches", [2, 9])
def test_buckets_equal_a_loop_over_distinct_ngrams(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path, batches: int, token_map: str
) -> None:
    sizes = {"engram_num_embeddings": None, "engram_compressed_vocab_size": None}
    config = tiny_config(engram_vocab_size=53, engram_token_map=token_map, **sizes)
    task = make_task(config, golden_tokenizer)
    found = validate(tmp_path, task, make_batches(), EngramMemory(batches))
    curves = scalars(tmp_path)
    hashing, mapping = task.built.model.engram_hash, hashed_tokens(config.text_config, golden_tokenizer)
    pad = int(mapping[hashing.pad_id if token_map == "raw" else 2])
    data = make_batches()[:batches]
    rows = [hashing(batch["input_ids"], batch["attention_mask"].bool()) for batch in data]
    shares, chances, lines = [], [], []
    for layer_index, layer in enumerate(ENGRAM_LAYERS):
        for column in range(4):
            size, head = column // 2 + 2, column % 2
            buckets: dict[int, set[tuple[int, ...]]] = {}
            for i, b, s in live_tokens(data):
                ids = data[i]["input_ids"][b].tolist()
                ngram = tuple(int(mapping[ids[p]]) if p >= 0 else pad for p in range(s - size + 1, s + 1))
                buckets.setdefault(int(rows[i][b, s, layer_index, column]), set()).add(ngram)
            prime = int(hashing.primes[layer_index, size - 2, head])
            distinct = len(set().union(*buckets.values()))
            name = f"layer_{layer}_{size}gram_head_{head}"
            assert distinct == sum(map(len, buckets.values())) < sum(1 for _ in live_tokens(data))
            shares.append(sum(len(inside) for inside in buckets.values() if len(inside) > 1) / distinct)
            chances.append(1 - (1 - 1 / prime) ** (distinct - 1))
            fullest = max(map(len, buckets.values()))
            assert fullest > 1
            lines.append(
                f"| {name.replace('_', ' ')} | {prime} | {distinct} | {distinct / prime:.3f} | {fullest} "
                f"| {shares[-1]:.1%} | {chances[-1]:.1%} |"
            )
    assert constants(tmp_path)["engram_buckets"].splitlines()[2:] == lines
    assert found["within/engram_collisions"] == pytest.approx(sum(shares) / 8, rel=1e-6)
    assert found["within/engram_collisions_chance"] == pytest.approx(sum(chances) / 8, rel=1e-6)
    assert len({round(share, 4) for share in shares}) > 5
    assert not [tag for tag in curves if "rows_used" in tag], "nothing trains"


class TouchedRows(L.Callback):
    """The rows that the gradients of training steps have reached, by the layers of the smallest run."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.at_step: dict[int, set[int]] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        gradient = pl_module.built.model.layers[1].engram.embed.weight.grad.to_dense()
        self.rows |= set(gradient.any(1).nonzero().flatten().tolist())
        self.at_step[trainer.global_step + 1] = set(self.rows)


def fitted(cli: DeepseekV41CLI, *callbacks: L.Callback, ckpt_path: Path | None = None) -> Any:
    cli.trainer.callbacks.extend(callbacks)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=ckpt_path)
    return cli.model


def curves_of(folder: Path, version: int = 0) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder / "runs" / "nano" / f"version_{version}"))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_used_rows_are_those_that_training_has_reached_and_survive_resuming(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path
) -> None:
    touched = TouchedRows()
    model = fitted(nano_cli("--checkpoint.keep", "-1", *NO_PICTURES), touched)
    hashing = model.built.model.engram_hash
    used = {tag: values for tag, values in curves_of(tmp_path).items() if "rows_used" in tag}
    names = [f"layer_1_{size}gram_head_{head}" for size in (2, 3) for head in (0, 1)]
    assert set(used) == {"within/engram_rows_used"} | {f"within/engram_rows_used/{name}" for name in names}
    primes, offsets = hashing.primes.flatten().tolist(), hashing.offsets.flatten().tolist()
    for index, step in enumerate((2, 4)):
        rows = touched.at_step[step]
        for name, prime, offset in zip(names, primes, offsets, strict=True):
            share = sum(offset <= row < offset + prime for row in rows) / prime
            assert used[f"within/engram_rows_used/{name}"][index] == pytest.approx(share, rel=1e-6)
        assert used["within/engram_rows_used"][index] == pytest.approx(len(rows) / sum(primes), rel=1e-6)
    assert 0 < used["within/engram_rows_used"][0] < used["within/engram_rows_used"][1] < 1
    checkpoint = tmp_path / "runs" / "nano" / "version_0" / "checkpoints" / "step-00000003.ckpt"
    fitted(nano_cli(*NO_PICTURES), ckpt_path=checkpoint)
    resumed = curves_of(tmp_path, version=1)
    assert {tag: resumed[tag] for tag in used} == {tag: values[1:] for tag, values in used.items()}


def test_rows_that_nobody_counts_are_not_logged(nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path) -> None:
    fitted(nano_cli("--model.optimizer.tables", "dense", "--trainer.max_steps", "2", *NO_PICTURES))
    curves = curves_of(tmp_path)
    assert "within/engram_gate" in curves
    assert not [tag for tag in curves if "rows_used" in tag or "collisions" in tag], "collisions stay the same"


# ------------------------------------------------------------------ mixers


def test_no_signal_grows_by_more_than_the_gain_and_one_grows_by_it() -> None:
    product = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    signals = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 4)
    streams = torch.einsum("tio,ni->tno", product, signals)  # as `expand` mixes
    gradients = torch.einsum("tio,no->tni", product, signals)
    worst = torch.stack([reached.abs().amax((1, 2)) for reached in (streams, gradients)], dim=1)
    torch.testing.assert_close(mixers_file.composite_gains(product), worst, rtol=1e-12, atol=0)


@pytest.mark.parametrize("residual", ["mhc", "hyper_connections"])
@pytest.mark.parametrize("batches", [1, 9])
def test_gains_and_residuals_equal_a_loop_over_tokens_and_sites(
    tiny_config: MakeConfig,
    golden_tokenizer: Any,
    tmp_path: Path,
    residual: str,
    batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = make_task(tiny_config(residual=residual, hc_sinkhorn_iters=2), golden_tokenizer)
    watch, shown = Watch("_hc"), Shown(monkeypatch, mixers_file)
    found = validate(tmp_path, task, make_batches(), StreamMixers(batches), watch)
    curves = scalars(tmp_path)
    sites = [f"layers.{layer}.{part}_hc" for layer in range(LAYERS) for part in ("attn", "ffn")]
    names = [f"layer_{layer}_{kind}" for layer in range(LAYERS) for kind in ("attention", "experts")]
    tokens = list(live_tokens(make_batches()[:batches]))
    gains = torch.zeros(len(sites), 2, len(tokens), dtype=torch.float64)
    residuals, combs = [0.0] * len(sites), torch.zeros(len(sites), STREAMS, STREAMS, dtype=torch.float64)
    for t, (i, b, s) in enumerate(tokens):
        composite = torch.eye(STREAMS, dtype=torch.float64)
        for n, site in enumerate(sites):
            comb = watch.seen[site][i][1][3][b, s].double()
            composite = comb.t() @ composite  # new streams = comb^T streams
            gains[n, 0, t] = max(float(row.abs().sum()) for row in composite)
            gains[n, 1, t] = max(float(column.abs().sum()) for column in composite.t())
            combs[n] += comb / len(tokens)
            sums = [float(line.sum()) for line in (*comb, *comb.t())]
            residuals[n] = max(residuals[n], *(abs(one - 1) for one in sums))
    for way, name in enumerate(("forward", "backward")):
        assert found[f"within/{name}_gain"] == pytest.approx(float(gains[-1, way].mean()), rel=1e-6)
        assert found[f"within/{name}_gain_worst"] == pytest.approx(float(gains[-1, way].max()), rel=1e-6)
    for site, value in zip(names, residuals, strict=True):
        assert curves[f"within/sinkhorn_residual/{site}"] == pytest.approx(value, rel=1e-5)
    assert found["within/sinkhorn_residual"] == pytest.approx(max(residuals), rel=1e-5)
    if residual == "mhc":
        assert found["within/forward_gain_worst"] < 1.01 < found["within/backward_gain_worst"] < 2
        assert 1e-4 < found["within/sinkhorn_residual"] < 1
    else:
        assert found["within/forward_gain"] > 10, "without the projection, signals grow"
    mixing, growth = shown.figures["mixers/comb"], shown.figures["mixers/gain"]
    axes, bar = mixing.axes
    drawn_combs = torch.tensor(axes.images[0].get_array().filled(math.nan))
    assert drawn_combs.shape == (2 * 5 - 1, LAYERS * 5 - 1)
    for n, comb in enumerate(combs):
        layer, kind = divmod(n, 2)
        block = drawn_combs[5 * kind : 5 * kind + 4, 5 * layer : 5 * layer + 4]
        torch.testing.assert_close(block, comb, rtol=1e-6, atol=1e-12)
    assert drawn_combs.isnan().sum() == drawn_combs.numel() - combs.numel()
    limits = (min(0.0, float(combs.min())), max(1.0, float(combs.max())))
    assert axes.images[0].get_clim() == pytest.approx(limits)
    assert list(zip(axes.get_yticks(), texts(axes.get_yticklabels()), strict=True)) == [
        (1.5, "attention"),
        (6.5, "experts"),
    ]
    ticks = zip(axes.get_xticks(), texts(axes.get_xticklabels()), strict=True)
    assert list(ticks) == [(1.5 + 5 * layer, str(layer)) for layer in range(LAYERS)]
    assert bar.get_ylabel() == "weight"
    (axes,) = growth.axes
    assert texts(axes.get_xticklabels()) == [name.replace("_", " ") for name in names]
    drawn = {line.get_label(): torch.tensor(line.get_ydata()) for line in axes.lines}
    for way, name in enumerate(("forward", "backward")):
        torch.testing.assert_close(drawn[f"{name}, mean over tokens"], gains[:, way].mean(-1), rtol=1e-6, atol=0)
        torch.testing.assert_close(drawn[f"{name}, largest"], gains[:, way].amax(-1), rtol=1e-6, atol=0)
    assert axes.get_yscale() == ("linear" if residual == "mhc" else "log")
    assert growth.get_suptitle() == "composite gain of the mixers up to each site"


# ------------------------------------------------------------------ experts


@pytest.mark.parametrize("batches", [1, 9])
def test_loads_equal_a_loop_over_visits(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, watch = make_task(tiny_config(), golden_tokenizer), Watch(".ffn.gate")
    shown = Shown(monkeypatch, load_file)
    found = validate(tmp_path, task, make_batches(), ExpertLoad(batches), watch)
    curves = scalars(tmp_path)
    worst, entropies, relative = [], [], []
    for layer in range(LAYERS):
        visits = Counter[int]()
        for i, b, s in live_tokens(make_batches()[:batches]):
            visits.update(watch.seen[f"layers.{layer}.ffn.gate"][i][1].experts[24 * b + s].tolist())
        shares = [visits[expert] / visits.total() for expert in range(EXPERTS)]
        relative.append([share * EXPERTS for share in shares])
        worst.append(max(relative[-1]))
        entropies.append(-sum(share * math.log(share) for share in shares if share) / math.log(EXPERTS))
        assert curves[f"within/expert_imbalance/layer_{layer}"] == pytest.approx(worst[-1], rel=1e-6)
        assert curves[f"within/expert_idlest/layer_{layer}"] == pytest.approx(min(relative[-1]), rel=1e-6)
        assert curves[f"within/expert_entropy/layer_{layer}"] == pytest.approx(entropies[-1], rel=1e-6)
    assert found["within/expert_imbalance"] == pytest.approx(sum(worst) / LAYERS, rel=1e-6)
    assert found["within/expert_entropy"] == pytest.approx(sum(entropies) / LAYERS, rel=1e-6)
    assert len({round(value, 4) for value in worst + entropies}) > 6
    figure = shown.figures["expert_load"]
    axes, bar = figure.axes
    torch.testing.assert_close(torch.tensor(axes.images[0].get_array().data), torch.tensor(relative).double())
    assert texts(axes.get_xticklabels()) == [str(expert) for expert in range(EXPERTS)]
    assert texts(axes.get_yticklabels()) == [str(layer) for layer in range(LAYERS)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("expert", "layer")
    assert bar.get_ylabel() == "load / mean of the layer"
    assert figure.get_suptitle() == "load of experts in validation"


def test_an_even_load_has_entropy_one_and_a_single_expert_none() -> None:
    load = torch.tensor([[5, 5, 5, 5], [0, 9, 0, 0], [1, 1, 0, 0]])
    assert load_file.load_entropy(load).tolist() == pytest.approx([1.0, 0.0, 0.5])


# ------------------------------------------------------------------ all of them

IMAGES = {
    "within/engram_gate/layer_1",
    "within/engram_gate/layer_3",
    "within/mixers/comb",
    "within/mixers/gain",
    "within/expert_load",
}


VALIDATION = {"val/loss", "val/perplexity", "val/bits_per_byte"}


def test_everything_is_in_tensorboard_at_the_step_of_the_loss(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path
) -> None:
    fitted(nano_cli("--trainer.num_sanity_val_steps", "1", *PICTURES))
    events = EventAccumulator(
        str(tmp_path / "runs" / "nano" / "version_0"), size_guidance={"images": 0, "histograms": 0}
    )
    events.Reload()
    tags = events.Tags()
    assert set(tags["images"]) == IMAGES - {"within/engram_gate/layer_3"}
    assert set(tags["histograms"]) == {f"within/engram_gate/layer_1_stream_{stream}" for stream in range(4)}
    steps = [event.step for event in events.Scalars("val/loss")]
    assert len(steps) == 2
    names = ("engram_gate", "engram_rows_used", "forward_gain", "expert_entropy", "indexer_recall")
    for tag in (
        *(f"within/{name}" for name in names),
        "within/expert_entropy/layer_3",
        "within/engram_rows_used/layer_1_3gram_head_1",
    ):
        assert [event.step for event in events.Scalars(tag)] == steps, tag
    texts = {f"within/constants/{name}/text_summary" for name in ("engram_buckets", "unigram_entropy")}
    constant = {tag for tag in tags["tensors"] if tag.startswith("within/")}
    assert constant == texts | {"within/constants/indexer_recall_chance/text_summary"}
    assert all(len(events.Tensors(tag)) == 1 for tag in constant), "once, not at every validation"
    assert {tag.split("/")[0] for tag in tags["scalars"]} == {"epoch", "train", "val", "within"}
    assert {tag for tag in tags["scalars"] if tag.startswith("val/")} == VALIDATION
    for tag in tags["images"]:
        assert [event.step for event in events.Images(tag)] == steps, tag
    assert [event.step for event in events.Histograms("within/engram_gate/layer_1_stream_0")] == steps


def test_pictures_are_drawn_without_an_option() -> None:
    config = Parsed(["--config", str(Path(__file__).parents[3] / "configs" / "tiny.yaml")]).config
    assert [config[name].pictures for name in ("engram_gates", "stream_mixers", "expert_load")] == [True] * 3


def test_options_switch_each_of_them_off(nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path) -> None:
    off = [f"--{name}.batches=0" for name in ("engram_gates", "engram_memory", "stream_mixers", "expert_load")]
    model = fitted(nano_cli(*off, "--trainer.max_steps", "2"))
    left = {tag for tag in curves_of(tmp_path) if not tag.startswith(("train/", "within/update_ratio", "within/grad"))}
    recall = {tag for tag in left if tag.startswith("within/indexer_recall")}
    assert left - recall == VALIDATION | {"epoch", "within/experts/imbalance", "within/experts/imbalance_worst"}
    assert hooks(model) == 0


def everything(batches: int = 9, **options: Any) -> list[ValidationObserver]:
    return [
        kind(batches) if kind is EngramMemory else kind(batches, **options)  # type: ignore[call-arg]
        for kind in OBSERVERS
    ]


def test_looking_changes_no_bit_of_what_the_model_gives(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path
) -> None:
    task = make_task(tiny_config(), golden_tokenizer)
    without, looked_at = Watch("norm"), Watch("norm")
    plain = validate(tmp_path, task, make_batches(), without, precision="32-true")
    found = validate(tmp_path, task, make_batches(), *everything(), looked_at, precision="32-true")
    assert {name: value for name, value in found.items() if name in plain} == plain
    assert without.seen.keys() == looked_at.seen.keys() >= {"norm"}
    for name, results in without.seen.items():
        for ours, theirs in zip(results, looked_at.seen[name], strict=True):
            assert torch.equal(ours[1], theirs[1]), name
    assert without.hooks_while_running == 0
    assert looked_at.hooks_while_running == 2 * 2 + 1 + 2 * LAYERS + LAYERS
    assert looked_at.state.keys() == without.state.keys()
    assert all(torch.equal(value, looked_at.state[name]) for name, value in without.state.items())
    assert set(board(tmp_path).Tags()["images"]) == IMAGES


def test_looking_changes_no_bit_of_a_training_that_recomputes(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path
) -> None:
    recompute = ("--model.backend.gradient_checkpointing", "true", "--trainer.max_steps", "3")
    off = [f"--{name}.batches=0" for name in ("engram_gates", "engram_memory", "stream_mixers", "expert_load")]
    looked_at, alone = fitted(nano_cli(*recompute, *PICTURES)), fitted(nano_cli(*recompute, *off))
    ours, theirs = looked_at.state_dict(), alone.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    seen, unseen = curves_of(tmp_path), curves_of(tmp_path, version=1)
    assert len(seen) > len(unseen) + 20
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert seen[tag] == unseen[tag]


def test_the_gate_that_the_model_calls_is_left_alone(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be compiled, so nobody else calls it, and what is shown follows from the same function."""
    calls = []

    def compiled(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return engram_gate.gate_memory(*arguments)

    task = make_task(tiny_config(), golden_tokenizer, backend=BackendConfig())
    eager = validate(tmp_path, task, make_batches(), *everything(pictures=False))
    monkeypatch.setitem(engram_gate.IMPLEMENTATIONS, "eager", compiled)
    assert validate(tmp_path, task, make_batches(), *everything(pictures=False)) == eager
    assert len(calls) == len(ENGRAM_LAYERS) * 3


def test_hooks_are_gone_after_a_validation_and_the_next_counts_anew(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path
) -> None:
    task, observers = make_task(tiny_config(), golden_tokenizer), everything(2, pictures=False)
    first = validate(tmp_path, task, make_batches(), *observers)
    assert hooks(task) == 0
    assert validate(tmp_path, task, make_batches(), *observers) == first
    other = validate(tmp_path, task, make_batches()[1:], *observers)
    assert hooks(task) == 0
    assert other == validate(tmp_path, task, make_batches()[1:], *everything(2, pictures=False))
    for name in ("engram_gate", "engram_collisions", "backward_gain", "expert_entropy"):
        assert other[f"within/{name}"] != first[f"within/{name}"], name


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_are_gone_after_an_exception(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path, error: type[BaseException]
) -> None:
    class Failing(L.Callback):
        def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            assert hooks(task) > 20
            raise error

    task, observers = make_task(tiny_config(), golden_tokenizer), everything(pictures=False)
    with pytest.raises((error, SystemExit)):
        validate(tmp_path, task, make_batches(1), *observers, Failing())
    assert hooks(task) == 0
    assert "within/engram_gate" in validate(tmp_path, task, make_batches(1), *observers)


def test_there_is_nothing_to_see_in_a_model_without_the_parts(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path
) -> None:
    task = make_task(
        tiny_config(residual="plain", hc_mult=1, engram_layer_ids=[], engram_num_embeddings=[]), golden_tokenizer
    )
    found = validate(tmp_path, task, make_batches(), *everything())
    assert {"within/expert_entropy", "within/expert_imbalance"} < found.keys()
    assert not [name for name in found if "engram" in name or "gain" in name or "sinkhorn" in name]
    assert board(tmp_path).Tags()["images"] == ["within/expert_load"]
    open_gate = make_task(tiny_config(engram_gate="open"), golden_tokenizer)
    found = validate(None, open_gate, make_batches(), *everything())
    assert "within/engram_collisions" in found
    assert "within/engram_gate" not in found


def test_padding_alone_is_no_number(tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path) -> None:
    (batch,) = make_batches(1)
    batch["attention_mask"][:] = 0
    batch["labels"][:] = IGNORE_INDEX
    found = validate(tmp_path, make_task(tiny_config(), golden_tokenizer), [batch], *everything())
    assert set(found) == {"val/loss", "val/perplexity", "val/bits_per_byte"}
    assert not board(tmp_path).Tags()["images"]


def test_without_tensorboard_there_are_numbers_only(
    tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path
) -> None:
    task = make_task(tiny_config(), golden_tokenizer)
    first = validate(None, task, make_batches(1), *everything())
    trainer = make_trainer(None, *everything(), precision="64-true")
    trainer.loggers = [CSVLogger(tmp_path, "csv", version=0)]
    trainer.validate(task, DataLoader(make_batches(1), batch_size=None), verbose=False)  # type: ignore[arg-type]
    assert {
        "within/engram_gate",
        "within/engram_collisions",
        "within/forward_gain",
        "within/expert_entropy",
    } < first.keys()
    header = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()
    assert "within/engram_gate_mean/layer_1_stream_0" in header


def test_pictures_are_left_out_on_demand(tiny_config: MakeConfig, golden_tokenizer: Any, tmp_path: Path) -> None:
    validate(tmp_path, make_task(tiny_config(), golden_tokenizer), make_batches(1), *everything(pictures=False))
    tags = board(tmp_path).Tags()
    assert not tags["images"]
    assert len(tags["histograms"]) == 8
    assert "within/forward_gain" in tags["scalars"]


@pytest.mark.parametrize("kind", OBSERVERS)
def test_fewer_than_no_batches_are_an_error(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^batches: must be at least 0, got -1$"):
        kind(-1)
