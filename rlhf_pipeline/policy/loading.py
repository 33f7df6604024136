"""Loading and saving a policy: a language model and the tokenizer it was trained with.

Weights are untrusted input: only safetensors are read, code that ships with a model is never run,
and files can be held against the digests that were registered. What this does not protect: the
files may change between the check and the load if someone else can write to the folder.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from rlhf_pipeline.errors import ConfigError, HashMismatch, ModelError, PromptRefused
from rlhf_pipeline.files import folder_sha256, new_folder, read_json, write_json
from rlhf_pipeline.policy.chat import render, turn_end
from rlhf_pipeline.policy.packed import fuse_steps
from rlhf_pipeline.records import Message, Role

PAD_TOKEN = "<|pad|>"  # given to tokenizers that have none (GPT-2, Phi-2)
ADAPTER = "adapter_config.json"
# While transformers 5.17 reads a model it takes `tie_weights` from every class (no_tie_weights in
# its initialization.py): of two that load at once one would lack its output layer, and it may never
# come back for those after them.
ONE_AT_A_TIME = threading.Lock()
TRAINED_WITH = re.compile("drop|(?<!router_)jitter")
"""Within the name of a number that only training reads: what is dropped, and noise of experts."""
HUB_ID = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?", re.ASCII)


@dataclass
class Policy:
    """A causal language model and its tokenizer; pad is never eos, dropout is off."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def eos_id(self) -> int:
        """The token that ends a completion."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        """The token that fills a rectangle; it never carries meaning."""
        return int(self.tokenizer.pad_token_id)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and completion together."""
        return context_length_of(self.model.config)


def text_config(config: Any) -> Any:
    """Return what a configuration says of text: all it says, but of models that see or hear too."""
    return config.get_text_config()


def context_length_of(config: Any) -> int:
    """Return the most tokens that a model of this configuration reads at once."""
    config = text_config(config)
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return 2048  # no stated limit (rotary or ALiBi positions without a table)


def load_policy(
    source: str | Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    expected_sha256: Mapping[str, str] | None = None,
) -> Policy:
    """Return the policy kept at a local folder or under a hub id, in eval mode with dropout off.

    A folder with a PEFT adapter gives its base model with the adapter merged in.
    `device` is "auto" (GPU if there is one), "cpu", "cuda" or "cuda:1"; `dtype` a torch name or
    "auto". Raises HashMismatch if a file differs from `expected_sha256`, ModelError if the model
    cannot be used.
    """
    source = local_folder(source)
    if expected_sha256 is not None:
        check_sha256(source, expected_sha256)
    target = choose_device(device)
    base = base_of_adapter(source)
    model = load_weights(AutoModelForCausalLM, base or source, dtype)
    _check_keeps_the_past(model)
    has_tokenizer = base is None or (Path(source) / "tokenizer_config.json").is_file()
    policy = Policy(model, load_tokenizer(source if has_tokenizer else base or source))
    _give_pad_token(policy)
    _tell_whoever_generates(policy)
    if base is not None:
        policy.model = _with_adapter(policy.model, source)
    switch_off_dropout(policy.model)
    policy.model = policy.model.to(target).eval()
    _check_logits(policy.model)
    return policy


def save_policy(policy: Policy, directory: str | Path, *, base_digest: str | None = None) -> None:
    """Write a plain transformers folder (safetensors) that replaces `directory` in one rename.

    Adapters, if the model carries any, are merged into what is written (`merged_weights`); with the
    digest of their base they are kept beside it too, so that a later run can train them on.
    """
    model: Any = policy.model
    _tell_whoever_generates(policy)
    with new_folder(directory) as folder, no_progress_bars():
        if hasattr(model, "merge_and_unload"):  # a PeftModel, told without the import's 5 s
            from rlhf_pipeline.policy.adapters import merged_weights

            plain = model.get_base_model()
            plain.save_pretrained(folder, state_dict=merged_weights(plain))
            config = folder / "config.json"
            write_json(config, {**read_json(config), "dtype": "float32"})
        else:
            model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        if base_digest is not None:
            from rlhf_pipeline.policy.adapters import keep_adapters

            keep_adapters(policy.model, base_digest, folder)


def _check_keeps_the_past(model: PreTrainedModel) -> None:
    """Raise ModelError unless the model takes what it kept of earlier tokens as decoding gives it.

    One that is recurrent alone (Mamba, RWKV) would take each token for the first.
    """
    if "past_key_values" not in signature(type(model.base_model).forward).parameters:
        raise ModelError(
            "a model whose past is keys and values, or these beside a recurrent state, is needed, "
            f"found a {type(model).__name__}; take another base"
        )


