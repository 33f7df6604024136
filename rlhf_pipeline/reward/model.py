"""The reward model: a trunk that reads prompt and completion, and a scalar head on what it read.

On disk it is a folder: trunk/ (a plain transformers folder with its tokenizer), head.safetensors
(weight, bias) and reward_model.json (what is read, by which tokenizer, limits, centre offset,
calibration temperature).
One that shares a base keeps no trunk of its own: trunk/ then holds adapters, or nothing but the
tokenizer where only the head was trained, and reward_model.json says which base.
The head may also read how likely the trunk's own language model finds the completion: what was said
to a question like this before is a strong sign of relevance, which a few thousand votes on a small
trunk do not teach. The mean log-likelihood as a reward is SimPO's (arXiv:2405.14734 eq. 3); here it
is an input beside the hidden state, and its weight is learnt like any other.
A model may have several heads (heads.py): then the weight has a row for each, and the settings say
how their scores become one.
The trunk is a causal model's, which the head reads at the last token, or an encoder's (BERT,
RoBERTa, DeBERTa, ...), read at the first. It has a tokenizer of its own: what is scored is text.
Nothing is pickled, and no code from a model is run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import folder_sha256, read_json, write_json
from rlhf_pipeline.policy.adapters import (
    ALPHA_PER_RANK,
    SharedBase,
    adapter_weights,
    add_adapters,
    base_digest,
    load_adapters,
    only,
    save_adapters,
)
from rlhf_pipeline.policy.chat import encode_completions, encode_prompts
from rlhf_pipeline.policy.loading import (
    ADAPTER,
    base_of_adapter,
    choose_device,
    load_policy,
    load_tokenizer,
    load_weights,
    no_progress_bars,
    switch_off_dropout,
    text_config,
)
from rlhf_pipeline.policy.packed import can_pack, packed_hidden
from rlhf_pipeline.policy.sampling import (
    hidden_logprobs,
    output_head,
    pad_left,
    pad_right,
    position_ids,
    state_width,
    trunk_of,
)
from rlhf_pipeline.policy.tokenizers import reading_of
from rlhf_pipeline.records import Prompt, RewardFunction, RewardInput, hashed
from rlhf_pipeline.reward import HEAD, SETTINGS, TRUNK, missing_from
from rlhf_pipeline.reward.calibration import Confidence
from rlhf_pipeline.reward.ensemble import EnsembleScores
from rlhf_pipeline.reward.functions import CheckedReward
from rlhf_pipeline.reward.heads import Combined, disagreement

Reads = Literal["last", "first", "mean"]
TOKENS_AT_ONCE = 16_384  # padded tokens in one forward pass on a GPU
TOKENS_ON_CPU = 4_096  # on a CPU, whose cache then holds more of a layer
PACKED_BELOW = 0.9  # share of a batch that is real tokens; above, packing costs what it saves
CRITERIA = "criteria.safetensors"
TRAINED_FROM = "trained_from"  # in the settings: the digest of what a trunk of its own began as
TOKENIZER = "tokenizer"  # likewise: what of the one it was trained with decides what it reads
LIKELIHOODS = 3  # mean, least and total log-probability of the completion's tokens
OWN = "reward"  # the name of its adapters where no other reward model shares the base
ONE_HEAD = Combined()
TOTAL_SCALE = 1 / 16  # brings the total to the size of the others


@dataclass(frozen=True)
class Row:
    """One conversation as token ids; the completion begins at `start`."""

    ids: list[int]
    start: int
    sampled: bool = True  # False: a person wrote it or its pair, so its likelihood says nothing

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Calibration:
    """How margins become probabilities, and what a score of 0 means."""

    offset: float = 0.0  # subtracted from the head's output; centre completions then score 0
    temperature: float = 1.0  # with `lapse`, a margin's chance: see reward.calibration.Confidence
    deviation: float = 1.0  # standard deviation of the centre completions' scores
    lapse: float = 0.0  # models of before it was fitted have none

    def probability(self, margin: float) -> float:
        """Return the calibrated probability that a completion ahead by `margin` is preferred."""
        return Confidence(self.temperature, self.lapse).chance(margin)


@dataclass(frozen=True)
class Limits:
    """How much of a conversation is read; prompts lose their beginning, completions their end."""

    max_prompt_tokens: int
    max_completion_tokens: int


class Criteria(nn.Module):
    """What people are expected to say of each criterion they rate: a head on the features."""

    def __init__(self, names: Sequence[str], width: int) -> None:
        super().__init__()
        self.names = tuple(names)
        self.head = nn.Linear(width, len(self.names))

    def forward(self, features: Tensor) -> Tensor:
        """Return each criterion, (B, K) in [0, 1]."""
        found: Tensor = self.head(features).sigmoid()
        return found


def new_criteria(names: Sequence[str], weights: Tensor, biases: Tensor) -> Criteria:
    """Return the criteria with these weights (K, F) and biases (K,)."""
    criteria = Criteria(names, weights.shape[1])
    with torch.no_grad():
        criteria.head.weight.copy_(weights)
        criteria.head.bias.copy_(biases)
    return criteria


class RewardModel(nn.Module):
    """Trunk and scalar head, or several; forward gives raw scores, without the centre offset."""

    def __init__(
        self,
        trunk: nn.Module,
        head: nn.Linear,
        *,
        encoder: bool,
        reads: Reads,
        likelihood: bool,
        pad_id: int,
        base: str | None,
        adapters: str | None,
        combined: Combined = ONE_HEAD,
    ) -> None:
        super().__init__()
        switch_off_dropout(trunk)
        self.trunk = trunk  # with its output layer where `likelihood`
        self.head = head
        self.encoder = encoder
        self.reads = reads
        self.likelihood = likelihood
        self.pad_id = pad_id
        self.base = base  # folder or hub id the trunk is shared with; None: a trunk of its own
        self.adapters = adapters  # the name of its adapters on that base; None: the bare base
        self.combined = combined
        self.source: str | None = None  # what an untrained trunk of its own was read from
        self.criteria: Criteria | None = None  # where people rated some, and the trunk is frozen

    def read(self) -> AbstractContextManager[None]:
        """Return the context in which the trunk computes with this model's adapters, if any."""
        return nullcontext() if self.base is None else only(self.trunk, self.adapters)

    def features(self, rows: Sequence[Row]) -> Tensor:
        """Return what the head judges, (B, F) float32: the hidden state, then the likelihoods."""
        with self.read():
            return self._features(rows)

    def _features(self, rows: Sequence[Row]) -> Tensor:
        """Return the features with whatever adapters are on.

        A causal trunk has seen everything at the last token (eos, where it fitted); an encoder
        gathers it at the first; "mean" is the mean over all tokens, which a head on a frozen trunk
        learns from best: nothing has taught that trunk to gather a judgement in one place.
        """
        device = self.head.weight.device
        pad = pad_right if self.encoder else pad_left
        ids, mask = pad([row.ids for row in rows], self.pad_id)
        ids, mask = ids.to(device), mask.to(device)
        trunk: Any = trunk_of(self.trunk) if self.likelihood else self.trunk
        with autocast(device):
            hidden = _hidden(trunk, ids, mask, encoder=self.encoder)
        if self.reads == "mean":
            kept = hidden.float().masked_fill(~mask[..., None], 0.0)
            state = kept.sum(1) / mask.sum(1, keepdim=True)
        else:
            state = hidden[:, 0 if self.reads == "first" else -1].float()
        if not self.likelihood:
            return state
        return torch.cat([state, self._likelihoods(hidden, ids, mask, rows)], dim=1)

    def _likelihoods(
        self, hidden: Tensor, ids: Tensor, mask: Tensor, rows: Sequence[Row]
    ) -> Tensor:
        """Return mean, least and total log-probability of the completions' tokens, (B, 3)."""
        lengths = torch.tensor([len(row) - row.start for row in rows], device=ids.device)
        places = torch.arange(ids.shape[1], device=ids.device)
        said = mask & (places >= ids.shape[1] - lengths[:, None])  # rows are padded on the left
        model: Any = self.trunk
        # A GPU's autocast leaves norms in float32, the last one too; the output layer, read outside
        # of it, takes its own type.
        states = hidden[:, :-1].to(output_head(model).weight.dtype)
        logprobs = hidden_logprobs(model, states, ids[:, 1:], said[:, 1:], temperature=1.0).float()
        total = logprobs.sum(1)
        mean = total / said[:, 1:].sum(1).clamp(min=1)
        found = torch.stack([mean, logprobs.min(1).values, total * TOTAL_SCALE], dim=1)
        return found * torch.tensor([[row.sampled] for row in rows], device=ids.device)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Return raw scores (B,) of rows of token ids."""
        return self.combined(self.head(self.features(rows)))


class LearnedReward:
    """A trained reward model as a reward function: finite scores, in the items' order."""

    def __init__(
        self,
        model: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        limits: Limits,
        calibration: Calibration,
        version: str,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.limits = limits
        self.calibration = calibration
        self.version = version

    def __call__(self, items: Sequence[RewardInput], /) -> list[float]:
        """Return one centred score per item. Raises ModelError if a score is not finite."""
        return list(self.judge(items).scores)

    def from_zero_to_one(self, scores: Sequence[float]) -> list[float]:
        """Return this model's scores as calibrated chances, in (0, 1), in their order.

        Each is the chance that people prefer the completion to one that scores 0, as the centre
        completions do on average: 0.5 is as good as the baseline's, in every version.
        """
        return [self.calibration.probability(score) for score in scores]

    def judge(self, items: Sequence[RewardInput]) -> EnsembleScores:
        """Return the scores with each head's and how far the heads disagree; of one head, 0."""
        rows = encode_rows(self.tokenizer, [(i.prompt, i.completion) for i in items], self.limits)
        by_head = scores_by_head(self.model, rows)
        scores = (self.model.combined(by_head).double() - self.calibration.offset).tolist()
        heads = (by_head.double() - self.calibration.offset).T.tolist()
        return EnsembleScores(
            tuple(scores),
            tuple(disagreement(by_head).tolist()),
            {f"head {i}": tuple(head) for i, head in enumerate(heads, 1)},
        )

    def criterion(self, name: str) -> RewardFunction:
        """Return one criterion as a reward of its own, in [0, 1].

        Raises ModelError where nobody's votes have taught it.
        """
        criteria = self.model.criteria
        known = () if criteria is None else criteria.names
        if criteria is None or name not in known:
            raise ModelError(
                f"the criterion {name} needs people's votes of that name, found "
                f"{', '.join(known) or 'none that were learnt'}; give reward.kinds a weight for "
                "criteria and collect some, or leave the function out"
            )
        place = known.index(name)

        def reward(items: Sequence[RewardInput], /) -> list[float]:
            said = [(item.prompt, item.completion) for item in items]
            rows = encode_rows(self.tokenizer, said, self.limits)
            found = torch.zeros(len(rows))
            for members, features in features_of(self.model, rows):
                with torch.no_grad():
                    found[members] = criteria(features)[:, place].float().cpu()
            return found.tolist()

        return CheckedReward(reward, name, version=f"{self.version}#{name}")


def new_reward_model(
    base: str | Path,
    *,
    seed: int,
    reads: Reads | None = None,
    likelihood: bool = False,
    on_base: bool = False,
    lora_rank: int = 0,
    dtype: str = "float32",
    device: str = "auto",
) -> tuple[RewardModel, PreTrainedTokenizerBase]:
    """Return an untrained reward model on a policy's trunk (output layer dropped) or an encoder.

    It reads the last token, an encoder the first (BERT's [CLS]), or the mean where told so; with
    `likelihood` it keeps the output layer and reads the completion's likelihoods too.
    on_base: the trunk stays the base's, frozen, of this dtype, and is not saved; with lora_rank it
    gets adapters.
    The head starts with deviation 1 / sqrt(H + 1) and no bias, so first scores are small.
    Raises ModelError where the base cannot be read that way.
    Source: arXiv:2403.17031 (N+) detail 11, after openai/lm-human-preferences.
    """
    trunk, tokenizer = _read_base(base, likelihood, dtype)
    if tokenizer.pad_token_id is None:  # padding is masked by position, never by its id
        tokenizer.pad_token = tokenizer.eos_token
    width = state_width(trunk.config)
    head = nn.Linear(width + LIKELIHOODS * likelihood, 1)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:, :width].normal_(
            0.0, 1 / math.sqrt(width + 1), generator=torch.Generator().manual_seed(seed)
        )
        head.bias.zero_()
    encoder = _is_encoder(trunk)
    if encoder and likelihood:
        raise ModelError(
            "an encoder has no likelihood of a completion to read; set reward.reads_likelihood to "
            "false, or take a causal base"
        )
    reads = reads or ("first" if encoder else "last")
    if reads == ("last" if encoder else "first"):
        kind, place = ("an encoder", "first") if encoder else ("a causal base", "last")
        raise ModelError(
            f"of {kind} the head reads the {place} token or the mean, found {reads}; set "
            f"reward.reads to mean, or leave it out"
        )
    if on_base:
        trunk.requires_grad_(False)
        if lora_rank:
            inner = trunk_of(trunk) if likelihood else trunk
            alpha = ALPHA_PER_RANK * lora_rank
            add_adapters(inner, OWN, rank=lora_rank, alpha=alpha, seed=seed)
    model = RewardModel(
        trunk,
        head,
        encoder=encoder,
        reads=reads,
        likelihood=likelihood,
        pad_id=int(tokenizer.pad_token_id),
        base=str(base) if on_base else None,
        adapters=OWN if on_base and lora_rank else None,
    )
    model.source = None if on_base else str(base)
    return model.to(choose_device(device)).eval(), tokenizer


