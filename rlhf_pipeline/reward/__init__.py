"""Rewards: the learned model, its training, and whatever else scores a completion."""

WORST = "worst.json"  # in a reward model's folder: the words of what it is most wrong about
