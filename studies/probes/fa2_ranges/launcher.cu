// Launcher for two kernels of github.com/chenyu-jiang/flash-attention, branch bblock, commit a786cd0
// (flash-attn 2.6.3 with up to two ranges of visible keys per query), without torch or ATen.
// bf16, head dimension 128, variable-length batches, no block tables, no dropout, no ALiBi, no softcap.
// The parameters are filled as mha_varlen_fwd / mha_varlen_bwd of csrc/flash_attn/flash_api.cpp fill them.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>
#include <ATen/cuda/CUDAContext.h>
#include "flash.h"

using bf16 = cutlass::bfloat16_t;

// What instances/*.cu instantiate.
extern template void run_mha_fwd_splitkv_dispatch<bf16, 128, false, true, true>(Flash_fwd_params &, cudaStream_t);
extern template void run_mha_fwd_splitkv_dispatch<bf16, 128, true, false, false>(Flash_fwd_params &, cudaStream_t);
template<> void run_mha_bwd_<bf16, 128, false, true, true>(Flash_bwd_params &, cudaStream_t);
template<> void run_mha_bwd_<bf16, 128, true, false, false>(Flash_bwd_params &, cudaStream_t);

int ranged_error = 0;

namespace at { namespace cuda {
cudaDeviceProp* getCurrentDeviceProperties() {
    static cudaDeviceProp props;
    static int of = -1;
    int device = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    if (of != device) {
        C10_CUDA_CHECK(cudaGetDeviceProperties(&props, device));
        of = device;
    }
    return &props;
}
}}

namespace {

enum Refused { BAD_HEADS = -1, BAD_SIZES = -2, BAD_ARCH = -3 };

int refuse(int b, int total_q, int max_q, int max_k, int h, int h_k) {
    if (h <= 0 || h_k <= 0 || h % h_k != 0) return BAD_HEADS;
    // max_q == 1 makes the fork drop is_causal and swap query length and heads: left out here.
    return b <= 0 || total_q <= 0 || max_q <= 1 || max_k <= 0 ? BAD_SIZES : 0;
}

int round128(int x) { return (x + 127) / 128 * 128; }

// set_params_fprop. st: row and head strides, in elements, of q, k, v, out.
void set_fprop(Flash_fwd_params &p, int b, int max_q, int max_k, int h, int h_k,
               void *q, void *k, void *v, void *out, const int64_t *st,
               int *cu_q, int *cu_k, void *lse, float softmax_scale, int causal) {
    p.is_bf16 = true;
    p.q_ptr = q; p.k_ptr = k; p.v_ptr = v; p.o_ptr = out;
    p.q_row_stride = st[0]; p.q_head_stride = st[1];
    p.k_row_stride = st[2]; p.k_head_stride = st[3];
    p.v_row_stride = st[4]; p.v_head_stride = st[5];
    p.o_row_stride = st[6]; p.o_head_stride = st[7];
    // Batch strides stay 0: cu_seqlens_q is given.
    p.cu_seqlens_q = cu_q; p.cu_seqlens_k = cu_k; p.seqused_k = nullptr;
    p.p_ptr = nullptr;
    p.softmax_lse_ptr = lse;
    p.b = b; p.h = h; p.h_k = h_k; p.h_h_k_ratio = h / h_k;
    p.seqlen_q = max_q; p.seqlen_k = max_k;
    p.seqlen_q_rounded = round128(max_q); p.seqlen_k_rounded = round128(max_k);
    p.d = 128; p.d_rounded = 128;
    p.softcap = 0.0f;
    p.scale_softmax = softmax_scale;
    p.scale_softmax_log2 = softmax_scale * M_LOG2E;
    // No dropout.
    p.p_dropout = 1.f;
    p.p_dropout_in_uint8_t = uint8_t(std::floor(p.p_dropout * 255.0));
    p.rp_dropout = 1.f / p.p_dropout;
    p.scale_softmax_rp_dropout = p.rp_dropout * p.scale_softmax;
    // Causal: window (-1, 0), of which set_params_fprop makes (seqlen_k, 0). Ranges: window (-1, -1).
    p.is_causal = causal != 0;
    p.window_size_left = causal ? max_k : -1;
    p.window_size_right = causal ? 0 : -1;
    p.is_seqlens_k_cumulative = true;
    p.unpadded_lse = true;
    p.seqlenq_ngroups_swapped = false;
}

// What mha_varlen_fwd / _bwd set after that. num_splits stays 0, which is one split.
void set_rest(Flash_fwd_params &p, int total_q, int *attn_range) {
    p.total_q = total_q;
    p.block_table_q = nullptr; p.block_table_kv = nullptr; p.block_table_out = nullptr;
    p.page_block_size_q = 1; p.page_block_size_kv = 1; p.page_block_size_out = 1; p.num_page_blocks_out = 0;
    p.attn_range_min_ptr1 = p.attn_range_max_ptr1 = p.attn_range_min_ptr2 = p.attn_range_max_ptr2 = nullptr;
    if (attn_range) {  // [2, 2, total_q]
        p.attn_range_min_ptr1 = attn_range;
        p.attn_range_max_ptr1 = attn_range + int64_t(total_q);
        p.attn_range_min_ptr2 = attn_range + 2 * int64_t(total_q);
        p.attn_range_max_ptr2 = attn_range + 3 * int64_t(total_q);
    }
    p.alibi_slopes_ptr = nullptr;
}

int begin(int device) {
    ranged_error = 0;
    C10_CUDA_CHECK(cudaSetDevice(device));
    cudaGetLastError();
    if (ranged_error) return ranged_error;
    auto *props = at::cuda::getCurrentDeviceProperties();
    if (ranged_error) return ranged_error;
    return props->major == 9 && props->minor == 0 ? 0 : int(BAD_ARCH);
}

}  // namespace

