"""`make demo`: the whole loop, end to end, through Dagster, with simulated people.

1. Version 0: the SFT baseline is trained from seed conversations (job `bootstrap`).
2. A day of people: they chat with it and send at least 10,000 feedback events.
3. The sensor sees them and asks for a turn; a model is trained, judged, registered, promoted.
4. Another day with the new champion; the sensor asks for a second turn by itself.
5. The ruler, while that begins: the hidden preference, which no training saw, compares the first
   turn's champion with version 0.
6. The table: every promise, met or short. Exit code 0 only if the loop closed.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from automation import processes
from automation.bars import Bars, be_quiet
from automation.jobs import bootstrap, retrain
from automation.launch import run_job
from resources.pipeline import AGENT, Pipeline
from rlhf_pipeline import stages
from rlhf_pipeline.commands.common import console as made_console
from rlhf_pipeline.config import Settings
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.feedback import datasets
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import EvaluationPrompt
from rlhf_pipeline.registry.ledger import ModelVersion
from rlhf_pipeline.reward.calibration import by_length
from rlhf_pipeline.simulation.people import Person, population
from rlhf_pipeline.simulation.play import Day, assistant, play

TURN_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One promise of the demo."""

    what: str
    needed: str
    found: str
    met: bool
    required: bool = False  # whether the exit code depends on it


class Watch:
    """The most memory this process and its children held together, looked at every second.

    A shared page counts once (the proportional set size). The kernel counts those page by page, a
    tenth of a second for a process that trains, so they are counted where the resident sizes, which
    cost nothing, have risen, and every ten seconds.
    """

    def __init__(self) -> None:
        self.peak_gib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = psutil.Process()
        highest, waited = 0, 0
        while not self._stop.wait(1.0):
            family = [me, *me.children(recursive=True)]
            resident = sum(_bytes_of(p, lambda p: int(p.memory_info().rss)) for p in family)
            waited += 1
            if resident <= highest and waited < 10:
                continue
            highest, waited = max(highest, resident), 0
            total = sum(_bytes_of(p, lambda p: int(p.memory_full_info().pss)) for p in family)
            self.peak_gib = max(self.peak_gib, total / 2**30)

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()


