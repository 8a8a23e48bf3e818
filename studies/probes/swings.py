"""How attention's time swings when it runs back to back, tenth of a second by tenth of a second.

    python -m studies.probes.swings --out swings.json
    python -m studies.probes.swings --show data/points/h200/swings/h200x1-1129a.json

Both passes of cuDNN's attention as PyTorch calls it, with grouped heads and without, launched one by one and as a CUDA
graph. A limiter of power looks at about a second, and answers too strongly: for two or three tenths of every second
calls take 9 to 17 % longer, whoever launches them and however heads are grouped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpsim.real.run.timing import command_line, provenance

SHAPES = (
    (6016, 40, 8, True),
    (6016, 40, 40, True),
    (11008, 28, 4, True),
    (11008, 28, 28, True),
    (9344, 32, 8, False),
    (9344, 32, 32, False),
    (9856, 24, 24, True),
    (9856, 24, 3, True),
)
"""Tokens, heads, key-value heads, and whether the mask is causal."""
SECONDS, BIN_S = 2.5, 0.1
FIRST = 5
"""Tenths that do not count: the GPU is still cool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """Milliseconds of one iteration, in the mean of each tenth of a second."""

    tokens: int
    heads: int
    kv_heads: int
    causal: bool
    eager_ms: Sequence[float]
    graph_ms: Sequence[float]


def swing(tokens: int, heads: int, kv_heads: int, causal: bool) -> Swing:
    """Measures one shape."""
    q, k, v = (
        torch.randn(1, n, tokens, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    dout = torch.randn_like(q)

    def step() -> None:
        q.grad = k.grad = v.grad = None
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
        out.backward(dout)

    for _ in range(5):
        step()
    eager = tenths(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    time.sleep(1.0)
    return Swing(
        tokens=tokens, heads=heads, kv_heads=kv_heads, causal=causal, eager_ms=eager, graph_ms=tenths(graph.replay)
    )


def tenths(step: Callable[[], None]) -> list[float]:
    """Milliseconds of an iteration, by tenths of a second, back to back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    each = max(1, round(BIN_S / (time.perf_counter() - start)))
    marks, end = [_mark()], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for _ in range(each):
            step()
        marks.append(_mark())
        while len(marks) > 3 and not marks[-3].query():
            time.sleep(5e-4)
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / each for a, b in pairwise(marks)]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def show(swings: Sequence[Swing]) -> None:
    """A line for each: mean, median and longest tenth."""
    print("tokens  heads   mask    eager: mean  median  longest   graph: mean  median  longest")
    for one in swings:
        both = [x[FIRST:] for x in (one.eager_ms, one.graph_ms)]
        numbers = "   ".join(f"{mean(x):8.2f} ms {median(x):6.2f} {max(x) / median(x) - 1:+7.0%}" for x in both)
        print(f"{one.tokens:6} {one.heads:3}:{one.kv_heads:<3} {'causal' if one.causal else 'full':7} {numbers}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="a file that was measured")
    args = parser.parse_args()
    if args.show:
        show([Swing(**one) for one in json.loads(args.show.read_text())["swings"]])
        return
    swings = [swing(*shape) for shape in SHAPES]
    show(swings)
    if args.out:
        header = provenance(torch.device("cuda", 0), 1, {}, command_line("studies.probes.swings"), "")
        args.out.write_text(json.dumps({"header": header, "swings": [asdict(one) for one in swings]}))


if __name__ == "__main__":
    main()
