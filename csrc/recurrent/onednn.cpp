// oneDNN's LSTM on the CPU, one layer in one direction, as libtorch calls it: for sizes at which it
// is faster than our kernels.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>

#include "libtorch.h"
#include "params.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;
using namespace tch_extension::recurrent;

TCH_EXTENSION_API bool tch_extension_onednn_is_enabled() {
  return at::Context::hasMKLDNN() && at::globalContext().userEnabledMkldnn();
}

// `parameters` are W_ih, W_hh, b_ih and b_hh; `h` and `c` are [B, H]. `results` are four that the
// caller owns: the output, the last h and c, and what the backward pass reads, which is null
// without `train`.
TCH_EXTENSION_API Message tch_extension_onednn_lstm_forward(const at::Tensor* input,
                                                            const at::Tensor* const* parameters,
                                                            const at::Tensor* h,
                                                            const at::Tensor* c, bool train,
                                                            at::Tensor** results) {
  return guard([&] {
    const PlainDispatch plain;
    // It keeps what the backward pass reads if gradients are enabled, whatever `train` says.
    const at::AutoGradMode keeps(train);
    auto [output, last_h, last_c, workspace] = at::mkldnn_rnn_layer(
        *input, *parameters[0], *parameters[1], *parameters[2], *parameters[3], *h, *c,
        /*reverse=*/false, /*batch_sizes=*/{}, kLstmMode, h->size(1), /*num_layers=*/1,
        /*has_biases=*/true, /*bidirectional=*/false, /*batch_first=*/false, train);
    give(std::move(output), results);
    give(std::move(last_h), results + 1);
    give(std::move(last_c), results + 2);
    give(std::move(workspace), results + 3);
  });
}

// `grads` are those for the output, the last h and the last c; each may be null, but not all of
// them. `results` are seven that the caller owns: the gradients for the input, the four parameters,
// h and c.
TCH_EXTENSION_API Message tch_extension_onednn_lstm_backward(
    const at::Tensor* input, const at::Tensor* const* parameters, const at::Tensor* h,
    const at::Tensor* c, const at::Tensor* output, const at::Tensor* last_c,
    const at::Tensor* workspace, const at::Tensor* const* grads, at::Tensor** results) {
  return guard([&] {
    const PlainDispatch plain;
    const at::Tensor last_h = output->select(0, -1);
    auto [grad_input, w_ih, w_hh, b_ih, b_hh, grad_h, grad_c] = at::mkldnn_rnn_layer_backward(
        *input, *parameters[0], *parameters[1], *parameters[2], *parameters[3], *h, *c, *output,
        last_h, *last_c, optional(grads[0]), optional(grads[1]), optional(grads[2]),
        /*reverse=*/false, kLstmMode, h->size(1), /*num_layers=*/1, /*has_biases=*/true,
        /*train=*/true, /*bidirectional=*/false, /*batch_sizes=*/{}, /*batch_first=*/false,
        *workspace);
    at::Tensor made[]{grad_input, w_ih, w_hh, b_ih, b_hh, grad_h, grad_c};
    for (size_t i = 0; i < std::size(made); ++i) give(std::move(made[i]), results + i);
  });
}
