//! What is refused, with which words, and that nothing changes then.

use super::*;
use tch_extension::testing::devices;

fn adamw(tensors: &[Tensor]) -> tch_extension::Result<FusedOptimizer> {
    AdamW::default().build_of(named(tensors), 0.1)
}

#[test]
fn numbers_out_of_range_are_refused() {
    let _alone = serially();
    let tensors = [Tensor::ones([2], (Kind::Float, CPU))];
    let built = |config: AdamW, lr| text(config.build_of(named(&tensors), lr));
    let default = AdamW::default();
    for (message, expected) in [
        (
            built(default.beta1(1.0), 0.1),
            "AdamW::build: beta1: expected 0 or more and below 1, got 1",
        ),
        (
            built(default.beta2(-0.1), 0.1),
            "AdamW::build: beta2: expected 0 or more and below 1, got -0.1",
        ),
        (
            built(default.eps(f64::NAN), 0.1),
            "AdamW::build: eps: expected a finite number, 0 or more, got NaN",
        ),
        (
            built(default.wd(-1.0), 0.1),
            "AdamW::build: weight_decay: expected a finite number, 0 or more, got -1",
        ),
        (
            built(default, f64::NAN),
            "AdamW::build: lr: expected a finite number, 0 or more, got NaN",
        ),
        (
            text(Sgd { nesterov: true, ..Default::default() }.build_of(named(&tensors), 0.1)),
            "Sgd::build: nesterov: expected a momentum and no dampening, got momentum 0 and dampening 0",
        ),
        (
            text(Sgd { momentum: -0.5, ..Default::default() }.build_of(named(&tensors), 0.1)),
            "Sgd::build: momentum: expected a finite number, 0 or more, got -0.5",
        ),
    ] {
        assert_eq!(message, expected);
    }
    let mut optimizer = adamw(&tensors).expect("an optimizer");
    for (message, expected) in [
        (
            text(optimizer.set_lr(-1.0)),
            "FusedOptimizer::set_lr: lr: expected a finite number, 0 or more, got -1",
        ),
        (
            text(optimizer.set_lr_group(2, 1.0)),
            "FusedOptimizer::set_lr_group: group: expected one of the groups {0}, got 2; Path::set_group puts new \
             variables into a group",
        ),
        (
            text(optimizer.set_momentum(1.0)),
            "FusedOptimizer::set_momentum: beta1: expected 0 or more and below 1, got 1",
        ),
        (
            text(optimizer.set_clip_norm(Some(-1.0))),
            "FusedOptimizer::set_clip_norm: max: expected 0 or more, got -1",
        ),
        (
            text(optimizer.clip_grad_norm(f64::NAN)),
            "FusedOptimizer::clip_grad_norm: max: expected 0 or more, got NaN",
        ),
        (
            text(optimizer.clip_grad_value(-0.5)),
            "FusedOptimizer::clip_grad_value: max: expected 0 or more, got -0.5",
        ),
        (
            text(optimizer.step_with(&[])),
            "FusedOptimizer::step: gradients: expected one for each of 1 parameters, got 0",
        ),
    ] {
        assert_eq!(message, expected);
    }
    assert_eq!(optimizer.lr_of_group(0), Some(0.1));
    let mut sgd = Sgd::default().build_of(named(&tensors), 0.1).expect("an optimizer");
    assert_eq!(
        text(sgd.set_betas_group(0, 0.5, 0.5)),
        "FusedOptimizer::set_betas_group: self: expected AdamW, got Sgd; set_momentum_group is for both"
    );
}

