"""Training from a script without a main guard and from a real notebook kernel, with two workers, as the docs say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

import andon
from tests.launch.pipes import PATIENCE_S
from tests.launch.sessions import wait_until_empty
from tests.repository.sources import ROOT
from tests.training.runs import Runs, outcome

pytestmark = pytest.mark.xdist_group("test_notebook")

SECTION = (ROOT / "docs" / "fine-tune.md").read_text(encoding="utf-8").partition("\n## From Python\n")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", SECTION.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
assert len(BLOCKS) == 2
"""The programs in docs/fine-tune.md, in order."""
_CELL_S = 180.0  # A cell may be a whole run, on a machine that does other work beside it


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    rows = [{"text": f"{colour} thing number {n}", "label": colour} for n in range(40) for colour in ("red", "green")]
    path = tmp_path_factory.mktemp("colours") / "train.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return Runs(path)


@pytest.fixture(scope="module")
def documented(colours: Runs) -> dict[str, Any]:
    folder = colours.data.parent / "run"
    andon.train(str(colours.data), backend="inline", workers=1, training={"epochs": 1}, run_dir=folder)
    return outcome(folder)


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[str, str]]]:
    """A new kernel, met through sockets in a folder, which leaves no process behind."""
    with tempfile.TemporaryDirectory(prefix="k") as own:  # a socket's path must be short
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            monkeypatch.setenv(name, own)
        manager = KernelManager(transport="ipc", ip=os.path.join(own, "k"))
        manager.start_kernel(cwd=str(tmp_path))
        session = manager.provisioner.pid
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=PATIENCE_S)

            def run(code: str) -> tuple[str, str]:
                """What the cell wrote, and the name of the error that it ended with."""
                wrote: list[str] = []
                reply = client.execute_interactive(
                    code, output_hook=lambda message: wrote.append(message["content"].get("text", "")), timeout=_CELL_S
                )
                return "".join(wrote), reply["content"].get("ename", "")

            yield run
        finally:
            client.stop_channels()
            manager.shutdown_kernel()
        wait_until_empty(session)


def test_the_docs_run_in_a_notebook(
    notebook: Callable[[str], tuple[str, str]], tmp_path: Path, documented: dict[str, Any]
) -> None:
    told, errors = zip(*map(notebook, BLOCKS), strict=True)
    assert errors == ("",) * len(BLOCKS)
    assert outcome(tmp_path / "runs" / "colours") == documented
    for part in ("2 workers (gloo)", documented["weights_digest"], "chain-intact v1: holds"):
        assert part in told[0]


SCRIPT = """
import multiprocessing.forkserver, os, random, signal
import numpy, torch

torch.set_num_threads(2)
(torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).sum().backward()


def state():
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    server = multiprocessing.forkserver._forkserver
    of_server = server._forkserver_pid, server._preload_modules
    drawn = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return drawn, torch.get_num_threads(), dict(os.environ), os.getcwd(), handlers, of_server


before = state()
print("begins")
{block}
assert state() == before
"""


# Deep: the cells of `test_the_docs_run_in_a_notebook` have no main guard either.
@pytest.mark.deep
def test_a_script_without_a_main_guard(tmp_path: Path, documented: dict[str, Any]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{block}", BLOCKS[0]))
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out.count("begins") == 1
    wait_until_empty(process.pid)
    assert outcome(tmp_path / "runs" / "colours") == documented
