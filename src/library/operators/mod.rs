//! The macro that defines operators, and what it expands to.

mod block;
mod types;

pub use block::registration_error;

/// What [`operators!`](crate::operators) expands to. It is no stable API.
#[doc(hidden)]
pub mod expansion {
    pub use super::block::{Argument, Block, Definition, register};
    pub use super::types::{ArgumentType, Give, Read, ResultType};
    pub use crate::Result;
    pub use crate::ffi::define::Call;

    /// The default value of an argument, checked against its type.
    pub fn default<T: ArgumentType>(value: T::Default) -> Option<String> {
        Some(T::default(value))
    }

    /// Gives a result to libtorch, in the place of the arguments.
    pub fn give(call: &mut Call<'_>, result: impl Give) -> Result<()> {
        call.drop_arguments();
        result.give(call, 0)
    }

    /// Reads the next argument.
    pub fn hold<'c, T: Read>(call: &'c Call<'_>, index: &mut usize) -> Result<T::Held<'c>> {
        *index += 1;
        T::hold(call.argument(*index - 1))
    }
}

#[macro_export]
macro_rules! operators {
    (namespace $namespace:ident; $($(#[$meta:meta])* fn $name:ident($($arguments:tt)*) $(-> $result:ty)? { $($kernels:tt)* })*) => {
        const _: () = {
            fn block() -> $crate::library::expansion::Block {
                $crate::library::expansion::Block {
                    namespace: stringify!($namespace),
                    file: file!(),
                    line: line!(),
                    operators: vec![$($crate::operators!(@operator $name ($($arguments)*) ($($result)?) { $($kernels)* })),*],
                }
            }
            extern "C" fn initialize() {
                $crate::library::expansion::register(block);
            }
            #[used]
            #[unsafe(link_section = ".init_array")]
            static INITIALIZE: extern "C" fn() = initialize;
        };
    };

    (@operator $name:ident ($($argument:ident: $type:ty $(= $default:expr)?),* $(,)?) $result:tt { $($kernels:tt)* }) => {
        $crate::library::expansion::Definition {
            name: stringify!($name),
            arguments: {
                let mut index = 0_usize;
                let mut arguments = Vec::new();
                $(
                    arguments.push($crate::library::expansion::Argument {
                        name: stringify!($argument),
                        schema: <$type as $crate::library::expansion::ArgumentType>::schema(index),
                        default: $crate::operators!(@default $type $(, $default)?),
                        written: <$type as $crate::library::expansion::ArgumentType>::WRITTEN,
                    });
                    index += 1;
                )*
                let _ = index;
                arguments
            },
            results: <$crate::operators!(@result $result) as $crate::library::expansion::ResultType>::schema(),
            kernels: $crate::operators!(@kernels [] ($($argument: $type),*) $result $($kernels)*),
        }
    };

    (@default $type:ty) => { None };
    (@default $type:ty, $default:expr) => { $crate::library::expansion::default::<$type>($default) };

    (@result ()) => { () };
    (@result ($result:ty)) => { $result };

    (@kernels [$($done:tt)*] $arguments:tt $result:tt) => { vec![$($done)*] };
    (@kernels $done:tt $arguments:tt $result:tt cpu = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $arguments $result "CPU" Kernel ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $arguments:tt $result:tt cuda = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $arguments $result "CUDA" Kernel ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $arguments:tt $result:tt fake = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $arguments $result "Meta" Traced ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $arguments:tt $result:tt autograd = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $arguments $result "Autograd" Traced ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $arguments:tt $result:tt composite = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $arguments $result "CompositeImplicitAutograd" Traced ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $arguments:tt $result:tt key($key:literal) = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $arguments $result $key Traced ($kernel) $($($rest)*)?)
    };

    (@kernel [$($done:tt)*] ($($argument:ident: $type:ty),*) $result:tt $key:literal $view:ident ($kernel:expr) $($rest:tt)*) => {
        $crate::operators!(@kernels [$($done)* ($key, {
            fn run(call: &mut $crate::library::expansion::Call<'_>) -> $crate::Result<()> {
                let result = {
                    let kernel: fn($(
                        <<$type as $crate::library::expansion::ArgumentType>::$view as $crate::library::expansion::Read>::Given<'_>
                    ),*) -> $crate::Result<
                        <$crate::operators!(@result $result) as $crate::library::expansion::ResultType>::$view
                    > = $kernel;
                    let mut index = 0_usize;
                    $(
                        let mut $argument = $crate::library::expansion::hold::<
                            <$type as $crate::library::expansion::ArgumentType>::$view
                        >(call, &mut index)?;
                    )*
                    let _ = index;
                    kernel($(
                        <<$type as $crate::library::expansion::ArgumentType>::$view as $crate::library::expansion::Read>::give(&mut $argument)
                    ),*)?
                };
                $crate::library::expansion::give(call, result)
            }
            run as fn(&mut $crate::library::expansion::Call<'_>) -> $crate::Result<()>
        }),] ($($argument: $type),*) $result $($rest)*)
    };
}
