"""Stages beyond what the first turn runs: other estimators, the same output, the same gate."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from rlhf_pipeline import stages
from rlhf_pipeline.config import load_settings
from rlhf_pipeline.database import open_database
from rlhf_pipeline.errors import ConfigError, NotEnoughData, PipelineError, TrainingError
from rlhf_pipeline.evaluation.gate import GateDecision
from rlhf_pipeline.experiment.offline import offline
from rlhf_pipeline.feedback import datasets
from rlhf_pipeline.feedback.datasets import JOBS
from rlhf_pipeline.feedback.store import FeedbackStore
from rlhf_pipeline.files import read_json, write_json
from rlhf_pipeline.policy.adapters import unique_bytes
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.ppo.plan import SHARE_USED, make_plan, read_config
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import (
    EvaluationPrompt,
    Feedback,
    FeedbackKind,
    Interaction,
    Message,
    PreferencePair,
    Progress,
    Prompt,
    RewardExample,
    SftExample,
    ignore_progress,
    now,
    user_prompt,
)
from rlhf_pipeline.registry.reasons import _tokens
from rlhf_pipeline.registry.reproduce import newest_turn, recorded_turn
from rlhf_pipeline.reward import FEWEST_MATCHED, RATERS, SETTINGS
from rlhf_pipeline.reward.model import (
    Calibration,
    Limits,
    load_reward_model,
    new_reward_model,
    save_reward_model,
)
from rlhf_pipeline.reward.settings import FunctionSettings
from rlhf_pipeline.stages import Turn
from tests.assets.world import FirstTurn, Loop, save_alternating
from tests.ppo.world import changed, save_absolute, save_base
from tests.reward.conftest import save_encoder

KEYED = FunctionSettings(
    function="https://rewards.example/score", options={"key_variable": "NO_SUCH_KEY"}
)


@pytest.fixture
def turn(loop: Loop, first_turn: FirstTurn, tmp_path: Path) -> Turn:
    """The turn that made version 1, with a work folder of its own."""
    settings = loop.pipeline.settings(first_turn.agent_id)
    version = loop.version(first_turn.agent_id, 1)
    return recorded_turn(loop.pipeline.ledger, settings, version, tmp_path / "work")


@pytest.mark.parametrize("estimator", [pytest.param("rloo", marks=pytest.mark.slow), "dpo"])
def test_one_setting_chooses_the_estimator_and_the_gate_judges_what_comes_out(
    turn: Turn, estimator: Literal["rloo", "dpo"], first_turn: FirstTurn
) -> None:
    shutil.copytree(first_turn.work / "reward", turn.work / "reward")
    ppo = replace(turn.settings.ppo, estimator=estimator, completions_per_prompt=2)
    # The reward models are there, whatever they were learnt from; DPO needs pairs for a step.
    reward = turn.settings.reward.model_copy(update={"min_pairs": 10**6})
    turn = replace(turn, settings=turn.settings.model_copy(update={"ppo": ppo, "reward": reward}))
    outcome = stages.train_policy(turn, ignore_progress, lambda: None)
    result = TrainingResult.load(outcome["result"])
    assert result.settings["estimator"] == estimator
    assert result.updates >= 1
    judged = stages.evaluate_candidate(turn, ignore_progress, lambda: None)
    decision = GateDecision.from_json(judged["gate"])
    assert {r.rule for r in decision.results} >= {"score_vs_baseline", "kl_stop"}


@pytest.mark.parametrize("adapts", [False, True])
def test_what_is_compared_is_rounded_as_it_is_served(
    adapts: bool, loop: Loop, first_turn: FirstTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By explanations too; else the gate would let in what nobody meets."""
    agent, pipeline = first_turn.agent_id, loop.pipeline
    version, types = loop.version(agent, 1), list[torch.dtype]()

    def load(*args: Any, **options: Any) -> Policy:
        policy = load_policy(*args, **options)
        types.extend({weight.dtype for weight in policy.model.parameters()})
        return policy

    monkeypatch.setattr("rlhf_pipeline.policy.loading.load_policy", load)
    settings = pipeline.settings(agent)
    lora = settings.policy.lora.model_copy(update={"enabled": adapts})
    policy = settings.policy.model_copy(update={"dtype": "bfloat16", "lora": lora})
    fewer = settings.evaluation.model_copy(update={"prompts": 4, "behaviour_tries": 0})
    settings = settings.model_copy(update={"policy": policy, "evaluation": fewer})
    turn = replace(
        recorded_turn(pipeline.ledger, settings, version, tmp_path / "work"), settings=settings
    )
    shutil.copytree(first_turn.work / "reward", turn.work / "reward")
    shutil.copytree(first_turn.work / "ppo", turn.work / "ppo")
    stages.evaluate_candidate(turn, ignore_progress, lambda: None)
    assert types == [torch.bfloat16] * 2  # the candidate, the baseline
    offline(pipeline.registry, settings, agent, "baseline", "1", prompts=4)
    assert types == [torch.bfloat16] * 4
    said = Interaction("said", agent, user_prompt("how much is it"), "much", 1, now())
    _tokens(pipeline.registry, turn, version, said)
    assert types == [torch.bfloat16] * 6


