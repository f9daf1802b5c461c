"""Nothing that is read from a file builds an object or calls a function that the reader's types do not ask for.

A class whose construction leaves a mark is named in every option and field of every file that is read.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as L
import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser
from transformers import PreTrainedTokenizerFast

import lightning_modules.callbacks as own_callbacks
from dsv41 import DeepseekV41Config, DeepseekV41TextConfig
from dsv41.config import TEXT_FIELDS
from dsv41.weights.folder import read_tokenizer
from lightning_modules import __main__ as entry
from lightning_modules.ablation.study import read_study
from lightning_modules.cli import main
from lightning_modules.data.tokenization import load_tokenizer
from lightning_modules.inspecting import Parsed
from lightning_modules.options.parsed import require_options, require_parts
from lightning_modules.options.safe_yaml import load_plain
from lightning_modules.strategy import EngramFSDPStrategy
from lightning_modules.transfer.pretrained import default_options

MODULE = """
class Planted:
    def __init__(self, path: str = "") -> None:
        open(path, "w").close()
class Called(Planted):
    def __call__(self, *args, **kwargs): ...
def function(*args, **kwargs): ...
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the planted classes leave their mark; there is none when the test ends."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "planted_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()


def planted(mark: Path) -> list[dict[str, Any]]:
    """Values that would leave the mark, if anything built them."""
    return [
        {"class_path": "planted_code.Planted", "init_args": {"path": str(mark)}},
        {"class_path": "planted_code.Called", "init_args": {"path": str(mark)}},
        {"class_path": "os.system", "init_args": {"command": f"touch {mark}"}},
    ]


def test_the_planted_class_leaves_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    parser = LightningArgumentParser()
    import planted_code  # type: ignore[import-not-found]

    parser.add_argument("--x", type=planted_code.Planted)
    parser.instantiate_classes(parser.parse_object({"x": planted(tmp_path / "mark")[0]}))
    assert (tmp_path / "mark").exists()


def nested(option: str, value: Any) -> dict[str, Any]:
    for name in reversed(option.split(".")):
        value = {name: value}
    return value


