// A group adds scale * sum((code - center) x) + (bias + center * scale) * sum(x): the codes never become weights in
// memory, and the second sum is computed once per input. Centered codes keep the two terms small, so nothing cancels.

#include "affine.h"
#include "vectors.h"

static const int AHEAD = 2048;  // bytes of codes that are fetched before they are needed, across the borders of pages

typedef uint8_t Bytes __attribute__((vector_size(16)));

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
    operator float() const {
        uint32_t out = uint32_t(raw) << 16;
        float value; std::memcpy(&value, &out, 4); return value;
    }
};

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

// Floats that the sums of one row take, so that sixteen can always be read.
static inline int64_t padded(int64_t num_in) { return (num_in / 32 + 15) / 16 * 16; }

// Where input i of 32 lies in the two vectors of `expand`.
template <int BITS> static inline int lane(int i) { return BITS == 4 ? (i & 4) * 4 + (i & 3) * 4 + i / 8 : i; }

// The scales of up to 16 blocks of 32 inputs, in fp32; a group is 2^per_group of them.
template <class Scale> static inline Floats widen(const Scale* scales, int64_t block, int count, int per_group) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    const __mmask16 mask = __mmask16((1u << ((count + (1 << per_group) - 1) >> per_group)) - 1);
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512 wide;
    if constexpr (sizeof(Scale) == 4) wide = _mm512_maskz_loadu_ps(mask, scales + (block >> per_group));
    else {
        const __m256i raw = _mm256_maskz_loadu_epi16(mask, scales + (block >> per_group));
        wide = Scale::is_half ? _mm512_cvtph_ps(raw)
                              : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
    return per_group == 0 ? (Floats)wide : (Floats)_mm512_permutexvar_ps((__m512i)(lanes >> per_group), wide);
#else
    float out[16] = {};
    for (int i = 0; i < count; i++) out[i] = scales[(block + i) >> per_group];
    return load(out);
#endif
}

// ROWS rows of x, in the order of `expand`, with one row of W. `sums` [rows, padded].
template <int BITS, int ROWS, class Scale>
static inline void dot(const Weight& w, int64_t out, const float* x, const float* sums, float* y) {
    const int64_t blocks = w.num_in / 32, stride = w.num_in, sum_stride = padded(w.num_in);
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
        for (int r = 0; r < ROWS; r++) shift[r] += load(sums + r * sum_stride + block) * bias;
#pragma GCC unroll 2
        for (int j = 0; j < count; j++, codes += 4 * BITS) {
            Floats first, second;
            __builtin_prefetch(codes + AHEAD);
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

// The same with a row of plain weights.
template <int ROWS> static inline void dot(const Weight& w, int64_t out, const float* x, float* y) {
    const float* row = (const float*)w.codes + out * w.num_in;
    Floats total[ROWS] = {}, other[ROWS] = {};
    int64_t i = 0;
    for (; i + 32 <= w.num_in; i += 32)
        for (int r = 0; r < ROWS; r++) {
            total[r] += load(row + i) * load(x + r * w.num_in + i);
            other[r] += load(row + i + 16) * load(x + r * w.num_in + i + 16);
        }
    for (; i < w.num_in; i += 16)
        for (int r = 0; r < ROWS; r++) total[r] += load(row + i) * load(x + r * w.num_in + i);
    for (int r = 0; r < ROWS; r++) y[r * w.num_out + out] = sum(total[r] + other[r]);
}

template <int BITS, int ROWS, class Scale>
static inline void some_rows(const Weight& w, int64_t out, const Input& x, int64_t r, float* y) {
    float* to = y + r * w.num_out;
    if constexpr (BITS == 32) dot<ROWS>(w, out, x.plain + r * x.num_in, to);
    else dot<BITS, ROWS, Scale>(w, out, (BITS == 4 ? x.ordered : x.plain) + r * x.num_in,
                                x.sums + r * padded(x.num_in), to);
}

template <int BITS, class Scale>
static void multiply_as(const Weight& w, const Input& x, float* y, int64_t begin, int64_t end) {
    for (int64_t out = begin; out < end; out++) {
        for (int64_t r = 0; r < x.rows;) {
            if (x.rows - r >= 8) { some_rows<BITS, 8, Scale>(w, out, x, r, y); r += 8; }
            else if (x.rows - r >= 4) { some_rows<BITS, 4, Scale>(w, out, x, r, y); r += 4; }
            else if (x.rows - r >= 2) { some_rows<BITS, 2, Scale>(w, out, x, r, y); r += 2; }
            else { some_rows<BITS, 1, Scale>(w, out, x, r, y); r += 1; }
        }
        if (w.addend) for (int64_t r = 0; r < x.rows; r++) y[r * w.num_out + out] += w.addend[out];
    }
}

Input::Input(float* space, int64_t rows, int64_t num_in)
    : rows(rows), num_in(num_in), plain(space), ordered(plain + rows * num_in), sums(ordered + rows * num_in) {}

int64_t Input::floats(int64_t rows, int64_t num_in) { return rows * (2 * num_in + padded(num_in)); }

void Input::fill(const float* x, bool has_four_bits) {
    if (x != plain) std::memcpy(plain, x, rows * num_in * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        std::memset(sums + r * padded(num_in), 0, padded(num_in) * sizeof(float));
        for (int64_t i = 0; i + 32 <= num_in; i += 32) {
            const float* from = plain + r * num_in + i;
            sums[r * padded(num_in) + i / 32] = sum(load(from) + load(from + 16));
            if (has_four_bits)
                for (int j = 0; j < 32; j++) ordered[r * num_in + i + lane<4>(j)] = from[j];
        }
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

template <class Scale> static void multiply_any(const Weight& w, const Input& x, float* y, int64_t begin, int64_t end) {
    w.bits == 4 ? multiply_as<4, Scale>(w, x, y, begin, end) : multiply_as<8, Scale>(w, x, y, begin, end);
}

template <class Scale> static void expand_any(const Weight& w, int64_t begin, int64_t end, float* y) {
    w.bits == 4 ? expand_rows<4, Scale>(w, begin, end, y) : expand_rows<8, Scale>(w, begin, end, y);
}

void multiply(const Weight& w, const Input& x, float* y, int64_t begin, int64_t end) {
    if (w.bits == 32) multiply_as<32, float>(w, x, y, begin, end);
    else if (w.scale_type == FP32) multiply_any<float>(w, x, y, begin, end);
    else if (w.scale_type == FP16) multiply_any<Half>(w, x, y, begin, end);
    else multiply_any<Brain>(w, x, y, begin, end);
}

// x [rows, num_in] → y [rows, num_out], both fp32.
extern "C" void affine_linear(const Weight* w, const float* x, float* y, int64_t rows) {
    static thread_local Space space;
    Input input(space.get(Input::floats(rows, w->num_in)), rows, w->num_in);
    input.fill(x, w->bits == 4);
    const int64_t piece = 64, pieces = (w->num_out + piece - 1) / piece;
#pragma omp parallel for schedule(static) num_threads(w->num_threads)
    for (int64_t i = 0; i < pieces; i++)
        multiply(*w, input, y, i * piece, i + 1 < pieces ? (i + 1) * piece : w->num_out);
}

// Rows begin…end of the weights → y [end - begin, num_in] in fp32.
extern "C" void affine_expand(const Weight* w, int64_t begin, int64_t end, float* y) {
    if (w->scale_type == FP32) expand_any<float>(*w, begin, end, y);
    else if (w->scale_type == FP16) expand_any<Half>(*w, begin, end, y);
    else expand_any<Brain>(*w, begin, end, y);
}
