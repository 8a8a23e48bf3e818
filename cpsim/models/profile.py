"""The profile: every cost model's parameters for one GPU type, with errors, validity and provenance.

Loads without scipy. Only this module knows the file format: JSON with an integer `schema`. A file may name another
profile as its `base`, beside it or shipped, whose parts it then has where it gives none of its own; so has an attention
kernel that says "base" instead of its parameters.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cpsim.errors import InfeasibleError, ProfileError
from cpsim.models.attention.anatomy import Anatomy
from cpsim.models.attention.discrepancy import NONE, Discrepancy
from cpsim.models.attention.params import AttentionParams
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.gemm import GemmParams
from cpsim.models.host import HostParams
from cpsim.models.network.collective import CollectiveParams, Curve
from cpsim.models.network.interference import InterferenceParams
from cpsim.runtime.files import noted, while_unchanged, write

SCHEMA = 4
BASE = "base"
"""What an attention kernel says that is the base's."""
FOLDER = Path(__file__).parent.with_name("data") / "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What layers of a transformer consist of besides attention."""

    gemm: GemmParams
    ops: ElementwiseParams
    """Memory-bound ops by kind of `cpsim.schedule.transformer.OP_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Fitted cost models of one GPU type."""

    name: str
    gpu: str
    """As the driver names it."""
    grade: str
    """How far to trust it, in words."""
    attention: Mapping[tuple[str, str], AttentionParams]
    """By (kernel, pass)."""
    collective: CollectiveParams
    elementwise: ElementwiseParams
    host: HostParams
    interference: InterferenceParams
    load: Mapping[str, float]
    """Power that ops draw above an idle GPU's, relative to what its limit allows: `memory-bound`, `collective`, and
    `transfer` at the rate of a port."""
    sigma: Mapping[str, float]
    """Relative (log) standard deviation of held-out errors by cost model: `attention fwd fa4`, `collective`,
    `collective all_gather`, `transfer`, `memory-bound`, `host`, `run to run`; and the spread between GPUs of one type
    (`attention fwd fa4 between GPUs`)."""
    valid: Mapping[str, tuple[float, float]]
    """Measured range by cost model: query and key tokens of a call (attention), bytes (others)."""
    held_out: tuple[Mapping[str, Any], ...]
    """Errors on points that were not fitted, relative, logarithmic: model, points, mean_absolute, p95, worst, bias,
    rms, and covered, the share inside the 90 % interval that other such points give."""
    provenance: tuple[Mapping[str, Any], ...]
    """Header of every measurement file behind it, and what each was used for."""
    layers: LayerCosts | None = None
    """None where nobody measured them."""

    def attention_params(self, kernel: str, pass_: str) -> AttentionParams:
        """Parameters of one kernel and pass (`fwd` or `bwd`).

        Raises:
            ProfileError: the kernel was not measured; lists those that were.
        """
        try:
            return self.attention[kernel, pass_]
        except KeyError:
            known = ", ".join(sorted({k for k, _ in self.attention}))
            raise ProfileError(f"profile {self.name} lacks kernel {kernel!r} {pass_}; it has {known}") from None

    def attention_notes(
        self, kernel: str, pass_: str, q_len: ArrayLike, k_len: ArrayLike, heads: ArrayLike
    ) -> tuple[str, ...]:
        """What about calls lies outside of the measured range.

        Args:
            kernel, pass_: of all calls.
            q_len, k_len: [N] tokens of the longest sequence of each.
            heads: [N, 2] query and key heads.
        """
        notes = []
        for what, lens in (("queries", np.asarray(q_len)), ("keys", np.asarray(k_len))):
            low, high = self.valid[f"attention {pass_} {kernel} {what}"]
            shortest, longest = lens[lens > 0].min(initial=high), lens.max(initial=0)
            if longest > high:
                notes.append(f"{kernel} {pass_}: {longest:.0f} {what} in a sequence, measured up to {high:.0f}")
            if shortest < low:
                notes.append(f"{kernel} {pass_}: {shortest:.0f} {what} in a sequence, measured from {low:.0f}")
        low, high = self.valid[f"attention {pass_} {kernel} heads"]
        counts = np.asarray(heads).reshape(-1, 2)[:, 0]
        if counts.size and (counts.max() > high or counts.min() < low):
            notes.append(f"{kernel} {pass_}: {counts.min()} to {counts.max()} heads, measured {low:.0f} to {high:.0f}")
        return tuple(notes)

    def rule_notes(self, kernel: str, pass_: str, head_dim: int, rules: Iterable[int | None]) -> tuple[str, ...]:
        """Whether masks like these were measured at other head dimensions only, as `check_rules` tells them apart."""
        key, measured = f"attention {pass_} {kernel} rule", self.attention[kernel, pass_].at(head_dim).head_dim
        low, high = self.valid.get(f"{key} at {measured}", self.valid.get(key, (0, 0)))
        if all(rule is None or low <= rule <= high for rule in rules):
            return ()
        return (f"{kernel} {pass_}: masks of several runs of keys were not measured at head_dim {measured}",)

    def between_gpus(self, kernel: str, pass_: str) -> float:
        """Standard deviation, relative, of one attention kernel's time between GPUs of this type."""
        return self.sigma.get(f"attention {pass_} {kernel} between GPUs", self.sigma["run to run"])

    def check_rules(self, kernel: str, pass_: str, rules: Iterable[int | None]) -> None:
        """Whether masks like these were measured: how pairs of partial blocks are decided in them.

        Raises:
            InfeasibleError: they were not.
        """
        low, high = self.valid.get(f"attention {pass_} {kernel} rule", (0, 0))
        if any(rule is not None and not low <= rule <= high for rule in rules):
            raise InfeasibleError(
                f"kernel {kernel} runs this mask, but profile {self.name} has measured it only under masks that let a "
                f"query see one run of keys; measure others with cpsim.real.measure.kernels --masked"
            )

    def transfer_notes(self, nbytes: ArrayLike) -> tuple[str, ...]:
        """What about these message sizes lies outside of the measured range."""
        high = self.valid["transfer"][1]
        largest = float(np.max(nbytes, initial=0.0))
        return (f"transfers of {largest / 1e6:.0f} MB, measured up to {high / 1e6:.0f}",) if largest > high else ()

    def collective_notes(self, kind: str, nbytes: float, num_ranks: int) -> tuple[str, ...]:
        """What about a collective inside a node lies outside of the measured range."""
        high, ranks = self.valid[f"collective {kind}"][1], max(self.collective.curves[kind])
        notes = []
        if nbytes > high:
            notes.append(f"{kind} of {nbytes / 1e6:.0f} MB, measured up to {high / 1e6:.0f}")
        if num_ranks > ranks:
            notes.append(f"{kind} among {num_ranks} GPUs of a node, measured up to {ranks}")
        return tuple(notes)


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with cpsim."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or any profile file.

    Raises:
        ProfileError: one line that says what is wrong with it.
    """
    return _load(str(name_or_path))


@while_unchanged
def _load(name: str) -> Profile:
    path = noted(FOLDER / f"{name}.json")
    if not os.path.exists(path):
        path = noted(Path(name))
    if not os.path.exists(path):
        raise ProfileError(f"no profile {name!r}; shipped are {', '.join(shipped_profiles())}, or give a file")
    return from_json(_with_base(_read(path), path), str(path))


def _read(path: Path) -> dict[str, Any]:
    """Parsed JSON of a profile file of this version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProfileError(f"{path}: cannot read this profile ({error}); is the file cut off?") from error
    _check_format(data, str(path))
    return dict(data)


