"""DistCA's 34B runs on 256 H200, system by system: ``python -m studies distca``.

As measured: 34B, TP 8, one pipeline stage, FlashAttention-2, MLP recomputed; forward and backward of 30 iterations of
ProLong, without gradients' sums and optimizer. Three systems have the same sequences: ``distca`` with its released
scheduler in two nano-batches; ``wlb``, documents packed by work and each cut over its context-parallel group; and
``per_sequence``, sequences in order, each replica's cut as one buffer. Groups of both gather keys and values first.

The original list of document lengths is not shipped: another one with the published histogram stands in for it, so that
single iterations differ from the measured ones, and only means can be compared. ``read_lengths`` reads the original.

Reference: DistCA (arXiv 2510.18121), sections 4 and 6; hao-ai-lab/DistCA at 2afd219, records of experiments.
Differs: hosts take no longer than for layers of Megatron-Core, and the allocator takes nothing; memory of ``distca`` is
not checked, though no exchange needs more than DistCA's buffers of 2 GB (1.3 GB at most); documents are not padded to
lengths that kernels like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import load_cluster
from cpsim.case.files import parse_json, read_text
from cpsim.case.load import scenario_from
from cpsim.case.parallel import PipelineSchedule, Recompute
from cpsim.errors import CpsimError, ScenarioError
from cpsim.masks.slices import Ints
from cpsim.models.profile import load_profile
from cpsim.prediction.step.attention import PASSES, Attended
from cpsim.prediction.step.frameworks import Sizes, megatron_layer
from cpsim.prediction.step.hosts import layer_seconds
from cpsim.prediction.step.layer import BF16, FP32, ElementwisePass, Ops
from cpsim.prediction.step.placed import Placed, gathered, ping_pong
from cpsim.prediction.step.program import LayerCode, Node, Nodes
from cpsim.prediction.step.step import Step, StepModel
from cpsim.prediction.steps import StepCase
from cpsim.runtime.processes import Progress, mapped
from cpsim.schedule.schedule import Kind
from cpsim.schedule.transformer import OP_BYTES
from cpsim.strategies.distca.batches import Packed, iteration, sample
from cpsim.strategies.distca.greedy import released
from cpsim.strategies.distca.packing import BREAKPOINTS, head_tail, per_sequence, wlb_limit, wlb_pack
from cpsim.strategies.distca.tasks import Dispatch, Tasks, TokenBytes, copies, dispatch
from cpsim.units import MS_PER_S
from studies import published_lines

FOLDER = Path(__file__).parent

Floats = NDArray[np.float64]
System = Literal["distca", "wlb", "per_sequence"]
Baseline = Literal["wlb", "per_sequence"]

CLUSTER: Final = "dgx-h200"
GPUS: Final = 256
TP: Final = 8
MODEL: Final = "llama-34b"
KERNEL: Final = "fa2"
DATASET: Final = "prolong"
ITERATIONS: Final = 30
TOLERANCE: Final = 0.05
"""Of the scheduler: the default of its code."""
COPIED: Final[Mapping[Baseline, NDArray[np.int64]]] = {
    "wlb": np.array([[3, 2, 2], [1, 4, 4]]),
    "per_sequence": np.array([[2, 0, 2], [3, 4, 4]]),
}
"""How often each system reads or writes, around its kernels forward and backward, keys and values of the group, those
that its own queries see, and its queries (baseline/wlbllm_original/wlbllm/per_doc_cp_attn.py and per_seq_cp_attn.py).
``wlb`` copies what it gathers out of one buffer and fills another with random numbers, as its shuffle is off, copies
the keys of every document, and adds up their gradients one document at a time; ``per_sequence`` puts keys in order and
their gradients back. Both clear gradients, and join two chunks of queries."""
GATES: Final = (10, 2), (26, 4)
"""Bytes that SwiGLU reads and writes of an element of its output op by op, and kernels that do, by pass (megatron/core/
transformer/mlp.py at 0.12.1; ``bias_activation_fusion`` is not set)."""
UNFUSED: Final = tuple((each, OP_BYTES[kind]) for (each, _), kind in zip(GATES, ("swiglu", "swiglu_bwd"), strict=True))
"""Bytes of SwiGLU op by op, and fused, by pass."""
LOGITS: Final = 38, 14
"""The same of the cross entropy and a logit: cast, maximum, difference, exponentials, sum and quotient in fp32, and
their gradient (tensor_parallel/cross_entropy.py; ``cross_entropy_loss_fusion`` is not set)."""
RATIO: Final = "best wlb / distca"
BARS: Final = {"distca": 0.08, "wlb": 0.08, RATIO: 0.04}
"""Mean errors that predictions are to stay within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run."""

    context: int
    """Tokens of a sequence, MaxDocLen."""
    sequences: int
    """Of an iteration."""
    system: System
    cp: int
    published_s: tuple[float, ...]
    """Of every iteration."""
    predicted_s: tuple[float, ...] = ()
    """The same; iterations are the published ones where the list of documents is."""

    @property
    def setting(self) -> tuple[int, int]:
        """What systems are compared at: context and sequences."""
        return self.context, self.sequences

    @property
    def error(self) -> float:
        """Predicted over published mean time, less one."""
        return mean(self.predicted_s) / mean(self.published_s) - 1

    @property
    def iteration_error(self) -> float:
        """Mean over iterations of absolute errors."""
        return mean(abs(ours / theirs - 1) for ours, theirs in zip(self.predicted_s, self.published_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The best ``wlb`` over ``distca``."""

    context: int
    sequences: int
    published: float
    predicted: float
    published_cp: int
    """Of the best ``wlb``."""
    predicted_cp: int

    @property
    def error(self) -> float:
        """Predicted over published ratio, less one."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How ``distca`` runs; the defaults are what was measured."""

    tolerance: float = TOLERANCE
    """Of the mean work."""
    streams: Literal[0, 1, 2] = 2
    """Exchanges beside computation (2), after it (1), or free (0)."""
    again: bool = False
    """Whether servers attend once more before they do backward."""
    each: bool = False
    """Whether every task gets keys of its own, see ``traffic``; else a server gets a key once."""
    bandwidth: float = 1.0
    """Of exchanges, over the cluster's."""


