"""Agent policies: a small published contract for programs that send scores and ask for training.

    POST /api/policies/feedback/{agent_id}      one score of one answer
    POST /api/policies/train_policy/{agent_id}  what training would take, or a training run
    GET  /api/policies/{agent_id}               the agent's versions

A step is one PPO update. `runId` in feedback is the caller's: the id of an interaction, which then
says what was answered, or any other, and the texts count as sent; a run that scores the same answer
again has changed its mind. Rewards are the proxy's scores, centred on the baseline's completions.
Training is Dagster's (dagster_runs.py): 503 where none answers.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from weakref import WeakValueDictionary

import sqlalchemy as sa
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from rlhf_pipeline.config import Settings, own_settings
from rlhf_pipeline.errors import (
    ConfigError,
    FeedbackError,
    FeedbackRefused,
    OrchestratorAway,
    TooManyVotes,
)
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.feedback.claims import NO_TRAINING, ClaimBook
from rlhf_pipeline.feedback.lines import RawRow, parse
from rlhf_pipeline.feedback.rules import (
    LONGEST_COMMENT,
    LONGEST_KEY,
    LONGEST_PROMPT,
    LONGEST_TEXT,
    Rule,
    check_agent_id,
    check_event,
    refuse,
)
from rlhf_pipeline.records import Feedback, FeedbackKind, hash_rater, now, user_prompt, uuid7
from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
from rlhf_pipeline.serving.contract import (
    KEY_HEADER,
    Closed,
    Refusal,
    Text,
    Told,
    refusals,
    words_of,
)
from rlhf_pipeline.serving.dagster_runs import LEARNING_RATE, MAX_RUNTIME, MAX_STEPS, WATERMARK
from rlhf_pipeline.serving.feedback_api import (
    AWAY,
    CONFLICT,
    NOT_JSON,
    REFUSED,
    TOO_LARGE,
    Answer,
    Inbox,
    answer,
    read_body,
    refusal_of,
    too_many,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.serving.dagster_runs import DagsterRuns

MIN_SAMPLES = 10  # published; validation.min_rows may ask for more
UPSTREAM_FAILED = 502
LOOK_SECONDS = 1.0  # between looks at a run somebody waits for
MINUTES_PER_STEP = 0.1  # of a whole turn, before the agent's own turns say: recipe tiny, two cores

Body = TypeVar("Body", bound=BaseModel)


class ScoreBody(Closed):
    """One score of one answer."""

    prompt: Annotated[Text, Field(max_length=LONGEST_PROMPT)]
    response: Annotated[Text, Field(max_length=LONGEST_TEXT)]
    score: Annotated[float, Field(ge=0, le=1)]
    runId: Annotated[Text, Field(min_length=1, max_length=LONGEST_KEY)]
    notes: Annotated[Text, Field(max_length=LONGEST_COMMENT)] | None = None


class TrainBody(Closed):
    """What to train, or what training would take."""

    dryRun: bool = False
    maxSteps: Annotated[int, Field(ge=1, le=100_000)] | None = None  # None: the recipe's
    learningRate: Annotated[float, Field(gt=0, le=1)] | None = None  # None: the recipe's


class StoredScore(Told):
    """A score that is synced to disk."""

    id: str
    agentId: str
    score: float
    createdAt: str | None


class BaseModelConfig(Told):
    """What would be trained."""

    base_model: str
    use_lora: bool
    learning_rate: float


class DryRun(Told):
    """What training would take."""

    status: Literal["dry_run"]
    feedbackCount: int
    estimatedSteps: int
    estimatedTimeMinutes: float
    scoreMean: float | None
    scoreStd: float | None
    modelConfig: BaseModelConfig


class Started(Told):
    """A run that was asked for."""

    status: Literal["started"]
    runId: str


class Trained(Told):
    """What a run has left."""

    status: Literal["trained"]
    policyId: str
    version: str
    modelPath: str
    rewardModelPath: str
    feedbackCount: int
    trainingSteps: int
    rewardMean: float | None
    rewardStd: float | None


class TrainRefusal(Refusal):
    """Why nothing is trained: too few samples, or a run that is at work, done or failed."""

    feedbackCount: int = 0
    missing: int = 0
    runId: str = ""


class PolicyMetrics(Told):
    """What a version was trained on and to."""

    feedbackCount: int
    rewardMean: float | None
    rewardStd: float | None


class PolicyVersion(Told):
    """One version of an agent."""

    id: str
    agentId: str
    version: str
    createdAt: str
    metrics: PolicyMetrics


@dataclass(frozen=True)
class Policies:
    """What the routes work with."""

    settings: Settings
    store: FeedbackStore
    inbox: Inbox  # into the store, with everybody else's votes
    runs: DagsterRuns
    is_ending: Callable[[], bool] = lambda: False  # whether the service was asked to stop
    one_at_a_time: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary
    )

    @property
    def claims(self) -> ClaimBook:
        """Return the claims of this store."""
        return ClaimBook(self.store.database)

    @property
    def ledger(self) -> PromotionLedger:
        """Return the versions of this store."""
        return PromotionLedger(self.store.database, self.settings.state_dir)

    def settings_of(self, agent_id: str) -> Settings:
        """Return the agent's settings: its own recipe's, where it has one."""
        return own_settings(self.settings, self.store.recipe_of(agent_id))


def add_policy_routes(app: FastAPI, policies: Policies) -> None:
    """Add the three routes."""

    async def post_score(agent_id: str, request: Request) -> JSONResponse:
        """Store one score, and answer with its id once it is synced."""
        if not policies.settings.feedback.enabled:
            return answer(AWAY, {"error": "feedback.enabled is off"})
        body = await read_body(request)
        if not isinstance(body, bytes):
            return body
        key = request.headers.get("idempotency-key")
        try:
            return answer(*await _settled(take_score(policies, agent_id, body, key)))
        except TooManyVotes as refusal:
            return too_many(refusal)

    async def post_training(
        agent_id: str, request: Request, wait: bool = False, again: bool = False
    ) -> JSONResponse:
        """Say what training would take, or ask Dagster for it and, with `wait`, follow it.

        `again` trains once more from feedback that was trained on already.
        """
        body = await read_body(request)
        if not isinstance(body, bytes):
            return body
        # Asked twice in one moment, the second finds the first one's run.
        async with policies.one_at_a_time.setdefault(agent_id, asyncio.Lock()):
            code, told = await _settled(run_in_threadpool(train, policies, agent_id, body, again))
        if wait and told.get("status") == "started":
            code, told = await _followed(policies, agent_id, told["runId"], request)
        return answer(code, told)

    async def list_policies(agent_id: str) -> JSONResponse:
        """List the agent's versions, oldest first."""
        return answer(*await _settled(run_in_threadpool(listed, policies, agent_id)))

    at, tags = "/api/policies", ["policies"]
    unfit = refusals(TOO_LARGE, NOT_JSON, AWAY)
    app.add_api_route(
        f"{at}/feedback/{{agent_id}}",
        post_score,
        methods=["POST"],
        tags=list(tags),
        response_model=StoredScore,
        responses={**unfit, **refusals(CONFLICT, REFUSED)},
        openapi_extra={**_takes(ScoreBody), "parameters": [KEY_HEADER]},
    )
    app.add_api_route(
        f"{at}/train_policy/{{agent_id}}",
        post_training,
        methods=["POST"],
        tags=list(tags),
        response_model=DryRun | Started | Trained,
        responses={
            **unfit,
            **refusals(CONFLICT, REFUSED, UPSTREAM_FAILED, AWAY, model=TrainRefusal),
        },
        openapi_extra=_takes(TrainBody),
    )
    app.add_api_route(
        f"{at}/{{agent_id}}",
        list_policies,
        methods=["GET"],
        tags=list(tags),
        response_model=list[PolicyVersion],
        responses=refusals(REFUSED, AWAY),
    )


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": schema}}


