#pragma once
#include "machine.h"
namespace ptx {
// The handler of an instruction, and what it remembers in it; null where it is another's, or is not supported.
Handler choose_alu(Instr& I);      // what computes in registers
Handler choose_convert(Instr& I);  // cvt
Handler choose_memory(Instr& I);   // loads, stores, barriers, control
Handler choose_copy(Instr& I);     // cp
Handler choose_matrix(Instr& I);   // ldmatrix, stmatrix, mma, wgmma
Handler choose_tensor(Instr& I);   // tcgen05
inline void nothing(Warp&, const Instr&, u32) {}  // what it orders or fetches is in order, or there
}  // namespace ptx
