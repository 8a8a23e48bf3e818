"""The controls of the page: what a link holds, and the scenario that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cpsim.case.cluster import load_cluster, presets
from cpsim.case.documents import DISTRIBUTIONS
from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.case.resolve import cluster_of
from cpsim.case.scenario import Scenario
from cpsim.errors import ScenarioError, nearest, shown
from cpsim.masks.names import MASK_NAMES
from cpsim.models.feasible import kernel_names
from cpsim.prediction.question import Options, ask
from cpsim.prediction.step.frameworks import DEFAULT, FRAMEWORKS
from cpsim.report.axes import AXES
from cpsim.report.views import TITLES
from cpsim.strategies import STRATEGIES
from cpsim.strategies.others import IMPLEMENTATIONS
from cpsim.units import number_or_text

State = Mapping[str, Any]
"""Values of all controls by name."""

ONE_DOCUMENT: Final = "one document"
GIVEN_LENGTHS: Final = "lengths"
OWN_PROFILE: Final = "the cluster's own"
BEST: Final = "the best"
ATTENTION: Final = "attention of a layer"
STEP: Final = "a training step"
SEARCHED: Final = "searched"
DEGREES: Final = ("tp", "pp", "cp")
VIEWS: Final = tuple(TITLES)
PRECISIONS: Final = ("bf16", "fp8", "nvfp4")
NETWORK: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""What-if speeds of the network between nodes, over that of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One value that a person may change."""

    name: str
    """In links."""
    label: str
    choices: tuple[str, ...] = ()
    """Empty: a number or free text."""
    is_number: bool = False
    hint: str = ""
    of: str = ""
    """What is predicted where it counts; empty: whatever it is."""


def controls(start: Scenario) -> tuple[Control, ...]:
    """All controls of a case, in the order of the page; clusters and profiles are those shipped and the start's own."""
    from cpsim.models.derive import DATA_SHEET
    from cpsim.models.profile import shipped_profiles

    documents = (ONE_DOCUMENT, *DISTRIBUTIONS, GIVEN_LENGTHS)
    clusters = dict.fromkeys((*presets(), start.cluster))
    profiles = dict.fromkeys((OWN_PROFILE, *shipped_profiles(), DATA_SHEET, start.profile or OWN_PROFILE))
    return (
        Control(name="task", label="what to predict", choices=(ATTENTION, STEP)),
        *_step_controls(),
        Control(name="tokens_per_gpu", label="tokens per GPU", is_number=True, of=ATTENTION),
        Control(name="gpus", label="GPUs", is_number=True),
        Control(name="nodes", label="nodes", is_number=True),
        Control(name="cluster", label="cluster", choices=tuple(clusters)),
        Control(name="network", label="speed of the network, times", choices=tuple(f"{x:g}" for x in NETWORK)),
        Control(name="profile", label="profile", choices=tuple(profiles), of=ATTENTION),
        Control(name="documents", label="documents", choices=documents),
        Control(name="lengths", label="their lengths [tokens]", hint="e.g. 500000, 286432", of=ATTENTION),
        Control(name="seed", label="seed of the draw", is_number=True, of=ATTENTION),
        Control(name="mask", label="mask", choices=tuple(MASK_NAMES), of=ATTENTION),
        Control(name="options", label="options of the mask", hint="e.g. window=512", of=ATTENTION),
        Control(name="heads", label="heads", is_number=True, of=ATTENTION),
        Control(name="kv_heads", label="key-value heads", is_number=True, of=ATTENTION),
        Control(name="head_dim", label="head dimension", is_number=True, of=ATTENTION),
        Control(name="kernel", label="kernel", choices=kernel_names(), of=ATTENTION),
        Control(name="implementation", label="whose code", choices=tuple(IMPLEMENTATIONS), of=ATTENTION),
        Control(name="strategy", label="strategy shown", choices=(BEST, *STRATEGIES), of=ATTENTION),
        Control(name="ranks", label="ranks shown, or empty", hint="a few", of=ATTENTION),
        Control(name="across", label="map: to the right", choices=tuple(AXES), of=ATTENTION),
        Control(name="up", label="map: upwards", choices=tuple(AXES), of=ATTENTION),
    )


