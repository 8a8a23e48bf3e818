"""Items, what DistCA's schedulers move: a range of queries, or one from the head and one from the tail of a document.

Tokens lie on their homes in order, and a document that several homes share is cut from both ends: every home has as
much of the head as of the tail. One query of the head and one of the tail, counted from the inner ends, see as many
keys together as any such pair, so that an item's work is in proportion to its queries.

An item is a row ``[7]``: home, server, document, first and number of the head's queries, first and number of the
tail's. A document that lies on one home is all head.

Reference: hao-ai-lab/DistCA at 2afd219, planner/planner.py (``batch_to_items_general``, ``Item``). Differs: lengths may
be odd, a document may begin at an offset.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cpsim.masks.slices import Ints
from cpsim.runtime.compiled import compiled
from cpsim.strategies.distca.tasks import Tasks, make_tasks

HOME, SERVER, DOCUMENT, HEAD, HEADS, TAIL, TAILS = range(7)
"""Columns of an item."""
NUM_COLUMNS: Final = 7


def lay_out(documents: Ints, num_servers: int, offset: Ints | int = 0) -> Ints:
    """Items ``[N, 7]`` of documents that lie one after the other on servers of equally many tokens, each at home.

    Args:
        documents: lengths [tokens], ``[D]``; server s gets tokens ``s T // n`` to ``(s + 1) T // n`` of all T.
        num_servers: n.
        offset: tokens of every document that come before, in another nano-batch.
    """
    ends = np.cumsum(documents)
    budgets = np.arange(num_servers + 1) * ends[-1] // num_servers
    edges = np.union1d(budgets, np.append(0, ends))
    tokens = np.diff(edges)
    document = np.searchsorted(ends, edges[:-1], side="right")
    home = np.searchsorted(budgets, edges[:-1], side="right") - 1
    opens = np.concatenate(([0], np.flatnonzero(np.diff(document)) + 1))
    first_of = opens[document]
    whole = np.bincount(document)[document] == 1
    head = np.where(whole, tokens, tokens // 2)
    tail = tokens - head
    before = [np.cumsum(part) - part for part in (head, tail)]
    heads, tails = (total - total[first_of] for total in before)
    items = np.empty((len(tokens), NUM_COLUMNS), np.int64)
    at = np.broadcast_to(np.asarray(offset, np.int64), documents.shape)[document]
    length = documents[document]
    items[:, HOME], items[:, SERVER], items[:, DOCUMENT] = home, home, document
    items[:, HEAD], items[:, HEADS] = at + heads, head
    items[:, TAIL], items[:, TAILS] = at + length - tails - tail, tail
    return items


def tasks_of(items: Ints) -> Tasks:
    """Heads and tails of items as tasks."""
    home, server, document = (np.repeat(items[:, column], 2) for column in (HOME, SERVER, DOCUMENT))
    return make_tasks(home, server, document, items[:, [HEAD, TAIL]].ravel(), items[:, [HEADS, TAILS]].ravel())


@compiled()
def pairs_of(item: Any) -> Any:
    """Unmasked pairs of an item."""
    heads, tails = item[HEADS], item[TAILS]
    return heads * item[HEAD] + heads * (heads + 1) // 2 + tails * item[TAIL] + tails * (tails + 1) // 2


@compiled()
def most_to_split(item: Any) -> Any:
    """Queries that the head and the tail can each give away."""
    if item[TAILS] == 0:
        return item[HEADS] // 2
    return min(item[HEADS], item[TAILS])


@compiled()
def pairs_of_two(item: Any) -> Any:
    """Unmasked pairs of one query of the head and one of the tail, at their inner ends."""
    if item[TAILS] == 0:
        return 2 * (item[HEAD] + (item[HEADS] + 1) // 2) + 1
    return item[HEAD] + item[HEADS] + item[TAIL] + 1


@compiled()
def split(items: Any, count: Any, chosen: Any, queries: Any, server: Any) -> Any:
    """Give some queries of the inner ends of an item's head and tail to a server, as a new item at ``count``; returns
    the items, with more room where it was needed."""
    if count == len(items):
        items = np.concatenate((items, np.empty_like(items)))
    item, new = items[chosen], items[count]
    if item[TAILS] == 0:
        item[TAILS] = item[HEADS] // 2
        item[HEADS] -= item[TAILS]
        item[TAIL] = item[HEAD] + item[HEADS]
    item[HEADS] -= queries
    new[HOME], new[SERVER], new[DOCUMENT] = item[HOME], server, item[DOCUMENT]
    new[HEAD], new[HEADS] = item[HEAD] + item[HEADS], queries
    new[TAIL], new[TAILS] = item[TAIL], queries
    item[TAIL] += queries
    item[TAILS] -= queries
    return items
