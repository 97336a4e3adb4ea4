//! Which back end is taken on a GPU, and that each computes the same.

use super::{alone, assert_near, unchanged};
use support::gpu;
use tch::nn::{OptimizerConfig, Sgd, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::nn::SdpaBackend;
use tch_extension::nn::SdpaBackend::{CudnnAttention, EfficientAttention, FlashAttention, Math};
use tch_extension::nn::{
    AttentionConfig, AttentionOptions, Causal, attention, enabled_sdpa_backends,
    f_scaled_dot_product_attention, f_sdpa_backend, scaled_dot_product_attention_reference,
    sdpa_kernel, sdpa_kernel_by_priority,
};
use tch_extension::testing::{assert_close, cuda_or_skip, recorded};

fn leaf(size: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::randn(size, (kind, device)).set_requires_grad(true)
}

/// bf16 training, in the kind itself and under autocast, takes a fused back end. On Hopper it is
/// cuDNN's or FlashAttention; which of the two is printed.
#[test]
fn cuda_bf16_training_takes_a_fused_back_end() {
    let Some(device) = cuda_or_skip("cuda_bf16_training_takes_a_fused_back_end") else { return };
    let _unchanged = unchanged();
    let causal = AttentionOptions { causal: Some(Causal::UpperLeft), ..Default::default() };
    for (kind, autocast) in [(Kind::BFloat16, false), (Kind::Float, true)] {
        for kv_heads in [12, 4] {
            let _autocast =
                autocast.then(|| Autocast::new(device, Kind::BFloat16).expect("autocast"));
            let (q, k) = (
                leaf(&[2, 12, 256, 64], kind, device),
                leaf(&[2, kv_heads, 256, 64], kind, device),
            );
            let options = AttentionOptions { enable_gqa: kv_heads != 12, ..causal };
            let choice = f_sdpa_backend(&q, &k, &k, &options).expect("a back end");
            eprintln!("bf16 training, autocast {autocast}, {kv_heads} heads of keys: {choice:?}");
            assert!(choice.is_fused(), "{choice:?}");
            if gpu::is_hopper() {
                assert!([CudnnAttention, FlashAttention].contains(&choice), "{choice:?}");
            }
        }
    }
}

/// What libtorch's profiler records of a training step of the layer. It sees this thread only, and
/// so not the backward pass, which libtorch runs in a thread of the device.
#[test]
fn cuda_the_layer_runs_the_back_end_that_was_chosen() {
    let name = "cuda_the_layer_runs_the_back_end_that_was_chosen";
    let Some(device) = cuda_or_skip(name) else { return };
    let _alone = alone();
    for (backend, operator) in [
        (FlashAttention, "_scaled_dot_product_flash_attention"),
        (EfficientAttention, "_scaled_dot_product_efficient_attention"),
        (CudnnAttention, "_scaled_dot_product_cudnn_attention"),
        (Math, "_scaled_dot_product_attention_math"),
    ] {
        let mut vs = VarStore::new(device);
        let layer = attention(vs.root(), 256, 4, AttentionConfig::gpt2());
        vs.bfloat16();
        let mut optimizer = Sgd::default().build(&vs, 0.01).expect("SGD");
        let x = Tensor::randn([2, 128, 256], (Kind::BFloat16, device));
        let train = || {
            let loss = layer.f_forward_t(&x, true).expect("output").square().mean(Kind::Float);
            optimizer.backward_step(&loss);
        };
        let (_, events) = recorded(|| sdpa_kernel(&[backend], train).expect("the switch"));
        let ran = |name: &str| events.iter().any(|(event, _)| event.ends_with(name));
        assert!(ran(operator), "{backend:?}: {events:?}");
    }
}

#[test]
fn cuda_each_back_end_agrees_with_the_reference() {
    let Some(device) = cuda_or_skip("cuda_each_back_end_agrees_with_the_reference") else { return };
    let _alone = alone();
    let mut taken = 0;
    for backend in [FlashAttention, EfficientAttention, CudnnAttention, Math] {
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float] {
            for causal in [None, Some(Causal::UpperLeft), Some(Causal::LowerRight)] {
                for [queries, keys] in [[128, 128], [64, 192]] {
                    let q = leaf(&[2, 4, queries, 64], kind, device);
                    let (k, v) = (
                        leaf(&[2, 4, keys, 64], kind, device),
                        leaf(&[2, 4, keys, 64], kind, device),
                    );
                    let options = AttentionOptions { causal, ..Default::default() };
                    let call = || f_scaled_dot_product_attention(&q, &k, &v, &options);
                    let choice = || f_sdpa_backend(&q, &k, &v, &options);
                    let chosen = sdpa_kernel(&[backend], choice).expect("the switch");
                    let found = sdpa_kernel(&[backend], call).expect("the switch");
                    assert_eq!(chosen.is_ok(), found.is_ok(), "{chosen:?} {found:?}");
                    let Ok(found) = found else { continue };
                    assert_eq!(chosen.expect("chosen"), backend);
                    taken += 1;
                    let leaves = [&q, &k, &v];
                    let run = |y: &Tensor, leaves: &[&Tensor]| {
                        let gradients =
                            Tensor::run_backward(&[(y * y).sum(Kind::Float)], leaves, false, false);
                        std::iter::once(y.detach()).chain(gradients).collect::<Vec<_>>()
                    };
                    let double = leaves
                        .map(|leaf| leaf.detach().to_kind(Kind::Double).set_requires_grad(true));
                    let of = |q, k, v| {
                        scaled_dot_product_attention_reference(q, k, v, &options)
                            .expect("reference")
                    };
                    let found = run(&found, &leaves);
                    let rival = run(&of(&q, &k, &v), &leaves);
                    let exact = run(&of(&double[0], &double[1], &double[2]), &double.each_ref());
                    for ((found, rival), exact) in found.iter().zip(&rival).zip(&exact) {
                        eprintln!("{backend:?} {kind:?} {causal:?} {queries} {keys}");
                        match kind {
                            Kind::Float => {
                                let error = (found - exact).abs().max().double_value(&[]);
                                assert!(
                                    error < 1e-2 * exact.abs().max().double_value(&[]),
                                    "{error}"
                                );
                            }
                            _ => assert_near(found, rival, exact),
                        }
                    }
                }
            }
        }
    }
    assert!(taken >= 30, "{taken} of 72 combinations");
}

