"""Times a training step of GPT-2 under torch.compile, whose last layer and loss are torch's or tch_extension.linear_cross_entropy.

    python3 gpt.py                                      on a GPU: GPT-2 124M, 16 x 1024 tokens, bfloat16 autocast
    python3 gpt.py --device cpu --backend aot_eager     a tiny model, to see that it runs

A step is forward, backward and AdamW. The figures are medians over interleaved rounds; on a GPU of times between CUDA events, and
with the peak of memory: the model with its optimizer, and what a step allocates on top. Both models begin with the same weights,
and their losses are compared. Writes gpt.json into $OUT, or the current folder. Needs the wheel and its torch.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import medians, write

import tch_extension

GPT2 = dict(layers=12, heads=12, dim=768, vocabulary=50257, batch=16, context=1024)
TINY = dict(layers=1, heads=2, dim=16, vocabulary=33, batch=2, context=8)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attention(self, x):
        b, t, dim = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, dim))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, sizes, loss):
        super().__init__()
        dim = sizes["dim"]
        self.wte = nn.Embedding(sizes["vocabulary"], dim)
        self.wpe = nn.Embedding(sizes["context"], dim)
        self.h = nn.ModuleList(Block(dim, sizes["heads"]) for _ in range(sizes["layers"]))
        self.ln_f = nn.LayerNorm(dim)
        self.loss = loss
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.loss(self.ln_f(x).flatten(0, 1), self.wte.weight, targets.flatten())


def of_torch(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets)


LOSSES = {"torch": of_torch, "tch_extension": tch_extension.linear_cross_entropy}


class Run:
    """A model in training."""

    def __init__(self, name, sizes, device, options):
        self.device = device
        before = self.allocated()
        with torch.device(device):
            torch.manual_seed(0)
            self.model = Gpt(sizes, LOSSES[name])
        self.forward = torch.compile(self.model, backend=options.backend, mode=options.mode, fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (sizes["batch"], sizes["context"] + 1)
        tokens = torch.randint(sizes["vocabulary"], shape, generator=torch.Generator().manual_seed(1)).to(device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        # The first steps compile, and make the optimizer's state.
        self.losses = [self.step().item() for _ in range(3)]
        self.own = self.allocated() - before

    def allocated(self):
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def step(self):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.forward(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    def peak(self):
        """The bytes of the model, its optimizer and a step."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return self.own + torch.cuda.max_memory_allocated() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--mode", help="of torch.compile, such as reduce-overhead")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    sizes = GPT2 if is_cuda else TINY
    runs = {name: Run(name, sizes, device, options) for name in LOSSES}
    for ours, theirs in zip(*(run.losses for run in runs.values())):
        # bfloat16 has 8 bits, and both average over many rows.
        if not abs(ours - theirs) < 0.01 * abs(theirs):
            raise SystemExit(f"losses differ: {[run.losses for run in runs.values()]}")
    calls = {name: run.step for name, run in runs.items()}
    times = medians(device, calls, options.rounds, 0.5 if is_cuda else 0.001)
    rows = []
    for name, run in runs.items():
        row = {"loss": name, "ms": times[name] * 1e3, "first losses": run.losses, "peak bytes": run.peak(), **sizes}
        peak = "" if row["peak bytes"] is None else f"   peak {row['peak bytes'] / 2**20:8.0f} MiB"
        print(f"{name:13}  {row['ms']:9.3f} ms a step{peak}")
        rows.append(row)
    print(f"ratio of times: {times['torch'] / times['tch_extension']:.3f}")
    write("gpt.json", device, rows)


if __name__ == "__main__":
    main()
