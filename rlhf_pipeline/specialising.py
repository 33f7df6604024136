"""Several agents from one recipe: a baseline they all start from, then training around one critic.

A recipe names them under `specialists`: what each is asked and what it is to become. All begin as
the SFT of sft.seed_conversations, which is also their KL reference. Their rewards are functions
alone: no votes are needed. What comes out is a policy folder each, and a table of what they earned
on prompts that training never saw; in the simulated world, of what people secretly think too.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.config import Settings, SpecialistSettings, shown
from rlhf_pipeline.errors import ConfigError, FeedbackRefused, NotEnoughData
from rlhf_pipeline.files import alone_in, read_json, write_json, write_text
from rlhf_pipeline.records import (
    Progress,
    Prompt,
    RewardInput,
    hashed,
    ignore_progress,
    prompt_from_json,
    prompt_to_json,
)
from rlhf_pipeline.reward.composite import CompositeReward
from rlhf_pipeline.reward.functions import CheckedReward
from rlhf_pipeline.reward.named import composite_of, folders_of, needs_references
from rlhf_pipeline.reward.settings import LEARNED, FunctionSettings

if TYPE_CHECKING:
    from rlhf_pipeline.ppo.result import TrainingResult
    from rlhf_pipeline.ppo.specialists import Specialist

SIMULATED = "simulated"
HELD_OUT_SHARE = 0.25  # of an agent's prompts: never trained on, for the table
FEWEST = 8  # prompts of an agent, for some to train on, some to watch and some to hold out


@dataclass(frozen=True)
class Asked:
    """An agent's prompts, apart, and what completions of them are compared with."""

    train: list[Prompt]
    watch: list[Prompt]
    held_out: list[Prompt]
    references: dict[str, list[str]]  # by records.prompt_to_json


