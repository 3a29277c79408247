// Attention of many queries over the blocks that each has selected, as in the prefill of long prompts. The reference is
// `sparse_attention` in ops/sparse.py; here blocks are read in place instead of gathered.
//
// Neighbouring queries select mostly the same blocks. So a group of queries walks the blocks together, in ascending
// order: a block is loaded into the cache once, and all queries that selected it use it there. Every query and head
// keeps the largest score so far, the sum of the weights relative to it, and the weighted values (online softmax).
//
// Results are batch-invariant and do not depend on the number of threads: the order of the blocks of a query and of
// every sum over a head or over the keys of a block is fixed.

#include "affine.h"
#include "vectors.h"
#include <algorithm>
#include <cfloat>

struct Attention {
    const float* q;            // [n, H, D]
    const void *k, *v;         // [G, P, B, D]
    const int64_t* table;      // block → page
    const int64_t* selected;     // [n, G, C], none twice; -1: none
    const int64_t* positions;  // [n]
    float* out;                // [n, H, D]
    int64_t num_queries, num_heads, num_groups, dim;
    int64_t num_pages, block_size, num_blocks, num_selected;
    int64_t page_type, num_threads;  // ScaleType of keys and values
    float scale;
};

// A product in registers: ROWS rows by PARTS parts, which leaves a few registers for the operands.
static const int ROWS = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
static const int PARTS = 4;
#else
static const int PARTS = 2;
#endif
static const int64_t MAX_ROWS = 192;  // heads times queries of a group: their sums stay in the L2 cache

// Rows of floats that need not be adjacent.
struct Rows {
    float* at[ROWS];
    int count;
};

// c = c * factors + a b for COUNT rows and WIDTH parts of columns; a is [rows, depth], b [depth, width]. The product is
// summed before it is added to c: thousands of equal values added one by one would all be rounded the same way.
template <int COUNT, int WIDTH>
static inline void multiply_tile(const Rows& a, const float* b, int64_t width, int64_t depth, const float* factors,
                                 const Rows& c, int64_t column) {
    Part total[COUNT][WIDTH];
#pragma GCC unroll 6
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++)
            total[r][i] = Part{};
    for (int64_t j = 0; j < depth; j++) {
        Part row[WIDTH];
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) row[i] = load_part(b + j * width + column + i * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; i++) total[r][i] += row[i] * a.at[r][j];
    }
#pragma GCC unroll 6
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) {
            float* to = c.at[r] + column + i * LANES;
            store_part(to, factors ? load_part(to) * factors[r] + total[r][i] : total[r][i]);
        }
}

template <int COUNT>
static void multiply_some(const Rows& a, const float* b, int64_t width, int64_t depth, const float* factors,
                          const Rows& c) {
    int64_t column = 0;
    for (; column + PARTS * LANES <= width; column += PARTS * LANES)
        multiply_tile<COUNT, PARTS>(a, b, width, depth, factors, c, column);
    for (; column < width; column += LANES) multiply_tile<COUNT, 1>(a, b, width, depth, factors, c, column);
}

static void multiply_rows(const Rows& a, const float* b, int64_t width, int64_t depth, const float* factors,
                          const Rows& c) {
    switch (c.count) {
        case 6: return multiply_some<6>(a, b, width, depth, factors, c);
        case 5: return multiply_some<5>(a, b, width, depth, factors, c);
        case 4: return multiply_some<4>(a, b, width, depth, factors, c);
        case 3: return multiply_some<3>(a, b, width, depth, factors, c);
        case 2: return multiply_some<2>(a, b, width, depth, factors, c);
        case 1: return multiply_some<1>(a, b, width, depth, factors, c);
    }
}

static inline float largest(Part v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = std::max(most, float(v[i]));
    return most;
#endif
}

