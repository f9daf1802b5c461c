"""One concern per file. Which of them run by default is decided in `lightning_modules.cli`."""

from lightning_modules.callbacks.baseline import UnigramBaseline
from lightning_modules.callbacks.checkpoint import BestCheckpoint, LatestCheckpoint
from lightning_modules.callbacks.engram_gates import EngramGates
from lightning_modules.callbacks.engram_memory import EngramMemory
from lightning_modules.callbacks.expert_load import ExpertLoad
from lightning_modules.callbacks.indexer_recall import IndexerRecall
from lightning_modules.callbacks.interrupt import GracefulInterrupt
from lightning_modules.callbacks.peak_memory import PeakMemory
from lightning_modules.callbacks.predictions import PredictionFile
from lightning_modules.callbacks.stream_mixers import StreamMixers
from lightning_modules.callbacks.summary import PartSummary
from lightning_modules.callbacks.throughput import TokenThroughput
from lightning_modules.callbacks.update_ratio import UpdateRatio

__all__ = [
    "BestCheckpoint",
    "EngramGates",
    "EngramMemory",
    "ExpertLoad",
    "GracefulInterrupt",
    "IndexerRecall",
    "LatestCheckpoint",
    "PartSummary",
    "PeakMemory",
    "PredictionFile",
    "StreamMixers",
    "TokenThroughput",
    "UnigramBaseline",
    "UpdateRatio",
]
