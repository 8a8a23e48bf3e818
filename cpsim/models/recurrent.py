"""Scans of layers with a state instead of keys: time of chunked kernels, and of what goes with them.

    seconds = call + traffic / bandwidth + step * walk
    walk = max(chunks of the longest sequence, chunks of all heads / slots)

Tokens of a chunk are computed as products, all chunks at once; what a chunk reads, writes and hands to the next kernel
of the scan counts as traffic, states of chunks included. One kernel walks over the chunks of a sequence in order, a
thread block for each head and block of values: where these are fewer than a GPU holds, its time does not fall with
heads. Time is linear in tokens, and documents only shorten the walk.

Parameters are fitted to isolated kernels of one GPU (``python -m cpsim.calibrate.fit_recurrent``). A profile may have
its own; to GPUs of others those that ship are moved as other kernels are: traffic is bound by memory or, as these
kernels reach a share of its bandwidth, by SMs and their clock, which overlap; steps follow the clock; calls stay.

References: Yang, Kautz, Hatamizadeh, Gated Delta Networks (2024), section 3.3 (chunks of the delta rule); Dao, Gu,
Transformers are SSMs (2024), section 6 (chunks of SSD); which tensors kernels read and write: flash-linear-attention
0.6, ops/gated_delta_rule/chunk.py and ops/kda/chunk.py, and mamba-ssm 2.3, ops/triton/ssd_combined.py.
Differs: products of a chunk hide behind its traffic; autotuned block sizes are not distinguished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from pydantic import ConfigDict

from cpsim.case.gpu import Gpu
from cpsim.case.model import Recurrent
from cpsim.errors import NotMeasuredError
from cpsim.units import CLOSED, ByName, Quantity, Seconds, SecondsPerByte

ELEMENT_BYTES: Final = 2
OVERLAP: Final = 6.0
"""How well memory and programs hide behind each other: exponent of a smooth maximum, as in ``cpsim.models.derive``."""
VALUE_BLOCK: Final = 64
"""Elements of a head of values that a thread block of the walk has."""
CHUNK: Final = {"gated_delta": 64, "kda": 64, "mamba2": 128}
"""Tokens of a chunk: fla's default, and Megatron-Core's (ssm/mamba_mixer.py, chunk_size)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements of 2 bytes that a scan reads and writes for each token: so many times a token's ..."""

    keys: int
    """... keys of all key heads;"""
    head_keys: int
    """... as many keys as it has value heads;"""
    values: int
    """... values;"""
    pairs: int
    """... row of a chunk's matrix of pairs, of each head it is kept for;"""
    states: int
    """... share of the state of its chunk."""


