"""What an Engram sees of a text, which rows it reads for it, and how far its gates open for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv41 import BackendConfig
from dsv41.engram import DeepseekV41Engram, OpenEngram, build_engram
from dsv41.engram import layer as engram
from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.model import DeepseekV41Block
from dsv41.ops.compiled import CompiledCore
from lightning_modules.cli import DeepseekV41CLI
from lightning_modules.insight.engram_buckets import Buckets, Column, chance_of_collision, fills_of
from lightning_modules.insight.engram_gates import EngramGates, gate_picture, readable
from lightning_modules.notebook.code_spans import code_cell
from lightning_modules.notebook.opened import texts_of
from lightning_modules.notebook.taps import watch
from lightning_modules.text import first_few

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HashedToken(NamedTuple):
    """A token as the hash of a layer sees it.

    Attributes:
        text: Its own.
        token: Its id.
        compressed: Its compressed id.
        shared: Texts of the other tokens that have this compressed id.
        ngrams: The n-grams of sizes 2 to N that end here, each the texts of its compressed ids, the oldest first.
        rows: Of the layer's table, one for each column: by size of the n-gram, then by head.
    """

    text: str
    token: int
    compressed: int
    shared: tuple[str, ...]
    ngrams: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]


def _hashing_of(cli: DeepseekV41CLI, layer: int | None = None) -> DeepseekV41NgramHash:
    hashing = cli.model.built.model.engram_hash
    if hashing is None:
        raise ValueError("model.config.engram_layer_ids: must name a layer, or there is no memory to look at; got []")
    if layer is not None and layer not in hashing.layer_ids:
        raise ValueError(f"layer: must be one of {hashing.layer_ids}, those with an Engram, got {layer}")
    return hashing


def _text_of_all(texts: Sequence[str]) -> str:
    """One text for tokens that the hash takes for the same; a single token is shown as it is."""
    if len(texts) == 1:
        return texts[0]
    return " ".join(texts[0].lower().split()) or " "


def hashed(cli: DeepseekV41CLI, input_ids: Tensor, layer: int) -> list[HashedToken]:
    """What the hash of a layer sees of a text and makes of it, token by token.

    Args:
        cli: With a model.
        input_ids: int64 [S], from the start of a row: before it there is padding.
        layer: One that has an Engram.

    Raises:
        ValueError: The layer has none.
    """
    hashing = _hashing_of(cli, layer)
    mapping = hashing.token_map.tolist()
    texts = texts_of(cli, torch.arange(len(mapping)))
    tokens_of: dict[int, list[int]] = {}
    for token, compressed in enumerate(mapping):
        tokens_of.setdefault(compressed, []).append(token)

    def shown(compressed: int) -> str:
        return _text_of_all([texts[token] for token in tokens_of[compressed]])

    ngrams = hashing.ngrams(input_ids[None])[0].tolist()
    rows = hashing(input_ids[None])[0, :, hashing.layer_ids.index(layer)].tolist()
    return [
        HashedToken(
            text=texts[token],
            token=token,
            compressed=mapping[token],
            shared=tuple(texts[other] for other in tokens_of[mapping[token]] if other != token),
            ngrams=tuple(tuple(map(shown, reversed(ngram[:size]))) for size in range(2, len(ngram) + 1)),
            rows=tuple(row),
        )
        for token, ngram, row in zip(input_ids.tolist(), ngrams, rows, strict=True)
    ]


def hashed_text(cli: DeepseekV41CLI, text: str, layer: int) -> list[HashedToken]:
    """`hashed` for a text of one's own.

    Raises:
        ValueError: The text has no token.
    """
    ids = cli.datamodule.fast_tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError(f"text: must have at least one token, got {text!r}")
    return hashed(cli, torch.tensor(ids, device=_hashing_of(cli).token_map.device), layer)


def rows_of_text(cli: DeepseekV41CLI, text: str, layer: int) -> tuple[int, ...]:
    """The rows of a layer's table that the last token of a text reads, one for each column."""
    return hashed_text(cli, text, layer)[-1].rows


def _cell(text: str) -> str:
    return code_cell(readable(text))


