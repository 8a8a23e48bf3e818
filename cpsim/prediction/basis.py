"""What a prediction rests on besides the fields of its scenario: the files that they name, and cpsim itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from cpsim.case.cluster import load_cluster
from cpsim.case.load import beside
from cpsim.errors import CpsimError
from cpsim.models.derive import DATA_SHEET
from cpsim.models.host_speed import load_host
from cpsim.models.profile import load_profile
from cpsim.runtime.files import noted, while_unchanged

PACKAGE: Final = Path(__file__).parents[1]
NOT_ASKED: Final = ("calibrate", "report", "explore", "cli", "real")
"""Rooms that predictions do not come from."""
LONGEST_NAME: Final = 1000


def basis_of(fields: Any, folder: Path) -> str:
    """A digest of cpsim, and of the content of all files that an entry refers to: a cluster with its profile and the
    profile's base, and whatever else has the name of a file.

    Args:
        fields: of a scenario, right or wrong.
        folder: of the file that they are from, where names are looked up.
    """
    named = fields if isinstance(fields, Mapping) else {}
    cluster, profile = (beside(name, folder) if isinstance(name := named.get(key), str) else None for key in _LOOKED_UP)
    texts = {text for text in _texts(named) if len(text) <= LONGEST_NAME}
    files = [(text, _content(path)) for text in sorted(texts) if (path := _file(text, folder)) is not None]
    return sha256(repr((_cpsim(), _resolved(cluster, profile), files)).encode()).hexdigest()[:32]


_LOOKED_UP: Final = ("cluster", "profile")


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for entry in value.values():
                yield from _texts(entry)
        case [first, *_] if not isinstance(first, int):
            for entry in value:
                yield from _texts(entry)


def _file(text: str, folder: Path) -> Path | None:
    return next((path for path in (folder / text, Path(text)) if os.path.isfile(path)), None)


@while_unchanged
def _content(path: Path) -> str:
    try:
        return sha256(noted(path).read_bytes()).hexdigest()
    except OSError as error:
        return repr(error)


@while_unchanged
def _resolved(cluster: str | None, profile: str | None) -> str:
    """A digest of a cluster, its host's speed and the profile that prices it, or of what is wrong with them."""
    found: list[object] = []
    try:
        if cluster is not None:
            found.append(known := load_cluster(cluster))
            profile = profile or known.profile
            if isinstance(known.host, str):
                found.append(load_host(known.host))
        if profile not in (None, DATA_SHEET):
            found.append(load_profile(str(profile)))
    except (CpsimError, OSError) as error:
        found.append(error)
    return sha256(repr(found).encode()).hexdigest()


@cache
def _cpsim() -> str:
    """A digest of the sources that predict and of the data that ship with them."""
    sources = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json"))
    digest = sha256()
    for path in sources:
        if (name := path.relative_to(PACKAGE)).parts[0] not in NOT_ASKED:
            digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()
