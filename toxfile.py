"""A tox plugin of ours: several tox environments in one folder, installed once.

The environments for types, unit tests, every backend and coverage need the same libraries (over a gigabyte). tox
recreates a folder whenever the name of the environment in it changes, so the runner `shared` gives them one name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tox.plugin import impl
from tox.tox_env.api import ToxEnv
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class SharedInfo(Info):
    """What tox remembers of a folder, less the name of the environment that used it last."""

    @contextmanager
    def compare(self, value: Any, section: str, sub_section: str | None = None) -> Iterator[tuple[bool, Any | None]]:
        """Compare and update as tox does, with one name for all who share the folder."""
        if section == ToxEnv.__name__:
            value = {**value, "name": SharedRunner.id()}
        with super().compare(value, section, sub_section) as found:
            yield found


class SharedRunner(VirtualEnvRunner):
    """A virtual environment whose `env_dir` other environments use too. They must declare the same dependencies."""

    _cleaned: ClassVar[set[Path]] = set()

    @staticmethod
    def id() -> str:
        """The value of `runner` in tox.ini."""
        return "shared"

    @property
    def cache(self) -> Info:
        """What tox remembers of the folder."""
        return SharedInfo(self.env_dir)

    def _clean(self, transitive: bool = False) -> None:
        # `tox -r` asks every environment to start anew; the first one has done it for all.
        if self.env_dir not in self._cleaned:
            self._cleaned.add(self.env_dir)
            super()._clean(transitive)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """Make the runner known to tox."""
    register.add_run_env(SharedRunner)
