"""One decoding thread per loaded model: several requests share a batch, and a cache.

A request joins between two tokens and leaves when it has ended, so nobody waits for anybody else's
completion. The arithmetic is policy/sampling.py's, and each request draws from random numbers of
its own: it gets the tokens that `streaming.stream` gives for the same seed, whoever is beside it
(but for ties within rounding).

Whoever asked and is gone (its generator was closed, or its event loop) leaves at the next token.
What this does not bound is how many wait: the gateway does (serving/gateway.py).

The first tokens are handed on one by one, until there is text to show; later ones that come faster
than anybody reads are handed on together. What a token costs the event loop is then paid less often
than tokens are drawn, and the loop's work is what requests wait for that have no text yet; the more
rows, the less often each.

While tokens are written the loop has the interpreter's lock for itself (policy/lean.py), but not
in between. So several are written in one go: until some are due to be handed on, a row has ended,
or somebody has come or gone. And what the thread does after writing comes before the loop is woken.
For the same reason it keeps its books in lists and arrays, which never let go of the lock, and asks
torch for as few operations as it can: a cache is changed in one (policy/scripting.py).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.policy.cache import can_merge, empty_cache, keep_rows, merge
from rlhf_pipeline.policy.chat import encode_prompt, storable
from rlhf_pipeline.policy.lean import Drawing, writer_of
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.sampling import Completion, left_padded, trunk_of
from rlhf_pipeline.policy.streaming import UNFINISHED
from rlhf_pipeline.records import Prompt

log = structlog.get_logger(__name__)

TOGETHER_SECONDS = 0.03  # tokens drawn within this time are handed on together
LINGER_SECONDS = 5.0  # of a retired decoder, after its last request
ROW_SECONDS = 0.005  # more rows take longer between two times: they share the event loop


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one completion is to be drawn."""

    max_completion_tokens: int
    max_prompt_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # texts before which the completion ends


@dataclass(eq=False, slots=True)
class _Row:
    """One request: what it asked for, where its tokens go, what it has."""

    ids: Sequence[int]
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[list[int] | Exception]
    uniforms: NDArray[np.float32]  # (T,)
    written: int = 0
    held: list[int] = field(default_factory=list)  # drawn, and not handed on yet
    handed: float = 0.0  # the time.monotonic() moment when tokens were last handed on
    shown: bool = False  # whoever asked has text
    gone: bool = False


@dataclass(slots=True)
class _Batch:
    """The rows that decode together; L columns in the cache, each row's first `starts` padding."""

    rows: list[_Row]
    cache: Any
    starts: NDArray[np.int64]  # (B,)
    inputs: NDArray[np.int64]  # (B, 1), the token each row wrote last


