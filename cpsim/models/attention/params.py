"""Attention kernels: the tiles that a kernel really visits, its thread blocks in waves over the SMs, its power limit.

One call is one kernel launch over one or more sequences. A call with one sequence uses the kernel's dense entry
point, with several the varlen one, as `cpsim.real.run.attention` does.

    seconds = (call + traffic / bandwidth + makespan(blocks) * slowdown(busy)) / exp(discrepancy)

* A thread block owns one tile row (forward: queries, backward: keys) of one head and walks over the tiles of its row
  that the mask does not empty; tiles cut by the mask or by a sequence's end cost a whole tile. Heads that share keys
  are packed into one tile row by some kernels.
* Blocks start in launch order as SMs become free: up to 48 waves are replayed, more are summed with their tail.
* Two blocks on one SM (flash-attention 2, forward) hide each other's overhead, but slow each other's tiles, the
  younger block's more, or both alike, which depends on how the kernel was compiled: equal blocks then end together,
  and those that follow meet again. Which blocks meet is what an H100 does where there are few waves of them.
* Backward adds memory-bound passes: the products of out and dout, the fp32 accumulator of dq, and with shared heads
  those of dk and dv. Accumulators are passed over in whole tiles, so that short sequences move mostly padding.
* The main kernel itself cannot run faster than its own memory traffic, which matters to calls of short sequences.
  Loads of keys hide behind tiles; queries and outputs, which move when a block has no tiles, hardly do.
* Split keys launch a second kernel that combines the parts.
* Code that checks bounds is compiled apart, for a causal mask and for none. cuDNN needs it where keys are not whole
  tiles, flash-attention 2 where queries are not either, and in varlen calls; the matrix products of naive attention
  load scores by 16 bytes where keys are multiples of 8, and one by one where they are odd.
* Kernels that list blocks visit those of 128 x 128 tokens that the mask touches, whatever its shape. Deciding pair by
  pair in blocks that it cuts takes time, which depends on how the kernel was compiled: for runs of keys, rectangles or
  bands, and with or without checks of bounds. Backward, both who owns keys and who owns queries compute the scores.
* FlashInfer takes every row of blocks of a mask of rectangles as a sequence on keys gathered one by one.
* Under a window a block visits the tiles between the first and the last that its queries or keys touch. Code for
  windows is compiled apart: it masks both ends of a row, or, in flash-attention 2, all of its tiles.
* Other head dimensions have tiles and a few times of their own where points say so, of masks that cut blocks above all.
* Busy tensor cores draw more than the power limit, so the clock falls where `busy` (the fraction of time that the
  SMs spend on tiles) passes a threshold.

Reference: Dao, FlashAttention-2 (2023), section 3.3 (work partitioning); tile sizes and launch orders as in the
sources of flash-attention 2.8.3, flash-attn-4 4.0.0b36, FlashInfer 0.6.4 and PyTorch 2.11's FlexAttention, compute
capability 9.0.
Differs: cuDNN's tiles are not public; its anatomy is the one that fits best. flash-attention 3 has not been measured
here: flash-attn-4 for this architecture descends from it and lends its anatomy.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from cpsim.masks.blocks import Visits, causal_windows, sequence_slices, visits
from cpsim.masks.slices import UNCUT
from cpsim.models.attention.anatomy import Anatomy
from cpsim.models.attention.blocks import FEATURES, price, price_listed
from cpsim.models.attention.discrepancy import NONE, Discrepancy
from cpsim.units import CLOSED, MEASURED_S, Factor, Quantity, Seconds, SecondsPerByte

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


PairSeconds = Annotated[float, Quantity("s per pair", 0, 1e-3)]
EVEN_SHARE = 0.5
"""Share of each of two thread blocks of an SM that get equally much done: equal ones end together, and what follows
them is paired, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """One kernel and pass on one GPU type: its anatomy and the fitted times, all in seconds of one thread block.

    A time that a kernel does not have is 0 and a factor 1, the defaults.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    anatomy: Anatomy
    num_sms: Annotated[int, Quantity("SMs", 1, 1e5)]
    head_dim: Annotated[int, Quantity("elements", 1, 1e5)]
    """Measured head dimension; those without points of their own scale traffic in proportion, and tiles but for
    the exponentials of their scores."""
    pair_s: Annotated[float, Quantity("s per pair", 1e-14, 1e-3)]
    """Per (query, key) pair of a visited tile."""
    block_s: Seconds = 0.0
    """Per block: prologue and epilogue."""
    block_shared_s: Seconds = 0.0
    """Per block more, where query heads share keys; of listed blocks that own keys, for each of their query heads."""
    block_causal_s: Seconds = 0.0
    """Per block more, under a causal mask; tile time, which a second block on the SM slows."""
    block_window_s: Seconds = 0.0
    """Per block more, under a window; tile time, too. 0 where it was not measured: a causal mask's, at both ends."""
    block_varlen_s: Seconds = 0.0
    """Per block more, in a varlen call."""
    block_decode_s: Seconds = 0.0
    """Per block and 32 sequences more, in a varlen call (finding its sequence), or per launched block without work."""
    call_s: Seconds = 0.0
    """Per call: launches on the GPU, pipeline fill."""
    call_varlen_s: Seconds = 0.0
    """Per varlen call more."""
    traffic_s_per_byte: SecondsPerByte = 0.0
    """Memory-bound passes around the main kernel."""
    busy_threshold: Factor = 1.0
    """Busy fraction at which the power limit sets in."""
    busy_power: Annotated[float, Quantity("", 0, 1e3)] = 0.0
    """Time grows with (busy / threshold) to this power above it."""
    alone_factor: Factor = 1.0
    """Time of a block that has its SM to itself, relative to one that shares it."""
    split_pair_s: PairSeconds = 0.0
    """Per pair where keys are split."""
    split_call_s: Seconds = 0.0
    """Per call more where keys are split: the kernel that combines the parts."""
    unaligned_factor: Factor = 1.0
    """Slowdown of code that checks bounds, which lengths that are no multiples of the tile sizes need, under a causal
    mask; of listed blocks under any, backward of those that own keys."""
    unaligned_full_factor: Factor = 1.0
    """Slowdown of code that checks bounds, without a mask."""
    full_factor: Factor = 1.0
    """Slowdown without a mask, where a kernel has other code for that: cuDNN 9.19's backward pass of keys of 192 and
    values of 128 elements."""
    odd_factor: Factor = 1.0
    """Slowdown more of an odd number of keys, whose scores naive attention loads one by one."""
    unaligned_celled_factor: Factor = 1.0
    """Slowdown more there of a kernel that can decide by rectangles."""
    window_pair_s: PairSeconds = 0.0
    """Per pair more, under a window, in kernels that mask all of its tiles pair by pair."""
    shared_window_factor: Factor = 1.0
    """Of `block_shared_s`, what a block takes under a window: of cuDNN backward next to nothing."""
    partial_pair_s: PairSeconds = 0.0
    """Per pair more in a listed block that the mask cuts, where runs of keys decide; backward, of blocks that own
    keys."""
    celled_pair_s: PairSeconds = 0.0
    """Seconds more per pair in a listed block that the mask cuts, where rectangles decide."""
    banded_pair_s: PairSeconds = 0.0
    """Seconds more per pair in a listed block that the mask cuts, where bands in rectangles decide."""
    unaligned_partial_pair_s: PairSeconds = 0.0
    unaligned_celled_pair_s: PairSeconds = 0.0
    unaligned_banded_pair_s: PairSeconds = 0.0
    """These three where lengths are no multiples of the tile sizes."""
    banded_factor: Factor = 1.0
    """Slowdown of full and cut blocks alike in a kernel that can decide by bands; backward, of those that own keys."""
    block_banded_s: Seconds = 0.0
    """Per thread block more in such a kernel."""
    passed_s: Seconds = 0.0
    """Per block of 128 x 128 pairs that a thread block passes over where it has no list of those to visit; under a
    causal mask it looks at those up to the diagonal alone, in half the time."""
    query_cut_share: Annotated[float, Quantity("", 0, 1e3)] = 0.0
    """Share of what cut blocks take more that they take where a backward thread block owns queries."""
    unaligned_query_cut_share: Annotated[float, Quantity("", 0, 1e3)] = 0.0
    """This share where lengths are no multiples of the tile sizes."""
    query_pair_s: PairSeconds = 0.0
    """Per pair of a listed block that a backward block owning queries visits."""
    older_share: Annotated[float, Quantity("", 0.01, 0.99)] = EVEN_SHARE
    """Share of the older of two thread blocks on an SM in what both get done at their tiles, under a causal mask."""
    older_share_full: Annotated[float, Quantity("", 0.01, 0.99)] = EVEN_SHARE
    """This share without a mask: other compiled code."""
    value_dim: Annotated[int, Quantity("elements", 0, 1e5)] = 0
    """Measured head dimension of values, where it is another one."""
    calls_s: tuple[Annotated[float, MEASURED_S], ...] = ()
    """Times of calls, ascending, by which `calls_spread` goes; none where calls were measured once each."""
    calls_spread: tuple[Annotated[float, Quantity("", 0, 10)], ...] = ()
    """Standard deviation, relative, of the time of equal calls on one GPU."""
    discrepancy: Discrepancy = NONE
    """What the times above leave over."""
    head_dims: tuple[AttentionParams, ...] = ()
    """This kernel at other measured head dimensions, ascending."""

    def __post_init__(self) -> None:
        if len(self.calls_s) != len(self.calls_spread):
            raise ValueError("needs as many calls_s as calls_spread")
        if list(self.calls_s) != sorted(self.calls_s):
            raise ValueError("needs calls_s that grow")

    def __hash__(self) -> int:
        """Of a few of many numbers: kernels are looked up by it at every price."""
        return hash((self.head_dim, self.num_sms, self.pair_s, self.block_s, self.call_s))

    def at(self, head_dim: int) -> AttentionParams:
        """The parameters that hold at a head dimension: kernels round it up to one that they are compiled for."""
        alike = (params for params in (self, *self.head_dims) if not params.value_dim)
        measured = sorted(alike, key=lambda params: params.head_dim)
        return next((params for params in measured if params.head_dim >= head_dim), measured[-1])

    def sized(self, head_dim: int, value_dim: int = 0) -> tuple[AttentionParams, int]:
        """The parameters that hold where values have another size than keys, and the head dimension of equal ones that
        takes as many products.

        Sizes that were not measured take the tiles that the kernel has for the values' size, as flash-attention 3 and 4
        choose them for 192 and 128. Forward a pair takes a product of keys and one of values, backward three and two.

        Reference: flash-attn-4 4.0.0b36, flash_attn/cute/interface.py, _tile_size_fwd_sm90.
        """
        if value_dim in (0, head_dim):
            return self.at(head_dim), head_dim
        of_keys, of_values = (3, 2) if self.anatomy.backward else (1, 1)
        mean = round((of_keys * head_dim + of_values * value_dim) / (of_keys + of_values))
        for params in (self, *self.head_dims):
            if (params.head_dim, params.value_dim) == (head_dim, value_dim):
                return params, mean
        return self.at(value_dim), mean

    def spread(self, seconds: Floats) -> Floats:
        """Standard deviation, relative, between equal calls on one GPU that take so long; 0 where it is not known."""
        if not self.calls_s:
            return np.zeros(len(seconds))
        return np.interp(np.log(np.maximum(seconds, self.calls_s[0])), np.log(self.calls_s), self.calls_spread)

    def everywhere(self, change: Callable[[AttentionParams], AttentionParams]) -> AttentionParams:
        """These parameters with a change made at every measured head dimension."""
        return replace(change(self), head_dims=tuple(map(change, self.head_dims)))


