"""Where nobody compared two answers, votes on single ones judge a reward: by answers alone."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assets.reward_tables import groups_of
from rlhf_pipeline.errors import NotEnoughData, TrainingError
from rlhf_pipeline.evaluation.facts import reward_facts
from rlhf_pipeline.feedback.datasets import JOBS, conversation_of
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import (
    FeedbackKind,
    Message,
    Prompt,
    RewardExample,
    RewardInput,
    prompt_to_json,
    user_prompt,
)
from rlhf_pipeline.reward.calibration import HangsOn, hangs_on, highest_floor, pair_accuracy
from rlhf_pipeline.reward.ensemble import Combine
from rlhf_pipeline.reward.fitting import Heard
from rlhf_pipeline.reward.heads import Combined
from rlhf_pipeline.reward.held_out import (
    WORST,
    HeldOut,
    Lead,
    Measured,
    measured,
    rank_correlation,
    tells_apart,
)
from rlhf_pipeline.reward.matched import (
    MOST_MATCHES,
    Match,
    Matches,
    find_by_votes,
    judging_votes,
    match,
    of_matches,
    usual_of_each,
)
from rlhf_pipeline.reward.model import load_reward_model, new_reward_model
from rlhf_pipeline.reward.plots import PLOTS
from rlhf_pipeline.reward.training import RewardModelReport, _influence, train_reward_model
from rlhf_pipeline.reward.tuning import Fit
from tests.reward.conftest import SETTINGS, WORDS, Planted

KINDS = {"thumbs": 1.0, "rating": 1.0}
PLEASING = ("blue", "shop")  # what prompts are about that people are pleased with, whatever is said


def vote(
    number: float,
    prompt: Prompt | str,
    completion: str = "Yes.",
    kind: FeedbackKind = FeedbackKind.thumbs,
    split: str = "evaluation",
    name: str = "",
) -> RewardExample:
    asked = user_prompt(prompt) if isinstance(prompt, str) else prompt
    name = name or f"{prompt} {completion} {kind} {number}"
    return RewardExample(name, asked, completion, kind, number, None, name, split)  # type: ignore[arg-type]


def test_a_vote_is_matched_once_with_one_of_its_kind_and_the_other_opinion() -> None:
    votes = [vote(float(i % 3 == 0), f"q{i}") for i in range(60)]
    votes += [vote(1 + i % 5, f"r{i}", kind=FeedbackKind.rating) for i in range(40)]
    others = [vote(1, "train", split="train"), vote(0.9, "score", kind=FeedbackKind.score)]
    found = match([*votes, *others], KINDS)
    used = [one for m in found.all for one in (m.liked, m.disliked)]
    assert len({one.example_id for one in used}) == len(used)
    assert {one.kind.value for one in used} == set(KINDS)
    for one in found.all:
        assert one.liked.kind is one.disliked.kind
        if one.liked.kind is FeedbackKind.rating:  # 3 is neither
            assert (one.liked.number or 0) > 3 > (one.disliked.number or 0)
        else:
            assert (one.liked.number, one.disliked.number) == (1, 0)
    # No more could be: twenty thumbs up, sixteen good ratings beside as many bad, less what the
    # halves leave over.
    assert 28 <= len(found.all) <= 36
    assert found.enough
    shuffled = random.Random(3).sample(votes, len(votes))
    assert match([*shuffled, *others], KINDS) == found
    assert match(votes, {}) == Matches()


def test_an_answer_is_matched_once_as_most_people_found_it() -> None:
    # 40 votes up of one answer and 40 down of another to each of two prompts are four answers.
    many = [vote(float(i % 2), f"p{i % 4 // 2}", str(i % 2), name=f"many {i}") for i in range(160)]
    assert len(match(many, KINDS).all) == 2
    assert judging_votes([], many, KINDS) is None
    votes = [vote(1, "p", "Good.", name=f"good {i}") for i in range(3)]
    votes += [vote(0, "p", "Good.", name="one who did not like it")]
    votes += [vote(float(i % 2), "p", "Disputed.", name=f"disputed {i}") for i in range(4)]
    votes += [vote(0, "p", "Bad."), vote(1, "q", "Bad."), vote(0, "q", "Good.")]
    found = {
        (m.liked.prompt[0].content, m.liked.completion, m.liked.number)
        for m in match(votes, KINDS).all
    }
    assert found == {("p", "Good.", 1), ("q", "Bad.", 1)}
    assert all(m.disliked.number == 0 for m in match(votes, KINDS).all)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.booleans()), max_size=80))
def test_halves_share_no_conversation(rows: list[tuple[int, int, bool]]) -> None:
    votes = []
    for i, (conversation, turn, up) in enumerate(rows):
        said = [Message("assistant", "Yes."), Message("user", "And?")] * turn
        prompt = (Message("user", f"c{conversation}"), *said)
        votes.append(vote(float(up), prompt, name=f"vote {i}"))
    found = match(votes, KINDS)
    one, other = (
        {conversation_of(v.prompt) for m in half for v in (m.liked, m.disliked)}
        for half in (found.fitting, found.judging)
    )
    assert not one & other


def test_the_many_votes_of_a_large_agent_are_a_sample() -> None:
    votes = [vote(float(i % 2), f"q{i}") for i in range(3 * MOST_MATCHES)]
    found = match(votes, KINDS)
    assert len(found.fitting) == len(found.judging) == MOST_MATCHES // 2


def test_two_answers_to_one_prompt_judge_where_there_are_enough(planted: Planted) -> None:
    votes = [vote(float(i % 2), f"q{i}") for i in range(60)]
    pairs = list(planted.test)
    assert judging_votes(pairs[:10], votes, KINDS) is None
    ties = [replace(pair, tie=True) for pair in pairs]
    assert judging_votes([*pairs[:9], *ties], votes, KINDS) == match(votes, KINDS)
    assert judging_votes([], votes, {"rating": 1}) is None
    assert judging_votes([], votes[:16], KINDS) is None  # eight of each
    assert judging_votes([], votes[::2], KINDS) is None  # all of one opinion


def hand_worked() -> tuple[HeldOut, torch.Tensor]:
    """Return two matches on three prompts, and a score of each text."""
    a, b = vote(1, "p0", "12345"), vote(0, "p1", "123")
    c, d = vote(1, "p1", "1234"), vote(0, "p2", "1")
    held = of_matches(
        Matches((Match(a, b),), (Match(c, d),)),
        {prompt_to_json(user_prompt(f"p{i}")): ["x" * i] * 4 for i in range(3)},
    )
    said = [5.0, 1.0, 2.0, 0.0]  # liked of both matches, then disliked
    usual = [4.0, 4.0, 4.0, 8.0, 0.0, 1.0, 1.0, 2.0, -3.0, -1.0, -1.0, -3.0]
    return held, torch.tensor([*said, *usual])


def test_answers_are_measured_against_what_is_usual_at_their_prompt() -> None:
    held, scores = hand_worked()
    assert len(held) == 2
    # p0's usual answers score 5, p1's 1, p2's -2: leads 0 and 0 of the liked, 1 and 2.
    assert held.lead(scores).tolist() == [0, 0, 1, 2]
    assert held.margins(scores) == [-1, -2]
    both = torch.stack([scores, 2 * scores], 1)  # of two heads, or features
    assert held.lead(both).tolist() == [[0, 0], [0, 0], [1, 2], [2, 4]]
    # Of usual length 0, 1 and 2: ahead by 5 and 3, and by 2 and -1.
    assert held.longer_is_better() == 1.0


@pytest.mark.parametrize("combine", ["median", "pessimistic"])
def test_without_a_part_votes_are_judged_by_the_lead_of_the_others_combined_scores(
    planted: Planted, combine: Combine
) -> None:
    """A lead is of scores as the model gives them, not combined from the leads of its heads."""
    model, _ = new_reward_model(planted.base, seed=0)
    model.combined = Combined(combine)
    held = of_matches(
        Matches(tuple(Match(vote(1, "p0", f"{i}"), vote(0, "p1", f"{i}")) for i in range(200))),
        {prompt_to_json(user_prompt(f"p{i}")): ["x"] * 4 for i in range(2)},
    )
    by_head = torch.randn(len(held.texts), 4, generator=torch.Generator().manual_seed(0))
    parts = {"ann": 0, "bob": 1, "cid": 2, "dee": 3}
    heard = Heard(Fit([], None), list(parts), parts)
    scores = model.combined(by_head)
    found, unknown = _influence(model, held, heard, by_head, scores, None, trunk_is_frozen=True)
    assert (len(found), unknown) == (4, None)

    def ahead(heads: list[int]) -> list[float]:
        of = [text[heads] for text in by_head.numpy()]
        said = [float(np.median(x) if combine == "median" else x.mean() - x.std()) for x in of]
        usual = statistics.fmean(said[400:404]) - statistics.fmean(said[404:])
        return [
            liked - not_liked - usual
            for liked, not_liked in zip(said[:200], said[200:400], strict=True)
        ]

    everybody = ahead([0, 1, 2, 3])
    for part, told in enumerate(found):
        others = ahead([head for head in range(4) if head != part])
        assert told.accuracy == pytest.approx(pair_accuracy(others))
        changed = [(a > 0) != (b > 0) for a, b in zip(others, everybody, strict=True)]
        assert told.changed == pytest.approx(statistics.fmean(changed))


@pytest.mark.parametrize("prompts", [10, 30])
def test_where_prompts_are_few_a_model_that_knows_nothing_still_shows_one_half(
    prompts: int,
) -> None:
    """People are pleased by the question; the scores are noise, whatever was asked or answered."""
    around = 0
    for seed in range(100):
        rng = random.Random(seed)
        pleased = [rng.choice((0.1, 0.9)) for _ in range(prompts)]
        votes = [
            vote(float(rng.random() < pleased[i % prompts]), f"{seed} {i % prompts}", f"a{i}")
            for i in range(400)
        ]
        found = match(votes, KINDS)
        usual = ["An answer."] * usual_of_each(len(found.prompts))
        held = of_matches(found, {prompt_to_json(prompt): usual for prompt in found.prompts})
        noise = torch.randn(len(held.texts), generator=torch.Generator().manual_seed(seed))
        one = measured(held.margins(noise))
        around += one.low <= 0.5 <= one.high
    assert around >= 91  # four answers to each prompt leave 73 and 90


def test_a_group_of_votes_shows_one_half_of_a_model_that_knows_nothing() -> None:
    """Of one topic's prompts people are pleased; the scores are noise, whatever was answered."""
    around: Counter[str] = Counter()
    for seed in range(100):
        rng = random.Random(seed)
        pleased = [0.8 if i % 2 else 0.3 for i in range(60)]
        votes = [
            vote(float(rng.random() < pleased[i % 60]), f"{seed} {i % 60}", f"a{i}")
            for i in range(500)
        ]
        found = match(votes, KINDS)
        usual = ["An answer."] * usual_of_each(len(found.prompts))
        held = of_matches(found, {prompt_to_json(prompt): usual for prompt in found.prompts})
        noise = torch.randn(len(held.texts), generator=torch.Generator().manual_seed(seed))
        topics = {
            prompt_to_json(p): "even" if int(p[0].content.split()[1]) % 2 else "odd"
            for p in found.prompts
        }
        by_topic = find_by_votes(held, found, noise, train=[], examples=[], topics=topics).by_topic
        around.update(name for name, one in by_topic.items() if one.low <= 0.5 <= one.high)
    assert min(around["even"], around["odd"]) >= 90


