"""One score from everything people say: each kind of feedback with a likelihood of its own.

Everything is about one score s of a completion; m = s(chosen) - s(rejected).

preference  chosen, rejected, tie, both bad: softmax of (a m/2, -a m/2, t, b - c (s + s')/2): the
            ties of Davidson (1970), their width learnt, and those between bad ones apart (c > 0);
            where people decided it is Bradley-Terry, sigmoid(a m)
correction  the better text over the original: sigmoid(a (m + d)), d from a head that learns what
            sets any text of a person apart from one that was sampled, so that the score need not
thumbs      up: sigmoid(a (s + u) + b)
rating      at most k: sigmoid(threshold_k - a (s + u)), four rising thresholds (McCullagh 1980)
score       normal around sigmoid(a (s + u) + b), its deviation learnt
criteria    the same around a head of its own, which is the score's plus what sets it apart

u is the rater's leniency, shrunk to 0 (a normal prior): who is always kind moves no score. The
slopes a are near 1 unless the votes say otherwise. A rater may be careless: with some probability,
learnt, everything they say (but their corrections, which nobody writes without a look) is drawn
from what people say of anything at all, and counts by how unlikely that is. Answers to gold
questions (feedback/gold.py) say who is careless too. Two completions are
compared only where a person compared them; thumbs on different prompts meet in the score and
nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf_pipeline.errors import NotEnoughData, TrainingError
from rlhf_pipeline.feedback.gold import Tally
from rlhf_pipeline.records import FeedbackKind, PreferencePair, RewardExample
from rlhf_pipeline.reward.raters import GOLD_RIGHT, JUDGED_RATERS, JUDGED_VOTES, turn_of

OUTCOMES = 4  # of a preference: chosen, rejected, tie, both bad
STARS = 5
LENIENCY_DEVIATION = 1.0  # of a rater, in units of the score
SLOPE_DEVIATION = 1.0  # of log a
CARELESS = 0.1  # share of raters who are, before anything is known; worth CARELESS_RATERS of them
CARELESS_RATERS = 10.0
APART = 10.0  # a criterion's own weights are shrunk this many times as much as the score's
WRITTEN = 0.1  # what sets a person's text apart from a sampled one is shrunk this much
SMALLEST_DEVIATION = 0.02  # of scores and criteria: nobody means the third decimal
RIDGES = (3.0, 10.0, 30.0)  # strengths tried
STEPS = 80  # of L-BFGS, at most; more change no ranking
TINY = 1e-9


@dataclass(frozen=True)
class Text:
    """One completion that something was said about."""

    record: PreferencePair | RewardExample
    completion: str
    sampled: bool = True  # False: a person wrote it, or the better text beside it


@dataclass(frozen=True)
class Opinions:
    """Everything that was said, kind by kind, about texts by their number; aligned by position."""

    texts: list[Text] = field(default_factory=list)
    voters: list[str] = field(default_factory=list)  # by number
    # comparisons: better, worse, outcome (0 decided, 2 tie, 3 both bad), voter
    preferences: list[tuple[int, int, int, int]] = field(default_factory=list)
    corrections: list[tuple[int, int, int]] = field(default_factory=list)  # better, worse, voter
    singles: dict[str, list[tuple[int, float, int]]] = field(default_factory=dict)  # text, value
    criteria: dict[str, list[tuple[int, float, int]]] = field(default_factory=dict)  # by name

    @property
    def count(self) -> int:
        """Return how many things were said."""
        others = (*self.singles.values(), *self.criteria.values())
        return len(self.preferences) + len(self.corrections) + sum(len(some) for some in others)

    @property
    def tells_apart(self) -> bool:
        """Say whether anything is said to be better than anything else."""
        singles = (*self.singles.values(), *self.criteria.values())
        decided = any(outcome == 0 for _, _, outcome, _ in self.preferences)
        return (
            decided
            or bool(self.corrections)
            or any(len({value for _, value, _ in some}) > 1 for some in singles)
        )

    def said_by(self) -> dict[int, int]:
        """Return whose opinion each text is there for; texts of nobody's are left out."""
        found = {text: who for *both, _, who in self.preferences for text in both}
        found |= {text: who for *both, who in self.corrections for text in both}
        for some in (*self.singles.values(), *self.criteria.values()):
            found |= {text: who for text, _, who in some}
        return found

    def about(self) -> list[tuple[int, ...]]:
        """Return the texts that belong together: compared with each other, or one by itself."""
        compared = [(better, worse) for better, worse, _, _ in self.preferences]
        compared += [(better, worse) for better, worse, _ in self.corrections]
        others = (*self.singles.values(), *self.criteria.values())
        alone = {text: None for some in others for text, _, _ in some}  # each once, in order
        return [*compared, *((text,) for text in alone)]


