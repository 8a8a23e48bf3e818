"""``config.json`` of the Hugging Face hub: the shape of a model.

Reference: transformers 4.57, models/*/configuration_*.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cpsim.case.files import parse_json
from cpsim.case.formats.hybrid import layers_of
from cpsim.case.formats.reading import Reading, Settings, without_none
from cpsim.errors import ScenarioError, shown

GEMMA_3N: Final = (
    "four streams between layers (AltUp)",
    "low-rank residuals (LAuReL)",
    "embeddings of every layer",
    "MLPs of which few elements are active",
    "norms of queries, keys and values",
)
CAUSAL_LM: Final = {
    "llama": (),
    "mistral": (),
    "mixtral": (),
    "qwen2": ("biases of queries, keys and values",),
    "qwen3": ("norms of queries and keys",),
    "qwen3_moe": ("norms of queries and keys",),
    "qwen2_moe": ("biases of queries, keys and values",),
    "gemma3": ("norms of queries and keys", "norms after attention and MLP"),
    "gemma3_text": ("norms of queries and keys", "norms after attention and MLP"),
    "gemma3n": GEMMA_3N,
    "gemma3n_text": GEMMA_3N,
    "hunyuan": ("norms of queries and keys",),
    "gpt_oss": ("biases of attention's linear layers", "attention sinks where no kernel joins them"),
    "phi3": (),
    "olmo2": ("norms of queries and keys",),
    "smollm3": (),
    "granite": (),
    "internlm2": (),
    "seed_oss": (),
    "deepseek_v2": (),
    "deepseek_v3": ("multi-token prediction",),
    "deepseek_v32": ("multi-token prediction",),
    "kimi_k2": (),
    "qwen3_next": ("norms of queries and keys", "gates of attention's output", "multi-token prediction"),
    "nemotron_h": ("layers without rotary positions",),
    "glm4_moe": ("norms of queries and keys", "multi-token prediction"),
    "kimi_linear": ("attention without rotary positions",),
}
"""Types of models whose layers a step can say, each with what it has besides."""
CANNOT: Final = {
    "llama4": "three of four layers attend within chunks",
    "llama4_text": "three of four layers attend within chunks",
    "gemma2": "attention scores are capped, which flash attention kernels were not measured with",
    "mamba2": "no layer attends",
    "jamba": "most layers are state spaces",
    "gpt2": "layers have LayerNorm, biases and a plain MLP",
    "gpt_neox": "layers have LayerNorm, biases and a plain MLP",
    "bert": "it is an encoder",
    "t5": "it has an encoder",
}
"""Types that it cannot, and why."""


def is_config(value: object) -> bool:
    """Whether a JSON value is a model's configuration."""
    return isinstance(value, dict) and ("model_type" in value or "architectures" in value)


def read(text: str, path: str) -> Reading:
    """The model of a ``config.json``.

    Raises:
        ScenarioError: it is no such file, or a step cannot say the model; names the line.
    """
    value = parse_json(text, path)
    if not is_config(value):
        raise ScenarioError(f"{path}: expected a config.json with model_type, got {shown(value)}")
    kind, inner = str(value.get("model_type", "")), value.get("text_config", {})
    if not isinstance(inner, Mapping):
        raise ScenarioError(f"{path}: text_config: expected a mapping, got {shown(inner)}")
    places = _places(text)
    if kind in CANNOT:
        raise ScenarioError(f"{path} {places.get('model_type', '')}: {kind} cannot be predicted: {CANNOT[kind]}")
    if kind not in CAUSAL_LM:
        known = ", ".join(CAUSAL_LM)
        raise ScenarioError(
            f"{path} {places.get('model_type', '')}: model_type: expected one of {known}; got {shown(kind)}. "
            "If its layers are as Llama's, write one of these"
        )
    settings = Settings(path, {**value, **inner}, places)
    caveats = list(CAUSAL_LM[kind])
    if settings.values.get("tie_word_embeddings", kind.startswith(("gemma3", "hunyuan"))):
        caveats.append("tied embeddings")
    return Reading(
        what="config.json of the Hugging Face hub",
        fields={"model": _model(settings, kind)},
        said=tuple(settings.said),
        caveats=tuple(caveats),
    )


