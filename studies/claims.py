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
    new: tuple[float, ...] = (1.0,)
    """Shares of the tokens that are new; keys of the others are cached."""

    def cases(self) -> list[tuple[int, float]]:
        """Tokens, and the share of them that is new."""
        return [(tokens, new) for tokens in self.tokens for new in self.new]

    def predicted(self, tokens: int, new: float) -> tuple[Prediction, Prediction]:
        """Both ways."""
        common: dict[str, object] = {**self.case, "mask": "causal", "tokens": tokens}
        if new < 1:
            common["cached"] = tokens - round(new * tokens)
        (this, some), (that, others) = self.this, self.that
        return (
            predict(common | {"strategy": this, "knobs": some}),
            predict(common | {"strategy": that, "knobs": others}),
        )


RAIL: Final = {
    "cluster": str(Path(__file__).parent / "rail.yaml"),
    "gpus": 4,
    "heads": 16,
    "kv_heads": 1,
    "pass": "fwd",
}
"""One of eight GPUs of each of four nodes, among which the heads of Llama-3-405B are shared."""

FOUR: Final = {"cluster": "p4de", "gpus": 4, "heads": 32, "kv_heads": 8}
"""Half a node of A100, and the heads of Llama-3-8B."""

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
        paper="pass-Q (2411.01783), table 4",
        claim="time to the first token 1.14, 1.06 and 1.01 times as fast as with pass-KV",
        faster=True,
        case=RAIL,
        tokens=(128_000,),
        new=(0.01, 0.025, 0.0325),
        this=("mesh", {"keys": 1}),
        that=("striped_ring", {}),
        shape="forward on 4 H100 of 4 nodes, 16:1 heads of each",
    ),
    Claim(
        paper="the same",
        claim="0.94, 0.93 and 0.93 times as fast",
        faster=False,
        case=RAIL,
        tokens=(128_000,),
        new=(0.1, 0.2, 0.5),
        this=("mesh", {"keys": 1}),
        that=("striped_ring", {}),
        shape="the same",
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
    Claim(
        paper="FPDT (2408.16978)",
        claim="an 8B model with 2M tokens on 4 GPUs, at over 55 % of their peak",
        faster=False,
        case=FOUR,
        tokens=(2**20,),
        this=("ulysses", {"token_chunks": 16}),
        that=("ulysses", {}),
        shape="attention on 4 A100, 32:8 heads, beside Ulysses without chunks",
    ),
    Claim(
        paper="the same",
        claim="the same",
        faster=False,
        case=FOUR,
        tokens=(2**21,),
        this=("ulysses", {"token_chunks": 32}),
        that=("ulysses", {}),
        shape="the same",
    ),
)


def rows() -> Iterator[str]:
    """Lines of the table."""
    yield "| paper | it claims | case | tokens | faster than the ring | fewer bytes | sign |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- |"
    for claim in CLAIMS:
        for i, (tokens, new) in enumerate(claim.cases()):
            this, that = claim.predicted(tokens, new)
            ratio, saved = that.time_s / this.time_s, 1 - this.bytes_sent_per_gpu / that.bytes_sent_per_gpu
            said = (claim.paper, claim.claim, claim.shape) if i == 0 else ("", "", "")
            right = "right" if (ratio > 1) == claim.faster else "wrong"
            length = f"{tokens // 2**10:,}k" + (f", {100 * new:.4g} % new" if new < 1 else "")
            yield f"| {' | '.join(said)} | {length} | {ratio:.2f} times | {saved:.0%} | {right} |"


def put(table: str, page: Path, marks: tuple[str, str]) -> None:
    """Writes a table between two marks of a page."""
    before, rest = page.read_text(encoding="utf-8").split(marks[0])
    page.write_text(before + marks[0] + table + marks[1] + rest.split(marks[1])[1], encoding="utf-8")


def main() -> None:
    """Prints the table, or writes it."""
    table = "\n".join(rows()) + "\n"
    if "--update" not in sys.argv[1:]:
        print(table, end="")
        return
    put(table, PAGE, MARKS)


if __name__ == "__main__":
    main()
