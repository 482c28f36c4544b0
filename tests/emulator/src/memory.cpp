// Handlers of what touches memory, waits, copies or branches.
#include <algorithm>
#include <cmath>

#include "handlers.h"

namespace ptx {

std::string hex(u64 value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

// ---- shadow of shared memory: who wrote and read it last, by a vector clock ----

namespace {

u32 pack(int thread, u32 clock) { return static_cast<u32>(thread + 1) << 24 | (clock & 0xffffff); }

std::string place(u32 granule) {
  const u32 byte = granule * static_cast<u32>(grid->granule);
  if (byte < grid->tensor_shadow) return "shared byte " + std::to_string(byte);
  const u32 at = granule - grid->tensor_shadow / static_cast<u32>(grid->granule);
  return "tensor memory's column " + std::to_string(at % 512) + " of lanes from " + std::to_string(at / 512 * 16);
}

std::string who(u32 packed) {
  const int thread = static_cast<int>(packed >> 24) - 1;
  int base = 0;
  for (const auto& cta : grid->ctas) {
    if (thread == cta->engine) return "a bulk copy";
    for (const WarpGroup& each : cta->warp_groups)
      if (thread == each.thread) return "a product";
    const int count = static_cast<int>(cta->warps.size());
    if (thread < base + count)
      return "warp " + std::to_string(thread - base) +
             (grid->ctas.size() > 1 ? " of block " + std::to_string(cta->rank) : "");
    base += count;
  }
  return "thread " + std::to_string(thread);
}

std::string instr_at(u32 number) {
  if (!number) return "?";
  const Instr& I = grid->function->code[number - 1];
  return "line " + std::to_string(I.line) + " `" + I.text + "`";
}

u32 number_of(const Instr& I) { return static_cast<u32>(&I - grid->function->code.data()) + 1; }

}  // namespace

void touch_read(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, bool async_proxy) {
  // Triton's loops for 10.x load, unguarded, what a step that does not happen would need, and throw it away.
  for (u32 i = 0; i < bytes && (async_proxy || grid->options.capability < 100); ++i)
    if (!cta.written[offset + i]) {
      grid->report("uninitialised", &w, lane, &I,
                   "reads " + place((offset + i) / static_cast<u32>(grid->granule)) + ", which nothing has written");
      break;
    }
  const int granule = grid->granule, threads = grid->threads;
  const u32 first = offset / static_cast<u32>(granule), last = (offset + bytes - 1) / static_cast<u32>(granule);
  const u32 mine = w.knowledge.seen.at[w.thread];
  for (u32 g = first; g <= last; ++g) {
    if (cta.pending_writes[g])
      grid->report(
          "race", &w, lane, &I,
          "reads " + place(g) + " while an asynchronous copy writes it (" + instr_at(cta.last_write_instr[g]) + ")");
    const u32 write = cta.last_write[g];
    if (write) {
      const int thread = static_cast<int>(write >> 24) - 1;
      const u32 clock = write & 0xffffff;
      if (thread != w.thread && clock > w.knowledge.seen.at[thread])
        grid->report("race", &w, lane, &I,
                     "reads " + place(g) + " that " + who(write) + " writes, unordered (" +
                         instr_at(cta.last_write_instr[g]) + ")");
      else if (async_proxy && clock > w.knowledge.fenced.at[thread]) {
        bool engine = false;
        for (const auto& each : grid->ctas) engine |= each->engine == thread;
        if (!engine)
          grid->report("proxy", &w, lane, &I,
                       "the async proxy reads " + place(g) + " that " + who(write) +
                           " wrote, without fence.proxy.async between (" + instr_at(cta.last_write_instr[g]) + ")");
      }
    }
    if (!async_proxy)
      cta.reads[g * static_cast<u32>(threads) + static_cast<u32>(w.thread)] = mine;  // else when it ends
  }
}

// same: what is written is what is there, as where several warps hold the same part of a tile.
static void check_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 g, bool async_proxy, bool same = false) {
  const int threads = grid->threads;
  u32* reads = cta.reads.data() + g * static_cast<u32>(threads);
  if (cta.pending_reads[g])
    grid->report("race", &w, lane, &I, "writes " + place(g) + " while asynchronous work still reads it");
  if (cta.pending_writes[g])
    grid->report(
        "race", &w, lane, &I,
        "writes " + place(g) + " while an asynchronous copy writes it (" + instr_at(cta.last_write_instr[g]) + ")");
  const u32 write = cta.last_write[g];
  if (write) {
    const int thread = static_cast<int>(write >> 24) - 1;
    const u32 clock = write & 0xffffff;
    if (thread != w.thread && clock > w.knowledge.seen.at[thread] && !same)
      grid->report("race", &w, lane, &I,
                   "writes " + place(g) + " that " + who(write) + " writes, unordered (" +
                       instr_at(cta.last_write_instr[g]) + ")");
    else if (async_proxy && clock > w.knowledge.fenced.at[thread]) {
      // What a warp has read back lies there, and an mbarrier that is invalid holds nothing.
      const auto& parts = grid->function->code[cta.last_write_instr[g] - 1].parts;
      bool engine = parts[0] == "mbarrier" && parts[1] == "inval";
      for (int t = 0; t < threads; ++t) engine |= reads[t] != 0;
      for (const auto& each : grid->ctas) engine |= each->engine == thread;
      if (!engine)
        grid->report("proxy-write", &w, lane, &I,
                     "the async proxy overwrites " + place(g) + " that " + who(write) +
                         " wrote, without fence.proxy.async between (" + instr_at(cta.last_write_instr[g]) + ")");
    }
  }
  for (int t = 0; t < threads; ++t)
    if (reads[t] > w.knowledge.seen.at[t] && t != w.thread && !same)
      grid->report("race", &w, lane, &I, "writes " + place(g) + " that " + who(pack(t, 1)) + " reads, unordered");
  if (!same) std::fill_n(reads, threads, 0u);  // those from now on are of what is written here
}

void touch_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, bool same) {
  std::memset(cta.written.data() + offset, 1, bytes);
  const u32 granule = static_cast<u32>(grid->granule);
  const u32 mine = pack(w.thread, w.knowledge.seen.at[w.thread]), number = number_of(I);
  for (u32 g = offset / granule; g <= (offset + bytes - 1) / granule; ++g) {
    check_write(w, I, lane, cta, g, false, same);
    cta.last_write[g] = mine;
    cta.last_write_instr[g] = number;
  }
}

void begin_async_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, bool proxy) {
  const u32 granule = static_cast<u32>(grid->granule);
  for (u32 g = offset / granule; g <= (offset + bytes - 1) / granule; ++g) {
    check_write(w, I, lane, cta, g, proxy);
    cta.pending_writes[g] = 1;
    cta.last_write_instr[g] = number_of(I);
  }
}

void end_async_write(Cta& cta, u32 offset, u32 bytes, int thread, u32 clock) {
  std::memset(cta.written.data() + offset, 1, bytes);
  const u32 granule = static_cast<u32>(grid->granule);
  for (u32 g = offset / granule; g <= (offset + bytes - 1) / granule; ++g) {
    cta.pending_writes[g] = 0;
    cta.last_write[g] = pack(thread, clock);
  }
}

