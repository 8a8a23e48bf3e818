"""What every field of a measurement file is: text, flag, or numbers of a unit and a range; and which of them an op has.

Fields that are not listed are kept as they are. Numbers may be written with their unit, as in ``"1.98 GHz"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from cpsim.errors import shown, unknown_name
from cpsim.models.network.collective import COLLECTIVES
from cpsim.units import MEASURED_S, Quantity

_CLOCK: Final = Quantity("Hz", 0, 1e13)
"""0 where no clock could be read."""
_SIZE: Final = Quantity("bytes", 1, 1e16)
_TOKENS: Final = Quantity("tokens", 0, 1e10)
_COUNT: Final = Quantity("", 1, 1e7)
_NUMBER: Final = Quantity("", 0, 1e7)
_ELEMENTS: Final = Quantity("elements", 1, 1e10)

_FLOPS: Final = Quantity("FLOP/s", 0, 1e19)
_BANDWIDTH: Final = Quantity("bytes/s", 0, 1e16)

_SHAPE: Final = ("kernel", "num_heads", "num_kv_heads", "head_dim", "causal", "varlen", "q_lens", "k_lens")
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": (*_SHAPE, "pass"),
    "memory": (*_SHAPE, "pass", "peak_bytes"),
    "elementwise": ("kind", "nbytes"),
    "rows": ("kind", "nbytes"),
    "cached": ("kind", "nbytes", "reused"),
    "gemm": ("kind", "m", "n", "k"),
    "layer_op": ("kind", "variant", "width", "nbytes"),
    "linear": ("kernel", "pass", "key_heads", "value_heads", "key_dim", "value_dim", "chunk", "q_lens", "states"),
    "layer": ("model", "tp", "q_lens", "kernel", "recompute", "variant", "sizes"),
    "host": ("kind",),
    "graph": ("tokens", "nbytes", "rounds", "attention_s", "many_s", "both_s", "message_s"),
    "collective": ("kind", "num_ranks", "nbytes"),
    "transfer": ("kind", "num_ranks", "nbytes"),
    "fabric": ("kind", "nbytes", "num_nodes", "gpus_per_node"),
    "overlap": ("a", "b", "inside", "lead_s", "a_alone_s", "b_alone_s", "a_together_s", "b_together_s"),
    "interference": ("a", "b", "a_alone_s", "b_alone_s", "a_together_s", "b_together_s"),
    "sustained": (*_SHAPE, "pass", "times_s"),
    "check": ("relative_errors",),
    "power": ("kind", "watts"),
    "error": ("failed", "message"),
    "end": (),
}
"""Fields of a point by op, beside ``samples_s``."""


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {shown(value)}")
    return value


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {shown(value)}")
    return value


def _mapping(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"expected names and values, got {shown(value)}")
    return value


def _whole(quantity: Quantity, value: Any) -> Any:
    number = quantity.read(value)
    if number % 1:
        raise ValueError(f"expected a whole number, got {shown(value)}")
    return number


def _numbers(quantity: Quantity, value: Any) -> Any:
    """One number, or any list of numbers."""
    return [_numbers(quantity, entry) for entry in value] if isinstance(value, list) else quantity.read(value)


def _list(quantity: Quantity, value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of numbers, got {shown(value)}")
    low, high = quantity.low, quantity.high
    if all(type(entry) in (int, float) and low <= entry <= high for entry in value):
        return value
    return _numbers(quantity, value)


_SCALARS: Final[Mapping[str, Quantity]] = {
    **dict.fromkeys(("num_gpus", "gpus_of_host", "num_ranks", "num_nodes", "gpus_per_node", "num_groups"), _COUNT),
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "num_sms", "tp", "rounds", "blocks", "parts"), _COUNT),
    **dict.fromkeys(("key_heads", "value_heads", "key_dim", "chunk"), _COUNT),
    **dict.fromkeys(("a_count", "layers"), _COUNT),
    **dict.fromkeys(("m", "n", "k", "width", "hidden", "ffn", "vocab", "heads", "kv_heads", "block"), _ELEMENTS),
    **dict.fromkeys(("nbytes", "reused", "row_bytes", "memory_bytes", "peak_bytes", "saved_bytes"), _SIZE),
    **dict.fromkeys(("at_s", "lead_s", "graph_s", "stream_s", "events_s", "pause_s"), Quantity("s", 0, 1e7)),
    "rank": _NUMBER,
    "tokens": _TOKENS,
    "area": Quantity("pairs", 0, 1e20),
    "temperature_c": Quantity("degrees Celsius", -300, 1e5),
    "power_w": Quantity("W", 0, 1e7),
}
_WHOLE: Final = (_COUNT, _NUMBER, _ELEMENTS)
"""What there are no parts of."""
_LISTS: Final[Mapping[str, Quantity]] = {
    **dict.fromkeys(("q_lens", "k_lens", "documents"), Quantity("tokens", 1, 1e10)),
    **dict.fromkeys(("q_ranges", "k_ranges"), _TOKENS),
    **dict.fromkeys(("samples_s", "times_s", "many_s", "both_s", "message_s", "held_s"), MEASURED_S),
    **dict.fromkeys(("evicted_s", "streamed_one_s", "streamed_many_s", "streamed_both_s"), MEASURED_S),
    **dict.fromkeys((f"{one}_{how}_s" for one in "ab" for how in ("alone", "together")), MEASURED_S),
    "watts": Quantity("W", 0, 1e7),
    "flows": _NUMBER,
    "relative_errors": Quantity("", 0, 1e6),
}
_TEXTS: Final = (
    "op",
    "kernel",
    "pass",
    "kind",
    "variant",
    "which",
    "place",
    "mask",
    "model",
    "recompute",
    "a",
    "b",
    "index",
    "order",
)
_MORE_TEXTS: Final = (
    "inside",
    "message",
    "failed",
    "gpu",
    "torch",
    "date",
    "commit",
    "command",
    "nccl",
    "clock_source",
)

FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **{name: partial(_whole, quantity) if quantity in _WHOLE else quantity.read for name, quantity in _SCALARS.items()},
    **{name: partial(_list, quantity) for name, quantity in _LISTS.items()},
    **dict.fromkeys((*_TEXTS, *_MORE_TEXTS), _text),
    **dict.fromkeys(("causal", "varlen", "rested", "states"), _flag),
    **dict.fromkeys(("options", "sizes"), _mapping),
    "sm_clock_hz": partial(_numbers, _CLOCK),
    "attention_s": partial(_numbers, MEASURED_S),  # of a rank, or samples
}
"""Reads the value of a field; raises ValueError where it cannot be."""


def read_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """A header or point with its numbers in seconds, bytes, Hz ...

    Raises:
        ValueError: one line that names the field, what was expected and what came.
    """
    found = dict(row)
    for name in FIELDS.keys() & row.keys():
        try:
            found[name] = FIELDS[name](row[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def read_point(point: Mapping[str, Any]) -> dict[str, Any]:
    """As ``read_fields``, of a point, which needs the fields of its op.

    Raises:
        ValueError: a field is missing or wrong, or fields do not fit together.
    """
    op, found = point["op"], read_fields(point)
    for name in NEEDED.get(op, ()):
        if name not in found:
            raise ValueError(f"{name}: missing; a point of op {op} has {', '.join(NEEDED[op])}")
    for name, known in _choices(found).items():
        if found.get(name, known[0]) not in known:
            raise ValueError(unknown_name(name, found[name], known))
    if op == "fabric" and "flows" not in found and not {"num_ranks", "num_groups"} <= found.keys():
        raise ValueError("flows: missing; a point of op fabric has flows, or num_ranks and num_groups")
    if any(not isinstance(flow, list) or list(map(type, flow)) != [int, int] for flow in found.get("flows", ())):
        raise ValueError(f"flows: expected pairs of ranks, from and to, got {shown(found['flows'])}")
    if op == "fabric" and found.get("num_ranks", 0) % found["num_nodes"]:
        raise ValueError(
            f"num_ranks: expected a multiple of num_nodes = {found['num_nodes']}, got {found['num_ranks']}"
        )
    if "num_kv_heads" in found and found.get("num_heads", 0) % found["num_kv_heads"]:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads, got {found['num_kv_heads']}")
    if "k_lens" in found and len(found["k_lens"]) != len(found.get("q_lens", ())):
        raise ValueError(f"k_lens: expected as many as q_lens, got {len(found['k_lens'])}")
    if "q_lens" in found and not found["q_lens"]:
        raise ValueError("q_lens: expected at least one length, got none")
    if "times_s" in found and len(found["times_s"]) != len(found.get("samples_s", ())):
        raise ValueError(f"times_s: expected as many as samples_s, got {len(found['times_s'])}")
    _check_rate(found)
    return found


def _choices(point: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Fields of a point that are one of a few names."""
    collective = point["op"] == "collective" or (point["op"] == "fabric" and "flows" not in point)
    return {"pass": ("fwd", "bwd")} | ({"kind": COLLECTIVES} if collective else {})


def _check_rate(point: Mapping[str, Any]) -> None:
    """Whether the shortest sample of a point leaves time for its work."""
    if not point.get("samples_s"):
        return
    if point["op"] == "attention":
        pairs = sum(q * k for q, k in zip(point["q_lens"], point["k_lens"], strict=True))
        work, rate = 4.0 * point["num_heads"] * point["head_dim"] * pairs, _FLOPS
    else:
        work, rate = float(point.get("nbytes", 0)), _BANDWIDTH
    fastest = min(point["samples_s"])
    if work > rate.high * fastest:
        reached = f"{work / fastest:.3g} {rate.unit}"
        raise ValueError(f"samples_s: expected at most {rate.high:g} {rate.unit}, got {reached} from {fastest:g} s")
