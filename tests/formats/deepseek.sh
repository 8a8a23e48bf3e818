MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --num-attention-heads 128
    --multi-latent-attention
    --tensor-model-parallel-size 1
)
