// CPU backend: a c10 allocator that serves planned requests from the arena and hands all others to the one before it.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdio>

#include "allocator_core.h"
#include "allocator_python.h"
#include "checkpoint.h"
#include "layer_settings.h"
#include "tiles.h"

namespace ds_memo {
namespace {

constexpr Bytes kAlignment = 512;  // of the arena's start, so that every slot has CUDA's alignment here too
constexpr uint8_t kPriority = 1;   // torch's own CPU allocator has 0

c10::Allocator* native = nullptr;
c10::DeleterFnPtr native_free = nullptr;

Core& the_core() {
  static Core* core = new Core;  // never destroyed: tensors that live to the process's end come here to be freed
  return *core;
}

Stream this_thread() { return static_cast<Stream>(pthread_self()); }

void free_planned(void* address) {
  Core& core = the_core();
  std::unique_ptr<Arena> drained;
  bool known;
  {
    std::lock_guard<std::mutex> lock(core.mutex);
    known = core.give(reinterpret_cast<Address>(address), 0, drained);
  }
  if (!known) std::fprintf(stderr, "ds_memo: %p was freed and is no live block of the arena; ignored\n", address);
  // `drained` goes here, outside the lock: its memory returns to the native allocator.
}

void free_logged(void* address) {
  Core& core = the_core();
  {
    std::lock_guard<std::mutex> lock(core.mutex);
    core.log_free(reinterpret_cast<Address>(address));
  }
  native_free(address);
}

// What raw_allocate() hands out without a deleter may have come from anywhere.
void free_any(void* address) {
  Core& core = the_core();
  if (core.has_arena()) {
    bool planned;
    {
      std::lock_guard<std::mutex> lock(core.mutex);
      planned = core.owner(reinterpret_cast<Address>(address)) != nullptr;
    }
    if (planned) return free_planned(address);
  }
  if (core.has_logged()) return free_logged(address);
  native_free(address);
}

class PlannedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    Core& core = the_core();
    if (!core.concerns(size)) return native->allocate(size);
    if (core.mode() == Mode::profile) return allocate_logged(core, size);
    std::optional<Address> address;
    {
      std::vector<Fence> none;  // nothing runs behind the host's back here
      std::lock_guard<std::mutex> lock(core.mutex);
      address = core.take(size, this_thread(), false, none);
    }
    if (!address) return native->allocate(size);
    void* data = reinterpret_cast<void*>(*address);
    return {data, data, &free_planned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    const auto deleter = data.get_deleter();
    return data.get() == data.get_context() &&
           (deleter == native_free || deleter == &free_planned || deleter == &free_logged || deleter == &free_any);
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }

 private:
  static c10::DataPtr allocate_logged(Core& core, size_t size) {
    c10::DataPtr data = native->allocate(size);
    if (data.get() == data.get_context() && data.compare_exchange_deleter(native_free, &free_logged)) {
      std::lock_guard<std::mutex> lock(core.mutex);
      core.log_malloc(reinterpret_cast<Address>(data.get()), size, this_thread());
    }
    return data;
  }
};

PlannedAllocator* planned() {
  static PlannedAllocator* allocator = new PlannedAllocator;
  return allocator;
}

// A child has the parent's tensors and may free them; it plans nothing.
void prepare_fork() { the_core().mutex.lock(); }
void fork_in_parent() { the_core().mutex.unlock(); }
void fork_in_child() {
  the_core().stop();
  the_core().mutex.unlock();
}

struct Cpu {
  static Core& core(int) { return the_core(); }

  static bool installed() { return c10::GetAllocator(c10::kCPU) == planned(); }

  static void install() {
    if (installed()) return;
    c10::Allocator* present = c10::GetAllocator(c10::kCPU);
    TORCH_CHECK(!native || native == present, "the CPU allocator was replaced by another one after ds_memo was uninstalled");
    TORCH_CHECK(present->raw_deleter(), "ds_memo cannot wrap the present CPU allocator: it has no raw_deleter");
    native = present;
    native_free = present->raw_deleter();
    c10::SetAllocator(c10::kCPU, planned(), kPriority);
    TORCH_CHECK(installed(), "another CPU allocator is registered with a priority above ", int{kPriority});
    static const int once = pthread_atfork(&prepare_fork, &fork_in_parent, &fork_in_child);
    TORCH_CHECK(once == 0, "pthread_atfork failed with ", once);
  }

  // While an arena has live blocks the op remains in front: raw_deallocate() asks the allocator of that time for the deleter.
  static void uninstall() {
    if (installed() && !the_core().has_arena()) c10::SetAllocator(c10::kCPU, native, kPriority);
  }

  static Stream current_stream(int) { return this_thread(); }

  static std::unique_ptr<Arena> make_arena(int, Bytes bytes) {
    auto block = std::make_shared<c10::DataPtr>(native->allocate(bytes + kAlignment));
    const auto address = reinterpret_cast<Address>(block->get());
    return std::make_unique<Arena>((address + kAlignment - 1) / kAlignment * kAlignment, bytes, kAnyStream,
                                   std::move(block));
  }

  static void drop(int, std::unique_ptr<Arena> arena) { arena.reset(); }
};

}  // namespace
}  // namespace ds_memo

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "ds_memo's allocator op on CPU; see ds_memo.ops.allocator";
  ds_memo::bind<ds_memo::Cpu>(m);
  ds_memo::remat::bind_follower(m);
  ds_memo::remat::bind_checkpoint(m);
  ds_memo::remat::bind_layer_settings(m);
  ds_memo::tiles::bind_tiles(m);
}
