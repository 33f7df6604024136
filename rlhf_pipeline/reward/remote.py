"""A reward behind HTTP: a batch of items goes out as JSON, one score per item comes back.

    POST {"items": [{"prompt": [{"role", "content"}, …], "completion", "references", "metadata"}]}
    200  {"scores": [0.3, …]}

Prompts and completions leave the machine, so the address must be https or loopback, and a redirect
is refused, since it could lead elsewhere. What this does not protect against: a service that lies.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.records import RewardInput, checked_scores, hashed
from rlhf_pipeline.reward.rules import is_count

WORTH_ASKING_AGAIN = frozenset({408, 425, 429})  # beside failures of the server's own, from 500 on
STAYS_SO = frozenset({501, 505})  # of those: what it cannot do at all
DENIED = "check the address and the token"
ADVICE = {
    401: DENIED,
    403: DENIED,
    404: "check the address, or a judge's model",
    413: "let the service take longer requests, or send less at once (a lower batch_size)",
}
LONGEST_WAIT_SECONDS = 60.0
LONGEST_TIMEOUT_SECONDS = 86_400.0
BYTES_PER_SCORE = 64  # of an answer, beside a page of slack; more is no list of scores
# Options of a remote reward, and of a judge, that decide no score and are in no `version`.
HOW_ASKED = frozenset(
    "allow_plain_http at_once attempts batch_size key_variable timeout_seconds".split()
)


class RemoteReward:
    """A remote reward function. Every number it returns was sent by the service; none is made up.

    `version` follows the address alone: a service that changes its model behind it should change
    its path, or a run resumed in between mixes the two.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 30.0,
        attempts: int = 4,
        batch_size: int = 64,
        key_variable: str | None = None,
        allow_plain_http: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Check the address, as Service does; ask nothing yet. A request holds batch_size items.

        key_variable names the environment variable with the service's key, read when it is asked.
        """
        if not is_count(batch_size):
            raise ModelError(
                f"a remote reward needs a batch_size of 1, 2, 3 or more, found {batch_size}; "
                "correct it"
            )
        self._service = partial(
            Service,
            url,
            timeout_seconds=timeout_seconds,
            attempts=attempts,
            allow_plain_http=allow_plain_http,
            sleep=sleep,
        )
        self.shown_url = self._service().shown_url
        self._key_variable = key_variable
        self.version = hashed("remote", url)
        self._batch_size = batch_size

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return the scores, in order. Raises ModelError if the service gives none that are usable.

        Batches are asked for one after another; one that fails for good fails the whole call.
        """
        whose = f"the reward at {self.shown_url}"
        token = bearer_token(self._key_variable, whose, "set it where training starts")
        ask = partial(self._ask, self._service(bearer_token=token))
        scores: list[float] = []
        for start in range(0, len(items), self._batch_size):
            some = items[start : start + self._batch_size]
            scores += checked_scores(ask, some, name=self.shown_url, error=ModelError)
        return scores

    def _ask(self, service: Service, items: Sequence[RewardInput], /) -> list[float]:
        body = json.dumps({"items": [asdict(item) for item in items]}, default=_plain)
        answer = service.post(body.encode(), longest=4096 + BYTES_PER_SCORE * len(items))
        try:
            # A whole number that no float holds is read as infinite, and refused as such.
            scores = json.loads(answer, parse_int=float)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(
                f'the reward at {self.shown_url} must answer {{"scores": […]}}, found '
                f"{len(answer)} bytes that are not; correct the service"
            ) from error
        if not (isinstance(scores, list) and all(isinstance(score, float) for score in scores)):
            raise ModelError(
                f"the reward at {self.shown_url} must answer a list of numbers, found something "
                "else among its scores; correct the service"
            )
        return scores


