"""How likely one policy finds each token of a completion, beside another policy.

The difference of the two log-probabilities says where training moved the policy: above 0 it learned
to say this token here, below 0 it learned not to. Their sum over the policy's own completions is
what PPO's KL penalty adds up (ppo/kl.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy.chat import decode_completions, encode_completion, encode_prompt
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.sampling import completion_logprobs, pad_left, pad_right
from rlhf_pipeline.policy.streaming import UNFINISHED
from rlhf_pipeline.records import Prompt


@dataclass(frozen=True, slots=True)
class TokenShift:
    """One token of a completion, as two policies find it."""

    text: str  # of all tokens together: the completion; a character stands with its last token
    logprob: float  # nats
    reference_logprob: float  # nats
    ends: bool  # True: the end token, which has no text

    @property
    def shift(self) -> float:
        """Return how much likelier it became, in nats; below 0: less likely."""
        return self.logprob - self.reference_logprob


@dataclass(frozen=True, slots=True)
class Weighed:
    """A completion's tokens and what one policy makes of them."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]  # nats
    eos_id: int


def weigh(
    policy: Policy,
    prompt: Prompt,
    completion: str,
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    temperature: float,
) -> Weighed:
    """Return each token's log-probability after the prompt, at the temperature.

    The text is encoded anew, which may cut it otherwise than it was drawn. The end token counts
    where it fits within max_completion_tokens.
    """
    start = encode_prompt(policy.tokenizer, prompt, max_tokens=max_prompt_tokens)
    room = min(max_completion_tokens, policy.context_length - len(start))
    ids = encode_completion(policy.tokenizer, completion, max_tokens=max(room, 0))
    if not ids:
        raise ModelError(
            f"prompt and completion must fit a context of {policy.context_length} tokens, found a "
            f"prompt of {len(start)}; lower policy.max_prompt_tokens"
        )
    batch = (*pad_left([start], policy.pad_id), *pad_right([ids], policy.pad_id))
    with torch.no_grad():
        found = completion_logprobs(
            policy.model, *(t.to(policy.device) for t in batch), temperature=temperature
        )
    return Weighed(
        tuple(ids),
        tuple(token_texts(policy, ids)),
        tuple(found[0].double().tolist()),
        policy.eos_id,
    )


def token_texts(policy: Policy, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; a character's first tokens add nothing."""
    texts: list[str] = []
    shown = ""
    for n in range(1, len(ids) + 1):
        text = decode_completions(policy.tokenizer, [ids[:n]])[0]
        whole = text if n == len(ids) else text.rstrip(UNFINISHED)
        texts.append(whole[len(shown) :])
        shown = whole if len(whole) > len(shown) else shown
    return texts


def shifts(here: Weighed, reference: Weighed) -> tuple[TokenShift, ...]:
    """Return the tokens as both policies find them. Raises ModelError for other vocabularies."""
    if here.ids != reference.ids or here.eos_id != reference.eos_id:
        raise ModelError(
            f"policies that are compared token by token need one vocabulary, found "
            f"{len(here.ids)} tokens of one and {len(reference.ids)} of the other; compare "
            "versions that began from the same baseline"
        )
    rows = zip(here.ids, here.texts, here.logprobs, reference.logprobs, strict=True)
    return tuple(TokenShift(text, p, q, token == here.eos_id) for token, text, p, q in rows)
