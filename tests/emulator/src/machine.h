// The state of a running grid: warps with their registers, blocks with their shared memory, what is on its way.
#pragma once

#include <bit>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "program.h"

namespace ptx {

// Every range of host memory that kernels may touch.
struct Allocations {
  std::vector<std::pair<u64, u64>> ranges;  // sorted
  bool find(u64 address, u64 bytes, std::pair<u64, u64>& found) const;
};

struct Finding {
  std::string kind;  // "out of bounds", "race", ...
  std::string text;
};

// Raised where a grid cannot go on.
struct Stop : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kMostThreads = 64;  // warps of a cluster, and its copying engines, each with a clock

struct Clock {
  u32 at[kMostThreads] = {};
  void join(const Clock& other, int count) {
    for (int i = 0; i < count; ++i) at[i] = at[i] > other.at[i] ? at[i] : other.at[i];
  }
};

// What a thread knows: of which writes (and reads) of others it comes after; and which of those an async proxy sees.
struct Knowledge {
  Clock seen, fenced;
  void join(const Knowledge& other, int count) { seen.join(other.seen, count), fenced.join(other.fenced, count); }
};

struct Barrier {                  // bar.sync
  int arrived = 0, expected = 0;  // threads
  u64 generation = 0;
  Knowledge gathered, released;
  std::vector<int> waiting;
};

struct MBarrier {
  u32 expected = 0, pending = 0;
  i64 transactions = 0;
  u64 phase = 0;
  Knowledge gathered, done;
};

struct TensorMap {  // of 128 bytes, aligned to 64: what cuTensorMapEncodeTiled makes here
  u64 mark;
  u64 address;
  u8 type, rank, swizzle, promotion, element, pad[3];
  u64 strides[4];
  u32 lengths[5];  // minus one, for 2^32
  u16 box[5];
  u8 steps[5];
  u8 rest[37];
};
static_assert(sizeof(TensorMap) == 128);
constexpr u64 kMark = 0x7a626b65726e2e32;
constexpr int kFloat16 = 6, kFloat32 = 7, kBFloat16 = 9;  // types of its elements

struct Cta;

struct TensorWork {  // a tcgen05.mma or .commit that has not been carried out
  const Instr* instr;
  Warp* warp;
  u32 to;    // tensor memory; of a commit: its mbarrier
  u64 a, b;  // descriptors
  u32 descriptor;
  bool add;
  u32 clock;  // its number among the products of its pipe; of a commit: that of the last before it
  Knowledge issuer;
};

// Four warps, whose products are each one operation: it begins when all four have issued it, and ends for all at once.
struct WarpGroup {
  int thread = 0;
  u64 done = 0;    // products that have ended; their number is the clock of `thread`
  u32 issued = 0;  // tcgen05.mma
  std::deque<TensorWork> work;
};

// A copy by the async proxy.
struct Copy {
  enum Way : u8 { to_shared, to_global, add } way;
  TensorMap map;
  i32 coordinates[5];
  u32 shared;  // offset in shared memory
  u32 bytes = 0;
  u32 mbarrier = 0;
  u32 ctas = 0;    // a bit for each block of the cluster that receives it
  u32 signal = 0;  // the block of the cluster whose barrier is told: its rank, or each receiver
  bool signal_each = false;
  Knowledge issuer;
  int cta = 0, warp = 0;
  u32 lane = 0;
  const Instr* instr = nullptr;
  u64 group = 0;
};

struct SmallCopy {  // cp.async of one lane
  u64 source;
  u32 target;
  u8 bytes, filled, lane;
  u64 group;
  const Instr* instr;
};

struct Group {  // lanes at one place
  u32 mask;
  int pc;
};

struct Product {  // a wgmma that has not been carried out
  const Instr* instr;
  u64 descriptor_a = 0, descriptor_b = 0;
  u32 a[4][32];
  bool scale = false;
  u64 group = 0;
  u64 number = 0;     // among those of its warp, from 1
  bool done = false;  // carried out, but this warp has not waited for it
  u32 clock = 0;      // of its warp, when it was issued
  Clock issued;       // once it is done: of all four warps, when they issued it
};

struct Moved {  // a tcgen05.ld or .st that has not been waited for
  const Instr* instr;
  bool load;
  u32 bytes, parts[2] = {};  // of the shadow
};

struct Doubt {
  const Instr* instr;
  u32 lane;
  std::string text;
};

struct Warp {
  Cta* cta = nullptr;
  int number = 0;  // in its block
  int thread = 0;  // in Clock
  u32* r32 = nullptr;
  u64* r64 = nullptr;
  u32* predicates = nullptr;
  std::vector<u32> storage32;
  std::vector<u64> storage64;
  std::vector<u32> storage_pred;
  u32 live = 0;
  std::vector<Group> groups;  // those that have not ended
  int current = 0;            // which group
  int next = 0;               // the pc after this instruction, for those that branch
  // control flow asked for by a handler
  bool branched = false;
  bool yield = false;  // let others run
  bool retry = false;  // the instruction has not been carried out
  enum State : u8 { running, at_barrier, polling, ended, at_cluster } state = running;
  int barrier = -1;
  u64 poll_version = 0;
  const Instr* last_poll = nullptr;  // that failed
  Knowledge knowledge;
  std::vector<SmallCopy> small;
  u64 commits[32] = {};  // of cp.async
  u64 bulk_commits[32] = {};
  std::deque<Product> products;
  std::vector<Moved> moved;
  u64 product_commits = 0, products_issued = 0;
  std::vector<u8> pending32;   // registers that a product will write: 1, or read: 2
  std::vector<u32> touched32;  // when a register was read or written last, by steps
  u32 fence_step = 0;          // of wgmma.fence
  u32 steps = 0;
  bool has_products = false;
  u64 cluster_generation = 0;
  bool cluster_arrived = false;
  u32 stored = 0;             // its clock when it last stored something
  std::vector<Doubt> doubts;  // races that are faults once it stores again
  int polls = 0, spins = 0;
  u64 scratch64[4][32];
  u32 scratch32[8][32];
  int scratch = 0;
  std::mt19937 random;
};

struct Cta {
  int rank = 0;  // in its cluster
  u32 index[3] = {};
  std::vector<u8> shared;
  std::vector<u8> written;      // by byte: initialised
  std::vector<u32> last_write;  // by granule: thread << 24 | clock ... see shadow functions
  std::vector<u32> last_write_instr;
  std::vector<u32> reads;          // by granule, kMostThreads each of `threads`
  std::vector<u16> pending_reads;  // by granule: async reads that have not ended
  std::vector<u8> pending_writes;
  std::vector<Barrier> barriers;
  std::map<u32, MBarrier> mbarriers;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Copy> copies;
  std::vector<WarpGroup> warp_groups;
  std::vector<u32> tensor;            // tensor memory
  std::map<u32, u32> tensor_columns;  // allocated: the first, how many
  bool may_allocate = true;
  int engine = 0;  // its copies' thread in Clock
  u32 engine_clock = 0;
  int live_warps = 0;
};

constexpr u64 kMostSteps = 4'000'000'000, kMostFindings = 20;

struct Options {
  u64 seed = 0;
  int capability = 90;
  bool runs = true;  // else launches are checked only
};

// Who wrote and read each part of global memory last: races between the warps of one cluster.
class GlobalShadow {
 public:
  GlobalShadow();
  ~GlobalShadow();
  void begin(const Function& function, int threads);  // of another cluster: nothing is known
  void read(Warp& w, const Instr& I, u32 lane, u64 address, u32 bytes);
  void write(Warp& w, const Instr& I, u32 lane, u64 address, u32 bytes, bool same);  // same: as what is there
  void stores(Warp& w);  // before it stores something somewhere

