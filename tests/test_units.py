import pytest

from cpsim.units import format_bytes, format_count


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 B"), (33_554_432, "33.6 MB"), (1_480_000_000, "1.48 GB"), (2e12, "2.00 TB")]
)
def test_bytes_are_powers_of_ten(nbytes, text):
    assert format_bytes(nbytes) == text


def test_counts_have_separators():
    assert format_count(786432) == "786,432"
