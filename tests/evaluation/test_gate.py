from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.config import RECIPES, load_settings
from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.gate import (
    DEFAULT_RULES,
    GateDecision,
    GateRule,
    decide,
    read_rules,
)
from rlhf_pipeline.evaluation.metrics import Number
from rlhf_pipeline.evaluation.report import EvaluationReport
from rlhf_pipeline.stages import gate_limits


def system(score: float, **changes: float) -> dict[str, Number]:
    values = {
        "gate_score": score,
        "length_tokens": 20.0,
        "distinct_1": 0.5,
        "distinct_2": 0.8,
        "repetition": 0.05,
        "truncation_rate": 0.0,
        "perplexity": 12.0,
        "kl_to_baseline": 0.0,
    }
    return {key: Number(value, n=100) for key, value in (values | changes).items()}


def report(**changes: float) -> EvaluationReport:
    """A candidate that passes every rule but for the changes to its numbers."""
    better = {"gate_score": Number(0.4, 0.2, 0.6, 100)}
    return EvaluationReport(
        prompts=100,
        conversations=100,
        seed=0,
        temperature=0.7,
        champion_is_baseline=False,
        numbers={
            "candidate": system(1.0, **({"kl_to_baseline": 4.0} | changes)),
            "baseline": system(0.5),
            "champion": system(0.6),
        },
        differences={"baseline": better, "champion": better},
        win_rates={a: Number(0.7, 0.6, 0.8, 100) for a in ("baseline", "champion")},
        length_controlled_win_rates={
            a: Number(0.66, 0.55, 0.75, 100) for a in ("baseline", "champion")
        },
        scores={s: [0.0] for s in ("candidate", "baseline", "champion")},
        samples=[],
        seconds=1.0,
    )


FACTS = {
    "reward/accuracy_over_floor": 0.2,
    "reward/accuracy_low": 0.66,
    "reward/accuracy_over_words": 0.1,
    "reward/accuracy_change_high": 0.03,
    "reward/ece_beyond_chance": 0.01,
    "reward/held_out_pairs": 400.0,
    "reward/disagreement_ratio": 1.2,
    "reward/worst_group_high": 0.7,
    "votes/top_share": 0.04,
    "votes/narrow_ngrams": 0.0,
    "drift/psi": 0.1,
    "vs_champion/behaviour_worse": 0.0,
    "vs_baseline/behaviour_worse": 0.0,
    "vs_champion/judge_win_rate_high": 0.6,
}


def verdicts(decision: GateDecision) -> dict[str, str]:
    return {r.rule: r.verdict for r in decision.results}


def test_a_better_candidate_passes_every_rule() -> None:
    decision = decide(report(), facts=FACTS)
    assert decision.passed
    assert set(verdicts(decision).values()) == {"pass"}
    assert decision.reasons == ()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"length_tokens": 15.9}, "length_at_least"),
        ({"length_tokens": 25.1}, "length_at_most"),
        ({"distinct_2": 0.71}, "diversity"),
        ({"repetition": 0.0626}, "repetition"),
        ({"truncation_rate": 0.011}, "truncation"),
        ({"kl_to_baseline": 20.5}, "kl_stop"),
    ],
)
def test_a_breach_of_a_blocking_rule_refuses(changes: dict[str, float], rule: str) -> None:
    decision = decide(report(**changes))
    assert not decision.passed
    failed = [name for name, verdict in verdicts(decision).items() if verdict == "fail"]
    assert failed == [rule]
    assert "needed" in decision.reasons[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"length_tokens": 16.0},
        {"length_tokens": 25.0},
        {"distinct_2": 0.7201},
        {"repetition": 0.0625},
        {"truncation_rate": 0.01},
        {"kl_to_baseline": 20.0},
    ],
)
def test_the_limit_itself_is_allowed(changes: dict[str, float]) -> None:
    assert decide(report(**changes)).passed


def test_truncation_no_worse_than_the_champions_passes() -> None:
    found = report(truncation_rate=0.2)
    found.numbers["champion"]["truncation_rate"] = Number(0.2, n=100)
    assert decide(found).passed


@pytest.mark.parametrize(("low", "passes"), [(-0.03, True), (0.0, True), (0.001, False)])
def test_truncation_that_chance_explains_passes(low: float, passes: bool) -> None:
    """Of two that are cut off equally often, one is so more often than the other."""
    found = report(truncation_rate=0.21)
    found.numbers["champion"]["truncation_rate"] = Number(0.20, n=100)
    found.differences["champion"]["truncation_rate"] = Number(0.01, low, 0.05, 100)
    assert decide(found).passed == passes


