"""The reasons of one interaction, on a real turn: their numbers against slower ways to the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rlhf_pipeline.config import RewardSettings
from rlhf_pipeline.errors import FeedbackError, HashMismatch, RegistryError
from rlhf_pipeline.feedback import datasets
from rlhf_pipeline.policy.chat import encode_completion, encode_prompt
from rlhf_pipeline.policy.loading import Policy, load_policy
from rlhf_pipeline.records import ELSEWHERE, Interaction, PreferencePair, RewardInput, now
from rlhf_pipeline.registry.reasons import Reasons, _rewards, reasons, turn_of
from rlhf_pipeline.registry.reasons_told import to_json, to_text, verdict
from rlhf_pipeline.registry.scored import judged, scored
from rlhf_pipeline.registry.scored import to_text as pieces_told
from rlhf_pipeline.reward.composite import CompositeReward
from rlhf_pipeline.reward.model import load_reward_model
from rlhf_pipeline.reward.named import composite_of
from rlhf_pipeline.stages import PAIRS
from tests.assets.world import FirstTurn, Loop


@pytest.fixture(scope="module")
def asked(loop: Loop, first_turn: FirstTurn) -> Interaction:
    """An answer of version 1 to a question that somebody's training preference was about."""
    mark = loop.version(first_turn.agent_id, 1).fingerprint or ""
    data = loop.pipeline.settings().agent_folder(first_turn.agent_id) / "snapshots" / mark[:16]
    pairs = datasets.read_jsonl(data / PAIRS, PreferencePair)
    pair = next(pair for pair in pairs if pair.split == "train" and not pair.tie)
    made = Interaction(
        interaction_id="explained",
        agent_id=first_turn.agent_id,
        prompt=pair.prompt,
        completion=pair.chosen,
        model_version=1,
        created_at=now(),
    )
    loop.pipeline.store.add_interactions([made])
    return made


@pytest.fixture(scope="module")
def found(loop: Loop, asked: Interaction) -> Reasons:
    settings = loop.pipeline.settings(asked.agent_id)
    return reasons(loop.pipeline.registry, settings, asked.interaction_id)


