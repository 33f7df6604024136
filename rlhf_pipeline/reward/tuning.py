"""Training all of a reward model, its trunk too, on pairs or on everything people say.

AdamW on minibatches of what belongs together, like lengths side by side; the learning rate goes
down to 0 in a straight line. How a minibatch is split to fit memory does not change its gradient.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhf_pipeline.errors import TrainingError
from rlhf_pipeline.records import Progress
from rlhf_pipeline.reward.calibration import pair_accuracy
from rlhf_pipeline.reward.influence import Without
from rlhf_pipeline.reward.kinds import Fitted, Opinions
from rlhf_pipeline.reward.logistic import preference_loss
from rlhf_pipeline.reward.model import RewardModel, Row, batches_by_length, tokens_at_once

ADAM_EPS = 1e-5  # arXiv:2403.17031 (N+), as for PPO
MAX_GRAD_NORM = 1.0
POOL = 16  # minibatches drawn together and sorted by length, so that little is padding


@dataclass(frozen=True)
class EncodedPairs:
    """Token ids of pairs; target is 1 where chosen is better and 0.5 for ties."""

    chosen: list[Row]
    rejected: list[Row]
    targets: list[float]

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Fit:
    """How training went."""

    loss_curve: list[tuple[int, float]]  # (optimizer step, mean loss since the last one)
    train_accuracy: float | None  # on decided training pairs, as seen in the last epoch; None: none
    without: Without | None = None  # the head without some raters, where it alone was fitted
    undone: str | None = None  # why the trunk is as it was, although it was trained


@dataclass(frozen=True)
class Descent:
    """How long and how fast all of a model is trained."""

    epochs: float
    learning_rate: float
    batch_size: int  # pairs, or texts that nobody compared
    seed: int


def fit_model(
    model: RewardModel,
    pairs: EncodedPairs,
    descent: Descent,
    *,
    weights: Sequence[float] | None = None,
    report: Progress,
) -> Fit:
    """Train trunk and head on pairs, each of which counts by its weight; return how it went."""
    seen: dict[int, float] = {}  # each pair's latest margin

    def learn(members: Sequence[int]) -> float:
        loss, margins = backward(model, pairs, members, weights)
        seen.update(margins)
        return loss

    lengths = [len(c) + len(r) for c, r in zip(pairs.chosen, pairs.rejected, strict=True)]
    curve = descend(model, lengths, learn, descent, report)
    decided = [margin for i, margin in seen.items() if pairs.targets[i] == 1]
    return Fit(curve, pair_accuracy(decided or [0.0]))


def backward(
    model: RewardModel,
    pairs: EncodedPairs,
    members: Sequence[int],
    weights: Sequence[float] | None = None,
) -> tuple[float, dict[int, float]]:
    """Add the gradient of the members' mean loss, microbatch by microbatch.

    Returns that loss and each member's margin.
    """
    longest = [max(len(pairs.chosen[i]), len(pairs.rejected[i])) for i in members]
    total = 0.0
    seen: dict[int, float] = {}
    tokens = tokens_at_once(model.head.weight.device) // 2  # the two sides run together
    for batch in batches_by_length(longest, tokens):
        chosen = [pairs.chosen[members[i]] for i in batch]
        rejected = [pairs.rejected[members[i]] for i in batch]
        targets = torch.tensor([pairs.targets[members[i]] for i in batch])
        scores = model([*chosen, *rejected])
        margins = scores[: len(batch)] - scores[len(batch) :]
        losses = preference_loss(margins, targets.to(margins.device))
        if weights is not None:
            losses = losses * losses.new_tensor([weights[members[i]] for i in batch])
        loss = losses.sum() / len(members)
        torch.autograd.backward(loss)
        total += float(loss.detach())
        seen.update(zip((members[i] for i in batch), margins.tolist(), strict=True))
    return total, seen


def tune_to_kinds(
    model: RewardModel,
    rows: Sequence[Row],
    opinions: Opinions,
    fitted: Fitted,
    descent: Descent,
    *,
    report: Progress,
) -> Fit:
    """Train trunk and head on everything that was said, from the head that was fitted to it.

    `rows` are the opinions' texts. What was learnt beside the score (thresholds, leniencies,
    slopes, what sets a criterion apart) stays as it was fitted, and each thing said counts by the
    chance that its rater had looked. Returns how it went.
    """
    about, looked = opinions.about(), fitted.looked(opinions)
    fitted.likelihoods.requires_grad_(False)
    model.head.bias.requires_grad_(False)  # where 0 is, is what the thresholds were fitted to
    seen: dict[int, float] = {}  # each text's latest score

    def learn(members: Sequence[int]) -> float:
        total = 0.0
        longest = [max(len(rows[i]) for i in about[member]) for member in members]
        for batch in batches_by_length(longest, tokens_at_once(model.head.weight.device) // 2):
            texts = [i for place in batch for i in about[members[place]]]
            features = model.features([rows[i] for i in texts])
            lost, scores = fitted.lost(features, model.head.weight[0], looked, texts)
            loss = lost / len(members)
            torch.autograd.backward(loss)
            total += float(loss.detach())
            seen.update(zip(texts, scores.tolist(), strict=True))
        return total

    lengths = [sum(len(rows[i]) for i in texts) for texts in about]
    curve = descend(model, lengths, learn, descent, report)
    decided = [(a, b) for a, b, outcome, _ in opinions.preferences if outcome == 0]
    margins = [seen[a] - seen[b] for a, b in decided if a in seen]
    return Fit(curve, pair_accuracy(margins) if margins else None)


def descend(
    model: RewardModel,
    lengths: Sequence[int],
    learn: Callable[[Sequence[int]], float],
    descent: Descent,
    report: Progress,
) -> list[tuple[int, float]]:
    """Train what has gradients; return the loss curve.

    There is one length for each of what is learnt from, in tokens; `learn` adds the gradient of the
    mean loss of the members with these numbers and returns that loss.
    """
    steps = max(1, round(descent.epochs * math.ceil(len(lengths) / descent.batch_size)))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=descent.learning_rate, eps=ADAM_EPS, weight_decay=0.0)
    anneal = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    draw = random.Random(descent.seed)
    minibatches: list[list[int]] = []
    curve: list[tuple[int, float]] = []
    recent: list[float] = []
    model.train()
    for step in range(1, steps + 1):
        minibatches = minibatches or like_length(lengths, descent.batch_size, draw)
        loss = learn(minibatches.pop())
        norm = torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        if not (math.isfinite(loss) and math.isfinite(float(norm))):
            raise TrainingError(
                f"loss and gradient must stay finite, found {loss} and {float(norm)} at step "
                f"{step}; lower reward.learning_rate from {descent.learning_rate}"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        anneal.step()
        recent.append(loss)
        if step == steps or step % max(1, steps // 50) == 0:
            curve.append((step, statistics.fmean(recent)))
            report({"step": step, "of": steps, "loss": curve[-1][1]})
            recent.clear()
    return curve


def like_length(lengths: Sequence[int], size: int, draw: random.Random) -> list[list[int]]:
    """Return one epoch's minibatches: random, but of like length within a pool of POOL."""
    order = list(range(len(lengths)))
    draw.shuffle(order)
    minibatches = []
    for start in range(0, len(order), size * POOL):
        pool = sorted(order[start : start + size * POOL], key=lambda i: lengths[i])
        minibatches += [pool[i : i + size] for i in range(0, len(pool), size)]
    draw.shuffle(minibatches)
    return minibatches
