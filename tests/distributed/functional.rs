//! Gradients of collectives: those of the sum of all ranks' losses.

use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::distributed::{ProcessGroup, ReduceOp, functional, run_ranks};

type Collective<'a> = &'a (dyn Fn(&ProcessGroup, &Tensor) -> Result<Tensor> + Sync);

/// A rank's loss: a sum with weights that differ over ranks and elements, and not linear.
fn loss(group: &ProcessGroup, y: &Tensor) -> Result<Tensor> {
    let weights = Tensor::arange(y.numel() as i64, (Kind::Double, Device::Cpu)).reshape(y.size())
        * 0.3
        + (group.rank() as f64 + 1.0);
    Ok((weights * y * y).sum(Kind::Double))
}

/// The sum of all ranks' losses.
fn total(group: &ProcessGroup, collective: Collective<'_>, x: &Tensor) -> Result<f64> {
    let sum = tch::no_grad(|| loss(group, &collective(group, x)?))?;
    group.all_reduce(&sum, ReduceOp::Sum)?;
    Ok(sum.double_value(&[]))
}

/// Moves every element of every rank a little, one at a time.
fn check(group: &ProcessGroup, collective: Collective<'_>, x: &Tensor, name: &str) -> Result<()> {
    let leaf = x.copy().set_requires_grad(true);
    loss(group, &collective(group, &leaf)?)?.f_backward()?;
    let gradient = leaf.grad();
    assert_eq!(gradient.size(), x.size(), "{name}");
    const EPS: f64 = 1e-5;
    for moved in 0..group.size() {
        for element in 0..x.numel() as i64 {
            let at = |step: f64| -> Result<f64> {
                let own = x.contiguous().copy();
                if group.rank() == moved {
                    let place = own.view(-1).get(element);
                    place.shallow_clone().copy_(&(&place + step));
                }
                total(group, collective, &own)
            };
            let numerical = (at(EPS)? - at(-EPS)?) / (2.0 * EPS);
            if group.rank() == moved {
                let analytical = gradient.contiguous().view(-1).double_value(&[element]);
                let off = (analytical - numerical).abs();
                assert!(
                    off <= 1e-5 + 1e-6 * numerical.abs(),
                    "{name}, rank {moved}, element {element}: {analytical} and {numerical}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn gradients() {
    let collectives: [(&str, Collective<'_>); 8] = [
        ("all_reduce", &|group, x| functional::all_reduce(group, x, ReduceOp::Sum)),
        ("mean", &|group, x| functional::all_reduce(group, x, ReduceOp::Avg)),
        ("all_gather", &|group, x| functional::all_gather(group, x)),
        ("reduce_scatter", &|group, x| functional::reduce_scatter(group, x, ReduceOp::Sum)),
        ("reduce_scatter mean", &|group, x| functional::reduce_scatter(group, x, ReduceOp::Avg)),
        ("broadcast", &|group, x| functional::broadcast(group, x, 1)),
        ("all_to_all", &|group, x| functional::all_to_all(group, x)),
        ("two of them", &|group, x| {
            let all = functional::all_gather(group, x)?;
            functional::reduce_scatter(group, &(&all * &all), ReduceOp::Avg)
        }),
    ];
    for ranks in [1, 2, 3] {
        run_ranks(ranks, |group| {
            let rows = 2 * ranks as i64;
            let x = Tensor::arange(rows * 2, (Kind::Double, Device::Cpu)).reshape([rows, 2]) * 0.1
                - 0.2 * (group.rank() as f64 + 1.0);
            for (name, collective) in collectives {
                if name == "broadcast" && ranks == 1 {
                    continue;
                }
                check(&group, collective, &x, name)?;
                // A gradient and an input that are not contiguous.
                let wide = Tensor::cat(&[&x, &x], 1);
                check(&group, collective, &wide.slice(1, 0, 4, 2), name)?;
                let transposed: Collective<'_> =
                    &|group, x| Ok(collective(group, x)?.transpose(0, 1));
                check(&group, transposed, &x, name)?;
            }
            Ok(())
        })
        .expect("all ranks");
    }
}

/// The second derivative is that of the sum of all ranks' losses, too.
#[test]
fn second_derivatives() {
    run_ranks(2, |group| {
        let x = Tensor::from_slice(&[1.0 + group.rank() as f64]).set_requires_grad(true);
        // y = x₀ + x₁; the sum of the losses is 2 y³, its gradient 6 y², and the sum of the
        // gradients over the ranks 12 y², whose gradient is 24 y.
        let y = functional::all_reduce(&group, &x, ReduceOp::Sum)?;
        let loss = (&y * &y * &y).sum(Kind::Double);
        let gradient = Tensor::f_run_backward(&[&loss], &[&x], true, true)?.remove(0);
        assert_eq!(gradient.double_value(&[0]), 54.0);
        let second = Tensor::f_run_backward(&[&gradient], &[&x], false, false)?.remove(0);
        assert_eq!(second.double_value(&[0]), 72.0);
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn what_has_no_gradient_is_refused() {
    let group = ProcessGroup::single().expect("a group");
    let x = Tensor::from_slice(&[1.0, 2.0]);
    let error = functional::all_reduce(&group, &x, ReduceOp::Max).expect_err("no gradient");
    let words = "functional::all_reduce: op: expected Sum or Avg, which have gradients, got Max";
    assert!(error.to_string().contains(words), "{error}");
    let error = functional::all_gather(&group, &Tensor::from(1.0)).expect_err("no rows");
    assert!(error.to_string().contains("x: expected at least one dimension"), "{error}");
    run_ranks(2, |group| {
        let x = Tensor::zeros([3, 1], (Kind::Float, Device::Cpu));
        let error = functional::all_to_all(&group, &x).expect_err("3 rows").to_string();
        assert!(error.contains("a first dimension that is a multiple of 2"), "{error}");
        Ok(())
    })
    .expect("all ranks");
}

/// A backward pass in which one rank fails, which says so.
#[test]
fn a_backward_pass_that_fails_on_one_rank() {
    let errors = super::unchecked(2, std::time::Duration::from_secs(10), |group| {
        let x = Tensor::from_slice(&[1.0]).set_requires_grad(true);
        let y = functional::all_reduce(group, &x, ReduceOp::Sum)?;
        if group.rank() == 1 {
            group.poison("its backward pass failed");
        }
        let start = std::time::Instant::now();
        let error = y.f_backward().map_err(tch_extension::Error::from).expect_err("poisoned");
        assert!(start.elapsed() < std::time::Duration::from_secs(2));
        Ok(error.to_string())
    });
    for error in errors.expect("all ranks") {
        assert!(error.contains("its backward pass failed"), "{error}");
    }
}
