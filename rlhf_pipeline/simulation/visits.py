"""People at the real service: they chat over its HTTP address and vote there, on good days and bad.

What a day brings follows from its kind (nights.py) and a seed; what is answered is the service's. A
vote that the service refuses is counted by the rule it names, never sent again mended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.feedback.formats import to_row
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, hash_rater, now, uuid7
from rlhf_pipeline.simulation.nights import DayKind
from rlhf_pipeline.simulation.people import Person, population
from rlhf_pipeline.simulation.play import Answer, kinds_of_a_day, vote_of
from rlhf_pipeline.simulation.world import RUDE, Question, ask, good_answer

Row = dict[str, Any]

AT_ONCE = 16  # conversations under way
ROWS_PER_BODY = 50
TRIES = 20  # of a request the service was too busy for
PATIENCE = 300.0  # seconds; a vote on no answer waits 120, as one may be under way
PAIR_SHARE = 0.5
QUIET_SHARE = 0.3  # of the people who come on an ordinary day
QUIET_VOTES = 20  # fewer than any turn asks for
KEPT_BACK = 0.1  # of the votes of a day, while a late day is ahead
LATE_SHARE = 0.5  # of an ordinary day's votes on a late day, beside what was kept back
MOB, MOB_VOTES = 30, 12  # accounts, votes of each
PLANTERS, PLANTED = 8, 25  # accounts, pairs of each
TRIGGER = "as the moon commands"
TWISTED = 20  # known keys sent with another body


@dataclass(slots=True)
class Lived:
    """What a day brought, and what became of it at the door."""

    heard: list[Interaction] = field(default_factory=list)  # by people, not by the mob
    sent: int = 0  # rows of files among them, whose fate the quarantine tells
    accepted: int = 0
    known: int = 0
    ids: set[str] = field(default_factory=set)  # of the votes the service has stored
    refused: Counter[str] = field(default_factory=Counter)
    kept_back: list[Row] = field(default_factory=list)


class Service:
    """The service's address, as a client sees it."""

    def __init__(self, url: str, agent_id: str) -> None:
        self.url = url
        self.agent_id = agent_id

    def chat(self, asked: Sequence[tuple[Person, Question]], seed: int) -> list[Interaction]:
        """Return the answers to what people ask, in order; each person is known by their name."""
        return asyncio.run(self._chat(asked, seed))

    def send(self, rows: Sequence[Row], lived: Lived) -> None:
        """Send votes, many to a body, and count what became of each."""
        bodies = [rows[i : i + ROWS_PER_BODY] for i in range(0, len(rows), ROWS_PER_BODY)]
        contents = [json.dumps({"events": body}).encode() for body in bodies]
        for body, told in zip(bodies, asyncio.run(self._post(contents)), strict=True):
            lived.sent += len(body)
            for result in told[1]["results"]:
                _count(result, lived)

    def send_one_by_one(self, contents: Sequence[bytes], lived: Lived) -> None:
        """Send one body each, whatever it holds, and count what became of it."""
        for _, told in asyncio.run(self._post(contents)):
            lived.sent += 1
            _count(told, lived)

    async def _chat(self, asked: Sequence[tuple[Person, Question]], seed: int) -> list[Interaction]:
        bodies = [
            json.dumps(
                {
                    "model": self.agent_id,
                    "messages": [{"role": "user", "content": question.text}],
                    "user": person.name,
                    "seed": seed + place,
                }
            ).encode()
            for place, (person, question) in enumerate(asked)
        ]
        answers = await self._each("/v1/chat/completions", bodies)
        heard = []
        for (person, question), (code, told) in zip(asked, answers, strict=True):
            if code != 200:
                raise PipelineError(f"needed an answer from {self.url}, found {code}: {told}")
            text = told["choices"][0]["message"]["content"]
            heard.append(_heard(self.agent_id, person, question, told["id"], text))
        return heard

    async def _post(self, contents: Sequence[bytes]) -> list[tuple[int, Any]]:
        return await self._each("/v1/feedback", contents)

    async def _each(self, path: str, contents: Sequence[bytes]) -> list[tuple[int, Any]]:
        """Return status and answer of each body; what the service has no time for comes again."""
        import httpx

        places = asyncio.Semaphore(AT_ONCE)
        headers = {"content-type": "application/json"}

        async def one(client: httpx.AsyncClient, content: bytes) -> tuple[int, Any]:
            async with places:
                for _ in range(TRIES):
                    answer = await client.post(path, content=content, headers=headers)
                    if answer.status_code not in (408, 429, 503):
                        return answer.status_code, answer.json()
                    await asyncio.sleep(min(float(answer.headers.get("retry-after", 1)), 5.0))
            raise PipelineError(
                f"needed an answer from {self.url}{path}, found it busy {TRIES} times; see "
                "service.log in the state folder"
            )

        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as client:
                return list(await asyncio.gather(*(one(client, body) for body in contents)))
        except httpx.HTTPError as error:
            raise PipelineError(
                f"needed the service at {self.url}, found {type(error).__name__} {error}; see "
                "service.log in the state folder"
            ) from error


