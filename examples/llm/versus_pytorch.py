"""Trains the same GPT-2 in PyTorch and in Rust, in turns on one GPU, and compares them.

    python3 versus_pytorch.py --llm target/debug/llm --size char
    dist/run.sh versus-pytorch --size 124m

Both begin with the same weights and train on the same batches with the same hyperparameters, in BFloat16 under autocast.
Each is a process of its own that trains some steps when it is told to, and then waits for the others. So nothing but the
work itself differs between their times: clocks, temperature and other load change for all of them.

PyTorch runs with torch.compile, with its CUDA graphs (reduce-overhead), and without torch.compile. A further run trains the
batches in another order: how far its curve is away is the noise of a curve.

Writes versus.json, versus.jsonl (the losses) and versus.svg. Needs torch and a GPU; with --device cpu it runs anywhere, slowly.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time

BEGUN = time.perf_counter()
ROUNDS = 5  # that are timed; one before them warms up
WINDOW = 20  # steps over which losses are averaged before they are compared
OTHER_ORDER = "torch.compile, other order"
RIVALS = ["torch.compile", "torch.compile, reduce-overhead", "PyTorch eager", OTHER_ORDER]


# --- a run in PyTorch -----------------------------------------------------------------------------


def read_safetensors(path):
    """The tensors of a file, without the package of that name."""
    import torch

    kinds = {"F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.uint8)[begin:end].clone().view(kinds[entry["dtype"]])
        tensors[name] = flat.view(entry["shape"])
    return tensors


def make_model(settings):
    """GPT-2's architecture as a PyTorch user writes it, with the names of the Rust program."""
    import torch.nn as nn
    import torch.nn.functional as F

    dim, heads = settings["dim"], settings["heads"]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.c_attn(x).view(b, t, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(b, t, dim))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x):
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(dim), Attention()
            self.ln_2, self.mlp = nn.LayerNorm(dim), Mlp()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(settings["vocabulary"], dim)
            self.wpe = nn.Embedding(settings["context"], dim)
            self.h = nn.ModuleList(Block() for _ in range(settings["layers"]))
            self.ln_f = nn.LayerNorm(dim)

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
            for block in self.h:
                x = block(x)
            logits = F.linear(self.ln_f(x), self.wte.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Gpt()


class Run:
    """A model in training, as one of RIVALS."""

    def __init__(self, name, inputs, device):
        import torch

        self.torch, self.device, self.step_count, self.first_step = torch, device, 0, None
        self.is_cuda = device.startswith("cuda")
        with open(os.path.join(inputs, "settings.json")) as file:
            self.settings = json.load(file)
        if self.is_cuda:
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats()
        with torch.device(device):
            self.model = make_model(self.settings)
        self.model.load_state_dict(read_safetensors(os.path.join(inputs, "weights.safetensors")))
        self.batches = self.read_batches(inputs, name == OTHER_ORDER)
        self.optimizer = self.make_optimizer()
        self.forward = self.model
        if "compile" in name:
            mode = "reduce-overhead" if "reduce-overhead" in name else None
            self.forward = torch.compile(self.model, mode=mode)
        self.ready = time.perf_counter() - BEGUN

    def read_batches(self, inputs, is_shuffled):
        batches = read_safetensors(os.path.join(inputs, "batches.safetensors"))["batches"].long()
        if is_shuffled:
            order = self.torch.randperm(batches.shape[1], generator=self.torch.Generator().manual_seed(2))
            batches = batches[:, order]
        return batches.pin_memory() if self.is_cuda else batches

    def make_optimizer(self):
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        return self.torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)

    def step(self):
        torch = self.torch
        rate = self.settings["rates"][self.step_count]
        inputs, targets = (part[self.step_count].to(self.device, non_blocking=True) for part in self.batches)
        torch.compiler.cudagraph_mark_step_begin()
        # As in Rust: BFloat16 on a GPU, Float on the CPU.
        with torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16, enabled=self.is_cuda):
            loss = self.forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip"], foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        # A clone, because a CUDA graph writes the next loss to the same place.
        return loss.detach().clone()

    def round(self, steps):
        begun = time.perf_counter()
        losses = []
        for _ in range(steps):
            losses.append(self.step())
            if self.first_step is None:
                losses[0].item()
                # Without the time in which it waited for the others.
                self.first_step = self.ready + time.perf_counter() - begun
        losses = self.torch.stack(losses).double().tolist()
        return {"steps": steps, "seconds": time.perf_counter() - begun, "losses": losses}

    def summary(self):
        cuda = self.torch.cuda
        return {
            "device": cuda.get_device_name() if self.is_cuda else "cpu",
            "version": self.torch.__version__,
            "steps": self.step_count,
            "first_step_s": self.first_step,
            "peak_MiB": cuda.max_memory_allocated() / 2**20 if self.is_cuda else None,
            "reserved_MiB": cuda.max_memory_reserved() / 2**20 if self.is_cuda else None,
        }