void record_read(Cta& cta, u32 offset, u32 bytes, int thread, u32 clock) {
  const u32 granule = static_cast<u32>(grid->granule);
  for (u32 g = offset / granule; g <= (offset + bytes - 1) / granule; ++g)
    cta.reads[g * static_cast<u32>(grid->threads) + static_cast<u32>(thread)] = clock;
}

void hold_granules(Cta& cta, u32 offset, u32 bytes, int add) {
  const u32 granule = static_cast<u32>(grid->granule);
  for (u32 g = offset / granule; g <= (offset + bytes - 1) / granule; ++g)
    cta.pending_reads[g] = static_cast<u16>(cta.pending_reads[g] + add);
}

Cta& shared_block(Warp& w, u64 address, u32& offset) {
  const u32 rank = static_cast<u32>(address >> 24 & 0xff);
  offset = static_cast<u32>(address & 0xffffff);
  if (!rank) return *w.cta;
  if (rank > grid->ctas.size())
    throw Stop("a shared address of block " + std::to_string(rank - 1) + ", which the cluster does not have");
  return *grid->ctas[rank - 1];
}

static bool inside(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, const char* doing) {
  if (static_cast<u64>(offset) + bytes > grid->shared_bytes) {
    grid->report("out of bounds", &w, lane, &I,
                 std::string(doing) + " shared bytes " + std::to_string(offset) + " to " +
                     std::to_string(offset + bytes) + " of " + std::to_string(grid->shared_bytes));
    return false;
  }
  if (offset % bytes && bytes <= 16 && !(bytes & (bytes - 1))) {
    grid->report("misaligned", &w, lane, &I,
                 std::string(doing) + " " + std::to_string(bytes) + " bytes at shared byte " + std::to_string(offset));
    return false;
  }
  (void)cta;
  return true;
}

void shared_read(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, void* out, bool async_proxy) {
  if (!inside(w, I, lane, cta, offset, bytes, "reads")) {
    std::memset(out, 0xff, bytes);
    return;
  }
  touch_read(w, I, lane, cta, offset, bytes, async_proxy);
  std::memcpy(out, cta.shared.data() + offset, bytes);
}

void shared_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, const void* in) {
  if (!inside(w, I, lane, cta, offset, bytes, "writes")) return;
  touch_write(w, I, lane, cta, offset, bytes,
              cta.written[offset] && std::memcmp(cta.shared.data() + offset, in, bytes) == 0);
  std::memcpy(cta.shared.data() + offset, in, bytes);
}

bool Allocations::find(u64 address, u64 bytes, std::pair<u64, u64>& found) const {
  auto place = std::upper_bound(ranges.begin(), ranges.end(), std::pair<u64, u64>{address, ~u64{0}});
  if (place == ranges.begin()) return false;
  --place;
  found = *place;
  return address + bytes <= place->second;
}

u8* global_memory(Warp& w, const Instr& I, u32 lane, u64 address, u32 bytes, bool write) {
  static thread_local std::pair<u64, u64> last[4];
  static thread_local const Grid* of = nullptr;
  static thread_local int turn = 0;
  if (of != grid) {
    of = grid;
    for (auto& each : last) each = {1, 0};
  }
  if (address % bytes && bytes <= 32 && !(bytes & (bytes - 1))) {
    grid->report(
        "misaligned", &w, lane, &I,
        std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at global " + hex(address));
    return nullptr;
  }
  for (const auto& each : last)
    if (address >= each.first && address + bytes <= each.second) return reinterpret_cast<u8*>(address);
  const Allocations* known = allocations_of_process();
  if (!known) return reinterpret_cast<u8*>(address);
  std::pair<u64, u64> found;
  if (known->find(address, bytes, found)) {
    last[turn++ & 3] = found;
    return reinterpret_cast<u8*>(address);
  }
  const auto in = [&](u64 begin, u64 end) { return address >= begin && address + bytes <= end; };
  if (in(reinterpret_cast<u64>(grid->parameter),
         reinterpret_cast<u64>(grid->parameter) + grid->function->parameter_bytes))
    return reinterpret_cast<u8*>(address);
  for (const auto& [begin, end] : grid->module->ranges)
    if (in(begin, end)) return reinterpret_cast<u8*>(address);
  std::string near = " (no allocation lies there)";
  auto place = std::upper_bound(known->ranges.begin(), known->ranges.end(), std::pair<u64, u64>{address, ~u64{0}});
  if (place != known->ranges.begin()) {
    --place;
    if (address < place->second + (1u << 24))
      near = " (" + std::to_string(static_cast<i64>(address - place->first)) +
             " bytes after the beginning of an allocation of " + std::to_string(place->second - place->first) + ")";
  }
  ++place;
  if (near.back() == ')' && place < known->ranges.end() && near[2] == 'n' && place->first - address < (1u << 24))
    near = " (" + std::to_string(place->first - address) + " bytes before an allocation of " +
           std::to_string(place->second - place->first) + ")";
  grid->report(
      "out of bounds", &w, lane, &I,
      std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at global " + hex(address) + near);
  return nullptr;
}

namespace {

// ---- loads and stores ----

struct Place {  // of one lane
  Space space;
  u64 address;
};

Space space_of(const Instr& I) {
  for (const auto& part : I.parts) {
    if (part == "global") return Space::global;
    if (part == "shared" || part == "shared::cta" || part == "shared::cluster") return Space::shared;
    if (part == "local") return Space::local;
    if (part == "const") return Space::constant;
    if (part == "param" || part == "param::entry") return Space::param;
  }
  return Space::generic;
}

Space which(Space space, u64 address) {
  if (space != Space::generic) return space;
  if (address & kSharedWindow) return Space::shared;
  if (address & kLocalWindow) return Space::local;
  return Space::global;
}

u8* local_memory(Warp& w, const Instr& I, u32 lane, u64 address, u32 bytes) {
  const u64 offset = address & (kLocalWindow - 1);
  if (offset + bytes > grid->function->local_bytes) {
    grid->report("out of bounds", &w, lane, &I, "local byte " + std::to_string(offset));
    return nullptr;
  }
  return w.local + lane * grid->function->local_bytes + offset;
}

void extend(const Instr& I, const u8* from, u32 each, u64& value) {
  value = 0;
  std::memcpy(&value, from, each);
  if (I.type == Type::s8) value = static_cast<u64>(static_cast<i64>(static_cast<std::int8_t>(value)));
  if (I.type == Type::s16) value = static_cast<u64>(static_cast<i64>(static_cast<i16>(value)));
  if (I.type == Type::s32) value = static_cast<u64>(static_cast<i64>(static_cast<i32>(value)));
}

void put(Warp& w, const Operand& o, int lane, u64 value) {
  if (o.kind == Kind::reg32) w.r32[o.index * 32 + lane] = static_cast<u32>(value);
  else if (o.kind == Kind::reg64) w.r64[o.index * 32 + lane] = value;
}

u64 get(Warp& w, const Operand& o, int lane) {
  switch (o.kind) {
    case Kind::reg32: return w.r32[o.index * 32 + lane];
    case Kind::reg64: return w.r64[o.index * 32 + lane];
    case Kind::constant: return o.value;
    default: return in32(w, o)[lane];
  }
}

const std::vector<Operand>& operands(const Arg& arg, std::vector<Operand>& single) {
  if (arg.form == Arg::vector) return arg.items;
  single.assign(1, arg.base);
  return single;
}

void load(Warp& w, const Instr& I, u32 m) {
  static thread_local std::vector<Operand> single;
  const auto& to = operands(I.args[0], single);
  const u32 each = static_cast<u32>(bytes_of(I.type)), bytes = each * static_cast<u32>(to.size());
  u8 data[64];
  const bool of_parameter = I.space == Space::param;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    const u64 address = address_of(w, I.args[1], lane);
    const u8* from = nullptr;
    if (of_parameter) {
      if (I.args[1].base.kind == Kind::constant) {
        if (address + bytes > grid->function->parameter_bytes) throw Stop("a load beyond the parameters: " + I.text);
        from = grid->parameter + address;
      } else {
        from = global_memory(w, I, static_cast<u32>(lane), address, bytes, false);
      }
    } else {
      const Space space = which(I.space, address);
      if (space == Space::shared) {
        u32 offset;
        Cta& cta = shared_block(w, address & 0xffffffff, offset);
        shared_read(w, I, static_cast<u32>(lane), cta, offset, bytes, data);
        from = data;
      } else if (space == Space::local) {
        from = local_memory(w, I, static_cast<u32>(lane), address, bytes);
      } else {
        from = global_memory(w, I, static_cast<u32>(lane), address, bytes, false);
      }
    }
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (to[i].kind == Kind::reg128) {
        if (from) std::memcpy(w.r128 + to[i].index * 64 + 2 * lane, from, 16);
        continue;
      }
      u64 value = 0x7fffffff7fffffffull;  // nan, where there is nothing
      if (from) extend(I, from + i * each, each, value);
      put(w, to[i], lane, value);
    }
  }
}

void store(Warp& w, const Instr& I, u32 m) {
  static thread_local std::vector<Operand> single;
  const auto& from = operands(I.args[1], single);
  const u32 each = static_cast<u32>(bytes_of(I.type)), bytes = each * static_cast<u32>(from.size());
  u8 data[64];
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    const u64 address = address_of(w, I.args[0], lane);
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (from[i].kind == Kind::reg128) {
        std::memcpy(data, w.r128 + from[i].index * 64 + 2 * lane, 16);
        continue;
      }
      const u64 value = get(w, from[i], lane);
      std::memcpy(data + i * each, &value, each);
    }
    const Space space = which(I.space, address);
    if (space == Space::shared) {
      u32 offset;
      Cta& cta = shared_block(w, address & 0xffffffff, offset);
      shared_write(w, I, static_cast<u32>(lane), cta, offset, bytes, data);
    } else if (space == Space::local) {
      if (u8* to = local_memory(w, I, static_cast<u32>(lane), address, bytes)) std::memcpy(to, data, bytes);
    } else if (u8* to = global_memory(w, I, static_cast<u32>(lane), address, bytes, true)) {
      std::memcpy(to, data, bytes);
    }
  }
}

