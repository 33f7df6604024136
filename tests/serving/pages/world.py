"""A shop with one tiny champion, for tests of what people touch."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.loading import save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.serving.pages.desk import Desk
from rlhf_pipeline.simulation.world import seed_conversations


def made_desk(state: Path) -> Desk:
    """Return a desk whose agent `shop` answers with an untrained policy."""
    here = Workspace(None, str(state))
    texts = [t for e in seed_conversations(100, 0) for t in (e.prompt[-1].content, e.completion)]
    folder = state / "agents" / "shop" / "v0"
    sizes: dict[str, int] = {"vocabulary": 400, "layers": 1, "width": 32, "heads": 2}
    save_policy(build_tiny(texts, **sizes, context=160, seed=0), folder)
    here.store.ensure_agent("shop")
    here.ledger.add_baseline(
        "shop", label="v0", path=folder, files=folder_sha256(folder), lineage={}, actor="test"
    )
    return Desk(here.settings, here.store, here.registry)
