// What a cell is, for the ways that compute its steps (../cpu, ../step, ../block, ../cluster,
// ../grid,
// ../wide_grid). This header has no code: a cell is any struct that has what is described here.
//
// A cell has G gates. W_h is [G·H, H], and the gates of a step are
//
//   gates[t] = input_gates[t] + h[t-1] W_hᵀ          [B, G·H], before their activations
//
// The ways compute this product and the sum, for one column of h with all its G gates at a time.
// The rest of a step is pointwise, and that is what a cell defines. A cell also has a state that a
// step passes to the next one in addition to the product: c of an LSTM; h itself of a GRU.
//
// Constants, in a struct that host and device code share:
//
//   kGates                   G
//   kSaved                   values of a column that the forward pass saves for the backward pass,
//                            in addition to the states; as rows [kSaved·H]
//   kActivated               how many of these `forward` computes; each of the rest is the gate of
//                            the same index, unchanged
//   kSeparate                how many of the last gates are handed over in two parts, because the
//                            cell needs h[t-1] W_hᵀ by itself: 0, or 1 for the candidate of a GRU
//   kStateIsH                the state is h: there is no c
//   kNeedsPreviousState      the backward pass needs the state before the step, too
//   kHasMixedKinds           whether clusters and grids have kernels for a state of float with
//                            products of either half kind, as autocast has them; all cells have
//                            those with products of scaled fp16 values, in place of tf32
//
// Pointwise functions, on registers (lltm_cuda.h). F are the activation functions in the precision
// that a kernel needs, and G is the type of the sums:
//
//   forward<F, G>(gates[kGates], separate, state&, h&, saved[kSaved])
//       `gates` has the sums, but for the last kSeparate gates it has only the input's part, whose
//       other part is in `separate`. `state` is the one before the step, and then the one after it.
//   factors<F, G>(saved[kSaved], new_state, previous_state) -> Factors
//       returns what can be computed for the backward pass before the gradient for h is known: the
//       kernels that keep W_h on the chip compute it while they wait for that gradient.
//   add_to_state(factors, grad_h, grad_state&)
//       adds to the gradient for the state after the step what comes through h. `grad_h` is the
//       whole gradient for h: the output's and the product's.
//   gate_gradient<kGate>(factors, grad_h, grad_state) -> gradient
//       returns the gradient for a gate, given those for h and for the state
//   before_step(factors, grad_state) -> gradient
//       returns the gradient for the state before the step, except what comes through the product
//   separate_gradient(factors, grad_state) -> gradient
//       returns the gradient for the input's part of the separate gate, if there is one
//
// On the CPU (CellOnCpu) the same functions take vectors, and read and write memory themselves: see
// lltm_cpu.h and gru_cpu.h.
//
// The ways are generic, except that wide_grid has no backward pass for four gates, whose weights do
// not fit.
//
// LLTM (lltm.h): the gates are [i | o | g] and the state is c. It saves σ(i), σ(o) and g before its
// activation, because elu(g) near -1 has lost g's digits.
//
//   c' = c + elu(g) σ(i)        h' = tanh(c') σ(o)
//
// An LSTM (lstm.h): kGates 4, [i | f | g | o]; kSaved 4, the activated gates; kSeparate 0; and
// state c. Its backward pass needs c before the step (kNeedsPreviousState), for the forget gate's
// gradient.
//
//   c' = σ(f) c + σ(i) tanh(g)        h' = σ(o) tanh(c')
//   grad_c += grad_h σ(o) (1 - tanh²(c'));  grad_f = grad_c c σ'(f);  ...;  grad_c *= σ(f)
//
// A GRU (gru.h): kGates 3, [r | z | n]; kSaved 4: r, z, n and hn; kSeparate 1; the state is h.
//
//   hn = h W_hnᵀ + b_hn                n = tanh(x W_inᵀ + b_in + r · hn)
//   h' = (1 - z) n + z h
//
// Its backward pass has two gradients for the candidate: dn for the input's part, which goes on to
// x and W_in, and dn · r for the product's part, which goes on to h, W_hn and b_hn. grad_gates
// holds the latter, because the next product needs it; the former is returned separately
// (grad_separate).
#pragma once
