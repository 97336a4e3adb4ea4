//! Draws loss curves.

use crate::files::{read_text, write_bytes};
use anyhow::{Result, anyhow, ensure};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use serde_json::Value;
use std::path::{Path, PathBuf};

const SIZE: (u32, u32) = (960, 540);
/// The largest number of points of a curve. A longer curve is averaged in groups, because the loss
/// of single batches is a broad band.
const POINTS: usize = 200;
const COLORS: [RGBColor; 4] =
    [RGBColor(20, 60, 160), RGBColor(225, 110, 20), RGBColor(60, 140, 50), RGBColor(150, 60, 140)];

/// Losses by step, with the name that stands in the legend.
pub struct Curve {
    pub label: String,
    pub points: Vec<(f64, f64)>,
    /// Whether single points matter, as those of evaluations do: they are neither averaged nor
    /// hidden.
    pub is_sparse: bool,
}

impl Curve {
    pub fn new(label: String, points: &[(i64, f64)], is_sparse: bool) -> Curve {
        let points = points.iter().map(|&(step, loss)| (step as f64, loss)).collect();
        Curve { label, points, is_sparse }
    }
}

#[derive(Debug, clap::Args)]
pub struct PlotOptions {
    /// Files of losses: the losses.jsonl of runs
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub losses: Vec<PathBuf>,
    /// The picture
    #[arg(long, value_name = "FILE", default_value = "losses.svg")]
    pub out: PathBuf,
    #[arg(long, default_value = "Losses")]
    pub title: String,
}

/// The subcommand.
pub fn run(options: &PlotOptions) -> Result<()> {
    let mut curves = Vec::new();
    for file in &options.losses {
        let name =
            if options.losses.len() > 1 { file.display().to_string() } else { String::new() };
        read(file, &name, &mut curves)?;
    }
    write_bytes(&options.out, svg(&options.title, "nats per token", &curves)?)
}

/// Adds a file's curves. A line has a step, a loss or a held-out loss, and perhaps the name of its
/// curve.
fn read(file: &Path, prefix: &str, curves: &mut Vec<Curve>) -> Result<()> {
    let text = read_text(file, "give --losses the losses.jsonl of a run")?;
    let before = curves.len();
    for line in text.lines() {
        let value: Value = serde_json::from_str(line).unwrap_or_default();
        let held_out = value["held_out"].as_f64();
        let (Some(step), Some(loss)) =
            (value["step"].as_f64(), held_out.or(value["loss"].as_f64()))
        else {
            continue;
        };
        let kind = if held_out.is_some() { "held out" } else { "training" };
        let label =
            format!("{prefix} {}", value["curve"].as_str().unwrap_or(kind)).trim().to_string();
        match curves[before..].iter_mut().find(|curve| curve.label == label) {
            Some(curve) => curve.points.push((step, loss)),
            None => curves.push(Curve {
                label,
                points: vec![(step, loss)],
                is_sparse: held_out.is_some(),
            }),
        }
    }
    ensure!(
        curves.len() > before,
        "--losses {} has no losses: give the losses.jsonl of a run",
        file.display()
    );
    Ok(())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// The curves as an SVG picture. The vertical axis says in which unit the losses are.
pub fn svg(title: &str, unit: &str, curves: &[Curve]) -> Result<String> {
    let mut picture = String::new();
    let area = SVGBackend::with_string(&mut picture, SIZE).into_drawing_area();
    draw(&area, title, unit, curves)
        .map_err(|error| anyhow!("cannot draw the loss curves: {error}"))?;
    drop(area);
    Ok(picture)
}

fn draw(area: &Area, title: &str, unit: &str, curves: &[Curve]) -> Drawn {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let steps = points().map(|point| point.0).fold(2.0, f64::max);
    let top = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max);
    let bottom = points().map(|point| point.1).fold(top, f64::min);
    let margin = 0.05 * (top - bottom).max(0.1);
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(1.0..steps, (bottom - margin).max(0.0)..top + margin)?;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .x_desc("step")
        .y_desc(format!("loss ({unit})"))
        .x_label_formatter(&|step| format!("{step:.0}"));
    mesh.draw()?;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        draw_curve(&mut chart, curve, *color)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
}

fn draw_curve(chart: &mut Chart, curve: &Curve, color: RGBColor) -> Drawn {
    let style = color.stroke_width(2);
    let points = if curve.is_sparse { curve.points.clone() } else { thinned(&curve.points) };
    if curve.is_sparse {
        let dot = |&point: &(f64, f64)| Circle::new(point, 3, color.filled());
        chart.draw_series(points.iter().map(dot))?;
    }
    let series = chart.draw_series(LineSeries::new(points, style))?;
    series.label(&curve.label).legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
    Ok(())
}

/// The points averaged in groups of equal size.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let group = points.len().div_ceil(POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let sum = part.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / part.len() as f64, sum.1 / part.len() as f64)
    };
    points.chunks(group).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_names_its_curves() {
        let points: Vec<(i64, f64)> = (1..=1000).map(|step| (step, 5.0 / step as f64)).collect();
        let curves = [
            Curve::new("training".into(), &points, false),
            Curve::new("held out".into(), &points[..3], true),
        ];
        let picture = svg("A title", "nats per token", &curves).unwrap();
        for expected in ["</svg>", "training", "held out", "A title", "nats per token"] {
            assert!(picture.contains(expected), "{expected}");
        }
        assert!(svg("Nothing", "nats", &[]).is_ok());
    }

    #[test]
    fn files_of_losses_are_drawn_by_curve() {
        let folder = tempfile::tempdir().unwrap();
        let (losses, out) = (folder.path().join("a.jsonl"), folder.path().join("a.svg"));
        let lines =
            "{\"step\":1,\"loss\":2.0,\"curve\":\"Rust\"}\n{\"step\":1,\"held_out\":2.5}\nhalf";
        std::fs::write(&losses, lines).unwrap();
        let options =
            PlotOptions { losses: vec![losses.clone()], out: out.clone(), title: "T".into() };
        run(&options).unwrap();
        let picture = std::fs::read_to_string(&out).unwrap();
        assert!(picture.contains("Rust") && picture.contains("held out"));
        std::fs::write(&losses, "none").unwrap();
        assert!(run(&options).unwrap_err().to_string().contains("has no losses"));
    }

    #[test]
    fn long_curves_are_averaged() {
        let points: Vec<(f64, f64)> = (0..1000).map(|step| (step as f64, 1.0)).collect();
        let thin = thinned(&points);
        assert_eq!((thin.len(), thin[0]), (200, (2.0, 1.0)));
    }
}
