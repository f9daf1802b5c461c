"""Engram memory (ARCHITECTURE 6): token map, n-gram hash, table of rows, gated layer. Re-exports the public names."""

from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.engram.layer import DeepseekV41Engram, OpenEngram, build_engram, compile_engram_gate, engram_gates
from dsv41.engram.token_map import compressed_token_map

__all__ = [
    "DeepseekV41Engram",
    "DeepseekV41NgramHash",
    "OpenEngram",
    "build_engram",
    "compile_engram_gate",
    "compressed_token_map",
    "engram_gates",
]
