//! What `Ddp` must refuse, and what happens when a rank fails: an error that says why, on every
//! rank, before the timeout.

use super::children::{self, Child};
use super::ddp_support::*;
use std::time::{Duration, Instant};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::distributed::{
    CommHook, Ddp, DdpOptimizer, DdpOptions, GroupOptions, ProcessGroup, ReduceOp, Store,
};
use tch_extension::optim::Optimizer;
use tch_extension::{Error, Result};

fn sgd(vs: &VarStore) -> nn::Optimizer {
    use nn::OptimizerConfig;
    nn::Sgd::default().build(vs, 0.1).expect("an optimizer")
}

/// A network with its Ddp and a guarded optimizer.
struct Trained {
    vs: VarStore,
    weights: Vec<Tensor>,
    ddp: Ddp,
    optimizer: DdpOptimizer<nn::Optimizer>,
}

fn trained(group: &ProcessGroup, options: DdpOptions) -> Result<Trained> {
    let (vs, ddp, weights) = averaged(group, 1, options)?;
    let optimizer = ddp.guard(sgd(&vs))?;
    Ok(Trained { vs, weights, ddp, optimizer })
}

impl Trained {
    fn loss(&self, step: i64) -> Tensor {
        loss(&self.weights, &batch(self.ddp.group().rank(), step))
    }

    fn step(&mut self, step: i64) -> Result<()> {
        drop_gradients(&self.vs, false)?;
        let loss = self.ddp.forward(|| Ok(self.loss(step)))?;
        self.ddp.backward(&loss)?;
        self.optimizer.step()
    }
}

/// Each rank makes a model that depends on its rank. All must get an error with these words, and
/// the group must be as good as before.
fn assert_refused(n: usize, words: &[&str], make: impl Fn(&ProcessGroup) -> Result<Ddp> + Sync) {
    all_ranks(n, |group| {
        let error = make(group).expect_err("they differ").to_string();
        for word in words {
            assert!(error.contains(word), "{word} is missing: {error}");
        }
        assert!(!error.contains('\n'), "{error}");
        let x = Tensor::from(1.0);
        group.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x.double_value(&[]), n as f64);
        Ok(())
    });
}

#[test]
fn models_that_differ_are_an_error_on_every_rank() {
    let one = |name: &str, tensor: &Tensor, group: &ProcessGroup| {
        Ddp::of_tensors(group, &[(name, tensor)], &[], DdpOptions::default())
    };
    let zeros =
        |size: &[i64], kind: Kind| Tensor::zeros(size, (kind, Device::Cpu)).set_requires_grad(true);
    assert_refused(3, &["[16, 16]", "ranks 1, 2 have", "[15, 16]"], |group| {
        let rows = if group.rank() == 0 { 16 } else { 15 };
        one("weight", &zeros(&[rows, 16], Kind::Float), group)
    });
    assert_refused(3, &["parameter \"weight\"", "rank 2 has", "\"wait\""], |group| {
        one(if group.rank() == 2 { "wait" } else { "weight" }, &zeros(&[4], Kind::Float), group)
    });
    assert_refused(2, &["Float [4]", "Double [4]"], |group| {
        one("w", &zeros(&[4], [Kind::Float, Kind::Double][group.rank()]), group)
    });
    assert_refused(2, &["rank 0 has parameter", "rank 1 has frozen parameter"], |group| {
        let (first, second) = (zeros(&[4], Kind::Float), zeros(&[4], Kind::Float));
        let second = second.set_requires_grad(group.rank() == 0);
        let named = [("first", &first), ("second", &second)];
        Ddp::of_tensors(group, &named, &[], DdpOptions::default())
    });
    assert_refused(2, &["rank 0 has nothing", "\"layer4.weight\""], |group| {
        let vs = network(0);
        if group.rank() == 1 {
            let _ = (vs.root() / "layer4").zeros("weight", &[2]);
        }
        Ddp::new(group, &vs, DdpOptions::default())
    });
    assert_refused(2, &["buffer \"b\""], |group| {
        let w = zeros(&[4], Kind::Float);
        let b = Tensor::zeros([2 + group.rank() as i64], (Kind::Float, Device::Cpu));
        Ddp::of_tensors(group, &[("w", &w)], &[("b", &b)], DdpOptions::default())
    });
    assert_refused(2, &["options", "static_graph true", "static_graph false"], |group| {
        let options = DdpOptions { static_graph: group.rank() == 1, ..Default::default() };
        Ddp::new(group, &network(0), options)
    });
}