def save_reward_model(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    limits: Limits,
    calibration: Calibration,
) -> None:
    """Write the reward model's files into a folder (see files.new_folder for atomicity)."""
    trunk: Any = model.trunk
    if model.base is None:
        with no_progress_bars():
            trunk.save_pretrained(folder / TRUNK)
    elif model.adapters is not None:
        save_adapters(inner_trunk(model), model.adapters, folder / TRUNK)
    tokenizer.save_pretrained(folder / TRUNK)
    save_file(_weights(model.head), folder / HEAD)
    if model.criteria is not None:
        save_file(_weights(model.criteria), folder / CRITERIA)
    write_json(
        folder / SETTINGS,
        {
            "encoder": model.encoder,
            "reads": model.reads,
            "likelihood": model.likelihood,
            # Of the files, not of the one in memory: whoever loads the model compares with those.
            TOKENIZER: reading_of(load_tokenizer(folder / TRUNK)),
            **({} if model.base is None else {"base": _base_facts(model.base, folder.parent)}),
            **({} if model.source is None else {TRAINED_FROM: base_digest(model.source)}),
            **({} if model.head.out_features == 1 else {"heads": asdict(model.combined)}),
            **({} if model.criteria is None else {"criteria": model.criteria.names}),
            **asdict(limits),
            "calibration": asdict(calibration),
        },
    )


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's weights as safetensors keeps them."""
    return {name: t.detach().float().cpu().contiguous() for name, t in module.state_dict().items()}


