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

// What a thread of the team does: it packs weights, and then computes the steps first, first + by,
// and so on.
template <typename Work>
void run(const Work& work, const Member& member, int64_t first, int64_t by, int64_t steps) {
  const Team& team = member.team;
  // These are not inlined: each is called from several places, and the compiler would otherwise
  // split their bodies into parts that all of these share.
  const auto pack = [&](int64_t place) __attribute__((noinline)) {
    const Share own(work.packed_panels, place, member.places());
    for (int64_t index = own.begin; index < own.end; ++index) work.pack(index);
  };
  const auto step = [&](int64_t place, int64_t t) __attribute__((noinline)) {
    work.step(first + t * by, {work.params.batch, place / team.column_groups, team.row_groups},
              {place % team.column_groups, team.column_groups});
  };
  member.run(steps, pack, step);
}

template <typename Cell>
void run_forward(const ForwardParams& params, int64_t begin, int64_t end) {
  for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    run(Forward<Cell, T>{params}, {params.team, begin, end}, 0, 1, params.steps);
  });
}

template <typename Cell>
void run_backward(const BackwardParams& params, int64_t begin, int64_t end) {
  const bool has_more = params.needs_grad_h0 || params.grad_input != nullptr;
  const int64_t steps = params.steps + (has_more ? 1 : 0);
  for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    run(Backward<Cell, T>{params}, {params.team, begin, end}, params.steps - 1, -1, steps);
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::cpu
