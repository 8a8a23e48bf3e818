"""Scenarios: the contract between prediction and reality. One small file describes one case."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cpsim.case.files import explain
from cpsim.case.model import MODELS
from cpsim.case.parallel import (
    CudaGraphs,
    Dispatcher,
    Fp8,
    Gradients,
    LossFusion,
    PipelineSchedule,
    Precision,
    Recompute,
    Sharding,
)
from cpsim.case.sparse import read_sparse, written
from cpsim.errors import cut, nearest, shown
from cpsim.masks.names import Options, read_mask

MAX_TOKENS: Final = 10**9
COMPILABLE: Final = ("torch", "flash-attn")
"""Implementations whose plain calls on one GPU can be compiled."""
Name = Annotated[str, Field(max_length=60)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class DocumentDraw(BaseModel):
    """Document lengths to draw; see ``cpsim.case.documents.draw_documents``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    distribution: Literal["pile", "prolong64k", "prolong512k", "magi", "distca_pretrain", "distca_prolong"]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    max_length: Tokens | None = None
    """Longer documents are cut to it [tokens]."""
    min_length: Tokens = 1
    """Shorter documents are padded to it [tokens]."""


Module = Literal["qkv", "proj", "gate_up", "down"]
Degree = Annotated[int, Field(ge=1, le=100_000)]


Layout = Annotated[tuple[Annotated[int, Field(ge=0, le=10_000)], ...], Field(min_length=1, max_length=10_000)]