def load_reward_model(
    directory: str | Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    base: SharedBase | None = None,
) -> LearnedReward:
    """Return the reward model that `train_reward_model` wrote, ready to score.

    One that was trained on `base` reads with the base that is in memory already; on another, or
    without `base`, it loads that, with weights of `dtype`.
    Its version is a digest of its weights and settings. Raises ModelError if files are missing or
    do not fit together, or the tokenizer is not the one it was trained with.
    """
    root = Path(directory)
    if missing := missing_from(root):
        raise ModelError(
            f"a reward model is needed at {root}, found no {', '.join(missing)}; train one with "
            "train_reward_model or correct the path"
        )
    settings = read_json(root / SETTINGS)
    likelihood = bool(settings.get("likelihood"))
    facts = settings.get("base")
    shares = base is not None and facts is not None and facts["digest"] == base.digest
    trunk: Any
    if base is not None and shares:
        causal: Any = base.policy.model
        trunk = causal if likelihood else trunk_of(causal)
        device = str(base.policy.device)
    else:
        if facts is None:
            trunk = load_trunk(root / TRUNK, likelihood, "float32")
        else:
            trunk, _ = _read_base(base_source(facts, root), likelihood, dtype)
    tokenizer = load_tokenizer(root / TRUNK)
    _check_tokenizer(tokenizer, trunk, settings.get(TOKENIZER), root)
    try:
        weights = load_file(root / HEAD)
        width = state_width(trunk.config) + LIKELIHOODS * likelihood
        heads = len(weights["weight"])
        head = nn.Linear(width, heads)
        head.load_state_dict(weights)
        combined = Combined(**settings["heads"]) if heads > 1 else ONE_HEAD
        limits = Limits(settings["max_prompt_tokens"], settings["max_completion_tokens"])
        calibration = Calibration(**settings["calibration"])
        encoder, reads = settings["encoder"], settings["reads"]
        criteria = None
        if settings.get("criteria"):
            criteria = Criteria(settings["criteria"], width)
            criteria.load_state_dict(load_file(root / CRITERIA))
    except (OSError, RuntimeError, SafetensorError, KeyError, TypeError) as error:
        raise ModelError(
            f"the reward model's trunk, head and settings must belong together in {root}; found: "
            f"{error}; train it again"
        ) from error
    version = reward_version(root)
    name = None
    if facts is not None and (root / TRUNK / ADAPTER).is_file():
        name = f"reward-{version}"  # several may read with one base
        inner = trunk_of(trunk) if likelihood else trunk
        if not adapter_weights(inner, name):  # the same model, loaded again
            load_adapters(inner, name, root / TRUNK)
        for weight in adapter_weights(inner, name).values():
            weight.requires_grad_(False)
    model = RewardModel(
        trunk,
        head,
        encoder=encoder,
        reads=reads,
        likelihood=likelihood,
        pad_id=int(tokenizer.pad_token_id),
        base=None if facts is None else str(facts["path"]),
        adapters=name,
        combined=combined,
    )
    model.criteria = criteria
    model = model.to(choose_device(device)).eval()
    return LearnedReward(model, tokenizer, limits, calibration, version)


