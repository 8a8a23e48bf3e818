"""torch.compile as in a process that compiles nothing else."""

from __future__ import annotations

import torch
import torch._functorch.config


def compile_anew() -> None:
    """What is compiled from now on is compiled anew.

    PyTorch's cache of traced graphs does not tell backends of scaled_dot_product_attention apart: a graph that was
    compiled with one, by any process of the machine, would run it where another is asked for.

    Source: pytorch/pytorch issue 185449, present in 2.11 and 2.13.
    """
    torch._dynamo.reset()
    torch._functorch.config.enable_autograd_cache = False