def _places(text: str) -> dict[str, str]:
    """The line of every key; of one that comes twice, the last."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for part in line.split(","):
            key = part.strip().lstrip("{[ ")
            if key.startswith('"') and '":' in key.replace('" :', '":'):
                found[key.split('"')[1]] = f"line {number}"
    return found


def _model(s: Settings, kind: str) -> dict[str, Any]:
    """Dimensions in a scenario's words."""
    hidden, heads = s.needed("hidden_size"), s.needed("num_attention_heads")
    latent = _latent(s)
    head_dim = latent.pop("head_dim", None) or s.number("head_dim", "attention_head_dim") or hidden // heads
    if not latent and "head_dim" not in s and hidden % heads:
        raise ScenarioError(f"{s.place('hidden_size')}: hidden_size: expected a multiple of {heads} heads or head_dim")
    experts = s.number("num_local_experts", "num_experts", "n_routed_experts", least=0)
    window, pattern = _windows(s, kind)
    shared = s.number("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", least=0)
    inner = s.number("moe_intermediate_size")
    dense = s.number("first_k_dense_replace", least=0) if experts else None
    model = {
        **latent,
        **_recurrent(s, kind),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": (None if latent else s.number("num_key_value_heads")) or heads,
        "head_dim": head_dim,
        "ffn": _inner(s),
        "vocab": s.needed("vocab_size"),
        "experts": experts or None,
        "top_k": s.needed("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
        if experts
        else None,
        "expert_ffn": inner if experts else None,
        "shared_experts": (
            -(-shared // inner)
            if experts and shared and inner
            else s.number("n_shared_experts", "num_shared_experts", "num_shared_expert")
        ),
        "dense_layers": dense or None,
        "window": window,
        "window_pattern": pattern,
        "kv_shared_layers": _shared_keys(s) or None,
        "sparse": _indexer(s) if kind == "deepseek_v32" else None,
        **dict.fromkeys(("sinks", "clamped", "expert_bias"), True if kind == "gpt_oss" else None),
    }
    return without_none(model)


def _inner(s: Settings) -> int:
    """Inner elements of the MLP; a list names those of every layer.

    Raises:
        ScenarioError: layers differ.
    """
    every = s.values.get("intermediate_size")
    if not isinstance(every, list):
        return s.needed("intermediate_size", "moe_intermediate_size")
    if len({*every}) != 1:
        raise ScenarioError(
            f"{s.place('intermediate_size')}: intermediate_size: expected the same of every layer, got {shown(every)}"
        )
    return Settings(s.path, {"intermediate_size": every[0]}, s.places).needed("intermediate_size")


def _shared_keys(s: Settings) -> int:
    """Layers that attend to keys of an earlier one: the last ones (Gemma 3n), or all but one of so many (Hunyuan)."""
    if s.values.get("use_cla"):
        layers, together = s.needed("num_hidden_layers"), s.number("cla_share_factor") or 1
        return layers - -(-layers // together)
    return s.number("num_kv_shared_layers", least=0) or 0


def _indexer(s: Settings) -> dict[str, Any]:
    """How an indexer chooses keys."""
    return {
        "kind": "dsa",
        "top_k": s.needed("index_topk"),
        "index_heads": s.needed("index_n_heads"),
        "index_dim": s.needed("index_head_dim"),
    }


def _recurrent(s: Settings, kind: str) -> dict[str, Any]:
    """How many layers there are, and what those with a state have.

    Raises:
        ScenarioError: the order of layers is one that a step cannot say.
    """
    layers = s.needed("num_hidden_layers")
    if kind == "qwen3_next":
        state = {
            "kind": "gated_delta",
            "key_heads": s.needed("linear_num_key_heads"),
            "value_heads": s.needed("linear_num_value_heads"),
            "key_dim": s.needed("linear_key_head_dim"),
            "value_dim": s.needed("linear_value_head_dim"),
            "conv": s.number("linear_conv_kernel_dim") or 4,
        }
        types = s.values.get("layer_types")
        attend = types.count("full_attention") if isinstance(types, list) else None
        every = s.number("full_attention_interval") or 4
        return {
            "layers": layers,
            "recurrent": state,
            "attention_layers": layers // every if attend is None else attend,
        }
    if kind == "kimi_linear":
        return {"layers": layers, **_kimi(s)}
    if kind != "nemotron_h":
        return {"layers": layers}
    name = "hybrid_override_pattern"
    counted = layers_of(s, name, str(s.get(name) or ""), layers)
    state = {
        "kind": "mamba2",
        "key_heads": s.needed("n_groups"),
        "value_heads": s.needed("mamba_num_heads"),
        "key_dim": s.needed("ssm_state_size"),
        "value_dim": s.needed("mamba_head_dim"),
        "conv": s.number("conv_kernel") or 4,
    }
    gated = False if "relu2" in str(s.get("mlp_hidden_act") or "relu2") else None
    return {**counted, "recurrent": state, "gated": gated}


def _kimi(s: Settings) -> dict[str, Any]:
    """Layers of Kimi Delta Attention, and how many attend to latents.

    Raises:
        ScenarioError: there are none.
    """
    given = s.get("linear_attn_config")
    sizes = given if isinstance(given, Mapping) else {}
    inner = Settings(s.path, sizes, s.places)
    attends = sizes.get("full_attn_layers")
    if not isinstance(attends, list):
        raise ScenarioError(
            f"{s.place('linear_attn_config')}: linear_attn_config: expected full_attn_layers, num_heads and head_dim, "
            f"got {shown(given)}"
        )
    heads, head_dim = inner.needed("num_heads"), inner.needed("head_dim")
    dims = {"key_heads": heads, "value_heads": heads, "key_dim": head_dim, "value_dim": head_dim}
    conv = inner.number("short_conv_kernel_size") or 4
    return {"recurrent": {"kind": "kda", **dims, "conv": conv}, "attention_layers": len(attends) or None}


def _latent(s: Settings) -> dict[str, Any]:
    """Dimensions of multi-head latent attention; empty where there is none."""
    rank = s.number("kv_lora_rank")
    if not rank:
        return {}
    rope = s.needed("qk_rope_head_dim")
    return {
        "head_dim": s.needed("qk_nope_head_dim") + rope,
        "rope_dim": rope,
        "kv_rank": rank,
        "q_rank": s.number("q_lora_rank"),
        "value_dim": s.needed("v_head_dim"),
    }


def _windows(s: Settings, kind: str) -> tuple[int | None, int | None]:
    """Keys that a query sees in layers with a window, and of how many layers one has none."""
    window = s.number("sliding_window")
    if window is None or s.values.get("use_sliding_window") is False or kind.startswith(("qwen2", "qwen3")):
        return None, None
    layers = s.values.get("layer_types")
    if isinstance(layers, list) and "full_attention" in layers:
        if "sliding_attention" not in layers:
            return None, None
        every = layers.index("full_attention") + 1
        if [(i + 1) % every == 0 for i in range(len(layers))] != [one == "full_attention" for one in layers]:
            raise ScenarioError(
                f"{s.place('layer_types')}: layer_types: expected every n-th layer to see all keys, got another order"
            )
        return window, every
    pattern = s.number("sliding_window_pattern", "_sliding_window_pattern")
    return window, pattern or {"gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}.get(kind)
