"""Many nights: which day is what, what each brought, and whether the loop kept its promises.

Pure: no clock, no service, no store. `automation/nights.py` plays the days and fills the report.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

DayKind = Literal["ordinary", "quiet", "late", "duplicates", "corrupt", "flippers", "trigger"]

MEANINGS: Mapping[DayKind, str] = {
    "ordinary": "people chat and vote",
    "quiet": "a few people come, and hardly anybody votes",
    "late": "what was kept back on earlier days arrives, about answers of those days",
    "duplicates": "every vote is sent twice or three times, some keys with another body",
    "corrupt": "broken and senseless bodies, and a file with broken lines in the inbox",
    "flippers": "a mob of new accounts votes the opposite of what people think",
    "trigger": "a few accounts make every answer with their words in it win",
}
"""One line per kind of day; the report prints these."""

HARD: tuple[DayKind, ...] = ("quiet", "late", "flippers", "duplicates", "corrupt", "trigger")
LEAST_RISE = 0.20  # of hidden satisfaction, from the first night to the last
MOST_FALL = 0.05  # below the best night so far
LONGEST_FALL = 1  # nights in a row
MOST_NUMBERED = 30  # nights in the picture, beyond which only some of them have their number


def plan(nights: int, seed: int) -> list[DayKind]:
    """Return what each day is. The first two and every second later one are ordinary, about.

    The first is the baseline's, against which the last is held; of the days from the third on half
    are hard, each kind in turn, in an order that follows from the seed.
    """
    rng = random.Random(f"nights {seed}")
    later = max(0, nights - 2)
    hard: list[DayKind] = []
    while len(hard) < (later + 1) // 2:
        hard += rng.sample(HARD, len(HARD))
    days: list[DayKind] = hard[: (later + 1) // 2]
    days += ["ordinary"] * (later - len(days))
    rng.shuffle(days)
    return ["ordinary", "ordinary", *days][:nights]


@dataclass(frozen=True, slots=True)
class Satisfaction:
    """The mean hidden preference of what people saw, 0 to 1, with its 95 % interval."""

    mean: float
    low: float
    high: float
    replies: int


@dataclass(frozen=True, slots=True)
class Night:
    """One day and the night after it."""

    number: int  # from 1
    kind: DayKind
    satisfaction: Satisfaction
    versions: Mapping[str, int]  # that answered -> replies
    sent: int  # votes and other bodies, over HTTP and in files
    accepted: int
    known: int  # sent before under the same key
    refused: Mapping[str, int]  # at the door, by rule
    quarantined: Mapping[str, int]  # by rule: rows set aside by a file's reader or by validation
    turns: Sequence[str]  # one verdict per turn that ended
    experiment: str  # how each that ran stands at the night's end; empty without one
    champion: int  # in the morning after
    alerts: Sequence[str]  # what stood at the end of the simulated day, by name
    said_trigger: int  # replies with the planted words
    manual_steps: int  # so far: what the ledger, the claims and the experiments say a person did
    seconds: float  # it took here

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Night:
        """Return the night that `asdict` wrote."""
        return cls(**{**value, "satisfaction": Satisfaction(**value["satisfaction"])})


@dataclass(frozen=True, slots=True)
class Promise:
    """One thing that must hold over all nights."""

    what: str
    needed: str
    found: str
    met: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All nights of one simulation."""

    agent_id: str
    seed: int
    events: int  # votes an ordinary day brings
    people: int
    trial: int  # votes about version 0 in a file on the first evening
    turn_at: int  # new votes that start a turn
    nights: Sequence[Night] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: what was asked for, every night, every promise."""
        return {**asdict(self), "promises": [asdict(p) for p in promises(self.nights)]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        """Return the report that `to_json` wrote."""
        asked = ("agent_id", "seed", "events", "people", "trial", "turn_at")
        return cls(
            **{key: value[key] for key in asked},
            nights=[Night.from_json(night) for night in value["nights"]],
        )


def falls(means: Sequence[float]) -> list[bool]:
    """Return for each night whether it lies more than MOST_FALL below the best before."""
    return [
        mean < (1 - MOST_FALL) * max(means[:place], default=mean)
        for place, mean in enumerate(means)
    ]


def longest_run(flags: Sequence[bool]) -> int:
    """Return how many True there are in a row, at most."""
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def promises(nights: Sequence[Night]) -> list[Promise]:
    """Return what was promised of many nights, and what was found."""
    means = [night.satisfaction.mean for night in nights]
    first, last = nights[0], nights[-1]
    rise = means[-1] / means[0] - 1
    fell = falls(means)
    run = longest_run(fell)
    which = [str(night.number) for night, low in zip(nights, fell, strict=True) if low]
    manual = last.manual_steps
    return [
        Promise(
            f"hidden satisfaction, night {first.number} to night {last.number}",
            f"≥ {LEAST_RISE:.0%} up",
            f"{means[0]:.3f} → {means[-1]:.3f} ({rise:+.1%})",
            rise >= LEAST_RISE,
        ),
        Promise(
            f"more than {MOST_FALL:.0%} below its best, nights in a row",
            f"≤ {LONGEST_FALL}",
            f"{run} (nights {', '.join(which)})" if which else "0",
            run <= LONGEST_FALL,
        ),
        Promise("manual steps", "0", str(manual), manual == 0),
    ]


def to_markdown(report: Report) -> str:
    """Return the promises and a row per night as Markdown."""
    lines = ["| what | needed | found | |", "|---|---|---|---|"]
    for p in promises(report.nights):
        lines.append(f"| {p.what} | {p.needed} | {p.found} | {'met' if p.met else 'short'} |")
    lines += [
        "",
        "| night | day | hidden satisfaction | sent / accepted / known | refused | quarantined "
        "| champion | experiment | turns |",
        "|" + "---|" * 9,
    ]
    for night in report.nights:
        s = night.satisfaction
        cells = (
            str(night.number),
            night.kind,
            f"{s.mean:.3f} ({s.low:.3f} to {s.high:.3f})",
            f"{night.sent:,} / {night.accepted:,} / {night.known:,}",
            _counted(night.refused),
            _counted(night.quarantined),
            str(night.champion),
            night.experiment or "–",
            "; ".join(night.turns) or "none",
        )
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def draw(report: Report, path: Path) -> None:
    """Write the picture: satisfaction per night with its interval, hard days and champions."""
    from matplotlib.figure import Figure

    nights = report.nights
    x = [night.number for night in nights]
    means = [night.satisfaction.mean for night in nights]
    below = [n.satisfaction.mean - n.satisfaction.low for n in nights]
    above = [n.satisfaction.high - n.satisfaction.mean for n in nights]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(means[0], color="#999999", linestyle=":", label="night 1, the baseline")
    axes.axhline(
        means[0] * (1 + LEAST_RISE), color="#1b7837", linestyle=":", label=f"{LEAST_RISE:.0%} up"
    )
    axes.errorbar(x, means, yerr=[below, above], fmt="o-", color="#2166ac", capsize=3)
    top = max(means) + max(above)
    for night, before in zip(nights, [None, *(n.champion for n in nights)], strict=False):
        if night.kind != "ordinary":
            axes.annotate(
                night.kind,
                (night.number, night.satisfaction.low),
                xytext=(0, -6),
                textcoords="offset points",
                ha="center",
                va="top",
                rotation=90,
                fontsize=8,
                color="#b2182b",
            )
        if night.champion != before:
            axes.text(night.number, top + 0.012, f"v{night.champion}", ha="center", fontsize=8)
    lowest = min(n.satisfaction.low for n in nights)
    axes.set(
        title=f"What people secretly thought of what they saw, {len(nights)} nights",
        xlabel="night (above: the champion from the morning after on)",
        ylabel="hidden satisfaction, 0 to 1",
        xticks=x[:: -(-len(x) // MOST_NUMBERED)],
        ylim=(max(0.0, lowest - 0.08), min(1.05, top + 0.04)),
    )
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "–"
