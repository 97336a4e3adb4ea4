// 16-byte loads and stores of rows that begin at any address: odd numbers of columns, and views of
// larger arrays. Memory is read and written in aligned vectors of 16 bytes. A thread keeps columns
// that are the same in every row, so that it has to shift its values out of two adjacent vectors,
// by the distance of the row's beginning from the multiple of 16 bytes below it.
#pragma once

#include "row_team.h"

namespace tch_extension::norm {
namespace {

struct alignas(16) Words {
  unsigned int word[4];
};

// Loads 16 bytes in one access, whatever the compiler knows about the address.
__device__ __forceinline__ Words load_words(const void* from) {
  const uint4 four = *static_cast<const uint4*>(from);
  return {{four.x, four.y, four.z, four.w}};
}

__device__ __forceinline__ void store_words(void* to, const Words& words) {
  *static_cast<uint4*>(to) = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
}

// The unsigned integer with the size of T.
template <typename T>
using Bits =
    std::conditional_t<sizeof(T) == 2, unsigned short,
                       std::conditional_t<sizeof(T) == 4, unsigned int, unsigned long long>>;

template <typename T>
__device__ __forceinline__ Bits<T> bits_of_lane(const Words& words, int lane) {
  if constexpr (sizeof(T) == 2)
    return static_cast<unsigned short>(words.word[lane / 2] >> (16 * (lane % 2)));
  if constexpr (sizeof(T) == 4) return words.word[lane];
  if constexpr (sizeof(T) == 8) {
    return words.word[2 * lane] | static_cast<unsigned long long>(words.word[2 * lane + 1]) << 32;
  }
}

template <typename T>
__device__ __forceinline__ Values<T, kLanesOf16Bytes<T>> unpack(const Words& words) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto bits = bits_of_lane<T>(words, lane);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // A bfloat16 is the upper half of a float, so that converting one takes one instruction.
      const unsigned int word = words.word[lane / 2];
      values.lane[lane] = __uint_as_float(lane % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else if constexpr (std::is_same_v<T, __half>) {
      values.lane[lane] = __half2float(__ushort_as_half(bits));
    } else if constexpr (std::is_same_v<T, float>) {
      values.lane[lane] = __uint_as_float(bits);
    } else {
      values.lane[lane] = __longlong_as_double(static_cast<long long>(bits));
    }
  }
  return values;
}

template <typename T>
__device__ __forceinline__ Words pack(const Values<T, kLanesOf16Bytes<T>>& values) {
  Words words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const auto two = __floats2bfloat162_rn(values.lane[2 * i], values.lane[2 * i + 1]);
      words.word[i] = __bfloat16_as_ushort(two.x) |
                      static_cast<unsigned int>(__bfloat16_as_ushort(two.y)) << 16;
    } else if constexpr (std::is_same_v<T, __half>) {
      const auto two = __floats2half2_rn(values.lane[2 * i], values.lane[2 * i + 1]);
      words.word[i] = __half_as_ushort(two.x) | static_cast<unsigned int>(__half_as_ushort(two.y))
                                                    << 16;
    } else if constexpr (std::is_same_v<T, float>) {
      words.word[i] = __float_as_uint(values.lane[i]);
    } else {
      const auto bits = static_cast<unsigned long long>(__double_as_longlong(values.lane[i / 2]));
      words.word[i] = static_cast<unsigned int>(i % 2 == 0 ? bits : bits >> 32);
    }
  }
  return words;
}

// The lanes of a team that are in one warp. Together they have `vectors` · `width` adjacent vectors
// of the row, and each lane has every `width`-th of them. So only one vector more than those has to
// be read.
struct Group {
  int width, lane;
  int vectors;  // per lane
  int first;    // the group's first vector of the row

  // `loads` is the number of vectors of the row.
  __device__ __forceinline__ Group(int team, int loads) {
    const int thread = thread_of_team(team);
    width = team < kWarp ? team : kWarp;
    lane = thread & (width - 1);
    const int whole = loads >> (__ffs(team) - 1), rest = loads & (team - 1);
    // A remainder that fits one warp is left to the last warp. The other warps then neither wait
    // for it nor get an iteration with too little to do: 4099 columns are only one warp's work more
    // than 4096.
    const bool is_small = whole > 0 && rest <= width;
    first = (thread - lane) * (is_small ? whole : whole + 1);
    vectors = is_small && (rest == 0 || thread - lane + width < team) ? whole : whole + 1;
  }
  __device__ __forceinline__ int index(int v) const { return first + v * width + lane; }
  // The vector after the group's last, counted from the group's first.
  __device__ __forceinline__ int end() const { return vectors * width; }
};

__device__ __forceinline__ int bytes_past_16(const void* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) & 15);
}

// The 16 bytes that begin `shift` bytes into two adjacent vectors of T. `shift` is less than 16.
template <typename T>
__device__ __forceinline__ Words shifted(const Words& low, const Words& high, int shift) {
  unsigned int words[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = low.word[i], words[4 + i] = high.word[i];
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
  if constexpr (sizeof(T) <= 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
  }
  Words result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.word[i] =
        sizeof(T) == 2 ? __funnelshift_r(words[i], words[i + 1], (shift & 2) * 8) : words[i];
  }
  return result;
}

// Selects word by word: selecting between references would put both vectors into memory.
__device__ __forceinline__ Words choose(bool condition, const Words& yes, const Words& no) {
  Words result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.word[i] = condition ? yes.word[i] : no.word[i];
  return result;
}