#[test]
fn tensors_that_cannot_be_updated_are_refused() {
    let _alone = serially();
    for device in devices() {
        let base = Tensor::ones([6, 6], (Kind::Float, device));
        let refused = |tensors: &[Tensor]| text(adamw(tensors));
        for (tensor, expected) in [
            (
                base.narrow(1, 0, 3),
                "memory without gaps and overlaps, got another layout; make it contiguous before it becomes a parameter",
            ),
            (
                base.narrow(0, 0, 1).expand([6, 6], false),
                "memory without gaps and overlaps, got another layout; make it contiguous before it becomes a parameter",
            ),
            (base.to_sparse_sparse_dim(2), "a dense tensor, got another layout, or none"),
            (Tensor::new(), "a dense tensor, got another layout, or none"),
            (base.to_kind(Kind::Int64), "kind Float, Double, Half or BFloat16, got another kind"),
            (
                base.to_kind(Kind::ComplexFloat),
                "kind Float, Double, Half or BFloat16, got another kind",
            ),
        ] {
            let expected = format!("OptimizerConfig::build: w1: expected {expected}");
            assert_eq!(refused(&[base.copy(), tensor]), expected);
        }
        let shared = "OptimizerConfig::build: w1: expected memory of its own, got memory that it shares with w0; give each \
                      tensor to an optimizer once";
        assert_eq!(refused(&[base.shallow_clone(), base.narrow(0, 5, 1)]), shared);
        assert_eq!(refused(&[base.shallow_clone(), base.shallow_clone()]), shared);
        assert!(adamw(&[base.narrow(0, 0, 3), base.narrow(0, 3, 3)]).is_ok());
        let twice = || NamedTensor { name: "w".to_string(), tensor: base.copy(), group: 0 };
        assert_eq!(
            text(AdamW::default().build_of(vec![twice(), twice()], 0.1)),
            "OptimizerConfig::build: name: expected a name for each tensor, got w twice"
        );
    }
}

/// The same tensor under two names, at once or later.
#[test]
fn a_tensor_with_two_names_is_refused_with_both() {
    let _alone = serially();
    let shared = "head: expected memory of its own, got memory that it shares with embedding; give each tensor to an \
                  optimizer once";
    let vs = VarStore::new(CPU);
    let w = vs.root().ones("embedding", &[3]);
    let mut optimizer = AdamW::default().build(&vs, 0.1).expect("an optimizer");
    let _ = vs.root().add("head", w.shallow_clone(), true);
    assert_eq!(text(AdamW::default().build(&vs, 0.1)), format!("OptimizerConfig::build: {shared}"));
    w.sum(Kind::Float).backward();
    let before = bits(&[w.shallow_clone()]);
    assert_eq!(text(optimizer.step()), format!("OptimizerConfig::build: {shared}"));
    assert_eq!(bits(&[w]), before);
}

#[test]
fn parameters_that_are_tied_after_build_are_refused() {
    let _alone = serially();
    for device in devices() {
        type Tie = fn(&mut [Tensor]);
        let ties: [Tie; 3] = [
            |w| w[1].set_data(&w[0].detach()),
            // Only some values, in either order.
            |w| {
                let memory = Tensor::ones([6], (Kind::Float, w[0].device()));
                w[0].set_data(&memory.narrow(0, 0, 4));
                w[1].set_data(&memory.narrow(0, 2, 4));
            },
            |w| {
                let memory = Tensor::ones([100], (Kind::Float, w[0].device()));
                w[0].set_data(&memory);
                w[1].set_data(&memory.narrow(0, 90, 4));
            },
        ];
        for tie in ties {
            let mut weights = leaves(&[&[4], &[4], &[4]], Kind::Float, device);
            let mut optimizer = adamw(&weights).expect("an optimizer");
            tie(&mut weights);
            accumulate(&weights, 1.0);
            let before = bits(&weights);
            assert_eq!(
                text(optimizer.step()),
                "FusedOptimizer::step: w1: expected memory of its own, got memory that it shares with w0; give each \
                 tensor to an optimizer once"
            );
            assert_eq!(bits(&weights), before);
            // Without a gradient, it is not updated itself.
            let (first, third) = (weights[0].grad(), weights[2].grad());
            optimizer.step_with(&[Some(&first), None, Some(&third)]).expect("a step");
            assert_ne!(bits(&weights), before);
        }
    }
}

