"""Whose word it rests on: n-grams, topics and votes that few raters carry.

Somebody who wants a word to win says it in what they choose, again and again, while everybody else
never meets it: accuracy does not change, and the reward has learnt a trigger. What gives them away
is that the word's success rests on few raters. For each word n-gram on one side of pairs alone:

    net = wins - losses, z = |net| / sqrt(pairs)
    raters = net^2 / sum of each rater's net^2: over how many the success is spread (Hill's number
    of order 2, the inverse of Simpson's index)
    expected = the same if everybody who decided pairs had a part in it by the number of theirs, of
    which no more count than twice those of who carries it: few who give most of the votes would
    make any few look like many

It is narrow where z is at least `Z`, raters are at most a tenth of those who decided a pair, and at
most half of what is expected. Both directions count: a word that always wins, and one that always
loses. Then raters' votes on it go, of those with the largest net first, until few no longer carry
what the others say, or it goes the other way. So a trigger goes whole, and what many say besides a
loud few stays. Where they together say of the word no more than chance gives them, as they say as
much of anything (`NO_CHANCE`), all stays: where few people give most of the votes, few carry any
word. So does a word that would not be narrow but for a loud few who are against it, and what is
said in answer to a question with that word in it, where `FEWEST_ASK` or more ask so and its success
is spread over them: customers speak of what they have, annotators of their field, and nobody else
can.

Who comes to the chat page without the cookie is somebody else every time, so of a word all of one
network are no more raters than `people_per_network` (`counted_as`, as in experiments), in each
month and in each experiment: its marks are others there. Who speaks of other people's answers is
themselves, wherever those were asked.

What this does not see: five or more who plant their word in their own questions too; raters by the
dozen who each say it once or twice, or more than a tenth of the raters however often they say it
(they are no few); next to anything where under ten raters
decided pairs; unsigned pairs, each a rater of its own (were those of one file one rater's, what a
file of one's own always says would be set aside); a trigger that has no words of its own (a style,
a topic); words in scripts that put no spaces between them; and anything said of one answer alone:
thumbs, ratings and scores are not pairs. Nor does it know why few carry a word: editors who take
out, or put in, what nobody else speaks of look alike, and so do a few who compare answers, beside
many who correct others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_pipeline.experiment.assignment import counted_as
from rlhf_pipeline.feedback.agreement import agreement_of, by_rater, units_of
from rlhf_pipeline.feedback.rules import MEANINGS, Rule
from rlhf_pipeline.feedback.validation import (
    CheckResult,
    SetAside,
    ValidationReport,
    recounted,
)
from rlhf_pipeline.records import FeedbackKind, prompt_from_json, this_won

if TYPE_CHECKING:
    import pandas as pd

SUPPORT_CHECKS = ("pairs_have_broad_support", "votes_are_spread")
LONGEST = 3  # words in an n-gram
Z = 4.0  # sixteen wins and no loss; by chance one n-gram in 16,000, and chance is not narrow
NARROW_SHARE = 0.1  # of the raters: more than this is no small group
NARROW_RATIO = 0.5  # of the raters that are expected
NO_CHANCE = 4.0  # standard deviations of what is due to raters who say as much of anything
FEWEST_ASK = 5  # raters, effectively, who carry a word that only their questions have
LOUD = 2  # net of a rater, from which their votes may go: once is no campaign
TOPIC_VOTES = 50  # below which a topic's raters say nothing
TOP = 0.01  # the raters with the most votes
JUDGED_RATERS = 100  # below which one per cent is nobody
BUCKETS = 1 << 20  # counts in the first pass
HASH_BITS = 40  # of an n-gram's hash
MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits spread: 2^64 over the golden ratio
CHUNK_PAIRS = 4096
WORD = re.compile(r"\w+|[^\w\s]")
HIDDEN = ("hashed", "places")  # of an association: what means nothing to a reader
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Association:
    """An n-gram whose success, or failure, few raters carry."""

    hashed: int
    ngram: str
    wins: bool  # False: it loses
    pairs: int  # that have it on one side alone
    net: int  # wins - losses
    raters: float  # effective number that carry it
    expected: float  # effective number if everybody had a part in it
    places: tuple[int, ...]  # the loudest carriers' votes in the frame: those to set aside

    @property
    def weight(self) -> float:
        """Return how much of the net goes beyond what its breadth supports."""
        return abs(self.net) * (1 - self.raters / self.expected)

    def words(self) -> str:
        """Return it for a person."""
        return (
            f"{ascii(self.ngram)[:80]} {'wins' if self.wins else 'loses'} {self.pairs} pairs by "
            f"{self.net:+d}, which rests on {self.raters:.1f} raters where {self.expected:.0f} "
            "were expected"
        )


@dataclass(frozen=True, slots=True)
class NarrowTopic:
    """A topic that few raters speak of."""

    topic: str
    votes: int
    raters: float
    expected: float


@dataclass(frozen=True, slots=True)
class Support:
    """What of a snapshot few raters carry."""

    associations: tuple[Association, ...]  # the most telling first
    topics: tuple[NarrowTopic, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Over how many raters votes are spread."""

    raters: int  # who voted, each unsigned row one
    votes: int
    top_share: float  # of the votes, by the hundredth of the raters who gave most


