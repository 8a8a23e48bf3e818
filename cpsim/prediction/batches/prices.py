"""What a document costs on a group of so many ranks: one small table for a model on a cluster, from whole predictions.

A pack is documents that a group computes in one microbatch, forward and backward. Its time is that of all layers'
attention, to which each document adds, and of everything else, which follows from the tokens of a rank. Both are
predicted as training steps are: kernels, messages and hosts of the cluster, and the strategy's own schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.load import scenario_from
from cpsim.case.model import Model
from cpsim.errors import InfeasibleError, ScenarioError, shown
from cpsim.models.derive import DATA_SHEET
from cpsim.models.host_speed import on_host
from cpsim.prediction.case import check_names, kernel_of, profile_of
from cpsim.prediction.step.attention import Attended
from cpsim.prediction.step.costs import PARTS, stacked
from cpsim.prediction.step.frameworks import DEFAULT, framework
from cpsim.prediction.step.step import StepModel
from cpsim.prediction.steps import StepCase
from cpsim.strategies.hybrid_cp import subgroup_sizes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Part = Literal["step", "attention"]

LEAST: Final = 128
"""Tokens of a document on a rank from which on tables have it; shorter ones cost in proportion."""
POINTS: Final = 2
"""Lengths of a table in an octave."""
SAME: Final = 8
"""Documents of one length in the pack that a price is read from, at most, on groups of several ranks."""
GRAIN: Final = 256
"""Tokens that the memory limit is a multiple of."""
MOST_GRAINS: Final = 4096
"""So many of them are looked at."""
DEFAULTS: Final[Mapping[str, Any]] = {"framework": "megatron", "strategy": "zigzag_ring"}
"""How Megatron-Core runs context parallelism where its arguments do not say: key-value shards around a ring."""
_NOTHING: Final = Attended(({}, {}), 0, 0.0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Attention of documents on groups of one size."""

    length: Floats
    """Tokens of a document, ascending, ``[L]``."""
    seconds: Floats
    """What such a document adds to the attention of a pack, of all layers and both passes, ``[L]``."""
    pack_s: float
    """What a pack takes, however short its documents."""

    def of(self, lengths: Ints) -> Floats:
        """Seconds that documents of so many tokens add, ``[D]``: a line between logarithms."""
        at, known = np.log(lengths), np.log(self.length)
        found = np.exp(np.interp(at, known, np.log(self.seconds)))
        below, above = lengths < self.length[0], lengths > self.length[-1]
        found[below] *= lengths[below] / self.length[0]
        found[above] *= (lengths[above] / self.length[-1]) ** 2
        return np.asarray(found)


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """All of a pack but attention, by tokens of a rank."""

    tokens: Floats
    """Ascending, ``[T]``."""
    seconds: Floats
    """``[T]``."""
    fixed_s: float
    """What a pack takes, however few its tokens: where a line from the middle to the end of the table begins."""
    token_s: float
    """The line's seconds per token."""

    def of(self, tokens: Ints) -> Floats:
        """Seconds of packs of so many tokens of a rank, ``[N]``."""
        return np.asarray(np.interp(tokens, self.tokens, self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Times of packs on groups of ranks of one step; what was asked once is remembered."""

    case: StepCase
    part: Part = "step"
    """What is priced: all of a microbatch's passes, or the attention of one layer alone."""
    most_tokens: int
    """Tokens of a rank in a microbatch, at most."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By cost model (``cpsim.models.cost_models.GROUPS``), how many times as long it is taken to be, as a what-if."""
    _columns: dict[int, Column] = field(default_factory=dict)
    _rest: dict[int, float] = field(default_factory=dict)
    _table: list[Rest] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """Ranks of data and context parallelism together."""
        return self.case.parallel().replicas

    def sizes(self) -> Ints:
        """Sizes of groups, ascending: the powers of two that divide the ranks, and all of them."""
        return subgroup_sizes(self.num_ranks)

    def model(self, size: int) -> StepModel:
        """The step on groups of so many ranks, with hosts in time: what they are late does not add up by documents.

        Raises:
            InfeasibleError: the cluster or the model cannot be cut like this.
        """
        scenario, cut = self.case.scenario, self.case.parallel()
        cut = replace(cut, cp=size, dp=self.num_ranks // size, microbatches=1)
        if framework(scenario.framework or DEFAULT).graphs:
            cut = replace(cut, cuda_graphs="layers")
        return self.case.model(cut, "none" if size == 1 else str(scenario.strategy), scenario.knobs if size > 1 else {})

    def with_factors(self, factors: Mapping[str, float]) -> Prices:
        """These prices where cost models take so many times as long."""
        return Prices(case=self.case, part=self.part, most_tokens=self.most_tokens, factors=factors)

    def seconds(self, packs: Sequence[tuple[int, ...]], size: int) -> Floats:
        """Predicted seconds of packs, each given by its documents' lengths, ``[N]``: every one simulated by itself.

        Raises:
            InfeasibleError: the strategy cannot run one of them.
        """
        model = self.model(size)
        attended = model.attention.of(packs)
        if self.part == "attention":
            return np.array([self._sum(stacked(one.parts).sum(axis=0)) for one in attended])
        tokens = map(model.tokens, packs)
        return np.array([self._sum(model.microbatch(*one)) for one in zip(tokens, attended, strict=True)])

    def _sum(self, parts: Floats) -> float:
        return float(parts @ [self.factors.get(name, 1.0) for name in PARTS])

    def rest(self, tokens: int) -> float:
        """Seconds of all but attention, by tokens of a rank."""
        if self.part == "attention":
            return 0.0
        if tokens not in self._rest:
            self._rest[tokens] = self._sum(self.model(1).microbatch(tokens, _NOTHING))
        return self._rest[tokens]

    def rest_table(self) -> Rest:
        """Seconds of all but attention."""
        if not self._table:
            tokens = np.append(0, _grid(min(LEAST, self.most_tokens), self.most_tokens))
            seconds = np.array([self.rest(max(n, 1)) for n in tokens.tolist()])
            half = (len(tokens) - 1) // 2
            token_s = float((seconds[-1] - seconds[half]) / (tokens[-1] - tokens[half]))
            fixed_s = max(0.0, float(seconds[-1] - token_s * tokens[-1]))
            self._table.append(Rest(tokens.astype(np.float64), seconds, fixed_s, token_s))
        return self._table[0]

    def column(self, size: int) -> Column:
        """Attention on groups of so many ranks."""
        if size not in self._columns:
            self._columns[size] = self._priced(size)
        return self._columns[size]

    def _priced(self, size: int) -> Column:
        most = self.most_tokens * size
        lengths = _grid(min(LEAST * size, most), most)
        tiny = (min(max(2 * size, LEAST), most),)
        counts = np.maximum(most // lengths if size == 1 else np.minimum(SAME, most // lengths), 1)
        packs = [(length,) * count for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)]
        rests = [self.rest(-(-sum(pack) // size)) for pack in (tiny, *packs)]
        pack_s, *seconds = (self.seconds([tiny, *packs], size) - rests).tolist()
        least = pack_s / 1e3  # a document of its own never costs nothing
        each = np.maximum.accumulate(np.maximum((np.array(seconds) - pack_s) / counts, least))
        return Column(lengths.astype(np.float64), each, pack_s)


def _grid(low: int, high: int) -> Ints:
    """Whole numbers from one to another, even on a logarithmic scale."""
    count = 1 + int(np.ceil(POINTS * np.log2(high / low)))
    return np.unique(np.rint(np.geomspace(low, high, count)).astype(np.int64))


def prices_of(
    cluster: Cluster, model: Model | str, *, part: Part = "step", most_tokens: int | None = None, **fields: Any
) -> Prices:
    """Prices of a model's microbatches on a cluster.

    Args:
        cluster: its GPUs in use share the batch.
        model: dimensions, or a name of ``cpsim.case.model.MODELS``.
        part: ``step`` for all of a microbatch, ``attention`` for one layer's attention alone.
        most_tokens: of a rank in one microbatch; None is what fits into memory.
        **fields: others of a scenario, such as ``parallel={"tp": 8, "recompute": "full"}``, ``framework``, ``kernel``,
            ``strategy`` (of context parallelism inside a group) with its ``knobs``, ``precision``.

    Raises:
        ScenarioError: a field has no such value, or groups cannot be formed with it.
        InfeasibleError: the model does not fit into memory, or cannot be cut like this.
        ProfileError: there are no costs for the GPU.
    """
    given = {"model": model if isinstance(model, str) else asdict(model), "cluster": cluster.name, **DEFAULTS, **fields}
    given |= {"gpus": cluster.num_gpus, "tokens": GRAIN * cluster.num_gpus, "mask": "causal_document"}
    scenario = scenario_from(given)
    check_names(scenario)
    cut = scenario.parallel
    if cut is not None and max(cut.pp or 1, cut.cp or 1) > 1:
        raise ScenarioError("parallel: expected one stage and no cp, which the planner chooses; leave pp and cp out")
    profile = profile_of(cluster, scenario.profile or cluster.profile or DATA_SHEET)
    host = scenario.host if scenario.host is not None else cluster.host
    profile = profile if host is None else on_host(profile, host)
    if "kernel" in fields:
        kernel = kernel_of(scenario, profile)
    else:  # the usual one of the framework's that was measured on this GPU
        usual = framework(scenario.framework or DEFAULT).kernels_apart or ("fa2",)
        kernel = next((one for one in usual if (one, "bwd") in profile.attention), usual[0])
    case = StepCase(scenario.model_copy(update={"kernel": kernel}), cluster, profile)
    if most_tokens is not None and (type(most_tokens) is not int or most_tokens < 1):
        raise ScenarioError(f"most_tokens: expected tokens of a rank, a positive integer, got {shown(most_tokens)}")
    return Prices(case=case, part=part, most_tokens=most_tokens or _that_fit(case))


def _that_fit(case: StepCase) -> int:
    """Tokens of a rank in one microbatch that fit into memory."""
    model, memory = case.model(case.parallel(), "none", {}), case.cluster.gpu.memory_bytes

    def needed(tokens: int) -> int:
        return model.stage_memory(tokens, 0).needed

    grains = bisect_right(range(1, MOST_GRAINS + 1), memory, key=lambda n: needed(GRAIN * n))
    if not grains:
        raise InfeasibleError(
            f"memory: expected room for {GRAIN} tokens on a rank, which need {needed(GRAIN) / 1e9:.1f} of "
            f"{memory / 1e9:.1f} GB; raise tp, or recompute more"
        )
    return GRAIN * grains
