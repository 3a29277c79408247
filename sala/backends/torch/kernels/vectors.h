// Sixteen floats at a time. Vector extensions of GCC and Clang: the same source for AVX-512, AVX2 and NEON.

#pragma once
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

static inline Floats load(const float* x) { Floats v; std::memcpy(&v, x, 64); return v; }
static inline void store(float* x, Floats v) { std::memcpy(x, &v, 64); }

static inline float sum(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float parts[16];
    std::memcpy(parts, &v, 64);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

// e^x = 2^n e^r with |r| <= ln(2) / 2, where seven terms of the series are exact to the last bit but one.
static inline Floats exponential(Floats x) {
    const Floats low = Floats{} - 87.0f, high = Floats{} + 88.0f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Floats rounder = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Floats shifted = x * 1.44269504088896341f + rounder, n = shifted - rounder;
    const Floats r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
    Floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (Floats)((Ints)p + ((Ints)shifted << 23));
}

static inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// Memory that stays from call to call and only grows; what it holds does not stay.
class Space {
  public:
    float* get(int64_t floats) {
        if (int64_t(held.size()) < floats + 16) held.resize(floats + 16);
        return (float*)((uintptr_t(held.data()) + 63) / 64 * 64);  // no load crosses a cache line
    }

  private:
    std::vector<float> held;
};
