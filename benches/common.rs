//! What every operator's bench is made of: cases, each with its providers.

use crate::clock;
use criterion::{BenchmarkId, Criterion, Throughput};
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{matmul_allow_tf32, set_matmul_allow_tf32};
use tch_extension::testing::devices;

/// One way to compute an operator's outputs from its tensors.
pub type Call = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>>;

/// Who computes it.
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

    /// It is compared in the forward only.
    pub fn without_backward(mut self) -> Self {
        self.has_backward = false;
        self
    }
}

/// One point of an operator's table.
pub struct Case {
    pub operator: &'static str,
    /// The sizes, as the table shows them.
    pub point: String,
    pub kind: Kind,
    pub device: Device,
    /// Whether products in f32 may round their factors.
    pub tf32: bool,
    /// Each tensor's size and standard deviation.
    pub inputs: Vec<(Vec<i64>, f64)>,
    /// What has to be done, in a forward and in a backward.
    pub work: [Work; 2],
    /// The last is ours; the others are its rivals.
    pub providers: Vec<Provider>,
}

/// What cannot be saved: no implementation does with less.
#[derive(Clone, Copy, Default)]
pub struct Work {
    /// Of device memory, each input read once and each output written once.
    pub bytes: usize,
    /// Multiplications and additions of matrix products.
    pub operations: u64,
}

impl Work {
    /// Of `elements` of this kind that are read or written, and of products with so many
    /// operations.
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

/// What is timed.
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
    /// A graph to go back through, again and again.
    outputs: Vec<Tensor>,
}

impl Runner<'_> {
    pub fn name(&self) -> &'static str {
        self.provider.name
    }

    /// The same tensors as leaves of which no graph knows yet, for the current stream: a backward,
    /// and the gradient of a leaf, belong to the stream on which the forward ran.
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

    /// How much data a forward reads and writes, at least.
    pub fn bytes(&self) -> usize {
        let size = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.inputs.iter().chain(&self.outputs).map(size).sum()
    }

    /// How far the outputs are apart, if that is much in numbers around 1; by that, single small
    /// outputs are compared, too.
    pub fn is_far_from(&self, other: &Self) -> Option<f64> {
        const ALLOWED: f64 = 5e-2;
        let norm =
            |tensor: &Tensor| tensor.norm_scalaropt_dtype(2.0, Kind::Float).double_value(&[]);
        let apart = |(ours, theirs): (&Tensor, &Tensor)| {
            let scale = norm(theirs).max((theirs.numel() as f64).sqrt());
            norm(&(ours - theirs)) / scale
        };
        // What is no number is not close, either.
        self.outputs
            .iter()
            .zip(&other.outputs)
            .map(apart)
            .find(|apart| apart.is_nan() || *apart > ALLOWED)
    }

    /// The first output, if the last input is no number anywhere.
    pub fn with_last_input_nan(&self) -> Option<Tensor> {
        let mut inputs: Vec<Tensor> = self.inputs.iter().map(Tensor::detach).collect();
        let last = inputs.pop()?;
        inputs.push(last.full_like(f64::NAN));
        (self.provider.call)(&inputs).ok()?.into_iter().next()
    }

    fn forward(&self) -> Vec<Tensor> {
        (self.provider.call)(&self.inputs).expect("good arguments")
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
    /// Every provider that has this direction, with its own leaves of the same values.
    pub fn runners(&self, direction: Direction) -> Vec<Runner<'_>> {
        let runners = self.unchecked_runners(direction);
        self.check_that_they_agree(&runners, direction != Direction::Forward);
        runners
    }

    /// Likewise, whether or not they agree.
    pub fn unchecked_runners(&self, direction: Direction) -> Vec<Runner<'_>> {
        let differentiable = direction != Direction::Forward;
        let of = |provider| {
            tch::manual_seed(0);
            let normal = |size: &[i64]| Tensor::randn(size, (self.kind, self.device));
            let input = |(size, scale): &(Vec<i64>, f64)| normal(size) * *scale;
            let inputs = self
                .inputs
                .iter()
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

    /// Whether anything of ours goes in this direction.
    pub fn has(&self, direction: Direction) -> bool {
        direction == Direction::Forward
            || self.providers.last().is_some_and(|ours| ours.has_backward)
    }

    /// A bench of something else than the same result would say nothing.
    fn check_that_they_agree(&self, runners: &[Runner<'_>], differentiable: bool) {
        let results = |runner: &Runner<'_>| {
            let outputs = runner.outputs.iter().map(Tensor::detach);
            let gradients =
                if differentiable { runner.backward(&runner.outputs, true) } else { Vec::new() };
            outputs.chain(gradients).collect::<Vec<_>>()
        };
        let allowed = if self.kind == Kind::Float && !self.tf32 { 1e-4 } else { 5e-2 };
        let Some((ours, rivals)) = runners.split_last() else { return };
        let expected = results(ours);
        for rival in rivals {
            for (ours, theirs) in expected.iter().zip(&results(rival)) {
                let apart = distance(ours, theirs);
                // What is no number is not close, either.
                assert!(
                    apart <= allowed,
                    "{}: {} is {apart:.2e} from ours",
                    self.point,
                    rival.name()
                );
            }
        }
    }

    /// What has to be done in this direction.
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

    /// The kind, as the table shows it.
    pub fn arithmetic(&self) -> String {
        if self.tf32 { "tf32".to_string() } else { format!("{:?}", self.kind) }
    }

    /// With libtorch's switch as this case wants it.
    pub fn in_its_precision<T>(&self, body: impl FnOnce() -> T) -> T {
        if !self.device.is_cuda() {
            return body();
        }
        let before = matmul_allow_tf32().expect("libtorch's switch");
        set_matmul_allow_tf32(self.tf32).expect("libtorch's switch");
        let result = body();
        set_matmul_allow_tf32(before).expect("libtorch's switch");
        result
    }

    pub fn place(&self) -> &'static str {
        if self.device.is_cuda() { "cuda" } else { "cpu" }
    }
}

/// The norm of the difference, in proportion: single elements may differ by all they are, where
/// rounding decides on which side of ReLU's corner they lie.
fn distance(ours: &Tensor, theirs: &Tensor) -> f64 {
    let norm = |tensor: &Tensor| tensor.to_kind(Kind::Double).norm().double_value(&[]);
    let apart = norm(&(ours.to_kind(Kind::Double) - theirs.to_kind(Kind::Double)));
    if apart == 0.0 { 0.0 } else { apart / norm(theirs) }
}

/// Criterion's statistics, one provider after the other: a group for each direction and device.
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
