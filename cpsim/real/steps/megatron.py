"""Megatron-Core's GPT with Transformer Engine's layers, its own DDP, schedule and distributed optimizer.

Settings are those of NVIDIA's recipes: sequence parallelism beside tensor parallelism, gradients summed into fp32
buffers by the products themselves, sums and gathers beside the passes, fused SwiGLU, rotary positions and loss; tokens
of experts go by all-to-alls to grouped products, every expert as many. Adapters are made of Megatron-Core's linear
layers, as NVIDIA's recipes make them: two of them read what a frozen one reads, and are added to what it makes.

Reference: NVIDIA/Megatron-LM, megatron/training/training.py; Megatron-Core 0.16, Transformer Engine 2.13.
NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/peft/lora_layers.py, utils.py (ParallelLinearAdapter).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from cpsim.case.scenario import LoraSection
from cpsim.real.run.node import Node
from cpsim.real.steps.cut import Cut

LEARNING_RATE: Final = 1e-5
SENDS: Final = {"zigzag_ring": "p2p", "allgather": "all_gather", "ulysses": "a2a"}
"""Megatron's ``cp_comm_type`` by strategy."""
RECIPES: Final = {"delayed": "delayed", "current": "tensorwise"}
"""Its ``fp8_recipe`` by the name of ours."""
LINEARS: Final = {
    "qkv": ("self_attention", "linear_qkv"),
    "proj": ("self_attention", "linear_proj"),
    "gate_up": ("mlp", "linear_fc1"),
    "down": ("mlp", "linear_fc2"),
}
"""Where its layers have the linear layers that adapters stand beside, by our names."""
_made = list[tuple[int, int, int]]()
"""Degrees of the process groups that stand: groups hold memory, so that they are kept from case to case."""


class MegatronStep:
    """Launches whole steps; see `cpsim.real.run.runner.Runner`."""

    def __init__(self, cut: Cut, node: Node) -> None:
        """
        Args:
            cut: how; no pipeline.
            node: this rank, on a GPU.
        """
        sys.modules.setdefault("fused_weight_gradient_mlp_cuda", _sums())  # before Megatron looks for it
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        _groups(cut)
        _forget_stand_ins()
        self.cut, config = cut, _config(cut)
        is_parted = cut.parallel.sharding == "zero1"
        self.inner = _model(cut, config).to(node.device)
        how = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=is_parted,
            use_distributed_optimizer=is_parted,
        )
        self.model = DistributedDataParallel(config, how, self.inner)
        weakref.finalize(self, self.model.grad_accs.clear)  # their hooks hold the model, where no collector sees it
        config.no_sync_func, config.finalize_model_grads_func = self.model.no_sync, finalize_model_grads
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=is_parted,
            overlap_param_gather=is_parted,
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self.model], use_gloo_process_groups=False)
        self.batches = _batches(cut, node)
        self.passes = get_forward_backward_func()
        self.loss = torch.zeros((), device=node.device)
        torch.cuda.empty_cache()

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        found: nn.ModuleList = self.inner.decoder.layers  # type: ignore[union-attr, assignment]
        return found

    def prepare(self) -> None:
        """Nothing: tokens stay the same."""

    def launch(self) -> None:
        """One step."""
        self.clear()
        self.backward()
        self.update()

    def clear(self) -> None:
        """Gradients of the last step go."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        """Forward and backward passes of all microbatches, and sums of gradients."""
        c = self.cut
        losses = self.passes(
            forward_step_func=_forward,
            data_iterator=iter(self.batches),
            model=[self.model],
            num_microbatches=c.parallel.microbatches,
            seq_length=c.context,
            micro_batch_size=c.batch,
            forward_only=False,
        )
        self.loss = torch.stack([one["loss"] for one in losses]).mean()

    def update(self) -> None:
        """AdamW on clipped gradients."""
        self.optimizer.step()


make = MegatronStep


def _forget_stand_ins() -> None:
    """Transformer Engine keeps a gradient that nobody reads for every shape of weights: those of earlier cases go."""
    from transformer_engine.pytorch.module import base

    base._dummy_wgrads.clear()


def _forward(batches: Iterator[tuple[Tensor, ...]], model: Callable[..., Tensor]) -> tuple[Tensor, Callable[..., Any]]:
    tokens_BT, targets_BT, positions_BT = next(batches)
    return model(tokens_BT, positions_BT, None, labels=targets_BT), _mean


def _mean(losses_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses_BT.float().mean()
    return loss, {"loss": loss.detach()}


def _groups(cut: Cut) -> None:
    """Megatron's process groups for the degrees of a cut."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    degrees = cut.parallel.tp, cut.parallel.cp, cut.parallel.ep
    if _made != [degrees]:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=degrees[0],
            context_parallel_size=degrees[1],
            expert_model_parallel_size=degrees[2],
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        _made[:] = [degrees]
    model_parallel_cuda_manual_seed(1)


