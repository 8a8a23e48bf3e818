"""HTML pages that hold everything they show, plotly included, and open offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from cpsim.report.figures import PALETTE

STYLE: Final = """
:root { color-scheme: light dark; --ink: #111827; --muted: #6b7280; --paper: #f8fafc; --card: #ffffff; --line: #e5e7eb;
  --good: #ecfdf5; --good-line: #059669; --bad: #fef2f2; --bad-line: #dc2626; --note: #fffbeb; --note-line: #d97706; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --muted: #9ca3af; --paper: #0f172a; --card: #1e293b;
  --line: #334155; --good: #052e2b; --good-line: #10b981; --bad: #3f1219; --bad-line: #f87171; --note: #2b2410; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.lead { font-size: 1.15rem; background: var(--good); border-left: 4px solid var(--good-line); padding: .9rem 1.1rem; }
.none { background: var(--bad); border-color: var(--bad-line); }
.muted, figcaption { color: var(--muted); font-size: .9rem; } figure { margin: .6rem 0 1.4rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
.card { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; white-space: nowrap; font-size: .82rem; color: var(--muted); }
th { border-bottom: 2px solid var(--line); }
th, td { padding: .4rem .6rem; vertical-align: top; } td { border-bottom: 1px solid var(--line); }
.n { text-align: right; white-space: nowrap; } tr.best td { background: var(--good); font-weight: 600; }
.notes { background: var(--note); border-left: 4px solid var(--note-line); padding: .8rem 2.2rem; }
.notes li { margin: .3rem 0; }
"""
SHOW: Final = """
const dark = matchMedia("(prefers-color-scheme: dark)"), shown = [];
const template = () => TEMPLATES[dark.matches ? "dark" : "light"];
function show(name, made) {
  shown.push(name);
  Plotly.newPlot(name, made.data, {...made.layout, template: template()}, {displayModeBar: false, responsive: true});
}
dark.addEventListener("change", () => shown.forEach((name) => Plotly.relayout(name, {template: template()})));
"""
"""Draws figures in the colours of the reader's system."""


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


def page(title: str, sections: Iterable[str], *, with_plots: bool) -> str:
    """A whole page; its title is escaped here, its sections are HTML."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{_plotly() if with_plots else ''}</head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def _plotly() -> str:
    from plotly.io.json import to_json_plotly
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script><script>const TEMPLATES = {to_json_plotly(TEMPLATES)};{SHOW}</script>"


def figure(made: Any, name: str, caption: str) -> str:
    """A plotly figure, or its values, with an escaped caption; ``name`` is its id."""
    from plotly.io.json import to_json_plotly

    values = made if isinstance(made, dict) else made.to_plotly_json()
    bare = {"data": values["data"], "layout": {k: v for k, v in values["layout"].items() if k != "template"}}
    plot = f'<div id="{name}"></div><script>show("{name}", {to_json_plotly(bare)})</script>'
    return f'<figure class="card">{plot}<figcaption>{escape(caption)}</figcaption></figure>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], num_text: int, best: bool = False) -> str:
    """A table of escaped cells; columns from ``num_text`` on are numbers; ``best`` marks the first row."""
    side = [""] * num_text + [' class="n"'] * (len(head) - num_text)
    top = "".join(f"<th{s}>{escape(cell)}</th>" for s, cell in zip(side, head, strict=True))
    lines = [
        f"<tr{' class=best' if best and i == 0 else ''}>"
        + "".join(f"<td{s}>{escape(cell)}</td>" for s, cell in zip(side, row, strict=True))
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    return f'<div class="card"><table><tr>{top}</tr>{"".join(lines)}</table></div>'
