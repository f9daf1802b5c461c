"""`EngramFSDPStrategy` without a trainer, for tests that only save and load."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.strategy import EngramFSDPStrategy


def bare_strategy(sharded: bool = True) -> EngramFSDPStrategy:
    """The strategy of this forked rank."""
    strategy = EngramFSDPStrategy(save_distributed_checkpoint=sharded)
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.checkpoint_io = AtomicCheckpointIO()
    assert (strategy.global_rank, strategy.world_size) == (dist.get_rank(), dist.get_world_size())
    return strategy
