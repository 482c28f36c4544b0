// W on Hopper for bfloat16; a file of its own so that both types compile at a time.
#ifdef ZBKERN_NO_SM90
#include "cuda_wgrad.h"
namespace zbkern {
bool has_sm90() { return false; }
void wgrad_bfloat16_sm90(const Wgrad&) { throw std::logic_error("zbkern: not compiled for 9.0a"); }
}  // namespace zbkern
#else
#include "cuda_wgrad_sm90.cuh"
namespace zbkern {
bool has_sm90() { return true; }
void wgrad_bfloat16_sm90(const Wgrad& task) { sm90::choose<cutlass::bfloat16_t>(task); }
}  // namespace zbkern
#endif
