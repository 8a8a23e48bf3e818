"""Logs and traces of real training runs: time of a step, tokens, memory, and what GPUs did.

Reference: torchtitan 0.2.0, components/metrics.py; Megatron-LM core_v0.16, training/training.py (training_log); NeMo
2 and Lightning's progress lines; transformers 4.57, trainer_state.json; torch.profiler's Chrome traces.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from cpsim.case.files import MAX_BYTES
from cpsim.errors import ScenarioError, shown

WARM_UP: Final = 0.1
"""Share of the steps, and at least ``FIRST`` where there are many, that do not count."""
FIRST: Final = 3
GIB, MIB = 2**30, 2**20
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER: Final = r"([0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)"
_TITAN: Final = re.compile(rf"step:\s*(\d+)\s.*?memory:\s*{_NUMBER}GiB.*?(?:tps|wps):\s*{_NUMBER}")
_MEGATRON: Final = re.compile(rf"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*{_NUMBER}")
_MEGATRON_MEMORY: Final = re.compile(rf"max allocated:\s*{_NUMBER}")
_NEMO: Final = re.compile(rf"train_step_timing in s['\"]?\s*[=:]\s*{_NUMBER}")
_PER_STEP: Final = re.compile(rf"\|\s*(\d+)/(\d+) \[[^\]]*?{_NUMBER}\s*(it/s|s/it)")
_TRAINER: Final = re.compile(r"\{['\"](?:loss|train_runtime)['\"].*\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a log or a trace says of steps."""

    what: str
    """Whose it is."""
    step_s: tuple[float, ...] = ()
    """Seconds of every step that counts."""
    tokens_per_s_per_gpu: tuple[float, ...] = ()
    """Of every step that counts, where the log says that instead."""
    memory_bytes: int = 0
    """Most on a GPU; 0 where it is not said."""
    memory_kind: str = ""
    """``allocated`` or ``reserved``, by PyTorch."""
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """Of a trace: seconds of a step by what a GPU does, exposed communication and idle time among them."""

    def seconds(self, tokens_per_gpu: float) -> float:
        """Median seconds of a step with so many tokens on each GPU."""
        times = self.step_s or [tokens_per_gpu / rate for rate in self.tokens_per_s_per_gpu]
        return float(median(times))


def read_observed(path: Path) -> Observed | None:
    """What a file of a real run says; None where it is another file.

    Raises:
        ScenarioError: it is a log or trace without steps.
    """
    if path.suffix in (".gz", ".json") and ".json" in path.suffixes:
        return _of_json(path)
    if path.suffix not in (".log", ".txt", ".out", ".err", ".csv", ""):
        return None
    text = _COLOUR.sub("", _text(path))
    for read in (_titan, _megatron, _nemo, _trainer, _progress):
        if found := read(text):
            return found
    if path.suffix in (".log", ".out", ".err"):
        raise ScenarioError(
            f"{path}: expected lines of steps of torchtitan, Megatron-LM, NeMo, Lightning or Trainer, found none"
        )
    return None


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ScenarioError(f"{path}: expected at most {MAX_BYTES // 10**6} MB; cut it")
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", errors="replace")
    except (OSError, EOFError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _warm(values: Sequence[float]) -> tuple[float, ...]:
    """Without the first steps, which compile, allocate and fill caches."""
    left_out = min(len(values) - 1, max(FIRST if len(values) > 2 * FIRST else 1, int(WARM_UP * len(values))))
    return tuple(values[max(0, left_out) :])


def _titan(text: str) -> Observed | None:
    rows = _TITAN.findall(text)
    if not rows:
        return None
    rates = [_number(rate) for _, _, rate in rows]
    most = max(_number(memory) for _, memory, _ in rows)
    return Observed(
        what="torchtitan's log",
        tokens_per_s_per_gpu=_warm(rates),
        memory_bytes=int(most * GIB),
        memory_kind="reserved",
    )


def _megatron(text: str) -> Observed | None:
    times = [_number(ms) / 1e3 for _, ms in _MEGATRON.findall(text)]
    if not times:
        return None
    memory = max((_number(one) for one in _MEGATRON_MEMORY.findall(text)), default=0.0)
    return Observed(
        what="Megatron-LM's log", step_s=_warm(times), memory_bytes=int(memory * MIB), memory_kind="allocated"
    )


def _nemo(text: str) -> Observed | None:
    times = [_number(seconds) for seconds in _NEMO.findall(text)]
    return Observed(what="NeMo's log", step_s=_warm(times)) if times else None


def _trainer(text: str) -> Observed | None:
    """Lines of Trainer: how long all steps took, and how many there were."""
    rates = []
    for line in _TRAINER.findall(text):
        try:
            record = ast.literal_eval(line)
        except (ValueError, SyntaxError):
            continue
        if isinstance(record, dict) and (rate := record.get("train_steps_per_second")):
            rates.append(1 / float(rate))
    return Observed(what="Trainer's log", step_s=tuple(rates)) if rates else None


def _progress(text: str) -> Observed | None:
    """Progress lines of Lightning and tqdm: the mean pace so far, of which the last tells most."""
    rows = _PER_STEP.findall(text.replace("\r", "\n"))
    if not rows:
        return None
    done, _, pace, unit = rows[-1]
    seconds = _number(pace) if unit == "s/it" else 1 / _number(pace)
    return Observed(what=f"a progress line of {done} steps", step_s=(seconds,))


def _of_json(path: Path) -> Observed | None:
    """A trace of torch.profiler, or the state of Trainer."""
    try:
        value = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError):
        if path.suffix == ".gz":
            raise ScenarioError(f"{path}: expected a trace of torch.profiler, got no JSON") from None
        return None
    if isinstance(value, dict) and "traceEvents" in value:
        return of_trace(value["traceEvents"], str(path))
    if isinstance(value, dict) and isinstance(value.get("log_history"), list):
        rates = [one["train_steps_per_second"] for one in value["log_history"] if "train_steps_per_second" in one]
        if not rates:
            raise ScenarioError(
                f"{path}: expected train_steps_per_second in log_history, which Trainer writes at the end"
            )
        return Observed(what="Trainer's state", step_s=tuple(1 / rate for rate in rates))
    return None


