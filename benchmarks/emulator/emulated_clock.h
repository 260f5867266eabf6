// The emulated device's clock (emulator.cpp).
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <mutex>

// When each stream, each event and the host would be where they are, in seconds. The host takes some time for each launch, and
// waits where CUDA makes it wait, and where a stream's queue of launches is full, as the driver's is. A kernel keeps its stream
// busy for the floor at least, however little it does.
class Clock {
 public:
  double host() {
    std::lock_guard<std::mutex> l(mutex_);
    return host_;
  }
  void floor(double seconds) {
    std::lock_guard<std::mutex> l(mutex_);
    floor_ = seconds;
  }
  // A kernel that takes the floor. Without a floor kernels cost what `work` says alone.
  void launch(cudaStream_t s) {
    std::lock_guard<std::mutex> l(mutex_);
    if (floor_ > 0) start(s);
  }
  // An op begins: the kernels launched from now on are its own.
  void op() {
    std::lock_guard<std::mutex> l(mutex_);
    for (auto& [_, stream] : streams_) stream.kernels = 0;
  }
  // The kernels of the op take these seconds together, their floors among them. An op whose launch the emulator has not seen (a
  // GEMM, a collective) is one kernel.
  void work(cudaStream_t s, double seconds) {
    std::lock_guard<std::mutex> l(mutex_);
    Stream& stream = streams_[s];
    if (!stream.kernels) start(s);
    const double begin = stream.at - stream.kernels * floor_;
    if (begin > busy_until_ + kPause) busy_since_ = begin;
    if (begin - busy_since_ >= boost_) seconds *= slower_;
    stream.at += std::max(0.0, seconds - stream.kernels * floor_);
    busy_until_ = std::max(busy_until_, stream.at);
    stream.queue.back() = stream.at;
    stream.kernels = 0;
  }
  // Each direction of the link serves one copy at a time. Memory that is not locked makes the host wait.
  void copy(cudaStream_t s, bool to_host, size_t n, bool locked) {
    std::lock_guard<std::mutex> l(mutex_);
    double& engine = engines_[to_host];
    engine = std::max(engine, begins(s)) + n * per_byte_[to_host];
    enqueue(s, engine);
    if (!locked) host_ = std::max(host_, engine);
  }
  void record(cudaEvent_t e, cudaStream_t s) {
    std::lock_guard<std::mutex> l(mutex_);
    events_[e] = begins(s);
  }
  // Returns the seconds that the stream, with nothing else to do, waits for the event.
  double wait(cudaStream_t s, cudaEvent_t e) {
    std::lock_guard<std::mutex> l(mutex_);
    const double before = begins(s);
    streams_[s].at = std::max(streams_[s].at, events_[e]);
    return std::max(0.0, streams_[s].at - before);
  }
  double at(cudaEvent_t e) {
    std::lock_guard<std::mutex> l(mutex_);
    return events_[e];
  }
  double at(cudaStream_t s) {
    std::lock_guard<std::mutex> l(mutex_);
    return streams_[s].at;
  }
  // Returns the seconds that the host waits.
  double host_waits(double until) {
    std::lock_guard<std::mutex> l(mutex_);
    ++host_waits_;
    const double waited = std::max(0.0, until - host_);
    host_ += waited;
    return waited;
  }
  // For something that is none of the device's.
  void host_waits_for_other(double until) {
    std::lock_guard<std::mutex> l(mutex_);
    host_ = std::max(host_, until);
  }
  void host_waits_for_all() {
    double last = 0;
    {
      std::lock_guard<std::mutex> l(mutex_);
      for (auto& [_, stream] : streams_) last = std::max(last, stream.at);
    }
    host_waits(last);
  }
  size_t kernels() {
    std::lock_guard<std::mutex> l(mutex_);
    return kernels_;
  }
  size_t host_waits() {
    std::lock_guard<std::mutex> l(mutex_);
    return host_waits_;
  }
  // Seconds of the host to lock and unlock a byte of its memory, and to make or free a block of the device's.
  void driver(double lock, double unlock, double block) {
    std::lock_guard<std::mutex> l(mutex_);
    lock_ = lock, unlock_ = unlock, block_ = block;
  }
  void lock(size_t n) { host_takes(n * lock_); }
  void unlock(size_t n) { host_takes(n * unlock_); }
  void block() { host_takes(block_); }
  // A card that has worked for `boost` seconds without a pause takes `slower` times as long for an op.
  void boost(double boost, double slower) {
    std::lock_guard<std::mutex> l(mutex_);
    boost_ = boost, slower_ = slower;
  }
  void links(double d2h, double h2d) {
    std::lock_guard<std::mutex> l(mutex_);
    per_byte_[true] = 1 / d2h, per_byte_[false] = 1 / h2d;
  }

 private:
  static constexpr size_t kQueue = 1024;
  static constexpr double kLaunch = 5e-6;
  static constexpr double kPause = 0.05;
  struct Stream {
    double at = 0;
    std::deque<double> queue;
    size_t kernels = 0;  // of the op that runs
  };
  void host_takes(double seconds) {
    std::lock_guard<std::mutex> l(mutex_);
    host_ += seconds;
  }
  void start(cudaStream_t s) {
    host_ += kLaunch;
    enqueue(s, begins(s) + floor_);
    ++streams_[s].kernels;
    ++kernels_;
  }
  double begins(cudaStream_t s) { return std::max(streams_[s].at, host_); }
  void enqueue(cudaStream_t s, double until) {
    Stream& stream = streams_[s];
    stream.at = until;
    stream.queue.push_back(until);
    if (stream.queue.size() > kQueue) {
      host_ = std::max(host_, stream.queue.front());
      stream.queue.pop_front();
    }
  }
  std::mutex mutex_;
  double lock_ = 0, unlock_ = 0, block_ = 0;
  double host_ = 0, floor_ = 0, per_byte_[2] = {0, 0}, engines_[2] = {0, 0};
  double boost_ = 0, slower_ = 1, busy_since_ = 0, busy_until_ = 0;
  size_t host_waits_ = 0, kernels_ = 0;
  std::map<cudaStream_t, Stream> streams_;
  std::map<cudaEvent_t, double> events_;
};
