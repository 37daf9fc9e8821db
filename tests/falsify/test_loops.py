"""Loops in real processes: what holds, what falls, what is seen from outside; other libraries; and who misbehaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from andon_falsify import claims, collate, dataset
from andon_falsify.campaign.trial import LAW, Trial
from andon_falsify.campaign.warm_bench import LoopBench
from andon_falsify.claims import alike, same_everywhere
from andon_falsify.claims.alike import MARGIN
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.explain import short_window
from andon_falsify.claims.laws import LoopLaw
from andon_falsify.claims.same_everywhere import check_loop
from andon_falsify.loops.observer import ForwardPasses, recognised
from andon_falsify.loops.parameters import only_shrunk
from andon_falsify.loops.sightings import LoopSightings, Stranger
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import distinct, loop_case
from andon_falsify.peers.registry import PEERS
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case, Rows, make_rows
from andon_falsify.subjects.meter import StorageMeter
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Outcome, Verdict

PLACES = ((1,), (2,), (3,))
pytestmark = pytest.mark.xdist_group("test_loops")
HERE = "tests.falsify.loop_subjects"
CLIPPED = loop_case()
EVERY_WEIGHT = loop_case(rank=0, lr=1e-3)
SGD = loop_case(optimizer="sgd", lr=0.05, clip_norm=None, weight_decay=0.0)
FEW = SGD.but(rows=make_rows(13))


def verdicts(trace: Trace) -> dict[str, Verdict]:
    """What one run decides by itself."""
    more = ("same-everywhere", "randomness-apart")
    asked = [claim for claim in claims.claims_of("loop") if claim.trial == LAW and claim.name not in more]
    return claims.judged(of_trace(trace), asked)


def attempted(make: str, pools: RankPools, case: Case, *names: str) -> dict[str, Verdict]:
    bench = LoopBench(LoopSubject(make, pools=pools), make)
    return {name: verdict for kind in bench.kinds for name, verdict in bench.attempt(Trial(kind, case), names).items()}


def falsified(found: Mapping[str, Verdict]) -> set[str]:
    return {name for name, verdict in found.items() if verdict.outcome is Outcome.FALSIFIED}


@pytest.mark.parametrize(
    "case",
    [CLIPPED.but(rows=make_rows(13)), FEW.but(world=1, micro_batches=4), FEW.but(world=3, micro_batches=6)],
    ids=["AdamW clipped on 2", "SGD on 1", "SGD on 3"],
)
def test_a_right_loop_holds_on_every_claim(pools: RankPools, case: Case) -> None:
    found = attempted("andon_falsify.peers.plain:PlainLoop", pools, case)
    alone = {"replicas-agree", "layout-equal", "randomness-apart"} if case.world == 1 else set()
    other = {name: str(verdict) for name, verdict in found.items() if verdict.outcome is not Outcome.HOLDS}
    assert other.keys() == alone
    assert found.keys() == {claim.name for claim in claims.claims_of("loop")}
    assert all(found[name].why for name in alone)


def test_a_rate_of_one_group_alone_falls_by_the_schedule(pools: RankPools) -> None:
    found = verdicts(LoopSubject(f"{HERE}:OddRate", pools=pools).run(SGD))
    assert falsified(found) == {"schedule"}, "\n".join(map(str, found.values()))


@pytest.mark.parametrize(
    ("loop", "case"),
    [
        ("TensorRate", SGD),
        ("DecoupledAdam", CLIPPED),
        ("SeldomTold", SGD),
        ("InStep", SGD),
        ("Measuring", SGD),
        ("Measuring", CLIPPED),
        ("Declared", EVERY_WEIGHT),
        ("Exempting", EVERY_WEIGHT),
        ("WithWorker", SGD.but(rows=make_rows(16), batch_size=8)),
    ],
)
def test_a_right_loop_that_is_written_otherwise_holds(pools: RankPools, loop: str, case: Case) -> None:
    found = verdicts(LoopSubject(f"{HERE}:{loop}", pools=pools).run(case))
    assert {verdict.outcome for verdict in found.values()} == {Outcome.HOLDS}, "\n".join(map(str, found.values()))


@pytest.mark.parametrize(
    ("loop", "said"), [("InTurn", "several optimizers"), ("DealtOut", "the ranks' optimizers split the parameters")]
)
def test_a_design_that_cannot_be_judged_is_not_falsified(pools: RankPools, loop: str, said: str) -> None:
    bench = LoopBench(LoopSubject(f"{HERE}:{loop}", pools=pools), loop)
    found = bench.attempt(Trial(LAW, SGD))
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}
    assert all(said in verdict.why for verdict in found.values())


def test_a_loop_is_promised_what_is_compared(pools: RankPools) -> None:
    promised = {claim.name: claim.statement for claim in LoopBench(LoopSubject("x:y", pools=pools), "x").claims}
    near = [name for name, text in promised.items() if f"{MARGIN:g} times the measured fp32 rounding" in text]
    assert near == ["same-everywhere", "resume-equal"]
    assert "in the record" not in promised["halt-together"]


def test_an_evaluation_in_training_mode_is_seen(pools: RankPools) -> None:
    wrong, right = f"{HERE}:Dropping", "andon_falsify.peers.plain:PlainLoop"
    assert verdicts(LoopSubject(wrong, pools=pools).run(SGD))["evaluation-law"].outcome is Outcome.HOLDS
    fallen, held = (attempted(make, pools, SGD, "evaluation-law")["evaluation-law"] for make in (wrong, right))
    assert (fallen.outcome, held.outcome) == (Outcome.FALSIFIED, Outcome.HOLDS)
    assert "with dropout in the model" in str(fallen)


def test_a_noise_of_0_is_a_measurement(pools: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is then the floor, and not that of a model whose noise cannot be measured."""
    subject = LoopSubject("andon_falsify.peers.plain:PlainLoop", pools=pools)
    law = LoopLaw(trace := subject.run(SGD))
    monkeypatch.setattr(alike, "_rounded", lambda case, batches, rates, size: alike._exact(law, batches, rates))
    assert alike.noise(trace) == dict.fromkeys(range(1, 7), 0.0)
    parted = alike.alike(same_everywhere.CLAIM, trace, subject.run(SGD.but(lr=2 * SGD.lr)), trace).counterexamples
    assert any(found.expected.startswith(f"at most {alike.FLOOR:.2e} ") for found in parted)


