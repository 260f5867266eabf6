// Nanoseconds of an allocation and its free through c10, as torch itself asks for memory. Used by benchmarks/allocator.py.
#include <c10/core/Allocator.h>

#include <chrono>

extern "C" double nanoseconds_per_pair(int device_type, size_t bytes, int pairs) {
  c10::Allocator* allocator = c10::GetAllocator(static_cast<c10::DeviceType>(device_type));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < pairs; ++i) c10::DataPtr block = allocator->allocate(bytes);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / pairs;
}
