"""A loop small enough for tests: a minute recipe, people who need no model, turns in process."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import sqlalchemy as sa
import yaml

from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.records import Prompt

if TYPE_CHECKING:
    import dagster as dg

    from resources.pipeline import Pipeline
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.registry.ledger import ModelVersion
    from rlhf_pipeline.simulation.play import Day

UPDATES = 20  # of PPO: enough to be killed in the middle of
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}

DAGSTERS_STORAGE = (
    "dagster._core.storage.event_log.sqlite.sqlite_event_log",
    "dagster._core.storage.runs.sqlite.sqlite_run_storage",
)

OPEN_GATE = {
    "held_out_prompts": 2.0,
    "score_vs_baseline": -100.0,
    "score_vs_champion": -100.0,
    "win_rate_vs_champion": -1.0,
    "length_at_least": 0.0,
    "length_at_most": 100.0,
    "diversity": -100.0,
    "repetition": 100.0,
    "truncation": 1.0,
    "reward_over_chance": -1.0,  # eight pairs are held out
}
"""Limits that a model of two layers meets after seconds of training."""

RECIPE: Mapping[str, Any] = {
    "policy": {
        "max_prompt_tokens": 48,
        "max_completion_tokens": 16,
        "tiny": {"vocabulary": 320, "layers": 2, "width": 32, "heads": 2, "context": 64},
    },
    "sft": {"seed_conversations": "simulated:100", "epochs": 1, "learning_rate": 1.5e-3},
    "reward": {"epochs": 1, "min_pairs": 5, "batch_size": 64},
    "ppo": {
        "updates": UPDATES,
        "rollouts_per_update": 16,
        "epochs": 1,
        "minibatches": 1,
        "learning_rate": 1e-3,
        "critic": "shared",
        "evaluate_every": 4,
        "checkpoint_every": 1,
        "long_prompts": "keep_latest",
    },
    "training": {"watch_prompts": 8, "stage_timeout_minutes": 5},
    "evaluation": {"prompts": 16, "bootstrap_samples": 200, "samples_shown": 2},
    "promotion": {"automatic": True, "gate": OPEN_GATE},
    "continuous_learning": {
        "min_new_feedback": 40,
        "min_age_seconds": 0,
        "cool_down_minutes": 0,
    },
}


def write_recipe(path: Path, state: Path, **changes: Mapping[str, Any]) -> Path:
    """Write the minute recipe with some sections changed, e.g. promotion={"automatic": False}."""
    tree: dict[str, Any] = {**RECIPE, "state_dir": str(state)}
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def keep_dagsters_engines(patch: pytest.MonkeyPatch) -> None:
    """Let Dagster's SQLite storage keep its engines, which hold no connection.

    It makes one for every question, and each compiles its SQL anew: a quarter of a turn's time.
    """
    kept: dict[str, sa.Engine] = {}

    def create_engine(url: str, **options: Any) -> sa.Engine:
        name = f"{url} {options}"
        if name not in kept:
            kept[name] = sa.create_engine(url, **options)
        return kept[name]

    for module in DAGSTERS_STORAGE:
        patch.setattr(f"{module}.create_engine", create_engine)


def chat(
    store: FeedbackStore, agent_id: str, events: int, *, seed: int = 0, pair_share: float = 0.7
) -> Day:
    """Let people vote on answers that need no model; every vote is about texts of this seed."""
    from rlhf_pipeline.simulation.people import population
    from rlhf_pipeline.simulation.play import play
    from rlhf_pipeline.simulation.world import THINGS, TOPICS, Question, good_answer, question_of

    rng = random.Random(f"answers {agent_id} {seed}")

    def answer(prompts: Sequence[Prompt]) -> list[str]:
        """Answer the question, or another one."""
        asked = [question_of(prompt[-1].content) for prompt in prompts]
        other = Question(rng.choice(THINGS), rng.choice(TOPICS), "")
        return [good_answer(rng.choice((question, other)), rng) for question in asked]

    return play(
        store,
        agent_id,
        answer,
        population(40, seed),
        model_version=0,
        events=events,
        pair_share=pair_share,
        seed=seed,
    )


@dataclass(frozen=True)
class Loop:
    """A state folder, its pipeline and a Dagster instance; each test has agents of its own."""

    state: Path
    instance: dg.DagsterInstance

    @cached_property
    def pipeline(self) -> Pipeline:
        """Return the resource on this state folder."""
        from resources.pipeline import Pipeline

        return Pipeline(recipe=str(write_recipe(self.state / "minute.yaml", self.state)))

    def agent(self, name: str, **changes: Mapping[str, Any]) -> str:
        """Make an agent known, with a recipe of its own where something is changed; return its id.

        What one test leaves held would refuse another for as long as a lease lives: the id holds
        the test, so two tests never share one, whatever they call it and wherever they run.
        """
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        return self.known(f"{name}-{sha256(test.encode()).hexdigest()[:6]}", **changes)

    def known(self, agent_id: str, **changes: Mapping[str, Any]) -> str:
        """Make the agent of this id known, as `agent` does; return the id."""
        self.pipeline.store.ensure_agent(agent_id)
        if changes:
            path = write_recipe(self.state / f"{agent_id}.yaml", self.state, **changes)
            self.pipeline.store.set_agent(agent_id, recipe=str(path))
        self.instance.add_dynamic_partitions("agents", [agent_id])
        return agent_id

    def run(
        self,
        job: str,
        agent_id: str | None,
        *,
        compute: Any = None,
        snapshot: Mapping[str, Any] | None = None,
        only: Sequence[str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        """Run a job for an agent in this process; a failed step does not raise."""
        import dagster as dg

        from resources.compute import Compute
        from rlhf_pipeline.definitions import definitions

        config: dict[str, Any] = dict(QUIET)
        if snapshot is not None:
            config["ops"] = {"feedback_snapshot": {"config": dict(snapshot)}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLHF_RECIPE", str(self.pipeline.recipe))
            patch.setattr(Compute, "start_ahead", lambda _: None)  # what imports torch for nothing
            return (
                definitions()
                .resolve_job_def(job)
                .execute_in_process(
                    instance=self.instance,
                    partition_key=agent_id,
                    tags=dict(tags or {}),
                    run_config=config,
                    resources=None if compute is None else {"compute": compute},
                    asset_selection=None if only is None else [dg.AssetKey(n) for n in only],
                    raise_on_error=False,
                )
            )

    def turn_folder(self, agent_id: str) -> Path:
        """Return the folder of the agent's newest turn."""
        claim = self.pipeline.claims.history(agent_id)[-1]
        verdicts = self.pipeline.claims.verdicts_before(claim)
        return self.pipeline.settings().turn_folder(agent_id, claim.fingerprint, verdicts)

    def version(self, agent_id: str, number: int) -> ModelVersion:
        """Return a registered version."""
        return self.pipeline.ledger.version(agent_id, number)

    def aliases(self, agent_id: str) -> dict[str, int]:
        """Return {alias: ledger version} as MLflow has it."""
        found = self.pipeline.registry.client.get_registered_model(f"rlhf-{agent_id}").aliases
        by_number = {v.mlflow_version: v.version for v in self.pipeline.ledger.versions(agent_id)}
        return {alias: by_number[str(number)] for alias, number in found.items()}


