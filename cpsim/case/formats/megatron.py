"""Megatron-LM's arguments: of a shell script, a list, or YAML of Megatron-Bridge and NeMo, which have the same names.

Reference: Megatron-LM core_v0.13, megatron/training/arguments.py; Megatron-Bridge 0.2, ConfigContainer; NeMo 1,
megatron_gpt_config.yaml.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from cpsim.case.files import parse_yaml
from cpsim.case.formats.hybrid import layers_of
from cpsim.case.formats.reading import Reading, Settings, without_none
from cpsim.case.model import known_model
from cpsim.case.parallel import Parallel
from cpsim.case.resolve import model_of
from cpsim.case.scenario import Scenario
from cpsim.errors import ScenarioError, shown

SHAPE: Final = ("num_layers", "hidden_size", "num_attention_heads")
COMM: Final = {"p2p": "zigzag_ring", "all_gather": "allgather", "a2a": "ulysses", "a2a+p2p": "usp"}
"""Strategies by ``cp_comm_type``."""
KNOBS: Final[Mapping[str, Mapping[str, object]]] = {
    "allgather": {"layout": "zigzag"},
    "usp": {"placement": "head_first"},
}
CANNOT: Final = {
    "encoder_num_layers": "encoders are not predicted; leave it out",
    "mtp_num_layers": "layers that predict several tokens are not predicted; leave it out",
    "heterogeneous_layers_config_path": "layers that differ are not predicted",
    "hybrid_attention_ratio": "the order of layers is not read of ratios; use --hybrid-override-pattern",
    "hybrid_mlp_ratio": "the order of layers is not read of ratios; use --hybrid-override-pattern",
    "use_custom_fsdp": "Megatron-FSDP is not predicted; use --use-distributed-optimizer",
    "use_megatron_fsdp": "Megatron-FSDP is not predicted; use --use-distributed-optimizer",
    "use_torch_fsdp2": "FSDP2 in Megatron is not predicted; use --use-distributed-optimizer, or framework torchtitan",
    "attention_chunk_size": "attention within chunks is not predicted",
    "no_rope_freq": "Llama 4's attention within chunks is not predicted",
}
"""Arguments of what a step does not say."""
HYBRID: Final = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names of the pattern of a hybrid model, the newer one first."""
SPECS: Final = re.compile(r"\b(mamba|hybrid)_stack_spec\b")
"""Specs of hybrid models, which the pattern says."""
MAYBE: Final = "(within a condition)"
"""What stands in a branch of a script, which may not run."""
VOCAB: Final = 128256
"""Words where nothing is said of them, since a tokenizer has them: Llama 3's."""
WIDTH: Final = 56
"""Cells of a line of arguments that are written."""
_ALIASES: Final = {
    "encoder_seq_length": "seq_length",
    "sequence_length": "seq_length",
    "nproc_per_node": "gpus_per_node",
    "nproc_per_node_": "gpus_per_node",
    "devices": "gpus_per_node",
    "nnodes": "num_nodes",
    "num_moe_experts": "num_experts",
    "activations_checkpoint_granularity": "recompute_granularity",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "moe_router_top_k": "moe_router_topk",
    "make_vocab_size_divisible_by": "",
}
"""Names of the same in Bridge, NeMo and torchrun."""


def is_arguments(text: str) -> bool:
    """Whether a text has arguments of Megatron."""
    return bool(re.search(r"--(num-layers|tensor-model-parallel-size|context-parallel-size|hidden-size)\b", text))


def is_recipe(value: object) -> bool:
    """Whether a YAML value is a recipe of Megatron-Bridge or NeMo."""
    if not isinstance(value, Mapping):
        return False
    flat = {name: 0 for part in (value, *value.values()) if isinstance(part, Mapping) for name in part}
    return "tensor_model_parallel_size" in flat or "context_parallel_size" in flat or set(SHAPE) <= flat.keys()


def read(text: str, path: str) -> Reading:
    """A scenario's fields of arguments or of the script that holds them.

    Raises:
        ScenarioError: they are wrong, or ask for what a step cannot say; names the line.
    """
    values, places = _arguments(text)
    return _read(Settings(path, values, places), "arguments of Megatron-LM", dashes=True)


