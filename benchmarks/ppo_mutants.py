"""Put known PPO bugs back into a copy of our code, one at a time: the tests must fail for each.

    python -m benchmarks.ppo_mutants [NAME ...]      (make mutants)

Every row of MUTANTS is a bug that a public PPO implementation has had, as a small change of text.
The copy is made in a temporary folder; nothing here is touched. The pinned trajectory is left out,
since it notices every change without saying what is wrong with it. Prints a table, ends with
status 1 if a bug survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "test_advantages test_kl test_loss test_rollout test_learner test_replay test_trainer "
    "test_resume"
).split()
PACKAGES = "rlhf_pipeline tests resources assets automation".split()
LEFT_OUT = "not pinned"
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug's name and the changes that make it: (file, text as it stands, text with the bug)."""

    name: str
    changes: tuple[tuple[str, str, str], ...]


def mutant(name: str, *changes: tuple[str, str, str]) -> Mutant:
    """Return a mutant of files in rlhf_pipeline/."""
    return Mutant(name, changes)


MUTANTS = (
    mutant(
        "score on PAD",
        (
            "ppo/rollout.py",
            "    is_last = (positions == last) & completion_mask\n",
            "    is_last = (positions == positions[-1]).expand_as(completion_mask)\n",
        ),
    ),
    mutant(
        "score on the token after EOS",
        (
            "ppo/rollout.py",
            "    is_last = (positions == last) & completion_mask\n",
            "    is_last = positions == (last + 1).clamp(max=len(positions) - 1)\n",
        ),
    ),
    mutant(
        "EOS penalty looks at the prompt",
        (
            "ppo/rollout.py",
            "    return ((tokens.completion_ids == stop_id) & tokens.completion_mask).any(1)\n",
            "    both = torch.cat([tokens.prompt_ids, tokens.completion_ids], 1)\n"
            "    return (both == stop_id).any(1)\n",
        ),
    ),
    mutant(
        "EOS penalty with the wrong stop token",
        (
            "ppo/measuring.py",
            "    ended = ends_with_stop_token(tokens, learner.policy.eos_id)\n    final_scores",
            "    ended = ends_with_stop_token(tokens, learner.policy.pad_id)\n    final_scores",
        ),
    ),
    mutant(
        "padding counted in whitening",
        (
            "ppo/advantages.py",
            "counted(x, completion_mask).sum() / completion_mask.sum().clamp(min=1)\n",
            "counted(x, completion_mask).sum() / x.numel()\n",
        ),
    ),
    mutant(
        "whitening adds the mean",
        (
            "ppo/advantages.py",
            "    return centred * torch.rsqrt(variance + _SMALLEST_VARIANCE)\n",
            "    return centred * torch.rsqrt(variance + _SMALLEST_VARIANCE)"
            " + masked_mean(x, completion_mask)\n",
        ),
    ),
    mutant(
        "advantages not whitened",
        ("ppo/measuring.py", "        advantages = whiten(advantages, mask)\n", "        pass\n"),
    ),
    mutant(
        "value targets from clipped values",
        (
            "ppo/advantages.py",
            "    return advantages, advantages + values\n",
            "    return advantages, advantages + values.clamp(-0.2, 0.2)\n",
        ),
    ),
    mutant(
        "KL sign flipped",
        ("ppo/rollout.py", "counted(-kl_coef * kl,", "counted(kl_coef * kl,"),
    ),
    mutant(
        "KL without temperature",
        (
            "ppo/learner.py",
            "                temperature=self.settings.temperature,\n"
            "                support=tokens.support,\n            )\n\n",
            "                temperature=1.0,\n"
            "                support=tokens.support,\n            )\n\n",
        ),
    ),
    mutant(
        "KL counted on prompt tokens",
        (
            "ppo/measuring.py",
            "    rewards = rewards_per_token(batch.scores",
            "    from rlhf_pipeline.ppo.rollout import Tokens\n"
            "    ids, real = tokens.prompt_ids, tokens.prompt_mask\n"
            "    first = torch.ones_like(real[:, :1])\n"
            "    prompt = Tokens(ids[:, :1], first, ids[:, 1:], real[:, 1:])\n"
            "    live = learner.logprobs_and_values(prompt)[0].detach()\n"
            "    kl[:, 0] += estimate_kl(live, learner.reference_logprobs(prompt), 'k1').sum(1)\n"
            "    rewards = rewards_per_token(batch.scores",
        ),
    ),
    mutant(
        "reference is the live policy",
        (
            "ppo/learner.py",
            "                reference.model,\n",
            "                self.policy.model,\n",
        ),
    ),
    mutant(
        "dropout left on",
        (
            "policy/loading.py",
            "    for module in model.modules():\n        if isinstance(module, nn.Dropout):\n",
            "    return\n    for module in model.modules():\n"
            "        if isinstance(module, nn.Dropout):\n",
        ),
        (
            "ppo/learner.py",
            "    check_policy(policy, settings)\n    generator",
            "    check_policy(policy, settings)\n    policy.model.train()\n    generator",
        ),
    ),
    mutant(
        "old log-probabilities recomputed after the first step",
        (
            "ppo/optimising.py",
            "            facts = accumulate_gradients(learner, rollouts, members)\n",
            "            if steps:\n"
            "                from dataclasses import replace\n"
            "                from rlhf_pipeline.ppo.rollout import measure\n"
            "                fresh = measure(\n"
            "                    lambda t: learner.logprobs_and_values(t)[0],\n"
            "                    rollouts.tokens,\n"
            "                    token_budget=settings.tokens_per_microbatch,\n"
            "                )\n"
            "                rollouts = replace(rollouts, logprobs=fresh)\n"
            "            facts = accumulate_gradients(learner, rollouts, members)\n",
        ),
    ),
    mutant(
        "ratio from summed instead of per-token log-probabilities",
        (
            "ppo/loss.py",
            "    ratio = log_ratio.exp()\n",
            "    ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio).exp()\n",
        ),
    ),
    mutant(
        "clip on the wrong side (min/max swapped)",
        ("ppo/loss.py", "torch.maximum(unclipped, clipped)", "torch.minimum(unclipped, clipped)"),
    ),
    mutant(
        "value clip inert",
        ("ppo/loss.py", "torch.maximum(error, clipped_error)", "torch.maximum(error, error)"),
    ),
    mutant(
        "microbatch-dependent loss",
        (
            "ppo/optimising.py",
            "    settings, tokens = learner.settings, few.tokens\n",
            "    settings, tokens = learner.settings, few.tokens\n"
            "    token_count = int(tokens.completion_mask.sum())\n",
        ),
    ),
    mutant(
        "gradient clip inert",
        (
            "ppo/optimising.py",
            "clip_grad_norm_(learner.trained_weights, learner.settings.max_grad_norm)",
            "clip_grad_norm_(learner.trained_weights, 1e9)",
        ),
    ),
    mutant(
        "minibatch setting inert",
        ("ppo/optimising.py", ".tensor_split(settings.minibatches)", ".tensor_split(1)"),
    ),
    mutant(
        "GAE without the mask",
        (
            "ppo/advantages.py",
            "    rewards, values = counted(rewards, completion_mask), "
            "counted(values, completion_mask)\n",
            "",
        ),
        (
            "ppo/advantages.py",
            "        following_advantage = counted(following_advantage, completion_mask[:, t])\n",
            "",
        ),
    ),
    mutant(
        "GAE lambda and gamma swapped",
        (
            "ppo/measuring.py",
            "            gamma=settings.gamma,\n",
            "            gamma=settings.gae_lambda,\n",
        ),
        (
            "ppo/measuring.py",
            "            gae_lambda=settings.gae_lambda,\n",
            "            gae_lambda=settings.gamma,\n",
        ),
    ),
    mutant(
        "values that begin near 0, wherever the scores lie",
        ("ppo/measuring.py", "        learner.raise_values(gap)\n", ""),
    ),
    mutant(
        "one level of returns for every turn",
        ("ppo/measuring.py", "values=values + level,", "values=values,"),
    ),
    mutant(
        "bootstrapping past the end",
        (
            "ppo/advantages.py",
            "    for t in reversed(range(rewards.shape[1])):\n",
            "    following_value = values[:, -1]\n"
            "    for t in reversed(range(rewards.shape[1])):\n",
        ),
    ),
    mutant(
        "no credit from a turn to the one before",
        (
            "ppo/advantages.py",
            "    ahead = turn_gamma * counted(ahead, follows >= 0)\n",
            "    ahead = 0.0 * counted(ahead, follows >= 0)\n",
        ),
    ),
    mutant(
        "credit from the last turn to whatever row is last",
        (
            "ppo/advantages.py",
            "    ahead = turn_gamma * counted(ahead, follows >= 0)\n",
            "    ahead = turn_gamma * ahead\n",
        ),
    ),
    mutant(
        "replayed tokens without the cap",
        (
            "ppo/measuring.py",
            "torch.where(replayed, settings.replay_cap,",
            "torch.where(replayed, 1e9,",
        ),
    ),
    mutant(
        "replayed tokens held against the policy that sampled them",
        (
            "ppo/measuring.py",
            "    logprobs = torch.where(replayed[:, None] | corrects, now, batch.logprobs)\n",
            "    logprobs = batch.logprobs\n",
        ),
    ),
    mutant(
        "replay lost on resume",
        (
            "ppo/state.py",
            '    replay.restore(saved.tensors["replay"], learner.policy.device)\n',
            "",
        ),
    ),
    mutant(
        "reference outside what a narrowed draw could reach",
        (
            "ppo/learner.py",
            "                temperature=self.settings.temperature,\n"
            "                support=tokens.support,\n            )\n\n",
            "                temperature=self.settings.temperature,\n            )\n\n",
        ),
    ),
    mutant(
        "right padding where left is assumed (position ids)",
        (
            "policy/sampling.py",
            "    return (mask.long().cumsum(-1) - 1).clamp_(min=0)\n",
            "    return torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)\n",
        ),
    ),
    mutant(
        "right padding where left is assumed (columns dropped)",
        (
            "ppo/rollout.py",
            "            self.prompt_ids[members, P:],\n            prompt_mask[:, P:],\n",
            "            self.prompt_ids[members, : self.prompt_ids.shape[1] - P],\n"
            "            prompt_mask[:, : self.prompt_ids.shape[1] - P],\n",
        ),
    ),
    mutant(
        "optimizer state lost on resume",
        (
            "ppo/state.py",
            "    checkpoint.restore_optimizer("
            'learner.optimizer, trainable, saved.tensors["optimizer"])\n',
            "",
        ),
    ),
    mutant(
        "RNG lost on resume",
        (
            "ppo/state.py",
            "    checkpoint.restore_random_states("
            'saved.tensors["random"], saved.state["random"], generators)\n',
            "",
        ),
    ),
    mutant(
        "KL coefficient lost on resume",
        (
            "ppo/state.py",
            '    return Progressed.from_json(saved.state["progressed"])\n',
            "    from dataclasses import replace\n"
            '    now = Progressed.from_json(saved.state["progressed"])\n'
            "    return replace(now, kl_coef=learner.settings.kl_coef)\n",
        ),
    ),
)


