"""Tests on several ranks, forked from a process that has imported everything.

    @ranks(2, 3)
    def test_gradients(mesh: DeviceMesh, tmp_path: Path) -> None:
        ...

is two tests, whose body runs on 2 and on 3 processes at once. It may take ``mesh`` (one-dimensional, over all ranks),
``rank`` and ``world_size`` beside fixtures and parametrized values, which are pickled: paths, names, tensors, functions
of the test's module. All ranks get the same ``tmp_path``. The test fails with the traceback of the rank that failed
first, or, after `timeout` seconds, with the place where each rank stands; no rank is left.

`run` does the same inside a test and returns a value per rank; `fork` returns how each rank ended, for tests of what
happens when one dies.

Importing PyTorch and Lightning takes 5 CPU-seconds, a forked rank 0.1. So Python's fork server, one per pytest worker,
imports once and never computes (a fork may not follow on autograd's threads or those of OpenMP). A rank imports the
test's file by its path and has a gloo group that finds itself through a file, variables as of torchrun, one thread, and
the test's filters of warnings.
"""

from __future__ import annotations

import ast
import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts
from torch.distributed.device_mesh import init_device_mesh

# Beside what this file imports: everything that takes a rank long to import.
PRELOADED = (
    "ranks",
    "lightning_modules.cli",
    "lightning_modules.strategy",
    "lightning_modules.callbacks",
    "tensorboard.backend.event_processing.event_accumulator",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
)
INJECTED = {"mesh", "rank", "world_size"}
TIMEOUT = 120.0  # seconds
COLLECTIVES = timedelta(seconds=60)


@dataclass(frozen=True)
class Outcome:
    """The end of a rank.

    Attributes:
        exit_code: 0, 1 after an exception, or the negative number of a signal.
        value: Returned by the function.
        error: Traceback of an exception, "" if there was none.
        time: Of the end, in seconds of the monotonic clock; infinite for a rank that was killed.
        output: Written to stdout and stderr.
    """

    exit_code: int
    value: Any
    error: str
    time: float
    output: str


def ranks(*numbers: int, timeout: float = TIMEOUT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test that runs on each of these numbers of ranks (see the module's docstring)."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(check)

        @functools.wraps(check)
        def test(world_size: int, **arguments: Any) -> None:
            run(check, world_size, timeout=timeout, **arguments)

        kept = [parameter for name, parameter in signature.parameters.items() if name not in INJECTED]
        world_size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*kept, world_size])  # type: ignore[attr-defined]
        test.on_ranks = check  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", numbers, ids=[f"{number} ranks" for number in numbers])(test)

    return decorate


def run(
    function: Callable[..., Any], world_size: int | None, *, timeout: float = TIMEOUT, **arguments: Any
) -> list[Any]:
    """Call a function of a test's file on every rank; the values that they return, by rank.

    Args:
        function: Of a module's top level, found there by its name.
        world_size: Number of ranks; None is one process without a process group.
        timeout: In seconds.
        arguments: Of the function, pickled; `mesh`, `rank` and `world_size` are added if it takes them.

    Raises:
        pytest.fail.Exception: A rank has failed, or not all have ended in time.
    """
    __tracebackhide__ = True
    outcomes = fork(function, world_size, timeout=timeout, until_failure=True, **arguments)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.exit_code != 0]
    if failed:
        # One that was ended by a signal, and not by this process, has written no time.
        first = min(failed, key=lambda rank: outcomes[rank].time)
        end = outcomes[first]
        cause = end.error or f"ended with exit code {end.exit_code}"
        pytest.fail(f"rank {first} of {len(outcomes)}: {cause}\n{end.output[-6000:]}", pytrace=False)
    return [outcome.value for outcome in outcomes]