#[test]
fn a_model_that_one_rank_cannot_use_is_an_error_on_every_rank() {
    let cpu = (Kind::Float, Device::Cpu);
    let leaf = || Tensor::zeros([2], cpu).set_requires_grad(true);
    assert_refused(2, &["w", "expected a leaf"], |group| {
        let w = if group.rank() == 1 { leaf() * 2.0 } else { leaf() };
        Ddp::of_tensors(group, &[("w", &w)], &[], DdpOptions::default())
    });
    assert_refused(2, &["expected at least one that requires a gradient"], |group| {
        let w = leaf().set_requires_grad(group.rank() == 0);
        Ddp::of_tensors(group, &[("w", &w)], &[], DdpOptions::default())
    });
    assert_refused(2, &["bucket_cap_mb: expected a size in MiB"], |group| {
        let bucket_cap_mb = if group.rank() == 1 { 0.0 } else { 25.0 };
        Ddp::new(group, &network(0), DdpOptions { bucket_cap_mb, ..Default::default() })
    });
    assert_refused(2, &["the same name twice"], |group| {
        let (a, b) = (leaf(), leaf());
        Ddp::of_tensors(group, &[("w", &a), ("w", &b)], &[], DdpOptions::default())
    });
    assert_refused(2, &["a tensor with another name, too"], |group| {
        let a = leaf();
        Ddp::of_tensors(group, &[("v", &a), ("w", &a)], &[], DdpOptions::default())
    });
    assert_refused(2, &["a sparse or other layout"], |group| {
        let sparse = Tensor::eye(3, cpu).to_sparse_sparse_dim(2);
        let tensors = [("w", &leaf())];
        Ddp::of_tensors(group, &tensors, &[("b", &sparse)], DdpOptions::default())
    });
}

