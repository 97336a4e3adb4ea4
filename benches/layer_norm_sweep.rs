//! `cargo xtask bench sweep [WORD…]`: layer_norm compared with libtorch's own operator over a grid
//! of sizes, including odd and misaligned rows. It prints the GPU time of each direction, and the
//! worst ratios.

use crate::clock::{OnTheGpu, median};
use std::io::Write;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{Stream, StreamGuard};
use tch_extension::ops::f_layer_norm;
use tch_extension::testing::devices;

const ROWS: [i64; 8] = [1, 16, 256, 512, 1024, 2048, 8192, 65536];
const COLUMNS: [i64; 14] =
    [64, 100, 255, 256, 768, 1000, 1024, 1025, 4096, 4099, 8192, 16384, 32768, 65536];
/// For these numbers of columns, the sweep also measures rows that start one element after a
/// multiple of 16 bytes.
const MISALIGNED: [i64; 4] = [64, 1024, 4096, 16384];
const MOST_ELEMENTS: i64 = 1 << 27;
const ROUNDS: usize = 5;
const EPS: f64 = 1e-5;

/// One line of the sweep.
#[derive(Clone, Copy, Debug)]
struct Point {
    rows: i64,
    columns: i64,
    kind: Kind,
    aligned: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Libtorch,
    Fused,
}

/// The two directions of one provider as graphs, with the tensors that they read.
struct Captured {
    graphs: [OnTheGpu; 2],
    _tensors: Vec<Tensor>,
}

impl Point {
    fn all() -> Vec<Point> {
        let mut points = Vec::new();
        for kind in [Kind::Float, Kind::BFloat16] {
            for columns in COLUMNS {
                for rows in ROWS.into_iter().filter(|rows| rows * columns <= MOST_ELEMENTS) {
                    points.push(Point { rows, columns, kind, aligned: true });
                    if MISALIGNED.contains(&columns) {
                        points.push(Point { rows, columns, kind, aligned: false });
                    }
                }
            }
        }
        points
    }

    fn title(&self) -> String {
        let alignment = if self.aligned { "" } else { " misaligned" };
        format!("{:?} {:?}{alignment}", (self.rows, self.columns), self.kind)
    }

    fn matrix(&self, device: Device) -> Tensor {
        let elements = self.rows * self.columns;
        let offset = i64::from(!self.aligned);
        Tensor::randn([elements + offset], (self.kind, device))
            .narrow(0, offset, elements)
            .view([self.rows, self.columns])
    }

    fn capture(&self, who: Who, device: Device) -> Result<Captured> {
        let stream = Stream::new(device)?;
        stream.wait_stream(&Stream::current(device)?)?;
        let _guard = StreamGuard::new(&stream)?;
        let parameter =
            || Tensor::randn([self.columns], (self.kind, device)).set_requires_grad(true);
        let (x, w, b) = (self.matrix(device).set_requires_grad(true), parameter(), parameter());
        let vector = self.matrix(device);
        let (plain_x, plain_w, plain_b) = (x.detach(), w.detach(), b.detach());
        let forward = |x: &Tensor, w: &Tensor, b: &Tensor| match who {
            Who::Libtorch => Ok(x.f_layer_norm([self.columns], Some(w), Some(b), EPS, true)?),
            Who::Fused => f_layer_norm(x, &[self.columns], Some(w), Some(b), EPS),
        };
        let y = forward(&x, &w, &b)?;
        let size = x.numel() * self.kind.elt_size_in_bytes();
        let graph = OnTheGpu::capture(&stream, 2 * size, &mut || {
            drop(forward(&plain_x, &plain_w, &plain_b).expect("an output"));
        })?;
        let options = GradOptions {
            grad_outputs: &[Some(&vector)],
            retain_graph: Some(true),
            ..Default::default()
        };
        let backward = OnTheGpu::capture(&stream, 3 * size, &mut || {
            drop(grad(&[&y], &[&x, &w, &b], &options).expect("gradients"));
        })?;
        Ok(Captured {
            graphs: [graph, backward],
            _tensors: vec![x, w, b, vector, plain_x, plain_w, plain_b, y],
        })
    }

    /// The times of libtorch's operator and ours in microseconds, for the forward and the backward
    /// pass.
    fn measure(&self, device: Device) -> Result<[[f64; 2]; 2]> {
        let mut captured =
            [self.capture(Who::Libtorch, device)?, self.capture(Who::Fused, device)?];
        let mut times: [[Vec<f64>; 2]; 2] = Default::default();
        for _ in 0..ROUNDS {
            for (who, captured) in captured.iter_mut().enumerate() {
                for (direction, graph) in captured.graphs.iter_mut().enumerate() {
                    times[direction][who].push(graph.time());
                }
            }
        }
        Ok(times.map(|direction| direction.map(median)))
    }
}

/// Whether ours counts as slower: by more than 3 %, and by more than the clock's resolution.
fn is_slower([libtorch, fused]: [f64; 2]) -> bool {
    fused > 1.03 * libtorch && fused > libtorch + 0.3
}

/// Prints a line for each point whose title contains all the words.
///
/// # Errors
/// If a CUDA call fails, or if nothing can be printed.
pub fn run(words: &[String]) -> Result<()> {
    for device in devices().into_iter().filter(|device| device.is_cuda()) {
        let mut worst = [(0.0, String::new()), (0.0, String::new())];
        let mut slower = 0;
        for point in Point::all() {
            let title = point.title();
            if !words.iter().all(|word| title.contains(word.as_str())) {
                continue;
            }
            let times = point.measure(device)?;
            let mut line = format!("layer_norm {title:<32}");
            for (direction, name) in ["forward", "backward"].into_iter().enumerate() {
                let [libtorch, fused] = times[direction];
                let mark = if is_slower(times[direction]) { " SLOWER" } else { "" };
                slower += usize::from(!mark.is_empty());
                line += &format!(
                    "  {name} {libtorch:>8.2} → {fused:>8.2} {:>5.2}×{mark}",
                    libtorch / fused
                );
                let ratio = fused / libtorch;
                if ratio > worst[direction].0 {
                    worst[direction] = (ratio, title.clone());
                }
            }
            println!("{line}");
            std::io::stdout()
                .flush()
                .map_err(|error| tch_extension::Error::msg(error.to_string()))?;
        }
        for ((ratio, title), name) in worst.iter().zip(["forward", "backward"]) {
            println!("worst {name}: {ratio:.2} of libtorch's time, {title}");
        }
        println!("{slower} slower than libtorch's by more than 3 % and 0.3 µs");
    }
    Ok(())
}
