"""Training, checkpoints and evaluation give the same on one process, on one rank of the strategy, on 2 and on 3 ranks.

What runs on the ranks is in `training_checks.py`. The launches depend on each other's checkpoints, so they are made
once, one after the other:

    plain   one process without the strategy     trains, saves one file
    two     2 ranks                              trains, saves, goes on from its own and from the plain run's
    three   3 ranks                              trains, saves, goes on from its own and from what 2 ranks saved
    back    2 ranks                              goes on from what 3 ranks saved
    one     1 rank of the strategy               trains, goes on from what 3 ranks saved
    alone   one process without the strategy     goes on from what 2 and 3 ranks saved
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import save_released
from dsv41.config import IGNORE_INDEX
from lightning_modules.checkpoint.sharded import read_whole
from lightning_modules.cli import get_cli
from lightning_modules.data.sampler import Position, ResumableBatchSampler
from lightning_modules.transfer.export import Format, export_checkpoint

pytestmark = pytest.mark.timeout(1800)

SCRIPT = Path(__file__).with_name("training_checks.py")
# What each launch runs, in this order: ranks (None is without the strategy) and checks.
PLAN: dict[str, tuple[int | None, str]] = {
    "plain": (None, "sgd,accumulated,clipped,evaluated,saved,pretrained,muon,learning"),
    "two": (
        2,
        "sgd,accumulated,clipped,evaluated,resumed,one_file,stateless,precisions,pretrained,muon,rules,learning,"
        "from:plain/saved",
    ),
    "three": (3, "sgd,accumulated,evaluated,resumed,muon,rules,learning,from:two/saved"),
    "back": (2, "from:three/saved,from:two/one_file"),
    "one": (1, "sgd,accumulated,evaluated,from:three/saved"),
    "alone": (None, "from:two/saved,from:three/saved,from:two/one_file"),
}


@pytest.fixture(scope="module")
def options(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of every run: the smallest configuration in float64."""
    return [*make_nano_args(tmp_path_factory.mktemp("options")), "--trainer.precision", "64-true"]


