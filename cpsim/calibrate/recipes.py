"""How the profiles that come with cpsim are made from the measurements of this repository.

``data/manifest.yaml`` says what every file is, which fits read it, and what they leave out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from cpsim.calibrate.fit import fit_profile
from cpsim.calibrate.measurement import Measurements, Point, load
from cpsim.case.files import read_document
from cpsim.case.gpu import find_gpu
from cpsim.errors import ProfileError
from cpsim.models.profile import FOLDER, Profile, load_profile, save_profile
from cpsim.models.standin import StandIn

DATA: Final = Path(__file__).parents[2] / "data"
"""Measurements and runs; part of the repository, not of the installed package."""


@cache
def manifest() -> dict[str, dict[str, Any]]:
    """What every file is: ``profiles``, ``points`` and ``runs``; of the last two by path below ``DATA``.

    Raises:
        ProfileError: measurements are not installed with cpsim.
    """
    path = DATA / "manifest.yaml"
    if not path.exists():
        raise ProfileError(f"{DATA}: expected measurements, which are not installed with cpsim; run this in a clone")
    return dict(read_document(path))


def points_file(name: str) -> Path:
    """The measurement file of a name.

    Raises:
        ProfileError: there is none, or several.
    """
    return _only("points", name)


def runs_file(name: str) -> Path:
    """The file of real runs of a name; raises as ``points_file`` does."""
    return _only("runs", name)


def _only(kind: str, name: str) -> Path:
    found = [DATA / path for path in manifest()[kind] if Path(path).name == name]
    if len(found) != 1:
        raise ProfileError(
            f"{name}: expected one file of this name under {kind} of data/manifest.yaml, got {len(found)}"
        )
    return found[0]


def fitted_files(name: str) -> dict[Path, dict[str, Any]]:
    """The files that the fit of a profile reads, with their entries in the manifest."""
    return {DATA / path: about for path, about in manifest()["points"].items() if name in about.get("fits", {})}


def measurements(name: str) -> list[Measurements]:
    """What a profile is fitted to: chosen points of chosen files."""
    chosen = []
    for path, about in fitted_files(name).items():
        file = load(path)
        points = tuple(p for p in file.points if reads(about, name, p))
        chosen.append(replace(file, points=points))
    return chosen


def reads(about: dict[str, Any], name: str, point: Point) -> bool:
    """Whether the fit of a profile reads a point of a file, by the file's entry in the manifest."""
    only, without = about["fits"][name], about.get("without", {}).get(name, ())
    return only in ("all", point["op"]) and point.get("kind", point.get("kernel")) not in without


def stand_in(name: str, folder: Path = FOLDER) -> StandIn | None:
    """What stands in for parts of a profile, if anything; by default as shipped."""
    recipe = manifest()["profiles"][name]
    if "base" not in recipe:
        return None
    return StandIn.of(
        load_profile(folder / f"{recipe['base']}.json"), find_gpu(recipe["onto"]) if "onto" in recipe else None
    )


def make_profile(name: str, folder: Path) -> Profile:
    """Fits one profile and writes it to a folder, which holds the profile that stands in for parts of it, if any."""
    base = stand_in(name, folder)
    profile = fit_profile(measurements(name), name, base)
    save_profile(
        profile, folder / f"{name}.json", base.source if base else None, manifest()["profiles"][name].get("onto")
    )
    return profile
