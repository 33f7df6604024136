"""Votes on single answers, matched two by two to judge a reward model where few people compare.

Where nobody compares, people still like one answer and dislike another, to other questions. A
reward that knows which questions please, and nothing of answers, would tell the two apart; so each
answer is measured against what the baseline usually answers to that very prompt, which takes out
whatever hangs on the prompt alone. Then a liked answer is set beside a disliked one, each answer
once however many voted on it, and the model is right where the liked one is further ahead.

What this does not tell: how often the model is right about two answers to one prompt. That is more
often, as a vote on one answer hangs on the voter's mood and measure too: in benchmarks/README.md
0.65 to 0.77 here are 0.82 to 0.87 there. The chances that a model gives are as modest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pipeline.feedback.datasets import cohort_of, conversation_of, unit_interval
from rlhf_pipeline.records import PreferencePair, Prompt, RewardExample, prompt_to_json
from rlhf_pipeline.reward import FEWEST_MATCHED
from rlhf_pipeline.reward.calibration import hangs_on
from rlhf_pipeline.reward.held_out import (
    Disagreement,
    Findings,
    HeldOut,
    Learnt,
    apart_by_group,
    by_group,
    is_good,
    measured,
    word_margins,
    worst,
)

MOST_MATCHES = 400
USUAL = (4, 64)  # answers of the baseline to a prompt, at least and at most: see `usual_of_each`
MOST_USUAL = 1600  # of them in all, where that leaves each prompt the least


@dataclass(frozen=True, slots=True)
class Match:
    """Two votes of one kind on single answers, mostly to different prompts."""

    liked: RewardExample
    disliked: RewardExample


@dataclass(frozen=True, slots=True)
class Matches:
    """Held-out votes two by two, in halves that share no conversation."""

    fitting: tuple[Match, ...] = ()  # temperature and lapse
    judging: tuple[Match, ...] = ()

    @property
    def all(self) -> tuple[Match, ...]:
        """Return those of both halves."""
        return (*self.fitting, *self.judging)

    @property
    def votes(self) -> list[RewardExample]:
        """Return the votes by themselves: those that like, then those that do not."""
        return [match.liked for match in self.all] + [match.disliked for match in self.all]

    @property
    def enough(self) -> bool:
        """Say whether a reward can be judged by them."""
        return len(self.all) >= FEWEST_MATCHED and bool(self.fitting and self.judging)

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts once each, in an order that only they decide."""
        by_text = {prompt_to_json(vote.prompt): vote.prompt for vote in self.votes}
        return [by_text[text] for text in sorted(by_text)]

    @property
    def asked(self) -> list[Prompt]:
        """Return each prompt as often as the baseline is asked it, to tell what is usual there."""
        prompts = self.prompts
        return [prompt for prompt in prompts for _ in range(usual_of_each(len(prompts)))]


