// A CUDA driver whose launches run here: what Triton's launcher, zbkern's and the CUDA runtime stand-in call of
// libcuda. Modules are PTX text. Preloaded (LD_PRELOAD), it also keeps a list of what torch allocates, so that accesses
// beside it are found.
#include <cuda.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>

#include "machine.h"

using namespace ptx;

// ---- what torch allocates ----

extern "C" void* __libc_memalign(size_t, size_t);
extern "C" void __libc_free(void*);

namespace {

constexpr std::size_t kSlots = 1 << 18;
constexpr std::size_t kAlign = 512;  // as torch's allocator of CUDA memory
struct Slot {
  std::uintptr_t address;
  std::size_t bytes;
};
Slot slots[kSlots];
std::atomic_flag busy = ATOMIC_FLAG_INIT;
std::atomic<bool> watching{false};

struct Guard {
  Guard() {
    while (busy.test_and_set(std::memory_order_acquire)) {}
  }
  ~Guard() { busy.clear(std::memory_order_release); }
};

std::size_t place_of(std::uintptr_t address) { return (address / kAlign * 0x9e3779b97f4a7c15ull) >> 46; }

void remember(void* p, std::size_t bytes) {
  const Guard guard;
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  for (std::size_t i = place_of(address), tried = 0; tried < kSlots; ++tried, i = (i + 1) % kSlots)
    if (slots[i].address <= 1 || slots[i].address == address) {
      slots[i] = {address, bytes};
      return;
    }
}

void forget(void* p) {
  const Guard guard;
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  for (std::size_t i = place_of(address), tried = 0; tried < kSlots && slots[i].address; ++tried, i = (i + 1) % kSlots)
    if (slots[i].address == address) {
      slots[i] = {1, 0};
      return;
    }
}

Allocations known;

void snapshot() {
  known.ranges.clear();
  std::vector<std::pair<u64, u64>> found;
  found.reserve(4096);
  {
    const Guard guard;
    for (const Slot& each : slots)
      if (each.address > 1 && found.size() < found.capacity())
        found.emplace_back(each.address, each.address + each.bytes);
  }
  std::sort(found.begin(), found.end());
  known.ranges = found;
}

}  // namespace

extern "C" int posix_memalign(void** p, size_t align, size_t bytes) {
  void* made = __libc_memalign(std::max(align, kAlign), bytes + 256);
  if (!made) return 12;
  watching = true;
  remember(made, bytes);
  *p = made;
  return 0;
}

extern "C" void free(void* p) {
  if (p && watching && reinterpret_cast<std::uintptr_t>(p) % kAlign == 0) forget(p);
  __libc_free(p);
}

namespace ptx {
Allocations* allocations_of_process() { return watching ? &known : nullptr; }
}  // namespace ptx

// ---- the driver ----