def apply(one: Mutant, package: Path) -> None:
    """Change the files of `package`; ValueError unless every text stands there exactly once."""
    for file, text, replacement in one.changes:
        path = package / file
        content = path.read_text()
        if content.count(text) != 1:
            raise ValueError(
                f"mutant {one.name!r} needs its text once in {file}, found it "
                f"{content.count(text)} times; write the mutant for the code as it stands"
            )
        path.write_text(content.replace(text, replacement))


def verdict(one: Mutant | None) -> tuple[bool, str, float]:
    """Run the tests on a copy with the bug: whether they failed, the first failure, seconds.

    None runs them on an unchanged copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        without = shutil.ignore_patterns("__pycache__")
        for name in PACKAGES:
            shutil.copytree(ROOT / name, copy / name, ignore=without)
        shutil.copy(ROOT / "pyproject.toml", copy)
        if one is not None:
            apply(one, copy / "rlhf_pipeline")
        started = time.perf_counter()
        tests = [f"tests/ppo/{name}.py" for name in TESTS]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-k", LEFT_OUT, *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        seconds = time.perf_counter() - started
    failure = re.search(r"^(?:FAILED|ERROR) \S*::(\S+)", ran.stdout, re.MULTILINE)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"the tests did not run:\n{ran.stdout}\n{ran.stderr}")
    return ran.returncode == 1, failure[1] if failure else "", seconds


def main(names: Sequence[str]) -> int:
    """Print the table; return how many bugs survive."""
    fails, failure, seconds = verdict(None)
    if fails:
        raise SystemExit(f"the tests must pass on unchanged code, {failure} failed; mend it first")
    print(f"unchanged code: tests pass in {seconds:.0f} s\n")
    print("| bug put back | caught | by | seconds |\n|---|---|---|---|")
    survivors = 0
    for one in MUTANTS:
        if names and one.name not in names:
            continue
        caught, by, seconds = verdict(one)
        survivors += not caught
        print(f"| {one.name} | {'yes' if caught else 'NO'} | {by} | {seconds:.0f} |", flush=True)
    return survivors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of bugs, as in the table")
    given = parser.parse_args()
    if unknown := set(given.names) - {m.name for m in MUTANTS}:
        parser.error(f"needed names of mutants, found {sorted(unknown)}; see MUTANTS")
    sys.exit(1 if main(given.names) else 0)