def _step_controls() -> tuple[Control, ...]:
    """What training steps have and attention alone has not."""
    shardings = dict.fromkeys(one for code in FRAMEWORKS.values() for one in code.shardings)
    recomputes = dict.fromkeys(one for code in FRAMEWORKS.values() for one in code.recomputes)
    return (
        Control(name="model", label="model", choices=tuple(MODELS), of=STEP),
        Control(name="framework", label="framework", choices=tuple(FRAMEWORKS), of=STEP),
        Control(name="context", label="tokens of a sequence", hint="e.g. 128k", of=STEP),
        Control(name="sequences", label="sequences of a step, or empty", hint="as many as usual", of=STEP),
        Control(name="precision", label="precision", choices=PRECISIONS, of=STEP),
        Control(name="sharding", label="sharding", choices=(SEARCHED, *shardings), of=STEP),
        Control(name="recompute", label="recomputation", choices=(SEARCHED, *recomputes), of=STEP),
        *(Control(name=name, label=f"{name}, or empty", hint=SEARCHED, of=STEP) for name in DEGREES),
    )


def state_of(scenario: Scenario) -> dict[str, Any]:
    """The controls that stand for a scenario.

    Raises:
        ScenarioError: its cluster cannot be read, or controls cannot say what it says.
    """
    named = isinstance(scenario.model, str) and scenario.is_step
    if not (named or scenario.model is None):
        raise ScenarioError(
            "explore: shows attention and steps of models with a name; leave dimensions of a model, and part, out"
        )
    said = scenario.parallel.model_dump(exclude_none=True) if scenario.parallel else {}
    step = {
        "task": STEP if named else ATTENTION,
        "model": scenario.model if named else "llama3-8b",
        "framework": scenario.framework or DEFAULT,
        "context": scenario.context or (scenario.num_tokens if named else 131072),
        "sequences": scenario.num_sequences if named else "",
        "precision": scenario.precision if isinstance(scenario.precision, str) else PRECISIONS[0],
        "sharding": said.get("sharding", SEARCHED),
        "recompute": said.get("recompute", SEARCHED),
        **{name: said.get(name, "") for name in DEGREES},
    }
    return step | _attention_state(scenario)


def _attention_state(scenario: Scenario) -> dict[str, Any]:
    """The controls that attention has."""
    documents, lengths, seed = ONE_DOCUMENT, "", 0
    match scenario.documents:
        case tuple() as given:
            documents, lengths = GIVEN_LENGTHS, ", ".join(map(str, given))
        case None:
            pass
        case draw:
            documents, seed = draw.distribution, draw.seed
    return {
        "tokens_per_gpu": scenario.num_tokens // scenario.gpus,
        "gpus": scenario.gpus,
        "nodes": cluster_of(scenario).num_nodes,
        "cluster": scenario.cluster,
        "network": "1",
        "profile": scenario.profile or OWN_PROFILE,
        "documents": documents,
        "lengths": lengths,
        "seed": seed,
        "mask": scenario.mask_name,
        "options": ", ".join(f"{k}={v}" for k, v in dict(scenario.mask_options).items()),
        "heads": scenario.heads,
        "kv_heads": scenario.kv_heads,
        "head_dim": scenario.head_dim,
        "kernel": scenario.kernel,
        "implementation": scenario.implementation,
        "strategy": scenario.strategy or BEST,
        "ranks": "",
        "across": "tokens",
        "up": "gpus",
    }


