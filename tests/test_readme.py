"""The README is a page, and what it points at is there."""

import re

import yaml
from scripts import ROOT, load_script

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_pages_for_readers_are_short():
    for name, most in (("README.md", 150), ("DESIGN.md", 300), ("CONTRIBUTING.md", 120)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most, name


def test_accuracy_has_at_most_eight_rows_and_says_what_was_not_measured():
    table = README.split("<!-- accuracy -->")[1].split("<!-- end of accuracy -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert 6 <= len(rows) <= 8
    assert any("real nodes" in row and "none" in row for row in rows)


def test_tables_are_written_between_markers_and_leave_the_rest():
    accuracy = load_script("docs/accuracy.py")
    written = accuracy.with_table(README, "accuracy", "| new |")
    assert "| new |" in written
    assert written.replace("| new |", "") != README
    assert accuracy.with_table(written, "accuracy", "| new |") == written


def test_the_example_is_the_file_that_the_command_names():
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", README, re.S)]
    shown = next(block for block in blocks if "gpus" in block)
    example = yaml.safe_load((ROOT / "examples" / "llama3-8b-96gpu.yaml").read_text(encoding="utf-8"))
    assert shown.items() <= example.items()


def test_a_cluster_file_like_the_one_shown_can_be_read(tmp_path):
    from cpsim.case.cluster import load_cluster

    text = next(text for text in re.findall(r"```yaml\n(.*?)```", README, re.S) if "fabric" in text)
    (tmp_path / "mine.yaml").write_text(text)
    assert load_cluster(str(tmp_path / "mine.yaml")).fabric is not None


def test_every_link_leads_somewhere():
    for page in (ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        local = [target for target in targets if "://" not in target and target != "commands.md"]  # made by mkdocs
        assert not [target for target in local if not (page.parent / target).exists()], page.name
