//! `gelu(gate) · value`, where x is `[gate, value]` along its last dimension.

use tch::Tensor;
use tch_extension::{Error, Result};

pub fn composite(x: &Tensor) -> Result<Tensor> {
    match &x.f_chunk(2, -1)?[..] {
        [gate, value] => Ok(gate.f_gelu("none")?.f_mul(value)?),
        _ => Err(Error::argument("geglu", "x", "an even last dimension", "one of 1", "")),
    }
}
