//! What the benchmarks of add_layer_norm and add_rms_norm share: our fused operator compared with
//! the composite of tch operations and with libtorch's addition and norm.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
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

/// One of the two operators: the composite, libtorch's operators and ours.
pub struct Norm {
    pub operator: &'static str,
    pub has_bias: bool,
    pub calls: [Call; 3],
}

impl Norm {
    fn case(&self, (m, n): (i64, i64), kind: Kind, device: Device) -> Case {
        let [composite, libtorch, fused] = self.calls;
        let mut inputs = vec![(vec![m, n], 1.0), (vec![m, n], 1.0), (vec![n], 1.0)];
        if self.has_bias {
            inputs.push((vec![n], 1.0));
        }
        Case {
            operator: self.operator,
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
    }

    pub fn drawn(&self, draw: &mut Draw, kind: Kind, device: Device) -> Case {
        self.case(draw.rows_and_columns(70_000), kind, device)
    }

    pub fn cases(&self, device: Device) -> Vec<Case> {
        let sizes: &[(i64, i64)] = if device.is_cuda() { &ON_CUDA } else { &ON_CPU };
        let of = |kind| sizes.iter().map(move |&size| self.case(size, kind, device));
        KINDS.into_iter().flat_map(of).collect()
    }
}
