"""Predicts every GPU from the others: ``python -m studies.left_out`` prints how wrong that is.

Of each GPU with kernel points, measured here or published, profiles of its own are left out; its costs are derived from
the other GPUs through its description, products and memory-bound ops without what the description says that its long
products reach. Kernels are of the code that the table names, as far as another GPU has that. Rows give the errors of
its calls, relative and logarithmic, positive where the prediction is too slow, and the share of them inside the 90 %
interval. Tables that another of the same GPU contradicts, or of code that no other GPU has, are listed apart.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from cpsim.calibrate.fit import current, large_model
from cpsim.calibrate.measurement import Point, load
from cpsim.calibrate.recipes import DATA, manifest, measurements
from cpsim.calibrate.residuals import LEAST_FLOPS, model_of, residuals
from cpsim.case.gpu import Gpu, gpu_of_driver, gpus
from cpsim.models.derive import sustained_flops
from cpsim.models.gemm import FP8_BYTES, FP8_SIGMA, gemm_seconds, in_fp8
from cpsim.models.parameters import Profile
from cpsim.models.profile import derived_profile

QUANTILE: Final = 1.645
"""Of a normal distribution, of an interval of 90 %."""
FEWEST: Final = 4
"""Calls of a row."""
BEST: Final = "mamf"
"""The table of products that has the best of each GPU: what its description goes by, no test of it."""
TABLES: Final = "points/published/"
IN_GRAPHS: Final = (
    "tens of microseconds again and again in a CUDA graph, operands in the cache; timed so, an H100's products take an "
    "eighth less than those that we measured, too"
)
OLDER: Final = "code of 2025, slower than that of 2026, which was measured here"
APART: Final = {
    "b200 | attention bwd cudnn | b200": "calls of Transformer Engine with packed lengths and a padding mask "
    "(MagiAttention, exps/attn/baselines/attn_impl.py); at 32,768 tokens they take 1.5 times as long as NVIDIA's table "
    "says of dense ones",
    "b200 | attention fwd cudnn | b200": "as its backward pass; 1.1 times",
    "b200 | attention bwd fa4, windows | b200": "as long as without windows: that version passes over nothing",
    "b200 | attention fwd flex | b200": "PyTorch of a year before, whose Triton hardly knows Blackwell; on H100, too, "
    "its backward pass takes up to 1.5 times as long as what was measured here",
    "b200 | attention bwd flex | b200": "as its forward pass",
    "b200 | attention bwd cudnn, windows | b200": "as without windows",
    "h100 | attention fwd flex | h100-magi": OLDER,
    "h100 | attention bwd flex | h100-magi": OLDER,
    "h100 | attention fwd flex | h100-longca": OLDER,
    "h100 | attention bwd flex | h100-longca": OLDER,
    "h100 | attention bwd cudnn, windows | h100-magi": OLDER,
    "b200 | matrix products bf16 | simumax": "a node whose long products reach 1,080 TFLOP/s, where torchao's, vllm's "
    "and mamf's B200 reach 1,420 to 1,745; Meta's, limited to 750 W, reach 1,088 (facebookexperimental/triton, pull "
    "request 854)",
    "b200 | matrix products bf16 | vllm": IN_GRAPHS,
    "h100 | matrix products bf16 | vllm": IN_GRAPHS,
    "a100-pcie | attention fwd cudnn | a100-pcie-nvidia": "code of before Hopper, of which no other GPU has a table; "
    "flash-attention 2 stands in",
    "a100-pcie | attention bwd cudnn | a100-pcie-nvidia": "as its forward pass",
}
"""Rows that say little about derivations, by GPU, cost model and table, with the reason."""
HERE: Final = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
"""GPUs measured here, as their driver names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Errors of one kind of calls of one GPU."""

    gpu: str
    model: str
    """As in Profile.sigma; products in FP8 by their type."""
    table: str
    """Whose times."""
    points: int
    mean_absolute: float
    bias: float
    covered: float
    sigma: float

    @property
    def key(self) -> str:
        """Of ``APART``."""
        return f"{self.gpu} | {self.model} | {self.table}"


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Errors of left-out GPUs, of every kind of calls that there are points of."""
    for name in names:
        gpu = gpus()[name]
        for table, (points, versions) in tables(gpu).items():
            yield from _errors(gpu, left_out(gpu, tuple(versions.items())), table, points)
        yield from _products(gpu, left_out(gpu))


@cache
def left_out(gpu: Gpu, versions: tuple[tuple[str, int], ...] = ()) -> Profile:
    """The profile of a GPU as if nothing had been measured or published of its kernels.

    Args:
        gpu: as described.
        versions: of kernels' code.
    """
    described = derived_profile(gpu, without=gpu.name, versions=versions)
    alone = derived_profile(replace(gpu, sustained_flops_per_s=by_power(gpu)), without=gpu.name)
    return replace(described, layers=alone.layers, elementwise=alone.elementwise)


def by_power(gpu: Gpu) -> float:
    """What its long products would reach by its power limit and the other GPUs alone."""
    return sustained_flops(replace(gpu, sustained_flops_per_s=None), without=gpu.name)


