"""cuDNN's attention through its own frontend: windows, values of another size than keys, unequal causal lengths.

PyTorch's operators build the same graphs, but have no arguments for these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cpsim.masks.slices import UNCUT
from cpsim.real.run.attention.call import Call, Grads, UnsupportedCall, batched

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor [sequence, head, token, element]."""
MADE = {"fwd": ("o", "stats"), "bwd": ("dq", "dk", "dv")}


@dataclass(frozen=True, slots=True)
class _Built:
    graph: Any
    places: Mapping[str, Any]
    """The graph's tensors, by name."""
    workspace: int
    """Bytes."""


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    num, heads = len(call.q_lens), q.shape[1]
    out = q.new_empty(len(q), heads, v.shape[2]) if into is None else into
    stats = q.new_empty(num, heads, call.max_q, 1, dtype=torch.float32)
    _run("fwd", call, {name: batched(x, call) for name, x in (("q", q), ("k", k), ("v", v), ("o", out))}, stats)
    return out, stats.transpose(0, 1).reshape(heads, len(q))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    grads = into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    names = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
    given = {name: batched(x, call) for name, x in zip(names, (q, k, v, out, dout, *grads), strict=True)}
    stats = lse.unflatten(1, (len(call.q_lens), -1)).transpose(0, 1)[..., None]
    stats = stats.reshape(-1).view(stats.shape)  # packed to cuDNN, also where there is one sequence
    _run("bwd", call, given, stats)
    return grads


def _run(pass_: str, call: Call, given: Mapping[str, Tensor], stats: Tensor) -> None:
    """Executes the graph of a call on the current stream."""
    import cudnn

    if call.varlen:
        raise UnsupportedCall("cudnn takes sequences of one length as a batch here, got a varlen call; use fa2 or fa4")
    tensors = {**given, "stats": stats}
    layouts = tuple((name, (tuple(x.shape), x.stride())) for name, x in tensors.items())
    handle = _handle(stats.device.index or 0)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(stats.device).cuda_stream)
    built = _built(pass_, layouts, call.window, given["q"].dtype, handle)
    workspace = torch.empty(max(1, built.workspace), dtype=torch.uint8, device=stats.device)
    built.graph.execute({built.places[name]: x for name, x in tensors.items()}, workspace, handle=handle)


@lru_cache
def _handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()  # a number, or an object from cudnn-frontend 1.30 on


@lru_cache(maxsize=256)
def _built(
    pass_: str, layouts: tuple[tuple[str, Layout], ...], window: tuple[int, int], dtype: torch.dtype, handle: Any
) -> _Built:
    graph, places = described(pass_, dict(layouts), window, dtype, handle)
    graph.validate()
    _plan(graph)
    return _Built(graph, places, int(graph.get_workspace_size()))


def _plan(graph: Any) -> None:
    import cudnn

    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()


def described(
    pass_: str, layouts: Mapping[str, Layout], window: tuple[int, int], dtype: torch.dtype, handle: Any
) -> tuple[Any, dict[str, Any]]:
    """A graph of one pass, and its tensors by name.

    Args:
        pass_: `fwd` or `bwd`.
        layouts: of q, k, v, o, stats (the log-sum-exp) and backward of do, dq, dk and dv.
        window: keys before and after a query's own; the last query's own key is the last one.
        dtype: of all but the log-sum-exp.
        handle: cuDNN's.
    """
    import cudnn

    kinds = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
    graph = cudnn.pygraph(
        io_data_type=kinds[dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    types = dict.fromkeys(layouts, kinds[dtype]) | {"stats": cudnn.data_type.FLOAT}
    places = {
        name: graph.tensor(name=name, dim=list(size), stride=list(stride), data_type=types[name])
        for name, (size, stride) in layouts.items()
        if name not in MADE[pass_]
    }
    asked = {**_band(layouts, window), "attn_scale": layouts["q"][0][-1] ** -0.5}
    if pass_ == "fwd":
        made = graph.sdpa(q=places["q"], k=places["k"], v=places["v"], generate_stats=True, **asked)
    else:
        given = {name: places[name] for name in ("q", "k", "v", "o", "stats")}
        made = graph.sdpa_backward(**given, dO=places["do"], **asked)
    for name, tensor in zip(MADE[pass_], made, strict=True):
        size, stride = layouts[name]
        places[name] = tensor.set_output(True).set_dim(list(size)).set_stride(list(stride)).set_data_type(types[name])
    return graph, places


def _band(layouts: Mapping[str, Layout], window: tuple[int, int]) -> dict[str, Any]:
    """Arguments of a mask; cuDNN counts a query's own key among those to the left."""
    import cudnn

    left, right = window
    equal = layouts["q"][0][2] == layouts["k"][0][2]
    made: dict[str, Any] = {"diagonal_band_left_bound": left + 1} if left != UNCUT else {}
    if right != UNCUT:
        made["diagonal_band_right_bound"] = right
    if made:
        sides = cudnn.diagonal_alignment
        made["diagonal_alignment"] = sides.TOP_LEFT if equal else sides.BOTTOM_RIGHT
    return made
