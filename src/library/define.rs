//! Operators defined in Rust, without the macro.

use super::Output;
use crate::ffi::define as ffi;
use crate::{Error, Result};
use std::panic::Location;
use tch::Tensor;

/// A kernel of any operator: it gets the arguments in the order of the schema, and returns the
/// results. It is a plain function without captured values, because libtorch keeps it until after
/// the end of `main`.
pub type Kernel = fn(&[Output]) -> Result<Vec<Output>>;

/// Defines an operator in this namespace: `TORCH_LIBRARY_FRAGMENT` and `def` in C++. The schema is
/// in libtorch's notation. From now on, `torch.ops.NAMESPACE.NAME` in Python,
/// [`Operator::find`](super::Operator::find) and everybody else find it. It stays defined until the
/// process ends.
///
/// [`operators!`](crate::operators) makes the schema from a function's signature, and checks the
/// types of the kernels. This function is for what it cannot say.
///
/// ```
/// use tch::Tensor;
/// use tch_extension::library::{self, Operator, Output};
/// use tch_extension::{Error, args};
///
/// library::define("define_example", "twice(Tensor x) -> Tensor")?;
/// library::implement("define_example", "twice", "CompositeImplicitAutograd", |arguments| {
///     let [Output::Tensor(x)] = arguments else { return Err(Error::msg("x: expected a tensor")) };
///     Ok(vec![Output::Tensor(x * 2.0)])
/// })?;
///
/// let y: Tensor = Operator::find("define_example::twice")?.call(args![&Tensor::from(3.0)])?;
/// assert_eq!(y, Tensor::from(6.0));
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// When the schema is malformed, or when the operator is defined already, perhaps by another library;
/// the message then says where.
#[track_caller]
pub fn define(namespace: &str, schema: &str) -> Result<()> {
    let location = Location::caller();
    let place = ffi::Place { file: location.file(), line: location.line() };
    let registrations = ffi::Registrations::new();
    define_at(&registrations, namespace, schema, false, place)?;
    registrations.keep();
    Ok(())
}

pub(super) fn define_at(
    registrations: &ffi::Registrations,
    namespace: &str,
    schema: &str,
    is_seeded: bool,
    place: ffi::Place<'_>,
) -> Result<()> {
    let name = schema.split('(').next().unwrap_or_default().trim();
    let qualified = format!("{namespace}::{name}");
    if schema.contains('\0') {
        return Err(Error::msg(format!("{namespace}::{name:?}: its schema contains a zero byte")));
    }
    // libtorch accepts any text, and nobody could write the operator's name.
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if namespace.is_empty() || !namespace.chars().all(is_word) {
        return Err(Error::msg(format!(
            "{qualified}: the namespace: expected letters, digits and _, got {namespace:?}"
        )));
    }
    ffi::define(registrations, namespace, schema, is_seeded, place)
        .map_err(|error| ffi::named(&qualified, &error))
}

/// Gives an operator its kernel for a dispatch key: `TORCH_LIBRARY_IMPL` and `impl` in C++. The
/// name may have an overload, as in `add.Tensor`. Some keys:
///
/// | key | the kernel runs for |
/// |---|---|
/// | `CPU`, `CUDA` | tensors on that device |
/// | `Meta` | fake tensors, which have sizes but no values: `torch.compile` and `torch.export` use them |
/// | `Autograd` | all tensors, before the kernel of their device; it makes the graph ([`below_autograd`]) |
/// | `CompositeImplicitAutograd` | all tensors, if the operator consists of others, which have gradients |
/// | `AutocastCPU`, `AutocastCUDA` | tensors on that device, while autocast is on |
///
/// # Errors
/// When no such operator is defined, when it has a kernel for this key already, or when there is no
/// such key.
#[track_caller]
pub fn implement(namespace: &str, name: &str, key: &str, kernel: Kernel) -> Result<()> {
    let location = Location::caller();
    let place = ffi::Place { file: location.file(), line: location.line() };
    let registrations = ffi::Registrations::new();
    implement_at(&registrations, namespace, name, key, ffi::Kernel::Untyped(kernel), place)?;
    registrations.keep();
    Ok(())
}

pub(super) fn implement_at(
    registrations: &ffi::Registrations,
    namespace: &str,
    name: &str,
    key: &str,
    kernel: ffi::Kernel,
    place: ffi::Place<'_>,
) -> Result<()> {
    ffi::implement(registrations, namespace, name, key, kernel, place).map_err(|error| {
        let text = error.to_string();
        let qualified = format!("{namespace}::{name}");
        Error::Torch(format!("{qualified}: its kernel for {key} was refused: {text}"))
    })
}

/// Runs `f` without autograd: the operators that it calls run their kernels for the device, or for
/// whatever traces the program, and record nothing. `at::AutoDispatchBelowADInplaceOrView` in C++.
///
/// A kernel for the key `Autograd` calls its own operator in this way. A plain call would come back
/// to it, for ever. Do not use it in a backward pass: within `torch.func` of Python, a backward pass
/// runs above all levels of derivatives, and the outer ones would record nothing. Call a registered
/// operator there instead.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::library::below_autograd;
///
/// let x = Tensor::from_slice(&[1.0]).set_requires_grad(true);
/// let y = below_autograd(|| &x * 2.0);
/// assert!(!y.requires_grad());
/// ```
pub fn below_autograd<T>(f: impl FnOnce() -> T) -> T {
    ffi::below_autograd(f)
}

/// Runs `f` without the kernels for this dispatch key: `c10::impl::ExcludeDispatchKeyGuard` in C++. A
/// kernel for a key such as `FuncTorchVmapMode` calls its own operator in this way, where a plain call
/// would come back to it.
///
/// # Errors
/// Those of `f`, and if there is no such key.
pub fn without_key<T>(key: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    ffi::without_key(key, f)
}

/// Whether a call with these tensors is traced or transformed rather than computed: one of them
/// stands for another (fake, functional, batched), or is of a Python class with an own
/// `__torch_dispatch__`, or a mode that wants to see each operator is on. What works on memory must
/// then be reached through the dispatcher: as a registered operator with a fake kernel.
pub fn is_traced(tensors: &[&Tensor]) -> bool {
    ffi::is_traced(tensors)
}
