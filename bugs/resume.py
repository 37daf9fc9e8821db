"""Runs that are ended and started again from a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from bugs.bench import ROWS, Job, Lines, case
from bugs.rows import data, ids

State = dict[str, Any]
STOP = 6
"""Four updates are an epoch: the stop is in the middle of the second."""


def length(job: Job) -> int:
    """The number of epochs. `andon falsify` needs time to kill a run in its middle."""
    return 12 if job.tool == "script" else 6


class Loop:
    """A DDP loop with a checkpoint of rank 0 after every update, and one of the random stream of each rank."""

    def __init__(self, job: Job, net: nn.Module | None = None, rows: Dataset[Any] | None = None) -> None:
        self.job, self.rows = job, rows or data()
        self.net = net or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.sampler: DistributedSampler[Any] = DistributedSampler(self.rows, job.world, job.rank)
        self.loader = DataLoader(self.rows, job.batch, sampler=self.sampler)
        self.path = job.folder / "checkpoint.pt"
        self.done, self.cast = 0, torch.float32

    def start(self, momentum: float = 0.0) -> None:
        """Wrap the model and open the watch."""
        self.model = DistributedDataParallel(self.net)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.opt = torch.optim.SGD(trained, lr=0.1, momentum=momentum)

    def watch(self, *, restored: bool = False) -> None:
        """Open the watch, and compare what was loaded. restored: the case restores the random stream itself."""
        self.w: Lines = self.job.watch(self.model, self.opt, start=self.done)
        if self.job.resumed and not restored:
            torch.set_rng_state(self.random())
            self.w.loaded(self.path)

    def save(self, **more: Any) -> None:
        net = self.net.state_dict()
        state = {"net": {name: value.to(self.cast) for name, value in net.items()}, "exact": net, **more}
        state.update(opt=self.opt.state_dict(), done=self.done)
        own = {"rng": torch.get_rng_state()}
        write(own, self.job.folder / f"random-{self.job.rank}-{self.done % 2}.pt")
        dist.barrier()
        if self.job.rank == 0:
            write(state, self.path)
        dist.barrier()
        self.w.saved(self.path)

    def load(self) -> State:
        state: State = torch.load(self.path)
        self.net.load_state_dict(state["net"])
        self.done = state["done"]
        return state

    def random(self) -> torch.Tensor:
        """This rank's random stream in the checkpoint."""
        found: torch.Tensor = torch.load(self.job.folder / f"random-{self.job.rank}-{self.done % 2}.pt")["rng"]
        return found

    def step(self, inputs: torch.Tensor, labels: torch.Tensor, **more: Any) -> float:
        """One update and a checkpoint. Returns the loss."""
        self.w.batch(ids(inputs))
        loss = cross_entropy(self.model(inputs), labels)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.done += 1
        self.job.log("rows", self.done, ids(inputs))
        self.save(**more)
        return float(loss.detach())

    @property
    def stopped(self) -> bool:
        return self.done == self.job.stop


