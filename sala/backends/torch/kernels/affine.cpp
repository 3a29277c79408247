// y = x W^T for W in affine groups (MLX layout): w = code * scale + bias, codes of 4 or 8 bits, fp32 arithmetic.
//
// A group adds scale * sum((code - center) x) + (bias + center * scale) * sum(x): the codes never become weights in
// memory, and the second sum is computed once per input. Centered codes keep the two terms small, so nothing cancels.
// Each row of x is computed in the same order however many there are. Vector extensions of GCC and Clang: the same
// source for AVX-512, AVX2 and NEON.

#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

enum ScaleType { FP32 = 0, FP16 = 1, BF16 = 2 };

struct Weight {
    const uint8_t* codes;  // [num_out, num_in * bits / 8]
    const void* scales;    // [num_out, num_in / group_size]
    const void* biases;
    int64_t num_out, num_in;
    int32_t bits, group_size, scale_type, num_threads;
};

struct Half {
    static constexpr bool is_half = true;
    uint16_t raw;
    operator float() const {
#if defined(__F16C__)
        return _cvtsh_ss(raw);
#else
        uint32_t sign = (raw & 0x8000u) << 16, rest = raw & 0x7fffu, out;
        if (rest >= 0x7c00u) out = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
        else if (rest >= 0x400u) out = sign | ((rest << 13) + 0x38000000u);
        else { float small = rest * 5.9604644775390625e-8f; std::memcpy(&out, &small, 4); out |= sign; }
        float value; std::memcpy(&value, &out, 4); return value;
#endif
    }
};

struct Brain {
    static constexpr bool is_half = false;
    uint16_t raw;
    operator float() const { uint32_t out = uint32_t(raw) << 16; float value; std::memcpy(&value, &out, 4); return value; }
};

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

// 32 codes as two vectors of centered floats. Four bits: lane l holds code l/4 (then 4 + l/4) of word l%4.
template <int BITS> static inline void expand(const uint8_t* codes, Floats& first, Floats& second) {
    if (BITS == 4) {
#if defined(__AVX512F__)
        const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
        const __m512i shifts = _mm512_set_epi32(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
        __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
        words = _mm512_srlv_epi32(words, shifts);
        first = (Floats)_mm512_permutexvar_ps(words, table);  // looks at the low four bits alone
        second = (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(words, 16), table);
#else
        const Ints shifts = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
        int32_t w[4];
        std::memcpy(w, codes, 16);
        Ints words = {w[0], w[1], w[2], w[3], w[0], w[1], w[2], w[3], w[0], w[1], w[2], w[3], w[0], w[1], w[2], w[3]};
        words = words >> shifts;
        first = __builtin_convertvector((words & 15) - 8, Floats);
        second = __builtin_convertvector(((words >> 16) & 15) - 8, Floats);
#endif
    } else {
        Bytes a, b;
        std::memcpy(&a, codes, 16);
        std::memcpy(&b, codes + 16, 16);
#if defined(__AVX512F__)
        const __m128i flip = _mm_set1_epi8(-128);
        first = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128((__m128i)a, flip)));
        second = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128((__m128i)b, flip)));
#else
        first = __builtin_convertvector(__builtin_convertvector(a, Ints) - 128, Floats);
        second = __builtin_convertvector(__builtin_convertvector(b, Ints) - 128, Floats);
#endif
    }
}

// Where input i of 32 lies in the two vectors of `expand`.
template <int BITS> static inline int lane(int i) { return BITS == 4 ? (i & 4) * 4 + (i & 3) * 4 + i / 8 : i; }

static inline Floats load(const float* x) { Floats v; std::memcpy(&v, x, 64); return v; }
static inline void store(float* x, Floats v) { std::memcpy(x, &v, 64); }

// The scales of up to 16 blocks of 32 inputs, in fp32; a group is 2^per_group of them.
template <class Scale> static inline Floats widen(const Scale* scales, int64_t block, int count, int per_group) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (sizeof(Scale) == 2) if (per_group == 0) {
        const __m256i raw = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), scales + block);
        return Scale::is_half ? (Floats)_mm512_cvtph_ps(raw)
                              : (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
    }
#endif
    float out[16] = {};
    for (int i = 0; i < count; i++) out[i] = scales[(block + i) >> per_group];
    return load(out);
}

