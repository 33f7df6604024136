"""The chat environment: gymnasium's own checks, rewards and ends by hand, PPO's use of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from rlhf_pipeline.errors import ConfigError, ShapeMismatch, TrainingError
from rlhf_pipeline.policy.chat import encode_completion, encode_prompt
from rlhf_pipeline.policy.loading import Policy
from rlhf_pipeline.policy.sampling import completion_logprobs
from rlhf_pipeline.ppo.collecting import sample_for
from rlhf_pipeline.ppo.environment import ChatEnv, ChatTask, ChatVectorEnv, play
from rlhf_pipeline.ppo.rollout import SampledCompletions
from rlhf_pipeline.records import Message, Prompt, RewardInput, user_prompt
from tests.ppo.world import changed, learner_at, tiny_policy

POLICY: Policy = tiny_policy()
TOKENIZER = POLICY.tokenizer
PROMPTS: list[Prompt] = [*map(user_prompt, ("hi", "tell me a tale", "why")), user_prompt("sing")]


def curious(conversations: Sequence[Prompt], /) -> list[str | None]:
    """Ask why, but leave those who said nothing."""
    return ["why" if c[-1].content else None for c in conversations]


def letters(items: Sequence[RewardInput], /) -> list[float]:
    return [float(len(item.completion)) for item in items]


def hundreds(items: Sequence[RewardInput], /) -> list[float]:
    """Judge a conversation: a hundred for each message, and the letters of the last one."""
    return [100.0 * (len(item.prompt) + 1) + len(item.completion) for item in items]


def task(**changes: Any) -> ChatTask:
    arguments: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "prompts": PROMPTS,
        "vocabulary": len(TOKENIZER),
        "user": curious,
        "turn_reward": letters,
        "episode_reward": hundreds,
        "max_turns": 2,
        "max_prompt_tokens": 48,
        "max_completion_tokens": 8,
    }
    return ChatTask(**{**arguments, **changes})


def saying(*texts: str, length: int = 8) -> NDArray[np.int64]:
    """Return completions as actions; what stands after the end token is noise."""
    rows = [encode_completion(TOKENIZER, text, max_tokens=length) for text in texts]
    assert all(row[-1] == TOKENIZER.eos_token_id for row in rows)
    return np.array([row + [7] * (length - len(row)) for row in rows])


def read(state: dict[str, NDArray[Any]], row: int) -> list[int]:
    ids: list[int] = state["ids"][row][state["mask"][row] == 1].tolist()
    return ids


@pytest.mark.parametrize("action", ["token", "completion"])
def test_gymnasium_finds_nothing_wrong(action: str) -> None:
    env = ChatEnv(task(action=action), render_mode="ansi")
    check_env(env, skip_render_check=True)  # it would ask the registry for another render mode
    env.reset(seed=0)
    assert env.render() in {f"user: {p[0].content}" for p in PROMPTS}
    assert ChatEnv(task()).render() is None


def test_a_conversation_is_judged_turn_by_turn_and_once_at_its_end() -> None:
    env = ChatVectorEnv(task(), 3, render_mode="ansi")
    state, infos = env.reset(options={"prompts": [0, 1, 2]})
    assert read(state, 1) == encode_prompt(TOKENIZER, PROMPTS[1], max_tokens=48)
    assert infos["turn"].tolist() == [0, 0, 0]
    state, rewards, terminated, truncated, infos = env.step(saying("rain", "", "la"))
    # The second user leaves: 0 letters, and 100 for each of two messages.
    assert rewards.tolist() == [4.0, 200.0, 2.0]
    assert terminated.tolist() == [False, True, False]
    assert infos["turn_over"].tolist() == [True, True, True]
    assert env.conversations[2] == (*PROMPTS[2], Message("assistant", "la"), *user_prompt("why"))
    assert read(state, 2) == encode_prompt(TOKENIZER, env.conversations[2], max_tokens=48)
    _, rewards, terminated, truncated, infos = env.step(saying("la", "rain", "tale"))
    assert rewards.tolist() == [2.0 + 402.0, 0.0, 4.0 + 404.0]  # who has left hears nothing
    assert terminated.tolist() == [True, True, True]
    assert not truncated.any()
    assert infos["turn"].tolist() == [2, 1, 2]
    assert infos["judged"].tolist() == [True, False, True]
    frames = env.render()
    assert frames is not None
    assert frames[0] == "user: hi\nassistant: rain\nuser: why\nassistant: la"
    assert env.going_on == []


def test_some_may_begin_again_while_others_go_on() -> None:
    env = ChatVectorEnv(task(), 2)
    env.reset(options={"prompts": [0, 1]})
    env.step(saying("", "la"))
    flags = np.array([True, False])
    _, infos = env.reset(options={"reset_mask": flags, "prompts": [3]})
    assert env.conversations[0] == PROMPTS[3]
    assert len(env.conversations[1]) == 3
    assert infos["turn"].tolist() == [0, 1]
    assert env.going_on == [0, 1]


def test_seeds_draw_the_prompts() -> None:
    env = ChatVectorEnv(task(), 6)
    drawn = []
    for seed in (1, 1, 2):
        env.reset(seed=seed)
        drawn.append(list(env.conversations))
    assert drawn[0] == drawn[1] != drawn[2]


def test_token_by_token_is_the_same_conversation_as_completion_by_completion() -> None:
    tokens, whole = ChatEnv(task(action="token"), "ansi"), ChatEnv(task(), "ansi")
    tokens.reset(options={"prompt": 1})
    whole.reset(options={"prompt": 1})
    cut = np.full(8, 7)  # no end token: the turn is over at the limit
    for said in (saying("la")[0], cut):
        state, reward, *ends, facts = whole.step(said)
        end = TOKENIZER.eos_token_id
        row = said.tolist()
        row = row[: row.index(end) + 1] if end in row else row
        for i, token in enumerate(row):
            one, paid, *same_ends, same_facts = tokens.step(token)
            if i < len(row) - 1:
                assert paid == 0
                assert not same_facts["turn_over"]
                ids = one["ids"][one["mask"] == 1].tolist()
                assert ids[-(i + 1) :] == row[: i + 1]
                assert str(tokens.render()).endswith("…")
        assert paid == reward
        assert same_ends == ends
        assert same_facts == facts
        assert tokens.render() == whole.render()
        ids = one["ids"][one["mask"] == 1].tolist()
        assert ids == state["ids"][state["mask"] == 1].tolist()
    assert ends == [True, False]


def test_a_conversation_that_no_longer_fits_is_cut_off_or_forgets_its_beginning() -> None:
    first = len(encode_prompt(TOKENIZER, PROMPTS[0], max_tokens=99))
    env = ChatEnv(task(max_prompt_tokens=first + 2))
    env.reset(options={"prompt": 0})
    _, reward, terminated, truncated, _ = env.step(saying("la")[0])
    assert (terminated, truncated) == (False, True)
    assert reward == 2.0 + 202.0  # it is over, so it is judged as a whole
    forgets = ChatEnv(task(max_prompt_tokens=first + 2, long_prompts="keep_latest"))
    forgets.reset(options={"prompt": 0})
    state, _, terminated, truncated, _ = forgets.step(saying("la")[0])
    assert (terminated, truncated) == (False, False)
    newest = user_prompt("why")  # the turn before has no room beside it
    assert state["ids"][state["mask"] == 1].tolist() == encode_prompt(
        TOKENIZER, newest, max_tokens=first + 2
    )
    with pytest.raises(TrainingError, match=r"at most 2 tokens, found 1 longer"):
        ChatEnv(task(max_prompt_tokens=2)).reset(options={"prompt": 0})


def test_what_cannot_be_a_conversation_is_refused() -> None:
    with pytest.raises(ConfigError, match="found 0, 2 and 8"):
        task(prompts=[])
    with pytest.raises(ConfigError, match="2 turns need somebody who answers"):
        task(user=None)
    env = ChatVectorEnv(task(user=lambda conversations: []), 2)
    with pytest.raises(ShapeMismatch, match="found 1 for 2"):
        env.reset(options={"prompts": [0]})
    for number in (-1, len(env.task.prompts)):
        with pytest.raises(TrainingError, match=f"numbered from 0: found {number}"):
            env.reset(options={"prompts": [0, number]})
    env.reset(seed=0)
    with pytest.raises(TrainingError, match="answer once in each conversation: needed 2, found 0"):
        env.step(saying("la", "la"))
    one = ChatEnv(task())
    with pytest.raises(TrainingError, match="found one over; reset it"):
        one.step(saying("la")[0])


def test_a_step_or_a_reset_that_is_refused_changes_no_conversation() -> None:
    env = ChatVectorEnv(task(prompts=[*PROMPTS, user_prompt("why " * 40)]), 2)
    env.reset(options={"prompts": [0, 2]})
    actions = saying("", "la")
    env.step(actions)
    assert env.going_on == [1]

    def held() -> list[Any]:
        rows = [env.encoded(i) for i in range(2)]
        return [list(env.conversations), rows, env.going_on, env._turn.tolist()]

    before = held()
    with pytest.raises(TrainingError, match="found 1 longer"):
        env.reset(options={"prompts": [2, len(PROMPTS)]})
    for flags in ([True], [True] * 3, True):
        with pytest.raises(ShapeMismatch, match="reset_mask needs a flag for each of 2"):
            env.reset(options={"reset_mask": flags, "prompts": [0]})
    for token in (-1, env.task.vocabulary):
        wrong = actions.copy()
        wrong[1, 3] = token
        with pytest.raises(TrainingError, match=f"token ids from 0 below .*, found {token};"):
            env.step(wrong)
    for shape in (actions[:1], actions[:, :4], actions[:, 0]):
        with pytest.raises(ShapeMismatch, match=r"need the shape \(2, 8\), found"):
            env.step(shape)
    assert held() == before
    actions[0] = -1  # that conversation is over and reads no action
    env.step(actions)
    assert held() != before


@pytest.mark.parametrize("action", ["token", "completion"])
@pytest.mark.parametrize("who", ["user", "turn_reward", "episode_reward"])
def test_a_step_whose_judge_or_user_fails_once_is_taken_again(action: str, who: str) -> None:
    """As a remote reward does that is away for a moment."""

    def played(fails: bool) -> list[Any]:
        usual = getattr(task(), who)
        failed: list[Any] = []

        def once(given: Sequence[Any], /) -> Any:
            if fails and not failed:
                failed.append(given)
                raise ConnectionError("away")
            return usual(given)

        env = ChatVectorEnv(task(action=action, **{who: once}), 2, render_mode="ansi")
        state, _ = env.reset(options={"prompts": [0, 2]})
        told: list[Any] = [state]
        completions = saying("hi", "la")
        for n in range(2 * completions.shape[1] if action == "token" else 2):
            step = completions[:, n % completions.shape[1]] if action == "token" else completions
            try:
                told.append((*env.step(step), env.render()))
            except ConnectionError:
                told.append((*env.step(step), env.render()))
        assert bool(failed) == fails
        return told

    assert str(played(fails=True)) == str(played(fails=False))


def test_ppo_plays_whole_conversations_and_knows_which_turn_follows_which(base: Path) -> None:
    learner = learner_at(base, changed(max_prompt_tokens=48, max_turns=3, temperature=1.0))
    generator = torch.Generator().manual_seed(0)
    calls: list[int] = []

    def sample(rows: Sequence[Sequence[int]]) -> SampledCompletions:
        calls.append(len(rows))
        return sample_for(learner, rows, generator)

    env = ChatVectorEnv(task(max_turns=3, episode_reward=None), 4)
    episodes = play(env, sample, [0, 1, 2, 1], timed=lambda phase: nullcontext())
    assert calls[0] == 4
    assert len(episodes.scores) == sum(calls) > 8
    assert episodes.sampled.texts[0] == env.conversations[0][1].content
    tokens = episodes.sampled.tokens
    starts = [row for row, turn in enumerate(episodes.turn) if turn == 0]
    assert starts == [0, 1, 2, 3]
    for i, row in enumerate(starts):
        said, asked = [], []
        while row >= 0:
            said.append(episodes.sampled.texts[row])
            asked.append(episodes.prompts[row])
            ids = tokens.prompt_ids[row][tokens.prompt_mask[row]].tolist()
            assert ids == encode_prompt(TOKENIZER, episodes.prompts[row], max_tokens=48)
            assert episodes.turn[row] == len(said) - 1
            assert episodes.scores[row] == len(said[-1])
            row = episodes.next_turn[row]
        assert said == [m.content for m in env.conversations[i] if m.role == "assistant"]
        assert asked[-1] == env.conversations[i][: len(asked[-1])]
    assert all(episodes.judged)
    again = completion_logprobs(
        learner.policy.model,
        tokens.prompt_ids,
        tokens.prompt_mask,
        tokens.completion_ids,
        tokens.completion_mask,
        temperature=1.0,
    )
    assert torch.allclose(again, episodes.sampled.logprobs, atol=1e-4)
