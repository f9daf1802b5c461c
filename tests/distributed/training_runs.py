"""Trainings of the smallest run in float64, on one process or on forked ranks, and what is kept of their ends.

Rows have different numbers of live tokens, so that ranks and micro-batches differ widely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from ranks import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsv41.config import IGNORE_INDEX
from lightning_modules.cli import DeepseekV41CLI, get_cli
from lightning_modules.task import Batch, DeepseekV41Task

Values = dict[str, Tensor]
Curves = dict[str, list[tuple[int, float]]]


def live_labels(row_ids: Tensor, length: int) -> Tensor:
    """How many labels of each row count, 3 to `length`."""
    return 3 + (row_ids * 11) % (length - 3)


class UnevenTask(DeepseekV41Task):
    """Rows with different numbers of live tokens, trained by AdamW, or by SGD, in which no constant factor can hide."""

    sgd = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch["labels"]
        keep = live_labels(batch["row_id"].clamp_min(0), labels.shape[1])
        dead = torch.arange(labels.shape[1]) >= keep.unsqueeze(-1)
        return super().training_step(batch | {"labels": labels.masked_fill(dead, IGNORE_INDEX)}, batch_idx)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        if self.trainer.global_step == 0:
            self.first_gradients = whole({n: p.grad for n, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> Any:
        if not self.sgd:
            return super().configure_optimizers()
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def collected(value: Tensor) -> Tensor:
    """The whole of a tensor, dense; of a row-sparse one each rank has its rows."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if value.is_sparse:
        value = value.to_dense()
        if dist.is_initialized():
            dist.all_reduce(value)
    return value


def whole(values: dict[str, Tensor]) -> Values:
    """Every rank collects; plain tensors, copied."""
    return {name: collected(value.detach()).double().clone() for name, value in values.items()}