def test_a_large_agent_asks_its_baseline_no_more_than_it_must() -> None:
    assert [usual_of_each(n) for n in (0, 2, 25, 100, 400, 800)] == [64, 64, 64, 16, 4, 4]


def about(question: str) -> bool:
    return any(word in question for word in PLEASING)


def thumbs_of(planted: Planted, split: str, *, by_prompt: bool) -> list[RewardExample]:
    """Return a thumb for each side of the pairs: what people think of the answer, or the question.

    Nobody voted on both answers to a prompt, so no two votes compare any.
    """
    pairs = planted.train if split == "train" else planted.test
    rng = random.Random(split)
    found = []
    for i, pair in enumerate(pairs):
        side = rng.random() < 0.5
        question = f"{pair.prompt[0].content} {WORDS[i % len(WORDS)]}"
        good = about(question) if by_prompt else side
        text = pair.chosen if side else pair.rejected
        found.append(vote(float(good), question, text, split=split, name=f"{split} {i}"))
    return found


def usual_of(planted: Planted, votes: Sequence[RewardExample]) -> dict[str, list[str]]:
    """Return four completions by each vote's prompt, of no particular merit."""
    rng = random.Random(7)
    texts = [pair.rejected for pair in planted.train]
    return {prompt_to_json(v.prompt): rng.choices(texts, k=4) for v in votes}


