// Attention of one query over its selected blocks, read from their pages, in pieces.
//
// q [n, H, D], k_pages and v_pages [G, pages, BLOCK, D] of T; selected [n, G, C]: block ids, negative ones are none;
// table [N]: the page of each block; positions [n].
// sums [n, G, pieces, M, D], most and total [n, G, pieces, M] in float: weighted values, the largest score and the sum
// of the weights of each piece; the caller joins the pieces.
// A threadgroup has one query, one kv group and one piece of the selected tokens, 32 of them at a time. Their keys are in
// threadgroup memory. A simdgroup has every eighth head: first a lane is a token, then it is a part of the values.

constexpr float LEAST = -3.0e38f;
constexpr int LANES = 32;
constexpr int WAVES = 8;
constexpr int THREADS = WAVES * LANES;
constexpr int TILE = LANES;
constexpr int WIDTH = D + 4 / int(sizeof(T));  // lanes read their rows from different banks
constexpr int HEADS = (M + WAVES - 1) / WAVES;
constexpr int PARTS = (D + LANES - 1) / LANES;
threadgroup float queries[M * D];
threadgroup T keys[TILE * WIDTH];
threadgroup int rows[TILE];

const int thread_id = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int wave = int(simdgroup_index_in_threadgroup);
const int piece = int(threadgroup_position_in_grid.x);
const int pieces = int(threadgroups_per_grid.x);
const int group = int(threadgroup_position_in_grid.y);
const int query = int(threadgroup_position_in_grid.z);
const int groups = k_pages_shape[0];
const int count = selected_shape[2] * BLOCK;
const int position = int(positions[query]);
const size_t pool = size_t(group) * k_pages_shape[1] * BLOCK;
const size_t place = size_t(query) * groups + group;

for (int at = thread_id; at < M * D; at += THREADS) {
  queries[at] = float(q[place * M * D + at]) * scale;
}

float my_most[HEADS];
float my_total[HEADS];
float my_weight[HEADS];
float my_sums[HEADS * PARTS];
for (int i = 0; i < HEADS; ++i) {
  my_most[i] = LEAST;
  my_total[i] = 0.0f;
  my_weight[i] = 0.0f;
}
for (int i = 0; i < HEADS * PARTS; ++i) {
  my_sums[i] = 0.0f;
}

const int tiles = (count + TILE - 1) / TILE;
const int size = (tiles + pieces - 1) / pieces * TILE;
const int last = metal::min(count, (piece + 1) * size);
for (int begin = piece * size; begin < last; begin += TILE) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile before has been read
  if (wave == 0) {
    const int at = begin + lane;
    int found = -1;
    if (at < last) {
      const int block = int(selected[place * selected_shape[2] + at / BLOCK]);
      if (block >= 0 && block * BLOCK + at % BLOCK <= position) {
        found = int(table[block]) * BLOCK + at % BLOCK;
      }
    }
    rows[lane] = found;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int at = thread_id; at < TILE * D; at += THREADS) {
    const int row = rows[at / D];
    // a row that must not be seen may hold anything
    keys[at / D * WIDTH + at % D] = row < 0 ? T(0.0f) : k_pages[(pool + row) * D + at % D];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const bool is_seen = rows[lane] >= 0;
  for (int i = 0; i < HEADS; ++i) {
    const int head = wave + i * WAVES;
    if (head < M) {
      float score = 0.0f;
      for (int d = 0; d < D; ++d) {
        score += queries[head * D + d] * float(keys[lane * WIDTH + d]);
      }
      const float next = metal::max(my_most[i], simd_max(is_seen ? score : LEAST));
      const float fade = metal::exp(my_most[i] - next);
      my_weight[i] = is_seen ? metal::exp(score - next) : 0.0f;
      my_total[i] = my_total[i] * fade + simd_sum(my_weight[i]);
      my_most[i] = next;
      for (int part = 0; part < PARTS; ++part) {
        my_sums[i * PARTS + part] *= fade;
      }
    }
  }

  for (int other = 0; wave < M && other < TILE; ++other) {  // a simdgroup without a head has nothing to sum
    const int row = rows[other];
    if (row < 0) {
      continue;
    }
    float shares[HEADS];
    for (int i = 0; i < HEADS; ++i) {
      shares[i] = simd_shuffle(my_weight[i], ushort(other));
    }
    for (int part = 0; part < PARTS; ++part) {
      const int d = part * LANES + lane;
      const float value = d < D ? float(v_pages[(pool + row) * D + d]) : 0.0f;
      for (int i = 0; i < HEADS; ++i) {
        my_sums[i * PARTS + part] += shares[i] * value;
      }
    }
  }
}

for (int i = 0; i < HEADS; ++i) {
  const int head = wave + i * WAVES;
  if (head < M) {
    const size_t to = (place * pieces + piece) * M + head;
    for (int part = 0; part < PARTS; ++part) {
      const int d = part * LANES + lane;
      if (d < D) {
        sums[to * D + d] = my_sums[i * PARTS + part];
      }
    }
    if (lane == 0) {
      most[to] = my_most[i];
      total[to] = my_total[i];
    }
  }
}
