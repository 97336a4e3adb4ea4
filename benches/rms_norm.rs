//! RMS normalisation: our fused operator compared with the composite of tch operations and with
//! libtorch's own operator.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_rms_norm, rms_norm_reference};

/// (M, N). The small sizes fit in the caches.
const ON_CUDA: [(i64, i64); 6] =
    [(256, 1024), (8192, 1024), (16384, 768), (32768, 1024), (8192, 4096), (65536, 1024)];
const ON_CPU: [(i64, i64); 5] = [(1, 1024), (64, 4096), (256, 1024), (1000, 777), (2048, 1024)];
const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

const EPS: Option<f64> = Some(1e-5);

type Op = fn(&Tensor, &[i64], Option<&Tensor>, Option<f64>) -> Result<Tensor>;

fn libtorch(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
) -> Result<Tensor> {
    Ok(input.f_rms_norm(normalized_shape, weight, eps)?)
}

fn provider(name: &'static str, op: Op) -> Provider {
    Provider::new(name, move |inputs| match inputs {
        [x, w] => Ok(vec![op(x, &w.size(), Some(w), EPS)?]),
        _ => unreachable!("two tensors"),
    })
}

fn case((m, n): (i64, i64), kind: Kind, device: Device) -> Case {
    Case {
        operator: "rms_norm",
        point: format!("{:?}", (m, n)),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![m, n], 1.0), (vec![n], 1.0)],
        // The forward pass reads x and writes y; the backward pass reads x and dy and writes dx.
        work: [2, 3].map(|arrays| Work::new(kind, arrays * m * n, 0)),
        providers: vec![
            provider("composite", rms_norm_reference),
            provider("libtorch", libtorch),
            provider("fused", f_rms_norm),
        ],
    }
}

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    case(draw.rows_and_columns(70_000), kind, device)
}

pub fn cases(device: Device) -> Vec<Case> {
    let sizes: &[(i64, i64)] = if device.is_cuda() { &ON_CUDA } else { &ON_CPU };
    let of = |kind| sizes.iter().map(move |&size| case(size, kind, device));
    KINDS.into_iter().flat_map(of).collect()
}
