//! RMS normalisation by the engine of `csrc/norm/cpu.h`, compared with plain tensor operations. It
//! proves that the engine is generic in the statistic, and is the first piece of the operator that
//! is to come.

use super::*;

unsafe extern "C" {
    fn tch_extension_rms_norm_forward_cpu(params: *const Forward);
    fn tch_extension_rms_norm_backward_cpu(params: *const Backward);
    fn tch_extension_rms_norm_finish_cpu(params: *const Backward);
}

unsafe fn forward(_: Device, params: &Forward) -> Result<()> {
    // SAFETY: the caller promises that the parameters describe memory of the CPU.
    unsafe { tch_extension_rms_norm_forward_cpu(params) };
    Ok(())
}

unsafe fn backward(_: Device, params: &Backward) -> Result<()> {
    // SAFETY: as above.
    unsafe { tch_extension_rms_norm_backward_cpu(params) };
    Ok(())
}

unsafe fn finish(_: Device, params: &Backward) -> Result<()> {
    // SAFETY: as above.
    unsafe { tch_extension_rms_norm_finish_cpu(params) };
    Ok(())
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" fn clusters(_: *const Plan, _: i32) -> i64 {
    0
}

const RMS_NORM: Kernels = Kernels {
    op: "rms_norm",
    is_centred: false,
    forward,
    backward,
    finish,
    #[cfg(tch_extension_cuda)]
    clusters,
};

const EPS: f64 = 1e-5;

fn reference(x: &Tensor, w: &Tensor, b: &Tensor) -> Tensor {
    let mean_square = x.square().mean_dim([-1].as_slice(), true, x.kind());
    x * (mean_square + EPS).rsqrt() * w + b
}

/// The output and the gradients of x, w and b, by the engine.
fn found([x, w, b, dy]: &[Tensor; 4]) -> [Tensor; 4] {
    let (rows, columns) = x.size2().unwrap();
    let (kind, device) = (x.kind(), x.device());
    let shape = Shape { rows, columns, way: Way::Automatic };
    let mut output = x.empty_like();
    let mut moments = RMS_NORM.moments(rows, kind, device).unwrap();
    assert!(moments.mean.is_none());
    let operands = Operands { input: x, weight: Some(w), bias: Some(b) };
    RMS_NORM.forward(shape, &operands, EPS, &mut output, Some(&mut moments)).unwrap();
    let mut gradients = Gradients {
        input: Some(x.empty_like()),
        weight: Some(w.empty_like()),
        bias: Some(b.empty_like()),
    };
    RMS_NORM.backward(shape, &operands, dy, Some(&moments), &mut gradients).unwrap();
    let Gradients { input, weight, bias } = gradients;
    [output, input.unwrap(), weight.unwrap(), bias.unwrap()]
}

#[test]
fn rms_norm_by_the_generic_engine_is_the_composite() {
    tch::manual_seed(5);
    for [rows, columns] in [[1, 1], [3, 5], [7, 64], [130, 33], [2000, 3], [20, 1000]] {
        for (kind, bound) in
            [(Kind::Double, 1e-12), (Kind::Float, 1e-5), (Kind::Half, 4e-3), (Kind::BFloat16, 3e-2)]
        {
            let normal = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
            // The mean differs from zero, so that subtracting it would be seen.
            let arguments = [
                normal(&[rows, columns]) + 0.7,
                normal(&[columns]),
                normal(&[columns]),
                normal(&[rows, columns]),
            ]
            .map(|tensor| tensor.to_kind(kind));
            let exact =
                arguments.each_ref().map(|t| t.to_kind(Kind::Double).set_requires_grad(true));
            let [x, w, b, dy] = &exact;
            let y = reference(x, w, b);
            (&y * dy.detach()).sum(Kind::Double).backward();
            let expected = [y.detach(), x.grad(), w.grad(), b.grad()];
            for (name, (found, expected)) in
                ["y", "dx", "dw", "db"].iter().zip(found(&arguments).iter().zip(&expected))
            {
                assert_eq!(found.kind(), kind);
                let scale = expected.abs().max().double_value(&[]).max(1.0);
                let apart = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
                assert!(apart <= bound * scale, "{name} {rows}x{columns} {kind:?}: {apart} apart");
            }
        }
    }
}
