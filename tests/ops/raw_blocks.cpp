// c10's interface for blocks without an owner, which torch uses for oneDNN's memory.
#include <c10/core/Allocator.h>

extern "C" void* raw_allocate(size_t bytes) { return c10::GetAllocator(c10::kCPU)->raw_allocate(bytes); }
extern "C" void raw_deallocate(void* block) { c10::GetAllocator(c10::kCPU)->raw_deallocate(block); }
