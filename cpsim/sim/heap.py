"""An indexed binary heap of ops, smallest key first, for compiled code.

``heap[0]`` counts the entries and ``heap[1:]`` are ops; ``place[op]`` is an op's position, 0 when it is not in the
heap; ``key[op]`` is its key.
"""

from __future__ import annotations

from numba import njit


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _sift_up(heap, place, key, at):  # type: ignore[no-untyped-def]
    op = heap[at]
    while at > 1 and key[op] < key[heap[at >> 1]]:
        heap[at] = heap[at >> 1]
        place[heap[at]] = at
        at >>= 1
    heap[at] = op
    place[op] = at


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _sift_down(heap, place, key, at):  # type: ignore[no-untyped-def]
    op, count = heap[at], heap[0]
    while 2 * at <= count:
        child = 2 * at
        if child < count and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[child]] >= key[op]:
            break
        heap[at] = heap[child]
        place[heap[at]] = at
        at = child
    heap[at] = op
    place[op] = at


@njit(cache=True, nogil=True, error_model="numpy")
def set_key(heap, place, key, op, value):  # type: ignore[no-untyped-def]
    """Insert an op, or move it to its new key."""
    if place[op] == 0:
        heap[0] += 1
        heap[heap[0]] = op
        place[op] = heap[0]
        key[op] = value
        _sift_up(heap, place, key, place[op])
        return
    earlier = value < key[op]
    key[op] = value
    if earlier:
        _sift_up(heap, place, key, place[op])
    else:
        _sift_down(heap, place, key, place[op])


@njit(cache=True, nogil=True, error_model="numpy")
def pop(heap, place, key):  # type: ignore[no-untyped-def]
    """Remove and return the op with the smallest key."""
    op = heap[1]
    place[op] = 0
    last = heap[heap[0]]
    heap[0] -= 1
    if heap[0] > 0:
        heap[1] = last
        _sift_down(heap, place, key, 1)
    return op
