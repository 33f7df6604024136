"""The promotion ledger: the append-only truth about which version of an agent is champion.

A version is registered once and never changed; the champion is what the newest entry says. Three
things are checked inside the transaction that appends: the caller's view of the champion (the
primary key (agent, entry) is the compare-and-set), the claim's fencing token where a training run
acts, and the gate's verdict. MLflow aliases are a projection of this (models.py). What it does not
protect against: somebody who edits the tables by hand.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa

from rlhf_pipeline import records
from rlhf_pipeline.database import Database, claims, experiments, model_versions, promotions
from rlhf_pipeline.errors import ClaimLost, RegistryError, StalePromotion
from rlhf_pipeline.files import locked

PROJECTION_WAIT_SECONDS = 240.0  # more than a projection and one call that hangs may take
LOOK_SECONDS = 0.1
NAMES = ("champion", "challenger", "previous", "baseline")  # that a version may have
FORCE = "`rlhf promote --force --reason WHY`"

Action = Literal["baseline", "promote", "rollback", "adopt"]


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One registered version: what it is, where it came from, what the gate said."""

    agent_id: str
    version: int  # 0 is the first baseline
    label: str  # v{feedback count}
    path: Path
    files: Mapping[str, str]  # relative name -> SHA-256
    lineage: Mapping[str, Any]
    gate: Mapping[str, Any] | None  # GateDecision.to_json(); None: never judged
    fingerprint: str | None  # of the snapshot it was trained from
    created_at: datetime
    mlflow_version: str | None = None
    mlflow_run_id: str | None = None

    @property
    def passed_gate(self) -> bool:
        """Say whether the gate judged this version and let it through."""
        return self.gate is not None and self.gate.get("passed") is True

    @property
    def work(self) -> Path:
        """Return the work folder of the turn whose ppo/policy it is; of a baseline no such."""
        return self.path.parent.parent


@dataclass(frozen=True, slots=True)
class Promotion:
    """One line of the ledger: from this moment `version` is the champion."""

    agent_id: str
    entry: int  # 1, 2, 3, ... per agent
    action: Action
    version: int
    previous_version: int | None
    token: int | None
    actor: str
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call did. `changed` is False where the champion already was what was asked for."""

    promotion: Promotion  # the entry that holds now
    changed: bool
    words: str


@dataclass(frozen=True, slots=True)
class Standing:
    """One consistent look at an agent: its history and who stands where."""

    history: tuple[Promotion, ...]
    champion: ModelVersion | None
    challenger: ModelVersion | None  # the newest that waits
    previous: ModelVersion | None
    waiting: tuple[ModelVersion, ...] = ()  # passed, newer than the champion, not withdrawn
    withdrawn: Mapping[int, str] = field(default_factory=dict)  # version -> why
    baseline: ModelVersion | None = None  # the newest `baseline` entry's: drift is measured to it

    def roles(self, version: int) -> list[str]:
        """Return what a version is now: the names that it has, and withdrawn where it was."""
        named = {name: getattr(self, name) for name in NAMES}
        is_now = [name for name, found in named.items() if found and found.version == version]
        return [*is_now, "withdrawn"] if version in self.withdrawn else is_now

    @property
    def entry(self) -> int:
        """Return the newest entry's number, 0 where there is none."""
        return self.history[-1].entry if self.history else 0