// ---- atomics ----

u64 combined(const Instr& I, Type type, u64 old, u64 b, u64 c) {
  const auto f32 = [](u64 v) { return f32_of(static_cast<u32>(v)); };
  if (I.has("exch")) return b;
  if (I.has("cas")) return old == b ? c : old;
  if (I.has("and")) return old & b;
  if (I.has("or")) return old | b;
  if (I.has("xor")) return old ^ b;
  if (I.has("inc")) return static_cast<u32>(old) >= static_cast<u32>(b) ? 0 : old + 1;
  if (I.has("dec")) return old == 0 || static_cast<u32>(old) > static_cast<u32>(b) ? b : old - 1;
  const bool least = I.has("min");
  switch (type) {
    case Type::f32:
      return bits_of(I.has("add") ? f32(old) + f32(b)
                     : least      ? std::fmin(f32(old), f32(b))
                                  : std::fmax(f32(old), f32(b)));
    case Type::f64: return bits_of(f64_of(old) + f64_of(b));
    case Type::f16: return to_f16(f16_of(static_cast<u32>(old)) + f16_of(static_cast<u32>(b)));
    case Type::bf16: return to_bf16(bf16_of(static_cast<u32>(old)) + bf16_of(static_cast<u32>(b)));
    case Type::f16x2:
      return to_f16(f16_of(old & 0xffff) + f16_of(b & 0xffff)) |
             to_f16(f16_of(old >> 16 & 0xffff) + f16_of(b >> 16 & 0xffff)) << 16;
    case Type::bf16x2:
      return to_bf16(bf16_of(old & 0xffff) + bf16_of(b & 0xffff)) |
             to_bf16(bf16_of(old >> 16 & 0xffff) + bf16_of(b >> 16 & 0xffff)) << 16;
    case Type::s32:
      if (!I.has("add")) return least == (static_cast<i32>(old) < static_cast<i32>(b)) ? old : b;
      return old + b;
    case Type::s64:
      if (!I.has("add")) return least == (static_cast<i64>(old) < static_cast<i64>(b)) ? old : b;
      return old + b;
    default:
      if (!I.has("add")) return least == (old < b) ? old : b;
      return old + b;
  }
}

template <bool RETURNS>
void atomic(Warp& w, const Instr& I, u32 m) {
  const std::size_t at = RETURNS ? 1 : 0;
  static thread_local std::vector<Operand> s1, s2;
  const auto& from = operands(I.args[at + 1], s1);
  const u32 each = static_cast<u32>(bytes_of(I.type));
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    const u64 address = address_of(w, I.args[at], lane);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const Space space = which(I.space, address);
      u8* place = nullptr;
      if (space == Space::shared) {
        u32 offset;
        Cta& cta = shared_block(w, address & 0xffffffff, offset);
        offset += static_cast<u32>(i) * each;
        if (!inside(w, I, static_cast<u32>(lane), cta, offset, each, "writes")) continue;
        place = cta.shared.data() + offset;
        std::memset(cta.written.data() + offset, 1, each);
      } else {
        place = global_memory(w, I, static_cast<u32>(lane), address + i * each, each, true);
      }
      if (!place) continue;
      u64 old = 0;
      std::memcpy(&old, place, each);
      const u64 b = get(w, from[i], lane), keep = each == 8 ? ~u64{0} : (u64{1} << 8 * each) - 1;
      const u64 c = I.has("cas") ? get(w, I.args[at + 2].base, lane) & keep : 0;
      const u64 value = combined(I, I.type, old, b & keep, c);
      std::memcpy(place, &value, each);
      if (RETURNS) put(w, operands(I.args[0], s2)[i], lane, old);
    }
  }
}

// ---- addresses ----

