"""Predictions, recommendations and lists as plain mappings, ready for JSON; key names are a contract."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cpsim.errors import CpsimError
from cpsim.prediction.results import Infeasible, Prediction, refusal

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.models.profile import Profile
    from cpsim.prediction.results import Advice, Candidate


def prediction_record(asked: Scenario | CpsimError, result: Prediction | Infeasible | CpsimError) -> dict[str, Any]:
    """One line of ``cpsim predict``: times and sizes in SI units, or ``error`` with the reason; ``kind`` where a case
    cannot run, was not measured, or does not fit."""
    scenario = {} if isinstance(asked, CpsimError) else {"scenario": asked.to_dict()}
    kind = refusal(result)
    marked = {"kind": kind} if kind else {}
    if isinstance(result, Prediction):
        return scenario | {
            "time_s": float(result.time_s),
            "time_s_low": float(result.time_s_low),
            "time_s_high": float(result.time_s_high),
            "tflops_per_gpu": float(result.tflops_per_gpu),
            "exposed_comm_s": float(result.exposed_comm_s),
            "host_share": round(result.host_share, 6),
            "bytes_sent_per_gpu": float(result.bytes_sent_per_gpu),
            "peak_memory_bytes": int(result.peak_memory_bytes),
            "planning_s": float(result.planning_s),
            "parts_s": {name: float(seconds) for name, seconds in result.parts_s.items()},
            **_step_record(result),
            **marked,
            "notes": list(result.notes),
        }
    return scenario | {"error": result.reason if isinstance(result, Infeasible) else str(result)} | marked


def _step_record(result: Prediction) -> dict[str, Any]:
    """What only predictions of training steps have."""
    if result.tokens_per_s_per_gpu is None or result.mfu is None:
        return {}
    return {
        "tokens_per_s_per_gpu": float(result.tokens_per_s_per_gpu),
        "mfu": float(result.mfu),
        "memory": {name: int(nbytes) for name, nbytes in result.memory.items()},
        "memory_low": result.needed_interval[0],
        "memory_high": result.needed_interval[1],
        "gpu_memory_bytes": result.gpu_memory_bytes,
        "fits": result.fits,
        **({} if result.fits else {"would_fit": [asdict(one) for one in result.would_fit]}),
    }


def advice_record(advice: Advice, recommendation: str) -> dict[str, Any]:
    """The whole of ``cpsim advise``, candidates fastest first."""
    from cpsim.report.words import strategy_label

    return {
        "recommendation": recommendation,
        "scenario": advice.scenario.to_dict(),
        "kind": "not_measured" if advice.stands_in else None,
        "recommended": next((i for i, one in enumerate(advice.candidates) if one is advice.recommended), None),
        "tied": len(advice.tied),
        "candidates": [
            _candidate(one) | {"same_schedule_as": [strategy_label(other.scenario) for other in advice.alike(one)]}
            for one in advice.candidates
        ],
        "infeasible": [
            {
                "strategy": entry.scenario.strategy,
                "knobs": dict(entry.scenario.knobs),
                "error": entry.reason,
                "kind": entry.kind,
            }
            for entry in advice.infeasible
        ],
        "notes": list(advice.notes),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": candidate.scenario.strategy,
        "knobs": dict(candidate.scenario.knobs),
        "forward_s": float(candidate.forward.time_s),
        "backward_s": float(candidate.backward.time_s),
        "time_s": float(candidate.total_s),
        "time_s_low": float(candidate.total_s_low),
        "time_s_high": float(candidate.total_s_high),
        "tflops_per_gpu": float(candidate.tflops_per_gpu),
        "exposed_share": float(candidate.exposed_share),
        "peak_memory_bytes": int(candidate.peak_memory_bytes),
        "probability_best": float(candidate.probability_best),
    }


def profile_record(profile: Profile) -> dict[str, Any]:
    """What ``cpsim profiles`` and ``cpsim fit`` tell about a profile; errors are relative, on points not fitted."""
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "grade": profile.grade,
        "kernels": sorted({kernel for kernel, _ in profile.attention}),
        "held_out": [dict(row) for row in profile.held_out],
        "valid": {model: list(bounds) for model, bounds in profile.valid.items()},
    }


def strategy_records() -> list[dict[str, Any]]:
    """What ``cpsim strategies`` lists: the first line of each planner's text, its knobs, and whose code runs it."""
    from cpsim.strategies import STRATEGIES
    from cpsim.strategies.others import RUN_HERE

    return [
        {
            "strategy": name,
            "description": inspect.cleandoc(strategy.plan.__doc__ or "").partition("\n")[0],
            "knobs": [
                parameter.name
                for parameter in inspect.signature(strategy.plan).parameters.values()
                if parameter.kind is parameter.KEYWORD_ONLY
            ],
            "implementations": [code.name for code in RUN_HERE if code.strategies is None or name in code.strategies],
        }
        for name, strategy in STRATEGIES.items()
    ]
