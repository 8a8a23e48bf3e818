"""The profiles that come with cpsim, and how each is made from the measurements of this repository."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cpsim.calibrate.fit import fit_profile
from cpsim.calibrate.measurement import Measurements, load
from cpsim.errors import ProfileError
from cpsim.models.profile import FOLDER, Profile, load_profile, save_profile
from cpsim.models.standin import StandIn

DATA: Final = Path(__file__).parent / "data"


def recipes() -> dict[str, dict[str, Any]]:
    """By profile, in the order in which they can be made: patterns of its measurement `files`, and what stands in.

    Of files under `only` no more than points of one op count, since others have the rest. Of `h200-sweeps-2` there is
    TorchScript's merge alone, which had been measured on tensors laid out otherwise. Kinds of ops and
    kernels under `without` do not count: reductions of layers in later files of a GPU, since they are compiled for the
    rows that they first meet and take from half as long to three times as long as in another process; five calls of
    fa4_sparse in `h100-masked-blocks-math`, from which others of them are predicted 11 % off.

    Raises:
        ProfileError: measurements are not installed with cpsim.
    """
    path = DATA / "profiles.json"
    if not path.exists():
        raise ProfileError(f"{DATA}: expected measurements, which are not installed with cpsim; run this in a clone")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def measurements(name: str) -> list[Measurements]:
    """What a profile is fitted to."""
    recipe, chosen = recipes()[name], []
    for pattern in recipe["files"]:
        op = recipe.get("only", {}).get(pattern)
        for file in (load(path) for path in sorted(DATA.glob(pattern))):
            without = recipe.get("without", {}).get(file.source, ())
            points = (p for p in file.points if op in (None, p["op"]) and p.get("kind", p.get("kernel")) not in without)
            chosen.append(replace(file, points=tuple(points)))
    return chosen


def stand_in(name: str, folder: Path = FOLDER) -> StandIn | None:
    """What stands in for parts of a profile, if anything; by default as shipped."""
    recipe = recipes()[name]
    if "base" not in recipe:
        return None
    ratios = {key: recipe[key] for key in ("memory_ratio", "network_ratio", "sm_ratio") if key in recipe}
    return StandIn(profile=load_profile(folder / f"{recipe['base']}.json"), **ratios)


def make(name: str, folder: Path) -> Profile:
    """Fits one profile and writes it to a folder, which holds the profile that stands in for parts of it, if any."""
    profile = fit_profile(measurements(name), name, stand_in(name, folder))
    save_profile(profile, folder / f"{name}.json")
    return profile
