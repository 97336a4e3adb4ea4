//! Every operator of [tch-extension](tch_extension), registered with libtorch's dispatcher: Python calls
//! them as `torch.ops.tch_extension.layer_norm` and so on, other C++ and TorchScript by the same names.
//!
//! This is a package of its own, and not a part of the library, because a name can be registered once in
//! a process: a program's own cdylib, which contains the library, would otherwise register the same names
//! as the wheel.
//!
//! In eager mode an operator is the crate's function, with its graph node, its saved tensors and its
//! exact second derivatives. Where a program is traced (torch.compile, torch.export, torch.func, vmap), it
//! is `NAME_forward` and `NAME_backward`, which have fake kernels, too. Autocast casts as in Rust.

#[macro_use]
#[path = "../../src/ops/list.rs"]
mod list;

/// Registers each operator of the families that are compiled.
macro_rules! register {
    ($($name:ident of $family:literal { operator: [$operator:ident, $tensors:ident], $($rest:tt)* })*) => {
        $(
            #[cfg(feature = $family)]
            tch_extension::register! {
                namespace tch_extension;
                tch_extension::ops::definitions::$operator
            }
        )*
    };
}
operators!(register);

#[cfg(feature = "open")]
tch_extension::export_open_functions!(tch_extension::open);
