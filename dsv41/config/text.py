"""Text configuration of DeepSeek-V4.1, under the field names of the released ``config.json``.

Every rule is checked once, before a single tensor exists; an error starts with the name of the offending field. The
meaning of a field is in the docstring of `DeepseekV41TextConfig`.
"""

# No postponed annotations: jsonargparse resolves those of a class together with those of transformers' base class, one
# of which cannot be resolved, and then takes any value for every field.
import copy
import inspect
from typing import Any

from transformers import PretrainedConfig

from dsv41.config.checks import refuse_other_model, reject_misspelt, require, require_dtypes
from dsv41.config.fields import TEXT_RULES, check_base_keys, check_fields
from dsv41.config.rope import RELEASED_YARN, RopeSettings, merged_rope
from dsv41.config.rules import check_together
from dsv41.primes import engram_primes

RELEASED_COMPRESS_RATIOS = [0, 0] + [2] * 18 + [1] * 20 + [0] * 3
RELEASED_KV_SOURCES = [2, 8, 14, 20]
RELEASED_INDEX_SOURCES = [2, 8, 14, 20, 24, 28, 32, 36]

RELEASED_NOISE_TOKEN = 128799
# Switches of the architecture and their choices; the first one is the release.
SWITCHES: dict[str, tuple[str, ...]] = {
    "residual": ("mhc", "hyper_connections", "plain"),
    "attention": ("csa2", "window", "full"),
    "indexer": ("frozen", "learned"),
    "engram_gate": ("learned", "open"),
    "engram_token_map": ("compressed", "raw"),
}
# Fields that affect training only.
TRAINING_FIELDS = ("indexer", "router_bias_update_rate", "router_balance_loss_weight")
# Label of a position that is not predicted (the convention of torch and transformers).
IGNORE_INDEX = -100

# Keys that the release or transformers writes into every config.json, without influence on the function.
METADATA_FIELDS = (
    "num_key_value_heads",
    "hidden_act",
    "attention_bias",
    "attention_dropout",
    "use_cache",
    "topk_method",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "num_nextn_predict_layers",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)


# Keys of PretrainedConfig itself that look like fields of ours to the misspelling check.
BASE_FIELDS_OF_OURS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
BASE_KEYS = frozenset(inspect.signature(PretrainedConfig).parameters) | {"torch_dtype", "model_type", "auto_map"}


