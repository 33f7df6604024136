"""The training stages of one turn: files in, files and numbers out.

Each runs in a process of its own (resources/worker.py), so that a crash is contained and a GPU's
memory is given back. They are plain functions: nothing here knows who calls.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_pipeline.config import PolicySettings, Settings
from rlhf_pipeline.errors import EvaluationError, NotEnoughData, PromptRefused, TrainingError
from rlhf_pipeline.feedback import datasets, gold, snapshot
from rlhf_pipeline.feedback.datasets import (
    JOBS,
    Job,
    conversation_of,
    job_of,
    split_of,
    unit_interval,
)
from rlhf_pipeline.fence import need_right_to_write
from rlhf_pipeline.files import read_json, write_json, write_text
from rlhf_pipeline.records import (
    EvaluationPrompt,
    Message,
    PreferencePair,
    Progress,
    Prompt,
    RewardExample,
    RewardFunction,
    RewardInput,
    Role,
    SftExample,
    prompt_to_json,
)
from rlhf_pipeline.reward import REPORT, SETTINGS, TRUNK

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerBase

    from rlhf_pipeline.evaluation.behaviour import BehaviourItem
    from rlhf_pipeline.evaluation.pair_judge import PairJudge
    from rlhf_pipeline.policy.loading import Policy
    from rlhf_pipeline.policy.tiny import Said
    from rlhf_pipeline.ppo.plan import RewardModels
    from rlhf_pipeline.ppo.result import TrainingResult
    from rlhf_pipeline.ppo.settings import PpoSettings
    from rlhf_pipeline.reward.composite import CompositeReward
    from rlhf_pipeline.reward.model import LearnedReward
    from rlhf_pipeline.reward.settings import FunctionSettings

Row = TypeVar("Row", PreferencePair, RewardExample)
KeepGoing = Callable[[], None]
"""Raises ClaimLost when this run must stop; called before anything is written."""

PAIRS = "preference_pairs.jsonl.gz"
EXAMPLES = "reward_examples.jsonl.gz"
SFT_EXAMPLES = "sft_examples.jsonl.gz"
PROMPTS = "evaluation_prompts.jsonl.gz"
GOLD = "gold_answers.jsonl"
DATA_SETS = (PAIRS, EXAMPLES, SFT_EXAMPLES, PROMPTS, GOLD)
BEGAN = "began.json"  # in a turn's folder: whom it began with, and its newest attempt's token
REWARD = "reward.json"  # there: what the reward models came to, once they are trained

# Of a recipe's reward section what PPO maximises goes by; the rest made the models.
MAXIMISED_BY = ("functions", "wish_bound")
MADE_BY = "settings.json"  # beside the three reward models
MAKES_NONE = ("functions", "wish_bound", "given", "retrain_drop", "warm_start", "min_pairs")
# What says who learns from what, and what from none.
SPLIT_BY = ("shares", "evaluation_share", "split_by")

MOST_REFERENCES = 4  # completions of one prompt that others are compared with
CENTRING_PROMPTS = 256  # baseline completions that shall score 0 on average


@dataclass(frozen=True, slots=True)
class Turn:
    """One agent's way from a snapshot to a verdict: where its files are, and by which right."""

    agent_id: str
    fingerprint: str
    watermark: int
    token: int  # the claim's fencing token
    data: Path  # the snapshot and its data sets
    work: Path  # what training leaves: sft, reward, ppo, evaluation
    baseline: Path | None  # None before version 0 is trained
    champion: Path | None
    settings: Settings
    previous: Path | None = None  # the work folder of the turn before; None for the first


