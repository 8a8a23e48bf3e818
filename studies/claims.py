"""What papers claim for strategies that cpsim plans itself, beside what it predicts.

    python -m studies.claims            # prints the table
    python -m studies.claims --update   # writes it into docs/strategies.md

Abstracts say how much faster a strategy was than another one, and on how many GPUs. Where they do not say on which
network, with which heads or how many tokens, several lengths are predicted on H100 or A100.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpsim.prediction.predict import predict
from cpsim.prediction.results import Prediction

PAGE: Final = Path(__file__).parent.parent / "docs" / "strategies.md"
MARKS: Final = ("<!-- claims -->\n", "<!-- end of claims -->")


@dataclass(frozen=True, slots=True)
class Claim:
    """Two ways to run a case, of which a paper says how much faster the first one is."""

    paper: str
    claim: str
    faster: bool
    """Whether the paper finds the first way the faster one."""
    case: Mapping[str, object]
    tokens: tuple[int, ...]
    this: tuple[str, Mapping[str, object]]
    """Strategy and knobs."""
    that: tuple[str, Mapping[str, object]] = ("zigzag_ring", {})
    shape: str = ""

    def predicted(self, tokens: int) -> tuple[Prediction, Prediction]:
        """Both ways."""
        common = {**self.case, "mask": "causal", "tokens": tokens}
        (this, some), (that, others) = self.this, self.that
        return (
            predict(common | {"strategy": this, "knobs": some}),
            predict(common | {"strategy": that, "knobs": others}),
        )


CLAIMS: Final = (
    Claim(
        paper="Mesh-Attention (2512.20968)",
        claim="on average 2.9 times as fast as a ring, at most 3.4 times; 79.0 % fewer bytes, at most 85.4 %",
        faster=True,
        case={"cluster": "dgx-h100", "gpus": 256, "heads": 32, "kv_heads": 32},
        tokens=(2**20, 2**21, 2**22),
        this=("mesh", {"heads_per_gather": 8}),
        shape="256 H100, 32 heads",
    ),
    Claim(
        paper="pass-Q (2411.01783)",
        claim="pass-KV is the better one where no keys are cached, as keys are few",
        faster=False,
        case={"cluster": "dgx-h100", "gpus": 16, "heads": 128, "kv_heads": 8, "pass": "fwd"},
        tokens=(2**17, 2**20),
        this=("mesh", {"keys": 1}),
        shape="forward on 16 H100, 128:8 heads",
    ),
    Claim(
        paper="BurstEngine (2509.19836)",
        claim="whole steps of a 7B model 1.19 times as fast as the best of others, 1M tokens and more",
        faster=True,
        case={"cluster": "p4de", "gpus": 32, "heads": 32, "kv_heads": 32},
        tokens=(2**17, 2**20),
        this=("zigzag_ring", {"backward": "queries"}),
        shape="attention on 32 A100, 32 heads",
    ),
)


def rows() -> Iterator[str]:
    """Lines of the table."""
    yield "| paper | it claims | case | tokens | faster than the ring | fewer bytes | sign |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- |"
    for claim in CLAIMS:
        for i, tokens in enumerate(claim.tokens):
            this, that = claim.predicted(tokens)
            ratio, saved = that.time_s / this.time_s, 1 - this.bytes_sent_per_gpu / that.bytes_sent_per_gpu
            said = (claim.paper, claim.claim, claim.shape) if i == 0 else ("", "", "")
            right = "right" if (ratio > 1) == claim.faster else "wrong"
            yield f"| {' | '.join(said)} | {tokens // 2**10:,}k | {ratio:.2f} times | {saved:.0%} | {right} |"


def main() -> None:
    """Prints the table, or writes it."""
    table = "\n".join(rows()) + "\n"
    if "--update" not in sys.argv[1:]:
        print(table, end="")
        return
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    main()