FITTED = tuple(name for name, kind in get_type_hints(AttentionParams).items() if kind is float)
SHARES = ("older_share", "older_share_full")
"""Parameters that say how two thread blocks share an SM: no times."""
PER_PAIR = ("pair_s", "split_pair_s", "query_pair_s")
"""Parameters that grow with the head dimension; deciding about a pair does not."""
ELEMENTS_OF_EXPONENTIAL = 20
"""Elements of a head that take as long as what a pair needs whatever the head dimension, its exponential above all: 25
forward and 17 backward of PyTorch's flash-attention 2 by its points at 64 and 128; where units overlap, more."""


def attention_seconds(
    params: AttentionParams,
    op_start: Ints,
    q_len: Ints,
    k_len: Ints,
    causal: Bools,
    num_heads: Ints,
    num_kv_heads: Ints,
    head_dim: int,
    varlen: Bools | None = None,
    window: Ints | None = None,
    value_dim: int = 0,
) -> Floats:
    """Seconds of N kernel calls of one kernel and pass.

    Args:
        params: of that kernel and pass.
        op_start: [N+1] offsets of each call's sequences.
        q_len: [M] queries of each sequence, tokens.
        k_len: [M] keys of each sequence, tokens; at least q_len under a causal mask.
        causal: [M] whether the mask is causal, aligned to the bottom right; otherwise full. One call is causal if
            any of its sequences is.
        num_heads: [N] query heads.
        num_kv_heads: [N] key and value heads.
        head_dim: of queries and keys.
        varlen: [N] whether the call is told the lengths of its sequences; by default where it has several.
        window: [M, 2] keys before and after a query's own that it sees, where the last query's own key is the last
            one; UNCUT where there is no bound. By default what `causal` says.
        value_dim: of values and outputs; 0: as `head_dim`.

    Returns:
        [N] seconds; 0 for calls without work.
    """
    varlen = np.diff(op_start) > 1 if varlen is None else varlen
    given = op_start, q_len, k_len, causal, num_heads, num_kv_heads, head_dim, varlen
    return calls(params, *given, window=window, value_dim=value_dim)[0]


