"""Is the candidate better? Comparison on prompts nobody trained on, and the gate's decision."""

from __future__ import annotations

from typing import Final

PAGE: Final = "evaluation/report.html"  # in a turn's work folder, and in its MLflow run
