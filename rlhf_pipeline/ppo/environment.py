"""Conversations as episodes: a gymnasium environment, alone (`ChatEnv`) and many (`ChatVectorEnv`).

state   the conversation so far, as the tokens the policy reads: {"ids", "mask"}, padded on the left
action  the assistant's next token, or its whole completion (what follows the first end token is
        not read); `ChatTask.action` says which
reward  what turn_reward gives a turn as it ends, and what episode_reward gives the conversation
        when it is over, both raw scores; 0 in between
end     terminated when max_turns are over or the user leaves; truncated when the next prompt no
        longer fits (or, with long_prompts keep_latest, never: the oldest turns are dropped)

The environments need gymnasium; nothing else of PPO does. `play` is PPO's own use of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.errors import ConfigError, ShapeMismatch, TrainingError
from rlhf_pipeline.policy.chat import decode_completions, encode_prompts
from rlhf_pipeline.ppo.rollout import Episodes, SampledCompletions, join_sampled
from rlhf_pipeline.records import (
    Message,
    Prompt,
    RewardFunction,
    RewardInput,
    SimulatedUser,
    checked_answers,
    checked_scores,
)

State = dict[str, NDArray[Any]]
Timer = Callable[[str], AbstractContextManager[None]]
# What a step changes of a ChatVectorEnv, each by putting something in its place.
CHANGED = ("conversations", "_encoded", "_said", "_turn", "_terminated", "_truncated")


@dataclass(frozen=True, slots=True)
class ChatTask:
    """What is talked about, with whom, and who judges it."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]  # how conversations begin
    vocabulary: int  # ids the policy may choose from: 0 to this, less one
    user: SimulatedUser | None = None  # needed for more than one turn
    turn_reward: RewardFunction | None = None  # judges each turn as it ends
    episode_reward: RewardFunction | None = None  # judges the last turn, with all before it
    max_turns: int = 1
    max_prompt_tokens: int = 64
    max_completion_tokens: int = 48
    long_prompts: Literal["refuse", "keep_latest"] = "refuse"
    action: Literal["token", "completion"] = "completion"

    def __post_init__(self) -> None:
        if not self.prompts or min(self.max_turns, self.max_completion_tokens) < 1:
            raise ConfigError(
                "a conversation needs a prompt to begin with, a turn and a token to say, found "
                f"{len(self.prompts)}, {self.max_turns} and {self.max_completion_tokens}"
            )
        if self.max_turns > 1 and self.user is None:
            raise ConfigError(
                f"{self.max_turns} turns need somebody who answers in between, found no user; pass "
                "a SimulatedUser or set max_turns to 1"
            )

    @property
    def state_tokens(self) -> int:
        """Return how many tokens a state may have."""
        said = self.max_completion_tokens if self.action == "token" else 0
        return self.max_prompt_tokens + said


