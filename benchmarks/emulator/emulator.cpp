// An H200 without kernels, for `python -m benchmarks.emulator` and the op's tests: device memory is address space that nobody
// touches; launches, GEMMs and copies of more than EMULATED_COPY_MIB (1 without it) do nothing. What is real is everything above it:
// torch's caching allocator, autograd's device thread, the dispatcher's choice of kernels, and ds_memo with its allocator op. So
// bytes and calls of a step at full width can be counted on a machine without a GPU. Values cannot, but what copies alone move:
// tests/ops has all of them done, and reads what the op asks of CUDA from emulated_calls, which are noted with EMULATED_CALLS=1.
//
// Streams, events and the host keep time by a clock of their own (emulated_clock.h). Kernels cost what emulated_work says, and at
// least what emulated_floor says; copies what emulated_links says. Until one of them is said all work costs nothing, and every
// stream is always done.
//
// It goes before a CUDA build of torch with LD_PRELOAD, and once more, as libcuda.so.1, in a folder of LD_LIBRARY_PATH.
// EMULATED_GIB: of device memory; 139.8 without it. EMULATED_LOCK_GIB: of host memory that may be locked; without it, any.
// EMULATED_DEVICES: that there are; 1 without it. They share memory and streams, and differ in who has a context on them.
#include "emulated_clock.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

constexpr size_t kGranule = size_t{2} << 20;
size_t deviceBytes() {
  static size_t b =
      getenv("EMULATED_GIB") ? (size_t)(atof(getenv("EMULATED_GIB")) * (1ull << 30)) : (size_t)(139.8 * (1ull << 30));
  return b;
}
std::atomic<size_t> used{size_t{500} << 20};
std::atomic<uintptr_t> next_handle{0x1000};
std::mutex mutex;
std::map<void*, size_t> blocks;  // addresses of the device
std::map<uintptr_t, size_t> pieces;  // of its memory, that segments which expand are made of
thread_local int device = 0;
std::atomic<unsigned> contexts{0};  // a bit for each device that has one
// As the runtime does in most calls: it makes a context on the thread's device, of some 0.5 GiB, if there is none.
void need_context() { contexts |= 1u << device; }
template <class H>
cudaError_t make(H* h) {
  need_context();
  *h = reinterpret_cast<H>(next_handle += 16);
  return cudaSuccess;
}
// Address space on the device, which takes nothing of its memory.
char* reserve(size_t n) {
  char* at = (char*)mmap(nullptr, n + kGranule, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  char* a = (char*)(((uintptr_t)at + kGranule - 1) / kGranule * kGranule);
  if (a > at) munmap(at, a - at);
  if (a + n < at + n + kGranule) munmap(a + n, at + kGranule - a);
  std::lock_guard<std::mutex> l(mutex);
  blocks[a] = n;
  return a;
}
bool is_done(size_t copied) {
  static const char* mib = getenv("EMULATED_COPY_MIB");
  static const size_t most = size_t(mib ? atoi(mib) : 1) << 20;
  return copied <= most;
}

std::string calls;  // under `mutex`
void log(const char* call, const void* a, const void* b = nullptr) {
  static const bool kept = getenv("EMULATED_CALLS");
  if (!kept) return;
  char line[96];
  snprintf(line, sizeof line, "%s %llu %llu\n", call, (unsigned long long)a, (unsigned long long)b);
  std::lock_guard<std::mutex> l(mutex);
  calls += line;
}

int deviceCount() {
  static const int n = getenv("EMULATED_DEVICES") ? atoi(getenv("EMULATED_DEVICES")) : 1;
  return n;
}

using Watcher = void (*)(const char* call, const void* what, const void* from, size_t n, const void* stream);
std::atomic<Watcher> watcher{nullptr};
// Never under `mutex`: the watcher is Python code, and waits for the interpreter's lock.
void tell(const char* call, const void* what = nullptr, cudaStream_t s = nullptr, const void* from = nullptr, size_t n = 0) {
  need_context();
  if (Watcher w = watcher) w(call, what, from, n, s);
}

Clock& timing() {
  static Clock* c = new Clock;  // never destroyed: torch still makes calls while the process ends
  return *c;
}
bool on_device(const void* p) {
  std::lock_guard<std::mutex> l(mutex);
  auto after = blocks.upper_bound(const_cast<void*>(p));
  if (after == blocks.begin()) return false;
  --after;
  return p < (char*)after->first + after->second;
}
std::map<const char*, size_t> locked_ranges;  // of the host; under `mutex`
void lock_range(const void* p, size_t n) {
  std::lock_guard<std::mutex> l(mutex);
  locked_ranges[(const char*)p] = n;
}
size_t unlock_range(const void* p) {
  std::lock_guard<std::mutex> l(mutex);
  auto range = locked_ranges.find((const char*)p);
  if (range == locked_ranges.end()) return 0;
  const size_t n = range->second;
  return locked_ranges.erase(range), n;
}
size_t locked_bytes() {
  std::lock_guard<std::mutex> l(mutex);
  size_t n = 0;
  for (auto& [_, bytes] : locked_ranges) n += bytes;
  return n;
}
size_t lockable() {
  static const char* gib = getenv("EMULATED_LOCK_GIB");
  static const size_t most = gib ? size_t(atof(gib) * (1ull << 30)) : SIZE_MAX;
  return std::max(most, locked_bytes());
}
bool locked(const void* p) {
  std::lock_guard<std::mutex> l(mutex);
  auto after = locked_ranges.upper_bound((const char*)p);
  if (after == locked_ranges.begin()) return false;
  --after;
  return p < after->first + after->second;
}
void timed_copy(const void* to, const void* from, size_t n, cudaStream_t s) {
  const bool here = on_device(to), there = on_device(from);
  if (here != there) timing().copy(s, there, n, locked(here ? from : to));
  if (here && there) timing().launch(s);
}
}  // namespace

