"""Writes studies/dcp/README.md and dcp.svg: bytes and balance of DCP's planners, and its published bars predicted.

    pip install '.[dcp]'
    python -m studies dcp --batches 50 --out studies/dcp/dcp-reproduced.json
    python studies/dcp/page.py

Takes some minutes on one core. Bytes and balance are counted; planning times are those of the machine that runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from cpsim.calibrate.recipes import runs_file
from cpsim.case.cluster import load_cluster
from cpsim.case.workload import Workload
from cpsim.prediction.runs import load_runs
from cpsim.strategies import sharding
from cpsim.strategies.dcp.blocks import Blocks, Placement, cut, cut_at, judge
from cpsim.strategies.dcp.placing import Settings, plan_blocks
from cpsim.strategies.dcp.solvers import ORDERS
from cpsim.strategies.dcp.timing import Rates
from studies.dcp.report import by_kind, coverage, read_ranges
from studies.dcp.reproduce import FEW_BATCHES, FIRST, LENGTHS, MASKS, batches, slower_with_ranges
from studies.dcp.solvers import means

FOLDER = Path(__file__).parent
PAGE, FIGURE, REPRODUCED = FOLDER / "README.md", FOLDER / "dcp.svg", FOLDER / "dcp-reproduced.json"
USUAL = FOLDER / "dcp-mtkahypar.json"
"""Of the solver that comes with cpsim."""
RUNS = [
    runs_file(f"{name}.jsonl")
    for name in ("h200-flex", "h200-flex-b", "h200-flex-mtkahypar", "h200-flex-mtkahypar-b", "h200-emulated-flex")
] + [runs_file("h200-emulated-flex-mtkahypar.jsonl")]
SHAPE = 4, 8
RANKS = SHAPE[0] * SHAPE[1]
BLOCK = 1024
OTHER_LENGTHS = "distca_prolong", "prolong64k"
STUDIED = ("causal", "lambda", "causal_blockwise", "shared_question")
ONE = (131072,)
EPS = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Values of ``eps_intra``; ``eps_inter`` is four times as much, as by default."""
PANEL = 420, 280
"""Width and height of a panel of the figure [pixels]."""
WIDEST = 1.8
"""Imbalance at the right edge of a panel."""
COLOURS = {"paper": "#d1495b", "released": "#edae49", "cpsim": "#00798c", "zigzag": "#555555"}


@dataclass(frozen=True, slots=True)
class Point:
    """One placement."""

    variant: str
    eps: float
    between_nodes_mb: float
    imbalance: float
    token_spread: int
    busiest_node_mb: float
    """Most bytes that one node sends or receives [MB]."""
    seconds: float
    """Planning time [s]."""


def workload(mask: str, documents: Sequence[int]) -> Workload:
    """The operator of DCP's micro-benchmark."""
    return Workload(
        documents=tuple(documents), mask=MASKS.get(mask, mask), num_heads=8, num_kv_heads=2, head_dim=128, dtype="bf16"
    )


def measured(blocks: Blocks, placement: Placement, variant: str, eps: float, seconds: float) -> Point:
    """Bytes and balance of a placement in a forward pass."""
    quality = judge(blocks, placement, RANKS, SHAPE[1], "fwd")
    far = quality.between_nodes.reshape(SHAPE * 2).sum(axis=(1, 3)) / 1e6
    busiest = max(far.sum(axis=0).max(), far.sum(axis=1).max())
    return Point(
        variant, eps, float(far.sum()), quality.imbalance, int(np.ptp(quality.tokens)), float(busiest), seconds
    )


def planned(blocks: Blocks, variant: str, eps: float) -> Point:
    """One plan, on p4de."""
    settings = Settings(variant=variant, eps_inter=4 * eps, eps_intra=eps)
    begin = process_time()
    placement = plan_blocks(blocks, SHAPE, Rates.of(load_cluster("p4de")), settings, 0)
    return measured(blocks, placement, variant, eps, process_time() - begin)


