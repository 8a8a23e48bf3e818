"""HTML pages that hold everything they show, plotly included, and open offline."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from cpsim.report.figures import PALETTE

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
    return {"layout": layout, "data": {"bar": [{"error_x": {"color": ink}}]}}


TEMPLATES: Final = {"light": _template("#1f2937", "#e2e8f0"), "dark": _template("#e5e7eb", "#334155")}
"""Plotly templates on the page's own ground."""


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

    return f"<script>const TEMPLATES = {to_json_plotly(TEMPLATES)};{asset('open.js')}{asset('show.js')}</script>"


def _plotly() -> str:
    """Plotly, packed: 2 MB instead of 5."""
    from plotly.offline import get_plotlyjs

    packed = base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
    return f'<script>unpack("{packed}")</script>'


def section(title: str, name: str, body: str) -> str:
    """A section with a link to itself; its body is HTML."""
    return f'<section id="{name}"><h2><a href="#{name}">{escape(title)}</a></h2>{body}</section>'


def figure(made: Any, name: str, caption: str) -> str:
    """A plotly figure, or its values, with an escaped caption; ``name`` is its id."""
    from plotly.io.json import to_json_plotly

    values = made if isinstance(made, dict) else made.to_plotly_json()
    bare = {"data": values["data"], "layout": {k: v for k, v in values["layout"].items() if k != "template"}}
    height = values["layout"].get("height", 450)
    place = f'<div id="plot-{name}" style="height: {height}px"></div>'
    plot = f'{place}<script>show("plot-{name}", {to_json_plotly(bare)})</script>'
    return f'<figure class="card">{plot}<figcaption>{escape(caption)}</figcaption></figure>'


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


def folded(title: str, body: str) -> str:
    """HTML that is shown when somebody asks."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