/// Queries that see no key get zeros from each back end, and nothing gets a gradient through them.
#[test]
fn cuda_queries_that_see_no_key_give_zeros() {
    let Some(device) = cuda_or_skip("cuda_queries_that_see_no_key_give_zeros") else { return };
    let _alone = alone();
    let mut taken = 0;
    for backend in [EfficientAttention, CudnnAttention, Math] {
        for kind in [Kind::Half, Kind::BFloat16] {
            let [q, k, v] = [(); 3].map(|()| leaf(&[2, 3, 40, 64], kind, device));
            let sees = Tensor::arange(40, (Kind::Int64, device)).remainder(4).ne(1).view([40, 1]);
            let added = Tensor::zeros([40, 40], (kind, device))
                .masked_fill(&sees.logical_not(), f64::NEG_INFINITY);
            for mask in [sees.expand([40, 40], false), added] {
                let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
                let call = || f_scaled_dot_product_attention(&q, &k, &v, &options);
                let Ok(y) = sdpa_kernel(&[backend], call).expect("the switch") else { continue };
                taken += 1;
                let hidden = |tensor: &Tensor| {
                    let rows = tensor.detach().masked_select(&sees.logical_not());
                    rows.to_kind(Kind::Double).abs().max().double_value(&[])
                };
                assert_eq!(hidden(&y), 0.0, "{backend:?} {kind:?}");
                // Only rows that see nothing get a gradient.
                let incoming = sees.logical_not().to_kind(kind).expand_as(&y);
                for gradient in Tensor::run_backward(
                    &[(y * incoming).sum(Kind::Float)],
                    &[&q, &k, &v],
                    false,
                    false,
                ) {
                    let largest = gradient.abs().max().double_value(&[]);
                    assert_eq!(largest, 0.0, "{backend:?} {kind:?}");
                }
            }
        }
    }
    assert!(taken >= 10, "{taken} of 12 combinations");
}

