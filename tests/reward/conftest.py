"""A planted preference: the kind completion is the better one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_pipeline.policy.loading import save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import PreferencePair, RewardInput, user_prompt

WORDS = "the order is ready at our shop today and you can open it in blue or green".split()


@dataclass(frozen=True)
class Planted:
    """A small base model and pairs whose chosen side holds a kind word."""

    base: Path
    train: Sequence[PreferencePair]
    test: Sequence[PreferencePair]
    centre: Sequence[RewardInput]


def planted_pairs(count: int, *, start: int, seed: int) -> list[PreferencePair]:
    """Return pairs on prompts numbered from `start`; length says nothing."""
    rng = random.Random(seed)
    pairs = []
    for i in range(start, start + count):
        plain, kind = (rng.choices(WORDS, k=rng.randint(3, 9)) for _ in range(2))
        kind[rng.randrange(len(kind))] = "please"
        pairs.append(
            PreferencePair(
                pair_id=f"pair {i}",
                prompt=user_prompt(f"question {i} {rng.choice(WORDS)}?"),
                chosen=" ".join(kind),
                rejected=" ".join(plain),
                voter="v",
                origin="test",
                split="train",
            )
        )
    return pairs


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Return the planted preference on a base model that has learnt nothing."""
    train = planted_pairs(240, start=0, seed=1)
    test = planted_pairs(80, start=1000, seed=2)
    texts = [f"{p.prompt[0].content} {p.chosen} {p.rejected}" for p in train]
    policy = build_tiny(texts, vocabulary=340, layers=2, width=32, heads=2, context=96, seed=0)
    base = tmp_path_factory.mktemp("base") / "policy"
    save_policy(policy, base)
    centre = [RewardInput(p.prompt, p.rejected) for p in train[:40]]
    return Planted(base, train, test, centre)
