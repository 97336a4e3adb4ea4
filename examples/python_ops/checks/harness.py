"""Runs checks, which are functions with names, and says what went wrong."""

import os
import subprocess
import sys
import time
import traceback

import torch

CHECKS = []


def check(function):
    """Makes a function without arguments one of the checks of its part."""
    CHECKS.append(function)
    return function


class Skipped(Exception):
    """Raised by a check that this machine cannot run."""


def run(part, words):
    """Runs the part's checks whose names contain one of the words, or all, and returns the exit code."""
    # A part may import another one for what it defines; that one's checks are not the part's.
    checks = [it for it in CHECKS if it.__module__ == part]
    chosen = [it for it in checks if not words or any(word in it.__name__ for word in words)]
    if not chosen:
        print(f"no check's name contains {words}; there are: {[it.__name__ for it in checks]}")
        return 2
    failures = skipped = 0
    for function in chosen:
        start = time.perf_counter()
        try:
            # Every check draws the same numbers, whichever ran before it.
            torch.manual_seed(0)
            function()
            outcome = "ok"
        except Skipped as why:
            skipped += 1
            outcome = f"SKIPPED: {why}"
        except Exception as error:
            failures += 1
            outcome = f"FAILED: {type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stdout)
        print(f"{function.__name__} ({time.perf_counter() - start:.1f} s): {outcome}", flush=True)
    passed = len(chosen) - failures - skipped
    print(f"{passed} of {len(chosen)} checks passed, {skipped} skipped")
    return 1 if failures else 0


def same(found, expected, what, **tolerances):
    """Compares two values, which may be tuples of tensors."""
    torch.testing.assert_close(
        found, expected, msg=lambda difference: f"{what}: {difference}", **tolerances
    )


def equal(found, expected, what):
    """Compares two plain values."""
    if found != expected:
        raise AssertionError(f"{what}: {found!r} instead of {expected!r}")


def raises(kind, words, call):
    """Calls something that must raise exactly this kind of exception, with these words in its text."""
    try:
        value = call()
    except Exception as error:
        if type(error) is not kind:
            raise AssertionError(f"{type(error).__name__} instead of {kind.__name__}: {error}") from error
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"no {missing} in the error's text: {error}") from error
        return str(error)
    raise AssertionError(f"no {kind.__name__}, but {value!r}")


def in_new_process(script, *arguments):
    """Runs a script in a Python of its own and returns its result. It finds what this process finds."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
