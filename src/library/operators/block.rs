//! What [`operators!`](crate::operators) expands to: a list of definitions, which are registered when
//! the library or program is loaded.

use crate::ffi::define::{self as ffi, Kernel, Place, TypedKernel};
use crate::ffi::exceptions;
use crate::library::define::{define_at, implement_at};
use crate::{Error, Result};
use std::sync::Mutex;

/// An argument in a schema.
pub struct Argument {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub schema: String,
    /// Its default value, as the schema writes it.
    pub default: Option<String>,
    /// Whether the operator writes to it.
    pub written: bool,
}

/// An operator with its kernels.
pub struct Definition {
    /// Its name, without the namespace.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: Vec<Argument>,
    /// The types of its results.
    pub results: String,
    /// Its kernels by dispatch key.
    pub kernels: Vec<(&'static str, TypedKernel)>,
}

impl Definition {
    fn schema(&self) -> String {
        let arguments = self.arguments.iter().map(|argument| {
            let default =
                argument.default.as_ref().map_or(String::new(), |text| format!("={text}"));
            format!("{} {}{default}", argument.schema, argument.name)
        });
        let arguments = arguments.collect::<Vec<_>>().join(", ");
        format!("{}({arguments}) -> {}", self.name, self.results)
    }
}

/// The operators of one use of the macro.
pub struct Block {
    /// Their namespace.
    pub namespace: &'static str,
    /// The file of the use.
    pub file: &'static str,
    /// The line of the use.
    pub line: u32,
    /// The operators.
    pub operators: Vec<Definition>,
}

impl Block {
    fn register(&self) -> Result<()> {
        ffi::check_version()?;
        let place = Place { file: self.file, line: self.line };
        for operator in &self.operators {
            define_at(self.namespace, &operator.schema(), place)?;
        }
        for operator in &self.operators {
            for &(key, kernel) in &operator.kernels {
                implement_at(self.namespace, operator.name, key, Kernel::Typed(kernel), place)?;
            }
        }
        Ok(())
    }
}

/// Why registrations failed.
static ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Registers a block when the library is loaded. Nobody could handle an error there, so it is
/// printed, and kept for [`registration_error`].
pub fn register(block: fn() -> Block) {
    let mut what = String::from("operators");
    let error = exceptions::failure("registration", || {
        let block = block();
        what = format!("the operators of {} ({}:{})", block.namespace, block.file, block.line);
        block.register()
    });
    let Some(error) = error else { return };
    let text = format!("{what} are not registered: {}", error.replace('\n', " "));
    eprintln!("tch-extension: {text}");
    let mut errors = ERRORS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    errors.push(text);
}

/// What failed when the [`operators!`](crate::operators) of this program or library were registered.
///
/// # Errors
/// The reasons, one line for each use of the macro that failed.
pub fn registration_error() -> Result<()> {
    let errors = ERRORS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if errors.is_empty() { Ok(()) } else { Err(Error::msg(errors.join("\n"))) }
}