class PromotionLedger:
    """Appends and reads versions and promotions. Paths under `root` are kept relative to it.

    With a root, a state folder that is moved or restored elsewhere still finds its models.
    """

    def __init__(self, database: Database, root: Path | None = None) -> None:
        self.database = database
        self.root = root.resolve() if root is not None else None

    # ---- reading

    def version(self, agent_id: str, version: int) -> ModelVersion:
        """Return one registered version. Raises RegistryError where that number is unknown."""
        with self.database.read() as connection:
            return self._version(connection, agent_id, version)

    def versions(self, agent_id: str) -> list[ModelVersion]:
        """Return every registered version, oldest first."""
        with self.database.read() as connection:
            return self._versions(connection, agent_id)

    def history(self, agent_id: str) -> list[Promotion]:
        """Return every entry, oldest first."""
        with self.database.read() as connection:
            return _history(connection, agent_id)

    def champion(self, agent_id: str) -> ModelVersion | None:
        """Return the version that serves, None before the baseline is registered."""
        with self.database.read() as connection:
            newest = _newest(connection, agent_id)
            return self._version(connection, agent_id, newest.version) if newest else None

    def champions(self, agent_id: str) -> list[int]:
        """Return the champions that rolling back walks along, the current one last."""
        return _line_of_champions(self.history(agent_id))

    def baseline(self, agent_id: str) -> ModelVersion | None:
        """Return the version that drift is measured against: the newest `baseline` entry's."""
        with self.database.read() as connection:
            number = _baseline_of(_history(connection, agent_id))
            return None if number is None else self._version(connection, agent_id, number)

    def standing(self, agent_id: str) -> Standing:
        """Return the agent's history, and who stands where, as of one moment."""
        with self.database.read() as connection:
            history = _history(connection, agent_id)
            by_number = {v.version: v for v in self._versions(connection, agent_id)}
            gone = _withdrawn(connection, agent_id, history, by_number.values())
        line = _line_of_champions(history)
        champion = by_number[line[-1]] if line else None
        before, first = _one_before(line, gone, by_number.values()), _baseline_of(history)
        waiting = [
            v
            for v in by_number.values()
            if champion and v.version > champion.version and v.passed_gate and v.version not in gone
        ]
        return Standing(
            history=tuple(history),
            champion=champion,
            challenger=max(waiting, key=lambda v: v.version, default=None),
            previous=by_number[before] if before is not None else None,
            waiting=tuple(sorted(waiting, key=lambda v: v.version)),
            withdrawn=gone,
            baseline=by_number[first] if first is not None else None,
        )

    def objection(self, agent_id: str, version: int) -> str | None:
        """Return why this version should not become champion, None where nothing speaks against
        it. Raises RegistryError where that number is unknown.
        """
        with self.database.read() as connection:
            history = _history(connection, agent_id)
            versions = self._versions(connection, agent_id)
            gone = _withdrawn(connection, agent_id, history, versions)
            return _objection(self._version(connection, agent_id, version), history, gone)

    def find(self, agent_id: str, name: str) -> ModelVersion:
        """Return the version that a person means: champion, challenger, previous, baseline or a
        number. Raises RegistryError where there is none.
        """
        if name.isdecimal() and len(name) < 10:  # no column holds a longer one
            return self.version(agent_id, int(name))
        found: ModelVersion | None = None
        if name in NAMES:
            found = getattr(self.standing(agent_id), name)
        if found is None:
            raise RegistryError(
                f"a version of agent {agent_id} is needed, found no {name!r}; give its number or "
                f"{', '.join(NAMES)} (`rlhf versions` lists them)"
            )
        return found

    # ---- registering

    def add_baseline(
        self,
        agent_id: str,
        *,
        label: str,
        path: Path,
        files: Mapping[str, str],
        lineage: Mapping[str, Any],
        actor: str,
        fingerprint: str | None = None,
        token: int | None = None,
        mlflow_run_id: str | None = None,
    ) -> ModelVersion:
        """Return version 0, registered and made the first champion in one transaction.

        Called again with the same files it returns what is there; with others it raises
        RegistryError, because a baseline is fixed (`reset_baseline` moves it, on the record).
        """
        _need_files(files)
        with self.database.write() as connection:
            _check_token(connection, agent_id, token)
            known = self._versions(connection, agent_id)
            if known:
                if dict(known[0].files) == dict(files):
                    return known[0]
                raise RegistryError(
                    f"agent {agent_id} needs one baseline, found version 0 already registered "
                    "with other files; `rlhf reset-baseline` moves it to the champion"
                )
            added = self._insert_version(
                connection,
                agent_id,
                0,
                path,
                label=label,
                files=dict(files),
                lineage=dict(lineage),
                fingerprint=fingerprint,
                mlflow_run_id=mlflow_run_id,
            )
            _append(connection, agent_id, None, "baseline", 0, token, actor, "the first version")
            return added

    def add_version(
        self,
        agent_id: str,
        *,
        label: str,
        path: Path,
        files: Mapping[str, str],
        lineage: Mapping[str, Any],
        gate: Mapping[str, Any] | None,
        fingerprint: str | None,
        token: int | None = None,
        mlflow_run_id: str | None = None,
    ) -> ModelVersion:
        """Return the next version, registered; nobody is promoted by this.

        The same files from the same snapshot in the same folder come back as the version they
        already are, so a retried step registers nothing twice. A turn that trained on the snapshot
        again has a folder and a verdict of its own, and is a version of its own even where its
        files are an earlier one's. Raises ClaimLost on a stale token.
        """
        _need_files(files)
        with self.database.write() as connection:
            _check_token(connection, agent_id, token)
            known = self._versions(connection, agent_id)
            if not known:
                raise RegistryError(
                    f"agent {agent_id} needs a baseline before other versions, found none; "
                    "register the SFT policy with add_baseline"
                )
            made = (fingerprint, dict(files), path.resolve())
            for earlier in known[1:]:
                if (earlier.fingerprint, dict(earlier.files), earlier.path.resolve()) == made:
                    return earlier
            number = known[-1].version + 1
            return self._insert_version(
                connection,
                agent_id,
                number,
                path,
                label=label,
                files=dict(files),
                lineage=dict(lineage),
                gate=dict(gate) if gate is not None else sa.null(),
                fingerprint=fingerprint,
                mlflow_run_id=mlflow_run_id,
            )

    def link_mlflow(
        self, agent_id: str, version: int, *, mlflow_version: str, mlflow_run_id: str | None
    ) -> ModelVersion:
        """Return the version with its MLflow numbers written down (they are found, not chosen).

        Where a person deleted the registered model MLflow counts from 1 again: another version that
        had the number, and could not be registered again, has none any more.
        """
        m = model_versions.c
        with self.database.write() as connection:
            self._version(connection, agent_id, version)
            connection.execute(
                model_versions.update()
                .where(m.agent_id == agent_id, m.mlflow_version == mlflow_version)
                .values(mlflow_version=None)
            )
            connection.execute(
                model_versions.update()
                .where(m.agent_id == agent_id, m.version == version)
                .values(mlflow_version=mlflow_version, mlflow_run_id=mlflow_run_id)
            )
            return self._version(connection, agent_id, version)

    # ---- moving the champion

    def promote(
        self,
        agent_id: str,
        version: int,
        *,
        actor: str,
        reason: str,
        expected_champion: int,
        token: int | None = None,
        force: bool = False,
        experiment: str | None = None,
    ) -> Outcome:
        """Make `version` the champion if the champion still is `expected_champion`.

        Promoting the champion again changes nothing and says so. `force` takes a version that
        the gate refused or never judged, or that was withdrawn; the ledger says so. The
        `experiment` that decided must still run, and ends in the same transaction.
        Raises StalePromotion, ClaimLost or RegistryError.
        """
        return self._move(
            agent_id,
            version,
            "promote",
            actor,
            reason,
            expected_champion,
            token,
            force=force,
            experiment=experiment,
        )

    def adopt(
        self, agent_id: str, version: int, *, actor: str, reason: str, expected_champion: int
    ) -> Outcome:
        """Take over a champion that a person chose elsewhere (the MLflow page), if the gate allows.

        A version that was rolled back from may be adopted: a person looked at it.
        """
        return self._move(agent_id, version, "adopt", actor, reason, expected_champion, None)

    def reset_baseline(
        self, agent_id: str, *, actor: str, reason: str, expected_champion: int | None = None
    ) -> Outcome:
        """Make the current champion the baseline that later versions are measured against.

        Where it is that already nothing changes. Raises StalePromotion where the champion is not
        `expected_champion`, RegistryError where there is none.
        """
        _need_words(actor, reason)
        with self.database.write() as connection:
            history = _history(connection, agent_id)
            newest = _need_champion(history, agent_id)
            _check_view(agent_id, newest, expected_champion)
            baseline = [entry for entry in history if entry.action == "baseline"][-1]
            if baseline.version == newest.version:
                return Outcome(newest, False, f"version {newest.version} already is the baseline")
            entry = _append(
                connection, agent_id, newest, "baseline", newest.version, None, actor, reason
            )
            return Outcome(entry, True, f"version {newest.version} is the baseline now")

    def rollback(
        self,
        agent_id: str,
        *,
        actor: str,
        reason: str,
        to: int | None = None,
        expected_champion: int | None = None,
    ) -> Outcome:
        """Make an earlier champion the champion again: the one before, or `to`.

        Rolling back twice goes two back, not to and fro, past a version that was withdrawn where
        an earlier one was not, and past one of the champion's own files. Give
        `expected_champion` where two watchers may act on the same trouble: the second gets
        StalePromotion instead of going one too far. Raises RegistryError where there is nothing
        earlier or `to` never was champion.
        """
        _need_words(actor, reason)
        with self.database.write() as connection:
            history = _history(connection, agent_id)
            newest = _need_champion(history, agent_id)
            if to is not None and to == newest.version:
                return Outcome(newest, False, f"version {to} already is the champion")
            _check_view(agent_id, newest, expected_champion)
            line = _line_of_champions(history)
            versions = self._versions(connection, agent_id)
            gone = _withdrawn(connection, agent_id, history, versions)
            before = _one_before(line, gone, versions)
            version = before if to is None else to if len(line) > 1 else None
            if version is None or version not in {e.version for e in history}:
                wanted = "an earlier champion" if to is None else f"version {to} as one"
                raise RegistryError(
                    f"rolling back agent {agent_id} needs {wanted}, found champions {line}; "
                    "use promote for another version"
                )
            entry = _append(connection, agent_id, newest, "rollback", version, None, actor, reason)
            return Outcome(entry, True, f"rolled back from {newest.version} to {version}")

    @contextmanager
    def one_projection_at_a_time(
        self, agent_id: str, *, wait_seconds: float = PROJECTION_WAIT_SECONDS
    ) -> Iterator[None]:
        """Hold an agent's projection lock: across processes of one machine with SQLite, across
        machines with PostgreSQL. It does not keep others from appending to the ledger.

        Raises RegistryError where another holds it for longer than wait_seconds.
        """
        if self.database.is_sqlite and self.database.url.database in (None, "", ":memory:"):
            yield  # nobody else can see this database
            return
        deadline = time.monotonic() + wait_seconds
        while True:
            with self._projection_lock(agent_id) as is_ours:
                if is_ours:
                    yield
                    return
            if time.monotonic() > deadline:
                raise _held_too_long(agent_id, wait_seconds)
            time.sleep(LOOK_SECONDS)

    @contextmanager
    def _projection_lock(self, agent_id: str) -> Iterator[bool]:
        """Hold the lock where nobody does, and say whether it is held: who waits keeps nothing.

        A waiting projection that kept its connection would be one the fewer for votes.
        """
        if self.database.is_sqlite:
            name = records.hashed(agent_id)[:16]
            with Path(f"{self.database.url.database}.projection-{name}.lock").open("w") as handle:
                yield locked(handle)  # the kernel lets go when the process dies
            return
        with self.database.write() as connection:
            # A server's own limits, or a writer's, would let go of the lock while the work goes on.
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            lock = sa.text("SELECT pg_try_advisory_xact_lock(712008, hashtext(:agent))")
            yield bool(connection.execute(lock, {"agent": agent_id}).scalar_one())

    # ---- inside a transaction

    def _move(
        self,
        agent_id: str,
        version: int,
        action: Action,
        actor: str,
        reason: str,
        expected_champion: int,
        token: int | None,
        *,
        force: bool = False,
        experiment: str | None = None,
    ) -> Outcome:
        _need_words(actor, reason)
        with self.database.write() as connection:
            history = _history(connection, agent_id)
            newest = _need_champion(history, agent_id)
            if newest.version == version:
                return Outcome(newest, False, f"version {version} already is the champion")
            _check_token(connection, agent_id, token)
            _check_view(agent_id, newest, expected_champion)
            wanted = self._version(connection, agent_id, version)
            gone: Mapping[int, str] = {}
            if action != "adopt":  # what a person chose elsewhere may be one that was withdrawn
                versions = self._versions(connection, agent_id)
                gone = _withdrawn(connection, agent_id, history, versions)
            objection = _objection(wanted, history, gone)
            if objection and not force:
                raise RegistryError(objection)
            if objection:
                reason = f"forced ({objection.split(';')[0]}): {reason}"
            if experiment is not None:
                _end_experiment(connection, experiment, reason)
            entry = _append(connection, agent_id, newest, action, version, token, actor, reason)
            return Outcome(entry, True, f"champion moved from {newest.version} to {version}")

    def _versions(self, connection: sa.Connection, agent_id: str) -> list[ModelVersion]:
        rows = connection.execute(
            model_versions.select()
            .where(model_versions.c.agent_id == agent_id)
            .order_by(model_versions.c.version)
        )
        return [self._to_version(row) for row in rows]

    def _version(self, connection: sa.Connection, agent_id: str, version: int) -> ModelVersion:
        row = connection.execute(
            model_versions.select().where(
                model_versions.c.agent_id == agent_id, model_versions.c.version == version
            )
        ).one_or_none()
        if row is None:
            raise RegistryError(
                f"version {version} of agent {agent_id} is needed, found none registered; "
                "`rlhf versions` lists them"
            )
        return self._to_version(row)

    def _to_version(self, row: sa.Row[Any]) -> ModelVersion:
        values = dict(row._mapping)
        path = Path(values.pop("path"))
        return ModelVersion(**values, path=self.root / path if self.root else path)

    def _insert_version(
        self, connection: sa.Connection, agent_id: str, version: int, path: Path, **columns: Any
    ) -> ModelVersion:
        absolute = path.resolve()
        if self.root and absolute.is_relative_to(self.root):
            absolute = absolute.relative_to(self.root)
        try:
            connection.execute(
                model_versions.insert().values(
                    agent_id=agent_id,
                    version=version,
                    path=str(absolute),
                    created_at=records.now(),
                    **columns,
                )
            )
        except sa.exc.IntegrityError as error:
            raise StalePromotion(
                f"registering version {version} of agent {agent_id} needs that number free, found "
                "it taken by another writer just now; ask again"
            ) from error
        return self._version(connection, agent_id, version)


