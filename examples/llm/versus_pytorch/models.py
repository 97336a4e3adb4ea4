"""GPT-2 and Llama as a PyTorch user writes them, with the names of the Rust program, and files of their weights."""

import ctypes
import json
import mmap
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

KINDS = {"F32": torch.float32, "I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16}


def read_safetensors(path):
    """The tensors of a file, without the package of that name. They are views of the file, which is mapped into memory."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        kind, (first, last) = KINDS[entry["dtype"]], entry["data_offsets"]
        count = (last - first) // kind.itemsize
        tensors[name] = torch.frombuffer(data, dtype=kind, count=count, offset=begin + first).view(entry["shape"])
    return tensors


def write_safetensors(path, tensors):
    header, place = {}, 0
    names = {kind: name for name, kind in KINDS.items()}
    for name, tensor in tensors.items():
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, place + tensor.nbytes]}
        place += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


# --- GPT-2 ----------------------------------------------------------------------------------------


class GptAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, t, dim = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, dim))


class GptMlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class GptBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), GptAttention(dim, heads)
        self.ln_2, self.mlp = nn.LayerNorm(dim), GptMlp(dim)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary, context, layers, heads, dim):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.h = nn.ModuleList(GptBlock(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- Llama ----------------------------------------------------------------------------------------


class Projection(nn.Linear):
    """A linear layer that may have a low-rank adapter."""

    def __init__(self, features, out):
        super().__init__(features, out, bias=False)
        self.lora_A = None

    def adapt(self, rank):
        self.lora_A, self.lora_B = nn.Linear(self.in_features, rank, bias=False), nn.Linear(rank, self.out_features, bias=False)

    def forward(self, x):
        y = F.linear(x, self.weight)
        if self.lora_A is None:
            return y
        # Alpha is twice the rank.
        return y + 2 * F.linear(F.linear(x, self.lora_A.weight.to(x.dtype)), self.lora_B.weight.to(x.dtype))


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.sizes, self.head = (dim, kv_heads * dim // heads, kv_heads * dim // heads), dim // heads
        self.q_proj, self.k_proj, self.v_proj = (Projection(dim, size) for size in self.sizes)
        self.o_proj, self.qkv = Projection(dim, dim), None

    def fuse(self):
        """One product for queries, keys and values: the fastest way to decode."""
        self.qkv = nn.Parameter(torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]))
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, x, cos, sin, place=None, visible=None):
        b, t, dim = x.shape
        each = (self.q_proj(x), self.k_proj(x), self.v_proj(x)) if self.qkv is None else F.linear(x, self.qkv).split(self.sizes, -1)
        q, k, v = (part.view(b, t, -1, self.head).transpose(1, 2) for part in each)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k, mask = rotated(q, cos, sin), rotated(k, cos, sin), None
        if place is not None:
            self.keys[:, :, place], self.values[:, :, place] = k, v
            if t == 1:
                k, v, mask = self.keys, self.values, visible
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, dim))


class LlamaMlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Projection(dim, hidden), Projection(dim, hidden), Projection(hidden, dim)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden, eps):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(dim, eps), LlamaAttention(dim, heads, kv_heads)
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(dim, eps), LlamaMlp(dim, hidden)

    def forward(self, x, *at):
        x = x + self.self_attn(self.input_layernorm(x), *at)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """With the embedding as output layer."""

    def __init__(self, vocabulary, context, layers, heads, dim, llama):
        super().__init__()
        eps, theta = float(llama["eps"]), float(llama["theta"])
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, llama["kv_heads"], llama["hidden"], eps) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps)
        head = dim // heads
        angles = torch.arange(context)[:, None] * theta ** (-torch.arange(0, head, 2) / head)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def adapt(self, rank):
        self.requires_grad_(False)
        for layer in self.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).adapt(rank)

    def forward(self, tokens, targets):
        x, t = self.embed_tokens(tokens), tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def make_caches(self, rows, length):
        for layer in self.layers:
            attention = layer.self_attn
            kv_heads = attention.sizes[1] // attention.head
            for name in ("keys", "values"):
                cache = self.embed_tokens.weight.new_zeros(rows, kv_heads, length, attention.head)
                attention.register_buffer(name, cache, persistent=False)
        visible = torch.ones(length, length, dtype=torch.bool, device=self.cos.device).tril()
        self.register_buffer("visible", visible, persistent=False)

    def logits(self, tokens, places):
        """The logits after tokens `[B, T]`, which are put into the caches at places `[T]`."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[places], self.sin[places], places, self.visible[places][None, None])
        return F.linear(self.norm(x[:, -1:]), self.embed_tokens.weight)

    def next_token(self, tokens, places):
        return self.logits(tokens, places).argmax(-1)


def make_model(settings):
    names = ("vocabulary", "context", "layers", "heads", "dim")
    sizes, llama = {name: settings["model"][name] for name in names}, settings["model"].get("llama")
    return Gpt(**sizes) if llama is None else Llama(**sizes, llama=llama)


def settings_of(inputs):
    """Those of the Rust program, in which some numbers are texts, with the learning rate of each step."""
    with open(os.path.join(inputs, "settings.json")) as file:
        found = json.load(file)
    return {**found["settings"], "rates": found["rates"]}
