"""Reports for the tests of what is written from them: one as a campaign leaves it, and one made to break a page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from andon_falsify.report.findings import Expected, Finding, Report
from andon_falsify.verdict import Counterexample, Outcome

STATEMENTS = {
    "replicas-agree": "Every rank holds the same trainable weights, to the bit, after every update.",
    "samples-once": "Each epoch uses every row exactly once, in its planned batch.",
    "gradient-law": "The gradient before clipping is the mean over the rows of the global batch.",
    "losses-close": "The reported loss is that of the law.",
    "resume-equal": "A run that was cut off and goes on has the trajectory of one that was not.",
}
REASON = "the loss is not divided by the accumulation, and is multiplied by the world size"
RATIO = Counterexample(
    "29 of 29 tensors differ from the float64 reference",
    "step 1",
    "relative error <= 2e-06",
    "score.weight 3, q_proj.lora_B 3, v_proj.lora_B 3 and 26 more",
    4.0,
    "4.000 = accumulation 2 x world 2",
    7,
    "andon falsify --subject hf_trainer --claim gradient-law --world 2 --accumulation 2 --seed 7",
)
REPEATED = Counterexample(
    "row 3 is used 2 times in epoch 1",
    "step 3, rank 1",
    "once",
    "step 1 rank 0, step 3 rank 1",
    None,
    "",
    7,
    "andon falsify --subject hf_trainer --claim samples-once --world 2 --seed 7",
)


def finding(claim: str, subject: str = "andon", outcome: Outcome | str = Outcome.HOLDS, **rest: Any) -> Finding:
    known: dict[str, Any] = {"subject_version": "1.0", "backend": "gloo", "world": 2, "accumulation": 2, "seed": 7}
    if outcome in (Outcome.HOLDS, Outcome.FALSIFIED):
        known["checked"] = 12
    if outcome == Outcome.FALSIFIED:
        known["counterexamples"] = (RATIO,)
    return Finding(claim, Outcome(outcome), version=1, subject=subject, **(known | rest))


def campaign() -> Report:
    """Three subjects: one without fault, one with expected failures, one with an unexpected pass and open questions."""
    trainer: dict[str, Any] = {"subject_version": "5.23.0"}
    found = [finding(claim, world=world) for claim in STATEMENTS for world in (1, 2, 3)]
    found += [
        finding("replicas-agree", "hf_trainer", **trainer),
        finding("samples-once", "hf_trainer", "falsified", counterexamples=(REPEATED,), **trainer),
        finding("gradient-law", "hf_trainer", world=1, accumulation=1, **trainer),
        finding("gradient-law", "hf_trainer", "falsified", **trainer),
        finding("losses-close", "hf_trainer", "unknown", reasons=("the loop told no loss",), **trainer),
        finding("resume-equal", "hf_trainer", "not applicable", reasons=("the loop does not save",), **trainer),
    ]
    found += [
        finding("replicas-agree", "ddp"),
        finding("samples-once", "ddp"),
        finding("gradient-law", "ddp", "falsified", counterexamples=(replace(RATIO, ratio=1.25, equals="1.250"),)),
        finding("losses-close", "ddp"),
    ]
    return Report(
        started="2026-01-02T03:04:05+00:00",
        versions={"torch": "2.13.0", "transformers": "5.23.0"},
        machine={"cpu": "a processor", "cores": "2"},
        findings=tuple(found),
        runs=31,
        not_selected=("memory-budget",),
        expected=(
            Expected("hf_trainer", "gradient-law", REASON),
            Expected("ddp", "losses-close", "each rank reports its own loss"),
        ),
        statements=STATEMENTS,
    )


def hostile(text: str) -> Report:
    """A report that has `text` everywhere where a text may stand."""
    example = Counterexample(text, text, text, text, 2.0, text, 1, text)
    places: dict[str, Any] = dict.fromkeys(("backend", "subject_version"), text)
    places["reasons"] = (text,)
    return Report(
        started=text,
        versions={text: text},
        machine={text: text},
        findings=(
            finding(text, text, "falsified", counterexamples=(example,) * 5, **places),
            finding(f"{text} 2", text, **places),
            finding(f"{text} 3", text, "unknown", **places),
            finding(f"{text} 4", text, "not applicable", **places),
            finding(text, f"{text} 2", **places),
        ),
        not_selected=(text,),
        expected=(Expected(text, text, text), Expected(f"{text} 2", text, text)),
        statements={text: text},
    )


NASTY = (
    "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">'\"&amp;{{7*7}}|`]]>"
    "\x00\x1b\udc80\u202e\n- #"
)
"""What closes quotes, tags, cells and sections, and what no format can hold."""
