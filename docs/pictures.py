"""Draws docs/strategies/*.svg: who computes which pairs, who holds which tokens, and who sends to whom.

    python docs/pictures.py

Everything drawn is read from the schedule that the strategy plans.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import cos, hypot, pi, sin
from pathlib import Path

from cpsim.case.cluster import presets
from cpsim.case.workload import Workload
from cpsim.report.holdings import CELLS, COLOURS, TENSORS, Map, computed, held, runs, sent
from cpsim.schedule.schedule import Kind, Schedule
from cpsim.strategies import plan

FOLDER = Path(__file__).parent / "strategies"
CELL, GAP, TOP, STRIP = 5, 24, 26, 8


@dataclass(frozen=True)
class Picture:
    """One case to draw; ``scale`` is the number of tokens of a cell."""

    strategy: str
    gpus: int = 4
    gpus_per_node: int = 4
    documents: tuple[int, ...] = (CELLS,)
    scale: int = 1
    knobs: dict[str, object] = field(default_factory=dict)

    def plan(self) -> tuple[Schedule, Workload]:
        """The forward schedule, and what it computes."""
        workload = Workload(
            documents=tuple(self.scale * length for length in self.documents),
            mask="causal_document",
            num_heads=4,
            num_kv_heads=4,
            head_dim=128,
            dtype="bf16",
        )
        cluster = replace(presets()["dgx-h200"], num_gpus=self.gpus, gpus_per_node=self.gpus_per_node)
        return plan(self.strategy, workload, cluster, "fwd", self.knobs), workload


DOCUMENTS = (14, 9, 5, 4)
PICTURES = (
    Picture("ulysses"),
    Picture("ring"),
    Picture("zigzag_ring"),
    Picture("striped_ring"),
    Picture("allgather", documents=DOCUMENTS, knobs={"layout": "document_zigzag"}),
    Picture("usp", gpus=8, knobs={"ulysses": 4}),
    Picture("loongtrain", gpus=8, knobs={"ulysses": 1, "inner_ring": 4}),
    Picture("mesh", gpus=8, gpus_per_node=4, knobs={"keys": 2}),
    Picture("hybrid_cp", documents=(16, 8, 4, 4), knobs={"tokens_per_rank": 8}),
    Picture("magi", documents=DOCUMENTS, knobs={"chunk": 2, "smallest": 1}),
    Picture("dcp", documents=DOCUMENTS, knobs={"variant": "cpsim", "block": 4, "head_groups": 1}),
    Picture("distca", documents=DOCUMENTS, scale=128, knobs={"variant": "cpsim"}),
    Picture("wlb", documents=DOCUMENTS, scale=4, knobs={"cp": 2}),
    Picture("per_sequence", documents=(10, 6, 9, 7), scale=4, knobs={"cp": 2}),
)


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def words(x: float, y: float, text: str, more: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}"{more}>{text}</text>'


def draw_map(x: float, owner: Map, holders: Map, title: str) -> list[str]:
    """Queries downwards and keys to the right, and beside the queries who holds them."""
    side = CELLS * CELL
    parts = [words(x, 16, title), box(x, TOP, side, side, "#e4e8ec")]
    for rank, first, length in runs(holders):
        parts.append(box(x - STRIP - 3, TOP + first * CELL, STRIP, length * CELL, COLOURS[rank]))
    for i, row in enumerate(owner):
        parts += [
            box(x + first * CELL, TOP + i * CELL, length * CELL, CELL + 0.2, COLOURS[rank])
            for rank, first, length in runs(row)
        ]
    return parts


def places(picture: Picture, x: float) -> dict[int, tuple[float, float]]:
    """Where GPUs stand: each node is a circle."""
    nodes, size = picture.gpus // picture.gpus_per_node, picture.gpus_per_node
    radius = 56 if nodes == 1 else 44
    return {
        rank: (
            x + 80 + rank // size * 150 + radius * sin(2 * pi * (rank % size + 0.5) / size - pi / 2),
            TOP + CELLS * CELL / 2 - radius * cos(2 * pi * (rank % size + 0.5) / size - pi / 2),
        )
        for rank in range(picture.gpus)
    }


def straight(x0: float, y0: float, x1: float, y1: float, shift: float) -> str:
    """A line from disc to disc, moved to its left by ``shift``."""
    length = hypot(x1 - x0, y1 - y0)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    first = f"{x0 + 14 * dx - shift * dy:.1f} {y0 + 14 * dy + shift * dx:.1f}"
    return f"M{first}L{x1 - 17 * dx - shift * dy:.1f} {y1 - 17 * dy + shift * dx:.1f}"


def draw_messages(picture: Picture, x: float, schedule: Schedule) -> list[str]:
    """GPUs as discs, messages as arrows."""
    at, (arrows, tensors) = places(picture, x), sent(schedule)
    parts = []
    nodes = picture.gpus // picture.gpus_per_node
    for node in range(nodes if nodes > 1 else 0):
        more = ' rx="12" stroke="#9aa5b1" stroke-dasharray="3 3"'
        parts += [box(x + 10 + 150 * node, TOP, 140, CELLS * CELL, "none", more)]
        parts += [words(x + 80 + 150 * node, TOP + CELLS * CELL + 16, f"node {node}", ' text-anchor="middle"')]
    for (a, b), kind in arrows.items():
        (x0, y0), (x1, y1) = at[a], at[b]
        if a // picture.gpus_per_node == b // picture.gpus_per_node:
            shift = 3 if (b, a) in arrows else 0
            path = straight(x0, y0, x1, y1, shift)
        else:
            up = -1 if y0 < TOP + CELLS * CELL / 2 else 1
            bend = up * (40 if a < b else 24)
            path = f"M{x0:.1f} {y0 + 13 * up:.1f}Q{(x0 + x1) / 2:.1f} {y0 + 2 * bend:.1f} {x1:.1f} {y1 + 16 * up:.1f}"
        dashes = "" if kind == Kind.TRANSFER else ' stroke-dasharray="4 2"'
        parts.append(
            f'<path d="{path}" fill="none" stroke="#59636e" stroke-width="1.4" marker-end="url(#head)"{dashes}/>'
        )
    for rank, (cx, cy) in at.items():
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="12" fill="{COLOURS[rank]}"/>')
        parts.append(words(cx, cy + 4, str(rank), ' text-anchor="middle" fill="#fff" font-weight="bold"'))
    for i, (kind, names) in enumerate(sorted(tensors.items())):
        what = ", ".join(dict.fromkeys(TENSORS[name] for name in ("q", "kv", "out", "o") if name in names))
        parts.append(words(34, TOP + CELLS * CELL + 20 + 16 * i, f"{kind.name.lower().replace('_', '-')}: {what}"))
    return [words(x, 16, "who sends to whom"), *parts]


def draw(picture: Picture) -> str:
    """The whole picture."""
    schedule, workload = picture.plan()
    owner, holders = computed(schedule, workload, picture.scale), held(schedule, workload, picture.scale)
    x, parts = 34.0, []
    distinct: dict[bytes, list[int]] = defaultdict(list)
    for head in range(len(owner)):
        distinct[owner[head].tobytes()].append(head)
    for heads in distinct.values():
        title = (
            "who computes: all heads"
            if len(distinct) == 1
            else f"head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"
        )
        parts += draw_map(x, owner[heads[0]], holders, title)
        x += CELLS * CELL + GAP + STRIP
    parts += draw_messages(picture, x, schedule)
    nodes = picture.gpus // picture.gpus_per_node
    width, height = x + (170 if nodes == 1 else 310), TOP + CELLS * CELL + 20 + 16 * len(sent(schedule)[1])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="sans-serif" font-size="12" fill="#24292f">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="#59636e"/></marker></defs>',
            box(0, 0, width, height, "#f6f8fa", ' rx="8"'),
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        (FOLDER / f"{picture.strategy}.svg").write_text(draw(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
