// Exact search for offline dynamic storage allocation: does every buffer fit below a capacity, and where?
//
// The ideas of canonical (bottom-justified) solutions, sections and decomposition are MiniMalloc's (Moffitt, ASPLOS
// 2023, doi 10.1145/3623278.3624752). Branching on one section's next buffer, the release-time bound, backjumping over
// decisions that a dead end does not depend on, and the table of dead states are this file's own.
//
// Vocabulary. A *section* is a maximal set of buffers alive together; each buffer covers the sections first..last. The
// search builds upwards: `floor[s]` is the height below which nothing more may be put in section s. A *valley* is a
// run of sections of equal floor with higher floors on both sides. At a section of a valley exactly one thing is true:
// one of the buffers that fit into the valley rests on the floor here, or none does (the section is *closed* at this
// floor and later *lifted* to the lower of the walls around it). That is the branching, and it is complete.
//
// Why a dead end is dead is kept as a set of *literals* ("buffer i rests at its offset", "section s was closed").
// `cone[s]` holds the literals that imply floor[s] and what lies below it. A decision whose literal is not among the
// reasons of its subtree's failure cannot repair it: the search jumps over it.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using i64 = std::int64_t;
using u64 = std::uint64_t;
using Clock = std::chrono::steady_clock;
using Literals = std::vector<u64>;  // a bit set: buffers first, then sections

enum Verdict { kDead = 0, kSolved = 1, kNodeLimit = -1, kTimeLimit = -2 };

constexpr i64 kNoOffset = -1;
constexpr i64 kNoWall = INT64_MAX;
constexpr int kTableBits = 20;  // dead states remembered: 2^20 of 16 bytes

