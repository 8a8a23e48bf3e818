"""Masks as slices: one function for each name of ``cpsim.masks.names``, from documents and options to ``Slices``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.errors import ScenarioError, nearest
from cpsim.masks.names import MASK_NAMES, Options, Value, read_options
from cpsim.masks.slices import UNBOUNDED, Ints, Slices

Build = Callable[..., Slices]
SCORES: Final = 1 << 22
"""Random scores of block pairs that are drawn at a time."""


def mask_slices(
    name: str, documents: Sequence[int], options: Mapping[str, object] | Iterable[tuple[str, Value]] = ()
) -> Slices:
    """Disjoint slices of a named mask over packed documents, ordered by query and key.

    Args:
        name: a key of ``MASK_NAMES``.
        documents: document lengths in packing order [tokens]; some masks use their sum only.
        options: of the mask; the others have their defaults.

    Raises:
        ScenarioError: the name or an option is unknown, or a value is not allowed.
    """
    if name not in MASK_NAMES:
        raise ScenarioError(f"mask: {name!r} is unknown; {nearest(name, MASK_NAMES)}")
    try:
        return _built(name, tuple(documents), read_options(name, dict(options)))
    except ValueError as error:
        raise ScenarioError(f"mask: {error}") from None


def moved_apart(mask: Slices, documents: Sequence[int], padding: Sequence[int]) -> Slices:
    """A mask whose slices stay within documents [tokens], with padding behind each of these."""
    document = np.searchsorted(np.cumsum(documents), mask.q_start, side="right")
    before = np.concatenate(([0], np.cumsum(padding)))[document]
    q_start, q_end, k_start, k_end = (end + before for end in (mask.q_start, mask.q_end, mask.k_start, mask.k_end))
    return Slices(q_start, q_end, k_start, k_end, mask.low, mask.high)


def repeated(mask: Slices, times: int, num_tokens: int, sharing: int = 1) -> Slices:
    """A mask of so many tokens several times, one after the other; so many in a row see the keys of the first."""
    number = np.arange(times)[:, None]
    at, keys_at = number * num_tokens, number // sharing * sharing * num_tokens
    q_start, q_end = ((edge + at).ravel() for edge in (mask.q_start, mask.q_end))
    k_start, k_end = ((edge + keys_at).ravel() for edge in (mask.k_start, mask.k_end))
    low, high = (
        np.where(np.abs(edge) < UNBOUNDED, edge + keys_at - at, edge).ravel() for edge in (mask.low, mask.high)
    )
    return Slices(q_start, q_end, k_start, k_end, low, high)


@lru_cache(maxsize=4)
def _built(name: str, documents: tuple[int, ...], options: Options) -> Slices:
    lengths = np.asarray(documents, np.int64)
    ends = np.cumsum(lengths)
    defaults = {key: option.default for key, option in MASK_NAMES[name].options.items()}
    return SHAPES[name](ends - lengths, ends, **(defaults | dict(options)))


def _rows(
    q_start: ArrayLike,
    q_end: ArrayLike,
    k_start: ArrayLike,
    k_end: ArrayLike,
    low: ArrayLike = -UNBOUNDED,
    high: ArrayLike = UNBOUNDED,
) -> Ints:
    """Columns of a slice for every entry of the arguments, ``int64[6, n]``."""
    columns = np.broadcast_arrays(*map(np.atleast_1d, (q_start, q_end, k_start, k_end, low, high)))
    return np.stack([np.asarray(column, np.int64) for column in columns])


def _slices(*parts: Ints) -> Slices:
    """Slices of all rows that have queries and keys, ordered by query and key."""
    table = np.concatenate(parts, axis=1)
    table = table[:, (table[0] < table[1]) & (table[2] < table[3])]
    table = table[:, np.lexsort((table[2], table[0]))]
    return Slices(*(column.copy() for column in table))


def _full(start: Ints, end: Ints) -> Slices:
    del start
    return _slices(_rows(0, end[-1], 0, end[-1]))


def _causal(start: Ints, end: Ints) -> Slices:
    del start
    return _slices(_rows(0, end[-1], 0, end[-1], high=0))


def _full_document(start: Ints, end: Ints) -> Slices:
    return _slices(_rows(start, end, start, end))


def _causal_document(start: Ints, end: Ints) -> Slices:
    return _slices(_rows(start, end, start, end, high=0))


def _full_sliding_window(start: Ints, end: Ints, window: int) -> Slices:
    """LongCA-bench's kernels run (1024, 1024), though its FLOP of this mask are counted for (1024, 0)."""
    return _slices(_rows(start, end, start, end, -window, window))


