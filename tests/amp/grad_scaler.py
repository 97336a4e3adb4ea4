"""Prints what torch's own GradScaler does, step by step: python3 grad_scaler.py > grad_scaler.txt

Each line has a command and, after `->`, whether it failed, the scale, the growth tracker, and for
each of two optimizers the number of steps taken, its parameters and their gradients (the first
number of each).
"""

import math
import random

import torch

RATES = {"a": 0.5, "b": 0.125}
NAN, INF = math.nan, math.inf

weights = {name: [torch.nn.Parameter(torch.tensor(start)) for start in ([1.0, -2.0], [0.3])] for name in RATES}
optimizers = {name: torch.optim.SGD(weights[name], lr=rate) for name, rate in RATES.items()}
steps = dict.fromkeys(RATES, 0)
scaler = saved = None


def count(name):
    def counted(*_):
        steps[name] += 1

    return counted


for name, optimizer in optimizers.items():
    optimizer.register_step_post_hook(count(name))


def new(scale, growth, backoff, interval, enabled=1):
    global scaler
    scaler = torch.amp.GradScaler("cpu", scale, growth, backoff, interval, bool(enabled))


def backward(name, *slopes):
    """Runs a backward whose gradients are the slopes times the scale; without a slope, a parameter has no gradient."""
    optimizers[name].zero_grad()
    terms = [(weight * slope).sum() for weight, slope in zip(weights[name], slopes) if slope is not None]
    if terms:
        scaler.scale(sum(terms)).backward()


def save():
    global saved
    saved = scaler.state_dict()


COMMANDS = {
    "new": new,
    "backward": backward,
    "unscale": lambda name: scaler.unscale_(optimizers[name]),
    "step": lambda name: scaler.step(optimizers[name]),
    "update": lambda: scaler.update(),
    "update_to": lambda scale: scaler.update(scale),
    "save": save,
    "load": lambda: scaler.load_state_dict(saved),
}


def text(value):
    return "none" if value is None else value if isinstance(value, str) else f"{value:.9g}"


def do(command, *arguments):
    try:
        COMMANDS[command](*arguments)
        outcome = "ok"
    except (RuntimeError, AssertionError, ValueError):
        outcome = "error"
    row = [outcome, scaler.get_scale(), scaler._get_growth_tracker()]
    for name in RATES:
        row.append(steps[name])
        row += [weight[0].item() for weight in weights[name]]
        row += [None if weight.grad is None else weight.grad[0].item() for weight in weights[name]]
    print(" ".join(map(text, (command, *arguments))), "->", " ".join(map(text, row)))


def iteration(name, *slopes):
    do("backward", name, *slopes)
    do("step", name)
    do("update")


# The scale grows after two steps, backs off after an infinite gradient, and then counts from zero
# again.
do("new", 1024.0, 2.0, 0.5, 2)
for slopes in [(0.1, 0.2), (0.3, None), (INF, 0.1), (0.5, 0.7), (0.5, NAN), (0.1, 1e37), (0.25, 0.5), (-0.5, 0.1)]:
    iteration("a", *slopes)

# Calls in various orders.
for command in ["unscale", "step"]:
    do(command, "a")
    do(command, "a")
do("unscale", "a")
do("step", "a")
do("update")
do("update")
do("step", "a")
do("update_to", 96.0)
do("backward", "a", None, None)
do("unscale", "a")
do("unscale", "a")
do("step", "a")
do("update")
iteration("b", 0.1, 0.2)

# Calls before anything was scaled.
do("new", 8.0, 4.0, 0.25, 3)
do("update")
do("unscale", "a")
do("step", "a")
do("update_to", 16.0)

# Two optimizers: one infinite gradient lowers the scale for both and skips one.
for a, b in [((0.1, 0.2), (0.3, 0.4)), ((INF, 0.2), (0.3, 0.4)), ((0.1, 0.2), (0.3, -INF)), ((NAN, 0.2), (NAN, 0.4))]:
    do("backward", "a", *a)
    do("backward", "b", *b)
    do("unscale", "b")
    do("step", "a")
    do("step", "b")
    do("update")

# The state is saved in the middle of a count, changed by further steps, and loaded, before and
# after the first scaling.
iteration("a", 0.1, 0.2)
do("save")
iteration("a", 0.1, 0.2)
do("load")
iteration("a", 0.1, 0.2)
do("new", 2.0, 2.0, 0.5, 100)
do("load")
iteration("a", 0.1, 0.2)
iteration("a", 0.1, 0.2)

# A random sequence of calls.
generator = random.Random(1)
do("new", 65536.0, 3.0, 0.3, 3)
for _ in range(60):
    name = generator.choice("ab")
    command = generator.choice(["backward", "backward", "unscale", "step", "step", "update", "update"])
    slopes = [generator.choice([0.1, -0.7, 0.3, 1.5, INF, NAN, None]) for _ in weights[name]]
    do(*{"backward": (command, name, *slopes), "update": (command,)}.get(command, (command, name)))

# A scaler that is not enabled.
do("new", 4.0, 2.0, 0.5, 1, 0)
iteration("a", 0.1, INF)
do("unscale", "b")
do("step", "b")
do("step", "b")
do("update_to", 3.0)
do("load")
