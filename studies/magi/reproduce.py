"""MagiAttention's context-parallel benchmark on 8 to 64 GPUs, row by row: ``python -m studies magi-h100``, and
``magi-b200``.

As measured: batch 1, heads 64:8 of dimension 128, bf16, on H100 8192 tokens a GPU, on B200 16384; the time of a call
is that of its slowest rank, the host runs ahead; documents are the benchmark's 20 packs, and a row is the mean of their
throughputs. Kernels cost what the published kernel tables say: FlashAttention-3 on H100 (profile
h100-fa3), cuDNN on B200 (profile b200).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.prediction.predict import predict_many
from cpsim.prediction.results import Infeasible, Prediction
from cpsim.runtime.processes import Progress
from studies import published_lines

FOLDER = Path(__file__).parent

MACHINES: Final[Mapping[str, Mapping[str, Any]]] = {
    "h100": {"cluster": "magi-h100", "kernel": "fa3", "tokens_per_gpu": 8192},
    "b200": {"cluster": "dgx-b200", "profile": "b200-magi", "kernel": "cudnn", "tokens_per_gpu": 16384},
}
"""Fields of its scenarios by GPU. On B200 only rows of cuDNN are here; MagiAttention's own use another kernel. On H100
theirs stand with flash-attn 3: FFA reaches 635 TFLOP/s in its kernel table, and these rows 664 with communication."""
CLUSTER: Final = "magi-h100"
"""Whose network was fitted to rows; nothing was for B200."""
STRATEGIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ulysses": {"strategy": "ulysses"},
    "ring_p2p": {"strategy": "zigzag_ring"},
    "ring_allgather": {"strategy": "allgather"},
    "usp": {"strategy": "usp"},
    "loongtrain": {"strategy": "loongtrain"},
    "hybrid_dcp": {"strategy": "hybrid_cp"},
    "magi-a2av": {"strategy": "magi"},
    "magi-native": {"strategy": "magi", "knobs": {"native": True}},
}
"""Rows of the benchmark, as we call them."""
READING_ERROR: Final = 3.0
"""Uncertainty of a published value, which was read off a figure [TFLOP/s]."""
FITTED: Final = (8, 16)
"""GPUs of the rows that the network between nodes was fitted to; the other rows are the test."""
_ALL_TO_ALL: Final = ("ulysses",)
"""Rows whose network is an all-to-all of all NICs."""
NIC_RANGE: Final = (20e9, 50e9)
"""Bytes/s that a NIC of 400 Gbit/s can be thought to achieve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published throughput."""

    strategy: str
    """As the benchmark calls it."""
    mask: str
    pass_: str
    gpus: int
    published: float
    """TFLOP/s per GPU."""
    predicted: float = float("nan")
    gpu: str = "h100"
    """A name of ``MACHINES``."""

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1

    @property
    def panel(self) -> tuple[str, int, str]:
        """Rows that are compared with each other."""
        return self.mask, self.gpus, self.pass_


@cache
def published(gpu: str = "h100") -> tuple[Row, ...]:
    """All rows of the benchmark on a GPU of ``MACHINES``."""
    return tuple(
        Row(
            strategy=line["row"],
            mask=line["mask"],
            pass_=line["pass"],
            gpus=int(line["gpus"]),
            published=float(line["tflops_per_gpu"]),
            gpu=gpu,
        )
        for line in published_lines(FOLDER / f"magi-{gpu}.csv")
    )


@cache
def packs(gpus: int, gpu: str = "h100") -> tuple[tuple[int, ...], ...]:
    """Document lengths of the benchmark's packs [tokens]."""
    text = FOLDER.joinpath(f"magi-packs-{gpu}.json").read_text(encoding="utf-8")
    return tuple(map(tuple, json.loads(text)[str(gpus)]))


def scenarios(row: Row, cluster: str | None = None) -> list[Scenario]:
    """What was run for a row: one case, or one for every pack; ``cluster``: another one than its GPU's."""
    dense = row.mask in ("full", "causal")
    case = {
        **STRATEGIES[row.strategy],
        **MACHINES[row.gpu],
        "implementation": "magi-attention",
        "gpus": row.gpus,
        "mask": row.mask,
        "heads": 64,
        "kv_heads": 8,
        "pass": row.pass_,
        "protocol": "streamed",
    }
    if cluster is not None:
        case["cluster"] = cluster
    draws = [{}] if dense else [{"documents": list(pack)} for pack in packs(row.gpus, row.gpu)]
    return [scenario_from(case | draw) for draw in draws]