extern "C" {

void emulated_links(double d2h, double h2d) { timing().links(d2h, h2d); }  // bytes a second
void emulated_floor(double seconds) { timing().floor(seconds); }  // of each kernel
void emulated_driver(double lock, double unlock, double block) { timing().driver(lock, unlock, block); }
// From now on: called behind each call of CUDA that copies, orders streams, waits, or changes what memory there is.
void emulated_watch(Watcher w) { watcher = w; }
// Seconds until a stream is done with what it has.
double emulated_queued(cudaStream_t s) { return std::max(0.0, timing().at(s) - timing().host()); }
void emulated_op() { timing().op(); }
void emulated_work(cudaStream_t s, double seconds) { timing().work(s, seconds); }
void emulated_boost(double seconds, double slower) { timing().boost(seconds, slower); }
double emulated_now() { return timing().host(); }
double emulated_at(cudaEvent_t e) { return timing().at(e); }
void emulated_host_waits_until(double seconds) { timing().host_waits_for_other(seconds); }
size_t emulated_host_waits() { return timing().host_waits(); }
size_t emulated_kernels() { return timing().kernels(); }  // launched so far; a GEMM is one
unsigned emulated_contexts() { return contexts; }
// Allocations, copies, events recorded, waited for and seen to be done, and host memory that was locked, since the last time: lines of a call, an
// event or block, and a stream or bytes.
const char* emulated_calls() {
  static std::string taken;
  std::lock_guard<std::mutex> l(mutex);
  taken.swap(calls);
  calls.clear();
  return taken.c_str();
}

int cuCtxGetCurrent(void** c) { return *c = (void*)0x10, 0; }
int cuCtxSetCurrent() { return 0; }
int cuGetErrorString(int, const char** s) { return *s = "an emulated error", 0; }
int cuDeviceGet(int* d, int number) { return *d = number, 0; }
int cuInit() { return 0; }
int cuMemAddressReserve(uintptr_t* a, size_t n, size_t, uintptr_t, unsigned long long) {
  *a = (uintptr_t)reserve(n);
  return *a ? 0 : 2;
}
int cuMemAddressFree(uintptr_t a, size_t n) {
  std::lock_guard<std::mutex> l(mutex);
  munmap((void*)a, n);
  blocks.erase((void*)a);
  return 0;
}
int cuMemCreate(uintptr_t* piece, size_t n, void*, unsigned long long) {
  if (n > deviceBytes() - used) return 2;  // CUDA_ERROR_OUT_OF_MEMORY
  used += n;
  make(piece);
  {
    std::lock_guard<std::mutex> l(mutex);
    pieces[*piece] = n;
  }
  timing().block();
  return tell("cuMemCreate", nullptr, nullptr, nullptr, n), 0;
}
int cuMemRelease(uintptr_t piece) {
  {
    std::lock_guard<std::mutex> l(mutex);
    used -= pieces[piece];
    pieces.erase(piece);
  }
  timing().block();
  return tell("cuMemRelease"), 0;
}
int cuMemMap() { return 0; }
int cuMemUnmap() { return 0; }
int cuMemSetAccess() { return 0; }
int cuMemGetAllocationGranularity(size_t* n, void*, int) { return *n = kGranule, 0; }
int not_here() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void*)not_here;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
int cuDriverGetVersion(int* v) { return *v = 13000, 0; }
int cuDevicePrimaryCtxGetState(int number, unsigned* f, int* a) {
  *f = 0, *a = contexts >> number & 1;
  return 0;
}
cudaError_t cudaGetDeviceCount(int* c) { return *c = deviceCount(), cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { return *d = device, cudaSuccess; }
cudaError_t cudaSetDevice(int number) { return device = number, need_context(), cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return timing().host_waits_for_all(), tell("cudaDeviceSynchronize"), cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) { return *c = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  std::strcpy(p->name, "NVIDIA H200");
  p->totalGlobalMem = deviceBytes();
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = 65536;
  p->regsPerMultiprocessor = 65536;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->l2CacheSize = 60 << 20;
  p->maxBlocksPerMultiProcessor = 32;
  p->unifiedAddressing = 1;
  p->textureAlignment = 512;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    default: *v = 0;
  }
  return cudaSuccess;
}
int cuDeviceGetAttribute(int* v, int a, int d) { return cudaDeviceGetAttribute(v, (cudaDeviceAttr)a, d); }  // of one value
// What Triton compiles (FlexAttention, Liger): its kernels do nothing either, and take the floor.
int cuDevicePrimaryCtxRetain(void** c, int) { return *c = (void*)0x10, 0; }
int cuCtxGetLimit(size_t* n, int) { return *n = 0; }
int cuCtxSetLimit() { return 0; }
int cuModuleLoad(void** m, const char*) { return make(m); }
int cuModuleLoadData(void** m, const void*) { return make(m); }
int cuModuleGetFunction(void** f, void*, const char*) { return make(f); }
int cuModuleUnload() { return 0; }
int cuPointerGetAttribute(void** v, int, void* p) { return *v = p, 0; }  // its address on the device
int cuFuncGetAttribute(int* v, int a, void*) { return *v = a ? 0 : 1024, 0; }  // 0: threads per block
int cuFuncSetAttribute() { return 0; }
int cuFuncSetCacheConfig() { return 0; }
int cuOccupancyMaxActiveClusters(int* n) { return *n = 132, 0; }
int cuTensorMapEncodeTiled() { return 0; }
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cudaStream_t s) {
  return timing().launch(s), 0;
}
struct Launch {  // as CUlaunchConfig begins
  unsigned grid[3], block[3], shared;
  cudaStream_t stream;
};
int cuLaunchKernelEx(const Launch* launch) { return timing().launch(launch->stream), 0; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  *a = {};
  a->ptxVersion = 90;
  a->binaryVersion = 90;
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  return *n = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { return *n = 2, cudaSuccess; }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t s) { return timing().launch(s), cudaSuccess; }
cudaError_t __cudaGetKernel(void** k, const void* f) {
  *k = const_cast<void*>(f);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launch, const void*, void**) {
  return timing().launch(launch->stream), cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t s) { return timing().launch(s), cudaSuccess; }
