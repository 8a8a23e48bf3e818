"""Constants of the law of collectives from published rows.

Every constant begins at what NCCL's own model or a data sheet says, and leaves it as far as rows make it. What a
transport has of its own is a factor on what all have, so that one of which there are no rows is like the others. Rows
of a cluster count less the more there are, and single ones that nothing explains hardly count (Cauchy).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from cpsim.case.transports import FILE, Constants, Generation, Link, Transport
from cpsim.models.network.nccl import seconds
from studies.collectives.rows import Row

Floats = NDArray[np.float64]
FITTED: Final = ("efa", "roce", "tcpxo", "tcpx")
WIDTH: Final = 0.1
"""Logarithm of an error from which on rows count less."""
ROWS: Final = 8
"""Rows of a cluster that count whole."""

_COMMON: Final = {
    "torch_s": (20e-6, 0.5),
    "call_s": (20e-6, 0.4),
    "ring_share": (0.80, 0.1),
    "hop_s": (2e-6, 0.15),
    "chain_share": (0.95, 0.1),
    "chain_hop_s": (5e-6, 0.5),
    "nvls_share": (0.80, 0.1),
    "loop_hopper": (2e6, 0.4),
    "loop_blackwell": (4e6, 0.5),
    "fill_bytes": (20 * 2.0**20, 0.3),
    "share": (0.93, 0.05),
    "net_call_s": (50e-6, 0.4),
    "fill_s": (45e-6, 0.6),
}
_OWN: Final = {"share": (1.0, 0.08), "net_call_s": (1.0, 0.3), "fill_s": (1.0, 0.4)}
STARTS: Final[Mapping[str, tuple[float, float]]] = {
    **_COMMON,
    **{f"{name} {transport}": start for transport in FITTED for name, start in _OWN.items()},
    "net_call_s tcpx": (12.0, 0.5),
}
"""Where every constant begins, and how far, in logarithms, it goes lightly. Steps of TCP through a kernel take tenths
of a millisecond, those of RDMA hundredths."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants."""

    values: Mapping[str, float]

    @property
    def torch_s(self) -> float:
        """What PyTorch's hosts add."""
        return self.values["torch_s"]

    def of(self, name: str, transport: str) -> float:
        """A constant of a transport; of one without rows, what all have."""
        return self.values[name] * self.values.get(f"{name} {transport}", 1.0)

    def constants(self, spread: float = 0.16) -> Constants:
        """As the law reads them."""
        value = self.values
        generations = (
            Generation(from_bytes_per_s=0.0, efficiency=0.85, loop_bytes=value["loop_hopper"]),
            Generation(from_bytes_per_s=6e11, efficiency=0.74, loop_bytes=value["loop_blackwell"]),
        )
        return Constants(
            call_s=value["call_s"],
            network_hop_s=14e-6,
            chain_share=min(1.0, value["chain_share"]),
            chain_hop_s=value["chain_hop_s"],
            nvls_share=value["nvls_share"],
            generations=generations,
            fill_bytes=value["fill_bytes"],
            links=_links(value["ring_share"], value["hop_s"], spread),
            transports={name: self._transport(name, spread) for name in _TRANSPORTS},
        )

    def _transport(self, name: str, spread: float) -> Transport:
        like, wider, words = _TRANSPORTS[name]
        return Transport(
            share=min(1.0, self.of("share", like)),
            messages_share=0.9,
            flow_share=0.56,
            call_s=self.of("net_call_s", like),
            fill_s=self.of("fill_s", like),
            sigma_log=spread * wider,
            flow_sigma_log=0.3,
            source=words,
        )


_FITTED_WORDS: Final = "python -m studies.collectives --fit"
_TRANSPORTS: Final = {
    "infiniband": ("roce", 1.0, _FITTED_WORDS + ", as roce: verbs, too; rows of one cluster, of DGX-2"),
    "roce": ("roce", 1.0, _FITTED_WORDS),
    "efa": ("efa", 1.0, _FITTED_WORDS),
    "tcpxo": ("tcpxo", 1.0, _FITTED_WORDS),
    "tcpx": ("tcpx", 1.5, _FITTED_WORDS + "; two clusters, which differ by 1.4 from each other"),
    "ethernet": ("tcpx", 2.0, "as tcpx, TCP through the kernel; no published rows here"),
}
"""By name: whose constants, by how much the spread is wider, and the source."""


def _links(ring_share: float, hop_s: float, spread: float) -> dict[str, Link]:
    def link(share: float, messages: float, wider: float, words: str) -> Link:
        return Link(ring_share=share, messages_share=messages, hop_s=hop_s, sigma_log=spread * wider, source=words)

    sheet = "share assumed: no published rows here"
    cards = "A100 PCIe by MooreThreads/SimuMax at 4dcaae5, configs/system/a100_pcie.json"
    return {
        "nvlink": link(ring_share, 0.74, 1.0, _FITTED_WORDS),
        "xgmi": link(ring_share, 0.6, 1.5, "as nvlink"),
        "pcie": link(0.66, 0.61, 2.0, cards),
        "pcie across processors": link(0.4, 0.26, 2.0, cards),
        "pcie without p2p": link(0.35, 0.3, 2.5, sheet),
    }


def predicted(rows: Sequence[Row], fit: Fit) -> Floats:
    """Seconds of every row, in their order."""
    known, found = fit.constants(), []
    for _, some in groupby(rows, key=lambda row: (row.cluster, row.machine, row.kind, row.by_torch)):
        mine = list(some)
        machine = mine[0].machine
        if mine[0].transport:
            transport = known.transports[mine[0].transport]
            rate = mine[0].line_bytes_per_s * transport.share
            machine = replace(machine, transport=transport, node_bytes_per_s=rate)
        took = seconds(mine[0].kind, np.array([row.nbytes for row in mine]), machine, known)
        found.append(took + (fit.torch_s if mine[0].by_torch else 0.0))
    return np.concatenate(found)


def fit(rows: Sequence[Row]) -> Fit:
    """The constants that these rows say."""
    names, starts = list(STARTS), np.array(list(STARTS.values()))
    measured = np.log([row.seconds for row in rows])
    many = Counter(row.cluster for row in rows)
    weight = np.array([min(1.0, ROWS / many[row.cluster]) ** 0.5 for row in rows])

    def named(steps: Floats) -> Fit:
        values = starts[:, 0] * np.exp(steps * starts[:, 1])
        return Fit(dict(zip(names, values.tolist(), strict=True)))

    def residuals(steps: Floats) -> Floats:
        off = (measured - np.log(predicted(rows, named(steps)))) / WIDTH
        return np.concatenate([weight * np.sign(off) * np.sqrt(np.log1p(off * off)), steps])

    return named(least_squares(residuals, np.zeros(len(names))).x)


def left_out(rows: Sequence[Row]) -> Floats:
    """log(predicted / measured) of every row by the constants that all other clusters say."""
    errors = np.empty(len(rows))
    for cluster in dict.fromkeys(row.cluster for row in rows):
        mine = np.array([row.cluster == cluster for row in rows])
        others = fit([row for row in rows if row.cluster != cluster])
        some = [row for row in rows if row.cluster == cluster]
        errors[mine] = np.log(predicted(some, others) / [row.seconds for row in some])
    return errors


def spread_of(errors: Floats) -> float:
    """Standard deviation of a normal error that is as often within 90 % limits as these."""
    return float(np.quantile(np.abs(errors), 0.9)) / 1.645


def save(found: Fit, errors: Floats) -> None:
    """Writes the file that ships, numbers to three digits."""
    data = _rounded(asdict(found.constants(spread_of(errors))))
    FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value
