"""The README says what the committed measurements say."""

from scripts import ROOT, load_script


def tables():
    return load_script("docs/tables.py")


def test_tables_are_those_of_the_shipped_profiles_and_of_the_committed_benchmarks():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables().with_tables(readme) == readme, "run python docs/tables.py"


def test_every_link_of_the_readme_leads_somewhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [part.split(")")[0] for part in readme.split("](")[1:]]
    assert targets
    assert all((ROOT / target).exists() for target in targets), targets
