// Who wrote and read each part of global memory last, of the cluster that runs: its own loads and stores, by warp. Other
// clusters run before or after it, and bulk copies are not followed here.
//
// Where several warps hold the same part of a tensor, all load what one adds to and stores. What the others read then
// does not matter: a race is a fault when the warp that reads stores something, anything, after that.
#include "machine.h"

namespace ptx {
namespace {

constexpr u64 kPage = 4096;

Warp& warp_of(int thread) {
  for (const auto& cta : grid->ctas)
    for (const auto& w : cta->warps)
      if (w->thread == thread) return *w;
  throw Stop("no warp is thread " + std::to_string(thread));
}

}  // namespace

struct GlobalShadow::Page {
  std::vector<u32> writes, instrs;  // by granule: thread + 1 << 24 | clock, and what wrote it
  std::vector<u32> reads;           // by granule, a clock of each thread
};

GlobalShadow::GlobalShadow() = default;
GlobalShadow::~GlobalShadow() = default;

void GlobalShadow::begin(const Function& function, int threads) {
  for (auto& [address, page] : pages_) spare_.push_back(std::move(page));
  pages_.clear();
  last_ = nullptr;
  threads_ = static_cast<u32>(threads);
  granule_ = 4;
  stores_ = false;
  for (const Instr& I : function.code) {
    if ((I.parts[0] != "ld" && I.parts[0] != "st") || I.space != Space::global) continue;
    granule_ = std::min(granule_, static_cast<u64>(bytes_of(I.type)));
    stores_ |= I.parts[0] == "st";
  }
}

// A race of what this warp has read.
void GlobalShadow::doubt(Warp& reader, const Instr& I, u32 lane, const std::string& text, u32 since) {
  if (reader.stored >= since) grid->report("race", &reader, lane, &I, text);
  else reader.doubts.push_back({&I, lane, text});
}

void GlobalShadow::stores(Warp& w) {
  w.stored = w.knowledge.seen.at[w.thread];
  for (const Doubt& each : w.doubts) grid->report("race", &w, each.lane, each.instr, each.text);
  w.doubts.clear();
}

GlobalShadow::Page& GlobalShadow::page_of(u64 address) {
  const u64 number = address / kPage;
  if (last_ && last_number_ == number) return *last_;
  auto& found = pages_[number];
  if (!found) {
    if (spare_.empty()) {
      found = std::make_unique<Page>();
    } else {
      found = std::move(spare_.back());
      spare_.pop_back();
    }
    const std::size_t granules = kPage / granule_;
    found->writes.assign(granules, 0), found->instrs.assign(granules, 0);
    found->reads.assign(granules * threads_, 0);
  }
  last_number_ = number;
  return *(last_ = found.get());
}

void GlobalShadow::read(Warp& w, const Instr& I, u32 lane, u64 address, u32 bytes) {
  if (!stores_) return;
  for (u64 at = address; at < address + bytes; at += granule_) {
    Page& page = page_of(at);
    const u64 g = at % kPage / granule_;
    const u32 write = page.writes[g];
    const int thread = static_cast<int>(write >> 24) - 1;
    if (write && thread != w.thread && (write & 0xffffff) > w.knowledge.seen.at[thread])
      doubt(w, I, lane,
            "reads global " + hex(at) + " that " + who(write) + " writes, unordered (" + instr_at(page.instrs[g]) + ")",
            w.knowledge.seen.at[w.thread] + 1);
    page.reads[g * threads_ + static_cast<u32>(w.thread)] = w.knowledge.seen.at[w.thread];
  }
}

void GlobalShadow::write(Warp& w, const Instr& I, u32 lane, u64 address, u32 bytes, bool same) {
  for (u64 at = address; at < address + bytes; at += granule_) {
    Page& page = page_of(at);
    const u64 g = at % kPage / granule_;
    u32* reads = page.reads.data() + g * threads_;
    const u32 write = page.writes[g];
    const int thread = static_cast<int>(write >> 24) - 1;
    if (write && thread != w.thread && (write & 0xffffff) > w.knowledge.seen.at[thread] && !same)
      grid->report("race", &w, lane, &I,
                   "writes global " + hex(at) + " that " + who(write) + " writes, unordered (" +
                       instr_at(page.instrs[g]) + ")");
    for (u32 t = 0; t < threads_ && !same; ++t)
      if (reads[t] > w.knowledge.seen.at[t] && static_cast<int>(t) != w.thread)
        doubt(warp_of(static_cast<int>(t)), I, lane,
              "reads global " + hex(at) + " that " + who(packed(w.thread, 1)) + " writes here, unordered", reads[t]);
    if (!same) std::fill_n(reads, threads_, 0u);  // those from now on are of what is written here
    page.writes[g] = packed(w.thread, w.knowledge.seen.at[w.thread]);
    page.instrs[g] = number_of(I);
  }
}

}  // namespace ptx
