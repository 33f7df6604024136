"""`train_specialists`: several policies, each with prompts and a reward of its own, and one critic.

The critic is one trunk with a value head per agent. A round is one update of every agent in turn,
so each finds the trunk as the one before it left it; a single optimizer holds the trunk's moments.
Every agent stays near its own reference, with its own KL coefficient, and keeps the update its own
stopping reward likes best. One agent alone is trained exactly as `train_ppo` would (a test asserts
it). What agents share is what states are worth to read, never a policy.

A run owns output_dir: checkpoints/ of all of it, and for each agent a folder with its policy and
result.json. Killed and called again it goes on, and on a CPU ends with the very same weights.
Not here: several processes, adapters, conversations, replay, a critic on the policies' own trunks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from rlhf_pipeline.errors import ConfigError, LogitsNotFinite, ModelError, TrainingError
from rlhf_pipeline.files import remove_half_written
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy, switch_off_dropout
from rlhf_pipeline.policy.sampling import state_width, trunk_of
from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.alarms import NOT_FINITE
from rlhf_pipeline.ppo.critic import SeparateCritic, fresh_head, load_reward_trunk
from rlhf_pipeline.ppo.learner import (
    Learner,
    allow_recomputing,
    check_policy,
    load_reference,
    new_optimizer,
)
from rlhf_pipeline.ppo.optimising import NotFinite
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.settings import SEEDS, PpoSettings
from rlhf_pipeline.ppo.state import Progressed, run_fingerprint
from rlhf_pipeline.ppo.updating import Training, begin, checked_training, result_of, tell, update
from rlhf_pipeline.ppo.watching import (
    choose_update,
    chosen_checkpoint,
    raise_not_finite,
    reason_to_stop,
)
from rlhf_pipeline.records import (
    ChangingReward,
    Progress,
    Prompt,
    RewardFunction,
    hashed,
    ignore_progress,
)

TRUNK = "critic/base_model."  # how a learner's names of the critic's trunk begin


@dataclass(frozen=True)
class Specialist:
    """One agent of several: where it starts, what it is asked, what it is to become."""

    policy_dir: str | Path
    reference_dir: str | Path  # what its KL is measured to
    reward: RewardFunction
    prompts: Sequence[Prompt]
    watch_prompts: Sequence[Prompt]
    stopping: RewardFunction | None = None  # chooses the update that is kept; None: the last
    kl_coef: float | None = None  # None: the settings'


@dataclass
class _Agent:
    """A specialist in training."""

    name: str
    training: Training

    @property
    def now(self) -> Progressed:
        """How far it is."""
        return self.training.now


def train_specialists(
    *,
    specialists: Mapping[str, Specialist],
    output_dir: Path,
    settings: PpoSettings,
    value_init: Path | None = None,
    shares_critic: bool = True,
    resume: bool = True,
    report: Progress = ignore_progress,
    keep_going: Callable[[], None] = lambda: None,
) -> dict[str, TrainingResult]:
    """Train every specialist and return what came of each, by name; settings.updates rounds.

    The trunk starts from the reward model at value_init, or from the first agent's policy.
    With shares_critic False each agent has a trunk of its own, for comparison. `report` and
    `keep_going` are train_ppo's; a report says which `agent` it is of.

    1. Load every model, check prompts and rewards.
    2. Go on from the last checkpoint, or look at the watch prompts and write checkpoint 0.
    3. Until all rounds are made: one PPO update of each agent in turn, then, every few rounds,
       looks at the watch prompts and a checkpoint. An agent past max_kl, out of patience, or with
       numbers that are not finite, of which no step is taken, waits; the others go on.
    4. Save each agent's chosen policy and its result.

    Raises ConfigError for settings that specialists cannot have, TrainingError and ModelError as
    train_ppo does: for numbers that are not finite where they leave no agent anything usable.
    """
    _check(specialists, settings)
    torch.manual_seed(settings.seed)
    fingerprint = _fingerprint(specialists, settings, value_init, shares_critic)
    checkpoints = output_dir / "checkpoints"
    if resume and (finished := _finished(specialists, output_dir, fingerprint)):
        return finished

    # 1. Models and checks.
    agents = _agents(specialists, settings, value_init, shares_critic)
    named = _named(agents, shares_critic)
    optimizer = agents[0].training.learner.optimizer

    def write(round_: int) -> None:
        keep_going()
        random_tensors, random_facts = checkpoint.random_states(
            {f"{a.name}/{n}": g for a in agents for n, g in a.training.generators.items()}
        )
        checkpoint.write_checkpoint(
            checkpoints,
            round_,
            tensors={
                "weights": named,
                "optimizer": checkpoint.optimizer_tensors(optimizer, named),
                "random": random_tensors,
            },
            state={
                "fingerprint": fingerprint,
                "progressed": {agent.name: agent.now.as_json() for agent in agents},
                "random": random_facts,
            },
        )
        best = [choose_update(a.now.evaluations, settings) for a in agents]
        checkpoint.retain(checkpoints, latest=settings.keep_checkpoints, best=best)

    # 2. Where to begin.
    remove_half_written(output_dir)
    latest = checkpoint.latest_checkpoint(checkpoints) if resume else None
    if latest is not None:
        _restore(latest, agents, named, optimizer, fingerprint)
    checkpoint.remove_later(checkpoints, None if latest is None else latest.update)
    if latest is None:
        for agent in agents:
            begin(agent.training)
        write(0)

    # 3. The rounds.
    made = 0 if latest is None else latest.update
    while made < settings.updates:
        made += 1
        going = [a for a in agents if reason_to_stop(a.now, a.training.settings) is None]
        if not going:
            break
        looks = made == settings.updates or made % settings.evaluate_every == 0
        for agent in going:
            keep_going()
            _update(agent, report, looks=looks)
        _check_usable(agents)
        stops = any(reason_to_stop(a.now, a.training.settings) is not None for a in going)
        if looks or stops or made % settings.checkpoint_every == 0:
            write(made)

    # 4. What comes out.
    keep_going()
    return {
        agent.name: _keep(agent, checkpoints, named, output_dir, fingerprint, latest, value_init)
        for agent in agents
    }


def critic_bytes(learners: Sequence[Learner]) -> int:
    """Return the bytes of the learners' critics, what they share counted once: weights alone.

    With gradients and Adam's two moments training holds four times that.
    """
    weights = {id(p): p for a in learners if a.critic is not None for p in a.critic.parameters()}
    return sum(p.numel() * p.element_size() for p in weights.values())


def build_learners(
    specialists: Mapping[str, Specialist],
    settings: PpoSettings,
    *,
    value_init: Path | None = None,
    shares_critic: bool = True,
) -> dict[str, Learner]:
    """Return a learner per agent; they share an optimizer and, if asked, the critic's trunk.

    Raises ModelError where vocabularies differ: one trunk reads what all of them write.
    """
    policies = {
        name: load_policy(one.policy_dir, device=settings.device)
        for name, one in specialists.items()
    }
    first = next(iter(policies.values()))
    for name, policy in policies.items():
        check_policy(policy, settings)
        if policy.tokenizer.get_vocab() != first.tokenizer.get_vocab():
            raise ModelError(
                "agents that share a critic must share one vocabulary, found another in the policy "
                f"of {name}; start them from one baseline, or train them apart"
            )
    start = None if value_init is None else load_reward_trunk(value_init, first)
    heads: dict[str, nn.Linear] = {}
    for i, name in enumerate(policies):
        generator = torch.Generator().manual_seed(settings.seed + i)
        width = state_width(first.model.config) if start is None else start[1].in_features
        heads[name] = fresh_head(width, generator) if start is None else copy.deepcopy(start[1])
    trunk = copy.deepcopy(trunk_of(first.model)) if start is None else start[0]
    switch_off_dropout(trunk)
    trunk = trunk.eval().requires_grad_(True).to(first.device)
    trunks = {name: trunk if shares_critic else copy.deepcopy(trunk) for name in policies}
    critics = {
        name: SeparateCritic(trunks[name], heads[name]).to(first.device) for name in policies
    }
    if settings.gradient_checkpointing:
        for policy in policies.values():
            allow_recomputing(trunk_of(policy.model))
        for of_critic in trunks.values():
            allow_recomputing(of_critic)
    every: dict[str, nn.Parameter] = {}
    for part in ("policy", "critic"):
        for name in policies:
            module: nn.Module = policies[name].model if part == "policy" else critics[name]
            for n, weight in module.named_parameters():
                every[f"{part}/{name}/{n}"] = weight
    distinct = {id(weight): name for name, weight in reversed(every.items())}
    trainable = {n: w for n, w in every.items() if distinct[id(w)] == n and w.requires_grad}
    optimizer = new_optimizer(trainable, settings)
    return {
        name: Learner(
            policies[name],
            policies[name].model,
            load_reference(policies[name], one.reference_dir, settings),
            critics[name],
            optimizer,
            _settings_of(i, one, settings),
        )
        for i, (name, one) in enumerate(specialists.items())
    }


def _settings_of(i: int, one: Specialist, settings: PpoSettings) -> PpoSettings:
    """Return the settings of the i-th agent: its own draws, and its own KL coefficient."""
    kl_coef = settings.kl_coef if one.kl_coef is None else one.kl_coef
    return replace(settings, seed=(settings.seed + i) % SEEDS, kl_coef=kl_coef)


def check_settings(settings: PpoSettings) -> None:
    """Raise ConfigError for settings, or a launch, that specialists around one critic cannot have.

    It needs no model: whoever trains what they start from asks first.
    """
    wanted = {"estimator": "gae", "critic": "separate", "max_turns": 1}
    for name, needed in {**wanted, "replay_updates": 0}.items():
        found = getattr(settings, name)
        if found != needed:
            raise ConfigError(
                f"specialists around one critic need ppo.{name} {needed}, found {found}; change it"
            )
    if settings.lora_rank:
        raise ConfigError(
            "specialists around one critic train every weight: needed policy.lora.enabled false, "
            f"found adapters of rank {settings.lora_rank}; change it"
        )
    if settings.precision == "float16":
        raise ConfigError(
            "specialists around one critic need policy.dtype float32 or bfloat16, found float16; "
            "change it"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "specialists are trained by one process, found WORLD_SIZE "
            f"{os.environ['WORLD_SIZE']}; launch one"
        )


def _check(specialists: Mapping[str, Specialist], settings: PpoSettings) -> None:
    if not specialists:
        raise ConfigError("specialists need at least one agent, found none; name some")
    check_settings(settings)
    rewards = [one.reward for one in specialists.values()]
    changing = [id(reward) for reward in rewards if isinstance(reward, ChangingReward)]
    if len(set(changing)) < len(changing):
        raise ConfigError(
            "specialists need a reward each where it changes as training goes on, found one object "
            "given to two of them; make another of the same terms"
        )


def _fingerprint(
    specialists: Mapping[str, Specialist],
    settings: PpoSettings,
    value_init: Path | None,
    shares_critic: bool,
) -> str:
    parts = [str(shares_critic)]
    for i, (name, one) in enumerate(specialists.items()):
        models = [one.policy_dir, one.reference_dir, *([] if value_init is None else [value_init])]
        prompts = [*one.prompts, (), *one.watch_prompts]
        own = _settings_of(i, one, settings)
        parts += [name, run_fingerprint(models, [one.reward, one.stopping], prompts, own)]
    return hashed("specialists", *parts)


def _finished(
    specialists: Mapping[str, Specialist], output_dir: Path, fingerprint: str
) -> dict[str, TrainingResult] | None:
    """Return the results of a run that has ended; None where it has not, or was another."""
    results: dict[str, TrainingResult] = {}
    for name in specialists:
        path = output_dir / name / "result.json"
        if not path.exists():
            return None
        results[name] = TrainingResult.load(path)
        if results[name].fingerprint != fingerprint or not (path.parent / "policy").is_dir():
            return None
    return results


def _agents(
    specialists: Mapping[str, Specialist],
    settings: PpoSettings,
    value_init: Path | None,
    shares_critic: bool,
) -> list[_Agent]:
    learners = build_learners(
        specialists, settings, value_init=value_init, shares_critic=shares_critic
    )
    return [
        _Agent(
            name,
            checked_training(
                learner,
                reward=specialists[name].reward,
                stopping=specialists[name].stopping,
                prompts=specialists[name].prompts,
                watch_prompts=specialists[name].watch_prompts,
                whose=f"{name}'s ",
                learns_pieces=False,  # checkpoints here hold no criteria heads
            ),
        )
        for name, learner in learners.items()
    ]


def _named(agents: Sequence[_Agent], shares_critic: bool) -> dict[str, nn.Parameter]:
    """Return every weight that is trained, once, by a name that says whose it is."""
    named: dict[str, nn.Parameter] = {}
    for agent in agents:
        for name, weight in agent.training.learner.trainable().items():
            shared = shares_critic and name.startswith(TRUNK)
            named[name if shared else f"{agent.name}/{name}"] = weight
    return named


def of_another_run(saved: checkpoint.Checkpoint) -> TrainingError:
    """Return what refuses to train beside a checkpoint that is not the run's."""
    return TrainingError(
        f"the checkpoints beside {saved.path} must be of this run, found those of another "
        "(other agents, models, prompts or settings); take another folder (`rlhf specialise "
        "--out`), or move this one away to begin again"
    )