def read_recipe(text: str, path: str) -> Reading:
    """The same of a YAML recipe of Megatron-Bridge or NeMo."""
    flat = _leaves(parse_yaml(text, path))
    places: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        places.setdefault(line.split(":")[0].strip(" -"), f"line {number}")
    values = {_ALIASES.get(name, name): value for name, value in flat.items()}
    places = {_ALIASES.get(name, name): place for name, place in places.items()}
    return _read(Settings(path, values, places), "recipe of Megatron-Bridge or NeMo", dashes=False)


def _leaves(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings by their last names; the first of those that are there twice."""
    found: dict[str, Any] = {}
    for name, entry in value.items():
        for inner, one in (_leaves(entry) if isinstance(entry, Mapping) else {str(name): entry}).items():
            if one is not None and not isinstance(one, str | int | float | bool | list):
                continue
            found.setdefault(inner, one)
    return found


def _read(s: Settings, what: str, *, dashes: bool) -> Reading:
    for name, why in CANNOT.items():
        s.refuse([name], why)
    if not SPECS.search(str(s.values.get("spec", ""))):
        s.refuse(["spec"], "layers of a spec of one's own are not read; leave it out")
    if not any(name in s for name in HYBRID):
        s.refuse(["is_hybrid_model"], "expected --hybrid-override-pattern, which says the order of layers")
    parallel = _parallel(s)
    strategy, knobs = _strategy(s, parallel["cp"] or 1)
    nodes, each = s.number("num_nodes"), s.number("gpus_per_node", least=-1)
    gpus = s.number("world_size") or (nodes * each if nodes and each and each > 0 else None)
    fields = without_none(
        {
            "framework": "megatron",
            "model": _model(s),
            "gpus": gpus,
            "context": s.number("seq_length"),
            "sequences": s.number("global_batch_size"),
            "kernel": s.one_of("attention_backend", {"flash": "fa2", "fused": "cudnn", "auto": None, "unfused": None})
            or ("fa2" if s.flag("use_flash_attn") else None),
            "precision": _precision(s),
            "strategy": strategy,
            "knobs": knobs or None,
            "offload": "activations" if s.flag("cpu_offloading") else None,
        }
    )
    fields["parallel"] = without_none(parallel | _recompute(s) | _layers(s))
    said = tuple(f"--{one.replace('_', '-', one.split(' ')[0].count('_'))}" if dashes else one for one in s.said)
    return Reading(what=what, fields=fields, said=said, caveats=_caveats(s))


def _caveats(s: Settings) -> tuple[str, ...]:
    caveats = []
    tied = "untie_embeddings_and_output_weights" not in s and s.values.get("share_embeddings_and_output_weights", True)
    if tied and "num_layers" in s:
        caveats.append("tied embeddings")
    if "num_layers" in s and not ("vocab_size" in s or "padded_vocab_size" in s):
        caveats.append(f"no vocab_size, so that {VOCAB:,} words are taken")
    if maybe := [one for one in s.values.get(MAYBE, []) if any(said.split(" ")[0] == one for said in s.said)]:
        caveats.append(f"{', '.join(maybe)} in a branch that is taken to run")
    if (s.number("mlp_chunks_for_training") or 1) > 1:
        caveats.append("an MLP in chunks, whose activations are all kept, so that it needs no less memory")
    if s.flag("qk_layernorm"):
        caveats.append("norms of queries and keys")
    gates = ("swiglu", "gated_linear_unit", "quick_geglu", "activation_func", "activation")
    if s.get("position_embedding_type") == "none":
        caveats.append("attention without rotary positions")
    squared = s.flag("squared_relu") or any(name in s for name in HYBRID)
    if "num_layers" in s and not squared and s.get(*gates) in (None, False):
        caveats.append("an MLP without a gate, of which a step knows none")
    return tuple(caveats)


def _model(s: Settings) -> dict[str, Any] | str | None:
    """Dimensions; or the name of a published model; None where the file says neither."""
    if "num_layers" not in s and not any(one in s for one in HYBRID):
        name = s.get("pretrained_model_name_or_path", "hf_model_id", "hf_path", "pretrained_checkpoint")
        known = known_model(str(name)) if name else None
        if known is not None and known.model is None:
            raise ScenarioError(f"{s.path}: {known.refusal()}")
        return known.name if known else None
    hidden, heads = s.needed("hidden_size"), s.needed("num_attention_heads")
    grouped = "group_query_attention" not in s.values or s.flag("group_query_attention")
    latent = _latent(s) if "multi_latent_attention" in s and s.flag("multi_latent_attention") else {}
    hybrid = _hybrid(s, hidden)
    experts = s.number("num_experts", least=0) if hybrid.pop("has_experts", True) else None
    inner = s.number("moe_ffn_hidden_size")
    shared = s.number("moe_shared_expert_intermediate_size", least=0)
    window, pattern = s.get("window_size"), s.get("window_attn_skip_freq")
    model = {
        **(hybrid or {"layers": s.needed("num_layers")}),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": (s.number("num_query_groups") if grouped and not latent else None) or heads,
        "head_dim": s.number("kv_channels") or hidden // heads,
        **latent,
        "ffn": s.number("ffn_hidden_size") or 4 * hidden,
        "vocab": s.number("vocab_size", "padded_vocab_size") or VOCAB,
        "experts": experts or None,
        "top_k": (s.number("moe_router_topk") or 2) if experts else None,
        "expert_ffn": inner if experts else None,
        "shared_experts": -(-shared // (inner or 1)) if experts and shared and inner else None,
        "dense_layers": _dense(s) if experts else None,
        "window": _window(window, s) if window else None,
        "window_pattern": s.number("window_attn_skip_freq") if window and pattern else None,
        "sparse": _sparse(s),
        "gated": False if s.flag("squared_relu") else None,
    }
    return without_none(model)


def _hybrid(s: Settings, hidden: int) -> dict[str, Any]:
    """Layers of a hybrid model, and what those with a state have; defaults are those of Megatron-Core's MambaMixer.
    Empty where the model is none.

    Raises:
        ScenarioError: the order of layers is one that a step cannot say.
    """
    name = next((one for one in HYBRID if one in s), None)
    if name is None:
        return {}
    pattern = re.sub(r"[\s|]", "", str(s.get(name)))
    if "/" in pattern:
        raise ScenarioError(f"{s.place(name)}: {name}: layers that predict several tokens are not predicted; end at /")
    counted = layers_of(s, name, pattern, s.number("num_layers"))
    if {"-", "E"} <= {*pattern}:
        raise ScenarioError(f"{s.place(name)}: {name}: expected - or E, got both: layers with either are not predicted")
    head_dim = s.number("mamba_head_dim") or 64
    state = {
        "kind": "mamba2",
        "key_heads": s.number("mamba_num_groups") or 8,
        "value_heads": s.number("mamba_num_heads") or 2 * hidden // head_dim,
        "key_dim": s.number("mamba_state_dim") or 128,
        "value_dim": head_dim,
    }
    if "E" in pattern:
        s.needed("num_experts")
    return {**counted, "recurrent": state, "has_experts": "E" in pattern}


def _segments(s: Settings, stages: int) -> dict[str, Any]:
    """Layers of every virtual stage of a pattern with bars between them; empty where there are none.

    Raises:
        ScenarioError: a stage begins with the MLP of the one before.
    """
    name = next((one for one in HYBRID if one in s), "")
    parts = re.sub(r"\s", "", str(s.values.get(name, ""))).split("|")
    if len(parts) == 1:
        return {}
    if any(part[:1] in ("-", "E") for part in parts):
        raise ScenarioError(f"{s.place(name)}: {name}: expected stages that begin with M or *, got {shown(parts)}")
    layout = [len(re.findall(r"[M*]", part)) for part in parts]
    return {"layout": layout, "virtual_pp": len(layout) // stages if len(layout) > stages else None}


def _sparse(s: Settings) -> dict[str, Any] | None:
    """How an indexer chooses keys; None where there is none.

    Raises:
        ScenarioError: attention of another variant.
    """
    variant = s.get("experimental_attention_variant")
    if variant is None:
        return None
    if variant != "dsa":
        place = s.place("experimental_attention_variant")
        raise ScenarioError(f"{place}: experimental_attention_variant: expected dsa, got {shown(variant)}")
    sizes = {"top_k": "topk", "index_heads": "n_heads", "index_dim": "head_dim"}
    return {"kind": "dsa", **{name: s.needed(f"dsa_indexer_{size}") for name, size in sizes.items()}}


def _latent(s: Settings) -> dict[str, Any]:
    """Dimensions of multi-head latent attention; defaults are those of MLATransformerConfig."""
    rope = s.number("qk_pos_emb_head_dim") or 64
    return {
        "head_dim": (s.number("qk_head_dim") or 128) + rope,
        "rope_dim": rope,
        "kv_rank": s.number("kv_lora_rank") or 512,
        "q_rank": s.number("q_lora_rank"),
        "value_dim": s.number("v_head_dim") or 128,
    }


def _dense(s: Settings) -> int | None:
    """Layers before those with experts, of a pattern such as ``([0]*3+[1]*58)``."""
    said = re.sub(r"[\s()'\"]", "", str(s.get("moe_layer_freq") or 1))
    if said in ("1", "[1]"):
        return None
    found = re.fullmatch(r"\[0\](?:\*(\d+))?\+\[1\](?:\*\d+)?", said)
    if not found:
        raise ScenarioError(
            f"{s.place('moe_layer_freq')}: moe_layer_freq: expected dense layers before those with experts, as "
            f"[0]*3+[1]*58, got {shown(said)}"
        )
    return int(found[1] or 1)


def _layout(said: str, place: str) -> list[int]:
    """Layers of every virtual stage of a layout such as ``Et*4|(t*4|)*14tL``: embedding, decoder layers, loss."""
    stages = re.sub(r"[\s'\"]", "", said)
    for pattern in (re.compile(r"([EtmL|])\*(\d{1,3})"), re.compile(r"\(([EtmL|]*)\)\*(\d{1,3})")):
        stages = pattern.sub(lambda found: found[1] * int(found[2]), stages)[:100_000]
    if "m" in stages:
        raise ScenarioError(f"{place}: layers that predict several tokens are not predicted; leave m out")
    if not re.fullmatch(r"E?[t|]*L?", stages) or "t" not in stages:
        raise ScenarioError(
            f"{place}: pipeline_model_parallel_layout: expected E, t and L between bars, as Et*4|(t*4|)*14tL, got "
            f"{shown(said)}"
        )
    return [stage.count("t") for stage in stages.split("|")]


def _window(value: Any, s: Settings) -> int:
    """Keys that a query sees: ``4095,0`` and ``[4095, 0]`` are 4,095 before it and itself."""
    numbers = re.findall(r"-?\d+", str(value))
    if len(numbers) != 2 or int(numbers[0]) < 0:
        raise ScenarioError(f"{s.place('window_size')}: window_size: expected two numbers, got {shown(value)}")
    return int(numbers[0]) + 1


def _parallel(s: Settings) -> dict[str, Any]:
    ep = s.number("expert_model_parallel_size")
    sharded = s.flag("use_distributed_optimizer") if "use_distributed_optimizer" in s else None
    return {
        "tp": s.number("tensor_model_parallel_size") or 1,
        "pp": s.number("pipeline_model_parallel_size") or 1,
        "cp": s.number("context_parallel_size") or 1,
        "ep": ep if ep and ep > 1 else None,
        "batch": s.number("micro_batch_size"),
        "sharding": None if sharded is None else "zero1" if sharded else "none",
        "tp_overlap": s.flag("tp_comm_overlap") or None,
        "ep_overlap": s.flag("overlap_moe_expert_parallel_comm") or None,
        "dispatcher": "flex" if s.get("moe_token_dispatcher_type") == "flex" else None,
        "cuda_graphs": _graphs(s),
        "loss_fusion": _loss(s),
        "gradients": "exposed" if s.values.get("overlap_grad_reduce") in (False, "false", "False") else None,
    }


def _graphs(s: Settings) -> str | None:
    """What is launched as CUDA graphs: Transformer Engine's may be parts of a layer."""
    scope = re.findall(r"\w+", str(s.get("cuda_graph_scope") or "full"))
    if s.get("cuda_graph_impl") in ("local", "transformer_engine") or s.flag("enable_cuda_graph"):
        return "layers" if {"full", "full_iteration"} & {*scope} else "attention" if "attn" in scope else None
    return None


def _loss(s: Settings) -> str | None:
    """Kernels of the cross entropy."""
    if not s.flag("cross_entropy_loss_fusion"):
        return "none"
    return "te" if s.get("cross_entropy_fusion_impl") == "te" else None


def _layers(s: Settings) -> dict[str, Any]:
    """How stages share the layers."""
    stages, chunk = s.number("pipeline_model_parallel_size") or 1, s.number("num_layers_per_virtual_pipeline_stage")
    chunks = s.number("num_virtual_stages_per_pipeline_rank")
    if chunk:
        layers = s.needed("num_layers")
        if layers % (stages * chunk):
            place = s.place("num_layers_per_virtual_pipeline_stage")
            raise ScenarioError(f"{place}: expected {stages} stages of chunks of {chunk} to divide {layers} layers")
        chunks = layers // (stages * chunk)
    if segments := _segments(s, stages):
        return segments
    if said := s.get("pipeline_model_parallel_layout"):
        layout = _layout(str(said), s.place("pipeline_model_parallel_layout"))
        return {"layout": layout, "virtual_pp": len(layout) // stages if len(layout) > stages else None}
    return {
        "virtual_pp": chunks if chunks and chunks > 1 else None,
        "layers_first": s.number("decoder_first_pipeline_num_layers"),
        "layers_last": s.number("decoder_last_pipeline_num_layers"),
        "embedding_as_layer": s.flag("account_for_embedding_in_pipeline_split") or None,
        "loss_as_layer": s.flag("account_for_loss_in_pipeline_split") or None,
    }


def _strategy(s: Settings, cp: int) -> tuple[str | None, dict[str, object]]:
    kind = s.get("cp_comm_type")
    if isinstance(kind, list) and len(set(kind)) == 1:
        kind = kind[0]
    if cp == 1:
        return None, {}
    if kind is not None and str(kind) not in COMM:
        place = s.place("cp_comm_type")
        raise ScenarioError(f"{place}: cp_comm_type: expected {', '.join(COMM)}, got {shown(kind)}")
    strategy = COMM[str(kind or "p2p")]
    knobs = dict(KNOBS.get(strategy, {}))
    if strategy == "usp":
        sizes = s.get("hierarchical_context_parallel_sizes")
        numbers = [int(n) for n in re.findall(r"\d+", str(sizes or ""))]
        if len(numbers) != 2 or numbers[0] * numbers[1] != cp:
            place = s.place("hierarchical_context_parallel_sizes")
            raise ScenarioError(
                f"{place}: hierarchical_context_parallel_sizes: expected sizes of a2a and of p2p whose product is "
                f"{cp}, got {shown(sizes)}"
            )
        knobs["ulysses"] = numbers[0]
    return strategy, knobs


def _recompute(s: Settings) -> dict[str, Any]:
    granularity = s.get("recompute_granularity")
    if granularity is None and s.flag("recompute_activations"):
        granularity = "selective"
    if granularity in (None, "none", "null"):
        return {"recompute": "none"}
    if granularity == "full":
        method, some = s.get("recompute_method"), s.number("recompute_num_layers")
        if method == "block" and some:
            place = s.place("recompute_num_layers")
            raise ScenarioError(
                f"{place}: recomputation of {some} layers only is not predicted; use recompute_method uniform, or none"
            )
        return {"recompute": "full"}
    if granularity != "selective":
        place = s.place("recompute_granularity")
        raise ScenarioError(f"{place}: recompute_granularity: expected full or selective, got {shown(granularity)}")
    modules = s.get("recompute_modules")
    wanted = set(re.findall(r"\w+", str(modules or "core_attn")))
    if wanted <= {"core_attn"}:
        return {"recompute": "none"}  # flash attention has nothing to recompute there
    if wanted <= {"core_attn", "mlp"}:
        return {"recompute": "mlp"}
    place = s.place("recompute_modules")
    raise ScenarioError(f"{place}: recompute_modules: expected core_attn and mlp, got {shown(modules)}")


def _precision(s: Settings) -> Any:
    if s.flag("fp16"):
        raise ScenarioError(f"{s.place('fp16')}: fp16: steps were measured in bf16; use --bf16")
    if s.get("fp8_format", "fp8") in (None, False, "null"):
        return None
    recipe = str(s.get("fp8_recipe") or "delayed")
    known = {"delayed": "delayed", "tensorwise": "current", "mxfp8": "mxfp8"}
    if recipe not in known:
        place = s.place("fp8_recipe")
        raise ScenarioError(f"{place}: fp8_recipe: expected {', '.join(known)}, got {shown(recipe)}")
    return {"fp8": known[recipe]}


_WORD: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?(?:\[[@*]\])?\}|\$(\w+)")
_ARRAY: Final = re.compile(r"^[A-Za-z_]\w*\+?=\(")
_IF, _FI = re.compile(r"if\b"), re.compile(r"fi\b")
_ASSIGNED: Final = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$")


def _arguments(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments by name with underscores, and their lines; variables of a shell are put in."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    variables: dict[str, str] = {}
    name: str | None = None
    goes_on, depth = False, 0
    for number, line in enumerate(text.splitlines(), start=1):
        if name is not None and (values[name] is not True or not goes_on):
            name = None  # values stand beside their argument, or alone in the line after it
        goes_on = line.rstrip().endswith("\\")
        bare = _ARRAY.sub("", line.strip().rstrip("\\").strip())
        depth += bool(_IF.match(bare)) - bool(_FI.match(bare))
        if (found := _ASSIGNED.match(bare)) and not found[2].startswith("("):
            variables[found[1]] = _expanded(_unquoted(found[2]), variables)
            if "--" not in found[2]:
                continue
            bare = variables[found[1]]
        for word in _words(bare):
            word = _expanded(word, variables).strip("()") if "$" in word or word[:1] in "()" else word.rstrip(")")
            for part in word.split() if " " in word else [word]:
                name = _take(part, name, values, places, number)
                if name is not None and depth > 0:
                    values[MAYBE] = [*dict.fromkeys([*values.get(MAYBE, []), name])]
    return {_ALIASES.get(key, key): value for key, value in values.items()}, {
        _ALIASES.get(key, key): place for key, place in places.items()
    }


def _take(word: str, name: str | None, values: dict[str, Any], places: dict[str, str], number: int) -> str | None:
    """One word: the name of an argument, or a value of the last one, which is given back."""
    if word.startswith("--") and len(word) > 2:
        key, equals, value = word[2:].replace("-", "_", word[2:].split("=")[0].count("-")).partition("=")
        values[key], places[key] = (value if equals else True), f"line {number}"
        return None if equals else key
    if name is None or word.endswith(".py") or (word.startswith("-") and not re.fullmatch(r"-\d+", word)):
        return None
    values[name] = word if values[name] is True else f"{values[name]} {word}"
    return name


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation goes on in the next line
        return [word.strip("\"'") for word in line.split("#")[0].split()]


def _unquoted(value: str) -> str:
    value = value.split(" #")[0].strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value.strip("\"'")


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """With variables and sums of a shell put in; what is not known stays."""

    def known(found: re.Match[str]) -> str:
        value = variables.get(found[1] or found[3])
        if value is None:
            positional = re.fullmatch(r"\d+", found[1] or found[3] or "")
            value = found[2].strip("\"'") if found[2] is not None else "" if positional else found[0]
        return value

    text = _WORD.sub(known, text)
    return re.sub(r"\$\(\((.*?)\)\)", lambda found: _calculated(found[1], found[0]), text)


_OPERATORS: Final[Mapping[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def _calculated(text: str, instead: str) -> str:
    """A sum or product of whole numbers; the text itself where it is another thing."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return str(value(ast.parse(text[:200].strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return instead


def write(scenario: Scenario, parallel: Parallel) -> str:
    """Arguments that launch what was found, some of a kind a line."""
    layers = model_of(scenario).layers
    each = scenario.num_sequences // (parallel.dp * parallel.microbatches) if scenario.context else 1
    length = scenario.context or scenario.num_tokens // (parallel.dp * parallel.microbatches * (parallel.batch or 1))
    lines = [[f"--tensor-model-parallel-size {parallel.tp}", *(["--sequence-parallel"] if parallel.tp > 1 else [])]]
    lines.append([f"--pipeline-model-parallel-size {parallel.pp}"])
    if parallel.layout:
        stages = "|".join(f"t*{n}" if n else "" for n in parallel.layout)
        lines[-1].append(f'--pipeline-model-parallel-layout "E{stages}L"')
    elif parallel.virtual_pp > 1:
        lines[-1].append(f"--num-virtual-stages-per-pipeline-rank {parallel.virtual_pp}")
    for name, number in (("first", parallel.layers_first), ("last", parallel.layers_last)):
        if number:
            lines[-1].append(f"--decoder-{name}-pipeline-num-layers {number}")
    for part in ("embedding", "loss"):
        if getattr(parallel, f"{part}_as_layer"):
            lines[-1].append(f"--account-for-{part}-in-pipeline-split")
    lines.append([f"--context-parallel-size {parallel.cp}", *_comm(scenario, parallel.cp)])
    if parallel.ep > 1:
        lines.append([f"--expert-model-parallel-size {parallel.ep}"])
    batch = max(1, scenario.num_sequences) if scenario.context else parallel.dp * parallel.microbatches
    lines.append([f"--micro-batch-size {parallel.batch or max(1, each)}", f"--global-batch-size {batch}"])
    lines.append([f"--seq-length {length}"])
    lines.append(["--use-distributed-optimizer"] if parallel.sharding == "zero1" else [])
    lines[-1] += ["--overlap-grad-reduce"] if parallel.gradients == "overlapped" else []
    lines[-1] += (
        ["--overlap-param-gather"] if parallel.sharding == "zero1" and parallel.gradients == "overlapped" else []
    )
    lines.append(_again(parallel.recompute))
    lines[-1] += ["--tp-comm-overlap"] if parallel.tp_overlap else []
    lines[-1] += ["--overlap-moe-expert-parallel-comm"] if parallel.ep_overlap else []
    lines[-1] += ["--moe-token-dispatcher-type flex"] if parallel.dispatcher == "flex" else []
    lines[-1] += GRAPHS[parallel.cuda_graphs]
    lines[-1] += LOSSES[parallel.loss_fusion or "native"]
    lines[-1] += [f"--cpu-offloading --cpu-offloading-num-layers {layers - 1}"] if scenario.offload else []
    lines.append(["--bf16", *_eight(scenario), f"--attention-backend {_backend(scenario.kernel)}"])
    return " \\\n".join(row for line in lines for row in _rows(line)) + "\n"


GRAPHS: Final = {
    "none": [],
    "attention": ["--cuda-graph-impl transformer_engine", "--cuda-graph-scope attn moe_router moe_preprocess"],
    "layers": ["--cuda-graph-impl local"],
}


LOSSES: Final = {
    "none": [],
    "native": ["--cross-entropy-loss-fusion"],
    "te": ["--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"],
}


def _rows(words: Sequence[str]) -> list[str]:
    """Arguments of a kind, as many a line as fit."""
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + len(word) < WIDTH:
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    return rows


def _comm(scenario: Scenario, cp: int) -> list[str]:
    if cp == 1:
        return []
    kind = next((kind for kind, strategy in COMM.items() if strategy == scenario.strategy), None)
    if kind is None:
        raise ScenarioError(f"strategy: {scenario.strategy} is none of Megatron's: {', '.join(COMM.values())}")
    found = [f"--cp-comm-type {kind}"]
    if kind == "a2a+p2p":
        inner = int(scenario.knobs["ulysses"])
        found.append(f"--hierarchical-context-parallel-sizes {inner} {cp // inner}")
    return found


def _again(recompute: str) -> list[str]:
    if recompute == "full":
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return ["--recompute-granularity selective --recompute-modules mlp"] if recompute == "mlp" else []


def _eight(scenario: Scenario) -> list[str]:
    """Of linear layers in FP8."""
    if scenario.precision in (None, "bf16"):
        return []
    recipe = "delayed" if isinstance(scenario.precision, str) else str(scenario.precision["fp8"])
    return ["--fp8-format hybrid", f"--fp8-recipe {'tensorwise' if recipe == 'current' else recipe}"]


def _backend(kernel: str) -> str:
    return {"cudnn": "fused"}.get(kernel, "flash")
