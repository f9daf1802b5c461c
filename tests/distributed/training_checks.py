"""Run by `test_training.py`, on one process or by torchrun on several: trains and keeps what is to be compared.

    python training_checks.py OUT CHECK,CHECK [--option value ...]        (by torchrun for more ranks)

OUT is a folder for this launch. Rank 0 writes ``CHECK.pt`` with gradients, parameters and optimizer state, all whole
and in float64. A check that raises ends the run.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dsv41.config import IGNORE_INDEX
from dsv41.engram.table import EngramTable
from dsv41.ranks import owned_rows
from lightning_modules.callbacks import PredictionFile
from lightning_modules.cli import get_cli
from lightning_modules.optim.muon import ShardedMuon
from lightning_modules.optim.row_adam import RowAdam
from lightning_modules.optim.state import sharded_like, sharded_rows, sharded_state
from lightning_modules.task import Batch, DeepseekV41Task

Values = dict[str, Tensor]


def live_labels(row_ids: Tensor, length: int) -> Tensor:
    """How many labels of each row count, 3 to `length`: rows, and so ranks and micro-batches, differ widely."""
    return 3 + (row_ids * 11) % (length - 3)


class UnevenTask(DeepseekV41Task):
    """Rows with different numbers of live tokens, trained by SGD, in which no constant factor can hide."""

    sgd = True

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


class StatelessTask(UnevenTask):
    """Plain SGD has no state to save."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AdamTask(UnevenTask):
    sgd = False


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
        self.found: dict[str, Values] = {}

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.found["gradients"] = getattr(module, "first_gradients", {})
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.found["parameters"] = whole({name: parameter for parameter, name in names.items()})
        self.found["buffers"] = whole({n: b for n, b in module.named_buffers() if b.is_floating_point()})
        assert {p.dtype for p in module.parameters()} == {module.built.lm_head.weight.dtype}
        self.found["dtype"] = {"parameters": torch.zeros(0, dtype=module.built.lm_head.weight.dtype)}
        self.found["optimizer"] = whole(
            {
                f"{names[parameter]}/{key}": value
                for optimizer in trainer.optimizers
                for parameter, state in optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
        )


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Launch:
    """One folder, one number of ranks."""

    def __init__(self, out: Path, options: list[str]) -> None:
        self.out = out
        self.options = options

    def train(
        self,
        check: str,
        *extra: str,
        task: type[UnevenTask] = UnevenTask,
        resume: str | None = None,
        pretrained: str | None = None,
    ) -> dict[str, Values]:
        """Fit, with the curves under ``runs/CHECK``; `resume` is a checkpoint, `pretrained` a folder of weights."""
        cli = get_cli(
            [
                *self.options,
                *("--trainer.logger.init_args.save_dir", str(self.out / "runs")),
                *("--trainer.logger.init_args.name", check),
                *extra,
            ],
            run=False,
        )
        made = cli.model
        module = task(
            made.text_config,
            made.backend,
            made.optimizer_config,
            made.schedule_config,
            made.tokenizer,
            pretrained,
            made.indexer_config,
        )
        recorder = Recorder()
        cli.trainer.callbacks.append(recorder)
        cli.trainer.fit(module, cli.datamodule, ckpt_path=resume)
        if rank() == 0:
            torch.save(recorder.found, self.out / f"{check}.pt")
        return recorder.found


def same(ours: dict[str, Values], theirs: dict[str, Values]) -> None:
    """Raise unless the ends of two runs are equal bit for bit."""
    for part in ("parameters", "buffers", "optimizer"):
        assert ours[part].keys() == theirs[part].keys(), (part, ours[part].keys() ^ theirs[part].keys())
        for name, value in ours[part].items():
            assert torch.equal(value, theirs[part][name]), (part, name)


# Every validation also saves the best checkpoint, which takes longer than ten of these steps.
FEW_SAVES = ("--checkpoint.every_n_steps", "1000", "--trainer.limit_val_batches", "1")
STEPS = (
    *("--trainer.max_steps", "6", "--checkpoint.every_n_steps", "3", "--checkpoint.keep", "-1"),
    *("--trainer.val_check_interval", "6", "--trainer.limit_val_batches", "1", "--data.batch_size", "4"),
)
ONE_FILE = (
    *("--trainer.strategy", "EngramFSDPStrategy"),
    *("--trainer.strategy.save_distributed_checkpoint", "false"),
    *("--trainer.precision", "32-true"),
)


def sgd(launch: Launch) -> None:
    """Twenty steps; five rows are not divisible by two or three ranks."""
    extra = ("--trainer.max_steps", "20", "--data.batch_size", "5", "--trainer.val_check_interval", "10")
    launch.train("sgd", *extra, *FEW_SAVES, "--trainer.gradient_clip_val", "null")


def accumulated(launch: Launch) -> None:
    """The default optimizer, four micro-batches, a norm that is always clipped."""
    extra = ("--trainer.max_steps", "5", "--trainer.accumulate_grad_batches", "4", "--data.batch_size", "3")
    clip = ("--trainer.val_check_interval", "20", "--trainer.gradient_clip_val", "0.01")
    launch.train("accumulated", *extra, *FEW_SAVES, *clip, task=AdamTask)


def clipped(launch: Launch) -> None:
    """Values clipped."""
    clip = ("--trainer.gradient_clip_val", "1e-3", "--trainer.gradient_clip_algorithm", "value")
    extra = ("--trainer.max_steps", "4", "--data.batch_size", "4", "--trainer.val_check_interval", "4")
    launch.train("clipped", *extra, *FEW_SAVES, *clip)


def middle_of(folder: Path, check: str) -> str:
    """The checkpoint in the middle of a run."""
    path = folder / "runs" / check / "version_0" / "checkpoints" / "step-00000003.ckpt"
    assert path.exists()
    return str(path)


def saved(launch: Launch) -> dict[str, Values]:
    """A run with checkpoints."""
    return launch.train("saved", *STEPS, task=AdamTask)


def resumed(launch: Launch) -> None:
    """One resumed in its middle on the same ranks ends the same, bit for bit."""
    end = saved(launch)
    same(launch.train("resumed", *STEPS, task=AdamTask, resume=middle_of(launch.out, "saved")), end)


def one_file(launch: Launch) -> None:
    """The same with everything in one file."""
    end = launch.train("one_file", *STEPS, *ONE_FILE, task=AdamTask)
    middle = middle_of(launch.out, "one_file")
    assert Path(middle).is_file()
    same(launch.train("one_file_resumed", *STEPS, *ONE_FILE, task=AdamTask, resume=middle), end)


def stateless(launch: Launch) -> None:
    """An optimizer without state, sharded and in one file."""
    for check, extra in (("stateless", ()), ("stateless_file", ONE_FILE)):
        end = launch.train(check, *STEPS, *extra, task=StatelessTask)
        middle = middle_of(launch.out, check)
        same(launch.train(f"{check}_resumed", *STEPS, *extra, task=StatelessTask, resume=middle), end)


def pretrained(launch: Launch) -> None:
    """Start from weights in FP8 and FP4 that the test has written beside the launches, then go on from the middle.

    With AdamW over the whole tables.
    """
    folder = str(launch.out.parent / "released")
    options = (*STEPS, "--model.optimizer.tables", "dense")
    end = launch.train("pretrained", *options, task=AdamTask, pretrained=folder)
    middle = middle_of(launch.out, "pretrained")
    same(launch.train("pretrained_resumed", *options, task=AdamTask, resume=middle, pretrained=folder), end)


def muon(launch: Launch) -> None:
    """Matrices by Muon; on two ranks also resumed in the middle."""
    options = (*STEPS, "--model.optimizer.matrices", "muon")
    end = launch.train("muon", *options, task=AdamTask)
    if dist.is_initialized() and dist.get_world_size() == 2:
        middle = middle_of(launch.out, "muon")
        same(launch.train("muon_resumed", *options, task=AdamTask, resume=middle), end)


def learning(launch: Launch) -> None:
    """Indexers that warm up for two steps and learn, experts that are balanced; rows of padding on some ranks."""
    options = (
        *("--model.config.indexer", "learned", "--model.indexer.warmup_steps", "2"),
        *("--model.config.router_bias_update_rate", "0.01", "--model.config.router_balance_loss_weight", "0.1"),
        *("--trainer.max_steps", "6", "--checkpoint.every_n_steps", "3", "--checkpoint.keep", "-1"),
        *("--trainer.accumulate_grad_batches", "2", "--data.batch_size", "5", "--trainer.val_check_interval", "6"),
        *("--trainer.limit_val_batches", "2", "--trainer.gradient_clip_val", "0.5"),
    )
    launch.train("learning", *options, task=AdamTask)


def rules(launch: Launch) -> None:
    """The rules by themselves, on shapes that leave ranks fewer rows or none, against one process with the whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for rows in (4, 7):
        check_rows(mesh, rows)
    for shape in ((1, 4), (2, 9), (9, 2), (7, 5), (5, 7), (16, 16)):
        check_muon(mesh, shape)


def check_rows(mesh: DeviceMesh, rows: int) -> None:
    """`RowAdam` over a sharded table: two lookups a step, other ids on each rank, and a state that is cut and put
    together again halfway."""
    torch.manual_seed(0)
    whole_table = EngramTable(rows, 3, 1.0, sparse_gradient=True).double()
    table = copy.deepcopy(whole_table)
    table.shard(mesh)
    ours, theirs = (RowAdam(each.parameters(), 0.1, (0.9, 0.95)) for each in (table, whole_table))
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for _ in range(2):
            # Of rank r, the r-th row; the last row of the table is read in one step only.
            ids = torch.randint(rows if step == 2 else rows - 1, (mesh.size(), 4), generator=generator)
            scale = torch.randn(mesh.size(), 4, 3, generator=generator, dtype=torch.float64)
            mine = mesh.get_local_rank()
            (table(ids[mine]) * scale[mine]).sum().backward()
            (whole_table(ids) * scale / mesh.size()).sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        states = [whole(optimizer.state[p]) for optimizer, p in ((ours, table.weight), (theirs, whole_table.weight))]
        states[0]["table"], states[1]["table"] = collected(table.weight.detach()), whole_table.weight.detach()
        for key, value in states[1].items():
            assert float((states[0][key] - value).double().norm()) <= 1e-13 * float(value.double().norm()), key
        assert ours.state[table.weight]["hits"].placements == table.weight.placements
        if step == 2:
            stored = {key: collected(value) for key, value in ours.state[table.weight].items()}
            ours = RowAdam(table.parameters())
            ours.load_state_dict(sharded_state(ours, theirs.state_dict() | {"state": {0: stored}}))


def check_muon(mesh: DeviceMesh, shape: tuple[int, int]) -> None:
    """`ShardedMuon` updates as on one process, whatever the rows of a rank."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    own = owned_rows(shape[0], mesh.size(), mesh.get_local_rank())
    alone = torch.nn.Parameter(start.clone())
    shared = torch.nn.Parameter(sharded_like(distribute_tensor(start, mesh, [Shard(0)]), start))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = ShardedMuon([shared], **options), ShardedMuon([alone], **options)
    for _ in range(3):
        alone.grad = torch.randn(shape, generator=generator)
        shared.grad = sharded_rows(alone.grad[own.start : own.stop].clone(), shared)
        ours.step()
        theirs.step()
    # torch adds step and value in one rounding, here there are two.
    torch.testing.assert_close(collected(shared.detach()), alone.detach(), rtol=1e-6, atol=1e-7, msg=str(shape))
    # Blocks of other sizes end in other places, where a processor may round otherwise.
    average = theirs.state[alone]["momentum_buffer"]
    assert float((collected(ours.state[shared]["momentum_buffer"]) - average).norm()) <= 1e-7 * float(average.norm())


def from_other(launch: Launch, folder: str, check: str) -> None:
    """Go on from what another launch, in a folder beside this one, has saved."""
    extra = ONE_FILE if check == "one_file" and dist.is_initialized() else ()
    middle = middle_of(launch.out.parent / folder, check)
    launch.train(f"from_{folder}_{check}", *STEPS, *extra, task=AdamTask, resume=middle)


def precisions(launch: Launch) -> None:
    """Two steps in each precision; what is stored is fp32 in all of them."""
    strategy = ("--trainer.strategy", "EngramFSDPStrategy", "--trainer.strategy.mixed_precision")
    kinds = {
        "fp32": ("--trainer.precision", "32-true"),
        "policy": ("--trainer.precision", "32-true", *strategy, "bf16"),
        "autocast": ("--trainer.precision", "bf16-mixed"),
    }
    for name, extra in kinds.items():
        steps = ("--trainer.max_steps", "2", "--trainer.val_check_interval", "2")
        launch.train(f"precision_{name}", *steps, *FEW_SAVES, *extra, "--data.batch_size", "4", task=AdamTask)


def evaluated(launch: Launch) -> None:
    """Fit, validate, test, predict and fit again with one trainer; rows that no number of ranks divides."""
    cli = get_cli(
        [
            *launch.options,
            *("--trainer.logger.init_args.save_dir", str(launch.out / "runs")),
            *("--trainer.logger.init_args.name", "evaluated"),
            *("--data.batch_size", "5", "--trainer.limit_val_batches", "1.0", "--trainer.max_steps", "2"),
        ],
        run=False,
    )
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    trainer.fit(model, data)
    found: dict[str, Any] = {f"fit/{name}": float(value) for name, value in trainer.callback_metrics.items()}
    for stage in ("validate", "test"):
        found |= {f"{stage}/{n}": v for n, v in getattr(trainer, stage)(model, data, verbose=False)[0].items()}
    best = trainer.checkpoint_callbacks[0].best_model_path
    found |= {f"best/{n}": v for n, v in trainer.validate(model, data, ckpt_path=best, verbose=False)[0].items()}
    trainer.callbacks.append(PredictionFile())
    predictions = trainer.predict(model, data)
    found["predicted rows"] = [row for part in predictions or [] for row in part["row_id"].tolist()]
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, data)
    found |= {f"again/{name}": float(value) for name, value in trainer.callback_metrics.items()}
    if rank() == 0:
        torch.save(found, launch.out / "evaluated.pt")


CHECKS: dict[str, Callable[[Launch], Any]] = {
    check.__name__: check
    for check in (
        *(sgd, accumulated, clipped, saved, resumed, one_file, stateless, precisions, evaluated, pretrained),
        *(muon, rules, learning),
    )
}


def main() -> None:
    torch.set_num_threads(1)
    out, names, options = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    launch = Launch(out, options)
    for name in names:
        if name.startswith("from:"):
            from_other(launch, *name.removeprefix("from:").split("/"))
        else:
            CHECKS[name](launch)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
