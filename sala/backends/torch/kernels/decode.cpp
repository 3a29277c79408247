// All layers of the model on a few tokens in one parallel region, for decoding and for verifying drafts.
//
// The reference is model.py with ops/; this computes the same in fp32, row by row, whatever the precision of the weights
// and of the pages. Results are batch-invariant and do not depend on the number of threads: every sum has a fixed order,
// and drafts that are verified together get the same bits as tokens that are decoded one after another.
//
// Phases are separated by barriers. Every thread computes small things itself (a norm of a few hundred numbers), which
// is cheaper than waiting for another thread. All widths are multiples of 16.

#include "affine.h"
#include "vectors.h"
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <thread>
#ifdef __linux__
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
static int omp_get_num_threads() { return 1; }
#endif

struct Layer {
    Weight q, k, v, o, gate, mlp_gate, mlp_up, mlp_down;  // a gate without codes means no gate
    const float *input_norm, *post_norm, *q_norm, *k_norm, *o_norm;  // null: none
    const float* decay;  // [H] of lightning layers; null makes it a sparse one
    int64_t num_heads, num_kv_heads, head_dim;
};

struct Model {
    const Layer* layers;
    const float* norm;
    int64_t hidden;
    float eps, residual_scale;
    int64_t num_pages, block_size, kernel_size, kernel_stride, init_blocks, window_blocks;
    int64_t tie_ulps, page_type;  // ScaleType of keys and values
};

struct LayerCache {
    float* states;          // lightning: [slots, H, D, D]
    void *k, *v, *k1, *k2;  // sparse: [G, pages, rows per page, D]
};

struct Span {
    int64_t start, length, slot, sparse_from, num_selected, num_drafts;
    const int64_t* pages;  // block → page
};

struct Angles {
    const float *cos, *sin;  // [T, D]; null: no RoPE
};

struct Step {
    const Span* spans;
    const LayerCache* caches;  // one per layer
    float* x;           // [T, hidden]: the embedded tokens; at the end, the normed hidden states
    Angles lightning, sparse;
    const float* growth;     // [T] factors of the sparse layers' queries, or null
    float *kept_k, *kept_v;  // [lightning layers, T, H, D]: keys and values of spans with drafts, or null
    const int64_t* gathered_rows;  // [T] the row of a token in the two buffers that follow, or -1; null: nothing to gather
    float* gathered_shares;        // [rows, sparse layers, H, num_gathered]: attention per block
    int32_t* gathered_blocks;      // [rows, sparse layers, G, num_gathered]: these blocks
    int64_t num_gathered, num_sparse;
    const int64_t* feature_layers;  // after so many layers, x is copied to the features
    float* features;                // [num_features, T, hidden]
    int64_t num_features;
    int64_t num_spans, num_tokens, num_layers, num_threads;
};

struct Range { int64_t begin, end; };

// Spins for about 0.1 ms, because phases are short, then sleeps: the awaited thread may need this processor, and the
// system moves it here only when nothing runs here. Sleeping at once would cost a fifth of the speed on idle cores.
class Barrier {
  public:
    void wait(int64_t count) {
        const int32_t now = phase.load();
        if (arrived.fetch_add(1) + 1 == count) {
            arrived.store(0);
            phase.store(now + 1);
            if (sleepers.load()) wake();
            return;
        }
        for (int tries = 0; tries < 100000; tries++)
            if (phase.load(std::memory_order_acquire) != now) return;
        sleepers.fetch_add(1);
        while (phase.load() == now) sleep(now);
        sleepers.fetch_sub(1);
    }

