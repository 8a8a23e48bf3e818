"""What a planner of tasks may know of a fitted kernel."""

from __future__ import annotations

from cpsim.errors import InfeasibleError
from cpsim.models.attention.params import AttentionParams
from cpsim.strategies.distca.kernel import TAIL, TAIL_IN_ORDER, Kernel


def planner_kernel(params: AttentionParams, num_heads: int, num_kv_heads: int, head_dim: int) -> Kernel:
    """A kernel's tiles, and its fitted times in pairs of a visited tile, of one query head.

    Args:
        params: of the kernel and pass, on one type of GPU.
        num_heads, num_kv_heads: of one server.
        head_dim: of queries, keys and values.

    Raises:
        InfeasibleError: the kernel has no tiles of a causal mask.
    """
    params = params.at(head_dim)
    anatomy = params.anatomy
    if anatomy.tile_q_causal == 0 or anatomy.lists_blocks:
        raise InfeasibleError("tasks need a kernel that walks over tiles of a causal mask; use fa2, fa3, fa4 or cudnn")
    grouped = num_heads > num_kv_heads
    block_s = params.block_s + params.block_causal_s + params.block_varlen_s + grouped * params.block_shared_s
    block_pairs = block_s / (params.pair_s * head_dim / params.head_dim)
    if anatomy.backward:
        walked = anatomy.tile_q_causal
        return Kernel(backward=True, owned=anatomy.tile_k, walked=walked, block_pairs=block_pairs, tail_pairs=0.0)
    packed = num_heads // num_kv_heads if anatomy.packs_heads else 1
    while anatomy.tile_q_causal % packed:
        packed -= 1
    longest = TAIL_IN_ORDER if anatomy.heavy_first else TAIL
    slots = params.num_sms * anatomy.blocks_per_sm
    return Kernel(
        backward=False,
        owned=anatomy.tile_q_causal // packed,
        walked=anatomy.tile_k,
        block_pairs=block_pairs / packed,
        tail_pairs=longest * anatomy.tile_q_causal * slots / num_heads,
    )
