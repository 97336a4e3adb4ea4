//! Bindings to `csrc/library/package.cpp`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;
use tch::Tensor;
use torch_sys::C_tensor;

#[repr(C)]
#[doc(alias = "tch_extension::Package")]
struct CPackage {
    _opaque: [u8; 0],
}

type See = extern "C" fn(*mut c_void, *const c_char, *const C_tensor);

unsafe extern "C" {
    fn tch_extension_load_package(
        library: *const c_char,
        folder: *const c_char,
        weights: *const c_char,
        device_type: *const c_char,
        index: i32,
        runners: usize,
        single_threaded: bool,
        result: *mut *mut CPackage,
    ) -> *mut c_char;
    fn tch_extension_free_package(package: *mut CPackage);
    fn tch_extension_package_facts(
        package: *const CPackage,
        index: *mut i32,
        inputs: *mut usize,
        outputs: *mut usize,
    );
    fn tch_extension_run_package(
        package: *mut CPackage,
        inputs: *const *const C_tensor,
        len: usize,
        outputs: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_package_call_spec(
        package: *mut CPackage,
        inputs: *mut *mut c_char,
        outputs: *mut *mut c_char,
    ) -> *mut c_char;
    fn tch_extension_package_constants(
        package: *mut CPackage,
        state: *mut c_void,
        see: See,
    ) -> *mut c_char;
    fn tch_extension_package_constant(
        package: *mut CPackage,
        name: *const c_char,
        copy: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_update_package(
        package: *mut CPackage,
        names: *const *const c_char,
        values: *const *const C_tensor,
        len: usize,
    ) -> *mut c_char;
}

/// What [`Package::load`] loads.
pub(crate) struct Compiled<'a> {
    /// The compiled model.
    pub library: &'a CStr,
    /// Where the kernels of a GPU lie.
    pub folder: &'a CStr,
    /// A file of constants that are not in the library.
    pub weights: Option<&'a CStr>,
    /// The type of the device, such as `cpu`.
    pub device_type: &'a CStr,
    /// The index of the device; -1 for the current one.
    pub index: i32,
    pub runners: usize,
    pub single_threaded: bool,
}

/// A loaded model. It checks neither the number nor the properties of what it is given.
pub(crate) struct Package {
    package: NonNull<CPackage>,
    /// The index of its device.
    pub index: i32,
    pub inputs: usize,
    pub outputs: usize,
}

// SAFETY: C++ lets as many threads run the model as it has runners, and changes constants only when
// no thread is inside.
unsafe impl Send for Package {}
// SAFETY: as for `Send`.
unsafe impl Sync for Package {}

fn done(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |message| Err(Error::Torch(message)))
}

impl Package {
    /// Loads the library, which runs its initialisers.
    pub fn load(compiled: &Compiled<'_>) -> Result<Package> {
        let mut result = std::ptr::null_mut();
        // SAFETY: the texts are null-terminated and live during the call. Whoever names a package is
        // responsible for what its code does. We own the result.
        done(unsafe {
            tch_extension_load_package(
                compiled.library.as_ptr(),
                compiled.folder.as_ptr(),
                compiled.weights.map_or(std::ptr::null(), CStr::as_ptr),
                compiled.device_type.as_ptr(),
                compiled.index,
                compiled.runners,
                compiled.single_threaded,
                &mut result,
            )
        })?;
        let package = NonNull::new(result)
            .ok_or_else(|| Error::msg("internal error: C++ returned no package"))?;
        let mut package = Package { package, index: -1, inputs: 0, outputs: 0 };
        // SAFETY: the package is alive, and C++ writes three numbers.
        unsafe {
            tch_extension_package_facts(
                package.package.as_ptr(),
                &mut package.index,
                &mut package.inputs,
                &mut package.outputs,
            );
        }
        Ok(package)
    }

