"""Masks as tables of full and partial blocks, for kernels that visit listed ones, and what decides in partial ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cpsim.masks.blocks import (
    BANDS,
    BLOCK,
    CELLS,
    FULL,
    PARTIAL,
    RUNS,
    band_cells,
    block_kinds,
    key_runs,
    rule_of,
    table_of,
)
from cpsim.masks.slices import Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A mask as FlexAttention takes it."""

    tables: tuple[Tensor, ...]
    """Partial and full key blocks of every row of queries, then query blocks of every row of keys: each a count
    [1, 1, rows] and the block numbers [1, 1, rows, columns]; int32."""
    sees: Callable[..., Tensor]
    """Whether a query sees a key, in partial blocks: (batch, head, query, key, *given)."""
    given: tuple[Tensor, ...]
    aligned: bool
    """Whether no block is cut off at the end."""
    num_partial: int
    """Partial blocks in all."""


def blocks_of(mask: Slices, num_q: int, num_k: int, device: torch.device) -> Blocks:
    """Tables and rule of a mask of disjoint slices of query and key rows."""
    rows = table_of(mask)
    kinds = torch.from_numpy(block_kinds(rows, num_q, num_k, BLOCK)).to(device)
    tables = [t for side in (kinds, kinds.T) for kind in (PARTIAL, FULL) for t in _listed(side == kind)]
    rule = rule_of(rows, num_q)
    given = list(key_runs(rows, num_q)[0])
    if rule != RUNS:
        *places, cells, limits = band_cells(rows, num_q, num_k)
        given = [*places, (cells != cells[0, 0]).astype(np.int8)] if rule == CELLS else [*places, cells, *limits]
    return Blocks(
        tables=tuple(tables),
        sees=_RULES[rule],
        given=tuple(torch.from_numpy(x.copy()).to(device) for x in given),
        aligned=num_q % BLOCK == 0 and num_k % BLOCK == 0,
        num_partial=int((kinds == PARTIAL).sum()),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of every row are chosen [1, 1, rows], and the numbers of all blocks, those first."""
    order = torch.argsort((~chosen).to(torch.uint8), dim=1, stable=True)
    return chosen.sum(dim=1).to(torch.int32)[None, None], order.to(torch.int32).contiguous()[None, None]


def _sees_run(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Masks under which a query sees one run of keys: two numbers per query say which."""
    return (first[q] <= k) & (k < end[q])


def _sees_cell(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cells: Tensor) -> Tensor:
    """Masks of rectangles, such as random blocks."""
    return cells[of_q[q], of_k[k]] != 0


def _sees_bands(
    _b: Tensor,
    _h: Tensor,
    q: Tensor,
    k: Tensor,
    of_q: Tensor,
    of_k: Tensor,
    cells: Tensor,
    low: Tensor,
    high: Tensor,
    low_2: Tensor,
    high_2: Tensor,
) -> Tensor:
    """All other masks, as `band_cells` describes them."""
    kind, offset = cells[of_q[q], of_k[k]], k - q
    return (low[kind] <= offset) & (offset <= high[kind]) | (low_2[kind] <= offset) & (offset <= high_2[kind])


_RULES: dict[int, Callable[..., Tensor]] = {RUNS: _sees_run, CELLS: _sees_cell, BANDS: _sees_bands}