def retrain_job() -> dg.JobDefinition:
    """Return the job `retrain`, for whoever needs a function that does."""
    from rlhf_pipeline.definitions import definitions

    return definitions().resolve_job_def("retrain")


def going_on(
    instance: dg.DagsterInstance, run_id: str, agent_id: str
) -> AbstractContextManager[dg.JobExecutionResult]:
    """Set a failed run going again from where it failed, as a person does on Dagster's page."""
    import dagster as dg

    from resources.pipeline import AGENT

    return dg.execute_job(
        dg.reconstructable(retrain_job),
        instance,
        reexecution_options=dg.ReexecutionOptions.from_failure(run_id, instance),
        run_config=QUIET,
        tags={AGENT: agent_id},
    )


def failures(result: dg.ExecuteInProcessResult | dg.JobExecutionResult) -> str:
    """Return why steps failed, innermost cause last; empty where none did."""
    said = []
    for event in result.all_events:
        if event.is_step_failure:
            error = event.step_failure_data.error
            while error is not None:
                said.append(f"{event.step_key}: {error.message}")
                error = error.cause
    return "\n".join(said)


@dataclass(frozen=True)
class FirstTurn:
    """The run of the first turn and what was done to it."""

    result: dg.ExecuteInProcessResult
    agent_id: str
    work: Path  # the turn's folder
    killed_after_update: int  # the newest that the killed process had reported


