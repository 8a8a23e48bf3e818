"""What LongCA-bench's paper and the runs that repeat it say, judged by the simulated study.

A judge returns whether a finding holds, and the numbers that decide. Tolerances are the paper's words as numbers, or
the range of what was measured; what is missed is said with its reason.

Reference: LongCA-bench (arXiv 2510.17896), section 5.3; MagiAttention's context-parallel benchmark (SandAI-org/
MagiAttention at 2c64135), whose documents differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from studies.longca.reproduce import GPUS, MASKS, MECHANISMS, PASSES, REPEATED, REPEATED_ON, THEIRS, Study


@dataclass(frozen=True, slots=True)
class Finding:
    """What the paper or the repeated runs say, and whether the simulation says so, too."""

    claim: str
    holds: bool
    found: str
    """The numbers that decide."""
    reason: str = ""
    """Why it does not hold, as far as that is known."""


def findings(study: Study) -> list[Finding]:
    """Every finding, judged by the benchmark's own code in a study of all its numbers of GPUs."""
    judged = [Finding(claim, *judge(study)) for claim, judge in _FINDINGS]
    return [f if f.holds else replace(f, reason=REASONS.get(f.claim, "not known")) for f in judged]


REASONS: Final = {
    "LoongTrain gains modestly over USP forward: up to 15 %": (
        "on 32 GPUs its windows are rings of two, which send and receive in turns; dense masks hide that, documents "
        "do not, and the runs that were repeated have no documents on 32 GPUs"
    ),
    "The same on CAUSAL": (
        "forward 0.2 to 0.5 ms a step are missing, most on 8 GPUs, where it is as much under every mask, and where is "
        "not known: not in gathers, scatters and merges around each kernel, which were measured (studies.probes.rows)"
    ),
}
"""Findings that the whole study does not have, and why."""
Verdict = tuple[bool, str]
HYBRIDS: Final = ("usp", "loongtrain")
DENSE: Final = MASKS[:2]
DOCUMENT: Final = MASKS[2:]


def _ratios(
    study: Study, above: str, below: str, masks: Sequence[str], passes: Sequence[str], least: int, most: int = GPUS[-1]
) -> list[float]:
    """Throughput of one mechanism over another's, on ``least`` to ``most`` GPUs."""
    return [
        study.mean(n, mask, p, above) / study.mean(n, mask, p, below)
        for n in study.gpus
        if least <= n <= most
        for mask in masks
        for p in passes
    ]


def _over_gpus(study: Study, mask: str, pass_: str, mechanism: str, least: int = 0) -> list[float]:
    return [study.mean(n, mask, pass_, mechanism) for n in study.gpus if n >= least]


def _hybrids_lead(study: Study) -> Verdict:
    ratios = {}
    for n in (n for n in study.gpus if n > 8):
        overall = {
            m: float(np.mean([study.mean(n, mask, p, m) for mask in MASKS for p in PASSES])) for m in MECHANISMS[:5]
        }
        ratios[n] = max(overall[m] for m in HYBRIDS) / np.nanmax([overall[m] for m in MECHANISMS[:3]])
    return min(ratios.values()) >= 1, "best hybrid over the best other: " + _by_gpus(ratios, ".2f")


def _network_decides(study: Study) -> Verdict:
    first, second = study.gpus[:2]
    falls = {
        m: float(np.mean([study.mean(second, k, p, m) / study.mean(first, k, p, m) for k in DOCUMENT for p in PASSES]))
        for m in MECHANISMS[:5]
    }
    text = ", ".join(f"{m} {value:.2f}" for m, value in falls.items())
    return max(falls.values()) <= 0.97, f"DOCUMENT throughput on {second} GPUs over {first}: {text}"


def _heads_bound_ulysses(study: Study) -> Verdict:
    out = [n for n in study.gpus if study.cell(n, "full", "fwd", "ulysses")[0].reason]
    return out == [n for n in study.gpus if 64 % n], f"infeasible on {', '.join(map(str, out)) or 'none'}"


def _ulysses_solid(study: Study) -> Verdict:
    ratios = {
        n: min(
            study.mean(n, mask, p, "ulysses") / max(study.mean(n, mask, p, m) for m in MECHANISMS[:5] if m != "ulysses")
            for mask in DENSE
            for p in PASSES
        )
        for n in study.gpus
        if 64 % n == 0
    }
    return min(ratios.values()) >= 0.9, "over the best other, worst dense case: " + _by_gpus(ratios, ".2f")


