//! Tests of the layers of torch.nn: `ops::lstm` and `ops::gru`.

use std::io::Write;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use support::gpu::{caching_or_skip, has_caching_allocator};
use support::{KINDS, Suite, gradients, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{Graph, Stream, StreamGuard, set_rnn_allow_tf32};
use tch_extension::ops::{RnnWay, force};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_close, cuda_or_skip, devices, tolerance,
};

pub const WAYS: [RnnWay; 10] = [
    RnnWay::Automatic,
    RnnWay::Cudnn,
    RnnWay::Onednn,
    RnnWay::Packed,
    RnnWay::Step,
    RnnWay::Block,
    RnnWay::Cluster,
    RnnWay::Grid,
    RnnWay::WideGrid,
    RnnWay::CrowdedGrid,
];

/// Sizes for the kernels of each way: columns of each kernel's size, below it, and of one column;
/// rows for one cluster or group, for several, and for a part of one; enough steps that all buffers
/// are used again.
pub const SIZES: [[i64; 4]; 21] = [
    [1, 1, 2, 1],
    [9, 5, 3, 8],
    [6, 1100, 13, 9],
    [11, 3, 32, 17],
    [5, 300, 20, 32],
    [7, 140, 36, 64],
    [5, 300, 64, 40],
    [2, 8, 3, 128],
    [7, 9, 5, 65],
    [33, 17, 8, 128],
    [6, 24, 4, 256],
    [5, 3, 7, 131],
    [9, 13, 6, 451],
    [5, 64, 16, 512],
    [6, 11, 3, 700],
    [9, 20, 8, 768],
    [4, 70, 8, 1024],
    [3, 9, 8, 1544],
    [10, 150, 8, 264],
    [4, 200, 8, 1000],
    [3, 600, 4, 1024],
];

const DIMS: [&str; 4] = ["T", "B", "F", "H"];

pub type Call = fn(&[Tensor]) -> Result<Vec<Tensor>>;

/// Guards libtorch's switch for tf32 in recurrent layers, which all threads share.
static SWITCH: RwLock<()> = RwLock::new(());

/// Until it is dropped, nothing is computed in tf32.
pub fn strict() -> RwLockReadGuard<'static, ()> {
    let guard = SWITCH.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    set_rnn_allow_tf32(false).expect("a switch");
    guard
}

/// Until it is dropped, layers of `Float` may be computed in tf32, in this thread alone.
pub struct Tf32 {
    _guard: RwLockWriteGuard<'static, ()>,
}

impl Tf32 {
    pub fn allow() -> Tf32 {
        let guard = SWITCH.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        set_rnn_allow_tf32(true).expect("a switch");
        Tf32 { _guard: guard }
    }

    /// Calls with the switch off.
    pub fn without<R>(&self, call: impl FnOnce() -> R) -> R {
        set_rnn_allow_tf32(false).expect("a switch");
        let result = call();
        set_rnn_allow_tf32(true).expect("a switch");
        result
    }
}

impl Drop for Tf32 {
    fn drop(&mut self) {
        let _ = set_rnn_allow_tf32(false);
    }
}

/// One of the two operators. The arguments are x, w_ih, w_hh, both biases or none, and the states.
pub struct Rnn {
    pub gates: i64,
    /// How many states there are: h, or h and c.
    pub states: usize,
    pub fused: Call,
    pub reference: Call,
    /// libtorch's own layer.
    pub libtorch: Call,
}

/// T, B, F and H at which oneDNN computes an LSTM.
const ONEDNN: [i64; 4] = [3, 8, 16, 192];

impl Rnn {
    fn shapes(&self, [t, b, f, h]: [i64; 4], has_biases: bool) -> Vec<Shape> {
        let (rows, scale) = (self.gates * h, (1.0 / (f + h).max(3) as f64).sqrt());
        let bias = || Shape::new([rows]);
        let biases = if has_biases { vec![bias(), bias()] } else { Vec::new() };
        let weights = [Shape::new([rows, f]).scale(scale), Shape::new([rows, h]).scale(scale)];
        let states = (0..self.states).map(|_| Shape::new([b, h]));
        std::iter::once(Shape::new([t, b, f])).chain(weights).chain(biases).chain(states).collect()
    }

