"""No seed lottery in PPO: the tiny recipe trained from many seeds, by the hidden preference.

    python -m benchmarks.ppo_seeds --seeds 20 --per-world 4 --out benchmarks/ppo_seeds
    python -m benchmarks.ppo_seeds --ppo "estimator: rloo, completions_per_prompt: 4" --out rloo
    python -m benchmarks.ppo_seeds --hidden --out hidden

A world is a baseline, people, their votes and the reward models learned from them; seeds that
share one differ in PPO's own draws: the order of prompts, what is sampled, the shuffling. With
--per-world 1 every seed has a world of its own. --ppo holds other settings against the recipe's,
in the same worlds; --hidden what a perfect reward model would bring, one that says what people
secretly think, against the learned ones. Nothing here promotes: what PPO chose is held against its
baseline on held-out prompts, and so is every look at the watch prompts on the way. Work that is
done is kept in --work, so a stopped run goes on. Ends with status 1 if a seed does not improve, or
collapses: ends below where it began.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from rlhf_pipeline import stages
from rlhf_pipeline.config import Settings, load_settings
from rlhf_pipeline.database import Database
from rlhf_pipeline.feedback import datasets, snapshot
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import write_json
from rlhf_pipeline.ppo.collecting import PROBES
from rlhf_pipeline.records import (
    EvaluationPrompt,
    RewardFunction,
    RewardInput,
    hashed,
    ignore_progress,
)
from rlhf_pipeline.simulation.measure import compare_hidden
from rlhf_pipeline.simulation.people import population
from rlhf_pipeline.simulation.play import assistant, play
from rlhf_pipeline.simulation.world import hidden_preference
from rlhf_pipeline.stages import Turn

AGENT = "shop"
EVENTS = 11_000  # of the first day, as in the demo
DEVIATES = 10.0  # times the hidden preference: it differs then as learned rewards do, by about 2


@dataclass(frozen=True, slots=True)
class Seed:
    """What one seed came to."""

    seed: int
    world: int
    baseline: float  # mean hidden preference on held-out prompts, 0 to 1
    chosen: float
    win_rate: float  # over the baseline, ties half
    win_low: float
    win_high: float
    prompts: int
    chosen_update: int
    kl: float  # nats per completion, of the chosen update
    stopped_because: str
    looks: list[tuple[int, float]]  # update and mean hidden preference on the watch prompts
    seconds: float

    @property
    def improves(self) -> bool:
        """Whether the chosen policy is preferred to the baseline, beyond the interval."""
        return self.chosen > self.baseline and self.win_low > 0.5

    @property
    def collapses(self) -> bool:
        """Whether the last look is below the first."""
        return self.looks[-1][1] < self.looks[0][1]


class Overheard:
    """A stopping reward that also notes what people secretly think of what it is shown."""

    def __init__(self, inner: RewardFunction) -> None:
        self.inner = inner
        self.version = getattr(inner, "version", "unknown")
        self.means: list[float] = []

    def __call__(self, items: Sequence[RewardInput]) -> Sequence[float]:
        scores = self.inner(items)
        if len(items) > PROBES:  # a look, not the check before training
            hidden = [hidden_preference(item.prompt, item.completion) for item in items]
            self.means.append(statistics.fmean(hidden))
        return scores


class Hidden:
    """What people secretly think as a reward; it lies at 7, where learned ones lie around 0."""

    version = "hidden"

    def __call__(self, items: Sequence[RewardInput]) -> Sequence[float]:
        return [DEVIATES * hidden_preference(item.prompt, item.completion) for item in items]


def build_world(settings: Settings, folder: Path) -> Turn:
    """Return the turn of a day's votes, with baseline and reward models trained; once only."""
    from rlhf_pipeline.feedback.validation import validate

    data, work = folder / "data", folder / "work"
    seed = settings.training.seed
    turn = Turn(AGENT, "0" * 64, 0, 1, data, work, None, None, settings)
    if not (folder / "baseline.json").exists():
        say(f"world {seed}: training the baseline")
        write_json(
            folder / "baseline.json", stages.train_baseline(turn, ignore_progress, lambda: None)
        )
    baseline = work / "sft"
    if not (data / stages.PROMPTS).exists():
        say(f"world {seed}: a day of people")
        database = Database(f"sqlite:///{folder / 'votes.db'}")
        store = FeedbackStore(database)
        play(
            store,
            AGENT,
            assistant(baseline, settings, seed),
            population(200, seed),
            model_version=0,
            events=EVENTS,
            seed=1 + seed,
        )
        mark = snapshot.newest_seq(database, AGENT)
        snapshot.take(database, AGENT, mark, data / "feedback.parquet")
        limits = settings.validation
        report = validate(
            snapshot.read(data / "feedback.parquet"),
            min_rows=limits.min_rows,
            max_prompt_characters=limits.max_prompt_characters,
            max_completion_characters=limits.max_completion_characters,
        )
        built = datasets.build(
            report.clean,
            evaluation_share=settings.feedback.evaluation_share,
            min_rating=settings.feedback.min_rating,
        )
        datasets.write_jsonl(data / stages.PAIRS, built.preference_pairs)
        datasets.write_jsonl(data / stages.EXAMPLES, built.reward_examples)
        datasets.write_jsonl(data / stages.PROMPTS, built.evaluation_prompts)
    turn = replace(turn, baseline=baseline, champion=baseline)
    if not (folder / "reward.json").exists():
        say(f"world {seed}: training the reward models")
        write_json(
            folder / "reward.json", stages.train_reward_models(turn, ignore_progress, lambda: None)
        )
    return turn


