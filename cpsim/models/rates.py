"""Kernels of attention to chosen keys: what a call of each does, and so many seconds for each piece of work.

seconds = call + rate_1 * work_1 + rate_2 * work_2 + ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from pydantic import ConfigDict

from cpsim.case.gpu import Gpu
from cpsim.units import CLOSED, ByName, Quantity, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a kernel; heads are those of the call."""

    queries: float
    pairs: float
    """Of queries and keys, or candidates, whatever the number of heads."""
    heads: float
    key: float = 1.0
    """Elements."""
    value: float = 0.0
    top_k: float = 1.0
    blocks: float = 0.0
    """Candidates of the last query."""


def _flop(call: Call) -> float:
    return 2 * call.pairs * call.heads * (call.key + call.value)


def _rows(call: Call) -> float:
    return call.queries * call.heads * (call.key + call.value)


WORK: Final[Mapping[str, Sequence[str]]] = {
    "index fwd": ("flop",),
    "choose_keys fwd": ("pairs", "queries"),
    "attend_keys fwd": ("flop",),
    "attend_keys bwd": ("flop",),
    "compress_attend fwd": ("flop", "rows"),
    "compress_attend bwd": ("flop", "rows"),
    "choose_blocks fwd": ("flop", "rows"),
    "attend_blocks fwd": ("flop", "rows"),
    "attend_blocks bwd": ("flop", "rows"),
    "window fwd": ("flop",),
    "window bwd": ("flop",),
    "moba fwd": ("flop", "gates", "moved"),
    "moba bwd": ("flop", "moved"),
}
"""By kernel and pass: FLOP of the forward pass; rows, elements of queries and outputs; gates, scores of all queries and
blocks; moved, elements of queries that are copied for each of their blocks."""


def work(call: Call) -> dict[str, float]:
    """What a call does, by kind."""
    return {
        "flop": _flop(call),
        "rows": _rows(call),
        "pairs": call.pairs,
        "queries": call.queries,
        "gates": call.queries * call.blocks * call.heads,
        "moved": call.queries * call.heads * call.key * call.top_k,
    }


@dataclass(frozen=True, slots=True)
class Rates:
    """One kernel's."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    call_s: Seconds
    of_work_s: ByName[Annotated[float, Quantity("s", 0, 1)]]
    """Of a piece of each kind of work."""
    sigma: Annotated[float, Quantity("", 0, 10)]
    """Standard deviation, relative, of lengths that the fit did not see."""

    def seconds(self, call: Call, *, only: Sequence[str] | None = None) -> float:
        """Of a call, or of some kinds of its work alone, without the call itself."""
        done = work(call)
        kinds = self.of_work_s if only is None else only
        return (self.call_s if only is None else 0.0) + sum(self.of_work_s[kind] * done[kind] for kind in kinds)


OF_MEMORY: Final = ("index fwd", "attend_keys fwd", "attend_keys bwd")
"""Kernels whose FLOP take as long as memory does: PyTorch writes scores and gathered keys out."""


def moved_rates(known: Mapping[str, Rates], theirs: Gpu, gpu: Gpu) -> dict[str, Rates]:
    """Rates of one GPU as they would be on another."""
    flop = theirs.peak_flops_per_s / gpu.peak_flops_per_s
    memory = theirs.memory_bandwidth_bytes_per_s / gpu.memory_bandwidth_bytes_per_s
    found = {}
    for name, one in known.items():
        moved = {k: r * (flop if k == "flop" and name not in OF_MEMORY else memory) for k, r in one.of_work_s.items()}
        found[name] = replace(one, of_work_s=moved)
    return found