template <class Element> class Reader {  // Element: of the pages
  public:
    explicit Reader(const Attention& attention) : a(attention), shared(a.num_heads / a.num_groups) {}

    // Queries begin…end, the heads of one group.
    void attend(int64_t begin, int64_t end, int64_t group) {
        make_room(end - begin);
        load_queries(begin, end, group);
        sort_choices(begin, end, group);
        for (int64_t block = 0; block < a.num_blocks; block++)
            if (first[block] < first[block + 1]) attend_block(block, begin, group);
        store_outputs(begin, end, group);
    }

  private:
    const Attention& a;
    const int64_t shared;
    float *queries, *values, *sums, *most;       // of every query and head: [D], [D], [LANES], one number
    float *transposed_keys, *float_values, *weights;  // of a block: [D, B], [B, D]; of some rows: [ROWS, B]
    std::vector<int64_t> first, selecting;        // the queries that selected block i: from first[i] to first[i + 1]
    static Space& space() { static thread_local Space held; return held; }

    void make_room(int64_t num_queries) {
        const int64_t rows = num_queries * shared, block = a.block_size * a.dim;
        float* room = space().get(rows * (2 * a.dim + LANES) + 2 * block + ROWS * a.block_size + rows);
        for (float** part : {&queries, &values}) { *part = room; room += rows * a.dim; }
        sums = room; room += rows * LANES;
        for (float** part : {&transposed_keys, &float_values}) { *part = room; room += block; }
        weights = room; room += ROWS * a.block_size;
        most = room;
        std::memset(values, 0, rows * a.dim * sizeof(float));
        std::memset(sums, 0, rows * LANES * sizeof(float));
        std::fill_n(most, rows, -FLT_MAX);
    }

    // The heads of a group are adjacent in `q` and in `out`.
    int64_t head_of(int64_t query, int64_t group) const { return (query * a.num_heads + group * shared) * a.dim; }

    void load_queries(int64_t begin, int64_t end, int64_t group) {
        float* to = queries;
        for (int64_t query = begin; query < end; query++, to += shared * a.dim)
            for (int64_t i = 0; i < shared * a.dim; i += 16)
                store(to + i, load(a.q + head_of(query, group) + i) * a.scale);
    }

    void store_outputs(int64_t begin, int64_t end, int64_t group) {
        for (int64_t query = begin, row = 0; query < end; query++)
            for (int64_t head = 0; head < shared; head++, row++) {
                const float total = std::max(sum(load_part(sums + row * LANES)), FLT_MIN);  // a query without keys gets zeros
                float* to = a.out + head_of(query, group) + head * a.dim;
                for (int64_t i = 0; i < a.dim; i += 16) store(to + i, load(values + row * a.dim + i) / total);
            }
    }

    // Sort the selection by block, then by query; blocks that begin after a query are left out.
    void sort_choices(int64_t begin, int64_t end, int64_t group) {
        const auto each = [&](auto&& use) {
            for (int64_t query = begin; query < end; query++) {
                const int64_t* ids = a.selected + (query * a.num_groups + group) * a.num_selected;
                for (int64_t i = 0; i < a.num_selected; i++)
                    if (ids[i] >= 0 && ids[i] * a.block_size <= a.positions[query]) use(ids[i], query);
            }
        };
        first.assign(a.num_blocks + 2, 0);
        each([&](int64_t block, int64_t) { first[block + 2]++; });
        for (int64_t block = 0; block < a.num_blocks; block++) first[block + 2] += first[block + 1];
        selecting.resize(first[a.num_blocks + 1]);
        each([&](int64_t block, int64_t query) { selecting[first[block + 1]++] = query; });
    }

    // Process the rows of all queries that selected the block, grouped by how many of its keys they see.
    void attend_block(int64_t block, int64_t begin, int64_t group) {
        const int64_t place = (group * a.num_pages + a.table[block]) * a.block_size * a.dim;
        turn((const Element*)a.k + place);
        const float* block_values = widened((const Element*)a.v + place);
        int64_t rows[ROWS], num_keys = 0;
        int count = 0;
        const auto flush = [&] {
            if (count) attend_rows(rows, count, num_keys, block_values);
            count = 0;
        };
        for (int64_t i = first[block]; i < first[block + 1]; i++) {
            const int64_t query = selecting[i], seen = a.positions[query] + 1 - block * a.block_size;
            if (std::min(seen, a.block_size) != num_keys) flush();
            num_keys = std::min(seen, a.block_size);
            for (int64_t head = 0; head < shared; head++) {
                rows[count++] = (query - begin) * shared + head;
                if (count == ROWS) flush();
            }
        }
        flush();
    }

    // Transpose keys [B, D] → [D, B]: lanes are keys, so that no product needs a sum over lanes.
    void turn(const Element* keys) {
        for (int64_t key = 0; key < a.block_size; key += 16)
            for (int64_t i = 0; i < a.dim; i += LANES) {
                Part parts[16];
                for (int j = 0; j < 16; j++) parts[j] = load_part(keys + (key + j) * a.dim + i);
                for (int lane = 0; lane < LANES; lane++)
                    for (int j = 0; j < 16; j++) transposed_keys[(i + lane) * a.block_size + key + j] = parts[j][lane];
            }
    }

    const float* widened(const float* from) { return from; }

    template <class Narrow> const float* widened(const Narrow* from) {
        for (int64_t i = 0; i < a.block_size * a.dim; i += 16) store(float_values + i, load(from + i));
        return float_values;
    }

    // Memory after a query may hold anything, even NaN: mask both its scores and its values.
    void attend_rows(const int64_t* rows, int count, int64_t num_keys, const float* block_values) {
        Rows query_rows, weight_rows, value_rows;
        query_rows.count = weight_rows.count = value_rows.count = count;
        for (int r = 0; r < count; r++) {
            query_rows.at[r] = queries + rows[r] * a.dim;
            weight_rows.at[r] = weights + r * a.block_size;
            value_rows.at[r] = values + rows[r] * a.dim;
        }
        multiply_rows(query_rows, transposed_keys, a.block_size, a.dim, nullptr, weight_rows);
        float factors[ROWS];
        for (int r = 0; r < count; r++)
            factors[r] = weigh(weight_rows.at[r], num_keys, most[rows[r]], sums + rows[r] * LANES);
        multiply_rows(weight_rows, block_values, a.dim, num_keys, factors, value_rows);
    }

    // Turn the scores of a row into weights; return the factor by which earlier weights shrink.
    float weigh(float* scores, int64_t num_keys, float& most_so_far, float* sum_so_far) {
        const int64_t end = (num_keys + LANES - 1) / LANES * LANES;
        for (int64_t i = num_keys; i < end; i++) scores[i] = -FLT_MAX;
        Part best = load_part(scores);
        for (int64_t i = LANES; i < end; i += LANES) {
            const Part next = load_part(scores + i);
            best = next > best ? next : best;
        }
        const float before = most_so_far, now = std::max(before, largest(best));
        for (int64_t i = 0; i < end; i += LANES) store_part(scores + i, exponential(load_part(scores + i) - now));
        for (int64_t i = num_keys; i < end; i++) scores[i] = 0;
        const float factor = exponential(Part{} + (before - now))[0];
        Part total = load_part(sum_so_far) * factor;
        for (int64_t i = 0; i < end; i += LANES) total += load_part(scores + i);
        store_part(sum_so_far, total);
        most_so_far = now;
        return factor;
    }
};

template <class Element> static void attend_all(const Attention& a) {
    const int64_t most = std::max<int64_t>(1, MAX_ROWS * a.num_groups / a.num_heads);
    const int64_t fair = a.num_queries * a.num_groups / (4 * a.num_threads);  // so that all threads end at about the same time
    const int64_t size = std::max<int64_t>(1, std::min(most, fair)), pieces = (a.num_queries + size - 1) / size;
#pragma omp parallel num_threads(a.num_threads)
    {
        Reader<Element> reader(a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < pieces * a.num_groups; i++) {
            const int64_t begin = i / a.num_groups * size;
            reader.attend(begin, std::min(begin + size, a.num_queries), i % a.num_groups);
        }
    }
}

extern "C" void sparse_attend(const Attention* attention) {
    if (attention->page_type == FP32) attend_all<float>(*attention);
    else if (attention->page_type == FP16) attend_all<Half>(*attention);
    else attend_all<Brain>(*attention);
}
