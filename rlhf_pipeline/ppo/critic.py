"""The critic: what a state is worth. A network of its own, or a head on the policy's trunk.

values[:, t] is the value of the state in which completion token t is chosen: it is read where that
token's logits are, at the token before.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import read_json
from rlhf_pipeline.policy.adapters import SharedBase, adapter_weights, load_adapters, only
from rlhf_pipeline.policy.loading import ADAPTER, Policy, load_tokenizer, load_weights
from rlhf_pipeline.policy.packed import Room
from rlhf_pipeline.policy.sampling import completion_hidden, trunk_of
from rlhf_pipeline.ppo.rollout import Tokens


def fresh_head(width: int, generator: torch.Generator) -> nn.Linear:
    """Return a scalar head with weights of deviation 1 / sqrt(width + 1) and no bias.

    Larger ones start with values far outside the scores' range. Source: N+ (arXiv:2403.17031),
    after openai/lm-human-preferences.
    """
    head = nn.Linear(width, 1)
    with torch.no_grad():
        head.weight.normal_(0.0, 1 / math.sqrt(width + 1), generator=generator)
        head.bias.zero_()
    return head


def head_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return values (B, T) of hidden states (B, T, width), in float32 whatever the trunk ran in."""
    with torch.autocast(hidden.device.type, enabled=False):
        values: Tensor = head(hidden.float())[..., 0]
    return values


class SharedCritic(nn.Module):
    """A scalar head on the policy's own hidden states."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head


class SeparateCritic(nn.Module):
    """A trunk of its own and a scalar head.

    The trunk is called base_model because `policy.sampling.completion_hidden` looks for it there.
    """

    def __init__(self, trunk: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.base_model = trunk
        self.head = head

    def forward(self, tokens: Tokens, room: Room | None = None) -> Tensor:
        """Return values (B, T)."""
        return head_values(self.head, self.states(tokens, room))

    def states(self, tokens: Tokens, room: Room | None = None) -> Tensor:
        """Return the hidden states (B, T, width) that the values are read from."""
        return completion_hidden(
            self,
            tokens.prompt_ids,
            tokens.prompt_mask,
            tokens.completion_ids,
            tokens.completion_mask,
            room=room,
        )


class AdapterCritic(nn.Module):
    """Adapters of its own on the policy's base, and a scalar head: a separate critic for little."""

    SET = "critic"

    def __init__(self, base: SharedBase, head: nn.Linear) -> None:
        super().__init__()
        trunk = trunk_of(base.policy.model)
        self._model = (base.policy.model,)  # in a tuple: its weights are not the critic's own
        weights = adapter_weights(trunk, self.SET)
        self.adapters = nn.ParameterDict({n.replace(".", "/"): p for n, p in weights.items()})
        self.head = head

    @property
    def base_model(self) -> nn.Module:
        """Return the trunk that the policy and this critic share."""
        return trunk_of(self._model[0])

    def forward(self, tokens: Tokens, room: Room | None = None) -> Tensor:
        """Return values (B, T)."""
        return head_values(self.head, self.states(tokens, room))

    def states(self, tokens: Tokens, room: Room | None = None) -> Tensor:
        """Return the hidden states (B, T, width) that the values are read from."""
        with only(self._model[0], self.SET):
            return completion_hidden(
                self._model[0],
                tokens.prompt_ids,
                tokens.prompt_mask,
                tokens.completion_ids,
                tokens.completion_mask,
                room=room,
            )


def _trunk_of_reward(directory: Path) -> Path:
    trunk_dir, head_file = directory / "trunk", directory / "head.safetensors"
    if not trunk_dir.is_dir() or not head_file.is_file():
        raise ModelError(
            f"a reward model is needed at {directory} to start the critic from, found no trunk "
            "folder with head.safetensors beside it; check the path or leave value_init out"
        )
    return trunk_dir


def load_reward_adapters(directory: Path, base: SharedBase) -> nn.Linear | None:
    """Put the adapters of the reward model at directory into the base; return its scalar head.

    The head's bias is less the centre offset, as in load_reward_trunk. None, with a warning, where
    the reward model has no adapters on this base, or reads what a critic cannot. Raises ModelError
    if there is no reward model.
    """
    trunk_dir = _trunk_of_reward(directory)
    facts = read_json(directory / "reward_model.json")
    fits = facts.get("base", {}).get("digest") == base.digest
    fits = fits and facts["reads"] == "last" and not facts.get("likelihood")
    if not fits or not (trunk_dir / ADAPTER).is_file():
        warnings.warn(
            f"the reward model at {directory} has no adapters on the policy's base that a critic "
            "can begin with, so the critic starts from fresh ones; leave value_init out, or train "
            "the reward with reward.lora_rank on that base, to silence this",
            stacklevel=2,
        )
        return None
    load_adapters(trunk_of(base.policy.model), AdapterCritic.SET, trunk_dir)
    return _saved_head(directory, facts)


def load_reward_trunk(directory: Path, policy: Policy) -> tuple[nn.Module, nn.Linear] | None:
    """Return the trunk and the scalar head of the reward model kept at directory.

    The head's bias is less the model's centre offset, so values start where centred scores are.
    None, with a warning, where it cannot be a critic: an encoder and a likelihood read what comes
    later, and another vocabulary reads other tokens than the policy writes. Raises ModelError if
    there is no reward model. The layout is reward/model.py's.
    """
    trunk_dir = _trunk_of_reward(directory)
    facts = read_json(directory / "reward_model.json")
    same_tokens = load_tokenizer(trunk_dir).get_vocab() == policy.tokenizer.get_vocab()
    shares = "base" in facts
    if facts["reads"] != "last" or facts.get("likelihood") or not same_tokens or shares:
        what = "another vocabulary than the policy"
        if same_tokens and shares:
            what = "no trunk of its own, but adapters for another base or none"
        elif same_tokens:
            what = "a head that reads likelihoods, or a state other than the last one"
        warnings.warn(
            f"the reward model at {directory} has {what}, so the critic starts from the policy's "
            "trunk; leave value_init out, or train the reward model on the policy's base, to "
            "silence this",
            stacklevel=2,
        )
        return None
    trunk: nn.Module = load_weights(AutoModel, trunk_dir, "float32")
    return trunk, _saved_head(directory, facts)


def _saved_head(directory: Path, facts: Any) -> nn.Linear:
    saved = load_file(directory / "head.safetensors")
    head = nn.Linear(saved["weight"].shape[1], 1)
    # Of several heads, each by a part of the raters, a value begins at the mean.
    head.load_state_dict({name: rows.mean(0, keepdim=True) for name, rows in saved.items()})
    with torch.no_grad():
        head.bias.sub_(float(facts["calibration"]["offset"]))
    return head