def _ulysses_balanced(study: Study) -> Verdict:
    rows = [row for row in study.rows if row.mechanism == "ulysses" and row.implementation == THEIRS and not row.reason]
    worst = max(row.slowest_s / row.time_s for row in rows)
    return worst <= 1.01, f"slowest rank over the mean: at most {worst:.3f}"


def _ring_full_best(study: Study) -> Verdict:
    worst = max(
        study.mean(n, mask, p, "ring_p2p") / study.mean(n, "full", p, "ring_p2p")
        for n in study.gpus
        for mask in MASKS[1:]
        for p in PASSES
    )
    return worst < 1, f"other masks reach at most {worst:.2f} of FULL"


def _ring_full_constant(study: Study) -> Verdict:
    ratios = {p: max(found) / min(found) for p in PASSES if (found := _over_gpus(study, "full", p, "ring_p2p", 16))}
    return max(ratios.values()) <= 1.05, "largest over smallest from 16 GPUs on: " + _by_pass(ratios, ".3f")


def _ring_causal_lower(study: Study) -> Verdict:
    ratios = {
        p: [c / f for c, f in zip(*(_over_gpus(study, k, p, "ring_p2p") for k in ("causal", "full")), strict=True)]
        for p in PASSES
    }
    text = ", ".join(f"{p} {min(found):.2f} to {max(found):.2f}" for p, found in ratios.items())
    return all(max(found) <= 0.97 for found in ratios.values()), f"CAUSAL over FULL: {text}; published 0.82-0.92"


def _ring_documents_low(study: Study) -> Verdict:
    ratios = _ratios(study, "ring_p2p", "usp", DOCUMENT, PASSES, 16)
    return max(ratios) <= 0.5, f"Ring P2P over USP from 16 GPUs on: {min(ratios):.2f} to {max(ratios):.2f}"


def _hybrids_decline(study: Study) -> Verdict:
    """Down from one node to the most GPUs, and no step by more than a quarter."""
    totals, steps = [], []
    for mask in DOCUMENT:
        for p in PASSES:
            found = _over_gpus(study, mask, p, "usp")
            totals.append(found[-1] / found[0])
            steps += [b / a for a, b in pairwise(found)]
    text = f"most GPUs over 8: {min(totals):.2f} to {max(totals):.2f}; steps: {min(steps):.2f} to {max(steps):.2f}"
    return max(totals) < 1 and min(steps) >= 0.75, text


def _hybrids_stable(study: Study) -> Verdict:
    """Over numbers of GPUs; samples of one number differ by their work, whatever the mechanism."""
    compared = "ulysses", "ring_p2p", *HYBRIDS
    scales = {
        m: float(np.mean([_variation(_over_gpus(study, k, p, m)) for k in DOCUMENT for p in PASSES])) for m in compared
    }
    samples = {
        m: float(np.nanmean([study.spread(n, k, p, m) for n in study.gpus for k in DOCUMENT for p in PASSES]))
        for m in compared
    }
    text = ", ".join(f"{m} {scales[m]:.0%} ({samples[m]:.0%})" for m in compared)
    steadier = max(scales[m] for m in HYBRIDS) < min(scales["ulysses"], scales["ring_p2p"])
    return steadier, f"standard deviation over GPUs (over samples): {text}"


def _variation(values: Sequence[float]) -> float:
    """Standard deviation relative to the mean; NaN is left out."""
    return float(np.nanstd(values) / np.nanmean(values))


def _loongtrain_forward(study: Study) -> Verdict:
    """At scale: from 32 GPUs on, where its ring has windows."""
    means = _loongtrain_over_usp(study, "fwd", 32)
    good = all(0.99 <= ratio <= 1.15 for ratio in means.values()) and max(means.values()) > 1.01
    return good, f"LoongTrain over USP: {_by_gpus(means, '.2f')}"


def _loongtrain_backward(study: Study) -> Verdict:
    means = _loongtrain_over_usp(study, "bwd", 16)
    good = all(0.85 <= ratio <= 1.02 for ratio in means.values())
    return good, f"LoongTrain over USP: {_by_gpus(means, '.2f')}; published, by mask: 0.82 to 1.00"