def _causal_sliding_window(start: Ints, end: Ints, window: int) -> Slices:
    return _slices(_rows(start, end, start, end, -window, 0))


def _lambda(start: Ints, end: Ints, sink: int, window: int) -> Slices:
    """The ranges of DCP's code overlap near the start of a document; here the first keys are those left over."""
    latest = _rows(start, end, start, end, 1 - window, 0)
    first = _rows(np.minimum(start + window, end), end, start, np.minimum(start + sink, end), high=-window)
    return _slices(first, latest)


def _causal_blockwise(start: Ints, end: Ints, block: int, local_blocks: int) -> Slices:
    """Query i of block b sees keys ``[0, block)`` and ``[max(block, i - local_blocks * block), i]``."""
    first_end, last = np.minimum(start + block, end), start + (end - start - 1) // block * block
    sees_all = np.where(last > start, last, end)
    return _slices(
        _rows(start, first_end, start, first_end, high=0),
        _rows(first_end, last, start, first_end),
        _rows(first_end, last, first_end, last, -local_blocks * block, 0),
        _rows(sees_all, end, start, end, high=0),
    )


def _causal_blockwise_document(start: Ints, end: Ints) -> Slices:
    """Every document causal on itself; the key range of the last one is everything."""
    return _slices(_rows(start, end, np.append(start[:-1], 0), end, high=0))


