"""What somebody asks at the door, as one scenario: a file of theirs, options, what nobody said, and changes.

A file of a framework says a model, a batch and how its author cut it. The question is how to cut it best, so that its
degrees are left open, and what it would take as it is stands beside the answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cpsim.case.changes import changed, split_name
from cpsim.case.cluster import Cluster, described, load_cluster, presets
from cpsim.case.documents import DISTRIBUTIONS
from cpsim.case.formats import Reading, read_foreign
from cpsim.case.lengths import Waste, read_lengths, sample, waste
from cpsim.case.load import beside, load_scenario, scenario_from
from cpsim.case.model import known_model, likely
from cpsim.case.scenario import Scenario
from cpsim.case.words import tokens_of
from cpsim.errors import CpsimError, ScenarioError, shown
from cpsim.models.profile import load_profile
from cpsim.prediction.step.frameworks import FRAMEWORKS

STEP_TOKENS: Final = 2**22
"""Tokens of a step where nobody says how many: a usual batch of long-context training."""
CONTEXT: Final = 8192
NICKNAMES: Final = {"h100": "dgx-h100", "h200": "dgx-h200", "b200": "dgx-b200", "a100": "p4de"}
"""Clusters by their GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed; None or nothing where it was not."""

    file: Path | None = None
    """A scenario, or a file of another tool."""
    model: str | None = None
    """A file, a published model's name, or that of its repository."""
    framework: str | None = None
    gpus: int | None = None
    cluster: str | None = None
    context: str | None = None
    """Tokens of a sequence."""
    lengths: str | None = None
    """A file of document lengths, or a distribution that ships."""
    batch: int | None = None
    """Sequences of a step."""
    changes: tuple[str, ...] = ()
    """``field=value``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A case to advise on, and how it came about."""

    scenario: Scenario
    given: Scenario | None
    """The same, cut as a file of a framework says; None where there is none, or it says too little."""
    read: tuple[str, ...]
    """What was read and assumed, in words."""
    waste: Waste | None
    """What packing wastes, of lengths from a file."""


def ask(options: Options) -> Question:
    """The scenario of a question.

    Raises:
        ScenarioError: a file that cannot be read, options that contradict it, or too little was said.
    """
    own = read_foreign(options.file) if options.file else None
    if options.file and own is None:
        return _of_scenario(options.file, options)
    read: list[str] = []
    fields = dict(own.fields) if own else {}
    if own:
        read.append(_read_text(str(options.file), own))
    _take_model(fields, options, read)
    _take_machine(fields, options, read)
    cluster = load_cluster(fields["cluster"])
    _check_gpus(fields["gpus"], cluster)
    fields["framework"] = _framework(fields, options, read)
    context, sequences = _sequences(fields, options, own, read)
    fields |= {"context": context, "tokens": context * sequences}
    wasted = _take_lengths(fields, options, read)
    _take_kernel(fields, cluster, read)
    as_given = changed(fields, options.changes)
    scenario = scenario_from(changed(_left_open(fields), options.changes))
    return Question(scenario=scenario, given=_given(as_given, own), read=tuple(read), waste=wasted)


def _of_scenario(file: Path, options: Options) -> Question:
    """A scenario's file, with what options say instead."""
    scenario, read = load_scenario(file), list[str]()
    fields = scenario.to_dict()
    if options.model:
        fields.pop("model", None)
        for name in ("heads", "kv_heads", "head_dim"):
            fields.pop(name, None)
        _take_model(fields, options, read)
    fields |= {name: value for name, value in (("gpus", options.gpus), ("framework", options.framework)) if value}
    if options.cluster:
        fields["cluster"] = _cluster_name(options.cluster, read)
    if options.context or options.batch:
        length = tokens_of(options.context, "context") if options.context else scenario.context or scenario.num_tokens
        for name in ("tokens", "tokens_per_gpu"):
            fields.pop(name, None)
        fields["tokens"] = length * (options.batch or max(1, scenario.num_sequences))
        fields["context"] = length
        if scenario.model is None and not options.model:
            fields.pop("context")
        if not isinstance(fields.get("documents"), Mapping):
            fields.pop("documents", None)
    wasted = None
    if options.lengths:
        fields.setdefault("context", scenario.context or scenario.num_tokens)
        fields["tokens"] = fields.get("tokens", scenario.num_tokens)
        fields.pop("tokens_per_gpu", None)
        wasted = _take_lengths(fields, options, read)
        if "model" not in fields:
            fields.pop("context")
    fields = changed(fields, options.changes)
    fields["cluster"] = beside(str(fields["cluster"]), file.parent)
    return Question(scenario=scenario_from(fields, file.parent), given=None, read=tuple(read), waste=wasted)


