"""Imported first by the fork server, and by nobody else: it ends with its launcher while it still imports, too."""

from __future__ import annotations

import os

from andon.launch.orphan import bind_to_parent

bind_to_parent(os.getppid())
