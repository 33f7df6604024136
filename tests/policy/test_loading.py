"""Policies come back as they were saved, and nothing unsafe or unregistered is loaded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from rlhf_pipeline.errors import HashMismatch, ModelError
from rlhf_pipeline.files import folder_sha256
from rlhf_pipeline.policy import sampling
from rlhf_pipeline.policy.adapters import base_digest
from rlhf_pipeline.policy.chat import decode_completions, encode_completion, render
from rlhf_pipeline.policy.loading import (
    Policy,
    load_policy,
    load_tokenizer,
    save_policy,
    switch_off_dropout,
)
from rlhf_pipeline.policy.tiny import build_tiny
from rlhf_pipeline.ppo.plan import read_config
from rlhf_pipeline.records import Message
from tests.policy.test_chat import plain_tokenizer
from tests.policy.test_families import family_model

TEXTS = ["please open the settings page", "where is my order"] * 5
SIZES: dict[str, int] = {
    "vocabulary": 300,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 64,
    "seed": 0,
}
IDS = torch.tensor([[5, 40, 41, 42]])


def logits_of(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = policy.model(IDS).logits
    return logits


def save_gpt2(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = plain_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_saved_policy_loads_as_the_same_model(tmp_path: Path) -> None:
    policy = build_tiny(TEXTS, **SIZES)
    save_policy(policy, tmp_path / "p")
    save_policy(policy, tmp_path / "p")  # replaces
    again = load_policy(tmp_path / "p", device="cpu")
    torch.testing.assert_close(logits_of(again), logits_of(policy))
    assert (again.eos_id, again.pad_id) == (policy.eos_id, policy.pad_id)
    assert again.eos_id != again.pad_id
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    assert again.context_length == 64
    assert again.device.type == "cpu"
    assert not list(tmp_path.glob(".*"))
    assert not [n for n in folder_sha256(tmp_path / "p") if n.endswith((".bin", ".pt", ".pkl"))]
    assert load_policy(tmp_path / "p", device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16


def test_the_tiny_policy_is_the_same_for_the_same_seed_only() -> None:
    one, two, other = (build_tiny(TEXTS, **{**SIZES, "seed": s}) for s in (1, 1, 2))
    assert torch.equal(logits_of(one), logits_of(two))
    assert not torch.equal(logits_of(one), logits_of(other))
    assert one.tokenizer.get_vocab() == other.tokenizer.get_vocab()


def test_a_missing_pad_token_is_added_as_an_unlikely_one_and_dropout_is_off(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "gpt2")
    policy = load_policy(str(tmp_path / "gpt2"), device="cpu")
    assert policy.pad_id != policy.eos_id
    assert policy.context_length == 64
    rows = policy.model.get_input_embeddings().weight
    assert rows.shape[0] == len(policy.tokenizer)
    torch.testing.assert_close(rows[-1], rows[:-1].mean(0))
    dropouts = [m.p for m in policy.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts
    assert set(dropouts) == {0.0}
    policy.model.train()
    torch.testing.assert_close(logits_of(policy), logits_of(policy), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_bigcode", {"attn_pdrop": 0.5}),  # a number of the attention's own
        ("seed_oss", {"residual_dropout": 0.5, "num_key_value_heads": 1}),
        ("bloom", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
        ("mixtral", {"router_jitter_noise": 0.5, "num_key_value_heads": 1}),
    ],
)
def test_a_family_computes_the_same_in_training_whatever_it_calls_its_dropout(
    family: str, changes: dict[str, Any]
) -> None:
    model = family_model(family, **changes)
    ids = IDS % model.config.vocab_size
    with torch.no_grad():
        wanted = model(ids).logits
        assert not torch.allclose(model.train()(ids).logits, wanted, atol=1e-2)
        switch_off_dropout(model)
        torch.testing.assert_close(model(ids).logits, wanted)


def test_an_output_layers_bias_gets_the_mean_for_an_added_token_too(tmp_path: Path) -> None:
    tokenizer = plain_tokenizer()
    model = family_model("phi", vocab_size=len(tokenizer), pad_token_id=None)
    torch.nn.init.normal_(model.lm_head.bias, mean=-5.0)
    model.save_pretrained(tmp_path / "phi")
    tokenizer.save_pretrained(tmp_path / "phi")
    bias = load_policy(tmp_path / "phi", device="cpu").model.get_output_embeddings().bias
    assert bias.shape == (len(tokenizer) + 1,)
    torch.testing.assert_close(bias[-1], bias[:-1].mean())  # 0 would be the likeliest by far


def test_a_model_whose_generation_config_cannot_be_saved_is_trained_and_saved(
    tmp_path: Path,
) -> None:
    """Vicuna's: a temperature without do_sample, which transformers loads and refuses to save."""
    source = tmp_path / "vicuna"
    save_policy(build_tiny(TEXTS, **SIZES), source)
    path = source / "generation_config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "temperature": 0.9, "top_p": 0.6}))
    policy = load_policy(source, device="cpu")
    save_policy(policy, tmp_path / "p")
    kept = json.loads((tmp_path / "p" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == told["eos_token_id"]
    assert kept["pad_token_id"] == policy.pad_id
    assert "temperature" not in kept


def test_a_saved_policy_tells_servers_what_ends_it_and_not_how_its_base_was_sampled(
    tmp_path: Path,
) -> None:
    """Qwen's: a server that reads it would put penalties on what was trained without."""
    source = tmp_path / "qwen"
    save_policy(build_tiny(TEXTS, **SIZES), source)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    (source / "generation_config.json").write_text(json.dumps({**sampled, "eos_token_id": [5, 1]}))
    policy = load_policy(source, device="cpu")
    assert policy.eos_id == 1
    told = policy.model.generation_config
    assert told is not None
    told.eos_token_id = [1, *told.eos_token_id]  # as TRL's trainer has it
    save_policy(policy, tmp_path / "p")
    kept = json.loads((tmp_path / "p" / "generation_config.json").read_text())
    del kept["transformers_version"]
    assert kept == {"eos_token_id": [1, 5], "pad_token_id": policy.pad_id}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # the pad row was added
def test_an_adapter_folder_loads_merged_and_saves_merged(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "base")
    base = load_policy(tmp_path / "base", device="cpu")
    plain = logits_of(base)
    adapted: Any = get_peft_model(
        base.model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits_of(Policy(adapted, base.tokenizer))
    assert not torch.allclose(expected, plain, atol=1e-3)
    loaded = load_policy(tmp_path / "adapter", device="cpu")
    assert all(weight.requires_grad for weight in loaded.model.parameters())  # as any base's
    own, _, its_base = base_digest(tmp_path / "adapter").partition("+")
    assert its_base == base_digest(tmp_path / "base") != own
    torch.testing.assert_close(logits_of(loaded), expected)
    save_policy(Policy(adapted, base.tokenizer), tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    torch.testing.assert_close(logits_of(load_policy(tmp_path / "merged", device="cpu")), expected)
    torch.testing.assert_close(logits_of(Policy(adapted, base.tokenizer)), expected)


def test_files_must_be_the_registered_ones(tmp_path: Path) -> None:
    policy = build_tiny(TEXTS, **SIZES)
    save_policy(policy, tmp_path / "p")
    digests = folder_sha256(tmp_path / "p")
    load_policy(tmp_path / "p", device="cpu", expected_sha256=digests)
    (tmp_path / "p" / "extra.txt").write_text("x")
    with pytest.raises(HashMismatch, match=r"found 1 that differ.*extra\.txt"):
        load_policy(tmp_path / "p", expected_sha256=digests)
    with pytest.raises(ModelError, match="needs a local folder"):
        load_policy("some/hub-id", expected_sha256=digests)


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="found none at"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="found none at"):
        load_policy("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="found neither"):
        load_policy(tmp_path / "empty")
    save_policy(build_tiny(TEXTS, **SIZES), tmp_path / "p")
    (tmp_path / "p" / "model.safetensors").rename(tmp_path / "p" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_policy(tmp_path / "p")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({}))
    for read in (load_policy, read_config):
        with pytest.raises(ModelError, match="save the adapter again"):
            read(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    for read in (load_policy, read_config):
        with pytest.raises(ModelError, match="must name its base model"):
            read(adapter)


def test_models_that_load_at_once_have_all_their_weights(tmp_path: Path) -> None:
    """A service loads its champion while it loads a reward model, and explains an answer."""
    save_policy(build_tiny(TEXTS, **SIZES), tmp_path / "p")
    tie_weights = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load_policy, tmp_path / "p", device="cpu") for _ in range(12)]
    assert [load.exception() for load in loads] == [None] * 12
    assert PreTrainedModel.tie_weights is tie_weights


def test_a_model_that_is_recurrent_alone_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=400, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "m")
    build_tiny(TEXTS, **SIZES).tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="found a MambaForCausalLM; take another base"):
        load_policy(tmp_path / "m", device="cpu")


def save_family(family: str, folder: Path, **changes: Any) -> None:
    """A small random model of the family beside a tokenizer that fits it."""
    tokenizer = plain_tokenizer()
    end = int(tokenizer.eos_token_id)
    options = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": end, **changes}
    family_model(family, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SMALL = {"intermediate_size": 24, "num_key_value_heads": 1, "bos_token_id": 0}


@pytest.mark.parametrize(
    ("family", "changes", "found"),
    [
        ("bert", {"intermediate_size": 24}, "BertLMHeadModel whose logits change with tokens"),
        # It goes through a layer of its own before the output layer.
        ("modernbert-decoder", SMALL, r"ModernBertDecoderForCausalLM \(model_type modernbert-dec"),
        ("minimax", SMALL, "MiniMaxForCausalLM, which says: MiniMax uses cache of its own"),
    ],
)
def test_a_model_whose_logprobs_would_be_wrong_is_refused(
    family: str, changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    save_family(family, tmp_path, **changes)
    with pytest.raises(ModelError, match=rf"is needed, found a {found}.*take another base"):
        load_policy(tmp_path, device="cpu")


def test_a_model_that_misreads_its_past_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gpt2(tmp_path)
    load_policy(tmp_path, device="cpu", dtype="bfloat16")  # whose rounding is coarse
    monkeypatch.setattr(sampling, "run_trunk", without_its_past(sampling.run_trunk))
    with pytest.raises(ModelError, match="GPT2LMHeadModel whose logits differ then; take another"):
        load_policy(tmp_path, device="cpu")


def without_its_past(run_trunk: Any) -> Any:
    """Return the function with a cache that forgets: a step's token is taken for the first."""

    def forgetful(trunk: Any, ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        return run_trunk(trunk, ids, mask[:, -ids.shape[1] :], positions, None)

    return forgetful


def test_weights_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    """Transformers would give what is missing random weights, others each time."""
    save_policy(build_tiny(TEXTS, **SIZES), tmp_path)
    file = tmp_path / "model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({n: w for n, w in weights.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"LlamaForCausalLM .*, found 1 missing \({name}\)"):
        load_policy(tmp_path, device="cpu")
    save_file({**weights, name: torch.zeros(3, 3)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="or choose another model"):
        load_policy(tmp_path, device="cpu")
    for cut in (len(whole) // 2, 0):  # a copy that broke off
        file.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="or choose another model"):
            load_policy(tmp_path, device="cpu")


def test_an_adapter_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """PEFT would only warn, and the base come back as it was."""
    save_policy(build_tiny(TEXTS, **SIZES), tmp_path / "base")
    base = load_policy(tmp_path / "base", device="cpu").model
    base.name_or_path = str(tmp_path / "base")
    adapted: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    load_policy(tmp_path / "adapter", device="cpu")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    save_file({n: w for n, w in weights.items() if "lora_B" not in n}, file)
    with pytest.raises(ModelError, match=r"every weight.*found: Found missing adapter keys"):
        load_policy(tmp_path / "adapter", device="cpu")
    save_file({n: torch.zeros(3, 3) for n in weights}, file)
    with pytest.raises(ModelError, match=r"(?s)of the base it names.*size mismatch"):
        load_policy(tmp_path / "adapter", device="cpu")
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="copy or save it again"):
        load_policy(tmp_path / "adapter", device="cpu")


def test_a_tokenizer_is_needed_with_an_end_token(tmp_path: Path) -> None:
    policy = build_tiny(TEXTS, **SIZES)
    save_policy(policy, tmp_path / "p")
    settings = tmp_path / "p" / "tokenizer_config.json"
    without_end = {k: v for k, v in json.loads(settings.read_text()).items() if k != "eos_token"}
    settings.write_text(json.dumps(without_end))
    with pytest.raises(ModelError, match="an end token is needed"):
        load_policy(tmp_path / "p")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "p" / name).unlink()
    with pytest.raises(ModelError, match="a tokenizer is needed") as refusal:
        load_policy(tmp_path / "p")
    assert "\n" not in str(refusal.value)  # transformers says it in several


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma", "bert"])
def test_a_configuration_alone_is_no_tokenizer(tmp_path: Path, family: str) -> None:
    """It makes one of special tokens, for which every text is empty or unknown."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="found one without words; save it beside the model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["models/My model", "models/base/v1", "./base", "~/base"])
def test_what_can_be_no_hub_id_is_a_folder_that_is_not_there(name: str) -> None:
    for load in (load_policy, read_config):
        with pytest.raises(ModelError, match="a model folder is needed, found none at"):
            load(name)


def test_a_model_ends_where_its_chat_template_ends_a_turn(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "gpt2")
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(["<turn>", "<end_of_turn>"])  # not even called special
    tokenizer.chat_template = (
        "{% for m in messages %}<turn>{{ m['content'] }}<end_of_turn>{% endfor %}<turn>"
    )
    tokenizer.save_pretrained(tmp_path / "gpt2")
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    save_policy(load_policy(tmp_path / "gpt2", device="cpu"), tmp_path / "saved")
    for folder in ("gpt2", "saved"):
        policy = load_policy(tmp_path / folder, device="cpu")
        assert policy.eos_id == end != policy.pad_id
        assert encode_completion(policy.tokenizer, "hello", max_tokens=20)[-1] == end
        assert decode_completions(policy.tokenizer, [[0, end]]) == [""]
        assert policy.model.generation_config is not None
        assert policy.model.generation_config.eos_token_id == [end, 0]


@pytest.mark.parametrize("old", ["<|endoftext|>", None])
def test_a_template_that_begins_with_eos_token_goes_on_as_it_was(
    old: str | None, tmp_path: Path
) -> None:
    save_gpt2(tmp_path / "gpt2")
    tokenizer = plain_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    tokenizer.eos_token = old
    template = (
        "\n{{ eos_token }}{% for m in messages %}<turn>{{ m['content'] }}<end>{% endfor %}<turn>"
    )
    prompt = (Message("user", "hello"),)
    for templates in (template, {"default": template, "other": template}):
        tokenizer.chat_template = templates
        before = render(tokenizer, prompt)
        assert before == f"\n{old or ''}<turn>hello<end><turn>"
        tokenizer.save_pretrained(tmp_path / "gpt2")
        save_policy(load_policy(tmp_path / "gpt2", device="cpu"), tmp_path / "saved")
        again = load_tokenizer(tmp_path / "saved")
        assert again.eos_token == "<end>"
        assert render(again, prompt) == before
        elsewhere = AutoTokenizer.from_pretrained(tmp_path / "saved")  # who knows nothing of us
        assert render(elsewhere, prompt) == before
    tokenizer.chat_template = template.replace("{{ eos_token }}", "")
    tokenizer.save_pretrained(tmp_path / "other")
    assert load_tokenizer(tmp_path / "other").chat_template == tokenizer.chat_template


def test_tiny_sizes_must_fit_together() -> None:
    with pytest.raises(ModelError, match="at least 261 tokens, found 100"):
        build_tiny(TEXTS, **{**SIZES, "vocabulary": 100})
    with pytest.raises(ModelError, match="whole even number"):
        build_tiny(TEXTS, **{**SIZES, "width": 30, "heads": 4})