def _held_too_long(agent_id: str, seconds: float) -> RegistryError:
    return RegistryError(
        f"projecting agent {agent_id} needs its turn within {seconds:g} s, found another process "
        "at it all the while; the ledger holds, and the aliases follow with the next look: see "
        "whether MLflow answers"
    )


def _history(connection: sa.Connection, agent_id: str) -> list[Promotion]:
    rows = connection.execute(
        promotions.select().where(promotions.c.agent_id == agent_id).order_by(promotions.c.entry)
    )
    return [Promotion(**row._mapping) for row in rows]


def _newest(connection: sa.Connection, agent_id: str) -> Promotion | None:
    row = connection.execute(
        promotions.select()
        .where(promotions.c.agent_id == agent_id)
        .order_by(promotions.c.entry.desc())
        .limit(1)
    ).one_or_none()
    return Promotion(**row._mapping) if row else None


def _line_of_champions(history: Sequence[Promotion]) -> list[int]:
    """Return the champions that rolling back walks along, the current one last."""
    return _walked(history)[0]


def _one_before(
    line: Sequence[int], gone: Collection[int], versions: Collection[ModelVersion]
) -> int | None:
    """Return whom rolling back makes champion: the last that was not withdrawn, if there is one.

    One that was may stand there: made champion again by `promote`, and then gone back from. So may
    the champion itself, or its files under another number: what is wrong with it would stay. Where
    all were withdrawn it is the last before the champion was champion at all: to one that was gone
    back from to it nothing goes back.
    """
    if not line:
        return None
    files = {version.version: dict(version.files) for version in versions}
    is_champion = [files[number] == files[line[-1]] for number in line]
    others = [number for number, same in zip(line, is_champion, strict=True) if not same]
    first = is_champion.index(True)
    fallback = line[first - 1] if first else None
    return next((number for number in reversed(others) if number not in gone), fallback)


