"""`rlhf serve`: feedback over HTTP, the chat page and the review page, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rlhf_pipeline.commands.common import workspace


def serve(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="On 127.0.0.1.")] = 8080,
    pages: Annotated[
        bool,
        typer.Option("--pages/--no-pages", help="The chat and review pages, or the API alone."),
    ] = True,
) -> None:
    """Serve the feedback API, the chat and the review page until interrupted, on this machine."""
    settings = workspace().settings
    from rlhf_pipeline.serving.app import run

    address = f"http://127.0.0.1:{port}"
    typer.echo(f"API     {address}/openapi.json")
    if pages:
        typer.echo(f"chat    {address}/ui/")
        typer.echo(f"review  {address}/ui/review/")
    run(settings, port, pages=pages)