void cvta_shared(Warp& w, const Instr& I, u32 m) {  // to generic
  u64 r[32];
  std::memcpy(r, in64(w, I.args[1].base), sizeof(r));
  for (u64& each : r) each |= kSharedWindow;
  out64(w, I.args[0].base, m, r);
}

void cvta_to_shared(Warp& w, const Instr& I, u32 m) {
  u64 r[32];
  std::memcpy(r, in64(w, I.args[1].base), sizeof(r));
  for (u64& each : r) each &= ~kSharedWindow;
  out64(w, I.args[0].base, m, r);
}

void cvta_local(Warp& w, const Instr& I, u32 m) {
  u64 r[32];
  std::memcpy(r, in64(w, I.args[1].base), sizeof(r));
  for (u64& each : r) each = I.has("to") ? each & ~kLocalWindow : each | kLocalWindow;
  out64(w, I.args[0].base, m, r);
}

void cvta_same(Warp& w, const Instr& I, u32 m) {
  if (I.args[1].base.kind == Kind::constant && I.args[1].base.index == 2000) {
    u64 r[32];
    std::fill_n(r, 32, reinterpret_cast<u64>(grid->parameter) + I.args[1].base.value);
    return out64(w, I.args[0].base, m, r);
  }
  out64(w, I.args[0].base, m, in64(w, I.args[1].base));
}

void isspacep(Warp& w, const Instr& I, u32 m) {
  const u64* a = in64(w, I.args[1].base);
  u32 r = 0;
  for (int l = 0; l < 32; ++l) {
    const bool shared = a[l] & kSharedWindow, local = a[l] & kLocalWindow;
    const bool yes = I.space == Space::shared ? shared : I.space == Space::local ? local : !shared && !local;
    r |= static_cast<u32>(yes) << l;
  }
  out_pred(w, I.args[0].base, m, r);
}

void mapa(Warp& w, const Instr& I, u32 m) {
  const u32* rank = in32(w, I.args[2].base);
  u64 r[32];
  for (int l = 0; l < 32; ++l) {
    const u64 a = get(w, I.args[1].base, l);
    r[l] = (a & ~u64{0xff000000}) | static_cast<u64>(rank[l] + 1) << 24;
  }
  out64(w, I.args[0].base, m, r);
}

// ---- control ----

void branch(Warp& w, const Instr& I, u32 m) {
  Group& g = w.groups[static_cast<std::size_t>(w.current)];
  const int target = I.args[0].target;
  w.branched = true;
  if (m == g.mask) {
    g.pc = target;
  } else if (!m) {
    ++g.pc;
  } else {
    Group taken{m, target};
    g.mask &= ~m;
    ++g.pc;
    w.groups.push_back(taken);
  }
}

void branch_table(Warp& w, const Instr& I, u32 m) {
  const auto& table = grid->function->tables[static_cast<std::size_t>(I.extra)];
  const u32* index = in32(w, I.args[0].base);
  const Group g = w.groups[static_cast<std::size_t>(w.current)];
  w.branched = true;
  std::map<int, u32> to;
  for (int l = 0; l < 32; ++l) {
    if (!(g.mask >> l & 1)) continue;
    if (!(m >> l & 1)) {
      to[g.pc + 1] |= 1u << l;
      continue;
    }
    if (index[l] >= table.size()) throw Stop("a branch beyond its table: " + I.text);
    to[table[index[l]]] |= 1u << l;
  }
  w.groups.erase(w.groups.begin() + w.current);
  for (const auto& [pc, mask] : to) w.groups.push_back({mask, pc});
}

void leave(Warp& w, const Instr&, u32 m) {
  Group& g = w.groups[static_cast<std::size_t>(w.current)];
  w.branched = true;
  w.live &= ~m;
  g.mask &= ~m;
  ++g.pc;
  if (!g.mask) w.groups.erase(w.groups.begin() + w.current);
}

void trap(Warp& w, const Instr& I, u32 m) {
  if (!m) return;
  grid->report("trap", &w, static_cast<u32>(__builtin_ctz(m)), &I, "a trap is reached");
  throw Stop("a trap is reached");
}

// ---- barriers ----

void barrier(Warp& w, const Instr& I, u32 m) {
  if (!m) return;
  const bool arrive = I.has("arrive");
  const u32 id = in32(w, I.args[0].base)[__builtin_ctz(m)];
  if (id > 15) throw Stop("barrier " + std::to_string(id));
  Barrier& b = w.cta->barriers[id];
  int all = 0;
  for (const auto& each : w.cta->warps) all += each->state != Warp::ended || each->live ? 1 : 0;
  const int expected = I.args.size() > 1 ? static_cast<int>(in32(w, I.args[1].base)[__builtin_ctz(m)]) : -1;
  if (expected > 0 && expected % 32)
    grid->report("barrier", &w, 0, &I, "a count of " + std::to_string(expected) + " threads, not a multiple of 32");
  if (b.arrived && b.expected != expected)
    grid->report("barrier", &w, 0, &I,
                 "barrier " + std::to_string(id) + " for " + std::to_string(expected) +
                     " threads, of which others say " + std::to_string(b.expected));
  b.expected = expected;
  b.arrived += 32;
  b.gathered.join(w.knowledge, grid->threads);
  ++w.knowledge.seen.at[w.thread];
  if (!arrive) {
    b.waiting.push_back(w.number);
    w.state = Warp::at_barrier;
    w.barrier = static_cast<int>(id);
    w.yield = true;
  }
  (void)all;
}

void barrier_red(Warp& w, const Instr&, u32) {
  (void)w;
  throw Stop("bar.red is not supported");
}

void warp_sync(Warp&, const Instr&, u32) {}

void cluster_arrive(Warp& w, const Instr& I, u32 m) {
  if (!m) return;
  if (w.cluster_arrived) grid->report("barrier", &w, 0, &I, "arrives twice at the cluster's barrier");
  w.cluster_arrived = true;
  grid->cluster_barrier.gathered.join(w.knowledge, grid->threads);
  ++w.knowledge.seen.at[w.thread];
  ++grid->cluster_barrier.arrived;
  w.cluster_generation = grid->cluster_barrier.generation + 1;
  ++grid->progress;
}

void cluster_wait(Warp& w, const Instr& I, u32 m) {
  if (!m) return;
  if (!w.cluster_arrived) grid->report("barrier", &w, 0, &I, "waits at the cluster's barrier without having arrived");
  w.state = Warp::at_cluster;
  w.yield = true;
}

void fence(Warp& w, const Instr& I, u32 m) {
  if (!m || !(I.has("proxy") || I.has("mbarrier_init"))) return;
  w.knowledge.fenced.join(w.knowledge.seen, grid->threads);
  ++w.knowledge.seen.at[w.thread];
}

// ---- mbarrier ----

