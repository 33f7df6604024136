"""Several processes train what one would, and what they cannot do is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.policy.loading import choose_device
from rlhf_pipeline.ppo.processes import ALONE, Team, join_team
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.settings import PpoSettings
from tests.ppo.launched import RUNS, reward_of
from tests.ppo.world import changed, lower_share, train, weights_of


def launch(module: str, *words: str) -> str:
    """Run the module, which forks processes that meet at a port, its last word; return its output.

    It has to end well.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = subprocess.run(
        [sys.executable, "-m", module, *words, str(port)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


@pytest.fixture(scope="module")
def launched(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left of RUNS."""
    folder = tmp_path_factory.mktemp("launched")
    launch("tests.ppo.launched", str(base), str(folder))
    return folder


@pytest.mark.slow
def test_layers_that_are_spread_over_processes_compute_what_whole_ones_do() -> None:
    """What sharded weights would have to keep to; processes.py says why PPO refuses them."""
    found = json.loads(launch("tests.ppo.sharded"))
    assert found["logprobs"] < 1e-6
    assert found["gradients"] < 1e-6
    assert found["same_samples"] == 1.0
    assert found["held"] < 0.7  # the embeddings of a model this small are most of it


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_end_with_the_policy_of_one(
    name: str, launched: Path, base: Path, tmp_path: Path
) -> None:
    one = train(base, tmp_path, RUNS[name], stopping=lower_share, reward=reward_of(name))
    two = TrainingResult.load(launched / name / "result.json")
    assert (two.fingerprint, two.chosen_update) == (one.fingerprint, one.chosen_update)
    for found, wanted in zip(two.history, one.history, strict=True):
        assert found.keys() == wanted.keys()
        for metric in wanted:
            # Of clocks and memory; a count of values that lie on the edge of the range.
            if metric.startswith(("time/", "memory/")) or metric == "critic/clip_fraction":
                continue
            assert found[metric] == pytest.approx(wanted[metric], abs=1e-4, rel=1e-4), metric
    last = f"checkpoints/update-{RUNS[name].updates:06d}"
    earlier = f"checkpoints/update-{RUNS[name].updates - 1:06d}"
    for part in ("policy", "critic"):
        before = load_file(tmp_path / earlier / f"{part}.safetensors")
        trained = load_file(tmp_path / last / f"{part}.safetensors")
        together = load_file(launched / name / last / f"{part}.safetensors")
        assert max(float((trained[n] - before[n]).abs().max()) for n in trained) > 1e-3
        for n, weight in trained.items():
            torch.testing.assert_close(together[n], weight, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_processes_that_are_stopped_go_on_together_and_end_alike(launched: Path) -> None:
    again = TrainingResult.load(launched / "interrupted" / "result.json")
    assert again.resumed_from is not None
    whole = weights_of(launched / "shared" / "policy")
    for n, weight in weights_of(launched / "interrupted" / "policy").items():
        assert torch.equal(weight, whole[n])


def test_shares_are_whole_and_apart() -> None:
    teams = [Team(rank, 3) for rank in range(3)]
    rows = torch.arange(8)
    assert torch.cat([rows[team.span(8)] for team in teams]).tolist() == list(range(8))
    assert sorted(torch.cat([team.part(rows) for team in teams]).tolist()) == list(range(8))
    assert max(len(team.part(rows)) for team in teams) == 3


def test_alone_nothing_is_changed_or_copied() -> None:
    weight = nn.Parameter(torch.ones(2))
    ALONE.add_gradients([weight])
    rows = torch.ones(2, 3)
    assert weight.grad is None
    assert ALONE.gather(rows) is rows
    assert ALONE.add(rows) is rows


@pytest.mark.parametrize(
    ("settings", "environment", "reason"),
    [
        (changed(), {"ACCELERATE_USE_FSDP": "true"}, "whole weights in every process"),
        (changed(), {"ACCELERATE_USE_DEEPSPEED": "true"}, "whole weights in every process"),
        (changed(device="cuda:0"), {}, "a device of its own"),
        (changed(minibatches=12), {}, "a share of every minibatch"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_they_are_joined(
    settings: PpoSettings, environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=reason):
        join_team(settings)


def test_one_process_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_team(changed()) is ALONE


def test_launched_processes_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")


def test_the_launchers_configuration_is_one_that_accelerate_and_we_take() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(Path(__file__).parents[2] / "docs/accelerate.yaml"))
    assert found.distributed_type.value == "MULTI_GPU"
    assert found.num_processes > 1
    assert str(found.mixed_precision) == "no"  # autocast is ours
