"""The reasons of one interaction, told: in plain sentences, as JSON, as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.feedback.datasets import Job
from rlhf_pipeline.records import ELSEWHERE
from rlhf_pipeline.reward.composite import BELOW_FLOOR

if TYPE_CHECKING:
    from rlhf_pipeline.registry.reasons import Part, Reasons

ALIKE_NATS = 0.05  # shifts within this are called no difference
FLOORED = f"below a floor a completion gets {BELOW_FLOOR:g} at most, whatever else adds to it"
JUDGES: Mapping[Job, str] = {
    # What training maximised is this alone, this and functions, or with DPO none.
    "proxy": "learned from the votes that training went by",
    "stopping": "chose the checkpoint",
    "gate": "seen by no training",
}


def verdict(found: Reasons) -> list[str]:
    """Return the reasons in plain sentences, the strongest fact of each look."""
    said = [_likelihood(found)]
    for judged in found.judgements:
        ahead = judged.score - judged.baseline_score
        compared = "more than" if ahead > 0 else "less than" if ahead < 0 else "as"
        said.append(
            f"The {judged.judge} reward ({JUDGES[judged.judge]}) gives it {abs(ahead):.2f} "
            f"{compared} what the baseline answers."
        )
    if found.parts:
        most = max(found.parts, key=lambda part: part.added - part.baseline_added)
        ahead = most.added - most.baseline_added
        said.append(f"Of the reward's functions {most.name} speaks most for it: {ahead:+.2f}.")
    if found.near and found.near[0].similarity > 0:
        same = sum(1 for near in found.near if near.similarity > 1 - 1e-9)
        said.append(
            f"{same} of the {len(found.near)} nearest votes were about the same question."
            if same
            else f"The nearest question that people voted on is {found.near[0].similarity:.0%} "
            "alike by its words."
        )
    else:
        said.append("No vote it learned from shares a word with the question.")
    return said


def _likelihood(found: Reasons) -> str:
    name, n = f"Version {found.version}", len(found.tokens)
    if abs(found.shift) <= ALIKE_NATS:
        return f"{name} finds this completion as likely as the baseline does ({n} tokens)."
    most = max(found.tokens, key=lambda token: token.shift * math.copysign(1, found.shift))
    times = math.exp(min(abs(found.shift), 50.0))
    where = "its end" if most.ends else f"“{most.text.strip() or most.text}”"
    word = "likelier" if found.shift > 0 else "less likely"
    shown = f"{times:,.1f}" if times < 1000 else f"{times:.1e}"
    return (
        f"{name} finds this completion {shown} times {word} than the baseline does "
        f"({found.shift:+.2f} nats over {n} tokens, most at {where})."
    )


def below_floor(part: Part) -> str:
    """Return which of the two completions is below the function's floor, in words; mostly none."""
    both = {"this": part.below_floor, "the baseline's": part.baseline_below_floor}
    who = " and ".join(name for name, is_below in both.items() if is_below)
    return f"{who} below its floor" if who else ""


def to_json(found: Reasons) -> dict[str, Any]:
    """Return plain JSON values, sums and sentences with them."""
    values = asdict(found)
    for told, token in zip(values["tokens"], found.tokens, strict=True):
        told["shift"] = token.shift
    return {"verdict": verdict(found), "shift": found.shift, **values}


def answerer(version: int) -> str:
    """Return who gave an answer, for a person."""
    return "a model elsewhere" if version == ELSEWHERE else f"version {version}"


def to_text(found: Reasons) -> str:
    """Return the reasons as text for a terminal."""
    f = found
    lines = [
        f"{f.agent_id} interaction {f.interaction_id}, {f.created_at[:19]} UTC, answered by "
        f"{answerer(f.answered_by)}",
        f"as version {f.version} ({f.label}) finds it, beside the baseline, version {f.baseline}",
        *(f"  {line}" for line in verdict(f)),
        "",
        "Said",
        *(f"  {role}: {content}" for role, content in f.prompt),
        f"  completion: {f.completion}",
        f"  the baseline's likeliest: {f.baseline_completion}",
        "",
        f"{'Reward':<24}{'this':>10}{'baseline':>10}{'change':>10}",
    ]
    for judged in f.judgements:
        lines.append(_row(f"{judged.judge} model", judged.score, judged.baseline_score))
        lines += [
            _row(f"  {name}", score, judged.baseline_heads[name])
            for name, score in judged.heads.items()
        ]
    if f.composite is not None:
        lines.append(_row("composite", *f.composite))
    for part in f.parts:
        row = _row(f"  {part.name}, added", part.added, part.baseline_added)
        lines.append(f"{row}  {below_floor(part)}".rstrip())
    if any(map(below_floor, f.parts)):
        lines.append(f"  {FLOORED}")
    if f.left_out:
        lines.append(f"  {', '.join(f.left_out)}: left out, nothing to compare with is known")
    lines += ["", f"Tokens (nats at temperature {f.temperature:g})"]
    lines += [
        f"  {'<end>' if t.ends else t.text!r:<24}{t.logprob:>9.2f}{t.reference_logprob:>9.2f}"
        f"{t.shift:>+9.2f}"
        for t in f.tokens
    ]
    lines += [
        f"  {'together':<42}{f.shift:>+9.2f}",
        f"  {'the baseline’s completion':<42}{f.baseline_shift:>+9.2f}",
        "",
        f"Nearest of {f.trained_on} votes it learned from (TF-IDF cosine of the questions)",
    ]
    for near in f.near:
        against = "" if near.other is None else f" “{near.other}”"
        lines += [
            f"  {near.similarity:.2f}  {near.question}",
            f"        “{near.completion}” {near.said}{against} ({near.learned_by} model, "
            f"{near.feedback_id})",
        ]
    if not f.near:
        lines.append("  none is left")
    if f.erased_rows:
        lines.append(f"{f.erased_rows} rows were erased from its snapshot since")
    return "\n".join(lines) + "\n"


def _row(name: str, here: float, other: float) -> str:
    return f"  {name:<22}{here:>10.3f}{other:>10.3f}{here - other:>+10.3f}"