    fn samples(
        &self,
        (with_biases, layouts): (&[[i64; 4]], Option<[i64; 4]>),
        without_biases: &[[i64; 4]],
        (kind, device): (Kind, Device),
    ) -> Vec<Sample> {
        let table = SampleTable::empty(DIMS, |sizes| self.shapes(sizes, true));
        let table = table.with_sizes(with_biases);
        let with = match layouts {
            Some(sizes) => table.with_layouts(sizes).samples(kind, device),
            None => table.samples(kind, device),
        };
        let without = SampleTable::empty(DIMS, |sizes| self.shapes(sizes, false))
            .with_sizes(without_biases)
            .samples(kind, device);
        [with, without].into_iter().flat_map(|samples| samples.expect("samples")).collect()
    }

    /// Samples that are small enough for a whole Jacobian.
    pub fn small(&self, kind: Kind, device: Device) -> Vec<Sample> {
        let sizes = [
            [3, 2, 3, 4],
            [1, 1, 1, 1],
            [0, 2, 3, 4],
            [2, 0, 3, 4],
            [2, 2, 0, 3],
            [2, 2, 3, 0],
            [5, 1, 1, 2],
            [2, 9, 1, 2],
            [2, 4, 0, 2],
        ];
        let without = [[2, 3, 2, 8], [1, 2, 1, 17]];
        self.samples((&sizes, Some([2, 3, 2, 5])), &without, (kind, device))
    }

    /// Samples that are too large for a Jacobian.
    pub fn large(&self, kind: Kind, device: Device) -> Vec<Sample> {
        self.large_and(&[ONEDNN], (kind, device))
    }

    fn large_and(&self, others: &[[i64; 4]], options: (Kind, Device)) -> Vec<Sample> {
        let sizes = [
            [12, 16, 32, 128], // threads share the rows
            [9, 7, 5, 129],    // threads share the columns, with one column after the whole panels
            [3, 3, 8, 320],    // weights that are larger than a core's cache
        ];
        let all = [&sizes[..], others].concat();
        self.samples((&all, Some([4, 9, 6, 40])), &sizes[..1], options)
    }

