"""`rlhf chat`: a conversation with any version at the terminal, or a file of prompts answered."""

from __future__ import annotations

import contextlib
import io
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_pipeline.commands.common import (
    MOST_SEED,
    Agent,
    Workspace,
    actor,
    finite,
    inert,
    progress,
    workspace,
)
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.records import user_prompt

if TYPE_CHECKING:
    from rlhf_pipeline.commands.conversation import Rate
    from rlhf_pipeline.config import PolicySettings
    from rlhf_pipeline.policy.loading import Policy
    from rlhf_pipeline.records import Interaction
    from rlhf_pipeline.registry.ledger import ModelVersion


def chat(
    agent: Agent,
    once: Annotated[
        str | None,
        typer.Option("--once", metavar="TEXT", help="Print the completion to TEXT and leave."),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            "--batch",
            metavar="FILE",
            help="Answer a file of prompts: a text a line, or .jsonl with `prompt` or `messages`.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where --batch writes, a JSON object a line."),
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
        typer.Option(
            "--temperature", min=0, max=2, callback=finite, help="0 takes the likeliest words."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            max=MOST_SEED,
            help="The same seed, the same completions. --batch: 0 if not said.",
        ),
    ] = None,
) -> None:
    """Chat with a version; its files are checked against the registered hashes first.

    Words that are commands in the conversation: history, clear, save FILE, load FILE, rate, test,
    help, quit. Only what is rated is stored. --batch goes on where an interrupted one stopped.
    """
    if once is not None and not once.strip():
        raise ConfigError("--once needs a text to answer, found an empty one; type a question")
    if (batch is None) != (out is None):
        missing = "--out" if out is None else "--batch"
        raise ConfigError(f"--batch and --out belong together, found no {missing}; name both files")
    if batch is not None and once is not None:
        raise ConfigError("needed one of --once and --batch, found both; leave one out")
    if sys.stdin is None and once is None and batch is None:
        raise ConfigError("a conversation needs an input, found it closed; take --once or --batch")
    here = workspace()
    found = here.version(agent, version)
    folder, limits = here.registry.folder_of(found), here.settings_of(agent).policy
    warmth = limits.temperature if temperature is None else temperature
    if batch is not None and out is not None:
        _answer_file(batch, out, folder, limits, found, warmth, seed or 0)
        return
    policy, limits = _load(folder, limits)
    begin = secrets.randbelow(2**31) if seed is None else seed
    if once is not None:
        from rlhf_pipeline.commands.conversation import answer

        for piece in answer(policy, user_prompt(once), limits, warmth, begin + 1):
            if isinstance(piece, str):
                typer.echo(inert(piece), nl=False)
        typer.echo("")
        return
    from rlhf_pipeline.commands.conversation import Conversation

    if isinstance(sys.stdin, io.TextIOWrapper):  # what is no text is for the conversation to tell
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on every platform
            import readline  # noqa: F401 - importing it gives input() its arrow keys and history
    typer.echo(f"{agent} version {found.version} ({found.label}). `help` shows the commands.")
    rate = _rating(here, agent)
    Conversation(agent, found.version, policy, limits, warmth, begin, rate).hold()


def _load(folder: Path, limits: PolicySettings) -> tuple[Policy, PolicySettings]:
    """Return the policy, and the limits within its context."""
    from rlhf_pipeline.policy.loading import load_policy  # seconds: after what can go wrong at once

    policy = load_policy(folder, device=limits.device, dtype=limits.dtype)
    return policy, limits.within(policy.context_length)


def _answer_file(
    batch: Path,
    out: Path,
    folder: Path,
    limits: PolicySettings,
    found: ModelVersion,
    temperature: float,
    seed: int,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from rlhf_pipeline.commands.batch import answer_all, read_prompts

    prompts = read_prompts(batch)
    policy, limits = _load(folder, limits)
    columns = (TextColumn("replies"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress(*columns) as bar:
        task = bar.add_task("replies", total=len(prompts))
        before, written = answer_all(
            policy,
            prompts,
            out,
            limits,
            model={"agent_id": found.agent_id, "model_version": found.version},
            temperature=temperature,
            seed=seed,
            report=lambda facts: bar.update(task, completed=int(facts["replies"])),
        )
    again = f", {before} of them were there before" if before else ""
    typer.echo(f"{written} replies of version {found.version} in {out}{again}")


def _rating(here: Workspace, agent_id: str) -> Rate:
    """Return what stores a rating: the interaction first, then the vote about it."""

    def rate(interaction: Interaction, worth: str) -> str:
        from rlhf_pipeline.feedback.rules import check_event
        from rlhf_pipeline.records import Feedback, FeedbackKind, hash_rater, uuid7

        if not here.settings_of(agent_id).feedback.enabled:
            return "not rated: feedback.enabled is off in this recipe"
        thumbs = worth in ("up", "down")
        event = Feedback(
            agent_id=agent_id,
            kind=FeedbackKind.thumbs if thumbs else FeedbackKind.rating,
            idempotency_key=f"terminal:{uuid7()}",
            interaction_id=interaction.interaction_id,
            number=float(worth == "up") if thumbs else float(worth),
            rater_id=hash_rater(agent_id, actor()),
            origin="terminal",
        )
        check_event(event)
        here.store.ensure_agent(agent_id)
        here.store.add_interactions([interaction])
        here.store.append([event])
        return f"rated {worth}"

    return rate
