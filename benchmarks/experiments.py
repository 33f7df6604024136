"""Live experiments by simulation: how often they are wrong, and how fast they are right.

    python -m benchmarks.experiments [--runs 2000]

Users rate several times and agree with themselves (intra-class correlation 0.3); the numbers are
looked at after every 20 users, all the time, by the very functions the service uses.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.promises import tell
from rlhf_pipeline.config import ExperimentSettings
from rlhf_pipeline.experiment.assignment import arm_of
from rlhf_pipeline.experiment.decision import GUARDRAILS, PRIMARY, Arms, Bounds, decide
from rlhf_pipeline.experiment.live import BELIEVED, bounds_under
from rlhf_pipeline.experiment.sequences import RampStep, Sample, sample_ratio_evidence

Users = NDArray[np.float64]  # (users, ratings) of 0 and 1

RAMP = (0.01, 0.05, 0.10, 0.25, 0.50)
BOUNDS = bounds_under(ExperimentSettings(ramp=RAMP))  # at the last step, the one that is played
WHOLE = replace(BOUNDS, give_up=0)  # nobody gives up: every experiment has its whole time
CORRELATION = 0.3
RATE = 0.70
EVERY = 20  # users per arm between looks
MOST = 1500  # users per arm that come in an experiment's whole time, as many every day
CONTENT = 0.98  # of people, where nearly all are
FAILS = 0.025  # of the answers, where 0.02 more than the champion's are allowed
USERS_PER_STEP = 400  # of the challenger's, where steps of the ramp are played one by one


@dataclass(frozen=True)
class Ended:
    """How one simulated experiment ended, and with how many rated users per arm."""

    action: str
    users: int


def people(rng: np.random.Generator, rate: float, users: int) -> Users:
    """Return each user's ratings: 1 to 10 of them, from a rate of their own (NaN where none)."""
    spread = 1 / CORRELATION - 1
    own = rng.beta(rate * spread, (1 - rate) * spread, users)
    ratings = (rng.random((users, 10)) < own[:, None]).astype(np.float64)
    ratings[np.arange(10) >= rng.integers(1, 11, users)[:, None]] = np.nan
    return ratings


