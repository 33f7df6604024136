"""Which part may import which, and what loading the definitions costs."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = frozenset(
    "torch transformers great_expectations evidently mlflow peft trl datasets accelerate".split()
)
OURS = ("assets", "automation", "resources", "rlhf_pipeline")
SECONDS = 3.0  # DESIGN.md 2, on a quiet machine
BARE_GPU = frozenset("torch transformers peft accelerate numpy safetensors tokenizers".split())
COMES_WITH_TRANSFORMERS = frozenset({"jinja2", "yaml"})

LOADING = """
import json, sys, time
import {module} as loaded
{call}
print(json.dumps({{"seconds": time.process_time(), "modules": sorted(sys.modules)}}))
"""
ABSENT = frozenset(
    "dagster dagster_pipes mlflow trl datasets pydantic pydantic_core gymnasium matplotlib pandas "
    "sqlalchemy alembic fastapi starlette gradio typer rich optuna scipy sklearn evidently "
    "great_expectations tensorboard wandb".split()
)
BARE_RUN = """
import json, sys
for name in {absent}:
    sys.modules[name] = None  # as if it were not installed
from pathlib import Path
from rlhf_pipeline.policy.loading import save_policy
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.trainer import train_ppo
from rlhf_pipeline.records import user_prompt

folder = Path({folder!r})
said = ["tell me a tale", "why does it rain", "sing to me", "hello there"]
policy = build_tiny(said * 5, vocabulary=290, layers=1, width=16, heads=2, context=64, seed=0)
save_policy(policy, folder / "base")
made = {{}}
for name, changes in {{
    "plain": {{"critic": "separate"}},
    "lora": {{"lora_rank": 2, "gradient_checkpointing": True}},
    "rloo": {{"estimator": "rloo", "completions_per_prompt": 2}},
}}.items():
    settings = PpoSettings(
        updates=1, rollouts_per_update=4, epochs=1, minibatches=2, max_prompt_tokens=32,
        max_completion_tokens=4, learning_rate=1e-3, device="cpu", **changes,
    )
    result = train_ppo(
        policy_dir=folder / "base", reference_dir=folder / "base", settings=settings,
        reward=lambda items: [float(len(item.completion)) for item in items], stopping=None,
        prompts=[user_prompt(text) for text in said], watch_prompts=[user_prompt("hello")],
        output_dir=folder / name,
    )
    made[name] = result.updates
print(json.dumps(made))
"""


def files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def imports(path: Path, *, inside_functions: bool = True) -> Iterator[str]:
    """Yield the full name of every module a file imports (type checking alone is left out)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    nodes = ast.walk(tree) if inside_functions else ast.iter_child_nodes(tree)
    for node in nodes:
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""


def offenders(paths: list[Path], forbidden: frozenset[str] | set[str]) -> dict[str, list[str]]:
    """Return {file: modules} for files that import what they should not."""
    found = {
        path.relative_to(ROOT).as_posix(): sorted(
            {name for name in imports(path) if name.split(".")[0] in forbidden}
        )
        for path in paths
    }
    return {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("module", "call"),
    [("rlhf_pipeline.definitions", "loaded.definitions()"), ("rlhf_pipeline.cli", "")],
)
def test_loading_is_quick_and_imports_nothing_heavy(module: str, call: str) -> None:
    code = LOADING.format(module=module, call=call)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{module}: {said['seconds']:.2f} s of CPU, {SECONDS} s allowed\n")
    assert not HEAVY & {name.split(".")[0] for name in said["modules"]}
    assert said["seconds"] < 2 * SECONDS  # CPU seconds of a machine that others use too


def test_the_engine_imports_no_dagster_and_nothing_above_it() -> None:
    engine = [p for p in files("rlhf_pipeline") if p.name != "definitions.py"]
    assert len(engine) > 50
    above = {"assets", "automation", "resources"}
    found = offenders(engine, {"dagster", "dagster_pipes", *above})
    # The command line is above resources, like the definitions.
    commands = {p: n for p, n in found.items() if p.startswith("rlhf_pipeline/commands/")}
    assert {p: n for p, n in found.items() if p not in commands} == {}
    assert not any("dagster" in name for names in commands.values() for name in names)


