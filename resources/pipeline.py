"""The resource every asset gets: settings, store, claims, ledger, registry of a state folder."""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import structlog
from pydantic import PrivateAttr

from resources.worker import settings_from
from rlhf_pipeline import stages
from rlhf_pipeline.config import Settings, load_settings, own_settings, shown
from rlhf_pipeline.continuous import taken_out_since
from rlhf_pipeline.database import Database, open_database
from rlhf_pipeline.errors import ClaimRefused, ConfigError, PipelineError, RegistryError
from rlhf_pipeline.evaluation.report import GATE_SCORE
from rlhf_pipeline.feedback import datasets, snapshot
from rlhf_pipeline.feedback.claims import Claim, ClaimBook
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.fence import writing_while
from rlhf_pipeline.files import (
    file_sha256,
    folder_sha256,
    new_folder,
    read_json,
    remove_half_written,
    write_json,
)
from rlhf_pipeline.promoting import promote_if_due
from rlhf_pipeline.records import hashed
from rlhf_pipeline.registry.comparison import report_in
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
from rlhf_pipeline.stages import BEGAN, Turn

if TYPE_CHECKING:
    from rlhf_pipeline.registry.models import ModelRegistry
    from rlhf_pipeline.registry.tracking import Ended, TrackedRun

log = structlog.get_logger()
ASKED_BY = "rlhf/asked_by"  # run tag: sensor, schedule, api or person
AGENT = "dagster/partition"  # run tag, whoever started the run: one at a time (dagster.yaml)
MAX_STEPS = "rlhf/max_steps"  # run tag: PPO updates instead of the recipe's
LEARNING_RATE = "rlhf/learning_rate"  # run tag: PPO's instead of the recipe's
MOST_STEPS = 100_000  # as many as the API takes
TRAINED_WITH = {  # which sections of a recipe say what a stage came to, and the steps before it
    "reward": ("validation", "drift", "reward"),
    "ppo": ("policy", "ppo", "training"),
    "evaluation": ("evaluation", "promotion"),
}
LEARNT_WITH = ("feedback", "policy", "sft", "reward", "ppo", "training")  # what any of them reads