@pytest.mark.parametrize("now", [0.0, 0.3])
def test_where_the_champion_says_single_words_there_is_no_diversity_to_lose(now: float) -> None:
    found = report(distinct_2=now)
    found.numbers["champion"]["distinct_2"] = Number(0.0, n=100)
    assert decide(found).passed


def test_next_to_no_repetition_may_double() -> None:
    found = report(repetition=0.002)
    found.numbers["champion"]["repetition"] = Number(0.001, n=100)
    assert decide(found).passed


def test_lower_bounds_decide_not_means() -> None:
    found = report()
    found.differences["champion"] = {"gate_score": Number(0.4, 0.0, 0.8, 100)}
    assert verdicts(decide(found))["score_vs_champion"] == "fail"
    found = report()
    found.length_controlled_win_rates["champion"] = Number(0.6, 0.5, 0.7, 100)
    assert verdicts(decide(found))["win_rate_vs_champion"] == "fail"


def test_a_warning_blocks_nothing() -> None:
    decision = decide(report(kl_to_baseline=12.0, perplexity=30.0))
    assert decision.passed
    assert verdicts(decision)["kl_warning"] == "warn"
    assert verdicts(decision)["perplexity"] == "warn"
    assert list(verdicts(decision).values()).count("warn") == 2


def test_a_missing_number_is_a_failure_never_a_pass() -> None:
    found = report()
    found.differences["champion"] = {"gate_score": Number(9.0, n=1)}  # one prompt: no interval
    for numbers in found.numbers.values():
        del numbers["perplexity"], numbers["distinct_2"]
    decision = decide(found)
    assert not decision.passed
    assert verdicts(decision)["score_vs_champion"] == "fail"
    assert verdicts(decision)["diversity"] == "fail"
    assert verdicts(decision)["perplexity"] == "off"  # nobody preferred or corrected anything
    assert "found no number" in decision.reasons[0]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_fails(number: float) -> None:
    decision = decide(report(kl_to_baseline=number))
    assert verdicts(decision)["kl_stop"] == "fail"
    json.dumps(decision.to_json(), allow_nan=False)


def test_limits_are_overridden_by_name_and_switched_off_in_sight() -> None:
    short = report(length_tokens=10.0)
    assert decide(short, {"length_at_least": 0.4}).passed
    for off in (None, -math.inf, math.inf):
        decision = decide(short, {"length_at_least": off})
        assert decision.passed
        assert verdicts(decision)["length_at_least"] == "off"
        assert "| length_at_least | 0.5 | – | off |" in decision.to_markdown()
        json.dumps(decision.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("fact", "number", "verdict"),
    [
        ("reward/accuracy_over_floor", -0.001, "fail"),
        ("reward/accuracy_change_high", -0.011, "fail"),
        ("reward/ece_beyond_chance", 0.051, "fail"),
        ("reward/ece_beyond_chance", math.nan, "fail"),
        ("reward/accuracy_low", 0.5, "pause"),
        ("reward/held_out_pairs", 99.0, "warn"),
        ("reward/worst_group_high", 0.49, "pause"),
        ("votes/top_share", 0.11, "pause"),
        ("votes/narrow_ngrams", 1.0, "pause"),
        ("drift/psi", 0.21, "pause"),
        ("vs_baseline/behaviour_worse", 1.0, "pause"),
    ],
)
def test_what_the_gate_knows_beside_the_report_is_judged_too(
    fact: str, number: float, verdict: str
) -> None:
    decision = decide(report(), facts=FACTS | {fact: number})
    assert [r.verdict for r in decision.results if r.verdict != "pass"] == [verdict]
    assert decision.passed == (verdict != "fail")
    assert len(decision.pauses) == (verdict == "pause")
    if decision.pauses:
        assert f"- {decision.pauses[0]}: a person decides" in decision.to_markdown()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"length_tokens": 9.9}, "length_since_baseline_at_least"),
        ({"length_tokens": 40.1}, "length_since_baseline_at_most"),
        ({"distinct_2": 0.59}, "diversity_since_baseline"),
        ({"repetition": 0.101}, "repetition_since_baseline"),
        ({"truncation_rate": 0.06}, "truncation_since_baseline"),
    ],
)
def test_a_person_looks_where_small_changes_have_added_up(
    changes: dict[str, float], rule: str
) -> None:
    """The candidate is as its champion is, which versions before brought so far."""
    found = report(**changes)
    numbers = {**found.numbers, "champion": system(0.6, **changes)}
    decision = decide(replace(found, numbers=numbers), facts=FACTS)
    assert decision.passed
    assert [name for name, said in verdicts(decision).items() if said != "pass"] == [rule]
    assert len(decision.pauses) == 1


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_versions_may_change_as_much_in_all_as_one_may(name: str) -> None:
    """Else the first, whose champion is the baseline, waits for a person though its rule holds."""
    set_by_recipe = gate_limits(load_settings(name))
    limits = {rule.name: set_by_recipe.get(rule.name, rule.limit) for rule in DEFAULT_RULES}
    for one, in_all, way in (
        ("length_at_least", "length_since_baseline_at_least", 1),
        ("length_at_most", "length_since_baseline_at_most", -1),
        ("diversity", "diversity_since_baseline", 1),
        ("repetition", "repetition_since_baseline", -1),
        ("truncation", "truncation_since_baseline", -1),
    ):
        assert way * limits[in_all] <= way * limits[one], (name, one)