def work(name, inputs, device):
    """Speaks as `llm bench --by-line` does."""
    run = Run(name, inputs, device)
    print(json.dumps({"ready": run.ready}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run.round(int(line))), flush=True)
    print(json.dumps(run.summary()), flush=True)


# --- the comparison -------------------------------------------------------------------------------


class Worker:
    """A process that trains when it is told to."""

    def __init__(self, name, command):
        self.name, self.losses, self.times = name, [], []
        begun = time.perf_counter()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # What the process does not see of its own start, such as the loading of libtorch by the linker.
        self.unseen = -self.answer()["ready"]
        self.unseen += time.perf_counter() - begun

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: {self.name} ended with status {self.process.wait()}; its own message is above")
        return json.loads(line)

    def train(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        result = self.answer()
        self.losses += result["losses"]
        self.times.append(result["seconds"] / steps)

    def finish(self, tokens_per_step):
        self.process.stdin.close()
        summary = self.answer()
        self.process.wait()
        summary["first_step_s"] += self.unseen
        times = sorted(self.times[1:])
        each = times[len(times) // 2]
        return {"name": self.name, **summary, "ms_per_step": 1e3 * each, "tokens_per_s": tokens_per_step / each,
                "ms_per_step_of_rounds": [1e3 * t for t in self.times], "losses": self.losses}


def smooth(losses):
    return [sum(losses[i:i + WINDOW]) / WINDOW for i in range(max(len(losses) - WINDOW + 1, 0))]


def distance(a, b):
    """The largest difference of two curves of averaged losses."""
    return max((abs(x - y) for x, y in zip(smooth(a["losses"]), smooth(b["losses"]))), default=0.0)


def compare(rows):
    """Whether Rust's curve is as near to PyTorch's as PyTorch's curves with the batches in two orders are to one another."""
    rust, reference, others = rows[0], rows[1], rows[2:]
    distances = {row["name"]: distance(row, reference) for row in others}
    spread, ours = distances[OTHER_ORDER], distance(rust, reference)
    return {"of": reference["name"], "rust": ours, "PyTorch": distances, "spread_of": OTHER_ORDER, "spread": spread,
            "is_within": ours <= spread}


def table(rows):
    lines = [f"{'':<32}{'ms/step':>10}{'tokens/s':>12}{'peak MiB':>10}{'first step s':>14}{'last loss':>11}"]
    for row in rows:
        peak = "" if row["peak_MiB"] is None else f"{row['peak_MiB']:.0f}"
        last = row["losses"][-WINDOW:]
        lines.append(f"{row['name']:<32}{row['ms_per_step']:>10.3f}{row['tokens_per_s']:>12.0f}{peak:>10}"
                     f"{row['first_step_s']:>14.2f}{sum(last) / len(last):>11.4f}")
    return "\n".join(lines)


def llm(options, *arguments):
    done = subprocess.run([options.llm, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {options.llm} {arguments[0]} failed; its own message is above")


def write_inputs(options, inputs):
    """Weights and batches for all, made by the Rust program."""
    data = os.path.join(options.out, "versus-data")
    text = ["--text", *options.text] if options.text else []
    # GPT-2 has 50257 tokens and, padded, 50304 rows. A small text has fewer pairs, which the number of rows hides.
    is_gpt2 = options.size not in ("mini", "char")
    pairs = ["--vocabulary", "bpe", "--vocabulary-size", "50257"] if is_gpt2 else []
    llm(options, "prepare", "--out", data, *text, *pairs)
    rows = ["--rows-of-embedding", "50304"] if is_gpt2 else []
    llm(options, "bench", "--inputs", inputs, "--write", data, "--size", options.size, "--steps", str(options.steps),
        "--seed", str(options.seed), *rows)


def main(options):
    os.makedirs(options.out, exist_ok=True)
    inputs = os.path.join(options.out, "versus-inputs")
    write_inputs(options, inputs)
    with open(os.path.join(inputs, "settings.json")) as file:
        settings = json.load(file)
    rust = [options.llm, "bench", "--inputs", inputs, "--by-line", "--device", options.device]
    rust += ["--recompute"] if options.recompute else []
    script = [sys.executable, os.path.abspath(__file__), "--inputs", inputs, "--device", options.device, "--as"]
    workers = [Worker("Rust", rust)]
    for name in RIVALS:
        # Without a GPU there are no CUDA graphs.
        if options.device.startswith("cuda") or "reduce-overhead" not in name:
            workers.append(Worker(name, [*script, name]))
    # The first round takes the steps that are left over, too.
    each = options.steps // (ROUNDS + 1)
    for index in range(ROUNDS + 1):
        steps = each if index > 0 else options.steps - ROUNDS * each
        for worker in workers:
            print(f"round {index} of {ROUNDS}: {worker.name}, {steps} steps", file=sys.stderr)
            worker.train(steps)
    rows = [worker.finish(settings["batch"] * settings["context"]) for worker in workers]
    curves = compare(rows)
    report(options, rows, curves)
    return 0 if curves["is_within"] else 1


def report(options, rows, curves):
    place = os.path.join(options.out, "versus")
    with open(place + ".json", "w") as file:
        json.dump({"size": options.size, "steps": options.steps, "seed": options.seed, "rows": rows, "curves": curves}, file, indent=1)
    with open(place + ".jsonl", "w") as file:
        for row in rows:
            for step, loss in enumerate(row["losses"], 1):
                file.write(json.dumps({"curve": row["name"], "step": step, "loss": loss}) + "\n")
    llm(options, "plot", "--losses", place + ".jsonl", "--out", place + ".svg", "--title", f"GPT {options.size}, Rust and PyTorch")
    print(f"{options.size}, {options.steps} steps, {rows[0]['device']}, torch {rows[1]['version']}")
    print(table(rows))
    fits = "lies within" if curves["is_within"] else "lies OUTSIDE OF"
    print(f"distance from {curves['of']}'s curve, the largest difference of means of {WINDOW} steps: Rust {curves['rust']:.4f}, "
          + ", ".join(f"{name} {d:.4f}" for name, d in curves["PyTorch"].items()))
    print(f"Rust's curve {fits} the spread of two PyTorch runs, {curves['spread']:.4f}, which '{curves['spread_of']}' gives")
    print(f"written: {place}.json, .jsonl, .svg")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default=os.environ.get("LLM"), help="the Rust program")
    parser.add_argument("--size", default="char", choices=["mini", "char", "124m", "350m", "774m"])
    parser.add_argument("--steps", type=int, default=300, help="of each run, a sixth of which warms up")
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights and the order of the batches")
    parser.add_argument("--text", nargs="+", help="text files or folders; by default the repository's text")
    parser.add_argument("--out", default="runs/versus", help="folder for the results")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--recompute", action="store_true", help="Rust computes GELU again in the backward pass")
    parser.add_argument("--inputs", help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name is None and not options.llm:
        parser.error("--llm is missing: give the path of the Rust program, such as target/debug/llm")
    # Fewer give no means, or so few that every curve lies within any spread.
    if options.steps < 2 * WINDOW:
        parser.error(f"--steps {options.steps} is too small: give {2 * WINDOW} or more, because losses are averaged over {WINDOW} steps")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"{sys.executable} has no torch: install torch 2.11 there, or run this script with another python3")
    return options


if __name__ == "__main__":
    options = arguments()
    if options.name is not None:
        work(options.name, options.inputs, options.device)
    else:
        sys.exit(main(options))
