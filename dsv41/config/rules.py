"""Rules that bind several fields of the text configuration: sizes that divide, layer schedules, Engram rows.

Types and ranges of single fields are in `fields.py`, rotary settings in `rope.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsv41.config.checks import is_int, require
from dsv41.config.fields import ENGRAM_COLUMNS, ENGRAM_ROWS, LAYERS, VOCABULARY, shown
from dsv41.config.rope import require_rope


def check_together(config: Any, switches: Mapping[str, Sequence[str]]) -> None:
    """Check all fields of a `DeepseekV41TextConfig` together; fills in `engram_num_embeddings`.

    Args:
        config: Every field has its type and range.
        switches: Choices by field.

    Raises:
        ValueError: Begins with the name of the field that is wrong.
    """
    _check_sizes(config, switches)
    _check_schedule(config)
    _check_engram(config)


def _check_sizes(config: Any, switches: Mapping[str, Sequence[str]]) -> None:
    heads = config.num_key_value_heads
    require(is_int(heads) and heads == 1, "num_key_value_heads", f"must be 1, got {shown(heads)}")
    require(config.tie_word_embeddings is False, "tie_word_embeddings", "must be false: the head is a second matrix")
    score = config.scoring_func
    require(score == "sqrtsoftplus", "scoring_func", f"must be 'sqrtsoftplus', got {shown(score)}")
    for field, choices in switches.items():
        value = getattr(config, field)
        require(value in choices, field, f"must be one of {choices}, got {shown(value)}")
    require(
        config.residual != "plain" or config.hc_mult == 1,
        "hc_mult",
        f"must be 1 with residual 'plain', which has one stream, got {config.hc_mult}",
    )
    require(
        config.num_experts_per_tok <= config.n_routed_experts,
        "num_experts_per_tok",
        f"must be at most n_routed_experts={config.n_routed_experts}, got {config.num_experts_per_tok}",
    )
    require(
        config.num_attention_heads % config.o_groups == 0,
        "o_groups",
        f"must divide num_attention_heads={config.num_attention_heads}, got {config.o_groups}",
    )
    width = config.qk_rope_head_dim
    limit = min(config.head_dim, config.index_head_dim)
    require(
        is_int(width) and 2 <= width <= limit and width % 2 == 0,
        "qk_rope_head_dim",
        f"must be even, at least 2 and at most {limit} (the smaller of head_dim and index_head_dim), "
        f"got {shown(width)}",
    )
    require_rope(config.rope_parameters)


def _check_ids(config: Any, field: str, length: int) -> None:
    ids: Sequence[int] = getattr(config, field)
    require(isinstance(ids, list), field, f"must be a list of integers, got {shown(ids)}")
    for value in ids:
        require(is_int(value) and 0 <= value < length, field, f"ids must lie in 0..{length - 1}, got {shown(value)}")
    require(list(ids) == sorted(set(ids)), field, f"ids must ascend without repetition, got {list(ids)}")


def _check_schedule(config: Any) -> None:
    ratios = config.compress_ratios
    require(len(ratios) <= 2 * LAYERS, "compress_ratios", f"must have at most {2 * LAYERS} entries, got {len(ratios)}")
    require(
        len(ratios) >= config.num_hidden_layers,
        "compress_ratios",
        f"needs an entry for each of the {config.num_hidden_layers} layers, got {len(ratios)}",
    )
    _check_ids(config, "kv_source_layer_ids", len(ratios))
    _check_ids(config, "index_source_layer_ids", len(ratios))
    for field in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(config, field):
            require(ratios[layer] > 0, field, f"layer {layer} has compress_ratios 0 and cannot be a source")
    missing = sorted(set(config.kv_source_layer_ids) - set(config.index_source_layer_ids))
    require(not missing, "index_source_layer_ids", f"must contain the KV source layers {missing}")
    for layer in config.layers:
        if ratios[layer] == 0:
            continue
        sources = [source for source in config.kv_source_layer_ids if source <= layer]
        require(
            bool(sources) and ratios[sources[-1]] == ratios[layer],
            "kv_source_layer_ids",
            f"layer {layer} with compression ratio {ratios[layer]} has no KV source of that ratio at or before it "
            f"(nearest earlier source: {sources[-1] if sources else 'none'})",
        )
    _check_candidate_source(config, ratios)


def _check_candidate_source(config: Any, ratios: Sequence[int]) -> None:
    field, source = "candidate_source_layer_id", config.candidate_source_layer_id
    require(is_int(source) and source >= -1, field, f"must be -1 (off) or a layer, got {shown(source)}")
    if source == -1:
        return
    require(
        source in config.kv_source_layer_ids, field, f"{source} is no KV source; those are {config.kv_source_layer_ids}"
    )
    for later in config.kv_source_layer_ids:
        require(
            later <= source or later >= config.num_hidden_layers or ratios[later] == ratios[source],
            field,
            f"candidates of layer {source} (ratio {ratios[source]}) cannot serve the later KV source {later} "
            f"(ratio {ratios[later]})",
        )


def _check_engram(config: Any) -> None:
    _check_ids(config, "engram_layer_ids", len(config.compress_ratios))
    size = config.engram_max_ngram_size
    require(
        is_int(size) and 2 <= size <= 2**10,
        "engram_max_ngram_size",
        f"must be an integer of at most {2**10} and >= 2, got {shown(size)}",
    )
    columns = len(config.engram_layer_ids) * (size - 1) * config.engram_n_heads
    require(
        columns <= ENGRAM_COLUMNS,
        "engram_n_heads",
        f"at most {ENGRAM_COLUMNS} hash columns are possible, and {len(config.engram_layer_ids)} layers with "
        f"{size - 1} n-gram sizes of {config.engram_n_heads} heads are {columns}",
    )
    pad = config.engram_pad_token_id
    length = VOCABULARY if config.vocab_size is None or not config.engram_layer_ids else config.vocab_size
    require(
        is_int(pad) and 0 <= pad < length,
        "engram_pad_token_id",
        f"must lie in 0..{length - 1}, got {shown(pad)}",
    )
    needed = [sum(primes) for primes in config.rows_of_engram_primes()]
    rows: list[int] | None = getattr(config, "engram_num_embeddings", None)
    if rows is None:
        rows = config.engram_num_embeddings = needed
    require(isinstance(rows, list), "engram_num_embeddings", f"must be a list of integers or null, got {shown(rows)}")
    require(
        len(rows) == len(config.engram_layer_ids),
        "engram_num_embeddings",
        f"needs one entry per Engram layer {config.engram_layer_ids}, got {shown(rows)}",
    )
    for layer, have, need in zip(config.engram_layer_ids, rows, needed, strict=True):
        require(
            is_int(have) and need <= have <= ENGRAM_ROWS,
            "engram_num_embeddings",
            f"layer {layer} needs at least {need} rows (the sum of its primes) and at most {ENGRAM_ROWS}, "
            f"got {shown(have)}",
        )
