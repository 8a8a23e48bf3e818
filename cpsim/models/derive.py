"""Costs of a GPU that nobody measured: those of the nearest measured one, moved through what describes both.

* A kernel's thread block takes so many clocks on an SM. Kernels that feed the tensor cores themselves (wgmma, tcgen05,
  AMD's MFMA) are bound by the slowest of tensor cores, exponentials and, backward, shared memory, which overlap: clocks
  follow a smooth maximum of the three; where only tensor cores are slower, as on H20, the same code takes as many more
  clocks as they do. Those of `mma.sync` (flash-attention 2) are bound by the instructions of a warp and take as many
  clocks on every NVIDIA GPU, unless its tensor cores are slower than that. Everything else of a block follows the clock
  alone.
* What a GPU moves through memory follows its bandwidth, and the programs that move it SMs and clock; they overlap.
* Long matrix products reach what the power limit leaves: as published, or as the most alike GPU's at a clock whose
  power fits the limit. The rate of attention kernels falls by as much of that as they draw beside products.
* Launches, hosts and interference are kept.
* Collectives follow the port to other GPUs of the node; a single flow is bound by NCCL's channels and by the port.
  Those of cards that have PCIe only are as NCCL's algorithms have them.

Kernels come from the GPUs of the same family that have them in the same code, otherwise from all that have them; all
else from the most alike measured one. What is derived is as uncertain as such derivations were wrong for GPUs that were
left out (`python -m studies.left_out`).

Reference: Zadouri et al., FlashAttention-4 (2026), sections 2 and 3: cycles of tensor cores, exponentials and shared
memory for a tile on Blackwell.
Differs: cuDNN's tiles are not public; one law stands for all kernels that feed tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsim.case.gpu import AMD, BLACKWELL, Gpu, gpus
from cpsim.case.transports import Inside, constants
from cpsim.models.attention.discrepancy import NONE
from cpsim.models.attention.params import PER_PAIR, AttentionParams, attention_seconds
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.gemm import GemmParams
from cpsim.models.network.collective import CollectiveParams, Curve
from cpsim.models.network.nccl import collective_params
from cpsim.models.parameters import POWER_OF_CLOCK, LayerCosts, Profile
from cpsim.models.rates import moved_rates
from cpsim.models.recurrent import costs_on

DATA_SHEET: Final = "data-sheet"
"""What scenarios name as their profile for costs that are derived from the description of the cluster's GPU."""
Floats = NDArray[np.float64]
T = TypeVar("T")
Key = tuple[str, str]
"""Kernel and pass."""

