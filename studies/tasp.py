"""How much faster than one ring rings on all cycles are, over the cases of TASP's benchmark, beside what it found.

    python -m studies.tasp            # prints the table
    python -m studies.tasp --update   # writes it into docs/strategies.md

Lengths and batches are those of infinigence/HamiltonAttention at 8660690 (H100-*/test_hamilton_attention.py) with 20
heads of 128, up to 10 million tokens, forward with flash-attn 2. The paper (arXiv 2509.26541) compares with
ring-flash-attn's rings, of which this predicts ours. Its averages are those of a summary of its tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from cpsim.prediction.predict import predict
from studies.claims import put

PAGE: Final = Path(__file__).parent.parent / "docs" / "strategies.md"
MARKS: Final = ("<!-- tasp -->\n", "<!-- end of tasp -->")
LENGTHS: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_TOKENS: Final = 10_000_000
WHOLE: Final = "dgx-h100 fabric.flow_bandwidth_bytes_per_s=45e9"
"""A network on which one message between two nodes gets all of a NIC, of which dgx-h100 gives it half."""


@dataclass(frozen=True, slots=True)
class Published:
    """A setting, and its average and largest speed-up as published."""

    gpus: int
    mask: str
    unit: int
    """Tokens that lengths are multiples of."""
    average: float
    largest: float | None = None


PUBLISHED: Final = (
    Published(8, "full", 3360, 1.05, 2.31),
    Published(8, "causal", 3360, 1.08, 2.25),
    Published(16, "full", 3840, 1.43),
    Published(32, "full", 7936, 1.27),
)


def cases(one: Published, cluster: str = "dgx-h100") -> list[dict[str, Any]]:
    """All lengths and batches of a setting; sequences of a batch are documents."""
    case: dict[str, Any] = {"cluster": cluster, "gpus": one.gpus, "heads": 20, "kv_heads": 20, "mask": one.mask}
    case |= {"kernel": "fa2", "pass": "fwd", "strategy": "zigzag_ring"}
    found = []
    for length in (one.unit * number for number in LENGTHS):
        for batch in (batch for batch in BATCHES if length * batch <= MOST_TOKENS):
            several = {"documents": [length] * batch, "mask": f"{one.mask}_document"} if batch > 1 else {}
            found.append({**case, "tokens": length * batch, **several})
    return found


def speed_up(case: dict[str, Any]) -> float:
    """Time of one ring over that of rings on all cycles."""
    ring, every = (predict({**case, "knobs": {"cycles": cycles}}).time_s for cycles in ("one", "all"))
    return ring / every


def rows() -> Iterator[str]:
    """Lines of the table."""
    yield "| H100 | mask | cases | predicted mean | largest | published mean | largest | whole NIC for a message |"
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for one in PUBLISHED:
        found = list(map(speed_up, cases(one)))
        whole = f"{mean(map(speed_up, cases(one, WHOLE))):.2f}" if one.gpus > 8 else ""
        largest = f"{one.largest:.2f}" if one.largest else ""
        yield (
            f"| {one.gpus} | {one.mask} | {len(found)} | {mean(found):.2f} | {max(found):.2f} | {one.average:.2f} "
            f"| {largest} | {whole} |"
        )


def main() -> None:
    """Prints the table, or writes it."""
    table = "\n".join(rows()) + "\n"
    if "--update" not in sys.argv[1:]:
        print(table, end="")
        return
    put(table, PAGE, MARKS)


if __name__ == "__main__":
    main()
