"""Asking a language model for a verdict, at any OpenAI-compatible address.

What is to be judged goes out as JSON between lines with a mark, drawn for each request after all of
it was written: nobody can have said it. A verdict is one of a few values in a JSON object with a
reason; whatever else comes back is none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhf_pipeline.errors import ModelError, PipelineError
from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.reward.remote import Service, bearer_token

LONGEST_ANSWER = 256 * 1024  # bytes; a verdict has a few hundred
TRIES = 2  # requests for one verdict where the answer was none


V = TypeVar("V", int, str)


class Verdicts(Generic[V]):
    """Asks for one of the `allowed` values, under `name`, and keeps what was said."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        name: str,
        allowed: Sequence[V],
        shown: str,
        remedy: str,
        structured: bool,
        key_variable: str | None,
        timeout_seconds: float,
        attempts: int,
        allow_plain_http: bool = False,
        cache: Path | None,
    ) -> None:
        """Check the address; ask nothing yet.

        url ends with /v1, as clients take it; key_variable names the environment variable with the
        API key, which `opened` looks for. shown and remedy: the allowed values in words, and what
        to do about a judge that says something else. structured: the request asks for the verdict's
        schema; false for servers that refuse response_format, as `rlhf serve` does. cache is a
        folder for verdicts, each a value under a hash, without any text. Raises ModelError for an
        address that is neither https nor loopback (`allow_plain_http` lets others in), and for
        times and attempts that are none.
        """
        self.model = model
        self._name = name
        self._allowed: tuple[V, ...] = tuple(allowed)
        self._shown, self._remedy = shown, remedy
        self._structured, self._key_variable, self._cache = structured, key_variable, cache
        self._service = partial(
            Service,
            f"{url.rstrip('/')}/chat/completions",
            timeout_seconds=timeout_seconds,
            attempts=attempts,
            allow_plain_http=allow_plain_http,
        )
        self.shown_url = self._service().shown_url

    def opened(self) -> Service:
        """Return the judge with its key; raises ModelError where that is not set."""
        whose = f"the judge at {self.shown_url}"
        token = bearer_token(self._key_variable, whose, "set it where training starts")
        return self._service(bearer_token=token)

    def verdict(
        self,
        service: Service,
        key: str,
        rules: Callable[[str], str],
        about: Mapping[str, object],
    ) -> V:
        """Return the verdict on what is shown, the kept one where `key` has one.

        service: as `opened`; rules: from the mark to what the judge is told; about: what is shown,
        by name. Raises ModelError where there is no verdict.
        """
        kept = None if self._cache is None else self._cache / key[:2] / f"{key}.json"
        found = None if kept is None else self._kept(kept)
        if found is None:
            found = self._ask(service, rules, about)
            if kept is not None:
                write_json(kept, {self._name: found})
        return found

    def _ask(self, service: Service, rules: Callable[[str], str], about: Mapping[str, object]) -> V:
        for _ in range(TRIES):
            body = json.dumps(self._request(rules, about)).encode()
            found = self._read(service.post(body, longest=LONGEST_ANSWER))
            if found is not None:
                return found
        raise ModelError(
            f'the judge at {self.shown_url} must answer {{"reason": text, "{self._name}": '
            f"{self._shown}}}, found something else {TRIES} times; {self._remedy}"
        )

    def _request(self, rules: Callable[[str], str], about: Mapping[str, object]) -> dict[str, Any]:
        data = {what: json.dumps(part, ensure_ascii=False) for what, part in about.items()}
        mark = new_mark(list(data.values()))
        shown = "\n\n".join(f"{mark} {what}\n{part}\n{mark}" for what, part in data.items())
        request: dict[str, Any] = {
            "model": self.model,
            "temperature": 0,
            "messages": [
                {"role": "system", "content": rules(mark)},
                {"role": "user", "content": shown},
            ],
        }
        if self._structured:
            kind = "integer" if isinstance(self._allowed[0], int) else "string"
            schema = {
                "type": "object",
                "properties": {
                    "reason": {"type": "string"},
                    self._name: {"type": kind, "enum": list(self._allowed)},
                },
                "required": ["reason", self._name],
                "additionalProperties": False,
            }
            request["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": schema},
            }
        return request

    def _read(self, answer: bytes) -> V | None:
        """Return the verdict in a chat completion; None where it holds none."""
        try:
            told = json.loads(json.loads(answer)["choices"][0]["message"]["content"])
            reason, found = told["reason"], told[self._name]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return None
        return self._one_of(found) if len(told) == 2 and isinstance(reason, str) else None

    def _kept(self, path: Path) -> V | None:
        """Return the verdict kept there; None where there is none, or one that is damaged."""
        try:
            return self._one_of(read_json(path)[self._name])
        except (PipelineError, KeyError, TypeError):
            return None

    def _one_of(self, found: object) -> V | None:
        """Return what was found where it is allowed; in JSON true is no 1."""
        for value in self._allowed:
            if value == found and type(value) is type(found):
                return value
        return None


def new_mark(data: Sequence[str], draw: Callable[[], str] = lambda: secrets.token_hex(8)) -> str:
    """Return a mark that stands in none of the texts."""
    mark = f"<<{draw()}>>"
    return new_mark(data, draw) if any(mark in text for text in data) else mark