OVERLAP: Final = 6.0
"""How well tensor cores, exponentials and shared memory hide behind each other: exponent of a smooth maximum."""
FLOP_PER_PAIR: Final = {"fwd": 4, "bwd": 10}
"""Of tensor cores for a pair of query and key, by element of the head dimension: two products, and five."""
SHARED_CLOCKS: Final = 3328 / 128**2 / 128
"""Of shared memory for a pair backward, by element of the head dimension: 3,328 clocks for a tile of 128 x 128 pairs of
dimension 128 (FlashAttention-4, section 3)."""
WARP_CLOCKS: Final = {"fwd": 0.30 / 128, "bwd": 0.90 / 128}
"""Of kernels of `mma.sync` for a pair, by element of the head dimension, where tensor cores are not slower: what
flash-attention 2 takes on H200 and H100, two blocks of an SM together."""
WARP_OVERLAP: Final = 8.0
"""As OVERLAP, of these kernels and slower tensor cores: on RTX 4090, whose tensor cores need three times as long as its
warps, they reach the peak (apache/tvm, tl_doc/flash_perf.md)."""
WARP_RATE: Final = {"hopper": 0.63}
"""Share of tensor cores' rate that `mma.sync` reaches, where that is not all: Luo et al., Benchmarking and Dissecting
the Nvidia Hopper GPU Architecture (2024), section IV. On Blackwell it hardly matters, as warps take longer."""
OF_WARPS: Final = ("fa2", "sdpa_flash", "flashinfer_fa2", "flash_mask", "fa2_sparse")
"""Kernels of `mma.sync`."""
OF_MEMORY: Final = ("sdpa_math", "math")
"""Kernels that write all scores to memory and read them again."""
RUNS_ON: Final[Mapping[str, tuple[str, ...]]] = {
    "fa3": ("hopper",),
    "ffa": ("hopper",),
    "ffa_fa4": BLACKWELL,
    "flash_mask": ("ampere", "ada", "hopper", *BLACKWELL),
    "fa2_sparse": ("ampere", "ada", "hopper", *BLACKWELL),
    "flashinfer": ("hopper",),
    "fa4": ("hopper", *BLACKWELL),
    "fa4_sparse": ("hopper", *BLACKWELL),
    "cudnn": ("ampere", "ada", "hopper", *BLACKWELL),
    "flashinfer_fa2": ("ampere", "ada", "hopper", *BLACKWELL),
}
"""Architectures of kernels that do not run on all: of the versions that `cpsim.models.attention.kernels` names."""
LENT: Final[tuple[tuple[tuple[str, ...], Mapping[str, str]], ...]] = (
    (AMD, {"fa2": "fa4", "sdpa_flash": "fa4"}),
    (("ampere", "ada"), {"cudnn": "fa2"}),
)
"""Kernels that are other code on some architectures, and those that lend them their blocks: AMD's feed the matrix cores
themselves, and cuDNN's before Hopper are of `mma.sync`."""
REWRITTEN: Final[Mapping[str, tuple[int, tuple[str, ...]]]] = {"cudnn": (91700, BLACKWELL)}
"""With which version a kernel became other code, as cuDNN counts, and where. One code's times say nothing of the other.

Source: notes of releases 1.17 and 1.18 of NVIDIA/cudnn-frontend, whose tables of GB200 and GB300 were made again for
them; calls take 8 to 18 % fewer clocks of an SM there than with 9.10 and 9.13 on B200, forward and backward."""
TIMES_OF_BLOCKS: Final = (
    "block_s",
    "block_shared_s",
    "block_causal_s",
    "block_window_s",
    "block_varlen_s",
    "block_decode_s",
    "block_banded_s",
    "passed_s",
    "window_pair_s",
    "partial_pair_s",
    "celled_pair_s",
    "banded_pair_s",
    "unaligned_partial_pair_s",
    "unaligned_celled_pair_s",
    "unaligned_banded_pair_s",
)
"""Times of `AttentionParams` that follow the clock alone."""
ROOF: Final = 0.93
"""Share of a data sheet's bandwidth that the best memory-bound kernel reaches on H200."""
STREAMING: Final = 3.0
"""How well memory and programs of memory-bound kernels hide behind each other, as OVERLAP: between H100 and H200."""
UNLIMITED: Final = 0.9
"""Share of tensor cores' peak that long products would reach at the boost clock."""
POWER_SHARE: Final = (0.25, 0.62)
"""Power of an attention kernel over that of products at the same clock: a constant, and a part that goes with its FLOP
over theirs; of cuDNN and flash-attention 2 and 4 on H200, where the power limit slows them."""
SCORES_FROM_MEMORY: Final = 0.66
"""Share of the time of kernels of OF_MEMORY that follows the bandwidth; the rest follows the clock: H100 and H200."""
POWER_W: Final = 700.0
"""Power limit of a GPU that states none."""
CARDS_OF_NODE: Final = 8
"""GPUs over PCIe of a node, at most."""