#[test]
fn with_python_other_ranks_do_not_wait_for_one_that_differs() {
    let errors = all_fail(3, |group| {
        let rows = if group.rank() == 1 { 15 } else { 16 };
        let w = Tensor::zeros([rows, 400], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let options = DdpOptions { with_python: true, ..Default::default() };
        Ddp::of_tensors(group, &[("w", &w)], &[], options)
    });
    assert!(errors[1].contains("params[0] in this process with sizes [15, 400]"), "{}", errors[1]);
}

#[test]
fn gradients_that_were_not_averaged_stop_the_step() {
    type Misuse = fn(&mut Trained) -> Result<()>;
    let cases: [(&str, Misuse); 6] = [
        ("did not begin in Ddp::forward", |trained| {
            trained.loss(1).backward();
            Ok(())
        }),
        ("by a second one of the same forward pass", |trained| {
            let loss = trained.ddp.forward(|| Ok(trained.loss(1)))?;
            let options = tch_extension::autograd::BackwardOptions {
                retain_graph: Some(true),
                ..Default::default()
            };
            tch_extension::autograd::backward(&[&loss], &options)?;
            tch_extension::autograd::backward(&[&loss], &options)
        }),
        ("in Ddp::no_sync", |trained| {
            let ddp = trained.ddp.clone();
            ddp.no_sync(|| ddp.backward(&ddp.forward(|| Ok(trained.loss(1)))?))
        }),
        ("no backward pass was synchronised since the last step", |_| Ok(())),
        ("no backward pass was synchronised since the last step", |trained| {
            trained.ddp.forward(|| Ok(trained.loss(1))).map(drop)
        }),
        ("this rank only", |trained| {
            // Both: the second belongs to nobody.
            let loss = trained.ddp.forward(|| Ok(trained.loss(1)))?;
            trained.ddp.backward(&loss)?;
            trained.loss(2).backward();
            Ok(())
        }),
    ];
    for (words, misuse) in cases {
        let errors = all_fail(2, |group| {
            let mut trained = trained(group, DdpOptions::default())?;
            trained.step(0)?;
            if group.rank() == 1 {
                misuse(&mut trained)?;
                let before = copies(&trained.weights);
                let outcome = trained.optimizer.step();
                assert_eq!(worst(&before, &trained.weights), 0.0, "nothing was applied");
                return outcome;
            }
            // This one goes on, until it misses the other.
            (1..).try_for_each(|step| trained.step(step))
        });
        assert!(errors[1].contains(words), "{}", errors[1]);
        assert!(errors[0].contains("rank 1"), "{}", errors[0]);
    }
}

#[test]
fn a_backward_pass_outside_is_fine_when_a_synchronised_one_follows() {
    all_ranks(2, |group| {
        let mut trained = trained(group, DdpOptions::default())?;
        trained.loss(5).backward();
        drop_gradients(&trained.vs, false)?;
        for step in 0..3 {
            trained.step(step)?;
            assert!(is_alike(group, &trained.weights[0])?);
        }
        Ok(())
    });
}

#[test]
fn parameters_without_a_gradient_are_named() {
    for static_graph in [false, true] {
        let errors = all_fail(2, |group| {
            let trained = trained(group, DdpOptions { static_graph, ..Default::default() })?;
            for (step, left_out) in [(0, &[][..]), (1, &[]), (2, &[1])] {
                let x = batch(group.rank(), step);
                let y = || output(&trained.weights, &x, left_out);
                let loss = trained.ddp.forward(|| Ok(y().mean(Kind::Float)))?;
                trained.ddp.backward(&loss)?;
            }
            Ok(())
        });
        for error in errors {
            assert!(error.contains("no gradient to layer1.weight, layer1.bias"), "{error}");
            let way_out = if static_graph { "the same parameters" } else { "find_unused" };
            assert!(error.contains(way_out) && !error.contains('\n'), "{error}");
        }
    }
}

/// Also with tch's own backward, which leaves the finding to the next call.
#[test]
fn an_unfinished_reduction_is_found_by_the_step_and_by_the_next_forward_pass() {
    for by_step in [false, true] {
        let errors = all_fail(2, |group| {
            let mut trained = trained(group, DdpOptions::default())?;
            let y = || output(&trained.weights, &batch(group.rank(), 0), &[3]);
            let loss = trained.ddp.forward(|| Ok(y().mean(Kind::Float)))?;
            loss.backward();
            match by_step {
                true => trained.optimizer.step(),
                false => trained.ddp.forward(|| Ok(trained.loss(1))).map(drop),
            }
        });
        assert!(errors.iter().all(|error| error.contains("layer3.weight")), "{errors:?}");
    }
}

#[test]
fn a_loss_that_ignores_the_outputs_is_named() {
    let errors = all_fail(2, |group| {
        let trained = trained(group, DdpOptions { static_graph: true, ..Default::default() })?;
        let mut inside = None;
        let output = trained.ddp.forward(|| {
            inside = Some(trained.loss(0));
            Ok(trained.loss(0))
        })?;
        drop(output);
        trained.ddp.backward(&inside.expect("it ran"))
    });
    assert!(errors.iter().all(|error| error.contains("outputs of Ddp::forward")), "{errors:?}");
}

#[test]
fn a_rank_that_fails_in_the_forward_pass_fails_all() {
    for panics in [false, true] {
        let errors = all_fail(3, |group| {
            let mut trained = trained(group, DdpOptions::default())?;
            for step in 0..5 {
                if group.rank() == 1 && step == 3 {
                    let ddp = trained.ddp.clone();
                    return ddp
                        .forward(|| -> Result<Tensor> {
                            match panics {
                                true => panic!("out of data"),
                                false => Err(Error::msg("out of data")),
                            }
                        })
                        .map(drop);
                }
                trained.step(step)?;
            }
            Ok(())
        });
        assert!(errors[1].contains("out of data"), "{errors:?}");
        for rank in [0, 2] {
            assert!(errors[rank].contains("rank 1: "), "{errors:?}");
        }
    }
}

/// What remains of a rank that ignores its error.
#[test]
fn a_rank_that_failed_cannot_go_on() {
    all_fail(2, |group| {
        let mut trained = trained(group, DdpOptions::default())?;
        trained.step(0)?;
        if group.rank() == 0 {
            let failed: Result<Tensor> = trained.ddp.forward(|| Err(Error::msg("out of data")));
            assert!(failed.is_err());
            for _ in 0..2 {
                let error = trained.step(1).expect_err("it has failed").to_string();
                assert!(error.contains("the group has failed: out of data"), "{error}");
                let error = trained.ddp.check().expect_err("it has failed").to_string();
                assert!(error.contains("the group has failed"), "{error}");
                let error = trained.optimizer.step().expect_err("it has failed").to_string();
                assert!(error.contains("the group has failed"), "{error}");
            }
            assert!(Ddp::new(group, &trained.vs, DdpOptions::default()).is_err());
        }
        trained.step(1)
    });
}

#[test]
fn a_rank_that_fails_in_the_backward_pass_or_the_step_fails_all() {
    /// Fails in its second step.
    struct Failing(nn::Optimizer, usize);
    impl Optimizer for Failing {
        fn parameters(&self) -> Vec<Tensor> {
            self.0.parameters()
        }
        fn step(&mut self) -> Result<()> {
            self.1 += 1;
            if self.1 == 2 { Err(Error::msg("no memory")) } else { Optimizer::step(&mut self.0) }
        }
    }
    let errors = all_fail(2, |group| {
        let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
        let start = if group.rank() == 0 { 0 } else { 100 };
        let mut optimizer = ddp.guard(Failing(sgd(&vs), start))?;
        (0..5).try_for_each(|step| {
            drop_gradients(&vs, false)?;
            let loss = ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), step))))?;
            ddp.backward(&loss)?;
            optimizer.step()
        })
    });
    assert!(
        errors[0].contains("no memory") && errors[1].contains("rank 0: no memory"),
        "{errors:?}"
    );

    let errors = all_fail(2, |group| {
        let mut trained = trained(group, DdpOptions::default())?;
        let rank = group.rank();
        let hook = tch_extension::autograd::register_hook(&trained.weights[2], move |_| {
            if rank == 1 { Err(Error::msg("a broken hook")) } else { Ok(None) }
        })?;
        let outcome = trained.step(0);
        drop(hook);
        outcome
    });
    assert!(errors[1].contains("a broken hook") && errors[0].contains("rank 1: "), "{errors:?}");
}

