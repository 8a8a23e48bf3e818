"""A published row: what ran as a scenario, what was published of it, and what was assumed on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cpsim.case.load import scenario_from
from cpsim.case.scenario import ModelSection, Scenario
from cpsim.prediction.step.frameworks import Framework

FOLDER: Final = Path(__file__).parent
TABLES, CLUSTERS, SAID = (FOLDER / name for name in ("tables", "clusters", "said"))
GIB: Final = 2.0**30
Line = Mapping[str, str]
"""One line of a table, by column."""
Refusal = Literal["cannot", "not measured"]
"""Why a row has no scenario: cpsim cannot say it, or nobody has measured its GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What a published peak of memory is."""

    nbytes: float
    reserved: bool = False
    """Whether it is what the allocator reserved; otherwise what it gave out."""
    stage: int | None = None
    """Pipeline stage of the rank whose peak was logged; None: the fullest."""
    cublas: int | None = None
    """Bytes of a workspace of cuBLAS where an environment variable says them; None: PyTorch's own choice."""
    tied: bool = False
    """Whether both embeddings are one tensor, on one stage, which no scenario says."""


@dataclass(frozen=True, slots=True)
class Code:
    """Whose code runs a step, where no scenario can say it: what differs from a scenario's framework."""

    source: str
    of: Callable[[Framework], Framework]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run."""

    name: str
    """What ran, in words."""
    gpu: str
    """As people write it, e.g. H100."""
    gpus: int
    framework: str
    """Whose code ran."""
    precision: str = "bf16"
    """Of linear layers."""
    cp: int = 1
    """Context-parallel ranks."""
    routed: bool = False
    """Whether there are experts."""
    fields: Mapping[str, Any] | None = None
    """Of the scenario; None where there is none."""
    why: str = ""
    """Why there is none."""
    refusal: Refusal = "cannot"
    code: Code | None = None
    time_s: float | None = None
    """Published seconds of a step or call."""
    peak: Peak | None = None
    """Published memory."""
    assumed: tuple[str, ...] = ()
    """What the row does not say."""
    ambiguous: tuple[str, ...] = ()
    """What could be meant otherwise."""
    edition: str = ""
    """Software that sites shared: rows of one edition with equal scenarios differ by their sites alone."""
    source: str = ""
    kind: str = ""
    """Whose reader read it."""
    number: str = ""
    """Line of its table, from 1, after the table's name where that is not ours."""

    @property
    def key(self) -> str:
        """Kind and line."""
        return f"{self.kind} {self.number}"

    @property
    def scenario(self) -> Scenario | None:
        """What ran."""
        return None if self.fields is None else scenario_from(dict(self.fields))

    @property
    def group(self) -> str:
        """Kind, and whether there are experts."""
        return f"{self.kind}, experts" if self.routed else self.kind


def instead(framework: Framework) -> Code:
    """Another framework."""
    return Code(framework.source, lambda _: framework)


def left_out(why: str, refusal: Refusal = "cannot") -> dict[str, Any]:
    """Fields of a row that no scenario says."""
    return {"why": why, "refusal": refusal}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One kind of table."""

    file: str
    """Ours, in the folder of tables."""
    columns: frozenset[str]
    """Those that tell this kind from others."""
    read: Callable[[Line], Row]


def number(text: str | None, default: int = 1) -> int:
    """A count that a table may leave out or write as 8.0."""
    return default if text in (None, "", "-", "n/a", "null") else int(float(str(text)))


def experts(model: object) -> bool:
    """Whether a model has experts."""
    if isinstance(model, ModelSection):
        return bool(model.experts)
    return isinstance(model, Mapping) and bool(model.get("experts"))
