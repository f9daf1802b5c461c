"""The learned indexer: its loss and gradients against a dense float64 formulation, and whom they reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionState, DeepseekV41Attention
from dsv41.indexer import Indexer, LearnedIndexer, build_indexer, learns_selection
from dsv41.ops import divergence as divergence_file
from dsv41.ops.dense_attention import attention_weights, window_mask
from dsv41.ops.divergence import divergence
from dsv41.ops.quantization import fake_quantize
from dsv41.ops.rope import layer_frequencies, rotate, rotation_table
from dsv41.ops.selection import membership, stable_topk, visible_positions

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison; rows of a batch have different numbers of live tokens."""

    batch: int
    length: int
    heads: int
    topk: int
    ratio: int
    width: int = 6

    def inputs(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Queries, weights and keys in float64; a selection; the mass of the attention."""
        generator = torch.Generator().manual_seed(self.length + self.topk)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        positions = self.length // self.ratio
        leaves = [
            random(self.batch, self.length, self.heads, self.width),
            random(self.batch, self.length, self.heads),
            random(self.batch, positions, self.width),
        ]
        scores = random(self.batch, self.length, positions)
        scores = scores.masked_fill(~visible_positions(self.length, positions, self.ratio, scores.device), -torch.inf)
        selection = stable_topk(scores, self.topk)
        mass = (3.7 * torch.rand(selection.shape, generator=generator, dtype=torch.float64)).masked_fill(
            selection < 0, 0.0
        )
        mass[..., ::3] *= 1e-6  # probabilities of very different sizes
        mass[0, self.length - self.length // 4 :] = 0.0  # padding
        mass[-1, 2:3] = 0.0  # all attention on the window, say
        return leaves, selection, mass


CASES = {
    "ratio 2": Case(2, 90, 3, topk=4, ratio=2),
    "ratio 1": Case(1, 150, 2, topk=6, ratio=1),
    "ratio 3, all positions": Case(2, 41, 2, topk=100, ratio=3),
    "shorter than a chunk": Case(3, 9, 2, topk=2, ratio=2),
    "one token": Case(2, 1, 2, topk=2, ratio=2),
}


def dense_divergence(q: Tensor, weights: Tensor, keys: Tensor, selection: Tensor, mass: Tensor) -> Tensor:
    """The same written out: all queries with all heads and positions at once, by autograd."""
    products = torch.einsum("bshe,bte->bsht", q, keys).relu()
    scores = torch.einsum("bsht,bsh->bst", products, weights)
    total = scores.new_zeros(())
    for b in range(len(q)):
        for s in range(q.shape[1]):
            chosen = selection[b, s][selection[b, s] >= 0]
            worth = mass[b, s][selection[b, s] >= 0]
            if worth.sum() == 0:
                continue
            target = worth / worth.sum()
            logs = scores[b, s, chosen] - scores[b, s, chosen].logsumexp(0)
            for p, log in zip(target, logs, strict=True):
                if p > 0:
                    total = total + p * (p.log() - log)
    return total


@pytest.mark.parametrize("gather_cost", [0, 4], ids=["gathered", "by cost"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_and_gradients_equal_the_dense_formulation(
    case: Case, gather_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence_file, "GATHER_COST", gather_cost)
    monkeypatch.setattr(divergence_file, "CHUNK_BYTES", 1)  # chunks of 16 queries
    leaves, selection, mass = case.inputs()
    found = []
    for function in (lambda *a: divergence(*a, case.ratio), dense_divergence):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        loss = function(*inputs, selection, mass)
        gradients = torch.autograd.grad(1.7 * loss, inputs, allow_unused=True) if loss.requires_grad else [None] * 3
        found.append((loss.detach(), gradients))
    (loss, gradients), (expected_loss, expected) = found
    torch.testing.assert_close(loss, expected_loss, atol=1e-12, rtol=1e-12)
    assert (float(loss.detach()) > 1.0) == (case.length > 1)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, atol=1e-12, rtol=1e-11)


def test_the_gradient_equals_finite_differences() -> None:
    case = Case(1, 7, 2, topk=3, ratio=1, width=3)
    leaves, selection, mass = case.inputs()
    assert torch.autograd.gradcheck(
        lambda *inputs: divergence(*inputs, selection, mass, 1), [leaf.requires_grad_() for leaf in leaves]
    )


def test_the_scale_of_the_mass_does_not_matter_and_the_target_itself_has_no_divergence() -> None:
    case = Case(2, 30, 2, topk=5, ratio=1)
    (q, weights, keys), selection, mass = case.inputs()
    once, thrice = (divergence(q, weights, keys, selection, scale * mass, 1) for scale in (1.0, 3.0))
    torch.testing.assert_close(once, thrice, rtol=1e-12, atol=0)
    scores = torch.einsum("bsht,bsh->bst", torch.einsum("bshe,bte->bsht", q, keys).relu(), weights)
    own = scores.gather(-1, selection.clamp_min(0)).masked_fill(selection < 0, -torch.inf).softmax(-1)
    assert float(divergence(q, weights, keys, selection, own.nan_to_num(0.0), 1)) == pytest.approx(0.0, abs=1e-11)


def test_half_precision_inputs_get_an_fp32_loss_and_their_own_dtype_back() -> None:
    case = Case(2, 64, 2, topk=8, ratio=1)
    leaves, selection, mass = case.inputs()
    narrow = [leaf.bfloat16().requires_grad_() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        loss = divergence(*narrow, selection, mass.float(), 1)
    wide = [leaf.detach().double().requires_grad_() for leaf in narrow]
    exact = divergence(*wide, selection, mass.float().double(), 1)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-5)
    loss.backward()
    exact.backward()
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("topk", [8, 512], ids=["selected", "all positions"])
def test_queries_times_heads_times_positions_never_exist_together(
    topk: int, largest_tensor: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence_file, "CHUNK_BYTES", 1 << 18)
    case = Case(1, 512, 16, topk=topk, ratio=1)
    leaves, selection, mass = case.inputs()
    with largest_tensor() as largest:
        divergence(*(leaf.float().requires_grad_() for leaf in leaves), selection, mass.float(), 1).backward()
    # Where all positions are selected, the selection itself has queries x positions.
    assert largest.elements <= 512 * 512, largest.elements


# ------------------------------------------------------------------ in attention


def make_config(tiny_config: MakeConfig, ratio: int = 2, **overrides: Any) -> Any:
    """Layers: 0 Full, 1 Full and candidate source, 2 Reindex, 3 Reuse, 4 Reindex."""
    return tiny_config(
        **{
            "hidden_size": 14,
            "q_lora_rank": 10,
            "head_dim": 12,
            "qk_rope_head_dim": 6,
            "num_hidden_layers": 5,
            "compress_ratios": [ratio] * 5,
            "kv_source_layer_ids": [0, 1],
            "index_source_layer_ids": [0, 1, 2, 4],
            "candidate_source_layer_id": 1,
            "candidate_topk_blocks": 2,
            "candidate_block_size": 3,
            "index_n_heads": 3,
            "index_head_dim": 34,
            "index_topk": 4,
            "engram_layer_ids": [],
            "engram_num_embeddings": [],
            "indexer": "learned",
        }
        | overrides
    ).text_config


def make_layers(config: Any, backend: BackendConfig) -> list[DeepseekV41Attention]:
    torch.manual_seed(5)
    layers = [DeepseekV41Attention(config, layer, backend).double() for layer in range(5)]
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                # Large, so that neither attention nor scores are nearly even.
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return layers


LENGTH = 33
LIVE = torch.arange(LENGTH) < torch.tensor([[LENGTH], [21]])


def run_layers(
    layers: list[DeepseekV41Attention], x: Tensor, warming_up: bool = False
) -> tuple[Tensor, list[AttentionState]]:
    """Sum of the squared outputs, and the state after each layer."""
    state, total, states = AttentionState(), torch.zeros((), dtype=torch.float64), []
    for layer in layers:
        if isinstance(layer.indexer, LearnedIndexer):
            layer.indexer.warming_up = warming_up
        out, state = layer(x, state, torch.arange(LENGTH).expand(2, -1), LIVE)
        total = total + out.square().sum()
        states.append(state)
    return total, states


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, LENGTH, 14, generator=generator, dtype=torch.float64).requires_grad_()


def straight_through(x: Tensor) -> Tensor:
    return x + (fake_quantize(x.detach(), "mxfp4") - x.detach())


def reference_loss(layers: list[DeepseekV41Attention], x: Tensor, states: list[AttentionState], config: Any) -> Tensor:
    """The indexers' loss by dense softmaxes, from the layers' weights and what they have selected."""
    total = torch.zeros((), dtype=torch.float64)
    x = x.detach()
    keys = torch.zeros(0)
    for layer, state in zip(layers, states, strict=True):
        ratio, indexer = layer.ratio, layer.indexer
        table = rotation_table(layer_frequencies(config, True), torch.arange(LENGTH).expand(2, -1))
        if layer.compressor is not None:
            assert indexer is not None
            assert indexer.wk is not None
            assert indexer.k_norm is not None
            latent = layer.compressor(x).detach()
            starts = torch.arange(latent.shape[1]) * ratio
            rotations = rotation_table(layer_frequencies(config, True), starts)
            keys = straight_through(rotate(indexer.k_norm(indexer.wk(latent)), rotations))
        if indexer is None:
            continue
        with torch.no_grad():
            q_latent = layer.q_norm(layer.wq_a(x))
            q = rotate(layer.wq_b(q_latent).unflatten(-1, (layer.heads, layer.width)), table)
            kv = fake_quantize(rotate(layer.kv_norm(layer.wkv(x)), table), "fp8")
            assert state.compressed_kv is not None
            assert state.selection is not None
            far = membership(state.selection, state.compressed_kv.shape[1])
            mask = torch.cat((window_mask(LIVE, config.sliding_window), far), dim=-1) & LIVE.unsqueeze(-1)
            everything = torch.cat((kv, state.compressed_kv), dim=1)
            mass = attention_weights(q, everything, mask, layer.core.attn_sink)[..., LENGTH:].sum(2)
            mass = mass.masked_fill(~(far & LIVE.unsqueeze(-1)), 0.0)
        index_q = straight_through(rotate(indexer.wq_b(q_latent).unflatten(-1, (3, 34)), table))
        weights = indexer.weights_proj(x) * (34**-0.5 * 3**-0.5)
        scores = torch.einsum("bsht,bsh->bst", torch.einsum("bshe,bte->bsht", index_q, keys).relu(), weights)
        logs = scores.masked_fill(~far, -torch.inf).log_softmax(-1).masked_fill(~far, 0.0)
        target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-300)
        divergences = torch.where(target > 0, target * (target.clamp_min(1e-300).log() - logs), 0.0)
        total = total + divergences.sum()
    return total


@pytest.mark.parametrize("warming_up", [False, True], ids=["selected", "warming up"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("attn", ["sparse", "eager", "sdpa"])
def test_the_loss_reaches_the_indexers_alone_and_equals_a_dense_formulation_per_parameter(
    tiny_config: MakeConfig, attn: Any, ratio: int, warming_up: bool
) -> None:
    config = make_config(tiny_config, ratio)
    layers, x = make_layers(config, BackendConfig(attn=attn)), inputs()
    _, states = run_layers(layers, x, warming_up)
    loss = states[-1].indexer_loss
    assert loss is not None
    loss.backward()
    assert x.grad is None
    ours = {f"{i}.{n}": p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    for layer in layers:
        layer.zero_grad()
    expected = reference_loss(layers, x, states, config)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert float(loss.detach()) > 10
    for i, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            gradient = ours[f"{i}.{name}"]
            if ".indexer." not in f".{name}":
                assert gradient is None, (i, name)
                continue
            assert gradient is not None, (i, name)
            assert gradient.any(), (i, name)
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-10, msg=f"{i} {name}")


def test_the_language_models_loss_reaches_no_learned_indexer_and_is_that_of_a_frozen_one(
    tiny_config: MakeConfig,
) -> None:
    found = []
    for kind in ("learned", "frozen"):
        layers, x = make_layers(make_config(tiny_config, indexer=kind), BackendConfig()), inputs()
        total, states = run_layers(layers, x)
        assert (states[-1].indexer_loss is None) == (kind == "frozen")
        total.backward()
        found.append([x.grad, total, *(p.grad for layer in layers for p in layer.parameters())])
        for layer in layers:
            assert all(p.grad is None for n, p in layer.named_parameters() if n.startswith("indexer."))
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_both_losses_together_leave_each_others_gradients_alone(tiny_config: MakeConfig) -> None:
    gradients = []
    for use in ("both", "apart"):
        layers, x = make_layers(make_config(tiny_config), BackendConfig()), inputs()
        total, states = run_layers(layers, x)
        assert states[-1].indexer_loss is not None
        if use == "both":
            (total + states[-1].indexer_loss).backward()
        else:
            states[-1].indexer_loss.backward()
            total.backward()
        gradients.append([p.grad for layer in layers for p in layer.parameters()])
    assert len(gradients[0]) == len(gradients[1])
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


def test_warming_up_attends_to_all_that_is_visible_in_training_only(tiny_config: MakeConfig) -> None:
    layers, x = make_layers(make_config(tiny_config), BackendConfig()), inputs()
    _, states = run_layers(layers, x, warming_up=True)
    positions = LENGTH // 2
    seen = visible_positions(LENGTH, positions, 2, x.device) & LIVE[:, : 2 * positions : 2].unsqueeze(1)
    groups = LIVE[:, : 2 * positions].unflatten(1, (positions, 2)).all(2).unsqueeze(1)
    for state in states:
        assert state.selection is not None
        assert torch.equal(membership(state.selection, positions), seen & groups)
    trained = [state.selection for state in run_layers(layers, x)[1]]
    for layer in layers:
        layer.eval()
    for state, selection in zip(run_layers(layers, x, warming_up=True)[1], trained, strict=True):
        assert state.selection is not None
        assert selection is not None
        assert torch.equal(state.selection, selection)
        assert state.indexer_loss is None


def test_without_gradients_nothing_is_made_for_the_indexer(tiny_config: MakeConfig) -> None:
    layers, x = make_layers(make_config(tiny_config), BackendConfig()), inputs()
    asked = []
    for layer in layers:
        layer.core.register_forward_pre_hook(lambda _m, _a, kw: asked.append(kw["with_mass"]), with_kwargs=True)
    with torch.no_grad():
        assert run_layers(layers, x)[1][-1].indexer_loss is None
    assert asked == [False] * 5
    run_layers(layers, x)
    assert asked[5:] == [True, True, True, False, True]


def test_gradient_steps_on_the_loss_let_the_selection_keep_more_of_the_attention(tiny_config: MakeConfig) -> None:
    config = make_config(tiny_config, candidate_source_layer_id=-1)
    layers, x = make_layers(config, BackendConfig()), inputs()
    with torch.no_grad():
        for layer in layers:
            layer.wq_b.weight.mul_(4.0)  # attention that prefers some positions clearly
    weights = [p for layer in layers for n, p in layer.named_parameters() if n.startswith("indexer.")]
    optimizer = torch.optim.Adam(weights, lr=0.05)

    def kept() -> tuple[float, float]:
        """Share of the attention over all positions that the selection holds, and the most it could hold."""
        with torch.no_grad():
            everything = run_layers(layers, x, warming_up=True)[1]
            chosen = run_layers(layers, x)[1]
            shares = []
            for layer, full, state in zip(layers, everything, chosen, strict=True):
                assert full.compressed_kv is not None
                assert full.selection is not None
                assert state.selection is not None
                table = rotation_table(layer_frequencies(config, True), torch.arange(LENGTH).expand(2, -1))
                q = rotate(layer.wq_b(layer.q_norm(layer.wq_a(x))).unflatten(-1, (layer.heads, layer.width)), table)
                seen = membership(full.selection, full.compressed_kv.shape[1])
                mass = attention_weights(q, full.compressed_kv, seen, layer.core.attn_sink).sum(2)
                mass = mass / mass.sum(-1, keepdim=True)
                inside = (mass * membership(state.selection, full.compressed_kv.shape[1])).sum(-1)
                choice = LIVE & (seen.sum(-1) > 4)
                shares.append(torch.stack((inside, mass.topk(4).values.sum(-1)))[:, choice])
        share, best = torch.cat(shares, dim=1).mean(1).tolist()
        return share, best

    before, best = kept()
    for _ in range(60):
        optimizer.zero_grad()
        loss = run_layers(layers, x, warming_up=True)[1][-1].indexer_loss
        assert loss is not None
        loss.backward()
        optimizer.step()
    after = kept()[0]
    assert after - before > (best - before) / 3
    assert best - before > 0.2


# ------------------------------------------------------------------ in the model


def model_losses(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(golden["input_ids"], golden["attention_mask"], labels=golden["labels"])
    assert out.report.indexer_loss is not None
    (out.loss + out.report.indexer_loss).backward()
    return out.report.indexer_loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changed", [{"gradient_checkpointing": True}, {"attn": "eager"}, {"attn": "sdpa"}], ids=str)
def test_no_implementation_choice_changes_the_loss_or_its_gradients(
    golden_model: MakeModel, golden: dict[str, Tensor], changed: dict[str, Any]
) -> None:
    plain, theirs = model_losses(golden_model(indexer="learned").double(), golden)
    loss, ours = model_losses(golden_model(backend=BackendConfig(**changed), indexer="learned").double(), golden)
    torch.testing.assert_close(loss, plain, rtol=1e-10, atol=0)
    assert ours.keys() == theirs.keys()
    assert sum(".indexer." in name for name in ours) == 12
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-7, atol=1e-11, msg=name)


def test_padding_adds_nothing_to_the_loss(golden_model: MakeModel, golden: dict[str, Tensor]) -> None:
    model = golden_model(indexer="learned").double()
    ids, mask = golden["input_ids"], golden["attention_mask"].bool()
    together = model(ids, mask).report.indexer_loss
    alone = sum(model(row[live].unsqueeze(0)).report.indexer_loss for row, live in zip(ids, mask, strict=True))
    assert not mask.all()
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


def test_the_configuration_names_the_indexer_and_says_whether_it_learns(tiny_config: MakeConfig) -> None:
    for kind, made in (("frozen", Indexer), ("learned", LearnedIndexer)):
        config = make_config(tiny_config, indexer=kind)
        assert type(build_indexer(config, 0)) is made
        assert learns_selection(config) == (kind == "learned")
    window = make_config(
        tiny_config,
        compress_ratios=[0] * 5,
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=-1,
    )
    assert not learns_selection(window)
    with pytest.raises(TypeError, match="frozen"):
        Indexer(make_config(tiny_config), 0).loss(*(torch.zeros(1) for _ in range(6)))
