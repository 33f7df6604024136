"""Dagster's finished runs with their events and logs: which may go, by age and number.

Never goes: a run under way or one that is gone on from, one whose turn's claim is held, one that
trained a version that is in use (retention.py says which), one that has the newest of an asset's
partition, and one that ended before it claimed a turn while the agent began none since, as the
sensor counts those. Events go before the run's row, so a prune that was killed leaves a run to be
found again. What this does not reach: what sensors and schedules noted, for which dagster.yaml has
days of its own, and files of a storage that is not Dagster's embedded one.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import structlog

from automation.dead import AT_WORK
from automation.jobs import CAME_TO_NOTHING, WATERMARK, retrain
from automation.processes import home_of
from resources.pipeline import AGENT
from rlhf_pipeline.config import Settings
from rlhf_pipeline.feedback.claims import ClaimBook
from rlhf_pipeline.records import now
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.retention import Item, aged, standing_of

log = structlog.get_logger(__name__)

NO_AGENT = ""
"""The agent of runs that are about none: of a dropped file, of a prune."""
ENDED = [
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
]
PAGE = 1000  # rows asked for at once


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of all runs together."""

    at_work: frozenset[str]  # of unfinished runs: their ids, and those they go on from
    newest: dict[str, str]  # run -> the asset whose partition it made last


def prune_runs(
    instance: dg.DagsterInstance,
    ledger: PromotionLedger,
    settings_of: Callable[[str], Settings],
    *,
    agents: Sequence[str] | None = None,
    without: Collection[str] = (),
    dry_run: bool = False,
) -> list[Item]:
    """Remove the finished runs that may go; return those and the old ones that stay, with why.

    `agents` (None: every one but those in `without`) may name NO_AGENT. With `dry_run` nothing is
    removed.
    """
    at = now()
    by_agent: dict[str, list[dg.RunRecord]] = defaultdict(list)
    for record in _records(instance, ENDED):
        by_agent[record.dagster_run.tags.get(AGENT, NO_AGENT)].append(record)
    known = _known(instance)
    looked: list[Item] = []
    for agent_id in sorted(by_agent):
        if agent_id not in without if agents is None else agent_id in agents:
            kept = settings_of(agent_id).retention.runs
            items = _items(instance, ledger, agent_id, by_agent[agent_id], known)
            looked += aged(items, kept, at)
    gone = [item for item in looked if item.stays is None]
    if not dry_run:
        for item in gone:
            _remove(instance, item.name)
            log.info("pruned", agent=item.agent_id, kind=item.kind, name=item.name)
        _tidy(instance, known)
    return looked


def embedded_instance(state_dir: Path) -> dg.DagsterInstance | None:
    """Return the instance of a state folder, or None where Dagster never ran in it.

    Raises ConfigError as `home_of` does: of a folder that was moved, or restored from a backup.
    """
    if not (state_dir / "dagster" / "dagster.yaml").exists():
        return None
    return dg.DagsterInstance.from_config(str(home_of(state_dir)))


def _items(
    instance: dg.DagsterInstance,
    ledger: PromotionLedger,
    agent_id: str,
    records: Sequence[dg.RunRecord],
    known: _Known,
) -> list[Item]:
    claims = ClaimBook(ledger.database)
    standing = standing_of(ledger, claims, agent_id, ours=None)
    used = {
        version.fingerprint: f"version {version.version} {standing.in_use[version.version]}"
        for version in standing.versions
        if version.fingerprint and version.version in standing.in_use
    }
    newest_claim = max((claim.created_at for claim in standing.history), default=None)
    found = []
    for record in records:
        run = record.dagster_run
        claim = claims.of_holder(run.root_run_id or run.run_id)
        ended = _ended(record)
        if run.run_id in known.at_work:
            stays = "a run that is under way goes on from it"
        elif claim is not None and claim.state == "held":
            stays = "its turn's claim is held"
        elif claim is not None and claim.fingerprint in used:
            stays = used[claim.fingerprint]
        elif run.run_id in known.newest:
            stays = f"has the newest of {known.newest[run.run_id]}"
        elif _is_counted(run, claim is None, newest_claim, ended):
            stays = "ended before it claimed its turn, and none began since"
        else:
            stays = None
        size = sum(path.stat().st_size for path in _files(instance, run.run_id))
        found.append(Item("runs", agent_id, run.run_id, ended, stays, bytes=size))
    return found


