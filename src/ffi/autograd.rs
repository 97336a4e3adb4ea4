//! Bindings to `csrc/autograd`; `bridge.h` has the C++ structs.

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use torch_sys::C_tensor;

/// A `FunctionNode` while its backward pass runs. It is neither `Send` nor `Sync`, because its
/// answers depend on the engine's state in this thread.
#[repr(C)]
pub(crate) struct FunctionNode {
    _opaque: [u8; 0],
    _thread: PhantomData<*mut u8>,
}

/// Collects the gradients of a backward pass.
#[repr(C)]
pub(crate) struct BackwardResults {
    _opaque: [u8; 0],
    _thread: PhantomData<*mut u8>,
}

/// Identifies a registered hook and the list that it is in.
#[repr(C)]
pub(crate) struct HookHandle {
    _opaque: [u8; 0],
}

/// Random states and autocast settings.
#[repr(C)]
pub(crate) struct Surroundings {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct FunctionVTable {
    pub backward: unsafe extern "C" fn(
        state: *const c_void,
        node: *const FunctionNode,
        grads: *const *mut C_tensor,
        grads_len: usize,
        results: *mut BackwardResults,
    ) -> c_int,
    pub drop: unsafe extern "C" fn(state: *mut c_void),
}

#[repr(C)]
pub(crate) struct SavedHooksVTable {
    pub start: unsafe extern "C" fn(hooks: *const c_void) -> *mut c_void,
    pub pack: unsafe extern "C" fn(
        state: *mut c_void,
        tensor: *const C_tensor,
        results: *mut BackwardResults,
    ) -> c_int,
    pub unpack: unsafe extern "C" fn(state: *const c_void, results: *mut BackwardResults) -> c_int,
    pub drop: unsafe extern "C" fn(state: *mut c_void),
}

#[repr(C)]
pub(crate) struct ApplyParams {
    pub name: *const c_char,
    pub name_len: usize,
    pub inputs: *const *const C_tensor,
    pub inputs_len: usize,
    pub outputs: *const *const C_tensor,
    pub outputs_len: usize,
    pub saved: *const *const C_tensor,
    pub saved_len: usize,
    pub dirty: *const usize,
    pub dirty_len: usize,
    pub non_differentiable: *const usize,
    pub non_differentiable_len: usize,
    pub trace: *const c_char,
    pub trace_len: usize,
    pub saved_hooks: *const c_void,
    pub saved_hooks_vtable: *const SavedHooksVTable,
    pub needs_graph: bool,
    pub materialize_grads: bool,
    pub double_backward: bool,
    pub without_autocast: bool,
    pub reads_memory: bool,
}

/// A profiler's record of a forward pass that is running.
#[repr(C)]
pub(crate) struct Record {
    _opaque: [u8; 0],
    _thread: PhantomData<*mut u8>,
}

/// libtorch's autograd state of this thread, such as grad mode.
#[repr(C)]
pub(crate) struct AutogradState {
    _opaque: [u8; 0],
    _thread: PhantomData<*mut u8>,
}

/// The state in which a forward pass begins.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ForwardMode {
    pub record: *mut Record,
    pub autograd: *mut AutogradState,
    pub grad_mode_before: bool,
    pub needs_graph: bool,
    pub anomaly_mode: bool,
    pub has_forward_gradient: bool,
    pub excluded: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AnomalySetting {
    pub enabled: bool,
    pub check_nan: bool,
}

unsafe extern "C" {
    pub(crate) fn tch_extension_begin_forward(
        name: *const c_char,
        name_len: usize,
        inputs: *const *const C_tensor,
        len: usize,
        without_autocast: bool,
    ) -> ForwardMode;
    pub(crate) fn tch_extension_check_in_place(
        inputs: *const *const C_tensor,
        len: usize,
        index: usize,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_defined(tensor: *const C_tensor) -> bool;
    pub(crate) fn tch_extension_end_forward(mode: *const ForwardMode);
    pub(crate) fn tch_extension_are_constants(
        inputs: *const *const C_tensor,
        inputs_len: usize,
        outputs: *const *const C_tensor,
        outputs_len: usize,
    ) -> bool;
    pub(crate) fn tch_extension_requires_grad(tensor: *const C_tensor) -> bool;
    pub(crate) fn tch_extension_apply(
        params: *const ApplyParams,
        state: *mut c_void,
        vtable: *const FunctionVTable,
        wrapped: *mut *mut C_tensor,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_saved(
        node: *const FunctionNode,
        slot: usize,
        tensor: *mut *mut C_tensor,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_needs_input_grad(node: *const FunctionNode, input: usize) -> bool;
    pub(crate) fn tch_extension_creates_graph(node: *const FunctionNode) -> bool;
    pub(crate) fn tch_extension_is_last_backward(results: *const BackwardResults) -> bool;
    pub(crate) fn tch_extension_owned_gradients(results: *const BackwardResults) -> u64;
    pub(crate) fn tch_extension_give_gradient(
        results: *mut BackwardResults,
        input: usize,
        grad: *mut C_tensor,
    );
    pub(crate) fn tch_extension_mark_constant(results: *mut BackwardResults, input: usize);
    pub(crate) fn tch_extension_set_backward_error(
        results: *mut BackwardResults,
        text: *const c_char,
        len: usize,
    );
    pub(crate) fn tch_extension_grad(
        outputs: *const *const C_tensor,
        outputs_len: usize,
        inputs: *const *const C_tensor,
        inputs_len: usize,
        grad_outputs: *const *const C_tensor,
        grad_outputs_len: usize,
        retain_graph: c_int,
        create_graph: bool,
        allow_unused: bool,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_backward(
        outputs: *const *const C_tensor,
        outputs_len: usize,
        grad_outputs: *const *const C_tensor,
        grad_outputs_len: usize,
        inputs: *const *const C_tensor,
        inputs_len: usize,
        retain_graph: c_int,
        create_graph: bool,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_retain_grad(tensor: *const C_tensor) -> *mut c_char;
    pub(crate) fn tch_extension_grad_fn(
        tensor: *const C_tensor,
        name: *mut *mut c_char,
    ) -> *mut c_char;
    pub(crate) safe fn tch_extension_set_anomaly_mode(setting: AnomalySetting) -> AnomalySetting;
    pub(crate) fn tch_extension_register_post_accumulate_grad_hook(
        tensor: *const C_tensor,
        state: *mut c_void,
        vtable: *const FunctionVTable,
        handle: *mut *mut HookHandle,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_register_hook(
        tensor: *const C_tensor,
        state: *mut c_void,
        vtable: *const FunctionVTable,
        handle: *mut *mut HookHandle,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_remove_hook(handle: *const HookHandle) -> *mut c_char;
    pub(crate) fn tch_extension_free_hook(handle: *mut HookHandle);
    pub(crate) fn tch_extension_surroundings(
        tensors: *const *const C_tensor,
        len: usize,
        result: *mut *mut Surroundings,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_enter(
        surroundings: *mut Surroundings,
        before: *mut *mut Surroundings,
    ) -> *mut c_char;
    pub(crate) fn tch_extension_restore(surroundings: *mut Surroundings) -> *mut c_char;
    pub(crate) fn tch_extension_free_surroundings(surroundings: *mut Surroundings);
    pub(crate) safe fn tch_extension_set_autocast_cache(enabled: bool) -> bool;
    pub(crate) fn tch_extension_version(tensor: *const C_tensor) -> i64;
    pub(crate) fn tch_extension_reaches_other_leaf(
        outputs: *const *const C_tensor,
        outputs_len: usize,
        inputs: *const *const C_tensor,
        inputs_len: usize,
        found: *mut bool,
    ) -> *mut c_char;
    pub(crate) safe fn tch_extension_grad_mode() -> bool;
    pub(crate) safe fn tch_extension_set_grad_mode(enabled: bool) -> bool;
    pub(crate) safe fn tch_extension_live_nodes() -> i64;
    pub(crate) fn tch_extension_free_message(message: *mut c_char);
}
