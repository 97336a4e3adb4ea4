// The elements of a tensor with any strides, as a plain struct that is passed to a kernel by value.
//
//   template <typename T>
//   __global__ void scale(Accessor<const T, 2> x, Accessor<T, 2> y) {
//     const int64_t row = blockIdx.x;
//     for (int64_t column = threadIdx.x; column < x.sizes[1]; column += blockDim.x) {
//       y(row, column) = T(2) * x(row, column);  // or y[row][column]
//     }
//   }
//
// In Rust, tch_extension::strided::Strided<N> and StridedMut<N> mirror the structs of these names.
// A launcher gets the element type from `kind` and the accessor from `of`:
//
//   struct ScaleParams { tch_extension::Strided<2> x; tch_extension::StridedMut<2> y; };
//   for_kind(params.x.kind, [&](auto type) {
//     using T = typename decltype(type)::type;
//     scale<T><<<blocks, kThreads, 0, stream>>>(params.x.of<T>(), params.y.of<T>());
//   });
//
// make_accessor makes an accessor from C arrays, and tensor.h from an at::Tensor.
//
// On the host, an index that is out of range throws an exception in debug builds
// (tch-extension-build defines TCH_EXTENSION_DEBUG for cargo's debug builds). If
// TCH_EXTENSION_CHECK_BOUNDS is defined, it throws in other builds, too, and on the device it
// causes a trap that ends the kernel. operator() checks the index of each dimension, and operator[]
// checks its index.
//
// Needs: nothing.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>

#include "tch_extension/host_device.h"

#if defined(__CUDA_ARCH__) ? defined(TCH_EXTENSION_CHECK_BOUNDS) \
                           : defined(TCH_EXTENSION_CHECK_BOUNDS) || defined(TCH_EXTENSION_DEBUG)
#define TCH_EXTENSION_IN_RANGE(index, dim, size) ::tch_extension::check_index(index, dim, size)
#else
#define TCH_EXTENSION_IN_RANGE(index, dim, size) static_cast<void>(0)
#endif

namespace tch_extension {

TCH_EXTENSION_HOST_DEVICE void check_index(int64_t index, int dim, int64_t size) {
  if (index >= 0 && index < size) return;
  const auto wide_index = static_cast<long long>(index), wide_size = static_cast<long long>(size);
#if defined(__CUDA_ARCH__)
  printf("accessor: index %lld of dimension %d is out of range for size %lld\n", wide_index, dim,
         wide_size);
  __trap();
#else
  // No std::string here: the compiler would emit its functions for one instruction set, and the
  // whole program might use them.
  char text[128];
  std::snprintf(text, sizeof(text),
                "accessor: index %lld of dimension %d is out of range for size %lld", wide_index,
                dim, wide_size);
  throw std::out_of_range(text);
#endif
}

// Strides count elements. Index is int64_t; on the device, int32_t is faster where it is enough.
template <typename T, int N, typename Index = int64_t>
struct Accessor {
  static_assert(N > 0, "a single value needs no accessor");

  T* data;
  Index sizes[N];
  Index strides[N];

  // Returns the element at these indices, one for each dimension.
  template <typename... At>
  TCH_EXTENSION_HOST_DEVICE T& operator()(At... at) const {
    static_assert(sizeof...(At) == N, "one index for each dimension");
    // Check the index before it is converted to Index: 2^32 as an int32_t would be 0.
    const int64_t indices[] = {static_cast<int64_t>(at)...};
    Index offset = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int dim = 0; dim < N; ++dim) {
      TCH_EXTENSION_IN_RANGE(indices[dim], dim, sizes[dim]);
      offset += static_cast<Index>(indices[dim]) * strides[dim];
    }
    return data[offset];
  }

  // Returns the part with this first index or, if there is only one dimension, the element.
  TCH_EXTENSION_HOST_DEVICE decltype(auto) operator[](int64_t at) const {
    TCH_EXTENSION_IN_RANGE(at, 0, sizes[0]);
    T* const part = data + static_cast<Index>(at) * strides[0];
    if constexpr (N == 1) {
      return static_cast<T&>(*part);
    } else {
      Accessor<T, N - 1, Index> rest{part, {}, {}};
      for (int dim = 1; dim < N; ++dim) {
        rest.sizes[dim - 1] = sizes[dim];
        rest.strides[dim - 1] = strides[dim];
      }
      return rest;
    }
  }

  TCH_EXTENSION_HOST_DEVICE int64_t numel() const {
    int64_t product = 1;
    for (int dim = 0; dim < N; ++dim) product *= sizes[dim];
    return product;
  }

  // Whether int32_t is enough for every index and every offset.
  TCH_EXTENSION_HOST_DEVICE bool fits_in_32_bits() const {
    int64_t last = 0;
    for (int dim = 0; dim < N; ++dim) {
      if (sizes[dim] == 0) return true;
      if (sizes[dim] > INT32_MAX || strides[dim] > INT32_MAX || strides[dim] < -INT32_MAX)
        return false;
      const int64_t reach = (int64_t(sizes[dim]) - 1) * int64_t(strides[dim]);
      last += reach < 0 ? -reach : reach;
      if (last > INT32_MAX) return false;
    }
    return true;
  }

  // Returns an accessor to the same elements with another index type (check fits_in_32_bits first),
  // or with another element type of the same size, such as __half for at::Half.
  template <typename U, typename OtherIndex = Index>
  TCH_EXTENSION_HOST_DEVICE Accessor<U, N, OtherIndex> as() const {
    static_assert(sizeof(U) == sizeof(T), "a type of the same size");
    Accessor<U, N, OtherIndex> other{reinterpret_cast<U*>(data), {}, {}};
    for (int dim = 0; dim < N; ++dim) {
      other.sizes[dim] = static_cast<OtherIndex>(sizes[dim]);
      other.strides[dim] = static_cast<OtherIndex>(strides[dim]);
    }
    return other;
  }
};

// Makes an accessor from arrays of N sizes and N strides (in elements).
template <int N, typename T>
TCH_EXTENSION_HOST_DEVICE Accessor<T, N> make_accessor(T* data, const int64_t* sizes,
                                                       const int64_t* strides) {
  Accessor<T, N> accessor{data, {}, {}};
  for (int dim = 0; dim < N; ++dim) {
    accessor.sizes[dim] = sizes[dim];
    accessor.strides[dim] = strides[dim];
  }
  return accessor;
}

// A tensor that a kernel reads, as Rust passes it: src/strided.rs mirrors it.
template <int N>
struct Strided {
  const void* data;
  int64_t sizes[N];
  int64_t strides[N];
  int32_t kind;    // libtorch's number of the kind; see kind.h
  int32_t device;  // the index of a CUDA device, -1 for the CPU
  const void* of_rust;

  template <typename T>
  TCH_EXTENSION_HOST_DEVICE Accessor<const T, N> of() const {
    return make_accessor<N>(static_cast<const T*>(data), sizes, strides);
  }
};

// A tensor that a kernel writes, as Rust passes it.
template <int N>
struct StridedMut {
  void* data;
  int64_t sizes[N];
  int64_t strides[N];
  int32_t kind;
  int32_t device;
  const void* of_rust;

  template <typename T>
  TCH_EXTENSION_HOST_DEVICE Accessor<T, N> of() const {
    return make_accessor<N>(static_cast<T*>(data), sizes, strides);
  }
};

}  // namespace tch_extension