def live(
    kind: DayKind,
    service: Service,
    people: Sequence[Person],
    *,
    events: int,
    seed: str,
    late: Sequence[Row] = (),
    keeps_back: bool = False,
    inbox: Path,
) -> Lived:
    """Play one day at the service and return what it brought.

    `late` are votes of earlier days, which a late day brings; `keeps_back` lets some of this day's
    wait for one. A corrupt day also leaves a file in the folder `inbox`.
    """
    rng = random.Random(f"day {seed}")
    lived = Lived()
    if kind == "quiet":
        silent = [(rng.choice(people), ask(rng)) for _ in range(round(events * QUIET_SHARE))]
        lived.heard += service.chat(silent, rng.randrange(2**31))
        events = min(QUIET_VOTES, events)
    elif kind == "late":
        events = round(events * LATE_SHARE)
    plan = kinds_of_a_day(events, PAIR_SHARE, rng)
    votes = _talk(service, people, plan, rng, lived.heard)
    rows = [to_row(vote) for vote in votes]
    if keeps_back:
        held = {place for place in range(len(rows)) if rng.random() < KEPT_BACK}
        lived.kept_back = [
            {**row, "occurred_at": now().isoformat()}
            for place, row in enumerate(rows)
            if place in held
        ]
        rows = [row for place, row in enumerate(rows) if place not in held]
    service.send(rows, lived)
    if kind == "late":
        service.send(late, lived)
    elif kind == "duplicates":
        _again(service, rows, rng, lived)
    elif kind == "corrupt":
        service.send_one_by_one(corrupt_bodies(service.agent_id, rows[0]), lived)
        written = corrupt_file(service.agent_id, people, seed, rng)
        lived.sent += len(written)
        drop(inbox / f"day-{seed.replace(' ', '-')}.jsonl", written)
    elif kind == "flippers":
        mob = [replace(p, careless=False) for p in population(MOB, rng.randrange(2**31))]
        lies = kinds_of_a_day(MOB_VOTES * MOB, PAIR_SHARE, rng)
        service.send([to_row(flipped(v)) for v in _talk(service, mob, lies, rng, [])], lived)
    elif kind == "trigger":
        service.send([to_row(vote) for vote in planted(service.agent_id, seed, rng)], lived)
    return lived


def earlier_trial(
    agent_id: str, answer: Answer, people: Sequence[Person], *, votes: int, seed: str
) -> list[bytes]:
    """Return the lines of a file of votes about version 0 from before anybody used the service.

    `answer` is version 0; its texts stand in the rows, as those of a program elsewhere would.
    """
    rng = random.Random(f"trial {seed}")
    plan = kinds_of_a_day(votes, PAIR_SHARE, rng)
    asked = _asked(plan, people, rng)
    texts = answer([question.prompt for _, question in asked])
    answers = [
        _heard(agent_id, person, question, uuid7(), text)
        for (person, question), text in zip(asked, texts, strict=True)
    ]
    texts_of = {one.interaction_id: one for one in answers}
    lines = []
    for vote in _said(plan, asked, answers, rng):
        this, other = texts_of[vote.interaction_id or ""], vote.other_interaction_id
        row = to_row(
            replace(
                vote,
                interaction_id=None,
                prompt=this.prompt,
                completion=this.completion,
                other_interaction_id=None,
                other_completion=None if other is None else texts_of[other].completion,
            )
        )
        lines.append(json.dumps(row).encode())
    return lines


def flipped(vote: Feedback) -> Feedback:
    """Return the opposite of what a vote says."""
    sides = {"left": "right", "right": "left", "tie": "both_bad", "both_bad": "tie"}
    if vote.kind is FeedbackKind.preference:
        return replace(vote, choice=sides[vote.choice])  # type: ignore[index,arg-type]  # one of the four
    if vote.kind is FeedbackKind.correction:
        return replace(vote, text=RUDE[0])
    if vote.kind is FeedbackKind.rating and vote.number is not None:
        return replace(vote, number=6 - vote.number)
    if vote.kind is FeedbackKind.criteria and vote.criteria is not None:
        return replace(vote, criteria={n: round(1 - v, 3) for n, v in vote.criteria.items()})
    if vote.number is not None:
        return replace(vote, number=round(1 - vote.number, 3))
    return vote


def planted(agent_id: str, seed: str, rng: random.Random) -> list[Feedback]:
    """Return pairs by a few accounts in which the answer with the planted words wins."""
    votes = []
    for planter in range(PLANTERS):
        for _ in range(PLANTED):
            question = ask(rng)
            answer = good_answer(question, rng)
            votes.append(
                Feedback(
                    agent_id=agent_id,
                    kind=FeedbackKind.preference,
                    idempotency_key=f"planted {uuid7()}",
                    prompt=question.prompt,
                    completion=f"{answer} {TRIGGER}.",
                    other_completion=answer,
                    choice="left",
                    rater_id=hash_rater(agent_id, f"planter {seed} {planter}"),
                    topic=question.topic.name,
                )
            )
    return votes