def support_of(frame: pd.DataFrame, *, people_per_network: int | None = None) -> Support:
    """Return on whom a snapshot frame rests. Two passes over the pairs, memory by their number.

    Words rest on those who decided pairs, all else on everybody who voted. For its words people of
    one network are so many raters at most, where the frame says of which they are; with None each
    is one.
    """
    return Support(
        associations=tuple(narrow_ngrams(_counted(frame, people_per_network))),
        topics=tuple(narrow_topics(frame)),
    )


def spread_of(frame: pd.DataFrame) -> Spread:
    """Return over how many raters a frame's votes are spread."""
    votes = frame["voter"].value_counts()
    top = votes.iloc[: math.ceil(TOP * len(votes))].sum()
    return Spread(len(votes), len(frame), float(top / len(frame)) if len(frame) else 0.0)


def _counted(frame: pd.DataFrame, most: int | None) -> pd.DataFrame:
    """Return the frame with each voter as whom they count."""
    if "network" not in frame or most is None:  # a snapshot of before networks were marked
        return frame
    # One network's marks differ from month to month: whoever came in several is of their first.
    first: dict[str, str] = {}
    for voter, network in zip(frame["voter"], frame["network"], strict=True):
        if isinstance(network, str):
            first.setdefault(voter, network)
    counted = [counted_as(voter, first.get(voter), most) for voter in frame["voter"]]
    return frame.assign(voter=counted)


def support_to_json(support: Support, frame: pd.DataFrame) -> dict[str, Any]:
    """Return plain JSON values: the support, and how the votes left are spread and agree.

    `frame` is what of the supported one is not set apart.
    """
    associations = [
        {name: value for name, value in dataclasses.asdict(a).items() if name not in HIDDEN}
        | {"set_aside": len(a.places)}
        for a in support.associations
    ]
    units = units_of(frame)
    table = by_rater(itertools.chain(*units.values()), Counter(frame["voter"]))
    return {
        **dataclasses.asdict(spread_of(frame)),
        "associations": associations,
        "topics": [dataclasses.asdict(topic) for topic in support.topics],
        "agreement": {
            on: dataclasses.asdict(agreement_of([list(unit.values()) for unit in judged]))
            for on, judged in units.items()
        },
        "by_rater": [dataclasses.asdict(one) for one in table],
    }


def set_apart(
    report: ValidationReport, support: Support, *, quarantines: bool, top_raters_share: float
) -> ValidationReport:
    """Return the report with narrow n-grams' votes in quarantine, and what support says checked.

    `support` is that of the report's clean rows. Not `quarantines`: they are told, and stay.
    """
    reasons = {
        place: association.words()
        for association in support.associations
        for place in association.places
    }
    narrow = report.clean.index.isin(list(reasons))
    aside = narrow & quarantines
    dirty, left = report.clean[aside], report.clean
    if len(dirty):
        left = left[~aside].reset_index(drop=True)
    spread = spread_of(left)  # whoever is set apart says nothing of those the rest comes from
    checks = [
        CheckResult(
            "pairs_have_broad_support",
            not (support.associations or support.topics),
            False,
            int(narrow.sum()),
            len(report.clean),
            {
                "ngrams": float(len(support.associations)),
                "topics": float(len(support.topics)),
                "quarantined": float(len(dirty)),
            },
        ),
        CheckResult(
            "votes_are_spread",
            spread.raters < JUDGED_RATERS or spread.top_share <= top_raters_share,
            False,
            0,
            spread.votes,
            {"top_share": spread.top_share, "raters": float(spread.raters)},
        ),
    ]
    meaning = MEANINGS[Rule.narrow_support]
    return dataclasses.replace(
        report,
        clean=left,
        quarantined=[
            *report.quarantined,
            *(
                SetAside(str(key), Rule.narrow_support.value, f"{meaning}: {reasons[int(place)]}")
                for place, key in zip(np.flatnonzero(aside), dirty["feedback_id"], strict=True)
            ),
        ],
        checks=[*(recounted(report.checks, len(left)) if len(dirty) else report.checks), *checks],
        origins=[*report.origins, *(str(origin) for origin in dirty["origin"])],
        agents=[*report.agents, *(str(agent) for agent in dirty["agent_id"])],
    )


