"""MLflow runs: one per (agent, fingerprint, stage, parameters), resumed when its step is retried.

MLflow is imported inside functions: it costs three seconds. Clients are explicit (no global
tracking URI), so two registries in one process do not disturb each other. Telemetry is off. What
goes into a run is numbers, plots and files a person asked to see there; prompts and completions
go only where the caller puts them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import unicodedata
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
import structlog

from rlhf_pipeline.config import masked
from rlhf_pipeline.errors import ClaimLost, RegistryAway, RegistryError
from rlhf_pipeline.fence import need_right_to_write
from rlhf_pipeline.files import file_identity, no_room, sqlite_path
from rlhf_pipeline.records import hashed

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 5.0
METRICS_PER_CALL = 1000  # the most that MLflow takes in one log_batch
TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow's page knows a run's tables
TAG_CHARACTERS = 4000  # MLflow takes 5000 in a run's tag
NAME_CHARACTERS = 200  # MLflow takes 250 in a parameter's name
# No slash, which MLflow takes as well, as of a path: not twice, nor at an end.
KEPT_IN_NAMES = re.compile(r"[\w.\- :]+")
# Tables in which MLflow's migrations leave a row.
WRITTEN_AS_MADE = {"alembic_version", "workspaces"}

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # MLflow's own 120 s and 7 tries let one call to a server that hangs take a quarter of an hour.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}


AGENT = "rlhf.agent"  # tag of whatever is one agent's: experiments, runs, models, traces
FINGERPRINT = "rlhf.fingerprint"  # tag of runs and versions: which snapshot they are of
Ended = Literal["FINISHED", "FAILED", "KILLED"]  # of a run in MLflow: what it is marked as

# The client of each URI, and the file that stood there once it was open.
_opened: dict[str, tuple[Any, tuple[int, int] | None]] = {}


def open_client(tracking_uri: str) -> Any:
    """Return the process's MlflowClient for this URI; the first one makes or upgrades the database.

    So does the first one after the file of a SQLite database was replaced: restored from a backup,
    say, under a process that goes on for weeks. A file lock beside it keeps two processes from
    creating its tables at once.
    """
    file = sqlite_path(tracking_uri)
    client, stood = _opened.get(tracking_uri, (None, None))
    stands = None if file is None else file_identity(file)
    if client is not None and (file is None or (stands is not None and stands == stood)):
        return client
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    sa.event.listen(sa.Engine, "handle_error", _without_parameters)  # MLflow makes its own
    with warnings.catch_warnings():
        # MLflow 3.17 maps with a loader that SQLAlchemy 2.1 deprecates; delete when it does not.
        warnings.filterwarnings("ignore", message=".*noload.*loader strategy is deprecated")
        from mlflow import MlflowClient

        if file is None:
            with mlflow_refusals("opening MLflow"):
                client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            with Path(f"{file}.lock").open("w") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if client is not None:
                    _forget(tracking_uri)
                client = _open_embedded(tracking_uri)
    _opened[tracking_uri] = client, None if file is None else file_identity(file)
    return client


def _forget(tracking_uri: str) -> None:
    """Close MLflow's connections to what stood at a URI, and let its next client make the tables.

    Its stores and their pools live as long as the process, and MLflow 3.17 has no call that ends
    them. While a pool holds the old file open, no new one gets its number.
    """
    from mlflow.store.model_registry import sqlalchemy_store as of_models
    from mlflow.store.tracking import sqlalchemy_store as of_runs
    from mlflow.tracking._model_registry.utils import _get_store_registry
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry

    for module in (of_models, of_runs):
        if (engine := module.SqlAlchemyStore._engine_map.get(tracking_uri)) is not None:
            engine.dispose()
    for stores in (_get_store_registry(), _tracking_store_registry):
        stores._get_store_with_resolved_uri.cache_clear()


def _without_parameters(context: sa.ExceptionContext) -> None:
    """Keep what a failed statement was to write out of its error: people wrote it, logs show it."""
    if context.sqlalchemy_exception is not None:
        context.sqlalchemy_exception.hide_parameters = True


def _open_embedded(tracking_uri: str) -> Any:
    """Return a client whose database has all its tables."""
    from mlflow import MlflowClient

    _make_tables(tracking_uri)
    client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    client.search_registered_models(max_results=1)  # the registry opens its store lazily
    return client


def _make_tables(tracking_uri: str) -> None:
    """Bring MLflow's tables up to its release; what cuts that short, the next look goes on with.

    Where MLflow 3.17 does so by itself, every statement is a transaction of its own: SQLite's
    driver begins none before one that changes tables. What a kill among them leaves, MLflow refuses
    ever after, as a table that is there already. Here each migration is one transaction, and what
    was left so is made anew where nothing was ever written to it.
    """
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils

    engine = sa.create_engine(tracking_uri, poolclass=sa.NullPool)

    @sa.event.listens_for(engine, "connect")
    def _begin_nothing(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's; _begin does

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    migrations = ScriptDirectory.from_config(utils._get_alembic_config(tracking_uri))
    _, *older = [each.revision for each in migrations.walk_revisions()]
    found = utils._get_schema_version(engine)
    if found is None or found in older:  # a newer release's, MLflow refuses in its own words
        _drop_if_empty(engine)
        utils._initialize_tables(engine)


def _drop_if_empty(engine: sa.Engine) -> None:
    """Drop every table where none holds a row but those that MLflow's migrations write."""
    with engine.begin() as connection:
        tables = [sa.Table(n, sa.MetaData()) for n in sa.inspect(connection).get_table_names()]
        for table in tables:
            holds = sa.select(sa.exists().select_from(table))
            if table.name not in WRITTEN_AS_MADE and connection.scalar(holds):
                return
        for table in tables:
            table.drop(connection)


