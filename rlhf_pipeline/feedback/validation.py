"""A snapshot's rows judged by Great Expectations: what may train, and what is set aside and why.

Measures (lengths, shares, equalities) are computed for all rows at once with Arrow and numpy, each
distinct text once; the expectations then judge the measures. A row that fails goes to quarantine
under exactly one rule: the first in `ROW_CHECKS` that it breaks. What fails for the batch as a
whole blocks training where `BLOCKING` says so, and warns elsewhere.

What this does not protect against: feedback that is well formed and wrong. Rater quality, caps per
rater and the gate are for that.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf_pipeline.errors import ValidationFailed
from rlhf_pipeline.feedback.measures import measured
from rlhf_pipeline.feedback.rules import MEANINGS, Rule
from rlhf_pipeline.records import FeedbackKind, QuarantinedRow, Role, prompt_from_json

if TYPE_CHECKING:
    import pandas as pd

ROW_CHECKS: Mapping[str, Rule] = {  # in order of precedence
    "kinds_are_known": Rule.unknown_kind,
    "targets_are_whole": Rule.no_target,
    "prompts_are_conversations": Rule.malformed_prompt,
    "values_are_there": Rule.value_missing,
    "values_are_in_range": Rule.value_out_of_range,
    "pairs_share_their_context": Rule.contexts_differ,
    "prompts_are_not_blank": Rule.empty_prompt,
    "completions_are_not_blank": Rule.empty_completion,
    "corrections_are_not_blank": Rule.empty_text,
    "pairs_have_two_different_completions": Rule.identical_pair,
    "prompts_fit": Rule.prompt_too_long,
    "templates_take_the_prompts": Rule.prompt_unfit,
    "completions_fit": Rule.completion_too_long,
    "texts_are_readable": Rule.garbled_text,
    "rows_come_once": Rule.duplicate,
    "voters_agree_with_themselves": Rule.contradiction,
}
BATCH_CHECKS = (
    "columns_are_there",
    "enough_rows_are_clean",
    "most_rows_are_clean",
    "thumbs_are_balanced",
    "ratings_are_spread",
)
CHECKS: tuple[str, ...] = (*BATCH_CHECKS, *ROW_CHECKS)
"""Every check's name, known without importing Great Expectations."""
BLOCKING = frozenset({"columns_are_there", "enough_rows_are_clean"})

COLUMNS = (
    *("feedback_id", "agent_id", "kind", "rater_id", "source", "origin", "interaction_id"),
    *("prompt", "completion", "number", "text", "criteria"),
    *("other_completion", "other_prompt", "choice", "shown_first", "comment"),
    *("occurred_at", "received_at"),
)
DAMAGED_SHARE = 0.02  # replacement and control characters in a readable text, at most
LETTER_SHARE = 0.1  # letters and digits in a text of measures.LONG characters or more, at least
JUDGED_LABELS = 20  # labels below which their balance says nothing
UP_SHARE = (0.05, 0.95)  # thumbs up among thumbs
SPREAD = 0.15  # entropy of the five ratings over its largest value
QUARANTINED_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check's outcome; for rows, `unexpected` of `total` rows fail it."""

    name: str
    passed: bool
    blocking: bool
    unexpected: int
    total: int
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def told(self) -> str | None:
        """What stops the turn, and what to do about it; None where this check does not."""
        if self.passed or not self.blocking:
            return None
        if "clean_rows" in self.numbers:
            found, needed = self.numbers["clean_rows"], self.numbers["min_rows"]
            return (
                f"needed {needed:.0f} votes that keep every rule, found {found:.0f}; collect more, "
                "look at `rlhf feedback quarantine`, or lower validation.min_rows"
            )
        return f"needed a snapshot that passes {self.name}, found {dict(self.numbers)}"


class SetAside(NamedTuple):
    """One row that may not train: its id, the rule it breaks, what was needed and found."""

    feedback_id: str
    rule: str
    detail: str


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What validation found: the clean rows in their order, the others, and every check."""

    clean: pd.DataFrame
    quarantined: list[SetAside]
    checks: list[CheckResult]
    origins: list[str]  # of the quarantined rows, in their order
    agents: list[str]

    def quarantine_rows(self) -> list[QuarantinedRow]:
        """Return what the store's quarantine takes."""
        return [
            QuarantinedRow(agent, row.rule, row.detail, origin, feedback_id=row.feedback_id)
            for row, origin, agent in zip(self.quarantined, self.origins, self.agents, strict=True)
        ]