FAMILIES: Final = (("ampere", "ada"), ("hopper",), BLACKWELL, AMD)
"""Architectures that are much alike."""
DERIVED: Final[Mapping[str, tuple[float, float, float, float]]] = {
    "attention of warps": (0.03, 0.05, 0.06, 0.30),
    "attention": (0.03, 0.08, 0.17, 0.30),
    "matrix products": (0.06, 0.10, 0.15, 0.25),
    "memory-bound": (0.05, 0.08, 0.12, 0.20),
    "network": (0.15, 0.15, 0.25, 0.40),
}
"""Standard deviation, relative, of what is derived from a GPU of the same architecture, of one much alike, of another,
and of another maker's; of left-out GPUs (`python -m studies.left_out`), and for networks and another maker assumed."""
LEAST_WEIGHT: Final = 0.1
"""Of a lender that counts, relative to the surest."""
OTHER_CODE: Final = {True: 0.04, False: 0.12}
"""As DERIVED, of kernels of published tables of another family, whose software is of another year: those of warps, and
others."""
PUBLISHED: Final = 0.05
"""What kernels of a GPU with published tables of its own take elsewhere, relative, beyond what these tables vary by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lender:
    """A profile of a GPU that is described, and what of it is its own."""

    profile: Profile
    gpu: Gpu
    kernels: frozenset[Key]
    """Kernels and passes measured or published of this GPU."""
    whole: bool
    """Whether everything was measured on this GPU, or published kernels alone are its own."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Of its kernels' code, the newest, where it is known."""


def unlike(a: Gpu, b: Gpu) -> int:
    """How much alike two GPUs are: 0 of one architecture and tensor rate of an SM, 1 of one family, 2 of another, 3 of
    another maker."""
    if a.architecture == b.architecture and flops_per_clock(a) == flops_per_clock(b):
        return 0
    if any(a.architecture in family and b.architecture in family for family in FAMILIES):
        return 1
    return 2 if (a.architecture in AMD) == (b.architecture in AMD) else 3


def derived(gpu: Gpu, lenders: Sequence[Lender], versions: Mapping[str, int] = MappingProxyType({})) -> Profile:
    """The profile of a GPU from those of others.

    Each attention kernel is the GPU's own, or that of the surest lender of its family, or else of all, as much slower
    or faster as these say together, weighted by how sure they are; all else is that of the most alike GPU that was
    measured as a whole.

    Args:
        gpu: whose costs are derived.
        lenders: profiles of others, one of which is whole.
        versions: of kernels' code; of others the newest that a GPU of the family has.
    """

    def order(lender: Lender) -> tuple[int, float]:
        rate = np.log(lender.gpu.num_sms * lender.gpu.clock_hz / (gpu.num_sms * gpu.clock_hz))
        memory = np.log(lender.gpu.memory_bandwidth_bytes_per_s / gpu.memory_bandwidth_bytes_per_s)
        return unlike(gpu, lender.gpu), abs(float(rate)) + abs(float(memory))

    base = min((lender for lender in lenders if lender.whole), key=order)
    made = moved(base.profile, base.gpu, gpu)
    if base.gpu == gpu:
        return made
    others = sorted((lender for lender in lenders if lender is not base), key=order)
    each = [(base, made), *((lender, moved(lender.profile, lender.gpu, gpu)) for lender in others)]
    attention, sigma, valid, names = {}, dict(made.sigma), dict(made.valid), {base.profile.name: None}
    for kernel, pass_ in sorted({key for _, profile in each for key in profile.attention}):
        about, key = f"attention {pass_} {kernel}", (kernel, pass_)
        having = [(lender, theirs) for lender, theirs in each if key in theirs.attention and key in _own(lender, gpu)]
        if not having:
            continue
        having = _most_alike(gpu, having, _of_code(kernel, gpu, [lender for lender, _ in having], versions))
        least = LEAST_WEIGHT**-0.5 * min(theirs.sigma[about] for _, theirs in having)
        having = [pair for pair in having if pair[1].sigma[about] <= least]
        having.sort(key=lambda pair: (pair[1].sigma[about], order(pair[0])))
        surest, weights = having[0][1], _weights(gpu, [(lender, theirs.sigma[about]) for lender, theirs in having])
        seconds = np.array([_typical_seconds(theirs.attention[key]) for _, theirs in having])
        factor = float(np.exp(np.average(np.log(seconds / seconds[0]), weights=weights)))
        attention[key] = surest.attention[key].everywhere(lambda params: _slower(params, factor))  # noqa: B023
        sigma[about] = surest.sigma[about]
        valid |= {name: ends for name, ends in surest.valid.items() if name.startswith(f"{about} ")}
        names |= dict.fromkeys(lender.profile.name for lender, _ in having)
    words = _words(base.gpu, gpu)
    grade = f"derived by the description of {gpu.name} from {', '.join(names)}; against {base.gpu.name} {words}"
    return replace(made, attention=attention, sigma=sigma, valid=valid, grade=grade)


