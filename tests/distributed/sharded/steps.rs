//! Weights after steps.

use super::*;
use tch_extension::amp::{GradScaler, GradScalerOptions};
use tch_extension::distributed::{Compression, run_ranks};

/// Compares the weights after some steps, on each number of ranks, with an ordinary optimizer's. With
/// one and with two ranks all sums are the same, bit by bit.
fn compare(
    kind: Kind,
    options: &ShardedOptions,
    tolerance: f64,
    build: impl Fn(Vec<NamedTensor>) -> Result<FusedOptimizer> + Sync,
) {
    for ranks in 1..=4 {
        let expected = model(&SIZES, kind, CPU);
        let mut optimizer = build(named(&expected)).expect("an optimizer");
        reference(&expected, &mut optimizer, ranks, 0..4);
        let run = |group: &ProcessGroup| {
            let leaves = model(&SIZES, kind, CPU);
            let optimizer = build(named(&leaves))?;
            let mut optimizer = ShardedOptimizer::new(group, optimizer, options)?;
            train(&leaves, &mut optimizer, 0..4)?;
            Ok(copies(&leaves))
        };
        // With operations that are compared, which wait for one another, and with others.
        let mut all = run_ranks(ranks, |group| run(&group)).expect("all ranks");
        let timeout = std::time::Duration::from_secs(10);
        all.extend(crate::unchecked(ranks, timeout, run).expect("all ranks"));
        for weights in &all {
            assert_eq!(bits(weights), bits(&all[0]), "ranks have the same weights");
            if tolerance == 0.0 || ranks <= 2 && tolerance < 1e-3 {
                assert_eq!(bits(weights), bits(&expected), "{kind:?} on {ranks} ranks");
            }
            let worst = worst(weights, &expected);
            assert!(worst <= tolerance, "{kind:?} on {ranks} ranks: {worst}");
        }
    }
}

#[test]
fn adamw_is_an_ordinary_one_with_mean_gradients() {
    let build = |named| AdamW::default().wd(0.1).build_of(named, 0.02);
    compare(Kind::Float, &small_buckets(), 1e-5, build);
    compare(Kind::Double, &small_buckets(), 1e-12, build);
    compare(Kind::Float, &ShardedOptions::default(), 1e-5, build);
    let other = AdamW::default().beta2(0.5).amsgrad(true).maximize(true);
    compare(Kind::Float, &small_buckets(), 1e-5, |named| other.build_of(named, 0.02));
}

#[test]
fn sgd_is_an_ordinary_one_with_mean_gradients() {
    let momentum = Sgd { momentum: 0.9, wd: 0.01, nesterov: true, maximize: true, dampening: 0.0 };
    compare(Kind::Float, &small_buckets(), 1e-5, |named| momentum.build_of(named, 0.02));
    compare(Kind::Float, &small_buckets(), 1e-5, |named| Sgd::default().build_of(named, 0.02));
}

#[test]
fn groups_keep_their_numbers() {
    compare(Kind::Float, &small_buckets(), 1e-5, |named| {
        let mut optimizer = AdamW::default().wd(0.2).build_of(named, 0.02)?;
        optimizer.set_lr_group(1, 0.003)?;
        optimizer.set_betas_group(1, 0.7, 0.9)?;
        optimizer.no_weight_decay(|_, tensor| tensor.dim() < 2);
        Ok(optimizer)
    });
}

/// Half kinds: a gradient is divided before it is added, so that its rounding differs from that of
/// the reference with three ranks only.
#[test]
fn half_kinds_have_master_weights() {
    for (kind, tolerance) in [(Kind::BFloat16, 2e-2), (Kind::Half, 2e-3)] {
        compare(kind, &small_buckets(), tolerance, |named| AdamW::default().build_of(named, 1e-3));
        compare(kind, &small_buckets(), tolerance, |named| {
            let mut optimizer = AdamW::default().build_of(named, 1e-3)?;
            optimizer.set_master_weights(false)?;
            Ok(optimizer)
        });
    }
}

