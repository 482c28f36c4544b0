// cuTensorMapEncodeTiled for kernels that are compiled with CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL.
#include <cudaTypedefs.h>

#include "cuda_launch.h"

namespace zbkern {

namespace {

// The driver's function, found at run time, for a module that is linked to the driver loads nowhere else. CUTLASS would
// look it up for each descriptor, of which a launch has 3 to 40, and would go on with an empty one where it fails.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
        "looking up cuTensorMapEncodeTiled");
#else
  check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result),
        "looking up cuTensorMapEncodeTiled");
#endif
  if (found == nullptr) throw std::runtime_error("zbkern: the driver has no cuTensorMapEncodeTiled; update it");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

}  // namespace

}  // namespace zbkern

extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* shape,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const auto encode = zbkern::encode_tiled();
  const CUresult status =
      encode(map, type, rank, address, shape, strides, box, steps, interleave, swizzle, promotion, fill);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("zbkern: the driver refuses a TMA descriptor, error " + std::to_string(status));
  }
  return status;
}