async def _settled(answered: Awaitable[tuple[int, Any]]) -> tuple[int, Any]:
    """Return the answer; every refusal has its status here, but TooManyVotes, which says when."""
    try:
        return await answered
    except TooManyVotes:
        raise
    except FeedbackRefused as refusal:
        return REFUSED, refusal_of(refusal)
    except FeedbackError as conflict:
        return CONFLICT, {"error": str(conflict)}
    except ConfigError as error:
        return REFUSED, {"error": str(error)}
    except OrchestratorAway as error:
        return AWAY, {"error": str(error)}
    except sa.exc.DBAPIError:  # locked, full, read-only, damaged or gone
        return AWAY, {"error": "the store cannot be used now; send it again"}


async def _followed(
    policies: Policies, agent_id: str, run_id: str, request: Request
) -> tuple[int, Any]:
    """Look at a run until it ends, its time is up, who asked has gone or the service is to stop.

    Return the last answer.
    The run goes on while Dagster or the store does not answer, so looking does as well.
    """
    limit = 60 * policies.settings.continuous_learning.deadline_minutes
    deadline = time.monotonic() + limit
    code, told = 200, {"status": "started", "runId": run_id}
    while time.monotonic() < deadline and not (
        policies.is_ending() or await request.is_disconnected()
    ):
        await asyncio.sleep(LOOK_SECONDS)
        code, told = await _settled(run_in_threadpool(outcome, policies, agent_id, run_id))
        if code != AWAY and told.get("status") != "started":
            break
    return code, told if code == 200 else {**told, "runId": run_id}


