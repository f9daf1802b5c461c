"""What is no matter of training (``dsv41 export``, ``dsv41 ablate``, ...): what is typed, and what is answered.

Their own options are few and no configuration, so argparse reads them, where it can before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from lightning_modules.options.paths import expanded

_DTYPES = ("float32", "bfloat16", "float16")


def _export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv41 export",
        description="Write the weights of a checkpoint, of one rank or many, into a folder of safetensors with "
        "config.json, tokenizer and model card.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ckpt_path", required=True, help="file or folder, such as runs/tiny/version_0/checkpoints/best.ckpt"
    )
    parser.add_argument("--output", required=True, help="folder to write, which must not exist or be empty")
    parser.add_argument(
        "--format", choices=("released", "hf"), default="released",
        help="names of the release (default), or of the modules as transformers saves them; from_pretrained reads both",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=_DTYPES, help="of what is not quantised and need not stay fp32")
    parser.add_argument("--quantized", action="store_true", help="FP8 and FP4 weights as in the release")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file (default 5GB)")
    parser.add_argument("--tokenizer", help="folder of the tokenizer, if the run's own is not beside the checkpoint")
    parser.add_argument("--license", default="unknown", help="of the weights, such as apache-2.0 (default unknown)")
    return parser


def _import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv41 import",
        description="Check a folder of weights, and write a configuration that fine-tunes them.",
        allow_abbrev=False,
    )
    parser.add_argument("--from", dest="source", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--output", default="finetune.yaml", help="configuration to write (default finetune.yaml)")
    return parser


def _ablate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv41 ablate",
        description="Train a base and variants of it over several seeds, and compare them. What is finished is "
        "skipped, what is not goes on.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="study, such as configs/ablations/engram.yaml")
    parser.add_argument("--output", help="folder to write, in place of the study's")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, which share the cores")
    parser.add_argument("--dry-run", action="store_true", help="print runs, parameters and operations, and stop")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv41 compare",
        description="Compare runs by their TensorBoard files. Runs of one experiment are its seeds.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="[NAME=]RUN", help="directory of a run, or above several; NAME is to stand for it"
    )
    parser.add_argument("--base", help="what the others are compared with (default: base, or the first)")
    return parser


def _parsed(parser: argparse.ArgumentParser, args: list[str], *paths: str) -> argparse.Namespace:
    """Options, with ``~`` and variables of the options `paths` expanded."""
    options = parser.parse_args(args)
    for name in paths:
        if getattr(options, name) is not None:
            setattr(options, name, expanded(getattr(options, name), f"--{name}"))
    return options


def _export(args: list[str]) -> None:
    options = _parsed(_export_parser(), args, "ckpt_path", "output", "tokenizer")
    import torch

    from lightning_modules.transfer.export import export_checkpoint

    audit = export_checkpoint(
        options.ckpt_path,
        options.output,
        options.format,
        None if options.dtype is None else getattr(torch, options.dtype),
        options.quantized,
        options.max_shard_size,
        options.tokenizer,
        options.license,
    )
    size = f"{audit.bytes_written / 1e6:,.1f} MB in {len(audit.files)} file(s)"
    print(f"{audit.folder}: {len(audit.tensors)} tensors, {size}, with configuration, tokenizer and model card")
    print(f"fine-tune it:  dsv41 fit --config CONFIG --model.pretrained {audit.folder}")
    print(f"in Python:     DeepseekV41ForCausalLM.from_pretrained({str(audit.folder)!r})")


def _import(args: list[str]) -> None:
    options = _parsed(_import_parser(), args, "source", "output")
    from lightning_modules.transfer.import_weights import import_folder

    print(import_folder(Path(options.source), Path(options.output)))


def _inspect(args: list[str]) -> None:
    from lightning_modules.inspecting import inspect

    print(inspect(args))


def _ablate(args: list[str]) -> None:
    options = _parsed(_ablate_parser(), args, "config", "output")
    from lightning_modules.ablation.ablate import ablate

    output = None if options.output is None else Path(options.output)
    status = ablate(Path(options.config), output, options.jobs, options.dry_run)
    if status:
        sys.exit(status)


def _compare(args: list[str]) -> None:
    options = _compare_parser().parse_args(args)
    from lightning_modules.ablation.comparing import compare

    print(compare(options.runs, options.base), end="")


COMMANDS = {"export": _export, "import": _import, "inspect": _inspect, "ablate": _ablate, "compare": _compare}


def main(name: str, args: list[str]) -> None:
    """Run ``dsv41 NAME ARGS``. Bad input ends with one line on stderr and status 1 (2 if it does not parse)."""
    try:
        COMMANDS[name](args)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("DSV41_TRACEBACK"):
            raise
        print(f"dsv41: error: {error}", file=sys.stderr)
        sys.exit(1)
