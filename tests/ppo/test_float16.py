"""float16: refused where it cannot help; elsewhere a scaled loss whose overflows cost no step.

The scaler's path is run on a CPU here, whose float16 autocast rounds and overflows as a GPU's does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.ppo.learner import Learner
from rlhf_pipeline.ppo.optimising import NotFinite, accumulate_gradients, without_overflow
from rlhf_pipeline.ppo.plan import make_plan, read_config
from rlhf_pipeline.ppo.settings import PpoSettings
from tests.ppo.test_resume import Interrupted, assert_same_run, interrupted_after
from tests.ppo.world import changed, learner_at, lower_share, rollouts_of, train

SETTINGS = changed(precision="float16", ratio_tolerance=0.1, tokens_per_microbatch=1000)


@pytest.fixture
def _scales_on_a_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    first: float = getattr(request, "param", 2.0**26)  # which overflows

    def scaler(device: torch.device, settings: PpoSettings) -> torch.amp.GradScaler | None:
        if settings.precision != "float16":
            return None
        return torch.amp.GradScaler(device.type, init_scale=first, growth_interval=3)

    monkeypatch.setattr("rlhf_pipeline.ppo.learner.new_scaler", scaler)


def test_float16_on_a_cpu_is_refused_with_what_to_take(base: Path) -> None:
    with pytest.raises(ConfigError, match="needed a CUDA device, found cpu; take float32"):
        learner_at(base, SETTINGS)
    with pytest.raises(ConfigError, match="needed a CUDA device, found cpu"):
        make_plan(read_config(base), SETTINGS)


@pytest.mark.usefixtures("_scales_on_a_cpu")
def test_a_gradient_that_overflows_is_computed_again_at_half_the_scale(base: Path) -> None:
    learner, plain = learner_at(base, SETTINGS), _plain(base)
    rollouts = rollouts_of(plain)
    members = torch.arange(len(rollouts))
    learner.raise_values(plain.critic.head.bias.detach())  # type: ignore[union-attr]  # it has one
    facts = accumulate_gradients(learner, rollouts, members)
    assert any(not w.grad.isfinite().all() for w in _weights(learner) if w.grad is not None)
    facts = without_overflow(learner, rollouts, members, facts)
    assert learner.scaler is not None
    assert 1 <= learner.scaler.get_scale() < 2.0**26
    wanted = accumulate_gradients(plain, rollouts, members)
    assert facts["policy/loss"] == pytest.approx(wanted["policy/loss"], abs=0.01)
    ours, theirs = (torch.cat([w.grad.flatten() for w in _weights(x)]) for x in (learner, plain))  # type: ignore[union-attr]  # accumulate_gradients made them
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.999
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("_scales_on_a_cpu")
def test_a_gradient_that_no_scale_helps_is_not_stepped_with(base: Path) -> None:
    learner = learner_at(base, SETTINGS)
    rollouts = rollouts_of(_plain(base))
    rollouts.advantages[rollouts.tokens.completion_mask] = float("nan")
    members = torch.arange(len(rollouts))
    facts = accumulate_gradients(learner, rollouts, members)
    with pytest.raises(NotFinite):
        without_overflow(learner, rollouts, members, facts)


@pytest.mark.slow
@pytest.mark.usefixtures("_scales_on_a_cpu")
@pytest.mark.parametrize("_scales_on_a_cpu", [2.0**6], indirect=True)
def test_the_scale_resumes_with_the_run(base: Path, tmp_path: Path) -> None:
    settings = changed(precision="float16", ratio_tolerance=0.1, updates=4, evaluate_every=4)
    with pytest.raises(Interrupted):
        train(base, tmp_path / "cut", settings, reward=interrupted_after(3))
    resumed = train(base, tmp_path / "cut", settings)
    whole = train(base, tmp_path / "whole", settings, reward=lower_share)
    assert resumed.resumed_from == 2
    assert_same_run((whole, tmp_path / "whole"), (resumed, tmp_path / "cut"))
    scales = [row["train/loss_scale"] for row in whole.history]
    assert scales == sorted(set(scales))  # it grows in every update, as nothing overflows


def _plain(base: Path) -> Learner:
    return learner_at(base, changed(ratio_tolerance=0.1, tokens_per_microbatch=1000))


def _weights(learner: Learner) -> list[torch.nn.Parameter]:
    return list(learner.trainable().values())
