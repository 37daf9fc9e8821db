"""A real Chromium without a window, spoken to through two pipes: no port, no network, a profile of its own.

Its DevTools protocol is JSON, each message ended by a zero byte; Chromium reads it from descriptor 3 and writes to 4.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
FAINT = """
(() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const light = part => { part /= 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = each => {
    const [r, g, b, alpha = 1] = channels(getComputedStyle(each).backgroundColor);
    return alpha === 1 || !each.parentElement ? [r, g, b] : behind(each.parentElement);
  };
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  let seen = 0;
  while (words.nextNode()) {
    const each = words.currentNode.parentElement;
    if (!words.currentNode.data.trim() || !each.checkVisibility({visibilityProperty: true})) continue;
    const ink = getComputedStyle(each)[each.closest('svg') ? 'fill' : 'color'];
    const two = [luminance(channels(ink)), luminance(behind(each))].sort((a, b) => b - a);
    seen += 1;
    if ((two[0] + 0.05) / (two[1] + 0.05) < 4.5) found.push(each.className + ': ' + words.currentNode.data.trim());
  }
  return [seen, found];
})()
"""
"""How many texts are seen, and those whose contrast with what is behind them is under 4.5 to 1 (WCAG 2, AA)."""
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_LIMIT_S = 60.0
# The descriptors are given names only in the child, where nothing else has them.
_START = (
    "import os, sys; _, commands, answers, *command = sys.argv; "
    "os.dup2(int(commands), 3); os.dup2(int(answers), 4); os.execv(command[0], command)"
)


class Browser:
    def __init__(self, profile: Path) -> None:
        commands, self._out = _pipe()
        self._in, answers = _pipe()
        launch = [sys.executable, "-c", _START, str(commands), str(answers)]
        self._process = subprocess.Popen(
            [*launch, str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._waiting, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        page = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")
        self._call("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._session = ""
        try:
            self._call("Browser.close")
            self._process.wait(_LIMIT_S)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            os.close(self._out)
            os.close(self._in)

    def open(self, path: Path, fragment: str = "") -> None:
        for url in ("about:blank", path.as_uri() + fragment):  # from one fragment to another nothing would be loaded
            self.events.clear()
            load = {"name": "load", "loaderId": self._call("Page.navigate", url=url)["loaderId"]}
            deadline = time.monotonic() + _LIMIT_S
            while not any(load.items() <= event["params"].items() for event in self.events):
                self._receive(deadline)

    def scripting(self, allowed: bool) -> None:
        self._call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def colours(self, scheme: str) -> None:
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def wide(self, pixels: int, high: int = 800) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=pixels, height=high, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page, as plain values; waits where it is a promise."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def permit(self, *permissions: str) -> None:
        self._call("Browser.grantPermissions", permissions=permissions)

    def press(self, key: str) -> None:
        text, code = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9), "Space": (" ", 32)}[key]
        name = " " if key == "Space" else key
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=name, code=key, windowsVirtualKeyCode=code, **given)

    def outline(self) -> list[tuple[str, str]]:
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    def requests(self) -> list[str]:
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        logged = [event["params"]["entry"]["text"] for event in self.events if event["method"] == "Log.entryAdded"]
        thrown = [str(event["params"]) for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        return logged + thrown

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _LIMIT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message; events are kept. Raises `TimeoutError` or `EOFError` where none comes."""
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            read = os.read(self._in, 1 << 16)
            if not read:
                raise EOFError("Chromium has ended")
            self._waiting += read
        first, _, self._waiting = self._waiting.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the descriptors that the child gives away."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
