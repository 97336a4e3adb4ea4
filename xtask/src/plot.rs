//! `cargo xtask plot FILE…`: draws the benchmark's JSON as pictures for the README. Also draws the
//! losses of `cargo xtask demo`.

use anyhow::{Context, Result, anyhow, ensure};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Below this floor, in microseconds, the launch dominates and a share of the floor says nothing.
const LAUNCH_BOUND: f64 = 5.0;
/// Providers that measure a part of the work, and so are no rivals.
const PARTS: [&str; 3] = ["x + y", "with graph", "product"];
const WIDTH: u32 = 860;
/// The height of a bar, in pixels.
const BAR: u32 = 10;
/// Room to the left of the bars for the points, and below them for the axis and the machine.
const LABELS: u32 = 210;
const FOOT: u32 = 60;
/// The height of the legend, in bars: it is below the last point.
const LEGEND: u32 = 9;

/// One provider's measurement at one point.
struct Row {
    operator: String,
    direction: String,
    /// The kind and the sizes.
    point: String,
    device: String,
    provider: String,
    wall: Option<f64>,
    gpu: Option<f64>,
    floor: Option<f64>,
}

impl Row {
    fn new(row: &Value) -> Result<Self> {
        let text = |name: &str| {
            row[name].as_str().map(str::to_string).ok_or_else(|| anyhow!("a row has no `{name}`"))
        };
        let kind = match text("kind")?.as_str() {
            "Float" => "f32".to_string(),
            "Half" => "f16".to_string(),
            "BFloat16" => "bf16".to_string(),
            other => other.to_lowercase(),
        };
        Ok(Row {
            operator: text("operator")?,
            direction: text("direction")?,
            point: format!("{kind} {}", text("point")?),
            device: text("device")?,
            provider: text("provider")?,
            wall: row["wall_us"].as_f64(),
            gpu: row["gpu_us"].as_f64(),
            floor: row["floor_us"].as_f64(),
        })
    }

    fn same_case(&self, other: &Row) -> bool {
        (&self.operator, &self.direction, &self.point, &self.device)
            == (&other.operator, &other.direction, &other.point, &other.device)
    }
}

/// A picture: one group of bars for each point, and in it one bar for each provider that was
/// measured there.
struct Chart {
    name: String,
    title: String,
    unit: &'static str,
    points: Vec<String>,
    providers: Vec<String>,
    /// (point, provider, value)
    bars: Vec<(usize, usize, f64)>,
}

/// Draws one picture for each operator, direction, device and quantity in the files, into `folder`.
pub fn run(files: &[PathBuf], folder: &Path) -> Result<Vec<PathBuf>> {
    let (rows, machine) = read(files)?;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let mut written = Vec::new();
    for chart in charts(&rows) {
        let path = folder.join(format!("{}.svg", chart.name));
        let picture = svg(&chart, &machine)?;
        std::fs::write(&path, picture)
            .with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path);
    }
    Ok(written)
}

/// Reads the rows of all files and the first file's description of the machine.
fn read(files: &[PathBuf]) -> Result<(Vec<Row>, String)> {
    let (mut rows, mut machine) = (Vec::new(), String::new());
    for file in files {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let json: Value = serde_json::from_str(&text)
            .with_context(|| format!("{} is no JSON", file.display()))?;
        let found =
            json["rows"].as_array().with_context(|| format!("{} has no `rows`", file.display()))?;
        let found = found.iter().map(Row::new).collect::<Result<Vec<_>>>();
        rows.extend(found.with_context(|| format!("in {}", file.display()))?);
        if machine.is_empty() {
            let known =
                ["gpu", "cpu", "libtorch", "commit", "date"].map(|name| json[name].as_str());
            machine = known.into_iter().flatten().collect::<Vec<_>>().join(", ");
        }
    }
    ensure!(
        !rows.is_empty(),
        "no rows in {files:?}: expected the bench.json of `cargo xtask bench`"
    );
    Ok((rows, machine))
}

