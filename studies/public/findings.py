"""Rows that miss by more than twice their interval: each has a cause, or is an open question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from studies.public.ledger import Compared
from studies.public.readers.bridge import OVERLAPPED
from studies.public.row import Row


@dataclass(frozen=True, slots=True)
class Finding:
    """Rows that miss together."""

    about: str
    belongs: Callable[[Row], bool]
    cause: str
    """Empty: an open question."""


FINDINGS: Final = (
    Finding(
        "USP's grid of 32,768 tokens",
        lambda row: row.kind == "yunchang" and "x 32768 tokens" in row.name,
        "taken for heads of 128, which its own Ulysses rows say; its rings are faster than transfers that wait for SMs",
    ),
    Finding(
        "a basic ring of packed tensors on A100",
        lambda row: row.kind == "yunchang",
        "",
    ),
    Finding(
        "experts whose exchanges overlap without CUDA graphs",
        lambda row: OVERLAPPED in row.assumed and not row.name.startswith("GPT OSS"),
        "16 to 17 ms a layer and microbatch on H100 and B300, 13 on B200, whatever these need: hosts launch two "
        "microbatches part by part, which nobody has measured; one alone takes them 8 to 15 ms",
    ),
    Finding(
        "experts on H100",
        lambda row: row.routed and row.gpu == "H100",
        "",
    ),
    Finding(
        "experts of releases that later ones leave behind",
        lambda row: row.routed,
        "the same model on as many of the same GPUs ran 1.6 to 2.2 times as fast in another release: software that no "
        "layout tells apart",
    ),
    Finding(
        "adapters with context parallelism in MLPerf 4.0",
        lambda row: row.kind == "mlperf" and row.edition == "v4.0",
        "layers were launched one by one, and in CUDA graphs from 4.1 on: hosts of layers with frozen weights were not "
        "measured",
    ),
)


def finding_of(one: Compared) -> Finding | None:
    """What a row that misses by more than twice its interval belongs to."""
    return next((each for each in FINDINGS if each.belongs(one.row)), None) if one.far else None


def finding_lines(some: Sequence[Compared]) -> list[str]:
    """How many rows are far outside, and why."""
    far = [one for one in some if one.far]
    lines = []
    for each in FINDINGS:
        count = sum(finding_of(one) is each for one in far)
        if count:
            lines.append(f"{count} far outside, {each.about}: {each.cause or 'an open question'}")
    others = [one.row.key for one in far if finding_of(one) is None]
    return [*lines, *([f"{len(others)} far outside, open questions: {', '.join(others)}"] if others else [])]
