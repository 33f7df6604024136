"""Chat to tokens and back: the one layout that SFT, sampling, PPO and the reward model share.

A tokenizer with a chat template uses it. One without (GPT-2, OPT, Phi-2) gets a plain layout:

    System: ...\\nUser: ...\\nAssistant: ...\\nUser: ...\\nAssistant:

and there the completion's tokens begin with the space after the colon.

Text that spells a special token ("<|assistant|>"), be it in letters that the tokenizer takes for
its own, cannot act as one: it is broken with a space before it is encoded, so a user cannot write
the assistant's turn or end it. What the assistant says may hold tokens that were added for its own
words ("<think>"): of those only special ones are broken there.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.errors import PromptRefused
from rlhf_pipeline.records import Message, Prompt, as_messages

SYSTEM_TEST = "7310592"  # said as a system message: does a template have a place for one?
PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Return the prompt as the text the model reads; it ends where the assistant is to begin.

    A system message that a template has no place for stands at the head of the first user message.
    Raises PromptRefused if the prompt does not end with a user message or the template refuses it.
    """
    if not prompt or prompt[-1].role != "user":
        found = f"one that ends with {prompt[-1].role!r}" if prompt else "an empty one"
        raise PromptRefused(
            f"a prompt must end with a user message, found {found}; add the question"
        )
    prompt = tuple(Message(m.role, _disarm(tokenizer, m.content, m.role)) for m in prompt)
    if not tokenizer.chat_template:
        turns = [f"{PLAIN_ROLES[m.role]}: {m.content}" for m in prompt]
        return "\n".join([*turns, f"{PLAIN_ROLES['assistant']}:"])
    try:
        text = _apply_template(tokenizer, prompt)
    except TemplateError as error:
        if prompt[0].role == "system" and len(prompt) > 1:
            with suppress(TemplateError):  # the template's first complaint is the one to show
                return _apply_template(tokenizer, _without_system(prompt))
        raise PromptRefused(
            f"a prompt that fits the model's chat template is needed; the template says: {error}; "
            "change the order or the roles of the messages"
        ) from error
    if prompt[0].role == "system" and prompt[0].content.strip() not in text:
        # Left out without a word, unless it is there in other letters.
        told = _apply_template(tokenizer, (Message("system", SYSTEM_TEST), *prompt[1:]))
        if SYSTEM_TEST not in told:
            return _apply_template(tokenizer, _without_system(prompt))
    return text


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, max_tokens: int
) -> list[int]:
    """Return the prompt's tokens, ending with the assistant's header, at most `max_tokens`.

    Of a longer one the oldest turns are left out, and the system message at its head stays. Of a
    last turn that is too long beside that the end stays, and the system message where it takes half
    of the room at most. Where not even the layout fits its latest tokens stay, and the
    beginning-of-text token where it has one (an encoder's is [CLS], where reward models read).
    """
    return encode_prompts(tokenizer, [prompt], max_tokens=max_tokens)[0]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_tokens: int
) -> list[list[int]]:
    """Return `encode_prompt` of each, in order; equal prompts are encoded once."""
    if not prompts:
        return []
    distinct = list(dict.fromkeys(prompts))
    encoded = {
        prompt: row if len(row) <= max_tokens else _shortened(tokenizer, prompt, row, max_tokens)
        for prompt, row in zip(distinct, _rows(tokenizer, distinct), strict=True)
    }
    return [list(encoded[p]) for p in prompts]


def messages_within(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, max_tokens: int
) -> Prompt:
    """Return the messages of which a server with this tokenizer makes `encode_prompt`'s tokens.

    Where not even the layout fits nothing is left but an empty question.
    Raises PromptRefused as `render` does.
    """
    if len(_rows(tokenizer, [prompt])[0]) > max_tokens:
        prompt = _latest(tokenizer, prompt, max_tokens) or (Message("user", ""),)
    told = tuple(Message(m.role, _disarm(tokenizer, m.content, m.role)) for m in prompt)
    if told[0].role != "system" or not tokenizer.chat_template:
        return told
    with suppress(TemplateError):
        if _apply_template(tokenizer, told) == render(tokenizer, prompt):
            return told
    return _without_system(told)


def encode_completion(
    tokenizer: PreTrainedTokenizerBase, text: str, *, max_tokens: int
) -> list[int]:
    """Return the completion's tokens with eos at the end if it fits, else the first ones."""
    return encode_completions(tokenizer, [text], max_tokens=max_tokens)[0]


def encode_completions(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, max_tokens: int
) -> list[list[int]]:
    """Return `encode_completion` of each, in order."""
    if not texts:
        return []
    texts = [_disarm(tokenizer, text, "assistant") for text in texts]
    if not tokenizer.chat_template:
        texts = [text if text[:1].isspace() or not text else f" {text}" for text in texts]
    rows = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return [[*row, tokenizer.eos_token_id][:max_tokens] for row in rows["input_ids"]]