def bearer_token(variable: str | None, whose: str, remedy: str) -> str | None:
    """Return the API key in an environment variable; None where none is named.

    Raises ModelError, with whose key it is and what to do, where the variable is not set or holds
    what no header does: a file's last line break, which is then in the secret, or a typed sign.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ModelError(f"{whose} needs its key in {variable}, found it unset; {remedy}")
    if not (token.isascii() and token.isprintable()):
        raise ModelError(
            f"{whose} needs its key in {variable}, found a line break or a sign beyond ASCII in "
            f"it; {remedy}"
        )
    return token


class Service:
    """An address that takes a POST of JSON, asked again where a failure may pass."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        attempts: int,
        bearer_token: str | None = None,
        allow_plain_http: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Check the address; ask nothing yet.

        timeout_seconds bounds the wait for a connection and for each piece of the answer. After a
        failure that may pass (no connection, no answer in time or a part of one, a status that says
        so) the request is sent again, `attempts` times in all, after 1, 2, 4, … seconds or what
        Retry-After says.
        bearer_token goes out in the Authorization header and stands in no message.
        Raises ModelError for an address that is neither https nor loopback.
        """
        self.shown_url = _checked_url(url, allow_plain_http)
        if not (0 < timeout_seconds <= LONGEST_TIMEOUT_SECONDS and is_count(attempts)):
            raise ModelError(
                f"a remote reward needs timeout_seconds above 0, {LONGEST_TIMEOUT_SECONDS:,.0f} at "
                f"most, and attempts of 1, 2, 3 or more, found {timeout_seconds} and {attempts}; "
                "correct them"
            )
        self._url = url
        self._timeout_seconds, self._attempts, self._sleep = timeout_seconds, attempts, sleep
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if bearer_token is not None:
            self._headers["Authorization"] = f"Bearer {bearer_token}"
        handlers: list[urllib.request.BaseHandler] = [NoRedirect()]
        if _is_loopback(urlsplit(url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))  # nothing local goes by way of a proxy
        self._opener = urllib.request.build_opener(*handlers)

    def post(self, body: bytes, *, longest: int) -> bytes:
        """Return the answer's body, of so many bytes at most; sends again what may succeed later.

        Raises ModelError where there is none to be had.
        """
        request = urllib.request.Request(self._url, body, self._headers, method="POST")
        for attempt in range(1, self._attempts + 1):
            wait = 2.0 ** min(attempt - 1, 6)  # the longest and more
            try:
                with self._opener.open(request, timeout=self._timeout_seconds) as answer:
                    found: bytes = answer.read(longest + 1)
                    if len(found) <= longest and answer.length:  # a read of so many does not look
                        raise http.client.IncompleteRead(found, answer.length)
                if len(found) > longest:
                    raise ModelError(
                        f"the reward at {self.shown_url} must answer what it was asked, found "
                        f"more than {longest} bytes; correct the service"
                    )
                # One whose length is not told ends with the connection, which may have broken off.
                if answer.length is None and not answer.chunked and not _is_json(found):
                    raise http.client.HTTPException(f"{len(found)} bytes that are no whole JSON")
                return found
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}"
                error.close()
                if not _may_pass(error.code):
                    advice = "its log says why it refuses what it was sent"
                    if 300 <= error.code < 400:
                        advice = "redirects are not followed, give the address it leads to"
                    raise ModelError(
                        f"the reward at {self.shown_url} must answer 200, found {reason}; "
                        f"{ADVICE.get(error.code, advice)}"
                    ) from error
                wait = _seconds_of(error.headers.get("Retry-After") or "", wait)
            # URLError, time-outs, resets; a chunk's length that is none.
            except (OSError, http.client.HTTPException, ValueError) as error:
                said = str(getattr(error, "reason", error)) or type(error).__name__
                reason = " ".join(said.split())
            if attempt < self._attempts:
                self._sleep(min(wait, LONGEST_WAIT_SECONDS))
        raise ModelError(
            f"the reward at {self.shown_url} must answer, found {reason} at the last of "
            f"{self._attempts} attempts; look at the service, or raise timeout_seconds"
        )


def _may_pass(status: int) -> bool:
    return status in WORTH_ASKING_AGAIN or (status >= 500 and status not in STAYS_SO)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body, parse_int=float)  # of a number as long as it likes
    except (ValueError, RecursionError):
        return False
    return True


def _seconds_of(said: str, otherwise: float) -> float:
    """Return the seconds that Retry-After asks to wait, a number or a date; `otherwise` if neither.

    Source: RFC 9110, section 10.2.3.
    """
    if said.isascii() and said.isdigit():
        return float(said)
    try:
        date = parsedate_to_datetime(said)
    except (ValueError, OverflowError):  # no date; numbers no calendar has
        return otherwise
    if date.tzinfo is None:  # of "-0000" and of asctime's form; all such dates are UTC
        date = date.replace(tzinfo=UTC)
    return max((date - datetime.now(UTC)).total_seconds(), 0.0)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: what is sent goes to the address that was given, or nowhere."""

    def http_error_302(self, *args: Any, **kwargs: Any) -> None:
        """Return nothing: urllib then raises the redirect as an error, and reads no address."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _checked_url(url: str, allow_plain_http: bool) -> str:
    """Return the address as messages may show it: without its query, which may hold a secret."""
    parts = parts_of(url)
    if parts is None:  # not shown: where a secret may stand in it is not known
        raise ModelError(
            "a remote reward needs an address with a host's name, a port's number, if any, and "
            "without spaces or signs beyond ASCII, found another; correct it (%20 is a space, "
            "%C3%BC an ü)"
        )
    shown = f"{parts.scheme}://{(parts.netloc).rpartition('@')[2]}{parts.path}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ModelError(
            f"a remote reward needs an http or https address, found {shown!r}; correct it"
        )
    if parts.username is not None or parts.password is not None:
        raise ModelError(
            f"the address of a remote reward must hold no user or password, found one for {shown}; "
            "name the environment variable with its key as key_variable"
        )
    if parts.scheme == "http" and not (_is_loopback(parts.hostname) or allow_plain_http):
        raise ModelError(
            f"prompts go out over https or stay on this machine: found {shown}; use https, or "
            "allow_plain_http on a network you trust"
        )
    return shown


def parts_of(url: str) -> SplitResult | None:
    """Return an address's parts; None of one that no request could be sent to."""
    try:
        parts = urlsplit(url)
        sound = parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
        (parts.hostname or "").encode("idna")
    except ValueError:  # brackets that do not close, a port that is no number below 65536, or no
        # name between two points
        return None
    return parts if sound else None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plain(value: Any) -> Any:
    """Return what json cannot write by itself as what it can."""
    if hasattr(value, "item"):  # a numpy or torch number
        return value.item()
    return str(value)
