"""An indexed binary heap of ops, smallest key first, for compiled code.

``heap[0]`` counts the entries, ``heap[1:]`` are ops and ``key[1:]`` their keys, side by side; ``place[op]`` is an op's
position, 0 when it is not in the heap.
"""

from __future__ import annotations

from cpsim.compiled import bare, inlined


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


@bare()
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


@bare()
def pop(heap, place, key):  # type: ignore[no-untyped-def]
    """Remove and return the op with the smallest key."""
    op, last = heap[1], heap[0]
    place[op] = 0
    heap[0] = last - 1
    if last > 1:
        _sift_down(heap, place, key, 1, heap[last], key[last])
    return op
