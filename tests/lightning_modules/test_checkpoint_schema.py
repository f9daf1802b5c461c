"""A checkpoint that was edited and saved again is refused by file and key, for what it is opened for and no more."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41.files import begin_folder, publish_folder
from lightning_modules.checkpoint import rule as checkpoint_rule
from lightning_modules.checkpoint.schema import VERSION, require_training, require_version, require_weights
from lightning_modules.checkpoint.sharded import checksums_of_rank, split_tensors, write_meta, write_tensors
from lightning_modules.cli import get_cli, main
from lightning_modules.optim.state import named_state
from lightning_modules.task import DeepseekV41Task
from lightning_modules.transfer.export import open_checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*assuming the intent is to (save|load) in a single process:UserWarning"
)

Content = dict[str, Any]
FILE = Path("a.ckpt")


class Nonsense:
    """A value that no checkpoint has; it is written out in the names of tests."""

    def __repr__(self) -> str:
        return "nonsense"


NONSENSE = Nonsense()


@pytest.fixture(scope="module")
def made(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Content]:
    """The objects of a finished run, and what the checkpoint of its third step holds."""
    folder = tmp_path_factory.mktemp("made")
    args = [*make_nano_args(folder), "--checkpoint.keep", "-1"]
    cli = get_cli(args, run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    (path,) = folder.glob("runs/nano/version_0/checkpoints/step-00000003.ckpt")
    return cli, torch.load(path, weights_only=True)


@pytest.fixture
def content(made: tuple[Any, Content]) -> Content:
    return copy.deepcopy(made[1])


@pytest.fixture
def resumes(made: tuple[Any, Content]) -> Callable[[Content], None]:
    """Check a checkpoint as a resumed training does."""
    cli = made[0]

    def check(checkpoint: Content) -> None:
        require_version(FILE, checkpoint)
        require_weights(FILE, checkpoint, checkpoint_rule.KEY, with_tensors=True)
        loops, groups = cli.trainer.fit_loop.state_dict(), cli.trainer.optimizers[0].param_groups
        require_training(FILE, checkpoint, loops, groups, "TextDataModule", complete=True)

    return check


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in nested dictionaries and lists."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


# What is compared with the command line, restored by a callback's own code, or read by nobody.
FREE = (
    r"state_dict\.[^.]+$|dsv41\.(text_config\.|token_map|metrics\.|validated_at)|hyper_parameters\.|hparams_name|callbacks\..*\}\.|"
    r"callbacks\.[A-Za-z]+\.|TextDataModule\.|loops\.(validate|test|predict)_loop|loops\.fit_loop\.state_dict\.|"
    r"optimizer_states\.0\.param_groups\.\d+\.(params\.|foreach|betas\.)|lr_schedulers\.0\.(_get|_is|_step|_initial|verbose|lr_lambdas\.)"
)


def changed(content: Content, path: tuple[Any, ...], value: Any) -> Content:
    """A checkpoint with another value at one place, or with none."""
    parents: list[Any] = [dict(content)]
    for key in path[:-1]:
        child = copy.copy(parents[-1][key])
        parents[-1][key] = child
        parents.append(child)
    if value is NONSENSE:
        del parents[-1][path[-1]]
    else:
        parents[-1][path[-1]] = value
    return parents[0]


def spoiled(content: Content, path: tuple[Any, ...]) -> Iterator[Any]:
    """Values for one place that no checkpoint can have there; NONSENSE is none."""
    name, original = ".".join(map(str, path)), content
    for key in path:
        original = original[key]
    # Names of tensors, architectures and rules are compared with those of the run; others may be left out.
    compared = (path[0] == "state_dict" and len(path) == 2) or name.endswith(".rule")
    optional = ("dsv41", "hyper_parameters", "TextDataModule", "dsv41.metrics")
    if not (compared or name in optional or isinstance(path[-1], int) or (path[0] == "callbacks" and len(path) == 2)):
        yield NONSENSE
    if original is None or (isinstance(original, bool) and "param_groups" in path):
        return
    yield None
    if not isinstance(original, str) or path[0] == VERSION:
        yield "abc"
    if not (isinstance(original, float) or ("param_groups" in path and isinstance(original, int))):
        yield -1.5  # where there is no number, or a count
    for empty in ({}, []):
        # Empty dictionaries are right where keys are compared with the run's, or none is needed.
        if not isinstance(original, type(empty)) or not (
            len(original) == 0
            or path[0] in ("callbacks", "state_dict", "hyper_parameters", "TextDataModule")
            or name in ("dsv41.metrics", "dsv41.text_config", "lr_schedulers.0.lr_lambdas")
            or name.endswith("state_dict")
        ):
            yield empty


def test_every_key_of_every_level_is_missed_and_has_its_type(
    content: Content, resumes: Callable[[Content], None]
) -> None:
    resumes(content)
    tried, passed = 0, []
    for path in places(content):
        name = ".".join(map(str, path))
        moments = path[0] == "optimizer_states" and "state" in path and path[-1] not in ("state", 0)
        if moments or re.match(FREE, name):
            continue
        for value in spoiled(content, path):
            try:
                resumes(changed(content, path, value))
                said = "nothing"
            except ValueError as error:
                said = str(error)
            if not said.startswith(f"ckpt_path: a.ckpt: {path[0]}") or "\n" in said:
                passed.append((name, value, said))
            tried += 1
    assert not passed
    assert tried > 300


def test_an_optimizer_that_forgot_is_refused(content: Content, resumes: Callable[[Content], None]) -> None:
    optimizer = content["optimizer_states"][0]
    for value in ({}, {0: {}}, {0: 3}, {10**6: {}}):
        with pytest.raises(ValueError, match=r"^ckpt_path: a\.ckpt: optimizer_states\.0\.state"):
            resumes(content | {"optimizer_states": [optimizer | {"state": value}]})
    for number, entry in optimizer["state"].items():
        for name in entry:
            if name == "step" and len(entry) == 4:
                continue
            short = {key: value for key, value in entry.items() if key != name}
            with pytest.raises(ValueError, match=rf"optimizer_states\.0\.state\.{number}\.{name} is missing"):
                resumes(content | {"optimizer_states": [optimizer | {"state": optimizer["state"] | {number: short}}]})


def test_a_run_without_a_step_has_nothing_to_remember(content: Content, resumes: Callable[[Content], None]) -> None:
    optimizer = content["optimizer_states"][0] | {"state": {}}
    resumes(content | {"optimizer_states": [optimizer], "global_step": 0})


def test_an_optimizer_without_state_is_no_optimizer_that_forgot(made: tuple[Any, Content], content: Content) -> None:
    plain_sgd = {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    loops = made[0].trainer.fit_loop.state_dict()
    require_training(FILE, content | {"optimizer_states": [plain_sgd]}, loops, None, None, complete=True)


def test_a_task_with_optimizers_of_its_own_may_have_other_ones(made: tuple[Any, Content], content: Content) -> None:
    loops = made[0].trainer.fit_loop.state_dict()
    state = {"state": {}, "param_groups": [{"params": [], "lr": 0.1}]}
    content |= {"optimizer_states": [state, state], "lr_schedulers": []}
    require_training(FILE, content, loops, None, None, complete=True)
    for name, value in (("optimizer_states", {}), ("optimizer_states", [3]), ("lr_schedulers", {})):
        with pytest.raises(ValueError, match=f"a.ckpt: {name}"):
            require_training(FILE, content | {name: value}, loops, None, None, complete=True)


# ---------------------------------------------------------------- through the trainer

LISTED: dict[str, dict[str, Any]] = {
    "loops null": {"loops": None},
    "no loops": {"loops": {}},
    "optimizer_states {}": {"optimizer_states": {}},
    "optimizer_states []": {"optimizer_states": []},
    "no optimizer_states": {"optimizer_states": NONSENSE},
    "lr_schedulers {}": {"lr_schedulers": {}},
    "lr_schedulers []": {"lr_schedulers": []},
    "lr_schedulers a number": {"lr_schedulers": 3},
    "no lr_schedulers": {"lr_schedulers": NONSENSE},
}


def as_folder(task: DeepseekV41Task, optimizer: Any, content: Content, changes: Content, path: Path) -> Path:
    """What one rank of the strategy writes, with checksums of what was changed."""
    named = dict(optimizer.state_dict())
    names = named_state(task, optimizer)["param_groups"]
    labels = {
        number: name
        for group, its in zip(named["param_groups"], names, strict=True)
        for number, name in zip(group["params"], its["params"], strict=True)
    }
    stored = content["optimizer_states"][0]
    groups = [group | {"params": [labels[n] for n in group["params"]]} for group in stored["param_groups"]]
    by_name = {"state": {labels[n]: entry for n, entry in stored["state"].items()}, "param_groups": groups}
    tensors, meta = split_tensors(content | {"optimizer_states": [by_name]})
    meta = {key: value for key, value in (meta | changes).items() if value is not NONSENSE}
    partial = begin_folder(path)
    write_tensors(partial, tensors)
    write_meta(partial, meta)
    publish_folder(partial, path, {"global_step": 3}, checksums_of_rank(partial, 0))
    return path


@pytest.fixture
def save(made: tuple[Any, Content], content: Content, tmp_path: Path) -> Callable[[str, Content], Path]:
    """Write the checkpoint with changes, as a file or a folder."""

    def write(kind: str, changes: Content) -> Path:
        cli = made[0]
        content["callbacks"] = {}  # those of another folder, about which Lightning warns
        if kind == "folder":
            return as_folder(cli.model, cli.trainer.optimizers[0], content, changes, tmp_path / "edited.ckpt")
        path = tmp_path / "edited.ckpt"
        torch.save({key: value for key, value in (content | changes).items() if value is not NONSENSE}, path)
        return path

    return write


@pytest.fixture(scope="module")
def victim(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run whose every resumption is refused."""
    return get_cli(make_nano_args(tmp_path_factory.mktemp("victim")), run=False)


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("changes", LISTED.values(), ids=LISTED.keys())
def test_training_refuses_what_evaluation_and_export_do_not_read(
    kind: str, changes: Content, save: Callable[[str, Content], Path], victim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(kind, changes)
    file = path / "meta.pt" if kind == "folder" else path
    key = next(iter(changes))
    with pytest.raises(ValueError, match=rf"^ckpt_path: {re.escape(str(file))}: {key}[^\n]*$"):
        victim.trainer.fit(victim.model, victim.datamodule, ckpt_path=str(path))
    assert victim.trainer.global_step == 0
    # As the command line's validate has it.
    monkeypatch.setattr(victim.trainer.strategy.checkpoint_io, "optimizers", False)
    victim.trainer.validate(victim.model, victim.datamodule, ckpt_path=str(path), verbose=False)
    assert open_checkpoint(path).tensors


def test_the_command_line_says_it_in_one_line(
    save: Callable[[str, Content], Path], nano_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = save("file", {"loops": None})
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, "--ckpt_path", str(path)])
    expected = f"dsv41: error: ckpt_path: {path}: loops must be a dictionary, got None"
    assert capsys.readouterr().err.splitlines()[-1] == expected


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_unedited_checkpoint_resumes(
    kind: str, save: Callable[[str, Content], Path], nano_args: list[str], made: tuple[Any, Content]
) -> None:
    """Also as a folder made by the test, so that the refusals above are for what was edited."""
    cli = get_cli(nano_args, run=False)
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=str(save(kind, {})))
    assert cli.trainer.global_step == 4
    expected = made[0].model.state_dict()
    for name, tensor in cli.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize(
    "changes",
    [
        {VERSION: NONSENSE},
        {VERSION: 2},
        {VERSION: "1.0.0"},
        {VERSION: "two"},
        {"callbacks": 5},
        {"hyper_parameters": 5},
    ],
    ids=str,
)
def test_evaluation_refuses_what_it_needs(
    kind: str, changes: Content, save: Callable[[str, Content], Path], victim: Any
) -> None:
    path = save(kind, changes)
    file = path / "meta.pt" if kind == "folder" else path
    with pytest.raises(ValueError, match=f"^ckpt_path: {re.escape(str(file))}: {next(iter(changes))} "):
        victim.trainer.validate(victim.model, victim.datamodule, ckpt_path=str(path))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"state_dict": NONSENSE}, "state_dict"),
        ({"state_dict": {"model.model.norm.weight": 3}}, "state_dict.model.model.norm.weight"),
        ({"hyper_parameters": [1]}, "hyper_parameters"),
        ({"dsv41": {"text_config": 3}}, "dsv41.text_config"),
        ({"dsv41": {"text_config": {}, "tokens_seen": 1, "metrics": {"val/loss": "a"}}}, "dsv41.metrics.val/loss"),
    ],
    ids=["no state_dict", "no tensor", "hyper_parameters", "text_config", "metrics"],
)
def test_export_refuses_what_it_needs(changes: Content, key: str, save: Callable[[str, Content], Path]) -> None:
    path = save("file", changes)
    with pytest.raises(ValueError, match=f"^ckpt_path: {re.escape(str(path))}: {re.escape(key)} "):
        open_checkpoint(path)
