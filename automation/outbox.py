"""What people are to hear of by webhook, kept in <state>/outbox until the webhook has taken it.

A sensor hears of a failed run once; what it could not tell is told when the next run fails, or at
the next tick of `alerts`. A message may come twice where this process ends between sending and
removing it. Of more than MOST the oldest go: the log has them, and a webhook that has moved for
good would be sent all of them at every tick. Where no webhook is set nothing is kept.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from rlhf_pipeline.config import Settings
from rlhf_pipeline.files import write_json
from rlhf_pipeline.records import uuid7
from rlhf_pipeline.reward.remote import NoRedirect

AWAY = (OSError, http.client.HTTPException)  # what `tell` raises where the webhook took nothing
OUTBOX = "outbox"  # folder in the state
MOST = 50  # messages that wait
ANSWER = 10.0  # seconds that a webhook has to take a message
TELLING = 30.0  # seconds of a tick for a slow webhook; Dagster gives up a tick after a minute


def keep(settings: Settings, body: Mapping[str, str]) -> None:
    """Keep a message until `send_kept` has told it."""
    if settings.notifications.webhook is None:
        return
    write_json(settings.state_dir / OUTBOX / f"{uuid7()}.json", dict(body))
    for path in _kept(settings)[:-MOST]:
        path.unlink(missing_ok=True)


def _kept(settings: Settings) -> list[Path]:
    """Return the messages that wait, oldest first."""
    return sorted((settings.state_dir / OUTBOX).glob("[!.]*.json"))


def send_kept(settings: Settings, *, seconds: float) -> None:
    """Tell what is kept, oldest first. One that is refused keeps no later one back.

    Raises what `tell` raised first, once all were tried; at once where the webhook is away, or
    takes so long that after these seconds some were not tried.
    """
    refused: urllib.error.HTTPError | None = None
    until = time.monotonic() + seconds
    for path in _kept(settings):
        if time.monotonic() > until:
            raise refused or TimeoutError("the webhook is slow: the rest is told later")
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue  # told by another sensor since the folder was listed
        try:
            tell(settings, body)
        except urllib.error.HTTPError as error:
            if is_away(error):
                raise
            refused = refused or error
        else:
            path.unlink(missing_ok=True)
    if refused is not None:
        raise refused


def is_away(error: Exception) -> bool:
    """Say whether the webhook would take nothing now, whatever it is told.

    It did not answer, which each time costs a tick seconds of its minute, or (from 500 on) says so.
    """
    return not isinstance(error, urllib.error.HTTPError) or error.code >= 500


def tell(settings: Settings, body: Mapping[str, str]) -> None:
    """Send it to the webhook, where one is set. Raises one of AWAY where it was not taken in time.

    Where the webhook has moved it was not: a redirect is followed with a GET, which tells nothing.
    """
    webhook = settings.notifications.webhook
    if webhook is None:
        return
    call = urllib.request.Request(
        webhook.get_secret_value(),
        data=json.dumps(dict(body)).encode(),
        headers={"Content-Type": "application/json"},
    )
    answer: Future[None] = Future()

    def ask() -> None:
        try:
            with urllib.request.build_opener(NoRedirect()).open(call, timeout=ANSWER):
                answer.set_result(None)
        except (*AWAY, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
            answer.set_exception(error)

    # In a thread of its own: the timeout above is each read's, and an answer may come in drips.
    threading.Thread(target=ask, daemon=True).start()
    answer.result(ANSWER)
