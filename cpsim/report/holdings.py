"""What every rank of a strategy holds, computes and sends, read from its schedule: as text, picture and record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from cpsim.report.fitted import table
from cpsim.runtime.files import write
from cpsim.schedule.schedule import ATTENTION_KINDS, COLLECTIVE_KINDS, COMMUNICATION_KINDS, Kind, Schedule, is_one_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cpsim.case.workload import Workload

Map = NDArray[np.int64]
CELLS: Final = 32
"""Cells along each side of a map."""
COLOURS: Final = "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#d9b310", "#b279a2", "#8c6d5a"
"""Of ranks, as many as a picture shows."""
TENSORS: Final = {"q": "queries", "kv": "keys and values", "out": "outputs", "o": "outputs"}
GRADIENTS: Final = {"dq": "gradients of queries", "dkv": "gradients of keys and values", "dout": "gradients of outputs"}
SIGNS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Of ranks in text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank."""

    rank: int
    tokens: tuple[tuple[int, int], ...]
    """Ranges of queries that it holds at the start, in tokens."""
    pairs: int
    """Unmasked pairs that it computes, of all heads."""
    sends: tuple[Mapping[str, Any], ...]
    """Messages of both passes by kind: ``pass``, ``kind``, ``to``, ``tensors`` and ``nbytes``."""


def computed(schedule: Schedule, workload: Workload, scale: int) -> Map:
    """Rank that computes every pair, ``[heads, queries, keys]`` in cells; -1 where the mask hides the pair."""
    s, tokens = schedule, workload.num_tokens
    mask = workload.by_group(s.head_groups).slices(s.stride)
    owner = np.full((workload.num_heads, CELLS, CELLS), -1)
    q, k = (np.arange(CELLS) + 1) * scale - 1, np.arange(CELLS) * scale
    place = np.empty(tokens, np.int64)
    place[s.tokens(np.arange(tokens)) % tokens] = np.arange(tokens)
    for op in np.flatnonzero(is_one_of(s.kind, ATTENTION_KINDS)).tolist():
        tile, (first, count) = int(s.tile[op]), s.heads_of(op)[:2].tolist()
        for row, q0, q1, k0, k1 in s.tiles.rows[s.tiles.start[tile] : s.tiles.start[tile + 1]].tolist():
            group, start = q0 // tokens, q0 // tokens * tokens
            queries, keys = place[q] + start, place[k] + start
            seen = ((queries >= q0) & (queries < q1))[:, None] & ((keys >= k0) & (keys < k1))
            offset = keys - queries[:, None]
            seen &= (offset >= mask.low[row]) & (offset <= mask.high[row])
            heads = workload.num_heads // s.head_groups
            for head in range(group * heads + first, group * heads + first + count):
                owner[head][seen] = s.ranks_of(op)[0]
    return owner


def held(schedule: Schedule, workload: Workload, scale: int) -> Map:
    """Rank that holds the query of every cell at the start."""
    owner, cells = np.full(CELLS, -1), (np.arange(CELLS) + 1) * scale - 1
    for rank, tokens in _held_tokens(schedule, workload):
        owner[np.isin(cells, tokens)] = rank
    return owner


def _held_tokens(schedule: Schedule, workload: Workload) -> Iterable[tuple[int, Map]]:
    """Ranks, and tokens whose queries they hold at the start."""
    for buffer, block in schedule.inputs.tolist():
        if schedule.block_tensors[schedule.block_tensor[block]] == "q":
            ranges = schedule.sets.of(int(schedule.block_set[block])).tolist()
            positions = np.concatenate([np.arange(first, end) for first, end in ranges] or [np.zeros(0, np.int64)])
            yield int(schedule.buffer_rank[buffer]), schedule.tokens(positions) % workload.num_tokens


def sent(schedule: Schedule) -> tuple[dict[tuple[int, int], Kind], dict[Kind, set[str]]]:
    """Kind of message that passes from rank to rank, and the tensors that each kind moves."""
    s = schedule
    arrows: dict[tuple[int, int], Kind] = {}
    tensors: dict[Kind, set[str]] = defaultdict(set)
    routed = set(s.routes[:, 0].tolist())
    for (op, source, target), nbytes in zip(s.routes.tolist(), s.route_nbytes.tolist(), strict=True):
        if source != target and nbytes:
            arrows[source, target] = Kind(int(s.kind[op]))
    for op in np.flatnonzero(is_one_of(s.kind, COMMUNICATION_KINDS)).tolist():
        kind, ranks = Kind(int(s.kind[op])), s.ranks_of(op)
        if op not in routed and kind in COLLECTIVE_KINDS:
            arrows |= {(a, b): kind for a in ranks for b in ranks if a != b}
        elif kind == Kind.TRANSFER:
            arrows.setdefault((ranks[0], ranks[1]), kind)
        blocks = s.access_block[s.access_start[op] : s.access_start[op + 1]]
        tensors[kind] |= {s.block_tensors[t] for t in s.block_tensor[blocks].tolist()}
    return arrows, tensors


