"""Runs one rank's part of a schedule: one torch call an op, in list order, on the streams that the schedule says.

It takes no decision of its own: the schedule says what is computed, sent and merged, in which order, on which stream
and after what. Blocks become views of one piece of memory, laid out once (`cpsim.real.run.storage`), ops become calls
on these views (`cpsim.real.run.lowering`), and the calls run on their streams (`cpsim.real.run.program`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cpsim.case.workload import Workload
from cpsim.real.run.lowering import Lowering
from cpsim.real.run.node import Node
from cpsim.real.run.program import Program, computations
from cpsim.real.run.storage import PLANES, Ints, RankMemory, Walk
from cpsim.real.run.tensors import bind
from cpsim.schedule.schedule import Schedule
from cpsim.schedule.transformer import WEIGHTS

EAGER_RUNS: Final = 3
"""Runs before the CUDA graph is captured."""


class Executor:
    """A schedule on this rank, ready to be launched any number of times.

    Args:
        schedule: of any strategy and pass.
        workload: that it was planned for.
        node: this rank; all ranks make their executors of one schedule together.
        kernel: one of `cpsim.real.run.attention.KERNELS`.
        traced: name every op for the profiler.
        laid_out: memory of the schedule, where one process makes that of all ranks; see `storage.lay_out`.

    Raises:
        InfeasibleError: a collective's parts differ in size.
    """

    def __init__(
        self,
        schedule: Schedule,
        workload: Workload,
        node: Node,
        kernel: str,
        *,
        traced: bool = False,
        laid_out: tuple[RankMemory, Walk] | None = None,
    ) -> None:
        self.tensors, walk = bind(schedule, workload, node, kernel, laid_out)
        self.schedule, self.workload, self.node, self.kernel = schedule, self.tensors.workload, node, kernel
        calls = Lowering(self.tensors, walk).calls()
        self.program = Program(node, computations(calls) if node.alone else calls, traced)
        if node.cuda:
            self.program.rehearse()
            node.synchronize()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_left = EAGER_RUNS if node.cuda and not traced else -1

    def launch(self) -> None:
        """One run of the schedule; the current stream waits for all of it.

        On GPUs the first runs are launched op by op. Then the program is captured into a CUDA graph, so that a run
        is one launch.
        """
        if self._graph is not None:
            self._graph.replay()
            return
        if self._eager_left == 0:
            self._graph = self._capture()
            self._graph.replay()
            return
        self._eager_left -= 1
        self.program.run()

    def _capture(self) -> torch.cuda.CUDAGraph:
        self.node.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # what a collection frees, such as another graph, would end the capture
        try:  # other threads, such as NCCL's watchdog, may go on using CUDA
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.program.run()
        finally:
            gc.enable()
        return graph

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Fills the inputs.

        Args:
            given: by tensor (q, kv, dout, out), ``[tokens, heads, width]`` with all tokens and heads; kv has keys
                and values side by side, out its log-sum-exp last; sink ``[1, heads, 1]``, where there are sinks.
        """
        if "sink" in given:
            self.tensors.sinks.copy_(given["sink"].flatten())
        s = self.schedule
        for buffer, block in s.inputs.tolist():
            if s.buffer_rank[buffer] != self.node.rank:
                continue
            tensor, rows, head, count = self.tensors.places.block(block)
            tokens = torch.from_numpy(s.tokens(rows))
            held = _by_group(given[tensor], s.head_groups)[tokens][:, head : head + count]
            for plane in PLANES[tensor]:
                (part,) = self.tensors.places.inputs[buffer].parts(plane)
                view = self.tensors.view(part)
                mine, held = held.split([view.shape[2], held.shape[2] - view.shape[2]], dim=2)
                view.copy_(mine)
            if tensor == "out":
                self.tensors.lse[buffer].copy_(held[..., 0].T)

    def fill(self, seed: int) -> None:
        """Fills the inputs with random values of the sizes that real ones have; log-sum-exps fit the mask.

        Where nothing arrives from others, all memory is filled: on zeros tensor cores draw little power, and the clock
        stays up.
        """
        random = torch.Generator(self.node.device).manual_seed(seed)
        # scores of normal queries and keys are normal, too: the mean of exp(score) is exp(1 / 2)
        expected = torch.from_numpy(np.log(np.maximum(_visible(self.workload), 1)) + 0.5)
        self.tensors.sinks.normal_(generator=random)
        if self.node.alone:
            self.tensors.narrow.normal_(generator=random)
            for lse in self.tensors.lse.values():
                lse.fill_(float(expected.mean()))
        for buffer, block in self.schedule.inputs.tolist():
            if self.schedule.buffer_rank[buffer] != self.node.rank:
                continue
            tensor, rows, *_ = self.tensors.places.block(block)
            for plane in PLANES[tensor]:
                for part in self.tensors.places.inputs[buffer].parts(plane):
                    view = self.tensors.view(part)
                    view.copy_(torch.randn(view.shape, generator=random, device=self.node.device, dtype=view.dtype))
                    if tensor in WEIGHTS and len(view) > 1:  # results are as large as what they come from
                        view.mul_(view[0].numel() ** -0.5)
            if tensor == "out":
                self.tensors.lse[buffer].copy_(expected[self.schedule.tokens(rows)])

    def results(self) -> Iterator[tuple[str, Ints, slice, Tensor]]:
        """Every output block on the GPU: tensor, tokens, heads and values ``[tokens, heads, width]`` as in `load`; of
        gradients of sinks one row for all tokens."""
        s, num_tokens = self.schedule, self.workload.num_tokens // self.workload.head_groups
        for buffer, block in s.outputs.tolist():
            if s.buffer_rank[buffer] != self.node.rank:
                continue
            tensor, rows, head, count = self.tensors.places.block(block)
            if tensor == "dsink":
                total = self.tensors.sink_sums[buffer]
                yield tensor, np.zeros(1, np.int64), slice(0, len(total)), total[None, :, None]
                continue
            planes = [
                self.tensors.view(p)
                for plane in PLANES[tensor]
                for p in self.tensors.places.layouts[buffer].parts(plane)
            ]
            if tensor == "out":
                planes.append(self.tensors.lse[buffer].T[..., None].to(planes[0].dtype))
            values = torch.cat(planes, dim=2)
            if s.head_groups == 1:
                yield tensor, s.tokens(rows), slice(head, head + count), values
                continue
            group, token = np.divmod(s.tokens(rows), num_tokens)
            of_group = self.workload.num_kv_heads if tensor.endswith("kv") else self.workload.num_heads
            shared = self.workload.groups_per_kv if tensor.endswith("kv") else 1
            for g in np.unique(group).tolist():
                at = head + g // shared * of_group
                yield tensor, token[group == g], slice(at, at + count), values[torch.from_numpy(group == g)]


def _by_group(values: Tensor, head_groups: int) -> Tensor:
    """Rows ``[tokens, heads, width]`` of one group of heads after the other, as ``Workload.by_group`` counts tokens;
    fewer key-value heads than groups are repeated."""
    values = values.repeat_interleave(max(1, head_groups // values.shape[1]), dim=1)
    tokens, heads, width = values.shape
    apart = values.view(tokens, head_groups, heads // head_groups, width)
    return apart.transpose(0, 1).reshape(head_groups * tokens, heads // head_groups, width)


def _visible(workload: Workload) -> Ints:
    """Keys that every query sees, ``int64[tokens]``."""
    mask, seen = workload.slices(), np.zeros(workload.num_tokens, np.int64)
    for q0, q1, k0, k1, low, high in zip(
        mask.q_start, mask.q_end, mask.k_start, mask.k_end, mask.low, mask.high, strict=True
    ):
        query = np.arange(q0, q1)
        first, last = np.maximum(k0, query + low), np.minimum(k1 - 1, query + high)
        seen[q0:q1] += np.maximum(last - first + 1, 0)
    return seen
