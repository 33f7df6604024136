"""Offline A/B: two versions answer the same logged prompts, and a judge neither trained on decides.

The prompts are what people asked, in chats and in votes, those first of whose conversations neither
version nor any it began from was trained on a turn (by pair, example or imitation). The judge is
the gate reward model of the newer version's turn: other raters taught it than the models that were
maximised or chose a checkpoint. What this does not tell: what people would say of the answers
(`rlhf experiment start` asks them); and a version that its own gate let through is a little ahead
by having been chosen.
Seed conversations, which version 0 imitated, do not count as seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from rlhf_pipeline import database as db
from rlhf_pipeline import stages
from rlhf_pipeline.config import RECIPES
from rlhf_pipeline.errors import EvaluationError, RegistryError, TrainingError
from rlhf_pipeline.evaluation.report import KL, EvaluationReport
from rlhf_pipeline.feedback import datasets
from rlhf_pipeline.feedback.datasets import (
    JOBS,
    conversation_of,
    conversations_first,
    unit_interval,
)
from rlhf_pipeline.feedback.privacy import redact
from rlhf_pipeline.records import (
    EvaluationPrompt,
    Message,
    PreferencePair,
    Progress,
    Prompt,
    RewardExample,
    SftExample,
    hashed,
    ignore_progress,
    prompt_from_json,
)
from rlhf_pipeline.registry.comparison import baseline_of, by_place, compared_with
from rlhf_pipeline.registry.judges import reward_folder

if TYPE_CHECKING:
    from rlhf_pipeline.config import Settings
    from rlhf_pipeline.registry.ledger import ModelVersion, PromotionLedger
    from rlhf_pipeline.registry.models import ModelRegistry

NEWEST = 20_000  # logged rows among which prompts are looked for
TELLING = 8  # prompts: of two equal versions compared on 2, 47 % were told apart, on 4 12 %
FEWEST = 100  # held-out prompts below which seen ones are taken too


@dataclass(frozen=True, slots=True)
class Offline:
    """What the comparison found. In the report `candidate` is the second, `baseline` the first."""

    agent_id: str
    first: int
    second: int
    judge: int  # the version whose turn's gate model judged
    logged: int  # different prompts that were found
    held_out: int  # of those compared on: neither was trained on their conversations
    seen: int  # of those compared on: one was
    same_raters: bool  # whether both turns divided the raters alike; else the judge may be partial
    report: EvaluationReport

    @property
    def words(self) -> str:
        """Return the verdict as a sentence."""
        rate = self.report.length_controlled_win_rates["baseline"]
        low, high = rate.low or 0.0, 1.0 if rate.high is None else rate.high
        told = f"{rate.value:.3f} ({low:.3f} to {high:.3f})"
        pair = f"version {self.second}", f"version {self.first}"
        if self.report.prompts < TELLING:
            said = f"too few prompts to tell {pair[0]} from {pair[1]}, needed {TELLING}"
        elif low > 0.5:
            said = f"{pair[0]} is better than {pair[1]}"
        elif high < 0.5:
            said = f"{pair[0]} is worse than {pair[1]}"
        else:
            said = f"nothing surely tells {pair[0]} from {pair[1]}"
        return (
            f"{said}: length-controlled win rate {told} on {self.report.prompts} prompts, "
            f"{self.held_out} of them held out from both"
        )

    @property
    def basis(self) -> str:
        """Return which prompts it was compared on, and who judged, as a sentence."""
        return (
            f"{self.logged} different prompts were logged; compared on {self.held_out} held out "
            f"and {self.seen} seen; judged by the gate model of version {self.judge}'s turn"
        )

    @property
    def warnings(self) -> list[str]:
        """Return what may make the judge partial."""
        said = (
            "warning: the two turns divided the raters otherwise, so one of them may have been "
            "trained on votes that the judge learned from"
        )
        return [] if self.same_raters else [said]

    @property
    def names(self) -> dict[str, str]:
        """Return what the report's systems, and what is named after one, are called here."""
        one, other = f"version {self.first}", f"version {self.second}"
        return {"baseline": one, "candidate": other, KL: f"kl to {one}"}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"words": self.words, **asdict(self)}


def offline(
    registry: ModelRegistry,
    settings: Settings,
    agent_id: str,
    first: str,
    second: str,
    *,
    prompts: int,
    report: Progress = ignore_progress,
) -> Offline:
    """Return how the second version does beside the first on at most `prompts` logged prompts.

    Both sample with the same seed at the agent's temperature; scores are paired by prompt. Raises
    EvaluationError for one version named twice or too few prompts, RegistryError where a version or
    the judge is not there any more.
    """
    from rlhf_pipeline.evaluation.compare import compare
    from rlhf_pipeline.reward.model import load_reward_model

    ledger = registry.ledger
    one, other = ledger.find(agent_id, first), ledger.find(agent_id, second)
    if one.version == other.version:
        raise EvaluationError(
            f"an offline comparison needs two versions, found version {one.version} as both; name "
            "another (`rlhf versions` lists them)"
        )
    judge = max(one, other, key=lambda version: version.version)
    folder = reward_folder(judge, "gate")
    found = logged(registry.ledger.database, agent_id)
    trained_on = seen_by(ledger, settings, one) | seen_by(ledger, settings, other)
    regions = settings.feedback.phone_regions
    conversations = {
        text: conversation_of(_as_trained(prompt_from_json(text), regions)) for text in found
    }
    apart = [text for text in found if conversations[text] not in trained_on]
    held_out = conversations_first(apart, conversations.__getitem__)[:prompts]
    seen = [text for text in found if conversations[text] in trained_on]
    seen = seen[: max(0, min(FEWEST, prompts) - len(held_out))]
    policy = settings.policy
    compared = compare(
        registry.folder_of(other),
        registry.folder_of(one),
        None,
        [EvaluationPrompt(hashed(text)[:32], prompt_from_json(text)) for text in held_out + seen],
        load_reward_model(folder, device=policy.device, dtype=policy.frozen_dtype),
        {},
        titles=settings.evaluation.titles,
        max_completion_tokens=policy.max_completion_tokens,
        max_prompt_tokens=policy.max_prompt_tokens,
        temperature=policy.temperature,
        seed=settings.training.seed,
        bootstrap_samples=settings.evaluation.bootstrap_samples,
        samples_shown=settings.evaluation.samples_shown,
        device=policy.device,
        dtype=policy.dtype,  # rounded as they are served
        report=report,
    )
    return Offline(
        agent_id,
        one.version,
        other.version,
        judge.version,
        len(found),
        len(held_out),
        len(seen),
        _divide_alike(one, other),
        compared,
    )


