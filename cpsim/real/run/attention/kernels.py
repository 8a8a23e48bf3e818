"""The attention kernels, one row each. A new kernel is a module beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from cpsim.real.run.attention import flash_attn_2, flash_attn_4, flashinfer, flex, plain, torch_sdpa
from cpsim.real.run.attention.call import Call, Grads

Masks = Literal["sequences", "whole blocks", "rectangles", "any"]


class Forward(Protocol):
    """Output [T, H, D] and log-sum-exp [H, T]; see `cpsim.real.run.attention.forward`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None, /
    ) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """Gradients of q, k and v; see `cpsim.real.run.attention.backward`."""

    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: Grads | None,
        /,
    ) -> Grads: ...


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unpackaged build"


def _torch() -> str:
    return torch.__version__


def _cudnn() -> str:
    return str(torch.backends.cudnn.version())


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One attention kernel."""

    forward: Forward
    backward: Backward
    version: Callable[[], str]
    """Version of the package that it comes from."""
    masks: Masks = "sequences"
    """Besides full and causal sequences: masks of whole blocks of 128 tokens, of rectangles of any sizes (forward
    only), or any."""


KERNELS: Final[dict[str, Kernel]] = {
    "fa2": Kernel(
        forward=flash_attn_2.forward, backward=flash_attn_2.backward, version=partial(_installed, "flash-attn")
    ),
    "fa4": Kernel(
        forward=flash_attn_4.forward, backward=flash_attn_4.backward, version=partial(_installed, "flash-attn-4")
    ),
    "cudnn": Kernel(forward=torch_sdpa.cudnn_forward, backward=torch_sdpa.cudnn_backward, version=_cudnn),
    "sdpa_flash": Kernel(forward=torch_sdpa.flash_forward, backward=torch_sdpa.flash_backward, version=_torch),
    "fa4_sparse": Kernel(
        forward=flash_attn_4.sparse_forward,
        backward=flash_attn_4.sparse_backward,
        version=partial(_installed, "flash-attn-4"),
        masks="whole blocks",
    ),
    "flashinfer": Kernel(
        forward=partial(flashinfer.forward, "auto"),
        backward=flashinfer.backward,
        version=partial(_installed, "flashinfer-python"),
        masks="rectangles",
    ),
    "flashinfer_fa2": Kernel(
        forward=partial(flashinfer.forward, "fa2"),
        backward=flashinfer.backward,
        version=partial(_installed, "flashinfer-python"),
        masks="rectangles",
    ),
    "flex": Kernel(forward=flex.forward, backward=flex.backward, version=_torch, masks="any"),
    "sdpa_math": Kernel(
        forward=partial(plain.forward, narrow=True),
        backward=partial(plain.backward, narrow=True),
        version=_torch,
        masks="any",
    ),
    "math": Kernel(forward=plain.forward, backward=plain.backward, version=_torch, masks="any"),
}


def _taking(masks: Masks) -> tuple[str, ...]:
    return tuple(name for name, kernel in KERNELS.items() if kernel.masks == masks)


ANY_MASK: Final = _taking("any")
"""Kernels that take any mask."""
WHOLE_BLOCKS: Final = _taking("whole blocks")
"""Kernels that take masks of whole blocks of 128 tokens."""
RECTANGLES: Final = _taking("rectangles")
"""Kernels that take masks of rectangles of any sizes, forward only."""
