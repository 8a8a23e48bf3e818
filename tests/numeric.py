"""A tiny interpreter of schedules in float64: blocks are arrays, ops do what their kind says."""

from functools import cache

import numpy as np

from cpsim.masks.slices import dense_mask
from cpsim.schedule.schedule import READ, UPDATE, Kind


@cache
def tensors(workload, seed=0):
    """Random q, kv and dout of a workload and, computed densely, out (with log-sum-exp last), dq and dkv.

    Shapes ``[tokens, heads, width]``: width d of keys and v of values, for ``out`` v + 1, for ``kv`` and ``dkv`` d + v;
    with sinks ``sink`` and ``dsink``, one row for all tokens.
    """
    rng, w = np.random.default_rng(seed), workload
    q, dout = (rng.normal(size=(w.num_tokens, w.num_heads, width)) for width in (w.head_dim, w.values))
    kv = rng.normal(size=(w.num_tokens, w.num_kv_heads, w.head_dim + w.values))
    allowed = dense_mask(w.slices(), w.num_tokens)
    sink = rng.normal(size=w.num_heads) if w.sinks else np.full(w.num_heads, -np.inf)
    out = attend(q, kv, allowed, sink)
    dq, dkv = attend_backward(q, kv, out, dout, allowed)
    found = {"q": q, "kv": kv, "dout": dout, "out": out, "o": out[..., :-1], "dq": dq, "dkv": dkv}
    if not w.sinks:
        return found
    weight = np.exp(sink - out[..., -1])
    dsink = -(weight * (dout * out[..., :-1]).sum(axis=2)).sum(axis=0)
    return found | {"sink": sink[None, :, None], "dsink": dsink[None, :, None]}


def _scores(q, kv, allowed):
    """Of all query heads, heads first: scores, and the keys and values that every one sees."""
    d, group = q.shape[2], q.shape[1] // kv.shape[1]
    k, v = (np.repeat(part.swapaxes(0, 1), group, axis=0) for part in (kv[..., :d], kv[..., d:]))
    scores = q.swapaxes(0, 1) @ k.swapaxes(1, 2) / np.sqrt(d)
    return np.where(allowed, scores, -np.inf), k, v


def attend(q, kv, allowed, sink=-np.inf):
    """Output and log-sum-exp ``[queries, heads, d + 1]``; nothing and -inf where a query sees no key.

    ``sink`` is a logit of every head that joins the denominators.
    """
    scores, _, v = _scores(q, kv, allowed)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(axis=2) + np.exp(np.reshape(sink, (-1, 1))))
    weights = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None])
    return np.concatenate([weights @ v, lse[..., None]], axis=2).swapaxes(0, 1)


