"""Files of profiles, those that ship, and profiles of every GPU that is described.

Loads without scipy. Only this module knows the file format: JSON with an integer `schema`. A file may name another
profile as its `base`, beside it or shipped, whose parts it then has where it gives none of its own; so has an attention
kernel that says "base" instead of its parameters. With `onto`, the name of a GPU, the base's parts are first moved onto
that GPU by its description.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from cpsim.case.files import as_profile_error, explain, parse_json, read_text
from cpsim.case.gpu import Gpu, find_gpu, gpu_of_driver, gpus
from cpsim.errors import ProfileError, nearest, shown
from cpsim.models.attention.params import AttentionParams
from cpsim.models.derive import Lender, derived, kernels_alike, moved
from cpsim.models.parameters import LayerCosts as LayerCosts
from cpsim.models.parameters import Profile as Profile
from cpsim.runtime.files import noted, while_unchanged, write

SCHEMA = 4
BASE = "base"
"""What an attention kernel says that is the base's."""
FOLDER = Path(__file__).parent.with_name("data") / "profiles"


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with cpsim."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or any profile file.

    Raises:
        ProfileError: one line that says what is wrong with it.
    """
    return _load(str(name_or_path))


@while_unchanged
def _load(name: str) -> Profile:
    path = noted(FOLDER / f"{name}.json")
    if not os.path.exists(path) and not os.path.exists(noted(Path(name))):
        if (gpu := find_gpu(name)) is not None:
            return load_profile(gpu.name) if gpu.name in shipped_profiles() else derived_profile(gpu)
        close = nearest(name, (*shipped_profiles(), *gpus()))
        hint = f"{close}; " if close.startswith("did") else ""
        raise ProfileError(
            f"no profile {shown(name)}; {hint}shipped are {', '.join(shipped_profiles())}, derived those of GPUs "
            f"{', '.join(name for name in gpus() if name not in shipped_profiles())}; or give a file"
        )
    if not os.path.exists(path):
        return from_json(whole_data(Path(name)), name)
    profile = from_json(whole_data(path), str(path))
    return _with_kernels_alike(name, profile) if "onto" in _read(path) else profile


def _with_kernels_alike(name: str, profile: Profile) -> Profile:
    """A shipped profile of published kernels with those that it lacks as GPUs of the same family have them, rather than
    as its base, which is of another."""
    gpu, own = _own_kernels(name)
    others = [(theirs, known) for one in shipped_profiles() for theirs, known in [_own_kernels(one)] if theirs]
    keys = (kernels_alike(gpu, others) & profile.attention.keys()) - own if gpu else frozenset()
    if gpu is None or not keys:
        return profile
    theirs = from_json(_data(derived_profile(gpu)), gpu.name)  # as a file has it
    about = tuple(f"attention {pass_} {kernel}" for kernel, pass_ in keys)
    ends = tuple(f"{one} " for one in about)
    return replace(
        profile,
        attention={**profile.attention, **{key: theirs.attention[key] for key in keys}},
        sigma={**profile.sigma, **{one: theirs.sigma[one] for one in about}},
        valid={
            **{name: limits for name, limits in profile.valid.items() if not name.startswith(ends)},
            **{name: limits for name, limits in theirs.valid.items() if name.startswith(ends)},
        },
        grade=f"{profile.grade}; of these {', '.join(sorted({kernel for kernel, _ in keys}))} from GPUs alike",
    )


@lru_cache(maxsize=64)
def derived_profile(gpu: Gpu, without: str = "", versions: tuple[tuple[str, int], ...] = ()) -> Profile:
    """The profile of a GPU from what is measured and published of others.

    Args:
        gpu: as described.
        without: a GPU whose profiles do not count, as if nothing was known of it.
        versions: of kernels' code, as in ``derived``, by kernel.
    """
    return derived(gpu, [lender for lender in lenders() if lender.gpu.name != without], dict(versions))


def how_known(gpu: Gpu) -> str:
    """What a GPU's costs rest on: `measured`, `published kernels` or `data sheet`."""
    own = [lender for lender in lenders() if lender.gpu == gpu]
    return "measured" if any(lender.whole for lender in own) else "published kernels" if own else "data sheet"


