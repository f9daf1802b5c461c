"""Names of the numbers that a run of this project logs, which callbacks may watch."""

_TRAIN = ("loss", "tokens", "grad_norm", "indexer_loss", "balance_loss", "peak_memory_mb")
_VAL = ("loss", "perplexity", "bits_per_byte", "unigram_entropy")
_WITHIN = (
    *("expert_imbalance", "expert_entropy", "experts/imbalance", "experts/imbalance_worst"),
    *("engram_gate", "engram_gate_open", "engram_collisions", "engram_collisions_chance", "engram_rows_used"),
    *("indexer_recall", "indexer_recall_chance", "indexer_recall_best", "sinkhorn_residual"),
    *("forward_gain", "forward_gain_worst", "backward_gain", "backward_gain_worst"),
)

METRICS = (
    *(f"train/{name}" for name in _TRAIN),
    *(f"val/{name}" for name in _VAL),
    *(f"within/{name}" for name in _WITHIN),
    *(f"test/{name}" for name in ("loss", "perplexity", "bits_per_byte")),
    *("train/lr/", "within/grad_norm/", "within/indexer_recall/"),
)
"""Every number; a name that ends with a slash stands for all that begin with it."""
