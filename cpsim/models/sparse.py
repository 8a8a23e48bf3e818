"""What kernels of sparse attention take: sums of what they do, with rates fitted to isolated measurements.

The kinds of work of every kernel are in ``cpsim.models.rates``. A profile may have rates of its own. Others are in
``cpsim/data/sparse.json``, which ``python -m cpsim.calibrate.fit_sparse`` makes from points that
``cpsim.real.measure.sparse`` measured on an H200; other GPUs differ by the peak of their tensor cores in FLOP, and by
the bandwidth of their memory in all else. What was not measured as it runs says so and has a wide interval:

* lists of blocks run at the rate of a causal window;
* a kernel without points, as those of ``nsa``, runs at ``SHARE`` of the peak, and moves what it reads and writes at the
  bandwidth of memory.

Kernels follow each other without overlap. Scores are taken as made in tiles: no memory is counted for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.gpu import Gpu, find_gpu
from cpsim.case.workload import Workload
from cpsim.masks.slices import Ints
from cpsim.masks.tiles import Tiles
from cpsim.models.conditions import Conditions
from cpsim.models.profile import Profile
from cpsim.models.rates import WORK, Call, Rates, moved_rates
from cpsim.schedule.schedule import Kind, Schedule

Floats = NDArray[np.float64]
DATA: Final = Path(__file__).parent.with_name("data") / "sparse.json"
MEASURED_ON: Final = "h200"
UNMEASURED_SIGMA: Final = 0.5
"""Standard deviation, relative, of what follows from another kernel's rate; assumed."""
OTHER_GPU_SIGMA: Final = 0.3
"""The same of GPUs where none of these kernels was measured; assumed."""
BACKWARD: Final = 2.5
"""FLOP of a backward pass over those of its forward pass."""
SHARE: Final = 0.3
"""Of the tensor cores' peak, where a kernel has no points; assumed."""
CALL_S: Final = 2e-5
"""The same of a call."""
BYTES: Final[Mapping[str, float]] = {"rows": 4.0, "pairs": 12.0, "queries": 0.0, "gates": 12.0, "moved": 6.0}
"""Read and written for a piece of work, where a kernel has no points: bf16 once each way, scores in fp32 three times;
assumed."""
_CODE: Final = {
    "dsa": "kernels of PyTorch, which writes scores and gathered keys out; fused ones are several times as fast",
    "nsa": "kernels of fla-core",
    "moba": "kernels of fla-core over PyTorch's flash attention",
    "blocks": "kernels of PyTorch's flash attention",
}
_PASS: Final = {"fwd": "forward", "bwd": "backward"}


@cache
def rates() -> Mapping[str, Rates]:
    """Rates by kernel and pass: fitted, or from the GPU's description."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    fitted = {name: Rates(one["call_s"], one["work_s"], one["sigma"]) for name, one in data["kernels"].items()}
    return {name: fitted.get(name) or described(name) for name in WORK}


@cache
def rates_on(gpu: Gpu) -> Mapping[str, Rates]:
    """Rates that ship on another GPU, by its description."""
    measured = find_gpu(MEASURED_ON)
    assert measured is not None
    return moved_rates(rates(), measured, gpu)


def rates_of(profile: Profile, gpu: Gpu) -> Mapping[str, Rates]:
    """Rates of a profile, and those that ship where it has none."""
    return {**rates_on(gpu), **(profile.sparse or {})}


def described(name: str) -> Rates:
    """A kernel's rates where it has no points."""
    gpu = find_gpu(MEASURED_ON)
    assert gpu is not None
    passes = BACKWARD if name.endswith("bwd") else 1.0
    flop_s = passes / (SHARE * gpu.peak_flops_per_s)
    of_bytes = {kind: passes * nbytes / gpu.memory_bandwidth_bytes_per_s for kind, nbytes in BYTES.items()}
    return Rates(CALL_S, {kind: flop_s if kind == "flop" else of_bytes[kind] for kind in WORK[name]}, UNMEASURED_SIGMA)