def _read_text(path: str, own: Reading) -> str:
    caveats = f"; it has {', '.join(own.caveats)}, which a step leaves out" if own.caveats else ""
    return f"{path}: {own.what}: {', '.join(own.said) or 'nothing that matters here'}{caveats}"


def _take_model(fields: dict[str, Any], options: Options, read: list[str]) -> None:
    """The model of an option, which may be a file."""
    if not options.model:
        if "model" not in fields:
            raise ScenarioError("model: expected --model with a config.json or a name, e.g. llama3.1-8b; got nothing")
        return
    fields["model"], about = _shape(options.model)
    read.append(about)


def shape_of(source: str) -> dict[str, Any] | str:
    """Dimensions of a file, or the name of a published model.

    Raises:
        ScenarioError: it is neither, or a step cannot say it.
    """
    shape: dict[str, Any] | str = _shape(source)[0]
    return shape


def _shape(source: str) -> tuple[Any, str]:
    """The same, and what was read in words."""
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        shape = read_foreign(path)
        if shape is None or "model" not in shape.fields:
            raise ScenarioError(f"{path}: expected a config.json, or another file with the shape of a model")
        return shape.fields["model"], _read_text(str(path), shape)
    known = known_model(source)
    if known is None:
        raise ScenarioError(f"model: {shown(source)} is neither a file nor known; {likely(source)}give its config.json")
    if known.model is None:
        raise ScenarioError(f"model: {known.refusal()}")
    caveats = f"; it has {', '.join(known.caveats)}, which a step leaves out" if known.caveats else ""
    size = known.model.size()
    return known.name, f"model {known.name}: {known.hub}, {size}{caveats}"


def _cluster_name(name: str, read: list[str]) -> str:
    base, changes = split_name(name)
    if base.lower() in NICKNAMES and not os.path.isfile(base):
        read.append(f"cluster {NICKNAMES[base.lower()]}, of {base.upper()}")
        return " ".join([NICKNAMES[base.lower()], *changes])
    return name


def _take_machine(fields: dict[str, Any], options: Options, read: list[str]) -> None:
    """GPUs and cluster."""
    if not options.cluster:
        raise ScenarioError(f"cluster: expected --cluster with a file or one of {', '.join(presets())}; got nothing")
    fields["cluster"] = _cluster_name(options.cluster, read)
    fields["gpus"] = options.gpus or fields.get("gpus")
    cluster = load_cluster(fields["cluster"])
    read.append(f"cluster {cluster.name}: {described(cluster)}")
    if fields["gpus"] is None:
        raise ScenarioError("gpus: expected --gpus, e.g. --gpus 64; the file does not say how many")


def _check_gpus(gpus: int, cluster: Cluster) -> None:
    """Whether GPUs fill nodes; says the nearest numbers that do."""
    per_node = cluster.gpus_per_node
    if gpus > per_node and cluster.fabric is not None and gpus % per_node:
        below = gpus // per_node * per_node
        raise ScenarioError(
            f"gpus: {gpus} do not fill nodes of {per_node}; nearest that do: {below} or {below + per_node}, with any "
            "batch that replicas can share"
        )
    cluster.with_gpus(gpus)


def _framework(fields: Mapping[str, Any], options: Options, read: list[str]) -> str:
    said = options.framework or fields.get("framework")
    if said is None:
        read.append("framework megatron, as --framework does not name another")
        return "megatron"
    if said not in FRAMEWORKS:
        raise ScenarioError(f"framework: expected one of {', '.join(FRAMEWORKS)}; got {shown(said)}")
    return str(said)


