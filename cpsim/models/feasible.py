"""What attention kernels can be called with, apart from how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpsim.case.workload import LATENT, mean_head_bytes
from cpsim.errors import InfeasibleError, UnmeasuredError
from cpsim.masks.blocks import (
    BLOCK,
    Visits,
    causal_windows,
    row_sequences,
    sequence_slices,
    slice_windows,
    table_of,
    visits,
)
from cpsim.masks.slices import Ints, Slices
from cpsim.masks.tiles import Sequences, local_slices, place_in, sequences
from cpsim.models.attention.kernels import KERNELS, UNMEASURED
from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import ATTENTION_KINDS, READ, WRITE, Kind, Schedule, is_one_of

DTYPES: Final = ("bf16", "fp16")
"""Element types of all flash kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Calls that a kernel's package does not offer with log-sum-exp and a backward from given outputs."""

    varlen: bool = True
    """Several sequences in one call."""
    unequal_causal: bool = True
    """Causal masks aligned to the bottom right with fewer queries than keys."""
    places_results: bool = True
    """Results are written where the caller wants them; otherwise our executor copies them there."""
    places_others: bool = False
    """Those of windows, and where values have another size than keys, are: such calls go past PyTorch."""
    copies_outputs: bool = False
    """Backward, outputs and their gradients are copied first where their rows lie apart."""
    dtypes: tuple[str, ...] = DTYPES
    any_mask: bool = False
    """Masks of any shape, keys in any order."""
    whole_blocks: bool = False
    """With any_mask: only masks of whole blocks of 128 x 128 tokens."""
    rectangles: bool = False
    """With any_mask: only masks of whole rectangles, of any sizes."""
    hidden_runs: int = 0
    """With any_mask: runs of queries that the mask may hide from a key; 0: any number."""
    backward: bool = True
    windows: Literal["", "causal", "both"] = ""
    """Windows that it takes as arguments: keys before a query's own, or on both sides."""
    batches: bool = False
    """Without varlen, sequences of one length are a batch."""
    sinks: Literal["", "forward", "both"] = ""
    """Passes that take attention sinks as an argument; around others they are joined from the log-sum-exp."""
    values: Literal["", "unmeasured", "measured"] = ""
    """Values of another size than keys: none, or whether anybody has measured them."""
    max_head_dim: int = 256
    """1024 is the most that a scenario has."""
    latents: bool = False
    """Forward, keys and values as in ``LATENT``."""


LATENT_SIGMA: Final = 0.2
"""Standard deviation, relative, of what attention to latents takes, which nobody has measured here; assumed. It takes
as long as its FLOP take in heads of 128, at some 730 TFLOP/s of 128 query heads in flash-attn 3 on H100. FlashMLA
(README at 9241ae3) states up to 660 of dense decoding and 640 of chosen keys on H800, of the same tensor cores."""


