use super::*;

fn generated(rust: &str) -> Result<Option<String>> {
    generated_by(rust, |header| header)
}

fn generated_by(rust: &str, with: fn(Header) -> Header) -> Result<Option<String>> {
    let folder = std::env::temp_dir().join(format!(
        "tch-extension-headers-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let source = folder.join("src/soft_cap/kernels.rs");
    std::fs::create_dir_all(source.parent().unwrap()).unwrap();
    std::fs::write(&source, rust).unwrap();
    let header = with(Header::new([source.clone()], prefix_of(&source))).generate();
    std::fs::remove_dir_all(folder).unwrap();
    header
}

#[test]
fn structs_and_enums_are_declared_with_their_comments() {
    let header = generated(
        "/// Which kernel.
        #[repr(i32)]
        #[derive(Default)]
        pub enum Way { #[default] Automatic, /// A warp a row.
            Warp }
        /// The forward pass.
        #[repr(C)]
        struct Forward<'a> {
            /// x, `[N]`.
            x: Strided<'a, 1>,
            y: StridedMut<'a, 1>,
            way: Way,
            cap: f64,
            /// `[N]`, null if nobody needs it.
            mean: *mut c_void,
            input: *const C_tensor,
            sizes: [i64; DIMS],
        }
        const DIMS: usize = 6;
        struct NotForC { a: String }
        #[cfg(test)]
        mod tests { #[repr(C)] struct OfATest { a: i32 } }",
    );
    let expected = "#pragma once

#include <cstdint>

#include \"tch_extension/accessor.h\"

namespace at {
class Tensor;
}

// Which kernel.
enum class SoftCapWay : int32_t {
  Automatic,
  // A warp a row.
  Warp,
};

// The forward pass.
struct SoftCapForward {
  // x, `[N]`.
  tch_extension::Strided<1> x;
  tch_extension::StridedMut<1> y;
  SoftCapWay way;
  double cap;
  // `[N]`, null if nobody needs it.
  void* mean;
  const at::Tensor* input;
  int64_t sizes[6];
};
";
    assert_eq!(header.unwrap().unwrap(), expected);
}

#[test]
fn functions_are_declared_with_the_names_of_their_types() {
    let header = generated_by(
        "use crate::cuda::{LaunchStatus, cudaStream_t};
        use crate::ops::norm::{Statistic, kernels::{Backward, Plan}};
        #[repr(C)]
        struct Forward { x: *const c_void }
        crate::kernels::raw_kernels! {
            \"soft_cap\";
            /// Documentation.
            fn run(Forward) = tch_extension_soft_cap_cpu, tch_extension_soft_cap_cuda;
        }
        unsafe extern \"C\" {
            /// Whether it can.
            safe fn tch_extension_soft_cap_can(plan: *const Plan) -> bool;
            fn cudaGetLastError() -> i32;
        }
        #[cfg(tch_extension_cuda)]
        mod cuda {
            unsafe extern \"C\" {
                #[cfg(test)]
                fn tch_extension_soft_cap_of_a_tensor_with_a_long_name(
                    tensors: *const *const C_tensor, len: usize, result: *mut *mut C_tensor,
                ) -> *mut c_char;
            }
        }
        #[cfg(test)]
        mod tests { fn f(_: Backward) {} }",
        Header::functions,
    );
    let expected = "#pragma once

#include <cstddef>
#include <cstdint>

struct SoftCapForward {
  const void* x;
};

// clang-format off
namespace at { class Tensor; }
namespace tch_extension { struct LaunchStatus; }
struct NormPlan;
using cudaStream_t = struct CUstream_st*;
#pragma GCC visibility push(default)
extern \"C\" {
// Whether it can.
bool tch_extension_soft_cap_can(const NormPlan* plan);
void tch_extension_soft_cap_cpu(const SoftCapForward* params) noexcept;
tch_extension::LaunchStatus tch_extension_soft_cap_cuda(const SoftCapForward* params,
                                                        cudaStream_t stream);
char* tch_extension_soft_cap_of_a_tensor_with_a_long_name(const at::Tensor* const* tensors,
                                                          size_t len,
                                                          at::Tensor** result);
}  // extern \"C\"
#pragma GCC visibility pop
// clang-format on
";
    assert_eq!(header.unwrap().unwrap(), expected);
}