#[test]
fn half_kinds_agree_bit_by_bit_on_two_ranks() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let expected = model(&SIZES, kind, CPU);
        let mut optimizer = AdamW::default().build_of(named(&expected), 1e-3).expect("one");
        reference(&expected, &mut optimizer, 2, 0..4);
        let all = run_ranks(2, |group| {
            let leaves = model(&SIZES, kind, CPU);
            let optimizer = AdamW::default().build_of(named(&leaves), 1e-3)?;
            let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
            train(&leaves, &mut optimizer, 0..4)?;
            Ok(copies(&leaves))
        })
        .expect("all ranks");
        assert_eq!(bits(&all[0]), bits(&expected), "{kind:?}");
        assert_eq!(bits(&all[1]), bits(&expected), "{kind:?}");
    }
}

#[test]
fn master_weights_of_the_caller_are_where_ranks_begin() {
    let whole = |leaves: &[Tensor]| -> Vec<Tensor> {
        let master = |leaf: &Tensor| leaf.to_kind(Kind::Float).detach() + 1e-3;
        leaves.iter().map(master).collect()
    };
    let build = |leaves: &[Tensor], masters: &[Tensor]| {
        let mut optimizer = AdamW::default().build_of(named(leaves), 1e-3)?;
        let names: Vec<String> = (0..masters.len()).map(|place| format!("w{place}")).collect();
        let pairs: Vec<(&str, &Tensor)> =
            names.iter().map(String::as_str).zip(masters.iter()).collect();
        optimizer.set_masters(&pairs)?;
        Ok::<_, Error>(optimizer)
    };
    let expected = model(&SIZES, Kind::BFloat16, CPU);
    let masters = whole(&expected);
    let mut optimizer = build(&expected, &masters).expect("an optimizer");
    reference(&expected, &mut optimizer, 2, 0..3);
    let all = run_ranks(2, |group| {
        let leaves = model(&SIZES, Kind::BFloat16, CPU);
        let mut own = whole(&leaves);
        if group.rank() == 1 {
            // They get the values of rank 0.
            own.iter_mut().for_each(|master| drop(master.zero_()));
        }
        let optimizer = build(&leaves, &own)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        train(&leaves, &mut optimizer, 0..3)?;
        Ok((copies(&leaves), optimizer.gather_state_dict()?))
    })
    .expect("all ranks");
    assert_eq!(bits(&all[0].0), bits(&expected));
    assert_eq!(bits(&all[1].0), bits(&expected));
    let state = all[0].1.as_ref().expect("a state on rank 0");
    for (place, master) in masters.iter().enumerate().filter(|(_, master)| master.numel() > 0) {
        assert_eq!(state[&format!("master.w{place}")], *master);
    }
}

#[test]
fn rounded_gradients_are_nearly_the_same() {
    let options = ShardedOptions { compression: Compression::BFloat16, ..small_buckets() };
    for ranks in 2..=3 {
        let expected = model(&SIZES, Kind::Float, CPU);
        let mut optimizer = Sgd::default().build_of(named(&expected), 0.1).expect("one");
        reference(&expected, &mut optimizer, ranks, 0..2);
        let all = run_ranks(ranks, |group| {
            let leaves = model(&SIZES, Kind::Float, CPU);
            let optimizer = Sgd::default().build_of(named(&leaves), 0.1)?;
            let mut optimizer = ShardedOptimizer::new(&group, optimizer, &options)?;
            train(&leaves, &mut optimizer, 0..2)?;
            Ok(copies(&leaves))
        })
        .expect("all ranks");
        let worst = worst(&all[0], &expected);
        assert!(worst > 0.0 && worst < 0.01, "{worst}");
        assert!(all.iter().all(|weights| bits(weights) == bits(&all[0])));
    }
}