 private:
  void doubt(Warp& reader, const Instr& I, u32 lane, const std::string& text, u32 since);
  struct Page;
  Page& page_of(u64 address);
  std::unordered_map<u64, std::unique_ptr<Page>> pages_;
  std::vector<std::unique_ptr<Page>> spare_;
  Page* last_ = nullptr;
  u64 last_number_ = 0, granule_ = 4;  // bytes of the narrowest access
  u32 threads_ = 0;
  bool stores_ = false;
};

struct Config {
  u32 grid[3], block[3], shared, cluster[3];
};

struct Grid {
  const Function* function;
  Module* module;
  Config config;
  std::vector<u8> parameters;  // aligned to 128
  u8* parameter = nullptr;
  Options options;
  std::vector<std::unique_ptr<Cta>> ctas;  // of the cluster that runs
  int threads = 0;                         // in clocks
  int granule = 4;
  u64 progress = 0;  // rises with what a polling warp may wait for
  u64 steps = 0;
  std::mt19937 random;
  std::vector<Finding> findings;
  std::set<std::string> said;
  Barrier cluster_barrier;
  u64 late = 0;  // how async work is delayed: 0 at random, 1 as late as may be, 2 at once
  u32 shared_bytes = 0;
  GlobalShadow global;
  u32 tensor_shadow = 0;  // where tensor memory begins in what is known of shared memory
  void report(const char* kind, const Warp* warp, u32 lane, const Instr* instr, const std::string& what);
};

extern thread_local Grid* grid;  // the one that runs
extern Allocations* allocations_of_process();

void run_grid(Grid& grid);

// ---- operands ----

void special32(Warp& w, int which, u32* out);

inline const u32* in32(Warp& w, const Operand& o) {
  switch (o.kind) {
    case Kind::reg32: return w.r32 + o.index * 32;
    case Kind::constant: return o.c32;
    case Kind::reg64: {
      u32* out = w.scratch32[w.scratch++ & 7];
      const u64* from = w.r64 + o.index * 32;
      for (int l = 0; l < 32; ++l) out[l] = static_cast<u32>(from[l]);
      return out;
    }
    case Kind::special: {
      u32* out = w.scratch32[w.scratch++ & 7];
      special32(w, o.index, out);
      return out;
    }
    case Kind::pred: {
      u32* out = w.scratch32[w.scratch++ & 7];
      for (int l = 0; l < 32; ++l) out[l] = w.predicates[o.index] >> l & 1;
      return out;
    }
    default: throw Stop("an operand of 32 bits is missing");
  }
}

inline const u64* in64(Warp& w, const Operand& o) {
  switch (o.kind) {
    case Kind::reg64: return w.r64 + o.index * 32;
    case Kind::constant: return o.c64;
    default: {
      u64* out = w.scratch64[w.scratch++ & 3];
      const u32* from = in32(w, o);
      for (int l = 0; l < 32; ++l) out[l] = from[l];
      return out;
    }
  }
}

inline u64 address_of(Warp& w, const Arg& arg, u32 lane) {
  const Operand& base = arg.base;
  const u64 at = base.kind == Kind::constant ? base.value
                 : base.kind == Kind::reg32  ? w.r32[static_cast<u32>(base.index) * 32 + lane]
                                             : w.r64[static_cast<u32>(base.index) * 32 + lane];
  return at + static_cast<u64>(arg.offset);
}

inline u64 get(Warp& w, const Operand& o, u32 lane) {
  switch (o.kind) {
    case Kind::reg32: return w.r32[static_cast<u32>(o.index) * 32 + lane];
    case Kind::reg64: return w.r64[static_cast<u32>(o.index) * 32 + lane];
    case Kind::constant: return o.value;
    default: return in32(w, o)[lane];
  }
}

inline void put(Warp& w, const Operand& o, u32 lane, u64 value) {
  if (o.kind == Kind::reg32) w.r32[static_cast<u32>(o.index) * 32 + lane] = static_cast<u32>(value);
  else if (o.kind == Kind::reg64) w.r64[static_cast<u32>(o.index) * 32 + lane] = value;
}

inline u32 in_pred(Warp& w, const Operand& o) {
  if (o.kind == Kind::constant) return (o.value ? kAll : 0) ^ (o.negated ? kAll : 0);
  return w.predicates[o.index] ^ (o.negated ? kAll : 0);
}

inline void out_pred(Warp& w, const Operand& o, u32 mask, u32 value) {
  if (o.kind == Kind::sink) return;
  u32& p = w.predicates[o.index];
  p = (p & ~mask) | (value & mask);
}

inline void out32(Warp& w, const Operand& o, u32 mask, const u32* value) {
  if (o.kind == Kind::sink || o.kind == Kind::none) return;
  if (o.kind == Kind::reg64) {
    u64* to = w.r64 + o.index * 32;
    for (int l = 0; l < 32; ++l)
      if (mask >> l & 1) to[l] = value[l];
    return;
  }
  u32* to = w.r32 + o.index * 32;
  if (mask == kAll) {
    std::memcpy(to, value, 128);
  } else {
    for (int l = 0; l < 32; ++l) to[l] = mask >> l & 1 ? value[l] : to[l];
  }
}

inline void out64(Warp& w, const Operand& o, u32 mask, const u64* value) {
  if (o.kind == Kind::sink || o.kind == Kind::none) return;
  if (o.kind == Kind::reg32) {
    u32* to = w.r32 + o.index * 32;
    for (int l = 0; l < 32; ++l)
      if (mask >> l & 1) to[l] = static_cast<u32>(value[l]);
    return;
  }
  u64* to = w.r64 + o.index * 32;
  if (mask == kAll) {
    std::memcpy(to, value, 256);
  } else {
    for (int l = 0; l < 32; ++l) to[l] = mask >> l & 1 ? value[l] : to[l];
  }
}

// ---- shared memory ----

// The block and the offset of a shared address of `warp`: 24 bits of offset, above them 0 for its own or 1 + a rank.
Cta& shared_block(Warp& w, u64 address, u32& offset);
bool inside_shared(Warp& w, const Instr& I, u32 lane, u32 offset, u32 bytes, const char* doing);  // else reported
void shared_read(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, void* out,
                 bool async_proxy = false);
void shared_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, const void* in);
u8* global_memory(Warp& w, const Instr& I, u32 lane, u64 address, u32 bytes, bool write);  // null: reported
// A thread and its clock in one number, and in words; an instruction's number, 0 for none.
u32 packed(int thread, u32 clock);
std::string who(u32 packed);
u32 number_of(const Instr& I);
std::string instr_at(u32 number);
void touch_read(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, bool async_proxy);
void touch_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, bool same = false);

