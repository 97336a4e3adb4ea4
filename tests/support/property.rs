//! Random cases: for any shapes, layouts, kinds and requested gradients, an operator gives what its
//! reference gives, or refuses what the reference refuses.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use std::fmt::Write;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::testing::{Layout, assert_as_accurate, assert_close, tolerance};

/// One input of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    pub size: Vec<i64>,
    pub kind: Kind,
    pub layout: Layout,
    pub requires_grad: bool,
}

/// The inputs of one call; an absent input is `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct Case(pub Vec<Option<Argument>>);

pub type Call<'a> = &'a dyn Fn(&[Option<Tensor>]) -> Result<Vec<Tensor>>;

pub struct Property<'a> {
    /// The operator's name, with which its errors must begin.
    pub name: &'a str,
    pub fused: Call<'a>,
    /// The same in libtorch's operations. What they refuse must be refused.
    pub reference: Call<'a>,
    /// What the operator's docs exclude although libtorch accepts it.
    pub excluded: &'a dyn Fn(&Case) -> bool,
}

/// Whether a property holds for a case; if not, what is wrong.
type Verdict = std::result::Result<(), String>;

impl Property<'_> {
    /// Tries many cases, which are the same in every run. A failing case is shrunk as far as
    /// possible and printed as a test.
    pub fn holds_for(&self, cases: impl Strategy<Value = Case>, count: u32, device: Device) {
        if let Err(report) = self.try_cases(cases, count, device) {
            panic!("{report}");
        }
    }

    pub fn try_cases(
        &self,
        cases: impl Strategy<Value = Case>,
        count: u32,
        device: Device,
    ) -> Verdict {
        let config = Config {
            cases: count,
            failure_persistence: None,
            max_shrink_iters: 2000,
            ..Config::default()
        };
        let mut runner =
            TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        let tried =
            runner.run(&cases, |case| self.check(&case, device).map_err(TestCaseError::fail));
        tried.map_err(|error| match error {
            TestError::Fail(reason, case) => {
                format!("{reason}\n\nas a test:\n\n{}", case.code(device))
            }
            TestError::Abort(reason) => reason.to_string(),
        })
    }

    pub fn check(&self, case: &Case, device: Device) -> Verdict {
        let inputs = case.tensors(device);
        let versions = |inputs: &[Option<Tensor>]| -> Vec<Option<i64>> {
            inputs.iter().map(|input| input.as_ref().map(Tensor::internal_version)).collect()
        };
        let before = versions(&inputs);
        let found = (self.fused)(&inputs);
        if versions(&inputs) != before {
            return Err("an input was changed".to_string());
        }
        let others = case.tensors(device);
        match (found, (self.reference)(&others)) {
            (Err(error), Ok(_)) if !(self.excluded)(case) => {
                Err(format!("refused, but libtorch takes it: {error}"))
            }
            (Err(error), _) => self.check_message(&error.to_string()),
            (Ok(_), _) if (self.excluded)(case) => {
                Err("taken, but the docs exclude it".to_string())
            }
            (Ok(_), Err(error)) => Err(format!("taken, but libtorch refuses it: {error}")),
            (Ok(found), Ok(expected)) => {
                let exact = || self.exact(case, &expected, device);
                compare("output", case, &found, &expected, &|| {
                    exact().map(|(outputs, _)| outputs)
                })?;
                let exact = || exact().map(|(_, gradients)| gradients);
                check_gradients(case, (&inputs, &found), (&others, &expected), &exact)
            }
        }
    }

    /// The reference's results in double precision for the same numbers: the outputs, and the
    /// gradients from the same incoming gradients.
    fn exact(
        &self,
        case: &Case,
        outputs: &[Tensor],
        device: Device,
    ) -> Option<(Vec<Tensor>, Vec<Tensor>)> {
        let wide = |tensor: Tensor| {
            let requires_grad = tensor.requires_grad();
            tensor.detach().to_kind(Kind::Double).set_requires_grad(requires_grad)
        };
        let inputs: Vec<Option<Tensor>> =
            case.tensors(device).into_iter().map(|input| input.map(wide)).collect();
        let exact = (self.reference)(&inputs).ok()?;
        let vectors = vectors(outputs).iter().map(|vector| vector.to_kind(Kind::Double)).collect();
        let gradients = gradients(&inputs, &exact, vectors).ok()?;
        Some((exact, gradients))
    }

    fn check_message(&self, message: &str) -> Verdict {
        if message.starts_with(self.name) && !message.contains('\n') {
            return Ok(());
        }
        Err(format!(
            "an error that does not begin with the operator, or is of several lines: {message}"
        ))
    }
}

