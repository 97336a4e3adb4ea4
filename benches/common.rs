//! The parts of every operator's benchmark: cases, each with its providers.

use crate::clock;
use criterion::{BenchmarkId, Criterion, Throughput};
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{
    matmul_allow_tf32, rnn_allow_tf32, set_matmul_allow_tf32, set_rnn_allow_tf32,
};
use tch_extension::testing::devices;

/// A function that computes an operator's outputs from its tensors.
pub type Call = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>>;

/// An implementation of an operator: ours or a rival.
pub struct Provider {
    name: &'static str,
    call: Call,
    has_backward: bool,
}

impl Provider {
    pub fn new(
        name: &'static str,
        call: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'static,
    ) -> Self {
        Provider { name, call: Box::new(call), has_backward: true }
    }

    /// Makes this provider take part in the forward pass only.
    pub fn without_backward(mut self) -> Self {
        self.has_backward = false;
        self
    }
}

/// One point of an operator's table.
pub struct Case {
    pub operator: &'static str,
    /// The sizes as the table shows them.
    pub point: String,
    pub kind: Kind,
    pub device: Device,
    /// Whether f32 products may use tf32, which rounds their factors.
    pub tf32: bool,
    /// The size and the standard deviation of each tensor.
    pub inputs: Vec<(Vec<i64>, f64)>,
    /// The work of a forward pass and of a backward pass.
    pub work: [Work; 2],
    /// Our provider is the last one; the others are its rivals.
    pub providers: Vec<Provider>,
}

/// The work that no implementation can avoid.
#[derive(Clone, Copy, Default)]
pub struct Work {
    /// The bytes of device memory: each input is read once and each output is written once.
    pub bytes: usize,
    /// The multiplications and additions of matrix products.
    pub operations: u64,
}

impl Work {
    /// The work of reading or writing `elements` elements of this kind, and of products with
    /// `operations` operations.
    pub fn new(kind: Kind, elements: i64, operations: i64) -> Self {
        Work { bytes: elements as usize * kind.elt_size_in_bytes(), operations: operations as u64 }
    }

    fn and(self, other: Self) -> Self {
        Work { bytes: self.bytes + other.bytes, operations: self.operations + other.operations }
    }

    fn throughput(self) -> Throughput {
        match self.operations {
            0 => Throughput::Bytes(self.bytes as u64),
            operations => Throughput::Elements(operations),
        }
    }
}

/// The part of a training step that is timed.
#[derive(Clone, Copy, PartialEq)]
pub enum Direction {
    Forward,
    Backward,
    Both,
}

impl Direction {
    pub const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Both];

    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Both => "forward+backward",
        }
    }
}

/// One provider with its tensors.
pub struct Runner<'a> {
    provider: &'a Provider,
    inputs: Vec<Tensor>,
    vectors: Vec<Tensor>,
    /// The outputs of a forward pass. The backward pass runs through their graph again and again.
    outputs: Vec<Tensor>,
}

impl Runner<'_> {
    pub fn name(&self) -> &'static str {
        self.provider.name
    }

    /// A copy whose tensors are new leaves, outside any graph, for use on the current stream: a
    /// backward pass, and the gradient of a leaf, belong to the stream on which the forward pass
    /// ran.
    pub fn on_this_stream(&self, direction: Direction) -> Self {
        let leaf = |input: &Tensor| input.detach().set_requires_grad(input.requires_grad());
        let mut runner = Runner {
            provider: self.provider,
            inputs: self.inputs.iter().map(leaf).collect(),
            vectors: self.vectors.iter().map(Tensor::shallow_clone).collect(),
            outputs: Vec::new(),
        };
        if direction == Direction::Backward {
            runner.outputs = runner.forward();
        }
        runner
    }

    /// The least amount of data that a forward pass reads and writes.
    pub fn bytes(&self) -> usize {
        let size = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.inputs.iter().chain(&self.outputs).map(size).sum()
    }

    /// How far the outputs are apart, or `None` if they are close. Differences are compared with
    /// numbers around 1 at least, so that single small outputs do not count as different.
    pub fn is_far_from(&self, other: &Self) -> Option<f64> {
        const ALLOWED: f64 = 5e-2;
        let norm = |tensor: &Tensor| {
            let kind = if tensor.kind() == Kind::Double { Kind::Double } else { Kind::Float };
            tensor.norm_scalaropt_dtype(2.0, kind).double_value(&[])
        };
        let apart = |(ours, theirs): (&Tensor, &Tensor)| {
            let scale = norm(theirs).max((theirs.numel() as f64).sqrt());
            norm(&(ours - theirs)) / scale
        };
        // A NaN counts as different.
        self.outputs
            .iter()
            .zip(&other.outputs)
            .map(apart)
            .find(|apart| apart.is_nan() || *apart > ALLOWED)
    }

    /// The first output when the last input is NaN everywhere.
    pub fn with_last_input_nan(&self) -> Option<Tensor> {
        let mut inputs: Vec<Tensor> = self.inputs.iter().map(Tensor::detach).collect();
        let last = inputs.pop()?;
        inputs.push(last.full_like(f64::NAN));
        (self.provider.call)(&inputs).ok()?.into_iter().next()
    }

    fn forward(&self) -> Vec<Tensor> {
        (self.provider.call)(&self.inputs).expect("good arguments")
    }

    /// The outputs and, if asked for, the gradients.
    fn results(&self, differentiable: bool) -> Vec<Tensor> {
        let outputs = self.outputs.iter().map(Tensor::detach);
        let gradients =
            if differentiable { self.backward(&self.outputs, true) } else { Vec::new() };
        outputs.chain(gradients).collect()
    }

    /// The same provider with the same values in f64.
    fn in_f64(&self) -> Self {
        let double = |tensor: &Tensor| {
            let requires_grad = tensor.requires_grad();
            tensor.detach().to_kind(Kind::Double).set_requires_grad(requires_grad)
        };
        let inputs = self.inputs.iter().map(double).collect();
        let vectors = self.vectors.iter().map(double).collect();
        let mut runner = Runner { inputs, vectors, outputs: Vec::new(), ..*self };
        runner.outputs = runner.forward();
        runner
    }

    fn backward(&self, outputs: &[Tensor], retain_graph: bool) -> Vec<Tensor> {
        let vectors: Vec<Option<&Tensor>> = self.vectors.iter().map(Some).collect();
        let options = GradOptions {
            grad_outputs: &vectors,
            retain_graph: Some(retain_graph),
            ..Default::default()
        };
        let outputs: Vec<&Tensor> = outputs.iter().collect();
        let inputs: Vec<&Tensor> = self.inputs.iter().collect();
        grad(&outputs, &inputs, &options)
            .expect("gradients")
            .into_vec()
            .into_iter()
            .flatten()
            .collect()
    }

    pub fn run(&self, direction: Direction) {
        match direction {
            Direction::Forward => drop(self.forward()),
            Direction::Backward => drop(self.backward(&self.outputs, true)),
            Direction::Both => drop(self.backward(&self.forward(), false)),
        }
    }
}

