#pragma once
#include "machine.h"
namespace ptx {
void unsupported(Warp& w, const Instr& I, u32 mask);
void mov_zero64(Warp& w, const Instr& I, u32 mask);
Handler choose_memory(Instr& I);  // loads, stores, atomics, barriers, copies, control
Handler choose_matrix(Instr& I);  // ldmatrix, mma, wgmma
Handler choose_tensor(Instr& I);  // tcgen05
}  // namespace ptx
