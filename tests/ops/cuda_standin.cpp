// A stand-in for the CUDA runtime, so that the CUDA backend runs on machines without a GPU. For tests alone.
//
// It goes before a CUDA build of torch with LD_PRELOAD, and once more, as libcuda.so.1, in a folder of LD_LIBRARY_PATH. It
// has what torch's native allocator, streams and events call: device memory is host memory, copies are done at once, there
// are no kernels. What the backend does about streams is told by the log: one line for each cudaMalloc, cudaFree, copy, event
// record and wait, and for host memory that is locked.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

constexpr size_t kDeviceBytes = size_t{8} << 30, kGranule = size_t{2} << 20;
std::atomic<size_t> used{0};
std::atomic<uintptr_t> next_handle{0x1000};

std::mutex mutex;
std::string calls;

void log(const char* call, const void* a = nullptr, const void* b = nullptr) {
  char line[96];
  std::snprintf(line, sizeof line, "%s %llu %llu\n", call, reinterpret_cast<unsigned long long>(a),
                reinterpret_cast<unsigned long long>(b));
  std::lock_guard<std::mutex> lock(mutex);
  calls += line;
}

template <class Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(next_handle += 16);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// What was called since the last time, as "call argument argument" lines.
const char* standin_calls() {
  static std::string taken;
  std::lock_guard<std::mutex> lock(mutex);
  taken.swap(calls);
  calls.clear();
  return taken.c_str();
}

// The driver's only function that torch needs.
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return 0;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "stand-in");
  properties->totalGlobalMem = kDeviceBytes;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** block, size_t bytes) {
  const size_t whole = (bytes + kGranule - 1) / kGranule * kGranule;
  if (whole > kDeviceBytes - used) return cudaErrorMemoryAllocation;
  *block = std::aligned_alloc(kGranule, whole);
  if (!*block) return cudaErrorMemoryAllocation;
  used += whole;
  log("malloc", *block, reinterpret_cast<void*>(bytes));
  return cudaSuccess;
}
cudaError_t cudaFree(void* block) {
  if (block) log("free", block);
  std::free(block);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kDeviceBytes, *free = kDeviceBytes - used;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  log("copy", to, stream);
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaHostRegister(void* block, size_t bytes, unsigned) {
  return log("register", block, reinterpret_cast<void*>(bytes)), cudaSuccess;
}
cudaError_t cudaHostUnregister(void* block) { return log("unregister", block), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return std::memset(to, value, bytes), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* block) {
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &block, sizeof block);
  return cudaSuccess;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t) {
  std::memset(handle, 0, sizeof *handle);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {  // torch 2.13 asks this
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { return *milliseconds = 2, cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return log("record", event, stream), cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return log("wait", event, stream), cudaSuccess;
}

}  // extern "C"
