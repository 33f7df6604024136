"""Supervised fine-tuning: the policy learns to write the completions it is shown.

TRL's SFTTrainer does the training; the tokens are laid out by chat.py, so what is trained on is
what sampling and the reward model will see. Only completion tokens (eos among them) carry loss, and
on a CPU, where TRL would compute logits for every position, only they are computed (`packed_loss`).
An interrupted run starts again: Trainer checkpoints are pickled, so none is written.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from rlhf_pipeline.errors import NotEnoughData, TrainingError
from rlhf_pipeline.policy.adapters import ALPHA_PER_RANK, with_adapters
from rlhf_pipeline.policy.chat import encode_completions, encode_prompt, encode_prompts
from rlhf_pipeline.policy.loading import Policy, save_policy
from rlhf_pipeline.policy.packed import can_pack, packed_hidden
from rlhf_pipeline.policy.sampling import state_logprobs, trunk_of
from rlhf_pipeline.records import Progress, SftExample, ignore_progress

IGNORED = -100  # the label of tokens without loss, PyTorch's cross-entropy convention
RECOMPUTE_ABOVE = 1_000_000_000  # parameters from which activations are recomputed to save memory


@dataclass(frozen=True)
class SftResult:
    """What supervised fine-tuning came to."""

    path: Path  # the trained policy, a plain transformers folder
    loss_curve: tuple[tuple[int, float], ...]  # (optimizer step, mean loss since the last one)
    examples: int
    steps: int
    seconds: float


def train_sft(
    policy: Policy,
    examples: Sequence[SftExample],
    output_dir: str | Path,
    *,
    epochs: float,
    learning_rate: float,
    batch_size: int,
    max_tokens: int,
    seed: int,
    lora_rank: int = 0,
    report: Progress | None = None,
) -> SftResult:
    """Train `policy` in place, save it in `output_dir` and return the loss curve.

    1. Lay out the tokens; 2. train with a short warm-up and a linear anneal to 0; 3. save.
    With lora_rank only adapters of that rank are trained, whatever type the frozen weights have,
    and merged into them at the end.
    `max_tokens` bounds prompt and completion together; a long prompt loses its beginning.
    `report` hears {"step", "of", "loss", "epoch"} about fifty times.
    Raises NotEnoughData without examples, TrainingError if the loss is not a number.
    """
    if not examples:
        raise NotEnoughData(
            "supervised fine-tuning needs at least 1 example, found 0; add seed conversations"
        )
    started = time.perf_counter()
    device = policy.device
    rows = sft_rows(policy, examples, max_tokens=max_tokens)
    watcher = _Watcher(report or ignore_progress)
    with tempfile.TemporaryDirectory() as scratch:
        plain: Any = policy.model
        trained = plain
        if lora_rank:
            alpha = ALPHA_PER_RANK * lora_rank
            trained = with_adapters(plain, rank=lora_rank, alpha=alpha, seed=seed)
        trainer = _make_trainer(
            policy, trained, rows, scratch, epochs, learning_rate, batch_size, seed, watcher
        )
        trainer.train()
    for wrapped in ("forward", "_original_forward"):  # TRL's fused output layer, autocast
        plain.__dict__.pop(wrapped, None)
        trained.__dict__.pop(wrapped, None)
    if lora_rank:
        policy.model = trained.merge_and_unload()
    policy.model.to(device).eval()
    policy.model.config.use_cache = True
    curve = tuple(watcher.curve)
    if not all(abs(loss) < float("inf") for _, loss in curve):
        raise TrainingError(
            f"the loss must stay finite, found {[loss for _, loss in curve][-3:]} at the end; "
            f"lower learning_rate from {learning_rate}"
        )
    save_policy(policy, output_dir)
    seconds = time.perf_counter() - started
    return SftResult(Path(output_dir), curve, len(rows), trainer.state.global_step, seconds)


def sft_rows(
    policy: Policy, examples: Sequence[SftExample], *, max_tokens: int
) -> list[dict[str, list[int]]]:
    """Return {"input_ids", "labels"} of each example; labels are IGNORED on the prompt.

    A completion may take all but the room its prompt needs, the prompt at most half where both
    are long.
    """
    limit = min(max_tokens, policy.context_length)
    prompts = encode_prompts(policy.tokenizer, [e.prompt for e in examples], max_tokens=limit)
    completions = encode_completions(
        policy.tokenizer, [e.completion for e in examples], max_tokens=limit
    )
    rows = []
    for example, prompt, completion in zip(examples, prompts, completions, strict=True):
        completion = completion[: limit - min(len(prompt), limit // 2)]
        room = limit - len(completion)
        if len(prompt) > room:
            prompt = encode_prompt(policy.tokenizer, example.prompt, max_tokens=room)
        rows.append(
            {
                "input_ids": prompt + completion,
                "labels": [IGNORED] * len(prompt) + completion,
            }
        )
    return rows


def packed_loss(
    model: Any,
    inputs: Mapping[str, Tensor],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return the labelled tokens' mean negative log-probability, in nats: SFTTrainer.compute_loss.

    Shapes: input_ids, attention_mask and labels are (B, S), padded on the right. The sum is over
    this batch, the mean over num_items_in_batch, the labels of the whole optimizer step.
    Nothing is computed for padding, and no logits where a label is IGNORED.
    """
    if return_outputs:
        raise TrainingError("packed_loss gives a loss only, found outputs asked for; do not ask")
    hidden, where = packed_hidden(
        trunk_of(model), inputs["input_ids"], inputs["attention_mask"].bool()
    )
    # A row begins with a token of its prompt, so no row's last token foretells the next one's.
    labels = inputs["labels"].flatten()[where][1:]
    kept = (labels != IGNORED).nonzero()[:, 0]
    logprobs = state_logprobs(model, hidden[:-1].index_select(0, kept), labels[kept], 1.0)
    return -logprobs.sum() / (len(kept) if num_items_in_batch is None else num_items_in_batch)


