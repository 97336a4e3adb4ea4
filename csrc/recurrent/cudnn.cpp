// cuDNN's own LSTM and GRU, one layer in one direction, as libtorch calls it: for sizes at which it
// is faster than our kernels, and for GPUs for which we have none.
#include <ATen/Context.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/_cudnn_rnn_backward.h>
#include <ATen/ops/_cudnn_rnn_flatten_weight.h>
#include <ATen/ops/as_strided.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "libtorch.h"
#include "params.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;
using namespace tch_extension::recurrent;

namespace {

// Whether these are all parameters that cuDNN has: without biases, its buffer has zeros for them.
constexpr bool are_all(size_t len) { return len == 4; }

// Whether the parameters follow one another in one piece of memory.
template <typename Parameters>
bool are_in_one_piece(const Parameters& parameters) {
  constexpr uintptr_t kAlignment = 16;
  const at::Tensor& first = parameters[0];
  if (reinterpret_cast<uintptr_t>(first.const_data_ptr()) % kAlignment != 0) return false;
  int64_t next = first.storage_offset();
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.is_contiguous() || !parameter.is_alias_of(first) ||
        parameter.scalar_type() != first.scalar_type() || parameter.storage_offset() != next)
      return false;
    next += parameter.numel();
  }
  return true;
}

// Whether cuDNN wants the parameters of such a layer one after another. Nothing documents it, so it
// is seen at the first layer of each kind and size that is flattened. Until then the answer is no.
class KnownLayouts {
 public:
  // The mode, the sizes, the element type and the device.
  using Key = std::array<int64_t, 5>;

  bool are_in_order(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_order_.count(key) > 0;
  }
  void add(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_order_.insert(key);
  }

 private:
  std::mutex mutex_;
  std::set<Key> in_order_;
};

KnownLayouts& known_layouts() {
  static auto* known = new KnownLayouts;  // never destroyed: threads may outlive main
  return *known;
}

// A layer's parameters: W_ih, W_hh and, if there are any, b_ih and b_hh.
struct Layer {
  Layer(const at::Tensor* const* given, size_t len, bool is_lstm)
      : mode(is_lstm ? kLstmMode : kGruMode), stride(static_cast<int64_t>(len)) {
    // Aliases, because flattening moves the parameters into one buffer.
    for (size_t i = 0; i < len; ++i) parameters.push_back(given[i]->detach());
    hidden = parameters[1].size(1);
    const int64_t features = parameters[0].size(1);
    const auto type = static_cast<int64_t>(parameters[0].scalar_type());
    const KnownLayouts::Key key{mode, features, hidden, type, parameters[0].get_device()};
    int64_t values = 0;
    for (const at::Tensor& parameter : parameters) values += parameter.numel();
    if (are_all(len) && are_in_one_piece(parameters) && known_layouts().are_in_order(key)) {
      buffer = parameters[0].as_strided({values}, {1});
      return;
    }
    buffer = at::_cudnn_rnn_flatten_weight(parameters, stride, features, mode, hidden,
                                           /*proj_size=*/0, /*num_layers=*/1,
                                           /*batch_first=*/false, /*bidirectional=*/false);
    const bool is_in_order = are_in_one_piece(parameters) && parameters[0].storage_offset() == 0;
    if (are_all(len) && is_in_order && buffer.numel() == values) known_layouts().add(key);
  }

  int64_t mode, stride, hidden;
  std::vector<at::Tensor> parameters;
  at::Tensor buffer;
};

}  // namespace

TCH_EXTENSION_API bool tch_extension_cudnn_is_enabled() {
  return at::globalContext().hasCuDNN() && at::globalContext().userEnabledCuDNN();
}

// Whether a layer's parameters follow one another in one piece of memory, as flattening leaves
// them, and none is missing.
TCH_EXTENSION_API bool tch_extension_cudnn_are_flat(const at::Tensor* const* parameters,
                                                    size_t len) {
  try {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < len; ++i) all.push_back(*parameters[i]);
    return are_all(len) && are_in_one_piece(all);
  } catch (...) {
    // A tensor without memory throws.
    return false;
  }
}

// `h` and `c` are [1, B, H]; `c` is null for a GRU. `results` are four that the caller owns: the
// output, the last h and c, and the reserve, which the backward pass reads. The third is null for a
// GRU, the fourth without `train`.
TCH_EXTENSION_API Message tch_extension_cudnn_rnn_forward(const at::Tensor* input,
                                                          const at::Tensor* const* parameters,
                                                          size_t len, const at::Tensor* h,
                                                          const at::Tensor* c, bool train,
                                                          at::Tensor** results) {
  return guard([&] {
    const PlainDispatch plain;
    const Layer layer(parameters, len, c != nullptr);
    auto [output, last_h, last_c, reserve, buffer] = at::_cudnn_rnn(
        *input, layer.parameters, layer.stride, layer.buffer, *h, optional(c), layer.mode,
        layer.hidden, /*proj_size=*/0, /*num_layers=*/1, /*batch_first=*/false, /*dropout=*/0.0,
        train, /*bidirectional=*/false, /*batch_sizes=*/{}, /*dropout_state=*/std::nullopt);
    give(std::move(output), results);
    give(std::move(last_h), results + 1);
    give(c == nullptr ? at::Tensor() : std::move(last_c), results + 2);
    give(train ? std::move(reserve) : at::Tensor(), results + 3);
  });
}

// `grads` are those for the output, the last h and the last c; each may be null. `needs` says
// whether the gradients for the input, h, c and the parameters are needed. `results` are 3 + len
// that the caller owns: those gradients, null where they are not needed.
TCH_EXTENSION_API Message tch_extension_cudnn_rnn_backward(
    const at::Tensor* input, const at::Tensor* const* parameters, size_t len, const at::Tensor* h,
    const at::Tensor* c, const at::Tensor* output, const at::Tensor* reserve,
    const at::Tensor* const* grads, const bool* needs, at::Tensor** results) {
  return guard([&] {
    const PlainDispatch plain;
    const Layer layer(parameters, len, c != nullptr);
    const std::array<bool, 4> mask{needs[0], needs[1], needs[2], needs[3]};
    auto [grad_input, grad_h, grad_c, grad_parameters] = at::_cudnn_rnn_backward(
        *input, layer.parameters, layer.stride, layer.buffer, *h, optional(c), *output,
        optional(grads[0]), optional(grads[1]), optional(grads[2]), layer.mode, layer.hidden,
        /*proj_size=*/0, /*num_layers=*/1, /*batch_first=*/false, /*dropout=*/0.0, /*train=*/true,
        /*bidirectional=*/false, /*batch_sizes=*/{}, /*dropout_state=*/std::nullopt, *reserve,
        mask);
    give(mask[0] ? std::move(grad_input) : at::Tensor(), results);
    give(mask[1] ? std::move(grad_h) : at::Tensor(), results + 1);
    give(mask[2] && c != nullptr ? std::move(grad_c) : at::Tensor(), results + 2);
    for (size_t i = 0; i < len; ++i)
      give(mask[3] ? std::move(grad_parameters[i]) : at::Tensor(), results + 3 + i);
  });
}
