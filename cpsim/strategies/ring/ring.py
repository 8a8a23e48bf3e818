"""Ring attention: key-value shards travel around the ranks while queries stay.

Forward, P steps: rank r computes on the shard of rank r - i in step i while it receives the next one; partial
outputs are merged by log-sum-exp in fp32. Backward: key-value shards travel again, and each shard's gradient
follows one step behind on lanes of its own, accumulated in fp32, for P hops until it is home.

Reference: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889), algorithm 1; zigzag:
Zhu, ring-flash-attention; striped: Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431), section 3. Differs:
merge fused in one pass, double-buffered transfers, no padding of documents.
Other people's rings follow from facts about their code (cpsim.strategies.others).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import RangeSets, Slices, Whole
from cpsim.masks.stripes import stripe_bounds
from cpsim.masks.tiles import make_tiles
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.mesh import plan_kept_keys, token_bytes
from cpsim.strategies.others import CPSIM, HeldRingCode, Implementation, RingCode
from cpsim.strategies.ring.cycles import plan_cycles
from cpsim.strategies.ring.grid import RingGrid, make_grid, sources
from cpsim.strategies.ring.held import HeldRing, as_run, make_ring, runs_whole
from cpsim.strategies.ring.loop import Ring
from cpsim.strategies.ring.steps import Cut, Steps
from cpsim.strategies.sizes import Sizes

AnyRing = RingCode | HeldRingCode | None
"""Facts about a ring's code; None: ours."""
LEAST_SHARE: Final = 64
"""Tokens of a document on a rank from which on it is worth trying to cut each of several documents: half a tile of a
kernel, of which the causal mask leaves another half."""


@lru_cache(maxsize=2)
def cut(
    workload: Workload,
    num_ranks: int,
    chunks: str,
    inner: int | None = None,
    backwards: bool = False,
    halves: bool = True,
) -> Cut:
    """Shard all tokens, or all ``documents``, ``contiguous``-ly, ``striped``, or zigzag by ``document`` or packed
    ``sequence``.

    Args:
        workload: the case.
        num_ranks: of one ring.
        chunks: one of the names above.
        inner: ranks of an inner ring, see ``make_grid``.
        backwards: the direction of the ring, see ``RingGrid``.
        halves: where no query sees a later key, only the halves of a shard that have work are computed with.
    """
    if backwards:
        return turned(cut(workload, num_ranks, chunks, inner, False, halves))
    mask, stride = workload.slices(), num_ranks if chunks == "striped" else 1
    source, ranks = sources(num_ranks, inner), np.arange(num_ranks)
    parts = (
        halves and not workload.cached and chunks in ("document", "sequence", "striped") and sharding.is_causal(mask)
    )
    bounds = np.array([0, workload.num_tokens])
    if chunks == "striped":
        sets = sharding.stack(*sharding.striped_shards(workload.num_tokens, num_ranks))
    elif chunks == "contiguous" and workload.cached:  # both parts are dealt out evenly
        sets = sharding.document_contiguous(np.array([0, workload.cached, workload.num_tokens]), num_ranks)
    elif chunks == "contiguous":
        sets = sharding.contiguous(workload.num_tokens, num_ranks)
    elif chunks == "documents":
        sets = sharding.document_contiguous(sharding.documents_of(mask, workload.num_tokens), num_ranks)
    else:
        bounds = sharding.documents_of(mask, workload.num_tokens) if chunks == "document" else bounds
        sets = sharding.stack(*sharding.zigzag_shards(bounds, num_ranks))
    later, earlier = (source > ranks) & parts, (source < ranks) & parts & (chunks != "striped")
    sets, queries = sharding.with_queries(sets, num_ranks, workload.cached, stride)
    return tiled(mask, sets, source, np.full(num_ranks, len(bounds) > 2), later, earlier, stride, queries)