def hash_table(tokens: Sequence[HashedToken]) -> str:
    """Markdown: a line per token."""
    sizes = range(2, 2 + len(tokens[0].ngrams))
    heads = len(tokens[0].rows) // len(sizes)
    titles = ["token", "id", "compressed id", "same to the hash"]
    titles += [f"{size}-gram" for size in sizes]
    titles += [f"row of {size}-gram, head {head}" for size in sizes for head in range(heads)]
    lines = [f"| {' | '.join(titles)} |", f"|---|---:|---:|---|{'---|' * len(sizes)}{'---:|' * len(tokens[0].rows)}"]
    for token in tokens:
        cells = [_cell(token.text), str(token.token), str(token.compressed), first_few(map(_cell, token.shared), 4)]
        cells += [" ".join(map(_cell, ngram)) for ngram in token.ngrams]
        cells += map(str, token.rows)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def column_fills(cli: DeepseekV41CLI, batches: int) -> list[tuple[Column, Buckets]]:
    """How the different n-grams of the first batches of the validation text lie in the buckets of every column.

    Raises:
        ValueError: `batches` is not positive, or the model has no Engram.
    """
    if batches < 1:
        raise ValueError(f"batches: must be at least 1, got {batches}")
    hashing = _hashing_of(cli)
    cli.datamodule.prepare_data()
    cli.datamodule.setup("validate")
    ngrams, rows = [], []
    for batch in islice(cli.datamodule.val_dataloader(), batches):
        ids = batch["input_ids"].to(hashing.token_map.device)
        live = batch["attention_mask"].to(ids.device).bool()
        ngrams.append(hashing.ngrams(ids, live)[live])
        rows.append(hashing(ids, live)[live])
    return fills_of(hashing, torch.cat(ngrams), torch.cat(rows))


def fill_table(fills: Sequence[tuple[Column, Buckets]]) -> str:
    """Markdown: a line per column."""
    titles = ("column", "buckets", "different n-grams", "per bucket", "in the fullest", "colliding", "by chance")
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    lines += [
        f"| {column.name.replace('_', ' ')} | {column.buckets} | {found.distinct} "
        f"| {found.distinct / column.buckets:.3f} | {found.fullest} | {found.colliding / found.distinct:.1%} "
        f"| {chance_of_collision(found.distinct, column.buckets):.1%} |"
        for column, found in fills
    ]
    return "\n".join(lines) + "\n"


def gates_of(cli: DeepseekV41CLI, batch: Mapping[str, Tensor], tokens: int = 48) -> tuple[dict[int, Tensor], list[str]]:
    """Gates over the beginning of the first row of a batch, as the callback of every validation sees them.

    Args:
        cli: With a model.
        batch: As of `validation_batch`.
        tokens: At most.

    Returns:
        By layer, gates [C, T]; and the texts of the T tokens.

    Raises:
        ValueError: No layer of the model has a gate, or `tokens` is not positive.
    """
    observer = EngramGates(batches=1, tokens=tokens)
    observer.on_validation_start(cli.trainer, cli.model)
    observer.on_validation_batch_start(cli.trainer, cli.model, batch, 0)
    try:
        watch(cli.model.built, batch, [])  # the observer has its own hooks
    finally:
        observer.on_validation_end(cli.trainer, cli.model)
    if not observer.piece:
        raise ValueError("model.config: no layer has a gate; it takes engram_layer_ids and engram_gate 'learned'")
    return observer.piece, texts_of(cli, observer.piece_ids)


def gate_pictures(cli: DeepseekV41CLI, batch: Mapping[str, Tensor], tokens: int = 48) -> list[Figure]:
    """A picture of `gates_of` for each layer."""
    gates, texts = gates_of(cli, batch, tokens)
    return [gate_picture(piece.float().cpu().numpy(), texts, layer) for layer, piece in sorted(gates.items())]


class GatePaths(NamedTuple):
    """An Engram layer with an eager and with a compiled gate, of equal weights and on equal input.

    Attributes:
        compiled: Whether the second was compiled; without a working C++ compiler it runs eager too.
        output: The largest difference of what they give, relative to the largest value of it.
        gradient: Likewise of the gradient of streams or parameters that differs most.
        eager: CPU milliseconds of forward and backward in one thread, the median of turns.
        other: Likewise of the second.
    """

    compiled: bool
    output: float
    gradient: float
    eager: float
    other: float


