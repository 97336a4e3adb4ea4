//! The switch of back ends.

use super::{alone, unchanged};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::nn::SdpaBackend::{CudnnAttention, EfficientAttention, FlashAttention, Math};
use tch_extension::nn::{
    AttentionOptions, enabled_sdpa_backends, f_scaled_dot_product_attention, f_sdpa_backend,
    sdpa_kernel, sdpa_kernel_by_priority,
};
use tch_extension::testing::recorded;

fn leaf(kind: Kind) -> Tensor {
    Tensor::randn([1, 2, 5, 8], (kind, Device::Cpu)).set_requires_grad(true)
}

#[test]
fn on_the_cpu_flash_is_taken_unless_there_is_dropout_or_no_batch() {
    let _unchanged = unchanged();
    let x = leaf(Kind::BFloat16);
    let choice = |x: &Tensor, options: &AttentionOptions<'_>| {
        f_sdpa_backend(x, x, x, options).expect("a back end")
    };
    assert_eq!(choice(&x, &Default::default()), FlashAttention);
    assert!(FlashAttention.is_fused() && !Math.is_fused());
    let options = AttentionOptions { dropout_p: 0.5, ..Default::default() };
    assert_eq!(choice(&x, &options), Math);
    assert_eq!(choice(&x.get(0), &Default::default()), Math);
    assert_eq!(choice(&x.narrow(1, 0, 0), &Default::default()), Math);
}

/// On the CPU libtorch's profiler sees the backward pass, too.
#[test]
fn what_was_chosen_runs_forward_and_backward() {
    let _alone = alone();
    let x = leaf(Kind::Float);
    for (backend, forward, backward) in [
        (
            FlashAttention,
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        (Math, "_scaled_dot_product_attention_math", "_softmax_backward_data"),
    ] {
        let train = || {
            let y = f_scaled_dot_product_attention(&x, &x, &x, &Default::default());
            y.expect("output").sum(Kind::Float).backward();
        };
        let (done, events) = recorded(|| sdpa_kernel(&[backend], train));
        done.expect("the switch");
        for name in [forward, backward] {
            assert!(events.iter().any(|(event, _)| event.ends_with(name)), "{name}: {events:?}");
        }
        let other = if backend == Math { "flash_attention_for_cpu" } else { "attention_math" };
        assert!(!events.iter().any(|(event, _)| event.contains(other)), "{other}: {events:?}");
    }
}

#[test]
fn the_switch_selects_and_restores() {
    let _alone = alone();
    let x = leaf(Kind::Float);
    let choice = || f_sdpa_backend(&x, &x, &x, &Default::default()).expect("a back end");
    let enabled = || enabled_sdpa_backends().expect("back ends");
    // On CUDA the first order is libtorch's to choose.
    sdpa_kernel_by_priority(&[Math], || ()).expect("an order");
    let before = enabled();
    assert_eq!(before.len(), 4, "{before:?}");
    let inside = sdpa_kernel(&[Math], || {
        assert_eq!((enabled(), choice()), (vec![Math], Math));
        let nested = sdpa_kernel(&[FlashAttention, Math, Math], || (enabled().len(), choice()));
        assert_eq!(nested.expect("nested"), (2, FlashAttention));
        choice()
    });
    assert_eq!(inside.expect("inside"), Math);
    assert_eq!((enabled(), choice()), (before.clone(), FlashAttention));

    let panicked = std::panic::catch_unwind(|| sdpa_kernel(&[Math], || panic!("in the region")));
    assert!(panicked.is_err() && enabled() == before);

    let order = [Math, CudnnAttention, FlashAttention];
    let inside = sdpa_kernel_by_priority(&order, enabled).expect("priority");
    assert_eq!(inside, order);
    // Without priority the order of the slice does not matter.
    let inside = sdpa_kernel(&[EfficientAttention, FlashAttention], enabled).expect("both");
    let expected: Vec<_> = before
        .iter()
        .copied()
        .filter(|b| [EfficientAttention, FlashAttention].contains(b))
        .collect();
    assert_eq!(inside, expected);
    assert_eq!(enabled(), before);

    let error = sdpa_kernel(&[], || ()).expect_err("none").to_string();
    assert_eq!(error, "sdpa_kernel: backends: expected one back end or more, got none");
}

/// Two threads whose regions overlap: one ends in the other's.
#[test]
fn regions_of_two_threads_may_overlap() {
    let _alone = alone();
    let enabled = || enabled_sdpa_backends().expect("back ends");
    // On CUDA the first order is libtorch's to choose.
    sdpa_kernel_by_priority(&[Math], || ()).expect("an order");
    let before = enabled();
    for by_priority in [false, true] {
        let (opened, is_opened) = std::sync::mpsc::channel();
        let (close, may_close) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let first = scope.spawn(move || {
                let body = || {
                    opened.send(()).expect("the other thread");
                    may_close.recv().expect("the other thread");
                };
                let back_ends = [CudnnAttention, Math];
                let done = match by_priority {
                    true => sdpa_kernel_by_priority(&back_ends, body),
                    false => sdpa_kernel(&back_ends, body),
                };
                done.expect("the first region");
            });
            is_opened.recv().expect("the first region is open");
            assert_eq!(enabled().len(), 2);
            let second = || {
                assert_eq!(enabled(), [EfficientAttention]);
                close.send(()).expect("the first region");
                first.join().expect("the first region");
                assert_eq!(enabled(), [EfficientAttention], "the newest decides");
            };
            sdpa_kernel(&[EfficientAttention], second).expect("the second region");
        });
        assert_eq!(enabled(), before);
    }
}

#[test]
fn without_a_back_end_the_error_says_so() {
    let _alone = alone();
    let x = leaf(Kind::Float);
    let dropout = AttentionOptions { dropout_p: 0.5, ..Default::default() };
    for (enabled, options) in [(CudnnAttention, Default::default()), (FlashAttention, dropout)] {
        let call = || f_scaled_dot_product_attention(&x, &x, &x, &options);
        let error = sdpa_kernel(&[enabled], call).expect("the switch").expect_err("no back end");
        let error = error.to_string();
        assert!(
            error.starts_with("scaled_dot_product_attention: expected an enabled back end")
                && error.contains(&format!("[{enabled:?}]"))
                && !error.contains('\n'),
            "{error}"
        );
        let choice = || f_sdpa_backend(&x, &x, &x, &options);
        let error = sdpa_kernel(&[enabled], choice).expect("the switch").expect_err("no back end");
        assert!(error.to_string().contains("SdpaBackend::Math takes all"), "{error}");
    }
}

/// A second derivative is right with the back end that has one (`second_derivatives`), and refused
/// by the others.
#[test]
fn fused_back_ends_refuse_second_derivatives() {
    let _unchanged = unchanged();
    let x = leaf(Kind::Double);
    let y = f_scaled_dot_product_attention(&x, &x, &x, &Default::default()).expect("output");
    let options = GradOptions { create_graph: true, ..Default::default() };
    let first = grad(&[&y.square().sum(Kind::Double)], &[&x], &options).expect("first");
    let first = first.into_vec().remove(0).expect("a gradient");
    let second = grad(&[&first.square().sum(Kind::Double)], &[&x], &Default::default());
    let error = second.expect_err("no second derivative").to_string();
    assert!(error.contains("not implemented") && !error.contains('\n'), "{error}");
}
