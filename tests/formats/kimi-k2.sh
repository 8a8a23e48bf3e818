MODEL_ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64 --vocab-size 163840
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --num-experts 384 --moe-layer-freq "[0]+[1]*60" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --pipeline-model-parallel-layout "Et*4|(t*4|)*14tL"
    --expert-model-parallel-size 64 --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex
    --micro-batch-size 2 --global-batch-size 4096 --seq-length 4096
)