def _check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    trunk: Any,
    trained_with: dict[str, str | None] | None,
    root: Path,
) -> None:
    """Raise ModelError where the tokenizer is not the one the reward model was trained with.

    Earlier releases did not say which that was: of theirs one is refused that cannot have been.
    """
    if trained_with is not None:
        found = reading_of(tokenizer)
        other = [name for name, value in trained_with.items() if found[name] != value]
        odd = ", ".join(f"another {name}" for name in other)
    else:
        rows = int(trunk.get_input_embeddings().weight.shape[0])
        odd = "no pad_token" if tokenizer.pad_token_id is None else ""
        if len(tokenizer) > rows:
            odd = f"{len(tokenizer)} tokens where the trunk knows {rows}"
    if odd:
        raise ModelError(
            f"the reward model at {root} needs the tokenizer it was trained with, found {odd} in "
            f"{root / TRUNK}; copy that folder again with all its files (chat_template.jinja is "
            "easily left behind), or train the reward model again"
        )


def reward_version(directory: Path) -> str:
    """Return 16 hex digits that change with the weights or the settings, not with the report."""
    digests = folder_sha256(directory)
    names = [n for n in digests if n.startswith(f"{TRUNK}/") or n in (HEAD, SETTINGS, CRITERIA)]
    return hashed(*(f"{name}:{digests[name]}" for name in names))[:16]


