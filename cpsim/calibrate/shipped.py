"""The profiles that come with cpsim, and how each is made from the measurements of this repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cpsim.calibrate.fit import fit_profile
from cpsim.calibrate.measurement import load
from cpsim.calibrate.profile import Profile, load_profile, save_profile
from cpsim.calibrate.standin import StandIn
from cpsim.errors import ProfileError

DATA: Final = Path(__file__).parent / "data"


def recipes() -> dict[str, dict[str, Any]]:
    """By profile, in the order in which they can be made: patterns of its measurement `files`, and what stands in.

    Raises:
        ProfileError: measurements are not installed with cpsim.
    """
    path = DATA / "profiles.json"
    if not path.exists():
        raise ProfileError(f"{DATA}: expected measurements, which are not installed with cpsim; run this in a clone")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def make(name: str, folder: Path) -> Profile:
    """Fits one profile and writes it to a folder, which holds the profile that stands in for parts of it, if any."""
    recipe = recipes()[name]
    files = [load(path) for pattern in recipe["files"] for path in sorted(DATA.glob(pattern))]
    ratios = {key: recipe[key] for key in ("memory_ratio", "network_ratio") if key in recipe}
    base = recipe.get("base")
    stand_in = StandIn(profile=load_profile(folder / f"{base}.json"), **ratios) if base else None
    profile = fit_profile(files, name, stand_in)
    save_profile(profile, folder / f"{name}.json")
    return profile
