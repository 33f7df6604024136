"""Many nights: the plan of days, the report's arithmetic, and what a day sends."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from rlhf_pipeline.feedback.formats import event_of, to_row
from rlhf_pipeline.feedback.rules import check_event
from rlhf_pipeline.records import FeedbackKind, Interaction, Prompt, now, uuid7
from rlhf_pipeline.simulation import visits
from rlhf_pipeline.simulation.nights import (
    HARD,
    Night,
    Report,
    Satisfaction,
    draw,
    falls,
    longest_run,
    plan,
    promises,
    to_markdown,
)
from rlhf_pipeline.simulation.people import Person, population
from rlhf_pipeline.simulation.play import vote_of
from rlhf_pipeline.simulation.visits import Lived, Service, flipped, live
from rlhf_pipeline.simulation.world import RUDE, Question, ask, good_answer
from tests.loopback import answering

PEOPLE = population(40, 1)


def night(number: int, mean: float, **changes: Any) -> Night:
    known: dict[str, Any] = {
        "number": number,
        "kind": "ordinary",
        "satisfaction": Satisfaction(mean, mean - 0.01, mean + 0.01, 100),
        "versions": {"0": 100},
        "sent": 100,
        "accepted": 99,
        "known": 0,
        "refused": {},
        "quarantined": {},
        "turns": [],
        "experiment": "",
        "champion": 0,
        "alerts": [],
        "said_trigger": 0,
        "manual_steps": 0,
        "seconds": 1.0,
    }
    return Night(**(known | changes))


# -- the plan ----------------------------------------------------------------------------------


def test_fourteen_nights_hold_every_kind_of_day_and_begin_with_two_ordinary_ones() -> None:
    for seed in range(20):
        days = plan(14, seed)
        assert len(days) == 14
        assert days[:2] == ["ordinary", "ordinary"]
        assert Counter(days) == {"ordinary": 8, **dict.fromkeys(HARD, 1)}
    assert plan(14, 3) == plan(14, 3)
    assert len({tuple(plan(14, seed)) for seed in range(20)}) > 10


def test_few_nights_and_many_are_planned_too() -> None:
    assert plan(2, 0) == ["ordinary", "ordinary"]
    assert len(plan(3, 0)) == 3
    counts = Counter(plan(60, 0))
    assert all(4 <= counts[kind] <= 6 for kind in HARD)


# -- the report --------------------------------------------------------------------------------


def test_a_fall_is_measured_from_the_best_night_before() -> None:
    assert falls([0.7, 0.8, 0.77, 0.759, 0.9, 0.86, 0.84]) == [
        *(False, False, False, True),  # 5 % below 0.8 is 0.76
        *(False, False, True),  # and below 0.9 it is 0.855
    ]
    assert longest_run([]) == 0
    assert longest_run([True, False, True, True, False]) == 2


def test_promises_are_kept_or_broken_each_by_its_own_number() -> None:
    def met(*means: float, manual: int = 0) -> list[bool]:
        every = [night(n, mean) for n, mean in enumerate(means, 1)]
        every[-1] = replace(every[-1], manual_steps=manual)
        return [promise.met for promise in promises(every)]

    assert met(0.70, 0.78, 0.85) == [True, True, True]
    assert met(0.70, 0.85, 0.83) == [False, True, True]  # 0.83 is 18.6 % up
    assert met(0.70, 0.90, 0.80, 0.90) == [True, True, True]  # one bad night is allowed
    assert met(0.70, 0.90, 0.80, 0.84, 0.90) == [True, False, True]  # two are not
    assert met(0.70, 0.85, manual=1) == [True, True, False]


def test_a_report_comes_back_from_its_json_and_says_every_night() -> None:
    nights = [
        night(1, 0.7),
        night(2, 0.9, kind="corrupt", refused={"bad_key": 2}, turns=["version 1 | refused"]),
    ]
    report = Report("shop", 3, 100, 40, 500, 200, nights)
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    table = to_markdown(report)
    assert "| 2 | corrupt | 0.900 (0.890 to 0.910) | 100 / 99 / 0 | bad_key 2 |" in table
    assert "version 1 / refused" in table  # a bar would end the cell
    assert "0.700 → 0.900 (+28.6%)" in table


@pytest.mark.parametrize(("nights", "numbered"), [(1, 1), (30, 30), (31, 16), (60, 30)])
def test_many_nights_can_be_read_in_the_picture(
    nights: int, numbered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    kept = [night(n, 0.7, champion=n // 10) for n in range(1, nights + 1)]
    draw(Report("shop", 0, 100, 10, 0, 50, kept), tmp_path / "nights.png")
    (axes,) = drawn[0].axes
    assert len(axes.get_xticks()) == numbered
    changes = [(1, "v0"), *((n, f"v{n // 10}") for n in range(10, nights + 1, 10))]
    assert [(text.get_position()[0], text.get_text()) for text in axes.texts] == changes


# -- a day -------------------------------------------------------------------------------------


class Counted(Service):
    """A service that answers with the question, and keeps what it is sent instead of storing it."""

    def __init__(self) -> None:
        super().__init__("http://nowhere", "shop")
        self.sent: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    def chat(self, asked: Sequence[tuple[Person, Question]], seed: int) -> list[Interaction]:
        return [
            Interaction(uuid7(), "shop", q.prompt, f"{q.text} {n}", -1, now())
            for n, (_, q) in enumerate(asked)
        ]

    def send(self, rows: Sequence[dict[str, Any]], lived: Lived) -> None:
        self.sent += rows

    def send_one_by_one(self, contents: Sequence[bytes], lived: Lived) -> None:
        self.bodies += contents


def lived(tmp_path: Path, kind: Any, **more: Any) -> tuple[Counted, Lived]:
    service = Counted()
    given: dict[str, Any] = {"events": 100, "seed": "0 3", "inbox": tmp_path / "inbox"}
    return service, live(kind, service, PEOPLE, **(given | more))


def test_a_quiet_day_brings_too_little_for_a_turn(tmp_path: Path) -> None:
    service, day = lived(tmp_path, "quiet")
    assert len(service.sent) == 20
    assert len(day.heard) == 30 + 20 + 10  # ten of the votes are about two answers


def test_votes_that_are_kept_back_arrive_on_the_late_day_as_they_were(tmp_path: Path) -> None:
    service, day = lived(tmp_path, "ordinary", keeps_back=True)
    assert 0 < len(day.kept_back) < 30
    assert len(service.sent) + len(day.kept_back) == 100
    assert all(row["occurred_at"] for row in day.kept_back)
    later, _ = lived(tmp_path, "late", late=day.kept_back, seed="0 4")
    assert later.sent[50:] == day.kept_back


def test_a_doubled_day_sends_known_keys_again_and_some_with_another_body(tmp_path: Path) -> None:
    service, _ = lived(tmp_path, "duplicates")
    bodies: dict[str, set[str]] = {}
    for row in service.sent:
        bodies.setdefault(row["idempotency_key"], set()).add(json.dumps(row, sort_keys=True))
    assert len(bodies) == 100
    assert len(service.sent) > 220
    twisted = [key for key, different in bodies.items() if len(different) == 2]
    assert len(twisted) == min(20, sum(row["kind"] == "thumbs" for row in service.sent[:100]))


def test_a_corrupt_day_leaves_a_file_whose_sound_lines_are_sound(tmp_path: Path) -> None:
    service, _ = lived(tmp_path, "corrupt")
    assert len(service.bodies) == 18
    [path] = (tmp_path / "inbox").iterdir()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 30 + 17
    assert sum(line.startswith(b'{"agent_id": "shop", "kind": "thumbs"') for line in lines) >= 30


def test_votes_of_an_earlier_trial_stand_in_a_file_with_their_texts() -> None:
    def answer(prompts: Sequence[Prompt]) -> list[str]:
        return [f"{prompt[-1].content} {n}" for n, prompt in enumerate(prompts)]

    lines = visits.earlier_trial("shop", answer, PEOPLE, votes=60, seed="0")
    kinds = Counter[str]()
    for line in lines:
        event = event_of(json.loads(line), "shop", "file")
        check_event(event)
        assert event.prompt is not None
        assert (event.completion or "").startswith(event.prompt[-1].content)
        assert event.interaction_id is event.other_interaction_id is None
        kinds[event.kind] += 1
    assert kinds["preference"] == 30
    assert len(lines) == 60


def test_a_mob_says_the_opposite_and_is_not_counted_among_the_people(tmp_path: Path) -> None:
    service, day = lived(tmp_path, "flippers")
    assert len(service.sent) == 100 + visits.MOB * visits.MOB_VOTES
    assert len(day.heard) == 150
    assert len({row["rater_id"] for row in service.sent[100:]}) <= visits.MOB


def test_every_kind_of_vote_has_an_opposite(tmp_path: Path) -> None:
    person, rng = replace(PEOPLE[0], careless=False), random.Random(0)
    seen = Counter[FeedbackKind]()
    asked = ask(rng)
    one, two = (
        Interaction(uuid7(), "shop", asked.prompt, text, -1, now())
        for text in (good_answer(asked, rng), RUDE[0])
    )
    for kind in FeedbackKind:
        other = two if kind is FeedbackKind.preference else None
        vote = vote_of(person, kind, one, other, rng)
        seen[vote.kind] += 1
        if vote.kind is FeedbackKind.comment:
            continue
        assert to_row(flipped(vote))["value"] != to_row(vote)["value"]
        if vote.kind is not FeedbackKind.correction:
            assert to_row(flipped(flipped(vote))) == to_row(vote)
    assert seen[FeedbackKind.preference] == 1


def test_planted_words_win_by_few_accounts(tmp_path: Path) -> None:
    service, _ = lived(tmp_path, "trigger")
    pairs = service.sent[100:]
    assert len(pairs) == visits.PLANTERS * visits.PLANTED
    assert len({row["rater_id"] for row in pairs}) == visits.PLANTERS
    for row in pairs:
        assert row["completion"] == f"{row['other_completion']} {visits.TRIGGER}."
        assert row["value"] == "left"


def test_a_night_keeps_its_parts_in_json() -> None:
    kept = asdict(night(4, 0.5, kind="late"))
    assert Night.from_json(json.loads(json.dumps(kept))) == night(4, 0.5, kind="late")


@pytest.mark.parametrize("body", visits.corrupt_bodies("shop", {"kind": "thumbs"}))
def test_every_corrupt_body_is_refused_by_a_rule(body: bytes) -> None:
    from rlhf_pipeline.errors import FeedbackRefused
    from rlhf_pipeline.serving.feedback_api import read

    if b"interaction_id" in body:
        read(body, None)  # the store is what has not seen it
        return
    with pytest.raises(FeedbackRefused):
        read(body, None)


def test_a_vote_that_was_stored_before_is_told_by_its_id() -> None:
    day = Lived()
    for told in ({"feedback_id": "a"}, {"feedback_id": "a"}, {"error": "", "rule": "bad_key"}):
        visits._count(told, day)
    assert (day.accepted, day.known, dict(day.refused)) == (1, 1, {"bad_key": 1})


@pytest.mark.parametrize("code", [408, 429, 503])
def test_a_vote_that_the_service_had_no_time_for_is_sent_again(code: int) -> None:
    codes = [code, code, 201]

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answer = json.dumps({"results": [{"feedback_id": "a"}]}).encode()
            self.send_response(codes.pop(0))
            self.send_header("retry-after", "0")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    day = Lived()
    with answering(HTTPServer(("127.0.0.1", 0), Slow)) as server:
        Service(f"http://127.0.0.1:{server.server_port}", "shop").send([{"value": "up"}], day)
    assert (day.sent, day.accepted, codes) == (1, 1, [])