def _baseline_of(history: Sequence[Promotion]) -> int | None:
    """Return the version that was made the baseline last."""
    return next((e.version for e in reversed(history) if e.action == "baseline"), None)


def _walked(history: Sequence[Promotion]) -> tuple[list[int], list[Promotion]]:
    """Return the line of champions, the current one last, and the entries that went back.

    Promotions push; a rollback cuts the line back to its target, and so does whoever moves MLflow's
    alias to one of the line, which is how MLflow rolls back.
    """
    line: list[int] = []
    back: list[Promotion] = []
    for entry in history:
        is_known = entry.version in line
        if entry.action == "rollback" or (entry.action == "adopt" and is_known):
            back.append(entry)
            while is_known and line[-1] != entry.version:
                line.pop()
        if not line or line[-1] != entry.version:
            line.append(entry.version)
    return line, back


def _withdrawn(
    connection: sa.Connection,
    agent_id: str,
    history: Sequence[Promotion],
    versions: Collection[ModelVersion],
) -> dict[int, str]:
    """Return the versions that were gone back from, as champion, or lost as challenger in an
    experiment, and were not made champion, or the baseline, since; with the words that say so.

    Versions of the same files are one model: what happened to one happened to all.
    """
    e = experiments.c
    lost = connection.execute(
        sa.select(e.champion, e.challenger, e.reason, e.ended_at)
        .where(e.agent_id == agent_id, e.state == "rolled_back")
        .order_by(e.ended_at)
    ).all()
    back = {entry.entry for entry in _walked(history)[1]}
    moments: list[tuple[datetime, int, str | None]] = []
    ends: dict[int, datetime] = {}  # of who is champion no more, when another became it
    # Entries keep their order, also where a clock was set back between two of them.
    for at, entry in zip(accumulate((e.created_at for e in history), max), history, strict=True):
        if entry.entry in back and entry.previous_version is not None:
            words = "was rolled back from" if entry.action == "rollback" else "was left by hand"
            moments.append((at, entry.previous_version, words))
        moments.append((at, entry.version, None))
        if entry.previous_version is not None:
            ends[entry.previous_version] = at
        ends.pop(entry.version, None)
    losses = [
        # It was lost to a champion, so before another was one, whatever a clock ahead says.
        (
            min(row.ended_at, ends.get(row.champion, row.ended_at)),
            row.challenger,
            f"was rolled back in an experiment ({row.reason})",
        )
        for row in lost
    ]
    files = {version.version: frozenset(version.files.items()) for version in versions}
    twins: defaultdict[frozenset[tuple[str, str]], list[int]] = defaultdict(list)
    for number, its in files.items():
        twins[its].append(number)
    gone: dict[int, str] = {}
    for _, version, why in sorted([*losses, *moments], key=lambda moment: moment[0]):
        for twin in twins[files[version]]:
            if why is None:
                gone.pop(twin, None)
            elif twin == version:
                gone[twin] = why
            else:
                gone[twin] = f"has the files of version {version}, which {why}"
    return gone


