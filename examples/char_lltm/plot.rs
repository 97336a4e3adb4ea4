//! Draws the loss curves and writes them as a table.

use crate::options::Op;
use crate::report::Run;
use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

const SIZE: (u32, u32) = (960, 540);
/// The largest number of points of a curve. A longer curve is averaged in groups, because the loss
/// of single batches is a broad band.
const POINTS: usize = 120;

/// The table: a heading `step,<op>,…` and one line for each step.
pub fn csv(runs: &[Run]) -> String {
    let names: Vec<&str> = runs.iter().map(|run| run.op.name()).collect();
    let steps = runs.first().map_or(0, |run| run.losses.len());
    let line = |step: usize| -> String {
        let losses: String = runs.iter().map(|run| format!(",{}", run.losses[step])).collect();
        format!("{}{losses}\n", step + 1)
    };
    format!("step,{}\n", names.join(",")) + &(0..steps).map(line).collect::<String>()
}

/// The picture: the loss curves over the steps, with the unigram baseline.
pub fn svg(runs: &[Run], unigram: f64) -> Result<String> {
    let mut picture = String::new();
    let area = SVGBackend::with_string(&mut picture, SIZE).into_drawing_area();
    draw(&area, runs, unigram).map_err(|error| anyhow!("cannot draw the loss curves: {error}"))?;
    drop(area);
    Ok(picture)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

fn draw(area: &Area, runs: &[Run], unigram: f64) -> Drawn {
    let steps = runs.iter().map(|run| run.losses.len()).max().unwrap_or(0).max(2) as f64;
    let top = runs.iter().flat_map(|run| &run.losses).copied().fold(unigram, f64::max);
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(area)
        .caption(title(runs, unigram), ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(1.0..steps, 0.0..top * 1.05)?;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .x_desc("step")
        .y_desc("loss (nats per character)")
        .x_label_formatter(&|step| format!("{step:.0}"));
    mesh.draw()?;
    // The curve with the largest gaps last, so that the others show through.
    let mut in_order: Vec<&Run> = runs.iter().collect();
    in_order.sort_by_key(|run| look(run.op).1);
    for run in in_order {
        draw_run(&mut chart, run)?;
    }
    let baseline = [(1.0, unigram), (steps, unigram)];
    let label = format!("unigram baseline, held out ({unigram:.2})");
    draw_line(&mut chart, baseline.to_vec(), BLACK.stroke_width(1), label)?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
}

/// What the picture shows.
fn title(runs: &[Run], unigram: f64) -> String {
    let held_out = || runs.iter().map(|run| run.held_out);
    let (least, most) =
        (held_out().fold(f64::INFINITY, f64::min), held_out().fold(f64::NEG_INFINITY, f64::max));
    match runs.len() {
        0 | 1 => format!("The model learns: held-out loss {least:.2}, unigrams {unigram:.2}"),
        _ if format!("{least:.1}") == format!("{most:.1}") => {
            format!("The operators train alike: held-out loss {least:.1}, unigrams {unigram:.1}")
        }
        _ => format!("Held-out loss {least:.2} to {most:.2}, unigrams {unigram:.2}"),
    }
}

const DASH: u32 = 12;

/// A curve's color and the gaps between its dashes; 0 for a solid curve.
fn look(op: Op) -> (RGBColor, u32) {
    match op {
        Op::Composite | Op::TchLstm | Op::TchGru => (RGBColor(20, 60, 160), 0),
        Op::Fused => (RGBColor(225, 110, 20), DASH),
        Op::Sequence | Op::Lstm | Op::Gru => (RGBColor(60, 140, 50), 3 * DASH),
    }
}

/// Draws one curve, thin. Where curves coincide, one shows through the gaps of the next.
fn draw_run(chart: &mut Chart, run: &Run) -> Drawn {
    let (color, gap) = look(run.op);
    let (style, points) = (color.stroke_width(2), thinned(&run.losses));
    let label = format!("{} (held out: {:.2})", run.op.name(), run.held_out);
    if gap == 0 {
        return draw_line(chart, points, style, label);
    }
    let dashes = DashedLineSeries::new(points, DASH, gap, style);
    let series = chart.draw_series(dashes)?;
    series.label(label).legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], style));
    Ok(())
}

fn draw_line(
    chart: &mut Chart,
    points: Vec<(f64, f64)>,
    style: ShapeStyle,
    label: String,
) -> Drawn {
    let series = chart.draw_series(LineSeries::new(points, style))?;
    series.label(label).legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
    Ok(())
}

/// The points (step, loss), averaged in groups of equal size.
fn thinned(losses: &[f64]) -> Vec<(f64, f64)> {
    let group = losses.len().div_ceil(POINTS).max(1);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let middle = |index: usize, count: usize| (index * group) as f64 + (count + 1) as f64 / 2.0;
    losses.chunks(group).enumerate().map(|(i, part)| (middle(i, part.len()), mean(part))).collect()
}
