"""One embedded MLflow for the whole folder: making its database takes some seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf_pipeline.database import Database
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.registry.models import ModelRegistry


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRegistry]:
    """A registry in a state folder; agents are the tests' own."""
    state = tmp_path_factory.mktemp("state")
    database = Database(f"sqlite:///{state}/store.db")
    ledger = PromotionLedger(database, root=state)
    yield ModelRegistry(ledger, f"sqlite:///{state}/mlflow/mlflow.db", state / "mlflow")
    database.close()