def _config(cut: Cut) -> Any:
    """Megatron's ``TransformerConfig``."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    m, p, precision = cut.model, cut.parallel, cut.scenario.precision
    more: dict[str, Any] = {}
    if m.experts:
        more |= {
            "num_moe_experts": m.experts,
            "moe_router_topk": m.top_k,
            "moe_ffn_hidden_size": m.inner,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_permute_fusion": True,
            "moe_router_dtype": "fp32",
            "moe_router_force_load_balancing": True,
        }
    if m.clamped:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        more |= {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
    if m.expert_bias:  # attention's linear layers have them, too
        more |= {"add_bias_linear": True, "bias_dropout_fusion": False}
    if m.sinks:
        more |= {"softmax_type": "learnable"}
    if m.window:
        more |= {"window_size": (m.window - 1, 0), "window_attn_skip_freq": m.window_pattern or None}
    if isinstance(precision, dict):
        more |= {"fp8": "hybrid", "fp8_recipe": RECIPES[precision["fp8"]]}
    if p.recompute == "full":
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if p.cp > 1:
        more |= {"cp_comm_type": SENDS[str(cut.scenario.strategy)]}
    plain: dict[str, Any] = {
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "bias_dropout_fusion": True,
    }
    return TransformerConfig(
        num_layers=m.layers,
        hidden_size=m.hidden,
        ffn_hidden_size=m.ffn,
        num_attention_heads=m.heads,
        num_query_groups=m.kv_heads,
        kv_channels=m.head_dim,
        tensor_model_parallel_size=p.tp,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=p.tp > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_backend=AttnBackend.flash if cut.scenario.kernel == "fa2" else AttnBackend.fused,
        gradient_accumulation_fusion=True,
        bias_activation_fusion=True,
        apply_rope_fusion=True,
        cross_entropy_loss_fusion=p.loss_fusion != "none",
        cross_entropy_fusion_impl="te" if p.loss_fusion == "te" else "native",
        **{**plain, **more},
    )


def _model(cut: Cut, config: Any) -> nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    experts = cut.model.experts or None
    layer = get_gpt_layer_with_transformer_engine_spec(experts, bool(experts))
    model: nn.Module = GPTModel(  # weights are bf16 from the start
        config,
        layer,
        vocab_size=cut.model.vocab,
        max_sequence_length=cut.context,
        position_embedding_type="rope",
        rotary_base=500_000,
        share_embeddings_and_output_weights=False,
    )
    trainable = cut.scenario.trainable
    if isinstance(trainable, LoraSection):
        _adapt(model, config, trainable)
    return model


def _adapt(model: Any, config: Any, lora: LoraSection) -> None:
    """Freezes a model's weights and puts adapters beside linear layers."""
    model.requires_grad_(False)
    for block in model.decoder.layers:
        for part, name in (LINEARS[one] for one in lora.modules or LINEARS):
            owner = getattr(block, part)
            setattr(owner, name, Adapted(getattr(owner, name), config, lora))


class Adapted(nn.Module):
    """A frozen linear layer of Megatron-Core with an adapter of low rank beside it."""

    def __init__(self, frozen: nn.Module, config: Any, lora: LoraSection) -> None:
        """
        Args:
            frozen: of one rank; one that normalizes its input first says what it made of it.
            config: Megatron's.
            lora: rank and dropout.
        """
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear

        outputs, inputs = frozen.weight.shape  # type: ignore[misc]
        make = partial(ColumnParallelLinear, config=config, init_method=nn.init.xavier_uniform_, bias=False)
        self.frozen, self.drop = frozen, nn.Dropout(lora.dropout)
        self.down, self.up = make(inputs, lora.lora), make(lora.lora, outputs)
        self.scale = 1.0 / lora.lora
        self.normalizes = hasattr(frozen, "layer_norm_weight")
        if self.normalizes:
            frozen.return_layernorm_output = True  # type: ignore[assignment]

    def forward(self, inputs_TBC: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the frozen layer makes and the adapter adds; as Megatron-Core's layers, with a bias or None."""
        made, bias = self.frozen(inputs_TBC)
        made_TBD, read_TBC = made if self.normalizes else (made, inputs_TBC)
        low_TBR, _ = self.down(self.drop(read_TBC))
        added_TBD, _ = self.up(low_TBR)
        return made_TBD + added_TBD * self.scale, bias


def _sums() -> ModuleType:
    """What Megatron takes from Apex, by Transformer Engine: a product that adds to an fp32 gradient of a weight."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def accumulate(inputs_TC: Tensor, grad_TD: Tensor, sum_DC: Tensor) -> None:
        general_gemm(inputs_TC, grad_TD, out_dtype=sum_DC.dtype, layout="NT", out=sum_DC, accumulate=True, grad=True)

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    return module


def _batches(cut: Cut, node: Node) -> list[tuple[Tensor, ...]]:
    """Tokens, targets and positions of this rank's microbatches: of context-parallel ranks a part of the front and its
    mirror image of the end, as Megatron cuts sequences."""
    p = cut.parallel
    replica, place = node.rank // (p.tp * p.cp), node.rank // p.tp % p.cp
    shape = 2, p.dp, p.microbatches, cut.batch, cut.context
    drawn = torch.randint(cut.model.vocab, shape, generator=torch.Generator().manual_seed(1))[:, replica]
    at = torch.arange(cut.context).expand(p.microbatches, cut.batch, -1)
    cuts = partial(_shard, place=place, ranks=p.cp)
    return [tuple(cuts(x[i]).to(node.device) for x in (drawn[0], drawn[1], at)) for i in range(p.microbatches)]


def _shard(x_BT: Tensor, place: int, ranks: int) -> Tensor:
    parts = x_BT.chunk(2 * ranks, 1)
    return torch.cat((parts[place], parts[2 * ranks - 1 - place]), 1).contiguous()
