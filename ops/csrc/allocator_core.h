// The allocator op's core: which request of which phase gets which address. Knows neither torch nor CUDA.
//
// A pass (one training forward with its backward and step) visits phases; in each visit the requests come in the order
// of the plan, so the k-th request of a visit gets slot k. One Core serves one device.
//
// Invariant: an address is handed out only while no live range overlaps it. A wrong plan costs misses, never data.
//
// Threads: hold `mutex` for all calls but the atomic ones. The core never calls the native allocator. It returns arenas that
// are to be freed, and the backend drops them once the mutex is free.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ds_memo {

using Address = uintptr_t;
using Bytes = uint64_t;
using Stream = uintptr_t;  // a device stream's handle; on a CPU, where a thread is what runs things in order, the thread's
using Fence = uint64_t;    // the backend's name for events that a range's next user must wait for; 0: none

constexpr Bytes kNative = ~Bytes{0};  // the offset of a slot that the plan leaves to the native allocator
constexpr int kNoPhase = -1;
constexpr Stream kAnyStream = ~Stream{0};

enum class Mode : int { off, profile, plan };

struct Slot {
  Bytes size;    // as asked for; or a little more: see load_plan()
  Bytes offset;  // from the arena's start, or kNative
};

using Visit = std::vector<Slot>;                            // in the order of the requests
using Plan = std::unordered_map<int, std::vector<Visit>>;  // phase -> its visits in the order of a pass

enum class Kind : int { enter, malloc, free, elsewhere };

struct Request {
  Kind kind;    // `elsewhere`: a malloc on another stream than the pass's, which has no place in its order
  int phase;    // of all but `free`
  uint64_t id;  // of all but `enter`
  Bytes size;   // of a malloc
};

// What became of a request that came in a phase while a plan was followed. Everything but `hit` went to the native allocator.
enum class Outcome : int {
  hit,
  native,     // the plan leaves it out
  overlap,    // its slot is still in use
  size,       // another size than planned: the rest of this visit is abandoned
  abandoned,  // came after that
  end,        // more requests than planned
  unplanned,  // the plan does not know this visit
  stream,     // asked for on another stream than the pass's or the arena's
  pool,       // while a graph is captured or a memory pool is in use
  arena,      // there is no arena, or it ends before the slot does
};
constexpr int kOutcomes = 10;
constexpr std::array<const char*, kOutcomes> kOutcomeNames = {
    "hit", "native", "overlap", "size", "abandoned", "end", "unplanned", "stream", "pool", "arena"};

struct Stats {
  std::array<uint64_t, kOutcomes> count{};
  uint64_t waits = 0;      // for fences, by the compute stream
  uint64_t gave_way = 0;   // arenas, because the native allocator had no room
  Bytes live_bytes = 0;    // in arenas, now
  Bytes peak_bytes = 0;    // the most of them
  Bytes highest_end = 0;   // of any slot that was handed out
};

// One block of native memory, and which parts of it are in use.
class Arena {
 public:
  Arena(Address base, Bytes bytes, Stream stream, std::shared_ptr<void> backing)
      : base_(base), bytes_(bytes), stream_(stream), backing_(std::move(backing)) {}

  Address base() const { return base_; }
  Bytes bytes() const { return bytes_; }
  Stream stream() const { return stream_; }
  bool owns(Address address) const { return address - base_ < bytes_; }
  bool contains(Bytes offset, Bytes size) const { return size && offset <= bytes_ && size <= bytes_ - offset; }
  size_t live() const { return live_; }

  // Marks [offset, offset + size) as live; false where that would overlap a live range or leave the arena. Fences of
  // ranges that were freed before go to `fences`: wait for them before the memory is written.
  bool take(Bytes offset, Bytes size, std::vector<Fence>& fences) {
    if (!contains(offset, size)) return false;
    const auto first = reaching_past(offset);
    auto last = first;
    for (; last != ranges_.end() && last->begin < offset + size; ++last)
      if (last->state == kLive) return false;
    for (auto range = first; range != last; ++range)
      if (range->state != kFree) fences.push_back(range->state);
    if (first == last) {
      ranges_.insert(first, Range{offset, offset + size, kLive});
    } else {
      *first = Range{offset, offset + size, kLive};
      ranges_.erase(first + 1, last);
    }
    ++live_;
    return true;
  }

