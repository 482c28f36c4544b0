// A CUDA driver whose launches run here, or are checked only: what Triton's launcher, zbkern's and the stand-in of the
// CUDA runtime call of libcuda. Modules are PTX text, or cubins, which are checked.
#include "driver.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

using namespace ptx;

namespace {

constexpr u32 kMostParameterBytes = 32764;

Options options;
char what[2048] = "unknown error";
std::string launched;                                   // a line for each launch that ran: kernel, seconds
std::vector<std::pair<std::string, Finding>> findings;  // kernel, finding
std::vector<std::unique_ptr<Module>> modules;
std::vector<std::unique_ptr<Handle>> handles;
thread_local CUcontext current;  // none in a new thread
bool keeps = false;
long encoded = 0;   // descriptors
std::string given;  // to launches since emu_keep(1): the function, the configuration, the parameters

void keep(const void* bytes, std::size_t count) { given.append(static_cast<const char*>(bytes), count); }

int shared_memory() {  // that a block may have
  const int c = options.capability;
  return (c == 86 || c == 89 || c >= 120 ? 99 : c < 90 ? 163 : 227) * 1024;
}

CUresult run(const Handle& handle, const Config& config, void** values) {
  const Function& f = *handle.function;
  if (f.code.empty()) return refuse("a cubin; the emulator runs PTX");
  Grid g;
  g.function = &f, g.module = handle.module, g.config = config, g.options = options;
  g.parameters.assign(f.parameter_bytes + 256, 0);
  g.parameter = g.parameters.data() + (128 - reinterpret_cast<std::uintptr_t>(g.parameters.data()) % 128) % 128;
  for (std::size_t i = 0; i < f.parameters.size(); ++i)
    std::memcpy(g.parameter + f.parameters[i].offset, values[i], f.parameters[i].size);
  note_allocations();
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
  launched += f.name + "\t" + std::to_string(seconds) + "\n";
  for (const auto& each : g.findings) findings.emplace_back(f.name, each);
  if (!failure.empty()) return refuse("ptx emulator: " + f.name + ": " + failure, CUDA_ERROR_LAUNCH_FAILED);
  return CUDA_SUCCESS;
}

CUresult launch(const Handle& handle, const Config& config, void** values) {
  const Function& f = *handle.function;
  const int threads = static_cast<int>(config.block[0] * config.block[1] * config.block[2]);
  const auto text = [](auto value) { return std::to_string(value); };
  if (!current) return refuse("no context in this thread");
  if (threads < 1 || threads > 1024) return refuse(text(threads) + " threads");
  if (f.threads && threads != f.threads) return refuse(text(threads) + " threads, not those it was compiled for");
  if (f.max_threads && threads > f.max_threads)
    return refuse(text(threads) + " threads, more than it was compiled for");
  if (config.shared > handle.shared) return refuse(text(config.shared) + " bytes of shared memory");
  for (int d = 0; d < 3; ++d)
    if (!config.grid[d] || config.grid[d] % config.cluster[d] || config.grid[d] > (d ? 65535u : 0x7fffffffu))
      return refuse("a grid of " + text(config.grid[d]));
  if (f.parameters.empty()) return refuse("a kernel without parameters");
  u32 bytes = 0;
  for (std::size_t i = 0; i < f.parameters.size(); ++i) {
    const u32 size = f.parameters[i].size;
    if (!values[i]) return refuse("parameter " + text(i) + " is missing");
    if (size == sizeof(TensorMap) && std::memcmp(values[i], &kMark, sizeof(kMark)))
      return refuse("parameter " + text(i) + " is no descriptor");
    if (keeps) keep(values[i], size);
    bytes += size;
  }
  if (bytes > kMostParameterBytes) return refuse(text(bytes) + " bytes of parameters");
  return options.runs ? run(handle, config, values) : CUDA_SUCCESS;
}

long hand_over(std::string& text, char* out, long most) {
  const long needed = static_cast<long>(text.size()) + 1;
  if (needed > most) return needed;
  std::memcpy(out, text.c_str(), static_cast<std::size_t>(needed));
  text.clear();
  return needed;
}

}  // namespace

