//! `csrc/layer_norm/layer_norm.h`.

use super::{kind_code, optional_ptr};
use crate::Result;
use std::ffi::c_void;
#[cfg(tch_extension_cuda)]
use std::ffi::{CStr, c_char};
#[cfg(tch_extension_cuda)]
use std::sync::OnceLock;
use tch::{Device, Kind, Tensor};

/// Which way the CUDA kernels take with a row. For tests, which prove each; users get the one that suits the size.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// What suits the size.
    #[default]
    Automatic,
    /// A warp or a part of one, if the row fits in its registers.
    Warp,
    /// A block, if the row fits in its registers.
    Block,
    /// Several blocks of a cluster in the backward, if 16-byte loads can read all and the GPU has clusters.
    Cluster,
    /// What suits the size, but the backward's rows go straight to registers.
    Direct,
    /// A block that reads the row again for each pass.
    Loop,
}

/// How rows are spread over threads.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    in_registers: i32,
    vectors: i32,
    team: i32,
    threads: i32,
    cluster: i32,
    stages: i32,
    early_finish: i32,
    reserved: i32,
}

/// What plans ask of a GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Gpu {
    processors: i32,
    shared_memory: i32,
    clusters: i32,
}

const WARP: i64 = 32;
/// The largest block, and the usual one.
const MOST_THREADS: i64 = 512;
const THREADS: i64 = 256;
const MOST_IN_CLUSTER: i64 = 8;

/// What a plan is made of.
#[derive(Clone, Copy, Debug)]
struct Rows {
    path: Path,
    rows: i64,
    columns: i64,
    kind: Kind,
    /// All arrays begin at multiples of 16 bytes.
    aligned: bool,
    gpu: Gpu,
}

impl Rows {
    /// Values that one load reads.
    fn lanes(&self) -> i64 {
        let lanes = 16 / self.kind.elt_size_in_bytes() as i64;
        if self.aligned && self.columns % lanes == 0 { lanes } else { 1 }
    }

    /// The team for a row of so many loads, `each` a thread: as few threads as can hold it, because what a thread loads
    /// at once decides the speed.
    fn team(&self, loads: i64, each: i64) -> Option<i64> {
        let fits = |threads: i64| loads <= threads * each;
        let least = power_of_two((loads + each - 1) / each);
        match self.path {
            Path::Automatic | Path::Warp | Path::Direct if fits(WARP) => Some(least),
            Path::Automatic | Path::Warp | Path::Direct | Path::Block if fits(MOST_THREADS) => {
                Some(least.max(2 * WARP))
            }
            _ => None,
        }
    }

    /// The same row over more threads, where there would be fewer than `threads` in all otherwise.
    fn widened(&self, team: i64, loads: i64, threads: i64) -> i64 {
        let mut team = team;
        while self.path == Path::Automatic
            && team < loads.min(MOST_THREADS)
            && self.rows.saturating_mul(team) < threads
        {
            team *= 2;
        }
        team
    }

    fn forward(&self) -> Plan {
        // As kBytes and kBytesOfSingles in csrc/layer_norm/forward.cu.
        let (size, lanes) = (self.kind.elt_size_in_bytes() as i64, self.lanes());
        let each = if lanes > 1 { 4 } else { (64 / size).min(16) };
        let loads = self.columns / lanes;
        let team = match self.team(loads, each) {
            None if lanes > 1 && matches!(self.path, Path::Automatic | Path::Direct | Path::Block) => {
                // Twice as much of a row a thread, in the largest block.
                Some(MOST_THREADS).filter(|threads| loads <= threads * 2 * each)
            }
            team => {
                let all = i64::from(self.gpu.processors) * MOST_THREADS;
                team.map(|team| self.widened(team, loads, all))
            }
        };
        let plan = Plan::new(lanes, team);
        // Small blocks: a new one starts as soon as one row is done.
        Plan { threads: plan.team.max(2 * WARP as i32), ..plan }
    }

