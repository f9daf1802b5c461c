"""A run that is stopped and resumed trains on the same rows in the same order as one that is not."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_modules.data import TextDataModule

TOY = Path(__file__).with_name("toy.py")
_toy = runpy.run_path(str(TOY))
Recorder, make_trainer = _toy["Recorder"], _toy["make_trainer"]

pytestmark = [
    # Lightning 2.6 uses a name that torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # Lightning advises to use more workers; whether it does depends on the machine.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

Steps = list[tuple[int, list[int]]]


class SaveOnce(Callback):
    """Writes a checkpoint when a hook is called for the n-th time.

    Args:
        hook: Name of the hook.
        number: Which call, from 1.
        path: The checkpoint.
    """

    def __init__(self, hook: str, number: int, path: Path) -> None:
        self.left = number

        def save(trainer: L.Trainer, *_: object) -> None:
            if trainer.sanity_checking:
                return
            self.left -= 1
            if self.left == 0:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def _fit(
    data: TextDataModule, *callbacks: Callback, early: bool = False, ckpt: Path | None = None, **limits: Any
) -> Steps:
    model = Recorder(early=early)
    make_trainer(*callbacks, **limits).fit(model, data, ckpt_path=ckpt)
    return model.steps  # type: ignore[no-any-return]


EPOCHS = {"max_epochs": 3}
STEPS = {"max_steps": 25, "max_epochs": -1}


@pytest.mark.parametrize(
    ("limits", "hook", "number"),
    [
        (EPOCHS, "on_train_batch_end", 1),
        (EPOCHS, "on_train_batch_end", 24),
        (EPOCHS, "on_train_epoch_end", 1),
        (EPOCHS, "on_validation_end", 2),
        (STEPS, "on_train_batch_end", 5),
        (STEPS, "on_train_epoch_end", 1),
        (STEPS, "on_train_epoch_end", 2),
        (STEPS | {"limit_val_batches": 0}, "on_train_epoch_end", 1),
        (EPOCHS | {"limit_train_batches": 5}, "on_train_batch_end", 7),
        ({"max_steps": 12, "limit_train_batches": 5, "limit_val_batches": 0}, "on_train_epoch_end", 1),
        (EPOCHS | {"val_check_interval": 3}, "on_validation_end", 2),
        (EPOCHS | {"accumulate_grad_batches": 2}, "on_train_batch_end", 6),
        ({"max_steps": 12, "accumulate_grad_batches": 2, "max_epochs": -1}, "on_train_epoch_end", 1),
    ],
)
def test_resumed_run_goes_on_at_the_next_batch(
    make_data: Callable[..., TextDataModule],
    tmp_path: Path,
    limits: dict[str, Any],
    hook: str,
    number: int,
) -> None:
    path = tmp_path / "saved.ckpt"
    unbroken = _fit(make_data(sequence_length=40), SaveOnce(hook, number, path), **limits)
    progress = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = progress["total"]["processed"]
    assert 0 < done < len(unbroken)
    assert _fit(make_data(sequence_length=40), early=True, ckpt=path, **limits) == unbroken[done:]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("workers", [0, 2])
def test_run_that_is_killed_inside_an_epoch(
    make_data: Callable[..., TextDataModule], corpus_dir: Path, tmp_path: Path, workers: int
) -> None:
    unbroken = _fit(make_data(test_fraction=0.05), max_epochs=3)
    epoch = len(unbroken) // 3
    die_at = 3 * (epoch // 3 + 3) + 2  # Inside the second epoch, two steps after a checkpoint.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(TOY), str(tmp_path), str(corpus_dir), str(workers), str(die_at)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    lines = (tmp_path / "killed.log").read_text().splitlines()
    assert lines == [repr(step) for step in unbroken[:die_at]]
    last = max(int(file.stem.removeprefix("step=")) for file in tmp_path.glob("step=*.ckpt"))
    assert epoch < last == die_at - 2 < 2 * epoch
    data = make_data(test_fraction=0.05, num_workers=workers)
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    assert _fit(data, saving, early=workers > 0, ckpt=tmp_path / f"step={last}.ckpt", max_epochs=3) == unbroken[last:]


def test_second_fit_of_a_trainer_goes_on_with_the_next_epoch(make_data: Callable[..., TextDataModule]) -> None:
    unbroken = _fit(make_data(), max_epochs=3)
    model, data, trainer = Recorder(), make_data(), make_trainer(max_epochs=1)
    trainer.fit(model, data)
    assert model.steps == unbroken[: len(unbroken) // 3]
    trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs + 1
    trainer.fit(model, data)
    assert model.steps == unbroken[: 2 * len(unbroken) // 3]


def test_new_trainer_starts_again_with_the_same_data_module(make_data: Callable[..., TextDataModule]) -> None:
    data = make_data()
    assert _fit(data, max_epochs=2) == _fit(data, max_epochs=2)


def test_overfitting_repeats_the_same_batches(make_data: Callable[..., TextDataModule]) -> None:
    steps = _fit(make_data(), max_epochs=2, overfit_batches=3, limit_val_batches=0)
    assert steps[:3] == steps[3:]


def test_loader_leaves_the_global_random_numbers_alone(make_data: Callable[..., TextDataModule]) -> None:
    data = make_data()
    data.setup("fit")
    torch.manual_seed(1)
    list(data.train_dataloader())
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert drawn == torch.rand(1)


@pytest.fixture
def checkpoint(make_data: Callable[..., TextDataModule], tmp_path: Path) -> Path:
    path = tmp_path / "saved.ckpt"
    _fit(make_data(), SaveOnce("on_train_batch_end", 3, path), max_steps=4)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, "batch_size is 3 here and 4 in the checkpoint"),
        ({"sequence_length": 17}, "sequence_length is 17 here and 16 in the checkpoint"),
        ({"seed": 7}, "seed is 7 here and 0 in the checkpoint"),
        ({"vocab_size": 290}, "hash of the tokenizer is '[0-9a-f]{64}' here and '[0-9a-f]{64}' in the checkpoint"),
        ({"max_documents": 30}, "hash of the train documents is '[0-9a-f]{64}' here"),
    ],
)
def test_resuming_with_other_rows_or_order_is_refused(
    make_data: Callable[..., TextDataModule], checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    model = Recorder()
    with pytest.raises(ValueError, match=f"cannot resume at the next batch: .*{message}"):
        make_trainer(max_steps=8).fit(model, make_data(**changes), ckpt_path=checkpoint)
    assert model.steps == []


def test_validating_a_checkpoint_on_other_data_is_possible(
    make_data: Callable[..., TextDataModule], checkpoint: Path
) -> None:
    data = make_data(batch_size=3, seed=7, max_documents=30)
    (result,) = make_trainer().validate(Recorder(), data, ckpt_path=checkpoint, verbose=False)
    assert result["rows"] > 0
