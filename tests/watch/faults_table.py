"""Every fault that is planted, with the clause that must name it and the step by which it must."""

from __future__ import annotations

from tests.watch import planted as p
from tests.watch import planted_random as r
from tests.watch import planted_reports as e
from tests.watch import planted_state as s
from tests.watch import planted_values as v
from tests.watch import planted_wrapped as w
from tests.watch.planted import Planted

CATALOGUE = frozenset(
    f"F{number:02}"
    for number in (
        *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14),
        *(16, 17, 19, 20, 22, 23, 25, 26),
        *(28, 29, 31, 32, 34, 35),
        *(37, 38, 40, 41, 43, 44),
        *(46, 47, 49, 50, 52, 53),
        *(55, 56, 58, 59),
        *(61, 62, 64, 65),
        *(67, 68, 70, 71),
        *(73, 74, 76, 77, 79, 80, 82, 83),
        *(85, 86, 88),
        *(89, 91, 92),
    )
)
"""The faults that real training runs had, by the code of the catalogue; a line for each of its classes A to K."""

TABLE: tuple[Planted, ...] = (
    Planted("F01", "initial weights differ", "replicas-agree", 0, p.RankSeed),
    Planted("F02", "wrapper bypassed, nothing reduced", "gradients-agree", 1, p.NoReduce),
    Planted("F02", "DDP bypassed", "gradients-agree", 1, w.Bypassed, clean=w.Wrapped),
    Planted("F04", "adapter outside the wrapper", "gradients-agree", 1, p.AdaptersLocal),
    Planted("F05", "layer added after wrapping", "gradients-agree", 1, p.AddedLate, clean=p.WithLate),
    Planted("F05", "layer injected while watched", "parameters-kept", 3, p.AddedAfterWatch),
    Planted("F07", "cast after wrapping in DDP", "gradients-agree", 1, w.CastLate, clean=w.Double),
    Planted("F08", "parameter replaced after wrapping in DDP", "gradients-agree", 1, w.HeadMadeAnewLate,
            clean=w.HeadMadeAnew),
    Planted("F08", "parameter replaced while watched", "parameters-kept", 3, p.Replaced),
    Planted("F10", "only the last micro-batch reduced", "gradients-agree", 1, p.LastMicroOnly),
    Planted("F11", "buffers not synchronised", "buffers-agree", 1, p.BuffersLocal),
    Planted("F13", "moment of one rank corrupt", "optimizers-agree", 4, p.MomentCorrupt),
    Planted("F14", "rank-local learning rate", "hyperparameters-agree", 5, p.LocalRate),
    Planted("F16", "sum instead of mean", "gradient-law", 1, p.SumNotMean, ("batch", "reference")),
    Planted("F17", "mean of ranks' means", "gradient-law", 5, p.MeanOfMeans, ("batch", "reference")),
    Planted("F19", "averaged twice", "gradient-law", 1, p.DoubleAverage, ("batch", "reference")),
    Planted("F20", "loss times world size", "gradient-law", 1, p.LossTimesWorld, ("batch", "reference")),
    Planted("F22", "class weights normalised locally", "gradient-law", 1, p.ClassWeightsLocal, ("batch", "reference"),
            p.ClassWeights),
    Planted("F23", "reduction of a temporary", "gradients-agree", 1, p.ReducedTemporary),
    Planted("F25", "collectives in another order", "collectives-agree", 1, p.OtherOrder),
    Planted("F26", "stale gradient on one rank", "gradient-law", 2, p.StaleGradient, ("batch", "reference")),
    Planted("F28", "mean of micro-batches' means", "gradient-law", 5, p.MeanOfMicroMeans, ("batch", "reference")),
    Planted("F29", "accumulation divided twice", "gradient-law", 1, p.DividedTwice, ("batch", "reference")),
    Planted("F31", "zero_grad missing", "gradient-fresh", 2, p.NoZero),
    Planted("F32", "zero_grad for each micro-batch", "samples-once", 1, p.ZeroPerMicro, ("batch", "plan")),
    Planted("F34", "partial window dropped", "samples-once", 5, p.WindowDropped, ("batch", "plan")),
    Planted("F35", "partial window with the full divisor", "gradient-law", 5, p.WindowFullDivisor,
            ("batch", "reference")),
    Planted("F37", "clip norm summed over replicas", "clip-once", 2, v.ClipDoubleNorm, ("clip", "reduced"),
            v.ClipByHand),
    Planted("F38", "clip before unscale", "clip-once", 1, v.ClipScaled, ("clip",), v.Scaled),
    Planted("F40", "overflow zeroed by clip", "finite", 3, v.Overflow),
    Planted("F41", "NaN hidden by nan_to_num", "finite", 3, v.NanHidden),
    Planted("F43", "loss scale of one rank", "scaler-agrees", 4, v.ScaleLocal, ("scaler",), v.Scaled),
    Planted("F44", "16-bit adapter", "precision-sufficient", 0, v.LowPrecision),
    Planted("F44", "updates rounded away", "update-applied", 2, v.LowPrecision),
    Planted("F46", "sampler pads", "samples-once", 5, v.Padded, ("batch", "rows")),
    Planted("F47", "drop_last", "samples-once", 5, v.DropLast, ("batch", "plan")),
    Planted("F49", "rank-local order of data", "content-planned", 0, v.LocalOrder, ("contents", "rows")),
    Planted("F50", "data not sharded", "samples-once", 1, v.NotSharded, ("batch",)),
    Planted("F52", "label map of one rank", "content-planned", 1, v.LabelMap, ("batch", "content", "contents")),
    Planted("F53", "labels shifted", "content-planned", 1, v.ShiftedLabels, ("batch", "content", "contents")),
    Planted("F55", "same dropout masks", "randomness-declared", 1, r.SameMasks, ("rng",), r.Streams),
    Planted("F56", "same augmentation", "randomness-declared", 1, r.SameNoise, ("rng",), r.Streams),
    Planted("F58", "dropout in evaluation", "evaluation-once", 6, e.DropoutInEvaluation, ("evaluated",),
            e.EvaluatedDropping),
    Planted("F59", "shared stream drawn on one rank", "randomness-declared", 4, r.DrawnOnOneRank, ("rng",), r.Streams),
    Planted("F61", "scheduler for each micro-batch", "learning-rate-planned", 2, s.RatePerMicro, ("schedule",)),
    Planted("F62", "optimizer holds stale parameters", "parameters-kept", 0, s.StaleOptimizer),
    Planted("F64", "head frozen", "parameters-kept", 0, s.HeadFrozen, ("trainable",)),
    Planted("F65", "weight decay on biases", "groups-planned", 1, s.DecayOnBias, ("groups",)),
    Planted("F67", "adapter gets no gradient", "gradient-present", 1, s.Detached),
    Planted("F68", "base trained", "parameters-kept", 0, s.BaseTrained, ("trainable",)),
    Planted("F70", "adapter frozen", "parameters-kept", 0, s.AdapterFrozen, ("trainable",)),
    Planted("F71", "tied weights untied", "parameters-kept", 0, s.Untied, ("tied",), s.Tied),
    Planted("F73", "head not restored", "checkpoint-whole", 4, s.HeadLost, ("saved", "loaded"), s.Resumed),
    Planted("F74", "nothing loaded", "checkpoint-whole", 4, s.PrefixMismatch, ("saved", "loaded"), s.Resumed),
    Planted("F76", "moments permuted", "checkpoint-whole", 4, s.MomentsPermuted, ("saved", "loaded"), s.Resumed),
    Planted("F77", "schedule restarts", "checkpoint-whole", 4, s.RateRestarts, ("saved", "loaded"), s.Resumed),
    Planted("F79", "batch skipped on resume", "samples-once", 4, s.BatchSkipped, ("batch", "plan")),
    Planted("F80", "random state not restored", "checkpoint-whole", 4, s.RandomLost, ("saved", "loaded"), s.Resumed),
    Planted("F82", "one update too few", "updates-planned", 6, s.OneUpdateFewer, ("updates",)),
    Planted("F82", "one update too many", "updates-planned", 7, s.OneUpdateMore, ("updates",)),
    Planted("F83", "best checkpoint by a local metric", "evaluation-once", 6, e.LocalMetric, ("evaluated",),
            e.Evaluated),
    Planted("F83", "only one rank reloads", "checkpoint-whole", 4, s.OneRankReloads, ("saved", "loaded"), s.Resumed),
    Planted("F85", "evaluation pads", "evaluation-once", 6, e.EvaluationPadded, ("evaluated",), e.Evaluated),
    Planted("F86", "metric from integers", "evaluation-once", 6, e.IntegerMean, ("evaluated",), e.Evaluated),
    Planted("F88", "loss of one rank reported", "loss-reported", 1, e.LocalLoss, ("loss",)),
    Planted("F89", "bit flip in a weight", "replicas-agree", 4, s.WeightFlipped),
    Planted("F89", "bit flip below torch", "replicas-agree", 4, s.WeightFlippedUnseen),
    Planted("F91", "corruption after the reduction", "gradients-agree", 4, s.GradientCorrupt),
    Planted("F92", "one rank rounds otherwise", "replicas-agree", 4, s.OtherRounding),
)  # fmt: skip
"""Every fault that is planted; `by` is the step of the catalogue at which it shows at the latest."""
