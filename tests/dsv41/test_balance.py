"""Loads, the balance loss and the movement of biases against loops over tokens, and what layers and models report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.moe import DeepseekV41MoE, Router, Routing, expert_load, imbalance, move_biases_, sequence_balance_loss

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]

EXPERTS, TOPK = 8, 2


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def choices(rows: int, length: int, live: Tensor, seed: int = 0) -> Tensor:
    """Distinct experts [B, S, k] of every live token, -1 at padding."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, length, EXPERTS, generator=generator).argsort(-1)
    return order[..., :TOPK].masked_fill(~live.unsqueeze(-1), -1)


def lengths_mask(lengths: list[int], length: int) -> Tensor:
    return torch.arange(length) < torch.tensor(lengths).unsqueeze(-1)


def load_by_hand(experts: Tensor, live: Tensor, images: Tensor | None = None) -> list[list[int]]:
    """Visits of live text and image tokens, from experts [N, k] and masks [N]."""
    load = [[0] * EXPERTS, [0] * EXPERTS]
    for token, row in enumerate(experts.tolist()):
        if live[token]:
            kind = 0 if images is None else int(images[token])
            for expert in row:
                load[kind][expert] += 1
    return load


def balance_by_hand(scores: Tensor, experts: Tensor, live: Tensor) -> Tensor:
    """DeepSeek-V3's equations 17 to 20 for every row, without their factor, times the row's live tokens.

    Args:
        scores: float64 [B, S, E], whose graph is kept.
        experts: [B, S, k] or, at padding, anything.
        live: Bool [B, S].
    """
    total = scores.new_zeros(())
    for b in range(len(scores)):
        tokens = [s for s in range(scores.shape[1]) if live[b, s]]
        for e in range(scores.shape[-1]):
            visits = sum(e in experts[b, s].tolist() for s in tokens)
            f = scores.shape[-1] / (experts.shape[-1] * max(len(tokens), 1)) * visits
            for s in tokens:
                # P is the mean over the row's tokens; the number of tokens cancels.
                total = total + f * scores[b, s, e] / scores[b, s].sum()
    return total


# ------------------------------------------------------------------ loads


def test_the_load_equals_a_loop_over_tokens() -> None:
    live = lengths_mask([7, 4, 0], 7).flatten()
    experts = choices(3, 7, live.view(3, 7)).flatten(0, 1)
    images = torch.rand(21, generator=torch.Generator().manual_seed(1)) < 0.4
    assert (images & live).any()
    assert (images & ~live).any()
    load = expert_load(experts, EXPERTS, images)
    assert load.dtype == torch.int64
    assert load.tolist() == load_by_hand(experts, live, images)
    assert expert_load(experts, EXPERTS).tolist() == load_by_hand(experts, live)


def test_the_load_of_nobody_is_zero() -> None:
    for experts in (torch.full((3, TOPK), -1), torch.empty(0, TOPK, dtype=torch.int64)):
        for images in (None, torch.ones(len(experts), dtype=torch.bool)):
            assert torch.equal(expert_load(experts, EXPERTS, images), torch.zeros(2, EXPERTS, dtype=torch.int64))


# ------------------------------------------------------------------ the loss


@pytest.mark.parametrize("lengths", [[6], [6, 4, 0], [1, 0, 0]])
def test_the_loss_and_its_gradient_equal_a_loop_over_rows(lengths: list[int]) -> None:
    live = lengths_mask(lengths, 6)
    experts = choices(len(lengths), 6, live, seed=2)
    scores = torch.rand(len(lengths), 6, EXPERTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scores = (3 * scores + 0.01).requires_grad_()
    ours = sequence_balance_loss(scores, experts)
    theirs = balance_by_hand(scores, experts, live)
    assert ours.shape == ()
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0.0)
    mine, reference = (torch.autograd.grad(2.5 * loss, scores)[0] for loss in (ours, theirs))
    torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-15)
    assert not mine[~live].any()
    assert mine[live].any(-1).all()
    narrow = sequence_balance_loss(scores.detach().float(), experts)
    assert narrow.dtype == torch.float32
    assert narrow.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_even_rows_cost_one_per_token_and_the_worst_the_number_of_experts_over_those_visited() -> None:
    tokens = 2 * EXPERTS
    around = torch.stack([(torch.arange(tokens) + i) % EXPERTS for i in range(TOPK)], -1)
    live = lengths_mask([tokens, EXPERTS], tokens)
    experts = around.expand(2, -1, -1).masked_fill(~live.unsqueeze(-1), -1)
    even = torch.full((2, tokens, EXPERTS), 0.7, dtype=torch.float64)
    assert float(sequence_balance_loss(even, experts)) == pytest.approx(3 * EXPERTS, rel=1e-13)
    same = torch.arange(TOPK).expand(2, tokens, -1).masked_fill(~live.unsqueeze(-1), -1)
    worst = torch.zeros(2, tokens, EXPERTS, dtype=torch.float64)
    worst[..., :TOPK] = 0.7
    assert float(sequence_balance_loss(worst, same)) == pytest.approx(3 * EXPERTS * EXPERTS / TOPK, rel=1e-13)


