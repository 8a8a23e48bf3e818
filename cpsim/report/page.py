"""HTML pages that hold everything they show, plotly included, and open offline."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any, Final

from cpsim.report.figures import PALETTE
from cpsim.report.words import unbroken

BARE_TOP: Final = 12
TITLED_TOP: Final = 34
"""Room above a plot [px], and above one with words there."""
ASSETS: Final = Path(__file__).with_name("assets")


def asset(name: str) -> str:
    """A style sheet or script of pages."""
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def shared_style() -> str:
    """What report and explorer have in common: colours, and the parts of an answer."""
    return asset("colours.css") + asset("parts.css")


def _template(ink: str, grid: str) -> dict[str, Any]:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "automargin": True, "title": {"standoff": 12}}
    clear = "rgba(0,0,0,0)"
    layout = {
        "colorway": PALETTE,
        "font": {"color": ink},
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"align": "left"},
        "shapedefaults": {"line": {"color": ink}},
    }
    edge = {"color": ink, "width": 0.5}
    bar = {"error_x": {"color": ink}, "marker": {"line": edge}}
    return {
        "layout": layout,
        "data": {"bar": [bar], "scatter": [{"line": {"color": ink}, "marker": {"line": {"color": ink}}}]},
    }


TEMPLATES: Final = {"light": _template("#1f2937", "#e2e8f0"), "dark": _template("#e5e7eb", "#334155")}
"""Plotly templates on the page's own ground; their ink sets bars and lines off whose colours are near it."""
SYMBOLS: Final = {
    "square": "■",
    "diamond": "◆",
    "cross": "✚",
    "x": "✖",
    "x-thin": "✕",
    "triangle-up": "▲",
    "triangle-down": "▼",
    "star": "★",
    "hexagon": "⬢",
}
"""Plotly's symbols in legends."""


def page(title: str, sections: Iterable[str], *, with_plots: bool, links: Mapping[str, str] | None = None) -> str:
    """A whole page.

    Args:
        title: escaped here.
        sections: HTML.
        with_plots: whether they have figures.
        links: ids of sections by title, for the line of links above them.
    """
    body = "\n".join(sections)
    items = "".join(f'<li><a href="#{name}">{escape(said)}</a></li>' for said, name in (links or {}).items())
    above = f'<nav class="sections" aria-label="Sections"><ul>{items}</ul></nav>' if items else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{shared_style()}{asset('page.css')}</style>"
        f"{_scripts() if with_plots else ''}</head>\n"
        f'<body><a class="skip" href="#main">Skip to the answer</a>{above}<main id="main">{body}</main>'
        f"{_plotly() if with_plots else ''}</body></html>\n"
    )


def _scripts() -> str:
    from plotly.io.json import to_json_plotly

    return f"<script>const TEMPLATES = {to_json_plotly(TEMPLATES)};{asset('plots.js')}{asset('show.js')}</script>"


def _plotly() -> str:
    """Plotly, packed: 2 MB instead of 5."""
    from plotly.offline import get_plotlyjs

    packed = base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
    return f'<script>unpack("{packed}")</script>'


def section(title: str, name: str, body: str) -> str:
    """A section with a link to itself; its body is HTML."""
    return f'<section id="{name}"><h2><a href="#{name}">{escape(title)}</a></h2>{body}</section>'


def figure(made: Any, name: str, caption: str) -> str:
    """A plotly figure, or its values, with its legend above and an escaped caption below; ``name`` is its id."""
    from plotly.io.json import to_json_plotly

    values = drawn(made if isinstance(made, dict) else made.to_plotly_json())
    style = "; ".join(f"{what}: {size}" for what, size in size_of(values).items())
    focus = ' tabindex="0"' * bool(values["layout"].get("meta"))  # what can be scrolled is reached by keyboard
    place = f'<div class="wide"{focus}><div id="plot-{name}" style="{style}"></div></div>'
    plot = f'{place}<script>show("plot-{name}", {to_json_plotly(values)})</script>'
    legend = f'<div class="legend">{legend_html(values, f"plot-{name}")}</div>'
    return f'<figure class="card">{legend}{plot}<figcaption>{escape(unbroken(caption))}</figcaption></figure>'


