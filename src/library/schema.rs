//! The schema of an operator.

use super::Args;
use crate::ffi::exceptions;
use crate::ffi::library as ffi;
use crate::{Error, Result};

/// An argument as the schema describes it.
pub(super) struct Argument {
    pub name: String,
    pub kind: String,
    has_default: bool,
    by_name_only: bool,
    pub is_written: bool,
}

/// A schema. It is read once, when an operator is found.
pub(super) struct Schema {
    /// `ns::name.overload`
    pub name: String,
    pub text: String,
    pub arguments: Vec<Argument>,
}

impl Schema {
    pub fn read(name: String, operator: &ffi::Operator) -> Result<Schema> {
        let arguments = operator.arguments()?.lines().map(argument).collect::<Option<_>>();
        let arguments =
            arguments.ok_or_else(|| Error::msg(format!("{name}: its arguments are unreadable")))?;
        Ok(Schema { text: operator.schema()?, arguments, name })
    }

    /// Returns one value for each argument, in the order of the schema.
    pub fn arrange<'a>(&self, args: Args<'a>) -> Result<Vec<ffi::Value<'a>>> {
        let given = args.positional.len();
        let places = self.arguments.iter().take_while(|argument| !argument.by_name_only).count();
        if given > places {
            return Err(self.error(format!("it takes {places} arguments by position, got {given}")));
        }
        let mut values: Vec<Option<ffi::Value<'a>>> = Vec::with_capacity(self.arguments.len());
        values.extend(args.positional.into_iter().map(Some));
        values.resize_with(self.arguments.len(), || None);
        for (name, value) in args.named {
            let Some(index) = self.arguments.iter().position(|argument| argument.name == name)
            else {
                return Err(self.error(format!("it has no argument `{name}`")));
            };
            if values[index].replace(value.0).is_some() {
                return Err(self.error(format!("its argument `{name}` is given twice")));
            }
        }
        let with_defaults = values.into_iter().zip(&self.arguments).map(|(value, argument)| {
            let default = || argument.has_default.then(ffi::Value::default_of_the_schema);
            value.or_else(default).ok_or_else(|| self.wrong(argument, "nothing".to_string()))
        });
        with_defaults.collect()
    }

    pub fn wrong(&self, argument: &Argument, got: String) -> Error {
        let hint = format!("the schema is {}", self.text);
        Error::argument(&self.name, &argument.name, argument.kind.as_str(), got, hint)
    }

    pub fn error(&self, message: impl std::fmt::Display) -> Error {
        let message = message.to_string();
        // The message may be the operator's own, and have any number of lines.
        let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = format!("{}; the schema is {}", exceptions::named(&self.name, &line), self.text);
        exceptions::known_as(&message, &text);
        Error::Torch(text)
    }
}

/// Parses a line of `ffi::Operator::arguments`.
fn argument(line: &str) -> Option<Argument> {
    let mut fields = line.split('\t');
    let (name, kind, flags) = (fields.next()?, fields.next()?, fields.next()?);
    Some(Argument {
        name: name.to_string(),
        kind: kind.to_string(),
        has_default: flags.contains('d'),
        by_name_only: flags.contains('k'),
        is_written: flags.contains('w'),
    })
}
