//! The LLTM cell: fused against the composite of tch operations.

use crate::common::{Case, Provider};
use criterion::Throughput;
use std::cell::OnceCell;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::set_matmul_allow_tf32;
use tch_extension::ops::{f_lltm_cell, lltm_cell_reference};

/// (B, F, H).
const SIZES: [(i64, i64, i64); 3] = [(16, 32, 128), (64, 256, 512), (128, 1024, 1024)];
const LARGE: (i64, i64, i64) = (1024, 1024, 1024);

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

fn run(cell: Cell, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let (h, c) = cell(&inputs[0], &inputs[1], Some(&inputs[2]), (&inputs[3], &inputs[4]))?;
    Ok(vec![h, c])
}

fn provider(name: &'static str, cell: Cell, tf32: bool) -> Provider {
    let provider = Provider::new(name, move |inputs| in_precision(tf32, || run(cell, inputs)));
    // A backward would run after the switch is back.
    if tf32 { provider.without_backward() } else { provider }
}

/// libtorch's switch is the process's: each call leaves it as it was at first.
fn in_precision<R>(tf32: bool, call: impl FnOnce() -> Result<R>) -> Result<R> {
    if !tf32 {
        return call();
    }
    set_matmul_allow_tf32(true)?;
    let result = call();
    set_matmul_allow_tf32(false)?;
    result
}

/// The product alone, of what is already side by side: nothing that computes a cell is faster.
fn product(tf32: bool) -> Provider {
    let hx = OnceCell::new();
    let call = move |inputs: &[Tensor]| {
        let hx = hx.get_or_init(|| Tensor::cat(&[&inputs[3], &inputs[0]], 1).detach());
        in_precision(tf32, || Ok(hx.f_mm(&inputs[1].f_transpose(0, 1)?)?)).map(|_| Vec::new())
    };
    Provider::new("product", call).without_backward()
}

/// libtorch's cheapest operation, for the host's time.
fn addition() -> Provider {
    let call = |inputs: &[Tensor]| Ok(inputs[3].f_add(&inputs[4]).map(|_| Vec::new())?);
    Provider::new("x + y", call).without_backward()
}

/// Ours, of tensors that require grad, for the host's time in training.
fn with_a_graph() -> Provider {
    let leaves = OnceCell::new();
    let call = move |inputs: &[Tensor]| {
        let leaves: &Vec<Tensor> = leaves
            .get_or_init(|| inputs.iter().map(|input| input.detach().set_requires_grad(true)).collect());
        run(f_lltm_cell, leaves)
    };
    Provider::new("with graph", call).without_backward()
}

fn case(
    device: Device,
    (b, f, h): (i64, i64, i64),
    kind: Kind,
    providers: Vec<Provider>,
    note: &str,
) -> Case {
    let scale = 1.0 / (h as f64).sqrt();
    Case {
        operator: "lltm_cell",
        point: format!("{:?}{note}", (b, f, h)),
        kind,
        device,
        inputs: vec![
            (vec![b, f], 1.0),
            (vec![3 * h, h + f], scale),
            (vec![3 * h], 1.0),
            (vec![b, h], 1.0),
            (vec![b, h], 1.0),
        ],
        work: Throughput::Elements((b * h) as u64),
        traffic: None,
        providers,
    }
}

pub fn cases(device: Device) -> Vec<Case> {
    let both =
        |tf32| vec![provider("composite", lltm_cell_reference, tf32), provider("fused", f_lltm_cell, tf32)];
    let mut cases: Vec<Case> =
        SIZES.into_iter().map(|size| case(device, size, Kind::Float, both(false), "")).collect();
    if device.is_cuda() {
        cases[0].providers.splice(0..0, [addition(), with_a_graph()]);
        for (kind, tf32, note) in
            [(Kind::Float, false, " strict"), (Kind::Float, true, " tf32"), (Kind::BFloat16, false, "")]
        {
            let providers = [product(tf32)].into_iter().chain(both(tf32)).collect();
            cases.push(case(device, LARGE, kind, providers, note));
        }
    }
    cases
}