namespace {

Options options;
char what[2048] = "unknown error";
bool verbose = false;

struct Launched {
  std::string name;
  Config config;
  u64 steps;
  double seconds;
  std::size_t findings;
};
std::vector<Launched> launched;
std::vector<std::pair<std::string, Finding>> findings;  // kernel, finding
std::vector<std::unique_ptr<Module>> modules;

struct Handle {  // a CUfunction
  Module* module;
  Function* function;
  unsigned shared = 48 * 1024;
};
std::map<std::string, std::unique_ptr<Handle>> handles_by_name;
std::vector<std::unique_ptr<Handle>> handles;

CUresult refuse(const std::string& text, CUresult result = CUDA_ERROR_INVALID_VALUE) {
  snprintf(what, sizeof(what), "%s", text.c_str());
  return result;
}

CUresult launch(Handle* handle, Config config, void** values) {
  const Function& f = *handle->function;
  const unsigned threads = config.block[0] * config.block[1] * config.block[2];
  const auto text = [](long long v) { return std::to_string(v); };
  if (threads < 1 || threads > 1024) return refuse(text(threads) + " threads");
  if (f.threads && static_cast<int>(threads) != f.threads)
    return refuse(text(threads) + " threads, not those it was compiled for");
  if (f.max_threads && static_cast<int>(threads) > f.max_threads)
    return refuse(text(threads) + " threads, more than it was compiled for");
  if (config.shared > handle->shared) return refuse(text(config.shared) + " bytes of shared memory");
  for (int d = 0; d < 3; ++d)
    if (!config.grid[d] || config.grid[d] % config.cluster[d]) return refuse("a grid of " + text(config.grid[d]));
  Grid g;
  g.function = &f, g.module = handle->module, g.config = config, g.options = options;
  g.parameters.assign(f.parameter_bytes + 256, 0);
  g.parameter = g.parameters.data() + (128 - reinterpret_cast<std::uintptr_t>(g.parameters.data()) % 128) % 128;
  for (std::size_t i = 0; i < f.parameters.size(); ++i) {
    if (!values[i]) return refuse("parameter " + text(static_cast<long long>(i)) + " is missing");
    std::memcpy(g.parameter + f.parameters[i].offset, values[i], f.parameters[i].size);
  }
  snapshot();
  const auto begin = std::chrono::steady_clock::now();
  std::string failure;
  try {
    run_grid(g);
  } catch (const std::exception& error) {
    failure = error.what();
    grid = nullptr;
    if (g.findings.empty() || failure.find("deadlock") == std::string::npos) g.findings.push_back({"stopped", failure});
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  launched.push_back({f.name, config, g.steps, seconds, g.findings.size()});
  for (const auto& each : g.findings) {
    findings.emplace_back(f.name, each);
    if (verbose) fprintf(stderr, "ptx: %s: %s: %s\n", f.name.c_str(), each.kind.c_str(), each.text.c_str());
  }
  if (verbose)
    fprintf(stderr, "ptx: %s grid %u %u %u block %u shared %u: %llu steps, %.3f s\n", f.name.c_str(), config.grid[0],
            config.grid[1], config.grid[2], threads, config.shared, static_cast<unsigned long long>(g.steps), seconds);
  if (!failure.empty()) return refuse("ptx emulator: " + f.name + ": " + failure, CUDA_ERROR_LAUNCH_FAILED);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// ---- of our own ----

void emu_options(unsigned long long seed, int races, int uninitialised, int proxies, int capability, int says) {
  options.seed = seed, options.races = races, options.uninitialised = uninitialised, options.proxies = proxies,
  options.capability = capability;
  verbose = says;
}

// Writes "kernel\tkind\ttext\n" for each finding, with newlines in texts as spaces, and forgets them; returns the bytes
// needed.
long emu_findings(char* out, long most) {
  std::string all;
  for (const auto& [kernel, each] : findings) {
    std::string text = each.text;
    std::replace(text.begin(), text.end(), '\n', ' ');
    std::replace(text.begin(), text.end(), '\t', ' ');
    all += kernel + "\t" + each.kind + "\t" + text + "\n";
  }
  const long needed = static_cast<long>(all.size()) + 1;
  if (needed <= most) {
    std::memcpy(out, all.c_str(), static_cast<std::size_t>(needed));
    findings.clear();
  }
  return needed;
}

long emu_launches(char* out, long most) {
  std::string all;
  for (const auto& each : launched)
    all += each.name + "\t" + std::to_string(each.config.grid[0]) + "," + std::to_string(each.config.grid[1]) + "," +
           std::to_string(each.config.grid[2]) + "\t" + std::to_string(each.config.block[0]) + "\t" +
           std::to_string(each.steps) + "\t" + std::to_string(each.seconds) + "\t" + std::to_string(each.findings) +
           "\n";
  const long needed = static_cast<long>(all.size()) + 1;
  if (needed <= most) {
    std::memcpy(out, all.c_str(), static_cast<std::size_t>(needed));
    launched.clear();
  }
  return needed;
}

void emu_allocation(void* p, unsigned long bytes, int add) {
  if (add) remember(p, bytes), watching = true;
  else forget(p);
}

// Instructions of a module's functions that have no handler, a line each.
long emu_unsupported(const char* text, char* out, long most) {
  std::string all;
  try {
    const auto module = parse(text);
    for (const auto& f : module->functions) {
      all += "function " + f->name + " " + std::to_string(f->code.size()) + "\n";
      for (const auto& each : f->unsupported) all += each + "\n";
    }
  } catch (const std::exception& error) { all = std::string("error ") + error.what(); }
  const long needed = static_cast<long>(all.size()) + 1;
  if (needed <= most) std::memcpy(out, all.c_str(), static_cast<std::size_t>(needed));
  return needed;
}

// ---- libcuda ----

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = what;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** text) {
  *text = what;
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute, CUdeviceptr pointer) {
  *static_cast<CUdeviceptr*>(data) = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const int shared = (options.capability >= 90 ? 227 : 163) * 1024;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared + 1024; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = options.capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = options.capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (std::memcmp(image, "\177ELF", 4) == 0) return refuse("a cubin; the emulator takes PTX");
  try {
    modules.push_back(parse(static_cast<const char*>(image)));
  } catch (const std::exception& error) { return refuse(error.what(), CUDA_ERROR_INVALID_PTX); }
  *module = reinterpret_cast<CUmodule>(modules.back().get());
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  auto* from = reinterpret_cast<Module*>(module);
  for (const auto& each : from->functions)
    if (each->name == name) {
      handles.emplace_back(new Handle{from, each.get()});
      *function = reinterpret_cast<CUfunction>(handles.back().get());
      return CUDA_SUCCESS;
    }
  return refuse(std::string("the module has no ") + name, CUDA_ERROR_NOT_FOUND);
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value > (options.capability >= 90 ? 227 : 163) * 1024)
    return refuse(std::to_string(value) + " bytes of shared memory");
  reinterpret_cast<Handle*>(function)->shared = static_cast<unsigned>(value);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t place, size_t* offset, size_t* size) {
  const auto& parameters = reinterpret_cast<Handle*>(function)->function->parameters;
  if (place >= parameters.size()) return refuse("there is no parameter " + std::to_string(place));
  *offset = parameters[place].offset, *size = parameters[place].size;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* lengths, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}, widths[] = {0, 32, 64, 128};
  const auto number = [](unsigned long long v) { return std::to_string(v); };
  if (reinterpret_cast<std::uintptr_t>(map) % 64) return refuse("the descriptor does not lie at a multiple of 64");
  if (static_cast<unsigned>(type) > 12) return refuse("data type " + number(type));
  const unsigned size = static_cast<unsigned>(sizes[type]);
  if (rank < 1 || rank > 5) return refuse(number(rank) + " dimensions");
  if (!address || reinterpret_cast<std::uintptr_t>(address) % 16)
    return refuse("a tensor that begins at " + hex(reinterpret_cast<u64>(address)));
  if (interleave) return refuse("an interleaved tensor");
  if (static_cast<unsigned>(swizzle) > 3) return refuse("swizzle " + number(swizzle));
  TensorMap made{};
  made.mark = kMark, made.address = reinterpret_cast<u64>(address), made.type = static_cast<u8>(type),
  made.rank = static_cast<u8>(rank);
  made.swizzle = static_cast<u8>(swizzle), made.fill = static_cast<u8>(fill), made.element = static_cast<u8>(size);
  for (unsigned i = 0; i < rank; ++i) {
    if (!lengths[i] || lengths[i] > 1ull << 32) return refuse("a length of " + number(lengths[i]));
    if (!box[i] || box[i] > 256) return refuse("a box of " + number(box[i]));
    if (steps[i] != 1) return refuse("element steps of " + number(steps[i]));
    made.lengths[i] = static_cast<u32>(lengths[i] - 1), made.box[i] = static_cast<u16>(box[i]), made.steps[i] = 1;
    if (i + 1 == rank) break;
    if (strides[i] % 16 || strides[i] >= 1ull << 40) return refuse("a stride of " + number(strides[i]) + " bytes");
    made.strides[i] = strides[i];
  }
  if (box[0] * size % 16) return refuse("a box whose rows have " + number(box[0] * size) + " bytes");
  if (swizzle && static_cast<int>(box[0] * size) > widths[swizzle])
    return refuse("a box of " + number(box[0] * size) + " bytes, more than swizzled");
  if (swizzle && static_cast<int>(box[0] * size) < widths[swizzle])
    return refuse("emulator: a box of " + number(box[0] * size) + " bytes, less than swizzled");
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** values, void**) {
  auto* handle = reinterpret_cast<Handle*>(function);
  Config config{{c->gridDimX, c->gridDimY, c->gridDimZ},
                {c->blockDimX, c->blockDimY, c->blockDimZ},
                c->sharedMemBytes,
                {1, 1, 1}};
  if (handle->function->cluster) config.cluster[0] = static_cast<u32>(handle->function->cluster);
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      config.cluster[0] = c->attrs[i].value.clusterDim.x, config.cluster[1] = c->attrs[i].value.clusterDim.y,
      config.cluster[2] = c->attrs[i].value.clusterDim.z;
    }
  return launch(handle, config, values);
}

