"""Malformed configurations, folders and checkpoints: each has to work or to end with one line that names what is wrong.

    python tests/fuzz.py --count 500 --seed 1

One process imports everything and forks for each input, so an input costs no imports. Inputs follow from the seed and
their number alone: ``--only 37`` runs one of them again and shows what it printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# ruff: noqa: E402 - as a script, this file's folder would come first, and tests/lightning_modules stands in it
sys.path[0] = str(Path(__file__).parents[1])

import torch
import yaml

from lightning_modules import __main__ as entry
from lightning_modules import commands
from lightning_modules.cli import main as run_cli
from lightning_modules.inspecting import Parsed
from lightning_modules.options.messages import option_names
from lightning_modules.transfer import export, import_weights

assert run_cli
assert commands
assert export
assert import_weights

MEMORY = 24 * 2**30  # bytes of address space: an input that wants more fails instead of taking the machine down
SECONDS = 60

STRANGE: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"), 2**31, 2**63, 10**40),
    *(None, True, False, "", "x", "null", "1e3", "3", "\u0000", "é" * 300),
    *([], [None], [[1]], [3], ["x"], {}, {"a": 1}, {"class_path": "os.system"}, {"class_path": 3}, {"init_args": []}),
)


@dataclass(frozen=True)
class Prepared:
    """What inputs are made from.

    Attributes:
        folder: Of everything.
        config: The smallest configuration, as plain values.
        options: Dotted names of all options of fit.
        single: A checkpoint that is a file.
        sharded: A checkpoint that is a folder.
        exported: A folder of weights.
    """

    folder: Path
    config: dict[str, Any]
    options: tuple[str, ...]
    single: Path
    sharded: Path
    exported: Path


@dataclass(frozen=True)
class Result:
    """How an input ended.

    Attributes:
        kind: Of the input.
        args: Of the command.
        fault: What is wrong about it; empty if nothing is.
        output: What was printed.
    """

    kind: str
    args: tuple[str, ...]
    fault: str
    output: str


# ---------------------------------------------------------------- one process per input


def forked(work: Callable[[], None], output: Path, seconds: float) -> int | None:
    """Exit status of `work` in a fork, which prints into a file; None after so many seconds, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            work()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1 if error.code else 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def fault_of(status: int | None, output: str, names: tuple[str, ...]) -> str:
    """What is wrong about the way an input has ended; `names` are those that its line may name."""
    if status is None:
        return "hangs"
    if status < 0 or status not in (0, 1, 2):
        return f"ends with status {status}"
    if "Traceback (most recent call last)" in output:
        return "prints a traceback"
    if status == 0:
        return ""
    lines = [line for line in output.splitlines() if line.startswith("dsv41: error")]
    if len(lines) != 1:
        return f"has {len(lines)} lines with an error"
    if "DSV41_TRACEBACK" in lines[0]:
        return "is an error of a kind that was not foreseen"
    return "" if any(name in lines[0] for name in names) else "does not say where"


# ---------------------------------------------------------------- what inputs are made from


