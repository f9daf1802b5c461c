"""Help: a first screen of common options that exist, all options on demand, colour on terminals alone."""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys

import pytest

from lightning_modules import __main__ as entry
from lightning_modules import cli
from lightning_modules.options import help_screen

OPTION = re.compile(r"^  (--[\w.]+)", re.MULTILINE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def everything() -> str:
    """All options of fit."""
    stream = io.StringIO()
    before, sys.stdout = sys.stdout, stream
    try:
        with pytest.raises(SystemExit) as caught:
            entry.main(["fit", "--help", "all"])
    finally:
        sys.stdout = before
        gc.unfreeze()
    assert caught.value.code == 0
    return stream.getvalue()


@pytest.mark.parametrize("subcommand", entry.SUBCOMMANDS)
def test_the_first_screen_fits_a_screen(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry.main([subcommand, "--config", "configs/tiny.yaml", "--help"])
    out = capsys.readouterr().out
    assert out == help_screen.screen(subcommand)
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[-1] == f"every option explained: dsv41 {subcommand} --help all"
    assert "\x1b" not in out


def test_the_first_screen_has_options_that_exist(everything: str) -> None:
    known = {word for line in everything.splitlines() for word in re.findall(r"--[\w.]+", line)}
    listed = {option for subcommand in entry.SUBCOMMANDS for option in OPTION.findall(help_screen.screen(subcommand))}
    of_the_logger = {option for option in listed if option.startswith("--trainer.logger.init_args.")}
    assert listed - of_the_logger <= known
    assert len(listed) > 25
    parser = cli.get_cli(["--config", "configs/tiny.yaml"], run=False).parser
    parser.parse_args([word for option in of_the_logger for word in ("--config", "configs/tiny.yaml", option, "x")])


def test_all_options_come_after_a_short_usage(everything: str) -> None:
    usage, _, rest = everything.partition("\n\n")
    assert usage == "usage: dsv41 [options] fit [options]"
    assert rest.startswith("Runs the full optimization routine.\n")
    for option in ("--data.sequence_length", "--model.schedule.floor", "--engram_gates.batches"):
        assert option in rest


def test_a_short_usage_stays() -> None:
    assert help_screen.short_usage("usage: x [-h]\n\nabout") == "usage: x [-h]\n\nabout"


def test_words_other_than_help_go_to_the_parser() -> None:
    assert help_screen.without_first_screen(["fit", "--data.source", "help"]) == ["fit", "--data.source", "help"]
    words = ["test", "-h", "all", "--config", "a.yaml"]
    assert help_screen.without_first_screen(words) == ["test", "-h", "--config", "a.yaml"]


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    text = help_screen.screen("fit")
    terminal, file, refused = Terminal(), io.StringIO(), Terminal()
    help_screen.print_coloured(text, terminal)
    help_screen.print_coloured(text, file)
    monkeypatch.setenv("NO_COLOR", "1")
    help_screen.print_coloured(text, refused)
    assert file.getvalue() == refused.getvalue() == text
    assert "\x1b[36m--config\x1b[0m" in terminal.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()) == text


def test_the_start_is_announced_on_a_terminal_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for stream, rank, said in ((Terminal(), "0", True), (Terminal(), "1", False), (io.StringIO(), "0", False)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("LOCAL_RANK", rank)
        help_screen.announce("fit")
        assert (stream.getvalue() == "dsv41 fit: starting, imports take some seconds ...\n") == said
        assert said or not stream.getvalue()


def test_the_first_screen_imports_nothing_heavy() -> None:
    """One process, since this one has imported everything."""
    code = (
        "import sys; from lightning_modules.__main__ import main; main(['fit', '--help']); "
        "print(sorted({'torch', 'lightning', 'transformers', 'rich', 'jsonargparse'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.splitlines()[-1] == "[]"