// For programs of a few lines: the kernel `name` of PTX text, with parameters one after the other.
int emu_run(const char* text, const char* name, const unsigned* grid_block_shared, void** values) {
  CUmodule module;
  CUfunction function;
  if (cuModuleLoadData(&module, text) || cuModuleGetFunction(&function, module, name)) return 1;
  reinterpret_cast<Handle*>(function)->shared = 232448;
  Config config{{grid_block_shared[0], grid_block_shared[1], grid_block_shared[2]},
                {grid_block_shared[3], 1, 1},
                grid_block_shared[4],
                {1, 1, 1}};
  return launch(reinterpret_cast<Handle*>(function), config, values);
}

const char* emu_error() { return what; }

// ---- as much of the CUDA runtime as the extension uses: link it with -cudart none ----

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
  for (const auto& each : reinterpret_cast<Module*>(module)->functions) {
    handles.emplace_back(new Handle{reinterpret_cast<Module*>(module), each.get()});
    kernels_by_name[each->name] = handles.back().get();
  }
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
const char* cudaGetErrorString(int) { return what; }
const char* cudaGetErrorName(int) { return what; }
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
  CUlaunchConfig made{};
  made.gridDimX = r->grid[0], made.gridDimY = r->grid[1], made.gridDimZ = r->grid[2];
  made.blockDimX = r->block[0], made.blockDimY = r->block[1], made.blockDimZ = r->block[2];
  made.sharedMemBytes = static_cast<unsigned>(r->shared), made.attrs = r->attributes, made.numAttrs = r->count;
  return runtime_error = cuLaunchKernelEx(&made, reinterpret_cast<CUfunction>(handle), values, nullptr);
}

}  // extern "C"
