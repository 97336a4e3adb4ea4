//! Modules whose intermediates are computed again in the backward pass, in place of being kept.

use crate::Result;
use crate::autograd::{self, Tensors};
use std::sync::{Mutex, PoisonError};
use tch::Tensor;

/// A module that can be called with other tensors in place of its own, as by
/// `torch.func.functional_call`.
pub trait Functional: Sized {
    /// The same module with what `replace` returns for each of its tensors, which it gets one after the
    /// other, always in the same order.
    #[must_use]
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self;
}

/// Calls `function` with a module and inputs, and again in the backward pass: of what it computes, only the
/// inputs and the outputs are kept. The gradients are those of a plain call, bit by bit
/// where operators are deterministic, and those of the module's parameters come once, as in a plain call.
/// It is [`autograd::checkpoint`](crate::autograd::checkpoint()) with all tensors of the module as inputs,
/// so what is said there of autocast holds here, and of dropout: in a graph that is captured, it would drop
/// other elements in the second call.
///
/// `function` gets a module with tensors of its own, and must not use those of the original in another way.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::VarStore};
/// use tch_extension::nn::{TransformerBlockConfig, checkpoint, transformer_block};
///
/// let vs = VarStore::new(Device::Cpu);
/// let config = TransformerBlockConfig { dropout: 0.1, ..TransformerBlockConfig::gpt2() };
/// let block = transformer_block(vs.root(), 32, 4, config);
/// let x = Tensor::randn([2, 7, 32], (Kind::Float, Device::Cpu));
/// let y = checkpoint(
///     &block,
///     |block, inputs| match inputs {
///         [Some(x)] => Ok(block.f_forward_t(x, true)?.into()),
///         _ => unreachable!("one input"),
///     },
///     &[Some(&x)],
/// )?
/// .single()?;
/// y.sum(Kind::Float).backward();
/// assert!(vs.trainable_variables().iter().all(|variable| variable.grad().defined()));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As for [`autograd::checkpoint`](crate::autograd::checkpoint()).
pub fn checkpoint<M, F>(module: &M, function: F, inputs: &[Option<&Tensor>]) -> Result<Tensors>
where
    M: Functional + Send + 'static,
    F: Fn(&M, &[Option<Tensor>]) -> Result<Tensors> + Send + Sync + 'static,
{
    let mut own = Vec::new();
    let like = Mutex::new(module.with_tensors(&mut |tensor| {
        own.push(tensor.shallow_clone());
        tensor.shallow_clone()
    }));
    let count = inputs.len();
    let all: Vec<_> = inputs.iter().copied().chain(own.iter().map(Some)).collect();
    let again = move |all: &[Option<Tensor>]| {
        let (inputs, own) = all.split_at(count);
        let mut own = own.iter();
        let module =
            like.lock().unwrap_or_else(PoisonError::into_inner).with_tensors(&mut |before| {
                let given = own.next().and_then(Option::as_ref);
                given.unwrap_or(before).shallow_clone()
            });
        function(&module, inputs)
    };
    autograd::checkpoint(again, &all)
}
