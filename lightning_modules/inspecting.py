"""``dsv41 inspect``: the budget of any configuration, printed in seconds, with nothing built and no data read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from dsv41.config import DeepseekV41TextConfig
from dsv41.cost import PARTS, flops_per_sequence, part_of
from dsv41.weights.writing import size_in_bytes
from lightning_modules.budget import RankBytes, active_parameters, bytes_per_rank, named_parameters
from lightning_modules.cli import DeepseekV41CLI, Parser
from lightning_modules.data import TextDataModule
from lightning_modules.data.tokenization import DEEPSEEK_VOCAB_SIZE, load_tokenizer
from lightning_modules.optim.groups import OptimizerConfig
from lightning_modules.options.classes import chosen_class, written_out
from lightning_modules.task import DeepseekV41Task
from lightning_modules.text import plain_table, readable_count, readable_size


class Parsed(DeepseekV41CLI):
    """The command line's configuration, checked as `fit` checks it, without the objects."""

    def __init__(self, args: list[str]) -> None:
        args = written_out(args)
        super().__init__(
            model_class=chosen_class(args, "model_class", DeepseekV41Task) or DeepseekV41Task,
            datamodule_class=chosen_class(args, "data_class", LightningDataModule) or TextDataModule,
            save_config_callback=None,
            trainer_defaults={"enable_model_summary": False, "use_distributed_sampler": False},
            parser_class=Parser,
            auto_configure_optimizers=False,
            args=args,
            run=False,
        )

    def _set_seed(self) -> None:
        """Nothing is drawn."""

    def before_instantiate_classes(self) -> None:
        """Nothing is built, so nothing is refused."""

    def instantiate_classes(self) -> None:
        """Nothing."""


def _options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--length", type=int, nargs="+", metavar="S", help="sequence lengths of the table of operations"
    )
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks that share the model (default 1)")
    parser.add_argument(
        "--memory-per-rank", metavar="SIZE", help="what a rank has, such as 80GB: says whether the model fits"
    )
    return parser


def _default_lengths(config: DeepseekV41TextConfig) -> list[int]:
    longest = config.max_position_embeddings
    return sorted({max(1, longest // 4**power) for power in range(3)})


def vocabulary(config: DeepseekV41TextConfig, data: Any) -> tuple[int, str]:
    """Size of the vocabulary, and where it is from, if the configuration leaves it to the tokenizer."""
    if config.vocab_size is not None:
        return config.vocab_size, "model.config"
    spec = data.tokenizer
    if spec == "bpe":
        return data.vocab_size, "data.vocab_size; a tokenizer trained on little text comes out smaller"
    if spec == "deepseek":
        return DEEPSEEK_VOCAB_SIZE, "the DeepSeek tokenizer"
    return len(load_tokenizer(spec, [], 0, Path())), spec


def compute_bytes(strategy: Any) -> int:
    """Bytes of a gathered weight's element: 2 if the strategy's `mixed_precision` is bf16."""
    options = getattr(strategy, "init_args", None)
    return 2 if options is not None and options.get("mixed_precision") == "bf16" else 4


def parameter_lines(config: DeepseekV41TextConfig, parameters: dict[str, Any]) -> list[str]:
    """Parameters by part, and those that one token reads."""
    counts = dict.fromkeys([*(part for part, _ in PARTS), "other"], 0)
    for name, parameter in parameters.items():
        counts[part_of(name)] += parameter.numel()
    counts = {part: count for part, count in counts.items() if count}
    active = active_parameters(config, parameters)
    total = sum(counts.values())
    rows = [("parameters", "all", "share", "read by a token")]
    rows += [(part, f"{count:,}", f"{count / total:.1%}", f"{active[part]:,}") for part, count in counts.items()]
    rows.append(("together", f"{total:,}", "100.0%", f"{sum(active.values()):,}"))
    return plain_table(rows)


def operation_lines(config: DeepseekV41TextConfig, lengths: Sequence[int]) -> list[str]:
    """Operations of training per token, by part, for several lengths of a sequence."""
    found = {length: flops_per_sequence(config, length) for length in lengths}
    parts = list(dict.fromkeys(part for flops in found.values() for part in flops))
    rows = [("training FLOPs per token", *(f"S = {length:,}" for length in lengths))]
    rows += [
        (part, *(readable_count(found[s][part].training / s if part in found[s] else 0.0) for s in lengths))
        for part in parts
    ]
    rows.append(("together", *(readable_count(sum(f.training for f in found[s].values()) / s) for s in lengths)))
    return plain_table(rows)


def byte_lines(held: RankBytes, world_size: int, memory: int | None) -> list[str]:
    """Bytes of a rank, and whether they fit."""
    rows = [
        (f"bytes per rank, {world_size} rank{'s' if world_size > 1 else ''}", ""),
        ("weights (fp32)", readable_size(held.weights)),
        ("gradients (fp32)", readable_size(held.gradients)),
        ("optimizer state", readable_size(held.optimizer)),
    ]
    if held.gathered:
        rows.append(("gathered weights while computing", readable_size(held.gathered)))
    rows.append(("together, without activations", readable_size(held.total)))
    lines = plain_table(rows)
    if held.engram_rows:
        lines.append("Engram rows per rank: " + ", ".join(f"{rows:,}" for rows in held.engram_rows))
    if memory is not None:
        left = memory - held.total
        lines.append(
            f"fits {readable_size(memory)}: yes, with {readable_size(left)} left for activations"
            if left > 0
            else f"fits {readable_size(memory)}: no, {readable_size(-left)} too much"
        )
    return lines


def inspect(args: list[str]) -> str:
    """What ``dsv41 inspect ARGS`` prints.

    Raises:
        ValueError: A value is out of range; names the option.
        SystemExit: The options do not parse.
    """
    own = _options(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    options, rest = own.parse_known_args(args)
    if "-h" in rest or "--help" in rest:
        return _options(
            argparse.ArgumentParser(
                prog="dsv41 inspect",
                description="Parameters, operations and memory of a configuration: the files and options that fit "
                "takes. Without any, the release.",
            )
        ).format_help().rstrip()  # fmt: skip
    memory = None
    if options.memory_per_rank is not None:
        try:
            memory = size_in_bytes(options.memory_per_rank)
        except ValueError:
            raise ValueError(
                f"--memory-per-rank: must be a size such as 80GB or 40GiB, got {options.memory_per_rank!r}"
            ) from None
    if options.world_size < 1:
        raise ValueError(f"--world-size: must be at least 1, got {options.world_size}")
    parsed = Parsed(rest).config
    config = DeepseekV41TextConfig(**parsed.model.config.as_dict())
    config.vocab_size, source = vocabulary(config, parsed.data)
    parameters = named_parameters(config)
    optimizer = OptimizerConfig(**parsed.model.optimizer.as_dict())
    held = bytes_per_rank(parameters, optimizer, options.world_size, compute_bytes(parsed.trainer.get("strategy")))
    return "\n".join(
        [
            f"vocabulary: {config.vocab_size:,} ids ({source})",
            "",
            *parameter_lines(config, parameters),
            "",
            *operation_lines(config, options.length or _default_lengths(config)),
            "",
            *byte_lines(held, options.world_size, memory),
        ]
    )