def runs(row: Iterable[int]) -> list[tuple[int, int, int]]:
    """(value, first, length) of equal neighbours, without those of -1."""
    values = np.asarray(list(row))
    edges = np.flatnonzero(np.r_[True, values[1:] != values[:-1], True])
    found = zip(values[edges[:-1]].tolist(), edges[:-1].tolist(), np.diff(edges).tolist(), strict=True)
    return [run for run in found if run[0] >= 0]


def shares(schedules: Mapping[str, Schedule], workload: Workload) -> list[Share]:
    """What every rank holds, computes and sends.

    Args:
        schedules: by pass, ``fwd`` and ``bwd``; what is held and computed is that of the forward pass.
        workload: what they compute.
    """
    forward = schedules["fwd"]
    tokens: dict[int, set[int]] = defaultdict(set)
    for rank, mine in _held_tokens(forward, workload):
        tokens[rank] |= set(mine.tolist())
    pairs = np.zeros(forward.num_ranks, np.int64)
    for op in np.flatnonzero(is_one_of(forward.kind, ATTENTION_KINDS)).tolist():
        pairs[forward.ranks_of(op)[0]] += forward.tiles.area[forward.tile[op]] * forward.heads[op, 1]
    return [
        Share(
            rank=rank,
            tokens=tuple(_ranges(sorted(tokens[rank]))),
            pairs=int(pairs[rank]),
            sends=tuple(row for pass_, s in schedules.items() for row in _sends(s, pass_, rank)),
        )
        for rank in range(forward.num_ranks)
    ]


def _ranges(tokens: list[int]) -> list[tuple[int, int]]:
    values = np.array(tokens, np.int64)
    edges = np.flatnonzero(np.diff(values, prepend=-2) != 1)
    ends = np.append(edges[1:], len(values))
    return [(int(values[a]), int(values[b - 1]) + 1) for a, b in zip(edges.tolist(), ends.tolist(), strict=True)]


