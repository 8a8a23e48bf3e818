"""An indexed binary heap of ops, smallest key first, for compiled code.

``heap[0]`` counts the entries, ``heap[1:]`` are ops and ``key[1:]`` their keys, which are not negative, side by side;
``place[op]`` is an op's position, 0 when it is not in the heap.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cpsim.runtime.compiled import inlined

ONE: Final = np.uint64(1)
"""Positions are unsigned where they follow from each other: compiled code first asks whether signed ones count from the
end."""


@inlined()
def _sift_up(heap, place, key, at, op, value):  # type: ignore[no-untyped-def]
    while at > 1 and value < key[at >> 1]:
        heap[at], key[at] = heap[at >> 1], key[at >> 1]
        place[heap[at]] = at
        at >>= 1
    heap[at], key[at], place[op] = op, value, at


@inlined()
def _sift_down(heap, place, key, at, op, value):  # type: ignore[no-untyped-def]
    count = heap[0]
    while 2 * at <= count:
        child = 2 * at
        if child < count and key[child + 1] < key[child]:
            child += 1
        if key[child] >= value:
            break
        heap[at], key[at] = heap[child], key[child]
        place[heap[at]] = at
        at = child
    heap[at], key[at], place[op] = op, value, at


@inlined()
def set_key(heap, place, key, op, value):  # type: ignore[no-untyped-def]
    """Insert an op, or move it to its new key."""
    at = place[op]
    if at == 0:
        heap[0] += 1
        _sift_up(heap, place, key, heap[0], op, value)
    elif value < key[at]:
        _sift_up(heap, place, key, at, op, value)
    else:
        _sift_down(heap, place, key, at, op, value)


@inlined()
def pop(heap, place, key):  # type: ignore[no-untyped-def]
    """Remove and return the op with the smallest key.

    The last op takes its place: those on the way of smaller children move up as far as their keys are smaller. Nearly
    all of them do, and which child is smaller cannot be guessed, so the way is found first, without a branch, and by
    the bits of keys, whose order is the same.
    """
    bits = key.view(np.int64)
    first, last = heap[1], np.uint64(heap[0])
    op, value = heap[last], bits[last]
    place[first], heap[0], key[last] = 0, heap[0] - 1, np.inf
    end = ONE
    while end << ONE < last:
        end = (end << ONE) + np.uint64(bits[(end << ONE) + ONE] < bits[end << ONE])
    while end > ONE and bits[end] >= value:
        end >>= ONE
    depth = np.uint64(0)
    while end >> depth > ONE:
        depth += ONE
    while depth > 0:
        depth -= ONE
        at = end >> depth
        heap[at >> ONE], bits[at >> ONE] = heap[at], bits[at]
        place[heap[at]] = at >> ONE
    if last > ONE:
        heap[end], bits[end], place[op] = op, value, end
    return first
