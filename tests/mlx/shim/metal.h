// Enough of Metal's language for our kernels to be C++: types, built-ins, and threads that really wait for each other.
//
// Conversions are explicit on purpose, though Metal would do some of them by itself.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef unsigned int uint;
typedef unsigned short ushort;
struct uint3 { uint x, y, z; };

#ifdef SHIM_ADDRESS_SPACES  // the compiler's own types: a struct cannot be read from every address space
typedef _Float16 half;
typedef __bf16 bfloat;
#else
struct half {
  uint16_t bits;
  half() = default;
  explicit half(float value);
  explicit operator float() const;
};
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value);
  explicit operator float() const;
};
#endif
typedef half float16_t;
typedef bfloat bfloat16_t;

// the scheduler, in runtime.cpp
extern "C" {
void shim_barrier(int line);
const float* shim_exchange(float value, int line);  // the values of all 32 lanes
}

namespace metal {
inline float exp(float x) { return __builtin_expf(x); }
inline float log(float x) { return __builtin_logf(x); }
inline float min(float a, float b) { return b < a ? b : a; }
inline float max(float a, float b) { return a < b ? b : a; }
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) { shim_barrier(line); }

// as the hardware does it: a tree of pairs
inline float simd_sum(float value, int line = __builtin_LINE()) {
  float sums[32];
  const float* all = shim_exchange(value, line);
  for (int i = 0; i < 32; ++i) sums[i] = all[i];
  for (int step = 1; step < 32; step *= 2)
    for (int i = 0; i < 32; i += 2 * step) sums[i] += sums[i + step];
  return sums[0];
}
inline float simd_max(float value, int line = __builtin_LINE()) {
  const float* all = shim_exchange(value, line);
  float most = all[0];
  for (int i = 1; i < 32; ++i) most = max(most, all[i]);
  return most;
}
inline float simd_shuffle(float value, ushort lane, int line = __builtin_LINE()) {
  return shim_exchange(value, line)[lane];
}
}  // namespace metal
using namespace metal;

#ifndef SHIM_ADDRESS_SPACES
inline bfloat::bfloat(float value) {
  uint32_t word;
  __builtin_memcpy(&word, &value, 4);
  if (value != value) { bits = 0x7FC0; return; }
  bits = uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}
inline bfloat::operator float() const {
  const uint32_t word = uint32_t(bits) << 16;
  float value;
  __builtin_memcpy(&value, &word, 4);
  return value;
}
inline half::half(float value) {
  uint32_t word;
  __builtin_memcpy(&word, &value, 4);
  const uint16_t sign = word >> 16 & 0x8000;
  const uint32_t size = word & 0x7FFFFFFF;
  if (size > 0x7F800000) { bits = sign | 0x7E00; return; }
  if (size >= 0x477FF000) { bits = sign | 0x7C00; return; }
  if (size < 0x38800000) {  // smaller than the smallest normal half: multiples of 2^-24
    float scaled;
    __builtin_memcpy(&scaled, &size, 4);
    bits = sign | uint16_t(__builtin_nearbyintf(scaled * 16777216.0f));
    return;
  }
  bits = sign | uint16_t((size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13);
}
inline half::operator float() const {
  const uint32_t exponent = bits >> 10 & 31, rest = bits & 0x3FF;
  float value;
  if (exponent == 0) {
    value = float(rest) / 16777216.0f;
  } else {
    const uint32_t word = exponent == 31 ? 0x7F800000u | rest << 13 : (exponent + 112) << 23 | rest << 13;
    __builtin_memcpy(&value, &word, 4);
  }
  return bits & 0x8000 ? -value : value;
}
#endif

struct shim_place {  // of a thread
  uint3 threadgroup_position_in_grid, thread_position_in_grid, thread_position_in_threadgroup;
  uint3 threadgroups_per_grid, threads_per_threadgroup, threads_per_grid;
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
};

#ifdef SHIM_ADDRESS_SPACES
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup static __attribute__((section("threadgroup_memory")))
#endif