def _sequences(fields: dict[str, Any], options: Options, own: Reading | None, read: list[str]) -> tuple[int, int]:
    """Tokens of a sequence, and sequences of a step."""
    said = fields.pop("sequences", None)
    context = tokens_of(options.context, "context") if options.context else fields.get("context")
    if context is None:
        context = CONTEXT
        read.append(f"context {CONTEXT:,}, as neither --context nor a file says it")
    if options.batch or (said and not (options.context and own and context != own.fields.get("context"))):
        return int(context), options.batch or int(said)
    odd = _odd(int(fields["gpus"]))
    sequences = max(1, round(STEP_TOKENS / context / odd)) * odd
    read.append(f"batch {sequences} sequences, {sequences * context:,} tokens a step, as --batch does not say")
    return int(context), sequences


def _odd(number: int) -> int:
    while number % 2 == 0:
        number //= 2
    return number


def _take_lengths(fields: dict[str, Any], options: Options, read: list[str]) -> Waste | None:
    """Documents of a step, from a file or a distribution; of a framework that does not keep them apart, nothing."""
    if options.lengths is None:
        fields.setdefault("mask", "causal")
        return None
    framework, context, tokens = fields.get("framework"), int(fields["context"]), int(fields["tokens"])
    apart = framework is None or bool(FRAMEWORKS[framework].kernels_apart)
    fields["mask"] = "causal_document" if apart else "causal"
    if not apart:
        read.append(f"documents of a sequence see each other in {framework}: their lengths do not change its time")
    if options.lengths in DISTRIBUTIONS and not os.path.isfile(options.lengths):
        if apart:
            fields["documents"] = {"distribution": options.lengths, "max_length": context}
        read.append(f"lengths of documents as in {options.lengths}")
        return None
    path = Path(options.lengths)
    if not path.is_file():
        raise ScenarioError(f"lengths: {path} is neither a file nor one of {', '.join(DISTRIBUTIONS)}")
    lengths = read_lengths(path)
    drawn = sample(lengths, tokens, context)
    if apart:
        fields["documents"] = list(drawn.documents)
    longer = sum(length > context for length in lengths)
    cut = f", {longer:,} of them longer than a sequence and cut" if longer else ""
    again = "; a step draws some more than once" if drawn.repeated else ""
    mean = sum(lengths) / len(lengths)
    read.append(
        f"{path}: {len(lengths):,} documents of {min(lengths):,} to {max(lengths):,} tokens, mean {mean:,.0f}{cut}"
        f"{again}"
    )
    return waste(lengths, context)


def _take_kernel(fields: dict[str, Any], cluster: Cluster, read: list[str]) -> None:
    """The kernel that the framework calls on this GPU: the usual one of those that were measured there."""
    framework = FRAMEWORKS[fields["framework"]]
    kernels = ("documents" in fields and framework.kernels_apart) or framework.kernels
    if fields.get("kernel"):
        kernels = (fields["kernel"], *(one for one in kernels if one != fields["kernel"]))
    measured = _measured(fields.get("profile") or cluster.profile)
    chosen = next((one for one in kernels if one in measured), kernels[0])
    fields["kernel"] = chosen
    more = f"; {kernels[0]}, the usual one, was not measured there" if chosen != kernels[0] else ""
    read.append(f"attention by {chosen} of {framework.name}{more}")


def _measured(profile: str | None) -> Sequence[str]:
    """Kernels that a profile has in both passes."""
    if profile is None:
        return ()
    try:
        entries = load_profile(profile).attention
    except CpsimError:
        return ()
    return [kernel for kernel, pass_ in entries if pass_ == "bwd"]


def _left_open(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without how its author cut it."""
    kept = {name: value for name, value in fields.items() if name not in ("strategy", "knobs", "parallel")}
    cut = fields.get("parallel", {})
    how = {name: cut[name] for name in ("tp_overlap", "ep_overlap", "dispatcher") if cut.get(name)}
    return kept | ({"parallel": how} if how else {})


def _given(fields: Mapping[str, Any], own: Reading | None) -> Scenario | None:
    """As the file has it; None where it has no degrees, or they do not fit what was asked."""
    if own is None or not own.fields.get("parallel"):
        return None
    try:
        section = dict(fields["parallel"])
        section.pop("dp", None)
        strategy = fields.get("strategy") or "none"
        return scenario_from({**fields, "parallel": section, "strategy": strategy})
    except CpsimError:
        return None