def _is_counted(
    run: dg.DagsterRun, unclaimed: bool, newest_claim: datetime | None, ended: datetime
) -> bool:
    """Say whether sensors.py may count the run among the tries that came to nothing."""
    asked_for = run.job_name == retrain.name and WATERMARK in run.tags
    in_vain = unclaimed and run.status in CAME_TO_NOTHING
    return asked_for and in_vain and (newest_claim or ended) <= ended


def _known(instance: dg.DagsterInstance) -> _Known:
    at_work: set[str] = set()
    for record in _records(instance, AT_WORK):
        run = record.dagster_run
        at_work |= {one for one in (run.run_id, run.root_run_id, run.parent_run_id) if one}
    newest = {}
    for key in instance.get_asset_keys():
        last = instance.event_log_storage.get_latest_storage_id_by_partition(
            key, dg.DagsterEventType.ASSET_MATERIALIZATION
        )
        ids = sorted(last.values())
        for start in range(0, len(ids), PAGE):
            wanted = dg.AssetRecordsFilter(asset_key=key, storage_ids=ids[start : start + PAGE])
            for event in instance.fetch_materializations(wanted, limit=PAGE).records:
                newest[event.run_id] = key.to_user_string()
        latest = instance.get_latest_materialization_event(key)  # of no partition perhaps
        if latest is not None:
            newest[latest.run_id] = key.to_user_string()
    return _Known(frozenset(at_work), newest)


def _records(
    instance: dg.DagsterInstance, statuses: list[dg.DagsterRunStatus]
) -> Iterator[dg.RunRecord]:
    """Yield the records of runs in these states, newest first."""
    cursor = None
    while True:
        found = instance.get_run_records(dg.RunsFilter(statuses=statuses), PAGE, cursor=cursor)
        yield from found
        if len(found) < PAGE:
            return
        cursor = found[-1].dagster_run.run_id


def _ended(record: dg.RunRecord) -> datetime:
    if record.end_time is not None:
        return datetime.fromtimestamp(record.end_time, UTC)
    return record.update_timestamp.replace(tzinfo=UTC)


def _remove(instance: dg.DagsterInstance, run_id: str) -> None:
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    instance.event_log_storage.delete_events(run_id)
    instance.delete_run(run_id)


def _tidy(instance: dg.DagsterInstance, known: _Known) -> None:
    """Remove the event files of runs that are gone, and give their pages in the others back.

    Pages that were given back hold nothing of what people said. Waits for a night without a turn:
    while this writes a database anew, nobody else can write to it.
    """
    folder = _event_folder(instance)
    if folder is None:
        return
    for path in folder.glob("*.db"):
        if path.stem != "index" and not instance.has_run(path.stem):
            for each in folder.glob(f"{path.name}*"):  # with its journal
                each.unlink(missing_ok=True)
    ours = {path.stem for path in folder.glob("*.db")} & known.at_work
    if len(ours) <= 1:  # the run this may be
        for path in (folder / "index.db", folder.parent / "runs.db"):
            try:
                with closing(sqlite3.connect(path)) as connection:
                    if connection.execute("PRAGMA freelist_count").fetchone()[0]:
                        connection.execute("VACUUM")
            except sqlite3.OperationalError as error:  # the next night tries again
                log.warning("pages not given back", file=str(path), error=str(error))


def _files(instance: dg.DagsterInstance, run_id: str) -> list[Path]:
    """Return what the run left as files: events, and what its steps printed."""
    folder = _event_folder(instance)
    events = [] if folder is None else list(folder.glob(f"{run_id}.db*"))
    logs = Path(instance.storage_directory()) / run_id
    return [*events, *(path for path in logs.rglob("*") if path.is_file())]


def _event_folder(instance: dg.DagsterInstance) -> Path | None:
    """Return where the embedded storage keeps a file per run; another storage has none."""
    path_of = getattr(instance.event_log_storage, "path_for_shard", None)
    return None if path_of is None else Path(path_of("index")).parent
