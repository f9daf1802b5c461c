"""Plan of a study: complete configurations of its runs, checked before the first one starts."""

from __future__ import annotations

import copy
import hashlib
import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsv41.config import DeepseekV41TextConfig
from lightning_modules.ablation.cost import Cost, cost_of
from lightning_modules.ablation.matching import FIELDS, Matched, resize
from lightning_modules.ablation.study import Study, Variant
from lightning_modules.checkpoint.find import run_name
from lightning_modules.inspecting import Parsed, vocabulary

# Options of a run's place, which do not affect its numbers.
PLACE = "trainer.logger."


@dataclass(frozen=True)
class Run:
    """Training run of one variant with one seed.

    Attributes:
        variant: Name.
        seed: Of initial values and of the order of the rows.
        folder: Of what the study keeps of the run; the run's own directory is `directory`.
        config: Complete, as ``fit --config`` takes it.
        steps: Optimizer steps.
    """

    variant: str
    seed: int
    folder: Path
    config: dict[str, Any]
    steps: int

    @property
    def name(self) -> str:
        """Display name, variant and seed."""
        return f"{self.variant} seed {self.seed}"

    @property
    def directory(self) -> Path:
        """Directory of event files, checkpoints and configuration, as the command line names it."""
        return self.folder / run_name(0)

    @property
    def settings(self) -> dict[str, Any]:
        """All options by their dotted name, without those of the place."""
        return {name: value for name, value in flat(self.config).items() if not name.startswith(PLACE)}

    @property
    def digest(self) -> str:
        """SHA-256 of `settings`."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class PlannedVariant:
    """Variant with its configuration and cost.

    Attributes:
        variant: As the study says it.
        config: Complete, but for seeds and place.
        cost: With the vocabulary that the configuration promises.
        matched: How it was resized, if it was.
    """

    variant: Variant
    config: dict[str, Any]
    cost: Cost
    matched: Matched | None


@dataclass(frozen=True)
class Plan:
    """All runs of a study.

    Attributes:
        study: The study.
        variants: The base first.
        runs: Seed by seed, so that finished seeds can be compared early.
    """

    study: Study
    variants: tuple[PlannedVariant, ...]
    runs: tuple[Run, ...]

    def switches(self) -> list[str]:
        """Dotted names of the options that are not the same in all variants."""
        settings = [flat(planned.config) for planned in self.variants]
        names = sorted({name for one in settings for name in one})
        return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dictionaries by their dotted name; an empty one is a leaf."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def configuration_of(study: Study, variant: Variant) -> dict[str, Any]:
    """The complete configuration of a variant, parsed as ``fit`` parses it.

    Raises:
        ValueError: It does not parse; the parser has said why on stderr.
    """
    args: list[str] = []
    for path in study.config:
        args += ["--config", str(path)]
    if study.options:
        args += ["--config", yaml.safe_dump(study.options)]
    for path in variant.config:
        args += ["--config", str(path)]
    if variant.options:
        args += ["--config", yaml.safe_dump(variant.options)]
    try:
        parsed = Parsed(args)
    except SystemExit:
        raise ValueError(f"{study.name}: the configuration of {variant.name} does not parse, see above") from None
    config: dict[str, Any] = yaml.safe_load(parsed.parser.dump(parsed.config, skip_unset=False))
    return config


def text_config(config: dict[str, Any], vocab_size: int | None = None) -> DeepseekV41TextConfig:
    """The architecture of a configuration, with its vocabulary: `vocab_size`, or what the configuration promises."""
    text = DeepseekV41TextConfig(**config["model"]["config"])
    text.vocab_size = vocab_size or vocabulary(text, Namespace(**config["data"]))[0]
    return text


def _steps(study: Study, name: str, config: dict[str, Any]) -> int:
    """Optimizer steps of a run, which has to end with a validation."""
    trainer = config["trainer"]
    steps, interval = trainer["max_steps"], trainer["val_check_interval"]
    batches = steps * trainer["accumulate_grad_batches"]
    whole = isinstance(interval, int) and interval > 0 and batches % interval == 0
    if steps < 1 or not whole or trainer["check_val_every_n_epoch"] is not None:
        raise ValueError(
            f"{study.name}: {name}: a run has to end with a validation: trainer.max_steps (times "
            "accumulate_grad_batches) must be a positive multiple of trainer.val_check_interval, and "
            f"trainer.check_val_every_n_epoch null; got max_steps {steps}, val_check_interval {interval}, "
            f"check_val_every_n_epoch {trainer['check_val_every_n_epoch']}"
        )
    for option in ("fast_dev_run", "max_epochs", "max_time", "overfit_batches", "barebones"):
        if trainer[option] not in (None, False, 0, -1):
            raise ValueError(f"{study.name}: {name}: trainer.{option}: must be left alone, got {trainer[option]!r}")
    if not config["data"]["val_fraction"]:
        raise ValueError(f"{study.name}: {name}: data.val_fraction: must be above 0, or there is no loss to compare")
    return int(steps)


def _matched(variant: Variant, config: dict[str, Any], base: Cost) -> Matched | None:
    """Resize `config` in place, if the variant asks for it."""
    if variant.match == "none":
        return None
    field = FIELDS[variant.match]
    text, length = text_config(config), config["data"]["sequence_length"]

    def cost_with(value: int) -> Cost:
        return cost_of(DeepseekV41TextConfig(**text.fields() | {field: value}), length)

    lowest = text.num_experts_per_tok if variant.match == "parameters" else 1
    matched = resize(variant.match, getattr(text, field), lowest, base, cost_with)
    config["model"]["config"][field] = matched.after
    return matched


def _run(study: Study, planned: PlannedVariant, seed: int) -> Run:
    name = planned.variant.name
    config = copy.deepcopy(planned.config)
    config["seed_everything"] = config["data"]["seed"] = seed
    folder = study.output / "runs" / name / f"seed_{seed}"
    config["trainer"]["enable_progress_bar"] = False
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {
            "save_dir": str(folder.parent),
            "name": folder.name,
            "version": 0,
            "default_hp_metric": False,
        },
    }
    return Run(name, seed, folder, config, int(config["trainer"]["max_steps"]))


def runs_of(study: Study, planned: Sequence[PlannedVariant]) -> tuple[Run, ...]:
    """Every variant with every seed, seed by seed."""
    return tuple(_run(study, one, seed) for seed in study.seeds for one in planned)


def make_plan(study: Study) -> Plan:
    """Parse and check every variant, match those that ask for it.

    Raises:
        ValueError: A configuration does not parse, its runs would not end with a validation, or a variant has other
            data than the base.
    """
    planned: list[PlannedVariant] = []
    for variant in study.variants:
        config = configuration_of(study, variant)
        _steps(study, variant.name, config)
        # The logger is replaced, and seeds are the study's.
        config["trainer"]["logger"] = None
        config["seed_everything"] = config["data"]["seed"] = study.seeds[0]
        if planned:
            base = planned[0].config
            for option in ("max_steps", "accumulate_grad_batches"):
                if config["trainer"][option] != base["trainer"][option]:
                    raise ValueError(f"{study.name}: {variant.name}: trainer.{option} is not the base's")
            for option, value in config["data"].items():
                if value != base["data"][option]:
                    raise ValueError(
                        f"{study.name}: {variant.name}: data.{option} is {value!r}, in the base "
                        f"{base['data'][option]!r}; losses of other text, or in another order, do not compare"
                    )
        matched = _matched(variant, config, planned[0].cost) if planned else None
        cost = cost_of(text_config(config), config["data"]["sequence_length"])
        planned.append(PlannedVariant(variant, config, cost, matched))
    return Plan(study, tuple(planned), runs_of(study, planned))
