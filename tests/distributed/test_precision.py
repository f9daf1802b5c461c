"""Dtypes in which a training step stores and computes, and numbers of a run that ranks must agree on.

Every name is listed below, so that a parameter that falls out of its precision, or out of the check, is seen.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from golden_tiny import golden_config, golden_tokenizer
from lightning.pytorch.loggers import Logger
from ranks import ranks, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from dsv41 import BackendConfig
from dsv41.hyper_connections import HyperConnection
from dsv41.model import DeepseekV41Block, DeepseekV41ForCausalLM
from dsv41.moe import Experts, Router
from lightning_modules.callbacks import TokenThroughput, UpdateRatio, throughput
from lightning_modules.strategy import EngramFSDPStrategy
from lightning_modules.task import DeepseekV41Task
from lightning_modules.training.checks import require_wide_parameters

NAMES = 166 + 12  # parameters of golden-tiny and router biases
LENGTH, ROWS = 24, 4
LAYERS = range(6)
BLOCKS = [f"model.layers.{layer}" for layer in LAYERS]
SITES = [f"{block}.{site}_hc" for block in BLOCKS for site in ("attn", "ffn")]
POOLING = "model.layers.1.attn.compressor"  # of ratio 2; the one of layer 4 has ratio 1 and no gate

# ARCHITECTURE 9.
WIDE = {
    *(f"{site}.{leaf}" for site in SITES for leaf in ("fn", "base", "scale")),
    *(f"{block}.attn.core.attn_sink" for block in BLOCKS),
    *(f"{block}.ffn.gate.{leaf}" for block in BLOCKS for leaf in ("bias", "bias_vl")),
    f"{POOLING}.wkv.weight",
    f"{POOLING}.wgate.weight",
    "lm_head.weight",
}
# Gathered with what has to stay wide, or by nobody.
WIDE_BY_POLICY = {f"{POOLING}.norm.weight", *(f"model.layers.{layer}.engram.embed.weight" for layer in (1, 3))}
# Modules whose own matrix products are wide: "" projects to the vocabulary, blocks mix, the decoder reads the streams.
WIDE_PRODUCTS = {
    *("", "model", POOLING),
    *BLOCKS,
    *SITES,
    *(f"{block}.attn.core" for block in BLOCKS),
    *(f"{block}.ffn.gate" for block in BLOCKS),
}
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}

Dtypes = dict[str, set[torch.dtype]]


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products under the module that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[str] = []
        self.seen: Dtypes = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            self.seen[self.path[-1]] |= {arg.dtype for arg in args if isinstance(arg, Tensor)}
        return func(*args, **(kwargs or {}))


class Watch(L.Callback):
    """What a forward finds in parameters and buffers, multiplies, and gives out.

    Attributes:
        parameters: As a module, or the one around it, finds them when it is called.
        products: Of modules by themselves.
        results: Of modules whose results have to be wide whatever the rest is, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: Dtypes = defaultdict(set)
        self.products = Products()
        self.results: dict[str, list[torch.dtype]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model = pl_module.model
        assert isinstance(model, DeepseekV41ForCausalLM)
        require_wide_parameters(model)
        self.names = {name for name, _ in model.named_parameters()}
        self.names |= {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self.stored = {parameter.dtype for parameter in model.parameters()}
        # Hooks of FSDP2 were there before, and have gathered parameters when these run.
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self.enter(name))
            module.register_forward_hook(self.leave(name))

    def enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not name:
                self.products.__enter__()
            self.products.path.append(name)
            around = f"{name}." if name else ""
            for path, owner in (("", module), *((f"{child}.", part) for child, part in module.named_children())):
                for leaf, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
                    if tensor.is_floating_point():
                        self.parameters[f"{around}{path}{leaf}"].add(tensor.dtype)
            if isinstance(module, DeepseekV41Block):
                self.results[f"carried to {name}"] = [args[1].dtype]

        return hook

    def leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            assert self.products.path.pop() == name
            if isinstance(module, HyperConnection):
                self.results[name] = [part.dtype for part in out[1:]]
            elif isinstance(module, Router):
                self.results[name] = [out[1].dtype]
            elif isinstance(module, Experts):
                self.results[name] = [out.dtype]
            if not name:
                self.results["logits and loss"] = [out.logits.dtype, out.loss.dtype]
                self.products.__exit__(None, None, None)

        return hook


class Nowhere(Logger):
    """Without a logger, Lightning keeps no logged metrics."""

    name = version = "nowhere"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class Batches(L.LightningDataModule):
    """The rows of this rank."""

    sequence_length = LENGTH

    def train_dataloader(self) -> DataLoader[Any]:
        ids = torch.randint(3, 500, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
        own = ids[:, dist.get_rank() :: dist.get_world_size()]
        batches = [{"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows} for rows in own]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def train(precision: Any, strategy: Any, steps: int, *callbacks: L.Callback) -> L.Trainer:
    """Fit a golden-tiny model, which has every kind of layer."""
    torch.manual_seed(9)
    task = DeepseekV41Task(golden_config().text_config, BackendConfig(loss="full"))
    task.tokenizer = golden_tokenizer()  # type: ignore[assignment]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        log_every_n_steps=1,
        logger=Nowhere(),
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(task, Batches())
    return trainer


def require_dtypes(
    precision: Any, strategy: Any, wide: torch.dtype, seen_narrow: torch.dtype, computed_narrow: torch.dtype
) -> None:
    """Train for a step, and compare every name.

    Args:
        precision, strategy: Of the trainer.
        wide: Of what is stored, and of what has to stay wide.
        seen_narrow: In which forward finds all other parameters and buffers.
        computed_narrow: Of all other matrix products.
    """
    watch = Watch()
    train(precision, strategy, 1, watch)
    assert watch.stored == {wide}
    expected = {name: {wide if name in WIDE else seen_narrow} for name in watch.names}
    if seen_narrow != wide:
        expected |= {name: {wide} for name in WIDE_BY_POLICY}
    same(watch.parameters, expected)
    assert watch.names >= WIDE | WIDE_BY_POLICY
    products = watch.products.seen
    same(products, {name: {wide if name in WIDE_PRODUCTS else computed_narrow} for name in products})
    assert products.keys() >= WIDE_PRODUCTS
    results = {name: [wide] * 3 for name in SITES} | {"logits and loss": [wide, wide]}
    results |= {f"carried to {block}": [wide] for block in BLOCKS}
    results |= {f"{block}.ffn.{part}": [wide] for block in BLOCKS for part in ("gate", "experts")}
    same(watch.results, results)
    assert len(expected) == NAMES


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = {
        n: (found.get(n), expected.get(n)) for n in found.keys() | expected.keys() if found.get(n) != expected.get(n)
    }
    assert not wrong, f"found and expected: {wrong}"


SINGLE_DEVICE = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "64-true": (torch.float64, torch.float64, torch.float64),
    "bf16-mixed": (torch.float32, torch.float32, torch.bfloat16),  # parameters stay as they are, products cast them
}


@ranks(1)
@pytest.mark.parametrize("precision", SINGLE_DEVICE)
def test_on_a_single_device_what_has_to_stay_wide_does(precision: str) -> None:
    require_dtypes(precision, "auto", *SINGLE_DEVICE[precision])


@ranks(1, 2)
@pytest.mark.parametrize(("policy", "narrow"), [("none", torch.float32), ("bf16", torch.bfloat16)], ids=str)
def test_sharded_what_has_to_stay_wide_does(policy: Any, narrow: torch.dtype) -> None:
    require_dtypes("32-true", EngramFSDPStrategy(policy), torch.float32, narrow, narrow)


def logged() -> tuple[dict[str, float], float]:
    """Update ratios of a run of two steps in float64, and what its throughput divides by."""
    rates = TokenThroughput()
    throughput.device_peak = lambda device, dtype: 1e9 * (dist.get_rank() + 1)
    trainer = train("64-true", "engram_fsdp", 2, UpdateRatio(), rates)
    assert rates.utilisation_per_token is not None
    ratios = {
        name: float(value) for name, value in trainer.logged_metrics.items() if name.startswith("within/update_ratio/")
    }
    return ratios, rates.utilisation_per_token


def test_update_ratios_and_peaks_of_two_ranks_are_those_of_one() -> None:
    """Ratios do not depend on the number of ranks; peaks, which are 1 and 2 GFLOPs per second, add up."""
    ((alone, utilisation),) = run(logged, 1)
    assert alone.keys() == {
        f"within/update_ratio/{part}" for part in ("total", "engram_tables", "mhc", "router", "rest")
    }
    assert min(alone.values()) > 0
    for ratios, share in run(logged, 2):
        assert ratios == pytest.approx(alone, rel=1e-9)
        assert share == pytest.approx(utilisation / 3)
