// One token of many sequences: decay the state, add the token, multiply by the query.
//
// q, k, v [S, H, D] of T; state [S, H, D, D] and slopes [H] in float.
// out [S, H, D], state_out [S, H, D, D] in float.
// A threadgroup has 32 columns of one head: a lane is a column, every simdgroup takes an eighth of the rows.

constexpr int LANES = 32;
constexpr int WAVES = 8;
threadgroup float partial[WAVES * LANES];

const int lane = int(thread_index_in_simdgroup);
const int wave = int(simdgroup_index_in_threadgroup);
const int column = int(threadgroup_position_in_grid.x) * LANES + lane;
const int head = int(threadgroup_position_in_grid.y);
const int sequence = int(threadgroup_position_in_grid.z);
const int heads = q_shape[1];
const size_t token = (size_t(sequence) * heads + head) * D;
const bool is_inside = column < D;

float sum = 0.0f;
if (is_inside) {
  const float decay = metal::exp(-slopes[head]);
  const float value = float(v[token + column]);
  for (int row = wave; row < D; row += WAVES) {
    const int at = row * D + column;
    const float next = decay * state[token * D + at] + float(k[token + row]) * value;
    state_out[token * D + at] = next;
    sum += float(q[token + row]) * scale * next;
  }
}
partial[wave * LANES + lane] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);

if (wave == 0 && is_inside) {
  float total = 0.0f;
  for (int other = 0; other < WAVES; ++other) {
    total += partial[other * LANES + lane];
  }
  out[token + column] = total;
}
