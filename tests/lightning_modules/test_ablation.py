"""Studies before and after their runs: file, plan, matching, statistics, tables."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dsv41 import DeepseekV41Config
from lightning_modules.ablation.cost import Cost, cost_of
from lightning_modules.ablation.curves import Record, name_of
from lightning_modules.ablation.intervals import Interval, interval, paired, t_probability, t_quantile
from lightning_modules.ablation.matching import FIELDS, Match, ratio, resize, warning
from lightning_modules.ablation.plan import make_plan
from lightning_modules.ablation.results import group, markdown, notes_on, summarise, write_results
from lightning_modules.ablation.study import read_study
from lightning_modules.cli import get_cli

MakeConfig = Callable[..., DeepseekV41Config]
NO_ENGRAM = {"options": {"model": {"config": {"engram_layer_ids": []}}}}  # that of the fixture study_file


# ---------------------------------------------------------------- the file


def test_a_study_is_read_with_its_base_first(study_file: Callable[..., Path], tmp_path: Path) -> None:
    matched = NO_ENGRAM | {"config": ["nano.yaml"], "match": "flops"}
    study = read_study(study_file(variants={"off": NO_ENGRAM, "matched": matched}, seeds=[3, 1]))
    assert study.name == "some"
    assert study.config == (tmp_path / "nano.yaml",)
    assert [variant.name for variant in study.variants] == ["base", "off", "matched"]
    assert [variant.match for variant in study.variants] == ["none", "none", "flops"]
    assert study.variants[2].config == (tmp_path / "nano.yaml",)
    assert study.seeds == (3, 1)


def test_files_are_found_in_the_working_directory_too(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = study_file()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "nano.yaml").rename(tmp_path / "elsewhere" / "nano.yaml")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_study(path).config == (Path("nano.yaml"),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [0]}, "there is no key 'seed'; the keys are base, variants, seeds, output"),
        ({"base": {"configs": []}}, "base: there is no key 'configs'"),
        ({"base": {"config": []}}, "base.config: must name at least one file"),
        ({"base": {"config": "nano.yaml"}}, "base.config: must be a list of files, got 'nano.yaml'"),
        ({"base": {"config": ["gone.yaml"]}}, "base.config: there is no file gone.yaml"),
        ({"variants": {}}, "variants: must be at least one"),
        ({"variants": {"base": NO_ENGRAM}}, "variants.base: must be of letters"),
        ({"variants": {"seed_1": NO_ENGRAM}}, "variants.seed_1: must be of letters"),
        ({"variants": {"a/b": NO_ENGRAM}}, "variants.a/b: must be of letters"),
        ({"variants": {False: NO_ENGRAM}}, "variants: False must be a text (YAML reads on, off"),
        ({"variants": {"off": {}}}, "variants.off: must change something"),
        ({"variants": {"off": NO_ENGRAM | {"mach": "flops"}}}, "variants.off: there is no key 'mach'"),
        ({"variants": {"off": NO_ENGRAM | {"match": "flop"}}}, "variants.off.match: must be one of none, parameters"),
        ({"variants": {"off": {"options": [1]}}}, "variants.off.options: must be a mapping, got [1]"),
        ({"seeds": []}, "seeds: must be a list of different integers"),
        ({"seeds": [1, 1]}, "seeds: must be a list of different integers of at least 0, got [1, 1]"),
        ({"seeds": [True]}, "seeds: must be a list"),
        ({"seeds": [-1]}, "seeds: must be a list"),
        ({"output": None}, "output: must be a folder, got None"),
    ],
)
def test_what_is_wrong_in_a_study_is_named(
    study_file: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    path = study_file(**changes)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        read_study(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("seeds: [0]\nseeds: [1]\n")
    with pytest.raises(ValueError, match=r"twice.yaml: the key 'seeds' comes twice"):
        read_study(path)
    with pytest.raises(FileNotFoundError, match=r"^--config: .*gone.yaml does not exist"):
        read_study(tmp_path / "gone.yaml")


# ---------------------------------------------------------------- the plan


def test_runs_have_complete_configurations_of_their_own_seed_and_place(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    plan = make_plan(read_study(study_file()))
    assert [run.name for run in plan.runs] == ["base seed 0", "no_engram seed 0", "base seed 1", "no_engram seed 1"]
    assert plan.switches() == ["model.config.engram_layer_ids"]
    last = plan.runs[-1]
    assert (last.config["seed_everything"], last.config["data"]["seed"]) == (1, 1)
    assert last.steps == 4
    logger = last.config["trainer"]["logger"]["init_args"]
    directory = Path(logger["save_dir"]) / logger["name"] / f"version_{logger['version']}"
    assert last.directory == directory == tmp_path / "out/runs/no_engram/seed_1/version_0"
    assert len({run.digest for run in plan.runs}) == 4


def test_variants_of_a_seed_share_initial_values_and_the_order_of_rows(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    def start(run: Any) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(run.config))
        cli = get_cli(["--config", str(file)], run=False)
        cli.model.configure_model()
        cli.datamodule.setup("fit")
        return dict(cli.model.named_parameters()), list(cli.datamodule.train_dataloader().batch_sampler)

    plan = make_plan(read_study(study_file()))
    (base, rows), (variant, variant_rows), (other, other_rows) = (start(run) for run in plan.runs[:3])
    assert rows == variant_rows
    assert rows != other_rows
    assert set(variant) < set(base)
    assert all(torch.equal(base[name], variant[name]) for name in variant)
    assert not torch.equal(base["model.lm_head.weight"], other["model.lm_head.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {"sequence_length": 16}}, "no_engram: data.sequence_length is 16, in the base 32"),
        ({"trainer": {"max_steps": 8}}, "no_engram: trainer.max_steps is not the base's"),
        ({"trainer": {"max_steps": 5}}, "no_engram: a run has to end with a validation: .*got max_steps 5"),
        ({"trainer": {"val_check_interval": 0.5}}, "no_engram: a run has to end with a validation"),
        ({"trainer": {"check_val_every_n_epoch": 1}}, "a run has to end with a validation"),
        ({"trainer": {"max_epochs": 1}}, "no_engram: trainer.max_epochs: must be left alone, got 1"),
        ({"trainer": {"fast_dev_run": True}}, "no_engram: trainer.fast_dev_run: must be left alone"),
        ({"data": {"val_fraction": 0.0}}, "no_engram: data.val_fraction: must be above 0"),
        ({"model": {"config": {"engram_layers": []}}}, "the configuration of no_engram does not parse, see above"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    study_file: Callable[..., Path], options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = read_study(study_file(variants={"no_engram": {"options": options}}))
    with pytest.raises(ValueError, match=message):
        make_plan(study)


# ---------------------------------------------------------------- matching


@pytest.mark.parametrize(("match", "field"), [("parameters", "n_routed_experts"), ("flops", "moe_intermediate_size")])
def test_a_match_is_the_value_that_comes_nearest(tiny_config: MakeConfig, match: Match, field: str) -> None:
    def cost_with(value: int, **overrides: Any) -> Cost:
        return cost_of(tiny_config(**{field: value}, **overrides).text_config, 64)

    def without(value: int) -> Cost:
        return cost_with(value, engram_layer_ids=[], engram_num_embeddings=[])

    assert FIELDS[match] == field
    before = getattr(tiny_config().text_config, field)
    base = cost_with(before)
    matched = resize(match, before, 2, base, without)
    assert matched.before == before < matched.after
    around = range(matched.after - 2, matched.after + 3)  # the ratio grows evenly, so the nearest of these is of all
    nearest = min(around, key=lambda value: abs(ratio(match, without(value), base) - 1))
    assert matched.after == nearest
    # Back from there: the base with the variant's size would be too large, so it shrinks to where it was.
    assert resize(match, matched.after, 2, base, lambda value: cost_with(value)).after == before


def test_a_match_keeps_enough_experts_for_a_token(tiny_config: MakeConfig) -> None:
    def cost_with(value: int) -> Cost:
        return cost_of(tiny_config(n_routed_experts=value).text_config, 64)

    base = replace(cost_with(4), parameters=10)
    assert resize("parameters", 4, 2, base, cost_with).after == 2


def test_a_match_that_is_more_than_one_percent_off_is_said() -> None:
    assert warning("off", "flops", 1.0099) is None
    assert warning("off", "flops", 0.9901) is None
    assert warning("off", "parameters", 1.0102) == "WARNING: off is not matched: it has 1.0102 of the base's parameters"


def test_a_matched_variant_is_planned_with_its_new_size(study_file: Callable[..., Path]) -> None:
    plan = make_plan(read_study(study_file(variants={"off": NO_ENGRAM | {"match": "flops"}})))
    base, variant = plan.variants
    assert variant.matched is not None
    assert variant.config["model"]["config"]["moe_intermediate_size"] == variant.matched.after > 8
    assert ratio("flops", variant.cost, base.cost) == pytest.approx(1, abs=0.03)
    assert plan.runs[1].config["model"]["config"]["moe_intermediate_size"] == variant.matched.after


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (10, 2.2281), (30, 2.0423)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-5)


def test_quantiles_at_99_percent_and_of_many_degrees() -> None:
    assert t_quantile(1, 0.99) == pytest.approx(63.6567, abs=6e-5)
    assert t_quantile(4, 0.99) == pytest.approx(4.6041, abs=6e-5)
    assert t_quantile(1000) == pytest.approx(1.9623, abs=6e-5)
    assert t_probability(0.0, 3) == 0
    with pytest.raises(ValueError, match="degrees: must be at least 1, got 0"):
        t_quantile(0)
    with pytest.raises(ValueError, match="confidence: must lie between 0 and 1, got 1"):
        t_quantile(3, 1)


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.302653 * math.sqrt(7 / 3) / math.sqrt(3), rel=1e-6)
    assert interval([5.0]) == Interval(5.0, None, 1)


def test_differences_are_paired_by_seed() -> None:
    base = {0: 1.0, 1: 10.0, 2: 100.0, 7: 3.0}
    found = paired({2: 101.0, 0: 2.0, 1: 11.0, 9: 5.0}, base)
    assert found == Interval(1.0, pytest.approx(0.0), 3)
    assert paired({9: 5.0}, base) is None


# ---------------------------------------------------------------- tables


def record(variant: str, seed: int | None, loss: float, **changes: Any) -> Record:
    made = Record(
        variant=variant,
        seed=seed,
        directory=Path(variant) / str(seed),
        curve={2: 9.0, 4: loss},
        train_curve={},
        rate=100.0 + (seed or 0),
        memory=50.0 + (seed or 0),
        cost=Cost(10, 5, 2500.0),
        settings={},
    )
    return replace(made, **changes)


def squeezed(table: str) -> str:
    """A table without the spaces that align it."""
    return re.sub(r" +", " ", table)


def test_the_table_has_means_paired_differences_and_costs() -> None:
    runs = [record("base", 0, 1.0), record("base", 1, 3.0), record("b", 1, 3.5), record("b", 0, 1.1)]
    base, row = summarise(runs, "base")
    assert base.difference is None
    assert base.loss == Interval(2.0, pytest.approx(12.7062), 2)
    assert row.difference == Interval(pytest.approx(0.3), pytest.approx(12.7062 * 0.2, rel=1e-4), 2)
    assert (row.rate, row.memory, row.steps) == (100.5, 51.0, (4, 4))
    table = markdown([base, row], "base")
    assert "| b | 2 | 2.3000 | +0.3000 [-2.2412, +2.8412] |" in squeezed(table)
    assert "| b | 100 | 51 MB | 10 | 5 | 2.5 k |" in squeezed(table)
    losses, costs, notes = table.split("\n\n")
    for part in (losses, costs):
        assert (
            len({line.count("|") for line in part.splitlines()}) == len({len(line) for line in part.splitlines()}) == 1
        )
    assert notes == "- Differences are to base.\n"


def test_the_tables_fit_a_terminal_of_100_columns() -> None:
    long = "a-variant-with-a-name-that-is-longer-than-most-and-says-everything"
    cost = Cost(748_000_000_000, 52_000_000, 2.5e12)
    runs = [
        record(name, seed, loss, cost=cost, rate=1_234_567.0, memory=123_456.0)
        for name, loss in (("base", 1.0), (long, 3.0))
        for seed in (0, 1)
    ]
    rows = summarise(runs, "base")
    table = markdown(rows, "base", [*notes_on(rows, "base"), "word " * 60])
    assert max(map(len, table.splitlines())) <= 100
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert "".join(names) == 2 * f"variantbase{long}"
    assert "| base | 1,234,567 | 123,456 MB | 748.0 G | 52,000,000 | 2.5 T |" in squeezed(table)


def test_one_seed_has_no_interval_and_says_so() -> None:
    rows = summarise([record("base", 0, 1.0), record("b", 0, 1.25)], "base")
    assert rows[1].difference == Interval(0.25, None, 1)
    assert "+0.2500 (one seed: no interval)" in markdown(rows, "base")
    assert any("One seed says nothing" in note and "base, b" in note for note in notes_on(rows, "base"))


def test_what_does_not_compare_is_said() -> None:
    rows = summarise([record("base", 0, 1.0), record("b", 3, 1.25, curve={7: 2.0})], "base")
    notes = notes_on(rows, "base")
    assert any(note.startswith("No seed in common with base") and note.endswith("b.") for note in notes)
    assert "WARNING: the runs have not taken the same number of steps: base 4, b 7." in notes


def test_two_runs_of_a_seed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two runs of b have seed 3: b/3 and b/3; leave one out, or .*NAME=b/3"):
        group([record("b", 3, 1.0), record("b", 3, 2.0)])
    with pytest.raises(ValueError, match="two runs of b have no known seed"):
        group([record("b", None, 1.0), record("b", None, 2.0)])


def test_files_of_results_agree(tmp_path: Path) -> None:
    runs = [record("base", 0, 1.0), record("b", 0, 1.25, cost=None, rate=None)]
    rows = summarise(runs, "base")
    table = markdown(rows, "base")
    write_results(tmp_path, rows, runs, table, {"study": "x"})
    loaded = json.loads((tmp_path / "results.json").read_text())
    assert loaded["study"] == "x"
    assert [run["curve"] for run in loaded["runs"]] == [{"2": 9.0, "4": 1.0}, {"2": 9.0, "4": 1.25}]
    with (tmp_path / "results.csv").open() as file:
        read = list(csv.DictReader(file))
    for of_json, of_csv in zip(loaded["variants"], read, strict=True):
        assert {name: "" if v is None else str(v) for name, v in of_json.items() if name != "seeds"} == {
            name: v for name, v in of_csv.items() if name != "seeds"
        }
    assert loaded["variants"][1]["difference"] == 0.25
    assert loaded["variants"][1]["difference_half_interval"] is None
    assert (tmp_path / "results.md").read_text() == table


def test_runs_are_named_by_their_experiment() -> None:
    assert name_of(Path("runs/tiny/version_12")) == "tiny"
    assert name_of(Path("out/runs/no_engram/seed_2/version_0")) == "no_engram"
    assert name_of(Path("out/version_two")) == "version_two"
