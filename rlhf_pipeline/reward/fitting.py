"""Fitting a reward model to what people said: its head, or several, and then all of it.

A head is fitted on features that are computed once, which takes seconds; where raters' words are to
count by how far they are believed, these are weighed first. training.py judges what comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.feedback.datasets import conversation_of
from rlhf_pipeline.feedback.gold import Tally
from rlhf_pipeline.files import read_json
from rlhf_pipeline.records import PreferencePair, Progress, RewardExample
from rlhf_pipeline.reward import RATERS
from rlhf_pipeline.reward.calibration import pair_accuracy
from rlhf_pipeline.reward.heads import fit_heads, parts_of
from rlhf_pipeline.reward.kinds import (
    check_finite,
    criteria_weights,
    fifth_of,
    fit,
    fit_best,
    fit_parts_of_kinds,
    gather,
    of_others,
    scales,
    score_weights,
    until_turned,
    voters_of,
)
from rlhf_pipeline.reward.logistic import logistic, preference_loss
from rlhf_pipeline.reward.model import (
    LIKELIHOODS,
    Limits,
    RewardModel,
    Row,
    encode_rows,
    features_of,
    new_criteria,
)
from rlhf_pipeline.reward.raters import RaterWeight, rater_weights, vote_weights
from rlhf_pipeline.reward.tuning import Descent, EncodedPairs, Fit, fit_model, tune_to_kinds

DOUBTED = 0.5  # what a rater's word counts below which it is doubted
RIDGES = (1.0, 10.0, 100.0, 1000.0)  # strengths tried for a head on frozen features


@dataclass(frozen=True)
class Heard:
    """Whose votes a model learnt from, how that went, and how far each was believed."""

    went: Fit
    voters: Sequence[str]  # of every vote
    parts: Mapping[str, int]  # of several heads, which learns from each voter
    weighed: Mapping[str, RaterWeight] | None = None  # where pairs alone train (raters.py)
    careful: Mapping[str, float] | None = None  # where every kind does: how likely each looked
    turned_after: Mapping[str, int] = field(default_factory=dict)  # of those, after how many votes

    @property
    def doubted(self) -> int:
        """Return how many voters count less than half, or hardly looked."""
        weights = [one.weight for one in (self.weighed or {}).values()]
        return sum(weight < DOUBTED for weight in (*weights, *(self.careful or {}).values()))

    @property
    def turned(self) -> int:
        """Return how many were careful until some vote and not from there."""
        after = [one.turned_after for one in (self.weighed or {}).values()]
        return len(self.turned_after) + sum(map(bool, after))

    def to_json(self) -> dict[str, Any] | None:
        """Return what raters.json keeps; None where everybody counted alike."""
        if self.careful is not None:
            return {"careful": self.careful, "turned_after": self.turned_after}
        if self.weighed is None:
            return None
        told = {who: one for who, one in self.weighed.items() if one.pairs + one.gold > 1}
        return {"weights": {who: asdict(one) for who, one in told.items()}}


def believed(folder: Path, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Return the pairs less those of raters whom the reward model in a folder doubted.

    That is who counts less than half, and who turned, from then on. Each rater's pairs are in the
    order they were given. Where it kept nothing of raters (`Heard.to_json`) all are believed.
    """
    told = read_json(folder / RATERS) if (folder / RATERS).exists() else {}
    weighed = told.get("weights", {})
    careful = {who: one["weight"] for who, one in weighed.items()} | told.get("careful", {})
    turned = {who: one["turned_after"] for who, one in weighed.items()}
    turned |= told.get("turned_after", {})
    given: Counter[str] = Counter()
    found = []
    for pair in pairs:
        after = turned.get(pair.voter)
        if careful.get(pair.voter, 1.0) >= DOUBTED and (after is None or given[pair.voter] < after):
            found.append(pair)
        given[pair.voter] += pair.decided
    return found