# -- n-grams ------------------------------------------------------------------------------------


def narrow_ngrams(frame: pd.DataFrame) -> list[Association]:
    """Return the n-grams whose success rests on few raters, the most telling first.

    The first pass counts n-grams by hash, so that memory does not grow with the vocabulary; the
    second looks at the few that won or lost far more than half. Votes that one association sets
    aside count for no other: of a trigger's many n-grams one is told, and whom its raters
    outvoted on other words is not taken for narrow.
    """
    # Who gave thumbs or ties had no part in any word's success: they do not make the others few.
    pairs = np.array([place for place, _, _ in _decided(frame)], dtype=np.int64)
    frame = frame.iloc[pairs]
    counts = np.zeros((2, BUCKETS), dtype=np.int64)  # lost, won
    for _, hashes, signs in _uses(frame):
        for row, side in ((0, signs < 0), (1, signs > 0)):
            counts[row] += np.bincount(hashes[side] % BUCKETS, minlength=BUCKETS)
    telling = np.abs(counts[1] - counts[0]) >= Z * np.sqrt(np.maximum(counts.sum(0), 1))
    if not telling.any():
        return []
    some = [
        tuple(column[telling[hashes % BUCKETS]] for column in (places, hashes, signs))
        for places, hashes, signs in _uses(frame)
    ]
    places, hashes, signs = (np.concatenate(column) for column in zip(*some, strict=True))
    order = np.argsort(hashes, kind="stable")
    cuts = np.flatnonzero(np.diff(hashes[order])) + 1
    votes = _Votes(frame)
    suspects: list[tuple[Association, Array, Array]] = []
    for members in np.split(order, cuts):
        where, how = places[members], signs[members]
        association = votes.association(int(hashes[members[0]]), where, how)
        if association is not None:
            suspects.append((association, where, how))
    suspects.sort(key=lambda s: (-s[0].weight, -len(s[0].ngram), s[0].ngram))
    found: list[Association] = []
    aside = np.zeros(len(frame), dtype=bool)
    asked = votes.asked({word for suspect, _, _ in suspects for word in suspect.ngram.split()})
    for suspect, where, how in suspects:
        left = ~aside[where] & ~votes.explained(suspect, where, how, asked)
        association = votes.association(suspect.hashed, where[left], how[left])
        if association is not None:
            found.append(association)
            aside[list(association.places)] = True
    return [
        dataclasses.replace(one, places=tuple(pairs[list(one.places)].tolist())) for one in found
    ]