#[test]
fn communication_hooks_that_fail_are_errors() {
    for panics in [false, true] {
        let errors = all_fail(2, |group| {
            let (rank, ranks) = (group.rank(), group.clone());
            let hook = CommHook::closure(move |bucket| match (rank, panics) {
                (1, true) => panic!("a broken hook"),
                (1, false) => Err(Error::msg("a broken hook")),
                _ => ranks.all_reduce(bucket.buffer(), ReduceOp::Sum).map(|()| None),
            });
            trained(group, DdpOptions { hook, ..Default::default() })?.step(0)
        });
        assert!(errors[1].contains("the communication hook: "), "{errors:?}");
        assert!(errors.iter().all(|error| error.contains("a broken hook")), "{errors:?}");
    }
    // A hook that uses the Ddp would wait for itself.
    for static_graph in [false, true] {
        let errors = all_fail(2, |group| {
            let own = std::sync::Arc::new(std::sync::OnceLock::<Ddp>::new());
            let of_hook = std::sync::Arc::clone(&own);
            let hook = CommHook::closure(move |_| {
                of_hook.get().map_or(Ok(None), |ddp| ddp.check().map(|()| None))
            });
            let mut trained =
                trained(group, DdpOptions { hook, static_graph, ..Default::default() })?;
            let _ = own.set(trained.ddp.clone());
            trained.step(0)
        });
        assert!(errors.iter().all(|error| error.contains("must not use the Ddp")), "{errors:?}");
    }
}

#[test]
fn a_changed_model_is_named() {
    type Change = fn(&Trained);
    let cases: [(&str, Change); 4] = [
        ("layer1.weight was frozen after Ddp::new", |trained| {
            let _ = trained.weights[2].set_requires_grad(false);
        }),
        ("was converted or moved", |trained| {
            tch::no_grad(|| {
                trained.weights[2]
                    .shallow_clone()
                    .set_data(&trained.weights[2].to_kind(Kind::Double))
            });
        }),
        ("variables were added to the model", |trained| {
            let _ = trained.vs.root().zeros("late", &[2]);
        }),
        ("variables were added to the model", |trained| {
            let _ = trained.vs.root().zeros_no_train("late", &[2]);
        }),
    ];
    for (words, change) in cases {
        let errors = all_fail(2, |group| {
            let mut trained = trained(group, DdpOptions::default())?;
            trained.step(0)?;
            change(&trained);
            trained.step(1)
        });
        assert!(errors.iter().all(|error| error.contains(words)), "{errors:?}");
    }
}

