"""Writes studies/distca/README.md: how DistCA's schedulers balance servers, and how many bytes they move.

    python studies/distca/page.py

A server is a tensor-parallel group of 8 H200 with 64K tokens of each of two nano-batches. Attention is flash-attn 2, as
in DistCA's runs, priced by profile ``h200``. Document lengths are drawn from stand-ins for the original lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from cpsim.models.attention.params import attention_seconds
from cpsim.models.profile import load_profile
from cpsim.prediction.step.planner_kernel import planner_kernel
from cpsim.strategies.distca.batches import iteration, sample
from cpsim.strategies.distca.planning import schedule
from cpsim.strategies.distca.tasks import TokenBytes, dispatch

PAGE = Path(__file__).with_name("README.md")
K = 1024
SERVERS = 32
TOKENS = 64 * K
HEADS = {"8b": 4, "34b": 8}
"""Query heads on one GPU of a server; it has one key-value head, of dimension 128."""
CASES = [(data, model, context) for data in ("pretrain", "prolong") for model in HEADS for context in (128, 512)]
PLANNERS = (("released", 0.05), ("released", 0.02), ("paper", 0.05), ("cpsim", 0.05), ("cpsim", 0.02))
ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class Result:
    """Means over nano-batches; forward and backward passes are added."""

    slowest_ms: float
    """Attention time of one layer on the slowest server [ms]."""
    uneven: float
    """Time of the slowest server over the mean of all servers."""
    moved_gb: float
    """Bytes between all servers [GB]."""
    busiest_mb: float
    """Most bytes that one GPU sends or receives in the four exchanges [MB]."""


def judged(data: str, model: str, context: int, planner: tuple[str, float], iterations: int = ITERATIONS) -> Result:
    """One scheduler on the first iterations of a data set."""
    heads, found = HEADS[model], []
    sizes, packed = TokenBytes(q=256 * heads, kv=512, lse=4 * heads), sample(data, context * K)
    for index in range(iterations):
        for documents in iteration(packed, index, SERVERS * TOKENS // (context * K)):
            found.append(np.sum([_pass(documents, heads, sizes, planner, pass_) for pass_ in ("fwd", "bwd")], axis=0))
    slowest, average, moved, busiest = np.mean(found, axis=0)
    return Result(slowest * 1e3, slowest / average, moved / 1e9, busiest / 1e6)


def _pass(documents, heads, sizes, planner, pass_):  # type: ignore[no-untyped-def]
    """Seconds of the slowest server and of the mean, bytes moved, and bytes of the busiest GPU."""
    params, (variant, tolerance) = load_profile("h200").attention_params("fa2", pass_), planner
    tasks = schedule(
        documents, SERVERS, sizes, planner_kernel(params, heads, 1, 128), variant=variant, tolerance=tolerance
    )
    start = np.searchsorted(tasks.server, np.arange(SERVERS + 1))
    seconds = attention_seconds(
        params,
        start,
        tasks.tokens,
        tasks.kv,
        np.ones(len(tasks), bool),
        np.full(SERVERS, heads),
        np.full(SERVERS, 1),
        128,
    )
    sent = dispatch(tasks, SERVERS, sizes)
    both = sent.qkv + sent.out if pass_ == "fwd" else sent.bundle + sent.grads
    busiest = sent.busiest()[:2] if pass_ == "fwd" else sent.busiest()[2:]
    return seconds.max(), seconds.mean(), both.sum() - np.trace(both), busiest.sum()


def row(case: tuple[str, str, int], results: list[Result]) -> str:
    """One row of the table."""
    data, model, context = case
    cells = [f"{r.slowest_ms:.1f} ({r.uneven:.3f}), {r.moved_gb:.2f} GB, {r.busiest_mb:.0f} MB" for r in results]
    return f"| {data} | {model} | {context}K | " + " | ".join(cells) + " |"


def gains(table: list[list[Result]]) -> list[str]:
    """Rows that compare every scheduler with the first; means over the table."""
    lines = []
    for i, (variant, tolerance) in enumerate(PLANNERS[1:], start=1):
        time, moved, busiest = (
            100 * (mean(getattr(r[i], field) / getattr(r[0], field) for r in table) - 1)
            for field in ("slowest_ms", "moved_gb", "busiest_mb")
        )
        lines.append(f"| {variant} {tolerance} | {time:+.1f} % | {moved:+.1f} % | {busiest:+.1f} % |")
    return lines


def main() -> None:
    """Write the page."""
    table = [[judged(*case, planner) for planner in PLANNERS] for case in CASES]
    names = [f"{variant} {tolerance}" for variant, tolerance in PLANNERS]
    PAGE.write_text(
        "\n".join(
            [
                "# DistCA's schedulers",
                "",
                f"Written by `python studies/distca/page.py`. Schedulers are compared on {SERVERS} attention servers, "
                f"each a tensor-parallel group of 8 H200 with {TOKENS // K}K tokens of every nano-batch. A row is the "
                f"mean of {ITERATIONS} iterations of two nano-batches. Attention is flash-attn 2, priced by profile "
                "`h200`. Document lengths are drawn from stand-ins that have the distribution of DistCA's lists.",
                "",
                "Columns are schedulers, by variant and tolerance. A cell holds",
                "",
                "* the attention time of one layer and nano-batch on the slowest server, forward and backward [ms], "
                "and in brackets its ratio to the mean of all servers;",
                "* the bytes that move between servers;",
                "* the most bytes that one GPU sends or receives in the four exchanges.",
                "",
                "| data | model | context | " + " | ".join(names) + " |",
                "| --- | --- | --- |" + " --- |" * len(names),
                *(row(case, results) for case, results in zip(CASES, table, strict=True)),
                "",
                f"Relative to `{names[0]}`, the default of the released code; means over the rows above:",
                "",
                "| scheduler | time of the slowest server | bytes moved | bytes of the busiest GPU |",
                "| --- | --- | --- | --- |",
                *gains(table),
                "",
                "Published runs beside predictions: [with pipelines](pipelines.md), and without by `python -m studies "
                "distca`.",
                "",
            ]
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
