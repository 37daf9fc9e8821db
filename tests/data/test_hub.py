"""A model's name that is no folder: one answer at once that says both, no folder here and what the hub says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from andon.console.problems import InputError
from andon.data.tokens import pretrained_tokenizer

_PROGRAM = """
from andon.data.hub import require_on_hub
for _ in range(2):
    try:
        require_on_hub("nodir")
    except ValueError as error:
        print(error, flush=True)
    input()
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


@pytest.mark.parametrize(
    ("name", "part"), [("nodir", "HF_HUB_OFFLINE"), ("my dir", "can be no hub id"), ("runs/a/b", "can be no hub id")]
)
def test_without_the_hub_a_name_that_is_no_folder_is_refused_as_both(name: str, part: str) -> None:
    """Whether it was meant as a folder or as a hub id, the line says why it is neither."""
    with pytest.raises(InputError, match=f"there is no folder '{name}' here, and .*{part}"):
        pretrained_tokenizer(name, local_only=False)


def test_a_name_that_the_hub_does_not_know_is_asked_for_once(tmp_path: Path) -> None:
    """One request and its answer. A process that asks once more after the hub is gone says that it is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with HTTPServer(("127.0.0.1", 0), _KnowsNothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        environment |= {"HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        asking = subprocess.Popen([sys.executable, "-c", _PROGRAM], env=environment, cwd=tmp_path, **pipes)
        assert asking.stdout is not None
        unknown = asking.stdout.readline()
        server.shutdown()
        thread.join()
    unreachable, _ = asking.communicate("\n\n")
    assert unknown.startswith("model.base: there is no folder 'nodir' here, and the hub has no model of that name")
    assert [path for path in _KnowsNothing.asked if "nodir" in path] == ["/api/models/nodir"]
    assert unreachable.startswith("model.base: there is no folder 'nodir' here, and the hub could not be reached (")


def test_a_file_is_no_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").write_bytes(b"")
    with pytest.raises(InputError, match="'weights' is a file"):
        pretrained_tokenizer("weights", local_only=False)