@contextmanager
def mlflow_refusals(wanted: str) -> Iterator[None]:
    """Turn whatever MLflow raises, and a full disk, into a RegistryError that says what was wanted.

    It is a RegistryAway where the server did not answer at all, or the disk is full. The tracking
    URI's password, which MLflow quotes, stands in nothing that leaves the block.
    """
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    try:
        yield
    except MlflowException as error:
        _mask_passwords(error)
        if isinstance(error.__context__, RequestException):  # MLflow keeps no other sign
            raise RegistryAway(
                f"{wanted} needs MLflow to answer, found {error}; start its server, or "
                "check the tracking URI, and try again"
            ) from error
        if full := _full(error):
            raise RegistryAway(f"{wanted}: {full}") from error
        raise RegistryError(
            f"{wanted} needs MLflow to agree, found {error.error_code}: {error}; "
            "check the tracking URI and what was deleted in the MLflow page"
        ) from error
    except OSError as error:  # of copying files beside a local database; or what a server answered
        _mask_passwords(error)
        if full := no_room(error):
            raise RegistryAway(f"{wanted}: {full}") from error
        raise


def _mask_passwords(error: BaseException | None) -> None:
    """Mask them in what an error says and in what led to it, which a traceback shows as well."""
    while error is not None:
        error.args = tuple(masked(arg) if isinstance(arg, str) else arg for arg in error.args)
        error = error.__cause__ or error.__context__


def _full(error: BaseException | None) -> str:
    """Return what to tell of a disk that was full for what MLflow raised; "" where none was."""
    while error is not None:
        if full := no_room(getattr(error, "orig", error)):
            return full
        error = error.__cause__ or error.__context__
    return ""


def is_missing(error: Exception) -> bool:
    """Say whether this MlflowException means that the thing asked for is not there."""
    return getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST"


