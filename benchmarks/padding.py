"""How much of what a model computes on is padding: `python -m benchmarks.padding --model FOLDER train.csv`.

A table over the settings that decide it, for one epoch of the rows of a file as `andon train` would plan them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from andon.config.load import load_config
from andon.config.schema import Config
from andon.step.plan import BatchPlan
from andon.training.material import padding_multiple, prepare
from benchmarks.runs import table

_MOST = 0.1


def main() -> int:
    """Print the table; 0 if rows that are grouped by length, padded to a multiple of 4, waste at most a tenth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--model", help="folder of a transformers model, for its tokenizer; else bytes are tokens")
    parser.add_argument("--set", action="append", default=[], help="as for andon train")
    options = parser.parse_args()
    base = [f"model.base={options.model}"] if options.model else []
    wasted = {}
    for grouped in ("false", "true"):
        for multiple in (8, 4, 1):
            own = [f"training.group_by_length={grouped}", f"training.pad_to_multiple_of={multiple}"]
            config = load_config(None, [f"data.train={options.file}", *base, *options.set, *own])
            wasted[grouped, multiple] = wasted_share(config)
    rows = [(*key, f"{100 * share:.1f} %") for key, share in wasted.items()]
    print(table(("training.group_by_length", "training.pad_to_multiple_of", "padding"), rows))
    return 0 if wasted["true", 4] <= _MOST else 1


def wasted_share(config: Config) -> float:
    """The share of the tokens of the first epoch that is padding."""
    material = prepare(config)
    lengths = material.task.lengths.tolist()
    return padding_of(material.plan, lengths, padding_multiple(config), config.model.max_length)


def padding_of(plan: BatchPlan, lengths: Sequence[int], multiple: int, limit: int) -> float:
    """The same for a plan over rows of `lengths` tokens, padded to `multiple` and never beyond `limit`."""
    real = padded = 0
    for step in range(1, plan.steps_per_epoch + 1):
        for rows in filter(None, plan.batch(step).micro_batches(plan.micro_batches)):
            tokens = [lengths[row] for row in rows]
            real += sum(tokens)
            padded += len(tokens) * min(limit, -(-max(tokens) // multiple) * multiple)
    return 1 - real / padded


if __name__ == "__main__":
    raise SystemExit(main())
