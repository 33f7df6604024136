"""What the gate knows beside the comparison: the judge's own accuracy, the voters, the drift.

A number that cannot be told honestly is left out: the rule that reads it then says so. Numbers of
few pairs come with what chance may give, so that a small data set is neither excused nor blamed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_pipeline.evaluation.report import APART
from rlhf_pipeline.feedback.support import JUDGED_RATERS
from rlhf_pipeline.files import read_json
from rlhf_pipeline.reward import REPORT
from rlhf_pipeline.reward.calibration import beyond_chance, highest_floor, judged_by

FEWEST_PAIRS = 100  # below which the accuracy's 95 % interval is wider than 20 points
DRIFT, SUPPORT = "drift.json", "support.json"  # in the turn's data folder
DRIFT_PAGE = "drift.html"  # beside it, and in the folder drift of the turn's MLflow run
REWARD_REPORT = Path("reward") / "gate" / REPORT  # in a turn's work folder
PROXY_REPORT = Path("reward") / "proxy" / REPORT  # likewise


def gate_facts(data: Path, work: Path, previous: Path | None) -> dict[str, float]:
    """Return the numbers of evaluation/gate.yaml that are not the comparison's, by name.

    `data` and `work` are the turn's folders, `previous` the work folder of the turn whose judge is
    the measure of this one's.
    """
    facts: dict[str, float] = {}
    if (work / REWARD_REPORT).exists():
        earlier = previous / REWARD_REPORT if previous else None
        before = read_json(earlier) if earlier and earlier.exists() else None
        facts |= reward_facts(read_json(work / REWARD_REPORT), before)
    if (data / SUPPORT).exists():
        facts |= support_facts(read_json(data / SUPPORT))
    if (data / DRIFT).exists():
        facts |= drift_facts(read_json(data / DRIFT))
    return facts


def reward_facts(
    report: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return what the judge is worth, from its report.json and that of the judge before.

    The change's upper bound is Newcombe's for two proportions of different pairs (1998,
    doi:10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I, method 10): the judge is
    refused for being worse only where chance does not explain it. Judges that were judged by
    different things (pairs, or votes on single answers) are not compared.
    """
    facts = {
        "reward/held_out_pairs": float(report["n"]),
        "reward/accuracy_low": float(report["interval"][0]),
    }
    if report["n"] < FEWEST_PAIRS:
        return facts
    facts["reward/accuracy_over_floor"] = report["accuracy"] - highest_floor(report["floors"])
    if (words := (report.get("findings") or {}).get("bag_of_words")) is not None:
        facts["reward/accuracy_over_words"] = report["accuracy"] - words["low"]
    facts["reward/ece_beyond_chance"] = beyond_chance(report)
    alike = before is not None and judged_by(before) == judged_by(report)
    if before is not None and alike and before["n"] >= FEWEST_PAIRS:
        up = report["interval"][1] - report["accuracy"]
        down = before["accuracy"] - before["interval"][0]
        change = report["accuracy"] - before["accuracy"]
        facts["reward/accuracy_change_high"] = change + math.hypot(up, down)
    return facts


def disagreement_facts(numbers: Mapping[str, float], work: Path) -> dict[str, float]:
    """Return how far the proxy's heads disagree on the candidate's completions, over held-out ones.

    Far above 1 the candidate says what the votes told nothing about, and its reward is a guess.
    `numbers` are EvaluationReport.metrics(). Nothing where the proxy has one head.
    """
    found = numbers.get(f"candidate/proxy{APART}")
    if found is None or not (work / PROXY_REPORT).exists():
        return {}
    held_out = read_json(work / PROXY_REPORT).get("disagreement", 0.0)
    return {"reward/disagreement_ratio": found / held_out} if held_out > 0 else {}


def support_facts(support: Mapping[str, Any]) -> dict[str, float]:
    """Return what speaks against trusting the votes.

    The n-grams that few raters carry and that were left in, and the share of all votes by the
    hundredth of the raters who gave most, in (0, 1]; not that below JUDGED_RATERS, a hundredth of
    whom is nobody.
    """
    facts = {"votes/narrow_ngrams": float(support["left_in"])} if "left_in" in support else {}
    if support["raters"] >= JUDGED_RATERS:
        facts["votes/top_share"] = support["top_share"]
    return facts


def drift_facts(drift: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest PSI among the features that drifted, 0 where none did.

    Nothing where there was no turn before to compare with, or too few votes.
    """
    if drift.get("compared_with") is None or not drift["psi"]:
        return {}
    return {"drift/psi": max((drift["psi"][f] for f in drift["features"]), default=0.0)}