class Recorder(L.Callback):
    """Keeps the first step's gradients, as the optimizer sees them, and the end of the run."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.found["gradients"] = getattr(module, "first_gradients", {})
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.found["parameters"] = whole({name: parameter for parameter, name in names.items()})
        self.found["buffers"] = whole({n: b for n, b in module.named_buffers() if b.is_floating_point()})
        assert {p.dtype for p in module.parameters()} == {module.built.lm_head.weight.dtype}
        self.found["dtype"] = module.built.lm_head.weight.dtype
        self.found["optimizer"] = whole(
            {
                f"{names[parameter]}/{key}": value
                for optimizer in trainer.optimizers
                for parameter, state in optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
        )


# ---------------------------------------------------------------------- runs by name

# Every validation also saves the best checkpoint, which takes longer than ten of these steps.
FEW_SAVES = ("--checkpoint.every_n_steps", "1000", "--trainer.limit_val_batches", "1")
STEPS = (
    *("--trainer.max_steps", "6", "--checkpoint.every_n_steps", "3", "--checkpoint.keep", "-1"),
    *("--trainer.val_check_interval", "6", "--trainer.limit_val_batches", "1", "--data.batch_size", "4"),
)
TWO_STEPS = (
    *("--trainer.max_steps", "2", "--trainer.val_check_interval", "2", *FEW_SAVES, "--data.batch_size", "4"),
    *("--trainer.precision", "32-true"),
)
CHECKS: dict[str, tuple[str, ...]] = {
    # Twenty steps of SGD; five rows are not divisible by two or three ranks.
    "sgd": (
        *("--trainer.max_steps", "20", "--data.batch_size", "5", "--trainer.val_check_interval", "10", *FEW_SAVES),
        *("--trainer.gradient_clip_val", "null"),
    ),
    # The default optimizer, four micro-batches, a norm that is always clipped.
    "accumulated": (
        *("--trainer.max_steps", "5", "--trainer.accumulate_grad_batches", "4", "--data.batch_size", "3", *FEW_SAVES),
        *("--trainer.val_check_interval", "20", "--trainer.gradient_clip_val", "0.01"),
    ),
    # SGD, values clipped.
    "clipped": (
        *("--trainer.gradient_clip_val", "1e-3", "--trainer.gradient_clip_algorithm", "value"),
        *("--trainer.max_steps", "4", "--data.batch_size", "4", "--trainer.val_check_interval", "4", *FEW_SAVES),
    ),
    # Checkpoints in the middle and at the end.
    "saved": STEPS,
    # The same with everything in one file; in fp32, since 64-true is only accepted with the strategy's defaults.
    "one_file": (*STEPS, "--trainer.precision", "32-true"),
    # From weights in a folder, with AdamW over the whole tables.
    "pretrained": (*STEPS, "--model.optimizer.tables", "dense"),
    # Matrices by Muon.
    "muon": (*STEPS, "--model.optimizer.matrices", "muon"),
    # Indexers that warm up for two steps and learn, experts that are balanced; rows of padding on some ranks.
    "learning": (
        *("--model.config.indexer", "learned", "--model.indexer.warmup_steps", "2"),
        *("--model.config.router_bias_update_rate", "0.01", "--model.config.router_balance_loss_weight", "0.1"),
        *("--trainer.max_steps", "6", "--checkpoint.every_n_steps", "3", "--checkpoint.keep", "-1"),
        *("--trainer.accumulate_grad_batches", "2", "--data.batch_size", "5", "--trainer.val_check_interval", "6"),
        *("--trainer.limit_val_batches", "2", "--trainer.gradient_clip_val", "0.5"),
    ),
    "fp32": TWO_STEPS,
    "policy": TWO_STEPS,
    "autocast": (*TWO_STEPS, "--trainer.precision", "bf16-mixed"),
}
BY_SGD = {"sgd", "clipped"}
STRATEGY = {
    "one_file": (
        *("--trainer.strategy", "EngramFSDPStrategy"),
        *("--trainer.strategy.save_distributed_checkpoint", "false"),
    ),
    "policy": ("--trainer.strategy", "EngramFSDPStrategy", "--trainer.strategy.mixed_precision", "bf16"),
}


def options_of(options: list[str], ranks: int | None, folder: Path, name: str, check: str) -> list[str]:
    """All options of the command line, with the curves under ``FOLDER/NAME``."""
    own = CHECKS.get(check, ())
    if ranks is not None:
        own = (*own, "--trainer.devices", str(ranks), *STRATEGY.get(check, ("--trainer.strategy", "engram_fsdp")))
    log = ("--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name", name)
    return [*options, *log, *own]


def train(
    options: list[str], check: str, pretrained: str | None = None, resume: str | None = None, rank: int = 0
) -> dict[str, Any] | None:
    """Fit; rank 0 returns what a `Recorder` has found. `resume` is a checkpoint, `pretrained` a folder of weights."""
    cli = get_cli(options, run=False)
    made = cli.model
    module = UnevenTask(
        made.text_config,
        made.backend,
        made.optimizer_config,
        made.schedule_config,
        made.tokenizer,
        pretrained,
        made.indexer_config,
    )
    module.sgd = check in BY_SGD
    recorder = Recorder()
    cli.trainer.callbacks.append(recorder)
    cli.trainer.fit(module, cli.datamodule, ckpt_path=resume)
    return recorder.found if rank == 0 else None


@dataclass
class Runs:
    """Runs that are made when a test first asks for one, and kept for other tests.

    Attributes:
        base: A folder with a folder for each number of ranks.
        options: Of every run.
        released: A folder with weights in FP8 and FP4.
    """

    base: Path
    options: list[str]
    released: Path
    found: dict[tuple[str, str], Any] = field(default_factory=dict)

    def folder(self, ranks: int | None) -> Path:
        return self.base / f"{ranks} ranks"

    def call(self, function: Callable[..., Any], ranks: int | None, name: str, kind: str, **arguments: Any) -> Any:
        """The value that `function` returns on rank 0, with the options of a kind of run as its first argument."""
        key = (self.folder(ranks).name, name)
        if key not in self.found:
            options = options_of(self.options, ranks, self.folder(ranks), name, kind)
            try:
                self.found[key] = run(function, ranks, options=options, **arguments)[0]
            except pytest.fail.Exception as failure:
                self.found[key] = failure
        if isinstance(self.found[key], pytest.fail.Exception):
            raise self.found[key]  # in every test that asks for this run, which is not made again
        return self.found[key]

    def __call__(self, ranks: int | None, check: str) -> dict[str, Any]:
        """Train; None is one process without the strategy."""
        pretrained = str(self.released) if check == "pretrained" else None
        return self.call(train, ranks, check, check, check=check, pretrained=pretrained)

    def resumed(self, ranks: int | None, check: str, saved_by: int | None) -> dict[str, Any]:
        """Resume in the middle of a run on `saved_by` ranks."""
        self(saved_by, check)
        pretrained = str(self.released) if check == "pretrained" else None
        arguments = {"check": check, "pretrained": pretrained, "resume": str(self.checkpoint(saved_by, check, 3))}
        return self.call(train, ranks, f"{check} from {saved_by}", check, **arguments)

    def log(self, ranks: int | None, name: str) -> Path:
        return self.folder(ranks) / name / "version_0"

    def checkpoint(self, ranks: int | None, check: str, step: int) -> Path:
        path = self.log(ranks, check) / "checkpoints" / f"step-{step:08d}.ckpt"
        assert path.exists()
        return path

    def curves(self, ranks: int | None, check: str) -> Curves:
        """Curves in the event file."""
        events = EventAccumulator(str(self.log(ranks, check)))
        events.Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def cli(self, *extra: str) -> DeepseekV41CLI:
        """Objects of a run in this process."""
        return get_cli([*self.options, *extra], run=False)


# What depends on the machine, and on how much of the model it holds.
OF_THE_MACHINE = ("train/tokens_per_sec", "train/mfu", "train/peak_memory_mb")


def without_rates(curves: Curves) -> Curves:
    """Curves that do not depend on the machine."""
    return {tag: values for tag, values in curves.items() if tag not in OF_THE_MACHINE}


def worst(ours: Values, theirs: Values) -> float:
    """Largest relative L2 distance of any tensor; both have the same names."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - value).norm() / value.norm().clamp_min(1e-30)) if value.norm() else float(ours[name].norm())
        for name, value in theirs.items()
    )


def require_same_end(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The ends of two runs are equal bit for bit."""
    for part in ("parameters", "buffers", "optimizer"):
        assert ours[part].keys() == theirs[part].keys(), (part, ours[part].keys() ^ theirs[part].keys())
        for name, value in ours[part].items():
            assert torch.equal(value, theirs[part][name]), (part, name)
