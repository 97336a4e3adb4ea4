//! Tests that every operator must pass: of its values, its gradients and their derivatives, in
//! every kind and on every device, for a table of samples. Files of this folder that need a family of
//! operators are no modules of this library but of the programs that share them.
#![allow(missing_docs)]

pub mod alike;
mod backtrace;
pub mod compile;
pub mod gpu;
pub mod kinds;
pub mod packed;
pub mod property;
pub mod python;
pub mod refusal;
mod root;
pub mod tvm_ffi;

pub use root::root;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad, saved_tensors_hooks};
use tch_extension::testing::{
    ConformanceOptions, Layout, Sample, assert_as_accurate, assert_close, conformance,
    cuda_or_skip, devices, gradcheck, gradgradcheck, tolerance,
};

pub const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// Rows, and the multiples of 8 bytes that each has, for the norms: in half kinds (5, 2068) and
/// (3, 11576), and sizes for each kernel.
pub const ROWS_OF_EIGHTS: [(i64, i64); 10] = [
    (5, 1),
    (300, 3),
    (40, 25),
    (6, 255),
    (5, 517),
    (3, 2894),
    (3, 4099), // more than 64 bytes for each thread of a block
    (3, 8203), // more than a block holds
    (140, 8203),
    (2, 33_001), // more than a cluster holds
];

/// A copy of the values that begins `offset` elements after the start of an array, which otherwise
/// holds NaN.
pub fn among_nan(tensor: &Tensor, offset: i64) -> Tensor {
    let around = Tensor::full(
        [tensor.numel() as i64 + offset + 16],
        f64::NAN,
        (tensor.kind(), tensor.device()),
    );
    let mut inside = around.narrow(0, offset, tensor.numel() as i64).view(&tensor.size()[..]);
    inside.copy_(&tensor.detach());
    inside
}

/// Checks that the values are equal up to the rounding of another order of sums. Values that are
/// not finite are never close.
pub fn assert_as_close(actual: &Tensor, expected: &Tensor, kind: Kind) {
    let tolerance = match kind {
        Kind::Double => 1e-12,
        Kind::Float => 1e-4,
        _ => 2e-2,
    };
    assert!(bool::try_from(expected.isfinite().all()).expect("one"));
    assert_close(actual, expected, tolerance, tolerance);
}

pub type Operator<'a> = &'a (dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Sync);

/// An operator, its reference in tch operations, and samples of inputs for both.
pub struct Suite<'a> {
    pub fused: Operator<'a>,
    pub reference: Operator<'a>,
    /// Samples that are small enough for a whole Jacobian.
    pub small: &'a dyn Fn(Kind, Device) -> Vec<Sample>,
    /// Samples that are too large for one.
    pub large: &'a dyn Fn(Kind, Device) -> Vec<Sample>,
    /// The number of terms of the longest sum in a sample's outputs and gradients. The order of
    /// these terms may differ.
    pub terms: &'a dyn Fn(&Sample) -> i64,
}

