"""Types and ranges of configuration fields, as data.

Upper limits are far above any trained model, so that a damaged or hostile file ends with the name of a field, not with
the allocator's error.
"""

from __future__ import annotations

import os
import reprlib
from dataclasses import dataclass
from typing import Any

from dsv41.config.checks import is_int, is_real, require

# Ceilings of sizes. Positions and ids fit into 32 bits.
WIDTH = 2**20
HEADS = 2**16
LAYERS = 2**12
POSITIONS = 2**31 - 1
VOCABULARY = 2**24
ENGRAM_BUCKETS = 2**30
ENGRAM_ROWS = 2**36
# Columns of all Engram hashes together: each needs a prime, which takes milliseconds to find near the ceiling.
ENGRAM_COLUMNS = 2**13

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 3, 12, 8, 80, 80


def shown(value: Any) -> str:
    """`repr` of a value, cut to a line: a file may hold a text of megabytes or an integer of a million digits."""
    try:
        return _SHORT.repr(value).replace("\n", " ")
    except Exception:  # Python refuses to print integers of more than 4,300 digits
        return f"a {type(value).__name__} too long to show"


@dataclass(frozen=True)
class Whole:
    """Integers from `low` to `high`; `null` is the meaning of null, "" if null is not allowed."""

    low: int
    high: int
    null: str = ""

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        require(
            (value is None and bool(self.null)) or (is_int(value) and self.low <= value <= self.high),
            field,
            f"must be an integer of at least {self.low} and at most {self.high}"
            f"{self.null and f', or null {self.null}'}, got {shown(value)}",
        )


