"""Times tch_extension.nn.LSTM and GRU against torch.nn's: a forward pass without gradients, and a training step's two passes.

    python3 lstm.py                 on a GPU, the sizes of `cargo xtask bench lstm`, in bfloat16
    python3 lstm.py --device cpu    tiny sizes, to see that it runs

The figures are medians over interleaved rounds, on a GPU of times between CUDA events around 20 ms of calls. Both have the same
weights, and their outputs are compared first. Writes lstm.json into $OUT, or the current folder. Needs the wheel and its torch.
"""

import argparse

import torch
from common import medians, write

import tch_extension

# (T, B, H), with as many inputs as H.
ON_CUDA = [(512, 16, 128), (512, 16, 512), (512, 64, 512), (512, 64, 1024), (512, 256, 1024)]
ON_CPU = [(6, 3, 16)]


def passes(module, x):
    """The calls that are timed."""
    inputs = x.detach().clone().requires_grad_()

    def forward():
        with torch.no_grad():
            return module(x)[0]

    def training():
        module.zero_grad(set_to_none=True)
        inputs.grad = None
        output = module(inputs)[0]
        output.backward(output.detach())

    return {"forward": forward, "training": training}


def compare(name, sizes, ours, theirs, x, dtype):
    found, expected = (module(x)[0].float() for module in (ours, theirs))
    # Two implementations in half precision differ by some roundings of numbers below 1.
    error = (found - expected).abs().max().item()
    limit = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    if not error < limit:
        raise SystemExit(f"{name} {sizes}: outputs differ by {error}")


def measure(name, sizes, device, dtype, options):
    steps, batch, hidden = sizes
    ours = getattr(tch_extension.nn, name)(hidden, hidden, device=device, dtype=dtype)
    theirs = getattr(torch.nn, name)(hidden, hidden, device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    theirs.flatten_parameters()
    x = torch.randn(steps, batch, hidden, device=device, dtype=dtype)
    compare(name, sizes, ours, theirs, x, dtype)
    of_ours, of_theirs = passes(ours, x), passes(theirs, x)
    for what in ("forward", "training"):
        calls = {"tch_extension": of_ours[what], "torch": of_theirs[what]}
        found = medians(device, calls, options.rounds, options.seconds)
        row = {"layer": name, "sizes": sizes, "pass": what, "dtype": str(dtype)}
        row.update({rival: seconds * 1e6 for rival, seconds in found.items()})
        row["ratio"] = found["torch"] / found["tch_extension"]
        print(
            f"{name:4} {str(sizes):>16} {what:8}  torch {row['torch']:10.1f} µs   tch_extension {row['tch_extension']:10.1f} µs"
            f"   {row['ratio']:6.2f} times as fast",
            flush=True,
        )
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, help="of calls in a round")
    options = parser.parse_args()
    device = torch.device(options.device)
    options.seconds = options.seconds or (0.02 if device.type == "cuda" else 0.001)
    torch.manual_seed(0)
    rows = [
        row
        for name in ("LSTM", "GRU")
        for sizes in (ON_CUDA if device.type == "cuda" else ON_CPU)
        for row in measure(name, sizes, device, getattr(torch, options.dtype), options)
    ]
    write("lstm.json", device, rows)


if __name__ == "__main__":
    main()
