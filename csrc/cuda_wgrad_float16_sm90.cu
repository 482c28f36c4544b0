// W on Hopper for float16; a file of its own so that both types compile at a time.
#ifdef ZBKERN_NO_SM90
#include "cuda_wgrad.h"
namespace zbkern {
void wgrad_float16_sm90(const Wgrad&) { throw std::logic_error("zbkern: not compiled for 9.0a"); }
}  // namespace zbkern
#else
#include "cuda_wgrad_sm90.cuh"
namespace zbkern {
void wgrad_float16_sm90(const Wgrad& task) { sm90::choose<cutlass::half_t>(task); }
}  // namespace zbkern
#endif