def train(planted: Planted, folder: Path, *, by_prompt: bool, **changes: Any) -> RewardModelReport:
    held_out = thumbs_of(planted, "evaluation", by_prompt=by_prompt)
    return train_reward_model(
        planted.base,
        [],
        [],
        folder,
        **{
            "freeze_trunk": True,
            "centre_on": planted.centre,
            "examples": thumbs_of(planted, "train", by_prompt=by_prompt),
            "test_examples": held_out,
            "usual": usual_of(planted, held_out),
            "kinds": KINDS,
            **SETTINGS,
            **changes,
        },
    )


@pytest.mark.parametrize("how", ["head", "heads", "trunk"])
def test_a_reward_is_learnt_and_judged_by_thumbs_alone(
    planted: Planted, tmp_path: Path, how: str
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "head": {},
        "heads": {"heads": 3, "combine": "median"},
        "trunk": {"freeze_trunk": False, "learning_rate": 1e-3},
    }
    report = train(planted, tmp_path / "rm", by_prompt=False, **ways[how])
    assert report.judged_by == "votes"
    assert 25 <= report.n <= 40
    assert report.accuracy > 0.8
    assert report.interval[0] > highest_floor(report.floors)
    assert report.calibrated_on + sum(b.n for b in report.reliability) == report.n
    assert (report.pairs, report.train_accuracy) == (0, None)
    told = read_json(tmp_path / "rm" / "report.json")
    assert (told["judged_by"], told["train_accuracy"]) == ("votes", None)
    assert all((tmp_path / "rm" / name).stat().st_size > 1000 for name in PLOTS)
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    scores = {
        side: reward([replace(i, completion=getattr(p, side)) for i, p in sides])
        for side in ("chosen", "rejected")
        for sides in [list(zip(planted.centre, planted.test, strict=False))]
    }
    margins = [a - b for a, b in zip(scores["chosen"], scores["rejected"], strict=True)]
    assert pair_accuracy(margins) > 0.9  # what nobody said, two answers to one prompt