def test_rows_are_balanced_each_on_its_own() -> None:
    """Two rows that are even together and one-sided alone cost more than two even ones."""
    experts = torch.tensor([[[0, 1]] * 4, [[2, 3]] * 4])
    scores = torch.full((2, 4, 4), 0.01, dtype=torch.float64)
    scores.scatter_(-1, experts, 1.0)
    assert float(sequence_balance_loss(scores, experts)) > 1.9 * 8
    assert float(sequence_balance_loss(scores.flatten(0, 1)[None], experts.flatten(0, 1)[None])) == pytest.approx(8)


def test_scores_that_have_underflowed_leave_the_loss_and_its_gradient_finite() -> None:
    scores = torch.zeros(1, 3, EXPERTS, requires_grad=True)
    loss = sequence_balance_loss(scores, torch.tensor([[[0, 1], [2, 3], [-1, -1]]]))
    loss.backward()
    assert scores.grad is not None
    assert loss.isfinite()
    assert scores.grad.isfinite().all()


# ------------------------------------------------------------------ biases


@pytest.mark.parametrize(
    ("load", "signs"),
    [
        ([4, 0, 2, 2], [-1, 1, 0, 0]),
        ([1, 0, 0, 0], [-1, 1, 1, 1]),
        ([5, 6, 5, 5], [1, -1, 1, 1]),
        ([3, 3, 3, 3], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([2**40 + 1, 2**40 - 1, 2**40, 2**40], [-1, 1, 0, 0]),
    ],
)
def test_biases_move_by_the_rate_against_the_load(load: list[int], signs: list[int]) -> None:
    start = [0.5, -0.25, 0.0, 2.0]
    bias = torch.tensor(start)
    move_biases_(bias, torch.tensor(load), 0.125)
    assert bias.tolist() == [value + 0.125 * sign for value, sign in zip(start, signs, strict=True)]


def test_a_load_at_the_mean_does_not_move_however_many_experts_share_it() -> None:
    for count in (3, 7, 49, 384):
        bias = torch.ones(count)
        move_biases_(bias, torch.full((count,), 12345677), 1e-3)
        assert torch.equal(bias, torch.ones(count))


def test_moving_a_bias_asks_for_no_gradient_and_keeps_its_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        bias = torch.zeros(2, dtype=dtype)
        move_biases_(bias, torch.tensor([3, 1]), 1e-3)
        assert bias.dtype == dtype
        assert torch.equal(bias, torch.tensor([-1e-3, 1e-3], dtype=dtype))
        assert not bias.requires_grad


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    values = imbalance(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0], [3, 1, 2, 0], [0, 0, 0, 0]]))
    assert values.dtype == torch.float64
    assert values[:3].tolist() == [1.0, 4.0, 2.0]
    assert math.isnan(values[3])


# ------------------------------------------------------------------ layers and models


class Listener:
    """Keeps what the routers of a model give, a forward's last call of each."""

    def __init__(self, model: nn.Module) -> None:
        self.routings: dict[str, Routing] = {}
        for name, module in model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, routing: Routing) -> None:
            self.routings[name] = routing

        return hook

    def balance(self, live: Tensor) -> Tensor:
        """`balance_by_hand` over all routers, with their graph."""
        total = torch.zeros((), dtype=torch.float64)
        for routing in self.routings.values():
            scores, experts = (x.unflatten(0, live.shape) for x in (routing.scores, routing.experts))
            total = total + balance_by_hand(scores.double(), experts, live)
        return total

    def load(self, live: Tensor, images: Tensor | None = None) -> list[list[list[int]]]:
        flat = None if images is None else images.flatten()
        return [load_by_hand(routing.experts, live.flatten(), flat) for routing in self.routings.values()]


def spread_biases(model: nn.Module) -> None:
    """Selection biases that send text and images different ways, and neither after the scores alone."""
    generator = torch.Generator().manual_seed(8)
    for module in model.modules():
        if isinstance(module, Router):
            for bias in (module.bias, module.bias_vl):
                bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)


def make_ids(rows: int = 3, length: int = 13, seed: int = 4) -> Tensor:
    return torch.randint(3, 500, (rows, length), generator=torch.Generator().manual_seed(seed))


LIVE = lengths_mask([13, 9, 1], 13)
# Images in the first row, at the end of the second and in its padding.
IMAGES = torch.zeros(3, 13, dtype=torch.bool)
IMAGES[0, 2:6] = IMAGES[1, 7:11] = True


