"""The only code that knows MLflow's model registry: versions go in, aliases follow the ledger.

The ledger is the truth; `reconcile` projects it. Every registered model carries the tag
`rlhf.projected_entry`, written only after all its aliases were set. A champion alias found on
another version than the ledger's is then one of two things. If the ledger chose that version at
the projected entry or since, a projection was cut short: it is done again. Otherwise a person moved
the alias. The move is adopted into the ledger if no newer entry exists, the files' hashes are
right and the gate had passed the version; if not, the alias is set back and the reason kept as a
tag. One corner is decided for the ledger: a person who moves the alias back to the previous
champion between a crash of `reconcile` and its next run is overruled.

What is not protected: MLflow's own database; whoever can write to it can write tags and metrics.
Models are plain folders with safetensors, checked by hash against the ledger before use; nothing
pickled is written or loaded.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import structlog

from rlhf_pipeline.errors import HashMismatch, RegistryAway, RegistryError, StalePromotion
from rlhf_pipeline.files import folder_sha256, new_folder, sqlite_path
from rlhf_pipeline.records import hashed, now
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger, Standing
from rlhf_pipeline.registry.tracking import (
    AGENT,
    FINGERPRINT,
    Ended,
    TrackedRun,
    as_tag,
    end_running,
    is_missing,
    mlflow_refusals,
    open_client,
    tracked_run,
)

log = structlog.get_logger(__name__)

PROJECTED = "rlhf.projected_entry"
FILES_DIGEST = "rlhf.files_digest"
RUN_NOTE = "mlflow.note.content"  # what MLflow shows as a run's description
TELLING = ("fail", "pause", "warn")  # verdicts of rules that a person should read
UI_ACTOR = "mlflow-ui"
PROJECTION_SECONDS = 60.0  # for the aliases; uploads take what they take


def model_name(agent_id: str) -> str:
    """Return the registered model's name of an agent."""
    return f"rlhf-{agent_id}"