def gather(
    pairs: Sequence[PreferencePair],
    examples: Sequence[RewardExample],
    kinds: Mapping[str, float],
) -> Opinions:
    """Return what was said by the kinds that have a weight."""
    opinions = Opinions()
    numbers: dict[str, int] = {}

    def voter(name: str) -> int:
        if name not in numbers:
            numbers[name] = len(numbers)
            opinions.voters.append(name)
        return numbers[name]

    def text(record: PreferencePair | RewardExample, completion: str, sampled: bool) -> int:
        opinions.texts.append(Text(record, completion, sampled))
        return len(opinions.texts) - 1

    for pair in pairs:
        if not kinds.get(_kind_of(pair)):
            continue
        better = text(pair, pair.chosen, not pair.corrected)
        worse = text(pair, pair.rejected, not pair.corrected)
        who = voter(pair.voter)
        if pair.corrected:
            opinions.corrections.append((better, worse, who))
        else:
            outcome = 3 if pair.both_bad else 2 if pair.tie else 0
            opinions.preferences.append((better, worse, outcome, who))
    for example in examples:
        if not kinds.get(example.kind):
            continue
        about = text(example, example.completion, True)
        who = voter(example.voter)
        if example.kind is FeedbackKind.criteria:
            for name, value in (example.criteria or {}).items():
                opinions.criteria.setdefault(name, []).append((about, value, who))
        elif example.number is not None:
            opinions.singles.setdefault(example.kind, []).append((about, example.number, who))
    return opinions


def voters_of(
    pairs: Sequence[PreferencePair],
    examples: Sequence[RewardExample],
    kinds: Mapping[str, float],
) -> list[str]:
    """Return who gave each of these that is of a kind that has a weight, in order."""
    found = [pair.voter for pair in pairs if kinds.get(_kind_of(pair))]
    return found + [example.voter for example in examples if kinds.get(example.kind)]


def _kind_of(pair: PreferencePair) -> FeedbackKind:
    return FeedbackKind.correction if pair.corrected else FeedbackKind.preference


def part(opinions: Opinions, keep: Sequence[bool]) -> Opinions:
    """Return what was said about the texts that are kept; texts and voters keep their numbers."""

    return _among(opinions, lambda said: keep[said[0]])


def of_others(opinions: Opinions, voters: Collection[str]) -> Opinions:
    """Return what everybody but these voters said; texts and voters keep their numbers."""
    gone = {number for number, name in enumerate(opinions.voters) if name in voters}
    return _among(opinions, lambda said: said[-1] not in gone)


def _among(opinions: Opinions, wanted: Callable[[tuple[Any, ...]], bool]) -> Opinions:
    """Return the opinions that are wanted: each is a tuple from its text to its voter."""

    def kept(some: list[Any]) -> list[Any]:
        return [one for one in some if wanted(one)]

    return Opinions(
        opinions.texts,
        opinions.voters,
        kept(opinions.preferences),
        kept(opinions.corrections),
        {kind: kept(some) for kind, some in opinions.singles.items()},
        {name: kept(some) for name, some in opinions.criteria.items()},
    )