fn check_gradients(
    case: &Case,
    (inputs, found): (&[Option<Tensor>], &[Tensor]),
    (others, expected): (&[Option<Tensor>], &[Tensor]),
    exact: Exact<'_>,
) -> Verdict {
    let requires =
        |outputs: &[Tensor]| outputs.iter().map(Tensor::requires_grad).collect::<Vec<_>>();
    if requires(found).contains(&true) != requires(expected).contains(&true) {
        return Err(format!(
            "outputs require grad: {:?}, expected {:?}",
            requires(found),
            requires(expected)
        ));
    }
    // libtorch refuses some inputs only in the backward. Then there is nothing to compare with.
    let Ok(expected) = gradients(others, expected, vectors(expected)) else { return Ok(()) };
    compare("gradient", case, &gradients(inputs, found, vectors(found))?, &expected, exact)
}

/// The incoming gradient for each output that requires grad.
fn vectors(outputs: &[Tensor]) -> Vec<Tensor> {
    outputs.iter().filter(|output| output.requires_grad()).map(super::incoming).collect()
}

/// The gradients of all inputs that require grad, from all outputs that do.
fn gradients(
    inputs: &[Option<Tensor>],
    outputs: &[Tensor],
    vectors: Vec<Tensor>,
) -> std::result::Result<Vec<Tensor>, String> {
    let outputs: Vec<&Tensor> = outputs.iter().filter(|output| output.requires_grad()).collect();
    let inputs: Vec<&Tensor> =
        inputs.iter().flatten().filter(|input| input.requires_grad()).collect();
    if outputs.is_empty() || inputs.is_empty() {
        return Ok(Vec::new());
    }
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let options = GradOptions { grad_outputs: &vectors, allow_unused: true, ..Default::default() };
    let found = grad(&outputs, &inputs, &options)
        .map_err(|error| format!("the backward failed: {error}"))?;
    let zeros =
        |(found, input): (Option<Tensor>, &&Tensor)| found.unwrap_or_else(|| input.zeros_like());
    Ok(found.into_vec().into_iter().zip(&inputs).map(zeros).collect())
}

/// The exact results, which are computed only if something differs.
type Exact<'a> = &'a dyn Fn() -> Option<Vec<Tensor>>;

/// Checks that the results are near the expected ones or, where several steps amplify the
/// reference's rounding errors, as near to the exact results as the reference is.
fn compare(
    what: &str,
    case: &Case,
    found: &[Tensor],
    expected: &[Tensor],
    exact: Exact<'_>,
) -> Verdict {
    if found.len() != expected.len() {
        return Err(format!("{} {what}s, expected {}", found.len(), expected.len()));
    }
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        // The least precise kind that takes part decides. The bounds allow several roundings of
        // sums of a few dozen terms.
        let kinds = case.0.iter().flatten().map(|argument| argument.kind).chain([expected.kind()]);
        let (rtol, atol) = kinds
            .map(tolerance)
            .fold((0.0, 0.0), |most: (f64, f64), each| (most.0.max(each.0), most.1.max(each.1)));
        let atol = 10.0 * if rtol > 1e-4 { rtol } else { atol };
        let check = || assert_close(&found.detach(), &expected.detach(), 10.0 * rtol, atol);
        let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)) else {
            continue;
        };
        let is_half = matches!(found.kind(), Kind::Half | Kind::BFloat16);
        let exact = if is_half { exact() } else { None };
        let is_as_accurate =
            exact.and_then(|exact| exact.get(index).map(Tensor::detach)).is_some_and(|exact| {
                let check = || assert_as_accurate(&found.detach(), &expected.detach(), &exact);
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok()
            });
        if !is_as_accurate {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            return Err(format!("{what} {index}: {text}"));
        }
    }
    Ok(())
}

impl Case {
    pub fn tensors(&self, device: Device) -> Vec<Option<Tensor>> {
        let tensor = |(index, argument): (usize, &Option<Argument>)| -> Option<Tensor> {
            argument.as_ref().map(|argument| argument.tensor(index, device))
        };
        self.0.iter().enumerate().map(tensor).collect()
    }

