//! Runs from several threads.

use super::*;

#[test]
fn any_number_of_threads_runs_it() {
    let Some(folder) = packages("any_number_of_threads_runs_it") else { return };
    for (runners, single_threaded) in [(1, false), (1, true), (3, false)] {
        let options = PackageOptions { runners, single_threaded, ..Default::default() };
        let package = Package::load_with(folder.join("model.pt2"), options).unwrap();
        let (weight, bias) = (eighths(&[3, 4]), eighths(&[3]));
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (package, weight, bias) = (&package, &weight.copy(), &bias.copy());
                scope.spawn({
                    let (weight, bias) = (weight.copy(), bias.copy());
                    move || {
                        let inputs = inputs(thread);
                        let expected = expected(&inputs, &weight, &bias);
                        for _ in 0..100 {
                            assert_equal(&run(package, &inputs).unwrap(), &expected);
                        }
                    }
                });
            }
        });
    }
}

/// Each run sees either all old values or all new ones.
#[test]
fn constants_change_between_runs_only() {
    let Some(folder) = packages("constants_change_between_runs_only") else { return };
    let options = PackageOptions { runners: 2, ..Default::default() };
    let package = Package::load_with(folder.join("model.pt2"), options).unwrap();
    let values = |factor: f64| (eighths(&[3, 4]) * factor, eighths(&[3]) * factor);
    std::thread::scope(|scope| {
        let package = &package;
        for _ in 0..3 {
            scope.spawn(move || {
                let inputs = inputs(64);
                let either = [1.0, 2.0].map(|factor| {
                    let (weight, bias) = values(factor);
                    expected(&inputs, &weight, &bias).remove(0)
                });
                for _ in 0..200 {
                    let output = run(package, &inputs).unwrap().remove(0);
                    assert!(either.iter().any(|expected| output.equal(expected)));
                }
            });
        }
        scope.spawn(move || {
            for round in 0..100 {
                let (weight, bias) = values(f64::from(1 + round % 2));
                let all = [("linear.weight", &weight), ("linear.bias", &bias)];
                package.update_constants(&all).unwrap();
            }
        });
    });
}
