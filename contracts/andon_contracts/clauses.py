"""The registry of clauses: what is promised, in words, with where the promise comes from and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kind = Literal["pre", "post", "invariant"]


@dataclass(frozen=True)
class Clause:
    """One promise. `name` is what messages say; `aliases` are the ids of the documents that it comes from.

    likely: what usually is the cause where it is broken, an inference. between_ranks: it holds ranks to each other, so
    that some differ from others. of_the_update_before: what it finds before an update is what the last one left.
    """

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    statement: str
    source: str
    cost: str
    schedule: str
    likely: str = ""
    between_ranks: bool = False
    of_the_update_before: bool = False


_ALL = (
    Clause(
        "replicas-agree",
        ("C-DP-001", "F-DP-001", "C-DDP-001", "DTEC6C-INV-001"),
        "invariant",
        "Every rank holds the same trainable weights, to the bit, before and after every update.",
        "seed R3, N1, V3, V4, V18, V19",
        "one digest of the weights on each side of the update, one gather each",
        "every step",
        likely="something changed the weights on one rank only, or each rank started from its own",
        between_ranks=True,
    ),
    Clause(
        "optimizers-agree",
        ("C-DP-001", "DTEC6C-INV-002"),
        "post",
        "Every rank holds the same optimizer state and has taken the same number of updates.",
        "seed V5; faults F13",
        "one digest of the moments, in the gather of replicas-agree",
        "every step",
        likely="the optimizer state of one rank was restored, reset or corrupted alone",
        between_ranks=True,
    ),
    Clause(
        "gradients-agree",
        ("C-DP-001", "C-RING-001", "F-HET-001"),
        "post",
        "The reduced gradient is the same on every rank, to the bit, before anything is applied.",
        "seed V1, N2; faults F91",
        "one digest of the gradient, one gather",
        "every step",
        likely="the gradients were not reduced, only some of them were, or one copy was changed afterwards",
        between_ranks=True,
    ),
    Clause(
        "finite",
        ("F-DP-003", "FALSIFY-DDP-003"),
        "invariant",
        "The loss and the gradient of every micro-batch, the reduced gradient and its norm, and what is evaluated are "
        "finite.",
        "seed N8, V9, V10, V29; faults F40, F41",
        "one pass over each gradient",
        "every step, before the update, and every evaluation",
    ),
    Clause(
        "halt-together",
        ("F-DP-003", "FALSIFY-DDP-003", "F-DIST-GATE"),
        "invariant",
        "All ranks are at the same step and at the same point of it, and all of them stop at it, or none.",
        "seed V43; reliability 22, 23",
        "step and sequence number in every gather",
        "every gather",
        between_ranks=True,
    ),
    Clause(
        "samples-once",
        ("F-DP-002", "C-DP-002", "C-SHARD-001"),
        "invariant",
        "The shards of the global batch are disjoint, complete and in order: every planned row is used exactly once.",
        "seed R26, N7, V14, V27",
        "the micro-batches that each rank used, in the first gather",
        "every step",
        likely="a sampler that pads, drops or repeats rows",
    ),
    Clause(
        "content-planned",
        ("F-DP-002",),
        "invariant",
        "The tokens and labels that the model was given are those of the planned rows.",
        "faults F49, F52, F53",
        "one digest of each row, in the first gather",
        "every step",
        likely="ranks whose data sets are in a different order, or a collate function that shifts rows",
    ),
    Clause(
        "gradient-average",
        ("F-DP-003", "C-DP-003"),
        "post",
        "avg[j] = (1/N) * sum of g_i[j]; finite where all inputs are finite; NaN and Inf propagate.",
        "seed R27, V8, V11, V12",
        "one pass over the result",
        "every call",
    ),
    Clause(
        "clip-once",
        ("C-CLIP-001", "FALSIFY-GA-004", "F-BATCH-003"),
        "post",
        "The gradient is clipped once, after the reduction; the norm after it is at most the limit.",
        "seed V6, V7; faults F37, F38",
        "one norm of the clipped gradient",
        "every step",
        likely="a norm taken of other gradients than those that are applied",
    ),
    Clause(
        "learning-rate-planned",
        ("F-LOOP-005", "FALSIFY-LOOP-005"),
        "pre",
        "The optimizer's learning rate is the schedule's value for this update on every rank.",
        "seed S29; faults F14, F61, F77",
        "one comparison",
        "every step",
        likely="a scheduler that is stepped at another place than the optimizer",
    ),
    Clause(
        "one-update",
        ("F-BATCH-005", "V32"),
        "post",
        "One global batch is one optimizer update: the count of updates rises by exactly one.",
        "seed R19, V38; faults F29, F31",
        "one comparison",
        "every step",
    ),
    Clause(
        "updates-planned",
        (),
        "post",
        "A run makes as many updates as were planned, no fewer and no more.",
        "faults F82",
        "one comparison",
        "before the first update too many, and at the end, where `updates` is declared",
    ),
    Clause(
        "base-frozen",
        ("FALSIFY-LORA-001", "F-FREEZE-003", "F-FREEZE-008"),
        "invariant",
        "No frozen weight or buffer changes.",
        "seed V35; faults F68",
        "one digest of the base",
        "at the start, every N steps, at every checkpoint, at the end",
    ),
    Clause(
        "layout-equal",
        ("F-HET-001", "C-DP-SYNC-001"),
        "pre",
        "Names, shapes, dtypes and order of the trainable tensors are the same on every rank.",
        "seed N11, V12, V21, V24; faults F25",
        "one digest at the start",
        "once",
    ),
    Clause(
        "start-agrees",
        ("C-DP-001",),
        "pre",
        "Before step 1 all ranks agree on configuration, versions, data, base, initial weights and micro-batches.",
        "seed V19; faults F01, F49, F52; reliability 24 to 27",
        "digests at the start, one gather",
        "once",
    ),
    Clause(
        "audit",
        (),
        "invariant",
        "What one rank computed for a step, gradients of micro-batches and partial sums, has the same bits when "
        "another rank computes it again.",
        "issue 3 item 7",
        "the chosen micro-batches once more, one gather of the sums beside them",
        "every K-th step, before the reduction; K is chosen to cost a hundredth of the work",
    ),
    Clause(
        "loss-equivalent",
        ("F-DP-005", "C-DP-005"),
        "invariant",
        "The loss equals that of one process within 1 % at step 100 and later (here: to the bit).",
        "seed R3, N6, V2, V22",
        "outside the run",
        "by the falsifier",
    ),
    Clause(
        "memory-budget",
        ("F-HET-002",),
        "invariant",
        "The peak of live tensor bytes of a replica stays within the plan's number + 10 %.",
        "seed N12, V23",
        "counted allocations",
        "by the falsifier on CPU, at the end of the run on GPU",
    ),
    Clause(
        "cpu-fallback",
        ("F-DP-004", "C-DP-004"),
        "post",
        "Without a usable accelerator a run that allows it trains on the CPU, says so, and has the same loss.",
        "seed N10, V25",
        "one decision",
        "once",
    ),
    Clause(
        "checkpoint-whole",
        ("F-CKPT-001", "F-CKPT-009", "C-CKPT-001"),
        "post",
        "A checkpoint is the whole state, written whole or not at all; what is read back is what was saved, by name.",
        "seed V36; faults F73 to F76",
        "digests at save and after reading back",
        "every checkpoint",
        likely="a part of the state that was not saved or not loaded",
    ),
    Clause(
        "resume-exact",
        ("F-CKPT-005", "F-DP-006"),
        "post",
        "A resumed run goes on from the same bits; steps that are done again carry the digests that they had.",
        "seed V36; faults F73 to F80",
        "one comparison",
        "every resume, every repeated step",
    ),
    Clause(
        "hyperparameters-agree",
        (),
        "pre",
        "The learning rate and every other hyperparameter of the optimizer is the same on every rank.",
        "faults F14; reliability 24",
        "one digest of the groups, in the first gather of a watched step",
        "every watched step, before the update",
        likely="a rank-local scheduler decision",
        between_ranks=True,
    ),
    Clause(
        "groups-planned",
        (),
        "pre",
        "Each parameter is in a group with the hyperparameters that were declared for its name.",
        "faults F65",
        "one comparison for each declared value",
        "every watched step, where `groups` is declared",
    ),
    Clause(
        "modes-agree",
        (),
        "pre",
        "Ranks with the same modules have each of them in the same mode, training or evaluation.",
        "issue 3 item 1",
        "one pass over the modules",
        "every watched step",
        between_ranks=True,
    ),
    Clause(
        "order-renewed",
        (),
        "pre",
        "Each pass over the data by a sampler that shuffles has another order than the one before.",
        "issue 17 item 2",
        "the first rows of two passes of a data loader of torch",
        "every watched step",
        likely="`set_epoch` is not called, or a generator is seeded anew for each epoch",
    ),
    Clause(
        "training-mode",
        (),
        "pre",
        "A model that is trained is in training mode in its forward passes.",
        "faults F58",
        "one flag a forward pass",
        "every watched step",
        likely="`eval()` that no `train()` followed",
    ),
    Clause(
        "clip-placed",
        (),
        "pre",
        "Gradients are clipped once for an update, on every rank, when they are whole, reduced and unscaled.",
        "faults F38",
        "a note of each clip call",
        "every watched step whose loop clips through torch",
        likely="the clip call stands before `scaler.unscale_`, before the reduction, or inside the accumulation",
    ),
    Clause(
        "copies-agree",
        (),
        "invariant",
        "What is kept beside the model in its form and updated (an average of weights, a teacher) is the same on every "
        "rank that keeps it, up to rounding.",
        "issue 17 item 2",
        "one look for it among the objects of the process, one digest",
        "updates 1, 2, 4, 8 and so on",
        likely="it is updated on one rank only, or of weights that were not the same",
        between_ranks=True,
        of_the_update_before=True,
    ),
    Clause(
        "ranks-joined",
        (),
        "invariant",
        "Processes that a launcher started as ranks of one run train together.",
        "issue 17 item 2",
        "one look at the environment",
        "every watched step, and at the close",
        likely="no process group was made: an Accelerator on a CPU without `cpu=True`, or DDP forgotten",
    ),
    Clause(
        "buffers-agree",
        (),
        "invariant",
        "The buffers with which a forward pass starts are the same on every rank, to the bit.",
        "faults F11",
        "one digest of the buffers",
        "every watched step, at its first forward pass",
        likely="statistics that each rank takes from its own rows, and that nothing broadcasts",
        between_ranks=True,
        of_the_update_before=True,
    ),
    Clause(
        "parameters-kept",
        (),
        "invariant",
        "The trainable parameters are those of the start or those declared, all of them and no others are in the "
        "optimizer, and none was replaced, added, tied anew, frozen or unfrozen.",
        "faults F05, F08, F62, F64, F68, F70, F71",
        "one pass over the parameters' names",
        "every watched step, before the update",
        likely="the model was changed after it was wrapped or after the optimizer was made",
    ),
    Clause(
        "gradient-present",
        (),
        "pre",
        "Every trainable parameter gets a gradient that is not always zero.",
        "faults F64, F67",
        "the norms of the raw gradients",
        "every watched step, until it is seen",
        likely="the parameter is detached from the loss, or not used",
    ),
    Clause(
        "gradient-fresh",
        (),
        "pre",
        "No gradient is left over from the step before when the next one begins to accumulate.",
        "faults F31",
        "the norm of what is left over, where anything is",
        "every watched step",
        likely="zero_grad is missing",
    ),
    Clause(
        "update-applied",
        (),
        "post",
        "An update changes every parameter whose gradient and learning rate call for a change that float32 can hold.",
        "faults F44, F62",
        "one copy of the weights",
        "steps 1 to 4, powers of two, every 64th",
        likely="the optimizer holds other parameters than the model, or the precision is too low",
    ),
    Clause(
        "precision-sufficient",
        (),
        "pre",
        "Trainable weights have a precision in which updates of the usual size are not rounded away.",
        "faults F44",
        "one comparison",
        "once",
        likely="the adapter was cast together with its base",
    ),
    Clause(
        "collectives-agree",
        (),
        "pre",
        "All ranks reduce the same tensors, by name, shape and dtype, in the same order, each contiguous in memory.",
        "faults F23, F25; reliability 20, 22",
        "one digest of the calls",
        "every watched step whose loop reduces through torch.distributed",
        likely="the order of the collectives depends on the rank",
        between_ranks=True,
    ),
    Clause(
        "gradient-law",
        ("F-DP-003",),
        "pre",
        "The reduced gradient before clipping is that of one process: the sum over all rows, divided once by their "
        "number.",
        "faults F16 to F35",
        "one more forward and backward pass of the whole batch",
        "every K-th watched step, where `reference` is declared",
        likely="a factor too much or too few between loss, accumulation and reduction",
    ),
    Clause(
        "gradient-scale",
        (),
        "pre",
        "The terms of the loss weigh together in the reduced gradient what those of one mean do, in a window of any "
        "length.",
        "issue 17 item 2; faults F16, F19, F20, F29, F35",
        "the graph of each loss down to its means, two dot products of 1,024 elements",
        "every watched step of which the loss and the reduction tell it",
        likely="the loss is not divided by the number of micro-batches, or is divided by the world size twice or never",
    ),
    Clause(
        "loss-reported",
        (),
        "post",
        "The loss that is reported is the mean over the rows of all ranks.",
        "faults F88",
        "two numbers in the first gather",
        "every watched step, where losses are told",
    ),
    Clause(
        "scaler-agrees",
        (),
        "pre",
        "The loss scale is the same on every rank.",
        "faults F43",
        "one comparison",
        "every watched step, where `scaler` is declared",
        likely="one rank skipped an update that the others made",
        between_ranks=True,
    ),
    Clause(
        "randomness-declared",
        (),
        "pre",
        "Random streams that must differ between ranks differ, and those that must agree agree.",
        "faults F55, F56, F59",
        "one digest of each declared stream",
        "every watched step, where streams are declared",
        likely="one seed on all ranks, or a draw on one rank only",
    ),
    Clause(
        "evaluation-once",
        ("samples-once",),
        "post",
        "An evaluation counts every row exactly once, its metrics follow from the rows' counts, two evaluations of the "
        "same weights give the same predictions, and no batch norm is in training mode.",
        "faults F58, F83, F85, F86",
        "one gather of the rows",
        "every evaluation, in a watched loop where it is told",
    ),
    Clause(
        "trees-agree",
        (),
        "invariant",
        "A tree of tensors and values is the same on every rank, to the bit.",
        "issue 3",
        "one digest of the tree, one gather",
        "every call of `assert_same`",
        between_ranks=True,
    ),
)

CLAUSES: Mapping[str, Clause] = MappingProxyType({clause.name: clause for clause in _ALL})
"""Every clause by its name."""


def clauses_table() -> str:
    """The registry as a Markdown table, for the README and the docs."""
    rows = ["| clause | kind | statement | also known as | checked |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| `{c.name}` | {c.kind} | {c.statement} | {', '.join(c.aliases)} | {c.schedule} |" for c in CLAUSES.values()
    ]
    return "\n".join(rows)
