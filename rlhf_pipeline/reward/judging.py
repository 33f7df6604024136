"""What judges a reward model in its training: pairs that people decided, or matched votes.

Either is twos of completions the first of which people find better (`HeldOut`). By which they are
differs what a head on the untrained trunk learns for the learning curve, what else is found, and
what the worst are in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.errors import NotEnoughData
from rlhf_pipeline.feedback.datasets import conversation_of, unit_interval
from rlhf_pipeline.records import PreferencePair, Progress, Prompt, RewardExample
from rlhf_pipeline.reward import FEWEST_JUDGED, FEWEST_MATCHED
from rlhf_pipeline.reward.fitting import all_features, encode_pairs
from rlhf_pipeline.reward.held_out import (
    CURVE_PAIRS,
    Disagreement,
    Findings,
    HeldOut,
    Learnt,
    find,
    is_good,
    learning_curve,
    of_pairs,
    some_of_each_kind,
    taught,
)
from rlhf_pipeline.reward.kinds import scales
from rlhf_pipeline.reward.matched import Matches, find_by_votes, of_matches, sides_of
from rlhf_pipeline.reward.model import (
    LIKELIHOODS,
    Limits,
    RewardModel,
    Row,
    encode_rows,
    score_rows,
)
from rlhf_pipeline.reward.tuning import EncodedPairs

Rows = Sequence[Row]
Curve = tuple[Learnt, ...]
Topics = Mapping[str, str]
"""What prompts, as JSON, were filed under."""


@dataclass(frozen=True)
class Reader:
    """A reward model, and how it reads."""

    model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    limits: Limits
    report: Progress

    def rows(self, texts: Sequence[tuple[Prompt, str]]) -> list[Row]:
        """Return the tokens of prompts and completions, in order."""
        return encode_rows(self.tokenizer, texts, self.limits)

    def features(self, rows: Rows) -> Tensor:
        """Return what the head reads of every row, (len(rows), features) float64 on the CPU."""
        return all_features(self.model, rows, self.report)


@dataclass(frozen=True)
class Lesson:
    """What a model learns from."""

    pairs: Sequence[PreferencePair]
    rows: EncodedPairs
    features: Tensor | None  # of all chosen and then all rejected completions, where known
    votes: Sequence[RewardExample]  # on single completions, all of them good or bad

    @property
    def decided(self) -> list[PreferencePair]:
        """Return the pairs without ties."""
        return [pair for pair in self.pairs if pair.decided]


class Judge(Protocol):
    """What a reward model is held against."""

    @property
    def held_out(self) -> HeldOut:
        """The twos, without tokens."""

    def rows(self, reader: Reader) -> list[Row]:
        """Return the tokens of the held-out texts, (T,)."""

    def curve(self, reader: Reader, lesson: Lesson, rows: Rows, seen: Tensor | None) -> Curve:
        """Return the learning curve of a head on the trunk as it is, by CURVE_PAIRS at most.

        `rows` are the held-out texts' (T,), `seen` (T, F) their features where these are known.
        Empty where there is nothing to learn from.
        """

    def find(self, reader: Reader, scores: Tensor, lesson: Lesson, curve: Curve) -> Findings:
        """Return what the trained model's scores (T,) of the held-out texts say."""

    def in_words(self, worst: Sequence[Disagreement]) -> dict[str, list[dict[str, object]]]:
        """Return those pairs or votes in words: what erasure goes through by their ids."""


