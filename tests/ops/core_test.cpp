// Unit tests of ops/csrc/allocator_core.h. Prints each check that fails; ends with their number.
#include "allocator_core.h"

#include <cstdio>
#include <functional>

using namespace ds_memo;

static int failures = 0;
#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition), ++failures; \
    }                                                                        \
  } while (0)

constexpr Stream kCompute = 7, kSide = 8;
constexpr Address kBase = 0x10000;
constexpr int kForward = 0, kBackward = 1;

// An arena at kBase; its backing sets `*gone` when it is given back.
std::unique_ptr<Arena> arena_of(Bytes bytes, bool* gone = nullptr, Address base = kBase, Stream stream = kCompute) {
  std::shared_ptr<void> backing(nullptr, [gone](void*) {
    if (gone) *gone = true;
  });
  return std::make_unique<Arena>(base, bytes, stream, std::move(backing));
}

// A core whose pass follows `plan` in an arena of 1,000 bytes.
struct Following {
  Core core;
  std::vector<Fence> fences;

  explicit Following(Plan plan, Bytes arena = 1000) {
    core.load_plan(0, std::move(plan));
    if (arena) core.replace_arena(arena_of(arena));
    CHECK(core.begin_pass(Mode::plan, 0, kCompute));
  }
  Address take(Bytes size, Stream stream = kCompute, bool pool = false) {
    return core.take(size, stream, pool, fences).value_or(0);
  }
  bool give(Address address, Fence fence = 0) {
    std::unique_ptr<Arena> drained;
    return core.give(address, fence, drained);
  }
  uint64_t count(Outcome outcome) const { return core.stats.count[static_cast<int>(outcome)]; }
  uint64_t misses() const {
    uint64_t all = 0;
    for (int i = 1; i < kOutcomes; ++i) all += core.stats.count[i];
    return all;
  }
};

// ---- the cursor