def _bytes_of(process: psutil.Process, told: Callable[[psutil.Process], int]) -> int:
    """Return what is told of the process; 0 where it has ended or the system does not say."""
    try:
        return told(process)
    except (psutil.Error, AttributeError):
        return 0


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(
        prog="make demo", description="The whole loop, offline, with simulated people."
    )
    parser.add_argument("--agent", default=None, help="default: demo, demo-2, demo-3, ...")
    parser.add_argument("--events", type=int, default=11_000, help="feedback events on day one")
    parser.add_argument("--second", type=int, default=600, help="feedback events on day two")
    parser.add_argument("--turns", type=int, choices=(1, 2), default=2, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the people")
    parser.add_argument("--json", type=Path, default=None, help="also write the table as JSON")
    arguments = parser.parse_args()
    be_quiet()
    console = made_console()
    pipeline = Pipeline()
    watch = Watch()
    try:
        settings = pipeline.settings()
        processes.prepare_home(settings.state_dir)
        rows = run(pipeline, settings, console, arguments, watch)
    except PipelineError as error:
        console.print(f"[red]error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps([{"what": r.what, "found": r.found, "met": r.met} for r in rows], indent=1)
        )
    sys.exit(0 if all(row.met for row in rows if row.required) else 1)


def run(
    pipeline: Pipeline,
    settings: Settings,
    console: Console,
    arguments: argparse.Namespace,
    watch: Watch,
) -> list[Row]:
    """Run the loop and return the table's rows."""
    started = time.monotonic()
    agent_id = arguments.agent or _new_agent(pipeline)
    people = population(200, arguments.seed)
    console.print(f"[bold]The loop, for agent {agent_id}[/], state in {settings.state_dir}")
    daemon = processes.start_daemon(settings.state_dir, "`make demo`")
    pipeline.store.ensure_agent(agent_id)
    instance = dg.DagsterInstance.get()
    try:
        bars = Bars(console)
        with bars.progress:
            run_job(pipeline, agent_id, bars, job=bootstrap.name)
            day_one = _day(
                pipeline, settings, agent_id, people, arguments.events, 1 + arguments.seed, bars
            )
            first = _turn(pipeline, instance, settings, agent_id, set(), bars)
        first_after = time.monotonic() - started
        champion = pipeline.ledger.champion(agent_id)
        first_champion = champion.version if champion else -1
        promoted_after = first_after if first_champion > 0 else None
        bars = Bars(console)
        with bars.progress:
            if arguments.turns == 2:
                seed = 1001 + arguments.seed
                day_two = _day(pipeline, settings, agent_id, people, arguments.second, seed, bars)
            # Beside the second turn, which begins meanwhile and ends long after.
            measured = _measure(pipeline, settings, agent_id, first, champion, bars)
            if arguments.turns == 1:
                rows = [*_first_rows(day_one, first, first_champion), *measured]
                _print(console, rows, agent_id, "once")
                return rows
            second = _turn(pipeline, instance, settings, agent_id, {first.run_id}, bars)
        second_after = time.monotonic() - started
    finally:
        processes.stop(daemon)
        watch.stop()
    claims = [c for c in pipeline.claims.history(agent_id) if c.watermark > 0]
    marks = [c.fingerprint for c in claims if c.state == "done"]
    rows = [
        *_first_rows(day_one, first, first_champion),
        *measured,
        Row(
            "second turn, asked for by the sensor",
            "comes to its verdict",
            f"{second.verdict} (after {day_two.events} more events)",
            True,
            required=True,
        ),
        Row(
            "fingerprints trained on",
            "two, none twice",
            ", ".join(mark[:8] for mark in marks),
            len(marks) == len(set(marks)) == 2,
            required=True,
        ),
        Row(
            "time to first promoted model",
            "≤ 8 min",
            "none was promoted" if promoted_after is None else f"{promoted_after / 60:.1f} min",
            promoted_after is not None and promoted_after <= 480,
        ),
        Row(
            "time to second verdict",
            "≤ 13 min",
            f"{second_after / 60:.1f} min",
            second_after <= 780,
        ),
        Row(
            "peak memory, all processes",
            "≤ 4 GB",
            f"{watch.peak_gib:.1f} GiB",
            watch.peak_gib <= 3.72,
        ),
    ]
    _print(console, rows, agent_id, "twice")
    return rows


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """A turn as the demo saw it end."""

    run_id: str
    verdict: str
    fingerprint: str


def _first_rows(day: Day, turn: TurnSeen, champion: int) -> list[Row]:
    pairs = day.by_kind["preference"]
    return [
        Row(
            "feedback events / preferences, day one",
            "≥ 10,000 / 4,000",
            f"{day.events:,} / {pairs:,}",
            day.events >= 10_000 and pairs >= 4_000,
        ),
        Row(
            "first turn, asked for by the sensor",
            "promoted over version 0",
            turn.verdict,
            champion > 0,
            required=True,
        ),
    ]


def _day(
    pipeline: Pipeline,
    settings: Settings,
    agent_id: str,
    people: Sequence[Person],
    events: int,
    seed: int,
    bars: Bars,
) -> Day:
    """Let people chat with the champion and send feedback."""
    champion = pipeline.ledger.champion(agent_id)
    if champion is None:
        raise PipelineError(f"agent {agent_id} has no champion to chat with")
    answer = assistant(pipeline.registry.folder_of(champion), settings, seed)
    return play(
        pipeline.store,
        agent_id,
        answer,
        people,
        model_version=champion.version,
        events=events,
        seed=seed,
        report=lambda facts: bars.show(f"people and version {champion.version}", dict(facts)),
    )


def _turn(
    pipeline: Pipeline,
    instance: dg.DagsterInstance,
    settings: Settings,
    agent_id: str,
    known: set[str],
    bars: Bars,
) -> TurnSeen:
    """Wait for the run the sensor asks for, and follow it to its end."""
    waiting = bars.progress.add_task("waiting for the sensor", total=None, facts="")
    deadline = time.monotonic() + TURN_TIMEOUT_SECONDS
    run: dg.DagsterRun | None = None
    while run is None or not run.is_finished:
        if time.monotonic() > deadline:
            raise PipelineError("the turn took longer than an hour; see `make ui`")
        time.sleep(1)
        runs = instance.get_runs(dg.RunsFilter(job_name=retrain.name, tags={AGENT: agent_id}))
        fresh = [r for r in runs if r.run_id not in known]
        if not fresh:
            continue
        run = fresh[-1]
        claim = pipeline.claims.of_holder(run.run_id)
        steps = [s.step_key for s in instance.get_run_step_stats(run.run_id) if s.end_time]
        bars.progress.update(
            waiting,
            description=f"turn, run {run.run_id[:8]}",
            total=11,
            completed=len(steps),
            facts=steps[-1] if steps else "queued",
        )
        if claim is not None:
            bars.look(settings.turn_folder(agent_id, claim.fingerprint))
    claim = pipeline.claims.of_holder(run.run_id)
    verdict = (claim.reason or claim.state) if claim else "no claim"
    if not run.is_success:
        raise PipelineError(
            f"run {run.run_id} ended as {run.status.value} ({verdict}); see `make ui`"
        )
    return TurnSeen(run.run_id, verdict, fingerprint=claim.fingerprint if claim else "")


def _measure(
    pipeline: Pipeline,
    settings: Settings,
    agent_id: str,
    turn: TurnSeen,
    champion: ModelVersion | None,
    bars: Bars,
) -> list[Row]:
    """Hold champion, baseline and proxy against the hidden preference, on held-out prompts."""
    from rlhf_pipeline.reward.model import load_reward_model
    from rlhf_pipeline.simulation.measure import compare_hidden, hidden_accuracy

    folder = settings.agent_folder(agent_id)
    mark = turn.fingerprint[:16]
    held_out = datasets.read_jsonl(folder / "snapshots" / mark / stages.PROMPTS, EvaluationPrompt)
    prompts = [record.prompt for record in held_out]
    baseline = pipeline.ledger.baseline(agent_id)
    if baseline is None or champion is None:
        raise PipelineError(f"agent {agent_id} has no champion to measure")
    bars.show("measuring", {"done": 0, "of": 4})
    ours = assistant(champion.path, settings, 77)(prompts)
    base = assistant(baseline.path, settings, 78)
    theirs = base(prompts)
    found = compare_hidden(prompts, ours, theirs)
    bars.show("measuring", {"done": 2, "of": 4})
    twice = [*prompts, *prompts]
    proxy = hidden_accuracy(
        load_reward_model(folder / "turns" / mark / "reward" / "proxy"),
        [*twice, *twice],
        [*base([*twice, *twice])],
        [*assistant(baseline.path, settings, 79)([*twice, *twice])],
    )
    reports = read_json(folder / "turns" / mark / "reward.json")["result"]
    length, share = by_length(reports["proxy"]["floors"])
    bars.show("measuring", {"done": 4, "of": 4})
    win = found.win_rate
    return [
        Row(
            f"hidden preference, win rate over version 0 ({found.prompts} held-out prompts)",
            "≥ 0.65, low > 0.5",
            f"{win.value:.3f} ({win.low:.3f} to {win.high:.3f})",
            found.prompts >= 500 and win.value >= 0.65 and (win.low or 0.0) > 0.5,
        ),
        Row(
            "hidden preference, mean",
            "≥ 15 % up",
            f"{found.baseline_mean:.3f} → {found.candidate_mean:.3f} ({found.relative_gain:+.0%})",
            found.relative_gain >= 0.15,
        ),
        Row(
            "thumbs-up share",
            "≥ 20 % up",
            f"{found.baseline_thumbs:.3f} → {found.candidate_thumbs:.3f} "
            f"({found.relative_thumbs:+.0%})",
            found.relative_thumbs >= 0.20,
        ),
        Row(
            f"proxy reward vs hidden preference ({proxy.n} held-out pairs)",
            "> 0.85",
            f"{proxy.value:.3f} ({proxy.low:.3f} to {proxy.high:.3f}); "
            f"{length}: {share:.2f} on votes",
            proxy.n >= 1000 and proxy.value > 0.85,
        ),
    ]


def _new_agent(pipeline: Pipeline) -> str:
    """Return a name no agent has: running the demo again never touches what is there."""
    known, number = set(pipeline.store.agents()), 1
    while (name := "demo" if number == 1 else f"demo-{number}") in known:
        number += 1
    return name


def _print(console: Console, rows: list[Row], agent_id: str, turned: str) -> None:
    closed = "closed" if all(row.met or not row.required for row in rows) else "turned"
    table = Table(title=f"The loop, {closed} {turned}, for agent {agent_id}")
    for column in ("what", "needed", "found", ""):
        table.add_column(column)
    for row in rows:
        verdict = "[green]met[/]" if row.met else "[yellow]short[/]"
        if row.required and not row.met:
            verdict = "[red]FAILED[/]"
        table.add_row(row.what, row.needed, row.found, verdict)
    console.print(table)
    console.print(
        "Where to look next:\n"
        "  make ui    runs, checks, curves and models in a browser\n"
        f"  .venv/bin/rlhf explain champion --agent {agent_id}    why this model is the champion\n"
        f'  .venv/bin/rlhf chat --agent {agent_id} --once "how much is the kettle?"\n'
        f"  .venv/bin/rlhf versions --agent {agent_id}"
    )


if __name__ == "__main__":
    main()
