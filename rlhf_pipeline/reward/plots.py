"""Pictures of a reward model's report: loss curve, reliability diagram, held-out margins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pipeline.reward.training import RewardModelReport

PLOTS = ("loss.png", "reliability.png", "margins.png")


def plot_report(report: RewardModelReport, margins: Sequence[float], folder: Path) -> None:
    """Write the three PNG files of PLOTS into `folder`."""
    loss, axes = _figure("optimizer step", "loss (nats)", "Training loss")
    axes.plot(*zip(*report.loss_curve, strict=True), marker=".")
    axes.axhline(0.6931, color="grey", linestyle=":", label="knows nothing")
    axes.legend()
    loss.savefig(folder / PLOTS[0])

    diagram, axes = _figure(
        "confidence",
        "accuracy",
        f"T {report.temperature:.2f}, ECE {report.ece:.3f} (noise {report.ece_noise:.3f})",
    )
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle=":", label="calibrated")
    axes.scatter(
        [b.confidence for b in report.reliability],
        [b.accuracy for b in report.reliability],
        s=[20 + 600 * b.n / report.n for b in report.reliability],
        label="held-out pairs (size: how many)",
    )
    axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="lower right")
    diagram.savefig(folder / PLOTS[1])

    low, high = report.interval
    histogram, axes = _figure(
        "margin = score(chosen) - score(rejected)",
        "held-out pairs",
        f"Accuracy {report.accuracy:.3f} [{low:.3f}, {high:.3f}], n = {report.n}",
    )
    axes.hist(margins, bins=30)
    axes.axvline(0, color="grey", linestyle=":")
    histogram.savefig(folder / PLOTS[2])


def _figure(x: str, y: str, title: str) -> tuple[Any, Any]:
    """Return a figure that draws without a display and leaves matplotlib's state alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.13, 0.13, 0.84, 0.79))  # finding its place would draw it twice
    axes.set(xlabel=x, ylabel=y, title=title)
    return figure, axes
