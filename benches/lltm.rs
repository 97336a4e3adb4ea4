//! LLTM sequences: one operator compared with loops over the composite and over the cell.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use crate::rnn::sequence;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_lltm, f_lltm_cell, lltm_reference};

/// (T, B, H), with F = H. There are few steps on CUDA, because a loop over the composite takes 0.2
/// ms for each of them; the sweep has more.
const ON_CUDA: [(i64, i64, i64); 2] = [(64, 16, 128), (64, 64, 512)];
const ON_CPU: [(i64, i64, i64); 1] = [(128, 16, 128)];
/// Single steps, as in sampling, compared with the cell, whose kernels the operator uses for them.
const ONE_STEP: [(i64, i64, i64); 5] =
    [(1, 1, 1024), (1, 16, 128), (1, 64, 512), (1, 64, 1024), (1, 256, 1024)];

type Sequence =
    fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, (Tensor, Tensor))>;

pub fn loop_of_cells(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> Result<(Tensor, (Tensor, Tensor))> {
    let (mut h, mut c) = (state.0.shallow_clone(), state.1.shallow_clone());
    let mut steps = Vec::new();
    for step in input.f_unbind(0)? {
        (h, c) = f_lltm_cell(&step, weight, bias, (&h, &c))?;
        steps.push(h.shallow_clone());
    }
    Ok((Tensor::f_stack(&steps, 0)?, (h, c)))
}

/// Calls the cell without a sequence around it.
fn cell() -> Provider {
    Provider::new("lltm_cell", |inputs| {
        let step = inputs[0].f_select(0, 0)?;
        let (h, c) = f_lltm_cell(&step, &inputs[1], Some(&inputs[2]), (&inputs[3], &inputs[4]))?;
        // These are the three outputs of lltm, so that the backward pass starts from the same
        // gradients.
        Ok(vec![h.f_unsqueeze(0)?, h, c])
    })
}

fn provider(name: &'static str, sequence: Sequence) -> Provider {
    Provider::new(name, move |inputs| {
        let (output, (h, c)) =
            sequence(&inputs[0], &inputs[1], Some(&inputs[2]), (&inputs[3], &inputs[4]))?;
        Ok(vec![output, h, c])
    })
}

fn case(kind: Kind, (t, b, h): (i64, i64, i64), device: Device) -> Case {
    let scale = 1.0 / (h as f64).sqrt();
    let (sequence, weight, state) = (vec![t, b, h], vec![3 * h, 2 * h], vec![b, h]);
    Case {
        operator: "lltm",
        point: format!("{:?}", (t, b, h)),
        kind,
        device,
        tf32: false,
        inputs: vec![
            (sequence, 1.0),
            (weight, scale),
            (vec![3 * h], scale),
            (state.clone(), 1.0),
            (state, 1.0),
        ],
        // The forward pass reads x and W and writes h of all steps. The backward pass reads or
        // writes x, W and h of all steps, their gradients, three gates and c.
        work: [
            Work::new(kind, 2 * t * b * h + 6 * h * h, 2 * t * b * 3 * h * 2 * h),
            Work::new(kind, 8 * t * b * h + 12 * h * h, 4 * t * b * 3 * h * 2 * h),
        ],
        providers: vec![
            provider("composite", lltm_reference),
            if t == 1 { cell() } else { provider("cell", loop_of_cells) },
            provider("fused", f_lltm),
        ],
    }
}

/// A case with drawn sizes. There are few steps, because of the composite.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    let (t, b, h) = sequence(draw);
    case(kind, (t.min(128), b, h), device)
}

pub fn cases(device: Device) -> Vec<Case> {
    let (kinds, sizes, one_step): (&[Kind], &[_], &[_]) = if device.is_cuda() {
        (&[Kind::Float, Kind::BFloat16], &ON_CUDA, &ONE_STEP)
    } else {
        (&[Kind::Float], &ON_CPU, &ONE_STEP[1..2])
    };
    let sizes = || sizes.iter().chain(one_step);
    let all = kinds.iter().flat_map(|&kind| sizes().map(move |&size| (kind, size)));
    all.map(|(kind, size)| case(kind, size, device)).collect()
}
