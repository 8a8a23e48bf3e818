"""Published and predicted times as a picture: both axes logarithmic, a colour for every GPU."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

from cpsim.report.figures import PALETTE
from studies.public.ledger import Compared

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 620, 64, 52, 16, 120


def scatter_svg(some: Sequence[Compared]) -> str:
    """Times of at least one row; on the line both agree, between the dashed ones they are within a quarter."""
    values = [value for one in some for value in (one.published, one.predicted)]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))

    def across(seconds: float) -> float:
        return LEFT + (log10(seconds) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(seconds: float) -> float:
        return HEIGHT - BOTTOM - (log10(seconds) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        at, label = 10.0**power, f"{10.0**power:g} s"
        parts.append(_line(across(at), TOP, across(at), HEIGHT - BOTTOM))
        parts.append(_line(LEFT, up(at), WIDTH - RIGHT, up(at)))
        parts.append(f'<text x="{across(at):.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(at) + 4:.0f}" text-anchor="end">{label}</text>')
    first, last = 10.0**low, 10.0**high
    for factor, dash in ((1.0, ""), (1.25, "4 4"), (0.8, "4 4")):
        start, end = max(first, first / factor), min(last, last / factor)
        parts.append(_line(across(start), up(start * factor), across(end), up(end * factor), "#475569", dash))
    gpus = list(dict.fromkeys(one.row.gpu for one in some))
    for one in some:
        colour = PALETTE[gpus.index(one.row.gpu) % len(PALETTE)]
        parts.append(
            f'<circle cx="{across(one.published):.1f}" cy="{up(one.predicted):.1f}" r="4" fill="{colour}" '
            f'fill-opacity="0.6"><title>{escape(one.row.name)}: {100 * one.error:+.1f} %</title></circle>'
        )
    for i, gpu in enumerate(gpus):
        y, colour = TOP + 12 + 20 * i, PALETTE[i % len(PALETTE)]
        parts.append(f'<circle cx="{WIDTH - RIGHT + 18}" cy="{y}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 30}" y="{y + 4}">{escape(gpu)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">published</text>')
    parts.append(f'<text transform="translate(14 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">predicted</text>')
    return "\n".join([*parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#e2e8f0", dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