ABLATIONS: Final = {
    "exchanges free": Choice(streams=0),
    "single stream": Choice(streams=1),
    **{f"tolerance {tolerance:g}": Choice(tolerance=tolerance) for tolerance in (0.0, 0.1, 0.2, 0.5)},
}


@cache
def published() -> tuple[Row, ...]:
    """All runs."""
    return tuple(
        Row(
            context=int(line["context"]),
            sequences=int(line["sequences"]),
            system=line["system"],  # type: ignore[arg-type]
            cp=int(line["cp"]),
            published_s=tuple(float(ms) / MS_PER_S for ms in line["times_ms"].split()),
        )
        for line in published_lines(FOLDER / "distca-34b.csv")
    )


def read_lengths(path: Path) -> Ints:
    """Document lengths of a data set in the order of its list [tokens], as in DistCA's ``dist_prolong.json``.

    Raises:
        ScenarioError: the file is no list of positive integers.
    """
    lengths = parse_json(read_text(path), str(path))
    if not isinstance(lengths, list) or not lengths or not all(type(n) is int and n > 0 for n in lengths):
        raise ScenarioError(f"{path}: expected a list of document lengths in tokens, positive integers")
    return np.array(lengths, np.int64)


def step_model(row: Row) -> StepModel:
    """34B on 256 GPUs, cut as the run has it; attention is placed by planners."""
    return cut_model(MODEL, GPUS, row.context, row.sequences, cp=row.cp)


def cut_model(
    model: str,
    gpus: int,
    context: int,
    sequences: int,
    *,
    cp: int = 1,
    pp: int = 1,
    microbatches: int = 1,
    recompute: Recompute = "mlp",
    schedule: PipelineSchedule = "1f1b",
) -> StepModel:
    """A model on some GPUs as DistCA's experiments run it; replicas take what the other degrees leave. Neither SwiGLU
    nor the cross entropy is fused, as their configuration of Megatron-Core leaves both options out.

    Raises:
        ScenarioError, InfeasibleError: the degrees do not fit.
    """
    parallel = {
        "tp": TP,
        "cp": cp,
        "pp": pp,
        "microbatches": microbatches,
        "recompute": recompute,
        "gradients": "none",
        "optimizer": False,
        "schedule": schedule,
        "loss_fusion": "none",
    }
    strategy = "none" if cp == 1 else "allgather"
    scenario = scenario_from(
        {
            "model": model,
            "context": context,
            "tokens": context * sequences,
            "gpus": gpus,
            "cluster": CLUSTER,
            "mask": "causal_document",
            "kernel": KERNEL,
            "strategy": strategy,
            "parallel": parallel,
        }
    )
    cluster = load_cluster(CLUSTER).with_gpus(gpus)
    case = StepCase(scenario, cluster, load_profile(str(cluster.profile)))
    step = case.model(case.parallel(), strategy, {})
    return replace(step, framework=replace(step.framework, layer=_op_by_op))