  // Frees the live range that begins at `address` and returns its size; 0 if none does. The entry remains, for
  // take() to find its fence, and because the next pass requests the same one.
  Bytes give(Address address, Fence fence) {
    const Bytes offset = address - base_;
    const auto range = reaching_past(offset);
    if (range == ranges_.end() || range->begin != offset || range->state != kLive) return 0;
    range->state = fence;
    --live_;
    return range->end - range->begin;
  }

  std::vector<Fence> fences() const {
    std::vector<Fence> all;
    for (const Range& range : ranges_)
      if (range.state != kLive && range.state != kFree) all.push_back(range.state);
    return all;
  }

 private:
  static constexpr Fence kFree = 0, kLive = ~Fence{0};
  struct Range {
    Bytes begin, end;
    Fence state;  // kFree, kLive, or free behind this fence
  };
  std::vector<Range>::iterator reaching_past(Bytes offset) {
    return std::lower_bound(ranges_.begin(), ranges_.end(), offset, [](const Range& r, Bytes o) { return r.end <= o; });
  }

  Address base_;
  Bytes bytes_;
  Stream stream_;
  std::shared_ptr<void> backing_;
  std::vector<Range> ranges_;  // sorted, disjoint
  size_t live_ = 0;
};

class Core {
 public:
  std::mutex mutex;

  // ---- before the mutex is taken

  // True if the core handles a request of this size; false is the common case and must be cheap.
  bool concerns(Bytes size) const {
    return mode_.load(std::memory_order_relaxed) != Mode::off && phase_.load(std::memory_order_relaxed) != kNoPhase &&
           size >= min_bytes_.load(std::memory_order_relaxed);
  }
  Mode mode() const { return mode_.load(std::memory_order_relaxed); }
  bool has_logged() const { return logged_.load(std::memory_order_relaxed) != 0; }
  bool has_arena() const { return arenas_.load(std::memory_order_relaxed) != 0; }

  // ---- passes and phases

  void set_min_bytes(Bytes bytes) { min_bytes_ = bytes; }

  // Replacing or forgetting the plan of the running pass ends the pass. A slot matches a request of its size, or of up to
  // `spare` bytes less, for sizes that were computed and not logged.
  void load_plan(int key, Plan plan, Bytes spare = 0) {
    forget_plan(key);
    plans_.emplace(key, Loaded{std::move(plan), spare});
  }
  void forget_plan(int key) {
    if (plan_ && plan_ == find_plan(key)) stop();
    plans_.erase(key);
  }
  void forget_plans() {
    stop();
    plans_.clear();
  }

  // A pass on `stream`. False where plan `key` was never loaded.
  bool begin_pass(Mode mode, int key, Stream stream) {
    stop();
    stream_ = stream;
    log_.clear();
    if (mode == Mode::plan) {
      plan_ = find_plan(key);
      if (!plan_) return false;
    }
    mode_ = mode;
    return true;
  }

  void stop() {
    mode_ = Mode::off;
    phase_ = kNoPhase;
    plan_ = nullptr;
    visit_ = nullptr;
    visits_.clear();
  }

  void enter(int phase) {
    phase_ = phase;
    visit_ = nullptr;
    abandoned_ = false;
    next_ = 0;
    if (mode() == Mode::off || phase == kNoPhase) return;
    if (mode() == Mode::profile) {
      log_.push_back({Kind::enter, phase, 0, 0});
      return;
    }
    const size_t visit = visits_[phase]++;
    const auto planned = plan_->visits.find(phase);
    if (planned != plan_->visits.end() && visit < planned->second.size()) visit_ = &planned->second[visit];
  }

  // ---- following a plan

  // An address in the arena, or nothing: then it is the native allocator's turn. Wait for `fences` before writing.
  std::optional<Address> take(Bytes size, Stream stream, bool pool, std::vector<Fence>& fences) {
    const Outcome outcome = place(size, stream, pool, fences);
    ++stats.count[static_cast<int>(outcome)];
    if (outcome != Outcome::hit) return std::nullopt;
    const Bytes offset = (*visit_)[next_ - 1].offset;
    stats.live_bytes += size;
    stats.peak_bytes = std::max(stats.peak_bytes, stats.live_bytes);
    stats.highest_end = std::max(stats.highest_end, offset + size);
    stats.waits += fences.size();
    return arena_->base() + offset;
  }

  Arena* owner(Address address) {
    if (arena_ && arena_->owns(address)) return arena_.get();
    for (auto& arena : retired_)
      if (arena->owns(address)) return arena.get();
    return nullptr;
  }

