"""How long each default test takes: `python -m tests.durations JUNIT.xml ...`, after `tox -e unit` on a quiet machine.

pytest writes JUNIT.xml (`--junitxml`; tox puts it into `.tox/unit.xml`). The command writes `tests/durations.json`,
seconds by file and test, and prints the slowest. `tests/test_durations.py` reads the record: a default test takes at
most `LIMIT_S`, except those in `tests/slow.txt`, a list that only shrinks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

LIMIT_S = 2.0
FOLDER = Path(__file__).parent
RECORD, EXEMPT = FOLDER / "durations.json", FOLDER / "slow.txt"

Record = dict[str, dict[str, float]]


def read_junit(paths: Iterable[Path]) -> Record:
    """Seconds of each test that ran, with its fixtures: file -> test -> seconds. Skipped tests are left out."""
    record: Record = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            module, name = case.get("classname"), case.get("name")
            if module and name and case.find("skipped") is None:
                file = module.replace(".", "/") + ".py"
                record.setdefault(file, {})[name] = round(float(case.get("time", "0")), 2)
    return {file: dict(sorted(record[file].items())) for file in sorted(record)}


def slow(record: Record) -> dict[str, float]:
    """Tests above the limit: id -> seconds, the slowest first."""
    found = {f"{file}::{test}": s for file, tests in record.items() for test, s in tests.items() if s > LIMIT_S}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def exempt() -> set[str]:
    """Ids of tests that may take longer, one per line; two spaces and a `#` begin the reason."""
    lines = EXEMPT.read_text(encoding="utf-8").splitlines()
    return {line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")}


def main() -> int:
    """Write the record and print the 20 slowest tests. 1 if they are not those of the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path, nargs="+")
    # A run of some files leaves what is known of the others.
    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    record = known | read_junit(parser.parse_args().junit)
    record = {file: record[file] for file in sorted(record) if (FOLDER.parent / file).is_file()}
    files = (f"{json.dumps(file)}: {json.dumps(tests)}" for file, tests in record.items())
    RECORD.write_text("{\n" + ",\n".join(files) + "\n}\n", encoding="utf-8")
    found, allowed = slow(record), exempt()
    seconds = sum(sum(tests.values()) for tests in record.values())
    print(f"{sum(map(len, record.values()))} tests, {seconds:.0f} s; {len(found)} take more than {LIMIT_S} s")
    for test, s in list(found.items())[:20]:
        print(f"{s:6.1f} s  {test}{'' if test in allowed else '  NOT EXEMPT'}")
    for test in sorted(allowed - set(found)):
        print(f"fast now, remove from {EXEMPT.name}: {test}")
    return 1 if set(found) != allowed else 0


if __name__ == "__main__":
    sys.exit(main())
