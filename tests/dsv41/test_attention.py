"""CSA2 attention: both cores and the whole module against float64 loops, and what passes from layer to layer.

The loops gather what each query attends to from lists of positions. Of the module under test they take the weights,
the selection (whose own reference is in the tests of the indexer) and the fake quantiser; projections, norms,
rotations, pooling, sink softmax and the grouped output projection are written out again. The module is compared in
float64, rotations included: a rounding of fp32, which depends on the CPU, can move a cache value by a whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionState, DeepseekV41Attention
from dsv41.ops.dense_attention import MASKED_ATTENTION, window_mask
from dsv41.ops.quantization import fake_quantize

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]
Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

CORES = sorted(MASKED_ATTENTION)
IMPLEMENTATIONS = [*CORES, "sparse"]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------ cores

# Attended positions of 2 rows of 5 queries over 5 raw and 4 compressed positions. Two queries see nothing.
ATTENDED = [
    [[0], [0, 1], [0, 1, 2, 5], [1, 2, 3, 5, 6], [2, 3, 4, 6, 8]],
    [[0], [1, 5], [], [5, 6, 7, 8], []],
]


def mask_of(attended: list[list[list[int]]], length: int) -> Tensor:
    return torch.tensor([[[t in seen for t in range(length)] for seen in row] for row in attended])


def core_by_hand(q: Tensor, kv: Tensor, attended: list[list[list[int]]], sink: Tensor) -> Tensor:
    """One query, head and key at a time, in the dtype of the inputs; differentiable."""
    rows = []
    for b, row in enumerate(attended):
        queries = []
        for s, seen in enumerate(row):
            heads = []
            for h in range(q.shape[2]):
                logits = [(q[b, s, h] * kv[b, t]).sum() / math.sqrt(q.shape[3]) for t in seen]
                top = max(float(value.detach()) for value in [*logits, sink[h]])
                powers = [torch.exp(value - top) for value in logits]
                total = torch.exp(sink[h] - top) + sum(powers)
                mixed = torch.zeros_like(q[b, s, h])
                for power, t in zip(powers, seen, strict=True):
                    mixed = mixed + power / total * kv[b, t]
                heads.append(mixed)
            queries.append(torch.stack(heads))
        rows.append(torch.stack(queries))
    return torch.stack(rows)


def core_inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    q, kv = random(2, 5, 3, 4, seed=0, dtype=dtype) * scale, random(2, 9, 4, seed=1, dtype=dtype) * 2
    sink = torch.tensor([0.7, -2.0, 1.5], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return q.requires_grad_(), kv.requires_grad_(), sink.requires_grad_()


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("scale", [1.0, 40.0])  # the larger one saturates the softmax
def test_core_values_and_gradients_equal_a_loop(name: str, dtype: torch.dtype, tolerance: float, scale: float) -> None:
    inputs = core_inputs(dtype, scale)
    incoming = random(2, 5, 3, 4, seed=2)
    ours = MASKED_ATTENTION[name](*inputs[:2], mask_of(ATTENDED, 9), inputs[2])
    assert ours.dtype == dtype
    gradients = torch.autograd.grad(ours, inputs, incoming.to(dtype))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    theirs = core_by_hand(exact[0], exact[1], ATTENDED, exact[2])
    their_gradients = torch.autograd.grad(theirs, exact, incoming.double())
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    for part, mine, reference in zip(("q", "kv", "sink"), gradients, their_gradients, strict=True):
        size = float(reference.abs().max())
        assert size > 1e-2, part
        error = float((mine.double() - reference).abs().max())
        # Gradients are sums of terms that grow with the logits' scale.
        assert error <= tolerance * size * max(scale, 5), (part, error, size)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(name: str, dtype: torch.dtype) -> None:
    inputs = core_inputs(dtype)
    ours = MASKED_ATTENTION[name](*inputs[:2], mask_of(ATTENDED, 9), inputs[2])
    for b, row in enumerate(ATTENDED):
        for s, seen in enumerate(row):
            assert ours[b, s].any() == bool(seen)
    gradients = torch.autograd.grad(ours, inputs, random(2, 5, 3, 4, seed=2).to(dtype))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][1, [2, 4]].any()
    unseen = [[t for t in range(9) if not any(t in seen for seen in row)] for row in ATTENDED]
    for b in range(2):
        assert unseen[b]
        assert not gradients[1][b, unseen[b]].any()


@pytest.mark.parametrize("name", CORES)
def test_a_batch_that_sees_nothing_at_all_gives_zero(name: str) -> None:
    inputs = core_inputs(torch.float32)
    ours = MASKED_ATTENTION[name](*inputs[:2], torch.zeros(2, 5, 9, dtype=torch.bool), inputs[2])
    assert not ours.any()
    for gradient in torch.autograd.grad(ours.sum(), inputs):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", CORES)
def test_the_sink_competes_with_the_keys_as_a_logit_per_head(name: str) -> None:
    q, kv = random(1, 1, 3, 4, seed=3, dtype=torch.float64), random(1, 1, 4, seed=4, dtype=torch.float64)
    sink = torch.tensor([-40.0, 0.3, 40.0], dtype=torch.float64)
    ours = MASKED_ATTENTION[name](q, kv, torch.ones(1, 1, 1, dtype=torch.bool), sink)
    for h in range(3):
        logit = float(q[0, 0, h] @ kv[0, 0]) / 2
        share = 1 / (1 + math.exp(float(sink[h]) - logit))
        torch.testing.assert_close(ours[0, 0, h], share * kv[0, 0], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", CORES)
def test_bf16_inputs_are_attended_in_fp32_and_cast_once(name: str) -> None:
    # Wider than elsewhere, so that bf16 arithmetic would show in many entries.
    q = (random(2, 5, 3, 32, seed=5) * 2).bfloat16().requires_grad_()
    kv = (random(2, 9, 32, seed=6) * 2).bfloat16().requires_grad_()
    sink = torch.tensor([0.71, -2.03, 1.5003], requires_grad=True)
    incoming = random(2, 5, 3, 32, seed=7).bfloat16()
    ours = MASKED_ATTENTION[name](q, kv, mask_of(ATTENDED, 9), sink)
    assert ours.dtype == torch.bfloat16
    gradients = torch.autograd.grad(ours, (q, kv, sink), incoming)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, kv, sink)]
    theirs = core_by_hand(exact[0], exact[1], ATTENDED, exact[2])
    # Only values in the very middle of two bf16 numbers may fall to the other side.
    assert (ours != theirs.bfloat16()).double().mean() < 0.005
    for mine, reference in zip(gradients, torch.autograd.grad(theirs, exact, incoming.double()), strict=True):
        assert (mine.double() - reference).norm() < 3e-3 * reference.norm()


@pytest.mark.parametrize("name", CORES)
def test_autocast_has_no_say_in_the_core(name: str) -> None:
    q, kv, sink = (tensor.detach() for tensor in core_inputs(torch.float32))
    core, mask = MASKED_ATTENTION[name], mask_of(ATTENDED, 9)
    with torch.autocast("cpu", torch.bfloat16):
        inside = core(q, kv, mask, sink)
    assert torch.equal(inside, core(q, kv, mask, sink))


def test_the_window_holds_the_last_live_positions_up_to_the_query() -> None:
    live = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    for window in (1, 3, 50):
        expected = [[[p - window < t <= p and bool(live[b, t]) for t in range(7)] for p in range(7)] for b in range(2)]
        assert window_mask(live, window).tolist() == expected


# ------------------------------------------------------------------ the module

WIDE = torch.float64
HIDDEN, HEADS, WIDTH, ROPE, GROUPS, RANK, WINDOW, LENGTH = 20, 4, 18, 6, 2, 5, 3, 13
KINDS = ("window", "full-2", "reuse", "reindex-2", "full-1", "reindex-1")
LIVE = [LENGTH, 9]


def make_config(tiny_config: MakeConfig) -> Any:
    return tiny_config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        head_dim=WIDTH,
        qk_rope_head_dim=ROPE,
        q_lora_rank=10,
        o_groups=GROUPS,
        o_lora_rank=RANK,
        sliding_window=WINDOW,
        compress_ratios=[0, 2, 2, 2, 1, 1],
        kv_source_layer_ids=[1, 4],
        index_source_layer_ids=[1, 3, 4, 5],
        index_n_heads=3,
        index_head_dim=10,
        index_topk=2,
        candidate_source_layer_id=4,
        candidate_topk_blocks=2,
        candidate_block_size=2,
        rope_theta=50.0,
        compress_rope_theta=700.0,
        rope_scaling=None,
        engram_layer_ids=[],
        engram_num_embeddings=[],
    ).text_config


def make_layers(config: Any, attn: Any = "eager", dtype: torch.dtype = torch.float32) -> list[DeepseekV41Attention]:
    """All six layers with weights that are nowhere symmetric, zero or one."""
    layers = [DeepseekV41Attention(config, layer, BackendConfig(attn=attn)) for layer in range(6)]
    seed = 1000
    for layer in layers:
        for name, parameter in layer.named_parameters():
            seed += 1
            values = random(*parameter.shape, seed=seed)
            if "norm" in name:
                values = 1 + 0.3 * values
            elif name != "core.attn_sink":
                values = values * (2.0 if name == "wq_b.weight" else 1.0) * parameter.shape[-1] ** -0.5
            parameter.data.copy_(values)
    return [layer.to(dtype) for layer in layers]


def layer_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random(2, LENGTH, HIDDEN, seed=50 + layer).to(dtype) for layer in range(6)]


def live_mask() -> Tensor:
    return torch.arange(LENGTH) < torch.tensor(LIVE).unsqueeze(-1)


def run_layers(
    layers: list[DeepseekV41Attention], inputs: list[Tensor], live: Tensor | None = None
) -> tuple[list[Tensor], list[AttentionState]]:
    """Outputs and published states of all layers, in order."""
    state, outputs, states = AttentionState(), [], []
    batch, length = inputs[0].shape[:2]
    live = torch.ones(batch, length, dtype=torch.bool) if live is None else live
    for layer, x in zip(layers, inputs, strict=True):
        out, state = layer(x, state, torch.arange(length).expand(batch, -1), live)
        outputs.append(out)
        states.append(state)
    return outputs, states


@pytest.fixture
def exact_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations in float64 instead of fp32, which alone would be the largest error (`test_rope.py` compares those)."""

    def frequencies(config: Any, compressed: bool) -> Tensor:
        theta = config.compress_rope_theta if compressed else config.rope_theta
        return theta ** (-torch.arange(0, ROPE, 2, dtype=WIDE) / ROPE)

    def table(frequencies: Tensor, positions: Tensor) -> Tensor:
        angles = positions.double().unsqueeze(-1) * frequencies
        return torch.polar(torch.ones_like(angles), angles)

    monkeypatch.setattr("dsv41.attention.layer_frequencies", frequencies)
    monkeypatch.setattr("dsv41.attention.rotation_table", table)


