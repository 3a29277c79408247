// Runs the threads of one threadgroup after another, as fibers on one core. A fiber runs until it must wait; a simdgroup
// goes on when all its 32 lanes wait at the same line, a threadgroup when all its threads do. Anything else is an error
// that real hardware would not report: a barrier that some threads never reach, lanes at different instructions.
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

#include "metal.h"

#undef device
#undef constant
#undef threadgroup

namespace {
constexpr int LANES = 32;
constexpr size_t STACK = 64 << 10;
enum State { READY, AT_BARRIER, AT_EXCHANGE, DONE };

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  bool is_started;
  State state;
  int line;
  int round;  // exchanges so far
  shim_place place;
};
struct Wave {
  float values[2][LANES];  // the lanes may write the next exchange while some still read this one
};

typedef void (*Body)(void* arguments, const shim_place* place);
Body body;
void* body_arguments;
std::vector<Fiber> fibers;
std::vector<Wave> waves;
char* stacks = nullptr;
size_t num_stacks = 0;
jmp_buf scheduler;
sigjmp_buf escape;
int current;
char message[256];

void enter() {
  body(body_arguments, &fibers[current].place);
  fibers[current].state = DONE;
  _longjmp(scheduler, 1);
}

void wait(State state, int line) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  fiber.line = line;
  if (!_setjmp(fiber.resume)) _longjmp(scheduler, 1);
}

void step(int index) {
  current = index;
  Fiber& fiber = fibers[index];
  if (_setjmp(scheduler)) return;
  if (fiber.is_started) _longjmp(fiber.resume, 1);
  fiber.is_started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks + index * STACK;
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
  setcontext(&fiber.context);
}

// All of fibers[begin, end) wait for `state` at one line: they go on. None does: nothing. Some do: an error.
int release(int begin, int end, State state, const char* what) {
  int waiting = 0;
  for (int i = begin; i < end; ++i) waiting += fibers[i].state == state;
  if (!waiting) return 0;
  for (int i = begin; i < end; ++i) {
    if (fibers[i].state != state || fibers[i].line != fibers[begin].line) {
      snprintf(message, sizeof message, "%s: thread %d is at line %d, thread %d %s", what, begin, fibers[begin].line, i,
               fibers[i].state == DONE ? "has ended" : "is elsewhere");
      return -1;
    }
  }
  for (int i = begin; i < end; ++i) fibers[i].state = READY;
  return 1;
}

int run_wave(int begin, const std::vector<int>& lanes) {
  for (;;) {
    for (int lane : lanes)
      if (fibers[begin + lane].state == READY) step(begin + lane);
    const int released = release(begin, begin + LANES, AT_EXCHANGE, "a simd operation not reached by all lanes");
    if (released <= 0) return released;
  }
}

int run_group(int count, const std::vector<int>& lanes, const std::vector<int>& order) {
  for (;;) {
    for (int wave : order)
      if (run_wave(wave * LANES, lanes) < 0) return -1;
    const int released = release(0, count, AT_BARRIER, "a barrier not reached by all threads");
    if (released <= 0) return released;
  }
}

void on_fault(int) { siglongjmp(escape, 1); }

// 0: in order; 1: backwards; others: shuffled. What depends on it lacks a barrier.
std::vector<int> make_order(int count, uint32_t schedule) {
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = schedule == 1 ? count - 1 - i : i;
  uint32_t random = schedule * 2654435761u;
  for (int i = count - 1; schedule > 1 && i > 0; --i) {
    random = random * 1664525u + 1013904223u;
    const int j = int((random >> 8) % uint32_t(i + 1));
    const int kept = order[i];
    order[i] = order[j];
    order[j] = kept;
  }
  return order;
}
}  // namespace

extern "C" {
void shim_barrier(int line) { wait(AT_BARRIER, line); }

const float* shim_exchange(float value, int line) {
  const int index = current;
  const int round = fibers[index].round++ & 1;
  waves[index / LANES].values[round][index % LANES] = value;
  wait(AT_EXCHANGE, line);
  return waves[index / LANES].values[round];
}

const char* shim_message() { return message; }

static int run_all(Body entry, void* arguments, const uint32_t* grid, const uint32_t* group, uint32_t schedule, char* memory,
             size_t memory_size) {
  const int count = int(group[0] * group[1] * group[2]);
  for (int i = 0; i < 3; ++i)
    if (grid[i] % group[i] || count % LANES) {
      snprintf(message, sizeof message, "the grid is no whole number of threadgroups of whole simdgroups");
      return -1;
    }
  body = entry;
  body_arguments = arguments;
  if (num_stacks < size_t(count)) {
    free(stacks);
    stacks = static_cast<char*>(malloc(count * STACK));
    num_stacks = count;
  }
  fibers.resize(count);
  waves.resize(count / LANES);
  const std::vector<int> lanes = make_order(LANES, schedule), order = make_order(count / LANES, schedule);
  const uint3 groups = {grid[0] / group[0], grid[1] / group[1], grid[2] / group[2]};
  for (uint z = 0; z < groups.z; ++z)
    for (uint y = 0; y < groups.y; ++y)
      for (uint x = 0; x < groups.x; ++x) {
        for (size_t i = 0; i + 1 < memory_size; i += 2) memcpy(memory + i, "\xC1\x7F", 2);  // NaN in every precision
        for (int i = 0; i < count; ++i) {
          Fiber& fiber = fibers[i];
          fiber.is_started = false;
          fiber.state = READY;
          fiber.round = 0;
          const uint3 at = {uint(i) % group[0], uint(i) / group[0] % group[1], uint(i) / (group[0] * group[1])};
          fiber.place = {{x, y, z},
                         {x * group[0] + at.x, y * group[1] + at.y, z * group[2] + at.z},
                         at,
                         groups,
                         {group[0], group[1], group[2]},
                         {grid[0], grid[1], grid[2]},
                         uint(i),
                         uint(i % LANES),
                         uint(i / LANES)};
        }
        if (run_group(count, lanes, order) < 0) return -1;
      }
  return 0;
}

int shim_run(Body entry, void* arguments, const uint32_t* grid, const uint32_t* group, uint32_t schedule, char* memory,
             size_t memory_size) {
  struct sigaction ours = {}, before;
  ours.sa_handler = on_fault;
  sigaction(SIGSEGV, &ours, &before);
  int result = -1;
  if (sigsetjmp(escape, 1))
    snprintf(message, sizeof message, "read or wrote where there is no memory");
  else
    result = run_all(entry, arguments, grid, group, schedule, memory, memory_size);
  sigaction(SIGSEGV, &before, nullptr);
  return result;
}
}