def scenario_of(state: State, known: Sequence[Control]) -> Scenario:
    """The scenario that the controls stand for, without a strategy.

    Args:
        state: as a link or the page gives it; nothing in it is trusted.
        known: the controls, which say what may be chosen: a link names no files.

    Raises:
        ScenarioError: one line that names the control, what was expected and what came.
    """
    for control in known:
        value = state.get(control.name)
        if control.choices and value not in control.choices:
            raise ScenarioError(f"{control.name}: {shown(value)} is unknown; {nearest(value, control.choices)}")
    if state["task"] == STEP:
        return _step_of(state)
    fields: dict[str, Any] = {
        name: _whole(state, name) for name in ("tokens_per_gpu", "gpus", "heads", "kv_heads", "head_dim")
    }
    fields |= {name: state[name] for name in ("kernel", "implementation")}
    fields |= {"cluster": _cluster(state), "mask": _mask(state)}
    if state["documents"] == GIVEN_LENGTHS:
        parts = str(state.get("lengths") or "").split(",")
        fields["documents"] = [_whole({"lengths": part}, "lengths") for part in parts]
    elif state["documents"] != ONE_DOCUMENT:
        fields["documents"] = {"distribution": state["documents"], "seed": _whole(state, "seed")}
    if state["profile"] != OWN_PROFILE:
        fields["profile"] = state["profile"]
    scenario = scenario_from(fields)
    cluster_of(scenario)
    return scenario


def _step_of(state: State) -> Scenario:
    """The training step, as ``cpsim advise --model`` asks for it.

    Raises:
        ScenarioError: a control has no value, or one that makes no sense.
    """
    if state["documents"] == GIVEN_LENGTHS:
        raise ScenarioError("documents: given lengths are for attention; choose a distribution, or advise --lengths")
    changes = [f"parallel.{name}={state[name]}" for name in ("sharding", "recompute") if state[name] != SEARCHED]
    given = {name: state.get(name) for name in DEGREES}
    changes += [f"parallel.{name}={_whole(state, name)}" for name, value in given.items() if value not in (None, "")]
    changes += [f"precision={state['precision']}"] if state["precision"] != PRECISIONS[0] else []
    cluster, gpus = _cluster(state), _whole(state, "gpus")
    load_cluster(cluster).with_gpus(gpus)
    options = Options(
        model=str(state["model"]),
        framework=str(state["framework"]),
        gpus=gpus,
        cluster=cluster,
        context=str(state["context"]),
        lengths=None if state["documents"] == ONE_DOCUMENT else str(state["documents"]),
        batch=_whole(state, "sequences") if state.get("sequences") not in (None, "") else None,
        changes=tuple(changes),
    )
    return ask(options).scenario


def is_step(state: State) -> bool:
    """Whether the page is at a training step."""
    return state.get("task") == STEP


def shown_strategy(state: State) -> str | None:
    """The strategy whose details are shown; None is the best."""
    return None if state["strategy"] == BEST else str(state["strategy"])


def given_ranks(state: State, num_ranks: int) -> list[int]:
    """The ranks whose timelines and shards are to be shown, at most eight; none where none are given.

    Raises:
        ScenarioError: what is given are not ranks of the case.
    """
    text = str(state.get("ranks") or "").strip()
    if not text:
        return []
    ranks = sorted({_whole({"ranks": part}, "ranks") for part in text.split(",")})
    if not 0 <= ranks[0] <= ranks[-1] < num_ranks:
        raise ScenarioError(f"ranks: expected numbers from 0 to {num_ranks - 1}, got {text[:60]}")
    if len(ranks) > 8:
        raise ScenarioError(f"ranks: expected at most 8, got {len(ranks)}; more cannot be told apart")
    return ranks


def _whole(state: State, name: str) -> int:
    value = state.get(name)
    try:
        return int(str(value).strip())
    except ValueError:
        got = "nothing" if value in (None, "") else repr(str(value)[:60])
        raise ScenarioError(f"{name}: expected a whole number, got {got}") from None


def _mask(state: State) -> dict[str, Any]:
    given: dict[str, Any] = {"name": state["mask"]}
    for entry in str(state.get("options") or "").split(","):
        if entry.strip():
            key, equals, value = (part.strip() for part in entry.partition("="))
            if not equals:
                raise ScenarioError(f"options: expected name=value, e.g. window=512, got {entry.strip()[:60]!r}")
            given[key] = number_or_text(value)
    return given


def _cluster(state: State) -> str:
    """The cluster, with a faster or slower network between nodes where that is asked for."""
    name, factor = str(state["cluster"]), str(state["network"])
    if factor == "1":
        return name
    if load_cluster(name).fabric is None:
        raise ScenarioError(f"network: {name} is one machine, without a network between nodes; leave it at 1")
    return f"{name} nic={factor}x"
