"""What functions of other projects do, called from their own files in a process of their own.

`python -m benchmarks.findings.probes NAME ARGUMENTS`, in the folder of a checkout; the last line printed is JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch


def fsdp2_reset(folder: str) -> dict[str, Any]:
    """How many tensors still hold what memory held, after `to_empty` and `reset_parameters`."""
    sys.path.insert(0, folder)
    model = importlib.import_module("model")
    with torch.device("meta"):
        built = model.Transformer(model.ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64))
    built.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in built.parameters():
            tensor.fill_(float("nan"))
    built.reset_parameters()
    left = [name for name, tensor in built.named_parameters() if bool(tensor.isnan().any())]
    return {"left": len(left), "all": len(list(built.parameters())), "names": left}


PROBES = {"fsdp2_reset": fsdp2_reset}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
