//! Prints the time of each level, forward and backward, on the CPU and, if there is one, on a GPU.

use extension::{linear, lltm};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::Event;
use tch_extension::testing::{assert_close, devices};

type Operator = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>>;

/// An operator at all its levels, and the sizes of its inputs.
struct Table {
    title: String,
    sizes: Vec<Vec<i64>>,
    levels: Vec<(&'static str, Operator)>,
}

fn linear_table(m: i64, k: i64, n: i64) -> Table {
    let level = |(name, level): (&'static str, linear::Linear)| {
        let operator: Operator =
            Box::new(move |inputs| Ok(vec![level(&inputs[0], &inputs[1], &inputs[2])?]));
        (name, operator)
    };
    Table {
        title: format!("linear, x [{m}, {k}], W [{n}, {k}]"),
        sizes: vec![vec![m, k], vec![n, k], vec![n]],
        levels: linear::LEVELS.into_iter().map(level).collect(),
    }
}

fn lltm_table(b: i64, f: i64, h: i64) -> Table {
    let level = |(name, level): (&'static str, lltm::Lltm)| {
        let operator: Operator = Box::new(move |inputs| {
            let [x, w, b, h, c] = inputs else { unreachable!("five inputs") };
            let (new_h, new_c) = level(x, w, b, (h, c))?;
            Ok(vec![new_h, new_c])
        });
        (name, operator)
    };
    Table {
        title: format!("lltm, batch {b}, {f} features, {h} hidden"),
        sizes: vec![vec![b, f], vec![3 * h, h + f], vec![3 * h], vec![b, h], vec![b, h]],
        levels: lltm::LEVELS.into_iter().map(level).collect(),
    }
}

fn main() -> Result<()> {
    for device in devices() {
        for table in [linear_table(128, 256, 512), lltm_table(16, 32, 128)] {
            table.print(device)?;
        }
    }
    Ok(())
}

impl Table {
    fn print(&self, device: Device) -> Result<()> {
        println!("\n{}, f32, {device:?}", self.title);
        println!("{:<18} {:>12} {:>12}", "level", "forward", "backward");
        let mut expected = None;
        for (name, operator) in &self.levels {
            let inputs = self.inputs(device);
            let results = results(operator, &inputs)?;
            // Times are worth comparing only if all levels compute the same.
            let expected = expected
                .get_or_insert_with(|| results.iter().map(Tensor::copy).collect::<Vec<_>>());
            results
                .iter()
                .zip(expected)
                .for_each(|(found, expected)| assert_close(found, expected, 1e-3, 1e-3));
            let forward = per_call(device, || operator(&inputs).map(drop))?;
            let outputs = operator(&inputs)?;
            let backward = per_call(device, || gradients(&outputs, &inputs, true).map(drop))?;
            println!("{name:<18} {:>9.1} µs {:>9.1} µs", micros(forward), micros(backward));
        }
        Ok(())
    }

    /// The inputs, which are the same for each level.
    fn inputs(&self, device: Device) -> Vec<Tensor> {
        tch::manual_seed(0);
        let scale = 1.0 / (self.sizes[1][1] as f64).sqrt();
        let input = |size: &Vec<i64>| Tensor::randn(size.as_slice(), (Kind::Float, device)) * scale;
        self.sizes.iter().map(|size| input(size).set_requires_grad(true)).collect()
    }
}

/// The outputs and the gradients of all inputs.
fn results(operator: &Operator, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let outputs = operator(inputs)?;
    let gradients = gradients(&outputs, inputs, false)?;
    Ok(outputs.iter().map(Tensor::detach).chain(gradients).collect())
}

fn gradients(outputs: &[Tensor], inputs: &[Tensor], retain_graph: bool) -> Result<Vec<Tensor>> {
    let ones: Vec<Tensor> = outputs.iter().map(Tensor::ones_like).collect();
    let vectors: Vec<Option<&Tensor>> = ones.iter().map(Some).collect();
    let options = GradOptions {
        grad_outputs: &vectors,
        retain_graph: Some(retain_graph),
        ..Default::default()
    };
    let (outputs, inputs): (Vec<&Tensor>, Vec<&Tensor>) =
        (outputs.iter().collect(), inputs.iter().collect());
    Ok(grad(&outputs, &inputs, &options)?.into_vec().into_iter().flatten().collect())
}

/// The median time of a call over several rounds: by the clock on the CPU, by CUDA events on a GPU.
fn per_call(device: Device, mut call: impl FnMut() -> Result<()>) -> Result<Duration> {
    const CALLS: u32 = 200;
    let mut rounds = Vec::new();
    for _ in 0..9 {
        // This call is also the warm-up.
        call()?;
        rounds.push(match device {
            Device::Cuda(_) => {
                let (start, end) = (Event::new(device)?, Event::new(device)?);
                start.record()?;
                for _ in 0..CALLS {
                    call()?;
                }
                end.record()?;
                start.elapsed(&end)?
            }
            _ => {
                let start = Instant::now();
                for _ in 0..CALLS {
                    call()?;
                }
                start.elapsed()
            }
        });
    }
    rounds.sort();
    Ok(rounds[rounds.len() / 2] / CALLS)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
