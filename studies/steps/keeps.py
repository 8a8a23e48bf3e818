"""What a training step of a Llama keeps for its backward pass, launches and holds at its peak, by framework.

    python -m studies.steps.keeps [--framework torch|compiled|per_op|huggingface|huggingface_checkpointed] [--ops]

Tensors are on the device `meta`: shapes without numbers, so no GPU is needed. The attention and the RMSNorm of CUDA are
called by name where the device would choose (`_scaled_dot_product_flash_attention`, `_fused_rms_norm`). Every size is
distinct, so that a tensor's elements a token name its width: h hidden, a = heads * d, g = kv_heads * d, f ffn, V vocab.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from studies.steps.llama import DTYPE, WIDTHS, Llama, Sizes, cross_entropy, flash_attention

aten = torch.ops.aten
VIEWS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "squeeze", "t", "transpose"}
VIEWS |= {"unsqueeze", "view", "_unsafe_view", "unbind", "split_with_sizes", "view_as_complex", "view_as_real"}
NO_KERNEL = VIEWS | {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "device"}
KERNELS = {"_scaled_dot_product_flash_attention_backward": 5, "_fused_rms_norm_backward": 2, "slice_backward": 2}
"""Kernels of ops that launch more than one on a GPU: flash-attn 2's dot, main and convert kernels and, with fewer heads
of keys than of queries, a sum for each of dK and dV; a norm's two gradients; zeros and a copy."""


