"""What connects GPUs: links inside a node and transports between nodes, by name, with the constants of each.

Constants are those of ``cpsim/data/transports.json``, which ``python -m studies.collectives --fit`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, TypeAdapter

from cpsim.units import CLOSED, Flag, Quantity, Rate, Seconds, Share

LinkName = Literal["nvlink", "pcie", "pcie without p2p", "xgmi"]
TransportName = Literal["infiniband", "roce", "efa", "tcpxo", "tcpx", "ethernet"]
FILE: Final = Path(__file__).parent.with_name("data") / "transports.json"
Bytes = Annotated[float, Quantity("bytes", 1, 1e15)]
Spread = Annotated[float, Quantity("", 1e-6, 3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What programs achieve on a kind of link inside a node."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    ring_share: Share
    """Of a port's rate, one direction: all channels of a ring together."""
    messages_share: Share
    """What a rank sends in an all-to-all."""
    hop_s: Seconds
    """One step of a ring."""
    sigma_log: Spread
    """Of collectives on machines that were left out."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What programs achieve on a kind of network between nodes."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    share: Share
    """Of the NICs' line rate: collectives."""
    messages_share: Share
    """All-to-alls, of what collectives achieve."""
    flow_share: Share
    """One point-to-point flow, of what collectives achieve on a NIC."""
    call_s: Seconds
    """What a collective takes beyond one inside a node, however few bytes and steps."""
    fill_s: Seconds
    """Filling a tree's pipeline, for every step of the tree."""
    sigma_log: Spread
    """Of collectives on clusters that were left out."""
    flow_sigma_log: Spread
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """NVLink switches that add and multicast."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    from_bytes_per_s: Annotated[float, Quantity("bytes/s", 0, 1e16)]
    """Of a port, at which the generation begins."""
    efficiency: Share
    loop_bytes: Bytes
    """Of every rank, what is under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the law of collectives was fitted to or takes as given."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    call_s: Seconds
    """Of a collective inside a node."""
    network_hop_s: Seconds
    """One step over a network."""
    chain_share: Share
    """Of half of what rings carry: trees without NVLS, inside a node."""
    chain_hop_s: Seconds
    """One step of a chain."""
    nvls_share: Share
    """Of a port's rate, times the generation's efficiency."""
    generations: tuple[Generation, ...]
    fill_bytes: Bytes
    """Size at which a tree's pipeline is full."""
    links: Mapping[str, Link]
    transports: Mapping[str, Transport]

    def generation(self, port_bytes_per_s: float) -> Generation:
        """The switches of NVLink ports of a rate."""
        return [one for one in self.generations if one.from_bytes_per_s <= port_bytes_per_s][-1]


@cache
def constants() -> Constants:
    """The constants that ship."""
    return read_constants(FILE)


def read_constants(path: Path) -> Constants:
    """Constants of a file like ``FILE``."""
    return TypeAdapter(Constants).validate_python(json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What connects the GPUs of a node, where no measurement of the profile says it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    link: LinkName
    """``pcie without p2p``: through the host's memory."""
    port_bandwidth_bytes_per_s: Rate
    """One GPU's port, one direction, by its data sheet: half of what is advertised for both."""
    nvls: Flag = False
    """NVLink switches add and multicast (NVSwitch of H100 and later): NCCL's NVLS."""
