// The log-sum-exp over the coarse windows that a query sees, in pieces; block_scores.metal normalises by it.
//
// q [n, H, D] and k2 [G, windows, D] of T; positions [n]. most, total [n, G, pieces, M] in float: the largest score of
// a piece for each of the M heads of a kv group, and the sum of exp(score - most).
// A threadgroup has one query, one kv group and one piece; a thread scores whole windows, for all heads at once.

constexpr float LEAST = -3.0e38f;
constexpr int LANES = 32;
constexpr int WAVES = 8;
constexpr int THREADS = WAVES * LANES;
threadgroup float queries[D * M];
threadgroup float wave_most[WAVES * M];
threadgroup float wave_total[WAVES * M];

const int thread_id = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int wave = int(simdgroup_index_in_threadgroup);
const int piece = int(threadgroup_position_in_grid.x);
const int group = int(threadgroup_position_in_grid.y);
const int query = int(threadgroup_position_in_grid.z);
const int groups = k2_shape[0];
const int pieces = int(threadgroups_per_grid.x);

for (int at = thread_id; at < M * D; at += THREADS) {
  const int head = at / D;
  const int d = at % D;
  queries[d * M + head] = float(q[(size_t(query) * groups + group) * M * D + at]) * scale;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int past = int(positions[query]) + 1 - KERNEL;
const int seen = past < 0 ? 0 : metal::min(past / STRIDE + 1, int(k2_shape[1]));
const int size = (seen + pieces - 1) / pieces;
const int last = metal::min(seen, (piece + 1) * size);

float my_most[M];
float my_total[M];
for (int head = 0; head < M; ++head) {
  my_most[head] = LEAST;
  my_total[head] = 0.0f;
}
for (int window = piece * size + thread_id; window < last; window += THREADS) {
  const size_t from = (size_t(group) * k2_shape[1] + window) * D;
  float scores[M];
  for (int head = 0; head < M; ++head) {
    scores[head] = 0.0f;
  }
  for (int d = 0; d < D; ++d) {
    const float key = float(k2[from + d]);
    for (int head = 0; head < M; ++head) {
      scores[head] += queries[d * M + head] * key;
    }
  }
  for (int head = 0; head < M; ++head) {
    const float next = metal::max(my_most[head], scores[head]);
    my_total[head] = my_total[head] * metal::exp(my_most[head] - next) + metal::exp(scores[head] - next);
    my_most[head] = next;
  }
}

for (int head = 0; head < M; ++head) {
  const float top = simd_max(my_most[head]);
  const float sum = simd_sum(my_total[head] * metal::exp(my_most[head] - top));
  if (lane == 0) {
    wave_most[wave * M + head] = top;
    wave_total[wave * M + head] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int head = thread_id; head < M; head += THREADS) {
  float top = LEAST;
  for (int other = 0; other < WAVES; ++other) {
    top = metal::max(top, wave_most[other * M + head]);
  }
  float sum = 0.0f;
  for (int other = 0; other < WAVES; ++other) {
    sum += wave_total[other * M + head] * metal::exp(wave_most[other * M + head] - top);
  }
  const size_t to = ((size_t(query) * groups + group) * pieces + piece) * M + head;
  most[to] = top;
  total[to] = sum;
}
