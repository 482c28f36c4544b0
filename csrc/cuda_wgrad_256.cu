// W in tiles of 256 columns, as cuda_wgrad_128.cu.
#include "cuda_wgrad.cuh"

namespace zbkern {
void wgrad_256(const Wgrad& task) { sm90::choose<256>(task); }
}  // namespace zbkern
