// How many threads work through a sequence, and what each of them does.
#pragma once

#include "backward.h"
#include "forward.h"
#include "kinds.h"

namespace tch_extension::recurrent::cpu {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Params>
int64_t places(const Params& params) {
  return params.team.row_groups * params.team.column_groups;
}

template <typename Params>
int64_t one(const Params&) {
  return 1;
}

// What a thread of the team does: packing, and then each step from `first` in the direction of
// `by`.
template <typename Work>
void run(const Work& work, const Member& member, int64_t first, int64_t by, int64_t steps) {
  const Team& team = member.team;
  // Once each in the code, whole: where they are called from several places, the compiler would
  // take them apart.
  const auto pack = [&](int64_t place) __attribute__((noinline)) {
    const Share own(work.panels, place, member.places());
    for (int64_t index = own.begin; index < own.end; ++index) work.pack(index);
  };
  const auto step = [&](int64_t place, int64_t t) __attribute__((noinline)) {
    work.step(first + t * by, {work.params.batch, place / team.column_groups, team.row_groups},
              {work.panels, place % team.column_groups, team.column_groups});
  };
  member.run(steps, pack, step);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::cpu