def train(turn: Turn, seed: int, folder: Path, *, hidden: bool) -> Seed:
    """Train one seed's policy in the turn's world and return what it came to.

    `hidden`: the reward, and what chooses the update, is what people secretly think.
    """
    from rlhf_pipeline.ppo.trainer import train_ppo
    from rlhf_pipeline.reward.model import load_reward_model

    began = time.monotonic()
    settings = turn.settings
    prompts = stages.training_prompts(turn)
    watched = settings.training.watch_prompts
    proxy, stopping = (
        load_reward_model(turn.work / "reward" / job) for job in ("proxy", "stopping")
    )
    overheard = Overheard(Hidden() if hidden else stopping)
    result = train_ppo(
        policy_dir=turn.baseline or "",
        reference_dir=turn.baseline or "",
        reward=Hidden() if hidden else stages.maximised(turn, proxy),
        stopping=overheard,
        prompts=prompts[watched:],
        watch_prompts=prompts[:watched],
        output_dir=folder,
        settings=replace(settings.ppo, seed=seed),
        resume=False,  # so that every look is overheard
    )
    held_out = datasets.read_jsonl(turn.data / stages.PROMPTS, EvaluationPrompt)
    questions = [record.prompt for record in held_out]
    found = compare_hidden(
        questions,
        assistant(Path(result.model_path), settings, 77)(questions),
        assistant(turn.baseline or Path(), settings, 78)(questions),
    )
    low, high = found.win_rate.low, found.win_rate.high
    look = next(e for e in result.evaluations if e.update == result.chosen_update)
    updates = [evaluation.update for evaluation in result.evaluations]
    return Seed(
        seed=seed,
        world=settings.training.seed,
        baseline=found.baseline_mean,
        chosen=found.candidate_mean,
        win_rate=found.win_rate.value,
        win_low=low if low is not None else 0.0,
        win_high=high if high is not None else 1.0,
        prompts=found.prompts,
        chosen_update=result.chosen_update,
        kl=look.kl,
        stopped_because=result.stopped_because,
        looks=list(zip(updates, overheard.means, strict=True)),
        seconds=time.monotonic() - began,
    )


def table(seeds: Sequence[Seed]) -> str:
    """Return the seeds as Markdown."""
    columns = "seed|world|hidden preference|change|win rate (95 %)|kept update|KL|ended".split("|")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for s in seeds:
        verdict = "collapsed" if s.collapses else "improved" if s.improves else "NOT improved"
        lines.append(
            f"| {s.seed} | {s.world} | {s.baseline:.3f} → {s.chosen:.3f} | "
            f"{s.chosen / s.baseline - 1:+.0%} | "
            f"{s.win_rate:.3f} ({s.win_low:.3f} to {s.win_high:.3f}) | {s.chosen_update} | "
            f"{s.kl:.2f} | {verdict} |"
        )
    gains = [s.chosen / s.baseline - 1 for s in seeds]
    lines.append(
        f"\n{len(seeds)} seeds in {len({s.world for s in seeds})} worlds: "
        f"{sum(s.improves for s in seeds)} improve, {sum(s.collapses for s in seeds)} collapse; "
        f"the hidden preference rises by {min(gains):.0%} to {max(gains):.0%}, "
        f"median {statistics.median(gains):.0%}."
    )
    return "\n".join(lines)


def draw(seeds: Sequence[Seed], path: Path) -> None:
    """Draw every seed's looks, one colour for each world."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    worlds = sorted({s.world for s in seeds})
    for s in seeds:
        updates, means = zip(*s.looks, strict=True)
        colour = f"C{worlds.index(s.world) % 10}"
        axes.plot(updates, means, color=colour, alpha=0.7, linewidth=1.2)
        chosen = dict(s.looks)[s.chosen_update]
        axes.plot([s.chosen_update], [chosen], "o", color=colour, markersize=4)
    axes.set_xlabel("update (dot: the one that was kept)")
    axes.set_ylabel("mean hidden preference, watch prompts")
    axes.set_title(f"{len(seeds)} seeds of the tiny recipe; a colour is a world")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def say(line: str) -> None:
    """Print a line of progress."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def main() -> None:
    """Run the seeds that are not done yet and print all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--per-world", type=int, default=4, help="seeds that share a world")
    parser.add_argument("--ppo", default="", metavar="YAML", help="other settings")
    parser.add_argument("--hidden", action="store_true", help="what a perfect reward would bring")
    parser.add_argument("--work", type=Path, default=Path(".rlhf-seeds"), help="kept between runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/ppo_seeds"), help="no suffix")
    given = parser.parse_args()
    asked = yaml.safe_load(f"{{{given.ppo}}}")
    suffix = f"-{hashed(json.dumps(asked, sort_keys=True))[:8]}" if asked else ""
    suffix += "-hidden" if given.hidden else ""
    done: list[Seed] = []
    for number in range(given.seeds):
        world = number // given.per_world
        settings = load_settings("tiny", {"training": {"seed": world}, "ppo": asked})
        folder = given.work / f"world-{world}"
        path = folder / f"seed-{number}{suffix}.json"
        if not path.exists():
            turn = build_world(settings, folder.absolute())
            output = folder.absolute() / f"ppo-{number}{suffix}"
            seed = train(turn, number, output, hidden=given.hidden)
            write_json(path, asdict(seed))
            say(f"seed {number}: {seed.baseline:.3f} → {seed.chosen:.3f}, {seed.seconds:.0f} s")
        values = json.loads(path.read_text(encoding="utf-8"))
        done.append(Seed(**{**values, "looks": [tuple(look) for look in values["looks"]]}))
        given.out.with_suffix(".md").write_text(table(done) + "\n", encoding="utf-8")
        draw(done, given.out.with_suffix(".png"))
    print(table(done))
    sys.exit(0 if all(s.improves and not s.collapses for s in done) else 1)


if __name__ == "__main__":
    main()
