"""`EngramFSDPStrategy` without a trainer, for scripts that only save and load."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.strategy import EngramFSDPStrategy


def bare_strategy(store: Path, rank: int, ranks: int, sharded: bool = True) -> EngramFSDPStrategy:
    """The strategy of one rank, in a group that finds itself by the file `store`."""
    if not dist.is_initialized():
        os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(ranks)
    strategy = EngramFSDPStrategy(save_distributed_checkpoint=sharded)
    strategy.cluster_environment = environment
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.checkpoint_io = AtomicCheckpointIO()
    assert (strategy.global_rank, strategy.world_size) == (rank, ranks)
    return strategy