class Pipeline(dg.ConfigurableResource):  # type: ignore[type-arg]  # generic only for its own value
    """Builds what assets and sensors work with, from the recipe or the agent's own recipe."""

    recipe: str | None = None
    _beating: dict[int, AbstractContextManager[None]] = PrivateAttr(default_factory=dict)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the heartbeats when the run ends."""
        while self._beating:
            self._beating.popitem()[1].__exit__(None, None, None)

    def settings(self, agent_id: str | None = None) -> Settings:
        """Return the settings; an agent that was given a recipe of its own has that one's."""
        settings = load_settings(self.recipe)
        if agent_id is None:
            return settings
        store = FeedbackStore(open_database(settings.resolved_database_url))
        return own_settings(settings, store.recipe_of(agent_id))

    @property
    def database(self) -> Database:
        """Return the one database of this state folder."""
        return open_database(self.settings().resolved_database_url).reached()

    @property
    def store(self) -> FeedbackStore:
        """Return the feedback store."""
        return FeedbackStore(self.database)

    @property
    def claims(self) -> ClaimBook:
        """Return the claims table."""
        return ClaimBook(self.database)

    @property
    def ledger(self) -> PromotionLedger:
        """Return the promotion ledger."""
        return PromotionLedger(self.database, self.settings().state_dir)

    @property
    def registry(self) -> ModelRegistry:
        """Return the MLflow registry; this is where mlflow is first imported."""
        from rlhf_pipeline.registry.models import ModelRegistry

        settings = self.settings()
        return ModelRegistry(self.ledger, settings.resolved_mlflow_uri, settings.mlflow_folder)

    def begin_turn(
        self, context: dg.AssetExecutionContext, mark: str, watermark: int, *, again: bool = False
    ) -> Turn:
        """Claim the fingerprint for this run and return the turn.

        Raises what `_claim` does, and dg.Failure (no retry) where the files of the champion or the
        baseline are not the ones that were registered, where the recipe names another base, or
        where the run's tags hold nonsense: those are read before anything is claimed, so that it
        counts as no attempt.
        """
        run, agent_id = context.run, agent_of(context)
        try:
            asked_for(self.settings(agent_id), run.tags)
        except ConfigError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        claim = self._claim(
            agent_id,
            mark,
            watermark,
            holder=run.root_run_id or run.run_id,
            asked_by=run.tags.get(ASKED_BY, "person"),
            again=again,
        )
        self._keep_alive(claim.token)
        self._check_files(claim.agent_id)
        self._check_base(context)
        turn = self._turn(claim, run.tags)
        remove_half_written(turn.work, turn.data)  # by an attempt that was killed
        return turn

    def _check_files(self, agent_id: str) -> None:
        """Raise dg.Failure where what a turn would start from, and be held against, was changed.

        A damaged champion is easily beaten. Looked at before the turn writes down whom it begins
        with: a person may roll back and ask again. A folder that is gone is put back from MLflow's
        copy, which serves meanwhile: the stages look for it where it was.
        """
        standing = self.ledger.standing(agent_id)
        found = [version for version in (standing.champion, standing.baseline) if version]
        for version in {each.version: each for each in found}.values():  # often one is both
            try:
                found_in = self.registry.folder_of(version)
                if found_in != version.path:
                    with new_folder(version.path) as aside:
                        shutil.copytree(found_in, aside, dirs_exist_ok=True)
            except RegistryError as error:
                raise dg.Failure(str(error), allow_retries=False) from error

    def _check_base(self, context: dg.AssetExecutionContext) -> None:
        """Raise dg.Failure where the recipe names another base than version 0 was made from.

        Every version goes on from that one, so the turn would train what nobody asked for.
        """
        from rlhf_pipeline.registry.bases import both_told, held_against

        agent_id = agent_of(context)
        settings, made_from = self.settings(agent_id), self._made_from(agent_id)
        told = both_told(settings, agent_id, made_from)
        try:
            held = held_against(settings, made_from)
        except RegistryError as error:
            raise dg.Failure(f"{told}: {error}", allow_retries=False) from error
        if held == "other":
            raise dg.Failure(
                f"{told}; name what was there again, or train the other under a new agent's name, "
                "with a recipe of its own (`rlhf config use`)",
                allow_retries=False,
            )
        if held == "?":
            context.log.warning(
                f"{told}, and nobody can tell whether that is the same; the turn goes on from what "
                "version 0 was made from: name that again"
            )

    def _made_from(self, agent_id: str) -> Mapping[str, Any]:
        """Return version 0's lineage; empty before that is trained."""
        versions = self.ledger.versions(agent_id)
        return versions[0].lineage if versions else {}

    def _claim(
        self,
        agent_id: str,
        mark: str,
        watermark: int,
        *,
        holder: str,
        asked_by: str,
        again: bool,
    ) -> Claim:
        """Return the claim.

        Raises dg.Failure (no retry) when another run holds the agent, or the fingerprint or newer
        votes were trained on already: trying again would not help.
        """
        try:
            claim = self.claims.claim(
                agent_id, mark, watermark, holder=holder, asked_by=asked_by, again=again
            )
            self._refuse_if_taken_back(claim)
            if not again:
                self._refuse_if_overtaken(claim)
        except ClaimRefused as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        return claim

    def _refuse_if_taken_back(self, claim: Claim) -> None:
        """Let the claim go and raise ClaimRefused where votes of it were taken back since.

        A run may wait in the queue meanwhile, and what is left may be too little for a turn.
        """
        if self.store.withdrawn_from(claim.agent_id, claim.watermark):
            self.claims.let_go(claim.token)
            raise ClaimRefused(
                f"votes of agent {claim.agent_id!r} were taken back while this run waited, and it "
                f"was to take those up to {claim.watermark}; nothing else is lost: the next turn "
                "takes what is left and what is new"
            )

    def _refuse_if_overtaken(self, claim: Claim) -> None:
        """Let the claim go and raise ClaimRefused where votes newer than its own were trained on.

        A run may wait in the queue while another one trains what came in since; from then on its
        turn would take those votes back. Looked at once the claim is held: nobody comes between.
        """
        last = self.claims.last_done(claim.agent_id)
        trained = last.watermark if last else 0
        # After an erasure the newest votes that are left may well be older than that.
        newest = snapshot.newest_seq(self.database, claim.agent_id, up_to=trained)
        if 0 < claim.watermark < newest:
            self.claims.let_go(claim.token)
            raise ClaimRefused(
                f"agent {claim.agent_id!r} was trained on votes up to number {newest} while this "
                f"run waited, and it was to take those up to {claim.watermark}; nothing is lost: "
                "the next turn takes what is new, and `again` trains from the older ones"
            )

    def _keep_alive(self, token: int) -> None:
        """Keep the heartbeat going to the run's end, between its steps too.

        Raises ClaimLost where the claim is another's by now.
        """
        self.claims.beat(token)
        if token not in self._beating:
            kept = self.claims.kept_alive(token)
            kept.__enter__()
            self._beating[token] = kept

    @contextmanager
    def turn(self, context: dg.AssetExecutionContext) -> Iterator[Turn]:
        """Yield the turn this run holds, its claim kept alive from here to the run's end.

        Once another has taken the claim over, what the block still writes is refused.
        """
        claim = self._claim_of(context.run)
        if claim is None:
            raise dg.Failure(
                "needed the turn that feedback_snapshot begins, found none in this run; run the "
                "job `retrain`, or materialise this asset together with everything upstream of it, "
                "from feedback_snapshot on",
                allow_retries=False,
            )
        try:
            self._keep_alive(claim.token)
            with writing_while(partial(self.claims.check, claim.token)):
                yield self._turn(claim, context.run.tags)
        except PipelineError as error:
            # What the engine refuses it would refuse again; crashes stay retryable.
            raise dg.Failure(f"{type(error).__name__}: {error}", allow_retries=False) from error

    def _claim_of(self, run: dg.DagsterRun) -> Claim | None:
        """Return the run's claim; a run that a person set going again claims anew what had failed.

        Raises dg.Failure where another run has it by now, and where somebody was erased since, or
        votes of it were taken back: what was trained of it had learned from them.
        """
        claim = self.claims.of_holder(run.root_run_id or run.run_id)
        if claim is None or run.parent_run_id is None or claim.state not in ("failed", "lost"):
            return claim
        if (gone := taken_out_since(self.database, claim)) is not None:
            raise dg.Failure(
                "needed all votes that this turn had begun to learn from, found that "
                f"{gone} since; a new turn learns from what is left: `make train "
                f"AGENT={claim.agent_id}`, or the job `retrain`",
                allow_retries=False,
            )
        return self._claim(
            claim.agent_id,
            claim.fingerprint,
            claim.watermark,
            holder=claim.holder,
            asked_by="person",
            again=self.claims.verdicts_before(claim) > 0,
        )

    def begin_bootstrap_if_alone(self, context: dg.AssetExecutionContext) -> None:
        """Begin the turn that only trains version 0 from seeds, where this run has no other."""
        if self._claim_of(context.run) is None:
            self.begin_turn(context, bootstrap_mark(agent_of(context)), 0)

    def tracked(self, turn: Turn) -> AbstractContextManager[TrackedRun]:
        """Return the turn's one MLflow run; every asset of the turn adds to the same.

        It is RUNNING until the turn has come to its verdict, or to another end. Its parameters are
        what this attempt's stages were given: a setting that a person changes once its stage has
        begun is no other work, and makes no other run.
        """
        return self.registry.run(
            turn.agent_id,
            fingerprint=turn.fingerprint,
            stage="turn",
            parameters={
                "fingerprint": turn.fingerprint,
                "watermark": turn.watermark,
                **flattened(_recipe_of(turn, attempt=turn.token)),
            },
        )

    def end_without_verdict(self, claim: Claim, why: str | None, status: Ended) -> None:
        """Close the claim of a turn that ended before its verdict, and its run in MLflow.

        Without a `why` it trained nothing and counts as no attempt. Raises ClaimLost where the
        claim is another's by now, and the run with it.
        """
        # First: whom MLflow keeps waiting is free.
        if why is None:
            self.claims.let_go(claim.token)
        else:
            self.claims.finish(claim.token, "failed", why)
        try:
            self.registry.end_runs(claim.agent_id, claim.fingerprint, status)
        except RegistryError as error:
            log.warning("a turn's run was not ended", agent=claim.agent_id, reason=str(error))

    def rows(self, turn: Turn) -> int:
        """Return how many votes the turn learns from; 0 for one that had only seeds."""
        taken = snapshot.find(self.database, turn.agent_id, turn.fingerprint)
        return taken.rows if taken else 0

    def lineage(self, turn: Turn, **counts: int) -> dict[str, Any]:
        """Return everything a version must be able to say about where it came from."""
        rewards = {
            job: folder_sha256(turn.work / "reward" / job)
            for job in JOBS
            if (turn.work / "reward" / job).is_dir()
        }
        before = stages.rewards_before(turn)
        if before is not None and not (before / "reward").is_dir():
            before = None  # it only trained version 0
        recipe = _recipe_of(turn)
        places = [datasets.place_of(turn.data / name) for name in stages.DATA_SETS]
        lines = {path.name: path for path in places if path.exists()}
        return {
            "fingerprint": turn.fingerprint,
            "watermark": turn.watermark,
            "token": turn.token,
            "votes": self.rows(turn),
            "counts": {
                **{n.partition(".")[0]: count_lines(p) for n, p in lines.items()},
                **counts,
            },
            "data": {name: file_sha256(path) for name, path in lines.items()},
            "reward_models": rewards,
            **_training_of(turn),
            **_evaluation_of(turn),
            "base": self._made_from(turn.agent_id).get("base", recipe["policy"]["base"]),
            "started_from": str(turn.champion) if turn.champion else None,
            "baseline": str(turn.baseline) if turn.baseline else None,
            "previous": str(before) if before else None,
            "recipe": recipe,
            **_stage_recipes(turn, recipe),
            "code": code_version(),
            "seed": recipe["training"]["seed"],
        }

    def promote_if_due(self, turn: Turn) -> str:
        """Promote this turn's version if the gate passed and nobody has to be asked; say which."""
        began, _ = self._began_with(turn.agent_id, turn.work, turn.token)
        return promote_if_due(turn, began, self.ledger)

    def _folder_of(self, claim: Claim, settings: Settings) -> Path:
        verdicts = self.claims.verdicts_before(claim)
        return settings.turn_folder(claim.agent_id, claim.fingerprint, verdicts)

    def finish_bootstrap(self, turn: Turn) -> None:
        """Close the claim of a turn that only had to train version 0."""
        if turn.fingerprint == bootstrap_mark(turn.agent_id):
            self.registry.end_runs(turn.agent_id, turn.fingerprint, "FINISHED")
            self.claims.finish(turn.token, "done", "version 0 trained from seeds")

    def _began_with(
        self, agent_id: str, work: Path, token: int
    ) -> tuple[ModelVersion | None, ModelVersion | None]:
        """Return the champion and the baseline that the turn began with, whoever they are by now.

        What the turn trains starts at the one and is held against both: a step that looked again
        would train over the files of the turn's own version, where an attempt died after that was
        promoted, or away from another reference than the step before. Only another attempt begins
        anew, where the champion has changed and the turn has no version yet: one that was rolled
        back is nothing to start from. None before version 0.
        """
        file, ledger = work / BEGAN, self.ledger
        began: dict[str, int] = read_json(file) if file.exists() else {}
        if token > began.get("token", 0):
            champion, baseline = ledger.champion(agent_id), ledger.baseline(agent_id)
            if champion is None or baseline is None:  # version 0 is trained first
                return None, None
            policy = (work / "ppo" / "policy").resolve()
            if not began or (
                began["champion"] != champion.version
                and all(v.path.resolve() != policy for v in ledger.versions(agent_id))
            ):
                began = {"champion": champion.version, "baseline": baseline.version}
            write_json(file, {**began, "token": token})
        baseline = (
            ledger.version(agent_id, int(began["baseline"]))
            if "baseline" in began  # turns of older code did not write it down
            else ledger.baseline(agent_id)
        )
        return ledger.version(agent_id, int(began["champion"])), baseline

    def _turn(self, claim: Claim, tags: Mapping[str, str] | None = None) -> Turn:
        settings = asked_for(self.settings(claim.agent_id), tags or {})
        folder = settings.agent_folder(claim.agent_id)
        work = self._folder_of(claim, settings)
        champion, baseline = self._began_with(claim.agent_id, work, claim.token)
        before = self.claims.last_done(claim.agent_id)
        if before is not None and before.fingerprint == claim.fingerprint:
            before = None  # trained on again: the same votes
        return Turn(
            agent_id=claim.agent_id,
            fingerprint=claim.fingerprint,
            watermark=claim.watermark,
            token=claim.token,
            data=folder / "snapshots" / claim.fingerprint[:16],
            work=work,
            baseline=baseline.path if baseline else None,
            champion=champion.path if champion else None,
            settings=settings,
            previous=self._folder_of(before, settings) if before else None,
        )