/// Also ranks that have no values at all.
#[test]
fn norms_are_clipped_over_all_ranks() {
    for sizes in [&SIZES[..], &[&[3], &[2]]] {
        for ranks in 1..=4 {
            let expected = model(sizes, Kind::Float, CPU);
            let mut optimizer = AdamW::default().build_of(named(&expected), 0.02).expect("one");
            optimizer.set_clip_norm(Some(0.5)).expect("set_clip_norm");
            reference(&expected, &mut optimizer, ranks, 0..3);
            let norm = optimizer.grad_norm().expect("grad_norm").expect("a norm").double_value(&[]);
            let all = run_ranks(ranks, |group| {
                let leaves = model(sizes, Kind::Float, CPU);
                let mut optimizer = AdamW::default().build_of(named(&leaves), 0.02)?;
                optimizer.set_clip_norm(Some(0.5))?;
                let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
                assert!(optimizer.grad_norm()?.is_none());
                train(&leaves, &mut optimizer, 0..3)?;
                let norm = optimizer.grad_norm()?.expect("a norm").double_value(&[]);
                optimizer.set_clip_norm(None)?;
                assert!(optimizer.grad_norm()?.is_none());
                Ok((copies(&leaves), norm))
            })
            .expect("all ranks");
            for (weights, own) in &all {
                assert_eq!(bits(weights), bits(&all[0].0));
                assert_eq!(own.to_bits(), all[0].1.to_bits());
                assert!((own - norm).abs() < 1e-5 * norm, "{own} instead of {norm}");
                assert!(worst(weights, &expected) < 1e-5);
                if ranks == 1 {
                    assert_eq!((bits(weights), *own), (bits(&expected), norm));
                }
            }
        }
    }
}

#[test]
fn one_rank_with_an_infinite_gradient_skips_the_step_of_all() {
    for sizes in [&SIZES[..], &[&[3], &[2]]] {
        for ranks in 1..=4 {
            let expected = model(sizes, Kind::Float, CPU);
            let mut optimizer = AdamW::default().build_of(named(&expected), 0.02).expect("one");
            reference(&expected, &mut optimizer, ranks, 0..1);
            reference(&expected, &mut optimizer, ranks, 2..3);
            let all = run_ranks(ranks, |group| {
                let leaves = model(sizes, Kind::Float, CPU);
                let optimizer = AdamW::default().build_of(named(&leaves), 0.02)?;
                let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
                let options = GradScalerOptions { init_scale: 256.0, ..Default::default() };
                let mut scaler = GradScaler::new(options)?;
                let mut stepped = Vec::new();
                for step in 0..3 {
                    let mut loss = loss(&leaves, group.rank(), step);
                    if step == 1 && group.rank() == ranks - 1 {
                        loss *= f64::INFINITY;
                    }
                    scaler.scale(&loss)?.f_backward()?;
                    stepped.push(scaler.step(&mut optimizer)?);
                    scaler.update()?;
                }
                Ok((copies(&leaves), stepped, scaler.scale_factor()?))
            })
            .expect("all ranks");
            for (weights, stepped, scale) in &all {
                assert_eq!((stepped.as_slice(), *scale), (&[true, false, true][..], 128.0));
                assert_eq!(bits(weights), bits(&all[0].0));
                assert!(worst(weights, &expected) < 1e-5);
                if ranks <= 2 {
                    // Powers of two scale without rounding.
                    assert_eq!(bits(weights), bits(&expected), "{ranks} ranks");
                }
            }
        }
    }
}

