"""What several files of tests take."""

import pytest


@pytest.fixture
def write(tmp_path):
    """Writes a text to a file of a name, and gives its path."""

    def to(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return to