def _of_code(kernel: str, gpu: Gpu, lenders: Sequence[Lender], versions: Mapping[str, int]) -> frozenset[str]:
    """Profiles whose times of a kernel are of the code that a GPU runs."""
    since, where = REWRITTEN.get(kernel, (0, ()))
    new = {lender.profile.name: lender.versions.get(kernel, since) >= since for lender in lenders}
    if gpu.architecture not in where:
        return frozenset(new)
    rewritten = [new[lender.profile.name] for lender in lenders if lender.gpu.architecture in where]
    wanted = versions[kernel] >= since if kernel in versions else any(rewritten)
    return frozenset(
        lender.profile.name
        for lender in lenders
        if lender.gpu.architecture not in where or new[lender.profile.name] == wanted
    )


def _most_alike(
    gpu: Gpu, having: Sequence[tuple[Lender, Profile]], of_code: frozenset[str]
) -> list[tuple[Lender, Profile]]:
    """Lenders of a kernel that count: the GPU itself; those of its family with the same code; or all with that."""
    own = [pair for pair in having if pair[0].gpu == gpu]
    same = own or [pair for pair in having if pair[0].profile.name in of_code] or list(having)
    return [pair for pair in same if unlike(gpu, pair[0].gpu) < 2] or same


def kernels_alike(gpu: Gpu, others: Iterable[tuple[Gpu, frozenset[Key]]]) -> frozenset[Key]:
    """Kernels and passes that other GPUs of the same family have of their own, by the names that a GPU has for them."""
    near = ((theirs, own) for theirs, own in others if theirs != gpu and unlike(gpu, theirs) < 2)
    return frozenset(key for theirs, own in near for key in _lent(dict.fromkeys(own), theirs, gpu))


def _weights(gpu: Gpu, having: Sequence[tuple[Lender, float]]) -> Floats:
    """What lenders of a kernel count, with the uncertainty of each: published tables of GPUs alike err together."""
    tables = sum(not lender.whole and unlike(gpu, lender.gpu) < 2 for lender, _ in having)
    together = [max(1, tables) if not lender.whole and unlike(gpu, lender.gpu) < 2 else 1 for lender, _ in having]
    return np.array([sigma**-2 / number for (_, sigma), number in zip(having, together, strict=True)])


def _own(lender: Lender, gpu: Gpu) -> frozenset[Key]:
    """A lender's own kernels by the names that they have on a GPU."""
    return frozenset(_lent(dict.fromkeys(lender.kernels), lender.gpu, gpu))


TYPICAL: Final = (16384, 32)
"""Tokens and heads of the call that lenders are compared by."""


def _typical_seconds(params: AttentionParams) -> float:
    """Seconds of a long causal call without a pause."""
    tokens, heads = (np.array([number]) for number in TYPICAL)
    return float(
        attention_seconds(params, np.array([0, 1]), tokens, tokens, tokens > 0, heads, heads, params.head_dim)[0]
    )


def _slower(params: AttentionParams, factor: float) -> AttentionParams:
    """A kernel whose blocks take longer by a factor."""
    names = (*TIMES_OF_BLOCKS, *PER_PAIR)
    return replace(params, **{name: getattr(params, name) * factor for name in names})