def prepare(folder: Path, config: dict[str, Any]) -> Prepared:
    """Train the smallest run twice, into a file and into a folder, and export it."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(60)]
    (folder / "text").mkdir()
    for index in range(12):
        (folder / "text" / f"{index}.txt").write_text(" ".join(rng.choices(words, k=150)))
    settings = json.loads(json.dumps(config))
    settings["data"] |= {"source": str(folder / "text"), "cache_dir": str(folder / "cache")}
    settings["trainer"] |= {"max_steps": 2, "limit_val_batches": 1, "val_check_interval": 1}
    settings["trainer"]["logger"]["init_args"]["save_dir"] = "runs"
    settings["checkpoint"] = {"every_n_steps": 2}
    (folder / "base.yaml").write_text(yaml.safe_dump(settings))
    base = ["fit", "--config", str(folder / "base.yaml")]
    single, sharded = (folder / name / "runs/nano/version_0/checkpoints/step-00000002.ckpt" for name in ("one", "many"))
    commands_run = [
        ("one", base),
        ("many", [*base, "--trainer.strategy", "engram_fsdp"]),
        ("one", ["export", "--ckpt_path", str(single), "--output", str(folder / "exported")]),
    ]
    for name, args in commands_run:
        (folder / name).mkdir(exist_ok=True)
        status = forked(lambda name=name, args=args: command(folder / name, args), folder / "output", 120)  # type: ignore[misc]
        if status != 0:
            raise RuntimeError(f"{args}: {(folder / 'output').read_text(errors='replace')}")
    parser = Parsed(base[1:]).parser
    options = tuple(name for name in option_names(parser) if name not in ("help", "config", "print_config"))
    return Prepared(folder, settings, options, single, sharded, folder / "exported")


def command(directory: Path, args: list[str]) -> None:
    """Run ``dsv41 ARGS`` in a directory."""
    os.chdir(directory)
    entry.main(args)


# ---------------------------------------------------------------- inputs


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """A file cut, with a bit flipped, a byte replaced, a piece doubled, or nothing left of it."""
    way = rng.randrange(6)
    if way == 0 or not content:
        return b""
    place = rng.randrange(len(content))
    if way == 1:
        return content[:place]
    if way == 2:
        return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
    if way == 3:
        return content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
    if way == 4:
        return content[:place] + content[place : place + 40] + content[place:]
    return rng.randbytes(min(len(content), 4096))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to every value inside nested dictionaries and lists."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries)[:60]:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed_value(rng: random.Random, value: Any) -> Any:
    """Nested plain values in which one is replaced, removed or renamed; the original may be changed."""
    found = list(places(value))
    if not found:
        return rng.choice(STRANGE)
    *way, key = rng.choice(found)
    holder = value
    for step in way:
        holder = holder[step]
    what = rng.randrange(4)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict) and isinstance(key, str):
        holder[key + rng.choice(("x", "_", " ", "."))] = holder.pop(key)
    else:
        holder[key] = rng.choice(STRANGE)
    return value


Input = tuple[list[str], tuple[str, ...]]


def config_input(rng: random.Random, prepared: Prepared, directory: Path) -> Input:
    """A value of an option, the structure of a file, or its text."""
    base = ["fit", "--config", str(prepared.folder / "base.yaml")]
    overlay = directory / "overlay.yaml"
    names = (*(name.rpartition(".")[2] for name in prepared.options), *prepared.config, "overlay.yaml")
    way = rng.randrange(4)
    if way == 0:
        option = rng.choice(prepared.options)
        value = rng.choice(STRANGE)
        return [*base, f"--{option}={value if isinstance(value, str) else json.dumps(value)}"], names
    if way == 1:
        values: Any = rng.choice(STRANGE)
        for name in reversed(rng.choice(prepared.options).split(".")):
            values = {name: values}
        overlay.write_text(yaml.safe_dump(values))
    elif way == 2:
        overlay.write_text(yaml.safe_dump(changed_value(rng, json.loads(json.dumps(prepared.config)))))
    else:
        text = (prepared.folder / "base.yaml").read_bytes()
        overlay.write_bytes(changed_bytes(rng, text))
    return [*base, "--config", str(overlay)], names


def folder_input(rng: random.Random, prepared: Prepared, directory: Path) -> Input:
    """A folder of weights with one file changed, trained from or imported."""
    folder = directory / "weights"
    shutil.copytree(prepared.exported, folder)
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    change_file(rng, path)
    if rng.random() < 0.3:
        (folder / "complete.json").unlink(missing_ok=True)  # nothing is checked before it is read
    names = (str(folder), folder.name, path.name, "model.pretrained", "model.config", "tokenizer")
    if rng.random() < 0.3:
        return ["import", "--from", str(folder), "--output", str(directory / "finetune.yaml")], names
    base = ["fit", "--config", str(prepared.folder / "base.yaml"), "--model.pretrained", str(folder)]
    return [*base, "--trainer.max_steps=1"], names


def change_file(rng: random.Random, path: Path) -> None:
    """Change a file's bytes or, if it is JSON, its values."""
    if path.suffix == ".json" and rng.random() < 0.7:
        path.write_text(json.dumps(changed_value(rng, json.loads(path.read_text()))))
    else:
        path.write_bytes(changed_bytes(rng, path.read_bytes()))


