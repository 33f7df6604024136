"""Several policies around one critic: each trained as if alone, on a trunk that all move."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_pipeline.errors import ConfigError, ModelError, TrainingError
from rlhf_pipeline.policy.adapters import unique_bytes
from rlhf_pipeline.policy.loading import Policy, save_policy
from rlhf_pipeline.policy.sampling import output_head
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.ppo import updating
from rlhf_pipeline.ppo.collecting import next_prompts
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.optimising import train_on
from rlhf_pipeline.ppo.plan import (
    NO_MODELS,
    OTHERS,
    beside_others,
    check_fits,
    make_plan,
    read_config,
)
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.specialists import (
    Specialist,
    build_learners,
    critic_bytes,
    train_specialists,
)
from rlhf_pipeline.records import RewardInput, user_prompt
from tests.ppo.test_learner import save_reward
from tests.ppo.test_resume import Interrupted, assert_same_run, without_clocks
from tests.ppo.world import (
    PROMPTS,
    bytes_kept,
    changed,
    learner_at,
    lower_share,
    rollouts_of,
    train,
    two_pieces,
    weights_of,
)

SETTINGS = changed(
    critic="separate",
    updates=2,
    evaluate_every=2,
    kl_controller="adaptive",
    kl_horizon=100,
    score_normalisation="running",
    tokens_per_microbatch=1000,
)


def short(items: Sequence[RewardInput], /) -> list[float]:
    """Score completions by how little they say."""
    return [-len(item.completion) / 10 for item in items]


def specialist(base: Path, **options: Any) -> Specialist:
    given = {"reward": lower_share, "prompts": PROMPTS, "watch_prompts": PROMPTS[:4], **options}
    return Specialist(base, base, **given)


def two(base: Path) -> dict[str, Specialist]:
    """Return an agent whose reward changes as training goes on, and a terse one."""
    return {
        "tale": specialist(base, reward=two_pieces(), stopping=lower_share),
        "terse": specialist(base, reward=short, prompts=PROMPTS[2:], kl_coef=0.2),
    }


def assert_same_checkpoint(folder: Path, update: int) -> list[dict[str, torch.Tensor]]:
    """Compare an update's checkpoint of the runs `cut` and `whole`; return its parts' tensors."""
    parts = []
    for part in ("weights", "optimizer", "random"):
        file = f"checkpoints/update-{update:06}/{part}.safetensors"
        ours, theirs = (load_file(folder / run / file) for run in ("cut", "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        parts.append(ours)
    return parts


def test_one_agent_is_trained_as_train_ppo_does(base: Path, tmp_path: Path) -> None:
    alone = train(base, tmp_path / "ppo", SETTINGS, stopping=lower_share)
    found = train_specialists(
        specialists={"only": specialist(base, stopping=lower_share)},
        output_dir=tmp_path / "team",
        settings=SETTINGS,
    )["only"]
    ours, theirs = without_clocks(found), without_clocks(alone)
    for name in ("history", "evaluations", "chosen_update", "training_steps"):
        assert ours[name] == theirs[name]
    weights = weights_of(tmp_path / "ppo/policy")
    for name, weight in weights_of(tmp_path / "team/only/policy").items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.slow
def test_agents_that_are_interrupted_end_as_if_they_were_not(base: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, checkpoint_every=1)

    def run(folder: str, **options: Any) -> dict[str, TrainingResult]:
        return train_specialists(
            specialists=two(base), output_dir=tmp_path / folder, settings=settings, **options
        )

    def stop() -> None:
        if (tmp_path / "cut/checkpoints/update-000001").exists():
            raise Interrupted

    with pytest.raises(Interrupted):
        run("cut", keep_going=stop)
    cut, whole = run("cut"), run("whole")
    assert cut["tale"].resumed_from == 1
    for name in ("tale", "terse"):
        assert_same_run(
            (whole[name], tmp_path / "whole" / name), (cut[name], tmp_path / "cut" / name)
        )
    assert_same_checkpoint(tmp_path, 2)
    weights = load_file(tmp_path / "whole/checkpoints/update-000002/weights.safetensors")
    assert {n.split("base_model")[0] for n in weights if "base_model" in n} == {"critic/"}
    kept = weights_of(tmp_path / "whole/tale/policy"), weights_of(tmp_path / "whole/terse/policy")
    assert any(not torch.equal(weight, kept[1][name]) for name, weight in kept[0].items())
    assert run("whole") == whole  # a run that has ended gives its results again
    with pytest.raises(TrainingError, match=r"found those of another .* specialise --out"):
        train_specialists(
            specialists={"tale": specialist(base)},
            output_dir=tmp_path / "whole",
            settings=settings,
        )


def test_where_an_agents_best_checkpoint_is_damaged_its_next_best_comes_out(
    base: Path, tmp_path: Path
) -> None:
    answers = iter([0.0, 0.0, 1.0, 0.5, 0.0])  # the probe, updates 0 to 2, the probe again

    def peak(items: Sequence[RewardInput], /) -> list[float]:
        return [next(answers)] * len(items)

    def run() -> dict[str, TrainingResult]:
        return train_specialists(
            specialists={"peak": specialist(base, stopping=peak), "last": specialist(base)},
            output_dir=tmp_path,
            settings=replace(SETTINGS, evaluate_every=1),
        )

    assert {name: one.chosen_update for name, one in run().items()} == {"peak": 1, "last": 2}
    last = weights_of(tmp_path / "last/policy")
    for name in ("peak", "last"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "checkpoints/update-000001/weights.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"best checkpoint cannot be .*000001"):
        again = run()
    assert {name: one.chosen_update for name, one in again.items()} == {"peak": 2, "last": 2}
    saved = load_file(tmp_path / "checkpoints/update-000002/weights.safetensors")
    for name, weight in weights_of(tmp_path / "peak/policy").items():
        assert torch.equal(weight, saved[f"peak/policy/{name}"])
    for name, weight in weights_of(tmp_path / "last/policy").items():
        assert torch.equal(weight, last[name])


def test_after_the_last_seed_comes_the_first(base: Path) -> None:
    learners = build_learners(two(base), replace(SETTINGS, seed=2**32 - 1))
    assert [learner.settings.seed for learner in learners.values()] == [2**32 - 1, 0]


@pytest.mark.parametrize("shares_critic", [True, False])
def test_a_plan_counts_what_all_of_them_hold(base: Path, shares_critic: bool) -> None:
    learners = build_learners(two(base), SETTINGS, shares_critic=shares_critic)
    weights: list[torch.Tensor] = []
    for learner in learners.values():
        assert learner.reference is not None
        weights += [*learner.weights, *learner.reference.model.parameters()]
    [optimizer] = {id(one.optimizer): one.optimizer for one in learners.values()}.values()
    moved = sum(w.nbytes for group in optimizer.param_groups for w in group["params"])
    alone = make_plan(read_config(base), SETTINGS, NO_MODELS)
    plan = beside_others(alone, len(learners) - 1, shares_critic=shares_critic)
    names = ("policy", "critic", "reference", "optimiser", OTHERS)
    planned = sum(plan.parts[name] for name in names)
    assert planned == pytest.approx(unique_bytes(weights) + 2 * moved, rel=0.01)  # but for heads
    assert plan.peak - alone.peak == plan.parts[OTHERS]
    with pytest.raises(TrainingError, match="found"):
        check_fits(read_config(base), SETTINGS, NO_MODELS, made=plan, room=alone.peak)


def test_no_setting_is_advised_that_specialists_cannot_have(base: Path) -> None:
    smallest = replace(
        SETTINGS, tokens_per_microbatch=36, completions_at_once=1, gradient_checkpointing=True
    )
    alone = make_plan(read_config(base), smallest, NO_MODELS)
    room = alone.peak  # with the share that may be used, a tenth too small
    for made, advice in ((alone, "ppo.critic shared"), (beside_others(alone, 0), "no setting")):
        with pytest.raises(TrainingError, match=advice):
            check_fits(read_config(base), smallest, NO_MODELS, made=made, room=room)


@pytest.mark.parametrize("shares_critic", [True, False])
def test_agents_start_their_critics_from_a_reward_model(
    base: Path, tmp_path: Path, shares_critic: bool
) -> None:
    reward = save_reward(base, tmp_path / "reward", offset=0.75)
    learners = build_learners(two(base), SETTINGS, value_init=reward, shares_critic=shares_critic)
    tokens = rollouts_of(learner_at(base)).tokens
    with torch.no_grad():  # as alone, and that it values as the model scores is tested there
        alone = learner_at(base, changed(critic="separate"), value_init=reward).values(tokens)
        for learner in learners.values():
            assert torch.equal(learner.values(tokens), alone)
    assert float(alone.abs().max()) > 0


def test_an_update_moves_its_own_agent_and_the_shared_trunk_alone(base: Path) -> None:
    learners = build_learners(two(base), SETTINGS)
    before = {n: _copies(learner.trainable()) for n, learner in learners.items()}
    learner = learners["tale"]
    train_on(learner, rollouts_of(learner), torch.Generator().manual_seed(0))
    moved = {
        agent: {
            name.partition("/base_model")[0]
            for name, weight in learners[agent].trainable().items()
            if not torch.equal(weight, before[agent][name])
        }
        for agent in learners
    }
    assert {n for n in moved["tale"] if not n.startswith("policy/")} == {
        "critic", "critic/head.weight", "critic/head.bias"
    }  # fmt: skip
    assert any(n.startswith("policy/") for n in moved["tale"])
    assert moved["terse"] == {"critic"}  # the trunk


@pytest.mark.parametrize("shares", [True, False])
def test_layers_are_computed_again_where_that_is_asked_for(base: Path, shares: bool) -> None:
    kept: list[int] = []
    for switch in (False, True):
        settings = replace(SETTINGS, gradient_checkpointing=switch)
        learner = build_learners(two(base), settings, shares_critic=shares)["terse"]
        kept.append(bytes_kept(learner, rollouts_of(learner).tokens))
    assert kept[1] < 0.5 * kept[0]


def test_one_trunk_takes_the_memory_of_one(base: Path) -> None:
    shared, apart = (
        critic_bytes(list(build_learners(two(base), SETTINGS, shares_critic=x).values()))
        for x in (True, False)
    )
    head = 4 * 33
    assert apart - shared == shared - 2 * head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic": "shared"}, "ppo.critic separate, found shared"),
        ({"estimator": "rloo", "completions_per_prompt": 2}, "ppo.estimator gae, found rloo"),
        ({"lora_rank": 2}, "policy.lora.enabled false, found adapters of rank 2"),
        ({"replay_updates": 1}, "ppo.replay_updates 0, found 1"),
    ],
)
def test_what_agents_around_one_critic_cannot_have_is_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    settings: PpoSettings = replace(SETTINGS, **changes)
    with pytest.raises(ConfigError, match=message):
        train_specialists(specialists=two(base), output_dir=tmp_path, settings=settings)


def test_agents_are_checked_before_they_train(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = build_tiny(["x"], vocabulary=270, layers=1, width=32, heads=2, context=64, seed=0)
    save_policy(Policy(other.model, other.tokenizer), tmp_path / "other")
    with pytest.raises(ModelError, match=r"share one vocabulary, found another in .* odd"):
        build_learners({**two(base), "odd": specialist(tmp_path / "other")}, SETTINGS)
    shared = specialist(base, reward=two_pieces(), stopping=lower_share)
    with pytest.raises(ConfigError, match="found one object given to two of them"):
        train_specialists(
            specialists={"a": shared, "b": shared}, output_dir=tmp_path, settings=SETTINGS
        )
    with pytest.raises(ConfigError, match="at least one agent"):
        train_specialists(specialists={}, output_dir=tmp_path, settings=SETTINGS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="found WORLD_SIZE 2"):
        train_specialists(specialists=two(base), output_dir=tmp_path, settings=SETTINGS)


def loud(items: Sequence[RewardInput], /) -> list[float]:
    """Score so high that the value loss is infinite."""
    return [1e30] * len(items)


def test_an_agent_whose_numbers_are_not_finite_waits_and_moves_nothing(
    base: Path, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, score_normalisation="none")
    good = specialist(base, stopping=lower_share)
    told: list[Mapping[str, Any]] = []
    both = train_specialists(
        specialists={"loud": specialist(base, reward=loud), "good": good},
        output_dir=tmp_path / "both",
        settings=settings,
        report=told.append,
    )
    alone = train_specialists(
        specialists={"good": good},
        output_dir=tmp_path / "alone",
        settings=replace(settings, seed=settings.seed + 1),  # as the second of two
    )
    waited = both["loud"]
    assert waited.stopped_because == "the loss or its gradient is not finite"
    assert [(alarm.name, alarm.update) for alarm in waited.alarms] == [("not_finite", 1)]
    alarmed = next(one for one in told if "alarm" in one)
    assert (alarmed["agent"], alarmed["alarm"]) == ("loud", "not_finite")
    assert (waited.chosen_update, waited.history) == (0, ())
    begun = weights_of(base)
    for name, weight in weights_of(tmp_path / "both/loud/policy").items():
        assert torch.equal(weight, begun[name])
    assert_same_run(
        (both["good"], tmp_path / "both/good"), (alone["good"], tmp_path / "alone/good")
    )
    file = "checkpoints/update-000002/weights.safetensors"
    ours, theirs = (load_file(tmp_path / folder / file) for folder in ("both", "alone"))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())  # the trunk too


@pytest.mark.slow
def test_a_run_goes_on_as_if_uninterrupted_after_an_agents_numbers_were_not_finite(
    base: Path, tmp_path: Path
) -> None:
    settings = replace(
        SETTINGS, updates=3, evaluate_every=1, checkpoint_every=1, score_normalisation="none"
    )
    prompts = [user_prompt(f"say {i}") for i in range(2 * settings.rollouts_per_update)]
    of_loud = replace(settings, seed=settings.seed + 1)  # the second agent's
    members = next_prompts(settings.rollouts_per_update, of_loud, len(prompts))
    in_second = [prompts[i] for i in members]

    def loud_once(items: Sequence[RewardInput], /) -> list[float]:
        return [1e30 if item.prompt in in_second else len(item.completion) / 10 for item in items]

    def run(folder: str, **options: Any) -> dict[str, TrainingResult]:
        agents = {
            "tale": specialist(base, reward=two_pieces(), stopping=lower_share),
            "loud": specialist(base, reward=loud_once, prompts=prompts),
        }
        return train_specialists(
            specialists=agents, output_dir=tmp_path / folder, settings=settings, **options
        )

    whole = run("whole")
    for written in (1, 2):

        def stop(written: int = written) -> None:
            if (tmp_path / f"cut/checkpoints/update-{written:06d}").exists():
                raise Interrupted

        with pytest.raises(Interrupted):
            run("cut", keep_going=stop)
    cut = run("cut")
    assert (whole["tale"].training_steps, whole["loud"].chosen_update) == (12, 1)
    assert [alarm.update for alarm in cut["loud"].alarms if alarm.name == "not_finite"] == [2]
    for name in ("tale", "loud"):
        assert_same_run(
            (whole[name], tmp_path / "whole" / name), (cut[name], tmp_path / "cut" / name)
        )
    for tensors in assert_same_checkpoint(tmp_path, 3):
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert run("whole") == whole


@pytest.mark.slow
def test_an_agent_whose_logits_are_not_finite_waits(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Learner] = []

    def ruinous(learner: Learner, *rest: Any) -> dict[str, float]:
        facts = train_on(learner, *rest)
        trained.append(learner)
        if len(trained) == 4:
            with torch.no_grad():
                output_head(learner.policy.model).weight.fill_(torch.nan)
        return facts

    monkeypatch.setattr(updating, "train_on", ruinous)
    settings = replace(SETTINGS, updates=3, evaluate_every=1)
    found = train_specialists(specialists=two(base), output_dir=tmp_path, settings=settings)
    assert found["terse"].stopped_because == "a logit of the policy is not finite"
    assert [one.update for one in found["terse"].alarms if one.name == "not_finite"] == [2]
    assert found["terse"].chosen_update == 1
    assert found["tale"].stopped_because == "all updates are made"
    for name in found:
        weights = weights_of(tmp_path / name / "policy")
        assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_training_ends_where_no_agent_has_anything_usable(base: Path, tmp_path: Path) -> None:
    for _ in range(2):  # called again it says the same
        with pytest.raises(TrainingError, match=r"loud: not_finite at update 1: the loss .* --out"):
            train_specialists(
                specialists={"loud": specialist(base, reward=loud)},
                output_dir=tmp_path,
                settings=replace(SETTINGS, score_normalisation="none"),
            )


def _copies(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}
