"""The worker: what it is told, what it does not do twice, when it stops by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from resources import worker
from resources.worker import same_work, specification, turn_from
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.errors import ClaimLost, ConfigError
from rlhf_pipeline.feedback.claims import Claim, ClaimBook
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.reward import HEAD, REPORT, SETTINGS, TRUNK
from rlhf_pipeline.stages import PAIRS, STAGES, Turn
from tests.assets.world import write_recipe

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = Path(__file__).with_name("launch.py")


@pytest.fixture
def book(tmp_path: Path) -> ClaimBook:
    settings = load_settings(write_recipe(tmp_path / "minute.yaml", tmp_path / "state"))
    return ClaimBook(open_database(settings.resolved_database_url))


@pytest.fixture
def claim(book: ClaimBook) -> Claim:
    return book.claim("shop", "f" * 64, 7, holder="run 1", asked_by="person")


@pytest.fixture
def turn(tmp_path: Path, claim: Claim) -> Turn:
    return Turn(
        agent_id="shop",
        fingerprint=claim.fingerprint,
        watermark=7,
        token=claim.token,
        data=tmp_path / "data",
        work=tmp_path / "work",
        baseline=tmp_path / "baseline",
        champion=None,
        settings=load_settings(tmp_path / "minute.yaml"),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put a stage `counting` in place and return the list it counts its calls in."""
    made: list[int] = []

    def counting(turn: Turn, report: Any, keep_going: Callable[[], None]) -> dict[str, Any]:
        made.append(turn.token)
        report({"update": len(made)})
        return {"call": len(made)}

    monkeypatch.setitem(STAGES, "counting", counting)
    return made


def test_a_turn_survives_being_written_and_read(turn: Turn) -> None:
    assert turn_from(json.loads(json.dumps(specification(turn)))) == turn


