"""Rewards: the learned model, its training, and whatever else scores a completion."""

FEWEST_JUDGED = 2  # preferences and corrections: with fewer no reward model can be judged
WORST = "worst.json"  # in a reward model's folder: the words of what it is most wrong about
