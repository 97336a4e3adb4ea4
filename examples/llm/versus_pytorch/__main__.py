"""Trains and decodes the same model in PyTorch and in Rust, in turns on one GPU, and compares them.

    python3 examples/llm/versus_pytorch --llm target/debug/llm --size char
    dist/run.sh versus-pytorch --size 124m
    dist/run.sh versus-pytorch --size llama-1b --modes train,lora,muon,decode

Both begin with the same weights and train on the same batches with the same hyperparameters. On a GPU, PyTorch computes in
BFloat16 under autocast, and Rust with BFloat16 weights that have master weights in Float.
Each is a process of its own that trains some steps when it is told to, and then waits for the others. So nothing but the
work itself differs between their times: clocks, temperature and other load change for all of them. Of llama-1b, Rust and
one other are in memory at a time.

In each mode that trains, a further run of PyTorch has the batches in another order: how far its curve is away is the noise of
a curve, within which Rust's must be.

train   all weights, by AdamW: with torch.compile, with its CUDA graphs (reduce-overhead), and without torch.compile
bf16    all weights, in BFloat16 alone: without master weights, and with the state of AdamW in BFloat16
lora    adapters of rank 16 on the layers of attention, of a frozen base in BFloat16
muon    all weights, by Muon the matrices of the blocks, and by AdamW the rest
decode  the likeliest tokens after a prompt, with 1, 8, 16 and 64 rows, by `llm sample` and with a static cache

Writes versus.json, versus.jsonl (the losses) and versus.svg. Needs torch and a GPU; with --device cpu it runs anywhere, slowly.
"""

import time

BEGUN = time.perf_counter()

import argparse
import importlib.util
import os
import sys

import compare

MODES = ["train", "bf16", "lora", "muon", "decode"]


def arguments():
    parser = argparse.ArgumentParser(prog="versus_pytorch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default=os.environ.get("LLM"), help="the Rust program")
    parser.add_argument("--size", default="char", choices=["mini", "char", "124m", "350m", "774m", "llama-mini", "llama-1b"])
    parser.add_argument("--modes", type=lambda text: text.split(","), help="some of train,bf16,lora,muon,decode; by default all, of GPT-2 train")
    parser.add_argument("--steps", type=int, help="of each run, a sixth of which warms up; by default 300, of llama-1b 60")
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights and the order of the batches")
    parser.add_argument("--text", nargs="+", help="text files or folders; by default the repository's text")
    parser.add_argument("--out", default="runs/versus", help="folder for the results")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--no-compile", action="store_true", help="without the runs by torch.compile; curves are then not judged")
    parser.add_argument("--recompute", action="store_true", help="Rust computes GELU again in the backward pass")
    parser.add_argument("--inputs", help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="name", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name is not None:
        return options
    is_llama = options.size.startswith("llama")
    options.modes = options.modes or (MODES if is_llama else MODES[:1])
    options.steps = options.steps or (60 if options.size == "llama-1b" else 300)
    if not options.llm:
        parser.error("--llm is missing: give the path of the Rust program, such as target/debug/llm")
    for mode in options.modes:
        if mode not in MODES or (mode not in MODES[:2] and not is_llama):
            parser.error(f"--modes {mode} is none of --size {options.size}: give some of {','.join(MODES)} and llama-1b, or train,bf16")
    # Fewer give no means, or so few that every curve lies within any spread.
    if options.steps < 2 * compare.WINDOW:
        parser.error(f"--steps {options.steps} is too small: give {2 * compare.WINDOW} or more, because losses are averaged over {compare.WINDOW} steps")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"{sys.executable} has no torch: install torch 2.11 there, or run this script with another python3")
    return options


if __name__ == "__main__":
    options = arguments()
    if options.name is None:
        sys.exit(compare.main(options))
    mode, name = options.name
    if mode == "decode":
        import decoding

        decoding.work(name, options.inputs, options.device, BEGUN)
    else:
        import training

        training.work(mode, name, options.inputs, options.device, BEGUN)
