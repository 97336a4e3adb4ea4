//! The macro that defines operators, and what it expands to.

mod block;
mod graph;
mod types;

use crate::Error;
use crate::ffi::exceptions::known_as;
use crate::python::in_python;
pub use block::registration_error;

/// What [`operators!`](crate::operators) expands to. It is no stable API.
#[doc(hidden)]
pub mod expansion {
    pub use super::block::{Argument, Block, Definition, Implementation, has_kernel, register};
    pub use super::graph::{Backward, Graph, Place, Slot, differentiate};
    pub use super::types::{ArgumentType, Default, Give, Read, ResultType, Tensors};
    pub use crate::Result;
    pub use crate::ffi::define::Call;

    /// A kernel as libtorch calls it.
    pub type Kernel = fn(&mut Call<'_>) -> Result<()>;

    /// The default value of an argument, checked against its type.
    pub fn default<T: ArgumentType>(value: T::Default) -> Option<Default> {
        Some(T::default(value))
    }

    /// The result of a kernel, whose error has Python's words.
    #[inline]
    pub fn told<T>(result: Result<T>) -> Result<T> {
        result.map_err(super::for_python)
    }

    /// Gives a result to libtorch, in the place of the arguments.
    #[inline]
    pub fn give(call: &mut Call<'_>, result: impl Give) -> Result<()> {
        call.drop_arguments();
        result.give(call, 0)
    }

    /// Reads the next argument.
    #[inline]
    pub fn hold<'c, T: Read>(call: &'c Call<'_>, index: &mut usize) -> Result<T::Held<'c>> {
        *index += 1;
        T::hold(call.argument(*index - 1))
    }
}

/// The same error in Python's words, if this crate has written it. The text of any other error is its
/// author's.
pub(crate) fn for_python(error: Error) -> Error {
    match error {
        Error::Argument { op, argument, expected, got, hint } => Error::Argument {
            op,
            argument,
            expected: in_python(&expected),
            got: in_python(&got),
            hint: in_python(&hint),
        },
        Error::Autograd(text) => {
            let python = in_python(&text);
            known_as(&text, &python);
            Error::Autograd(python)
        }
        other => other,
    }
}

/// Defines operators and registers them with libtorch's dispatcher: `TORCH_LIBRARY` for Rust.
///
/// Python then finds them in `torch.ops`, [`Operator::find`](crate::library::Operator::find) finds
/// them in Rust, and `torch.compile`, `torch.export`, AOTInductor, TorchScript and C++ see them with
/// their gradients. They are registered when the program, or the library that Python loads, starts.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::library::{Operator, new_empty, sizes};
/// use tch_extension::{Result, args};
///
/// tch_extension::operators! {
///     namespace macro_example;
///
///     /// a * b + c, with a gradient. In Python: torch.ops.macro_example.muladd(a, b).
///     fn muladd(a: &Tensor, b: &Tensor, c: f64 = 1.0) -> Tensor {
///         cpu = muladd,
///         fake = |a, _b, _c| new_empty(a, &sizes(a)),
///         backward = |ctx, grads| {
///             let (grad, a, b) = (grads.get(0)?, ctx.saved(0)?, ctx.saved(1)?);
///             Ok([grad * b, grad * a].into())
///         },
///         save = [a, b],
///         double_backward = true,
///     }
///
///     /// It consists of other operators, and needs nothing else.
///     fn square(x: &Tensor) -> Tensor {
///         composite = |x| Ok(x * x),
///     }
/// }
///
/// fn muladd(a: &Tensor, b: &Tensor, c: f64) -> Result<Tensor> {
///     Ok(a * b + c)
/// }
///
/// # fn main() -> Result<()> {
/// let (a, b) = (Tensor::from(2.0).set_requires_grad(true), Tensor::from(5.0));
/// let y: Tensor = Operator::find("macro_example::muladd")?.call(args![&a, &b])?;
/// y.backward();
/// assert_eq!((f64::try_from(y)?, f64::try_from(a.grad())?), (11.0, 5.0));
/// # Ok(())
/// # }
/// ```
///
/// # Types
/// The schema is made from the signature, and compared with what libtorch reads in it. The types of
/// all kernels are checked by the compiler.
///
/// | in the signature | in the schema | written in Python as |
/// |---|---|---|
/// | `&Tensor`, `&[Tensor]`, `&[Option<Tensor>]` | `Tensor`, `Tensor[]`, `Tensor?[]` | a tensor, a list of them |
/// | `&mut Tensor` | `Tensor(a!)` | a tensor that the operator changes |
/// | `i64`, `&[i64]`, `Vec<i64>` | `int`, `int[]` | ints |
/// | [`SymInt`](crate::library::SymInt), `&[SymInt]` | `SymInt`, `SymInt[]` | ints that are sizes |
/// | `f64`, `&[f64]`, `bool`, `&[bool]`, `&str` | `float`, `float[]`, `bool`, `bool[]`, `str` | |
/// | `Kind`, `Device` | `ScalarType`, `Device` | a `torch.dtype`, a `torch.device` |
/// | `Option<T>` of these | `T?` | `None` is possible |
///
/// A default value is an expression of the type: `eps: f64 = 1e-5`, `bias: Option<&Tensor> = None`,
/// `dims: &[i64] = &[0, 1]`, `how: &str = "mean"`. Results are `Tensor`, `Option<Tensor>`,
/// `Vec<Tensor>`, `i64`, `SymInt`, `f64`, `bool`, or a tuple of up to 8 of them; without `->` there is
/// none.
///
/// While a program is traced for any size, its sizes are symbols. If `n: i64` gets one, what is
/// traced works for that size only. With `n: SymInt` it works for all: the kernels `cpu` and `cuda`
/// still get an `i64`, because they run on numbers, and the others get a
/// [`SymInt`](crate::library::SymInt).
///
/// # Kernels
/// Each is a function or a closure without captured values, with the signature's types, that returns
/// a [`Result`](crate::Result). An `Err` or a panic is a `RuntimeError` in Python. What
/// [`check!`](crate::check!) says of an argument then has Python's words, such as `torch.float32` for
/// `Float`. Several keys can have one kernel: `cpu, cuda = f`. An operator needs at least one that
/// computes: `cpu`, `cuda`, `composite`, or a `key` of another device.
///
/// | | runs for |
/// |---|---|
/// | `cpu`, `cuda` | tensors on that device. `cuda` can be there without a GPU or CUDA |
/// | `fake` | fake tensors, with sizes and no values, while a program is traced: [`sizes`](crate::library::sizes) and [`empty`](crate::library::empty) keep it general. `torch.compile` and `torch.export` need it |
/// | `composite` | everything, in place of all others: an operator that consists of others |
/// | `key("AutocastCPU")` | any other key of the dispatcher |
///
/// # Random numbers
/// An operator that draws some has the tag `#[tag(nondeterministic_seeded)]` between its documentation and `fn`, so that
/// `torch.compile` neither merges its calls nor computes them anew. Within vmap it must do what the
/// caller chose as `randomness`. A kernel for `key("FuncTorchVmapMode")`, which runs first there, can
/// draw the numbers by libtorch's operators, which do, and then call the operator without its random
/// part by [`without_key`](crate::library::without_key).
///
/// # Gradients
/// - `backward` is a function of a [`CallContext`](crate::library::CallContext) and the gradients of
///   the results. It returns a gradient for each argument that is a tensor, in their order; an absent
///   one counts, and those of a list count one by one. [`saved`](crate::autograd::Context::saved)
///   finds what `save` names: arguments, `result`, or `result.1` of several, and without `save` all
///   arguments and then all results. Other arguments are found by name with
///   [`argument`](crate::library::CallContext::argument). With `double_backward = true`, it can be
///   differentiated itself
///   ([`Function::DOUBLE_BACKWARD`](crate::autograd::Function::DOUBLE_BACKWARD)). For an operator that
///   changes arguments in place, the first gradients are those of these arguments.
/// - `autograd` is a kernel for the key `Autograd`, for what `backward` cannot say. It runs first, and
///   calls its operator again with [`below_autograd`](crate::library::below_autograd), usually inside
///   a [`Function`](crate::autograd::Function).
/// - `composite` operators have the gradient of what they call.
/// - Without any of them, a backward pass through the operator is an error that names it.
///
/// While a program is traced, backward passes are traced, too. So `backward` may call operators of tch
/// and registered ones, and it must not read memory. If it needs a kernel of its own, make it an
/// operator, such as `muladd_backward`, with a `fake` of its own.
///
/// # Registration
/// The macro can be used several times in a crate, with the same namespace or others. Each use registers
/// all its operators or none. An operator that is defined already, a key that libtorch does not know, or
/// a libtorch of another version, makes one line on stderr and an error in
/// [`registration_error`](crate::library::registration_error); the program goes on. Registration never
/// ends, so a library must never be unloaded: `tch_extension_build::python_link_args` in build.rs
/// sees to it.
#[macro_export]
macro_rules! operators {
    (namespace $namespace:ident; $($(#[doc = $doc:expr])* $(#[tag($tag:ident)])? fn $name:ident($($arguments:tt)*) $(-> $result:ty)? { $($kernels:tt)* })*) => {
        const _: () = {
            fn block() -> $crate::library::expansion::Block {
                $crate::library::expansion::Block {
                    namespace: stringify!($namespace),
                    file: file!(),
                    line: line!(),
                    operators: vec![$($crate::operators!(@operator ($($tag)?) $name ($($arguments)*) ($($result)?) { $($kernels)* })),*],
                }
            }
            extern "C" fn initialize() {
                $crate::library::expansion::register(block);
            }
            $crate::tch_extension_when_loaded!(initialize);
        };
    };

    (@operator $tag:tt $name:ident ($($argument:ident: $type:ty $(= $default:expr)?),* $(,)?) $result:tt { $($kernels:tt)* }) => {
        $crate::library::expansion::Definition {
            name: stringify!($name),
            is_seeded: $crate::operators!(@is_seeded $tag),
            arguments: {
                let mut index = 0_usize;
                let mut arguments = Vec::new();
                $(
                    arguments.push($crate::library::expansion::Argument {
                        name: stringify!($argument).into(),
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
            kernels: {
                const KERNELS: &[$crate::library::expansion::Implementation] =
                    $crate::operators!(@kernels [] [default all false] ($name $($argument: $type),*) $result $($kernels)*);
                const _: () = assert!(
                    $crate::library::expansion::has_kernel(KERNELS),
                    concat!(
                        "operators!: ", stringify!($name),
                        " has nothing that computes its results: give it a kernel `cpu`, `cuda` or `composite`"
                    )
                );
                KERNELS
            },
        }
    };
    (@operator $tag:tt $name:ident $arguments:tt $result:tt $kernels:tt) => {
        compile_error!(concat!(
            "operators!: ", stringify!($name), stringify!($arguments),
            ": an argument is written as `name: Type` or `name: Type = default`"
        ))
    };

    (@is_seeded ()) => { false };
    (@is_seeded (nondeterministic_seeded)) => { true };
    (@is_seeded ($tag:ident)) => {
        compile_error!(concat!(
            "operators!: #[tag(", stringify!($tag), ")]: the only tag is `nondeterministic_seeded`"
        ))
    };

    (@default $type:ty) => { None };
    (@default $type:ty, $default:expr) => { $crate::library::expansion::default::<$type>($default) };

    (@result ()) => { () };
    (@result ($result:ty)) => { $result };

    // The kernels, one after the other: what is done, how the operator is differentiated, the
    // signature, and what is left.
    (@kernels $done:tt [composite all false] ($name:ident $($signature:tt)*) $result:tt $key:ident $($rest:tt)*) => {
        compile_error!(concat!(
            "operators!: ", stringify!($name), ": `", stringify!($key),
            "` does not go with `composite`, which is the whole operator, with its gradient"
        ))
    };
    (@kernels $done:tt $graph:tt $signature:tt $result:tt cpu = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $graph $signature $result "CPU" Kernel ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $graph:tt $signature:tt $result:tt cuda = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $graph $signature $result "CUDA" Kernel ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $graph:tt $signature:tt $result:tt cpu, cuda = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernels $done $graph $signature $result cpu = $kernel, cuda = $kernel $(, $($rest)*)?)
    };
    (@kernels $done:tt $graph:tt $signature:tt $result:tt fake = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $graph $signature $result "Meta" Traced ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt $graph:tt $signature:tt $result:tt key($key:literal) = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done $graph $signature $result $key Traced ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt [default all false] $signature:tt $result:tt autograd = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel $done [own all false] $signature $result "Autograd" Traced ($kernel) $($($rest)*)?)
    };
    (@kernels [] [default all false] $signature:tt $result:tt composite = $kernel:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernel [] [composite all false] $signature $result "CompositeImplicitAutograd" Traced ($kernel) $($($rest)*)?)
    };
    (@kernels $done:tt [default $save:tt $double:tt] $signature:tt $result:tt backward = $backward:expr $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernels $done [($backward) $save $double] $signature $result $($($rest)*)?)
    };
    (@kernels $done:tt [$backward:tt all $double:tt] $signature:tt $result:tt save = [$($saved:tt)*] $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernels $done [$backward [$($saved)*] $double] $signature $result $($($rest)*)?)
    };
    (@kernels $done:tt [$backward:tt $save:tt false] $signature:tt $result:tt double_backward = $double:literal $(, $($rest:tt)*)?) => {
        $crate::operators!(@kernels $done [$backward $save $double] $signature $result $($($rest)*)?)
    };

    // The end.
    (@kernels [$($done:tt)*] [own all false] $signature:tt $result:tt) => { &[$($done)*] };
    (@kernels [$($done:tt)*] [composite all false] $signature:tt $result:tt) => { &[$($done)*] };
    (@kernels [$($done:tt)*] [default all false] $signature:tt $result:tt) => {
        &[$($done)* $crate::operators!(@graph $signature None, None, false)]
    };
    (@kernels [$($done:tt)*] [($backward:expr) all $double:tt] $signature:tt $result:tt) => {
        &[$($done)* $crate::operators!(@graph $signature Some({
            const BACKWARD: $crate::library::expansion::Backward = $backward;
            BACKWARD
        }), None, $double)]
    };
    (@kernels [$($done:tt)*] [($backward:expr) [$($save:tt)*] $double:tt] $signature:tt $result:tt) => {
        &[$($done)* $crate::operators!(@graph $signature Some({
            const BACKWARD: $crate::library::expansion::Backward = $backward;
            BACKWARD
        }), Some($crate::operators!(@slots $signature [] $($save)*)), $double)]
    };

    // What does not fit.
    (@kernels $done:tt $graph:tt ($name:ident $($signature:tt)*) $result:tt composite = $($rest:tt)*) => {
        compile_error!(concat!(
            "operators!: ", stringify!($name), ": `composite` is the whole operator, with its gradient: nothing else goes with it"
        ))
    };
    (@kernels $done:tt [own all false] ($name:ident $($signature:tt)*) $result:tt $key:ident $($rest:tt)*) => {
        compile_error!(concat!(
            "operators!: ", stringify!($name), ": `", stringify!($key),
            "` does not go with `autograd`, which is the operator's gradient already"
        ))
    };
    (@kernels $done:tt [$backward:tt $save:tt $double:tt] ($name:ident $($signature:tt)*) $result:tt) => {
        compile_error!(concat!(
            "operators!: ", stringify!($name), ": `save` and `double_backward` need a `backward`"
        ))
    };
    (@kernels $done:tt $graph:tt ($name:ident $($signature:tt)*) $result:tt $key:ident $($rest:tt)*) => {
        compile_error!(concat!(
            "operators!: ", stringify!($name), ": `", stringify!($key), "`: expected one each of `cpu = kernel`, \
             `cuda = kernel`, `fake = kernel`, `key(\"…\") = kernel`, and of `composite = function`, `autograd = function` or \
             `backward = function` with `save = [arguments]` and `double_backward = true`"
        ))
    };

    (@kernel [$($done:tt)*] $graph:tt ($name:ident $($argument:ident: $type:ty),*) $result:tt $key:literal $view:ident ($kernel:expr) $($rest:tt)*) => {
        $crate::operators!(@kernels [$($done)* $crate::library::expansion::Implementation {
            key: $key,
            kernel: {
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
                        $crate::library::expansion::told(kernel($(
                            <<$type as $crate::library::expansion::ArgumentType>::$view as $crate::library::expansion::Read>::give(&mut $argument)
                        ),*))?
                    };
                    $crate::library::expansion::give(call, result)
                }
                run as $crate::library::expansion::Kernel
            },
            only_for_graphs: false,
        },] $graph ($name $($argument: $type),*) $result $($rest)*)
    };

