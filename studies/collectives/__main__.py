"""``python -m studies.collectives``: every cluster by the law as all others set it; ``--fit`` writes its constants."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from studies.collectives.fit import fit, left_out, save, spread_of
from studies.collectives.rows import DISPUTED, FILES, Row, read

Floats = NDArray[np.float64]


def inside(rows: list[Row], errors: Floats) -> NDArray[np.bool_]:
    """Whether each row is within the 90 % interval that errors of the other clusters set."""
    names = np.array([row.cluster for row in rows])
    limit = {name: 1.645 * spread_of(errors[names != name]) for name in dict.fromkeys(names.tolist())}
    return np.abs(errors) <= np.array([limit[name] for name in names.tolist()])


def line(name: str, errors: Floats, covered: NDArray[np.bool_]) -> str:
    """Mean, sign, worst and coverage of some rows."""
    off = np.expm1(errors)
    worst = off[np.argmax(np.abs(off))]
    return (
        f"{name:30} {len(off):4} {np.abs(off).mean():7.1%} {off.mean():+7.1%} {worst:+7.0%} "
        f"{'':3} {covered.mean():5.0%}"
    )


def disputes(rows: list[Row]) -> list[str]:
    """How far publications of the same machines are apart, at the sizes that both have."""
    said = []
    for name, (other, words) in DISPUTED.items():
        mine, theirs = ({(r.kind, r.nbytes): r.seconds for r in rows if r.cluster == one} for one in (name, other))
        ratios = [mine[size] / theirs[size] for size in sorted(mine.keys() & theirs.keys())]
        apart = f"{min(ratios):.2f} to {max(ratios):.2f} times as long as {other}, which counts as undisputed"
        said.append(f"{name} takes {apart}: {words}")
    return said


def main() -> None:
    """Prints the tables."""
    rows, left = read()
    errors = left_out(rows)
    covered = inside(rows, errors)
    print(f"{'left out':30} rows    mean    sign   worst  inside 90 %")
    agreed = [row.cluster not in DISPUTED for row in rows]
    for values in (
        [row.cluster for row in rows],
        [row.kind if row.file == FILES[0] else "" for row in rows],
        [row.kind + ", more logs, too" for row in rows],
        ["all"] * len(rows),
        [row.kind + ", undisputed" if here else "" for row, here in zip(rows, agreed, strict=True)],
        ["all, undisputed" if here else "" for here in agreed],
    ):
        for value in filter(None, dict.fromkeys(values)):
            mine = np.array([one == value for one in values])
            print(line(value, errors[mine], covered[mine]))
        print()
    print(*disputes(rows), "", sep="\n")
    for reason, count in left.items():
        print(f"{count:4} rows not compared: {reason}")
    if "--fit" in sys.argv[1:]:
        found = fit(rows)
        save(found, errors)
        print({name: float(f"{value:.3g}") for name, value in found.values.items()})


if __name__ == "__main__":
    main()
