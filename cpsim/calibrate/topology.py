"""What `nvidia-smi topo -m` and `ibstat` or `ibstatus` say of a node: its GPUs, what connects them, and its NICs.

Reference: nvidia-smi's legend (NV#, PIX, PXB, PHB, NODE, SYS); NVLink 2 to 4 carry 25 GB/s a link and direction, NVLink
5 carries 50 (NVIDIA's data sheets of A100, H100 and B200).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpsim.case.files import as_profile_error, read_text
from cpsim.errors import ProfileError, shown

_LINK: Final = re.compile(r"X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|PHX")
_PORT: Final = re.compile(
    r"^(?:CA|Infiniband device) '([^']{1,60})'(.*?)(?=^(?:CA|Infiniband device) '|\Z)", re.DOTALL | re.MULTILINE
)
"""Of `ibstat` or `ibstatus`."""
NVLINK_BYTES_PER_S: Final = 25e9
NVLINK_5_BYTES_PER_S: Final = 50e9
NVLINK_5: Final = ("b100", "b200", "b300", "gb200", "gb300")


@dataclass(frozen=True, slots=True)
class Topology:
    """A matrix of `nvidia-smi topo -m`."""

    num_gpus: int
    links: int
    """NVLinks of a GPU to every other GPU; 0 where some pair has none."""
    bridged: int
    """NVLinks of pairs, where only pairs have some."""
    across_sockets: bool
    """Some GPUs reach each other through both processors only."""
    num_nics: int

    def port_bytes_per_s(self, gpu: str) -> float:
        """Of NVLink in one direction, by the name of the GPU."""
        newer = any(name in gpu.lower() for name in NVLINK_5)
        return self.links * (NVLINK_5_BYTES_PER_S if newer else NVLINK_BYTES_PER_S)

    def __str__(self) -> str:
        if self.links:
            how = f"NV{self.links} between all of them"
        else:
            how = f"NV{self.bridged} between some, else PCIe" if self.bridged else "PCIe between them"
        return f"a node of {self.num_gpus} GPUs with {how}" + (f" and {self.num_nics} NICs" if self.num_nics else "")


@dataclass(frozen=True, slots=True)
class Nics:
    """Active ports of `ibstat` or `ibstatus`."""

    count: int
    line_bytes_per_s: float
    transport: str
    """infiniband or roce, by the link layer."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.count} NICs of {self.line_bytes_per_s * 8 / 1e9:g} Gb/s ({self.transport})"


def describes_a_node(path: Path) -> str | None:
    """What a file of `nvidia-smi topo -m` or `ibstat` says, in words; None of any other."""
    found = read_node(path)
    return None if found is None else str(found)


def read_node(path: Path) -> Topology | Nics | None:
    """What a file says of a node; None where it is of neither program.

    Raises:
        ProfileError: it is, but nothing follows from it.
    """
    with as_profile_error():
        text = read_text(path)
    if re.search(r"^[ \t]{0,40}(?:\x1b\[4m)?[ \t]{0,40}GPU0[ \t]{1,40}GPU1\b", text, re.MULTILINE):
        return _topology(text, path)
    if _PORT.search(text):
        return _nics(text, path)
    return None


def _topology(text: str, path: Path) -> Topology:
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", text).split("\n")]
    header = next(cells for cells in lines if cells[:2] == ["GPU0", "GPU1"])
    names = [name for name in header if re.fullmatch(r"(?:GPU\d|NIC\d|mlx\d_|bnxt|rdma|roce|ibp)\w*", name)]
    gpus = [name for name in names if name.startswith("GPU")]
    rows = {cells[0]: cells[1 : 1 + len(names)] for cells in lines if cells and cells[0] in gpus and cells != header}
    pairs = [
        rows[name][k]
        for i, name in enumerate(gpus)
        if name in rows
        for k in range(min(len(gpus), len(rows[name])))
        if k != i
    ]
    if not pairs or not all(_LINK.fullmatch(link) for link in pairs):
        wrong = next((link for link in pairs if not _LINK.fullmatch(link)), "no row of a GPU")
        raise ProfileError(f"{path}: expected links of GPUs like NV18, PIX or SYS, got {shown(wrong)}; give all of it")
    nvlinks = [int(link[2:]) for link in pairs if link.startswith("NV")]
    return Topology(
        num_gpus=len(gpus),
        links=min(nvlinks) if len(nvlinks) == len(pairs) else 0,
        bridged=max(nvlinks, default=0),
        across_sockets="SYS" in pairs,
        num_nics=len(names) - len(gpus),
    )


def _nics(text: str, path: Path) -> Nics:
    """The active ports of the rate that most of them have; slower ones are for other things."""
    ports: list[tuple[int, str, str]] = []
    for name, body in _PORT.findall(text):
        state = re.search(r"^\s*state:\s*(?:\d+: )?(\w+)", body, re.IGNORECASE | re.MULTILINE)
        found = re.search(r"\brate:\s*(\d{1,6})", body, re.IGNORECASE)
        layer = re.search(r"link[ _]layer:\s*(\w+)", body, re.IGNORECASE)
        if state and found and state[1].lower() == "active":
            ports.append((int(found[1]), "roce" if layer and layer[1] == "Ethernet" else "infiniband", name))
    if not ports:
        raise ProfileError(
            f"{path}: expected ports in State: Active with a Rate, got none; are cables and driver there?"
        )
    rate, kind = max(((r, k) for r, k, _ in ports), key=lambda one: sum(r for r, k, _ in ports if (r, k) == one))
    others = [name for r, k, name in ports if (r, k) != (rate, kind)]
    notes = (f"{path}: left out, as other ports are faster together: {', '.join(others)}",) if others else ()
    return Nics(sum((r, k) == (rate, kind) for r, k, _ in ports), rate * 1e9 / 8, kind, notes)
