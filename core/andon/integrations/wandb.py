"""Logs a run's metrics and a watch's findings to Weights & Biases.

    andon.watch(model, optimizer, log=findings())

wandb's own settings choose the account, the project and offline mode: `wandb login`, `WANDB_PROJECT`, `WANDB_MODE`.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from andon.integrations.trackers import Tracker, numbers, writes
from andon_contracts.untrusted import open_regular

_LOCAL = ("offline", "dryrun", "disabled")
_LONGEST_LINE = 1 << 24


class WandbRun(Tracker):
    """One wandb run for one Andon run, resumes included. Its id is in `folder`/wandb.

    On opening it, lines of `metrics` that wandb lacks are sent first: a killed process may not have sent all of them.
    """

    def __init__(self, folder: Path, metrics: Path, settings: Mapping[str, Any]) -> None:
        """metrics: the file of all lines, including the one to be logged next. settings: the run's configuration."""
        super().__init__("wandb")
        self._folder, self._metrics, self._settings = folder, metrics, settings
        self._run: Any = None
        self._library: Any = None

    def line(self, line: Mapping[str, Any]) -> None:
        self.attempt(lambda: self._log(line))

    def close(self) -> None:
        """Finish the wandb run with its exit code, and end the service process that wandb started."""
        failed = sys.exc_info()[0] is not None
        if self._run is not None:
            self.attempt(lambda: self._run.finish(exit_code=int(failed)))
        if self._library is not None and self._library.run is None:  # otherwise the caller has an open run
            Tracker("wandb").attempt(self._library.teardown)

    def _log(self, line: Mapping[str, Any]) -> None:
        if self._run is not None:
            # wandb drops lines of earlier steps, and the last scores may belong to one (`training.keep`).
            least = 0 if line.get("what") in (None, "validation") else self._run.step
            self._run.log(numbers(line), step=max(int(line["step"]), least))
            return
        self._run = self._open()
        known = self._run.step
        with open_regular(self._metrics) as file:
            for line in map(json.loads, iter(partial(file.readline, _LONGEST_LINE), b"")):
                if int(line["step"]) >= known:
                    self._run.log(numbers(line), step=int(line["step"]))

    def _open(self) -> Any:
        import wandb

        id_file = self._folder / "wandb" / "id"
        if not id_file.exists():
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(secrets.token_hex(4), encoding="ascii")
        self._library = wandb
        if wandb.setup().settings.mode not in _LOCAL and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("it has no key here: run wandb login, or set WANDB_MODE=offline")
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "andon"),
            id=id_file.read_text(encoding="ascii"),
            resume="allow",
            reinit="create_new",
            name=os.environ.get("WANDB_NAME", self._folder.name),
            dir=self._folder,
            config=dict(self._settings),
            settings=wandb.Settings(console="off"),  # the launcher reads a rank's output
        )


def findings() -> Callable[[dict[str, object]], None]:
    """For `andon.watch(log=...)`: logs each finding, under its clause, to the run that `wandb.init` opened.

    Only rank 0 logs. Call it after the process group is initialized. The finding joins the row that the loop logs next.
    Raises `ValueError` if no run is open.
    """
    if not writes():
        return lambda found: None
    import wandb

    run = wandb.run
    if run is None:
        raise ValueError("wandb has no open run: call wandb.init() before findings()")
    tracker = Tracker("wandb")

    def log(found: dict[str, object]) -> None:
        tracker.attempt(lambda: run.log({f"andon/{found['andon/clause']}": found["andon/message"]}, commit=False))

    return log
