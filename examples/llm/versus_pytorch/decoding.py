"""Decoding in PyTorch with a static cache, and the folder from which `llm sample` decodes with the same weights."""

import json
import os
import re
import shutil
import sys
import time

import torch
from models import make_model, read_safetensors, settings_of, write_safetensors

RIVALS = ["torch.compile, reduce-overhead", "PyTorch eager"]
MODEL = "model"  # the folder, in that of the inputs


def write_model(inputs, tokenizer):
    """The weights in Hugging Face's format and BFloat16, and a prompt whose words are a token each."""
    model, folder = settings_of(inputs)["model"], os.path.join(inputs, MODEL)
    llama = model["llama"]
    os.makedirs(folder, exist_ok=True)
    weights = read_safetensors(os.path.join(inputs, "weights.safetensors")).items()
    write_safetensors(os.path.join(folder, "model.safetensors"), {"model." + name: w.bfloat16().contiguous() for name, w in weights})
    shutil.copy(tokenizer, os.path.join(folder, "tokenizer.json"))
    config = {
        "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True, "vocab_size": model["vocabulary"],
        "hidden_size": model["dim"], "intermediate_size": llama["hidden"], "num_hidden_layers": model["layers"],
        "num_attention_heads": model["heads"], "num_key_value_heads": llama["kv_heads"], "head_dim": llama["head_dim"],
        "rms_norm_eps": float(llama["eps"]), "rope_theta": float(llama["theta"]), "max_position_embeddings": model["context"],
    }
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    with open(tokenizer) as file:
        vocabulary = json.load(file)["model"]["vocab"]
    words = sorted(word for word in vocabulary if re.fullmatch("Ġ[a-z]+", word))
    count = min(512, model["context"] // 2)
    words = [words[7919 * place % len(words)] for place in range(count)]
    prompt = {"text": "".join(words).replace("Ġ", " "), "tokens": [vocabulary[word] for word in words], "new": count // 2}
    with open(os.path.join(folder, "prompt.json"), "w") as file:
        json.dump(prompt, file)
    return folder, prompt


def read_prompt(inputs):
    with open(os.path.join(inputs, MODEL, "prompt.json")) as file:
        return json.load(file)


class Decoder:
    """A model that continues a prompt in some rows at once, as one of RIVALS."""

    def __init__(self, name, inputs, device):
        self.device, self.is_cuda, self.name = device, device.startswith("cuda"), name
        prompt = read_prompt(inputs)
        self.prompt, self.new = torch.tensor(prompt["tokens"], device=device), prompt["new"]
        with torch.device(device):
            self.model = make_model(settings_of(inputs))
        weights = read_safetensors(os.path.join(inputs, MODEL, "model.safetensors"))
        self.model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
        for layer in self.model.layers:
            layer.self_attn.fuse()
        self.model.to(torch.bfloat16 if self.is_cuda else torch.float32).requires_grad_(False)
        self.rows, self.compiled = 0, {}

    def prepare(self, rows):
        """New caches, and with them new graphs, for another number of rows."""
        if rows != self.rows:
            self.rows, self.one = rows, self.model.next_token
            self.model.make_caches(rows, len(self.prompt) + self.new)
            if "compile" in self.name:
                torch.compiler.reset()
                self.one = torch.compile(self.model.next_token, mode="reduce-overhead" if self.is_cuda else None, fullgraph=True)
        return self.prompt.expand(rows, -1).contiguous()

    def wait(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def logits(self):
        prompt = self.prepare(1)
        return self.model.logits(prompt, torch.arange(len(self.prompt), device=self.device)).flatten().tolist()

    def generate(self, rows):
        """The seconds to the first token, and those of each later one."""
        prompt, begun = self.prepare(rows), time.perf_counter()
        token = self.model.next_token(prompt, torch.arange(len(self.prompt), device=self.device))
        place = torch.tensor([len(self.prompt)], device=self.device)
        self.wait()
        first = time.perf_counter()
        for index in range(self.new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = self.one(token, place).clone()
            place += 1
            if index == 0 and rows not in self.compiled:
                self.wait()
                self.compiled[rows] = time.perf_counter() - begun
        self.wait()
        return first - begun, (time.perf_counter() - first) / (self.new - 1)


@torch.no_grad()
def work(name, inputs, device, begun):
    """Each line is a number of rows."""
    decoder = Decoder(name, inputs, device)
    ready = time.perf_counter() - begun
    print(json.dumps({"ready": ready, "logits": decoder.logits()}), flush=True)
    for line in sys.stdin:
        rows = int(line)
        first, each = decoder.generate(rows)
        # The first token that a compiler was needed for is the second one.
        answer = {"ms_per_token": 1e3 * each, "first_token_s": ready + decoder.compiled[rows], "prompt_s": first}
        print(json.dumps(answer), flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**20 if decoder.is_cuda else None
    print(json.dumps({"version": torch.__version__, "peak_MiB": peak}), flush=True)
