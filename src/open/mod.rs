//! Operators as functions of the open ABI TVM FFI, which numpy, CuPy, JAX and others call.
//!
//! Nothing here names tch or libtorch: the package tch-extension-open includes these files, too, and is a
//! library that needs CUDA alone. What differs between the two is in `crate::cuda` and `crate::kernels`.
//! The page docs/kernels-for-others.md describes the functions.

mod abi;
mod arguments;
mod arrays;
mod call;
mod loss;
mod norm;
mod rope;

pub use abi::{Any, run};

/// What a function returns: nothing or a number.
type Answer = Result<Option<i64>, abi::Refusal>;

/// Makes a public item of each function, with the names of its arguments.
macro_rules! functions {
    ($($module:ident::$name:ident($($argument:ident),+);)+) => {
        $(
            #[doc(hidden)]
            #[allow(non_upper_case_globals)]
            pub const $name: abi::Function = abi::Function {
                name: stringify!($name),
                arguments: &[$(stringify!($argument)),+],
                body: |arguments| $module::$name(arguments.named()?),
            };
        )+
    };
}

functions! {
    norm::rms_norm(output, rstd, input, weight, eps);
    norm::rms_norm_backward(grad_input, grad_weight, workspace, grad_output, input, weight, rstd);
    norm::rms_norm_backward_workspace(rows, columns, dtype, device);
    norm::layer_norm(output, mean, rstd, input, weight, bias, eps);
    norm::layer_norm_backward(
        grad_input, grad_weight, grad_bias, workspace, grad_output, input, weight, mean, rstd
    );
    norm::layer_norm_backward_workspace(rows, columns, dtype, device);
    norm::add_rms_norm(output, sum, rstd, input, residual, weight, eps);
    norm::add_rms_norm_backward(
        grad_input, grad_residual, grad_weight, workspace, grad_output, grad_sum, sum, weight, rstd
    );
    norm::add_rms_norm_backward_workspace(rows, columns, dtype, device);
    rope::rope(q_output, k_output, q, k, cos, sin, offset, interleaved, inverse);
    loss::cross_entropy(
        loss, grad_input, workspace, input, target, weight, ignore_index, reduction, label_smoothing
    );
    loss::cross_entropy_backward(
        grad_input, workspace, grad_output, input, target, weight, ignore_index, reduction,
        label_smoothing
    );
    loss::cross_entropy_workspace(rows, dtype);
}

/// Exports the functions from a library that Python and others load: `rms_norm` as `__tvm_ffi_rms_norm`.
/// A symbol may be in a process once under each name, so the library itself exports none.
#[doc(hidden)]
#[macro_export]
macro_rules! export_open_functions {
    ($open:path) => {
        $crate::export_open_functions! {
            $open:
            rms_norm = __tvm_ffi_rms_norm,
            rms_norm_backward = __tvm_ffi_rms_norm_backward,
            rms_norm_backward_workspace = __tvm_ffi_rms_norm_backward_workspace,
            layer_norm = __tvm_ffi_layer_norm,
            layer_norm_backward = __tvm_ffi_layer_norm_backward,
            layer_norm_backward_workspace = __tvm_ffi_layer_norm_backward_workspace,
            add_rms_norm = __tvm_ffi_add_rms_norm,
            add_rms_norm_backward = __tvm_ffi_add_rms_norm_backward,
            add_rms_norm_backward_workspace = __tvm_ffi_add_rms_norm_backward_workspace,
            rope = __tvm_ffi_rope,
            cross_entropy = __tvm_ffi_cross_entropy,
            cross_entropy_backward = __tvm_ffi_cross_entropy_backward,
            cross_entropy_workspace = __tvm_ffi_cross_entropy_workspace,
        }
    };
    ($open:path: $($name:ident = $symbol:ident,)+) => {
        mod open_functions {
            use $open as open;
            $(
                /// A function of TVM FFI.
                ///
                /// # Safety
                /// The caller keeps to TVM FFI's ABI, and each array describes memory that exists.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $symbol(
                    _handle: *mut ::std::ffi::c_void,
                    arguments: *const open::Any,
                    count: i32,
                    result: *mut open::Any,
                ) -> i32 {
                    // SAFETY: what the caller guarantees (see `# Safety`).
                    unsafe { open::run(&open::$name, arguments, count, result) }
                }
            )+
        }
    };
}
