"""Why a version prefers what was said in one interaction: rewards, tokens, the nearest votes.

Three looks, none of them a proof. What the turn's rewards give this completion and what the
baseline answers, function by function and head by head. How much likelier than the baseline the
version finds each token. Which of the votes that its reward models learned from asked nearly the
same. What this does not tell: which vote caused which weight; nearness of words is a hint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_pipeline import stages
from rlhf_pipeline.errors import FeedbackError, RegistryError
from rlhf_pipeline.feedback import datasets
from rlhf_pipeline.feedback.datasets import JOBS, Job
from rlhf_pipeline.feedback.nearest import Near, nearest
from rlhf_pipeline.feedback.raters import erased_rows
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import (
    ELSEWHERE,
    Interaction,
    PreferencePair,
    Prompt,
    RewardExample,
    RewardInput,
    prompt_to_json,
)
from rlhf_pipeline.registry.judges import reward_folder
from rlhf_pipeline.registry.reproduce import recorded_turn

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.policy.shift import TokenShift
    from rlhf_pipeline.registry.ledger import ModelVersion
    from rlhf_pipeline.registry.models import ModelRegistry
    from rlhf_pipeline.reward.composite import Breakdown

NEAREST = 5  # votes that are shown


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one reward model says of this completion and of the baseline's."""

    judge: Job
    score: float
    baseline_score: float
    heads: Mapping[str, float]  # of this completion; empty where the model has one head
    baseline_heads: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """What one reward function adds to the composite, for this completion and the baseline's."""

    name: str
    weight: float  # where the kept policy was
    score: float
    baseline_score: float
    added: float
    baseline_added: float
    below_floor: bool
    baseline_below_floor: bool = False


@dataclass(frozen=True, slots=True)
class Reasons:
    """Everything the three looks found."""

    interaction_id: str
    agent_id: str
    created_at: str  # ISO 8601, UTC
    answered_by: int  # the version that answered, or ELSEWHERE
    version: int  # the version whose preference is explained
    label: str
    baseline: int  # the version it is compared with
    prompt: tuple[tuple[str, str], ...]  # (role, content)
    completion: str
    baseline_completion: str  # its likeliest
    temperature: float
    tokens: tuple[TokenShift, ...]
    baseline_shift: float  # nats: how much likelier the version finds the baseline's completion
    judgements: tuple[Judgement, ...]
    parts: tuple[Part, ...]  # empty where training maximised the proxy alone
    composite: tuple[float, float] | None  # of this completion, of the baseline's
    left_out: tuple[str, ...]  # functions that compare with references, where there are none
    near: tuple[Near, ...]
    trained_on: int  # votes the reward models learned from
    erased_rows: int  # of its snapshot, since

    @property
    def shift(self) -> float:
        """Return how much likelier the version finds the whole completion, in nats."""
        return math.fsum(token.shift for token in self.tokens)


