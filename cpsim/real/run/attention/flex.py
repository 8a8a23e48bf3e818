"""FlexAttention, compiled: the operators under its autograd wrapper, which cannot take a given log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cpsim.masks.blocks import BLOCK
from cpsim.real.run.attention.call import LN_2, Call, Grads, all_placed, heads_first, placed
from cpsim.real.run.inductor import compile_what_fits, static
from cpsim.real.run.mask_blocks import Blocks


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    blocks = call.blocks

    def run(options: Mapping[str, int], q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        from torch._higher_order_ops.flex_attention import flex_attention

        out, lse, *_ = flex_attention(q, k, v, _score, *_arguments(blocks, q, k, given, options))
        return out, lse * LN_2

    out, lse = _run("fwd", run, blocks, tuple(heads_first(x) for x in (q, k, v)))
    return placed(out[0].transpose(0, 1), into), lse[0]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    blocks = call.blocks

    def run(
        options: Mapping[str, int],
        lse: Tensor,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *given: Tensor,
    ) -> Grads:
        from torch._higher_order_ops.flex_attention import flex_attention_backward

        rest = _arguments(blocks, q, k, given, options)
        dq, dk, dv, _ = flex_attention_backward(q, k, v, out, lse / LN_2, dout, None, _score, _BACKWARD_GRAPH, *rest)
        return dq, dk, dv

    dense = (heads_first(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (g[0].transpose(0, 1) for g in _run("bwd", run, blocks, (lse[None], *dense)))
    return all_placed((dq, dk, dv), into)


_COMPILED: dict[object, Callable[..., tuple[Tensor, ...]]] = {}
_FIRST_STAGE: dict[object, int] = {}
"""Index of the first of `inductor.STAGES` that fits, where it is not 0, by what shared memory depends on."""


def _run(
    pass_: str, run: Callable[..., tuple[Tensor, ...]], blocks: Blocks, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Runs a pass: compiled once for all numbers of tokens on a GPU, PyTorch's own dense code on a CPU."""
    every = *tensors, *blocks.tables, *blocks.given
    if tensors[0].device.type == "cpu":
        return run({}, *every)
    # free dimensions: the tokens (2) of tensors, all that are not 1 of tables
    free = [{2}] * len(tensors) + [set(range(x.dim())) for x in every[len(tensors) :]]
    key = pass_, blocks.sees, blocks.aligned, tuple(static(x, f) for x, f in zip(every, free, strict=True))
    if key not in _COMPILED:
        kind = pass_, blocks.sees, tensors[-1].dtype, tensors[-1].shape[-1]
        _COMPILED[key], _FIRST_STAGE[kind] = compile_what_fits(run, every, free, _FIRST_STAGE.get(kind, 0))
    return _COMPILED[key](*every)


def _arguments(
    blocks: Blocks, q: Tensor, k: Tensor, given: Sequence[Tensor], options: Mapping[str, int]
) -> tuple[Any, ...]:
    """What follows the tensors of both operators: block mask, scale, options, captured tensors."""
    from torch.nn.attention.flex_attention import BlockMask, _apply_kernel_options

    tables, captured = given[: len(blocks.tables)], given[len(blocks.tables) :]
    names = (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
        "full_q_num_blocks",
        "full_q_indices",
    )
    named: dict[str, Any] = dict(zip(names, tables, strict=True))
    mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=blocks.sees,
        **named,
    )
    # one kernel for all numbers of queries
    wanted: Any = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": blocks.aligned, **options}
    every = _apply_kernel_options(q, k, k, True, wanted)
    return mask.as_tuple(), q.shape[-1] ** -0.5, every, (), tuple(captured)


def _score(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
    return score


def _score_gradient(
    _score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor, grad: Tensor
) -> list[Tensor | None]:
    return [grad, None, None, None, None]


_BACKWARD_GRAPH: Any = _score_gradient
"""FlexAttention wants a traced graph here, and takes a function."""
