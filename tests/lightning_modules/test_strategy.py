"""What the strategy refuses, and what it needs no ranks for. Training with it: `tests/distributed/`."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_modules.cli import DeepseekV41CLI
from lightning_modules.strategy import EngramFSDPStrategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: must be 1, since all ranks are data-parallel, got 2"),
        ({"mixed_precision": "fp16"}, "mixed_precision: must be one of ('bf16', 'none'), got 'fp16'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EngramFSDPStrategy(**options)


def test_it_has_a_name_for_yaml(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    assert "engram_fsdp" in StrategyRegistry
    assert isinstance(nano_cli("--trainer.strategy", "engram_fsdp").trainer.strategy, EngramFSDPStrategy)


def test_options_arrive_from_the_command_line(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    chosen = ("--trainer.strategy", "EngramFSDPStrategy", "--trainer.strategy.mixed_precision", "bf16")
    strategy = nano_cli(*chosen, "--trainer.strategy.activation_checkpointing", "true").trainer.strategy
    assert isinstance(strategy, EngramFSDPStrategy)
    assert strategy.options.mixed_precision == "bf16"
    assert strategy.options.activation_checkpointing


def test_bf16_by_policy_and_by_autocast_exclude_each_other() -> None:
    trainer: Any = SimpleNamespace(precision="bf16-mixed")
    with pytest.raises(ValueError, match=r"^trainer.precision: must be '32-true' .* got 'bf16-mixed'"):
        EngramFSDPStrategy(mixed_precision="bf16").setup(trainer)


def test_models_are_built_on_the_meta_device_unless_told_otherwise(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    strategy = nano_cli("--trainer.strategy", "engram_fsdp").trainer.strategy
    for empty, device in ((None, "meta"), (True, "meta"), (False, "cpu")):
        with strategy.tensor_init_context(empty):
            assert torch.empty(1).device.type == device


def test_host_collectives_need_gloo_when_parameters_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngramFSDPStrategy, "root_device", torch.device("cuda", 0))
    assert EngramFSDPStrategy(cpu_offload=True)._get_process_group_backend() == "cpu:gloo,cuda:nccl"
    with pytest.raises(ValueError, match="process_group_backend: needs gloo"):
        EngramFSDPStrategy(cpu_offload=True, process_group_backend="nccl")._get_process_group_backend()


def test_storage_options_are_refused() -> None:
    with pytest.raises(TypeError, match="storage_options"):
        EngramFSDPStrategy().save_checkpoint({}, "a.ckpt", storage_options={"x": 1})


def test_a_batch_has_a_row_for_every_process(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli("--data.batch_size", "2")
    data: Any = cli.datamodule
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"rank": 2, "num_replicas": 3})
    with pytest.raises(ValueError, match=r"^data.batch_size: must be at least the number of processes, 3, .* got 2$"):
        data.setup("fit")


def test_gradients_wait_for_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    class Unit(torch.nn.Module):
        def set_requires_gradient_sync(self, wanted: bool) -> None:
            calls.append(wanted)

    monkeypatch.setattr("lightning_modules.strategy.FSDPModule", Unit)
    strategy = EngramFSDPStrategy()
    parent: Any = torch.nn.ModuleDict({"model": Unit(), "other": torch.nn.Linear(1, 1)})
    strategy._lightning_module = parent
    with strategy.block_backward_sync():
        assert calls == [False]
    assert calls == [False, True]
    with pytest.raises(RuntimeError, match="lost"), strategy.block_backward_sync():
        raise RuntimeError("lost")
    assert calls[-1], "an error leaves nothing blocked"