def reasons(
    registry: ModelRegistry,
    settings: Settings,
    interaction_id: str,
    *,
    version: str | None = None,
    agent_id: str | None = None,
) -> Reasons:
    """Return why `version` prefers the interaction's completion.

    By default the one that answered; of a model elsewhere nothing is known, and the champion tells.
    Policies are loaded one after the other, then the reward models. Raises FeedbackError where
    there is no such interaction, RegistryError for a version of no turn or whose files are gone,
    HashMismatch where they are not the registered ones.
    """
    interaction = need_interaction(registry, interaction_id, agent_id)
    ledger = registry.ledger
    by = interaction.model_version
    asked = version or ("champion" if by == ELSEWHERE else str(by))
    found = ledger.find(interaction.agent_id, asked)
    turn, baseline = turn_of(registry, settings, found)
    policy, reward = turn.settings.policy, turn.settings.reward
    written, tokens, baseline_shift = _tokens(registry, turn, found, interaction)
    judgements, composite, left_out = _rewards(turn, interaction, written)
    pairs = [
        pair
        for pair in datasets.read_jsonl(turn.data / stages.PAIRS, PreferencePair)
        if reward.reads_every_kind or not pair.both_bad
    ]
    examples = [
        example
        for example in datasets.read_jsonl(turn.data / stages.EXAMPLES, RewardExample)
        if example.kind.value in reward.kinds
    ]
    near = nearest(
        interaction.prompt,
        interaction.completion,
        pairs,
        examples,
        reward.shares.by_job(),
        count=NEAREST,
    )
    return Reasons(
        interaction_id=interaction.interaction_id,
        agent_id=interaction.agent_id,
        created_at=interaction.created_at.isoformat(),
        answered_by=interaction.model_version,
        version=found.version,
        label=found.label,
        baseline=baseline.version,
        prompt=tuple((message.role, message.content) for message in interaction.prompt),
        completion=interaction.completion,
        baseline_completion=written,
        temperature=policy.temperature,
        tokens=tokens,
        baseline_shift=baseline_shift,
        judgements=judgements,
        parts=_parts(*composite) if composite else (),
        composite=(composite[1].score, composite[2].score) if composite else None,
        left_out=left_out,
        near=tuple(near),
        trained_on=sum(p.split == "train" for p in pairs)
        + sum(e.split == "train" for e in examples),
        erased_rows=erased_rows(ledger.database, found.agent_id, found.fingerprint),
    )


def need_interaction(
    registry: ModelRegistry, interaction_id: str, agent_id: str | None = None
) -> Interaction:
    """Return the interaction. Raises FeedbackError where there is none, or another agent's."""
    found = FeedbackStore(registry.ledger.database).interaction(interaction_id)
    if found is None:
        raise FeedbackError(
            f"needed an interaction, found none with the id {interaction_id!r}: it never was, or "
            "whoever had it was erased; a chat completion's id is its interaction's"
        )
    if agent_id is not None and found.agent_id != agent_id:
        raise FeedbackError(
            f"needed an interaction of agent {agent_id!r}, found one of {found.agent_id!r}; leave "
            "--agent out or correct it"
        )
    return found


def turn_of(
    registry: ModelRegistry, settings: Settings, version: ModelVersion
) -> tuple[stages.Turn, ModelVersion]:
    """Return the turn a version is from, on today's device, and the baseline it is held against."""
    ledger, name = registry.ledger, f"version {version.version} of {version.agent_id}"
    if not _has_reward(version):
        others = [v.version for v in ledger.versions(version.agent_id) if _has_reward(v)]
        raise RegistryError(
            f"{name} was trained by no reward, so it prefers nothing to itself; "
            + (f"name one that was: --version {others[-1]}" if others else "no version was yet")
        )
    turn = recorded_turn(ledger, settings, _as_maximised(version), version.work, exact=False)
    versions = ledger.versions(version.agent_id)
    recorded = [v for v in versions if v.path == turn.baseline]
    baseline = recorded[0] if recorded else ledger.baseline(version.agent_id)
    if baseline is None:
        raise RegistryError(f"{name} needs a baseline beside it, found none; restore a backup")
    for job in JOBS:
        reward_folder(version, job)
    device = turn.settings.policy.model_copy(update={"device": settings.policy.device})
    here = turn.settings.model_copy(update={"policy": device})
    return replace(turn, baseline=registry.folder_of(baseline), settings=here), baseline


def _as_maximised(version: ModelVersion) -> ModelVersion:
    """Return the version, its recipe naming the functions PPO was given.

    They are others than the reward stage was given where the recipe was changed between the two.
    """
    given = version.lineage.get("stage_recipes", {}).get("ppo", {}).get("reward")
    if given is None:
        return version
    recipe = version.lineage["recipe"]
    functions = {name: given[name] for name in stages.MAXIMISED_BY if name in given}
    told = {**recipe, "reward": {**recipe["reward"], **functions}}
    return replace(version, lineage={**version.lineage, "recipe": told})


def _has_reward(version: ModelVersion) -> bool:
    lineage = version.lineage
    return bool(lineage.get("reward_models")) and lineage.get("started_from") is not None


