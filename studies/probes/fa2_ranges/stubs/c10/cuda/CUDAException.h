// Stub: the first CUDA error of a call is kept (and printed) instead of thrown.
#pragma once
#include <cstdio>
#include <cuda_runtime.h>
extern int ranged_error;   // defined in launcher.cu
static inline void ranged_note(cudaError_t e, const char *file, int line) {
    if (e != cudaSuccess) {
        if (ranged_error == 0) ranged_error = int(e);
        fprintf(stderr, "ranged: CUDA error %d (%s) at %s:%d\n", int(e), cudaGetErrorString(e), file, line);
    }
}
#define C10_CUDA_CHECK(EXPR) ranged_note((EXPR), __FILE__, __LINE__)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() ranged_note(cudaGetLastError(), __FILE__, __LINE__)