@pytest.fixture(scope="module")
def launches(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder per launch."""
    base = tmp_path_factory.mktemp("launches")
    task = get_cli(options, run=False).model
    torch.manual_seed(7)
    model = DeepseekV41ForCausalLM(DeepseekV41Config(text_config=task.text_config), tokenizer=task.tokenizer)
    save_released(model, base / "released", quantized=True)
    for name, (ranks, checks) in PLAN.items():
        (base / name).mkdir()
        command, extra = [sys.executable], []
        if ranks is not None:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            extra = ["--trainer.strategy", "engram_fsdp", "--trainer.devices", str(ranks)]
        done = subprocess.run(
            [*command, str(SCRIPT), str(base / name), checks, *options, *extra],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{name}:\n{done.stderr[-8000:]}"
    return base


def found(launches: Path, launch: str, check: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(launches / launch / f"{check}.pt", weights_only=True)
    return loaded


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest relative L2 distance of any tensor; both have the same names."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - value).norm() / value.norm().clamp_min(1e-30)) if value.norm() else float(ours[name].norm())
        for name, value in theirs.items()
    )


def curves(launches: Path, launch: str, check: str) -> dict[str, list[tuple[int, float]]]:
    folder = launches / launch / "runs" / check / "version_0"
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def live_labels(row_ids: Tensor, length: int) -> Tensor:
    """As in `training_checks.py`, which is not importable from here."""
    return 3 + (row_ids * 11) % (length - 3)


def gradients_by_hand(options: list[str], batch_size: int, batches: int) -> dict[str, Tensor]:
    """One process, no Lightning loop: the gradient of the mean over all live tokens of the first batches."""
    cli = get_cli([*options, "--data.batch_size", str(batch_size)], run=False)
    data, task = cli.datamodule, cli.model
    data.setup("fit")
    rows = data.dataset("train")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = DeepseekV41ForCausalLM(DeepseekV41Config(text_config=task.text_config), tokenizer=task.tokenizer)
    finally:
        torch.set_default_dtype(torch.float32)
    sampler = ResumableBatchSampler(len(rows), batch_size, data.seed, lambda: Position(0, 0))
    numbers = [row for batch in list(sampler)[:batches] for row in batch]
    nats, tokens = torch.zeros((), dtype=torch.float64), 0
    for number in numbers:
        row = rows[number]
        labels = row["labels"].clone()
        labels[live_labels(row["row_id"], len(labels)) :] = IGNORE_INDEX
        live = int((labels[1:] != IGNORE_INDEX).sum())
        logits = model(row["input_ids"][None], attention_mask=row["attention_mask"][None]).logits[0]
        picked = [logits[p].log_softmax(-1)[label] for p, label in enumerate(labels[1:]) if label != IGNORE_INDEX]
        nats, tokens = nats - sum(picked, torch.zeros(())), tokens + live
    (nats / tokens).backward()
    return {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("check", "batch_size", "batches", "clip"), [("sgd", 5, 1, None), ("accumulated", 3, 4, 0.01)])
def test_the_first_gradient_is_that_of_a_plain_loop(
    launches: Path, options: list[str], check: str, batch_size: int, batches: int, clip: float | None
) -> None:
    expected = gradients_by_hand(options, batch_size, batches)
    assert len(expected) > 60
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    if clip is not None:
        assert norm > 2 * clip
        expected = {name: gradient * clip / (norm + 1e-6) for name, gradient in expected.items()}
    for launch in ("plain", "one", "two", "three"):
        assert worst(found(launches, launch, check)["gradients"], expected) < 1e-12, launch
        assert curves(launches, launch, check)["train/grad_norm"][0][1] == pytest.approx(float(norm), rel=1e-6)


TRAINED = [
    *(("two", check) for check in ("sgd", "accumulated", "clipped", "muon", "learning")),
    *(("three", check) for check in ("sgd", "accumulated", "muon", "learning")),
]


@pytest.mark.parametrize(("launch", "check"), TRAINED)
def test_training_ends_at_the_same_parameters(launches: Path, launch: str, check: str) -> None:
    ours, plain = found(launches, launch, check), found(launches, "plain", check)
    for part in ("parameters", "buffers", "optimizer"):
        assert worst(ours[part], plain[part]) < 1e-9, part


@pytest.mark.parametrize("check", ["sgd", "accumulated"])
def test_one_rank_of_the_strategy_is_bit_equal_to_a_plain_run(launches: Path, check: str) -> None:
    ours, plain = found(launches, "one", check), found(launches, "plain", check)
    for part in ("gradients", "parameters", "buffers", "optimizer"):
        assert worst(ours[part], plain[part]) == 0, part
    assert without_rates(curves(launches, "one", check)) == without_rates(curves(launches, "plain", check))


# What depends on the machine, and on how much of the model it holds.
OF_THE_MACHINE = ("train/tokens_per_sec", "train/mfu", "train/peak_memory_mb")


def without_rates(found: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Curves that do not depend on the machine."""
    return {tag: values for tag, values in found.items() if tag not in OF_THE_MACHINE}


@pytest.mark.parametrize(("launch", "check"), TRAINED)
def test_curves_in_the_event_files_are_the_same(launches: Path, launch: str, check: str) -> None:
    ours, plain = (without_rates(curves(launches, name, check)) for name in (launch, "plain"))
    needed = {"train/loss", "train/grad_norm", "train/tokens", "val/loss", "val/perplexity"}
    needed |= {f"within/grad_norm/{part}" for part in ("engram_tables", "mhc", "router", "rest")}
    assert ours.keys() == plain.keys() >= needed
    for tag, values in plain.items():
        assert [step for step, _ in ours[tag]] == [step for step, _ in values]
        assert [value for _, value in ours[tag]] == pytest.approx([value for _, value in values], rel=1e-6), tag
    if check == "accumulated":
        assert min(value for _, value in plain["train/grad_norm"]) > 0.01, "the norm has to be clipped in every step"


@pytest.mark.parametrize("launch", ["one", "two", "three"])
def test_evaluation_counts_every_row_once(launches: Path, launch: str) -> None:
    ours, plain = found(launches, launch, "evaluated"), found(launches, "plain", "evaluated")
    assert ours.keys() == plain.keys()
    assert {"fit/val/loss", "validate/val/loss", "test/test/loss", "best/val/loss", "again/val/loss"} <= plain.keys()
    for name, value in plain.items():
        if name != "predicted rows" and not name.endswith(OF_THE_MACHINE):
            assert ours[name] == pytest.approx(value, rel=1e-6), name
    assert plain["validate/val/loss"] == plain["best/val/loss"] == plain["fit/val/loss"]
    assert plain["again/val/loss"] != plain["fit/val/loss"]
    ranks = {"one": 1, "two": 2, "three": 3}[launch]
    mine = [row for row in ours["predicted rows"] if row >= 0]
    batches = [plain["predicted rows"][start : start + 5] for start in range(0, len(plain["predicted rows"]), 5)]
    assert mine == [row for batch in batches for row in batch[::ranks]]  # those of rank 0


@pytest.mark.parametrize("launch", ["one", "two", "three"])
def test_the_file_of_predictions_has_every_row_in_its_order(launches: Path, launch: str) -> None:
    ours, plain = (
        torch.load(next((launches / name / "runs").rglob("predictions.pt")), weights_only=True)
        for name in (launch, "plain")
    )
    assert torch.equal(plain["row_id"], torch.arange(len(plain["row_id"])))
    assert torch.equal(ours["row_id"], plain["row_id"])
    assert torch.equal(ours["next_token"], plain["next_token"])
    assert torch.allclose(ours["log_probability"], plain["log_probability"], rtol=1e-9)


def test_one_device_without_the_strategy_evaluates_what_three_ranks_saved(launches: Path, options: list[str]) -> None:
    best = launches / "three" / "runs" / "evaluated" / "version_0" / "checkpoints" / "best.ckpt"
    assert best.is_dir()
    every_row = ("--trainer.limit_val_batches", "1.0", "--trainer.logger", "false")
    cli = get_cli([*options, *every_row], run=False)
    (metrics,) = cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=str(best), verbose=False)
    # The best is that of the second fit, which the "again" values are about.
    assert metrics["val/loss"] == pytest.approx(found(launches, "three", "evaluated")["again/val/loss"], rel=1e-6)