def slow_logprob(policy: Policy, prompt: list[int], completion: list[int]) -> float:
    """Return the completion's log-probability by one whole forward pass of the model."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + completion])).logits[0].double()
    table = logits.log_softmax(-1)
    return float(sum(table[len(prompt) - 1 + i, token] for i, token in enumerate(completion)))


def test_tokens_tell_how_much_likelier_the_version_finds_the_completion(
    loop: Loop, asked: Interaction, found: Reasons
) -> None:
    versions = [loop.version(asked.agent_id, number) for number in (1, 0)]
    here, baseline = (load_policy(version.path, device="cpu") for version in versions)
    prompt = encode_prompt(here.tokenizer, asked.prompt, max_tokens=48)
    ids = encode_completion(here.tokenizer, asked.completion, max_tokens=16)
    expected = slow_logprob(here, prompt, ids) - slow_logprob(baseline, prompt, ids)
    assert found.shift == pytest.approx(expected, abs=1e-3)
    assert abs(found.shift) > 0.01  # it was trained
    assert len(found.tokens) == len(ids)
    assert asked.completion.startswith("".join(token.text for token in found.tokens))
    assert (found.version, found.baseline, found.answered_by) == (1, 0, 1)


def test_scores_are_those_of_the_reward_models(
    loop: Loop, first_turn: FirstTurn, asked: Interaction, found: Reasons
) -> None:
    assert [judged.judge for judged in found.judgements] == ["proxy", "stopping", "gate"]
    gate = load_reward_model(first_turn.work / "reward" / "gate", device="cpu")
    texts = (asked.completion, found.baseline_completion)
    scores = gate([RewardInput(asked.prompt, text) for text in texts])
    judged = found.judgements[2]
    assert (judged.score, judged.baseline_score) == pytest.approx(tuple(scores))
    assert judged.heads == {}  # it has one
    assert found.composite is None


def test_the_vote_about_this_very_answer_is_the_nearest(asked: Interaction, found: Reasons) -> None:
    nearest = found.near[0]
    assert nearest.question == asked.prompt[-1].content
    assert asked.completion in (nearest.completion, nearest.other)
    assert [nearest.similarity, nearest.completion_similarity] == pytest.approx([1, 1])
    assert found.trained_on > 40


def test_reasons_are_told_in_words_and_as_json(found: Reasons) -> None:
    told = json.loads(json.dumps(to_json(found)))
    assert told["shift"] == pytest.approx(sum(token["shift"] for token in told["tokens"]))
    text = to_text(found)
    for line in (*verdict(found), found.completion, "gate model", found.near[0].feedback_id):
        assert line in text
    assert "likelier" in verdict(found)[0] or "less likely" in verdict(found)[0]


def test_of_an_answer_from_elsewhere_the_champion_tells(
    loop: Loop, asked: Interaction, found: Reasons
) -> None:
    upstreams = replace(asked, interaction_id="from elsewhere", model_version=ELSEWHERE)
    loop.pipeline.store.add_interactions([upstreams])
    settings = loop.pipeline.settings(asked.agent_id)
    told = reasons(loop.pipeline.registry, settings, upstreams.interaction_id)
    champion = loop.pipeline.ledger.champion(asked.agent_id)
    assert champion is not None
    assert (told.version, told.answered_by) == (champion.version, ELSEWHERE)
    assert "answered by a model elsewhere\n" in to_text(told)
    assert "answered by version 1\n" in to_text(found)


def test_functions_tell_their_pieces_and_what_has_nothing_to_compare_with_is_left_out(
    loop: Loop, asked: Interaction
) -> None:
    settings = loop.pipeline.settings(asked.agent_id)
    turn, _ = turn_of(loop.pipeline.registry, settings, loop.version(asked.agent_id, 1))
    functions = RewardSettings.model_validate(
        {"functions": {"learned": 1, "length": {"weight": 0.5}, "rouge-l": 1}}
    ).functions
    reward = turn.settings.reward.model_copy(update={"functions": functions})
    turn = replace(turn, settings=turn.settings.model_copy(update={"reward": reward}))
    unknown = replace(asked, prompt=(replace(asked.prompt[-1], content="who knows this?"),))
    _, composite, left_out = _rewards(turn, unknown, "the lamp")
    assert composite is not None
    weights, here, other = composite
    assert left_out == ("rouge-l",)
    assert weights == {"learned": 1, "length": 0.5}
    assert other.pieces["length"].added == 0.5 * 2 / 5  # two words of five
    assert here.score == pytest.approx(sum(piece.added for piece in here.pieces.values()))


def test_an_answers_score_is_taken_apart_with_what_trained_its_version(
    loop: Loop, first_turn: FirstTurn, asked: Interaction
) -> None:
    registry, settings = loop.pipeline.registry, loop.pipeline.settings(asked.agent_id)
    other = replace(asked, completion="<b>no</b>\nnot " + "so " * 40)
    found = scored(registry, settings, [asked, other])
    proxy = load_reward_model(first_turn.work / "reward" / "proxy", device="cpu")
    scores = proxy([RewardInput(asked.prompt, one.completion) for one in (asked, other)])
    assert [one.score for one in found] == pytest.approx(scores)
    assert [piece.name for piece in found[0].pieces] == ["learned"]
    # The same with functions beside it, one of which has a floor.
    functions = RewardSettings.model_validate(
        {"functions": {"learned": 1, "length": {"weight": 0.5, "floor": 2}}}
    ).functions
    composite = composite_of(functions, proxy)
    assert isinstance(composite, CompositeReward)
    items = [RewardInput(other.prompt, other.completion)]
    [one] = judged(items, proxy, composite, ("rouge-l",))
    told = composite.breakdown(other.prompt, other.completion)
    assert one.score == told.score
    length = one.pieces[1]
    assert (length.weight, length.added) == (0.5, told.pieces["length"].added)
    words = pieces_told([one])
    assert "“<b>no</b> not so so" in words  # one line, shortened
    assert len(words.splitlines()) == 6
    assert "below its floor" in words
    assert "-5 at most" in words
    assert "left out, nothing to compare with is known: rouge-l" in words
    with pytest.raises(RegistryError, match=r"version 0 of .* was trained by no reward"):
        scored(registry, settings, [replace(asked, model_version=0)])


def test_what_cannot_be_explained_is_said(loop: Loop, asked: Interaction) -> None:
    registry, settings = loop.pipeline.registry, loop.pipeline.settings(asked.agent_id)
    with pytest.raises(FeedbackError, match="none with the id 'gone'"):
        reasons(registry, settings, "gone")
    with pytest.raises(FeedbackError, match="of agent 'other', found one of"):
        reasons(registry, settings, asked.interaction_id, agent_id="other")
    with pytest.raises(RegistryError, match=r"version 0 of .* was trained by no reward.* 1$"):
        reasons(registry, settings, asked.interaction_id, version="baseline")
    with pytest.raises(RegistryError, match="version 77"):
        reasons(registry, settings, asked.interaction_id, version="77")
    version = loop.version(asked.agent_id, 1)
    models = {**version.lineage["reward_models"], "gate": {"head.safetensors": "0" * 64}}
    changed = replace(version, lineage={**version.lineage, "reward_models": models})
    with pytest.raises(HashMismatch, match=r"found head\.safetensors changed or missing"):
        turn_of(registry, settings, changed)
    moved = replace(version, path=version.path.parent / "away" / "policy")
    with pytest.raises(RegistryError, match=r"proxy reward model at .*, found none there"):
        turn_of(registry, settings, moved)