LIMITS: Final = {
    "fa2": Limits(windows="both"),
    "fa3": Limits(windows="both", values="unmeasured", latents=True, sinks="forward"),
    "fa4": Limits(windows="both", values="measured", sinks="both"),
    "cudnn": Limits(
        varlen=False,
        batches=True,
        unequal_causal=False,
        places_results=False,
        places_others=True,
        windows="causal",
        values="measured",
    ),
    "sdpa_flash": Limits(places_results=False, copies_outputs=True, windows="both"),
    "fa2_ranges": Limits(any_mask=True),
    "fa4_sparse": Limits(any_mask=True, whole_blocks=True),
    "ffa": Limits(any_mask=True, sinks="both", max_head_dim=128),
    "ffa_fa4": Limits(any_mask=True, sinks="both", max_head_dim=128),
    "flash_mask": Limits(any_mask=True, hidden_runs=2),
    "fa2_sparse": Limits(any_mask=True, whole_blocks=True, backward=False),
    "flashinfer": Limits(places_results=False, any_mask=True, rectangles=True, backward=False),
    "flashinfer_fa2": Limits(places_results=False, any_mask=True, rectangles=True, backward=False),
    "flex": Limits(places_results=False, any_mask=True, values="unmeasured"),
    "sdpa_math": Limits(any_mask=True, max_head_dim=1024),
    "math": Limits(dtypes=(*DTYPES, "fp32", "fp64"), any_mask=True, max_head_dim=1024),
}
"""Kernels with limits of their own. cuDNN: through PyTorch 2.11's SDPA, which aligns causal masks to the top left.
``fa2_ranges`` is DCP's flash-attn 2, with ranges of keys for every query. ``ffa`` and ``ffa_fa4``: MagiAttention at
2c64135 (magi_attention/functional). ``flash_mask``: PaddlePaddle's FlashMask (Wang et al., 2024), whose mask is two
ranges of hidden rows for each column. ``fa2_sparse``: LongCA-bench, table 2.

PyTorch's ``_flash_attention_backward`` makes
outputs and their gradients contiguous (aten/src/ATen/native/transformers/cuda/attention_backward.cu). Sinks: of fa3 in
vLLM's fork (vllm-project/flash-attention, pull request 75); of fa4 backward since July 2026 (Dao-AILab/flash-attention,
pull request 2706); none of flash-attn 2 (issue 1797) and of PyTorch's functions."""
DIRECT: Final = {"cudnn": Limits(places_results=False, windows="causal", values="measured", sinks="both")}
"""Kernels that others call without PyTorch: cuDNN through Transformer Engine, which has packed sequences (``thd``) and
causal masks and windows that are aligned to the bottom right (``padding_causal_bottom_right``), and sinks
(``DotProductAttention`` with ``softmax_type`` learnable)."""


def kernel_names() -> tuple[str, ...]:
    """Names of the kernels that are known, those with a model first."""
    return tuple(dict.fromkeys((*(kernel for kernel, _ in KERNELS), *LIMITS, *UNMEASURED)))


def limits_of(kernel: str, direct: bool = False) -> Limits:
    """What a kernel cannot do, where it is called ``direct``-ly or through PyTorch; most can do everything."""
    return DIRECT[kernel] if direct and kernel in DIRECT else LIMITS.get(kernel, Limits())


def copied_heads(kernel: str, schedule: Schedule, ops: Ints) -> Ints:
    """Heads of rows that are copied around attention ops of one pass because their kernel does not place its results.

    Rows of a tensor lie apart where the executor keeps another one beside it: keys and values always, others where an
    op finds or leaves several tensors in one buffer.

    Returns:
        [3, A]: of rows that follow each other, of rows that lie apart, and how many kernels copy them.
    """
    tiles, tile = sequences(schedule.tiles), schedule.tile[ops]
    queries, keys = (
        tiles.queries()[tile] * schedule.heads_of(ops)[:, 1],
        tiles.keys()[tile] * schedule.heads_of(ops)[:, 3],
    )
    if (schedule.kind[ops] == Kind.ATTENTION).all():
        apart = _beside_others(schedule, ops, "out")
        return np.stack([queries * ~apart, queries * apart, np.ones_like(queries)])
    apart = _beside_others(schedule, ops, "dq")
    moved, copies = queries * apart + 2 * keys, np.full_like(queries, 3)
    if limits_of(kernel).copies_outputs:
        for tensor in ("dout", "out"):
            beside = _beside_others(schedule, ops, tensor)
            moved, copies = moved + queries * beside, copies + beside
    return np.stack([queries * ~apart, moved, copies])


def _beside_others(schedule: Schedule, ops: Ints, tensor: str) -> NDArray[np.bool_]:
    """Whether each op has a tensor in a buffer together with another one, ``[A]``."""
    mine = schedule.block_tensor[schedule.access_block] == schedule.block_tensors.index(tensor)
    return np.asarray(_shared(ops, schedule.access_start, schedule.access_buffer, mine))


