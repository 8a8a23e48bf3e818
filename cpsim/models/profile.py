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
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from cpsim.case.files import as_profile_error, explain, parse_json, read_text
from cpsim.errors import InfeasibleError, NotMeasuredError, ProfileError, shown
from cpsim.models.attention.params import AttentionParams
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.gemm import GemmParams
from cpsim.models.host import HostParams
from cpsim.models.network.collective import CollectiveParams
from cpsim.models.network.interference import InterferenceParams
from cpsim.runtime.files import noted, while_unchanged, write
from cpsim.units import CLOSED, ByName, Quantity

Floats = NDArray[np.float64]
SCHEMA = 4
ROUNDED = 1.001
"""Files round what they say was measured to six digits."""
BASE = "base"
"""What an attention kernel says that is the base's."""
POWER_OF_CLOCK = 2.5
"""Exponent of the power that busy tensor cores draw at a clock, as voltage follows it; assumed."""
FOLDER = Path(__file__).parent.with_name("data") / "profiles"
Name = Annotated[str, Field(min_length=1, max_length=1000)]


def _kernel_and_pass(value: Any) -> Any:
    """The names `kernel pass` of files as pairs."""
    if isinstance(value, dict) and not all(isinstance(key, str) and len(key.split(" ")) == 2 for key in value):
        raise ValueError("expected a kernel and a pass as names, e.g. 'fa4 fwd'")
    return {tuple(key.split(" ")): params for key, params in value.items()} if isinstance(value, dict) else value


ERRORS = ("points", "mean_absolute", "p95", "worst", "bias", "rms", "covered")
LOGARITHM = Quantity("", -1e6, 1e6)
Extent = Annotated[float, Quantity("tokens or bytes", 0, 1e18)]


def _error_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if set(row) != {"model", *ERRORS} or not isinstance(row["model"], str):
        raise ValueError(f"expected model, {', '.join(ERRORS)}, got {shown(list(row))}")
    for name in ERRORS:
        LOGARITHM.read(row[name])
    return row


