// W for bfloat16; a file of its own so that both types compile at a time.
#include "cuda_wgrad.cuh"

namespace zbkern {
void wgrad_bfloat16(const Wgrad& task) { sm90::choose<cutlass::bfloat16_t>(task); }
}  // namespace zbkern