#[test]
fn gradients_in_the_memory_of_weights_are_refused() {
    let _alone = serially();
    for device in devices() {
        let memory = Tensor::arange(12, (Kind::Float, device));
        let of = |begin| memory.narrow(0, begin, 4);
        let weights = [of(2), of(8)];
        let mut optimizer = Sgd::default().build_of(named(&weights), 0.5).expect("an optimizer");
        let before = bits(&[memory.shallow_clone()]);
        let good = Tensor::ones([4], (Kind::Float, device));
        for (gradient, whose, shares) in [
            (of(4), "the gradient of w0", "w0"),
            (of(0), "w0", "the gradient of w0"),
            (of(5), "the gradient of w0", "w0"),
            (of(8), "w1", "the gradient of w0"),
        ] {
            let message = text(optimizer.step_with(&[Some(&gradient), Some(&good)]));
            assert_eq!(
                message,
                format!(
                    "FusedOptimizer::step: {whose}: expected memory of its own, got memory that it shares with {shares}; \
                     copy the gradient"
                )
            );
            assert_eq!(bits(&[memory.shallow_clone()]), before);
        }
        // A gradient may be the parameter itself, which libtorch takes, too, and one of both.
        optimizer.step_with(&[Some(&weights[0]), Some(&good)]).expect("a step");
        assert_eq!(Vec::<f32>::try_from(&weights[0]).expect("values"), [1.0, 1.5, 2.0, 2.5]);
        optimizer.step_with(&[Some(&good), Some(&good)]).expect("a step");
        assert_eq!(Vec::<f32>::try_from(&weights[0]).expect("values"), [0.5, 1.0, 1.5, 2.0]);
        assert_eq!(Vec::<f32>::try_from(&weights[1]).expect("values"), [7.0, 8.0, 9.0, 10.0]);
    }
}

#[test]
fn gradients_that_do_not_fit_are_refused_before_anything_changes() {
    let _alone = serially();
    for device in devices() {
        let like = (Kind::Float, device);
        let weights = [Tensor::ones([4, 3], like), Tensor::ones([4, 3], like)];
        let good = Tensor::ones([4, 3], like);
        let mut optimizer = adamw(&weights).expect("an optimizer");
        let before = bits(&weights);
        for (gradient, expected) in [
            (
                good.to_sparse_sparse_dim(2),
                "a dense tensor, got a sparse or other layout; sparse embeddings need an optimizer of their own",
            ),
            (
                good.narrow(0, 0, 3),
                "the size [4, 3] of the parameter, got another one, of 9 values",
            ),
            (good.to_kind(Kind::Double), "kind Float, as the parameter, got another kind"),
            (good.to_kind(Kind::ComplexFloat), "kind Float, as the parameter, got another kind"),
        ] {
            let message = text(optimizer.step_with(&[Some(&good), Some(&gradient)]));
            assert_eq!(
                message,
                format!("FusedOptimizer::step: the gradient of w1: expected {expected}")
            );
            assert_eq!(bits(&weights), before);
        }
        if device != CPU {
            let message = text(optimizer.step_with(&[Some(&good), Some(&good.to_device(CPU))]));
            assert!(
                message.contains("expected device Cuda(0), as the parameter, got Cpu"),
                "{message}"
            );
            assert_eq!(bits(&weights), before);
        }
        optimizer.step_with(&[Some(&good), Some(&good)]).expect("a step");
        let half = Tensor::ones([2], (Kind::Half, device));
        let mut of_half = adamw(&[half.shallow_clone()]).expect("an optimizer");
        let message = text(of_half.step_with(&[Some(&half.to_kind(Kind::BFloat16))]));
        let expected =
            "the gradient of w0: expected kind Half, as the parameter, or Float, got another kind";
        assert_eq!(message, format!("FusedOptimizer::step: {expected}"));
    }
}

#[test]
fn a_sparse_gradient_of_an_embedding_is_refused() {
    let _alone = serially();
    for device in devices() {
        let vs = VarStore::new(device);
        let config = tch::nn::EmbeddingConfig { sparse: true, ..Default::default() };
        let table = tch::nn::embedding(vs.root() / "table", 10, 4, config);
        let mut optimizer = AdamW::default().build(&vs, 0.1).expect("an optimizer");
        let before = bits(&[table.ws.shallow_clone()]);
        let tokens = Tensor::from_slice(&[1_i64, 2]).to_device(device);
        use tch::nn::Module;
        let message = text(optimizer.backward_step(&table.forward(&tokens).sum(Kind::Float)));
        assert!(
            message.starts_with(
                "FusedOptimizer::step: the gradient of table.weight: expected a dense tensor"
            ),
            "{message}"
        );
        assert_eq!(bits(&[table.ws.shallow_clone()]), before);
    }
}

