"""Numbers of a run for the model card: from the checkpoint itself and the run's saved configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from dsv41.weights.card import RunNumbers
from lightning_modules.checkpoint import rule as checkpoint_rule
from lightning_modules.checkpoint.find import CONFIG
from lightning_modules.options.safe_yaml import load_plain


def saved_configuration(run: Path) -> dict[str, Any]:
    """The run's ``config.yaml``; empty if there is none, as for a checkpoint that was copied elsewhere.

    Raises:
        ValueError: It is no YAML; names it.
    """
    file = run / CONFIG
    try:
        loaded = load_plain(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None
    return loaded if isinstance(loaded, dict) else {}


def seed_of(config: dict[str, Any]) -> int | None:
    """The run's seed; None if its configuration does not say a number."""
    seed = config.get("seed_everything")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _optimizer_name(optimizer: dict[str, Any], engram: bool) -> str | None:
    """How the run has learned, from its `OptimizerConfig`; checkpoints from before there was a choice say AdamW."""
    if not optimizer:
        return None
    names = ["AdamW"]
    if optimizer.get("matrices") == "muon":
        names.append("Muon for hidden matrices")
    if engram and optimizer.get("tables") == "rows":
        names.append("Adam by rows for Engram tables")
    return ", ".join(names)


def run_numbers(meta: dict[str, Any], run: Path) -> RunNumbers:
    """What is known of a checkpoint's run.

    Validation numbers are taken only if they were measured at the checkpoint's own step.

    Args:
        meta: Plain values of the checkpoint.
        run: The run's directory.
    """
    config = saved_configuration(run)
    data, trainer = config.get("data") or {}, config.get("trainer") or {}
    about = meta[checkpoint_rule.KEY]
    hyper = meta.get("hyper_parameters", {})
    optimizer = hyper.get("optimizer") or {}
    measured = about.get("metrics", {}) if about.get("validated_at") == meta.get("global_step") else {}
    measured = {name: value for name, value in measured.items() if math.isfinite(value)}  # NaN: nothing was predicted
    source = data.get("source")
    return RunNumbers(
        data=", ".join(source) if isinstance(source, list) else source,
        steps=meta.get("global_step"),
        tokens=about.get("tokens_seen"),
        batch_size=data.get("batch_size"),
        sequence_length=data.get("sequence_length"),
        validation_loss=measured.get("val/loss"),
        validation_bits_per_byte=measured.get("val/bits_per_byte"),
        unigram_loss=measured.get("val/unigram_entropy"),
        seed=seed_of(config),
        precision=trainer.get("precision") or "32-true" if trainer else None,
        optimizer=_optimizer_name(optimizer, bool(about["text_config"].get("engram_layer_ids"))),
        learning_rate=optimizer.get("lr"),
        weight_decay=optimizer.get("weight_decay"),
        software=f"lightning {trained_with}" if (trained_with := meta.get("pytorch-lightning_version")) else None,
    )