def _sends(schedule: Schedule, pass_: str, rank: int) -> list[dict[str, Any]]:
    """Messages that leave a rank in one pass, by kind; collectives as rings send them, (n - 1) / n of S."""
    s, found = schedule, dict[str, dict[str, Any]]()
    routes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (op, source, target), nbytes in zip(s.routes.tolist(), s.route_nbytes.tolist(), strict=True):
        if source == rank and target != rank and nbytes:
            routes[op].append((target, int(nbytes)))
    routed = set(s.routes[:, 0].tolist())
    for op in np.flatnonzero(is_one_of(s.kind, COMMUNICATION_KINDS)).tolist():
        kind, ranks = Kind(int(s.kind[op])), s.ranks_of(op)
        if op in routed:
            messages = routes[op]
        elif kind == Kind.TRANSFER:
            messages = [(ranks[1], int(s.nbytes[op]))] if ranks[0] == rank else []
        else:
            others = [other for other in ranks if other != rank] if rank in ranks else []
            messages = [(other, int(s.nbytes[op]) // len(ranks)) for other in others]
        if not messages:
            continue
        name = kind.name.lower().replace("_", "-")
        row = found.setdefault(name, {"pass": pass_, "kind": name, "to": set(), "tensors": set(), "nbytes": 0})
        blocks = s.access_block[s.access_start[op] : s.access_start[op + 1]]
        row["to"] |= {target for target, _ in messages}
        row["tensors"] |= {s.block_tensors[t] for t in s.block_tensor[blocks].tolist()}
        row["nbytes"] += sum(nbytes for _, nbytes in messages)
    return [{**row, "to": sorted(row["to"]), "tensors": sorted(row["tensors"])} for row in found.values()]


def holdings_record(heading: str, found: list[Share]) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "case": heading,
        "ranks": [
            {"rank": one.rank, "tokens": one.tokens, "pairs": one.pairs, "sends": list(one.sends)} for one in found
        ],
    }


def holdings_view(heading: str, found: list[Share], owner: Map, holders: Map) -> RenderableType:
    """Who holds which tokens and computes which pairs, and a table of what each rank sends.

    Args:
        heading: the case in words.
        found: every rank.
        owner: as of `computed`.
        holders: as of `held`.
    """
    total = sum(one.pairs for one in found)
    made = table(("rank", "right"), ("holds tokens", "left"), ("computes", "right"), ("sends", "left"))
    for one in found:
        spans = ", ".join(f"{first}–{end - 1}" for first, end in one.tokens[:4]) + (" …" if len(one.tokens) > 4 else "")
        made.add_row(SIGNS[one.rank % len(SIGNS)], spans, f"{one.pairs / total:.1%}", "\n".join(map(_said, one.sends)))
    return Group(Text(heading, style="bold"), Text(), *_maps(owner, holders), made)


def _said(row: Mapping[str, Any]) -> str:
    names = {**TENSORS, **GRADIENTS}
    what = ", ".join(dict.fromkeys(names[name] for name in names if name in row["tensors"]))
    to = ", ".join(SIGNS[rank % len(SIGNS)] for rank in row["to"])
    return f"{row['pass']} {row['kind']} to {to}: {what}, {row['nbytes'] / 1e6:.3g} MB"


def _distinct(owner: Map) -> list[tuple[str, Map]]:
    """Maps that differ, and whose heads they are."""
    heads: dict[bytes, list[int]] = defaultdict(list)
    for head in range(len(owner)):
        heads[owner[head].tobytes()].append(head)
    return [
        ("all heads" if len(heads) == 1 else f"head {', '.join(map(str, some))}", owner[some[0]])
        for some in heads.values()
    ]


def _maps(owner: Map, holders: Map) -> list[Text]:
    """Two rows of cells to a line, so that maps are square: the upper half of a character is the first of them."""
    lines = []
    for name, one in _distinct(owner):
        lines.append(Text(f"queries down, beside who holds them; keys to the right: who computes, {name}"))
        for row in range(0, CELLS, 2):
            line = Text(f"{SIGNS[holders[row] % len(SIGNS)] if holders[row] >= 0 else ' '} ")
            for column in range(CELLS):
                line.append_text(_cell(int(one[row, column]), int(one[row + 1, column])))
            lines.append(line)
        lines.append(Text())
    return lines


def _cell(upper: int, lower: int) -> Text:
    """One character: who computes, by digit, and by colour where there are colours."""
    rank = lower if lower >= 0 else upper
    if rank < 0:
        return Text("·", style="dim")
    return Text(SIGNS[rank % len(SIGNS)], style=COLOURS[rank % len(COLOURS)])


def write_png(path: Path, heading: str, found: list[Share], owner: Map, holders: Map) -> None:
    """The maps as a picture: queries downwards, keys to the right, a strip that says who holds the queries, and what
    every rank sends."""
    from PIL import Image, ImageDraw

    cell, top, margin, strip, line = 10, 56, 16, 14, 16
    maps, side = _distinct(owner), CELLS * cell
    said = [f"{one.rank}: {'; '.join(map(_said, one.sends)) or 'sends nothing'}" for one in found]
    width = margin + max(len(maps) * (side + strip + margin), 7 * max(map(len, (heading, *said))))
    image = Image.new("RGB", (width, top + side + 44 + line * len(said)), "white")
    draw = ImageDraw.Draw(image)
    for i, words in enumerate(said):
        draw.text((margin, top + side + 36 + line * i), words, fill=(17, 24, 39), font_size=12)
    draw.text((margin, 8), heading, fill=(17, 24, 39), font_size=14)
    for i, (name, one) in enumerate(maps):
        x = margin + i * (side + strip + margin) + strip
        draw.text((x, top - 20), f"who computes: {name}", fill=(107, 114, 128), font_size=12)
        draw.rectangle((x - 1, top - 1, x + side, top + side), fill=(228, 232, 236))
        for rank, first, length in runs(holders):
            draw.rectangle(
                (x - strip, top + first * cell, x - 4, top + (first + length) * cell - 1), fill=_colour(rank)
            )
        for row, ranks in enumerate(one):
            for rank, first, length in runs(ranks):
                left, upper = x + first * cell, top + row * cell
                draw.rectangle((left, upper, left + length * cell - 1, upper + cell - 1), fill=_colour(rank))
    for rank in range(int(max(owner.max(), holders.max())) + 1):
        x = margin + 44 * rank
        draw.rectangle((x, top + side + 14, x + 12, top + side + 26), fill=_colour(rank))
        draw.text((x + 16, top + side + 13), str(rank), fill=(17, 24, 39), font_size=12)
    file = BytesIO()
    image.save(file, format="PNG")
    write(path, file.getvalue())


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]
