"""The page of validation says what the committed runs and today's predictions say."""

import pytest
from scripts import load_script
from test_comparison import run
from test_runs import written


@pytest.fixture(scope="module")
def docs():
    return load_script("docs/validation.py")


def test_the_page_is_that_of_the_committed_runs(docs):
    assert docs.page() == docs.PAGE.read_text(), "run python docs/validation.py"


def test_a_page_has_tables_choices_and_what_was_left_out(docs, tmp_path):
    runs = [run(0.0012 * i, strategy=s) for i, s in ((1, "ulysses"), (2, "allgather"))]
    (tmp_path / "four.jsonl").write_text(written(*runs, run(0, error="hung", tokens=2048)))
    text = docs.page(tmp_path)
    assert "## four" in text
    assert "* 2026-11-21: 2 x NVIDIA H200" in text
    assert "| cpsim ulysses |" in text
    assert "### Choices\n" in text
    assert "### Not compared: 1" in text
    assert "run: hung" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_a_page_without_runs_says_so(docs, tmp_path):
    assert "no committed runs yet" in docs.page(tmp_path)


def test_cases_of_two_files_say_how_well_a_measurement_agrees_with_itself(docs, tmp_path):
    for name, factor in (("first", 1.0), ("second", 1.02)):
        (tmp_path / f"{name}.jsonl").write_text(written(run(0.002 * factor), run(0.0002, tokens=2048)))
    text = docs.page(tmp_path)
    assert "| cpsim, 1 ms or more | 1 | 2.0% | +2.0% |" in text
    assert "| cpsim, shorter | 1 | 0.0% | +0.0% |" in text
    assert "others" not in text.split("## Repeated")[1]
