"""How people write a cluster in short, as `nics: 4 x 200G`, and what holds where they say nothing."""

from __future__ import annotations

import re
from typing import Any, Final

from cpsim.case.transports import constants
from cpsim.errors import ScenarioError, shown
from cpsim.units import Quantity

NICS: Final = re.compile(r"\s*(\d{1,4})\s*[xX*\u00d7]\s*(\d{1,6}(?:\.\d{1,6})?)\s*(\S{0,8})\s*")
PORT: Final = re.compile(r"\s*(nvlink|pcie without p2p|pcie|xgmi)\s*(\d.*?)\s*(nvls)?\s*", re.IGNORECASE)
DEFAULT_TRANSPORT: Final = "roce"
FLOW_SHARE: Final = 0.56
"""Of a NIC, where no transport says it: un-batched ring steps of two H100 nodes, as `dgx-h100` has them."""
LATENCY_S: Final = 1e-4
SIGMA_LOG: Final = (0.15, 0.3)
"""Of collectives and flows, where no transport says it: as of `dgx-h100`."""


HIGHEST: Final = 1e16
"""Bytes per second."""


def filled(data: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """A cluster's fields, short ways of writing written out, and a fabric's defaults, which say what they are.

    Args:
        data: fields of a file.
        problems: what is wrong is added; such fields are then left out, so that the rest can be checked, too.
    """
    data = dict(data)
    if isinstance(data.get("inside"), str):
        try:
            data["inside"] = _inside(data["inside"])
        except ScenarioError as error:
            problems.append(str(error))
            del data["inside"]
    elif isinstance(data.get("inside"), dict):
        data["inside"] = _lower(data["inside"], "link")
    if "nics" in data and "fabric" not in data:
        data["fabric"] = {"nics": data.pop("nics")} | (
            {"transport": data.pop("transport")} if "transport" in data else {}
        )
    if isinstance(data.get("fabric"), str):
        data["fabric"] = {"nics": data["fabric"]}
    if isinstance(data.get("fabric"), dict):
        data["fabric"] = _lower(data["fabric"], "transport", "grade")
        if "nics" in data["fabric"]:
            try:
                read_nics(data["fabric"]["nics"])
            except ScenarioError as error:
                problems.append(str(error))
                data["fabric"] |= {"nics": "1 x 1G"}
        data["fabric"] = _filled_fabric(data["fabric"], data.get("gpus_per_node"))
    return data


def _lower(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v.lower() if k in names and isinstance(v, str) else v for k, v in fields.items()}


def _inside(text: str) -> dict[str, Any]:
    found = PORT.fullmatch(text)
    if found is None:
        raise ScenarioError(
            f"inside: expected a link and a port's rate in one direction, got {shown(text)}; e.g. "
            "'nvlink 450 GB/s nvls' (H100), 'nvlink 300 GB/s' (A100) or 'pcie 32 GB/s' (16 lanes of PCIe 4.0)"
        )
    return {
        "link": found[1].lower(),
        "port_bandwidth_bytes_per_s": found[2],
        "nvls": found[3] is not None,
    }


def _filled_fabric(fabric: dict[str, Any], gpus_per_node: object) -> dict[str, Any]:
    """A fabric's fields with `nics` written out and with defaults; NICs of one GPU are one, as programs use them."""
    fabric, taken = dict(fabric), []
    if "nics" in fabric:
        count, line = read_nics(fabric.pop("nics"))
        if type(gpus_per_node) is int and 0 < gpus_per_node < count and count % gpus_per_node == 0:
            each, count = count // gpus_per_node, gpus_per_node
            line *= each
            taken.append(f"{each} NICs of a GPU as one")
        if "transport" not in fabric:
            fabric["transport"] = DEFAULT_TRANSPORT
            taken.append(f"transport {DEFAULT_TRANSPORT}, as none is said")
        known = constants().transports.get(fabric["transport"]) if isinstance(fabric["transport"], str) else None
        share = known.share if known else 1.0
        fabric.setdefault("nics_per_node", count)
        if "nic_bandwidth_bytes_per_s" not in fabric:
            fabric["nic_bandwidth_bytes_per_s"] = line * share
            taken.append(f"NIC {share:.3g} of its line rate of {line * 8 / 1e9:g} Gb/s")
    known = constants().transports.get(str(fabric.get("transport")))
    rate = fabric.get("nic_bandwidth_bytes_per_s")
    defaults: dict[str, Any] = {
        "latency_s": LATENCY_S,
        "sigma_log": known.sigma_log if known else SIGMA_LOG[0],
        "flow_sigma_log": known.flow_sigma_log if known else SIGMA_LOG[1],
        "grade": "data sheet",
    }
    if isinstance(rate, int | float) and abs(rate) <= HIGHEST:  # others are refused with the rest
        defaults["flow_bandwidth_bytes_per_s"] = rate * (known.flow_share if known else FLOW_SHARE)
    missing = {name: value for name, value in defaults.items() if name not in fabric}
    taken += [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in missing.items()
    ]
    return {"source": f"defaults: {', '.join(taken)}" if taken else "the cluster file", **missing, **fabric}


def read_nics(text: object) -> tuple[int, float]:
    """Number and line rate [bytes/s] of NICs, of a text like ``4 x 200G``."""
    found = NICS.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        unit = {"": "Gb/s", "g": "Gb/s", "gb": "Gb/s", "gbit": "Gb/s", "gbps": "Gb/s"}.get(found[3].lower(), found[3])
        unit = {"gbit/s": "Gb/s", "gb/s": "Gb/s"}.get(unit, unit) if "B" not in unit else unit
        try:
            return int(found[1]), float(Quantity("bytes/s", 1e5, 1e13).read(f"{found[2]} {unit}"))
        except ValueError:
            pass
    raise ScenarioError(
        f"nics: expected their number and line rate, e.g. 4 x 200G or 8 x 50 GB/s, got {shown(text)}; "
        "200G is 200 Gb/s for each"
    )