#[test]
fn numbers_can_be_set_later() {
    let expected = model(&SIZES, Kind::Float, CPU);
    let mut whole = AdamW::default().build_of(named(&expected), 0.02).expect("one");
    reference(&expected, &mut whole, 2, 0..1);
    whole.no_weight_decay(|name, tensor| name == "w0" || tensor.dim() == 1);
    whole.set_lr(0.01).expect("set_lr");
    whole.set_lr_group(1, 0.005).expect("set_lr_group");
    whole.set_weight_decay(0.3).expect("set_weight_decay");
    whole.set_weight_decay_group(1, 0.2).expect("set_weight_decay_group");
    whole.set_momentum(0.8).expect("set_momentum");
    whole.set_momentum_group(0, 0.85).expect("set_momentum_group");
    whole.set_betas_group(1, 0.6, 0.9).expect("set_betas_group");
    reference(&expected, &mut whole, 2, 1..3);
    let all = run_ranks(2, |group| {
        let leaves = model(&SIZES, Kind::Float, CPU);
        let optimizer = AdamW::default().build_of(named(&leaves), 0.02)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        train(&leaves, &mut optimizer, 0..1)?;
        optimizer.no_weight_decay(|name, tensor| name == "w0" || tensor.dim() == 1);
        optimizer.set_lr(0.01)?;
        optimizer.set_lr_group(1, 0.005)?;
        optimizer.set_weight_decay(0.3)?;
        optimizer.set_weight_decay_group(1, 0.2)?;
        optimizer.set_momentum(0.8)?;
        optimizer.set_momentum_group(0, 0.85)?;
        optimizer.set_betas_group(1, 0.6, 0.9)?;
        assert_eq!((optimizer.lr_of_group(1), optimizer.lr_of_group(7)), (Some(0.005), None));
        train(&leaves, &mut optimizer, 1..3)?;
        Ok(copies(&leaves))
    })
    .expect("all ranks");
    assert_eq!(bits(&all[0]), bits(&expected));
    assert_eq!(bits(&all[1]), bits(&expected));
}

#[test]
fn states_are_distributed() {
    let whole: usize = SIZES.iter().map(|size| size.iter().product::<i64>() as usize * 8).sum();
    for ranks in 1..=4 {
        let bytes = run_ranks(ranks, |group| {
            let leaves = model(&SIZES, Kind::Float, CPU);
            let optimizer = AdamW::default().build_of(named(&leaves), 0.02)?;
            let mut optimizer =
                ShardedOptimizer::new(&group, optimizer, &ShardedOptions::default())?;
            assert_eq!(optimizer.state_bytes(), 0);
            train(&leaves, &mut optimizer, 0..1)?;
            Ok(optimizer.state_bytes())
        })
        .expect("all ranks");
        assert_eq!(bytes.iter().sum::<usize>(), whole);
        // Alignment costs up to 63 values for each of 8 parameters and the ranks' parts.
        let most = whole / ranks + 8 * 64 * 9;
        assert!(bytes.iter().all(|bytes| *bytes <= most), "{bytes:?} of {whole}");
    }
}

#[test]
fn mixed_kinds_and_frozen_parameters() {
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Half];
    let mixed = |seed: f64| -> Vec<Tensor> {
        let leaf = |(place, size): (usize, &&[i64])| {
            let leaf = values(size, seed + place as f64, kinds[place % 4], CPU);
            leaf.set_requires_grad(place != 5)
        };
        SIZES.iter().enumerate().map(leaf).collect()
    };
    let trained = |leaves: &[Tensor]| -> Vec<Tensor> {
        leaves.iter().filter(|leaf| leaf.requires_grad()).map(Tensor::shallow_clone).collect()
    };
    let expected = mixed(0.0);
    let mut optimizer = AdamW::default().build_of(named(&trained(&expected)), 1e-3).expect("one");
    reference(&trained(&expected), &mut optimizer, 2, 0..3);
    let all = run_ranks(2, |group| {
        let leaves = mixed(group.rank() as f64);
        let optimizer = AdamW::default().build_of(named(&leaves), 1e-3)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        assert_eq!(optimizer.names().count(), 7);
        train(&trained(&leaves), &mut optimizer, 0..3)?;
        Ok(copies(&leaves))
    })
    .expect("all ranks");
    assert_eq!(bits(&all[0]), bits(&all[1]));
    assert_eq!(bits(&all[0]), bits(&expected));
}