KINDS: Final = {
    "communication": re.compile(r"nccl|all_?gather|reduce_?scatter|all_?reduce|sendrecv|all_?to_?all", re.I),
    "attention": re.compile(r"flash|fmha|attention|attn|cudnn.*sdpa|flex", re.I),
    "matrix products": re.compile(r"gemm|cutlass|nvjet|xmma|cublas|matmul|_mm_|sgemm|hmma|wgmma", re.I),
}
"""Kernels by their names; the rest are memory-bound."""
REST: Final = "memory-bound ops"
EXPOSED: Final = "exposed communication"
IDLE: Final = "idle"


def of_trace(events: Any, path: str) -> Observed:
    """What a GPU does in the steps of a trace.

    Args:
        events: ``traceEvents``; kernels have category ``kernel``, steps are called ``ProfilerStep#...``.
        path: of the trace, for messages.

    Raises:
        ScenarioError: there are no kernels.
    """
    if not isinstance(events, list):
        raise ScenarioError(f"{path}: traceEvents: expected a list, got {shown(events)}")
    whole = [one for one in events if isinstance(one, dict) and one.get("ph") == "X" and "dur" in one and "ts" in one]
    kernels = [one for one in whole if one.get("cat") in ("kernel", "Kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        raise ScenarioError(f"{path}: expected kernels of a GPU in the trace, found none; profile CUDA activities, too")
    marks = sorted(
        {(float(one["ts"]), float(one["dur"])) for one in whole if str(one.get("name", "")).startswith("ProfilerStep#")}
    )
    spans = _spans(kernels)
    begin, end = min(a for a, _, _ in spans), max(b for _, b, _ in spans)
    if len(marks) > 1:  # hosts run ahead: kernels of a step lie between the ends of what they launched
        count, begin = len(marks), min(begin, marks[0][0])
    else:
        count = max(1, len(marks))
    busy: dict[str, float] = {}
    for kind in dict.fromkeys(kind for _, _, kind in spans):
        busy[kind] = covered([(a, b) for a, b, of in spans if of == kind])
    computing = covered([(a, b) for a, b, of in spans if of != "communication"])
    anything = covered([(a, b) for a, b, _ in spans])
    found = {name: seconds for name, seconds in busy.items() if name != "communication"}
    found[EXPOSED], found[IDLE] = anything - computing, end - begin - anything
    return Observed(
        what="a trace of torch.profiler",
        step_s=((end - begin) * 1e-6 / count,),
        busy_s={name: 1e-6 * seconds / count for name, seconds in found.items()},
    )


def _spans(kernels: Iterable[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """Begin, end and kind of every kernel [us]."""
    found = []
    for one in kernels:
        name = str(one.get("name", ""))
        kind = next((kind for kind, words in KINDS.items() if words.search(name)), REST)
        found.append((float(one["ts"]), float(one["ts"]) + float(one["dur"]), kind))
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
