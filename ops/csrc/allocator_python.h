// The op's Python face, the same for every backend. A Backend has
//
//   static Core& core(int device);
//   static void install();            // throws where it cannot
//   static void uninstall();
//   static bool installed();
//   static Stream current_stream(int device);
//   static std::unique_ptr<Arena> make_arena(int device, Bytes bytes);    // through the native allocator
//   static void drop(int device, std::unique_ptr<Arena> arena);           // back to it; null is allowed
//
// The docstrings for users are in ops/allocator.py.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <map>
#include <string>
#include <tuple>

#include "allocator_core.h"

namespace ds_memo {

template <class Backend>
void bind(pybind11::module_& m) {
  namespace py = pybind11;
  using Lock = std::lock_guard<std::mutex>;

  m.attr("TORCH_VERSION") = TORCH_VERSION;  // the one it was compiled against
  m.def("install", &Backend::install);
  m.def("uninstall", &Backend::uninstall);
  m.def("installed", &Backend::installed);

  m.def("set_min_bytes", [](int device, Bytes bytes) { Backend::core(device).set_min_bytes(bytes); });
  using Visits = std::vector<std::pair<int, std::vector<std::pair<Bytes, Bytes>>>>;
  m.def("load_plan", [](int device, int key, const Visits& visits, Bytes spare) {
    Plan plan;
    for (const auto& [phase, slots] : visits) {
      Visit& visit = plan[phase].emplace_back();
      visit.reserve(slots.size());
      for (const auto& [size, offset] : slots) visit.push_back({size, offset});
    }
    Core& core = Backend::core(device);
    Lock lock(core.mutex);
    core.load_plan(key, std::move(plan), spare);
  });
  m.def("forget_plan", [](int device, int key) {
    Core& core = Backend::core(device);
    Lock lock(core.mutex);
    core.forget_plan(key);
  });
  m.def("forget_plans", [](int device) {
    Core& core = Backend::core(device);
    Lock lock(core.mutex);
    core.forget_plans();
  });

  m.def("begin_pass", [](int device, int mode, int key) {
    Core& core = Backend::core(device);
    const Stream stream = Backend::current_stream(device);
    Lock lock(core.mutex);
    if (!core.begin_pass(static_cast<Mode>(mode), key, stream))
      throw py::key_error("plan " + std::to_string(key) + " was never loaded");
  });
  m.def("stop", [](int device) {
    Core& core = Backend::core(device);
    Lock lock(core.mutex);
    core.stop();
  });
  m.def("enter", [](int device, int phase) {
    Core& core = Backend::core(device);
    Lock lock(core.mutex);
    core.enter(phase);
  });
  m.def("mode", [](int device) { return static_cast<int>(Backend::core(device).mode()); });

  m.def("set_arena", [](int device, Bytes bytes) {
    std::unique_ptr<Arena> old, fresh = bytes ? Backend::make_arena(device, bytes) : nullptr;
    Core& core = Backend::core(device);
    {
      Lock lock(core.mutex);
      old = core.replace_arena(std::move(fresh));
    }
    Backend::drop(device, std::move(old));
  });
  m.def("arena", [](int device) {
    Core& core = Backend::core(device);
    Lock lock(core.mutex);
    const Arena* arena = core.arena();
    return std::make_tuple(arena ? arena->base() : 0, arena ? arena->bytes() : 0, arena ? arena->live() : 0, core.retired());
  });

  m.def("take_log", [](int device) {
    std::vector<Request> log;
    {
      Core& core = Backend::core(device);
      Lock lock(core.mutex);
      log = core.take_log();
    }
    py::list requests(log.size());
    for (size_t i = 0; i < log.size(); ++i)
      requests[i] = py::make_tuple(static_cast<int>(log[i].kind), log[i].phase, log[i].id, log[i].size);
    return requests;
  });
  m.def("stats", [](int device) {
    Stats stats;
    {
      Core& core = Backend::core(device);
      Lock lock(core.mutex);
      stats = core.stats;
    }
    std::map<std::string, uint64_t> all{{"waits", stats.waits},
                                        {"gave_way", stats.gave_way},
                                        {"live_bytes", stats.live_bytes},
                                        {"peak_bytes", stats.peak_bytes},
                                        {"highest_end", stats.highest_end}};
    for (int i = 0; i < kOutcomes; ++i) all[kOutcomeNames[i]] = stats.count[i];
    return all;
  });
  m.def("owns", [](int device, Address address) {
    Core& core = Backend::core(device);
    Lock lock(core.mutex);
    return core.owner(address) != nullptr;
  });
}

}  // namespace ds_memo
