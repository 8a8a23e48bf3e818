"""The executor on gloo: every strategy, mask and pass in float64 against dense attention on one process."""

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
from ranks import run_script  # noqa: E402

from cpsim.real.run.executor import Executor  # noqa: E402
from cpsim.strategies import plan  # noqa: E402


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_schedules_give_dense_attention_and_its_gradients_on_gloo(num_ranks):
    """Every strategy with some masks and every mask with some strategies."""
    assert run_script("executor_worker.py", num_ranks, timeout_s=300) > 100


def test_rings_on_all_cycles_give_dense_attention_on_gloo():
    """Three ranks have two cycles; two have one, and four have none."""
    assert run_script("executor_worker.py", 3, "cycles", timeout_s=300) > 50


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_schedule_gives_dense_attention_and_its_gradients_on_gloo(num_ranks):
    """Every strategy with every mask, on up to four ranks."""
    assert run_script("executor_worker.py", num_ranks, "all", timeout_s=900) > 300


class SilentNode:
    """A rank whose messages go nowhere."""

    cuda, alone, device = False, False, torch.device("cpu")

    def __init__(self, rank):
        self.rank = rank

    def group(self, ranks, _stream):
        return ranks


@pytest.mark.parametrize("strategy", ["dcp", "magi", "distca"])
def test_all_ranks_of_an_exchange_agree_whether_it_is_even(strategy, monkeypatch):
    """An even one is another NCCL call."""
    seen = {}

    def exchange(*args, group):
        count[group] = count.get(group, 0) + 1
        seen.setdefault((group, count[group]), set()).add(args[2] is None)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchange)
    for mask, documents in (("causal", "one"), ("causal_document", "uneven"), ("shared_question", "uneven")):
        problem = cases.workload(mask, documents, "gqa", dtype="fp64")
        for knobs in cases.ALL_KNOBS[strategy]:
            schedule = plan(strategy, problem, cases.cluster(4, 2), "fwd", knobs)
            for rank in range(4):
                count = {}
                Executor(schedule, problem, SilentNode(rank), "math").program.run()
            assert seen
            assert all(len(said) == 1 for said in seen.values()), (mask, knobs)
            seen.clear()
