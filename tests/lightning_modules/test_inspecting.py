"""Budgets against models that really exist, and what `dsv41 inspect` prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from lightning_modules import __main__ as entry
from lightning_modules.budget import active_parameters, bytes_per_rank, named_parameters
from lightning_modules.inspecting import inspect
from lightning_modules.optim.groups import OptimizerConfig, build_optimizer

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]
TINY = str(Path(__file__).parents[2] / "configs" / "tiny.yaml")

VARIANTS: dict[str, dict[str, Any]] = {
    "every kind of layer": {},
    "no Engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "open gate": {"engram_gate": "open"},
    "plain": {"residual": "plain", "hc_mult": 1},
    "hyper-connections": {"residual": "hyper_connections"},
    "window": {"attention": "window"},
    "learned": {"indexer": "learned"},
    "more experts": {"n_routed_experts": 11, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_the_model_by_name_and_shape(tiny_model: MakeModel, variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    found = named_parameters(model.config.text_config)
    assert {n: p.shape for n, p in found.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(parameter.is_meta for parameter in found.values())


def test_parameters_without_a_vocabulary_are_refused(tiny_config: MakeConfig) -> None:
    config = tiny_config().text_config
    config.vocab_size = None
    with pytest.raises(ValueError, match=r"^model.config.vocab_size: unset"):
        named_parameters(config)


def test_active_parameters_are_the_rows_and_experts_of_a_token(tiny_config: MakeConfig) -> None:
    config = tiny_config().text_config
    parameters = named_parameters(config)
    active = active_parameters(config, parameters)
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    rows = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
    assert active["embedding"] == config.hidden_size
    assert active["Engram tables"] == 2 * rows
    assert active["routed experts"] == 6 * config.num_experts_per_tok * expert
    assert active["head"] == config.hidden_size * config.vocab_size
    assert active["attention"] == sum(
        size for name, size in sizes.items() if ".attn." in name and ".indexer." not in name
    )
    total = sum(sizes.values())
    spared = total - sum(active.values())
    assert spared == (
        (config.vocab_size - 1) * config.hidden_size
        + sum(config.engram_num_embeddings) * config.engram_head_dim
        - 2 * rows
        + 6 * (config.n_routed_experts - config.num_experts_per_tok) * expert
    )


@pytest.mark.parametrize("tables", ["rows", "dense"])
@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_bytes_are_those_of_a_model_that_has_taken_a_step(tiny_model: MakeModel, tables: Any, matrices: Any) -> None:
    model = tiny_model(indexer="learned")
    config = OptimizerConfig(tables=tables, matrices=matrices)
    optimizer = build_optimizer(model, config)
    ids = torch.randint(3, 500, (2, 20), generator=torch.Generator().manual_seed(1))
    out = model(ids, labels=ids)
    (out.loss + out.report.indexer_loss).backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    held = bytes_per_rank(dict(model.named_parameters()), config, 1)
    assert held.weights == sum(p.nbytes for p in model.parameters())
    assert held.gradients == sum(g.nbytes for g in gradients if g is not None and not g.is_sparse)
    tensors = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    assert held.optimizer == sum(t.nbytes for t in tensors)
    assert held.gathered == 0
    assert held.engram_rows == tuple(model.config.text_config.engram_num_embeddings)
    assert held.total == held.weights + held.gradients + held.optimizer


def test_the_fullest_of_several_ranks_has_its_rows_of_everything(tiny_config: MakeConfig) -> None:
    config = tiny_config().text_config
    parameters = named_parameters(config)
    held = bytes_per_rank(parameters, OptimizerConfig(), 3, compute_bytes=2)
    shares = {n: -(-p.shape[0] // 3) * p.numel() // p.shape[0] for n, p in parameters.items()}
    tables = {n for n in shares if n.endswith("engram.embed.weight")}
    assert held.weights == 4 * sum(shares.values())
    assert held.gradients == 4 * sum(share for n, share in shares.items() if n not in tables)
    rows = [-(-rows // 3) for rows in config.engram_num_embeddings]
    assert held.engram_rows == tuple(rows)
    assert held.optimizer == 8 * sum(shares.values()) + 4 * sum(rows)
    blocks = [
        sum(p.numel() for n, p in parameters.items() if f".layers.{layer}." in n and n not in tables)
        for layer in config.layers
    ]
    outer = sum(p.numel() for n, p in parameters.items() if ".layers." not in n)
    assert held.gathered == 2 * (outer + 2 * max(blocks))
    with pytest.raises(ValueError, match=r"^world_size: must be at least 1, got 0"):
        bytes_per_rank(parameters, OptimizerConfig(), 0)


# ---------------------------------------------------------------- the command


def test_the_command_prints_the_budget_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config", TINY, "--length", "100", "256", "--world-size", "2", "--memory-per-rank", "1GB"]
    entry.main(["inspect", *options])
    out = capsys.readouterr().out
    assert re.search(r"^together +5,714,588 +100\.0% +1,756,188$", out, re.MULTILINE)
    assert "S = 100  S = 256" in out
    assert "bytes per rank, 2 ranks" in out
    assert "Engram rows per rank: 16,440, 16,488" in out
    assert re.search(r"^fits 1\.0 GB: yes, with [\d.]+ MB left for activations$", out, re.MULTILINE)


def test_operations_are_those_of_the_configuration_on_the_command_line() -> None:
    line = [*("--config", TINY), *("--length", "256"), *("--model.config.n_routed_experts", "16")]
    out = inspect([*line, "--model.config.num_experts_per_tok", "4"])
    plain = inspect(line)

    def experts(text: str) -> list[str]:
        return [row for row in text.splitlines() if row.startswith("routed experts")]

    assert experts(out)[0].split()[2] == experts(plain)[0].split()[2] == f"{2 * 1769472:,}"
    assert [row.split()[2:] for row in (experts(out)[1], experts(plain)[1])] == [["5.3", "M"], ["2.7", "M"]]


def test_without_a_file_it_is_the_release() -> None:
    out = inspect(["--world-size", "64", "--memory-per-rank", "80GB"])
    assert re.search(r"^together +748,494,654,064 ", out, re.MULTILINE)
    assert "S = 1,048,576" in out
    assert re.search(r"^fits 80\.0 GB: no, [\d.]+ GB too much$", out, re.MULTILINE)


def test_bf16_halves_what_is_gathered() -> None:
    def gathered(*extra: str) -> float:
        out = inspect(["--config", TINY, "--world-size", "2", *extra])
        found = re.search(r"gathered weights while computing +([\d.]+) MB", out)
        assert found is not None
        return float(found[1])

    strategy = ["--trainer.strategy", "engram_fsdp"]
    narrow = ["--trainer.strategy", "lightning_modules.strategy.EngramFSDPStrategy"]
    narrow += ["--trainer.strategy.mixed_precision", "bf16"]
    assert gathered(*narrow) == pytest.approx(gathered(*strategy) / 2, abs=0.1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--length", "1025"], r"length: must lie in 1\.\.1024 .*got 1025"),
        (["--world-size", "0"], r"--world-size: must be at least 1, got 0"),
        (["--memory-per-rank", "lots"], r"--memory-per-rank: must be a size such as 80GB or 40GiB, got 'lots'"),
        (["--lenght", "3"], r"--lenght"),
        (["--model.config.hidden_sise", "3"], r"hidden_sise"),
    ],
)
def test_bad_options_are_named(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        entry.main(["inspect", "--config", TINY, *args])
    assert caught.value.code in (1, 2)
    assert re.search(message, capsys.readouterr().err)


def test_help_lists_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    entry.main(["inspect", "--help"])
    out = capsys.readouterr().out
    assert all(option in out for option in ("--length", "--world-size", "--memory-per-rank"))