@dataclass
class Step(TorchDispatchMode):
    """Logs the ops of a step, with the bytes of all live storages."""

    ops: list[tuple[str, str, str]] = field(default_factory=list)
    """Phase, op, widths of its outputs."""
    phase: str = "build"
    live: dict[int, tuple[StorageWeakRef, int, str]] = field(default_factory=dict)
    """Storages that live: a weak reference, bytes, and the op and width that made them."""
    peak: int = 0
    peak_at: str = ""
    peak_holds: Counter[str] = field(default_factory=Counter)
    trace: dict[str, list[int]] = field(default_factory=dict)
    """Bytes that live after each op of a phase."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == aten._local_scalar_dense.default:
            self.ops.append((self.phase, "synchronize", ""))
            return True  # the only question: is this one sequence, not a packed row?
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        tensors = [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, torch.Tensor)]
        for tensor in tensors:
            self.hold(tensor, name)
        self.ops.append((self.phase, name, " ".join(width(t) for t in tensors)))
        self.note(name)
        return out

    def hold(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.live and not self.live[storage._cdata][0].expired():
            return
        self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), f"{self.phase}: {name} {width(tensor)}")

    def note(self, name: str) -> None:
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        total = sum(nbytes for _, nbytes, _ in self.live.values())
        self.trace.setdefault(self.phase, []).append(total)
        if total > self.peak:
            self.peak, self.peak_at = total, f"{self.phase}: {name}"
            self.peak_holds = Counter()
            for _, nbytes, label in self.live.values():
                self.peak_holds[label] += nbytes

    def kernels(self, phase: str) -> int:
        names = [name for at, name, _ in self.ops if at == phase and name not in NO_KERNEL]
        return sum(KERNELS.get(name, 1) for name in names)


def width(tensor: torch.Tensor) -> str:
    """Elements a token in letters, with the dtype: `T*h bf16`."""
    kind = {"bfloat16": "bf16", "float32": "fp32", "int64": "i64", "complex64": "c64"}.get(str(tensor.dtype)[6:], "")
    shape = list(tensor.shape)
    numel = tensor.numel()
    if WIDTHS["T"] in shape or (numel and numel % WIDTHS["T"] == 0):
        rest = numel // WIDTHS["T"]
        name = next((key for key, value in WIDTHS.items() if value == rest and key != "T"), str(rest))
        return f"T*{name} {kind}" if rest != 1 else f"T {kind}"
    return f"{'*'.join(letter(n) for n in shape)} {kind}"


def letter(number: int) -> str:
    return next((key for key, value in WIDTHS.items() if value == number), str(number))


@contextmanager
def kept(step: Step, parameters: set[int], out: dict[int, tuple[str, int]]) -> Iterator[None]:
    """Storages that autograd saves, without parameters, each once: by storage its label and bytes."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in parameters:
            label = step.live[key][2] if key in step.live else f"input {width(tensor)}"
            out[key] = (label, tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def run_step(
    model: nn.Module, blocks: list[nn.Module], call: Callable[[], torch.Tensor]
) -> tuple[Step, dict[int, tuple[str, int]]]:
    """One forward and backward pass: the log, and what each phase of the forward pass keeps."""
    step = Step()
    found: dict[int, tuple[str, int]] = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    mark_phases(step, blocks)
    with step:
        for p in model.parameters():
            step.hold(p, "weight")
        step.phase = "ends"
        with kept(step, parameters, found):
            loss = call()
        step.phase = "ends backward"
        loss.backward()
    return step, found


def mark_phases(step: Step, blocks: list[nn.Module]) -> None:
    """Hooks that say which block runs; the gradient of a block's output begins its backward pass."""

    def enter(tensor: torch.Tensor, at: str, after: str) -> None:
        step.phase = at
        if tensor.requires_grad:
            tensor.register_hook(lambda _: setattr(step, "phase", after))

    for index, block in enumerate(blocks):
        before = f"layer {index - 1} backward" if index else "ends backward"
        block.register_forward_pre_hook(lambda _, args, i=index, b=before: enter(args[0], f"layer {i}", b))
        block.register_forward_hook(lambda *_: setattr(step, "phase", "ends"))
    last = len(blocks) - 1
    blocks[-1].register_forward_hook(lambda _, __, out: enter(out, "ends", f"layer {last} backward"))


def tell(title: str, step: Step, found: dict[int, tuple[str, int]], show_ops: bool) -> None:
    print(f"\n== {title}")
    tokens = WIDTHS["T"]
    for phase in ("layer 1", "ends"):
        labels = Counter(label for label, _ in found.values() if label.startswith(phase))
        nbytes = sum(n for label, n in found.values() if label.startswith(phase))
        print(f"kept by {phase}: {nbytes / tokens:.1f} bytes a token")
        for label, count in labels.items():
            print(f"    {count} x {label.split(': ')[1]}")
        inputs = [label for label, _ in found.values() if label.startswith("input")]
    print("kept inputs:", dict(Counter(inputs)))
    for phase in ("layer 1", "layer 1 backward", "ends", "ends backward"):
        held = [total / tokens for total in step.trace[phase]]
        print(f"{phase}: {step.kernels(phase)} kernels; bytes a token after its first op, at most, after its last op:")
        print(f"    {held[0]:.0f}, {max(held):.0f}, {held[-1]:.0f}")
        if show_ops:
            for at, name, what in step.ops:
                if at == phase and name not in VIEWS and name != "device":
                    print(f"    {name:48}{what}")
    print(f"peak {step.peak / 2**20:.1f} MiB at {step.peak_at}; alive there:")
    for label, nbytes in step.peak_holds.most_common(12):
        print(f"    {nbytes / 2**20:9.2f} MiB {nbytes / tokens:9.1f} bytes a token  {label}")


def eager() -> tuple[Step, dict[int, tuple[str, int]]]:
    model, tokens = Llama(Sizes()), torch.empty(1, WIDTHS["T"], dtype=torch.int64, device="meta")
    return run_step(model, list(model.layers), lambda: cross_entropy(model(tokens), tokens))


def per_op() -> tuple[Step, dict[int, tuple[str, int]]]:
    """torchtitan's selective recomputation, not compiled: what its cache holds is in the peak, not in `kept`."""
    model, tokens = (
        Llama(Sizes(), fused_qkv=True, complex_rotary=True),
        torch.empty(1, WIDTHS["T"], dtype=torch.int64, device="meta"),
    )
    for block in model.layers:
        inner = block.forward
        block.forward = lambda *a, inner=inner: checkpoint(
            inner, *a, use_reentrant=False, early_stop=False, preserve_rng_state=False, context_fn=every_second_product
        )
    return run_step(model, list(model.layers), lambda: cross_entropy(model(tokens), tokens))


def every_second_product() -> tuple[Any, Any]:
    """torchtitan's policy: attention is kept, of the matrix products the first, third, fifth."""
    counts = Counter[bool]()

    def policy(ctx: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func == aten.mm.default:
            counts[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        keep = func == aten._scaled_dot_product_flash_attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def huggingface(checkpointed: bool) -> tuple[Step, dict[int, tuple[str, int]]]:
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    s = Sizes()
    config = LlamaConfig(
        hidden_size=s.hidden,
        intermediate_size=s.ffn,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocab,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(DTYPE).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    tokens = torch.empty(1, WIDTHS["T"], dtype=torch.int64, device="meta")
    with patch.object(functional, "scaled_dot_product_attention", flash_attention):
        return run_step(model, list(model.model.layers), lambda: model(input_ids=tokens, labels=tokens).loss)


def compiled(part: str, per_op_kept: bool) -> None:
    """What the compiler's partition of a block, or of the loss, keeps and computes again."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def show(name: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            tell_graph(f"{part}, {'per_op, ' if per_op_kept else ''}{name}", graph)
            return graph.forward

        return compile_graph

    backend = aot_autograd(
        fw_compiler=show("forward"),
        bw_compiler=show("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    s = Sizes()
    if part == "loss":
        logits = torch.zeros(1, WIDTHS["T"], s.vocab, dtype=DTYPE, requires_grad=True)
        labels = torch.zeros(1, WIDTHS["T"], dtype=torch.int64)
        torch.compile(cross_entropy, backend=backend)(logits, labels).backward()
        return
    model = Llama(s, fused_qkv=per_op_kept, complex_rotary=False)
    block: Any = model.layers[0]
    x = torch.empty(1, WIDTHS["T"], s.hidden, dtype=DTYPE, device="meta", requires_grad=True)

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if not per_op_kept:
            return block(x, cos, sin)
        return checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=every_second_product)

    torch.compile(call, backend=backend, fullgraph=True)(x, model.cos, model.sin).sum().backward()


def tell_graph(title: str, graph: torch.fx.GraphModule) -> None:
    print(f"\n== {title}")
    nodes = list(graph.graph.nodes)
    calls = [n for n in nodes if n.op == "call_function" and "getitem" not in n.name]
    print(
        "ops:",
        " ".join(
            n.name for n in calls if str(n.target).split(".")[1:2] and n.target.__name__.split(".")[0] not in VIEWS
        ),
    )
    made = (
        next(n for n in nodes if n.op == "output").args[0]
        if "forward" in title
        else [n for n in nodes if n.op == "placeholder"]
    )
    total = 0
    seen = set()
    for node in made:
        value = getattr(node, "meta", {}).get("val")
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            total += 0 if key in seen else value.numel() * value.element_size()
            seen.add(key)
            print(f"    {'out or kept' if 'forward' in title else 'input'} {node.name:40}{width(value)}")
    print(f"    {total / WIDTHS['T']:.1f} bytes a token, all of them")


FRAMEWORKS = ("torch", "compiled", "per_op", "huggingface", "huggingface_checkpointed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="only these; all without")
    parser.add_argument("--ops", action="store_true", help="list every op")
    chosen = parser.parse_args()
    print("widths:", WIDTHS)
    for name in chosen.framework or FRAMEWORKS:
        if name == "compiled":
            for part, kept_ops in (("block", False), ("block", True), ("loss", False)):
                compiled(part, kept_ops)
            continue
        try:
            step, found = {"torch": eager, "per_op": per_op}.get(
                name, lambda n=name: huggingface(n.endswith("checkpointed"))
            )()
        except ImportError as error:
            print(f"{name}: left out, {error.name} is not installed", file=sys.stderr)
            continue
        tell(name, step, found, chosen.ops)


if __name__ == "__main__":
    main()
