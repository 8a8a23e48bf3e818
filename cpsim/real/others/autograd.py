"""Anybody's attention function as a runner: random shards, forward with a graph, backward through autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor

from cpsim.case.resolve import workload_of
from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError, ScenarioError, cut
from cpsim.real.run.compiling import compile_anew
from cpsim.real.run.node import Node
from cpsim.strategies.others import implementation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class AutogradRunner:
    """Runs ``attend(q, k, v)`` in the way a training step would; see `cpsim.real.run.runner.Runner`.

    The forward pass records its graph. The backward pass starts from one graph that is kept, and leaves no `.grad`.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], pass_: str) -> None:
        """
        Args:
            attend: the function.
            inputs: this rank's queries, keys and values.
            pass_: `fwd`, `bwd`, or `fwd_bwd`, one after the other.
        """
        self.attend, self.pass_ = attend, pass_
        self.inputs = [x.requires_grad_() for x in inputs]
        self.dout = torch.randn_like(inputs[0], requires_grad=False)
        self.out: Tensor | None = None
        self.grads: tuple[Tensor, ...] = ()

    def prepare(self) -> None:
        """Runs the forward pass that a timed backward pass needs, once."""
        if self.pass_ == "bwd" and self.out is None:
            self.out = self.attend(*self.inputs)

    def launch(self) -> None:
        """Forward, backward, or both."""
        if self.pass_ != "bwd":
            self.out = None  # its memory is used again
            self.out = self.attend(*self.inputs)
        if self.pass_ != "fwd":
            self.grads = ()
            assert self.out is not None
            self.grads = torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=self.pass_ == "bwd")

    def is_finite(self) -> bool:
        """Whether all results are numbers; on random memory in place of other ranks' tensors they may not be."""
        return all(bool(x.isfinite().all()) for x in (self.out, *self.grads) if x is not None)


def compiled(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], pass_: str) -> AutogradRunner:
    """A runner of a function under ``torch.compile``, which has compiled all that it runs.

    Raises:
        InfeasibleError: PyTorch cannot compile it; says what it said.
    """
    compile_anew()
    runner = AutogradRunner(torch.compile(attend, fullgraph=True, dynamic=False), inputs, pass_)
    try:
        with functorch.patch(donated_buffer=False):  # the graph that a timed backward pass keeps is walked often
            runner.prepare()
            runner.launch()
    except torch._dynamo.exc.TorchDynamoException as error:
        said = " ".join(str(error).split())
        raise InfeasibleError(f"compile: torch.compile failed: {cut(said, 160)}") from None
    return runner


def forget_compiled(function: Any) -> None:
    """Lets a TorchScript function be compiled again, as in a process that runs this case only: it is fused for the
    first few layouts of tensors that it meets, and runs op by op with others."""
    function._debug_flush_compilation_cache()


def check(scenario: Scenario, node: Node, knobs: Mapping[str, Any]) -> None:
    """Raises where the implementation that the scenario names cannot run it, with the planner's reasons.

    Args:
        scenario: the case.
        node: its ranks.
        knobs: all knobs that the adapter reads, with the values that they have by default.
    """
    if node.size != scenario.gpus:
        raise ScenarioError(f"gpus: expected the {node.size} processes of this run, got {scenario.gpus}")
    unknown = [name for name in scenario.knobs if name not in knobs]
    if unknown:
        raise ScenarioError(f"knobs: {scenario.implementation} {scenario.strategy} has no knob {unknown[0]!r}")
    facts = implementation(scenario.implementation)
    if node.cuda:
        facts.check_kernel(scenario.kernel)
    facts.check(str(scenario.strategy), workload_of(scenario), node.size, scenario.knobs)


def offsets_of(scenario: Scenario, parts: int, device: torch.device | str) -> tuple[Tensor, int]:
    """Cumulative document lengths of one of `parts` equal parts, int32, and the longest; of a mask without documents
    those of all tokens."""
    documents = workload_of(scenario).documents if "document" in scenario.mask_name else (scenario.num_tokens,)
    lengths = [n // parts for n in documents]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths)


def shards(scenario: Scenario, node: Node) -> list[Tensor]:
    """Random queries, keys and values of this rank, ``[tokens, heads, head_dim]``."""
    tokens, dtype = scenario.num_tokens // node.size, DTYPES[scenario.dtype]
    return [
        torch.randn(tokens, heads, scenario.head_dim, device=node.device, dtype=dtype)
        for heads in (scenario.heads, scenario.kv_heads, scenario.kv_heads)
    ]