void mbarrier_init(Warp& w, const Instr& I, u32 m) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    u32 offset;
    Cta& cta = shared_block(w, address_of(w, I.args[0], lane) & 0xffffffff, offset);
    if (!inside(w, I, static_cast<u32>(lane), cta, offset, 8, "writes")) continue;
    touch_write(w, I, static_cast<u32>(lane), cta, offset, 8);
    if (cta.mbarriers.count(offset))
      grid->report("mbarrier", &w, static_cast<u32>(lane), &I,
                   "initialises the mbarrier at shared byte " + std::to_string(offset) + ", which is one already");
    MBarrier made;
    made.expected = made.pending = static_cast<u32>(get(w, I.args[1].base, lane));
    cta.mbarriers[offset] = made;
  }
}

void mbarrier_inval(Warp& w, const Instr& I, u32 m) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    u32 offset;
    Cta& cta = shared_block(w, address_of(w, I.args[0], lane) & 0xffffffff, offset);
    const auto found = cta.mbarriers.find(offset);
    if (found == cta.mbarriers.end()) {
      grid->report("mbarrier", &w, static_cast<u32>(lane), &I, "invalidates what is no mbarrier");
      continue;
    }
    touch_write(w, I, static_cast<u32>(lane), cta, offset, 8);
    for (const Copy& copy : cta.copies)
      if ((copy.way == Copy::to_shared || copy.way == Copy::bulk_to_shared) && copy.mbarrier == offset)
        grid->report("mbarrier", &w, static_cast<u32>(lane), &I,
                     "invalidates an mbarrier that a copy is still to complete on");
    cta.mbarriers.erase(found);
  }
}

void arrive(Warp& w, const Instr& I, u32 m) {  // mbarrier.arrive, .expect_tx, both
  const bool remote = I.has("shared::cluster");
  const bool arrives = I.parts[1] == "arrive" || I.parts[1] == "arrive_drop", expects = I.has("expect_tx");
  const std::size_t at = arrives ? 1 : 0;  // mbarrier.expect_tx has no state
  const std::size_t place = I.args[0].form == Arg::address ? 0 : at;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    MBarrier& b = mbarrier_at(w, I, static_cast<u32>(lane), address_of(w, I.args[place], lane));
    if (place == 1 && I.args[0].base.kind != Kind::sink) put(w, I.args[0].base, lane, b.phase);
    u64 count = 1;
    if (expects) b.transactions += static_cast<i64>(get(w, I.args[place + 1].base, lane) & 0xffffffff);
    else if (I.args.size() > place + 1) count = get(w, I.args[place + 1].base, lane);
    if (arrives) {
      if (count > b.pending) {
        grid->report("mbarrier", &w, static_cast<u32>(lane), &I,
                     "arrives more often than the mbarrier expects in this phase");
        continue;
      }
      b.pending -= static_cast<u32>(count);
      if (I.parts[1] == "arrive_drop") b.expected -= static_cast<u32>(count);
      b.gathered.join(w.knowledge, grid->threads);
      ++w.knowledge.seen.at[w.thread];
    }
    mbarrier_check(b);
  }
  ++grid->progress;
  (void)remote;
}

void mbarrier_wait(Warp& w, const Instr& I, u32 m) {  // try_wait and test_wait
  const bool parity = I.has("parity");
  u32 r = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    MBarrier& b = mbarrier_at(w, I, static_cast<u32>(lane), address_of(w, I.args[1], lane));
    const u64 given = get(w, I.args[2].base, lane);
    const bool done = parity ? (b.phase & 1) != (given & 1) : b.phase > given;
    if (done) {
      w.knowledge.join(b.done, grid->threads);
      r |= 1u << lane;
    }
  }
  out_pred(w, I.args[0].base, m, r);
  if (!(m & ~r)) return;
  // One that fails a second time, with nothing new, is a loop: the warp sleeps. The first time it goes on, so that a
  // program that does not look at the answer is found out.
  if (w.last_poll == &I && w.poll_version == grid->progress) w.state = Warp::polling;
  w.last_poll = &I;
  w.poll_version = grid->progress;
  w.yield = w.state == Warp::polling || grid->late != 1;
}

// ---- cp.async ----

void cp_async(Warp& w, const Instr& I, u32 m) {
  const u32 bytes = static_cast<u32>(I.args[2].base.value);
  const bool ignore = I.args.size() > 3 && I.args[3].base.kind == Kind::pred;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    u32 offset;
    const u64 address = address_of(w, I.args[0], lane);
    Cta& cta = shared_block(w, address & 0xffffffff, offset);
    u32 filled = bytes;
    if (ignore) filled = in_pred(w, I.args[3].base) >> lane & 1 ? 0 : bytes;
    else if (I.args.size() > 3) filled = static_cast<u32>(get(w, I.args[3].base, lane));
    if (filled > bytes) {
      grid->report("cp.async", &w, static_cast<u32>(lane), &I,
                   "a source of " + std::to_string(filled) + " bytes, more than " + std::to_string(bytes));
      filled = bytes;
    }
    if (!inside(w, I, static_cast<u32>(lane), cta, offset, bytes, "writes")) continue;
    const u64 source = address_of(w, I.args[1], lane);
    if (filled) {
      if (source % bytes) {
        grid->report("misaligned", &w, static_cast<u32>(lane), &I,
                     "copies " + std::to_string(bytes) + " bytes from global " + hex(source));
        continue;
      }
      if (!global_memory(w, I, static_cast<u32>(lane), source, filled == bytes ? bytes : 1, false)) continue;
    }
    begin_async_write(w, I, static_cast<u32>(lane), cta, offset, bytes, false);
    w.small.push_back({source, offset, static_cast<u8>(bytes), static_cast<u8>(filled), static_cast<u8>(lane),
                       w.commits[lane], &I, ++w.small_serial});
  }
}

void cp_async_commit(Warp& w, const Instr&, u32 m) {
  for (int lane = 0; lane < 32; ++lane)
    if (m >> lane & 1) ++w.commits[lane];
}

void cp_async_wait(Warp& w, const Instr& I, u32 m) {
  const bool all = I.has("wait_all");
  if (all) cp_async_commit(w, I, m);
  complete_small(w, m, all ? 0 : I.args[0].base.value);
}

void cp_async_mbarrier(Warp& w, const Instr& I, u32 m) {  // cp.async.mbarrier.arrive{.noinc}
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    u32 offset;
    const u64 address = address_of(w, I.args[0], lane);
    MBarrier& b = mbarrier_at(w, I, static_cast<u32>(lane), address);
    if (!I.has("noinc")) ++b.pending;
    Cta& cta = shared_block(w, address & 0xffffffff, offset);
    w.arrivals.push_back({lane, w.small_serial, cta.rank, offset, w.knowledge});
  }
  ++w.knowledge.seen.at[w.thread];
  ++grid->progress;
}

// ---- bulk copies ----

// Calls f(offset in shared memory before swizzling, global address or 0 outside, elements, first element) for each row.
template <class F>
void rows_of_box(const TensorMap& map, const i32* at, F f) {
  i64 index[5] = {};
  const u32 rank = map.rank, element = map.element;
  u32 offset = 0;
  for (;;) {
    bool outside = false;
    u64 address = map.address;
    for (u32 d = 1; d < rank; ++d) {
      const i64 place = at[d] + index[d];
      if (place < 0 || place > static_cast<i64>(map.lengths[d])) outside = true;
      address += static_cast<u64>(place) * map.strides[d - 1];
    }
    f(offset, outside ? 0 : address);
    offset += map.box[0] * element;
    u32 d = 1;
    for (; d < rank; ++d) {
      if (++index[d] < map.box[d]) break;
      index[d] = 0;
    }
    if (d >= rank) break;
  }
}

