"""What tests executed: the total, and the files of which they executed least. `coverage report` has them all."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from coverage import Coverage

SHOWN = 10


def main() -> None:
    """Print a line for each."""
    coverage = Coverage()
    coverage.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        coverage.json_report(outfile=str(report))
        files = {name: each["summary"] for name, each in json.loads(report.read_text())["files"].items()}
        total = json.loads(report.read_text())["totals"]
    print(f"{total['percent_covered']:.2f} % of {total['num_statements']} statements in {len(files)} files; the least:")
    for name in sorted(files, key=lambda name: files[name]["percent_covered"])[:SHOWN]:
        print(f"{files[name]['percent_covered']:6.1f} %  {files[name]['missing_lines']:4} lines not executed  {name}")


if __name__ == "__main__":
    main()
