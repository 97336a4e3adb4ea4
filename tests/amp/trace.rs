//! Compares our scaler with torch's own, line by line with `grad_scaler.txt`, the output of
//! `grad_scaler.py`.

use super::*;
use tch::nn::{self, OptimizerConfig};

const TRACE: &str = include_str!("grad_scaler.txt");

struct Trained {
    /// Owns the weights.
    _store: nn::VarStore,
    weights: [Tensor; 2],
    optimizer: nn::Optimizer,
    steps: i32,
}

impl Trained {
    fn new(rate: f64) -> Trained {
        let store = nn::VarStore::new(Device::Cpu);
        let root = store.root();
        let weights = [
            root.var_copy("first", &Tensor::from_slice(&[1.0_f32, -2.0])),
            root.var_copy("second", &Tensor::from_slice(&[0.3_f32])),
        ];
        let optimizer = nn::Sgd::default().build(&store, rate).expect("an optimizer");
        Trained { _store: store, weights, optimizer, steps: 0 }
    }

    /// Runs a backward pass whose gradients are the slopes times the scale.
    fn backward(&mut self, scaler: &mut GradScaler, slopes: &[&str]) -> Result<()> {
        self.optimizer.zero_grad();
        let slopes = slopes.iter().map(|slope| slope.parse::<f64>().ok());
        let terms = self.weights.iter().zip(slopes);
        let terms: Vec<_> =
            terms.filter_map(|(w, slope)| Some((w * slope?).sum(Kind::Float))).collect();
        if !terms.is_empty() {
            scaler.scale(&terms.into_iter().sum())?.backward();
        }
        Ok(())
    }

    fn numbers(&self) -> Vec<Option<f32>> {
        let first = |tensor: &Tensor| tensor.defined().then(|| tensor.double_value(&[0]) as f32);
        let weights = self.weights.iter().map(first);
        let gradients = self.weights.iter().map(|weight| first(&weight.grad()));
        std::iter::once(Some(self.steps as f32)).chain(weights).chain(gradients).collect()
    }
}

struct Replay {
    scaler: GradScaler,
    saved: Option<GradScalerState>,
    a: Trained,
    b: Trained,
}

impl Replay {
    fn run(&mut self, command: &str) -> Result<()> {
        let words: Vec<&str> = command.split(' ').collect();
        let number = |place: usize| words[place].parse::<f64>().expect("a number");
        let trained = match words.get(1) {
            Some(&"b") => &mut self.b,
            _ => &mut self.a,
        };
        match words[0] {
            "new" => {
                self.scaler = GradScaler::new(GradScalerOptions {
                    init_scale: number(1),
                    growth_factor: number(2),
                    backoff_factor: number(3),
                    growth_interval: number(4) as i64,
                    enabled: words.get(5).is_none(),
                })?;
            }
            "backward" => trained.backward(&mut self.scaler, &words[2..])?,
            "unscale" => self.scaler.unscale(&trained.optimizer)?,
            "step" => trained.steps += i32::from(self.scaler.step(&mut trained.optimizer)?),
            "update" => self.scaler.update()?,
            "update_to" => self.scaler.update_to(number(1))?,
            "save" => self.saved = self.scaler.state()?,
            "load" => self.scaler.load_state(&self.saved.expect("saved"))?,
            other => panic!("no command {other}"),
        }
        Ok(())
    }

    fn numbers(&self) -> Vec<Option<f32>> {
        let scale = self.scaler.scale_factor().expect("a scale") as f32;
        let tracker = self.scaler.growth_tracker().expect("a count") as f32;
        [vec![Some(scale), Some(tracker)], self.a.numbers(), self.b.numbers()].concat()
    }
}

/// Whether the numbers are equal, except for the last digit, which may depend on the CPU's
/// instructions.
fn is_same(a: Option<f32>, b: Option<f32>) -> bool {
    let close = |a: f32, b: f32| {
        a == b || b.is_finite() && (a - b).abs() <= 1e-6 * b.abs() || a.is_nan() && b.is_nan()
    };
    a == b || a.zip(b).is_some_and(|(a, b)| close(a, b))
}

#[test]
fn each_step_is_that_of_torchs_own() {
    let scaler = GradScaler::new(Default::default()).expect("a scaler");
    let mut replay = Replay { scaler, saved: None, a: Trained::new(0.5), b: Trained::new(0.125) };
    let (mut errors, mut lines) = (0, 0);
    for (line, text) in TRACE.lines().enumerate() {
        let (command, expected) = text.split_once(" -> ").expect("a command and its outcome");
        let (outcome, expected) = expected.split_once(' ').expect("an outcome and numbers");
        let result = replay.run(command);
        let at = format!("line {}, {command}: {result:?}", line + 1);
        assert_eq!(result.is_ok(), outcome == "ok", "{at}");
        let expected: Vec<Option<f32>> =
            expected.split(' ').map(|number| number.parse().ok()).collect();
        for (place, (found, expected)) in replay.numbers().iter().zip(&expected).enumerate() {
            let same = is_same(*found, *expected);
            assert!(same, "{at}: number {place} is {found:?}, torch's {expected:?}");
        }
        assert_eq!(expected.len(), 12, "{at}");
        (errors, lines) = (errors + usize::from(outcome == "error"), lines + 1);
    }
    assert!(lines > 100 && errors > 10, "{lines} lines with {errors} errors");
}

/// Compares the trace with a fresh one if there is a Python with torch.
#[test]
fn the_trace_is_what_torch_does() {
    let output = match support::python::run("tests/amp/grad_scaler.py", &[]) {
        Ok(output) => output,
        Err(why) => return skip("the_trace_is_what_torch_does", &why),
    };
    let fresh = String::from_utf8_lossy(&output.stdout);
    assert_eq!(fresh.lines().count(), TRACE.lines().count());
    for (fresh, kept) in fresh.lines().zip(TRACE.lines()) {
        let same = |(a, b): (&str, &str)| {
            a == b || a.parse::<f32>().is_ok() && is_same(a.parse().ok(), b.parse().ok())
        };
        let words = fresh.split(' ').count() == kept.split(' ').count();
        assert!(
            words && fresh.split(' ').zip(kept.split(' ')).all(same),
            "{fresh}\ninstead of\n{kept}"
        );
    }
}
