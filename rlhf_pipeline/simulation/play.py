"""A day at the shop: people ask, the assistant answers, people say what they think of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_pipeline.config import Settings
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    Progress,
    Prompt,
    hash_rater,
    ignore_progress,
    now,
    uuid7,
)
from rlhf_pipeline.simulation.people import Person, compare, say
from rlhf_pipeline.simulation.world import ask

Answer = Callable[[Sequence[Prompt]], Sequence[str]]
"""What the assistant does: one sampled completion per prompt, in order."""

OTHER_KINDS: Mapping[FeedbackKind, float] = {
    FeedbackKind.thumbs: 0.45,
    FeedbackKind.rating: 0.20,
    FeedbackKind.score: 0.12,
    FeedbackKind.correction: 0.10,
    FeedbackKind.criteria: 0.08,
    FeedbackKind.comment: 0.05,
}
"""How people who do not compare say what they think: shares of the kinds."""

BATCH = 250  # stored as they come: a burst has no long gaps


@dataclass(slots=True)
class Day:
    """What a day brought in."""

    interactions: int = 0
    events: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)


def play(
    store: FeedbackStore,
    agent_id: str,
    answer: Answer,
    people: Sequence[Person],
    *,
    model_version: int,
    events: int,
    pair_share: float = 0.5,
    seed: int,
    report: Progress = ignore_progress,
) -> Day:
    """Let people chat with the assistant and store what they say; returns what came in.

    `events` feedback events in all, `pair_share` of them preferences between two completions to
    one question (left and right in random order), the rest of every other kind.
    """
    rng = random.Random(f"play {agent_id} {seed}")
    plan = kinds_of_a_day(events, pair_share, rng)
    day = Day()
    store.ensure_agent(agent_id)
    for start in range(0, len(plan), BATCH):
        todo = plan[start : start + BATCH]
        prompts = [ask(rng).prompt for _ in todo]
        doubled = [
            prompt
            for prompt, kind in zip(prompts, todo, strict=True)
            for _ in range(2 if kind is FeedbackKind.preference else 1)
        ]
        completions = iter(answer(doubled))
        said: list[Interaction] = []
        votes: list[Feedback] = []
        for prompt, kind in zip(prompts, todo, strict=True):
            person = rng.choice(people)
            first = _interaction(agent_id, prompt, next(completions), model_version, person)
            said.append(first)
            second = None
            if kind is FeedbackKind.preference:
                second = _interaction(agent_id, prompt, next(completions), model_version, person)
                said.append(second)
            votes.append(vote_of(person, kind, first, second, rng))
        store.add_interactions(said)
        store.append(votes)
        day.interactions += len(said)
        day.events += len(votes)
        for vote in votes:
            day.by_kind[vote.kind.value] = day.by_kind.get(vote.kind.value, 0) + 1
        report({"events": day.events, "of": events})
    return day


def kinds_of_a_day(events: int, pair_share: float, rng: random.Random) -> list[FeedbackKind]:
    """Return what kind each event of a day is, shuffled; `pair_share` of them preferences."""
    pairs = round(events * pair_share)
    kinds = rng.choices(list(OTHER_KINDS), list(OTHER_KINDS.values()), k=events - pairs)
    plan: list[FeedbackKind] = [*kinds, *[FeedbackKind.preference] * pairs]
    rng.shuffle(plan)
    return plan


def vote_of(
    person: Person,
    kind: FeedbackKind,
    first: Interaction,
    second: Interaction | None,
    rng: random.Random,
) -> Feedback:
    """Return what the person says of one completion, or which of two they prefer."""
    if second is None:
        return say(person, first, kind, rng)
    if first.completion == second.completion:  # nobody is shown the same text twice
        return say(person, first, FeedbackKind.thumbs, rng)
    return compare(person, first, second, rng)


def assistant(folder: Path, settings: Settings, seed: int) -> Answer:
    """Return an assistant that answers from a model folder; every call draws anew."""
    from rlhf_pipeline.policy.loading import load_policy
    from rlhf_pipeline.policy.sampling import complete

    policy = load_policy(folder, device=settings.policy.device)
    calls = itertools.count(seed * 1_000_003)

    def answer(prompts: Sequence[Prompt]) -> list[str]:
        completions = complete(
            policy,
            prompts,
            max_completion_tokens=settings.policy.max_completion_tokens,
            max_prompt_tokens=settings.policy.max_prompt_tokens,
            temperature=settings.policy.temperature,
            seed=next(calls),
            batch_size=512,  # a whole batch of the day at once
        )
        return [completion.text for completion in completions]

    return answer


def _interaction(
    agent_id: str, prompt: Prompt, completion: str, model_version: int, person: Person
) -> Interaction:
    return Interaction(
        interaction_id=uuid7(),
        agent_id=agent_id,
        prompt=prompt,
        completion=completion,
        model_version=model_version,
        created_at=now(),
        user_id=hash_rater(agent_id, person.name),
    )
