"""What a task costs on a server, by the tiles that a kernel really visits; a planner's view of ``cpsim.models``.

Thread blocks own tiles of queries (backward: of keys) and walk over the tiles of the other side that the causal mask
does not empty. Every visited tile costs all its pairs, every block some pairs more. So short ranges of long documents
cost more than their pairs: forward a part of a tile's queries costs the whole tile, backward every tile of the prefix
is a block of its own. And a call ends with its longest blocks: forward, those of the queries that see most keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.errors import ScenarioError
from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.strategies.distca.tasks import Tasks

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One pass of a kernel, for one query head."""

    backward: bool
    """Whether blocks own keys and walk over queries."""
    owned: int
    """Tokens of a tile on the side that blocks own."""
    walked: int
    """Tokens of a tile on the other side; where blocks own queries, one of the two divides the other."""
    block_pairs: float
    """What a block costs beside its tiles, in pairs of a visited tile."""
    tail_pairs: float
    """What a call costs beside its blocks, in pairs for every key that its longest task sees."""

    def __post_init__(self) -> None:
        if min(self.owned, self.walked) < 1 or max(self.owned, self.walked) % min(self.owned, self.walked):
            raise ScenarioError(f"kernel: expected tiles that divide each other, got {self.owned} and {self.walked}")

    def arrays(self) -> tuple[bool, int, int, float]:
        """What compiled code needs for the cost of a task."""
        return self.backward, self.owned, self.walked, self.block_pairs

    def loads(self, tasks: Tasks, num_servers: int) -> Floats:
        """Pairs that every server's call costs, ``[n]``."""
        longest = np.zeros(num_servers)
        np.maximum.at(longest, tasks.server, tasks.kv.astype(np.float64))
        of_tasks = np.bincount(tasks.server, self.cost(tasks.first, tasks.tokens), num_servers)
        return np.asarray(of_tasks + self.tail_pairs * longest, np.float64)

    def cost(self, first: Ints, tokens: Ints) -> Floats:
        """Pairs that ranges of queries cost.

        Args:
            first: first query of every range, counted from the beginning of its document.
            tokens: queries.
        """
        kernel = self.arrays()
        costs = [cost(kernel, a, b) for a, b in zip(first.tolist(), tokens.tolist(), strict=True)]
        return np.array(costs, np.float64)


def flash_attention_4(backward: bool, heads: int, kv_heads: int) -> Kernel:
    """fa4 with head dimension 128 on an H200, for planners that have no profile; a test holds it against the profile.

    Forward it packs query heads that share keys into one tile.
    """
    if backward:
        return Kernel(backward=True, owned=128, walked=64, block_pairs=33_000.0, tail_pairs=0.0)
    packed = int(np.gcd(heads // kv_heads, 128))
    return Kernel(
        backward=False,
        owned=128 // packed,
        walked=128,
        block_pairs=53_000.0 / packed,
        tail_pairs=TAIL_IN_ORDER * 128 * 132 / heads,
    )


TAIL: Final = 0.4
"""Share of the time of a forward call's longest thread block that the call takes beyond its share of all blocks:
replaying blocks (``cpsim.models.attention.blocks``) of servers with Pretrain's and ProLong's documents gives 0.36 to
0.47 for fa2."""
TAIL_IN_ORDER: Final = 0.3
"""This share where a kernel launches its longest blocks first: 0.19 to 0.34 for fa4."""


@compiled()
def cost(kernel: Any, first: Any, tokens: Any) -> Any:
    """Pairs that a range of queries costs, see ``Kernel``; exact where tiles of owned queries are whole tiles of keys,
    else on average over where they begin."""
    backward, owned, walked, block_pairs = kernel
    if tokens <= 0:
        return 0.0
    if backward:
        queries = -(-tokens // walked) * walked
        below, diagonal = -(-first // owned), -(-tokens // owned)
        seen = below * queries + diagonal * queries - owned * diagonal * (diagonal - 1) // 2
        return seen * float(owned) + (below + diagonal) * block_pairs
    rows = -(-tokens // owned)
    if owned % walked == 0:
        keys = (rows - 1) * (-(-first // walked) * walked) + owned * rows * (rows - 1) // 2
        keys += -(-(first + tokens) // walked) * walked
        return keys * float(owned) + rows * block_pairs
    keys = (rows - 1) * first + owned * rows * (rows - 1) // 2 + first + tokens
    return (keys + rows * (walked - owned) / 2) * owned + rows * block_pairs
