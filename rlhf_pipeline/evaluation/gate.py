"""The gate: a table of rules with numbers. What is missing or not a number never passes.

A candidate that is refused is a normal outcome: it is registered with the reasons and not promoted.
The rules stand in gate.yaml beside this file. Their limits come from simulations and common
practice, not from law; a recipe overrides them by name, and `.inf` (or null) switches a rule off,
which the table then says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf_pipeline.errors import EvaluationError
from rlhf_pipeline.evaluation.report import EvaluationReport
from rlhf_pipeline.files import read_yaml

Comparison = Literal["above", "at_least", "at_most"]
Breach = Literal["refuse", "pause", "warn"]
Verdict = Literal["pass", "warn", "pause", "fail", "off"]

SIGNS: dict[Comparison, str] = {"above": ">", "at_least": "≥", "at_most": "≤"}
BREACHES: dict[Breach, Verdict] = {"refuse": "fail", "pause": "pause", "warn": "warn"}


@dataclass(frozen=True, slots=True)
class GateRule:
    """One number of the report and where it must lie."""

    name: str
    metric: str  # a name of EvaluationReport.metrics() or of facts.py
    comparison: Comparison
    limit: float
    breach: Breach  # what it means that the number lies elsewhere
    meaning: str
    optional: bool = False  # True: without a number there is nothing to judge


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What one rule found."""

    rule: str
    metric: str
    comparison: Comparison
    limit: float | None  # None: switched off
    number: float | None  # None: not measured
    breach: Breach
    verdict: Verdict
    words: str

    @property
    def bound(self) -> str:
        """Return where its number must lie, as a table shows it."""
        return "–" if self.limit is None else f"{SIGNS[self.comparison]} {self.limit:g}"


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
    def pauses(self) -> tuple[str, ...]:
        """Return why a person has to decide although it passed."""
        return tuple(r.words for r in self.results if r.verdict == "pause")

    @property
    def said(self) -> tuple[str, ...]:
        """Return both, a sentence each."""
        return *self.reasons, *(f"{words}: a person decides" for words in self.pauses)

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
            rows.append(f"| {r.rule} | {number} | {r.bound} | {r.verdict} |")
        head = "**The gate lets it through.**" if self.passed else "**The gate refuses it.**"
        return "\n\n".join([head, "\n".join(rows), *(f"- {w}" for w in self.said)]) + "\n"


def read_rules(path: Path) -> tuple[GateRule, ...]:
    """Return the rules of a YAML file laid out as gate.yaml is.

    Raises EvaluationError for a file that cannot be read, or a rule that lacks a part, has one
    nobody knows, or has not exactly one limit.
    """
    try:
        tree = read_yaml(path)
    except (OSError, yaml.YAMLError) as error:
        raise EvaluationError(f"needed the gate's rules in {path}, found {error}") from error
    if not isinstance(tree, dict) or not tree:
        raise EvaluationError(f"{path} must hold rules by name, found {type(tree).__name__}")
    return tuple(_rule(str(name), parts, path) for name, parts in tree.items())


def _rule(name: str, parts: Any, path: Path) -> GateRule:
    parts = dict(parts) if isinstance(parts, Mapping) else {}
    limits = {sign: parts.pop(sign) for sign in SIGNS if sign in parts}
    breach, optional = parts.pop("breach", None), parts.pop("optional", False)
    texts = {key: parts.pop(key, None) for key in ("metric", "meaning")}
    is_whole = all(isinstance(text, str) for text in texts.values()) and not parts
    if len(limits) != 1 or breach not in BREACHES or not is_whole or not isinstance(optional, bool):
        raise EvaluationError(
            f"{path}: the rule {name} needs metric, meaning, one of {', '.join(SIGNS)}, and breach "
            f"({', '.join(BREACHES)}), and may have optional; found {limits}, {texts}, "
            f"breach {breach!r} and {sorted(parts) or 'nothing'} beside them"
        )
    [(comparison, limit)] = limits.items()
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise EvaluationError(f"{path}: the limit of {name} must be a number, found {limit!r}")
    metric, meaning = texts["metric"], texts["meaning"]
    return GateRule(name, metric, comparison, float(limit), breach, meaning, optional)


DEFAULT_RULES = read_rules(Path(__file__).with_name("gate.yaml"))


def decide(
    report: EvaluationReport,
    limits: Mapping[str, float | None] | None = None,
    *,
    facts: Mapping[str, float] | None = None,
    rules: Sequence[GateRule] = DEFAULT_RULES,
) -> GateDecision:
    """Return the gate's decision: passed if no rule refuses.

    `facts` are numbers beside the report's, such as facts.py finds. `limits` replaces the limits
    of the rules it names; None or an infinite one switches the rule off. Raises EvaluationError on
    a name that no rule has: a misspelt limit would guard nothing.
    """
    limits = limits or {}
    unknown = sorted(set(limits) - {rule.name for rule in rules})
    if unknown:
        raise EvaluationError(
            f"limits need the names of rules, found {', '.join(unknown)}; the rules are "
            f"{', '.join(rule.name for rule in rules)}"
        )
    numbers = {**report.metrics(), **(facts or {})}
    results = tuple(
        _judge(rule, numbers.get(rule.metric), limits.get(rule.name, rule.limit)) for rule in rules
    )
    return GateDecision(not any(r.verdict == "fail" for r in results), results)


def _judge(rule: GateRule, number: float | None, limit: float | None) -> RuleResult:
    if limit is not None and math.isnan(limit):
        raise EvaluationError(
            f"the limit of {rule.name} must be a number, found nan; correct it or set .inf for off"
        )
    missing = number is None
    if number is not None and not math.isfinite(number):
        number = None
    if limit is None or math.isinf(limit):
        return _result(rule, number, None, "off", f"{rule.meaning}: switched off")
    if number is None and missing and rule.optional:
        return _result(rule, None, limit, "off", f"{rule.meaning}: nothing to judge")
    found = "no number" if number is None else f"{number:.4g}"
    words = f"{rule.meaning}: needed {SIGNS[rule.comparison]} {limit:g}, found {found}"
    if number is not None and _holds(number, rule.comparison, limit):
        return _result(rule, number, limit, "pass", words)
    return _result(rule, number, limit, BREACHES[rule.breach], words)


def _holds(number: float, comparison: Comparison, limit: float) -> bool:
    if comparison == "above":
        return number > limit
    return number >= limit if comparison == "at_least" else number <= limit


def _result(
    rule: GateRule, number: float | None, limit: float | None, verdict: Verdict, words: str
) -> RuleResult:
    return RuleResult(
        rule.name, rule.metric, rule.comparison, limit, number, rule.breach, verdict, words
    )