def until_turned(opinions: Opinions, scores: Sequence[float]) -> tuple[Opinions, dict[str, int]]:
    """Return the opinions less the comparisons of raters who turned, from then on; and who did.

    `scores` are the texts', differences of which are log-odds of a preference. A voter who turned
    has how many decided comparisons they gave before; raters.py has the test, which needs an order
    and so sees what is said in comparisons alone.
    """
    said: dict[int, list[tuple[int, int, bool]]] = {}  # ties and both-bad votes too
    for better, worse, outcome, who in opinions.preferences:
        said.setdefault(who, []).append((better, worse, outcome == 0))
    places = {
        who: [i for i, (*_, decided) in enumerate(some) if decided] for who, some in said.items()
    }
    enough = {who: some for who, some in places.items() if len(some) >= JUDGED_VOTES}
    if len(enough) < JUDGED_RATERS:
        return opinions, {}
    keep = [True] * len(opinions.texts)
    turned: dict[str, int] = {}
    for who, decided in enough.items():
        some = said[who]
        turn = turn_of([scores[some[i][0]] - scores[some[i][1]] for i in decided])
        if turn is not None and turn >= JUDGED_VOTES:  # who never was careful is found by `fit`
            turned[opinions.voters[who]] = turn
            for better, worse, _ in some[decided[turn] :]:
                keep[better] = keep[worse] = False
    return (part(opinions, keep) if turned else opinions), turned