#[test]
fn sparse_gradients_nested_passes_and_foreign_parameters_are_refused() {
    let errors = all_fail(2, |group| {
        let w = numbers(&[20, 4], 1).set_requires_grad(true);
        let ddp = Ddp::of_tensors(group, &[("table", &w)], &[], DdpOptions::default())?;
        let index = Tensor::from_slice(&[1_i64, 3]);
        let look_up = || Tensor::embedding(&w, &index, -1, false, true).sum(Kind::Float);
        ddp.backward(&ddp.forward(|| Ok(look_up()))?)
    });
    assert!(errors.iter().any(|error| error.contains("table got a sparse gradient")), "{errors:?}");

    let errors = all_fail(2, |group| {
        let trained = trained(group, DdpOptions::default())?;
        trained.ddp.forward(|| trained.ddp.forward(|| Ok(trained.loss(0)))).map(drop)
    });
    assert!(errors.iter().all(|error| error.contains("a forward pass is running")), "{errors:?}");

    all_ranks(2, |group| {
        let (_, ddp, _) = averaged(group, 1, DdpOptions::default())?;
        let error = ddp.guard(sgd(&network(2))).expect_err("others").to_string();
        assert!(error.contains("parameter 0, of shape [16, 16]"), "{error}");
        Ok(())
    });
}

/// After every rank has failed, a new group under another name goes on in the same processes.
#[test]
fn a_new_group_goes_on_after_a_failure() {
    let store = Store::hash(TIMEOUT).expect("a store");
    let run = |rank: usize| -> Result<Vec<Tensor>> {
        let group = |name: &str| {
            let mut options = GroupOptions::with_timeout(TIMEOUT);
            options.name = name.to_string();
            ProcessGroup::with_store(&store, rank, 2, &options)
        };
        let vs = network(1);
        let weights = vs.trainable_variables();
        let train = |group: &ProcessGroup, steps: std::ops::Range<i64>, fails: bool| {
            let ddp = Ddp::new(group, &vs, DdpOptions::default())?;
            let mut optimizer = ddp.guard(sgd(&vs))?;
            for step in steps {
                drop_gradients(&vs, false)?;
                let loss = ddp.forward(|| match fails && step == 2 && rank == 1 {
                    true => Err(Error::msg("out of data")),
                    false => Ok(loss(&weights, &batch(rank, step))),
                })?;
                ddp.backward(&loss)?;
                optimizer.step()?;
            }
            Ok::<_, Error>(())
        };
        train(&group("first")?, 0..4, true).expect_err("it fails in step 2");
        drop_gradients(&vs, false)?;
        train(&group("second")?, 2..4, false)?;
        Ok(copies(&weights))
    };
    let results: Vec<Vec<Tensor>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let run = &run;
                scope.spawn(move || run(rank))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic").expect("it goes on"))
            .collect()
    });
    let expected = all_ranks(2, |group| {
        let mut trained = trained(group, DdpOptions::default())?;
        (0..4).try_for_each(|step| trained.step(step))?;
        Ok(copies(&trained.weights))
    });
    assert_eq!(worst(&results[0], &results[1]), 0.0);
    assert_eq!(worst(&results[0], &expected[0]), 0.0);
}

