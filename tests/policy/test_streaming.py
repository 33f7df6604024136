"""A streamed completion is the one `complete` gives, in whole characters."""

from __future__ import annotations

import pytest

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.sampling import Completion, complete
from rlhf_pipeline.policy.streaming import stream
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.records import user_prompt


@pytest.fixture(scope="module")
def policy() -> Policy:
    texts = ["hello there, how much is the lamp? it is 9 €"] * 3
    return build_tiny(texts, vocabulary=300, layers=1, width=32, heads=2, context=96, seed=0)


@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.0), *((s, 1.0) for s in range(8))])
def test_pieces_together_are_the_completion(policy: Policy, seed: int, temperature: float) -> None:
    prompt = user_prompt("how much?")
    *parts, last = stream(
        policy,
        prompt,
        max_completion_tokens=40,
        max_prompt_tokens=32,
        temperature=temperature,
        seed=seed,
    )
    (whole,) = complete(
        policy,
        [prompt],
        max_completion_tokens=40,
        max_prompt_tokens=32,
        temperature=temperature,
        seed=seed,
    )
    assert last == whole
    assert isinstance(last, Completion)
    assert "".join(str(part) for part in parts) == whole.text
    assert all(parts)  # nothing is shown before it is there


def test_text_comes_as_it_is_written(policy: Policy) -> None:
    settings = {"max_completion_tokens": 40, "max_prompt_tokens": 32, "temperature": 1.0}
    parts = [list(stream(policy, user_prompt("hi"), seed=s, **settings)) for s in range(8)]  # type: ignore[arg-type]
    assert max(map(len, parts)) > 10


def test_what_does_not_fit_the_context_is_refused(policy: Policy) -> None:
    with pytest.raises(ModelError, match="a context of 96 tokens, found 90 \\+ 7"):
        next(
            stream(policy, user_prompt("x"), max_completion_tokens=7, max_prompt_tokens=90, seed=0)
        )
