"""`rlhf chat`: a conversation with any version, at the terminal."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_pipeline.commands.common import Agent, workspace
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.records import Message

if TYPE_CHECKING:
    from rlhf_pipeline.config import PolicySettings
    from rlhf_pipeline.policy.loading import Policy

HELP = """\
history  show the conversation so far
clear    forget it and begin anew
help     show these words
quit     leave (exit and bye do as well)"""
LEAVE = ("quit", "exit", "bye")


def chat(
    agent: Agent,
    once: Annotated[
        str | None,
        typer.Option("--once", metavar="TEXT", help="Print the completion to TEXT and leave."),
    ] = None,
    version: Annotated[
        str,
        typer.Option(
            "--version",
            metavar="VERSION",
            help="champion, challenger, previous, baseline, a number, or models:/rlhf-AGENT/3.",
        ),
    ] = "champion",
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0, max=2, help="0 takes the likeliest words."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="The same seed, the same completions.")
    ] = None,
) -> None:
    """Chat with a version; its files are checked against the registered hashes first.

    Words that are commands in the conversation: history, clear, help, quit. Nothing is stored.
    """
    if once is not None and not once.strip():
        raise ConfigError("--once needs a text to answer, found an empty one; type a question")
    here = workspace()
    found = here.version(agent, version)
    folder, limits = here.registry.folder_of(found), here.settings_of(agent).policy
    from rlhf_pipeline.policy.loading import load_policy  # seconds: after what can go wrong at once

    policy = load_policy(folder, device=limits.device, dtype=limits.dtype)
    warmth = limits.temperature if temperature is None else temperature
    begin = secrets.randbelow(2**31) if seed is None else seed
    if once is not None:
        typer.echo(_complete(policy, [Message("user", once)], limits, warmth, begin))
        return
    typer.echo(f"{agent} version {found.version} ({found.label}). `help` shows the commands.")
    _converse(policy, limits, warmth, begin)


def _converse(policy: Policy, limits: PolicySettings, temperature: float, seed: int) -> None:
    messages: list[Message] = []
    while True:
        try:
            said = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            return
        word = said.lower()
        if word in LEAVE:
            return
        if word == "help":
            typer.echo(HELP)
        elif word == "clear":
            messages = []
            typer.echo("forgotten")
        elif word == "history":
            lines = [f"{m.role}: {m.content}" for m in messages]
            typer.echo("\n".join(lines) or "nothing said yet")
        elif said:
            messages.append(Message("user", said))
            completion = _complete(policy, messages, limits, temperature, seed + len(messages))
            messages.append(Message("assistant", completion))
            typer.echo(completion)


def _complete(
    policy: Policy, messages: list[Message], limits: PolicySettings, temperature: float, seed: int
) -> str:
    from rlhf_pipeline.policy.sampling import complete

    completions = complete(
        policy,
        [tuple(messages)],
        max_completion_tokens=limits.max_completion_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
        temperature=temperature,
        seed=seed,
    )
    return completions[0].text
