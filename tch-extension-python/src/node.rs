//! Operators that are not yet one definition: each is two registered operators, one for each
//! direction, and says how they are called.

use std::sync::OnceLock;
use tch_extension::Result;
use tch_extension::library::Operator;
pub use tch_extension::operator::traced::*;

/// The registered operator, which is looked up once.
///
/// # Errors
/// If it is not registered.
pub fn operator(found: &'static OnceLock<Operator>, name: &str) -> Result<&'static Operator> {
    if let Some(operator) = found.get() {
        return Ok(operator);
    }
    let operator = Operator::find(name)?;
    Ok(found.get_or_init(|| operator))
}

/// Calls a registered operator of this package.
macro_rules! call {
    ($name:literal, $($argument:expr),* $(,)?) => {{
        static FOUND: std::sync::OnceLock<tch_extension::library::Operator> =
            std::sync::OnceLock::new();
        $crate::node::operator(&FOUND, concat!("tch_extension::", $name))?
            .call(tch_extension::args![$($argument),*])
    }};
}
pub(crate) use call;
