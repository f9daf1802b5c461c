"""The data module: its settings, its batches and what it tells about the corpus."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from jsonargparse import ArgumentParser

from dsv41.files import default_cache_dir, written_whole
from lightning_modules.data import TextDataModule, module, token_store, tokenization

# Lightning 2.6 uses a name that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")

Make = Callable[..., TextDataModule]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source": "/no/such/place"}, FileNotFoundError, "data.source: '/no/such/place'"),
        ({"source": "hf:some/set"}, ValueError, "data.max_documents: must be set"),
        ({"max_documents": 0}, ValueError, "data.max_documents: must be at least 1"),
        ({"tokenizer": "wordpiece"}, FileNotFoundError, 'data.tokenizer: must be "bpe", "deepseek"'),
        ({"vocab_size": 200}, ValueError, "data.vocab_size: must be at least 259"),
        ({"sequence_length": 1}, ValueError, "data.sequence_length: must be at least 2, got 1"),
        ({"batch_size": 0}, ValueError, "data.batch_size: must be at least 1, got 0"),
        ({"num_workers": -1}, ValueError, "data.num_workers: must be at least 0, got -1"),
        ({"seed": -1}, ValueError, "data.seed: must be at least 0, got -1"),
        ({"val_fraction": 1.0}, ValueError, "data.val_fraction: must be from 0 to below 1, got 1.0"),
        ({"test_fraction": -0.1}, ValueError, "data.test_fraction: must be from 0 to below 1, got -0.1"),
        ({"val_fraction": math.nan}, ValueError, "data.val_fraction: must be from 0 to below 1, got nan"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, ValueError, "val_fraction . data.test_fraction: must be below 1"),
        ({"text_field": ""}, ValueError, "data.text_field: must be the name of a field"),
    ],
)
def test_bad_settings_are_refused_at_once(
    make_data: Make, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_data(**changes)


WHOLE = ("vocab_size", "sequence_length", "batch_size", "num_workers", "seed")


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in WHOLE for value in (None, "7", 300.0, True, {}, [300], 2**63, -1, math.nan)),
        *({"max_documents": value} for value in ("7", 3.0, True, 0, -1, 2**63)),
        *({name: value} for name in ("val_fraction", "test_fraction") for value in (None, "0", True, {}, 1, math.inf)),
        *({"source": value} for value in (None, 3, {}, [], [None], [["a"]], "", [""], "x" * 5000, "~nosuchuser/x")),
        *({"tokenizer": value} for value in (None, 3, "", ["bpe"], "x" * 5000)),
        *({"text_field": value} for value in (None, 3, "")),
        *({"cache_dir": value} for value in (3, "", ["a"], "~nosuchuser/x")),
        {"vocab_size": 10**9},
        {"vocab_size": (1 << 20) + 1, "tokenizer": "deepseek"},
        {"num_workers": 1025},
    ],
)
def test_values_of_other_types_and_ranges_are_named_in_one_line(make_data: Make, changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        make_data(**changes)
    assert str(caught.value).startswith(f"data.{next(iter(changes))}: ")
    assert "\n" not in str(caught.value)


def test_ends_of_the_ranges_are_taken(make_data: Make) -> None:
    make_data(vocab_size=259, sequence_length=2, batch_size=1, num_workers=0, seed=0, val_fraction=0, max_documents=1)
    make_data(vocab_size=1 << 20, sequence_length=2**31 - 1, batch_size=2**31 - 1, num_workers=1024, seed=2**63 - 1)


def test_list_of_sources_is_copied(make_data: Make, corpus_dir: Path) -> None:
    sources = [str(corpus_dir)]
    data = make_data(source=sources)
    sources.append("/no/such/place")
    assert data.source == [str(corpus_dir)]
    data.prepare_data()


def test_no_home_directory_is_said_with_what_to_give(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DSV41_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(ValueError, match=r"^data\.cache_dir: there is no home .* --data\.cache_dir or \$DSV41_CACHE$"):
        make_data()
    monkeypatch.setattr(Path, "expanduser", fail)
    monkeypatch.setenv("DSV41_CACHE", "~/cache")
    with pytest.raises(ValueError, match=r"^data\.cache_dir: there is no home"):
        make_data(source="stdlib")


def test_showing_a_data_module_reads_nothing(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # The command line's parser shows it in the text of an error about a bad record, which would be met five times.
    monkeypatch.setattr(module, "iterate_documents", None)
    assert str(make_data(source="stdlib")) == "TextDataModule(source='stdlib', tokenizer='bpe')"


def test_what_is_left_out_is_kept_and_said_once(
    make_data: Make, corpus_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10):
        (corpus_dir / f"image{number}").write_bytes(b"\0" * 9)
    data = make_data()
    assert data.left_out.summary() == ""
    with caplog.at_level("INFO"):
        data.prepare_data()
        data.setup("fit")
    line = "data.source: left out 10 of 50 files (20.0%): 10 binary, with NUL bytes (as image0)"
    assert [record.message for record in caplog.records].count(line) == 1
    assert data.left_out.reasons == {"binary, with NUL bytes": 10}


def test_empty_split_is_not_blamed_for_what_is_left_out(make_data: Make, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "README.md").write_text("words and words " * 99)
    for number in range(17):
        (folder / f"{number}.docx").write_bytes(b"PK\3\4\0\0")
    data = make_data(source=str(folder), val_fraction=0.0)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"val split is empty .*\(left out 17 of 18 files \(94\.4%\): 17 binary, with"):
        data.setup("validate")


def test_nothing_is_read_before_it_is_needed(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(module, "iterate_documents", refuse)
    data = make_data()
    assert not data.cache_dir.exists()
    with pytest.raises(AssertionError, match="read"):
        data.prepare_data()
    assert len(make_data(tokenizer="deepseek").fast_tokenizer) == 129280  # Needs no text.


def test_batches_of_all_loaders(make_data: Make) -> None:
    data = make_data()
    data.prepare_data()
    for stage in ("fit", "test", "predict"):
        data.setup(stage)
    loaders: dict[str, Any] = {
        "train": data.train_dataloader(),
        "val": data.val_dataloader(),
        "test": data.test_dataloader(),
    }
    for split, loader in loaders.items():
        batches = list(loader)
        assert len(batches) == len(loader) == math.ceil(len(data.dataset(split)) / 4)
        assert {name: tuple(values.shape) for name, values in batches[0].items()} == {
            **dict.fromkeys(("input_ids", "attention_mask", "labels", "document_ids"), (4, 16)),
            "row_id": (4,),
        }
        rows = torch.cat([batch["row_id"] for batch in batches]).tolist()
        assert sorted(rows) == list(range(len(data.dataset(split))))
        assert (rows == sorted(rows)) == (split != "train")
    assert [batch["row_id"].tolist() for batch in data.predict_dataloader()] == [
        batch["row_id"].tolist() for batch in loaders["test"]
    ]
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'dev'"):
        data.dataset("dev")


def test_second_run_uses_the_caches_also_for_other_rows(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_data()
    first.prepare_data()
    files = {file: file.stat().st_mtime_ns for file in first.cache_dir.rglob("*") if file.is_file()}

    def refuse(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(tokenization, "_train_bpe", refuse)
    monkeypatch.setattr(token_store, "_tokenize", refuse)
    second = make_data(sequence_length=9, batch_size=3, seed=4)
    second.prepare_data()
    second.prepare_data()
    second.setup("fit")
    second.setup("fit")
    assert second.tokenizer_fingerprint() == first.tokenizer_fingerprint()
    assert next(iter(second.train_dataloader()))["input_ids"].shape == (3, 9)
    assert {file: file.stat().st_mtime_ns for file in first.cache_dir.rglob("*") if file.is_file()} == files


def test_bpe_sees_the_training_documents_only(make_data: Make, tmp_path: Path) -> None:
    data = make_data()
    held_out = [document.name for document in data.splits["val"].documents]
    fingerprint = data.tokenizer_fingerprint()
    file = Path(str(data.source), held_out[0])
    file.write_text(file.read_text() + "zzzz qqqq " * 50)
    changed = make_data()
    assert changed.tokenizer_fingerprint() == fingerprint
    assert changed.splits["val"].digest != data.splits["val"].digest


def test_numbers_about_the_corpus(make_data: Make, corpus_dir: Path) -> None:
    data = make_data()
    size = sum(file.stat().st_size for file in corpus_dir.rglob("*.txt"))
    lengths = data.token_byte_lengths()
    stores = data.stores
    assert sum(int(lengths[store.tokens.astype("int64")].sum()) for store in stores.values()) == size
    assert sum(store.documents for store in stores.values()) == 40
    for name, store in stores.items():
        text = f"{name} {store.documents} documents, {len(store):,} tokens, {len(data.dataset(name))} rows, "
        assert text in data.describe()

    labels = [label for row in data.dataset("val") for label in row["labels"][1:].tolist() if label != -100]  # type: ignore[attr-defined]
    shares = [labels.count(token) / len(labels) for token in set(labels)]
    nats = -sum(share * math.log(share) for share in shares)
    assert data.unigram_entropy() == pytest.approx(nats)
    bits_per_byte = nats * len(labels) / math.log(2) / int(lengths[labels].sum())
    assert data.unigram_bits_per_byte("val") == pytest.approx(bits_per_byte)
    with pytest.raises(ValueError, match="val split: no text is predicted in 0 tokens"):
        make_data(val_fraction=0.0).unigram_entropy("val")


def test_empty_or_short_splits_are_named(make_data: Make, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"train split has \d+ tokens, less than one row of sequence_length = 100000 \(doc"
    ):
        make_data(sequence_length=100_000).setup("fit")
    for stage, split in (("fit", "val"), ("validate", "val"), ("test", "test"), ("predict", "test")):
        data = make_data(max_documents=2, val_fraction=1e-9, test_fraction=1e-9)
        with pytest.raises(
            ValueError, match=rf"the {split} split is empty \(documents: 2 train, 0 val, 0 test\); raise"
        ):
            data.setup(stage)


def test_training_without_validation(make_data: Make) -> None:
    class Model(L.LightningModule):
        validated = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.layer(torch.ones(1)).sum()  # type: ignore[no-any-return]

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.validated = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    model = Model()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.warns(UserWarning, match="Total length of `list` across ranks is zero"):
        trainer.fit(model, make_data(val_fraction=0.0))
    assert trainer.global_step == 2
    assert not model.validated


def test_single_file(tmp_path: Path, make_data: Make) -> None:
    file = tmp_path / "one.txt"
    file.write_text("".join(f"line {number} of a text\n" for number in range(500)))
    data = make_data(source=str(file))
    data.setup("fit")
    data.setup("test")
    assert [store.documents for store in data.stores.values()] == [1, 1, 1]


def test_settings_show_in_the_command_line_help() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(TextDataModule, "data")
    text = parser.format_help()
    for setting in ("source", "tokenizer", "vocab_size", "sequence_length", "max_documents", "cache_dir"):
        assert f"--data.{setting}" in text
    assert "Rows in a batch of all processes together" in text
    assert parser.parse_args(["--data.source", "[a, b]"]).data.source == ["a", "b"]


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_cache_dir() == Path(os.environ["DSV41_CACHE"])
    monkeypatch.delenv("DSV41_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "dsv41"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "dsv41"


def test_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"

    def fail() -> None:
        with written_whole(target) as partial:
            partial.write_text("some")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        fail()
    assert list(target.parent.iterdir()) == []
    with written_whole(target) as partial:
        partial.write_text("all")
        assert not target.exists()
    assert [file.name for file in target.parent.iterdir()] == ["file"]
