// As much of the CUDA runtime as the CUDA extension uses, which is linked without it (-cudart none).
#include <cstdio>
#include <map>

#include "driver.h"

using namespace ptx;

extern "C" {

namespace {
std::map<const void*, std::string> names_of_kernels;
std::map<std::string, Handle*> kernels_by_name;
thread_local int runtime_error = 0;
}  // namespace

int emu_load_file(const char* path) {  // PTX of kernels that the runtime launches by name
  FILE* file = fopen(path, "rb");
  if (!file) return 1;
  std::string text;
  char buffer[65536];
  for (std::size_t n; (n = fread(buffer, 1, sizeof(buffer), file));) text.append(buffer, n);
  fclose(file);
  CUmodule module;
  if (cuModuleLoadData(&module, text.c_str())) return 2;
  auto& read = *reinterpret_cast<Module*>(module);
  for (const auto& each : read.functions) kernels_by_name[each->name] = handle_of(read, each->name);
  return 0;
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  names_of_kernels[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
int __cudaGetKernel(void** kernel, const void* host) {
  *kernel = const_cast<void*>(host);
  return 0;
}
int __cudaLaunchKernel(void*, ...) { return runtime_error = 98; }
unsigned __cudaPopCallConfiguration(void*, void*, size_t*, void*) { return 98; }
int cudaGetLastError() {
  const int found = runtime_error;
  runtime_error = 0;
  return found;
}
int cudaPeekAtLastError() { return runtime_error; }
const char* cudaGetErrorString(int) { return said(); }
const char* cudaGetErrorName(int) { return said(); }
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaSetDevice(int) { return 0; }
int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  return cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), 0);
}
int cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long, int* result) {
  *found =
      std::strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (result) *result = *found ? 0 : 1;
  return 0;
}
int cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long flags, int* result) {
  return cudaGetDriverEntryPointByVersion(name, found, 12000, flags, result);
}

static Handle* runtime_kernel(const void* host) {
  const auto name = names_of_kernels.find(host);
  if (name == names_of_kernels.end()) return refuse("the runtime does not know that kernel"), nullptr;
  const auto found = kernels_by_name.find(name->second);
  if (found == kernels_by_name.end()) return refuse("no PTX was loaded of " + name->second), nullptr;
  return found->second;
}

int cudaFuncSetAttribute(const void* host, int attribute, int value) {
  Handle* handle = runtime_kernel(host);
  if (!handle) return runtime_error = 98;
  return runtime_error = attribute == 8 ? cuFuncSetAttribute(reinterpret_cast<CUfunction>(handle),
                                                             CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, value)
                                        : 0;
}

int cudaLaunchKernelExC(const CUlaunchConfig* c, const void* host,
                        void** values) {  // whose configuration has the driver's layout but for the order
  struct RuntimeConfig {
    unsigned grid[3], block[3];
    size_t shared;
    void* stream;
    CUlaunchAttribute* attributes;
    unsigned count;
  };
  const auto* r = reinterpret_cast<const RuntimeConfig*>(c);
  Handle* handle = runtime_kernel(host);
  if (!handle) return runtime_error = 98;
  cuCtxSetCurrent(reinterpret_cast<CUcontext>(1));
  CUlaunchConfig made{};
  made.gridDimX = r->grid[0], made.gridDimY = r->grid[1], made.gridDimZ = r->grid[2];
  made.blockDimX = r->block[0], made.blockDimY = r->block[1], made.blockDimZ = r->block[2];
  made.sharedMemBytes = static_cast<unsigned>(r->shared), made.attrs = r->attributes, made.numAttrs = r->count;
  return runtime_error = cuLaunchKernelEx(&made, reinterpret_cast<CUfunction>(handle), values, nullptr);
}

}  // extern "C"