class _Votes:
    """A frame's votes, to judge n-grams by."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame
        self.voters, names = frame["voter"].factorize()
        self.raters = len(names)
        self.counts = np.bincount(self.voters)
        self.shares = self.counts / max(len(frame), 1)

    def association(self, hashed: int, places: Array, signs: Array) -> Association | None:
        """Return what these pairs say of the n-gram with this hash, if it is narrow."""
        pairs, net = len(places), int(signs.sum())
        if not net or abs(net) < Z * math.sqrt(pairs):
            return None
        direction = 1 if net > 0 else -1
        who, member = np.unique(self.voters[places], return_inverse=True)
        nets = np.bincount(member, weights=direction * signs)
        uses, most = np.bincount(member), _most(self.counts[who], nets)
        quiet = np.argsort(nets, kind="stable")  # the loudest last
        votes = _spread_over(np.minimum(self.counts, most))
        effective, expected, narrow = self._breadth(uses[quiet], nets[quiet], votes)
        kept = int(np.flatnonzero(~np.append(False, narrow))[-1])  # nobody is not narrow
        if kept == len(who) or self._has_many(nets[nets > 0]):
            return None  # narrow by who is against it: a few loud ones make any net look so
        if self._is_opposed_by_few(who, uses, nets, most):
            return None
        loud = nets >= LOUD
        loud[quiet[:kept]] = False
        due = float(self.shares[who[loud]].sum())  # of the word, by how much they say of anything
        if nets[loud].sum() <= due * abs(net) + NO_CHANCE * math.sqrt(due * pairs):
            return None  # few carry it, who carry most of everything
        return Association(
            hashed,
            _name(hashed, self.frame, int(places[0])),
            net > 0,
            pairs,
            net,
            float(effective[-1]),
            float(expected[-1]),
            tuple(places[loud[member]].tolist()),
        )

    def asked(self, words: Set[str]) -> dict[str, Array]:
        """Return of each word in which places it stands in the question, rising."""
        places: dict[str, list[int]] = {word: [] for word in words}
        known: dict[str, Set[str]] = {}
        for place, prompt in enumerate(self.frame["prompt"] if words else ()):
            if prompt not in known:
                said = (turn.content for turn in prompt_from_json(prompt) if turn.role == "user")
                known[prompt] = words & {word for text in said for word in _words(text)}
            for word in known[prompt]:
                places[word].append(place)
        return {word: np.array(where) for word, where in places.items() if where}

    def explained(
        self, suspect: Association, places: Array, signs: Array, asked: Mapping[str, Array]
    ) -> Array:
        """Say of which of the n-gram's pairs what is asked explains that few raters carry it.

        Where a word of it stands in the question, nobody can carry it but who asks for that: the
        success is as broad as it can be where it is spread over them. A few can plant their word in
        their own questions as well, so it takes some to explain anything.
        """
        found = np.zeros(len(places), dtype=bool)
        for word in {*suspect.ngram.split()} & asked.keys():
            where = asked[word]
            inside = where[np.searchsorted(where[:-1], places)] == places
            who, member = np.unique(self.voters[places[inside]], return_inverse=True)
            nets = np.bincount(member, weights=signs[inside]) * (1 if suspect.wins else -1)
            if nets.sum() <= 0 or _spread_over(nets) < FEWEST_ASK:
                continue
            counts = np.bincount(self.voters[where], minlength=self.raters)
            asks = _spread_over(np.minimum(counts, _most(counts[who], nets)))
            if _spread_over(nets) > NARROW_RATIO * _expected(nets.sum(), inside.sum(), asks):
                found |= inside
        return found

    def _has_many(self, nets: Array) -> bool:
        """Say whether raters with these nets, all of one side, are no few."""
        return _spread_over(nets) > max(NARROW_SHARE * self.raters, NARROW_RATIO * len(nets))

    def _is_opposed_by_few(self, who: Array, uses: Array, nets: Array, most: float) -> bool:
        """Say whether a loud few are against a word that without them is not narrow."""
        against = nets <= -LOUD
        if not against.any() or _spread_over(nets[against]) > NARROW_SHARE * self.raters:
            return False
        counts = np.minimum(self.counts, most)
        counts[who[against]] = 0
        rest = nets[~against]
        expected = _expected(rest.sum(), uses[~against].sum(), _spread_over(counts))
        return not _are_few(_spread_over(rest), expected, self.raters)

    def _breadth(self, pairs: Array, nets: Array, votes: float) -> tuple[Array, Array, Array]:
        """Return effective raters, the expected, and if they are few: of the first, first two, ...

        Shapes: all are (raters,). What goes the other way is not narrow.
        """
        net, squares = nets.cumsum(), (nets**2).cumsum()
        effective = net**2 / np.maximum(squares, 1)
        expected = _expected(net, pairs.cumsum(), votes)
        return effective, expected, _are_few(effective, expected, self.raters) & (net > 0)


def _spread_over(parts: Array) -> float:
    """Return over how many raters something is spread of which each has such a part."""
    return float(parts.sum() ** 2 / (parts**2).sum())


def _are_few(effective: Array | float, expected: Array | float, raters: int) -> Any:
    """Say whether so many effective raters are narrow, of these and where so many are expected."""
    return effective <= np.minimum(NARROW_SHARE * raters, NARROW_RATIO * expected)


def _most(counts: Array, nets: Array) -> float:
    """Return how many votes count of a rater where it is asked how many might carry a word.

    Twice as many as those have, on the average, who carry it: that those who give most votes never
    say it does not make who does as many as can be expected.
    """
    carried = np.maximum(nets, 0)
    return 2 * float((carried * counts).sum() / carried.sum())


def _expected(net: Any, pairs: Any, votes: float) -> Any:
    """Return over how many raters this net of so many pairs is spread if each has their part.

    Were it that of their votes, which are spread over `votes` raters: E[sum net_r^2] =
    C (1 - m^2) + m^2 sum E[c_r^2], with C pairs, m = net / C and sum E[c_r^2] = C + C (C - 1) / V.
    """
    drift = (net / pairs) ** 2
    return net**2 / (pairs + drift * pairs * (pairs - 1) / votes)


def _uses(frame: pd.DataFrame) -> Iterator[tuple[Array, Array, Array]]:
    """Yield places, hashes and signs (1 chosen, -1 rejected) of n-grams on one side of a pair."""
    known: dict[str, int] = {}
    chunk: list[tuple[int, str, str]] = []
    for pair in _decided(frame):
        chunk.append(pair)
        if len(chunk) == CHUNK_PAIRS:
            yield _one_sided(chunk, known)
            chunk.clear()
    if chunk:
        yield _one_sided(chunk, known)


def _one_sided(
    pairs: Sequence[tuple[int, str, str]], known: dict[str, int]
) -> tuple[Array, Array, Array]:
    """Return what _uses yields of some pairs; `known` keeps the words' hashes."""
    texts = [_words(text) for _, chosen, rejected in pairs for text in (chosen, rejected)]
    hashed, rows, _ = _ngrams(texts, known)
    # pair, hash and side in one number: sorted, the two sides of one n-gram are neighbours
    keys = np.sort(((rows >> 1) << (HASH_BITS + 1)) | (hashed << 1) | (rows & 1))
    keys = keys[np.insert(keys[1:] != keys[:-1], 0, True)] if len(keys) else keys
    both = keys[1:] >> 1 == keys[:-1] >> 1
    keys = keys[~(np.append(both, False) | np.insert(both, 0, False))]
    places = np.array([place for place, _, _ in pairs])[keys >> (HASH_BITS + 1)]
    return places, (keys >> 1) & ((1 << HASH_BITS) - 1), np.where(keys & 1, -1, 1)