#[test]
fn functions_of_types_that_c_plus_plus_has() {
    let rust = "#[doc(hidden)]
        #[doc(alias = \"library::Store\")]
        #[repr(C)]
        struct CStore { _private: [u8; 0] }
        type Take = unsafe extern \"C\" fn(*mut c_void, *const u8);
        #[cfg(test)]
        unsafe extern \"C\" {
            fn tch_extension_store_get(store: *mut CStore, take: Take);
        }";
    let expected = "#pragma once

#include <cstdint>

// clang-format off
namespace library { struct Store; }
using Take = void(*)(void*, const uint8_t*);
extern \"C\" {
void tch_extension_store_get(library::Store* store, Take take);
}  // extern \"C\"
// clang-format on
";
    assert_eq!(generated_by(rust, Header::only_functions).unwrap().unwrap(), expected);
    let plain = generated_by("struct NotForC { a: String }", Header::only_functions);
    assert!(plain.unwrap().is_none());
}

#[test]
fn functions_that_would_be_overlooked_are_refused() {
    let rust = "fn start() { unsafe extern \"C\" { fn tch_extension_start(); } }";
    let error = generated_by(rust, Header::functions).unwrap_err().to_string();
    assert!(error.contains("kernels.rs: an extern block is inside of a function"), "{error}");
    // A user's header has only the functions of `kernels!`.
    assert!(generated(rust).unwrap().is_none());
}

#[test]
fn the_kernels_of_a_user_are_declared() {
    let rust = "#[repr(C)]
        struct Forward<'a> { x: Strided<'a, 1>, cap: f64 }
        tch_extension::kernels! {
            \"softcap\":
            // SAFETY: both stay within the tensors.
            pub unsafe fn forward(Forward { x, cap }) = my_softcap_cpu, my_softcap_cuda;
        }";
    let header = generated(rust).unwrap().unwrap();
    let expected = "// clang-format off
namespace tch_extension { struct LaunchStatus; }
using cudaStream_t = struct CUstream_st*;
#pragma GCC visibility push(default)
extern \"C\" {
void my_softcap_cpu(const SoftCapForward* params) noexcept;
tch_extension::LaunchStatus my_softcap_cuda(const SoftCapForward* params, cudaStream_t stream);
}  // extern \"C\"
#pragma GCC visibility pop
// clang-format on
";
    assert!(header.ends_with(expected), "{header}");
    let error = generated(&rust.replace("#[repr(C)]", "")).unwrap_err().to_string();
    let expected = "kernels.rs: `kernels!` names Forward, which is no struct with #[repr(C)]";
    assert!(error.contains(expected), "{error}");
    let error = generated(&rust.replace("Strided<'a, 1>", "Option<Strided<'a, 1>>"));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("kernels.rs: Forward.x is an Option"), "{error}");
}

#[test]
fn what_c_plus_plus_cannot_have_is_refused() {
    assert!(generated("struct NotForC { a: String }").unwrap().is_none());
    let error = generated("#[repr(u8)] enum Way { A }").unwrap_err().to_string();
    assert!(error.contains("Way is repr(u8); structs for C++ are repr(C)"), "{error}");
    let error = generated("struct").unwrap_err().to_string();
    assert!(error.contains("kernels.rs is not Rust"), "{error}");
}

#[test]
fn prefixes_come_from_the_path() {
    for (path, prefix) in [
        ("src/soft_cap/kernels.rs", "SoftCap"),
        ("src/soft_cap.rs", "SoftCap"),
        ("softcap.rs", "Softcap"),
    ] {
        assert_eq!(prefix_of(Path::new(path)), prefix);
    }
}
