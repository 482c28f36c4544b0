// The parameters and numbers of threads of the kernels of a cubin, whose launches are checked but do not run.
#include <elf.h>

#include "driver.h"

namespace ptx {
namespace {

enum { kMaxThreads = 0x05, kRequiredThreads = 0x10 };  // attributes of .nv.info
enum { kParameter = 0x17, kParameterOfMany = 0x45 };   // the second where there are more than 4 KB of them

void read_attributes(Function& function, const unsigned char* at, const unsigned char* end) {
  while (at + 4 <= end) {
    const int format = at[0], attribute = at[1], length = at[2] | at[3] << 8;
    const unsigned char* value = at + 4;
    u32 words[3] = {};
    at = value + (format == 4 ? length : 0);
    if (format != 4) continue;
    std::memcpy(words, value, length < 12 ? static_cast<std::size_t>(length) : 12);
    if (attribute == kRequiredThreads) function.threads = static_cast<int>(words[0]);
    if (attribute == kMaxThreads) function.max_threads = static_cast<int>(words[0]);
    if (attribute != kParameter && attribute != kParameterOfMany) continue;
    const u32 ordinal = words[1] & 0xffff;
    if (ordinal >= function.parameters.size()) function.parameters.resize(ordinal + 1);
    function.parameters[ordinal] = {words[1] >> 16, attribute == kParameter ? words[2] >> 18 : words[2] & 0xffff};
  }
}

}  // namespace

std::unique_ptr<Module> read_cubin(const unsigned char* bytes) {
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(bytes);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(bytes + header->e_shoff);
  const auto* names = reinterpret_cast<const char*>(bytes + sections[header->e_shstrndx].sh_offset);
  auto module = std::make_unique<Module>();
  for (int i = 0; i < header->e_shnum; ++i) {
    const std::string name = names + sections[i].sh_name, prefix = ".nv.info.";
    if (name.compare(0, prefix.size(), prefix)) continue;
    auto function = std::make_unique<Function>();
    function->name = name.substr(prefix.size());
    const unsigned char* first = bytes + sections[i].sh_offset;
    read_attributes(*function, first, first + sections[i].sh_size);
    module->functions.push_back(std::move(function));
  }
  return module;
}

}  // namespace ptx
