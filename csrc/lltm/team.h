// Threads of one parallel region that work through a sequence together. Waking threads for each step would
// cost more than a small step; here they wait for one another in a loop.
#pragma once

#include <sched.h>

#include <cstdint>

#include "lltm.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// A thread's part of the team, [begin, end) of its row_groups · column_groups places: one place, or more
// where OpenMP gives fewer threads than asked for. Every place's work of a step is done before its thread
// waits, so however few the threads are, each barrier is reached.
struct LltmMember {
  const LltmTeam& team;
  int64_t begin;
  int64_t end;

  int64_t places() const { return team.row_groups * team.column_groups; }

  // Waits for all.
  void wait_for_all() const {
    arrive(0, end - begin);
    wait(0, places());
  }

  // Waits for those that share rows, which have then been here `times` times. Nothing to do where each row
  // has one thread.
  void wait_for_rows(int64_t times) const {
    if (team.column_groups == 1) return;
    for (int64_t place = begin; place < end; ++place) arrive(1 + place / team.column_groups, 1);
    for (int64_t place = begin; place < end; ++place) {
      wait(1 + place / team.column_groups, times * team.column_groups);
    }
  }

 private:
  int64_t* counter(int64_t index) const { return team.arrived + 8 * index; }

  void arrive(int64_t index, int64_t count) const {
    __atomic_fetch_add(counter(index), count, __ATOMIC_RELEASE);
  }

  void wait(int64_t index, int64_t count) const {
    // A few microseconds; then the others are probably not running, and need this processor.
    constexpr int kSpins = 500;
    int spins = 0;
    while (__atomic_load_n(counter(index), __ATOMIC_ACQUIRE) < count) {
      if (++spins < kSpins) {
        __builtin_ia32_pause();
      } else {
        sched_yield();
      }
    }
  }
};

// [begin, end) of `count` things for one of `groups`.
struct LltmShare {
  LltmShare(int64_t count, int64_t group, int64_t groups)
      : begin(count * group / groups), end(count * (group + 1) / groups) {}
  int64_t begin;
  int64_t end;
};

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