def moved(profile: Profile, theirs: Gpu, gpu: Gpu) -> Profile:
    """A profile of one GPU as it would be on another, with the kernels that run there: `theirs` is the one that it
    describes."""
    if theirs == gpu:
        return profile
    attention = {}
    for (kernel, pass_), params in _lent(profile.attention, theirs, gpu).items():
        if (gpu.architecture or "hopper") in RUNS_ON.get(kernel, (gpu.architecture or "hopper",)):
            attention[kernel, pass_] = params.everywhere(
                lambda each, key=(kernel, pass_): _moved_kernel(key, each, theirs, gpu)  # type: ignore[misc]
            )
    return replace(
        profile,
        name=gpu.name,
        gpu=gpu.name,
        grade=f"derived by the description of {gpu.name} from {profile.name}: {_words(theirs, gpu)}",
        attention=attention,
        collective=_moved_network(profile.collective, theirs, gpu),
        elementwise=_moved_memory(profile.elementwise, theirs, gpu),
        sigma=_moved_sigma(profile, theirs, gpu, frozenset(attention)),
        held_out=(),
        layers=profile.layers and _moved_layers(profile.layers, theirs, gpu),
        scans=profile.scans and costs_on(gpu, theirs, profile.scans),
        sparse=profile.sparse and moved_rates(profile.sparse, theirs, gpu),
    )


def _lent(attention: Mapping[Key, T], theirs: Gpu, gpu: Gpu) -> dict[Key, T]:
    """What is known of kernels, by the names that they have on a GPU."""
    lent = {(name, pass_): (by, pass_) for name, by in _lenders(theirs, gpu).items() for pass_ in ("fwd", "bwd")}
    kept = {key: known for key, known in attention.items() if key not in lent}
    return kept | {key: attention[by] for key, by in lent.items() if by in attention}


def _lenders(theirs: Gpu, gpu: Gpu) -> Mapping[str, str]:
    """Kernels that are other code on a GPU, and those that lend them their blocks."""
    return next((by for where, by in LENT if gpu.architecture in where and theirs.architecture not in where), {})


def of_warps(kernel: str, gpu: Gpu) -> bool:
    """Whether a kernel is of `mma.sync` on a GPU."""
    if gpu.architecture in AMD:
        return False
    return kernel in OF_WARPS or (kernel == "cudnn" and gpu.architecture in ("ampere", "ada"))


def _words(theirs: Gpu, gpu: Gpu) -> str:
    """What differs, for people."""
    link = gpu.port_bytes_per_s / theirs.port_bytes_per_s
    ratios = {
        "SMs": gpu.num_sms / theirs.num_sms,
        "clock": gpu.clock_hz / theirs.clock_hz,
        "tensor rate of an SM": flops_per_clock(gpu) / flops_per_clock(theirs),
        "memory bandwidth": gpu.memory_bandwidth_bytes_per_s / theirs.memory_bandwidth_bytes_per_s,
        ("NVLink" if gpu.nvlink_bytes_per_s else "PCIe instead of NVLink"): link,
    }
    return ", ".join(f"{name} x {ratio:.3g}" for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3) or "alike"


# --- attention ---


def flops_per_clock(gpu: Gpu) -> float:
    """Dense bf16 FLOP of an SM in a clock: a power of two, as data sheets count with a clock below the highest."""
    return float(2.0 ** np.round(np.log2(gpu.flops_per_clock)))


def clocks_of_pair(key: Key, head_dim: int, gpu: Gpu) -> float:
    """Clocks of an SM for a pair of query and key that the fastest code of this kind takes.

    Args:
        key: kernel and pass.
        head_dim: elements.
        gpu: whose SM.
    """
    kernel, pass_ = key
    tensor = _tensor_clocks(pass_, head_dim, gpu)
    if of_warps(kernel, gpu):
        tensor /= WARP_RATE.get(gpu.architecture or "", 1.0)
        return float(np.linalg.norm([WARP_CLOCKS[pass_] * head_dim, tensor], WARP_OVERLAP))
    shared = SHARED_CLOCKS * head_dim if pass_ == "bwd" else 0.0
    return float(np.linalg.norm([tensor, 1 / gpu.exponentials_per_clock, shared], OVERLAP))


def _tensor_clocks(pass_: str, head_dim: int, gpu: Gpu) -> float:
    """Clocks of an SM's tensor cores for a pair."""
    return FLOP_PER_PAIR[pass_] * head_dim / flops_per_clock(gpu)