/// Also if it is the only one of its kind.
#[test]
fn a_parameter_without_values_does_no_harm() {
    run_ranks(3, |group| {
        let leaf = |size: &[i64], kind| values(size, 1.0, kind, CPU).set_requires_grad(true);
        let leaves = vec![leaf(&[7], Kind::Float), leaf(&[0, 3], Kind::Double)];
        let optimizer = AdamW::default().build_of(named(&leaves), 0.1)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        let before = copies(&leaves);
        train(&leaves, &mut optimizer, 0..2)?;
        assert!(worst(&leaves, &before) > 0.1);
        // A step without a gradient of the empty one.
        optimizer.backward_step(&leaves[0].sum(Kind::Float))?;
        let state = optimizer.gather_state_dict()?;
        if let Some(state) = &state {
            let steps = |name: &str| state[name].int64_value(&[]);
            assert_eq!((steps("step.w0"), steps("step.w1")), (3, 0));
        }
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn any_order_of_strides_is_kept() {
    let strided = || -> Vec<Tensor> {
        let sizes: [&[i64]; 3] = [&[40, 30], &[7], &[3, 4, 5]];
        let leaf = |(place, size): (usize, &&[i64])| {
            let (contiguous, last) = (values(size, place as f64, Kind::Float, CPU), size.len() - 1);
            contiguous.transpose(0, last as i64).set_requires_grad(true)
        };
        sizes.iter().enumerate().map(leaf).collect()
    };
    let expected = strided();
    let mut optimizer = AdamW::default().build_of(named(&expected), 0.02).expect("one");
    reference(&expected, &mut optimizer, 2, 0..3);
    let all = run_ranks(2, |group| {
        let leaves = strided();
        let strides: Vec<Vec<i64>> = leaves.iter().map(Tensor::stride).collect();
        let optimizer = AdamW::default().build_of(named(&leaves), 0.02)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        train(&leaves, &mut optimizer, 0..3)?;
        assert_eq!(leaves.iter().map(Tensor::stride).collect::<Vec<_>>(), strides);
        Ok(copies(&leaves))
    })
    .expect("all ranks");
    assert_eq!(bits(&all[0]), bits(&expected));
    assert_eq!(bits(&all[1]), bits(&expected));
}

#[test]
fn ranks_begin_with_the_weights_of_rank_0() {
    let all = run_ranks(3, |group| {
        let leaves: Vec<Tensor> = (0..3)
            .map(|place| {
                let seed = (place + 10 * group.rank()) as f64;
                values(&[50], seed, Kind::Float, CPU).set_requires_grad(true)
            })
            .collect();
        let optimizer = Sgd::default().build_of(named(&leaves), 0.1)?;
        let _optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        Ok(copies(&leaves))
    })
    .expect("all ranks");
    assert_eq!(all[0][2], values(&[50], 2.0, Kind::Float, CPU));
    assert!(all.iter().all(|weights| bits(weights) == bits(&all[0])));
}

/// Autograd must see that a step changes weights.
#[test]
fn a_step_changes_the_versions_of_weights() {
    let leaves = model(&[&[4]], Kind::Float, CPU);
    let optimizer = Sgd::default().build_of(named(&leaves), 0.1).expect("one");
    let group = ProcessGroup::single().expect("a group");
    let options = ShardedOptions::default();
    let mut optimizer = ShardedOptimizer::new(&group, optimizer, &options).expect("one");
    let saved = leaves[0].square().sum(Kind::Float);
    train(&leaves, &mut optimizer, 0..1).expect("a step");
    let error = saved.f_backward().expect_err("the weight was changed").to_string();
    assert!(error.contains("inplace operation"), "{error}");
}

/// As in an ordinary optimizer, weights that the caller keeps are used even if the optimizer makes none.
#[test]
fn masters_of_the_caller_are_used_without_own_ones() {
    let group = ProcessGroup::single().expect("a group");
    let run = |sharded: bool| -> Result<Vec<Vec<u8>>> {
        let leaves = model(&[&[300], &[40]], Kind::BFloat16, CPU);
        let master = leaves[0].detach().to_kind(Kind::Float);
        let mut optimizer = Sgd::default().build_of(named(&leaves), 1e-3)?;
        optimizer.set_master_weights(false)?;
        optimizer.set_masters(&[("w0", &master)])?;
        if sharded {
            let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
            train(&leaves, &mut optimizer, 0..12)?;
        } else {
            for step in 0..12 {
                optimizer.zero_grad()?;
                loss(&leaves, 0, step).f_backward()?;
                optimizer.step()?;
            }
        }
        Ok(bits(&leaves))
    };
    assert_eq!(run(true).expect("steps"), run(false).expect("steps"));
}