// Both return 0, or a cudaError_t (> 0), or one of Refused (< 0), when nothing is launched.

// q, out [total_q, h, 128], k, v [total_k, h_k, 128]: bf16, last dimension contiguous. lse [h, total_q] float.
// cu_q, cu_k [batch + 1] int32. strides: on the host, of rows and heads of q, k, v, out. attn_range: int32
// [2, 2, total_q], the first key and the end of two ranges of every query, in its sequence; null: causal.
extern "C" int ranged_forward(void *q, void *k, void *v, void *out, void *lse, int *cu_q, int *cu_k,
                              int *attn_range, const int64_t *strides, int batch, int total_q, int max_q,
                              int max_k, int h, int h_k, float softmax_scale, int device, void *stream) {
    if (int r = refuse(batch, total_q, max_q, max_k, h, h_k)) return r;
    if (int r = begin(device)) return r;
    Flash_fwd_params params = {};
    set_fprop(params, batch, max_q, max_k, h, h_k, q, k, v, out, strides, cu_q, cu_k, lse, softmax_scale, !attn_range);
    set_rest(params, total_q, attn_range);
    params.rng_state = nullptr;   // written only with dropout
    auto s = static_cast<cudaStream_t>(stream);
    if (attn_range) run_mha_fwd_splitkv_dispatch<bf16, 128, false, true, true>(params, s);
    else            run_mha_fwd_splitkv_dispatch<bf16, 128, true, false, false>(params, s);
    return ranged_error;
}

// dk, dv: [total_k, h, 128], of every query head. dq_accum: float [total_q + 128 * batch, h, 128]; softmax_d:
// float [h, total_q + 128 * batch]. strides: as before, then of dout, dq, dk, dv.
extern "C" int ranged_backward(void *dout, void *q, void *k, void *v, void *out, void *lse,
                               void *dq, void *dk, void *dv, void *dq_accum, void *softmax_d,
                               int *cu_q, int *cu_k, int *attn_range, const int64_t *strides,
                               int batch, int total_q, int max_q, int max_k, int h, int h_k,
                               float softmax_scale, int device, void *stream) {
    if (int r = refuse(batch, total_q, max_q, max_k, h, h_k)) return r;
    if (int r = begin(device)) return r;
    Flash_bwd_params params = {};
    set_fprop(params, batch, max_q, max_k, h, h_k, q, k, v, out, strides, cu_q, cu_k, lse, softmax_scale, !attn_range);
    params.do_ptr = dout; params.dq_ptr = dq; params.dk_ptr = dk; params.dv_ptr = dv;
    params.do_row_stride = strides[8];  params.do_head_stride = strides[9];
    params.dq_row_stride = strides[10]; params.dq_head_stride = strides[11];
    params.dk_row_stride = strides[12]; params.dk_head_stride = strides[13];
    params.dv_row_stride = strides[14]; params.dv_head_stride = strides[15];
    params.dq_accum_ptr = dq_accum; params.dk_accum_ptr = nullptr; params.dv_accum_ptr = nullptr;
    params.dsoftmax_sum = softmax_d;
    params.deterministic = false;
    params.dq_accum_split_stride = 0;
    set_rest(params, total_q, attn_range);
    params.block_table_dq = nullptr; params.block_table_dkv = nullptr;
    auto s = static_cast<cudaStream_t>(stream);
    if (attn_range) run_mha_bwd_<bf16, 128, false, true, true>(params, s);
    else            run_mha_bwd_<bf16, 128, true, false, false>(params, s);
    return ranged_error;
}
