"""`rlhf simulate --nights N`: days of simulated people at the service, nights of the real loop.

1. Version 0 is trained (job `bootstrap`), the service and Dagster's daemon are started.
2. Each day people chat and vote over HTTP (simulation/visits.py); the day is what the plan says.
3. Each night lasts until nothing is due any more: files taken in, experiments looked at since the
   last vote, turns at their verdict. Nothing here asks for any of it: the daemon's sensors do.
4. What people saw is held against the hidden preference, which no training sees.

The clock: the agent's recipe says how long to wait, so that is where it is compressed (CLOCK); a
night is over when nothing would be due in a minute either, asked of `continuous.due` with that
moment; an attempt that failed is tried again with another day's votes. What this does not show:
what takes real days, such as alerts, keys that run out, retention.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from rich.console import Console

from automation import processes
from automation.bars import Bars, be_quiet
from automation.jobs import bootstrap, retrain
from automation.launch import run_job
from resources.pipeline import AGENT, Pipeline
from rlhf_pipeline.alerts import alerts_of
from rlhf_pipeline.config import RECIPES, Settings, load_settings
from rlhf_pipeline.continuous import Due, due
from rlhf_pipeline.database import interactions
from rlhf_pipeline.errors import ConfigError, PipelineError
from rlhf_pipeline.experiment.assignment import percent
from rlhf_pipeline.experiment.book import Experiment, ExperimentBook
from rlhf_pipeline.experiment.watch import WATCH
from rlhf_pipeline.feedback.claims import NO_TRAINING, Claim
from rlhf_pipeline.files import read_json, read_yaml, write_json, write_text
from rlhf_pipeline.overview import overview
from rlhf_pipeline.records import now
from rlhf_pipeline.simulation.nights import (
    Night,
    Report,
    Satisfaction,
    draw,
    plan,
    promises,
    to_markdown,
)
from rlhf_pipeline.simulation.people import Person, population
from rlhf_pipeline.simulation.play import assistant
from rlhf_pipeline.simulation.visits import (
    TRIGGER,
    Lived,
    Row,
    Service,
    drop,
    earlier_trial,
    live,
)
from rlhf_pipeline.simulation.world import hidden_preference

DAY_SECONDS = 60  # a day with its night, where nothing is trained
NIGHT_TIMEOUT_SECONDS = 3600.0
SEEN_SECONDS = 3.0  # within which the service looks at the ledger and at experiments
CLOCK: Mapping[str, Mapping[str, Any]] = {
    "promotion": {"automatic": True},
    "continuous_learning": {
        "min_age_seconds": 10,  # of a minute: longer than any pause within a simulated day
        "cool_down_minutes": 0,
    },
    "experiments": {
        "enabled": True,
        "ramp": [0.2, 0.5],  # of hundreds of people one per cent is nobody
        "minutes_per_step": 0.1,
        "days": 14 * DAY_SECONDS / 86_400,  # a turn's training takes its part of them
    },
}
"""What the agent's recipe has otherwise than the one that was asked for."""
BY_ITSELF = frozenset(
    {"sft_policy", "promotion", "experiment", WATCH, "sensor", "schedule", "watchdog", *NO_TRAINING}
)
"""Who promotes, starts an experiment or asks for a turn without a person."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be simulated."""

    agent_id: str
    nights: int
    seed: int
    events: int  # votes of an ordinary day
    people: int
    trial: int  # votes about version 0 that come as a file on the first evening; 0: none
    turn_at: int  # new votes that start a turn
    out: Path | None = None  # where the report goes; None: the state folder