def write(state: State, path: Path) -> None:
    """Write a checkpoint whole or not at all."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def trained(job: Job, first: int, last: int) -> int:
    """How many different rows the updates `first` to `last` trained."""
    return len({row for _, done, own in job.logged("rows") if first <= done <= last for row in own})


@case("skipped-elsewhere", "huggingface/accelerate#2016", ROWS, 37, found="finding", stops=(STOP,))
def skipped_elsewhere(job: Job) -> object:
    """The epoch is not restored, so that a resumed run skips the first batches of another permutation: some rows of the
    epoch are trained twice, others never."""
    loop = Loop(job)
    if job.resumed:
        loop.load()
    loop.start()
    loop.watch()
    steps = ROWS // (job.batch * job.world)
    first, skip = divmod(loop.done, steps)
    for epoch in range(first, length(job)):
        loop.sampler.set_epoch(epoch if job.right or epoch > first or not job.resumed else 0)
        for inputs, labels in itertools.islice(loop.loader, skip if epoch == first else 0, None):
            loop.step(inputs, labels)
            if loop.stopped:
                return None
    loop.w.close()
    return trained(job, steps + 1, 2 * steps)


@case("draws-again", "karpathy/nanoGPT#467", False, True, found="finding", stops=(STOP,))
def draws_again(job: Job) -> object:
    """Batches are drawn from the global generator, which a resumed run seeds as at the start: it trains on the batches
    of the beginning again."""
    loop = Loop(job)
    torch.manual_seed(1337 + job.rank)
    if job.resumed:
        loop.load()
    loop.start()
    if job.resumed and job.right:
        torch.set_rng_state(loop.random())
    loop.watch(restored=True)
    if job.resumed:
        loop.w.loaded(loop.path)
    rows = data()
    while loop.done < 4 * length(job):
        inputs, labels = rows[torch.randperm(ROWS // job.world)[: job.batch] * job.world + job.rank]
        loop.step(inputs, labels)
        if loop.stopped:
            return None
    loop.w.close()
    seen = {done: own for _, done, own in job.logged("rows")}
    return seen[1] == seen[STOP + 1]


@case("epoch-again", "pytorch/examples multigpu_torchrun.py, snapshot", 24, 28, found="finding", stops=(8,))
def epoch_again(job: Job) -> object:
    """The snapshot holds the number of the last finished epoch, and the resumed run starts with that epoch: it is
    trained twice."""
    loop, first = Loop(job), 0
    if job.resumed:
        first = loop.load()["epoch"]
    loop.start()
    loop.watch()
    steps = ROWS // (job.batch * job.world)
    for epoch in range(first, length(job)):
        loop.sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(loop.loader, start=1):
            loop.w.batch(ids(inputs))
            cross_entropy(loop.model(inputs), labels).backward()
            loop.opt.step()
            loop.opt.zero_grad()
            loop.done += 1
            if number == steps:
                loop.save(epoch=epoch + 1 if job.right else epoch)
        if loop.stopped:
            return None
    loop.w.close()
    return loop.done


@case("half-precision", "jingyaogong/minimind trainer_utils.py", 0, 67, found="finding", stops=(STOP,))
def half_precision(job: Job) -> object:
    """The checkpoint for the resume stores the fp32 weights as fp16, so that the resumed run has rounded ones."""
    loop, changed = Loop(job), 0
    if job.resumed:
        loop.load()
    loop.start()
    loop.watch()

    if job.resumed:
        exact = torch.load(loop.path)["exact"]
        changed = sum(int((value != exact[name]).sum()) for name, value in loop.net.state_dict().items())
    loop.cast = torch.float32 if job.right else torch.float16
    return _go_on(loop) and changed


def _go_on(loop: Loop, batches: Callable[[int], Iterator[Sequence[torch.Tensor]]] | None = None) -> bool:
    """Train the rest of the epochs in their right order. Returns False after the stop."""
    steps = ROWS // (loop.job.batch * loop.job.world)
    first, skip = divmod(loop.done, steps)
    for epoch in range(first, length(loop.job)):
        loop.sampler.set_epoch(epoch)
        own = batches(epoch) if batches else itertools.islice(loop.loader, skip if epoch == first else 0, None)
        for inputs, labels in own:
            loop.step(inputs, labels)
            if loop.stopped:
                return False
    loop.w.close()
    return True


def _first_batch(loop: Loop, part: int, epoch: int, size: int) -> int:
    """The place in the epoch, from 1, of the first batch that rank 0 trained after a resume."""
    order: DistributedSampler[Any] = DistributedSampler(loop.rows, loop.job.world, 0)
    order.set_epoch(epoch)
    first = next((own[0] for number, _, own in loop.job.logged("rows") if number == part), None)
    return [*order].index(first) // size + 1 if first is not None else 0


@case("second-resume", "KempnerInstitute/KempnerForge#57", 11, 5, stops=(6, 10))
def second_resume(job: Job) -> object:
    """The counter of batches is set to 0 when the loader is iterated. So a checkpoint after a resume counts the batches
    since that resume only, and the second resume in the same epoch skips too few."""
    loop = Loop(job)
    loop.loader = DataLoader(loop.rows, max(job.batch // 3, 1), sampler=loop.sampler)  # 12 batches in an epoch
    state = loop.load() if job.resumed else {"batches": 0, "epoch": 0}
    skip = state["batches"]
    loop.start()
    loop.watch()
    for epoch in range(state["epoch"], 2):
        loop.sampler.set_epoch(epoch)
        counted = skip if job.right else 0
        for number, (inputs, labels) in enumerate(itertools.islice(loop.loader, skip, None), start=counted + 1):
            loop.step(inputs, labels, batches=number, epoch=epoch)
            if loop.stopped:
                return None
        skip = 0
    loop.w.close()
    return _first_batch(loop, job.resumed, 0, job.batch // 3)


@case("walked-before-load", "Lightning-AI/pytorch-lightning#20550", 3, 1, stops=(6,))
def walked_before_load(job: Job) -> object:
    """Asking for the number of planned updates walks a stateful loader before its state is restored. The state comes
    too late for the iterator that exists by then: the epoch starts from its first batch again."""
    loop, position = Loop(job), [0]

    def iterate(epoch: int) -> Iterator[Sequence[torch.Tensor]]:
        yield from itertools.islice(loop.loader, position[0], None)
        position[0] = 0

    steps = ROWS // (job.batch * job.world)
    state = loop.load() if job.resumed else {"position": 0}
    loop.start()
    loop.watch()
    if job.right:
        position[0] = state["position"]
    for epoch in range(loop.done // steps, length(job)):
        loop.sampler.set_epoch(epoch)
        for inputs, labels in iterate(epoch):
            loop.step(inputs, labels, position=(loop.done + 1) % steps)
            if loop.stopped:
                return None
    loop.w.close()
    return _first_batch(loop, 1, STOP // steps, job.batch)


class Noisy(Dataset[Any]):
    """Draws a number for each row that is read."""

    def __init__(self) -> None:
        self.rows = data()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        inputs, labels = self.rows[row]
        return inputs + 1e-4 * torch.rand(4), labels


@case("drawn-before-restore", "huggingface/transformers#46628", True, False, stops=(STOP,))
def drawn_before_restore(job: Job) -> object:
    """A resumed run reads its first batch, whose rows are augmented at random, before it restores the random stream."""
    loop = Loop(job, rows=Noisy())
    if job.resumed:
        loop.load()
    loop.start()
    loop.watch(restored=True)
    steps, drawn = ROWS // (job.batch * job.world), True
    first, skip = divmod(loop.done, steps)
    for epoch in range(first, length(job)):
        loop.sampler.set_epoch(epoch)
        order = [*loop.sampler][skip * job.batch if epoch == first else 0 :]
        # A generator of its own, since an iterator draws a seed.
        own = iter(DataLoader(loop.rows, job.batch, sampler=order, generator=torch.Generator()))
        batch = next(own) if job.resumed and epoch == first and not job.right else None
        if job.resumed and epoch == first:
            torch.set_rng_state(loop.random())
            loop.w.loaded(loop.path)
            batch = batch or next(own)
            after = torch.get_rng_state()
            torch.set_rng_state(loop.random())
            rows = [*loop.sampler][skip * job.batch :][: job.batch]
            drawn = torch.equal(batch[0], torch.stack([loop.rows[row][0] for row in rows]))
            torch.set_rng_state(after)
        for inputs, labels in itertools.chain([batch] if batch else [], own):
            loop.step(inputs, labels)
            if loop.stopped:
                return None
    loop.w.close()
    return drawn


@case("seeded-after-restore", "modelscope/ms-swift#9935", True, False, stops=(STOP,))
def seeded_after_restore(job: Job) -> object:
    """The random stream is restored, and then a second iterator over the data is made, which seeds it again: dropout
    repeats the masks of the start."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    loop, restored = Loop(job, net), True
    torch.manual_seed(job.rank)
    if job.resumed:
        loop.load()
    loop.start()
    if job.resumed:
        torch.set_rng_state(loop.random())
        if not job.right:
            torch.manual_seed(job.rank)
        restored = torch.equal(torch.get_rng_state(), loop.random())
    loop.watch(restored=True)
    if job.resumed:
        loop.w.loaded(loop.path)

    def batches(epoch: int) -> Iterator[Sequence[torch.Tensor]]:
        rows = [*loop.sampler]
        skip = loop.done % (ROWS // (job.batch * job.world)) * job.batch
        for start in range(skip, len(rows), job.batch):
            yield data()[rows[start : start + job.batch]]

    return _go_on(loop, batches) and restored


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, which adds nothing at its start."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The base and the adapter."""
        return self.base(inputs) + self.up(self.down(inputs))  # type: ignore[no-any-return]


def _adapter_norm(loop: Loop) -> float:
    saved = torch.load(loop.path)["net"]["up.weight"].norm()
    return float(loop.net.get_parameter("up.weight").detach().norm() / saved)


@case("wrapped-again", "huggingface/lerobot#3459", 1.0, 0.0, stops=(STOP,))
def wrapped_again(job: Job) -> object:
    """The adapter is loaded, and then the model is wrapped with a fresh one: the training starts over, silently."""
    net, kept = Adapted(nn.Linear(4, 3)), 1.0
    loop = Loop(job, net)
    if job.resumed:
        loop.load()
        if not job.right:
            loop.net = Adapted(net.base)
        kept = _adapter_norm(loop)
    loop.start()
    loop.watch()
    return _go_on(loop) and kept


@case("adapter-not-loaded", "huggingface/diffusers#12689", 1.0, 0.0, stops=(STOP,))
def adapter_not_loaded(job: Job) -> object:
    """The hook that loads a checkpoint restores the optimizer and the base, and leaves out the adapter."""
    loop, kept = Loop(job, Adapted(nn.Linear(4, 3))), 1.0
    state = torch.load(loop.path) if job.resumed else {}
    if job.resumed:
        mine = {name: value for name, value in state["net"].items() if job.right or name.startswith("base")}
        loop.net.load_state_dict(mine, strict=False)
        loop.done, kept = state["done"], _adapter_norm(loop)
    loop.start(momentum=0.9)
    if job.resumed:
        loop.opt.load_state_dict(state["opt"])
    loop.watch()
    return _go_on(loop) and kept
