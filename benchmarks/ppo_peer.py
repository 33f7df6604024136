"""TRL's PPOTrainer as the throughput benchmark runs it; needs the environment of `make bench-peer`.

The trainer is left as it is. Its reward model is a stub that costs nothing, as ours in the
benchmark; a callback waits between updates; two functions are wrapped to see the phases.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from transformers.modeling_outputs import BaseModelOutput

# trl lives in its own environment only
from trl.experimental.ppo import (  # type: ignore[import-not-found,unused-ignore]
    PPOConfig,
    PPOTrainer,
    ppo_trainer,
)

sys.path.insert(0, str(Path(__file__).parent))
from ppo_cases import (  # type: ignore[import-not-found,unused-ignore]  # run as a script
    TEMPERATURE,
    Worker,
    case_from,
    forget_peak,
    memory_bytes,
    patched,
    prompts_of,
    touch,
)


class FreeReward(nn.Module):
    """A reward model that scores every completion 0 and costs nothing."""

    base_model_prefix = "trunk"

    def __init__(self) -> None:
        super().__init__()
        self.trunk = self.states

    def states(self, input_ids: torch.Tensor, **_: Any) -> BaseModelOutput:
        """Return hidden states of width 1."""
        states = torch.zeros(*input_ids.shape, 1, device=input_ids.device)
        return BaseModelOutput(last_hidden_state=states, hidden_states=(states,))

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states as scores."""
        return states


class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]  # transformers is untyped
    """Waits before every update and answers after it."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.before = worker, 0
        self.started = self.sampled = self.trains = self.processor = 0.0
        self.tokens = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.before = memory_bytes()[0]
        self._wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = now()
        self.worker.answer(
            seconds=ended - self.started,
            processor_seconds=time.process_time() - self.processor,
            phases={
                "sample": self.sampled - self.started,
                "measure": self.trains - self.sampled,
                "train": ended - self.trains,
            },
            tokens=self.tokens,
            rss_before=self.before,
            rss_peak=memory_bytes()[1],
            gpu_peak=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            gpu_held=torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        )
        self._wait()

    def _wait(self) -> None:
        if not self.worker.wait():
            raise SystemExit
        forget_peak()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.processor = time.process_time()
        self.started, self.trains = now(), 0.0


def now() -> float:
    """Return the time by which all that was asked for is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argument: str, folder: str, updates: str, device: str = "cpu") -> None:
    """Run updates of the case on the folder's model as the protocol asks for them.

    On a GPU they are in bfloat16, under autocast.
    """
    worker, case = Worker(), case_from(argument)
    torch.set_num_threads(case.threads)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )
    for model in (policy, reference, critic):
        touch(model)
    clock = Clock(worker)

    def sampled(original: Any, *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        clock.sampled = now()
        ended = (result[0][:, case.prompt_tokens :] == tokenizer.eos_token_id).long()
        clock.tokens = int((ended.cumsum(1) - ended == 0).sum())
        return result

    def forward(original: Any, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and not clock.trains:
            clock.trains = now()
        return original(*args, **options)

    patched(ppo_trainer, "batch_generation", sampled)
    patched(ppo_trainer, "forward", forward)
    with tempfile.TemporaryDirectory() as scratch:
        args = PPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=case.rollouts,
            gradient_accumulation_steps=1,
            num_mini_batches=case.minibatches,
            num_ppo_epochs=case.epochs,
            local_rollout_forward_batch_size=case.rollouts,
            total_episodes=case.rollouts * int(updates),
            response_length=case.completion_tokens,
            temperature=TEMPERATURE,
            stop_token="eos",
            missing_eos_penalty=1.0,
            learning_rate=1e-7,
            num_sample_generations=0,
            save_strategy="no",
            report_to="none",
            use_cpu=device == "cpu",
            bf16=device != "cpu",
            fp16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
        )
        trainer = PPOTrainer(
            args=args,
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=FreeReward(),
            value_model=critic,
            train_dataset=Dataset.from_dict({"input_ids": prompts_of(case, int(updates))}),
            eval_dataset=Dataset.from_dict({"input_ids": prompts_of(case, 1)}),
            callbacks=[clock],
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
