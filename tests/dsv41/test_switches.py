"""Every switch of the architecture against its definition written out, and every two of them together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionState, DeepseekV41Attention, FullAttention, WindowAttention, build_attention
from dsv41.checkpoint import save_released
from dsv41.config import SWITCHES
from dsv41.engram import OpenEngram
from dsv41.engram.hash import DeepseekV41NgramHash, hash_multipliers
from dsv41.hyper_connections import HyperConnection, PlainResidual, UnconstrainedHyperConnection, build_residual
from dsv41.indexer import learns_selection
from dsv41.ops.quantization import fake_quantize
from dsv41.ops.rope import layer_frequencies, rotate, rotation_table

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids_and_mask(length: int = 30) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 500, (2, length), generator=torch.Generator().manual_seed(3))
    return ids, (torch.arange(length) < torch.tensor([[length], [length - 7]])).long()


def disturb(model: torch.nn.Module) -> None:
    """Values at which nothing cancels: norms away from one, matrices large enough that attention prefers."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


# ------------------------------------------------------------------ residual


def test_a_plain_residual_is_an_ordinary_transformer(tiny_model: MakeModel) -> None:
    model = tiny_model(residual="plain", hc_mult=1).double()
    disturb(model)
    ids, mask = ids_and_mask()
    live = mask.bool()
    decoder = model.model
    assert not [name for name, _ in model.named_parameters() if "_hc." in name]
    assert decoder.engram_hash is not None
    with torch.no_grad():
        hashes = decoder.engram_hash(ids, live)
        x, state = decoder.embed_tokens(ids), AttentionState()
        positions = torch.arange(30).expand(2, -1)
        for block in decoder.layers:
            if block.engram is not None:
                x = block.engram(x.unsqueeze(2), hashes[:, :, block.engram.layer_hash_index], live).squeeze(2)
            y, state = block.attn(block.attn_norm(x), state, positions, live)
            x = x + y
            x = x + block.ffn(block.ffn_norm(x), live)[0]
        expected = decoder.norm(x) @ model.lm_head.weight.T
        logits = model(ids, mask).logits
    torch.testing.assert_close(logits[live], expected[live], rtol=1e-12, atol=1e-12)


def test_hyper_connections_mix_with_the_prediction_itself(tiny_config: MakeConfig) -> None:
    text = tiny_config(residual="hyper_connections", hc_mult=3).text_config
    torch.manual_seed(0)
    site = build_residual(text, BackendConfig()).double()
    mhc = build_residual(tiny_config(hc_mult=3).text_config, BackendConfig()).double()
    assert type(site) is UnconstrainedHyperConnection
    assert type(mhc) is HyperConnection
    streams, carried = random(2, 5, 3, text.hidden_size, seed=1), random(2, 5, 3, seed=2).sigmoid()
    with torch.no_grad():
        flat = streams.flatten(2)
        for fresh in (True, False):
            if not fresh:
                disturb(site)
            mhc.load_state_dict(site.state_dict())
            x, pre, post, comb = site(streams, carried)
            theirs = mhc(streams, carried)
            mixes = (flat @ site.fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + text.rms_norm_eps)
            expected = (mixes[..., 6:] * site.scale[2] + site.base[6:]).unflatten(-1, (3, 3))
            torch.testing.assert_close(comb, expected, rtol=1e-12, atol=1e-13)
            for ours, same in ((x, theirs[0]), (pre, theirs[1]), (post, theirs[2])):
                assert torch.equal(ours, same)
            assert not torch.allclose(comb, theirs[3], atol=0.1)
            if fresh:
                # The identity up to the small prediction, as mHC's start is close to it.
                torch.testing.assert_close(comb, torch.eye(3, dtype=torch.float64).expand_as(comb), atol=0.02, rtol=0)
        y = random(2, 5, text.hidden_size, seed=4)
        written = site.write(y, streams, post, comb)
        by_hand = torch.einsum("bsio,bsih->bsoh", comb, streams) + post.unsqueeze(-1) * y.unsqueeze(2)
        torch.testing.assert_close(written, by_hand, rtol=1e-12, atol=1e-13)


def test_a_plain_site_has_no_parameters(tiny_config: MakeConfig) -> None:
    site = build_residual(tiny_config(residual="plain", hc_mult=1).text_config, BackendConfig())
    assert type(site) is PlainResidual
    assert not list(site.parameters())


# ------------------------------------------------------------------ attention