def zigzag(mask: str, documents: Sequence[int]) -> Point:
    """Zigzag shards of every document that move only what their queries see, in blocks as fine as its chunks."""
    chunks = sharding.document_zigzag(np.concatenate(([0], np.cumsum(documents))), RANKS)
    edges = np.unique(chunks.ranges)
    blocks = cut(workload(mask, documents), BLOCK, 2)
    finer = np.union1d(edges, np.append(blocks.first, sum(documents)))
    fine = cut_at(workload(mask, documents), np.zeros(len(finer) - 1, np.int64), finer, 1)
    order = np.argsort(chunks.ranges[:, 0])
    owner = np.repeat(np.arange(len(chunks)), np.diff(chunks.start))[order] % RANKS
    home = owner[np.searchsorted(chunks.ranges[order, 0], fine.first, "right") - 1]
    return measured(fine, Placement(home, home[fine.query]), "zigzag", 0.0, 0.0)


def studies() -> Iterator[tuple[str, str, Sequence[int]]]:
    """Mask, name of the documents, and their lengths."""
    for mask in STUDIED:
        yield mask, "one document", ONE
        yield mask, "a batch", batches(1.0)[0]


def table(rows: Sequence[tuple[str, str, Point, Sequence[Point]]]) -> list[str]:
    """Rows for every variant at its default imbalance, and for the zigzag."""
    lines = [
        "| mask | tokens of | variant | between nodes | relative to zigzag | busiest node | compute, max / mean | "
        "tokens per rank, max - min | planning |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mask, what, other, points in rows:
        for p in (*[p for p in points if p.eps == 0.1], other):
            lines.append(
                f"| {mask} | {what} | {p.variant} | {p.between_nodes_mb:.1f} MB | "
                f"{p.between_nodes_mb / other.between_nodes_mb:.2f} | {p.busiest_node_mb:.1f} MB | {p.imbalance:.2f} | "
                f"{p.token_spread} | {f'{p.seconds:.1f} s' if p.seconds else ''} |"
            )
    return lines


def figure(panels: Sequence[tuple[str, Point, Sequence[Point]]]) -> str:
    """Bytes between nodes against imbalance, a panel for each mask, as SVG."""
    width, height = 2 * PANEL[0], 2 * PANEL[1] + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for i, (mask, other, points) in enumerate(panels):
        parts += panel(mask, [*points, other], i % 2 * PANEL[0] + 52, i // 2 * PANEL[1] + 30)
    for i, (name, colour) in enumerate(COLOURS.items()):
        x, y = 60 + 110 * i, height - 12
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/><text x="{x + 10}" y="{y}">{name}</text>')
    axes = "x: compute, max / mean; y: MB between nodes, forward"
    parts.append(f'<text x="{width - 20}" y="{height - 12}" text-anchor="end">{axes}</text></svg>')
    return "\n".join(parts) + "\n"


def panel(mask: str, points: Sequence[Point], left: int, top: int) -> Iterator[str]:
    """The panel of one mask; points beyond its right edge are left out."""
    width, height = PANEL[0] - 72, PANEL[1] - 70
    most_y = 1.1 * max(p.between_nodes_mb for p in points)
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>'
    yield f'<text x="{left}" y="{top - 6}" font-weight="bold">{mask}</text>'
    for share in (0.0, 0.5, 1.0):
        x, y = left + share * width, top + height * (1 - share)
        yield f'<text x="{x:.0f}" y="{top + height + 15}" text-anchor="middle">{1 + share * (WIDEST - 1):.2f}</text>'
        yield f'<text x="{left - 5}" y="{y + 4:.0f}" text-anchor="end">{share * most_y:.0f}</text>'
    for p in points:
        if p.imbalance <= WIDEST:
            x = left + (p.imbalance - 1) / (WIDEST - 1) * width
            y = top + height * (1 - p.between_nodes_mb / most_y)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[p.variant]}"/>'


def reproduced(record: dict[str, Any]) -> list[str]:
    """Tables of speed-ups, worst first, and of errors by code."""
    lines = [
        "| speed-up of DCP over the fastest baseline | lengths | published | predicted | error |",
        "| --- | --- | --- | --- | --- |",
    ]
    ratios = sorted(record["speed_ups"], key=lambda s: -abs(s["predicted"] / s["published"] - 1))
    lines += [
        f"| {s['mask']}{' (outlier)' if s['outlier'] else ''} | x {s['length_scale']:g} | {s['published']:.2f} | "
        f"{s['predicted']:.2f} | {100 * (s['predicted'] / s['published'] - 1):+.0f} % |"
        for s in ratios
    ]
    bars = [row for row in record["rows"] if not row["outlier"]]
    lines += ["", "| code | pass | bars | mean error | bias |", "| --- | --- | --- | --- | --- |"]
    for name, pass_ in dict.fromkeys((row["row"], row["pass"]) for row in bars):
        errors = np.array(
            [r["predicted_ms"] / r["published_ms"] - 1 for r in bars if (r["row"], r["pass"]) == (name, pass_)]
        )
        lines.append(
            f"| {name} | {pass_} | {len(errors)} | {100 * np.abs(errors).mean():.0f} % | {100 * errors.mean():+.0f} % |"
        )
    return lines


def on_gpus() -> list[str]:
    """A table of real runs with FlexAttention: two variants of DCP and the fastest other strategy."""
    times: dict[tuple[str, int, str], dict[str, float]] = {}
    for run in (run for file in RUNS for run in load_runs(file) if run.error is None):
        s = run.scenario
        network = "sockets between two nodes of two" if "sockets" in str(s.cluster) else f"{s.gpus} on NVLink"
        name = f"dcp {s.knobs.get('variant', 'cpsim')}" if s.strategy == "dcp" else str(s.strategy)
        times.setdefault((network, s.num_tokens, str(s.mask)), {})[name] = run.time_s
    lines = [
        "| H200 GPUs | tokens | mask | dcp `cpsim` | dcp `paper` | fastest other | speed-up of dcp `cpsim` |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (network, tokens, mask), found in sorted(times.items()):
        others = {name: seconds for name, seconds in found.items() if not name.startswith("dcp")}
        if not others or not {"dcp cpsim", "dcp paper"} <= found.keys():
            continue
        best = min(others, key=others.__getitem__)
        ours, paper = (f"{1e3 * found[f'dcp {variant}']:.1f} ms" for variant in ("cpsim", "paper"))
        lines.append(
            f"| {network} | {tokens:,} | {mask} | {ours} | {paper} | {1e3 * others[best]:.1f} ms, {best} | "
            f"{others[best] / found['dcp cpsim']:.2f} |"
        )
    return lines


def main() -> None:
    """Writes the page and its figure."""
    if not find_spec("mtkahypar"):
        sys.exit("studies/dcp/page.py: expected package mtkahypar, which makes the plans; pip install '.[dcp]'")
    rows, panels = [], []
    for mask, what, documents in studies():
        blocks, other = cut(workload(mask, documents), BLOCK, 2), zigzag(mask, documents)
        eps = EPS if what == "one document" else (0.1,)
        points = [planned(blocks, variant, e) for variant in ("paper", "released", "cpsim") for e in eps]
        rows.append((mask, what, other, points))
        if what == "one document":
            panels.append((mask, other, points))
        print(f"{mask}, {what}: done", flush=True)
    record = json.loads(REPRODUCED.read_text(encoding="utf-8"))
    FIGURE.write_text(figure(panels), encoding="utf-8")
    PAGE.write_text(page(rows, record), encoding="utf-8")


def page(rows: Sequence[tuple[str, str, Point, Sequence[Point]]], record: dict[str, Any]) -> str:
    """The page as Markdown."""
    agree, decided = record["same_one_faster"], record["decided"]
    return "\n".join(
        [
            "# DCP's planners and published benchmark",
            "",
            "Written by `python studies/dcp/page.py`, which needs `pip install '.[dcp]'`.",
            "",
            "## Bytes and balance of plans",
            "",
            "131,072 tokens, as one document or a batch, on 4 nodes of 8 GPUs; 8 query and 2 key-value heads of "
            f"dimension 128; blocks of {BLOCK} tokens. The batch has {len(batches(1.0)[0])} documents, drawn from "
            f"`{LENGTHS}`. Bytes are exact counts for a forward pass: inputs move once to every node that needs them, "
            "results once from every rank that has some. Variants `paper` and `released` partition with Mt-KaHyPar "
            "and the paper's `eps_inter` 0.4 and `eps_intra` 0.1; `cpsim` has `eps_intra` 0.1. For comparison, "
            "`zigzag` cuts every document into zigzag shards and moves only what their queries see.",
            "",
            *table(rows),
            "",
            "Bytes against balance for one document. Every point is a plan with another `eps_intra`: "
            f"{', '.join(map(str, EPS))}. Plans less balanced than the right edge of a panel are not shown.",
            "",
            "![Bytes between nodes against imbalance of computation, for every variant](dcp.svg)",
            "",
            "## On GPUs",
            "",
            "Measured times of a forward and a backward pass: 32 query and 8 key-value heads, FlexAttention, blocks of "
            "1024. [docs/runs.html](../../docs/runs.html) compares such runs with predictions.",
            "",
            *on_gpus(),
            "",
            "## DCP's micro-benchmark",
            "",
            f"`python -m studies dcp --solver {record['solver']} --batches {record['batches']}` predicts DCP's "
            f"published micro-benchmark on 32 A100 (cluster `p4de`), with {record['batches']} batches for every scale "
            "of document lengths. The lengths of LongDataCollections are not published, so lengths are drawn from "
            f"`{record['lengths']}`. DCP "
            f"plans with variant `{record['variant']}` and solver {record['solver']}. The mean error of DCP's "
            f"speed-up over the fastest baseline is {100 * record['speed_up_mean_error']:.0f} %, and "
            f"{100 * record['speed_up_mean_error_without_outliers']:.0f} % without the case that rests on an outlier "
            "of the published run: a forward pass of 27.5 ms, although lengths half as long take 8 ms and twice as "
            f"long 6 ms. In {agree} of the {decided} cases whose published speed-up differs from 1 by more than 10 %, "
            "the prediction agrees on which is faster, DCP or the baseline. Nothing was fitted to these bars.",
            "",
            *reproduced(record),
            "",
            usual(),
            "",
            *ranged(),
            "",
            *REMAINS,
            loongtrain(record),
            "",
        ]
    )


def ranged() -> list[str]:
    """Which published speed-ups lie inside of what other assumptions give, and which assumptions matter."""
    found = read_ranges()
    words = coverage(found)
    lines = [
        f"{words[0].upper()}{words[1:]}. `python -m studies dcp --sensitivity` changes each of them alone, with "
        f"Mt-KaHyPar where nothing else is said, and {FEW_BATCHES} batches; of those with more, the predictions above "
        "are taken. Which batches are drawn counts for as much as any assumption.",
        "",
        "| speed-up of DCP | lengths | published | as assumed | least | most | inside |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        (low, high), by = one.ends, one.predicted
        ends = (f"{value:.2f}, {next(name for name in by if by[name] == value)}" for value in (low, high))
        name, inside = one.mask + " (outlier)" * one.outlier, "yes" if one.inside else "no"
        cells = name, f"x {one.scale:g}", f"{one.published:.2f}", f"{by[FIRST]:.2f}", *ends, inside
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| if only this varies | inside | most over least, mean |", "| --- | --- | --- |"]
    return lines + [f"| {name} | {inside} | {width:.1f} |" for name, (inside, width) in by_kind(found).items()]


def usual() -> str:
    """What comes out with the solver that comes with cpsim, and why it tries several orders."""
    record, found = json.loads(USUAL.read_text(encoding="utf-8")), means()
    moved = {key: f"{values[0]:.{0 if key[0] == 'nodes' else 1}f} MB" for key, values in found.items()}
    beyond = {key: f"{values[1]:.2g} %" for key, values in found.items()}
    best = f"mtkahypar, {ORDERS} orders"
    return (
        f"With Mt-KaHyPar, which comes with cpsim, `python -m studies dcp` is off by "
        f"{100 * record['speed_up_mean_error']:.0f} %, {100 * record['speed_up_mean_error_without_outliers']:.0f} % "
        f"without the outlier, in the mean of {record['batches']} batches; it agrees on which is faster in "
        f"{record['same_one_faster']} of {record['decided']} cases. Limits of single nodes are as tight as tokens can "
        "be dealt out, and blocks of unequal tokens cannot keep them, so that chance decides how much a solver cuts: "
        f"{moved['nodes', 'kahypar']} between nodes with KaHyPar in the mean of some batches, "
        f"{moved['nodes', 'mtkahypar, 1 orders']} with one run of Mt-KaHyPar and {moved['nodes', best]} with "
        f"the best of {ORDERS}, which is what plans are made with; among the GPUs of a node "
        f"{moved['GPUs', 'kahypar']}, {moved['GPUs', 'mtkahypar, 1 orders']} and {moved['GPUs', best]}, where limits "
        f"are passed by {beyond['GPUs', 'kahypar']}, {beyond['GPUs', 'mtkahypar, 1 orders']} and "
        f"{beyond['GPUs', best]}. With one limit for all nodes, as DCP's code calls Mt-KaHyPar, "
        f"{moved['nodes', 'mtkahypar, one limit']} cross between nodes, but the measured run had KaHyPar "
        "([points](solvers.csv), `python -m studies.dcp.solvers`)."
    )


def loongtrain(record: dict[str, Any]) -> str:
    """How far LoongTrain's bars are off by lengths, and how much of what it runs is padding."""
    of = [row for row in record["rows"] if row["row"] == "loongtrain"]
    scales = sorted({row["length_scale"] for row in of})
    off = {s: [100 * (r["predicted_ms"] / r["published_ms"] - 1) for r in of if r["length_scale"] == s] for s in scales}
    ends = [{r["pass"]: r["published_ms"] for r in of if r["length_scale"] == s} for s in (scales[0], scales[-1])]
    grow = sorted(ends[0][pass_] / ends[1][pass_] for pass_ in ends[0])
    others = [padded(s, lengths, record["batches"]) for s in scales for lengths in OTHER_LENGTHS]
    return (
        "* LoongTrain pads all documents of a batch to the length of the longest. With the lengths drawn here it runs "
        + listed(f"{padded(s, record['lengths'], record['batches']):.1f}" for s in scales)
        + f" times the tokens of a batch at x {listed(f'{s:g}' for s in scales)}, with those of "
        f"{listed(f'`{name}`' for name in OTHER_LENGTHS)} {min(others):.1f} to {max(others):.0f} times; its bars are "
        "off by "
        + listed(f"{min(off[s]):+.0f} to {max(off[s]):+.0f} %" for s in scales)
        + f". The published ones grow {grow[0]:.1f} and {grow[-1]:.1f} times from x {scales[-1]:g} to x {scales[0]:g}, "
        "so that documents of the published run are more alike than any here."
    )


def padded(scale: float, lengths: str, count: int) -> float:
    """Tokens that LoongTrain runs over those of its batches, in the mean."""
    return float(np.mean([len(batch) * max(batch) / sum(batch) for batch in batches(scale, lengths, count)]))


def listed(words: Iterable[str]) -> str:
    """With commas, and an "and" before the last."""
    *first, last = words
    return f"{', '.join(first)} and {last}"


REMAINS = (
    "What the predictions assume or leave out, as far as known:",
    "",
    "* Between nodes, one flow from GPU to GPU gets 0.56 of a NIC, as on H200 nodes. Rings that came out 26 to 40 % "
    "too fast with a whole NIC prompted this choice, but the share is not fitted to these bars.",
    "* Transformer Engine's fork reorders tensors document by document around its all-to-alls, so that its bars grow "
    "with the number of documents; they do so in predictions, too. Under sparse masks its published forward pass takes "
    "7 to 12 ms longer than under the causal mask, whatever the mask, and its backward pass 1 to 4 ms longer. The "
    "reason is not known: the commits of the fork that support ranges were not found.",
    "* LoongTrain is predicted as InternEvo runs it. Hosts are taken to be as fast as those of H200 nodes, which are "
    "newer than p4de's, and its forward pass waits for the host.",
    "* DCP's executor is priced by its own parts. Its Triton kernels, with 128 elements per program, and their "
    "launches from Python were timed on H200, where the kernels reach a fifth of the memory bandwidth "
    "([measurements](../../data/points/h200/h200-dcp-1.jsonl)); for A100 they are scaled by SMs and clock. Assumed: "
    "hosts are as fast as those of H200 nodes, its older Triton makes no difference, and an exchange among 32 GPUs "
    "costs the host as much as one among 4.",
    "* DCP's flash-attn 2 is priced as its source says: forward as the split-key kernel with tiles of 64 queries by "
    "128 keys, backward with separate gradients of keys for every computation block and query head. With ranges the "
    "kernel masks every tile; measured on H200 with and without ranges ([measurements](fa2-ranges-h200.jsonl)), a "
    f"pair takes {slower_with_ranges('fwd'):.2f} times as long forward and {slower_with_ranges('bwd'):.2f} times as "
    "long backward. Not priced: the padding of document tails to whole blocks, and register spills in merges of more "
    "than two partial outputs. The branch that DCP measured, `dcp`, is not available; `bblock`, whose functions take "
    "the same arguments, was read, built and timed instead.",
    "* DCP is predicted too slow where documents are short: its planner folds tokens and work into one weight, which "
    "leaves work several times uneven (first table). DCP's own code does the same with the documents drawn here; those "
    "of the published run are probably longer.",
    "* The lengths decide how much attention there is; `--lengths` draws them from another corpus.",
)

if __name__ == "__main__":
    main()
