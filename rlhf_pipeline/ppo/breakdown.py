"""What a trained critic says of a completion: its value, and each criterion its heads foretell.

Read from what a PPO run left: result.json, the policy, and the checkpoint of the update that was
kept, which holds the critic and its criteria heads (criteria.py). The reward's own breakdown says
what a completion got; this says what the critic, which advantages are measured against, thought it
would get: once before it was written, and once at its last token.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import CheckpointDamaged, ModelError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.chat import encode_completions, encode_prompts
from rlhf_pipeline.policy.loading import load_policy, switch_off_dropout
from rlhf_pipeline.policy.sampling import pad_left, pad_right, state_width, trunk_of
from rlhf_pipeline.ppo import checkpoint
from rlhf_pipeline.ppo.criteria import CriteriaHeads
from rlhf_pipeline.ppo.critic import SeparateCritic, SharedCritic, load_reward_trunk
from rlhf_pipeline.ppo.learner import Learner, new_optimizer, trainable_of
from rlhf_pipeline.ppo.result import TrainingResult
from rlhf_pipeline.ppo.rollout import Tokens, microbatches
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.records import RewardInput, hashed


@dataclass(frozen=True, slots=True)
class CriticBreakdown:
    """What the critic says of one completion, in units of the reward that PPO trained on.

    `value` is what is still to come, the score less what staying near the reference costs. A
    criterion is the raw score of one of the reward's pieces. "before" knows the prompt alone; the
    others know all of the completion but its last token.
    """

    value_before: float
    value: float
    criteria_before: Mapping[str, float]
    criteria: Mapping[str, float]


class TrainedCritic:
    """A critic of a run that has ended."""

    def __init__(self, learner: Learner, version: str) -> None:
        self.learner = learner
        self.version = version

    def __call__(self, items: Sequence[RewardInput], /) -> list[CriticBreakdown]:
        """Return the breakdown of every item's completion, in order."""
        if not items:
            return []
        learner, settings = self.learner, self.learner.settings
        tokenizer, device = learner.policy.tokenizer, learner.policy.device
        prompts = encode_prompts(
            tokenizer, [item.prompt for item in items], max_tokens=settings.max_prompt_tokens
        )
        completions = encode_completions(
            tokenizer,
            [item.completion for item in items],
            max_tokens=settings.max_completion_tokens,
        )
        pad = learner.policy.pad_id
        ids = (*pad_left(prompts, pad), *pad_right(completions, pad))
        tokens = Tokens(*(x.to(device) for x in ids))
        names = ("value", *(() if learner.criteria is None else learner.criteria.names))
        ends = torch.zeros(len(items), 2, len(names))  # at the first token, at the last
        members, budget = torch.arange(len(items), device=device), settings.tokens_per_microbatch
        for rows in microbatches(tokens, members, token_budget=budget):
            some = tokens.rows(rows)
            last = some.completion_mask.sum(1) - 1
            with torch.no_grad(), learner.autocast():
                states = learner.critic_states(some)
                states = torch.stack([states[:, 0], states[torch.arange(len(rows)), last]], 1)
                said = [learner.read_values(states)[..., None]]
            if learner.criteria is not None:
                said.append(learner.criteria(states))
            ends[rows.cpu()] = torch.cat(said, 2).float().cpu()
        return [
            CriticBreakdown(before[0], after[0], *(_named(names, x) for x in (before, after)))
            for before, after in ends.tolist()
        ]


def load_critic(run: str | Path) -> TrainedCritic:
    """Return the critic of the PPO run in this folder, as it was at the update that was kept.

    Raises ModelError where the run has none that can be read: without a critic, with one that had
    learned nothing when the policy was kept, with its checkpoints gone, or with a critic that is
    adapters on a base the folder does not hold.
    """
    root = Path(run)
    if not (root / "result.json").is_file():
        raise ModelError(
            f"a PPO run that has ended is needed at {root}, found no result.json; correct the path"
        )
    result = TrainingResult.load(root / "result.json")
    settings = PpoSettings(**{**result.settings, "device": "auto"})
    if not settings.has_critic:
        raise ModelError(
            f"a run with a critic is needed at {root}, found estimator {settings.estimator}; take "
            "one that trained with gae"
        )
    if settings.critic == "separate" and settings.lora_rank:
        raise ModelError(
            f"a critic that can be read from its run is needed, found adapters at {root}, on a "
            "base that is not there; take ppo.critic shared beside LoRA"
        )
    if result.chosen_update == 0:
        raise ModelError(
            f"a critic that was trained is needed at {root}, found update 0 kept, at which the "
            "policy was as it began and its critic had learned nothing; take a run that kept a "
            "later update"
        )
    policy = load_policy(root / "policy")
    try:
        saved = checkpoint.checkpoint_at(root / "checkpoints", result.chosen_update)
    except CheckpointDamaged as error:
        raise ModelError(
            f"the checkpoint of update {result.chosen_update}, which was kept, is needed at "
            f"{root}, found none that is whole ({error}); retention.checkpoints lets those of "
            "older turns go: take a newer run"
        ) from error
    weights = saved.tensors["critic"]
    critic: SharedCritic | SeparateCritic
    if settings.critic == "shared":
        critic = SharedCritic(nn.Linear(state_width(policy.model.config), 1))
    else:
        path, found = result.reward_model_path, None
        if path is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # where it began was said when it was trained
                found = load_reward_trunk(Path(path), policy)
        trunk = copy.deepcopy(trunk_of(policy.model)) if found is None else found[0]
        width = weights["critic/head.weight"].shape[1]
        switch_off_dropout(trunk)
        critic = SeparateCritic(trunk.eval(), nn.Linear(width, 1))
    critic = critic.to(policy.device)
    own = {f"critic/{n}": p for n, p in critic.named_parameters()}
    checkpoint.restore_parameters(own, weights)
    criteria = _criteria(saved)
    optimizer = new_optimizer(trainable_of(policy, critic), settings)
    learner = Learner(policy, policy.model, None, critic, optimizer, settings, criteria=criteria)
    version = hashed(result.fingerprint, *folder_sha256(saved.path).values())[:16]
    return TrainedCritic(learner, version)


def _criteria(saved: checkpoint.Checkpoint) -> CriteriaHeads | None:
    names = saved.state.get("criteria", ())
    if not names:
        return None
    tensors: Mapping[str, Tensor] = saved.tensors["criteria"]
    heads = CriteriaHeads(names, len(tensors["gram"]) - 1)
    heads.restore(tensors)
    return heads


def _named(names: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    return dict(zip(names[1:], numbers[1:], strict=True))