def _range(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError(f"expected the smaller end first, got {list(value)}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What layers of a transformer consist of besides attention."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    gemm: GemmParams
    ops: ElementwiseParams
    """Memory-bound ops by kind of `cpsim.schedule.transformer.OP_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Fitted cost models of one GPU type."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    name: Name
    gpu: Name
    """As the driver names it."""
    grade: str
    """How far to trust it, in words."""
    attention: Annotated[Mapping[tuple[str, str], AttentionParams], BeforeValidator(_kernel_and_pass)]
    """By (kernel, pass)."""
    collective: CollectiveParams
    elementwise: ElementwiseParams
    host: HostParams
    interference: InterferenceParams
    load: ByName[Annotated[float, Quantity("", 0, 1e3)]]
    """Power that ops draw above an idle GPU's, relative to what its limit allows: `memory-bound`, `collective`, and
    `transfer` at the rate of a port."""
    sigma: ByName[Annotated[float, Quantity("", 0, 10)]]
    """Relative (log) standard deviation of held-out errors by cost model: `attention fwd fa4`, `collective`,
    `collective all_gather`, `transfer`, `memory-bound`, `host`, `run to run`; and the spread between GPUs of one type
    (`attention fwd fa4 between GPUs`)."""
    valid: ByName[Annotated[tuple[Extent, Extent], AfterValidator(_range)]]
    """Measured range by cost model: query and key tokens of a call (attention), bytes (others)."""
    held_out: tuple[Annotated[Mapping[str, Any], AfterValidator(_error_row)], ...]
    """Errors on points that were not fitted, relative, logarithmic: model, points, mean_absolute, p95, worst, bias,
    rms, and covered, the share inside the 90 % interval that other such points give."""
    provenance: tuple[Mapping[str, Any], ...]
    """Header of every measurement file behind it, and what each was used for."""
    layers: LayerCosts | None = None
    """None where nobody measured them."""
    sustained: ByName[Annotated[float, Quantity("", -1, 1)]] = dataclasses.field(default_factory=dict)
    """Logarithm of how much longer a kernel takes after seconds at the power limit than in the calls that it was fitted
    to, which take tenths of a second: `fa2 fwd`, and `others` for those that nobody ran for so long, matrix products
    (`matrix products`) among them."""

    def attention_params(self, kernel: str, pass_: str) -> AttentionParams:
        """Parameters of one kernel and pass (`fwd` or `bwd`).

        Raises:
            NotMeasuredError: the kernel was not measured; lists those that were.
        """
        try:
            return self.attention[kernel, pass_]
        except KeyError:
            known = ", ".join(sorted({k for k, _ in self.attention}))
            raise NotMeasuredError(f"profile {self.name} lacks kernel {kernel!r} {pass_}; it has {known}") from None

    def sustained_factor(self, kernel: str, duty: ArrayLike = 1.0) -> Floats:
        """How much longer a kernel takes in a steady state.

        Power grows with the clock to the power of 2.5 or so, so that a GPU that idles a little has what it needs.

        Args:
            kernel: of attention with its pass, as `fa2 fwd`, or `matrix products`.
            duty: share of the time in which GPUs are busy.
        """
        longer = self.sustained.get(kernel, self.sustained.get("others", 0.0))
        return np.asarray(np.maximum(1.0, np.exp(longer) * np.asarray(duty, np.float64) ** (1 / POWER_OF_CLOCK)))

    def products_notes(self, most_flops: float, *, steady: bool) -> tuple[str, ...]:
        """What about matrix products is not measured.

        Args:
            most_flops: of the largest one.
            steady: they run for seconds.
        """
        most, notes = self.valid.get("matrix products", (0.0, 0.0))[1], []
        if most_flops > most:
            notes.append(f"matrix products of {most_flops / 1e12:.0f} TFLOP, measured up to {most / 1e12:.0f}")
        if steady and "others" in self.sustained and "matrix products" not in self.sustained:
            longer = float(self.sustained_factor("matrix products")) - 1
            notes.append(f"matrix products: {longer:.1%} longer after seconds of load, as attention is; not measured")
        return tuple(notes)

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
        return (
            (f"transfers of {largest / 1e6:.0f} MB, measured up to {high / 1e6:.0f}",)
            if largest > ROUNDED * high
            else ()
        )

    def collective_notes(self, kind: str, nbytes: float, num_ranks: int) -> tuple[str, ...]:
        """What about a collective inside a node lies outside of the measured range."""
        high, ranks = self.valid[f"collective {kind}"][1], self.collective.curves[kind]
        notes = []
        if nbytes > ROUNDED * high:
            notes.append(f"{kind} of {nbytes / 1e6:.0f} MB, measured up to {high / 1e6:.0f}")
        if num_ranks > max(ranks):
            notes.append(f"{kind} among {num_ranks} GPUs of a node, measured up to {max(ranks)}")
        if 1 < num_ranks < min(ranks):
            notes.append(f"{kind} among {num_ranks} GPUs of a node, measured from {min(ranks)}")
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
        raise ProfileError(f"no profile {shown(name)}; shipped are {', '.join(shipped_profiles())}, or give a file")
    return from_json(whole_data(path), str(path))


def _read(path: Path) -> dict[str, Any]:
    """Parsed JSON of a profile file of this version."""
    with as_profile_error("; is the file cut off?"):
        data = parse_json(read_text(path), str(path))
    _check_format(data, str(path))
    return dict(data)


def _check_format(data: Any, source: str) -> None:
    if not isinstance(data, dict) or data.get("format") != "cpsim-profile":
        raise ProfileError(f"{source}: expected format 'cpsim-profile'; is this a profile file?")
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        mend = "make it again with `cpsim fit`" if type(schema) is int and schema < SCHEMA else "update cpsim"
        raise ProfileError(f"{source}: schema {shown(schema)}, this version reads {SCHEMA}; {mend}")


def whole_data(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Parsed JSON of a profile file with the parts of its base that it gives none of its own of.

    Raises:
        ProfileError: it or its base cannot be read.
    """
    data = _read(path)
    if "base" not in data:
        return data
    name, kernels = data.pop("base"), data.get("attention", {})
    if not isinstance(name, str) or Path(name).name != name or not isinstance(kernels, dict):
        raise ProfileError(f"{path}: expected the name of a base, and kernels of its own, got base {shown(name)}")
    places = (path.with_name(f"{name}.json"), FOLDER / f"{name}.json")
    base = next((place for place in places if os.path.exists(noted(place)) and place not in (path, *seen)), None)
    if base is None:
        raise ProfileError(f"{path}: expected its base {shown(name)} beside it or among {shipped_profiles()}")
    theirs = whole_data(base, (path, *seen))
    missing = [kernel for kernel, own in kernels.items() if own == BASE and kernel not in theirs["attention"]]
    if missing:
        raise ProfileError(f"{path}: attention: its base {shown(name)} has no kernel {shown(missing[0])}")
    own = {kernel: theirs["attention"][kernel] if own == BASE else own for kernel, own in kernels.items()}
    return {**theirs, **data, "attention": own}


def from_json(data: Any, source: str) -> Profile:
    """A profile from parsed JSON without a base; `source` is named in errors."""
    _check_format(data, source)
    fields = {name: value for name, value in data.items() if name not in ("format", "schema")}
    try:
        profile = _adapter().validate_python(fields)
        for where, number in _numbers(profile.provenance, "provenance"):
            if not np.isfinite(number):
                raise ValueError(f"{where}: expected a finite number, got {number}")
    except ValidationError as error:
        raise ProfileError(f"{source}: {explain(error, Profile.__dataclass_fields__)}") from None
    except ValueError as error:
        raise ProfileError(f"{source}: {error}") from None
    return profile


@cache
def _adapter() -> TypeAdapter[Profile]:
    return TypeAdapter(Profile)


def _numbers(value: Any, where: str) -> Iterable[tuple[str, float]]:
    """Every number in parsed JSON, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{where}[{i}]")
    elif isinstance(value, float):
        yield where, value


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