def by_hand(module: DeepseekV41Attention, x: Tensor, window: int) -> Tensor:
    """Attention of one row over its last `window` positions, a query and a head at a time."""
    length = x.shape[1]
    table = rotation_table(layer_frequencies(module.config, module.long_rotations), torch.arange(length).unsqueeze(0))
    q = rotate(module.wq_b(module.q_norm(module.wq_a(x))).unflatten(-1, (module.heads, module.width)), table)
    kv = rotate(module.kv_norm(module.wkv(x)), table)
    if module.quantized:
        kv = fake_quantize(kv, "fp8")
    out = torch.zeros_like(q)
    for s in range(length):
        keys = kv[0, max(0, s - window + 1) : s + 1]
        for h in range(module.heads):
            logits = torch.cat((keys @ q[0, s, h] * module.width**-0.5, module.core.attn_sink[h : h + 1]))
            out[0, s, h] = logits.softmax(0)[:-1] @ keys
    return module._project(rotate(out, table, inverse=True))


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("attn", ["sparse", "eager", "sdpa"])
@pytest.mark.parametrize("kind", ["window", "full"])
@pytest.mark.parametrize("layer", [0, 1])
def test_window_and_full_attention_equal_a_loop_over_heads_and_queries(
    tiny_config: MakeConfig, kind: str, attn: Any, layer: int, quantized: bool
) -> None:
    config = tiny_config(attention=kind, sliding_window=5, quantized_caches=quantized).text_config
    torch.manual_seed(layer)
    module = build_attention(config, layer, BackendConfig(attn=attn)).double()
    assert type(module) is {"window": WindowAttention, "full": FullAttention}[kind]
    disturb(module)
    x = random(1, 21, config.hidden_size, seed=5)
    with torch.no_grad():
        out, state = module(x, AttentionState(), torch.arange(21).unsqueeze(0), torch.ones(1, 21, dtype=torch.bool))
        expected = by_hand(module, x, 5 if kind == "window" else 21)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    assert state == AttentionState(), "nothing is shared"


def test_rotations_and_projections_of_a_layer_are_those_of_csa2(tiny_config: MakeConfig) -> None:
    kinds = {
        kind: build_attention(tiny_config(attention=kind).text_config, 1, BackendConfig())
        for kind in SWITCHES["attention"]
    }
    positions = torch.arange(9).unsqueeze(0)
    tables = [module._query_rotations(positions) for module in kinds.values()]
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2])
    window = kinds["csa2"]._query_rotations(positions)
    assert not torch.equal(
        window, build_attention(tiny_config().text_config, 0, BackendConfig())._query_rotations(positions)
    )
    own = {name for name, _ in kinds["csa2"].named_parameters()}
    for kind in ("window", "full"):
        names = {name for name, _ in kinds[kind].named_parameters()}
        assert {name.split(".")[0] for name in own - names} == {"compressor", "indexer"}
        assert not names - own


def test_without_rounding_nothing_is_quantised(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = ids_and_mask()
    model = tiny_model(quantized_caches=False).double()
    with torch.no_grad():
        ours = model(ids, mask).logits
        rounded = tiny_model().double()
        assert not torch.equal(rounded(ids, mask).logits, ours)
        for module in ("attention", "indexer"):
            monkeypatch.setattr(f"dsv41.{module}.fake_quantize", lambda x, name: x)
        assert torch.equal(rounded(ids, mask).logits, ours)
        for module in ("attention", "indexer"):
            monkeypatch.setattr(f"dsv41.{module}.fake_quantize", lambda x, name: pytest.fail("was rounded"))
        assert torch.equal(model(ids, mask).logits, ours)


# ------------------------------------------------------------------ Engram


def test_an_open_gate_adds_what_memory_says(tiny_model: MakeModel) -> None:
    engram = tiny_model(engram_gate="open").double().model.layers[1].engram
    assert type(engram) is OpenEngram
    disturb(engram)
    assert {name for name, _ in engram.named_parameters()} == {"embed.weight", "wkv.weight"}
    columns = engram.wkv.in_features // engram.embed.weight.shape[1]
    streams = random(2, 6, 4, engram.wkv.out_features, seed=6)
    ids = torch.randint(engram.embed.rows, (2, 6, columns), generator=torch.Generator().manual_seed(7))
    live = torch.arange(6) < torch.tensor([[6], [4]])
    with torch.no_grad():
        out = engram(streams, ids, live)
        for b, s in itertools.product(range(2), range(6)):
            said = torch.cat([engram.embed.weight[row] for row in ids[b, s]]) @ engram.wkv.weight.T
            expected = streams[b, s] + (said if live[b, s] else 0.0)
            torch.testing.assert_close(out[b, s], expected, rtol=1e-12, atol=1e-13)


def test_raw_ids_are_hashed_as_they_are(tiny_config: MakeConfig, golden_tokenizer: Tokenizer) -> None:
    config = tiny_config(engram_token_map="raw", engram_compressed_vocab_size=None).text_config
    hashing = DeepseekV41NgramHash(config, golden_tokenizer)
    count = golden_tokenizer.get_vocab_size()
    assert hashing.config.engram_compressed_vocab_size == count
    assert hashing.pad_id == config.engram_pad_token_id
    ids, mask = ids_and_mask(12)
    rows = hashing(ids, mask.bool())
    heads = config.engram_n_heads
    for layer, (name, primes) in enumerate(zip(config.engram_layer_ids, config.rows_of_engram_primes(), strict=True)):
        multipliers = hash_multipliers(name, config.engram_max_ngram_size, count)
        for b, s in mask.nonzero().tolist():
            value = int(ids[b, s]) * int(multipliers[0])
            offset = 0
            for back in range(1, config.engram_max_ngram_size):
                token = int(ids[b, s - back]) if s >= back else config.engram_pad_token_id
                value ^= token * int(multipliers[back])
                for head in range(heads):
                    prime = primes[(back - 1) * heads + head]
                    assert int(rows[b, s, layer, (back - 1) * heads + head]) == value % prime + offset
                    offset += prime
    other = DeepseekV41NgramHash(tiny_config().text_config, golden_tokenizer)
    assert other.map_fingerprint != hashing.map_fingerprint


# ------------------------------------------------------------------ together

# What an ablation may turn, one entry per change; entries of the same field exclude each other.
VARIANTS: dict[str, dict[str, Any]] = {
    "no Engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "Engram in another layer": {"engram_layer_ids": [2], "engram_num_embeddings": None},
    "longer n-grams": {"engram_max_ngram_size": 4, "engram_num_embeddings": None},
    "one hash head": {"engram_n_heads": 1, "engram_num_embeddings": None},
    "more rows": {"engram_vocab_size": 173, "engram_num_embeddings": None},
    "open gate": {"engram_gate": "open"},
    "raw ids": {"engram_token_map": "raw", "engram_compressed_vocab_size": None},
    "hyper-connections": {"residual": "hyper_connections"},
    "plain residual": {"residual": "plain", "hc_mult": 1},
    "window": {"attention": "window"},
    "full": {"attention": "full"},
    "every layer Full": {"kv_source_layer_ids": [1, 2, 3], "index_source_layer_ids": [1, 2, 3]},
    "no candidates": {"candidate_source_layer_id": -1},
    "no rounding": {"quantized_caches": False},
    "learned indexer": {"indexer": "learned"},
    "balanced": {"router_bias_update_rate": 0.01, "router_balance_loss_weight": 0.01},
}
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 2, 2],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1, 3],
    "candidate_source_layer_id": 1,
    "engram_layer_ids": [1],
    "engram_num_embeddings": None,
    "index_topk": 3,
}
FREE = ("engram_num_embeddings",)  # follows from the others