  // Frees a live block; false where `address` is none. An arena of which this was the last block goes to `drained`.
  bool give(Address address, Fence fence, std::unique_ptr<Arena>& drained) {
    Arena* arena = owner(address);
    const Bytes size = arena ? arena->give(address, fence) : 0;
    if (!size) return false;
    stats.live_bytes -= size;
    if (arena != arena_.get() && !arena->live()) drained = remove_retired(arena);
    return true;
  }

  // Puts an arena (or none) in the place of the present one, which is returned if nothing lives in it. If something does,
  // its last block frees it.
  std::unique_ptr<Arena> replace_arena(std::unique_ptr<Arena> fresh) {
    std::swap(arena_, fresh);
    if (fresh && fresh->live()) {
      retired_.push_back(std::move(fresh));
      fresh.reset();
    }
    count_arenas();
    return fresh;
  }

  // The present arena, for the backend to drop, if nothing lives in it; else nothing.
  std::unique_ptr<Arena> give_way() {
    if (!arena_ || arena_->live()) return nullptr;
    ++stats.gave_way;
    return replace_arena(nullptr);
  }

  const Arena* arena() const { return arena_.get(); }
  size_t retired() const { return retired_.size(); }

  // ---- profiling

  void log_malloc(Address address, Bytes size, Stream stream) {
    if (mode() != Mode::profile) return;
    const uint64_t id = next_id_++;
    ids_[address] = id;
    logged_ = ids_.size();
    log_.push_back({stream == stream_ ? Kind::malloc : Kind::elsewhere, phase_, id, size});
  }

  // Notes the free of a block that was logged, in whatever mode.
  void log_free(Address address) {
    const auto known = ids_.find(address);
    if (known == ids_.end()) return;
    if (mode() == Mode::profile) log_.push_back({Kind::free, phase_, known->second, 0});
    ids_.erase(known);
    logged_ = ids_.size();
  }

  std::vector<Request> take_log() { return std::exchange(log_, {}); }

  Stats stats;

 private:
  Outcome place(Bytes size, Stream stream, bool pool, std::vector<Fence>& fences) {
    if (pool) return Outcome::pool;
    if (!visit_) return Outcome::unplanned;
    if (!arena_) return Outcome::arena;
    if (stream != stream_ || (stream != arena_->stream() && arena_->stream() != kAnyStream))
      return Outcome::stream;  // not in the plan's order: the cursor does not move
    if (abandoned_) return Outcome::abandoned;
    if (next_ == visit_->size()) return Outcome::end;
    const Slot& slot = (*visit_)[next_];
    if (slot.size < size || slot.size - size > plan_->spare) {
      abandoned_ = true;  // guessing on would only give accidental hits
      return Outcome::size;
    }
    ++next_;
    if (slot.offset == kNative) return Outcome::native;
    if (!arena_->contains(slot.offset, size)) return Outcome::arena;
    return arena_->take(slot.offset, size, fences) ? Outcome::hit : Outcome::overlap;
  }

  struct Loaded {
    Plan visits;
    Bytes spare;
  };
  const Loaded* find_plan(int key) const {
    const auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : &found->second;
  }

  std::unique_ptr<Arena> remove_retired(Arena* arena) {
    const auto at = std::find_if(retired_.begin(), retired_.end(), [&](const auto& a) { return a.get() == arena; });
    std::unique_ptr<Arena> removed = std::move(*at);
    retired_.erase(at);
    count_arenas();
    return removed;
  }

  void count_arenas() { arenas_ = retired_.size() + (arena_ ? 1 : 0); }

  std::atomic<Mode> mode_{Mode::off};
  std::atomic<int> phase_{kNoPhase};
  std::atomic<Bytes> min_bytes_{0};
  std::atomic<size_t> logged_{0};
  std::atomic<size_t> arenas_{0};

  std::unordered_map<int, Loaded> plans_;
  const Loaded* plan_ = nullptr;              // of the running pass
  std::unordered_map<int, size_t> visits_;   // phase -> visits in this pass
  const Visit* visit_ = nullptr;
  size_t next_ = 0;                          // slot of the visit's next request
  bool abandoned_ = false;
  Stream stream_ = 0;  // of the running pass

  std::unique_ptr<Arena> arena_;
  std::vector<std::unique_ptr<Arena>> retired_;  // still hold live blocks

  std::vector<Request> log_;
  std::unordered_map<Address, uint64_t> ids_;  // of logged blocks that are alive
  uint64_t next_id_ = 0;
};

}  // namespace ds_memo