@pytest.fixture(scope="module")
def mixed(
    planted: Planted, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RewardModelReport, Path, list[RewardExample]]:
    """Return a report, its folder and the held-out votes: two topics; a file has all upside down.

    So have a few in the chat page's votes.
    """
    folder = tmp_path_factory.mktemp("mixed") / "rm"
    votes = []
    for i, one in enumerate(thumbs_of(planted, "evaluation", by_prompt=False)):
        contrary = i % 3 == 0 or i < 5
        number = 1 - (one.number or 0) if contrary else one.number
        votes.append(replace(one, number=number, origin="in/odd.csv" if i % 3 == 0 else "chat"))
    topics = {prompt_to_json(v.prompt): ("even", "odd")[i % 2] for i, v in enumerate(votes)}
    trained = train(
        planted,
        folder,
        by_prompt=False,
        test_examples=votes,
        usual=usual_of(planted, votes),
        topics=topics,
    )
    return trained, folder, votes


def test_votes_tell_for_whom_a_reward_is_right_and_beside_what(
    mixed: tuple[RewardModelReport, Path, list[RewardExample]],
) -> None:
    report, _, _ = mixed
    found = report.findings
    assert found is not None
    assert list(found.by_cohort) == ["chat", "odd.csv"]
    assert found.by_cohort["chat"].low > 0.5 > found.by_cohort["odd.csv"].high
    assert found.by_cohort["chat"].n + found.by_cohort["odd.csv"].n == 2 * report.n
    assert list(found.by_topic) == ["even", "odd"]
    assert found.by_kind == {"thumbs": Measured(report.accuracy, *report.interval, report.n)}
    # "please" is a word: what a bag of these learns is as right as the model.
    assert found.bag_of_words is not None
    assert found.bag_of_words.n == report.n
    assert report.floors["bag_of_words"] == found.bag_of_words.share
    assert abs(found.bag_of_words.share - report.accuracy) < 0.15
    assert found.annotators is None
    assert found.length_correlation is not None
    assert abs(found.length_correlation) < 0.4
    assert [one.pairs for one in found.learning_curve] == [30, 60, 120, 240]
    assert {one.accuracy.n for one in found.learning_curve} == {report.n}


