// A token's heads are rotated by one thread. In place, all values of a pair are loaded before they
// are stored.
#include "tch_extension/cpu.h"

#include <cstring>

#include "rope.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {
namespace {

// A thread gets at least this many values, because waking one takes a few microseconds.
constexpr int64_t kElements = 4096;

int64_t tokens(const RopeRotation& params) { return params.batch * params.tokens; }

int64_t tokens_of_a_thread(const RopeRotation& params) {
  const int64_t values = (params.q.heads + params.k.heads) * (params.rotated + params.copied);
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, values));
}

// The rotation of one token: its rows of the tables.
template <typename T, typename W>
struct Row {
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int64_t kSize = V::size();
  static constexpr std::integral_constant<int64_t, kSize> kWhole{};

  Row(const RopeRotation& params, int64_t token)
      : half(params.rotated / 2), copied(params.copied), sign(params.is_inverse ? -1 : 1) {
    cos = static_cast<const W*>(params.cos) + token * params.cos_stride;
    sin = static_cast<const W*>(params.sin) + token * params.sin_stride;
  }

  struct Pairs {
    V a, b;
  };

  // Rotates the pairs whose first place is `at`.
  Pairs rotated(const V& a, const V& b, int64_t at, int64_t count) const {
    const V c = load(cos + at, count), s = load(sin + at, count) * V(sign);
    return {at::vec::fmsub(a, c, b * s), at::vec::fmadd(b, c, a * s)};
  }

  template <typename Count>
  Pairs halves(const T* from, int64_t at, Count count) const {
    return rotated(load(from + at, count), load(from + half + at, count), at, count);
  }

  // The pairs (i, i + R / 2). Two vectors at a time cost half kinds less.
  void rotate_halves(const T* from, T* to) const {
    int64_t at = 0;
    for (; at + 2 * kSize <= half; at += 2 * kSize) {
      const Pairs first = halves(from, at, kWhole), second = halves(from, at + kSize, kWhole);
      store_pair(first.a, second.a, to + at);
      store_pair(first.b, second.b, to + half + at);
    }
    for (; at < half; at += kSize) {
      const int64_t count = std::min(kSize, half - at);
      const Pairs pairs = halves(from, at, count);
      store(pairs.a, to + at, count);
      store(pairs.b, to + half + at, count);
    }
  }

  // The pairs (2i, 2i + 1).
  void rotate_interleaved(const T* from, T* to) const {
    int64_t at = 0;
    for (; at + kSize <= half; at += kSize) {
      const T* here = from + 2 * at;
      const auto [a, b] = deinterleave2(load(here, kWhole), load(here + kSize, kWhole));
      const Pairs pairs = rotated(a, b, at, kWhole);
      const auto [first, second] = interleave2(pairs.a, pairs.b);
      store_pair(first, second, to + 2 * at);
    }
    if (at == half) return;
    // The last pairs go through the same operations, so that all pairs are rounded alike.
    const int64_t count = half - at;
    C a[kSize] = {}, b[kSize] = {};
    for (int64_t lane = 0; lane < count; ++lane) {
      a[lane] = static_cast<C>(from[2 * (at + lane)]);
      b[lane] = static_cast<C>(from[2 * (at + lane) + 1]);
    }
    const Pairs pairs = rotated(V::loadu(a), V::loadu(b), at, count);
    pairs.a.store(a);
    pairs.b.store(b);
    for (int64_t lane = 0; lane < count; ++lane) {
      to[2 * (at + lane)] = static_cast<T>(a[lane]);
      to[2 * (at + lane) + 1] = static_cast<T>(b[lane]);
    }
  }

  template <bool kInterleaved>
  void run(const RopeHeads& heads, int64_t batch, int64_t token) const {
    const T* from = static_cast<const T*>(heads.from) + batch * heads.from_strides[0] +
                    token * heads.from_strides[1];
    T* to = static_cast<T*>(heads.to) + batch * heads.to_strides[0] + token * heads.to_strides[1];
    for (int64_t head = 0; head < heads.heads; ++head) {
      if constexpr (kInterleaved) {
        rotate_interleaved(from, to);
      } else {
        rotate_halves(from, to);
      }
      if (copied > 0) std::memcpy(to + 2 * half, from + 2 * half, copied * sizeof(T));
      from += heads.from_strides[2];
      to += heads.to_strides[2];
    }
  }

  const int64_t half, copied;
  const C sign;
  const W* cos;
  const W* sin;
};

template <typename T, typename W, bool kInterleaved>
void rotate(const RopeRotation& params, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const int64_t batch = index / params.tokens, token = index % params.tokens;
    const Row<T, W> row(params, token);
    row.template run<kInterleaved>(params.q, batch, token);
    row.template run<kInterleaved>(params.k, batch, token);
  }
}

}  // namespace

static void rope_rotate(const RopeRotation& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto table_type) {
      using W = typename decltype(table_type)::type;
      return params.is_interleaved ? rotate<T, W, true>(params, begin, end)
                                   : rotate<T, W, false>(params, begin, end);
    };
    if (params.table_kind == params.kind) return run(type);
    run(Type<Compute<T>>{});
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_rope_rotate, rope_rotate, RopeRotation,
                         tch_extension::tokens, tch_extension::tokens_of_a_thread)
