"""GPUs as their data sheets describe them: what costs of a GPU that nobody measured are derived from.

``cpsim/data/gpus.json`` has those that ship, each with the source of its numbers. A cluster file names one of them or
describes another; of what it does not say, properties here state what is taken instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from cpsim.errors import ScenarioError, nearest, shown
from cpsim.units import Quantity, Rate

Architecture = Literal["ampere", "ada", "hopper", "blackwell", "blackwell ultra", "cdna3", "cdna4"]
AMD: Final = ("cdna3", "cdna4")
FP8: Final = ("ada", "hopper", "blackwell", "blackwell ultra", "cdna3", "cdna4")
"""Architectures whose tensor cores multiply FP8, twice as fast as bf16."""
BLACKWELL: Final = ("blackwell", "blackwell ultra")
EXPONENTIALS: Final = {"blackwell ultra": 32}
"""Exponentials of an SM in a clock, where they are not 16: NVIDIA's Blackwell Ultra technical brief; 16 since
Ampere (CUDA programming guide, throughput of arithmetic instructions) and by CDNA's quarter rate."""
CLOCK_HZ: Final = 1.98e9
"""Boost clock of a GPU that does not state one, as H100's and H200's."""

Clock = Annotated[float, Quantity("Hz", 1e6, 1e11)]
Flops = Annotated[float, Quantity("FLOP/s", 1e6, 1e19)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. Speeds that predictions use come from its profile, or are derived from one through this description."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=100)]
    memory_bytes: Annotated[int, Quantity("bytes", 1e6, 1e15)]
    """What the driver says there is, of GPUs measured here; of others as data sheets say."""
    num_sms: Annotated[int, Field(ge=1, le=1_000_000)]
    """Streaming multiprocessors, or AMD's compute units."""
    peak_flops_per_s: Flops
    """Dense bf16 tensor-core peak."""
    memory_bandwidth_bytes_per_s: Rate
    architecture: Architecture | None = None
    """Which kernels run, and whose measurements are nearest; by default that of the GPU of this name. None: not known;
    kernels are those of Hopper."""
    fp8_flops_per_s: Flops | None = None
    """Dense FP8 peak; None: twice bf16's on architectures that have FP8."""
    fp4_flops_per_s: Flops | None = None
    """Dense FP4 peak; None: it has none."""
    base_clock_hz: Clock | None = None
    boost_clock_hz: Clock | None = None
    """The highest that the GPU runs at; None: 1.98 GHz."""
    sustained_flops_per_s: Flops | None = None
    """What large bf16 products reach within the power limit, measured or published; None: estimated from GPUs of the
    same architecture, see ``cpsim.models.derive``."""
    power_w: Annotated[float, Quantity("W", 1, 1e5)] | None = None
    """Power limit."""
    l2_bytes: Annotated[int, Quantity("bytes", 1e3, 1e12)] | None = None
    """Last-level cache."""
    nvlink_bytes_per_s: Rate | None = None
    """Of all links to other GPUs of the node in one direction (NVLink, Infinity Fabric). None: they have PCIe only."""
    flow_bytes_per_s: Rate | None = None
    """Of one flow between two GPUs, where links go to single peers; None: all of the port."""
    pcie_bytes_per_s: Rate | None = None
    """Of the link to the host in one direction; None: 16 lanes of PCIe 5.0, of Ampere and Ada 4.0."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """GPUs that NVLink joins in machines as they are sold."""
    aliases: tuple[str, ...] = ()
    """Further names."""
    source: str = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        if self.architecture is None and (known := gpu_of_driver(self.name)) is not None:
            object.__setattr__(self, "architecture", known.architecture)

    @property
    def clock_hz(self) -> float:
        """Boost clock."""
        return self.boost_clock_hz or CLOCK_HZ

    @property
    def flops_per_clock(self) -> float:
        """Dense bf16 FLOP of one SM in a clock, at most.

        Data sheets count with a clock below the highest one; tensor cores do a power of two on NVIDIA's SMs, and where
        cores are slowed that is not one, what the data sheet says.
        """
        return self.peak_flops_per_s / (self.num_sms * self.clock_hz)

    @property
    def exponentials_per_clock(self) -> float:
        """Of one SM."""
        return EXPONENTIALS.get(self.architecture or "", 16)

    @property
    def fp8_ratio(self) -> float:
        """FP8 rate over bf16's; 0 without FP8."""
        if self.fp8_flops_per_s is not None:
            return self.fp8_flops_per_s / self.peak_flops_per_s
        return 2.0 if self.architecture is None or self.architecture in FP8 else 0.0

    @property
    def host_link_bytes_per_s(self) -> float:
        """To its host, each way.

        Source: 16 lanes of 32 or 16 GT/s, 128 of 130 bits are data (PCI Express Base Specification 5.0 and 4.0).
        """
        lane = 16e9 if self.architecture in ("ampere", "ada") else 32e9
        return self.pcie_bytes_per_s or 16 * lane * 128 / 130 / 8

    @property
    def port_bytes_per_s(self) -> float:
        """To other GPUs of its node, each way: NVLink, or PCIe where there is none."""
        return self.nvlink_bytes_per_s or self.host_link_bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """Fields of a file, without those that say nothing."""
        found = asdict(self) | {"aliases": list(self.aliases)}
        return {name: value for name, value in found.items() if value not in (None, "", [])}


@cache
def gpus() -> dict[str, Gpu]:
    """The GPUs that ship, by name."""
    path = Path(__file__).parent.with_name("data") / "gpus.json"
    read = TypeAdapter(tuple[Gpu, ...])
    found = read.validate_json(json.dumps(json.loads(path.read_text(encoding="utf-8"))["gpus"]))
    return {gpu.name: gpu for gpu in found}


def gpu_named(name: str) -> Gpu:
    """The GPU of a name or alias, in letters of any case, or as its driver or maker calls it.

    Raises:
        ScenarioError: none has it; says the nearest and all that are known.
    """
    if (found := find_gpu(name)) is not None:
        return found
    if (found := gpu_of_driver(name)) is not None and set(_words(name)) <= {*found.name.split("-"), *_usual(name)}:
        return found
    close = nearest(name, _names())
    hint = f"{close}; " if close.startswith("did") else ""
    raise ScenarioError(
        f"gpu: {shown(name)} is unknown; {hint}known are {', '.join(gpus())}; or describe it by its fields"
    )


def find_gpu(name: str) -> Gpu | None:
    """The GPU of a name or alias, in letters of any case, or None."""
    return _names().get(re.sub(r"[\s_]+", "-", name.strip().lower()))


@cache
def _names() -> dict[str, Gpu]:
    return {alias: gpu for gpu in gpus().values() for alias in (gpu.name, *gpu.aliases)}


_USUAL: Final = re.compile(
    r"nvidia|amd|instinct|tesla|tensor|core|gpu|accelerator|hgx|dgx|sxm\d?|oam|ac|hbm\d?e?|\d+g(?:i?b)?|pcie|nvl\d*"
)
"""Words around the name of a GPU that its maker uses."""
CARDS: Final = frozenset({"pcie", "nvl"})
"""Words that name a card, which other GPUs reach over PCIe."""
MEMORY_OFF: Final = 0.15
"""How far, relative, the memory in a name may be from what a driver says or a data sheet: binary and decimal units."""


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word]


def _usual(text: str) -> list[str]:
    return [word for word in _words(text) if _USUAL.fullmatch(word)]


def gpu_of_driver(text: str) -> Gpu | None:
    """The GPU that a driver means by a name such as `NVIDIA H100 80GB HBM3`, or None: cards are no modules, and what a
    name says of memory is true."""
    if (exact := find_gpu(text)) is not None:
        return exact
    words = set(_words(text))
    fitting = [gpu for gpu in gpus().values() if set(gpu.name.split("-")) <= words and _may_be(gpu, words)]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)


def _may_be(gpu: Gpu, words: set[str]) -> bool:
    """Whether nothing in a name says that it is another GPU."""
    sizes = [int(size[1]) * 1e9 for word in words if (size := re.fullmatch(r"(\d{2,4})gi?b?", word))]
    fits = all(abs(gpu.memory_bytes / size - 1) <= MEMORY_OFF for size in sizes)
    return fits and not (words & CARDS and gpu.nvlink_bytes_per_s)
