// Handlers of asynchronous copies: cp.async of a warp, and bulk copies by descriptors.
#include <algorithm>

#include "handlers.h"
#include "operand.h"

namespace ptx {
namespace {

// ---- cp.async ----

void cp_async(Warp& w, const Instr& I, u32 m) {
  const u32 bytes = static_cast<u32>(I.args[2].base.value);
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    u32 offset, filled = bytes;
    Cta& cta = shared_block(w, address_of(w, I.args[0], lane), offset);
    if (I.args.size() > 3) filled = static_cast<u32>(get(w, I.args[3].base, lane));
    if (filled > bytes) {
      grid->report("cp.async", &w, lane, &I,
                   "a source of " + std::to_string(filled) + " bytes, more than " + std::to_string(bytes));
      filled = bytes;
    }
    if (!inside_shared(w, I, lane, offset, bytes, "writes")) continue;
    const u64 source = address_of(w, I.args[1], lane);
    if (filled) {
      if (source % bytes) {
        grid->report("misaligned", &w, lane, &I,
                     "copies " + std::to_string(bytes) + " bytes from global " + hex(source));
        continue;
      }
      if (!global_memory(w, I, lane, source, filled == bytes ? bytes : 1, false)) continue;
    }
    begin_async_write(w, I, lane, cta, offset, bytes, false);
    w.small.push_back(
        {source, offset, static_cast<u8>(bytes), static_cast<u8>(filled), static_cast<u8>(lane), w.commits[lane], &I});
  }
}

void cp_async_commit(Warp& w, const Instr&, u32 m) {
  for (int lane = 0; lane < 32; ++lane)
    if (m >> lane & 1) ++w.commits[lane];
}

void cp_async_wait(Warp& w, const Instr& I, u32 m) {  // for all but the last groups
  const u64 keep = I.args[0].base.value;
  std::size_t kept = 0;
  for (const SmallCopy& copy : w.small) {
    if (!(m >> copy.lane & 1) || copy.group + keep >= w.commits[copy.lane]) {
      w.small[kept++] = copy;
      continue;
    }
    u8 data[16] = {};
    if (copy.filled) std::memcpy(data, reinterpret_cast<const u8*>(copy.source), copy.filled);
    std::memcpy(w.cta->shared.data() + copy.target, data, copy.bytes);
    end_async_write(*w.cta, copy.target, copy.bytes, w.thread, w.knowledge.seen.at[w.thread]);
  }
  w.small.resize(kept);
}

// ---- bulk copies ----

// Calls f(byte in shared memory before swizzling, byte in global memory, bytes) for the part of each row of the box
// that lies in the tensor.
template <class F>
void rows_of_box(const Copy& copy, F f) {
  const TensorMap& map = copy.map;
  const i32* at = copy.coordinates;
  const i64 begin = std::max<i64>(0, -at[0]), end = std::min<i64>(map.box[0], i64{map.lengths[0]} + 1 - at[0]);
  i64 index[5] = {};
  u32 d = 0;
  for (u32 offset = copy.shared; d < map.rank; offset += map.box[0] * map.element) {
    bool outside = begin >= end;
    u64 address = map.address + static_cast<u64>((at[0] + begin) * map.element);
    for (d = 1; d < map.rank; ++d) {
      const i64 place = at[d] + index[d];
      outside |= place < 0 || place > static_cast<i64>(map.lengths[d]);
      address += static_cast<u64>(place) * map.strides[d - 1];
    }
    if (!outside)
      f(offset + static_cast<u32>(begin) * map.element, address, static_cast<u32>(end - begin) * map.element);
    for (d = 1; d < map.rank; ++d) {
      if (++index[d] < map.box[d]) break;
      index[d] = 0;
    }
  }
}

// Calls f(swizzled byte in shared memory, byte of the row, bytes) for each part of a row within 16 bytes.
template <class F>
void pieces(const Copy& copy, u32 offset, u32 bytes, F f) {
  for (u32 i = 0, n; i < bytes; i += n) {
    n = std::min(16 - (offset + i) % 16, bytes - i);
    f(swizzled(offset + i, copy.map.swizzle), i, n);
  }
}

// The copy that an instruction names by a descriptor, if it may be made.
bool begin(Warp& w, const Instr& I, u32 lane, const Arg& place, u64 shared, Copy& copy) {
  const u64 address = get(w, place.base, lane);
  copy.instr = &I, copy.cta = w.cta->rank, copy.warp = w.number, copy.lane = lane;
  const u8* from = address % 64 ? nullptr : global_memory(w, I, lane, address, 64, false);
  if (from) std::memcpy(&copy.map, from, sizeof(TensorMap));
  if (!from || copy.map.mark != kMark) {
    grid->report("descriptor", &w, lane, &I, "what lies at " + hex(address) + " is no descriptor");
    return false;
  }
  if (place.items.size() != copy.map.rank) {
    grid->report("descriptor", &w, lane, &I,
                 "a copy of " + std::to_string(place.items.size()) + " dimensions by a descriptor of " +
                     std::to_string(copy.map.rank));
    return false;
  }
  copy.bytes = copy.map.element;
  for (u32 d = 0; d < copy.map.rank; ++d) {
    copy.coordinates[d] = static_cast<i32>(get(w, place.items[d], lane));
    copy.bytes *= copy.map.box[d];
  }
  copy.ctas = 1u << shared_block(w, shared, copy.shared).rank;
  if (copy.shared % 128)
    grid->report("misaligned", &w, lane, &I, "a bulk copy at shared byte " + std::to_string(copy.shared));
  if (u64{copy.shared} + copy.bytes <= grid->shared_bytes) return true;
  grid->report(
      "out of bounds", &w, lane, &I,
      "a bulk copy at shared bytes " + std::to_string(copy.shared) + " to " + std::to_string(copy.shared + copy.bytes));
  return false;
}

void bulk_load(Warp& w, const Instr& I, u32 m) {  // [shared], [map, {coordinates}], [mbarrier] {, mask} {, policy}
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    Copy copy{};
    copy.way = Copy::to_shared;
    if (!begin(w, I, lane, I.args[1], address_of(w, I.args[0], lane), copy)) continue;
    copy.signal = static_cast<u32>(shared_block(w, address_of(w, I.args[2], lane), copy.mbarrier).rank);
    copy.signal_each = I.has("multicast::cluster");
    if (copy.signal_each) copy.ctas = static_cast<u32>(get(w, I.args[3].base, lane)) & 0xffff;
    bool fine = true;
    for (const auto& each : grid->ctas) {
      if (!(copy.ctas >> each->rank & 1)) continue;
      Cta& told = *grid->ctas[copy.signal_each ? static_cast<u32>(each->rank) : copy.signal];
      if (!told.mbarriers.count(copy.mbarrier)) {
        grid->report("mbarrier", &w, lane, &I,
                     "a copy completes on what is no mbarrier: shared byte " + std::to_string(copy.mbarrier));
        fine = false;
        continue;
      }
      touch_read(w, I, lane, told, copy.mbarrier, 8, false);
      begin_async_write(w, I, lane, *each, copy.shared, copy.bytes, true);
    }
    if (!fine) continue;
    copy.issuer = w.knowledge;
    ++w.knowledge.seen.at[w.thread];
    w.cta->copies.push_back(copy);
    ++grid->progress;
  }
}

