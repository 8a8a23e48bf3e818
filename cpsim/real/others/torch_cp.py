"""PyTorch's own context parallel (torch.distributed.tensor.experimental.context_parallel), and plain calls on one GPU.

Strategies ring and zigzag_ring rotate keys and values by all-to-all; allgather gathers them once and goes through
the shards as a ring does. Zigzag shards are what PyTorch calls load balancing.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpsim.case.scenario import Scenario
from cpsim.real.others.autograd import AutogradRunner, check, compiled, shards
from cpsim.real.run.node import Node

_BACKENDS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def attend(kernel: str, causal: bool, mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of sharded ``[1, tokens, heads, head_dim]`` tensors on the ranks of a mesh, until another one's."""
    _enter(mesh)
    return plain(kernel, causal)


def plain(kernel: str, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of ``[1, tokens, heads, head_dim]`` tensors with one of PyTorch's kernels."""
    backend = _BACKENDS.get(kernel, SDPBackend.FLASH_ATTENTION)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


class ContextParallelRunner(AutogradRunner):
    """Sets PyTorch's global options before each call."""

    def __init__(self, scenario: Scenario, pass_: str, node: Node, *, rotate: str, balanced: bool) -> None:
        self.rotate, self.balanced = rotate, balanced
        mesh = _mesh(dist.group.WORLD, node.device.type, node.size)
        call = attend(scenario.kernel, scenario.mask_name == "causal", mesh)
        super().__init__(call, [x[None] for x in shards(scenario, node)], pass_)

    def prepare(self) -> None:
        self._set_options()
        super().prepare()

    def launch(self) -> None:
        self._set_options()
        super().launch()

    def _set_options(self) -> None:
        set_rotate_method(self.rotate)
        set_balance(self.balanced)


def make(scenario: Scenario, pass_: str, node: Node) -> AutogradRunner:
    """One pass of a scenario on this rank.

    Raises:
        InfeasibleError: PyTorch cannot run the case.
    """
    if scenario.strategy == "none":
        check(scenario, node, {})
        call = plain(scenario.kernel, scenario.mask_name == "causal")
        make_runner = compiled if scenario.compile else AutogradRunner
        return make_runner(call, [x[None] for x in shards(scenario, node)], pass_)
    gathers = scenario.strategy == "allgather"
    defaults = {"layout": "zigzag"} if gathers else {"zigzag": "document"} if scenario.strategy == "zigzag_ring" else {}
    check(scenario, node, defaults)
    rotate, balanced = rotation(scenario)
    return ContextParallelRunner(scenario, pass_, node, rotate=rotate, balanced=balanced)


def rotation(scenario: Scenario) -> tuple[str, bool]:
    """How keys and values rotate, and whether shards are zigzag ones."""
    if scenario.strategy == "allgather":
        return "allgather", scenario.knobs.get("layout", "zigzag") == "zigzag"
    return "alltoall", scenario.strategy == "zigzag_ring"


def set_balance(balanced: bool) -> None:
    """From now on shards are zigzag ones, or not."""
    from torch.distributed.tensor.experimental import _attention

    _attention._cp_options.enable_load_balance = balanced


@cache
def _mesh(_world: Any, device: str, num_ranks: int) -> DeviceMesh:
    """Made once for every world of processes."""
    return init_device_mesh(device, (num_ranks,))


_context = ExitStack()
atexit.register(_context.close)


@lru_cache(maxsize=1)
def _enter(mesh: DeviceMesh) -> None:
    """Enters the context of a mesh to stay: it patches scaled_dot_product_attention, and backward needs it, too."""
    _context.close()
    some = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    _context.enter_context(context_parallel(mesh, buffers=[some], buffer_seq_dims=[0], no_restore_buffers={some}))
