"""Our own server as a judge: it is reached, and its nonsense is a skip and never a grade."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rlhf_pipeline.database import Database
from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import write_json
from rlhf_pipeline.records import RewardInput, hashed, prompt_to_json, user_prompt
from rlhf_pipeline.reward.composite import SOME, CompositeReward, Term
from rlhf_pipeline.reward.judge import JudgeReward
from rlhf_pipeline.reward.verdicts import TRIES, Verdicts
from tests.serving.pages.world import free_port, made_desk, served

pytestmark = pytest.mark.slow

RUBRIC = "Is it kind to the customer?"
ITEMS = [RewardInput(user_prompt("how much?"), text) for text in ("9 coins.", "Go away.")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """`rlhf serve` as a process, with a champion that was never taught; its address and state."""
    state = tmp_path_factory.mktemp("judge") / "state"
    made_desk(state).store.database.close()
    port = free_port()
    command = ["rlhf_pipeline.cli", "--state", str(state), "serve", "--port", str(port)]
    with served([*command, "--no-pages"], port):
        yield f"http://127.0.0.1:{port}/v1", state


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let judges ask for sampled text: at temperature 0 an untaught model says nothing at all."""
    asked = Verdicts._request

    def sampled(self: Verdicts[int], *about: Any) -> dict[str, Any]:
        return {**asked(self, *about), "temperature": 1.0, "seed": 7}

    monkeypatch.setattr(Verdicts, "_request", sampled)


def judge(url: str, **options: Any) -> JudgeReward:
    return JudgeReward(url, model="shop", rubric=RUBRIC, attempts=1, **options)


def heard(state: Path) -> list[str]:
    """Return the conversations that the server answered."""
    database = Database(f"sqlite:///{state}/feedback.db")
    with database.read() as connection:
        found = connection.exec_driver_sql("SELECT prompt FROM interactions").scalars().all()
    database.close()
    return [str(one) for one in found]


def test_nonsense_is_a_skip_that_is_counted_and_never_a_grade(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    url, state = server
    skips = judge(url, structured=False, on_failure="skip", cache=str(tmp_path))
    assert all(math.isnan(score) for score in skips(ITEMS))
    asked = [one for one in heard(state) if RUBRIC in one]
    assert len(asked) == TRIES * len(ITEMS)  # it read the rubric each time, and answered
    assert list(tmp_path.rglob("*.json")) == []  # and no verdict was kept of that
    composite = CompositeReward({"judge": Term(skips)})
    with pytest.raises(ModelError, match="found all skipped"):
        composite(ITEMS * (SOME // len(ITEMS)))
    key = hashed(skips.version, prompt_to_json(ITEMS[0].prompt), ITEMS[0].completion)
    write_json(tmp_path / key[:2] / f"{key}.json", {"score": 5})  # as of an earlier, sound verdict
    composite.begin_update(0)
    assert [one.score for one in composite.judge(ITEMS)] == [1, 1]  # the mean of what was judged
    assert composite.end_update(list)["judge/skipped"] == 0.5
    with pytest.raises(ModelError, match="found something else 2 times"):
        judge(url, structured=False)(ITEMS)


def test_what_the_server_cannot_do_is_refused_by_name_and_no_grade_either(
    server: tuple[str, Path],
) -> None:
    url, _ = server
    with pytest.raises(ModelError, match="must answer 200, found status 4"):
        judge(url)(ITEMS)
    assert all(math.isnan(score) for score in judge(url, on_failure="skip")(ITEMS))


def test_openais_client_reaches_the_same_judge(server: tuple[str, Path]) -> None:
    request = judge(server[0], structured=False)._verdicts._request(
        lambda mark: RUBRIC, {"answer": ITEMS[0].completion}
    )
    with openai.OpenAI(base_url=server[0], api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(**request)
    assert isinstance(reply.choices[0].message.content, str)