@dataclass(frozen=True)
class Row:
    """One agent's means over its held-out prompts, before training and after."""

    agent: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    result: TrainingResult

    @property
    def explained_variance(self) -> float | None:
        """Return the critic's, over the last quarter of the agent's updates; None without any."""
        told = [row["critic/explained_variance"] for row in self.result.history]
        return statistics.fmean(told[-max(1, len(told) // 4) :]) if told else None


def specialise(
    settings: Settings,
    folder: Path,
    *,
    shares_critic: bool = True,
    baseline: Path | None = None,
    report: Progress = ignore_progress,
) -> list[Row]:
    """Train the recipe's specialists into folder, write table.md there, and return its rows.

    A folder that holds a part of this is gone on with. `baseline` takes the place of the one that
    would be trained. Raises ConfigError where the recipe names no specialists, or sets what they
    cannot have, TrainingError where another process trains in the folder, a reward model that they
    name reads less than they may say, or all of them together cannot fit into memory.
    """
    if not settings.specialists:
        raise ConfigError(
            f"specialists are what `rlhf specialise` trains: needed some in recipe "
            f"{settings.recipe}, found none; take --recipe specialists, or name yours"
        )
    from rlhf_pipeline.ppo.plan import NO_MODELS, beside_others, check_fits, make_plan, read_config
    from rlhf_pipeline.ppo.specialists import Specialist, check_settings, train_specialists
    from rlhf_pipeline.stages import check_reads_whole, policy_config

    for name, one in settings.specialists.items():
        folders = folders_of(one.functions)
        check_reads_whole(f"specialists.{name}.functions", folders, settings.policy)
    asked = {name: prompts_of(name, one, settings) for name, one in settings.specialists.items()}
    rewards = {
        name: reward_of(one, asked[name], settings) for name, one in settings.specialists.items()
    }
    check_settings(settings.ppo)
    config = policy_config(settings) if baseline is None else read_config(baseline)
    made = make_plan(config, settings.ppo, NO_MODELS)
    made = beside_others(made, len(settings.specialists) - 1, shares_critic=shares_critic)
    check_fits(config, settings.ppo, NO_MODELS, made=made)
    with alone_in(folder):
        start = baseline or baseline_of(settings, folder, report)
        specialists: dict[str, Specialist] = {
            name: Specialist(
                start,
                start,
                rewards[name],
                asked[name].train,
                asked[name].watch,
                kl_coef=one.kl_coef,
            )
            for name, one in settings.specialists.items()
        }
        results = train_specialists(
            specialists=specialists,
            output_dir=folder,
            settings=settings.ppo,
            shares_critic=shares_critic,
            report=report,
        )
    rows = []
    for name, result in results.items():
        before, after = (
            judge(policy, asked[name], rewards[name], settings)
            for policy in (start, Path(result.model_path))
        )
        rows.append(Row(name, before, after, result))
    write_text(folder / "table.md", as_markdown(rows))
    return rows


def baseline_of(settings: Settings, folder: Path, report: Progress) -> Path:
    """Return the folder of the SFT that all agents start from, trained here unless it is there.

    What it learns from counts, and its base's weights, not where they lie. Raises TrainingError
    where the folder's agents began with another.
    """
    from rlhf_pipeline import stages
    from rlhf_pipeline.policy.adapters import base_digest
    from rlhf_pipeline.ppo.checkpoint import latest_checkpoint
    from rlhf_pipeline.ppo.specialists import of_another_run

    tree, source = shown(settings), stages.base_source(settings)
    asked = hashed(
        json.dumps([tree["policy"], tree["sft"], settings.training.seed]),
        "" if source is None else base_digest(source),
        *map(repr, stages.seeds(settings, stand_in=True)),
    )
    done = folder / "baseline.json"
    if not done.exists() or read_json(done)["settings"] != asked:
        if saved := latest_checkpoint(folder / "checkpoints"):
            raise of_another_run(saved)
        turn = stages.Turn(SIMULATED, "0" * 64, 0, 0, folder, folder, None, None, settings)
        trained = stages.train_baseline(turn, report, lambda: None)
        write_json(done, {"settings": asked, "loss_curve": trained["loss_curve"]})
    return folder / "sft"


def prompts_of(name: str, one: SpecialistSettings, settings: Settings) -> Asked:
    """Return the agent's prompts: a quarter held out, the recipe's number watched, others to learn.

    Raises ConfigError for a file or topics that are not there, NotEnoughData for too few prompts.
    """
    references: dict[str, list[str]] = {}
    kind, _, topics = one.prompts.partition(":")
    if kind == SIMULATED:
        references = _simulated(name, topics, one.count, settings.training.seed)
    else:
        references = _from_file(Path(one.prompts))
    if len(references) < FEWEST:
        raise NotEnoughData(
            f"the specialist {name} needs {FEWEST} prompts, found {len(references)} in "
            f"{one.prompts}; add some"
        )
    prompts = [prompt_from_json(key) for key in references]
    held_out = int(len(prompts) * HELD_OUT_SHARE)
    watched = min(settings.training.watch_prompts, held_out)
    return Asked(
        train=prompts[held_out + watched :],
        watch=prompts[held_out : held_out + watched],
        held_out=prompts[:held_out],
        references={key: texts for key, texts in references.items() if texts},
    )


def reward_of(one: SpecialistSettings, asked: Asked, settings: Settings) -> CompositeReward:
    """Return the agent's composite."""
    if needs_references(one.functions):
        every = [*asked.train, *asked.watch, *asked.held_out]
        without = [p for p in every if prompt_to_json(p) not in asked.references]
        if without:
            raise NotEnoughData(
                "what compares with references needs one for every prompt, found "
                f"{len(without)} without in {one.prompts}; add them or leave the function out"
            )
    nothing_learnt = {LEARNED: FunctionSettings(weight=0)}
    composite = composite_of(
        {**nothing_learnt, **one.functions},
        CheckedReward(lambda items: [], LEARNED),
        references=asked.references,
        judgements=settings.state_dir / "judgements",
        device=settings.policy.device,
    )
    assert isinstance(composite, CompositeReward)  # as it is wherever functions are named
    return composite


def judge(
    policy: Path, asked: Asked, reward: CompositeReward, settings: Settings
) -> dict[str, float]:
    """Return means over the held-out prompts: of each function, and of hidden opinions if any.

    A function's mean is over what it could judge; one that could judge nothing has none.
    """
    from rlhf_pipeline.simulation.play import assistant
    from rlhf_pipeline.simulation.world import judge as secretly
    from rlhf_pipeline.simulation.world import question_of

    completions = assistant(policy, settings, 77)(asked.held_out)
    items = [RewardInput(p, c) for p, c in zip(asked.held_out, completions, strict=True)]
    pieces = reward.scores_and_pieces(items)[1]
    judged = {name: [p[name] for p in pieces if name in p] for name in reward.piece_names}
    means = {name: statistics.fmean(scores) for name, scores in judged.items() if scores}
    try:
        opinions = [secretly(question_of(i.prompt[-1].content), i.completion) for i in items]
    except KeyError:  # not the simulated world's questions: nobody's opinion is known
        return means
    for name in ("hidden", "relevance", "tone", "length", "safety"):
        shown_as = "hidden preference" if name == "hidden" else f"hidden {name}"
        means[shown_as] = statistics.fmean(getattr(one, name) for one in opinions)
    return means


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the agents' means, before and after, as Markdown."""
    lines = ["| agent | on held-out prompts | before | after |", "|---|---|---|---|"]
    for row in rows:
        for name in {**row.before, **row.after}:
            both = (row.before, row.after)
            was, now = (f"{means[name]:.3f}" if name in means else "–" for means in both)
            lines.append(f"| {row.agent} | {name} | {was} | {now} |")
    titles = ("agent", "kept update", "KL", "critic's explained variance", "ended because")
    lines += ["", f"| {' | '.join(titles)} |", "|---|---|---|---|---|"]
    for row in rows:
        look = next(e for e in row.result.evaluations if e.update == row.result.chosen_update)
        explained = "–" if row.explained_variance is None else f"{row.explained_variance:.2f}"
        lines.append(
            f"| {row.agent} | {look.update} | {look.kl:.2f} | {explained} | "
            f"{row.result.stopped_because} |"
        )
    return "\n".join(lines) + "\n"


def _simulated(name: str, topics: str, count: int, seed: int) -> dict[str, list[str]]:
    """Return so many different questions, by JSON, each with competent answers."""
    from rlhf_pipeline.simulation.world import ALL_TOPICS, every_question, good_answer

    known = [topic.name for topic in ALL_TOPICS]
    wanted = topics.split(",") if topics else known
    if unknown := sorted({*wanted} - {*known}):
        raise ConfigError(
            f"the specialist {name} needs topics of the simulated world ({', '.join(known)}), "
            f"found {', '.join(unknown)}; correct them"
        )
    rng = random.Random(f"specialist {name} {seed}")
    questions = [question for question in every_question() if question.topic.name in wanted]
    drawn = rng.sample(questions, min(count, len(questions)))
    return {prompt_to_json(q.prompt): [good_answer(q, rng) for _ in range(3)] for q in drawn}


def _from_file(path: Path) -> dict[str, list[str]]:
    """Return the file's prompts, by JSON, with their references."""
    from rlhf_pipeline.feedback.formats import messages_of

    found: dict[str, list[str]] = {}
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = list(file)  # str.splitlines also cuts at U+2028, in a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a specialist's prompts are needed at {path}, JSON lines, found none ({error}); "
            "correct the path"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = row.get("references") or []
            if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
                raise TypeError("references are a list of texts")
            found.setdefault(prompt_to_json(messages_of(row["prompt"], "prompt")), []).extend(texts)
        except (ValueError, KeyError, TypeError, AttributeError, FeedbackRefused) as error:
            raise ConfigError(
                f'{path}:{number} needs {{"prompt": text or messages}} and references, if any, as '
                f"a list of texts; found {line[:60]!r}; mend it"
            ) from error
    return found