    /// The case as the code of a test, ready to be pasted.
    fn code(&self, device: Device) -> String {
        let mut code =
            "#[test]\nfn found_by_random_cases() {\n    let case = Case(vec![\n".to_string();
        for argument in &self.0 {
            let _ = match argument {
                None => writeln!(code, "        None,"),
                Some(Argument { size, kind, layout, requires_grad }) => writeln!(
                    code,
                    "        Some(Argument {{ size: vec!{size:?}, kind: Kind::{kind:?}, layout: Layout::{layout:?}, \
                     requires_grad: {requires_grad} }}),"
                ),
            };
        }
        code + &format!("    ]);\n    property().check(&case, Device::{device:?}).unwrap();\n}}\n")
    }
}

impl Argument {
    fn tensor(&self, index: usize, device: Device) -> Tensor {
        let len = self.size.iter().product::<i64>();
        let values = Tensor::arange(len, (Kind::Double, Device::Cpu)) * (1.7 + index as f64);
        let values =
            values.sin().reshape(self.size.as_slice()).to_kind(self.kind).to_device(device);
        let tensor = self.layout.of(&values).expect("a layout");
        let differentiable = self.requires_grad && values.is_floating_point();
        tensor.set_requires_grad(differentiable)
    }
}

/// The simplest sizes come first, because a failing case shrinks towards the first.
const SIZES: [i64; 20] = [1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 16, 17, 33, 1, 2, 3, 4, 5, 3, 2];

pub fn size() -> impl Strategy<Value = i64> {
    (0..SIZES.len()).prop_map(|index| SIZES[index])
}

pub fn layout() -> impl Strategy<Value = Layout> {
    proptest::sample::select(Layout::ALL.to_vec())
}

pub fn kind() -> impl Strategy<Value = Kind> {
    proptest::sample::select(super::KINDS.to_vec())
}

/// A mistake in a call.
#[derive(Clone, Debug)]
pub enum Slip {
    None,
    /// One argument has another kind.
    Kind(usize, Kind),
    /// One dimension has another size.
    Size(usize, usize, i64),
    /// One argument has a dimension more.
    Dim(usize),
    /// One argument has a dimension less.
    NoDim(usize),
}

pub fn slip() -> impl Strategy<Value = Slip> {
    let kinds =
        vec![Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Bool];
    prop_oneof![
        12 => Just(Slip::None),
        2 => (0..5usize, proptest::sample::select(kinds)).prop_map(|(index, kind)| Slip::Kind(index, kind)),
        2 => (0..5usize, 0..3usize, size()).prop_map(|(index, dim, size)| Slip::Size(index, dim, size)),
        1 => (0..5usize).prop_map(Slip::Dim),
        1 => (0..5usize).prop_map(Slip::NoDim),
    ]
}

/// Everything about a call except its sizes.
#[derive(Clone, Debug)]
pub struct Style {
    kind: Kind,
    /// The layout of each argument, and whether it requires grad.
    each: Vec<(Layout, bool)>,
    slip: Slip,
}

/// The style for this many arguments. It is drawn independently of the sizes, so that both shrink
/// on a failure.
pub fn style(count: usize) -> impl Strategy<Value = Style> {
    let each = proptest::collection::vec((layout(), any::<bool>()), count);
    (kind(), each, slip()).prop_map(|(kind, each, slip)| Style { kind, each, slip })
}

impl Style {
    /// A call with arguments of these sizes, all of one kind except for the mistake.
    pub fn case(self, sizes: Vec<Option<Vec<i64>>>) -> Case {
        let arguments = sizes.into_iter().zip(self.each).map(|(size, (layout, requires_grad))| {
            size.map(|size| Argument { size, kind: self.kind, layout, requires_grad })
        });
        slipped(arguments.collect(), self.slip)
    }
}

fn slipped(mut arguments: Vec<Option<Argument>>, slip: Slip) -> Case {
    let index = match slip {
        Slip::None => return Case(arguments),
        Slip::Kind(index, _) | Slip::Size(index, ..) | Slip::Dim(index) | Slip::NoDim(index) => {
            index
        }
    };
    if let Some(Some(argument)) = arguments.get_mut(index) {
        match slip {
            Slip::None => {}
            Slip::Kind(_, kind) => argument.kind = kind,
            Slip::Size(_, dim, size) => {
                if let Some(place) = argument.size.get_mut(dim) {
                    *place = size;
                }
            }
            Slip::Dim(_) => argument.size.insert(0, 1),
            Slip::NoDim(_) => {
                argument.size.pop();
            }
        }
    }
    Case(arguments)
}
