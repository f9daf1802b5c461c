"""Which parameter is in which group; the one optimizer against its parts; settings that come back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from dsv41 import DeepseekV41ForCausalLM
from dsv41.engram.table import EngramTable
from lightning_modules.optim.grouped import GroupedOptimizer
from lightning_modules.optim.groups import OptimizerConfig, build_optimizer, group_settings

Model = Callable[..., DeepseekV41ForCausalLM]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lr": 0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"eps": 0}, "eps"),
        ({"matrices": "sgd"}, "matrices"),
        ({"tables": "sparse"}, "tables"),
        ({"table_lr_multiplier": 0.0}, "table_lr_multiplier"),
        ({"muon_momentum": 1.0}, "muon_momentum"),
    ],
)
def test_bad_settings_name_the_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^optimizer\.{field}: must .*got {next(iter(options.values()))!r}"):
        OptimizerConfig(**options)


def members(model: nn.Module, optimizer: GroupedOptimizer) -> dict[str, set[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {group["name"]: {names[parameter] for parameter in group["params"]} for group in optimizer.param_groups}


# Every kind of layer is among the six of the golden-tiny model; an indexer is in layers 1, 3, 4, 5.
NO_DECAY = {
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"model.layers.{i}.{site}_hc.{end}" for i in range(6) for site in ("attn", "ffn") for end in ("base", "scale")),
    *(f"model.layers.{i}.{end}" for i in range(6) for end in ("attn_norm.weight", "ffn_norm.weight")),
    *(
        f"model.layers.{i}.attn.{end}"
        for i in range(6)
        for end in ("core.attn_sink", "q_norm.weight", "kv_norm.weight")
    ),
    *(f"model.layers.{i}.attn.compressor.norm.weight" for i in (1, 4)),
    *(f"model.layers.{i}.attn.indexer.k_norm.weight" for i in (1, 4)),
    *(f"model.layers.{i}.engram.{end}" for i in (1, 3) for end in ("q_weight", "k_weight")),
}
TABLES = {"model.layers.1.engram.embed.weight", "model.layers.3.engram.embed.weight"}
MATRICES = {
    *(f"model.layers.{i}.attn.{end}.weight" for i in range(6) for end in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
    *(f"model.layers.{i}.ffn.shared_experts.{end}.weight" for i in range(6) for end in ("w1", "w2", "w3")),
    *(f"model.layers.{i}.attn.compressor.wkv.weight" for i in (1, 4)),
    "model.layers.1.attn.compressor.wgate.weight",
    *(f"model.layers.{i}.attn.indexer.{end}.weight" for i in (1, 3, 4, 5) for end in ("wq_b", "weights_proj")),
    *(f"model.layers.{i}.attn.indexer.wk.weight" for i in (1, 4)),
    *(f"model.layers.{i}.engram.wkv.weight" for i in (1, 3)),
}
NEVER_MUON = {
    "lm_head.weight",
    *(f"model.layers.{i}.ffn.gate.weight" for i in range(6)),
    *(f"model.layers.{i}.{site}_hc.fn" for i in range(6) for site in ("attn", "ffn")),
    *(f"model.layers.{i}.ffn.experts.{end}" for i in range(6) for end in ("w1", "w2", "w3")),
}


def test_every_parameter_is_in_the_group_of_its_kind(tiny_model: Model) -> None:
    model = tiny_model()
    assert {name for name, _ in model.named_parameters()} == NO_DECAY | TABLES | MATRICES | NEVER_MUON
    adamw = build_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.3))
    groups = {"decay": MATRICES | NEVER_MUON, "muon": set(), "no_decay": NO_DECAY, "tables": TABLES}
    assert members(model, adamw) == groups
    muon = build_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.3, matrices="muon"))
    assert members(model, muon) == groups | {"decay": NEVER_MUON, "muon": MATRICES}
    for optimizer in (adamw, muon):
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0, 0.0]
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.5, 2.5]
        assert [group["rule"] for group in optimizer.param_groups] == ["adamw", "muon", "adamw", "rows"]


def test_frozen_parameters_are_in_no_group_and_empty_groups_stay(tiny_model: Model) -> None:
    model = tiny_model().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    optimizer = build_optimizer(model, OptimizerConfig())
    groups = {"decay": {"lm_head.weight"}, "muon": set(), "no_decay": set(), "tables": set()}
    assert members(model, optimizer) == groups


def test_tables_make_the_gradients_that_their_rule_takes(tiny_model: Model) -> None:
    model = tiny_model()
    ids = torch.randint(5, 500, (1, 16), generator=torch.Generator().manual_seed(0))

    def gradient(optimizer: GroupedOptimizer) -> torch.Tensor:
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        found = model.get_parameter("model.layers.1.engram.embed.weight").grad
        assert found is not None
        return found

    rows = gradient(build_optimizer(model, OptimizerConfig()))
    assert rows.is_sparse
    with pytest.raises(RuntimeError, match=r"layers\.1\.engram\.embed: has a gradient from before .* was 'dense'"):
        build_optimizer(model, OptimizerConfig(tables="dense"))
    model.zero_grad()
    dense = gradient(build_optimizer(model, OptimizerConfig(tables="dense")))
    assert not dense.is_sparse
    torch.testing.assert_close(rows.to_dense(), dense)


def test_a_frozen_table_is_read_and_stays(tiny_model: Model) -> None:
    model = tiny_model()
    table = model.get_parameter("model.layers.1.engram.embed.weight").requires_grad_(False)
    before = table.clone()
    optimizer = build_optimizer(model, OptimizerConfig())
    ids = torch.arange(5, 21)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert table.grad is None
    assert torch.equal(table, before)
    assert members(model, optimizer)["tables"] == TABLES - {"model.layers.1.engram.embed.weight"}


class Net(nn.Module):
    """A member for every group, under names of the model, and one that can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"attn": nn.ModuleDict({"wq": nn.Linear(4, 6, bias=False)})})
        self.layer["engram"] = nn.ModuleDict({"embed": EngramTable(9, 4, 1.0)})
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(6, 3, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.layer["engram"]["embed"](ids)
        return self.lm_head(self.layer["attn"]["wq"](self.norm(rows))).square().sum()


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def step(net: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    net(torch.randint(9, (5,), generator=torch.Generator().manual_seed(seed))).backward()
    optimizer.step()


def same_values(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(value, right.get_parameter(name)) for name, value in left.named_parameters())


def test_one_optimizer_does_what_its_parts_do_alone() -> None:
    """Dense tables: torch's own AdamW and Muon, each over its own parameters, bit for bit."""
    net, parts = make_net(), make_net()
    config = OptimizerConfig(0.01, 0.2, 0.8, 0.9, 1e-3, matrices="muon", tables="dense", muon_momentum=0.9)
    ours = build_optimizer(net, config)
    adam: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-3, "fused": True}
    table = parts.layer["engram"]["embed"].weight
    theirs = [
        AdamW([parts.lm_head.weight], lr=0.01, weight_decay=0.2, **adam),
        Muon([parts.layer["attn"]["wq"].weight], 0.01, 0.2, 0.9, adjust_lr_fn="match_rms_adamw"),
        AdamW(parts.norm.parameters(), lr=0.01, weight_decay=0.0, **adam),
        AdamW([table], lr=0.05, weight_decay=0.0, **adam),
    ]
    for seed in range(4):
        step(net, ours, seed)
        step(parts, theirs[0], seed)
        for optimizer in theirs[1:]:
            optimizer.step()
        for optimizer in theirs:
            optimizer.zero_grad()
    assert same_values(net, parts)
    assert not same_values(net, make_net())


def test_dense_tables_at_the_common_rate_are_plain_adamw() -> None:
    net, plain = make_net(), make_net()
    ours = build_optimizer(net, OptimizerConfig(0.01, tables="dense", table_lr_multiplier=1.0))
    vectors = [*plain.norm.parameters(), plain.layer["engram"]["embed"].weight]
    matrices = [plain.layer["attn"]["wq"].weight, plain.lm_head.weight]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for seed in range(4):
        step(net, ours, seed)
        step(plain, theirs, seed)
    assert same_values(net, plain)


def restored(state: dict[str, Any], freeze: bool, config: OptimizerConfig) -> tuple[Net, GroupedOptimizer]:
    """Another net and optimizer, with the state as it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    net = make_net()
    net.norm.requires_grad_(not freeze)
    optimizer = build_optimizer(net, config)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    return net, optimizer


@pytest.mark.parametrize("freeze", [False, True], ids=["all", "frozen norm, so an empty group"])
@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_saved_optimizer_goes_on_bit_for_bit_with_all_its_settings(freeze: bool, matrices: Any) -> None:
    config = OptimizerConfig(0.01, 0.3, 0.8, 0.97, 1e-7, matrices=matrices, muon_momentum=0.85)
    net = make_net()
    net.norm.requires_grad_(not freeze)
    optimizer = build_optimizer(net, config)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for seed in range(3):
        step(net, optimizer, seed)
        schedule.step()
    other, going_on = restored(optimizer.state_dict(), freeze, OptimizerConfig(matrices=matrices))
    other.load_state_dict(net.state_dict())
    assert [len(group["params"]) == 0 for group in going_on.param_groups] == [False, matrices == "adamw", freeze, False]
    for group, own in zip(going_on.param_groups, optimizer.param_groups, strict=True):
        settings = group_settings(config)[group["name"]]
        assert {key: group[key] for key in settings} == settings
        assert {key: value for key, value in group.items() if key != "params"} == {
            key: value for key, value in own.items() if key != "params"
        }
    for seed in range(3, 6):
        step(net, optimizer, seed)
        step(other, going_on, seed)
    assert same_values(net, other)


def test_a_schedule_moves_every_group_and_a_copy_moves_alone() -> None:
    net = make_net()
    optimizer = build_optimizer(net, OptimizerConfig(0.01, matrices="muon"))
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    step(net, optimizer, 0)
    twin_net, twin = copy.deepcopy((net, optimizer))
    schedule.step()
    step(net, optimizer, 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005, 0.005, 0.025]
    before = copy.deepcopy(twin_net)
    assert [group["lr"] for group in twin.param_groups] == [0.01, 0.01, 0.01, 0.05]
    for group in twin.param_groups:
        group["lr"] = 0.0
    step(twin_net, twin, 1)
    assert same_values(twin_net, before), "the optimizers behind a copy see its groups"
    step(net, optimizer, 2)
    assert not same_values(net, before)


def test_a_closure_runs_once_with_gradients() -> None:
    net = make_net()
    optimizer = build_optimizer(net, OptimizerConfig())
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        loss = net(torch.tensor([1, 2]))
        loss.backward()
        return float(loss.detach())

    with torch.no_grad():
        assert optimizer.step(closure) == float(make_net()(torch.tensor([1, 2])).detach())
    assert calls == [True]
    assert not same_values(net, make_net())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tables": "dense"}, r"group 'tables' of the optimizer learns by 'rows' in the checkpoint, by 'adamw' here"),
        ({"matrices": "muon"}, r"group 'decay' .* 2 parameters in the checkpoint, 1 here; .*optimizer\.matrices"),
    ],
)
def test_state_of_another_rule_is_refused_before_anything_changes(changed: dict[str, Any], message: str) -> None:
    net = make_net()
    optimizer = build_optimizer(net, OptimizerConfig())
    step(net, optimizer, 0)
    other = build_optimizer(make_net(), OptimizerConfig(**changed))
    before = copy.deepcopy(other.param_groups)
    with pytest.raises(ValueError, match=f"^ckpt_path: {message}"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state
    assert [group["rule"] for group in other.param_groups] == [group["rule"] for group in before]


def test_a_checkpoint_with_other_groups_is_refused() -> None:
    net = make_net()
    old = AdamW([{"params": net.parameters(), "name": "decay"}])
    with pytest.raises(ValueError, match=r"^ckpt_path: 1 groups of parameters in the checkpoint's optimizer, 4 here"):
        build_optimizer(net, OptimizerConfig()).load_state_dict(old.state_dict())
