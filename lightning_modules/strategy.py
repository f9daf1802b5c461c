"""`EngramFSDPStrategy`: the same training on one rank or many, with FSDP2 and Engram tables owned by rows.

The order of sharding is in `parallelize.py`, the files of a sharded checkpoint in `sharded_checkpoint.py`. What differs
from Lightning's ModelParallelStrategy:
- All ranks are data-parallel. The LightningModule builds a plain model; the strategy shards it, in `setup`.
- Models are built on the meta device, and initial values are drawn by parameter name, equal on any number of ranks.
- Gradients are reduced in the last micro-batch of a step only.
- Checkpoints are published whole. What belongs to another function is refused before anything is overwritten, and
  parameters that never had a gradient do not stand in the way of resuming.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsv41.files import begin_folder, discard, publish_folder, write_failures_explained
from dsv41.ranks import copy_rows_, together
from lightning_modules.checkpoint import sharded as sharded_checkpoint
from lightning_modules.checkpoint.safe_load import read_plain, require_sound
from lightning_modules.checkpoint.structure import require_structure
from lightning_modules.optim.state import (
    named_state,
    numbered_state,
    parameters_by_name,
    require_same_groups,
    sharded_state,
)
from lightning_modules.parallel.fsdp import MixedPrecision, ParallelOptions, parallelize, reshard

T = TypeVar("T")

logger = logging.getLogger(__name__)

# How gloo and NCCL say that another rank is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process", "Timed out waiting")


# Seconds between looks at the parent, and from its death to the end of the child, in which an error may still be said.
_WATCH, _GRACE = 2.0, 20.0


def _end_with_parent(rank: int) -> None:
    """End this process some seconds after the one that launched it.

    Lightning's launcher, in rank 0, ends all ranks when one of the others dies, but nobody looks after rank 0: over
    NCCL its children would wait for it in a collective until that times out.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        time.sleep(_GRACE)
        print(f"rank {rank}: rank 0 has ended; its own message says why", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


class EngramFSDPStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks, with the Engram tables as owner DTensors that FSDP2 ignores.

    In YAML: ``strategy: engram_fsdp`` for the defaults, or ``class_path`` and ``init_args``.

    Args:
        mixed_precision: "bf16" computes in bf16, with what has to stay fp32 in fp32, and needs ``precision: 32-true``;
            "none" computes in the trainer's precision. See `ParallelOptions` for this and the next three.
        reshard_after_forward: Free a block's parameters after its forward: less memory, one more gathering in backward.
        activation_checkpointing: Recompute blocks in backward.
        cpu_offload: Sharded parameters, their gradients and optimizer state in host memory.
        tensor_parallel_size: Has to be 1.
        save_distributed_checkpoint: True writes a folder with one file per rank; False collects everything on rank 0 in
            one file, for models that fit there.
        process_group_backend: "gloo", "nccl" or None for the device's own.
        timeout: Of collectives. It has to cover the longest time that ranks may be apart.

    Raises:
        ValueError: `mixed_precision` is unknown or `tensor_parallel_size` is not 1.
    """

    def __init__(
        self,
        mixed_precision: MixedPrecision = "none",
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size: must be 1, since all ranks are data-parallel, got {tensor_parallel_size}"
            )
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.options = ParallelOptions(mixed_precision, reshard_after_forward, activation_checkpointing, cpu_offload)
        self._restored_from: Path | None = None

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        """Start the process group: all ranks in one data-parallel dimension, one seed."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()
        if isinstance(self.cluster_environment, LightningEnvironment) and self.local_rank > 0:
            _end_with_parent(self.global_rank)
        # Initial values follow from the seed and the parameter's name, so all ranks need the same seed.
        seed = self.broadcast(torch.initial_seed())
        if seed != torch.initial_seed():
            torch.manual_seed(seed)

    def _get_process_group_backend(self) -> str:
        if self.options.cpu_offload and self.root_device.type == "cuda":
            # Gradient norms are then reduced on the host.
            backend = self._process_group_backend or "cpu:gloo,cuda:nccl"
            if "gloo" not in backend:
                raise ValueError(f"process_group_backend: needs gloo for the host with cpu_offload, got {backend!r}")
            return backend
        return super()._get_process_group_backend()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build on the meta device unless told otherwise."""
        with super().tensor_init_context(True if empty_init is None else empty_init):
            yield

    def require_precision(self, precision: str) -> None:
        """Raise ValueError unless the trainer's precision goes with `mixed_precision`."""
        if self.options.mixed_precision == "bf16" and precision != "32-true":
            raise ValueError(
                f"trainer.precision: must be '32-true' with the strategy's mixed_precision 'bf16', got "
                f"{precision!r}; the strategy casts, and stored parameters stay fp32"
            )

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the model, if it is not sharded yet, and set up the optimizer."""
        self.require_precision(trainer.precision)
        assert self.lightning_module is not None
        parallelize(self.lightning_module, self.device_mesh["data_parallel"], self.options, self.root_device)
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False  # parameters gathered in inference mode cannot be trained afterwards
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move what is not sharded: with `cpu_offload`, sharded parameters have to stay where they are."""
        assert self.lightning_module is not None
        if not self.options.cpu_offload:
            super().model_to_device()
            return
        for module in self.lightning_module.modules():
            if next(module.parameters(), None) is None:
                module.to(self.root_device)
                continue
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))

    # ------------------------------------------------------------------ training

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Add gradients up locally; Lightning asks for it in every micro-batch but the last. Tables always exchange."""
        assert self.lightning_module is not None
        units = [module for module in self.lightning_module.children() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True)

    def _reshard(self) -> None:
        assert self.lightning_module is not None
        reshard(self.lightning_module)

    def on_validation_end(self) -> None:
        """Free gathered parameters, so that whoever asks for parameters now gets the sharded ones."""
        self._reshard()

    def on_test_end(self) -> None:
        """Like `on_validation_end`."""
        self._reshard()

    def on_predict_end(self) -> None:
        """Like `on_validation_end`."""
        self._reshard()

    def on_exception(self, exception: BaseException) -> None:
        """Say what a lost connection means: the cause is in another rank's output."""
        if any(sign in str(exception) for sign in _LOST):
            logger.error(
                "rank %d: lost the connection to another rank, which has most likely ended; its own message says why. "
                "Go on from the newest checkpoint with --ckpt_path last",
                self.global_rank,
            )
        super().on_exception(exception)

    # ------------------------------------------------------------------ checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Restore optimizers in `load_optimizer_state_dict`, when the task has seen the checkpoint."""
        return True

    def _together(self, work: Callable[[], T], rank_zero: bool = False) -> T | None:
        """Run `work` on all ranks, or on rank 0 alone; if it fails on one, all raise."""
        return together(lambda: work() if self.global_rank == 0 or not rank_zero else None, dist.group.WORLD)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's tensors: sharded, or, for a single file, whole on rank 0 and nothing elsewhere."""
        assert self.lightning_module is not None
        state: dict[str, Any] = self.lightning_module.state_dict()
        return state if self._save_distributed_checkpoint else self._whole(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name, sharded; for a single file torch's own, whole on rank 0 and nothing elsewhere."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        assert self.lightning_module is not None
        self._reshard()  # or parameters would not be those that the optimizer knows
        named = named_state(self.lightning_module, optimizer)
        if self._save_distributed_checkpoint:
            return named
        named["state"] = {name: self._whole(entries) for name, entries in named["state"].items()}
        return numbered_state(named) if self.global_rank == 0 else {}

    def _whole(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Collect one tensor after the other; only rank 0 keeps them, in host memory."""
        kept = {}
        for name, value in tensors.items():
            whole = value.full_tensor().detach() if isinstance(value, DTensor) else value
            if self.global_rank == 0:
                kept[name] = whole.cpu() if isinstance(whole, Tensor) else whole
        return kept

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint that appears complete or not at all; if a rank fails, all raise.

        Raises:
            TypeError: `storage_options` is given.
            OSError: A rank could not write; an older checkpoint of that name is untouched.
        """
        if storage_options is not None:
            raise TypeError("storage_options: not supported by EngramFSDPStrategy")
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            self._together(lambda: self.checkpoint_io.save_checkpoint(checkpoint, path), rank_zero=True)
            return
        tensors, meta = sharded_checkpoint.split_tensors(checkpoint)

        def begin() -> Path:
            with write_failures_explained(path):
                return begin_folder(path)

        partial = Path(self.broadcast(str(self._together(begin, rank_zero=True))))
        try:
            sharded_checkpoint.write_tensors(partial, tensors)
            checksums: list[dict[str, str] | None] = [None] * self.world_size
            own = self._together(lambda: sharded_checkpoint.checksums_of_rank(partial, self.global_rank))
            dist.all_gather_object(checksums, own)

            def finish() -> None:
                about = {"global_step": meta.get("global_step"), "ranks": self.world_size}
                with write_failures_explained(path, sharded_checkpoint.size_of(tensors)):
                    sharded_checkpoint.write_meta(partial, meta)
                    publish_folder(partial, path, about, dict(ChainMap(*(sums or {} for sums in checksums))))

            self._together(finish, rank_zero=True)
        except Exception:
            if self.global_rank == 0:
                discard(partial)
            raise

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a folder or a file; tensors of a folder are read later, when the task has agreed to what it says.

        Only plain values and tensors are read, whatever `weights_only` says: checkpoints of this project hold no
        others.

        Raises:
            DamagedFileError: A file is cut or a bit in it has changed; the ranks share the reading.
            ValueError: The folder is not complete, or a file holds anything else, or a part is missing or of another
                kind.
        """
        path = Path(self.broadcast(checkpoint_path))
        self._restored_from = path

        def check() -> None:
            if path.is_dir():
                sharded_checkpoint.require_intact_share(path, self.global_rank, self.world_size)
            elif self.global_rank == 0:
                require_sound(path)

        self._together(check)
        checkpoint = self._together(
            lambda: sharded_checkpoint.read_meta(path) if path.is_dir() else read_plain(path, mmap=True)
        )
        assert checkpoint is not None
        training = self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        require_structure(path, checkpoint, training)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read each rank's part of the model.

        Raises:
            ValueError: The tensors are not the model's; nothing has been overwritten.
        """
        assert self.lightning_module is not None
        assert self._restored_from is not None
        path, own = self._restored_from, self.lightning_module.state_dict()
        if path.is_dir():
            stored = self._together(lambda: sharded_checkpoint.model_shapes(path))
        else:
            stored = {name: tuple(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
        assert stored is not None
        sharded_checkpoint.require_same_tensors(path, stored, own, strict)
        targets = {name: tensor for name, tensor in own.items() if name in stored}
        if path.is_dir():
            sharded_checkpoint.read_model(path, targets)
            return
        for name, tensor in targets.items():
            copy_rows_(tensor, checkpoint["state_dict"][name])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read each rank's part of the optimizers' state.

        Raises:
            ValueError: The optimizer has other parameters.
        """
        assert self.lightning_module is not None
        assert self._restored_from is not None
        self._reshard()
        for index, optimizer in enumerate(self.optimizers):
            stored = checkpoint["optimizer_states"][index]
            if self._restored_from.is_dir():
                require_same_groups(self.lightning_module, optimizer, stored)
                parameters = parameters_by_name(self.lightning_module, optimizer)
                named = sharded_checkpoint.read_optimizer(self._restored_from, index, parameters, stored)
                optimizer.load_state_dict(numbered_state(named))
            else:
                optimizer.load_state_dict(sharded_state(optimizer, stored))


StrategyRegistry.register(
    "engram_fsdp", EngramFSDPStrategy, description="FSDP2 over all ranks, Engram tables owned by rows"
)