@compiled()
def _shared(ops, access_start, buffer, mine):  # type: ignore[no-untyped-def]
    """Whether some access of each op that is ``mine`` and one that is not have the same buffer."""
    found = np.zeros(len(ops), np.bool_)
    for i in range(len(ops)):
        for one in range(access_start[ops[i]], access_start[ops[i] + 1]):
            for other in range(access_start[ops[i]], access_start[ops[i] + 1]):
                found[i] |= mine[one] and not mine[other] and buffer[one] == buffer[other]
    return found


def check_calls(
    kernel: str, dtype: str, head_dim: int, schedule: Schedule, direct: bool = False, value_dim: int = 0
) -> None:
    """Whether a kernel can run every attention op of a schedule in one call.

    Args:
        kernel: its name.
        dtype: of queries, keys and values.
        head_dim: of queries and keys.
        schedule: of any strategy and pass.
        direct: see ``DIRECT``.
        value_dim: of values and outputs; 0: as ``head_dim``.

    Raises:
        InfeasibleError: it cannot; says which call it would have to make.
    """
    limits, head_bytes = limits_of(kernel, direct), mean_head_bytes(head_dim, value_dim, dtype)
    latents = (head_dim, value_dim) == LATENT
    if latents:
        _check_latents(kernel, limits, backward=bool((schedule.kind == Kind.ATTENTION_BACKWARD).any()))
    elif value_dim not in (0, head_dim):
        _check_values(kernel, limits, head_dim, value_dim)
    if dtype not in limits.dtypes:
        raise InfeasibleError(f"kernel {kernel} runs {' and '.join(limits.dtypes)}, got dtype {dtype}")
    if head_dim > limits.max_head_dim and not latents:
        raise InfeasibleError(f"kernel {kernel} runs head_dim up to {limits.max_head_dim}, got {head_dim}")
    if not limits.backward and (schedule.kind == Kind.ATTENTION_BACKWARD).any():
        raise InfeasibleError(f"kernel {kernel} has no backward pass; use flex, or ask for pass: fwd")
    found, ops = sequences(schedule.tiles), np.flatnonzero(is_one_of(schedule.kind, ATTENTION_KINDS))
    if limits.whole_blocks:
        _check_blocks(kernel, tile_visits(schedule, ops, head_bytes))
    if limits.rectangles:
        _check_rectangles(kernel, schedule, ops, head_bytes)
    if limits.hidden_runs:
        _check_hidden(kernel, limits.hidden_runs, schedule, ops, head_bytes)
    if limits.any_mask:
        return
    used = np.zeros(len(found.one_call), np.bool_)
    used[schedule.tile[ops]] = True
    _check_sequences(kernel, limits, found, used)
    if not _reads_sequences(schedule, ops, head_bytes).all():
        raise InfeasibleError(
            f"kernel {kernel} reads the keys of one sequence after another; here sequences share keys or see "
            f"scattered ones, and this strategy does not copy them together, as allgather does"
        )
    if not limits.varlen and ((np.diff(found.start) > 1) & used & ~(found.alike & limits.batches)).any():
        one = "sequences of one length" if limits.batches else "one sequence"
        raise InfeasibleError(f"kernel {kernel} takes {one} a call, this strategy needs others; use fa2 or fa4")
    if limits.unequal_causal:
        return
    unequal = found.causal & (found.q_len != found.k_len)
    unequal &= np.repeat(used & ~found.one_window, np.diff(found.start))
    if unequal.any():
        example = int(np.flatnonzero(unequal)[0])
        raise InfeasibleError(
            f"kernel {kernel} has no causal call with {found.q_len[example]} queries on "
            f"{found.k_len[example]} keys, which this strategy needs; use fa2 or fa4"
        )


