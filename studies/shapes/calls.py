"""Which calls are measured: drawn once, in random order, so that a run cut short has some of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from cpsim.masks.slices import UNCUT
from cpsim.real.measure.shapes import Shape

HEADS: Final = ((32, 8), (64, 8), (16, 16), (8, 1), (4, 4))
WINDOWS: Final = (128, 1024, 4096)
"""Keys that a query sees, its own among them: gpt-oss, Gemma 3, Mistral."""
LENGTHS: Final = (4096, 8192, 16384, 32768, 65536)
DIMS: Final = {"fa2": (128,), "sdpa_flash": (64, 128), "cudnn": (64, 128), "fa4": (64, 128)}
"""Head dimensions that the build of each kernel has."""
MOST_FLOPS: Final = 1e13
PER_KIND: Final = 9
"""Calls of every kernel and kind, at each of its head dimensions."""


def calls() -> list[tuple[str, Shape]]:
    """Kernels and shapes."""
    rng, found = np.random.default_rng(11), list[tuple[str, Shape]]()
    for kernel, dims in DIMS.items():
        for dim, (kind, every) in itertools.product(dims, _kinds(kernel).items()):
            some = [shape for shape in every if shape.flops() <= MOST_FLOPS]
            chosen = rng.choice(len(some), min(len(some), PER_KIND), replace=False)
            found += [(kernel, replace(some[i], head_dim=dim, family=kind)) for i in sorted(chosen.tolist())]
    found += [("cudnn", shape) for shape in _values_of_another_size()]
    found += [("fa4", shape) for shape in _values_of_another_size()]
    shuffled = [found[i] for i in rng.permutation(len(found)).tolist()]
    return sorted(shuffled, key=lambda call: call[0] == "fa4")  # last, as it takes long to compile


def calls_of_both() -> list[tuple[str, Shape]]:
    """cuDNN's calls with windows and values of another size than keys at once, which no earlier call has, in random
    order; and windows of 128 at head dimension 64, which a later cuDNN takes longer for."""
    both = [replace(one, head_dim=192, value_dim=128, family="window values") for one in _windows_of((128, 1024, 2048))]
    narrow = [replace(one, head_dim=64, family="window") for one in _windows_of((128,))]
    found = [("cudnn", one) for one in (*both, *narrow) if one.flops() <= MOST_FLOPS]
    return [found[i] for i in np.random.default_rng(12).permutation(len(found)).tolist()]


def _windows_of(windows: tuple[int, ...]) -> Iterator[Shape]:
    for n, heads, window in itertools.product((4096, 16640, 32768), ((32, 32), (128, 128)), windows):
        yield _one((n,), heads, (window - 1, 0))


def _kinds(kernel: str) -> dict[str, list[Shape]]:
    kinds = {"window": list(_windows())}
    if kernel != "sdpa_flash":  # the same kernel as fa2
        kinds |= {"batch": list(_batches()), "window batch": list(_batches(1024))}
    if kernel in ("fa2", "fa4"):
        kinds |= {"window documents": list(_documents()), "window both sides": list(_both_sides())}
        kinds |= {"window gathered": list(_gathered())}
    return kinds


def _one(lens: tuple[int, ...], heads: tuple[int, int], window: tuple[int, int], **others: object) -> Shape:
    given = {"family": "", "varlen": False, "q_lens": lens, "k_lens": lens, **others}
    causal = window == (UNCUT, 0)
    return Shape(num_heads=heads[0], num_kv_heads=heads[1], causal=causal, window=window, **given)  # type: ignore[arg-type]


def _windows() -> Iterator[Shape]:
    for n, heads, window in itertools.product(LENGTHS, HEADS, WINDOWS):
        if window < n:
            yield _one((n,), heads, (window - 1, 0))


def _batches(window: int = 0) -> Iterator[Shape]:
    for batch, n, heads in itertools.product((2, 4, 8), (2048, 4096, 8192, 16384), HEADS[:3]):
        yield _one((n,) * batch, heads, (window - 1, 0) if window else (UNCUT, 0))


def _documents() -> Iterator[Shape]:
    """Packed documents of unequal lengths."""
    for n, heads, window in itertools.product((16384, 32768, 65536), HEADS[:3], (128, 1024)):
        lens = tuple(int(n * share) for share in (0.5, 0.2, 0.1, 0.1, 0.05, 0.05))
        yield _one(lens, heads, (window - 1, 0), varlen=True)


def _both_sides() -> Iterator[Shape]:
    for n, heads, window in itertools.product((8192, 32768), HEADS[:3], WINDOWS[:2]):
        yield _one((n,), heads, (window, window))


def _gathered() -> Iterator[Shape]:
    """Few queries on the keys that they see, as after an all-gather."""
    for n, heads, window in itertools.product((1024, 4096, 8192), HEADS[:3], (128, 1024, 4096)):
        yield replace(_one((n,), heads, (window - 1, 0)), k_lens=(n + window - 1,))


def _values_of_another_size() -> Iterator[Shape]:
    """Multi-head latent attention, expanded: DeepSeek-V3's 192 elements of keys and 128 of values."""
    for n, heads, window in itertools.product((2048, 4096, 8192, 16384), (16, 32, 128), ((UNCUT, 0), (UNCUT, UNCUT))):
        shape = _one((n,), (heads, heads), window, head_dim=192, value_dim=128, family="192/128")
        if shape.flops() <= MOST_FLOPS and (n * heads) % 3:
            yield shape
