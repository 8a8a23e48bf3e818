"""HTML pages that hold everything they show, plotly included, and open offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

STYLE: Final = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #111827; background: #f8fafc; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; }
.lead { font-size: 1.15rem; background: #ecfdf5; border-left: 4px solid #059669; padding: .9rem 1.1rem; }
.none { background: #fef2f2; border-color: #dc2626; }
.muted, figcaption { color: #6b7280; font-size: .9rem; } figure { margin: .6rem 0 1.4rem; }
.card { background: white; border: 1px solid #e5e7eb; border-radius: 8px; padding: .8rem 1rem; }
.card { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; white-space: nowrap; font-size: .82rem; color: #6b7280; }
th { border-bottom: 2px solid #e5e7eb; }
th, td { padding: .4rem .6rem; vertical-align: top; } td { border-bottom: 1px solid #f1f5f9; }
.n { text-align: right; white-space: nowrap; } tr.best td { background: #f0fdf4; font-weight: 600; }
.notes { background: #fffbeb; border-left: 4px solid #d97706; padding: .8rem 2.2rem; }
.notes li { margin: .3rem 0; }
"""


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
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def figure(made: Any, name: str, caption: str) -> str:
    """A plotly figure with an escaped caption; ``name`` is its id."""
    made.update_layout(template="plotly_white")
    plot = made.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        div_id=name,
        config={"displaylogo": False, "responsive": True},
    )
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
