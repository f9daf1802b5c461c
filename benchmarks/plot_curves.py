"""Draw the loss curves of runs, read from their TensorBoard files.

    python benchmarks/plot_curves.py runs/tiny/version_0 --out docs/loss_curves.png

Training loss is one optimizer step's mean over its tokens; validation loss is over the whole validation text; the
dotted line is the unigram entropy of that text, what a model without context could reach.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(run: Path, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of a scalar in a run's directory; empty if it was not logged."""
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    if tag not in reader.Tags()["scalars"]:
        return [], []
    events = reader.Scalars(tag)
    return [event.step + 1 for event in events], [event.value for event in events]


def unigram_entropy(run: Path) -> float | None:
    """Nats per token, from the text that a run leaves in its event files; None without."""
    reader = EventAccumulator(str(run), size_guidance={"tensors": 0})
    reader.Reload()
    tag = "within/constants/unigram_entropy/text_summary"
    if tag not in reader.Tags()["tensors"]:
        return None
    return float(reader.Tensors(tag)[-1].tensor_proto.string_val[0].split()[0])


def main() -> None:
    """Parse the command line and write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run directories (runs/NAME/version_N)")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    arguments = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    entropy: float | None = None
    for index, run in enumerate(arguments.runs):
        steps, values = scalars(run, "train/loss")
        if not steps:
            parser.error(f"no train/loss in {run}")
        colour, label = f"C{index}", run.parent.name
        axes.plot(steps, values, color=colour, alpha=0.35, linewidth=1, label=f"{label}: training")
        steps, values = scalars(run, "val/loss")
        axes.plot(steps, values, color=colour, marker="o", label=f"{label}: validation")
        entropy = unigram_entropy(run) or entropy
    if entropy is not None:
        axes.axhline(entropy, color="black", linestyle=":", label="unigram entropy of the validation text")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out, dpi=110)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