def clocked_seconds(
    params: AttentionParams,
    op_start: Ints,
    q_len: Ints,
    k_len: Ints,
    causal: Bools,
    num_heads: Ints,
    num_kv_heads: Ints,
    head_dim: int,
    varlen: bool = False,
    window: Ints | None = None,
    value_dim: int = 0,
) -> tuple[Floats, Floats]:
    """As `attention_seconds`: [N] seconds of calls without a pause, which the power limit slows, and without it.

    With ``varlen`` calls of one sequence are varlen ones, too.

    The second leaves the whole call as much faster as its tiles are at the full clock; calls short enough for their
    overhead to matter do not meet the limit.
    """
    arguments = op_start, q_len, k_len, causal, num_heads, num_kv_heads, head_dim, (np.diff(op_start) > 1) | varlen
    seconds, _, slower = calls(params, *arguments, window=window, value_dim=value_dim)
    return seconds, seconds / slower


def calls(
    params: AttentionParams,
    op_start: Ints,
    q_len: Ints,
    k_len: Ints,
    causal: Bools,
    num_heads: Ints,
    num_kv_heads: Ints,
    head_dim: int,
    varlen: Bools,
    held: Ints | None = None,
    hold_s: Floats | None = None,
    window: Ints | None = None,
    value_dim: int = 0,
) -> tuple[Floats, Floats, Floats]:
    """As `attention_seconds`, with features [N, FEATURES] and slowdown by the power limit [N] of every call.

    Something else, such as a kernel of NCCL's, may hold `held` SMs [N] for the first `hold_s` [N] of each call.
    """
    params, head_dim = params.sized(head_dim, value_dim)
    if window is None:
        window = causal_windows(causal)
    if params.anatomy.lists_blocks:
        masks = [_sequence_visits(q_len[a:b], k_len[a:b], window[a:b]) for a, b in pairwise(op_start.tolist())]
        return listed_calls(params, masks, num_heads, num_kv_heads, head_dim)
    seconds, features, slower = price(
        _compiled(params, head_dim),
        params.discrepancy.arrays(),
        np.asarray(op_start, np.int64),
        np.asarray(q_len, np.int64),
        np.asarray(k_len, np.int64),
        np.ascontiguousarray(np.full_like(window, UNCUT) if params.anatomy.holds_scores else window, np.int64),
        np.ascontiguousarray(num_heads, np.int64),
        np.ascontiguousarray(num_kv_heads, np.int64),
        np.asarray(varlen, np.bool_),
        np.zeros(len(varlen), np.int64) if held is None else held,
        np.zeros(len(varlen)) if hold_s is None else hold_s,
    )
    return seconds, features, slower