def _end_experiment(connection: sa.Connection, experiment: str, reason: str) -> None:
    """End the experiment as promoted. Raises StalePromotion where it runs no more."""
    e = experiments.c
    ended = connection.execute(
        experiments.update()
        .where(e.experiment_id == experiment, e.state == "running")
        .values(state="promoted", reason=reason, ended_at=records.now())
    )
    if ended.rowcount != 1:
        raise StalePromotion(
            f"promoting by experiment {experiment} needs it running, found it ended meanwhile; "
            "the champion stays"
        )


def _objection(
    version: ModelVersion, history: Sequence[Promotion], gone: Mapping[int, str]
) -> str | None:
    """Return why this version should not become champion, None where nothing speaks against it."""
    name = f"version {version.version} of agent {version.agent_id}"
    was_baseline = any(e.action == "baseline" and e.version == version.version for e in history)
    if not was_baseline and version.gate is None:
        return f"{name} was never judged by the gate; evaluate it, or {FORCE}"
    if not was_baseline and not version.passed_gate:
        return f"{name} was refused by the gate; see `rlhf explain`, or {FORCE}"
    if version.version in gone:
        return f"{name} {gone[version.version]}; train a new one, or {FORCE}"
    return None


def _check_view(agent_id: str, newest: Promotion, expected_champion: int | None) -> None:
    if expected_champion is not None and newest.version != expected_champion:
        raise StalePromotion(
            f"the champion of agent {agent_id} had to be version {expected_champion}, found "
            f"version {newest.version} since entry {newest.entry}; look again and decide anew"
        )