/// A rank of the test below, in a process of its own.
#[test]
fn child_that_may_be_killed() {
    let Some(child) = children::this_child("child_that_may_be_killed") else { return };
    let [rank, place, path] = child.arguments() else { panic!("three arguments") };
    let rank: usize = rank.parse().expect("a rank");
    let store = Store::file(path, 3, TIMEOUT).expect("a store");
    let group = ProcessGroup::with_store(&store, rank, 3, &GroupOptions::with_timeout(TIMEOUT));
    let group = group.expect("a group");
    let mut trained = trained(&group, DdpOptions::default()).expect("a model");
    let kills = |here: &str, step: i64| {
        if rank == 1 && step == 3 && here == place {
            children::kill_this();
        }
    };
    let of_hook = place == "backward" && rank == 1;
    let passes = std::sync::atomic::AtomicI64::new(0);
    let _hook = tch_extension::autograd::register_hook(&trained.weights[4], move |_| {
        if of_hook && passes.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 3 {
            children::kill_this();
        }
        Ok(None)
    });
    let begin = Instant::now();
    let outcome = (0..20).try_for_each(|step| {
        kills("between", step);
        drop_gradients(&trained.vs, false)?;
        let loss = trained.ddp.forward(|| {
            kills("forward", step);
            Ok(trained.loss(step))
        })?;
        trained.ddp.backward(&loss)?;
        kills("step", step);
        trained.optimizer.step()
    });
    let error = outcome.expect_err("a rank was killed").to_string();
    assert!(begin.elapsed() < TIMEOUT / 2, "it noticed late");
    println!("error: {error}");
    // Dropping the group must not hang either.
}

#[test]
fn a_rank_that_is_killed_fails_all() {
    for place in ["forward", "backward", "step", "between"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store").to_string_lossy().into_owned();
        let children: Vec<Child> = (0..3)
            .map(|rank: usize| {
                let arguments = [rank.to_string(), place.to_string(), path.clone()];
                Child::start("ddp_faults::child_that_may_be_killed", &arguments)
            })
            .collect();
        for (rank, child) in children.into_iter().enumerate() {
            let end = child.wait(Duration::from_secs(25));
            assert_eq!(end.signal == Some(9), rank == 1, "{place}, rank {rank}: {}", end.output);
            if rank != 1 {
                assert!(end.success, "{place}, rank {rank}: {}", end.output);
                // Near a step, the optimizer's comparison of the ranks may notice it first.
                let near = ["step", "between"].contains(&place);
                let is_compared = near && end.output.contains("error: all_reduce: rank ");
                let is_named = is_compared && end.output.contains("a rank ended or gave up");
                assert!(is_named || end.output.contains("error: Ddp::"), "{place}: {}", end.output);
            }
        }
    }
}

/// `loss.backward()`, unlike `Ddp::backward`, does not give the group up when it fails.
#[test]
fn a_reduction_that_failed_is_no_average() {
    let options =
        GroupOptions { check: false, ..GroupOptions::with_timeout(Duration::from_secs(2)) };
    super::ranks_with(2, &options, |group| {
        let mut trained = trained(group, DdpOptions::default())?;
        trained.step(0)?;
        drop_gradients(&trained.vs, false)?;
        let loss = trained.ddp.forward(|| Ok(trained.loss(1)))?;
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_secs(5));
            return Ok(());
        }
        let before: Vec<Tensor> = trained.weights.iter().map(|w| w.detach().copy()).collect();
        let error = loss.f_backward().expect_err("rank 1 sends nothing").to_string();
        let refused = trained.ddp.check().expect_err(&error).to_string();
        assert!(refused.contains("did not end"), "{refused}");
        trained.optimizer.step().expect_err("its gradients are no averages");
        for (before, weight) in before.iter().zip(&trained.weights) {
            assert_eq!(*before, weight.detach());
        }
        Ok(())
    })
    .expect("all ranks");
}

/// A static graph does not average what only an unsynchronised pass has used.
#[test]
fn a_static_graph_that_accumulates_another_parameter_is_named() {
    for view in [false, true] {
        let errors = all_fail(2, |group| {
            let options = DdpOptions {
                static_graph: true,
                gradient_as_bucket_view: view,
                ..Default::default()
            };
            let trained = trained(group, options)?;
            let pass = |left_out: &[usize]| {
                let y = || output(&trained.weights, &batch(group.rank(), 0), left_out);
                trained.ddp.backward(&trained.ddp.forward(|| Ok(y().mean(Kind::Float)))?)
            };
            trained.ddp.no_sync(|| pass(&[]))?;
            pass(&[1])
        });
        for error in errors {
            assert!(error.contains("added to layer1.weight, layer1.bias: by"), "{error}");
        }
    }
}