def test_a_critic_of_adapters_beside_a_whole_reward_model_begins_without_a_warning(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    """As both defaults, ppo.critic separate and reward.lora_rank 0, have it: with fresh ones."""
    settings = loop.pipeline.settings(first_turn.agent_id)
    turn = newest_turn(loop.pipeline.ledger, settings, first_turn.agent_id)
    ppo = replace(
        turn.settings.ppo, critic="separate", lora_rank=2, updates=1, rollouts_per_update=8
    )
    assert turn.settings.reward.lora_rank == 0
    result = stages.improve(turn, tmp_path / "ppo", ppo, ignore_progress)
    assert result.updates == 1
    assert result.reward_model_path is None


def test_a_judge_is_held_against_the_one_that_let_the_champion_in(
    turn: Turn, loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    refused, older = tmp_path / "refused", tmp_path / "older"
    made_by = json.loads((first_turn.work / "reward" / stages.MADE_BY).read_text())
    for work, split_by in ((refused, "said"), (older, "conversation")):
        (work / "reward").mkdir(parents=True)
        (work / "reward" / stages.MADE_BY).write_text(json.dumps({**made_by, "split_by": split_by}))
    later = replace(turn, champion=loop.version(first_turn.agent_id, 1).path, previous=refused)
    assert stages.measure_of_judges(later) == first_turn.work
    # Version 0 had no judge: the turn before is all there is.
    assert stages.measure_of_judges(replace(later, champion=turn.baseline)) == refused
    # One that was measured on what it had learnt from would seem better than it was.
    assert stages.measure_of_judges(replace(later, champion=turn.baseline, previous=older)) is None


def test_data_sets_that_an_older_release_divided_are_told_to_be(turn: Turn, tmp_path: Path) -> None:
    """A turn that goes on after an upgrade: its models are no start for the turn after it."""
    assert stages._made_by(turn)["split_by"] == "said"
    pairs = datasets.read_jsonl(turn.data / stages.PAIRS, PreferencePair)
    trained = next(pair.prompt for pair in pairs if pair.split == "train")
    then = replace(turn, data=tmp_path / "data")
    datasets.write_jsonl(then.data / stages.PROMPTS, [EvaluationPrompt("held out", trained)])
    assert stages._made_by(then)["split_by"] == "conversation"


def test_reward_models_are_used_again_while_nobody_votes_otherwise(
    turn: Turn, first_turn: FirstTurn, tmp_path: Path
) -> None:
    before = first_turn.work / "reward"
    for changes in ({"retrain_drop": 0.0}, {"given": str(before)}):
        # Where none is trained, votes need not be enough to train one.
        reward = turn.settings.reward.model_copy(update={**changes, "min_pairs": 10**6})
        again = replace(
            turn,
            work=tmp_path / next(iter(changes)),
            settings=turn.settings.model_copy(update={"reward": reward}),
            previous=first_turn.work,
        )
        reports = stages.train_reward_models(again, ignore_progress, lambda: None)
        assert {job: one["reused_from"] for job, one in reports.items()} == {
            job: str(before / job) for job in JOBS
        }
        weights = "head.safetensors"
        kept = again.work / "reward" / "proxy" / weights
        assert kept.read_bytes() == (before / "proxy" / weights).read_bytes()
        # Of the turn before nothing is new; of given models nobody knows what they have seen.
        new = reports["proxy"]["on_new_votes"]
        assert new is None if "retrain_drop" in changes else new["n"] > 20
        later = replace(again, work=again.work.with_name("later"), previous=again.work)
        shutil.rmtree(later.work, ignore_errors=True)
        reports = stages.train_reward_models(later, ignore_progress, lambda: None)
        # However often it is used again, votes are new since it was trained.
        assert reports["proxy"]["reused_from"] == str(before / "proxy")
        assert reports["proxy"]["on_new_votes"] == new


def test_votes_on_single_answers_teach_and_judge_where_nobody_compared(
    turn: Turn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(turn.data, data)
    thumbs = [  # one for one side of each pair, so that no two compare
        RewardExample(
            pair.pair_id,
            pair.prompt,
            pair.chosen if i % 2 else pair.rejected,
            FeedbackKind.thumbs,
            float(i % 2),
            None,
            pair.voter,
            datasets.split_of(pair.prompt, 0.5),  # so few votes are no turn's
        )
        for i, pair in enumerate(datasets.read_jsonl(data / stages.PAIRS, PreferencePair))
    ]
    datasets.write_jsonl(data / stages.EXAMPLES, thumbs)
    datasets.write_jsonl(data / stages.PAIRS, [])
    reward = turn.settings.reward.model_copy(
        update={"kinds": {"thumbs": 1.0}, "retrain_drop": 0.5, "freeze_trunk": True, "min_pairs": 2}
    )
    settings = turn.settings.model_copy(update={"reward": reward})
    turn = replace(turn, data=data, settings=settings)
    reports = stages.train_reward_models(turn, ignore_progress, lambda: None)
    assert {one["judged_by"] for one in reports.values()} == {"votes"}
    assert all(one["n"] >= FEWEST_MATCHED and one["pairs"] == 0 for one in reports.values())
    assert all(one["findings"]["learning_curve"] for one in reports.values())
    # No votes since could tell whether these have fallen, so the next turn trains its own.
    later = replace(turn, work=tmp_path / "later", previous=turn.work)
    again = stages.train_reward_models(later, ignore_progress, lambda: None)
    assert "reused_from" not in again["proxy"]
    assert again["proxy"]["accuracy"] == reports["proxy"]["accuracy"]
    # What cannot judge is said before the baseline is asked for anything.
    monkeypatch.setattr(stages, "_baseline_completions", lambda *_: pytest.fail("it was asked"))
    pleased = [replace(v, number=1.0) if v.split == "evaluation" else v for v in thumbs]
    datasets.write_jsonl(data / stages.EXAMPLES, pleased)
    with pytest.raises(NotEnoughData, match=r"found thumbs \d+ liked and 0 not"):
        stages.train_reward_models(replace(later, work=tmp_path / "w"), ignore_progress, print)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"report_to": ("wandb",)}}, "found 'wandb' is not; pip install"),
        ({"ppo": {"precision": "float16"}}, "needed a CUDA device, found cpu"),
        ({"ppo": {"max_completion_tokens": 90}}, r"context of \d+ tokens, found"),
        ({"ppo": {"max_prompt_tokens": 2, "long_prompts": "refuse"}}, "watch_prompts must have at"),
        ({"ppo": {"estimator": "dpo", "rollouts_per_update": 4096}}, r"DPO needs \d+ pairs"),
        ({"reward": {"functions": {"mine": KEYED}}}, "reward mine needs its key in NO_SUCH_KEY"),
    ],
)
def test_what_ppo_would_refuse_is_refused_before_reward_models_are_trained(
    turn: Turn, changes: dict[str, dict[str, Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_pipeline.ppo.trackers.find_spec", lambda name: None)
    ppo = replace(turn.settings.ppo, device="cpu", **changes.get("ppo", {}))
    training = turn.settings.training.model_copy(update=changes.get("training", {}))
    reward = turn.settings.reward.model_copy(update=changes.get("reward", {}))
    asked = turn.settings.model_copy(update={"ppo": ppo, "training": training, "reward": reward})
    with pytest.raises(PipelineError, match=message):
        stages.train_reward_models(replace(turn, settings=asked), ignore_progress, lambda: None)
    assert not (turn.work / "reward").exists()


def test_dpo_learns_from_those_whom_the_proxy_believes(
    turn: Turn, first_turn: FirstTurn, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(first_turn.work / "reward", turn.work / "reward")
    asked = replace(turn.settings.ppo, estimator="dpo")
    folder, raters = turn.work / "ppo", turn.work / "reward" / "proxy" / RATERS

    def taught() -> list[PreferencePair]:
        found: Any = stages.improve(turn, folder, asked, ignore_progress)
        return list(found)

    monkeypatch.setattr("rlhf_pipeline.ppo.dpo.train_dpo", lambda **given: given["pairs"])
    raters.unlink(missing_ok=True)
    every = taught()
    doubted, turned = (who for who, _ in Counter(pair.voter for pair in every).most_common(2))
    told = {doubted: (0.4, None), turned: (0.9, 1)}
    weights = {who: {"weight": w, "turned_after": after} for who, (w, after) in told.items()}
    write_json(raters, {"weights": weights})
    first = next(i for i, pair in enumerate(every) if pair.voter == turned and pair.decided)
    assert taught() == [
        pair
        for i, pair in enumerate(every)
        if pair.voter != doubted and (pair.voter != turned or i <= first)
    ]
    write_json(raters, {"careful": {doubted: 0.4}, "turned_after": {}})
    assert taught() == [pair for pair in every if pair.voter != doubted]


def test_a_pair_whose_prompt_is_too_long_for_dpo_is_refused_before_reward_models_are_trained(
    turn: Turn, tmp_path: Path
) -> None:
    ppo = replace(turn.settings.ppo, estimator="dpo", long_prompts="refuse", device="cpu")
    asked = replace(turn, settings=turn.settings.model_copy(update={"ppo": ppo}))
    stages.check_before_training(asked)
    data = tmp_path / "data"
    shutil.copytree(turn.data, data)
    pairs = datasets.read_jsonl(data / stages.PAIRS, PreferencePair)
    one = next(pair for pair in stages._proxy_pairs(asked) if pair.decided)
    long = replace(one, pair_id="long", prompt=user_prompt("How much is the kettle? " * 40))
    datasets.write_jsonl(data / stages.PAIRS, [*pairs, long])
    with pytest.raises(
        TrainingError, match=r"prompts of pairs must have at most .* found 1 longer"
    ):
        stages.check_before_training(replace(asked, data=data))


@pytest.mark.parametrize("setting", ["given", "functions"])
def test_a_reward_model_that_reads_less_than_the_policy_may_say_is_refused_before_anything_trains(
    turn: Turn, first_turn: FirstTurn, tmp_path: Path, setting: str
) -> None:
    given, most = tmp_path / "given", turn.settings.policy.max_completion_tokens
    shutil.copytree(first_turn.work / "reward", given)
    place = given / "gate" / SETTINGS
    functions = {"taste": FunctionSettings(function=str(place.parent), weight=0.5)}
    named = {"given": str(given), "functions": functions}
    reward = turn.settings.reward.model_copy(update={setting: named[setting]})
    asked = replace(turn, settings=turn.settings.model_copy(update={"reward": reward}))
    stages.check_before_training(asked)
    write_json(place, {**read_json(place), "max_completion_tokens": most - 1})
    wanted = rf"reward\.{setting} must read whole .* and {most} tokens, found \d+ and {most - 1} of"
    for stage in ("baseline", "reward", *(["ppo"] if setting == "functions" else [])):
        with pytest.raises(TrainingError, match=wanted):
            stages.STAGES[stage](asked, ignore_progress, lambda: None)
    assert not asked.work.exists() or not list(asked.work.rglob("*.safetensors"))


def test_many_votes_on_one_prompt_are_told_to_be_of_one(tmp_path: Path) -> None:
    prompt = user_prompt("Where is it?")
    votes = [
        RewardExample(str(i), prompt, f"{i}", FeedbackKind.thumbs, i % 2, None, "ann", "train")
        for i in range(90)
    ]
    datasets.write_jsonl(tmp_path / stages.PAIRS, [])
    datasets.write_jsonl(tmp_path / stages.EXAMPLES, votes)
    settings = load_settings("tiny", {"state_dir": tmp_path})
    turn = Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, settings)
    with pytest.raises(NotEnoughData, match=r"2 training prompts .* found 1, .* other prompts"):
        stages.asked_prompts(turn)
    datasets.write_jsonl(
        tmp_path / stages.EXAMPLES, [*votes, replace(votes[0], prompt=user_prompt("When?"))]
    )
    prompts, watched, _ = stages.asked_prompts(turn)
    assert (len(prompts), len(watched)) == (1, 1)


def test_prompts_are_watched_of_conversations_that_are_not_trained_on(tmp_path: Path) -> None:
    said = [Message("assistant", "There."), Message("user", "And then?")]
    prompts = [
        (Message("user", f"Where is number {n}?"), *said * turns)
        for n in range(20)
        for turns in range(3)
    ]
    settings = load_settings("tiny", {"state_dir": tmp_path, "training": {"watch_prompts": 10}})
    turn = Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, settings)

    def asked(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
        votes = [
            RewardExample(str(i), prompt, "x", FeedbackKind.thumbs, 1, None, "ann", "train")
            for i, prompt in enumerate(prompts)
        ]
        datasets.write_jsonl(tmp_path / stages.PAIRS, [])
        datasets.write_jsonl(tmp_path / stages.EXAMPLES, votes)
        trained, watched, _ = stages.asked_prompts(turn)
        return trained, watched

    trained, watched = asked(prompts)
    assert (len(trained), len(watched)) == (51, 9)  # three conversations are watched
    of = datasets.conversation_of
    assert not set(map(of, trained)) & set(map(of, watched))
    trained, watched = asked(prompts[:3])  # one conversation: some of it
    assert (len(trained), len(watched)) == (2, 1)
    assert not set(trained) & set(watched)


def test_no_person_stays_in_the_tokenizer_that_version_0_gets(tmp_path: Path) -> None:
    """Erasure reaches their rows, and no word of theirs is anywhere else to be read."""

    def votes(word: str, voters: list[str]) -> list[PreferencePair]:
        return [
            PreferencePair(
                f"{word} {n}",
                user_prompt(f"I am {word}, number {n}, where is it?"),
                f"Here, {word}.",
                "No.",
                voters[n % len(voters)],
                "",
                "train",
            )
            for n in range(24)
        ]

    sizes = {"layers": 1, "width": 32, "heads": 2, "context": 96, "vocabulary": 700}
    changes = {
        "policy": {"tiny": sizes, "max_prompt_tokens": 64, "max_completion_tokens": 24},
        "sft": {"seed_conversations": "simulated:20", "epochs": 1},
    }
    settings = load_settings("tiny", {"state_dir": tmp_path, **changes})
    own, liked = votes("Zxqvmarker", ["ann"]), votes("everybody", ["ann", "bob", "cy"])
    held_out = [replace(pair, split="evaluation") for pair in votes("Wjkhidden", list("abcdefgh"))]
    # Zoe asks, and three people vote: of an answer to her, her words are no less her own.
    store = FeedbackStore(open_database(settings.resolved_database_url))
    store.ensure_agent("a")
    hers = [replace(pair, pair_id="") for pair in votes("Ptolemaida", ["dan", "eve", "fay"])]
    for number, pair in enumerate(hers):
        one = Interaction(f"{number}", "a", pair.prompt, pair.chosen, 0, now(), user_id="zoe")
        store.add_interactions([one])
        kind, by = FeedbackKind.thumbs, pair.voter
        given = Feedback("a", kind, f"{number}", one.interaction_id, number=1.0, rater_id=by)
        [kept] = store.append([given])
        hers[number] = replace(pair, pair_id=kept.feedback_id)
    datasets.write_jsonl(tmp_path / stages.PAIRS, [*own, *liked, *hers, *held_out])
    datasets.write_jsonl(tmp_path / stages.EXAMPLES, [])
    imitated = [
        SftExample(pair.prompt, pair.chosen, "preference") for pair in (*own, *liked, *hers)
    ]
    datasets.write_jsonl(tmp_path / stages.SFT_EXAMPLES, imitated)
    turn = Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path / "work", None, None, settings)
    path = Path(stages.train_baseline(turn, ignore_progress, lambda: None)["path"])
    tokens = load_policy(path, device="cpu").tokenizer.get_vocab()
    assert {"Ġeverybody", "Ġwhere"} <= tokens.keys()
    names = ("Zxq", "Wjk", "Ptol")
    assert not any(name in token for token in tokens for name in names)


def test_a_seed_conversation_that_the_chat_template_refuses_is_named_by_its_line(
    tmp_path: Path,
) -> None:
    seeds, base = tmp_path / "seeds.jsonl", save_alternating(tmp_path / "base")
    talks = [["user", "assistant"], ["user", "assistant"], ["assistant", "user", "assistant"]]
    lines = ({"messages": [{"role": r, "content": "Hi."} for r in roles]} for roles in talks)
    seeds.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    changes = {"policy": {"base": str(base)}, "sft": {"seed_conversations": str(seeds)}}
    settings = load_settings("tiny", {"state_dir": tmp_path, **changes})
    turn = Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, settings)
    with pytest.raises(TrainingError, match=r"seeds\.jsonl:3: .*roles must alternate"):
        stages.train_baseline(turn, ignore_progress, lambda: None)


def test_what_a_turn_takes_is_what_every_model_of_it_takes(tmp_path: Path) -> None:
    base = save_alternating(tmp_path / "base")
    for changes in ({"policy": {"base": str(base)}}, {"reward": {"base": str(base)}}):
        settings = load_settings("tiny", {"state_dir": tmp_path, **changes})
        takes = stages.takes_roles(
            Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, settings)
        )
        assert takes(("system", "user", "assistant", "user"))
        assert not takes(("user", "user"))
    plain = load_settings("tiny", {"state_dir": tmp_path})
    turn = Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path, None, None, plain)
    assert stages.takes_roles(turn)(("user", "user"))
    trained = replace(turn, champion=base)
    assert not stages.takes_roles(trained)(("user", "user"))


