"""One concern per file. Which of them run by default is decided in `lightning_modules.cli`."""

from lightning_modules.callbacks.baseline import UnigramBaseline
from lightning_modules.callbacks.boards import RunPages
from lightning_modules.callbacks.final_validation import FinalValidation
from lightning_modules.callbacks.interrupt import GracefulInterrupt
from lightning_modules.callbacks.peak_memory import PeakMemory
from lightning_modules.callbacks.predictions import PredictionFile
from lightning_modules.callbacks.report import RunReport
from lightning_modules.callbacks.run_clock import StepLabels
from lightning_modules.callbacks.summary import PartSummary
from lightning_modules.callbacks.throughput import TokenThroughput
from lightning_modules.callbacks.update_ratio import UpdateRatio
from lightning_modules.checkpoint.callbacks import BestCheckpoint, LatestCheckpoint
from lightning_modules.insight.engram_buckets import EngramMemory
from lightning_modules.insight.engram_gates import EngramGates
from lightning_modules.insight.expert_load import ExpertLoad
from lightning_modules.insight.mixers import StreamMixers
from lightning_modules.insight.selection import IndexerRecall

__all__ = [
    "BestCheckpoint",
    "EngramGates",
    "EngramMemory",
    "ExpertLoad",
    "FinalValidation",
    "GracefulInterrupt",
    "IndexerRecall",
    "LatestCheckpoint",
    "PartSummary",
    "PeakMemory",
    "PredictionFile",
    "RunPages",
    "RunReport",
    "StepLabels",
    "StreamMixers",
    "TokenThroughput",
    "UnigramBaseline",
    "UpdateRatio",
]