def test_a_row_that_counts_for_nothing_was_not_visited(pools: RankPools) -> None:
    found = verdicts(LoopSubject(f"{HERE}:Muted", pools=pools).run(SGD))["samples-once"]
    told = [(each.what, each.expected) for each in found.counterexamples]
    assert told == [("rows that were never visited", "rows 5")] * SGD.epochs
    assert found.why == "forward passes of rows 5 did not contribute to a gradient and are not counted"


def test_an_update_without_rows_is_compared_with_another_run(pools: RankPools) -> None:
    subject = LoopSubject(f"{HERE}:OnceMore", pools=pools)
    trace = subject.run(SGD)
    assert falsified(verdicts(trace)) == {"samples-once"}
    assert check_loop(trace, subject.run(SGD.but(world=1, micro_batches=1))).outcome is Outcome.HOLDS


def test_training_without_its_dropout_is_seen_on_one_rank(pools: RankPools) -> None:
    case = SGD.but(world=1, micro_batches=1)
    wrong, name = case.but(fault="F58 training in evaluation mode"), "randomness-apart"
    fallen, none = (attempted("falsify.power.looped:make", pools, each, name)[name] for each in (wrong, case))
    assert str(fallen.counterexamples[0]).startswith("step 2, rank 0: training goes on without dropout")
    assert (none.outcome, none.why) == (Outcome.NOT_APPLICABLE, "one rank has no other rank to compare with")


def test_what_an_evaluation_changes_is_seen_of_any_model(pools: RankPools) -> None:
    """Of one that the reference does not know too; statistics that a rank takes over from rank 0 are no change."""
    loops = (f"{HERE}:OwnModelEvaluating", f"{HERE}:TakingOver", "falsify.power.looped:make")
    case = SGD.but(fault="F89 weights changed by the evaluation")
    changing, right, stepping = (verdicts(LoopSubject(name, pools=pools).run(case)) for name in loops)
    assert falsified(stepping) == {"evaluation-law"}
    (said,) = changing["evaluation-law"].counterexamples
    assert str(said).startswith("after the last update: the evaluation changed 1 tensors of the model")
    assert right["evaluation-law"].outcome is Outcome.HOLDS
    assert falsified(right) == {"replicas-agree"}


def test_a_wrong_gradient_is_named_by_what_was_not_divided_or_counts_more(pools: RankPools) -> None:
    undivided, twice = (LoopSubject(f"{HERE}:{name}", pools=pools).run(SGD) for name in ("Undivided", "Twice"))
    for trace in (undivided, twice):
        assert falsified(verdicts(trace)) == {"gradient-law", "losses-close"}
        unseen = replace(trace, parts=tuple(replace(part, rowless=[*part.made]) for part in trace.parts))
        assert verdicts(unseen)["losses-close"].why == "the rows of step 1 are not known (told.rows), only its loss"
    (first, *_) = verdicts(undivided)["gradient-law"].counterexamples
    assert first.equals.startswith("4.000 = accumulation 2 x world 2")
    assert "every row must count once; here row 5 counts 2 times" in str(verdicts(twice)["gradient-law"])


