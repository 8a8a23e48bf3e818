"""A whole transformer layer around any strategy's attention: its ops come before and after what they feed and read.

Weights are whole on every GPU that has tokens, which stay where the strategy has them. Where attention runs in
nano-batches, each has its own ops, placed so that exchanges of one run beside computation of the other: those before
attention ahead of the first op that reads what they make, those after it behind the last op that makes what they read.

Reference: DistCA (arXiv 2510.18121), section 4.1. Differs: one layer alone, so that nothing hides its first and its
last exchange; streams wait for what they need and not for each other at every tick; gradients of weights are summed
in the working type; nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.case.resolve import model_of
from cpsim.case.scenario import Scenario
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints, RangeSets, sets_of
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import READ, STREAMS, Int32, Kind, Pass, Schedule
from cpsim.schedule.transformer import ACROSS, AFTER, BEFORE, GIVEN, KEPT, PRODUCTS, RESULT, LayerOp
from cpsim.strategies import Knobs, plan
from cpsim.strategies.distca.strategy import NANO_BATCHES
from cpsim.strategies.others import CPSIM, Implementation
from cpsim.strategies.sharding import cells_of, edges_of, stack

COMPUTE = STREAMS.index("compute")
FED = {"fwd": ("q", "kv"), "bwd": ("dout",)}
"""What attention reads and the ops before it make."""
READ_AFTER = {"fwd": ("out",), "bwd": ("dq", "dkv")}


def plan_scenario(
    scenario: Scenario, workload: Workload, cluster: Cluster, pass_: Pass, code: Implementation = CPSIM
) -> Schedule:
    """The schedule of one pass of a scenario: attention alone, or a layer around it.

    Raises:
        ScenarioError, InfeasibleError: as ``plan`` and ``plan_layer`` do.
    """
    name = str(scenario.strategy)
    if scenario.part is None:
        return plan(name, workload, cluster, pass_, scenario.knobs, code)
    if code is not CPSIM:
        raise InfeasibleError(f"implementation: layers are cpsim's own, got {code.name}")
    return plan_layer(name, workload, model_of(scenario), cluster, pass_, scenario.knobs)


def plan_layer(name: str, workload: Workload, model: Model, cluster: Cluster, pass_: Pass, knobs: Knobs) -> Schedule:
    """The schedule of one layer whose attention is a named strategy's.

    Raises:
        ScenarioError, InfeasibleError: as the strategy does.
        InfeasibleError: rows of the model are not whole heads, or the strategy does not keep whole tokens on each GPU.
    """
    for size in (model.hidden, model.ffn):
        if size % model.head_dim:
            raise InfeasibleError(f"layer: expected hidden and ffn to be multiples of head_dim, got {size}")
    attention = plan(name, workload, cluster, pass_, knobs)
    parts = int(knobs.get("nano_batches", NANO_BATCHES)) if name == "distca" else 1  # type: ignore[call-overload]
    return _Layer(attention, workload, model, pass_, parts).build()


def widths(model: Model) -> dict[str, int]:
    """Heads of ``head_dim`` elements in a row of every tensor of tokens; of ``kv`` and ``dkv`` those of keys alone."""
    hidden, inner = model.hidden // model.head_dim, model.ffn // model.head_dim
    found = dict.fromkeys(("x", "x norm", "proj", "h", "h norm", "down", "y"), hidden)
    found |= {"q": model.heads, "out": model.heads, "kv": model.kv_heads, "qkv": model.heads + 2 * model.kv_heads}
    found |= {"gate up": 2 * inner, "swiglu": inner, "x part": hidden, "h part": hidden}
    return found | {f"d{name}": width for name, width in found.items()}


def weights(model: Model) -> dict[str, tuple[int, int]]:
    """Rows, and heads of ``head_dim`` elements in a row, of every weight."""
    names = {"qkv": "w qkv", "proj": "w proj", "gate_up": "w gate up", "down": "w down"}
    linear = {names[name]: (outer, inner // model.head_dim) for name, (inner, outer) in model.linears(1).items()}
    return linear | dict.fromkeys(("w attention norm", "w mlp norm"), (1, model.hidden // model.head_dim))


class _Layer:
    """One layer under construction; arrays of parts and ranks are ``[parts, ranks]``."""

    def __init__(self, attention: Schedule, workload: Workload, model: Model, pass_: Pass, parts: int) -> None:
        self.s, self.pass_, self.ranks = attention, pass_, np.arange(attention.num_ranks)
        self.bounds = np.arange(parts + 1) * workload.num_tokens // parts
        self.width, self.weights = widths(model), weights(model)
        self.element = model.head_dim * workload.bytes_per_element
        self.head_dim, self.lse = model.head_dim, 4 * workload.num_heads
        own = self._own()
        edges = np.union1d(edges_of(own), self.bounds)
        low, high = self.bounds[:-1, None], self.bounds[1:, None]
        inside = (edges[None, :-1] >= low) & (edges[None, :-1] < high)
        masks = cells_of(own, edges)[None] & inside[:, None]
        parts_sets = sets_of(masks.reshape(parts * len(self.ranks), -1), edges)
        self.tokens = parts_sets.num_tokens().reshape(parts, -1)
        self.homes = np.flatnonzero(self.tokens.sum(axis=0))
        """Ranks with tokens, and therefore with weights."""
        rows = np.array([[0, rows] for rows, _ in self.weights.values()])
        sets = stack(attention.sets, parts_sets, RangeSets(np.arange(len(rows) + 1), rows), own)
        self.set_of_part = len(attention.sets) + np.arange(self.tokens.size).reshape(self.tokens.shape)
        first = int(self.set_of_part[-1, -1]) + 1
        self.set_of_rows = {name: first + i for i, name in enumerate(self.weights)}
        self.set_of_own = first + len(rows) + self.ranks
        self.b = Builder(attention.num_ranks, sets, attention.tiles)
        self.b.adopt(attention)
        self.held: dict[tuple[str, int], Int32] = {}
        """Buffers of every tensor that is not whole, by part, ``[ranks]``; of whole ones by part -1."""
        self.summed = {name: np.zeros(len(self.ranks), np.bool_) for name in self.weights}
        """Ranks that have a gradient of a weight."""
        self._place()

    def _own(self) -> RangeSets:
        """Tokens of every rank."""
        s, found = self.s, {}
        for buffer, block in s.inputs.tolist():
            whole = int(s.block_heads[block, 1]) == self.width["q"]
            if s.block_tensors[s.block_tensor[block]] == "q" and whole:
                found[int(s.buffer_rank[buffer])] = s.sets.of(int(s.block_set[block]))
        made = {s.block_tensors[s.block_tensor[block]] for block in s.outputs[:, 1]}
        count = s.num_ranks * (2 if self.pass_ == "fwd" else 4)
        if len(found) < s.num_ranks or len(s.inputs) != count or made != set(READ_AFTER[self.pass_]):
            raise InfeasibleError("layer: expected a strategy that keeps all heads of whole tokens on every GPU")
        if s.stride != 1 or s.head_groups != 1:
            raise InfeasibleError("layer: expected a strategy that counts tokens, not stripes or groups of heads")
        ranges = [found[rank] for rank in range(s.num_ranks)]
        return RangeSets(np.cumsum([0, *map(len, ranges)]), np.concatenate(ranges))

    # --- buffers ---

    def _place(self) -> None:
        """Buffers of all tensors: those that attention knows, those that are kept or given, weights, and the others."""
        s, b, fed = self.s, self.b, FED[self.pass_]
        for pairs, emit in ((s.inputs, b.input), (s.outputs, b.output)):
            for buffer, block in pairs.tolist():
                tensor = s.block_tensors[s.block_tensor[block]]
                into = self.held.setdefault((tensor, -1), np.full(len(self.ranks), NOTHING, np.int32))
                into[s.buffer_rank[buffer]] = buffer
                access = np.array([buffer], np.int32), np.array([block], np.int32)
                (b.output if tensor in fed else emit)(*access)
        ends = (*GIVEN[self.pass_], RESULT[self.pass_], *KEPT)
        ops = (*BEFORE[self.pass_], *AFTER[self.pass_])
        for name in dict.fromkeys(name for op in ops for name in (*op.reads, *op.writes)):
            if (name, -1) in self.held:
                continue
            if name in self.weights or name.removeprefix("d") in self.weights:
                self._place_weight(name)
            elif name in ends:
                self.held[name, -1] = b.buffers(name, self.tokens.sum(axis=0) * self._row_bytes(name))
                made = name == RESULT[self.pass_] or (self.pass_ == "fwd" and name not in GIVEN["fwd"])
                (b.output if made else b.input)(self.held[name, -1], b.blocks(name, self.set_of_own, self._heads(name)))
            else:
                self._place_passing(name)

    def _place_weight(self, name: str) -> None:
        rows, heads = self.weights[name.removeprefix("d")]
        buffers = self.b.buffers(name, rows * heads * self.element, self.homes)
        self.held[name, -1] = np.full(len(self.ranks), NOTHING, np.int32)
        self.held[name, -1][self.homes] = buffers
        (self.b.output if name[0] == "d" else self.b.input)(buffers, self._weight(name)[self.homes])

    def _place_passing(self, name: str) -> None:
        """What one op leaves for others; parts follow each other through one buffer unless attention lies between."""
        rows, parts = self.tokens, range(len(self.tokens))
        if name in ACROSS:
            self.held |= {(name, p): self.b.buffers(name, rows[p] * self._row_bytes(name)) for p in parts}
        else:
            shared = self.b.buffers(name, rows.max(axis=0) * self._row_bytes(name))
            self.held |= {(name, p): shared for p in parts}

    def _heads(self, name: str) -> tuple[int, int]:
        return 0, self.width[name]

    def _row_bytes(self, name: str) -> int:
        return self.width[name] * self.element * (2 if name in ("kv", "dkv") else 1) + (name == "out") * self.lse

    def _weight(self, name: str) -> Int32:
        which = name.removeprefix("d")
        block = self.b.blocks(name, [self.set_of_rows[which]], (0, self.weights[which][1]))
        return np.repeat(block, len(self.ranks)).astype(np.int32)

    # --- ops ---

    def build(self) -> Schedule:
        """Attention's ops in their order, others where they belong."""
        s, parts = self.s, range(len(self.tokens))
        fed, read = (self._touched(names) for names in (FED[self.pass_], READ_AFTER[self.pass_]))
        places = [(min((op for op, *_ in fed[p]), default=0), 0, p) for p in parts]
        places += [(1 + max((op for op, *_ in read[p]), default=len(s) - 1), 1, p) for p in parts]
        moved, more, at = np.full(len(s), NOTHING), list[tuple[int, int]](), 0
        for where, is_after, p in sorted(places):
            self.b.take(s, at, where, moved, more)
            at = where
            waits = [(rank, int(moved[op])) for op, rank, beside in read[p] if beside] if is_after else []
            last = self._emit((AFTER if is_after else BEFORE)[self.pass_], p, waits)
            if not is_after:
                more += [(op, int(last[rank])) for op, rank, beside in fed[p] if beside]
        self.b.take(s, at, len(s), moved, more)
        return replace(self.b.build(), planning=s.planning)

    def _touched(self, tensors: Sequence[str]) -> list[list[tuple[int, int, bool]]]:
        """Attention's ops that read or make tokens of every part of its inputs or results: op, rank, and whether the
        op runs beside ``compute``."""
        s, found = self.s, [list[tuple[int, int, bool]]() for _ in self.tokens]
        buffers = {int(b) for name in tensors for b in self.held[name, -1]}
        for op in range(len(s)):
            for a in range(s.access_start[op], s.access_start[op + 1]):
                buffer, ranges = int(s.access_buffer[a]), s.sets.of(int(s.block_set[s.access_block[a]]))
                if buffer not in buffers or (s.access_mode[a] == READ) != (tensors == FED[self.pass_]):
                    continue
                rank, lanes = int(s.buffer_rank[buffer]), slice(s.lane_start[op], s.lane_start[op + 1])
                beside = bool((s.lane_stream[lanes][s.lane_rank[lanes] == rank] != COMPUTE).all())
                for p, (low, high) in enumerate(pairwise(self.bounds.tolist())):
                    if ((ranges[:, 0] < high) & (ranges[:, 1] > low)).any():
                        found[p].append((op, rank, beside))
        return found

    def _emit(self, ops: Sequence[LayerOp], part: int, waits: Sequence[tuple[int, int]]) -> Ints:
        """Ops of one part on all ranks that have some of it; returns every rank's last one."""
        who, last = np.flatnonzero(self.tokens[part]), np.full(len(self.ranks), NOTHING)
        late = [[other for rank, other in waits if rank == r] for r in who.tolist()]
        deps = np.full((len(who), max(map(len, late), default=0)), NOTHING)
        for row, others in zip(deps, late, strict=True):
            row[: len(others)] = others
        for i, op in enumerate(ops):
            given = [deps] if i == 0 and deps.size else []
            emit = self._product if op.kind in PRODUCTS else self._elementwise
            last[who] = emit(op, part, who, given)
        return last

    def _access(self, name: str, part: int, who: Ints) -> Access:
        """Rows of one part, or a weight, on some ranks."""
        is_weight = name.removeprefix("d") in self.weights
        block = self._weight(name) if is_weight else self.b.blocks(name, self.set_of_part[part], self._heads(name))
        buffers = self.held[name, part if (name, part) in self.held else -1]
        return buffers[who], block[who]

    def _product(self, op: LayerOp, part: int, who: Ints, deps: Sequence[Ints]) -> Ints:
        """A product; gradients of weights add to what parts before have left."""
        tokens, weight = self.tokens[part, who], next(n for n in (*op.reads, *op.writes) if "w " in n)
        outer, inner = self.weights[weight.removeprefix("d")]
        inner *= self.head_dim
        reads = [self._access(name, part, who) for name in op.reads]
        match op.kind:
            case "forward":
                shape = tokens, outer, inner
            case "dgrad":
                shape = tokens, inner, outer
            case _:
                return self._sums(op, part, who, deps, product=(outer, inner, tokens))
        writes = [self._access(op.writes[0], part, who)]
        return self.b.add(Kind.GEMM, (who, "compute"), step=part, product=shape, deps=deps, reads=reads, writes=writes)

    def _sums(self, op: LayerOp, part: int, who: Ints, deps: Sequence[Ints], **what: object) -> Ints:
        """An op whose last result is a gradient of weights: the first one of a rank writes it, others add to it."""
        known, done = self.summed[op.writes[-1].removeprefix("d")], np.full(len(who), NOTHING)
        for again in (False, True):
            at = np.flatnonzero(known[who] == again)
            here = who[at]
            chosen = {
                k: tuple(np.broadcast_to(x, len(who))[at] for x in v) if isinstance(v, tuple) else v[at]  # type: ignore[index]
                for k, v in what.items()
            }
            made, total = (
                [self._access(name, part, here) for name in names] for names in (op.writes[:-1], op.writes[-1:])
            )
            done[at] = self.b.add(
                Kind.GEMM if op.kind in PRODUCTS else Kind.ELEMENTWISE,
                (here, "compute"),
                step=part,
                deps=[d[at] for d in deps],
                reads=[self._access(name, part, here) for name in op.reads],
                writes=made + (total if not again else []),
                updates=total if again else [],
                **chosen,  # type: ignore[arg-type]
            )
        known[who] = True
        return done

    def _elementwise(self, op: LayerOp, part: int, who: Ints, deps: Sequence[Ints]) -> Ints:
        """A memory-bound op."""
        tokens = self.tokens[part, who]
        elements = sum(self._row_bytes(name) for name in op.writes if "w " not in name) * self.head_dim // self.element
        nbytes = np.array([op.nbytes(int(n) * elements) for n in tokens], np.int64)
        if op.kind == "rms_norm_bwd":
            return self._sums(op, part, who, deps, nbytes=nbytes)
        return self.b.add(
            Kind.ELEMENTWISE,
            (who, "compute"),
            step=part,
            nbytes=nbytes,
            deps=deps,
            reads=[self._access(name, part, who) for name in op.reads],
            writes=[self._access(name, part, who) for name in op.writes],
        )