void the_kth_request_gets_the_kth_slot() {
  Following f({{kForward, {{{100, 0}, {200, 100}, {100, 500}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100) == kBase);
  CHECK(f.take(200) == kBase + 100);
  CHECK(f.take(100) == kBase + 500);
  CHECK(f.count(Outcome::hit) == 3 && f.misses() == 0);
}

void each_visit_has_its_own_slots() {
  Following f({{kForward, {{{100, 0}}, {{100, 300}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100) == kBase);
  f.core.enter(kForward);
  CHECK(f.take(100) == kBase + 300);
  f.core.enter(kForward);
  CHECK(f.take(100) == 0 && f.count(Outcome::unplanned) == 1);
}

void a_pass_begins_with_the_first_visits_again() {
  Following f({{kForward, {{{100, 0}}}}});
  for (int pass = 0; pass < 3; ++pass) {
    CHECK(f.core.begin_pass(Mode::plan, 0, kCompute));
    f.core.enter(kForward);
    const Address block = f.take(100);
    CHECK(block == kBase);
    CHECK(f.give(block));
  }
}

// ---- what is no hit, and what follows it

void a_native_slot_moves_the_cursor() {
  Following f({{kForward, {{{100, kNative}, {100, 0}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100) == 0 && f.count(Outcome::native) == 1);
  CHECK(f.take(100) == kBase);
}

void an_overlap_moves_the_cursor() {
  Following f({{kForward, {{{100, 0}, {100, 50}, {100, 100}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100) == kBase);
  CHECK(f.take(100) == 0 && f.count(Outcome::overlap) == 1);
  CHECK(f.take(100) == kBase + 100);
}

void another_size_abandons_the_visit_and_only_that() {
  Following f({{kForward, {{{100, 0}, {200, 100}, {100, 500}}, {{100, 700}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100) == kBase);
  CHECK(f.take(199) == 0 && f.count(Outcome::size) == 1);
  CHECK(f.take(200) == 0 && f.take(100) == 0 && f.count(Outcome::abandoned) == 2);
  f.core.enter(kForward);
  CHECK(f.take(100) == kBase + 700);
}

void a_plan_of_sizes_that_were_worked_out_spares_some() {
  Following f({});
  f.core.load_plan(1, {{kForward, {{{100, 0}, {100, 100}, {100, 200}}, {{100, 300}}}}}, 10);
  f.core.begin_pass(Mode::plan, 1, kCompute);
  f.core.enter(kForward);
  CHECK(f.take(90) == kBase && f.take(100) == kBase + 100);
  CHECK(f.take(89) == 0 && f.count(Outcome::size) == 1);
  f.core.enter(kForward);
  CHECK(f.take(101) == 0 && f.count(Outcome::size) == 2);
  CHECK(f.core.stats.live_bytes == 190 && f.core.stats.highest_end == 200);  // what was asked for, not what was planned
}

void more_requests_than_planned() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.enter(kForward);
  f.take(100);
  CHECK(f.take(100) == 0 && f.take(100) == 0 && f.count(Outcome::end) == 2);
}

void a_phase_that_the_plan_lacks() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.enter(kBackward);
  CHECK(f.take(100) == 0 && f.count(Outcome::unplanned) == 1);
}

void another_stream_leaves_the_cursor() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100, kSide) == 0 && f.count(Outcome::stream) == 1);
  CHECK(f.take(100) == kBase);
}

void an_arena_of_another_stream_is_not_used() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.replace_arena(arena_of(1000, nullptr, kBase, kSide));
  f.core.enter(kForward);
  CHECK(f.take(100) == 0 && f.count(Outcome::stream) == 1);
  f.core.replace_arena(arena_of(1000, nullptr, kBase, kAnyStream));
  CHECK(f.take(100) == kBase);
}

void a_pool_leaves_the_cursor() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100, kCompute, true) == 0 && f.count(Outcome::pool) == 1);
  CHECK(f.take(100) == kBase);
}

void without_an_arena() {
  Following f({{kForward, {{{100, 0}}}}}, 0);
  f.core.enter(kForward);
  CHECK(f.take(100) == 0 && f.count(Outcome::arena) == 1);
}

void a_slot_past_the_arenas_end() {
  Following f({{kForward, {{{100, 950}, {100, ~Bytes{0} - 50}, {100, 900}}}}});
  f.core.enter(kForward);
  CHECK(f.take(100) == 0 && f.take(100) == 0 && f.count(Outcome::arena) == 2);
  CHECK(f.take(100) == kBase + 900);
}

// ---- which requests are our business

void only_large_requests_in_a_phase_of_a_pass_concern_us() {
  Core core;
  core.set_min_bytes(64);
  core.load_plan(0, {});
  CHECK(!core.concerns(64));
  core.enter(kForward);  // no pass
  CHECK(!core.concerns(64));
  core.begin_pass(Mode::plan, 0, kCompute);
  CHECK(!core.concerns(64));  // no phase
  core.enter(kForward);
  CHECK(core.concerns(64) && !core.concerns(63));
  core.enter(kNoPhase);
  CHECK(!core.concerns(64));
  core.enter(kForward);
  core.stop();
  CHECK(!core.concerns(64) && core.mode() == Mode::off);
}

void an_unknown_plan_begins_nothing() {
  Core core;
  CHECK(!core.begin_pass(Mode::plan, 3, kCompute));
  CHECK(core.mode() == Mode::off);
}

void replacing_the_plan_of_the_running_pass_ends_the_pass() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.enter(kForward);
  f.core.load_plan(1, {{kForward, {{{100, 100}}}}});
  CHECK(f.core.mode() == Mode::plan);  // it was another one
  f.core.load_plan(0, {{kForward, {{{100, 200}}}}});
  CHECK(f.core.mode() == Mode::off);
  CHECK(f.core.begin_pass(Mode::plan, 0, kCompute));
  f.core.enter(kForward);
  CHECK(f.take(100) == kBase + 200);
  f.core.forget_plan(0);
  CHECK(f.core.mode() == Mode::off && !f.core.begin_pass(Mode::plan, 0, kCompute));
}

// ---- live ranges

void what_touches_does_not_overlap() {
  auto arena = arena_of(300);
  std::vector<Fence> fences;
  CHECK(arena->take(100, 100, fences));
  CHECK(arena->take(0, 100, fences) && arena->take(200, 100, fences));
  CHECK(arena->live() == 3);
}

void every_kind_of_overlap_is_refused() {
  auto arena = arena_of(1000);
  std::vector<Fence> fences;
  CHECK(arena->take(100, 100, fences));
  for (auto [offset, size] : {std::pair<Bytes, Bytes>{100, 100}, {99, 2}, {199, 1}, {0, 1000}, {120, 10}, {50, 100}, {150, 100}})
    CHECK(!arena->take(offset, size, fences));
  CHECK(arena->live() == 1);
}

void nothing_of_no_size_or_beyond_the_end() {
  auto arena = arena_of(1000);
  std::vector<Fence> fences;
  CHECK(!arena->take(0, 0, fences));
  CHECK(!arena->take(0, 1001, fences) && !arena->take(1000, 1, fences) && !arena->take(kNative, 1, fences));
  CHECK(!arena->take(1, ~Bytes{0}, fences));
  CHECK(arena->take(0, 1000, fences));
}

void only_the_start_of_a_live_range_can_be_freed() {
  auto arena = arena_of(1000);
  std::vector<Fence> fences;
  arena->take(100, 100, fences);
  CHECK(arena->give(kBase + 101, 0) == 0 && arena->give(kBase, 0) == 0 && arena->give(kBase + 200, 0) == 0);
  CHECK(arena->give(kBase + 100, 0) == 100);
  CHECK(arena->give(kBase + 100, 0) == 0);  // twice
  CHECK(arena->live() == 0);
}

void freed_ranges_can_be_cut_otherwise() {
  auto arena = arena_of(1000);
  std::vector<Fence> fences;
  for (Bytes offset : {0, 100, 200, 300}) CHECK(arena->take(offset, 100, fences));
  for (Bytes offset : {100, 200}) arena->give(kBase + offset, 0);
  CHECK(!arena->take(50, 100, fences) && !arena->take(250, 100, fences));
  CHECK(arena->take(150, 100, fences));
  CHECK(arena->take(100, 50, fences) && arena->take(250, 50, fences));
  CHECK(arena->live() == 5 && fences.empty());
}

void fences_reach_the_next_writer() {
  auto arena = arena_of(1000);
  std::vector<Fence> fences;
  for (Bytes offset : {0, 100, 200, 300}) arena->take(offset, 100, fences);
  arena->give(kBase, 11), arena->give(kBase + 100, 12), arena->give(kBase + 200, 0), arena->give(kBase + 300, 14);
  CHECK(arena->take(50, 200, fences));
  CHECK((fences == std::vector<Fence>{11, 12}));
  CHECK((arena->fences() == std::vector<Fence>{14}));
  fences.clear();
  CHECK(!arena->take(0, 400, fences) && fences.empty());  // refused: no stream will wait, so no fence may be forgotten
  CHECK(arena->take(0, 50, fences) && fences.empty());    // 11 was waited for, on the arena's stream
  CHECK((arena->fences() == std::vector<Fence>{14}));
}

void waits_are_counted() {
  Following f({{kForward, {{{100, 0}, {100, 0}}}}});
  f.core.enter(kForward);
  CHECK(f.give(f.take(100), 5));
  CHECK(f.take(100) == kBase && f.core.stats.waits == 1 && f.fences.size() == 1);
}

void bytes_are_counted() {
  Following f({{kForward, {{{100, 0}, {200, 700}, {50, 0}}}}});
  f.core.enter(kForward);
  const Address first = f.take(100), second = f.take(200);
  CHECK(f.core.stats.live_bytes == 300 && f.core.stats.peak_bytes == 300 && f.core.stats.highest_end == 900);
  f.give(first);
  f.take(50);
  CHECK(f.core.stats.live_bytes == 250 && f.core.stats.peak_bytes == 300);
  f.give(second);
  CHECK(f.core.stats.live_bytes == 50);
}

// ---- arenas

void an_empty_arena_is_returned_at_once() {
  Core core;
  bool gone = false;
  CHECK(!core.replace_arena(arena_of(100, &gone)) && core.has_arena());
  auto old = core.replace_arena(nullptr);
  CHECK(old && !gone && !core.has_arena() && core.retired() == 0);
  old.reset();
  CHECK(gone);
}

void an_arena_in_use_stays_until_its_last_block_is_freed() {
  Following f({{kForward, {{{100, 0}, {100, 100}}, {{100, 0}}}}}, 0);
  bool gone = false;
  f.core.replace_arena(arena_of(1000, &gone));
  f.core.enter(kForward);
  const Address first = f.take(100), second = f.take(100);
  CHECK(!f.core.replace_arena(arena_of(1000, nullptr, kBase + 5000)) && f.core.retired() == 1);
  CHECK(f.core.owner(first) != nullptr && f.core.owner(first) != f.core.arena());
  f.core.enter(kForward);
  const Address third = f.take(100);
  CHECK(third == kBase + 5000);

  std::unique_ptr<Arena> drained;
  CHECK(f.core.give(first, 0, drained) && !drained);
  CHECK(f.core.give(third, 0, drained) && !drained);  // the present one never drains
  CHECK(f.core.give(second, 3, drained) && drained && f.core.retired() == 0);
  CHECK((drained->fences() == std::vector<Fence>{3}));  // for the backend to wait for before the memory goes back
  CHECK(!gone && f.core.owner(second) == nullptr);
  drained.reset();
  CHECK(gone && f.core.stats.live_bytes == 0);
}

void foreign_addresses_have_no_range() {
  Following f({{kForward, {{{100, 0}}}}});
  CHECK(!f.give(kBase - 1) && !f.give(kBase + 1000) && !f.give(0));
  CHECK(f.core.owner(kBase + 999) == f.core.arena() && !f.core.owner(kBase + 1000) && !f.core.owner(kBase - 1));
}

// ---- the log

void a_pass_is_logged() {
  Core core;
  core.begin_pass(Mode::profile, 0, kCompute);
  core.enter(kForward);
  core.log_malloc(0x100, 64, kCompute);
  core.log_malloc(0x200, 32, kSide);  // on another stream: not in the order of the compute stream
  core.log_malloc(0x300, 16, kCompute);
  core.enter(kBackward);
  core.log_free(0x100);
  core.log_free(0x200);
  core.log_malloc(0x100, 8, kCompute);  // the address again
  core.enter(kNoPhase);
  core.log_free(0x300);
  const auto log = core.take_log();
  const std::vector<std::array<uint64_t, 4>> expected{
      {0, kForward, 0, 0},  {1, kForward, 0, 64}, {3, kForward, 1, 32}, {1, kForward, 2, 16},           {0, kBackward, 0, 0},
      {2, kBackward, 0, 0}, {2, kBackward, 1, 0}, {1, kBackward, 3, 8}, {2, uint64_t(kNoPhase), 2, 0},
  };
  CHECK(log.size() == expected.size());
  for (size_t i = 0; i < std::min(log.size(), expected.size()); ++i) {
    const bool has_phase = log[i].kind != Kind::free;
    CHECK(static_cast<uint64_t>(log[i].kind) == expected[i][0] && log[i].id == expected[i][2] && log[i].size == expected[i][3]);
    CHECK(!has_phase || static_cast<uint64_t>(log[i].phase) == expected[i][1]);
  }
  CHECK(core.take_log().empty());
}

void logged_blocks_may_die_in_any_mode() {
  Core core;
  core.begin_pass(Mode::profile, 0, kCompute);
  core.enter(kForward);
  core.log_malloc(0x100, 64, kCompute);
  core.log_malloc(0x200, 64, kCompute);
  CHECK(core.has_logged());
  core.stop();
  core.take_log();
  core.log_free(0x100);
  CHECK(core.take_log().empty() && core.has_logged());
  core.begin_pass(Mode::profile, 0, kCompute);
  core.log_free(0x200);  // in a later profile: with its old number
  const auto log = core.take_log();
  CHECK(log.size() == 1 && log[0].id == 1 && !core.has_logged());
  core.log_free(0x200);
  CHECK(core.take_log().empty());
}

void nothing_is_logged_unless_profiling() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.enter(kForward);
  f.core.log_malloc(0x100, 64, kCompute);
  CHECK(f.core.take_log().empty() && !f.core.has_logged());
}

int main() {
  const std::pair<const char*, std::function<void()>> tests[] = {
#define TEST(name) {#name, name}
      TEST(the_kth_request_gets_the_kth_slot),
      TEST(each_visit_has_its_own_slots),
      TEST(a_pass_begins_with_the_first_visits_again),
      TEST(a_native_slot_moves_the_cursor),
      TEST(an_overlap_moves_the_cursor),
      TEST(another_size_abandons_the_visit_and_only_that),
      TEST(a_plan_of_sizes_that_were_worked_out_spares_some),
      TEST(more_requests_than_planned),
      TEST(a_phase_that_the_plan_lacks),
      TEST(another_stream_leaves_the_cursor),
      TEST(an_arena_of_another_stream_is_not_used),
      TEST(a_pool_leaves_the_cursor),
      TEST(without_an_arena),
      TEST(a_slot_past_the_arenas_end),
      TEST(only_large_requests_in_a_phase_of_a_pass_concern_us),
      TEST(an_unknown_plan_begins_nothing),
      TEST(replacing_the_plan_of_the_running_pass_ends_the_pass),
      TEST(what_touches_does_not_overlap),
      TEST(every_kind_of_overlap_is_refused),
      TEST(nothing_of_no_size_or_beyond_the_end),
      TEST(only_the_start_of_a_live_range_can_be_freed),
      TEST(freed_ranges_can_be_cut_otherwise),
      TEST(fences_reach_the_next_writer),
      TEST(waits_are_counted),
      TEST(bytes_are_counted),
      TEST(an_empty_arena_is_returned_at_once),
      TEST(an_arena_in_use_stays_until_its_last_block_is_freed),
      TEST(foreign_addresses_have_no_range),
      TEST(a_pass_is_logged),
      TEST(logged_blocks_may_die_in_any_mode),
      TEST(nothing_is_logged_unless_profiling),
  };
  for (const auto& [name, test] : tests) {
    const int before = failures;
    test();
    if (failures > before) std::printf("FAILED %s\n", name);
  }
  std::printf("%zu tests, %d failed checks\n", std::size(tests), failures);
  return failures ? 1 : 0;
}