def test_what_cannot_be_told_is_said_and_not_judged() -> None:
    results = {r.rule: r for r in decide(report()).results}
    assert results["top_raters"].verdict == "off"
    assert results["top_raters"].words.endswith("nothing to judge")
    assert "not measured | ≤ 0.1 | off" in decide(report()).to_markdown()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1, 2]", "must hold rules by name"),
        ("a: {metric: m, meaning: x, breach: refuse}", "the rule a needs"),
        ("a: {metric: m, meaning: x, breach: refuse, above: 1, at_most: 2}", "the rule a needs"),
        ("a: {metric: m, meaning: x, breach: shout, above: 1}", "breach 'shout'"),
        ("a: {metric: m, meaning: x, breach: warn, above: 1, colour: 2}", "colour"),
        ("a: {metric: m, meaning: x, breach: warn, above: low}", "must be a number, found 'low'"),
        ("a: [", "needed the gate's rules"),
    ],
)
def test_rules_that_make_no_sense_are_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    with pytest.raises(EvaluationError, match=found):
        read_rules(tmp_path / "gate.yaml")


def test_a_misspelt_limit_is_refused() -> None:
    with pytest.raises(EvaluationError, match="found kl_stopp"):
        decide(report(), {"kl_stopp": 50.0})
    with pytest.raises(EvaluationError, match="found nan"):
        decide(report(), {"kl_stop": math.nan})


def test_a_decision_survives_json() -> None:
    decision = decide(report(length_tokens=40.0))
    value: Any = json.loads(json.dumps(decision.to_json()))
    assert GateDecision.from_json(value) == decision
    assert value["passed"] is False


def test_the_markdown_says_verdict_numbers_and_reasons() -> None:
    text = decide(report(length_tokens=40.0)).to_markdown()
    assert text.startswith("**The gate refuses it.**")
    assert "| length_at_most | 2 | ≤ 1.25 | fail |" in text
    assert "- mean completion length over the champion's: needed ≤ 1.25, found 2" in text
    assert decide(report()).to_markdown().startswith("**The gate lets it through.**")


def test_every_default_rule_reads_a_number_that_a_report_has() -> None:
    numbers = report().metrics() | FACTS
    assert all(rule.metric in numbers for rule in DEFAULT_RULES)
    assert len({rule.name for rule in DEFAULT_RULES}) == len(DEFAULT_RULES)


def test_rules_of_ones_own_are_judged_alike() -> None:
    rule = GateRule("short", "candidate/length_tokens", "at_most", 5.0, "refuse", "length")
    assert not decide(report(), rules=[rule]).passed
    assert decide(report(), rules=[replace(rule, limit=50.0)]).passed


def test_on_few_conversations_a_person_decides() -> None:
    """Two prompts on which it did better by chance give an interval above 0."""
    few = decide(replace(report(), conversations=19))
    assert few.passed
    [paused] = [result for result in few.results if result.verdict == "pause"]
    assert (paused.rule, paused.number) == ("held_out_prompts", 19.0)
    assert all(
        result.verdict != "pause" for result in decide(replace(report(), conversations=20)).results
    )
