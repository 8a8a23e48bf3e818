#!/bin/sh
# Makes libranged.so of DCP's flash-attn 2 (chenyu-jiang/flash-attention, branch bblock, a786cd0), with ranges and
# without: bf16, head dimension 128, sm_90. On one core in three minutes; needs git, pip, g++ and a network, no GPU.
#
#     sh studies/probes/fa2_ranges/build.sh FOLDER
#
# FORK and CUTLASS say where to clone from. Two faults of the forward kernel are mended: without a table of blocks all
# rows of queries were those of the first block, and shared memory was written again before all threads had read it.
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/wheels" "$1/obj" && cd "$1"
FORK=${FORK:-https://github.com/chenyu-jiang/flash-attention}
CUTLASS=${CUTLASS:-https://github.com/NVIDIA/cutlass}
if [ ! -d cuda ]; then
  pip download -q --no-deps -d wheels nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-curand==10.4.0.35
  for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" cuda; done
  chmod +x cuda/nvidia/cu13/bin/* cuda/nvidia/cu13/bin/crt/* cuda/nvidia/cu13/nvvm/bin/*
fi
if [ ! -d fork ]; then
  git clone -q -b bblock "$FORK" fork && git -C fork checkout -q a786cd0
  sed -i -e '/_for_curr_mblock = std::m[a-z]*(reinterpret_cast/a __syncthreads();' \
    -e 's/? binfo.q_offset(params.q_batch_stride, params.q_row_stride, bidb)$/& + m_block * kBlockM * params.q_row_stride/' \
    fork/csrc/flash_attn/src/flash_fwd_kernel.h
fi
[ -d cutlass ] || { git clone -q --no-checkout "$CUTLASS" cutlass && git -C cutlass checkout -q 756c351b -- include; }
CU=$PWD/cuda/nvidia/cu13
PATH=$CU/bin:$CU/nvvm/bin:$PATH
# The fork's own flags; the DISABLE macros are its, too, and remove branches of the dispatch, not of the kernels.
FLAGS="-O3 -std=c++17 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__
 -U__CUDA_NO_BFLOAT16_CONVERSIONS__ --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math
 -gencode arch=compute_90,code=sm_90 -Xcompiler -fPIC -w
 -DFLASHATTENTION_DISABLE_DROPOUT -DFLASHATTENTION_DISABLE_ALIBI -DFLASHATTENTION_DISABLE_SOFTCAP
 -DFLASHATTENTION_DISABLE_UNEVEN_K -DFLASHATTENTION_DISABLE_LOCAL"
for file in "$HERE"/launcher.cu "$HERE"/instances/*.cu; do
  # shellcheck disable=SC2086
  nvcc $FLAGS -include narrow.h -I"$HERE/stubs" -Ifork/csrc/flash_attn -Ifork/csrc/flash_attn/src -Icutlass/include \
    -I"$CU/include" -c "$file" -o "obj/$(basename "$file" .cu).o"
done
echo '{ global: ranged_forward; ranged_backward; local: *; };' > obj/exports.map
nvcc -shared -gencode arch=compute_90,code=sm_90 --cudart static -L"$CU/lib" obj/*.o -o libranged.so \
  -Xlinker --version-script=obj/exports.map -Xlinker --no-undefined -Xlinker --exclude-libs=ALL
