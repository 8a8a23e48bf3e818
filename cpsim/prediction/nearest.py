"""Answers where a kernel was not measured: those of the nearest kernel that was, with a wide interval and a mark.

How far the two kernels may be apart is taken from a causal mask of the same tokens, if both were measured with one: the
interval reaches to what their ratio there makes of the answer, and at least to ``LEAST``. Otherwise it reaches to
``FAR`` times as fast and slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.prediction.predict import predict
from cpsim.prediction.results import Advice, Candidate

NEAREST: Final[Mapping[str, tuple[str, ...]]] = {
    "fa2": ("sdpa_flash", "fa4", "flex"),
    "fa3": ("cudnn", "fa4", "fa2", "flex"),
    "fa4": ("cudnn", "fa3", "fa2", "flex"),
    "cudnn": ("fa3", "fa4", "fa2", "flex"),
    "ffa": ("fa3", "flex"),
    "ffa_fa4": ("fa4", "flex"),
    "flash_mask": ("flex",),
    "fa2_sparse": ("flashinfer_fa2", "flex"),
    "flex": ("cudnn", "fa4"),
    "sdpa_flash": ("fa2", "flex"),
    "flashinfer": ("fa2", "flex"),
    "fa4_sparse": ("flex",),
    "sdpa_math": ("flex",),
}
"""Kernels that stand in for one that was not measured, the nearest first."""
FAR: Final = 2.0
LEAST: Final = 1.15
"""How far kernels may be apart that a causal mask does not tell apart; assumed."""


def stand_ins(scenario: Scenario) -> list[Scenario]:
    """The case with other kernels, the nearest first."""
    return [scenario.model_copy(update={"kernel": kernel}) for kernel in NEAREST.get(scenario.kernel, ())]


def unmeasured(advice: Advice) -> bool:
    """Whether a case has no answer because its kernel was not measured."""
    return not advice.candidates and any(one.kind == "not_measured" for one in advice.infeasible)


def widened(asked: Scenario, advice: Advice, why: str) -> Advice:
    """Answers of another kernel as those of the one that was asked for.

    Args:
        asked: the case.
        advice: of the same case with another kernel, which has candidates.
        why: what was not measured.
    """
    kernel = advice.scenario.kernel
    ratio = _ratio(asked, advice.candidates[0].scenario)
    low, high = (min(1 / LEAST, ratio), max(LEAST, ratio)) if ratio else (1 / FAR, FAR)
    rng = np.random.default_rng(0)
    factors = np.exp(rng.uniform(np.log(low), np.log(high), len(advice.candidates[0].draws_s)))
    by = f"{low:.2g} to {high:.2g} times, as the two kernels differ under a causal mask" if ratio else f"{FAR:g} times"
    mark = f"not measured: {why}; answered with {kernel}, the nearest kernel that was, intervals wider by {by}"
    return replace(
        advice,
        candidates=tuple(_wider(one, low, high, factors) for one in advice.candidates),
        notes=(mark, *advice.notes),
        stands_in=kernel,
    )


def _wider(one: Candidate, low: float, high: float, factors: NDArray[np.float64]) -> Candidate:
    draws = tuple((np.array(one.draws_s) * factors).tolist())
    return replace(one, total_s_low=one.total_s_low * low, total_s_high=one.total_s_high * high, draws_s=draws)


def _ratio(asked: Scenario, found: Scenario) -> float | None:
    """Time of the kernel that was asked for over that of the other, for a causal mask; None where it is not known."""
    usual = {"mask": "causal", "documents": None, "pass_": "fwd_bwd", "value_dim": None}
    plain = found.model_copy(update=usual)
    try:
        times = [predict(plain.model_copy(update={"kernel": kernel})).time_s for kernel in (asked.kernel, found.kernel)]
    except CpsimError:
        return None
    return times[0] / times[1]
