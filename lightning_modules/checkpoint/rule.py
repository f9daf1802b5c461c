"""What a checkpoint decides and what the command line decides.

The rule: a checkpoint never changes what you typed. What determines the function must be equal in both, or loading is
refused with both values: every architecture field (apart from metadata, initial values and the length limit) and the
tokenizer's map. All else follows the command line, differences are listed; the data module refuses on its own account
what would make "continue with the next batch" untrue.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from dsv41.config import METADATA_FIELDS, TRAINING_FIELDS, DeepseekV41TextConfig

KEY = "dsv41"
HARMLESS_FIELDS = frozenset(METADATA_FIELDS + TRAINING_FIELDS) | {"initializer_range", "max_position_embeddings"}


class CheckpointMismatchError(ValueError):
    """The checkpoint and the command line describe different functions."""


def architecture(config: DeepseekV41TextConfig, map_fingerprint: str | None) -> dict[str, Any]:
    """What a checkpoint records about the function: plain values only."""
    return {"text_config": config.fields(), "token_map": map_fingerprint}


def require_same_function(checkpoint: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare `architecture` of a checkpoint with that of the model about to load it.

    Raises:
        CheckpointMismatchError: Not a checkpoint of this project, or different; the message has both values.
    """
    stored = checkpoint.get(KEY)
    if not isinstance(stored, dict) or "text_config" not in stored:
        raise CheckpointMismatchError(
            "ckpt_path: not a checkpoint of a DeepSeek-V4.1 task (it does not say which architecture it holds)"
        )
    there, own = stored["text_config"], here["text_config"]
    different = [
        f"{name}: checkpoint {there.get(name)!r}, command line {own.get(name)!r}"
        for name in sorted(set(there) | set(own))
        if name not in HARMLESS_FIELDS and there.get(name) != own.get(name)
    ]
    if different:
        raise CheckpointMismatchError(
            "ckpt_path: the checkpoint holds another architecture than the command line asks for:\n  "
            + "\n  ".join(different)
        )
    if stored.get("token_map") != here["token_map"]:
        raise CheckpointMismatchError(
            "ckpt_path: the checkpoint's Engram hashes another tokenizer than data.tokenizer gives "
            f"(token map {stored.get('token_map')} there, {here['token_map']} here), though their sizes agree"
        )


def differences(stored: Any, here: Any, prefix: str = "") -> list[str]:
    """Leaves of two nested dictionaries that differ, as ``path: stored -> here``."""
    if isinstance(stored, dict) and isinstance(here, dict):
        found: list[str] = []
        for key in sorted(set(stored) | set(here), key=str):
            found += differences(stored.get(key), here.get(key), f"{prefix}{key}.")
        return found
    return [] if stored == here else [f"{prefix.rstrip('.')}: {stored!r} -> {here!r}"]


def follow_command_line(checkpoint: dict[str, Any], settings: dict[str, dict[str, Any]]) -> None:
    """Overwrite, in a checkpoint about to be restored, the optimizer settings that the command line sets.

    torch restores an optimizer's settings together with its state, which would silently undo a changed learning rate
    or weight decay. The current rate follows from the schedule: see `apply_schedules`.

    Args:
        checkpoint: Lightning checkpoint, changed in place.
        settings: `group_settings` of the command line.
    """
    for optimizer in checkpoint.get("optimizer_states", []):
        for index, group in enumerate(optimizer["param_groups"]):
            own = settings.get(group.get("name"))
            if own is None:
                continue
            group.update(own)
            for schedule in checkpoint.get("lr_schedulers", []):
                schedule["base_lrs"][index] = own["initial_lr"]


def apply_schedules(schedules: list[Any]) -> None:
    """Set every group's learning rate to what its schedule says for the steps done so far.

    After a resume the stored rate is the one of the old schedule; without a change this sets the same number again.
    """
    for schedule in schedules:
        if not isinstance(schedule, LambdaLR):
            continue  # of a subclass of the task: no function of the step alone
        rates = [
            base * factor(schedule.last_epoch)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates
