"""The cheap night: DPO on the preference pairs themselves, through TRL, in PPO's clothes.

No completion is sampled to learn from and no reward is maximised, so it takes a fraction of PPO's
time and stays nearer to what people voted on. Everything around it is PPO's: the same reference,
the same looks at the watch prompts, alarms and reasons to stop, the same choice by the stopping
reward, the same folder and result. Source: Rafailov et al., arXiv:2305.18290. Unlike PPO it does
not resume: a killed run starts again, since TRL's own checkpoints are pickled.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from rlhf_pipeline.errors import ConfigError, NotEnoughData, TrainingError
from rlhf_pipeline.policy.chat import encode_completions
from rlhf_pipeline.policy.loading import Policy, load_policy, save_policy
from rlhf_pipeline.ppo.alarms import Alarm
from rlhf_pipeline.ppo.collecting import Task, encode_checked, probe_rewards
from rlhf_pipeline.ppo.learner import Learner, build_learner, draw_nothing, is_same_model
from rlhf_pipeline.ppo.memory import peak_memory
from rlhf_pipeline.ppo.metrics import checked
from rlhf_pipeline.ppo.plots import draw_plots
from rlhf_pipeline.ppo.result import Evaluation, TrainingResult
from rlhf_pipeline.ppo.settings import PpoSettings
from rlhf_pipeline.ppo.state import Progressed, run_fingerprint
from rlhf_pipeline.ppo.watching import (
    as_rollouts,
    choose_update,
    evaluate,
    raise_alarms,
    reason_to_stop,
    watch_facts,
    write_samples,
)
from rlhf_pipeline.records import (
    PreferencePair,
    Progress,
    Prompt,
    RewardFunction,
    hashed,
    ignore_progress,
    prompt_to_json,
)

ALIKE = "the same up to policy.max_completion_tokens"
PER_PAIR = ("rewards/margins", "rewards/accuracies")  # what TRL tells of each part, by its names


def decided_pairs(pairs: Sequence[PreferencePair], settings: PpoSettings) -> list[PreferencePair]:
    """Return the pairs that teach DPO something; raises NotEnoughData below one step's."""
    decided = [pair for pair in pairs if pair.decided]
    _need_a_step(len(decided), settings)
    return decided


def _need_a_step(found: int, settings: PpoSettings, *, alike: int = 0) -> None:
    needed = _pairs_per_step(settings)
    if found < needed:
        beside = f" beside {alike} whose sides are {ALIKE}" if alike else ""
        raise NotEnoughData(
            f"DPO needs {needed} pairs with a preference, one optimizer step's, found {found}"
            f"{beside}; collect more, lower ppo.rollouts_per_update, or set ppo.estimator to "
            "gae or rloo, which learn from any votes the reward learns from"
        )


def _pairs_per_step(settings: PpoSettings) -> int:
    return settings.rollouts_per_update // settings.minibatches