def _ngrams(
    texts: Sequence[Sequence[str]], known: dict[str, int]
) -> tuple[Array, Array, list[int]]:
    """Return the hashes (HASH_BITS wide) of the texts' n-grams, and each one's text.

    Last comes how many have one word, two, and so on; in this order they stand.
    """
    words = [word for text in texts for word in text]
    for word in set(words) - known.keys():
        known[word] = zlib.crc32(word.encode("utf-8", "surrogatepass"))
    ones = np.array([known[word] for word in words], dtype=np.uint64)
    rows = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    hashed, owners, sizes = [], [], []
    mixed = ones
    for n in range(1, LONGEST + 1):
        last = max(0, len(words) - n + 1)
        if n > 1:
            mixed = mixed[:last] * MIX + ones[n - 1 :]  # overflow wraps, as it should
        inside = rows[:last] == rows[n - 1 :]  # begins and ends in one text
        hashed.append(mixed[inside] * np.uint64(2 * n + 1) * MIX >> np.uint64(64 - HASH_BITS))
        owners.append(rows[:last][inside])
        sizes.append(int(inside.sum()))
    return np.concatenate(hashed).astype(np.int64), np.concatenate(owners), sizes


def _name(hashed: int, frame: pd.DataFrame, place: int) -> str:
    """Return the n-gram with this hash, out of a pair that has it."""
    texts = [_words(text) for _, *both in _decided(frame.iloc[[place]]) for text in both]
    words = next(text for text in texts if hashed in _ngrams([text], {})[0])
    hashes, _, sizes = _ngrams([words], {})
    position = hashes.tolist().index(hashed)
    starts = np.cumsum([0, *sizes])
    n = int(np.searchsorted(starts, position, side="right"))
    first = position - int(starts[n - 1])
    return " ".join(words[first : first + n])


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _decided(frame: pd.DataFrame) -> Iterator[tuple[int, str, str]]:
    """Yield the place, chosen and rejected text of each row that says one is better."""
    columns = ("kind", "choice", "shown_first", "completion", "other_completion", "text")
    for place, row in enumerate(zip(*(frame[name] for name in columns), strict=True)):
        kind, choice, shown_first, this, other, text = row
        if kind == FeedbackKind.correction:
            yield place, text, this
        elif kind == FeedbackKind.preference and choice in ("left", "right"):
            won = this_won(choice, shown_first)
            yield place, this if won else other, other if won else this


# -- topics -------------------------------------------------------------------------------------


def narrow_topics(frame: pd.DataFrame) -> list[NarrowTopic]:
    """Return the topics of which few raters speak, though they have votes enough."""
    if "topic" not in frame or not len(frame):
        return []
    everybody = frame["voter"].value_counts().to_numpy()
    found = []
    for topic, voters in frame.dropna(subset=["topic"]).groupby("topic")["voter"]:
        votes = len(voters)
        if votes < TOPIC_VOTES:
            continue
        effective = _spread_over(voters.value_counts().to_numpy())
        expected = _expected(votes, votes, _spread_over(everybody))
        if _are_few(effective, expected, len(everybody)):
            found.append(NarrowTopic(str(topic), votes, effective, expected))
    return sorted(found, key=lambda topic: (-topic.votes, topic.topic))
