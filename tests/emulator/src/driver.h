// What the driver and the stand-in of the CUDA runtime share.
#pragma once
#include <cuda.h>

#include "machine.h"

namespace ptx {

struct Handle {  // a CUfunction
  Module* module;
  Function* function;
  u32 shared = 48 * 1024;
};

CUresult refuse(const std::string& text, CUresult result = CUDA_ERROR_INVALID_VALUE);
const char* said();  // when something was refused last
Handle* handle_of(Module& module, const std::string& name);
std::unique_ptr<Module> read_cubin(const unsigned char* bytes);  // functions without code
void note_allocations();                                         // that torch holds now

}  // namespace ptx