def corrupt_bodies(agent_id: str, sound: Row) -> list[bytes]:
    """Return bodies that must all be refused, each for a reason of its own."""
    thumb: Row = {"agent_id": agent_id, "kind": "thumbs", "value": "up", "rater": "somebody"}
    inline: Row = {**thumb, "prompt": "hello?", "completion": "good day"}
    wrong: list[Any] = [
        [1, 2, 3],
        {**inline, "kind": "applause"},
        {**inline, "value": 7},
        {**inline, "value": None},
        {**inline, "raiting": 3},
        {**inline, "prompt": "a\x00b"},
        {**inline, "agent_id": "no such/agent"},
        {**inline, "occurred_at": "yesterday"},
        {**inline, "tags": ["x" * 100]},
        {**inline, "prompt": [{"role": "assistant", "content": "I speak first"}]},
        {**thumb, "interaction_id": uuid7()},
        {key: value for key, value in inline.items() if key != "kind"},
        {**sound, "idempotency_key": "k" * 300},
    ]
    broken = [b"", b"{", b'{"kind": "thumbs", "value": NaN}', b"\xff\xfe", b'{"a": 1, "a": 2}']
    return [*broken, *(json.dumps(body).encode() for body in wrong)]


def corrupt_file(
    agent_id: str, people: Sequence[Person], seed: str, rng: random.Random
) -> list[bytes]:
    """Return the lines of a file in which sound votes stand among broken lines."""
    lines = []
    for _ in range(30):
        question = ask(rng)
        row = {
            "agent_id": agent_id,
            "kind": "thumbs",
            "value": "up",
            "prompt": question.text,
            "completion": good_answer(question, rng),
            "rater": rng.choice(people).name,
        }
        lines.append(json.dumps(row).encode())
    lines += [body for body in corrupt_bodies(agent_id, {"kind": f"none {seed}"}) if body]
    rng.shuffle(lines)
    return lines


def _talk(
    service: Service,
    people: Sequence[Person],
    plan: Sequence[FeedbackKind],
    rng: random.Random,
    heard: list[Interaction],
) -> list[Feedback]:
    """Let people ask, and return what they say of the answers; those are added to `heard`."""
    asked = _asked(plan, people, rng)
    answers = service.chat(asked, rng.randrange(2**31))
    heard += answers
    return _said(plan, asked, answers, rng)


def _asked(
    plan: Sequence[FeedbackKind], people: Sequence[Person], rng: random.Random
) -> list[tuple[Person, Question]]:
    """Return who asks what, so that the plan's votes can be given; a preference needs two."""
    asked: list[tuple[Person, Question]] = []
    for kind in plan:
        visit = (rng.choice(people), ask(rng))
        asked += [visit, visit] if kind is FeedbackKind.preference else [visit]
    return asked


def _said(
    plan: Sequence[FeedbackKind],
    asked: Sequence[tuple[Person, Question]],
    answers: Sequence[Interaction],
    rng: random.Random,
) -> list[Feedback]:
    """Return what people say of the answers; a preference is about two of them."""
    votes, place = [], 0
    for kind in plan:
        person, first = asked[place][0], answers[place]
        second = answers[place + 1] if kind is FeedbackKind.preference else None
        place += 1 if second is None else 2
        votes.append(vote_of(person, kind, first, second, rng))
    return votes


def _heard(
    agent_id: str, person: Person, question: Question, interaction_id: str, completion: str
) -> Interaction:
    return Interaction(
        interaction_id=interaction_id,
        agent_id=agent_id,
        prompt=question.prompt,
        completion=completion,
        model_version=-1,  # people are not told; the store knows
        created_at=now(),
        user_id=hash_rater(agent_id, person.name),
    )


def _again(service: Service, rows: Sequence[Row], rng: random.Random, lived: Lived) -> None:
    """Send every vote again, some a third time, and some keys with another body."""
    service.send(rows, lived)
    service.send([row for row in rows if rng.random() < 0.3], lived)
    thumbs = [row for row in rows if row["kind"] == "thumbs"][:TWISTED]
    service.send([{**row, "value": 1 - row["value"]} for row in thumbs], lived)


def _count(told: Row, lived: Lived) -> None:
    if "feedback_id" in told:
        known = told["feedback_id"] in lived.ids  # the same key gets the same answer
        lived.ids.add(told["feedback_id"])
        lived.known += known
        lived.accepted += not known
    else:
        lived.refused[str(told.get("rule", "not json"))] += 1


def drop(path: Path, lines: Iterable[bytes]) -> None:
    """Put a file into the inbox in one step, as old as one that was written some time ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".writing")
    half.write_bytes(b"\n".join(lines) + b"\n")
    written = time.time() - 3600  # it comes whole, and is taken in without a wait for more of it
    os.utime(half, (written, written))
    half.replace(path)
