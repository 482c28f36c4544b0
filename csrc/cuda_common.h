// What all kernels share. Device memory is passed by address: no torch here, and no CUTLASS.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __CUDACC__
#define ZBKERN_HOST_DEVICE __host__ __device__
#else
#define ZBKERN_HOST_DEVICE
#endif

namespace zbkern {

enum class Kind { float32 = 0, bfloat16 = 1, float16 = 2 };

inline int size_of(Kind kind) { return kind == Kind::float32 ? 4 : 2; }

inline void check(cudaError_t status, const char* doing) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // so that the next call does not report this error as its own
    throw std::runtime_error(std::string("zbkern: ") + doing + ": " + cudaGetErrorString(status));
  }
}

}  // namespace zbkern