cudaError_t cudaMalloc(void** b, size_t n) {
  const size_t whole = (n + kGranule - 1) / kGranule * kGranule;
  if (whole > deviceBytes() - used) return cudaErrorMemoryAllocation;
  char* a = reserve(whole);
  if (!a) return cudaErrorMemoryAllocation;
  used += whole;
  *b = a;
  timing().block();
  return log("malloc", a, (void*)n), tell("cudaMalloc", a, nullptr, nullptr, n), cudaSuccess;
}
cudaError_t cudaFree(void* b) {
  if (!b) return cudaSuccess;
  log("free", b);
  {
    std::lock_guard<std::mutex> l(mutex);
    auto f = blocks.find(b);
    if (f == blocks.end()) return cudaErrorInvalidValue;
    munmap(b, f->second);
    used -= f->second;
    blocks.erase(f);
  }
  timing().host_waits_for_all();  // as the driver does before memory goes
  timing().block();
  return tell("cudaFree", b), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *t = deviceBytes(), *f = deviceBytes() - used;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  log("copy", to, s);
  if (is_done(n)) std::memcpy(to, from, n);
  timed_copy(to, from, n, s);
  return tell("cudaMemcpyAsync", to, s, from, n), cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  if (is_done(n)) std::memcpy(to, from, n);
  timed_copy(to, from, n, nullptr);
  timing().host_waits(timing().at(cudaStream_t{}));
  return tell("cudaMemcpy", to, nullptr, from, n), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int v, size_t n, cudaStream_t s) {
  if (is_done(n)) std::memset(to, v, n);
  return timing().launch(s), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int v, size_t n) { return cudaMemsetAsync(to, v, n, nullptr); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) return cudaErrorMemoryAllocation;
  return lock_range(*p, n), timing().lock(n), tell("cudaHostAlloc", *p, nullptr, nullptr, n), cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) { return timing().unlock(unlock_range(p)), tell("cudaFreeHost", p), cudaSuccess; }
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  log("register", p, (void*)n);
  timing().lock(n);  // the driver gives up only when it comes to the page that is too many
  const bool fits = n <= lockable() - locked_bytes();
  if (fits) lock_range(p, n);
  return tell("cudaHostRegister", p, nullptr, nullptr, n), fits ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaHostUnregister(void* p) {
  log("unregister", p);
  return timing().unlock(unlock_range(p)), tell("cudaHostUnregister", p), cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* b) {
  std::memset(handle, 0, sizeof *handle);
  return std::memcpy(handle, &b, sizeof b), cudaSuccess;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t) {
  return std::memset(handle, 0, sizeof *handle), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  *a = {};
  a->type = locked(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return make(s); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* l, int* g) {
  *l = 0, *g = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  return timing().host_waits(timing().at(s)), tell("cudaStreamSynchronize", nullptr, s), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (timing().at(s) > timing().host()) return cudaErrorNotReady;
  return tell("cudaStreamQuery", nullptr, s), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) { return *p = 0, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return make(e); }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return make(e); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return need_context(), cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) {
  need_context();
  if (timing().at(e) > timing().host()) return cudaErrorNotReady;
  return log("done", e), tell("cudaEventQuery", e), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return *ms = (float)std::max(1e-3, 1e3 * (timing().at(to) - timing().at(from))), cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  const double waited = timing().host_waits(timing().at(e));
  return tell("cudaEventSynchronize", e, nullptr, nullptr, (size_t)(1e9 * waited)), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  return log("record", e, s), timing().record(e, s), tell("cudaEventRecord", e, s), cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  log("wait", e, s);
  return tell("cudaStreamWaitEvent", e, s, nullptr, (size_t)(1e9 * timing().wait(s, e))), cudaSuccess;
}
int cublasCreate_v2(void** h) { return make(h); }
int cublasDestroy_v2() { return 0; }
int cublasSetStream_v2() { return 0; }
int cublasSetWorkspace_v2() { return 0; }
int cublasSetMathMode() { return 0; }
int cublasGetMathMode(void*, int* m) { return *m = 0; }
int cublasGetPointerMode_v2(void*, int* m) { return *m = 0; }
int cublasSetPointerMode_v2() { return 0; }
int cublasGemmEx() { return 0; }
int cublasSgemmEx() { return 0; }
int cublasSgemm_v2() { return 0; }
int cublasGemmStridedBatchedEx() { return 0; }
int cublasSgemmStridedBatched() { return 0; }
size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmul() { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* n) {
  std::memset(results, 0, 64);
  return *n = 1, 0;
}
int cublasLtMatmulDescCreate(void** d, int, int) { return make(d); }
int cublasLtMatmulDescDestroy() { return 0; }
int cublasLtMatmulDescSetAttribute() { return 0; }
int cublasLtMatmulPreferenceCreate(void** d) { return make(d); }
int cublasLtMatmulPreferenceDestroy() { return 0; }
int cublasLtMatmulPreferenceSetAttribute() { return 0; }
int cublasLtMatrixLayoutCreate(void** d) { return make(d); }
int cublasLtMatrixLayoutDestroy() { return 0; }
int cublasLtMatrixLayoutSetAttribute() { return 0; }
}
