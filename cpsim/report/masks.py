"""A mask in words, as a picture, and what can run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.masks.names import MASK_NAMES
from cpsim.masks.slices import coarse_mask
from cpsim.prediction.support import KERNELS, OTHERS, StrategySupport
from cpsim.report.fitted import table
from cpsim.report.page import figure, page
from cpsim.report.page import table as html_table
from cpsim.report.words import knobs_text
from cpsim.runtime.files import write
from cpsim.units import format_count

if TYPE_CHECKING:
    from cpsim.case.workload import Workload

SHADES: Final = " ░▒▓█"
TEXT_SIZE: Final = 24
"""Cells of the text picture on each side, two characters wide."""
PICTURE_SIZE: Final = 480
"""Cells of the PNG on each side, a pixel each."""
HTML_SIZE: Final = 240
INK: Final = (29, 78, 216)
"""Colour of cells whose pairs are all unmasked."""
RAISED: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
COLUMNS: Final = ("strategy", "plan", *KERNELS, *(code.name for code in OTHERS))


def mask_record(workload: Workload, support: Sequence[StrategySupport]) -> dict[str, Any]:
    """What ``cpsim mask`` tells, as a mapping; reasons are empty where the answer is yes."""
    slices, total = workload.slices(), workload.num_tokens
    return {
        "mask": workload.mask,
        "options": dict(workload.mask_options),
        "meaning": MASK_NAMES[workload.mask].meaning,
        "source": MASK_NAMES[workload.mask].source,
        "tokens": total,
        "documents": len(workload.documents),
        "area": workload.area(),
        "density": workload.area() / total**2,
        "slices": len(slices),
        "support": [
            {"strategy": s.strategy, "plan": s.plan, "kernels": dict(s.kernels), "others": dict(s.others)}
            for s in support
        ],
    }


def mask_list() -> list[dict[str, Any]]:
    """All masks: meaning, who defines them, options with their defaults."""
    return [
        {
            "mask": name,
            "meaning": mask.meaning,
            "source": mask.source,
            "documents": mask.documents,
            "options": {key: {"default": o.default, "meaning": o.meaning} for key, o in mask.options.items()},
        }
        for name, mask in MASK_NAMES.items()
    ]


def masks_view() -> RenderableType:
    """All masks in a table."""
    made = table(("mask", "left"), ("meaning", "left"), ("options", "left"), ("defined by", "left"))
    made.columns[0].no_wrap = True
    for name, mask in MASK_NAMES.items():
        made.add_row(Text(name, style="bold"), mask.meaning, mask.describe(), Text(mask.source, style="dim"))
    return made


def mask_view(workload: Workload, support: Sequence[StrategySupport], gpus: int) -> RenderableType:
    """Meaning, picture, numbers, and who can run it with numbered reasons."""
    reasons: dict[str, int] = {}
    matrix = _matrix(support, reasons)
    lines = [Text(f"{number}  {reason}", style="dim") for reason, number in reasons.items()]
    general = ", ".join(s.strategy for s in support if s.is_general)
    if general:
        said = f"Ours runs it where all other code that we know of refuses, proved in float64 on CPUs: {general}."
        lines.append(Text(said, style="green"))
    return Group(
        _heading(workload),
        Text(),
        _picture(workload),
        Text(),
        Text(f"Who can run it, on {gpus} GPUs, {workload.num_heads}:{workload.num_kv_heads} heads", style="bold"),
        matrix,
        Text(),
        *lines,
    )


def _heading(workload: Workload) -> Text:
    mask = MASK_NAMES[workload.mask]
    return Text.assemble((title(workload), "bold"), f": {mask.meaning} ({mask.source})\n", (numbers(workload), "dim"))


def title(workload: Workload) -> str:
    """Name and options of the mask."""
    options = knobs_text(dict(workload.mask_options))
    return f"{workload.mask} ({options})" if options else workload.mask


def numbers(workload: Workload) -> str:
    """Size, area, density and slices in one line."""
    total, area = workload.num_tokens, workload.area()
    documents = f" in {len(workload.documents):,} documents" if len(workload.documents) > 1 else ""
    return (
        f"{total:,} tokens{documents}; area {area:,} pairs of a head, density {area / total**2:.4g}; "
        f"{format_count(len(workload.slices()))} slices"
    )


def _picture(workload: Workload) -> Text:
    """Queries from top to bottom, keys from left to right."""
    share = coarse_mask(workload.slices(), workload.num_tokens, min(TEXT_SIZE, workload.num_tokens))
    shade = np.ceil(share * (len(SHADES) - 1)).astype(int)
    return Text("\n".join("  " + "".join(SHADES[s] * 2 for s in row) for row in shade.tolist()))


def _matrix(support: Sequence[StrategySupport], reasons: dict[str, int]) -> RenderableType:
    """Strategies, the kernels and codes that run them, and those that do not; ``reasons`` receives what numbers mean.

    Lists, not a column for every kernel and code: these would not fit into 80 columns.
    """
    made = table(("strategy", "left"), ("runs with", "left"), ("not with, and why", "left"))
    made.columns[0].no_wrap = True
    for strategy, answers in _answers(support, reasons):
        able = [column for column, why in answers.items() if not why and column != "plan"]
        unable = [column + str(why).translate(RAISED) for column, why in answers.items() if why]
        lists = Text(", ".join(able), style="green"), Text(", ".join(unable), style="red")
        made.add_row(Text(strategy, style="bold"), *lists)
    return made


def _answers(support: Sequence[StrategySupport], reasons: dict[str, int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Strategies and, by column where there is something to run, 0 if it runs or else the number of the reason."""

    def number(column: str, reason: str) -> int:
        short = reason.replace(f"kernel {column} ", "the kernel ", 1)
        return reasons.setdefault(short, len(reasons) + 1) if reason else 0

    for s in support:
        told = {"plan": s.plan, **s.kernels, **s.others}
        yield s.strategy, {column: number(column, told[column]) for column in COLUMNS if column in told}


