"""Curves of a training run as PNG files; matplotlib is loaded only when they are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_pipeline.ppo.result import Evaluation, TrainingResult

CURVES = (
    ("rollout/score_mean", "score"),
    ("rollout/kl_per_completion", "KL to reference\n(nats per completion)"),
    ("rollout/entropy", "entropy\n(nats per token)"),
    ("critic/loss", "value loss"),
    ("critic/explained_variance", "explained variance\nof the critic"),
    ("rollout/length_mean", "completion length\n(tokens)"),
)
DPO_CURVES = (
    ("dpo/margin", "margin of the\nupdate's pairs"),
    ("dpo/accuracy", "share of pairs, chosen\nabove rejected"),
    ("train/loss", "loss (nats)"),
    ("watch/score_mean", "score on the\nwatch prompts"),
    ("watch/kl", "KL to reference\n(nats per completion)"),
    ("watch/length_mean", "completion length\n(tokens)"),
)
NUMBERED = 15  # looks, beyond about which only some of them have their number
MARKED = 60  # points of a curve, beyond which its line alone is drawn


def draw_plots(result: TrainingResult, directory: Path) -> tuple[str, ...]:
    """Write training.png and over_optimisation.png into directory; return their file names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        "training.png": Figure(figsize=(10, 6), layout="constrained"),
        "over_optimisation.png": Figure(figsize=(6, 4.5), layout="constrained"),
    }
    _draw_training(figures["training.png"], result)
    _draw_over_optimisation(
        figures["over_optimisation.png"], result.evaluations, result.chosen_update
    )
    for name, figure in figures.items():
        FigureCanvasAgg(figure).print_png(str(directory / name))
    return tuple(figures)


def _draw_training(figure: Any, result: TrainingResult) -> None:
    """Draw what the updates measured: without a critic nothing of one, for DPO what it has."""
    from matplotlib.ticker import MaxNLocator

    told = {name for facts in result.history for name in facts}
    every = CURVES if "rollout/score_mean" in told else DPO_CURVES
    curves = [curve for curve in every if curve[0] in told]
    grid = figure.subplots(2, max(1, -(-len(curves) // 2)), sharex=True, squeeze=False)
    for axis, (name, label) in zip(grid.flat, curves, strict=False):
        points = [(n, m[name]) for n, m in enumerate(result.history, 1) if name in m]
        marker = "." if len(points) <= MARKED else None  # a single point has no line
        axis.plot(*zip(*points, strict=True), color="tab:blue", marker=marker)
        axis.axvline(result.chosen_update, color="tab:green", linestyle=":", linewidth=1)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    for axis in grid[-1]:
        axis.set_xlabel("update")
        axis.set_xlim(min(1, result.chosen_update) - 0.5, result.updates + 0.5)
    updates = "1 update" if result.updates == 1 else f"{result.updates} updates"
    figure.suptitle(
        f"{updates}, the policy after update {result.chosen_update} was chosen (dotted)"
    )


def _draw_over_optimisation(
    figure: Any, evaluations: Sequence[Evaluation], chosen_update: int
) -> None:
    """Scores against the distance from the reference: arXiv:2210.10760 figure 1."""
    axis = figure.subplots()
    looks = sorted(evaluations, key=lambda e: e.update)
    distances = [math.sqrt(max(e.kl, 0.0)) for e in looks]
    axis.plot(distances, [e.score_mean for e in looks], "o-", label="proxy reward (maximised)")
    if any(e.stopping_mean is not None for e in looks):
        stopping = [math.nan if e.stopping_mean is None else e.stopping_mean for e in looks]
        axis.plot(distances, stopping, "s--", label="stopping reward (watches)")
    told = max(1, len(looks) // NUMBERED)
    for place, (look, distance) in enumerate(zip(looks, distances, strict=True)):
        if place % told == 0:  # the way back and forth cannot be read without
            beside = {"textcoords": "offset points", "xytext": (4, 4), "fontsize": "x-small"}
            axis.annotate(str(look.update), (distance, look.score_mean), **beside)
        if look.update == chosen_update:
            axis.axvline(
                distance, color="tab:green", linestyle=":", label=f"chosen: update {look.update}"
            )
    axis.set_title(
        "Over-optimised where the proxy rises and\nthe stopping reward falls (numbers: updates)",
        fontsize=10,
    )
    axis.set_xlabel("sqrt(KL to the reference), nats per completion")
    axis.set_ylabel("mean score on the watch prompts")
    axis.grid(alpha=0.3)
    below = {"loc": "outside lower center", "ncols": 3}  # off the points
    figure.legend(**below, fontsize="small", columnspacing=1)
