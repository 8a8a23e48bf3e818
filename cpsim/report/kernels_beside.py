"""`cpsim kernels --published`: what benchmarks published of kernels beside what cpsim says, for people and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.prediction.kernels_beside import GROUPS, Beside, Supported
from cpsim.report.fitted import table
from cpsim.units import format_count

TITLES: Final = {"magi": "MagiAttention's kernel benchmark", "longca": "LongCA-bench, tables 3 to 7"}
FITTED: Final = "*"


def published_record(support: Sequence[Supported], rows: Sequence[Beside]) -> dict[str, Any]:
    """All three tables, ready for JSON."""
    return {"support": [asdict(one) for one in support], "calls": [asdict(row) | {"error": row.error} for row in rows]}


def published_view(support: Sequence[Supported], rows: Sequence[Beside]) -> RenderableType:
    """What benchmarks say that kernels run and how fast they are, beside what is predicted."""
    parts: list[RenderableType] = [Text("masks: said to run / priced here", style="bold"), _support(support), Text()]
    parts += [Text(f"{one.kernel}: {one.why}", style="dim") for one in support if one.why]
    for name, gpu in dict.fromkeys((row.table, row.gpu) for row in rows):
        mine = [row for row in rows if (row.table, row.gpu) == (name, gpu)]
        profiles = ", ".join(dict.fromkeys(row.profile for row in mine if row.profile))
        title = f"{TITLES[name]}, {gpu}: TFLOP/s published > predicted (profile {profiles})"
        parts += [Text(), Text(title, style="bold"), _lengths(mine, _rates, _off)]
        if any(row.published_bytes for row in mine):
            parts += [Text(), Text("Memory of these calls in GB, published > predicted", style="bold")]
            parts += [_lengths([row for row in mine if row.published_bytes], _memory, lambda _: "")]
        parts += [Text(f"{row.kernel}: {row.why}", style="dim") for row in _refused(mine)]
    parts += [Text(words, style="dim") for words in _notes(rows)]
    return Group(*parts)


def _support(support: Sequence[Supported]) -> RenderableType:
    made = table(
        ("kernel", "left"),
        *((group, "left") for group in GROUPS),
        ("passes", "left"),
        ("blocks", "left"),
        ("grouped heads", "left"),
        ("head_dim", "left"),
        ("dtypes", "left"),
        ("from", "left"),
    )
    for one in support:
        masks = [f"{'yes' if said else 'no'} / {ours}" for said, ours in one.masks.values()]
        passes = f"{one.passes} / {one.ours or 'none'}"
        made.add_row(
            Text(one.kernel, style="bold"),
            *masks,
            passes,
            one.blocks or "-",
            one.grouped,
            one.head_dims,
            one.dtypes or "-",
            one.since or "any",
        )
    return made


def _lengths(
    rows: Sequence[Beside], cell: Callable[[Beside], str], last: Callable[[Sequence[Beside]], str]
) -> RenderableType:
    """A row for each kernel, mask, heads and pass; a column for each length."""
    lengths = sorted({row.tokens for row in rows})
    made = table(("kernel", "left"), ("mask", "left"), *((format_count(n), "right") for n in lengths), ("off", "right"))
    found: dict[tuple[str, ...], dict[int, Beside]] = {}
    for row in sorted(rows, key=lambda row: (row.kernel, row.mask, row.options, row.heads, row.kv_heads, row.pass_)):
        mask = " ".join(filter(None, (row.mask, row.options, f"{row.heads}:{row.kv_heads}", row.pass_)))
        found.setdefault((row.kernel, mask), {})[row.tokens] = row
    for (kernel, mask), by_length in found.items():
        mine = list(by_length.values())
        cells = [cell(by_length[n]) if n in by_length else "" for n in lengths]
        made.add_row(Text(kernel + FITTED * mine[0].fitted, style="bold"), mask, *cells, last(mine))
    return made


def _rates(row: Beside) -> str:
    published = "-" if row.published_tflops is None else f"{row.published_tflops:.0f}"
    return f"{published} > {'-' if row.tflops is None else f'{row.tflops:.0f}'}"


def _memory(row: Beside) -> str:
    return " > ".join("-" if n is None else f"{n / 1e9:.2f}" for n in (row.published_bytes, row.memory_bytes))


def _off(rows: Sequence[Beside]) -> str:
    errors = counted(rows)
    return f"{mean(map(abs, errors)):.0%} ({mean(errors):+.0%})" if errors else ""


def counted(rows: Sequence[Beside]) -> list[float]:
    """Errors of calls that are not short."""
    return [row.error for row in rows if row.error is not None and not row.short]


def _refused(rows: Sequence[Beside]) -> list[Beside]:
    """A row for each kernel without a time, and its reason."""
    return list({(row.kernel, row.why): row for row in rows if row.why}.values())


def _notes(rows: Sequence[Beside]) -> list[str]:
    fitted = counted([row for row in rows if row.fitted])
    others = counted([row for row in rows if not row.fitted])
    lines = [
        "off: mean size of errors, and their mean, of calls that take longer than twice the shortest of their kernel, "
        "which may show launches alone"
    ]
    if fitted:
        lines.append(
            f"{FITTED} fitted to published calls: half of {len(fitted)} calls within {_half(fitted)}; errors on calls "
            f"that a fit did not see: `cpsim profiles`"
        )
    if others:
        lines.append(
            f"others were measured here or derived, of other versions, and read none of these tables: half of "
            f"{len(others)} calls within {_half(others)}"
        )
    if any(row.published_bytes for row in rows):
        lines.append(
            "memory of flashinfer: the benchmark's calls hold a workspace, lists of tokens for each row of blocks and "
            "copies of their input, which are not a call's here"
        )
    return lines


def _half(errors: Sequence[float]) -> str:
    return f"{median(map(abs, errors)):.1%}"
