// Packed tokens of many sequences, each sequence from its own state.
//
// q, k, v [tokens, H, D] of T; state [S, H, D, D] and slopes [H] in float; edges [S + 1]: where each sequence
// begins and ends. out [tokens, H, D], state_out [S, H, D, D] in float.
// A threadgroup has 32 columns of one head of one sequence and goes through its tokens, eight at a time. Its part of
// the state stays in registers: a lane is a column, a simdgroup has an eighth of the rows. The simdgroups'
// parts of an output are summed through threadgroup memory.

constexpr int LANES = 32;
constexpr int WAVES = 8;
constexpr int TOKENS = WAVES;  // in the end each simdgroup sums up one of them
constexpr int ROWS = (D + WAVES - 1) / WAVES;
constexpr int WIDTH = ROWS * WAVES;
threadgroup float queries[TOKENS * WIDTH];
threadgroup float keys[TOKENS * WIDTH];
threadgroup float partial[WAVES * TOKENS * LANES];

const int lane = int(thread_index_in_simdgroup);
const int wave = int(simdgroup_index_in_threadgroup);
const int column = int(threadgroup_position_in_grid.x) * LANES + lane;
const int head = int(threadgroup_position_in_grid.y);
const int sequence = int(threadgroup_position_in_grid.z);
const int heads = q_shape[1];
const bool is_inside = column < D;
const float decay = metal::exp(-slopes[head]);
const size_t matrix = (size_t(sequence) * heads + head) * D * D;

float rows[ROWS];
for (int r = 0; r < ROWS; ++r) {
  const int row = wave * ROWS + r;
  rows[r] = is_inside && row < D ? state[matrix + row * D + column] : 0.0f;
}

const int last = edges[sequence + 1];
for (int begin = edges[sequence]; begin < last; begin += TOKENS) {
  const int count = metal::min(TOKENS, last - begin);
  for (int at = wave * LANES + lane; at < TOKENS * WIDTH; at += WAVES * LANES) {
    const int step = at / WIDTH;
    const int row = at % WIDTH;
    const bool is_there = step < count && row < D;
    const size_t from = (size_t(begin + step) * heads + head) * D + row;
    queries[at] = is_there ? float(q[from]) * scale : 0.0f;
    keys[at] = is_there ? float(k[from]) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int step = 0; step < count; ++step) {
    const size_t from = (size_t(begin + step) * heads + head) * D + column;
    const float value = is_inside ? float(v[from]) : 0.0f;
    const int first = step * WIDTH + wave * ROWS;
    float sum = 0.0f;
    for (int r = 0; r < ROWS; ++r) {
      rows[r] = decay * rows[r] + keys[first + r] * value;
      sum += queries[first + r] * rows[r];
    }
    partial[(wave * TOKENS + step) * LANES + lane] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (wave < count && is_inside) {
    float total = 0.0f;
    for (int other = 0; other < WAVES; ++other) {
      total += partial[(other * TOKENS + wave) * LANES + lane];
    }
    out[(size_t(begin + wave) * heads + head) * D + column] = total;
  }
}

for (int r = 0; r < ROWS; ++r) {
  const int row = wave * ROWS + r;
  if (is_inside && row < D) {
    state_out[matrix + row * D + column] = rows[r];
  }
}
