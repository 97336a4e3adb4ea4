//! `csrc/layer_norm/layer_norm.h`.

use super::{kind_code, optional_ptr};
use crate::Result;
use std::ffi::c_void;
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
    /// A block that reads the row again for each pass.
    Loop,
}

/// How a row is spread over threads.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    in_registers: i32,
    vectors: i32,
    team: i32,
    reserved: i32,
}

const WARP: i64 = 32;
/// The largest block, and the one for rows that need less.
const MOST_THREADS: i64 = 512;
const THREADS: i64 = 256;

impl Plan {
    /// Of a forward. Values of the half kinds are kept as they are in memory, and so twice as many.
    fn forward(path: Path, columns: i64, kind: Kind, aligned: bool) -> Plan {
        // As kForwardValues in csrc/layer_norm/cuda.cu.
        let values = match kind {
            Kind::Double => 8,
            Kind::Float => 16,
            _ => 32,
        };
        Plan::new(path, columns, kind, aligned, values)
    }

    /// Of a backward.
    fn backward(path: Path, columns: i64, kind: Kind, aligned: bool) -> Plan {
        // As kBackwardValues in csrc/layer_norm/cuda.cu.
        Plan::new(path, columns, kind, aligned, if kind == Kind::Double { 8 } else { 16 })
    }

    /// `aligned`: all arrays begin at multiples of 16 bytes. `values`: so many a thread keeps of a row.
    fn new(path: Path, columns: i64, kind: Kind, aligned: bool, values: i64) -> Plan {
        let size = kind.elt_size_in_bytes() as i64;
        let vectors = aligned && columns % (16 / size) == 0;
        let lanes = if vectors { 16 / size } else { 1 };
        let (loads, each) = (columns / lanes, values / lanes);
        let fits = |threads: i64| loads <= threads * each;
        let team = match path {
            // As few threads as can hold the row: what a thread loads at once decides the speed.
            Path::Automatic | Path::Warp if fits(WARP) => Some(power_of_two((loads + each - 1) / each)),
            Path::Automatic | Path::Warp | Path::Block if fits(MOST_THREADS) => {
                Some(power_of_two((loads + each - 1) / each).max(2 * WARP))
            }
            _ => None,
        };
        Plan {
            in_registers: i32::from(team.is_some()),
            vectors: i32::from(vectors),
            team: team.unwrap_or(MOST_THREADS) as i32,
            reserved: 0,
        }
    }

    /// Into how many the sums over rows are cut. Given by sizes and alignment alone, so that the same arrays give the
    /// same bits.
    fn parts(&self, rows: i64, device: Device) -> i64 {
        let (rows_of_part, most) = match (device, self.in_registers) {
            (Device::Cpu, _) => (8, 128),
            // A block's teams share a part. At most two blocks for each of an H200's processors.
            (_, 1) => (4 * (THREADS / i64::from(self.team)).max(1), 264),
            _ => (16, 64),
        };
        ((rows + rows_of_part - 1) / rows_of_part).clamp(1, most)
    }
}

