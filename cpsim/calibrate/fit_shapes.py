"""Fits what windows and values of another size change of attention kernels, after everything else and beside it.

Such calls tell a few parameters of their own and nothing of the others, so that measuring them leaves predictions of
all other calls as they are. Batches are priced as their sequences one after the other: they tell nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from cpsim.calibrate.fit_attention import HEAD_DIM_FITTED, fit_few, scaled
from cpsim.calibrate.measurement import Point
from cpsim.calibrate.residuals import window_of
from cpsim.masks.slices import UNCUT
from cpsim.models.attention.discrepancy import NONE
from cpsim.models.attention.params import PER_PAIR, AttentionParams

Key = tuple[str, str]
FEWEST: Final = 5
"""Fewer calls of a kernel, pass and head dimension tell nothing."""
OF_WINDOWS: Final = {"block_window_s": 0.02, "window_pair_s": 0.02}
"""Parameters that windows tell, and weights that hold their logarithms near where the fit starts."""
SHARING: Final = {"shared_window_factor": 0.02}
"""The same where some of these calls share keys and some do not; the fit starts at `FEW`."""
FEW: Final = 0.3
STEPS: Final = (0.5, 0.25, 0.12)
OTHER_CODE: Final = 0.02
"""The weight of `full_factor`, where there are points with and without a mask."""
FIRST_SHARE: Final = 0.1
"""Where the fit of a window's time per pair starts, of the time per pair."""


def has_window(point: Point) -> bool:
    """Whether an attention point has a window that is neither full nor causal."""
    return point["op"] == "attention" and window_of(point) not in ((UNCUT, UNCUT), (UNCUT, 0))


def is_usual(point: Point) -> bool:
    """Whether a point is none of those that are fitted, or kept, apart."""
    if point["op"] != "attention":
        return True
    batch = not point["varlen"] and len(point["q_lens"]) > 1 and "mask" not in point
    return not (has_window(point) or point.get("value_dim") or batch)


def fit_shapes(attention: Mapping[Key, AttentionParams], points: Sequence[Point]) -> dict[Key, AttentionParams]:
    """Kernels with what the points of each tell of windows and of values of another size."""
    made = dict(attention)
    for key, params in attention.items():
        mine = [p for p in points if p["op"] == "attention" and (p["kernel"], p["pass"]) == key and not is_usual(p)]
        if mine and not params.anatomy.lists_blocks:
            made[key] = _with_windows(_with_values(_with_windows(params, mine), mine), mine)
    return made


def _with_windows(params: AttentionParams, points: Sequence[Point]) -> AttentionParams:
    """At every head dimension, of values, too, that has enough points with windows."""

    def at(one: AttentionParams) -> AttentionParams:
        size = one.head_dim, one.value_dim
        here = [p for p in points if (p["head_dim"], p.get("value_dim", 0)) == size and has_window(p)]
        if len(here) < FEWEST:
            return one
        window, pair = 2 * one.block_causal_s, FIRST_SHARE * one.pair_s
        both = len({p["num_heads"] > p["num_kv_heads"] for p in here}) > 1
        first = replace(one, head_dims=(), block_window_s=window, window_pair_s=pair)
        first = replace(first, shared_window_factor=FEW if both else one.shared_window_factor)
        found = fit_few(here, first, OF_WINDOWS | (SHARING if both else {}), STEPS)
        return replace(one, **{name: getattr(found, name) for name in (*OF_WINDOWS, *SHARING)})

    return params.everywhere(at)


def _with_values(params: AttentionParams, points: Sequence[Point]) -> AttentionParams:
    """With sizes of keys and values that have enough points, in place of what was known of them."""
    sizes = {(p["head_dim"], p["value_dim"]) for p in points if p.get("value_dim") and not has_window(p)}
    kept = [one for one in params.head_dims if (one.head_dim, one.value_dim) not in sizes]
    made = []
    for size in sorted(sizes):
        here = [p for p in points if (p["head_dim"], p.get("value_dim")) == size and not has_window(p)]
        near, mean = params.sized(*size)
        if len(here) < FEWEST:
            continue
        both = len({window_of(p) for p in here}) > 1
        pairs = dict.fromkeys(PER_PAIR, mean / near.head_dim)
        start = replace(scaled(near, pairs), head_dim=size[0], value_dim=size[1], head_dims=(), discrepancy=NONE)
        priors = HEAD_DIM_FITTED | ({"full_factor": OTHER_CODE} if both else {})
        made.append(fit_few(here, start, priors, STEPS))
    return replace(params, head_dims=(*kept, *made))
