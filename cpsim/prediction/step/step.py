"""A whole training step: every microbatch on every stage of every replica, from prices of ops to time and memory.

Layers of a stage are alike and so are GPUs of a tensor-parallel group, so that each is priced once; microbatches differ
by their documents, and who waits for whom is simulated. Context-parallel ranks wait for each other in every layer,
pipeline stages by microbatch, replicas at the end of the step, where gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.model import Model
from cpsim.case.parallel import Parallel
from cpsim.errors import InfeasibleError, OutOfMemoryError
from cpsim.models.network.collective import transfer_seconds
from cpsim.models.network.communication import Communication
from cpsim.prediction.step.attention import Attended, Attention
from cpsim.prediction.step.costs import PARTS, Costs, Parts, stacked
from cpsim.prediction.step.layer import BF16, FP32, ElementwisePass, Ops, flops, sent_bytes
from cpsim.prediction.step.memory import StageMemory, stage_memory
from cpsim.prediction.step.pipeline import Pipeline, one_f_one_b, same_phase
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
        """On the fullest GPU."""
        return max(stage.total for stage in self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A model on a cluster, cut in one way."""

    model: Model
    parallel: Parallel
    cluster: Cluster
    costs: Costs
    attention: Attention

    def memory(self, batch: Batch, attended: Sequence[Sequence[Attended]] = ()) -> tuple[StageMemory, ...]:
        """Peak memory of every stage, for the largest microbatch; without attention's own where that is not known."""
        tokens = max(self._tokens(documents) for replica in batch for documents in replica)
        ends = [(one.exchange, one.kept) for replica in attended for one in replica] or [(0, 0)]
        exchange, kept = (max(sizes) for sizes in zip(*ends, strict=True))
        stages = range(self.parallel.pp)
        return tuple(stage_memory(self.model, self.parallel, tokens, stage, exchange, kept) for stage in stages)

    def simulate(self, batch: Batch, attended: Sequence[Sequence[Attended]] | None = None) -> Step:
        """Runs one step.

        Args:
            batch: as many replicas and microbatches as `parallel` says.
            attended: attention of every microbatch, where a planner has placed it; None is that of the strategy.

        Raises:
            InfeasibleError: it does not fit into memory (``OutOfMemoryError``), or attention cannot run like this.
        """
        self._check_memory(self.memory(batch))
        if attended is None:
            attended = [self.attention.of(replica) for replica in batch]
        memory = self.memory(batch, attended)
        self._check_memory(memory)
        seconds = self._passes(batch, attended)
        tokens = max(self._tokens(documents) for replica in batch for documents in replica)
        hop_s, ops = self._hop_seconds(tokens), Ops(self.model, self.parallel.tp, tokens)
        run = one_f_one_b if self.parallel.schedule == "1f1b" else same_phase
        pipeline = run(seconds.sum(axis=-1), hop_s)
        end, last = self._updates(pipeline, seconds)
        parts = self._path(pipeline, seconds, hop_s) + last
        work = seconds.sum(axis=(0, 2, 3, 4))
        return Step(
            time_s=end,
            parts=dict(zip(PARTS, parts.tolist(), strict=True)),
            busy=dict(zip(PARTS, (seconds.sum(axis=(0, 2)).mean(axis=(0, 1)) + last).tolist(), strict=True)),
            memory=memory,
            flops=self._flops(batch, attended),
            sent=self._sent(batch, attended),
            imbalance=float(work.max() / work.mean()),
            notes=tuple(
                dict.fromkeys(
                    (
                        *self.costs.notes(ops.forward() + ops.backward() + ops.loss()),
                        *(note for replica in attended for one in replica for note in one.notes),
                    )
                )
            ),
        )

    def _tokens(self, documents: Sequence[int]) -> int:
        """Tokens of a microbatch on a context-parallel rank."""
        return -(-sum(documents) // self.parallel.cp)

    def _check_memory(self, memory: Sequence[StageMemory]) -> None:
        stage = max(range(len(memory)), key=lambda s: memory[s].total)
        needed, gpu = memory[stage].total, self.cluster.gpu
        if needed > gpu.memory_bytes:
            raise OutOfMemoryError(
                f"out of memory: stage {stage} needs {needed / 1e9:.1f} GB on one GPU "
                f"({memory[stage].activations / 1e9:.1f} of them activations), "
                f"{gpu.name} has {gpu.memory_bytes / 1e9:.1f} GB"
            )

    def _passes(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> Floats:
        """Seconds of every pass by cost model, ``[2, R, M, P, len(PARTS)]``."""
        stages, known = self.parallel.pp, dict[int, list[Floats]]()
        seconds = np.zeros((2, len(batch), len(batch[0]), stages, len(PARTS)))
        for r, replica in enumerate(batch):
            for m, documents in enumerate(replica):
                tokens = self._tokens(documents)
                if tokens not in known:
                    known[tokens] = self._besides(tokens)
                layer, first, last = known[tokens]
                forward, backward = stacked(attended[r][m].parts)
                again = forward if self.parallel.recompute == "full" else 0.0
                attention = np.stack([forward, backward + again])
                seconds[:, r, m] = (self.model.layers // stages * (layer + attention))[:, None]
                seconds[:, r, m, 0] += first
                seconds[:, r, m, -1] += last
        return seconds

    def _besides(self, tokens: int) -> list[Floats]:
        """Seconds ``[2, len(PARTS)]`` of a layer without attention, and of what first and last stage add."""
        ops = Ops(self.model, self.parallel.tp, tokens)
        pairs = (
            (ops.forward(), ops.again(self.parallel.recompute) + ops.backward()),
            (ops.embedding(), ops.embedding_backward()),
            (ops.loss(), ops.loss_backward()),
        )
        return [stacked(map(self.costs.seconds, pair)) for pair in pairs]

    def _hop_seconds(self, tokens: int) -> float:
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

    def _updates(self, pipeline: Pipeline, seconds: Floats) -> tuple[float, Floats]:
        """End of the step, and what follows the last backward pass by cost model, of the stage that ends last."""
        ends = []
        for stage in range(self.parallel.pp):
            backward = float(seconds[1, :, -1, stage].sum(axis=-1).max())
            update = self._update(stage, backward)
            ends.append((float(pipeline.end_s[:, stage].max()) + float(update.sum()), stage, update))
        end, _, update = max(ends, key=lambda one: one[:2])
        return end, update - self._ahead(end, pipeline, update)

    def _ahead(self, end: float, pipeline: Pipeline, update: Floats) -> Floats:
        """What of the update other stages hide, so that parts of the path sum to the time."""
        hidden = pipeline.makespan_s + float(update.sum()) - end
        return np.asarray(update * (hidden / update.sum()) if update.sum() else update)

    def _update(self, stage: int, backward_s: float) -> Floats:
        """Seconds of gradients' sums and of the optimizer on a stage, ``[len(PARTS)]``."""
        memory = stage_memory(self.model, self.parallel, self.parallel.tp, stage)
        parameters, replicas = memory.gradients // FP32, self.parallel.replicas
        parts: list[Parts] = []
        group = self.parallel.group(self.cluster, replicas)
        summing = Kind.REDUCE_SCATTER if self.parallel.optimizer else Kind.ALL_REDUCE
        if self.parallel.gradients != "none":
            where, exposed = self.collective(group, summing, memory.gradients)
            if self.parallel.gradients == "overlapped":
                exposed = max(exposed - backward_s, exposed / (self.model.layers // self.parallel.pp))
            parts.append({where: exposed})
        if self.parallel.optimizer:
            mine = -(-parameters // replicas)
            ops = [ElementwisePass(kind, OP_BYTES[kind] * mine) for kind in ("norm", "adam")]
            where, exposed = self.collective(group, Kind.ALL_GATHER, memory.weights)
            parts += [self.costs.seconds(ops), {where: exposed}]
        return np.asarray(stacked(parts).sum(axis=0))

    def collective(self, group: Cluster, kind: Kind, nbytes: int) -> tuple[str, float]:
        """Cost model and seconds of a collective among replicas."""
        communication = Communication(group, self.costs.profile)
        seconds, _, _, between = communication.collective(kind, float(nbytes), group.num_gpus, group.num_nodes)
        return "collective between nodes" if between else "collective", seconds

    def _sent(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> float:
        """Bytes that the busiest GPU sends: among tensor-parallel ranks, in attention, to other stages, to replicas."""
        layers, tp, stages = self.model.layers // self.parallel.pp, self.parallel.tp, self.parallel.pp
        hops = 0 if stages == 1 else 1 if stages == 2 else 2
        most = 0.0
        for replica, found in zip(batch, attended, strict=True):
            total = 0.0
            for documents, one in zip(replica, found, strict=True):
                ops = Ops(self.model, tp, self._tokens(documents))
                layer = ops.forward() + ops.again(self.parallel.recompute) + ops.backward()
                total += layers * (one.sent + sent_bytes(layer, tp))
                total += hops * BF16 * self._tokens(documents) // tp * self.model.hidden
            most = max(most, total)
        memory, share = stage_memory(self.model, self.parallel, tp, 0), 1 - 1 / self.parallel.replicas
        summed = memory.gradients * (self.parallel.gradients != "none") * (1 if self.parallel.optimizer else 2)
        return most + share * (summed + memory.weights * self.parallel.optimizer)

    def _flops(self, batch: Batch, attended: Sequence[Sequence[Attended]]) -> float:
        total = 0.0
        for replica, found in zip(batch, attended, strict=True):
            for documents, one in zip(replica, found, strict=True):
                ops = Ops(self.model, 1, sum(documents))
                pairs = 4.0 * one.area * self.model.heads * self.model.head_dim
                total += self.model.layers * (3 * flops(ops.forward()) + 3.5 * pairs) + 3 * flops(ops.loss())
        return total


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
