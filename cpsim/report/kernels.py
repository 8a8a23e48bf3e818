"""`cpsim kernels`: what attention kernels can be called with and how fast they are, for people and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.models.attention.kernels import UNMEASURED
from cpsim.models.feasible import DIRECT, LIMITS
from cpsim.prediction.kernel_tables import MASKS, NUM_DOCUMENTS, KernelSupport, Speed, partly
from cpsim.report.fitted import table
from cpsim.units import format_bytes, format_count


def kernels_record(support: Sequence[KernelSupport], speeds: Sequence[Speed]) -> dict[str, Any]:
    """Both tables, ready for JSON."""
    return {
        "kernels": [asdict(entry) | {"partly": partly(entry.kernel)} for entry in support],
        "speeds": [asdict(entry) for entry in speeds],
    }


def kernels_view(support: Sequence[KernelSupport], speeds: Sequence[Speed], heads: str) -> RenderableType:
    """The matrix of what can be called, why not, then TFLOP/s forward / backward by mask and length."""
    parts: list[RenderableType] = [_matrix(support), Text(), *_reasons(support)]
    for name in dict.fromkeys(speed.profile for speed in speeds):
        mine = [speed for speed in speeds if speed.profile == name]
        title = f"{name}: TFLOP/s forward / backward of {heads} heads by tokens; documents: {NUM_DOCUMENTS} equal ones"
        parts += [Text(), Text(title, style="bold"), _speeds(mine)]
    parts += [Text(), Text("memory of a call, forward / backward, work space included", style="bold")]
    return Group(*parts, _memory(speeds))


def _matrix(support: Sequence[KernelSupport]) -> RenderableType:
    made = table(
        ("kernel", "left"),
        *((mask, "left") for mask in MASKS),
        ("others", "right"),
        ("dtypes", "left"),
        ("profiles", "left"),
    )
    for entry in (entry for entry in support if entry.passes):
        cells = [Text("no", "red") if entry.masks[mask] else Text("yes", "green") for mask in MASKS]
        others = [mask for mask in entry.masks if mask not in MASKS]
        count = f"{sum(not entry.masks[mask] for mask in others)} of {len(others)}"
        lists = (", ".join(entry.dtypes), ", ".join(entry.profiles) or "your own")
        made.add_row(Text(entry.kernel, style="bold"), *cells, count, *lists)
    return made


def _reasons(support: Sequence[KernelSupport]) -> list[RenderableType]:
    lines = []
    for entry in (entry for entry in support if entry.passes):
        own = {reason for mask, reason in entry.masks.items() if mask in MASKS} | {partly(entry.kernel)}
        lines += [f"{entry.kernel}: {reason}" for reason in sorted(filter(None, own))]
    lines += [
        f"head_dim: {'; '.join(_head_dims(support))}; other masks: `cpsim mask NAME` says who runs them",
        f"sinks as an argument: {_sinks()}; around others they are joined from the log-sum-exp",
        *(f"{entry.kernel}: not measured: {UNMEASURED[entry.kernel]}" for entry in support if not entry.passes),
    ]
    return [Text(line, style="dim") for line in lines]


def _sinks() -> str:
    """Kernels that take attention sinks."""
    words = {"both": "", "forward": " (forward)"}
    own = [f"{name}{words[one.sinks]}" for name, one in LIMITS.items() if one.sinks]
    return ", ".join((*own, *(f"{name} (called by Transformer Engine)" for name, one in DIRECT.items() if one.sinks)))


def _head_dims(support: Sequence[KernelSupport]) -> list[str]:
    """Kernels by what is known of their head dimensions."""
    shipped = [entry for entry in support if entry.profiles]
    return [
        f"{words} ({', '.join(entry.kernel for entry in shipped if entry.head_dim == words)})"
        for words in dict.fromkeys(entry.head_dim for entry in shipped)
    ]


def _speeds(speeds: Sequence[Speed]) -> RenderableType:
    lengths = sorted({speed.tokens for speed in speeds})
    made = table(("kernel", "left"), ("mask", "left"), *((format_count(n), "right") for n in lengths))
    rows: dict[tuple[str, str], dict[int, Speed]] = {}
    for speed in speeds:
        rows.setdefault((speed.kernel, speed.mask), {})[speed.tokens] = speed
    for (kernel, mask), by_length in rows.items():
        cells = ["/".join(f"{rate:.0f}" for rate in by_length[n].tflops.values()) for n in lengths]
        made.add_row(Text(kernel, style="bold"), mask, *cells)
    return made


def _memory(speeds: Sequence[Speed]) -> RenderableType:
    lengths = sorted({speed.tokens for speed in speeds})
    made = table(("kernel", "left"), *((format_count(n), "right") for n in lengths))
    rows: dict[str, dict[int, Speed]] = {}
    for speed in speeds:  # the same for every mask and GPU
        rows.setdefault(speed.kernel, {})[speed.tokens] = speed
    for kernel, by_length in rows.items():
        memory = [by_length[n].memory_bytes for n in lengths]
        cells = ["\n".join(map(format_bytes, by_pass.values())) for by_pass in memory]
        made.add_row(Text(kernel, style="bold"), *cells)
    return made
