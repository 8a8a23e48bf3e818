"""FlashInfer: rows of blocks of any sizes, each with keys of its own. It plans a call on the host; forward only."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cpsim.masks.blocks import rectangles, table_of
from cpsim.real.run.attention.call import LN_2, Call, Grads, UnsupportedCall, placed


def forward(backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = _plan(backend, q, k, call).run(*heads_first, return_lse=True)
    return placed(out.transpose(0, 1), into), lse * LN_2


def backward(*_: object) -> Grads:
    """Raises UnsupportedCall."""
    raise UnsupportedCall("flashinfer has no backward pass; use flex")


@cache
def _workspace(device: torch.device) -> Tensor:
    """Memory for partial results of split keys, shared by all calls: they run one after another."""
    return torch.empty(256 * 2**20, dtype=torch.uint8, device=device)


def _plan(backend: str, q: Tensor, k: Tensor, call: Call) -> Any:
    from flashinfer.sparse import VariableBlockSparseAttentionWrapper

    key = backend, q.shape[1:], k.shape[1], q.dtype
    if key not in call.plans:
        try:
            seen, rows, columns = rectangles(table_of(call.slices), len(q), len(k))
        except ValueError as error:
            raise UnsupportedCall(f"flashinfer takes masks that cut no block ({error}); use flex") from error
        every = k.shape[1], 1
        blocks = torch.from_numpy(seen)[None].repeat(*every, 1).to(q.device)
        sizes = (torch.from_numpy(x).int()[None].repeat(*every).to(q.device) for x in (rows, columns))
        plan = VariableBlockSparseAttentionWrapper(_workspace(q.device), backend=backend)
        plan.plan(blocks, *sizes, q.shape[1], k.shape[1], q.shape[2], q_data_type=q.dtype, kv_data_type=k.dtype)
        call.plans[key] = plan
    return call.plans[key]
