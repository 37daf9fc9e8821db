"""What the logits of a causal loss cost in memory: `python -m benchmarks.logits_memory`, on a CPU.

Each way runs in a process of its own: a decoder so small that little else needs memory, with the vocabulary of Qwen3,
is built, and then one forward and backward pass is made of one row whose tokens are all trained. Its peak is the
highest resident set of the process (VmHWM of Linux) less the resident set before the pass. `naive` is the model's own
logits of all tokens, in fp32, and torch's cross entropy. `one token` is the same pass with a single trained token: what
is needed without the logits, such as the gradients of a head and of the embedding that shares its weights. The share is
of what both ways add to that. Prints a table; exits with 1 if a share is above `--most`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from andon.model.adapter import AdapterSpec, attach
from andon.model.build import ModelSpec, build_base
from andon.model.causal import collate_packs, loss_sum
from benchmarks.runs import table

VOCABULARY = 151_936
WAYS = ("one token", "naive", "chunked")
HEADS = {"frozen": AdapterSpec(r=4), "trained": AdapterSpec(kind="none")}


def main() -> int:
    """Print the table; 0 if no share is above `--most`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--most", type=float, default=0.15)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "HEAD"), help="one way in this process: prints its bytes")
    options = parser.parse_args()
    if options.one:
        print(extra_bytes(*options.one, options.tokens, options.hidden))
        return 0
    sizes = ["--tokens", str(options.tokens), "--hidden", str(options.hidden)]
    rows, worst = [], 0.0
    for head in HEADS:
        extras = {}
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.logits_memory", *sizes, "--one", way, head]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            extras[way] = int(found.stdout.split()[-1])
        share = (extras["chunked"] - extras["one token"]) / (extras["naive"] - extras["one token"])
        worst = max(worst, share)
        rows.append((head, *(f"{extras[way] / 2**20:,.0f} MiB" for way in WAYS), f"{share:.3f}"))
    print(table(("head", *WAYS, "share"), rows))
    return 0 if worst <= options.most else 1


def extra_bytes(way: str, head: str, tokens: int, hidden: int) -> int:
    """Bytes that one pass added to the resident set of this process at its highest."""
    model = _model(HEADS[head], tokens, hidden)
    ids = torch.arange(1, tokens + 1) % VOCABULARY
    trained = torch.ones(tokens)
    if way == "one token":
        trained[:-1] = 0.0
    batch = collate_packs([[(ids, trained)]], 0, 8, None)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    before = _resident("VmRSS")
    if way == "naive":
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        nn.functional.cross_entropy(logits, ids[1:], reduction="sum").backward()  # type: ignore[no-untyped-call]
    else:
        loss_sum(model, batch).loss_sum.backward()  # type: ignore[no-untyped-call]
    return _resident("VmHWM") - before


def _model(adapter: AdapterSpec, tokens: int, hidden: int) -> nn.Module:
    spec = ModelSpec(
        num_labels=0,
        labels=(),
        vocab_size=VOCABULARY,
        pad_id=0,
        hidden_size=hidden,
        num_hidden_layers=1,
        intermediate_size=hidden,
        dropout=0.0,
        max_length=tokens,
        head="causal",
    )
    return attach(build_base(spec), adapter, seed=0)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


if __name__ == "__main__":
    raise SystemExit(main())