u32 swizzled(u32 address, int mode) {  // 0 none, 1: 32 bytes, 2: 64, 3: 128
  static const u32 masks[] = {0, 1, 3, 7};
  return address ^ ((address >> 7 & masks[mode]) << 4);
}

u32 box_bytes(const TensorMap& map) {
  u32 bytes = map.element;
  for (u32 d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

float number_at(const u8* p, int type) {
  u32 v = 0;
  if (type == 7 || type >= 10) {
    std::memcpy(&v, p, 4);
    return f32_of(v);
  }
  std::memcpy(&v, p, 2);
  return type == 6 ? f16_of(v) : bf16_of(v);
}

bool read_map(Warp& w, const Instr& I, u32 lane, u64 address, TensorMap& map) {
  if (address % 64) {
    grid->report("descriptor", &w, lane, &I, "a descriptor at " + hex(address));
    return false;
  }
  const u8* from = global_memory(w, I, lane, address, 64, false);
  if (!from) return false;
  std::memcpy(&map, from, sizeof(map));
  if (map.mark != kMark) {
    grid->report("descriptor", &w, lane, &I, "what lies at " + hex(address) + " is no descriptor");
    return false;
  }
  return true;
}

void bulk_tensor_load(Warp& w, const Instr& I,
                      u32 m) {  // [shared], [map, {coordinates}], [mbarrier] {, mask} {, policy}
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    Copy copy{};
    copy.way = Copy::to_shared;
    copy.instr = &I;
    copy.cta = w.cta->rank, copy.warp = w.number, copy.lane = lane;
    if (!read_map(w, I, static_cast<u32>(lane), get(w, I.args[1].base, lane), copy.map)) continue;
    const auto& items = I.args[1].items;
    if (items.size() != copy.map.rank) {
      grid->report("descriptor", &w, static_cast<u32>(lane), &I,
                   "a copy of " + std::to_string(items.size()) + " dimensions by a descriptor of " +
                       std::to_string(copy.map.rank));
      continue;
    }
    for (std::size_t d = 0; d < items.size(); ++d) copy.coordinates[d] = static_cast<i32>(get(w, items[d], lane));
    u32 offset, signal;
    Cta& cta = shared_block(w, address_of(w, I.args[0], lane) & 0xffffffff, offset);
    Cta& told = shared_block(w, address_of(w, I.args[2], lane) & 0xffffffff, signal);
    copy.shared = offset, copy.mbarrier = signal, copy.bytes = box_bytes(copy.map);
    copy.ctas = 1u << cta.rank, copy.signal = static_cast<u32>(told.rank);
    if (I.has("multicast::cluster")) {
      copy.ctas = static_cast<u32>(get(w, I.args[3].base, lane)) & 0xffff;
      copy.signal_each = true;
    }
    const u32 align = copy.map.swizzle == 3 ? 128 : 128;
    if (offset % align)
      grid->report("misaligned", &w, static_cast<u32>(lane), &I,
                   "a bulk copy to shared byte " + std::to_string(offset));
    bool fine = true;
    for (const auto& each : grid->ctas) {
      if (!(copy.ctas >> each->rank & 1)) continue;
      if (static_cast<u64>(offset) + copy.bytes > grid->shared_bytes) {
        grid->report(
            "out of bounds", &w, static_cast<u32>(lane), &I,
            "a bulk copy writes shared bytes " + std::to_string(offset) + " to " + std::to_string(offset + copy.bytes));
        fine = false;
        continue;
      }
      const u32 where = copy.signal_each ? static_cast<u32>(each->rank) : copy.signal;
      if (!grid->ctas[where]->mbarriers.count(signal)) {
        grid->report("mbarrier", &w, static_cast<u32>(lane), &I,
                     "a copy completes on what is no mbarrier: shared byte " + std::to_string(signal));
        fine = false;
        continue;
      }
      touch_read(w, I, static_cast<u32>(lane), *grid->ctas[where], signal, 8, false);
      begin_async_write(w, I, static_cast<u32>(lane), *each, offset, copy.bytes, true);
    }
    if (!fine) continue;
    copy.issuer = w.knowledge;
    ++w.knowledge.seen.at[w.thread];
    w.cta->copies.push_back(copy);
    ++grid->progress;
  }
}

void hold(const Copy& copy, int add) {
  hold_granules(*grid->ctas[static_cast<std::size_t>(copy.cta)], copy.shared, copy.bytes, add);
}

void bulk_tensor_store(Warp& w, const Instr& I, u32 m) {  // [map, {coordinates}], [shared]
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    Copy copy{};
    copy.way = I.parts[1] == "reduce" ? Copy::reduce : Copy::to_global;
    for (const char* name : {"add", "min", "max", "and", "or", "xor", "inc", "dec"})
      if (I.has(name)) copy.operation = name;
    copy.instr = &I;
    copy.cta = w.cta->rank, copy.warp = w.number, copy.lane = lane;
    if (!read_map(w, I, static_cast<u32>(lane), get(w, I.args[0].base, lane), copy.map)) continue;
    const auto& items = I.args[0].items;
    if (items.size() != copy.map.rank) {
      grid->report("descriptor", &w, static_cast<u32>(lane), &I, "dimensions");
      continue;
    }
    for (std::size_t d = 0; d < items.size(); ++d) copy.coordinates[d] = static_cast<i32>(get(w, items[d], lane));
    u32 offset;
    Cta& cta = shared_block(w, address_of(w, I.args[1], lane) & 0xffffffff, offset);
    copy.shared = offset, copy.bytes = box_bytes(copy.map);
    copy.group = w.bulk_commits[lane];
    if (offset % 128)
      grid->report("misaligned", &w, static_cast<u32>(lane), &I,
                   "a bulk copy from shared byte " + std::to_string(offset));
    if (static_cast<u64>(offset) + copy.bytes > grid->shared_bytes) {
      grid->report(
          "out of bounds", &w, static_cast<u32>(lane), &I,
          "a bulk copy reads shared bytes " + std::to_string(offset) + " to " + std::to_string(offset + copy.bytes));
      continue;
    }
    touch_read(w, I, static_cast<u32>(lane), cta, offset, copy.bytes, true);
    hold(copy, 1);
    copy.issuer = w.knowledge;
    w.cta->copies.push_back(copy);
  }
}