void bulk_store(Warp& w, const Instr& I, u32 m) {  // [map, {coordinates}], [shared]
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    Copy copy{};
    copy.way = I.parts[1] == "reduce" ? Copy::add : Copy::to_global;
    if (!begin(w, I, lane, I.args[0], address_of(w, I.args[1], lane), copy)) continue;
    copy.group = w.bulk_commits[lane];
    touch_read(w, I, lane, *w.cta, copy.shared, copy.bytes, true);
    hold_granules(*w.cta, copy.shared, copy.bytes, 1);
    w.cta->copies.push_back(copy);
  }
}

void bulk_commit(Warp& w, const Instr&, u32 m) {
  for (int lane = 0; lane < 32; ++lane)
    if (m >> lane & 1) ++w.bulk_commits[lane];
}

void bulk_wait(Warp& w, const Instr& I, u32 m) {  // for all stores of these lanes but the last groups
  const u64 keep = I.args[0].base.value;
  auto& copies = w.cta->copies;
  for (std::size_t i = 0; i < copies.size();) {
    Copy& copy = copies[i];
    if (copy.way == Copy::to_shared || copy.warp != w.number || !(m >> copy.lane & 1) ||
        copy.group + keep >= w.bulk_commits[copy.lane]) {
      ++i;
      continue;
    }
    run_copy(copy);
    hold_granules(*w.cta, copy.shared, copy.bytes, -1);
    record_read(*w.cta, copy.shared, copy.bytes, w.thread, w.knowledge.seen.at[w.thread]);
    copies.erase(copies.begin() + static_cast<long>(i));
  }
}