    (@graph ($name:ident $($argument:ident: $type:ty),*) $backward:expr, $save:expr, $double:expr) => {
        $crate::library::expansion::Implementation {
            key: "Autograd",
            kernel: {
                static GRAPH: $crate::library::expansion::Graph = $crate::library::expansion::Graph {
                    name: stringify!($name),
                    arguments: &[$($crate::library::expansion::Place {
                        name: stringify!($argument),
                        schema: <$type as $crate::library::expansion::ArgumentType>::schema,
                        tensors: <$type as $crate::library::expansion::ArgumentType>::TENSORS,
                        written: <$type as $crate::library::expansion::ArgumentType>::WRITTEN,
                    }),*],
                    backward: $backward,
                    save: $save,
                    double_backward: $double,
                }
                .checked();
                fn run(call: &mut $crate::library::expansion::Call<'_>) -> $crate::Result<()> {
                    $crate::library::expansion::differentiate(call, &GRAPH)
                }
                run as $crate::library::expansion::Kernel
            },
            only_for_graphs: true,
        }
    };

    // What is saved: arguments by their names, `result`, and `result.1` of several.
    (@slots $signature:tt [$($done:tt)*]) => { &[$($done)*] };
    (@slots $signature:tt [$($done:tt)*] result . $index:literal $(, $($rest:tt)*)?) => {
        $crate::operators!(@slots $signature [$($done)* $crate::library::expansion::Slot::Result($index),] $($($rest)*)?)
    };
    (@slots $signature:tt [$($done:tt)*] result $(, $($rest:tt)*)?) => {
        $crate::operators!(@slots $signature [$($done)* $crate::library::expansion::Slot::Result(0),] $($($rest)*)?)
    };
    (@slots ($name:ident $($argument:ident: $type:ty),*) [$($done:tt)*] $saved:ident $(, $($rest:tt)*)?) => {
        $crate::operators!(@slots ($name $($argument: $type),*) [$($done)* $crate::library::expansion::Slot::Argument({
            #[allow(non_camel_case_types, dead_code)]
            enum Arguments { $($argument),* }
            Arguments::$saved as usize
        }),] $($($rest)*)?)
    };

    ($($other:tt)*) => {
        compile_error!(
            "operators!: expected `namespace NAME;` and then operators such as `fn add(a: &Tensor, b: &Tensor) -> Tensor { cpu = add, fake = fake_add }`"
        );
    };
}
