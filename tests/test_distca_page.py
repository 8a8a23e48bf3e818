"""The script of DistCA's page gives sane rows."""

from scripts import load_script


def test_a_row_has_a_cell_for_every_planner():
    docs = load_script("studies/distca/page.py")
    case = docs.CASES[2]
    judged = [docs.judged(*case, planner) for planner in docs.PLANNERS]
    row = docs.row(case, judged)
    header = next(line for line in docs.PAGE.read_text().splitlines() if line.startswith("|"))
    assert row.startswith("|")
    assert row.count("|") == header.count("|")