def test_a_base_whose_context_is_too_short_is_refused_before_it_is_tuned(turn: Turn) -> None:
    ppo = replace(turn.settings.ppo, max_completion_tokens=90)
    policy = turn.settings.policy.model_copy(update={"base": str(turn.baseline)})
    settings = turn.settings.model_copy(update={"ppo": ppo, "policy": policy})
    fresh = replace(turn, settings=settings, baseline=None, champion=None)
    with pytest.raises(ConfigError, match="must fit the policy's context"):
        stages.train_baseline(fresh, ignore_progress, lambda: None)
    assert not (turn.work / "sft").exists()


def test_metrics_of_a_turn_reach_the_trackers_it_asks_for(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training = turn.settings.training.model_copy(update={"report_to": ("tensorboard",)})
    turn = replace(turn, settings=turn.settings.model_copy(update={"training": training}))

    def improve(turn: Turn, folder: Path, ppo: PpoSettings, report: Progress, *_: Any) -> Any:
        report({"update": 1, "updates": 1, "rollout/score_mean": 0.5})
        return SimpleNamespace(model_path="policy")

    monkeypatch.setattr(stages, "improve", improve)
    stages.train_policy(turn, ignore_progress, lambda: None)
    (folder,) = (turn.work / "ppo" / "tracking").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [e.value for e in events.Scalars("rollout/score_mean")] == [0.5]


@pytest.mark.slow
def test_reward_models_on_an_encoder_guide_a_policy_that_writes_other_tokens(
    turn: Turn, tmp_path: Path
) -> None:
    base = save_encoder(tmp_path / "encoder", "bert", context=512)
    changes = {"base": str(base), "reads": "mean", "reads_likelihood": False, "epochs": 1}
    reward = turn.settings.reward.model_copy(update=changes)
    ppo = replace(turn.settings.ppo, updates=1, critic="separate")
    turn = replace(turn, settings=turn.settings.model_copy(update={"reward": reward, "ppo": ppo}))
    reports = stages.train_reward_models(turn, ignore_progress, lambda: None)
    assert all(0 < report["accuracy"] < 1 for report in reports.values())
    proxy = load_reward_model(turn.work / "reward" / "proxy", device="cpu")
    assert (proxy.model.encoder, proxy.model.reads) == (True, "mean")
    outcome = stages.train_policy(turn, ignore_progress, lambda: None)
    assert TrainingResult.load(outcome["result"]).updates == 1
    judged = stages.evaluate_candidate(turn, ignore_progress, lambda: None)
    assert GateDecision.from_json(judged["gate"]).results


@pytest.mark.slow
def test_a_turn_whose_recipe_was_changed_meanwhile_trains_by_the_new_one(
    loop: Loop, first_turn: FirstTurn, tmp_path: Path
) -> None:
    """What an attempt before left is of other settings, and the turn has no other folder."""
    agent = first_turn.agent_id
    turn = newest_turn(loop.pipeline.ledger, loop.pipeline.settings(agent), agent)
    ppo = replace(turn.settings.ppo, updates=1, epochs=1, rollouts_per_update=16)
    training = turn.settings.training.model_copy(update={"watch_prompts": 4})
    turn = replace(turn, settings=turn.settings.model_copy(update={"training": training}))
    for rate in (1e-3, 1e-4):
        settings = replace(ppo, learning_rate=rate)
        result = stages.improve(turn, tmp_path / "ppo", settings, ignore_progress)
        assert result.history[0]["train/learning_rate"] == pytest.approx(rate)


def test_a_champion_that_is_no_adapters_on_the_baseline_needs_room_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline, champion = save_base(tmp_path / "baseline"), save_absolute(tmp_path / "champion")
    settings = load_settings("tiny", {"policy": {"lora": {"enabled": True, "rank": 2}}})
    ppo = changed(lora_rank=2, device="cpu")
    turn = Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path, baseline, champion, settings)
    alone = make_plan(read_config(champion), ppo, stages.reward_models_of(settings))
    room = int(alone.peak / SHARE_USED) + 1
    monkeypatch.setattr("rlhf_pipeline.ppo.plan.memory_found", lambda device: room)
    stages.check_memory(replace(turn, baseline=champion), ppo)
    with pytest.raises(TrainingError, match="training needs about"):
        stages.check_memory(turn, ppo)


