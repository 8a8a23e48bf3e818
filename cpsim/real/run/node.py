"""This process among the others: its device, and the process groups that schedules and measurements use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from cpsim.errors import CpsimError
from cpsim.real.measure import alone
from cpsim.real.run.timing import hold

MEET_S: Final = 200e-6
"""From the moment the last host comes to a meeting until all leave it; agreeing takes some 100 us of it."""


class Node:
    """One rank of a distributed run: NCCL where there are GPUs, gloo elsewhere. Use it as a context manager."""

    def __init__(self, *, cpu: bool = False, num_nodes: int = 1) -> None:
        """Joins the processes that torchrun started, or runs alone where it did not start this one.

        Args:
            cpu: use gloo and the CPU even where there are GPUs.
            num_nodes: nodes to emulate on this machine; see `emulate_nodes`.
        """
        emulate_nodes(num_nodes)
        self.cuda = torch.cuda.is_available() and not cpu
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", self.local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        for name, single in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, single)
        self._one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ["WORLD_SIZE"]
        if self._one_machine and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: never ask for its name in the network
        store, rank, size = next(rendezvous("env://"))
        fresh = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # not what the dead wrote
        dist.init_process_group(
            "nccl" if self.cuda else "gloo",
            store=fresh,
            rank=rank,
            world_size=size,
            device_id=self.device if self.cuda else None,
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._hosts = dist.new_group(backend="gloo") if self.cuda else dist.group.WORLD
        self._flag = torch.zeros(1, device=self.device)
        self._arrival = torch.zeros(1, dtype=torch.float64, device=self.device)
        cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size if self.cuda else 0
        self._evicting = torch.zeros(2 * cache_bytes, dtype=torch.uint8, device=self.device)
        self.traced = False
        """Whether runners name every op for the profiler (`torch.profiler.record_function`)."""
        self.alone = False
        """Whether runners leave out all communication, see `stand_for`."""
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        dist.destroy_process_group()

    def stand_for(self, rank: int, size: int) -> None:
        """From now on runners take this process for one rank of so many, of whom none is there: they only compute."""
        alone.join(rank, size, self.device)
        self.rank, self.size, self.alone = rank, size, True

    def group(self, ranks: tuple[int, ...], stream: str) -> Any:
        """The process group of these ranks for one stream, made at the first call; all ranks of the job must call.

        NCCL runs on high-priority streams: a transfer that is launched beside attention must not wait for its blocks.
        """
        if self.alone:
            return None
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

    def barrier(self) -> None:
        """Device-side barrier of all ranks on the current stream; the host runs on where there are GPUs."""
        dist.all_reduce(self._flag)

    def meet(self) -> None:
        """Hosts of all ranks return at one moment, their GPUs idle.

        They agree on a time and wait for it: from a barrier alone they come back up to 60 us apart. Machines, whose
        clocks differ, have the barrier only.
        """
        self._arrival.fill_(time.perf_counter())
        dist.all_reduce(self._arrival, dist.ReduceOp.MAX)
        leave = self._arrival.item() + MEET_S
        self.synchronize()
        while self._one_machine and time.perf_counter() < leave:
            pass

    def evict(self) -> None:
        """Leaves nothing useful in the GPU's L2 cache."""
        self._evicting.zero_()

    @property
    def own_memory_bytes(self) -> int:
        """GPU memory that belongs to measuring and not to what is measured."""
        return self._evicting.numel()

    def gather(self, value: Any) -> list[Any]:
        """What every rank's host says, by rank; works while GPUs are busy or stuck. All ranks must call."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._hosts)
        return values

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def maximum(self, seconds: list[float]) -> list[float]:
        """Maximum over all ranks, sample by sample."""
        tensor = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.cuda else HostEvent()

    def samples(self, launch: Callable[[], object] | None, num: int = 20) -> list[float]:
        """Seconds of each of `num` launches, the maximum over ranks; `launch` is None on ranks that take no part."""
        for _ in range(3):
            if launch is not None:
                launch()
            self.barrier()
        self.synchronize()
        hold(0.005 + num * 3e-4, self.device)
        pairs = [(self.event(), self.event()) for _ in range(num)]
        for start, end in pairs:
            self.barrier()
            if launch is not None:
                start.record()
                launch()
                end.record()
        self.synchronize()
        return self.maximum([s.elapsed_time(e) / 1e3 if launch else 0.0 for s, e in pairs])


class HostEvent:
    """A CUDA event's interface on the wall clock, for dry runs."""

    def record(self, _stream: object = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._at - self._at) * 1e3


def end_process(status: int = 0) -> NoReturn:
    """Ends this process at once: threads that torch, its profiler and gloo leave behind may abort a usual end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def emulate_nodes(num_nodes: int) -> None:
    """Makes NCCL take the local ranks for ranks of that many nodes, linked by sockets; before NCCL starts.

    Raises:
        CpsimError: the local ranks do not divide into so many nodes.
    """
    if num_nodes == 1:
        return
    local, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if size % num_nodes:
        raise CpsimError(f"emulate-nodes: expected a divisor of the {size} local ranks, got {num_nodes}")
    os.environ |= {
        "NCCL_HOSTID": f"node{local // (size // num_nodes)}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