def _check_latents(kernel: str, limits: Limits, *, backward: bool) -> None:
    expanded = "use head_dim: 192, value_dim: 128 and as many kv_heads as heads, which is the same attention expanded"
    sizes = f"keys of {LATENT[0]} elements whose first {LATENT[1]} are values"
    if not limits.latents:
        takes = " and ".join(name for name, one in LIMITS.items() if one.latents)
        raise InfeasibleError(f"kernel {kernel} does not take {sizes}, {takes} does, forward; {expanded}")
    if backward:
        raise InfeasibleError(f"kernel {kernel} takes {sizes} forward alone; {expanded}, or ask for pass: fwd")


def _check_values(kernel: str, limits: Limits, head_dim: int, value_dim: int) -> None:
    sizes = f"values of {value_dim} elements beside keys of {head_dim}"
    if not limits.values:
        raise InfeasibleError(
            f"kernel {kernel} runs values as large as keys, got {sizes}; use cudnn, or pad them and leave value_dim out"
        )
    if limits.values == "unmeasured":
        raise UnmeasuredError(f"kernel {kernel} takes {sizes}, but nobody has measured what they cost here")


def refusal(
    kernel: str, dtype: str, head_dim: int, schedule: Schedule, value_dim: int = 0, *, direct: bool = False
) -> str:
    """Why ``check_calls`` refuses a schedule; empty where it does not."""
    try:
        check_calls(kernel, dtype, head_dim, schedule, direct=direct, value_dim=value_dim)
    except InfeasibleError as reason:
        return str(reason)
    return ""


def _check_sequences(kernel: str, limits: Limits, found: Sequences, used: NDArray[np.bool_]) -> None:
    """Whether sequences have masks that varlen calls take, and one of them for a whole call."""
    windowed = found.one_window & used & ~found.one_call if limits.windows else np.zeros_like(used)
    if (found.one_call | windowed)[used].all():
        if limits.windows == "causal" and (found.windows[windowed, 1] != 0).any():
            raise InfeasibleError(f"kernel {kernel} takes windows of keys before a query's own; use fa2, fa4 or flex")
        return
    irregular = ~found.regular & np.repeat(used & ~windowed, np.diff(found.start))
    if irregular.any() and limits.windows and found.window[irregular].all():
        raise InfeasibleError(f"kernel {kernel} takes one window a call, this strategy needs several at once; use flex")
    if irregular.any():
        raise InfeasibleError(
            f"kernel {kernel} runs full and bottom-right causal sequences; this strategy's share of the mask has others"
        )
    raise InfeasibleError(
        f"kernel {kernel} runs causal or full sequences in one call; this strategy's share of the mask has both"
    )


def _check_blocks(kernel: str, masks: Mapping[int, Visits]) -> None:
    partial = sum(int(mask.of_queries[:, 0].sum()) for mask in masks.values())
    if partial:
        visited = sum(int(mask.of_queries.sum()) for mask in masks.values())
        raise InfeasibleError(
            f"kernel {kernel} runs masks of whole blocks of {BLOCK} x {BLOCK} tokens here; this strategy's share of "
            f"the mask cuts {partial} of {visited} blocks; use flex"
        )


def _check_rectangles(kernel: str, schedule: Schedule, ops: Ints, head_bytes: int) -> None:
    try:
        gathered_sequences(schedule, ops, head_bytes)
    except ValueError:
        raise InfeasibleError(
            f"kernel {kernel} runs masks of whole rectangles; this strategy's share of the mask cuts some; use flex"
        ) from None


def _check_hidden(kernel: str, most: int, schedule: Schedule, ops: Ints, head_bytes: int) -> None:
    masks = _masks_of_tiles(schedule, ops, head_bytes)
    runs = max((hidden_runs(slices, num_q) for _, slices, num_q, _ in masks), default=0)
    if runs > most:
        raise InfeasibleError(
            f"kernel {kernel} runs masks that hide up to {most} runs of queries from a key; this strategy's share of "
            f"the mask hides {runs}; use flex"
        )