impl Case {
    /// A runner for every provider that has this direction. Each has leaves of its own with the
    /// same values. Panics if the results differ.
    pub fn runners(&self, direction: Direction) -> Vec<Runner<'_>> {
        let runners = self.unchecked_runners(direction, 0);
        self.check_that_they_agree(&runners, direction != Direction::Forward);
        runners
    }

    /// The same runners without the comparison of their results. The first input begins `offset`
    /// elements after the beginning of its memory; the others are mostly parameters, which programs
    /// allocate on their own.
    pub fn unchecked_runners(&self, direction: Direction, offset: i64) -> Vec<Runner<'_>> {
        let differentiable = direction != Direction::Forward;
        let of = |provider| {
            tch::manual_seed(0);
            let normal = |size: &[i64]| Tensor::randn(size, (self.kind, self.device));
            let input = |(place, (size, scale)): (usize, &(Vec<i64>, f64))| {
                let offset = if place == 0 { offset } else { 0 };
                let count: i64 = size.iter().product();
                let memory = Tensor::empty([offset + count], (self.kind, self.device));
                let mut input = memory.narrow(0, offset, count).view(&size[..]).detach();
                input.copy_(&(normal(size) * *scale));
                input
            };
            let inputs = self
                .inputs
                .iter()
                .enumerate()
                .map(|each| input(each).set_requires_grad(differentiable))
                .collect();
            let mut runner = Runner { provider, inputs, vectors: Vec::new(), outputs: Vec::new() };
            runner.outputs = runner.forward();
            runner.vectors = runner.outputs.iter().map(|output| normal(&output.size())).collect();
            runner
        };
        let has = |provider: &&Provider| provider.has_backward || !differentiable;
        self.providers.iter().filter(has).map(of).collect()
    }

    /// Whether our provider has this direction.
    pub fn has(&self, direction: Direction) -> bool {
        direction == Direction::Forward
            || self.providers.last().is_some_and(|ours| ours.has_backward)
    }

    /// Panics unless all providers compute the same, because a comparison of their times would
    /// otherwise say nothing. In full precision they are compared with each other. Fewer bits leave
    /// errors that grow with the number of steps, in a rival as in ours, so there the first provider
    /// computes in f64 what is right, and ours may be up to twice as far from it as the best rival.
    /// A provider without outputs is only timed.
    fn check_that_they_agree(&self, runners: &[Runner<'_>], differentiable: bool) {
        let Some((ours, rivals)) = runners.split_last() else { return };
        let rivals: Vec<_> = rivals.iter().filter(|rival| !rival.outputs.is_empty()).collect();
        let Some(first) = rivals.first() else { return };
        if matches!(self.kind, Kind::Float | Kind::Double) && !self.tf32 {
            let expected = ours.results(differentiable);
            for rival in rivals {
                let apart = distances(&expected, &rival.results(differentiable));
                // A NaN fails this comparison, too.
                let agree = apart.iter().all(|apart| *apart <= 1e-4);
                assert!(agree, "{}: {} is {} from ours", self.point, rival.name(), short(&apart));
            }
            return;
        }
        let exact = first.in_f64().results(differentiable);
        let errors = |runner: &Runner<'_>| distances(&runner.results(differentiable), &exact);
        let ours = errors(ours);
        let rivals: Vec<_> = rivals.into_iter().map(errors).collect();
        assert!(
            ours.iter().enumerate().all(|(index, ours)| {
                let rivals: Vec<f64> = rivals.iter().map(|errors| errors[index]).collect();
                is_as_right(*ours, &rivals)
            }),
            "{}: ours is {} from what is right, the rivals are {}",
            self.point,
            short(&ours),
            rivals.iter().map(|errors| short(errors)).collect::<Vec<_>>().join("; ")
        );
    }

    /// The work in this direction.
    pub fn work(&self, direction: Direction) -> Work {
        let [forward, backward] = self.work;
        match direction {
            Direction::Forward => forward,
            Direction::Backward => backward,
            Direction::Both => forward.and(backward),
        }
    }

    pub fn title(&self, direction: Direction) -> String {
        format!(
            "{} {} {} {} {}",
            self.operator,
            direction.name(),
            self.point,
            self.arithmetic(),
            self.place()
        )
    }

    /// The arithmetic as the table shows it: tf32, or the kind.
    pub fn arithmetic(&self) -> String {
        if self.tf32 { "tf32".to_string() } else { format!("{:?}", self.kind) }
    }

    /// Runs `body` with libtorch's tf32 switches set as this case requires.
    pub fn in_its_precision<T>(&self, body: impl FnOnce() -> T) -> T {
        if !self.device.is_cuda() {
            return body();
        }
        let switches = "libtorch's switches";
        let before = (matmul_allow_tf32().expect(switches), rnn_allow_tf32().expect(switches));
        set_matmul_allow_tf32(self.tf32).expect(switches);
        set_rnn_allow_tf32(self.tf32).expect(switches);
        let result = body();
        set_matmul_allow_tf32(before.0).expect(switches);
        set_rnn_allow_tf32(before.1).expect(switches);
        result
    }

    pub fn place(&self) -> &'static str {
        if self.device.is_cuda() { "cuda" } else { "cpu" }
    }
}

