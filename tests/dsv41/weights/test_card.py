"""The model card says what is known, in metadata that huggingface_hub reads back, and its code runs."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard
from tokenizers import Tokenizer

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.weights.card import RunNumbers, model_card

Make = Callable[..., DeepseekV41ForCausalLM]

RUN = RunNumbers(
    data="stdlib",
    steps=400,
    tokens=409_600,
    batch_size=4,
    sequence_length=256,
    validation_loss=4.50213,
    validation_bits_per_byte=1.82296,
    test_loss=4.61,
    unigram_loss=6.2754,
    seed=0,
    precision="32-true",
    optimizer="AdamW",
    learning_rate=3e-3,
    weight_decay=0.1,
    machine="2 cores of an AMD EPYC",
    software="torch 2.13.0",
    seconds=254.3,
    date="2026-01-31",
)


def rows_of(text: str, section: str) -> dict[str, list[str]]:
    """Rows of the tables of a section by their first cell."""
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert body is not None, section
    rows = [line[2:-2].split(" | ") for line in body[1].splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_the_numbers_of_a_run_stand_in_text_and_metadata(tiny_model: Make) -> None:
    card = ModelCard(model_card(tiny_model(), RUN))
    rows = rows_of(card.text, "Training")
    assert rows["text"] == ["stdlib"]
    assert rows["optimizer steps"] == ["400"]
    assert rows["tokens seen"] == ["409,600"]
    assert rows["peak learning rate"] == ["0.003"]
    assert rows["seed"] == ["0"], "a number that is zero is a number"
    assert rows["wall time"] == ["4 min 14 s"]
    assert rows["validation"] == ["4.502", "90.2", "1.823"]
    assert rows["test"][:2] == ["4.610", "100.5"]
    assert "6.275 nats per token" in card.text
    for name in ("precision", "optimizer", "machine", "software", "date"):
        assert rows[name] == [getattr(RUN, name)]
    assert "No evaluation" not in card.text
    results = card.data.eval_results
    assert [(r.dataset_name, r.dataset_split, r.metric_type, r.metric_value) for r in results] == [
        ("stdlib", "validation", "loss", 4.5021),
        ("stdlib", "validation", "bits_per_byte", 1.823),
        ("stdlib", "test", "loss", 4.61),
    ]
    assert all(isinstance(result, EvalResult) for result in results)


def test_metadata_survives_huggingface_hub_and_claims_no_more_than_is_known(tiny_model: Make, tmp_path: Path) -> None:
    text = model_card(tiny_model(), RUN)
    card = ModelCard(text)
    card.save(tmp_path / "README.md")
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.to_dict() == card.data.to_dict()
    assert str(again) == text
    assert again.data.library_name == "dsv41"
    assert "deepseek_v41" in again.data.tags
    assert again.data.license == "unknown"
    assert ModelCard(model_card(tiny_model(), license="apache-2.0")).data.license == "apache-2.0"
    for absent in ("pipeline_tag", "datasets", "language", "base_model"):
        assert absent not in again.data.to_dict()


@pytest.mark.parametrize("run", [None, RunNumbers()], ids=["none", "empty"])
def test_without_a_run_no_training_is_claimed(tiny_model: Make, run: RunNumbers | None) -> None:
    card = ModelCard(model_card(tiny_model(), run))
    assert rows_of(card.text, "Training") == {}
    assert "No training is on record for these weights." in card.text
    assert "No evaluation is on record." in card.text
    assert "model-index" not in card.data.to_dict()
    assert card.data.eval_results is None


@pytest.mark.parametrize("field", [field.name for field in fields(RunNumbers)])
def test_what_is_unknown_is_left_out_and_what_is_known_alone_stands_alone(tiny_model: Make, field: str) -> None:
    """Every field shows, and no other comes with it."""
    model = tiny_model()
    nothing = model_card(model, RunNumbers())
    alone = model_card(model, RunNumbers(**{field: getattr(RUN, field) or 7}))
    if field.endswith("bits_per_byte"):  # stands beside a loss alone
        assert alone == nothing
        split, loss = field.split("_")[0], field.replace("bits_per_byte", "loss")
        both = rows_of(model_card(model, RunNumbers(**{loss: 2.0, field: 1.25})), "Training")
        assert both[split] == ["2.000", "7.4", "1.250"]
        assert rows_of(model_card(model, RunNumbers(**{loss: 2.0})), "Training")[split] == ["2.000", "7.4"]
        return
    added = set(alone.splitlines()) - set(nothing.splitlines())
    assert (
        1 <= len([line for line in added if line.startswith("| ") and "---" not in line]) <= 3
        or field == "unigram_loss"
    )
    told = alone.replace("\nlicense: unknown\n", "\n")
    for word in ("None", "nan", "unknown", "TODO", "[More Information Needed]"):
        assert word not in told


def test_datasets_of_the_hub_are_linked_and_folders_stay_private(tiny_model: Make) -> None:
    run = RunNumbers(data="hf:roneneldan/TinyStories:default", validation_loss=1.0)
    card = ModelCard(model_card(tiny_model(), run))
    assert card.data.datasets == ["roneneldan/TinyStories"]
    assert card.data.eval_results[0].dataset_type == "roneneldan/TinyStories"
    private = model_card(tiny_model(), RunNumbers(data="/private/someone/books, hf:a/b", validation_loss=1.0))
    assert "/home" not in private
    assert rows_of(private, "Training")["text"] == ["books, a/b"]
    assert ModelCard(private).data.datasets == ["a/b"]


def test_results_without_the_name_of_their_data_stay_out_of_the_metadata(tiny_model: Make) -> None:
    card = ModelCard(model_card(tiny_model(), RunNumbers(validation_loss=1.0)))
    assert rows_of(card.text, "Training")["validation"][0] == "1.000"
    assert "model-index" not in card.data.to_dict()


@pytest.mark.parametrize(
    ("loss", "perplexity"), [(0.0, "1.0"), (3.0, "20.1"), (9.5, "13,359.7"), (30.0, None), (800.0, None)]
)
def test_perplexity_is_left_out_where_it_says_nothing(tiny_model: Make, loss: float, perplexity: str | None) -> None:
    rows = rows_of(model_card(tiny_model(), RunNumbers(validation_loss=loss)), "Training")
    assert rows["validation"] == [f"{loss:.3f}"] + ([] if perplexity is None else [perplexity])
    assert ("perplexity" in rows["split"]) == (perplexity is not None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min"), (3600, "1 h"), (3661, "1 h 1 min 1 s"), (86400, "24 h")]
)
def test_wall_time_is_written_in_the_units_that_it_has(tiny_model: Make, seconds: float, text: str) -> None:
    assert rows_of(model_card(tiny_model(), RunNumbers(seconds=seconds)), "Training")["wall time"] == [text]


@pytest.mark.parametrize(
    ("field", "value"),
    [("validation_loss", float("nan")), ("test_loss", float("inf")), ("steps", -1), ("machine", " "), ("data", "")],
)
def test_numbers_that_are_none_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .*None leaves it out"):
        RunNumbers(**{field: value})


def test_sizes_are_those_of_the_model(tiny_model: Make) -> None:
    model = tiny_model()
    card = model_card(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    parts = rows_of(card, "Parameters")
    assert parts.pop("all")[0] == f"{total:,}"
    del parts["part"], parts["---"]
    assert sum(int(row[0].replace(",", "")) for row in parts.values()) == total
    assert parts["Engram tables"][0] == f"{(408 + 484) * 16:,}"
    assert ModelCard(card).text.strip().splitlines()[0] == "# DeepSeek-V4.1 architecture, 797 k parameters"
    rows = rows_of(card, "Architecture")
    assert rows["layers"] == ["6"]
    assert rows["window alone"] == ["layers 0"]
    assert rows["compression 2"][0].startswith("layers 1-3: one compressed position per 2 tokens, 6 selected")
    assert rows["compressed keys made in"] == ["layers 1, 4"]
    assert rows["selections made in"] == ["layers 1, 3-5"]
    assert rows["Engram in layer 3"][0].startswith("484 rows of width 16")


def test_a_model_without_engram_and_compression_claims_neither(
    tiny_config: Callable[..., DeepseekV41Config],
) -> None:
    config = tiny_config(
        engram_layer_ids=[],
        engram_num_embeddings=[],
        compress_ratios=[0] * 6,
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=-1,
    )
    card = ModelCard(model_card(DeepseekV41ForCausalLM(config)))
    assert "engram" not in card.data.tags
    rows = rows_of(card.text, "Architecture")
    assert rows["window alone"] == ["layers 0-5"]
    assert not any(name.startswith(("compress", "selections", "Engram")) for name in rows)
    assert "None is saved with the weights" in card.text


def test_an_engram_layer_that_a_shorter_model_lacks_is_not_listed(tiny_model: Make) -> None:
    rows = rows_of(model_card(tiny_model(num_hidden_layers=3)), "Architecture")
    assert "Engram in layer 1" in rows
    assert "Engram in layer 3" not in rows
    assert rows["compressed keys made in"] == ["layers 1"]
    assert "compression 1" not in rows


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_code_of_the_card_runs_in_its_folder(
    tiny_config: Callable[..., DeepseekV41Config],
    golden_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_tokenizer: bool,
) -> None:
    config = tiny_config(engram_layer_ids=[], engram_num_embeddings=[])
    tokenizer = golden_tokenizer if with_tokenizer else None
    DeepseekV41ForCausalLM(config).save_pretrained(tmp_path / "saved", tokenizer=tokenizer)
    text = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert ("BPE, 512 ids, in `tokenizer.json`" in text) == with_tokenizer
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path / "saved")
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    assert names["logits"].shape[-1] == 512
    assert (printed.getvalue() != "") == with_tokenizer


def test_another_card_takes_the_place_of_the_models_own(tiny_model: Make, tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "own")
    assert (tmp_path / "own" / "README.md").read_text(encoding="utf-8") == model_card(model)
    model.save_pretrained(tmp_path / "given", card="---\nlicense: mit\n---\n\n# Ä\n")
    assert ModelCard.load(tmp_path / "given" / "README.md").data.license == "mit"


def test_a_variant_says_what_is_other_than_in_the_release(tiny_model: Make) -> None:
    assert "other than in the release" not in rows_of(model_card(tiny_model(), None), "Architecture")
    variant = tiny_model(residual="plain", hc_mult=1, attention="full", quantized_caches=False)
    rows = rows_of(model_card(variant, None), "Architecture")
    assert rows["other than in the release"] == ["residual plain, attention full, caches not rounded"]
    assert rows["attention window"] == ["all tokens"]
    assert rows["hidden size"] == ["64, in one residual stream"]
    assert not [name for name in rows if name.startswith(("compression", "selections"))]
