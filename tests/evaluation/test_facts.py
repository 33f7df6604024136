from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_pipeline.evaluation.facts import (
    disagreement_facts,
    drift_facts,
    gate_facts,
    reward_facts,
    support_facts,
)
from rlhf_pipeline.evaluation.gate import DEFAULT_RULES
from rlhf_pipeline.files import write_json


def judged(
    n: int, accuracy: float, low: float, high: float, ece: float = 0.07
) -> dict[str, object]:
    return {
        "n": n,
        "accuracy": accuracy,
        "interval": [low, high],
        "floors": {"longer": 0.6, "random": 0.5},
        "ece": ece,
        "ece_noise": 0.06,
    }


def test_the_judge_is_held_against_its_floor_chance_and_the_one_before() -> None:
    facts = reward_facts(judged(400, 0.70, 0.66, 0.74), judged(400, 0.75, 0.72, 0.78))
    assert facts["reward/accuracy_over_floor"] == pytest.approx(0.10)
    assert facts["reward/ece_beyond_chance"] == pytest.approx(0.01)
    # Newcombe: -0.05 + sqrt(0.04 ** 2 + 0.03 ** 2), a 3-4-5 triangle
    assert facts["reward/accuracy_change_high"] == pytest.approx(0.0)


def test_a_judge_below_a_bag_of_words_is_warned_of_and_never_refused() -> None:
    report = judged(400, 0.65, 0.60, 0.70)
    words = {"share": 0.72, "low": 0.68, "high": 0.76, "n": 400}
    report["floors"] = {"longer": 0.6, "random": 0.5, "bag_of_words": 0.72, "annotators": 0.8}
    facts = reward_facts({**report, "findings": {"bag_of_words": words}})
    assert facts["reward/accuracy_over_words"] == pytest.approx(-0.03)
    assert facts["reward/accuracy_over_floor"] == pytest.approx(0.05)
    assert "reward/accuracy_over_words" not in reward_facts({**report, "findings": None})
    [rule] = [r for r in DEFAULT_RULES if r.metric == "reward/accuracy_over_words"]
    assert (rule.comparison, rule.limit, rule.breach) == ("at_least", 0.0, "warn")


def test_few_pairs_say_only_how_few_they_are_and_whether_a_coin_does_as_well() -> None:
    facts = {"reward/held_out_pairs": 99, "reward/accuracy_low": 0.1}
    assert reward_facts(judged(99, 0.2, 0.1, 0.3)) == facts
    few_before = reward_facts(judged(400, 0.7, 0.6, 0.8), judged(99, 0.9, 0.8, 1.0))
    assert "reward/accuracy_change_high" not in few_before


def test_heads_that_disagree_on_what_the_candidate_says_are_a_number_for_the_gate(
    tmp_path: Path,
) -> None:
    numbers = {"candidate/proxy_disagreement": 0.9, "baseline/proxy_disagreement": 0.3}
    assert disagreement_facts(numbers, tmp_path) == {}
    write_json(tmp_path / "reward" / "proxy" / "report.json", {"disagreement": 0.5})
    facts = disagreement_facts(numbers, tmp_path)
    assert facts == {"reward/disagreement_ratio": pytest.approx(1.8)}
    assert disagreement_facts({"candidate/proxy_score": 1.0}, tmp_path) == {}  # one head
    write_json(tmp_path / "reward" / "proxy" / "report.json", {"disagreement": 0.0})
    assert disagreement_facts(numbers, tmp_path) == {}
    rules = {rule.name: rule for rule in DEFAULT_RULES}
    told = {name: rules[name] for name in ("disagreement_warning", "disagreement_stop")}
    assert {rule.metric for rule in told.values()} == set(facts)
    assert [(rule.limit, rule.breach) for rule in told.values()] == [(1.5, "warn"), (2, "refuse")]


def test_the_top_hundredth_of_the_raters_counts_from_a_hundred_raters_on() -> None:
    assert support_facts({"raters": 99, "top_share": 0.5}) == {}
    assert support_facts({"raters": 100, "top_share": 0.5}) == {"votes/top_share": 0.5}


def test_words_of_few_that_were_left_in_ask_for_a_person() -> None:
    (rule,) = (rule for rule in DEFAULT_RULES if rule.name == "narrow_support")
    assert support_facts({"raters": 9, "top_share": 0.5, "left_in": 2}) == {rule.metric: 2.0}
    assert (rule.limit, rule.breach) == (0, "pause")


def test_only_what_drifted_beyond_chance_counts() -> None:
    drift = {"compared_with": "a", "psi": {"topic": 0.3, "kind": 0.5}, "features": ["topic"]}
    assert drift_facts(drift) == {"drift/psi": 0.3}
    assert drift_facts({**drift, "features": []}) == {"drift/psi": 0.0}
    assert drift_facts({"compared_with": None, "drifted": False}) == {}
    assert drift_facts({"compared_with": "a", "psi": {}, "features": []}) == {}


def test_facts_come_from_the_turns_folders(tmp_path: Path) -> None:
    data, work, previous = (tmp_path / name for name in ("data", "work", "previous"))
    assert gate_facts(data, work, previous) == {}
    write_json(work / "reward" / "gate" / "report.json", judged(200, 0.8, 0.74, 0.85))
    write_json(previous / "reward" / "gate" / "report.json", judged(200, 0.8, 0.74, 0.85))
    write_json(data / "drift.json", {"compared_with": "b", "psi": {"kind": 0.1}, "features": []})
    write_json(data / "support.json", {"raters": 101, "top_share": 0.75})
    facts = gate_facts(data, work, previous)
    assert facts["votes/top_share"] == 0.75
    assert facts["drift/psi"] == 0
    assert facts["reward/accuracy_change_high"] > 0
