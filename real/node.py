"""This process among the others: its device, and the process groups that schedules and measurements use."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


class Node:
    """One rank of a distributed run: NCCL where there are GPUs, gloo elsewhere. Use it as a context manager."""

    def __init__(self, *, cpu: bool = False) -> None:
        """Joins the processes that torchrun started, or runs alone where it did not start this one.

        Args:
            cpu: use gloo and the CPU even where there are GPUs.
        """
        self.cuda = torch.cuda.is_available() and not cpu
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", self.local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, alone)
        dist.init_process_group("nccl" if self.cuda else "gloo", device_id=self.device if self.cuda else None)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_error: object) -> None:
        dist.destroy_process_group()

    def group(self, ranks: tuple[int, ...], stream: str) -> Any:
        """The process group of these ranks for one stream, made at the first call; all ranks of the job must call.

        NCCL runs on high-priority streams: a transfer that is launched beside attention must not wait for its blocks.
        """
        key = (ranks, stream)
        if key not in self._groups:
            options = None
            if self.cuda:
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            group = dist.new_group(list(ranks), pg_options=options)
            if self.rank in ranks:  # members connect now: later calls may involve only some of them
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            self._groups[key] = group
        return self._groups[key]

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
