"""`rlhf serve`: feedback over HTTP, the chat page and the review page."""

from __future__ import annotations

from typing import Annotated

import typer

from rlhf_pipeline.commands.common import workspace


def serve(
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="The port to listen on.")
    ] = 8080,
    pages: Annotated[
        bool,
        typer.Option("--pages/--no-pages", help="The chat and review pages, or the API alone."),
    ] = True,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="The address to listen on; any but loopback needs `rlhf keys create` first.",
        ),
    ] = "127.0.0.1",
    answers_to: Annotated[
        list[str] | None,
        typer.Option("--answers-to", help="A host name people reach it by; may be repeated."),
    ] = None,
) -> None:
    """Serve the feedback API, the chat and the review page until interrupted."""
    settings = workspace().settings
    from rlhf_pipeline.serving.app import run

    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def tell() -> None:
        typer.echo(f"API       {address}/openapi.json")
        if pages:
            typer.echo(f"chat      {address}/ui/")
            typer.echo(f"review    {address}/ui/review/")
            typer.echo(f"dashboard {address}/dashboard")
        typer.echo(f"state     {settings.state_dir}")  # begun anew where there was none

    names = answers_to or ()
    run(settings, port, pages=pages, host=host, names=names, about_to=tell)
