"""Code that Inductor compiles once for all numbers of tokens, with as many stages of loads as fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

STAGES: tuple[Mapping[str, int], ...] = ({}, {"num_stages": 2}, {"num_stages": 1})
"""Stages of loads in compiled kernels: PyTorch's default, then fewer."""
ALIGNMENT: Final = 16
"""Bytes of the widest loads."""


def compile_what_fits(
    run: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor], free: Sequence[set[int]], first: int
) -> tuple[Callable[..., tuple[Tensor, ...]], int]:
    """Compiled code with as many stages of loads as shared memory holds, tables of a mask among them; and which of
    STAGES that is, `first` or a later one."""
    for i, options in enumerate(STAGES[first:-1], first):
        try:
            compiled = compile_free(partial(run, options), example, free)
            compiled(*example)
        except Exception as error:
            if "out of resource" not in str(error):
                raise
        else:
            return compiled, i
    return compile_free(partial(run, STAGES[-1]), example, free), len(STAGES) - 1


def static(x: Tensor, free: set[int]) -> object:
    """What compiled code depends on: all sizes that are not free, or 1; strides; whether 32 bits count its elements;
    whether loads can be wide."""
    sizes = tuple(-1 if i in free and n > 1 else n for i, n in enumerate(x.shape))
    strides = x.stride()[1:] if x.dim() == 4 and x.is_floating_point() else None
    return x.dtype, x.device, sizes, strides, x.numel() < 2**31, x.data_ptr() % ALIGNMENT == 0


def compile_free(
    run: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor], free: Sequence[set[int]]
) -> Callable[..., tuple[Tensor, ...]]:
    """Inductor's code for a function of tensors, any size along their free dimensions."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [fake_of(x, dims, mode, f"x{i}") for i, (x, dims) in enumerate(zip(example, free, strict=True))]
    with torch.no_grad(), config.patch(assume_aligned_inputs=all(x.data_ptr() % ALIGNMENT == 0 for x in example)):
        with mode:
            graph = make_fx(run)(*fakes)
        compiled: Any = compile_fx(graph, fakes)
    function: Callable[..., tuple[Tensor, ...]] = compiled
    return function


def fake_of(x: Tensor, free: set[int], mode: Any, name: str) -> Tensor:
    """A tensor without data: sizes of the free dimensions are symbols, strides of q, k, v and the like are numbers.

    Otherwise a view would begin at a symbol, and rows that lie apart would have one for a stride, of which nobody knows
    that it is a multiple of 16 bytes: all loads would be narrow.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DYNAMIC if d in free and n > 1 else DimDynamic.STATIC for d, n in enumerate(x.shape)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    fake: Tensor = mode.from_tensor(x, source=ConstantSource(name), symbolic_context=context)
    if x.dim() < 4 or not x.is_floating_point():
        return fake
    with mode:
        return torch.empty_strided(fake.shape, x.stride(), dtype=x.dtype, device=x.device)