def unit(vector: Tensor, gain: Tensor) -> Tensor:
    return vector / math.sqrt(float(vector.square().mean()) + 1e-20) * gain.double()


def turn(vector: Tensor, position: int, theta: float, sign: int = 1) -> Tensor:
    out = vector.clone()
    start = len(vector) - ROPE
    for pair in range(ROPE // 2):
        angle = sign * position * theta ** (-2 * pair / ROPE)
        a, b = float(vector[start + 2 * pair]), float(vector[start + 2 * pair + 1])
        out[start + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        out[start + 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def compressed_by_hand(source: DeepseekV41Attention, x: Tensor, theta: float) -> Tensor:
    """Shared compressed keys [T, D] of one row, from the layer that owns the compressor."""
    compressor = source.compressor
    assert compressor is not None
    ratio = compressor.ratio
    keys = []
    for start in range(0, len(x) - ratio + 1, ratio):
        values = torch.stack([compressor.wkv.weight.double() @ x[start + offset] for offset in range(ratio)])
        if compressor.wgate is None:
            pooled = values[0]
        else:
            gates = torch.stack([compressor.wgate.weight.double() @ x[start + offset] for offset in range(ratio)])
            pooled = (values * gates.exp()).sum(0) / gates.exp().sum(0)
        keys.append(turn(unit(pooled, compressor.norm.weight), start, theta))
    return fake_quantize(torch.stack(keys), "nvfp4")


def attention_by_hand(
    module: DeepseekV41Attention, source: DeepseekV41Attention | None, x: Tensor, source_x: Tensor, selection: Any
) -> Tensor:
    """One row [S, H] of live tokens; `selection` lists the compressed positions of each query."""
    theta = 50.0 if module.ratio == 0 else 700.0
    x, source_x = x.double(), source_x.double()
    raw = torch.stack(
        [turn(unit(module.wkv.weight.double() @ v, module.kv_norm.weight), p, theta) for p, v in enumerate(x)]
    )
    raw = fake_quantize(raw, "fp8")
    shared = None if source is None else compressed_by_hand(source, source_x, theta)
    outputs = []
    for position, vector in enumerate(x):
        latent = unit(module.wq_a.weight.double() @ vector, module.q_norm.weight)
        q = (module.wq_b.weight.double() @ latent).view(HEADS, WIDTH)
        keys = [raw[t] for t in range(max(0, position - WINDOW + 1), position + 1)]
        if shared is not None:
            keys += [shared[t] for t in selection[position]]
        heads = []
        for h in range(HEADS):
            turned = turn(q[h], position, theta)
            powers = [math.exp(float(turned @ key) / math.sqrt(WIDTH)) for key in keys]
            total = math.exp(float(module.core.attn_sink[h])) + sum(powers)
            mixed = sum(
                (power / total * key for power, key in zip(powers, keys, strict=True)), torch.zeros(WIDTH, dtype=WIDE)
            )
            heads.append(turn(mixed, position, theta, sign=-1))
        ranks = []
        for group in range(GROUPS):
            members = torch.cat(heads[group * HEADS // GROUPS : (group + 1) * HEADS // GROUPS])
            ranks.append(module.wo_a.weight[group * RANK : (group + 1) * RANK].double() @ members)
        outputs.append(module.wo_b.weight.double() @ torch.cat(ranks))
    return torch.stack(outputs)


@torch.no_grad()
@pytest.mark.usefixtures("exact_rotations")
@pytest.mark.parametrize("attn", IMPLEMENTATIONS)
@pytest.mark.parametrize("index", range(6), ids=KINDS)
def test_every_kind_of_layer_equals_a_loop(tiny_config: MakeConfig, attn: str, index: int) -> None:
    config = make_config(tiny_config)
    layers, inputs = make_layers(config, attn, WIDE), layer_inputs(WIDE)
    outputs, states = run_layers(layers, inputs, live_mask())
    source = None if layers[index].ratio == 0 else max(s for s in config.kv_source_layer_ids if s <= index)
    beyond_window = 0
    for row, length in enumerate(LIVE):
        selection: list[list[int]] = [[]] * length
        if source is not None:
            chosen = states[index].selection
            assert chosen is not None
            selection = [[t for t in chosen[row, p].tolist() if t >= 0] for p in range(length)]
            ratio = layers[index].ratio
            beyond_window += sum(t * ratio + ratio - 1 <= p - WINDOW for p in range(length) for t in selection[p])
        expected = attention_by_hand(
            layers[index],
            None if source is None else layers[source],
            inputs[index][row, :length],
            inputs[source or 0][row, :length],
            selection,
        )
        torch.testing.assert_close(outputs[index][row, :length], expected, atol=1e-12, rtol=1e-11)
        assert not outputs[index][row, length:].any()
    assert (beyond_window > 0) == (source is not None)


@torch.no_grad()
@pytest.mark.parametrize("attn", IMPLEMENTATIONS)
def test_padding_changes_nothing_for_live_tokens(tiny_config: MakeConfig, attn: str) -> None:
    layers, inputs = make_layers(make_config(tiny_config), attn, WIDE), layer_inputs(WIDE)
    live = live_mask()
    outputs, _ = run_layers(layers, inputs, live)
    other = [torch.where(live.unsqueeze(-1), x, random(*x.shape, seed=99, dtype=WIDE) * 9) for x in inputs]
    alone = [x[1:, : LIVE[1]] for x in inputs]
    changed, cropped = run_layers(layers, other, live)[0], run_layers(layers, alone)[0]
    for mine, theirs, short in zip(outputs, changed, cropped, strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine[1:, : LIVE[1]], short, atol=1e-13, rtol=1e-12)
        assert mine[0, LIVE[1] :].any(-1).all()


@torch.no_grad()
@pytest.mark.parametrize("attn", IMPLEMENTATIONS)
def test_no_layer_sees_the_future(tiny_config: MakeConfig, attn: str) -> None:
    layers, inputs = make_layers(make_config(tiny_config), attn, WIDE), layer_inputs(WIDE)
    outputs, _ = run_layers(layers, inputs)
    for cut in (1, 6, 9):
        changed = [torch.cat((x[:, :cut], random(2, LENGTH - cut, HIDDEN, seed=98, dtype=WIDE)), dim=1) for x in inputs]
        for before, after in zip(outputs, run_layers(layers, changed)[0], strict=True):
            torch.testing.assert_close(before[:, :cut], after[:, :cut], atol=1e-13, rtol=0)
            assert (before[:, cut:] - after[:, cut:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_dtype_of_the_input_is_kept(tiny_config: MakeConfig, dtype: torch.dtype) -> None:
    outputs, states = run_layers(make_layers(make_config(tiny_config), dtype=dtype), layer_inputs(dtype))
    assert {out.dtype for out in outputs} == {dtype}
    assert states[-1].compressed_kv is not None
    assert states[-1].compressed_kv.dtype == dtype


# ------------------------------------------------------------------ gradients between layers


def compressor_gradients(layers: list[DeepseekV41Attention], loss: Tensor, source: int = 1) -> dict[str, Tensor]:
    compressor = layers[source].compressor
    assert compressor is not None
    named = dict(compressor.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True)
    }


@pytest.mark.parametrize("attn", IMPLEMENTATIONS)
@pytest.mark.parametrize("later", [2, 3], ids=["reuse", "reindex"])
def test_gradients_of_later_layers_reach_the_compressor_of_their_source(
    tiny_config: MakeConfig, attn: str, later: int
) -> None:
    layers = make_layers(make_config(tiny_config), attn, WIDE)
    outputs, _ = run_layers(layers, layer_inputs(WIDE), live_mask())
    incoming = random(2, LENGTH, HIDDEN, seed=60, dtype=WIDE)
    own, reused = (outputs[1] * incoming).sum(), (outputs[later] * incoming.flip(1)).sum()
    from_own, from_reuse = compressor_gradients(layers, own), compressor_gradients(layers, reused)
    both = compressor_gradients(layers, own + reused)
    cut = compressor_gradients(layers, own + reused.detach())
    for name in ("wkv.weight", "wgate.weight", "norm.weight"):
        assert from_reuse[name].abs().max() > 1e-3, name
        torch.testing.assert_close(both[name], from_own[name] + from_reuse[name], atol=1e-13, rtol=1e-11)
        assert torch.equal(cut[name], from_own[name]), name
        # Layers over other keys, or none, leave this compressor alone.
        for other in (0, 4, 5):
            assert not compressor_gradients(layers, outputs[other].sum())[name].any(), (name, other)


@pytest.mark.parametrize("attn", IMPLEMENTATIONS)
@pytest.mark.parametrize(("source", "later"), [(1, 2), (1, 3), (4, 5)], ids=["reuse", "reindex-2", "reindex-1"])
def test_gradients_into_the_compressor_equal_finite_differences(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, attn: str, source: int, later: int
) -> None:
    # Rounding is off: its straight-through gradient is no derivative of it.
    monkeypatch.setattr("dsv41.attention.fake_quantize", lambda x, name: x)
    monkeypatch.setattr("dsv41.indexer.fake_quantize", lambda x, name: x)
    layers, inputs = make_layers(make_config(tiny_config), attn, torch.float64), layer_inputs(torch.float64)
    incoming = random(2, LENGTH, HIDDEN, seed=61, dtype=torch.float64)

    def loss() -> tuple[Tensor, Tensor]:
        outputs, states = run_layers(layers, inputs, live_mask())
        selection = states[later].selection
        assert selection is not None
        return (outputs[later] * incoming).sum(), selection

    value, selection = loss()
    gradients = compressor_gradients(layers, value, source)
    assert layers[source].compressor is not None
    for seed, (name, parameter) in enumerate(layers[source].compressor.named_parameters()):  # type: ignore[union-attr]
        direction = random(*parameter.shape, seed=70 + seed, dtype=torch.float64)
        sides = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                moved, choice = loss()
                parameter.add_(direction, alpha=-step)
            assert torch.equal(choice, selection)
            sides.append(float(moved))
        slope = (sides[0] - sides[1]) / 2e-5
        assert abs(slope) > 1e-3, name
        assert float((gradients[name] * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-7), name


def test_two_forwards_in_flight_do_not_disturb_each_other(tiny_config: MakeConfig) -> None:
    layers, inputs = make_layers(make_config(tiny_config)), layer_inputs()
    parameters = [p for layer in layers for name, p in layer.named_parameters() if not name.startswith("indexer")]

    def total(values: list[Tensor]) -> Tensor:
        return sum((out.square().sum() for out in run_layers(layers, values, live_mask())[0]), torch.zeros(()))

    alone = torch.autograd.grad(total(inputs), parameters)
    first = total(inputs)
    second = total([x.flip(0) * 0.5 for x in inputs])
    for mine, theirs in zip(torch.autograd.grad(first, parameters), alone, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(torch.autograd.grad(second, parameters), alone, strict=True):
        assert not torch.equal(mine, theirs)


# ------------------------------------------------------------------ state


def fields(state: AttentionState) -> dict[str, Tensor | None]:
    return state._asdict()


@pytest.mark.parametrize("field", AttentionState._fields)
def test_the_state_is_frozen(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(AttentionState(), field, torch.zeros(1))


def test_layers_never_write_into_a_state_they_were_given(tiny_config: MakeConfig) -> None:
    layers, inputs = make_layers(make_config(tiny_config)), layer_inputs()
    positions, live = torch.arange(LENGTH).expand(2, -1), live_mask()
    state = AttentionState()
    history: list[tuple[AttentionState, dict[str, Any]]] = []
    for layer, x in zip(layers, inputs, strict=True):
        before = fields(state)
        kept = {name: None if t is None else (t, t._version, t.detach().clone()) for name, t in before.items()}
        history.append((state, kept))
        _, state = layer(x, state, positions, live)
    assert state is not history[0][0]
    filled = 0
    for old, kept in history:
        for name, value in fields(old).items():
            if kept[name] is None:
                assert value is None
                continue
            same, version, copy = kept[name]
            assert value is same
            assert value is not None
            assert value._version == version
            assert torch.equal(value, copy)
            filled += 1
    assert filled == 4 * 4 + 1  # four tensors before each of layers 2 to 5, and candidates before the last


def test_a_reuse_layer_passes_the_state_on_as_it_is(tiny_config: MakeConfig) -> None:
    _, states = run_layers(make_layers(make_config(tiny_config)), layer_inputs(), live_mask())
    assert fields(states[0]) == dict.fromkeys(fields(states[0]))  # a window layer publishes nothing
    for name, value in fields(states[2]).items():
        assert value is getattr(states[1], name), name
    for name in ("compressed_kv", "index_keys", "group_mask"):
        assert getattr(states[3], name) is getattr(states[1], name)
        assert getattr(states[4], name) is not getattr(states[1], name)
    assert states[3].selection is not states[1].selection


def hidden_tensors(root: nn.Module) -> list[str]:
    """Tensors and states that modules hold beside their parameters and buffers."""
    found = []

    def visit(name: str, value: Any) -> None:
        if isinstance(value, Tensor | AttentionState):
            found.append(name)
        elif isinstance(value, dict):
            for key, entry in value.items():
                visit(f"{name}[{key}]", entry)
        elif isinstance(value, list | tuple | set):
            for entry in value:
                visit(f"{name}[]", entry)

    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                visit(f"{path}.{name}", value)
    return found


def test_no_tensor_stays_on_a_module_after_forward_and_backward(golden_model: MakeModel) -> None:
    model = golden_model()
    names = {path: sorted(vars(module)) for path, module in model.named_modules()}
    buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    assert hidden_tensors(model) == []
    ids = torch.randint(3, 500, (2, 21), generator=torch.Generator().manual_seed(0))
    loss = model(ids, labels=ids).loss
    assert hidden_tensors(model) == []
    loss.backward()
    assert hidden_tensors(model) == []
    assert {path: sorted(vars(module)) for path, module in model.named_modules()} == names
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0], name
        assert buffer._version == buffers[name][1], name
    model.model.layers[0].attn.state = AttentionState()  # the search does find such things
    assert len(hidden_tensors(model)) == 1
