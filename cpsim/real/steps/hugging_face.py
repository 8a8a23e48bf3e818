"""The Llama of Hugging Face's Transformers, built from its dimensions, with its own loss and gradient checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cpsim.errors import InfeasibleError
from cpsim.real.run.compiling import compile_anew
from cpsim.real.run.node import Node
from cpsim.real.steps.cut import Cut
from cpsim.real.steps.step import StepModel


class HuggingFace(StepModel):
    """`LlamaForCausalLM`; labels are the tokens, which it shifts itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.causal = model

    def blocks(self) -> nn.ModuleList:
        found: nn.ModuleList = self.causal.model.layers  # type: ignore[union-attr, assignment]
        return found

    def positions(self) -> list[Tensor]:
        return []

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        del targets
        loss: Tensor = self.causal(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def make(cut: Cut, node: Node) -> HuggingFace:
    """The model of a cut on this rank.

    Raises:
        InfeasibleError: Transformers has no such thing.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    p, m, kernel = cut.parallel, cut.model, cut.scenario.kernel
    for name, degree in {"tp": p.tp, "cp": p.cp, "loss_chunks": p.loss_chunks}.items():
        if degree > 1:
            raise InfeasibleError(f"{name}: huggingface runs here with 1, got {degree}; framework torch has more")
    if p.recompute == "per_op":
        raise InfeasibleError("recompute: huggingface has none and full, got per_op")
    compile_anew()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=m.vocab,
        hidden_size=m.hidden,
        intermediate_size=m.ffn,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
        max_position_embeddings=cut.context,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="flash_attention_2" if kernel == "fa2" else "sdpa",
    )
    torch.set_default_dtype(cut.weights_dtype)
    try:
        with torch.device(node.device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.train()
    if p.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if cut.compiled:
        torch._dynamo.config.optimize_ddp = False  # as of framework torch
        for number, block in enumerate(model.model.layers):
            model.model.layers[number] = torch.compile(block)
    return HuggingFace(model)