def _make_trainer(
    policy: Policy,
    trained: Any,
    rows: list[dict[str, list[int]]],
    scratch: str,
    epochs: float,
    learning_rate: float,
    batch_size: int,
    seed: int,
    watcher: Any,
) -> Any:
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    on_gpu = policy.device.type == "cuda"
    steps = max(1, round(epochs * -(-len(rows) // batch_size)))
    arguments = SFTConfig(
        output_dir=scratch,
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=steps // 20,
        per_device_train_batch_size=batch_size,
        max_grad_norm=1.0,
        weight_decay=0.0,
        use_cpu=not on_gpu,
        bf16=on_gpu,  # autocast; the weights keep their type
        gradient_checkpointing=policy.model.num_parameters() > RECOMPUTE_ABOVE,
        train_sampling_strategy="group_by_length",
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_num_workers=0,
        dataloader_pin_memory=on_gpu,
        save_strategy="no",
        logging_nan_inf_filter=False,  # a loss that is not a number must be seen
        logging_steps=max(1, steps // 50),
        report_to="none",
        push_to_hub=False,
        disable_tqdm=True,
        seed=seed,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # several GPUs: one process each, not DataParallel
    trainer = SFTTrainer(
        model=trained,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
        callbacks=[watcher],
    )
    trainer.remove_callback(PrinterCallback)  # progress goes to `report`, not to standard output
    trainer.train_dataset = rows  # as lists: a data set of Arrow's is read row by row
    if not on_gpu and not arguments.gradient_checkpointing and can_pack(trunk_of(trained)):
        trainer.compute_loss = packed_loss
    return trainer


class _Watcher(TrainerCallback):  # type: ignore[misc]  # transformers ships no strict types
    """Keeps the loss curve and passes progress on."""

    def __init__(self, report: Progress) -> None:
        self.report = report
        self.curve: list[tuple[int, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Hear of the mean loss since the last time."""
        if "loss" in logs:
            self.curve.append((state.global_step, float(logs["loss"])))
            self.report(
                {
                    "step": state.global_step,
                    "of": state.max_steps,
                    "loss": float(logs["loss"]),
                    "epoch": float(state.epoch or 0.0),
                }
            )
