"""Mixers and streams of one forward, against float64 loops written from docs/ARCHITECTURE.md, section 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_modules.cli import DeepseekV41CLI
from lightning_modules.insight.mixers import (
    gains_over_depth,
    matrix_table,
    mixers_of,
    sinkhorn_residuals,
    stream_norms,
)
from lightning_modules.notebook import build, validation_batch

NanoCli = Callable[..., DeepseekV41CLI]
SITES = [f"layer_{layer}_{kind}" for layer in range(4) for kind in ("attention", "experts")]


def built(nano_cli: NanoCli, *options: str) -> DeepseekV41CLI:
    """The smallest model, with weights large enough for mixers that mix and streams that differ."""
    cli = nano_cli(*options)
    build(cli)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in cli.model.built.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "_hc.base" in name or "_hc.scale" in name:
                parameter.add_(noise)
            elif parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return cli


def padded_batch(cli: DeepseekV41CLI, length: int = 20) -> dict[str, Tensor]:
    """Two rows, the second with padding."""
    batch = validation_batch(cli, rows=2)
    mask = batch["attention_mask"].clone()
    mask[1, length:] = 0
    return batch | {"attention_mask": mask}


def streams_seen(cli: DeepseekV41CLI, batch: dict[str, Tensor], *kinds: str) -> list[tuple[Any, Any]]:
    """Arguments and results of the modules whose name ends with one of `kinds`, in a forward."""
    seen: list[tuple[Any, Any]] = []
    hooks = [
        module.register_forward_hook(lambda _, given, made: seen.append((given, made)))
        for name, module in cli.model.named_modules()
        if name.endswith(kinds)
    ]
    with torch.no_grad():
        cli.model.built(batch["input_ids"], attention_mask=batch["attention_mask"])
    for hook in hooks:
        hook.remove()
    return seen


def sinkhorn_by_hand(logits: Tensor, iterations: int, eps: float) -> Tensor:
    x = [[math.exp(value) / sum(map(math.exp, row)) + eps for value in row] for row in logits.tolist()]
    for _ in range(2 * iterations - 1):  # columns, rows, columns, ...
        x = [list(line) for line in zip(*x, strict=True)]
        x = [[value / (sum(line) + eps) for value in line] for line in x]
    return torch.tensor(x, dtype=torch.float64).t()


# ------------------------------------------------------------------ matrices


@pytest.mark.parametrize("residual", ["mhc", "hyper_connections"])
def test_matrices_are_those_that_sites_predict(nano_cli: NanoCli, residual: str) -> None:
    cli = built(nano_cli, "--model.config.residual", residual, "--model.config.hc_sinkhorn_iters", "2")
    batch = padded_batch(cli)
    mixers = mixers_of(cli.model.built, batch)
    assert mixers.sites == SITES
    live = batch["attention_mask"].nonzero().tolist()
    assert mixers.combs.shape == (len(SITES), len(live), 4, 4)
    assert len(live) == 52
    config = cli.model.built.config.text_config
    blocks = cli.model.built.model.layers
    sites: list[Any] = [site for block in blocks for site in (block.attn_hc, block.ffn_hc)]
    seen = streams_seen(cli, batch, "_hc")
    for site, ((streams, _), _), combs in zip(sites, seen, mixers.combs, strict=True):
        for (row, position), comb in list(zip(live, combs, strict=True))[::7]:
            f = streams[row, position].flatten().double()
            m = (site.fn.double() @ f) / math.sqrt(float(f @ f) / len(f) + config.rms_norm_eps)
            logits = (m[8:] * site.scale[2] + site.base[8:]).view(4, 4).detach()
            expected = logits if residual == "hyper_connections" else sinkhorn_by_hand(logits, 2, config.hc_eps)
            torch.testing.assert_close(comb, expected, rtol=1e-4, atol=1e-5, check_dtype=False)
    assert mixers.combs.std(1).amax((1, 2)).amin() > 1e-3, "tokens mix in ways of their own, at every site"
    assert not any(module._forward_hooks for module in cli.model.modules())


def test_one_ordinary_stream_has_no_mixers(nano_cli: NanoCli) -> None:
    cli = nano_cli("--model.config.residual", "plain", "--model.config.hc_mult", "1")
    build(cli)
    with pytest.raises(ValueError, match=r"^model.config.residual: must be 'mhc' or 'hyper_connections' .*'plain'$"):
        mixers_of(cli.model.built, validation_batch(cli))


def test_the_table_of_a_matrix_adds_up() -> None:
    assert matrix_table(torch.tensor([[0.25, 0.5], [0.125, 2.0]])) == (
        "| from, to | stream 0 | stream 1 | sum |\n"
        "|---|---:|---:|---:|\n"
        "| stream 0 | 0.25000 | 0.50000 | **0.75000** |\n"
        "| stream 1 | 0.12500 | 2.00000 | **2.12500** |\n"
        "| sum | **0.37500** | **2.50000** |  |\n"
    )


# ------------------------------------------------------------------ Sinkhorn


def test_residuals_equal_a_loop_over_matrices() -> None:
    iterations, spreads = (1, 2, 5), (0.5, 2.0)
    found = sinkhorn_residuals(iterations, spreads, streams=3, matrices=20, eps=1e-4, seed=3)
    drawn = torch.randn(20, 3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for line, spread in zip(found.tolist(), spreads, strict=True):
        for value, rounds in zip(line, iterations, strict=True):
            worst = 0.0
            for logits in spread * drawn:
                comb = sinkhorn_by_hand(logits, rounds, 1e-4)
                worst = max(worst, *(abs(float(sums) - 1) for sums in (*comb.sum(0), *comb.sum(1))))
            assert value == pytest.approx(worst, rel=1e-9)
        assert line == sorted(line, reverse=True), "more rounds come closer"
    assert (found[1] > found[0]).all(), "logits further apart take longer"
    with pytest.raises(ValueError, match=r"^iterations: must be at least 1, got 0$"):
        sinkhorn_residuals((3, 0), (1.0,))


# ------------------------------------------------------------------ over depth


def test_gains_are_of_the_mixers_up_to_each_site() -> None:
    """The most that the largest stream or gradient can become: it takes signs alone to reach it."""
    combs = torch.randn(4, 5, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.zeros(4, 5, 2, dtype=torch.float64)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    for token in range(5):
        for depth in range(1, 5):
            for signal in signs:
                streams, gradient = signal, signal
                for comb in combs[:depth, token]:
                    streams = comb.t() @ streams
                for comb in combs[:depth, token].flip(0):
                    gradient = comb @ gradient
                for way, reached in enumerate((streams, gradient)):
                    expected[depth - 1, token, way] = max(expected[depth - 1, token, way], reached.abs().max())
    torch.testing.assert_close(gains_over_depth(combs), expected, rtol=1e-12, atol=0)


def test_norms_are_of_the_streams_between_blocks(nano_cli: NanoCli) -> None:
    cli = built(nano_cli)
    batch = padded_batch(cli)
    norms = stream_norms(cli.model.built, batch)
    blocks = streams_seen(cli, batch, *(f"layers.{layer}" for layer in range(4)))
    between = [blocks[0][0][0], *(made[0] for _, made in blocks)]
    live = batch["attention_mask"].nonzero().tolist()
    for found, streams in zip(norms, between, strict=True):
        for stream in range(4):
            sizes = [math.sqrt(sum(x * x for x in streams[b, s, stream].tolist()) / 16) for b, s in live]
            assert float(found[stream]) == pytest.approx(sum(sizes) / len(sizes), rel=1e-5)
    assert norms.shape == (5, 4)
    assert norms[-1].std() > 1e-4, "streams differ"
