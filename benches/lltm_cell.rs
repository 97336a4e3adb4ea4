//! The LLTM cell: our fused operator compared with the composite of tch operations.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use std::cell::OnceCell;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_lltm_cell, lltm_cell_reference};

/// (B, F, H).
const SIZES: [(i64, i64, i64); 3] = [(16, 32, 128), (64, 256, 512), (128, 1024, 1024)];
const LARGE: (i64, i64, i64) = (1024, 1024, 1024);

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

fn run(cell: Cell, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let (h, c) = cell(&inputs[0], &inputs[1], Some(&inputs[2]), (&inputs[3], &inputs[4]))?;
    Ok(vec![h, c])
}

fn provider(name: &'static str, cell: Cell) -> Provider {
    Provider::new(name, move |inputs| run(cell, inputs))
}

/// The product alone, with [h, x] already concatenated. Nothing that computes a cell is faster.
fn product() -> Provider {
    let hx = OnceCell::new();
    let call = move |inputs: &[Tensor]| {
        let hx = hx.get_or_init(|| Tensor::cat(&[&inputs[3], &inputs[0]], 1).detach());
        Ok(hx.f_mm(&inputs[1].f_transpose(0, 1)?).map(|_| Vec::new())?)
    };
    Provider::new("product", call).without_backward()
}

/// A single addition, libtorch's cheapest operation, for comparing the host's time.
fn addition() -> Provider {
    let call = |inputs: &[Tensor]| Ok(inputs[3].f_add(&inputs[4]).map(|_| Vec::new())?);
    Provider::new("x + y", call).without_backward()
}

/// Our operator with tensors that require grad, for the host's time in training.
fn with_a_graph() -> Provider {
    let leaves = OnceCell::new();
    let call = move |inputs: &[Tensor]| {
        let leaves: &Vec<Tensor> = leaves.get_or_init(|| {
            inputs.iter().map(|input| input.detach().set_requires_grad(true)).collect()
        });
        run(f_lltm_cell, leaves)
    };
    Provider::new("with graph", call).without_backward()
}

fn case(device: Device, (b, f, h): (i64, i64, i64), kind: Kind) -> Case {
    let (weight, state) = (3 * h * (h + f), b * h);
    Case {
        operator: "lltm_cell",
        point: format!("{:?}", (b, f, h)),
        kind,
        device,
        tf32: false,
        inputs: vec![
            (vec![b, f], 1.0),
            (vec![3 * h, h + f], 1.0 / (h as f64).sqrt()),
            (vec![3 * h], 1.0),
            (vec![b, h], 1.0),
            (vec![b, h], 1.0),
        ],
        // The forward pass reads x, W, h and c, and writes h' and c'. The backward pass reads or
        // writes x, W and h, their gradients, three gates, c', and the gradients of c, h' and c'.
        work: [
            Work::new(kind, b * f + weight + 4 * state, 2 * b * weight),
            Work::new(kind, 2 * (b * f + weight) + 9 * state, 4 * b * weight),
        ],
        providers: vec![provider("composite", lltm_cell_reference), provider("fused", f_lltm_cell)],
    }
}

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    let step = draw.step();
    let size = (draw.size(4096, 1), draw.size(2048, step), draw.size(2048, step));
    case(device, size, kind)
}

pub fn cases(device: Device) -> Vec<Case> {
    let mut cases: Vec<Case> =
        SIZES.into_iter().map(|size| case(device, size, Kind::Float)).collect();
    if device.is_cuda() {
        cases[0].providers.splice(0..0, [addition(), with_a_graph()]);
        for (kind, tf32) in [(Kind::Float, false), (Kind::Float, true), (Kind::BFloat16, false)] {
            let mut case = Case { tf32, ..case(device, LARGE, kind) };
            case.providers.insert(0, product());
            cases.push(case);
        }
    }
    cases
}
