"""The fixtures of tests/conftest.py notice what a test leaves behind, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAKS = {
    "variable": ("os.environ['LEFT'] = '1'", "left changed in the environment: LEFT "),
    "removal": ("del os.environ['HF_HUB_OFFLINE']", "left changed in the environment: HF_HUB_OFFLINE "),
    "main": ("sys.modules['__main__'] = os", "left changed in the interpreter: __main__ "),
    "path": ("sys.path[0] = 'elsewhere'", "left changed in the interpreter: sys.path "),
    "arguments": ("sys.argv = []", "left changed in the interpreter: sys.argv "),
    "thread": (
        "threading.Thread(target=threading.Event().wait, name='lost', daemon=True).start()",
        "threads left running: lost ",
    ),
    "process": (
        "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)",
        "processes left running: ",
    ),
    "rank": (
        "multiprocessing.get_context('forkserver').Process(target=signal.pause, daemon=True).start()",
        "processes left running: ",
    ),
    "group": (
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "a process group was left initialised ",
    ),
}
"""What a test leaves behind, and what is said of it."""
CLEAN = """
def test_clean(monkeypatch):
    monkeypatch.setenv("USED", "1")
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", ""], check=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
"""
"""A test that uses all of these and puts them back."""


def test_what_a_test_leaves_behind_fails_it_and_no_other(pytester: pytest.Pytester) -> None:
    """Every leak is an error of the test that leaked; a clean test that runs after them passes."""
    text = CONFTEST.read_text(encoding="utf-8")
    assert "GRACE_S = 10.0" in text
    pytester.makeconftest(text.replace("GRACE_S = 10.0", "GRACE_S = 0.1"))
    leaky = "".join(f"def test_{name}():\n    {statement}\n" for name, (statement, _) in LEAKS.items())
    modules = "multiprocessing, os, signal, subprocess, sys, threading"
    pytester.makepyfile(f"import {modules}\nimport torch.distributed as dist\n{leaky}\n{CLEAN}")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=len(LEAKS) + 1, errors=len(LEAKS))
    for name, (_, said) in LEAKS.items():
        result.stdout.fnmatch_lines([f"*ERROR at teardown of test_{name} *", f"E *: {said}*"])