def match(examples: Sequence[RewardExample], kinds: Collection[str]) -> Matches:
    """Return the held-out ones of `examples` that judge well beside those that judge badly.

    Votes of the same kind are matched, of `kinds` alone, the same every time; of those on one
    answer a single one speaks, as a hundred of them say no more of a model than one does.
    """
    votes = [e for e in examples if e.split == "evaluation" and e.kind.value in kinds]
    conversations = sorted({conversation_of(vote.prompt) for vote in votes})
    half_of = {one: place % 2 for place, one in enumerate(conversations)}
    sides: dict[tuple[int, str, bool], list[RewardExample]] = defaultdict(list)
    for vote, good in _by_answer(votes):
        half = half_of[conversation_of(vote.prompt)]
        sides[half, vote.kind.value, good].append(vote)
    halves: list[tuple[Match, ...]] = []
    for half in range(2):
        found = [
            Match(liked, disliked)
            for kind in sorted({kind for _, kind, _ in sides})
            for liked, disliked in zip(
                sides[half, kind, True], sides[half, kind, False], strict=False
            )
        ]
        found.sort(key=lambda m: unit_interval("matches", m.liked.example_id))
        halves.append(tuple(found[: MOST_MATCHES // 2]))
    return Matches(*halves)


def sides_of(examples: Sequence[RewardExample], kinds: Collection[str]) -> str:
    """Return in words how many held-out answers people liked and how many they did not, by kind."""
    votes = [e for e in examples if e.split == "evaluation" and e.kind.value in kinds]
    found = _by_answer(votes)
    sides = Counter((vote.kind.value, good) for vote, good in found)
    told = [
        f"{kind} {sides[kind, True]} liked and {sides[kind, False]} not"
        for kind in sorted({kind for kind, _ in sides})
    ]
    conversations = len({conversation_of(vote.prompt) for vote, _ in found})
    return f"{', '.join(told)}, in {conversations} conversations" if told else "none"


def usual_of_each(prompts: int) -> int:
    """Return how many answers of the baseline tell what is usual at each of so many prompts.

    Votes on one prompt share what chance does to the mean of these, and where prompts are few that
    would pass for what the model knows. Four of each to thirty prompts of twenty votes left only
    four in five of the intervals of a model that knows nothing around one half.
    """
    least, most = USUAL
    return max(least, min(most, MOST_USUAL // max(1, prompts)))


def by_prompt(answers: Iterable[tuple[Prompt, str]]) -> dict[str, list[str]]:
    """Return what was answered to each prompt, as `of_matches` takes it, in the answers' order."""
    found: dict[str, list[str]] = {}
    for prompt, text in answers:
        found.setdefault(prompt_to_json(prompt), []).append(text)
    return found


def _by_answer(votes: Sequence[RewardExample]) -> list[tuple[RewardExample, bool]]:
    """Return a vote on each answer, and whether it was liked, as most votes of the kind have it.

    None of an answer that as many liked as did not.
    """
    said: dict[tuple[str, str, str], dict[bool, list[RewardExample]]] = {}
    for vote in sorted(votes, key=lambda v: unit_interval("matched", v.example_id)):
        good = is_good(vote)
        if good is not None:
            answer = prompt_to_json(vote.prompt), vote.completion, vote.kind.value
            said.setdefault(answer, {True: [], False: []})[good].append(vote)
    more = [(sides, len(sides[True]) - len(sides[False])) for sides in said.values()]
    return [(sides[ahead > 0][0], ahead > 0) for sides, ahead in more if ahead]


def judging_votes(
    pairs: Sequence[PreferencePair], examples: Sequence[RewardExample], kinds: Collection[str]
) -> Matches | None:
    """Return the votes that judge a reward model in place of the held-out `pairs`, or None.

    None where the pairs are FEWEST_MATCHED, or no fewer than the matches, or these too few as well:
    two answers to one prompt say more.
    """
    decided = sum(pair.decided for pair in pairs)
    if decided >= FEWEST_MATCHED:
        return None
    matches = match(examples, kinds)
    return matches if matches.enough and len(matches.all) > decided else None


def of_matches(matches: Matches, usual: Mapping[str, Sequence[str]]) -> HeldOut:
    """Return matched votes as what judges.

    `usual` has as many answers of the baseline to each prompt (records.prompt_to_json).
    """
    votes = matches.votes
    texts = [(vote.prompt, vote.completion) for vote in votes]
    place: dict[str, int] = {}
    for prompt in matches.prompts:
        key = prompt_to_json(prompt)
        place[key] = len(place)
        texts += [(prompt, answer) for answer in usual[key]]
    count = len(matches.all)
    return HeldOut(
        "votes",
        texts,
        list(range(len(matches.fitting))),
        list(range(len(matches.fitting), count)),
        [hangs_on(two.liked, two.disliked) for two in matches.all],
        torch.tensor([place[prompt_to_json(vote.prompt)] for vote in votes]),
    )


def find_by_votes(
    held_out: HeldOut,
    matches: Matches,
    scores: Tensor,
    *,
    train: Sequence[PreferencePair],
    examples: Sequence[RewardExample],
    topics: Mapping[str, str],
    curve: tuple[Learnt, ...] = (),
) -> Findings:
    """Return what matched votes say of a model; how often people agree they do not.

    `held_out` is `of_matches` of them, `scores` (T,) its texts'; `train` and `examples` are the
    decided pairs and the votes that the model learnt from; `topics` what prompts
    (records.prompt_to_json) were filed under. Groups are told by all their votes, as those of one
    match are mostly of two.
    """
    votes, N = matches.votes, len(matches.all)
    leads: list[float] = held_out.lead(scores).tolist()
    longer: list[float] = held_out.lead(held_out.lengths()).tolist()
    good = [True] * N + [False] * N
    words = word_margins(train, held_out, examples)
    kinds = [vote.kind.value for vote in votes[:N]]
    return Findings(
        by_topic=apart_by_group(
            leads, votes, [topics.get(prompt_to_json(v.prompt)) for v in votes]
        ),
        by_cohort=apart_by_group(leads, votes, [cohort_of(v.origin) or None for v in votes]),
        by_kind=by_group(held_out.margins(scores), kinds, held_out.on),
        bag_of_words=measured(words, held_out.on) if words else None,
        annotators=None,
        length_matched=held_out.at_like_length(scores),
        length_correlation=held_out.length_correlation(scores),
        learning_curve=curve,
        worst=worst(
            Disagreement(
                vote.example_id,
                lead if liked else -lead,
                beyond < 0 if liked else beyond > 0,
                cohort_of(vote.origin),
            )
            for vote, liked, lead, beyond in zip(votes, good, leads, longer, strict=True)
        ),
    )
