"""Published studies, which a checkout of the repository has and an installed package has not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cpsim.errors import CpsimError


def studies() -> Callable[..., Any]:
    """The command line of ``python -m studies``.

    Raises:
        CpsimError: there is no checkout here.
    """
    here, package = Path.cwd(), Path(__file__).parents[2]
    for folder in (package, here, *here.parents):
        if (folder / "studies" / "public").is_dir() and (folder / "cpsim").is_dir():
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
            return import_module("studies.__main__").app  # type: ignore[no-any-return]
    raise CpsimError(
        f"reproduce: expected a checkout of the repository, whose folder studies has what was published, got {here}; "
        "change to one"
    )