def test_the_tutorial_of_ddp_takes_a_mean_of_means(pools: RankPools) -> None:
    """31 rows, 2 ranks, 2 micro-batches: the last update is 3, 1, 3, 1 rows, the first two are right; a row repeats."""
    subject = LoopSubject("andon_falsify.peers.ddp:DdpLoop", pools=pools)
    trace = subject.run(SGD)
    found = verdicts(trace)
    assert falsified(found) == {"gradient-law", "samples-once"}
    assert "the mean of the means of 4 micro-batches (of 3, 1, 3, 1 rows)" in str(found["gradient-law"])
    assert [each.where for each in found["gradient-law"].counterexamples] == ["step 3", "step 6"]
    assert "32 visits of 31 rows" in str(found["samples-once"])
    (first, *_) = check_loop(trace, subject.run(SGD.but(world=1, micro_batches=2))).counterexamples
    assert first.where.endswith("world 2 accumulation 2 against world 1 accumulation 2")


def test_a_short_window_that_is_divided_as_a_full_one_is_named_so(pools: RankPools) -> None:
    """10 rows as 8 and 2: 1 of 2 micro-batches on each rank. What is 1/2 of full windows too, is no matter of them."""
    case = SGD.but(rows=make_rows(10), batch_size=8)
    short = verdicts(LoopSubject("andon_falsify.peers.ddp:DdpLoop", pools=pools).run(case))["gradient-law"]
    said = "0.500 = 1 of 2 micro-batches: a short window is divided as a full one"
    assert [(each.where, each.equals) for each in short.counterexamples] == [("step 2", said), ("step 4", said)]
    halved = verdicts(LoopSubject(f"{HERE}:Halved", pools=pools).run(case))["gradient-law"]
    everywhere = "0.500 = 1 / accumulation 2 or 1 / rows 2 or 1 / world 2"
    assert [each.equals for each in halved.counterexamples] == [everywhere] * 4


def test_a_model_of_the_loops_own_is_judged_by_its_own_forward_pass(pools: RankPools) -> None:
    case = SGD.but(optimizer="sgd", momentum=0.0)
    own, spoilt = (LoopSubject(f"{HERE}:{name}", pools=pools) for name in ("OwnModel", "OwnModelWrong"))
    unclipped = verdicts(spoilt.run(case.but(clip_norm=0.01)))["update-law"].counterexamples[0]
    assert str(unclipped).startswith("step 1: the gradient is not clipped: the loop has to clip it to the case's clip")
    right, wrong = (verdicts(each.run(case)) for each in (own, spoilt))
    assert not falsified(right), "\n".join(map(str, right.values()))
    assert right["gradient-law"].outcome is Outcome.HOLDS
    assert "not independent" in right["gradient-law"].why
    assert right["evaluation-law"].outcome is Outcome.NOT_APPLICABLE
    assert falsified(wrong) == {"gradient-law"}


def test_rows_become_distinct_and_keep_their_labels() -> None:
    rows = Rows(((40,), (40,), (41, 42), (40,)), (0, 1, 1, 2), 3)
    found = distinct(rows, longest=2)
    assert len(set(found.tokens)) == 4
    assert (found.tokens[0], found.tokens[2], found.labels) == ((40,), (41, 42), rows.labels)
    assert distinct(make_rows(31), 16) == make_rows(31)
    with pytest.raises(ValueError, match="cannot all be told apart"):
        distinct(Rows(((40,),) * 100, (0,) * 100, 1), longest=1)


def test_rows_are_recognised_by_content_whatever_the_padding() -> None:
    case = loop_case()
    batch = collate([dataset(case)[row] for row in (30, 2, 7)])
    assert recognised(case.rows, batch) == [30, 2, 7]
    wider = {name: torch.nn.functional.pad(batch[name], (4, 0), value=127 * (name == "input_ids")) for name in batch}
    assert recognised(case.rows, {**wider, "labels": batch["labels"]}) == [30, 2, 7]
    assert recognised(case.rows, {"input_ids": batch["input_ids"]}) == [30, 2, 7]
    labels = torch.tensor([(case.rows.labels[30] + 1) % 3, -100, case.rows.labels[7]])
    assert recognised(case.rows, {**batch, "labels": labels}) == ["row 30 with label 0 instead of 2", None, 7]
    assert recognised(case.rows, {**batch, "input_ids": batch["input_ids"] + 1})[0].startswith("tokens [")  # type: ignore
    assert recognised(case.rows, {"x": batch["input_ids"]}) is None