void bulk_plain(Warp& w, const Instr& I, u32 m) {  // cp.async.bulk without a descriptor
  const bool load = I.parts.size() > 3 && I.parts[3].rfind("shared", 0) == 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    Copy copy{};
    copy.instr = &I;
    copy.cta = w.cta->rank, copy.warp = w.number, copy.lane = lane;
    copy.bytes = static_cast<u32>(get(w, I.args[2].base, lane));
    u32 offset;
    if (load) {
      copy.way = Copy::bulk_to_shared;
      Cta& cta = shared_block(w, address_of(w, I.args[0], lane) & 0xffffffff, offset);
      copy.global = address_of(w, I.args[1], lane);
      u32 signal;
      Cta& told = shared_block(w, address_of(w, I.args[3], lane) & 0xffffffff, signal);
      copy.shared = offset, copy.mbarrier = signal, copy.ctas = 1u << cta.rank,
      copy.signal = static_cast<u32>(told.rank);
      if (copy.bytes % 16 || copy.global % 16 || offset % 16) {
        grid->report("misaligned", &w, static_cast<u32>(lane), &I,
                     "a bulk copy of " + std::to_string(copy.bytes) + " bytes");
        continue;
      }
      if (static_cast<u64>(offset) + copy.bytes > grid->shared_bytes) {
        grid->report("out of bounds", &w, static_cast<u32>(lane), &I, "a bulk copy");
        continue;
      }
      for (u32 i = 0; i < copy.bytes; i += 16)
        if (!global_memory(w, I, static_cast<u32>(lane), copy.global + i, 16, false)) break;
      begin_async_write(w, I, static_cast<u32>(lane), cta, offset, copy.bytes, true);
      copy.issuer = w.knowledge;
      ++w.knowledge.seen.at[w.thread];
    } else {
      copy.way = Copy::bulk_to_global;
      copy.global = address_of(w, I.args[0], lane);
      Cta& cta = shared_block(w, address_of(w, I.args[1], lane) & 0xffffffff, offset);
      copy.shared = offset;
      copy.group = w.bulk_commits[lane];
      touch_read(w, I, static_cast<u32>(lane), cta, offset, copy.bytes, true);
      hold(copy, 1);
      copy.issuer = w.knowledge;
    }
    w.cta->copies.push_back(copy);
    ++grid->progress;
  }
}

void bulk_commit(Warp& w, const Instr&, u32 m) {
  for (int lane = 0; lane < 32; ++lane)
    if (m >> lane & 1) ++w.bulk_commits[lane];
}

void bulk_wait(Warp& w, const Instr& I, u32 m) { finish_copies(w, m, I.args[0].base.value, I.has("read")); }

void prefetch(Warp&, const Instr&, u32) {}

}  // namespace

MBarrier& mbarrier_at(Warp& w, const Instr& I, u32 lane, u64 address) {
  u32 offset;
  Cta& cta = shared_block(w, address & 0xffffffff, offset);
  const auto found = cta.mbarriers.find(offset);
  if (found == cta.mbarriers.end()) {
    grid->report("mbarrier", &w, lane, &I, "there is no mbarrier at shared byte " + std::to_string(offset));
    throw Stop("there is no mbarrier at shared byte " + std::to_string(offset) + ": " + I.text);
  }
  touch_read(w, I, lane, cta, offset, 8, false);
  return found->second;
}

void mbarrier_check(MBarrier& b) {
  if (b.pending || b.transactions) return;
  ++b.phase;
  b.pending = b.expected;
  b.done.join(b.gathered, grid->threads);
  b.gathered = {};
  ++grid->progress;
}

// cp.async of these lanes, but for the last `keep` groups.
void complete_small(Warp& w, u32 lanes, u64 keep) {
  std::size_t kept = 0;
  const u32 clock = w.knowledge.seen.at[w.thread];
  for (std::size_t i = 0; i < w.small.size(); ++i) {
    const SmallCopy& copy = w.small[i];
    const bool mine = lanes >> copy.lane & 1;
    if (!mine || copy.group + keep >= w.commits[copy.lane]) {
      w.small[kept++] = copy;
      continue;
    }
    u8 data[16] = {};
    if (copy.filled) std::memcpy(data, reinterpret_cast<const u8*>(copy.source), copy.filled);
    std::memcpy(w.cta->shared.data() + copy.target, data, copy.bytes);
    end_async_write(*w.cta, copy.target, copy.bytes, w.thread, clock);
  }
  w.small.resize(kept);
}

void run_arrival(Warp& w) {
  const SmallArrival arrival = w.arrivals.front();
  w.arrivals.pop_front();
  Cta& home = *w.cta;
  const u32 clock = ++home.engine_clock;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < w.small.size(); ++i) {
    const SmallCopy copy = w.small[i];
    if (copy.lane != arrival.lane || copy.serial > arrival.serial) {
      w.small[kept++] = copy;
      continue;
    }
    u8 data[16] = {};
    if (copy.filled) std::memcpy(data, reinterpret_cast<const u8*>(copy.source), copy.filled);
    std::memcpy(home.shared.data() + copy.target, data, copy.bytes);
    end_async_write(home, copy.target, copy.bytes, home.engine, clock);
  }
  w.small.resize(kept);
  MBarrier& b = grid->ctas[static_cast<std::size_t>(arrival.cta)]->mbarriers[arrival.mbarrier];
  if (b.pending == 0) {
    grid->report("mbarrier", &w, static_cast<u32>(arrival.lane), nullptr,
                 "cp.async arrives more often than the mbarrier at shared byte " + std::to_string(arrival.mbarrier) +
                     " expects in this phase");
    return;
  }
  --b.pending;
  b.gathered.join(arrival.issuer, grid->threads);
  b.gathered.seen.at[home.engine] = std::max(b.gathered.seen.at[home.engine], clock);
  mbarrier_check(b);
  ++grid->progress;
}

