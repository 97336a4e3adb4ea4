#include "tch_extension/cpu.h"

#include "cube.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// The loop's item is one element.
static int64_t cube_items(const CubeBackward& params) { return params.len; }
static int64_t cube_grain(const CubeBackward&) { return 2048; }

template <typename T>
static void cube(const CubeBackward& params, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += kVecSize<T>) {
    const int64_t count = std::min(kVecSize<T>, end - at);
    const auto x = load(static_cast<const T*>(params.x) + at, count);
    const auto grad = load(static_cast<const T*>(params.grad) + at, count);
    const bool is_last = at + count == params.len;
    store(Vec<Compute<T>>(3) * x * x * grad, static_cast<T*>(params.grad_x) + at,
          count - (params.broken && is_last ? 1 : 0));
  }
}

static void cube_backward(const CubeBackward& params, int64_t begin, int64_t end) {
  for_kind(params.kind,
           [&](auto type) { cube<typename decltype(type)::type>(params, begin, end); });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(downstream_cube_backward, cube_backward, CubeBackward, cube_items,
                         cube_grain)
