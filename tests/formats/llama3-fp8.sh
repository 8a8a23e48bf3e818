#!/bin/bash
# trains an 8B model on a node
CHECKPOINT_PATH=${1:-"checkpoints/ours"}
TP_SIZE=1
CP_SIZE=2
PP_SIZE=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-"2"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
SEQ_LENGTH=8192

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank 0
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --swiglu
    --untie-embeddings-and-output-weights
    --attention-backend fused   # or flash
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --lr 0.00015
    --cross-entropy-loss-fusion
    --bf16
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-recipe tensorwise"
    )
fi
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    --pipeline-model-parallel-size $PP_SIZE
)
DDP_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
)
DATA_ARGS=(
    --vocab-size 128256
)
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
