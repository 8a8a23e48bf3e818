torchrun --nproc-per-node 8 --nnodes 4 pretrain_hybrid.py \
  --hybrid-layer-pattern 'MEMEM*EMEMEM|*EMEMEM*EMEME|M*EMEMEM*EME|MEMEM*EMEMEMEME' \
  --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec \
  --mamba-num-heads 64 \
  --hidden-size 2688 --num-attention-heads 32 --ffn-hidden-size 1856 \
  --group-query-attention --num-query-groups 2 --kv-channels 128 \
  --num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712 \
  --squared-relu --position-embedding-type none --untie-embeddings-and-output-weights \
  --vocab-size 131072 --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --bf16