def _restore(
    saved: checkpoint.Checkpoint,
    agents: Sequence[_Agent],
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    fingerprint: str,
) -> None:
    if saved.state["fingerprint"] != fingerprint:
        raise of_another_run(saved)
    checkpoint.restore_parameters(named, saved.tensors["weights"])
    checkpoint.restore_optimizer(optimizer, named, saved.tensors["optimizer"])
    generators = {f"{a.name}/{n}": g for a in agents for n, g in a.training.generators.items()}
    checkpoint.restore_random_states(saved.tensors["random"], saved.state["random"], generators)
    for agent in agents:
        agent.training.now = Progressed.from_json(saved.state["progressed"][agent.name])
        agent.training.curriculum.restore(agent.now.reward)


def _update(agent: _Agent, report: Progress, *, looks: bool) -> None:
    def told(facts: Mapping[str, float | int | str]) -> None:
        report({"agent": agent.name, **facts})

    number = agent.now.update + 1
    try:
        tell(agent.training, update(agent.training), told, looks=looks)
    except (NotFinite, LogitsNotFinite) as error:
        raise_not_finite(agent.now, number, error, told)


def _check_usable(agents: Sequence[_Agent]) -> None:
    """Raise TrainingError where every agent's numbers were not finite before it was any better."""
    found = [
        f"{agent.name}: {alarm}"
        for agent in agents
        for alarm in agent.now.alarms
        if alarm.name == NOT_FINITE
        and choose_update(agent.now.evaluations, agent.training.settings) == 0
    ]
    if len(found) == len(agents):
        raise TrainingError(
            f"training cannot go on: {' '.join(found)} Begin again with that in another "
            "folder (`rlhf specialise --out`), or move this one away"
        )


def _keep(
    agent: _Agent,
    checkpoints: Path,
    named: Mapping[str, nn.Parameter],
    output_dir: Path,
    fingerprint: str,
    latest: checkpoint.Checkpoint | None,
    value_init: Path | None,
) -> TrainingResult:
    """Save the agent's policy as it was at the update to keep, and its result."""
    training, now, folder = agent.training, agent.now, output_dir / agent.name
    settings = training.settings
    saved = chosen_checkpoint(checkpoints, now, settings)
    prefix = f"{agent.name}/policy/"
    policy = {name: weight for name, weight in named.items() if name.startswith(prefix)}
    checkpoint.restore_parameters(policy, {name: saved.tensors["weights"][name] for name in policy})
    learned = training.learner.policy
    save_policy(Policy(learned.model, learned.tokenizer), folder / "policy")
    result = result_of(
        training,
        saved.update,
        policy=folder / "policy",
        value_init=value_init,
        stopped_because=reason_to_stop(now, settings) or "the other agents' rounds are over",
        fingerprint=fingerprint,
        resumed_from=None if latest is None else latest.update,
        reward_state=saved.state["progressed"][agent.name].get("reward", {}),
    )
    result.save(folder / "result.json")
    return result