class TrackedRun:
    """One MLflow run that takes parameters, metrics per step, plots, files and data inputs."""

    def __init__(self, client: Any, run_id: str, *, resumed: bool, logged: Collection[str]) -> None:
        self.client = client
        self.run_id = run_id
        self.resumed = resumed
        self._logged = frozenset(logged)  # names of metrics that an earlier attempt left
        self._points: dict[str, set[tuple[int, str]]] = {}  # what it left of them
        self._waiting: list[Any] = []
        self._flushed_at = time.monotonic()

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Log numbers of one step, which wait up to five seconds to travel together.

        A tracking server that is away is logged, and tried again with the next numbers; `flush` at
        the end raises.
        """
        from mlflow.entities import Metric

        moment = int(time.time() * 1000)
        self._waiting += [Metric(key, value, moment, step) for key, value in metrics.items()]
        if time.monotonic() - self._flushed_at < FLUSH_SECONDS:
            return
        try:
            self.flush()
        except RegistryError as error:
            log.warning("metrics wait for MLflow", run_id=self.run_id, reason=str(error))

    def flush(self) -> None:
        """Send what waits. Raises RegistryError; what was not sent goes on waiting.

        A number that an earlier attempt logged at the same step is not sent again: a step that is
        retried would draw its curve twice.
        """
        self._flushed_at = time.monotonic()
        with mlflow_refusals(f"logging metrics of run {self.run_id}"):
            self._waiting = [metric for metric in self._waiting if not self._is_there(metric)]
            while self._waiting:
                batch = self._waiting[:METRICS_PER_CALL]
                self.client.log_batch(self.run_id, metrics=batch, synchronous=True)
                self._waiting = self._waiting[METRICS_PER_CALL:]

    def _is_there(self, metric: Any) -> bool:
        if metric.key not in self._logged:
            return False
        if metric.key not in self._points:
            history = self.client.get_metric_history(self.run_id, metric.key)
            self._points[metric.key] = {(point.step, repr(point.value)) for point in history}
        return (metric.step, repr(float(metric.value))) in self._points[metric.key]

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags; what is not text is written as JSON, what is too long is cut."""
        from mlflow.entities import RunTag

        with mlflow_refusals(f"tagging run {self.run_id}"):
            entities = [RunTag(key, as_tag(value)) for key, value in tags.items()]
            self.client.log_batch(self.run_id, tags=entities, synchronous=True)

    def log_file(self, path: Path, folder: str) -> None:
        """Keep a copy of a file, e.g. a plot, with the run."""
        need_right_to_write()
        with mlflow_refusals(f"keeping {path.name} with run {self.run_id}"):
            self.client.log_artifact(self.run_id, str(path), folder or None)

    def log_json(self, name: str, value: Any) -> None:
        """Keep a value as a JSON file with the run."""
        need_right_to_write()
        with mlflow_refusals(f"keeping {name} with run {self.run_id}"):
            self.client.log_dict(self.run_id, value, name)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep rows of like columns as a JSON file that MLflow's page shows as a table."""
        columns = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        self.log_json(name, {"columns": columns, "data": data})
        with mlflow_refusals(f"looking up the tables of run {self.run_id}"):
            tags = self.client.get_run(self.run_id).data.tags
        known = json.loads(tags.get(TABLES, "[]"))
        this = {"path": name, "type": "table"}
        if this not in known:
            self.set_tags({TABLES: [*known, this]})

    def log_text(self, name: str, text: str) -> None:
        """Keep a text, e.g. a markdown table, with the run."""
        need_right_to_write()
        with mlflow_refusals(f"keeping {name} with run {self.run_id}"):
            self.client.log_text(self.run_id, text, name)

    def log_input(self, fingerprint: str, source: Path, counts: Mapping[str, int]) -> None:
        """Say which data the run read: a name, a digest and counts, none of the rows."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name="feedback",
            digest=fingerprint[:36],  # as many as MLflow keeps
            source_type="local",
            source=json.dumps({"uri": source.as_posix()}),
            profile=json.dumps(dict(counts)),
        )
        tags = [InputTag("mlflow.data.context", "training")]
        with mlflow_refusals(f"noting the data of run {self.run_id}"):
            self.client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])


@contextmanager
def tracked_run(
    client: Any,
    experiment_id: str,
    *,
    agent_id: str,
    fingerprint: str,
    stage: str,
    parameters: Mapping[str, Any],
) -> Iterator[TrackedRun]:
    """Yield the one run of this work: the earlier one where a step is retried, else a new one.

    The work goes on in later blocks, until `end_running`; an exception marks the run FAILED (and it
    may be resumed later). A block that lost its claim leaves it alone: by now it is the newer
    holder's. Work is one at a time: earlier work's run that is RUNNING yet, as MLflow was away when
    it ended, is KILLED.
    """
    run = _find_or_create(client, experiment_id, agent_id, fingerprint, stage, parameters)
    if not run.resumed:
        with mlflow_refusals(f"ending earlier runs for {stage}"):
            end_running(client, experiment_id, "rlhf.stage", stage, "KILLED", but=run.run_id)
    try:
        yield run
        run.flush()
    except ClaimLost:
        raise
    except BaseException:
        _mark_failed(run)
        raise


def end_running(
    client: Any, experiment_id: str, tag: str, value: str, status: Ended, *, but: str | None = None
) -> int:
    """Mark the experiment's runs that are RUNNING and hold this tag; return how many those were.

    `but` is the id of one that is left alone.
    """
    wanted = f"status = 'RUNNING' and tags.`{tag}` = '{value}'"
    found = [r.info.run_id for r in client.search_runs([experiment_id], wanted)]
    ended = [run_id for run_id in found if run_id != but]
    for run_id in ended:
        client.set_terminated(run_id, status)
    return len(ended)


def _mark_failed(run: TrackedRun) -> None:
    """Mark the run FAILED as far as MLflow can be reached; what stopped the work matters more."""
    try:
        run.flush()
        with mlflow_refusals(f"ending run {run.run_id}"):
            run.client.set_terminated(run.run_id, "FAILED")
    except RegistryError as error:
        log.warning("a failed run could not be marked", run_id=run.run_id, reason=str(error))


def _find_or_create(
    client: Any,
    experiment_id: str,
    agent_id: str,
    fingerprint: str,
    stage: str,
    parameters: Mapping[str, Any],
) -> TrackedRun:
    from mlflow.entities import Param

    texts = {as_name(key): as_tag(value) for key, value in parameters.items()}
    work = hashed(agent_id, fingerprint, stage, json.dumps(texts, sort_keys=True))
    with mlflow_refusals(f"starting a run for {stage} of agent {agent_id}"):
        found = client.search_runs([experiment_id], f"tags.`rlhf.work` = '{work}'", max_results=1)
        if found:
            run_id = found[0].info.run_id
            client.update_run(run_id, status="RUNNING")
            missing = texts.keys() - found[0].data.params.keys()  # killed before all were there
        else:
            name = f"{stage} {fingerprint[:8]}"
            tags = {
                "rlhf.work": work,
                "rlhf.stage": stage,
                AGENT: agent_id,
                FINGERPRINT: fingerprint,
            }
            run_id = client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
            missing = texts.keys()
        entities = [Param(key, texts[key]) for key in sorted(missing)]
        for first in range(0, len(entities), 100):  # as many as MLflow takes in one call
            client.log_batch(run_id, params=entities[first : first + 100], synchronous=True)
    logged = found[0].data.metrics if found else ()
    return TrackedRun(client, run_id, resumed=bool(found), logged=logged)


def as_name(name: str) -> str:
    """Return a parameter's name as MLflow takes it: a setting's may be a person's own words.

    What it refuses is spelt out, and a hash of the whole keeps two names apart.
    """
    if KEPT_IN_NAMES.fullmatch(name) and len(name) <= NAME_CHARACTERS:
        return name
    spelt = "".join(sign if KEPT_IN_NAMES.fullmatch(sign) else _spelt(sign) for sign in name)
    return f"{spelt[:NAME_CHARACTERS]} {hashed(name)[:8]}"


def _spelt(sign: str) -> str:
    return f":{unicodedata.name(sign, f'{ord(sign):x}').lower()}:"


def as_tag(value: Any) -> str:
    """Return a value as the text that MLflow keeps, cut to what it takes."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= TAG_CHARACTERS else text[: TAG_CHARACTERS - 1] + "…"
