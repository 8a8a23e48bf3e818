"""Words in which people say a case, put into the fields of a scenario.

``seq_len: 128k`` and ``batch: 16`` are tokens and context, ``documents: lengths.txt`` is a list, and documents say how
many tokens there are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cpsim.case.lengths import read_lengths
from cpsim.case.model import known_model
from cpsim.errors import ScenarioError, shown
from cpsim.units import TOKENS

LONGEST_PATH: Final = 1000
_TOKENS: Final = ("tokens", "tokens_per_gpu", "context")
"""Fields that count tokens."""
_KERNELS: Final = {
    "torch": "sdpa_flash",
    "flash-attn": "fa2",
    "ring-flash-attn": "fa2",
    "yunchang": "fa2",
    "transformer-engine": "cudnn",
    "magi-attention": "fa3",
}
"""Kernels that code takes where a scenario names whose code it is, and no kernel."""
_OF_FRAMEWORK: Final = {"torch": "sdpa_flash", "torchtitan": "sdpa_flash", "huggingface": "sdpa_flash"}
"""The same of frameworks of steps; Megatron-Core's is that of Transformer Engine."""


def in_fields(said: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """The fields of a scenario that say what these words say.

    Args:
        said: fields of a file, in people's words or ours.
        folder: where files of lengths are looked up.

    Raises:
        ScenarioError: words that contradict each other, or a file of lengths that cannot be read.
    """
    fields = dict(said)
    _count_tokens(fields)
    if isinstance(name := fields.get("documents"), str):
        fields["documents"] = _from_file(name, folder or Path())
    _name_model(fields)
    _sequences(fields)
    _tokens_of_documents(fields)
    if "kernel" not in fields and (kernel := _kernel(fields)):
        fields["kernel"] = kernel
    return fields


def _from_file(name: str, folder: Path) -> list[int]:
    """Lengths in a file.

    Raises:
        ScenarioError: there is no such file, or it cannot be read.
    """
    if len(name) > LONGEST_PATH or not os.path.isfile(folder / name):
        example = "{distribution: prolong512k, seed: 42}"
        raise ScenarioError(
            f"documents: expected a list of lengths, a file of them, or a draw, e.g. {example}; there is no file "
            f"{shown(name)}"
        )
    return list(read_lengths(folder / name))


def tokens_of(value: Any, field: str) -> int:
    """A number of tokens, as it is or with a unit: ``131072``, ``128k``, ``1M``, ``1T``.

    Raises:
        ScenarioError: it is none.
    """
    try:
        found = TOKENS.read(int(value) if isinstance(value, str) and value.strip().isdecimal() else value)
    except ValueError as error:
        raise ScenarioError(f"{field}: {error}") from None
    if found != int(found):
        raise ScenarioError(f"{field}: expected a whole number of tokens, got {shown(value)}")
    return int(found)


def _count_tokens(fields: dict[str, Any]) -> None:
    """Numbers of tokens with units; what is none stays, for the schema to refuse."""
    for name in (*_TOKENS, "seq_len"):
        if name in fields:
            fields[name] = _counted(fields[name])
    documents = fields.get("documents")
    if isinstance(documents, Mapping):
        fields["documents"] = {
            name: _counted(value) if str(name).endswith("_length") else value for name, value in documents.items()
        }
    elif isinstance(documents, list):
        fields["documents"] = [_counted(one) for one in documents]


def _counted(value: Any) -> Any:
    """Tokens of a text such as ``128k``; anything else as it is."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9.]+\s*[a-zA-Z]+", value.strip()):
        return value
    try:
        return tokens_of(value, "")
    except ScenarioError:
        return value


def _name_model(fields: dict[str, Any]) -> None:
    """The name of a model as we write it."""
    if isinstance(name := fields.get("model"), str) and (known := known_model(name)):
        if known.model is None:
            raise ScenarioError(f"model: {known.refusal()}")
        fields["model"] = known.name


def _sequences(fields: dict[str, Any]) -> None:
    """Sequences of one length, ``batch`` of them."""
    length, batch = fields.pop("seq_len", None), fields.pop("batch", None)
    if length is not None and (type(length) is not int or length < 1):
        raise ScenarioError(f"seq_len: expected a number of tokens, e.g. 128k, got {shown(length)}")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ScenarioError(f"batch: expected a number of sequences in a step, got {shown(batch)}")
    if length is not None and fields.get("context", length) != length:
        raise ScenarioError(f"seq_len: expected the same as context, got {length} and {fields['context']}; keep one")
    length = fields.get("context") if length is None else length
    if length is None:
        if batch is not None:
            raise ScenarioError(f"batch: needs the length of a sequence, seq_len; or say tokens instead of {batch}")
        return
    if batch is not None and not {"tokens", "tokens_per_gpu"} & fields.keys():
        fields["tokens"] = batch * length
    elif batch is not None:
        raise ScenarioError("batch: says the tokens of a step, as tokens does; keep one")
    if fields.get("model") is not None and fields.get("part") is None:
        fields["context"] = length
    elif (several := batch or 1) > 1:  # attention alone knows documents only
        fields.setdefault("documents", [length] * several)
        if fields.get("mask", "causal") in ("causal", "full"):
            fields["mask"] = f"{fields.get('mask', 'causal')}_document"
    elif not {"tokens", "tokens_per_gpu", "documents"} & fields.keys():
        fields["tokens"] = length


def _tokens_of_documents(fields: dict[str, Any]) -> None:
    """Tokens are as many as documents have, and padding where these do not divide among GPUs and sequences."""
    documents, gpus = fields.get("documents"), fields.get("gpus")
    if {"tokens", "tokens_per_gpu"} & fields.keys() or not isinstance(documents, list) or type(gpus) is not int:
        return
    if gpus < 1 or not documents or any(type(length) is not int or length < 1 for length in documents):
        return
    places, context = gpus, fields.get("context")
    if type(context) is int and context > 0:
        places = context  # whole sequences
    padding = -sum(documents) % places
    fields["documents"] = [*documents, *([padding] if padding else [])]
    fields["tokens"] = sum(documents) + padding


def _kernel(fields: Mapping[str, Any]) -> str | None:
    """The kernel that the named code takes; None where no code is named."""
    return _KERNELS.get(str(fields.get("implementation")), _OF_FRAMEWORK.get(str(fields.get("framework"))))
