"""Numbers of a training run for the model card, and what its metadata makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from huggingface_hub import EvalResult


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """Numbers of the run that trained a model. None is unknown, and not in the card.

    Attributes:
        data: Name of the text; "hf:NAME" or "hf:NAME:CONFIG" is a dataset of Hugging Face.
        steps: Optimizer steps.
        tokens: Tokens seen, repetitions counted.
        batch_size: Rows of a step, of all processes together.
        sequence_length: Tokens of a row.
        validation_loss: Nats per predicted token.
        validation_bits_per_byte: The same per byte of text.
        test_loss: Nats per predicted token.
        test_bits_per_byte: The same per byte of text.
        unigram_loss: Entropy of the validation tokens without context, in nats per token, to compare with.
        seed: Of the initial values and the order of the data.
        precision: As the trainer names it, such as "32-true" or "bf16-mixed".
        optimizer: Its name, such as "AdamW".
        learning_rate: The peak.
        weight_decay: Of the optimizer.
        machine: What it ran on, such as "2 cores of an AMD EPYC".
        software: Versions, such as "torch 2.13.0, lightning 2.6.6".
        seconds: Wall time of the training.
        date: Of its end, "2026-01-31".

    Raises:
        ValueError: A number is not finite or below 0, or a text is empty; the field is named.
    """

    data: str | None = None
    steps: int | None = None
    tokens: int | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    validation_loss: float | None = None
    validation_bits_per_byte: float | None = None
    test_loss: float | None = None
    test_bits_per_byte: float | None = None
    unigram_loss: float | None = None
    seed: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    machine: str | None = None
    software: str | None = None
    seconds: float | None = None
    date: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, str) and not value.strip():
                raise ValueError(f"{field.name}: must not be empty; None leaves it out")
            if not isinstance(value, str) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}: must be finite and at least 0, got {value!r}; None leaves it out")

    @property
    def evaluations(self) -> list[tuple[str, float, float | None]]:
        """Split, loss, bits per byte of each measured split."""
        both = (
            ("validation", self.validation_loss, self.validation_bits_per_byte),
            ("test", self.test_loss, self.test_bits_per_byte),
        )
        return [(split, loss, per_byte) for split, loss, per_byte in both if loss is not None]

    @property
    def _sources(self) -> list[str]:
        return [] if self.data is None else [part.strip() for part in self.data.split(",") if part.strip()]

    @property
    def hub_datasets(self) -> list[str]:
        """Names of the datasets of Hugging Face among the sources."""
        return [source.split(":")[1] for source in self._sources if source.startswith("hf:")]

    @property
    def plain_data(self) -> str | None:
        """The sources without the folders that they were in, which are private."""
        names = [
            source.removeprefix("hf:").replace(":", ", ") if source.startswith("hf:") else Path(source).name
            for source in self._sources
        ]
        return ", ".join(names) or None

    @property
    def metadata_results(self) -> list[EvalResult]:
        """Measured numbers in huggingface_hub's form; none without the name of their data."""
        name = self.plain_data
        if name is None:
            return []
        kind = self.hub_datasets[0] if self.hub_datasets else name
        return [
            EvalResult(
                task_type="text-generation",
                dataset_type=kind,
                dataset_name=name,
                dataset_split=split,
                metric_type=metric,
                metric_name=title,
                metric_value=round(value, 4),
            )
            for split, loss, per_byte in self.evaluations
            for metric, title, value in (
                ("loss", "loss, nats per token", loss),
                ("bits_per_byte", "bits per byte", per_byte),
            )
            if value is not None
        ]
