"""What the decoder promises beyond its numbers: causality, padding, refused inputs, loss, recomputation, precision,
initial values, and image tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionState
from dsv41.inputs import check_inputs
from dsv41.weights.names import released_slots

Models = Callable[..., DeepseekV41ForCausalLM]

# The dense experts run the same matrix products whatever the tokens; "loop" batches tokens per expert, and products of
# other heights may round differently.
DENSE = BackendConfig(attn="eager", experts="dense", loss="full")
WITH_LOGITS = BackendConfig(loss="full")
# Products of other heights round differently, by how much depends on the CPU, and in fp32 the difference can move a
# cache value or a selection. Hence float64: logits of size 6 then differ by about 1e-14.
ROUNDING = 1e-11
NO_ENGRAM: dict[str, Any] = {"engram_layer_ids": [], "engram_num_embeddings": []}
RATIOS = {ratio: {"compress_ratios": [0, ratio, ratio, ratio, 1, 1]} for ratio in (2, 3, 4)} | {
    1: {"compress_ratios": [0, 1, 1, 1, 1, 1]}
}


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 500, (batch, length), generator=torch.Generator().manual_seed(seed))


def with_other_tail(ids: Tensor, start: int) -> Tensor:
    """`ids` with every token from `start` on replaced by a different one."""
    other = ids.clone()
    shift = torch.randint(1, 512, ids[:, start:].shape, generator=torch.Generator().manual_seed(start))
    other[:, start:] = (ids[:, start:] + shift) % 512
    return other


def random_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Gradients of one backward pass alone."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    assert ours.keys() == theirs.keys()
    assert sum(gradient is not None for gradient in ours.values()) > 50
    for name, gradient in ours.items():
        other = theirs[name]
        if gradient is None or other is None:
            assert gradient is other, name
        else:
            assert torch.equal(gradient, other), name


@torch.no_grad()
def outputs(model: DeepseekV41ForCausalLM, ids: Tensor) -> list[Tensor]:
    """Logits and all streams."""
    out = model(ids, output_hidden_states=True)
    return [out.logits, *out.hidden_states]


def refuses(model: DeepseekV41ForCausalLM, message: str, *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(ValueError, match=message):
        model(*arguments, **keywords)


# ---------------------------------------------------------------- causality


@pytest.mark.parametrize("engram", [True, False], ids=["engram", "no engram"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_later_tokens_change_no_bit_around_group_boundaries(tiny_model: Models, ratio: int, engram: bool) -> None:
    overrides = RATIOS[ratio] | {"initializer_range": 0.3} | ({} if engram else NO_ENGRAM)
    if ratio == 1:
        overrides |= {"kv_source_layer_ids": [1], "candidate_source_layer_id": 1}
    model = tiny_model(backend=DENSE, **overrides)
    assert (model.model.engram_hash is not None) is engram
    for length in range(1, 2 * ratio + 2):
        ids = random_ids(1, length, seed=length)
        # Row i has another tail from i on; the same products in the same places, so nothing may round differently.
        before = outputs(model, ids.repeat(length, 1))
        after = outputs(model, torch.cat([with_other_tail(ids, start) for start in range(length)]))
        for ours, theirs in zip(after, before, strict=True):
            for start in range(length):
                assert torch.equal(ours[start, :start], theirs[start, :start]), (length, start)
                assert not torch.equal(ours[start, start], theirs[start, start])


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [17, 40])
def test_later_tokens_change_no_bit_beyond_window_and_selection(golden_model: Models, length: int, attn: Any) -> None:
    model = golden_model(backend=BackendConfig(experts="dense", attn=attn))
    ids = random_ids(2, length, seed=length)
    before = outputs(model, ids)
    for start in (1, 8, 9, 12, 13, length - 2, length - 1):
        after = outputs(model, with_other_tail(ids, start))
        for ours, theirs in zip(after, before, strict=True):
            assert torch.equal(ours[:, :start], theirs[:, :start]), start
        assert not torch.equal(after[0][:, start], before[0][:, start])


def test_the_expert_loop_is_causal_up_to_rounding(golden_model: Models) -> None:
    model = golden_model(backend=BackendConfig(experts="loop")).double()
    ids = random_ids(2, 30)
    before = outputs(model, ids)[0]
    for start in (1, 2, 9, 16, 29):
        after = outputs(model, with_other_tail(ids, start))[0]
        torch.testing.assert_close(after[:, :start], before[:, :start], atol=ROUNDING, rtol=0)
        assert float((after[:, start] - before[:, start]).abs().max()) > 1e-2


def test_distant_tokens_are_reached(golden_model: Models) -> None:
    """The causal tests are not passed by a model that forgets: the first token matters far beyond the window."""
    model, ids = golden_model(backend=DENSE), random_ids(1, 40)
    other = ids.clone()
    other[0, 0] = 7
    assert not torch.equal(outputs(model, ids)[0][:, -1], outputs(model, other)[0][:, -1])


# ---------------------------------------------------------------- padding


def watched_attention(model: DeepseekV41ForCausalLM) -> list[Tensor]:
    seen: list[Tensor] = []
    for block in model.model.layers:
        block.attn.register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    return seen


@pytest.mark.parametrize("backend", [DENSE, BackendConfig(attn="sdpa")], ids=["eager-dense", "sdpa-loop"])
def test_right_padding_changes_nothing_at_live_tokens(golden_model: Models, backend: BackendConfig) -> None:
    model = golden_model(backend=backend).double()
    lengths = (24, 23, 9, 1)
    ids = random_ids(4, 24, seed=4)
    mask = (torch.arange(24) < torch.tensor(lengths)[:, None]).long()
    seen = watched_attention(model)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        assert padded.isfinite().all()
        assert len(seen) == 6
        for out in seen:
            assert (out[mask == 0] == 0).all()
            assert (out[mask == 1] != 0).any(-1).all()
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, :length]).logits
            torch.testing.assert_close(padded[row : row + 1, :length], alone, atol=ROUNDING, rtol=0)


def test_tokens_under_padding_are_not_read(golden_model: Models) -> None:
    model, ids = golden_model(backend=DENSE), random_ids(2, 21)
    mask = torch.ones(2, 21, dtype=torch.int64)
    mask[1, 12:] = 0
    other = ids.clone()
    other[1] = with_other_tail(ids[1:], 12)[0]
    labels = ids.masked_fill(mask == 0, -100)
    ours, theirs = (model(x, attention_mask=mask, labels=labels) for x in (other, ids))
    live = mask.bool()
    assert torch.equal(ours.logits[live], theirs.logits[live])
    assert not torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)
    assert_same(random_gradients(model, ours.loss), random_gradients(model, theirs.loss))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8])
def test_masks_of_ones_in_any_integer_dtype_are_no_mask(golden_model: Models, dtype: torch.dtype) -> None:
    model, ids = golden_model(backend=DENSE), random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids, torch.ones(2, 9, dtype=dtype)).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 5, dtype=torch.int64), r"shape \[2, 6\].*\[2, 5\]"),
        (torch.ones(2, 7, dtype=torch.int64), r"shape \[2, 6\].*\[2, 7\]"),
        (torch.ones(1, 6, dtype=torch.int64), r"shape \[2, 6\].*\[1, 6\]"),
        (torch.ones(2, 1, 6, 6, dtype=torch.int64), r"shape \[2, 6\]"),
        (torch.ones(2, 6), "integer 0/1.*float32"),
        (torch.ones(2, 6, dtype=torch.complex64), "integer 0/1.*complex64"),
        (torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]), "padding must be on the right"),
        (torch.tensor([[1] * 6, [1, 0, 1, 1, 0, 0]]), "padding must be on the right"),
        (torch.tensor([[1] * 6, [1, 2, 1, 0, 0, 0]]), "must be 0 or 1"),
        (torch.tensor([[1] * 6, [1, -1, 0, 0, 0, 0]]), "must be 0 or 1"),
    ],
    ids=["narrow", "wide", "one row", "4-D", "float", "complex", "left", "hole", "two", "minus one"],
)
def test_other_attention_masks_are_refused(tiny_model: Models, mask: Tensor, message: str) -> None:
    refuses(tiny_model(), rf"^attention_mask: .*{message}", random_ids(2, 6), attention_mask=mask)


def test_rows_of_nothing_but_padding_are_finite_and_do_not_touch_others(golden_model: Models) -> None:
    model, ids = golden_model(backend=DENSE).double(), random_ids(3, 10)
    mask = torch.tensor([[1] * 10, [0] * 10, [1] * 4 + [0] * 6])
    out = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    assert out.logits.isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(out.logits[:1], model(ids[:1]).logits, atol=ROUNDING, rtol=0)
    gradients = random_gradients(model, out.loss)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients.values())
    nothing = model(ids, attention_mask=torch.zeros_like(mask), labels=torch.full_like(ids, -100))
    assert float(nothing.loss.detach()) == 0
    assert nothing.logits.isfinite().all()


# ---------------------------------------------------------------- refused inputs


@pytest.mark.parametrize("engram", [True, False], ids=["engram", "no engram"])
@pytest.mark.parametrize("wrong", [-1, -100, 512])
def test_ids_outside_the_vocabulary_are_refused(tiny_model: Models, wrong: int, engram: bool) -> None:
    ids = random_ids(2, 5)
    ids[1, 3] = wrong
    model = tiny_model(**({} if engram else NO_ENGRAM))
    refuses(model, rf"^input_ids: ids must lie in 0\.\.511, got {wrong}$", ids)


def test_ids_of_another_dtype_or_shape_are_refused(tiny_model: Models) -> None:
    model = tiny_model()
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16):
        refuses(
            model, r"^input_ids: must be int32 or int64 ids in 0\.\.511, got torch\.", torch.ones(1, 4, dtype=dtype)
        )
    for shape in ((5,), (1, 0), (1, 2, 3), ()):
        message = rf"^input_ids: must have shape \[batch, sequence >= 1\], got {re.escape(str(list(shape)))}"
        refuses(model, message, torch.ones(shape, dtype=torch.int64))
    refuses(model, r"^input_ids: sequence length 257 exceeds max_position_embeddings=256", random_ids(1, 257))


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(1, 7).expand(2, -1),
        torch.zeros(2, 6, dtype=torch.int64),
        torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]]),
        torch.arange(6),
        torch.arange(7).expand(2, -1),
        torch.arange(6.0).expand(2, -1),
    ],
    ids=["from one", "zeros", "packed", "1-D", "wide", "float"],
)
def test_positions_other_than_whole_rows_are_refused(tiny_model: Models, positions: Tensor) -> None:
    refuses(tiny_model(), r"^position_ids: must be integers|^position_ids: .*0\.\.5", random_ids(2, 6), None, positions)


def test_explicit_positions_and_int32_ids_are_the_same_input(golden_model: Models) -> None:
    model, ids = golden_model(backend=DENSE), random_ids(2, 12)
    with torch.no_grad():
        expected = model(ids, labels=ids)
        for positions in (torch.arange(12).expand(2, -1), torch.arange(12, dtype=torch.int32).expand(2, -1)):
            assert torch.equal(model(ids, position_ids=positions).logits, expected.logits)
        narrow = model(ids.int(), labels=ids.int())
    assert torch.equal(narrow.logits, expected.logits)
    assert torch.equal(narrow.loss, expected.loss)


def test_labels_of_another_shape_range_or_dtype_are_refused(tiny_model: Models) -> None:
    model, ids = tiny_model(), random_ids(2, 6)
    for shape in ((2, 5), (2, 7), (12,), (1, 6)):
        refuses(model, r"^labels: .*\[2, 6\]", ids, labels=torch.ones(shape, dtype=torch.int64))
    for wrong in (-1, -99, -101, 512):
        labels = ids.clone()
        labels[0, 0] = wrong
        refuses(model, rf"^labels .*0\.\.511, got {wrong}$", ids, labels=labels)
    for dtype in (torch.float32, torch.int16, torch.bool):
        refuses(model, r"^labels .*must be int32 or int64 ids in 0\.\.511", ids, labels=torch.ones(2, 6, dtype=dtype))


# ---------------------------------------------------------------- outputs


def test_logits_are_kept_where_asked(golden_model: Models) -> None:
    model, ids = golden_model(backend=DENSE).double(), random_ids(2, 11)
    with torch.no_grad():
        full = model(ids).logits
        assert full.shape == (2, 11, 512)
        for keep, columns in (
            (0, list(range(11))),
            (1, [10]),
            (4, [7, 8, 9, 10]),
            (11, list(range(11))),
            (torch.tensor([3, 0, 10]), [3, 0, 10]),
            (torch.tensor([5], dtype=torch.int32), [5]),
            (torch.tensor([], dtype=torch.int64), []),
        ):
            kept = model(ids, logits_to_keep=keep).logits
            assert kept.shape == (2, len(columns), 512)
            torch.testing.assert_close(kept, full[:, columns], atol=ROUNDING, rtol=0)


def test_wrong_logits_to_keep_is_refused(tiny_model: Models) -> None:
    model, ids = tiny_model(), random_ids(2, 6)
    for wrong in (-1, 7):
        refuses(model, rf"^logits_to_keep: must lie in 0\.\.6, got {wrong}", ids, logits_to_keep=wrong)
    for wrong in (-1, 6):
        refuses(model, rf"^logits_to_keep: .*0\.\.5, got {wrong}", ids, logits_to_keep=torch.tensor([0, wrong]))
    refuses(model, r"^logits_to_keep: .*one-dimensional", ids, logits_to_keep=torch.zeros(2, 2, dtype=torch.int64))
    refuses(model, r"^logits_to_keep: .*0\.\.5, got torch.float32", ids, logits_to_keep=torch.zeros(2))
    for keep in (1, 6, torch.tensor([0])):
        refuses(model, r"^logits_to_keep: must be 0 when labels", ids, labels=ids, logits_to_keep=keep)


def test_hidden_states_are_returned_as_asked(golden_model: Models) -> None:
    model, ids = golden_model(backend=DENSE).double(), random_ids(2, 9)
    with torch.no_grad():
        assert model(ids).hidden_states is None
        assert model(ids).loss is None
        (final,) = model(ids, return_hidden_states=True).hidden_states
        streams = model(ids, output_hidden_states=True).hidden_states
        both = model(ids, return_hidden_states=True, output_hidden_states=True)
        assert final.shape == (2, 9, 64)
        assert [tuple(s.shape) for s in streams] == [(2, 9, 4, 64)] * 7
        assert len(both.hidden_states) == 8
        for ours, theirs in zip(both.hidden_states, (*streams, final), strict=True):
            assert torch.equal(ours, theirs)
        # First the embedding in every stream; last what the head reads, also when only some logits are kept.
        assert torch.equal(streams[0], model.model.embed_tokens(ids).unsqueeze(2).expand(-1, -1, 4, -1))
        torch.testing.assert_close(final @ model.lm_head.weight.T, both.logits, atol=ROUNDING, rtol=0)
        assert torch.equal(model(ids, logits_to_keep=1, return_hidden_states=True).hidden_states[0], final)


def test_loss_is_the_mean_over_live_shifted_labels(golden_model: Models) -> None:
    model, ids = golden_model(backend=WITH_LOGITS), random_ids(3, 8)
    labels = random_ids(3, 8, seed=9)
    labels[0, 3:6] = -100
    labels[1] = -100
    labels[2, 0] = -100  # the first label is never a target
    out = model(ids, labels=labels)
    terms = []
    for row in range(3):
        for position in range(7):
            target = int(labels[row, position + 1])
            if target != -100:
                scores = out.logits[row, position].tolist()
                top = max(scores)
                terms.append(top + math.log(math.fsum(math.exp(x - top) for x in scores)) - scores[target])
    assert len(terms) == 4 + 7
    assert float(out.loss.detach()) == pytest.approx(math.fsum(terms) / len(terms), rel=1e-6)


@pytest.mark.parametrize("length", [1, 6])
def test_without_live_labels_the_loss_is_zero_with_finite_gradients(tiny_model: Models, length: int) -> None:
    model, ids = tiny_model(), random_ids(2, length)
    labels = ids.clone() if length == 1 else torch.full_like(ids, -100)
    out = model(ids, labels=labels)
    assert float(out.loss.detach()) == 0
    gradients = random_gradients(model, out.loss)
    present = [gradient for gradient in gradients.values() if gradient is not None]
    assert len(present) > 50
    assert all((gradient == 0).all() for gradient in present)


# ---------------------------------------------------------------- recomputation and state


def test_recomputation_changes_no_bit(golden_model: Models, golden: dict[str, Tensor]) -> None:
    results = []
    calls: list[int] = []
    for recompute in (False, True):
        model = golden_model(backend=BackendConfig(gradient_checkpointing=recompute))
        calls.append(0)
        model.model.layers[4].ffn.register_forward_hook(lambda *_: calls.append(calls.pop() + 1))
        out = model(golden["input_ids"], golden["attention_mask"], labels=golden["labels"])
        results.append((out.loss.detach(), random_gradients(model, out.loss)))
    assert calls == [1, 2], "the second model ran its blocks again"
    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[1][1], results[0][1])


def attributes(model: nn.Module) -> dict[str, str]:
    """Everything that modules hold besides parameters, buffers and submodules."""
    return {
        f"{name}.{key}": repr(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    }


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_two_forwards_in_flight_do_not_meet(golden_model: Models, recompute: bool) -> None:
    model = golden_model(backend=BackendConfig(gradient_checkpointing=recompute))
    batches = {"A": random_ids(2, 20, seed=1), "B": random_ids(1, 33, seed=2)}
    before, buffers = attributes(model), {name: b.clone() for name, b in model.named_buffers()}
    assert not any("tensor(" in text for text in before.values())
    separate = {name: random_gradients(model, model(ids, labels=ids).loss) for name, ids in batches.items()}
    losses = {name: model(ids, labels=ids).loss for name, ids in batches.items()}
    together = {name: random_gradients(model, losses[name]) for name in ("B", "A")}
    for name in batches:
        assert_same(together[name], separate[name])
    assert attributes(model) == before
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


# ---------------------------------------------------------------- construction and precision

FP32_NAMES = re.compile(
    r"layers\.\d\.attn\.attn_sink|layers\.\d\.hc_(attn|ffn)_(fn|base|scale)|head\.weight"
    r"|layers\.1\.attn\.compressor\.(wkv|wgate)\.weight|layers\.\d\.ffn\.gate\.(bias|bias_vl)"
)


@pytest.fixture
def meta_model(tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Tokenizer) -> Models:
    """A tiny model built on the meta device, then given memory full of junk."""

    def make() -> DeepseekV41ForCausalLM:
        with torch.device("meta"):
            model = DeepseekV41ForCausalLM(tiny_config(), tokenizer=golden_tokenizer)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
        return model

    return make


@pytest.mark.parametrize("buffer_device", [None, "cpu"])
def test_a_model_from_the_meta_device_equals_one_built_directly(
    tiny_model: Models, meta_model: Models, buffer_device: str | None
) -> None:
    direct, model = tiny_model(seed=11), meta_model()
    torch.manual_seed(11)
    model.initialize_weights(buffer_device=buffer_device, dtype=torch.float32)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert sum(not buffer.is_floating_point() for buffer in buffers.values()) == 4
    for name, tensor in direct.named_parameters():
        assert parameters.pop(name).equal(tensor), name
    for name, tensor in direct.named_buffers():
        assert buffers.pop(name).equal(tensor), name
    assert not parameters
    assert not buffers
    ids = random_ids(1, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, direct(ids).logits)


def test_a_bf16_model_keeps_exactly_the_released_fp32_tensors(tiny_model: Models, meta_model: Models) -> None:
    reference, model = tiny_model(seed=2), meta_model()
    torch.manual_seed(2)
    model.initialize_weights(dtype=torch.bfloat16)
    state, wide = model.state_dict(), reference.state_dict()
    kept = set()
    for released, slot in released_slots(model).items():
        stays = FP32_NAMES.fullmatch(released) is not None
        assert state[slot.name].dtype == (torch.float32 if stays else torch.bfloat16), released
        assert torch.equal(state[slot.name], wide[slot.name].to(state[slot.name].dtype)), released
        kept |= {released} if stays else set()
    assert len(kept) == 6 + 36 + 1 + 2 + 12
    for name, buffer in reference.named_buffers():
        assert dict(model.named_buffers())[name].equal(buffer), name
    out = model(random_ids(2, 20), labels=random_ids(2, 20), output_hidden_states=True)
    assert model(random_ids(2, 20)).logits.dtype == out.loss.dtype == torch.float32
    assert {streams.dtype for streams in out.hidden_states} == {torch.bfloat16}
    gradients = random_gradients(model, out.loss)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_a_plain_cast_to_bf16_runs_and_leaves_integers_alone(golden_model: Models, loss: Any) -> None:
    model = golden_model(backend=BackendConfig(loss=loss))
    integers = {n: b.clone() for n, b in model.named_buffers() if not b.is_floating_point()}
    assert len(integers) == 4
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if model.stays_fp32(name) else torch.bfloat16), name
    for name, buffer in integers.items():
        assert model.get_buffer(name).equal(buffer), name
        assert model.get_buffer(name).dtype == torch.int64
    ids = random_ids(2, 20)
    out = model(ids, labels=ids)
    assert model(ids).logits.dtype == out.loss.dtype == torch.float32
    gradients = random_gradients(model, out.loss)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients.values())


def watched_mixes(model: DeepseekV41ForCausalLM) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _m, args, out: seen.extend((args[1].dtype, out[1].dtype)))
    return seen


def test_a_float64_model_is_float64_throughout(golden_model: Models, golden: dict[str, Tensor]) -> None:
    model = golden_model(backend=WITH_LOGITS).double()
    seen = watched_mixes(model)
    out = model(golden["input_ids"], golden["attention_mask"], labels=golden["labels"], output_hidden_states=True)
    assert {out.logits.dtype, out.loss.dtype, *seen} == {torch.float64}
    assert {streams.dtype for streams in out.hidden_states} == {torch.float64}
    gradients = random_gradients(model, out.loss)
    for name, gradient in gradients.items():
        assert gradient is None or (gradient.dtype == torch.float64 and gradient.isfinite().all()), name
    # The fp32 reference has this loss up to its own rounding, which the float64 model does not share.
    assert float(out.loss.detach()) == pytest.approx(float(golden["loss"]), abs=1e-4)
    assert not torch.equal(out.logits.float(), golden["logits"])


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_under_autocast_mixes_and_logits_stay_fp32(golden_model: Models, loss: Any) -> None:
    model = golden_model(backend=BackendConfig(loss=loss))
    seen = watched_mixes(model)
    projected: list[torch.dtype] = []
    model.model.layers[0].attn.wq_a.register_forward_hook(lambda _m, _a, out: projected.append(out.dtype))
    ids = random_ids(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
        logits = model(ids).logits
    assert projected == [torch.bfloat16] * 2, "autocast was on"
    assert seen == [torch.float32] * 24
    assert logits.dtype == out.loss.dtype == torch.float32
    gradients = random_gradients(model, out.loss)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("streams", "mix"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)],
)
def test_a_block_refuses_mixes_that_lost_their_precision(
    tiny_model: Models, streams: torch.dtype, mix: torch.dtype
) -> None:
    block = tiny_model().model.layers[0]
    arguments = (torch.randn(1, 4, 4, 64).to(streams), torch.ones(1, 4, 4).to(mix), AttentionState())
    with pytest.raises(TypeError, match=r"^pre_mix: .*must stay torch.float(32|64), got torch\."):
        block(*arguments, check_inputs(torch.arange(4).unsqueeze(0), limit=9, longest=9, strict=True))


def test_initial_values_depend_on_name_and_seed_only(tiny_model: Models) -> None:
    base = tiny_model(seed=5).state_dict()
    for overrides in (NO_ENGRAM, {"num_hidden_layers": 4}, {"engram_max_ngram_size": 2, "engram_num_embeddings": None}):
        other = tiny_model(seed=5, **overrides).state_dict()
        shared = [name for name in base if name in other and base[name].shape == other[name].shape]
        assert 50 < len(shared) < len(base)
        assert all(torch.equal(base[name], other[name]) for name in shared)
    more = tiny_model(seed=5, n_routed_experts=11).state_dict()
    for name, tensor in base.items():
        if re.search(r"experts\.w[123]$", name):
            assert torch.equal(more[name][:8], tensor), name
            assert not torch.equal(more[name][8], more[name][9])
        elif ".ffn.gate." not in name:
            assert torch.equal(more[name], tensor), name


def test_other_seeds_and_other_names_draw_other_values(tiny_model: Models) -> None:
    first, second = (tiny_model(seed=seed).state_dict() for seed in (5, 6))
    drawn = [name for name, tensor in first.items() if tensor.dim() > 1 and float(tensor.std()) > 0]
    assert len(drawn) > 60
    for name in drawn:
        assert not torch.equal(first[name], second[name]), name
    heads = {float(first[name].flatten()[0]) for name in drawn}
    assert len(heads) == len(drawn), "no two parameters share their draws"


# ---------------------------------------------------------------- images


def test_image_tokens_stay_out_of_engram_and_use_their_own_router_bias(golden_model: Models) -> None:
    model = golden_model(backend=DENSE).model
    ids = random_ids(2, 14)
    image = torch.zeros(2, 14, dtype=torch.bool)
    image[0, 4:8] = True
    image[1, 9] = True
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[1, 12:] = 0
    live = mask.bool()
    for block in model.layers:
        block.ffn.gate.bias[:2] = 100.0
        block.ffn.gate.bias_vl[6:] = 100.0
    memory: list[tuple[Tensor, Tensor]] = []
    hashes: list[Tensor] = []
    routes: list[Tensor] = []
    for block in model.layers:
        if block.engram is not None:
            block.engram.register_forward_hook(lambda _m, args, out: memory.append((args[0], out)))
        block.ffn.gate.register_forward_hook(lambda _m, _a, out: routes.append(out[0]))
    assert model.engram_hash is not None
    model.engram_hash.register_forward_hook(lambda _m, _a, out: hashes.append(out))
    with torch.no_grad():
        model(ids, attention_mask=mask, image_mask=image)
        other = ids.clone()
        other[image] = 511
        model(other, attention_mask=mask, image_mask=image)
        model(ids, attention_mask=mask)
    text = live & ~image
    assert len(memory) == 2 * 3
    for before, after in memory[:2]:
        changed = (before != after).any(-1).any(-1)
        assert torch.equal(changed, text)
    assert len(routes) == 6 * 3
    for chosen in routes[:6]:
        experts = chosen.view(2, 14, 2).sort(-1).values
        assert (experts[image] == torch.tensor([6, 7])).all()
        assert (experts[text] == torch.tensor([0, 1])).all()
    # What an image token is called enters no hash, neither its own nor that of the text behind it.
    assert torch.equal(hashes[0], hashes[1])
    behind = torch.zeros_like(image)
    behind[0, 8:10] = behind[1, 10:12] = True
    differs = (hashes[0] != hashes[2]).any(-1).any(-1)
    assert torch.equal(differs & live, image | behind), "an image blocks the lookback of two n-gram sizes"


def test_an_image_mask_without_images_is_no_mask(golden_model: Models) -> None:
    model, ids = golden_model(backend=DENSE).model, random_ids(2, 10)
    with torch.no_grad():
        for block in model.layers:
            block.ffn.gate.bias_vl[6:] = 100.0
        plain = model(ids)[0]
        assert torch.equal(model(ids, image_mask=torch.zeros(2, 10, dtype=torch.bool))[0], plain)
        assert not torch.equal(model(ids, image_mask=torch.ones(2, 10, dtype=torch.bool))[0], plain)
