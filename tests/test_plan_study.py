"""Planners of batches beside each other: baselines follow their published rules, and nothing is lost or done twice."""

import pytest

from cpsim.case.documents import draw_documents
from studies.plan.megatron import Rule


def packages_rounds(lengths, num_ranks, most_tokens):
    """Numbers of the documents of every rank in every round, by megatron-core itself."""
    module = pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule")

    class Group:
        def size(self):
            return num_ranks

    scheduler = module.BalancedCPScheduler(most_tokens, Group())
    return scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)[1]


def by_rank(table):
    """The same of a timetable."""
    found = []
    for turns in table.rounds:
        ranks = [[] for _ in range(table.num_ranks)]
        for turn in turns:
            for rank in range(turn.first_rank, turn.first_rank + turn.size):
                ranks[rank] += turn.documents
        found.append(ranks)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_ranks", [2, 8, 16, 32])
@pytest.mark.parametrize(
    ("name", "longest"), [("prolong64k", 16384), ("prolong512k", 16384), ("magi", 8192), ("distca_pretrain", 65536)]
)
@pytest.mark.parametrize("seed", range(3))
def test_megatron_s_rounds_are_those_of_its_package(num_ranks, name, longest, seed):
    lengths = draw_documents(name, 40000 * num_ranks, seed, max_length=min(longest, 4096 * num_ranks))
    assert by_rank(Rule(num_ranks, 4096).timetable(lengths)) == packages_rounds(lengths, num_ranks, 4096)