class Decoder:
    """A loaded policy and the thread that writes with it."""

    def __init__(self, policy: Policy, *, rows: int) -> None:
        self.policy = policy
        self._write = writer_of(policy.model)
        # Set by the loop, seen by a writer that holds no lock of the interpreter.
        self._enough = np.zeros(1, np.uint8)
        self._stop = torch.from_numpy(self._enough)  # the same memory
        self._seconds = 0.0  # a token took, the last time
        self._config = trunk_of(policy.model).config
        # Asked for at every request and token: of transformers' configurations they cost as much
        # as a small product.
        self._eos_id, self._pad_id = policy.eos_id, policy.pad_id
        self._context_length, self._device = policy.context_length, policy.device
        # Caches that forget (sliding windows) cannot be merged: there one request at a time.
        self._most = rows if can_merge(empty_cache(self._config)) else 1
        self._waiting: deque[_Row] = deque()
        self._changed = threading.Condition()
        self._retired = False
        self._ended = False  # so is the thread
        self.decoding = 0  # rows in the batch now
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Return how many requests wait for a place in the batch."""
        return len(self._waiting)

    def retire(self) -> None:
        """Have the thread end once nobody has asked anything for LINGER_SECONDS.

        Until then it takes requests: whoever was given it before may still be reading the prompt.
        """
        with self._changed:
            self._retired = True
            self._changed.notify()

    @property
    def retired(self) -> bool:
        """Say whether another is to be asked, where there is time to look for one."""
        return self._retired

    def prompt_ids(self, prompt: Prompt, sampling: Sampling) -> list[int]:
        """Return the prompt's tokens. Raises ModelError where prompt and completion do not fit."""
        longest = sampling.max_prompt_tokens + sampling.max_completion_tokens
        if sampling.max_completion_tokens < 1 or longest > self._context_length:
            raise ModelError(
                f"prompt and completion must fit a context of {self._context_length} tokens, "
                f"found {sampling.max_prompt_tokens} + {sampling.max_completion_tokens}; lower one "
                "of the two"
            )
        return encode_prompt(self.policy.tokenizer, prompt, max_tokens=sampling.max_prompt_tokens)

    async def pieces(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        deadline: float,
        certain: Callable[[str], str] = str,
        count: Callable[[int], None] = lambda tokens: None,
    ) -> AsyncGenerator[str | Completion, None]:
        """Yield the completion's text piece by piece, and last the whole `Completion`.

        `deadline` is a time.monotonic() moment; `certain` says how much of a text so far is shown
        to whoever asked: until that is something, tokens come one by one. `count` is told how many
        tokens there are so far, before each piece. Closing the iterator takes the row out of the
        batch. Raises TimeoutError at the deadline, ModelError where the model writes no numbers or
        the decoder has retired.
        """
        if time.monotonic() >= deadline:  # a first token might be faster than a timer of no time
            raise TimeoutError
        loop = asyncio.get_running_loop()
        row = _Row(ids, sampling, loop, asyncio.Queue(), _uniforms(sampling))
        with self._changed:
            if self._ended:
                raise ModelError("a decoder in service is needed, found a retired one; ask again")
            self._waiting.append(row)
            self._enough[0] = 1
            self._changed.notify()
        text, eos_id = Text(self.policy, sampling.stop), self._eos_id
        drawn: list[int] = []
        ended = False
        late = loop.call_later(deadline - time.monotonic(), row.tokens.put_nowait, TimeoutError())
        try:
            while True:
                tokens = await row.tokens.get()
                if isinstance(tokens, Exception):
                    raise tokens
                piece, finished = "", False
                # A stop text may end it at any token; without one all are decoded together.
                for some in [[token] for token in tokens] if sampling.stop else [tokens]:
                    drawn += some
                    finished = some[-1] == eos_id
                    piece += text.add(some[:-1] if finished else some)
                    is_full = len(drawn) == sampling.max_completion_tokens
                    ended = finished or text.stopped or is_full
                    if ended:
                        piece += text.rest()
                        break
                count(len(drawn))
                if piece:
                    yield piece
                    row.shown = row.shown or bool(certain(text.shown))
                if ended:
                    yield Completion(text.shown, drawn, finished or text.stopped, text.stopped)
                    return
        finally:
            row.gone = True
            if not ended or text.stopped:
                self._enough[0] = 1
                with self._changed, suppress(ValueError):  # it waits no more, or never had to
                    self._waiting.remove(row)
            late.cancel()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Again and again: take in who waits, give them their first token, give every row one more.

        Tokens are handed on as they are drawn; rows that have ended or are gone are dropped.
        """
        if self._device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # One core is left to the loop that reads and writes: with all of them here each product
            # of matrices waits for the core that it is on.
            torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        batch: _Batch | None = None
        while True:
            with self._changed:
                while batch is None and not self._waiting:
                    told = self._changed.wait(LINGER_SECONDS if self._retired else None)
                    if self._retired and not told:
                        self._ended = True
                        return
                room = self._most - (len(batch.rows) if batch else 0)
                joining = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
                self._enough[0] = 0
            joining = [row for row in joining if not row.gone]
            there = [*(batch.rows if batch else ()), *joining]
            self.decoding = len(there)
            try:
                with torch.inference_mode():
                    if joining:
                        late = batch is not None and not all(row.shown for row in batch.rows)
                        batch = self._join(batch, joining)
                        # Who came meanwhile reads first: a first text is waited for. But not before
                        # the next token of who has none yet and was there before these.
                        if self._waiting and not late:
                            continue
                    if batch is not None:
                        batch = self._go_on(batch, batch.inputs, self._most_tokens(batch.rows))
            except Exception as error:  # one batch's trouble must not end the service
                log.exception("decoding failed", rows=self.decoding)
                failure = ModelError(f"the model failed while it wrote: {error}; see the log")
                _deliver([(row, failure) for row in there])
                batch = None
            self.decoding = len(batch.rows) if batch else 0

    def _join(self, batch: _Batch | None, joining: list[_Row]) -> _Batch | None:
        """Run the prompts of new rows together, draw their first tokens, add them to the batch."""
        ids, starts = map(np.array, left_padded([row.ids for row in joining], self._pad_id))
        cache = empty_cache(self._config)
        added = self._go_on(_Batch(joining, cache, starts, ids[:, :1]), ids, 1)
        if batch is None or added is None:
            return added or batch
        left, others_left = merge(batch.cache, added.cache)
        batch.rows += added.rows
        batch.starts = np.concatenate([batch.starts + left, added.starts + others_left])
        batch.inputs = np.concatenate([batch.inputs, added.inputs])
        return batch

    def _most_tokens(self, rows: Sequence[_Row]) -> int:
        """Return how many tokens may be written before anybody is to hear of them."""
        if not all(row.shown for row in rows):
            return 1
        left = min(len(row.uniforms) - row.written for row in rows)
        due = min(row.handed for row in rows) + _apart(rows) - time.monotonic()
        return max(1, min(left, int(due / self._seconds)))

    def _go_on(self, batch: _Batch, ids: NDArray[np.int64], most: int) -> _Batch | None:
        """Read ids (B, T), write `most` tokens or fewer, return the batch without who ended."""
        rows = batch.rows
        alike: dict[tuple[float, float], list[int]] = {}
        for i, row in enumerate(rows):
            alike.setdefault((row.sampling.temperature, row.sampling.top_p), []).append(i)
        drawing = Drawing(
            self._there(np.stack([r.uniforms[r.written : r.written + most] for r in rows])),
            list(alike),
            [self._there(np.array(some)) for some in alike.values()] if len(alike) > 1 else [],
            self._eos_id,
            self._stop,
        )
        began = time.monotonic()
        written = self._write(self._there(ids), self._there(batch.starts), batch.cache, drawing)
        tokens, sound = (found.tolist() for found in written)  # (B, n) each
        moment = time.monotonic()
        self._seconds = (moment - began) / len(tokens[0])
        told: list[tuple[_Row, list[int] | Exception]] = []
        keep: list[int] = []
        apart = _apart(rows)
        if any(row.shown and moment - row.handed >= apart for row in rows):
            apart /= 2  # who is nearly due hears now too, so that more is written at once after
        for i, (row, new, are_sound) in enumerate(zip(rows, tokens, sound, strict=True)):
            if not are_sound[-1]:
                told.append((row, ModelError("the model's logits are no numbers; retrain it")))
                continue
            row.written += len(new)
            row.held += new
            ended = new[-1] == self._eos_id or row.written == len(row.uniforms)
            if ended or not row.shown or moment - row.handed >= apart:
                told.append((row, row.held))
                row.held, row.handed = [], moment
            if not ended and not row.gone:
                keep.append(i)
        batch.inputs = np.array([new[-1:] for new in tokens])
        left = _kept(batch, keep)  # before the loop is woken, which would want the lock meanwhile
        told.sort(key=lambda one: one[0].shown)  # who has no text yet is woken first
        _deliver(told)
        return left

    def _there(self, array: NDArray[Any]) -> Tensor:
        """Return the array as the model reads it: on a CPU without asking torch for anything."""
        found = torch.from_numpy(array)
        return found if self._device.type == "cpu" else found.to(self._device)


def _uniforms(sampling: Sampling) -> NDArray[np.float32]:
    """Return a random number from 0 to 1 for each token, those that `streaming.stream` draws."""
    generator = torch.Generator().manual_seed(sampling.seed)
    drawn = torch.rand(1, sampling.max_completion_tokens, generator=generator)
    array: NDArray[np.float32] = drawn.numpy()[0]
    return array


def _apart(rows: Sequence[_Row]) -> float:
    """Return the seconds between two times that a row's tokens are handed on."""
    return max(TOGETHER_SECONDS, ROW_SECONDS * len(rows))


