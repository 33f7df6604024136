"""The loss of a preference, and the head that least has it on fixed features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

NEWTON_STEPS = 25


def preference_loss(margins: Tensor, targets: Tensor) -> Tensor:
    """Return the Bradley-Terry loss of each pair, (B,), in nats.

    targets (B,) are the probability that chosen is better: 1, or 0.5 for ties.
    -[y log sigmoid(m) + (1 - y) log sigmoid(-m)] = softplus(-m) + (1 - y) m.
    Source: Stiennon et al., arXiv:2009.01325 section 3.4; ties as half a win for each.
    """
    return functional.softplus(-margins) + (1 - targets) * margins


def logistic(
    differences: Tensor, targets: Tensor, ridge: float, weights: Tensor | None = None
) -> tuple[Tensor, list[tuple[int, float]]]:
    """Return the head (H,) that least sum weight * preference_loss + ridge/2 |w|^2, and the losses.

    `weights` (B,) are how much each pair counts, all 1 where there are none; the losses are means
    by them, one a step. Newton's method with halved steps where the objective would rise; the
    problem is convex.
    """
    head = differences.new_zeros(differences.shape[1])
    counts = torch.ones_like(targets) if weights is None else weights
    curve: list[tuple[int, float]] = []
    identity = torch.eye(len(head), dtype=head.dtype)

    def total(w: Tensor) -> float:
        return float((counts * preference_loss(differences @ w, targets)).sum())

    def objective(w: Tensor) -> float:
        return total(w) + float(ridge / 2 * w.dot(w))

    current = objective(head)
    for step in range(1, NEWTON_STEPS + 1):
        chances = (differences @ head).sigmoid()
        gradient = differences.T @ (counts * (chances - targets)) + ridge * head
        spread = counts * chances * (1 - chances)
        hessian = differences.T @ (differences * spread[:, None]) + ridge * identity
        move = torch.linalg.solve(hessian, gradient)
        size = 1.0
        while size > 1e-4 and objective(head - size * move) > current:
            size /= 2
        head = head - size * move
        before, current = current, objective(head)
        curve.append((step, total(head) / float(counts.sum().clamp(min=1e-9))))
        if abs(before - current) <= 1e-9 * max(1.0, abs(current)):
            break
    return head, curve