class ChatVectorEnv(VectorEnv[State, NDArray[np.int64], NDArray[Any]]):
    """Conversations side by side, whose rewards and users are asked once for all of them.

    One that is over stays over, pays 0 and does not read its action until it is reset: reset with
    options {"prompts": indices} begins the given conversations, with {"reset_mask": flags} those
    flagged alone. infos hold `turn` (turns that are over), `turn_over` and `judged` (whether this
    step ended a turn, and whether a reward judged it), each (N,).
    """

    metadata = {"render_modes": ["ansi"], "autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012  # gymnasium's own form

    def __init__(self, task: ChatTask, num_envs: int, render_mode: str | None = None) -> None:
        self.task, self.num_envs, self.render_mode = task, num_envs, render_mode
        V, T, S = task.vocabulary, task.max_completion_tokens, task.state_tokens
        self.single_observation_space = spaces.Dict(
            {"ids": spaces.Box(0, V - 1, (S,), np.int64), "mask": spaces.MultiBinary(S)}
        )
        self.single_action_space = (
            spaces.Discrete(V) if task.action == "token" else spaces.MultiDiscrete([V] * T)
        )
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.conversations: list[Prompt] = [() for _ in range(num_envs)]
        self._encoded: list[list[int]] = [[] for _ in range(num_envs)]
        self._said: list[list[int]] = [[] for _ in range(num_envs)]  # of the turn that goes on
        self._turn = np.zeros(num_envs, np.int64)
        self._terminated = np.ones(num_envs, bool)  # nothing has begun
        self._truncated = np.zeros(num_envs, bool)

    @property
    def going_on(self) -> list[int]:
        """Return the conversations that wait for the assistant."""
        return np.flatnonzero(~(self._terminated | self._truncated)).tolist()

    def encoded(self, i: int) -> list[int]:
        """Return conversation i as tokens, without padding."""
        return [*self._encoded[i], *self._said[i]]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Begin conversations anew, with prompts drawn at random where none are given.

        Raises TrainingError for a prompt that is too long, or a number that no prompt has, and then
        every conversation is as it was.
        """
        super().reset(seed=seed)
        options = options or {}
        flags = np.asarray(options.get("reset_mask", np.ones(self.num_envs, bool)))
        if flags.shape != (self.num_envs,):
            raise ShapeMismatch(
                f"reset_mask needs a flag for each of {self.num_envs} conversations, found the "
                f"shape {flags.shape}; pass as many"
            )
        begun = np.flatnonzero(flags).tolist()
        wanted = options.get("prompts")
        if wanted is None:
            wanted = self.np_random.integers(len(self.task.prompts), size=len(begun)).tolist()
        if len(wanted) != len(begun):
            raise ShapeMismatch(
                f"a prompt for each conversation that begins is needed: found {len(wanted)} for "
                f"{len(begun)}; pass as many"
            )
        if unknown := [prompt for prompt in wanted if not 0 <= prompt < len(self.task.prompts)]:
            raise TrainingError(
                f"a conversation begins with one of {len(self.task.prompts)} prompts, numbered "
                f"from 0: found {unknown[0]}; pass another"
            )
        prompts = [self.task.prompts[prompt] for prompt in wanted]
        rows = self._rows(prompts)
        too_long = sum(len(row) > self.task.max_prompt_tokens for row in rows)
        if too_long:
            raise TrainingError(
                f"prompts must have at most {self.task.max_prompt_tokens} tokens, found "
                f"{too_long} longer; shorten them or raise max_prompt_tokens"
            )
        for i, conversation, row in zip(begun, prompts, rows, strict=True):
            self.conversations[i], self._encoded[i] = conversation, row
            self._turn[i], self._said[i] = 0, []
            self._terminated[i] = self._truncated[i] = False
        return self._state(), self._infos([], [])

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[State, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Let the assistant say its next token or completion in every conversation that goes on.

        Raises ShapeMismatch or TrainingError for actions that are none of the action space. Where
        it raises, as where a reward does, every conversation is as it was: step again.
        """
        self._check(actions)
        before = {name: copy.copy(getattr(self, name)) for name in CHANGED}
        try:
            return self._step(actions)
        except BaseException:
            vars(self).update(before)
            raise

    def _step(
        self, actions: NDArray[np.int64]
    ) -> tuple[State, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        over = [i for i in self.going_on if self._say(i, actions[i])]
        rewards = np.zeros(self.num_envs)
        items = self._end_turns(over)
        ended, judged = self._answer(over), []
        for reward, judges, name in (
            (self.task.turn_reward, over, "turn"),
            (self.task.episode_reward, ended, "episode"),
        ):
            if reward is not None:
                scores = checked_scores(
                    reward, [items[i] for i in judges], name=name, error=TrainingError
                )
                np.add.at(rewards, judges, scores)
                judged += judges
        return (
            self._state(),
            rewards,
            self._terminated.copy(),
            self._truncated.copy(),
            self._infos(over, judged),
        )

    def render(self) -> tuple[str, ...] | None:
        """Return each conversation as text, one message a line, with what is being said last."""
        if self.render_mode is None:
            return None
        frames = []
        for conversation, said in zip(self.conversations, self._said, strict=True):
            lines = [f"{m.role}: {m.content}" for m in conversation]
            if said:
                text = decode_completions(self.task.tokenizer, [said])[0]
                lines.append(f"assistant: {text} …")
            frames.append("\n".join(lines))
        return tuple(frames)

    def _check(self, actions: NDArray[np.int64]) -> None:
        """Refuse what no conversation could say; those that are over do not read their actions."""
        if actions.shape != self.action_space.shape:
            raise ShapeMismatch(
                f"actions need the shape {self.action_space.shape}, found {actions.shape}; pass an "
                "action for each conversation"
            )
        read = actions[self.going_on]
        unknown = read[(read < 0) | (read >= self.task.vocabulary)]
        if len(unknown):
            raise TrainingError(
                f"actions are token ids from 0 below {self.task.vocabulary}, found {unknown[0]}; "
                "pass ids of the task's tokenizer"
            )

    def _say(self, i: int, action: NDArray[np.int64]) -> bool:
        """Take what the assistant says in conversation i; return whether its turn is over."""
        eos, T = self.task.tokenizer.eos_token_id, self.task.max_completion_tokens
        if self.task.action == "token":
            self._said[i] = [*self._said[i], int(action)]
            return int(action) == eos or len(self._said[i]) == T
        tokens = action.tolist()
        self._said[i] = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
        return True

    def _end_turns(self, over: Sequence[int]) -> Mapping[int, RewardInput]:
        """Move what was said into the conversations; return what there is to judge."""
        items = {}
        said = [self._said[i] for i in over]
        texts = decode_completions(self.task.tokenizer, said) if said else []
        for i, completion in zip(over, texts, strict=True):
            prompt = self.conversations[i]
            facts = {"turn": int(self._turn[i]), "completion_tokens": len(self._said[i])}
            items[i] = RewardInput(prompt, completion, metadata=facts)
            self.conversations[i] = (*prompt, Message("assistant", completion))
            self._turn[i] += 1
            self._said[i] = []
        return items

    def _answer(self, over: Sequence[int]) -> list[int]:
        """Let the user answer where a turn is over; return the conversations that have ended."""
        asked = [i for i in over if self._turn[i] < self.task.max_turns]
        answers: Sequence[str | None] = []
        if self.task.user is not None:
            conversations = [self.conversations[i] for i in asked]
            answers = checked_answers(self.task.user, conversations, TrainingError)
        goes_on: list[int] = []
        for i, answer in zip(asked, answers, strict=True):
            if answer is not None:
                self.conversations[i] = (*self.conversations[i], Message("user", answer))
                goes_on.append(i)
        too_long = self._read(goes_on)
        self._terminated[list(over)] = True
        self._terminated[goes_on] = False
        self._truncated[too_long] = True
        return [i for i in over if self._terminated[i] or self._truncated[i]]

    def _read(self, members: Sequence[int]) -> list[int]:
        """Encode conversations; return those that do not fit, which keep their latest tokens."""
        limit = self.task.max_prompt_tokens
        rows = self._rows([self.conversations[i] for i in members])
        for i, row in zip(members, rows, strict=True):
            self._encoded[i] = row[-limit:]
        return [i for i, row in zip(members, rows, strict=True) if len(row) > limit]

    def _rows(self, conversations: Sequence[Prompt]) -> list[list[int]]:
        """Return conversations as tokens; with keep_latest those that fit."""
        keeps = self.task.long_prompts == "keep_latest"
        most = self.task.max_prompt_tokens if keeps else 10**9
        return encode_prompts(self.task.tokenizer, conversations, max_tokens=most)

    def _state(self) -> State:
        shape = (self.num_envs, self.task.state_tokens)
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int8)
        for i in range(self.num_envs):
            row = self.encoded(i)
            ids[i, shape[1] - len(row) :], mask[i, shape[1] - len(row) :] = row, 1
        return {"ids": ids, "mask": mask}

    def _infos(self, over: Sequence[int], judged: Sequence[int]) -> dict[str, Any]:
        flags = np.zeros((2, self.num_envs), bool)
        flags[0, list(over)] = flags[1, list(judged)] = True
        return {"turn": self._turn.copy(), "turn_over": flags[0], "judged": flags[1]}


class ChatEnv(gym.Env[State, Any]):
    """One conversation at a time: a `ChatVectorEnv` of one, without its first dimension."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012  # gymnasium's own form

    def __init__(self, task: ChatTask, render_mode: str | None = None) -> None:
        self._one = ChatVectorEnv(task, 1, render_mode)
        self.render_mode = render_mode
        self.observation_space = self._one.single_observation_space
        self.action_space = self._one.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Begin a conversation: with options {"prompt": index}, else with one drawn at random."""
        super().reset(seed=seed)
        drawn = (options or {}).get("prompt")
        if drawn is None:
            drawn = int(self.np_random.integers(len(self._one.task.prompts)))
        state, infos = self._one.reset(options={"prompts": [drawn]})
        return _first(state), _first(infos)

    def step(self, action: Any) -> tuple[State, float, bool, bool, dict[str, Any]]:
        """Say the next token or completion. Raises TrainingError once the conversation is over."""
        if not self._one.going_on:
            raise TrainingError("a conversation that goes on is needed, found one over; reset it")
        state, rewards, terminated, truncated, infos = self._one.step(np.asarray([action]))
        facts = _first(infos)
        return _first(state), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), facts

    def render(self) -> str | None:
        """Return the conversation as text."""
        frames = self._one.render()
        return None if frames is None else frames[0]