    fn backward(&self) -> Plan {
        // As kBackwardValues in csrc/layer_norm/row_team.h.
        let values = if self.kind == Kind::Double { 8 } else { 16 };
        let lanes = self.lanes();
        let (loads, each) = (self.columns / lanes, values / lanes);
        let team = self.team(loads, each);
        let plan = Plan::new(lanes, team);
        let early_finish = self.gpu.clusters;
        let direct = Plan { threads: plan.team.max(THREADS as i32), ..plan };
        if lanes == 1 || matches!(self.path, Path::Loop | Path::Direct) {
            return direct;
        }
        let ring = match team {
            Some(team) => {
                // So few rows that a block for each is no loss.
                let few = 8 * self.rows <= i64::from(self.gpu.processors);
                let team = if few { self.widened(team, loads, i64::MAX) } else { team };
                Plan { team: team as i32, threads: self.threads_of_ring(team) as i32, ..plan }
            }
            None => match self.cluster(loads, each) {
                Some(plan) => plan,
                None => return direct,
            },
        };
        // x and dy of two rows, of three where blocks wait for one another.
        let row = 2 * values as i32 * self.kind.elt_size_in_bytes() as i32 * ring.threads;
        let most = if ring.cluster > 1 { 3 } else { 2 };
        let room = self.gpu.shared_memory - 8 * 1024;
        match (2..=most).rev().find(|stages| stages * row <= room) {
            Some(stages) => Plan { stages, early_finish, ..ring },
            None => direct,
        }
    }

    /// Threads of a block that stays for many rows: as many as let a processor hold two blocks, fewer where some
    /// processors would have none.
    fn threads_of_ring(&self, team: i64) -> i64 {
        let mut threads = team.max(THREADS);
        let blocks = |threads: i64| (self.rows + threads / team - 1) / (threads / team);
        while threads > team.max(WARP) && 2 * blocks(threads) <= i64::from(self.gpu.processors) {
            threads /= 2;
        }
        threads
    }

    /// Rows that are too long for one block, or for which a test wants several.
    fn cluster(&self, loads: i64, each: i64) -> Option<Plan> {
        if self.gpu.clusters == 0 || !matches!(self.path, Path::Automatic | Path::Cluster) {
            return None;
        }
        let blocks = |threads: i64| (loads + threads * each - 1) / (threads * each);
        let threads =
            [THREADS, MOST_THREADS].into_iter().find(|&threads| blocks(threads) <= MOST_IN_CLUSTER)?;
        let plan = Plan::new(16, Some(threads));
        Some(Plan { cluster: blocks(threads).max(2) as i32, ..plan })
    }
}

impl Plan {
    /// Of one block a row; the block is the team, and reads again what it cannot hold, where there is none.
    fn new(lanes: i64, team: Option<i64>) -> Plan {
        let threads = team.unwrap_or(MOST_THREADS) as i32;
        Plan {
            in_registers: i32::from(team.is_some()),
            vectors: i32::from(lanes > 1),
            team: threads,
            threads,
            cluster: 1,
            stages: 0,
            early_finish: 0,
            reserved: 0,
        }
    }

    /// Into how many the sums over rows are cut. Given by sizes, alignment and the device alone, so that the same arrays
    /// give the same bits. `clusters`: so many run at a time.
    fn parts(&self, rows: i64, device: Device, gpu: Gpu, clusters: i64) -> i64 {
        let teams = i64::from((self.threads / self.team).max(1));
        let processors = i64::from(gpu.processors);
        let (rows_of_part, most) = match (device, self.in_registers, self.stages) {
            (Device::Cpu, ..) => (8, 128),
            (_, _, 1..) if self.cluster > 1 => (1, clusters),
            // All blocks at a time: 512 threads a processor.
            (_, _, 1..) => (teams, processors * MOST_THREADS / i64::from(self.threads)),
            // A block's teams share a part.
            (_, 1, _) => (4 * teams, 2 * processors),
            _ => (16, 64),
        };
        ((rows + rows_of_part - 1) / rows_of_part).clamp(1, most.max(1))
    }
}

fn power_of_two(at_least: i64) -> i64 {
    at_least.max(1).unsigned_abs().next_power_of_two() as i64
}

