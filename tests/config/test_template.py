"""The configuration that `andon init` writes."""

from __future__ import annotations

from pathlib import Path

import yaml

from andon.config.load import load_config, template
from andon.config.schema import Config


def test_the_template_is_read_back_to_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(template(), encoding="utf-8")
    assert load_config(path) == Config()


def test_the_template_shows_every_key_and_fits_a_terminal() -> None:
    shown = yaml.safe_load(template())
    plain = Config().model_dump()
    assert shown.keys() == plain.keys()
    assert all(shown[name].keys() == part.keys() for name, part in plain.items() if isinstance(part, dict))
    assert max(map(len, template().splitlines())) <= 120


def test_every_setting_that_is_changed_in_the_template_takes_effect(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(template().replace("seed: 42 ", "seed: 7 ").replace("epochs: 2\n", "epochs: 5\n"), encoding="utf-8")
    config = load_config(path)
    assert (config.seed, config.training.epochs) == (7, 5)