def test_a_short_window_is_named_by_what_it_has_of_a_full_one() -> None:
    """Micro-batches, rows, ranks with rows, of 2 x 3 micro-batches of 2 rows; of a full window nothing."""
    case = loop_case(micro_batches=6)
    full: list[tuple[int, ...]] = [(1, 2), (3, 4), (5, 6)]
    windows: list[tuple[float, list[list[tuple[int, ...]]], str]] = [
        (2 / 3, [full[:2], [(7, 8), (9,)]], "2 of 3 micro-batches"),
        (7 / 12, [full[:2], [(7, 8), (9,)]], "7 of 12 rows"),
        (1 / 2, [full, []], "3 of 6 micro-batches or 6 of 12 rows or 1 of 2 ranks with rows"),
        (5 / 6, [full, [(7, 8), (9,), ()]], "5 of 6 micro-batches"),
        (1 / 2, [full, [(7, 8), (9, 10), (11, 12)]], ""),
        (1 / 3, [full[:2], [(7, 8), (9,)]], ""),
        (1.0, [full[:2], [(7, 8), (9,)]], ""),
    ]
    for ratio, visits, said in windows:
        assert short_window(ratio, visits, case) == said


def test_what_clipping_leaves_has_shrunk_and_nothing_else() -> None:
    held = {"a": torch.tensor([3.0, -4.0, 0.0]), "b": torch.tensor([2.0])}
    assert only_shrunk({"a": held["a"] * 0.1, "b": held["b"] * 0.9}, held)
    assert only_shrunk({"a": held["a"].clamp(-3.5, 3.5), "b": held["b"]}, held)
    for other in ([3.0, -4.1, 0.0], [3.0, 4.0, 0.0], [3.0, -4.0, 1e-9]):
        assert not only_shrunk({**held, "a": torch.tensor(other)}, held)
    assert not only_shrunk(held, {"a": held["a"]})
    overflown = {"a": torch.tensor([torch.inf, 1.0, 1.0]), "b": held["b"]}
    assert only_shrunk({"a": torch.tensor([torch.nan, 0.0, 0.0]), "b": held["b"] * 0}, overflown)


def test_a_row_without_a_gradient_counts_where_its_class_is_certain() -> None:
    """Of a row with a loss, one times 0, a certain one and one of no data set times 0, the first and third count."""
    seen = LoopSightings((1,))
    passes = ForwardPasses(SGD, seen)
    passes.begin(1, [7, 8, 9, None, "tokens [5]"])
    assert (seen.of(1, 1).leaves, seen.strangers) == ([(7, 8, 9)], [Stranger(1, 1, "tokens [5]")])
    scores = torch.tensor([[1.0, 2.0], [1.0, 2.0], [200.0, 0.0], [1.0, 2.0], [1.0, 2.0]], requires_grad=True) * 1
    passes.end(scores, training=True)
    losses = cross_entropy(scores, torch.zeros(5, dtype=torch.int64), reduction="none")
    (losses @ torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])).backward()  # type: ignore[no-untyped-call]
    assert float(losses[2].detach()) == 0
    passes.settle()
    assert seen.of(1, 1).leaves == [(7, 9)]
    assert (seen.weightless, seen.strangers) == ([8], [])


def test_a_second_backward_pass_may_give_a_row_its_weight() -> None:
    seen = LoopSightings((0,))
    passes = ForwardPasses(SGD, seen)
    passes.begin(1, [3, 4])
    scores = torch.ones(2, 2, requires_grad=True) * 1
    passes.end((scores, "other things"), training=True)
    for times in ([1.0, 0.0], [0.0, 1.0]):
        (scores.sum(1) @ torch.tensor(times)).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    passes.settle()
    assert seen.of(0, 1).leaves == [(3, 4)]


def test_a_forward_pass_that_nothing_is_known_of_is_a_visit() -> None:
    seen = LoopSightings((0,))
    passes = ForwardPasses(SGD, seen)
    outputs = (torch.ones(1, 2), torch.ones(1, 2, dtype=torch.float16), torch.ones(2, 2), torch.ones(1))
    for place, output in enumerate(outputs):
        passes.begin(1, [place])
        given = output.requires_grad_() * 1
        passes.end(given, training=True)
        if place:
            (given * 0).sum().backward()  # type: ignore[no-untyped-call]
    passes.begin(1, [4])
    passes.end("no tensor", training=True)
    passes.settle()
    assert seen.of(0, 1).leaves == [(place,) for place in range(5)]


