"""Process groups of ranks of whom only this one is there: other people's code runs, and only computes, as long as the
process lasts.

What the others would have sent is random: a tensor that is received is pointed at memory that holds random numbers, and
fresh memory holds them, too, for what no call tells from other tensors. Zeros would draw less power.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

RANDOM_BYTES: Final = 32 << 30
"""GPU memory that random numbers fill."""
_POOL: Final[dict[tuple[torch.dtype, torch.device], Tensor]] = {}
"""Random numbers of every type, as many as the largest tensor has that was received."""


class Arrived:
    """Work that is done."""

    def wait(self) -> None:
        """Returns at once."""


def join(rank: int, size: int, device: torch.device) -> None:
    """Makes this process that rank of so many; what it sends goes nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    stand_ins = {"batch_isend_irecv": _exchange, "all_to_all_single": _receive, "all_gather_into_tensor": _receive}
    for name, stand_in in stand_ins.items():
        setattr(dist, name, stand_in)
    if device.type == "cuda":  # the allocator hands it out again
        torch.randn(RANDOM_BYTES // 2, dtype=torch.bfloat16, device=device)


def _exchange(ops: Sequence[dist.P2POp]) -> list[Arrived]:
    for op in ops:
        if op.op is dist.irecv:
            _fill(op.tensor)
    return []


def _receive(output: Tensor, *_args: Any, **_options: Any) -> Arrived:
    _fill(output)
    return Arrived()


def _fill(tensor: Tensor) -> None:
    kind = tensor.dtype, tensor.device
    if kind not in _POOL or _POOL[kind].numel() < tensor.numel():
        _POOL[kind] = torch.randn(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    tensor.set_(_POOL[kind].untyped_storage(), 0, tensor.size(), tensor.stride())
