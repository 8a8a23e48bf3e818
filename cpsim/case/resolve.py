"""What the fields of a scenario stand for: its workload, cluster and model."""

from __future__ import annotations

from dataclasses import replace

from cpsim.case.cluster import Cluster, load_cluster
from cpsim.case.documents import as_taken, draw_documents
from cpsim.case.model import MODELS, Lora, Model, model_from
from cpsim.case.parallel import Parallel, Recompute, Sharding
from cpsim.case.scenario import DocumentDraw, LoraSection, ParallelSection, Scenario
from cpsim.case.sparse import read_sparse
from cpsim.case.workload import Workload
from cpsim.errors import ScenarioError
from cpsim.masks.names import MASK_NAMES


def workload_of(scenario: Scenario) -> Workload:
    """The attention problem, its documents drawn, in the order in which the strategy takes them.

    Raises:
        ScenarioError: the bounds of the draw make no sense, or there is no such order.
    """
    match scenario.documents:
        case DocumentDraw() as draw:
            documents = draw_documents(
                draw.distribution,
                scenario.num_tokens,
                draw.seed,
                max_length=draw.max_length,
                min_length=draw.min_length,
            )
        case None:
            documents = (scenario.num_tokens,)
        case lengths:
            documents = lengths
    if scenario.model is None or scenario.part is not None:  # of a step, each microbatch has an order of its own
        documents = as_taken(documents, scenario.mask_name, scenario.strategy, scenario.knobs)
    heads, kv_heads, head_dim = scenario.heads, scenario.kv_heads, scenario.head_dim
    value_dim, sparse = scenario.value_dim or 0, None if scenario.sparse is None else read_sparse(scenario.sparse)
    if scenario.model is not None:
        model = model_of(scenario)
        heads, kv_heads, head_dim, values = model.kernel_shape
        value_dim, sparse = values if model.value_dim or model.absorbed else 0, model.sparse
    return Workload(
        documents=documents,
        mask=scenario.mask_name,
        mask_options=scenario.mask_options,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=scenario.dtype,
        cached=scenario.cached or 0,
        sinks=bool(scenario.sinks),
        sparse=sparse,
    )


def cluster_of(scenario: Scenario) -> Cluster:
    """The cluster with the scenario's number of GPUs in use.

    Raises:
        ScenarioError: neither a preset nor a valid file, or the GPUs do not fill its nodes.
    """
    return load_cluster(scenario.cluster).with_gpus(scenario.gpus)


def model_of(scenario: Scenario) -> Model:
    """The model of a training step or layer, with how the scenario says that its queries choose their keys."""
    assert scenario.model is not None
    found = (
        MODELS[scenario.model]
        if isinstance(scenario.model, str)
        else model_from(scenario.model.model_dump(exclude_none=True))
    )
    return found if scenario.sparse is None else replace(found, sparse=read_sparse(scenario.sparse))


def lora_of(scenario: Scenario) -> Lora | None:
    """Adapters of a training step; None where all weights are trained."""
    given = scenario.trainable
    if not isinstance(given, LoraSection):
        return None
    found = Lora(rank=given.lora, drops=given.dropout > 0)
    return replace(found, modules=given.modules) if given.modules else found


def parallel_of(
    section: ParallelSection | None,
    gpus: int,
    sequences: int,
    recompute: Recompute = "none",
    sharding: Sharding = "zero1",
    loss_chunks: int = 1,
) -> Parallel:
    """All degrees of a training step; those left out are 1.

    Args:
        section: what the scenario says.
        gpus: of the step; data parallelism takes what the other degrees leave.
        sequences: of the step, `batch` or one for every microbatch where microbatches are left out.
        recompute, sharding, loss_chunks: where nothing is said of them.

    Raises:
        ScenarioError: the degrees do not multiply to the GPUs.
    """
    given = section or ParallelSection()
    tp, pp, cp = given.tp or 1, given.pp or 1, given.cp or 1
    dp = given.dp or max(1, gpus // (tp * pp * cp))
    if tp * pp * cp * dp != gpus:
        raise ScenarioError(f"parallel: expected tp x pp x cp x dp = {gpus} GPUs, got {tp} x {pp} x {cp} x {dp}")
    return Parallel(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        microbatches=given.microbatches or max(1, sequences // (dp * (given.batch or 1))),
        recompute=given.recompute or recompute,
        schedule=given.schedule,
        gradients=given.gradients,
        optimizer=given.optimizer,
        sharding=given.sharding or sharding,
        replicate=given.replicate,
        loss_chunks=given.loss_chunks or loss_chunks,
        batch=given.batch,
        ep=given.ep or 1,
        virtual_pp=given.virtual_pp or 1,
        layers_first=given.layers_first,
        layers_last=given.layers_last,
        layout=given.layout,
        embedding_as_layer=bool(given.embedding_as_layer),
        loss_as_layer=bool(given.loss_as_layer),
        tp_overlap=bool(given.tp_overlap),
        ep_overlap=bool(given.ep_overlap),
        dispatcher=given.dispatcher or "alltoall",
        cuda_graphs=given.cuda_graphs or "none",
        mlp_chunks=given.mlp_chunks or 1,
        loss_fusion=given.loss_fusion,
    )


def flops_of(scenario: Scenario, workload: Workload) -> float:
    """Model FLOP of all passes on all GPUs: attention, the matrix products of a layer, or all of a step."""
    if scenario.is_step:
        return _step_flops(scenario, workload)
    total = sum(workload.flops(pass_) for pass_ in scenario.passes)
    if scenario.part is None:
        return total
    products = model_of(scenario).products()
    return total + sum(2 if pass_ == "fwd" else 4 for pass_ in scenario.passes) * products * scenario.num_tokens


def _step_flops(scenario: Scenario, workload: Workload) -> float:
    model, tokens = model_of(scenario), scenario.num_tokens
    parallel = parallel_of(scenario.parallel, scenario.gpus, tokens // (scenario.context or tokens))
    context = scenario.context or tokens // (parallel.dp * parallel.microbatches * (parallel.batch or 1))
    if MASK_NAMES[scenario.mask_name].documents == "ignored":  # sequences do not see each other
        alone = replace(workload, documents=(context,))
        attention = tokens // context * sum(alone.flops(pass_) for pass_ in scenario.passes)
    else:
        alone = workload
        attention = sum(workload.flops(pass_) for pass_ in scenario.passes)
    if model.window:
        whole = sum(length * (length + 1) / 2 for length in alone.documents)
        attention *= sum(map(model.pairs, alone.documents)) / whole
    lora = lora_of(scenario)
    each = 4.0 if lora else 6.0  # frozen weights have no gradients
    adapters = 6.0 * lora.parameters(model, 1) * tokens if lora else 0.0
    layers = model.layers * (attention + each * model.products() * tokens + adapters)
    return layers + each * model.hidden * model.vocab * tokens


def notes_of(scenario: Scenario) -> tuple[str, ...]:
    """Inputs of a scenario that make no difference, in words."""
    name = scenario.mask_name
    if scenario.documents is None or MASK_NAMES[name].documents != "ignored":
        return ()
    instead = f"; see mask {name}_document" if f"{name}_document" in MASK_NAMES else ""
    return (f"documents: ignored, since mask {name} reaches across them{instead}",)
