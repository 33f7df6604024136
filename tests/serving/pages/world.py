"""A shop with one tiny champion, for tests of what people touch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.commands.common import Workspace
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy.loading import save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.serving.pages.desk import Desk
from rlhf_pipeline.simulation.world import seed_conversations


def made_desk(state: Path, *, epochs: int = 0) -> Desk:
    """Return a desk whose agent `shop` answers with a policy that was taught for so long."""
    here = Workspace(None, str(state))
    examples = seed_conversations(600 if epochs else 100, 0)
    texts = [t for e in examples for t in (e.prompt[-1].content, e.completion)]
    folder = state / "agents" / "shop" / "v0"
    sizes: dict[str, int] = {"vocabulary": 400, "layers": 1, "width": 32, "heads": 2}
    if epochs:
        sizes = {"vocabulary": 1024, "layers": 2, "width": 96, "heads": 4}
    policy = build_tiny(texts, **sizes, context=160, seed=0)
    if epochs:
        from rlhf_pipeline.policy.sft import train_sft

        taught = {"epochs": epochs, "learning_rate": 4e-3, "batch_size": 32, "max_tokens": 144}
        train_sft(policy, examples, state / "sft", seed=0, **taught)  # type: ignore[arg-type]
    save_policy(policy, folder)
    here.store.ensure_agent("shop")
    here.ledger.add_baseline(
        "shop", label="v0", path=folder, files=folder_sha256(folder), lineage={}, actor="test"
    )
    return Desk(here.settings, here.store, here.registry)


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(
    command: list[str], *ports: int, python: Sequence[str] = (sys.executable,)
) -> Iterator[None]:
    """Run a server in a process of its own until the block ends; it has begun to answer."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen([*python, "-m", *command], cwd=root)
    try:
        deadline = time.monotonic() + 90
        for port in ports:
            while not _answers(port):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not begin to answer"
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    """Serve the embedded service of a new shop, at two ports."""
    import uvicorn

    from rlhf_pipeline.serving.app import create_app

    made_desk(Path(sys.argv[1]))
    os.environ["RLHF_STATE_DIR"] = sys.argv[1]  # all that create_app() needs to be told
    apps = ((create_app(), int(port)) for port in sys.argv[2:])
    servers = [
        uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")) for app, port in apps
    ]
    threading.Thread(target=servers[1].run, daemon=True).start()
    servers[0].run()


if __name__ == "__main__":
    main()