KIB = 256  # elements of fp32 in 1,024 bytes


def test_a_storage_counts_once_while_it_lives() -> None:
    meter = StorageMeter()
    with meter:
        first = torch.ones(KIB)
        view = first.view(2, -1)[0]
        second = first + 1
        assert meter.live == 2048
        del first
        assert meter.live == 2048, "the view keeps it alive"
        del view
        assert meter.live == 1024
        del second
    assert (meter.live, meter.peak) == (0, 2048)
    weight = torch.zeros(KIB)
    meter.adopt([weight, weight.view(-1), torch.empty(4, device="meta")])
    assert meter.live == 1024


def test_what_autograd_keeps_is_alive() -> None:
    meter = StorageMeter()
    with meter:
        weight = torch.ones(KIB, requires_grad=True)
        loss = (weight * 2).square().sum()
        kept = meter.live
        loss.backward()  # type: ignore[no-untyped-call]
    assert 2048 < kept < 3072, "the weight, its double, the loss, and what the multiplication by 2 needs"
    del loss
    assert meter.live == 2048, "the weight and its gradient"


ONCE = {"optimizer": "sgd", "lr": 0.05, "clip_norm": None, "weight_decay": 0.0, "epochs": 1}
EVEN = loop_case(rows=make_rows(24), **ONCE)  # two batches of 12: 2 ranks x 2 micro-batches of 3 rows


def judged(name: str, case: Case, pools: RankPools) -> dict[str, Verdict]:
    peer = PEERS[name]
    if not peer.as_measured:
        wanted = ", ".join(f"{library} {version}" for library, version in peer.measured.items())
        pytest.skip(peer.missing or f"the figures are those of {wanted}; installed is {peer.version}")
    trace = LoopSubject(peer.make, name, pools).run(case)
    assert not trace.errors, trace.errors
    return verdicts(trace)


def test_hf_trainer_multiplies_by_accumulation_and_world(pools: RankPools) -> None:
    """With default arguments the gradient of a classifier is 2 x 2 times the law, and so is the loss that is logged."""
    found = judged("hf_trainer", EVEN, pools)
    for claim in ("gradient-law", "losses-close"):
        assert found[claim].outcome is Outcome.FALSIFIED
        assert "ratio 4.000 = accumulation 2 x world 2" in str(found[claim])
    assert found["evaluation-law"].counterexamples[0].ratio == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("case", [loop_case(rows=make_rows(13), batch_size=8), EVEN], ids=["ragged", "even"])
def test_accelerate_with_sums_is_right(pools: RankPools, case: Case) -> None:
    found = judged("accelerate_right", case, pools)
    assert {name: str(verdict) for name, verdict in found.items() if verdict.outcome is not Outcome.HOLDS} == {}


TRIAL = Trial(LAW, loop_case(epochs=1))


@pytest.fixture
def patient() -> Iterator[RankPools]:
    with RankPools(deadline_s=60.0, grace_s=1.0) as held:
        yield held


def bench(make: str, patient: RankPools) -> LoopBench:
    return LoopBench(LoopSubject(make if ":" in make else f"{HERE}:{make}", make, patient), make)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("tests.falsify.absent:make", "No module named 'tests.falsify.absent'"),
        ("tests.falsify.broken_subject:make", "OSError: no licence was found"),
        ("not_a_function", "names no function"),
        ("nothing", "NoneType is not a loop"),
        ("WithoutTrain", "has no method `train(told)`"),
        ("WithoutModel", "it has no attribute `model` (needed are `model`, a torch module, wrapped"),
        ("WithEmptyModel", "its `model` is None"),
        ("Killed", "rank 1 was killed by SIGKILL"),
        ("Raising", "rank 1: ArithmeticError: nothing adds up (raised at "),
    ],
)
def test_what_a_subject_does_wrong_is_named(patient: RankPools, make: str, said: str) -> None:
    """Every claim of the trial is unknown for one reason in one line: the first cause, not what other ranks saw."""
    found = bench(make, patient).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}
    (why,) = {verdict.why for verdict in found.values()}
    assert said in why
    assert "\n" not in why
    assert len(found) > 5


def test_nonsense_on_the_standard_streams_does_nothing(patient: RankPools, capfd: pytest.CaptureFixture[str]) -> None:
    found = bench("Garbling", patient).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.HOLDS}, found
    assert capfd.readouterr() == ("", "")
