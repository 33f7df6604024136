"""What people click on the page trains the next model: desk, store, sensor, snapshot."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from resources.pipeline import Pipeline
from rlhf_pipeline.definitions import definitions
from rlhf_pipeline.feedback import snapshot
from rlhf_pipeline.records import FeedbackKind, user_prompt
from rlhf_pipeline.serving.pages.desk import Answer
from tests.assets.world import write_recipe
from tests.serving.pages.world import made_desk


def test_votes_of_the_page_are_in_the_next_training_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    recipe = write_recipe(
        tmp_path / "minute.yaml", state, continuous_learning={"min_new_feedback": 3}
    )
    monkeypatch.setenv("RLHF_STATE_DIR", str(state))
    desk, pipeline = made_desk(state), Pipeline(recipe=str(recipe))
    said: dict[str, str] = {}
    for person in ("ann", "bob", "eve"):
        *_, answer = desk.answer(
            "shop", user_prompt(f"{person} asks"), session_id=person, person=person
        )
        assert isinstance(answer, Answer)
        desk.vote(answer.interaction, FeedbackKind.thumbs, person=person, number=1.0)
        said[answer.interaction.interaction_id] = answer.interaction.completion
    with (
        dg.instance_for_test() as instance,  # the others' runs of a shop that failed are not here
        dg.build_sensor_context(
            instance=instance,
            instance_ref=instance.get_ref(),
            definitions=definitions(),
            resources={"pipeline": pipeline},
            sensor_name="enough_new_feedback",
        ) as context,
    ):
        sensor = definitions().resolve_sensor_def("enough_new_feedback")
        [request] = sensor.evaluate_tick(context).run_requests or []
    watermark = request.run_config["ops"]["feedback_snapshot"]["config"]["watermark"]
    taken = snapshot.take(pipeline.database, "shop", watermark, tmp_path / "feedback.parquet")
    frame = snapshot.read(taken.path)
    assert dict(zip(frame.interaction_id, frame.completion, strict=True)) == said
    assert set(frame.origin) == {"chat"}