def reproduce(
    rows: Iterable[Row] | None = None,
    cluster: str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Rows with their predictions; those on H100 where none are given.

    Raises:
        CpsimError: a case cannot be predicted.
    """
    cases = {row: scenarios(row, cluster) for row in rows or published()}
    results = iter(predict_many([case for found in cases.values() for case in found], jobs, progress))
    done = []
    for row, found in cases.items():
        done.append(replace(row, predicted=mean(_throughput(row, next(results)) for _ in found)))
    return done


def _throughput(row: Row, result: Prediction | Infeasible | CpsimError) -> float:
    """TFLOP/s per GPU of one case of a row."""
    if isinstance(result, Prediction):
        return result.tflops_per_gpu
    reason = result.reason if isinstance(result, Infeasible) else result
    raise CpsimError(f"reproduce: {row.strategy} {row.mask} {row.pass_} on {row.gpus} GPUs: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well some rows are predicted."""

    rows: int
    mean_absolute: float
    """Mean of absolute errors."""
    bias: float
    """Mean of signed errors."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Score:
        """Of some rows, at least one."""
        errors = np.array([row.error for row in rows])
        return cls(rows=len(rows), mean_absolute=float(np.abs(errors).mean()), bias=float(errors.mean()))


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, Score]:
    """Scores of the rows that have a key in common, in the order in which keys come up."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {name: Score.of(members) for name, members in groups.items()}


def summary(rows: Sequence[Row]) -> dict[str, Score]:
    """Scores of the rows that the network was fitted to, of the others, and of all."""
    parts = {
        "8 and 16 GPUs": [row for row in rows if row.gpus in FITTED],
        "32 and 64 GPUs": [row for row in rows if row.gpus not in FITTED],
        "all": list(rows),
    }
    return {name: Score.of(part) for name, part in parts.items() if part}


def rank_correlations(rows: Iterable[Row], resolution: float = 0.0) -> dict[tuple[str, int, str], float]:
    """Kendall's tau of the strategies by (mask, GPUs, pass): 1 where they are ordered as published.

    Args:
        rows: predicted ones.
        resolution: pairs that were published no further apart do not count [TFLOP/s]; see ``READING_ERROR``.
    """
    panels: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        panels.setdefault(row.panel, []).append(row)
    return {panel: _tau(members, resolution) for panel, members in panels.items() if len(members) > 1}


def _tau(rows: Sequence[Row], resolution: float) -> float:
    """Tau-b: pairs in the same order less those in the other, over those with no tie."""
    values = np.array([[row.published, row.predicted] for row in rows])
    order = np.sign(values[:, None] - values[None, :])
    order[np.abs(values[:, None, 0] - values[None, :, 0]) <= resolution] = 0.0
    published, predicted = order[..., 0], order[..., 1]
    return float((published * predicted).sum() / np.sqrt((published**2).sum() * (predicted**2).sum()))


def fit(progress: Callable[[str], None] | None = None) -> float:
    """Bandwidth of a NIC [bytes/s] from what changes between 8 GPUs, which have no network, and 16.

    Minimizes the mean absolute difference between the errors of a row of 16 GPUs and of the same row of 8, in
    logarithms, so that what kernels are mispriced by is not ascribed to the network. Rows whose transfers are single
    flows say nothing about it; the rate of these, and the latency, stay as published.
    """
    from scipy.optimize import minimize_scalar

    rows = [row for row in published() if row.strategy in _ALL_TO_ALL]
    inside, between = ([row for row in rows if row.gpus == gpus] for gpus in FITTED)
    known = {_case(row): _log_error(row) for row in reproduce(inside)}

    def loss(log_rate: float) -> float:
        rate = float(np.exp(log_rate))
        error = mean(abs(_log_error(row) - known[_case(row)]) for row in _on_network(between, rate))
        if progress:
            progress(f"NIC {rate / 1e9:.1f} GB/s: {error:.2%}")
        return float(error)

    found = minimize_scalar(loss, bounds=np.log(NIC_RANGE).tolist(), method="bounded", options={"xatol": 0.005})
    return float(np.exp(found.x))


def _case(row: Row) -> tuple[str, str, str]:
    return row.strategy, row.mask, row.pass_


def _log_error(row: Row) -> float:
    return float(np.log(row.predicted / row.published))


def _on_network(rows: Sequence[Row], nic: float) -> list[Row]:
    """Predictions on the preset with other NICs."""
    base = load_cluster(CLUSTER)
    assert base.fabric is not None
    whole = replace(base, fabric=replace(base.fabric, nic_bandwidth_bytes_per_s=nic))
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{nic:.0f}.json"
        path.write_text(json.dumps(whole.to_dict()), encoding="utf-8")
        return reproduce(rows, cluster=str(path))
