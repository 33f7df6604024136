"""Pictures of a reward model's report: loss, reliability, margins, groups, learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.evaluation.metrics import bin_edges, wilson_interval
from rlhf_pipeline.reward.calibration import by_length
from rlhf_pipeline.reward.held_out import Findings, Measured

if TYPE_CHECKING:
    from rlhf_pipeline.reward.training import RewardModelReport

PLOTS = ("loss.png", "reliability.png", "margins.png", "held_out.png")

MOST_BARS = 16  # in the picture; the report has all, and the topics


def plot_report(report: RewardModelReport, margins: Sequence[float], folder: Path) -> None:
    """Write the PNG files of PLOTS into `folder`."""
    is_of_pairs = report.judged_by == "pairs"
    of = "held-out pairs" if is_of_pairs else "held-out votes, two by two"
    loss, axes = _figure("optimizer step", "loss (nats)", "Training loss")
    axes.plot(*zip(*report.loss_curve, strict=True), marker=".")
    axes.axhline(0.6931, color="grey", linestyle=":", label="knows nothing")
    axes.legend()
    loss.savefig(folder / PLOTS[0])

    _reliability(report, of).savefig(folder / PLOTS[1])

    low, high = report.interval
    histogram, axes = _figure(
        "margin = score(chosen) - score(rejected)"
        if is_of_pairs
        else "margin = lead of the liked answer - lead of the disliked one",
        of,
        f"Accuracy {report.accuracy:.3f} [{low:.3f}, {high:.3f}], n = {report.n}",
    )
    axes.hist(margins, bins=bin_edges(margins))
    axes.axvline(0, color="grey", linestyle=":")
    histogram.savefig(folder / PLOTS[2])

    if report.findings is not None:
        _held_out(report, report.findings).savefig(folder / PLOTS[3])


def _reliability(report: RewardModelReport, of: str) -> Any:
    """Return how often the model is right of what it is so sure of, `of` saying of what."""
    figure, axes = _figure(
        "the model's confidence that its choice is people's",
        "how often it is, 95 % intervals",
        f"Calibration error {report.ece:.3f}; chance alone gives up to {report.ece_noise:.3f}",
    )
    for b in report.reliability:
        axes.plot([b.confidence] * 2, wilson_interval(b.accuracy, b.n), color="C0", linewidth=1)
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle=":", label="calibrated")
    axes.scatter(
        [b.confidence for b in report.reliability],
        [b.accuracy for b in report.reliability],
        s=[20 + 600 * b.n / report.n for b in report.reliability],
        label=f"{of} (size: how many)",
    )
    axes.set(xlim=(0.46, 1.04), ylim=(-0.08, 1.08))  # the largest dot has room at every edge
    legend = axes.legend()
    legend.legend_handles[-1].set_sizes([40])  # its own would be a mean of theirs
    return figure


def _held_out(report: RewardModelReport, findings: Findings) -> Any:
    """Return accuracy by group beside what knows less, and what more votes brought."""
    from matplotlib.ticker import EngFormatter

    rows = [
        ("all", Measured(report.accuracy, *report.interval, report.n)),
        ("like length", findings.length_matched),
        ("bag of words", findings.bag_of_words),
        ("annotators", findings.annotators),
        *findings.by_kind.items(),
        *findings.by_cohort.items(),
    ]  # no topics: they may be people's words, which no erasure takes out of a picture
    shown = [(name[:24], one) for name, one in rows if one is not None][:MOST_BARS]
    figure, axes = _figure("accuracy, 95 % intervals", "", "Held-out votes")
    learnt = findings.learning_curve
    axes.set_position((0.36, 0.13, 0.24 if learnt else 0.6, 0.79))
    for place, (_, one) in enumerate(shown):
        axes.plot([one.low, one.high], [place, place], color="C0")
        axes.plot([one.share], [place], "o", color="C0")
    words, share = by_length(report.floors)
    axes.axvline(share, color="grey", linestyle=":", label=words)
    figure.legend(loc="lower left", fontsize=7)  # below the names, where nothing is drawn
    labels = [f"{name} ({one.n})" for name, one in shown]
    # A cohort may be a file's name: what stands between two $ in it is no formula.
    axes.set_yticks(range(len(shown)), labels, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    if not learnt:  # it began with an earlier model, or learnt from nothing of the kind
        return figure
    curve = figure.add_axes((0.74, 0.13, 0.21, 0.79))  # half of the last number lies beside it
    curve.set(xlabel=f"training {report.judged_by}", ylabel="accuracy, 95 %", title="More votes")
    curve.xaxis.set_major_formatter(EngFormatter(sep=""))  # 400k: six figures have no room
    for bound in ("low", "share", "high"):
        style = "o-" if bound == "share" else ":"
        heights = [getattr(one.accuracy, bound) for one in learnt]
        curve.plot([one.pairs for one in learnt], heights, style, color="C0")
    return figure


def _figure(x: str, y: str, title: str) -> tuple[Any, Any]:
    """Return a figure that draws without a display and leaves matplotlib's state alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.13, 0.13, 0.84, 0.79))  # finding its place would draw it twice
    axes.set(xlabel=x, ylabel=y, title=title)
    return figure, axes
