//! What a call of ours and of cuDNN cost: products and kernels per step.

use super::tf32::Tf32;
use crate::ops::costs::{Place, coefficients};
use crate::ops::kinds::Kind;
use crate::ops::recurrent::kernels::cuda::Kernel;
use crate::ops::recurrent::plan::{Direction, Sizes};

coefficients! {
    /// What layers cost apart from the kernels of a cell.
    #[derive(Default)]
    pub(in crate::ops) struct LayerCosts {
        /// A million operations of a product over all steps.
        Parts product: Rates,
        /// A product and a kernel for each step, by libtorch's product.
        Latency step: [f64; 2],
        /// A million operations of the product of a step, which is never in tf32.
        Parts step_product: StepRates,
        /// What is done once in a call, apart from what follows.
        Latency call: [f64; 2],
        /// A MB of gates, which the products over all steps write or read.
        Memory gates: [f64; 2],
        /// A call of a kernel for the whole layer, without its steps.
        Latency block: [f64; 2],
        /// What follows such a kernel if it does not sum the gradients of the weights, without products.
        Latency block_products: f64,
        /// Scales of the weights, for fp16 values in place of tf32.
        Latency scaling: f64,
        /// What each way does before its first step.
        Parts once: Once,
        /// The host's time for the launches of a step, which are a product and a kernel.
        Host launches: [f64; 2],
        /// The host's time to move the parameters to one piece of memory for cuDNN.
        Host flattening: [f64; 2],
    }
}

coefficients! {
    #[derive(Default)]
    pub(in crate::ops) struct Rates {
        Work half: f64,
        Work tf32: f64,
        Work float: f64,
        Work double: f64,
    }
}

coefficients! {
    #[derive(Default)]
    pub(in crate::ops) struct StepRates {
        Work half: f64,
        Work float: f64,
        Work double: f64,
    }
}

coefficients! {
    #[derive(Default)]
    pub(in crate::ops) struct Once {
        Latency cluster: f64,
        Latency grid: f64,
        Latency plain_grid: f64,
        Latency wide_grid: f64,
    }
}

coefficients! {
    /// cuDNN's calls of a cell: by its kernels that keep small weights on the chip, by their widest H, and
    /// by those for each step.
    #[derive(Default)]
    pub(in crate::ops) struct Cudnn {
        Latency call: [f64; 2],
        Parts half_64: [OnChip; 2],
        Parts half_192: [OnChip; 2],
        Parts float_64: [OnChip; 2],
        Parts float_192: [OnChip; 2],
        Parts half: [Steps; 2],
        Parts bfloat16: [Steps; 2],
        Parts tf32: [Steps; 2],
        Parts float: [Steps; 2],
        Parts double: [Steps; 2],
    }
}

coefficients! {
    /// A step: a fixed part, and what a row, a MB of gates, a MB of weights and a million operations add.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Steps {
        Latency fixed: f64,
        Latency row: f64,
        Memory gates: f64,
        Memory weights: f64,
        Work product: f64,
    }
}

impl Steps {
    fn of(&self, products: &Products<'_>) -> f64 {
        self.fixed
            + self.row * products.batch
            + self.gates * products.gates_bytes
            + self.weights * products.weights_bytes
            + self.product * (products.one + products.of_input)
    }
}

coefficients! {
    /// A kernel that keeps the weights on the chip: what it loads first takes `load` for a MB of weights. A
    /// step is a chain of a fixed part and a MB of weights or, if that takes longer, what a row, a MB of gates
    /// and a million operations add.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct OnChip {
        Latency fixed: f64,
        Latency row: f64,
        Memory gates: f64,
        Memory weights: f64,
        Work product: f64,
        Memory load: f64,
    }
}

impl OnChip {
    fn of(&self, products: &Products<'_>) -> f64 {
        let chain = self.fixed + self.weights * products.weights_bytes;
        let work = self.row * products.batch
            + self.gates * products.gates_bytes
            + self.product * (products.one + products.of_input);
        // The longer one, or a bit more where they are alike.
        chain.hypot(work)
    }
}

/// What layers cost on a device.
pub(in crate::ops) static LAYER: Place<LayerCosts> = Place::new("layer", LayerCosts::default);

impl LayerCosts {
    /// What a kernel does before its first step.
    fn before_steps(&self, kernel: Kernel, is_scaled: bool) -> f64 {
        let once = match kernel {
            Kernel::Cluster { .. } => self.once.cluster,
            Kernel::Grid { .. } => self.once.grid,
            Kernel::WideGrid { .. } => self.once.wide_grid,
            Kernel::PlainGrid { .. } => self.once.plain_grid,
            Kernel::Block { .. } | Kernel::Step => 0.0,
        };
        once + if is_scaled { self.scaling } else { 0.0 }
    }
}

pub(super) fn of<T: Copy>(both: [T; 2], direction: Direction) -> T {
    both[usize::from(direction == Direction::Backward)]
}

/// The products of a layer, and what they cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Products<'a> {
    pub(super) costs: &'a LayerCosts,
    pub(super) kind: Kind,
    pub(super) tf32: Tf32,
    pub(super) batch: f64,
    pub(super) hidden: i64,
    pub(super) steps: f64,
    /// Millions of operations of a step's product with h, forward, and of the one with the input. There
    /// are two of each, backward.
    one: f64,
    of_input: f64,
    /// MB of a step's gates, and of both weights.
    gates_bytes: f64,
    weights_bytes: f64,
}

