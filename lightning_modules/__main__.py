"""Entry point of the command ``dsv41``, also ``python -m lightning_modules``.

It answers at once what needs no model, and hands the rest to `lightning_modules.cli` and `lightning_modules.commands`.

Importing torch, Lightning and transformers takes seconds, so nothing here does until a subcommand has been read.
"""

from __future__ import annotations

import gc
import sys

# The subcommands of LightningCLI, said in this project's terms; a test holds the two lists together.
SUBCOMMANDS = {
    "fit": "train a model, with validation in between, and write checkpoints",
    "validate": "loss of a checkpoint on the validation text",
    "test": "loss of a checkpoint on the test text",
    "predict": "most likely next token at every position of the test text, as a file",
}
# What is no matter of training: see `commands`.
FOLDER_COMMANDS = {
    "export": "a checkpoint's weights as a folder for others: released layout or Hugging Face",
    "import": "check a folder of weights, and write a configuration that fine-tunes it",
    "inspect": "parameters, operations and memory of a configuration, in seconds",
    "ablate": "a study: a base and variants of it over several seeds, with a table and error bars",
    "compare": "the same table from runs that are there already",
}

_LISTED = "\n".join(f"  {name:<10}{does}" for name, does in (SUBCOMMANDS | FOLDER_COMMANDS).items())

HELP = f"""\
usage: dsv41 SUBCOMMAND [options]

Train and evaluate DeepSeek-V4.1 models.

subcommands:
{_LISTED}

start here, a small model on text that is already on the machine:
  dsv41 fit --config configs/tiny.yaml

then:
  dsv41 fit --config configs/tiny.yaml --ckpt_path last      go on from the newest checkpoint
  dsv41 validate --ckpt_path runs/tiny/version_0/checkpoints/best.ckpt
  dsv41 fit --config configs/tiny.yaml --config configs/overlays/no_engram.yaml
                                                             without a part of the architecture
  dsv41 export --ckpt_path runs/tiny/version_0/checkpoints/best.ckpt --output tiny-released
                                                             weights for others, or for:
  dsv41 fit --config configs/tiny.yaml --model.pretrained tiny-released
  dsv41 inspect --config configs/tiny.yaml --world-size 8 --memory-per-rank 80GB
                                                             what it costs, and whether it fits
  dsv41 ablate --config configs/ablations/engram.yaml        does a part help, and how sure is that?
  dsv41 compare runs/tiny runs/tiny-no-engram
  dsv41 fit --config configs/tiny.yaml --print_config        every option with its value
  dsv41 fit --help                                           common options; --help all explains every one

Any option of a file can be given on the command line too, such as --trainer.max_steps 2000. Configurations are in the
clone's folder configs/, parts to switch off in configs/overlays/, several processes and GPUs in configs/strategy/,
studies in configs/ablations/.

options:
  -h, --help    show this
  --version     show the versions of this project and of what it runs on
"""


def main(args: list[str] | None = None) -> None:
    """Console script.

    Args:
        args: What was typed after the command; None takes ``sys.argv``.

    Raises:
        SystemExit: With status 2, after a message on stderr, if no known subcommand was typed; with 130 after Ctrl-C;
            else see `cli.main`.
    """
    try:
        _main(sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:  # most likely in the imports; training has a handler for it
        print("dsv41: interrupted", file=sys.stderr)
        sys.exit(130)


def _main(args: list[str]) -> None:
    first = args[0] if args else ""
    if first in ("-h", "--help"):
        print(HELP, end="")
    elif first == "--version":
        print(_versions())
    elif first in SUBCOMMANDS:
        _run(args)
    elif first in FOLDER_COMMANDS:
        from lightning_modules import commands

        commands.main(first, args[1:])
    else:
        print(_unknown(first) if first else HELP, end="", file=sys.stderr)
        sys.exit(2)


def _run(args: list[str]) -> None:
    from lightning_modules.options import help_screen

    words = help_screen.without_first_screen(args)
    if words is None:
        return
    help_screen.announce(words[0])
    # What imports allocate stays. Looking through it for garbage again and again takes a seventh of the start.
    gc.disable()
    from lightning_modules import cli

    gc.freeze()
    gc.enable()
    cli.main(words)


def _unknown(word: str) -> str:
    from difflib import get_close_matches

    known = [*SUBCOMMANDS, *FOLDER_COMMANDS]
    near = get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
    wrong = f"there is no subcommand {word!r}; {hint}"
    if word.startswith("-"):
        wrong = f"the subcommand comes before its options, such as: dsv41 fit {word}"
    return f"dsv41: error: {wrong}\nhow to start: dsv41 --help\n"


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    try:
        own = version("dsv41-lightning")
    except PackageNotFoundError:
        own = "(not installed)"
    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers"))
    return f"dsv41-lightning {own}, {others}, Python {python_version()}"


if __name__ == "__main__":
    main()
