// PTX text as a list of decoded instructions.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr u32 kAll = 0xffffffffu;

struct Warp;
struct Instr;
using Handler = void (*)(Warp&, const Instr&, u32 mask);

enum class Kind : u8 { none, reg32, reg64, pred, constant, special, sink };

enum class Space : u8 { none, global, shared, param };

struct Operand {
  Kind kind = Kind::none;
  bool negated = false;        // of a predicate
  int index = 0;               // of a register (its place in its bank), or which special register
  u64 value = 0;               // of a constant
  Space symbol = Space::none;  // where it is an address in that space
  const u32* c32 = nullptr;    // the constant, once for each lane
  const u64* c64 = nullptr;
};

struct Arg {
  enum Form : u8 { plain, address, vector, pair, label } form = plain;
  Operand base;                // of an address, too
  Operand second;              // of a pair a|b
  i64 offset = 0;              // of an address
  std::vector<Operand> items;  // of a vector, or the coordinates of an address
  int target = -1;             // of a label
  std::string name;
};

// The types that instructions name.
// clang-format off
enum class Type : u8 {
  none, u8, u16, u32, u64, s16, s32, s64, b8, b16, b32, b64, f16, f32, f64, bf16, tf32, f16x2, bf16x2, e4m3, e5m2,
  e4m3x2, pred
};
// clang-format on
int bytes_of(Type type);
Type type_of(const std::string& name);  // none where it is no type

struct Instr {
  Handler run = nullptr;
  int guard = -1;  // predicate register, -1 without one
  bool guard_negated = false;
  bool together = false;  // all lanes of the warp must be at it,
  int members = -1;       // or those that this argument names
  std::vector<Arg> args;
  std::vector<std::string> parts;  // the name, split at its dots
  Type type = Type::none, type2 = Type::none;
  Space space = Space::none;
  int n = 0, k = 0, extra = 0;  // of a matrix product, and what else a handler wants to remember
  std::string text;
  int line = 0;
  std::vector<int> used;     // registers of 32 bits that it names
  std::vector<int> written;  // those that it writes

  bool has(const char* part) const {
    for (const auto& each : parts)
      if (each == part) return true;
    return false;
  }
};

struct Symbol {
  Space space;
  u64 offset;  // in its space
  u64 size;
};

struct Parameter {
  u32 offset, size;
};

struct Function {
  std::string name;
  std::vector<Instr> code;
  std::vector<Parameter> parameters;
  u32 parameter_bytes = 0;
  int count32 = 0, count64 = 0, count_pred = 0;
  u32 static_shared = 0;  // bytes before dynamic shared memory
  int threads = 0;        // .reqntid, 0 when it says none
  int max_threads = 0;
  bool subword_shared = false;
  std::map<std::string, Symbol> symbols;
};

struct Module {
  std::vector<std::unique_ptr<Function>> functions;
  std::map<std::string, Symbol> symbols;
  std::vector<std::unique_ptr<u8[]>> memory;  // of global variables
  std::vector<std::pair<u64, u64>> ranges;    // begin and end of each
  std::unordered_map<u64, std::unique_ptr<u32[]>> constants32;
  std::unordered_map<u64, std::unique_ptr<u64[]>> constants64;
  const u32* lanes32(u64 value);
  const u64* lanes64(u64 value);
};

std::unique_ptr<Module> parse(const std::string& text);
void decode(Function& function, Module& module);  // fills `run` of every instruction

// clang-format off
enum Special : int {
  tid_x, tid_y, tid_z, ctaid_x, ctaid_y, ctaid_z, nctaid_x, nctaid_y, nctaid_z, cluster_ctaid_x, cluster_ctaid_y,
  cluster_ctaid_z, cluster_ctarank
};
// clang-format on

}  // namespace ptx