def checkpoint_input(rng: random.Random, prepared: Prepared, directory: Path) -> Input:
    """A checkpoint with bytes or values changed, resumed from or validated."""
    many = rng.random() < 0.5
    folder = directory / "run" / "checkpoints"
    folder.mkdir(parents=True)
    source = prepared.sharded if many else prepared.single
    shutil.copy(source.parents[1] / "config.yaml", folder.parent)
    path = folder / source.name
    if many:
        shutil.copytree(source, path)
        inner = rng.choice(sorted(one for one in path.iterdir() if one.is_file()))
        if inner.suffix == ".pt" and rng.random() < 0.7:
            change_pickled(rng, inner)
            (path / "complete.json").write_text(without_checksums((path / "complete.json").read_text()))
        else:
            change_file(rng, inner)
    else:
        shutil.copy(source, path)
        inner = path
        if rng.random() < 0.7:
            change_pickled(rng, path)
        else:
            path.write_bytes(changed_bytes(rng, path.read_bytes()))
    names = ("ckpt_path", str(path), path.name, inner.name)
    options = ["--trainer.strategy=engram_fsdp"] if many and rng.random() < 0.7 else []
    if rng.random() < 0.3:
        return ["validate", "--ckpt_path", str(path), *options], names
    base = ["fit", "--config", str(prepared.folder / "base.yaml"), "--trainer.max_steps=3"]
    return [*base, "--ckpt_path", str(path), *options], names


def without_checksums(text: str) -> str:
    """The marker of a folder whose files may be any."""
    marker = json.loads(text)
    return json.dumps({key: {} if key in ("checksums", "sha256", "files") else value for key, value in marker.items()})


def change_pickled(rng: random.Random, path: Path) -> None:
    """Change a value of a checkpoint, one level to four deep; its checksums are right."""
    content = torch.load(path, weights_only=True)
    holder, key = content, rng.choice(list(content))
    for _ in range(rng.randrange(4)):
        inner = holder[key]
        if isinstance(inner, dict) and inner:
            holder, key = inner, rng.choice(list(inner))
        elif isinstance(inner, list) and inner:
            holder, key = inner, rng.randrange(len(inner))
    if rng.random() < 0.3:
        del holder[key]
    elif isinstance(holder[key], torch.Tensor):
        holder[key] = rng.choice((torch.zeros(3), holder[key].double(), holder[key][..., None], torch.tensor([])))
    else:
        holder[key] = rng.choice(STRANGE)
    torch.save(content, path)


KINDS: dict[str, Callable[[random.Random, Prepared, Path], Input]] = {
    "configuration": config_input,
    "folder": folder_input,
    "checkpoint": checkpoint_input,
}


def run_input(prepared: Prepared, seed: int, number: int) -> Result:
    """Make an input and run it."""
    rng = random.Random(f"{seed}/{number}")
    kind = list(KINDS)[number % len(KINDS)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        args, names = KINDS[kind](rng, prepared, directory)
        status = forked(lambda: command(directory, args), directory / "output", SECONDS)
        output = (directory / "output").read_text(errors="replace")
    return Result(kind, tuple(args), fault_of(status, output, names), output)


def main() -> None:
    """Command line of the fuzzer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="inputs (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs (default 0)")
    parser.add_argument("--only", type=int, nargs="+", help="run these numbers alone, and show their output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        prepared = prepare(Path(name), smallest())
        begin = time.monotonic()
        for number in options.only or range(options.count):
            result = run_input(prepared, options.seed, number)
            faults += bool(result.fault)
            if result.fault or options.only:
                print(f"{number}: {result.kind}: {result.fault or 'well'}: dsv41 {' '.join(result.args)}")
                lines = result.output.strip().splitlines()
                print("\n".join(f"    {line[:300]}" for line in (lines if options.only else lines[-3:])), flush=True)
    print(f"{len(options.only or range(options.count))} inputs, {faults} faults, {time.monotonic() - begin:.0f} s")
    sys.exit(bool(faults))


def smallest() -> dict[str, Any]:
    """The configuration of the smallest run, as in conftest.py, which a script cannot import."""
    found = re.search(r"^NANO = (\{.*?^\})", (Path(__file__).parent / "conftest.py").read_text(), re.M | re.S)
    assert found is not None
    text = re.sub(r"#.*", "", found[1])
    value: dict[str, Any] = yaml.safe_load(
        text.replace("None", "null").replace("False", "false").replace("True", "true")
    )
    return value


if __name__ == "__main__":
    main()