def _kept(batch: _Batch, keep: list[int]) -> _Batch | None:
    """Return the batch of these rows alone, without columns that are padding in all of them."""
    if not keep:
        return None
    if len(keep) == len(batch.rows):
        return batch
    order = list(range(len(keep)))  # the last rows go where others have left
    sources = [i for i in keep if i >= len(keep)]
    moves = list(zip(sorted(set(order).difference(keep)), sources, strict=True))
    for to, source in moves:
        order[to] = source
    batch.rows = [batch.rows[i] for i in order]
    batch.starts, batch.inputs = batch.starts[order], batch.inputs[order]
    columns = int(batch.starts.min())
    keep_rows(batch.cache, moves, len(keep), columns)
    batch.starts = batch.starts - columns
    return batch


def _deliver(told: Sequence[tuple[_Row, list[int] | Exception]]) -> None:
    """Put what each row is told into its queue: one call a loop; a closed loop's rows are gone."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Row, list[int] | Exception]]] = {}
    for row, what in told:
        by_loop.setdefault(row.loop, []).append((row, what))
    for loop, some in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, some)
        except RuntimeError:  # the loop is closed: nobody listens
            for row, _ in some:
                row.gone = True


def _put(told: Sequence[tuple[_Row, list[int] | Exception]]) -> None:
    for row, what in told:
        row.tokens.put_nowait(what)


@dataclass(slots=True)
class Text:
    """The text of tokens as they come: whole characters only, and nothing from a stop text on.

    Only the newest tokens are decoded each time, after the ones before them (their context tells
    a decoder about spaces), so a long completion does not cost its length squared.
    """

    policy: Policy
    stop: tuple[str, ...] = ()
    shown: str = ""  # what was given out
    stopped: bool = False
    _held: str = ""  # decoded, but it may be the beginning of a stop text
    _ids: list[int] = field(default_factory=list)
    _before: int = 0  # where the context of the newest tokens begins
    _read: int = 0  # where they begin

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is new and certain."""
        self._ids += tokens
        old = self._decoded(self._ids[self._before : self._read])
        new = self._decoded(self._ids[self._before :])
        if len(new) <= len(old) or new.endswith(UNFINISHED):
            return ""
        self._before, self._read = self._read, len(self._ids)
        return self._give(new[len(old) :])

    def rest(self) -> str:
        """Return what was held back, at the end."""
        if self.stopped:
            return ""
        old = self._decoded(self._ids[self._before : self._read])
        last = self._decoded(self._ids[self._before :])[len(old) :]
        piece = self._give(last) if last else ""
        held, self._held = self._held, ""
        self.shown += held
        return piece + held

    def _give(self, piece: str) -> str:
        if not self.shown and not self._held and not self.policy.tokenizer.chat_template:
            piece = piece.removeprefix(" ")  # as policy/chat.py lays it out
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            text = text[: min(found)]
        else:
            held = max((_overlap(text, stop) for stop in self.stop), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self.shown += text
        return text

    def _decoded(self, ids: list[int]) -> str:
        """Return the tokens' text, storable."""
        if not ids:
            return ""
        # What `tokenizer.decode` calls for a fast tokenizer, without the work around it.
        fast = getattr(self.policy.tokenizer, "backend_tokenizer", None)
        if fast is not None:
            text = fast.decode(ids, skip_special_tokens=True)
        else:
            text = self.policy.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return storable(str(text))


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text may begin the stop text."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
