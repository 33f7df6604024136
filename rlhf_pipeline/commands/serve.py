"""`rlhf serve`: the chat and review pages on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rlhf_pipeline.commands.common import workspace


def serve(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="On 127.0.0.1.")] = 8080,
) -> None:
    """Serve the chat page and the review page until interrupted, on this machine alone."""
    settings = workspace().settings
    from rlhf_pipeline.serving.app import run

    typer.echo(f"chat    http://127.0.0.1:{port}/ui/")
    typer.echo(f"review  http://127.0.0.1:{port}/ui/review/")
    run(settings, port)