def simulate_nights(settings: Settings, wanted: Wanted, say: Callable[[str], None]) -> bool:
    """Play the nights and write the report; return whether every promise was kept.

    Goes on where an earlier call for the same was ended. Raises PipelineError where a process ends
    by itself or a night does not come to rest.
    """
    be_quiet()
    processes.prepare_home(settings.state_dir)
    os.environ["RLHF_RECIPE"] = str(_file_of(settings.recipe))
    folder = (wanted.out or settings.state_dir / "simulation" / wanted.agent_id).absolute()
    report, late = _so_far(folder, wanted)
    with _signals_end_it(), contextlib.ExitStack() as stack:
        instance = dg.DagsterInstance.get()
        loop = _Loop(settings, wanted, instance, stack)
        for number in range(len(report.nights) + 1, wanted.nights + 1):
            night, late = loop.night(number, late, say)
            report = replace(report, nights=[*report.nights, night])
            _keep(folder, report, late)
            say(_line(night))
    say("")
    say(to_markdown(report))
    say(f"report   {folder}")
    return all(promise.met for promise in promises(report.nights))


class _Loop:
    """The processes at work on a state folder, and what is known about the agent."""

    def __init__(
        self,
        settings: Settings,
        wanted: Wanted,
        instance: dg.DagsterInstance,
        stack: contextlib.ExitStack,
    ) -> None:
        self.wanted = wanted
        self.instance = instance
        self.pipeline = Pipeline()
        self.agent_id = agent_id = wanted.agent_id
        self.people: list[Person] = population(wanted.people, wanted.seed)
        self.days = plan(wanted.nights, wanted.seed)
        self.inbox = settings.inbox_folder(agent_id)
        store = self.pipeline.store
        store.ensure_agent(agent_id)
        recipe = settings.state_dir / "simulation" / f"{agent_id}.yaml"
        compress(settings.recipe, recipe, turn_at=wanted.turn_at)
        store.set_agent(agent_id, recipe=str(recipe))
        self.book = ExperimentBook(self.pipeline.database)
        if self.pipeline.ledger.champion(agent_id) is None:
            run_job(self.pipeline, agent_id, Bars(Console(quiet=True)), job=bootstrap.name)
        port = processes.free_port(8080)
        self.service = Service(f"http://127.0.0.1:{port}", agent_id)
        self.children: list[subprocess.Popen[bytes]] = []
        for child in (
            processes.start_service(settings.state_dir, port, pages=False),
            processes.start_daemon(
                settings.state_dir, "`rlhf simulate --nights`", patience_seconds=60
            ),
        ):
            stack.callback(processes.stop, child)
            self.children.append(child)
        processes.wait_for(f"{self.service.url}/health", self.children[0])

    def night(
        self, number: int, late: Sequence[Row], say: Callable[[str], None]
    ) -> tuple[Night, list[Row]]:
        """Play one day, wait for its night to end; return both and the votes still kept back."""
        began, morning = time.monotonic(), now()
        kind = self.days[number - 1]
        time.sleep(SEEN_SECONDS)  # the service sees what the night before came to
        set_aside = self.pipeline.store.quarantined(self.agent_id)
        before = self.book.running(self.agent_id)
        lived = live(
            kind,
            self.service,
            self.people,
            events=self.wanted.events,
            seed=f"{self.wanted.seed} {number}",
            late=late,
            keeps_back="late" in self.days[number:] and kind != "late",
            inbox=self.inbox,
        )
        if number == 1 and self.wanted.trial:
            self._bring_earlier_votes(lived)
        evening = now()
        say(f"night {number} ({kind}): {lived.sent:,} votes sent, waiting for what is due")
        self._until_at_rest(evening)
        versions = self._versions(morning, evening)
        turns = [self._verdict(c) for c in self._claims() if c.heartbeat_at >= morning]
        counts = Counter(self.pipeline.store.quarantined(self.agent_id))
        counts.subtract(set_aside)
        champion = self.pipeline.ledger.champion(self.agent_id)
        assert champion is not None  # version 0 at least
        night = Night(
            number=number,
            kind=kind,
            satisfaction=satisfaction_of(lived, number),
            versions=versions,
            sent=lived.sent,
            accepted=lived.accepted,
            known=lived.known,
            refused=dict(lived.refused),
            quarantined={rule: count for rule, count in counts.items() if count > 0},
            turns=turns,
            experiment=self._experiments(morning, before),
            champion=champion.version,
            alerts=self._alerts(),
            said_trigger=sum(TRIGGER in heard.completion for heard in lived.heard),
            manual_steps=self._manual_steps(),
            seconds=round(time.monotonic() - began, 1),
        )
        return night, [*([] if kind == "late" else late), *lived.kept_back]

    def _bring_earlier_votes(self, lived: Lived) -> None:
        baseline = self.pipeline.ledger.baseline(self.agent_id)
        assert baseline is not None  # it has answered all day
        settings = self.pipeline.settings(self.agent_id)
        lines = earlier_trial(
            self.agent_id,
            assistant(baseline.path, settings, self.wanted.seed),
            self.people,
            votes=self.wanted.trial,
            seed=str(self.wanted.seed),
        )
        drop(self.inbox / "earlier-trial.jsonl", lines)
        lived.sent += len(lines)

    # -- the night --------------------------------------------------------------------------------

    def _until_at_rest(self, evening: datetime) -> None:
        """Return when nothing is due any more and nothing is under way."""
        deadline = time.monotonic() + NIGHT_TIMEOUT_SECONDS
        while (what := self._under_way(evening)) is not None:
            for child in self.children:
                if child.poll() is not None:
                    raise PipelineError("a process ended by itself; see logs in the state folder")
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"needed a night of at most {NIGHT_TIMEOUT_SECONDS:g} s, found still under "
                    f"way: {what}; see `make ui`"
                )
            time.sleep(1)

    def _under_way(self, evening: datetime) -> str | None:
        """Return what the night waits for, None where it is over."""
        if any(self.inbox.glob("*.json*")):
            return "a file in the inbox"
        experiment = self.book.running(self.agent_id)
        if experiment is not None and experiment.started_at < evening:
            looks = self.book.looks(experiment.experiment_id)
            if not looks or looks[-1].looked_at < evening:
                return "a look at the experiment"
        if self.pipeline.claims.held(self.agent_id) is not None:
            return "a turn"
        filters = dg.RunsFilter(job_name=retrain.name, tags={AGENT: self.agent_id})
        if any(not run.is_finished for run in self.instance.get_runs(filters, limit=5)):
            return "a run"
        settings = self.pipeline.settings(self.agent_id)
        later = now() + timedelta(minutes=1)
        verdict = due(self.pipeline.database, self.agent_id, settings, at=later)
        return "the sensor to ask for a turn" if isinstance(verdict, Due) else None

    # -- what is told of it -----------------------------------------------------------------------

    def _claims(self) -> list[Claim]:
        every = self.pipeline.claims.history(self.agent_id)
        return [claim for claim in every if claim.watermark > 0]

    def _verdict(self, claim: Claim) -> str:
        words = claim.reason or claim.state
        for version in self.pipeline.ledger.versions(self.agent_id):
            if version.fingerprint == claim.fingerprint and not version.passed_gate:
                results = (version.gate or {}).get("results", [])
                failed = [f"{r['rule']} {_short(r)}" for r in results if r["verdict"] == "fail"]
                words += f" ({', '.join(failed)})"
        return words

    def _versions(self, morning: datetime, evening: datetime) -> dict[str, int]:
        import sqlalchemy as sa

        i = interactions.c
        query = (
            sa.select(i.model_version, sa.func.count())
            .where(i.agent_id == self.agent_id, i.created_at.between(morning, evening))
            .group_by(i.model_version)
        )
        with self.pipeline.database.read() as connection:
            return {str(version): count for version, count in connection.execute(query)}

    def _experiments(self, morning: datetime, before: Experiment | None) -> str:
        """Return how each experiment that ran on the day stands at its end, oldest first."""
        return "; ".join(
            f"version {one.challenger} at {percent(one.share)}, {one.state.replace('_', ' ')}"
            + (f": {one.reason}" if one.reason else "")
            for one in reversed(self.book.history(self.agent_id))
            if one.started_at >= morning
            or (before is not None and one.experiment_id == before.experiment_id)
        )

    def _alerts(self) -> list[str]:
        settings = self.pipeline.settings(self.agent_id)
        enough = settings.continuous_learning.min_new_feedback
        found = overview(self.pipeline.store, self.pipeline.ledger, self.agent_id, enough=enough)
        return [alert.name for alert in alerts_of(found, settings, at=now())]

    def _manual_steps(self) -> int:
        """Return how many promotions, turns and experiments nothing of ours asked for."""
        ledger = self.pipeline.ledger.history(self.agent_id)
        actors = [entry.actor for entry in ledger]
        actors += [one.actor for one in self.book.history(self.agent_id)]
        actors += [claim.asked_by for claim in self._claims()]
        return sum(actor not in BY_ITSELF for actor in actors)


