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
"""Ranges grow by multiples of it [bytes]."""
SMALL: Final = 2**20
"""Smaller tensors have ranges of their own, and smaller rests stay with the tensor [bytes]."""
STEPS: Final = 3
"""Steps that are simulated; the second is the first that finds the optimizer's states."""


@dataclass(slots=True)
class Range:
    """Memory of one stream: parts in order of their addresses, ``[size, tensor or None]``."""

    parts: list[tuple[int, str | None]] = field(default_factory=list)
    mapped: int = 0
    """Bytes that are reserved."""

    def take(self, name: str, nbytes: int) -> None:
        """Allocates a tensor."""
        size = -(-nbytes // ROUND) * ROUND
        inner = [(have, i) for i, (have, owner) in enumerate(self.parts) if owner is None and have >= size]
        last = len(self.parts) - 1
        fitting = [one for one in inner if one[1] != last] or inner  # the last part can grow, and is taken last
        if fitting:
            have, i = min(fitting)
            rest = have - size
            cut = [(size, name), (rest, None)] if rest > SMALL else [(have, name)]
            self.parts[i : i + 1] = cut
            return
        have = self.parts.pop()[0] if self.parts and self.parts[-1][1] is None else 0
        grown = -(-(size - have) // GROW) * GROW
        self.mapped += grown
        rest = have + grown - size
        self.parts += [(size, name), (rest, None)] if rest > SMALL else [(size + rest, name)]

    def give(self, name: str) -> None:
        """Frees a tensor, and joins free neighbours."""
        i = next(i for i, (_, owner) in enumerate(self.parts) if owner == name)
        low, high, size = i, i + 1, self.parts[i][0]
        if high < len(self.parts) and self.parts[high][1] is None:
            size, high = size + self.parts[high][0], high + 1
        if low > 0 and self.parts[low - 1][1] is None:
            size, low = size + self.parts[low - 1][0], low - 1
        self.parts[low:high] = [(size, None)]


@dataclass(slots=True)
class Allocator:
    """Ranges of all streams."""

    ranges: dict[str, Range] = field(default_factory=dict)
    small: int = 0
    """Bytes of small tensors that stay."""
    where: dict[str, str] = field(default_factory=dict)
    """Streams of tensors that are there."""

    def take(self, name: str, nbytes: int, stream: str = "compute") -> None:
        """Allocates a tensor."""
        if nbytes >= SMALL:
            self.ranges.setdefault(stream, Range()).take(name, nbytes)
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


def reserved_bytes(nodes: Sequence[Node], parameters: Sequence[int], always: int) -> int:
    """Bytes that steps of FSDP2 with AdamW reserve.

    Args:
        nodes: of both passes, in the order of their launches.
        parameters: bytes of the shard of every parameter, of each of both moments, and of each root of a moment.
        always: bytes of workspaces.
    """
    memory = Allocator()
    memory.stay("workspaces", always)
    for i, nbytes in enumerate(parameters):
        memory.stay(f"parameter {i}", nbytes)
    last = last_reads(nodes)
    for step in range(STEPS):
        _run(memory, nodes, last)
        for i, nbytes in enumerate(parameters if step == 0 else ()):
            memory.stay(f"first moment {i}", nbytes)
            memory.stay(f"second moment {i}", nbytes)
        for i, nbytes in enumerate(parameters):
            memory.take(f"root {i}", nbytes)
        for i in range(len(parameters)):
            memory.give(f"root {i}")
        for name in [name for name in memory.where if name.startswith(SHARD)]:
            memory.give(name)
    return memory.reserved


def _run(memory: Allocator, nodes: Sequence[Node], last: Sequence[Iterable[str]]) -> None:
    """Both passes."""
    made = set[str]()
    for node, done in zip(nodes, last, strict=True):
        for name, nbytes in node.makes.items():
            if name not in made:
                memory.take(name, nbytes, node.stream)
                made.add(name)
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
