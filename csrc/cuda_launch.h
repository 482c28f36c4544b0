// What every kernel of the extension needs on the host: names of dtypes, errors, shared memory, the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace zbkern {

enum class Kind { float32 = 0, bfloat16 = 1, float16 = 2 };

inline int size_of(Kind kind) { return kind == Kind::float32 ? 4 : 2; }

inline void check(cudaError_t status, const char* doing) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // so that the next call does not report this error as its own
    throw std::runtime_error(std::string("zbkern: ") + doing + ": " + cudaGetErrorString(status));
  }
}

// Lets a kernel have that much shared memory, once a device (`done` has a bit for each): the call costs what a launch
// of ours may not.
inline void allow_shared_memory(const void* kernel, int bytes, int device, std::atomic<std::uint64_t>& done) {
  const std::uint64_t bit = std::uint64_t{1} << (device % 64);
  if (device < 64 && (done.load(std::memory_order_acquire) & bit)) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "allowing shared memory");
  done.fetch_or(bit, std::memory_order_release);
}

// Launches a kernel of one parameter in clusters of two blocks, neighbours along x.
inline void launch_pairs(const void* kernel, dim3 blocks, int threads, int bytes, cudaStream_t stream, void* parameter,
                         const char* doing) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  void* arguments[] = {parameter};
  check(cudaLaunchKernelExC(&config, kernel, arguments), doing);
}

}  // namespace zbkern