__device__ __forceinline__ Words from_lane(const Words& words, int lane, int width) {
  Words result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.word[i] = __shfl_sync(kAllLanes, words.word[i], lane, width);
  return result;
}

// Loads the vector at an address that is a multiple of 16 bytes, with zeros from `end` on.
template <typename T>
__device__ __forceinline__ Words load_before(const void* from, const void* end) {
  const auto* at = static_cast<const unsigned int*>(from);
  if (at + 4 <= end) return load_words(from);
  Words words = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i + 1 <= end) {
      words.word[i] = at[i];
    } else if (sizeof(T) == 2 && at + i < end) {
      words.word[i] = *reinterpret_cast<const unsigned short*>(at + i);
    }
  }
  return words;
}

// Loads the group's vectors of a row of `columns` columns. Values past the row's end are arbitrary.
// `end` is the end of the array. Every lane of the warp has to call this.
template <typename T, int kVectors>
__device__ __forceinline__ void load_shifted(const T* row, const T* end, int columns,
                                             const Group& group, Words (&vector)[kVectors]) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const T* from = row + group.first * kLanes;
  const int shift = bytes_past_16(from);
  const char* base = reinterpret_cast<const char*>(from) - shift;
  const int bytes = shift + (columns - group.first * kLanes) * static_cast<int>(sizeof(T));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = (v * group.width + group.lane) * 16;
    vector[v] = Words{};
    if (v < group.vectors && at < bytes) vector[v] = load_before<T>(base + at, end);
  }
  const bool is_last = group.lane == group.width - 1;
  Words after = {};
  if (is_last && group.end() * 16 < bytes) after = load_before<T>(base + group.end() * 16, end);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v >= group.vectors) break;
    // The vector after the last lane's is the first lane's next one.
    const Words given = choose(group.lane == 0, vector[v + 1 < kVectors ? v + 1 : v], vector[v]);
    Words next = from_lane(given, (group.lane + 1) & (group.width - 1), group.width);
    next = choose(is_last && v == group.vectors - 1, after, next);
    vector[v] = shifted<T>(vector[v], next, shift);
  }
}

// Stores the part of a vector that is in [begin, end). All positions are in bytes from `base`, a
// multiple of 16.
template <typename T>
__device__ __forceinline__ void store_within(char* base, int at, int begin, int end,
                                             const Words& words) {
  if (at >= begin && at + 16 <= end) return store_words(base + at, words);
#pragma unroll
  for (int lane = 0; lane < kLanesOf16Bytes<T>; ++lane) {
    const int place = at + lane * static_cast<int>(sizeof(T));
    if (place >= begin && place < end) {
      *reinterpret_cast<Bits<T>*>(base + place) = bits_of_lane<T>(words, lane);
    }
  }
}

// Stores the group's vectors of a row of `columns` columns, which may be 0. Every lane of the warp
// has to call this.
template <typename T, int kVectors>
__device__ __forceinline__ void store_shifted(T* row, int columns, const Group& group,
                                              const Words (&vector)[kVectors]) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  T* to = row + group.first * kLanes;
  const int shift = bytes_past_16(to);
  char* base = reinterpret_cast<char*>(to) - shift;
  const int left = (columns - group.first * kLanes) * static_cast<int>(sizeof(T));
  const int end = shift + (left < group.end() * 16 ? left : group.end() * 16);
  Words before = {}, last = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v >= group.vectors) break;
    const Words received = from_lane(vector[v], (group.lane - 1) & (group.width - 1), group.width);
    // The vector before the first lane's is the last lane's previous one.
    const Words low = choose(shift == 0, vector[v], choose(group.lane == 0, before, received));
    const int at = (v * group.width + group.lane) * 16;
    store_within<T>(base, at, shift, end, shifted<T>(low, vector[v], (16 - shift) & 15));
    before = received;
    last = vector[v];
  }
  if (shift > 0 && group.lane == group.width - 1) {
    store_within<T>(base, group.end() * 16, shift, end, shifted<T>(last, last, 16 - shift));
  }
}

// Loads vectors of a parameter in the kind in which they are stored, so that several loads can be
// in flight.
template <typename T>
struct Parameter {
  const T* array;  // if null, all values are `otherwise`
  const T* end;
  bool is_aligned;

  __device__ __forceinline__ Parameter(const void* pointer, int64_t columns)
      : array(static_cast<const T*>(pointer)),
        end(array + columns),
        is_aligned(bytes_past_16(pointer) == 0) {}

  // Zeros from the end on.
  __device__ __forceinline__ Words load(int64_t column) const {
    if (array == nullptr || array + column >= end) return Words{};
    if (is_aligned) return load_before<T>(array + column, end);
    Words low = load_before<T>(array + column - shift(), end), high = {};
    if (array + column - shift() + kLanesOf16Bytes<T> < end) {
      high = load_before<T>(array + column - shift() + kLanesOf16Bytes<T>, end);
    }
    return shifted<T>(low, high, bytes_past_16(array));
  }
  __device__ __forceinline__ int shift() const {
    return bytes_past_16(array) / static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ Values<T, kLanesOf16Bytes<T>> values(const Words& loaded,
                                                                  Compute<T> otherwise) const {
    auto values = unpack<T>(loaded);
#pragma unroll
    for (int lane = 0; lane < kLanesOf16Bytes<T>; ++lane) {
      if (array == nullptr) values.lane[lane] = otherwise;
    }
    return values;
  }
};

}  // namespace
}  // namespace tch_extension::norm
