"""What is known of attention kernels: what each can be called with, how fast it is and what memory a call needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from cpsim.case.cluster import presets
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ProfileError
from cpsim.masks.names import MASK_NAMES, Value
from cpsim.models.attention.calls import attention_op_seconds
from cpsim.models.attention.kernels import KERNELS, NAIVE, UNMEASURED, working_bytes
from cpsim.models.feasible import DTYPES, kernel_names, limits_of, refusal, tile_visits
from cpsim.models.profile import Profile, load_profile, shipped_profiles
from cpsim.models.standin import ALIKE
from cpsim.schedule.schedule import Kind, Schedule
from cpsim.strategies import plan

LENGTHS: Final = tuple(1024 * 2**i for i in range(8))
"""Tokens of a row of the table: 1k to 128k."""
PASSES: Final[tuple[Literal["fwd", "bwd"], ...]] = ("fwd", "bwd")
MASKS: Final = ("full", "causal", "full_document", "causal_document")
"""Masks of the table: all kernels that take several documents run them."""
OTHER_MASKS: Final[Mapping[str, Mapping[str, Value]]] = {
    "causal_sliding_window": {},
    "shared_question": {},
    "block_sparse": {"block": 128},
}
"""Further ones, with options, for kernels that take any mask."""
EXAMPLE: Final = (12288, 8192, 12288)
"""Documents that a kernel's masks are tried on: longer than windows and blocks are by default."""
NUM_DOCUMENTS: Final = 8
"""Equal documents of a packed row in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSupport:
    """What a kernel can be called with."""

    kernel: str
    profiles: tuple[str, ...]
    """Shipped profiles that have it."""
    passes: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dim: str
    masks: Mapping[str, str]
    """By mask that a scenario may name: empty where calls of it can be priced, else why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One row of tokens on one GPU, by a profile's model of the kernel."""

    profile: str
    kernel: str
    mask: str
    tokens: int
    documents: int
    tflops: Mapping[str, float]
    """By pass."""
    memory_bytes: Mapping[str, int]
    """By pass: inputs, outputs and the kernel's work space, by its sources; measured on an H200."""
    notes: tuple[str, ...]
    """Sizes outside of what was measured."""


def support() -> list[KernelSupport]:
    """Every kernel that a scenario may name, those with a model first."""
    profiles = [load_profile(name) for name in shipped_profiles()]
    modelled = {kernel for kernel, _ in KERNELS}
    return [
        KernelSupport(
            kernel=kernel,
            profiles=tuple(p.name for p in profiles if (kernel, "fwd") in p.attention),
            passes=tuple(pass_ for pass_ in ("fwd", "bwd") if (kernel, pass_) in KERNELS),
            dtypes=limits_of(kernel).dtypes if kernel in modelled else (),
            head_dim=_head_dims(kernel, profiles) if kernel in modelled else "",
            masks={mask: _why_not(kernel, mask, profiles) for mask in MASK_NAMES},
        )
        for kernel in kernel_names()
    ]


def _head_dims(kernel: str, profiles: Sequence[Profile]) -> str:
    """Which head dimensions were measured."""
    measured = {
        params.head_dim
        for p in profiles
        if (fwd := p.attention.get((kernel, "fwd")))
        for params in (fwd, *fwd.head_dims)
    }
    return f"{', '.join(map(str, sorted(measured))) or 'none'} measured, others in proportion"


def _why_not(kernel: str, mask: str, profiles: Sequence[Profile]) -> str:
    """Why calls of a kernel under a mask cannot be priced: it does not run them, or no profile has measured them."""
    if (kernel, "fwd") not in KERNELS:
        return f"nobody has measured this kernel: {UNMEASURED[kernel]}"
    case = Workload(documents=EXAMPLE, mask=mask, num_heads=8, num_kv_heads=2, head_dim=128, dtype="bf16")
    schedule = one_call(case)
    reason = refusal(kernel, case.dtype, case.head_dim, schedule)
    having = [p for p in profiles if (kernel, "fwd") in p.attention]
    if reason or not having or not KERNELS[kernel, "fwd"].anatomy.lists_blocks:
        return reason
    masks = tile_visits(schedule, np.flatnonzero(schedule.kind == Kind.ATTENTION), case.head_dim * 2)
    reasons = []
    for profile in having:
        try:
            profile.check_rules(kernel, "fwd", {found.partial_rule() for found in masks.values()})
        except InfeasibleError as unmeasured:
            reasons.append(str(unmeasured))
    return reasons[0] if len(reasons) == len(having) else ""


