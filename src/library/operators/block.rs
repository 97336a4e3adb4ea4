//! What [`operators!`](crate::operators) expands to: a list of definitions, which are registered when
//! the library or program is loaded.

use super::types::Default;
use crate::ffi::define::{self as ffi, Kernel, Place, Registrations, TypedKernel};
use crate::ffi::exceptions;
use crate::ffi::library::Operator;
use crate::library::define::{define_at, implement_at};
use crate::{Error, Result};
use std::borrow::Cow;

/// An argument in a schema.
pub struct Argument {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Its type.
    pub schema: String,
    /// Its default value.
    pub default: Option<Default>,
    /// Whether the operator writes to it.
    pub written: bool,
}

/// A kernel for a dispatch key.
pub struct Implementation {
    /// The key.
    pub key: &'static str,
    /// The kernel.
    pub kernel: TypedKernel,
    /// Whether it is for the key `Autograd` and needed only if there is something to differentiate.
    pub only_for_graphs: bool,
}

/// An operator with its kernels.
pub struct Definition {
    /// Its name, without the namespace.
    pub name: &'static str,
    /// Whether it draws random numbers.
    pub is_seeded: bool,
    /// Its arguments.
    pub arguments: Vec<Argument>,
    /// The types of its results.
    pub results: String,
    /// Its kernels.
    pub kernels: &'static [Implementation],
}

/// Whether one of the kernels computes results: that of `Meta` knows only sizes, and those of keys
/// such as `Autograd` and `AutocastCPU` call others.
pub const fn has_kernel(kernels: &[Implementation]) -> bool {
    let mut index = 0;
    while index < kernels.len() {
        match kernels[index].key.as_bytes() {
            b"Meta" | [b'A', b'u', b't', b'o', ..] => index += 1,
            _ => return true,
        }
    }
    false
}

impl Definition {
    fn schema(&self) -> String {
        let arguments = self.arguments.iter().map(|argument| {
            let default = argument
                .default
                .as_ref()
                .map_or(String::new(), |default| format!("={}", default.text));
            format!("{} {}{default}", argument.schema, argument.name)
        });
        let arguments = arguments.collect::<Vec<_>>().join(", ");
        format!("{}({arguments}) -> {}", self.name, self.results)
    }

    /// Compares what is meant with what libtorch read in the schema.
    fn check(&self, namespace: &str) -> Result<()> {
        let name = format!("{namespace}::{}", self.name);
        let Some(operator) = Operator::find(&name, "")? else {
            return Err(Error::msg(format!(
                "{name}: libtorch does not find it after its definition"
            )));
        };
        let meant: String = self.arguments.iter().map(Argument::line).collect();
        let read = operator.arguments()?;
        let schema = operator.schema()?;
        let results = schema.rsplit_once("-> ").map_or("", |(_, results)| results);
        let defaults = operator.defaults()?;
        let same_defaults = self.arguments.iter().zip(&defaults).all(|(argument, read)| {
            let meant = argument.default.as_ref().map(|default| &default.value);
            format!("{meant:?}") == format!("{:?}", read.as_ref())
        });
        if meant == read && results == self.results && same_defaults {
            return Ok(());
        }
        Err(Error::msg(format!("{name}: libtorch reads {} as {schema}", self.schema())))
    }

    fn implement(
        &self,
        registrations: &Registrations,
        namespace: &str,
        place: Place<'_>,
    ) -> Result<()> {
        for implementation in self.kernels {
            let kernel = match implementation.only_for_graphs {
                true => Kernel::Graph(implementation.kernel),
                false => Kernel::Typed(implementation.kernel),
            };
            implement_at(registrations, namespace, self.name, implementation.key, kernel, place)?;
        }
        if self.arguments.iter().any(|argument| argument.written) {
            ffi::count_changes(registrations, namespace, self.name, place)?;
        }
        Ok(())
    }
}

impl Argument {
    /// The line that [`Operator::arguments`] has for it.
    fn line(&self) -> String {
        // libtorch prints the type without what it says about writing.
        let kind = match (self.schema.find('('), self.schema.find(')')) {
            (Some(open), Some(close)) => {
                format!("{}{}", &self.schema[..open], &self.schema[close + 1..])
            }
            _ => self.schema.clone(),
        };
        let default = if self.default.is_some() { "d" } else { "" };
        let written = if self.written { "w" } else { "" };
        format!("{}\t{kind}\t{default}{written}\n", self.name)
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
    /// Registers all operators, or none if something is wrong with one of them.
    fn register(&self) -> Result<()> {
        ffi::check_version()?;
        let place = Place { file: self.file, line: self.line };
        for operator in &self.operators {
            let name = format!("{}::{}", self.namespace, operator.name);
            if Operator::find(&name, "")?.is_some() {
                return Err(self.defined_already(&name, operator, place));
            }
        }
        let registrations = Registrations::new();
        for operator in &self.operators {
            let is_seeded = operator.is_seeded;
            define_at(&registrations, self.namespace, &operator.schema(), is_seeded, place)?;
            operator.check(self.namespace)?;
        }
        for operator in &self.operators {
            operator.implement(&registrations, self.namespace, place)?;
        }
        registrations.keep();
        Ok(())
    }
}

impl Block {
    fn defined_already(&self, name: &str, operator: &Definition, place: Place<'_>) -> Error {
        // libtorch's own refusal says who defined it.
        let refusal =
            define_at(&Registrations::new(), self.namespace, &operator.schema(), false, place)
                .err();
        let refusal = refusal.map_or(String::new(), |error| error.to_string());
        let before =
            refusal.rsplit_once("Original registration: ").map(|(_, before)| before.trim());
        Error::msg(format!(
            "{name} is defined already, {}; is this library loaded twice?",
            before.unwrap_or("registered elsewhere")
        ))
    }
}

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
    let line = error.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = format!("{what} are not registered: {line}");
    eprintln!("tch-extension: {text}");
    ffi::note_registration_error(&text);
}

/// What failed when the [`operators!`](crate::operators) of this program or library were registered.
/// Python reads the same text from the library by the C function `const char*
/// tch_extension_registration_error()`, which returns null if nothing failed.
///
/// # Errors
/// The reasons, one line for each use of the macro that failed.
pub fn registration_error() -> Result<()> {
    ffi::registration_error().map_or(Ok(()), |text| Err(Error::msg(text)))
}