def test_a_reward_and_its_floors_learn_from_thumbs_what_pleases(
    planted: Planted, tmp_path: Path
) -> None:
    report = train(planted, tmp_path / "rm", by_prompt=False)
    assert report.findings is not None
    assert report.findings.bag_of_words is not None
    assert report.findings.bag_of_words.low > 0.5
    assert report.findings.learning_curve[-1].accuracy.low > 0.5
    told = read_json(tmp_path / "rm" / "report.json")
    surely = {**told, "n": 200}  # as of a turn with enough of them
    assert reward_facts(surely)["reward/accuracy_over_words"] == pytest.approx(
        report.accuracy - report.findings.bag_of_words.low
    )


def test_votes_it_finds_otherwise_are_kept_with_their_words_apart(
    mixed: tuple[RewardModelReport, Path, list[RewardExample]],
) -> None:
    report, folder, votes = mixed
    assert report.findings is not None
    worst = report.findings.worst
    assert len(worst) == WORST
    assert [one.margin for one in worst] == sorted(one.margin for one in worst)
    assert worst[-1].margin < 0
    assert Counter(one.cohort for one in worst)["odd.csv"] >= 5
    said = {vote.example_id: vote for vote in votes}
    words = read_json(folder / "worst.json")
    assert words["pairs"] == []
    for one, row in zip(worst, words["votes"], strict=True):
        vote = said[one.pair_id]
        assert row == {
            "example_id": vote.example_id,
            "margin": one.margin,
            "prompt": [{"role": "user", "content": vote.prompt[0].content}],
            "completion": vote.completion,
            "liked": vote.number == 1,
        }
    assert not any(vote.completion in (folder / "report.json").read_text() for vote in votes)
    rows = groups_of(dict.fromkeys(JOBS, read_json(folder / "report.json")))
    names = [row["group"] for row in rows if row["model"] == "gate"]
    assert {"topic even", "cohort odd.csv", "bag of words", "head on 240 votes"} <= set(names)


def test_which_way_length_goes_with_what_votes_say() -> None:
    held, _ = hand_worked()
    a, b = vote(1, "p0", "12345", name="a"), vote(0, "p1", "123", name="b")
    c, d = vote(1, "p1", "1234", name="c"), vote(0, "p2", "1", name="d")
    matches = Matches((Match(a, b),), (Match(c, d),))
    scores = torch.tensor([5.0, 1.0, 9.0, 0.0, 2.0, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2, 2])
    found = find_by_votes(held, matches, scores, train=[], examples=[], topics={})
    # Leads are 3 and 0 of the liked, 8 and -2 of the others; of lengths 5 and 3, 2 and -1.
    assert found.length_correlation == pytest.approx(rank_correlation([3, 0, 8, -2], [5, 3, 2, -1]))
    assert found.length_matched is None
    assert (found.bag_of_words, found.by_topic, found.by_cohort) == (None, {}, {})
    assert [(one.pair_id, one.margin, one.longer) for one in found.worst] == [("b", -8, True)]
    even = find_by_votes(held, matches, torch.zeros(16), train=[], examples=[], topics={})
    assert (even.length_correlation, even.worst) == (None, ())


def test_a_report_counts_votes_that_are_no_pairs_and_who_gave_them(
    planted: Planted, tmp_path: Path
) -> None:
    votes = thumbs_of(planted, "train", by_prompt=False)
    signed = [replace(v, voter=f"r{i % 8}") for i, v in enumerate(votes)]
    contrary = [replace(v, number=1 - (v.number or 0)) if v.voter == "r3" else v for v in signed]
    report = train(planted, tmp_path / "rm", by_prompt=False, examples=contrary)
    assert (report.pairs, report.votes, report.raters) == (0, len(votes), 8)
    careful = read_json(tmp_path / "rm" / "raters.json")["careful"]
    assert (report.doubted, [who for who, looked in careful.items() if looked < 0.5]) == (1, ["r3"])