def check_lengths(model: RewardModel, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> None:
    """Raise ModelError where prompts and completions may be longer than the trunk can read.

    An encoder's tokenizer knows too: RoBERTa's positions begin at 2, and it reads 512 of its 514.
    """
    config = text_config(model.trunk.config)
    known = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    known += [tokenizer.model_max_length] if model.encoder else []
    most = min((int(n) for n in known if n and n > 0), default=None)
    needed = limits.max_prompt_tokens + limits.max_completion_tokens
    if most is not None and needed > most:
        raise ModelError(
            f"the reward model's base reads at most {most} tokens, found prompts and completions "
            f"of up to {limits.max_prompt_tokens} + {limits.max_completion_tokens}; lower "
            "policy.max_prompt_tokens or max_completion_tokens, or take another reward.base"
        )


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[tuple[Prompt, str]],
    limits: Limits,
) -> list[Row]:
    """Return each prompt's and completion's token ids, as sampling and SFT lay them out."""
    prompts = encode_prompts(
        tokenizer, [p for p, _ in conversations], max_tokens=limits.max_prompt_tokens
    )
    completions = encode_completions(
        tokenizer, [c for _, c in conversations], max_tokens=limits.max_completion_tokens
    )
    return [Row(p + c, len(p)) for p, c in zip(prompts, completions, strict=True)]


def score_rows(model: RewardModel, rows: Sequence[Row]) -> list[float]:
    """Return raw scores in the rows' order. Raises ModelError if one is not finite."""
    scores: list[float] = model.combined(scores_by_head(model, rows)).tolist()
    return scores


def scores_by_head(model: RewardModel, rows: Sequence[Row]) -> Tensor:
    """Return each head's raw scores, (len(rows), K) on the CPU, in the rows' order.

    Raises ModelError if one is not finite.
    """
    scores = torch.zeros(len(rows), model.head.out_features)
    for members, features in features_of(model, rows):
        with torch.no_grad():
            scores[members] = model.head(features).float().cpu()
    return _finite(scores)


def scores_of_features(model: RewardModel, features: Tensor) -> Tensor:
    """Return what `scores_by_head` does, (N, K), of the texts these features (N, F) are of."""
    with torch.no_grad():
        scores: Tensor = model.head(features.to(model.head.weight)).float().cpu()
    return _finite(scores)


