"""What attention kernels can be called with, apart from how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.errors import InfeasibleError
from cpsim.masks import Ints
from cpsim.schedule import ATTENTION_KINDS, READ, WRITE, Kind, Schedule, is_one_of
from cpsim.tiles import Sequences, sequences
from cpsim.workload import BYTES_PER_ELEMENT

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
    dtypes: tuple[str, ...] = DTYPES


WINDOWED: Final = ("fa2", "fa4")
"""Kernels with arguments for sliding windows."""
LIMITS: Final = {
    "cudnn": Limits(varlen=False, unequal_causal=False, places_results=False),
    "sdpa_flash": Limits(places_results=False),
    "math": Limits(dtypes=(*DTYPES, "fp32", "fp64")),
}
"""Kernels with limits of their own. cuDNN: through PyTorch 2.11's SDPA, which aligns causal masks to the top left."""


def limits_of(kernel: str) -> Limits:
    """What a kernel cannot do; most can do everything."""
    return LIMITS.get(kernel, Limits())


def check_calls(kernel: str, dtype: str, head_dim: int, schedule: Schedule) -> None:
    """Whether a kernel can run every attention op of a schedule in one call.

    Args:
        kernel: its name.
        dtype, head_dim: of queries, keys and values.
        schedule: of any strategy and pass.

    Raises:
        InfeasibleError: it cannot; says which call it would have to make.
    """
    limits = limits_of(kernel)
    if dtype not in limits.dtypes:
        raise InfeasibleError(f"kernel {kernel} runs {' and '.join(limits.dtypes)}, got dtype {dtype}")
    found, ops = sequences(schedule.tiles), np.flatnonzero(is_one_of(schedule.kind, ATTENTION_KINDS))
    used = np.zeros(len(found.one_call), np.bool_)
    used[schedule.tile[ops]] = True
    _check_sequences(kernel, found, used)
    wanted = found.keys()[schedule.tile[ops]] * schedule.heads[ops, 3] * 2 * head_dim * BYTES_PER_ELEMENT[dtype]
    unpacked = ~found.in_place[schedule.tile[ops]] & (_copied_keys(schedule, ops) != wanted)
    if unpacked.any():
        raise InfeasibleError(
            f"kernel {kernel} reads the keys of one sequence after another; here sequences share keys or see "
            f"scattered ones, and this strategy does not copy them together, as allgather does"
        )
    of_tile = np.repeat(used, np.diff(found.start))
    if not limits.varlen and (np.diff(found.start)[used] > 1).any():
        raise InfeasibleError(f"kernel {kernel} takes one sequence a call, this strategy needs several; use fa2 or fa4")
    unequal = found.causal & (found.q_len != found.k_len) & of_tile
    if not limits.unequal_causal and unequal.any():
        example = int(np.flatnonzero(unequal)[0])
        raise InfeasibleError(
            f"kernel {kernel} has no causal call with {found.q_len[example]} queries on "
            f"{found.k_len[example]} keys, which this strategy needs; use fa2 or fa4"
        )


def refusal(kernel: str, dtype: str, head_dim: int, schedule: Schedule) -> str:
    """Why ``check_calls`` refuses a schedule; empty where it does not."""
    try:
        check_calls(kernel, dtype, head_dim, schedule)
    except InfeasibleError as reason:
        return str(reason)
    return ""


def _check_sequences(kernel: str, found: Sequences, used: NDArray[np.bool_]) -> None:
    """Whether sequences have masks that varlen calls take, and one of them for a whole call."""
    irregular = ~found.regular & np.repeat(used, np.diff(found.start))
    if irregular.any() and kernel in WINDOWED and found.window[irregular].all():
        raise InfeasibleError(f"kernel {kernel} takes sliding windows, but nobody has measured what they cost here")
    if irregular.any():
        raise InfeasibleError(
            f"kernel {kernel} runs full and bottom-right causal sequences; this strategy's share of the mask has others"
        )
    if not found.one_call[used].all():
        raise InfeasibleError(
            f"kernel {kernel} runs causal or full sequences in one call; this strategy's share of the mask has both"
        )


def _copied_keys(schedule: Schedule, ops: Ints) -> Ints:
    """Bytes of the copy of keys that each attention op reads; 0 where it reads keys that were not copied."""
    s = schedule
    op_of_access = np.repeat(np.arange(len(s)), np.diff(s.access_start))
    copied = np.zeros(len(s.buffer_nbytes), np.int64)
    target = s.access_buffer[(s.access_mode == WRITE) & (s.kind[op_of_access] == Kind.COPY)]
    copied[target] = s.buffer_nbytes[target]
    is_kv = np.array([tensor == "kv" for tensor in s.block_tensors])[s.block_tensor[s.access_block]]
    reads = is_kv & (s.access_mode == READ)
    of_op = np.zeros(len(s), np.int64)
    of_op[op_of_access[reads]] = copied[s.access_buffer[reads]]
    return of_op[ops]
