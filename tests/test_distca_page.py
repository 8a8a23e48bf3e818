"""What studies/distca/README.md says of schedulers comes out of its script."""

import pytest
from scripts import load_script


@pytest.mark.parametrize("case", [2, -1])
def test_our_scheduler_moves_less_than_the_released_one_and_is_no_slower(case):
    docs = load_script("studies/distca/page.py")
    released, ours = (docs.judged(*docs.CASES[case], (name, 0.05)) for name in ("released", "cpsim"))
    assert ours.moved_gb < 0.95 * released.moved_gb
    assert ours.slowest_ms < released.slowest_ms
    assert docs.row(docs.CASES[case], [released, ours]).count("|") == 6