class DeepseekV41TextConfig(PretrainedConfig):
    """Configuration of the text model (ARCHITECTURE 1). Defaults are the released values.

    Args:
        vocab_size: Number of token ids. None takes the length of the tokenizer (see `for_tokenizer`).
        hidden_size: Width H of one residual stream.
        moe_intermediate_size: Inner width of every routed expert and, per shared expert, of the shared one.
        num_hidden_layers: Number of blocks. The per-layer schedules may be longer: a shorter model is a prefix.
        num_attention_heads: Query heads; must be divisible by `o_groups`.
        num_key_value_heads: Always 1: keys and values are one tensor shared by all heads.
        head_dim: Width D of a head.
        qk_rope_head_dim: Number of last channels of a head (and of an index head) that rotate; even.
        q_lora_rank: Width of the query latent, which the indexer reads too.
        o_lora_rank: Width of the output projection's latent, per group.
        o_groups: Groups of heads in the output projection.
        hidden_act: Metadata; the experts use SiLU.
        swiglu_limit: Clamp L of the experts: ``silu(min(gate, L)) * clamp(up, -L, L)``; 0 switches it off.
        rms_norm_eps: Epsilon of RMSNorm, of the mHC coefficients and of the Engram gate.
        attention_bias: Metadata; there are no biases.
        attention_dropout: Metadata; there is no dropout.
        initializer_range: Standard deviation of freshly drawn weights.
        use_cache: Metadata; there is no inference cache.
        max_position_embeddings: Longest sequence that the model accepts.
        rope_theta: Rotary base of layers with compression ratio 0 (no YaRN). None takes the one in `rope_parameters`,
            else 10000.
        compress_rope_theta: Rotary base of compressed layers (with YaRN).
        rope_scaling: YaRN settings of compressed layers: rope_type, factor, beta_fast, beta_slow,
            original_max_position_embeddings. None is no scaling.
        rope_parameters: The same under the name that transformers 5 writes; may stand beside `rope_scaling`.
        n_routed_experts: Routed experts per layer.
        n_shared_experts: Shared experts per layer (fused into one).
        num_experts_per_tok: Routed experts that a token visits.
        scoring_func: Router score; only "sqrtsoftplus" exists.
        topk_method: Metadata; selection is auxiliary-loss-free top-k.
        norm_topk_prob: Whether routing weights are normalised to sum 1 before scaling.
        routed_scaling_factor: Factor on the routing weights.
        router_bias_update_rate: Step by which training moves the router's selection biases against the load of the
            experts (see `moe.py`); 0 leaves them unchanged.
        router_balance_loss_weight: Weight of the sequence-wise balance loss in training; 0 makes none.
        attention: Positions that queries see. "csa2"; "window" is without compressed positions; "full" is dense causal
            attention over all tokens. Projections and rotations of a layer are the same in all three.
        quantized_caches: Whether window keys, compressed keys, index queries and index keys are rounded to FP8, NVFP4
            and MXFP4, as the release stores them.
        sliding_window: Raw positions that each query sees, itself included.
        compress_ratios: Per layer: 0 window only, r > 0 also one compressed position per r tokens.
        kv_source_layer_ids: Layers that own a compressor ("Full").
        index_source_layer_ids: Layers that select compressed positions ("Full" and "Reindex"); others reuse.
        index_n_heads: Heads of the indexer.
        index_head_dim: Width of an index head.
        index_topk: Compressed positions that a query attends to.
        indexer: "frozen" keeps the indexer as it is, like the release; "learned" trains it towards the attention's
            probabilities (see `indexer.py`). The function is the same.
        candidate_source_layer_id: Layer whose scores limit all later selections to a pool of blocks; -1 disables.
        candidate_topk_blocks: Blocks in the pool.
        candidate_block_size: Compressed positions per block.
        residual: Residual connection between blocks. "mhc"; "hyper_connections" is the same mixing without the
            projection to doubly stochastic matrices; "plain" is an ordinary residual stream and needs ``hc_mult: 1``.
        hc_mult: Number C of residual streams.
        hc_sinkhorn_iters: Sinkhorn normalisation rounds.
        hc_eps: Epsilon of the mixing coefficients.
        engram_layer_ids: Layers with an Engram memory; empty switches Engram off.
        engram_num_embeddings: Table rows per Engram layer. None takes exactly the sum of the layer's primes.
        engram_max_ngram_size: Longest hashed n-gram N; sizes 2 to N are used.
        engram_vocab_size: Lower bound of every column's bucket count (a prime).
        engram_n_heads: Hash heads per n-gram size.
        engram_head_dim: Width of a table row.
        engram_gate: "learned" weighs the memory's value by the streams; "open" adds it unweighted, and has no keys.
        engram_token_map: "compressed" hashes tokens alike whose texts differ in case, accents or white space; "raw"
            hashes the ids themselves.
        engram_pad_token_id: Token whose compressed id stands for blocked lookback positions.
        engram_compressed_vocab_size: Distinct entries of the tokenizer's map. None takes the tokenizer's.
        num_nextn_predict_layers: Metadata; the draft layers of the release are not built.
        dspark_block_size: Metadata of the draft layers.
        dspark_noise_token_id: Metadata of the draft layers. None takes the released 128799 if the vocabulary has it.
        dspark_target_layer_ids: Metadata of the draft layers.
        dspark_markov_rank: Metadata of the draft layers.
        dspark_n_routed_experts: Metadata of the draft layers.
        dspark_num_experts_per_tok: Metadata of the draft layers.
        bos_token_id: Metadata.
        eos_token_id: Metadata.
        pad_token_id: Metadata.
        tie_word_embeddings: Always False: embedding and head are separate.
        **kwargs: Further keys of `PretrainedConfig`, kept as they are.

    Raises:
        ValueError: A field is out of its range, misspelt or contradicts another one; the message begins with its name.
    """

    model_type = "deepseek_v41_text"
    base_config_key = "text_config"

    def __init__(
        self,
        *,
        vocab_size: int | None = 129280,
        hidden_size: int = 5120,
        moe_intermediate_size: int = 2304,
        num_hidden_layers: int = 40,
        num_attention_heads: int = 64,
        num_key_value_heads: int = 1,
        head_dim: int = 512,
        qk_rope_head_dim: int = 64,
        q_lora_rank: int = 1280,
        o_lora_rank: int = 1024,
        o_groups: int = 8,
        hidden_act: str = "silu",
        swiglu_limit: float = 10.0,
        rms_norm_eps: float = 1e-20,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        max_position_embeddings: int = 1048576,
        rope_theta: float | None = None,
        compress_rope_theta: float = 160000.0,
        rope_scaling: RopeSettings | None = RELEASED_YARN,
        rope_parameters: RopeSettings | None = None,
        n_routed_experts: int = 384,
        n_shared_experts: int = 1,
        num_experts_per_tok: int = 6,
        scoring_func: str = "sqrtsoftplus",
        topk_method: str = "noaux_tc",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.5,
        router_bias_update_rate: float = 0.0,
        router_balance_loss_weight: float = 0.0,
        attention: str = "csa2",
        quantized_caches: bool = True,
        sliding_window: int = 128,
        compress_ratios: list[int] = RELEASED_COMPRESS_RATIOS,
        kv_source_layer_ids: list[int] = RELEASED_KV_SOURCES,
        index_source_layer_ids: list[int] = RELEASED_INDEX_SOURCES,
        index_n_heads: int = 32,
        index_head_dim: int = 128,
        index_topk: int = 512,
        indexer: str = "frozen",
        candidate_source_layer_id: int = 20,
        candidate_topk_blocks: int = 2048,
        candidate_block_size: int = 8,
        residual: str = "mhc",
        hc_mult: int = 4,
        hc_sinkhorn_iters: int = 20,
        hc_eps: float = 1e-6,
        engram_layer_ids: list[int] = [1, 14],  # noqa: B006 - copied below, never mutated
        engram_num_embeddings: list[int] | None = None,
        engram_max_ngram_size: int = 4,
        engram_vocab_size: int = 16000000,
        engram_n_heads: int = 8,
        engram_head_dim: int = 256,
        engram_gate: str = "learned",
        engram_token_map: str = "compressed",
        engram_pad_token_id: int = 2,
        engram_compressed_vocab_size: int | None = 99092,
        num_nextn_predict_layers: int = 3,
        dspark_block_size: int = 5,
        dspark_noise_token_id: int | None = None,
        dspark_target_layer_ids: list[int] = [37, 38, 39],  # noqa: B006 - copied below, never mutated
        dspark_markov_rank: int = 256,
        dspark_n_routed_experts: int = 128,
        dspark_num_experts_per_tok: int = 3,
        bos_token_id: int | None = 0,
        eos_token_id: int | None = 1,
        pad_token_id: int | None = 2,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in TEXT_FIELDS}
        reject_misspelt(set(kwargs) - BASE_KEYS, TEXT_FIELDS, type(self).__name__)
        scaling = merged_rope(given.pop("rope_theta"), given.pop("rope_scaling"), given.pop("rope_parameters"))
        for name, value in given.items():
            setattr(self, name, list(value) if isinstance(value, list | tuple) else value)
        if dspark_noise_token_id is None and isinstance(vocab_size, int) and vocab_size > RELEASED_NOISE_TOKEN:
            self.dspark_noise_token_id = RELEASED_NOISE_TOKEN
        self.rope_theta = scaling["rope_theta"]
        self.rope_parameters = scaling
        # Before the base class, whose own checks of rope and head sizes raise without the field's name.
        self.validate_fields()
        self._init_base(kwargs)

    def _init_base(self, kwargs: dict[str, Any]) -> None:
        # Not `super().__init__(**kwargs)` in `__init__`: command-line parsers follow that call and would offer the
        # dozens of generation and fine-tuning options of the base class as options of the architecture.
        refuse_other_model(kwargs.pop("model_type", self.model_type), self.model_type)
        require_dtypes(kwargs)
        check_base_keys(kwargs, type(self))
        special = {name: getattr(self, name) for name in BASE_FIELDS_OF_OURS}
        super().__init__(**special, **kwargs)

    # ------------------------------------------------------------------ derived values

    @property
    def layers(self) -> range:
        """Indices of the blocks that exist."""
        return range(self.num_hidden_layers)

    @property
    def active_engram_layer_ids(self) -> list[int]:
        """Engram layers that exist in this (possibly shortened) model."""
        return [layer for layer in self.engram_layer_ids if layer < self.num_hidden_layers]

    def rows_of_engram_primes(self) -> list[list[int]]:
        """Bucket counts (`engram_primes`) of this configuration: one list per entry of `engram_layer_ids`."""
        return engram_primes(
            len(self.engram_layer_ids), self.engram_max_ngram_size, self.engram_n_heads, self.engram_vocab_size
        )

    def for_tokenizer(self, vocab_size: int, compressed_vocab_size: int | None = None) -> "DeepseekV41TextConfig":
        """Copy whose tokenizer-dependent sizes are those of a tokenizer.

        Args:
            vocab_size: ``len(tokenizer)``.
            compressed_vocab_size: Distinct entries of its compressed token map; None if no Engram needs it.

        Raises:
            ValueError: `vocab_size` is set and smaller than the tokenizer, or `engram_compressed_vocab_size` is set
                and different.
        """
        config = copy.deepcopy(self)
        if config.vocab_size is None:
            config.vocab_size = vocab_size
        if config.engram_compressed_vocab_size is None:
            config.engram_compressed_vocab_size = compressed_vocab_size
        require(
            config.vocab_size >= vocab_size,
            "vocab_size",
            f"{config.vocab_size} is smaller than the tokenizer, which has {vocab_size} ids (null takes its length)",
        )
        require(
            compressed_vocab_size is None or config.engram_compressed_vocab_size == compressed_vocab_size,
            "engram_compressed_vocab_size",
            f"{config.engram_compressed_vocab_size} was asked for, but the tokenizer compresses to "
            f"{compressed_vocab_size} ids (null takes the tokenizer's; every hash multiplier depends on it)",
        )
        return config

    def fields(self) -> dict[str, Any]:
        """Constructor's fields as plain values, without keys that `PretrainedConfig` adds; stored in checkpoints."""
        return {name: copy.deepcopy(getattr(self, name)) for name in sorted(TEXT_FIELDS - {"rope_scaling"})}

    # ------------------------------------------------------------------ validation

    def validate_fields(self) -> None:
        """Check every field alone and all fields together.

        Raises:
            ValueError: See the class.
        """
        check_fields(TEXT_RULES, self)
        check_together(self, SWITCHES)


TEXT_FIELDS = frozenset(
    name
    for name, parameter in inspect.signature(DeepseekV41TextConfig.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)
