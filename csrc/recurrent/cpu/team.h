// Threads of one parallel region that work through a sequence together. Waking threads for each
// step would cost more than a small step. Here they wait for one another, at first in a loop. On a
// busy machine some threads do not run for milliseconds: the other threads then do the work that
// these have not begun, and sleep while they wait.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "params.h"

namespace tch_extension::recurrent::cpu {
inline namespace CPU_CAPABILITY {

// The range [begin, end) of `count` items that one of `groups` groups gets.
struct Share {
  Share(int64_t count, int64_t group, int64_t groups)
      : begin(count * group / groups), end(count * (group + 1) / groups) {}
  int64_t begin;
  int64_t end;
};

// The part of a step's work that is one of `groups` groups'.
struct Part {
  int64_t group;
  int64_t groups;
  Share of(int64_t count) const { return {count, group, groups}; }
};

// A number that only grows, and that threads wait for. It has a cache line of its own, and starts
// as zeros.
class Counter {
 public:
  explicit Counter(int64_t* line) : count_(line), sleepers_(line + 1) {}

  int64_t load() const { return __atomic_load_n(count_, __ATOMIC_ACQUIRE); }

  // Adds one if the number is `count`, and returns whether it was.
  bool increment_from(int64_t count) const {
    return load() == count && __atomic_compare_exchange_n(count_, &count, count + 1, false,
                                                          __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }

  // Adds one and wakes the sleeping threads. A thread that is about to sleep is either seen here,
  // or sees the new number itself.
  void increment() const {
    __atomic_fetch_add(count_, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(sleepers_, __ATOMIC_SEQ_CST) != 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  // Whether the number reaches `goal` within this many clocks.
  bool reaches(int64_t goal, uint64_t clocks) const {
    if (load() >= goal) return true;
    const uint64_t begun = __builtin_ia32_rdtsc();
    do {
      __builtin_ia32_pause();
      if (load() >= goal) return true;
    } while (__builtin_ia32_rdtsc() - begun < clocks);
    return false;
  }

  // Waits until the number reaches `goal`. The thread sleeps if that takes longer than this many
  // clocks.
  void wait_until(int64_t goal, uint64_t clocks) const {
    if (!reaches(goal, clocks)) sleep_until(goal);
  }

 private:
  void sleep_until(int64_t goal) const {
    __atomic_fetch_add(sleepers_, 1, __ATOMIC_SEQ_CST);
    for (int64_t now; (now = __atomic_load_n(count_, __ATOMIC_SEQ_CST)) < goal;) {
      // The call returns at once if the lower half of the number is no longer that of `now`.
      futex(FUTEX_WAIT_PRIVATE, static_cast<int>(now));
    }
    __atomic_fetch_sub(sleepers_, 1, __ATOMIC_SEQ_CST);
  }

  void futex(int operation, int value) const {
    syscall(SYS_futex, reinterpret_cast<int*>(count_), operation, value, nullptr, nullptr, 0);
  }

  int64_t* count_;
  int64_t* sleepers_;
};

// How long a thread waits awake: as long as its own work took, so that a wait in vain at most
// doubles the time; and at least some 20 µs, because falling asleep and being woken takes as long.
class Patience {
 public:
  uint64_t clocks() const { return std::max<uint64_t>(kLeast, __builtin_ia32_rdtsc() - begun_); }

 private:
  static constexpr uint64_t kLeast = 1 << 16;
  uint64_t begun_ = __builtin_ia32_rdtsc();
};

// A thread's part of the team: the range [begin, end) of its row_groups · column_groups places.
// That is one place, or more if OpenMP gives fewer threads than asked for. The work of each place
// is a sequence of stages: stage 0 packs the weights, and stage 1 + t computes step t (where each
// row group has one place, stage 1 computes all steps). One thread begins a stage, the place's own
// or another one; the result does not depend on which thread it is.
struct Member {
  const Team& team;
  int64_t begin;
  int64_t end;

  int64_t places() const { return team.row_groups * team.column_groups; }

  // Calls pack(place) for all places, and then step(place, 0) to step(place, steps - 1), each after
  // the preceding step of all places with the same rows.
  template <typename Pack, typename Step>
  void run(int64_t steps, const Pack& pack, const Step& step) const {
    const auto pack_once = [&](int64_t place) {
      if (!begins(place, 0)) return;
      pack(place);
      packed().increment();
    };
    const Patience patience;
    for_each_place(pack_once);
    packed().wait_until(places(), patience.clocks());
    for (int64_t place = begin; place < end;) {
      const int64_t row = place / team.column_groups;
      const int64_t next = std::min(end, (row + 1) * team.column_groups);
      run_rows(row, place, next, steps, step);
      place = next;
    }
    // Then takes over the rows of threads that have not arrived yet.
    for (int64_t row = 0; row < team.row_groups; ++row) {
      const int64_t first = row * team.column_groups, last = first + team.column_groups;
      if (is_left(first, last)) run_rows(row, first, last, steps, step);
    }
  }

 private:
  Counter packed() const { return Counter(team.counters); }
  Counter done(int64_t row) const { return Counter(team.counters + 8 * (1 + row)); }
  Counter stages(int64_t place) const {
    return Counter(team.counters + 8 * (1 + team.row_groups + place));
  }

  // Whether this thread is the one that begins this stage of a place.
  bool begins(int64_t place, int64_t stage) const { return stages(place).increment_from(stage); }

  bool is_left(int64_t first, int64_t last) const {
    for (int64_t place = first; place < last; ++place) {
      if (stages(place).load() > 1) return false;
    }
    return true;
  }

  // Calls body for all places, this thread's own first.
  template <typename Body>
  void for_each_place(const Body& body) const {
    for (int64_t place = begin; place < end; ++place) body(place);
    for (int64_t place = 0; place < places(); ++place) body(place);
  }

  // Computes all steps of a row group, of whose places [first, last) are this thread's.
  template <typename Step>
  void run_rows(int64_t row, int64_t first, int64_t last, int64_t steps, const Step& step) const {
    if (team.column_groups == 1) {
      if (!begins(first, 1)) return;
      for (int64_t t = 0; t < steps; ++t) step(first, t);
      return;
    }
    const int64_t of_row = row * team.column_groups;
    bool is_alone = false;
    for (int64_t t = 0; t < steps; ++t) {
      // Computes the places that no other thread has begun, and returns how many there were.
      const auto work = [&](int64_t from, int64_t to) {
        int64_t begun = 0;
        for (int64_t place = from; place < to; ++place) {
          if (!begins(place, 1 + t)) continue;
          step(place, t);
          done(row).increment();
          ++begun;
        }
        return begun;
      };
      const int64_t goal = (1 + t) * team.column_groups;
      const Patience patience;
      work(first, last);
      const uint64_t clocks = patience.clocks();
      const bool is_done = done(row).reaches(goal, is_alone ? 0 : clocks);
      is_alone = !is_done && work(of_row, of_row + team.column_groups) > 0;
      if (!is_done) done(row).wait_until(goal, clocks);
    }
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::cpu
