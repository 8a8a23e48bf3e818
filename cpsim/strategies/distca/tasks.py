"""Tasks of core attention, and what sending them to servers moves: what DistCA's planners and a simulator exchange.

A nano-batch's tokens lie on n servers, their *homes*; a *task* is a range of queries of one document with its whole
causal prefix, computed by any *server*. Planners turn documents into ``Tasks``; ``traffic`` and ``dispatch`` say what
the four all-to-alls of a layer then carry.

Reference: DistCA (arXiv 2510.18121), sections 3 and 4; hao-ai-lab/DistCA at 2afd219, runtime/compute_metadata.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpsim.masks.slices import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Ranges of queries with their whole causal prefix, ``[N]`` each, ordered by server, document and first query."""

    home: Ints
    """Rank that the tokens belong to."""
    server: Ints
    """Rank that computes them."""
    document: Ints
    """Index into the documents of the nano-batch."""
    first: Ints
    """First query, counted from the beginning of its document."""
    tokens: Ints
    """Queries, at least one."""

    def __len__(self) -> int:
        return len(self.home)

    @property
    def kv(self) -> Ints:
        """Keys that the last query sees, ``[N]``."""
        return self.first + self.tokens

    @property
    def pairs(self) -> Ints:
        """Unmasked (query, key) pairs, ``[N]``."""
        return causal_pairs(self.first, self.tokens)

    def work(self, num_servers: int) -> Ints:
        """Pairs of every server, ``[n]``."""
        return np.bincount(self.server, self.pairs, num_servers).astype(np.int64)


def make_tasks(home: Ints, server: Ints, document: Ints, first: Ints, tokens: Ints) -> Tasks:
    """Tasks in order; those without queries are left out."""
    there = np.flatnonzero(tokens > 0)
    order = there[np.lexsort((first[there], document[there], server[there]))]
    return Tasks(home[order], server[order], document[order], first[order], tokens[order])


def causal_pairs(first: Ints, tokens: Ints) -> Ints:
    """Unmasked pairs of ``tokens`` queries that begin at ``first`` of their document."""
    return np.asarray(tokens * first + tokens * (tokens + 1) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """Bytes of a token on one server: of its heads, where tensor parallelism divides them."""

    q: int
    """Q, and as many of O, dO and dQ."""
    kv: int
    """K and V together, and as many of dK and dV."""
    lse: int
    """Log-sum-exp, fp32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dispatch:
    """Bytes of the all-to-alls of one nano-batch and layer from every rank to every rank, ``[n, n]``; what a rank keeps
    for itself is on the diagonal."""

    qkv: Ints
    """Forward, to servers: Q of tasks, K and V of their prefixes."""
    out: Ints
    """Forward, home: O and log-sum-exp."""
    bundle: Ints
    """Backward, to servers: dO, O, log-sum-exp and Q of tasks, K and V again."""
    grads: Ints
    """Backward, home: dQ, and dK and dV summed on the server."""

    def kept(self) -> Ints:
        """Most bytes that any rank keeps for itself in each exchange, ``[4]``."""
        return np.array([np.diag(m).max() for m in (self.qkv, self.out, self.bundle, self.grads)])

    def fullest(self) -> int:
        """Most bytes that any rank sends or receives in an exchange, with what it keeps: what a buffer must hold."""
        return max(
            int(m.sum(axis=axis).max()) for m in (self.qkv, self.out, self.bundle, self.grads) for axis in (0, 1)
        )

    def busiest(self) -> Ints:
        """Most bytes that any rank sends to or receives from others in each exchange, ``[4]``."""
        away = [m - np.diag(np.diag(m)) for m in (self.qkv, self.out, self.bundle, self.grads)]
        return np.array([max(m.sum(axis=0).max(), m.sum(axis=1).max()) for m in away])


def traffic(tasks: Tasks, num_servers: int, *, each: bool = False) -> tuple[Ints, Ints]:
    """Queries, and keys with their values, that every home gives every server [tokens], ``[n, n]`` each.

    A key goes to a server once, if any of its tasks sees it; or once for each task that does.

    Args:
        tasks: of whole documents, every token in one task.
        num_servers: n.
        each: whether each task gets keys of its own, as until 5d51eca of hao-ai-lab/DistCA (25 September 2025).
    """
    queries, keys = np.zeros((2, num_servers, num_servers), np.int64)
    np.add.at(queries, (tasks.home, tasks.server), tasks.tokens)
    if each:
        alone, documents = _by_document(tasks)
        np.add.at(keys, (tasks.home[alone], tasks.server[alone]), tasks.tokens[alone])
        for own in documents:
            before = np.zeros((len(own), num_servers), np.int64)  # tokens of every home up to a task
            before[np.arange(len(own)), tasks.home[own]] = tasks.tokens[own]
            np.add.at(keys.T, tasks.server[own], before.cumsum(axis=0))
        return queries, keys
    user, of_user = np.unique(tasks.document * num_servers + tasks.server, return_inverse=True)
    reach = np.zeros(len(user), np.int64)
    np.maximum.at(reach, of_user, tasks.kv)
    document, server = np.divmod(user, num_servers)
    order = np.argsort(tasks.document, kind="stable")
    begin, end = (np.searchsorted(tasks.document[order], document, side) for side in ("left", "right"))
    count = end - begin
    part = order[np.repeat(begin - np.cumsum(count) + count, count) + np.arange(count.sum())]
    seen = np.clip(np.repeat(reach, count) - tasks.first[part], 0, tasks.tokens[part])
    np.add.at(keys, (tasks.home[part], np.repeat(server, count)), seen)
    return queries, keys


def copies(tasks: Tasks, num_servers: int, *, each: bool = False) -> Ints:
    """Most copies of a key that any home gives away, ``[n]``: gradients of all its keys come back in as many buffers.

    Args:
        tasks, num_servers, each: as of ``traffic``.
    """
    alone, documents = _by_document(tasks)
    most = np.zeros(num_servers, np.int64)
    most[tasks.home[alone]] = 1
    for own in documents:
        server = tasks.server[own]
        left = range(len(own), 0, -1) if each else [len(set(server[i:].tolist())) for i in range(len(own))]
        np.maximum.at(most, tasks.home[own], np.fromiter(left, np.int64))
    return most


def _by_document(tasks: Tasks) -> tuple[Ints, list[Ints]]:
    """Tasks that are a whole document, and those of every other document, in its order."""
    order = np.lexsort((tasks.first, tasks.document))
    count = np.bincount(tasks.document)
    parts = order[count[tasks.document[order]] > 1]
    return order[count[tasks.document[order]] == 1], (
        np.split(parts, np.flatnonzero(np.diff(tasks.document[parts])) + 1) if len(parts) else []
    )


def dispatch(tasks: Tasks, num_servers: int, sizes: TokenBytes, *, each: bool = False) -> Dispatch:
    """Bytes of a nano-batch's all-to-alls; rows of queries are padded to 16 bytes. ``each`` is as of ``traffic``."""
    queries, keys = traffic(tasks, num_servers, each=each)
    q, out, bundle = (-(-row // 16) * 16 for row in (sizes.q, sizes.q + sizes.lse, 3 * sizes.q + sizes.lse))
    return Dispatch(
        qkv=queries * q + keys * sizes.kv,
        out=queries.T * out,
        bundle=queries * bundle + keys * sizes.kv,
        grads=(queries * q + keys * sizes.kv).T,
    )
