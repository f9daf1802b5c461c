"""What tokens keep of the text, and what is said where they lose it or cannot be written."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from lightning_modules.data import TextDataModule, token_store
from lightning_modules.data.tokenization import SPECIAL_TOKENS

Make = Callable[..., TextDataModule]
SPECIAL_IDS = {token: number for number, token in enumerate(SPECIAL_TOKENS.values())}


def _letters(folder: Path, letters: str, **settings: Any) -> str:
    """A tokenizer with a token for each of some letters."""
    vocabulary = {**SPECIAL_IDS, **{letter: 3 + number for number, letter in enumerate(letters)}}
    backend = Tokenizer(models.BPE(vocabulary, [], **settings))
    backend.decoder = decoders.Fuse()
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("kind", ["bpe", "bytes", "deepseek"])
def test_tokens_bytes_agree_with_the_texts(
    make_data: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    spec = kind
    if kind == "bytes":
        backend = Tokenizer(
            models.BPE(SPECIAL_IDS | {a: n for n, a in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 3)}, [])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.save(str(tmp_path / "bytes.json"))
        spec = str(tmp_path / "bytes.json")
    data = make_data(tokenizer=spec)
    Path(str(data.source), "odd.txt").write_bytes("grün 漢字 🙂\r\n\t\u202e<unk>\x7f".encode())
    with caplog.at_level("INFO"):
        data.prepare_data()
    assert "loses" not in caplog.text
    lengths = data.token_byte_lengths()
    for name, store in data.stores.items():
        assert int(lengths[store.tokens.astype("int64")].sum()) == data.splits[name].bytes
        assert data.text_bytes_per_token_byte(name) == 1.0


def test_tokenizer_that_drops_text_is_refused(make_data: Make, tmp_path: Path) -> None:
    data = make_data(tokenizer=_letters(tmp_path / "few", "q"))
    message = (
        r"^data\.tokenizer: loses [\d,]+ of the first [\d,]+ bytes of the train text \(most in '.*'\), and at most 10%"
    )
    with pytest.raises(ValueError, match=message) as caught:
        data.prepare_data()
    assert "\n" not in str(caught.value)
    assert list((data.cache_dir / "tokens").iterdir()) == []


@pytest.mark.parametrize("unknown", [{}, {"unk_token": "<unk>"}])
def test_unknown_token_does_not_count_as_text(make_data: Make, tmp_path: Path, unknown: dict[str, str]) -> None:
    spec = _letters(tmp_path / "few", "q", **unknown)
    if unknown:
        file = Path(spec, "tokenizer.json")
        saved = json.loads(file.read_text())
        saved["model"]["vocab"]["<unk>"] = 4
        file.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"^data\.tokenizer: loses "):
        make_data(tokenizer=spec).prepare_data()


def test_refusal_does_not_wait_for_the_end(make_data: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "_BATCH_CHARACTERS", 1)
    data = make_data(tokenizer=_letters(tmp_path / "few", "q"), val_fraction=0.0, test_fraction=0.0)
    with pytest.raises(ValueError, match="loses ") as caught:
        data.prepare_data()
    found = re.search(r"of the first ([\d,]+) bytes .* all ([\d,]+) may", str(caught.value))
    assert found is not None
    first, total = (int(number.replace(",", "")) for number in found.groups())
    assert 0.1 * total < first < 0.3 * total


def test_small_loss_is_said_and_bits_per_byte_count_the_text(
    make_data: Make, corpus_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "".join(file.read_text() for file in corpus_dir.rglob("*.txt"))
    kept = "".join(sorted(set(text) - {"q"}))  # One letter of 40 or so.
    data = make_data(tokenizer=_letters(tmp_path / "most", kept))
    with caplog.at_level("INFO"):
        data.prepare_data()
    kept_bytes = sum(int((store.tokens > 2).sum()) for store in data.stores.values())
    assert kept_bytes == len(text) - text.count("q")
    assert re.search(r"data\.tokenizer: loses \d+ of [\d,]+ bytes \(\d\.\d\d%\) of the val text, most in ", caplog.text)
    tokens = torch.from_numpy(data.stores["val"].tokens.astype("int64"))
    ratio = data.splits["val"].bytes / int((tokens > 2).sum())
    assert data.text_bytes_per_token_byte("val") == pytest.approx(ratio)
    assert ratio > 1.01
    labels = torch.cat([row["labels"][1:] for row in data.dataset("val")])  # type: ignore[attr-defined]
    text_bytes = int((labels > 2).sum()) * ratio  # Special tokens stand for no text.
    bits = data.unigram_entropy() * int((labels != -100).sum()) / math.log(2) / text_bytes
    assert data.unigram_bits_per_byte() == pytest.approx(bits)


def test_text_that_a_tokenizer_writes_otherwise_is_not_lost(
    make_data: Make, corpus_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "".join(file.read_text() for file in corpus_dir.rglob("*.txt")).lower().replace(" ", "▁")
    spec = _letters(tmp_path / "lower", "".join(sorted(set(text) | {"▁"})))
    backend = Tokenizer.from_file(f"{spec}/tokenizer.json")
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(f"{spec}/tokenizer.json")
    with caplog.at_level("INFO"):
        make_data(tokenizer=spec).prepare_data()
    assert "loses" not in caplog.text


def test_text_that_cannot_be_encoded_is_named(make_data: Make, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({**SPECIAL_IDS, "a": 3}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"^data\.tokenizer: cannot encode one of the train documents 'part0/"):
        make_data(tokenizer=str(tmp_path / "tokenizer.json")).prepare_data()


@pytest.mark.parametrize("content", [b"", b"no array", None, np.array([0.5]), np.array([], np.int64), np.array(3)])
def test_damaged_cache_is_named(make_data: Make, content: bytes | np.ndarray | None) -> None:
    data = make_data()
    data.prepare_data()
    for file in data.cache_dir.glob("tokens/*.starts.npy"):
        if isinstance(content, np.ndarray):
            np.save(file, content)
        else:
            file.write_bytes(file.read_bytes()[:-4] if content is None else content)
    with pytest.raises(ValueError, match=r"/tokens/\w+\.starts\.npy .*; remove it, to make it anew$") as caught:
        make_data().prepare_data()
    assert "\n" not in str(caught.value)


def test_full_disk_names_file_and_room(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data()
    _ = data.fast_tokenizer
    open_file = Path.open

    class Full:
        written = 0

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, content: bytes) -> None:
            self.written += len(content)
            if self.written > 1000:
                raise OSError(28, "No space left on device")

    def open_or_full(self: Path, mode: str = "r", **settings: Any) -> Any:
        return Full() if ".bin." in self.name and "w" in mode else open_file(self, mode, **settings)

    monkeypatch.setattr(Path, "open", open_or_full)
    message = (
        r"tokens/\w+\.uint16\.bin could not be written: No space left on device "
        r"\(about ([\d.]+) MB were needed, [\d,.]+ MB are free there\); what was complete before is untouched$"
    )
    with pytest.raises(OSError, match=message) as caught:
        data.prepare_data()
    assert caught.value.errno == 28
    assert list((data.cache_dir / "tokens").iterdir()) == []
    monkeypatch.undo()


def test_unwritable_cache_is_found_before_tokenising(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data()
    _ = data.fast_tokenizer
    (data.cache_dir / "tokens").touch()
    monkeypatch.setattr(token_store._Encoder, "encode", None)
    with pytest.raises(OSError, match=r"^data\.cache_dir: cannot write in .*tokens: File exists; choose another"):
        data.prepare_data()
