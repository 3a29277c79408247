// A group adds scale * sum((code - center) x) + (bias + center * scale) * sum(x): codes are never expanded in memory,
// and the second sum is computed once per input. Centered codes keep both terms small, which avoids cancellation.

#include "affine.h"
#include "vectors.h"

// How many rows of W and of x are multiplied at a time. Several rows of W are several streams from memory, which
// together are faster than one.
static const int PACKED_TILE = 4, PLAIN_TILE = 8;

// The difference of neighbouring codes in the numbers of `expand`.
template <int BITS> static constexpr float UNIT = 1.0f;
#if defined(__AVX2__) && !defined(__AVX512F__)
template <> constexpr float UNIT<4> = 268435456.0f;
#endif

// 32 codes as centered floats. Four bits: lane l of all 32 holds code l / 4 of word l % 4.
template <int BITS> static inline void expand(const uint8_t* codes, Part (&out)[32 / LANES]) {
    if constexpr (BITS == 4) {
#if defined(__AVX512F__)
        const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
        const __m512i shifts = _mm512_set_epi32(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
        __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
        words = _mm512_srlv_epi32(words, shifts);
        out[0] = (Part)_mm512_permutexvar_ps(words, table);  // uses the low four bits only
        out[1] = (Part)_mm512_permutexvar_ps(_mm512_srli_epi32(words, 16), table);
#elif defined(__AVX2__)
        __m256i words = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes));
        words = _mm256_xor_si256(words, _mm256_set1_epi32(0x88888888));  // code - 8 as a signed number
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {  // shifted to the top it is signed and 2^28 times too large
            const int low = 28 - 8 * i, high = 24 - 8 * i;
            const __m256i shifts = _mm256_set_epi32(high, high, high, high, low, low, low, low);
            const __m256i moved = _mm256_sllv_epi32(words, shifts);
            out[i] = (Part)_mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(0xf0000000)));
        }
#elif defined(__aarch64__)
        const int32x4_t words = veorq_s32(vreinterpretq_s32_u8(vld1q_u8(codes)), vdupq_n_s32(0x88888888));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const int32x4_t moved = vshlq_s32(words, vdupq_n_s32(28 - 4 * i));
            out[i] = (Part)vcvtq_n_f32_s32(vandq_s32(moved, vdupq_n_s32(0xf0000000)), 28);
        }
#else
        uint32_t words[4];
        std::memcpy(words, codes, 16);
        for (int i = 0; i < 32; i++) out[i / LANES][i % LANES] = float(int(words[i % 4] >> (i / 4 * 4) & 15) - 8);
#endif
    } else {
#if defined(__AVX512F__)
        const __m128i flip = _mm_set1_epi8(-128);
        for (int i = 0; i < 2; i++) {
            const __m128i bytes = _mm_loadu_si128((const __m128i*)(codes + 16 * i));
            out[i] = (Part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128(bytes, flip)));
        }
#elif defined(__AVX2__)
        const __m128i flip = _mm_set1_epi8(-128);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i*)(codes + 8 * i));
            out[i] = (Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_xor_si128(bytes, flip)));
        }
#elif defined(__aarch64__)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const uint8x8_t bytes = veor_u8(vld1_u8(codes + 8 * i), vdup_n_u8(128));
            const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(bytes));
            out[2 * i] = (Part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
            out[2 * i + 1] = (Part)vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
        }
#else
        for (int i = 0; i < 32; i++) out[i / LANES][i % LANES] = float(int(codes[i]) - 128);
#endif
    }
}

// Floats of the sums of one row, padded so that sixteen can always be loaded.
static inline int64_t padded(int64_t num_in) { return (num_in / 32 + 15) / 16 * 16; }

// The lane of `expand` that holds input i of 32.
template <int BITS> static inline int lane(int i) { return BITS == 4 ? (i & 4) * 4 + (i & 3) * 4 + i / 8 : i; }

// Duplicate every lane.
static inline void spread(Part v, float* out) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    _mm256_storeu_ps(out, _mm256_permutevar8x32_ps((__m256)v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)));
    _mm256_storeu_ps(out + 8, _mm256_permutevar8x32_ps((__m256)v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)));
#else
    for (int i = 0; i < LANES; i++) out[2 * i] = out[2 * i + 1] = v[i];
#endif
}

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
    const Scale* from = scales + (block >> per_group);
    if (count == 16 && per_group == 1)
        for (int i = 0; i < 8; i += LANES) spread(load_part(from + i), out + 2 * i);
    else
        for (int i = 0; i < count; i++) out[i] = from[i >> per_group];
    return load(out);
#endif
}