def fork(
    function: Callable[..., Any],
    world_size: int | None,
    *,
    timeout: float = TIMEOUT,
    until_failure: bool = False,
    **arguments: Any,
) -> list[Outcome]:
    """Call a function on every rank as `run` does, and return how each rank ended.

    Args:
        until_failure: Kill the other ranks when one has failed.
    """
    __tracebackhide__ = True
    context = _server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        job = Job(
            folder,
            Path(inspect.getfile(function)),
            function.__module__,
            function.__qualname__,
            world_size,
            timeout,
            dict(os.environ),
            list(warnings.filters),
        )
        processes = [context.Process(target=_rank, args=(job, rank)) for rank in range(world_size or 1)]
        end = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            while running := [process for process in processes if process.exitcode is None]:
                if not wait([process.sentinel for process in running], end - time.monotonic()):
                    outputs = [(folder / f"{rank}.log").read_text() for rank in range(len(processes))]
                    told = "\n".join(f"rank {rank}:\n{output[-4000:]}" for rank, output in enumerate(outputs))
                    pytest.fail(f"still running after {timeout:.0f} s: {len(running)} ranks\n{told}", pytrace=False)
                if until_failure and any(process.exitcode for process in processes):
                    break
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [_outcome(folder, rank, code) for rank, code in enumerate(codes)]


def _outcome(folder: Path, rank: int, code: int | None) -> Outcome:
    """Of a rank that has ended with `code`, or, if it is None, was killed because another had failed."""
    log, file = folder / f"{rank}.log", folder / f"{rank}.result"
    output = log.read_text(errors="replace") if log.exists() else ""
    value, error, at = pickle.loads(file.read_bytes()) if file.exists() else (None, "", 0.0)
    if code is None:
        return Outcome(-9, value, error, at or float("inf"), output)
    return Outcome(code, value, error, at, output)


# ---------------------------------------------------------------------- the server and its children


@functools.cache
def _server() -> ForkServerContext:
    """Python's fork server, to be started with this process's path and one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context


@dataclass(frozen=True)
class Job:
    """A function to call: its file, module and name there, the rest as the test has it."""

    folder: Path
    file: Path
    module: str
    name: str
    world_size: int | None
    timeout: float
    environment: dict[str, str]
    filters: list[Any]


def _rank(job: Job, rank: int) -> None:
    """Body of a forked process: call the function, and write value or traceback."""
    log = os.open(job.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.dump_traceback_later(0.95 * job.timeout)
    value, error = None, ""
    try:
        value = _call(job, rank)
    except BaseException as caught:
        caught.__traceback__ = caught.__traceback__ and caught.__traceback__.tb_next  # without this function
        error = "".join(traceback.format_exception(caught))
    at = time.monotonic()
    partial = job.folder / f"{rank}.partial"
    partial.write_bytes(pickle.dumps((value, error, at)))
    partial.rename(job.folder / f"{rank}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error else 0)


def _call(job: Job, rank: int) -> Any:
    os.environ.clear()
    os.environ.update(job.environment)
    torch.set_num_threads(1)
    # As pytest has it for the test.
    warnings.resetwarnings()
    warnings.filters.extend(job.filters)  # type: ignore[attr-defined]
    found = attrgetter(job.name)(_import(job.file, job.module))
    function = getattr(found, "on_ranks", found)
    arguments = pickle.loads((job.folder / "arguments").read_bytes())
    if job.world_size is None:
        return function(**arguments)
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": job.world_size, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "forked"}
    launch = local | {"RANK": rank, "WORLD_SIZE": job.world_size}
    os.environ.update({name: str(setting) for name, setting in launch.items()})
    store = dist.FileStore(str(job.folder / "store"), job.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=COLLECTIVES)
    wanted = inspect.signature(function).parameters
    if "rank" in wanted:
        arguments["rank"] = rank
    if "world_size" in wanted:
        arguments["world_size"] = job.world_size
    if "mesh" in wanted:
        arguments["mesh"] = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("data_parallel",))
    value = function(**arguments)
    dist.barrier()  # no rank leaves before all are done
    return value


def _import(path: Path, name: str) -> ModuleType:
    """A test's file as the module that it is for pytest, with the values in messages of failed assertions."""
    if name in sys.modules:
        return sys.modules[name]
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    rewrite_asserts(tree, source, str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module
