"""Checks the operators of this crate from Python: `check.py PART… [WORD…]`.

A part is one of the files in `checks`, whose names no other module of Python may have. With words,
only the checks run whose names contain one of them. `tests/python.rs` runs all parts; to run some by
hand, set PYTHONPATH to the folder in which the package `python_ops` is, and PYTHON_FAULTS to the
path of `libpython_faults.so`.
"""

import importlib
import itertools
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "checks"
PARTS = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("harness", "samples"))


def main(arguments):
    parts = list(itertools.takewhile(lambda argument: argument in PARTS, arguments))
    if not parts:
        print(f"usage: check.py PART… [WORD…], where PART is one of {', '.join(PARTS)}")
        return 2
    sys.path.insert(0, str(FOLDER))
    import harness

    worst = 0
    for part in parts:
        importlib.import_module(part)
        code = harness.run(part, arguments[len(parts) :])
        print(f"part {part}: {'failed' if code else 'passed'}", flush=True)
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