@lru_cache(maxsize=128)
def one_call(case: Workload) -> Schedule:
    """Attention on one GPU, the same for all kernels."""
    return plan("none", case, presets()["h200-4"].with_gpus(1), "fwd", {})


def partly(kernel: str) -> str:
    """What a kernel lacks for some strategies although it has the mask, or what is not known of it."""
    if kernel in ALIKE:
        words = "" if limits_of(kernel).backward else "; forward only"
        return f"from published figures; what they do not tell is as of {ALIKE[kernel]}, whose code it is{words}"
    if not limits_of(kernel).backward:
        return "forward only"
    if (kernel, "fwd") not in KERNELS or limits_of(kernel).unequal_causal:
        return ""
    return "causal only with as many queries as keys: no gathered keys, no causal tails"


def speeds(profile: Profile, heads: int, kv_heads: int, head_dim: int, lengths: Sequence[int] = LENGTHS) -> list[Speed]:
    """TFLOP/s and memory of every kernel of a profile by mask and length; masks that it lacks are left out.

    Raises:
        ProfileError: heads that key and value heads do not divide.
    """
    if heads % kv_heads:
        raise ProfileError(f"kv-heads: expected a divisor of heads = {heads}, got {kv_heads}")
    return [
        _speed(profile, kernel, mask, tokens, (heads, kv_heads, head_dim))
        for kernel in sorted({kernel for kernel, _ in profile.attention})
        for mask in (*MASKS, *OTHER_MASKS)
        if not _why_not(kernel, mask, [profile])
        for tokens in lengths
    ]


def _speed(profile: Profile, kernel: str, mask: str, tokens: int, shape: tuple[int, int, int]) -> Speed:
    heads, kv_heads, head_dim = shape
    count = NUM_DOCUMENTS if mask.endswith("document") else 1
    case = Workload(
        documents=(tokens // count,) * count,
        mask=mask,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=DTYPES[0],
        mask_options=tuple(OTHER_MASKS.get(mask, {}).items()),
    )
    schedule = one_call(case)
    tflops, notes = dict[str, float](), dict[str, None]()
    passes = [pass_ for pass_ in PASSES if (kernel, pass_) in profile.attention]
    for pass_ in passes:
        params = profile.attention_params(kernel, pass_)
        seconds = attention_op_seconds(params, kernel, case.dtype, head_dim, schedule)[0, 0]
        tflops[pass_] = case.flops(pass_) / float(seconds) / 1e12
        lens = [tokens // count]
        notes |= dict.fromkeys(profile.attention_notes(kernel, pass_, lens, lens, [[heads, kv_heads]]))
    memory = {str(pass_): peak_bytes(kernel, pass_, tokens, shape) for pass_ in passes}
    return Speed(
        profile=profile.name,
        kernel=kernel,
        mask=mask,
        tokens=tokens,
        documents=count,
        tflops=tflops,
        memory_bytes=memory,
        notes=tuple(notes),
    )


def peak_bytes(kernel: str, pass_: str, tokens: int, shape: tuple[int, int, int]) -> int:
    """Bytes of one call: q, k, v, out and lse; backward dout, dq, dk, dv, and what it allocates besides.

    `tests/test_kernels.py` compares it with what an H200 measured.
    """
    heads, kv_heads, head_dim = shape
    naive = kernel in NAIVE
    itemsize = {"bf16": 2, "fp16": 2, "fp32": 4}["fp32" if kernel == "math" else DTYPES[0]]
    q, kv, row = tokens * heads * head_dim, 2 * tokens * kv_heads * head_dim, tokens * heads * 4
    tensors = (2 * q + kv) * itemsize + row
    if pass_ == "bwd":
        tensors += (2 * q + kv) * itemsize
    if naive:  # fp32 scores of all heads at once, three or four times
        return tensors + heads * tokens * tokens * 4 * (3 if pass_ == "fwd" else 4)
    return tensors + int(working_bytes(kernel, pass_, tokens, tokens, heads, kv_heads, head_dim))
