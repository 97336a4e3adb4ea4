"""What the benchmarks of the wheel have in common: interleaved rounds, and times of the device."""

import json
import os
import statistics
import time

import torch


def elapsed(device, call, count):
    """The time, in seconds, of so many calls in a row: between events on a GPU."""
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def medians(device, calls, rounds, seconds):
    """The median time of each call, in seconds. In each round all take turns, each for about so many seconds."""
    counts = {}
    for name, call in calls.items():
        elapsed(device, call, 3)
        counts[name] = max(1, round(seconds / max(elapsed(device, call, 1), 1e-6)))
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(elapsed(device, call, counts[name]) / counts[name])
    return {name: statistics.median(of_call) for name, of_call in times.items()}


def write(name, device, rows):
    """Writes the rows as JSON into $OUT, or the current folder."""
    path = os.path.join(os.environ.get("OUT", "."), name)
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": rows,
    }
    with open(path, "w") as file:
        json.dump(facts, file, indent=1)
    print(f"wrote {path}")