@dataclass(frozen=True)
class ByPairs:
    """Held-out pairs judge; of held-out votes is told how well scores tell good from bad."""

    pairs: list[PreferencePair]  # without ties
    votes: list[RewardExample]
    held_out: HeldOut
    topics: Topics

    @classmethod
    def of(
        cls, pairs: Sequence[PreferencePair], votes: Sequence[RewardExample], topics: Topics
    ) -> ByPairs:
        """Return what judges of held-out pairs and votes."""
        decided = [pair for pair in pairs if pair.decided]
        return cls(decided, some_of_each_kind(votes), of_pairs(decided, *halves(decided)), topics)

    def rows(self, reader: Reader) -> list[Row]:
        encoded = encode_pairs(reader.tokenizer, self.pairs, reader.limits)
        return [*encoded.chosen, *encoded.rejected]

    def curve(self, reader: Reader, lesson: Lesson, rows: Rows, seen: Tensor | None) -> Curve:
        train, features = lesson.rows, lesson.features
        known = [i for i in range(len(train)) if train.targets[i] == 1]
        ids = [pair.pair_id for pair in lesson.pairs]
        chosen = sorted(known, key=lambda i: unit_interval("curve", ids[i]))[:CURVE_PAIRS]
        if not chosen:
            return ()
        if features is None:
            learnt = [side[i] for side in (train.chosen, train.rejected) for i in chosen]
            features = reader.features(learnt)
        else:
            features = features[[*chosen, *(len(train) + i for i in chosen)]]
        n = len(self.pairs)
        held = min(n, CURVE_PAIRS // 2)
        if seen is None:
            judged = reader.features([*rows[:held], *rows[n : n + held]])
        else:
            judged = torch.cat([seen[:held], seen[n : n + held]])
        scale = scales(features, LIKELIHOODS * reader.model.likelihood)
        told, unseen = features / scale, judged / scale
        ahead = told[: len(chosen)] - told[len(chosen) :]
        ones = torch.ones(len(ahead), dtype=torch.float64)
        return learning_curve(ahead, ones, unseen[:held] - unseen[held:], self.held_out.on[:held])

    def find(self, reader: Reader, scores: Tensor, lesson: Lesson, curve: Curve) -> Findings:
        said = reader.rows([(v.prompt, v.completion) for v in self.votes])
        return find(
            self.held_out,
            self.pairs,
            scores,
            train=lesson.decided,
            examples=self.votes,
            example_scores=score_rows(reader.model, said),
            topics=self.topics,
            curve=curve,
        )

    def in_words(self, worst: Sequence[Disagreement]) -> dict[str, list[dict[str, object]]]:
        by_id = {pair.pair_id: pair for pair in self.pairs}
        told: list[dict[str, object]] = [
            {
                "pair_id": one.pair_id,
                **_about(one, by_id[one.pair_id].prompt),
                "people preferred": by_id[one.pair_id].chosen,
                "the model prefers": by_id[one.pair_id].rejected,
            }
            for one in worst
        ]
        return {"pairs": told, "votes": []}


@dataclass(frozen=True)
class ByVotes:
    """Held-out votes on single answers judge, two by two.

    How well scores tell good votes from bad ones is not told here: a score that knows questions
    alone does.
    """

    matches: Matches
    held_out: HeldOut
    topics: Topics

    @classmethod
    def of(cls, matches: Matches, usual: Mapping[str, Sequence[str]], topics: Topics) -> ByVotes:
        """Return what judges of matched votes, with the baseline's answers to their prompts."""
        return cls(matches, of_matches(matches, usual), topics)

    def rows(self, reader: Reader) -> list[Row]:
        return reader.rows(self.held_out.texts)

    def curve(self, reader: Reader, lesson: Lesson, rows: Rows, seen: Tensor | None) -> Curve:
        chosen = sorted(lesson.votes, key=lambda v: unit_interval("curve", v.example_id))
        chosen = chosen[:CURVE_PAIRS]
        if not chosen:
            return ()
        said = reader.rows([(vote.prompt, vote.completion) for vote in chosen])
        features = reader.features(said)
        if seen is None:
            seen = reader.features(rows)
        scale = scales(features, LIKELIHOODS * reader.model.likelihood)
        none = features[:0]
        told, targets = taught(none, (features - features.mean(0)) / scale, chosen)
        ahead = torch.nn.functional.pad(self.held_out.ahead(seen / scale), (0, 1))
        return learning_curve(told, targets, ahead, self.held_out.on)

    def find(self, reader: Reader, scores: Tensor, lesson: Lesson, curve: Curve) -> Findings:
        return find_by_votes(
            self.held_out,
            self.matches,
            scores,
            train=lesson.decided,
            examples=lesson.votes,
            topics=self.topics,
            curve=curve,
        )

    def in_words(self, worst: Sequence[Disagreement]) -> dict[str, list[dict[str, object]]]:
        by_id = {vote.example_id: vote for vote in self.matches.votes}
        told: list[dict[str, object]] = [
            {
                "example_id": one.pair_id,
                **_about(one, by_id[one.pair_id].prompt),
                "completion": by_id[one.pair_id].completion,
                "liked": bool(is_good(by_id[one.pair_id])),
            }
            for one in worst
        ]
        return {"pairs": [], "votes": told}


def _about(one: Disagreement, prompt: Prompt) -> dict[str, object]:
    return {"margin": one.margin, "prompt": [asdict(message) for message in prompt]}


def check_judge(
    test_pairs: Sequence[PreferencePair],
    matches: Matches | None,
    test_examples: Sequence[RewardExample],
    kinds: Collection[str],
) -> None:
    """Raise NotEnoughData unless `matches`, or else test_pairs, can judge a reward model.

    The message tells what votes of `kinds` there are among test_examples.
    """
    if matches is not None:
        return
    decided = sum(pair.decided for pair in test_pairs)
    if decided < FEWEST_JUDGED:
        raise NotEnoughData(
            f"judging a reward model needs {FEWEST_JUDGED} preferences or corrections on "
            f"held-out prompts (a tie is none), found {decided}, or {FEWEST_MATCHED} answers there "
            "that people liked beside as many they did not (a rating of 3 is neither), by votes of "
            "one kind in reward.kinds and in several conversations, found "
            f"{sides_of(test_examples, kinds)}; collect more (the review page asks people for "
            "preferences), or raise feedback.evaluation_share"
        )


def halves(pairs: Sequence[PreferencePair]) -> tuple[list[int], list[int]]:
    """Return two halves of the pairs' numbers that share no conversation, where there are two."""
    digests = [conversation_of(pair.prompt) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (digests[i], i))
    middle = len(order) // 2
    cuts = [i for i in range(1, len(order)) if digests[order[i]] != digests[order[i - 1]]]
    cut = min(cuts, key=lambda i: abs(i - middle), default=middle)
    return order[:cut], order[cut:]
