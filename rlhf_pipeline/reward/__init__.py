"""Rewards: the learned model, its training, and whatever else scores a completion."""
