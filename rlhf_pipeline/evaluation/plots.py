"""The two pictures of a comparison: where the scores lie, and the win rates with intervals."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.evaluation.metrics import bin_edges
from rlhf_pipeline.evaluation.report import EvaluationReport

COLOURS = {"candidate": "#1b7837", "baseline": "#999999", "champion": "#2166ac"}


def pictures_in(work: Path) -> list[Path]:
    """Return the pictures of a turn's comparison, and over-optimisation in its training."""
    drawn = sorted((work / "evaluation").glob("*.png"))
    return [*drawn, *sorted((work / "ppo").rglob("over_optimisation.png"))]


def write_plots(report: EvaluationReport, directory: Path) -> list[Path]:
    """Write score_distributions.png and win_rates.png into `directory`; return their paths."""
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    systems = ["baseline", "candidate"]
    if not report.champion_is_baseline:
        systems.insert(1, "champion")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    pooled = [score for system in systems for score in report.scores[system]]
    edges = bin_edges(pooled)
    for system in systems:
        mean = report.numbers[system]["gate_score"].value
        axes.hist(
            report.scores[system],
            bins=edges,
            alpha=0.5,
            color=COLOURS[system],
            label=f"{system}, mean {mean:.2f}",
        )
        axes.axvline(mean, color=COLOURS[system], linestyle="--")
    axes.set(title="Gate score per held-out prompt", xlabel="score", ylabel="prompts")
    axes.legend()
    distributions = directory / "score_distributions.png"
    figure.savefig(distributions, dpi=110)

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.add_subplot()
    rows = [
        (f"{name} against {against}", rates[against])
        for against in systems
        if against != "candidate"
        for name, rates in (
            ("win rate", report.win_rates),
            ("length-controlled", report.length_controlled_win_rates),
        )
    ]
    for height, (_, rate) in enumerate(rows):
        if rate.low is not None and rate.high is not None:
            axes.hlines(height, rate.low, rate.high, color=COLOURS["candidate"], linewidth=3)
        axes.plot(rate.value, height, "o", color=COLOURS["candidate"])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.axvline(0.5, color="#999999", linestyle=":")
    prompts = "1 prompt" if report.prompts == 1 else f"{report.prompts} prompts"
    axes.set(title=f"Candidate's win rate, {prompts}, 95 % intervals")
    axes.set_xlabel("share of prompts won, ties half")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.5, len(rows) - 0.5))  # a dot has room at either end
    win_rates = directory / "win_rates.png"
    figure.savefig(win_rates, dpi=110)
    return [distributions, win_rates]
