"""A model's name that is no folder: one answer at once that says both, no folder here and what the hub says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from andon.console.problems import InputError
from andon.data.tokens import pretrained_tokenizer

_PROGRAM = """
from andon.data.hub import require_on_hub
try:
    require_on_hub("nodir")
except ValueError as error:
    print(error)
"""


class _KnowsNothing(BaseHTTPRequestHandler):
    """A hub without models, which notes what it is asked."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@contextmanager
def hub_without_models() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _KnowsNothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def said_of(hub: str, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment, cwd=cache)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "part"),
    [("nodir", "HF_HUB_OFFLINE"), ("my dir", "can be no hub id"), ("runs/a/b", "can be no hub id")],
)
def test_without_the_hub_a_name_that_is_no_folder_is_refused_as_both(name: str, part: str) -> None:
    """Whether it was meant as a folder or as a hub id, the line says why it is neither."""
    with pytest.raises(InputError, match=f"there is no folder '{name}' here, and .*{part}"):
        pretrained_tokenizer(name, local_only=False)


def test_a_name_that_the_hub_does_not_know_is_asked_for_once(tmp_path: Path) -> None:
    with hub_without_models() as hub:
        said = said_of(hub, tmp_path)
        _KnowsNothing.asked, asked = [], _KnowsNothing.asked
    assert said.startswith("model.base: there is no folder 'nodir' here, and the hub has no model of that name")
    assert [path for path in asked if "nodir" in path] == ["/api/models/nodir"]
    unreachable = said_of(hub, tmp_path)  # nobody listens there any more
    assert unreachable.startswith("model.base: there is no folder 'nodir' here, and the hub could not be reached (")


def test_a_file_is_no_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").write_bytes(b"")
    with pytest.raises(InputError, match="'weights' is a file"):
        pretrained_tokenizer("weights", local_only=False)
