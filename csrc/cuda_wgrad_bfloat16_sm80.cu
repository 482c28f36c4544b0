// W on any GPU from Ampere on for bfloat16; a file of its own so that both types compile at a time.
#include "cuda_wgrad_sm80.cuh"

namespace zbkern {
void wgrad_bfloat16_sm80(const Wgrad& task) { sm80::choose<cutlass::bfloat16_t>(task); }
}  // namespace zbkern