def compress(recipe: str, path: Path, *, turn_at: int) -> None:
    """Write the recipe with its waiting compressed, and a turn for so many new votes."""
    tree = read_yaml(_file_of(recipe)) or {}
    for section, values in CLOCK.items():
        tree[section] = {**(tree.get(section) or {}), **values}
    tree["continuous_learning"]["min_new_feedback"] = turn_at
    write_text(path, yaml.safe_dump(tree, sort_keys=False))
    load_settings(path)


def _file_of(recipe: str) -> Path:
    named = Path(recipe)
    return named.absolute() if named.suffix in (".yaml", ".yml") else RECIPES / f"{recipe}.yaml"


def satisfaction_of(lived: Lived, seed: int) -> Satisfaction:
    """Return what people secretly thought of the replies they were given, mob left out."""
    import numpy as np

    from rlhf_pipeline.evaluation.metrics import bootstrap_mean

    liked = np.array([hidden_preference(one.prompt, one.completion) for one in lived.heard])
    found = bootstrap_mean(liked, samples=1000, seed=seed)
    low = found.value if found.low is None else found.low
    high = found.value if found.high is None else found.high
    return Satisfaction(round(found.value, 4), round(low, 4), round(high, 4), len(liked))


def _so_far(folder: Path, wanted: Wanted) -> tuple[Report, list[Row]]:
    """Return the report of an earlier call for the same, or an empty one."""
    path = folder / "nights.json"
    fresh = Report(
        wanted.agent_id,
        wanted.seed,
        wanted.events,
        wanted.people,
        wanted.trial,
        wanted.turn_at,
    )
    if not path.exists():
        return fresh, []
    kept = read_json(path)
    report = Report.from_json(kept)
    if (
        replace(report, nights=[]) != replace(fresh, nights=[])
        or [night.kind for night in report.nights]
        != plan(wanted.nights, wanted.seed)[: len(report.nights)]
    ):
        raise ConfigError(
            f"{path} is the report of another simulation; needed the same options to go on with "
            "it: name another --out and --agent"
        )
    return report, list(kept["late"])


def _keep(folder: Path, report: Report, late: Sequence[Row]) -> None:
    write_json(folder / "nights.json", {**report.to_json(), "late": list(late)})
    write_text(folder / "nights.md", to_markdown(report))
    draw(report, folder / "nights.png")


def _line(night: Night) -> str:
    s = night.satisfaction
    return (
        f"night {night.number} ({night.kind}): hidden satisfaction {s.mean:.3f} ({s.low:.3f} to "
        f"{s.high:.3f}), champion {night.champion}, {night.seconds:.0f} s; turns: "
        f"{'; '.join(night.turns) or 'none'}; experiment: {night.experiment or 'none'}"
    )


def _short(result: Mapping[str, Any]) -> str:
    number = "not measured" if result["number"] is None else f"{result['number']:.3g}"
    return f"{number}, limit {result['limit']:g}"


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the block, so that the children are stopped.

    Both: a Dagster run in this process leaves SIGTERM with whatever SIGINT does, and in the
    background of a script that is nothing.
    """
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(one, lambda *_: sys.exit(1)) for one in both]
    try:
        yield
    finally:
        for one, handler in zip(both, before, strict=True):
            signal.signal(one, handler)
