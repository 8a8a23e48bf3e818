"""Kernels of a layer in turns under the power limit, beside what each takes alone.

    python -m studies.mixes

Loads of ``cpsim.real.measure.watts``: each kernel kept up alone, and several in turns, as a layer has them. All of them
together take as long as alone, to a percent: under the limit time is energy over power, and turns do not change the
energy. Among them products gain what attention loses, since they share one clock. An error is the sum of times alone
over that in turns, less one; *products* and *attention* are the same of these kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median
from typing import Final

import numpy as np

from cpsim.calibrate.fit import fit_in_turns
from cpsim.calibrate.measurement import Point, load
from cpsim.calibrate.recipes import points_file
from cpsim.models.parameters import IN_TURNS

FILES: Final = ("h100x2-watts.jsonl", "h200x4-watts.jsonl")
PRODUCTS: Final = ("gemm", "fp8")
ATTENTION: Final = (" fwd", " bwd")


def of_layers(file: str) -> Iterator[tuple[Point, dict[str, float]]]:
    """Every load of several kernels, and seconds of each kernel of the file alone."""
    points = load(points_file(file)).points
    alone = {p["kind"]: median(p["samples_s"]) for p in points if p["op"] == "power"}
    for point in points:
        if point["op"] == "mix":
            yield point, alone


def error(point: Point, alone: dict[str, float], kinds: list[str]) -> float | None:
    """Of kernels of some kinds; None where the load has none."""
    mine = [(alone[kind], s) for kind, s in zip(point["mix"], point["samples_s"], strict=True) if kind in kinds]
    return sum(a for a, _ in mine) / sum(s for _, s in mine) - 1 if mine else None


def main() -> None:
    """Prints the table."""
    print(f"{'in turns':32}{'all':>8}{'products':>10}{'attention':>10}")
    for file in FILES:
        whole = []
        for point, alone in of_layers(file):
            products = [k for k in alone if k.startswith(PRODUCTS)]
            attention = [k for k in alone if k.endswith(ATTENTION)]
            found = [error(point, alone, kinds) for kinds in ([*alone], products, attention)]
            whole.append(found[0] or 0.0)
            name = f"{file[:4]} {point['kind']}"
            print(
                f"{name:32}"
                + "".join(f"{e:+{w}.1%}" if e is not None else " " * w for e, w in zip(found, (8, 10, 10), strict=True))
            )
        print(f"{file[:4] + ' mean, sign':32}{mean(map(abs, whole)):8.1%}{mean(whole):+10.1%}")
        slower = np.expm1(fit_in_turns([load(points_file(file))])[IN_TURNS])
        print(f"{file[:4]}: in layers, if products and attention lose it all, they are {slower:.1%} slower than alone")


if __name__ == "__main__":
    main()
