"""Defects in known projects, each shown on the project's own code: `python -m benchmarks.findings --mirror DIR`.

DIR holds git repositories as `owner+name` (`git clone https://github.com/pytorch/examples DIR/pytorch+examples`).
Prints for each finding the line it is about, what was seen, and whether it stands at its commit (`--newest`: at the
newest commit there). What each means, and how severe it is, is in docs/findings.md. It runs code of others: look first.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from benchmarks.findings import contrastive, generative, huggingface, language, pytorch_examples
from benchmarks.findings.checkout import Checkout, Gone, Ran, checkout, newest
from benchmarks.findings.finding import Finding, Shown

FINDINGS = {
    each.name: each
    for project in (pytorch_examples, huggingface, language, generative, contrastive)
    for each in project.FINDINGS
}


def main() -> int:
    """Print what is seen of each finding; 0 if all of them stand, 1 if one is gone, 2 if one is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of: {', '.join(FINDINGS)}")
    parser.add_argument("--mirror", type=Path, required=True, help="folder of git repositories")
    parser.add_argument("--newest", action="store_true", help="at the newest commit of the mirror")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in FINDINGS]:
        parser.error(f"no finding is called {', '.join(unknown)}")
    codes = [look(FINDINGS[name], options.mirror, at_newest=options.newest) for name in options.names or FINDINGS]
    return max(codes)


def look(finding: Finding, mirror: Path, *, at_newest: bool) -> int:
    """Print one; 0 if it stands, 1 if not, 2 if that is not known."""
    print(f"\n{finding.name}: {finding.repository} {finding.file}:{finding.line}")
    try:
        shown, failed = _looked(finding, mirror, at_newest=at_newest)
    except FileNotFoundError as error:
        print(f"  not looked at: {error}")
        return 2
    except Gone as error:
        print(f"  gone, or not as it was: {error}")
        return 1
    except RuntimeError as error:
        print(f"  not known, since a command failed:\n{_end(str(error))}")
        return 2
    print("\n".join(f"  {line}" for line in shown.seen))
    if not shown.stands and failed:
        print(f"  not known, since a command failed:\n{_end(failed[-1].text)}")
        return 2
    print("  it stands" if shown.stands else "  it does not stand any more")
    return 0 if shown.stands else 1


def _looked(finding: Finding, mirror: Path, *, at_newest: bool) -> tuple[Shown, list[Ran]]:
    """What is seen of a finding, and the commands that failed; prints where it is looked for."""
    if not finding.paths:
        files = _installed(finding)
        return finding.show(files), files.failed
    last = newest(mirror, finding.repository)
    commit = last if at_newest else finding.commit
    print(f"  at {commit}, {'the newest' if commit == last else f'where the newest is {last}'} of this mirror")
    with checkout(mirror, finding.repository, commit, finding.paths) as files:
        _compare(finding, files, exactly=commit == finding.commit)
        return finding.show(files), files.failed


def _installed(finding: Finding) -> Checkout:
    """The files of the release that is installed here; raises `FileNotFoundError` where there is none."""
    name = finding.repository.partition("/")[2]
    try:
        found = distribution(name)
    except PackageNotFoundError as error:
        raise FileNotFoundError(error) from error
    print(f"  at release {found.version}, which is installed here")
    files = Checkout(Path(str(found.locate_file(""))))
    _compare(finding, files, exactly=found.version == finding.commit)
    return files


def _end(text: str) -> str:
    """The last lines of what a command said."""
    return textwrap.indent(text[-1500:].strip(), "    ")


def _compare(finding: Finding, files: Checkout, *, exactly: bool) -> None:
    """Print the line; raises `Gone` where its words are not in that line, or at another commit not in the file."""
    lines = files.text(finding.file).splitlines()
    at = [number for number, line in enumerate(lines, 1) if finding.words in line]
    if not at or (exactly and finding.line not in at):
        msg = f"{finding.words!r} is not there"
        raise Gone(msg)
    number = min(at, key=lambda each: abs(each - finding.line))
    print(f"  line {number}: {lines[number - 1].strip()}")


if __name__ == "__main__":
    sys.exit(main())
