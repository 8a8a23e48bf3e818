"""Published tables of attention kernels beside what profiles say of the same calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean
from typing import Final

from cpsim.case.gpu import gpu_of_driver
from cpsim.case.published import OUT_OF_MEMORY, TABLES, is_long, mask_options, packs_of, shipped_rows
from cpsim.case.workload import Workload
from cpsim.models.attention.calls import attention_op_seconds
from cpsim.models.attention.kernels import KERNELS, UNMEASURED
from cpsim.models.feasible import DIRECT, DTYPES, limits_of, refusal
from cpsim.models.profile import Profile, load_profile, shipped_profiles
from cpsim.prediction.kernel_tables import EXAMPLE, one_call, peak_bytes

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "dense": ("full", "causal", "full_sliding_window", "causal_sliding_window"),
    "documents": ("full_document", "causal_document"),
    "mixed": (
        "shared_question_document",
        "causal_blockwise_document",
        "prefix_lm_causal",
        "prefix_lm_document",
        "global_sliding",
        "block_causal_document",
    ),
    "uniform": ("block_sparse",),
    "variable": ("variable_block_sparse",),
}
"""Masks by the groups that benchmarks have."""
CHOSEN: Final = (
    "PyTorch chooses the kernel: as cudnn where the mask is full or causal, with all scores masked elsewhere"
)
_CASE: Final = ("mask", "options", "documents", "tokens", "heads", "kv_heads", "head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One published call, and the same one by a profile."""

    table: str
    gpu: str
    kernel: str
    pass_: str
    mask: str
    options: str
    documents: str
    tokens: int
    heads: int
    kv_heads: int
    published_tflops: float | None
    """None: it was not published, or ran out of memory."""
    published_bytes: int | None
    tflops: float | None
    """None: `why` says why there is none."""
    memory_bytes: int | None
    profile: str
    """The profile that it is by."""
    fitted: bool
    """Whether the profile's kernel was fitted to published calls, these or others."""
    short: bool
    """Whether the published time may be that of launches: near the shortest of its kernel and pass."""
    why: str

    @property
    def error(self) -> float | None:
        """Predicted over published TFLOP/s, minus 1."""
        if self.tflops is None or self.published_tflops is None:
            return None
        return self.tflops / self.published_tflops - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """What a benchmark says that a kernel runs, beside what can be priced here."""

    kernel: str
    published: str
    """Its name there."""
    masks: Mapping[str, tuple[bool, str]]
    """By group: whether it is said to run these masks; and ``yes``, ``no``, or which of them are priced here."""
    passes: str
    ours: str
    """Passes that are priced here."""
    blocks: str
    grouped: str
    head_dims: str
    dtypes: str
    """Element types that are priced here."""
    since: str
    why: str
    """Where this differs from what was published, why."""


def beside(profiles: Sequence[Profile], tables: Sequence[str] = TABLES) -> list[Beside]:
    """Published calls on the GPUs of some profiles; by the first of them that has the kernel, or another one that ships
    for the same GPU."""
    gpus = {gpu.name: profile for profile in profiles if (gpu := gpu_of_driver(profile.gpu)) is not None}
    found: list[Beside] = []
    for table in tables:
        rows = [row for row in shipped_rows(table)[1] if row["gpu"] in gpus]
        shortest = _shortest(rows)
        lenders = {gpu: _of_gpu(gpu, profiles) for gpu in gpus}
        rows.sort(key=lambda row: [row.get(name, "") for name in _CASE])
        for _, alike in groupby(rows, key=lambda row: [row.get(name, "") for name in _CASE]):
            found += _of_case(table, list(alike), lenders, shortest)
    return found


def _of_gpu(gpu: str, profiles: Sequence[Profile]) -> list[Profile]:
    """Profiles of a GPU, those given first."""
    names = [profile.name for profile in profiles]
    shipped = [load_profile(name) for name in shipped_profiles() if name not in names]
    return [one for one in (*profiles, *shipped) if (known := gpu_of_driver(one.gpu)) is not None and known.name == gpu]


def _shortest(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str, str], float]:
    """Shortest published seconds by GPU, kernel and pass, where documents are apart those of the mean pack."""
    found: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if (seconds := _published_seconds(row)) is not None:
            key = row["gpu"], row["kernel"], row["pass"]
            found[key] = min(seconds, found.get(key, seconds))
    return found


def _published_seconds(row: Mapping[str, str]) -> float | None:
    if row["tflops"] in ("", OUT_OF_MEMORY):
        return None
    cases = _cases(row)
    return mean(case.flops(row["pass"]) for case in cases) / float(row["tflops"]) / 1e12  # type: ignore[arg-type]


def _cases(row: Mapping[str, str]) -> list[Workload]:
    """The calls of a row: one, or one for every pack."""
    tokens, options = int(row["tokens"]), mask_options(row["mask"], row["options"])
    return [
        Workload(
            documents=pack,
            mask=row["mask"],
            num_heads=int(row["heads"]),
            num_kv_heads=int(row["kv_heads"]),
            head_dim=int(row["head_dim"]),
            dtype=DTYPES[0],
            mask_options=tuple(options.items()),
        )
        for pack in packs_of(row.get("documents", ""), tokens)
    ]


