import pytest

from cpsim.case.workload import Workload
from cpsim.errors import ScenarioError


def workload(**changes):
    fields = {
        "documents": (3, 5),
        "mask": "causal_document",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": "bf16",
    }
    return Workload(**(fields | changes))


def test_area_and_flops_follow_the_closed_form():
    case = workload()
    assert case.num_tokens == 8
    assert case.area() == 3 * 4 // 2 + 5 * 6 // 2
    assert case.flops("fwd") == 4 * 21 * 4 * 16
    assert case.flops("bwd") == 2.5 * case.flops("fwd")


def test_llama_causal_flops_of_a_published_case():
    """8 H100, 64k tokens, 64 heads, full mask: 17.6 TFLOP forward per GPU (LongCA-bench set-up)."""
    case = workload(documents=(65536,), mask="full", num_heads=64, num_kv_heads=8, head_dim=128)
    assert case.flops("fwd") / 8 / 1e12 == pytest.approx(17.6, abs=0.05)


def test_dtype_sets_the_bytes():
    assert [workload(dtype=d).bytes_per_element for d in ("bf16", "fp32", "fp64")] == [2, 4, 8]


@pytest.mark.parametrize(
    "changes",
    [{"documents": ()}, {"documents": (4, 0)}, {"num_kv_heads": 3}, {"head_dim": 0}, {"dtype": "int3"}],
)
def test_impossible_workloads_are_refused(changes):
    with pytest.raises(ScenarioError):
        workload(**changes)
