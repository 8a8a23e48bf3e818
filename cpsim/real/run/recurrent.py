"""Layers with a state instead of keys: their recurrences token by token, in plain PyTorch.

    state_t = decay_t * state_{t-1} + k_t x_t^T,  out_t = state_t^T q_t

x_t is v_t (Mamba-2, simple gated linear attention) or, with the delta rule, strength_t (v_t - (decay_t state_{t-1})^T
k_t), which replaces what the state holds for a key instead of adding to it.

Legend of tensor suffixes: T tokens, H value heads, G key heads (each of H / G value heads), K key dimensions, V value
dimensions, L is K (Kimi Delta Attention) or 1.

References: Dao, Gu, Transformers are SSMs (2024), equation 6; Yang, Kautz, Hatamizadeh, Gated Delta Networks (2024),
equation 10; Kimi team, Kimi Linear (2025), equation 1. Differs: none.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    log_decay_THL: Tensor,
    strength_TH: Tensor | None = None,
    state_HKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and last state of one sequence.

    Args:
        q_TGK, k_TGK, v_THV: queries, keys, values.
        log_decay_THL: logarithm of what a token leaves of the state.
        strength_TH: of the delta rule; None without it.
        state_HKV: before the first token; None: zeros.
    """
    num_tokens, num_heads, value_dim = v_THV.shape
    q_THK, k_THK = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (q_TGK, k_TGK))
    state = v_THV.new_zeros(num_heads, k_THK.shape[-1], value_dim) if state_HKV is None else state_HKV
    outs = []
    for t in range(num_tokens):
        state = log_decay_THL[t].exp()[..., None] * state
        x_HV = v_THV[t]
        if strength_TH is not None:
            x_HV = strength_TH[t][:, None] * (x_HV - torch.einsum("hkv,hk->hv", state, k_THK[t]))
        state = state + k_THK[t][..., None] * x_HV[:, None, :]
        outs.append(torch.einsum("hkv,hk->hv", state, q_THK[t]))
    return torch.stack(outs), state