def logged(database: db.Database, agent_id: str) -> list[str]:
    """Return the different prompts (JSON) of the newest chats and votes, in an order of their own.

    The order follows from the prompts alone, so the first few are no choice of anybody's.
    """
    i, f = db.interactions.c, db.effective_feedback.c
    chats = sa.select(i.prompt).where(i.agent_id == agent_id).order_by(i.created_at.desc())
    votes = (
        sa.select(f.prompt)
        .where(f.agent_id == agent_id, f.prompt.is_not(None))
        .order_by(f.seq.desc())
    )
    with database.read() as connection:
        texts = {
            str(text)
            for query in (chats, votes)
            for text in connection.execute(query.limit(NEWEST)).scalars()
        }
    answerable = [t for t in texts if (turns := prompt_from_json(t)) and turns[-1].role == "user"]
    return sorted(answerable, key=lambda text: unit_interval("offline", text))


def seen_by(ledger: PromotionLedger, settings: Settings, version: ModelVersion) -> set[str]:
    """Return which conversations a version, or one that it began from, was trained on.

    Raises RegistryError where the data sets of one are gone: then nobody can say.
    """
    known = by_place(ledger.versions(version.agent_id))
    found: set[str] = set()
    queue: list[ModelVersion] = [version]
    done: set[int] = set()
    while queue:
        here = queue.pop()
        if here.version in done:
            continue
        done.add(here.version)
        found |= _trained_on(settings, here)
        earlier = compared_with(here, known), baseline_of(here, known)
        queue += [one for one in earlier if one is not None]
    return found


def _trained_on(settings: Settings, version: ModelVersion) -> set[str]:
    data = settings.agent_folder(version.agent_id) / "snapshots" / (version.fingerprint or "")[:16]
    known = version.lineage.get("data", {})
    if missing := [name for name in known if not (data / name).is_file()]:
        raise RegistryError(
            f"version {version.version} of {version.agent_id} was trained from "
            f"{data / missing[0]}, found none there; restore it from a backup"
        )

    def was_made(name: str) -> bool:
        return any(path.name in known for path in datasets.names_of(data / name))

    found: set[str] = set()
    if was_made(stages.PAIRS):
        pairs = datasets.read_jsonl(data / stages.PAIRS, PreferencePair)
        found |= {conversation_of(pair.prompt) for pair in pairs if pair.split == "train"}
    if was_made(stages.EXAMPLES):
        examples = datasets.read_jsonl(data / stages.EXAMPLES, RewardExample)
        found |= {conversation_of(one.prompt) for one in examples if one.split == "train"}
    if was_made(stages.SFT_EXAMPLES):
        imitated = datasets.read_jsonl(data / stages.SFT_EXAMPLES, SftExample)
        found |= {conversation_of(one.prompt) for one in imitated}
    return found | _seeded(version, settings.feedback.phone_regions)


def _seeded(version: ModelVersion, regions: Sequence[str]) -> set[str]:
    """Return which conversations of a seed file a baseline was made from."""
    sft = version.lineage.get("recipe", {}).get("sft", {})
    wanted = sft.get("seed_conversations")
    if version.version != 0 or wanted is None or wanted.startswith("simulated:"):
        return set()
    path = RECIPES.parent / wanted  # as its turn found it
    try:
        seeds = stages.read_conversations(path)[: sft.get("max_examples")]
    except TrainingError as error:
        raise RegistryError(
            f"version 0 of {version.agent_id} was trained from {path}: {error}; put it back"
        ) from error
    as_logged = (_as_trained(one.prompt, regions) for one in seeds)
    return {conversation_of(prompt) for prompt in as_logged}


def _as_trained(prompt: Prompt, regions: Sequence[str]) -> Prompt:
    """Return a prompt as a snapshot would hold it, personal details taken out."""
    return tuple(Message(turn.role, redact(turn.content, regions)[0]) for turn in prompt)


def _divide_alike(one: ModelVersion, other: ModelVersion) -> bool:
    """Say whether both turns gave each rater to the same reward model; true where one had none."""
    shares = [
        version.lineage["recipe"]["reward"]["shares"]
        for version in (one, other)
        if version.lineage.get("reward_models") and "recipe" in version.lineage
    ]
    return all({job: each[job] for job in JOBS} == shares[0] for each in shares)