fn charts(rows: &[Row]) -> Vec<Chart> {
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        let place = |row: &Row| (row.operator.clone(), row.direction.clone(), row.device.clone());
        match groups.iter_mut().find(|group| place(group[0]) == place(row)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups.iter().flat_map(|rows| [share_of_floor(rows), speed(rows)]).flatten().collect()
}

/// The GPU time as a share of the floor, for the points that are large enough.
fn share_of_floor(rows: &[&Row]) -> Option<Chart> {
    // Rows of rivals that come from another file have no floor of their own: take it from any row
    // of the same case.
    let floor =
        |row: &Row| rows.iter().filter(|other| other.same_case(row)).find_map(|other| other.floor);
    let value = |row: &Row| {
        let floor = floor(row).filter(|floor| *floor >= LAUNCH_BOUND)?;
        row.gpu.map(|gpu| 100.0 * floor / gpu)
    };
    chart(rows, "gpu", "% of the floor", "% of the floor (GPU time)", value)
}

/// The speed of calls in a row, compared with the composite's.
fn speed(rows: &[&Row]) -> Option<Chart> {
    let composite = |row: &Row| {
        rows.iter().find(|other| other.same_case(row) && other.provider == "composite")?.wall
    };
    let value = |row: &Row| Some(composite(row)? / row.wall?);
    chart(
        rows,
        "speed",
        "speed over the composite",
        "times the composite's speed (calls in a row)",
        value,
    )
}

fn chart(
    rows: &[&Row],
    name: &str,
    what: &str,
    unit: &'static str,
    value: impl Fn(&Row) -> Option<f64>,
) -> Option<Chart> {
    let first = rows.first()?;
    let (operator, direction, device) = (&first.operator, &first.direction, &first.device);
    let mut chart = Chart {
        name: format!("{operator}-{}-{device}-{name}", direction.replace('+', "-")),
        title: format!("{operator} {direction} on {device}, {what}"),
        unit,
        points: Vec::new(),
        providers: Vec::new(),
        bars: Vec::new(),
    };
    for row in rows.iter().filter(|row| !PARTS.contains(&row.provider.as_str())) {
        if let Some(value) = value(row) {
            let bar = (
                place_of(&mut chart.points, &row.point),
                place_of(&mut chart.providers, &row.provider),
            );
            chart.bars.push((bar.0, bar.1, value));
        }
    }
    ours_last(&mut chart);
    chart.title = format!("{}: {}", chart.title, summary(&chart));
    (!chart.bars.is_empty()).then_some(chart)
}

/// The point of the picture: the geometric means of all providers, ours first.
fn summary(chart: &Chart) -> String {
    let mean = |provider: usize| {
        let of_provider = chart.bars.iter().filter(|bar| bar.1 == provider);
        let logarithms: Vec<f64> = of_provider.map(|(_, _, value)| value.ln()).collect();
        (logarithms.iter().sum::<f64>() / logarithms.len().max(1) as f64).exp()
    };
    let digits = if chart.unit.starts_with('%') { 0 } else { 1 };
    let text = |(provider, name): (usize, &String)| {
        let name = if name == "fused" { "ours" } else { name };
        format!("{name} {:.digits$}", mean(provider))
    };
    let means: Vec<String> = chart.providers.iter().enumerate().rev().map(text).collect();
    means.join(", ")
}

/// The index of the name, which is added if it is new.
fn place_of(names: &mut Vec<String>, name: &str) -> usize {
    names.iter().position(|known| known == name).unwrap_or_else(|| {
        names.push(name.to_string());
        names.len() - 1
    })
}

/// Moves our provider to the end; the others keep the first file's order.
fn ours_last(chart: &mut Chart) {
    let Some(ours) = chart.providers.iter().position(|name| name == "fused") else { return };
    let last = chart.providers.len() - 1;
    let moved = chart.providers.remove(ours);
    chart.providers.push(moved);
    for (_, provider, _) in &mut chart.bars {
        *provider = match *provider {
            provider if provider == ours => last,
            provider if provider > ours => provider - 1,
            provider => provider,
        };
    }
}

fn color(chart: &Chart, provider: usize) -> RGBColor {
    const RIVALS: [RGBColor; 5] = [
        RGBColor(190, 190, 190),
        RGBColor(120, 144, 170),
        RGBColor(86, 108, 140),
        RGBColor(150, 120, 160),
        RGBColor(110, 150, 120),
    ];
    match chart.providers[provider] == "fused" {
        true => RGBColor(230, 110, 30),
        false => RIVALS[provider % RIVALS.len()],
    }
}

fn svg(chart: &Chart, machine: &str) -> Result<String> {
    let bars = chart.points.len() as u32 * (chart.providers.len() as u32 + 1) + LEGEND;
    let size = (WIDTH, bars * BAR + FOOT + 40);
    let mut picture = String::new();
    draw(&mut picture, size, chart, machine)
        .map_err(|error| anyhow!("cannot draw {}: {error}", chart.name))?;
    Ok(picture)
}

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Horizontal bars, so that the points can be read at the left.
fn draw(picture: &mut String, size: (u32, u32), chart: &Chart, machine: &str) -> Drawn {
    let area = SVGBackend::with_string(picture, size).into_drawing_area();
    area.fill(&WHITE)?;
    let small = ("sans-serif", 11).into_font();
    area.draw(&Text::new(machine.to_string(), (14, size.1 as i32 - 18), small.clone()))?;
    let group = chart.providers.len() + 1;
    let rows = (chart.points.len() * group) as f64 + f64::from(LEGEND);
    let most = chart.bars.iter().map(|(_, _, value)| *value).fold(1.0, f64::max) * 1.05;
    let mut context = ChartBuilder::on(&area)
        .caption(&chart.title, ("sans-serif", 16))
        .margin(12)
        .margin_bottom(24)
        .x_label_area_size(FOOT - 24)
        .y_label_area_size(LABELS)
        .build_cartesian_2d(0.0..most, rows..0.0)?;
    context
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .light_line_style(TRANSPARENT)
        .x_desc(chart.unit)
        .draw()?;
    for (provider, name) in chart.providers.iter().enumerate() {
        let style = color(chart, provider).filled();
        let bars = chart.bars.iter().filter(|bar| bar.1 == provider).map(|&(point, _, value)| {
            let top = (point * group + provider) as f64 + 0.5;
            Rectangle::new([(0.0, top), (value, top + 0.9)], style)
        });
        let legend = move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], style);
        let name = if name == "fused" { "ours" } else { name };
        context.draw_series(bars)?.label(name).legend(legend);
    }
    for (point, name) in chart.points.iter().enumerate() {
        let middle = (point * group) as f64 + group as f64 / 2.0;
        let (x, y) = context.backend_coord(&(0.0, middle));
        let right = Pos::new(HPos::Right, VPos::Center);
        let style = small.clone().into_text_style(&area).pos(right);
        area.draw(&Text::new(name.clone(), (x - 6, y), style))?;
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .draw()?;
    area.present()
}