@pytest.mark.parametrize("on_base", [False, True])
def test_a_reward_model_that_a_function_names_by_its_folder_needs_room_too(
    on_base: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a tale of rain", "the bird sings"] * 5
    wide = build_tiny(texts, vocabulary=290, layers=1, width=128, heads=2, context=64, seed=0)
    save_policy(wide, tmp_path / "wide")
    made, tokenizer = new_reward_model(tmp_path / "wide", seed=0, on_base=on_base, device="cpu")
    limits, folder = Limits(max_prompt_tokens=24, max_completion_tokens=8), tmp_path / "taste"
    save_reward_model(made, tokenizer, folder, limits=limits, calibration=Calibration())
    champion, ppo = save_base(tmp_path / "champion"), changed(lora_rank=2, device="cpu")
    named = {"function": str(folder), "weight": 0.5}
    functions = {"taste": named, "other": named, "off": {**named, "weight": 0}}
    plain, more = (load_settings("tiny", {"reward": {"functions": f}}) for f in ({}, functions))
    without, with_two = (
        make_plan(read_config(champion), ppo, stages.reward_models_of(s)) for s in (plain, more)
    )
    weights = unique_bytes(list(load_reward_model(folder, device="cpu").model.trunk.parameters()))
    assert with_two.parts["reward models"] - without.parts["reward models"] == 2 * weights
    assert with_two.parts["scoring"] > 2 * without.parts["scoring"]
    turn = Turn("a", "0" * 64, 0, 0, tmp_path, tmp_path, champion, champion, plain)
    room = int(without.peak / SHARE_USED) + 1
    monkeypatch.setattr("rlhf_pipeline.ppo.plan.memory_found", lambda device: room)
    stages.check_memory(turn, ppo)
    with pytest.raises(TrainingError, match="training needs about"):
        stages.check_memory(replace(turn, settings=more), ppo)
