"""Layers with a state instead of keys, by microbatch: convolution, scan and gated norm on the ranks that have tokens.

Together they are one op of a layer, as attention is. Context-parallel ranks exchange what the framework's code has
them exchange, see ``cpsim.strategies.states``; nothing runs beside it. Tokens that attention has in zigzag order are
put in order after the first all-to-all and back before the second, as Megatron-Core does, which is a copy each way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.gpu import gpus
from cpsim.case.model import Model, Recurrent
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.models.elementwise import elementwise_seconds
from cpsim.models.network.collective import transfer_seconds
from cpsim.models.network.communication import Communication
from cpsim.models.recurrent import RecurrentCosts, costs_on, measured, scan_of
from cpsim.prediction.step.attention import CAUSAL, PASSES, Attended, Attention
from cpsim.prediction.step.costs import Parts
from cpsim.schedule.schedule import Kind
from cpsim.strategies.states import Exchange, Traffic, traffic

if TYPE_CHECKING:
    from cpsim.models.profile import Profile

MIXED: Final = "layers that differ: every stage has the mean of them, whichever it holds"
SHARED_KEYS: Final = (
    "keys and values of other layers: exchanged anew in every layer that attends to them, their gradients added up; of "
    "pipelines, taken to be of the same stage"
)
KDA: Final = (
    "layers with a state: scans of kda were measured with 32 heads of 128, as single sequences, and outputs not checked"
)
SWEPT: Final = {"short_conv": (4, 6), "norm": (6, 10)}
"""Bytes that a convolution and a gated norm read and write for an element, forward and backward."""
NORMS: Final = {"gated_delta": "gated_norm", "mamba2": "grouped_norm", "kda": "gated_norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scans:
    """Layers with a state of one model, cut in one way."""

    layer: Recurrent
    tp: int
    cluster: Cluster
    """The context-parallel group."""
    profile: Profile
    exchange: Exchange
    mask: str
    slowest: float
    """Time of the slowest GPU over that of the mean one."""
    _known: dict[tuple[int, ...], Attended] = field(default_factory=dict)

    def of(self, microbatches: Sequence[tuple[int, ...]]) -> list[Attended]:
        """Microbatches, each given by its document lengths [tokens].

        Raises:
            InfeasibleError: heads or masks do not allow it.
        """
        self._check()
        for documents in dict.fromkeys(microbatches):
            if documents not in self._known:
                self._known[documents] = self._one(documents)
        return [self._known[documents] for documents in microbatches]

    @property
    def ranks(self) -> int:
        """Context-parallel ones."""
        return self.cluster.num_gpus

    @property
    def costs(self) -> RecurrentCosts:
        """On the cluster's GPU: the profile's own, or those that ship."""
        if self.profile.scans is not None:
            return self.profile.scans
        known = measured()
        return costs_on(self.cluster.gpu, gpus()[known.gpu], known)

    def _check(self) -> None:
        """Whether heads can be cut like this.

        Raises:
            InfeasibleError: they cannot.
        """
        if self.mask not in CAUSAL:
            raise InfeasibleError(
                f"model: layers with a state read tokens in order; expected mask causal or "
                f"causal_document, got {self.mask}"
            )
        parts = self.tp * (self.ranks if self.exchange == "heads" else 1)
        heads, groups = self.layer.value_heads, self.layer.key_heads
        if heads % parts or (groups % parts and parts % groups):
            raise InfeasibleError(
                f"cp: expected tp x cp to divide {heads} heads of layers with a state, and to be a divisor or a "
                f"multiple of their {groups} key heads; got {parts}"
            )

    def _one(self, documents: tuple[int, ...]) -> Attended:
        lens = documents if self.mask == "causal_document" else (sum(documents),)
        tokens = -(-sum(lens) // self.ranks)
        sent = traffic(self.exchange, self.layer, tokens, self.ranks, self.tp)
        parts = [self._pass(pass_, lens, tokens, sent) for pass_ in PASSES]
        exchange = 2 * (sent.to_heads + sent.to_tokens) + sent.gathered + sent.state
        note = f"layers with a state: {self.costs.source}" + f"; ranks exchange {self.exchange}" * (self.ranks > 1)
        notes = (note, *((KDA,) if self.layer.kind == "kda" and self.profile.scans is None else ()))
        return Attended((parts[0], parts[1]), exchange, 2 * sent.sent(self.ranks), 0, notes=notes)

    def _pass(self, pass_: str, lens: tuple[int, ...], tokens: int, sent: Traffic) -> Parts:
        """Seconds by cost model of the slowest rank."""
        by_heads, costs = self.exchange == "heads", self.costs
        scan = scan_of(self.layer, self.tp * (self.ranks if by_heads else 1))
        shards = [lens] if by_heads else cut(lens, self.ranks)
        scans = [costs.scan_s(scan, pass_, shard) for shard in shards]
        if not by_heads and self.ranks > 1:
            scans = [s + costs.own_state_s(scan, pass_, shard) for s, shard in zip(scans, shards, strict=True)]
        which = PASSES.index(pass_)
        channels, values = (tokens * n // self.tp for n in (self.layer.channels, self.layer.values))
        end = "_bwd" * which
        swept = costs.sweep_s(f"short_conv{end}", SWEPT["short_conv"][which] * channels)
        swept += costs.sweep_s(f"{NORMS[self.layer.kind]}{end}", SWEPT["norm"][which] * values)
        found = dict[str, float]({f"attention {pass_}": max(scans) * self.slowest, "elementwise of layers": swept})
        for name, seconds in self._exchanged(sent).items():
            found[name] = found.get(name, 0.0) + seconds
        return found

    def _exchanged(self, sent: Traffic) -> Parts:
        """Seconds by cost model of what ranks exchange in a pass."""
        found = defaultdict[str, float](float)
        for kind, nbytes in ((Kind.ALL_TO_ALL, sent.to_heads), (Kind.ALL_TO_ALL, sent.to_tokens)):
            if nbytes:
                where, seconds = self._collective(kind, nbytes)
                found[where] += seconds
                copies = elementwise_seconds(self.profile.elementwise, "copy", 4 * nbytes)  # for ranks, and in order
                found["elementwise of layers"] += float(copies)
        if sent.gathered:
            where, seconds = self._collective(Kind.ALL_GATHER, sent.gathered)
            found[where] += seconds
            read = elementwise_seconds(self.profile.elementwise, "copy", sent.gathered)
            found["elementwise of layers"] += float(read)
        for nbytes, hops in ((sent.state, sent.hops), (sent.halo, 1)):
            if nbytes:
                where, seconds = self._message(nbytes)
                found[where] += hops * seconds
        return dict(found)

    def _collective(self, kind: Kind, nbytes: int) -> tuple[str, float]:
        """Cost model and seconds."""
        communication = Communication(self.cluster, self.profile)
        seconds, _, _, between = communication.collective(kind, float(nbytes), self.ranks, self.cluster.num_nodes)
        return "collective between nodes" if between else "collective", seconds

    def _message(self, nbytes: int) -> tuple[str, float]:
        """Cost model and seconds of a message to the next rank, the slowest one of all."""
        fabric = self.cluster.fabric
        if fabric is None or self.cluster.num_nodes == 1:
            return "transfer", float(transfer_seconds(self.profile.collective, nbytes, 2))
        return "transfer between nodes", fabric.latency_s + nbytes / fabric.flow_bandwidth_bytes_per_s


def cut(lens: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Parts of documents on each rank, which holds consecutive tokens."""
    ends, total = np.cumsum(lens), int(sum(lens))
    bounds = [rank * total // ranks for rank in range(ranks + 1)]
    found = []
    for low, high in pairwise(bounds):
        inside = np.union1d(ends[(ends > low) & (ends < high)], [low, high])
        found.append(tuple(int(n) for n in np.diff(inside)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What layers of several kinds do with tokens of other positions, by microbatch."""

    attends: Attention
    kinds: tuple[tuple[float, Attention | Scans], ...]
    """As ``Model.kinds``: the share of a kind, and what its layers have."""

    @property
    def cluster(self) -> Cluster:
        """The context-parallel group."""
        return self.attends.cluster

    @property
    def kernel(self) -> str:
        """Of attention."""
        return self.attends.kernel

    def workload(self, documents: tuple[int, ...]) -> Workload:
        """Attention of one microbatch on the group."""
        return self.attends.workload(documents)

    def of(self, microbatches: Sequence[tuple[int, ...]]) -> list[Attended]:
        """The mean layer of microbatches, with those of each kind.

        Raises:
            InfeasibleError: the strategy or a layer with a state cannot run one of them.
        """
        every = [one.of(microbatches) for _, one in self.kinds]
        return [self._mean(one) for one in zip(*every, strict=True)]

    def _mean(self, each: Sequence[Attended]) -> Attended:
        shares = [share for share, _ in self.kinds]
        both = [self._parts(shares, [one.parts[pass_] for one in each]) for pass_ in (0, 1)]
        return Attended(
            (both[0], both[1]),
            max(one.exchange for one in each),
            sum(share * one.sent for share, one in zip(shares, each, strict=True)),
            round(sum(share * one.area for share, one in zip(shares, each, strict=True))),
            kept=max(one.kept for one in each),
            notes=tuple(dict.fromkeys(note for one in each for note in one.notes)),
            kinds=tuple(each) if len(each) > 1 else (),
        )

    @staticmethod
    def _parts(shares: Sequence[float], parts: Sequence[Parts]) -> Parts:
        names = dict.fromkeys(name for each in parts for name in each)
        return {
            name: sum(share * each.get(name, 0.0) for share, each in zip(shares, parts, strict=True)) for name in names
        }


def mixed(attends: Attention, model: Model, exchange: Exchange) -> Mixed:
    """Layers of a model of which some have a state.

    Args:
        attends: what those have that do not.
        model: with all kinds of layers.
        exchange: of context-parallel ranks in layers with a state.
    """
    kinds = list[tuple[float, Attention | Scans]]()
    for share, one in model.kinds:
        if one.recurrent is None:
            kinds.append((share, attends))
            continue
        scans = Scans(
            layer=one.recurrent,
            tp=attends.tp,
            cluster=attends.cluster,
            profile=attends.profile,
            exchange=exchange,
            mask=attends.mask,
            slowest=max(attends.slowest.values()),
        )
        kinds.append((share, scans))
    return Mixed(attends=attends, kinds=tuple(kinds))
