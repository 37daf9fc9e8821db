"""A script at its commit, taken out of a mirror into a folder, with our lines in the place of its own."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.real_code.row import Patch, Row


def repository(mirror: Path, row: Row) -> Path | None:
    """The git repository of a row in the mirror, as `owner+name` or `owner+name.git`, bare or not; None without one."""
    name = row.repository.replace("/", "+")
    return next((folder for folder in (mirror / name, mirror / f"{name}.git") if folder.is_dir()), None)


def take_out(git: Path, row: Row, into: Path) -> None:
    """Write the row's files at its commit into the folder `into`, patched, and what it reads beside them.

    Raises `ValueError` where the repository lacks the commit or a path, or a patch does not fit.
    """
    with TemporaryFile() as archive:
        archived = ["git", "-C", str(git), "archive", "--format=tar", row.commit, *row.parts]
        done = subprocess.run(archived, stdout=archive, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{row.name}: {done.stderr.strip()}")
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(into, filter="data")
    patch(into, row.patches, script(row))
    for name, text in row.files.items():
        place = into / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    if row.prepare is not None:
        row.prepare(working(row, into))


def script(row: Row) -> str:
    """The path of the script in its repository, also of one that is run as a module."""
    return f"{row.path.replace('.', '/')}.py" if row.module else row.path


def working(row: Row, root: Path) -> Path:
    """The folder in which the script runs."""
    return root / (str(Path(script(row)).parent) if row.folder is None else row.folder)


def patch(root: Path, patches: Sequence[Patch], default: str) -> None:
    """Put each patch into its file under `root`. Raises `ValueError` unless what it replaces stands there once."""
    for each in patches:
        file = root / (each.path or default)
        if not file.is_file():
            raise ValueError(f"{each.path or default}: there is no such file to patch")
        text = file.read_text(encoding="utf-8")
        if (count := text.count(each.old)) != 1:
            raise ValueError(f"{each.path or default}: {each.old!r} stands there {count} times, not once")
        file.write_text(text.replace(each.old, each.new), encoding="utf-8")