def lenders() -> list[Lender]:
    """The shipped profiles, and what of each is its own; of a kernel that several have of one GPU that of the profile
    that is named as the GPU."""
    found = {name: lender for name in shipped_profiles() if (lender := _lender(name)) is not None}
    first = {name: lender.kernels for name, lender in found.items() if name == lender.gpu.name}
    return [
        lender if name in first else replace(lender, kernels=lender.kernels - first.get(lender.gpu.name, frozenset()))
        for name, lender in found.items()
    ]


@while_unchanged
def _lender(name: str) -> Lender | None:
    path = noted(FOLDER / f"{name}.json")
    data, profile = _read(path), from_json(whole_data(path), str(path))
    gpu, kernels = _own_kernels(name)
    whole = "onto" not in data and not profile.grade.startswith("kernels from published")
    return Lender(profile=profile, gpu=gpu, kernels=kernels, whole=whole, versions=_versions(profile)) if gpu else None


@while_unchanged
def _own_kernels(name: str) -> tuple[Gpu | None, frozenset[tuple[str, str]]]:
    """The GPU of a shipped profile, and the kernels and passes that its file does not leave to its base."""
    data = _read(noted(FOLDER / f"{name}.json"))
    own = [tuple(key.split(" ")) for key, value in data.get("attention", {}).items() if value != BASE]
    gpu = gpu_of_driver(str(data.get("onto") or data.get("gpu")))
    return gpu, frozenset((kernel, pass_) for kernel, pass_ in own)


def _versions(profile: Profile) -> dict[str, int]:
    """The newest versions of kernels' code behind a profile, of those that count in whole numbers."""
    said = [(k, str(v)) for row in profile.provenance for k, v in row.get("kernels", {}).items()]
    found: dict[str, int] = {}
    for kernel, version in said:
        if version.isdecimal() and len(version) < 10:
            found[kernel] = max(int(version), found.get(kernel, 0))
    return found


def _read(path: Path) -> dict[str, Any]:
    """Parsed JSON of a profile file of this version."""
    with as_profile_error("; is the file cut off?"):
        data = parse_json(read_text(path), str(path))
    _check_format(data, str(path))
    return dict(data)


def _check_format(data: Any, source: str) -> None:
    if not isinstance(data, dict) or data.get("format") != "cpsim-profile":
        raise ProfileError(f"{source}: expected format 'cpsim-profile'; is this a profile file?")
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        mend = "make it again with `cpsim fit`" if type(schema) is int and schema < SCHEMA else "update cpsim"
        raise ProfileError(f"{source}: schema {shown(schema)}, this version reads {SCHEMA}; {mend}")


