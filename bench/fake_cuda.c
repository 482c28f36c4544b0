// A CUDA driver for machines without a GPU: what Triton's launcher calls of libcuda. A launch does nothing but is checked
// as the driver would: descriptors (cuTensorMapEncodeTiled in the driver API), the number of threads, shared memory, and
// that each parameter that the machine code says it has can be read, a descriptor where 128 bytes are taken.
#include <cuda.h>
#include <elf.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PARAMETERS = 256, MOST_BYTES = 32764 };
enum { MAX_THREADS = 0x05, REQUIRED_THREADS = 0x10 };  // attributes of .nv.info
enum { PARAMETER = 0x17, PARAMETER_OF_MANY = 0x45 };   // the second where there are more than 4 KB of them

static const uint64_t MARK = 0x7a626b65726e2e31;  // in what cuTensorMapEncodeTiled encodes

typedef struct {
  int parameters, threads, size[MOST_PARAMETERS], offset[MOST_PARAMETERS];
  unsigned shared;
} Kernel;

typedef struct {
  unsigned char *bytes;
} Module;

static char what[512] = "unknown error";
static int capability = 90;
static volatile unsigned char sink;

void fake_capability(int value) { capability = value; }

static CUresult refuse(const char *format, long long value) {
  snprintf(what, sizeof(what), format, value);
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  return *text = what, CUDA_SUCCESS;
}
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
static __thread CUcontext current;  // none in a new thread
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  return *count = 1, CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  const int shared = capability >= 90 ? 227 * 1024 : 163 * 1024;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared + 1024; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

// A module is a cubin, whose length its own header tells.
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  const Elf64_Ehdr *header = image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return refuse("no cubin", 0);
  Module *made = malloc(sizeof(Module));
  made->bytes = (unsigned char *)image;  // Triton keeps it as long as the kernel
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}

static void read_attributes(Kernel *kernel, const unsigned char *at, const unsigned char *end) {
  while (at + 4 <= end) {
    const int format = at[0], attribute = at[1], length = at[2] | at[3] << 8;
    const unsigned char *value = at + 4;
    uint32_t words[3] = {0, 0, 0};
    at = value + (format == 4 ? length : 0);
    if (format != 4) continue;
    memcpy(words, value, length < 12 ? length : 12);
    if (attribute == REQUIRED_THREADS) kernel->threads = words[0];
    if (attribute == MAX_THREADS && !kernel->threads) kernel->threads = -(int)words[0];
    if (attribute != PARAMETER && attribute != PARAMETER_OF_MANY) continue;
    const int ordinal = words[1] & 0xffff;
    if (ordinal >= MOST_PARAMETERS) continue;
    kernel->size[ordinal] = attribute == PARAMETER ? words[2] >> 18 : words[2] & 0xffff;
    kernel->offset[ordinal] = words[1] >> 16;
    if (ordinal >= kernel->parameters) kernel->parameters = ordinal + 1;
  }
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  const unsigned char *bytes = ((Module *)module)->bytes;
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)bytes;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(bytes + header->e_shoff);
  const char *names = (const char *)bytes + sections[header->e_shstrndx].sh_offset;
  char wanted[1024];
  snprintf(wanted, sizeof(wanted), ".nv.info.%s", name);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (strcmp(names + sections[i].sh_name, wanted)) continue;
    Kernel *kernel = calloc(1, sizeof(Kernel));
    kernel->shared = 48 * 1024;
    const unsigned char *first = bytes + sections[i].sh_offset;
    read_attributes(kernel, first, first + sections[i].sh_size);
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
  }
  snprintf(what, sizeof(what), "the cubin has no %s", name);
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value > (capability >= 90 ? 227 : 163) * 1024) return refuse("%lld bytes of shared memory", value);
  ((Kernel *)function)->shared = value;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t place, size_t *offset, size_t *size) {
  const Kernel *kernel = (const Kernel *)function;
  if (place >= (size_t)kernel->parameters) return refuse("there is no parameter %lld", place);
  return *offset = kernel->offset[place], *size = kernel->size[place], CUDA_SUCCESS;
}

