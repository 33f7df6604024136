"""The gate: a table of rules with numbers. What is missing or not a number never passes.

A candidate that is refused is a normal outcome: it is registered with the reasons and not promoted.
The limits come from simulations and common practice, not from law; a recipe overrides them by name,
and `.inf` (or null) switches a rule off, which the table then says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.report import EvaluationReport

Comparison = Literal["above", "at_least", "at_most"]
Verdict = Literal["pass", "warn", "fail", "off"]


@dataclass(frozen=True, slots=True)
class GateRule:
    """One number of the report and where it must lie."""

    name: str
    metric: str  # a name of EvaluationReport.metrics()
    comparison: Comparison
    limit: float
    blocking: bool  # False: a breach is a warning
    meaning: str


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What one rule found."""

    rule: str
    metric: str
    comparison: Comparison
    limit: float | None  # None: switched off
    number: float | None  # None: not measured
    blocking: bool
    verdict: Verdict
    words: str


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The verdict and the reasons for it."""

    passed: bool
    results: tuple[RuleResult, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why it was refused; empty where it passed."""
        return tuple(r.words for r in self.results if r.verdict == "fail")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what a person should look at although it blocks nothing."""
        return tuple(r.words for r in self.results if r.verdict == "warn")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as the ledger keeps them."""
        return {"passed": self.passed, "results": [asdict(r) for r in self.results]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GateDecision:
        """Return the decision that `to_json` gave."""
        return cls(value["passed"], tuple(RuleResult(**r) for r in value["results"]))

    def to_markdown(self) -> str:
        """Return the verdict and the table of rules."""
        rows = ["| rule | number | limit | verdict |", "|---|---|---|---|"]
        for r in self.results:
            number = "not measured" if r.number is None else f"{r.number:.4g}"
            limit = "–" if r.limit is None else f"{SIGNS[r.comparison]} {r.limit:g}"
            rows.append(f"| {r.rule} | {number} | {limit} | {r.verdict} |")
        head = "**The gate lets it through.**" if self.passed else "**The gate refuses it.**"
        return "\n\n".join([head, "\n".join(rows), *(f"- {w}" for w in self.reasons)]) + "\n"


SIGNS: dict[Comparison, str] = {"above": ">", "at_least": "≥", "at_most": "≤"}

DEFAULT_RULES = (
    GateRule(
        "score_vs_baseline",
        "vs_baseline/gate_score_low",
        "above",
        0.0,
        True,
        "held-out score minus the baseline's, paired by prompt, lower bound",
    ),
    GateRule(
        "score_vs_champion",
        "vs_champion/gate_score_low",
        "above",
        0.0,
        True,
        "held-out score minus the champion's, paired by prompt, lower bound",
    ),
    GateRule(
        "win_rate_vs_champion",
        "vs_champion/length_controlled_win_rate_low",
        "above",
        0.5,
        True,
        "length-controlled win rate against the champion, lower bound",
    ),
    GateRule(
        "kl_warning",
        "candidate/kl_to_baseline",
        "at_most",
        10.0,
        False,
        "KL to the baseline, nats per completion",
    ),
    GateRule(
        "kl_stop",
        "candidate/kl_to_baseline",
        "at_most",
        20.0,
        True,
        "KL to the baseline, nats per completion",
    ),
    GateRule(
        "length_at_least",
        "vs_champion/length_ratio",
        "at_least",
        0.8,
        True,
        "mean completion length over the champion's",
    ),
    GateRule(
        "length_at_most",
        "vs_champion/length_ratio",
        "at_most",
        1.25,
        True,
        "mean completion length over the champion's",
    ),
    GateRule(
        "diversity",
        "vs_champion/distinct_2_change",
        "at_least",
        -0.10,
        True,
        "distinct word pairs, relative to the champion",
    ),
    GateRule(
        "repetition",
        "vs_champion/repetition_change",
        "at_most",
        0.25,
        True,
        "repeated 4-grams, relative to the champion",
    ),
    GateRule(
        "truncation",
        "vs_champion/truncation_beyond",
        "at_most",
        0.01,
        True,
        "share cut off at the token limit, counted where it exceeds the champion's",
    ),
    GateRule(
        "perplexity",
        "vs_baseline/perplexity_change",
        "at_most",
        1.0,
        False,
        "perplexity of reference completions, relative to the baseline",
    ),
)


def decide(
    report: EvaluationReport,
    limits: Mapping[str, float | None] | None = None,
    *,
    rules: Sequence[GateRule] = DEFAULT_RULES,
) -> GateDecision:
    """Return the gate's decision: passed if no blocking rule fails.

    `limits` replaces the limits of the rules it names; None or an infinite one switches the rule
    off. Raises EvaluationError on a name that no rule has: a misspelt limit would guard nothing.
    """
    limits = limits or {}
    unknown = sorted(set(limits) - {rule.name for rule in rules})
    if unknown:
        raise EvaluationError(
            f"limits need the names of rules, found {', '.join(unknown)}; the rules are "
            f"{', '.join(rule.name for rule in rules)}"
        )
    numbers = report.metrics()
    results = tuple(
        _judge(rule, numbers.get(rule.metric), limits.get(rule.name, rule.limit)) for rule in rules
    )
    return GateDecision(not any(r.verdict == "fail" for r in results), results)


def _judge(rule: GateRule, number: float | None, limit: float | None) -> RuleResult:
    if limit is not None and math.isnan(limit):
        raise EvaluationError(
            f"the limit of {rule.name} must be a number, found nan; correct it or set .inf for off"
        )
    if number is not None and not math.isfinite(number):
        number = None
    if limit is None or math.isinf(limit):
        return _result(rule, number, None, "off", f"{rule.meaning}: switched off")
    found = "no number" if number is None else f"{number:.4g}"
    words = f"{rule.meaning}: needed {SIGNS[rule.comparison]} {limit:g}, found {found}"
    if number is not None and _holds(number, rule.comparison, limit):
        return _result(rule, number, limit, "pass", words)
    return _result(rule, number, limit, "fail" if rule.blocking else "warn", words)


def _holds(number: float, comparison: Comparison, limit: float) -> bool:
    if comparison == "above":
        return number > limit
    return number >= limit if comparison == "at_least" else number <= limit


def _result(
    rule: GateRule, number: float | None, limit: float | None, verdict: Verdict, words: str
) -> RuleResult:
    return RuleResult(
        rule.name, rule.metric, rule.comparison, limit, number, rule.blocking, verdict, words
    )