def validate(
    frame: pd.DataFrame,
    *,
    min_rows: int = 10,
    max_prompt_characters: int = 20_000,
    max_completion_characters: int = 20_000,
    takes_roles: Callable[[tuple[Role, ...]], bool] | None = None,
) -> ValidationReport:
    """Return the snapshot's clean rows, the others with one rule each, and every check's result.

    `frame` is a snapshot frame (`snapshot.read`). Prompts are measured as stored, so their JSON
    counts too. `takes_roles` says whether chat templates take a conversation in which these roles
    speak; it is asked where user and assistant do not take turns, which every template takes. A
    missing column makes the report all but empty and blocked: nothing else was looked at. Raises
    ValidationFailed where an expectation itself could not be computed.
    """
    missing = _missing_columns(frame)
    if missing:
        return _without_columns(frame, missing)
    measures = measured(frame)
    measures["refused_roles"] = _refused_roles(frame, measures, takes_roles)
    failing = _failing_rows(measures, max_prompt_characters, max_completion_characters)
    rules = list(ROW_CHECKS.values())
    broken = np.full(len(frame), -1, dtype=np.int8)  # which rule sets the row aside
    for order, name in enumerate(ROW_CHECKS):
        rows = failing[name]
        broken[rows[broken[rows] == -1]] = order
    checks = _batch_results(frame, measures, broken == -1, min_rows)
    for order, name in enumerate(ROW_CHECKS):
        unexpected, kept = len(failing[name]), float((broken == order).sum())
        checks.append(
            CheckResult(name, not unexpected, False, unexpected, len(frame), {"quarantined": kept})
        )
    aside = np.flatnonzero(broken != -1)
    dirty = frame.iloc[aside]
    details = _details(dirty, measures.iloc[aside], [rules[i] for i in broken[aside]])
    return ValidationReport(
        clean=frame.iloc[np.flatnonzero(broken == -1)].reset_index(drop=True),
        quarantined=[
            SetAside(str(key), rules[order].value, detail)
            for key, order, detail in zip(dirty["feedback_id"], broken[aside], details, strict=True)
        ],
        checks=checks,
        origins=[str(origin) for origin in dirty["origin"]],
        agents=[str(agent) for agent in dirty["agent_id"]],
    )


def _refused_roles(
    frame: pd.DataFrame,
    measures: pd.DataFrame,
    takes_roles: Callable[[tuple[Role, ...]], bool] | None,
) -> pd.Categorical:
    """Return the roles of each row's prompt where a chat template refuses them, else null."""
    import pandas as pd

    refused = np.full(len(frame), None, dtype=object)
    if takes_roles is not None:
        odd = (measures["is_conversation"] == 1) & (measures["prompt_alternates"] == 0)
        places = np.flatnonzero(odd)
        for place, prompt in zip(places, frame["prompt"].iloc[places], strict=True):
            roles = tuple(message.role for message in prompt_from_json(prompt))
            if not takes_roles(roles):
                refused[place] = ", ".join(roles)
    return pd.Categorical(refused)


# -- expectations -------------------------------------------------------------------------------