impl Suite<'_> {
    fn for_each(&self, mut test: impl FnMut(&Sample, Kind, Device)) {
        for device in devices() {
            for kind in KINDS {
                for sample in (self.small)(kind, device).iter().chain(&(self.large)(kind, device)) {
                    test(sample, kind, device);
                }
            }
        }
    }

    pub fn forward_agrees_with_the_reference(&self) {
        let mut results = Results::default();
        self.for_each(|sample, kind, device| {
            let before: Vec<Tensor> = sample.inputs.iter().map(Tensor::copy).collect();
            let fused = (self.fused)(&sample.inputs).expect("fused");
            for (index, fused) in fused.iter().enumerate() {
                assert_eq!((fused.device(), fused.kind()), (device, kind), "{}", sample.name);
                assert!(fused.is_contiguous() && !fused.requires_grad(), "{index} {}", sample.name);
            }
            let reference = |inputs: &[Tensor]| (self.reference)(inputs).expect("reference");
            let what = |index| format!("output {index}");
            results.compare(self, sample, &what, kind, &fused, reference);
            for (now, then) in sample.inputs.iter().zip(&before) {
                assert!(now.equal(then), "{}: an argument was changed", sample.name);
            }
        });
        results.finish();
    }

    /// Compares the gradients from all outputs, and from each output alone, when the gradients of
    /// the others are undefined.
    pub fn gradients_agree_with_the_reference(&self) {
        let mut results = Results::default();
        self.for_each(|sample, kind, _| {
            let outputs = (self.fused)(&sample.inputs).expect("outputs").len();
            let each = (0..outputs).map(|output| vec![output]).filter(|_| outputs > 1);
            for used in std::iter::once((0..outputs).collect()).chain(each) {
                let fused = gradients(self.fused, &leaves(&sample.inputs), &used).into_iter();
                // A gradient may be absent where the reference finds no path to the input, either.
                let absent = |index: usize| {
                    let expected = gradients(self.reference, &leaves(&sample.inputs), &used);
                    assert!(expected[index].is_none(), "{}: none for {index}", sample.name);
                    sample.inputs[index].zeros_like()
                };
                let fused: Vec<Tensor> = fused
                    .enumerate()
                    .map(|(index, fused)| fused.unwrap_or_else(|| absent(index)))
                    .collect();
                let what = |index| {
                    format!("the gradient of {index} of {} from {used:?}", sample.inputs.len())
                };
                let reference = |inputs: &[Tensor]| {
                    let leaves = leaves(inputs);
                    // Zeros are right where the reference finds no path to the input.
                    let found = gradients(self.reference, &leaves, &used).into_iter().zip(&leaves);
                    found.map(|(found, leaf)| found.unwrap_or_else(|| leaf.zeros_like())).collect()
                };
                results.compare(self, sample, &what, kind, &fused, reference);
            }
        });
        results.finish();
        self.hooks_keep_what_they_packed();
    }

    /// Hooks on saved tensors may return what they hold, or a copy in other strides or that begins
    /// anywhere: the gradients are the same, and no backward pass writes into what they hold.
    fn hooks_keep_what_they_packed(&self) {
        const FEW: usize = 4;
        for (device, kind) in
            devices().into_iter().flat_map(|device| KINDS.map(|kind| (device, kind)))
        {
            let samples = (self.small)(kind, device);
            // Sizes and layouts matter little here.
            let step = (samples.len() / FEW).max(1);
            for sample in samples.into_iter().step_by(step) {
                let outputs = (self.fused)(&sample.inputs).expect("outputs").len();
                let all: Vec<usize> = (0..outputs).collect();
                let leaves = leaves(&sample.inputs);
                let expected = gradients(self.fused, &leaves, &all);
                for layout in [None, Some(Layout::Transposed), Some(Layout::Offset)] {
                    let held = Arc::new(Mutex::new(Vec::new()));
                    let holder = Arc::clone(&held);
                    let hooks = saved_tensors_hooks(
                        move |tensor| {
                            let copy = tensor.copy();
                            holder.lock().unwrap().push([copy.shallow_clone(), copy.copy()]);
                            Ok(copy)
                        },
                        move |packed: &Tensor| match layout {
                            Some(layout) => layout.of(packed),
                            None => Ok(packed.shallow_clone()),
                        },
                    );
                    let found = gradients(self.fused, &leaves, &all);
                    drop(hooks);
                    let what = format!("{} {kind:?} {device:?} {layout:?}", sample.name);
                    for [now, then] in held.lock().unwrap().iter() {
                        assert!(bytes(now).equal(&bytes(then)), "{what}: a hook's tensor changed");
                    }
                    let (rtol, atol) = self.bounds(&sample, kind);
                    for (found, expected) in found.iter().zip(&expected) {
                        let (Some(found), Some(expected)) = (found, expected) else {
                            assert!(found.is_none() && expected.is_none(), "{what}");
                            continue;
                        };
                        in_context(&sample, &what, || assert_close(found, expected, rtol, atol));
                    }
                }
            }
        }
    }

    pub fn with_and_without_a_graph_the_bits_are_the_same(&self) {
        self.for_each(|sample, kind, device| {
            let without = (self.fused)(&sample.inputs).expect("without");
            let inputs = leaves(&sample.inputs);
            let with = (self.fused)(&inputs).expect("with");
            let again = (self.fused)(&inputs).expect("again");
            for ((without, with), again) in without.iter().zip(&with).zip(&again) {
                assert!(
                    without.equal(with) && with.equal(again),
                    "{} {kind:?} {device:?}",
                    sample.name
                );
            }
            let all: Vec<usize> = (0..with.len()).collect();
            let first = gradients(self.fused, &inputs, &all);
            let second = gradients(self.fused, &inputs, &all);
            for (first, second) in first.iter().flatten().zip(second.iter().flatten()) {
                assert!(
                    first.equal(second),
                    "{} {kind:?} {device:?}: gradients differ",
                    sample.name
                );
            }
        });
    }

    /// An output is no view: libtorch forbids to change in place a view that was made where no graph
    /// was recorded. Checks it for outputs that require grad, and for others.
    pub fn results_can_be_changed_in_place(&self) {
        let fused = self.fused;
        for device in devices() {
            for sample in (self.small)(Kind::Double, device) {
                let leaves = leaves(&sample.inputs);
                let twice = |inputs: &[Tensor]| {
                    let outputs = fused(inputs)?;
                    let twice = |mut output: Tensor| Ok(output.f_mul_(&output.full_like(2.0))?);
                    outputs.into_iter().map(twice).collect()
                };
                let count = (self.fused)(&sample.inputs).expect("outputs").len();
                let all: Vec<usize> = (0..count).collect();
                let found = gradients(&twice, &leaves, &all);
                let once = gradients(self.fused, &leaves, &all);
                for (found, once) in found.iter().zip(&once) {
                    let (Some(found), Some(once)) = (found, once) else { continue };
                    in_context(&sample, "gradients through a changed output", || {
                        assert_close(found, &(once * 2.0), 1e-12, 1e-12);
                    });
                }
                for mut output in (self.fused)(&sample.inputs).expect("outputs") {
                    let expected = output.copy() + 1.0;
                    let one = output.ones_like().set_requires_grad(true);
                    let changed = output.f_add_(&one).unwrap_or_else(|error| {
                        panic!("{} cannot be changed in place: {error}", sample.name)
                    });
                    assert!(changed.requires_grad() && changed.detach().equal(&expected));
                }
            }
        }
    }

    pub fn gradcheck_of_every_small_sample(&self) {
        for device in devices() {
            for sample in (self.small)(Kind::Double, device) {
                let leaves = sample.leaves().expect("leaves");
                let inputs: Vec<&Tensor> = leaves.iter().collect();
                gradcheck(|inputs| (self.fused)(inputs), &inputs, &Default::default())
                    .unwrap_or_else(|error| panic!("{} on {device:?}: {error}", sample.name));
            }
        }
    }

    /// Checks the second derivatives of the whole table, as
    /// [`Suite::gradcheck_of_every_small_sample`] checks the first.
    pub fn gradgradcheck_of_every_small_sample(&self) {
        for device in devices() {
            for sample in (self.small)(Kind::Double, device) {
                let leaves = sample.leaves().expect("leaves");
                let inputs: Vec<&Tensor> = leaves.iter().collect();
                gradgradcheck(|inputs| (self.fused)(inputs), &inputs, &Default::default())
                    .unwrap_or_else(|error| panic!("{} on {device:?}: {error}", sample.name));
            }
        }
    }

    pub fn conformance_of(&self, samples: impl Fn(Kind, Device) -> Vec<Sample>) {
        self.conformance_with(&Default::default(), samples);
    }

    pub fn conformance_with(
        &self,
        options: &ConformanceOptions<'_>,
        samples: impl Fn(Kind, Device) -> Vec<Sample>,
    ) {
        for device in devices() {
            for kind in KINDS {
                for sample in samples(kind, device) {
                    let leaves = sample.leaves().expect("leaves");
                    let inputs: Vec<&Tensor> = leaves.iter().collect();
                    conformance(|inputs| (self.fused)(inputs), &inputs, options)
                        .unwrap_or_else(|error| panic!("{} {kind:?}:\n{error}", sample.name));
                }
            }
        }
    }

    /// Runs every kernel on the GPU, forward and backward. This is the test that the sanitizers
    /// run.
    pub fn cuda_agrees_with_the_cpu(&self, test: &str) {
        self.cuda_agrees_in(&[Kind::Float, Kind::Double], test);
    }

    /// The same for the half kinds. It is a separate test, because initcheck does not see what
    /// libtorch's products in half kinds write.
    pub fn cuda_half_kinds_agree_with_the_cpu(&self, test: &str) {
        self.cuda_agrees_in(&[Kind::Half, Kind::BFloat16], test);
    }

    fn cuda_agrees_in(&self, kinds: &[Kind], test: &str) {
        let Some(device) = cuda_or_skip(test) else { return };
        for &kind in kinds {
            let all =
                |device| (self.small)(kind, device).into_iter().chain((self.large)(kind, device));
            for (on_gpu, on_cpu) in all(device).zip(all(Device::Cpu)) {
                let run = |sample: &Sample| {
                    let outputs = (self.fused)(&sample.inputs).expect("outputs");
                    let used: Vec<usize> = (0..outputs.len()).collect();
                    let gradients = gradients(self.fused, &leaves(&sample.inputs), &used);
                    outputs.into_iter().chain(gradients.into_iter().flatten()).collect::<Vec<_>>()
                };
                let (rtol, atol) = self.bounds(&on_cpu, kind);
                // The half kinds round sums of many terms at various places; other tests compare
                // more closely.
                let atol = if is_half(kind) { rtol } else { atol };
                for (gpu, cpu) in run(&on_gpu).iter().zip(&run(&on_cpu)) {
                    let gpu = gpu.to_device(Device::Cpu);
                    in_context(&on_cpu, "the GPU's results", || {
                        assert_close(&gpu, cpu, 100.0 * rtol, 100.0 * atol);
                    });
                }
            }
        }
    }

    /// The allowed difference between sums of this many terms that are added in different orders.
    fn bounds(&self, sample: &Sample, kind: Kind) -> (f64, f64) {
        let terms = (self.terms)(sample).max(1) as f64;
        let (rtol, atol) = match kind {
            Kind::Double => (1e-13, 1e-13),
            _ => tolerance(kind),
        };
        (rtol * terms.sqrt(), atol * terms.sqrt())
    }
}