namespace ptx {

CUresult refuse(const std::string& text, CUresult result) {
  snprintf(what, sizeof(what), "%s", text.c_str());
  return result;
}

const char* said() { return what; }

Handle* handle_of(Module& module, const std::string& name) {
  for (const auto& each : module.functions)
    if (each->name == name) return handles.emplace_back(new Handle{&module, each.get()}).get();
  refuse("the module has no " + name);
  return nullptr;
}

}  // namespace ptx

extern "C" {

// ---- of our own ----

void emu_options(unsigned long long seed, int capability, int runs) { options = {seed, capability, runs != 0}; }

// Writes "kernel\tkind\ttext\n" for each finding and forgets them; returns the bytes needed, more than `most` where it
// wrote nothing.
long emu_findings(char* out, long most) {
  std::string all;
  for (const auto& [kernel, each] : findings) {
    std::string text = each.text;
    std::replace_if(text.begin(), text.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
    all += kernel + "\t" + each.kind + "\t" + text + "\n";
  }
  const long needed = hand_over(all, out, most);
  if (needed <= most) findings.clear();
  return needed;
}

// "kernel\tseconds\n" for each launch that ran, in the same way.
long emu_launches(char* out, long most) { return hand_over(launched, out, most); }

void emu_keep(int value) { keeps = value, given.clear(); }
const char* emu_given(size_t* bytes) { return *bytes = given.size(), given.data(); }
const char* emu_error() { return what; }
long emu_encoded() { return encoded; }  // descriptors, by now

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
  *context = current;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
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
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_memory(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared_memory() + 1024; break;
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
  const bool cubin = std::memcmp(image, "\177ELF", 4) == 0;
  try {
    modules.push_back(cubin ? read_cubin(static_cast<const u8*>(image)) : parse(static_cast<const char*>(image)));
  } catch (const std::exception& error) {
    return refuse(error.what(), CUDA_ERROR_INVALID_PTX);
  }
  *module = reinterpret_cast<CUmodule>(modules.back().get());
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Handle* handle = handle_of(*reinterpret_cast<Module*>(module), name);
  *function = reinterpret_cast<CUfunction>(handle);
  return handle ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value > shared_memory()) return refuse(std::to_string(value) + " bytes of shared memory");
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
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}, widths[] = {0, 32, 64, 128};
  const auto number = [](unsigned long long v) { return std::to_string(v); };
  if (reinterpret_cast<std::uintptr_t>(map) % 64) return refuse("the descriptor does not lie at a multiple of 64");
  if (static_cast<unsigned>(type) > 12) return refuse("data type " + number(type));
  const unsigned size = static_cast<unsigned>(sizes[type]);
  if (rank < 1 || rank > 5) return refuse(number(rank) + " dimensions");
  if (!address || reinterpret_cast<std::uintptr_t>(address) % 16)
    return refuse("a tensor that begins at " + hex(reinterpret_cast<u64>(address)));
  if (interleave || fill) return refuse("an interleaved tensor, or one that is filled with nan");
  if (static_cast<unsigned>(swizzle) > 3) return refuse("swizzle " + number(swizzle));
  ++encoded;
  TensorMap made{};
  made.mark = kMark, made.address = reinterpret_cast<u64>(address), made.type = static_cast<u8>(type),
  made.rank = static_cast<u8>(rank);
  made.swizzle = static_cast<u8>(swizzle), made.promotion = static_cast<u8>(promotion),
  made.element = static_cast<u8>(size);
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
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      config.cluster[0] = c->attrs[i].value.clusterDim.x, config.cluster[1] = c->attrs[i].value.clusterDim.y,
      config.cluster[2] = c->attrs[i].value.clusterDim.z;
    }
  if (keeps) {
    keep(&function, sizeof(function)), keep(&config, sizeof(config)), keep(&c->hStream, sizeof(c->hStream));
    keep(&c->numAttrs, sizeof(c->numAttrs));
  }
  return launch(*handle, config, values);
}

}  // extern "C"
