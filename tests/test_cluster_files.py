"""The page of cluster and profile files: made from the code, and its examples run."""

import dataclasses

import pytest
from scripts import ROOT, load_script

from cpsim import predict
from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from

CASE = {"tokens_per_gpu": 4096, "heads": 16, "kv_heads": 16, "mask": "full", "strategy": "ring"}
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))


@pytest.fixture(scope="module")
def page():
    return load_script("docs/cluster_files.py")


def test_the_page_is_what_the_code_says(page):
    assert page.page() == page.PAGE.read_text(), "run python docs/cluster_files.py"


def test_every_field_stands_on_it(page):
    text = page.PAGE.read_text()
    for before, kind in [*page.CLUSTER.items(), *page.PROFILE.items()]:
        for one in dataclasses.fields(kind):
            name = f"{before}.{one.name}" if before and " " not in before else one.name
            assert f"| `{name}` |" in text
    for kind in page.CLUSTER.values():
        told = page.documented(kind)
        assert all(one.name in told for one in dataclasses.fields(kind) if kind.__name__ != "Gpu"), kind


@pytest.mark.parametrize(
    ("name", "gpus", "kernel"), [("h100-4x200g", 16, "fa2"), ("l40s-pcie", 8, "fa2"), ("gb200-nvl72", 72, "cudnn")]
)
def test_examples_predict(name, gpus, kernel):
    (path,) = (path for path in EXAMPLES if path.stem == name)
    answer = predict(scenario_from(CASE | {"cluster": str(path), "gpus": gpus, "kernel": kernel}))
    assert 0 < answer.time_s_low < answer.time_s < answer.time_s_high


def test_rings_over_pcie_are_not_those_over_nvlink():
    pcie = load_cluster(str(ROOT / "examples" / "clusters" / "l40s-pcie.yaml"))
    assert pcie.inside.link == "pcie"
    assert pcie.fabric is None
