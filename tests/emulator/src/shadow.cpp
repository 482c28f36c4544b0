// What is known of memory: who wrote and read each part of shared memory last, by a vector clock, and which global
// memory there is.
#include <algorithm>
#include <cmath>

#include "handlers.h"

namespace ptx {

std::string hex(u64 value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

namespace {

std::string place(u32 granule) {
  const u32 byte = granule * static_cast<u32>(grid->granule);
  if (byte < grid->tensor_shadow) return "shared byte " + std::to_string(byte);
  const u32 at = granule - grid->tensor_shadow / static_cast<u32>(grid->granule);
  return "tensor memory's column " + std::to_string(at % 512) + " of lanes from " + std::to_string(at / 512 * 16);
}

}  // namespace

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

u32 packed(int thread, u32 clock) { return static_cast<u32>(thread + 1) << 24 | (clock & 0xffffff); }
u32 number_of(const Instr& I) { return static_cast<u32>(&I - grid->function->code.data()) + 1; }

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
      grid->report("race", &w, lane, &I, "writes " + place(g) + " that " + who(packed(t, 1)) + " reads, unordered");
  if (!same) std::fill_n(reads, threads, 0u);  // those from now on are of what is written here
}

void touch_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, bool same) {
  std::memset(cta.written.data() + offset, 1, bytes);
  const u32 granule = static_cast<u32>(grid->granule);
  const u32 mine = packed(w.thread, w.knowledge.seen.at[w.thread]), number = number_of(I);
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
    cta.last_write[g] = packed(thread, clock);
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

bool inside_shared(Warp& w, const Instr& I, u32 lane, u32 offset, u32 bytes, const char* doing) {
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
  return true;
}

void shared_read(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, void* out, bool async_proxy) {
  if (!inside_shared(w, I, lane, offset, bytes, "reads")) {
    std::memset(out, 0xff, bytes);
    return;
  }
  touch_read(w, I, lane, cta, offset, bytes, async_proxy);
  std::memcpy(out, cta.shared.data() + offset, bytes);
}

void shared_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, const void* in) {
  if (!inside_shared(w, I, lane, offset, bytes, "writes")) return;
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

}  // namespace ptx
