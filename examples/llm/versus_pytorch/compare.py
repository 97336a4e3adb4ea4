"""The comparison: who works when, and the table of what came out."""

import json
import os
import subprocess
import sys
import time

ROUNDS = 5  # that are timed; one before them warms up
WINDOW = 20  # steps over which losses are averaged before they are compared
ROWS = [1, 8, 16, 64]  # that are decoded at once
FARTHEST = 0.05  # of logits from PyTorch's, as a share of their norm; BFloat16 alone gives about 0.01


class Worker:
    """A process that does something when it is told to."""

    def __init__(self, name, command):
        self.name, self.losses, self.times = name, [], []
        begun = time.perf_counter()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # What the process does not see of its own start, such as the loading of libtorch by the linker.
        self.begin = self.answer()
        self.unseen = time.perf_counter() - begun - self.begin["ready"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: {self.name} ended with status {self.process.wait()}; its own message is above")
        return json.loads(line)

    def ask(self, number):
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self.answer()

    def train(self, steps):
        result = self.ask(steps)
        self.losses += result["losses"]
        self.times.append(1e3 * result["seconds"] / steps)

    def end(self):
        self.process.stdin.close()
        summary = self.answer()
        self.process.wait()
        return summary


def middle(values):
    return sorted(values)[len(values) // 2]


def run(options, *arguments):
    done = subprocess.run([options.llm, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {options.llm} {arguments[0]} failed: {done.stderr}")
    return done


def write_inputs(options, inputs):
    """Weights and batches for all, made by the Rust program. Returns the vocabulary's file."""
    data = os.path.join(options.out, "versus-data")
    text = ["--text", *options.text] if options.text else []
    # A small text has fewer pairs than a model has tokens, which the number of rows hides. GPT-2 has 50257 and, padded, 50304 rows.
    pairs, rows = {"mini": (None, None), "char": (None, None), "llama-mini": (1000, None), "llama-1b": (50257, 128256)}.get(
        options.size, (50257, 50304))
    pairs = ["--vocabulary", "bpe", "--vocabulary-size", str(pairs)] if pairs else []
    run(options, "prepare", "--out", data, *text, *pairs)
    rows = ["--rows-of-embedding", str(rows)] if rows else []
    lora = ["--lora", "16"] if "lora" in options.modes else []
    run(options, "bench", "--inputs", inputs, "--write", data, "--size", options.size, "--steps", str(options.steps),
        "--seed", str(options.seed), *rows, *lora)
    return os.path.join(data, "tokenizer.json")


def chosen(options, rivals):
    """Without a GPU there are no CUDA graphs."""
    is_cuda = options.device.startswith("cuda")
    return [name for name in rivals if (is_cuda or "reduce" not in name) and not (options.no_compile and "compile" in name)]


def python_worker(options, inputs, mode, name):
    folder = os.path.dirname(os.path.abspath(__file__))
    return Worker(name, [sys.executable, folder, "--inputs", inputs, "--device", options.device, "--as", mode, name])


def say(text):
    print(text, file=sys.stderr, flush=True)


# --- training -------------------------------------------------------------------------------------


def train(options, inputs, mode):
    """The rows of a mode, Rust's first."""
    from training import OTHER_ORDER, RIVALS

    rivals = chosen(options, RIVALS[mode])
    if options.size == "llama-1b":
        # All of them have no room in memory. The other order is there for its curve only.
        sessions = [[name] if name == OTHER_ORDER else ["Rust", name] for name in rivals]
    else:
        sessions = [["Rust", *rivals]]
    rows = []
    for names in sessions:
        for row in session(options, inputs, mode, names):
            if row["name"] != "Rust" or not rows:
                rows.append(row)
    return rows


def session(options, inputs, mode, names):
    how = {"train": [], "bf16": ["--precision", "bf16-true"], "lora": ["--lora", "16"], "muon": ["--optimizer", "muon"]}[mode]
    how = [*how, "--recompute"] if options.recompute else how
    workers = []
    for name in names:
        if name == "Rust":
            workers.append(Worker(name, [options.llm, "bench", "--inputs", inputs, "--by-line", "--device", options.device, *how]))
        else:
            workers.append(python_worker(options, inputs, mode, name))
    # The first round takes the steps that are left over, too.
    each = options.steps // (ROUNDS + 1)
    for index in range(ROUNDS + 1):
        steps = each if index > 0 else options.steps - ROUNDS * each
        for worker in workers:
            say(f"{mode}, round {index} of {ROUNDS}: {worker.name}, {steps} steps")
            worker.train(steps)
    rows = []
    for worker in workers:
        summary = worker.end()
        rows.append({"mode": mode, "name": worker.name, **summary, "first_s": summary["first_step_s"] + worker.unseen,
                     "ms": middle(worker.times[1:]), "ms_of_rounds": worker.times, "losses": worker.losses})
    return with_ratios(rows)


def with_ratios(rows):
    """Adds Rust's time divided by each other's, of those who took turns."""
    rust = next((row["ms"] for row in rows if row["name"] == "Rust"), None)
    return [{**row, "ratio": rust and rust / row["ms"]} for row in rows]


def smooth(losses):
    return [sum(losses[i:i + WINDOW]) / WINDOW for i in range(max(len(losses) - WINDOW + 1, 0))]


def distance(a, b):
    """The largest difference of two curves of averaged losses."""
    return max((abs(x - y) for x, y in zip(smooth(a["losses"]), smooth(b["losses"]))), default=0.0)


def curves_of(rows):
    """How far curves are from PyTorch's first, and whether Rust's is as near as PyTorch's with the batches in two orders are to
    one another."""
    from training import OTHER_ORDER

    rust, reference, others = rows[0], rows[1], rows[2:]
    distances = {row["name"]: distance(row, reference) for row in others}
    spread, ours = distances.get(OTHER_ORDER), distance(rust, reference)
    return {"mode": rust["mode"], "of": reference["name"], "rust": ours, "PyTorch": distances, "spread_of": OTHER_ORDER, "spread": spread,
            "is_within": spread is None or ours <= spread}


# --- decoding -------------------------------------------------------------------------------------


def decode(options, inputs, tokenizer):
    """The rows, and how far Rust's logits are from PyTorch's."""
    from decoding import RIVALS, write_model

    folder, prompt = write_model(inputs, tokenizer)
    sample = ["sample", "--from", folder, "--prompt", prompt["text"], "--device", options.device]
    workers = [python_worker(options, inputs, "decode", name) for name in chosen(options, RIVALS)]
    logits = [json.loads(run(options, *sample, "--logits").stdout), workers[0].begin["logits"]]
    difference = sum((a - b) ** 2 for a, b in zip(*logits)) ** 0.5 / sum(b ** 2 for b in logits[1]) ** 0.5
    rows = []
    for count in ROWS:
        found = {name: [] for name in ["Rust", *(worker.name for worker in workers)]}
        for index in range(ROUNDS + 1):
            say(f"decode, round {index} of {ROUNDS}: {count} rows")
            how = ["--length", str(prompt["new"]), "--count", str(count), "--temperature", "0", "--ignore-end", "--times"]
            times = json.loads(run(options, *sample, *how).stderr.splitlines()[-1])
            if times["prompt"] != len(prompt["tokens"]):
                sys.exit(f"error: the prompt of {len(prompt['tokens'])} tokens has {times['prompt']} in Rust")
            found["Rust"].append(times)
            for worker in workers:
                found[worker.name].append(worker.ask(count))
        mode = f"decode, {count} row{'s' if count > 1 else ''}"
        rows += with_ratios([{"mode": mode, "name": name, "ms": middle([each["ms_per_token"] for each in all[1:]]),
                              "first_s": middle([each["first_token_s"] for each in all]), "all": all} for name, all in found.items()])
    for index, worker in enumerate(workers):
        # The peak is that of the most rows, which are the last.
        rows[index - len(workers)].update(worker.end())
    return rows, {"difference": difference, "is_within": difference <= FARTHEST}


# --- what came out --------------------------------------------------------------------------------


def table(rows, tokens_per_step):
    lines = [f"{'':<16}{'':<34}{'ms':>10}{'tokens/s':>12}{'Rust’s time':>13}{'peak MiB':>10}{'first s':>9}{'last loss':>11}"]
    for row in rows:
        tokens = int(row["mode"].split()[1]) if "decode" in row["mode"] else tokens_per_step
        peak, ratio = row.get("peak_MiB"), row["ratio"]
        last = row.get("losses", [])[-WINDOW:]
        lines.append(f"{row['mode']:<16}{row['name']:<34}{row['ms']:>10.3f}{1e3 * tokens / row['ms']:>12.0f}"
                     f"{'' if ratio is None else f'{ratio:.2f} ×':>13}{'' if peak is None else f'{peak:.0f}':>10}{row['first_s']:>9.2f}"
                     f"{f'{sum(last) / len(last):.4f}' if last else '':>11}")
    return "\n".join(lines)


def main(options):
    from models import settings_of

    os.makedirs(options.out, exist_ok=True)
    inputs = os.path.join(options.out, "versus-inputs")
    tokenizer = write_inputs(options, inputs)
    settings = settings_of(inputs)
    tokens_per_step = settings["batch"] * settings["model"]["context"]
    rows, curves, logits = [], [], None
    for mode in options.modes:
        if mode == "decode":
            of_mode, logits = decode(options, inputs, tokenizer)
        else:
            of_mode = train(options, inputs, mode)
            curves += [curves_of(of_mode)] if len(of_mode) > 1 else []
        rows += of_mode
        # A later mode may be stopped.
        say(table(of_mode, tokens_per_step))
    report(options, tokens_per_step, rows, curves, logits)
    return 0 if all(found["is_within"] for found in [*curves, logits] if found) else 1


def report(options, tokens_per_step, rows, curves, logits):
    place = os.path.join(options.out, "versus")
    with open(place + ".json", "w") as file:
        facts = {"size": options.size, "steps": options.steps, "seed": options.seed, "rows": rows, "curves": curves, "logits": logits}
        json.dump(facts, file, indent=1)
    trained = [row for row in rows if "losses" in row]
    with open(place + ".jsonl", "w") as file:
        for row in trained:
            for step, loss in enumerate(row["losses"], 1):
                file.write(json.dumps({"curve": f"{row['mode']}: {row['name']}", "step": step, "loss": loss}) + "\n")
    if trained:
        run(options, "plot", "--losses", place + ".jsonl", "--out", place + ".svg", "--title", f"{options.size}, Rust and PyTorch")
    device = next((row["device"] for row in rows if "device" in row), options.device)
    version = next(row["version"] for row in rows if "version" in row)
    print(f"{options.size}, {options.steps} steps, {device}, torch {version}")
    print(table(rows, tokens_per_step))
    for found in curves:
        print(f"{found['mode']}: distance from {found['of']}'s curve, the largest difference of means of {WINDOW} steps: "
              + ", ".join(f"{name} {d:.4f}" for name, d in {"Rust": found["rust"], **found["PyTorch"]}.items()))
        if found["spread"] is not None:
            fits = "lies within" if found["is_within"] else "lies OUTSIDE OF"
            print(f"Rust's curve {fits} the spread of two PyTorch runs, {found['spread']:.4f}, which '{found['spread_of']}' gives")
    if logits:
        fits = "" if logits["is_within"] else f", MORE THAN {FARTHEST}"
        print(f"decode: logits differ from PyTorch's by {logits['difference']:.5f} of their norm{fits}")
    print(f"written: {place}.json, .jsonl, .svg")