// What lies at both ends of a row of `bytes`, or null where one is no allocation's.
u8* ends_of(const Copy& copy, u64 address, u32 bytes) {
  const Cta& home = *grid->ctas[static_cast<std::size_t>(copy.cta)];
  Warp& w = *home.warps[static_cast<std::size_t>(copy.warp)];
  const bool write = copy.way != Copy::to_shared;
  const bool last = global_memory(w, *copy.instr, copy.lane, address + bytes - 1, 1, write);
  return last ? global_memory(w, *copy.instr, copy.lane, address, 1, write) : nullptr;
}

void run_load(const Copy& copy) {
  Cta& home = *grid->ctas[static_cast<std::size_t>(copy.cta)];
  for (const auto& each : grid->ctas) {
    if (!(copy.ctas >> each->rank & 1)) continue;
    u8* shared = each->shared.data();
    std::memset(shared + copy.shared, 0, copy.bytes);
    rows_of_box(copy, [&](u32 offset, u64 address, u32 bytes) {
      if (const u8* from = ends_of(copy, address, bytes))
        pieces(copy, offset, bytes, [&](u32 to, u32 i, u32 n) { std::memcpy(shared + to, from + i, n); });
    });
    const u32 clock = ++home.engine_clock;
    end_async_write(*each, copy.shared, copy.bytes, home.engine, clock);
    MBarrier& b = grid->ctas[copy.signal_each ? static_cast<u32>(each->rank) : copy.signal]->mbarriers[copy.mbarrier];
    b.transactions -= copy.bytes;
    b.gathered.join(copy.issuer, grid->threads);
    b.gathered.seen.at[home.engine] = std::max(b.gathered.seen.at[home.engine], clock);
    mbarrier_check(b);
  }
  ++grid->progress;
}

float number_at(const u8* p, int type) {
  u32 v = 0;
  std::memcpy(&v, p, type == kFloat32 ? 4 : 2);
  return type == kFloat32 ? f32_of(v) : type == kFloat16 ? f16_of(v) : bf16_of(v);
}

void run_store(const Copy& copy) {
  const u8* shared = grid->ctas[static_cast<std::size_t>(copy.cta)]->shared.data();
  const int type = copy.map.type;
  if (copy.way == Copy::add && type != kFloat32 && type != kFloat16 && type != kBFloat16)
    throw Stop("a sum of data type " + std::to_string(type) + " is not supported: " + copy.instr->text);
  rows_of_box(copy, [&](u32 offset, u64 address, u32 bytes) {
    u8* to = ends_of(copy, address, bytes);
    if (!to) return;
    pieces(copy, offset, bytes, [&](u32 from, u32 i, u32 n) {
      if (copy.way != Copy::add) return static_cast<void>(std::memcpy(to + i, shared + from, n));
      for (u32 j = 0; j < n; j += copy.map.element) {
        const float f = number_at(to + i + j, type) + number_at(shared + from + j, type);
        const u32 sum = type == kFloat32 ? bits_of(f) : type == kFloat16 ? to_f16(f) : to_bf16(f);
        std::memcpy(to + i + j, &sum, copy.map.element);
      }
    });
  });
}

}  // namespace

// Carries out what a copy by the async proxy does to memory.
void run_copy(const Copy& copy) { copy.way == Copy::to_shared ? run_load(copy) : run_store(copy); }

Handler choose_copy(Instr& I) {
  const std::string& op = I.parts[0];
  if (op == "prefetch" || op == "nanosleep") return nothing;
  if (op != "cp") return nullptr;
  if (I.parts[1] == "reduce") return I.has("tensor") && I.has("add") ? bulk_store : nullptr;
  if (I.parts[2] != "bulk") {
    if (I.has("commit_group")) return cp_async_commit;
    if (I.has("wait_group")) return cp_async_wait;
    const bool sizes = I.args.size() < 4 || I.args[3].base.kind != Kind::pred;
    return sizes && I.parts.size() == 5 && (I.has("ca") || I.has("cg")) ? cp_async : nullptr;
  }
  if (I.has("commit_group")) return bulk_commit;
  if (I.has("wait_group")) return bulk_wait;
  if (I.parts[3] != "tensor" || I.has("im2col") || I.has("tile::gather4") || I.has("tile::scatter4")) return nullptr;
  return I.has("bulk_group") ? bulk_store : bulk_load;
}

}  // namespace ptx