def _check_logits(model: PreTrainedModel) -> None:
    """Raise ModelError unless a few tokens get the logits that the model's own pass gives them.

    They would not where a family does more behind its output layer than `logits_of` knows, or
    keeps its past in a way of its own; and an encoder's would change with tokens that come later.
    Then nothing would fail, and every log-probability be wrong. Differences within rounding pass,
    as do numbers that are none: of those decoding tells.
    """
    from rlhf_pipeline.policy.cache import empty_cache
    from rlhf_pipeline.policy.sampling import logits_of, run_trunk, trunk_of

    trunk, name = trunk_of(model), type(model).__name__
    words = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[3, 5, 7, 11], [3, 5, 7, 13]], device=model.device) % words
    mask = torch.ones_like(ids)
    positions = mask.cumsum(-1) - 1
    with torch.no_grad():
        own: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        try:
            whole = logits_of(model, run_trunk(trunk, ids, mask, positions, None))
            cache = empty_cache(trunk.config)
            run_trunk(trunk, ids[:, :-1], mask[:, :-1], positions[:, :-1], cache)
            step = run_trunk(trunk, ids[:, -1:], mask, positions[:, -1:], cache)
            gone_on = logits_of(model, step)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                "a model that keeps its past in a DynamicCache of transformers, with an output "
                f"layer that reads its last hidden states, is needed, found a {name}, which says: "
                f"{_one_line(error)}; take another base"
            ) from error

    def gap(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.float() - other.float()).abs().max() / own.float().abs().max())

    rounding = max(1e-3, 4 * torch.finfo(model.dtype).eps)
    if gap(own[0, :-1], own[1, :-1]) > rounding:
        raise ModelError(
            "a model that reads from left to right is needed, found a "
            f"{name} whose logits change with tokens that come later; set is_decoder in its "
            "config.json if it was trained as a decoder, or take another base"
        )
    if gap(own, whole) > rounding:
        raise ModelError(
            "a model whose logits are its output layer's, scaled or capped in a way that is known, "
            f"is needed, found a {name} (model_type {model.config.model_type}) that makes others "
            "of them; take another base, or teach logits_of its way"
        )
    # A mixture may choose other experts where rounding is coarse; a past misread is far off.
    if gap(own[:, -1:], gone_on) > 0.1:
        raise ModelError(
            "a model that goes on from what it kept of earlier tokens as it reads the whole is "
            f"needed, found a {name} whose logits differ then; take another base"
        )


def check_sha256(source: str | Path, expected: Mapping[str, str]) -> None:
    """Raise HashMismatch unless the folder holds exactly the expected files."""
    if not Path(source).is_dir():
        raise ModelError(
            f"expected_sha256 needs a local folder, found the hub id {source!r}; download it first"
        )
    found = folder_sha256(source)
    differing = sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
    if differing:
        raise HashMismatch(
            f"the files in {source} must be the registered ones, found {len(differing)} that "
            f"differ, are missing or are extra ({', '.join(differing[:5])}); restore them from "
            "the registry"
        )


def choose_device(device: str) -> torch.device:
    """Return the torch device; "auto" is the first GPU, or the CPU where there is none.

    Of several processes that were launched together each has a GPU of its own. Raises ConfigError
    for a GPU that this machine has not.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if device == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    needed, found = (chosen.index or 0) + 1, torch.cuda.device_count()
    if chosen.type == "cuda" and needed > found:
        raise ConfigError(
            f"{chosen} needs a machine with {needed} GPU(s) that torch can use, found {found}; "
            "set policy.device to auto or to one that is there, or launch fewer processes"
        )
    return chosen


def switch_off_dropout(model: nn.Module) -> None:
    """Make train() and eval() compute the same, so the first PPO ratio is exactly 1.

    Families keep how much they drop under names of their own, in modules and in configurations that
    modules read as they compute; and mixtures of experts how much noise they train with. PhiMoE's
    router reads its own in either mode, and is left to whoever trains it.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        config = getattr(module, "config", None)
        for holder in (module, config) if isinstance(config, PreTrainedConfig) else (module,):
            for name, setting in vars(holder).items():
                if isinstance(setting, float) and TRAINED_WITH.search(name):
                    setattr(holder, name, 0.0)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off standard error inside the block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_weights(auto_class: Any, source: str | Path, dtype: str, **options: Any) -> Any:
    """Return what an Auto class reads from `source`: safetensors only, no code from the model.

    Raises ModelError where it cannot be read, or lacks weights, which would be random ones else.
    """
    try:
        with ONE_AT_A_TIME, no_progress_bars():
            model, found = auto_class.from_pretrained(
                source,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"a model that transformers knows, with safetensors weights, is needed at {source}; "
            f"found: {_one_line(error)}; convert its weights to safetensors or choose another model"
        ) from error
    missing = sorted(name for name in found["missing_keys"] if "pooler" not in name.split("."))
    if missing:  # but BERT's pooler, which nothing here reads
        raise ModelError(
            f"every weight of a {type(model).__name__} is needed at {source}, found {len(missing)} "
            f"missing ({', '.join(missing[:3])}); copy or convert the model again"
        )
    fuse_steps(model)
    _forget_its_sampling(model)
    return model


