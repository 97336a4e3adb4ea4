#include "maths.h"

#include "tch_extension/c_abi.h"
#include "tch_extension/tensor.h"

using namespace tch_extension;

namespace {

template <typename T>
void maths(const MathsParams& params) {
  const auto x = params.x.of<T>();
  const auto y = params.y.of<T>();
  for (int64_t row = 0; row < x.sizes[0]; ++row) {
    for (int64_t column = 0; column < x.sizes[1]; ++column) {
      y(row, column) = evaluate<T>(params.function, x[row][column]);
    }
  }
}

}  // namespace

// Supports kinds Float and Double.
TCH_EXTENSION_API Message downstream_maths_cpu(const MathsParams* params) {
  return guard([&] {
    params->x.kind == kTchExtensionFloat ? maths<float>(*params) : maths<double>(*params);
  });
}

// Reads one element of a matrix of floats, with one index after the other or with both at once.
TCH_EXTENSION_API Message downstream_element(const at::Tensor* x, int64_t row, int64_t column,
                                             bool at_once, float* value) {
  return guard([&] {
    const auto elements = accessor<const float, 2>(*x, "x");
    *value = at_once ? elements(row, column) : elements[row][column];
  });
}

// Whether 32 bits are enough to index a tensor with these sizes and strides.
TCH_EXTENSION_API bool downstream_fits_in_32_bits(const int64_t* sizes, const int64_t* strides) {
  return make_accessor<2>(static_cast<float*>(nullptr), sizes, strides).fits_in_32_bits();
}