def compare_gates(cli: DeepseekV41CLI, batch: Mapping[str, Tensor], layer: int, rounds: int = 15) -> GatePaths:
    """Run a layer with its gate eager and compiled, on what it is given in the forward of a batch.

    Compiling takes some seconds, the first time on a machine.

    Args:
        cli: With a model.
        batch: As of `validation_batch`.
        layer: One that has an Engram with a gate.
        rounds: Measured forwards and backwards of each, taking turns.

    Raises:
        ValueError: The layer has none, or `rounds` is not positive.
        FailOnRecompileLimitHit: Of torch, if this process has compared more shapes than it compiles for.
    """
    if rounds < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    trained = _gated_layer(cli, layer)
    hidden, ids, mask = _given_to(trained, cli, batch)
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    runs: list[Callable[[], list[Tensor]]] = []
    with _own_switch(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # else it may run eager unseen
        for compiled in (False, True):
            module = build_engram(cli.model.built.config.text_config, layer, BackendConfig(compile_engram=compiled)).to(
                trained.wkv.weight
            )
            module.load_state_dict(trained.state_dict())
            gate = engram._engram_gate  # what the modules of a process call that was started with this backend

            def run(module: DeepseekV41Engram = module, gate: engram.GateCore = gate) -> list[Tensor]:
                engram._engram_gate = gate
                streams = hidden.clone().requires_grad_()
                out = module(streams, ids, mask)
                return [out.detach(), *torch.autograd.grad(out, [streams, *module.parameters()], upstream)]

            runs.append(run)
        (out, *gradients), (other_out, *other_gradients) = (run() for run in runs)
        eager, other = _median_milliseconds(runs, rounds)
    assert isinstance(gate, CompiledCore)
    return GatePaths(
        compiled=not gate.failed,
        output=_difference(other_out, out),
        gradient=max(map(_difference, other_gradients, gradients)),
        eager=eager,
        other=other,
    )


def gates_table(paths: GatePaths) -> str:
    """Markdown: time and differences, or that there is no compiler."""
    if not paths.compiled:
        return (
            "The gate could not be compiled here, so it ran eager and there is nothing to compare. It takes a C++ "
            "compiler such as `g++`.\n"
        )
    lines = [
        "| gate | forward and backward of the layer | largest difference: output | gradient |",
        "|---|---:|---:|---:|",
        f"| eager | {paths.eager:.2f} ms | | |",
        f"| compiled | {paths.other:.2f} ms | {paths.output:.1e} | {paths.gradient:.1e} |",
    ]
    return "\n".join(lines) + "\n"


def _gated_layer(cli: DeepseekV41CLI, layer: int) -> DeepseekV41Engram:
    _hashing_of(cli, layer)
    block = cli.model.built.model.layers[layer]
    assert isinstance(block, DeepseekV41Block)
    assert block.engram is not None
    if isinstance(block.engram, OpenEngram):
        raise ValueError("model.config.engram_gate: must be 'learned' for a gate to compile, got 'open'")
    return block.engram


def _given_to(
    module: DeepseekV41Engram, cli: DeepseekV41CLI, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams, rows and token mask that reach `module`."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    watch(cli.model.built, batch, [(module, lambda given, _: found.append(given))])
    return found[0]


@contextmanager
def _own_switch() -> Iterator[None]:
    """Begin eager, whatever the process has been told, and leave the process as it was; one thread meanwhile."""
    before, threads = (engram._engram_gate, engram._ENGRAM_GATE_COMPILED), torch.get_num_threads()
    engram._engram_gate, engram._ENGRAM_GATE_COMPILED = engram._engram_gate_core, False
    torch.set_num_threads(1)
    try:
        yield
    finally:
        engram._engram_gate, engram._ENGRAM_GATE_COMPILED = before
        torch.set_num_threads(threads)


def _median_milliseconds(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """CPU time of each run, the median of `rounds` in which each has its turn (as in `benchmarks/measure.py`)."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for taken, run in zip(times, runs, strict=True):
            begin = time.process_time()
            run()
            taken.append(1e3 * (time.process_time() - begin))
    return [median(taken) for taken in times]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