def whole_data(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Parsed JSON of a profile file with the parts of its base that it gives none of its own of.

    Raises:
        ProfileError: it or its base cannot be read.
    """
    data = _read(path)
    if "base" not in data:
        return data
    name, kernels = data.pop("base"), data.get("attention", {})
    if not isinstance(name, str) or Path(name).name != name or not isinstance(kernels, dict):
        raise ProfileError(f"{path}: expected the name of a base, and kernels of its own, got base {shown(name)}")
    places = (path.with_name(f"{name}.json"), FOLDER / f"{name}.json")
    base = next((place for place in places if os.path.exists(noted(place)) and place not in (path, *seen)), None)
    if base is None:
        raise ProfileError(f"{path}: expected its base {shown(name)} beside it or among {shipped_profiles()}")
    theirs = whole_data(base, (path, *seen))
    if "onto" in _read(base) and base.parent == FOLDER:
        theirs = _data(load_profile(name))  # with kernels of GPUs alike
    if (onto := data.pop("onto", None)) is not None:
        theirs = _onto(theirs, str(onto), base)
    missing = [kernel for kernel, own in kernels.items() if own == BASE and kernel not in theirs["attention"]]
    if missing:
        raise ProfileError(f"{path}: attention: its base {shown(name)} has no kernel {shown(missing[0])}")
    own = {kernel: theirs["attention"][kernel] if own == BASE else own for kernel, own in kernels.items()}
    return {**theirs, **data, "attention": own}


def _onto(data: Any, name: str, path: Path) -> dict[str, Any]:
    """Parsed JSON of a base as it is on another GPU."""
    profile, gpu = from_json(data, str(path)), find_gpu(name)
    theirs = gpu_of_driver(profile.gpu)
    if gpu is None or theirs is None:
        raise ProfileError(f"{path}: expected onto a GPU of {', '.join(gpus())}, got {shown(name)} of {profile.gpu}")
    return _data(moved(profile, theirs, gpu))


def from_json(data: Any, source: str) -> Profile:
    """A profile from parsed JSON without a base; `source` is named in errors."""
    _check_format(data, source)
    fields = {name: value for name, value in data.items() if name not in ("format", "schema")}
    try:
        profile = _adapter().validate_python(fields)
        for where, number in _numbers(profile.provenance, "provenance"):
            if not np.isfinite(number):
                raise ValueError(f"{where}: expected a finite number, got {number}")
    except ValidationError as error:
        raise ProfileError(f"{source}: {explain(error, Profile.__dataclass_fields__)}") from None
    except ValueError as error:
        raise ProfileError(f"{source}: {error}") from None
    return profile


@cache
def _adapter() -> TypeAdapter[Profile]:
    return TypeAdapter(Profile)


def _numbers(value: Any, where: str) -> Iterable[tuple[str, float]]:
    """Every number in parsed JSON, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{where}[{i}]")
    elif isinstance(value, float):
        yield where, value


def to_json(profile: Profile, base: Profile | None = None, onto: str | None = None) -> str:
    """The profile as a JSON text, the same for equal profiles, without what it shares with its `base`, which is moved
    `onto` a GPU first, if given."""
    data = _data(profile)
    if base is not None:
        theirs = _data(base) if onto is None else _onto(_data(base), onto, Path(base.name))
        kernels = {k: BASE if theirs["attention"].get(k) == v else v for k, v in data["attention"].items()}
        own = {key: data.get(key) for key in theirs | data if data.get(key) != theirs.get(key)}  # None: it has none
        data = {
            "schema": SCHEMA,
            "format": data["format"],
            "base": base.name,
            **({"onto": onto} if onto else {}),
            **own,
            "attention": kernels,
        }
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _data(profile: Profile) -> dict[str, Any]:
    data: dict[str, Any] = {"schema": SCHEMA, "format": "cpsim-profile"}
    for field in dataclasses.fields(profile):
        value = getattr(profile, field.name)
        if field.name == "attention":
            value = {" ".join(key): _attention_data(params) for key, params in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {name: part for name, part in dataclasses.asdict(value).items() if part is not None}
        elif field.name == "sparse" and value is not None:
            value = {name: dataclasses.asdict(rates) for name, rates in value.items()}
        if value is not None:
            data[field.name] = value
    return dict(_rounded(data))


def _attention_data(params: AttentionParams) -> dict[str, Any]:
    """Parameters as JSON has them, without those at their defaults."""
    data = dataclasses.asdict(params) | {"head_dims": [_attention_data(other) for other in params.head_dims]}
    for owner, values in ((params, data), (params.anatomy, data["anatomy"])):
        for field in dataclasses.fields(owner):
            if _rounded(field.default) == _rounded(getattr(owner, field.name)):  # as it would be read again
                del values[field.name]
    return data


def _rounded(value: Any) -> Any:
    """Floats with 6 significant digits: beyond that is noise, and files stay the same between machines."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}")
    return value


def save_profile(profile: Profile, path: str | Path, base: Profile | None = None, onto: str | None = None) -> None:
    """Writes a profile file; with a `base`, which has to lie beside it or be a shipped one, only what differs from it,
    moved `onto` a GPU if that is given."""
    write(Path(path), to_json(profile, base, onto))
