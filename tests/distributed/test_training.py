"""Training gives the same on one process, on one rank of the strategy, on 2 and on 3 ranks, and after resuming.

3 ranks run only what depends on how many rows a rank has.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from torch import Tensor
from training_runs import STEPS, Runs, live_labels, require_same_end, without_rates, worst

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.config import IGNORE_INDEX
from lightning_modules.checkpoint.sharded import read_whole
from lightning_modules.cli import get_cli
from lightning_modules.data.sampler import Position, ResumableBatchSampler
from lightning_modules.transfer.export import Format, export_checkpoint


def gradients_by_hand(runs: Runs, batch_size: int, batches: int) -> dict[str, Tensor]:
    """One process, no Lightning loop: the gradient of the mean over all live tokens of the first batches."""
    cli = runs.cli("--data.batch_size", str(batch_size))
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


@pytest.mark.parametrize(
    ("check", "batch_size", "batches", "clip", "numbers"),
    [("sgd", 5, 1, None, (None, 1, 2, 3)), ("accumulated", 3, 4, 0.01, (None, 1, 2))],
    ids=["sgd", "accumulated"],
)
def test_the_first_gradient_is_that_of_a_plain_loop(
    runs: Runs, check: str, batch_size: int, batches: int, clip: float | None, numbers: tuple[int | None, ...]
) -> None:
    expected = gradients_by_hand(runs, batch_size, batches)
    assert len(expected) > 60
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    if clip is not None:
        assert norm > 2 * clip
        expected = {name: gradient * clip / (norm + 1e-6) for name, gradient in expected.items()}
    for ranks in numbers:
        assert worst(runs(ranks, check)["gradients"], expected) < 1e-12, ranks
        assert runs.curves(ranks, check)["train/grad_norm"][0][1] == pytest.approx(float(norm), rel=1e-6)


TRAINED = [*((2, check) for check in ("sgd", "accumulated", "clipped", "muon", "learning")), (3, "sgd")]


@pytest.mark.parametrize(("ranks", "check"), TRAINED)
def test_training_ends_at_the_same_parameters(runs: Runs, ranks: int, check: str) -> None:
    ours, plain = runs(ranks, check), runs(None, check)
    for part in ("parameters", "buffers", "optimizer"):
        assert worst(ours[part], plain[part]) < 1e-9, part


@pytest.mark.parametrize("check", ["sgd", "accumulated"])
def test_one_rank_of_the_strategy_is_bit_equal_to_a_plain_run(runs: Runs, check: str) -> None:
    ours, plain = runs(1, check), runs(None, check)
    for part in ("gradients", "parameters", "buffers", "optimizer"):
        assert worst(ours[part], plain[part]) == 0, part
    assert without_rates(runs.curves(1, check)) == without_rates(runs.curves(None, check))


@pytest.mark.parametrize(("ranks", "check"), TRAINED)
def test_curves_in_the_event_files_are_the_same(runs: Runs, ranks: int, check: str) -> None:
    runs(ranks, check), runs(None, check)
    ours, plain = (without_rates(runs.curves(number, check)) for number in (ranks, None))
    needed = {"train/loss", "train/grad_norm", "train/tokens", "val/loss", "val/perplexity"}
    needed |= {f"within/grad_norm/{part}" for part in ("engram_tables", "mhc", "router", "rest")}
    assert ours.keys() == plain.keys() >= needed
    for tag, values in plain.items():
        assert [step for step, _ in ours[tag]] == [step for step, _ in values]
        assert [value for _, value in ours[tag]] == pytest.approx([value for _, value in values], rel=1e-6), tag
    if check == "accumulated":
        assert min(value for _, value in plain["train/grad_norm"]) > 0.01, "the norm has to be clipped in every step"


def test_every_precision_trains_alike_and_stores_fp32(runs: Runs) -> None:
    losses = {}
    for check in ("fp32", "policy", "autocast"):
        assert runs(2, check)["dtype"] == torch.float32
        losses[check] = runs.curves(2, check)["train/loss"][-1][1]
    assert losses["policy"] != losses["fp32"] != losses["autocast"], "bf16 has to have been used"
    assert losses["policy"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["autocast"] == pytest.approx(losses["fp32"], rel=2e-2)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("check", "ranks"), [("saved", 2), ("pretrained", None), ("pretrained", 2), ("muon", 2)], ids=str
)
def test_resuming_on_the_same_ranks_ends_the_same_bit_for_bit(runs: Runs, check: str, ranks: int | None) -> None:
    require_same_end(runs.resumed(ranks, check, saved_by=ranks), runs(ranks, check))


@pytest.mark.parametrize(("ranks", "saved_by"), [(2, None), (3, 2), (1, 2), (None, 2)])
def test_a_run_resumes_on_another_number_of_ranks(runs: Runs, ranks: int | None, saved_by: int | None) -> None:
    ours, unbroken = runs.resumed(ranks, "saved", saved_by), runs(None, "saved")
    for part in ("parameters", "buffers", "optimizer"):
        assert worst(ours[part], unbroken[part]) < 1e-9, part
    tables = {n for n in ours["parameters"] if n.endswith("engram.embed.weight")}
    assert {n for n in ours["parameters"] if f"{n}/hits" in ours["optimizer"]} == tables
    for name in tables:
        hits = ours["optimizer"][f"{name}/hits"]
        assert {int(count) for count in hits.unique()} >= {0, 1, 6}, "rows read in none, one, and each of six steps"
    without_state = {n for n in ours["parameters"] if f"{n}/exp_avg" not in ours["optimizer"]}
    assert without_state == {n for n in ours["parameters"] if ".indexer." in n}, "these never get a gradient"


def test_a_single_file_resumes_without_the_strategy(runs: Runs) -> None:
    """In fp32, so to rounding. With the strategy: `test_checkpoints.py`."""
    ours, unbroken = runs.resumed(None, "one_file", saved_by=2), runs(2, "one_file")
    assert runs.checkpoint(2, "one_file", 3).is_file()
    assert worst(ours["parameters"], unbroken["parameters"]) < 1e-3
    assert ours["optimizer"].keys() == unbroken["optimizer"].keys()


def test_training_from_a_folder_of_weights_is_the_same_on_two_ranks(runs: Runs) -> None:
    ours, plain = runs(2, "pretrained"), runs(None, "pretrained")
    for part in ("gradients", "parameters", "optimizer"):
        assert worst(ours[part], plain[part]) < 1e-9, part
    drawn = runs(None, "saved")
    assert worst(plain["gradients"], drawn["gradients"]) > 1e-2, "other weights than those drawn from the seed"


@pytest.mark.parametrize("layout", ["released", "hf"])
def test_one_process_exports_what_two_ranks_saved(runs: Runs, layout: Format, tmp_path: Path) -> None:
    runs(2, "saved")
    path = runs.checkpoint(2, "saved", 6)
    assert path.is_dir()
    export_checkpoint(str(path), str(tmp_path / "out"), layout, tokenizer=str(runs.released))
    model = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "out")
    saved = read_whole(path)["state_dict"]
    own = model.state_dict()
    assert own["lm_head.weight"].dtype == torch.float64
    assert {f"model.{name}" for name in own} == saved.keys()
    for name, value in own.items():
        assert torch.equal(value, saved[f"model.{name}"]), name
    assert "| optimizer steps | 6 |" in (tmp_path / "out" / "README.md").read_text()


# ---------------------------------------------------------------------- the launcher


def fit(options: list[str]) -> None:
    """The run that the command line makes of these options."""
    cli = get_cli(options, run=False)
    cli.trainer.fit(cli.model, cli.datamodule)


def test_two_ranks_of_torchrun_end_where_one_process_does(
    make_nano_args: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """The line of the README; all other tests fork their ranks."""
    ends: list[dict[str, Any]] = []
    for name in ("plain", "launched"):
        folder = tmp_path / name
        folder.mkdir()
        options = [*make_nano_args(folder), *STEPS, "--trainer.precision", "64-true"]
        if name == "plain":
            run(fit, None, options=options)
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            strategy = ["--trainer.strategy", "engram_fsdp", "--trainer.devices", "2"]
            command += ["-m", "lightning_modules", "fit", *options, *strategy]
            done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
            assert done.returncode == 0, done.stderr[-6000:]
        path = folder / "runs" / "nano" / "version_0" / "checkpoints" / "step-00000006.ckpt"
        assert path.is_dir() == (name == "launched")
        ends.append(read_whole(path)["state_dict"] if path.is_dir() else torch.load(path)["state_dict"])
    plain, launched = ends
    floating = {name for name, value in plain.items() if value.is_floating_point()}
    assert worst({n: launched[n] for n in floating}, {n: plain[n] for n in floating}) < 1e-9