def play_first_turn(loop: Loop, launcher: list[str]) -> FirstTurn:
    """Run one turn with real training; kill -9 its PPO process after three updates."""
    from resources.compute import Compute

    agent_id = loop.known("shop")
    chat(loop.pipeline.store, agent_id, 160)
    killed: list[int] = []

    def kill_while_training() -> None:
        progress = loop.pipeline.settings().agent_folder(agent_id) / "turns"
        deadline = time.monotonic() + 300
        while not killed and time.monotonic() < deadline:
            time.sleep(0.05)
            for path in progress.glob("*/ppo.progress.jsonl"):
                whole = path.read_text().rpartition("\n")[0].splitlines()
                update = max((json.loads(line).get("update", 0) for line in whole), default=0)
                for process in ppo_workers() if update >= 3 else []:
                    process.kill()
                    killed.append(update)

    thread = threading.Thread(target=kill_while_training, daemon=True)
    thread.start()
    result = loop.run("retrain", agent_id, compute=Compute(launcher=launcher))
    thread.join(1)
    return FirstTurn(result, agent_id, loop.turn_folder(agent_id), killed[0] if killed else -1)


def ppo_workers() -> list[psutil.Process]:
    """Return the PPO processes this process has started."""
    found = []
    for process in psutil.Process().children():
        try:
            if process.cmdline()[-4:-1] == ["-m", "resources.worker", "ppo"]:
                found.append(process)
        except psutil.Error:
            continue  # another child, which ended just now
    return found


def save_alternating(folder: Path) -> Path:
    """Save a tiny policy whose chat template refuses what Gemma's and Mistral's do; return where.

    A system message, and turns that do not alternate, the user's first.
    """
    from rlhf_pipeline.policy.loading import save_policy
    from rlhf_pipeline.policy.tiny import build_tiny

    sizes = {"vocabulary": 320, "layers": 1, "width": 16, "heads": 2, "context": 128}
    policy = build_tiny(["Where is my order?"], **sizes, seed=0)
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    save_policy(policy, folder)
    return folder


def replaying(source: Path) -> Any:
    """Return a Compute that hands out what the stages left in a turn's folder; nothing is trained.

    Everything but the training processes is real: claims, snapshots, checks, MLflow, the ledger.
    The gate judges that turn's real comparison by the limits and the votes of the turn at hand.
    """
    from resources.compute import Compute
    from resources.worker import specification
    from rlhf_pipeline.evaluation.facts import gate_facts
    from rlhf_pipeline.evaluation.gate import decide
    from rlhf_pipeline.evaluation.report import EvaluationReport
    from rlhf_pipeline.stages import gate_limits

    class Replay(Compute):
        """Copies files."""

        def run_stage(self, context: Any, stage: str, turn: Any) -> dict[str, Any]:
            """Return the earlier result with its paths in this turn's folder."""
            result = read_json(source / f"{stage}.json")["result"]
            folder = {"baseline": "sft"}.get(stage, stage)
            turn.work.mkdir(parents=True, exist_ok=True)
            write_json(turn.work / f"{stage}.spec.json", specification(turn))
            shutil.copytree(source / folder, turn.work / folder, dirs_exist_ok=True)
            if stage == "evaluation":
                report = EvaluationReport.from_json(result["report"])
                facts = gate_facts(turn.data, turn.data, None)  # of the votes alone
                result["gate"] = decide(report, gate_limits(turn.settings), facts=facts).to_json()
            text = str(source)
            for key in ("path", "result"):
                if key in result:
                    result[key] = result[key].replace(text, str(turn.work))
            write_json(turn.work / f"{stage}.json", {"work": "replayed", "result": result})
            return dict(result)

    return Replay()
