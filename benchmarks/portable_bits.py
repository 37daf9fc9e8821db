"""Whether `run.portable` gives one digest on another CPU: `python -m benchmarks.portable_bits`, on each of several.

Each row is `andon train` in fresh processes, first with the setting and then without: the embedded decoder and encoder,
an encoder of wider layers, and the decoder on instructions. Rows with `on` are to be the same wherever they are
printed, rows with `off` belong to their machine. It needs what `andon train` needs, and compares nothing itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

JOBS = {
    "decoder, LoRA": ("model.architecture=decoder",),
    "encoder, LoRA": ("model.architecture=encoder",),
    "encoder of the shape of MiniLM, 4 layers, 12 updates": (
        "model.architecture=encoder",
        "model.hidden_size=384",
        "model.intermediate_size=1536",
        "model.num_attention_heads=12",
        "model.num_hidden_layers=4",
        "training.max_steps=12",
    ),
    "decoder on instructions, all weights, 40 updates": ("task=sft", "training.max_steps=40"),
}
"""The first is the job of `andon train` alone."""
_MACHINE = """
import json, torch
print(json.dumps({"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()}))
"""


def main() -> int:
    """Print the machine and a table of digests; 0 where every run ended well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="how many of them, from the first")
    options = parser.parse_args()
    told = json.loads(subprocess.run([sys.executable, "-c", _MACHINE], capture_output=True, check=True).stdout)
    print(f"{_cpu()}; {told['capability']} by itself; torch {told['torch']}; Python {platform.python_version()}")
    print("| job | run.portable | weights | final loss | seconds |\n| --- | --- | --- | --- | --- |")
    shown = [_run(name, portable, options.workers) for name in list(JOBS)[: options.jobs] for portable in (True, False)]
    return 0 if all(shown) else 1


def _run(name: str, portable: bool, workers: int) -> bool:
    """Print the row of one run: digest, last loss and seconds, or why there are none; whether it ended well."""
    given = [f"--set={each}" for each in (*JOBS[name], f"run.portable={str(portable).lower()}")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "andon", "train", "--quiet", "--workers", str(workers), *given]
        ended = subprocess.run([*command, "--run-dir", f"{folder}/run"], capture_output=True, text=True, check=False)
        if ended.returncode:
            shown = f"exit {ended.returncode}: {' '.join(ended.stderr.split())[-600:]} | | "
        else:
            found = json.loads((Path(folder) / "run" / "summary.json").read_text())
            shown = f"{found['weights_digest']} | {found['final_loss']['hex']} | {found['wall_s']:.1f}"
    print(f"| {name} | {'on' if portable else 'off'} | {shown} |", flush=True)
    return not ended.returncode


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    raise SystemExit(main())
