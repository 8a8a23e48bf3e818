MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --num-experts 8
    --moe-layer-freq "[0,1]"
    --tensor-model-parallel-size 1
)
