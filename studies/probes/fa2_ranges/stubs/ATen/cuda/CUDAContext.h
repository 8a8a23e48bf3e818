#pragma once
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
namespace at { namespace cuda {
cudaDeviceProp* getCurrentDeviceProperties();   // defined in launcher.cu
}}
