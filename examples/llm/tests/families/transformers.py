"""Small random models of each family by transformers, some with an adapter by PEFT: `make FOLDER` writes them with what they compute, `compare FOLDER`
loads what was made of them and computes it again."""

import sys
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

TEXT = "the cat and the other cat, naïve — and the bell 日本 <s>\n"
ROWS, TOKENS = 3, 7

LLAMA = dict(vocab_size=320, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2)
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
           "original_max_position_embeddings": 16}
# Each name is a folder; the second part is the vocabulary's kind.
FAMILIES = {
    "gpt2": ("gpt2", "level", dict(vocab_size=320, n_embd=24, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2,
                                   eos_token_id=1, bos_token_id=1)),
    "llama-2": ("llama", "fallback", dict(LLAMA, num_key_value_heads=4)),
    "llama-linear": ("llama", "level", dict(LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0})),
    "llama-3": ("llama", "level", dict(LLAMA, rope_parameters=LLAMA_3, tie_word_embeddings=True, eos_token_id=[1, 2])),
    "llama-bias": ("llama", "level", dict(LLAMA, attention_bias=True, head_dim=10)),
    "mistral": ("mistral", "fallback", dict(LLAMA, sliding_window=8, head_dim=8)),
    "qwen2": ("qwen2", "level", dict(LLAMA, tie_word_embeddings=True)),
    "qwen3": ("qwen3", "level", dict(LLAMA, head_dim=8)),
}
# Which of them get an adapter, and what its configuration says.
ADAPTERS = {
    "gpt2": dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    "llama-bias": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"]),
    "llama-3": dict(r=2, lora_alpha=3, target_modules=["k_proj", "gate_proj", "up_proj", "down_proj"]),
    "qwen3": dict(r=4, lora_alpha=2, use_rslora=True, target_modules=["self_attn.q_proj", "down_proj"]),
}


def level():
    """Byte-level pairs, as Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT.replace("<s>", "")] * 20, trainer)
    return tokenizer


def fallback():
    """Pairs of characters with single bytes for those that are unknown, as Llama 2's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(["the cat and the other cat and the bell"] * 20, trainer)
    return tokenizer


def with_beginning(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def computed(model, inputs, targets):
    """The logits, the loss and the gradients."""
    logits = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    model.zero_grad()
    loss.backward()
    named = [(name.replace(".default", ""), weight) for name, weight in model.named_parameters()]
    found = {f"grad.{name}": weight.grad for name, weight in named if weight.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **found}


def make(folder):
    torch.manual_seed(1)
    for name, (kind, vocabulary, sizes) in FAMILIES.items():
        config = AutoConfig.for_model(kind, attn_implementation="eager", resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, **sizes)
        model = AutoModelForCausalLM.from_config(config).double()
        for weight in model.parameters():
            # Weights of norms and biases that are neither one nor zero.
            weight.data.add_(0.1 * torch.randn_like(weight))
        model.float().eval().save_pretrained(folder / name, max_shard_size="20KB")
        tokenizer = with_beginning({"level": level, "fallback": fallback}[vocabulary]())
        tokenizer.save_pretrained(folder / name)
        tokens = torch.randint(config.vocab_size, (ROWS, TOKENS + 1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        text = torch.tensor(tokenizer(TEXT).input_ids)
        expected = {"inputs": inputs, "targets": targets, "text": text, **computed(model.double(), inputs, targets)}
        save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / f"{name}.safetensors")
        (folder / f"{name}.txt").write_text(tokenizer.decode(text, skip_special_tokens=True))
        if name in ADAPTERS:
            adapted = peft.get_peft_model(model.float(), peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]))
            for weight in adapted.parameters():
                if weight.requires_grad:
                    weight.data.normal_(0, 0.3)
            adapted.save_pretrained(folder / name / "adapter")
            save_file(computed(adapted.double(), inputs, targets), folder / f"{name}-adapter.safetensors")


def compare_adapter(folder, name, inputs):
    """What was written of an adapter that was read, and a model with the adapter in its weights."""
    adapter, again = (folder / name / which for which in ("adapter", "adapter-again"))
    before, after = (load_file(one / "adapter_model.safetensors") for one in (adapter, again))
    assert before.keys() == after.keys() and all(after[key].equal(tensor) for key, tensor in before.items()), name
    logits = load_file(folder / f"{name}-adapter.safetensors")["logits"]
    how = dict(dtype=torch.float64, attn_implementation="eager")
    base = AutoModelForCausalLM.from_pretrained(folder / name, **how)
    adapted = peft.PeftModel.from_pretrained(base, again).double().eval()
    torch.testing.assert_close(adapted(inputs).logits, logits)
    merged = AutoModelForCausalLM.from_pretrained(folder / f"{name}-merged", **how).eval()
    torch.testing.assert_close(merged(inputs).logits, logits, rtol=1e-4, atol=2e-5)


def compare(folder):
    for name in FAMILIES:
        expected = load_file(folder / f"{name}.safetensors")
        again = folder / f"{name}-again"
        model, info = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True, dtype=torch.float64,
                                                           attn_implementation="eager")
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (name, info)
        found = computed(model.eval(), expected["inputs"], expected["targets"])
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], msg=lambda text: f"{name} {key}: {text}")
        tokenizer = AutoTokenizer.from_pretrained(again)
        assert tokenizer(TEXT).input_ids == expected["text"].tolist(), name
        source = AutoTokenizer.from_pretrained(folder / name)
        for key in ("bos_token_id", "eos_token_id", "__len__"):
            before, after = (getattr(one, key) for one in (source, tokenizer))
            assert (before() == after()) if callable(before) else (before == after), (name, key)
        before = AutoConfig.from_pretrained(folder / name)
        after = AutoConfig.from_pretrained(again)
        for key in ("rope_parameters", "sliding_window", "eos_token_id", "tie_word_embeddings", "max_position_embeddings"):
            # A model without an end gets that of its vocabulary.
            assert getattr(before, key, None) in (None, getattr(after, key, None)), (name, key)
        if name in ADAPTERS:
            compare_adapter(folder, name, expected["inputs"])


{"make": make, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
