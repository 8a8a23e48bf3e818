"""Masks by name: what each one means and the options that a scenario may set. No slices; see ``cpsim.masks.shapes``.

Reference: LongCA-bench (arXiv 2510.17896), section 3, for its fourteen masks; DCP (arXiv 2510.10620) and its public
code for lambda, causal_blockwise and shared_question. Both have masks of the last two names: those of DCP cut every
document by their options, those of LongCA-bench take documents as they are and end in ``_document`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from cpsim.errors import cut, nearest, shown

Value = int | float | str
Options = tuple[tuple[str, Value], ...]
"""(name, value) of the options that differ from their defaults, in the mask's order."""

MAX_INT: Final = 10**9


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a mask."""

    default: Value | None
    """None: drawn at random."""
    meaning: str
    low: float = 1
    high: float = MAX_INT
    choices: tuple[str, ...] = ()

    def check(self, value: object) -> Value:
        """The value, if it is a valid one.

        Raises:
            ValueError: says what was expected.
        """
        if self.choices:
            if isinstance(value, str) and value in self.choices:
                return value
            raise ValueError(f"expected {' or '.join(self.choices)}, got {shown(value)}")
        is_share = isinstance(self.default, float)
        is_number = isinstance(value, (int, float) if is_share else int) and not isinstance(value, bool)
        if isinstance(value, int | float) and is_number and self.low <= value <= self.high:
            return float(value) if is_share else value
        kind = "a number" if is_share else "a whole number"
        raise ValueError(f"expected {kind} from {self.low:g} to {self.high:.10g}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class MaskName:
    """What a name of a mask stands for."""

    meaning: str
    source: str
    documents: Literal["ignored", "apart", "related"]
    """Whether documents make no difference, never see each other, or see each other as the meaning says."""
    options: Mapping[str, Option] = field(default_factory=dict)

    def describe(self) -> str:
        """Options with their defaults, e.g. ``window 1024``."""
        shown_as = ((name, "drawn" if o.default is None else o.default) for name, o in self.options.items())
        return ", ".join(f"{name} {default}" for name, default in shown_as)


_SEED: Final = Option(0, "of the random draw", low=0)
_SLIDING: Final = {"window": Option(1024, "keys on each side of a query's own", low=0)}
_CAUSAL_SLIDING: Final = {"window": Option(1024, "keys before a query's own", low=0)}
_PREFIX: Final = {"prefix": Option(None, "tokens that see each other"), "seed": _SEED}
_DENSITY: Final = Option(0.2, "share of key blocks that a query block sees", low=0.0, high=1.0)

LONGEST: Final = 30
"""Characters of a name that is unknown that a message quotes; no mask has more."""
MASK_NAMES: Final[dict[str, MaskName]] = {
    "full": MaskName("every query sees every key", "LongCA-bench", "ignored"),
    "causal": MaskName("every query sees its own and earlier keys", "LongCA-bench, DCP", "ignored"),
    "full_document": MaskName("full within every document", "LongCA-bench", "apart"),
    "causal_document": MaskName("causal within every document", "LongCA-bench, DCP", "apart"),
    "full_sliding_window": MaskName("keys near the query, on both sides", "LongCA-bench", "apart", _SLIDING),
    "causal_sliding_window": MaskName("the latest keys", "LongCA-bench", "apart", _CAUSAL_SLIDING),
    "shared_question": MaskName(
        "causal: a question, then answers to it that do not see each other",
        "DCP",
        "apart",
        {
            "question_share": Option(0.2, "share of a document that is its question", low=0.0, high=1.0),
            "answers": Option(4, "answers of a document, equally long; the last takes the rest", high=65536),
        },
    ),
    "shared_question_document": MaskName(
        "causal: document 0 is the question, the others are answers", "LongCA-bench: share question", "related"
    ),
    "causal_blockwise": MaskName(
        "causal: the first block, and a window of the latest ones; the last block sees all",
        "DCP",
        "apart",
        {
            "block": Option(256, "tokens of a block"),
            "local_blocks": Option(2, "blocks of keys before a query's own that it sees"),
        },
    ),
    "causal_blockwise_document": MaskName(
        "causal within every document; the last one sees all", "LongCA-bench: causal blockwise", "related"
    ),
    "prefix_lm_causal": MaskName(
        "a prefix sees all of itself, what follows is causal", "LongCA-bench", "ignored", _PREFIX
    ),
    "prefix_lm_document": MaskName("the same within every document", "LongCA-bench", "apart", _PREFIX),
    "block_causal_document": MaskName(
        "blocks see their document up to their own end", "LongCA-bench", "apart", {"block": Option(1024, "tokens")}
    ),
    "lambda": MaskName(
        "causal: the first keys and the latest ones",
        "DCP",
        "apart",
        {"sink": Option(64, "first keys, seen by all", low=0), "window": Option(4096, "latest keys, its own included")},
    ),
    "global_sliding": MaskName(
        "keys near the query, on both sides; the first tokens see all and are seen by all, as far as ends say",
        "LongCA-bench",
        "ignored",
        {
            "window": Option(None, "first tokens, and keys on each side"),
            "ends": Option(
                "causal",
                "causal, as LongCA-bench's code has it, cuts the far corners of the first rows "
                "and columns; full leaves them whole",
                choices=("causal", "full"),
            ),
            "seed": _SEED,
        },
    ),
    "block_sparse": MaskName(
        "random blocks of equal size, the same for all heads",
        "LongCA-bench",
        "ignored",
        {"block": Option(64, "tokens of a block"), "density": _DENSITY, "seed": _SEED},
    ),
    "variable_block_sparse": MaskName(
        "random blocks of random sizes, the same for all heads",
        "LongCA-bench",
        "ignored",
        {
            "block": Option(512, "mean tokens of a block"),
            "min_block": Option(128, "fewest tokens of a block"),
            "align": Option(1, "tokens that divide those of all blocks but the last"),
            "density": _DENSITY,
            "seed": _SEED,
        },
    ),
}
"""All masks; ``source`` says who defines them and by which name, where it is another one."""


def read_mask(value: object) -> tuple[str, Options]:
    """Name and options of a mask as a scenario file says them: a name, or a mapping with a name and options.

    Raises:
        ValueError: what was expected, what came, and the nearest valid name.
    """
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        raise ValueError(f"expected a name or a mapping with a name, e.g. causal, got {shown(value)}")
    if name not in MASK_NAMES:
        raise ValueError(f"{cut(shown(name), LONGEST)} is unknown; {nearest(name, MASK_NAMES)}")
    given = {key: entry for key, entry in value.items() if key != "name"} if isinstance(value, Mapping) else {}
    return name, read_options(name, given)


def read_options(name: str, given: Mapping[str, object]) -> Options:
    """The options of a mask that differ from their defaults, checked.

    Raises:
        ValueError: which option is wrong and how.
    """
    known = MASK_NAMES[name].options
    for key, entry in given.items():
        if not known:
            raise ValueError(
                f"{shown(name)} takes no parameters, got {cut(', '.join(map(str, given)), 60)}; remove them"
            )
        if key not in known:
            raise ValueError(f"{name} has no option {shown(key)}; {nearest(key, known)}")
        try:
            known[key].check(entry)
        except ValueError as error:
            raise ValueError(f"{name}: {key}: {error}") from None
    checked = {key: known[key].check(entry) for key, entry in given.items()}
    return tuple((key, checked[key]) for key in known if key in checked and checked[key] != known[key].default)