/// What plans ask of the device; asked once. Nothing on the CPU, whose kernels look at no plan.
fn gpu(device: Device) -> Result<Gpu> {
    #[cfg(tch_extension_cuda)]
    if let Device::Cuda(index) = device {
        static KNOWN: [OnceLock<Gpu>; 64] = [const { OnceLock::new() }; 64];
        let known = KNOWN.get(index);
        if let Some(gpu) = known.and_then(OnceLock::get) {
            return Ok(*gpu);
        }
        let mut gpu = Gpu::default();
        // SAFETY: the C side fills the struct, and returns null or a constant text.
        let error = unsafe { tch_extension_layer_norm_device(index as i32, &mut gpu) };
        if !error.is_null() {
            // SAFETY: as above.
            let reason = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
            return Err(crate::Error::Cuda { op: "layer_norm".to_string(), reason });
        }
        return Ok(*known.map_or(&gpu, |known| known.get_or_init(|| gpu)));
    }
    let _ = device;
    Ok(Gpu::default())
}

/// How many clusters of such blocks run at a time.
fn clusters_at_a_time(plan: &Plan, kind: Kind, device: Device) -> Result<i64> {
    #[cfg(tch_extension_cuda)]
    if plan.cluster > 1 {
        let _guard = crate::cuda::DeviceGuard::new(device)?;
        // SAFETY: the C side only reads the struct.
        return Ok(unsafe { tch_extension_layer_norm_clusters(plan, kind_code(kind)?) });
    }
    let _ = (plan, kind, device);
    Ok(0)
}

#[repr(C)]
struct Forward {
    rows: i64,
    columns: i64,
    eps: f64,
    kind: i32,
    parameter_kind: i32,
    plan: Plan,
    input: *const c_void,
    weight: *const c_void,
    bias: *const c_void,
    output: *mut c_void,
    mean: *mut c_void,
    rstd: *mut c_void,
}

#[repr(C)]
struct Backward {
    rows: i64,
    columns: i64,
    parts: i64,
    kind: i32,
    parameter_kind: i32,
    plan: Plan,
    grad_output: *const c_void,
    input: *const c_void,
    weight: *const c_void,
    mean: *const c_void,
    rstd: *const c_void,
    grad_input: *mut c_void,
    grad_weight: *mut c_void,
    grad_bias: *mut c_void,
    weight_parts: *mut c_void,
    bias_parts: *mut c_void,
}

unsafe extern "C" {
    fn tch_extension_layer_norm_forward_cpu(params: *const Forward);
    fn tch_extension_layer_norm_backward_cpu(params: *const Backward);
    fn tch_extension_layer_norm_finish_cpu(params: *const Backward);
    #[cfg(tch_extension_cuda)]
    fn tch_extension_layer_norm_forward_cuda(
        params: *const Forward,
        stream: *mut c_void,
    ) -> crate::cuda::LaunchStatus;
    #[cfg(tch_extension_cuda)]
    fn tch_extension_layer_norm_backward_cuda(
        params: *const Backward,
        stream: *mut c_void,
    ) -> crate::cuda::LaunchStatus;
    #[cfg(tch_extension_cuda)]
    fn tch_extension_layer_norm_finish_cuda(
        params: *const Backward,
        stream: *mut c_void,
    ) -> crate::cuda::LaunchStatus;
    #[cfg(tch_extension_cuda)]
    fn tch_extension_layer_norm_device(device: i32, result: *mut Gpu) -> *const c_char;
    #[cfg(tch_extension_cuda)]
    fn tch_extension_layer_norm_clusters(plan: *const Plan, kind: i32) -> i64;
}

/// What values of this kind are computed in: the kind of mean and rstd.
pub(crate) fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Rows, columns, and what the derivative keeps of each row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    pub rows: i64,
    pub columns: i64,
    pub path: Path,
}

/// What both directions read; all contiguous, and of the shapes that `layer_norm.h` states.
pub(crate) struct Operands<'a> {
    pub input: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

impl Operands<'_> {
    fn like(&self) -> Result<(Kind, Device)> {
        Ok((self.input.f_kind()?, self.input.device()))
    }

    /// The kind of weight and bias.
    fn parameters_like(&self) -> Result<(Kind, Device)> {
        let parameter = self.weight.or(self.bias).unwrap_or(self.input);
        Ok((parameter.f_kind()?, self.input.device()))
    }
}

/// `[M]` each, of [`compute_kind`].
pub(crate) struct Moments {
    pub mean: Tensor,
    pub rstd: Tensor,
}