def drawn(made: Mapping[str, Any]) -> dict[str, Any]:
    """A figure as pages draw it: their own template, and without the legend, which is HTML and takes the room it needs.

    Args:
        made: values of a figure.
    """
    layout = {name: value for name, value in made["layout"].items() if name != "template"}
    margin = layout.get("margin", {})
    top = TITLED_TOP if layout.get("annotations") else BARE_TOP
    height = layout.get("height", 450) - max(0, margin.get("t", top) - top)
    changes = {"showlegend": False, "margin": margin | {"t": top}, "height": height}
    return {"data": made["data"], "layout": layout | changes}


def size_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Height and least width of the place of a figure, as CSS says them."""
    layout = values["layout"]
    return {"height": f"{layout['height']}px", "min-width": f"{layout.get('meta', {}).get('min_width', 0)}px"}


def legend_html(values: Mapping[str, Any], place: str) -> str:
    """What colours and symbols of a figure mean, as buttons that hide and show it; nothing where there is one.

    Args:
        values: of the figure.
        place: the id of its place.
    """
    named: dict[str, Mapping[str, Any]] = {}
    for trace in values["data"]:
        if trace.get("name") and trace.get("showlegend", True):
            named.setdefault(group_of(trace), trace)
    if len(named) < 2:
        return ""
    items = "".join(
        f'<li><button type="button" data-plot="{place}" data-group="{escape(unescape(group))}" aria-pressed="true">'
        f"{_sign(trace)}{trace['name']}</button></li>"
        for group, trace in named.items()
    )
    return f'<ul aria-label="Legend">{items}</ul>'


def group_of(trace: Mapping[str, Any]) -> str:
    """What is hidden and shown together."""
    return str(trace.get("legendgroup") or trace.get("name"))


def _sign(trace: Mapping[str, Any]) -> str:
    """The colour of a trace, and its symbol."""
    marker = trace.get("marker") or {}
    colour = marker.get("color") or (trace.get("line") or {}).get("color") or "currentColor"
    if symbol := SYMBOLS.get(marker.get("symbol", "")):
        return f'<span class="sign" style="color: {colour}" aria-hidden="true">{symbol}</span>'
    return _mark(colour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of a table that belong together."""

    title: str
    """Empty: they need none."""
    rows: Sequence[Sequence[str]]
    colours: Sequence[str] = ()
    """Of marks before the first cells."""
    best: int | None = None
    """The row that is marked."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], num_text: int, best: bool = False) -> str:
    """A table of escaped cells; columns from ``num_text`` on are numbers; ``best`` marks the first row."""
    return grouped_table(head, [Group(title="", rows=list(rows), best=0 if best else None)], num_text)


def grouped_table(head: Sequence[str], groups: Iterable[Group], num_text: int) -> str:
    """A table of groups of rows; columns from ``num_text`` on are numbers."""
    side = [""] * num_text + [' class="n"'] * (len(head) - num_text)
    top = "".join(f'<th scope="col"{s}>{escape(cell)}</th>' for s, cell in zip(side, head, strict=True))
    bodies = "".join(f"<tbody>{_group(group, side)}</tbody>" for group in groups)
    return f'<div class="card" tabindex="0"><table><thead><tr>{top}</tr></thead>{bodies}</table></div>'


def _group(group: Group, side: Sequence[str]) -> str:
    title = f'<tr><th class="group" scope="rowgroup" colspan="{len(side)}">{escape(group.title)}</th></tr>'
    lines = [
        f"<tr{' class=best' if i == group.best else ''}>"
        + "".join(
            f"<td{s}>{_mark(group.colours[i]) if group.colours and not j else ''}{escape(cell)}</td>"
            for j, (s, cell) in enumerate(zip(side, row, strict=True))
        )
        + "</tr>"
        for i, row in enumerate(group.rows)
    ]
    return (title if group.title else "") + "".join(lines)


def _mark(colour: str) -> str:
    return f'<span class="key" style="background: {colour}"></span>'


def folded(title: str, body: str, is_open: bool = False) -> str:
    """HTML that is shown when somebody asks, or at once."""
    return f"<details{' open' * is_open}><summary>{escape(title)}</summary>{body}</details>"
