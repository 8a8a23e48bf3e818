"""studies/distca/README.md is what its script makes."""

from scripts import load_script


def test_the_page_has_what_its_script_computes():
    docs = load_script("studies/distca/page.py")
    page = docs.PAGE.read_text()
    for case in (docs.CASES[2], docs.CASES[-1]):
        assert docs.row(case, [docs.judged(*case, planner) for planner in docs.PLANNERS]) in page, (
            "run studies/distca/page.py"
        )
