//! Layer normalisation: fused against the composite of tch operations and against libtorch's own operator.

use crate::common::{Case, Provider};
use criterion::Throughput;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{f_layer_norm, layer_norm_reference};

/// (M, N). The last two are beyond the L2 cache, and on CUDA only.
const SIZES: [(i64, i64); 4] = [(256, 1024), (8192, 1024), (4096, 4096), (32768, 8192)];

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
    let (sizes, kinds) = match device.is_cuda() {
        true => (&SIZES[..], &[Kind::Float, Kind::BFloat16][..]),
        false => (&SIZES[..2], &[Kind::Float][..]),
    };
    let case = |kind: Kind, (m, n): (i64, i64)| Case {
        operator: "layer_norm",
        point: format!("{:?}", (m, n)),
        kind,
        device,
        inputs: vec![(vec![m, n], 1.0), (vec![n], 1.0), (vec![n], 1.0)],
        work: Throughput::Elements((m * n) as u64),
        providers: vec![
            provider("composite", layer_norm_reference),
            provider("libtorch", libtorch),
            provider("fused", f_layer_norm),
        ],
    };
    kinds.iter().flat_map(|&kind| sizes.iter().map(move |&size| case(kind, size))).collect()
}
