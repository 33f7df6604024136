"""The README and its guides are true: commands, links and pictures exist, the tree is the tree."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
from typer.main import get_command

from rlhf_pipeline.cli import app
from rlhf_pipeline.config import recipe_names
from rlhf_pipeline.feedback.sources import read
from rlhf_pipeline.records import Feedback, FeedbackKind, QuarantinedRow

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
TOLD = "\n".join([README, *GUIDES.values()])
PACKAGES = ("rlhf_pipeline", "assets", "automation", "resources", "benchmarks")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def tree_paths() -> list[str]:
    """Return every path of the tree, its folders put back together."""
    (tree,) = [block for block in blocks("text") if block.startswith("rlhf_pipeline/")]
    found: list[str] = []
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders = [*folders[:depth], name]
        found.append("".join(folders))
    return found


def test_every_path_of_the_tree_exists() -> None:
    missing = [path for path in tree_paths() if not (ROOT / path).exists()]
    assert len(tree_paths()) > 60
    assert missing == []


def test_every_module_stands_in_the_tree() -> None:
    told = set(tree_paths())
    modules = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" and "migrations" not in path.parts
    ]
    assert [module for module in modules if module not in told] == []


def headings(page: Path) -> set[str]:
    """Return a page's headings as links name them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", TOLD))
    assert {"demo", "test", "check", "ui", "train"} <= named
    assert named <= targets


def test_every_rlhf_command_exists() -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]  # a group has commands
    named = set(re.findall(r"\brlhf ([a-z][a-z-]+)", TOLD))
    assert {"ingest", "chat", "explain", "versions", "config"} <= named
    assert named <= known


def test_every_rlhf_line_is_one_that_the_command_takes() -> None:
    whole = TOLD.replace("\\\n", "")  # one that goes on in the next line
    lines = re.findall(r"^(?:ExecStart=\S*/)?\.venv/bin/rlhf (.+)$", whole, flags=re.MULTILINE)
    assert len(lines) > 20
    for line in lines:
        command: click.Command = get_command(app)
        words = shlex.split(line, comments=True)
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        if words != ["--help"]:
            command.make_context(line, words)  # raises where the command would not take it


def test_every_module_that_is_to_be_run_exists() -> None:
    modules = set(re.findall(r"\bpython3? -m ((?:automation|benchmarks)\S+[a-z])", TOLD))
    assert {"automation.ui"} <= modules
    assert [module for module in modules if find_spec(module) is None] == []


def test_a_row_of_every_kind_is_shown_and_can_be_taken(tmp_path: Path) -> None:
    guide = GUIDES[ROOT / "docs" / "feedback.md"]
    (rows,) = re.findall(r"```jsonl\n(.*?)```", guide, flags=re.DOTALL)
    (first,) = blocks("jsonl")
    rows = first + rows
    path = tmp_path / "rows.jsonl"
    path.write_text(rows, encoding="utf-8")
    taken = list(read(path, "support"))
    assert [each for each in taken if isinstance(each, QuarantinedRow)] == []
    assert [each.kind for each in taken if isinstance(each, Feedback)] == [
        *("thumbs", "preference"),  # README's
        *("thumbs", "rating", "score", "preference", "correction", "criteria", "comment"),
    ]
    assert len(taken) == 2 + len(FeedbackKind)


def test_every_link_and_picture_is_there() -> None:
    links = [
        (page, link)
        for page, text in {ROOT / "README.md": README, **GUIDES}.items()
        for link in re.findall(r"\]\(([^)]+)\)", text)
        if not link.startswith("http")
    ]
    assert len(links) >= 8
    targets = [
        (page.parent / link.partition("#")[0], link.partition("#")[2]) for page, link in links
    ]
    assert [path for path, _ in targets if not path.exists()] == []
    headed = [(path, heading) for path, heading in targets if heading]
    assert headed
    assert [one for one in headed if one[1] not in headings(one[0])] == []
    pictures = list((ROOT / "docs" / "images").glob("*.png"))
    assert all(picture.stat().st_size < 400_000 for picture in pictures)


def test_every_guide_is_found_from_the_readme() -> None:
    assert [path.name for path in GUIDES if f"(docs/{path.name})" not in README] == []


def test_every_recipe_is_told_of() -> None:
    assert [name for name in recipe_names() if f"recipes/{name}.yaml" not in TOLD] == []


def test_mlflow_folder_never_shadows_the_library() -> None:
    assert not (ROOT / "mlflow" / "__init__.py").exists()
