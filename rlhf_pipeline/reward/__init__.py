"""Rewards: the learned model, its training, and whatever else scores a completion."""

from pathlib import Path

FEWEST_JUDGED = 2  # preferences and corrections that can judge a reward model
FEWEST_MATCHED = 10  # liked answers, and as many disliked ones, that can where these are few
TRUNK, HEAD = "trunk", "head.safetensors"  # a reward model's weights, in its folder
SETTINGS = "reward_model.json"  # likewise: what it reads, and how
WORST = "worst.json"  # likewise: the words of what it is most wrong about
REPORT = "report.json"  # likewise: what it was found to be worth
RATERS = "raters.json"  # likewise: whom it believed how far


def missing_from(folder: Path) -> list[str]:
    """Return what the folder lacks of a reward model that can score; a prune leaves the rest."""
    return [name for name in (TRUNK, HEAD, SETTINGS) if not (folder / name).exists()]
