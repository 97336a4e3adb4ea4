//! Attention's own kernel, which `nn::KvCache` calls.

mod kernels;

pub(crate) use kernels::{Operands, decode};
