"""Votes in any order, against a model of a few lines: what counts now, and what ever came in."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from rlhf_pipeline import database as db
from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import FeedbackError, IdempotencyConflict
from rlhf_pipeline.feedback import raters, snapshot
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.formats import VALUE_FIELD
from rlhf_pipeline.feedback.rules import check_event
from rlhf_pipeline.feedback.store import FeedbackStore, Stored
from rlhf_pipeline.records import Feedback, FeedbackKind, Interaction, hashed, now, user_prompt
from tests.machines import play

VALUES: dict[FeedbackKind, list[Any]] = {
    FeedbackKind.thumbs: [0.0, 1.0],
    FeedbackKind.rating: [1.0, 3.0, 5.0],
    FeedbackKind.score: [0.0, 0.25, 1.0],
    FeedbackKind.correction: ["better", "best"],
    FeedbackKind.comment: ["so", "so so"],
    FeedbackKind.criteria: [{"safety": 0.5}, {"safety": 1.0, "relevance": 0.0}],
    FeedbackKind.preference: ["left", "right", "tie", "both_bad"],
}
TARGETS = ["i-0", "i-1", "inline"]  # two interactions, and texts sent along
RATERS = ["a" * 32, "b" * 32, None]
ASKED = {"i-0": None, "i-1": RATERS[1]}  # whose interaction it is


@st.composite
def votes(draw: st.DrawFn) -> Feedback:
    """Draw a vote without a key."""
    kind = draw(st.sampled_from(list(VALUES)))
    target = draw(st.sampled_from(TARGETS))
    about: dict[str, Any] = {"interaction_id": target}
    if target == "inline":
        about = {"prompt": user_prompt("hi"), "completion": "hello"}
    if kind is FeedbackKind.preference:
        other = draw(st.sampled_from(["x", "y", *ASKED]))
        about["other_interaction_id" if other in ASKED else "other_completion"] = other
    about[VALUE_FIELD[kind]] = draw(st.sampled_from(VALUES[kind]))
    return Feedback("", kind, "", rater_id=draw(st.sampled_from(RATERS)), **about)


def slot(vote: Feedback, number: int) -> tuple[Any, ...]:
    """Return what later votes of the same person replace; an unsigned one stands alone."""
    voter = vote.rater_id or f"nobody {number}"
    this = vote.interaction_id or (vote.prompt, vote.completion)
    if vote.kind is not FeedbackKind.preference:
        return voter, vote.kind, this
    other = vote.other_interaction_id or (vote.prompt, vote.other_completion)
    return voter, vote.kind, frozenset((this, other))


def turned(vote: Feedback) -> Feedback | None:
    """Return a preference with its sides the other way round, None where they cannot be."""
    if vote.interaction_id and vote.other_interaction_id:
        this, other = vote.interaction_id, vote.other_interaction_id
        return replace(vote, interaction_id=other, other_interaction_id=this)
    if vote.completion and vote.other_completion:
        this, other = vote.completion, vote.other_completion
        return replace(vote, completion=other, other_completion=this)
    return None


class Votes(RuleBasedStateMachine):
    """The store beside `self.history`, which is all the model there is."""

    def __init__(self, database: Database, folder: Path) -> None:
        super().__init__()
        self.database, self.folder = database, folder
        self.store = FeedbackStore(database)
        self.agent = f"tea-{len(self.store.agents())}"  # a run's own
        self.store.ensure_agent(self.agent)
        self.keys = count()
        self.about = {name: self.asked(name) for name in ASKED}  # the interactions' own ids
        self.history: list[tuple[Feedback, str]] = []  # what was stored, with its id, in order
        self.blank: set[str] = set()  # of those: about an interaction of somebody erased
        self.taken: list[tuple[int, str, dict[str, Any]]] = []  # snapshots: watermark, print, votes

    def effective(self, many: int) -> dict[str, Any]:
        """Return the model's effective votes among the first so many: id to value, in order."""
        last = {
            slot(vote, n): (feedback_id, getattr(vote, VALUE_FIELD[vote.kind]))
            for n, (vote, feedback_id) in enumerate(self.history[:many])
        }
        return {key: value for key, value in last.values() if key not in self.blank}

    @property
    def whole(self) -> list[tuple[Feedback, str]]:
        """Return what was stored and still says what was said."""
        return [(vote, key) for vote, key in self.history if key not in self.blank]

    def asked(self, name: str) -> str:
        """Store an interaction of that name and return its id."""
        key = f"{self.agent}:{next(self.keys)}:{name}"
        self.store.add_interactions(
            [Interaction(key, self.agent, user_prompt(name), name, 0, now(), user_id=ASKED[name])]
        )
        return key

    def own(self, vote: Feedback) -> Feedback:
        """Return a drawn vote as this run's agent's, with a key nobody used."""
        this, other = (
            about and self.about[about.rpartition(":")[2]]
            for about in (vote.interaction_id, vote.other_interaction_id)
        )
        sides: dict[str, Any] = {"interaction_id": this, "other_interaction_id": other}
        return replace(vote, agent_id=self.agent, idempotency_key=f"k{next(self.keys)}", **sides)

    def send(self, *votes: Feedback) -> list[Stored]:
        for vote in votes:
            check_event(vote)
        return self.store.append(votes)

    @rule(vote=votes())
    def one_votes(self, vote: Feedback) -> None:
        vote = self.own(vote)
        [stored] = self.send(vote)
        assert not stored.known
        self.history.append((vote, stored.feedback_id))

    @rule(many=st.lists(votes(), min_size=2, max_size=5))
    def many_vote_at_once(self, many: list[Feedback]) -> None:
        many = [self.own(vote) for vote in many]
        stored = self.send(*many)
        self.history += [(v, s.feedback_id) for v, s in zip(many, stored, strict=True)]

    @precondition(lambda self: self.history)
    @rule(data=st.data(), twice=st.booleans())
    def one_changes_their_mind(self, data: st.DataObject, twice: bool) -> None:
        vote, _ = data.draw(st.sampled_from(self.history))
        for _ in range(1 + twice):
            value = data.draw(st.sampled_from(VALUES[vote.kind]))
            changed: dict[str, Any] = {VALUE_FIELD[vote.kind]: value}
            if vote.kind is FeedbackKind.preference:  # over another completion: another vote
                changed["other_completion"] = data.draw(st.sampled_from(["x", "y"]))
                changed["other_interaction_id"] = None
            self.one_votes(replace(vote, **changed))

    @precondition(lambda self: any(turned(vote) for vote, _ in self.history))
    @rule(data=st.data(), choice=st.sampled_from(VALUES[FeedbackKind.preference]))
    def one_names_a_pair_the_other_way_round(self, data: st.DataObject, choice: Any) -> None:
        pairs = [pair for vote, _ in self.history if (pair := turned(vote)) is not None]
        self.one_votes(replace(data.draw(st.sampled_from(pairs)), choice=choice))

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def one_sends_a_vote_again(self, data: st.DataObject) -> None:
        vote, feedback_id = data.draw(st.sampled_from(self.whole))
        assert self.send(vote) == [Stored(feedback_id, known=True)]

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), beside=votes())
    def a_known_key_comes_with_another_body(self, data: st.DataObject, beside: Feedback) -> None:
        vote, _ = data.draw(st.sampled_from(self.whole))
        other = replace(vote, comment="something else")
        beside = self.own(beside)
        refused: list[FeedbackError] = []
        [stored] = self.store.append(
            [other, beside], on_refused=lambda _, error: refused.append(error)
        )
        assert [type(error) for error in refused] == [IdempotencyConflict]
        self.history.append((beside, stored.feedback_id))

    @precondition(lambda self: self.history)
    @rule(rater_id=st.sampled_from(RATERS[:2]))
    def one_is_erased(self, rater_id: str) -> None:
        person, claims = raters.Person(self.agent, rater_id), ClaimBook(self.database)
        with self.database.read() as connection:
            found = raters.held(connection, person)
        mark = hashed(rater_id, str(next(self.keys)))
        claim = claims.claim(self.agent, mark, 0, holder="erasure", asked_by="erasure")
        none: dict[str, Any] = {"counts": {}, "snapshots": [], "versions": []}
        raters.remove(self.database, person, found, claim.token, **none)
        claims.let_go(claim.token)
        self.history = [(v, key) for v, key in self.history if v.rater_id != rater_id]
        self.blank &= {key for _, key in self.history}
        for name, who in ASKED.items():
            if who == rater_id:  # what others said of it stands there without its words
                gone, self.about[name] = self.about[name], self.asked(name)
                self.blank |= {
                    key
                    for vote, key in self.history
                    if gone in (vote.interaction_id, vote.other_interaction_id)
                }
        self.taken = []  # an erasure reaches what was frozen

    @precondition(lambda self: self.effective(len(self.history)))  # an erasure may leave none
    @rule()
    def a_snapshot_is_taken(self) -> None:
        watermark = snapshot.newest_seq(self.database, self.agent)
        path = self.folder / "frozen.parquet"
        taken = snapshot.take(self.database, self.agent, watermark, path, redacts=False)
        rows = snapshot.read(path)
        found = {}
        for row in rows.to_dict("records"):
            field = VALUE_FIELD[FeedbackKind(row["kind"])]
            value = row[field]
            found[row["feedback_id"]] = json.loads(value) if field == "criteria" else value
        expected = self.effective(len(self.history))
        assert found == expected
        self.taken.append((watermark, taken.fingerprint, expected))

    @invariant()
    def effective_votes_are_the_last_of_each_slot(self) -> None:
        view = db.effective_feedback
        query = view.select().where(view.c.agent_id == self.agent)
        with self.database.read() as connection:
            rows = connection.execute(query).mappings().all()
        assert {row["feedback_id"] for row in rows} == set(self.effective(len(self.history)))

    @invariant()
    def history_keeps_everything_in_order(self) -> None:
        with self.database.read() as connection:
            f = db.feedback
            query = f.select().where(f.c.agent_id == self.agent).order_by(f.c.seq)
            rows = connection.execute(query).mappings().all()
        assert {r["feedback_id"] for r in rows if r["erased_at"]} == self.blank
        kept = [(r["feedback_id"], r["kind"], r["rater_id"]) for r in rows]
        assert kept == [(i, v.kind.value, v.rater_id) for v, i in self.history]

    @invariant()
    def what_was_frozen_stays_as_it_was(self) -> None:
        prints: dict[str, set[str]] = {}
        for watermark, mark, votes in self.taken:
            assert snapshot.fingerprint(self.database, self.agent, watermark) == mark
            prints.setdefault(mark, set()).add(repr(sorted(votes)))
        assert all(len(votes) == 1 for votes in prints.values())  # equal prints, equal votes
        assert len(prints) == len({repr(sorted(votes)) for *_, votes in self.taken})


def played(folder: Path, runs: int, steps: int) -> None:
    """Play so many runs of so many steps."""
    database = Database(f"sqlite:///{folder}/feedback.db")
    play(lambda: Votes(database, folder), runs, steps)
    database.close()


def test_votes_count_and_stay_whatever_the_order(tmp_path: Path) -> None:
    played(tmp_path, runs=15, steps=20)


@pytest.mark.slow
def test_votes_count_and_stay_in_a_thousand_runs(tmp_path: Path) -> None:
    played(tmp_path, runs=1000, steps=30)
