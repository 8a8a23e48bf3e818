"""What PyTorch's caching allocator reserves for a step: more than it gives out, as streams do not share memory and free
parts may be too small.

With expandable segments every stream has one range of addresses. A tensor gets the smallest free part that holds it,
and otherwise the range grows; it never shrinks. What is reserved is the sum of all ranges. The first step makes the
optimizer's states after its backward pass, among what that pass has left; later steps find them there.

Source: PyTorch 2.6, c10/cuda/CUDACachingAllocator.cpp (get_free_block, try_allocate_expandable_block, should_split);
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py for the streams of buffers: gathered
weights are in that of gathers, and copied to the one that computes; gradients of shards are in that of scatters.
pytorch/torchtitan@9dec370 run_llama_train.sh sets expandable_segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from cpsim.prediction.step.program import SHARD, Node

ROUND: Final = 512
"""Sizes are multiples of it [bytes]."""
GROW: Final = 20 * 2**20
"""Ranges grow by multiples of it, and segments of tensors of less than half of it are as large [bytes]."""
SEGMENT: Final = 2 * 2**20
"""Larger segments are multiples of it [bytes]."""
SMALL: Final = 2**20
"""Smaller tensors have ranges of their own, and smaller rests stay with the tensor [bytes]."""
STEPS: Final = 3
"""Steps that are simulated; the second is the first that finds the optimizer's states."""


@dataclass(slots=True)
class Range:
    """Memory of one stream: parts in order of their addresses, ``[size, tensor or None]``."""

    expandable: bool = True
    """Whether it is one segment that grows; otherwise every growth is a segment of its own."""
    segments: list[list[tuple[int, str | None]]] = field(default_factory=list)
    mapped: int = 0
    """Bytes that are reserved."""

    def take(self, name: str, nbytes: int) -> None:
        """Allocates a tensor."""
        size = -(-nbytes // ROUND) * ROUND
        places = [
            (have, s, i)
            for s, parts in enumerate(self.segments)
            for i, (have, owner) in enumerate(parts)
            if owner is None and have >= size
        ]
        if self.expandable:  # the last part can grow, and is taken last
            places = [one for one in places if one[2] < len(self.segments[0]) - 1] or places
        if not places:
            self._grow(size)
            last = len(self.segments) - 1
            places = [(self.segments[last][-1][0], last, len(self.segments[last]) - 1)]
        have, s, i = min(places)
        rest = have - size
        self.segments[s][i : i + 1] = [(size, name), (rest, None)] if rest > SMALL else [(have, name)]

    def _grow(self, size: int) -> None:
        """Reserves enough that the last part is free and of this size at least."""
        if not self.expandable:
            grown = GROW if size < GROW // 2 else -(-size // SEGMENT) * SEGMENT
            self.segments.append([(grown, None)])
        else:
            if not self.segments:
                self.segments.append([])
            parts = self.segments[0]
            have = parts.pop()[0] if parts and parts[-1][1] is None else 0
            grown = -(-(size - have) // GROW) * GROW
            parts.append((have + grown, None))
        self.mapped += grown

    def give(self, name: str) -> None:
        """Frees a tensor, and joins free neighbours."""
        parts = next(parts for parts in self.segments if any(owner == name for _, owner in parts))
        i = next(i for i, (_, owner) in enumerate(parts) if owner == name)
        low, high, size = i, i + 1, parts[i][0]
        if high < len(parts) and parts[high][1] is None:
            size, high = size + parts[high][0], high + 1
        if low > 0 and parts[low - 1][1] is None:
            size, low = size + parts[low - 1][0], low - 1
        parts[low:high] = [(size, None)]


@dataclass(slots=True)
class Allocator:
    """Ranges of all streams."""

    expandable: bool = True
    ranges: dict[str, Range] = field(default_factory=dict)
    small: int = 0
    """Bytes of small tensors that stay."""
    where: dict[str, str] = field(default_factory=dict)
    """Streams of tensors that are there."""

    def take(self, name: str, nbytes: int, stream: str = "compute") -> None:
        """Allocates a tensor."""
        if nbytes >= SMALL:
            self.ranges.setdefault(stream, Range(self.expandable)).take(name, nbytes)
            self.where[name] = stream

    def stay(self, name: str, nbytes: int) -> None:
        """Allocates a tensor that stays for ever."""
        self.small += nbytes if nbytes < SMALL else 0
        self.take(name, nbytes)

    def give(self, name: str) -> None:
        """Frees a tensor."""
        if name in self.where:
            self.ranges[self.where.pop(name)].give(name)

    @property
    def reserved(self) -> int:
        """Bytes of all ranges."""
        return self.small + sum(one.mapped for one in self.ranges.values())


def reserved_bytes(
    nodes: Sequence[Node],
    parameters: Sequence[int],
    always: int,
    *,
    microbatches: int = 1,
    expandable: bool = True,
    roots: bool = True,
) -> int:
    """Bytes that steps of FSDP2 with AdamW reserve.

    Args:
        nodes: of both passes, in the order of their launches.
        parameters: bytes of the shard of every parameter, of each of both moments, and of each root of a moment.
        always: bytes of workspaces.
        microbatches: of a step; gradients of later ones are added to those of the first.
        expandable: whether segments are.
        roots: whether AdamW makes lists of roots of second moments; fused, it does not.
    """
    memory = Allocator(expandable)
    memory.stay("workspaces", always)
    for i, nbytes in enumerate(parameters):
        memory.stay(f"parameter {i}", nbytes)
    last = last_reads(nodes)
    for step in range(STEPS):
        for _ in range(microbatches):
            _run(memory, nodes, last)
        for i, nbytes in enumerate(parameters if step == 0 else ()):
            memory.stay(f"first moment {i}", nbytes)
            memory.stay(f"second moment {i}", nbytes)
        for i, nbytes in enumerate(parameters if roots else ()):
            memory.take(f"root {i}", nbytes)
        for i in range(len(parameters) if roots else 0):
            memory.give(f"root {i}")
        for name in [name for name in memory.where if name.startswith(SHARD)]:
            memory.give(name)
    return memory.reserved


def _run(memory: Allocator, nodes: Sequence[Node], last: Sequence[Iterable[str]]) -> None:
    """Both passes."""
    made = set[str]()
    for node, done in zip(nodes, last, strict=True):
        for name, nbytes in node.makes.items():
            if name in made:
                continue
            made.add(name)
            if name in memory.where:  # a gradient that is there already
                memory.take(f"{name} more", nbytes, node.stream)
                memory.give(f"{name} more")
            else:
                memory.take(name, nbytes, node.stream)
        for name in done:
            memory.give(name)


def last_reads(nodes: Sequence[Node]) -> list[list[str]]:
    """Tensors that nobody needs after each op; gradients of shards stay. FSDP2 keeps what it gathered until the next
    gather is copied out, and what it scatters until the next is."""
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        last |= dict.fromkeys((*node.reads, *node.makes), i)
    for beginning in ("flat ", "sums "):
        names = [name for name in last if name.startswith(beginning)]
        for name, after in pairwise(names):
            last[name] = max(last[name], last[after])
    found: list[list[str]] = [[] for _ in nodes]
    for name, i in last.items():
        if not name.startswith(SHARD):
            found[i].append(name)
    return found
