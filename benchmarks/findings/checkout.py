"""Files of one commit of a project in a folder of their own: changed in single lines, and run on ranks.

Nothing of the project stays: the folder is temporary, and only the lines that keep a script from a CPU are changed.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_ROOT = Path(__file__).parents[2]
_SOURCES = [str(_ROOT / name) for name in ("contracts", "core", "falsify", "")]
_LIMIT_S = 300.0
_FOUND = re.compile(r"andon(?:\.Violation| suspicion): (\S+ broken \w+ step \d+).*\n(?:.*\n){0,3}?\s+seen\s+(.*)")


class Gone(Exception):
    """What the finding is about is not there any more, or not as it was."""


@dataclass(frozen=True)
class Ran:
    """What a command printed, both streams, and how it ended."""

    code: int
    text: str

    def lines(self, pattern: str) -> list[str]:
        """The lines that match, without spaces around them, each once and in order."""
        return list(dict.fromkeys(line.strip() for line in self.text.splitlines() if re.search(pattern, line)))

    def found(self, clause: str) -> list[str]:
        """What the watch found of a clause, or suspects: at which step, and what was seen."""
        return [f"watch: {where}: {seen}" for where, seen in _FOUND.findall(self.text) if where.startswith(clause)]


@dataclass
class Checkout:
    """The folder, and what else a child needs: modules in place of libraries that decide nothing here."""

    folder: Path
    stand_ins: list[Path] = field(default_factory=list)
    failed: list[Ran] = field(default_factory=list)
    """What ended otherwise than by 0. Where nothing was seen, the defect may be mended, or the command not have run."""

    def text(self, file: str) -> str:
        """What a file of the project says; raises `Gone` if it is not there."""
        path = self.folder / file
        if not path.exists():
            msg = f"{file} is not in this commit"
            raise Gone(msg)
        return path.read_text(encoding="utf-8")

    def change(self, file: str, *changes: tuple[str, str]) -> None:
        """Put `new` for `old` wherever it stands in the file; raises `Gone` where a line is not as it was."""
        text = self.text(file)
        for old, new in changes:
            if old not in text:
                msg = f"{file} has no {old!r} any more"
                raise Gone(msg)
            text = text.replace(old, new)
        (self.folder / file).write_text(text, encoding="utf-8")

    def write(self, file: str, text: str) -> Path:
        """A file of ours in the folder: data, or a configuration."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def stand_in(self, module: str, text: str) -> None:
        """A module for one that is not installed, or not needed to show the defect. Dots make packages."""
        *packages, name = module.split(".")
        folder = self.folder / "_stand_ins"
        for package in packages:
            folder = folder / package
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        if folder.name == "_stand_ins" or packages:
            self.stand_ins = [self.folder / "_stand_ins"]

    def python(self, *words: str, at: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        """One process of this interpreter, in a folder of the project."""
        paths = [*map(str, self.stand_ins), str(self.folder / at), *_SOURCES]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder / at,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        ran = Ran(done.returncode, done.stdout)
        if ran.code:
            self.failed.append(ran)
        return ran

    def ranks(
        self,
        script: str,
        *arguments: str,
        at: str = "",
        world: int = 2,
        watched: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Ran:
        """The script on ranks of this machine, as its users start it, and under the watch unless told otherwise."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        watch = ["-m", "andon", "watch"] if watched else []
        return self.python(*launch, *watch, script, *arguments, at=at, environment=environment)

    def probe(
        self, name: str, *arguments: str, at: str = "", world: int = 1, environment: Mapping[str, str] | None = None
    ) -> Any:
        """What `probes.py` sees of the project's own functions: the JSON of its last line.

        Raises `RuntimeError` with its output if it ended otherwise.
        """
        words = ["-m", "benchmarks.findings.probes", name, *arguments]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
        ran = self.python(*launch, *words, at=at, environment=environment)
        said = ran.lines(r"^\{")
        if ran.code or not said:
            raise RuntimeError(ran.text)
        return json.loads(said[-1])


@contextmanager
def checkout(mirror: Path, repository: str, commit: str, paths: Sequence[str]) -> Iterator[Checkout]:
    """The named files or folders of a commit, in a temporary folder.

    `mirror` holds git repositories as `owner+name`, bare or not. Raises `Gone` where the commit has not got them, and
    `FileNotFoundError` where the mirror has not got the repository.
    """
    archive = _git(mirror, repository, "archive", commit, "--", *paths)
    if archive.returncode:
        raise Gone(archive.stderr.decode(errors="replace").strip())
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Checkout(Path(folder))


def newest(mirror: Path, repository: str) -> str:
    """The full hash of the newest commit that the mirror has."""
    return _git(mirror, repository, "rev-parse", "HEAD").stdout.decode().strip()


def _git(mirror: Path, repository: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    folder = mirror / repository.replace("/", "+")
    found = [each for each in (folder, folder / ".git", folder / "repo") if (each / "HEAD").is_file()]
    if not found:
        msg = f"{mirror} has no git repository {folder.name}"
        raise FileNotFoundError(msg)
    return subprocess.run(["git", "--git-dir", str(found[0]), *words], capture_output=True, check=False)