def _rows(support: Sequence[StrategySupport], reasons: dict[str, int]) -> list[list[str]]:
    """Cells of ``COLUMNS``: yes, no with the number of its reason, or - where there is nothing to run."""

    def cell(why: int | None) -> str:
        return "-" if why is None else f"no {why}" if why else "yes"

    return [
        [strategy, *(cell(answers.get(column)) for column in COLUMNS[1:])]
        for strategy, answers in _answers(support, reasons)
    ]


def write_png(path: Path, workload: Workload) -> None:
    """The mask as a picture, one pixel a cell; darker where more of its pairs are unmasked."""
    from PIL import Image, ImageDraw

    size = min(PICTURE_SIZE, workload.num_tokens)
    share = coarse_mask(workload.slices(), workload.num_tokens, size)
    zoom = max(1, PICTURE_SIZE // size)
    share = share.repeat(zoom, axis=0).repeat(zoom, axis=1)
    strength = np.where(share > 0, 0.15 + 0.85 * share, 0)[..., None]  # a few pairs of a cell are still seen
    pixels = (255 - strength * (255 - np.array(INK))).round().astype(np.uint8)
    margin, top = 28, 52
    width = share.shape[1] + 2 * margin
    image = Image.new("RGB", (max(width, 340), share.shape[0] + top + margin), "white")
    image.paste(Image.fromarray(pixels), (margin, top))
    draw = ImageDraw.Draw(image)
    draw.rectangle((margin - 1, top - 1, margin + share.shape[1], top + share.shape[0]), outline=(107, 114, 128))
    area = workload.area() / workload.num_tokens**2
    draw.text((margin, 8), title(workload), fill=(17, 24, 39), font_size=14)
    note = f"{workload.num_tokens:,} tokens, density {area:.4g}; queries down, keys to the right"
    draw.text((margin, 29), note, fill=(107, 114, 128), font_size=12)
    file = BytesIO()
    image.save(file, format="PNG")
    write(path, file.getvalue())


def write_html(path: Path, workload: Workload, support: Sequence[StrategySupport]) -> None:
    """A page with the mask and what can run it; it opens offline."""
    import plotly.graph_objects as go

    from cpsim.report.figures import styled

    total, size = workload.num_tokens, min(HTML_SIZE, workload.num_tokens)
    at = (np.arange(size) * total / size).round().astype(int)
    colours = [[0, "white"], [0.001, "#dbe4fb"], [1, f"rgb{INK}"]]
    made = go.Figure(
        go.Heatmap(
            z=coarse_mask(workload.slices(), total, size),
            x=at,
            y=at,
            zmin=0,
            zmax=1,
            colorscale=colours,
            hovertemplate="query %{y:,}, key %{x:,}: %{z:.1%}<extra></extra>",
            colorbar={"title": "unmasked"},
        )
    )
    made.update_yaxes(title="query", autorange="reversed", scaleanchor="x", constrain="domain")
    made.update_xaxes(title="key", constrain="domain")
    mask = MASK_NAMES[workload.mask]
    reasons: dict[str, int] = {}
    answers = html_table(COLUMNS, _rows(support, reasons), len(COLUMNS))
    sections = [
        f"<h1>{escape(title(workload))}</h1><p>{escape(mask.meaning)} ({escape(mask.source)})</p>",
        figure(styled(made, 680), "mask", numbers(workload)),
        "<h2>Who can run it</h2>",
        answers,
        f"<ol class=muted>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ol>",
    ]
    write(path, page(f"cpsim: mask {workload.mask}", sections, with_plots=True))
