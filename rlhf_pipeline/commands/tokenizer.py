"""`rlhf tokenizer`: is a tokenizer sound, and how does it cut a text?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from rlhf_pipeline.commands.common import AsJson
from rlhf_pipeline.errors import ModelError


def tokenizer(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="tiktoken:NAME, a file of ranks (name.tiktoken), a local folder, or a hub id.",
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEXT", help="Show how this text is cut into tokens."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look whether a tokenizer gives texts back as they were, and lets nobody forge its tokens.

    Exit code 1 where it is not sound.
    """
    from rlhf_pipeline.policy.tokenizers import diagnose, find_tokenizer, pieces

    found = find_tokenizer(source)
    report = diagnose(found, [text] if text else [])
    cut = pieces(found, text) if text else []
    if as_json:
        told = {**asdict(report), "is_sound": report.is_sound, "pieces": cut}
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2))
    else:
        typer.echo("\n".join(report.lines()))
        if cut:
            shown = " ".join(f"{piece!r}:{number}" for number, piece in cut)
            typer.echo(f"pieces       {shown}")
    if not report.is_sound:
        wrong = ", ".join(report.changed) or "special tokens can be spelled"
        raise ModelError(
            f"a tokenizer that gives every text back is needed at {source}, found one that does "
            f"not: {wrong}; train with another, or expect completions to read that way"
        )