def _sequence_visits(q_len: Ints, k_len: Ints, window: Ints) -> Visits:
    return visits(sequence_slices(q_len, k_len, window), int(q_len.sum()), int(k_len.sum()))


def listed_calls(
    params: AttentionParams, masks: Sequence[Visits], num_heads: Ints, num_kv_heads: Ints, head_dim: int
) -> tuple[Floats, Floats, Floats]:
    """As `calls`, of N calls of a kernel that lists blocks: what each one visits, and its heads [N]."""
    params = params.at(head_dim)
    g, discrepancy = _compiled(params, head_dim), params.discrepancy.arrays()
    looks = np.zeros((len(masks), len(FEATURES)))
    found = np.ones((2, len(masks)))
    for i, mask in enumerate(masks):
        found[:, i] = price_listed(
            g,
            discrepancy,
            mask.of_queries,
            mask.of_keys,
            mask.num_q,
            mask.num_k,
            mask.rule,
            mask.causal,
            int(num_heads[i]),
            int(num_kv_heads[i]),
            looks[i],
        )
    return found[0], looks, found[1]


_OF_ANATOMY = tuple(f.name for f in fields(Anatomy))
Compiled = namedtuple("Compiled", (*_OF_ANATOMY, "num_sms", "slots", "head_dim", *FITTED))  # type: ignore[misc]
"""Everything about a kernel that compiled code reads; times per pair are those of the head dimension."""


@lru_cache(maxsize=32)
def _compiled(params: AttentionParams, head_dim: int) -> Any:
    alike = ELEMENTS_OF_EXPONENTIAL if head_dim < params.head_dim else 0  # larger ones have other tiles
    scale = 1.0 if params.value_dim else (head_dim + alike) / (params.head_dim + alike)
    values: dict[str, Any] = {name: getattr(params.anatomy, name) for name in _OF_ANATOMY}
    values |= {name: float(getattr(params, name)) for name in FITTED}
    for name in PER_PAIR:
        values[name] *= scale
    values |= {"num_sms": params.num_sms, "slots": params.num_sms * params.anatomy.blocks_per_sm}
    return Compiled(**values, head_dim=float(head_dim))  # type: ignore[call-arg]
