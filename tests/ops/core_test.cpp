// Unit tests of ops/csrc/allocator_core.h. Prints each check that fails; ends with their number. core_stress.cpp predicts
// cursor, outcomes, overlaps, fences and retired arenas; here is what its random requests do not reach.
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

  explicit Following(Plan plan) {
    core.load_plan(0, std::move(plan));
    core.replace_arena(arena_of(1000));
    CHECK(core.begin_pass(Mode::plan, 0, kCompute));
  }
  Address take(Bytes size) { return core.take(size, kCompute, false, fences).value_or(0); }
  bool give(Address address) {
    std::unique_ptr<Arena> drained;
    return core.give(address, 0, drained);
  }
  uint64_t count(Outcome outcome) const { return core.stats.count[static_cast<int>(outcome)]; }
};

// ---- slots

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

void an_arena_of_another_stream_is_not_used() {
  Following f({{kForward, {{{100, 0}}}}});
  f.core.replace_arena(arena_of(1000, nullptr, kBase, kSide));
  f.core.enter(kForward);
  CHECK(f.take(100) == 0 && f.count(Outcome::stream) == 1);
  f.core.replace_arena(arena_of(1000, nullptr, kBase, kAnyStream));
  CHECK(f.take(100) == kBase);
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

int main() {
  const std::pair<const char*, std::function<void()>> tests[] = {
#define TEST(name) {#name, name}
      TEST(a_plan_of_sizes_that_were_worked_out_spares_some),
      TEST(an_arena_of_another_stream_is_not_used),
      TEST(a_slot_past_the_arenas_end),
      TEST(only_large_requests_in_a_phase_of_a_pass_concern_us),
      TEST(an_unknown_plan_begins_nothing),
      TEST(replacing_the_plan_of_the_running_pass_ends_the_pass),
      TEST(nothing_of_no_size_or_beyond_the_end),
      TEST(only_the_start_of_a_live_range_can_be_freed),
      TEST(bytes_are_counted),
      TEST(an_empty_arena_is_returned_at_once),
      TEST(foreign_addresses_have_no_range),
      TEST(a_pass_is_logged),
  };
  for (const auto& [name, test] : tests) {
    const int before = failures;
    test();
    if (failures > before) std::printf("FAILED %s\n", name);
  }
  std::printf("%zu tests, %d failed checks\n", std::size(tests), failures);
  return failures ? 1 : 0;
}
