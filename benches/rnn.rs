//! What the benchmarks of `lstm` and `gru` have in common: layers of torch.nn, compared with libtorch's
//! own.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use std::sync::Mutex;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;

/// A layer with the tensors x, w_ih, w_hh, b_ih, b_hh, h and, for an LSTM, c.
pub type Call = fn(&[Tensor]) -> Result<Vec<Tensor>>;

/// One of the two operators.
#[derive(Clone, Copy)]
pub struct Layer {
    pub operator: &'static str,
    pub gates: i64,
    /// How many states there are: h, or h and c.
    pub states: usize,
    pub fused: Call,
    /// libtorch's layer; it gets the parameters in one piece of memory.
    pub libtorch: Call,
    /// cuDNN's number of the layer.
    pub mode: i64,
}

/// (T, B, H), with F = H.
pub type Sizes = (i64, i64, i64);

const ON_CUDA: [Sizes; 5] =
    [(512, 16, 128), (512, 16, 512), (512, 64, 512), (512, 64, 1024), (512, 256, 1024)];
const ON_CPU: [Sizes; 2] = [(128, 16, 128), (32, 64, 256)];

impl Layer {
    /// The size and the standard deviation of each tensor.
    pub fn inputs(&self, (t, b, h): Sizes) -> Vec<(Vec<i64>, f64)> {
        let (rows, scale) = (self.gates * h, 1.0 / (h as f64).sqrt());
        let weight = (vec![rows, h], scale);
        let bias = (vec![rows], scale);
        let mut inputs = vec![(vec![t, b, h], 1.0), weight.clone(), weight, bias.clone(), bias];
        inputs.extend(vec![(vec![b, h], 1.0); self.states]);
        inputs
    }

    /// Moves the parameters into one piece of memory, as torch.nn's modules do on CUDA: cuDNN would
    /// otherwise copy them in each call.
    pub fn flatten(&self, inputs: &[Tensor]) -> Result<()> {
        let parameters = &inputs[1..5];
        let hidden = parameters[1].size()[1];
        if !parameters[0].device().is_cuda() {
            return Ok(());
        }
        let (of_a_layer, no_projection) = (4, 0);
        let _ = tch::no_grad(|| {
            Tensor::f_internal_cudnn_rnn_flatten_weight(
                parameters,
                of_a_layer,
                parameters[0].size()[1],
                self.mode,
                hidden,
                no_projection,
                1,
                false,
                false,
            )
        })?;
        Ok(())
    }

    /// A layer whose parameters are moved in the first call with these tensors.
    fn provider(self, name: &'static str, call: Call) -> Provider {
        let flattened = Mutex::new(std::ptr::null_mut::<std::ffi::c_void>() as usize);
        Provider::new(name, move |inputs| {
            let mut last = flattened.lock().map_err(|_| tch_extension::Error::msg("a panic"))?;
            if *last != inputs[1].data_ptr() as usize {
                self.flatten(inputs)?;
                *last = inputs[1].data_ptr() as usize;
            }
            call(inputs)
        })
    }

    pub fn case(self, kind: Kind, device: Device, sizes: Sizes) -> Case {
        let (t, b, h) = sizes;
        let (t_b_h, h_h) = (t * b * h, h * h);
        let (gates, values) = (self.gates, self.gates + 2);
        // The forward pass reads x and the weights and writes h of all steps. The backward pass reads
        // or writes x, h of all steps, their gradients, what the cell saves, and the weights.
        let of = |elements: i64, operations: i64| Work::new(kind, elements, operations);
        Case {
            operator: self.operator,
            point: format!("{sizes:?}"),
            kind,
            device,
            // libtorch's switch for recurrent layers allows it.
            tf32: device.is_cuda() && kind == Kind::Float,
            inputs: self.inputs(sizes),
            work: [
                of(2 * t_b_h + 2 * gates * h_h, 4 * gates * t_b_h * h),
                of((4 + values) * t_b_h + 4 * gates * h_h, 8 * gates * t_b_h * h),
            ],
            providers: vec![
                self.provider("libtorch", self.libtorch),
                self.provider("fused", self.fused),
            ],
        }
    }

    /// A case with drawn sizes: short and long sequences, and at most 2³⁶ multiplications.
    pub fn drawn(self, draw: &mut Draw, kind: Kind, device: Device) -> Case {
        self.case(kind, device, sequence(draw))
    }

    pub fn cases(self, device: Device) -> Vec<Case> {
        let (kinds, sizes): (&[Kind], &[Sizes]) = if device.is_cuda() {
            (&[Kind::BFloat16, Kind::Half, Kind::Float], &ON_CUDA)
        } else {
            (&[Kind::Float], &ON_CPU)
        };
        let all = kinds.iter().flat_map(|&kind| sizes.iter().map(move |&size| (kind, size)));
        all.map(|(kind, sizes)| self.case(kind, device, sizes)).collect()
    }
}

/// A drawn (T, B, H).
pub fn sequence(draw: &mut Draw) -> Sizes {
    const MOST: i64 = 1 << 33;
    loop {
        let step = draw.step();
        let (t, b, h) = (draw.size(512, 1), draw.size(1024, 1), draw.size(2048, step));
        if t * b * h * h <= MOST {
            return (t, b, h);
        }
    }
}
