#include "flash_fwd_launch_template.h"
template void run_mha_fwd_splitkv_dispatch<cutlass::bfloat16_t, 128, true, false, false>(Flash_fwd_params &params, cudaStream_t stream);