def hidden_runs(mask: Slices, num_q: int) -> int:
    """Most runs of queries that a mask of disjoint slices hides from one key: from the first, the middle and the last
    between any two at which slices begin or end."""
    edges = np.unique(np.concatenate((mask.k_start, mask.k_end)))
    keys = np.unique(np.concatenate((edges[:-1], (edges[:-1] + edges[1:]) // 2, edges[1:] - 1)))
    first, last = np.searchsorted(keys, mask.k_start), np.searchsorted(keys, mask.k_end)
    row = np.repeat(np.arange(len(mask)), last - first)
    at = np.arange(len(row)) - np.repeat(np.cumsum(last - first) - last, last - first)
    key = keys[at]
    begin = np.maximum(mask.q_start[row], key - mask.high[row])
    end = np.minimum(mask.q_end[row], key - mask.low[row] + 1)
    seen = begin < end
    at, begin, end = at[seen], begin[seen], end[seen]
    order = np.lexsort((begin, at))
    at, begin, end = at[order], begin[order], end[order]
    opens, closes = np.diff(at, prepend=-1) > 0, np.diff(at, append=-1) != 0
    before = np.where(opens, 0, np.roll(end, 1))
    hidden = np.bincount(at, (begin > before) + 0.0 + (closes & (end < num_q)), len(keys))
    return int(hidden.max(initial=0.0))


def _reads_sequences(schedule: Schedule, ops: Ints, head_bytes: int) -> NDArray[np.bool_]:
    """Whether keys lie as the sequences of attention ops follow each other, or are copied so."""
    found, tile = sequences(schedule.tiles), schedule.tile[ops]
    in_place = found.in_place[tile]
    if in_place.all():
        return in_place
    wanted = found.keys()[tile] * schedule.heads_of(ops)[:, 3] * 2 * head_bytes
    buffer, copied = _copied_keys(schedule, ops)
    return np.asarray(in_place | (buffer == wanted) | (copied == wanted))


def one_calls(schedule: Schedule, ops: Ints, head_bytes: int) -> NDArray[np.bool_]:
    """Whether the share of the mask of some attention ops is one varlen call on keys that lie as they do."""
    regular = sequences(schedule.tiles).one_call[schedule.tile[ops]]  # of a window, kernels of any mask list blocks
    return np.asarray(regular & _reads_sequences(schedule, ops, head_bytes))


def tile_visits(schedule: Schedule, ops: Ints, head_bytes: int) -> dict[int, Visits]:
    """The blocks that a kernel which lists them visits, by tile of some attention ops.

    A tile of one varlen call is its sequences, any other the rows of its queries and of its keys as the ops hold them.
    Tiles that look alike, as on most steps of a ring, are counted once.
    """
    known: dict[bytes, Visits] = {}
    made: dict[int, Visits] = {}
    for tile, slices, num_q, num_k in _masks_of_tiles(schedule, ops, head_bytes):
        key = np.append(table_of(slices), [num_q, num_k]).tobytes()
        if key not in known:
            known[key] = visits(slices, num_q, num_k)
        made[tile] = known[key]
    return made


def gathered_sequences(schedule: Schedule, ops: Ints, head_bytes: int) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """As `dense_sequences`, for a kernel that gathers the keys of every row of a mask of rectangles.

    Raises:
        ValueError: a mask cuts a rectangle.
    """
    lens = {
        tile: row_sequences(table_of(slices), num_q, num_k)
        for tile, slices, num_q, num_k in _masks_of_tiles(schedule, ops, head_bytes)
    }
    none = np.zeros(0, np.int64), np.zeros(0, np.int64)
    every = [lens.get(tile, none) for tile in range(len(schedule.tiles.area))]
    q_len, k_len = (np.concatenate([pair[side] for pair in every]) for side in (0, 1))
    start = np.concatenate([[0], np.cumsum([len(pair[0]) for pair in every])])
    return start, q_len, k_len, np.zeros(len(q_len), np.bool_)


def _masks_of_tiles(schedule: Schedule, ops: Ints, head_bytes: int) -> Iterator[tuple[int, Slices, int, int]]:
    """Every tile of some attention ops once, its mask, queries and keys as a kernel of any mask takes them: as an op
    holds them, or where they are in several places, through tables of blocks."""
    found, tiles, sizes = sequences(schedule.tiles), schedule.tiles, schedule.sets.num_tokens()
    held = _held_sets(schedule)[ops]
    places = {s: place_in(schedule.sets.of(s)) for s in np.unique(held[held >= 0]).tolist()}
    is_one, done = one_calls(schedule, ops, head_bytes).tolist(), set()
    for tile, one_call, (query_set, key_set) in zip(schedule.tile[ops].tolist(), is_one, held.tolist(), strict=True):
        if tile in done:
            continue
        done.add(tile)
        mine = slice(found.start[tile], found.start[tile + 1])
        if one_call:
            q_len, k_len = (column[mine].astype(np.int64) for column in (found.q_len, found.k_len))
            yield (
                tile,
                sequence_slices(q_len, k_len, causal_windows(found.causal[mine])),
                int(q_len.sum()),
                int(k_len.sum()),
            )
        elif min(query_set, key_set) < 0:
            rows = tiles.rows[tiles.start[tile] : tiles.start[tile + 1]].astype(np.int64)
            yield tile, *through_tables(rows, tiles.mask)
        else:
            slices = local_slices(tiles, tile, places[query_set], places[key_set])
            yield tile, slices, int(sizes[query_set]), int(sizes[key_set])


def through_tables(rows: Ints, mask: Slices) -> tuple[Slices, int, int]:
    """The mask of a call whose sequences have tables of the blocks of keys that they see, and its queries and keys.

    A sequence is a run of queries, from where a slice of the share begins or ends to the next such place; what several
    sequences see is in the table of each.

    Args:
        rows: mask row, queries and keys of every slice, ``[R, 5]``.
        mask: whose rows they are.
    """
    edges = np.unique(rows[:, 1:3])
    first, last = np.searchsorted(edges, rows[:, 1]), np.searchsorted(edges, rows[:, 2])
    row = np.repeat(np.arange(len(rows)), last - first)
    run = np.arange(len(row)) - np.repeat(np.cumsum(last - first) - last, last - first)
    order = np.argsort(run, kind="stable")
    row, run = row[order], run[order]
    mask_row, _, _, k0, k1 = rows[row].T
    q0, q1, apart = edges[run], edges[run + 1], run * (int(rows[:, 4].max()) + 1)
    seen, queries = union(np.stack([k0 + apart, k1 + apart], axis=1)), union(np.stack([q0, q1], axis=1))
    at_q, at_k = place_in(queries)(q0), place_in(seen)(k0 + apart)
    shift = q0 - at_q - (k0 - at_k)
    slices = Slices(at_q, at_q + q1 - q0, at_k, at_k + k1 - k0, mask.low[mask_row] + shift, mask.high[mask_row] + shift)
    return slices, int(np.ptp(queries, axis=1).sum()), int(np.ptp(seen, axis=1).sum())


def union(ranges: Ints) -> Ints:
    """Ranges that cover the same tokens, apart and ascending; ``int64[r, 2]``, both."""
    edges = np.unique(ranges)
    depth = np.zeros(len(edges), np.int64)
    np.add.at(depth, np.searchsorted(edges, ranges[:, 0]), 1)
    np.add.at(depth, np.searchsorted(edges, ranges[:, 1]), -1)
    change = np.diff((np.cumsum(depth) > 0).astype(np.int8), prepend=0)
    return np.stack([edges[change == 1], edges[change == -1]], axis=1)


def sliced_sequences(
    schedule: Schedule, ops: Ints, head_bytes: int
) -> tuple[tuple[Ints, Ints, Ints, NDArray[np.bool_]], Ints]:
    """As `dense_sequences`, for a kernel that takes a mask as slices, with the window of each."""
    tables = {tile: slice_windows(slices) for tile, slices, _, _ in _masks_of_tiles(schedule, ops, head_bytes)}
    none = np.zeros((0, 4), np.int64)
    every = [tables.get(tile, none) for tile in range(len(schedule.tiles.area))]
    start = np.concatenate([[0], np.cumsum([len(table) for table in every])])
    q_len, k_len, left, right = np.concatenate(every).T
    return (start, q_len, k_len, right >= 0), np.stack([left, right], axis=1)


def dense_sequences(schedule: Schedule, ops: Ints, head_bytes: int) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Start, q_len, k_len and causal of sequences by tile as a kernel takes them that computes all pairs.

    A tile that is not one varlen call has all rows of its queries and keys in one sequence.
    """
    found, sizes = sequences(schedule.tiles), schedule.sets.num_tokens()
    held, counts = _held_sets(schedule), np.diff(found.start)
    tiles, first = np.unique(schedule.tile[ops], return_index=True)
    whole = ~one_calls(schedule, ops[first], head_bytes) & (counts[tiles] > 0)
    tiles, whole_sets = tiles[whole], held[ops[first[whole]]]
    kept = np.repeat(~np.isin(np.arange(len(counts)), tiles), counts)
    owner = np.concatenate([np.repeat(np.arange(len(counts)), counts)[kept], tiles])
    order = np.argsort(owner, kind="stable")
    q_len = np.concatenate([found.q_len[kept], sizes[whole_sets[:, 0]]])[order]
    k_len = np.concatenate([found.k_len[kept], sizes[whole_sets[:, 1]]])[order]
    causal = np.concatenate([found.causal[kept], np.zeros(len(tiles), np.bool_)])[order]
    return np.searchsorted(owner[order], np.arange(len(counts) + 1)), q_len, k_len, causal


def _held_sets(schedule: Schedule) -> Ints:
    """Token sets of the queries and of the keys that every op reads, ``int64[N, 2]``; 0 where it reads none, -1 where
    they are in several places."""
    s = schedule
    op_of_access = s.op_of_access()
    tensors = np.array(s.block_tensors)[s.block_tensor[s.access_block]]
    held = np.zeros((len(s), 2), np.int64)
    for side, tensor in enumerate(("q", "kv")):
        reads = (tensors == tensor) & (s.access_mode == READ)
        held[op_of_access[reads], side] = s.block_set[s.access_block[reads]]
        held[np.bincount(op_of_access[reads], minlength=len(s)) > 1, side] = -1
    return held


def _copied_keys(schedule: Schedule, ops: Ints) -> tuple[Ints, Ints]:
    """Bytes of the copy of keys that each attention op reads: of its buffer, and as far as the copy alone filled it;
    0 where it reads keys that were not copied."""
    s, none = schedule, np.zeros(len(ops), np.int64)
    if not (s.kind == Kind.COPY).any():
        return none, none
    is_kv = np.array([tensor == "kv" for tensor in s.block_tensors])[s.block_tensor[s.access_block]]
    op_of_access, buffer_of_op = s.op_of_access(), np.full(len(s), -1)
    reads = is_kv & (s.access_mode == READ)
    buffer_of_op[op_of_access[reads]] = s.access_buffer[reads]
    writes = (s.access_mode == WRITE) & ((s.kind == Kind.COPY) & ~s.over_host_link())[op_of_access]
    copy, target = op_of_access[writes].astype(np.int64), s.access_buffer[writes].astype(np.int64)
    if not len(copy):
        return none, none
    order = np.argsort(target * len(s) + copy)
    copy, target, buffer = copy[order], target[order], buffer_of_op[ops]
    last = np.searchsorted(target * len(s) + copy, buffer * len(s) + ops) - 1
    there = (buffer >= 0) & (last >= 0) & (target[last] == buffer)
    return np.where(there, s.buffer_nbytes[buffer], 0), np.where(there, s.nbytes[copy[last]] // 2, 0)
