"""Why answers scored as they did: what training maximised, asked about them, piece by piece.

It is the reward of the turn that the answering version came from, with the weights that held where
its policy was kept. What this does not tell: what the stopping and the gate model think, or whether
people agree (registry/reasons.py has the first, and the nearest votes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_pipeline import stages
from rlhf_pipeline.records import Interaction, RewardInput
from rlhf_pipeline.registry.reasons import turn_of, with_references
from rlhf_pipeline.registry.reasons_told import FLOORED
from rlhf_pipeline.reward.composite import CompositeReward, Term
from rlhf_pipeline.reward.settings import LEARNED

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.registry.models import ModelRegistry
    from rlhf_pipeline.reward.model import LearnedReward

SHOWN = 60  # characters of an answer


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """What one function, or one head of the learned one, says of an answer."""

    name: str
    score: float  # raw
    normalised: float | None  # a head has none of the next three: it adds through the learned score
    weight: float | None
    added: float | None  # weight * normalised
    below_floor: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer's score and what it is made of."""

    completion: str
    score: float
    pieces: tuple[ScoredPiece, ...]
    left_out: tuple[str, ...]  # functions that compare, where there is nothing to compare with


def scored(
    registry: ModelRegistry, settings: Settings, answers: Sequence[Interaction]
) -> list[Scored]:
    """Return what the reward says of answers that one version gave to one prompt.

    Loads the proxy, after its files were held against the hashes of the day. Raises RegistryError
    where no reward trained the version or its models are gone, HashMismatch where they are others.
    """
    from rlhf_pipeline.reward.model import load_reward_model

    first = answers[0]
    version = registry.ledger.find(first.agent_id, str(first.model_version))
    turn, _ = turn_of(registry, settings, version)
    turn, references, left_out = with_references(turn, first.prompt)
    policy = turn.settings.policy
    proxy = load_reward_model(
        turn.work / "reward" / "proxy", device=policy.device, dtype=policy.frozen_dtype
    )
    items = [RewardInput(one.prompt, one.completion, references) for one in answers]
    return judged(items, proxy, stages.kept_composite(turn, proxy), left_out)


def judged(
    items: Sequence[RewardInput],
    proxy: LearnedReward,
    composite: CompositeReward | None,
    left_out: tuple[str, ...] = (),
) -> list[Scored]:
    """Return what the composite, or without one the proxy alone, says of each item."""
    whole = composite or CompositeReward({LEARNED: Term(proxy)})
    # Only heads are not in the pieces: a single one need not read everything a second time.
    several = proxy.judge(items).by_member if proxy.model.head.out_features > 1 else {}
    found = []
    for i, told in enumerate(whole.judge(items)):
        pieces = [
            ScoredPiece(name, p.score, p.normalised, whole.weights[name], p.added, p.below_floor)
            for name, p in told.pieces.items()
        ]
        heads = (
            ScoredPiece(f"{LEARNED}, {name}", scores[i], None, None, None)
            for name, scores in several.items()
        )
        found.append(Scored(items[i].completion, told.score, (*pieces, *heads), left_out))
    return found


def to_text(found: Sequence[Scored]) -> str:
    """Return a table of plain text per answer."""
    blocks = []
    for one in found:
        words = " ".join(one.completion.split())
        short = words if len(words) <= SHOWN else words[: SHOWN - 1] + "…"
        lines = [f"“{short}” scored {one.score:.3f}", _line("", "raw", "normal", "weight", "adds")]
        for piece in one.pieces:
            numbers = (piece.score, piece.normalised, piece.weight, piece.added)
            shown = ("" if n is None else f"{n:.3f}" for n in numbers)
            lines.append(
                _line(piece.name, *shown) + (" below its floor" if piece.below_floor else "")
            )
        if any(piece.below_floor for piece in one.pieces):
            lines.append(FLOORED)
        if one.left_out:
            lines.append(f"left out, nothing to compare with is known: {', '.join(one.left_out)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _line(name: str, *cells: str) -> str:
    return f"{name[:28]:<28}" + "".join(f"{cell:>9}" for cell in cells)