def train_baseline(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Train version 0 from the seed conversations and what the snapshot holds worth imitating."""
    from rlhf_pipeline.policy.adapters import base_digest
    from rlhf_pipeline.policy.loading import load_policy
    from rlhf_pipeline.policy.sft import train_sft
    from rlhf_pipeline.ppo.learner import check_policy

    settings = turn.settings
    check_before_training(turn)
    imitable = _imitable(turn)
    seeded = seeds(settings, stand_in=not imitable)
    examples = [*seeded, *imitable]
    if settings.sft.max_examples is not None:
        examples = examples[: settings.sft.max_examples]
    if not examples:
        raise NotEnoughData(
            "the baseline needs conversations to learn from, found none; set "
            "sft.seed_conversations, or send corrections, ratings or preferences first"
        )
    source = base_source(settings)
    if source is None:
        policy = _untrained(turn, examples, seeded)
    else:
        policy = load_policy(
            source,
            device=settings.policy.device,
            dtype="bfloat16"
            if settings.sft.lora_rank and settings.policy.dtype == "bfloat16"
            else "float32",
        )
    check_policy(policy, settings.ppo)
    _check_seeds(policy.tokenizer, seeded[: len(examples)], settings)
    digest = None if source is None else base_digest(source)
    keep_going()
    result = train_sft(
        policy,
        examples,
        turn.work / "sft",
        epochs=settings.sft.epochs,
        learning_rate=settings.sft.learning_rate,
        batch_size=settings.sft.batch_size,
        max_tokens=settings.policy.max_prompt_tokens + settings.policy.max_completion_tokens,
        seed=settings.training.seed,
        lora_rank=settings.sft.lora_rank,
        report=report,
    )
    parameters = sum(p.numel() for p in policy.model.parameters())
    return {
        "path": str(result.path),
        "examples": len(examples),
        "parameters": parameters,
        "loss_curve": [list(point) for point in result.loss_curve],
        "seconds": result.seconds,
        "base": {} if source is None else {"started_from": str(source), "base_digest": digest},
    }


def check_before_training(turn: Turn) -> None:
    """Raise for what a later stage of the turn would refuse, before the earlier ones train.

    Nothing is loaded for it: a judge's key, trackers, the precision, and, where there is a policy
    to start from, whether its context holds the settings' lengths and the prompts, and whether
    there are pairs where it learns from these; and of reward models that the recipe names, whether
    they read whole prompts and completions.
    """
    from rlhf_pipeline.policy.loading import choose_device, context_length_of, load_tokenizer
    from rlhf_pipeline.ppo.collecting import encode_within
    from rlhf_pipeline.ppo.dpo import decided_pairs
    from rlhf_pipeline.ppo.learner import check_context, new_scaler
    from rlhf_pipeline.ppo.plan import read_config
    from rlhf_pipeline.ppo.trackers import check_trackers
    from rlhf_pipeline.reward.named import check_keys, folders_of

    settings, ppo, reward = turn.settings, turn.settings.ppo, turn.settings.reward
    pair_judge_of(settings)
    check_keys(reward.functions)
    check_reads_whole("reward.functions", folders_of(reward.functions), settings.policy)
    if reward.given is not None:
        given = [Path(reward.given) / job for job in JOBS]
        there = [folder for folder in given if (folder / SETTINGS).exists()]
        check_reads_whole("reward.given", there, settings.policy)
    check_trackers(settings.training.report_to)
    new_scaler(choose_device(ppo.device), ppo)
    start = turn.champion or turn.baseline
    if start is None:
        return  # version 0 may be trained before anybody has asked anything
    check_context(context_length_of(read_config(start)), ppo)
    prompts, watch_prompts, _ = asked_prompts(turn)
    tokenizer = load_tokenizer(start)
    encode_within(tokenizer, watch_prompts, ppo, "watch_prompts")
    if ppo.estimator != "dpo":
        encode_within(tokenizer, prompts, ppo, "prompts")
    else:  # which asks nothing but the watch prompts, and reads those of the pairs
        pairs = decided_pairs(_proxy_pairs(turn), ppo)
        encode_within(tokenizer, [pair.prompt for pair in pairs], ppo, "prompts of pairs")


def check_reads_whole(setting: str, folders: Iterable[Path], policy: PolicySettings) -> None:
    """Raise TrainingError where a reward model that a setting names reads less than the policy may
    be asked or say: the rest would count for nothing.
    """
    for folder in folders:
        reads = _reads_less(folder, policy)
        if reads is not None:
            raise TrainingError(
                f"{setting} must read whole prompts and completions: needed "
                f"{policy.max_prompt_tokens} and {policy.max_completion_tokens} tokens, found "
                f"{reads[0]} and {reads[1]} of {folder}; lower policy.max_prompt_tokens and "
                f"max_completion_tokens, or leave that model out of {setting}"
            )


def _reads_less(folder: Path, policy: PolicySettings) -> tuple[int, int] | None:
    """Return how many tokens of a prompt and a completion a reward model reads; None: enough."""
    told = read_json(folder / SETTINGS)
    reads = told["max_prompt_tokens"], told["max_completion_tokens"]
    enough = reads[0] >= policy.max_prompt_tokens and reads[1] >= policy.max_completion_tokens
    return None if enough else reads


def takes_roles(turn: Turn) -> Callable[[tuple[Role, ...]], bool]:
    """Return what says whether the turn's models take a conversation in which these roles speak.

    A chat template refuses by who speaks after whom, not by words. The tokenizers are loaded when
    it is first asked.
    """

    @cache
    def tokenizers() -> list[PreTrainedTokenizerBase]:
        from rlhf_pipeline.policy.loading import load_tokenizer

        settings, reward = turn.settings, turn.settings.reward
        trained = {path for path in (turn.champion, turn.baseline) if path is not None}
        sources = [*(trained or [base_source(settings)]), reward.base]
        if reward.given is not None:
            sources += [Path(reward.given) / job / TRUNK for job in JOBS]
        return [load_tokenizer(source) for source in sources if source is not None]

    @cache
    def takes(roles: tuple[Role, ...]) -> bool:
        from rlhf_pipeline.policy.chat import render

        prompt = tuple(Message(role, "text") for role in roles)
        try:
            for tokenizer in tokenizers():
                render(tokenizer, prompt)
        except PromptRefused:
            return False
        return True

    return takes


def base_source(settings: Settings) -> str | Path | None:
    """Return what the settings' policy starts from: a folder or a hub id; None for the tiny one.

    A `models:/` URI becomes the folder of the model it names now (registry/bases.py).
    """
    base = settings.policy.base
    if not base.startswith("models:/"):
        return None if base == "tiny" else base
    from rlhf_pipeline.database import open_database
    from rlhf_pipeline.registry.bases import base_folder
    from rlhf_pipeline.registry.ledger import PromotionLedger
    from rlhf_pipeline.registry.models import ModelRegistry

    ledger = PromotionLedger(open_database(settings.resolved_database_url), settings.state_dir)
    registry = ModelRegistry(ledger, settings.resolved_mlflow_uri, settings.mlflow_folder)
    return base_folder(registry, base)


def _untrained(turn: Turn, examples: Sequence[SftExample], seeded: Sequence[SftExample]) -> Policy:
    """Return the tiny policy, on the recipe's tiktoken encoding or a tokenizer fitted here."""
    from rlhf_pipeline.policy.tiny import build_tiny, build_tiny_on

    settings = turn.settings
    tiny = settings.policy.tiny
    sizes = {
        "layers": tiny.layers,
        "width": tiny.width,
        "heads": tiny.heads,
        "context": tiny.context,
        "seed": settings.training.seed,
    }
    if tiny.encoding is not None:
        return build_tiny_on(tiny.encoding, **sizes)
    said = _said(turn, seeded)
    return build_tiny(_texts(examples), said, vocabulary=tiny.vocabulary, **sizes)


def without_gold(turn: Turn, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the votes that data sets are made of; answers to gold questions are kept beside."""
    settings = turn.settings.feedback
    answers = turn.data / GOLD
    need_right_to_write()
    answers.unlink(missing_ok=True)
    if settings.gold_questions is None:
        return frame
    path = Path(settings.gold_questions)
    better = gold.read_questions(
        path, turn.agent_id, redacts=settings.redact, regions=settings.phone_regions
    )
    rest, found = gold.set_apart(frame, better)
    gold.write_answers(answers, found)
    return rest


def train_reward_models(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Train proxy, stopping and gate model, each on voters of its own; returns their reports.

    Given ones are used as they are, and the turn before's while they are good enough
    (reward.retrain_drop).
    """
    from rlhf_pipeline.reward.judging import check_judge
    from rlhf_pipeline.reward.matched import by_prompt, judging_votes
    from rlhf_pipeline.reward.training import train_reward_model

    settings = turn.settings
    baseline = _need(turn.baseline, "a baseline")
    check_before_training(turn)
    pairs = datasets.read_jsonl(turn.data / PAIRS, PreferencePair)
    made_by = _made_by(turn)
    again = _used_again(turn, pairs, made_by)
    if again is not None:
        return again
    every = settings.reward.reads_every_kind
    found = datasets.read_jsonl(turn.data / EXAMPLES, RewardExample)
    train, test = reward_splits(pairs, settings, found)
    asked = datasets.read_jsonl(turn.data / PROMPTS, EvaluationPrompt)
    topics = {prompt_to_json(p.prompt): p.topic for p in asked if p.topic is not None}
    said = _examples_by_job(found, settings)
    known = gold.tallies(gold.read_answers(turn.data / GOLD))
    warm = turn.previous if settings.reward.warm_start else None
    why_cold: str | None = None
    if warm is not None and _made_otherwise(warm, made_by, SPLIT_BY):
        # They may have learnt from what they would be held against, or each other's.
        warm, why_cold = None, "votes are divided otherwise than for the earlier one"
    held_out = [example for example in found if example.split == "evaluation"]
    judging = settings.reward.weights if every else {}
    matches = judging_votes(test, held_out, judging)
    check_judge(test, matches, held_out, judging)
    centring = training_prompts(turn)[:CENTRING_PROMPTS]
    asked_there = [] if matches is None else matches.asked
    centre_on, said_there = _baseline_completions(turn, baseline, (centring, asked_there), report)
    usual = by_prompt((one.prompt, one.completion) for one in said_there)
    reports: dict[str, Any] = {}
    for job in JOBS:
        keep_going()
        freeze = settings.reward.freeze_trunk or (settings.reward.freeze_judges and job != "proxy")
        outcome = train_reward_model(
            settings.reward.base or baseline,
            train[job],
            test,
            turn.work / "reward" / job,
            freeze_trunk=freeze,
            centre_on=centre_on,
            examples=said[job],
            test_examples=held_out,
            usual=usual,
            topics=topics,
            earlier=None if warm is None else warm / "reward" / job,
            kinds=settings.reward.weights if every else None,
            epochs=settings.reward.epochs,
            learning_rate=settings.reward.learning_rate,
            batch_size=settings.reward.batch_size,
            max_prompt_tokens=settings.policy.max_prompt_tokens,
            max_completion_tokens=settings.policy.max_completion_tokens,
            seed=settings.training.seed + JOBS.index(job),
            reads=settings.reward.reads,
            reads_likelihood=settings.reward.reads_likelihood,
            weigh_raters=settings.reward.weigh_raters,
            gold=known,
            heads=settings.reward.heads,
            combine=settings.reward.combine,
            disagreement_weight=settings.reward.disagreement_weight,
            lora_rank=settings.reward.lora_rank,
            dtype=settings.policy.frozen_dtype,
            min_pairs=settings.reward.min_pairs,
            device=settings.policy.device,
            report=lambda facts, job=job: report({"model": job, **facts}),  # type: ignore[misc]
        )
        reports[job] = read_json(outcome.path / REPORT)
        if why_cold is not None:
            reports[job]["why_cold"] = why_cold
            write_json(outcome.path / REPORT, reports[job])
    write_json(turn.work / "reward" / MADE_BY, made_by)
    return reports


def _made_by(turn: Turn) -> dict[str, Any]:
    """Return what decides which reward models the same votes come to.

    The baseline too, which scores 0 on average and, without reward.base, is what they begin from.
    """
    settings, baseline = turn.settings, _need(turn.baseline, "a baseline")
    share = settings.feedback.evaluation_share
    asked = datasets.read_jsonl(turn.data / PROMPTS, EvaluationPrompt)
    # An older release may have divided them, of a turn that goes on in this one.
    as_now = all(split_of(one.prompt, share) == "evaluation" for one in asked)
    return {
        "baseline": os.path.relpath(baseline.resolve(), settings.state_dir.resolve()),
        **settings.reward.model_dump(mode="json", exclude=set(MAKES_NONE)),
        "evaluation_share": share,
        "split_by": "said" if as_now else "conversation",
        "max_prompt_tokens": settings.policy.max_prompt_tokens,
        "max_completion_tokens": settings.policy.max_completion_tokens,
    }


def _made_otherwise(work: Path, now: Mapping[str, Any], names: Sequence[str] = ()) -> bool:
    """Say whether something else than `now` made a turn's reward models, or others of these names.

    Of what turns did not write down nobody knows.
    """
    file = work / "reward" / MADE_BY
    # Releases that held prompts out one by one wrote no `split_by`; later ones, "conversation", by
    # every letter, and "words", of what a system message says as well.
    then = {**now, "split_by": "prompt", **(read_json(file) if file.exists() else {})}
    return any(then[name] != now[name] for name in names or now)


def rewards_before(turn: Turn) -> Path | None:
    """Return the work folder of the turn whose reward models this one may begin from or use."""
    return turn.previous if turn.settings.reward.looks_back else None


def _used_again(
    turn: Turn, pairs: Sequence[PreferencePair], made_by: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Use given reward models, or the turn before's, as they are; None: they are to be trained.

    All three or none: a proxy judged by models of another time would be judged by other raters.
    Nor the turn before's where they were made by other settings.
    """
    from rlhf_pipeline.reward.calibration import judged_by
    from rlhf_pipeline.reward.model import load_reward_model
    from rlhf_pipeline.reward.reuse import (
        accuracy_on,
        has_fallen,
        is_whole,
        trained_in,
        use_again,
    )

    reward, previous = turn.settings.reward, turn.previous
    before: set[str] = set()
    if reward.given is not None:
        source = Path(reward.given)
    elif reward.retrain_drop is not None and previous is not None:
        source = previous / "reward"
        if not all(is_whole(source / job) for job in JOBS):
            return None
        if any(judged_by(read_json(source / job / REPORT)) != "pairs" for job in JOBS):
            return None  # new pairs, where there are any, would not tell whether it has fallen
        if _made_otherwise(previous, made_by):
            return None
        # Votes since it was trained, not since the turn before: few a turn become enough to tell.
        then = trained_in(source / JOBS[0]).parent.parent
        of_then = turn.data.parent / then.name[:16]  # the snapshot of that turn
        known = datasets.place_of(of_then / PAIRS)
        if not known.exists():
            return None
        before = {pair.pair_id for pair in datasets.read_jsonl(known, PreferencePair)}
    else:
        return None
    new = [p for p in pairs if p.pair_id not in before]
    policy = turn.settings.policy
    measured = {}
    for job in JOBS:
        if is_whole(source / job):
            if reward.given is None and _reads_less(source / job, policy) is not None:
                return None
            model = load_reward_model(source / job, device=policy.device, dtype=policy.frozen_dtype)
            measured[job] = accuracy_on(model, new)
            fell = reward.retrain_drop is not None and has_fallen(
                source / job, measured[job], reward.retrain_drop
            )
            if fell and reward.given is None:
                return None
    own = reward.given is None
    reports: dict[str, Any] = {
        job: use_again(source / job, turn.work / "reward" / job, measured.get(job), is_own=own)
        for job in JOBS
    }
    if (source / MADE_BY).exists():
        write_json(turn.work / "reward" / MADE_BY, read_json(source / MADE_BY))
    return reports


def train_policy(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Improve the champion on the proxy, or on its pairs; the stopping model chooses the update.

    PPO that cannot fit into memory is refused before anything is loaded (ppo/plan.py).
    """
    from rlhf_pipeline.ppo.trackers import reporting

    asked, folder = turn.settings.training.report_to, turn.work / "ppo"
    name = f"{turn.agent_id}-{turn.fingerprint[:16]}"
    device = turn.settings.ppo.device
    with reporting(asked, folder / "tracking", name, device=device) as track:

        def tell(facts: Mapping[str, float | int | str]) -> None:
            report(facts)
            track(facts)

        if turn.settings.ppo.estimator != "dpo":
            check_memory(turn, turn.settings.ppo)
        result = improve(turn, folder, turn.settings.ppo, tell, keep_going)
    return {"path": result.model_path, "result": str(turn.work / "ppo" / "result.json")}


def check_memory(turn: Turn, ppo: PpoSettings) -> None:
    """Raise TrainingError where training the turn's champion under `ppo` cannot fit into memory."""
    from rlhf_pipeline.ppo.plan import check_fits

    baseline = _need(turn.baseline, "a baseline")
    champion = _need(turn.champion, "a champion")
    config, shares = next_policy(champion, baseline, ppo)
    check_fits(config, ppo, reward_models_of(turn.settings), shares_reference=shares)


def next_policy(champion: Path, baseline: Path, ppo: PpoSettings) -> tuple[Any, bool]:
    """Return the configuration of what a turn trains, and whether its base is the reference's."""
    from rlhf_pipeline.policy.adapters import shares_base
    from rlhf_pipeline.ppo.plan import read_config

    return read_config(champion), shares_base(champion, baseline, ppo.lora_rank)


def policy_config(settings: Settings) -> Any:
    """Return the configuration of the model that the settings' policy starts from.

    The tiny policy's vocabulary counts at its largest. Raises ModelError where a hub id's
    configuration is not on this machine.
    """
    from rlhf_pipeline.policy.tiny import build_tiny_on, tiny_config
    from rlhf_pipeline.ppo.plan import read_config

    source = base_source(settings)
    if source is not None:
        return read_config(source)
    tiny = settings.policy.tiny
    sizes = {n: getattr(tiny, n) for n in ("layers", "width", "heads", "context")}
    if tiny.encoding is not None:
        return build_tiny_on(tiny.encoding, **sizes, seed=0).model.config
    return tiny_config(tiny.vocabulary, **sizes)


def reward_models_of(settings: Settings) -> RewardModels:
    """Return what a plan needs to know of the reward models that PPO asks.

    Raises ModelError where the configuration of reward.base is not on this machine.
    """
    from rlhf_pipeline.policy.loading import choose_device
    from rlhf_pipeline.ppo.plan import FULL, RewardModels, read_config
    from rlhf_pipeline.reward.model import tokens_at_once

    reward, base = settings.reward, settings.reward.base
    adapts = reward.lora_rank > 0
    return RewardModels(
        beside=named_models(reward.functions, settings.policy.device),
        config=None if base is None else read_config(base),
        shares=adapts and base is None,
        likelihood=reward.reads_likelihood,
        number_bytes=2 if adapts and settings.policy.frozen_dtype == "bfloat16" else FULL,
        tokens_at_once=tokens_at_once(choose_device(settings.policy.device)),
    )


def named_models(
    functions: Mapping[str, FunctionSettings], device: str
) -> tuple[RewardModels, ...]:
    """Return what a plan needs to know of the reward models that functions name by their folders.

    Each is loaded whole in float32, its base too where it keeps none. Raises ModelError where that
    is not to be found.
    """
    from rlhf_pipeline.policy.loading import choose_device
    from rlhf_pipeline.ppo.plan import RewardModels, read_config
    from rlhf_pipeline.reward import model
    from rlhf_pipeline.reward.named import folders_of

    found = []
    for folder in folders_of(functions):
        told = read_json(folder / SETTINGS)
        facts = told.get("base")
        source = folder / TRUNK if facts is None else model.base_source(facts, folder)
        one = RewardModels(
            count=1,
            config=read_config(source),
            shares=False,
            likelihood=bool(told.get("likelihood")),
            tokens_at_once=model.tokens_at_once(choose_device(device)),
        )
        found.append(one)
    return tuple(found)


def improve(
    turn: Turn,
    output_dir: Path,
    ppo: PpoSettings,
    report: Progress,
    keep_going: KeepGoing = lambda: None,
) -> TrainingResult:
    """Train the turn's champion under `ppo` into output_dir: what train_policy and tuning share."""
    from rlhf_pipeline.policy.loading import ADAPTER
    from rlhf_pipeline.ppo.dpo import train_dpo
    from rlhf_pipeline.ppo.learner import shared_base
    from rlhf_pipeline.ppo.trainer import train_ppo
    from rlhf_pipeline.reward.fitting import believed
    from rlhf_pipeline.reward.model import load_reward_model
    from rlhf_pipeline.reward.named import folders_of
    from rlhf_pipeline.simulation.people import customers

    baseline = _need(turn.baseline, "a baseline")
    champion = _need(turn.champion, "a champion")
    settings = turn.settings
    check_reads_whole("reward.functions", folders_of(settings.reward.functions), settings.policy)
    prompts, watch_prompts, references = asked_prompts(turn)
    reward_folder = turn.work / "reward"
    # DPO trains through a trainer of its own, on a base nothing else reads.
    adapts = ppo.lora_rank > 0 and ppo.estimator != "dpo"
    base = shared_base(champion, baseline, ppo) if adapts else None
    proxy, stopping = (
        load_reward_model(
            reward_folder / job,
            device=settings.policy.device,
            dtype=settings.policy.frozen_dtype,
            base=base,
        )
        for job in ("proxy", "stopping")
    )
    votes = turn.data / snapshot.FILE
    feedback_count = snapshot.count(votes) if votes.exists() else None
    # A critic that shares the policy's trunk begins with that; one of its own, as the proxy, where
    # that is of the policy's kind: of adapters where the policy is.
    begins_as_proxy = ppo.critic == "separate" and settings.reward.base is None
    if adapts and not (reward_folder / "proxy" / TRUNK / ADAPTER).is_file():
        begins_as_proxy = False
    if ppo.estimator == "dpo":
        return train_dpo(
            policy_dir=champion,
            reference_dir=baseline,
            pairs=believed(reward_folder / "proxy", _proxy_pairs(turn)),
            reward=proxy,
            stopping=stopping,
            watch_prompts=watch_prompts,
            output_dir=output_dir,
            settings=ppo,
            feedback_count=feedback_count,
            report=report,
            keep_going=keep_going,
        )
    return train_ppo(
        policy_dir=champion,
        reference_dir=baseline,
        reward=maximised(turn, proxy, references),
        stopping=stopping,
        prompts=prompts,
        watch_prompts=watch_prompts,
        output_dir=output_dir,
        settings=ppo,
        value_init=reward_folder / "proxy" if begins_as_proxy else None,
        base=base,
        user=None if settings.training.simulated_user is None else customers,
        feedback_count=feedback_count,
        replaces_others=True,  # a turn has one folder, whatever its recipe is changed to
        report=report,
        keep_going=keep_going,
    )


def _proxy_pairs(turn: Turn) -> list[PreferencePair]:
    """Return what DPO may learn from: the voters of the stopping and the gate model stay unseen."""
    pairs = datasets.read_jsonl(turn.data / PAIRS, PreferencePair)
    return _pairs_by_job(pairs, turn.settings)["proxy"]


def asked_prompts(
    turn: Turn,
) -> tuple[list[Prompt], list[Prompt], dict[str, list[str]] | None]:
    """Return the prompts to train on, those that are watched, and the completions to compare with.

    The last is None where no reward function compares. Raises NotEnoughData.
    """
    from rlhf_pipeline.reward.named import needs_references

    settings = turn.settings
    prompts = training_prompts(turn)
    references = references_of(turn) if needs_references(settings.reward.functions) else None
    if references is not None:
        prompts = [prompt for prompt in prompts if prompt_to_json(prompt) in references]
        if len(prompts) < 2:
            raise NotEnoughData(
                "reward.functions compares completions with chosen ones: needed at least 2 "
                f"training prompts that have one, found {len(prompts)}; collect preferences or "
                "corrections, or leave out what needs references"
            )
    if len(prompts) < 2 and settings.ppo.estimator != "dpo":
        raise NotEnoughData(
            "PPO needs 2 training prompts at least, one of them to watch, found "
            f"{len(prompts)}, however often people voted on it; collect feedback on other prompts"
        )
    most = min(settings.training.watch_prompts, max(1, len(prompts) // 5))
    return *_watched_apart(prompts, most), references


def _watched_apart(prompts: Sequence[Prompt], most: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts but for the first conversations that fit into `most`, and those of these.

    Where none fits, but for the first prompts.
    """
    by_conversation = defaultdict[str, list[Prompt]](list)
    for prompt in prompts:
        by_conversation[conversation_of(prompt)].append(prompt)
    watched: list[Prompt] = []
    for of_one in by_conversation.values():
        if len(watched) + len(of_one) <= most:
            watched += of_one
    watched = watched or list(prompts[:most])
    apart = set(watched)
    return [prompt for prompt in prompts if prompt not in apart], watched


def maximised(
    turn: Turn, learned: RewardFunction, references: Mapping[str, Sequence[str]] | None = None
) -> RewardFunction:
    """Return what PPO maximises: the learned reward, with the recipe's functions where it has some.

    Their weights are raised by what the proxy's voters wish for, within reward.wish_bound.
    `references` are CompositeReward's. The stopping and the gate reward stay learned ones: rules
    may steer training, but people's votes choose and judge.
    """
    from rlhf_pipeline.feedback.wishes import wished_shares
    from rlhf_pipeline.reward.named import composite_of
    from rlhf_pipeline.reward.settings import with_wishes

    settings, votes = turn.settings, turn.data / snapshot.FILE
    functions, bound = settings.reward.functions, settings.reward.wish_bound
    if functions and bound and votes.exists():
        proxys = _votes_for_proxy(settings)
        functions = with_wishes(functions, wished_shares(votes, proxys), bound)
    return composite_of(
        functions,
        learned,
        references=references,
        judgements=settings.state_dir / "judgements",
        device=settings.policy.device,
    )


def evaluate_candidate(turn: Turn, report: Progress, keep_going: KeepGoing) -> dict[str, Any]:
    """Compare the candidate with baseline and champion, judged by the gate model; then the gate."""
    from rlhf_pipeline.evaluation import PAGE
    from rlhf_pipeline.evaluation.compare import compare
    from rlhf_pipeline.evaluation.facts import REWARD_REPORT, disagreement_facts, gate_facts
    from rlhf_pipeline.evaluation.gate import decide
    from rlhf_pipeline.evaluation.groups import (
        group_facts,
        judge_by_group,
        judge_by_voted_groups,
    )
    from rlhf_pipeline.evaluation.page import body
    from rlhf_pipeline.evaluation.page import page as page_of
    from rlhf_pipeline.evaluation.plots import pictures_in, write_plots
    from rlhf_pipeline.reward.named import needs_references

    settings = turn.settings
    baseline = _need(turn.baseline, "a baseline")
    champion = _need(turn.champion, "a champion")
    prompts = datasets.read_jsonl(turn.data / PROMPTS, EvaluationPrompt)
    if not prompts:
        raise EvaluationError(
            "needed held-out prompts, found none; raise feedback.evaluation_share or collect "
            "feedback on more prompts"
        )
    keep_going()
    judges = judges_of(turn)
    composite = kept_composite(turn, judges["proxy"])
    comparison = compare(
        turn.work / "ppo" / "policy",
        baseline,
        None if champion == baseline else champion,
        prompts[: settings.evaluation.prompts],
        judges["gate"],
        {job: judge for job, judge in judges.items() if job != "gate"},
        composite=composite,
        referenced_only=needs_references(settings.reward.functions),
        titles=settings.evaluation.titles,
        pair_judge=pair_judge_of(settings),
        pairs_judged=asked.prompts if (asked := settings.evaluation.judge) else 0,
        max_completion_tokens=settings.policy.max_completion_tokens,
        max_prompt_tokens=settings.policy.max_prompt_tokens,
        temperature=settings.policy.temperature,
        seed=settings.training.seed,
        bootstrap_samples=settings.evaluation.bootstrap_samples,
        samples_shown=settings.evaluation.samples_shown,
        behaviour=_behaviour_items(turn) if settings.evaluation.behaviour_tries else (),
        behaviour_tries=settings.evaluation.behaviour_tries,
        device=settings.policy.device,
        dtype=settings.policy.dtype,  # rounded as they are served
        report=report,
    )
    pairs = datasets.read_jsonl(turn.data / PAIRS, PreferencePair)
    by_group = judge_by_group(judges["gate"], pairs, prompts)
    if not by_group and (turn.work / REWARD_REPORT).exists():
        by_group = judge_by_voted_groups(read_json(turn.work / REWARD_REPORT))
    comparison = replace(comparison, judge=by_group)
    decision = decide(
        comparison,
        gate_limits(settings),
        facts={
            **gate_facts(turn.data, turn.work, measure_of_judges(turn)),
            **disagreement_facts(comparison.metrics(), turn.work),
            **group_facts(by_group),
        },
    )
    drawn = write_plots(comparison, turn.work / "evaluation")
    title = f"{turn.agent_id}: candidate from snapshot {turn.fingerprint[:16]}"
    page = turn.work / PAGE
    write_text(page, page_of(title, body(comparison, decision, pictures_in(turn.work))))
    return {
        "report": comparison.to_json(),
        "page": str(page),
        "markdown": comparison.to_markdown(),
        "gate": decision.to_json(),
        "gate_markdown": decision.to_markdown(),
        "plots": [str(path) for path in drawn],
    }


def measure_of_judges(turn: Turn) -> Path | None:
    """Return the work folder of the turn whose judge this one's may not fall below, or None.

    Of the turn that made the champion; beside the turn before, which may have been refused for its
    judge, the same judge would be no worse a night later. That one where the champion had none.
    """
    from rlhf_pipeline.evaluation.facts import REWARD_REPORT

    champions = None if turn.champion is None else turn.champion.parent.parent
    work = champions if champions and (champions / REWARD_REPORT).exists() else turn.previous
    if work is not None and _made_otherwise(work, _made_by(turn), ("split_by",)):
        return None  # what it was found to be there says less than it seems
    return work


def gate_limits(settings: Settings) -> dict[str, Any]:
    """Return the limits of the gate's rules that the settings change."""
    return {
        "prompt_drift": settings.drift.threshold_psi,
        "top_raters": settings.validation.top_raters_share,
        **settings.promotion.gate,
    }


def pair_judge_of(settings: Settings) -> PairJudge | None:
    """Return the language model that compares completions; None where the settings name none."""
    from rlhf_pipeline.evaluation.pair_judge import PairJudge

    asked = settings.evaluation.judge
    if asked is None:
        return None
    return PairJudge(
        asked.url,
        cache=settings.state_dir / "judgements",
        **asked.model_dump(exclude={"url", "prompts"}),
    )


def judges_of(turn: Turn) -> dict[Job, LearnedReward]:
    """Return the turn's three reward models, loaded; with adapters they share one base."""
    from rlhf_pipeline.policy.adapters import bare_base
    from rlhf_pipeline.reward.model import load_reward_model

    settings, baseline = turn.settings, _need(turn.baseline, "a baseline")
    device, dtype = settings.policy.device, settings.policy.frozen_dtype
    shares = settings.reward.lora_rank > 0 and settings.reward.base is None
    base = bare_base(baseline, device=device, dtype=dtype) if shares else None
    return {
        job: load_reward_model(turn.work / "reward" / job, device=device, dtype=dtype, base=base)
        for job in JOBS
    }


def kept_composite(turn: Turn, learned: RewardFunction) -> CompositeReward | None:
    """Return what PPO maximised as it was where the kept policy was; None for `learned` alone."""
    from rlhf_pipeline.ppo.result import TrainingResult
    from rlhf_pipeline.reward.composite import CompositeReward

    composite = maximised(turn, learned)
    if not isinstance(composite, CompositeReward):
        return None
    composite.restore(TrainingResult.load(turn.work / "ppo" / "result.json").reward_state)
    return composite


def _behaviour_items(turn: Turn) -> list[BehaviourItem]:
    from rlhf_pipeline.evaluation.behaviour import items_for
    from rlhf_pipeline.evaluation.facts import SUPPORT

    support = turn.data / SUPPORT
    narrow = read_json(support)["associations"] if support.exists() else []
    learnt = [found["ngram"] for found in narrow if found["wins"]]
    return items_for(turn.settings.agent_folder(turn.agent_id), learnt)


STAGES: Mapping[str, Callable[[Turn, Progress, KeepGoing], dict[str, Any]]] = {
    "baseline": train_baseline,
    "reward": train_reward_models,
    "ppo": train_policy,
    "evaluation": evaluate_candidate,
}


def seeds(settings: Settings, *, stand_in: bool) -> list[SftExample]:
    """Return the seed conversations the settings name.

    The simulated people's are only a stand-in: an agent with examples of its own begins from those.
    Raises TrainingError for a file that cannot be read or a line that is no conversation.
    """
    wanted = settings.sft.seed_conversations
    if wanted is None:
        return []
    if wanted.startswith("simulated:"):
        if not stand_in:
            return []
        from rlhf_pipeline.simulation.world import seed_conversations

        return seed_conversations(int(wanted.removeprefix("simulated:")), settings.training.seed)
    return read_conversations(Path(wanted))


def _check_seeds(
    tokenizer: PreTrainedTokenizerBase, seeded: Sequence[SftExample], settings: Settings
) -> None:
    """Raise TrainingError naming the line of a seed conversation that the template refuses."""
    from rlhf_pipeline.policy.chat import render

    known: set[tuple[Role, ...]] = set()  # a template refuses by roles, not by words
    for number, example in enumerate(seeded, 1):
        roles = tuple(message.role for message in example.prompt)
        if roles in known:
            continue
        known.add(roles)
        try:
            render(tokenizer, example.prompt)
        except PromptRefused as error:
            where = settings.sft.seed_conversations
            raise TrainingError(f"{where}:{number}: {error}") from error


def reward_splits(
    pairs: Sequence[PreferencePair],
    settings: Settings,
    examples: Sequence[RewardExample] = (),
) -> tuple[dict[Job, list[PreferencePair]], list[PreferencePair]]:
    """Return each reward model's training pairs (no voter in two) and the pairs all are tested on.

    Where other kinds are learnt from, their `examples` count as pairs do, and pairs of two bad
    completions are kept. Raises NotEnoughData naming the model that has too few.
    """
    from rlhf_pipeline.reward.kinds import voters_of

    train = _pairs_by_job(pairs, settings)
    test = [pair for pair in pairs if pair.split == "evaluation" and not pair.tie]
    others = _examples_by_job(examples, settings)
    kinds = settings.reward.weights
    what = "preference pairs"
    if settings.reward.reads_every_kind:
        what = f"votes of the kinds {', '.join(kinds)}"
    for job in JOBS:
        found = len(voters_of(train[job], others[job], kinds))
        missing = settings.reward.min_pairs - found
        if missing > 0:
            heard = [v for some in JOBS for v in voters_of(train[some], others[some], kinds)]
            judging = [pair for pair in pairs if pair.split == "evaluation"]
            asked = [example for example in examples if example.split == "evaluation"]
            held_out = len(voters_of(judging, asked, kinds))
            left = 1 - settings.feedback.evaluation_share or 1.0  # of 1 none teach, whatever comes
            more = round(missing / (settings.reward.shares.by_job()[job] * left))
            raise NotEnoughData(
                f"the {job} reward model needs {settings.reward.min_pairs} {what}, found "
                f"{found} of {len(heard)}, which {len(set(heard))} raters gave, no rater teaching "
                f"two models, while {held_out} more are held out for judging "
                f"(feedback.evaluation_share); collect about {more} more of "
                f"several raters, or lower reward.min_pairs{_unread(examples, settings)}"
            )
    return train, test


def _unread(examples: Sequence[RewardExample], settings: Settings) -> str:
    """Return what to do about votes that are there and of kinds that teach nothing; "" for none."""
    counts = Counter(e.kind.value for e in examples if e.kind.value not in settings.reward.kinds)
    if not counts:
        return ""
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    return f"; other votes are there ({told}): name their kinds in reward.kinds to learn from them"


def _pairs_by_job(
    pairs: Sequence[PreferencePair], settings: Settings
) -> dict[Job, list[PreferencePair]]:
    """Return each reward model's training pairs: those of its voters."""
    every = settings.reward.reads_every_kind
    return _by_job((pair for pair in pairs if every or not pair.both_bad), settings)


def _examples_by_job(
    examples: Sequence[RewardExample], settings: Settings
) -> dict[Job, list[RewardExample]]:
    """Return each reward model's training examples of the kinds it learns from, by its voters."""
    kinds = settings.reward.kinds
    return _by_job((example for example in examples if example.kind.value in kinds), settings)


def _by_job(rows: Iterable[Row], settings: Settings) -> dict[Job, list[Row]]:
    """Return which of the training rows each reward model learns from, by its voters."""
    shares = settings.reward.shares.by_job()
    by_job: dict[Job, list[Row]] = {job: [] for job in JOBS}
    for row in rows:
        if row.split == "train":
            by_job[job_of(row.voter, shares)].append(row)
    return by_job


def training_prompts(turn: Turn) -> list[Prompt]:
    """Return every training prompt of the turn once, in an order that only the prompts decide."""
    pairs = datasets.read_jsonl(turn.data / PAIRS, PreferencePair)
    examples = datasets.read_jsonl(turn.data / EXAMPLES, RewardExample)
    records: list[PreferencePair | RewardExample] = [*pairs, *examples]
    by_text = {prompt_to_json(r.prompt): r.prompt for r in records if r.split == "train"}
    if not by_text:
        raise NotEnoughData("needed training prompts, found none; collect feedback first")
    return [by_text[text] for text in sorted(by_text, key=lambda t: unit_interval("order", t))]


def _baseline_completions(
    turn: Turn, baseline: Path, asked: Iterable[Sequence[Prompt]], report: Progress
) -> list[list[RewardInput]]:
    """Return what the baseline, loaded once, says to each of several lists of prompts."""
    from rlhf_pipeline.policy.loading import load_policy
    from rlhf_pipeline.policy.sampling import complete

    settings = turn.settings.policy
    policy: Policy = load_policy(baseline, device=settings.device, dtype=settings.frozen_dtype)
    said = []
    for prompts in asked:
        completions = complete(
            policy,
            prompts,
            max_completion_tokens=settings.max_completion_tokens,
            max_prompt_tokens=settings.max_prompt_tokens,
            temperature=settings.temperature,
            seed=turn.settings.training.seed,
            report=report,
        )
        said.append([RewardInput(p, c.text) for p, c in zip(prompts, completions, strict=True)])
    return said


def _votes_for_proxy(settings: Settings) -> Callable[[str], bool]:
    """Return what says of a voter whether the proxy learns from them; the others' stay unseen."""
    shares = settings.reward.shares.by_job()
    return lambda voter: job_of(voter, shares) == "proxy"


def references_of(turn: Turn) -> dict[str, list[str]]:
    """Return what the proxy's voters chose or wrote, by prompt: what completions compare with."""
    proxys = _votes_for_proxy(turn.settings)
    found: dict[str, list[str]] = {}
    for pair in datasets.read_jsonl(turn.data / PAIRS, PreferencePair):
        held_out = pair.split != "train" or not proxys(pair.voter)
        if held_out or not pair.decided:
            continue
        texts = found.setdefault(prompt_to_json(pair.prompt), [])
        if pair.chosen not in texts and len(texts) < MOST_REFERENCES:
            texts.append(pair.chosen)
    return found


def _imitable(turn: Turn) -> list[SftExample]:
    path = datasets.place_of(turn.data / SFT_EXAMPLES)
    return datasets.read_jsonl(path, SftExample) if path.exists() else []


def _texts(examples: Sequence[SftExample]) -> list[str]:
    return [
        text
        for example in examples
        for text in (*(message.content for message in example.prompt), example.completion)
    ]


def _said(turn: Turn, seeded: Sequence[SftExample]) -> list[Said]:
    """Return the texts of the seeds, and of the votes that may train with whose they are.

    Who asked says the store; of a vote that brought its own texts, who voted.
    """
    from rlhf_pipeline.database import open_database
    from rlhf_pipeline.feedback.store import FeedbackStore
    from rlhf_pipeline.policy.tiny import Said

    kinds: tuple[tuple[str, type[Any]], ...] = ((PAIRS, PreferencePair), (EXAMPLES, RewardExample))
    files = [(datasets.place_of(turn.data / name), kind) for name, kind in kinds]
    votes = [v for path, kind in files if path.exists() for v in datasets.read_jsonl(path, kind)]
    said = [Said(text, None) for text in _texts(seeded)]
    if not votes:
        return said
    store = FeedbackStore(open_database(turn.settings.resolved_database_url))
    askers = store.askers(turn.agent_id)
    for vote in votes:
        if vote.split != "train":
            continue
        is_pair = isinstance(vote, PreferencePair)
        texts = (vote.chosen, vote.rejected) if is_pair else (vote.completion,)
        asker = askers.get(vote.pair_id if is_pair else vote.example_id, vote.voter)
        of = asker, vote.voter, conversation_of(vote.prompt)
        said += [Said(text, of) for text in (*(m.content for m in vote.prompt), *texts)]
    return said


def read_conversations(path: Path) -> list[SftExample]:
    """Return a file's seed conversations. Raises TrainingError where one is none, or none there."""
    if not path.exists():
        raise TrainingError(f"needed seed conversations at {path}, found no such file")
    examples = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                messages = [Message(m["role"], m["content"]) for m in json.loads(line)["messages"]]
            except (ValueError, KeyError, TypeError) as error:
                raise TrainingError(
                    f'{path}:{number}: needed {{"messages": [{{"role", "content"}}, …]}}, '
                    f"found {line[:80]!r}"
                ) from error
            if len(messages) < 2 or messages[-1].role != "assistant":
                raise TrainingError(f"{path}:{number}: the last message must be the assistant's")
            examples.append(SftExample(tuple(messages[:-1]), messages[-1].content, "seed"))
    return examples


def _need(path: Path | None, what: str) -> Path:
    if path is None:
        raise TrainingError(
            f"needed {what} of this agent, found none; materialise sft_policy first"
        )
    return path
