"""Checks the operators of this crate from Python: `check.py PART [WORD…]`.

A part is one of the files in `checks`, whose names no other module of Python may have. With words,
only the checks run whose names contain one of them. `tests/python.rs` runs all parts; to run one by
hand, set PYTHONPATH to the folder in which the package `python_ops` is, and PYTHON_FAULTS to the
path of `libpython_faults.so`.
"""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "checks"
PARTS = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("harness", "samples"))


def main(arguments):
    if not arguments or arguments[0] not in PARTS:
        print(f"usage: check.py PART [WORD…], where PART is one of {', '.join(PARTS)}")
        return 2
    sys.path.insert(0, str(FOLDER))
    import harness

    importlib.import_module(arguments[0])
    # A part may import another one for what it defines; its checks are not run again.
    harness.CHECKS = [check for check in harness.CHECKS if check.__module__ == arguments[0]]
    return harness.run(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