def _longer(key: Key, lender: Key, params: AttentionParams, theirs: Gpu, gpu: Gpu) -> float:
    """Clocks of an SM for a pair on a GPU, relative to another's, whose kernel is given."""
    if theirs.architecture != gpu.architecture or of_warps(key[0], gpu):
        return clocks_of_pair(key, params.head_dim, gpu) / clocks_of_pair(lender, params.head_dim, theirs)
    # the same code on SMs that are alike but for their tensor cores
    mine, other = (_tensor_clocks(key[1], params.head_dim, one) / UNLIMITED for one in (gpu, theirs))
    before = params.pair_s * theirs.clock_hz / params.anatomy.blocks_per_sm
    return max(mine, before + mine - other) / before


def _moved_kernel(key: Key, params: AttentionParams, theirs: Gpu, gpu: Gpu) -> AttentionParams:
    """One kernel at one head dimension on another GPU."""
    lender = (_lenders(theirs, gpu).get(key[0], key[0]), key[1])
    clock = theirs.clock_hz / gpu.clock_hz
    memory = theirs.memory_bandwidth_bytes_per_s / gpu.memory_bandwidth_bytes_per_s
    pairs = clock * _longer(key, lender, params, theirs, gpu)
    if key[0] in OF_MEMORY:
        pairs = SCORES_FROM_MEMORY * memory * gpu.num_sms / theirs.num_sms + (1 - SCORES_FROM_MEMORY) * clock
    times = dict.fromkeys(TIMES_OF_BLOCKS, clock) | dict.fromkeys(PER_PAIR, pairs) | {"traffic_s_per_byte": memory}
    scaled = {name: getattr(params, name) * factor for name, factor in times.items()}
    threshold, power = _limit(key, params, theirs, gpu, pairs)
    same = params.num_sms == gpu.num_sms and unlike(theirs, gpu) == 0
    return replace(
        params,
        num_sms=gpu.num_sms,
        busy_threshold=threshold,
        busy_power=power,
        discrepancy=params.discrepancy if same else NONE,
        full_factor=params.full_factor if same else 1.0,
        **scaled,
    )


def _limit(key: Key, params: AttentionParams, theirs: Gpu, gpu: Gpu, pairs: float) -> tuple[float, float]:
    """Busy fraction at which the power limit sets in, and how fast time then grows, on another GPU.

    The power that a kernel would draw at the boost clock goes with that of products there; of kernels of warps, which
    use another share of every GPU's tensor cores, with their FLOP over those of products, too.
    """
    slower = (1 / params.busy_threshold) ** params.busy_power
    before = _share_of_flops(key[1], params, theirs, params.pair_s)
    after = _share_of_flops(key[1], params, gpu, params.pair_s * pairs) if of_warps(key[0], gpu) else before
    drawn = slower**POWER_OF_CLOCK
    if slower < 1.01:  # the limit is not felt: how far away it is, nothing measured says
        drawn = min(1.0, _throttle(theirs) ** POWER_OF_CLOCK * _share_of_power(before))
    drawn *= (_throttle(gpu) / _throttle(theirs)) ** POWER_OF_CLOCK * _share_of_power(after) / _share_of_power(before)
    new = max(1.0, drawn) ** (1 / POWER_OF_CLOCK)
    if new == 1.0:
        return 1.0, 0.0
    threshold = min(params.busy_threshold, 0.8)
    return threshold, float(np.log(new) / -np.log(threshold))


def _share_of_power(flops: float) -> float:
    return POWER_SHARE[0] + POWER_SHARE[1] * flops


def _share_of_flops(pass_: str, params: AttentionParams, gpu: Gpu, pair_s: float) -> float:
    """FLOP of a kernel's tiles over those of long products at the same clock."""
    flops = FLOP_PER_PAIR[pass_] * params.head_dim * params.anatomy.blocks_per_sm / (pair_s * gpu.clock_hz)
    return min(1.0, flops / (UNLIMITED * flops_per_clock(gpu)))


def _throttle(gpu: Gpu) -> float:
    """Boost clock over the clock that long products settle at."""
    return max(1.0, _unlimited(gpu) / sustained_flops(gpu))


