//! Skeleton: nothing is registered.
use tch_extension::ops;
#[repr(transparent)]
struct P(*const ());
unsafe impl Sync for P {}
#[used]
static KEEP: [P; 6] = [
    P(ops::f_lstm as *const ()),
    P(ops::f_gru as *const ()),
    P(ops::f_lltm as *const ()),
    P(ops::f_lltm_cell as *const ()),
    P(ops::f_linear as *const ()),
    P(ops::f_matmul_add_relu as *const ()),
];
/// Why the registration failed; null.
#[unsafe(no_mangle)]
pub extern "C" fn tch_extension_registration_error() -> *const std::ffi::c_char {
    std::ptr::null()
}