def test_arrows_between_the_layers_point_one_way() -> None:
    assert offenders(files("resources"), {"assets", "automation"}) == {}
    assert offenders(files("assets"), {"automation"}) == {}


def test_only_the_registry_imports_mlflow() -> None:
    found = offenders(files(*OURS), {"mlflow"})
    assert found  # the registry does
    assert all(path.startswith("rlhf_pipeline/registry/") for path in found), found


def test_only_serving_imports_fastapi() -> None:
    found = offenders(files(*OURS), {"fastapi", "starlette", "gradio", "uvicorn"})
    door = found.pop("automation/dagster_page.py")  # of Dagster's page, which is Starlette's
    assert all(name.startswith("starlette.") for name in door), door
    assert all(path.startswith("rlhf_pipeline/serving/") for path in found), found


def test_ppo_can_be_lifted_onto_a_bare_gpu_machine() -> None:
    ppo = files("rlhf_pipeline/ppo")
    used = {p.with_suffix("").relative_to(ROOT).as_posix().replace("/", "."): p for p in ppo}
    queue = list(ppo)
    while queue:  # everything of ours that it reaches
        for name in imports(queue.pop()):
            path = ROOT / f"{name.replace('.', '/')}.py"
            if name.startswith("rlhf_pipeline") and path.exists() and name not in used:
                used[name] = path
                queue.append(path)
    parts = {name.split(".")[1] for name in used}
    assert parts == {"ppo", "policy", "evaluation", "records", "errors", "fence", "files"}
    # Of evaluation only what counts repetition in texts: numpy and no models.
    assert [n for n in used if ".evaluation." in n] == ["rlhf_pipeline.evaluation.metrics"]
    allowed = BARE_GPU | COMES_WITH_TRANSFORMERS | sys.stdlib_module_names | {"rlhf_pipeline"}
    outside = {
        (path.name, name)
        for path in used.values()
        for name in imports(path)
        if name.split(".")[0] not in allowed
    }
    # Plots are drawn where matplotlib is, DPO goes through TRL, intervals, of which PPO has none,
    # through scipy: each is imported inside the function that needs it. Conversations of several
    # turns need gymnasium, which their environment alone imports.
    later = {"matplotlib", "trl", "datasets", "scipy"}
    assert {name.split(".")[0] for _, name in outside} <= {*later, "gymnasium"}
    assert {file for file, name in outside if name.startswith("gymnasium")} == {"environment.py"}
    for path in used.values():
        at_the_top = set(imports(path, inside_functions=False))
        assert not later & {name.split(".")[0] for name in at_the_top}, path
        assert "rlhf_pipeline.ppo.environment" not in at_the_top, path


@pytest.mark.slow
def test_ppo_trains_where_torch_and_transformers_are_all_there_is(tmp_path: Path) -> None:
    code = BARE_RUN.format(absent=sorted(ABSENT), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"plain": 1, "lora": 1, "rloo": 1}


def test_nothing_shadows_the_mlflow_library() -> None:
    assert (ROOT / "mlflow").is_dir()
    assert list((ROOT / "mlflow").rglob("*.py")) == []


def test_our_top_level_names_are_ours_alone() -> None:
    owners = importlib.metadata.packages_distributions()
    assert "rlhf-pipeline" not in owners.get("mlflow", [])
    others = {n: set(owners.get(n, [])) - {"rlhf-pipeline"} for n in OURS}
    assert others == {name: set() for name in OURS}
    try:
        importlib.metadata.distribution("rlhf-pipeline")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this project is not installed here; nothing else claims its names")
    assert all("rlhf-pipeline" in owners.get(name, []) for name in OURS)