def play(
    rng: np.random.Generator, lift: float, bounds: Bounds = BOUNDS, *, longer: float | None = None
) -> Ended:
    """Return the end of one experiment; users come evenly, each rates again at later looks.

    Answers are of one length, or of lengths that differ from user to user, the challenger's by so
    much `longer` (a share of ExperimentSettings.long_words).
    """
    champion, challenger = people(rng, RATE, MOST), people(rng, RATE + lift, MOST)
    same = Sample.of(rng.random(MOST) < 0.02)  # guardrails that do not differ, well known
    calm = {m.name: Arms(same, same) for m in GUARDRAILS}
    lengths = [] if longer is None else [rng.normal(0.25 + x, 0.1, MOST) for x in (longer, 0.0)]
    for users in range(EVERY, MOST + 1, EVERY):
        # Whoever came first has had the most time to rate again.
        seen = np.maximum(1, 10 * (users - np.arange(users)) // users)[:, None] > np.arange(10)
        measured: dict[str, Arms] = {}
        samples = []
        for ratings in (challenger, champion):
            shown = np.where(seen, ratings[:users], np.nan)
            samples.append(Sample.of(np.nanmean(shown, axis=1)))
        measured["thumbs_down"] = Arms(*(Sample(s.users, 1 - s.mean, s.variance) for s in samples))
        if lengths:
            measured["length"] = Arms(*(Sample.of(n[:users].clip(0, 1)) for n in lengths))
        arms = {**calm, **measured, PRIMARY.name: Arms(*samples)}
        half = RampStep(0.5, users, users)
        known = BELIEVED <= users / MOST < 1
        verdict = decide(
            arms,
            [half],
            bounds=bounds,
            timed_out=users == MOST,
            growth=MOST / users if known else None,
        )
        if verdict.action != "continue":
            return Ended(verdict.action, users)
    raise AssertionError("an experiment that is out of time ends")


def cost(lift: float, runs: int) -> tuple[float, float]:
    """Return which share is promoted in the whole time, and which part of all giving up costs."""
    found = [play(np.random.default_rng(seed), lift, WHOLE).action for seed in range(runs)]
    still = [play(np.random.default_rng(seed), lift).action for seed in range(runs)]
    lost = [f for f, s in zip(found, still, strict=True) if s != "promote"].count("promote")
    return found.count("promote") / runs, lost / runs


def step_promotes(
    rng: np.random.Generator, share: float, content: tuple[float, float], fails: float
) -> bool:
    """Return whether one step of the ramp promotes, of whose people such parts are content.

    The challenger's first; it breaks off at a part `fails` of the answers, the champion at none.
    """
    few = (rng.random(USERS_PER_STEP) < content[0]).astype(np.float64)
    beside = round((1 - share) / share)  # of the champion's for each of the challenger's
    many = (rng.random(USERS_PER_STEP * beside) < content[1]).astype(np.float64)
    broken = (rng.random(USERS_PER_STEP) < fails).astype(np.float64)
    for users in range(EVERY, USERS_PER_STEP + 1, EVERY):
        samples = [Sample.of(few[:users]), Sample.of(many[: users * beside])]
        never = [Sample(s.users, 0.0, 0.0) for s in samples]
        arms = {m.name: Arms(*never) for m in GUARDRAILS}
        arms["fallbacks"] = Arms(Sample.of(broken[:users]), never[1])
        arms[PRIMARY.name] = Arms(*samples)
        step = RampStep(1 / (1 + beside), users, users * beside)
        if decide(arms, [step], bounds=BOUNDS).action == "promote":
            return True
    return False


def imbalance(rng: np.random.Generator, share: float, users: int) -> int | None:
    """Return after how many users the ratio test speaks, looking after every ten; None: never."""
    challenger = np.cumsum(rng.random(users) < share)
    for n in range(10, users + 1, 10):
        met = int(challenger[n - 1])
        if sample_ratio_evidence([RampStep(0.5, met, n - met)]) >= 500:
            return n
    return None


def ramp_arms(users: int) -> Iterator[str]:
    """Yield each user's arms over the ramp, a letter per step: 0 champion, 1 challenger."""
    for n in range(users):
        yield "".join(str(int(arm_of("salt", f"user {n}", s) == "challenger")) for s in RAMP)


def digest(users: int) -> str:
    """Return a digest of everybody's arms, for two processes to agree on."""
    return hashlib.sha256("\n".join(ramp_arms(users)).encode()).hexdigest()


def assignment(users: int) -> tuple[int, float]:
    """Return unplanned switches over the ramp, and chi-squared of where people leave champion."""
    arms = list(ramp_arms(users))
    switches = sum("10" in steps for steps in arms)  # back to the champion
    code = f"from benchmarks.experiments import digest; print(digest({users}), end='')"
    replica = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    switches += replica.stdout != digest(users)
    moved_at = np.bincount([steps.count("0") for steps in arms], minlength=len(RAMP) + 1)
    planned = np.diff(np.array([0.0, *RAMP, 1.0])) * users
    return switches, float(((moved_at - planned) ** 2 / planned).sum())


def main() -> None:
    """Print the table; status 1 if a promise is short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--users", type=int, default=1_000_000, help="for the assignment row")
    options = parser.parse_args()
    rng = np.random.default_rng(0)

    rows: list[tuple[str, str, str, bool]] = []

    def experiments(lift: float, runs: int) -> list[Ended]:
        return [play(rng, lift) for _ in range(runs)]

    same = experiments(0.0, options.runs)
    promoted = sum(e.action == "promote" for e in same) / len(same)
    rolled = sum(e.action == "roll_back" for e in same) / len(same)
    rows.append(("A/A: false promotions", "≤ 5 %", f"{promoted:.2%}", promoted <= 0.05))
    rows.append(("A/A: false rollbacks", "≤ 1 %", f"{rolled:.2%}", rolled <= 0.01))
    took = float(np.median([e.users for e in same])) / MOST
    rows.append(
        ("A/A: part of its time that one takes, median", "≤ 50 %", f"{took:.0%}", took <= 0.5)
    )

    def promoting(share: float, content: tuple[float, float], fails: float) -> float:
        steps = [step_promotes(rng, share, content, fails) for _ in range(options.runs // 4)]
        return sum(steps) / len(steps)

    for share in (0.01, 0.10, 0.25):
        promoted = promoting(share, (CONTENT, CONTENT), 0.0)
        row = f"A/A, {CONTENT:.0%} content, {share:.0%} meet the challenger: false promotions"
        rows.append((row, f"≤ {BOUNDS.promote:.0%}", f"{promoted:.2%}", promoted <= BOUNDS.promote))
    for share in (0.10, 0.50):
        promoted = promoting(share, (0.90, 0.60), FAILS)
        row = f"+30 points, breaks off at {FAILS:.1%}, {share:.0%} meet it: promotions"
        rows.append((row, f"≤ {BOUNDS.promote:.0%}", f"{promoted:.2%}", promoted <= BOUNDS.promote))

    better = experiments(0.10, options.runs // 4)
    users = float(np.median([e.users if e.action == "promote" else np.inf for e in better]))
    rows.append(("+10 points: rated users per arm, median", "≤ 500", f"{users:.0f}", users <= 500))
    for lift in (0.03, 0.05, 0.10):
        power, lost = cost(lift, options.runs // 4)
        row = f"+{100 * lift:.0f} points: of promotions in the whole time, lost by giving up"
        rows.append((row, "≤ 3 points", f"{lost:.1%} of {power:.1%}", lost <= 0.03))
    worse = experiments(-0.20, options.runs // 4)
    fast = sum(e.action == "roll_back" and e.users <= 350 for e in worse) / len(worse)
    rows.append(("−20 points: rolled back within 350", "≥ 90 %", f"{fast:.1%}", fast >= 0.90))

    for words, wrong in ((16, "roll_back"), (60, "promote")):
        longer = words / ExperimentSettings().long_words
        runs = range(options.runs // 4)
        ends = [play(np.random.default_rng(seed), 0.10, longer=longer).action for seed in runs]
        share = ends.count(wrong) / len(ends)
        row = f"+10 points and {words} words longer, of 40 allowed: {wrong.replace('_', ' ')}"
        rows.append((row, "≤ 1 %", f"{share:.1%}", share <= 0.01))

    uneven = [imbalance(rng, 0.55, 3000) for _ in range(options.runs // 4)]
    heard = sum(n is not None for n in uneven) / len(uneven)
    rows.append(("55/45 heard within 3,000 users", "≥ 90 %", f"{heard:.1%}", heard >= 0.90))
    even = [imbalance(rng, 0.50, 3000) for _ in range(options.runs)]
    false = sum(n is not None for n in even) / len(even)
    rows.append(("50/50: false alarms", "≤ 0.2 %", f"{false:.2%}", false <= 0.002))

    switches, chi2 = assignment(options.users)
    rows.append((f"unplanned switches, {options.users:,} users", "0", str(switches), not switches))
    rows.append(("chi-squared, 5 degrees", "< 20.5 (p > 0.001)", f"{chi2:.1f}", chi2 < 20.5))
    tell(rows)


if __name__ == "__main__":
    main()
