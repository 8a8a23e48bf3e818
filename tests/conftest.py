"""What several files of tests take."""

import gc

import pytest


def pytest_collection_finish():
    """Modules and tests stay: collections of garbage, here and in forks, need not look through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def write(tmp_path):
    """Writes a text to a file of a name, and gives its path."""

    def to(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return to