def tables(gpu: Gpu) -> dict[str, tuple[Sequence[Point], dict[str, int]]]:
    """Points of a GPU and the versions of kernels that they name, by whose they are: published tables, and those that
    its fit reads where it was measured here."""
    found: dict[str, tuple[Sequence[Point], dict[str, int]]] = {}
    for path in (path for path in manifest()["points"] if path.startswith(TABLES) and path.endswith(".jsonl")):
        file = load(DATA / path)
        if gpu_of_driver(file.header["gpu"]) == gpu:
            versions = {kernel: int(version) for kernel, version in file.header.get("kernels", {}).items()}
            found[path.removeprefix(TABLES).removesuffix(".jsonl")] = file.points, versions
    if gpu.name in HERE:
        found["measured here"] = current(measurements(gpu.name), HERE[gpu.name]), {}
    return found


def _errors(gpu: Gpu, profile: Profile, table: str, points: Sequence[Point]) -> Iterator[Row]:
    others = {"matrix products", "memory-bound", "elementwise of layers"}
    known = {f"attention {pass_} {kernel}" for kernel, pass_ in profile.attention} | others
    chosen = [p for p in points if large_model(p) and model_of(p) in known]
    found: dict[str, list[float]] = {}
    for one in residuals(profile, chosen):
        found.setdefault(one.model + _shape(one.point), []).append(one.error)
    for model, errors in sorted(found.items()):
        if len(errors) >= FEWEST:
            yield _row(gpu, model, table, errors, profile.sigma[model.split(",")[0]])


def _shape(point: Point) -> str:
    """Of calls that are not like most, which have rows of their own."""
    return ", windows" * ("window" in point) + ", values of another size" * ("value_dim" in point)


def _products(gpu: Gpu, profile: Profile) -> Iterator[Row]:
    """Published products."""
    assert profile.layers is not None
    with (DATA / TABLES / "products.csv").open(encoding="utf-8") as file:
        every = csv.DictReader(line for line in file if line[0] != "#")
        mine = [row for row in every if row["gpu"] == gpu.name and _flop(row) >= LEAST_FLOPS]
    for dtype, source in sorted({(row["dtype"], row["table"].split()[0]) for row in mine if row["table"] != BEST}):
        chosen = [row for row in mine if row["dtype"] == dtype and row["table"].startswith(source)]
        m, n, k = (np.array([float(row[size]) for row in chosen]) for size in "mnk")
        gemm, sigma = profile.layers.gemm, profile.sigma["matrix products"]
        seconds = gemm_seconds(gemm, m, n, k)
        if dtype == "fp8":
            seconds = gemm_seconds(in_fp8(gemm, "tensorwise"), m, n, k, operand_bytes=FP8_BYTES)
            sigma = float(np.hypot(sigma, FP8_SIGMA))
        rate = np.array([float(row["tflops"]) for row in chosen]) * 1e12
        yield _row(gpu, f"matrix products {dtype}", source, np.log(seconds * rate / (2 * m * n * k)), sigma)


def _flop(row: dict[str, str]) -> float:
    return 2 * float(row["m"]) * float(row["n"]) * float(row["k"])


def _row(gpu: Gpu, model: str, table: str, errors: ArrayLike, sigma: float) -> Row:
    errors = np.asarray(errors, np.float64)
    return Row(
        gpu=gpu.name,
        model=model,
        table=table,
        points=len(errors),
        mean_absolute=float(np.abs(errors).mean()),
        bias=float(errors.mean()),
        covered=float((np.abs(errors) <= QUANTILE * sigma).mean()),
        sigma=sigma,
    )


def table_of(found: Sequence[Row]) -> str:
    """Rows as a table of Markdown, and those that stand apart."""
    within, apart = ([row for row in found if (row.key in APART) == out] for out in (False, True))
    text = _table(within)
    if apart:
        reasons = "\n".join(f"- {row.key.replace(' | ', ', ')}: {APART[row.key]}" for row in apart)
        text += f"\n\nApart, and why:\n\n{_table(apart)}\n\n{reasons}"
    return text


def _table(found: Sequence[Row]) -> str:
    lines = [
        "| GPU | cost model | times of | calls | mean error | sign | inside 90 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        errors = f"{row.mean_absolute:.1%} | {row.bias:+.1%} | {row.covered:.0%}".replace("%", " %")
        lines.append(f"| {row.gpu} | {row.model} | {row.table} | {row.points:,} | {errors} |")
    return "\n".join(lines)


def products_of(names: Sequence[str]) -> str:
    """What long products reach, as described and by power alone, as a table of Markdown."""
    lines = ["| GPU | long bf16 products [TFLOP/s] | by power alone |", "|---|---|---|"]
    for gpu in (gpus()[name] for name in names):
        said = f"{gpu.sustained_flops_per_s / 1e12:.0f}" if gpu.sustained_flops_per_s else ""
        lines.append(f"| {gpu.name} | {said} | {by_power(gpu) / 1e12:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m studies.left_out", description=__doc__)
    parser.add_argument("gpus", nargs="*", default=list(gpus()), help="GPUs to leave out, by default all")
    parser.add_argument("--json", action="store_true")
    given: Any = parser.parse_args(arguments)
    found = list(rows(given.gpus))
    if given.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    else:
        print(table_of(found), products_of(given.gpus), sep="\n\n")


if __name__ == "__main__":
    main()
