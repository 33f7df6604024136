"""The composition root: every asset, check, job, sensor, schedule and resource, in one place."""

from __future__ import annotations

import dagster as dg
import structlog

from assets import feedback, policies, release, training_data
from automation import assessments, jobs, schedules, sensors
from resources.compute import Compute
from resources.pipeline import Pipeline
from rlhf_pipeline.logs import plain_lines


@dg.definitions
def definitions() -> dg.Definitions:
    """Return everything Dagster runs. Loads no torch, transformers, mlflow or the like."""
    structlog.configure(processors=plain_lines())
    assets = dg.load_assets_from_modules([feedback, training_data, policies, release])
    return dg.Definitions(
        # Of the assets, not of the jobs: what a person starts on an asset's page is no job of ours.
        assets=[a.with_hooks(jobs.HOOKS) for a in assets if isinstance(a, dg.AssetsDefinition)],
        jobs=[jobs.retrain, jobs.bootstrap, jobs.ingest_file, jobs.prune_state],
        sensors=[
            sensors.enough_new_feedback,
            sensors.dropped_files,
            sensors.dead_runs,
            sensors.aliases_moved_by_hand,
            sensors.live_experiments,
            sensors.young_champions,
            sensors.alerts,
            assessments.assessments_in_mlflow,
            sensors.run_failed,
        ],
        schedules=[schedules.nightly_schedule(), schedules.retention_schedule()],
        resources={"pipeline": Pipeline(), "compute": Compute()},
    )