// Carries out what a copy by the async proxy does to memory.
void run_copy(Copy& copy) {
  Cta& home = *grid->ctas[static_cast<std::size_t>(copy.cta)];
  Warp& w = *home.warps[static_cast<std::size_t>(copy.warp)];
  const Instr& I = *copy.instr;
  const u32 lane = static_cast<u32>(copy.lane);
  const TensorMap& map = copy.map;
  if (copy.way == Copy::to_shared || copy.way == Copy::bulk_to_shared) {
    std::vector<u8> row;
    for (const auto& each : grid->ctas) {
      if (!(copy.ctas >> each->rank & 1)) continue;
      u8* shared = each->shared.data();
      if (copy.way == Copy::bulk_to_shared) {
        std::memcpy(shared + copy.shared, reinterpret_cast<const u8*>(copy.global), copy.bytes);
      } else {
        const u32 element = map.element, bytes = map.box[0] * element;
        const i64 first = copy.coordinates[0], length = static_cast<i64>(map.lengths[0]) + 1;
        const i64 begin = std::max<i64>(0, -first), end = std::min<i64>(map.box[0], length - first);
        rows_of_box(map, copy.coordinates, [&](u32 offset, u64 address) {
          row.assign(bytes, 0);
          if (map.fill)
            for (u32 i = 0; i + element <= bytes; i += element) {
              const u32 nan = map.type == 6 ? 0x7fff : map.type == 9 ? 0x7fff : 0x7fffffff;
              std::memcpy(row.data() + i, &nan, std::min(element, 4u));
            }
          if (address && begin < end) {
            const u64 from = address + static_cast<u64>(first + begin) * element;
            const u32 count = static_cast<u32>(end - begin) * element;
            if (global_memory(w, I, lane, from, 1, false) && global_memory(w, I, lane, from + count - 1, 1, false))
              std::memcpy(row.data() + begin * element, reinterpret_cast<const u8*>(from), count);
          }
          if (!map.swizzle) {
            std::memcpy(shared + copy.shared + offset, row.data(), bytes);
          } else {
            for (u32 i = 0; i < bytes; i += 16)
              std::memcpy(shared + swizzled(copy.shared + offset + i, map.swizzle), row.data() + i,
                          std::min(16u, bytes - i));
          }
        });
      }
      const u32 clock = ++home.engine_clock;
      end_async_write(*each, copy.shared, copy.bytes, home.engine, clock);
      MBarrier& b =
          grid->ctas[copy.signal_each ? static_cast<std::size_t>(each->rank) : copy.signal]->mbarriers[copy.mbarrier];
      b.transactions -= copy.bytes;
      b.gathered.join(copy.issuer, grid->threads);
      b.gathered.seen.at[home.engine] = std::max(b.gathered.seen.at[home.engine], clock);
      mbarrier_check(b);
    }
    ++grid->progress;
    return;
  }
  const u8* shared = home.shared.data();
  if (copy.way == Copy::bulk_to_global) {
    for (u32 i = 0; i < copy.bytes; i += 16)
      if (u8* to = global_memory(w, I, lane, copy.global + i, 16, true)) std::memcpy(to, shared + copy.shared + i, 16);
    return;
  }
  const u32 element = map.element, bytes = map.box[0] * element;
  const i64 first = copy.coordinates[0], length = static_cast<i64>(map.lengths[0]) + 1;
  const i64 begin = std::max<i64>(0, -first), end = std::min<i64>(map.box[0], length - first);
  std::vector<u8> row(bytes);
  rows_of_box(map, copy.coordinates, [&](u32 offset, u64 address) {
    if (!address || begin >= end) return;
    for (u32 i = 0; i < bytes; i += 16)
      std::memcpy(row.data() + i, shared + swizzled(copy.shared + offset + i, map.swizzle), std::min(16u, bytes - i));
    const u64 to = address + static_cast<u64>(first + begin) * element;
    const u32 count = static_cast<u32>(end - begin) * element;
    if (!global_memory(w, I, lane, to, 1, true) || !global_memory(w, I, lane, to + count - 1, 1, true)) return;
    u8* out = reinterpret_cast<u8*>(to);
    const u8* from = row.data() + begin * element;
    if (copy.way == Copy::to_global) {
      std::memcpy(out, from, count);
    } else if (copy.operation == "add" && (map.type == 7 || map.type == 10)) {
      for (u32 i = 0; i < count; i += 4) {
        const float f = number_at(out + i, 7) + number_at(from + i, 7);
        std::memcpy(out + i, &f, 4);
      }
    } else if (copy.operation == "add" && (map.type == 6 || map.type == 9)) {
      for (u32 i = 0; i < count; i += 2) {
        const float f = number_at(out + i, map.type) + number_at(from + i, map.type);
        const u32 v = map.type == 6 ? to_f16(f) : to_bf16(f);
        std::memcpy(out + i, &v, 2);
      }
    } else {
      throw Stop("a bulk reduction that is not supported: " + I.text);
    }
  });
}

// Bulk stores of these lanes, but for the last `keep` groups.
void finish_copies(Warp& w, u32 lanes, u64 keep, bool reads_only) {
  (void)reads_only;
  auto& copies = w.cta->copies;
  for (std::size_t i = 0; i < copies.size();) {
    Copy& copy = copies[i];
    const bool store = copy.way == Copy::to_global || copy.way == Copy::reduce || copy.way == Copy::bulk_to_global;
    if (!store || copy.warp != w.number || !(lanes >> copy.lane & 1) ||
        copy.group + keep >= w.bulk_commits[copy.lane]) {
      ++i;
      continue;
    }
    if (!copy.read_done) run_copy(copy);
    hold(copy, -1);
    record_read(*w.cta, copy.shared, copy.bytes, w.thread, w.knowledge.seen.at[w.thread]);
    copies.erase(copies.begin() + static_cast<long>(i));
  }
}

Handler choose_memory(Instr& I) {
  const std::string& op = I.parts[0];
  I.space = space_of(I);
  if (op == "ld" || op == "ldu") return I.memory = true, load;
  if (op == "st") return I.memory = true, store;
  if (op == "atom") {
    I.memory = true;
    return atomic<true>;
  }
  if (op == "red") {
    I.memory = true;
    return I.has("async") ? nullptr : atomic<false>;
  }
  if (op == "cvta") {
    const bool to = I.has("to");
    if (I.space == Space::shared) return to ? cvta_to_shared : cvta_shared;
    if (I.space == Space::local) return cvta_local;
    return cvta_same;
  }
  if (op == "isspacep") return isspacep;
  if (op == "mapa") return mapa;
  if (op == "prefetch" || op == "prefetchu") return prefetch;
  if (op == "bra") return branch;
  if (op == "brx") return branch_table;
  if (op == "ret" || op == "exit") return leave;
  if (op == "trap" || op == "brkpt") return trap;
  if (op == "bar" || (op == "barrier" && !I.has("cluster"))) {
    I.together = I.memory = true;
    if (I.has("warp")) return I.n = 0, warp_sync;
    if (I.has("red")) return barrier_red;
    return barrier;
  }
  if (op == "barrier") {
    I.together = I.memory = true;
    return I.has("arrive") ? cluster_arrive : cluster_wait;
  }
  if (op == "fence" || op == "membar") return fence;
  if (op == "mbarrier") {
    I.memory = true;
    const std::string& what = I.parts[1];
    if (what == "init") return mbarrier_init;
    if (what == "inval") return mbarrier_inval;
    if (what == "arrive" || what == "arrive_drop" || what == "expect_tx") return arrive;
    if (what == "try_wait" || what == "test_wait") return mbarrier_wait;
    return nullptr;
  }
  if (op == "cp") {
    I.memory = true;
    if (I.parts[1] == "reduce") return I.has("tensor") ? bulk_tensor_store : nullptr;
    if (I.has("bulk")) {
      if (I.parts[2] != "bulk") return nullptr;
      if (I.has("prefetch")) return prefetch;
      if (I.has("commit_group")) return bulk_commit;
      if (I.has("wait_group")) return bulk_wait;
      if (!I.has("tensor")) return bulk_plain;
      if (I.has("im2col") || I.has("gather4") || I.has("tile::gather4") || I.has("tile::scatter4")) return nullptr;
      return I.has("bulk_group") ? bulk_tensor_store : bulk_tensor_load;
    }
    if (I.has("commit_group")) return cp_async_commit;
    if (I.has("wait_group") || I.has("wait_all")) return cp_async_wait;
    if (I.has("mbarrier")) return cp_async_mbarrier;
    return cp_async;
  }
  return choose_matrix(I);
}

}  // namespace ptx
