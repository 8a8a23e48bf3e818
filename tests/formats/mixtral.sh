export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
MODEL_ARGS=(
    --seq-length 4096 --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --swiglu
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --expert-model-parallel-size 8
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4
    --use-distributed-optimizer
    --sequence-parallel
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 256 --bf16)