def test_no_secret_is_in_the_specification(
    turn: Turn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, hook = "postgresql://u:hush-hush-1@db/x", "https://hooks.example/hush-hush-2"
    settings = load_settings(
        tmp_path / "minute.yaml", {"database_url": url, "notifications": {"webhook": hook}}
    )
    values = {name: getattr(turn, name) for name in Turn.__slots__} | {"settings": settings}
    spec = specification(Turn(**values))
    assert "hush-hush" not in json.dumps(spec)
    monkeypatch.setenv("RLHF_DATABASE_URL", url)
    read = turn_from(spec).settings
    assert read.resolved_database_url == url  # from the environment
    assert read.notifications.webhook is None  # the worker calls nobody


def test_a_finished_stage_is_not_run_again_under_the_same_specification(
    turn: Turn, calls: list[int]
) -> None:
    spec = specification(turn)
    assert worker.run("counting", spec) == {"call": 1}
    assert worker.run("counting", spec) == {"call": 1}
    # A retry after a crash holds the claim under a new token; the work is the same.
    assert worker.run("counting", {**spec, "token": 99}) == {"call": 1}
    assert len(calls) == 1


def test_of_several_processes_one_runs_what_they_do_not_share(
    turn: Turn, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert worker.run("counting", specification(turn)) == {}
    assert not calls
    assert not turn.work.exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert worker.run("counting", specification(turn)) == {"call": 1}
    # Nobody else is waited for.
    assert not {"WORLD_SIZE", "ACCELERATE_USE_FSDP"} & os.environ.keys()


@pytest.mark.parametrize("stage", worker.BEFORE_PPO)
@pytest.mark.parametrize("estimator", ["gae", "dpo"])
def test_a_launch_that_ppo_refuses_is_refused_before_anything_is_trained(
    turn: Turn, stage: str, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STAGES, stage, lambda *_: {"trained": True})
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    spec = specification(turn)
    spec["settings"]["ppo"]["estimator"] = estimator
    if estimator == "dpo":  # which one process trains, however many were launched
        assert worker.run(stage, spec) == {"trained": True}
        return
    with pytest.raises(ConfigError, match=r"needed policy\.lora, found every weight trained"):
        worker.run(stage, spec)
    assert not turn.work.exists()


def test_of_several_processes_that_train_ppo_one_reports(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(turn: Turn, report: Any, keep_going: Callable[[], None]) -> dict[str, Any]:
        report({"update": 1})
        return {"rank": os.environ["RANK"]}

    monkeypatch.setitem(STAGES, "ppo", together)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert worker.run("ppo", specification(turn)) == {"rank": "1"}
    assert not any(turn.work.iterdir())
    monkeypatch.setenv("RANK", "0")
    assert worker.run("ppo", specification(turn)) == {"rank": "0"}
    assert (turn.work / "ppo.progress.jsonl").read_text().count("update") == 1
    assert read_json(turn.work / "ppo.json")["result"] == {"rank": "0"}


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("training", {"stage_timeout_minutes": 1440, "report_to": ["tensorboard"]}),
        ("continuous_learning", {"deadline_minutes": 2000}),
        ("promotion", {"automatic": False}),
        ("experiments", {"enabled": True}),
        ("retention", {"cron": "1 1 * * *"}),
    ],
)
def test_a_setting_that_trains_nothing_leaves_finished_stages_as_they_are(
    turn: Turn, calls: list[int], section: str, change: dict[str, Any]
) -> None:
    spec = specification(turn)
    assert worker.run("counting", spec) == {"call": 1}
    other = {**spec["settings"], section: {**spec["settings"][section], **change}}
    assert other != spec["settings"]
    assert worker.run("counting", {**spec, "settings": other}) == {"call": 1}


def test_what_trains_nothing_is_named_as_the_settings_are(turn: Turn) -> None:
    every = turn.settings.model_dump(mode="json")
    assert every.keys() >= {*worker.TRAIN_NOTHING, *worker.TRAIN_NOTHING_IN}
    for section, names in worker.TRAIN_NOTHING_IN.items():
        assert every[section].keys() > set(names), section
    left = worker._that_train("ppo", every, turn.settings.reward)
    assert list(left["experiments"]) == ["people_per_network"]
    assert "gate" in left["promotion"]


@pytest.mark.parametrize(
    ("read", "stage"),
    [
        ("seeds", "baseline"),
        ("base", "baseline"),
        ("reward base", "reward"),
        ("given", "reward"),
        ("given report", "reward"),
        ("function", "ppo"),
        ("behaviour", "evaluation"),
    ],
)
def test_a_stage_runs_again_when_a_file_it_reads_changed(
    turn: Turn, tmp_path: Path, read: str, stage: str
) -> None:
    changed = {
        "seeds": tmp_path / "seeds.jsonl",
        "base": tmp_path / "base" / "model.safetensors",
        "reward base": tmp_path / "encoder" / "model.safetensors",
        "given": tmp_path / "given" / "gate" / HEAD,
        "given report": tmp_path / "given" / "proxy" / REPORT,
        "function": tmp_path / "taste" / TRUNK / "model.safetensors",
        "behaviour": turn.settings.agent_folder("shop") / "behaviour.yaml",
    }
    for path in (*changed.values(), tmp_path / "taste" / HEAD, tmp_path / "taste" / SETTINGS):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("as it was")
    spec = specification(turn)
    spec["settings"]["sft"]["seed_conversations"] = str(changed["seeds"])
    spec["settings"]["policy"]["base"] = str(tmp_path / "base")
    spec["settings"]["reward"] |= {
        "base": str(tmp_path / "encoder"),
        "given": str(tmp_path / "given"),
        "functions": {"taste": {"function": str(tmp_path / "taste")}, "length": {}},
    }
    before = {stage: same_work(stage, spec) for stage in STAGES}
    assert before == {stage: same_work(stage, spec) for stage in STAGES}
    changed[read].write_text("as it is")
    assert [each for each in STAGES if same_work(each, spec) != before[each]] == [stage]


def test_a_stage_runs_again_when_a_function_of_ones_own_was_edited(
    turn: Turn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "taste_of_one_who_edits.py"
    own.write_text("def taste(items): return [1.0 for _ in items]\n")
    spec = specification(turn)
    spec["settings"]["reward"]["functions"] = {"taste": {"function": f"{own.stem}:taste"}}
    before = {stage: same_work(stage, spec) for stage in STAGES}
    assert before == {stage: same_work(stage, spec) for stage in STAGES}
    own.write_text("def taste(items): return [-1.0 for _ in items]\n")
    assert [each for each in STAGES if same_work(each, spec) != before[each]] == ["ppo"]


@pytest.mark.parametrize(
    ("change", "again"),
    [
        # As the message of one that timed out says, and what else decides no score.
        ({"functions": {"mine": {"options": {"timeout_seconds": 60, "attempts": 9}}}}, []),
        ({"functions": {"mine": {"options": {"batch_size": 1, "key_variable": "KEY"}}}}, []),
        ({"functions": {"judge": {"options": {"timeout_seconds": 90, "at_once": 1}}}}, []),
        ({"functions": {"judge": {"options": {"rubric": "Is it short?"}}}}, ["ppo", "evaluation"]),
        ({"functions": {"mine": {"function": "http://[::1]:9/b"}}}, ["ppo", "evaluation"]),
        ({"functions": {"mine": {"weight": 0.7}}}, ["ppo", "evaluation"]),
        ({"functions": {"own": {"options": {"attempts": 9}}}}, ["ppo", "evaluation"]),
        ({"wish_bound": 0.5}, ["ppo", "evaluation"]),
        ({"epochs": 9}, list(STAGES)),
    ],
)
def test_what_ppo_maximises_begins_no_stage_before_it_again_and_how_it_is_asked_none(
    turn: Turn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Mapping[str, Any],
    again: list[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "taste_that_attempts.py"
    own.write_text("def taste(attempts): return lambda items: [attempts for _ in items]\n")
    judged = {"url": "http://[::1]:9/v1", "model": "m", "rubric": "Is it kind?"}
    functions: dict[str, dict[str, Any]] = {
        "mine": {"function": "http://[::1]:9/a", "options": {"timeout_seconds": 30}},
        "judge": {"options": judged},
        "own": {"function": f"{own.stem}:taste", "options": {"attempts": 1}},
    }
    spec = specification(turn)
    spec["settings"]["reward"]["functions"] = functions
    before = {stage: same_work(stage, spec) for stage in STAGES}
    for name, one in change.get("functions", {}).items():
        options = {**functions[name]["options"], **one.get("options", {})}
        functions[name] |= {**one, "options": options}
    spec["settings"]["reward"] |= {**change, "functions": functions}
    assert [stage for stage in STAGES if same_work(stage, spec) != before[stage]] == again


@pytest.mark.parametrize(("earlier", "stage"), [("reward", "ppo"), ("ppo", "evaluation")])
def test_a_stage_runs_again_when_the_one_it_goes_on_from_did(
    turn: Turn, monkeypatch: pytest.MonkeyPatch, earlier: str, stage: str
) -> None:
    """Its own settings may be those it had: they were changed before it ran, and after that one."""
    ran: list[str] = []

    def run(*_: object, name: str) -> dict[str, Any]:
        ran.append(name)
        return {}

    for name in (earlier, stage):
        monkeypatch.setitem(STAGES, name, partial(run, name=name))
    before = specification(turn)
    after = json.loads(json.dumps(before))
    after["settings"]["training"]["seed"] = 7
    for name, spec in ((earlier, before), (stage, after), (earlier, after), (stage, after)):
        worker.run(name, spec)
    assert ran == [earlier, stage, earlier, stage]
    worker.run(earlier, after)
    worker.run(stage, after)
    assert len(ran) == 4


@pytest.mark.parametrize("changed", ["champion", "settings"])
def test_a_stage_runs_again_when_what_it_depends_on_changed(
    turn: Turn, calls: list[int], changed: str
) -> None:
    spec = specification(turn)
    worker.run("counting", spec)
    if changed == "champion":
        other = {**spec, "champion": "/elsewhere"}
    else:
        other = json.loads(json.dumps(spec))
        other["settings"]["ppo"]["updates"] += 1
    assert same_work("counting", other) != same_work("counting", spec)
    assert worker.run("counting", other) == {"call": 2}


def test_a_stage_runs_again_when_its_data_sets_did_though_the_votes_are_the_same(
    turn: Turn, calls: list[int]
) -> None:
    """As where gold questions came since the attempt that failed."""
    spec = specification(turn)
    turn.data.mkdir(parents=True, exist_ok=True)
    (turn.data / PAIRS).write_bytes(b"before")
    assert worker.run("counting", spec) == worker.run("counting", spec) == {"call": 1}
    (turn.data / PAIRS).write_bytes(b"after")
    assert worker.run("counting", spec) == {"call": 2}


def test_nothing_is_trained_over_a_registered_version(
    turn: Turn, calls: list[int], tmp_path: Path
) -> None:
    """The recipe was changed after the version was registered, and the turn is tried again."""
    spec = specification(turn)
    assert worker.run("counting", spec) == {"call": 1}
    changed = {**spec, "champion": str(tmp_path / "other")}
    assert worker.run("counting", changed) == {"call": 2}
    database = open_database(turn.settings.resolved_database_url)
    FeedbackStore(database).ensure_agent(turn.agent_id)
    ledger = PromotionLedger(database, turn.settings.state_dir)
    made: dict[str, Any] = {"lineage": {}, "label": "v"}
    ledger.add_baseline(
        turn.agent_id, path=tmp_path / "baseline", files={"w": "0"}, actor="test", **made
    )
    ledger.add_version(
        turn.agent_id,
        path=turn.work / "ppo" / "policy",
        files={"w": "1"},
        gate=None,
        fingerprint=turn.fingerprint,
        **made,
    )
    assert worker.run("counting", spec) == {"call": 2}
    assert len(calls) == 2


def test_progress_is_kept_beside_the_result(turn: Turn, calls: list[int]) -> None:
    worker.run("counting", specification(turn))
    [line] = (turn.work / "counting.progress.jsonl").read_text().splitlines()
    assert json.loads(line)["update"] == 1
    assert read_json(turn.work / "counting.json")["result"] == {"call": 1}


def test_nothing_is_trained_under_a_claim_that_was_lost(
    turn: Turn, calls: list[int], book: ClaimBook
) -> None:
    book.finish(turn.token, "failed", "taken over")
    with pytest.raises(ClaimLost, match="needed claim 1 to be held, found failed: taken over"):
        worker.run("counting", specification(turn))
    assert calls == []


@pytest.mark.parametrize("writes", [False, True])
def test_nothing_is_written_when_the_claim_is_lost_meanwhile(
    turn: Turn, book: ClaimBook, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    def losing(turn: Turn, *_: object) -> dict[str, Any]:
        book.finish(turn.token, "failed", "taken over")
        if writes:
            write_json(turn.work / "ppo" / "result.json", {"late": True})
        return {"late": True}

    monkeypatch.setitem(STAGES, "losing", losing)
    with pytest.raises(ClaimLost):
        worker.run("losing", specification(turn))
    assert [p.name for p in turn.work.rglob("*.json")] == []


def test_the_worker_ends_when_its_parent_is_killed(turn: Turn) -> None:
    turn.work.mkdir()
    write_json(turn.work / "spec.json", specification(turn))
    command = [str(LAUNCH), "-m", "resources.worker", "ignore_everything", "spec.json"]
    command[-1] = str(turn.work / "spec.json")
    code = f"import subprocess, sys; subprocess.run([sys.executable, *{command!r}], check=False)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    pid_file = turn.work / "pid"
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = psutil.Process(int(pid_file.read_text()))
    assert child.is_running()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs([child], timeout=10)
    for process in alive:
        process.kill()
    assert alive == []
    assert gone
