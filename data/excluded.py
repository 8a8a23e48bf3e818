"""What is left out of fits, and what that changes: errors of the shipped profiles with and without it.

    python data/excluded.py

A line for every file of data/manifest.yaml that has kinds of ops or kernels under `without`: the shipped profile's mean
error over the points of these kinds that its fit reads, over those that it leaves out, and over both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))

from cpsim.calibrate.measurement import Point, load
from cpsim.calibrate.recipes import DATA, manifest, measurements
from cpsim.calibrate.residuals import residuals, usable
from cpsim.errors import ProfileError
from cpsim.models.profile import Profile, load_profile


def kind(point: Point) -> str:
    """Kind of op, or kernel of attention."""
    return str(point.get("kind", point.get("kernel")))


def errors(profile: Profile, points: Sequence[Point]) -> list[float]:
    """Sizes of the errors of some points."""
    return [abs(row.error) for row in residuals(profile, points)]


def effect(profile: str, name: str, without: Sequence[str]) -> str:
    """What leaving points out of a file changes, in words."""
    fitted, ours, theirs, lacking = load_profile(profile), list[float](), list[float](), list[str]()
    everything = [p for m in measurements(profile) for p in m.points if usable(p)]
    for one in without:
        left_out = [p for p in load(DATA / name).points if kind(p) == one and usable(p)]
        ops = {p["op"] for p in left_out}
        try:
            theirs += errors(fitted, left_out)
            ours += errors(fitted, [p for p in everything if kind(p) == one and p["op"] in ops])
        except (ProfileError, KeyError):
            lacking.append(f"{one} ({len(left_out)} points)")
    said = [f"{len(ours)} points read, {mean(ours):.1%} off"] if ours else []
    said += [f"{len(theirs)} left out, {mean(theirs):.1%} off; together {mean([*ours, *theirs]):.1%}"] if theirs else []
    said += [f"{profile} has no model of {', '.join(lacking)}"] if lacking else []
    return "; ".join(said)


def effects() -> Iterator[tuple[str, str, str]]:
    """Profile, file, and the effect."""
    for name, about in manifest()["points"].items():
        for profile, without in about.get("without", {}).items():
            yield profile, name, effect(profile, name, without)


if __name__ == "__main__":
    for profile, name, said in effects():
        print(f"{profile} {name}: {said}")
