"""What the resource decides: whose settings hold, and when a version is promoted by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resources.pipeline import (
    LEARNING_RATE,
    MAX_STEPS,
    Pipeline,
    bootstrap_mark,
    code_version,
    count_lines,
    flattened,
)
from resources.worker import specification, turn_from
from rlhf_pipeline.errors import RegistryError
from rlhf_pipeline.registry.ledger import PromotionLedger
from rlhf_pipeline.stages import Turn
from tests.assets.world import write_recipe

PASSED = {"passed": True, "results": []}
REFUSED = {"passed": False, "results": []}


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "s", promotion={"automatic": False})
    return Pipeline(recipe=str(recipe))


def judged(pipeline: Pipeline, tmp_path: Path, gate: dict[str, Any]) -> Turn:
    """Return a turn of agent `a` whose version 1 the gate has judged."""
    pipeline.store.ensure_agent("a")
    claim = pipeline.claims.claim("a", "f" * 64, 1, holder="run", asked_by="person")
    ledger: PromotionLedger = pipeline.ledger
    common: dict[str, Any] = {"path": tmp_path, "lineage": {}, "token": claim.token}
    ledger.add_baseline("a", label="v0", files={"w": "0"}, actor="test", **common)
    ledger.add_version(
        "a", label="v1", files={"w": "1"}, gate=gate, fingerprint=claim.fingerprint, **common
    )
    return pipeline._turn(claim)


def test_an_agent_may_have_a_recipe_of_its_own(pipeline: Pipeline, tmp_path: Path) -> None:
    own = write_recipe(tmp_path / "own.yaml", tmp_path / "s", promotion={"automatic": True})
    pipeline.store.ensure_agent("own", recipe=str(own))
    pipeline.store.ensure_agent("plain")
    assert pipeline.settings("own").promotion.automatic
    assert not pipeline.settings("plain").promotion.automatic
    assert not pipeline.settings("never heard of").promotion.automatic


def test_a_run_may_be_asked_for_with_other_settings(pipeline: Pipeline) -> None:
    claim = pipeline.claims.claim("asked", "f" * 64, 1, holder="run", asked_by="api")
    plain = pipeline._turn(claim).settings
    turn = pipeline._turn(claim, {MAX_STEPS: "3", LEARNING_RATE: "0.0002", "other": "x"})
    ppo = turn.settings.ppo
    assert (ppo.updates, ppo.learning_rate) == (3, 0.0002)
    assert (plain.ppo.updates, plain.ppo.learning_rate) != (3, 0.0002)
    assert ppo.rollouts_per_update == plain.ppo.rollouts_per_update
    assert turn_from(specification(turn)).settings.ppo == ppo  # it reaches the stage's process


@pytest.mark.parametrize(
    ("gate", "automatic", "drifted", "words", "champion"),
    [
        (PASSED, None, False, "version 1 passed and waits for a person: rlhf promote 1", 0),
        (PASSED, True, False, "champion moved from 0 to 1", 1),
        (PASSED, True, True, "version 1 passed; feedback has drifted, so a person decides", 0),
        (PASSED, False, False, "version 1 passed and waits for a person", 0),
        (REFUSED, True, False, "version 1 was refused; version 0 stays", 0),
        (REFUSED, None, True, "version 1 was refused; version 0 stays", 0),
    ],
)
def test_who_promotes(
    pipeline: Pipeline,
    tmp_path: Path,
    gate: dict[str, Any],
    automatic: bool | None,
    drifted: bool,
    words: str,
    champion: int,
) -> None:
    turn = judged(pipeline, tmp_path, gate)
    pipeline.store.set_agent("a", automatic_promotion=automatic)
    assert pipeline.promote_if_due(turn, drifted=drifted).startswith(words)
    standing = pipeline.ledger.champion("a")
    assert standing is not None
    assert standing.version == champion


def test_a_person_decides_where_the_feedback_is_in_doubt(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    turn = judged(pipeline, tmp_path, PASSED)
    pipeline.store.set_agent("a", automatic_promotion=True)
    words = pipeline.promote_if_due(turn, drifted=False, doubts=["few raters gave most votes"])
    assert words == "version 1 passed; few raters gave most votes: a person decides"
    standing = pipeline.ledger.champion("a")
    assert standing is not None
    assert standing.version == 0


def test_promoting_needs_a_champion_to_replace(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.store.ensure_agent("a")
    claim = pipeline.claims.claim("a", "f" * 64, 1, holder="run", asked_by="person")
    with pytest.raises(RegistryError, match="found 0 versions and no champion of agent a"):
        pipeline.promote_if_due(pipeline._turn(claim), drifted=False)


def test_small_things(tmp_path: Path) -> None:
    assert flattened({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}
    (tmp_path / "f").write_text("one\ntwo\n")
    assert count_lines(tmp_path / "f") == 2
    assert bootstrap_mark("a") != bootstrap_mark("b")
    assert code_version() == "unknown" or len(code_version().split("+")[0]) >= 7