def _shared_question(start: Ints, end: Ints, question_share: float, answers: int) -> Slices:
    """The question and the first answer are one causal slice. Differs: answers have one token at least."""
    question = start + (question_share * (end - start)).astype(np.int64)
    length = np.maximum((end - question) // answers, 1)
    first = np.minimum(question[:, None] + length[:, None] * np.arange(answers), end[:, None])
    last = np.append(first[:, 1:], end[:, None], axis=1)
    first[:, 0] = start
    later = first[:, 1:].ravel(), last[:, 1:].ravel()
    return _slices(
        _rows(first.ravel(), last.ravel(), first.ravel(), last.ravel(), high=0),
        _rows(*later, start.repeat(answers - 1), question.repeat(answers - 1)),
    )


def _shared_question_document(start: Ints, end: Ints) -> Slices:
    """Documents 0 and 1 are one causal slice; every later one is causal on itself and sees all of document 0."""
    head = end[min(1, len(end) - 1)]
    return _slices(
        _rows(0, head, 0, head, high=0),
        _rows(start[2:], end[2:], start[2:], end[2:], high=0),
        _rows(head, end[-1], 0, end[0]),
    )


def _prefix_lm_causal(start: Ints, end: Ints, prefix: int | None, seed: int) -> Slices:
    """A drawn prefix has 1 to all tokens."""
    return _prefix_lm_document(start[:1], end[-1:], prefix, seed)


def _prefix_lm_document(start: Ints, end: Ints, prefix: int | None, seed: int) -> Slices:
    """A drawn prefix has 1 token to all of document 0; documents that are no longer than it are full."""
    drawn = np.random.default_rng(seed).integers(1, end[0], endpoint=True) if prefix is None else prefix
    cut = np.minimum(start + drawn, end)
    return _slices(_rows(start, cut, start, cut), _rows(cut, end, start, end, high=0))


def _block_causal_document(start: Ints, end: Ints, block: int) -> Slices:
    """Differs: blocks at the end of a document may be short; LongCA-bench's documents have 1 to 8 whole blocks."""
    count = -(-(end - start) // block)
    number = np.arange(count.sum()) - (np.cumsum(count) - count).repeat(count)
    first = start.repeat(count) + number * block
    reach = np.minimum(first + block, end.repeat(count))
    return _slices(_rows(first, reach, start.repeat(count), reach))


def _global_sliding(start: Ints, end: Ints, window: int | None, ends: str, seed: int) -> Slices:
    """A drawn window has 1 to S / 3 - 1 tokens."""
    del start
    total = int(end[-1])
    drawn = np.random.default_rng(seed).integers(1, max(2, total // 3)) if window is None else window
    w = min(int(drawn), total)
    return _slices(
        _rows(0, total, 0, w, high=w - total if ends == "causal" else UNBOUNDED),
        _rows(0, w, w, total, high=total - w if ends == "causal" else UNBOUNDED),
        _rows(w, total, w, total, -w, w),
    )


def _block_sparse(start: Ints, end: Ints, block: int, density: float, seed: int) -> Slices:
    """Blocks at the end may be short."""
    del start
    edges = np.append(np.arange(0, end[-1], block), end[-1])
    return _random_blocks(edges, density, np.random.default_rng(seed))


def _variable_block_sparse(
    start: Ints, end: Ints, block: int, min_block: int, align: int, density: float, seed: int
) -> Slices:
    """A random partition of all tokens, the same for queries and keys, into blocks of ``min_block`` or more."""
    del start
    total, rng = int(end[-1]), np.random.default_rng(seed)
    least = -(-min_block // align) * align
    if block < least:
        wanted = f"min_block = {min_block}" + (f" in multiples of align = {align}" if align > 1 else "")
        raise ValueError(f"variable_block_sparse: block: expected at least {wanted}, got {block}")
    count = max(1, total // block)
    spare = max(0, total - count * least) // align
    cuts = np.sort(rng.integers(0, spare, count - 1, endpoint=True)) * align + np.arange(1, count) * least
    return _random_blocks(np.concatenate(([0], cuts, [total])), density, rng)


def _random_blocks(edges: Ints, density: float, rng: np.random.Generator) -> Slices:
    """Every query block sees the key blocks of the highest random scores, one at least; neighbours are one slice."""
    count = len(edges) - 1
    kept = max(1, int(density * count))
    parts, step = [], max(1, SCORES // count)
    for first in range(0, count, step):
        scores = rng.random((min(step, count - first), count))
        chosen = np.argpartition(scores, count - kept, axis=1)[:, count - kept :]
        parts.append(_runs(chosen, first, edges))
    return _slices(*parts)


def _runs(chosen: NDArray[np.intp], first: int, edges: Ints) -> Ints:
    """Slices of chosen key blocks ``[query blocks, kept]``, of query block ``first`` and later ones."""
    padded = np.zeros((len(chosen), len(edges) + 1), np.int8)
    np.put_along_axis(padded, chosen + 1, 1, axis=1)
    turns = np.diff(padded, axis=1)
    query, opens = np.nonzero(turns > 0)
    _, closes = np.nonzero(turns < 0)
    return _rows(edges[query + first], edges[query + first + 1], edges[opens], edges[closes])


SHAPES: Final[dict[str, Build]] = {
    "full": _full,
    "causal": _causal,
    "full_document": _full_document,
    "causal_document": _causal_document,
    "full_sliding_window": _full_sliding_window,
    "causal_sliding_window": _causal_sliding_window,
    "shared_question": _shared_question,
    "shared_question_document": _shared_question_document,
    "causal_blockwise": _causal_blockwise,
    "causal_blockwise_document": _causal_blockwise_document,
    "prefix_lm_causal": _prefix_lm_causal,
    "prefix_lm_document": _prefix_lm_document,
    "block_causal_document": _block_causal_document,
    "lambda": _lambda,
    "global_sliding": _global_sliding,
    "block_sparse": _block_sparse,
    "variable_block_sparse": _variable_block_sparse,
}
"""By name; arguments are starts and ends of the documents, ``int64[D]``, and the options."""