@dataclass(frozen=True)
class Real:
    """Finite numbers from `low` (or above it) to `high` (or below it)."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        inside = is_real(value) and self.low <= value <= self.high
        inside = inside and not (self.above and value == self.low) and not (self.below and value == self.high)
        low = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        high = f"below {self.high:g}" if self.below else f"at most {self.high:g}"
        require(inside, field, f"must be a number {low} and {high}, got {shown(value)}")


@dataclass(frozen=True)
class Flag:
    """Booleans; YAML and JSON texts such as 'true' are not."""

    null: bool = False

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        valid = isinstance(value, bool) or (self.null and value is None)
        require(valid, field, f"must be true or false{' or null' if self.null else ''}, got {shown(value)}")


@dataclass(frozen=True)
class Text:
    """Strings; from Python also paths."""

    null: bool = False

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        valid = isinstance(value, str | os.PathLike) or (self.null and value is None)
        require(valid, field, f"must be a text{' or null' if self.null else ''}, got {shown(value)}")


@dataclass(frozen=True)
class Wholes:
    """Lists of integers from `low` to `high`."""

    low: int
    high: int

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        require(isinstance(value, list), field, f"must be a list of integers, got {shown(value)}")
        for entry in value:
            require(
                is_int(entry) and self.low <= entry <= self.high,
                field,
                f"entries must be integers of at least {self.low} and at most {self.high}, got {shown(entry)}",
            )


@dataclass(frozen=True)
class Texts:
    """Lists of strings, or null."""

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        valid = value is None or (isinstance(value, list) and all(isinstance(entry, str) for entry in value))
        require(valid, field, f"must be a list of texts or null, got {shown(value)}")


@dataclass(frozen=True)
class Group:
    """JSON objects, or null; `whole_keys` requires integer keys, which JSON writes as strings."""

    whole_keys: bool = False

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        valid = value is None or isinstance(value, dict)
        require(valid, field, f"must be a group of keys and values or null, got {shown(value)}")
        for key in value if value is not None and self.whole_keys else ():
            valid = is_int(key) or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10)
            require(valid, field, f"keys must be integers, got {shown(key)}")


Rule = Whole | Real | Flag | Text | Wholes | Texts | Group

_COUNT = Whole(1, HEADS)
_WIDE = Whole(1, WIDTH)
_LONG = Whole(1, POSITIONS)
_ID = Whole(0, POSITIONS, "for none")

# Fields of the text model; the others have a rule together with further fields (see `rules.py`).
TEXT_RULES: dict[str, Rule] = {
    "hidden_size": _WIDE,
    "moe_intermediate_size": _WIDE,
    "num_hidden_layers": Whole(1, LAYERS),
    "num_attention_heads": _COUNT,
    "head_dim": _COUNT,
    "q_lora_rank": _WIDE,
    "o_lora_rank": _WIDE,
    "o_groups": _COUNT,
    "max_position_embeddings": _LONG,
    "n_routed_experts": _COUNT,
    "n_shared_experts": _COUNT,
    "num_experts_per_tok": _COUNT,
    "sliding_window": _LONG,
    "index_n_heads": _COUNT,
    "index_head_dim": _COUNT,
    "index_topk": _LONG,
    "candidate_topk_blocks": _LONG,
    "candidate_block_size": _LONG,
    "hc_mult": Whole(1, 2**10),
    "hc_sinkhorn_iters": Whole(1, 2**16),
    "engram_vocab_size": Whole(1, ENGRAM_BUCKETS),
    "engram_n_heads": Whole(1, 2**10),
    "engram_head_dim": _COUNT,
    "vocab_size": Whole(1, VOCABULARY, "to take the tokenizer's"),
    "engram_compressed_vocab_size": Whole(1, VOCABULARY, "to take the tokenizer's"),
    "swiglu_limit": Real(0, 1e6),
    "rms_norm_eps": Real(0, 1),
    "initializer_range": Real(0, 100),
    "hc_eps": Real(0, 1),
    "router_bias_update_rate": Real(0, 1e6),
    "router_balance_loss_weight": Real(0, 1e6),
    # Powers of the base are the frequencies; of 1, YaRN's logarithm is 0.
    "rope_theta": Real(1, 1e12, above=True),
    "compress_rope_theta": Real(1, 1e12, above=True),
    "routed_scaling_factor": Real(0, 1e6, above=True),
    "norm_topk_prob": Flag(),
    "quantized_caches": Flag(),
    "compress_ratios": Wholes(0, HEADS),
    # Metadata.
    "hidden_act": Text(),
    "topk_method": Text(),
    "attention_bias": Flag(),
    "attention_dropout": Real(0, 1),
    "use_cache": Flag(),
    "bos_token_id": _ID,
    "eos_token_id": _ID,
    "pad_token_id": _ID,
    "num_nextn_predict_layers": Whole(0, LAYERS),
    "dspark_block_size": Whole(0, POSITIONS),
    "dspark_noise_token_id": _ID,
    "dspark_target_layer_ids": Wholes(0, POSITIONS),
    "dspark_markov_rank": Whole(0, POSITIONS),
    "dspark_n_routed_experts": Whole(0, POSITIONS),
    "dspark_num_experts_per_tok": Whole(0, POSITIONS),
}

VISION_RULES: dict[str, Rule] = {
    "hidden_size": _WIDE,
    "num_attention_heads": _COUNT,
    "intermediate_size": _WIDE,
    "patch_size": _COUNT,
    "downsample_ratio": _COUNT,
    "num_hidden_layers": Whole(0, LAYERS),
    "rope_theta": Real(1, 1e12, above=True),
    "max_image_tokens": _LONG,
    "min_pixels": Whole(0, POSITIONS),
}

# Keys that transformers gives a meaning in any configuration, and that change nothing in the model.
BASE_RULES: dict[str, Rule] = {
    "transformers_version": Text(null=True),
    "architectures": Texts(),
    "output_hidden_states": Flag(null=True),
    "output_attentions": Flag(null=True),
    "return_dict": Flag(null=True),
    "is_encoder_decoder": Flag(null=True),
    "chunk_size_feed_forward": Whole(0, POSITIONS),
    "id2label": Group(whole_keys=True),
    "label2id": Group(),
    "num_labels": Whole(0, WIDTH, "for none"),
    "problem_type": Text(null=True),
    "name_or_path": Text(null=True),
    "_name_or_path": Text(null=True),
    "_commit_hash": Text(null=True),
    "attn_implementation": Text(null=True),
    "experts_implementation": Text(null=True),
    "auto_map": Group(),
    "quantization_config": Group(),
}
for _name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # repeated beside the text model
    BASE_RULES[_name] = TEXT_RULES[_name]


def check_fields(rules: dict[str, Rule], owner: Any) -> None:
    """Check the attributes of `owner` that have a rule; ValueError begins with the name of the first that is wrong."""
    for field, rule in rules.items():
        rule.check(field, getattr(owner, field))


def check_base_keys(given: dict[str, Any], kind: type) -> None:
    """Check keys passed on to transformers' base class, which sets any key as an attribute.

    Args:
        given: Keys and values beside the fields.
        kind: The configuration's class.

    Raises:
        ValueError: A value has the wrong type, or a key would replace a method; begins with the key.
    """
    for key, value in given.items():
        if key in BASE_RULES:
            BASE_RULES[key].check(key, value)
        elif key == "per_layer_config":
            require(value is None, key, "is not read: layers differ by compress_ratios and the lists of layer ids")
        elif key not in ("dtype", "torch_dtype"):
            taken = hasattr(kind, key) or key == "self" or key.startswith("__")
            require(not taken, key, f"no field of a configuration, but a name that {kind.__name__} itself uses")


def require_shallow(value: Any, deepest: int = 32) -> None:
    """Raise ValueError naming the key under which plain values are nested deeper than `deepest` levels."""
    waiting = [(value, 0, "")]
    while waiting:
        found, depth, key = waiting.pop()
        require(depth <= deepest, key, f"nested deeper than {deepest} levels")
        if isinstance(found, dict):
            waiting += [(inner, depth + 1, key or str(name)) for name, inner in found.items()]
        elif isinstance(found, list):
            waiting += [(inner, depth + 1, key) for inner in found]
