"""Cases around a case: what a map goes over, and the case that each of its cells stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cpsim.case.load import scenario_from
from cpsim.case.resolve import cluster_of
from cpsim.case.scenario import Scenario
from cpsim.errors import ScenarioError, nearest, shown
from cpsim.masks.names import MASK_NAMES
from cpsim.report.lengths import scaled_documents
from cpsim.units import format_count

LENGTHS: Final = (1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Sequence lengths as multiples of the case's."""
NODES: Final = (1 / 8, 1 / 4, 1 / 2, 1)
"""Nodes as multiples of the case's; of a small case twice as many instead of an eighth."""
FEW_NODES: Final = 6
"""A case of at most so many nodes is small."""
NETWORKS: Final = (0.25, 0.5, 1, 2, 4)
"""Speeds of the network as multiples of the case's."""
MOST_UNITS: Final = 10_000
"""Of a unit of tokens, so many are more than a person reads."""
PARTS: Final = (256, 64, 16, 4, 1)
"""Equal documents into which all tokens are cut."""
Value = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What changes along one side of a map."""

    title: str
    values: Callable[[Scenario], Sequence[Value]]
    """Of a case, ascending."""
    text: Callable[[Any], str]
    """Of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One cell of a map before it is answered."""

    at: tuple[int, int]
    """Its place along both axes."""
    scenario: Scenario | None
    """None where there is no such case."""
    note: str = ""
    """What is otherwise than the axes say, or why there is no such case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """A map: a case, and what changes to the right and upwards."""

    scenario: Scenario
    across: str = "tokens"
    up: str = "gpus"

    def __post_init__(self) -> None:
        for name, axis in (("across", self.across), ("up", self.up)):
            if axis not in AXES:
                raise ScenarioError(f"{name}: {shown(axis)} is no axis of a map; {nearest(axis, AXES)}")
        if self.across == self.up:
            raise ScenarioError(f"up: expected another axis than across, got {self.up} twice")

    @property
    def axes(self) -> tuple[Axis, Axis]:
        return AXES[self.across], AXES[self.up]

    @property
    def values(self) -> tuple[Sequence[Value], Sequence[Value]]:
        """Values along both axes.

        Raises:
            ScenarioError: there is nothing to change along one of them.
        """
        right, up = (axis.values(self.scenario) for axis in self.axes)
        return right, up

    def spots(self) -> list[Spot]:
        """All cells, row by row.

        Raises:
            ScenarioError: there is nothing to change along one of the axes.
        """
        right, up = self.values
        return [
            _spot(self.scenario, (x, y), {self.across: across, self.up: above})
            for y, above in enumerate(up)
            for x, across in enumerate(right)
        ]


def _spot(scenario: Scenario, at: tuple[int, int], values: Mapping[str, Value]) -> Spot:
    try:
        made, note = _changed(scenario, values)
    except ScenarioError as error:
        return Spot(at=at, scenario=None, note=str(error))
    return Spot(at=at, scenario=made, note=note)


def _changed(scenario: Scenario, values: Mapping[str, Value]) -> tuple[Scenario, str]:
    """The case with other values, and what is otherwise than they say.

    Raises:
        ScenarioError: there is no such case.
    """
    gpus, wanted = int(values.get("gpus", scenario.gpus)), int(values.get("tokens", scenario.num_tokens))
    tokens = max(1, round(wanted / gpus)) * gpus
    note = "" if tokens == wanted else f"{format_count(tokens)} tokens, which {gpus} GPUs divide evenly"
    fields = scenario.to_dict() | {"gpus": gpus, "tokens": tokens, "cluster": scenario.cluster}
    if "documents" in values:
        fields |= _cut(scenario, tokens, int(values["documents"]))
    elif isinstance(scenario.documents, tuple):
        fields["documents"] = list(scaled_documents(scenario.documents, tokens) or ())
    if "kv_heads" in values:
        fields["kv_heads"] = int(values["kv_heads"])
    if values.get("network", 1) != 1:
        fields["cluster"] += f" nic={values['network']:g}x"
    if "nics" in values:
        fields["cluster"] += f" nics={values['nics']}"
    left_out = ("tokens_per_gpu", "strategy", "knobs", "pass")
    made = scenario_from({name: value for name, value in fields.items() if name not in left_out})
    cluster_of(made)
    return made, note


def _cut(scenario: Scenario, tokens: int, length: int) -> dict[str, Any]:
    """Documents of one length, the last of which may be shorter, under a mask that keeps them apart."""
    name = f"{scenario.mask_name}_document"
    mask = {"mask": name} if MASK_NAMES[scenario.mask_name].documents == "ignored" and name in MASK_NAMES else {}
    whole, rest = divmod(tokens, length)
    return {"documents": [length] * whole + [rest] * (rest > 0)} | mask


def tokens_text(tokens: Value) -> str:
    """Tokens as context lengths are said, e.g. ``768k``, where that is exact and short."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if tokens % unit == 0 and tokens < MOST_UNITS * unit:
            return f"{tokens // unit}{name}"
    return format_count(tokens)


def _lengths(scenario: Scenario) -> list[int]:
    return sorted({max(1, round(scenario.num_tokens * factor)) for factor in LENGTHS})


def _gpus(scenario: Scenario) -> list[int]:
    """Whole nodes around those of the case; of one machine, a part of it."""
    cluster = cluster_of(scenario)
    node, nodes = cluster.gpus_per_node, cluster.num_nodes
    if cluster.fabric is None:
        counts = {2, node // 2, node}
    else:
        factors = (*NODES[1:], 2) if nodes <= FEW_NODES else NODES
        counts = {max(1, round(nodes * factor)) * node for factor in factors}
    return sorted(count for count in counts | {scenario.gpus} if count > 1)


def _documents(scenario: Scenario) -> list[int]:
    return sorted({max(1, scenario.num_tokens // parts) for parts in PARTS})


def _networks(scenario: Scenario) -> Sequence[float]:
    if cluster_of(scenario).fabric is None:
        raise ScenarioError(f"map: {scenario.cluster} is one machine without a network; choose another axis")
    return NETWORKS


def _nics(scenario: Scenario) -> list[int]:
    """Powers of two up to one for each GPU of a node."""
    _networks(scenario)
    node = cluster_of(scenario).gpus_per_node
    return [count for count in (1, 2, 4, 8, 16) if count <= node]


def _kv_heads(scenario: Scenario) -> list[int]:
    """The divisors of the heads that are powers of two, the last few of them."""
    found = {2**power for power in range(17) if scenario.heads % 2**power == 0} | {scenario.kv_heads}
    return sorted(found)[-5:]


AXES: Final[Mapping[str, Axis]] = {
    "tokens": Axis(title="sequence length [tokens]", values=_lengths, text=tokens_text),
    "gpus": Axis(title="GPUs", values=_gpus, text=str),
    "documents": Axis(title="length of every document [tokens]", values=_documents, text=tokens_text),
    "network": Axis(title="speed of the network, times", values=_networks, text=lambda x: f"{x:g}"),
    "nics": Axis(title="NICs a node", values=_nics, text=str),
    "kv_heads": Axis(title="key-value heads", values=_kv_heads, text=str),
}