def agent_of(context: dg.AssetExecutionContext) -> str:
    """Return the agent that the run is about; raises dg.Failure (no retry) where none was chosen.

    Dagster's Launchpad starts a job without asking for a partition.
    """
    if not context.has_partition_key:
        raise dg.Failure(
            f"needed an agent, found no partition in run {context.run.run_id[:8]}; choose the "
            "agent as the partition where the job or the asset is materialised",
            allow_retries=False,
        )
    agent_id: str = context.partition_key
    return agent_id


def asked_for(settings: Settings, tags: Mapping[str, str]) -> Settings:
    """Return the settings with what whoever asked for this one run wants otherwise.

    Raises ConfigError where a tag holds none of what the API takes: a person may write any there.
    """
    wanted: dict[str, Any] = {}
    if MAX_STEPS in tags:
        words = f"a whole number from 1 to {MOST_STEPS:,}"
        wanted["updates"] = _wish(tags, MAX_STEPS, int, most=MOST_STEPS, needed=words)
    if LEARNING_RATE in tags:
        words = "a number above 0 and at most 1"
        wanted["learning_rate"] = _wish(tags, LEARNING_RATE, float, most=1, needed=words)
    if not wanted:
        return settings
    return settings.model_copy(update={"ppo": dataclasses.replace(settings.ppo, **wanted)})