def tiled(
    mask: Slices,
    sets: RangeSets,
    source: Whole,
    scattered: NDArray[np.bool_],
    tails: NDArray[np.bool_],
    key_heads: NDArray[np.bool_],
    stride: int = 1,
    queries: int = 0,
) -> Cut:
    """A cut from its sets, the shard whose keys every shard uses in each step, and where only parts of them count."""
    shards = np.arange(source.shape[1])
    query_set = np.where(tails, len(sets) - len(shards) + shards, shards + queries).astype(np.int32)
    key_set = np.where(key_heads, len(shards) + source, source).astype(np.int32)
    stripes = stripe_bounds(int(sets.ranges.max(initial=0)), stride) if stride > 1 else None
    tiles = make_tiles(mask, sets, query_set, key_set, stripes)
    tile = np.arange(1, source.size + 1, dtype=np.int32).reshape(source.shape)
    return Cut(sets, scattered, tails, key_heads, query_set, key_set, tiles, tile, stride, queries=queries)


def turned(cut: Cut) -> Cut:
    """These tiles in the order of a ring that runs backwards, see ``RingGrid``: the last step's keys come first."""
    columns = ("tails", "key_heads", "query_set", "key_set", "tile")
    return replace(cut, **{name: getattr(cut, name)[::-1] for name in columns})


def plan_ring(workload: Workload, cluster: Cluster, pass_: Pass, code: Implementation = CPSIM) -> Schedule:
    """Ring attention on contiguous shards.

    Under a causal mask rank r has work in r + 1 of the P steps only. Others cut every document into P shards, ours
    the packed sequence. Cached tokens are dealt out on their own, as evenly.
    """
    return plan_cut(workload, cluster, pass_, "contiguous" if code.ring is None else "documents", code.ring)


def plan_zigzag_ring(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    zigzag: str = "document",
    backward: str = "keys",
    cycles: str = "one",
) -> Schedule:
    """Ring attention on zigzag shards, which balance causal masks.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        zigzag: ``document`` cuts every document into 2P chunks, which balances any mix of documents;
            ``sequence`` cuts the packed sequence, which keeps short documents whole.
        backward: what travels in the backward pass: ``keys`` with their gradients, or ``queries`` with theirs, as in
            BurstAttention; see ``plan_kept_keys``.
        cycles: on how many cycles of GPUs keys travel at a time: ``one``, or ``all`` that share no link, as in TASP;
            see ``plan_cycles``.

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: queries travel, or keys on all cycles, in somebody else's code.
    """
    if zigzag not in ("document", "sequence"):
        raise ScenarioError(f"knobs.zigzag: expected 'document' or 'sequence', got {zigzag!r}")
    if backward not in ("keys", "queries"):
        raise ScenarioError(f"knobs.backward: expected 'keys' or 'queries', got {backward!r}")
    if cycles not in ("one", "all"):
        raise ScenarioError(f"knobs.cycles: expected 'one' or 'all', got {cycles!r}")
    if cycles == "all" and (backward == "queries" or code is not CPSIM):
        raise InfeasibleError(f"on all cycles keys travel, in our executor's code; got {backward} of {code.name}")
    if backward == "queries" and code is not CPSIM:
        raise InfeasibleError(f"{code.name} sends keys in the backward pass of its ring; leave knob backward out")
    if backward == "queries" and pass_ == "bwd":
        return plan_kept_keys(workload, cluster.num_gpus, pass_, zigzag)
    if cycles == "all":
        return plan_cycles(workload, cluster.num_gpus, pass_, zigzag)
    workload = code.padded(workload, cluster.num_gpus)
    several = len(sharding.documents_of(workload.slices(), workload.num_tokens)) > 2
    ring = code.zigzag_documents if several and code.zigzag_documents else code.ring
    return plan_cut(workload, cluster, pass_, zigzag, ring)