def ranges_of(tiles: Tiles, tile: int) -> Iterator[tuple[int, int]]:
    """Ranges of a tile's queries, as they are counted from the start of their document."""
    rows = tiles.rows[tiles.start[tile] : tiles.start[tile + 1]].astype(np.int64)
    for row in np.unique(rows[:, 0]).tolist():
        mine = rows[rows[:, 0] == row, 1:3]
        mine = mine[np.argsort(mine[:, 0])] - int(tiles.mask.q_start[row])
        first, end = mine[0].tolist()
        for low, high in mine[1:].tolist():
            if low > end:
                yield first, end
                first, end = low, high
            end = max(end, high)
        yield first, end


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of one tile."""

    queries: int
    attended: int
    scored: int
    windowed: int
    blocks: int


def _counts(workload: Workload, tiles: Tiles, tile: int) -> _Counts:
    sparse = workload.sparse
    assert sparse is not None
    first, end = np.array(list(ranges_of(tiles, tile)) or [(0, 0)], np.int64).T
    whole = int(sparse.attended(first, end).sum())
    step = {"nsa": sparse.stride, "moba": sparse.block}.get(sparse.kind, 1)
    return _Counts(
        queries=int((end - first).sum()),
        attended=whole,
        scored=int(sparse.scored(first, end).sum()),
        windowed=int(sparse.windowed(first, end).sum()),
        blocks=int(end.max()) // step,
    )


def op_seconds(schedule: Schedule, ops: Ints, given: Conditions) -> Floats:
    """Seconds of choices, or of attention to what was chosen, ``[len(ops)]``."""
    workload = given.sparse
    assert workload is not None
    known: dict[tuple[int, int, int, int], float] = {}
    counted: dict[int, _Counts] = {}
    found = np.zeros(len(ops))
    of = rates_of(given.profile, given.cluster.gpu)
    for i, op in enumerate(ops.tolist()):
        tile, kind = int(schedule.tile[op]), int(schedule.kind[op])
        heads, kv_heads = schedule.heads_of(op)[1::2].tolist()
        key = tile, kind, heads, kv_heads
        if key not in known:
            counts = counted.get(tile) or counted.setdefault(tile, _counts(workload, schedule.tiles, tile))
            known[key] = _seconds(workload, Kind(kind), counts, heads, of)
        found[i] = known[key]
    return found


def _seconds(workload: Workload, kind: Kind, counts: _Counts, heads: int, of: Mapping[str, Rates]) -> float:
    sparse, queries = workload.sparse, counts.queries
    assert sparse is not None
    dims = {"heads": float(heads), "key": float(workload.head_dim), "value": float(workload.values)}
    suffix = "bwd" if kind == Kind.ATTENTION_BACKWARD else "fwd"
    attend = Call(queries=queries, pairs=counts.attended - counts.windowed, top_k=sparse.top_k, **dims)
    scores = Call(queries=queries, pairs=counts.scored, blocks=counts.blocks, top_k=sparse.top_k, **dims)
    window = Call(queries=queries, pairs=counts.windowed, **dims)
    match sparse.kind, kind:
        case "dsa", Kind.SELECT:
            indexed = Call(queries=queries, pairs=counts.scored, heads=sparse.index_heads, key=sparse.index_dim)
            return of["index fwd"].seconds(indexed) + of["choose_keys fwd"].seconds(scores)
        case "dsa", _:
            return of[f"attend_keys {suffix}"].seconds(attend)
        case "nsa", Kind.SELECT:
            return of["compress_attend fwd"].seconds(scores) + of["choose_blocks fwd"].seconds(scores)
        case "nsa", _:
            both = of[f"attend_blocks {suffix}"].seconds(attend) + of[f"window {suffix}"].seconds(window)
            return both + (of["compress_attend bwd"].seconds(scores) if suffix == "bwd" else 0.0)
        case "moba", Kind.SELECT:
            return of["moba fwd"].seconds(scores, only=["gates"])
        case "moba", Kind.ATTENTION:
            done = of["moba fwd"]
            return done.call_s + done.seconds(attend, only=["flop", "moved"])
        case "moba", _:
            return of["moba bwd"].seconds(attend)
    return of[f"window {suffix}"].seconds(attend)


def _kernels(workload: Workload, pass_: str) -> tuple[list[str], bool]:
    """Kernels of a pass, and whether these are the ones that it runs."""
    assert workload.sparse is not None
    back = pass_ == "bwd"
    match workload.sparse.kind:
        case "dsa":
            return [f"attend_keys {pass_}", *([] if back else ["index fwd", "choose_keys fwd"])], True
        case "nsa":
            more = ["compress_attend bwd"] if back else ["compress_attend fwd", "choose_blocks fwd"]
            return [f"attend_blocks {pass_}", f"window {pass_}", *more], True
        case "moba":
            return [f"moba {pass_}"], True
    return [f"window {pass_}"], False


def sigma(workload: Workload, profile: Profile, gpu: Gpu, pass_: str) -> float:
    """Standard deviation, relative, of a pass's kernels."""
    (names, whole), of = _kernels(workload, pass_), rates_of(profile, gpu)
    whole = whole and all(of[name].sigma < UNMEASURED_SIGMA for name in names)
    parts = [max(of[name].sigma for name in names)]
    parts += [] if whole else [UNMEASURED_SIGMA]
    parts += [] if _is_measured(profile, gpu, names) else [OTHER_GPU_SIGMA]
    return float(np.hypot.reduce(parts))


def notes(given: Conditions, pass_: str) -> Iterator[str]:
    """What a pass's costs rest on, in words."""
    workload = given.sparse
    assert workload is not None
    assert workload.sparse is not None
    sparse = workload.sparse
    (names, measured), of = _kernels(workload, pass_), rates_of(given.profile, given.cluster.gpu)
    measured = measured and all(of[name].sigma < UNMEASURED_SIGMA for name in names)
    about, gpu = f"sparse {sparse.kind}", given.cluster.gpu.name
    yield f"{about}: {_CODE[sparse.kind]}; {given.kernel} stands for their power alone"
    if not _is_measured(given.profile, given.cluster.gpu, names):
        yield f"{about}: not measured on {gpu}, from {MEASURED_ON.upper()} in proportion to peak and bandwidth"
    if not measured:
        yield f"{about}: the {_PASS[pass_]} pass is not measured as it runs; its interval is as wide as a guess"
    yield f"{about}: {sparse.alike} queries beside each other are assumed to choose alike, others independently"
    if sparse.kind == "dsa":
        yield "sparse dsa: the indexer's own training is not counted"
    if sparse.kind == "nsa" and sparse.stride != sparse.block:
        yield (
            f"{about}: measured with one compressed key for each block; one every {sparse.stride} tokens follows in "
            f"proportion, and published kernels choose in less than half the time"
        )


def _is_measured(profile: Profile, gpu: Gpu, names: Sequence[str]) -> bool:
    """Whether kernels were measured on this GPU."""
    if profile.sparse and {*names} <= profile.sparse.keys():
        return True
    mine, measured = find_gpu(gpu.name), find_gpu(MEASURED_ON)
    return mine is not None and mine == measured