def _tokens(
    registry: ModelRegistry, turn: stages.Turn, version: ModelVersion, interaction: Interaction
) -> tuple[str, tuple[TokenShift, ...], float]:
    """Return what the baseline answers, the tokens' shifts, and the whole shift of that answer."""
    from rlhf_pipeline.policy.loading import load_policy
    from rlhf_pipeline.policy.sampling import complete
    from rlhf_pipeline.policy.shift import Weighed, shifts, weigh

    limits = turn.settings.policy
    longest = interaction.sampling.get("max_completion_tokens", limits.max_completion_tokens)
    written = ""
    weighed: list[tuple[Weighed, Weighed]] = []
    for folder in (turn.baseline, registry.folder_of(version)):
        assert folder is not None  # as turn_of has it
        policy = load_policy(folder, device=limits.device, dtype=limits.dtype)  # as it is served
        if not weighed:
            (answer,) = complete(
                policy,
                [interaction.prompt],
                max_completion_tokens=limits.max_completion_tokens,
                max_prompt_tokens=limits.max_prompt_tokens,
                temperature=0.0,
                seed=0,
            )
            written = answer.text
        both = [
            weigh(
                policy,
                interaction.prompt,
                text,
                max_prompt_tokens=limits.max_prompt_tokens,
                max_completion_tokens=most,
                temperature=limits.temperature,
            )
            for text, most in (
                (interaction.completion, int(longest)),
                (written, limits.max_completion_tokens),
            )
        ]
        weighed.append((both[0], both[1]))
    (reference, reference_other), (here, here_other) = weighed
    of_baselines = math.fsum(token.shift for token in shifts(here_other, reference_other))
    return written, shifts(here, reference), of_baselines


def _rewards(
    turn: stages.Turn, interaction: Interaction, written: str
) -> tuple[
    tuple[Judgement, ...],
    tuple[Mapping[str, float], Breakdown, Breakdown] | None,
    tuple[str, ...],
]:
    """Return what the three models say, the composite's weights and pieces, what was left out."""
    turn, references, left_out = with_references(turn, interaction.prompt)
    items = [
        RewardInput(interaction.prompt, text, references)
        for text in (interaction.completion, written)
    ]
    judges = stages.judges_of(turn)
    judgements = []
    for job in JOBS:
        told = judges[job].judge(items)
        several = told.by_member if len(told.by_member) > 1 else {}
        heads = [{name: scores[i] for name, scores in several.items()} for i in range(2)]
        score, other = told.scores
        judgements.append(Judgement(job, score, other, heads[0], heads[1]))
    composite = stages.kept_composite(turn, judges["proxy"])
    if composite is None:
        return tuple(judgements), None, left_out
    both = composite.judge(items)
    return tuple(judgements), (composite.weights, both[0], both[1]), left_out


def with_references(
    turn: stages.Turn, prompt: Prompt
) -> tuple[stages.Turn, tuple[str, ...], tuple[str, ...]]:
    """Return the turn, what its functions compare a prompt's completions with, what is left out.

    Left out of the turn's functions are those that compare, where there is nothing to compare with.
    """
    from rlhf_pipeline.reward.named import needs_references

    functions = turn.settings.reward.functions
    if needs_references(functions):
        known = stages.references_of(turn).get(prompt_to_json(prompt), ())
        if known:
            return turn, tuple(known), ()
    left_out = [name for name, one in functions.items() if needs_references({name: one})]
    kept = {name: one for name, one in functions.items() if name not in left_out}
    reward = turn.settings.reward.model_copy(update={"functions": kept})
    settings = turn.settings.model_copy(update={"reward": reward})
    return replace(turn, settings=settings), (), tuple(left_out)


def _parts(weights: Mapping[str, float], here: Breakdown, other: Breakdown) -> tuple[Part, ...]:
    return tuple(
        Part(
            name,
            weight,
            here.pieces[name].score,
            other.pieces[name].score,
            here.pieces[name].added,
            other.pieces[name].added,
            here.pieces[name].below_floor,
            other.pieces[name].below_floor,
        )
        for name, weight in weights.items()
    )
