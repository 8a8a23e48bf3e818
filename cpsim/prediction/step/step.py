"""A whole training step: every microbatch on every stage of every replica, from prices of ops to time and memory.

Layers of a stage are alike and so are GPUs of a tensor-parallel group, so that each is priced once; microbatches differ
by their documents, and who waits for whom is simulated. Context-parallel ranks wait for each other in every layer,
pipeline stages by microbatch, replicas at the end of the step, where gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.case.parallel import Parallel
from cpsim.errors import InfeasibleError
from cpsim.models.kernels import host_link_note
from cpsim.models.network.collective import transfer_seconds
from cpsim.models.network.communication import Communication
from cpsim.prediction.step.attention import Attended, Attention
from cpsim.prediction.step.costs import PARTS, Costs, Parts, stacked
from cpsim.prediction.step.experts import ALONE, NOTE, once_a_rank
from cpsim.prediction.step.frameworks import MEGATRON, Framework, Held, Sizes
from cpsim.prediction.step.hosts import layer_seconds, update_seconds
from cpsim.prediction.step.layer import BF16, FP32, Collective, Copy, ElementwisePass, Gemm, Op, Ops, flops, sent_bytes
from cpsim.prediction.step.memory import (
    CONTEXT,
    ChunkMemory,
    Occupancy,
    StageMemory,
    chunk_memory,
    communicators,
    mean_memory,
    occupancy,
    stage_memory,
    workspaces,
)
from cpsim.prediction.step.offload import offloaded
from cpsim.prediction.step.opened import LAYERS, Inside, Opened, ops_of, passes_of
from cpsim.prediction.step.overlap import beside_others
from cpsim.prediction.step.pipeline import (
    Pipeline,
    one_f_one_b,
    one_f_one_b_order,
    same_phase,
    same_phase_order,
)
from cpsim.prediction.step.precision import FP8, FP8_NOTE, Recipe, kept_in_fp8
from cpsim.prediction.step.program import (
    ENDS,
    GRADIENT,
    SHARD,
    HostCopy,
    LayerCode,
    Node,
    Nodes,
    Program,
    Shards,
    program,
)
from cpsim.prediction.step.recurrent import MIXED, SHARED_KEYS, Mixed
from cpsim.prediction.step.tiles import tiled
from cpsim.prediction.step.timing import Launches, Planned, Prices, launches_seconds, of_layers, planned
from cpsim.schedule.schedule import Kind
from cpsim.schedule.transformer import OP_BYTES

Floats = NDArray[np.float64]
Batch = Sequence[Sequence[tuple[int, ...]]]
"""Document lengths [tokens] of every microbatch of every replica: ``batch[replica][microbatch]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step takes."""

    time_s: float
    parts: Parts
    """Seconds by cost model along the critical path, which `time_s` consists of."""
    busy: Parts
    """Seconds by cost model that the mean GPU spends in its own passes."""
    memory: tuple[StageMemory, ...]
    """Memory of every pipeline stage."""
    gpu_bytes: int
    """Memory of a GPU."""
    flops: float
    """FLOP of all GPUs: matrix products and exact mask area, forward and backward, nothing counted twice."""
    sent: float
    """Bytes that the busiest GPU sends."""
    imbalance: float
    """Work of the busiest replica over that of the mean one."""
    notes: tuple[str, ...]

    @property
    def idle_share(self) -> float:
        """Share of the time that a GPU waits for others, on average."""
        return max(0.0, 1.0 - sum(self.busy.values()) / self.time_s)

    @property
    def peak_memory_bytes(self) -> int:
        """What PyTorch's allocator has on the fullest GPU."""
        return self.fullest.total

    @property
    def fullest(self) -> StageMemory:
        """Memory of the stage that needs most."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def needed_bytes(self) -> int:
        """All that the fullest GPU needs."""
        return self.fullest.needed

    @property
    def fits(self) -> bool:
        """Whether a GPU has that much."""
        return self.needed_bytes <= self.gpu_bytes

    def too_large(self) -> str:
        """What a step that does not fit needs, in words."""
        return f"does not fit: needs {self.needed_bytes / 1e9:.1f} of {self.gpu_bytes / 1e9:.1f} GB"


@dataclass(frozen=True, slots=True)
class Known:
    """What was worked out of programs, for all ways to cut a step whose passes are alike."""

    programs: dict[tuple[object, ...], Callable[[int], Program]] = field(default_factory=dict)
    """Of virtual stages, by their number of layers."""
    planned: dict[tuple[object, ...], Planned] = field(default_factory=dict)
    occupied: dict[tuple[object, ...], Occupancy] = field(default_factory=dict)
    """What they hold."""
    launched: dict[tuple[object, ...], tuple[Floats, Floats]] = field(default_factory=dict)
    """Seconds in which a host launches one layer and two."""
    kinds: dict[int, Known] = field(default_factory=dict)
    """Of kinds of layers, where these differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A model on a cluster, cut in one way, in one framework's code."""

    model: Model
    parallel: Parallel
    cluster: Cluster
    costs: Costs
    attention: Attention | Mixed
    framework: Framework = MEGATRON
    compiled: bool = False
    offload: bool = False
    """Whether activations wait in the host's memory."""
    recipe: Recipe | None = None
    """How linear layers compute in FP8."""
    _known: Known = field(default_factory=Known)
    _layers: dict[int, tuple[bool, float]] = field(default_factory=dict)
    _chunks: dict[tuple[object, ...], ChunkMemory] = field(default_factory=dict)
    _memory: dict[tuple[int, ...], StageMemory] = field(default_factory=dict)
    _kinds: list[tuple[float, StepModel]] = field(default_factory=list)
    _launched: dict[int, Launches] = field(default_factory=dict)

    @property
    def kinds(self) -> list[tuple[float, StepModel]]:
        """Where layers differ: the share of each kind, and the step if all layers were of that kind. Passes and memory
        are the mean of theirs, as if every stage had all kinds in this proportion. None where layers are alike."""
        if not self._kinds and len(self.model.kinds) > 1:
            for i, (share, model) in enumerate(self.model.kinds):
                own: dict[str, Any] = {"_memory": {}, "_chunks": {}, "_layers": {}, "_launched": {}, "_kinds": []}
                own["_known"] = self._known.kinds.setdefault(i, Known())
                self._kinds.append((share, replace(self, model=model, **own)))
        return self._kinds

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of every virtual stage: chunk c of stage s is number c * pp + s."""
        return self.parallel.chunk_layers(self.model.layers)

    @property
    def _most_layers(self) -> int:
        """Layers of the stage that has most."""
        stages = self.parallel.pp
        return max(sum(self.layers[stage::stages]) for stage in range(stages))

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.parallel.sharding == "fsdp"

    @property
    def held(self) -> Held:
        """What is held of every parameter."""
        return self.framework.held(self.parallel.sharding)

    def memory(self, batch: Batch, attended: Sequence[Sequence[Attended]] = ()) -> tuple[StageMemory, ...]:
        """Peak memory of every stage, for the largest microbatch; without attention's own where that is not known."""
        tokens = self.most_tokens(batch)
        ends = [(one.exchange, one.kept) for replica in attended for one in replica] or [(0, 0)]
        exchange, kept = (max(sizes) for sizes in zip(*ends, strict=True))
        return tuple(self.stage_memory(tokens, stage, exchange, kept) for stage in range(self.parallel.pp))

    def stage_memory(self, tokens: int, stage: int, exchange: int = 0, kept: int = 0) -> StageMemory:
        """Peak memory of one stage.

        Args:
            tokens: of the largest microbatch on a context-parallel rank.
            stage: 0 is the first.
            exchange: bytes that attention allocates beyond its inputs and output, gathered keys for example.
            kept: bytes that attention of a layer keeps beyond its inputs and output.
        """
        key = tokens, stage, exchange, kept
        if key not in self._memory:
            self._memory[key] = self._stage_memory(*key)
        return self._memory[key]

    def _stage_memory(self, tokens: int, stage: int, exchange: int, kept: int) -> StageMemory:
        cut, held = self.parallel, self.held
        parameters = self._parameters(stage) + self._parameters(stage, "experts")
        trained = self._trained(stage) + self._parameters(stage, "experts")
        states = self._shared(stage) if cut.sharding != "none" else trained
        mine = -(-parameters // cut.shards) if self.sharded else parameters
        learns = self._shared(stage) if self.sharded else trained
        beside = learns if self.framework.lora else 0
        buckets = cut.replicas > 1 and not self.sharded  # gradients are views of them
        summed = held.gradient or held.made_gradient * (cut.microbatches > 1 or buckets)
        layouts = 2 - (held.weight == FP8)  # weights in FP8 are one of them
        copies = layouts * FP8 * self._linear_parameters() if self.recipe and self.recipe.weight_step else 0
        stays = () if summed else (SHARD,) if self.sharded else (GRADIENT,)
        chunks = {
            chunk: self._chunk_memory(tokens, chunk, exchange, kept, stays)
            for chunk in range(stage, cut.virtual_stages, cut.pp)
        }
        if cut.schedule == "1f1b":
            order = one_f_one_b_order(stage, cut.pp, cut.microbatches, cut.virtual_pp)
        else:
            order = same_phase_order(stage, cut.pp, cut.microbatches)
        fixed = held.weight * (mine + beside) + copies, summed * learns, held.states * states * cut.optimizer
        found = stage_memory(chunks, order, fixed)
        always = workspaces(self.cluster.gpu, engine=self.framework.engine) + self._stand_ins(stage)
        return replace(found, working=found.working + always, communicators=communicators(cut), context=CONTEXT)

    def _stand_ins(self, stage: int) -> int:
        """Bytes of what Transformer Engine gives autograd in place of gradients that products have added to those in
        fp32 already: one tensor for all weights of a shape, which stays.

        Source: Transformer Engine 2.3, pytorch/module/base.py (get_dummy_wgrad); Megatron-Core 0.16,
        tensor_parallel/layers.py.
        """
        if not self.framework.engine or self.framework.lora:
            return 0
        tp, is_last = self.parallel.tp, stage == self.parallel.pp - 1
        last = {(self.model.hidden, self.model.vocab // tp)} if is_last else set()
        dense = any(map(self._dense, range(stage, self.parallel.virtual_stages, self.parallel.pp)))
        return BF16 * sum(inner * outer for inner, outer in self.model.weight_shapes(tp, dense=dense) | last)

    def _chunk_memory(self, tokens: int, chunk: int, exchange: int, kept: int, stays: tuple[str, ...]) -> ChunkMemory:
        """Memory of a microbatch on a virtual stage; those that are alike are looked at once."""
        key = tokens, self._alike(chunk), exchange, kept
        if key not in self._chunks and self.kinds:
            parts = [(share, one._chunk_memory(tokens, chunk, exchange, kept, stays)) for share, one in self.kinds]
            self._chunks[key] = mean_memory(parts)
        if key not in self._chunks:
            same = tokens, self._ends(chunk), exchange, kept, stays

            def occupied(layers: int) -> Occupancy:
                if (*same, layers) not in self._known.occupied:
                    make = self._programs(tokens, chunk, exchange, kept)
                    self._known.occupied[*same, layers] = occupancy(make(layers), stays)
                return self._known.occupied[*same, layers]

            self._chunks[key] = chunk_memory(occupied, self.layers[chunk])
        return self._chunks[key]

    def _alike(self, chunk: int) -> tuple[int, bool, bool]:
        """What time and memory of a virtual stage depend on: its layers, and the ends of the model that it has."""
        return self.layers[chunk], *self._ends(chunk)

    def _ends(self, chunk: int) -> tuple[bool, bool]:
        """Whether a virtual stage has the first and the last end of the model."""
        return chunk == 0, chunk == self.parallel.virtual_stages - 1

    def simulate(self, batch: Batch, attended: Sequence[Sequence[Attended]] | None = None) -> Step:
        """Runs one step.

        Args:
            batch: as many replicas and microbatches as `parallel` says.
            attended: attention of every microbatch, where a planner has placed it; None is that of the strategy.

        Raises:
            InfeasibleError: attention cannot run like this.
        """
        if attended is None:
            attended = [self.attention.of(replica) for replica in batch]
        seconds = self._passes(batch, attended)
        pipeline, hop_s = self._run(batch, seconds)
        end, last = self._updates(pipeline, seconds, self.most_tokens(batch))
        parts = self._path(pipeline, seconds, hop_s) + last
        work = seconds.sum(axis=(0, 2, 3, 4))
        mean = seconds.sum(axis=(0, 2)).mean(axis=(0, 1)) * self.parallel.virtual_pp  # of the chunks of a GPU
        return Step(
            time_s=end,
            parts=dict(zip(PARTS, parts.tolist(), strict=True)),
            busy=dict(zip(PARTS, (mean + last).tolist(), strict=True)),
            memory=self.memory(batch, attended),
            gpu_bytes=self.cluster.gpu.memory_bytes,
            flops=self._flops(batch, attended),
            sent=self._sent(batch, attended),
            imbalance=float(work.max() / work.mean()),
            notes=tuple(
                dict.fromkeys(
                    (
                        *self._notes(self.most_tokens(batch)),
                        *((host_link_note(self.cluster),) if self.offload else ()),
                        *((FP8_NOTE,) if self.recipe or self.held.weight == FP8 else ()),
                        *(note for replica in attended for one in replica for note in one.notes),
                    )
                )
            ),
        )

    def opened(self, batch: Batch) -> Opened:
        """When every pass of the replica that ends last runs, and what layers of its stages do meanwhile.

        Raises:
            InfeasibleError: attention cannot run like this.
        """
        attended = [self.attention.of(replica) for replica in batch]
        seconds = self._passes(batch, attended)
        pipeline, _ = self._run(batch, seconds)
        time_s, _ = self._updates(pipeline, seconds, self.most_tokens(batch))
        last, passes = passes_of(pipeline, seconds.sum(axis=-1), self.parallel.pp, time_s)
        heaviest = int(np.argmax([one.seconds for one in attended[last]]))
        tokens, alike = self.tokens(batch[last][heaviest]), dict[object, list[int]]()
        for chunk in range(self.parallel.virtual_stages):
            alike.setdefault(self._alike(chunk), []).append(chunk)
        return Opened(
            passes=passes,
            inside=tuple(self._inside(chunks, tokens, attended[last][heaviest]) for chunks in alike.values()),
        )

    def _inside(self, chunks: Sequence[int], tokens: int, attended: Attended) -> Inside:
        """A few layers of virtual stages that are alike."""
        layers = self.layers[chunks[0]]
        shown = min(LAYERS, layers)
        run = self._programs(tokens, chunks[0])(shown)
        found = self._planned(tokens, chunks[0], shown).simulated(attended.parts, self._launches(tokens))
        ops = ops_of(run, found)
        return Inside(chunks=tuple(chunks), layers=layers, shown=shown, ops=ops)

    def program(self, tokens: int, chunk: int = 0) -> Program:
        """What a GPU runs of a virtual stage for a microbatch of so many tokens on a context-parallel rank."""
        return self._programs(tokens, chunk)(self.layers[chunk])

    def _notes(self, tokens: int) -> tuple[str, ...]:
        """What about ops of a microbatch lies outside of the measured range, or was not measured at all."""
        if self.kinds:
            own = (SHARED_KEYS,) if self.model.kv_shared_layers else ()
            return tuple(dict.fromkeys((MIXED, *own, *(note for _, one in self.kinds for note in one._notes(tokens)))))
        ops, tp, ep = Ops(self.model, self.parallel.tp, tokens), self.parallel.tp, self.parallel.ep
        if not (self.model.experts or self.model.recurrent or self.model.kv_rank):
            return self.costs.notes(self._products_of_chunks(tokens) + ops.forward() + ops.backward() + ops.loss())
        whats = [what for what in _ops(self._programs(tokens, -1)(1)) if not isinstance(what, str)]
        exchanged = [what for what in whats if isinstance(what, Collective) and what.kind == "all_to_all"]
        others = [what for what in whats if what not in exchanged]
        far = ep * tp > self.cluster.gpus_per_node
        sizes = dict.fromkeys(what.nbytes for what in exchanged if not far)
        notes = (note for n in sizes for note in self.costs.profile.collective_notes("all_to_all", n, ep))
        alone = () if self.parallel.ep_overlap or ep == 1 else (ALONE,)
        first = (NOTE,) if self.model.experts else ()
        return (*first, *alone, *self.costs.notes(others + ops.loss()), *notes)

    def _products_of_chunks(self, tokens: int) -> list[Op]:
        """Products of an MLP that runs in chunks."""
        whats = _ops(self._programs(tokens, -1)(1)) if self.parallel.mlp_chunks > 1 else []
        return [what for what in whats if isinstance(what, Gemm) and what.times > 1]

    def time_s(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> float:
        """Seconds of a step, about: passes lie on a line between those with the least and the most attention, where
        all have as many tokens; see ``simulate``."""
        alike = len({self.tokens(documents) for replica in batch for documents in replica}) == 1
        seconds = self._between(batch, attended) if alike else self._passes(batch, attended)
        pipeline, _ = self._run(batch, seconds)
        return self._updates(pipeline, seconds, self.most_tokens(batch))[0]

    def microbatch(self, tokens: int, attended: Attended) -> Floats:
        """Seconds by cost model of both passes of one microbatch, ``[len(PARTS)]``, where the model is one stage.

        Args:
            tokens: of a context-parallel rank.
            attended: its attention.
        """
        return np.asarray(self._pass(tokens, 0, attended).sum(axis=0))

    def _between(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> Floats:
        """As ``_passes``, of which two are simulated."""
        flat = [one for replica in attended for one in replica]
        total = np.array([one.seconds for one in flat])
        low, high = int(total.argmin()), int(total.argmax())
        at = ((total - total[low]) / max(total[high] - total[low], 1e-12)).reshape(1, len(batch), -1, 1, 1)
        least, most = (self._passes([[batch[0][0]]], [[flat[i]]]) for i in (low, high))
        return np.asarray(least + at * (most - least))

    def _run(self, batch: Batch, seconds: Floats) -> tuple[Pipeline, float]:
        """All passes in time, and seconds between stages."""
        passes, hop_s = seconds.sum(axis=-1), self.hop_seconds(self.most_tokens(batch))
        if self.parallel.schedule == "1f1b":
            return one_f_one_b(passes, hop_s, self.parallel.virtual_pp), hop_s
        return same_phase(passes, hop_s), hop_s

    def tokens(self, documents: Sequence[int]) -> int:
        """Tokens of a microbatch on a context-parallel rank."""
        return -(-sum(documents) // self.parallel.cp)

    def most_tokens(self, batch: Batch) -> int:
        """The same of the largest microbatch."""
        return max(self.tokens(documents) for replica in batch for documents in replica)

    def _parameters(self, stage: int, part: str = "") -> int:
        """Parameters of a stage on one tensor-parallel rank, those of its experts aside; or of these, or of one part of
        it, see ``program.program``."""
        tp, pp = self.parallel.tp, self.parallel.pp
        if part in ("", "experts"):
            of = self._expert_parameters if part else self._chunk_parameters
            return sum(map(of, range(stage, self.parallel.virtual_stages, pp)))
        words = self.model.vocab // tp * self.model.hidden
        ends = {"first": words * (stage == 0), "last": words * (stage == pp - 1)}
        return ends.get(part, sum(ends.values()) if part == "root" else self.model.layer_parameters(tp))

    def _trained(self, stage: int) -> int:
        """Parameters of a stage that are trained, on one tensor-parallel rank; those of its experts aside."""
        return sum(map(self._chunk_trained, range(stage, self.parallel.virtual_stages, self.parallel.pp)))

    def _chunk_trained(self, chunk: int) -> int:
        """The same of a virtual stage."""
        lora = self.framework.lora
        if lora is None:
            return self._chunk_parameters(chunk)
        return lora.parameters(self.model, self.parallel.tp) * self.layers[chunk]

    def _shared(self, stage: int) -> int:
        """Trained parameters of a stage that are a rank's own among those that share them."""
        cut, experts = self.parallel, self._parameters(stage, "experts")
        return -(-self._trained(stage) // cut.shards) + -(-experts * cut.ep // cut.shards)

    def _chunk_parameters(self, chunk: int) -> int:
        """Parameters of a virtual stage on one tensor-parallel rank, those of its experts aside."""
        tp = self.parallel.tp
        ends = (chunk == 0) + (chunk == self.parallel.virtual_stages - 1)
        words = self.model.vocab // tp * self.model.hidden
        each = self.model.layer_parameters(tp) - self.model.expert_parameters(tp)
        return each * self.layers[chunk] + self._dense(chunk) * self.model.more_dense(tp) + ends * words

    def _dense(self, chunk: int) -> int:
        """Layers of a virtual stage whose MLP is dense beside those with experts: the first ones of the model."""
        return min(self.layers[chunk], max(0, self.model.dense_layers - sum(self.layers[:chunk])))

    def _expert_parameters(self, chunk: int) -> int:
        """Parameters of a virtual stage in experts that a rank holds."""
        each = self.model.expert_parameters(self.parallel.tp) // self.parallel.ep
        return each * (self.layers[chunk] - self._dense(chunk))

    def _sizes(self, tokens: int) -> Sizes:
        return Sizes(self.model, self.parallel.tp, tokens, self.parallel.ep)

    def _programs(self, tokens: int, chunk: int, exchange: int = 0, kept: int = 0) -> Callable[[int], Program]:
        """The program of a virtual stage by its number of layers; of layers alone for none, -1."""
        if self.kinds:  # the most frequent kind stands for all
            return max(self.kinds, key=lambda kind: kind[0])[1]._programs(tokens, chunk, exchange, kept)
        key, known = (tokens, self._ends(chunk), exchange, kept), self._known.programs
        if key not in known:
            known[key] = cache(self._maker(tokens, chunk, exchange, kept))
        return known[key]

    def _maker(self, tokens: int, chunk: int, exchange: int, kept: int) -> Callable[[int], Program]:
        """What ``_programs`` remembers."""
        sizes, code, recompute = self._sizes(tokens), self.framework, self.parallel.recompute
        runs = code.runs(sizes, self.compiled, self.recipe, self.parallel.tp_overlap, recompute)
        runs = once_a_rank(runs, self.model, self.parallel.ep) if self.parallel.dispatcher == "flex" else runs
        alone = self.parallel.alone if self.parallel.ep_overlap else 1.0
        runs = beside_others(runs, alone) if alone < 1 else runs
        chunks = min(self.parallel.mlp_chunks, tokens)
        layer = _with_exchange(tiled(runs, chunks) if chunks > 1 else runs, exchange, kept)
        is_first, is_last = self._ends(chunk)
        first = code.first(sizes, self.compiled) if is_first else None
        last = code.last(sizes, self.compiled, self.parallel.loss_chunks) if is_last else None
        keeps = code.keeps(recompute, layer, sizes, self.compiled)
        keeps = kept_in_fp8(keeps, layer.backward) if self.recipe else keeps
        shards = self._shards(chunk) if self.sharded else None
        again_to = code.again_to.get(recompute, frozenset()) | (
            {"down"} if chunks > 1 and recompute == "full" else set()
        )

        def make(layers: int) -> Program:
            run = program(layer, first, last, layers, keeps, shards, again_to)
            return offloaded(run, layers, keeps, first is not None) if self.offload else run

        return make

    def _planned(self, tokens: int, chunk: int, layers: int) -> Planned:
        """The program of so many layers of a virtual stage, planned and priced."""
        key, known = (tokens, self._ends(chunk), layers), self._known.planned
        if key not in known:
            known[key] = planned(self._programs(tokens, chunk)(layers), self._prices())
        return known[key]

    def _shards(self, stage: int) -> Shards:
        """Gathers in the working type, each copied to where ops read it; sums in fp32, from copies, over the replicas
        that share the weights, and then over groups of replicas."""

        def gather(name: str) -> Nodes:
            part = name.split()[0]
            each = FP8 if self.recipe and self.recipe.shards and part not in (*ENDS, "root") else BF16
            nbytes = each * self._parameters(stage, part)
            cast = 0 if self.framework.lora else FP32 + each  # frozen weights are in the working type
            own = (cast + 2 * each) * (self._parameters(stage, part) // self.parallel.shards)
            return (
                Node(ElementwisePass("copy", own), (), {}, "gather", calls=2),  # cast, and copied side by side
                Node(Collective("all_gather", nbytes), (), {f"flat {name}": nbytes}, "gather"),
                Node(ElementwisePass("split_copy", 2 * nbytes), (f"flat {name}",), {f"weights {name}": nbytes}),
            )

        def scatter(name: str, gradients: Sequence[str]) -> Nodes:
            lora = self.framework.lora
            parameters = lora.parameters(self.model, self.parallel.tp) if lora else self._parameters(stage, name)
            copy = ElementwisePass("chunk_cat", (BF16 + FP32) * parameters)
            sums, mine = FP32 * parameters, FP32 * (parameters // self.parallel.shards)
            again = (Node(Collective("all_reduce", mine), (f"shard {name}",), {}, "scatter"),)
            return (
                Node(copy, tuple(gradients), {f"sums {name}": sums}),
                Node(
                    Collective("reduce_scatter", sums),
                    (f"sums {name}", *gradients[:1]),  # a loop's last variable is the last weight's
                    {f"shard {name}": mine},
                    "scatter",
                ),
                *(again if self.parallel.replicate > 1 else ()),
            )

        return Shards(gather=gather, scatter=scatter, root=self.framework.root)

    def _passes(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> Floats:
        """Seconds of every pass by cost model, ``[2, R, M, virtual stages, len(PARTS)]``."""
        stages = self.parallel.virtual_stages
        seconds = np.zeros((2, len(batch), len(batch[0]), stages, len(PARTS)))
        alike: dict[object, list[int]] = {}
        for chunk in range(stages):
            alike.setdefault(self._alike(chunk), []).append(chunk)
        known: dict[tuple[int, int], Floats] = {}  # equal microbatches have the same attention
        for r, replica in enumerate(batch):
            for m, documents in enumerate(replica):
                key = self.tokens(documents), id(attended[r][m])
                if key not in known:
                    known[key] = np.zeros((2, stages, len(PARTS)))
                    for chunks in alike.values():
                        known[key][:, chunks] = self._pass(key[0], chunks[0], attended[r][m])[:, None]
                seconds[:, r, m] = known[key]
        return seconds

    def _pass(self, tokens: int, chunk: int, attended: Attended) -> Floats:
        """Seconds of both passes of a virtual stage by cost model, ``[2, len(PARTS)]``.

        Where nothing runs beside layers that takes as long as their attention lets it, attention only adds.
        """
        if self.kinds:
            each = zip(self.kinds, attended.kinds or (attended,) * len(self.kinds), strict=True)
            return np.asarray(sum(share * one._pass(tokens, chunk, mine) for (share, one), mine in each))
        layers, plain = self.layers[chunk], not (self.sharded or self._hosts_count or self.offload)
        attention: tuple[Parts, Parts] = ({}, {}) if plain else attended.parts

        def seconds(count: int, prompt: bool = False, ahead_s: float = 0.0) -> Floats:
            launch_s = {} if prompt else self._launches(tokens)
            return self._planned(tokens, chunk, count).seconds(attention, launch_s, ahead_s)

        def ahead(count: int) -> Floats:
            return np.array(self._planned(tokens, chunk, count).ahead_s(attention, self._launches(tokens)))

        found = of_layers(seconds, layers)
        host = PARTS.index("host")
        late = float(found[:, host].sum())
        if late and self._hosts_run_on and self._planned(tokens, chunk, 1).awaits:
            found = of_layers(partial(seconds, ahead_s=float(of_layers(ahead, layers))), layers)
        elif late and self._hosts_run_on:
            prompt_s = float(of_layers(partial(seconds, prompt=True), layers).sum())
            spare = float(found.sum()) - max(prompt_s, self._launched_seconds(tokens, chunk))
            found = found.copy()
            found[:, host] *= 1 - max(0.0, spare) / late
        if not plain:
            return found
        forward, backward = stacked(attended.parts)
        again = forward * self._layer(tokens)[0]
        return np.asarray(found + layers * np.stack([forward, backward + again]))

    @property
    def _hosts_run_on(self) -> bool:
        """Whether a host that is late in one pass catches up in the other.

        With several microbatches it launches the next pass while a GPU still has work of the last one, so that both
        passes together take what they take the GPU or the host. Not in a pipeline that is not interleaved: hosts wait
        there for what stages send (megatron/core/pipeline_parallel/p2p_communication.py, ``batch_p2p_sync``). Where a
        layer has hosts wait, they begin a pass as far ahead of the GPU as they ended the one before.
        """
        return self.parallel.microbatches > 1 and (self.parallel.pp == 1 or self.parallel.virtual_pp > 1)

    def _launched_seconds(self, tokens: int, chunk: int) -> float:
        """In which a host launches both passes of a virtual stage."""
        few, more = (float(found.sum()) for found in self._launching(tokens, chunk, self._launches(tokens)))
        return few + (self.layers[chunk] - 1) * (more - few)

    def _launching(self, tokens: int, chunk: int, launch_s: Launches) -> tuple[Floats, Floats]:
        """Seconds in which a host launches one layer and two of a virtual stage, forward and backward, ``[2]``."""
        key, known = (tokens, self._ends(chunk), str(launch_s)), self._known.launched
        if key not in known:
            make = self._programs(tokens, chunk)
            known[key] = launches_seconds(make(1), launch_s), launches_seconds(make(2), launch_s)
        return known[key]

    def _layer(self, tokens: int) -> tuple[bool, float]:
        """Whether attention of a layer runs again before the backward pass, and bytes that a rank sends to others of
        its tensor- and expert-parallel groups in both passes."""
        if tokens not in self._layers and self.kinds:
            found = [(share, *one._layer(tokens)) for share, one in self.kinds]
            again = any(again for _, again, _ in found)
            self._layers[tokens] = again, sum(share * sent for share, _, sent in found)
        if tokens not in self._layers:
            layer = self._programs(tokens, -1)(1)
            again = any(node.what == "fwd" for node in layer.backward)
            nodes = [node for node in (*layer.forward, *layer.backward) if node.stream == "comm"]
            talks = [node.what for node in nodes if isinstance(node.what, Collective | Copy)]
            exchanged = [what for what in _ops(layer) if isinstance(what, Collective) and what.kind == "all_to_all"]
            sent = sent_bytes(talks, self.parallel.tp) + sent_bytes(exchanged, self.parallel.ep)
            self._layers[tokens] = again, sent
        return self._layers[tokens]

    def _launches(self, tokens: int) -> Launches:
        """Seconds of one launch of the host, forward and backward, by stream: so long that those of a layer take what
        a layer was measured to take."""
        if tokens not in self._launched:
            self._launched[tokens] = self._seconds_of_launches(tokens) if self._hosts_count else {}
        return self._launched[tokens]

    def _seconds_of_launches(self, tokens: int) -> Launches:
        """What ``_launches`` remembers."""
        host, names = self.costs.profile.host, self.framework.launches.get(self.compiled, {})
        alone = {
            stream: tuple(host.measured([f"{name}{place}", name]) or 0.0 for place in ("", " in bwd"))
            for stream, name in names.items()
        }
        adapters = self.framework.lora is not None
        of = partial(layer_seconds, host, self._host_code, self.parallel, self._experts)
        whole = of(biased=self.model.expert_bias, adapters=adapters) if alone else None
        if whole is None:
            return alone
        measured = self
        if self.parallel.mlp_chunks > 1:  # layers were measured with their MLP in one
            measured = replace(self, parallel=replace(self.parallel, mlp_chunks=1), _known=Known(), _kinds=[])
        one, two = measured._launching(tokens, -1, alone)
        scale = np.array(whole) / (two - one)
        return {stream: tuple(scale * seconds) for stream, seconds in alone.items()}

    @property
    def _hosts_count(self) -> bool:
        """Whether hosts may be late: of layers in CUDA graphs they are not."""
        return bool(self.framework.launches) and self.parallel.cuda_graphs != "layers"

    @property
    def _experts(self) -> int:
        """Of a rank."""
        return -(-self.model.experts // self.parallel.ep)

    @property
    def _host_code(self) -> str:
        """Whose layers hosts were timed with."""
        return f"{self.framework.host} {'compiled' if self.compiled else 'fp8' if self.recipe else 'eager'}"

    def _prices(self) -> Prices:
        group = self.parallel.group(self.cluster, self.parallel.shards)
        experts = self.parallel.group(self.cluster, self.parallel.ep)
        return Prices(
            costs=self.costs,
            kernel=self.attention.kernel,
            sharded=lambda op: self.collective(
                experts if op.kind == "all_to_all" else group, Kind[op.kind.upper()], op.nbytes
            ),
            host_bytes_per_s=self.cluster.host_link,
        )

    def hop_seconds(self, tokens: int) -> float:
        """Activations of a shard to the same rank of the next stage."""
        nbytes = BF16 * tokens // self.parallel.tp * self.model.hidden
        fabric, far = self.cluster.fabric, self.parallel.num_gpus // self.parallel.pp >= self.cluster.gpus_per_node
        if fabric is None or not far:
            return float(transfer_seconds(self.costs.profile.collective, nbytes, 2))
        share = fabric.uplink_bandwidth_bytes_per_s / self.cluster.gpus_per_node
        return fabric.latency_s + nbytes / min(share, fabric.flow_bandwidth_bytes_per_s)

    def _path(self, pipeline: Pipeline, seconds: Floats, hop_s: float) -> Floats:
        """Seconds of the pipeline's critical path by cost model, ``[len(PARTS)]``."""
        parts = np.sum([seconds[which, r, m, stage] for r, (which, m, stage) in pipeline.path], axis=0)
        far = self.parallel.num_gpus // self.parallel.pp >= self.cluster.gpus_per_node
        parts[PARTS.index("transfer between nodes" if far else "transfer")] += pipeline.hops * hop_s
        return np.asarray(parts)

    def _updates(self, pipeline: Pipeline, seconds: Floats, tokens: int) -> tuple[float, Floats]:
        """End of the step, and what follows the last backward pass by cost model, of the stage that ends last.

        Gradients of a stage's other chunks of layers are summed before, during the passes of chunks that follow. No
        step ends before its host has launched all of it.
        """
        ends = []
        for stage in range(self.parallel.pp):
            backward = float(seconds[1, :, -1, stage].sum(axis=-1).max())
            update = self._update(stage, backward)
            ends.append((float(pipeline.end_s[:, stage].max()) + float(update.sum()), stage, update))
        end, _, update = max(ends, key=lambda one: one[:2])
        last = update - self._ahead(end, pipeline, update)
        late = max(0.0, self._host_seconds(tokens) - end)
        last[PARTS.index("host")] += late
        return end + late, last

    def _host_seconds(self, tokens: int) -> float:
        """In which a host launches a step; 0 where it is never late."""
        if not self._hosts_count:
            return 0.0
        if self.kinds:
            return sum(share * one._host_seconds(tokens) for share, one in self.kinds)
        layers = self.layers[0]
        host, adapters = self.costs.profile.host, self.framework.lora is not None
        of = partial(update_seconds, host, self._host_code, self.parallel, self._experts)
        update = of(biased=self.model.expert_bias, adapters=adapters) * self.parallel.optimizer
        return self.parallel.microbatches * self._launched_seconds(tokens, 0) + layers * update

    def _ahead(self, end: float, pipeline: Pipeline, update: Floats) -> Floats:
        """What of the update other stages hide, so that parts of the path sum to the time."""
        hidden = pipeline.makespan_s + float(update.sum()) - end
        return np.asarray(update * (hidden / update.sum()) if update.sum() else update)

    def _update(self, stage: int, backward_s: float) -> Floats:
        """Seconds of gradients' sums and of the optimizer on a stage, ``[len(PARTS)]``."""
        cut, held = self.parallel, self.held
        parts: list[Parts] = []
        groups = [(cut.group(self.cluster, cut.replicas), self._trained(stage), self._chunk_trained(stage))]
        if self.model.experts:
            experts = self._parameters(stage, "experts"), self._expert_parameters(stage)
            groups.append((cut.expert_group(self.cluster), *experts))
        parted = cut.sharding != "none" and cut.optimizer
        if cut.gradients != "none" and cut.sharding != "fsdp":
            summing = Kind.REDUCE_SCATTER if parted else Kind.ALL_REDUCE
            beside, each = cut.gradients == "overlapped", held.gradient or held.made_gradient
            first = 0 if self.framework.lora else self._parameters(stage, "first")  # last, in a bucket of its own
            for group, parameters, chunk in groups:
                if self.framework.divides and cut.replicas > 1:
                    parts.append(self.costs.seconds([ElementwisePass("copy", 2 * each * parameters)]))
                where, seconds = self.collective(group, summing, each * (chunk if beside else parameters))
                last = max(1 / max(1, self.layers[stage]), first / max(1, chunk)) if beside else 1.0
                pressing = "reduce_scatter" if where == "collective" else ""  # the network between nodes paces others
                lost, rest = self.costs.beside(backward_s, seconds * (1 - last), pressing)
                parts.append({"interference": lost, where: rest + seconds * last})
                backward_s, first = max(0.0, backward_s - seconds), 0
        if cut.optimizer:
            mine = self._shared(stage) if parted else sum(parameters for _, parameters, _ in groups)
            if self.recipe:
                parts.append(self.costs.seconds(self._casts_of_step()))
            passes = [ElementwisePass(held.optimizer_kernel, held.optimizer * mine)]
            if held.clipped:
                passes += [ElementwisePass("norm", OP_BYTES["norm"] * mine), ElementwisePass("copy", 2 * FP32 * mine)]
            if held.cleared:
                passes.append(ElementwisePass("copy", held.cleared * sum(parameters for _, parameters, _ in groups)))
            parts.append(self.costs.seconds(passes))
            if parted and cut.sharding != "fsdp":
                for group, parameters, _ in groups:
                    where, seconds = self.collective(group, Kind.ALL_GATHER, held.weight * parameters)
                    parts.append({where: seconds})
        return np.asarray(stacked(parts).sum(axis=0))

    def _linear_parameters(self) -> int:
        """Parameters of a stage's layers that compute in FP8, on one tensor-parallel rank."""
        model, tp = self.model, self.parallel.tp
        others = model.whole_parameters() + model.expert_parameters(tp)
        own = model.expert_parameters(tp) // self.parallel.ep
        return (model.layer_parameters(tp) - others + own) * self._most_layers

    def _casts_of_step(self) -> list[ElementwisePass]:
        """What an update of the weights brings about in FP8: their cast, or the scales of the next ones."""
        assert self.recipe is not None
        linears = self._linear_parameters()
        casts = [ElementwisePass("copy", self.recipe.weight_step * linears)] if self.recipe.weight_step else []
        scales = ElementwisePass("norm", OP_BYTES["norm"] * (linears // self.parallel.shards))
        return [*casts, *([scales] if self.recipe.shards else [])]

    def collective(self, group: Cluster, kind: Kind, nbytes: int) -> tuple[str, float]:
        """Cost model and seconds of a collective among replicas."""
        communication = Communication(group, self.costs.profile)
        seconds, _, _, between = communication.collective(kind, float(nbytes), group.num_gpus, group.num_nodes)
        return "collective between nodes" if between else "collective", seconds

    def _sent(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> float:
        """Bytes that the busiest GPU sends: among tensor-parallel ranks, in attention, to other stages, to replicas."""
        tp, stages, chunks = self.parallel.tp, self.parallel.pp, self.parallel.virtual_pp
        layers = self._most_layers
        hops = 0 if stages == 1 else 2 * chunks - (stages == 2)
        most = 0.0
        for replica, found in zip(batch, attended, strict=True):
            total = 0.0
            for documents, one in zip(replica, found, strict=True):
                total += layers * (one.sent + self._layer(self.tokens(documents))[1])
                total += hops * BF16 * self.tokens(documents) // tp * self.model.hidden
            most = max(most, total)
        cut, held = self.parallel, self.held
        parameters = max(map(self._trained, range(stages)))
        if self.sharded:  # gathered forward and backward, scattered once, in every microbatch
            each, whole = 1 - 1 / cut.shards, max(map(self._parameters, range(stages)))
            low = self._linear_parameters() if self.recipe and self.recipe.shards else 0
            gathered = 2 * (BF16 * (whole - low) + FP8 * low)
            return most + each * cut.microbatches * (gathered + FP32 * parameters)
        parted = cut.sharding != "none" and cut.optimizer
        experts = max(self._parameters(stage, "experts") for stage in range(stages))
        for own, replicas in ((parameters, cut.replicas), (experts, cut.expert_replicas)):
            gradients = (held.gradient or held.made_gradient) * own
            summed = gradients * (cut.gradients != "none") * (1 if parted else 2)
            most += (1 - 1 / replicas) * (summed + held.weight * own * parted)
        return most

    def _flops(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> float:
        total, products_of_token = 0.0, self.model.products()
        for replica, found in zip(batch, attended, strict=True):
            for documents, one in zip(replica, found, strict=True):
                ops = Ops(self.model, 1, sum(documents))
                heads, _, keys, values = self.model.kernel_shape
                attention = 2.0 * one.area * heads * (4 * keys + 3 * values)
                products, lora = 2.0 * products_of_token * sum(documents), self.framework.lora
                passes = 2 if lora else 3  # frozen weights have no gradients
                adapters = 6.0 * lora.parameters(self.model, 1) * sum(documents) if lora else 0.0
                layer = passes * products + adapters + attention
                total += self.model.layers * layer + passes * flops(ops.loss())
        return total


def _ops(program: Program) -> list[Op | str]:
    """Ops of both passes, attention by its name; copies to the host aside."""
    whats = (node.what for node in (*program.forward, *program.backward))
    return [what for what in whats if what is not None and not isinstance(what, HostCopy)]


def _with_exchange(code: LayerCode, exchange: int, kept: int) -> LayerCode:
    """A layer whose attention allocates so many bytes beyond its inputs and output, and keeps so many."""

    def more(node: Node) -> Node:
        if node.what == "fwd":
            return replace(node, makes={**node.makes, "exchange": exchange, "beside": kept})
        if node.what == "bwd":
            return replace(node, reads=(*node.reads, "beside"), makes={**node.makes, "dexchange": exchange})
        return node

    if not (exchange or kept):
        return code
    forward, backward = (tuple(map(more, side)) for side in (code.forward, code.backward))
    return LayerCode(forward=forward, backward=backward, kept=code.kept | {"beside"})


def deal(sequences: Sequence[tuple[int, ...]], parallel: Parallel) -> Batch:
    """Sequences to replicas and microbatches in order: each microbatch of a replica gets equally many.

    Raises:
        InfeasibleError: they do not divide.
    """
    places = parallel.dp * parallel.microbatches
    if len(sequences) % places:
        raise InfeasibleError(
            f"microbatches: expected {len(sequences)} sequences to divide into dp x microbatches = {parallel.dp} x "
            f"{parallel.microbatches} = {places} parts"
        )
    each = len(sequences) // places
    parts = [sum(sequences[i * each : (i + 1) * each], ()) for i in range(places)]
    return [parts[replica :: parallel.dp] for replica in range(parallel.dp)]


def cut(documents: Sequence[int], sequence: int) -> list[tuple[int, ...]]:
    """Documents one after the other in sequences of so many tokens; what overflows opens the next one."""
    edges = np.union1d(np.cumsum(documents), np.arange(sequence, sum(documents) + 1, sequence))
    lens, which = np.diff(edges, prepend=0), (edges - 1) // sequence
    return [tuple(lens[which == i].tolist()) for i in range(int(which[-1]) + 1)]
