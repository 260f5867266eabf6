// CUDA backend: a CUDAAllocator that serves planned requests from the arena and forwards everything else to torch's native
// caching allocator, which also owns the arena: statistics, snapshots and empty_cache stay true.
//
// Built against the installed torch, 2.11 to 2.15, with a host compiler alone. Locks are taken in one order only: the
// native allocator's (its trace hook calls us), then a core's. No core's mutex is held while the native one is called.
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "allocator_core.h"
#include "allocator_python.h"
#include "checkpoint.h"
#include "layer_settings.h"
#include "tiles.h"

#define DS_MEMO_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if DS_MEMO_TORCH < 211
#error "ds_memo's CUDA allocator needs torch 2.11 or newer"
#endif

namespace ds_memo {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::cuda::CUDAStream;

constexpr uint8_t kPriority = 1;  // torch registers its own with 0 in 2.11 and with 1 since

Stream handle(cudaStream_t stream) { return reinterpret_cast<Stream>(stream); }
Address address_of(const void* data) { return reinterpret_cast<Address>(data); }

// One device. Everything is guarded by core.mutex.
struct Device {
  Core core;
  int pools = 0;  // memory pools in use: graph capture and torch.cuda.use_mem_pool
  std::unordered_map<Address, std::vector<cudaStream_t>> used_on;  // planned blocks that recordStream() was called for
  std::vector<void*> deferred;  // of those, freed during a capture: its streams must not be waited for from outside
  std::unordered_map<Fence, std::vector<cudaEvent_t>> events;      // behind the side streams' work on a freed range
  std::vector<cudaEvent_t> idle_events;
  Fence last_fence = 0;

  // One event behind what each stream was given so far.
  Fence make_fence(const std::vector<cudaStream_t>& streams) {
    std::vector<cudaEvent_t>& behind = events[++last_fence];
    for (cudaStream_t stream : streams) {
      cudaEvent_t event = nullptr;
      if (idle_events.empty()) {
        C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      } else {
        event = idle_events.back();
        idle_events.pop_back();
      }
      C10_CUDA_CHECK(cudaEventRecord(event, stream));
      behind.push_back(event);
    }
    return last_fence;
  }

  // The stream waits; the host does not.
  void wait(Stream stream, const std::vector<Fence>& fences) {
    for (Fence fence : fences) {
      const auto behind = events.find(fence);
      for (cudaEvent_t event : behind->second) {
        C10_CUDA_CHECK(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), event, 0));
        idle_events.push_back(event);
      }
      events.erase(behind);
    }
  }
};

void free_planned(void* data);
void free_any(void* data);

class PlannedAllocator final : public caching::CUDAAllocator {
 public:
  explicit PlannedAllocator(caching::CUDAAllocator* native) : native_(native), native_free_(native->raw_deleter()) {
    for (int i = 0; i < c10::cuda::device_count(); ++i) devices_.push_back(std::make_unique<Device>());
    // All frees of profiled blocks arrive here, under the native allocator's lock: no call into torch, CUDA or Python from
    // here.
    native_->attachAllocatorTraceTracker([this](const caching::TraceEntry& entry) {
      if (entry.action_ != caching::TraceEntry::FREE_REQUESTED) return;
      Core& core = devices_[entry.device_]->core;
      if (!core.has_logged()) return;
      std::lock_guard<std::mutex> lock(core.mutex);
      core.log_free(static_cast<Address>(entry.addr_));
    });
  }

  caching::CUDAAllocator* native() const { return native_; }
  Device& device(int index) {
    TORCH_CHECK(index >= 0 && index < devices(), "ds_memo: there is no device ", index, ", only ", devices(), " of them");
    return *devices_[index];
  }
  int devices() const { return static_cast<int>(devices_.size()); }
  bool has_arena() const {
    return std::any_of(devices_.begin(), devices_.end(), [](const auto& device) { return device->core.has_arena(); });
  }

  // ---- what is planned

