"""Two cases side by side, and explanations, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.errors import shown
from cpsim.prediction.step.frameworks import DEFAULT
from cpsim.report.fitted import table
from cpsim.report.records import prediction_record
from cpsim.report.tables import notes_view
from cpsim.report.words import cut_text, percent_text, seconds_text, strategy_label
from cpsim.units import format_bytes

if TYPE_CHECKING:
    from cpsim.prediction.results import Prediction
    from cpsim.prediction.sides import Sides
    from cpsim.report.explain import Explained

LEAST = 0.005
"""Share of the time below which a part is not listed."""


def verdict(found: Sides) -> str:
    """Which is faster, and how sure that is, in a sentence."""
    low, high, more = found.ratio_low, found.ratio_high, found.ratio
    interval = f"90 %: {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %"
    if low <= 1 <= high and abs(more - 1) < 0.1:
        return f"B takes {100 * (more - 1):+.1f} % for the same tokens ({interval}): they cannot be told apart."
    word = "faster" if more < 1 else "slower"
    speed = f"{100 * abs(1 / more - 1):.1f} % {word}"
    return f"B is {speed} for the same tokens (its time {100 * (more - 1):+.1f} %, {interval})."


def sides_view(found: Sides) -> RenderableType:
    """What differs, which is faster, and where the time goes."""
    a, b = found.a.prediction, found.b.prediction
    made = table(("", "left"), ("A", "right"), ("B", "right"), ("change", "right"))
    for row in _rows(a, b):
        made.add_row(*row)
    asked = table(("what differs", "left"), ("A", "left"), ("B", "left"))
    for name, (mine, theirs) in found.differing().items():
        asked.add_row(name, shown(mine), shown(theirs))
    ways = [Text(f"{side}: {_way(prediction)}") for side, prediction in (("A", a), ("B", b))]
    named = [Text(f"A is {found.a.name}, B is {found.b.name}.", style="dim")]
    notes = dict.fromkeys(note for one in (a, b) for note in one.notes)
    return Group(
        *named,
        Text(verdict(found), style="bold green"),
        Text(),
        *ways,
        Text(),
        asked,
        Text(),
        made,
        Text(),
        *notes_view(notes),
    )


def _way(p: Prediction) -> str:
    """How a case is run."""
    section = p.scenario.parallel
    if not p.scenario.is_step or section is None:
        return f"{strategy_label(p.scenario)}, {cut_text(p.scenario) if p.scenario.is_step else p.scenario.pass_}"
    usual = {name: field.default for name, field in type(section).model_fields.items()} | {"loss_chunks": 1}
    off = (None, 1, False)
    said = [
        f"{name} {value}"
        for name, value in section.model_dump().items()
        if name in ("tp", "pp", "dp", "cp", "sharding", "recompute") or (value not in off and value != usual.get(name))
    ]
    return f"{strategy_label(p.scenario)}, {p.scenario.framework or DEFAULT}, {', '.join(said)}"


def _rows(a: Prediction, b: Prediction) -> Iterator[tuple[str, str, str, str]]:
    yield "time", _seconds(a.time_s), _seconds(b.time_s), _change(a.time_s, b.time_s)
    yield "90 % low", _seconds(a.time_s_low), _seconds(b.time_s_low), ""
    yield "90 % high", _seconds(a.time_s_high), _seconds(b.time_s_high), ""
    if a.tokens_per_s_per_gpu and b.tokens_per_s_per_gpu:
        mine, theirs = a.tokens_per_s_per_gpu, b.tokens_per_s_per_gpu
        yield "tokens/s per GPU", f"{mine:,.0f}", f"{theirs:,.0f}", _change(mine, theirs)
        yield "MFU", percent_text(a.mfu or 0), percent_text(b.mfu or 0), ""
    yield "memory", format_bytes(a.needed_bytes), format_bytes(b.needed_bytes), _change(a.needed_bytes, b.needed_bytes)
    parts = sorted({*a.parts_s, *b.parts_s}, key=lambda name: -max(a.parts_s.get(name, 0), b.parts_s.get(name, 0)))
    for name in parts:
        mine, theirs = a.parts_s.get(name, 0.0), b.parts_s.get(name, 0.0)
        if max(mine / a.time_s, theirs / b.time_s) > LEAST:
            yield f"  {name}", _seconds(mine), _seconds(theirs), _seconds(theirs - mine, signed=True)


def _seconds(seconds: float, *, signed: bool = False) -> str:
    sign = "+" if signed and seconds >= 0 else ""
    return f"{sign}{seconds_text(seconds)} s" if abs(seconds) >= 1 else f"{sign}{seconds * 1e3:.3g} ms"


def _change(a: float, b: float) -> str:
    return f"{100 * (b / a - 1):+.1f} %" if a else ""


def sides_record(found: Sides) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "verdict": verdict(found),
        "ratio": found.ratio,
        "ratio_low": found.ratio_low,
        "ratio_high": found.ratio_high,
        "differing": {name: list(both) for name, both in found.differing().items()},
        "a": prediction_record(found.a.prediction.scenario, found.a.prediction),
        "b": prediction_record(found.b.prediction.scenario, found.b.prediction),
    }


def explained_view(found: Sequence[Explained]) -> RenderableType:
    """What a name means."""
    parts: list[RenderableType] = []
    for one in found:
        parts += [Text.assemble((one.name, "bold"), f", a {one.kind}"), Text(one.text)]
        if one.facts:
            facts = table(("", "left"), ("", "left"))
            facts.show_header = False
            for name, text in one.facts:
                facts.add_row(name, Text(text))
            parts += [Text(), facts]
        if one.picture:
            parts += [Text(), Text(one.picture, no_wrap=True)]
        parts.append(Text())
    return Group(*parts[:-1])


def names_view(known: Mapping[str, Sequence[str]]) -> RenderableType:
    """All names, by what they are."""
    made = table(("", "left"), ("names", "left"))
    for kind, every in known.items():
        made.add_row(kind, Text(", ".join(every)))
    more = Text(
        "Fields of scenarios and answers are explained, too: cpsim explain context, cpsim explain mfu.", style="dim"
    )
    return Group(made, Text(), more)