    /// Runs a check of the suite.
    pub fn check(&'static self, check: impl Fn(&Suite<'_>)) {
        let small = |kind, device| self.small(kind, device);
        self.check_samples(&small, &|kind, device| self.large(kind, device), check);
    }

    /// Runs a check of the suite with samples for which one kernel computes with a graph and without.
    /// oneDNN has other kernels for inference than for training. On CPUs without AVX-512 they round
    /// differently, as libtorch's layer does.
    pub fn check_same_kernels(&'static self, check: impl Fn(&Suite<'_>)) {
        let is_lstm = self.states == 2;
        let is_same = |options| {
            !is_lstm
                || options != (Kind::Float, Device::Cpu)
                || is_x86_feature_detected!("avx512bw")
                    && std::env::var_os("ONEDNN_MAX_CPU_ISA").is_none()
        };
        let small = |kind, device| self.small(kind, device);
        let large = |kind, device| {
            let others: &[_] = if is_same((kind, device)) { &[ONEDNN] } else { &[] };
            self.large_and(others, (kind, device))
        };
        self.check_samples(&small, &large, check);
    }

    /// Runs a check of the suite with few small samples.
    pub fn check_few(&'static self, check: impl Fn(&Suite<'_>)) {
        let few =
            |options| self.samples((&[[3, 2, 3, 4], [5, 3, 1, 2]], None), &[[2, 3, 2, 8]], options);
        let small = |kind, device| few((kind, device));
        self.check_samples(&small, &|kind, device| self.large(kind, device), check);
    }

    fn check_samples(
        &'static self,
        small: &dyn Fn(Kind, Device) -> Vec<Sample>,
        large: &dyn Fn(Kind, Device) -> Vec<Sample>,
        check: impl Fn(&Suite<'_>),
    ) {
        let _strict = strict();
        // The sums within a step, and the sums over all steps and rows.
        let terms = &|sample: &Sample| {
            let (input, weight) = (sample.inputs[0].size(), sample.inputs[2].size());
            (input[2] + weight[1]).max(input[0] * input[1]) * 4
        };
        check(&Suite { fused: &self.fused, reference: &self.reference, small, large, terms });
    }

    pub fn inputs(&self, sizes: [i64; 4], kind: Kind, device: Device) -> Vec<Tensor> {
        self.samples((&[sizes], None), &[], (kind, device)).remove(0).inputs
    }

    /// The outputs, and the gradients from all of them.
    pub fn everything(&self, call: Call, inputs: &[Tensor]) -> Vec<Tensor> {
        let outputs = call(inputs).expect("outputs");
        let all: Vec<usize> = (0..outputs.len()).collect();
        let gradients = gradients(&call, &leaves(inputs), &all);
        outputs.into_iter().chain(gradients.into_iter().flatten()).collect()
    }

    /// Compares each way with exact results: those of the reference in `Double`.
    pub fn every_way_agrees(&self, kinds: &[Kind], test: &str) {
        self.ways_agree(&WAYS, &SIZES, kinds, test);
    }

    /// The same for a call so small that compute-sanitizer's racecheck, under which kernels are
    /// thousands of times as slow, comes to an end. It cannot judge the ways of a grid.
    pub fn small_ways_agree(&self, test: &str) {
        let ways = [RnnWay::Step, RnnWay::Block, RnnWay::Cluster];
        // The second has more rows than blocks, and with a step the same buffer for each of them.
        let sizes = [[2, 8, 8, 128], [1, 140, 33, 33]];
        self.ways_agree(&ways, &sizes, &[Kind::Half], test);
    }

    fn ways_agree(&self, ways: &[RnnWay], sizes: &[[i64; 4]], kinds: &[Kind], test: &str) {
        let Some(device) = cuda_or_skip(test) else { return };
        let _strict = strict();
        for (&kind, sizes) in
            kinds.iter().flat_map(|kind| sizes.iter().map(move |size| (kind, size)))
        {
            let inputs = self.inputs(*sizes, kind, device);
            let exact: Vec<Tensor> = inputs.iter().map(|of| of.to_kind(Kind::Double)).collect();
            let exact = self.everything(self.reference, &exact);
            let bound = match kind {
                Kind::Double => 1e-11,
                Kind::Float => 2e-5,
                _ => 3e-2,
            };
            for &way in ways.iter().filter(|way| way.is_on(device).expect("an answer")) {
                let found = force(way, || self.everything(self.fused, &inputs));
                for (index, (found, exact)) in found.iter().zip(&exact).enumerate() {
                    let scale = exact.abs().max().double_value(&[]).max(1.0);
                    let error = (found.to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
                    assert!(
                        error <= bound * scale,
                        "{way:?} {kind:?} {sizes:?}: result {index} is off by {error}, of {scale}"
                    );
                }
            }
        }
    }

    /// An infinite input saturates gates, and what it makes of columns that are not there is not seen.
    pub fn infinite_inputs_saturate(&self, test: &str) {
        let Some(device) = cuda_or_skip(test) else { return };
        let _strict = strict();
        for sizes in [[6, 3, 3, 5], [4, 2, 20, 9], [5, 3, 9, 20], [3, 2, 50, 40]] {
            let inputs = self.inputs(sizes, Kind::Float, device);
            let _ = inputs[0].get(1).get(0).get(0).fill_(f64::INFINITY);
            let exact: Vec<Tensor> = inputs.iter().map(|of| of.to_kind(Kind::Double)).collect();
            let exact = (self.reference)(&exact).expect("outputs");
            for way in [RnnWay::Step, RnnWay::Block, RnnWay::Cluster] {
                if !way.is_on(device).expect("an answer") {
                    continue;
                }
                let found = force(way, || (self.fused)(&inputs)).expect("outputs");
                for (found, exact) in found.iter().zip(&exact) {
                    let is_close = found.to_kind(Kind::Double).allclose(exact, 2e-5, 2e-5, false);
                    assert!(is_close, "{way:?} {sizes:?}: {found} for {exact}");
                }
            }
        }
    }

    /// A captured call computes the same in every replay, by each way; and so do calls from two
    /// streams at once.
    pub fn every_way_repeats(&self, test: &str) {
        let Some(device) = cuda_or_skip(test) else { return };
        let _strict = strict();
        let ways =
            [RnnWay::Automatic, RnnWay::Block, RnnWay::Cluster, RnnWay::Grid, RnnWay::WideGrid];
        for way in ways {
            if !way.is_on(device).expect("an answer") {
                let line = format!("SKIPPED {test}: no {way:?} on this GPU\n");
                let _ = std::io::stderr().write_all(line.as_bytes());
                continue;
            }
            let sizes = [
                [40, 300, 24, 32],
                [40, 24, 8, 128],
                [40, 24, 16, 512],
                [40, 64, 16, 768],
                [20, 300, 16, 1024],
            ];
            for sizes in sizes {
                let inputs = self.inputs(sizes, Kind::BFloat16, device);
                let all = || force(way, || self.everything(self.fused, &inputs));
                let expected = all();
                let current = Stream::current(device).expect("a stream");
                current.synchronize().expect("an end");
                let streams = [(); 2].map(|()| Stream::new(device).expect("a stream"));
                let mut results = Vec::new();
                for stream in streams.iter().cycle().take(8) {
                    let _guard = StreamGuard::new(stream).expect("a guard");
                    results.push(all());
                }
                for stream in &streams {
                    stream.synchronize().expect("an end");
                }
                for (found, expected) in results.iter().flatten().zip(expected.iter().cycle()) {
                    assert!(found.equal(expected), "{way:?} {sizes:?} on two streams");
                }
                if !has_caching_allocator() {
                    continue;
                }
                let call = || force(way, || (self.fused)(&inputs));
                let (graph, outputs) = Graph::capture(device, call).expect("a capture");
                for _ in 0..3 {
                    for output in &outputs {
                        let _ = output.detach().fill_(f64::NAN);
                    }
                    graph.replay().expect("a replay");
                    current.synchronize().expect("an end");
                    for (output, expected) in outputs.iter().zip(&expected) {
                        assert!(output.equal(expected), "{way:?} {sizes:?} replayed");
                    }
                }
            }
        }
    }

    /// All steps of a direction are one kernel in each of these ways, in the half kinds and in tf32.
    pub fn more_steps_are_no_more_kernels(&self, test: &str) {
        let Some(device) = caching_or_skip(test) else { return };
        let _switch = Tf32::allow();
        for (way, [batch, features, hidden]) in [
            (RnnWay::Block, [300, 8, 32]),
            (RnnWay::Cluster, [16, 8, 128]),
            (RnnWay::Cluster, [8, 16, 512]),
            (RnnWay::Grid, [40, 16, 768]),
            (RnnWay::WideGrid, [130, 16, 1024]),
        ] {
            if !way.is_on(device).expect("an answer") {
                continue;
            }
            // Backward, the weights of four gates do not fit the blocks of a wide grid.
            let has_backward = way != RnnWay::WideGrid || self.gates < 4;
            for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
                let kernels = |steps: i64| {
                    let inputs = self.inputs([steps, batch, features, hidden], kind, device);
                    let call = || match has_backward {
                        true => self.gradients_of_ones(&inputs),
                        false => (self.fused)(&inputs),
                    };
                    force(way, call).expect("a warm-up");
                    let (graph, _) =
                        Graph::capture(device, || force(way, call)).expect("a capture");
                    graph.kernels()
                };
                // Products over all steps may be split into more parts when they are larger.
                let (few, many) = (kernels(10), kernels(200));
                let what = format!("{way:?} {kind:?} {batch} rows, {hidden} columns");
                assert!(many <= few + 8, "{what}: {few} kernels of 10 steps, {many} of 200");
            }
        }
    }

    fn gradients_of_ones(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let inputs = leaves(inputs);
        let outputs = (self.fused)(&inputs)?;
        let ones: Vec<Tensor> = outputs.iter().map(Tensor::ones_like).collect();
        let ones: Vec<Option<&Tensor>> = ones.iter().map(Some).collect();
        let options = GradOptions { grad_outputs: &ones, ..Default::default() };
        let (of, at): (Vec<_>, Vec<_>) = (outputs.iter().collect(), inputs.iter().collect());
        Ok(grad(&of, &at, &options)?.into_vec().into_iter().flatten().collect())
    }

    /// What a caller sees of a result, apart from its values, does not depend on the way.
    pub fn ways_are_alike(&self) {
        let sizes =
            [[3, 3, 4, 5], [1, 1, 1, 1], [0, 3, 4, 5], [1, 0, 4, 5], [3, 3, 4, 0], [9, 2, 8, 264]];
        for [t, b, f, h] in sizes {
            let rows = self.gates * h;
            let (x, w_ih, w_hh, bias, state) = ([t, b, f], [rows, f], [rows, h], [rows], [b, h]);
            let mut with: Vec<&[i64]> = vec![&x, &w_ih, &w_hh, &bias, &bias];
            with.extend(vec![&state as &[i64]; self.states]);
            support::alike::assert_alike(&WAYS, &[&with], |way, arguments| {
                let is_there = way.is_on(arguments[0].device())?;
                force(if is_there { way } else { RnnWay::Automatic }, || (self.fused)(arguments))
            });
        }
    }

    /// Compares values and gradients with those of libtorch's own layer.
    pub fn agrees_with_libtorch(&self) {
        let _strict = strict();
        for device in devices() {
            for kind in [Kind::Float, Kind::Double] {
                let sizes = [[12, 16, 32, 128], [9, 7, 5, 129], [3, 3, 8, 320]];
                for sample in self.samples((&sizes, None), &sizes[..1], (kind, device)) {
                    let (rtol, atol) = tolerance(kind);
                    let all: Vec<usize> = (0..=self.states).collect();
                    let of = |call: Call| {
                        let outputs = call(&sample.inputs).expect("outputs");
                        let found = gradients(&call, &leaves(&sample.inputs), &all);
                        let found = found.into_iter().map(|found| found.expect("a gradient"));
                        outputs.into_iter().chain(found).collect::<Vec<_>>()
                    };
                    for (ours, theirs) in of(self.fused).iter().zip(&of(self.libtorch)) {
                        let scale = theirs.abs().max().double_value(&[]).max(1.0);
                        assert_close(ours, theirs, 50.0 * rtol, 50.0 * atol * scale);
                    }
                }
            }
        }
    }

    /// Where nothing requires a gradient, what a layer returns can be added to in place, as can what
    /// other operators return: a view that was made without grad mode could not.
    pub fn results_can_be_changed_in_place(&self) {
        for device in devices() {
            for kind in KINDS {
                let inputs = self.inputs([3, 2, 4, 8], kind, device);
                let learned = Tensor::zeros([1], (kind, device)).set_requires_grad(true);
                for (index, output) in (self.fused)(&inputs).expect("outputs").iter().enumerate() {
                    let sum = output.shallow_clone().f_add_(&learned);
                    assert!(sum.is_ok_and(|sum| sum.requires_grad()), "{kind:?}: output {index}");
                }
            }
        }
    }

    /// Refuses what libtorch refuses: other kinds than the input's.
    pub fn refuses_mixed_kinds(&self) {
        for device in devices() {
            let inputs = self.small(Kind::Float, device).remove(0).inputs;
            for place in 1..inputs.len() {
                for kind in KINDS.into_iter().filter(|&kind| kind != Kind::Float) {
                    let mut mixed: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
                    mixed[place] = mixed[place].to_kind(kind);
                    let error = (self.fused)(&mixed).expect_err("mixed kinds").to_string();
                    assert!(error.contains("Float"), "{error}");
                }
            }
        }
    }

    /// Refuses wrong sizes, naming the argument.
    pub fn refuses_wrong_sizes(&self) {
        let none = Tensor::zeros([1 << 62, 2, 0], (Kind::Float, Device::Cpu));
        let mut endless = self.small(Kind::Float, Device::Cpu).remove(4).inputs;
        endless[0] = none;
        let error = (self.fused)(&endless).expect_err("too many steps").to_string();
        assert!(error.contains("64 bits"), "{error}");
        let names = ["input", "w_ih", "w_hh", "b_ih", "b_hh", "h", "c"];
        for device in devices() {
            let inputs = self.small(Kind::Float, device).remove(0).inputs;
            for (place, name) in (0..inputs.len()).zip(names) {
                let mut wrong: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
                wrong[place] = wrong[place].unsqueeze(0);
                let error = (self.fused)(&wrong).expect_err("a wrong size").to_string();
                assert!(error.contains(name), "{name}: {error}");
            }
        }
    }
}