/// libtorch sets its own order when it first chooses a back end on CUDA, which must not overwrite
/// ours.
#[test]
fn cuda_the_priority_decides() {
    let Some(device) = cuda_or_skip("cuda_the_priority_decides") else { return };
    let _alone = alone();
    let x = leaf(&[2, 4, 128, 64], Kind::BFloat16, device);
    let choice = || f_sdpa_backend(&x, &x, &x, &Default::default()).expect("a back end");
    let before = enabled_sdpa_backends().expect("back ends");
    for order in [
        [Math, FlashAttention],
        [FlashAttention, EfficientAttention],
        [EfficientAttention, FlashAttention],
    ] {
        assert_eq!(sdpa_kernel_by_priority(&order, choice).expect("the switch"), order[0]);
    }
    eprintln!("enabled, by priority: {before:?}, then {:?}", enabled_sdpa_backends());
}

/// The same values, one element behind a multiple of 16 bytes.
fn at_an_odd_address(tensor: &Tensor) -> Tensor {
    let count = tensor.numel() as i64;
    let memory = Tensor::empty([count + 1], (tensor.kind(), tensor.device()));
    let odd = memory.narrow(0, 1, count).view(tensor.size().as_slice());
    odd.shallow_clone().copy_(tensor);
    assert_ne!(odd.data_ptr().addr() % 16, 0);
    odd
}

/// The outputs of `[q, k, v, incoming gradient, mask]` without grad and with it, and the gradients of
/// the first three, if the back end takes them.
fn results(
    backend: SdpaBackend,
    inputs: &[Tensor],
    (causal, is_masked): (Option<Causal>, bool),
) -> Option<Vec<Tensor>> {
    let attn_mask = is_masked.then_some(&inputs[4]);
    let options = AttentionOptions { causal, attn_mask, ..Default::default() };
    let call = |of: &[Tensor]| {
        let call = || f_scaled_dot_product_attention(&of[0], &of[1], &of[2], &options);
        sdpa_kernel(&[backend], call).expect("the switch").ok()
    };
    let leaves: Vec<Tensor> =
        inputs[..3].iter().map(|input| input.detach().set_requires_grad(true)).collect();
    let outputs = [call(inputs)?, call(&leaves)?];
    let incoming = [Some(&inputs[3])];
    let options = GradOptions { grad_outputs: &incoming, ..Default::default() };
    let leaves: Vec<&Tensor> = leaves.iter().collect();
    let gradients = grad(&[&outputs[1]], &leaves, &options).expect("gradients").into_vec();
    Some(outputs.iter().map(Tensor::detach).chain(gradients.into_iter().flatten()).collect())
}

/// libtorch's fused kernels fail with a misaligned address, after which CUDA cannot be used.
#[test]
fn cuda_tensors_may_begin_at_any_address() {
    let Some(device) = cuda_or_skip("cuda_tensors_may_begin_at_any_address") else { return };
    let _alone = alone();
    let mut taken = 0;
    for backend in [FlashAttention, EfficientAttention, CudnnAttention, Math] {
        for (kind, bound) in [(Kind::Float, 1e-4), (Kind::Half, 1e-2), (Kind::BFloat16, 5e-2)] {
            for case in [(None, false), (Some(Causal::UpperLeft), false), (None, true)] {
                let randn = |size: &[i64]| Tensor::randn(size, (kind, device));
                let mut aligned: Vec<Tensor> = (0..4).map(|_| randn(&[2, 3, 80, 32])).collect();
                aligned.push(randn(&[80, 80]));
                let Some(expected) = results(backend, &aligned, case) else { continue };
                taken += 1;
                for odd in [&[0][..], &[1], &[2], &[3], &[4], &[0, 1, 2], &[0, 1, 2, 3, 4]] {
                    eprintln!("{backend:?} {kind:?} {case:?} {odd:?}");
                    let place = |(at, input): (usize, &Tensor)| match odd.contains(&at) {
                        true => at_an_odd_address(input),
                        false => input.shallow_clone(),
                    };
                    let inputs: Vec<Tensor> = aligned.iter().enumerate().map(place).collect();
                    let found = results(backend, &inputs, case).expect("taken when aligned");
                    for (found, expected) in found.iter().zip(&expected) {
                        assert_close(found, expected, bound, bound);
                    }
                }
            }
        }
    }
    assert!(taken >= 10, "{taken} of 36 combinations");
}
