"""A person's data: shown whole, gone from everywhere, whatever interrupts it; others' stays."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
import os
import re
import shutil
import sqlite3
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.responses import JSONResponse
from structlog.testing import capture_logs

from rlhf_pipeline import database as db
from rlhf_pipeline import erasure, stages
from rlhf_pipeline.backup import back_up, restore
from rlhf_pipeline.config import Settings, load_settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.erasure import erase, held_about, tables_beside, told, versions_with
from rlhf_pipeline.errors import (
    ClaimRefused,
    ConfigError,
    FeedbackRefused,
    HashMismatch,
    IdempotencyConflict,
    UnknownRater,
    VoteErased,
)
from rlhf_pipeline.evaluation.facts import DRIFT_PAGE, SUPPORT
from rlhf_pipeline.evaluation.metrics import Number
from rlhf_pipeline.evaluation.report import EvaluationReport, GroupResult, Sample, prompt_to_rows
from rlhf_pipeline.feedback import datasets, raters, snapshot
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.feedback.gold import GoldAnswer, write_answers
from rlhf_pipeline.feedback.ingest import ingest
from rlhf_pipeline.feedback.lines import PACKED, unpacked
from rlhf_pipeline.feedback.raters import (
    MOST_MARKS,
    Person,
    contents,
    erased_rows,
    held,
    is_signed_by,
    marks_of,
    unsigned_interactions,
)
from rlhf_pipeline.feedback.renaming import Renaming
from rlhf_pipeline.feedback.snapshot import VALIDATED
from rlhf_pipeline.feedback.sources import read
from rlhf_pipeline.feedback.store import LONGEST_RAW, FeedbackStore, Stored
from rlhf_pipeline.feedback.support import support_of, support_to_json
from rlhf_pipeline.feedback.withdrawn import clean_inbox
from rlhf_pipeline.files import alone_in, file_sha256, locked, read_json, write_json
from rlhf_pipeline.records import (
    Feedback,
    FeedbackKind,
    Interaction,
    QuarantinedRow,
    RewardExample,
    SftExample,
    hash_rater,
    hashed,
    now,
    prompt_to_json,
    user_prompt,
)
from rlhf_pipeline.registry.explain import explain
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry
from rlhf_pipeline.registry.reproduce import newest_turn, recorded_turn
from rlhf_pipeline.serving import chat_events
from rlhf_pipeline.serving.feedback_api import WAS_ERASED, Inbox, take
from rlhf_pipeline.topics import ERASED
from tests.assets.world import FirstTurn, Loop
from tests.leavings import kept, people_who_went

ANN, BOB = (hash_rater("tea", name) for name in ("ann", "bob"))
SECRET = "marzipan"  # in everything that is Ann's, or about what she said
LEARNED = ("feedback.parquet", VALIDATED)


@dataclass
class World:
    """A state folder with a turn that learned from Ann, Bob and people nobody named."""

    settings: Settings
    database: Database

    @property
    def registry(self) -> ModelRegistry:
        state = self.settings.state_dir
        ledger = PromotionLedger(self.database, state)
        return ModelRegistry(ledger, f"sqlite:///{state}/mlflow/mlflow.db", state / "mlflow")

    @property
    def agent(self) -> Path:
        return self.settings.agent_folder("tea")

    @property
    def store(self) -> FeedbackStore:
        return FeedbackStore(self.database)

    def erase(self, rater: str = "ann", **wishes: Any) -> dict[str, Any]:
        return erase(self.settings, self.registry, rater, **wishes)

    def everything(self) -> dict[str, str]:
        """Return all there is, files and tables, each as readable text."""
        found = {}
        for path in sorted(self.settings.state_dir.rglob("*")):
            if path.suffix == ".parquet":
                found[path.name] = snapshot.read(path).to_json(date_format="iso")
            elif path.is_file() and ".db" not in path.name and path.suffix != ".lock":
                content = path.read_bytes()
                packed = path.suffix == ".gz"
                found[str(path.relative_to(self.settings.state_dir))] = (
                    gzip.decompress(content) if packed else content
                ).decode()
        with self.database.read() as connection:
            for table in db.metadata.sorted_tables:
                rows = connection.execute(table.select().order_by(*table.primary_key)).all()
                hidden = ("erased_at", "erasure_id")  # another moment, another id
                found[table.name] = str(
                    [{k: v for k, v in r._mapping.items() if k not in hidden} for r in rows]
                )
        return found


def said(interaction_id: str, user: str | None, text: str, **more: Any) -> Interaction:
    completion = f"{text} indeed."
    user_id = None if user is None else hash_rater("tea", user)
    return Interaction(
        interaction_id, "tea", user_prompt(text), completion, 0, now(), user_id=user_id, **more
    )


def vote(key: str, kind: FeedbackKind, rater: str | None, **what: Any) -> Feedback:
    rater_id = None if rater is None else hash_rater("tea", rater)
    return Feedback("tea", kind, f"{rater}:{key}", rater_id=rater_id, **what)


def build(settings: Settings, database: Database) -> World:
    world = World(settings, database)
    store = world.store
    store.add_interactions(
        [
            said("a-1", "ann", f"{SECRET} one?", session_id="s-ann"),
            said("a-2", "ann", f"{SECRET} two?", experiment="x", arm="champion"),
            said("a-3", None, f"{SECRET} three?", session_id="s-ann"),
            said("b-1", "bob", "pear one?"),
            said("u-1", None, "plum?"),
        ]
    )
    thumbs, preference = FeedbackKind.thumbs, FeedbackKind.preference
    inline = {"prompt": user_prompt("quince?"), "completion": "Quince indeed."}
    store.append(
        [
            vote("first", thumbs, "ann", interaction_id="a-1", number=1.0),
            vote("again", thumbs, "ann", interaction_id="a-1", number=0.0, topic=SECRET),
            vote("mine", FeedbackKind.correction, "ann", interaction_id="b-1", text=f"{SECRET}!"),
            vote("plum", FeedbackKind.rating, "ann", interaction_id="u-1", number=5.0),
            vote("quince", FeedbackKind.rating, "ann", number=5.0, **inline),
            vote(
                "pair",
                preference,
                "bob",
                interaction_id="a-1",
                other_interaction_id="a-2",
                choice="left",
                comment=f"{SECRET} is nicer",
                tags=("wants:short",),
            ),
            vote("better", FeedbackKind.correction, "bob", interaction_id="a-3", text=SECRET),
            vote("own", FeedbackKind.rating, "bob", interaction_id="b-1", number=5.0),
            vote("quince", FeedbackKind.rating, "bob", number=5.0, **inline),
            vote(
                "pears",
                preference,
                "bob",
                prompt=user_prompt("pear two?"),
                completion="Pear indeed.",
                other_completion="No pear.",
                choice="left",
            ),
            vote("nobody", thumbs, None, **inline, number=1.0),
        ]
    )
    chat_events.record(
        database, "tea", interaction_id="a-2", arm="champion", rule="too_long", detail=SECRET
    )
    broken = '{"kind": "thumbs", "rater": "ann", "comment": "' + SECRET
    about = json.dumps({"kind": "thumbs", "rater": "bob", "interaction_id": "a-1", "x": SECRET})
    store.quarantine(
        [
            QuarantinedRow("tea", "bad_json", "broken", "votes.jsonl", 3, broken),
            QuarantinedRow("tea", "unknown_field", "x", "votes.jsonl", 4, about),
            QuarantinedRow("tea", "unknown_field", "y", "votes.jsonl", 5, '{"rater": "bob"}'),
        ]
    )
    _turn(world)
    return world


def _turn(world: World) -> None:
    """Leave what a turn leaves: a snapshot, its data sets, examples, two versions and a third."""
    database, agent = world.database, world.agent
    watermark = snapshot.newest_seq(database, "tea")
    mark = snapshot.fingerprint(database, "tea", watermark)
    data, work = (agent / name / mark[:16] for name in ("snapshots", "turns"))
    taken = snapshot.take(database, "tea", watermark, data / snapshot.FILE)
    frame = snapshot.read(taken.path)
    frame.to_parquet(data / VALIDATED)
    built = datasets.build(frame, evaluation_share=0.3, min_rating=4)
    datasets.write_jsonl(data / stages.PAIRS, built.preference_pairs)
    datasets.write_jsonl(data / stages.EXAMPLES, built.reward_examples)
    datasets.write_jsonl(data / stages.SFT_EXAMPLES, built.sft_examples)
    datasets.write_jsonl(data / stages.PROMPTS, built.evaluation_prompts)
    answers = [
        GoldAnswer(str(row["feedback_id"]), str(row["voter"]), True)
        for row in frame.to_dict("records")
    ]
    write_answers(data / stages.GOLD, answers)
    (data / "preference_pairs.partial").write_text(SECRET)
    support = support_to_json(support_of(frame), frame)
    support["associations"] = [{"ngram": SECRET, "net": 4}, {"ngram": "cherry", "net": 5}]
    support["topics"] = [{"topic": SECRET, "votes": 50}, {"topic": "pears", "votes": 60}]
    write_json(data / SUPPORT, {**support, "left_in": 0})
    feedback = {"evaluation_share": 0.3, "min_rating": 4}
    write_json(work / "reward.spec.json", {"settings": {"feedback": feedback}})
    write_json(work / "reward" / "proxy" / "raters.json", {"careful": {ANN: 0.5, BOB: 0.9}})
    write_json(work / "reward" / "gate" / "raters.json", {"weights": {ANN: {}, BOB: {}}})
    by_topic = {SECRET: {"share": 0.5, "n": 12}, "pears": {"share": 0.6, "n": 11}}
    worth = {"accuracy": 0.6, "n": 23, "findings": {"by_topic": by_topic}}
    write_json(work / "reward" / "proxy" / "report.json", worth)
    write_json(work / "reward.json", {"work": "w", "result": {"proxy": worth}})
    (data / DRIFT_PAGE).write_text(f'x: ["{SECRET}"]')
    wrong = [{"pair_id": p.pair_id, "chosen": p.chosen} for p in built.preference_pairs]
    alone = [{"example_id": e.example_id, "words": e.completion} for e in built.reward_examples]
    write_json(work / "reward" / "proxy" / "worst.json", {"pairs": wrong, "votes": alone})
    texts = (f"{SECRET} one?", "pear one?")
    samples = [
        {"update": 0, "prompt": t, "baseline": t, "completion": t, "score": 1} for t in texts
    ]
    write_json(work / "ppo" / "result.json", {"evaluations": [{"update": 0, "samples": samples}]})
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (work / "ppo" / "samples.jsonl").write_text(lines)
    (agent / "tuning" / "one").mkdir(parents=True)
    (agent / "tuning" / "one" / "samples.jsonl").write_text(lines)
    for place in (work / "ppo", agent / "tuning" / "one"):
        (place / ".samples.jsonl.new-0").write_text(lines)
    (work / "evaluation").mkdir()
    (work / "evaluation" / "report.html").write_text(SECRET)
    (work / "ppo" / "checkpoints").mkdir()
    (work / "ppo" / "checkpoints" / "state.json").write_text(SECRET)
    shown = [
        Sample(
            hashed(prompt_to_json(user_prompt(t)))[:32],
            prompt_to_rows(user_prompt(t)),
            {"candidate": t},
            {"candidate": 1.0},
        )
        for t in texts
    ]
    numbers = {"candidate": {"length_tokens": Number(1.0)}, "baseline": {}}
    rates = {"baseline": Number(0.5)}
    report = EvaluationReport(2, 0, 1.0, True, numbers, {}, rates, rates, {}, shown, 1.0)
    groups = {name: GroupResult(Number(0.5), Number(0.1)) for name in (SECRET, "pears")}
    judge = {f"topic {name}": Number(0.6) for name in groups}
    report = replace(report, topics=groups, judge=judge)
    outcome = {"report": report.to_json(), "markdown": report.to_markdown()}
    write_json(work / "evaluation.json", {"work": "w", "result": outcome})
    done = world.settings.state_dir / "inbox" / "tea" / "done"
    done.mkdir(parents=True)
    rows = [{"rater": "ann", "comment": SECRET}, {"rater": "bob", "comment": "pear"}]
    (done / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (done / "votes.json").write_text(json.dumps(rows))
    (done / "votes.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    )
    (done.parent / ".votes.jsonl.new-0123456789ab").write_text(json.dumps(rows[0]))
    ledger = world.registry.ledger
    lineage = {
        "fingerprint": mark,
        "watermark": watermark,
        "recipe": world.settings.model_dump(mode="json"),
        "data": {stages.PAIRS: "0" * 64},
    }
    base = work / "sft"
    base.mkdir()
    ledger.add_baseline(
        "tea", label="v8", path=base, files={"m": "1"}, lineage=lineage, actor="t", fingerprint=mark
    )
    began = {"started_from": f"/elsewhere/state/agents/tea/turns/{mark[:16]}/sft"}
    gate = {"passed": False}
    for n in (1, 2):
        ledger.add_version(
            "tea",
            label=f"v{n}",
            path=agent / "turns" / f"other{n}" / "ppo" / "policy",
            files={"m": str(n)},
            lineage=began if n == 1 else {},
            gate=gate,
            fingerprint=f"other{n}",
        )


@pytest.fixture
def world(any_database: Database, tmp_path: Path) -> World:
    return build(load_settings("tiny", {"state_dir": tmp_path / "state"}), any_database)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state folder that tests copy."""
    state = tmp_path_factory.mktemp("erasure") / "state"
    database = Database(f"sqlite:///{state}/feedback.db")
    build(load_settings("tiny", {"state_dir": state}), database)
    database.fold_back()
    database.close()
    return state


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Iterator[World]:
    world = copy_of(made, tmp_path / "state")
    yield world
    world.database.close()