def decode_completions(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]
) -> list[str]:
    """Return the `storable` text of each row of completion tokens, special tokens left out."""
    texts: list[str] = tokenizer.batch_decode(
        [list(row) for row in rows], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    if not tokenizer.chat_template:
        texts = [text.removeprefix(" ") for text in texts]
    return [storable(text) for text in texts]


def storable(text: str) -> str:
    """Return the text without NUL, which tokens of bytes can spell and no store or API takes."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the token that ends what the assistant says: the chat template's, else eos_token.

    Chat models are taught to stop where their template ends a turn, and for some that is not what
    their tokenizer calls the end (Phi-3: <|end|>, Gemma: <end_of_turn>): sampled from, they would
    not stop, and taught the other token they would have to unlearn this one. A template that ends
    each turn with eos_token too keeps it; one that begins with it, where it is the beginning of
    text as well, does not.
    """
    eos: str | None = tokenizer.eos_token
    if not tokenizer.chat_template:
        return eos
    said = Message("assistant", "7 said the assistant 7")
    asked = (Message("user", "a"), said, Message("user", "b"))
    try:
        whole = str(tokenizer.apply_chat_template(as_messages(asked[:2]), tokenize=False))
        prompt = _apply_template(tokenizer, asked)
    except TemplateError:
        return eos
    if eos and eos in prompt.rpartition(said.content)[2]:
        return eos
    pattern = _spelled(tuple(tokenizer.added_tokens_encoder))
    found = pattern.search(whole.rpartition(said.content)[2]) if pattern else None
    return found[0] if found and said.content in whole else eos


def _rows(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return all tokens of each prompt."""
    rows: list[list[int]] = tokenizer(
        [render(tokenizer, p) for p in prompts],
        add_special_tokens=not tokenizer.chat_template,  # templates write their own
        return_attention_mask=False,
        verbose=False,  # of a text beyond the model's context; callers shorten it
    )["input_ids"]
    eos = tokenizer.eos_token_id
    if not tokenizer.chat_template:  # a tokenizer may end plain text with eos; a prompt goes on
        rows = [row[:-1] if row and row[-1] == eos else row for row in rows]
    return rows


def _shortened(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, row: list[int], max_tokens: int
) -> list[int]:
    """Return the prompt's tokens, `row`, shortened as `encode_prompt` says."""
    kept = _latest(tokenizer, prompt, max_tokens)
    if kept is not None:
        return _rows(tokenizer, [kept])[0]
    if max_tokens > 1 and row[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id):
        return [row[0], *row[1 - max_tokens :]]
    return row[-max_tokens:]


def _latest(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, max_tokens: int) -> Prompt | None:
    """Return what is kept of a prompt that is too long; None where not even the layout fits."""
    head = prompt[:1] if prompt[0].role == "system" else ()
    begins = [i for i, m in enumerate(prompt) if m.role == "user" and i > len(head)]
    question = prompt[-1].content

    def since(begin: int) -> Prompt:
        return (*head, *prompt[begin:])

    def ending(kept: Prompt, cut: int) -> Prompt:
        return (*kept, Message("user", question[cut:]))

    def length(kept: Prompt) -> int:
        return len(_rows(tokenizer, [kept])[0])

    fits = bisect_left(begins, True, key=lambda begin: length(since(begin)) <= max_tokens)
    if fits < len(begins):
        return since(begins[fits])
    for kept, room in ((head, max_tokens // 2), ((), max_tokens)):
        if length(ending(kept, len(question))) < room:
            cuts = range(len(question))
            cut = bisect_left(cuts, True, key=lambda n: length(ending(kept, n)) <= max_tokens)
            return ending(kept, cut)
    return None


def _without_system(prompt: Prompt) -> Prompt:
    """Return the prompt with its system message at the head of the message after it."""
    head = Message(prompt[1].role, f"{prompt[0].content}\n\n{prompt[1].content}")
    return (head, *prompt[2:])


def _apply_template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    messages = as_messages(prompt)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _disarm(tokenizer: PreTrainedTokenizerBase, text: str, role: str) -> str:
    """Return what somebody of this role says, the spelling of tokens broken by one space.

    A tokenizer may look for tokens in text that it has brought to one form before, where other
    letters spell them too. Such text is returned in that form, broken there.
    """
    added = tokenizer.added_tokens_decoder.values()
    own = role == "assistant"
    tokens = [token for token in added if token.special or not own]
    text = _broken(text, tuple(map(str, tokens)))
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    in_its_form = [str(token) for token in tokens if token.normalized]
    if normalizer is None or not in_its_form:
        return text
    normal: str = normalizer.normalize_str(text)
    broken = _broken(normal, tuple(map(normalizer.normalize_str, in_its_form)))
    return text if broken == normal else broken


def _broken(text: str, tokens: tuple[str, ...]) -> str:
    pattern = _spelled(tokens)
    return pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if pattern else text


@lru_cache(maxsize=32)
def _spelled(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    kept = (t for t in tokens if len(t) > 1 and not t.isspace())  # a run of blanks steers nothing
    spelled = [re.escape(t) for t in sorted(kept, key=len, reverse=True)]
    return re.compile("|".join(spelled)) if spelled else None
