#!/bin/bash
# Megatron-LM's arguments of a hybrid model, in the names of core_v0.13
PATTERN="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
torchrun --nproc-per-node 8 --nnodes 2 pretrain_mamba.py \
  --is-hybrid-model \
  --hybrid-override-pattern "$PATTERN" \
  --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec \
  --mamba-state-dim 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-num-heads 128 \
  --num-layers 52 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 21504 \
  --group-query-attention --num-query-groups 8 --kv-channels 128 \
  --squared-relu --position-embedding-type none --untie-embeddings-and-output-weights \
  --vocab-size 131072 --seq-length 8192 --micro-batch-size 1 --global-batch-size 64 \
  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --cp-comm-type a2a --bf16