# --- products ---


SAME_PROCESS: Final = {"ada": "hopper", "blackwell ultra": "blackwell"}
"""Architectures made in the process of another, of which long products are published."""


def sustained_flops(gpu: Gpu, without: str = "") -> float:
    """What long bf16 products reach within the power limit: as described, or by power where that is not known.

    Power goes with FLOP in a clock and with clock to the power of POWER_OF_CLOCK, as much as on the most alike GPUs
    that state what they reach, on average.

    Args:
        gpu: whose.
        without: a GPU that states nothing.
    """
    if gpu.sustained_flops_per_s is not None:
        return gpu.sustained_flops_per_s
    known = [one for one in gpus().values() if one.sustained_flops_per_s is not None and one.name != without]
    architecture = SAME_PROCESS.get(gpu.architecture or "", gpu.architecture or "hopper")
    asked = replace(gpu, architecture=architecture)  # type: ignore[arg-type]
    least = min(unlike(asked, one) for one in known)
    alike = [one for one in known if unlike(asked, one) == least]
    throttles = [_throttle(one) * (_watts(one) / _watts(gpu)) ** (1 / POWER_OF_CLOCK) for one in alike]
    return _unlimited(gpu) / max(1.0, float(np.exp(np.mean(np.log(throttles)))))


def _watts(gpu: Gpu) -> float:
    """Power limit over what products at the boost clock draw, up to a factor of the process."""
    clocks = flops_per_clock(gpu) * gpu.num_sms * gpu.clock_hz**POWER_OF_CLOCK
    return float((gpu.power_w or POWER_W) / clocks)


def _unlimited(gpu: Gpu) -> float:
    """What long products would reach at the boost clock."""
    return UNLIMITED * flops_per_clock(gpu) * gpu.num_sms * gpu.clock_hz


def _moved_layers(layers: LayerCosts, theirs: Gpu, gpu: Gpu) -> LayerCosts:
    return LayerCosts(gemm=_moved_products(layers.gemm, theirs, gpu), ops=_moved_memory(layers.ops, theirs, gpu))


def _moved_products(gemm: GemmParams, theirs: Gpu, gpu: Gpu) -> GemmParams:
    """Matrix products: steps by what power leaves to tensor cores, ends of tiles by the clock, operands by bandwidth.

    A partial last wave costs nearly a whole one where no power limit lets the clock rise. Tensor cores that sum in a
    memory of their own go on with the next tile while the last one is written, so that a call has one end left.

    Reference: CUTLASS, "Utilities for SM100" (epilogues read accumulators from tensor memory); Triton, Gluon's example
    "Overlapping Accumulator Block-Scaled Matrix Multiplication" (two of them, so that one is written out while the next
    is summed).
    """
    end_s = gemm.tile_s * theirs.clock_hz / gpu.clock_hz
    hidden = gpu.architecture in BLACKWELL and theirs.architecture not in BLACKWELL
    rate = sustained_flops(gpu) / sustained_flops(theirs) * theirs.num_sms / gpu.num_sms
    mine, other = np.log(_throttle(gpu)), np.log(_throttle(theirs))
    return replace(
        gemm,
        num_sms=gpu.num_sms,
        flop_s=gemm.flop_s / rate,
        tile_s=0.0 if hidden else end_s,
        call_s=gemm.call_s + (end_s if hidden else 0.0),
        tail_share=float(gemm.tail_share ** min(1.0, mine / max(other, 1e-9))),
        traffic_s_per_byte=gemm.traffic_s_per_byte
        * theirs.memory_bandwidth_bytes_per_s
        / gpu.memory_bandwidth_bytes_per_s,
        fp8_ratio=gemm.fp8_ratio * gpu.fp8_ratio / theirs.fp8_ratio if theirs.fp8_ratio else gpu.fp8_ratio,
    )


# --- memory and network ---


