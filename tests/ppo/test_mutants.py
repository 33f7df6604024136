"""The mutants of benchmarks/ppo_mutants.py fit the code; `make mutants` sees each one caught."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.ppo_mutants import MUTANTS, ROOT, Mutant, apply, mutant


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_every_mutant_changes_code_that_still_parses(one: Mutant, tmp_path: Path) -> None:
    for file in {file for file, _, _ in one.changes}:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "rlhf_pipeline" / file, tmp_path / file)
    apply(one, tmp_path)
    for file in {file for file, _, _ in one.changes}:
        changed = (tmp_path / file).read_text()
        assert changed != (ROOT / "rlhf_pipeline" / file).read_text()
        compile(changed, file, "exec")


def test_a_mutant_whose_text_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="found it 0 times"):
        apply(mutant("gone", ("a.py", "y = 1", "y = 2")), tmp_path)
