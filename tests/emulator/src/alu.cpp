// Handlers of what computes in registers: in every lane by itself, or between lanes.
#include <algorithm>
#include <set>

#include "handlers.h"
#include "lanes.h"

namespace ptx {
namespace {

// ---- functions of one, two or three numbers; whole ones wrap round ----

template <class V>
constexpr bool kWhole = std::is_integral_v<V>;

constexpr auto kAdd = [](auto a, auto b) { return a + b; };
constexpr auto kSub = [](auto a, auto b) { return a - b; };
constexpr auto kMul = [](auto a, auto b) { return a * b; };
constexpr auto kMad = [](auto a, auto b, auto c) {
  if constexpr (kWhole<decltype(a)>) return a * b + c;
  else return std::fma(a, b, c);
};
constexpr auto kDiv = [](auto a, auto b) {
  if constexpr (kWhole<decltype(a)>) {
    if (b == 0) return static_cast<decltype(a)>(-1);
    if constexpr (std::is_signed_v<decltype(a)>)
      if (b == -1) return -a;
  }
  return a / b;
};
constexpr auto kRem = [](auto a, auto b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<decltype(a)>)
    if (b == -1) return decltype(a){0};
  return a % b;
};
constexpr auto kMin = [](auto a, auto b) {  // of a number and a nan: the number
  if constexpr (kWhole<decltype(a)>) return std::min(a, b);
  else return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
};
constexpr auto kMax = [](auto a, auto b) {
  if constexpr (kWhole<decltype(a)>) return std::max(a, b);
  else return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
};
constexpr auto kMinNaN = [](auto a, auto b) { return a != a || b != b ? static_cast<decltype(a)>(NAN) : kMin(a, b); };
constexpr auto kMaxNaN = [](auto a, auto b) { return a != a || b != b ? static_cast<decltype(a)>(NAN) : kMax(a, b); };
constexpr auto kMinRelu = [](auto a, auto b) { return std::max(std::min(a, b), decltype(a){0}); };
constexpr auto kMaxRelu = [](auto a, auto b) { return std::max(std::max(a, b), decltype(a){0}); };
constexpr auto kAbs = [](auto a) { return std::fabs(a); };
constexpr auto kNeg = [](auto a) { return -a; };
constexpr auto kSqrt = [](auto a) { return std::sqrt(a); };
constexpr auto kRcp = [](auto a) { return 1 / a; };
constexpr auto kEx2 = [](auto a) { return std::exp2(a); };
constexpr auto kAnd = [](auto a, auto b) { return a & b; };
constexpr auto kOr = [](auto a, auto b) { return a | b; };
constexpr auto kXor = [](auto a, auto b) { return a ^ b; };
constexpr auto kNot = [](auto a) { return ~a; };
constexpr auto kPopc = [](u32 a) { return static_cast<u32>(__builtin_popcount(a)); };

template <class T, int N, class F>
void packed(Warp& w, const Instr& I, u32 m) {  // two halves
  const u32* a = in32(w, I.args[1].base);
  const u32* b = N > 1 ? in32(w, I.args[2].base) : a;
  const u32* c = N > 2 ? in32(w, I.args[3].base) : a;
  each_lane(w, I.args[0].base, m, [&](u32 l) {
    u32 r = 0;
    for (int h = 0; h < 32; h += 16) {
      const auto part = [&](const u32* v) { return T::from(v[l] >> h & 0xffff); };
      if constexpr (N == 1) r |= T::to(F{}(part(a))) << h;
      else if constexpr (N == 2) r |= T::to(F{}(part(a), part(b))) << h;
      else r |= T::to(F{}(part(a), part(b), part(c))) << h;
    }
    return r;
  });
}

template <int N, class F>
void packed_float(Warp& w, const Instr& I, u32 m) {  // f32x2
  const u64* a = in64(w, I.args[1].base);
  const u64* b = in64(w, I.args[2].base);
  const u64* c = N > 2 ? in64(w, I.args[3].base) : a;
  u64 r[32] = {};
  for (int l = 0; l < 32; ++l)
    for (int h = 0; h < 64; h += 32) {
      const auto part = [&](const u64* v) { return f32_of(static_cast<u32>(v[l] >> h)); };
      if constexpr (N == 2) r[l] |= static_cast<u64>(bits_of(F{}(part(a), part(b)))) << h;
      else r[l] |= static_cast<u64>(bits_of(F{}(part(a), part(b), part(c)))) << h;
    }
  out64(w, I.args[0].base, m, r);
}

template <int N, class F>
Handler floats(const Instr& I, F) {
  const bool ftz = I.has("ftz");
  if constexpr (N > 1)
    if (I.has("f32x2")) return ftz ? nullptr : packed_float<N, F>;
  switch (I.type) {
    case Type::f32: return ftz ? nary<FTZ, FTZ, N, F> : nary<F32, F32, N, F>;
    case Type::f64: return nary<F64, F64, N, F>;
    case Type::f16: return nary<F16, F16, N, F>;
    case Type::bf16: return nary<BF16, BF16, N, F>;
    case Type::f16x2: return packed<F16, N, F>;
    case Type::bf16x2: return packed<BF16, N, F>;
    default: return nullptr;
  }
}

template <int N, class F>
Handler integers(const Instr& I, F) {
  switch (I.type) {
    case Type::u16:
    case Type::b16: return nary<U16, U16, N, F>;
    case Type::u32:
    case Type::b32: return nary<U32, U32, N, F>;
    case Type::s32: return nary<S32, S32, N, F>;
    case Type::u64:
    case Type::b64: return nary<U64, U64, N, F>;
    case Type::s64: return nary<S64, S64, N, F>;
    default: return nullptr;
  }
}

template <int N, class F>
Handler numbers(const Instr& I, F f) {
  if (auto found = floats<N>(I, f)) return found;
  return integers<N>(I, f);
}

template <class TI, class TO, bool ADD>
void mul_wide(Warp& w, const Instr& I, u32 m) {
  const auto *a = in<TI>(w, I.args[1].base), *b = in<TI>(w, I.args[2].base);
  const typename TO::S* c = nullptr;
  if constexpr (ADD) c = in<TO>(w, I.args[3].base);
  using V = typename TO::V;
  typename TO::S r[32];
  for (int l = 0; l < 32; ++l) {
    r[l] = TO::to(static_cast<V>(TI::from(a[l])) * static_cast<V>(TI::from(b[l])));
    if constexpr (ADD) r[l] += c[l];
  }
  out<TO>(w, I.args[0].base, m, r);
}

template <bool ADD>
Handler wide_of(const Instr& I) {
  return I.type == Type::u32   ? mul_wide<U32, U64, ADD>
         : I.type == Type::s32 ? mul_wide<S32, S64, ADD>
                               : static_cast<Handler>(nullptr);
}

template <class T, bool LEFT>
void shift(Warp& w, const Instr& I, u32 m) {
  const auto* a = in<T>(w, I.args[1].base);
  const u32 *b = in32(w, I.args[2].base), bits = 8 * static_cast<u32>(bytes_of(I.type));
  typename T::S r[32];
  for (int l = 0; l < 32; ++l) {
    const auto v = T::from(a[l]);
    if (b[l] < bits) r[l] = T::to(LEFT ? v << b[l] : v >> b[l]);
    else r[l] = T::to(!LEFT && std::is_signed_v<typename T::V> ? v >> (bits - 1) : 0);
  }
  out<T>(w, I.args[0].base, m, r);
}

template <bool LEFT>
Handler shift_of(const Instr& I) {
  switch (I.type) {
    case Type::b16:
    case Type::u16: return shift<U16, LEFT>;
    case Type::b32:
    case Type::u32: return shift<U32, LEFT>;
    case Type::s16: return shift<S16, LEFT>;
    case Type::s32: return shift<S32, LEFT>;
    case Type::b64:
    case Type::u64: return shift<U64, LEFT>;
    default: return nullptr;
  }
}

template <class T>
void selp(Warp& w, const Instr& I, u32 m) {
  const u32 p = in_pred(w, I.args[3].base);
  const auto *a = in<T>(w, I.args[1].base), *b = in<T>(w, I.args[2].base);
  typename T::S r[32];
  for (int l = 0; l < 32; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
  out<T>(w, I.args[0].base, m, r);
}

// ---- comparisons ----

template <class T, class F>
void setp(Warp& w, const Instr& I, u32 m) {
  const auto *a = in<T>(w, I.args[1].base), *b = in<T>(w, I.args[2].base);
  u32 r = 0;
  for (int l = 0; l < 32; ++l) r |= static_cast<u32>(F{}(T::from(a[l]), T::from(b[l]))) << l;
  out_pred(w, I.args[0].base, m, r);
}

template <class T, class F>
void setp_packed(Warp& w, const Instr& I, u32 m) {  // p of the low halves, q of the high ones
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base);
  u32 low = 0, high = 0;
  for (int l = 0; l < 32; ++l) {
    low |= static_cast<u32>(F{}(T::from(a[l] & 0xffff), T::from(b[l] & 0xffff))) << l;
    high |= static_cast<u32>(F{}(T::from(a[l] >> 16), T::from(b[l] >> 16))) << l;
  }
  out_pred(w, I.args[0].base, m, low), out_pred(w, I.args[0].second, m, high);
}

template <class F>
Handler compare(const Instr& I, F) {
  if (I.args[0].form == Arg::pair)
    return I.type == Type::bf16x2  ? setp_packed<BF16, F>
           : I.type == Type::f16x2 ? setp_packed<F16, F>
                                   : static_cast<Handler>(nullptr);
  switch (I.type) {
    case Type::u16:
    case Type::b16: return setp<U16, F>;
    case Type::s16: return setp<S16, F>;
    case Type::u32:
    case Type::b32: return setp<U32, F>;
    case Type::s32: return setp<S32, F>;
    case Type::u64:
    case Type::b64: return setp<U64, F>;
    case Type::s64: return setp<S64, F>;
    case Type::f32: return setp<F32, F>;
    case Type::f64: return setp<F64, F>;
    case Type::f16: return setp<F16, F>;
    case Type::bf16: return setp<BF16, F>;
    default: return nullptr;
  }
}

Handler comparison(const Instr& I) {
  const std::string& how = I.parts[1];
  if (I.parts.size() != 3) return nullptr;
  if (how == "eq") return compare(I, [](auto a, auto b) { return a == b; });
  if (how == "ne") return compare(I, [](auto a, auto b) { return a == a && b == b && a != b; });
  if (how == "lt") return compare(I, [](auto a, auto b) { return a < b; });
  if (how == "le") return compare(I, [](auto a, auto b) { return a <= b; });
  if (how == "gt") return compare(I, [](auto a, auto b) { return a > b; });
  if (how == "ge") return compare(I, [](auto a, auto b) { return a >= b; });
  if (how == "neu") return compare(I, [](auto a, auto b) { return a != b; });
  if (how == "num") return compare(I, [](auto a, auto b) { return a == a && b == b; });
  return nullptr;
}

template <class F>
void pred_op(Warp& w, const Instr& I, u32 m) {
  out_pred(w, I.args[0].base, m, F{}(in_pred(w, I.args[1].base), in_pred(w, I.args.back().base)));
}

Handler predicates(const Instr& I) {
  const std::string& op = I.parts[0];
  if (op == "mov") return pred_op<decltype([](u32 a, u32) { return a; })>;
  if (op == "not") return pred_op<decltype([](u32 a, u32) { return ~a; })>;
  if (op == "and") return pred_op<decltype(kAnd)>;
  if (op == "or") return pred_op<decltype(kOr)>;
  return op == "xor" ? pred_op<decltype(kXor)> : static_cast<Handler>(nullptr);
}

// ---- moves ----

void mov32(Warp& w, const Instr& I, u32 m) { out32(w, I.args[0].base, m, in32(w, I.args[1].base)); }
void mov64(Warp& w, const Instr& I, u32 m) { out64(w, I.args[0].base, m, in64(w, I.args[1].base)); }

void mov_parameter(Warp& w, const Instr& I, u32 m) {  // its address
  u64 r[32];
  std::fill_n(r, 32, reinterpret_cast<u64>(grid->parameter) + I.args[1].base.value);
  out64(w, I.args[0].base, m, r);
}

void mov_pack(Warp& w, const Instr& I, u32 m) {  // b32 <- {b16, b16}, b64 <- {b32, b32}, ...
  const auto& items = I.args[1].items;
  const std::size_t bits = 8 * static_cast<std::size_t>(bytes_of(I.type)) / items.size();
  u64 r[32] = {};
  for (std::size_t i = 0; i < items.size(); ++i) {
    const u32* a = in32(w, items[i]);
    for (int l = 0; l < 32; ++l) r[l] |= (a[l] & ((u64{1} << bits) - 1)) << (bits * i);
  }
  if (bytes_of(I.type) == 8) return out64(w, I.args[0].base, m, r);
  each_lane(w, I.args[0].base, m, [&](u32 l) { return static_cast<u32>(r[l]); });
}

void mov_unpack(Warp& w, const Instr& I, u32 m) {
  const auto& items = I.args[0].items;
  const std::size_t bits = 8 * static_cast<std::size_t>(bytes_of(I.type)) / items.size();
  u64 a[32];
  std::memcpy(a, in64(w, I.args[1].base), sizeof(a));
  for (std::size_t i = 0; i < items.size(); ++i)
    each_lane(w, items[i], m, [&](u32 l) { return static_cast<u32>(a[l] >> (bits * i) & ((u64{1} << bits) - 1)); });
}

Handler moves(const Instr& I) {
  if (I.args[1].form == Arg::vector) return mov_pack;
  if (I.args[0].form == Arg::vector) return mov_unpack;
  if (I.args[1].base.symbol == Space::param) return mov_parameter;
  return bytes_of(I.type) == 8 ? mov64 : mov32;
}

// ---- bits ----

void prmt(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  each_lane(w, I.args[0].base, m, [&](u32 l) {
    const u64 both = static_cast<u64>(b[l]) << 32 | a[l];
    u32 r = 0;
    for (int i = 0; i < 4; ++i) {
      const u32 pick = c[l] >> (4 * i) & 15, byte = static_cast<u32>(both >> (8 * (pick & 7))) & 0xff;
      r |= (pick & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << (8 * i);
    }
    return r;
  });
}

void shf(Warp& w, const Instr& I, u32 m) {  // .l.wrap
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  each_lane(w, I.args[0].base, m,
            [&](u32 l) { return static_cast<u32>(((static_cast<u64>(b[l]) << 32 | a[l]) << (c[l] & 31)) >> 32); });
}

void bfe(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  each_lane(w, I.args[0].base, m, [&](u32 l) {
    const bool is_signed = I.type == Type::s32;
    const u32 length = std::min(c[l] & 0xff, 32u), rest = 32 - length;
    const i64 value = is_signed ? static_cast<i32>(a[l]) : static_cast<i64>(a[l]);
    const u32 field = static_cast<u32>(value >> std::min(b[l] & 0xff, 63u));
    if (!length) return 0u;
    return is_signed ? static_cast<u32>(static_cast<i32>(field << rest) >> rest) : field << rest >> rest;
  });
}

// ---- between lanes ----

void shfl(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  const std::string& mode = I.parts[2];
  u32 r[32], p = 0;
  for (int l = 0; l < 32; ++l) {
    if (!(m >> l & 1)) continue;
    const int by = static_cast<int>(b[l] & 31), segment = static_cast<int>(c[l] >> 8 & 31),
              bound = static_cast<int>(c[l] & 31);
    const int most = (l & segment) | (bound & ~segment);
    int j = mode == "up" ? l - by : mode == "bfly" ? l ^ by : (l & segment) | (by & ~segment);
    const bool inside = mode == "up" ? j >= most : j <= most;
    if (!inside) j = l;
    p |= static_cast<u32>(inside) << l;
    if (!(m >> j & 1))
      grid->report("shuffle", &w, static_cast<u32>(l), &I,
                   "reads lane " + std::to_string(j) + ", which does not take part");
    r[l] = a[j];
  }
  out32(w, I.args[0].base, m, r);
  if (I.args[0].form == Arg::pair) out_pred(w, I.args[0].second, m, p);
}

template <class T, class F>
void redux(Warp& w, const Instr& I, u32 m) {
  const u32* a = in32(w, I.args[1].base);
  const int first = __builtin_ctz(m);
  typename T::V value = T::from(a[first]);
  for (int l = first + 1; l < 32; ++l)
    if (m >> l & 1) value = F{}(value, T::from(a[l]));
  each_lane(w, I.args[0].base, m, [&](u32) { return T::to(value); });
}

void elect(Warp& w, const Instr& I, u32 m) {  // the first lane, on which CUTLASS relies
  const u32 lane = static_cast<u32>(__builtin_ctz(m));
  each_lane(w, I.args[0].base, m, [&](u32) { return lane; });
  if (I.args[0].form == Arg::pair) out_pred(w, I.args[0].second, m, 1u << lane);
}

Handler between(Instr& I) {
  const std::string &op = I.parts[0], &how = I.parts[2];
  I.together = true;
  if (op == "elect") return I.members = 1, elect;
  if (op == "shfl") return I.members = 4, how == "up" || how == "bfly" || how == "idx" ? shfl : nullptr;
  I.members = 2;
  if (how == "add" && I.type == Type::s32) return redux<S32, decltype(kAdd)>;
  if (how == "max" && I.type == Type::s32) return redux<S32, decltype(kMax)>;
  return how == "max" && I.type == Type::f32 && I.parts.size() == 4 ? redux<F32, decltype(kMax)> : nullptr;
}

}  // namespace

Handler choose_alu(Instr& I) {
  const std::string& op = I.parts[0];
  if (op == "shfl" || op == "redux" || op == "elect") return between(I);
  if (op == "setmaxnreg") return I.together = true, nothing;
  if (op == "setp") return comparison(I);
  if (I.type == Type::pred) return predicates(I);
  if (op == "mov") return moves(I);
  if (op == "shf") return I.has("l") && I.has("wrap") ? shf : nullptr;
  static const std::set<std::string> ways = {"rn", "approx", "full", "ftz", "lo", "wide", "NaN", "relu", "f32x2"};
  for (std::size_t i = 1; i + 1 < I.parts.size(); ++i)
    if (!ways.count(I.parts[i])) return nullptr;
  if (I.has("relu"))
    return op == "min" ? integers<2>(I, kMinRelu) : op == "max" ? integers<2>(I, kMaxRelu) : nullptr;
  if (I.has("wide")) return op == "mul" ? wide_of<false>(I) : op == "mad" ? wide_of<true>(I) : nullptr;
  if (I.has("NaN")) return op == "min" ? floats<2>(I, kMinNaN) : op == "max" ? floats<2>(I, kMaxNaN) : nullptr;
  if (op == "add") return numbers<2>(I, kAdd);
  if (op == "sub") return numbers<2>(I, kSub);
  if (op == "mul") return numbers<2>(I, kMul);
  if (op == "mad" || op == "fma") return numbers<3>(I, kMad);
  if (op == "div") return numbers<2>(I, kDiv);
  if (op == "rem") return integers<2>(I, kRem);
  if (op == "min" || op == "max")
    return I.args.size() != 3 ? nullptr : op == "min" ? numbers<2>(I, kMin) : numbers<2>(I, kMax);
  if (op == "abs") return floats<1>(I, kAbs);
  if (op == "neg") return numbers<1>(I, kNeg);
  if (op == "sqrt") return floats<1>(I, kSqrt);
  if (op == "rcp") return floats<1>(I, kRcp);
  if (op == "ex2") return floats<1>(I, kEx2);
  if (op == "and") return integers<2>(I, kAnd);
  if (op == "or") return integers<2>(I, kOr);
  if (op == "xor") return integers<2>(I, kXor);
  if (op == "not") return integers<1>(I, kNot);
  if (op == "shl") return shift_of<true>(I);
  if (op == "shr") return shift_of<false>(I);
  if (op == "prmt") return I.parts.size() == 2 ? prmt : nullptr;
  if (op == "bfe") return bytes_of(I.type) == 4 ? bfe : nullptr;
  if (op == "popc") return bytes_of(I.type) == 4 ? nary<U32, U32, 1, decltype(kPopc)> : nullptr;
  if (op == "selp") return bytes_of(I.type) == 8 ? selp<U64> : selp<U32>;
  return nullptr;
}

}  // namespace ptx