#[test]
fn converted_parameters_are_refused() {
    let _alone = serially();
    for device in devices() {
        let mut vs = VarStore::new(device);
        let w = vs.root().ones("w", &[3]);
        let mut optimizer = AdamW::default().build(&vs, 0.1).expect("an optimizer");
        // Before the first step, all is well.
        vs.double();
        optimizer.backward_step(&w.sum(Kind::Double)).expect("backward_step");
        vs.float();
        let before = bits(&[w.shallow_clone()]);
        let loss = w.sum(Kind::Float);
        optimizer.zero_grad().expect("zero_grad");
        loss.backward();
        assert_eq!(
            text(optimizer.step()),
            format!(
                "FusedOptimizer::step: w: expected 3 values Double on {device:?}, as before, got 3 values Float on \
                 {device:?}; build the optimizer after parameters are converted or moved"
            )
        );
        assert_eq!(bits(&[w.shallow_clone()]), before);
    }
}

#[test]
fn parameters_in_another_memory_format_are_refused() {
    let _alone = serially();
    for device in devices() {
        let vs = VarStore::new(device);
        let mut w = vs.root().randn_standard("w", &[2, 3]);
        let mut optimizer = AdamW::default().build(&vs, 0.1).expect("an optimizer");
        let step = |optimizer: &mut FusedOptimizer, w: &Tensor| {
            optimizer.zero_grad().expect("zero_grad");
            w.square().sum(Kind::Float).backward();
            optimizer.step()
        };
        step(&mut optimizer, &w).expect("a step");
        w.set_data(&w.transpose(0, 1).contiguous().transpose(0, 1));
        let before = bits(&[w.contiguous()]);
        assert_eq!(
            text(step(&mut optimizer, &w)),
            "FusedOptimizer::step: w: expected the strides of before, got strides [1, 2]; build the optimizer after the \
             memory format of parameters is changed"
        );
        assert_eq!(bits(&[w.contiguous()]), before);
        w.set_data(&w.contiguous());
        step(&mut optimizer, &w).expect("a step as before");
    }
}

#[test]
fn master_weights_are_chosen_before_the_first_step() {
    let _alone = serially();
    let w = Tensor::ones([2], (Kind::Half, CPU));
    let mut optimizer = adamw(&[w.shallow_clone()]).expect("an optimizer");
    optimizer.set_master_weights(false).expect("set_master_weights");
    optimizer.step_with(&[Some(&w.copy())]).expect("a step");
    assert_eq!(
        text(optimizer.set_master_weights(true)),
        "FusedOptimizer::set_master_weights: self: expected an optimizer without steps, got steps; call it right after \
         build"
    );
}

#[test]
#[should_panic(
    expected = "FusedOptimizer::set_lr: lr: expected a finite number, 0 or more, got inf"
)]
fn functions_without_a_result_panic() {
    let mut optimizer = adamw(&[Tensor::ones([2], (Kind::Float, CPU))]).expect("an optimizer");
    optimizer.set_lr(f64::INFINITY).expect("set_lr");
}

#[test]
fn an_optimizer_of_nothing_does_nothing() {
    let _alone = serially();
    for device in devices() {
        let vs = VarStore::new(device);
        let mut optimizer = AdamW::default().build(&vs, 0.1).expect("an optimizer");
        optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
        optimizer.zero_grad().expect("zero_grad");
        optimizer.step().expect("step");
        optimizer.clip_grad_value(1.0).expect("clip_grad_value");
        assert_eq!(optimizer.clip_grad_norm(1.0).expect("clip_grad_norm").double_value(&[]), 0.0);
        assert!(optimizer.grad_norm().expect("grad_norm").is_none());
        // Only an empty parameter, and only one without a gradient.
        for has_gradient in [true, false] {
            let w = Tensor::ones([0], (Kind::Float, device)).set_requires_grad(true);
            let mut optimizer = adamw(&[w.shallow_clone()]).expect("an optimizer");
            optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
            if has_gradient {
                accumulate(&[w.shallow_clone()], 1.0);
            }
            optimizer.step().expect("step");
            let norm = optimizer.grad_norm().expect("grad_norm").map(|norm| norm.double_value(&[]));
            assert_eq!(norm, has_gradient.then_some(0.0));
        }
    }
}
