"""What the README says to type works, its links lead somewhere, and scripts that write its tables give sane rows."""

import re
import shlex

import pytest
import yaml
from scripts import ROOT, load_script
from typer.testing import CliRunner

from cpsim.cli.app import app

README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMITS = {"README.md": 150, "DESIGN.md": 300, "CONTRIBUTING.md": 120}


def block(language, start):
    """The only code block of a language that begins so."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.S)
    (found,) = [text for text in blocks if text.startswith(start)]
    return found


@pytest.mark.parametrize("page", ["README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]


@pytest.mark.parametrize("page", LIMITS)
def test_pages_are_short(page):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= LIMITS[page]


def test_the_shown_scenario_is_the_one_that_the_command_ranks():
    command = block("sh", "python3 -m venv").strip()
    scenario = shlex.split(command)[-1]
    shown = yaml.safe_load(block("yaml", "gpus:"))
    given = yaml.safe_load((ROOT / scenario).read_text(encoding="utf-8"))
    assert shown.items() <= given.items()


def test_the_shown_cluster_file_can_be_asked(tmp_path):
    (tmp_path / "my-cluster.yaml").write_text(block("yaml", "name: my-cluster"), encoding="utf-8")
    case = "gpus: 16\ncluster: my-cluster.yaml\ntokens_per_gpu: 1024\nheads: 8\nkv_heads: 8\nmask: causal\n"
    (tmp_path / "case.yaml").write_text(case, encoding="utf-8")
    done = CliRunner().invoke(app, ["advise", str(tmp_path / "case.yaml")])
    assert done.exit_code == 0, done.output
    assert "Run " in done.output


def test_the_accuracy_table_has_every_regime_once_and_no_more_than_eight_rows():
    docs = load_script("docs/accuracy.py")
    table = README.split("<!-- accuracy -->\n")[1].split("\n<!-- end of accuracy -->")[0].splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in table[2:]]
    assert names == [*(name for name, _ in docs.REGIMES.values()), "published runs"]
    assert len(names) <= 8
    written = docs.accuracy_table([], "| published runs | 1 | 1 % | | | here |").splitlines()
    assert written[:2] == table[:2]
    assert len(written) == len(table)


def test_the_speed_table_has_a_positive_time_for_every_benchmark():
    docs = load_script("docs/speed.py")
    rows = [line for line in docs.speed_table().splitlines() if re.search(r"\d m?s \|$", line)]
    assert len(rows) == len(docs.RING) + len(docs.COMMANDS)
    assert all(float(re.search(r"([\d.]+) m?s \|$", row)[1]) > 0 for row in rows)