def _check_token(connection: sa.Connection, agent_id: str, token: int | None) -> None:
    """Raise ClaimLost unless the token is held, not expired, and the agent's newest."""
    if token is None:
        return
    claim = connection.execute(
        sa.select(claims.c.state, claims.c.expires_at)
        .where(claims.c.token == token, claims.c.agent_id == agent_id)
        .with_for_update()  # PostgreSQL: a take-over waits until this transaction is through
    ).one_or_none()
    newest = connection.scalar(
        sa.select(sa.func.max(claims.c.token)).where(claims.c.agent_id == agent_id)
    )
    if claim is None:
        found = "no such claim"
    elif newest != token:
        found = f"the newer token {newest}"
    elif claim.state != "held":
        found = f"the claim {claim.state}"
    elif claim.expires_at <= records.now():
        found = f"it expired at {claim.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    else:
        return
    raise ClaimLost(
        f"writing for agent {agent_id} needs token {token} held, found {found}; "
        "stop this run, its work belongs to the newer holder"
    )


def _append(
    connection: sa.Connection,
    agent_id: str,
    newest: Promotion | None,
    action: Action,
    version: int,
    token: int | None,
    actor: str,
    reason: str,
) -> Promotion:
    entry = Promotion(
        agent_id=agent_id,
        entry=newest.entry + 1 if newest else 1,
        action=action,
        version=version,
        previous_version=newest.version if newest else None,
        token=token,
        actor=actor,
        reason=reason,
        created_at=records.now(),
    )
    values = {name: getattr(entry, name) for name in Promotion.__slots__}
    try:
        connection.execute(promotions.insert().values(**values))
    except sa.exc.IntegrityError as error:
        raise StalePromotion(
            f"entry {entry.entry} of agent {agent_id} had to be free, found it written by another "
            "just now; look again and decide anew"
        ) from error
    return entry


def _need_champion(history: Sequence[Promotion], agent_id: str) -> Promotion:
    if not history:
        raise RegistryError(
            f"agent {agent_id} needs a champion, found an empty ledger; register its baseline"
        )
    return history[-1]


def _need_words(actor: str, reason: str) -> None:
    if not actor.strip() or not reason.strip():
        raise RegistryError(
            f"the ledger needs an actor and a reason, found {actor!r} and {reason!r}; "
            "say who and why"
        )


def _need_files(files: Mapping[str, str]) -> None:
    if not files:
        raise RegistryError(
            "a version needs at least one file with its SHA-256, found none; check the folder"
        )