  private:
#ifdef __linux__
    void sleep(int32_t now) { syscall(SYS_futex, &phase, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &phase, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(int32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
    std::atomic<int64_t> arrived{0};
    std::atomic<int32_t> phase{0}, sleepers{0};
};

struct Team {
    int64_t index, count;
    Barrier* barrier;
    Range part(int64_t n) const { return {n * index / count, n * (index + 1) / count}; }
};

// ---- one vector

template <class Element> static inline float dot(const float* a, const Element* b, int64_t n) {
    Floats total = {};
    for (int64_t i = 0; i < n; i += 16) total += load(a + i) * load(b + i);
    return sum(total);
}

static void rms_norm(const float* x, const float* weight, float eps, float* y, int64_t n) {
    const float factor = 1.0f / std::sqrt(dot(x, x, n) / float(n) + eps);
    for (int64_t i = 0; i < n; i += 16) store(y + i, load(x + i) * factor * load(weight + i));
}

// RoPE in the half-split layout; half of a head need not be a multiple of 16.
static void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

// Norm and RoPE of a head of queries or keys, in place.
static void shape_head(float* x, const float* norm, float eps, Angles angles, int64_t token, int64_t dim) {
    if (norm) rms_norm(x, norm, eps, x, dim);
    if (angles.cos) rotate(x, angles.cos + token * dim, angles.sin + token * dim, dim);
}

// ---- lightning

// S ← decay S + k^T v, o = q S for 16 columns of a head's state, token by token; without q, only the state.
// `state` is [dim, 16]; from token to token q and o go on by `stride` floats, k and v by `kv_stride`.
__attribute__((noinline)) static void recur(float* state, int64_t dim, float decay, int64_t num_tokens, const float* q,
                                            const float* k, const float* v, float* o, int64_t stride,
                                            int64_t kv_stride) {
    for (int64_t t = 0; t < num_tokens; t++) {
        const Floats value = load(v + t * kv_stride);
        Floats total = {};
        for (int64_t i = 0; i < dim; i++) {
            const Floats row = load(state + i * 16) * decay + value * k[t * kv_stride + i];
            store(state + i * 16, row);
            if (q) total += row * q[t * stride + i];
        }
        if (q) store(o + t * stride, total);
    }
}

static void load_columns(float* to, const float* state, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) store(to + i * 16, load(state + i * dim));
}

static void store_columns(float* state, const float* from, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) store(state + i * dim, load(from + i * 16));
}

// ---- one step

static const int64_t KEYS = 256;         // in a piece of attention, at least
static const int64_t MOST_PIECES = 256;  // of one query's attention
static const int64_t WINDOWS = 256;      // scored at a time

struct Token {
    const Span* span;
    int64_t position;
    bool is_sparse;
    int64_t num_blocks, per_piece;  // to attend to, and how many of them in one piece
    int64_t first_piece, num_pieces;
};

struct Shared {  // between threads
    float *q, *k, *v, *gate, *o, *hidden, *wide, *up;  // [T, …]
    float *lse, *windows, *partial;                    // [T, H], [T, G, max_windows], see `partial`
    int64_t* selected;                                   // [T, G, max_selected]
    const Token* tokens;
    int64_t num_pieces, max_windows;  // no windows: no token follows the sparse rule
    int64_t max_selected;             // blocks of a token under it
};

template <class Element> class Worker {  // Element: of the pages
  public:
    Worker(const Model& model, const Step& step, const Shared& shared, float* own, float* columns, Team team)
        : m(model), s(step), sh(shared), own(own), columns(columns), team(team) {}

    void run() {
        int64_t num_lightning = 0, num_sparse = 0;
        for (int64_t index = 0; index < s.num_layers; index++) {
            const Layer& layer = m.layers[index];
            const Input x = normed(layer.input_norm, has_four(layer.q, layer.k, layer.v, layer.gate));
            project(layer.q, x, sh.q);
            project(layer.k, x, sh.k);
            project(layer.v, x, sh.v);
            if (layer.gate.codes) project(layer.gate, x, sh.gate);
            wait();
            if (layer.decay) lightning(layer, s.caches[index], num_lightning++);
            else sparse(layer, s.caches[index], num_sparse++);
            wait();
            add(layer.o, mixed(layer));
            wait();
            mlp(layer);
            keep_features(index + 1);
        }
        const Range rows = team.part(s.num_tokens);
        for (int64_t t = rows.begin; t < rows.end; t++)
            rms_norm(s.x + t * m.hidden, m.norm, m.eps, s.x + t * m.hidden, m.hidden);
    }

  private:
    // Copy x to the features that are taken after so many layers. The next write to x waits for all threads.
    void keep_features(int64_t num_layers) {
        for (int64_t f = 0; f < s.num_features; f++) {
            if (s.feature_layers[f] != num_layers) continue;
            const Range part = team.part(s.num_tokens * m.hidden);
            float* out = s.features + f * s.num_tokens * m.hidden;
            std::memcpy(out + part.begin, s.x + part.begin, (part.end - part.begin) * sizeof(float));
        }
    }

    const Model& m;
    const Step& s;
    const Shared& sh;
    float *own, *columns;  // buffers of this thread: for an Input; for 16 columns of a state, or the weights of a block
    Team team;
    std::vector<int32_t> ranks;  // of blocks, in the order of their scores
    std::vector<int64_t> order;

    void wait() { team.barrier->wait(team.count); }

    template <class... Weights> static bool has_four(const Weights&... weights) { return ((weights.bits == 4) || ...); }

    void project(const Weight& weight, const Input& x, float* y) {
        const Range part = team.part(weight.num_out);
        multiply(weight, x, y, part.begin, part.end);
    }

    Input normed(const float* norm, bool has_four_bits) {
        Input x(own, s.num_tokens, m.hidden);
        for (int64_t t = 0; t < s.num_tokens; t++)
            rms_norm(s.x + t * m.hidden, norm, m.eps, x.plain + t * m.hidden, m.hidden);
        x.fill(x.plain, has_four_bits);
        return x;
    }

    // The mixer's output, normed and gated: what o_proj reads.
    Input mixed(const Layer& layer) {
        const int64_t width = layer.num_heads * layer.head_dim;
        Input x(own, s.num_tokens, width);
        for (int64_t t = 0; t < s.num_tokens; t++) {
            const float* from = sh.o + t * width;
            float* to = x.plain + t * width;
            if (layer.o_norm) rms_norm(from, layer.o_norm, m.eps, to, width);
            else std::memcpy(to, from, width * sizeof(float));
            const float* gate = sh.gate + t * width;
            if (layer.gate.codes)
                for (int64_t i = 0; i < width; i += 16) store(to + i, load(to + i) * sigmoid(load(gate + i)));
        }
        x.fill(x.plain, has_four(layer.o));
        return x;
    }

    // x += scale * y W^T, in the residual stream.
    void add(const Weight& weight, const Input& y) {
        const Range part = team.part(m.hidden);
        multiply(weight, y, sh.hidden, part.begin, part.end);
        for (int64_t t = 0; t < s.num_tokens; t++)
            for (int64_t i = t * m.hidden + part.begin; i < t * m.hidden + part.end; i++)
                s.x[i] += sh.hidden[i] * m.residual_scale;
    }

    void mlp(const Layer& layer) {
        const Input x = normed(layer.post_norm, has_four(layer.mlp_gate, layer.mlp_up));
        project(layer.mlp_gate, x, sh.wide);
        project(layer.mlp_up, x, sh.up);
        wait();
        const int64_t width = layer.mlp_gate.num_out;
        Input y(own, s.num_tokens, width);
        for (int64_t i = 0; i < s.num_tokens * width; i += 16) {
            const Floats gate = load(sh.wide + i);
            store(y.plain + i, gate * sigmoid(gate) * load(sh.up + i));
        }
        y.fill(y.plain, has_four(layer.mlp_down));
        add(layer.mlp_down, y);
        wait();
    }

    void lightning(const Layer& layer, const LayerCache& cache, int64_t index) {
        const int64_t heads = layer.num_heads, kv_heads = layer.num_kv_heads, dim = layer.head_dim;
        const Range q_part = team.part(s.num_tokens * heads), k_part = team.part(s.num_tokens * kv_heads);
        const float scale = 1.0f / std::sqrt(float(dim));
        for (int64_t i = q_part.begin; i < q_part.end; i++) {
            shape_head(sh.q + i * dim, layer.q_norm, m.eps, s.lightning, i / heads, dim);
            for (int64_t j = 0; j < dim; j += 16) store(sh.q + i * dim + j, load(sh.q + i * dim + j) * scale);
        }
        for (int64_t i = k_part.begin; i < k_part.end; i++)
            shape_head(sh.k + i * dim, layer.k_norm, m.eps, s.lightning, i / kv_heads, dim);
        wait();
        const int64_t blocks = dim / 16;
        const Range units = team.part(s.num_spans * heads * blocks);
        int64_t first = 0, span_index = 0;
        for (int64_t unit = units.begin; unit < units.end; unit++) {
            for (; span_index < unit / (heads * blocks); span_index++) first += s.spans[span_index].length;
            const int64_t head = unit / blocks % heads, column = unit % blocks * 16;
            advance(layer, cache, s.spans[span_index], first, head, column);
        }
        if (s.kept_k) keep(layer, index);
    }

    // One span whose tokens begin at `first`, one head, 16 columns.
    void advance(const Layer& layer, const LayerCache& cache, const Span& span, int64_t first, int64_t head, int64_t column) {
        const int64_t dim = layer.head_dim, width = layer.num_heads * dim, kv_width = layer.num_kv_heads * dim;
        const int64_t kv_head = head / (layer.num_heads / layer.num_kv_heads);
        float* state = cache.states + ((span.slot * layer.num_heads + head) * dim) * dim + column;
        load_columns(columns, state, dim);
        const int64_t at = first * width + head * dim, kv_at = first * kv_width + kv_head * dim;
        recur(columns, dim, layer.decay[head], span.length, sh.q + at, sh.k + kv_at, sh.v + kv_at + column,
              sh.o + at + column, width, kv_width);
        if (!span.num_drafts) store_columns(state, columns, dim);  // with drafts, the state advances later, in lightning_fold
    }

    void keep(const Layer& layer, int64_t index) {
        const int64_t heads = layer.num_heads, dim = layer.head_dim, shared = heads / layer.num_kv_heads;
        const Range part = team.part(s.num_tokens * heads);
        for (int64_t i = part.begin; i < part.end; i++) {
            const int64_t from = (i / heads * layer.num_kv_heads + i % heads / shared) * dim;
            const int64_t to = (index * s.num_tokens * heads + i) * dim;
            std::memcpy(s.kept_k + to, sh.k + from, dim * sizeof(float));
            std::memcpy(s.kept_v + to, sh.v + from, dim * sizeof(float));
        }
    }

    // ---- sparse attention; dense attention is the same over all blocks

    void sparse(const Layer& layer, const LayerCache& cache, int64_t index) {
        const int64_t heads = layer.num_heads, groups = layer.num_kv_heads, dim = layer.head_dim;
        const float scale = 1.0f / std::sqrt(float(dim));
        const Range q_part = team.part(s.num_tokens * heads), k_part = team.part(s.num_spans * groups);
        for (int64_t i = q_part.begin; i < q_part.end; i++) {
            shape_head(sh.q + i * dim, layer.q_norm, m.eps, s.sparse, i / heads, dim);
            const float factor = s.growth ? scale * s.growth[i / heads] : scale;
            for (int64_t j = 0; j < dim; j += 16) store(sh.q + i * dim + j, load(sh.q + i * dim + j) * factor);
        }
        int64_t first = 0, span = 0;
        for (int64_t unit = k_part.begin; unit < k_part.end; unit++) {
            for (; span < unit / groups; span++) first += s.spans[span].length;
            append(layer, cache, s.spans[span], first, unit % groups);
        }
        wait();
        if (sh.max_windows) select(layer, cache);
        attend(layer, cache, index);
        wait();
        merge(layer, index);
    }

    // Where the attention of a head to each block is gathered; null for tokens without sources.
    float* shares(const Layer& layer, int64_t index, int64_t t, int64_t head) const {
        if (!s.gathered_rows || s.gathered_rows[t] < 0) return nullptr;
        return s.gathered_shares + ((s.gathered_rows[t] * s.num_sparse + index) * layer.num_heads + head) * s.num_gathered;
    }

    // The first head of a group writes the ids of its blocks; every head turns log-sums into shares of its attention.
    void gather(const Layer& layer, int64_t index, int64_t t, int64_t head, float log_total) {
        float* out = shares(layer, index, t, head);
        if (!out) return;
        const Token& token = sh.tokens[t];
        const int64_t groups = layer.num_kv_heads, shared = layer.num_heads / groups, group = head / shared;
        for (int64_t i = 0; i < token.num_blocks; i++) out[i] = std::exp(out[i] - log_total);
        if (head % shared) return;
        int32_t* ids = s.gathered_blocks + ((s.gathered_rows[t] * s.num_sparse + index) * groups + group) * s.num_gathered;
        const int64_t* selected = sh.selected + (t * groups + group) * sh.max_selected;
        for (int64_t i = 0; i < token.num_blocks; i++) ids[i] = int32_t(token.is_sparse ? selected[i] : i);
    }

    // The address of row `row` of a sequence in a pool with `per_page` rows per page.
    Element* at(void* pool, const Layer& layer, const Span& span, int64_t group, int64_t row, int64_t per_page) const {
        return (Element*)pool + ((group * m.num_pages + span.pages[row / per_page]) * per_page + row % per_page) * layer.head_dim;
    }

    // Write keys and values of a span into its pages and pool the windows that they complete.
    void append(const Layer& layer, const LayerCache& cache, const Span& span, int64_t first, int64_t group) {
        const int64_t dim = layer.head_dim, end = span.start + span.length, last = end / m.block_size;
        if (end % m.block_size && last * m.block_size >= span.start)  // the rest of a new page must not be NaN
            for (void* pool : {cache.k, cache.v})
                std::memset(at(pool, layer, span, group, last * m.block_size, m.block_size), 0,
                            m.block_size * dim * sizeof(Element));
        for (int64_t i = 0; i < span.length; i++) {
            const int64_t from = ((first + i) * layer.num_kv_heads + group) * dim;
            shape_head(sh.k + from, layer.k_norm, m.eps, s.sparse, first + i, dim);
            const int64_t row = span.start + i;
            Element* key = at(cache.k, layer, span, group, row, m.block_size);
            Element* value = at(cache.v, layer, span, group, row, m.block_size);
            for (int64_t j = 0; j < dim; j += 16) {
                store(key + j, load(sh.k + from + j));
                store(value + j, load(sh.v + from + j));
            }
        }
        pool(layer, cache, cache.k1, span, group, m.kernel_size, m.kernel_stride);
        pool(layer, cache, cache.k2, span, group, 4 * m.kernel_size, 4 * m.kernel_stride);
    }

    void pool(const Layer& layer, const LayerCache& cache, void* target, const Span& span, int64_t group, int64_t kernel,
              int64_t stride) {
        const int64_t end = (span.start + span.length) / stride;
        for (int64_t row = std::max(span.start / stride, kernel / stride - 1); row < end; row++)
            for (int64_t j = 0; j < layer.head_dim; j += 16) {
                Floats total = {};
                for (int64_t i = (row + 1) * stride - kernel; i < (row + 1) * stride; i++)
                    total += load(at(cache.k, layer, span, group, i, m.block_size) + j);
                store(at(target, layer, span, group, row, m.block_size / stride) + j, total / float(kernel));
            }
    }

    // The number of windows that end at or before a position.
    static int64_t num_visible(int64_t position, int64_t kernel, int64_t stride) {
        return position + 1 < kernel ? 0 : (position + 1 - kernel) / stride + 1;
    }

    // The blocks of every query that follows the sparse rule, in ascending order.
    void select(const Layer& layer, const LayerCache& cache) {
        const int64_t groups = layer.num_kv_heads, pieces = (sh.max_windows + WINDOWS - 1) / WINDOWS;
        const Range part = team.part(s.num_tokens * groups), fine = team.part(s.num_tokens * groups * pieces);
        for (int64_t i = part.begin; i < part.end; i++)
            if (sh.tokens[i / groups].is_sparse) score_coarse(layer, cache, i / groups, i % groups);
        wait();
        for (int64_t i = fine.begin; i < fine.end; i++)
            if (sh.tokens[i / pieces / groups].is_sparse)
                score_windows(layer, cache, i / pieces / groups, i / pieces % groups, i % pieces * WINDOWS);
        wait();
        for (int64_t i = part.begin; i < part.end; i++)
            if (sh.tokens[i / groups].is_sparse) pick_blocks(layer, i / groups, i % groups);
        wait();
    }

    // The log-sum-exp of the coarse windows' scores, per head.
    void score_coarse(const Layer& layer, const LayerCache& cache, int64_t t, int64_t group) {
        const Token& token = sh.tokens[t];
        const int64_t dim = layer.head_dim, shared = layer.num_heads / layer.num_kv_heads, stride = 4 * m.kernel_stride;
        const int64_t count = num_visible(token.position, 4 * m.kernel_size, stride);
        const int64_t unused = m.kernel_size / m.kernel_stride - 1;
        for (int64_t head = group * shared; head < (group + 1) * shared; head++) {
            float most = -FLT_MAX, total = 0;  // running maximum and sum relative to it
            for (int64_t i = 0; i < count; i++) {
                const Element* key = at(cache.k2, layer, *token.span, group, i + unused, m.block_size / stride);
                const float score = dot(sh.q + (t * layer.num_heads + head) * dim, key, dim);
                if (score > most) { total = total * std::exp(most - score) + 1; most = score; }
                else total += std::exp(score - most);
            }
            sh.lse[t * layer.num_heads + head] = most + std::log(total);
        }
    }

    // WINDOWS windows from `first`: exp(score - lse), summed over the heads of the group.
    void score_windows(const Layer& layer, const LayerCache& cache, int64_t t, int64_t group, int64_t first) {
        const Token& token = sh.tokens[t];
        const int64_t dim = layer.head_dim, shared = layer.num_heads / layer.num_kv_heads;
        const int64_t unused = m.kernel_size / m.kernel_stride - 1;
        float* out = sh.windows + (t * layer.num_kv_heads + group) * sh.max_windows;
        int64_t end = std::min(first + WINDOWS, num_visible(token.position, m.kernel_size, m.kernel_stride));
        if (num_visible(token.position, 4 * m.kernel_size, 4 * m.kernel_stride) == 0) end = first;  // no lse yet
        for (int64_t i = first; i < end; i++) {
            const Element* key = at(cache.k1, layer, *token.span, group, i + unused, m.block_size / m.kernel_stride);
            float total = 0;
            for (int64_t head = group * shared; head < (group + 1) * shared; head++) {
                const float score = dot(sh.q + (t * layer.num_heads + head) * dim, key, dim);
                total += std::exp(score - sh.lse[t * layer.num_heads + head]);
            }
            out[i] = total < FLT_MAX ? total : FLT_MAX;  // infinity means forced
        }
        for (int64_t i = end; i < std::min(first + WINDOWS, sh.max_windows); i++) out[i] = 0;
    }

    // Forced blocks first, then those with the best window; those tied with the last of them by id.
    void pick_blocks(const Layer& layer, int64_t t, int64_t group) {
        const Token& token = sh.tokens[t];
        const int64_t own_block = token.position / m.block_size, ratio = m.block_size / m.kernel_stride;
        const int64_t before = m.kernel_size / m.kernel_stride - 1;  // windows that begin earlier and reach into the block
        const float* windows = sh.windows + (t * layer.num_kv_heads + group) * sh.max_windows;
        ranks.resize(own_block + 1);
        order.resize(own_block + 1);
        for (int64_t block = 0; block <= own_block; block++) {
            const int64_t first = std::max<int64_t>(block * ratio - before, 0);
            const int64_t end = std::min((block + 1) * ratio, sh.max_windows);
            float best = 0;
            for (int64_t i = first; i < end; i++) best = std::max(best, windows[i]);
            const bool is_forced = block < m.init_blocks || block >= own_block - m.window_blocks;
            std::memcpy(&ranks[block], &best, sizeof best);  // no score is negative: its bits are in the same order
            if (is_forced) ranks[block] = INT32_MAX;
            order[block] = block;
        }
        const auto is_better = [this](int64_t a, int64_t b) { return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : a < b; };
        if (token.num_blocks <= own_block) {
            const auto last = order.begin() + token.num_blocks - 1;
            std::nth_element(order.begin(), last, order.end(), is_better);
            const int64_t limit = ranks[*last];
            for (int32_t& rank : ranks)
                if (std::abs(rank - limit) <= m.tie_ulps) rank = limit;
            std::nth_element(order.begin(), last, order.end(), is_better);
        }
        std::sort(order.begin(), order.begin() + token.num_blocks);
        std::copy_n(order.begin(), token.num_blocks, sh.selected + (t * layer.num_kv_heads + group) * sh.max_selected);
    }

    // Softmax attention over a piece of the blocks: largest score, sum and weighted values of every head.
    void attend(const Layer& layer, const LayerCache& cache, int64_t index) {
        const int64_t groups = layer.num_kv_heads;
        const Range part = team.part(sh.num_pieces * groups);
        for (int64_t t = 0; t < s.num_tokens; t++) {
            const Token& token = sh.tokens[t];
            const int64_t first = token.first_piece * groups, last = first + token.num_pieces * groups;
            for (int64_t unit = std::max(first, part.begin); unit < std::min(last, part.end); unit++)
                attend_piece(layer, cache, index, t, (unit - first) / token.num_pieces, (unit - first) % token.num_pieces);
        }
    }

    float* partial(const Layer& layer, int64_t t, int64_t head, int64_t piece) const {
        const Token& token = sh.tokens[t];
        const int64_t index = token.first_piece * layer.num_heads + head * token.num_pieces + piece;
        return sh.partial + index * (layer.head_dim + 16);
    }

    void attend_piece(const Layer& layer, const LayerCache& cache, int64_t index, int64_t t, int64_t group,
                      int64_t piece) {
        const Token& token = sh.tokens[t];
        const int64_t dim = layer.head_dim, shared = layer.num_heads / layer.num_kv_heads, head = group * shared;
        const int64_t* selected = sh.selected + (t * layer.num_kv_heads + group) * sh.max_selected;
        for (int64_t j = 0; j < shared; j++) {
            float* out = partial(layer, t, head + j, piece);
            std::memset(out, 0, (dim + 16) * sizeof(float));
            out[dim] = -FLT_MAX;
        }
        const int64_t end = std::min((piece + 1) * token.per_piece, token.num_blocks);
        for (int64_t i = piece * token.per_piece; i < end; i++) {
            const int64_t block = token.is_sparse ? selected[i] : i;
            const int64_t count = std::min(m.block_size, token.position + 1 - block * m.block_size);
            const Element* keys = at(cache.k, layer, *token.span, group, block * m.block_size, m.block_size);
            const Element* values = at(cache.v, layer, *token.span, group, block * m.block_size, m.block_size);
            for (int64_t j = 0; j < shared; j++) {
                float* gathered = shares(layer, index, t, head + j);
                attend_block(sh.q + (t * layer.num_heads + head + j) * dim, keys, values, count, dim,
                             partial(layer, t, head + j, piece), gathered ? gathered + i : nullptr);
            }
        }
    }

    // `out` is [dim] weighted values, then the largest score and the sum of the weights, relative to it. `log_sum`, if
    // given, becomes the log-sum-exp of the block's scores.
    void attend_block(const float* q, const Element* keys, const Element* values, int64_t count, int64_t dim,
                      float* out, float* log_sum) {
        float *weights = columns, most = out[dim];
        for (int64_t i = 0; i < count; i++) {
            weights[i] = dot(q, keys + i * dim, dim);
            most = weights[i] > most ? weights[i] : most;
        }
        for (int64_t i = count; i % 16; i++) weights[i] = most;
        for (int64_t i = 0; i < count; i += 16) store(weights + i, exponential(load(weights + i) - most));
        for (int64_t i = count; i % 16; i++) weights[i] = 0;
        const float before = exponential(Floats{} + (out[dim] - most))[0];  // earlier weights shrink by this factor
        Floats total = {};
        for (int64_t i = 0; i < count; i += 16) total += load(weights + i);
        for (int64_t j = 0; j < dim; j += 16) {
            // A sum per block first: thousands of equal values added one by one would all be rounded the same way.
            Floats value = {};
            for (int64_t i = 0; i < count; i++) value += load(values + i * dim + j) * weights[i];
            store(out + j, load(out + j) * before + value);
        }
        const float own = sum(total);
        out[dim] = most;
        out[dim + 1] = out[dim + 1] * before + own;
        if (log_sum) *log_sum = most + std::log(own);
    }

    // Join the pieces of a head's attention, in order.
    void merge(const Layer& layer, int64_t index) {
        const int64_t heads = layer.num_heads, dim = layer.head_dim;
        const Range part = team.part(s.num_tokens * heads);
        for (int64_t i = part.begin; i < part.end; i++) {
            const int64_t pieces = sh.tokens[i / heads].num_pieces;
            float *out = sh.o + i * dim, most = -FLT_MAX, total = 0;
            for (int64_t p = 0; p < pieces; p++) most = std::max(most, partial(layer, i / heads, i % heads, p)[dim]);
            std::memset(out, 0, dim * sizeof(float));
            for (int64_t p = 0; p < pieces; p++) {
                const float* from = partial(layer, i / heads, i % heads, p);
                const float factor = std::exp(from[dim] - most);
                total += from[dim + 1] * factor;
                for (int64_t j = 0; j < dim; j += 16) store(out + j, load(out + j) + load(from + j) * factor);
            }
            for (int64_t j = 0; j < dim; j += 16) store(out + j, load(out + j) / total);
            gather(layer, index, i / heads, i % heads, most + std::log(total));
        }
    }
};

// Plan what every token attends to; return the total number of pieces of attention.
static int64_t plan_tokens(const Model& m, const Step& s, std::vector<Token>& tokens) {
    int64_t num_pieces = 0;
    tokens.clear();
    for (int64_t i = 0; i < s.num_spans; i++)
        for (int64_t j = 0; j < s.spans[i].length; j++) {
            const Span& span = s.spans[i];
            const int64_t position = span.start + j, seen = position / m.block_size + 1;
            const bool is_sparse = position >= span.sparse_from;
            const int64_t blocks = is_sparse ? std::min(seen, span.num_selected) : seen;
            const int64_t least = std::max<int64_t>(1, KEYS / m.block_size);
            const int64_t per_piece = std::max(least, (blocks + MOST_PIECES - 1) / MOST_PIECES);
            const int64_t pieces = (blocks + per_piece - 1) / per_piece;
            tokens.push_back({&span, position, is_sparse, blocks, per_piece, num_pieces, pieces});
            num_pieces += pieces;
        }
    return num_pieces;
}

extern "C" void decode_step(const Model* model, const Step* step) {
    static thread_local Space shared_space, attention_space, own_space;
    static thread_local std::vector<Token> tokens;
    static thread_local std::vector<int64_t> selected;
    const Model& m = *model;
    const Step& s = *step;
    int64_t width = m.hidden, wide = 0, heads = 0, groups = 0, dim = 0;
    for (int64_t i = 0; i < s.num_layers; i++) {
        const Layer& layer = m.layers[i];
        width = std::max(width, layer.num_heads * layer.head_dim);
        wide = std::max(wide, layer.mlp_gate.num_out);
        dim = std::max(dim, layer.head_dim);
        if (!layer.decay) { heads = layer.num_heads; groups = layer.num_kv_heads; }
    }
    Shared sh;
    sh.num_pieces = plan_tokens(m, s, tokens);
    sh.tokens = tokens.data();
    sh.max_windows = sh.max_selected = 0;
    for (const Token& token : tokens)
        if (token.is_sparse) {
            sh.max_windows = std::max(sh.max_windows, token.position / m.kernel_stride + 1);
            sh.max_selected = std::max(sh.max_selected, token.num_blocks);
        }
    const int64_t n = s.num_tokens;
    float* room = shared_space.get(n * (6 * width + 2 * wide));
    for (float** part : {&sh.q, &sh.k, &sh.v, &sh.gate, &sh.o, &sh.hidden}) { *part = room; room += n * width; }
    for (float** part : {&sh.wide, &sh.up}) { *part = room; room += n * wide; }
    const int64_t partials = sh.num_pieces * heads * (dim + 16);
    sh.partial = attention_space.get(partials + n * (heads + groups * sh.max_windows));
    sh.lse = sh.partial + partials;
    sh.windows = sh.lse + n * heads;
    selected.resize(n * groups * sh.max_selected);
    sh.selected = selected.data();
    const int64_t inputs = Input::floats(n, std::max(width, wide));
    const int64_t own = inputs + std::max(16 * dim, (m.block_size + 15) / 16 * 16);
    float* owns = own_space.get(own * s.num_threads);
    Barrier barrier;
#pragma omp parallel num_threads(s.num_threads)
    {
        const Team team = {omp_get_thread_num(), omp_get_num_threads(), &barrier};
        float* mine = owns + own * team.index;
        if (m.page_type == FP32) Worker<float>(m, s, sh, mine, mine + inputs, team).run();
        else if (m.page_type == FP16) Worker<Half>(m, s, sh, mine, mine + inputs, team).run();
        else Worker<Brain>(m, s, sh, mine, mine + inputs, team).run();
    }
}

// Advance a state [H, D, D] by tokens that were accepted: k, v [n, H, D].
extern "C" void lightning_fold(float* state, const float* k, const float* v, const float* decay, int64_t num_tokens,
                               int64_t num_heads, int64_t dim) {
    static thread_local Space space;
    float* columns = space.get(16 * dim);
    for (int64_t head = 0; head < num_heads; head++)
        for (int64_t column = 0; column < dim; column += 16) {
            float* part = state + head * dim * dim + column;
            load_columns(columns, part, dim);
            const int64_t at = head * dim, stride = num_heads * dim;
            recur(columns, dim, decay[head], num_tokens, nullptr, k + at, v + at + column, nullptr, stride, stride);
            store_columns(part, columns, dim);
        }
}