def test_every_precision_trains_alike_and_stores_fp32(launches: Path) -> None:
    losses = {}
    for name in ("fp32", "policy", "autocast"):
        check = f"precision_{name}"
        assert found(launches, "two", check)["dtype"]["parameters"].dtype == torch.float32
        losses[name] = curves(launches, "two", check)["train/loss"][-1][1]
    assert losses["policy"] != losses["fp32"] != losses["autocast"], "bf16 has to have been used"
    assert losses["policy"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["autocast"] == pytest.approx(losses["fp32"], rel=2e-2)


@pytest.mark.parametrize(
    ("launch", "check"),
    [
        ("two", "from_plain_saved"),
        ("three", "from_two_saved"),
        ("back", "from_three_saved"),
        ("one", "from_three_saved"),
        ("alone", "from_two_saved"),
        ("alone", "from_three_saved"),
    ],
)
def test_a_run_goes_on_on_another_number_of_ranks(launches: Path, launch: str, check: str) -> None:
    """The checks themselves hold resuming on the same number to bit-equality."""
    ours, unbroken = found(launches, launch, check), found(launches, "plain", "saved")
    for part in ("parameters", "buffers", "optimizer"):
        assert worst(ours[part], unbroken[part]) < 1e-9, part
    tables = {n for n in ours["parameters"] if n.endswith("engram.embed.weight")}
    assert {n for n in ours["parameters"] if f"{n}/hits" in ours["optimizer"]} == tables
    for name in tables:
        hits = ours["optimizer"][f"{name}/hits"]
        assert {int(count) for count in hits.unique()} >= {0, 1, 6}, "rows read in none, one, and each of six steps"
    without_state = {n for n in ours["parameters"] if f"{n}/exp_avg" not in ours["optimizer"]}
    assert without_state == {n for n in ours["parameters"] if ".indexer." in n}, "these never get a gradient"


@pytest.mark.parametrize("launch", ["back", "alone"])
def test_a_single_file_goes_on_with_and_without_the_strategy(launches: Path, launch: str) -> None:
    """In fp32, since 64-true is only accepted with the strategy's defaults; so to rounding."""
    ours, unbroken = found(launches, launch, "from_two_one_file"), found(launches, "two", "one_file")
    assert worst(ours["parameters"], unbroken["parameters"]) < 1e-3
    assert ours["optimizer"].keys() == unbroken["optimizer"].keys()


def test_training_from_a_folder_of_weights_is_the_same_on_two_ranks(launches: Path) -> None:
    ours, plain = found(launches, "two", "pretrained"), found(launches, "plain", "pretrained")
    for part in ("gradients", "parameters", "optimizer"):
        assert worst(ours[part], plain[part]) < 1e-9, part
    drawn = found(launches, "plain", "saved")
    assert worst(plain["gradients"], drawn["gradients"]) > 1e-2, "other weights than those drawn from the seed"


@pytest.mark.parametrize("layout", ["released", "hf"])
def test_one_process_exports_what_two_ranks_saved(launches: Path, layout: Format, tmp_path: Path) -> None:
    path = launches / "two" / "runs" / "saved" / "version_0" / "checkpoints" / "step-00000006.ckpt"
    assert path.is_dir()
    export_checkpoint(str(path), str(tmp_path / "out"), layout, tokenizer=str(launches / "released"))
    model = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "out")
    saved = read_whole(path)["state_dict"]
    own = model.state_dict()
    assert own["lm_head.weight"].dtype == torch.float64
    assert {f"model.{name}" for name in own} == saved.keys()
    for name, value in own.items():
        assert torch.equal(value, saved[f"model.{name}"]), name
    assert "| optimizer steps | 6 |" in (tmp_path / "out" / "README.md").read_text()