def _forget_its_sampling(model: Any) -> None:
    """Keep the token ids alone of a generation config: how its makers sample is not how we train.

    Nothing here samples by that file, but servers do (vLLM), at another temperature or with
    penalties. And some could not be saved when training is over (Vicuna's: a temperature without
    do_sample).
    """
    config = getattr(model, "generation_config", None)
    if config is not None:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: getattr(config, name) for name in names}
        model.generation_config = GenerationConfig(**ids)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer; raises ModelError where there is none, or one without words or end."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, padding_side="left"
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"a tokenizer is needed at {source}; found: {_one_line(error)}; save it beside the "
            "model"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # Of most families that is made where a folder has a configuration alone.
        raise ModelError(
            f"a tokenizer is needed at {source}, found one without words; save it beside the model"
        )
    end = turn_end(tokenizer)
    if end != tokenizer.eos_token:
        _end_with(tokenizer, end)
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None:
        tokenizer.eos_token = tokenizer.sep_token  # encoders end with a separator
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"a tokenizer with an end token is needed, found none at {source}; set eos_token"
        )
    return tokenizer


def _end_with(tokenizer: PreTrainedTokenizerBase, end: str | None) -> None:
    """Make `end` the end token; the chat template goes on writing what it wrote.

    A template may begin with eos_token, where it is the beginning of text as well. There the name
    keeps its old meaning, in the template itself, so that it is saved and exported with it.
    """
    roles: tuple[Role, ...] = ("user", "assistant", "user")
    prompt, old = tuple(Message(role, "a") for role in roles), tokenizer.eos_token or ""
    try:
        before = render(tokenizer, prompt)
    except PromptRefused:  # it takes one question only
        prompt = prompt[-1:]
        before = render(tokenizer, prompt)
    tokenizer.add_special_tokens({"eos_token": end})
    if render(tokenizer, prompt) == before:
        return
    # Templates are rendered with trim_blocks: the line's end is not written.
    line = f"{{% set eos_token = {json.dumps(old, ensure_ascii=False)} %}}\n"
    template = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: line + text for name, text in template.items()}
    else:
        tokenizer.chat_template = line + template


def _one_line(error: Exception) -> str:
    """Return what a library said on one line, as whoever reads a stage's log for its end does."""
    return " ".join(str(error).split())


def local_folder(source: str | Path) -> str | Path:
    """Return a Path for what is a folder here, else the hub id as it was given.

    Raises ModelError where it is no model's folder, and can be no hub id either.
    """
    path = Path(source)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", ADAPTER)):
            raise ModelError(
                f"a model folder holds config.json or {ADAPTER}, found neither in {path}; "
                "check the path"
            )
        return path
    if str(source).startswith("models:/"):
        raise ModelError(
            f"a folder or a hub id is needed here, found {source}: name it as policy.base, or "
            "take its folder with registry.bases.base_folder"
        )
    if isinstance(source, Path) or HUB_ID.fullmatch(source) is None:
        raise ModelError(f"a model folder is needed, found none at {source}; check the path")
    return str(source)


def base_of_adapter(source: str | Path) -> str | Path | None:
    """Return where the base model of an adapter folder is; None if `source` is a whole model."""
    if not isinstance(source, Path) or not (source / ADAPTER).is_file():
        return None
    if not (source / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"adapter_model.safetensors is needed in {source}, found none; save the adapter again "
            "with safe_serialization on"
        )
    base = read_json(source / ADAPTER).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"the adapter in {source} must name its base model, found none; set "
            f"base_model_name_or_path in {ADAPTER}"
        )
    return local_folder(base)


def _with_adapter(model: PreTrainedModel, folder: str | Path) -> Any:
    """Return the model with the folder's adapter merged in; ModelError where it does not fit."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # Of weights that are missing PEFT only warns, and the model stays as it was.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
            return merged.requires_grad_(True)  # PEFT leaves the base it froze so
    except (UserWarning, OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"an adapter with every weight, of the base it names, is needed in {folder}; found: "
            f"{error}; copy or save it again"
        ) from error


def _give_pad_token(policy: Policy) -> None:
    """Make pad differ from eos, adding a token (and its row of weights) where there is none.

    Rows that are added are the mean of the others: a row of zeros would score above every real
    token in models whose logits are all negative, such as GPT-2.
    """
    tokenizer, model = policy.tokenizer, policy.model
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        with torch.no_grad():
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                for of_rows in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
                    if of_rows is not None:
                        of_rows[rows:] = of_rows[:rows].float().mean(0).to(of_rows.dtype)


def _tell_whoever_generates(policy: Policy) -> None:
    """Write down what ends and what fills, for programs that serve the saved folder by its files.

    The end token joins those that the model came with, each once: TRL puts it before them again.
    """
    config, told = policy.model.config, policy.model.generation_config
    config.pad_token_id = policy.pad_id
    if told is None:
        return
    told.pad_token_id = policy.pad_id
    known = told.eos_token_id if isinstance(told.eos_token_id, list) else [told.eos_token_id]
    ends = list(dict.fromkeys([policy.eos_id, *(end for end in known if end is not None)]))
    told.eos_token_id = ends if len(ends) > 1 else policy.eos_id
