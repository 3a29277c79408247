// Sixteen floats at a time. Vector extensions of GCC and Clang: the same source for AVX-512, AVX2 and NEON.

#pragma once
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

typedef uint16_t Shorts __attribute__((vector_size(32)));

struct Half {  // IEEE, 16 bits
    static constexpr bool is_half = true;
    uint16_t raw;
    operator float() const {
#if defined(__F16C__)
        return _cvtsh_ss(raw);
#elif defined(__aarch64__)
        __fp16 value; std::memcpy(&value, &raw, 2); return value;
#else
        uint32_t sign = (raw & 0x8000u) << 16, rest = raw & 0x7fffu, out;
        if (rest >= 0x7c00u) out = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
        else if (rest >= 0x400u) out = sign | ((rest << 13) + 0x38000000u);
        else { float small = rest * 5.9604644775390625e-8f; std::memcpy(&out, &small, 4); out |= sign; }
        float value; std::memcpy(&value, &out, 4); return value;
#endif
    }
};

struct Brain {  // the upper half of a float
    static constexpr bool is_half = false;
    uint16_t raw;
    operator float() const {
        uint32_t out = uint32_t(raw) << 16;
        float value; std::memcpy(&value, &out, 4); return value;
    }
};

// What one register holds: the compiler keeps it in a register, which it does not for every vector of sixteen floats.
#if defined(__AVX512F__)
static const int LANES = 16;
#elif defined(__AVX2__)
static const int LANES = 8;
#else
static const int LANES = 4;
#endif
typedef float Part __attribute__((vector_size(4 * LANES)));

static inline Part load_part(const float* x) { Part v; std::memcpy(&v, x, sizeof v); return v; }

static inline Part load_part(const Brain* x) {
#if defined(__AVX512F__)
    return (Part)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16);
#elif defined(__AVX2__)
    return (Part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16);
#elif defined(__aarch64__)
    return (Part)vshll_n_u16(vld1_u16((const uint16_t*)x), 16);
#else
    return Part{x[0], x[1], x[2], x[3]};
#endif
}

static inline Part load_part(const Half* x) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#elif defined(__aarch64__)
    return (Part)vcvt_f32_f16(vld1_f16((const __fp16*)x));
#else
    Part out;
    for (int i = 0; i < LANES; i++) out[i] = x[i];
    return out;
#endif
}

static inline void store_part(float* x, Part v) { std::memcpy(x, &v, sizeof v); }

static inline Floats load(const float* x) { Floats v; std::memcpy(&v, x, 64); return v; }
static inline void store(float* x, Floats v) { std::memcpy(x, &v, 64); }

template <class Element> static inline Floats load(const Element* x) {
    float out[16];
    for (int i = 0; i < 16; i += LANES) {
        const Part part = load_part(x + i);
        std::memcpy(out + i, &part, sizeof part);
    }
    return load(out);
}

// Round to nearest, ties to even.
static inline void store(Brain* x, Floats v) {
    const Ints bits = (Ints)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Shorts raw = __builtin_convertvector(v == v ? rounded : (bits >> 16 | 64), Shorts);  // NaN must not become infinity
    std::memcpy(x, &raw, 32);
}

static inline void store(Half* x, Floats v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)x, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 16; i++) {
#if defined(__F16C__)
        x[i].raw = _cvtss_sh(v[i], _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
        const __fp16 value = v[i]; std::memcpy(&x[i], &value, 2);
#else
        uint32_t bits; const float value = v[i]; std::memcpy(&bits, &value, 4);
        const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
        uint32_t out;
        if (size > 0x7f800000u) out = 0x7e00u;
        else if (size >= 0x477ff000u) out = 0x7c00u;
        else if (size >= 0x38800000u) out = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
        else {  // adding 0.5 leaves a subnormal in the low bits, rounded
            float small; std::memcpy(&small, &size, 4);
            small += 0.5f;
            std::memcpy(&out, &small, 4);
            out -= 0x3f000000u;
        }
        x[i].raw = uint16_t(sign | out);
#endif
    }
#endif
}

template <class Vector> static inline float sum(Vector v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    constexpr int count = sizeof(Vector) / 4;
    float parts[count];
    std::memcpy(parts, &v, sizeof v);
    for (int width = count / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
#endif
}

// e^x = 2^n e^r with |r| <= ln(2) / 2, where seven terms of the series are exact to the last bit but one.
template <class Vector> static inline Vector exponential(Vector x) {
    using Whole = decltype(x < x);  // as many integers
    const Vector low = Vector{} - 87.0f, high = Vector{} + 88.0f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vector rounder = Vector{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Vector shifted = x * 1.44269504088896341f + rounder, n = shifted - rounder;
    const Vector r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
    Vector p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (Vector)((Whole)p + ((Whole)shifted << 23));
}

static inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// A buffer that is kept between calls and only grows; its contents are not kept.
class Space {
  public:
    float* get(int64_t floats) {
        if (int64_t(held.size()) < floats + 16) held.resize(floats + 16);
        return (float*)((uintptr_t(held.data()) + 63) / 64 * 64);  // no load crosses a cache line
    }

  private:
    std::vector<float> held;
};
