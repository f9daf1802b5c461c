"""A model that writes down the rows it is trained on, run by tests and, as a script, in a process that is killed."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_modules.data import TextDataModule


class Recorder(L.LightningModule):
    """Records each step's batch number and rows, in memory and in a file.

    Args:
        early: Read ``trainer.estimated_stepping_batches`` in ``configure_optimizers``, which sets up the train loader
            before the checkpoint's counters are restored.
        log: File that gets a line per step, or None.
        die_at: Kill the process at the start of this step, counted from 0, or never.
    """

    def __init__(self, early: bool = False, log: Path | None = None, die_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.early = early
        self.log_file = log
        self.die_at = die_at
        self.steps: list[tuple[int, list[int]]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if len(self.steps) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps.append((batch_idx, batch["row_id"].tolist()))
        if self.log_file is not None:
            with self.log_file.open("a") as out:
                out.write(f"{self.steps[-1]!r}\n")
        return self.layer(batch["input_ids"].float().mean(1, keepdim=True)).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("rows", float(len(batch["row_id"])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:
            _ = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 1e-6)


def make_trainer(*callbacks: Callback, **settings: Any) -> L.Trainer:
    """A silent trainer on one CPU, without checkpoints unless a callback writes them."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return L.Trainer(
        accelerator="cpu", devices=1, enable_checkpointing=saving, callbacks=list(callbacks), **quiet, **settings
    )


def main(folder: Path, source: str, workers: int, die_at: int) -> None:
    """Train with a checkpoint every third step, until the process kills itself."""
    data = TextDataModule(
        source, vocab_size=300, sequence_length=16, batch_size=4, num_workers=workers, val_fraction=0.15
    )
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(checkpoint, max_epochs=3)
    trainer.fit(Recorder(early=True, log=folder / "killed.log", die_at=die_at), data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
