//! The functions of `nn` that are no operators of `ops`, compared with libtorch's at random sizes.

use crate::common::{Case, Provider, Work};
use crate::draw::Draw;
use std::cell::OnceCell;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::nn::{
    AttentionOptions, Causal, embedding as table, f_scaled_dot_product_attention,
};

/// Looks up drawn rows of the first input.
fn lookup(
    name: &'static str,
    indices: i64,
    call: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + 'static,
) -> Provider {
    let drawn = OnceCell::new();
    Provider::new(name, move |inputs| {
        let weight = &inputs[0];
        let options = (Kind::Int64, weight.device());
        let indices = drawn.get_or_init(|| Tensor::randint(weight.size()[0], [indices], options));
        Ok(vec![call(weight, indices)?])
    })
}

/// Rows of a table, with at most 2²⁸ elements.
pub fn embedding(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    const MOST: i64 = 1 << 28;
    let (rows, indices, columns) = loop {
        let step = draw.step();
        let size = (draw.size(200_000, 1), draw.size(65_536, 1), draw.size(4096, step));
        if size.0.max(size.1) * size.2 <= MOST {
            break size;
        }
    };
    let ours = |weight: &Tensor, indices: &Tensor| {
        let vs = VarStore::new(Device::Cpu);
        let mut of = table(vs.root(), 1, 1, Default::default());
        of.ws = weight.shallow_clone();
        of.f_forward(indices)
    };
    Case {
        operator: "embedding",
        point: format!("{:?}", (rows, indices, columns)),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![rows, columns], 1.0)],
        // Forward reads and writes the rows; backward reads as many and writes the table's gradient.
        work: [
            Work::new(kind, 2 * indices * columns, 0),
            Work::new(kind, (indices + rows) * columns, 0),
        ],
        providers: vec![
            lookup("libtorch", indices, |weight, indices| {
                Ok(Tensor::f_embedding(weight, indices, -1, false, false)?)
            }),
            lookup("fused", indices, ours),
        ],
    }
}

/// `[B, H, T, D]` of queries, keys and values, causal in half of the cases.
pub fn attention(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    const MOST: i64 = 1 << 30;
    let (b, h) = (draw.size(32, 1), draw.size(32, 1));
    let step = draw.step();
    let t = draw.size((((MOST / (b * h)) as f64).sqrt() as i64).min(4096), step);
    let d = [32, 64, 80, 128][draw.size(4, 1) as usize - 1];
    let causal = draw.one_in(2);
    let ours = move |inputs: &[Tensor]| {
        let causal = causal.then_some(Causal::UpperLeft);
        let options = AttentionOptions { causal, ..Default::default() };
        Ok(vec![f_scaled_dot_product_attention(&inputs[0], &inputs[1], &inputs[2], &options)?])
    };
    let libtorch = move |inputs: &[Tensor]| {
        let [query, key, value] = [0, 1, 2].map(|input: usize| &inputs[input]);
        let mask = None::<&Tensor>;
        let output = Tensor::f_scaled_dot_product_attention(
            query, key, value, mask, 0.0, causal, None, false,
        )?;
        Ok(vec![output])
    };
    let elements = b * h * t * d;
    Case {
        operator: "attention",
        point: format!("{:?}{}", (b, h, t, d), if causal { " causal" } else { "" }),
        kind,
        device,
        tf32: false,
        inputs: vec![(vec![b, h, t, d], 1.0); 3],
        work: [2, 5].map(|products| Work::new(kind, 4 * elements, products * 2 * elements * t)),
        providers: vec![Provider::new("libtorch", libtorch), Provider::new("fused", ours)],
    }
}