impl<'a> Products<'a> {
    pub(super) fn new(
        costs: &'a LayerCosts,
        gates: i64,
        sizes: Sizes,
        kind: Kind,
        tf32: Tf32,
    ) -> Products<'a> {
        let Sizes { steps, batch, features, hidden } = sizes;
        let bytes = 1e-6 * (gates * hidden) as f64 * kind.elt_size_in_bytes() as f64;
        let column = 2e-6 * batch as f64 * (gates * hidden) as f64;
        Products {
            costs,
            kind,
            tf32,
            batch: batch as f64,
            hidden,
            steps: steps as f64,
            one: column * hidden as f64,
            of_input: column * features as f64,
            gates_bytes: bytes * batch as f64,
            weights_bytes: bytes * (features + hidden) as f64,
        }
    }

    /// How many times as long a product of a step takes as its share of a large one: in strict `Float`
    /// tiles have more rows than there are.
    fn share_of_tiles(self, is_tf32: bool) -> f64 {
        const OTHER_ROWS: f64 = 32.0;
        const MOST: f64 = 2.0;
        let is_strict = self.kind == Kind::Float && !is_tf32;
        if is_strict { 1.0 + (OTHER_ROWS / self.batch.max(1.0)).min(MOST) } else { 1.0 }
    }

    /// What a call does once, and its products over all steps.
    pub(super) fn at_once(self, direction: Direction) -> f64 {
        let of_input = self.rate(self.tf32.input) * self.of_input;
        let products = match direction {
            Direction::Forward => of_input,
            Direction::Backward => of_input + self.of_weights(),
        };
        of(self.costs.call, direction) + self.gates(direction) + products
    }

    fn rate(self, is_tf32: bool) -> f64 {
        let rates = &self.costs.product;
        let rate = match self.kind {
            Kind::Half | Kind::BFloat16 => rates.half,
            Kind::Float if is_tf32 => rates.tf32,
            Kind::Double => rates.double,
            _ => rates.float,
        };
        self.steps * rate
    }

    /// The products for the gradients of the weights.
    fn of_weights(self) -> f64 {
        self.rate(self.tf32.weights) * (self.of_input + self.one)
    }

    /// The memory of the gates.
    fn gates(self, direction: Direction) -> f64 {
        of(self.costs.gates, direction) * self.steps * self.gates_bytes
    }

    /// The whole direction with a kernel whose steps together cost this.
    pub(super) fn with(
        self,
        direction: Direction,
        (kernel, steps): (Kernel, f64),
        is_scaled: bool,
    ) -> f64 {
        match kernel {
            Kernel::Block { sums_weights, .. } => {
                let of_weights = match direction {
                    Direction::Backward if !sums_weights => {
                        let (gates, of_weights) = (self.gates(direction), self.of_weights());
                        self.costs.block_products + gates + of_weights
                    }
                    _ => 0.0,
                };
                of(self.costs.block, direction) + steps + of_weights
            }
            _ => self.costs.before_steps(kernel, is_scaled) + steps + self.at_once(direction),
        }
    }

    /// A product and a kernel for each step, without what is done at once.
    pub(super) fn step_by_step(self, direction: Direction) -> f64 {
        let is_tf32 = self.tf32.steps(direction);
        let StepRates { half, float, double } = self.costs.step_product;
        let rate = match self.kind {
            Kind::Half | Kind::BFloat16 => half,
            Kind::Double => double,
            _ => float,
        };
        of(self.costs.step, direction) + rate * self.one * self.share_of_tiles(is_tf32)
    }

    /// What cuDNN's kernels that keep the weights on the chip cost, if libtorch asks for them.
    pub(super) fn on_chip(self, cudnn: &Cudnn, direction: Direction) -> Option<OnChip> {
        /// Up to these H it does.
        const SMALL: [i64; 2] = [192, 128];
        const NARROW: i64 = 64;
        let is_narrow = self.hidden <= NARROW;
        let costs = match self.kind {
            Kind::Half if is_narrow => cudnn.half_64,
            Kind::Half => cudnn.half_192,
            Kind::Float if is_narrow => cudnn.float_64,
            Kind::Float => cudnn.float_192,
            _ => return None,
        };
        (self.hidden <= of(SMALL, direction)).then(|| of(costs, direction))
    }

    /// cuDNN's whole call.
    pub(super) fn of_cudnn(self, cudnn: &Cudnn, direction: Direction) -> f64 {
        let call = of(cudnn.call, direction);
        if let Some(costs) = self.on_chip(cudnn, direction) {
            let load = costs.load * self.weights_bytes;
            return call + load + self.steps * costs.of(&self);
        }
        let each = match self.kind {
            Kind::Half => cudnn.half,
            Kind::BFloat16 => cudnn.bfloat16,
            Kind::Float if self.tf32.is_allowed => cudnn.tf32,
            Kind::Float => cudnn.float,
            _ => cudnn.double,
        };
        call + self.steps * of(each, direction).of(&self)
    }
}
