// Stub: what flash.h wants from ATen, without torch.
#pragma once
#include <cstdint>
#include <cstdio>
#include <tuple>
#include <cuda_runtime.h>
namespace at {
struct PhiloxCudaState { uint64_t seed_ = 0; uint64_t offset_ = 0; };
}
