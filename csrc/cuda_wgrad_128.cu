// W in tiles of 128 columns; a file of its own so that both compile at a time. Both 16-bit types are in one file: most of
// what the compiler's front end makes of CUTLASS is the same for them, and differs between tiles.
#include "cuda_wgrad.cuh"

namespace zbkern {
void wgrad_128(const Wgrad& task) { sm90::choose<128>(task); }
}  // namespace zbkern
