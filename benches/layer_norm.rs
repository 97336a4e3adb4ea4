//! Layer normalisation: fused against the composite of tch operations and against libtorch's own operator.

use crate::common::{Case, Provider, Work};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_layer_norm, layer_norm_reference};

/// (M, N): in the caches, and on CUDA as much as libtorch, Liger and Quack are measured with.
const SMALL: [(i64, i64); 2] = [(256, 1024), (8192, 1024)];
const LARGE: [(i64, i64); 5] = [(65536, 256), (32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384)];

const EPS: f64 = 1e-5;

type Op = fn(&Tensor, &[i64], Option<&Tensor>, Option<&Tensor>, f64) -> Result<Tensor>;

fn libtorch(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    Ok(input.f_layer_norm(normalized_shape, weight, bias, eps, true)?)
}

fn provider(name: &'static str, op: Op) -> Provider {
    Provider::new(name, move |inputs| {
        let [x, w, b] = inputs else { unreachable!("three tensors") };
        Ok(vec![op(x, &w.size(), Some(w), Some(b), EPS)?])
    })
}

pub fn cases(device: Device) -> Vec<Case> {
    let (large, kinds) = match device.is_cuda() {
        true => (&LARGE[..], &[Kind::Float, Kind::BFloat16][..]),
        false => (&[][..], &[Kind::Float][..]),
    };
    let sizes = || SMALL.iter().chain(large).copied();
    let case = |kind: Kind, (m, n): (i64, i64)| Case {
        operator: "layer_norm",
        point: format!("{:?}", (m, n)),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![m, n], 1.0), (vec![n], 1.0), (vec![n], 1.0)],
        // x and y; x, dy and dx.
        work: [2, 3].map(|arrays| Work::new(kind, arrays * m * n, 0)),
        providers: vec![
            provider("composite", layer_norm_reference),
            provider("libtorch", libtorch),
            provider("fused", f_layer_norm),
        ],
    };
    kinds.iter().flat_map(|&kind| sizes().map(move |size| case(kind, size))).collect()
}
