"""Whole layers that tests run: (case in words, documents, strategy, knobs)."""

from collections.abc import Iterable
from typing import Any

from cpsim.case.model import Model

MODEL = Model(layers=1, hidden=24, heads=8, kv_heads=2, head_dim=4, ffn=40, vocab=10)
SKEWED = (42, 4, 4, 8, 16, 22)
EVEN = (48, 8, 8, 16, 8, 8)
LAYERS = (
    ("distca", SKEWED, "distca", {"tolerance": 0.0}),
    ("distca in three", SKEWED, "distca", {"nano_batches": 3, "variant": "released"}),
    ("distca on servers apart", SKEWED, "distca", {"servers": 1}),
    ("distca with barriers", SKEWED, "distca", {"barriers": True}),
    ("wlb", EVEN, "wlb", {"cp": 2}),
    ("wlb of single ranks", EVEN, "wlb", {"cp": 1}),
    ("per_sequence", EVEN, "per_sequence", {}),
)


def there_after(nodes: Iterable[Any], there: Iterable[str]) -> set[str]:
    """Tensors that there are after ops of a layer's program, each of which reads what was there or what those before it
    made."""
    found = set(there)
    for node in nodes:
        assert set(node.reads) <= found, (node, set(node.reads) - found)
        found |= node.makes.keys()
    return found