  c10::DataPtr allocate(size_t size) override {
    DeviceIndex index = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&index));
    Device& device = *devices_[index];
    if (!device.core.concerns(size)) return allocate_native(index, size);
    const Stream stream = handle(c10::cuda::getCurrentCUDAStream(index).stream());
    if (device.core.mode() == Mode::profile) return allocate_logged(index, size, stream);
    std::optional<Address> address;
    {
      std::vector<Fence> fences;
      std::lock_guard<std::mutex> lock(device.core.mutex);
      address = device.core.take(size, stream, device.pools > 0, fences);
      device.wait(stream, fences);
    }
    if (!address) return allocate_native(index, size);
    if (const auto* trace = c10::impl::GPUTrace::get_trace()) (*trace)->trace_gpu_memory_allocation(c10::kCUDA, *address);
    void* data = reinterpret_cast<void*>(*address);
    return {data, data, &free_planned, c10::Device(c10::kCUDA, index)};
  }

  void free(void* data) {
    for (int index = 0; index < devices(); ++index) {
      Device& device = *devices_[index];
      if (!device.core.has_arena()) continue;
      std::unique_ptr<Arena> drained;
      {
        std::lock_guard<std::mutex> lock(device.core.mutex);
        if (!device.core.owner(address_of(data))) continue;
        Fence fence = 0;
        if (const auto used = device.used_on.find(address_of(data)); used != device.used_on.end()) {
          if (device.pools) return device.deferred.push_back(data);
          c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(index));
          fence = device.make_fence(used->second);
          device.used_on.erase(used);
        }
        if (!device.core.give(address_of(data), fence, drained)) break;
      }
      if (const auto* trace = c10::impl::GPUTrace::get_trace())
        (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, address_of(data));
      drop(index, std::move(drained));
      return;
    }
    std::fprintf(stderr, "ds_memo: %p was freed and is no live block of an arena; ignored\n", data);
  }

  // Gives an arena back to the native allocator; nothing lives in it.
  void drop(int index, std::unique_ptr<Arena> arena) {
    if (!arena) return;
    Device& device = *devices_[index];
    {
      std::lock_guard<std::mutex> lock(device.core.mutex);
      device.wait(arena->stream(), arena->fences());
    }
    arena.reset();  // behind those waits on its stream, and outside the lock
  }

  // The base address of the arena that `data` lies in; 0: none.
  Address arena_base(const void* data) {
    for (auto& device : devices_) {
      if (!device->core.has_arena()) continue;
      std::lock_guard<std::mutex> lock(device->core.mutex);
      if (const Arena* arena = device->core.owner(address_of(data))) return arena->base();
    }
    return 0;
  }

  void recordStream(const c10::DataPtr& block, CUDAStream stream) override {
    if (block.get_deleter() != &free_planned) return native_->recordStream(block, stream);
    Device& device = *devices_[block.device().index()];
    const Address address = address_of(block.get_context());  // a view's data may begin further on
    std::lock_guard<std::mutex> lock(device.core.mutex);
    const Arena* arena = device.core.owner(address);
    if (!arena || handle(stream.stream()) == arena->stream()) return;
    auto& streams = device.used_on[address];
    if (std::find(streams.begin(), streams.end(), stream.stream()) == streams.end()) streams.push_back(stream.stream());
  }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    const auto deleter = data.get_deleter();
    return data.get() == data.get_context() &&
           (deleter == native_free_ || deleter == &free_planned || deleter == &free_any);
  }

  // ---- the raw interface is never served from the arena: its pointers outlive an uninstall

  void* raw_alloc(size_t size) override {
    return with_room(c10::cuda::current_device(), [&] { return native_->raw_alloc(size); });
  }
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return with_room(c10::cuda::current_device(), [&] { return native_->raw_alloc_with_stream(size, stream); });
  }
  void raw_delete(void* data) override {
    if (arena_base(data)) return free(data);
    native_->raw_delete(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }

  // ---- a planned block is part of the arena's native block

  void* getBaseAllocation(void* data, size_t* size) override {
    const Address base = arena_base(data);
    return native_->getBaseAllocation(base ? reinterpret_cast<void*>(base) : data, size);
  }
  caching::ShareableHandle shareIpcHandle(void* data) override {
    const Address base = arena_base(data);
    if (!base) return native_->shareIpcHandle(data);
    caching::ShareableHandle shared = native_->shareIpcHandle(reinterpret_cast<void*>(base));
    shared.offset += static_cast<ptrdiff_t>(address_of(data) - base);
    return shared;
  }

  // ---- memory pools and graph capture go past the plan

  void beginAllocateToPool(DeviceIndex index, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    count_pool(index, 1);
    native_->beginAllocateToPool(index, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex index, MempoolId_t pool) override {
    native_->endAllocateToPool(index, pool);
    count_pool(index, -1);
  }

  // ---- forwarded

  void init(int devices) override { native_->init(devices); }
  bool initialized() override { return native_->initialized(); }
  double getMemoryFraction(DeviceIndex i) override { return native_->getMemoryFraction(i); }
  void setMemoryFraction(double fraction, DeviceIndex i) override { native_->setMemoryFraction(fraction, i); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex i) override {
    return native_->getExpandableSegmentSizes(i);
  }
  void enable(bool value) override { native_->enable(value); }
  bool isEnabled() const override { return native_->isEnabled(); }
  void emptyCache(MempoolId_t pool = {0, 0}) override { native_->emptyCache(pool); }
  void cacheInfo(DeviceIndex i, size_t* largest) override { native_->cacheInfo(i, largest); }
  void copy_data(void* to, const void* from, size_t size) const override { native_->copy_data(to, from, size); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override { return native_->getDeviceStats(i); }
  void resetAccumulatedStats(DeviceIndex i) override { native_->resetAccumulatedStats(i); }
  void resetPeakStats(DeviceIndex i) override { native_->resetPeakStats(i); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override { return native_->getMemoryInfo(i); }
  caching::SnapshotInfo snapshot(MempoolId_t pool = {0, 0}, bool traces = true) override {
    return native_->snapshot(pool, traces);
  }
  void releasePool(DeviceIndex i, MempoolId_t pool) override { native_->releasePool(i, pool); }
  int getPoolUseCount(DeviceIndex i, MempoolId_t pool) override { return native_->getPoolUseCount(i, pool); }
  void createOrIncrefPool(DeviceIndex i, MempoolId_t pool, std::shared_ptr<caching::CUDAAllocator> own = nullptr) override {
    native_->createOrIncrefPool(i, pool, std::move(own));
  }
  void setUseOnOOM(DeviceIndex i, MempoolId_t pool, bool use) override { native_->setUseOnOOM(i, pool, use); }
  void setNoSplit(DeviceIndex i, MempoolId_t pool) override { native_->setNoSplit(i, pool); }
  bool checkPoolLiveAllocations(DeviceIndex i, MempoolId_t pool, const std::unordered_set<void*>& expected) override {
    return native_->checkPoolLiveAllocations(i, pool, expected);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string shared) override { return native_->getIpcDevPtr(std::move(shared)); }
  bool isHistoryEnabled() override { return native_->isHistoryEnabled(); }
  void recordHistory(bool enabled, caching::CreateContextFn context, size_t entries, caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    native_->recordHistory(enabled, context, entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
    native_->recordAnnotation(pairs);
  }
  void pushCompileContext(std::string& context) override { native_->pushCompileContext(context); }
  void popCompileContext() override { native_->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { native_->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return native_->getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    native_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex from, DeviceIndex to) override { native_->enablePeerAccess(from, to); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t size, cudaStream_t stream,
                          bool peer) override {
    return native_->memcpyAsync(to, to_device, from, from_device, size, stream, peer);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex i, MempoolId_t pool) override {
    return native_->getCheckpointState(i, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex i, std::shared_ptr<caching::AllocatorState> state) override {
    return native_->setCheckpointPoolState(i, std::move(state));
  }
  std::string name() override { return native_->name(); }  // "native": torch and libraries branch on it
#if DS_MEMO_TORCH >= 212
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    native_->attachOomRejectionObserver(std::move(observer));
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return native_->getContextForPointer(data);
  }
#endif
#if DS_MEMO_TORCH >= 213
  void markCaptureBegin(DeviceIndex i) override { native_->markCaptureBegin(i); }
  void markCaptureEnd(DeviceIndex i) override { native_->markCaptureEnd(i); }
  c10::DataPtr allocateWithAddress(size_t size, void* address) override { return native_->allocateWithAddress(size, address); }
#endif
#if DS_MEMO_TORCH >= 214
  bool supportsUserMetadata() override { return native_->supportsUserMetadata(); }
  void annotateMemory(const void* data, const std::string& metadata) override { native_->annotateMemory(data, metadata); }
#endif

 private:
  // Returns what `ask` gets from the native allocator. If that has no room, an empty arena is freed first: an evaluation, or a
  // batch without a plan, must not run out of memory next to an empty arena.
  template <class Ask>
  auto with_room(DeviceIndex index, Ask ask) -> decltype(ask()) {
    try {
      return ask();
    } catch (const c10::OutOfMemoryError&) {
      if (!give_way(index)) throw;
    }
    return ask();
  }
  bool give_way(DeviceIndex index) {
    Device& device = *devices_[index];
    if (!device.core.has_arena()) return false;
    std::unique_ptr<Arena> arena;
    {
      std::lock_guard<std::mutex> lock(device.core.mutex);
      if (device.pools) return false;  // its stream must not be waited on from outside a capture
      arena = device.core.give_way();
    }
    if (!arena) return false;
    drop(index, std::move(arena));
    return true;
  }
  c10::DataPtr allocate_native(DeviceIndex index, size_t size) {
    return with_room(index, [&] { return native_->allocate(size); });
  }
  c10::DataPtr allocate_logged(DeviceIndex index, size_t size, Stream stream) {
    c10::DataPtr data = allocate_native(index, size);
    Device& device = *devices_[index];
    std::lock_guard<std::mutex> lock(device.core.mutex);
    if (!device.pools) device.core.log_malloc(address_of(data.get()), size, stream);
    return data;
  }
  void count_pool(DeviceIndex index, int change) {
    Device& device = *devices_[index];
    std::vector<void*> deferred;
    {
      std::lock_guard<std::mutex> lock(device.core.mutex);
      device.pools += change;
      if (!device.pools) deferred.swap(device.deferred);
    }
    for (void* data : deferred) free(data);
  }

  caching::CUDAAllocator* native_;
  c10::DeleterFnPtr native_free_;
  std::vector<std::unique_ptr<Device>> devices_;
};

PlannedAllocator* planned = nullptr;  // never destroyed: storages keep pointers to it

void free_planned(void* data) { planned->free(data); }
void free_any(void* data) { planned->raw_delete(data); }

struct Cuda {
  static Core& core(int device) {
    TORCH_CHECK(planned, "ds_memo's allocator was never installed");
    return planned->device(device).core;
  }

  static bool installed() { return planned && caching::get() == planned; }

  static void install() {
    if (installed()) return;
    caching::CUDAAllocator* present = caching::get();
    TORCH_CHECK(present->initialized(), "CUDA is not initialised yet: call torch.cuda.init() first");
    TORCH_CHECK(present->name() == "native", "ds_memo wraps torch's native CUDA allocator, and the present one is '",
                present->name(), "': remove `backend:` from PYTORCH_CUDA_ALLOC_CONF");
    TORCH_CHECK(!planned || planned->native() == present,
                "the CUDA allocator was replaced by another one after ds_memo was uninstalled");
    if (!planned) planned = new PlannedAllocator(present);
    set(planned);
    TORCH_CHECK(c10::GetAllocator(c10::kCUDA) == planned, "another CUDA allocator is registered with a priority above ",
                int{kPriority});
  }

  // While an arena has live blocks the op remains in front: it could come back through the raw interface.
  static void uninstall() {
    if (installed() && !planned->has_arena()) set(planned->native());
  }

  static Stream current_stream(int device) {
    return handle(c10::cuda::getCurrentCUDAStream(static_cast<DeviceIndex>(device)).stream());
  }

  static std::unique_ptr<Arena> make_arena(int device, Bytes bytes) {
    c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(device));
    auto block = std::make_shared<c10::DataPtr>(planned->native()->allocate(bytes));
    return std::make_unique<Arena>(address_of(block->get()), bytes, current_stream(device), std::move(block));
  }

  static void drop(int device, std::unique_ptr<Arena> arena) { planned->drop(device, std::move(arena)); }

 private:
  static void set(caching::CUDAAllocator* allocator) {
    caching::allocator.store(allocator);
    c10::SetAllocator(c10::kCUDA, allocator, kPriority);
  }
};

}  // namespace
}  // namespace ds_memo

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "ds_memo's allocator op on CUDA; see ds_memo.ops.allocator";
  ds_memo::bind<ds_memo::Cuda>(m);
  ds_memo::remat::bind_follower(m);
  ds_memo::remat::bind_checkpoint(m);
  ds_memo::remat::bind_layer_settings(m);
  ds_memo::tiles::bind_tiles(m);
}