class ModelRegistry:
    """Versions in MLflow for a ledger. `folder` holds an embedded backend's artifacts and a cache.

    `tracking_uri` is `sqlite:///...` (embedded, offline) or a server's address.
    """

    def __init__(self, ledger: PromotionLedger, tracking_uri: str, folder: Path) -> None:
        self.ledger = ledger
        self.tracking_uri = tracking_uri
        self.folder = folder

    @property
    def client(self) -> Any:
        """Return the MlflowClient; the first use imports MLflow."""
        return open_client(self.tracking_uri)

    @property
    def is_embedded(self) -> bool:
        """Whether MLflow is a database and files of the state folder, and no server."""
        return sqlite_path(self.tracking_uri) is not None

    # ---- runs

    def run(
        self,
        agent_id: str,
        *,
        fingerprint: str,
        stage: str,
        parameters: Mapping[str, Any],
    ) -> AbstractContextManager[TrackedRun]:
        """Return the run of one stage's work on one snapshot; a retried step resumes its own.

        It is RUNNING, after the block too, until `end_runs`.
        """
        return tracked_run(
            self.client,
            self.experiment(agent_id),
            agent_id=agent_id,
            fingerprint=fingerprint,
            stage=stage,
            parameters=parameters,
        )

    def end_runs(self, agent_id: str, fingerprint: str, status: Ended = "KILLED") -> int:
        """Mark what a turn that is over left RUNNING, and return how many runs that were.

        FINISHED where it came to its verdict, FAILED where a step failed, else KILLED.

        A later attempt at the same work takes its run up again.
        """
        with mlflow_refusals(f"ending the runs of agent {agent_id}"):
            experiment = self.known_experiment(agent_id)
            if experiment is None:
                return 0
            return end_running(self.client, experiment, FINGERPRINT, fingerprint, status)

    # ---- registering

    def register_baseline(
        self,
        agent_id: str,
        folder: Path,
        *,
        label: str,
        lineage: Mapping[str, Any],
        actor: str,
        fingerprint: str | None = None,
        token: int | None = None,
        run_id: str | None = None,
    ) -> ModelVersion:
        """Return version 0: in the ledger as first champion, then in MLflow, aliases set."""
        version = self.ledger.add_baseline(
            agent_id,
            label=label,
            path=folder,
            files=safe_files(folder),
            lineage=lineage,
            actor=actor,
            fingerprint=fingerprint,
            token=token,
            mlflow_run_id=run_id,
        )
        self.reconcile(agent_id)
        return self.ledger.version(agent_id, version.version)

    def register(
        self,
        agent_id: str,
        folder: Path,
        *,
        label: str,
        lineage: Mapping[str, Any],
        gate: Mapping[str, Any] | None,
        fingerprint: str | None,
        token: int | None = None,
        run_id: str | None = None,
    ) -> ModelVersion:
        """Return the next version: in the ledger, then in MLflow, refused ones as well.

        The ledger comes first, so a crash in between leaves a version that the next
        `reconcile` finishes registering.
        """
        version = self.ledger.add_version(
            agent_id,
            label=label,
            path=folder,
            files=safe_files(folder),
            lineage=lineage,
            gate=gate,
            fingerprint=fingerprint,
            token=token,
            mlflow_run_id=run_id,
        )
        self.reconcile(agent_id)
        return self.ledger.version(agent_id, version.version)

    # ---- aliases

    def reconcile(self, agent_id: str) -> list[str]:
        """Make MLflow say what the ledger says, having heard whoever moved the champion alias.

        Run it after each promotion and on every sensor tick: where nothing differs it only reads.
        Returns what was changed, in words.
        """
        changes: list[str] = []
        with (
            self.ledger.one_projection_at_a_time(agent_id),
            mlflow_refusals(f"reconciling agent {agent_id}"),
        ):
            standing = self.ledger.standing(agent_id)
            if standing.champion is None:
                return changes
            changes += self._register_missing(standing)
            deadline = time.monotonic() + PROJECTION_SECONDS
            model = self.client.get_registered_model(model_name(agent_id))
            aliases = {alias: str(number) for alias, number in model.aliases.items()}
            changes += self._hear(standing, aliases.get("champion"), model.tags)
            if changes:  # an upload took its time, or the ledger took over a person's move
                standing = self.ledger.standing(agent_id)
            changes += self._set_aliases(standing, aliases, deadline)
            if model.tags.get(PROJECTED) != str(standing.entry):
                self._tag_model(agent_id, PROJECTED, str(standing.entry))
        if changes:
            log.info("registry reconciled", agent_id=agent_id, changes=changes)
        return changes

    def _set_aliases(
        self, standing: Standing, found: Mapping[str, str], deadline: float
    ) -> list[str]:
        """Set what differs. Raises RegistryError after the deadline: then others have their turn.

        Cut short, it is a projection that the next one does again, as after a crash.
        """
        changes = []
        for alias in ("champion", "challenger", "previous"):
            version: ModelVersion | None = getattr(standing, alias)
            # The standing may be older than the linking that this reconciliation did.
            wanted = self._number(version) if version else None
            if wanted == found.get(alias):
                continue
            if time.monotonic() > deadline:
                raise RegistryError(
                    f"projecting the aliases needs MLflow to answer within {PROJECTION_SECONDS:g} "
                    f"s in all, found it slower before {alias} was set; the ledger holds, and the "
                    "next look goes on"
                )
            name = model_name(standing.history[-1].agent_id)
            if wanted is None:
                self.client.delete_registered_model_alias(name, alias)
            else:
                self.client.set_registered_model_alias(name, alias, wanted)
            changes.append(f"{alias}: {found.get(alias)} -> {wanted}")
        return changes

    def _hear(self, standing: Standing, found: str | None, tags: Mapping[str, str]) -> list[str]:
        """Adopt a person's move of the champion alias, or note why it is about to be set back."""
        champion = standing.champion
        if champion is None or found is None or found == self._number(champion):
            return []
        projected = int(tags[PROJECTED]) if tags.get(PROJECTED, "").isdecimal() else 0
        agent_id = champion.agent_id
        by_number = {v.mlflow_version: v for v in self.ledger.versions(agent_id)}
        chosen = by_number.get(found)
        ours = {e.version for e in standing.history if e.entry >= projected}
        if chosen is not None and chosen.version in ours:
            return []  # a projection that was cut short, not a person
        try:
            if chosen is None:
                raise RegistryError(f"MLflow version {found} is not in the ledger")
            if projected != standing.entry:
                raise StalePromotion(
                    f"the alias was moved from what entry {projected} said, and entry "
                    f"{standing.entry} is newer"
                )
            with (
                mlflow_refusals(f"checking the files of MLflow version {found}"),
                self._stored(chosen) as stored,
            ):
                self._check(chosen, stored)
            outcome = self.ledger.adopt(
                agent_id,
                chosen.version,
                actor=UI_ACTOR,
                reason=f"the champion alias was moved to MLflow version {found} by hand; "
                "the files' hashes are right",
                expected_champion=champion.version,
            )
        except RegistryAway:
            raise  # its files could not be looked at: the next reconciliation hears of it
        except RegistryError as error:
            reason = f"the champion alias on MLflow version {found} was set back: {error}"
            self._tag_model(agent_id, "rlhf.set_back", as_tag(f"{now():%F %T} UTC: {reason}"))
            log.warning("alias set back", agent_id=agent_id, reason=reason)
            return [reason]
        return [f"adopted from the MLflow page: {outcome.words}"]

    # ---- files

    def resolve(self, uri: str) -> Path:
        """Return the local, hash-checked folder for `models:/rlhf-<agent>@champion` and the like.

        An alias means what the *ledger* says at this moment; `models:/rlhf-<agent>/3` is MLflow's
        version 3. Raises RegistryError for what is unknown, HashMismatch for changed files.
        """
        return self.folder_of(self.find(uri))

    def find(self, uri: str) -> ModelVersion:
        """Return the ledger's version that a `models:/` URI means."""
        match = re.fullmatch(r"models:/rlhf-([^/@]+)(?:@([a-z]+)|/(\d+))", uri)
        if match is None:
            raise RegistryError(
                "a URI like models:/rlhf-<agent>@champion or models:/rlhf-<agent>/3 is needed, "
                f"found {uri!r}"
            )
        agent_id, alias, number = match.groups()
        if alias is not None:
            return self.ledger.find(agent_id, alias)
        found = [v for v in self.ledger.versions(agent_id) if v.mlflow_version == number]
        if not found:
            raise RegistryError(
                f"{uri} needs a version behind it, found none in the ledger; "
                "`rlhf versions` lists what there is"
            )
        return found[0]

    def folder_of(self, version: ModelVersion) -> Path:
        """Return a local folder with exactly the files that were registered.

        The place they were trained in, or where that is gone MLflow's copy. Changed files raise
        HashMismatch rather than being passed over for the copy: somebody has to look. Raises
        RegistryError where the copy is gone too.
        """
        if version.path.is_dir():
            return self._check(version, version.path)
        cached = cached_folder(self.folder, version)
        if cached.is_dir():
            return self._check(version, cached)
        try:
            with (
                mlflow_refusals(f"fetching version {version.version} of {version.agent_id}"),
                self._stored(version) as stored,
            ):
                self._check(version, stored)
                if self.is_embedded:
                    return stored
                with new_folder(cached) as aside:
                    for child in stored.iterdir():
                        shutil.move(child, aside)
        except RegistryError as error:
            if not isinstance(error.__cause__, Exception) or not is_missing(error.__cause__):
                raise
            raise RegistryError(
                f"version {version.version} of agent {version.agent_id} needs its files, found "
                f"none in {version.path}, nor MLflow's copy; put them back from a backup, or leave "
                f"a champion with `rlhf rollback --agent {version.agent_id} --reason WHY`"
            ) from error
        return cached

    def _check(self, version: ModelVersion, folder: Path) -> Path:
        """Return the folder if its files are the registered ones; raise HashMismatch if not."""
        found = folder_sha256(folder) if folder.is_dir() else {}
        if found == dict(version.files):
            return folder
        names = set(found) | set(version.files)
        odd = sorted(n for n in names if found.get(n) != version.files.get(n))
        raise HashMismatch(
            f"version {version.version} of agent {version.agent_id} needs the files that were "
            f"registered, found {', '.join(odd[:5])} changed, missing or added in {folder}; "
            "restore the folder from a backup, or roll back"
        )

    @contextmanager
    def _stored(self, version: ModelVersion) -> Iterator[Path]:
        """Yield MLflow's copy of a version's files."""
        with self.copy_of(model_name(version.agent_id), self._number(version)) as stored:
            yield stored

    @contextmanager
    def copy_of(self, name: str, number: str) -> Iterator[Path]:
        """Yield the files of any model's MLflow version: in place where local, else downloaded."""
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        location = self.client.get_model_version_download_uri(name, number)
        if self.is_embedded:
            try:
                stored = download_artifacts(artifact_uri=location, tracking_uri=self.tracking_uri)
            except MlflowException:
                self.need_ours(location)  # another folder's may be read, but no longer be there
                raise
            yield Path(stored)
            return
        (self.folder / "cache").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder / "cache") as aside:
            yield Path(
                download_artifacts(
                    artifact_uri=location, dst_path=aside, tracking_uri=self.tracking_uri
                )
            )

    # ---- MLflow's side of a version

    def _number(self, version: ModelVersion) -> str:
        number = version.mlflow_version
        if number is None:
            number = self.ledger.version(version.agent_id, version.version).mlflow_version
        if number is None:
            raise RegistryError(
                f"version {version.version} of agent {version.agent_id} needs to be in MLflow, "
                "found it only in the ledger; run reconcile"
            )
        return number

    def _register_missing(self, standing: Standing) -> list[str]:
        """Register in MLflow what the ledger has and MLflow has not (any more).

        A version whose files are gone is noted; one that an alias needs raises.
        """
        agent_id = standing.history[-1].agent_id
        present = self._versions_in_mlflow(agent_id)
        needed = {
            v.version for v in (standing.champion, standing.challenger, standing.previous) if v
        }
        changes = []
        for version in self.ledger.versions(agent_id):
            known = present.get(version.version, {})
            if version.mlflow_version in known:
                continue
            try:
                changes.append(self._register_one(version, known))
            except RegistryError as error:
                if version.version in needed:
                    raise
                log.warning("version not in MLflow", agent_id=agent_id, reason=str(error))
        return changes

    def _versions_in_mlflow(self, agent_id: str) -> dict[int, dict[str, Any]]:
        """Return {ledger version: {MLflow version: entity}} by the tag written at registration."""
        from mlflow.exceptions import MlflowException

        name = model_name(agent_id)
        try:
            self.client.get_registered_model(name)
        except MlflowException as error:
            if not is_missing(error):
                raise
            self.client.create_registered_model(name, tags={AGENT: agent_id})
        present: dict[int, dict[str, Any]] = {}
        page = None
        while page != "":
            found = self.client.search_model_versions(f"name = '{name}'", page_token=page)
            for entity in found:
                tag = entity.tags.get("rlhf.version", "")
                if tag.isdecimal():
                    present.setdefault(int(tag), {})[str(entity.version)] = entity
            page = found.token or ""
        return present

    def _register_one(self, version: ModelVersion, present: Mapping[str, Any]) -> str:
        """Register one version, or link the registration that a crash left unlinked."""
        digest = files_digest(version.files)
        made = version.fingerprint or "", digest
        tags = {number: entity.tags for number, entity in present.items()}
        same = [n for n, t in tags.items() if (t.get(FINGERPRINT, ""), t.get(FILES_DIGEST)) == made]
        number = same[0] if same else self._upload(version, digest)
        run_id = version.mlflow_run_id
        self.ledger.link_mlflow(
            version.agent_id, version.version, mlflow_version=number, mlflow_run_id=run_id
        )
        return f"version {version.version} is MLflow version {number}"

    def _upload(self, version: ModelVersion, digest: str) -> str:
        """Put the files into a LoggedModel without a flavour and register it; return its number."""
        client = self.client
        experiment_id = self.experiment(version.agent_id)
        tags = version_tags(version) | {FILES_DIGEST: digest}
        folder = self._check(version, version.path)
        run_id = self._run_of(version)
        found = client.search_logged_models(
            experiment_ids=[experiment_id],
            filter_string=f"tags.`{FILES_DIGEST}` = '{digest}'",
        )
        models = [m for m in found if m.tags.get("rlhf.version") == str(version.version)]
        if models:
            model = models[0]
        else:
            model = client.create_logged_model(
                experiment_id,
                name=f"{model_name(version.agent_id)}-{version.version}",
                source_run_id=run_id,
                tags=tags,
                model_type="policy",
            )
        if str(model.status) != "READY":  # one that a crash cut short is filled again
            client.log_model_artifacts(model.model_id, str(folder))
            model = client.finalize_logged_model(model.model_id, "READY")
        told = described(version)
        if run_id:
            client.set_tag(run_id, RUN_NOTE, told)
            client.log_dict(run_id, dict(version.lineage), "lineage.json")
            if version.gate is not None:
                client.log_dict(run_id, dict(version.gate), "gate.json")
        # Embedded: the artifacts' location and no model_id. Given models:/<id> or a model_id,
        # MLflow's SQL store asks the process's global tracking URI instead of this client
        # (3.17, store/model_registry/sqlalchemy_store.py create_model_version).
        registered = client.create_model_version(
            model_name(version.agent_id),
            model.artifact_location if self.is_embedded else model.model_uri,
            run_id,
            tags=tags | {"rlhf.model_id": model.model_id},
            description=told,
            model_id=None if self.is_embedded else model.model_id,
            await_creation_for=0,  # it is ready at once; waiting only writes a line
        )
        return str(registered.version)

    def _run_of(self, version: ModelVersion) -> str | None:
        """Return the run a version came from, restored where a person deleted it; None where gone.

        A deleted run takes neither tags nor files, and no alias shall wait for it.
        """
        from mlflow.exceptions import MlflowException

        if version.mlflow_run_id is None:
            return None
        try:
            run = self.client.get_run(version.mlflow_run_id)
        except MlflowException as error:
            if not is_missing(error):
                raise
            return None
        if run.info.lifecycle_stage != "active":
            self.client.restore_run(version.mlflow_run_id)
        return version.mlflow_run_id

    def _tag_model(self, agent_id: str, key: str, value: str) -> None:
        self.client.set_registered_model_tag(model_name(agent_id), key, value)

    def experiment(self, agent_id: str) -> str:
        """Return the agent's experiment id, made where it is missing.

        Raises RegistryError where its files are another state folder's.
        """
        from mlflow.exceptions import MlflowException

        name, tags = model_name(agent_id), {AGENT: agent_id}
        with mlflow_refusals(f"opening the experiment {name}"):
            experiment = self._experiment(agent_id)
            if experiment is None:
                artifacts = (self.folder / "artifacts").resolve().as_uri()
                place = artifacts if self.is_embedded else None
                try:
                    return str(self.client.create_experiment(name, place, tags))
                except MlflowException as error:
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
                    experiment = self.client.get_experiment_by_name(name)
            self.need_ours(f"{experiment.artifact_location}/")
            if experiment.lifecycle_stage != "active":
                self.client.restore_experiment(experiment.experiment_id)
            if AGENT not in experiment.tags:  # of an earlier release
                self.client.set_experiment_tag(experiment.experiment_id, AGENT, agent_id)
        return str(experiment.experiment_id)

    def known_experiment(self, agent_id: str) -> str | None:
        """Return the agent's experiment id; None where there is none, or no database yet."""
        file = sqlite_path(self.tracking_uri)
        if file is not None and not file.exists():
            return None
        found = self._experiment(agent_id)
        return None if found is None else str(found.experiment_id)

    def _experiment(self, agent_id: str) -> Any:
        """Return the agent's experiment, deleted or not: people rename it on MLflow's page."""
        from mlflow.entities import ViewType

        tagged = self.client.search_experiments(
            ViewType.ALL, max_results=1, filter_string=f"tags.`{AGENT}` = '{agent_id}'"
        )
        return tagged[0] if tagged else self.client.get_experiment_by_name(model_name(agent_id))

    def need_ours(self, uri: str) -> None:
        """Raise RegistryError for a place of files that is another state folder's.

        An embedded MLflow keeps places absolute: in a state folder that was moved or copied by hand
        they are those of the old one, whose files are not ours to change, or to add to.
        """
        folder = self.folder.resolve()
        ours = uri.startswith(f"{folder.as_uri()}/")
        if self.is_embedded and uri.startswith("file:") and not ours:
            raise RegistryError(
                f"MLflow's files need to be in {folder}, found {uri} in its database: the state "
                "folder was moved or copied by hand; `rlhf moved` lets their places follow"
            )