/// A tensor's bits, of which those of a NaN are equal, too.
fn bytes(tensor: &Tensor) -> Tensor {
    tensor.contiguous().view([-1]).view_dtype(Kind::Uint8)
}

pub fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

/// Leaves that require grad, with the same values and layouts.
pub fn leaves(inputs: &[Tensor]) -> Vec<Tensor> {
    inputs.iter().map(|input| input.detach().set_requires_grad(true)).collect()
}

/// A fixed, non-uniform, non-contiguous incoming gradient.
pub fn incoming(output: &Tensor) -> Tensor {
    let mut size = output.size();
    size.reverse();
    let dims: Vec<i64> = (0..size.len() as i64).rev().collect();
    let values = Tensor::arange(output.numel() as i64, (Kind::Double, Device::Cpu)).sin() + 0.3;
    values.view(size.as_slice()).permute(dims).to_kind(output.kind()).to_device(output.device())
}

/// A program that calls an operator several times and computes one number.
pub type Program<'a> = &'a dyn Fn(&[Tensor]) -> Tensor;

/// Checks that a program of several calls has the same first and second derivatives with the fused
/// operator as with the reference, and that the first ones are the same with and without a graph.
pub fn assert_derivatives_agree(
    name: &str,
    [fused, reference]: [Program<'_>; 2],
    inputs: &[Tensor],
    within: f64,
) {
    let (first, second) = first_and_second(fused, &leaves(inputs));
    let (expected_first, expected_second) = first_and_second(reference, &leaves(inputs));
    let leaves = leaves(inputs);
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let plain = grad(&[&fused(&leaves)], &leaves.iter().collect::<Vec<_>>(), &options)
        .expect(name)
        .into_vec();
    for index in 0..leaves.len() {
        let Some(expected) = &expected_first[index] else { continue };
        let with_graph = first[index].as_ref().expect(name);
        assert_close(with_graph, expected, within, within);
        // The kernel's gradient and the gradient with a graph must be the same function.
        assert_close(plain[index].as_ref().expect(name), with_graph, within, within);
        let (second, expected) =
            (second[index].as_ref().expect(name), expected_second[index].as_ref().expect(name));
        assert_close(second, expected, 10.0 * within, 10.0 * within);
    }
}

type Gradients = Vec<Option<Tensor>>;

fn first_and_second(program: Program<'_>, leaves: &[Tensor]) -> (Gradients, Gradients) {
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let options = GradOptions { create_graph: true, allow_unused: true, ..Default::default() };
    let first = grad(&[&program(leaves)], &inputs, &options).expect("first").into_vec();
    let norm = first
        .iter()
        .flatten()
        .map(|gradient| gradient.square().sum(Kind::Double))
        .reduce(|a, b| a + b);
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let second = grad(&[&norm.expect("gradients")], &inputs, &options).expect("second").into_vec();
    (first, second)
}

/// The gradients of the leaves from some of the outputs.
pub fn gradients(operator: Operator<'_>, leaves: &[Tensor], used: &[usize]) -> Vec<Option<Tensor>> {
    let outputs = operator(leaves).expect("outputs");
    let outputs: Vec<&Tensor> = used.iter().map(|&index| &outputs[index]).collect();
    let vectors: Vec<Tensor> = outputs.iter().map(|output| incoming(output)).collect();
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let options = GradOptions { grad_outputs: &vectors, allow_unused: true, ..Default::default() };
    grad(&outputs, &inputs, &options).expect("gradients").into_vec()
}

/// Compares fused results with the reference's. In the large kinds they must be equal one by one,
/// except for the order of sums. In the half kinds they must be no further from the exact results
/// than the reference's; small results are pooled for that, because with few elements chance
/// decides.
#[derive(Default)]
struct Results {
    pools: BTreeMap<String, [Vec<Tensor>; 3]>,
}

const ENOUGH: usize = 1000;

impl Results {
    fn compare(
        &mut self,
        suite: &Suite<'_>,
        sample: &Sample,
        what: &dyn Fn(usize) -> String,
        kind: Kind,
        fused: &[Tensor],
        of: impl Fn(&[Tensor]) -> Vec<Tensor>,
    ) {
        let expected = of(&sample.inputs);
        assert_eq!(fused.len(), expected.len(), "{}", sample.name);
        if !is_half(kind) {
            let (rtol, atol) = suite.bounds(sample, kind);
            for (index, (fused, expected)) in fused.iter().zip(&expected).enumerate() {
                let check = || assert_close(fused, expected, rtol, atol);
                in_context(sample, &what(index), check);
            }
            return;
        }
        let exact: Vec<Tensor> =
            sample.inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
        let exact = of(&exact);
        assert_eq!(fused.len(), exact.len(), "{}", sample.name);
        for (index, ((fused, expected), exact)) in
            fused.iter().zip(&expected).zip(&exact).enumerate()
        {
            let what = what(index);
            assert_eq!(fused.size(), exact.size(), "{what} of {}", sample.name);
            if fused.numel() >= ENOUGH {
                in_context(sample, &what, || assert_as_accurate(fused, expected, exact));
                continue;
            }
            let key = format!("{what} {kind:?} {:?}", fused.device());
            let pool = self.pools.entry(key).or_default();
            for (part, tensor) in pool.iter_mut().zip([fused, expected, exact]) {
                part.push(tensor.reshape([-1]));
            }
        }
    }

    fn finish(self) {
        for (what, pool) in self.pools {
            let [fused, expected, exact] = pool.map(|part| Tensor::cat(&part, 0));
            eprintln!("pooled {what}: {} elements", fused.numel());
            assert_as_accurate(&fused, &expected, &exact);
        }
    }
}

/// Runs an assertion and, if it fails, prints which sample it was.
fn in_context(sample: &Sample, what: &str, check: impl FnOnce()) {
    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)) {
        eprintln!("in {what} of {}", sample.name);
        std::panic::resume_unwind(panic);
    }
}
