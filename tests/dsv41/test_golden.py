"""The whole model against the reference's numbers (data/golden)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import BackendConfig
from dsv41.ops.selection import membership
from dsv41.weights.names import released_slots

BACKENDS = [
    pytest.param(BackendConfig(attn="eager", loss="full"), id="eager"),
    pytest.param(BackendConfig(attn="sdpa", experts="dense"), id="sdpa-dense"),
    pytest.param(BackendConfig(attn="sparse", experts="grouped"), id="sparse-grouped"),
    pytest.param(BackendConfig(), id="default"),
    pytest.param(BackendConfig(gradient_checkpointing=True), id="recompute"),
]


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def run(model: Any, golden: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Output of the golden batch, and what the submodules put out on the way."""
    seen: dict[str, Any] = {}
    hooks = []
    for index, block in enumerate(model.model.layers):
        parts = {"block": block, "attn": block.attn, "ffn": block.ffn, "gate": block.ffn.gate, "engram": block.engram}
        parts["indexer"] = block.attn.indexer
        for name, module in parts.items():
            if module is not None:
                key = f"{name}.{index}"
                hooks.append(module.register_forward_hook(lambda _m, _a, out, key=key: seen.__setitem__(key, out)))
    out = model(
        golden["input_ids"],
        attention_mask=golden["attention_mask"],
        position_ids=golden["position_ids"],
        labels=golden["labels"],
        output_hidden_states=True,
        return_hidden_states=True,
    )
    for hook in hooks:
        hook.remove()
    assert (out.logits is None) == (model.backend.loss == "chunked")
    if out.logits is None:
        out.logits = model.project(out.hidden_states[-1])
    return out, seen


def assert_near(ours: Tensor, theirs: Tensor, live: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours[live], theirs[live], atol=atol, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values(golden_model: Any, golden: dict[str, Tensor], backend: BackendConfig) -> None:
    model = golden_model(backend=backend)
    out, seen = run(model, golden)
    live = golden["attention_mask"].bool()
    for index, streams in enumerate(out.hidden_states[:-1]):
        assert_near(streams, golden[f"streams.{index}"], live)
    for index in range(6):
        assert_near(seen[f"block.{index}"][1], golden[f"pre_mix.{index + 1}"], live, 1e-5)
        assert_near(seen[f"attn.{index}"][0], golden[f"attn_out.{index}"], live)
        assert_near(seen[f"ffn.{index}"][0], golden[f"ffn_out.{index}"], live)
        assert (seen[f"attn.{index}"][0][~live] == 0).all()
    for index in (1, 3):
        assert_near(seen[f"engram.{index}"], golden[f"engram_out.{index}"], live)
    for index in (1, 4):
        state = seen[f"attn.{index}"][1]
        groups = state.group_mask
        assert_near(state.compressed_kv, golden[f"compressed_kv.{index}"], groups)
        assert_near(state.index_keys, golden[f"index_keys.{index}"], groups)
    assert_near(out.hidden_states[-1], golden["final_hidden"], live)
    assert_near(out.logits, golden["logits"], live)
    assert abs(float(out.loss.detach() - golden["loss"])) < 1e-5


def test_discrete_choices(golden_model: Any, golden: dict[str, Tensor]) -> None:
    _, seen = run(golden_model(), golden)
    live = golden["attention_mask"].bool()
    for index in (1, 3, 4, 5):
        positions = 40 // (2 if index < 4 else 1)
        ours = membership(seen[f"indexer.{index}"][0], positions)
        theirs = membership(golden[f"topk_indices.{index}"], positions)
        assert torch.equal(ours[live], theirs[live]), f"selection of layer {index}"
    for index in range(6):
        experts, weights, _ = seen[f"gate.{index}"]
        flat = live.flatten()
        order = golden[f"router_indices.{index}"].argsort(-1)
        theirs = golden[f"router_indices.{index}"].gather(-1, order)
        ours = experts.sort(-1)
        assert torch.equal(ours.values[flat], theirs[flat]), f"experts of layer {index}"
        their_weights = golden[f"router_weights.{index}"].gather(-1, order)
        assert_near(weights.gather(-1, ours.indices), their_weights, flat, 1e-5)
    blocks = seen["indexer.4"][1]
    pool = membership(blocks, 20).repeat_interleave(2, dim=-1)
    visible = torch.ones(40, 40, dtype=torch.bool).tril() & seen["attn.4"][1].group_mask.unsqueeze(1)
    assert torch.equal((pool & visible)[live], golden["candidates.4"].bool()[live])


def test_four_candidate_blocks(golden_model: Any, golden: dict[str, Tensor]) -> None:
    out, seen = run(golden_model(candidate_topk_blocks=4), golden)
    live = golden["attention_mask"].bool()
    assert_near(out.logits, golden["blocks4.logits"], live)
    assert abs(float(out.loss.detach() - golden["blocks4.loss"])) < 1e-5
    ours = membership(seen["indexer.5"][0], 40)
    assert torch.equal(ours[live], membership(golden["blocks4.topk_indices.5"], 40)[live])
    assert not torch.equal(golden["blocks4.logits"][live], golden["logits"][live])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(golden_model: Any, golden: dict[str, Tensor], golden_dir: Any, backend: BackendConfig) -> None:
    model = golden_model(backend=backend)
    run(model, golden)[0].loss.backward()
    slots = released_slots(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    def gradient(name: str) -> Tensor | None:
        slot = slots[name]
        whole = tensors[slot.name].grad
        return whole if whole is None or slot.expert is None else whole[slot.expert]

    stored = [name for name in golden if name.startswith("grad.")]
    assert len(stored) == 37
    for name in stored:
        ours = gradient(name.removeprefix("grad."))
        assert ours is not None, name
        assert relative(ours, golden[name]) < 1e-3, name
    norms = json.loads((golden_dir / "grad_norms.json").read_text())
    for name, norm in norms["grad_l2_norms"].items():
        ours = gradient(name)
        assert ours is not None, name
        assert float(ours.norm()) == pytest.approx(norm, rel=1e-3), name
    without = {name for name in slots if gradient(name) is None}
    assert without == set(norms["parameters_without_gradient"])
    assert without | set(norms["grad_l2_norms"]) == set(slots)