TRAFFIC: Final[Mapping[tuple[str, str], Traffic]] = {
    ("gated_delta", "fwd"): Traffic(keys=9, head_keys=2, values=6, pairs=2, states=2),
    ("gated_delta", "bwd"): Traffic(keys=15, head_keys=14, values=15, pairs=2, states=4),
    ("kda", "fwd"): Traffic(keys=9, head_keys=9, values=6, pairs=4, states=2),
    ("kda", "bwd"): Traffic(keys=15, head_keys=24, values=15, pairs=6, states=4),
    ("mamba2", "fwd"): Traffic(keys=4, head_keys=0, values=3, pairs=0, states=6),
    ("mamba2", "bwd"): Traffic(keys=10, head_keys=0, values=11, pairs=0, states=13),
}
"""Counted in the sources above, kernel by kernel; states of mamba-ssm are fp32, and its pairs are kept by key heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A scan of packed sequences on one GPU."""

    kernel: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    """Tokens that are computed as products at once."""

    def traffic_bytes(self, pass_: str, tokens: float) -> float:
        """Read and written."""
        of, heads = TRAFFIC[self.kernel, pass_], self.value_heads
        elements = of.keys * self.key_heads * self.key_dim + of.head_keys * heads * self.key_dim
        elements += of.values * heads * self.value_dim + of.pairs * heads * self.chunk
        return ELEMENT_BYTES * tokens * (elements + of.states * heads * self.key_dim * self.value_dim / self.chunk)

    def walk(self, lens: Sequence[int], slots: float) -> float:
        """Steps that follow each other."""
        chunks = [-(-n // self.chunk) for n in lens]
        blocks = self.value_heads * -(-self.value_dim // VALUE_BLOCK)
        return float(max(max(chunks, default=0), sum(chunks) * blocks / slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanParams:
    """One kernel and pass on one GPU type."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    call_s: Seconds
    """Of all kernels of a call."""
    byte_s: SecondsPerByte
    """Per byte of traffic."""
    step_s: Seconds
    """Of the walk."""
    slots: Annotated[float, Quantity("thread blocks", 1, 1e6)]
    """Thread blocks of the walk that run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepParams:
    """A memory-bound kernel that goes with a scan."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    latency_s: Seconds
    byte_s: SecondsPerByte


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentCosts:
    """All of one GPU type."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    gpu: str
    """Its name in `cpsim/data/gpus.json`."""
    source: str
    scans: ByName[ScanParams]
    """By kernel and pass, as in `kda fwd`."""
    sweeps: ByName[SweepParams]
    """By kind of `cpsim.real.measure.linear`."""
    sigma: Annotated[float, Quantity("", 0, 10)]
    """Standard deviation, relative, of held-out points."""

    def scan_s(self, scan: Scan, pass_: str, lens: Sequence[int]) -> float:
        """Seconds of one call."""
        p = self._of(scan.kernel, pass_)
        walk = p.step_s * scan.walk(lens, p.slots)
        return p.call_s + p.byte_s * scan.traffic_bytes(pass_, float(sum(lens))) + walk

    def own_state_s(self, scan: Scan, pass_: str, lens: Sequence[int]) -> float:
        """Seconds in which a shard's own state and transition are made before others' are known: one walk more.

        Source: flash-linear-attention 0.6, ops/cp/chunk_fwd.py and chunk_bwd.py.
        """
        p = self._of(scan.kernel, pass_)
        return p.step_s * scan.walk(lens, p.slots)

    def sweep_s(self, kind: str, nbytes: float) -> float:
        """Seconds of a memory-bound kernel."""
        one = self.sweeps[kind]
        return one.latency_s + one.byte_s * nbytes

    def _of(self, kernel: str, pass_: str) -> ScanParams:
        if f"{kernel} {pass_}" not in self.scans:
            known = ", ".join(sorted({name.split()[0] for name in self.scans}))
            raise NotMeasuredError(f"scans of {kernel} were not measured; those of {known} were")
        return self.scans[f"{kernel} {pass_}"]


def scan_of(layer: Recurrent, parts: int = 1) -> Scan:
    """The scan of a layer, or of a share of its heads: key heads are never less than one."""
    return Scan(
        kernel=layer.kind,
        key_heads=max(1, layer.key_heads // parts),
        value_heads=layer.value_heads // parts,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        chunk=CHUNK[layer.kind],
    )


def saved_bytes(layer: Recurrent, tokens: int) -> int:
    """What a scan keeps for its backward pass beside its inputs and output: gates in fp32, and of the delta rule a
    matrix of pairs of each chunk, of KDA two; states of chunks are made again.

    Source: the same packages (``save_for_backward``).
    """
    pairs = ELEMENT_BYTES * CHUNK[layer.kind] * {"mamba2": 0, "gated_delta": 1, "kda": 2}[layer.kind]
    return tokens * layer.value_heads * (4 * layer.gates + pairs)


def states_bytes(layer: Recurrent, tokens: int) -> int:
    """States of all chunks, which a pass has while it runs; mamba-ssm's are fp32."""
    return (4 if layer.kind == "mamba2" else 2) * -(-tokens // CHUNK[layer.kind]) * layer.state_elements


DATA: Final = Path(__file__).parent.with_name("data") / "recurrent.json"


@lru_cache
def measured(path: Path = DATA) -> RecurrentCosts:
    """Costs of the GPU that was measured; the file is what ``cpsim.calibrate.fit_recurrent`` writes."""
    return costs_of(json.loads(path.read_text(encoding="utf-8")))


def costs_of(row: Mapping[str, Any]) -> RecurrentCosts:
    """Costs of what a fit has found."""
    scans = {name: ScanParams(**each) for name, each in row["scans"].items()}
    sweeps = {name: SweepParams(**each) for name, each in row["sweeps"].items()}
    return RecurrentCosts(gpu=row["gpu"], source=row["source"], scans=scans, sweeps=sweeps, sigma=row["sigma"])


def costs_on(gpu: Gpu, known: Gpu, costs: RecurrentCosts) -> RecurrentCosts:
    """Costs of another GPU.

    Args:
        gpu: of which they are asked.
        known: that was measured.
        costs: of it.
    """
    clock = known.clock_hz / gpu.clock_hz
    sms = gpu.num_sms / known.num_sms

    def moved(byte_s: float) -> float:
        here, there = (1 / one.memory_bandwidth_bytes_per_s for one in (known, gpu))
        programs = max(0.0, byte_s**OVERLAP - here**OVERLAP) ** (1 / OVERLAP) * clock / sms
        bound = min(byte_s, here) * there / here
        return float((programs**OVERLAP + bound**OVERLAP) ** (1 / OVERLAP))

    scans = {
        name: ScanParams(call_s=p.call_s, byte_s=moved(p.byte_s), step_s=p.step_s * clock, slots=p.slots * sms)
        for name, p in costs.scans.items()
    }
    sweeps = {name: SweepParams(latency_s=p.latency_s, byte_s=moved(p.byte_s)) for name, p in costs.sweeps.items()}
    return RecurrentCosts(gpu=gpu.name, source=costs.source, scans=scans, sweeps=sweeps, sigma=costs.sigma)


def design(scan: Scan, pass_: str, lens: Sequence[int], slots: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What times of a call are a sum of, by ``call_s``, ``byte_s`` and ``step_s``."""
    return np.array([1.0, scan.traffic_bytes(pass_, float(sum(lens))), scan.walk(lens, slots)])