async def take_score(policies: Policies, agent_id: str, body: bytes, key: str | None) -> Answer:
    """Store one score, and return what to say.

    Raises what its rules say, and TooManyVotes where one run scores too fast.
    """
    event = await run_in_threadpool(_score, policies.store, agent_id, body, key)
    [stored] = await policies.inbox.put([event])
    if isinstance(stored, FeedbackError):
        raise stored
    created = await run_in_threadpool(policies.store.received_at, stored.feedback_id)
    return 200, {
        "id": stored.feedback_id,
        "agentId": agent_id,
        "score": event.number,
        "createdAt": None if created is None else created.isoformat(),
    }


def _score(store: FeedbackStore, agent_id: str, body: bytes, key: str | None) -> Feedback:
    """Return a body's score: of an interaction where runId is one's id, else of the texts."""
    check_agent_id(agent_id)
    said = _read(ScoreBody, body)
    voter = hash_rater(agent_id, f"run:{said.runId}")
    event = Feedback(
        agent_id=agent_id,
        kind=FeedbackKind.score,
        idempotency_key=f"sent:{uuid7()}" if key is None else key,
        prompt=user_prompt(said.prompt),
        completion=said.response,
        number=said.score,
        rater_id=voter,
        origin="policies",
        comment=said.notes,
    )
    interaction = store.interaction(said.runId) if len(said.runId) <= 36 else None
    if interaction is not None and interaction.agent_id == agent_id:
        if interaction.prompt[-1].content.strip() not in said.prompt:
            refuse(
                Rule.two_targets,
                "the question that the interaction named by runId was asked, alone or at the end "
                "of its conversation, or another runId",
                said.prompt,
            )
        if interaction.completion.strip() != said.response.strip():
            refuse(
                Rule.two_targets,
                "the response that the interaction named by runId gave, or another runId",
                said.response,
            )
        event = replace(event, interaction_id=said.runId, prompt=None, completion=None)
    check_event(event)
    return event


def train(policies: Policies, agent_id: str, body: bytes, again: bool) -> Answer:
    """Return what training would take, or ask Dagster for a run and return its id."""
    check_agent_id(agent_id)
    asked = _read(TrainBody, body)
    settings = policies.settings_of(agent_id)
    counts = policies.store.counts(agent_id)
    count, comments = sum(counts.values()), counts.get(FeedbackKind.comment, 0)
    needed, samples = max(MIN_SAMPLES, settings.validation.min_rows), count - comments
    if samples < needed:
        beside = f" beside {comments} comments, which train nothing" if comments else ""
        missing = needed - samples
        return REFUSED, {
            "error": f"needed {needed} feedback samples, found {samples}{beside}; "
            f"send {missing} more",
            "feedbackCount": count,
            "missing": missing,
        }
    if asked.dryRun:
        return 200, _estimate(policies, settings, agent_id, asked, count)
    row = policies.store.agent(agent_id)
    paused = None if row is None else row.paused_reason
    if not settings.training.enabled or paused is not None:
        why = "training.enabled is off" if paused is None else f"paused: {paused}"
        return AWAY, {"error": f"agent {agent_id} does not train now: {why}"}
    claims = policies.claims
    held = claims.held(agent_id)
    held = held if held and held.expires_at > now() else None
    if held and held.asked_by in NO_TRAINING:  # its holder is no run anybody could follow
        words = f"agent {agent_id} is being {NO_TRAINING[held.asked_by]}; ask again once it is over"
        return CONFLICT, {"error": words}
    busy = held.holder if held else policies.runs.at_work(agent_id)
    if busy is not None:
        return CONFLICT, {"error": f"agent {agent_id} is being trained", "runId": busy}
    watermark = snapshot.newest_seq(policies.store.database, agent_id)
    mark = snapshot.fingerprint(policies.store.database, agent_id, watermark)
    done = [c for c in claims.history(agent_id) if c.fingerprint == mark and c.state == "done"]
    if done and not again:
        words = f"these {count} samples were trained on already; send new ones, or ask ?again=true"
        return CONFLICT, {"error": words, "runId": done[-1].holder}
    run_id = policies.runs.start(
        agent_id,
        {"watermark": watermark, "again": again},
        {
            WATERMARK: str(watermark),
            MAX_RUNTIME: str(60 * settings.continuous_learning.deadline_minutes),
            MAX_STEPS: None if asked.maxSteps is None else str(asked.maxSteps),
            LEARNING_RATE: None if asked.learningRate is None else repr(asked.learningRate),
        },
    )
    return 200, {"status": "started", "runId": run_id}