def _moved_memory(params: ElementwiseParams, theirs: Gpu, gpu: Gpu) -> ElementwiseParams:
    """Memory-bound kernels: bytes need as long as the bandwidth lets them, and programs as SMs and clock do; the two
    overlap."""
    of_sms = theirs.num_sms * theirs.clock_hz / (gpu.num_sms * gpu.clock_hz)
    of_memory = theirs.memory_bandwidth_bytes_per_s / gpu.memory_bandwidth_bytes_per_s

    def scaled(rate: float) -> float:
        least = min(1.0, rate / (ROOF * theirs.memory_bandwidth_bytes_per_s))
        programs = (1 - least**STREAMING) ** (1 / STREAMING)
        return rate / float(np.linalg.norm([least * of_memory, programs * of_sms], STREAMING))

    return replace(params, bandwidth_bytes_per_s={k: scaled(r) for k, r in params.bandwidth_bytes_per_s.items()})


def _moved_network(params: CollectiveParams, theirs: Gpu, gpu: Gpu) -> CollectiveParams:
    """Collectives and messages inside a node: a collective's bytes take as much longer as the port is slower, at the
    rate of the largest, and its steps as long; a message takes as long on its channels, and at least what its flow does
    through the port. Over PCIe instead of NVLink all of it is another: NCCL's algorithms say it."""
    if not gpu.nvlink_bytes_per_s:
        if not gpu.pcie_bytes_per_s:  # a file that says neither
            return params
        return collective_params(Inside(link="pcie", port_bandwidth_bytes_per_s=gpu.pcie_bytes_per_s), CARDS_OF_NODE)
    ratio = gpu.port_bytes_per_s / theirs.port_bytes_per_s
    port = params.port_bytes_per_s * ratio
    flow = port * min(1.0, (gpu.flow_bytes_per_s or gpu.port_bytes_per_s) / gpu.port_bytes_per_s)

    def slower(curve: Curve, by: float) -> Curve:
        nbytes, seconds = np.array(curve.nbytes), np.array(curve.seconds)
        byte_s = (seconds[-1] - seconds[0]) / nbytes[-1]
        moved = seconds + nbytes * byte_s * (1 / by - 1)
        return replace(curve, seconds=tuple(np.maximum.accumulate(np.maximum(moved, seconds[0])).tolist()))

    return replace(
        params,
        curves={kind: {n: slower(curve, ratio) for n, curve in by.items()} for kind, by in params.curves.items()},
        flow_bytes_per_s=flow if ratio < 1 or flow < port else params.flow_bytes_per_s,
        port_bytes_per_s=port,
    )


# --- uncertainty ---


def _moved_sigma(profile: Profile, theirs: Gpu, gpu: Gpu, kernels: frozenset[Key]) -> dict[str, float]:
    """Uncertainty of every cost model: its own, and that of its derivation."""
    how, found = unlike(theirs, gpu), {}
    for model, sigma in profile.sigma.items():
        if model in ("matrix products", "memory-bound", "elementwise of layers"):
            kind = "matrix products" if model == "matrix products" else "memory-bound"
            found[model] = float(np.hypot(sigma, DERIVED[kind][how]))
        elif model.startswith(("collective", "transfer")) and gpu.pcie_bytes_per_s and not gpu.nvlink_bytes_per_s:
            found[model] = constants().links["pcie"].sigma_log
        elif model.startswith(("collective", "transfer")) and gpu.port_bytes_per_s != theirs.port_bytes_per_s:
            found[model] = float(np.hypot(sigma, DERIVED["network"][how]))
        elif not model.startswith("attention") or model.endswith("between GPUs"):
            found[model] = sigma
    for kernel, pass_ in kernels:
        by = _lenders(theirs, gpu).get(kernel, kernel)
        same_code = of_warps(kernel, gpu) and by == kernel
        derivation = DERIVED["attention of warps" if same_code else "attention"][how]
        if profile.grade.startswith("kernels from published") and how > 1:
            derivation = float(np.hypot(derivation, OTHER_CODE[same_code]))
        found[f"attention {pass_} {kernel}"] = float(np.hypot(profile.sigma[f"attention {pass_} {by}"], derivation))
    return found
