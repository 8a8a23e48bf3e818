"""Dimensions of models that published rows name and scenarios do not."""

from __future__ import annotations

from typing import Any, Final

LLAMA2_70B: Final = {
    "layers": 80,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 28672,
    "vocab": 32000,
}
"""meta-llama/Llama-2-70b-hf, config.json."""
LLAMA_405B: Final = {
    "layers": 126,
    "hidden": 16384,
    "heads": 128,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 53248,
    "vocab": 128256,
}
"""meta-llama/Llama-3.1-405B, config.json."""
QWEN_7B: Final = {
    "layers": 28,
    "hidden": 3584,
    "heads": 28,
    "kv_heads": 4,
    "ffn": 18944,
    "vocab": 152064,
}
"""Qwen/Qwen2.5-7B, config.json."""
QWEN_32B: Final = {
    "layers": 64,
    "hidden": 5120,
    "heads": 40,
    "kv_heads": 8,
    "ffn": 27648,
    "vocab": 152064,
}
"""Qwen/Qwen2.5-32B, config.json."""
GPT_OSS_120B: Final = {
    "layers": 36,
    "hidden": 2880,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 2880,
    "vocab": 201088,
    "experts": 128,
    "top_k": 4,
    "window": 128,
    "window_pattern": 2,
    "sinks": True,
    "clamped": True,
    "expert_bias": True,
}
"""openai/gpt-oss-120b, config.json."""
QWEN3_235B: Final = {
    "layers": 94,
    "hidden": 4096,
    "heads": 64,
    "kv_heads": 4,
    "head_dim": 128,
    "ffn": 12288,
    "vocab": 151936,
    "experts": 128,
    "top_k": 8,
    "expert_ffn": 1536,
}
"""Qwen/Qwen3-235B-A22B, config.json; without the norms of queries and keys."""

DEEPSEEK_V3: Final = {
    "layers": 62,
    "hidden": 7168,
    "heads": 128,
    "kv_heads": 128,
    "head_dim": 192,
    "kv_rank": 512,
    "q_rank": 1536,
    "rope_dim": 64,
    "value_dim": 128,
    "ffn": 18432,
    "vocab": 129280,
    "experts": 256,
    "top_k": 8,
    "expert_ffn": 2048,
    "shared_experts": 1,
    "dense_layers": 3,
}
"""deepseek-ai/DeepSeek-V3, config.json, with the layer that predicts a second token as one of them."""


def few(model: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with fewer layers."""
    return {**model, "layers": layers}
