//! Structs of costs, which are read, written and fitted by the names of their fields.

/// How a cost on a card follows from that on another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Unit {
    /// A chain of instructions: by the clock.
    Latency,
    /// Operations on all multiprocessors: by the clock and their number.
    Work,
    /// Bytes of memory: by its bandwidth.
    Memory,
    /// Time of the host: the same for all cards.
    Host,
    /// Of a struct, whose fields have units of their own.
    Parts,
}

/// Gets a cost's name, its unit and the cost, which it may change.
pub(in crate::ops) type Visit<'a> = dyn FnMut(&str, Unit, &mut f64) + 'a;

/// Something that has costs.
pub(in crate::ops) trait Each {
    /// Visits all costs, always in the same order. Their names begin with `name`; `unit` is that of
    /// costs which know no better.
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>);
}

impl Each for f64 {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        visit(name, unit, self);
    }
}

/// Forward and backward.
impl<T: Each> Each for [T; 2] {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        for (of, direction) in self.iter_mut().zip(["forward", "backward"]) {
            of.each(&format!("{name}.{direction}"), unit, visit);
        }
    }
}

impl<T: Each> Each for Option<T> {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        if let Some(of) = self {
            of.each(name, unit, visit);
        }
    }
}

/// A struct whose fields are costs, each after its unit.
macro_rules! coefficients {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$field_meta:meta])* $unit:ident $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        $vis struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $crate::ops::costs::Each for $name {
            fn each(
                &mut self,
                name: &str,
                _: $crate::ops::costs::Unit,
                visit: &mut $crate::ops::costs::Visit<'_>,
            ) {
                use $crate::ops::costs::{Each, Unit};
                let name = if name.is_empty() { String::new() } else { format!("{name}.") };
                $(
                    let field = format!("{name}{}", stringify!($field));
                    Each::each(&mut self.$field, &field, Unit::$unit, visit);
                )*
            }
        }
    };
}
pub(in crate::ops) use coefficients;
