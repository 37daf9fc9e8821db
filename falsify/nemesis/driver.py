"""`andon` with something planted in it and in its ranks: `python -m falsify.nemesis.driver train ...`.

Under torchrun each rank is such a command; otherwise ranks are started with an entry that plants first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from .planting import plant_all


def planted_rank(payload: Mapping[str, Any]) -> int:
    """Be one rank in which the plants are; an entry of `andon.launch`."""
    from andon.training.start import train_rank

    plant_all()
    return train_rank(payload)


def main() -> None:
    """Plant, and be the command; ends as it does."""
    import andon.cli.train
    from andon.cli.app import main as run_command

    start = andon.cli.train.run_training
    entry = f"{planted_rank.__module__}:{planted_rank.__name__}".replace("__main__", f"{__package__}.driver")
    andon.cli.train.run_training = functools.partial(start, entry=entry)
    plant_all()
    run_command()


if __name__ == "__main__":
    main()