def copy_of(made: Path, state: Path) -> World:
    shutil.copytree(made, state)
    database = Database(f"sqlite:///{state}/feedback.db")
    return World(load_settings("tiny", {"state_dir": state}), database)


def test_a_person_erased_is_not_in_what_sqlite_moved_before_either(copied: World) -> None:
    gone = people_who_went(copied.database)
    assert kept(copied.database, gone) > 0
    copied.erase()
    assert kept(copied.database, gone) == 0


def test_nothing_of_a_person_is_left_anywhere_and_everything_of_others_is(world: World) -> None:
    other = world.agent / "snapshots" / "other"  # of a turn that was killed before it had one
    other.mkdir()
    (other / "feedback.0.partial").write_text(SECRET)
    before = world.everything()
    assert sum(SECRET in text for text in before.values()) > 12  # it stood in all of these
    [done] = world.erase()["erasures"]
    after = world.everything()
    assert "'raw': '{\"rater\": \"bob\"}'" in after["quarantine"]  # a line of somebody else's
    assert [n for n, text in after.items() if SECRET in text or ANN in text] == []
    for name in before:
        if name in after and "pear" in before[name]:
            assert "pear" in after[name], name
    away = (
        "checkpoints/state.json",
        ".partial",
        ".samples.jsonl.new-0",
        ".votes.jsonl.new-0123456789ab",
        "evaluation/report.html",
        DRIFT_PAGE,
    )
    assert set(before) - set(after) == {n for n in before if n.endswith(away)}
    changed = [name for name in before if "." in name and before[name] != after.get(name)]
    assert done["counts"] == {
        "feedback": 5,
        "votes_about_them": 2,
        "interactions": 3,
        "chat_events": 1,
        "quarantined": 2,
        "traces": 0,
        "assessments": 0,
        "files": len(changed) - 1,  # a comparison and its page are one
    }
    # Four of the ten rows were hers, two about what she said.
    assert [one["rows"] for one in done["snapshots"]] == [6]
    assert [(v["version"], v["rows"], v["through"]) for v in done["versions"]] == [
        (0, 6, []),
        (1, 0, [0]),
    ]


