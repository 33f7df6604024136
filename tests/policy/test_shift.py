from __future__ import annotations

import pytest

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.shift import Weighed, shifts, token_texts, weigh
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import user_prompt

TEXTS = ["how do I bake bread", "what is the time"]


def tiny(vocabulary: int = 280) -> Policy:
    return build_tiny(TEXTS, vocabulary=vocabulary, layers=1, width=16, heads=2, context=64, seed=0)


def weighed(policy: Policy, question: str, completion: str, longest: int = 40) -> Weighed:
    return weigh(
        policy,
        user_prompt(question),
        completion,
        max_prompt_tokens=longest,
        max_completion_tokens=24,
        temperature=0.7,
    )


def test_tokens_together_are_the_text_and_a_character_is_never_cut() -> None:
    policy = tiny()
    ids = policy.tokenizer("bread ü 麦 bread", add_special_tokens=False)["input_ids"]
    texts = token_texts(policy, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == policy.tokenizer.decode(ids)
    assert "�" not in "".join(texts)
    assert texts.count("") == 3  # one byte of ü and two of 麦 stand with the last


def test_a_policy_is_not_shifted_from_itself_and_the_end_counts() -> None:
    policy = tiny()
    found = weighed(policy, "what is bread", "the time")
    told = shifts(found, found)
    assert [token.shift for token in told] == [0.0] * len(told)
    assert told[-1].ends
    assert not any(token.ends for token in told[:-1])
    cut = weighed(policy, "what is bread", "the time " * 30)
    assert len(cut.ids) == 24
    assert not shifts(cut, cut)[-1].ends


def test_other_vocabularies_and_no_room_are_refused() -> None:
    policy, other = tiny(), tiny(vocabulary=262)
    here, there = (weighed(p, "bread", "the time") for p in (policy, other))
    with pytest.raises(ModelError, match="need one vocabulary"):
        shifts(here, there)
    with pytest.raises(ModelError, match="must fit a context of 64 tokens"):
        weighed(policy, "x " * 90, "a", longest=64)
