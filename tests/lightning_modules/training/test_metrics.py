"""Metrics weigh tokens, not batches, against sums written out."""

from __future__ import annotations

import math

import torch

from lightning_modules.training.metrics import LanguageModelMetric


def test_uneven_batches_weigh_by_their_tokens() -> None:
    metric = LanguageModelMetric()
    for nats, tokens, count in ((30.0, 10, 25), (4.0, 1, 7), (0.0, 0, 0)):
        metric.update(torch.tensor(nats), torch.tensor(tokens), torch.tensor(count))
    values = metric.compute()
    assert float(values["loss"]) == torch.tensor(34 / 11).item()
    assert math.isclose(float(values["perplexity"]), math.exp(34 / 11), rel_tol=1e-6)
    assert math.isclose(float(values["bits_per_byte"]), 34 / math.log(2) / 32, rel_tol=1e-6)


def test_many_small_batches_lose_no_precision() -> None:
    metric = LanguageModelMetric()
    for _ in range(1000):
        metric.update(torch.tensor(1e6 + 0.25), torch.tensor(100_000), torch.tensor(300_000))
    assert math.isclose(float(metric.nats), 1000 * (1e6 + 0.25), rel_tol=1e-12)


def test_nothing_predicted_is_not_a_number_rather_than_zero() -> None:
    metric = LanguageModelMetric()
    metric.update(torch.tensor(0.0), torch.tensor(0), torch.tensor(0))
    assert math.isnan(float(metric.compute()["loss"]))