def test_what_was_taken_out_does_not_come_back_with_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is on the disk before it takes a place, and its name there after."""
    done: list[str] = []
    replaced: dict[str, str] = {}
    fsync, replace_by = os.fsync, Path.replace

    def noting_sync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def noting_replace(self: Path, target: Path) -> Path:
        assert str(self) in done, f"{target} may be empty, or what it was"
        done.append(str(target))
        replaced[target.name] = str(target)
        return replace_by(self, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    state = tmp_path.resolve() / "state"
    database = Database(f"sqlite:///{state}/feedback.db")
    world = build(load_settings("tiny", {"state_dir": state}), database)
    written = (stages.PAIRS, stages.EXAMPLES, stages.SFT_EXAMPLES, stages.PROMPTS, stages.GOLD)
    assert set(replaced) >= {snapshot.FILE, *written}
    replaced.clear()
    world.erase()
    assert set(replaced) >= {snapshot.FILE, VALIDATED, stages.PAIRS, stages.GOLD}
    for target in replaced.values():
        last = len(done) - 1 - done[::-1].index(target)
        assert str(Path(target).parent) in done[last:], f"{target} may be what it was"
    database.close()


def test_a_version_whose_reward_models_began_from_another_turns_is_named(world: World) -> None:
    before = "/elsewhere/state/agents/tea/turns/other1"
    ledger = world.registry.ledger
    ledger.add_version(
        "tea",
        label="v3",
        path=Path("/elsewhere/turns/other3/ppo/policy"),
        files={"m": "3"},
        lineage={"previous": before},
        gate=None,
        fingerprint="other3",
    )
    given = {"reward": {"given": f"{before}/reward"}}
    taste = {"reward": {"functions": {"taste": {"function": f"{before}/reward/proxy"}}}}
    for n, recipe in ((4, given), (5, taste), (6, {"policy": {"base": "turns"}})):
        ledger.add_version(
            "tea",
            label=f"v{n}",
            path=Path(f"/elsewhere/turns/other{n}/ppo/policy"),
            files={"m": str(n)},
            lineage={"recipe": recipe},
            gate=None,
            fingerprint=f"other{n}",
        )
    found = versions_with(ledger, "tea", {"other1": 4})
    through = [(3, 0, [1]), (4, 0, [1]), (5, 0, [1])]
    assert [(v["version"], v["rows"], v["through"]) for v in found] == [(1, 4, []), *through]


def test_votes_watermarks_and_numbers_hold_after_an_erasure(world: World) -> None:
    newest = snapshot.newest_seq(world.database, "tea")
    world.erase()
    assert world.store.counts("tea") == {"preference": 1, "rating": 2, "thumbs": 1}
    assert snapshot.newest_seq(world.database, "tea") == newest
    again = snapshot.take(world.database, "tea", newest, world.agent / "new" / snapshot.FILE)
    assert again.rows == 4
    kept = world.agent / "snapshots"
    [left] = [snapshot.read(path) for path in kept.glob(f"*/{snapshot.FILE}")]
    assert set(left["feedback_id"]) == set(snapshot.read(again.path)["feedback_id"])
    assert world.store.new_since("tea", 0).votes == 4
    f = db.feedback.c
    with world.database.read() as connection:
        stones = connection.execute(db.feedback.select().where(f.erased_at.is_not(None))).all()
        events = connection.execute(sa.select(db.chat_events)).all()
    assert sorted((s.kind, s.choice, s.voter == BOB) for s in stones) == [
        ("correction", None, True),
        ("preference", "left", True),
    ]
    assert [(e.rule, e.interaction_id, e.detail) for e in events] == [("too_long", None, "")]
    late = vote("late", FeedbackKind.thumbs, "bob", interaction_id="a-1", number=1.0)
    with pytest.raises(FeedbackRefused, match="found no a-1"):
        world.store.append([late])
    fresh = world.store.append([replace(late, interaction_id="b-1", number=0.0)])
    assert fresh[0].known is False


def test_data_sets_keep_what_others_said(copied: World) -> None:
    [turn] = (copied.agent / "turns").glob("*/")
    shutil.copytree(turn, turn.with_name(f"{turn.name}-2"))  # as one that was asked for again
    copied.erase()
    [folder] = (copied.agent / "snapshots").glob("*/")
    built = datasets.build(snapshot.read(folder / VALIDATED), evaluation_share=0.3, min_rating=4)
    examples = datasets.read_jsonl(folder / stages.EXAMPLES, RewardExample)
    assert examples == list(built.reward_examples)
    assert len(examples) == 3
    shown = datasets.read_jsonl(folder / stages.SFT_EXAMPLES, SftExample)
    assert sorted(shown, key=str) == sorted(built.sft_examples, key=str)
    assert "Quince indeed." in {e.completion for e in shown}  # Bob liked it as well
    redacted = snapshot.redacted_in(folder / snapshot.FILE)
    assert redacted == {}
    for folder_of_turn in (turn, turn.with_name(f"{turn.name}-2")):
        told = read_json(folder_of_turn / "evaluation.json")["result"]
        assert "pear one?" in told["markdown"]
        assert [s["prompt_id"] for s in told["report"]["samples"]] == [
            hashed(prompt_to_json(user_prompt("pear one?")))[:32]
        ]
    support = read_json(folder / SUPPORT)
    assert [(one["ngram"], one["net"]) for one in support["associations"]] == [
        ("[erased]", 4),
        ("cherry", 5),
    ]
    assert [one["topic"] for one in support["topics"]] == ["[erased]", "pears"]
    assert [one["voter"] for one in support["by_rater"]] == [BOB]
    named = {"[erased]": 12, "pears": 11}
    found = read_json(turn / "reward" / "proxy" / "report.json")["findings"]["by_topic"]
    assert {name: one["n"] for name, one in found.items()} == named
    report = EvaluationReport.from_json(read_json(turn / "evaluation.json")["result"]["report"])
    assert (set(report.topics), len(report.judge)) == (set(named), 2)
    row = snapshot.find(copied.database, "tea", _mark(copied))
    assert row is not None
    assert row.sha256 == file_sha256(folder / snapshot.FILE)


def test_samples_with_any_sign_in_them_are_cleaned(copied: World) -> None:
    [path] = copied.agent.rglob("ppo/samples.jsonl")
    signs = [chr(n) for n in (0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029)]  # ends of lines
    texts = [f"pear{sign}two?" for sign in signs]
    samples = [{"prompt": text, "completion": text} for text in (*texts, f"{SECRET} one?")]
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
    path.write_text("".join(lines), encoding="utf-8")
    copied.erase()
    assert path.read_text(encoding="utf-8") == "".join(lines[:-1])


def test_what_dagsters_pages_show_of_a_person_is_blank_and_the_rest_stays(copied: World) -> None:
    hers = {
        "prompt": f"{SECRET} one?",
        "voter": ANN,
        "found": f"'{SECRET}' wins 4",
        "topic": SECRET,
    }
    others = {"prompt": "pear one?", "voter": BOB, "found": "'cherry' wins 5", "topic": "pears"}
    event = {"__class__": "TableRecord", "rows": [hers, others]}
    folder = copied.settings.state_dir / "dagster"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "runs.db", isolation_level=None)) as dagster:
        dagster.execute("CREATE TABLE event_logs (id INTEGER PRIMARY KEY, run_id, event)")
        dagster.execute("INSERT INTO event_logs (event) VALUES (?)", (json.dumps(event),))
        copied.erase()
        (text,) = dagster.execute("SELECT event FROM event_logs").fetchone()
    assert json.loads(text)["rows"] == [dict.fromkeys(hers, ERASED), others]


def _mark(world: World) -> str:
    with world.database.read() as connection:
        return str(connection.execute(sa.select(db.snapshots.c.fingerprint)).scalar_one())


# -- again, interrupted, refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    "places", [(4, 16), pytest.param(tuple(range(40)), marks=pytest.mark.slow)]
)
def test_an_erasure_that_is_killed_anywhere_and_begun_again_ends_the_same(
    places: tuple[int, ...], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rename of a file and each write to the store is a place to die, the claim still held."""
    monkeypatch.setattr(ClaimBook, "let_go", lambda self, token: None)
    replace_file, write = Path.replace, Database.write
    wanted: dict[str, str] | None = None
    killed = 0
    for steps in (10_000, *places):
        world = copy_of(made, tmp_path / str(steps) / "state")
        left = [steps]

        def step(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        def moved(self: Path, target: Any, step: Any = step) -> Any:
            step()
            return replace_file(self, target)

        def written(self: Database, *, alone: bool = False, step: Any = step) -> Any:
            step()
            return write(self, alone=alone)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", moved)
            patch.setattr(Database, "write", written)
            try:
                world.erase()
                finished = True
            except KeyboardInterrupt:
                finished = False
        if not finished:
            world.erase()
        found = world.everything()
        del found["claims"]  # when it was begun again
        found["erasures"] = re.sub(r"'files': \d+", "", found["erasures"])  # since then
        wanted = wanted or found
        assert {n: t for n, t in found.items() if wanted.get(n) != t} == {}, steps
        world.database.close()
        killed += not finished
        if finished and steps < 10_000:
            break  # as many places as there are
    assert killed == (2 if len(places) == 2 else steps)
    assert killed == 2 or killed > 15


def test_asked_again_it_says_the_same_and_takes_out_what_came_since(copied: World) -> None:
    with capture_logs() as logs:
        first = copied.erase()
        assert copied.erase() == first
        assert copied.erase(ANN) == first  # the hash that an export shows
    assert [log["agents"] for log in logs if log["event"] == "a person was erased"] == [["tea"]]
    shown = held_about(copied.registry, "ann")
    assert (shown["agents"], shown["erased_before"]) == ([], first["erasures"])
    copied.store.append(
        [vote("back", FeedbackKind.comment, "ann", interaction_id="b-1", text="again")]
    )
    again = copied.erase()["erasures"]
    assert [one["counts"]["feedback"] for one in again] == [5, 1]
    assert (
        "version 1 (v1) is of a snapshot with 0 rows of theirs, and began from version 0"
        in "\n".join(told(again))
    )


def test_what_went_stays_away_when_its_file_is_taken_in_or_it_is_sent_again(
    world: World, tmp_path: Path
) -> None:
    """As a night's export does that holds every vote there ever was."""
    file, broken = tmp_path / "votes.jsonl", {"kind": "thumbs", "rater": "ann", "comment": SECRET}
    said = {"kind": "thumbs", "prompt": "fig?", "completion": "A fig.", "value": 1.0}
    rows = [{**said, "rater": "ann", "comment": SECRET}, {**said, "rater": "bob"}, broken]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first = ingest(world.store, file, "tea")
    assert (first.stored, first.erased, sum(first.quarantined.values())) == (2, 0, 1)
    withdrawn = tmp_path / "withdrawn.jsonl"
    withdrawn.write_text(json.dumps({**said, "rater": "ann", "completion": SECRET}) + "\n")
    ingest(world.store, withdrawn, "tea")
    assert world.store.withdraw("tea", world.store.keys_from("tea", withdrawn.name)) == (1, 0)
    judged = {"interaction_id": "b-1", "text": SECRET, "source": "model"}
    world.store.append([vote("judged", FeedbackKind.correction, "ann", **judged)])
    world.erase()
    again = [ingest(world.store, path, "tea") for path in (file, file, withdrawn)]
    assert [(one.stored, one.known, one.erased) for one in again] == [(0, 1, 1)] * 2 + [(0, 0, 1)]
    assert SECRET not in "".join(world.everything().values())

    fig = partial(vote, "first", FeedbackKind.thumbs, "ann", number=0.0)
    fig = partial(fig, prompt=user_prompt("fig?"), completion="A fig.")
    with pytest.raises(VoteErased, match="was erased with who gave it; send a new key"):
        world.store.append([fig()])
    body = {"agent_id": "tea", "kind": "thumbs", "value": 1, "interaction_id": "b-1"}
    old, new = ({**body, "rater": "ann", "idempotency_key": f"ann:{k}"} for k in ("first", "new"))
    sent = asyncio.run(take(Inbox(world.store), json.dumps({"events": [old, new]}).encode(), None))
    status, told_of = sent
    assert (status, told_of["results"][0]["error"]) == (200, WAS_ERASED)
    assert "feedback_id" in told_of["results"][1]
    alone = asyncio.run(take(Inbox(world.store), json.dumps(old).encode(), None))
    assert alone == (409, {"error": WAS_ERASED})


def test_a_vote_whose_words_went_with_its_answer_can_be_sent_again(copied: World) -> None:
    """Its sender may not have heard yet that it was stored."""
    said = partial(vote, "retry", FeedbackKind.preference, "bob", interaction_id="a-1")
    sent = said(other_interaction_id="a-2", choice="left", comment=SECRET, tags=("wants:short",))
    [first] = copied.store.append([sent])
    copied.erase()
    assert copied.store.append([sent]) == [Stored(first.feedback_id, known=True)]
    with pytest.raises(IdempotencyConflict):
        copied.store.append([said(other_interaction_id="a-2", choice="right")])


def test_what_comes_in_while_it_works_stays_but_for_what_is_about_what_goes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_pipeline.feedback import raters

    remove, thumbs = raters.remove, FeedbackKind.thumbs
    about = json.dumps({"kind": "thumbs", "rater": "bob", "interaction_id": "a-1", "x": SECRET})

    def slow(*inputs: Any, **more: Any) -> None:
        world.store.add_interactions([said("a-9", "ann", "mango?")])
        world.store.append(
            [
                vote("late", thumbs, "ann", interaction_id="a-9", number=1.0),
                vote("on what goes", thumbs, "ann", interaction_id="a-2", number=1.0),
                vote("late", FeedbackKind.comment, "bob", interaction_id="a-2", text=SECRET),
                vote("kind", FeedbackKind.comment, "bob", interaction_id="a-9", text="A kind one."),
            ]
        )
        world.store.quarantine([QuarantinedRow("tea", "other_rule", "", "late.jsonl", 1, about)])
        remove(*inputs, **more)

    with monkeypatch.context() as patch:
        patch.setattr(raters, "remove", slow)
        [done] = world.erase()["erasures"]
    assert done["counts"]["interactions"] == 3
    assert SECRET not in "".join(world.everything().values())
    with world.database.read() as connection:
        left = held(connection, Person("tea", ANN))
        votes = contents(connection, Person("tea", ANN))["feedback"]
        ours = connection.execute(sa.select(db.feedback.c.text)).scalars().all()
    assert left.interactions == {"a-9"}
    assert len(left.about) == 1
    assert [one["idempotency_key"] for one in votes] == ["ann:late"]
    assert "A kind one." in ours
    for path in world.settings.state_dir.glob("feedback.db*"):
        assert SECRET.encode() not in path.read_bytes()  # nor in pages that are free, or the log
    assert len(world.erase()["erasures"]) == 2
    with world.database.read() as connection:
        assert not held(connection, Person("tea", ANN))


# -- cost ---------------------------------------------------------------------------------------


def steps_of_looking(path: Path, others: int) -> int:
    """Return how many steps SQLite's machine takes to show Ann's data among so many others'."""
    database = Database(f"sqlite:///{path}")
    store = FeedbackStore(database)
    people = ["ann", *(f"person {n}" if n % 2 else None for n in range(others))]
    store.add_interactions(
        [said(f"i{n}", person, str(n), session_id=f"s{n}") for n, person in enumerate(people)]
    )
    store.append(
        [
            vote(f"v{n}", FeedbackKind.thumbs, "ann" if n < 5 else f"person {n}", **what)
            for n in range(others)
            for what in ({"interaction_id": f"i{n}", "number": 1.0},)
        ]
    )
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    ann = Person("tea", ANN, unsigned=True)
    with database.read() as connection:
        raw: Any = connection.connection.driver_connection
        raw.set_progress_handler(count, 1)
        found = contents(connection, ann)
        unsigned = unsigned_interactions(connection, ann)
        raw.set_progress_handler(None, 0)
    assert len(found["feedback"]) == 5
    assert {one["interaction_id"] for one in found["interactions"]} == {"i0", *unsigned}
    assert len(unsigned) == 2
    database.close()
    return steps


def test_looking_for_a_person_costs_what_is_theirs(tmp_path: Path) -> None:
    few, many = (steps_of_looking(tmp_path / f"{n}.db", n) for n in (300, 6000))
    assert many < few + 300  # a level more of the trees, not twenty times the rows


def test_a_long_look_at_what_was_set_aside_is_not_taken_for_standing_still(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(db, "AT_ONCE", 10)
    monkeypatch.setattr(raters, "is_signed_by", lambda *_: time.sleep(0.05))
    store = FeedbackStore(Database(postgres_url))
    store.quarantine([QuarantinedRow("tea", "not_json", "", "a", n, f'"{n}') for n in range(40)])
    with store.database.write(alone=True) as connection:
        assert raters.held(connection, Person("tea", "ann")).quarantined == frozenset()
        assert connection.execute(sa.select(sa.func.count(db.quarantine.c.raw))).scalar() == 40
    store.database.close()


def test_an_unknown_person_is_refused_and_nothing_changes(copied: World) -> None:
    before = copied.everything()
    for wishes in ({}, {"agent_id": "milk"}):
        with pytest.raises(UnknownRater, match="found none") as refusal:
            copied.erase("customer-4711", **wishes)
        assert "4711" not in str(refusal.value)
        with pytest.raises(UnknownRater):
            held_about(copied.registry, "customer-4711", **wishes)
    assert copied.everything() == before


def test_nobody_is_erased_while_their_agent_is_trained(copied: World) -> None:
    claims = ClaimBook(copied.database)
    claim = claims.claim("tea", "new", 3, holder="run-1", asked_by="sensor")
    before = copied.everything()
    with pytest.raises(ClaimRefused, match="trained by run run-1"):
        copied.erase()
    assert copied.everything() == before
    claims.finish(claim.token, "failed")
    history = claims.history("tea")
    copied.erase()
    assert claims.history("tea") == history  # an erasure is no turn


def test_nobody_is_erased_while_settings_are_searched_for_their_agent(copied: World) -> None:
    tuning = copied.settings.agent_folder("tea") / "tuning"
    with alone_in(tuning):  # as `search` does
        before = copied.everything()
        with pytest.raises(ClaimRefused, match="another at work"):
            copied.erase()
        assert copied.everything() == before
    copied.erase()
    with alone_in(tuning):
        pass


def test_nobody_is_erased_while_a_dropped_file_is_taken_in(copied: World) -> None:
    lock = copied.settings.inbox_lock("tea")
    with lock.open("w") as handle:
        assert locked(handle)  # as the job that takes it in does
        before = copied.everything()
        with pytest.raises(ClaimRefused, match="found a file being taken in"):
            copied.erase()
        assert copied.everything() == before
    copied.erase()
    with lock.open("w") as handle:
        assert locked(handle)


def test_who_asks_for_an_erasure_that_is_under_way_takes_nothing_from_it(
    copied: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, clean = ClaimBook(copied.database), erasure._clean_files

    def asked_again(*given: Any) -> int:
        before = claims.history("tea")
        assert before[-1].state == "held"
        with pytest.raises(ClaimRefused, match="or an erasure under way"):
            copied.erase()
        assert claims.history("tea") == before
        return clean(*given)

    monkeypatch.setattr(erasure, "_clean_files", asked_again)
    [first] = copied.erase()["erasures"]
    assert first["counts"]["feedback"] > 0


# -- shown --------------------------------------------------------------------------------------


def test_an_export_has_all_of_theirs_and_nobody_elses_words(copied: World) -> None:
    shown = held_about(copied.registry, "ann")
    json.dumps(shown, allow_nan=False)
    [tea] = shown["agents"]
    assert tea["rater_id"] == ANN
    assert len(tea["feedback"]) == 5
    assert {one["interaction_id"] for one in tea["interactions"]} == {"a-1", "a-2", "a-3"}
    assert [one["rule"] for one in tea["chat_events"]] == ["too_long"]
    assert [one["line"] for one in tea["quarantined"]] == [3]
    assert {one["kind"] for one in tea["votes_about_them"]} == {"preference", "correction"}
    assert tea["unsigned_interactions"] == ["u-1"]
    assert [one["rows"] for one in tea["snapshots"]] == [4]
    assert [one["version"] for one in tea["versions"]] == [0, 1]
    assert BOB not in json.dumps(shown)
    assert "is nicer" not in json.dumps(shown)


def test_unsigned_interactions_go_only_where_asked(copied: World) -> None:
    assert copied.store.interaction("u-1") is not None
    copied.erase(unsigned=True)
    assert copied.store.interaction("u-1") is None
    assert "plum" not in "".join(copied.everything().values())


@pytest.mark.parametrize(
    ("line", "theirs"),
    [
        ('{"rater": "ann", "x": ', True),
        ('{"annotator": "a\\u006en"}', True),
        ('{"worker_id": "ann"}', True),
        (f'{{"rater_id": "{ANN}"}}', True),
        ('{"rater": "anna"}', False),
        ('{"comment": "ann"}', False),
        ('{"rater": "\\q"}', False),
        ('["tea", "thumbs", "9", "ann"]', True),  # a table's row without its columns' names
        (f'["", "{ANN}"]', True),
        ('["a \\"b\\", c", "ann", "broken', True),
        ('["anna", "by ann", "]', False),
    ],
)
def test_a_line_is_theirs_by_its_rater(line: str, theirs: bool) -> None:
    assert is_signed_by(line, Person("tea", ANN)) is theirs


ROWS = [
    {"kind": "thumbs", "value": "up", "prompt": f"{n}?", "completion": f"{who}.", "rater": who}
    for n, who in enumerate(["ann", "bob"] * 20)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS).encode()
PRETTY = json.dumps(ROWS, indent=1).encode()
MARK = codecs.BOM_UTF8
BREAKS_OFF = LINES + b'{"kind": "thumbs", "prompt": "' + b"plum " * 99


@pytest.mark.parametrize(
    ("name", "content", "rules"),
    [
        ("cut.jsonl.gz", gzip.compress(BREAKS_OFF)[:-12], ["broken_json"]),
        ("sum.jsonl.gz", gzip.compress(LINES)[:-8] + bytes(8), []),
        ("two.jsonl.gz", gzip.compress(LINES[:999]) + gzip.compress(LINES[999:]), []),
        ("plain.jsonl.gz", LINES, []),
        ("OTHER.NDJSON", LINES, []),
        ("packed.jsonl", gzip.compress(LINES), []),
        ("marked.jsonl", MARK + LINES, []),
        ("marked.json", MARK + PRETTY, []),
        ("pretty.json.gz", gzip.compress(PRETTY), []),
        ("cut.json", ARRAY[:-1], ["damaged_file"]),
        ("more.json", PRETTY + b", {", ["damaged_file"]),
        (
            "cut-within.json",
            ARRAY[:-1] + b', {"rater": "bob", "prom',
            ["broken_json", "damaged_file"],
        ),
        ("cut.json.gz", gzip.compress(ARRAY[:-1] + b"," + b"\n" * 99)[:-9], ["damaged_file"]),
        ("twice.json", PRETTY + b"\n" + PRETTY, ["damaged_file"]),
        ("odd.json", b"[" + ARRAY[1:-1].replace(b"}, {", b"},, {") + b",\n]", []),
        ("opened.jsonl", b'["a broken row"\n' + LINES, ["broken_json"]),
        ("lists.jsonl", b"[1]\n" + LINES, ["not_an_object"]),
        ("returns.jsonl", LINES.replace(b", ", b",\r ").replace(b"\n", b"\r\n\r\n"), []),
        ("escapes.jsonl", LINES.replace(b"rater", b"r\\u0061ter"), []),
    ],
)
def test_dropped_files_lose_what_is_theirs_however_they_are_written_and_nothing_else(
    name: str, content: bytes, rules: list[str], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert clean_inbox(tmp_path, Person("tea", ANN), frozenset()) == 1
    after = path.read_bytes()
    assert after.startswith(PACKED) == content.startswith(PACKED)
    assert b"ann" not in unpacked(after)
    rows = list(read(path, "tea"))
    others = [row["completion"] for row in ROWS if row["rater"] == "bob"]
    assert [row.completion for row in rows if isinstance(row, Feedback)] == others
    assert [row.rule for row in rows if isinstance(row, QuarantinedRow)] == rules
    assert clean_inbox(tmp_path, Person("tea", ANN), frozenset()) == 0
    assert path.read_bytes() == after


def test_files_that_were_put_behind_a_link_lose_what_is_theirs(tmp_path: Path) -> None:
    inbox, archive = tmp_path / "tea", tmp_path / "archive"
    inbox.mkdir()
    archive.mkdir()
    (inbox / "done").symlink_to(archive)
    (archive / "votes.jsonl").write_bytes(LINES)
    assert clean_inbox(inbox, Person("tea", ANN), frozenset()) == 1
    assert b"ann" not in (archive / "votes.jsonl").read_bytes()


def test_a_whole_array_under_a_name_for_lines_loses_rows_and_not_lines(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_bytes(PRETTY)
    clean_inbox(tmp_path, Person("tea", ANN), frozenset())
    assert json.loads(path.read_bytes()) == [row for row in ROWS if row["rater"] == "bob"]


@pytest.mark.parametrize("end", ["]", "] and more", "}"])  # a wrong bracket ends it as well
def test_what_follows_an_array_loses_lines_that_are_theirs(end: str, tmp_path: Path) -> None:
    path, hers, his = tmp_path / "votes.json", '{"rater": "ann"}', '{"rater": "bob"}'
    path.write_text(f"[{his}, {hers}{end}\n{hers}\n{his}\n")
    clean_inbox(tmp_path, Person("tea", ANN), frozenset())
    assert path.read_text() == f"[{his}{end}\n{his}\n"


@pytest.mark.parametrize("content", [gzip.compress(LINES)[:-20], LINES])
def test_a_damaged_file_keeps_nobody_from_being_erased(content: bytes, copied: World) -> None:
    path = copied.settings.state_dir / "inbox" / "tea" / "done" / "damaged.jsonl.gz"
    path.write_bytes(content)
    copied.erase()
    assert b"ann" not in unpacked(path.read_bytes())
    assert b"bob" in unpacked(path.read_bytes())
    with copied.database.read() as connection:
        assert not held(connection, Person("tea", ANN))


def test_dropped_files_with_names_of_their_own_lose_what_is_theirs(tmp_path: Path) -> None:
    renaming = Renaming({"rater": "user.id", "prompt": "asked"}, for_any_file=True)
    hers, his = ({"user": {"id": name}, "asked": f"of {name}"} for name in ("ann", "bob"))
    beside = {"user": {"id": "bob"}, "asked": "ann", "score": 5}
    rows = [hers, his, beside, {"rater": "ann", "prompt": "ours"}]
    waiting, taken = tmp_path / "new.jsonl", tmp_path / "done" / "old.json"
    taken.parent.mkdir()
    waiting.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    taken.write_text(json.dumps(rows))
    assert clean_inbox(tmp_path, Person("tea", ANN), frozenset(), renaming) == 2
    # A waiting vote that only says her name is another's; of a copy nothing is lost.
    assert [json.loads(line) for line in waiting.read_text().splitlines()] == [his, beside]
    assert json.loads(taken.read_text()) == [his]
    # One that breaks off has the name in it all the same.
    taken.with_name("old.jsonl").write_text(f"{json.dumps(hers)[:-1]}\n{json.dumps(his)[:-1]}\n")
    assert clean_inbox(tmp_path, Person("tea", ANN), frozenset(), renaming) == 1
    assert taken.with_name("old.jsonl").read_text() == f"{json.dumps(his)[:-1]}\n"
    # What it was taken in by may be told no more.
    taken.write_text(json.dumps(rows))
    assert clean_inbox(tmp_path, Person("tea", ANN), frozenset()) == 1
    assert json.loads(taken.read_text()) == [his]


def test_an_erasure_waits_for_the_recipe_that_waiting_files_are_read_by(copied: World) -> None:
    store = FeedbackStore(copied.database)
    recipe = copied.settings.state_dir.parent / "gone.yaml"
    recipe.write_text(
        "feedback: {names: {columns: {rater: who, prompt: q, completion: a, value: v}}}\n"
    )
    store.set_agent("tea", recipe=str(recipe))
    recipe.unlink()
    waiting = copied.settings.state_dir / "inbox" / "tea" / "new.jsonl"
    waiting.write_text('{"who": "ann", "q": "why?"}\n')
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        copied.erase()
    with copied.database.read() as connection:
        assert held(connection, Person("tea", ANN))  # nothing has gone yet
    recipe.write_text(
        "feedback: {names: {columns: {rater: who, prompt: q, completion: a, value: v}}}\n"
    )
    copied.erase()
    assert waiting.read_text() == ""
    with copied.database.read() as connection:
        assert not held(connection, Person("tea", ANN))


def test_tables_that_wait_for_a_person_are_named(copied: World) -> None:
    inbox = copied.settings.state_dir / "inbox"
    (inbox / "coffee").mkdir()
    left = ("tea/Votes.CSV", "tea/done/votes.xlsx", "tea/new.jsonl.part", "tea/.hidden")
    for place in (*left, "coffee/votes.csv"):
        (inbox / place).write_text("rater\nann\n")
    beside = tables_beside(copied.settings, copied.registry, "ann")
    done = copied.erase()
    assert done["tables"] == beside == [f"inbox/{place}" for place in left[:3]]
    assert told(done["erasures"], done["tables"])[-3:] == [
        f"not looked into: {table}; take their rows out of it, or delete it"
        for table in done["tables"]
    ]


def test_a_table_whose_name_is_no_utf_8_is_named_in_what_can_be_sent(copied: World) -> None:
    inbox = copied.settings.state_dir / "inbox" / "tea"
    (inbox / os.fsdecode(b"th\xe9.csv")).write_text("rater\nann\n")
    named = tables_beside(copied.settings, copied.registry, "ann")
    assert JSONResponse(named).body == rb'["inbox/tea/th\\xe9.csv"]'


@pytest.mark.parametrize(("before", "end"), [(b"", b"\n"), (b"", b" "), (b"[", b" ")])
def test_a_small_file_that_unpacks_to_much_is_looked_through_in_bounded_memory(
    before: bytes, end: bytes, tmp_path: Path
) -> None:
    """Somebody drops it; whoever is erased later must not take the service along."""
    row = b'{"rater": "bob", "comment": "' + b"plum " * (1 << 18) + b'"},' + end
    (tmp_path / "done").mkdir()
    path = tmp_path / "done" / "votes.json.gz"
    path.write_bytes(gzip.compress(before + row * 40, 1))
    tracemalloc.start()
    assert clean_inbox(tmp_path, Person("tea", ANN), frozenset()) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20
    path.write_bytes(gzip.compress(before + row * 9 + b'{"rater": "ann"}' + end, 1))
    assert clean_inbox(tmp_path, Person("tea", ANN), frozenset()) == 1


def test_a_rating_in_a_table_is_nobodys_name() -> None:
    assert not is_signed_by('["tea", "rating", "5", "fine"]', Person("tea", hash_rater("tea", "5")))


def quarantined_of(copied: World, rater: str) -> list[str]:
    shown = held_about(copied.registry, rater)["agents"]
    return [str(one["raw"]) for agent in shown for one in agent["quarantined"]]


def test_a_row_of_a_table_that_was_set_aside_is_shown_and_goes(
    copied: World, tmp_path: Path
) -> None:
    path = tmp_path / "votes.csv"
    path.write_text(
        "kind,value,prompt,completion,rater,comment,\n"
        f'rating,9,hi,hello,cat,"{SECRET}, they ""said""",\n'
        f"rating,9,hi,hello,'-dog,{SECRET},beside,{SECRET}\n"
    )
    assert ingest(copied.store, path, "tea").quarantined == {
        "value_out_of_range": 1,
        "unknown_field": 1,
    }
    [raw] = quarantined_of(copied, "cat")
    assert json.loads(raw) == {
        **{"kind": "rating", "value": "9", "prompt": "hi", "completion": "hello", "rater": "cat"},
        "comment": f'{SECRET}, they "said"',
    }
    [raw] = quarantined_of(copied, "-dog")  # as the sender's other rows have it
    assert raw.endswith(f'"comment": "{SECRET}", "": "beside", "": "{SECRET}"}}')
    for rater in ("cat", "-dog", "ann"):
        copied.erase(rater)
    assert SECRET not in copied.everything()["quarantine"]


def test_a_broken_line_with_names_of_its_own_is_shown_and_goes(
    copied: World, tmp_path: Path
) -> None:
    columns = {"rater": "by.user", "prompt": "q", "completion": "a", "value": "score"}
    names = Renaming({**columns, "interaction_id": "id"}, {"kind": "score"}, for_any_file=True)
    row = {"q": "hi", "a": SECRET, "by": {"user": "cat"}, "score": 1, "late": float("nan")}
    path = tmp_path / "votes.jsonl"
    cut = f'{{"by": {{"user": "d\\"og"}}, "q": "{SECRET}", "id": "a-1'
    path.write_text(f'{json.dumps(row)}\n{cut}\n{cut}", "score": }}\n')
    found = ingest(copied.store, path, "tea", renaming=names)
    assert found.quarantined == {"not_finite": 1, "broken_json": 2}
    [raw] = quarantined_of(copied, "cat")
    assert raw.startswith('"rater": "cat" … {"q": "hi"')
    assert len(quarantined_of(copied, 'd"og')) == 2
    copied.erase("ann")  # whom the last line is about
    left = copied.everything()["quarantine"]
    assert left.count(SECRET) == 2
    for rater in ("cat", 'd"og'):
        copied.erase(rater)
    assert SECRET not in copied.everything()["quarantine"]


def test_a_line_that_was_shortened_is_shown_and_goes(copied: World, tmp_path: Path) -> None:
    long, path = "x" * LONGEST_RAW, tmp_path / "votes.jsonl"
    about = {"interaction_id": "a-1", "completion": f"{long}{SECRET}"}
    rows = [
        {"kind": "rating", "prompt": long, **who, "value": 9, **about}
        for who in ({"rater": "cat"}, {"annotator": 4711}, {"rater": 'd"o\\g'})
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sum(ingest(copied.store, path, "tea").quarantined.values()) == 3
    for rater in ("cat", "4711", 'd"o\\g'):
        [raw] = quarantined_of(copied, rater)
        assert len(raw) < LONGEST_RAW + 200
    copied.erase("cat")
    assert quarantined_of(copied, "4711")
    copied.erase("ann")  # whom the others' lines are about
    assert SECRET not in copied.everything()["quarantine"]
    names = ", ".join(f'"rater": "{n}", "interaction_id": "{n:>40}"' for n in range(200))
    assert marks_of("tea", names).count("rater_id") == MOST_MARKS  # and no id that none has


# -- afterwards ---------------------------------------------------------------------------------


def test_a_version_says_how_many_rows_were_erased_from_under_it(copied: World) -> None:
    ledger, mark = copied.registry.ledger, _mark(copied)
    version = ledger.version("tea", 0)
    with pytest.raises(HashMismatch, match="no erasure is known"):
        recorded_turn(ledger, copied.settings, version, copied.agent / "again")
    copied.erase()
    assert erased_rows(copied.database, "tea", mark) == 6
    assert explain(ledger, "tea", 0)["data"]["erased_rows"] == 6
    assert explain(ledger, "tea", 0)["lineage"]["fingerprint"] == mark
    with pytest.raises(HashMismatch, match="6 rows erased from the snapshot of version 0"):
        recorded_turn(ledger, copied.settings, version, copied.agent / "again")
    turn = recorded_turn(ledger, copied.settings, version, copied.agent / "again", exact=False)
    assert turn.fingerprint == mark
    # Who voted on what went with her goes later, and that vote is not counted a second time.
    with copied.database.read() as connection:
        before = held(connection, Person("tea", BOB))
    copied.erase("bob")
    blank = sum(one.is_blank for one in before.votes)
    assert blank
    assert erased_rows(copied.database, "tea", mark) == 6 + len(before.votes) - blank


@pytest.mark.slow
def test_a_person_of_a_real_turn_is_in_no_file_afterwards(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    agent = first_turn.agent_id
    back_up(loop.pipeline.settings(), tmp_path / "copy")
    settings = load_settings(loop.pipeline.recipe, {"state_dir": tmp_path / "moved"})
    restore(settings, tmp_path / "copy")
    database = Database(settings.resolved_database_url)
    ledger = PromotionLedger(database, settings.state_dir)
    registry = ModelRegistry(
        ledger, settings.resolved_mlflow_uri, settings.state_dir.resolve() / "mlflow"
    )
    f, i = db.feedback.c, db.interactions.c
    with database.read() as connection:
        voters = sa.select(f.voter).where(f.agent_id == agent, f.rater_id.is_not(None))
        most = voters.group_by(f.voter).order_by(sa.func.count().desc()).limit(1)
        rater = str(connection.execute(most).scalar_one())
        ids = [rater]
        ids += connection.execute(sa.select(f.feedback_id).where(f.voter == rater)).scalars()
        ids += connection.execute(sa.select(i.interaction_id).where(i.user_id == rater)).scalars()
    assert len(ids) > 4
    found = {path.name for path in holding(settings.state_dir, ids)}
    assert found >= {"feedback.db", stages.PAIRS, "feedback.parquet"}
    agents, aside = settings.state_dir / "agents", tmp_path / "others"
    shutil.copytree(agents, aside)
    for other in agents.iterdir():
        if other.name != agent:  # whose turn replays this one's work, as tests do
            shutil.rmtree(other)
    [done] = erase(settings, registry, rater, agent)["erasures"]
    assert holding(settings.state_dir, ids) == []
    assert [version["version"] for version in done["versions"]] == [0, 1]
    assert done["versions"][1]["through"] == [0]
    version = ledger.version(agent, 1)
    with pytest.raises(HashMismatch, match="rows erased from the snapshot of version 1"):
        recorded_turn(ledger, settings, version, tmp_path / "again")
    turn = newest_turn(ledger, settings, agent)  # tuning goes on with what is left
    assert stages.training_prompts(turn)
    assert registry.reconcile(agent) == []
    # Every registered file is as it was, the others' too.
    for other in aside.iterdir():
        if other.name != agent:
            shutil.copytree(other, agents / other.name)
    assert back_up(settings, tmp_path / "later").damaged == ()
    database.close()


def holding(folder: Path, ids: list[str]) -> list[Path]:
    """Return the files with any of these in what they hold, unpacked."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(each.encode() in plain(path) for each in ids)
    ]


def plain(path: Path) -> bytes:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix != ".parquet":
        return path.read_bytes()
    return snapshot.read(path).to_json(date_format="iso").encode()
