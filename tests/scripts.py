"""Scripts of the repository that belong to no package, as modules."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def load_script(path):
    """The module of a script, by its path from the repository's root; it is not run as a program."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