def outcome(policies: Policies, agent_id: str, run_id: str) -> Answer:
    """Return what a run has trained, why it failed, or that it has started."""
    state = policies.runs.state(run_id)
    if state == "at work":
        return 200, {"status": "started", "runId": run_id}
    claim = policies.claims.of_holder(run_id)
    # An attempt that failed once its version was registered leaves it to the next to finish.
    tokens = [] if claim is None else [each.token for each in policies.claims.attempts(claim)]
    versions = [
        v
        for v in policies.ledger.versions(agent_id)
        if v.lineage.get("token") in tokens and "training" in v.lineage
    ]
    if state == "failed" or not versions:
        why = policies.runs.why(run_id) if state == "failed" else "it left no version"
        return UPSTREAM_FAILED, {"error": f"training failed: {why}", "runId": run_id}
    version = versions[-1]
    reached = version.lineage["training"]
    return 200, {
        "status": "trained",
        "policyId": _policy_id(version),
        "version": version.label,
        "modelPath": str(version.path),
        "rewardModelPath": str(version.work / "reward" / "proxy"),
        "feedbackCount": version.lineage.get("votes", 0),
        "trainingSteps": reached["updates"],
        "rewardMean": reached["reward_mean"],
        "rewardStd": reached["reward_std"],
    }


def listed(policies: Policies, agent_id: str) -> tuple[int, list[dict[str, Any]]]:
    """Return every version; one that no reward was maximised for (the baseline) has none."""
    check_agent_id(agent_id)
    return 200, [
        {
            "id": _policy_id(version),
            "agentId": agent_id,
            "version": version.label,
            "createdAt": version.created_at.isoformat(),
            "metrics": {
                "feedbackCount": version.lineage.get("votes", 0),
                "rewardMean": version.lineage.get("training", {}).get("reward_mean"),
                "rewardStd": version.lineage.get("training", {}).get("reward_std"),
            },
        }
        for version in policies.ledger.versions(agent_id)
    ]


def _estimate(
    policies: Policies, settings: Settings, agent_id: str, asked: TrainBody, count: int
) -> dict[str, Any]:
    ppo = settings.ppo
    wanted: dict[str, Any] = {"updates": asked.maxSteps, "learning_rate": asked.learningRate}
    ppo = replace(ppo, **{key: value for key, value in wanted.items() if value is not None})
    opinion = policies.store.opinion(agent_id)
    return {
        "status": "dry_run",
        "feedbackCount": count,
        "estimatedSteps": ppo.updates,
        "estimatedTimeMinutes": round(_minutes(policies, agent_id, ppo.updates), 2),
        "scoreMean": opinion.mean,
        "scoreStd": opinion.std,
        "modelConfig": {
            "base_model": settings.policy.base,
            "use_lora": settings.policy.lora.enabled,
            "learning_rate": ppo.learning_rate,
        },
    }


def _minutes(policies: Policies, agent_id: str, updates: int) -> float:
    """Return how long a turn of so many updates would take, by the medians of the agent's last."""
    reached = {
        v.lineage.get("token"): v.lineage["training"]
        for v in policies.ledger.versions(agent_id)
        if "training" in v.lineage
    }
    a_step: list[float] = []
    besides: list[float] = []  # the steps of a turn that its updates are not
    for claim in policies.claims.history(agent_id):
        training = reached.get(claim.token, {"updates": 0})
        if claim.state != "done" or not training["updates"]:
            continue
        took = (claim.heartbeat_at - claim.created_at).total_seconds() / 60
        # Versions from before it was kept do not say how long the updates alone took; of others it
        # is of all attempts, and the claim of the last.
        trained = training["seconds"] / 60 if "seconds" in training else took
        a_step.append(trained / training["updates"])
        besides.append(max(0.0, took - trained))
    if not a_step:
        return MINUTES_PER_STEP * updates
    return statistics.median(besides[-5:]) + statistics.median(a_step[-5:]) * updates


def _policy_id(version: ModelVersion) -> str:
    return f"{version.agent_id}:{version.version}"


def _read(model: type[Body], body: bytes) -> Body:
    """Return the body as its model. Raises FeedbackRefused naming the field that is wrong."""
    values = parse(RawRow(1, body))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ascii(".".join(str(part) for part in problem["loc"]))[:80]
        name = "a field's name" if problem["loc"] == () else name
        rule = {"missing": Rule.missing_field, "extra_forbidden": Rule.unknown_field}.get(
            problem["type"], Rule.wrong_type
        )
        raise FeedbackRefused(
            rule, f"{name}: {words_of(problem)}; mend it and send again"
        ) from error