// BLOCKS times 32 inputs of a group: OUTS rows of W with ROWS rows of x.
template <int BITS, int BLOCKS, int OUTS, int ROWS>
static inline void add_blocks(const uint8_t* codes, int64_t row_bytes, const float* x, int64_t stride,
                              const float (&factors)[OUTS][16], int j, Part (&total)[OUTS][ROWS]) {
    constexpr int PARTS = 32 / LANES;
#pragma GCC unroll 8
    for (int o = 0; o < OUTS; o++) {
        Part weights[BLOCKS][PARTS];
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) expand<BITS>(codes + o * row_bytes + b * 4 * BITS, weights[b]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Part part = weights[0][0] * load_part(x + r * stride);
#pragma GCC unroll 16
            for (int i = 1; i < BLOCKS * PARTS; i++)
                part += weights[i / PARTS][i % PARTS] * load_part(x + r * stride + i * LANES);
            total[o][r] += part * factors[o][j];
        }
    }
}

// `count` blocks of 32 inputs, BLOCKS at a time; the same inputs of the next OUTS rows are prefetched.
template <int BITS, int BLOCKS, int OUTS, int ROWS>
static inline void add_all(const uint8_t* codes, int64_t row_bytes, const float* x, int64_t stride,
                           const float (&factors)[OUTS][16], int count, Part (&total)[OUTS][ROWS]) {
    constexpr int LINES = OUTS * BITS * BLOCKS / 16 ? OUTS * BITS * BLOCKS / 16 : 1;
    const uint8_t* next = codes + OUTS * row_bytes;
    for (int j = 0, line = 0; j < count; j += BLOCKS) {
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++, line++) __builtin_prefetch(next + line % OUTS * row_bytes + line / OUTS * 64, 0, 2);
        add_blocks<BITS, BLOCKS>(codes + j * 4 * BITS, row_bytes, x + j * 32, stride, factors, j, total);
    }
}

// OUTS rows of W with ROWS rows of x, in the order of `expand`; `sums` [rows, padded].
template <int BITS, int OUTS, int ROWS, class Scale>
static inline void dot(const Weight& w, int64_t out, const float* x, const float* sums, float* y) {
    const int64_t blocks = w.num_in / 32, stride = w.num_in, sum_stride = padded(w.num_in);
    const int per_group = w.group_size == 32 ? 0 : w.group_size == 64 ? 1 : 2;
    const int64_t row_bytes = w.num_in * BITS / 8, groups = blocks >> per_group;
    const uint8_t* codes = w.codes + out * row_bytes;
    const Scale* scales = (const Scale*)w.scales + out * groups;
    const Scale* biases = (const Scale*)w.biases + out * groups;
    Part total[OUTS][ROWS] = {};
    for (int64_t block = 0; block < blocks; block += 16, codes += 64 * BITS) {
        const int count = blocks - block < 16 ? int(blocks - block) : 16;
        float factors[OUTS][16];
#pragma GCC unroll 8
        for (int o = 0; o < OUTS; o++) {
            const Floats scale = widen(scales + o * groups, block, count, per_group);
            float shifts[16];
            store(shifts, widen(biases + o * groups, block, count, per_group) + scale * float(1 << (BITS - 1)));
            store(factors[o], scale * (1.0f / UNIT<BITS>));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int i = 0; i < 16; i += LANES)
                    total[o][r] += load_part(sums + r * sum_stride + block + i) * load_part(shifts + i);
        }
        if (per_group) add_all<BITS, 2>(codes, row_bytes, x + block * 32, stride, factors, count, total);
        else add_all<BITS, 1>(codes, row_bytes, x + block * 32, stride, factors, count, total);
    }
    for (int o = 0; o < OUTS; o++)
        for (int r = 0; r < ROWS; r++) y[r * w.num_out + out + o] = sum(total[o][r]);
}

// The same with rows of plain weights.
template <int OUTS, int ROWS, class Element>
static inline void dot(const Weight& w, int64_t out, const float* x, float* y) {
    const Element* row = (const Element*)w.codes + out * w.num_in;
    Part total[OUTS][ROWS] = {};
    for (int64_t i = 0; i < w.num_in; i += LANES)
#pragma GCC unroll 8
        for (int o = 0; o < OUTS; o++) {
            const Part weights = load_part(row + o * w.num_in + i);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) total[o][r] += weights * load_part(x + r * w.num_in + i);
        }
    for (int o = 0; o < OUTS; o++)
        for (int r = 0; r < ROWS; r++) y[r * w.num_out + out + o] = sum(total[o][r]);
}