def _wish(
    tags: Mapping[str, str], name: str, number: type[int | float], *, most: int, needed: str
) -> int | float:
    """Return the number above 0 that a run's tag holds; raises ConfigError for any other."""
    try:
        found = number(tags[name])
    except ValueError:
        found = 0
    if not 0 < found <= most:
        raise ConfigError(
            f"the run's tag {name} needed {needed}, found {tags[name]!r}; correct it, or leave it "
            "out to train as the recipe says"
        )
    return found


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"a.b": value} for {"a": {"b": value}}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _recipe_of(turn: Turn, *, attempt: int | None = None) -> dict[str, Any]:
    """Return the recipe the turn went by, or one attempt at it, as `shown` tells one.

    Each step reads it anew, so that what a person corrects counts from the next one on. What a
    stage trained with is what it was given, whatever stands there since; `_stage_recipes` tells
    what another stage was given otherwise.
    """
    recipe = shown(turn.settings)
    for stage, sections in TRAINED_WITH.items():
        given = turn.work / f"{stage}.spec.json"
        if given.exists():
            spec = read_json(given)
            if attempt in (None, spec["token"]):
                recipe |= {name: spec["settings"][name] for name in sections}
    return recipe


def _stage_recipes(turn: Turn, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return, where there are any, the sections a stage was given otherwise than the recipe says.

    A person may change the seed, say, between the reward models and PPO: the recipe tells PPO's.
    """
    found = {}
    for stage in ("baseline", "reward", "ppo"):
        given = turn.work / f"{stage}.spec.json"
        if given.exists():
            settings = read_json(given)["settings"]
            own = {name: settings[name] for name in LEARNT_WITH if settings[name] != recipe[name]}
            if own:
                found[stage] = own
    return {"stage_recipes": found} if found else {}


def as_maximised(turn: Turn) -> Turn:
    """Return the turn with the reward functions PPO was given, whatever the recipe names since."""
    given = settings_from(read_json(turn.work / "ppo.spec.json")["settings"]).reward
    functions = {name: getattr(given, name) for name in stages.MAXIMISED_BY}
    reward = turn.settings.reward.model_copy(update=functions)
    settings = turn.settings.model_copy(update={"reward": reward})
    return dataclasses.replace(turn, settings=settings)


def _training_of(turn: Turn) -> dict[str, Any]:
    """Return what PPO reached, where this turn has trained: the proxy's score on watch prompts."""
    path = turn.work / "ppo" / "result.json"
    if not path.exists():
        return {}
    result = read_json(path)
    return {
        "training": {
            "updates": len(result["reward_history"]),
            "reward_mean": result["final_reward_mean"],
            "reward_std": result["final_reward_std"],
            "seconds": round(math.fsum(result["seconds"].values()), 1),
        }
    }


def _evaluation_of(turn: Turn) -> dict[str, Any]:
    """Return what the comparison found, where it came to that: the gate model's score in short."""
    report = report_in(turn.work)
    if report is None:
        return {}
    return {
        "evaluation": {
            "score": report.numbers["candidate"][GATE_SCORE].value,
            "score_std": statistics.pstdev(report.scores["candidate"]),  # between prompts
            "over_champion": report.differences["champion"][GATE_SCORE].value,
            "win_rate": report.win_rates["champion"].value,
        }
    }


def count_lines(path: Path) -> int:
    """Return how many lines a file has."""
    with datasets.reading(path) as file:
        return sum(1 for _ in file)


def code_version() -> str:
    """Return the commit this code is at, `+changes` where files differ, `unknown` without git."""
    root = Path(__file__).resolve().parents[1]
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+changes"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.stdout.strip()


def bootstrap_mark(agent_id: str) -> str:
    """Return the fingerprint that stands for "no feedback yet": version 0 is trained from seeds."""
    return hashed("bootstrap", agent_id)
