"""NVIDIA's tables of cuDNN's and flash-attn 4's attention under windows and of latent attention, beside what profiles
say.

Rows are those of NVIDIA/cudnn-frontend, bf16: benchmark/sdpa_benchmark_training/results as of 8 May 2026, and
benchmark/attention_training/results of 28 September 2026. They pause between calls, so that calls of up to 80 ms run at
the full clock, of September up to 16 ms. The fits of h200 (flash-attn 4) and gb200 read rows of September, but not
Kimi's, that of gb300 its windows backward; all others are a check.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from cpsim.masks.slices import UNCUT
from cpsim.models.attention.params import calls
from cpsim.models.profile import load_profile

TABLE: Final = Path(__file__).parent / "published.csv"
RESTED_MS: Final = {"202609": 16.0}
"""By the month in a row's source; 80 ms of others."""
ODD: Final = {
    ("gb300", "fwd", "128"): "twice as long as GB200's own times of the same calls, at every length",
    ("gb200", "fwd", "128", "32768"): "3.2 times as long as half of the tokens",
}
"""Rows that do not agree with others of the same table, by GPU, pass, window and tokens."""


def rows() -> list[dict[str, str]]:
    """Rows of kernels that are not deterministic, which profiles do not describe; of H200's latent attention all."""
    with TABLE.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    return [row for row in found if row["deterministic"] == "False" or (row["gpu"], row["pass"]) == ("h200", "fwd")]


def is_odd(row: Mapping[str, str]) -> bool:
    """Whether a row is one of ODD, of April 2026."""
    if "202604" not in row["source"]:
        return False
    names = row["gpu"], row["pass"], row["window"], row["tokens"]
    return names in ODD or names[:3] in ODD


def is_fitted(row: Mapping[str, str]) -> bool:
    """Whether a profile's fit reads a row."""
    if row["gpu"] == "gb300":
        return row["window"] != "0" and row["pass"] == "bwd"
    read = (row["gpu"], row["kernel"]) != ("h200", "cudnn") and not row["source"].startswith("kimi")
    return read and "202609" in row["source"]


def predicted_ms(row: Mapping[str, str]) -> float:
    """What the profile of the row's GPU says."""
    tokens, batch, window = int(row["tokens"]), int(row["batch"]), int(row["window"])
    bounds = (window - 1, 0) if window else (UNCUT, 0 if row["mask"] == "causal" else UNCUT)
    lens, (heads, kv_heads) = np.full(batch, tokens), (np.array([int(row[n])]) for n in ("heads", "kv_heads"))
    endless, _, slower = calls(
        load_profile(row["gpu"]).attention[row["kernel"], row["pass"]],
        np.array([0, batch]),
        lens,
        lens,
        np.full(batch, bounds[1] == 0),
        heads,
        kv_heads,
        int(row["head_dim"]),
        np.array([False]),
        window=np.tile(bounds, (batch, 1)),
        value_dim=int(row["value_dim"]),
    )
    rested_ms = next((ms for month, ms in RESTED_MS.items() if month in row["source"]), 80.0)
    return float(1e3 * (endless / slower if float(row["ms"]) < rested_ms else endless)[0])


def errors() -> dict[str, list[float]]:
    """Relative errors by GPU, kernel, pass and what was asked; odd rows apart, and those that fits read."""
    found: dict[str, list[float]] = {}
    for row in rows():
        kind = f"window {row['window']}" if row["window"] != "0" else f"192/128 {row['mask']}"
        apart = ", odd" if is_odd(row) else ", fitted" if is_fitted(row) else ""
        name = f"{row['gpu']} {row['kernel']} {row['pass']} {kind}{apart}"
        found.setdefault(name, []).append(predicted_ms(row) / float(row["ms"]) - 1)
    return found
