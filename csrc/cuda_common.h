// What all kernels share. Device memory is passed by address: no torch here, and no CUTLASS.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
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

// Lets a kernel have that much shared memory, once a device (`done` has a bit for each): the call costs what a launch of
// ours may not.
inline void allow_shared_memory(const void* kernel, int bytes, int device, std::atomic<std::uint64_t>& done) {
  const std::uint64_t bit = std::uint64_t{1} << (device % 64);
  if (device < 64 && (done.load(std::memory_order_acquire) & bit)) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "allowing shared memory");
  done.fetch_or(bit, std::memory_order_release);
}

}  // namespace zbkern