def train_dpo(
    *,
    policy_dir: str | Path,
    reference_dir: str | Path,
    pairs: Sequence[PreferencePair],
    reward: RewardFunction,
    stopping: RewardFunction | None,
    watch_prompts: Sequence[Prompt],
    output_dir: Path,
    settings: PpoSettings,
    feedback_count: int | None = None,
    report: Progress = ignore_progress,
    keep_going: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Train the policy at policy_dir on the pairs and return what came out, saved in output_dir.

    An update is rollouts_per_update pairs in `minibatches` optimizer steps; `epochs` passes over
    the pairs are made, and what is left of the last update's, but no more than `updates` updates.
    `reward` is only watched here; `stopping` chooses the update. Ties teach nothing and are left
    out, as are pairs whose sides do not differ within max_completion_tokens. Raises NotEnoughData
    without pairs, ConfigError where several processes were launched, TrainingError for rewards or
    prompts that PPO would refuse, or a loss that is not finite.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"DPO is trained by one process, found WORLD_SIZE {os.environ['WORLD_SIZE']}; launch "
            "one"
        )
    torch.manual_seed(settings.seed)
    decided, batch = decided_pairs(pairs, settings), _pairs_per_step(settings)
    started = run_fingerprint(
        [policy_dir, reference_dir], [reward, stopping], watch_prompts, settings
    )
    said = (text for p in decided for text in (prompt_to_json(p.prompt), p.chosen, p.rejected))
    fingerprint = hashed(started, *said)
    learner = build_learner(policy_dir, reference_dir, None, settings)
    watch_encoded = encode_checked(learner.policy, watch_prompts, settings, "watch_prompts")
    probe_rewards(learner, watch_encoded, watch_prompts, {"proxy": reward, "stopping": stopping})
    watch = Task(watch_prompts, watch_encoded, reward)
    rows = [
        row
        for row in dpo_rows(learner.policy, decided, settings)
        if row["chosen_ids"] != row["rejected_ids"]
    ]
    if alike := len(decided) - len(rows):
        report({"update": 0, "left out": f"{alike} pairs whose sides are {ALIKE}"})
    _need_a_step(len(rows), settings, alike=alike)
    steps = settings.epochs * -(-len(rows) // batch)  # of each pass the last may be a short one
    in_all = min(-(-steps // settings.minibatches), settings.updates)

    def look_at_watch_prompts(update: int) -> Evaluation:
        baselines = [s["baseline"] for look in watcher.looks[:1] for s in look.samples]
        look = evaluate(learner, watch, stopping, update, baselines=baselines)
        write_samples(output_dir / "samples.jsonl", [*watcher.looks, look])
        return look

    pairs_of = partial(pairs_of_step, rows=len(rows), pairs=batch)
    watcher = _Watcher(learner, in_all, pairs_of, look_at_watch_prompts, report, keep_going)
    watcher.look(0)
    reference = learner.reference
    if reference is None and not is_same_model(policy_dir, reference_dir):
        # Adapters that go on: TRL would hold the policy against these as they are now.
        reference = load_policy(reference_dir, device=settings.device)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _make_trainer(
            learner, reference and reference.model, rows, scratch, watcher, settings
        )
        trainer.train()
    learner.policy.model.eval()
    chosen = choose_update(watcher.looks, settings)
    watcher.take_back(chosen)
    keep_going()
    trained = Policy(learner.saved_model, learner.policy.tokenizer)
    save_policy(trained, output_dir / "policy", base_digest=learner.base_digest)
    look = next(e for e in watcher.looks if e.update == chosen)
    result = TrainingResult(
        model_path=str(output_dir / "policy"),
        reward_model_path=None,
        feedback_count=feedback_count,
        chosen_update=chosen,
        stopped_because=watcher.stopped_because,
        final_reward_mean=look.score_mean,
        final_reward_std=look.score_std,
        training_steps=trainer.state.global_step,
        reward_history=tuple(m["dpo/margin"] for m in watcher.history),
        kl_history=tuple(e.kl for e in watcher.looks[1:]),
        loss_history=tuple(m["train/loss"] for m in watcher.history),
        history=tuple(watcher.history),
        evaluations=tuple(watcher.looks),
        alarms=tuple(watcher.alarms),
        seconds=dict(watcher.seconds),
        resumed_from=None,
        fingerprint=fingerprint,
        settings=asdict(settings),
    )
    drawn = draw_plots(result, output_dir / "plots")
    result = replace(result, plots=tuple(f"plots/{name}" for name in drawn))
    keep_going()
    result.save(output_dir / "result.json")
    return result


def dpo_rows(
    policy: Policy, pairs: Sequence[PreferencePair], settings: PpoSettings
) -> list[dict[str, list[int]]]:
    """Return {"prompt_ids", "chosen_ids", "rejected_ids"} of each pair, as sampling sees them."""
    prompts = encode_checked(policy, [pair.prompt for pair in pairs], settings, "prompts of pairs")
    limit = settings.max_completion_tokens
    chosen = encode_completions(policy.tokenizer, [p.chosen for p in pairs], max_tokens=limit)
    rejected = encode_completions(policy.tokenizer, [p.rejected for p in pairs], max_tokens=limit)
    return [
        {"prompt_ids": prompt, "chosen_ids": better, "rejected_ids": worse}
        for prompt, better, worse in zip(prompts, chosen, rejected, strict=True)
    ]


def pairs_at_once(rows: Sequence[Mapping[str, Sequence[int]]], pairs: int, tokens: int) -> int:
    """Return how many of a step's pairs one pass takes: an equal part, of so many padded tokens.

    Both sides of a pair run together, as long as the longest of all. At least one pair.
    """
    longest = max(
        len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))
        for row in rows
    )
    parts = [n for n in range(1, pairs + 1) if pairs % n == 0 and 2 * n * longest <= tokens]
    return max(parts, default=1)


def pairs_of_step(step: int, *, rows: int, pairs: int) -> int:
    """Return how many of all `rows` an optimizer step, counted from 0, takes: `pairs` of them.

    The last of each pass takes what is left.
    """
    of_pass = -(-rows // pairs)
    return pairs if (step + 1) % of_pass else rows - (of_pass - 1) * pairs


def _make_trainer(
    learner: Learner,
    reference: Any,
    rows: list[dict[str, list[int]]],
    scratch: str,
    watcher: _Watcher,
    settings: PpoSettings,
) -> Any:
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import DPOConfig, DPOTrainer

    class OnTokens(DPOTrainer):  # type: ignore[misc]  # TRL ships no strict types
        """TRL's trainer on rows that are tokens already, by the encoding PPO samples with."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
            """Let each pair of a step count alike: transformers averages parts of any size."""
            draw_nothing(model)  # each step puts all of it in training mode again
            loss = super().compute_loss(model, inputs, *given, **options)
            parts, among = self.current_gradient_accumulation_steps, len(inputs["input_ids"]) // 2
            share = among * parts / watcher.pairs_of(self.state.global_step)
            for name in PER_PAIR:
                self._metrics["train"][name][-1] *= share
            return loss * share

    on_gpu = learner.policy.device.type == "cuda"
    steps = watcher.updates * settings.minibatches
    pairs = _pairs_per_step(settings)
    at_once = pairs_at_once(rows, pairs, settings.tokens_per_microbatch)
    arguments = DPOConfig(
        output_dir=scratch,
        max_steps=steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear" if settings.anneal else "constant",
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=pairs // at_once,
        max_grad_norm=settings.max_grad_norm,
        beta=settings.dpo_beta,
        router_aux_loss_coef=0.0,  # a mixture's experts are balanced by nobody in PPO either
        max_length=None,
        gradient_checkpointing=False,
        use_cpu=not on_gpu,
        bf16=settings.precision == "bfloat16",
        fp16=settings.precision == "float16",
        dataloader_num_workers=0,
        dataloader_pin_memory=on_gpu,
        save_strategy="no",
        logging_nan_inf_filter=False,
        logging_steps=1,
        report_to="none",
        push_to_hub=False,
        disable_tqdm=True,
        seed=settings.seed,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # several GPUs: one process each, not DataParallel
    with _output_layers_at(settings.temperature):
        trainer = OnTokens(
            model=learner.saved_model,
            ref_model=reference,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=learner.policy.tokenizer,
            callbacks=[watcher],
            optimizers=(learner.optimizer, None),
        )
    trainer.remove_callback(PrinterCallback)  # progress goes to `report`, not to standard output
    return trainer


@contextmanager
def _output_layers_at(temperature: float) -> Iterator[None]:
    """Let TRL divide the logits of policy and reference as sampling divides them.

    So the policy that is taught is the one that is sampled, and held against the reference
    everywhere else. TRL 1.16 takes no temperature for DPO, but the output layer it gives its models
    does.
    """
    from trl.trainer import dpo_trainer

    usual = dpo_trainer.add_fused_lm_head
    dpo_trainer.add_fused_lm_head = partial(usual, temperature=temperature)
    try:
        yield
    finally:
        dpo_trainer.add_fused_lm_head = usual


class _Watcher(TrainerCallback):  # type: ignore[misc]  # transformers ships no strict types
    """Keeps metrics per update, looks at the watch prompts, and remembers each look's weights."""

    def __init__(
        self,
        learner: Learner,
        updates: int,
        pairs_of: Callable[[int], int],
        evaluate_at: Callable[[int], Evaluation],
        report: Progress,
        keep_going: Callable[[], None],
    ) -> None:
        self.learner, self.updates, self.pairs_of = learner, updates, pairs_of
        self.evaluate_at, self.report, self.keep_going = evaluate_at, report, keep_going
        self.steps: list[dict[str, float]] = []  # what is told of each of the update's so far
        self.history: list[dict[str, float]] = []
        self.looks: list[Evaluation] = []
        self.alarms: list[Alarm] = []
        self.stopped_because = "all updates are made"
        self.best: tuple[int, dict[str, torch.Tensor]] = (0, {})
        self.seconds = {"watch": 0.0, "train": 0.0}
        self.since = time.perf_counter()  # of the phase that goes on

    def look(self, update: int) -> Evaluation:
        """Evaluate the policy as it is; keep its weights if no look was better."""
        model = self.learner.policy.model
        was_training = model.training
        self.passed("train")
        model.eval()
        self.looks.append(self.evaluate_at(update))
        model.train(was_training)
        self.passed("watch")
        if choose_update(self.looks, self.learner.settings) == update:
            kept = {n: p.detach().cpu().clone() for n, p in self.learner.trainable().items()}
            self.best = (update, kept)
        return self.looks[-1]

    def passed(self, phase: str) -> float:
        """Add the seconds since the phase before to this one's and return them."""
        now = time.perf_counter()
        took, self.since = now - self.since, now
        self.seconds[phase] += took
        return took

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count the seconds of training where TRL has its models."""
        self.since = time.perf_counter()

    def take_back(self, update: int) -> None:
        """Put the weights of the best look into the policy."""
        kept_update, kept = self.best
        if kept_update != update:
            raise TrainingError(f"kept the weights of update {kept_update}, asked for {update}")
        with torch.no_grad():
            for name, parameter in self.learner.trainable().items():
                parameter.copy_(kept[name])

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float],
        optimizer: Any,
        **_: Any,
    ) -> None:
        """Hear of an optimizer step's metrics, and tell an update's once it has made all its steps.

        In float16 a gradient that overflows is not stepped with, and the loss's scale is halved:
        then only a scale below 1, which no longer helps, is an error.
        """
        if "loss" not in logs:
            return
        self.keep_going()
        step, minibatches = state.global_step, self.learner.settings.minibatches
        update = -(-step // minibatches)
        scale = None if optimizer.scaler is None else optimizer.scaler.get_scale()
        overflowed = not math.isfinite(logs["grad_norm"]) and scale is not None and scale >= 1
        if not (math.isfinite(logs["loss"]) and (overflowed or math.isfinite(logs["grad_norm"]))):
            raise TrainingError(
                f"the loss and its gradient must stay finite, found {logs['loss']} and "
                f"{logs['grad_norm']} at update {update}; lower ppo.learning_rate"
            )
        self.steps.append({"pairs": float(self.pairs_of(step - 1)), **logs})
        if step % minibatches:
            return
        steps, self.steps = self.steps, []
        norms = [s["grad_norm"] for s in steps if math.isfinite(s["grad_norm"])]
        margin, accuracy = (_mean_over_pairs(steps, name) for name in PER_PAIR)
        facts = {
            "train/loss": statistics.fmean(s["loss"] for s in steps),
            "train/learning_rate": logs["learning_rate"],
            "train/optimizer_steps": float(step),
            **({"policy/grad_norm": statistics.fmean(norms)} if norms else {}),
            **({} if scale is None else {"train/loss_scale": scale}),
            "dpo/margin": margin,
            "dpo/accuracy": accuracy,
            "time/train": self.passed("train"),
            **peak_memory(self.learner.policy.device),
        }
        if update % self.learner.settings.evaluate_every == 0 or update == self.updates:
            facts |= watch_facts(self.look(update))
        self.history.append(checked(facts))
        self.report({"update": update, "updates": self.updates, **self.history[-1]})
        if self.looks[-1].update == update:
            self.judge(update, control)

    def judge(self, update: int, control: Any) -> None:
        """Raise alarms at what the latest look shows, and end training where PPO would."""
        settings = self.learner.settings
        shown = Progressed(
            kl_coef=0.0,
            update=update,
            history=[as_rollouts(look) for look in self.looks],
            evaluations=self.looks,
            alarms=self.alarms,
        )
        raise_alarms(shown, settings, self.report)
        reason = reason_to_stop(shown, settings)
        if reason is not None and update < self.updates:
            self.stopped_because, control.should_training_stop = reason, True


def _mean_over_pairs(steps: Sequence[Mapping[str, float]], name: str) -> float:
    total = sum(step["pairs"] for step in steps)
    return sum(step["pairs"] * step[name] for step in steps) / total