def cached_folder(folder: Path, version: ModelVersion) -> Path:
    """Return where a version's files lie once they were fetched from an MLflow elsewhere."""
    return folder / "cache" / model_name(version.agent_id) / str(version.version)


def version_tags(version: ModelVersion) -> dict[str, str]:
    """Return the tags of a version in MLflow: its lineage, flat, for people who search there."""
    tags = {
        "rlhf.version": str(version.version),
        "rlhf.label": version.label,
        FINGERPRINT: version.fingerprint or "",
        "rlhf.gate": _verdict(version),
        "rlhf.files": as_tag(dict(version.files)),
    }
    if version.gate is not None:
        results = version.gate.get("results", [])
        tags["rlhf.gate_results"] = as_tag(
            {r["rule"]: {"number": r["number"], "verdict": r["verdict"]} for r in results}
        )
        refused = [r["words"] for r in results if r["verdict"] == "fail"]
        tags["rlhf.gate_reasons"] = as_tag("; ".join(refused))
    return tags | {f"rlhf.lineage.{key}": as_tag(value) for key, value in version.lineage.items()}


def described(version: ModelVersion) -> str:
    """Return in Markdown, as MLflow's pages show it, what a version is and what the gate said."""
    data = f", learnt from snapshot {version.fingerprint[:16]}" if version.fingerprint else ""
    results = () if version.gate is None else version.gate.get("results", ())
    said = [f"- {r['verdict']}: {r['words']}" for r in results if r["verdict"] in TELLING]
    more = f"`rlhf explain {version.version} --agent {version.agent_id}` says the rest."
    head = f"Version {version.version} ({version.label}){data}. By the gate: {_verdict(version)}."
    return "\n\n".join([head, *(["\n".join(said)] if said else []), more])


def _verdict(version: ModelVersion) -> str:
    if version.gate is None:
        return "not judged"
    return "passed" if version.passed_gate else "refused"


def files_digest(files: Mapping[str, str]) -> str:
    """Return one digest of a folder's files, as it stands in the tag of a version in MLflow."""
    return hashed(*(part for item in sorted(files.items()) for part in item))


def safe_files(folder: Path) -> dict[str, str]:
    """Return the folder's hashes. Raises RegistryError where a file could hold a pickle."""
    files = folder_sha256(folder)
    pickles = [n for n in files if n.endswith((".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"))]
    if pickles:
        raise RegistryError(
            f"a model of safetensors and JSON is needed, found {', '.join(pickles[:3])} in "
            f"{folder}; save it with policy.loading.save_policy"
        )
    return files
