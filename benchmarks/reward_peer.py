"""TRL's RewardTrainer as the throughput benchmark runs it, in the environment of `make bench-peer`.

The trainer is left as it is; it gets token ids, so nothing of ours is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

# trl lives in its own environment only
from trl import RewardConfig, RewardTrainer

sys.path.insert(0, str(Path(__file__).parent))
from ppo_cases import (  # type: ignore[import-not-found,unused-ignore]  # run as a script
    Worker,
    touch,
)


def main(told: str, folder: str) -> None:
    """Train as the protocol asks for it, each time from the same weights."""
    worker, case = Worker(), json.loads(told)
    torch.set_num_threads(case["threads"])
    rows = json.loads((Path(folder) / "pairs.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    while worker.wait():
        torch.manual_seed(0)  # the head's first weights
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
        touch(model)
        with tempfile.TemporaryDirectory() as scratch:
            trainer = _trainer(model, tokenizer, rows, case, scratch)
            started = time.perf_counter()
            outcome = trainer.train()
            worker.answer(seconds=time.perf_counter() - started, loss=outcome.training_loss)


def _trainer(model: Any, tokenizer: Any, rows: Any, case: dict[str, Any], scratch: str) -> Any:
    arguments = RewardConfig(
        output_dir=scratch,
        per_device_train_batch_size=case["batch"],
        gradient_accumulation_steps=1,
        num_train_epochs=1,
        learning_rate=case["learning_rate"],
        weight_decay=0.0,
        adam_epsilon=1e-5,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    return RewardTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
