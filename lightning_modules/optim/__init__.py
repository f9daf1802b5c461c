"""Optimizers: parameter groups, row-wise Adam for tables, Muon, schedule, state. Re-exports the public names."""

from lightning_modules.optim.groups import OptimizerConfig, build_optimizer
from lightning_modules.optim.schedule import ScheduleConfig, build_schedule

__all__ = ["OptimizerConfig", "ScheduleConfig", "build_optimizer", "build_schedule"]
