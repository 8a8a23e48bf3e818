"""Megatron-Core's hybrid context parallelism: which ranks run which documents, by its published rule.

A document goes to the power of two of ranks that memory asks for, and costs its squared length over their number. From
the longest on, documents are dealt to groups that exist, or to free ranks, until ranks are about even; then all wait,
and the next round begins. Ranks left without any widen the first of the smallest groups.

Reference: megatron-core 0.16.1, core/pipeline_parallel/hybrid_cp_schedule.py, ``BalancedCPScheduler``, with its quirks;
tests/test_plan_study.py compares rounds with the package's own. Differs: heaps and counters in place of searches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from math import ceil, log2
from typing import Final

from studies.plan.timetable import Timetable, Turn

SLACK: Final = 0.05
"""Difference between ranks, over the busiest, at which a round is even: ``delta``."""
OVER: Final = 1.1
"""Work of a bucket over its share, at most."""

Sample = tuple[int, int]
"""Number and length of a document."""


@dataclass(slots=True)
class _Group:
    size: int
    samples: list[Sample] = field(default_factory=list)
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Ranks and what of a document one of them holds."""

    num_ranks: int
    most_tokens: int
    """``max_seqlen_per_dp_cp_rank``."""

    def needed(self, length: int) -> int:
        """Ranks of a document, ``gpus_needed``."""
        return max(1, 2 ** ceil(log2(length / self.most_tokens)))

    def work(self, length: int) -> float:
        """What a document costs each of them, ``get_total_workload``."""
        return length * length / self.needed(length)

    def timetable(self, lengths: Sequence[int]) -> Timetable:
        """All rounds; every document runs by itself."""
        left = sorted(enumerate(lengths), key=lambda sample: sample[1], reverse=True)
        rounds = []
        while left:
            groups, left = self._round(left)
            rounds.append(_turns(groups))
        return Timetable(self.num_ranks, tuple(rounds))

    def _buckets(self, samples: Sequence[Sample]) -> list[deque[Sample]]:
        """Samples in as many parts of about equal work as there are sizes of groups, ``make_buckets_equal``."""
        works = [self.work(length) for _, length in samples]
        open_ = len({self.needed(length) for _, length in samples})
        target, buckets, current, held = sum(works) / open_, list[deque[Sample]](), deque[Sample](), 0.0
        for i, (sample, work) in enumerate(zip(samples, works, strict=True)):
            if current and (held + work > target * OVER or len(samples) - i <= open_ - len(buckets)):
                buckets.append(current)
                current, held, open_ = deque(), 0.0, open_ - 1
            current.append(sample)
            held += work
        return [*buckets, current]

    def _round(self, samples: Sequence[Sample]) -> tuple[list[_Group], list[Sample]]:
        """Groups of one round in the order of their ranks, and samples that are left, ``next_hdp_group``."""
        buckets, groups = self._buckets(samples), list[_Group]()
        by_size: dict[int, list[tuple[float, int]]] = {}  # heaps of work and number
        free, first_needed, most, smaller = self.num_ranks, 0, 0.0, False
        while buckets:
            bucket = next((b for b in buckets if b and self._fits(b[0][1], by_size, free)), None)
            if bucket is None:
                break
            sample = bucket.popleft()
            needed = self.needed(sample[1])
            first_needed = first_needed or needed
            if free >= needed:
                group, free = _Group(needed), free - needed
                groups.append(group)
                heappush(by_size.setdefault(needed, []), (self.work(sample[1]), len(groups) - 1))
            else:
                work, number = by_size[needed][0]
                group = groups[number]
                heapreplace(by_size[needed], (work + self.work(sample[1]), number))
            group.samples.append(sample)
            group.work += self.work(sample[1])
            most, smaller = max(most, group.work), smaller or needed < first_needed
            while buckets and not buckets[0]:
                buckets.pop(0)
            least = 0.0 if free else min(heap[0][0] for heap in by_size.values())
            if smaller and buckets and most - least <= SLACK * most:
                break
        left = [sample for bucket in buckets for sample in bucket]
        left += self._trimmed(groups, free)
        _fill(groups, self.num_ranks)
        return groups, left

    def _fits(self, length: int, by_size: dict[int, list[tuple[float, int]]], free: int) -> bool:
        needed = self.needed(length)
        return needed in by_size or free >= needed

    def _trimmed(self, groups: Sequence[_Group], free: int) -> list[Sample]:
        """Last samples of the busiest groups, as long as ranks become more even without them, ``trim_overload``."""
        left = list[Sample]()
        while not free:
            busiest = max(groups, key=lambda group: group.work)
            most, least = busiest.work, min(group.work for group in groups)
            if most - least <= SLACK * most or len(busiest.samples) <= 1:
                break
            less = most - self.work(busiest.samples[-1][1])
            others = [group.work for group in groups if group is not busiest]
            if max(less, *others) - min(less, *others) >= most - least:
                break
            left.append(busiest.samples.pop())
            busiest.work = less
        return left


def _fill(groups: Sequence[_Group], num_ranks: int) -> None:
    """Widens the first of the smallest groups until no rank is free, ``fill_empty_gpus``."""
    while (held := sum(group.size for group in groups)) < num_ranks:
        smallest = min(groups, key=lambda group: group.size)
        smallest.size += min(smallest.size, num_ranks - held)


def _turns(groups: Sequence[_Group]) -> tuple[Turn, ...]:
    turns, first = list[Turn](), 0
    for group in groups:
        turns += [Turn(first, group.size, (number,)) for number, _ in group.samples]
        first += group.size
    return tuple(turns)