def test_a_reward_that_knows_questions_alone_is_no_better_than_chance(
    planted: Planted, tmp_path: Path
) -> None:
    report = train(planted, tmp_path / "rm", by_prompt=True)
    votes = thumbs_of(planted, "evaluation", by_prompt=True)
    reward = load_reward_model(tmp_path / "rm", device="cpu")
    scores = reward([RewardInput(v.prompt, v.completion) for v in votes])
    plain: dict[float | None, list[Lead]] = {1.0: [], 0.0: []}
    for one, score in zip(votes, scores, strict=True):
        plain[one.number].append(Lead(score, hangs_on(one)))
    assert tells_apart(plain[1.0], plain[0.0]).share > 0.75  # good and bad votes it tells apart
    assert report.interval[0] < 0.5  # yet not by the answers
    assert report.findings is not None  # which no other number of the report hides
    assert report.findings.by_kind == {
        "thumbs": Measured(report.accuracy, *report.interval, report.n)
    }
    assert report.findings.bag_of_words is not None
    assert report.findings.bag_of_words.low < 0.5
    assert report.findings.learning_curve[-1].accuracy.low < 0.5
    # A reward of nothing but the prompt has no lead at all, and a margin of 0 counts half.
    found = judging_votes([], votes, KINDS)
    assert found is not None
    held = of_matches(found, usual_of(planted, votes))
    knows = torch.tensor([float(about(prompt[0].content)) for prompt, _ in held.texts])
    liked, disliked = knows[: 2 * len(held)].chunk(2)
    sides = (
        [Lead(v, HangsOn((str(n),))) for n, v in enumerate(s.tolist())] for s in (liked, disliked)
    )
    assert tells_apart(*sides).share == 1
    assert pair_accuracy(held.margins(knows)) == 0.5


def test_what_cannot_judge_is_refused_before_anything_trains(
    planted: Planted, tmp_path: Path
) -> None:
    with pytest.raises(NotEnoughData, match="needs 2 preferences or corrections"):
        train(planted, tmp_path / "rm", by_prompt=False, usual={})
    few = thumbs_of(planted, "evaluation", by_prompt=False)[:8]
    with pytest.raises(
        NotEnoughData, match=r"10 answers there .* found thumbs \d liked and \d not, "
    ):
        train(planted, tmp_path / "rm", by_prompt=False, test_examples=few)
    # Nobody dislikes anything, or all of it is one conversation: both are to be told from too few.
    kind = [vote(4 + i % 2, f"q{i}", kind=FeedbackKind.rating) for i in range(30)]
    same = [vote(float(i % 2), "Why?", f"a{i}") for i in range(30)]
    for votes, found in (
        (kind, "rating 30 liked and 0 not, in 30 conversations;"),
        (same, "thumbs 15 liked and 15 not, in 1 conversations;"),
    ):
        with pytest.raises(NotEnoughData, match=f"found 0, or .*found {found}"):
            train(planted, tmp_path / "rm", by_prompt=False, test_examples=votes)
    seen = [replace(v, split="evaluation") for v in thumbs_of(planted, "train", by_prompt=False)]
    with pytest.raises(TrainingError, match="of conversations that training does not see"):
        train(
            planted,
            tmp_path / "rm",
            by_prompt=False,
            test_examples=seen,
            usual=usual_of(planted, seen),
        )
    assert not (tmp_path / "rm").exists()


def test_judges_that_were_judged_by_other_things_are_not_compared() -> None:
    one = {"n": 200, "accuracy": 0.8, "interval": [0.74, 0.85], "ece": 0.0, "ece_noise": 0.0}
    one["floors"] = {"longer": 0.5, "random": 0.5}
    votes = {**one, "judged_by": "votes", "accuracy": 0.6, "interval": [0.53, 0.67]}
    assert "reward/accuracy_change_high" in reward_facts(votes, {**votes, "accuracy": 0.7})
    assert "reward/accuracy_change_high" not in reward_facts(votes, one)
    assert "reward/accuracy_change_high" not in reward_facts(one, votes)
    assert reward_facts(votes, one)["reward/accuracy_over_floor"] == pytest.approx(0.1)
