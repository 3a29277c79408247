// y = x W^T for W in affine groups (MLX layout): w = code * scale + bias, codes of 4 or 8 bits; or W plain.

#pragma once
#include <cstdint>

enum ScaleType { FP32 = 0, FP16 = 1, BF16 = 2 };

struct Weight {
    const uint8_t* codes;  // [num_out, num_in * bits / 8]; of 16 or 32 bits: the weights themselves
    const void* scales;    // [num_out, num_in / group_size]
    const void* biases;
    const float* addend;  // [num_out], or null
    int64_t num_out, num_in;
    int32_t bits, group_size, scale_type, num_threads;  // of 16 bits, `scale_type` is that of the weights
};

// Rows of x as `multiply` needs them: aligned, in the order of the codes, and with the sum of every 32 inputs.
struct Input {
    int64_t rows, num_in;
    float *plain, *ordered, *sums;

    // In `space`, of `floats(rows, num_in)` floats, aligned to 64 bytes.
    Input(float* space, int64_t rows, int64_t num_in);
    static int64_t floats(int64_t rows, int64_t num_in);
    void fill(const float* x, bool has_four_bits);  // x [rows, num_in]; it may be `plain` itself
};

// Columns begin…end of y [rows, num_out]. The order of sums does not depend on the number of rows and columns.
void multiply(const Weight& w, const Input& x, float* y, int64_t begin, int64_t end);
