"""The loss: chunks of positions against autograd over all logits at once, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv41.ops import cross_entropy as module
from dsv41.ops.cross_entropy import causal_lm_loss, chunked_causal_lm_loss, next_tokens

BATCH, LENGTH, HIDDEN, VOCABULARY = 3, 37, 24, 301


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last of them shorter."""
    monkeypatch.setattr(module, "LOGIT_BYTES", 1)
    monkeypatch.setattr(module, "FEWEST_ROWS", 7)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight, large enough that some probabilities are near one; labels with holes."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator, dtype=torch.float64).mul_(3).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    weight = weight if dtype == torch.float64 else weight.float()
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, 5:16] = -100
    labels[1, 31:] = -100
    labels[2] = -100
    labels[2, 0] = 9  # nothing precedes it
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, kind: str = "mean") -> tuple[Tensor, ...]:
    """Loss and gradients by autograd, in float64."""
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss = getattr(causal_lm_loss(exact[0] @ exact[1].t(), labels), kind)
    return loss.detach(), *torch.autograd.grad(loss, exact, torch.tensor(0.7, dtype=torch.float64))


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, kind: str = "mean") -> tuple[Tensor, ...]:
    loss: Tensor = getattr(chunked_causal_lm_loss(hidden, weight, labels), kind)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.7, dtype=loss.dtype))


@pytest.mark.parametrize("kind", ["mean", "nats"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)]
)
def test_loss_and_gradients_equal_those_of_all_logits(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = batch(dtype)
    ours, theirs = chunked(hidden, weight, labels, kind), whole(hidden, weight, labels, kind)
    assert ours[0].dtype == weight.dtype
    assert [gradient.dtype for gradient in ours[1:]] == [hidden.dtype, weight.dtype]
    # Only the gradient of bf16 hidden states is rounded to bf16; the arithmetic is fp32.
    tight = 2e-6 if dtype == torch.bfloat16 else tolerance
    for mine, exact, bound in zip(ours, theirs, (tight, tolerance, tight), strict=True):
        assert float((mine.double() - exact).norm() / exact.norm()) < bound
    dead = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    dead[0, [*range(4), *range(15, LENGTH - 1)]] = False
    dead[1, :30] = False
    assert not ours[1][dead].any()
    assert (ours[1][~dead].abs().amax(-1) > 0).all()


def test_huge_logits_stay_finite() -> None:
    hidden, weight, labels = batch(torch.float32)
    ours = chunked((hidden * 1e4).detach().requires_grad_(), weight, labels)
    theirs = whole(hidden * 1e4, weight, labels)
    assert all(tensor.isfinite().all() for tensor in ours)
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-6)


def test_without_a_live_label_loss_and_gradients_are_zero() -> None:
    hidden, weight, labels = batch()
    for ids in (torch.full_like(labels, -100), labels[2:].expand(BATCH, -1)):
        loss, *gradients = chunked(hidden, weight, ids)
        assert float(loss) == 0
        assert not any(gradient.any() for gradient in gradients)
    one = hidden[:, :1].detach().requires_grad_()
    assert float(chunked(one, weight, labels[:, :1])[0]) == 0


def test_targets_are_the_next_labels() -> None:
    labels = torch.tensor([[3, 1, -100, 4]], dtype=torch.int32)
    assert next_tokens(labels).tolist() == [[1, -100, 4, -100]]
    assert next_tokens(labels).dtype == torch.int64


class Watch(TorchDispatchMode):
    """Largest number of rows, and all the rows together, that are multiplied with the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made.append((str(func), out.numel()))
            if out.dim() == 2 and out.shape[1] == VOCABULARY and "mm" in str(func):
                self.rows.append(len(out))
        return out


def test_logits_are_made_for_live_positions_only_and_a_few_at_a_time() -> None:
    hidden, weight, labels = batch(torch.float32)
    live = int((next_tokens(labels) != -100).sum())
    assert live == 25 + 30
    assert int(chunked_causal_lm_loss(hidden, weight, labels).tokens) == live
    with Watch() as watch:
        loss = chunked_causal_lm_loss(hidden, weight, labels).mean
        loss.backward()
    assert watch.rows == [7] * 7 + [6]
    assert max(size for _, size in watch.made) == VOCABULARY * HIDDEN


def test_dead_positions_that_take_part_change_nothing() -> None:
    hidden, weight, labels = batch()
    expected = whole(hidden, weight, labels, "nats")
    with Watch() as watch:
        loss = module._ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1), weight, next_tokens(labels).flatten(), False, True
        )
    assert sum(watch.rows) == BATCH * LENGTH
    assert float(loss.detach()) == pytest.approx(float(expected[0]), rel=1e-12)
    gradients = torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.7, dtype=torch.float64))
    for mine, exact in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("frozen", ["weight", "hidden", "both", "no_grad"])
def test_gradients_that_nobody_needs_are_not_made(frozen: str) -> None:
    hidden, weight, labels = batch(torch.float32)
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    weight.requires_grad_(frozen not in ("weight", "both"))
    expected = whole(hidden, weight, labels)
    with torch.set_grad_enabled(frozen != "no_grad"), Watch() as watch:
        loss = chunked_causal_lm_loss(hidden, weight, labels).mean
    assert float(loss.detach()) == pytest.approx(float(expected[0]), rel=1e-6)
    names = [name for name, _ in watch.made]
    assert names.count("aten.addmm_.default") == (8 if frozen == "hidden" else 0)
    assert names.count("aten.index_copy_.default") == (8 if frozen == "weight" else 0)
    assert loss.requires_grad == (frozen in ("weight", "hidden"))
    if loss.requires_grad:
        loss.backward(torch.tensor(0.7))
        leaf, exact = (hidden, expected[1]) if frozen == "weight" else (weight, expected[2])
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), exact, atol=1e-6, rtol=1e-5)


def test_a_second_walk_back_is_refused_rather_than_scaled_twice() -> None:
    hidden, weight, labels = batch()
    loss = chunked_causal_lm_loss(hidden, weight, labels).mean
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_does_not_narrow_the_products() -> None:
    hidden, weight, labels = batch(torch.float32)
    expected = chunked(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        ours = chunked(hidden, weight, labels)
    for mine, same in zip(ours, expected, strict=True):
        assert torch.equal(mine, same)
