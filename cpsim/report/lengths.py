"""The case of a recommendation at other sequence lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cpsim.case.scenario import MAX_TOKENS, Scenario
from cpsim.prediction.results import Advice, Candidate, Prediction

if TYPE_CHECKING:
    from cpsim.runtime.processes import Progress

FACTORS: Final = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Sequence lengths to predict, as multiples of the case's."""

MIN_TOKENS_PER_GPU: Final = 256


def at_length(scenario: Scenario, factor: float) -> Scenario | None:
    """This case with ``factor`` times the tokens on every GPU, or None where that makes no sense.

    Drawn documents are drawn anew with the same seed; given ones are all scaled.
    """
    tokens = round(scenario.num_tokens // scenario.gpus * factor) * scenario.gpus
    if not MIN_TOKENS_PER_GPU * scenario.gpus <= tokens <= MAX_TOKENS:
        return None
    documents = scenario.documents
    if isinstance(documents, tuple):
        documents = scaled_documents(documents, tokens)
    changes = {"tokens": tokens, "tokens_per_gpu": None, "documents": documents, "pass_": "fwd_bwd"}
    return scenario.model_copy(update=changes)


def scaled_documents(documents: Sequence[int], tokens: int) -> tuple[int, ...] | None:
    """Lengths in proportion that sum to ``tokens``; those that vanish are left out."""
    total, scaled, end, scaled_end = sum(documents), [], 0, 0
    for length in documents:
        end += length
        start, scaled_end = scaled_end, end * tokens // total
        scaled.append(scaled_end - start)
    return tuple(length for length in scaled if length)


def best_of_strategies(advice: Advice) -> list[Candidate]:
    """The candidates with the best knobs of every strategy, fastest first."""
    best: dict[str | None, Candidate] = {}
    for candidate in advice.candidates:
        best.setdefault(candidate.scenario.strategy, candidate)
    return list(best.values())


def predict_lengths(advice: Advice, progress: Progress | None = None) -> list[Prediction]:
    """Predictions of every strategy, with the knobs that are best for the case, at other sequence lengths.

    Lengths at which a strategy cannot run are left out.
    """
    from cpsim.prediction.predict import predict_many

    wanted = [at_length(best.scenario, factor) for best in best_of_strategies(advice) for factor in FACTORS]
    results = predict_many([scenario for scenario in wanted if scenario], progress=progress, timelines=False)
    return [result for result in results if isinstance(result, Prediction)]
