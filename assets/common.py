"""What every asset shares: the partitions, how training steps retry, how a plot is shown."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

# Dagster compares an asset's return annotation with the bare class; mypy wants its parameter.
if TYPE_CHECKING:
    Materialized = dg.MaterializeResult[None]
else:
    Materialized = dg.MaterializeResult

agents = dg.DynamicPartitionsDefinition(name="agents")
"""One partition per agent: one assistant, one tenant, one line of models."""

GPU = "gpu"
"""The pool that a run which trains has a place in (dagster.yaml: how many, and who waits)."""

RESUME = dg.RetryPolicy(max_retries=2, delay=3, backoff=dg.Backoff.EXPONENTIAL)
"""A training process that was killed is started again; PPO goes on from its last checkpoint."""

MOST_PLOTS = 6  # shown in place; the files are all there


def plots(paths: list[str] | list[Path]) -> dict[str, dg.MetadataValue]:
    """Return PNG files as metadata that the UI shows in place."""
    shown: dict[str, dg.MetadataValue] = {}
    for path in [Path(p) for p in paths][:MOST_PLOTS]:
        encoded = base64.b64encode(path.read_bytes()).decode()
        name = path.stem.replace("_", " ")
        shown[name] = dg.MetadataValue.md(f"![{name}](data:image/png;base64,{encoded})")
    return shown


def table(rows: list[dict[str, Any]]) -> dg.MetadataValue:
    """Return rows as a table in the UI; Dagster refuses an empty one, so that is said in words."""
    if not rows:
        return dg.MetadataValue.text("none")
    return dg.MetadataValue.table([dg.TableRecord(row) for row in rows])
