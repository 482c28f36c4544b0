// The types that instructions name, and constants, once for each lane.
#include <algorithm>

#include "program.h"

namespace ptx {

Type type_of(const std::string& name) {
  static const std::map<std::string, Type> names = {
      {"u8", Type::u8},         {"u16", Type::u16},       {"u32", Type::u32},   {"u64", Type::u64},
      {"s16", Type::s16},       {"s32", Type::s32},       {"s64", Type::s64},   {"b8", Type::b8},
      {"b16", Type::b16},       {"b32", Type::b32},       {"b64", Type::b64},   {"f16", Type::f16},
      {"f32", Type::f32},       {"f64", Type::f64},       {"bf16", Type::bf16}, {"tf32", Type::tf32},
      {"f16x2", Type::f16x2},   {"bf16x2", Type::bf16x2}, {"e4m3", Type::e4m3}, {"e5m2", Type::e5m2},
      {"e4m3x2", Type::e4m3x2}, {"pred", Type::pred}};
  const auto found = names.find(name);
  return found == names.end() ? Type::none : found->second;
}

int bytes_of(Type type) {
  switch (type) {
    case Type::none:
    case Type::pred: return 0;
    case Type::u8:
    case Type::b8:
    case Type::e4m3:
    case Type::e5m2: return 1;
    case Type::u16:
    case Type::s16:
    case Type::b16:
    case Type::f16:
    case Type::bf16:
    case Type::e4m3x2: return 2;
    case Type::u64:
    case Type::s64:
    case Type::b64:
    case Type::f64: return 8;
    default: return 4;
  }
}

const u32* Module::lanes32(u64 value) {
  auto& found = constants32[value];
  if (!found) {
    found.reset(new u32[32]);
    std::fill_n(found.get(), 32, static_cast<u32>(value));
  }
  return found.get();
}

const u64* Module::lanes64(u64 value) {
  auto& found = constants64[value];
  if (!found) {
    found.reset(new u64[32]);
    std::fill_n(found.get(), 32, value);
  }
  return found.get();
}

}  // namespace ptx