def _op_by_op(s: Sizes, compiled: bool) -> LayerCode:
    """Megatron-Core's layer with SwiGLU op by op: SiLU, which is kept, and a product; two products, the gradient of
    SiLU, and both gradients joined."""
    code, (forward, backward) = megatron_layer(s, compiled), GATES

    def unfused(nodes: Nodes, name: str, each: int, calls: int) -> Nodes:
        what = ElementwisePass("copy", each * s.inner // BF16)
        return tuple(replace(node, what=what, calls=calls) if name in node.makes else node for node in nodes)

    def with_silu(node: Node) -> Node:
        if "swiglu" in node.makes:
            return replace(node, makes={**node.makes, "silu": s.inner})
        return replace(node, reads=(*node.reads, "silu")) if "dgate up" in node.makes else node

    return replace(
        code,
        forward=tuple(map(with_silu, unfused(code.forward, "swiglu", *forward))),
        backward=tuple(map(with_silu, unfused(code.backward, "dgate up", *backward))),
        kept=code.kept | {"silu"},
    )


def gathered_attention(step: StepModel, tasks: Tasks, system: Baseline, *, again: bool = False) -> Attended:
    """Attention of a layer of one replica, which gathers K, then V, and scatters their gradients likewise; `again`, if
    the backward pass begins with all that once more."""
    attention, cp = step.attention, step.parallel.cp
    placed = _placed(tasks, cp)
    nbytes = BF16 * int(tasks.tokens.sum()) * step.model.kv_heads // TP * step.model.head_dim
    talks = [step.collective(attention.cluster, kind, nbytes) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)]
    exchange = talks[0][0], np.array([2 * seconds for _, seconds in talks])
    copies = _copies_s(step, tasks, system)
    costs = exchange, attention.slowest, copies
    return gathered(placed, attention.profile, attention.kernel, step.model, TP, *costs, again=again)