def learn(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[PreferencePair],
    examples: Sequence[RewardExample],
    train: EncodedPairs,
    features: Tensor | None,
    limits: Limits,
    *,
    kinds: Mapping[str, float] | None,
    descent: Descent | None,
    fits_head: bool,
    weigh_raters: bool,
    gold: Mapping[str, Tally] | None,
    heads: int,
    report: Progress,
) -> Heard:
    """Train the model on the pairs, encoded in `train`, or with `kinds` on everything of these.

    First the head alone, where one is to be fitted; then with a `descent` all of it. `features` are
    the pairs', where several heads or raters' weights want them.
    """
    voters = [pair.voter for pair in pairs]
    groups = [conversation_of(pair.prompt) for pair in pairs]
    weighed: Mapping[str, RaterWeight] | None = None
    weights: Tensor | None = None
    if features is not None and weigh_raters:
        told = features / scales(features, LIKELIHOODS * model.likelihood)
        targets = torch.tensor(train.targets, dtype=torch.float64)
        weighed = rater_weights(told[: len(train)] - told[len(train) :], targets, voters, gold)
        weights = vote_weights(weighed, voters, train.targets)
    if kinds is not None:
        heard = voters_of(pairs, examples, kinds)
        parts = parts_of(heard, heads) if heads > 1 else {}
        went, careful, turned = fit_kinds(
            model,
            tokenizer,
            pairs,
            examples,
            kinds,
            limits,
            gold=gold,
            descent=descent,
            parts=parts,
            report=report,
        )
        return Heard(went, heard, parts, careful=careful, turned_after=turned)
    parts = parts_of(voters, heads) if heads > 1 else {}
    if features is not None and parts:
        went = fit_parts(model, features, train, weights, [parts[v] for v in voters], groups)
    elif fits_head:
        went = fit_head(
            model, train, groups, weights=weights, features=features, voters=voters, report=report
        )
    if descent is not None:
        counts = None if weights is None else weights.tolist()
        went = fit_model(model, train, descent, weights=counts, report=report)
    return Heard(went, voters, parts, weighed=weighed)


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[PreferencePair], limits: Limits
) -> EncodedPairs:
    """Return the pairs' token ids, in order.

    A correction's pair goes without likelihoods: what a person writes is less likely than what was
    sampled however good it is, and would teach that the unlikely is better.
    """

    def rows(completions: Sequence[str]) -> list[Row]:
        prompts = [pair.prompt for pair in pairs]
        found = encode_rows(tokenizer, list(zip(prompts, completions, strict=True)), limits)
        return [
            replace(row, sampled=False) if pair.corrected else row
            for pair, row in zip(pairs, found, strict=True)
        ]

    return EncodedPairs(
        chosen=rows([pair.chosen for pair in pairs]),
        rejected=rows([pair.rejected for pair in pairs]),
        targets=[1.0 if pair.decided else 0.5 for pair in pairs],
    )


def all_features(model: RewardModel, rows: Sequence[Row], report: Progress) -> Tensor:
    """Return what the head reads of every row, (len(rows), features) float64 on the CPU."""
    features = torch.empty(len(rows), model.head.in_features, dtype=torch.float64)
    done = 0
    for members, batch in features_of(model, rows):
        features[members] = batch.double().cpu()
        done += len(members)
        report({"features": done, "of": len(rows)})
    return features


