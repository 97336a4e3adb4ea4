//! A GRU by the engine of `csrc/recurrent/cpu`, compared with libtorch's. It proves that the engine
//! is generic in the cell, and is the first piece of the operator that is to come.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};

/// `recurrent::cpu::ForwardParams`.
#[repr(C)]
struct Forward {
    steps: i64,
    batch: i64,
    hidden: i64,
    weight_stride: i64,
    c_stride: i64,
    kind: i32,
    reserved: i32,
    team: Team,
    weight: *const c_void,
    input_gates: *const c_void,
    h0: *const c_void,
    c0: *const c_void,
    output: *mut c_void,
    c: *mut c_void,
    activations: *mut c_void,
    packed: *mut c_void,
    separate_bias: *const c_void,
}

/// `recurrent::cpu::BackwardParams`.
#[repr(C)]
struct Backward {
    steps: i64,
    batch: i64,
    hidden: i64,
    weight_stride: i64,
    kind: i32,
    needs_grad_h0: i32,
    team: Team,
    weight: *const c_void,
    grad_output: *const c_void,
    activations: *const c_void,
    c: *const c_void,
    grad_h: *mut c_void,
    grad_c: *mut c_void,
    grad_gates: *mut c_void,
    packed: *mut c_void,
    c0: *const c_void,
    grad_separate: *mut c_void,
}

/// `recurrent::cpu::Team`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Team {
    row_groups: i64,
    column_groups: i64,
    counters: *mut i64,
}

unsafe extern "C" {
    fn tch_extension_gru_packed_forward_cpu(params: *const Forward);
    fn tch_extension_gru_packed_backward_cpu(params: *const Backward);
}

/// One layer of torch.nn.GRU, with its parameters: `[3H, F]`, `[3H, H]`, `[3H]` and `[3H]`.
struct Layer {
    parameters: [Tensor; 4],
    h0: Tensor,
    x: Tensor,
}

/// The output of all steps, and the gradients of x, h0 and the parameters.
type Results = Vec<Tensor>;

impl Layer {
    fn new([steps, batch, features, hidden]: [i64; 4], kind: Kind) -> Layer {
        let normal = |size: &[i64], scale: f64| Tensor::randn(size, (kind, Device::Cpu)) * scale;
        let scale = 1.0 / (hidden as f64).sqrt();
        let parameters = [
            normal(&[3 * hidden, features], scale),
            normal(&[3 * hidden, hidden], scale),
            normal(&[3 * hidden], scale),
            normal(&[3 * hidden], scale),
        ];
        let h0 = normal(&[batch, hidden], 1.0);
        Layer { parameters, h0, x: normal(&[steps, batch, features], 1.0) }
    }

