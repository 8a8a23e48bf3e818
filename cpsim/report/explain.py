"""One paragraph about one name: a strategy with its picture, a mask, a field, a kernel, a framework, a model.

The words are those of the code itself: docstrings of planners and of fields, and facts of tables.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from cpsim.case.cluster import Cluster, load_cluster, presets
from cpsim.case.cluster import described as cluster_text
from cpsim.case.documents import DISTRIBUTIONS, load_bins
from cpsim.case.model import PUBLISHED
from cpsim.case.parallel import Parallel
from cpsim.case.scenario import DocumentDraw, ParallelSection, Scenario
from cpsim.case.workload import Workload
from cpsim.errors import CpsimError, InfeasibleError, nearest
from cpsim.masks.names import MASK_NAMES
from cpsim.masks.slices import coarse_mask
from cpsim.models.attention.kernels import KERNELS
from cpsim.prediction.results import Prediction
from cpsim.prediction.step.frameworks import FRAMEWORKS
from cpsim.report.shards import owners
from cpsim.strategies import STRATEGIES, Knobs
from cpsim.strategies.others import IMPLEMENTATIONS

CELLS: Final = 24
"""Tokens, or blocks of them, on each side of a picture."""
RANKS: Final = 4
REFUSALS: Final = {
    "cannot": "No code that we know can run the case; the reason says what nearly does. Exit code 3.",
    "not_measured": "Nobody has measured what its time rests on: the case itself may well run. Exit code 4.",
    "does_not_fit": "It needs more memory than a GPU has; the reason says how much, and what would fit. Exit code 5.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What a name means."""

    name: str
    kind: str
    """What it is, e.g. ``strategy``."""
    text: str
    picture: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    """Names and values beside the text."""


def explain(name: str) -> list[Explained]:
    """What a name means; several where it is several things.

    Raises:
        CpsimError: nothing is called so.
    """
    tables = _tables()
    asked = name.strip().removeprefix("parallel.").removeprefix("documents.")
    found = [make(asked) for known, make in tables if asked in known]
    if not found:
        every = [one for known, _ in tables for one in known]
        raise CpsimError(f"explain: nothing is called {name[:60]!r}; {nearest(name, every)[:200]}")
    return found


def names() -> Mapping[str, list[str]]:
    """All names, by what they are."""
    kinds = ("strategies", "masks", "kernels", "frameworks", "implementations", "models", "clusters", "distributions")
    return {kind: [*known] for kind, (known, _) in zip(kinds, _tables(), strict=False)}


def _tables() -> list[tuple[Iterable[str], Callable[[str], Explained]]]:
    fields = [(tuple(_field_texts(of)), _field_of(of)) for of in (Scenario, ParallelSection, DocumentDraw, Prediction)]
    return [
        (STRATEGIES, _strategy),
        (MASK_NAMES, _mask),
        (dict.fromkeys(kernel for kernel, _ in KERNELS), _kernel),
        (FRAMEWORKS, _framework),
        (IMPLEMENTATIONS, _implementation),
        (PUBLISHED, _model),
        (presets(), _cluster),
        (DISTRIBUTIONS, _distribution),
        (REFUSALS, lambda name: Explained(name=name, kind="kind of refusal", text=REFUSALS[name])),
        *fields,
    ]


def _strategy(name: str) -> Explained:
    text = inspect.cleandoc(STRATEGIES[name].plan.__doc__ or "")
    about, _, rest = text.partition("Args:")
    knobs = tuple((knob, words) for knob, words in _arguments(rest).items() if "," not in knob and knob != "code")
    who = [code.name for code in IMPLEMENTATIONS.values() if code.strategies is None or name in code.strategies]
    who += [one.name for one in FRAMEWORKS.values() if name in one.offers]
    return Explained(
        name=name,
        kind="strategy",
        text=_plain(about),
        picture=_picture(name),
        facts=(("whose code has it", ", ".join(dict.fromkeys(who))), *knobs),
    )


def _arguments(text: str) -> dict[str, str]:
    """Arguments of a docstring's section."""
    body = text.split("\n\n")[0]
    found: dict[str, str] = {}
    last = ""
    for line in body.splitlines():
        if match := re.match(r"    (\w[\w, ]*): (.*)", line):
            last = match[1]
            found[last] = _plain(match[2])
        elif last and line.strip():
            found[last] += f" {_plain(line)}"
    return found


