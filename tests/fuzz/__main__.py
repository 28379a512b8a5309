"""python tests/fuzz [--minutes 10] [--cases N] [--seed S] [--only KIND,…] [--case KIND/NUMBER] [--jobs J]"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# This folder's modules are fuzz.images …, never a plain `images`; finessl is the one of this checkout.
sys.path[:1] = [str(TESTS), str(TESTS.parent)]
os.environ["PYTHONPATH"] = str(TESTS.parent)

# Before NumPy and torch are imported: a process that forks must have no threads, and nothing may be fetched.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "COLUMNS": "100", "PYTHONHASHSEED": "0"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="Hostile input through every verb; fails on a fault.")
    parser.add_argument("--seed", type=int, default=0, help="Of all cases. The same seed makes the same cases.")
    parser.add_argument("--minutes", type=float, default=10.0, help="Stop after this time, earlier tries included.")
    parser.add_argument("--cases", type=int, help="Stop after this number of cases.")
    parser.add_argument("--only", help="Kinds of cases, separated by commas. (default: all)")
    parser.add_argument("--case", metavar="KIND/NUMBER", help="Run one case and show what it printed.")
    parser.add_argument("--jobs", type=int, default=2, help="Cases at a time.")
    parser.add_argument("--journal", type=Path, default=Path(".fuzz"), help="Folder of finished cases, for resuming.")
    parser.add_argument("--again", action="store_true", help="Forget the finished cases.")
    options = parser.parse_args()

    from fuzz import harness

    return harness.main(options)


if __name__ == "__main__":
    sys.exit(main())