def fit_head(
    model: RewardModel,
    pairs: EncodedPairs,
    groups: Sequence[str],
    *,
    weights: Tensor | None = None,
    features: Tensor | None = None,
    voters: Sequence[str] = (),
    report: Progress,
) -> Fit:
    """Fit the head on the frozen trunk's features; the loss curve is per Newton step.

    The features (computed where they are not given) are standardised, which is folded back into the
    head. The ridge is the one that ranks best on a fifth of the conversations (`groups` names each
    pair's), then all pairs are used. `weights` are how much each pair counts; with each pair's
    voter it can be fitted again without some of them.
    """
    if features is None:
        features = all_features(model, [*pairs.chosen, *pairs.rejected], report)
    deviation = features.std(0).clamp(min=1e-6)
    differences = (features[: len(pairs)] - features[len(pairs) :]) / deviation
    targets = torch.tensor(pairs.targets, dtype=torch.float64)
    counts = torch.ones_like(targets) if weights is None else weights
    kept_out = torch.tensor(fifth_of(groups))
    decided = kept_out & (targets == 1)
    ridge = RIDGES[len(RIDGES) // 2]
    if decided.any() and not kept_out.all():
        ranked = {}
        for candidate in RIDGES:
            weight, _ = logistic(
                differences[~kept_out], targets[~kept_out], candidate, counts[~kept_out]
            )
            losses = preference_loss(differences[decided] @ weight, targets[decided])
            ranked[candidate] = float((losses * counts[decided]).mean())
        ridge = min(ranked, key=lambda r: ranked[r])
    weight, curve = logistic(differences, targets, ridge, counts)
    check_finite(weight)
    with torch.no_grad():
        model.head.weight.copy_((weight / deviation)[None])
        model.head.bias.zero_()
    report({"step": len(curve), "of": len(curve), "loss": curve[-1][1], "ridge": ridge})

    def without(raters: Collection[str]) -> Tensor:
        others = torch.tensor([voter not in raters for voter in voters])
        head, _ = logistic(differences[others], targets[others], ridge, counts[others])
        return head / deviation

    accuracy = pair_accuracy((differences @ weight)[targets == 1].tolist())
    return Fit(curve, accuracy, without if voters else None)


def fit_parts(
    model: RewardModel,
    features: Tensor,
    pairs: EncodedPairs,
    weights: Tensor | None,
    parts: Sequence[int],
    groups: Sequence[str],
) -> Fit:
    """Give the model a head per part of the raters, fitted on the frozen trunk's features."""
    deviation = scales(features, LIKELIHOODS * model.likelihood)
    chosen, rejected = ((features - features.mean(0)) / deviation).tensor_split([len(pairs)])
    targets = torch.tensor(pairs.targets, dtype=torch.float64)
    counts = torch.ones_like(targets) if weights is None else weights
    kept_out = torch.tensor(fifth_of(groups))
    part = torch.tensor(parts)
    found, _ = fit_heads(chosen, rejected, targets, counts, part, kept_out, model.combined)
    check_finite(found)
    plain = found / deviation
    set_heads(model, plain, features)
    scores = model.combined((features - features.mean(0)) @ plain.T)
    margins = scores[: len(pairs)] - scores[len(pairs) :]
    loss = float((counts * preference_loss(margins, targets)).sum() / counts.sum())
    return Fit([(1, loss)], pair_accuracy(margins[targets == 1].tolist() or [0.0]))


def fit_kinds(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[PreferencePair],
    examples: Sequence[RewardExample],
    kinds: Mapping[str, float],
    limits: Limits,
    *,
    gold: Mapping[str, Tally] | None = None,
    descent: Descent | None = None,
    parts: Mapping[str, int] | None = None,
    report: Progress,
) -> tuple[Fit, dict[str, float], dict[str, int]]:
    """Fit the head on the trunk's features to everything that was said (kinds.py).

    With a `descent` trunk and head are then trained on it together, and are what they were again
    where that made it less likely: the likelihoods of thumbs, ratings and scores know where 0 is,
    and too large steps move all of a trunk's scores. What people rated by name gets a head of its
    own beside it (model.criteria). Where raters turn it is fitted again to what they said until
    then. With `parts` (voter -> part) each part of the raters gets a head of its own, as
    model.combined brings them together. Returns how it went, each voter's probability of having
    looked, and after how many comparisons those who did turned.
    """
    opinions = gather(pairs, examples, kinds)
    texts = opinions.texts
    found = encode_rows(tokenizer, [(t.record.prompt, t.completion) for t in texts], limits)
    rows = [replace(row, sampled=text.sampled) for row, text in zip(found, texts, strict=True)]
    features = all_features(model, rows, report)
    likelihoods = LIKELIHOODS * model.likelihood
    groups = [conversation_of(text.record.prompt) for text in texts]
    fitted = fit_best(features, opinions, kinds, groups=groups, likelihoods=likelihoods, gold=gold)
    weight = score_weights(fitted)
    opinions, turned = until_turned(opinions, (features @ weight).tolist())
    if turned:
        fitted = fit_best(
            features, opinions, kinds, groups=groups, likelihoods=likelihoods, gold=gold
        )
        weight = score_weights(fitted)
    careful = fitted.careful
    heads = weight[None]
    if parts:
        heads = fit_parts_of_kinds(features, opinions, kinds, fitted, parts)
    set_heads(model, heads, features)
    report({"step": 1, "of": 1, "loss": fitted.loss})
    scores = model.combined(features @ heads.T - features.mean(0) @ heads.T)
    decided = [(a, b) for a, b, outcome, _ in opinions.preferences if outcome == 0]
    margins = [float(scores[a] - scores[b]) for a, b in decided]
    ridge = fitted.ridge

    def without(raters: Collection[str]) -> Tensor:
        said = of_others(opinions, raters)
        return score_weights(
            fit(features, said, kinds, ridge=ridge, likelihoods=likelihoods, gold=gold)
        )

    right = pair_accuracy(margins) if margins else None
    went = Fit([(1, fitted.loss)], right, None if parts else without)
    if descent is not None:
        trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
        before = {name: w.detach().cpu().clone() for name, w in trained.items()}
        head_alone = went
        went = tune_to_kinds(model, rows, opinions, fitted, descent, report=report)
        model.eval()
        tuned = all_features(model, rows, report)
        looked = fitted.looked(opinions)
        lost = [
            float(fitted.lost(some, head, looked)[0]) / opinions.count
            for some, head in ((features, heads[0]), (tuned, model.head.weight[0].detach()))
        ]
        if lost[1] > lost[0]:
            with torch.no_grad():
                for name, w in trained.items():
                    w.copy_(before[name])
            undone = (
                f"training it made what people said less likely (from {lost[0]:.2f} to "
                f"{lost[1]:.2f} nats each); lower reward.learning_rate from "
                f"{descent.learning_rate:g}, or set reward.freeze_trunk"
            )
            went = replace(head_alone, without=None, undone=undone)
        elif opinions.criteria:  # what is beside the score, of what the trunk reads now
            fitted = fit(
                tuned,
                opinions,
                kinds,
                ridge=fitted.ridge,
                likelihoods=likelihoods,
                gold=gold,
                head=model.head.weight[0],
            )
    if opinions.criteria:
        model.criteria = new_criteria(*criteria_weights(fitted)).to(model.head.weight.device)
    return went, careful, turned


def set_heads(model: RewardModel, weights: Tensor, features: Tensor) -> None:
    """Give the model heads with these weights on plain features, (K, F), in place of its own.

    One has no bias. The scores of several are centred on the texts these features (N, F) are of,
    so that a median compares like with like.
    """
    head = torch.nn.Linear(features.shape[1], len(weights)).to(model.head.weight.device)
    with torch.no_grad():
        head.weight.copy_(weights)
        head.bias.zero_()
        if len(weights) > 1:
            head.bias.copy_(-(features.mean(0) @ weights.T))
    model.head = head