@pytest.fixture(scope="module")
def parser(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Parsed(make_nano_args(tmp_path_factory.mktemp("parser"))).parser


def parsed(parser: Any, values: dict[str, Any]) -> Any:
    """What a parser makes of values; None if it, or the checks after it, refuse them."""
    try:
        config = parser.parse_object(values)
        require_options(parser, config)
    except (SystemExit, ValueError):
        return None
    return config


def option_names(parser: Any) -> list[str]:
    return sorted(action.dest for action in parser._actions if getattr(action, "_typehint", None) is not None)


def kinds_in(kind: Any) -> Iterator[Any]:
    yield kind
    for inner in get_args(kind):
        yield from kinds_in(inner)


def test_no_option_takes_any_value(parser: Any) -> None:
    checked = 0
    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        if kind is None:
            continue
        checked += 1
        for part in kinds_in(kind):
            assert part not in (Any, object, dict, list, Callable), action.dest
            assert "Unvalidated" not in repr(part), action.dest
            assert "Callable" not in repr(part), action.dest
    assert checked > 150
    assert {f"model.config.{name}" for name in TEXT_FIELDS} <= set(option_names(parser))


def test_a_class_named_in_any_option_is_refused(parser: Any, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        if kind is None:
            continue
        first, *others = planted(mark)
        # Every value in options of Lightning, which take classes; inside lists and groups where there are such.
        values: list[Any] = [first, *(others if action.dest.startswith("trainer.") else [])]
        if "list" in repr(kind) or "dict" in repr(kind):
            values += [[first], {"a": first}]
        for value in values:
            config = parsed(parser, nested(action.dest, value))
            assert config is None, f"{action.dest} took {value}"
            error = capsys.readouterr().err
            assert action.dest.split(".")[0] in error, error


PARTS = [
    *(getattr(L.callbacks, name) for name in L.callbacks.__all__),
    *(getattr(own_callbacks, name) for name in own_callbacks.__all__),
    *(getattr(L.profilers, name) for name in L.profilers.__all__),
    *(getattr(L.strategies, name) for name in L.strategies.__all__ if name.endswith("Strategy")),
    L.loggers.TensorBoardLogger,
    L.loggers.CSVLogger,
    EngramFSDPStrategy,
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # profilers that were not built whole
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_class_named_in_any_argument_of_lightnings_parts_is_not_built(part: type, mark: Path) -> None:
    kind = next(base for base in part.__mro__ if base.__module__.startswith("lightning") and base.__name__ in (
        "Callback", "Profiler", "Strategy", "Logger"
    ))  # fmt: skip
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=kind)
    values: list[Any] = [*planted(mark), "planted_code.function", "planted_code.Called"]
    names = [*inspect.signature(part).parameters, "extra"]
    for name in names:
        for value in values:
            for place in ("init_args", "dict_kwargs"):
                given = {"class_path": f"{part.__module__}.{part.__qualname__}", place: {name: value}}
                try:
                    config = parser.parse_object({"part": given})
                    require_parts(config)
                except Exception:  # refused, by whichever of the two
                    continue
                text = repr(config.part)
                if "planted_code" not in text and "os.system" not in text:
                    continue
                try:
                    parser.instantiate_classes(config)
                except Exception:  # built without arguments that it needs, or a text where another is expected
                    continue
                assert not mark.exists(), (part, name, value)


def test_functions_cannot_be_named(nano_args: list[str], mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("planted_code.function", planted(mark)[1], "os.system"):
        named = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"setup": value}}
        with pytest.raises(SystemExit):
            main(["fit", *nano_args, "--config", yaml.safe_dump({"trainer": {"callbacks": [named]}})])
        error = capsys.readouterr().err
        assert "trainer.callbacks" in error
        assert "a configuration names no functions" in error or "not allowed" in error


# ---------------------------------------------------------------- the four ways in, from end to end


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        entry.main(args)
    assert caught.value.code in (1, 2)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.fixture
def downloaded(tmp_path: Path, golden_dir: Path) -> Callable[..., Path]:
    """A folder of a stranger: the tiny configuration with changes, and a tokenizer."""

    def make(text: dict[str, Any] | None = None, **top: Any) -> Path:
        folder = tmp_path / "downloaded"
        folder.mkdir(exist_ok=True)
        raw = json.loads((golden_dir / "config.json").read_text())
        raw = raw | top | {"text_config": raw["text_config"] | (text or {})}
        (folder / "config.json").write_text(json.dumps(raw))
        (folder / "tokenizer.json").write_bytes((golden_dir / "tokenizer.json").read_bytes())
        return folder

    return make


def test_a_configuration_file_runs_nothing(
    nano_args: list[str], tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in planted(mark):
        (tmp_path / "stranger.yaml").write_text(yaml.safe_dump(nested("model.config.index_head_dim", value)))
        error = refused(["fit", *nano_args, "--config", str(tmp_path / "stranger.yaml")], capsys)
        assert "model.config.index_head_dim" in error


def test_a_downloaded_folder_runs_nothing(
    downloaded: Callable[..., Path],
    nano_args: list[str],
    tmp_path: Path,
    mark: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in planted(mark):
        folder = downloaded({"dspark_block_size": value})
        assert "dspark_block_size" in refused(["fit", *nano_args, "--model.pretrained", str(folder)], capsys)
        output = tmp_path / "finetune.yaml"
        assert "dspark_block_size" in refused(["import", "--from", str(folder), "--output", str(output)], capsys)
        assert not output.exists()


def test_keys_beside_the_fields_of_a_downloaded_folder_do_not_reach_the_command_line(
    downloaded: Callable[..., Path], mark: Path
) -> None:
    value = planted(mark)[0]
    folder = downloaded({"extra": value}, extra=value, quantization_config={"a": value}, auto_map={"AutoConfig": value})
    assert "planted_code" not in " ".join(default_options(str(folder)))


def test_a_runs_own_configuration_runs_nothing(tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "best.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    for value in planted(mark):
        (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(nested("model.config.index_head_dim", value)))
        assert "index_head_dim" in refused(["validate", "--ckpt_path", str(checkpoint)], capsys)


def test_a_tokenizers_settings_run_nothing(downloaded: Callable[..., Path], mark: Path) -> None:
    folder = downloaded()
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    extra = ["auto_map", "tokenizer_class", "chat_template", "extra_special_tokens", "added_tokens_decoder", "extra"]
    for key in sorted({*known, *extra, "bos_token", "eos_token", "pad_token", "additional_special_tokens"}):
        for value in [*planted(mark), "planted_code.Called", ["planted_code.Called", None]]:
            settings.write_text(json.dumps(known | {key: value}))
            for read in (lambda: read_tokenizer(folder), lambda: load_tokenizer(str(folder), [], 0, Path())):
                try:
                    found = read()
                except Exception:  # refused; others' tests say how
                    continue
                assert type(found) is PreTrainedTokenizerFast
                assert not mark.exists(), key


def test_a_study_runs_nothing(study_file: Callable[..., Path], mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in planted(mark):
        for key in ("base", "variants", "seeds", "output"):
            for wrapped in (value, [value], {"a": value}, {"config": value}, {"options": value}):
                with pytest.raises((ValueError, OSError)):
                    read_study(study_file(**{key: wrapped}))
        file = study_file(variants={"a": {"options": nested("model.config.index_head_dim", value)}})
        assert "index_head_dim" in refused(["ablate", "--config", str(file), "--dry-run"], capsys)


# ---------------------------------------------------------------- values that do not end, groups that are none


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: &a {config: *a}", "the alias *a stands inside what it names"),
        ("model: [&a [*a]]", "the alias *a stands inside what it names"),
        ("\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 12)}]" for n in range(9)), "1,000,000"),
        ("- " * 1000 + "x", "nested deeper than 64 levels"),
        ("[" * 100_000, "nest"),
        ("model: {config: {hidden_size: " + "9" * 5000 + "}}", "4300 digits"),
        ("model: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("model:", "must hold options in groups"),
        ("", "must hold options in groups"),
        ("model: 3", "model: must be a group of options, got 3"),
        ("model: {config: [1]}", "model.config: must be a group of options, got [1]"),
        ("model: {optimizer: }", "model.optimizer: must be a group of options, got None"),
        ("trainer: []", "trainer: must be a group of options, got []"),
        ("data: {}\ntrainer: {max_steps: null}", "trainer.max_steps: must not be null; its type is int"),
        ("model: {config: {hidden_size: null}}", "model.config.hidden_size: must not be null; its type is int"),
        ("model: {optimizer: {lr: null}}", "model.optimizer.lr: must not be null; its type is float"),
        ("model: {config: {norm_topk_prob: flase}}", "model.config.norm_topk_prob"),
        ("model: {config: {hidden_size: 9223372036854775808}}", "hidden_size: must be an integer of at least 1 and at"),
        ("model: {config: {hidden_size: 1000000000}}", "hidden_size: must be an integer of at least 1 and at most"),
        ("data: {vocab_size: 1000000000}", "data.vocab_size: must be at most 1048576, got 1000000000"),
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_is_no_configuration_ends_with_one_line(
    nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "stranger.yaml").write_text(text)
    error = refused(["fit", *nano_args, "--config", str(tmp_path / "stranger.yaml")], capsys)
    line = next(line for line in error.splitlines() if line.startswith("dsv41: error"))
    assert message in line
    rest = [other for other in error.splitlines() if other != line and not other.startswith("all options")]
    assert not [other for other in rest if "rror" in other]


def test_yaml_with_aliases_that_end_is_read() -> None:
    assert load_plain("a: &a [1, 2]\nb: [*a, *a]\nc: &c 3\nd: *c") == {"a": [1, 2], "b": [[1, 2]] * 2, "c": 3, "d": 3}
    with pytest.raises(yaml.YAMLError):
        load_plain("a: &a {b: [*a]}")


def test_the_released_defaults_are_typed_as_the_parser_takes_them() -> None:
    config = DeepseekV41Config(text_config=DeepseekV41TextConfig())
    assert config.text_config.rope_parameters["factor"] == 16