def _of_case(
    table: str,
    rows: Sequence[Mapping[str, str]],
    lenders: Mapping[str, Sequence[Profile]],
    shortest: Mapping[tuple[str, str, str], float],
) -> list[Beside]:
    """Rows of one mask and length, whose schedules are planned once."""
    cases, found = _cases(rows[0]), []
    for row in rows:
        kernel, pass_, rate = row["kernel"], row["pass"], row["tflops"]
        having = [p for p in lenders[row["gpu"]] if (kernel, pass_) in p.attention]
        why = _why_not(kernel, pass_, cases[0], having)
        rates = [] if why else [_rate(having[0], kernel, pass_, case) for case in cases]
        shape = int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"])
        published_s = _published_seconds(row)
        memory = row.get("gb", "")
        found.append(
            Beside(
                table=table,
                gpu=row["gpu"],
                kernel=kernel,
                pass_=pass_,
                mask=row["mask"],
                options=row["options"],
                documents=row.get("documents", ""),
                tokens=int(row["tokens"]),
                heads=shape[0],
                kv_heads=shape[1],
                published_tflops=None if rate in ("", OUT_OF_MEMORY) else float(rate),
                published_bytes=None if memory in ("", OUT_OF_MEMORY) else round(float(memory) * 1e9),
                tflops=mean(rates) if rates else None,
                memory_bytes=peak_bytes(kernel, pass_, int(row["tokens"]), shape) if rates and memory else None,
                profile=having[0].name if having else "",
                fitted=bool(having) and _is_published(having[0], kernel, pass_),
                short=published_s is not None and not is_long(published_s, shortest[row["gpu"], kernel, pass_]),
                why=why,
            )
        )
    return found


def _why_not(kernel: str, pass_: str, case: Workload, having: Sequence[Profile]) -> str:
    """Why there is no time of a call; empty where there is one."""
    if kernel in UNMEASURED or kernel not in {name for name, _ in KERNELS}:
        return UNMEASURED.get(kernel, CHOSEN)
    if (kernel, pass_) not in KERNELS or (pass_ == "bwd" and not limits_of(kernel).backward):
        return f"kernel {kernel} has no {pass_}"
    if not having:
        return f"no profile of this GPU has kernel {kernel}"
    return refusal(kernel, case.dtype, case.head_dim, one_call(case), direct=kernel in DIRECT)


def _rate(profile: Profile, kernel: str, pass_: str, case: Workload) -> float:
    """TFLOP/s of a call."""
    params = profile.attention_params(kernel, pass_)
    seconds = attention_op_seconds(params, kernel, case.dtype, case.head_dim, one_call(case))[0, 0]
    return case.flops(pass_) / float(seconds) / 1e12  # type: ignore[arg-type]


def _is_published(profile: Profile, kernel: str, pass_: str) -> bool:
    held_out = {row["model"] for row in profile.held_out}
    return profile.grade.startswith("kernels from published") and f"attention {pass_} {kernel}" in held_out


def supported() -> list[Supported]:
    """What benchmarks say that kernels run, beside what can be priced here."""
    return [_supported(row) for row in shipped_rows("support")[1]]


def _supported(row: Mapping[str, str]) -> Supported:
    kernel, said = row["kernel"], row["masks"].split()
    reasons: dict[str, None] = {}
    masks = {}
    for group, names in GROUPS.items():
        why = [_why_not_mask(kernel, name) for name in names]
        priced = sum(not reason for reason in why)
        masks[group] = (group in said, {0: "no", len(names): "yes"}.get(priced, f"{priced} of {len(names)}"))
        if group in said and priced < len(names):
            reasons |= dict.fromkeys(filter(None, why))
    ours = " ".join(pass_ for pass_ in ("fwd", "bwd") if (kernel, pass_) in KERNELS)
    return Supported(
        kernel=kernel,
        published=row["published"],
        masks=masks,
        passes=row["passes"],
        ours=ours,
        blocks=row["blocks"],
        grouped=row["grouped"],
        head_dims=row["head_dims"],
        dtypes=" ".join(limits_of(kernel).dtypes) if ours else "",
        since=row["from"],
        why="; ".join(reasons),
    )


def _why_not_mask(kernel: str, mask: str) -> str:
    """Why a kernel's calls under a mask cannot be priced, by its least blocks."""
    case = Workload(
        documents=EXAMPLE,
        mask=mask,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        dtype=DTYPES[0],
        mask_options=(("block", 128),) if mask == "block_sparse" else (),
    )
    if kernel not in {name for name, _ in KERNELS}:
        return UNMEASURED[kernel]
    return refusal(kernel, case.dtype, case.head_dim, one_call(case), direct=kernel in DIRECT)