    /// Runs the model. The caller has checked that the inputs are what the model was compiled for.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
        if inputs.len() != self.inputs {
            return Err(Error::msg("internal error: the number of inputs was not checked"));
        }
        let inputs: Vec<*const C_tensor> = inputs.iter().map(|input| input.as_ptr()).collect();
        let mut outputs = vec![std::ptr::null_mut(); self.outputs];
        // SAFETY: the package and the inputs are alive, and `outputs` has room for all outputs.
        done(unsafe {
            tch_extension_run_package(
                self.package.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_mut_ptr(),
            )
        })?;
        // SAFETY: each is null or a handle that C++ allocated for us.
        let owned = |output: *mut C_tensor| unsafe { Tensor::from_ptr(output) };
        Ok(outputs.into_iter().map(|output| (!output.is_null()).then(|| owned(output))).collect())
    }

    /// The specifications of the inputs and of the outputs.
    pub fn call_spec(&self) -> Result<(String, String)> {
        let (mut inputs, mut outputs) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the package is alive. On success we own both texts.
        done(unsafe {
            tch_extension_package_call_spec(self.package.as_ptr(), &mut inputs, &mut outputs)
        })?;
        let text = |text| take_message(text).unwrap_or_default();
        Ok((text(inputs), text(outputs)))
    }

    /// Calls `see` with the name of each constant and with the constant, sorted by name. No handle
    /// of the constant may be kept, because its memory belongs to the model.
    pub fn for_each_constant(&self, mut see: impl FnMut(&str, &Tensor)) -> Result<()> {
        extern "C" fn forward(state: *mut c_void, name: *const c_char, tensor: *const C_tensor) {
            // SAFETY: `state` is the pointer below, to which nobody else has access meanwhile. Name
            // and tensor live during the call, and `clone_from_ptr` makes a handle of our own.
            let (see, name, tensor) = unsafe {
                (
                    &mut *state.cast::<&mut dyn FnMut(&str, &Tensor)>(),
                    CStr::from_ptr(name).to_string_lossy(),
                    Tensor::clone_from_ptr(tensor.cast_mut()),
                )
            };
            see(&name, &tensor);
        }
        let mut see: &mut dyn FnMut(&str, &Tensor) = &mut see;
        let state = (&raw mut see).cast::<c_void>();
        // SAFETY: the package is alive, and C++ calls `forward` with `state` only during this call.
        // A panic in `see` would abort, but ours have none.
        done(unsafe { tch_extension_package_constants(self.package.as_ptr(), state, forward) })
    }

    /// A copy of a constant.
    pub fn constant(&self, name: &str) -> Result<Tensor> {
        let name = c_text(name)?;
        let mut copy = std::ptr::null_mut();
        // SAFETY: the package is alive, and the text lives during the call.
        done(unsafe {
            tch_extension_package_constant(self.package.as_ptr(), name.as_ptr(), &mut copy)
        })?;
        // SAFETY: it is a handle that C++ allocated for us.
        Ok(unsafe { Tensor::from_ptr(copy) })
    }

    /// Replaces the values of constants. The caller has checked that there are constants of these
    /// names, and that the values have their shapes and kinds.
    pub fn update(&self, constants: &[(&str, &Tensor)]) -> Result<()> {
        let names =
            constants.iter().map(|(name, _)| c_text(name)).collect::<Result<Vec<CString>>>()?;
        let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let values: Vec<*const C_tensor> =
            constants.iter().map(|(_, value)| value.as_ptr()).collect();
        // SAFETY: the package, the texts and the values are alive during the call.
        done(unsafe {
            tch_extension_update_package(
                self.package.as_ptr(),
                names.as_ptr(),
                values.as_ptr(),
                values.len(),
            )
        })
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        // SAFETY: C++ made the package for us, and nobody uses it afterwards.
        unsafe { tch_extension_free_package(self.package.as_ptr()) }
    }
}

fn c_text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::msg(format!("{text:?} contains a zero byte")))
}
