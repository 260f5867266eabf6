// Random requests from several threads against a model of ops/csrc/allocator_core.h that is as simple as can be.
//
//     core_stress REQUESTS THREADS SEED
//
// Three things are checked. The model has an owner for every 64 bytes of an arena, and predicts the outcome of a
// request. Every block is filled with a pattern of its own when it is handed out and checked before it is freed. A
// block that is freed with a fence is still being read: its pattern must be there until a stream waits for that fence.
// Ends with 1 and a line at the first thing that is wrong.
#include "allocator_core.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <thread>

using namespace ds_memo;

constexpr Bytes kUnit = 64, kArenaBytes = 256 << 10, kGuard = 8 << 10, kLargest = 32 * kUnit;
constexpr Stream kCompute = 1, kSide = 2;
constexpr int kPhases = 8, kVisits = 5, kSlots = 40, kPlans = 3;
constexpr uint64_t kNoOwner = 0, kReader = uint64_t{1} << 63;

[[noreturn]] void wrong(const char* what) {
  std::printf("WRONG: %s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}
void require(bool condition, const char* what) {
  if (!condition) wrong(what);
}

using Random = std::mt19937;
uint32_t below(Random& random, uint32_t end) { return random() % end; }

// An arena's memory, with bytes before and behind it that must not change.
struct Memory {
  std::vector<uint8_t> bytes = std::vector<uint8_t>(kGuard + kArenaBytes + kGuard, 0xee);
  std::vector<uint64_t> owners = std::vector<uint64_t>(kArenaBytes / kUnit, kNoOwner);
  size_t live = 0;
  bool retired = false;

  uint8_t* begin() { return bytes.data() + kGuard; }
  std::pair<size_t, size_t> units(Bytes offset, Bytes size) const { return {offset / kUnit, (offset + size) / kUnit}; }
  void set_owner(Bytes offset, Bytes size, uint64_t from, uint64_t to, const char* otherwise) {
    const auto [first, last] = units(offset, size);
    for (size_t unit = first; unit < last; ++unit) {
      require(owners[unit] == from, otherwise);
      owners[unit] = to;
    }
  }
  bool has_live_range(Bytes offset, Bytes size) const {
    const auto [first, last] = units(offset, size);
    for (size_t unit = first; unit < last; ++unit)
      if (owners[unit] != kNoOwner && !(owners[unit] & kReader)) return true;
    return false;
  }
  ~Memory() {
    for (Bytes i = 0; i < kGuard; ++i)
      require(bytes[i] == 0xee && bytes[kGuard + kArenaBytes + i] == 0xee, "written outside the arena");
    require(live == 0, "an arena was given back with live blocks");
  }
};

struct Block {
  uint64_t id;
  std::shared_ptr<Memory> memory;  // null: a logged block of the native allocator
  Address address;
  Bytes size;

  Bytes offset() const { return address - reinterpret_cast<Address>(memory->begin()); }
  uint8_t pattern() const { return static_cast<uint8_t>(id * 37 + 11); }
  void fill() const { std::memset(reinterpret_cast<void*>(address), pattern(), size); }
  bool intact() const {
    const auto* data = reinterpret_cast<const uint8_t*>(address);
    return data[0] == pattern() && std::memcmp(data, data + 1, size - 1) == 0;
  }
};

// The core and the model of it. Everything is guarded by core.mutex.
struct Model {
  Core core;
  std::map<int, Plan> plans;
  std::map<Fence, Block> readers;
  std::shared_ptr<Memory> memory;
  uint64_t next_id = 1;
  Fence next_fence = 1;

  Mode mode = Mode::off;
  const Plan* plan = nullptr;
  Bytes spare = 0;
  std::map<int, size_t> visited;
  const Visit* visit = nullptr;
  size_t next = 0;
  bool abandoned = false;
  int phase = kNoPhase;

  static Bytes spare_of(int key) { return key % 2 ? kUnit : 0; }

  void load_random_plan(int key, Random& random) {
    Plan fresh;
    for (int p = 0; p < kPhases - 1; ++p)  // the last phase is planned nowhere
      for (int v = 0; v < kVisits; ++v) {
        Visit& slots = fresh[p].emplace_back();
        for (int s = 0; s < kSlots; ++s) {
          const Bytes size = kUnit * (1 + below(random, kLargest / kUnit));
          const Bytes offset = kUnit * below(random, (kArenaBytes + kLargest / 8) / kUnit);  // a few reach past the end
          slots.push_back({size, below(random, 20) ? offset : kNative});
        }
      }
    if (plan == &plans[key]) stop();
    core.load_plan(key, fresh, spare_of(key));
    plans[key] = std::move(fresh);
  }
  void stop() {
    core.stop();
    mode = Mode::off, phase = kNoPhase, plan = nullptr, visit = nullptr;
    visited.clear();
  }
  void begin(Mode new_mode, int key) {
    stop();
    require(core.begin_pass(new_mode, key, kCompute), "a plan is unknown");
    mode = new_mode;
    plan = mode == Mode::plan ? &plans[key] : nullptr;
    spare = spare_of(key);
  }
  void enter(int new_phase) {
    core.enter(new_phase);
    phase = new_phase, visit = nullptr, next = 0, abandoned = false;
    if (mode != Mode::plan || phase == kNoPhase) return;
    const size_t index = visited[phase]++;
    if (const auto found = plan->find(phase); found != plan->end() && index < found->second.size())
      visit = &found->second[index];
  }

  Outcome predict(Bytes size, Stream stream, bool pool) {
    if (pool) return Outcome::pool;
    if (!visit) return Outcome::unplanned;
    if (!memory) return Outcome::arena;
    if (stream != kCompute) return Outcome::stream;
    if (abandoned) return Outcome::abandoned;
    if (next == visit->size()) return Outcome::end;
    const Slot slot = (*visit)[next];
    abandoned = slot.size < size || slot.size - size > spare;
    if (abandoned) return Outcome::size;
    ++next;
    if (slot.offset == kNative) return Outcome::native;
    if (slot.offset + size > kArenaBytes) return Outcome::arena;
    return memory->has_live_range(slot.offset, size) ? Outcome::overlap : Outcome::hit;
  }

  std::optional<Block> request(Random& random) {
    const Bytes planned = visit && next < visit->size() ? (*visit)[next].size : kUnit;
    const Bytes less = planned > kUnit && below(random, 2) ? spare : 0;
    const Bytes size = below(random, 64) ? planned - less : kUnit * (1 + below(random, kLargest / kUnit));
    const Stream stream = below(random, 50) ? kCompute : kSide;
    const bool pool = below(random, 100) == 0;
    const Bytes offset = visit && next < visit->size() ? (*visit)[next].offset : kNative;
    const Outcome expected = predict(size, stream, pool);
    const auto before = core.stats.count;
    std::vector<Fence> fences;
    const auto address = core.take(size, stream, pool, fences);
    for (int i = 0; i < kOutcomes; ++i)
      require(core.stats.count[i] - before[i] == (i == static_cast<int>(expected)), "another outcome than predicted");
    require(address.has_value() == (expected == Outcome::hit), "an address without a hit, or a hit without an address");
    if (!address) return std::nullopt;
    require(*address == reinterpret_cast<Address>(memory->begin()) + offset, "another address than the slot's");
    for (Fence fence : fences) {
      const auto reader = readers.find(fence);
      require(reader != readers.end(), "a fence that was never made, or for the second time");
      require(reader->second.memory == memory, "a fence of another arena");
      require(reader->second.intact(), "memory was written while a stream still read it");
      memory->set_owner(reader->second.offset(), reader->second.size, kReader | fence, kNoOwner, "the model is off");
      readers.erase(reader);
    }
    const Block block{next_id++, memory, *address, size};
    memory->set_owner(block.offset(), size, kNoOwner, block.id, "a live range was handed out, or one that is still being read");
    ++memory->live;
    return block;
  }

  std::optional<Block> log_request() {
    const Block block{next_id++, nullptr, (next_id << 20), kUnit};
    core.log_malloc(block.address, block.size, kCompute);
    return block;
  }

  std::unique_ptr<Arena> free(const Block& block, Random& random) {
    if (!block.memory) {
      core.log_free(block.address);
      return nullptr;
    }
    const Fence fence = below(random, 6) ? 0 : next_fence++;
    block.memory->set_owner(block.offset(), block.size, block.id, fence ? kReader | fence : kNoOwner, "the model is off");
    --block.memory->live;
    std::unique_ptr<Arena> drained;
    require(core.give(block.address, fence, drained), "a live block is unknown");
    if (fence) readers.emplace(fence, block);
    require(bool(drained) == (block.memory->retired && !block.memory->live), "a retired arena goes with its last block");
    if (drained) forget_readers(*drained, block.memory);
    return drained;
  }

  // What the backend does when it drops an arena: it waits for every fence.
  void forget_readers(const Arena& arena, const std::shared_ptr<Memory>& of) {
    for (Fence fence : arena.fences()) {
      const auto reader = readers.find(fence);
      require(reader != readers.end() && reader->second.memory == of && reader->second.intact(), "a fence of a dropped arena");
      readers.erase(reader);
    }
    for (const auto& [fence, block] : readers) require(block.memory != of, "an arena was dropped while a stream read it");
  }

  std::unique_ptr<Arena> replace_arena(bool with_a_fresh_one) {
    const std::shared_ptr<Memory> old = std::exchange(memory, with_a_fresh_one ? std::make_shared<Memory>() : nullptr);
    std::unique_ptr<Arena> fresh;
    if (memory) fresh = std::make_unique<Arena>(reinterpret_cast<Address>(memory->begin()), kArenaBytes, kCompute, memory);
    auto empty = core.replace_arena(std::move(fresh));
    require(bool(empty) == (old && !old->live), "an arena is returned if nothing lives in it");
    if (old) old->retired = true;
    if (empty) forget_readers(*empty, old);
    return empty;
  }
};

// Blocks that any thread may free.
struct Alive {
  std::mutex mutex;
  std::vector<Block> blocks;

  void add(Block block) {
    std::lock_guard<std::mutex> lock(mutex);
    blocks.push_back(std::move(block));
  }
  std::optional<Block> draw(Random& random) {
    std::lock_guard<std::mutex> lock(mutex);
    if (blocks.empty()) return std::nullopt;
    std::swap(blocks[below(random, blocks.size())], blocks.back());
    Block block = std::move(blocks.back());
    blocks.pop_back();
    return block;
  }
};

void free_one(Model& model, Alive& alive, Random& random) {
  const std::optional<Block> block = alive.draw(random);
  if (!block) return;
  if (block->memory) require(block->intact(), "a block was overwritten");
  std::unique_ptr<Arena> drained;  // dropped outside the lock, as the backends do
  std::lock_guard<std::mutex> lock(model.core.mutex);
  drained = model.free(*block, random);
}

void change_something(Model& model, Random& random) {
  std::unique_ptr<Arena> empty;
  std::lock_guard<std::mutex> lock(model.core.mutex);
  const uint32_t what = below(random, 100);
  if (model.mode == Mode::off || what < 12) {
    const Mode mode = what < 97 ? Mode::plan : Mode::profile;
    model.begin(mode, below(random, kPlans));
    model.enter(below(random, kPhases));
  } else if (what < 96) {
    model.enter(static_cast<int>(below(random, kPhases + 1)) - 1);
  } else if (what == 96) {
    model.stop();
  } else if (what == 97) {
    model.load_random_plan(below(random, kPlans), random);
  } else if (what == 98) {
    empty = model.replace_arena(below(random, 16) != 0 || !model.memory);
  } else {
    model.core.take_log();
  }
}

void work(Model& model, Alive& alive, long requests, uint32_t seed) {
  Random random(seed);
  while (requests > 0) {
    if (below(random, 24) == 0 || !model.core.concerns(kUnit)) {
      change_something(model, random);
    } else if (below(random, 100) < 30) {
      free_one(model, alive, random);
    } else {
      std::optional<Block> block;
      {
        std::lock_guard<std::mutex> lock(model.core.mutex);
        block = model.mode == Mode::profile ? model.log_request() : model.request(random);
      }
      --requests;
      if (!block) continue;
      if (block->memory) block->fill();
      alive.add(*block);
    }
  }
}

int main(int, char** arguments) {
  const long requests = std::atol(arguments[1]), threads = std::atol(arguments[2]);
  Model model;
  Alive alive;
  Random random(std::atol(arguments[3]));
  model.core.set_min_bytes(kUnit);
  for (int key = 0; key < kPlans; ++key) model.load_random_plan(key, random);
  model.replace_arena(true);

  std::vector<std::thread> workers;
  for (long i = 0; i < threads; ++i) workers.emplace_back([&, seed = random()] { work(model, alive, requests / threads, seed); });
  for (std::thread& worker : workers) worker.join();

  while (!alive.blocks.empty()) free_one(model, alive, random);
  model.replace_arena(false);
  require(model.core.retired() == 0 && !model.core.has_arena() && model.readers.empty(), "something was left at the end");
  require(model.core.stats.live_bytes == 0 && !model.core.has_logged(), "bytes or logged blocks were left at the end");
  for (int i = 0; i < kOutcomes; ++i) {
    std::printf("%s %llu\n", kOutcomeNames[i], static_cast<unsigned long long>(model.core.stats.count[i]));
    require(model.core.stats.count[i] > 0 || requests < 100000, "an outcome that never came: nothing was shown about it");
  }
  std::printf("waits %llu\n", static_cast<unsigned long long>(model.core.stats.waits));
  return 0;
}