/// The tests of an operator, given its `Rnn`.
macro_rules! tests {
    ($rnn:expr) => {
        static RNN_OF_TESTS: Rnn = $rnn;

        #[test]
        fn forward_agrees_with_the_reference() {
            RNN_OF_TESTS.check(|suite| suite.forward_agrees_with_the_reference());
        }

        #[test]
        fn gradients_agree_with_the_reference() {
            RNN_OF_TESTS.check(|suite| suite.gradients_agree_with_the_reference());
        }

        #[test]
        fn with_and_without_a_graph_the_bits_are_the_same() {
            RNN_OF_TESTS
                .check_same_kernels(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
        }

        #[test]
        fn gradcheck_of_every_small_sample() {
            RNN_OF_TESTS.check(|suite| suite.gradcheck_of_every_small_sample());
        }

        #[test]
        fn second_derivatives_of_every_small_sample() {
            RNN_OF_TESTS.check(|suite| suite.gradgradcheck_of_every_small_sample());
        }

        #[test]
        fn conformance_in_every_kind() {
            RNN_OF_TESTS.check(|suite| suite.conformance_of(suite.small));
        }

        #[test]
        fn agrees_with_libtorch() {
            RNN_OF_TESTS.agrees_with_libtorch();
        }

        #[test]
        fn results_can_be_changed_in_place() {
            RNN_OF_TESTS.results_can_be_changed_in_place();
        }

        #[test]
        fn ways_are_alike() {
            RNN_OF_TESTS.ways_are_alike();
        }

        #[test]
        fn cuda_every_way_agrees_with_the_reference() {
            RNN_OF_TESTS.every_way_agrees(
                &[Kind::Float, Kind::Double],
                "cuda_every_way_agrees_with_the_reference",
            );
        }

        #[test]
        fn cuda_half_kinds_by_every_way_agree_with_the_reference() {
            RNN_OF_TESTS.every_way_agrees(
                &[Kind::Half, Kind::BFloat16],
                "cuda_half_kinds_by_every_way_agree_with_the_reference",
            );
        }

        #[test]
        fn cuda_half_kinds_by_small_ways_agree() {
            RNN_OF_TESTS.small_ways_agree("cuda_half_kinds_by_small_ways_agree");
        }

        #[test]
        fn cuda_infinite_inputs_saturate_gates() {
            RNN_OF_TESTS.infinite_inputs_saturate("cuda_infinite_inputs_saturate_gates");
        }

        #[test]
        fn cuda_half_kinds_by_every_way_repeat() {
            RNN_OF_TESTS.every_way_repeats("cuda_half_kinds_by_every_way_repeat");
        }

        #[test]
        fn cuda_more_steps_are_no_more_kernels() {
            RNN_OF_TESTS.more_steps_are_no_more_kernels("cuda_more_steps_are_no_more_kernels");
        }

        #[test]
        fn mixed_kinds_are_refused_as_libtorch_does() {
            RNN_OF_TESTS.refuses_mixed_kinds();
        }

        #[test]
        fn wrong_sizes_are_refused_by_name() {
            RNN_OF_TESTS.refuses_wrong_sizes();
        }
    };
}
pub(crate) use tests;

/// The tests of ways that the plan chooses by the sizes, each given as a call that forces it, with the
/// name of a test of conformance in parentheses. oneDNN has none: it asks libtorch's allocator for
/// memory in a way that the guarded one of that test cannot serve.
macro_rules! each_way_tests {
    ($rnn:expr, $($way:ident$(($conforms:ident))?: $call:expr,)*) => {$(
        mod $way {
            use super::*;

            static RNN_OF_WAY: Rnn = Rnn { fused: $call, ..$rnn };

            $(#[test]
            fn $conforms() {
                RNN_OF_WAY.check_few(|suite| suite.conformance_of(suite.small));
            })?

            #[test]
            fn values_and_gradients_agree_with_the_reference() {
                RNN_OF_WAY.check(|suite| {
                    suite.forward_agrees_with_the_reference();
                    suite.gradients_agree_with_the_reference();
                });
            }

            #[test]
            fn gradcheck_of_few_samples() {
                RNN_OF_WAY.check_few(|suite| suite.gradcheck_of_every_small_sample());
            }
        }
    )*};
}
pub(crate) use each_way_tests;
