"""What a case is, and how its ranks run.

A case is a small training program with a switch: `job.right` selects the repaired version. It returns a value that the
mechanism decides, such as the factor of the gradient or the rows that were trained. The runner compares that value with
`right` or `wrong`, so a case that lost its defect fails before any tool is asked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the ranks are forked, as all that follows: each would import it, in seconds
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn

import andon
import andon_contracts.watch  # noqa: F401

GLOBAL_BATCH = 12
ROWS = 48
_DEADLINE_S = 120.0
_SCRIPT = ("batch", "loss")
_LINES = {"line": (), "script": _SCRIPT, "further": (*_SCRIPT, "expect", "saved", "loaded")}
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A defect. right, wrong: what `run` returns. found: "finding" if Andon found it itself, "report" if users did.

    accumulates: micro-batches of a rank in an update; 0 if the program cannot accumulate. stops: the updates after
    which the ranks are ended and started again. missed: why no command of Andon sees it.
    """

    name: str
    report: str
    run: Callable[[Job], Any]
    right: Any
    wrong: Any
    found: str = "report"
    world: int = 2
    accumulates: int = 0
    stops: tuple[int, ...] = ()
    missed: str = ""

    @property
    def mechanism(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


def case(name: str, report: str, right: Any, wrong: Any, **more: Any) -> Callable[[Callable[[Job], Any]], Any]:
    """Register a function as a case. Its docstring is the mechanism."""

    def register(run: Callable[[Job], Any]) -> Callable[[Job], Any]:
        CASES[name] = Case(name, report, run, right, wrong, **more)
        return run

    return register


@dataclass(frozen=True)
class Job:
    """One run of a case, as one of its ranks sees it.

    tool: "line" for the one line of a watch, "further" for its further lines too, "script" inside `andon falsify`,
    "ddp", "torch-audit" or "torchtest2" for a tool of others. resumed: how often the ranks were ended before. stop:
    the update after which they end, 0 if none.
    """

    right: bool
    tool: str
    folder: Path
    world: int = 2
    batch: int = 6
    accumulate: int = 1
    resumed: int = 0
    stop: int = 0
    rank: int = 0
    findings: list[dict[str, object]] = field(default_factory=list)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer, **further: Any) -> Lines:
        """Open the tool. further: arguments of the watch that are more than its one line."""
        if self.tool in ("line", "further", "script"):
            further = further if self.tool == "further" else {}
            return Lines(andon.watch(model, optimizer, log=self.findings.append, **further), _LINES[self.tool])
        if self.tool in ("torch-audit", "torchtest2"):
            from bugs.others import open_audit, open_test

            (open_audit if self.tool == "torch-audit" else open_test)(model, optimizer, self.findings.append)
        return Lines(None, ())

    def windows(self, epochs: int = 1) -> Iterator[list[list[int]]]:
        """For each update the micro-batches of this rank: the same global batches on every layout."""
        parts = self.world * self.accumulate
        for epoch in range(epochs):
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
            for start in range(0, ROWS, self.batch * parts):
                window = order[start : start + self.batch * parts]
                yield [window[self.rank + self.world * micro :: parts] for micro in range(self.accumulate)]

    def log(self, kind: str, *values: Any) -> None:
        """Append to a file that outlives the process."""
        with (self.folder / f"{kind}-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.resumed, *values]) + "\n")

    def logged(self, kind: str) -> list[list[Any]]:
        """What all ranks logged, in all runs so far. Collective."""
        dist.barrier()
        files = [self.folder / f"{kind}-{rank}.jsonl" for rank in range(self.world)]
        return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]

    def same(self, tensor: torch.Tensor) -> bool:
        """True if all ranks hold the same bits. Collective."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(gathered, tensor.detach().contiguous())
        return all(torch.equal(gathered[0], other) for other in gathered)


@dataclass(frozen=True)
class Lines:
    """The watch of a job. Calls other than `close` and those in `further` do nothing."""

    watch: andon.Watch | None
    further: tuple[str, ...]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self.watch is not None and name in ("close", *self.further):
            return getattr(self.watch, name)  # type: ignore[no-any-return]
        return lambda *values, **named: None


@dataclass(frozen=True)
class Outcome:
    """A finished run. value: what rank 0 returned. findings: of all ranks. error: the last line of a rank's error."""

    value: Any = None
    findings: tuple[Mapping[str, object], ...] = ()
    error: str = ""

    @property
    def clauses(self) -> list[str]:
        return sorted({str(each["andon/clause"]) for each in self.findings})


def run_case(case: Case, job: Job) -> Outcome:
    """Run a case to its end, once for each part between its stops. The last part counts; findings are of all."""
    parts, findings = (*case.stops, 0) if job.tool != "script" else (job.stop,), list[Mapping[str, object]]()
    outcome = Outcome()
    for number, stop in enumerate(parts, start=job.resumed):
        outcome = run_ranks(case, replace(job, resumed=number, stop=stop))
        findings += outcome.findings
        if outcome.error:
            break
    return replace(outcome, findings=tuple(findings))


def run_ranks(case: Case, job: Job) -> Outcome:
    """Fork the ranks, so that torch is imported once. Every rank has ended on return."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for path in [job.folder / "store", *job.folder.glob("result-*.json")]:
        path.unlink(missing_ok=True)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(case, replace(job, rank=rank))) for rank in range(job.world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + _DEADLINE_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + 5)
        next((process for process in ranks if process.is_alive()), ranks[0]).join(0.05)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    results = [json.loads(path.read_text()) for path in sorted(job.folder.glob("result-*.json"))]
    if len(results) < job.world:
        return Outcome(error="a rank did not end", findings=tuple(f for each in results for f in each["findings"]))
    error = next((each["error"] for each in results if each["error"]), "")
    return Outcome(results[0]["value"], tuple(found for each in results for found in each["findings"]), error)


def _rank(case: Case, job: Job) -> None:
    torch.set_num_threads(1)
    if job.tool == "ddp":
        # With DETAIL, torch 2.13 ends with SIGSEGV in any DDP on CPUs.
        dist.set_debug_level(dist.DebugLevel.INFO)  # type: ignore[attr-defined]
    elif job.tool in ("line", "further"):
        os.environ["ANDON_LEDGER"] = f"{job.folder}/ledger.jsonl"
    value, error = None, ""
    try:
        dist.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=job.rank, world_size=job.world)
        torch.manual_seed(0)
        value = case.run(job)
        dist.destroy_process_group()
    except Exception as raised:  # noqa: BLE001 - the runner reports it
        error = f"{type(raised).__name__}: {raised}"
        (job.folder / f"error-{job.rank}.txt").write_text(traceback.format_exc())
    result = {"value": value, "findings": job.findings, "error": error}
    (job.folder / f"result-{job.rank}.json").write_text(json.dumps(result, default=str))
    os._exit(1 if error else 0)


def as_expected(value: Any, expected: Any) -> bool:
    """True if the two are equal, numbers within fp32 rounding."""
    if isinstance(expected, Mapping):
        return isinstance(value, Mapping) and all(as_expected(value.get(key), expected[key]) for key in expected)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(value) == len(expected) and all(map(as_expected, value, expected))
    if isinstance(expected, float):
        return isinstance(value, float | int) and abs(value - expected) <= 1e-4 * max(1.0, abs(expected))
    return bool(value == expected)