// Columns begin…end of ROWS rows, of which r is the first. `Kind` is that of the scales, or of plain weights.
template <int BITS, int ROWS, class Kind>
static inline void some_rows(const Weight& w, const Input& x, int64_t r, float* y, int64_t begin, int64_t end) {
    constexpr int TILE = BITS > 8 ? PLAIN_TILE : PACKED_TILE, OUTS = TILE > ROWS ? TILE / ROWS : 1;
    const float *from = (BITS == 4 ? x.ordered : x.plain) + r * x.num_in, *sums = x.sums + r * padded(x.num_in);
    float* to = y + r * w.num_out;
    int64_t out = begin;
    if constexpr (BITS > 8) {
        for (; out + OUTS <= end; out += OUTS) dot<OUTS, ROWS, Kind>(w, out, from, to);
        for (; out < end; out++) dot<1, ROWS, Kind>(w, out, from, to);
    } else {
        for (; out + OUTS <= end; out += OUTS) dot<BITS, OUTS, ROWS, Kind>(w, out, from, sums, to);
        for (; out < end; out++) dot<BITS, 1, ROWS, Kind>(w, out, from, sums, to);
    }
}

template <int BITS, class Kind>
static void multiply_as(const Weight& w, const Input& x, float* y, int64_t begin, int64_t end) {
    for (int64_t out = begin; out < end; out += PLAIN_TILE) {  // weights that several rows of x need are read once
        const int64_t last = out + PLAIN_TILE < end ? out + PLAIN_TILE : end;
        for (int64_t r = 0; r < x.rows;) {
            if (x.rows - r >= 8) { some_rows<BITS, 8, Kind>(w, x, r, y, out, last); r += 8; }
            else if (x.rows - r >= 4) { some_rows<BITS, 4, Kind>(w, x, r, y, out, last); r += 4; }
            else if (x.rows - r >= 2) { some_rows<BITS, 2, Kind>(w, x, r, y, out, last); r += 2; }
            else { some_rows<BITS, 1, Kind>(w, x, r, y, out, last); r += 1; }
        }
    }
    if (w.addend)
        for (int64_t r = 0; r < x.rows; r++)
            for (int64_t out = begin; out < end; out++) y[r * w.num_out + out] += w.addend[out];
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
#pragma omp parallel for schedule(static) num_threads(w.num_threads)
    for (int64_t out = begin; out < end; out++) {
        const uint8_t* codes = w.codes + out * (w.num_in * BITS / 8);
        float* row = y + (out - begin) * w.num_in;
        for (int64_t i = 0; i < w.num_in; i += 32, codes += 4 * BITS) {
            const float scale = ((const Scale*)w.scales)[out * groups + i / w.group_size];
            const float bias = ((const Scale*)w.biases)[out * groups + i / w.group_size];
            uint8_t bytes[32];
            if (BITS == 8) std::memcpy(bytes, codes, 32);
            else
                for (int j = 0; j < 16; j++) { bytes[2 * j] = codes[j] & 15; bytes[2 * j + 1] = codes[j] >> 4; }
            for (int j = 0; j < 32; j++) row[i + j] = float(bytes[j]) * scale + bias;
        }
    }
}

template <class Element> static void widen_rows(const Weight& w, int64_t begin, int64_t end, float* y) {
    const Element* from = (const Element*)w.codes + begin * w.num_in;
#pragma omp parallel for schedule(static) num_threads(w.num_threads)
    for (int64_t i = 0; i < (end - begin) * w.num_in; i += 16) store(y + i, load(from + i));
}

template <class Scale> static void multiply_any(const Weight& w, const Input& x, float* y, int64_t begin, int64_t end) {
    w.bits == 4 ? multiply_as<4, Scale>(w, x, y, begin, end) : multiply_as<8, Scale>(w, x, y, begin, end);
}

template <class Scale> static void expand_any(const Weight& w, int64_t begin, int64_t end, float* y) {
    w.bits == 4 ? expand_rows<4, Scale>(w, begin, end, y) : expand_rows<8, Scale>(w, begin, end, y);
}

void multiply(const Weight& w, const Input& x, float* y, int64_t begin, int64_t end) {
    if (w.bits == 32) multiply_as<32, float>(w, x, y, begin, end);
    else if (w.bits == 16 && w.scale_type == FP16) multiply_as<16, Half>(w, x, y, begin, end);
    else if (w.bits == 16) multiply_as<16, Brain>(w, x, y, begin, end);
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
    if (w->bits == 16 && w->scale_type == FP16) widen_rows<Half>(*w, begin, end, y);
    else if (w->bits == 16) widen_rows<Brain>(*w, begin, end, y);
    else if (w->scale_type == FP32) expand_any<float>(*w, begin, end, y);
    else if (w->scale_type == FP16) expand_any<Half>(*w, begin, end, y);
    else expand_any<Brain>(*w, begin, end, y);
}

// Floats in a register, which tell the instruction set of this build.
extern "C" int num_lanes() { return LANES; }
