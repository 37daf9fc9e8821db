"""The registry of clauses: what is promised, in words, and when it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kind = Literal["pre", "post", "invariant"]


@dataclass(frozen=True)
class Clause:
    """One promise. Messages show `name`; `aliases` are its ids in the documents that it comes from.

    schedule: when it is checked. likely: the usual cause if it is broken, an inference. between_ranks: it compares
    ranks with each other. of_the_update_before: a violation found before an update is about the last update's state.
    """

    name: str
    kind: Kind
    schedule: str
    aliases: tuple[str, ...]
    statement: str
    likely: str = ""
    between_ranks: bool = False
    of_the_update_before: bool = False


# fmt: off
_ALL = (
    Clause("replicas-agree", "invariant", "every step", ("C-DP-001", "F-DP-001", "C-DDP-001", "DTEC6C-INV-001"),
        "Every rank holds the same trainable weights, to the bit, before and after every update.",
        likely="something changed the weights on one rank only, or each rank started from its own", between_ranks=True),
    Clause("optimizers-agree", "post", "every step", ("C-DP-001", "DTEC6C-INV-002"),
        "Every rank holds the same optimizer state and has taken the same number of updates.",
        likely="the optimizer state of one rank was restored, reset or corrupted alone", between_ranks=True),
    Clause("gradients-agree", "post", "every step", ("C-DP-001", "C-RING-001", "F-HET-001"),
        "The reduced gradient is the same on every rank, to the bit, before anything is applied.",
        likely="the gradients were not reduced, only some of them were, one copy was changed afterwards, or the "
        "ranks clipped differently",
        between_ranks=True),
    Clause("finite", "invariant", "every step, before the update, and every evaluation",
        ("F-DP-003", "FALSIFY-DDP-003"),
        "The loss and the gradient of every micro-batch, the reduced gradient and its norm, and every evaluated output "
        "are finite."),
    Clause("halt-together", "invariant", "every gather", ("F-DP-003", "FALSIFY-DDP-003", "F-DIST-GATE"),
        "All ranks are at the same point of the same step, and either all of them stop there or none does.",
        between_ranks=True),
    Clause("samples-once", "invariant", "every step", ("F-DP-002", "C-DP-002", "C-SHARD-001"),
        "The shards of the global batch are disjoint, complete and in order: every planned row is used exactly once.",
        likely="a sampler that pads, drops or repeats rows"),
    Clause("content-planned", "invariant", "every step", ("F-DP-002",),
        "The model receives the tokens and labels of the planned rows.",
        likely="ranks whose data sets are in a different order, or a collate function that shifts rows"),
    Clause("gradient-average", "post", "every call", ("F-DP-003", "C-DP-003"),
        "avg[j] = (1/N) * sum of g_i[j]; finite if all inputs are finite; NaN and Inf propagate."),
    Clause("clip-once", "post", "every step", ("C-CLIP-001", "FALSIFY-GA-004", "F-BATCH-003"),
        "The gradient is clipped once, after the reduction; its norm is then at most the limit.",
        likely="the norm was computed over other gradients than those that were clipped"),
    Clause("learning-rate-planned", "pre", "every step", ("F-LOOP-005", "FALSIFY-LOOP-005"),
        "The optimizer's learning rate is the schedule's value for this update on every rank.",
        likely="the scheduler is stepped more or less often than the optimizer"),
    Clause("one-update", "post", "every step", ("F-BATCH-005", "V32"),
        "One global batch is one optimizer update: the count of updates rises by exactly one."),
    Clause("updates-planned", "post", "before the first extra update, and at the end, if `updates` is declared",
        (),
        "A run makes exactly the planned number of updates."),
    Clause("base-frozen", "invariant", "at the start, every N steps, at every checkpoint, at the end",
        ("FALSIFY-LORA-001", "F-FREEZE-003", "F-FREEZE-008"),
        "No frozen weight or buffer changes."),
    Clause("layout-equal", "pre", "once", ("F-HET-001", "C-DP-SYNC-001"),
        "Names, shapes, dtypes and order of the trainable tensors are the same on every rank."),
    Clause("start-agrees", "pre", "once", ("C-DP-001",),
        "Before step 1 all ranks agree on configuration, versions, data, base, initial weights and micro-batches."),
    Clause("audit", "invariant", "every K-th step, before the reduction; K is chosen so that it costs 1 % of the work",
        (),
        "Another rank that recomputes the gradients of a step's micro-batches, and their partial sums, gets the same "
        "bits."),
    Clause("loss-equivalent", "invariant", "by the falsifier", ("F-DP-005", "C-DP-005"),
        "The loss equals that of one process within 1 % at step 100 and later (here: to the bit)."),
    Clause("memory-budget", "invariant", "by the falsifier on CPU, at the end of the run on GPU", ("F-HET-002",),
        "The peak of live tensor bytes of a replica stays within the plan's number + 10 %."),
    Clause("cpu-fallback", "post", "once", ("F-DP-004", "C-DP-004"),
        "Without a usable accelerator a run that allows it trains on the CPU, says so, and has the same loss."),
    Clause("checkpoint-whole", "post", "every checkpoint", ("F-CKPT-001", "F-CKPT-009", "C-CKPT-001"),
        "A checkpoint is the whole state, written whole or not at all; each value that is loaded equals the saved one.",
        likely="a part of the state that was not saved or not loaded"),
    Clause("resume-exact", "post", "every resume, every repeated step", ("F-CKPT-005", "F-DP-006"),
        "A resumed run continues from the same bits; repeated steps have the digests that they had before."),
    Clause("hyperparameters-agree", "pre", "every watched step, before the update", (),
        "The learning rate and every other hyperparameter of the optimizer is the same on every rank.",
        likely="a rank-local scheduler decision", between_ranks=True),
    Clause("groups-planned", "pre", "every watched step, if `groups` is declared", (),
        "Each parameter is in a group with the hyperparameters that are declared for its name."),
    Clause("modes-agree", "pre", "every watched step", (),
        "On ranks with the same modules, each module is in the same mode, training or evaluation.", between_ranks=True),
    Clause("order-renewed", "pre", "every watched step", (),
        "A sampler that shuffles gives each pass over the data a different order from the pass before.",
        likely="`set_epoch` is not called, or a generator is seeded anew for each epoch"),
    Clause("training-mode", "pre", "every watched step", (),
        "A model is in training mode in the forward passes that train it.",
        likely="`eval()` without a following `train()`"),
    Clause("clip-placed", "pre", "every watched step whose loop clips through torch", (),
        "Gradients are clipped once for an update, on every rank, when they are whole, reduced and unscaled.",
        likely="the clip call is before `scaler.unscale_`, before the reduction, or inside the accumulation"),
    Clause("copies-agree", "invariant",
        "before updates 2, 32, 512, 8,192 and so on, and before the update after each of them", (),
        "Ranks that keep a copy of the model (an average of weights, a teacher) hold the same copy, up to rounding.",
        likely="the copy is updated on one rank only, or from weights that differ", between_ranks=True,
        of_the_update_before=True),
    Clause("ranks-joined", "invariant", "every watched step, and at the close", (),
        "Processes that a launcher started as ranks of one run train together.",
        likely="no process group was made: an Accelerator on a CPU without `cpu=True`, or DDP forgotten"),
    Clause("buffers-agree", "invariant", "every watched step, at its first forward pass", (),
        "The buffers with which a forward pass starts are the same on every rank, to the bit.",
        likely="statistics that each rank computes from its own rows, and that are not broadcast", between_ranks=True,
        of_the_update_before=True),
    Clause("parameters-kept", "invariant", "every watched step, before the update", (),
        "The trainable parameters are those of the start or those declared. The optimizer holds all of them and no "
        "others, and none is replaced, added, retied, frozen or unfrozen.",
        likely="the model was changed after it was wrapped or after the optimizer was made"),
    Clause("gradient-present", "pre", "every watched step, until a nonzero gradient was seen", (),
        "Every trainable parameter gets a gradient that is not always zero.",
        likely="the parameter is detached from the loss, or not used"),
    Clause("gradient-fresh", "pre", "every watched step", (),
        "No gradient is left over from the step before when the next one begins to accumulate, or is applied again.",
        likely="zero_grad is missing"),
    Clause("update-applied", "post", "steps 1 to 4, powers of two, every 64th", (),
        "An update changes every parameter whose gradient and learning rate call for a change that float32 can hold.",
        likely="the optimizer holds other parameters than the model, or the precision is too low"),
    Clause("precision-sufficient", "pre", "once", (),
        "Trainable weights have a precision in which updates of the usual size are not rounded away.",
        likely="the adapter was cast together with its base"),
    Clause("collectives-agree", "pre", "every watched step whose loop reduces through torch.distributed", (),
        "All ranks reduce the same tensors, by name, shape and dtype, in the same order, each contiguous in memory.",
        likely="the order of the collectives depends on the rank", between_ranks=True),
    Clause("gradient-law", "pre", "every K-th watched step, if `reference` is declared", ("F-DP-003",),
        "The reduced gradient before clipping is that of one process: the sum over all rows, divided once by their "
        "number.", likely="a division is missing or made twice in the loss, the accumulation or the reduction"),
    Clause("gradient-scale", "pre", "every watched step whose losses and reduction were seen", (),
        "The reduced gradient is that of the mean over all loss terms of the window, for a window of any length.",
        likely="the loss is not divided by the number of micro-batches, or its sum over ranks by the world size"),
    Clause("loss-reported", "post", "every watched step, if the loop reports a loss", (),
        "The loss that is reported is the mean over the rows of all ranks."),
    Clause("scaler-agrees", "pre", "every watched step, if `scaler` is declared", (),
        "The loss scale is the same on every rank.", likely="one rank skipped an update that the others made",
        between_ranks=True),
    Clause("randomness-declared", "pre", "every watched step, if the loop reports values", (),
        "Values that must differ between ranks (random states) differ, and values that must agree are equal.",
        likely="one seed on all ranks, or a random draw on one rank only"),
    Clause("evaluation-once", "post", "every evaluation; in a watched loop, each `evaluated` call", ("samples-once",),
        "An evaluation counts every row exactly once, and its metrics are those of the rows. Two evaluations of the "
        "same weights give the same predictions. No batch norm is in training mode."),
    Clause("trees-agree", "invariant", "every call of `assert_same`", (),
        "A tree of tensors and values is the same on every rank, to the bit.", between_ranks=True),
)
# fmt: on

CLAUSES: Mapping[str, Clause] = MappingProxyType({clause.name: clause for clause in _ALL})
"""Every clause by its name."""