impl Moments {
    pub fn empty(rows: i64, kind: Kind, device: Device) -> Result<Self> {
        let empty = || Tensor::f_empty([rows], (compute_kind(kind), device));
        Ok(Moments { mean: empty()?, rstd: empty()? })
    }
}

/// [`optional_ptr`] for an array of which only the number of elements counts.
fn flat(name: &str, tensor: Option<&Tensor>, numel: i64, like: (Kind, Device)) -> Result<*mut c_void> {
    let size = tensor.map(Tensor::size).unwrap_or_default();
    let found = size.iter().try_fold(1_i64, |product, &size| product.checked_mul(size));
    let shape = if found == Some(numel) { size } else { vec![numel] };
    optional_ptr(name, tensor, &shape, like)
}

fn is_aligned(pointers: &[*const c_void]) -> bool {
    pointers.iter().all(|pointer| pointer.addr() % 16 == 0)
}

/// Computes `output` ([M, N]) and, where asked for, the rows' moments.
pub(crate) fn forward(
    shape: Shape,
    operands: &Operands<'_>,
    eps: f64,
    output: &mut Tensor,
    moments: Option<&mut Moments>,
) -> Result<()> {
    let Shape { rows, columns, path } = shape;
    let (like, parameters) = (operands.like()?, operands.parameters_like()?);
    let elements = rows * columns;
    let compute = (compute_kind(like.0), like.1);
    let (mean, rstd) = moments.map(|moments| (&moments.mean, &moments.rstd)).unzip();
    let input = flat("input", Some(operands.input), elements, like)?;
    let weight = flat("weight", operands.weight, columns, parameters)?;
    let bias = flat("bias", operands.bias, columns, parameters)?;
    let output = flat("output", Some(output), elements, like)?;
    let aligned = is_aligned(&[input, weight, bias, output]);
    let rows_of = Rows { path, rows, columns, kind: like.0, aligned, gpu: gpu(like.1)? };
    let params = Forward {
        rows,
        columns,
        eps,
        kind: kind_code(like.0)?,
        parameter_kind: kind_code(parameters.0)?,
        plan: rows_of.forward(),
        input,
        weight,
        bias,
        output,
        mean: optional_ptr("mean", mean, &[rows], compute)?,
        rstd: optional_ptr("rstd", rstd, &[rows], compute)?,
    };
    match like.1 {
        // SAFETY: the arrays were just checked to be contiguous, of these sizes and kinds; those that are written
        // are exclusively borrowed, so they are none of the others.
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => crate::cuda::launch(device, |stream| unsafe {
            tch_extension_layer_norm_forward_cuda(&params, stream)
        }),
        Device::Cpu => {
            // SAFETY: as above.
            unsafe { tch_extension_layer_norm_forward_cpu(&params) };
            Ok(())
        }
        device => Err(super::no_kernel("layer_norm", device)),
    }
}