def _copies_s(step: StepModel, tasks: Tasks, system: Baseline) -> Floats:
    """Seconds of copies around the kernels of a layer, forward and backward, ``[2]``; see ``COPIED``."""
    sizes, of_task = token_bytes(step), int(tasks.server.max()) + 1
    seen = int(np.bincount(tasks.server, tasks.kv).max())
    sums = 2 * len(tasks) // of_task if system == "wlb" else 0  # of gradients of keys and of values, each a kernel
    group = int(tasks.tokens.sum())
    each = np.array([group * sizes.kv, seen * sizes.kv, group // of_task * sizes.q])
    small = float(step.costs.swept("copy", 0)) * np.array([0, sums])
    return step.costs.swept("copy", COPIED[system] @ each) + small


def token_bytes(step: StepModel) -> TokenBytes:
    """Of what attention of a token needs, on one rank."""
    head = BF16 * step.model.head_dim
    heads, kv_heads = step.model.heads // TP, step.model.kv_heads // TP
    return TokenBytes(q=head * heads, kv=2 * head * kv_heads, lse=FP32 * heads)


def baseline_seconds(step: StepModel, system: System, nano_batches: Sequence[Ints]) -> float:
    """One iteration of ``wlb`` or ``per_sequence``, which have all sequences in one microbatch.

    Args:
        step: the run.
        system: how documents reach replicas and ranks.
        nano_batches: documents of each [tokens]; replicas of ``per_sequence`` divide them evenly.
    """
    documents, dp = np.concatenate(nano_batches), step.parallel.dp
    if system == "wlb":
        return wlb_step(step, documents, BREAKPOINTS["34b"]).time_s
    group = (np.cumsum(documents) - 1) * dp // int(documents.sum())
    return _gathered_step(step, documents, group, "per_sequence").time_s


def wlb_step(step: StepModel, documents: Ints, breakpoint_: int, *, again: bool = False) -> Step:
    """One iteration of ``wlb``; where there are several microbatches, documents are packed into all of them at once, by
    work alone (see ``wlb_limit``).

    Args:
        step: the run.
        documents: of the iteration [tokens].
        breakpoint_: of the model, see ``BREAKPOINTS``.
        again: see ``gathered_attention``.
    """
    dp, microbatches = step.parallel.dp, step.parallel.microbatches
    limit = wlb_limit(int(documents.sum()) // microbatches // 2, 1, dp, microbatches)
    group = wlb_pack(documents, dp * microbatches, limit, breakpoint_)
    return _gathered_step(step, documents, group, "wlb", again=again)


def _gathered_step(step: StepModel, documents: Ints, group: Ints, system: Baseline, *, again: bool = False) -> Step:
    """An iteration whose documents are in groups: replica by replica of a microbatch, microbatch by microbatch."""
    parallel, place = step.parallel, {"wlb": head_tail, "per_sequence": per_sequence}[system]
    parts = [documents[group == i] for i in range(parallel.dp * parallel.microbatches)]
    batch = [parts[replica :: parallel.dp] for replica in range(parallel.dp)]
    attended = [
        [gathered_attention(step, place(part, parallel.cp), system, again=again) for part in replica]
        for replica in batch
    ]
    return step.simulate([[tuple(part.tolist()) for part in replica] for replica in batch], attended)


def distca_seconds(step: StepModel, nano_batches: Sequence[Ints], choice: Choice) -> float:
    """One iteration of ``distca`` without pipeline: all replicas serve each other's attention.

    Args:
        step: the run; every replica is a server.
        nano_batches: documents of both [tokens].
        choice: how it runs.
    """
    return pooled_seconds(step, [nano_batches], choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """One iteration of ``distca``."""

    time_s: float
    buffer_bytes: int = 0
    """Of the fullest of the buffers that a GPU sends from or receives into."""
    served_bytes: int = 0
    """That the fullest server holds in a backward pass beside these buffers: what it received, gradients of that, and
    those of keys and values for every query head, which flash-attn 2 then adds up."""


def pooled_seconds(step: StepModel, microbatches: Sequence[Sequence[Ints]], choice: Choice) -> float:
    """Seconds of ``pooled``."""
    return pooled(step, microbatches, choice).time_s


def pooled(step: StepModel, microbatches: Sequence[Sequence[Ints]], choice: Choice) -> Pooled:
    """One iteration of ``distca``: in every tick of a same-phase pipeline all stages of all replicas, idle ones too,
    serve the attention of the microbatches that are on the way.

    Documents of a tick lie on the servers of the stages that have a microbatch, the newest one's on the first. After a
    tick neighbours of a pipeline send activations and their gradients at once, in the first and the last ticks either.

    Args:
        step: the run; every stage of every replica is a server.
        microbatches: documents of both nano-batches of each, of all replicas [tokens].
        choice: how it runs.

    Reference: DistCA (arXiv 2510.18121), section 4.4 and figure 8; d2/runtime/megatron/forward_backward_func.py at
    031ba42.
    """
    parallel, parts = step.parallel, list[Pooled]()
    tokens = int(microbatches[0][0].sum()) // parallel.dp
    ops = Ops(step.model, TP, tokens)
    ends = [sum(step.costs.seconds(end()).values()) for end in (ops.embedding, ops.embedding_backward)]
    last = [sum(step.costs.seconds(end()).values()) for end in (ops.loss, ops.loss_backward)]
    logits = tokens * step.model.vocab // TP
    fused = (OP_BYTES[kind] for kind in ("cross_entropy", "cross_entropy_bwd"))
    last += [_swept(step, (each - least) * logits) for each, least in zip(LOGITS, fused, strict=True)]
    end = len(microbatches[0]) * (sum(ends + last) if parallel.pp == 1 else max(sum(ends), sum(last)))
    layers = step.model.layers // parallel.pp
    for tick in range(len(microbatches) + parallel.pp - 1):
        window = microbatches[max(0, tick - parallel.pp + 1) : tick + 1][::-1]
        nano_batches = [np.concatenate(nano) for nano in zip(*window, strict=True)]
        parts.append(_served_layers(step, ops, layers, nano_batches, parallel.dp * len(window), choice))
    hops = len(microbatches) + 2 * (parallel.pp - 1) - 1 if parallel.pp > 1 else 0
    return Pooled(
        time_s=sum(one.time_s + end for one in parts) + hops * step.hop_seconds(2 * tokens),
        buffer_bytes=max(one.buffer_bytes for one in parts),
        served_bytes=max(one.served_bytes for one in parts),
    )


def _served_layers(
    step: StepModel, ops: Ops, layers: int, nano_batches: Sequence[Ints], homes: int, choice: Choice
) -> Pooled:
    """Layers, forward and backward, whose attention all servers share; documents lie on `homes` of them.

    An exchange takes as long as the busiest server's NIC sends or receives, as the cluster has it, and then copies what
    ranks keep for themselves. No pass is over before its host has launched the layers of both nano-batches.
    """
    model, attention, costs = step.model, step.attention, step.costs
    servers, sizes = step.parallel.dp * step.parallel.pp, token_bytes(step)
    plans = [released(documents, servers, sizes, choice.tolerance, homes=homes) for documents in nano_batches]
    sent = [dispatch(plan, servers, sizes, each=choice.each) for plan in plans]
    copied = np.array([copied_bytes(one) for one in sent])
    copied[:, 0, 1] += [summed_bytes(plan, servers, sizes, each=choice.each) for plan in plans]
    home, served = np.moveaxis(costs.swept("copy", copied), 0, -2)
    gates = [_swept(step, (each - least) * ops.tokens * model.linears(TP)["down"][0]) for each, least in UNFUSED]
    gates[1] += gates[0] * (step.parallel.recompute == "mlp")
    slowest = np.array([[[attention.slowest[pass_]]] for pass_ in PASSES])
    attends = np.stack([_placed(p, servers).seconds(attention.profile, KERNEL, model, TP) for p in plans], axis=1)
    busiest = (attends * slowest + served).max(axis=-1)
    busiest[1] += choice.again * busiest[0]
    fabric = step.parallel.group(step.cluster, servers).fabric
    assert fabric is not None
    rate = fabric.uplink_bandwidth_bytes_per_s * choice.bandwidth
    exchanges = fabric.latency_s + np.stack([one.busiest() for one in sent]) / rate
    exchanges += costs.swept("copy", 2 * np.stack([one.kept() for one in sent]))
    beside = exchanges if choice.streams == 2 else np.zeros_like(exchanges)
    where, packs = "collective between nodes", home.max(axis=-1) + np.array(gates)[:, None]
    passes = ping_pong(ops, costs, step.parallel.recompute, busiest, beside, where, packs, layers)
    hosts = layer_seconds(costs.profile.host, f"{step.framework.host} eager", step.parallel) or (0.0, 0.0)
    after = layers * float(exchanges.sum()) if choice.streams == 1 else 0.0
    launched = [layers * len(plans) * host for host in hosts]
    time_s = after + sum(max(float(pass_.sum()), host) for pass_, host in zip(passes, launched, strict=True))
    held = [held_bytes(plan, servers, sizes, model.heads // model.kv_heads) for plan in plans]
    return Pooled(time_s=time_s, buffer_bytes=max(one.fullest() for one in sent), served_bytes=max(held))


def _swept(step: StepModel, nbytes: int) -> float:
    return float(step.costs.swept("copy", nbytes))


def held_bytes(tasks: Tasks, num_servers: int, sizes: TokenBytes, group: int) -> int:
    """See ``Pooled.served_bytes``; `group` is query heads of a key-value head."""
    queries = np.bincount(tasks.server, tasks.tokens, num_servers)
    keys = np.bincount(tasks.server, tasks.kv, num_servers)
    return int(((2 * (3 * sizes.q + sizes.lse) + sizes.q) * queries + (2 + group) * sizes.kv * keys).max())


def summed_bytes(tasks: Tasks, num_servers: int, sizes: TokenBytes, *, each: bool) -> Ints:
    """Bytes that homes clear and add up, ``[n]``: gradients of all their keys and values, once for each copy of the key
    that went out most often (d2/runtime/dispatch_fn.py, ``pre_all2all_layout_transfer``)."""
    tokens = np.bincount(tasks.home, tasks.tokens, num_servers).astype(np.int64)
    return 2 * copies(tasks, num_servers, each=each) * tokens * sizes.kv


def copied_bytes(sent: Dispatch) -> Floats:
    """Bytes that ranks read and write around the exchanges of a nano-batch, at home and as servers, forward and
    backward: ``[2, 2, n]``.

    Whatever is exchanged is packed and unpacked, also what a rank keeps. Servers join O and log-sum-exp first; homes
    join dO, O, log-sum-exp and Q, which servers part again (d2/runtime/attn_kernels/dispatch.py at 031ba42).
    """
    answered = sent.out.T
    out = [2 * sent.qkv + 2 * answered, 2 * sent.bundle + 6 * answered + 2 * sent.grads.T]
    back = [2 * sent.qkv + 4 * answered, 2 * sent.bundle + 6 * answered + 2 * sent.grads.T]
    return np.array([[m.sum(axis=1) for m in out], [m.sum(axis=0) for m in back]], np.float64)


def _placed(tasks: Tasks, ranks: int) -> Placed:
    return Placed(num_ranks=ranks, rank=tasks.server, q_len=tasks.tokens, kv_len=tasks.kv)


def _seconds(item: tuple[Row, Choice, Packed], iterations: int) -> tuple[float, ...]:
    """Of every iteration of one run."""
    row, choice, packed = item
    step = step_model(row)
    batches = [iteration(packed, i, row.sequences // 2) for i in range(iterations)]
    try:
        if row.system == "distca":
            return tuple(distca_seconds(step, batch, choice) for batch in batches)
        return tuple(baseline_seconds(step, row.system, batch) for batch in batches)
    except CpsimError as error:
        raise CpsimError(f"reproduce: {row.system}, {row.context} tokens, cp {row.cp}: {error}") from None


def reproduce(
    rows: Sequence[Row] | None = None,
    lengths: Ints | None = None,
    iterations: int = ITERATIONS,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Runs with their predictions.

    Args:
        rows: that are wanted; None is all.
        lengths: the original list of documents [tokens]; None takes what stands in for it.
        iterations: the first ones, that predictions and published times are of.
        jobs: processes; None uses all cores.
        progress: called with (done, total) runs.

    Raises:
        CpsimError: one cannot run, or the list has too few documents.
    """
    chosen = published() if rows is None else rows
    times = _times([(row, Choice()) for row in chosen], lengths, iterations, jobs, progress)
    return [
        replace(row, published_s=row.published_s[:iterations], predicted_s=found)
        for row, found in zip(chosen, times, strict=True)
    ]


def ablations(
    rows: Sequence[Row],
    lengths: Ints | None = None,
    iterations: int = ITERATIONS,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, list[float]]:
    """Predicted time of ``distca`` at every other choice, over that as measured, by setting in the order of rows.

    Args:
        rows: with predictions of the same list and iterations.
        lengths, iterations, jobs, progress: see ``reproduce``.
    """
    runs = [row for row in rows if row.system == "distca"]
    items = [(row, choice) for choice in ABLATIONS.values() for row in runs]
    times = iter(_times(items, lengths, iterations, jobs, progress))
    return {name: [mean(next(times)) / mean(row.predicted_s) for row in runs] for name in ABLATIONS}


def _times(
    items: Sequence[tuple[Row, Choice]],
    lengths: Ints | None,
    iterations: int,
    jobs: int | None,
    progress: Progress | None,
) -> list[tuple[float, ...]]:
    """Seconds of every iteration of every item."""
    packed = {context: sample(DATASET, context, lengths=lengths) for context in {row.context for row, _ in items}}
    given = [(row, choice, packed[row.context]) for row, choice in items]
    return mapped(partial(_seconds, iterations=iterations), given, jobs, progress)


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Of every setting that has both systems."""
    found = []
    for context, sequences in dict.fromkeys(row.setting for row in rows):
        here = [row for row in rows if row.setting == (context, sequences)]
        wlb, distca = ([row for row in here if row.system == name] for name in ("wlb", "distca"))
        if not wlb or not distca:
            continue
        theirs, ours = (min(wlb, key=lambda row: mean(getattr(row, of))) for of in ("published_s", "predicted_s"))
        found.append(
            Ratio(
                context=context,
                sequences=sequences,
                published_cp=theirs.cp,
                predicted_cp=ours.cp,
                published=mean(theirs.published_s) / mean(distca[0].published_s),
                predicted=mean(ours.predicted_s) / mean(distca[0].predicted_s),
            )
        )
    return found


def mean_error(found: Sequence[Row] | Sequence[Ratio]) -> float:
    """Mean of absolute errors."""
    return mean(abs(one.error) for one in found)


def mean_errors(rows: Sequence[Row]) -> dict[str, float]:
    """Of every system, and of the ratio of both that have a bar."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.system, []).append(row)
    of_systems, found = {name: mean_error(own) for name, own in by_name.items()}, ratios(rows)
    return of_systems | ({RATIO: mean_error(found)} if found else {})
