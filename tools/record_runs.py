"""Keep the records of finished runs.

python tools/record_runs.py runs/paper results/paper [--revision REV]

Writes recipe.toml, meta.json and answers.npz of every finished run below the first folder to the same place below the second
one, and says which runs have not finished. --revision: that of the code, for runs from a machine without its repository.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory
from finessl.runs.records import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--revision")
    options = parser.parse_args()
    sys.exit(record_runs(options.runs, options.records, options.revision))


def record_runs(runs: Path, records: Path, revision: str | None = None) -> int:
    """Returns the number of finished runs that could not be recorded."""
    refused = 0
    for file in sorted(runs.rglob("recipe.toml")):
        run = RunDirectory(file.parent)
        name = run.path.relative_to(runs)
        try:
            if not run.finished():
                print(f"not finished: {name}")
                continue
            write_record(run, records / name, revision)
            accuracy = run.meta().get("accuracy")
            print(f"{'no accuracy' if accuracy is None else f'{accuracy:.2%}'}: {name}")
        except FinesslError as error:
            refused += 1
            print(f"refused: {error}")
    return refused


if __name__ == "__main__":
    main()
