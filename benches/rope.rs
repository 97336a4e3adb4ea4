//! Rotary position embedding of q and k: our fused operator compared with the composite of tch
//! operations, for q and k of their own and for slices of one packed projection.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use std::cell::OnceCell;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{RopeOptions, f_rope, rope_reference, rope_tables};

/// (B, T, H, D).
type Size = (i64, i64, i64, i64);
const ON_CUDA: [Size; 2] = [(16, 1024, 12, 64), (4, 4096, 32, 128)];
const ON_CPU: [Size; 3] = [(1, 1, 32, 128), (1, 128, 12, 64), (2, 512, 8, 64)];
const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

/// Where q and k are.
#[derive(Clone, Copy, PartialEq)]
enum Memory {
    /// `[B, T, H, D]` each.
    Own,
    /// Slices of `[B, T, 3, H, D]`.
    Packed,
}

type Op = fn(&Tensor, &Tensor, &Tensor, &Tensor, &RopeOptions) -> Result<(Tensor, Tensor)>;

fn provider(name: &'static str, op: Op, memory: Memory, interleaved: bool) -> Provider {
    // Made by the first call, which is not measured.
    let tables = OnceCell::new();
    Provider::new(name, move |inputs| {
        let (q, k) = match memory {
            Memory::Own => (inputs[0].shallow_clone(), inputs[1].shallow_clone()),
            Memory::Packed => (inputs[0].f_select(2, 0)?, inputs[0].f_select(2, 1)?),
        };
        let options = (Kind::Float, q.device());
        let (cos, sin) =
            tables.get_or_init(|| rope_tables(q.size()[1], q.size()[3], 10000.0, options));
        let (q, k) = op(&q, &k, cos, sin, &RopeOptions { interleaved, ..Default::default() })?;
        Ok(vec![q, k])
    })
}

fn case(kind: Kind, (b, t, h, d): Size, memory: Memory, interleaved: bool, device: Device) -> Case {
    let convention = if interleaved { "interleaved" } else { "halves" };
    let (inputs, place) = match memory {
        Memory::Own => (vec![(vec![b, t, h, d], 1.0); 2], ""),
        Memory::Packed => (vec![(vec![b, t, 3, h, d], 1.0)], " packed"),
    };
    let provider = |name, op| provider(name, op, memory, interleaved);
    // Both are read and written, in each direction. The gradient of a packed projection is made by
    // libtorch from those of its slices, so only the forward pass is compared.
    let (composite, fused) = (provider("composite", rope_reference), provider("fused", f_rope));
    let providers = match memory {
        Memory::Own => vec![composite, fused],
        Memory::Packed => vec![composite.without_backward(), fused.without_backward()],
    };
    Case {
        operator: "rope",
        point: format!("{:?} {convention}{place}", (b, t, h, d)),
        kind,
        device,
        tf32: false,
        inputs,
        work: [Work::new(kind, 4 * b * t * h * d, 0); 2],
        providers,
    }
}

/// A case with drawn sizes. D is even, and up to 256.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    const MOST: i64 = 1 << 18;
    let (b, h) = (draw.size(64, 1), draw.size(64, 1));
    let step = draw.step();
    let t = draw.size((MOST / (b * h)).min(8192), step);
    let size = (b, t, h, 2 * draw.size(128, 1));
    let memory = if draw.one_in(2) { Memory::Own } else { Memory::Packed };
    case(kind, size, memory, draw.one_in(2), device)
}

pub fn cases(device: Device) -> Vec<Case> {
    let sizes: &[Size] = if device.is_cuda() { &ON_CUDA } else { &ON_CPU };
    let mut cases = Vec::new();
    for (kind, &size) in
        KINDS.into_iter().flat_map(|kind| sizes.iter().map(move |size| (kind, size)))
    {
        for memory in [Memory::Own, Memory::Packed] {
            cases.extend(
                [false, true].map(|interleaved| case(kind, size, memory, interleaved, device)),
            );
        }
    }
    cases
}