def attend_backward(q, kv, out, dout, allowed):
    """dQ and dKV of one tile, from the final output and log-sum-exp."""
    scores, k, v = _scores(q, kv, allowed)
    q, out, dout = (x.swapaxes(0, 1) for x in (q, out, dout))
    lse, delta = out[..., -1:], (dout * out[..., :-1]).sum(axis=2, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(lse), lse, 0))
    ds = weights * (dout @ v.swapaxes(1, 2) - delta) / np.sqrt(q.shape[2])
    dkv = np.concatenate([ds.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ dout], axis=2)
    dkv = dkv.reshape(kv.shape[1], len(dkv) // kv.shape[1], *dkv.shape[1:]).sum(axis=1)
    return (ds @ k).swapaxes(0, 1), dkv.swapaxes(0, 1)


def merge(one, other):
    """Log-sum-exp merge of two partial outputs."""
    lse = np.logaddexp(one[..., -1], other[..., -1])
    safe = np.where(np.isfinite(lse), lse, 0)
    total = sum(p[..., :-1] * np.exp(p[..., -1] - safe)[..., None] for p in (one, other))
    return np.concatenate([total, lse[..., None]], axis=2)


def by_group(array, head_groups):
    """Rows of one group of heads after the other, as ``Workload.by_group`` counts tokens; fewer heads of
    keys than groups are repeated."""
    array = np.repeat(array, max(1, head_groups // array.shape[1]), axis=1)
    tokens, heads, width = array.shape
    apart = array.reshape(tokens, head_groups, heads // head_groups, width)
    return np.ascontiguousarray(apart.swapaxes(0, 1)).reshape(head_groups * tokens, heads // head_groups, width)


def any_order(schedule, seed):
    """Op indices in a random order that dependencies and lanes allow."""
    rng, s = np.random.default_rng(seed), schedule
    waits = [set(s.dep[s.dep_start[i] : s.dep_start[i + 1]].tolist()) for i in range(len(s))]
    last = {}
    for i in range(len(s)):
        at = slice(s.lane_start[i], s.lane_start[i + 1])
        for lane in zip(s.lane_rank[at].tolist(), s.lane_stream[at].tolist(), strict=True):
            if lane in last:
                waits[i].add(last[lane])
            last[lane] = i
    done, order, ready = set(), [], [i for i, w in enumerate(waits) if not w]
    blocks = {}
    for i, w in enumerate(waits):
        for d in w:
            blocks.setdefault(d, []).append(i)
    while ready:
        # mostly the newest: runs some ranks far ahead of others
        i = ready.pop(int(rng.integers(len(ready))) if rng.random() < 0.3 else -1)
        done.add(i)
        order.append(i)
        for j in blocks.get(i, ()):
            waits[j].discard(i)
            if not waits[j]:
                ready.append(j)
    assert len(order) == len(schedule)
    return order


class Interpreter:
    """Buffers hold ``{tensor: (tokens, first head, array [tokens, heads, width])}``; tokens in the schedule's order."""

    def __init__(self, schedule, workload, given):
        workload = workload.by_group(schedule.head_groups)
        self.num_tokens = workload.num_tokens
        self.s, self.mask = schedule, workload.slices(schedule.stride)
        self.seeing = dense_mask(self.mask, workload.num_tokens).any(axis=1)
        """Queries that see a key; outputs of the others start as zeros and need not be written."""
        self.block = cache(self.block)
        self.memory = [{} for _ in schedule.buffer_rank]
        self.outputs = set(schedule.outputs[:, 0].tolist())
        self.widths = {name: array.shape[2] for name, array in given.items()}
        for buffer, block in schedule.outputs.tolist():
            tensor, tokens, heads = self.block(block)
            if tensor == "dsink":
                continue
            empty = np.full((len(tokens), heads.stop - heads.start, self.widths[tensor]), np.nan)
            blind = ~self.seeing[tokens] & (not tensor.endswith("kv"))
            empty[blind] = 0
            empty[blind, :, -1] = -np.inf if tensor == "out" else 0
            self.memory[buffer][tensor] = tokens, heads.start, empty
        self.sinks = given["sink"].ravel() if "sink" in given else None
        for buffer, block in schedule.inputs.tolist():
            tensor, tokens, heads = self.block(block)
            self.memory[buffer][tensor] = tokens, heads.start, given[tensor][schedule.tokens(tokens), heads]

    def block(self, block):
        ranges = self.s.sets.of(int(self.s.block_set[block])).tolist()
        tokens = np.concatenate([np.arange(a, b) for a, b in ranges] or [np.zeros(0, np.int64)])
        first, count = self.s.block_heads[block].tolist()
        return self.s.block_tensors[self.s.block_tensor[block]], tokens, slice(first, first + count)

    def run(self, order):
        for i in order:
            self.step(i)
        return [
            (self.s.block_text(block), *self.block(block), self.result(buffer, block))
            for buffer, block in self.s.outputs.tolist()
        ]

    def result(self, buffer, block):
        return self.memory[buffer]["dsink"] if self.block(block)[0] == "dsink" else self.load(buffer, block)

    def load(self, buffer, block):
        tensor, tokens, heads = self.block(block)
        if not len(tokens):
            return self.empty((tensor, tokens, heads), 0.0)
        held, first, array = self.memory[buffer][tensor]
        rows = np.searchsorted(held, tokens)
        assert np.array_equal(held[rows], tokens)
        return array[rows][:, heads.start - first : heads.stop - first]

    def store(self, buffer, block, array):
        tensor, tokens, heads = self.block(block)
        held, first, target = self.memory[buffer][tensor]
        target[np.searchsorted(held, tokens), heads.start - first : heads.stop - first] = array

    def sums_of_sinks(self, i):
        """Whether an op makes sums of sinks' gradients, which have heads and no tokens; it is done then."""
        s, at = self.s, slice(self.s.access_start[i], self.s.access_start[i + 1])
        names = [s.block_tensors[t] for t in s.block_tensor[s.access_block[at]]]
        if "dsink" not in names:
            return False
        buffers, modes = s.access_buffer[at].tolist(), s.access_mode[at].tolist()
        of = [
            (name, b, k)
            for name, b, k, m in zip(names, buffers, s.access_block[at].tolist(), modes, strict=True)
            if m == READ
        ]
        if s.kind[i] == Kind.ALL_REDUCE:
            made = sum(self.memory[b]["dsink"] for _, b, _ in of)
        else:
            made = self.sink_gradient([(*self.block(k), self.load(b, k)) for _, b, k in of])
        for name, b, mode in zip(names, buffers, modes, strict=True):
            if name == "dsink" and mode != READ:
                self.memory[b]["dsink"] = made + (self.memory[b]["dsink"] if mode == UPDATE else 0)
        return True

    def step(self, i):
        s = self.s
        if self.sums_of_sinks(i):
            return
        at = range(s.access_start[i], s.access_start[i + 1])
        accesses = [(int(s.access_buffer[a]), int(s.access_block[a]), int(s.access_mode[a])) for a in at]
        reads = [(*self.block(k), self.load(b, k)) for b, k, mode in accesses if mode == READ]
        targets = [(b, k, mode) for b, k, mode in accesses if mode != READ]
        old = [self.load(b, k) if mode == UPDATE else None for b, k, mode in targets]
        made = self.compute(i, reads, targets, old)
        for b in {b for b, _, mode in targets if mode != UPDATE} - self.outputs:
            self.memory[b] = {}
        for (b, k, mode), array in zip(targets, made, strict=True):
            if mode == UPDATE or b in self.outputs:
                self.store(b, k, array)
            else:
                tensor, tokens, heads = self.block(k)
                self.memory[b][tensor] = tokens, heads.start, array.copy()

    def sink_of(self, tokens, heads):
        """Which sinks belong to rows of a block, ``[tokens, heads]``: with groups of heads, those of every row's."""
        group = tokens // (self.num_tokens // self.s.head_groups)
        return group[:, None] * (len(self.sinks) // self.s.head_groups) + np.arange(heads.start, heads.stop)

    def joined_by_sinks(self, target, out):
        """An output with its heads' sinks in the denominators."""
        _, tokens, heads = target
        none = np.zeros_like(out)
        none[..., -1] = self.sinks[self.sink_of(tokens, heads)]
        return merge(out, none)

    def sink_gradient(self, reads):
        """What some outputs and their gradients add to the gradient of every sink."""
        total = np.zeros_like(self.sinks)
        if not reads:
            return total
        (_, tokens, heads, out), (_, others, same, dout) = sorted(reads, key=lambda read: read[0] != "out")
        assert np.array_equal(tokens, others)
        assert heads == same
        which = self.sink_of(tokens, heads)
        np.add.at(total, which, -np.exp(self.sinks[which] - out[..., -1]) * (dout * out[..., :-1]).sum(axis=2))
        return total

    def compute(self, i, reads, targets, old):
        names = [self.block(k)[0] for _, k, _ in targets]
        if self.sinks is not None and names == ["out"] and self.s.kind[i] == Kind.ELEMENTWISE:
            return [self.joined_by_sinks(self.block(targets[0][1]), old[0])]
        match Kind(int(self.s.kind[i])):
            case Kind.ATTENTION | Kind.ATTENTION_BACKWARD:
                return self.attention(i, reads, targets)
            case Kind.BARRIER | Kind.ELEMENTWISE | Kind.SCATTER | Kind.GEMM if not targets:
                return []
            case Kind.MERGE:
                return [self.merged(self.block(k), reads, o) for (_, k, _), o in zip(targets, old, strict=True)]
            case Kind.ACCUMULATE | Kind.REDUCE_SCATTER | Kind.ALL_REDUCE:
                return [self.summed(self.block(k), reads, o) for (_, k, _), o in zip(targets, old, strict=True)]
            case Kind.COPY | Kind.TRANSFER | Kind.ALL_GATHER | Kind.ALL_TO_ALL | Kind.ELEMENTWISE | Kind.SCATTER:
                return [self.moved(self.block(k), reads) for _, k, _ in targets]
            case other:
                raise NotImplementedError(other)

    def attention(self, i, reads, targets):
        parts = {}
        for tensor, tokens, heads, array in reads:
            parts.setdefault(tensor, []).append((tokens, array[:, self.heads(i, tensor, heads)]))
        given = {tensor: joined(places) for tensor, places in parts.items()}
        queries, keys = given["q"][0], given["kv"][0]
        allowed = np.zeros((len(queries), len(keys)), bool)
        tile = int(self.s.tile[i])
        for row, q0, q1, k0, k1 in self.s.tiles.rows[self.s.tiles.start[tile] : self.s.tiles.start[tile + 1]].tolist():
            offset = keys[None] - queries[:, None]
            inside = ((queries >= q0) & (queries < q1))[:, None] & ((keys >= k0) & (keys < k1))[None]
            allowed |= inside & (offset >= self.mask.low[row]) & (offset <= self.mask.high[row])
        assert allowed.sum() == self.s.tiles.area[tile]
        arrays = [given[t][1] for t in ("q", "kv", "out", "dout") if t in given]
        if self.s.kind[i] == Kind.ATTENTION:
            made = {"out": (queries, attend(*arrays, allowed))}
        else:
            dq, dkv = attend_backward(*arrays, allowed)
            made = {"dq": (queries, dq), "dkv": (keys, dkv)}
        results = []
        for _, k, mode in targets:
            tensor, tokens, _ = self.block(k)
            assert mode != UPDATE
            assert np.array_equal(tokens, made[tensor][0])
            results.append(made[tensor][1])
        return results

    def heads(self, i, tensor, held):
        first, count = self.s.heads_of(i)[2:] if tensor == "kv" else self.s.heads_of(i)[:2]
        return slice(first - held.start, first - held.start + count)

    def pieces(self, target, reads):
        """Where each read meets the target: (index into the target, values)."""
        tensor, tokens, heads = target
        for name, have, have_heads, array in reads:
            low, high = max(heads.start, have_heads.start), min(heads.stop, have_heads.stop)
            if (name == tensor or (name, tensor) == ("out", "o")) and low < high:
                _, here, there = np.intersect1d(tokens, have, assume_unique=True, return_indices=True)
                part = array[there][:, low - have_heads.start : high - have_heads.start, : self.widths[tensor]]
                yield np.ix_(here, np.arange(low, high) - heads.start), part

    def empty(self, target, value):
        tensor, tokens, heads = target
        return np.full((len(tokens), heads.stop - heads.start, self.widths[tensor]), value)

    def moved(self, target, reads):
        """Cells go where they belong; partial gradients that an all-to-all brings together are added."""
        total, count = self.empty(target, 0.0), self.empty(target, 0)
        for where, part in self.pieces(target, reads):
            total[where] += part
            count[where] += 1
        assert (count > 0).all()
        if target[0][0] != "d" or target[0] == "dout":
            total = np.where(count > 1, total / np.maximum(count, 1), total)
        return total

    def summed(self, target, reads, old):
        total = self.empty(target, 0.0) if old is None else old.copy()
        for where, part in self.pieces(target, reads):
            total[where] += part
        return total

    def merged(self, target, reads, old):
        if old is None:
            old = self.empty(target, 0.0)
            old[..., -1] = -np.inf
        total = old.copy()
        for where, part in self.pieces(target, reads):
            total[where] = merge(total[where], part)
        return total


def joined(places):
    """Tokens and values that lie in several places, by token."""
    tokens, values = (np.concatenate(column) for column in zip(*places, strict=True))
    order = np.argsort(tokens, kind="stable")
    return tokens[order], values[order]


@cache
def given_by_group(workload, head_groups, seed):
    """Dense tensors with the rows of one group of heads after the other."""
    return {name: by_group(array, head_groups) for name, array in tensors(workload, seed).items()}


def check(schedule, workload, order, seed=0):
    """Assert that the outputs of the schedule are those of dense attention."""
    given = given_by_group(workload, schedule.head_groups, seed)
    for text, tensor, tokens, heads, array in Interpreter(schedule, workload, given).run(order):
        wanted = given[tensor].ravel() if tensor == "dsink" else given[tensor][schedule.tokens(tokens), heads]
        np.testing.assert_allclose(array, wanted, rtol=1e-10, atol=1e-10, err_msg=text)