@pytest.mark.parametrize("images", [None, IMAGES])
def test_a_layer_reports_the_load_of_its_router(tiny_config: MakeConfig, images: Tensor | None) -> None:
    layer = DeepseekV41MoE(tiny_config().text_config, BackendConfig())
    spread_biases(layer)
    listener = Listener(layer)
    x = torch.randn(3, 13, 64, generator=torch.Generator().manual_seed(5))
    _, report = layer(x, LIVE, images)
    assert report.load.tolist() == listener.load(LIVE, images)[0]
    assert int(report.load.sum()) == TOPK * int(LIVE.sum())
    assert int(report.load[1].sum()) == (0 if images is None else TOPK * int((IMAGES & LIVE).sum()))


@pytest.mark.parametrize("images", [None, IMAGES])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_reports_the_load_of_every_layer(tiny_model: MakeModel, images: Tensor | None, training: bool) -> None:
    model = tiny_model().train(training)
    spread_biases(model)
    listener = Listener(model)
    _, _, report = model.model(make_ids(), attention_mask=LIVE.long(), image_mask=images)
    assert report.expert_load.dtype == torch.int64
    assert report.expert_load.tolist() == listener.load(LIVE, images)
    assert len({tuple(layer.flatten().tolist()) for layer in report.expert_load}) > 1


def test_the_load_does_not_depend_on_what_stands_in_the_padding(tiny_model: MakeModel) -> None:
    model = tiny_model()
    ids, other = make_ids(), make_ids(seed=9)
    other[LIVE] = ids[LIVE]
    loads = [model(x, attention_mask=LIVE.long()).report.expert_load for x in (ids, other)]
    assert torch.equal(*loads)
    assert int(loads[0].sum()) == 6 * TOPK * int(LIVE.sum())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_reports_the_balance_loss_of_all_layers_and_its_gradient(
    tiny_model: MakeModel, checkpointing: bool
) -> None:
    model = tiny_model(BackendConfig(gradient_checkpointing=checkpointing), router_balance_loss_weight=0.3)
    reference = tiny_model(router_balance_loss_weight=0.3)
    listener = Listener(reference)
    for each in (model, reference):
        each.train()
        spread_biases(each)
    report = model(make_ids(), attention_mask=LIVE.long(), labels=make_ids()).report
    # Without the weight, which whoever trains multiplies by.
    report.balance_loss.backward()
    reference(make_ids(), attention_mask=LIVE.long())
    expected = listener.balance(LIVE)
    expected.backward()
    assert report.balance_loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert report.expert_load.tolist() == listener.load(LIVE)
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        theirs = gradients[name].grad
        if theirs is None:
            # The sites behind the last router.
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if n.endswith("gate.weight"))


def test_recomputing_blocks_changes_no_bit_and_counts_nothing_twice(tiny_model: MakeModel) -> None:
    found = []
    for checkpointing in (False, True):
        model = tiny_model(
            BackendConfig(gradient_checkpointing=checkpointing), router_balance_loss_weight=0.3, indexer="learned"
        ).train()
        out = model(make_ids(), attention_mask=LIVE.long(), labels=make_ids())
        load = out.report.expert_load.clone()
        (out.loss + 0.3 * out.report.balance_loss + out.report.indexer_loss).backward()
        assert torch.equal(out.report.expert_load, load), "not even in backward"
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        told = {"load": load, "balance": out.report.balance_loss, "indexer": out.report.indexer_loss, "loss": out.loss}
        found.append(told | gradients)
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_the_balance_loss_is_made_only_where_it_is_trained(tiny_model: MakeModel) -> None:
    ids = make_ids(1, 5)
    weighted, weightless = tiny_model(router_balance_loss_weight=0.3), tiny_model()
    assert weighted.train()(ids).report.balance_loss is not None
    assert weightless.train()(ids).report.balance_loss is None
    with torch.no_grad():
        assert weighted(ids).report.balance_loss is None
    assert weighted.eval()(ids).report.balance_loss is None


def test_the_balance_loss_changes_no_bit_of_the_outputs(tiny_model: MakeModel) -> None:
    outputs = []
    for weight in (0.0, 0.3):
        model = tiny_model(router_balance_loss_weight=weight).train()
        out = model(make_ids(), attention_mask=LIVE.long(), labels=make_ids(), return_hidden_states=True)
        layer, report = model.model.layers[2].ffn(
            torch.randn(3, 13, 64, generator=torch.Generator().manual_seed(5)), LIVE
        )
        assert (report.balance_loss is None) == (weight == 0)
        outputs.append((out.loss, out.hidden_states[-1], layer))
    for without, with_loss in zip(*outputs, strict=True):
        assert torch.equal(without, with_loss)