def _picture(name: str) -> str:
    """Which of a few ranks holds the query of every pair of a causal mask of two documents."""
    tokens = CELLS * 16
    workload = Workload(
        documents=(tokens * 2 // 3, tokens // 3),
        mask="causal_document",
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        dtype="bf16",
    )
    try:
        ranks = 1 if name == "none" else RANKS
        cluster = load_cluster("h200-4").with_gpus(ranks)
        schedule = STRATEGIES[name].plan(workload, cluster, "fwd", **_knobs(name, workload, cluster))
        at = np.arange(CELLS) * (tokens // CELLS) + tokens // CELLS // 2
        held = owners(schedule, at)
    except (CpsimError, ValueError, IndexError):
        return ""
    seen = coarse_mask(workload.slices(), tokens, CELLS) > 0
    rows = [
        "".join(f"{rank}" * 2 if sees else "· " for sees in row) for rank, row in zip(held.tolist(), seen, strict=True)
    ]
    return "\n".join(["keys to the right, queries down; the number is the rank that holds the query", *rows])


def _knobs(name: str, workload: Workload, cluster: Cluster) -> Knobs:
    """Knobs that are worth a try, the first of them."""
    try:
        return next(iter(STRATEGIES[name].knobs(workload, cluster)))
    except InfeasibleError:  # worth no try here, which is no reason not to be drawn
        return {}


def _mask(name: str) -> Explained:
    known = MASK_NAMES[name]
    options = tuple((option, about.meaning) for option, about in known.options.items())
    return Explained(
        name=name,
        kind="mask",
        text=f"{known.meaning[0].upper()}{known.meaning[1:]}; documents {known.documents}. "
        f"`cpsim mask {name}` draws it.",
        facts=options,
    )


def _kernel(name: str) -> Explained:
    passes = [pass_ for kernel, pass_ in KERNELS if kernel == name]
    text = f"An attention kernel, priced {' and '.join(passes)}. `cpsim kernels` says masks, types and speed."
    return Explained(name=name, kind="kernel", text=text)


def _framework(name: str) -> Explained:
    one = FRAMEWORKS[name]
    return Explained(
        name=name,
        kind="framework",
        text=f"Steps as {one.source} runs them.",
        facts=(
            ("sharding", ", ".join(one.shardings)),
            ("recompute", ", ".join(one.recomputes)),
            ("strategies", ", ".join(one.offers) or "none"),
            ("pipelines", "yes" if one.pipelines else "no"),
            ("experts", "yes" if one.experts else "no"),
            ("fp8", ", ".join(one.recipes) or "no"),
        ),
    )


def _implementation(name: str) -> Explained:
    code = IMPLEMENTATIONS[name]
    return Explained(
        name=name,
        kind="implementation",
        text=f"Attention as its code runs it: {code.source}.",
        facts=(
            ("strategies", ", ".join(code.strategies) if code.strategies is not None else "all"),
            ("kernels", ", ".join(code.kernels) or "all"),
        ),
    )


def _model(name: str) -> Explained:
    one = PUBLISHED[name]
    if one.model is None:
        return Explained(name=name, kind="model", text=f"{one.refusal()}. Repository: {one.hub}.")
    caveats = f" It has {', '.join(one.caveats)}, which a step leaves out." if one.caveats else ""
    sizes = {size: value for size, value in asdict(one.model).items() if value}
    facts = tuple((size, f"{value:,}" if isinstance(value, int) else _listed(value)) for size, value in sizes.items())
    return Explained(name=name, kind="model", text=f"{one.hub}, {one.model.size()}.{caveats}", facts=facts)


def _listed(value: object) -> str:
    """Sizes within a size, e.g. ``key_heads 16, value_heads 32``."""
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)


def _cluster(name: str) -> Explained:
    cluster = presets()[name]
    return Explained(name=name, kind="cluster", text=f"{cluster_text(cluster)}. {cluster.notes}")


def _distribution(name: str) -> Explained:
    return Explained(
        name=name, kind="distribution", text=f"Document lengths, {load_bins(name).mean():,.0f} tokens on average."
    )


def _field_of(of: type[Any]) -> Callable[[str], Explained]:
    kinds = {
        "Scenario": "field of a scenario",
        "ParallelSection": "field of parallel",
        "DocumentDraw": "field of documents",
        "Prediction": "field of an answer",
    }

    def make(name: str) -> Explained:
        return Explained(name=name, kind=kinds[of.__name__], text=_field_texts(of)[name])

    return make


def _field_texts(of: type[Any]) -> dict[str, str]:
    """Texts that stand below the fields of a class, by name; of fields of ``parallel`` those of ``Parallel``, too."""
    found: dict[str, str] = {}
    source = inspect.getsource(of)
    (body,) = ast.parse(inspect.cleandoc("\n" + source)).body
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        default = ast.unparse(field.value) if field.value is not None else ""
        more = f" Default: {default}." if default and "Field" not in default and default != "None" else ""
        found[field.target.id.rstrip("_")] = f"{_plain(str(said)) or ast.unparse(field.annotation) + '.'}{more}"
    if of is ParallelSection:
        found |= {name: text for name, text in _field_texts(Parallel).items() if name in found}
    return found


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())