def plan_striped_ring(workload: Workload, cluster: Cluster, pass_: Pass, code: Implementation = CPSIM) -> Schedule:
    """Ring attention on stripes: rank r holds tokens r, r + P, r + 2P and so on, whatever the documents.

    Under a causal mask every step is a causal triangle: whole where the keys are of an earlier rank or one's own,
    without its diagonal where they are of a later one, whose first key the first query does not see.
    """
    return plan_cut(workload, cluster, pass_, "striped", code.striped)


def striped_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying.

    Raises:
        InfeasibleError: none is; documents are so short that kernels would work for the mask's diagonal mostly.
    """
    num_documents, share = _shares(workload, cluster)
    if share < LEAST_SHARE and num_documents > 1:
        raise InfeasibleError(
            f"not tried: stripes of {num_documents} documents are {share} tokens long on average, "
            f"worth it from {LEAST_SHARE} on; name strategy striped_ring to predict it"
        )
    return ({},)


def plan_cut(workload: Workload, cluster: Cluster, pass_: Pass, chunks: str, code: AnyRing) -> Schedule:
    """One ring of all ranks on shards that are cut as ``cut`` says."""
    return plan_rings(workload, make_grid(cluster.num_gpus), pass_, chunks, code)


def plan_rings(workload: Workload, grid: RingGrid, pass_: Pass, chunks: str, code: AnyRing) -> Schedule:
    """Rings of a grid whose ranks hold the tokens and heads that they compute on."""
    grid = as_run(grid, pass_, code)
    shards = cut(workload, grid.num_places, chunks, grid.inner, grid.backwards, not runs_whole(workload, code))
    sets, gathers = shards.sets, isinstance(code, RingCode) and code.gathers
    if gathers:
        sets = sharding.stack(sets, sharding.contiguous(workload.num_tokens, 1))
    b = Builder(grid.ranks.size, sets, shards.tiles, shards.stride, isinstance(code, HeldRingCode))
    emit_rings(make_ring(b, Steps(workload, shards, grid, gathers), code), pass_)
    return b.build()


def emit_rings(ring: Ring | HeldRing, pass_: Pass) -> None:
    """The ops of rings whose tensors are inputs and outputs of the schedule."""
    x = ring.x
    if pass_ == "fwd":
        q, kv = ring.given("q", x.q_bytes), ring.given("kv", x.kv_bytes)
        ring.forward(q, kv, ring.result("out", x.o_bytes, x.lse_bytes))
    else:
        widths = {"q": x.q_bytes, "dout": x.o_bytes, "out": x.o_bytes + x.lse_bytes, "kv": x.kv_bytes}
        *given, kv = [ring.given(name, width) for name, width in widths.items()]
        dq, dkv = ring.result("dq", x.q_bytes), ring.result("dkv", x.kv_bytes, summed=False)
        ring.backward(given, kv, dq, dkv)


def zigzag_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: documents are cut one by one where their shares are long enough for kernels; queries
    travel in the backward pass where they are fewer bytes than keys.
    """
    num_documents, share = _shares(workload, cluster)
    cuts = ({"zigzag": "document"}, {"zigzag": "sequence"})[share < LEAST_SHARE :]
    settings = cuts if num_documents > 1 else ({},)
    ranks, kv = cluster.num_gpus, Sizes(workload).kv(workload.num_kv_heads)
    of_keys = (ranks - 1) * kv + ranks * Sizes(workload).accumulator(kv)
    fewer = 0 < token_bytes(workload, ranks, 1, "bwd")[0] < of_keys
    return (*settings, *(knobs | {"backward": "queries"} for knobs in settings if fewer))


def _shares(workload: Workload, cluster: Cluster) -> tuple[int, int]:
    """Documents, and the tokens that a rank has of each on average."""
    num_documents = len(sharding.documents_of(workload.slices(), workload.num_tokens)) - 1
    return num_documents, workload.num_tokens // (num_documents * cluster.num_gpus)
