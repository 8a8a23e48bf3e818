"""Every cost model's parameters for one GPU type, with errors, validity and provenance: a profile.

Files of profiles are read by ``cpsim.models.profile``; a GPU without one gets costs by ``cpsim.models.derive``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from cpsim.errors import InfeasibleError, NotMeasuredError, shown
from cpsim.models.attention.kernels import UNMEASURED
from cpsim.models.attention.params import AttentionParams
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.gemm import GemmParams
from cpsim.models.host import HostParams
from cpsim.models.network.collective import CollectiveParams
from cpsim.models.network.interference import InterferenceParams
from cpsim.models.rates import Rates
from cpsim.models.recurrent import RecurrentCosts
from cpsim.units import CLOSED, ByName, Quantity

Floats = NDArray[np.float64]
ROUNDED = 1.001
"""Files round what they say was measured to six digits."""
POWER_OF_CLOCK = 2.5
"""Exponent of the power that busy tensor cores draw at a clock, as voltage follows it; assumed."""
IN_TURNS = "in turns"
"""Key of ``Profile.sustained``."""
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
    (`matrix products`) among them; `in turns`: beyond that in the turns of a layer."""
    scans: RecurrentCosts | None = None
    """Layers with a state, where they were measured; None: those that ship stand in, see `cpsim.models.recurrent`."""
    sparse: ByName[Rates] | None = None
    """Kernels of attention to chosen keys by kernel and pass, where they were measured; those that ship stand in for
    others, see `cpsim.models.sparse`."""

    def attention_params(self, kernel: str, pass_: str) -> AttentionParams:
        """Parameters of one kernel and pass (`fwd` or `bwd`).

        Raises:
            NotMeasuredError: the kernel was not measured; lists those that were, or says where it could be.
        """
        try:
            return self.attention[kernel, pass_]
        except KeyError:
            if kernel in UNMEASURED:
                raise NotMeasuredError(f"kernel {kernel} was not measured: {UNMEASURED[kernel]}") from None
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

    def in_layers(self) -> Profile:
        """With kernels as the layers of a training step have them, in turns with others."""
        logs = {"others": 0.0, **self.sustained}
        more = logs.pop(IN_TURNS, 0.0)
        return dataclasses.replace(self, sustained={name: log + more for name, log in logs.items()}) if more else self

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
            notes.append(f"matrix products: {longer:.1%} longer after seconds of load, as attention is")
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