def _loongtrain_over_usp(study: Study, pass_: str, least: int) -> dict[int, float]:
    """Mean over masks of the ratio of throughputs, by GPUs."""
    ratio = {n: _ratios(study, "loongtrain", "usp", MASKS, (pass_,), n, n) for n in study.gpus if n >= least}
    return {n: float(np.mean(found)) for n, found in ratio.items()}


def _steps(
    mask: str, forward: tuple[float, float], backward: tuple[float, float], least: int = 8
) -> Callable[[Study], Verdict]:
    """A judge of how long a step of Ring P2P takes [ms], within 10 % of what was measured, from so many GPUs on."""

    def judge(study: Study) -> Verdict:
        good, text = True, []
        for p, (low, high) in zip(PASSES, (forward, backward), strict=True):
            numbers = [n for n in study.gpus if n in REPEATED_ON[mask] and n >= least]
            found = [1e3 * study.mean(n, mask, p, "ring_p2p", REPEATED, of="time_s") / n for n in numbers]
            good &= min(found) >= 0.9 * low and max(found) <= 1.1 * high
            text.append(f"{p} {_range(min(found), max(found))} ms, measured {_range(low, high)}")
        return good, "; ".join(text)

    return judge


def _gather_backward_grows(study: Study) -> Verdict:
    given = "causal_document", "bwd", "ring_allgather", REPEATED
    first, second = (1e3 * study.mean(n, *given, of="time_s") for n in (8, 16))
    return 1.5 <= second / first <= 2.5, f"{first:.1f} ms on 8 GPUs, {second:.1f} on 16; measured 13.5 and 27.4"


def _range(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}" if f"{low:.2f}" != f"{high:.2f}" else f"{low:.2f}"


def _by_gpus(values: Mapping[int, float], digits: str) -> str:
    return ", ".join(f"{value:{digits}} on {n}" for n, value in values.items())


def _by_pass(values: Mapping[str, float], digits: str) -> str:
    return ", ".join(f"{p} {value:{digits}}" for p, value in values.items())


_FINDINGS: Final[tuple[tuple[str, Callable[[Study], Verdict]], ...]] = (
    ("Hybrids (USP, LoongTrain) are best overall as soon as nodes are several", _hybrids_lead),
    ("The network between nodes is what costs most: everything falls from one node to two", _network_decides),
    ("Ulysses cannot split 64 heads over 24, 48 or 96 GPUs", _heads_bound_ulysses),
    ("Ulysses does solidly: within 10 % of the best on dense masks", _ulysses_solid),
    ("Ulysses is balanced: ranks end within 1 % of each other", _ulysses_balanced),
    ("FULL is the best mask of Ring P2P", _ring_full_best),
    ("Ring P2P on FULL is nearly constant with scale: within 5 %", _ring_full_constant),
    ("CAUSAL lowers the throughput of Ring P2P, by 3 % or more", _ring_causal_lower),
    ("DOCUMENT masks make Ring P2P slow: at most half of USP", _ring_documents_low),
    ("Hybrids decline gradually with scale on DOCUMENT masks", _hybrids_decline),
    ("Hybrids are more stable over DOCUMENT masks than Ulysses and Ring P2P", _hybrids_stable),
    ("LoongTrain gains modestly over USP forward: up to 15 %", _loongtrain_forward),
    ("LoongTrain is on par with USP backward or slower, by up to 15 %", _loongtrain_backward),
    (
        "A step of Ring P2P on FULL takes what it was measured to, within 10 %",
        _steps("full", (4.11, 4.31), (10.6, 11.1)),
    ),
    ("The same on CAUSAL", _steps("causal", (2.42, 2.61), (5.79, 6.36))),
    (
        "The network between nodes paces a step on FULL DOCUMENT",
        _steps("full_document", (1.59, 1.59), (3.32, 3.32), least=16),
    ),
    ("The same on CAUSAL DOCUMENT", _steps("causal_document", (1.55, 1.55), (3.09, 3.09), least=16)),
    (
        "Backward, Ring All-Gather takes about twice as long on 16 GPUs as on 8: traffic grows with all tokens",
        _gather_backward_grows,
    ),
)
"""The first thirteen are the paper's; times of steps and of all-gathers are MagiAttention's, whose code they are
predicted with: its PyTorch gathers whole rows."""
