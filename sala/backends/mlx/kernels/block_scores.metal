// The score of each block for a query: the best fine window that touches it, summed over the heads of a kv group.
//
// q [n, H, D] and k1 [G, windows, D] of T; most, total [n, G, pieces, M] from coarse_scores.metal; positions [n].
// out [n, G, blocks] in float; a block without a visible window has 0.
// A threadgroup has one query, one kv group and as many blocks as 256 windows cover; a thread scores one window.

constexpr float GREATEST = 3.4028235e38f;
constexpr float LEAST = -3.0e38f;
constexpr int THREADS = 256;
constexpr int BLOCKS = (THREADS - BEFORE) / RATIO;
threadgroup float queries[D * M];
threadgroup float norms[M];
threadgroup float weights[THREADS];

const int thread_id = int(thread_index_in_threadgroup);
const int first_block = int(threadgroup_position_in_grid.x) * BLOCKS;
const int group = int(threadgroup_position_in_grid.y);
const int query = int(threadgroup_position_in_grid.z);
const int groups = k1_shape[0];
const int pieces = most_shape[2];
const int blocks = num_blocks;

for (int at = thread_id; at < M * D; at += THREADS) {
  const int head = at / D;
  const int d = at % D;
  queries[d * M + head] = float(q[(size_t(query) * groups + group) * M * D + at]) * scale;
}
for (int head = thread_id; head < M; head += THREADS) {
  const size_t from = (size_t(query) * groups + group) * pieces * M + head;
  float top = LEAST;
  for (int piece = 0; piece < pieces; ++piece) {
    top = metal::max(top, most[from + piece * M]);
  }
  float sum = 0.0f;
  for (int piece = 0; piece < pieces; ++piece) {
    sum += total[from + piece * M] * metal::exp(most[from + piece * M] - top);
  }
  // where no coarse window is visible yet, all scores are 0
  norms[head] = sum > 0.0f ? top + metal::log(sum) : GREATEST;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int past = int(positions[query]) + 1 - KERNEL;
const int seen = past < 0 ? 0 : metal::min(past / STRIDE + 1, int(k1_shape[1]));
const int window = first_block * RATIO - BEFORE + thread_id;
float weight = 0.0f;
if (window >= 0 && window < seen) {
  const size_t from = (size_t(group) * k1_shape[1] + window) * D;
  float scores[M];
  for (int head = 0; head < M; ++head) {
    scores[head] = 0.0f;
  }
  for (int d = 0; d < D; ++d) {
    const float key = float(k1[from + d]);
    for (int head = 0; head < M; ++head) {
      scores[head] += queries[d * M + head] * key;
    }
  }
  for (int head = 0; head < M; ++head) {
    weight += metal::exp(scores[head] - norms[head]);
  }
}
weights[thread_id] = metal::min(weight, GREATEST);
threadgroup_barrier(mem_flags::mem_threadgroup);

const int block = first_block + thread_id;
if (thread_id < BLOCKS && block < blocks) {
  float best = 0.0f;
  for (int i = 0; i < RATIO + BEFORE; ++i) {
    best = metal::max(best, weights[thread_id * RATIO + i]);
  }
  out[(size_t(query) * groups + group) * blocks + block] = best;
}