def _failing_rows(
    measures: pd.DataFrame, max_prompt: int, max_completion: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Return, per row check, the positions of the rows that fail it."""
    gxe = _great_expectations().expectations
    in_set, between = gxe.ExpectColumnValuesToBeInSet, gxe.ExpectColumnValuesToBeBetween
    present = gxe.ExpectColumnValuesToNotBeNull
    texts = ("completion_characters", "other_characters", "text_characters")
    damaged = ("prompt_damaged", "completion_damaged", "counterpart_damaged")
    letters = ("completion_letters", "counterpart_letters")
    repeats = ("completion_repeats", "counterpart_repeats")
    expectations: dict[str, list[Any]] = {
        "kinds_are_known": [in_set(column="kind", value_set=[k.value for k in FeedbackKind])],
        "targets_are_whole": [
            present(column=column) for column in ("prompt_characters", "completion_characters")
        ],
        "prompts_are_conversations": [in_set(column="is_conversation", value_set=[1])],
        "values_are_there": [in_set(column="value_present", value_set=[1])],
        "values_are_in_range": [
            in_set(column="thumbs", value_set=[0, 1]),
            in_set(column="rating", value_set=[1, 2, 3, 4, 5]),
            between(column="score", min_value=0, max_value=1),
            in_set(column="choice", value_set=["left", "right", "tie", "both_bad"]),
            in_set(column="shown_first", value_set=["this", "other"]),
            in_set(column="criteria_in_range", value_set=[1]),
        ],
        "pairs_share_their_context": [in_set(column="contexts_agree", value_set=[1])],
        "prompts_are_not_blank": [in_set(column="prompt_is_blank", value_set=[0])],
        "completions_are_not_blank": [between(column=c, min_value=1) for c in texts[:2]],
        "corrections_are_not_blank": [between(column=texts[2], min_value=1)],
        "pairs_have_two_different_completions": [
            in_set(column="completions_differ", value_set=[1])
        ],
        "prompts_fit": [between(column="prompt_characters", max_value=max_prompt)],
        "templates_take_the_prompts": [gxe.ExpectColumnValuesToBeNull(column="refused_roles")],
        "completions_fit": [between(column=c, max_value=max_completion) for c in texts],
        "texts_are_readable": [
            *(between(column=c, max_value=DAMAGED_SHARE) for c in damaged),
            *(between(column=c, min_value=LETTER_SHARE) for c in letters),
            *(in_set(column=c, value_set=[0]) for c in repeats),
        ],
        "rows_come_once": [in_set(column="is_repeated", value_set=[0])],
        "voters_agree_with_themselves": [in_set(column="is_contradicted", value_set=[0])],
    }
    failing: dict[str, list[int]] = {name: [] for name in ROW_CHECKS}
    for result in _judge(measures, expectations):
        name = result.expectation_config.meta["check"]
        failing[name] += result.result.get("unexpected_index_list") or []
    return {name: np.unique(np.array(rows, dtype=np.int64)) for name, rows in failing.items()}


def _batch_results(
    frame: pd.DataFrame, measures: pd.DataFrame, is_clean: np.ndarray[Any, Any], min_rows: int
) -> list[CheckResult]:
    """Judge the batch: a frame of one row that holds its totals."""
    import pandas as pd

    gxe = _great_expectations().expectations
    between = gxe.ExpectColumnValuesToBeBetween
    thumbs = measures["thumbs"][is_clean].dropna()
    ratings = measures["rating"][is_clean].dropna()
    totals = {
        "clean_rows": float(is_clean.sum()),
        "quarantined_share": 1 - float(is_clean.mean()) if len(frame) else 0.0,
        "up_share": float(thumbs.mean()) if len(thumbs) >= JUDGED_LABELS else np.nan,
        "rating_spread": _spread(ratings) if len(ratings) >= JUDGED_LABELS else np.nan,
    }
    expectations = {
        "enough_rows_are_clean": [between(column="clean_rows", min_value=min_rows)],
        "most_rows_are_clean": [between(column="quarantined_share", max_value=QUARANTINED_SHARE)],
        "thumbs_are_balanced": [
            between(column="up_share", min_value=UP_SHARE[0], max_value=UP_SHARE[1])
        ],
        "ratings_are_spread": [between(column="rating_spread", min_value=SPREAD)],
    }
    passed = {
        result.expectation_config.meta["check"]: bool(result.success)
        for result in _judge(pd.DataFrame([totals]), expectations)
    }
    clean, rows = totals["clean_rows"], len(frame)
    numbers: dict[str, dict[str, float]] = {
        "columns_are_there": {"missing": 0},
        "enough_rows_are_clean": {"clean_rows": clean, "min_rows": min_rows},
        "most_rows_are_clean": {"quarantined_share": totals["quarantined_share"]},
        "thumbs_are_balanced": {"up_share": totals["up_share"], "thumbs": len(thumbs)},
        "ratings_are_spread": {"spread": totals["rating_spread"], "ratings": len(ratings)},
    }
    return [
        CheckResult(
            name,
            passed.get(name, True),
            name in BLOCKING,
            unexpected=rows - int(clean) if name == "most_rows_are_clean" else 0,
            total=rows,
            numbers={key: value for key, value in numbers[name].items() if value == value},
        )
        for name in BATCH_CHECKS
    ]


def recounted(checks: Sequence[CheckResult], clean: int) -> list[CheckResult]:
    """Return the checks with those of how many rows are clean by this count of them."""

    def again(check: CheckResult) -> CheckResult:
        if check.name == "enough_rows_are_clean":
            numbers = {**check.numbers, "clean_rows": float(clean)}
            return replace(check, passed=clean >= check.numbers["min_rows"], numbers=numbers)
        if check.name == "most_rows_are_clean":
            share = 1 - clean / check.total
            return replace(
                check,
                passed=share <= QUARANTINED_SHARE,
                unexpected=check.total - clean,
                numbers={"quarantined_share": share},
            )
        return check

    return [again(check) for check in checks]


def _spread(ratings: pd.Series[Any]) -> float:
    """Return the ratings' entropy over that of five equally frequent ones."""
    shares = ratings.value_counts(normalize=True).to_numpy()
    return float(-(shares * np.log(shares)).sum() / np.log(5))


def _missing_columns(frame: pd.DataFrame) -> list[str]:
    gxe = _great_expectations().expectations
    expectations = {
        "columns_are_there": [gxe.ExpectColumnToExist(column=column) for column in COLUMNS]
    }
    # The head has every column; of a whole frame it would hash every text for a fingerprint.
    results = _judge(frame.head(1), expectations)
    return [r.expectation_config.kwargs["column"] for r in results if not r.success]


def _without_columns(frame: pd.DataFrame, missing: Sequence[str]) -> ValidationReport:
    """Return the report of a frame that is no snapshot: nothing is clean, nothing was judged."""
    numbers = {f"missing:{column}": 1.0 for column in sorted(missing)}
    checks = [
        CheckResult(
            name,
            False,
            name in BLOCKING,
            0,
            len(frame),
            numbers if name == "columns_are_there" else {"looked_at": 0.0},
        )
        for name in CHECKS
    ]
    return ValidationReport(frame.iloc[:0], [], checks, [], [])


def _judge(frame: pd.DataFrame, expectations: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return one result per expectation, in any order; `meta["check"]` names its check."""
    gx = _great_expectations()
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)
    asset = context.data_sources.add_pandas("feedback").add_dataframe_asset("snapshot")
    whole = asset.add_batch_definition_whole_dataframe("whole")
    suite = gx.ExpectationSuite(name="feedback")
    for name, group in expectations.items():
        for expectation in group:
            expectation.meta = {"check": name}
            suite.add_expectation(expectation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own use of pandas and numpy
        outcome = whole.get_batch(batch_parameters={"dataframe": frame}).validate(
            suite,
            result_format={
                "result_format": "COMPLETE",
                "partial_unexpected_count": 0,
                "return_unexpected_index_query": False,
            },
        )
    for result in outcome.results:
        if reason := _failure(result.exception_info or {}):
            raise ValidationFailed(
                f"needed an answer from {result.expectation_config.type} on "
                f"{result.expectation_config.kwargs.get('column')!r}, found {reason}; "
                "the frame is not a snapshot's"
            )
    return list(outcome.results)


def _failure(info: Mapping[str, Any]) -> str:
    """Return why an expectation was not computed, empty where it was; metrics nest their own."""
    for each in (info, *(value for value in info.values() if isinstance(value, dict))):
        if each.get("raised_exception"):
            return str(each.get("exception_message"))[:300]
    return ""


def _great_expectations() -> Any:
    """Import Great Expectations, silent and offline."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports deprecated parts of the standard library
        import great_expectations
        import great_expectations.expectations
    return great_expectations


# -- reasons ------------------------------------------------------------------------------------

_FOUND: Mapping[Rule, tuple[str, ...]] = {
    Rule.unknown_kind: ("kind",),
    Rule.value_out_of_range: ("number", "choice", "criteria"),
    Rule.prompt_too_long: ("prompt_characters",),
    Rule.prompt_unfit: ("refused_roles",),
    Rule.completion_too_long: ("completion_characters", "other_characters", "text_characters"),
    Rule.empty_completion: ("completion_characters", "other_characters"),
    Rule.garbled_text: ("prompt_damaged", "completion_damaged", "counterpart_damaged"),
}


def _details(dirty: pd.DataFrame, measures: pd.DataFrame, rules: Sequence[Rule]) -> list[str]:
    """Return each row's reason: the rule's meaning, and what was found where a number says it."""
    shown = {
        name: list((measures if name in measures else dirty)[name])
        for name in {name for names in _FOUND.values() for name in names}
    }
    details = []
    for row, rule in enumerate(rules):
        found = [
            f"{name} {ascii(shown[name][row])[:60]}"
            for name in _FOUND.get(rule, ())
            if shown[name][row] is not None and shown[name][row] == shown[name][row]
        ]
        details.append(MEANINGS[rule] + (f": {', '.join(found)}" if found else ""))
    return details