/// What [`backward`] computes. Absent: nobody needs it.
#[derive(Default)]
pub(crate) struct Gradients {
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// Computes the gradients that are there. The moments are needed for all but the bias'.
pub(crate) fn backward(
    shape: Shape,
    operands: &Operands<'_>,
    grad_output: &Tensor,
    moments: Option<&Moments>,
    gradients: &mut Gradients,
) -> Result<()> {
    let Shape { rows, columns, path } = shape;
    let (like, mut parameters) = (operands.like()?, operands.parameters_like()?);
    if let Some(gradient) = gradients.weight.as_ref().or(gradients.bias.as_ref()) {
        parameters.0 = gradient.f_kind()?;
    }
    let elements = rows * columns;
    let compute = (compute_kind(like.0), like.1);
    let (mean, rstd) = moments.map(|moments| (&moments.mean, &moments.rstd)).unzip();
    if moments.is_none() && (gradients.input.is_some() || gradients.weight.is_some()) {
        return Err(crate::Error::msg("internal error: layer_norm's backward has no moments"));
    }
    let grad_output = flat("grad_output", Some(grad_output), elements, like)?;
    let input = flat("input", Some(operands.input), elements, like)?;
    let weight = flat("weight", operands.weight, columns, parameters)?;
    let grad_input = flat("grad_input", gradients.input.as_ref(), elements, like)?;
    let aligned = is_aligned(&[grad_output, input, weight, grad_input]);
    let gpu = gpu(like.1)?;
    let plan = Rows { path, rows, columns, kind: like.0, aligned, gpu }.backward();
    let parts = plan.parts(rows, like.1, gpu, clusters_at_a_time(&plan, like.0, like.1)?);
    let scratch = |gradient: &Option<Tensor>| -> Result<Option<Tensor>> {
        gradient.as_ref().map(|_| Ok(Tensor::f_empty([parts, columns], compute)?)).transpose()
    };
    let (weight_parts, bias_parts) = (scratch(&gradients.weight)?, scratch(&gradients.bias)?);
    let params = Backward {
        rows,
        columns,
        parts,
        kind: kind_code(like.0)?,
        parameter_kind: kind_code(parameters.0)?,
        plan,
        grad_output,
        input,
        weight,
        mean: optional_ptr("mean", mean, &[rows], compute)?,
        rstd: optional_ptr("rstd", rstd, &[rows], compute)?,
        grad_input,
        grad_weight: flat("grad_weight", gradients.weight.as_ref(), columns, parameters)?,
        grad_bias: flat("grad_bias", gradients.bias.as_ref(), columns, parameters)?,
        weight_parts: optional_ptr("weight_parts", weight_parts.as_ref(), &[parts, columns], compute)?,
        bias_parts: optional_ptr("bias_parts", bias_parts.as_ref(), &[parts, columns], compute)?,
    };
    let has_sums = weight_parts.is_some() || bias_parts.is_some();
    match like.1 {
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => {
            // SAFETY: as in `forward`; the scratch lives until both launches are made, and libtorch's allocator
            // gives its memory to later work on the same stream only.
            crate::cuda::launch(device, |stream| unsafe {
                tch_extension_layer_norm_backward_cuda(&params, stream)
            })?;
            if !has_sums {
                return Ok(());
            }
            // SAFETY: as above.
            crate::cuda::launch(device, |stream| unsafe {
                tch_extension_layer_norm_finish_cuda(&params, stream)
            })
        }
        Device::Cpu => {
            // SAFETY: as in `forward`.
            unsafe { tch_extension_layer_norm_backward_cpu(&params) };
            if has_sums {
                // SAFETY: as in `forward`.
                unsafe { tch_extension_layer_norm_finish_cpu(&params) };
            }
            Ok(())
        }
        device => Err(super::no_kernel("layer_norm", device)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    unsafe extern "C" {
        /// Sizes and offsets as the C++ compiler sees them.
        static tch_extension_layer_norm_layout: [usize; 39];
    }

    #[test]
    fn the_structs_agree_with_the_c_side() {
        let ours = [
            size_of::<Plan>(),
            offset_of!(Plan, in_registers),
            offset_of!(Plan, vectors),
            offset_of!(Plan, team),
            offset_of!(Plan, threads),
            offset_of!(Plan, cluster),
            offset_of!(Plan, stages),
            offset_of!(Plan, early_finish),
            offset_of!(Plan, reserved),
            size_of::<Forward>(),
            offset_of!(Forward, rows),
            offset_of!(Forward, columns),
            offset_of!(Forward, eps),
            offset_of!(Forward, kind),
            offset_of!(Forward, parameter_kind),
            offset_of!(Forward, plan),
            offset_of!(Forward, input),
            offset_of!(Forward, weight),
            offset_of!(Forward, bias),
            offset_of!(Forward, output),
            offset_of!(Forward, mean),
            offset_of!(Forward, rstd),
            size_of::<Backward>(),
            offset_of!(Backward, rows),
            offset_of!(Backward, columns),
            offset_of!(Backward, parts),
            offset_of!(Backward, kind),
            offset_of!(Backward, parameter_kind),
            offset_of!(Backward, plan),
            offset_of!(Backward, grad_output),
            offset_of!(Backward, input),
            offset_of!(Backward, weight),
            offset_of!(Backward, mean),
            offset_of!(Backward, rstd),
            offset_of!(Backward, grad_input),
            offset_of!(Backward, grad_weight),
            offset_of!(Backward, grad_bias),
            offset_of!(Backward, weight_parts),
            offset_of!(Backward, bias_parts),
        ];
        // SAFETY: a constant of this length in csrc/layer_norm/cpu.cpp.
        assert_eq!(ours, unsafe { tch_extension_layer_norm_layout });
    }

    /// An H200.
    const GPU: Gpu = Gpu { processors: 132, shared_memory: 227 << 10, clusters: 1 };
    /// One that has neither clusters nor much shared memory.
    const OLD: Gpu = Gpu { processors: 40, shared_memory: 64 << 10, clusters: 0 };
    const MANY: i64 = 1 << 20;

    fn rows(path: Path, columns: i64, kind: Kind, aligned: bool) -> Rows {
        Rows { path, rows: MANY, columns, kind, aligned, gpu: GPU }
    }

    #[test]
    fn forwards_suit_the_size() {
        let plan = |rows: i64, columns, kind| {
            let plan = Rows { rows, ..rows_of(columns, kind) }.forward();
            (plan.in_registers == 1).then_some((plan.team, plan.threads))
        };
        fn rows_of(columns: i64, kind: Kind) -> Rows {
            rows(Path::Automatic, columns, kind, true)
        }
        assert_eq!(plan(MANY, 256, Kind::BFloat16), Some((8, 64)));
        assert_eq!(plan(MANY, 256, Kind::Float), Some((16, 64)));
        assert_eq!(plan(MANY, 1024, Kind::BFloat16), Some((32, 64)));
        assert_eq!(plan(MANY, 4096, Kind::BFloat16), Some((128, 128)));
        assert_eq!(plan(MANY, 16384, Kind::Half), Some((512, 512)));
        assert_eq!(plan(MANY, 32768, Kind::Half), Some((512, 512)));
        assert_eq!(plan(MANY, 32776, Kind::Half), None);
        assert_eq!(plan(MANY, 16384, Kind::Float), Some((512, 512)));
        assert_eq!(plan(MANY, 16388, Kind::Float), None);
        // Singles: 16 of them a thread.
        assert_eq!(plan(MANY, 16385, Kind::Float), None);
        assert_eq!(plan(MANY, 8191, Kind::Half), Some((512, 512)));
        // Few rows get more threads, but none without a load.
        assert_eq!(plan(256, 1024, Kind::BFloat16), Some((128, 128)));
        assert_eq!(plan(1024, 1024, Kind::Float), Some((128, 128)));
        assert_eq!(plan(1, 8192, Kind::Float), Some((512, 512)));
        assert_eq!(plan(4, 64, Kind::Float), Some((16, 64)));
    }

    #[test]
    fn backwards_suit_the_size() {
        use Kind::{BFloat16, Double, Float, Half};
        let table = [
            // kind, columns, aligned, (vectors, team, threads, cluster, stages)
            (Float, 0, true, (true, 1, 256, 1, 2)),
            (Float, 1, true, (false, 1, 256, 1, 0)),
            (Float, 8, true, (true, 1, 256, 1, 2)),
            (Float, 8, false, (false, 1, 256, 1, 0)),
            (Float, 36, true, (true, 4, 256, 1, 2)),
            (Float, 256, true, (true, 16, 256, 1, 2)),
            (Float, 511, true, (false, 32, 256, 1, 0)),
            (Float, 512, true, (true, 32, 256, 1, 2)),
            (Float, 513, true, (false, 64, 256, 1, 0)),
            (Float, 516, true, (true, 64, 256, 1, 2)),
            (Float, 4096, true, (true, 256, 256, 1, 2)),
            (Float, 8192, true, (true, 512, 512, 1, 2)),
            (Float, 8193, true, (false, 512, 512, 1, 0)),
            (Float, 8196, true, (true, 256, 256, 3, 3)),
            (Float, 16384, true, (true, 256, 256, 4, 3)),
            (Float, 32768, true, (true, 256, 256, 8, 3)),
            (Float, 65536, true, (true, 512, 512, 8, 3)),
            (Float, 65540, true, (true, 512, 512, 1, 0)),
            (Half, 1024, true, (true, 64, 256, 1, 2)),
            (BFloat16, 8192, true, (true, 512, 512, 1, 2)),
            (BFloat16, 8192, false, (false, 512, 512, 1, 0)),
            (BFloat16, 8200, true, (true, 256, 256, 3, 3)),
            (Double, 258, true, (true, 64, 256, 1, 2)),
            (Double, 4096, true, (true, 512, 512, 1, 2)),
            (Double, 4098, true, (true, 256, 256, 3, 3)),
        ];
        for (kind, columns, aligned, expected) in table {
            let plan = rows(Path::Automatic, columns, kind, aligned).backward();
            let found = (plan.vectors == 1, plan.team, plan.threads, plan.cluster, plan.stages);
            assert_eq!(found, expected, "{kind:?} {columns} aligned: {aligned}");
        }
    }

    #[test]
    fn a_path_is_taken_where_it_can_be() {
        let plan = |path, columns| {
            let plan = rows(path, columns, Kind::Double, true).backward();
            (plan.in_registers == 1, plan.team, plan.cluster, plan.stages)
        };
        assert_eq!(plan(Path::Block, 4), (true, 64, 1, 2));
        assert_eq!(plan(Path::Loop, 4), (false, 512, 1, 0));
        assert_eq!(plan(Path::Warp, 9), (true, 2, 1, 0));
        assert_eq!(plan(Path::Warp, 300), (true, 64, 1, 2));
        assert_eq!(plan(Path::Direct, 300), (true, 64, 1, 0));
        assert_eq!(plan(Path::Cluster, 4), (true, 256, 2, 3));
        assert_eq!(plan(Path::Cluster, 5), (false, 512, 1, 0));
        assert_eq!(plan(Path::Block, 100_000), (false, 512, 1, 0));
    }

    /// What the kernels take for granted, for every plan there is.
    #[test]
    fn every_plan_holds_its_row() {
        use Path::{Automatic, Block, Cluster, Direct, Loop, Warp};
        let sizes = || (0..9000).step_by(3).chain(16000..17000).chain(32760..32780).chain(65530..65550);
        for kind in [Kind::Half, Kind::Float, Kind::Double] {
            let size = kind.elt_size_in_bytes() as i64;
            for path in [Automatic, Warp, Block, Cluster, Direct, Loop] {
                for columns in sizes().chain([1 << 33]) {
                    for (aligned, gpu, rows) in [
                        (true, GPU, MANY),
                        (false, GPU, MANY),
                        (true, OLD, MANY),
                        (true, GPU, 1),
                        (true, GPU, 300),
                    ] {
                        let rows = Rows { path, rows, columns, kind, aligned, gpu };
                        check(&rows.forward(), &rows);
                        let plan = rows.forward();
                        let kept = match plan.vectors {
                            0 => 16.min(64 / size),
                            _ if plan.team <= 32 => 64 / size,
                            _ => 128 / size,
                        };
                        assert!(plan.in_registers == 0 || columns <= i64::from(plan.team) * kept);

                        let plan = rows.backward();
                        check(&plan, &rows);
                        let values = if kind == Kind::Double { 8 } else { 16 };
                        let (team, cluster) = (i64::from(plan.team), i64::from(plan.cluster));
                        assert!(plan.in_registers == 0 || columns <= team * values * cluster);
                        assert!(
                            plan.cluster == 1
                                || (gpu.clusters == 1 && plan.stages > 0 && plan.team == plan.threads)
                        );
                        assert!(plan.stages == 0 || (plan.vectors == 1 && plan.in_registers == 1));
                        let ring = i64::from(plan.stages) * 2 * values * size * i64::from(plan.threads);
                        assert!(ring <= i64::from(gpu.shared_memory));
                        for device in [Device::Cpu, Device::Cuda(0)] {
                            for rows in [0, 1, 1000, 1 << 40] {
                                assert!((1..=2112).contains(&plan.parts(rows, device, gpu, 60)));
                            }
                        }
                    }
                }
            }
        }
    }

    fn check(plan: &Plan, rows: &Rows) {
        assert!(plan.team.count_ones() == 1 && plan.threads.count_ones() == 1);
        assert!((1..=plan.threads).contains(&plan.team) && (32..=512).contains(&plan.threads));
        assert!((1..=8).contains(&plan.cluster));
        assert!(plan.in_registers == 1 || plan.team == plan.threads);
        assert!(plan.vectors == 0 || rows.aligned);
    }
}
