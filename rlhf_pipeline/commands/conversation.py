"""The words of `rlhf chat`: what each does in a conversation at the terminal.

A line is a command when it is nothing but the command, with one word behind save, load and rate;
everything else is said to the model, so "save the whales" is a question. What a person rates is
stored; the rest is not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlhf_pipeline.commands.common import inert, need_whole
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.records import Interaction, Message, Prompt, as_messages, now, uuid7

if TYPE_CHECKING:
    from rlhf_pipeline.config import PolicySettings
    from rlhf_pipeline.policy.loading import Policy
    from rlhf_pipeline.policy.sampling import Completion

Rate = Callable[[Interaction, str], str]
"""Stores what a person said of an interaction ("up", "down", "1" to "5"); returns what to print."""

HELP = """\
history    show the conversation so far
clear      forget it and begin anew
save FILE  write it to a file
load FILE  go on from a file
rate       say what the last answer is worth: rate up, rate down, rate 1 to rate 5
test       look whether tokenizer and model are sound
help       show these words
quit       leave (exit and bye do as well)"""
LEAVE = ("quit", "exit", "bye")
WORTH = ("up", "down", "1", "2", "3", "4", "5")


@dataclass
class Conversation:
    """One conversation with one version of one agent."""

    agent_id: str
    version: int
    policy: Policy
    limits: PolicySettings
    temperature: float
    seed: int
    rate: Rate
    messages: list[Message] = field(default_factory=list)
    last: Interaction | None = None
    session_id: str = field(default_factory=uuid7)

    def hold(self) -> None:
        """Read lines until the person leaves; an error is told and the conversation goes on."""
        while True:
            try:
                said = input("you> ").strip()
            except (EOFError, KeyboardInterrupt):
                typer.echo("")
                return
            if said.lower() in LEAVE:
                return
            try:
                need_whole(said, "what was typed", "type it again")
                command = self._command(said)
                if command is not None:
                    typer.echo(inert(command()))
                elif said:
                    self.say(said)
            except EOFError:  # where a rating was asked for
                typer.echo("")
                return
            except KeyboardInterrupt:
                typer.echo("\nstopped; the question is forgotten")
            except (PipelineError, OSError) as error:
                typer.echo(f"error: {error}")

    def _command(self, said: str) -> Callable[[], str] | None:
        """Return what the line asks for, or None where it is something to say."""
        word, *rest = said.split()[:3] or [""]
        word = word.lower()
        alone: dict[str, Callable[[], str]] = {
            "help": lambda: HELP,
            "history": self.history,
            "clear": self.clear,
            "test": self.test,
            "rate": self.ask_rating,
        }
        if not rest:
            if word in ("save", "load"):
                return lambda: f"{word} needs a file: {word} talk.json"
            return alone.get(word)
        if len(rest) > 1:
            return None
        if word in ("save", "load"):
            do = self.save if word == "save" else self.load
            return lambda: do(_file(rest[0]))
        if word == "rate":
            return lambda: self.rate_last(rest[0].lower())
        return None

    def say(self, said: str) -> None:
        """Print the model's answer as it is written."""
        prompt = (*self.messages, Message("user", said))
        began = time.monotonic()
        text = ""
        seed = self.seed + len(prompt)  # another for each turn, as repeatable as the first
        for piece in answer(self.policy, prompt, self.limits, self.temperature, seed):
            if isinstance(piece, str):
                typer.echo(inert(piece), nl=False)
                sys.stdout.flush()
            else:
                text = piece.text
        typer.echo("")
        self.messages = [*prompt, Message("assistant", text)]
        self.last = Interaction(
            interaction_id=uuid7(),
            agent_id=self.agent_id,
            prompt=prompt,
            completion=text,
            model_version=self.version,
            created_at=now(),
            session_id=self.session_id,
            sampling={"temperature": self.temperature, "seed": seed},
            latency_seconds=time.monotonic() - began,
        )

    def history(self) -> str:
        """Return the conversation so far."""
        lines = [f"{m.role}: {m.content}" for m in self.messages]
        return "\n".join(lines) or "nothing said yet"

    def clear(self) -> str:
        """Forget the conversation."""
        self.messages, self.last, self.session_id = [], None, uuid7()
        return "forgotten"

    def save(self, path: Path) -> str:
        """Write the conversation where `load`, and sft.seed_conversations, can read it.

        What is there already is replaced where `load` would read it; any other file stays.
        """
        from rlhf_pipeline.files import write_text

        if not self.messages:
            return "nothing to save yet: ask something first"
        if path.exists():
            try:
                _saved(path)
            except PipelineError as error:
                raise ConfigError(
                    f"needed a new file, found that {path} is there already and is no saved "
                    "conversation; name another"
                ) from error
        write_text(path, as_line(self.agent_id, self.version, self.messages))
        return f"{len(self.messages)} messages saved in {path}"

    def load(self, path: Path) -> str:
        """Go on from a saved conversation."""
        self.messages, self.last = list(_saved(path)), None
        return f"{len(self.messages)} messages loaded from {path}"

    def ask_rating(self) -> str:
        """Ask what the last answer is worth, and store it."""
        if self.last is None:
            return "nothing to rate yet: ask something first"
        return self.rate_last(input("up, down, or 1 (poor) to 5 (excellent)> ").strip().lower())

    def rate_last(self, worth: str) -> str:
        """Store what the last answer is worth; a second rating of it replaces the first."""
        if self.last is None:
            return "nothing to rate yet: ask something first"
        if worth not in WORTH:
            return f"not rated: needed up, down or 1 to 5, found {worth!r}"
        return self.rate(self.last, worth)

    def test(self) -> str:
        """Return what a look at tokenizer and model finds."""
        from rlhf_pipeline.policy.tokenizers import diagnose, diagnose_model

        lines = [*diagnose(self.policy.tokenizer).lines(), *diagnose_model(self.policy).lines()]
        return "\n".join(lines)


def _saved(path: Path) -> Prompt:
    """Return the conversation in a file. Raises PipelineError where none can be gone on with."""
    from rlhf_pipeline.feedback.formats import messages_of
    from rlhf_pipeline.files import read_json

    saved = read_json(path)
    said = saved.get("messages") if isinstance(saved, dict) else saved
    read = messages_of(said, f"messages in {path}")
    for message in read:
        need_whole(message.content, str(path), "mend it")
    if read[-1].role != "assistant":
        raise PipelineError(
            f"a conversation that ends with the assistant's words is needed in {path}, found "
            f"one that ends with the {read[-1].role}'s; take the last line out"
        )
    return read


def _file(name: str) -> Path:
    """Return the file of that name; a leading ~ is somebody's home."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # nobody of that name, or no home
        raise PipelineError(
            f"needed a file whose folder is known, found {name} ({error}); write its whole path"
        ) from error


def answer(
    policy: Policy, prompt: Prompt, limits: PolicySettings, temperature: float, seed: int
) -> Iterator[str | Completion]:
    """Yield the completion piece by piece, and last as a whole."""
    from rlhf_pipeline.policy.streaming import stream

    return stream(
        policy,
        prompt,
        max_completion_tokens=limits.max_completion_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
        temperature=temperature,
        seed=seed,
    )


def as_line(agent_id: str, version: int, messages: list[Message]) -> str:
    """Return the conversation as one line of JSON."""
    import json

    told: dict[str, Any] = {
        "agent_id": agent_id,
        "model_version": version,
        "messages": as_messages(messages),
    }
    return json.dumps(told, ensure_ascii=False) + "\n"
