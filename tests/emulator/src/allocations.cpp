// What torch allocates: a list of it, so that accesses beside it are found.
#include <elf.h>
#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "machine.h"

namespace ptx {
namespace {

constexpr std::size_t kSlots = 1 << 18;
constexpr std::size_t kAlign = 512;   // as torch's allocator of CUDA memory
constexpr std::size_t kBehind = 256;  // bytes that a kernel may write beside an allocation without harm to this process
struct Slot {
  std::uintptr_t address;
  std::size_t bytes;
};
Slot slots[kSlots];
std::atomic_flag busy = ATOMIC_FLAG_INIT;
bool watching = false;
Allocations known;

struct Guard {
  Guard() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
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

int allocate(void** p, std::size_t align, std::size_t bytes) {
  const int failed = posix_memalign(p, std::max(align, kAlign), bytes + kBehind);
  if (!failed) remember(*p, bytes);
  return failed;
}

void release(void* p) {
  if (p && reinterpret_cast<std::uintptr_t>(p) % kAlign == 0) forget(p);
  free(p);
}

// Where a library calls posix_memalign and free, it calls these two from now on.
void redirect(const dl_phdr_info& library, const ElfW(Dyn) * entries) {
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  std::pair<const ElfW(Rela)*, std::size_t> tables[2] = {};
  for (; entries->d_tag != DT_NULL; ++entries) {
    const auto address = entries->d_un.d_ptr;
    switch (entries->d_tag) {
      case DT_SYMTAB: symbols = reinterpret_cast<const ElfW(Sym)*>(address); break;
      case DT_STRTAB: names = reinterpret_cast<const char*>(address); break;
      case DT_JMPREL: tables[0].first = reinterpret_cast<const ElfW(Rela)*>(address); break;
      case DT_PLTRELSZ: tables[0].second = entries->d_un.d_val / sizeof(ElfW(Rela)); break;
      case DT_RELA: tables[1].first = reinterpret_cast<const ElfW(Rela)*>(address); break;
      case DT_RELASZ: tables[1].second = entries->d_un.d_val / sizeof(ElfW(Rela)); break;
    }
  }
  const std::uintptr_t page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const auto& [table, count] : tables)
    for (std::size_t i = 0; i < count; ++i) {
      const std::string name = names + symbols[ELF64_R_SYM(table[i].r_info)].st_name;
      void* const by = name == "posix_memalign" ? reinterpret_cast<void*>(&allocate)
                       : name == "free"         ? reinterpret_cast<void*>(&release)
                                                : nullptr;
      if (!by) continue;
      const std::uintptr_t slot = library.dlpi_addr + table[i].r_offset, start = slot / page * page;
      if (mprotect(reinterpret_cast<void*>(start), page, PROT_READ | PROT_WRITE)) continue;
      *reinterpret_cast<void**>(slot) = by;
      watching |= name == "posix_memalign";
    }
}

int visit(dl_phdr_info* library, std::size_t, void*) {
  if (!std::strstr(library->dlpi_name, "/libc10.so")) return 0;  // torch's allocator of the CPU
  for (int i = 0; i < library->dlpi_phnum; ++i)
    if (library->dlpi_phdr[i].p_type == PT_DYNAMIC)
      redirect(*library, reinterpret_cast<const ElfW(Dyn)*>(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr));
  return 1;
}

}  // namespace

Allocations* allocations_of_process() { return watching ? &known : nullptr; }

void note_allocations() {
  known.ranges.clear();
  const Guard guard;
  for (const Slot& each : slots)
    if (each.address > 1) known.ranges.emplace_back(each.address, each.address + each.bytes);
  std::sort(known.ranges.begin(), known.ranges.end());
}

}  // namespace ptx

// From now on memory that torch takes is known. Returns whether it is: the process has torch, and it allocates so.
extern "C" int emu_watch() {
  if (!ptx::watching) dl_iterate_phdr(&ptx::visit, nullptr);
  return ptx::watching;
}