/// Whether our error is small, and not much larger than that of the best rival. All errors are
/// relative; a NaN, in ours or in a rival, is not right.
fn is_as_right(ours: f64, rivals: &[f64]) -> bool {
    /// How far ours may be off at most. A rival may be off by twice as much: a loop in bf16 is, after
    /// enough steps.
    const WRONG: f64 = 5e-2;
    /// A few roundings to the coarsest kind, bf16.
    const ROUNDINGS: f64 = 4e-3;
    let best = rivals.iter().copied().fold(f64::INFINITY, f64::min);
    ours <= WRONG
        && rivals.iter().all(|rival| *rival <= 2.0 * WRONG)
        && ours <= 2.0 * best.max(ROUNDINGS)
}

/// The norm of each difference, relative to the norm of the result. Single elements may differ
/// completely where rounding decides on which side of ReLU's corner they are.
fn distances(ours: &[Tensor], theirs: &[Tensor]) -> Vec<f64> {
    let norm = |tensor: &Tensor| tensor.to_kind(Kind::Double).norm().double_value(&[]);
    let distance = |(ours, theirs): (&Tensor, &Tensor)| {
        let apart = norm(&(ours.to_kind(Kind::Double) - theirs.to_kind(Kind::Double)));
        if apart == 0.0 { 0.0 } else { apart / norm(theirs) }
    };
    assert_eq!(ours.len(), theirs.len(), "as many results");
    ours.iter().zip(theirs).map(distance).collect()
}

fn short(distances: &[f64]) -> String {
    distances.iter().map(|distance| format!("{distance:.1e}")).collect::<Vec<_>>().join(", ")
}

/// Runs criterion, which measures one provider after another, in one group for each operator,
/// direction and device.
pub fn groups(criterion: &mut Criterion, cases: impl Fn(Device) -> Vec<Case>) {
    for device in devices() {
        for direction in Direction::ALL {
            for case in cases(device).into_iter().filter(|case| case.has(direction)) {
                let name = format!("{}/{}/{}", case.operator, direction.name(), case.place());
                let mut group = criterion.benchmark_group(name);
                group
                    .measurement_time(Duration::from_secs(2))
                    .warm_up_time(Duration::from_millis(500))
                    .sample_size(20)
                    .throughput(case.work(direction).throughput());
                case.in_its_precision(|| {
                    for runner in case.runners(direction) {
                        let id = format!("{} {}", case.point, case.arithmetic());
                        group.bench_function(
                            BenchmarkId::new(runner.provider.name, id),
                            |bencher| {
                                bencher.iter_custom(|iterations| {
                                    clock::in_a_row(device, iterations, || runner.run(direction))
                                });
                            },
                        );
                    }
                });
            }
        }
    }
}