/// One column of a table of losses.
struct Curve {
    name: String,
    /// (step, loss)
    points: Vec<(f64, f64)>,
}

/// The largest number of points of a curve. A longer curve is averaged in groups, because the loss of
/// single batches is a broad band.
const POINTS: usize = 120;

/// Draws the `loss.csv` of the demo, which has a column of steps, one for each curve, and one for the
/// loss that a model should stay below.
pub fn losses(table: &Path, picture: &Path) -> Result<()> {
    let text = std::fs::read_to_string(table)
        .with_context(|| format!("cannot read {}", table.display()))?;
    let curves = curves(&text)
        .with_context(|| format!("{} is no table of losses by steps", table.display()))?;
    let mut drawn = String::new();
    draw_curves(&mut drawn, &curves)
        .map_err(|error| anyhow!("cannot draw {}: {error}", table.display()))?;
    std::fs::write(picture, drawn).with_context(|| format!("cannot write {}", picture.display()))
}

/// `None` if the text is no such table.
fn curves(table: &str) -> Option<Vec<Curve>> {
    let mut lines = table.lines();
    let names = lines.next()?.strip_prefix("step,")?.split(',');
    let mut curves: Vec<Curve> =
        names.map(|name| Curve { name: name.to_string(), points: Vec::new() }).collect();
    for line in lines {
        let numbers: Vec<f64> =
            line.split(',').map(str::parse).collect::<std::result::Result<_, _>>().ok()?;
        let (step, losses) = numbers.split_first()?;
        if losses.len() != curves.len() {
            return None;
        }
        for (curve, loss) in curves.iter_mut().zip(losses) {
            curve.points.push((*step, *loss));
        }
    }
    let is_drawable = curves.len() > 1 && curves.iter().all(|curve| !curve.points.is_empty());
    is_drawable.then_some(curves)
}

