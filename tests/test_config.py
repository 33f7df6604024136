"""Settings: what is unknown is named, what is shared is said once, what is secret stays so."""

from __future__ import annotations

import ast
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from rlhf_pipeline.config import (
    PPO_PRESETS,
    PRESETS,
    RECIPES,
    SHARED_WITH_PPO,
    KeptSettings,
    Settings,
    load_settings,
    recipe_names,
    shown,
    unlike_defaults,
)
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.files import sqlite_path
from rlhf_pipeline.reward.settings import PRESETS as REWARD_PRESETS
from rlhf_pipeline.reward.settings import FunctionSettings, Linear, Stepped


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RECIPE", "STATE_DIR", "DATABASE_URL", "MLFLOW_URI", "WEBHOOK"):
        monkeypatch.delenv(f"RLHF_{name}", raising=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return write


# -- recipes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.y*ml")), ids=lambda path: path.stem)
def test_every_recipe_parses_and_its_lengths_fit_a_microbatch(path: Path) -> None:
    settings = load_settings(path)
    longest = settings.policy.max_prompt_tokens + settings.policy.max_completion_tokens
    assert settings.ppo.tokens_per_microbatch >= longest
    assert path.read_text().startswith("# ")  # what `rlhf config recipes` shows


def test_recipes_are_listed_smallest_model_first() -> None:
    larger = ["gpt2", "qwen2.5-0.5b", "phi-2", "llama-2-7b-chat"]
    assert recipe_names() == ["tiny", "specialists", *larger]


@pytest.mark.parametrize("context", [("gpt2", 1024), ("phi-2", 2048), ("llama-2-7b-chat", 4096)])
def test_hub_recipes_fit_their_models_context(context: tuple[str, int]) -> None:
    policy = load_settings(context[0]).policy
    assert policy.max_prompt_tokens + policy.max_completion_tokens <= context[1]


def test_large_models_train_adapters_and_share_the_trunk() -> None:
    for name in ("phi-2", "llama-2-7b-chat"):
        settings = load_settings(name)
        assert settings.ppo.lora_rank == settings.policy.lora.rank == 16
        assert settings.ppo.precision == "bfloat16"
        assert settings.ppo.critic == "shared"
        assert not settings.promotion.automatic


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff", b"a: [", b"- a"])
def test_what_is_no_recipe_is_refused_with_its_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "odd.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        load_settings(path)


def test_a_recipe_that_is_not_there_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"known: tiny, .*did you mean 'phi-2'"):
        load_settings("phi2")


@pytest.mark.parametrize("text", ["- a", "just words", "{"])
def test_a_file_that_holds_no_settings_is_refused(recipe: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load_settings(recipe(text))


def test_an_empty_recipe_is_the_defaults(recipe: Any) -> None:
    found = load_settings(recipe(""))
    assert found.policy == Settings().policy
    assert found.ppo.max_prompt_tokens == found.policy.max_prompt_tokens


# -- unknown keys -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("polcy: {base: tiny}", "'policy'"),
        ("policy: {bas: tiny}", "'policy.base'"),
        ("policy: {lora: {rnk: 3}}", "'policy.lora.rank'"),
        ("training: {sed: 3}", "'training.seed'"),  # and not ppo.seed, which is refused
        ("ppo: {updats: 3}", "'ppo.updates'"),
        ("ppo: {kl_coeff: 0.1}", "'ppo.kl_coef'"),
        ("ppo: {lr: 0.1}", "'ppo.learning_rate'"),
        ("ppo: {max_prompt_token: 9}", "'policy.max_prompt_tokens'"),
        ("kl_coef: 0.1", "'ppo.kl_coef'"),
        ("preset: quick", "'presets'"),
        ("ppo: {presets: aggressive}", "'ppo.preset'"),
        ("reward: {shares: {proxi: 1}}", "'reward.shares.proxy'"),
        ("learning_rate: 1", "'sft.learning_rate' or 'reward.learning_rate' or 'ppo.lea"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_right_one(
    recipe: Any, text: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match="unknown setting") as caught:
        load_settings(recipe(text))
    assert f"the nearest right one is {nearest}" in str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_every_mistake_is_told_at_once(recipe: Any) -> None:
    text = """
        presets: [quik]
        policy: {bas: tiny}
        sft: {epochs: 0, batchsize: 3}
        retention: {traces: {newest: 3, days: 3}}
        reward: {preset: best}
        ppo: {preset: bold, seed: 1, updats: 3, epochs: 0, tokens_per_microbatch: 0}
    """
    with pytest.raises(ConfigError) as caught:
        load_settings(recipe(text))
    for words in (
        "(1) presets knows quick, production, memory-constrained, found 'quik'",
        "ppo.preset knows conservative, aggressive, found 'bold'",
        "reward.preset knows empathy",
        "unknown setting 'policy.bas'; the nearest right one is 'policy.base'",
        "unknown setting 'sft.batchsize'",
        "sft.epochs: Input should be greater than 0, found 0",
        "traces.days must be 30 or more, found 3",
        "ppo.seed follows training.seed",
        "unknown setting 'ppo.updats'",
        "(10) ppo.epochs must be at least 1: found 0",
    ):
        assert str(caught.value).count(words) == 1, words


def test_what_does_not_go_together_is_told_at_once(recipe: Any) -> None:
    text = "ppo: {minibatches: 3, estimator: rloo, tokens_per_microbatch: 9}\npolicy: {bas: tiny}"
    with pytest.raises(ConfigError) as caught:
        load_settings(recipe(text))
    for words in ("take a multiple of 3", "at least 2, found 1", "= 144, found 9", "policy.bas"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="max_turns above 1") as caught:
        load_settings(
            recipe(
                "ppo: {estimator: dpo}\nreward: {functions: {length: 1}}"
                "\ntraining: {simulated_user: 'shop'}"
            )
        )
    assert "(1) reward.functions are for what samples completions" in str(caught.value)


def test_one_mistake_is_not_told_as_another(recipe: Any) -> None:
    text = "policy: {max_prompt_tokens: 20, max_completion_tokens: 20, temperature: x}"
    with pytest.raises(ConfigError) as caught:
        load_settings(recipe(text + "\nppo: {tokens_per_microbatch: 40}"))
    assert "microbatch" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ppo: {updates: 0}", "ppo.updates must be at least 1"),
        ("ppo: {rollouts_per_update: 7}", "take a multiple of 4"),
        ("ppo: {tokens_per_microbatch: 10}", "= 144, found 10"),
        ("ppo: 3", "must hold settings by name, found 3"),
        ("policy: 3", "policy: Input should be a valid dictionary"),
        ("reward: {kinds: [thumbs]}", "by name (`name: value`), found ['thumbs']"),
        ("feedback: {evaluation_share: 1.0}", "evaluation_share: Input should be less than 1"),
        ("policy: {temperature: 1.0e-20}", "temperature: Input should be greater than or equal to"),
        ("promotion: {gate: {kl_stop: off}}", "promotion.gate.kl_stop: needed a number, found f"),
        ("promotion: {watch_days: no}", "promotion.watch_days: needed a number, found false"),
        ("ppo: {updates: yes}", "ppo.updates: needed a number, found true, as YAML reads on or y"),
        ("experiments: {ramp: [0.1, on]}", "experiments.ramp.1: Input should be less than 1"),
        ("policy: {tiny: {width: 130, heads: 4}}", "take a multiple of 8"),
        ("policy: {tiny: {context: 32}}", "max_completion_tokens = 144, found 32"),
        ("reward: {shares: {proxy: 0.9}}", "sum to 1, found 1.3"),
        ("reward: {shares: {proxy: 1.0, stopping: 0, gate: 0}}", "must be positive"),
        ("reward: {reads: first}", "reward: reads first needs a base of its own, an encoder"),
        ("drift: {threshold_psi: .inf}", "finite"),
        ("promotion: {gate: {win_rate: 0.5}}", "the nearest right one is 'win_rate_vs_champion'"),
        ("feedback: {names: {columns: {promt: Q}}}", "needed fields out of"),
        ("feedback: {names: {fixed: {kind: thumbs}}}", "columns by which such a file is known"),
        ("policy: {device: foo}", "policy.device"),
        ("policy: {device: 'cuda:x'}", "policy.device"),
        ("policy: {device: ''}", "policy.device"),
        ("training: {seed: 2147483648}", "training.seed: Input should be less than 2147483648"),
        ("presets: quick", r"write [quick]"),
        ("ppo: {preset: [quick]}", "found ['quick']"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_needed(recipe: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(recipe(text))
    assert words in str(caught.value)


def test_a_list_whose_only_value_is_wrong_is_not_called_empty_too(recipe: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(recipe("experiments: {ramp: [1.5]}"))
    assert str(caught.value).endswith("experiments.ramp.0: Input should be less than 1, found 1.5")


def test_what_is_on_or_off_is_set_with_words(recipe: Any) -> None:
    settings = load_settings(recipe("{experiments: {enabled: on}, ppo: {anneal: no}}"))
    assert settings.experiments.enabled
    assert not settings.ppo.anneal


def test_a_gate_rule_can_be_switched_off(recipe: Any) -> None:
    gate = load_settings(recipe("promotion: {gate: {perplexity: null, diversity: .inf}}")).promotion
    assert gate.gate == {"perplexity": None, "diversity": None}  # as JSON can say it
    with pytest.raises(ConfigError, match="found nan; correct it or set null for off"):
        load_settings(recipe("promotion: {gate: {diversity: .nan}}"))


# -- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_holds_only_known_settings(recipe: Any, name: str) -> None:
    resolved = load_settings(recipe(f"presets: [{name}]")).model_dump()
    for section, values in PRESETS[name].items():
        for key, value in values.items():
            found = resolved[section][key]
            assert found == value or (isinstance(value, dict) and value.items() <= found.items())


@pytest.mark.parametrize("name", PPO_PRESETS)
def test_every_ppo_preset_holds_only_known_settings(recipe: Any, name: str) -> None:
    ppo = load_settings(recipe(f"ppo: {{preset: {name}}}")).ppo
    assert {key: getattr(ppo, key) for key in PPO_PRESETS[name]} == PPO_PRESETS[name]


def test_later_presets_win_and_the_recipe_wins_over_all(recipe: Any) -> None:
    found = load_settings(
        recipe("presets: [quick, production]\nppo: {preset: aggressive, epochs: 3}")
    )
    assert found.evaluation.prompts == 1000  # production, named later than quick
    assert found.ppo.updates == 12  # quick; production says nothing
    assert (found.ppo.kl_coef, found.ppo.epochs) == (0.01, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("presets: [quik]", "the nearest right one is 'quick'"),
        ("presets: [conservative]", "is 'conservative' under ppo.preset"),
        ("ppo: {preset: quick}", "is 'quick' under presets"),
        ("ppo: {preset: agressive}", "is 'aggressive'"),
    ],
)
def test_an_unknown_preset_is_answered_with_the_nearest(recipe: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(recipe(text))
    assert words in str(caught.value)


# -- what stages share --------------------------------------------------------------------------


@pytest.mark.parametrize("key", SHARED_WITH_PPO)
def test_what_ppo_shares_is_set_where_all_stages_read_it(recipe: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=f"ppo.{key} follows {SHARED_WITH_PPO[key]}"):
        load_settings(recipe(f"ppo: {{{key}: 1}}"))


def test_no_message_names_a_setting_that_a_recipe_may_not_hold() -> None:
    refused = re.compile(rf"\bppo\.({'|'.join(SHARED_WITH_PPO)})\b")
    named = [
        (path.name, node.value)
        for path in (RECIPES.parent / "rlhf_pipeline").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and refused.search(str(node.value))
    ]
    assert named == []


def test_ppo_follows_policy_and_training(recipe: Any) -> None:
    ppo = load_settings(
        recipe(
            "policy: {max_prompt_tokens: 70, temperature: 0.5, device: cpu, dtype: bfloat16,"
            " lora: {enabled: true, rank: 4, alpha: 8}}\ntraining: {seed: 11}"
        )
    ).ppo
    assert (ppo.max_prompt_tokens, ppo.temperature, ppo.seed) == (70, 0.5, 11)
    assert (ppo.precision, ppo.device, ppo.lora_rank, ppo.lora_alpha) == ("bfloat16", "cpu", 4, 8)


# -- environment, overrides, secrets ------------------------------------------------------------


def test_the_environment_wins_over_the_recipe_and_overrides_over_both(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = recipe("state_dir: /from/recipe\nmlflow_uri: http://recipe")
    assert load_settings(path).state_dir == Path("/from/recipe")
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql://me:pass@db/rlhf")
    monkeypatch.setenv("RLHF_MLFLOW_URI", "http://environment")
    monkeypatch.setenv("RLHF_WEBHOOK", "https://hooks.example/abc")
    found = load_settings(path)
    assert found.state_dir == tmp_path
    assert found.resolved_database_url == "postgresql://me:pass@db/rlhf"
    assert found.resolved_mlflow_uri == "http://environment"
    assert found.notifications.webhook is not None
    assert load_settings(path, {"state_dir": "/from/override"}).state_dir == Path("/from/override")
    monkeypatch.setenv("RLHF_RECIPE", str(path))
    assert load_settings().recipe == str(path)


def test_embedded_state_lives_in_one_absolute_folder(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = load_settings(recipe("state_dir: ~/rlhf"))
    assert found.state_dir == tmp_path / "rlhf"
    assert found.resolved_database_url == f"sqlite:///{tmp_path}/rlhf/feedback.db"
    assert found.resolved_mlflow_uri == f"sqlite:///{tmp_path}/rlhf/mlflow/mlflow.db"
    assert found.agent_folder("tea") == tmp_path / "rlhf" / "agents" / "tea"
    assert load_settings(recipe("")).state_dir == Path.cwd() / "state"


@pytest.mark.parametrize("name", ["50%41", "why?x=1", "no #1", "plain, ünd more"])
def test_embedded_state_lies_in_its_folder_whatever_its_name(name: str, tmp_path: Path) -> None:
    found = Settings(state_dir=tmp_path / name)
    file, tracking = tmp_path / name / "feedback.db", tmp_path / name / "mlflow" / "mlflow.db"
    assert sa.engine.make_url(found.resolved_database_url).database == str(file)
    assert sa.engine.make_url(found.resolved_mlflow_uri).database == str(tracking)
    assert sqlite_path(found.resolved_mlflow_uri) == tracking


def test_no_empty_store_is_begun_beside_one_that_lies_elsewhere(tmp_path: Path) -> None:
    found, former = Settings(state_dir=tmp_path / "50%41"), tmp_path / "50A" / "feedback.db"
    former.parent.mkdir()
    former.touch()  # another's
    assert found.resolved_database_url.endswith("50%2541/feedback.db")
    with closing(sqlite3.connect(former)) as database:
        database.execute("CREATE TABLE feedback (seq INTEGER)")
    told = f"needed the database {found.state_dir}/feedback.db, found {former}, where"
    with pytest.raises(ConfigError, match=re.escape(told)):
        _ = found.resolved_database_url
    found.state_dir.mkdir()
    former.rename(found.state_dir / "feedback.db")
    assert sqlite_path(found.resolved_database_url) == found.state_dir / "feedback.db"


def test_secrets_are_masked_wherever_settings_are_shown(recipe: Any) -> None:
    found = load_settings(
        recipe(
            "database_url: postgresql://me:hunter2@db/rlhf\n"
            "mlflow_uri: https://me:hunter2@mlflow.example/path\n"
            "notifications: {webhook: 'https://hooks.example/hunter2'}"
        )
    )
    said = yaml.safe_dump(shown(found))
    assert "hunter2" not in said + repr(found.database_url) + repr(found.notifications)
    assert shown(found)["mlflow_uri"] == "https://me:**********@mlflow.example/path"
    assert found.resolved_mlflow_uri == "https://me:hunter2@mlflow.example/path"
    unescaped = found.model_copy(update={"mlflow_uri": "https://me@work:hunter@2@mlflow.example/"})
    assert shown(unescaped)["mlflow_uri"] == "https://me@work:**********@mlflow.example/"


@pytest.mark.parametrize("text", ["notifications: hunter2", "database_url: [hunter2]"])
def test_a_message_about_a_secret_does_not_tell_it(recipe: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(recipe(text))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "place"),
    [("RLHF_DAGSTER_URL", "training.dagster_url"), ("RLHF_MLFLOW_URL", "pages.mlflow_url")],
)
def test_an_address_that_pages_show_holds_no_password(
    monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    for told, found in {
        "http://me:hunter2@there:3000": "http://me:**********@there:3000",
        "http://me@there": "http://me@there",
        "http:///path": "http:///path",
    }.items():
        monkeypatch.setenv(name, told)
        with pytest.raises(ConfigError) as refused:
            load_settings("tiny")
        assert f"{place}: String should match pattern" in str(refused.value)
        assert str(refused.value).endswith(f"found {found!r}")
    monkeypatch.setenv(name, "https://there/below/")
    assert load_settings("tiny")


# -- what would stop the loop ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["0 2 * * *", "*/15 0-6,22 * * *", "0 9-17/2 1,15 jan-mar MON-fri", "5 04 29 2 7", "@daily"],
)
def test_what_a_cron_line_is_dagster_takes_too(recipe: Any, line: str) -> None:
    from dagster._utils.schedules import is_valid_cron_string

    rules = load_settings(recipe(f"continuous_learning: {{nightly_cron: '{line}'}}"))
    assert rules.continuous_learning.nightly_cron == line
    assert is_valid_cron_string(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 2 * *", "needed five fields, .*found '0 2 . .'"),
        ("0 0 2 * * *", "needed five fields"),
        ("60 2 * * *", "needed minutes from 0 to 59, .*found '60'"),
        ("0 22-2 * * *", "needed hours from 0 to 23, .*a rising range"),
        ("*/0 2 * * *", "found './0'"),
        ("0 2 * foo *", "needed months from 1 to 12"),
        ("0 2 , * *", "needed days from 1 to 31"),
        ("0 2 30 2 *", "needed a day that its months have"),
        ("@nightly", "needed five fields"),
    ],
)
@pytest.mark.parametrize("place", ["continuous_learning: {nightly_cron", "retention: {cron"])
def test_a_line_that_is_no_cron_is_refused_before_dagster_sees_it(
    recipe: Any, place: str, line: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(recipe(f"{place}: '{line}'}}"))


@pytest.mark.parametrize(
    "address",
    [
        "hooks.example/hunter2",
        "https://me:hunter2@hooks.example/x",
        "http://[::1/hunter2",
        "https://hooks.example:8o80/hunter2",
        "https://.example/hunter2",
        f"https://{64 * 'a'}.example/hunter2",
        "https://hooks.example/hünter2-hunter2",
        "https://hooks.example/hunter2 x",
        "https:///hunter2",
    ],
)
def test_a_webhook_that_is_no_address_is_refused_and_not_told(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Each tick would fail at it, with the address in its error."""
    monkeypatch.setenv("RLHF_WEBHOOK", address)
    with pytest.raises(ConfigError, match=r"notifications\.webhook: needed an address") as caught:
        load_settings(recipe(""))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "continuous_learning: {cool_down_minutes: 1.0e+300}",
        "experiments: {days: 1.0e+300}",
        "experiments: {days: 0}",
        "experiments: {minutes_per_step: 1.0e+300}",
        "continuous_learning: {min_age_seconds: 1.0e+300}",
        "continuous_learning: {deadline_minutes: 9999999999999}",
        "alerts: {quiet_hours: 1.0e+300}",
        "alerts: {overdue_days: 1.0e+300}",
        "retention: {turns: {newest: 1, days: 1000000}}",
    ],
)
def test_a_time_that_no_calendar_holds_is_refused(recipe: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"less than or equal to|greater than 0"):
        load_settings(recipe(text))


def test_what_a_recipe_has_otherwise_is_told_by_name(recipe: Any) -> None:
    text = """
        policy: {max_prompt_tokens: 50}
        reward: {kinds: {preference: 1.0}, functions: {length: 0.5}}
        ppo: {updates: 3, epochs: 4}
        retention: {turns: {newest: 3, days: 5}}
    """
    assert unlike_defaults(shown(Settings())) == {}
    tree = shown(load_settings(recipe(text)))
    found = unlike_defaults({**tree, "of_an_older_release": {"on": True}})
    functions = found.pop("reward.functions")
    assert functions == tree["reward"]["functions"]
    assert found == {
        "policy.max_prompt_tokens": 50,  # not under ppo as well
        "reward.kinds": {"preference": 1.0},  # whole: what is missing in it is a difference too
        "ppo.updates": 3,
        "retention.turns.days": 5.0,
        "of_an_older_release": {"on": True},
    }


def test_of_what_is_kept_a_recipe_may_name_one_number(recipe: Any) -> None:
    usual = Settings().retention
    found = load_settings(recipe("retention: {turns: {days: 5}, runs: {newest: 2}}")).retention
    assert found.turns == KeptSettings(newest=usual.turns.newest, days=5)
    assert found.runs == KeptSettings(newest=2, days=usual.runs.days)
    assert (found.traces, found.rewards) == (usual.traces, usual.rewards)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().__setattr__("recipe", "other")


def test_functions_that_no_turn_could_ask_are_refused_before_one_begins(recipe: Any) -> None:
    turns = "training: {simulated_user: shop}\nppo: {max_turns: 2}\n"
    with pytest.raises(ConfigError, match=r"of first turns alone, found ppo\.max_turns 2"):
        load_settings(recipe(f"{turns}reward: {{functions: {{rouge-l: {{weight: 1}}}}}}"))
    load_settings(recipe(f"{turns}reward: {{functions: {{distinct-1: {{weight: 1}}}}}}"))
    helpful = "reward: {functions: {'learned:helpful': {weight: 1}}, kinds: {%s}}"
    with pytest.raises(ConfigError, match=r"found none in reward\.kinds .thumbs.; give criteria"):
        load_settings(recipe(helpful % "thumbs: 1"))
    load_settings(recipe(helpful % "criteria: 1"))


def test_conversations_of_several_turns_and_their_user_are_set_together(recipe: Any) -> None:
    both = "training: {simulated_user: shop}\nppo: {max_turns: 3}\n"
    assert load_settings(recipe(both)).ppo.max_turns == 3
    for one in both.splitlines():
        with pytest.raises(ConfigError, match="come together"):
            load_settings(recipe(one))


# -- reward functions ---------------------------------------------------------------------------


def test_reward_functions_are_read_as_people_write_them(recipe: Any) -> None:
    text = """
reward:
  functions:
    learned: {normalisation: running}
    empathy: 0.3
    length: {weight: {start: 0, end: 1, updates: 5}, options: {longest: 40}, floor: 0.1}
    mine: {function: "tests.reward.test_composite:letters", weight: {steps: {0: 1, 3: 2}}}
    size: {function: "tests.reward.test_composite:letters", normalisation: [0, 100]}
"""
    settings = load_settings(recipe(text))
    functions = settings.reward.functions
    assert functions["learned"] == FunctionSettings(weight=1, normalisation="running")
    assert functions["empathy"].weight == 0.3
    assert functions["length"].weight == Linear(0, 1, 5)
    assert functions["mine"].weight == Stepped({0: 1, 3: 2})
    assert functions["size"].fixed_range == (0, 100)
    assert shown(settings)["reward"]["functions"]["mine"]["weight"] == {"steps": {"0": 1, "3": 2}}


@pytest.mark.parametrize("name", REWARD_PRESETS)
def test_every_reward_preset_can_be_trained_with(recipe: Any, name: str) -> None:
    functions = load_settings(recipe(f"reward: {{preset: {name}}}")).reward.functions
    assert functions.keys() == REWARD_PRESETS[name].keys()


def test_a_recipe_changes_a_preset_and_leaves_parts_of_it_out(recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "{learned: 2, empathy: {weight: 0.5, floor: 0.1}, length: 1}"
    )
    text = "reward: {preset: own.yaml, functions: {empathy: 0.7, length: null, safety: 1}}"
    functions = load_settings(recipe(text)).reward.functions
    assert {name: one.weight for name, one in functions.items()} == {
        "learned": 2,
        "empathy": 0.7,
        "safety": 1,
    }
    assert functions["empathy"].floor == 0.1


@pytest.mark.parametrize("model", ["shop-{ver}", "shop-{version", "{version}-{}"])
def test_an_upstreams_model_has_no_other_braces(model: str) -> None:
    there = {"shop": {"url": "http://127.0.0.1:9/v1", "model": model}}
    with pytest.raises(ConfigError, match=r"no brace but those of \{version\}, found"):
        load_settings("tiny", {"serving": {"upstreams": there}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("functions: {empthy: 1}", r"needed a reward's name \(distinct-1, .*empathy.*'empthy'"),
        ("functions: {x: {function: 'no_module:f'}}", "in the module 'no_module', found none"),
        ("functions: {length: {options: {short: 1}}}", "takes the options shortest, longest"),
        ("functions: {learned: {options: {short: 1}}}", "takes no options"),
        (
            "functions: {x: {function: '.'}}",
            r"a reward model is needed at \., found no reward_model",
        ),
        ("functions: {length: {weight: {from: 1}}}", "must be a number, {start, end, updates}"),
        ("functions: {length: {weight: {steps: {4: 1}}}}", "numbers from update 0 on"),
        ("functions: {length: {normalisation: [1, 0]}}", "a range .low, high. that rises"),
        ("functions: {length: {wait: 1}}", "unknown setting 'reward.functions.length.wait'"),
        ("functions: {a/b: 1}", "match pattern"),
        ("functions: {learned: 0}", "weights of 0 alone"),
        ("preset: empathic", "knows empathy, .*nearest right one is 'empathy'"),
        ("preset: nowhere.yaml", "needs a YAML file"),
    ],
)
def test_a_reward_function_nobody_knows_is_refused_at_load(
    recipe: Any, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(recipe(f"reward: {{{text}}}"))


@pytest.mark.parametrize(
    "text",
    [
        "reward: {functions: {'https://reward.example/s?token=hidden': 1}}",
        "reward: {preset: empathy, functions: {'http://reward.example/s?token=hidden': {}}}",
        "specialists: {kind: {functions: {'https://reward.example/s?token=hidden': null}}}",
    ],
)
def test_an_address_is_no_name_of_a_function_and_is_not_shown(recipe: Any, text: str) -> None:
    """It would be in every metric's name; and its query may hold a secret."""
    with pytest.raises(ConfigError, match=r"found an address; name it yourself") as refused:
        load_settings(recipe(text))
    assert "hidden" not in str(refused.value)


def test_a_preset_that_is_no_text_is_refused_like_one_that_is_not_there(
    recipe: Any, tmp_path: Path
) -> None:
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="needs a YAML file"):
        load_settings(recipe("reward: {preset: odd.yaml}"))


def test_functions_that_dpo_would_not_maximise_are_refused(recipe: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions are for what samples"):
        load_settings(recipe("{ppo: {estimator: dpo}, reward: {functions: {length: 1}}}"))


def test_several_heads_read_a_frozen_trunk() -> None:
    with pytest.raises(ConfigError, match="several heads need freeze_trunk true, found 3 heads"):
        load_settings("tiny", {"reward": {"heads": 3}})
    kinds = {"preference": 1, "thumbs": 1}
    for changes in ({}, {"kinds": kinds}):
        reward = {"heads": 3, "freeze_trunk": True, **changes}
        assert load_settings("tiny", {"reward": reward}).reward.heads == 3