static int bytes_of(CUtensorMapDataType type) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return (unsigned)type < sizeof(sizes) / sizeof(*sizes) ? sizes[type] : 0;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *lengths, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const int widths[] = {0, 32, 64, 128};
  const int size = bytes_of(type);
  if ((uintptr_t)map % 64) return refuse("the descriptor lies at %lld bytes after a multiple of 64", (uintptr_t)map % 64);
  if (!size) return refuse("data type %lld", type);
  if (rank < 1 || rank > 5) return refuse("%lld dimensions", rank);
  if (!address || (uintptr_t)address % 16) return refuse("it begins at %lld", (uintptr_t)address);
  for (unsigned i = 0; i < rank; ++i) {
    if (!lengths[i] || lengths[i] > 1ULL << 32) return refuse("a length of %lld", lengths[i]);
    if (!box[i] || box[i] > 256) return refuse("a box of %lld", box[i]);
    if (steps[i] < 1 || steps[i] > 8) return refuse("element steps of %lld", steps[i]);
    if (i + 1 == rank) break;
    if (!strides[i] || strides[i] % 16 || strides[i] >= 1ULL << 40) return refuse("a stride of %lld bytes", strides[i]);
  }
  if (box[0] * size % 16) return refuse("a box whose rows have %lld bytes", box[0] * size);
  if ((unsigned)swizzle > 3) return refuse("swizzle %lld", swizzle);
  if (swizzle && (int)(box[0] * size) > widths[swizzle]) return refuse("a box of %lld bytes, more than swizzled", box[0] * size);
  const uint64_t said[] = {MARK, (uintptr_t)address, type, rank, interleave, swizzle, promotion, fill};
  memset(map, 0, sizeof(*map));
  memcpy(map, said, sizeof(said));
  for (unsigned i = 0; i < rank; ++i) {  // the rest in one number
    const uint64_t each[] = {lengths[i], box[i], steps[i], i + 1 < rank ? strides[i] : 0};
    for (int k = 0; k < 4; ++k) map->opaque[15] = (map->opaque[15] ^ each[k]) * 0x100000001b3;
  }
  return CUDA_SUCCESS;
}

// What launches were given while fake_keep(1): the function, the configuration (of attributes their number), the parameters.
static unsigned char given[1 << 20];
static size_t given_bytes;
static int keeps;

const unsigned char *fake_given(size_t *bytes) { return *bytes = given_bytes, given; }
void fake_keep(int value) { keeps = value, given_bytes = 0; }

static void keep(const void *bytes, size_t count) {
  if (!keeps || given_bytes + count > sizeof(given)) return;
  memcpy(given + given_bytes, bytes, count);
  given_bytes += count;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **values, void **extra) {
  const Kernel *kernel = (const Kernel *)function;
  const int threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  int total = 0;
  if (!current) return refuse("no context in this thread, where there should be %lld", 1);
  if (threads < 1 || threads > 1024) return refuse("%lld threads", threads);
  if (kernel->threads > 0 && threads != kernel->threads) return refuse("%lld threads, not those it was compiled for", threads);
  if (kernel->threads < 0 && threads > -kernel->threads) return refuse("%lld threads, more than it was compiled for", threads);
  if (config->sharedMemBytes > kernel->shared) return refuse("%lld bytes of shared memory", config->sharedMemBytes);
  if (config->gridDimX > 0x7fffffffU) return refuse("a grid of %lld", config->gridDimX);
  keep(&function, sizeof(function));
  keep(config, offsetof(CUlaunchConfig, sharedMemBytes) + sizeof(config->sharedMemBytes));
  keep(&config->hStream, sizeof(config->hStream));
  keep(&config->numAttrs, sizeof(config->numAttrs));
  if (config->gridDimY > 65535 || config->gridDimZ > 65535) return refuse("a grid of %lld", config->gridDimY);
  if (!kernel->parameters) return refuse("a kernel of %lld parameters, where Triton's have two at least", 0);
  for (int i = 0; i < kernel->parameters; ++i) {
    const unsigned char *value = values[i];
    if (!value) return refuse("parameter %lld is missing", i);
    for (int byte = 0; byte < kernel->size[i]; ++byte) sink = value[byte];
    if (kernel->size[i] == sizeof(CUtensorMap) && memcmp(value, &MARK, sizeof(MARK)))
      return refuse("parameter %lld is no descriptor", i);
    keep(value, kernel->size[i]);
    total += kernel->size[i];
  }
  if (total > MOST_BYTES) return refuse("%lld bytes of parameters", total);
  return CUDA_SUCCESS;
}
