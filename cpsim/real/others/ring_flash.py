"""ring-flash-attn 0.1.8 on FlashAttention 2: ring, zigzag and striped rings, all-gather by groups of heads (llama3).

Dense masks go to the dense functions, document masks to the varlen ones; all-gather is varlen always. Shards:
ring: contiguous (of every document); zigzag: chunks r and 2P - 1 - r (of every document); stripe: every P-th token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from cpsim.case.scenario import Scenario
from cpsim.real.others.autograd import AutogradRunner, check, forget_compiled, offsets_of, shards
from cpsim.real.run.node import Node

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_KNOBS: dict[str, dict[str, Any]] = {
    "zigzag_ring": {"zigzag": "document"},
    "allgather": {"layout": "contiguous", "heads_per_gather": None},
}
"""Knobs of the strategies, with their defaults."""
_NAMES = {"ring": "ring", "zigzag_ring": "zigzag_ring", "striped_ring": "stripe"}


def make(scenario: Scenario, pass_: str, node: Node) -> AutogradRunner:
    """One pass of a scenario on this rank.

    Raises:
        InfeasibleError: the package cannot run the case.
    """
    defaults = _KNOBS.get(str(scenario.strategy), {})
    knobs = {**defaults, **scenario.knobs}
    check(scenario, node, defaults)
    code, inputs = package(), shards(scenario, node)
    forget_compiled(code.utils._update_out_and_lse)
    if scenario.strategy == "allgather":
        return AutogradRunner(_gathered(code, scenario, node, knobs["heads_per_gather"]), inputs, pass_)
    if "document" in scenario.mask_name:
        return AutogradRunner(_varlen(code, scenario, node), inputs, pass_)
    return AutogradRunner(_dense(code, scenario), [x[None] for x in inputs], pass_)


def package() -> Any:
    """The package, without its adapters for Hugging Face models, which today's transformers breaks."""
    stub = ModuleType("ring_flash_attn.adapters")
    stub.substitute_hf_flash_attn = stub.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
    sys.modules.setdefault("ring_flash_attn.adapters", stub)
    import ring_flash_attn

    return ring_flash_attn


def _dense(package: Any, scenario: Scenario) -> Attend:
    function = getattr(package, f"{_NAMES[str(scenario.strategy)]}_flash_attn_func")
    causal = scenario.mask_name == "causal"
    return lambda q, k, v: function(q, k, v, causal=causal)


def _varlen(package: Any, scenario: Scenario, node: Node) -> Attend:
    function = getattr(package, f"{_NAMES[str(scenario.strategy)]}_flash_attn_varlen_func")
    causal = scenario.mask_name == "causal_document"
    offsets, longest = offsets_of(scenario, node.size, node.device)
    return lambda q, k, v: function(q, k, v, offsets, longest, causal=causal)


def _gathered(package: Any, scenario: Scenario, node: Node, heads_per_gather: int | None) -> Attend:
    causal = scenario.mask_name in ("causal", "causal_document")
    offsets, _ = offsets_of(scenario, 1, "cpu")  # cut on the CPU: its values are read on the host
    cu_q, cu_k, max_q, max_k, keys = package.llama3_flash_attn_prepare_cu_seqlens(offsets, causal, node.rank, node.size)
    cu_q, cu_k, stride = cu_q.to(node.device), cu_k.to(node.device), heads_per_gather or scenario.kv_heads
    return lambda q, k, v: package.llama3_flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, stride, keys, causal=causal
    )
