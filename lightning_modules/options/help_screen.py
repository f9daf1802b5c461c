"""First screen of ``dsv41 fit --help`` and its like: the options in common use, without importing anything heavy.

``dsv41 fit --help all`` lists every option, by the parser itself. Help is coloured on a terminal, unless NO_COLOR is
set.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

WIDTH = 39  # columns of an option and its value

_RUN = {
    "--config FILE": "such as configs/tiny.yaml; later ones count more",
    "--print_config": "print every option with its value, and stop",
}
_DATA = {
    "--data.source TEXT": "stdlib, a file or folder, hf:NAME, or a list of these",
    "--data.batch_size N": "rows in a batch of all processes together",
}
_MACHINE = {
    "--trainer.accelerator cpu|cuda": "device to compute on",
    "--trainer.devices N": "several need --config configs/strategy/fsdp.yaml",
    "--trainer.precision NAME": "32-true or bf16-mixed",
}
_FIT: dict[str, Mapping[str, str]] = {
    "run": {
        "--config FILE": _RUN["--config FILE"],
        "--ckpt_path last|best|PATH": "last resumes the newest run; others begin a new one",
        "--seed_everything N": "seed of initial values",
        "--print_config": _RUN["--print_config"],
    },
    "data": {
        "--data.source TEXT": _DATA["--data.source TEXT"],
        "--data.tokenizer NAME": "bpe (trained on the text), deepseek, or a file or folder",
        "--data.sequence_length N": "tokens in a row",
        "--data.batch_size N": _DATA["--data.batch_size N"],
    },
    "model": {
        "--model.pretrained FOLDER": "start from exported weights",
        "--model.config.hidden_size N": "width of a residual stream",
        "--model.config.num_hidden_layers N": "layers",
        "--model.config.engram_layer_ids [1,3]": "layers with Engram memory; [] has none",
        "--model.optimizer.lr X": "learning rate after warm-up",
        "--model.schedule.name NAME": "cosine, wsd or constant",
        "--model.schedule.warmup_steps N": "steps of rising learning rate",
    },
    "length": {
        "--trainer.max_steps N": "optimizer steps",
        "--trainer.max_time DD:HH:MM:SS": "time after which to stop",
        "--trainer.val_check_interval N": "batches between validations; one is at the end",
        "--trainer.limit_val_batches N": "batches of a validation",
        "--trainer.accumulate_grad_batches N": "batches of an optimizer step",
        "--checkpoint.every_n_steps N": "optimizer steps between checkpoints",
        "--trainer.fast_dev_run true": "one batch of everything, and no files",
    },
    "machine": _MACHINE,
    "place": {
        "--trainer.logger.init_args.save_dir DIR": "folder of all runs",
        "--trainer.logger.init_args.name NAME": "folder of this experiment's runs in it",
    },
}
_READING: dict[str, Mapping[str, str]] = {
    "run": {
        "--ckpt_path PATH": "such as runs/tiny/version_0/checkpoints/best.ckpt",
        "--config FILE": "in place of the one beside the checkpoint",
        "--print_config": _RUN["--print_config"],
    },
    "data": _DATA,
    "machine": _MACHINE,
}
# By subcommand: its sentence, and its groups of options.
_SCREENS = {
    "fit": ("Train a model, with validation in between, and write checkpoints.", _FIT),
    "validate": ("Measure a checkpoint's loss on the validation text.", _READING),
    "test": ("Measure a checkpoint's loss on the test text.", _READING),
    "predict": ("Write the most likely next token at every position of the test text into a file.", _READING),
}


def screen(subcommand: str) -> str:
    """Help of a subcommand on one screen."""
    sentence, groups = _SCREENS[subcommand]
    needs = "--config FILE" if subcommand == "fit" else "--ckpt_path PATH"
    lines = [f"usage: dsv41 {subcommand} {needs} [options]", sentence]
    for title, options in groups.items():
        lines.append(f"{title}:")
        lines += [f"  {option:<{WIDTH}}  {does}" for option, does in options.items()]
    lines.append(f"every option explained: dsv41 {subcommand} --help all")
    return "\n".join(lines) + "\n"


def without_first_screen(args: Sequence[str]) -> list[str] | None:
    """Print the first screen if it is asked for.

    Args:
        args: Words of the command line from the subcommand on.

    Returns:
        The words for the parser, of which ``--help all`` has become ``--help``; None if the screen has answered them.
    """
    index = next((index for index, word in enumerate(args) if word in ("-h", "--help")), None)
    if index is None:
        return list(args)
    if list(args[index + 1 : index + 2]) == ["all"]:
        return [*args[: index + 1], *args[index + 2 :]]
    print_coloured(screen(args[0]), sys.stdout)
    return None


def short_usage(text: str) -> str:
    """The help of a parser whose usage, if it lists options over many lines, ends at the first of them."""
    usage, _, rest = text.partition("\n\n")
    if usage.count("\n") < 5:
        return text
    return usage.split(" [-", 1)[0] + " [options]\n\n" + rest


def print_coloured(text: str, stream: TextIO) -> None:
    """Print help: on a terminal with titles and options in colour; elsewhere, and under NO_COLOR, as it is."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        stream.write(text)
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(text.rstrip("\n"))
    shown.highlight_regex(re.compile(r"^(?! ).*:$", re.MULTILINE), "bold yellow")
    shown.highlight_regex(r"(?<![\w-])--?[A-Za-z][\w.+]*", "cyan")
    shown.highlight_regex(r"\bdsv41 [a-z]+", "bold")
    Console(file=stream, force_terminal=True, soft_wrap=True).print(shown)


def announce(subcommand: str) -> None:
    """Print on a terminal, before heavy imports, that work has begun; of several processes only the first does."""
    if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"dsv41 {subcommand}: starting, imports take some seconds ...", file=sys.stderr, flush=True)