class ParallelSection(BaseModel):
    """How a training step is cut; see ``cpsim.case.parallel``. ``advise --step`` tries what is left out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tp: Degree | None = None
    pp: Degree | None = None
    dp: Degree | None = None
    """None is what the other degrees leave."""
    cp: Degree | None = None
    microbatches: Degree | None = None
    """Microbatches of one replica; None is one for every sequence of the replica, or for every `batch` of them."""
    recompute: Recompute | None = None
    schedule: PipelineSchedule = "1f1b"
    gradients: Gradients = "overlapped"
    optimizer: bool = True
    sharding: Sharding | None = None
    """None is what the framework does."""
    replicate: Degree = 1
    loss_chunks: Degree | None = None
    """None is what the framework does."""
    virtual_pp: Degree | None = None
    ep: Degree | None = None
    """Ranks among those of dp x cp that share the experts of a layer."""
    batch: Degree | None = None
    """Sequences of a microbatch of one replica; None is what tokens, replicas, microbatches and context leave."""
    layers_first: Degree | None = None
    layers_last: Degree | None = None
    embedding_as_layer: bool | None = None
    loss_as_layer: bool | None = None
    layout: Layout | None = None
    """Layers of every virtual stage, in the order of the model; None: divided by a rule."""
    tp_overlap: bool | None = None
    """Whether tensor parallelism exchanges chunks beside matrix products of other chunks; None is no."""
    ep_overlap: bool | None = None
    """Whether experts exchange tokens beside layers of another microbatch; None is no."""
    dispatcher: Dispatcher | None = None
    """How tokens reach their experts; None is by an all-to-all."""
    cuda_graphs: CudaGraphs | None = None
    """What hosts launch as CUDA graphs; None is nothing."""
    mlp_chunks: Degree | None = None
    """Chunks in which the MLP runs; None is one."""
    loss_fusion: LossFusion | None = None
    """Kernels of the cross entropy; None is what the framework does."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Without later fields that say nothing: these words are the seed of a prediction's draws."""
        later = list(type(self).model_fields)
        later = later[later.index("virtual_pp") :]
        silent = {"mlp_chunks": (None, 1)}
        said = super().__repr_args__()
        return [(name, value) for name, value in said if name not in later or value not in silent.get(name, (None,))]

    @field_validator("layout", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class LoraSection(BaseModel):
    """Low-rank adapters that are trained in place of the weights; see ``cpsim.case.model.Lora``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lora: Annotated[int, Field(ge=1, le=4096)]
    """Rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    modules: tuple[Module, ...] | None = None
    """Linear layers that have an adapter; None is all of a layer."""

    @field_validator("modules", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if isinstance(value, list) and (not value or len(set(map(str, value))) < len(value)):
            raise ValueError(
                f"expected different linear layers, at least one, got {shown(value)}; leave it out for all"
            )
        return tuple(value) if isinstance(value, list) else value


MAX_ROWS: Final = 100_000
"""Of a knob that is a table."""


class RecurrentSection(BaseModel):
    """Layers with a state instead of keys; see ``cpsim.case.model.Recurrent``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["gated_delta", "mamba2", "kda"]
    key_heads: Annotated[int, Field(ge=1, le=65536)]
    value_heads: Annotated[int, Field(ge=1, le=65536)]
    key_dim: Annotated[int, Field(ge=1, le=1024)]
    value_dim: Annotated[int, Field(ge=1, le=1024)]
    conv: Annotated[int, Field(ge=1, le=64)] = 4

    @model_validator(mode="after")
    def _divides(self) -> Self:
        """Whether each key head is of as many value heads."""
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads: expected a divisor of value_heads = {self.value_heads}, got {self.key_heads}")
        return self


class ModelSection(BaseModel):
    """Dimensions of a model without a name; see ``cpsim.case.model.Model``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    layers: Annotated[int, Field(ge=1, le=10_000)]
    hidden: Annotated[int, Field(ge=1, le=10**6)]
    heads: Annotated[int, Field(ge=1, le=65536)]
    kv_heads: Annotated[int, Field(ge=1, le=65536)]
    head_dim: Annotated[int, Field(ge=1, le=1024)] = 128
    ffn: Annotated[int, Field(ge=1, le=10**7)]
    vocab: Annotated[int, Field(ge=1, le=10**8)]
    experts: Annotated[int, Field(ge=0, le=1000)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1000)] | None = None
    expert_ffn: Annotated[int, Field(ge=0, le=10**7)] | None = None
    shared_experts: Annotated[int, Field(ge=0, le=1000)] | None = None
    window: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    window_pattern: Annotated[int, Field(ge=0, le=10_000)] | None = None
    kv_rank: Annotated[int, Field(ge=0, le=10**6)] | None = None
    q_rank: Annotated[int, Field(ge=0, le=10**6)] | None = None
    rope_dim: Annotated[int, Field(ge=0, le=1024)] | None = None
    value_dim: Annotated[int, Field(ge=0, le=1024)] | None = None
    dense_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    gated: bool | None = None
    recurrent: RecurrentSection | None = None
    attention_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    bare_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    sparse: str | Mapping[str, Any] | None = None
    """How queries choose their keys, as the scenario's own field."""
    sinks: bool | None = None
    clamped: bool | None = None
    expert_bias: bool | None = None
    kv_shared_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Without later fields where they say nothing: these words are the seed of a prediction's draws."""
        later = {"window", "window_pattern", "kv_rank", "q_rank", "rope_dim", "value_dim", "dense_layers"}
        later |= {"recurrent", "attention_layers", "bare_layers", "sparse", "sinks", "clamped", "expert_bias"}
        later |= {"kv_shared_layers"}
        said = [(name, value) for name, value in super().__repr_args__() if name not in later or value]
        return [(name, value) for name, value in said if name != "gated" or value is False]

    @field_validator("sparse", mode="before")
    @classmethod
    def _read_sparse(cls, value: object) -> object:
        return None if value is None else written(read_sparse(value))

    @model_validator(mode="after")
    def _recurs(self) -> Self:
        """Whether layers with a state are some of the layers."""
        for name in ("attention_layers", "bare_layers"):
            if getattr(self, name) and not self.recurrent:
                raise ValueError(f"{name}: belongs to a model with states; name recurrent or leave {name} out")
        attend, bare = self.attention_layers or 0, self.bare_layers or 0
        if attend >= self.layers or attend + bare > self.layers:
            raise ValueError(
                f"attention_layers: expected less than {self.layers} layers, and as many as these with bare_layers; "
                f"got {attend} and {bare}"
            )
        if self.recurrent and self.window:
            raise ValueError("recurrent: does not go with window; leave one of them out")
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        """Whether some layers make keys that the others share."""
        if not self.kv_shared_layers:
            return self
        if self.kv_shared_layers >= self.layers:
            raise ValueError(
                f"kv_shared_layers: expected less than {self.layers} layers, got {self.kv_shared_layers}; the others "
                f"make the keys"
            )
        for name in ("recurrent", "kv_rank", "sparse"):
            if getattr(self, name):
                raise ValueError(f"kv_shared_layers: does not go with {name}; leave one of them out")
        return self

    @model_validator(mode="after")
    def _slides(self) -> Self:
        """Whether the pattern is one of windows."""
        if self.window_pattern and not self.window:
            raise ValueError("window_pattern: belongs to a model with windows; name window or leave window_pattern out")
        return self

    @model_validator(mode="after")
    def _latent(self) -> Self:
        """Whether keys can be made from latents."""
        if not self.kv_rank:
            for name in ("q_rank", "rope_dim", "value_dim"):
                if getattr(self, name):
                    raise ValueError(f"{name}: belongs to latent attention; name kv_rank or leave {name} out")
            return self
        if self.kv_heads != self.heads:
            raise ValueError(f"kv_heads: expected {self.heads}, as many as heads, with kv_rank; got {self.kv_heads}")
        if not 0 < (self.rope_dim or 0) < self.head_dim:
            raise ValueError(f"rope_dim: expected 1 to {self.head_dim - 1}, less than head_dim, got {self.rope_dim}")
        return self

    @model_validator(mode="after")
    def _routes(self) -> Self:
        """Whether a token can be sent to so many experts."""
        if self.experts and not 1 <= (self.top_k or 0) <= self.experts:
            raise ValueError(f"top_k: expected 1 to {self.experts} experts, got {self.top_k}")
        for name in ("top_k", "expert_ffn", "shared_experts", "dense_layers"):
            if getattr(self, name) and not self.experts:
                raise ValueError(f"{name}: belongs to a model with experts; name experts or leave {name} out")
        if (self.dense_layers or 0) >= self.layers:
            raise ValueError(f"dense_layers: expected less than {self.layers} layers, got {self.dense_layers}")
        return self


class Scenario(BaseModel):
    """One case: which strategy, on what, over which tokens. Fields are those of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    strategy: Name | None = None
    """None leaves the choice to ``advise``."""
    knobs: Mapping[str, Any] = Field(default_factory=dict)
    """The strategy's own settings, e.g. ``{"ulysses": 8}``."""
    implementation: Name = "cpsim"
    kernel: Name = "fa4"
    compile: bool | None = None
    """Whether ``torch.compile`` compiles the call, or layers of a step; None is no, and what the framework does."""
    gpus: Annotated[int, Field(ge=1, le=1_000_000)]
    cluster: Annotated[str, Field(min_length=1, max_length=1000)]
    """Preset name or path of a cluster file."""
    profile: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Profile name or file; None takes the cluster's own."""
    tokens: Tokens | None = None
    """Tokens over all GPUs; either this or ``tokens_per_gpu``."""
    tokens_per_gpu: Tokens | None = None
    documents: tuple[int, ...] | DocumentDraw | None = None
    """Lengths [tokens] in packing order, or how to draw them; None is one document of all tokens."""
    mask: str | Mapping[str, Any] = "causal"
    """A name of ``MASK_NAMES``, or a mapping with ``name`` and those of the mask's options that are no defaults."""
    sparse: str | Mapping[str, Any] | None = None
    """How queries choose among the keys that they see: a name of ``cpsim.case.sparse.PATTERNS``, or a mapping with
    ``kind`` and the fields that differ from its paper's; None: they see all."""
    heads: Annotated[int, Field(ge=1, le=65536)]
    kv_heads: Annotated[int, Field(ge=1, le=65536)]
    head_dim: Annotated[int, Field(ge=1, le=1024)] = 128
    value_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Elements per head of values and outputs where keys have another number, as in multi-head latent attention."""
    cached: Tokens | None = None
    """First tokens, whose keys and values GPUs hold from before: only later ones have queries, as in a prefill."""
    sinks: bool | None = None
    """Whether every head has a sink, a learned logit that joins the denominators of its softmax; None is no. That of
    a step's model is the model's."""
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    pass_: Literal["fwd", "bwd", "fwd_bwd"] = Field("fwd_bwd", validation_alias="pass", serialization_alias="pass")
    protocol: Literal["synced", "streamed"] = "synced"
    host: float | str | None = None
    """How much longer launches take than on the profile's hosts, or a file of ``cpsim calibrate --host``; None is what
    the cluster says, or a host like those that were measured."""
    model: Name | ModelSection | None = None
    """The model of a whole training step: a name of ``MODELS`` or dimensions, which give heads and head_dim; None is
    attention alone."""
    context: Tokens | None = None
    """In a training step, tokens of a packed sequence; None is all tokens of a microbatch of a replica."""
    parallel: ParallelSection | None = None
    """How a training step is cut."""
    framework: Literal["megatron", "torch", "torchtitan", "huggingface"] | None = None
    """Whose code runs a training step; None is megatron's."""
    trainable: Literal["all"] | LoraSection | None = None
    """What a training step updates: all weights, or adapters; None is all."""
    offload: Literal["activations"] | None = None
    """What of a training step waits in the host's memory; None is nothing."""
    precision: Precision | None = None
    """Of linear layers in a training step: ``bf16``, ``fp8`` as the framework has it, or ``{"fp8": recipe}``; None is
    bf16."""
    part: Literal["layer"] | None = None
    """With a model, what of it to predict: one layer with the strategy's attention on all GPUs, weights whole on each;
    None is a step."""

    @property
    def num_tokens(self) -> int:
        """Tokens over all GPUs."""
        return self.tokens if self.tokens is not None else (self.tokens_per_gpu or 0) * self.gpus

    @property
    def num_sequences(self) -> int:
        """Packed sequences of a step, where they have a length of their own; otherwise one."""
        return self.num_tokens // self.context if self.context else 1

    @property
    def is_step(self) -> bool:
        """Whether the case is a whole training step."""
        return self.model is not None and self.part is None

    @property
    def _has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        model = MODELS[self.model] if isinstance(self.model, str) else self.model
        return model is not None and bool(model.experts)

    @property
    def passes(self) -> tuple[Literal["fwd", "bwd"], ...]:
        """The passes of the case, in the order in which they run."""
        return ("fwd", "bwd") if self.pass_ == "fwd_bwd" else (self.pass_,)

    @property
    def mask_name(self) -> str:
        """Name of the mask without its options."""
        return self.mask if isinstance(self.mask, str) else str(self.mask["name"])

    @property
    def mask_options(self) -> Options:
        """Options of the mask that are no defaults."""
        return read_mask(self.mask)[1]

    @model_validator(mode="before")
    @classmethod
    def _shape_of_model(cls, data: Any) -> Any:
        """Heads and head_dim are those of the model, where there is one."""
        if not isinstance(data, Mapping) or data.get("model") is None:
            return data
        model = data["model"]
        given = asdict(MODELS[model]) if isinstance(model, str) and model in MODELS else model
        names = ("heads", "kv_heads", "head_dim") if isinstance(given, Mapping) else ()
        known = {name: given[name] for name in names if name in given}
        for name, value in known.items():
            if data.get(name, value) != value:
                raise ValueError(f"{name}: expected {value}, that of the model, got {shown(data[name])}; leave it out")
        return {**data, **known}

    @field_validator("host", mode="before")
    @classmethod
    def _read_host(cls, value: object) -> object:
        is_factor = isinstance(value, int | float) and not isinstance(value, bool) and 0.1 <= value <= 10
        if value is None or is_factor or (isinstance(value, str) and 0 < len(value) <= 1000):
            return float(value) if is_factor else value  # type: ignore[arg-type]
        raise ValueError(f"expected a factor from 0.1 to 10 or a file of `cpsim calibrate --host`, got {shown(value)}")

    @field_validator("precision", mode="before")
    @classmethod
    def _read_precision(cls, value: object) -> object:
        if value in (None, "bf16", "fp8", "nvfp4"):
            return value
        known = isinstance(value, Mapping) and {"fp8"} <= set(value) <= {"fp8", "attention"}
        if not known or value["fp8"] not in get_args(Fp8) or value.get("attention", "fp8") != "fp8":  # type: ignore[index,attr-defined]
            recipes = ", ".join(get_args(Fp8))
            raise ValueError(
                f"expected bf16, fp8, nvfp4 or {{fp8: recipe}} with one of {recipes}, and attention: fp8 beside it "
                f"where attention is in FP8, too, got {shown(value)}"
            )
        return value

    @property
    def attends_in_fp8(self) -> bool:
        """Whether attention of a step is in FP8."""
        return isinstance(self.precision, Mapping) and "attention" in self.precision

    @field_validator("model", mode="before")
    @classmethod
    def _read_model(cls, value: object) -> object:
        if isinstance(value, Mapping):
            try:
                return ModelSection.model_validate(value)
            except ValidationError as error:
                raise ValueError(explain(error, ModelSection.model_fields)) from None
        if value is not None and not isinstance(value, ModelSection) and value not in MODELS:
            raise ValueError(f"expected dimensions or a name, got {shown(value)}; {nearest(value, MODELS)}")
        return value

    @field_validator("parallel", mode="before")
    @classmethod
    def _read_parallel(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        try:
            return ParallelSection.model_validate(value)
        except ValidationError as error:
            raise ValueError(explain(error, ParallelSection.model_fields)) from None

    @field_validator("trainable", mode="before")
    @classmethod
    def _read_trainable(cls, value: object) -> object:
        if isinstance(value, Mapping):
            try:
                return LoraSection.model_validate(value)
            except ValidationError as error:
                raise ValueError(explain(error, LoraSection.model_fields)) from None
        if value not in (None, "all") and not isinstance(value, LoraSection):
            raise ValueError(f"expected all or {{lora: rank}}, got {shown(value)}")
        return value

    @field_validator("documents", mode="before")
    @classmethod
    def _read_documents(cls, value: object) -> object:
        match value:
            case list():
                return _lengths(value)
            case Mapping():
                return _draw(value)
            case None | tuple() | DocumentDraw():
                return value
        example = "{distribution: prolong512k, seed: 42}"
        raise ValueError(f"expected a list of lengths or a draw, e.g. {example}, got {shown(value)}")

    @field_validator("mask", mode="before")
    @classmethod
    def _read_mask(cls, value: object) -> object:
        name, options = read_mask(value)
        return {"name": name, **dict(options)} if options else name

    @field_validator("sparse", mode="before")
    @classmethod
    def _read_sparse(cls, value: object) -> object:
        return None if value is None else written(read_sparse(value))

    @field_validator("knobs", mode="after")
    @classmethod
    def _finite(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        found = dict(value)
        for key, entry in value.items():
            if _is_rows(entry):
                found[key] = tuple(map(tuple, entry))
                continue
            if isinstance(entry, float) and not math.isfinite(entry):
                raise ValueError(f"{key}: expected a finite number, got {entry}")
            if not isinstance(entry, str | int | float):
                raise ValueError(f"{cut(key, 60)}: expected a number, a name or true/false, got {shown(entry)}")
            if len(key) > 60 or (len(entry) > 60 if isinstance(entry, str) else abs(entry) > 10**18):
                raise ValueError(f"{cut(key, 60)}: expected a shorter name or a smaller number, got {shown(entry)}")
        return found

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.value_dim is not None and self.model is not None:
            raise ValueError(
                "value_dim: belongs to attention alone; that of a step is its model's; leave value_dim or model out"
            )
        if (self.tokens is None) == (self.tokens_per_gpu is None):
            got = "neither" if self.tokens is None else "both"
            raise ValueError(f"tokens: expected either tokens or tokens_per_gpu, got {got}")
        if self.sinks and (self.model is not None or self.sparse is not None):
            other = "model" if self.model is not None else "sparse"
            raise ValueError(f"sinks: belong to attention alone to all keys; leave sinks or {other} out")
        total = self.num_tokens
        if total > MAX_TOKENS:
            raise ValueError(
                f"tokens_per_gpu: expected at most {MAX_TOKENS} tokens in total, got {self.tokens_per_gpu} x "
                f"{self.gpus} = {total}; lower tokens_per_gpu"
            )
        if total % self.gpus:
            below = total // self.gpus * self.gpus
            use = f"{below} or {below + self.gpus}" if below else f"{self.gpus}"
            raise ValueError(f"tokens: expected a multiple of gpus = {self.gpus}, got {total}; use {use}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads = {self.heads}, got {self.kv_heads}")
        if isinstance(self.documents, tuple) and sum(self.documents) != total:
            raise ValueError(
                f"documents: expected lengths that sum to {total} tokens, got {sum(self.documents)}; "
                "change the last length or tokens"
            )
        self._check_cached(total)
        self._check_compile()
        self._check_step()
        return self

    def _check_cached(self, total: int) -> None:
        if self.cached is None:
            return
        if self.pass_ != "fwd" or self.model is not None:
            raise ValueError(
                "cached: belongs to attention in the forward pass alone; set pass: fwd and leave model out"
            )
        if self.cached >= total:
            raise ValueError(f"cached: expected fewer than all {total} tokens, got {self.cached}")

    def _check_compile(self) -> None:
        if not self.compile or (self.model is not None and self.part is None):
            return
        if self.part is not None:
            raise ValueError(f"compile: belongs to plain calls and whole steps; leave it out of one {self.part}")
        alone = self.strategy == "none" or (self.strategy is None and self.gpus == 1)
        if not alone or self.implementation not in COMPILABLE:
            got = f"strategy {self.strategy or 'not set'} of {self.implementation}"
            raise ValueError(f"compile: expected strategy none of {' or '.join(COMPILABLE)}, got {got}; leave it out")

    def _check_step(self) -> None:
        if self.model is None:
            for name in ("context", "parallel", "part", "framework", "precision", "trainable", "offload"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: belongs to a training step, which needs a model, e.g. model: llama3-8b")
            return
        for name in ("context", "parallel", "framework", "precision", "trainable", "offload"):
            if self.part is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: belongs to a whole step; leave it out of one {self.part}")
        self._check_sparse()
        if isinstance(self.trainable, LoraSection) and self._has_experts:
            raise ValueError("trainable: adapters cannot be predicted with experts; use all or a dense model")
        if self.part is not None and self._has_experts:
            raise ValueError(f"part: one {self.part} cannot be predicted with experts; leave part out for a whole step")
        if self.part is not None and not isinstance(self.model, str) and self.model.window:
            raise ValueError(f"window: one {self.part} has one mask; leave window out and name mask")
        if self.part is None and self.pass_ != "fwd_bwd":
            raise ValueError(f"pass: a training step has both, expected fwd_bwd, got {self.pass_}")
        if self.dtype != "bf16":
            raise ValueError(f"dtype: training steps were measured in bf16, got {self.dtype}")
        if self.context is not None and self.num_tokens % self.context:
            raise ValueError(f"context: expected a divisor of {self.num_tokens} tokens, got {self.context}")

    def _check_sparse(self) -> None:
        """Whether queries of the model can choose keys like this."""
        model = MODELS[self.model] if isinstance(self.model, str) else self.model
        found = self.sparse if self.sparse is not None else getattr(model, "sparse", None)
        if model is None or found is None:
            return
        if self.part is not None:
            raise ValueError(f"sparse: one {self.part} is predicted with dense attention; leave sparse or part out")
        latent = read_sparse(found).latent
        if latent and not model.kv_rank:
            raise ValueError("sparse: dsa chooses latents, of which the model has none; use a model with kv_rank")
        if model.kv_rank and not latent:
            raise ValueError(f"sparse: expected dsa of a model with latents, got {read_sparse(found).kind}")
        for name in ("window", "recurrent"):
            if getattr(model, name):
                raise ValueError(f"sparse: does not go with {name} of the model; leave one of them out")
        if isinstance(self.trainable, LoraSection):
            raise ValueError("trainable: adapters are predicted with dense attention; leave it or sparse out")
        if self.precision not in (None, "bf16") or self.offload:
            raise ValueError(
                "sparse: steps are predicted in bf16, and without offload; leave precision and offload out"
            )

    def to_dict(self) -> dict[str, Any]:
        """Fields by their names in the file, ready for JSON; absent ones are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


FIELDS: Final = tuple("pass" if name == "pass_" else name for name in Scenario.model_fields)
"""Field names of a scenario file."""


def _is_rows(value: object) -> bool:
    """Whether a knob is a table of whole numbers, one row for every document for example."""
    rows = value if isinstance(value, list | tuple) else ()
    return 0 < len(rows) <= MAX_ROWS and all(
        isinstance(row, list | tuple) and row and all(type(n) is int and 0 <= n < 2**31 for n in row) for row in rows
    )


def _lengths(value: list[object]) -> tuple[int, ...]:
    for i, length in enumerate(value, start=1):
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_TOKENS:
            raise ValueError(f"expected lengths of 1 to {MAX_TOKENS} tokens, number {i} is {shown(length)}")
    if not value:
        raise ValueError("expected at least one length, got an empty list; leave it out for one document")
    return tuple(value)  # type: ignore[arg-type]


def _draw(value: Mapping[Any, Any]) -> DocumentDraw:
    try:
        return DocumentDraw.model_validate(value)
    except ValidationError as error:
        raise ValueError(explain(error, DocumentDraw.model_fields)) from None
