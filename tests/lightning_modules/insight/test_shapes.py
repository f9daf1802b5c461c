"""Shapes, owners and masks, against the tensors that flow through a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.ops import dense_attention
from dsv41.schedule import LayerPlan, layer_plans
from lightning_modules.insight.drawing import pixels
from lightning_modules.insight.key_masks import attended, key_masks, masks_picture
from lightning_modules.insight.shapes import Shape, schedule_picture, shapes, shapes_table

MakeModel = Callable[..., DeepseekV41ForCausalLM]
MakeConfig = Callable[..., DeepseekV41Config]
Batch = dict[str, Tensor]

LENGTH, LIVE = 30, 21  # of the first row, and the second's tokens without padding
NO_SOURCES: dict[str, Any] = {
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": -1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "every kind of layer": {},
    "no candidates": {"candidate_source_layer_id": -1},
    "no sharing": {"kv_source_layer_ids": [1, 2, 3, 4, 5], "index_source_layer_ids": [1, 2, 3, 4, 5]},
    "sources cut off": {"num_hidden_layers": 3},
    "window alone after a selection": {"compress_ratios": [0, 2, 2, 0, 1, 1], "index_source_layer_ids": [1, 4, 5]},
    "reuse behind a candidate source": {"index_source_layer_ids": [1, 3, 4]},
    "window alone": {"compress_ratios": [0] * 6} | NO_SOURCES,
    "window by switch": {"attention": "window"},
    "full attention": {"attention": "full"},
    "no Engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "plain residual": {"residual": "plain", "hc_mult": 1},
    "open gate": {"engram_gate": "open"},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


# ------------------------------------------------------------------ shapes


def sizes_of(config: DeepseekV41TextConfig, ratio: int) -> dict[str, int]:
    """Sizes of the axes that no field of the configuration names."""
    positions = LENGTH // ratio if ratio else 0
    blocks = -(-positions // config.candidate_block_size)
    vocab = config.vocab_size
    assert vocab is not None
    return {
        "B": 2,
        "S": LENGTH,
        "B*S": 2 * LENGTH,
        "C": config.hc_mult,
        "H": config.hidden_size,
        "D": config.head_dim,
        "T": positions,
        "K": min(config.index_topk, positions),
        "N": min(config.candidate_topk_blocks, blocks),
        "V": vocab,
        "engrams": len(config.engram_layer_ids),
        "columns": (config.engram_max_ngram_size - 1) * config.engram_n_heads,
    }


@every_variant
def test_axes_are_named_right(tiny_model: MakeModel, batch: Batch, variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    config = model.config.text_config
    rows = shapes(model, batch)
    assert len({(row.part, row.tensor, row.shape) for row in rows}) == len(rows)
    for row in rows:
        for layer in row.layers or (0,):
            sizes = sizes_of(config, config.compress_ratios[layer])
            named = tuple(sizes[axis] if axis in sizes else getattr(config, axis) for axis in row.axes)
            assert row.shape == named, row
    everywhere = tuple(config.layers)
    for tensor in ("queries", "window KV", "attended", "scores", "chosen experts", "routed, summed", "shared"):
        assert [row.layers for row in rows if row.tensor == tensor] == [everywhere], tensor
    engrams = [row.layers for row in rows if row.part == "Engram"]
    assert engrams == [tuple(config.active_engram_layer_ids)] * 2 * bool(config.active_engram_layer_ids)
    coefficients = [row.tensor[:4] for row in rows if row.tensor.startswith(("pre:", "post", "comb"))]
    assert coefficients == (["pre:"] if variant == "plain residual" else ["pre:", "post", "comb"])


def test_tensors_stand_with_the_layers_that_have_them(tiny_model: MakeModel, batch: Batch) -> None:
    model = tiny_model()
    rows = shapes(model, batch)

    def where(tensor: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(row.shape, row.layers) for row in rows if row.tensor == tensor]

    assert where("token ids") == [((2, 30), ())]
    assert where("residual streams") == [((2, 30, 4, 64), ())]
    assert where("latent, made here") == [((2, 15, 32), (1,)), ((2, 30, 32), (4,))]
    assert where("compressed KV") == [((2, 15, 32), (1, 2, 3)), ((2, 30, 32), (4, 5))]
    assert where("index keys") == [((2, 15, 32), (1, 3)), ((2, 30, 32), (4, 5))]
    assert where("selection") == [((2, 30, 6), (1, 2, 3, 4, 5))]
    assert where("pool of candidate blocks") == [((2, 30, 3), (4, 5))]
    assert where("memory") == [((2, 30, 4, 16), (1, 3))]
    assert where("chosen experts") == [((60, 2), (0, 1, 2, 3, 4, 5))]
    assert where("logits") == [((2, 30, 512), ())]
    kinds = {row.tensor: row.dtype for row in rows}
    assert kinds["selection"] == kinds["token ids"] == torch.int64
    half = {row.tensor: row.dtype for row in shapes(model.bfloat16(), batch)}
    assert half["queries"] == torch.bfloat16
    assert half["logits"] == half["first mixture to read"] == torch.float32


def test_nothing_stays_behind(tiny_model: MakeModel, batch: Batch) -> None:
    model = tiny_model().eval()
    before = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    shapes(model, batch)
    attended(model, batch)
    assert hooks(model) == 0
    assert torch.equal(model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, before)
    wrong = batch | {"input_ids": batch["input_ids"] + 1000}
    for look in (shapes, attended):
        with pytest.raises(ValueError, match="input_ids"):
            look(model, wrong)  # type: ignore[operator]
        assert hooks(model) == 0


def test_the_table_of_shapes() -> None:
    row = Shape("attention", "selection", ("B", "S", "K"), (2, 30, 6), torch.int64, (1, 2))
    title, rule, line = shapes_table([row, row._replace(layers=())]).splitlines()[:3]
    assert title.count("|") == rule.count("|") == line.count("|")
    assert line == "| attention | selection | `[B, S, K]` | `[2, 30, 6]` | int64 | 1, 2 |"


# ------------------------------------------------------------------ who owns what


class Flow:
    """Which layer has made what each layer reads, by identity of tensors."""

    def __init__(self, model: DeepseekV41ForCausalLM) -> None:
        self.makers: dict[int, int] = {}
        self.kept: list[Tensor] = []  # or a number could be given out again
        self.read: list[dict[str, int | None]] = []
        for layer, block in enumerate(model.model.layers):
            self.read.append(dict.fromkeys(("compressed_kv", "index_keys", "selection", "candidate_pool")))
            attn: Any = block.attn
            if attn.indexer is not None:
                attn.indexer.register_forward_hook(self.of_indexer(layer))
            attn.core.register_forward_hook(self.of_core(layer))
            block.register_forward_hook(self.of_block(layer))

    def maker(self, tensor: Tensor | None, layer: int) -> int | None:
        """Who has returned it from a block, else the layer itself."""
        if tensor is None:
            return None
        self.kept.append(tensor)
        return self.makers.get(id(tensor), layer)

    def of_indexer(self, layer: int) -> Any:
        def hook(_: nn.Module, given: Any, made: Any) -> None:
            self.read[layer]["index_keys"] = self.maker(given[2], layer)
            self.read[layer]["candidate_pool"] = self.maker(made[1], layer)

        return hook

    def of_core(self, layer: int) -> Any:
        def hook(_: nn.Module, given: Any, made: Any) -> None:
            self.read[layer]["compressed_kv"] = self.maker(given[2], layer)
            self.read[layer]["selection"] = self.maker(given[3], layer)

        return hook

    def of_block(self, layer: int) -> Any:
        def hook(_: nn.Module, given: Any, made: Any) -> None:
            state = made[2]
            for tensor in (state.compressed_kv, state.index_keys, state.selection, state.candidate_blocks):
                if tensor is not None:
                    self.kept.append(tensor)
                    self.makers.setdefault(id(tensor), layer)

        return hook


@every_variant
def test_owners_are_the_layers_whose_tensors_flow(tiny_model: MakeModel, batch: Batch, variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    flow = Flow(model)
    with torch.no_grad():
        model(batch["input_ids"], attention_mask=batch["attention_mask"])
    plans = layer_plans(model.config.text_config)
    assert [plan.layer for plan in plans] == list(model.config.text_config.layers)
    for plan, read, block in zip(plans, flow.read, model.model.layers, strict=True):
        attn: Any = block.attn
        assert {name: getattr(plan, name) for name in read} == read, plan
        assert plan.ratio == attn.ratio
        makes, selects = attn.compressor is not None, attn.indexer is not None
        expected = "Full" if makes else "Reindex" if selects else "Reuse"
        if attn.ratio == 0:
            expected = "window" if attn.core.window else "dense"
        assert plan.role == expected


def test_the_release_makes_keys_four_times() -> None:
    plans = layer_plans(DeepseekV41TextConfig())
    assert [plan.layer for plan in plans if plan.role == "Full"] == [2, 8, 14, 20]
    assert [plan.layer for plan in plans if plan.role == "Reindex"] == [24, 28, 32, 36]
    assert [plan.role for plan in plans].count("window") == 2
    assert plans[39] == LayerPlan(39, 1, "Reuse", compressed_kv=20, selection=36)
    assert plans[24] == LayerPlan(24, 1, "Reindex", compressed_kv=20, index_keys=20, selection=24, candidate_pool=20)


@pytest.mark.parametrize("release", [False, True])
def test_the_picture_of_owners(tiny_config: MakeConfig, release: bool) -> None:
    plans = layer_plans(DeepseekV41TextConfig() if release else tiny_config().text_config)
    figure = schedule_picture(plans)
    axes = figure.axes[0]
    values = axes.images[0].get_array()
    empty = np.ma.getmaskarray(values)
    said = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    names = ("compressed_kv", "index_keys", "selection", "candidate_pool")
    colours: dict[int, set[float]] = {}
    for row, name in enumerate(names):
        for plan in plans:
            owner = getattr(plan, name)
            text = said.pop((plan.layer, row), None)
            assert empty[row, plan.layer] == (owner is None)
            if owner is None:
                assert text is None
            else:
                assert text == ("own" if owner == plan.layer else f"from {owner}")
                colours.setdefault(owner, set()).add(float(values[row, plan.layer]))
    assert not said
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours), "owners that look alike"
    ticks = [label.get_text().split()[0].rstrip(",") for label in axes.get_xticklabels()]
    assert ticks == [str(plan.layer) for plan in plans]
    assert pixels(figure).std() > 0


# ------------------------------------------------------------------ which keys are read


def masks_used(model: DeepseekV41ForCausalLM, batch: Batch) -> list[Tensor]:
    """What the reference's attention is given as its mask, layer by layer: bool [B, S, S + T]."""
    masks: list[Tensor] = []
    eager = dense_attention.MASKED_ATTENTION["eager"]

    def spy(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
        masks.append(mask)
        return eager(q, kv, mask, sink)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(dense_attention.MASKED_ATTENTION, "eager", spy)
        model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return masks


@every_variant
def test_the_masks_are_those_of_the_reference(tiny_model: MakeModel, batch: Batch, variant: str) -> None:
    """Of the eager core; the default one is given the same."""
    eager = tiny_model(BackendConfig(attn="eager"), **VARIANTS[variant])
    seen, default = attended(eager, batch), attended(tiny_model(**VARIANTS[variant]), batch)
    used = masks_used(eager, batch)
    assert len(used) == len(seen) == eager.config.text_config.num_hidden_layers
    for row in range(2):
        for tokens in (LENGTH, 17, 1):
            masks = key_masks(seen, tokens=tokens, row=row)
            for mask, expected in zip(masks, used, strict=True):
                positions = tokens // mask.plan.ratio if mask.plan.ratio else 0
                assert torch.equal(mask.raw, expected[row, :tokens, :tokens])
                assert mask.compressed.shape == (tokens, positions)
                assert torch.equal(mask.compressed, expected[row, :tokens, LENGTH : LENGTH + positions])
                # Nothing that is read lies outside of what is drawn.
                assert int(mask.raw.sum() + mask.compressed.sum()) == int(expected[row, :tokens].sum())
            for mask, other in zip(masks, key_masks(default, tokens=tokens, row=row), strict=True):
                assert torch.equal(mask.compressed, other.compressed)


def test_the_share_counts_keys_of_live_queries(tiny_model: MakeModel, batch: Batch) -> None:
    model = tiny_model(sliding_window=4, index_topk=5)
    for row, live in ((0, LENGTH), (1, LIVE)):
        masks = key_masks(attended(model, batch), tokens=LENGTH, row=row)
        dense = sum(range(1, live + 1))
        window = sum(min(s + 1, 4) for s in range(live))
        selected = [sum(min((s + 1) // ratio, 5) for s in range(live)) if ratio else 0 for ratio in (0, 2, 2, 2, 1)]
        for mask, far in zip(masks, selected, strict=False):  # a pool may leave the last layer fewer
            assert mask.share == pytest.approx((window + far) / dense)
    full = key_masks(attended(tiny_model(attention="full"), batch), tokens=LENGTH)
    assert [mask.share for mask in full] == [1.0] * 6


def test_the_picture_of_masks_shows_them(tiny_model: MakeModel, batch: Batch) -> None:
    masks = key_masks(attended(tiny_model(), batch), tokens=24, row=1)
    figure = masks_picture(masks)
    dense, *panels, empty = figure.axes
    assert not empty.axison
    assert len(panels) == 6
    drawn = torch.as_tensor(dense.images[0].get_array().data)
    live = torch.arange(24) < LIVE
    assert torch.equal(drawn[:, :24] == 2, torch.ones(24, 24, dtype=torch.bool).tril() & live.unsqueeze(-1))
    for axes, mask in zip(panels, masks, strict=True):
        drawn = torch.as_tensor(axes.images[0].get_array().data)
        positions = mask.compressed.shape[1]
        near, far = drawn[:, :24], drawn[:, drawn.shape[1] - positions :]
        assert torch.equal(near == 2, mask.raw)
        assert torch.equal(far == 3, mask.compressed)
        earlier = torch.ones(24, 24, dtype=torch.bool).tril() & live.unsqueeze(-1)
        assert torch.equal(near > 0, earlier)
        if positions:
            ended = torch.arange(positions) < ((torch.arange(24) + 1) // mask.plan.ratio).unsqueeze(-1)
            assert torch.equal(far > 0, ended & live.unsqueeze(-1))
        assert f"layer {mask.plan.layer}, {mask.plan.role}" in axes.get_title()
        assert f"{mask.share:.0%}" in axes.get_title()
    assert pixels(figure).std() > 0


def test_what_is_not_there_cannot_be_shown(tiny_model: MakeModel, batch: Batch) -> None:
    seen = attended(tiny_model(), batch)
    with pytest.raises(ValueError, match=r"^tokens: must lie in 1\.\.30, got 31$"):
        key_masks(seen, tokens=31)
    with pytest.raises(ValueError, match=r"^tokens: must lie in 1\.\.30, got 0$"):
        key_masks(seen, tokens=0)
    with pytest.raises(ValueError, match=r"^row: must lie in 0\.\.1, got 2$"):
        key_masks(seen, tokens=4, row=2)
    nothing = batch | {"attention_mask": batch["attention_mask"] * torch.tensor([[1], [0]])}
    with pytest.raises(ValueError, match=r"^row: 1 is padding alone$"):
        key_masks(attended(tiny_model(), nothing), tokens=4, row=1)