u64 Mix(u64 x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

struct State {  // 128 bits of hash of a component's unplaced buffers and floors
  u64 a = 0, b = 0;
  bool operator==(const State& o) const { return a == o.a && b == o.b; }
};

struct Change {  // one entry of the undo trail
  enum Kind { kPlaced, kFloorByBuffer, kClosed, kLifted, kRelease, kSlack } kind;
  int index;
  i64 before;
  bool closed_before;
};

struct Raise {  // sections first..last now have their floor at `height`
  int first, last;
  i64 height;
};

class Search {
 public:
  Search(int n, int sections, const int* first, const int* last, const i64* size, i64 capacity, const int* twin)
      : n_(n), sections_(sections), words_((n + sections + 63) / 64), first_(first, first + n), last_(last, last + n),
        twin_(twin, twin + n), size_(size, size + n), capacity_(capacity), offset_(n, kNoOffset), release_(n, 0),
        floor_(sections, 0), rest_(sections, 0), slack_(sections, 0), closed_(sections, 0), times_closed_(sections, 0),
        count_(sections, 0), cut_(sections, 0), at_(sections), cone_(static_cast<size_t>(sections) * words_, 0),
        is_dirty_(sections, 0), options_(sections + 1, 0), table_(size_t{1} << kTableBits), weight_(sections, 1.0) {
    for (int i = 0; i < n; ++i) {
      for (int s = first_[i]; s <= last_[i]; ++s) {
        at_[s].push_back(i);
        rest_[s] += size_[i];
        ++count_[s];
        if (s < last_[i]) ++cut_[s];
      }
    }
  }

  // Restarts with growing node limits; dead states and section weights carry over.
  int Run(const double* preference, int orders, double seconds, i64 max_nodes) {
    deadline_ = Clock::now() + std::chrono::microseconds(static_cast<i64>(seconds * 1e6));
    std::vector<int> all(n_);
    for (int i = 0; i < n_; ++i) all[i] = i;
    for (int s = 0; s < sections_; ++s) MarkDirty(s);
    Literals why(words_, 0);
    if (!Propagate(0, sections_ - 1, all, why)) return kDead;
    prefer_.assign(n_, 0.0);
    i64 limit = 4 * static_cast<i64>(n_);
    for (i64 round = 0;; ++round) {
      const int order = static_cast<int>(round % orders);
      for (int i = 0; i < n_; ++i) {
        const double uniform = static_cast<double>(Mix(1 + round * n_ + i) >> 40) / (1 << 24);
        const double noise = round < orders ? 1.0 : 1.0 + 0.3 * uniform;
        prefer_[i] = preference[static_cast<size_t>(order) * n_ + i] * noise;
      }
      low_first_ = (round/orders)%2==0;
      node_limit_ = std::min(nodes + limit, max_nodes);
      const int verdict = Solve(0, sections_ - 1, all, why);
      if (verdict != kNodeLimit || nodes >= max_nodes) return verdict;
      for (double& w : weight_) w = 1.0 + (w - 1.0) * 0.3;
      if (order == orders - 1) limit += limit / 2;
    }
  }

  const std::vector<i64>& offsets() const { return offset_; }
  i64 nodes = 0;

 private:
  // ---- decisions and their undoing
  u64* Cone(int s) { return &cone_[static_cast<size_t>(s) * words_]; }
  void AddCone(Literals& why, int s) {
    const u64* cone = Cone(s);
    for (int k = 0; k < words_; ++k) why[k] |= cone[k];
  }
  static void Set(u64* bits, int k) { bits[k / 64] |= u64{1} << (k % 64); }
  static bool Has(const Literals& bits, int k) { return bits[k / 64] >> (k % 64) & 1; }

  void Place(int i, i64 at) {
    offset_[i] = at;
    for (int s = first_[i]; s <= last_[i]; ++s) {
      trail_.push_back({Change::kFloorByBuffer, s, floor_[s], closed_[s] != 0});
      floor_[s] = at + size_[i];
      closed_[s] = 0;
      rest_[s] -= size_[i];
      --count_[s];
      if (s < last_[i]) --cut_[s];
      Set(Cone(s), i);
    }
    raised_.push_back({first_[i], last_[i], at + size_[i]});
    trail_.push_back({Change::kPlaced, i, 0, false});
  }
  void Close(int s) {
    SaveCone(s);
    trail_.push_back({Change::kClosed, s, floor_[s], closed_[s] != 0});
    closed_[s] = 1;
    ++times_closed_[s];
    Set(Cone(s), n_ + s);
  }
  void Lift(int s, i64 height, const Literals& why) {
    SaveCone(s);
    trail_.push_back({Change::kLifted, s, floor_[s], closed_[s] != 0});
    floor_[s] = height;
    closed_[s] = 0;
    for (int k = 0; k < words_; ++k) Cone(s)[k] |= why[k];
  }
  void SaveCone(int s) { cones_before_.insert(cones_before_.end(), Cone(s), Cone(s) + words_); }

  void Undo(size_t mark) {
    while (trail_.size() > mark) {
      const Change c = trail_.back();
      trail_.pop_back();
      const int x = c.index;
      switch (c.kind) {
        case Change::kPlaced:
          offset_[x] = kNoOffset;
          for (int s = first_[x]; s <= last_[x]; ++s) {
            rest_[s] += size_[x];
            ++count_[s];
            if (s < last_[x]) ++cut_[s];
            Cone(s)[x / 64] &= ~(u64{1} << (x % 64));
          }
          break;
        case Change::kRelease: release_[x] = c.before; break;
        case Change::kSlack: slack_[x] = c.before; break;
        case Change::kClosed: --times_closed_[x]; [[fallthrough]];
        case Change::kLifted:
          std::memcpy(Cone(x), &cones_before_[cones_before_.size() - words_], words_ * sizeof(u64));
          cones_before_.resize(cones_before_.size() - words_);
          [[fallthrough]];
        case Change::kFloorByBuffer:
          floor_[x] = c.before;
          closed_[x] = c.closed_before;
          break;
      }
    }
    raised_.clear();
  }

  // ---- inference
  void MarkDirty(int s) {
    if (!is_dirty_[s]) {
      is_dirty_[s] = 1;
      dirty_.push_back(s);
    }
  }

  // Lifts closed runs, updates releases (a buffer's lowest possible offset), bounds every section that changed.
  bool Propagate(int first, int last, const std::vector<int>& items, Literals& why) {
    if (!LiftClosedRuns(first, last, items, why)) return false;
    if (!raised_.empty()) {
      for (int i : items) {
        i64 release = release_[i];
        for (const Raise& r : raised_) {
          if (first_[i] <= r.last && r.first <= last_[i]) release = std::max(release, r.height);
        }
        if (release == release_[i]) continue;
        trail_.push_back({Change::kRelease, i, release_[i], false});
        release_[i] = release;
        for (int s = first_[i]; s <= last_[i]; ++s) MarkDirty(s);
      }
      for (const Raise& r : raised_) for (int s = r.first; s <= r.last; ++s) MarkDirty(s);
      raised_.clear();
    }
    bool fits = true;
    for (int s : dirty_) {
      is_dirty_[s] = 0;
      if (fits && count_[s] && !Bound(s, why)) {
        weight_[s] += 1.0;
        fits = false;
      }
    }
    dirty_.clear();
    return fits;
  }

  bool LiftClosedRuns(int first, int last, const std::vector<int>& items, Literals& why) {
    for (bool again = true; again;) {
      again = false;
      for (int s = first, e; s <= last; s = e + 1) {
        e = s;
        if (!closed_[s] || !count_[s]) continue;
        while (e < last && closed_[e + 1] && count_[e + 1] && floor_[e + 1] == floor_[s]) ++e;
        const i64 left = Wall(s - 1, first, last), right = Wall(e + 1, first, last);
        if (left <= floor_[s] || right <= floor_[s]) continue;
        const i64 height = std::min(left, right);
        Literals reason(words_, 0);
        for (int q = std::max(first, s - 1); q <= std::min(last, e + 1); ++q) AddCone(reason, q);
        // Nothing to rest on, or the gap would hold a buffer that could as well be dropped into it: not canonical.
        bool dead = height == kNoWall;
        for (size_t k = 0; k < items.size() && !dead; ++k) {
          const int i = items[k];
          dead = offset_[i] == kNoOffset && s <= first_[i] && last_[i] <= e && size_[i] <= height - floor_[s];
        }
        if (dead) {
          why = reason;
          return false;
        }
        for (int q = s; q <= e; ++q) Lift(q, height, reason);
        raised_.push_back({s, e, height});
        again = true;
      }
    }
    return true;
  }

  i64 Wall(int s, int first, int last) const {
    return s < first || s > last || !count_[s] ? kNoWall : floor_[s];
  }

  // Stacks what is left of section s, each buffer not below its release: where it ends at the earliest. Sets the slack.
  bool Bound(int s, Literals& why) {
    i64 height = floor_[s];
    late_.clear();
    for (int i : at_[s]) {
      if (offset_[i] != kNoOffset) continue;
      if (release_[i] <= floor_[s]) height += size_[i];
      else late_.push_back({release_[i], i});
    }
    std::sort(late_.begin(), late_.end());
    i64 base = floor_[s];
    size_t base_k = 0;  // late_[base_k..] alone, stacked from `base`, end at `height`
    for (size_t k = 0; k < late_.size(); ++k) {
      if (late_[k].first > height) {
        base = height = late_[k].first;
        base_k = k;
      }
      height += size_[late_[k].second];
    }
    const i64 slack = capacity_ - height;
    if (slack != slack_[s]) {
      trail_.push_back({Change::kSlack, s, slack_[s], false});
      slack_[s] = slack;
    }
    if (slack >= 0) return true;
    std::fill(why.begin(), why.end(), 0);
    if (base == floor_[s]) {
      AddCone(why, s);
      return false;
    }
    std::vector<char> used(sections_, 0);
    for (size_t k = base_k; k < late_.size(); ++k) {  // one section that keeps each of them at or above `base`
      const int i = late_[k].second;
      int best = -1;
      for (int q = first_[i]; q <= last_[i]; ++q) {
        if (floor_[q] < base) continue;
        if (used[q]) { best = q; break; }
        if (best < 0 || std::abs(q - s) < std::abs(best - s)) best = q;
      }
      if (!used[best]) AddCone(why, best);
      used[best] = 1;
    }
    return false;
  }

  // ---- the tree
  int Solve(int first, int last, const std::vector<int>& parent, Literals& why) {
    if (nodes >= node_limit_) return kNodeLimit;
    if ((++nodes & 15) == 0 && Clock::now() > deadline_) return kTimeLimit;
    std::vector<int> items;
    items.reserve(parent.size());
    for (int i : parent) if (offset_[i] == kNoOffset) items.push_back(i);
    const size_t mark = trail_.size();
    if (!Propagate(first, last, items, why)) {
      Undo(mark);
      return kDead;
    }
    if (items.empty()) return kSolved;
    const auto parts = Components(first, last);
    if (parts.size() > 1 || parts[0] != std::make_pair(first, last)) return SolveParts(parts, items, why, mark);

    const State state = Fingerprint(first, last, items);
    State& known = table_[state.a >> (64 - kTableBits)];
    if (known == state) {
      std::fill(why.begin(), why.end(), 0);
      for (int s = first; s <= last; ++s) AddCone(why, s);
      Undo(mark);
      return kDead;
    }
    const int verdict = Branch(first, last, items, why);
    if (verdict == kSolved) return verdict;
    Undo(mark);
    if (verdict == kDead) known = state;
    return verdict;
  }

  // Stretches of sections that no unplaced buffer connects.
  std::vector<std::pair<int, int>> Components(int first, int last) const {
    std::vector<std::pair<int, int>> parts;
    int start = -1;
    for (int s = first; s <= last; ++s) {
      if (!count_[s]) continue;
      if (start < 0) start = s;
      if (s == last || cut_[s] == 0) {
        parts.push_back({start, s});
        start = -1;
      }
    }
    return parts;
  }

  int SolveParts(const std::vector<std::pair<int, int>>& parts, const std::vector<int>& items, Literals& why,
                 size_t mark) {
    std::vector<std::pair<size_t, size_t>> by_size;
    std::vector<std::vector<int>> members(parts.size());
    for (int i : items) {
      size_t p = 0;
      while (last_[i] > parts[p].second) ++p;
      members[p].push_back(i);
    }
    for (size_t p = 0; p < parts.size(); ++p) by_size.push_back({members[p].size(), p});
    std::sort(by_size.begin(), by_size.end());
    for (const auto& [_, p] : by_size) {
      const int verdict = Solve(parts[p].first, parts[p].second, members[p], why);
      if (verdict != kSolved) {
        Undo(mark);
        return verdict;
      }
    }
    return kSolved;
  }

  State Fingerprint(int first, int last, const std::vector<int>& items) const {
    State state;
    for (int i : items) {
      state.a ^= Mix(i + 1);
      state.b ^= Mix(~static_cast<u64>(i));
    }
    for (int s = first; s <= last; ++s) {
      const u64 v = Mix(Mix(static_cast<u64>(floor_[s]) * 2 + closed_[s]) + s);
      state.a += v;
      state.b += Mix(v);
    }
    return state;
  }

  bool Twinned(int i) const { return twin_[i] >= 0 && offset_[twin_[i]] == kNoOffset; }  // try the earlier twin first

  struct Corner { int section = -1, left = 0, right = 0; };

  // The section of a valley with the fewest options, sections of frequent failures before others.
  Corner Choose(int first, int last, const std::vector<int>& items) {
    Corner best;
    double best_score = 0;
    for (int l = first, r; l <= last; l = r + 1) {
      r = l;
      if (closed_[l]) continue;
      while (r < last && !closed_[r + 1] && floor_[r + 1] == floor_[l]) ++r;
      if (Wall(l - 1, first, last) < floor_[l] || Wall(r + 1, first, last) < floor_[l]) continue;
      std::fill(options_.begin() + l, options_.begin() + r + 2, 0);
      for (int i : items) {
        if (first_[i] < l || last_[i] > r || Twinned(i)) continue;
        ++options_[first_[i]];
        --options_[last_[i] + 1];
      }
      int resting = 0;
      for (int s = l; s <= r; ++s) {
        resting += options_[s];
        const int options = resting + (slack_[s] > 0);
        double score = -1.0;
        if (options > 1) {
          score = options / weight_[s];
          if (low_first_) score += 10.0 * static_cast<double>(floor_[s]) / static_cast<double>(capacity_);
        }
        if (best.section < 0 || score < best_score) {
          best_score = score;
          best = {s, l, r};
        }
      }
    }
    return best;
  }

  int Branch(int first, int last, const std::vector<int>& items, Literals& why) {
    const Corner corner = Choose(first, last, items);
    const int s = corner.section;
    const i64 at = floor_[s];
    bool wider_left = false, wider_right = false;
    std::vector<std::pair<double, int>> resting;
    for (int i : at_[s]) {
      if (offset_[i] != kNoOffset) continue;
      const bool left = first_[i] < corner.left, right = last_[i] > corner.right;
      wider_left |= left;
      wider_right |= right;
      if (!left && !right && !Twinned(i)) resting.push_back({-prefer_[i], i});
    }
    std::sort(resting.begin(), resting.end());
    // The reasons for no other options: the buffers in this section, and the walls that keep wider buffers out.
    Literals reasons(words_, 0), below(words_, 0);
    AddCone(reasons, s);
    if (wider_left && corner.left > first) AddCone(reasons, corner.left - 1);
    if (wider_right && corner.right < last) AddCone(reasons, corner.right + 1);
    const bool may_close = at + rest_[s] < capacity_;
    const size_t mark = trail_.size();
    for (size_t k = 0; k < resting.size() + may_close; ++k) {
      int literal;
      if (k < resting.size()) {
        literal = resting[k].second;
        Place(literal, at);
      } else {
        literal = n_ + s;
        Close(s);
      }
      const int verdict = Solve(first, last, items, below);
      if (verdict != kDead) return verdict;
      Undo(mark);
      if (!Has(below, literal)) {  // this decision had no part in the failure
        why = below;
        return kDead;
      }
      if (literal < n_ || times_closed_[s] == 0) below[literal / 64] &= ~(u64{1} << (literal % 64));
      for (int w = 0; w < words_; ++w) reasons[w] |= below[w];
    }
    why = reasons;
    return kDead;
  }

  const int n_, sections_, words_;
  const std::vector<int> first_, last_, twin_;
  const std::vector<i64> size_;
  const i64 capacity_;
  std::vector<i64> offset_, release_;
  std::vector<i64> floor_, rest_, slack_;        // per section: height reached, units still to come, capacity left over
  std::vector<char> closed_;
  std::vector<int> times_closed_, count_, cut_;  // count: unplaced buffers; cut: those of them that go on to s + 1
  std::vector<std::vector<int>> at_;
  std::vector<u64> cone_, cones_before_;
  std::vector<Change> trail_;
  std::vector<Raise> raised_;                    // since the last Propagate
  std::vector<int> dirty_;                       // sections whose bound must be computed again
  std::vector<char> is_dirty_;
  std::vector<int> options_;
  std::vector<std::pair<i64, int>> late_;
  std::vector<State> table_;
  std::vector<double> weight_, prefer_;
  bool low_first_ = true;
  i64 node_limit_ = 0;
  Clock::time_point deadline_;
};

}  // namespace

extern "C" {

// Arguments are checked by the caller (ds_memo/plan/search.py). n >= 1 buffers cover sections first[i]..last[i] of
// `sections`; twin[i] is the previous buffer of the same span and size, or -1; preference has `orders` rows of n, the
// larger is tried first. Returns 1 and the offsets, 0 where no placement exists, -1 at max_nodes, -2 at the time limit,
// -3 where memory ran out.
int ds_memo_dsa_search(int n, int sections, const int* first, const int* last, const std::int64_t* size,
                       std::int64_t capacity, const int* twin, const double* preference, int orders, double seconds,
                       std::int64_t max_nodes, std::int64_t* offsets, std::int64_t* nodes) {
  try {
    Search search(n, sections, first, last, size, capacity, twin);
    const int verdict = search.Run(preference, orders, seconds, max_nodes);
    *nodes = search.nodes;
    if (verdict == kSolved) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
    return verdict;
  } catch (...) {
    return -3;
  }
}

}  // extern "C"