class Likelihoods(nn.Module):
    """How likely each thing that was said is, given the scores."""

    def __init__(
        self,
        opinions: Opinions,
        width: int,
        kinds: Mapping[str, float],
        gold: Mapping[str, Tally] | None = None,
    ) -> None:
        super().__init__()
        self.weights = {str(kind): float(weight) for kind, weight in kinds.items()}
        self.raters = len(opinions.voters)
        self.criteria = sorted(opinions.criteria)
        self.tie = nn.Parameter(torch.tensor([-1.0, -1.0]))  # t and b
        self.worse_ties = nn.Parameter(torch.zeros(()))  # log c
        slopes = [*FeedbackKind, *(f"criteria {n}" for n in self.criteria)]
        self.slot = {str(name): i for i, name in enumerate(slopes)}
        self.log_slope = nn.Parameter(torch.zeros(len(self.slot)))
        self.bias = nn.Parameter(torch.zeros(len(self.slot)))
        self.log_deviation = nn.Parameter(torch.full((len(self.slot),), -1.5))
        self.first = nn.Parameter(torch.tensor(-1.5))  # the lowest threshold of a rating
        self.log_steps = nn.Parameter(torch.zeros(STARS - 2))  # between thresholds
        self.leniency = nn.Parameter(torch.zeros(max(1, self.raters)))
        self.careless = nn.Parameter(torch.logit(torch.tensor(CARELESS)))
        self.apart = nn.Parameter(torch.zeros(len(self.criteria), width))
        self.written = nn.Parameter(torch.zeros(width))
        self._said = _tensors(opinions)
        answered = [(gold or {}).get(name, Tally()) for name in opinions.voters]
        self._known = torch.tensor(
            [
                [
                    t.right * math.log(GOLD_RIGHT) + t.wrong * math.log(1 - GOLD_RIGHT)
                    for t in answered
                ],
                [t.asked * math.log(0.5) for t in answered],
            ]
        )

    def thresholds(self) -> Tensor:
        """Return a rating's four thresholds, rising."""
        return torch.cat([self.first[None], self.first + self.log_steps.exp().cumsum(0)])

    def said(
        self, scores: Tensor, features: Tensor, texts: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each thing's log-likelihood, that of a careless rater, and its voter's number.

        `scores` (N,) and `features` (N, F) are those of the opinions' texts, or of the `texts` with
        these numbers: then of what was said about them alone. Both likelihoods are multiplied by
        the kind's weight.
        """
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for kind, everything in self._said.items():
            about = everything if texts is None else everything.among(texts)
            name = kind.partition(" ")[0]
            lenient = self.leniency[about.voter]
            if name == "preference":
                found = self._preference(scores, about)
            elif name == "correction":
                margin = scores[about.text] - scores[about.other]
                margin = margin + (features[about.text] - features[about.other]) @ self.written
                found = functional.logsigmoid(self.slope(kind) * margin)
            else:
                judged = scores[about.text] + lenient
                if name == "criteria":
                    judged = (
                        judged + features[about.text] @ self.apart[self.criteria.index(kind[9:])]
                    )
                found = self._single(kind, judged, about.value)
            weight = self.weights[name]
            # A careless rater's corrections are read as anybody's: writing one takes a look.
            blind = found if name == "correction" else about.careless
            parts.append((weight * found, weight * blind, about.voter))
        likelihood, careless, voter = (torch.cat(some) for some in zip(*parts, strict=True))
        return likelihood, careless, voter

    def loss(self, scores: Tensor, features: Tensor, *, mixed: bool) -> Tensor:
        """Return minus the log-likelihood, with the priors; not mixed: as if all had looked."""
        likelihood, careless, voter = self.said(scores, features)
        if mixed:
            both = self.per_rater(likelihood, careless, voter)
            loss = -torch.logsumexp(both, 0).sum()
            share = self.careless.sigmoid()
            loss = loss - CARELESS_RATERS * (
                CARELESS * share.log() + (1 - CARELESS) * (1 - share).log()
            )
        else:
            loss = -likelihood.sum()
        prior = (self.leniency / LENIENCY_DEVIATION).pow(2).sum()
        prior = prior + (self.log_slope / SLOPE_DEVIATION).pow(2).sum()
        prior = prior + self.worse_ties.pow(2) + self.log_steps.pow(2).sum()
        prior = prior + 0.01 * (self.bias.pow(2).sum() + self.tie.pow(2).sum())
        prior = prior + 0.01 * (self.log_deviation + 1.5).pow(2).sum()
        return loss + prior / 2

    def careful(self, scores: Tensor, features: Tensor) -> Tensor:
        """Return each rater's probability of having looked, (R,)."""
        with torch.no_grad():
            found: Tensor = self.per_rater(*self.said(scores, features)).softmax(0)[0]
        return found

    def per_rater(self, likelihood: Tensor, careless: Tensor, voter: Tensor) -> Tensor:
        """Return the log-likelihood of all a rater said, (2, R): had they looked, or not."""
        none = likelihood.new_zeros(self.leniency.shape[0])
        looked = none.index_add(0, voter, likelihood) + functional.logsigmoid(-self.careless)
        blind = none.index_add(0, voter, careless) + functional.logsigmoid(self.careless)
        found = torch.stack([looked, blind])
        return found if self._known.shape[1] == 0 else found + self._known.to(found.dtype)

    def slope(self, kind: str) -> Tensor:
        """Return the kind's slope a."""
        return self.log_slope[self.slot[kind]].exp()

    def _preference(self, scores: Tensor, about: _Said) -> Tensor:
        better, worse = scores[about.text], scores[about.other]
        half, middle = (better - worse) / 2, (better + worse) / 2
        tie = self.tie[0].expand_as(half)
        bad = self.tie[1] - self.worse_ties.exp() * middle
        half = self.slope("preference") * half
        every = torch.stack([half, -half, tie, bad], dim=1).log_softmax(1)
        return every.gather(1, about.value.long()[:, None])[:, 0]

    def _single(self, kind: str, judged: Tensor, value: Tensor) -> Tensor:
        slot = self.slot[kind]
        leaning = self.slope(kind) * judged + self.bias[slot]
        if kind == "thumbs":
            return functional.logsigmoid(torch.where(value > 0.5, leaning, -leaning))
        if kind == "rating":
            below = torch.sigmoid(self.thresholds()[None] - self.slope(kind) * judged[:, None])
            edges = functional.pad(below, (1, 0)), functional.pad(below, (0, 1), value=1.0)
            chances = edges[1] - edges[0]
            place = (value - 1).long().clamp(0, STARS - 1)
            return chances.gather(1, place[:, None])[:, 0].clamp(min=TINY).log()
        deviation = self.log_deviation[slot].exp() + SMALLEST_DEVIATION
        return _normal((value - leaning.sigmoid()) / deviation, deviation)


@dataclass(frozen=True)
class _Said:
    """One kind's opinions as tensors (n,), and how likely a careless rater says each."""

    text: Tensor
    other: Tensor
    value: Tensor
    voter: Tensor
    careless: Tensor

    def among(self, texts: Sequence[int]) -> _Said:
        """Return what was said about these texts, which are numbered by their places here."""
        last = max(int(self.text.max()), int(self.other.max()), *texts)
        places = self.text.new_full((last + 1,), -1)
        places[list(texts)] = torch.arange(len(texts))
        kept = places[self.text] >= 0
        return _Said(
            places[self.text[kept]],
            places[self.other[kept]],
            self.value[kept],
            self.voter[kept],
            self.careless[kept],
        )


def _tensors(opinions: Opinions) -> dict[str, _Said]:
    said: dict[str, _Said] = {}
    if opinions.preferences:
        better, worse, outcome, voter = torch.tensor(opinions.preferences).T
        shares = (torch.bincount(outcome, minlength=OUTCOMES) + 1).double()
        shares = shares / shares.sum()
        # Decided, but left or right without looking: each the half of it.
        shares[0] = shares[1] = (shares[0] + shares[1]) / 2
        careless = shares[outcome].log()
        said["preference"] = _Said(better, worse, outcome.double(), voter, careless)
    if opinions.corrections:
        better, worse, voter = torch.tensor(opinions.corrections).T
        blind = torch.full((len(better),), 0.5, dtype=torch.float64).log()
        said["correction"] = _Said(better, worse, blind * 0, voter, blind)
    for kind, some in opinions.singles.items():
        if some:
            said[kind] = _single(some, continuous=kind == "score")
    for name, some in sorted(opinions.criteria.items()):
        if some:
            said[f"criteria {name}"] = _single(some, continuous=True)
    return said


def _single(some: Sequence[tuple[int, float, int]], *, continuous: bool) -> _Said:
    about = torch.tensor([text for text, _, _ in some])
    value = torch.tensor([value for _, value, _ in some], dtype=torch.float64)
    voter = torch.tensor([who for _, _, who in some])
    if continuous:
        # What people say of anything: a normal too, but one that knows no score. A histogram would
        # be the better guess wherever people keep to a few round numbers, and nobody had looked.
        deviation = value.std(correction=0) + SMALLEST_DEVIATION
        careless = _normal((value - value.mean()) / deviation, deviation)
    else:
        counts = torch.bincount(value.long()).double() + 0.5
        careless = (counts / counts.sum())[value.long()].log()
    return _Said(about, about, value, voter, careless)


def _normal(missed: Tensor, deviation: Tensor) -> Tensor:
    """Return the log-density of a normal at so many deviations from its mean."""
    return -0.5 * missed.pow(2) - deviation.log() - 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Fitted:
    """Weights of the score on standardised features, and everything beside them."""

    weight: Tensor  # (F,) float64, on features divided by `deviation`
    deviation: Tensor  # (F,)
    mean: Tensor  # (F,), taken off first
    likelihoods: Likelihoods
    careful: dict[str, float]  # voter -> probability of having looked
    loss: float  # mean over everything said, in nats
    ridge: float

    def looked(self, opinions: Opinions) -> Tensor:
        """Return each rater's probability of having looked, (R,) float64, by the rater's number."""
        return torch.tensor([self.careful[voter] for voter in opinions.voters]).double()

    def lost(
        self,
        features: Tensor,
        head: Tensor,
        looked: Tensor,
        texts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return how unlikely what was said of the texts is, in nats, all told; and their scores.

        `features` (N, F) are plain ones, of all texts or of those with these numbers, and may be
        another trunk's; `head` (F,) are weights on them. Each thing said counts by the chance that
        its rater had `looked` (R,).
        """
        told = self.likelihoods
        centred = features.cpu().double() - self.mean
        scores = centred @ head.cpu().double() / told.slope("preference")
        likelihood, _, voter = told.said(scores, centred / self.deviation, texts)
        return -(looked[voter] * likelihood).sum(), scores


def score_weights(fitted: Fitted) -> Tensor:
    """Return the score's weights on plain features, (F,): margins are log-odds of a preference."""
    with torch.no_grad():
        slope = fitted.likelihoods.slope("preference")
        return fitted.weight * slope / fitted.deviation


def criteria_weights(fitted: Fitted) -> tuple[list[str], Tensor, Tensor]:
    """Return the criteria's names, and weights (K, F) and biases (K,) on plain features.

    Their sigmoid is what somebody who looked, neither kind nor strict, is expected to give.
    """
    told = fitted.likelihoods
    with torch.no_grad():
        slots = [told.slot[f"criteria {name}"] for name in told.criteria]
        slopes = told.log_slope[slots].exp()
        weights = slopes[:, None] * (fitted.weight[None] + told.apart) / fitted.deviation
        return told.criteria, weights, told.bias[slots] - weights @ fitted.mean


def scales(features: Tensor, likelihoods: int) -> Tensor:
    """Return what each feature is divided by, (F,), before its weight is shrunk.

    A hidden state's units share one deviation: directions in which completions differ much are then
    shrunk least, and there is little to be learnt along the others. Each of the last `likelihoods`
    features has its own, a third of its deviation: one of them says more than any unit.
    """
    deviation = features.std(0).clamp(min=1e-6)
    hidden = features.shape[1] - likelihoods
    shared = deviation[:hidden].pow(2).mean().sqrt().expand(hidden)
    return torch.cat([shared, deviation[hidden:] / 3])


def check_finite(numbers: Tensor) -> None:
    """Raise TrainingError unless features, or a head found from them, are finite."""
    if not bool(numbers.isfinite().all()):
        raise TrainingError(
            "features must be finite numbers, found some that are not; the base model's weights "
            "are damaged: load another"
        )


def fit(
    features: Tensor,
    opinions: Opinions,
    kinds: Mapping[str, float],
    *,
    ridge: float,
    likelihoods: int = 0,
    gold: Mapping[str, Tally] | None = None,
    head: Tensor | None = None,
) -> Fitted:
    """Return the weights under which what was said is likeliest, on the texts' features (N, F).

    First as if everybody had looked, then each rater may be careless. L-BFGS on all of it, or,
    where the score's `head` (F,) is known already, on everything beside it; the same opinions give
    the same weights. Raises NotEnoughData where nothing was said, TrainingError where
    features or losses are not finite.
    """
    if opinions.count == 0:
        raise NotEnoughData(
            f"a reward needs feedback of the kinds {', '.join(kinds)}, found none; collect some or "
            "name other kinds in reward.kinds"
        )
    check_finite(features)
    features = features.double()
    deviation, mean = scales(features, likelihoods), features.mean(0)
    scaled = (features - mean) / deviation
    model = Likelihoods(opinions, scaled.shape[1], kinds, gold).double()
    weight = torch.zeros(scaled.shape[1], dtype=torch.float64, requires_grad=True)
    if head is not None:
        weight = head.detach().cpu().double() * deviation

    def objective(mixed: bool) -> Tensor:
        shrunk = weight.dot(weight) + APART * model.apart.pow(2).sum()
        shrunk = shrunk + WRITTEN * model.written.pow(2).sum()
        return model.loss(scaled @ weight, scaled, mixed=mixed) + ridge / 2 * shrunk

    weights = [*([weight] if head is None else []), *model.parameters()]
    _minimise(weights, lambda: objective(False))
    _minimise(weights, lambda: objective(True))
    with torch.no_grad():
        scores = scaled @ weight
        loss = float(model.loss(scores, scaled, mixed=True)) / opinions.count
        careful = model.careful(scores, scaled).tolist()
    return Fitted(
        weight.detach(),
        deviation,
        mean,
        model,
        dict(zip(opinions.voters, careful, strict=True)),
        loss,
        ridge,
    )


def fit_parts_of_kinds(
    features: Tensor,
    opinions: Opinions,
    kinds: Mapping[str, float],
    fitted: Fitted,
    parts: Mapping[str, int],
) -> Tensor:
    """Return a score's weights on plain features per part of the raters, (K, F).

    Each finds likeliest what its own raters said (`parts`: voter -> part) and saw nothing else of
    the texts. What is beside the score, and how far each rater's word goes, is everybody's: few
    raters move that little, it tells no text from another, and it keeps all heads on one scale.
    A text is one rater's, so one L-BFGS fits all heads. Raises NotEnoughData where a part said
    nothing.
    """
    count = max(parts.values()) + 1
    part_of = {text: parts[opinions.voters[who]] for text, who in opinions.said_by().items()}
    silent = set(range(count)) - set(part_of.values())
    if silent:
        raise NotEnoughData(
            f"each of {count} heads needs something that its raters said, found nothing for head "
            f"{min(silent) + 1}; lower reward.heads or collect more feedback"
        )
    places = torch.tensor([part_of.get(text, 0) for text in range(len(features))])
    scaled = (features.double() - fitted.mean) / fitted.deviation
    looked = fitted.looked(opinions)
    told = Likelihoods(opinions, scaled.shape[1], kinds).double().requires_grad_(False)
    told.load_state_dict(fitted.likelihoods.state_dict())
    heads = torch.zeros(count, scaled.shape[1], dtype=torch.float64, requires_grad=True)

    def objective() -> Tensor:
        scores = (scaled @ heads.T).gather(1, places[:, None])[:, 0]
        likelihood, _, voter = told.said(scores, scaled)
        return fitted.ridge / 2 * heads.pow(2).sum() - (looked[voter] * likelihood).sum()

    _minimise([heads], objective)
    slope = told.slope("preference").detach()
    return heads.detach() * slope / fitted.deviation


def fifth_of(groups: Sequence[str]) -> list[bool]:
    """Say which a ridge is chosen by: a fifth of the groups, digests of conversations."""
    return [int(group[:8], 16) % 5 == 0 for group in groups]


def fit_best(
    features: Tensor,
    opinions: Opinions,
    kinds: Mapping[str, float],
    *,
    groups: Sequence[str],
    likelihoods: int,
    gold: Mapping[str, Tally] | None,
) -> Fitted:
    """Return the fit under the ridge that finds likeliest what was said in a fifth of the groups.

    `groups` are `fifth_of`'s; the fit itself is of everything.
    """
    held = fifth_of(groups)
    known, kept_out = part(opinions, [not one for one in held]), part(opinions, held)
    ridge = RIDGES[len(RIDGES) // 2]
    if known.count and kept_out.count:
        tried = {}
        for candidate in RIDGES:
            found = fit(features, known, kinds, ridge=candidate, likelihoods=likelihoods, gold=gold)
            tried[candidate] = _surprise(found, features, kept_out, kinds)
        ridge = min(tried, key=lambda r: tried[r])
    return fit(features, opinions, kinds, ridge=ridge, likelihoods=likelihoods, gold=gold)


def _surprise(
    fitted: Fitted, features: Tensor, opinions: Opinions, kinds: Mapping[str, float]
) -> float:
    """Return minus the log-likelihood of what a fit has not seen, without priors."""
    scaled = (features.double() - fitted.mean) / fitted.deviation
    judge = Likelihoods(opinions, scaled.shape[1], kinds).double()
    judge.load_state_dict(fitted.likelihoods.state_dict())
    with torch.no_grad():
        likelihood, careless, voter = judge.said(scaled @ fitted.weight, scaled)
        return -float(torch.logsumexp(judge.per_rater(likelihood, careless, voter), 0).sum())


def _minimise(weights: Sequence[Tensor], objective: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.LBFGS(
        list(weights), max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective()
        torch.autograd.backward(loss)
        return loss

    final = optimizer.step(closure)  # type: ignore[no-untyped-call]
    if not bool(torch.isfinite(torch.as_tensor(final))):
        raise TrainingError(
            f"the loss of all kinds must stay finite, found {float(final)}; look for values that "
            "their kind does not allow"
        )
