//! What the benchmarks of add_layer_norm and add_rms_norm share: our fused operator compared with
//! the composite of tch operations and with libtorch's addition and norm.

use crate::common::{Case, Provider, Work};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;

/// (M, N). The small sizes fit in the caches.
const ON_CUDA: [(i64, i64); 5] =
    [(256, 1024), (16384, 768), (8192, 4096), (65536, 1024), (8192, 1000)];
const ON_CPU: [(i64, i64); 5] = [(1, 1024), (64, 4096), (256, 1024), (1000, 777), (2048, 1024)];
const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

/// x, residual, weight, and for add_layer_norm bias.
pub type Call = fn(&Tensor, &Tensor, &Tensor, Option<&Tensor>) -> Result<(Tensor, Tensor)>;

fn provider(name: &'static str, call: Call) -> Provider {
    Provider::new(name, move |inputs| {
        let [x, residual, weight, bias @ ..] = inputs else { unreachable!("three at least") };
        let (sum, output) = call(x, residual, weight, bias.first())?;
        Ok(vec![sum, output])
    })
}

pub fn cases(
    operator: &'static str,
    has_bias: bool,
    [composite, libtorch, fused]: [Call; 3],
    device: Device,
) -> Vec<Case> {
    let sizes: &[(i64, i64)] = if device.is_cuda() { &ON_CUDA } else { &ON_CPU };
    let all = KINDS.into_iter().flat_map(|kind| sizes.iter().map(move |&size| (kind, size)));
    let case = |(kind, (m, n)): (Kind, (i64, i64))| {
        let mut inputs = vec![(vec![m, n], 1.0), (vec![m, n], 1.0), (vec![n], 1.0)];
        if has_bias {
            inputs.push((vec![n], 1.0));
        }
        Case {
            operator,
            point: format!("{:?}", (m, n)),
            kind,
            device,
            tf32: false,
            inputs,
            // The forward pass reads x and residual and writes h and y; the backward pass reads h, dy
            // and dh and writes one gradient.
            work: [4, 4].map(|arrays| Work::new(kind, arrays * m * n, 0)),
            providers: vec![
                provider("composite", composite),
                provider("libtorch", libtorch),
                provider("fused", fused),
            ],
        }
    };
    all.map(case).collect()
}