// ROWS rows of x, in the order of `expand`, with one row of W. `sums` [rows, blocks up to a multiple of 16].
template <int BITS, int ROWS, class Scale>
static inline void dot(const Weight& w, int64_t out, const float* x, const float* sums, float* y) {
    const int64_t blocks = w.num_in / 32, padded = (blocks + 15) / 16 * 16, stride = w.num_in;
    const int per_group = w.group_size == 32 ? 0 : w.group_size == 64 ? 1 : 2;
    const uint8_t* codes = w.codes + out * (w.num_in * BITS / 8);
    const Scale* scales = (const Scale*)w.scales + out * (blocks >> per_group);
    const Scale* biases = (const Scale*)w.biases + out * (blocks >> per_group);
    Floats total[ROWS] = {}, shift[ROWS] = {};
    for (int64_t block = 0; block < blocks; block += 16) {
        const int count = blocks - block < 16 ? int(blocks - block) : 16;
        const Floats scale = widen(scales, block, count, per_group);
        const Floats bias = widen(biases, block, count, per_group) + scale * float(1 << (BITS - 1));
        float factors[16];
        store(factors, scale);
        for (int r = 0; r < ROWS; r++) shift[r] += load(sums + r * padded + block) * bias;
#pragma GCC unroll 2
        for (int j = 0; j < count; j++, codes += 4 * BITS) {
            Floats first, second;
            expand<BITS>(codes, first, second);
            const float* at = x + (block + j) * 32;
            for (int r = 0; r < ROWS; r++) {
                Floats part = first * load(at + r * stride);
                part += second * load(at + r * stride + 16);
                total[r] += part * factors[j];
            }
        }
    }
    for (int r = 0; r < ROWS; r++) y[r * w.num_out + out] = sum(total[r] + shift[r]);
}

template <int BITS, class Scale>
static void multiply(const Weight& w, const float* x, float* y, int64_t rows) {
    const int64_t padded = (w.num_in / 32 + 15) / 16 * 16;
    std::vector<float> space(rows * w.num_in + 16), sums(rows * padded, 0.0f);
    float* ordered = (float*)((uintptr_t(space.data()) + 63) / 64 * 64);  // no load crosses a cache line
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < w.num_in; i += 32) {
            const float* from = x + r * w.num_in + i;
            float *to = ordered + r * w.num_in + i, value = 0;
            for (int j = 0; j < 32; j++) { to[lane<BITS>(j)] = from[j]; value += from[j]; }
            sums[r * padded + i / 32] = value;
        }
    const float *input = ordered, *total = sums.data();
#pragma omp parallel for schedule(static) num_threads(w.num_threads)
    for (int64_t out = 0; out < w.num_out; out++)
        for (int64_t r = 0; r < rows;) {
            const float *xr = input + r * w.num_in, *sr = total + r * padded;
            float* yr = y + r * w.num_out;
            if (rows - r >= 8) { dot<BITS, 8, Scale>(w, out, xr, sr, yr); r += 8; }
            else if (rows - r >= 4) { dot<BITS, 4, Scale>(w, out, xr, sr, yr); r += 4; }
            else if (rows - r >= 2) { dot<BITS, 2, Scale>(w, out, xr, sr, yr); r += 2; }
            else { dot<BITS, 1, Scale>(w, out, xr, sr, yr); r += 1; }
        }
}

template <int BITS, class Scale> static void expand_rows(const Weight& w, int64_t begin, int64_t end, float* y) {
    const int64_t groups = w.num_in / w.group_size;
    const float center = 1 << (BITS - 1);
#pragma omp parallel for schedule(static) num_threads(w.num_threads)
    for (int64_t out = begin; out < end; out++) {
        const uint8_t* codes = w.codes + out * (w.num_in * BITS / 8);
        float* row = y + (out - begin) * w.num_in;
        for (int64_t i = 0; i < w.num_in; i += 32, codes += 4 * BITS) {
            const float scale = ((const Scale*)w.scales)[out * groups + i / w.group_size];
            const float bias = ((const Scale*)w.biases)[out * groups + i / w.group_size];
            Floats a, b;
            expand<BITS>(codes, a, b);
            Floats first = a, second = b;
            if (BITS == 4) {
                first = __builtin_shufflevector(a, b, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
                second = __builtin_shufflevector(a, b, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
            }
            store(row + i, (first + center) * scale + bias);
            store(row + i + 16, (second + center) * scale + bias);
        }
    }
}

template <class Scale> static void multiply_any(const Weight& w, const float* x, float* y, int64_t rows) {
    w.bits == 4 ? multiply<4, Scale>(w, x, y, rows) : multiply<8, Scale>(w, x, y, rows);
}

template <class Scale> static void expand_any(const Weight& w, int64_t begin, int64_t end, float* y) {
    w.bits == 4 ? expand_rows<4, Scale>(w, begin, end, y) : expand_rows<8, Scale>(w, begin, end, y);
}

// x [rows, num_in] → y [rows, num_out], both fp32.
extern "C" void affine_linear(const Weight* w, const float* x, float* y, int64_t rows) {
    if (w->scale_type == FP32) multiply_any<float>(*w, x, y, rows);
    else if (w->scale_type == FP16) multiply_any<Half>(*w, x, y, rows);
    else multiply_any<Brain>(*w, x, y, rows);
}

// Rows begin…end of the weights → y [end - begin, num_in] in fp32.
extern "C" void affine_expand(const Weight* w, int64_t begin, int64_t end, float* y) {
    if (w->scale_type == FP32) expand_any<float>(*w, begin, end, y);
    else if (w->scale_type == FP16) expand_any<Half>(*w, begin, end, y);
    else expand_any<Brain>(*w, begin, end, y);
}
