"""The docs as a site: built without a warning, and whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from andon.config.schema import Config, Section
from tests.repository.sources import ROOT
from tests.support.pages import Read

pytest.importorskip("sphinx", reason="the site is built by Sphinx (dependency group docs)")
# Cheaper by default: tests/docs/test_pages.py (links, headings, navigation).
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("site")]


def build(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build as `tox -e docs` does."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "docs", folder)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


def test_the_page_of_settings_is_whole(site: Path) -> None:
    """Every key of a configuration, and each word of its description."""
    parts = {name: field.default for name, field in Config.model_fields.items()}
    keys = [name for name, part in parts.items() if not isinstance(part, Section)]
    keys += [
        f"{name}.{key}" for name, part in parts.items() if isinstance(part, Section) for key in type(part).model_fields
    ]
    shown = Read((site / "settings.html").read_text(encoding="utf-8")).text
    assert [key for key in keys if key not in shown] == []
    assert any("<tool>" in each for each in shown)


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    """Between pages, into a page, to a file of the repository."""
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser']\nmyst_heading_anchors = 4\n")
    page = tmp_path / "index.md"
    for broken in ("[page](gone.md)", "[heading](#gone)", "[file](../gone.py)"):
        page.write_text(f"# Title\n\n{broken}\n")
        built = build(tmp_path, tmp_path / "built")
        assert built.returncode == 1, built.stderr
        assert "gone" in built.stderr