def together(*names: str) -> dict[str, Any]:
    return SMALL | {field: value for name in names for field, value in VARIANTS[name].items()}


def allowed(pair: tuple[str, str]) -> bool:
    """Whether two variants turn different things."""
    first, second = (set(VARIANTS[name]) - set(FREE) for name in pair)
    return not first & second


PAIRS = [pair for pair in itertools.combinations(VARIANTS, 2) if allowed(pair)]


def step(model: DeepseekV41ForCausalLM, optimizer: torch.optim.Optimizer, seed: int) -> float:
    ids = torch.randint(3, 500, (2, 14), generator=torch.Generator().manual_seed(seed))
    out = model(ids, labels=ids)
    loss = out.loss
    for extra in (out.report.indexer_loss, out.report.balance_loss):
        loss = loss if extra is None else loss + extra
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_most_pairs_are_possible() -> None:
    assert len(PAIRS) > 100
    assert {name for pair in PAIRS for name in pair} == set(VARIANTS)
    for field, choices in SWITCHES.items():
        used = {overrides[field] for overrides in VARIANTS.values() if field in overrides}
        assert used == set(choices[1:]), field


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_every_two_switches_build_train_and_resume_together(tiny_model: MakeModel, pair: tuple[str, str]) -> None:
    def build(seed: int) -> tuple[DeepseekV41ForCausalLM, torch.optim.Optimizer]:
        model = tiny_model(seed=seed, **together(*pair))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build(0)
    losses = [step(model, optimizer, 0)]
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}, optimizer.state_dict()
    moments = {
        number: {key: value.clone() for key, value in entry.items()} for number, entry in saved[1]["state"].items()
    }
    losses.append(step(model, optimizer, 1))
    assert losses[1] == losses[1], "not a number"

    other, optimizer = build(1)
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1] | {"state": moments})
    assert step(other, optimizer, 1) == losses[1]
    for (name, ours), theirs in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    frozen = not learns_selection(model.config.text_config)
    assert all(".indexer." in name for name in idle)
    assert bool(idle) == (frozen and model.config.text_config.attention == "csa2")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_of_any_variant_gives_the_same_model_back(tiny_model: MakeModel, tmp_path: Path, name: str) -> None:
    model = tiny_model(**together(name))
    disturb(model)
    save_released(model, tmp_path / "out")
    other = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "out")
    ids, mask = ids_and_mask(14)
    with torch.no_grad():
        assert torch.equal(other(ids, mask).logits, model(ids, mask).logits)
    # The golden tokenizer is a bare one of the library, which names no special tokens.
    unnamed = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    assert other.config.text_config.fields() == model.config.text_config.fields() | unnamed
