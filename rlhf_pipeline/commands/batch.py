"""`rlhf chat --batch`: many prompts answered into a file, and gone on with after an interruption.

Prompts are answered in blocks whose random numbers follow from the seed and the block's place, so
a run that was killed and asked for again writes the same file as one that was not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.commands.common import UNFIT, lines_there, numbered_lines, prompt_in
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.records import Progress, Prompt, as_messages, user_prompt

if TYPE_CHECKING:
    from rlhf_pipeline.config import PolicySettings
    from rlhf_pipeline.policy.loading import Policy

BLOCK = 64  # prompts answered together, and lost at most when the process dies


def read_prompts(path: Path) -> list[Prompt]:
    """Return the file's prompts: a text a line; in .jsonl, .ndjson `prompt` or `messages` a line.

    Blank lines are left out. Raises ConfigError where there is no such file or a line is no prompt.
    """
    is_json = path.suffix.lower() in (".jsonl", ".ndjson")
    return [
        _prompt_of(line, path, number) if is_json else user_prompt(line.strip())
        for number, line in numbered_lines(path, "prompts", "prompts")
    ]


def _prompt_of(line: str, path: Path, number: int) -> Prompt:
    try:
        prompt = prompt_in(json.loads(line))
    except UNFIT as error:
        raise ConfigError(
            f'{path}:{number} needs {{"prompt": text or messages}}, found {line[:60]!r}; mend it'
        ) from error
    if prompt[-1].role != "user":
        raise ConfigError(f"{path}:{number} needs a prompt that ends with the user's message")
    return prompt


def answer_all(
    policy: Policy,
    prompts: Sequence[Prompt],
    out: Path,
    limits: PolicySettings,
    *,
    model: dict[str, Any],
    temperature: float,
    seed: int,
    report: Progress,
) -> tuple[int, int]:
    """Append a line per prompt that has none in `out` yet; return how many there were, and are.

    `model` stands in every line: which agent, version, settings answered. Raises ConfigError where
    `out` holds answers to other prompts or of another model.
    """
    from rlhf_pipeline.policy.sampling import complete

    by = {**model, "temperature": temperature, "seed": seed}
    there = lines_there(
        out,
        [{"prompt": as_messages(prompt), **by} for prompt in prompts],
        lambda told: {name: told[name] for name in ("prompt", *by)},
        "answers to the same prompts by the same version, seed and temperature",
    )
    report({"replies": there})
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        for start in range(there - there % BLOCK, len(prompts), BLOCK):
            block = prompts[start : start + BLOCK]
            completions = complete(
                policy,
                block,
                max_completion_tokens=limits.max_completion_tokens,
                max_prompt_tokens=limits.max_prompt_tokens,
                temperature=temperature,
                seed=seed + start,
            )
            for i, (prompt, completion) in enumerate(zip(block, completions, strict=True), start):
                if i < there:
                    continue
                told = {
                    "number": i + 1,
                    "prompt": as_messages(prompt),
                    "completion": completion.text,
                    "tokens": completion.tokens,
                    "finished": completion.finished,
                    **by,
                }
                file.write(json.dumps(told, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            report({"replies": min(start + BLOCK, len(prompts))})
    return there, len(prompts)