def _check_format(data: Any, source: str) -> None:
    if not isinstance(data, dict) or data.get("format") != "cpsim-profile":
        raise ProfileError(f"{source}: expected format 'cpsim-profile'; is this a profile file?")
    if data.get("schema") != SCHEMA:
        older = isinstance(data.get("schema"), int) and data["schema"] < SCHEMA
        mend = "make it again with `cpsim fit`" if older else "update cpsim"
        raise ProfileError(f"{source}: schema {data.get('schema')!r}, this version reads {SCHEMA}; {mend}")


def _with_base(data: dict[str, Any], path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A profile's data with the parts of its base that it gives none of its own of."""
    if "base" not in data:
        return data
    places = (path.with_name(f"{data['base']}.json"), FOLDER / f"{data['base']}.json")
    base = next((place for place in places if os.path.exists(noted(place)) and place not in (path, *seen)), None)
    if base is None:
        raise ProfileError(f"{path}: expected its base {data['base']!r} beside it or among {shipped_profiles()}")
    theirs = _with_base(_read(base), base, (path, *seen))
    own = {k: theirs["attention"].get(k) if v == BASE else v for k, v in data.get("attention", {}).items()}
    return {**theirs, **data, "attention": own}


def from_json(data: Any, source: str) -> Profile:
    """A profile from parsed JSON without a base; `source` is named in errors."""
    _check_format(data, source)
    try:
        profile = _build(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{source}: broken profile: {type(error).__name__}: {error}") from error
    for where, number in _numbers(data):
        if not np.isfinite(number):
            raise ProfileError(f"{source}: {where} is {number}, expected a finite number")
    for key, params in profile.attention.items():
        if len(params.calls_s) != len(params.calls_spread):
            raise ProfileError(f"{source}: attention {' '.join(key)} needs as many calls_s as calls_spread")
        if params.pair_s <= 0 or params.num_sms < 1:
            raise ProfileError(f"{source}: attention {' '.join(key)} needs positive pair_s and num_sms")
    return profile


def _build(data: dict[str, Any]) -> Profile:
    attention = {}
    for key, value in data["attention"].items():
        kernel, pass_ = key.split(" ")
        attention[kernel, pass_] = _attention_params(value)

    def curve(value: dict[str, list[float]]) -> Curve:
        return Curve(nbytes=tuple(map(float, value["nbytes"])), seconds=tuple(map(float, value["seconds"])))

    network = data["collective"]
    collective = CollectiveParams(
        curves={k: {int(n): curve(c) for n, c in by.items()} for k, by in network["curves"].items()},
        hop_s={k: float(v) for k, v in network["hop_s"].items()},
        rings={int(n): curve(c) for n, c in network["rings"].items()},
        port_bytes_per_s=float(network["port_bytes_per_s"]),
    )
    return Profile(
        name=str(data["name"]),
        gpu=str(data["gpu"]),
        grade=str(data["grade"]),
        attention=attention,
        collective=collective,
        elementwise=ElementwiseParams(**data["elementwise"]),
        host=HostParams(**data["host"]),
        interference=InterferenceParams(**data["interference"]),
        load={k: float(v) for k, v in data["load"].items()},
        sigma={k: float(v) for k, v in data["sigma"].items()},
        valid={k: (float(low), float(high)) for k, (low, high) in data["valid"].items()},
        held_out=tuple(data["held_out"]),
        provenance=tuple(data["provenance"]),
        layers=_layer_costs(data["layers"]) if data.get("layers") is not None else None,
    )


def _layer_costs(value: dict[str, Any]) -> LayerCosts:
    return LayerCosts(gemm=GemmParams(**value["gemm"]), ops=ElementwiseParams(**value["ops"]))


def _attention_params(value: dict[str, Any]) -> AttentionParams:
    rest = {
        "anatomy": Anatomy(**value["anatomy"]),
        "discrepancy": _discrepancy(value["discrepancy"]) if "discrepancy" in value else NONE,
        "head_dims": tuple(map(_attention_params, value.get("head_dims", ()))),
        **{name: tuple(map(float, value.get(name, ()))) for name in ("calls_s", "calls_spread")},
    }
    return AttentionParams(**{**value, **rest})


def _discrepancy(value: dict[str, Any]) -> Discrepancy:
    support = tuple(tuple(map(float, row)) for row in value["support"])
    found = Discrepancy(lengths=tuple(value["lengths"]), support=support, weights=tuple(value["weights"]))
    found.arrays()  # refuses other numbers of features or points
    return found


def _numbers(value: Any, where: str = "profile") -> Iterable[tuple[str, float]]:
    """Every number in parsed JSON, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{where}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{where}[{i}]")
    elif isinstance(value, int | float):
        yield where, float(value)


def to_json(profile: Profile, base: Profile | None = None) -> str:
    """The profile as a JSON text, the same for equal profiles, without what it shares with its `base`."""
    data = _data(profile)
    if base is not None:
        theirs = _data(base)
        kernels = {k: BASE if theirs["attention"].get(k) == v else v for k, v in data["attention"].items()}
        own = {key: data.get(key) for key in theirs | data if data.get(key) != theirs.get(key)}  # None: it has none
        data = {"schema": SCHEMA, "format": data["format"], "base": base.name, **own, "attention": kernels}
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _data(profile: Profile) -> dict[str, Any]:
    data: dict[str, Any] = {"schema": SCHEMA, "format": "cpsim-profile"}
    for field in dataclasses.fields(profile):
        value = getattr(profile, field.name)
        if field.name == "attention":
            value = {" ".join(key): _attention_data(params) for key, params in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if value is not None:
            data[field.name] = value
    return dict(_rounded(data))


def _attention_data(params: AttentionParams) -> dict[str, Any]:
    """Parameters as JSON has them, without those at their defaults."""
    data = dataclasses.asdict(params) | {"head_dims": [_attention_data(other) for other in params.head_dims]}
    for owner, values in ((params, data), (params.anatomy, data["anatomy"])):
        for field in dataclasses.fields(owner):
            if _rounded(field.default) == _rounded(getattr(owner, field.name)):  # as it would be read again
                del values[field.name]
    return data


def _rounded(value: Any) -> Any:
    """Floats with 6 significant digits: beyond that is noise, and files stay the same between machines."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}")
    return value


def save_profile(profile: Profile, path: str | Path, base: Profile | None = None) -> None:
    """Writes a profile file; with a `base`, which has to lie beside it or be a shipped one, only what differs."""
    write(Path(path), to_json(profile, base))