def play(
    env: ChatVectorEnv,
    sample: Callable[[Sequence[Sequence[int]]], SampledCompletions],
    prompts: Sequence[int],
    *,
    timed: Timer,
) -> Episodes:
    """Return the completions of whole conversations that begin with the prompts of these numbers.

    Each round samples one completion for every conversation that goes on, all at once. Rows come
    round by round: the first turns of all, then the second turns. The environment's task takes
    whole completions.
    """
    env.reset(options={"prompts": list(prompts)})
    rounds: list[SampledCompletions] = []
    asked: list[Prompt] = []
    scores: list[float] = []
    judged: list[bool] = []
    turn: list[int] = []
    next_turn: list[int] = []
    row_of: dict[int, int] = {}  # conversation -> row of its latest turn
    while going_on := env.going_on:
        asked += [env.conversations[i] for i in going_on]
        with timed("sample"):
            sampled = sample([env.encoded(i) for i in going_on])
        rounds.append(sampled)
        ids = sampled.tokens.completion_ids.cpu()
        # A short round is filled up with end tokens; what follows the first is not read.
        end = env.task.tokenizer.eos_token_id
        actions = np.full((env.num_envs, env.task.max_completion_tokens), end, np.int64)
        actions[going_on, : ids.shape[1]] = torch.where(
            sampled.tokens.completion_mask.cpu(), ids, end
        ).numpy()
        with timed("score"):
            _, rewards, _, _, infos = env.step(actions)
        for i in going_on:
            row = len(scores)
            if i in row_of:
                next_turn[row_of[i]] = row
            row_of[i] = row
            scores.append(float(rewards[i]))
            judged.append(bool(infos["judged"][i]))
            turn.append(int(infos["turn"][i]) - 1)
            next_turn.append(-1)
    return Episodes(join_sampled(rounds), asked, scores, judged, turn, next_turn)


def _first(batched: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the first row of each; plain numbers where a row is one number."""
    return {
        name: row.copy() if (row := rows[0]).ndim else row.item() for name, rows in batched.items()
    }
