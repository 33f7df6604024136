"""One completion as it is written: pieces of text for somebody who reads along.

The tokens are those `sampling.complete` would choose for the same prompt, settings and seed: the
same draw from the same random numbers; only the batch is one row, and each token is shown.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlhf_pipeline.policy.cache import empty_cache
from rlhf_pipeline.policy.chat import decode_completions, encode_prompt
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.sampling import (
    Completion,
    check_finite,
    check_room,
    draw,
    logits_of,
    trunk_of,
)
from rlhf_pipeline.records import Prompt

UNFINISHED = "\ufffd"  # what a decoder shows for the first bytes of a character


def stream(
    policy: Policy,
    prompt: Prompt,
    *,
    max_completion_tokens: int,
    max_prompt_tokens: int,
    temperature: float = 0.7,
    top_p: float = 1.0,
    seed: int,
) -> Iterator[str | Completion]:
    """Yield the completion's text piece by piece, and last the whole `Completion`.

    A piece is held back until its characters are whole; the pieces together are the completion's
    text. Raises ModelError if prompt and completion do not fit the context together, or the model's
    logits are not finite.
    """
    check_room(policy, max_prompt_tokens, max_completion_tokens)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(1, max_completion_tokens, generator=generator).to(policy.device)
    ids = encode_prompt(policy.tokenizer, prompt, max_tokens=max_prompt_tokens)
    inputs = torch.tensor([ids], device=policy.device)
    trunk = trunk_of(policy.model)
    cache = empty_cache(trunk.config)
    written: list[int] = []
    shown, text = 0, ""
    finished = False
    for t in range(max_completion_tokens):
        with torch.inference_mode():
            hidden = trunk(input_ids=inputs, past_key_values=cache, use_cache=True)
            logits = logits_of(policy.model, hidden.last_hidden_state[:, -1])
            token, logprob = draw(logits, uniforms[:, t], temperature, top_p=top_p)
        check_finite(logprob)
        written.append(int(token))
        if written[-1] == policy.eos_id:
            finished = True
            break
        inputs = token[:, None]
        text = decode_completions(policy.tokenizer, [written])[0]
        whole = text.rstrip(UNFINISHED)
        if len(whole) > shown:
            yield whole[shown:]
            shown = len(whole)
    if len(text) > shown:  # a character that was never finished
        yield text[shown:]
    yield Completion(text, written, finished)
