"""Several processes train what one would, and what they cannot do is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.policy.loading import choose_device
from rlhf_pipeline.policy.sampling import trunk_of
from rlhf_pipeline.ppo.learner import shared_base
from rlhf_pipeline.ppo.processes import ALONE, Team, check_launch, join_team
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.spreading import spread_layers
from tests.ppo.launched import RUNS, SIZE, options_of
from tests.ppo.world import changed, tiny_policy, train, weights_of


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
def test_of_a_base_that_is_spread_each_process_holds_its_share(launched: Path) -> None:
    """The layers' weights; adapters, and what is outside of layers, are whole in each.

    And a set that is loaded into it, as reward models' are, computes what it does on a whole base.
    """
    held = json.loads((launched / "held.json").read_text())
    assert held["layers"] == pytest.approx(1 / SIZE, abs=0.01)
    assert held["rest"] == 1.0
    assert held["apart"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_end_with_the_policy_of_one(
    name: str, launched: Path, base: Path, tmp_path: Path
) -> None:
    one = train(base, tmp_path, RUNS[name], **options_of(name))
    two = TrainingResult.load(launched / name / "result.json")
    assert (two.fingerprint, two.chosen_update) == (one.fingerprint, one.chosen_update)
    for found, wanted in zip(two.history, one.history, strict=True):
        assert found.keys() == wanted.keys()
        for metric in wanted:
            if metric.startswith(("time/", "memory/")):
                continue
            assert found[metric] == pytest.approx(wanted[metric], abs=1e-4, rel=1e-4), metric
    heard = one.reward_state.get("moments", {})
    for term, moments in two.reward_state.get("moments", {}).items():
        assert moments == pytest.approx(heard[term], abs=1e-4, rel=1e-4)  # each score once
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
def test_each_conversation_is_answered_once_and_every_process_hears_it(launched: Path) -> None:
    """Though the user has other words for each process, both sample and learn the same."""
    asked = [json.loads((launched / f"asked-{rank}.json").read_text()) for rank in range(SIZE)]
    rounds = RUNS["turns"].updates * RUNS["turns"].rollouts_per_update
    watched = 4 * (RUNS["turns"].updates + 1)
    assert min(asked) > 0
    assert sum(asked) == rounds + watched


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
        (changed(), {"ACCELERATE_USE_FSDP": "true"}, "needed policy.lora, found every weight"),
        (changed(), {"ACCELERATE_USE_DEEPSPEED": "true"}, "found DEEPSPEED; launch with"),
        (changed(device="cuda:0"), {}, "a device of its own"),
        (changed(minibatches=12), {}, "a share of every minibatch"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_they_are_joined(
    settings: PpoSettings, environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    for asked in (check_launch, join_team):
        with pytest.raises(ConfigError, match=reason):
            asked(settings)


def test_processes_that_are_not_joined_do_not_train_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate keeps what it was asked for first: here, without cpu=True, to join nobody."""
    begun = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    monkeypatch.setattr(accelerate, "PartialState", lambda **how: begun)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # is set back
    with pytest.raises(ConfigError, match=r"2 processes train one policy: .* found 1, as"):
        train(base, tmp_path, changed(device="cpu"))
    assert not any(tmp_path.iterdir())


def test_a_base_that_cannot_be_spread_is_refused(
    base: Path, absolute: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr("rlhf_pipeline.ppo.learner.join_team", lambda settings: ALONE)
    with pytest.raises(ConfigError, match="adapters of rank 2, found other weights"):
        shared_base(absolute, base, changed(lora_rank=2, device="cpu"))
    model = tiny_policy().model
    monkeypatch.setattr(trunk_of(model), "_no_split_modules", None)
    with pytest.raises(ConfigError, match="names its layers, found LlamaModel"):
        spread_layers(model, torch.device("cpu"))


def test_one_process_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_team(changed()) is ALONE


def test_launched_processes_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"cuda:2 needs a machine with 3 .*, found 2; set policy"):
        choose_device("cuda")


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_a_wrong_setting(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"found 0; set policy\.device to auto"):
        choose_device(device)


@pytest.mark.parametrize(
    ("name", "kind"), [("accelerate", "MULTI_GPU"), ("accelerate_fsdp", "FSDP")]
)
def test_the_launchers_configurations_are_ones_that_accelerate_and_we_take(
    name: str, kind: str
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(Path(__file__).parents[2] / f"docs/{name}.yaml"))
    assert found.distributed_type.value == kind
    assert found.num_processes > 1
    assert str(found.mixed_precision) == "no"  # autocast is ours