/// The points, averaged in groups of equal size.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mean = |part: &[(f64, f64)]| {
        let sum = part.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / part.len() as f64, sum.1 / part.len() as f64)
    };
    points.chunks(points.len().div_ceil(POINTS).max(1)).map(mean).collect()
}

/// One solid line for each curve. Where curves coincide, the earlier, wider one shows at the edges of
/// the later.
fn draw_curves(picture: &mut String, curves: &[Curve]) -> Drawn {
    const COLORS: [RGBColor; 3] =
        [RGBColor(230, 110, 30), RGBColor(60, 140, 50), RGBColor(20, 60, 160)];
    let area = SVGBackend::with_string(picture, (960, 540)).into_drawing_area();
    area.fill(&WHITE)?;
    let lines: Vec<Vec<(f64, f64)>> = curves.iter().map(|curve| thinned(&curve.points)).collect();
    let all = || lines.iter().flatten();
    let steps = all().map(|point| point.0).fold(2.0, f64::max);
    let top = all().map(|point| point.1).fold(0.1, f64::max) * 1.05;
    let end = |line: &[(f64, f64)]| line.last().map_or(0.0, |point| point.1);
    let ends: Vec<String> = curves
        .iter()
        .zip(&lines)
        .map(|(curve, line)| format!("{} {:.2}", curve.name, end(line)))
        .collect();
    let mut context = ChartBuilder::on(&area)
        .caption(format!("Loss at the end: {}", ends.join(", ")), ("sans-serif", 18))
        .margin(12)
        .margin_right(24)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..steps, 0.0..top)?;
    context
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("step")
        .y_desc("loss (nats per character)")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .draw()?;
    let baseline = curves.len() - 1;
    for (index, (curve, line)) in curves.iter().zip(lines).enumerate() {
        let style = match index == baseline {
            true => BLACK.stroke_width(1),
            false => COLORS[index % COLORS.len()].stroke_width(2 * (baseline - index) as u32),
        };
        let legend = move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style);
        let series = context.draw_series([PathElement::new(line, style)])?;
        series.label(&curve.name).legend(legend);
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(provider: &str, wall: f64, gpu: f64, floor: Option<f64>) -> Value {
        serde_json::json!({
            "operator": "layer_norm", "direction": "forward", "point": "(8192, 1024)", "kind": "Float",
            "device": "cuda", "provider": provider, "wall_us": wall, "gpu_us": gpu, "floor_us": floor,
        })
    }

    #[test]
    fn charts_have_rivals_of_other_files_and_ours_last() {
        let rows = [
            row("composite", 80.0, 60.0, Some(15.0)),
            row("fused", 20.0, 16.0, Some(15.0)),
            // This row is as rivals.py writes it.
            row("Liger", 0.0, 30.0, None),
            row("product", 10.0, 10.0, Some(15.0)),
        ];
        let rows: Vec<Row> = rows.iter().map(|row| Row::new(row).unwrap()).collect();
        let charts = charts(&rows);
        assert_eq!(charts[0].name, "layer_norm-forward-cuda-gpu");
        assert_eq!(charts[0].points, ["f32 (8192, 1024)"]);
        assert_eq!(charts[0].providers, ["composite", "Liger", "fused"]);
        assert!(
            charts[0].title.ends_with(": ours 94, Liger 50, composite 25"),
            "{}",
            charts[0].title
        );
        let value = |chart: &Chart, name: &str| {
            let place = chart.providers.iter().position(|provider| provider == name).unwrap();
            chart.bars.iter().find(|bar| bar.1 == place).unwrap().2
        };
        assert_eq!(value(&charts[0], "composite"), 25.0);
        assert_eq!(value(&charts[0], "Liger"), 50.0);
        assert_eq!(value(&charts[0], "fused"), 93.75);
        assert_eq!(charts[1].name, "layer_norm-forward-cuda-speed");
        assert_eq!(value(&charts[1], "fused"), 4.0);
        let picture = svg(&charts[0], "a GPU").unwrap();
        assert!(picture.contains("a GPU") && picture.contains("f32 (8192, 1024)"), "{picture}");
    }

    #[test]
    fn points_that_launching_decides_have_no_share() {
        let rows = [row("composite", 9.0, 9.0, Some(0.5)), row("fused", 3.0, 3.0, Some(0.5))];
        let rows: Vec<Row> = rows.iter().map(|row| Row::new(row).unwrap()).collect();
        let names: Vec<String> = charts(&rows).into_iter().map(|chart| chart.name).collect();
        assert_eq!(names, ["layer_norm-forward-cuda-speed"]);
    }

    #[test]
    fn what_is_no_bench_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().to_path_buf();
        std::fs::create_dir_all(&folder).unwrap();
        for (text, says) in [
            ("{\"rows\": []}", "no rows in"),
            ("{}", "has no `rows`"),
            ("[", "is no JSON"),
            ("{\"rows\": [{}]}", "in "),
        ] {
            let file = folder.join("bench.json");
            std::fs::write(&file, text).unwrap();
            let error = run(&[file], &folder).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_curve_is_one_solid_line() {
        let folder = tempfile::tempdir().unwrap();
        let (table, picture) = (folder.path().join("loss.csv"), folder.path().join("loss.svg"));
        let rows: String =
            (1..=1000).map(|step| format!("{step},{},3.25\n", 4.0 / f64::from(step))).collect();
        std::fs::write(&table, format!("step,sequence,unigram baseline\n{rows}")).unwrap();
        losses(&table, &picture).unwrap();
        let drawn = std::fs::read_to_string(&picture).unwrap();
        // plotters writes a path for each dash of a dashed line.
        let lines: Vec<&str> = drawn
            .lines()
            .filter(|line| line.contains("polyline") && line.contains("#E66E1E"))
            .collect();
        let points = |line: &str| line.split("points=\"").nth(1).unwrap().matches(',').count();
        let lengths: Vec<usize> = lines.iter().map(|line| points(line)).collect();
        // The curve, averaged in groups of nine, and its sample in the legend.
        assert_eq!(lengths, [112, 2], "{drawn}");
        assert!(drawn.contains("unigram baseline 3.25") && drawn.contains("nats per character"));

        for text in ["", "step,a\n1,2\n", "step,a,b\n", "step,a,b\n1,2\n", "step,a,b\n1,x,2\n"] {
            std::fs::write(&table, text).unwrap();
            let error = losses(&table, &picture).unwrap_err().to_string();
            assert!(error.contains("is no table of losses"), "{text}: {error}");
        }
    }
}