def _finite(scores: Tensor) -> Tensor:
    broken = (~scores.isfinite().all(1)).nonzero().flatten().tolist()
    if broken:
        raise ModelError(
            f"a reward model must give finite scores, found {len(broken)} of {len(scores)} that "
            f"are not (first at item {broken[0] + 1}); its weights are damaged: train it again"
        )
    return scores


def features_of(model: RewardModel, rows: Sequence[Row]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the rows' numbers and features (B, F), batch by batch of like length, no gradients."""
    tokens = tokens_at_once(model.head.weight.device)
    for members in batches_by_length([len(row) for row in rows], tokens):
        with torch.no_grad():
            yield members, model.features([rows[i] for i in members])


def tokens_at_once(device: torch.device) -> int:
    """Return how many padded tokens one forward pass takes there; speed and memory only."""
    return TOKENS_ON_CPU if device.type == "cpu" else TOKENS_AT_ONCE


def batches_by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return the rows' numbers, shortest first, in batches of at most `tokens` once padded.

    A row that is longer than that is a batch of its own.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return bfloat16 autocast on a GPU, nothing elsewhere."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


def _read_base(
    base: str | Path, likelihood: bool, dtype: str
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a base's trunk and its tokenizer; of an adapter's folder with the adapter merged in.

    Left to transformers the adapter would stay a set of its own: it would freeze the trunk, be
    saved in its place, and be switched off with the sets that are trained here.
    """
    if base_of_adapter(Path(base)) is None:
        return load_trunk(base, likelihood, dtype), load_tokenizer(base)
    policy = load_policy(base, device="cpu", dtype=dtype)
    return (policy.model if likelihood else trunk_of(policy.model)), policy.tokenizer


def load_trunk(source: str | Path, likelihood: bool, dtype: str) -> Any:
    """Return the trunk at source, with its output layer where likelihoods are read."""
    trunk = load_weights(AutoModelForCausalLM if likelihood else AutoModel, source, dtype)
    if isinstance(getattr(trunk, "pooler", None), nn.Module):
        trunk.pooler = None  # a layer for BERT's own tasks, random where a checkpoint lacks it
    return trunk


def _hidden(trunk: Any, ids: Tensor, mask: Tensor, *, encoder: bool) -> Tensor:
    """Return the trunk's last hidden states (B, S, H); of padding, anything.

    A causal batch with much padding, as the two sides of a pair give, runs packed.
    """
    if encoder:
        found: Tensor = trunk(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return found
    if float(mask.float().mean()) < PACKED_BELOW and can_pack(trunk):
        packed, where = packed_hidden(trunk, ids, mask)
        flat = packed.new_zeros(ids.numel(), packed.shape[1]).index_copy(0, where, packed)
        return flat.view(*ids.shape, -1)
    padded: Tensor = trunk(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=position_ids(mask),
        use_cache=False,
    ).last_hidden_state
    return padded


def inner_trunk(model: RewardModel) -> nn.Module:
    """Return the trunk without an output layer: where adapters sit."""
    return trunk_of(model.trunk) if model.likelihood else model.trunk


def _base_facts(base: str, parent: Path) -> dict[str, str]:
    """Return where the base is, from the reward model's parent folder, and what it must be."""
    folder = Path(base)
    here = os.path.relpath(folder.resolve(), parent.resolve()) if folder.is_dir() else base
    return {"path": here, "digest": base_digest(base)}


def base_source(facts: dict[str, str], root: Path) -> str | Path:
    """Return the base to load: the folder as it was, or the hub id."""
    folder = (root.resolve().parent / facts["path"]).resolve()
    if not folder.is_dir():
        if facts["digest"] == facts["path"]:  # a hub id stands for itself
            return facts["path"]
        raise ModelError(
            f"the reward model at {root} reads with the base it was trained on, found none at "
            f"{folder}; put that back, or train the reward model again"
        )
    if base_digest(folder) != facts["digest"]:
        raise ModelError(
            f"the reward model at {root} needs the base it was trained on, found other weights at "
            f"{folder}; put those back, or train the reward model again"
        )
    return folder


def _is_encoder(trunk: Any) -> bool:
    """True for the masked-language-model families: BERT, RoBERTa, DeBERTa, ModernBERT, ..."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    masked = type(trunk.config) in MODEL_FOR_MASKED_LM_MAPPING
    return masked and not getattr(trunk.config, "is_decoder", False)