void begin_async_write(Warp& w, const Instr& I, u32 lane, Cta& cta, u32 offset, u32 bytes, bool proxy);
void end_async_write(Cta& cta, u32 offset, u32 bytes, int thread, u32 clock);
void record_read(Cta& cta, u32 offset, u32 bytes, int thread, u32 clock);
MBarrier& mbarrier_at(Warp& w, const Instr& I, u32 lane, u64 address);

// ---- async work ----

void run_tensor_work(WarpGroup& pipe);  // the first of it

void run_copy(const Copy& copy);
bool complete_products(Warp& w, u64 keep);  // false where another warp has yet to issue one
void mbarrier_check(MBarrier& barrier);
void hold_granules(Cta& cta, u32 offset, u32 bytes, int add);

inline float f32_of(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 bits_of(float f) { return std::bit_cast<u32>(f); }
inline float bf16_of(u32 bits) { return f32_of(bits << 16); }
inline float f16_of(u32 bits) { return static_cast<float>(std::bit_cast<_Float16>(static_cast<u16>(bits))); }
inline u32 to_f16(float f) { return std::bit_cast<u16>(static_cast<_Float16>(f)); }
inline u32 to_bf16(float f) {  // to the nearest, ties to even
  const u32 bits = bits_of(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
float e4m3_of(u8 bits);
float e5m2_of(u8 bits);

std::string hex(u64 value);

}  // namespace ptx