    /// libtorch's results, for these gradients of the output and of the last h.
    fn expected(&self, grad_output: &Tensor, grad_last: &Tensor) -> Results {
        let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);
        let (x, h0) = (leaf(&self.x), leaf(&self.h0));
        let parameters = self.parameters.each_ref().map(leaf);
        let (output, last) = x.gru(&h0.unsqueeze(0), &parameters, true, 1, 0.0, true, false, false);
        let loss = (&output * grad_output).sum(None) + (last.squeeze_dim(0) * grad_last).sum(None);
        loss.backward();
        let all = [&x, &h0].into_iter().chain(&parameters);
        std::iter::once(output.detach()).chain(all.map(Tensor::grad)).collect()
    }

    /// Ours, with this many groups of rows and columns.
    fn found(
        &self,
        [rows, columns]: [i64; 2],
        grad_output: &Tensor,
        grad_last: &Tensor,
    ) -> Results {
        let (steps, batch, features) = self.x.size3().unwrap();
        let hidden = self.h0.size2().unwrap().1;
        let options = (self.x.kind(), Device::Cpu);
        let [w_ih, w_hh, b_ih, b_hh] = &self.parameters;
        let of_h =
            Tensor::cat(&[b_hh.narrow(0, 0, 2 * hidden), Tensor::zeros([hidden], options)], 0);
        let input_gates = self.x.matmul(&w_ih.transpose(0, 1)) + b_ih + of_h;
        let separate_bias = b_hh.narrow(0, 2 * hidden, hidden).contiguous();
        let empty = |size: &[i64]| Tensor::empty(size, options);
        let output = empty(&[steps, batch, hidden]);
        let activations = empty(&[steps, batch, 4 * hidden]);
        let packed = empty(&[3 * hidden * ((hidden + 31) / 32 * 32)]);
        let kind = crate::ffi::kind_code(options.0).unwrap();
        let counters = || {
            let size = [1 + rows + rows * columns, 8];
            Tensor::zeros(size, (Kind::Int64, Device::Cpu))
        };
        let team = |counters: &Tensor| Team {
            row_groups: rows,
            column_groups: columns,
            counters: counters.data_ptr().cast(),
        };
        let zeros = counters();
        let forward = Forward {
            steps,
            batch,
            hidden,
            weight_stride: hidden,
            c_stride: batch * hidden,
            kind,
            reserved: 0,
            team: team(&zeros),
            weight: w_hh.data_ptr(),
            input_gates: input_gates.data_ptr(),
            h0: self.h0.data_ptr(),
            c0: self.h0.data_ptr(),
            output: output.data_ptr(),
            c: output.data_ptr(),
            activations: activations.data_ptr(),
            packed: packed.data_ptr(),
            separate_bias: separate_bias.data_ptr(),
        };
        // SAFETY: contiguous tensors of this kind on the CPU, of the sizes that the struct states.
        unsafe { tch_extension_gru_packed_forward_cpu(&forward) };

        let grad_h = grad_last.copy();
        let grad_c = Tensor::zeros([batch, hidden], options);
        let grad_gates = empty(&[steps, batch, 3 * hidden]);
        let grad_separate = empty(&[steps, batch, hidden]);
        let zeros = counters();
        let backward = Backward {
            steps,
            batch,
            hidden,
            weight_stride: hidden,
            kind,
            needs_grad_h0: 1,
            team: team(&zeros),
            weight: w_hh.data_ptr(),
            grad_output: grad_output.data_ptr(),
            activations: activations.data_ptr(),
            c: output.data_ptr(),
            grad_h: grad_h.data_ptr(),
            grad_c: grad_c.data_ptr(),
            grad_gates: grad_gates.data_ptr(),
            packed: packed.data_ptr(),
            c0: self.h0.data_ptr(),
            grad_separate: grad_separate.data_ptr(),
        };
        // SAFETY: as above.
        unsafe { tch_extension_gru_packed_backward_cpu(&backward) };

        let of_input =
            Tensor::cat(&[grad_gates.narrow(2, 0, 2 * hidden), grad_separate], 2).flatten(0, 1);
        let of_hidden = grad_gates.flatten(0, 1);
        let before =
            Tensor::cat(&[self.h0.unsqueeze(0), output.narrow(0, 0, steps - 1)], 0).flatten(0, 1);
        let sum = |grad: &Tensor| grad.sum_dim_intlist([0_i64].as_slice(), false, options.0);
        vec![
            output,
            of_input.matmul(w_ih).view([steps, batch, features]),
            grad_h,
            of_input.transpose(0, 1).matmul(&self.x.flatten(0, 1)),
            of_hidden.transpose(0, 1).matmul(&before),
            sum(&of_input),
            sum(&of_hidden),
        ]
    }
}

#[test]
fn a_gru_by_the_generic_engine_is_libtorchs() {
    tch::manual_seed(3);
    let teams: &[[i64; 2]] =
        if tch::get_num_threads() > 1 { &[[1, 1], [2, 1], [1, 2]] } else { &[[1, 1]] };
    for sizes in [[1, 1, 1, 1], [5, 3, 4, 7], [9, 16, 20, 33], [3, 8, 5, 64]] {
        for (kind, bound) in [(Kind::Double, 1e-12), (Kind::Float, 2e-5)] {
            let layer = Layer::new(sizes, kind);
            let [steps, batch, _, hidden] = sizes;
            let grad_output = Tensor::randn([steps, batch, hidden], (kind, Device::Cpu));
            let grad_last = Tensor::randn([batch, hidden], (kind, Device::Cpu));
            let expected = layer.expected(&grad_output, &grad_last);
            for &team in teams.iter().filter(|[rows, columns]| *rows <= batch && *columns <= hidden)
            {
                let found = layer.found(team, &grad_output, &grad_last);
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let scale = expected.abs().max().double_value(&[]).max(1.0);
                    let apart = (found - expected).abs().max().double_value(&[]);
                    assert!(
                        apart <= bound * scale,
                        "result {index} of {sizes:?} {kind:?} by {team:?}: {apart} apart"
                    );
                }
            }
        }
    }
}

/// Without steps there is nothing to read: the pointers may be null.
#[test]
fn no_steps_are_no_work() {
    let mut counters = [0_i64; 24];
    let team = Team { row_groups: 1, column_groups: 1, counters: counters.as_mut_ptr() };
    let forward = Forward {
        steps: 0,
        batch: 0,
        hidden: 0,
        weight_stride: 0,
        c_stride: 0,
        kind: 7,
        reserved: 0,
        team,
        weight: null(),
        input_gates: null(),
        h0: null(),
        c0: null(),
        output: null_mut(),
        c: null_mut(),
        activations: null_mut(),
        packed: null_mut(),
        separate_bias: null(),
    };
    // SAFETY: there are no steps, rows or columns to touch.
    unsafe { tch_extension_gru_packed_forward_cpu(&forward) };
}