fn power_of_two(at_least: i64) -> i64 {
    at_least.max(1).unsigned_abs().next_power_of_two() as i64
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
    let params = Forward {
        rows,
        columns,
        eps,
        kind: kind_code(like.0)?,
        parameter_kind: kind_code(parameters.0)?,
        plan: Plan::forward(path, columns, like.0, is_aligned(&[input, weight, bias, output])),
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
    let plan = Plan::backward(path, columns, like.0, is_aligned(&[grad_output, input, weight, grad_input]));
    let parts = plan.parts(rows, like.1);
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
        static tch_extension_layer_norm_layout: [usize; 35];
    }

    #[test]
    fn the_structs_agree_with_the_c_side() {
        let ours = [
            size_of::<Plan>(),
            offset_of!(Plan, in_registers),
            offset_of!(Plan, vectors),
            offset_of!(Plan, team),
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

    fn plan(path: Path, columns: i64, kind: Kind, aligned: bool) -> (bool, bool, i32) {
        let plan = Plan::backward(path, columns, kind, aligned);
        (plan.in_registers == 1, plan.vectors == 1, plan.team)
    }

    #[test]
    fn a_forward_holds_more_of_the_half_kinds() {
        let team = |columns, kind| {
            let plan = Plan::forward(Path::Automatic, columns, kind, true);
            (plan.in_registers == 1).then_some(plan.team)
        };
        assert_eq!(team(256, Kind::BFloat16), Some(8));
        assert_eq!(team(256, Kind::Float), Some(16));
        assert_eq!(team(16384, Kind::Half), Some(512));
        assert_eq!(team(16392, Kind::Half), None);
        assert_eq!(team(8192, Kind::Float), Some(512));
        assert_eq!(team(8196, Kind::Float), None);
    }

    #[test]
    fn plans_suit_the_size() {
        use Path::Automatic;
        let rows = [
            // kind, columns, aligned, (in registers, vectors, team)
            (Kind::Float, 0, true, (true, true, 1)),
            (Kind::Float, 1, true, (true, false, 1)),
            (Kind::Float, 8, true, (true, true, 1)),
            (Kind::Float, 8, false, (true, false, 1)),
            (Kind::Float, 20, true, (true, true, 2)),
            (Kind::Float, 36, true, (true, true, 4)),
            (Kind::Float, 256, true, (true, true, 16)),
            (Kind::Float, 512, true, (true, true, 32)),
            (Kind::Float, 511, true, (true, false, 32)),
            (Kind::Float, 513, true, (true, false, 64)),
            (Kind::Float, 516, true, (true, true, 64)),
            (Kind::Float, 1024, true, (true, true, 64)),
            (Kind::Float, 1028, true, (true, true, 128)),
            (Kind::Float, 8192, true, (true, true, 512)),
            (Kind::Float, 8193, true, (false, false, 512)),
            (Kind::Float, 8196, true, (false, true, 512)),
            (Kind::Half, 512, true, (true, true, 32)),
            (Kind::Half, 1024, true, (true, true, 64)),
            (Kind::BFloat16, 8192, true, (true, true, 512)),
            (Kind::BFloat16, 8192, false, (true, false, 512)),
            (Kind::BFloat16, 8200, true, (false, true, 512)),
            (Kind::Double, 256, true, (true, true, 32)),
            (Kind::Double, 258, true, (true, true, 64)),
            (Kind::Double, 4096, true, (true, true, 512)),
            (Kind::Double, 4098, true, (false, true, 512)),
        ];
        for (kind, columns, aligned, expected) in rows {
            assert_eq!(
                plan(Automatic, columns, kind, aligned),
                expected,
                "{kind:?} {columns} aligned: {aligned}"
            );
        }
    }

    #[test]
    fn a_path_is_taken_where_it_can_be() {
        assert_eq!(plan(Path::Block, 4, Kind::Double, true), (true, true, 64));
        assert_eq!(plan(Path::Loop, 4, Kind::Double, true), (false, true, 512));
        assert_eq!(plan(Path::Warp, 9, Kind::Double, true), (true, false, 2));
        assert_eq!(plan(Path::Warp, 300, Kind::Double, true), (true, true, 64));
        assert_eq!(plan(Path::Block, 100_000, Kind::Double, true), (false, true, 512));
    }

    /// What the kernels take for granted, for every plan there is.
    #[test]
    fn every_plan_holds_its_row() {
        for kind in [Kind::Half, Kind::Float, Kind::Double] {
            for path in [Path::Automatic, Path::Warp, Path::Block, Path::Loop] {
                for columns in (0..9000).chain(16000..17000).chain([1 << 33]) {
                    for (aligned, forward) in [(true, true), (true, false), (false, true), (false, false)] {
                        let plan = if forward {
                            Plan::forward(path, columns, kind, aligned)
                        } else {
                            Plan::backward(path, columns, kind, aligned)
                        };
                        let values = match kind {
                            Kind::Double => 8,
                            Kind::Half if forward => 32,
                            _ => 16,
                        };
                        let team = i64::from(plan.team);
                        assert!(team.count_ones() == 1 && (1..=512).contains(&team));
                        assert!(plan.in_registers == 0 || columns <= team * values);
                        assert!(plan.vectors == 0 || aligned);
                        for device in [Device::Cpu, Device::Cuda(0)] {
                            for rows in [0, 1, 1000, 1 << 40] {
                                assert!((1..=264).contains(&plan.parts(rows, device)));
                            }
                        }
                    }
                }
            }
        }
    }
}
