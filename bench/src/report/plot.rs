//! Draws the rows of a comparison as SVG: latency and bandwidth by size where there are sizes to
//! compare; otherwise a line of dots for each shape or, for many shapes, their ratios.

use std::fmt::Write as _;

use crate::contenders::{Contest, Variant};
use crate::report::ratio::{Ratio, Standing, by_plan, ratios};
use crate::report::row::{Row, bytes};
use crate::report::table::Report;

/// Returns the plot; `None` if no row has a time above 0.
pub fn svg(report: &Report<Row>) -> Option<String> {
    let rows: Vec<&Row> =
        report.rows.iter().filter(|row| positive(row.time_us).is_some()).collect();
    rows.first()?;
    let series = series(&rows);
    let by_size = rows.iter().all(|row| row.size > 0 && row.m.is_none());
    let contest = report.header.as_ref().and_then(|header| Contest::of(header.subcommand()));
    let ratios = contest.map_or_else(Vec::new, |contest| ratios(contest, &report.rows));
    if ratios.len() > MOST_LINES && ratios.iter().all(|ratio| ratio.m.is_some()) {
        return Some(scatter(&ratios));
    }
    let limit = report.header.as_ref().and_then(|header| header.link_bandwidth());
    if by_size { Some(panels(&series, limit)) } else { dots(&rows, &series) }
}

/// The rows of one variant and type.
struct Series<'a> {
    name: String,
    colour: &'static str,
    rows: Vec<&'a Row>,
}

/// Returns the value if it is positive, so that a logarithmic axis has a place for it.
fn positive(value: Option<f64>) -> Option<f64> {
    value.filter(|value| *value > 0.0)
}

/// Returns the TFLOP/s of a matrix product, which files of earlier versions lack.
fn rate(row: &Row) -> Option<f64> {
    row.tflops.or(Some(row.operations()? / (positive(row.time_us)? * 1e6)))
}

/// Returns the series in order of appearance; types are named if there are several.
fn series<'a>(rows: &[&'a Row]) -> Vec<Series<'a>> {
    let several =
        rows.iter().any(|row| (&row.dtype, &row.redop) != (&rows[0].dtype, &rows[0].redop));
    let mut all: Vec<Series<'a>> = Vec::new();
    let mut others = OTHERS.iter().cycle();
    for row in rows {
        let name = match several {
            true => format!("{} {} {}", row.name(), row.dtype, row.redop),
            false => row.name(),
        };
        match all.iter_mut().find(|series| series.name == name) {
            Some(series) => series.rows.push(row),
            None => {
                let named = COLOURS.iter().find(|(variant, _)| *variant == row.variant);
                let is_first = all.iter().all(|other| other.rows[0].variant != row.variant);
                let colour = match named.filter(|_| !several && !row.in_place && is_first) {
                    Some((_, colour)) => colour,
                    None => others.next().unwrap_or(&OTHERS[0]),
                };
                all.push(Series { name, colour, rows: vec![row] });
            }
        }
    }
    all
}

/// A variant has the same colour in all plots. The colours are those of Okabe and Ito, which can be
/// told apart with any kind of colour vision.
const COLOURS: [(Variant, &str); 9] = [
    (Variant::RustOps, "#d55e00"),
    (Variant::RustOpsPlain, "#f0e442"),
    (Variant::Rust, "#e69f00"),
    (Variant::RustLsa, "#cc79a7"),
    (Variant::RustUnfused, "#d55e00"),
    (Variant::Cpp, "#777777"),
    (Variant::Nccl, "#0072b2"),
    (Variant::NcclSym, "#56b4e9"),
    (Variant::CublasLt, "#009e73"),
];
/// The colours of further series, in turn.
const OTHERS: [&str; 6] = ["#009e73", "#000000", "#aa3377", "#332288", "#999933", "#882255"];

/// A logarithmic axis: values, and where they are in the picture.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    /// The values that have labels.
    ticks: Vec<f64>,
}

impl Axis {
    /// Returns an axis from the last step of 1, 2, 5, 10, ... below all values to the first above.
    fn decimal(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(0.0, f64::max);
        let first = least.log10().floor() as i32;
        let steps = (first..=most.log10().ceil() as i32)
            .flat_map(|exponent| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(exponent)));
        let steps: Vec<f64> = steps.collect();
        let begin = steps.iter().rposition(|step| *step <= least).unwrap_or(0);
        let end = steps.iter().position(|step| *step > most).unwrap_or(steps.len() - 1);
        let mut ticks = steps[begin..=end].to_vec();
        let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
        if ticks.len() > 9 {
            ticks.retain(|tick| tick.log10().fract().abs() < 1e-9);
        }
        Self { low, high, from, to, ticks }
    }

    /// Returns an axis of sizes in bytes: powers of 2.
    fn of_sizes(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let least = values.clone().fold(f64::INFINITY, f64::min).log2().floor() as i32;
        let most = values.fold(0.0, f64::max).log2().ceil() as i32;
        let most = most.max(least + 1);
        let step = (most - least).unsigned_abs().div_ceil(9) as usize;
        let ticks = (least..=most).step_by(step).map(|exponent| 2_f64.powi(exponent)).collect();
        Self { low: 2_f64.powi(least), high: 2_f64.powi(most), from, to, ticks }
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + part * (self.to - self.from)
    }
}

/// The elements of a picture.
struct Picture(String);

impl Picture {
    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        // A write to a string does not fail.
        let _ = writeln!(self.0, "{element}");
    }

    /// Draws text; `anchor` is `start`, `middle` or `end`.
    fn text(&mut self, x: f64, y: f64, anchor: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#
        ));
    }

    fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], style: &str) {
        self.add(format_args!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" {style}/>"#
        ));
    }

    /// Draws a vertical line for each tick of an axis, between these heights, and its label below.
    fn x_grid(&mut self, axis: &Axis, [top, bottom]: [f64; 2], label: impl Fn(f64) -> String) {
        for &tick in &axis.ticks {
            self.line([axis.at(tick), top, axis.at(tick), bottom], GRID);
            self.text(axis.at(tick), bottom + 18.0, "middle", &label(tick));
        }
    }

    /// Draws a horizontal line for each tick of an axis, between these sides, and its label to the
    /// left; the line of the tick `dark` is dark.
    fn y_grid(
        &mut self,
        axis: &Axis,
        [left, right]: [f64; 2],
        dark: Option<f64>,
        label: impl Fn(f64) -> String,
    ) {
        for &tick in &axis.ticks {
            let style = if dark == Some(tick) { DARK } else { GRID };
            self.line([left, axis.at(tick), right, axis.at(tick)], style);
            self.text(left - 6.0, axis.at(tick) + 4.0, "end", &label(tick));
        }
    }

    fn dot(&mut self, x: f64, y: f64, radius: f64, colour: &str) {
        self.add(format_args!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" fill="{colour}"/>"#));
    }

    /// Draws the names of all series, in lines from `y` on.
    fn legend(&mut self, series: &[Series<'_>], y: f64) {
        for (i, series) in series.iter().enumerate() {
            let (x, y) = (70.0 + (i % IN_LINE) as f64 * 165.0, y + (i / IN_LINE) as f64 * 18.0);
            self.dot(x, y - 4.0, 5.0, series.colour);
            self.text(x + 10.0, y, "start", &series.name);
        }
    }

    /// Returns the whole file.
    fn finish(self, height: f64) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
            self.0
        )
    }
}

const WIDTH: f64 = 900.0;
/// Names in a line of the legend.
const IN_LINE: usize = 5;
const GRID: &str = r##"stroke="#dddddd""##;
const DARK: &str = r##"stroke="#444444""##;
const LIMIT: &str = r##"stroke="#444444" stroke-dasharray="6 4""##;

/// Returns latency and bus bandwidth by size. `limit` is the links' bandwidth in GB/s.
fn panels(series: &[Series<'_>], limit: Option<f64>) -> String {
    const PLACES: [[f64; 2]; 2] = [[60.0, 430.0], [510.0, 880.0]];
    const TOP: f64 = 40.0;
    const BOTTOM: f64 = 330.0;
    let rows = series.iter().flat_map(|series| &series.rows);
    let mut picture = Picture(String::new());
    let values: [fn(&Row) -> Option<f64>; 2] = [|row| row.time_us, |row| positive(row.busbw)];
    for ((title, value), [left, right]) in
        ["time, us", "bus bandwidth, GB/s"].into_iter().zip(values).zip(PLACES)
    {
        let is_time = left == PLACES[0][0];
        let x = Axis::of_sizes(rows.clone().map(|row| row.size as f64), left, right);
        let all = rows.clone().filter_map(|row| value(row));
        if all.clone().next().is_none() {
            // One rank has no bus bandwidth.
            continue;
        }
        let y = Axis::decimal(all.chain(limit.filter(|_| !is_time)), BOTTOM, TOP);
        picture.text(left, TOP - 14.0, "start", title);
        picture.x_grid(&x, [TOP, BOTTOM], |tick| bytes(tick as usize));
        picture.text((left + right) / 2.0, BOTTOM + 36.0, "middle", "size, bytes");
        picture.y_grid(&y, [left, right], None, number);
        if let Some(limit) = limit {
            let label = format!("links: {limit} GB/s");
            if is_time {
                draw_least_time(&mut picture, series, limit, &x, &y);
            } else {
                picture.line([left, y.at(limit), right, y.at(limit)], LIMIT);
                picture.text(left + 4.0, y.at(limit) + 14.0, "start", &label);
            }
        }
        for series in series {
            let points = series.rows.iter().filter_map(|row| Some((row.size as f64, value(row)?)));
            let points: Vec<_> = points.map(|(size, value)| (x.at(size), y.at(value))).collect();
            let path: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let (path, colour) = (path.join(" "), series.colour);
            picture.add(format_args!(
                r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>"#
            ));
            points.iter().for_each(|(x, y)| picture.dot(*x, *y, 3.0, colour));
        }
    }
    let lines = series.len().div_ceil(IN_LINE) as f64;
    picture.legend(series, BOTTOM + 64.0);
    picture.finish(BOTTOM + 60.0 + 18.0 * lines)
}

/// Draws the time that the links need, if it is above the least time of the axis.
fn draw_least_time(picture: &mut Picture, series: &[Series<'_>], limit: f64, x: &Axis, y: &Axis) {
    // Bytes on the links per byte of the size: all variants of a benchmark have the same.
    let bus = series[0].rows.iter().find_map(|row| Some(row.busbw? / row.algbw?));
    let Some(factor) = bus.filter(|bus| *bus > 0.0) else { return };
    let us_per_byte = factor / (limit * 1e3);
    let time = |size| size * us_per_byte;
    let first = (y.low / us_per_byte).max(x.low);
    if first < x.high {
        let ends = [x.at(first), y.at(time(first)), x.at(x.high), y.at(time(x.high))];
        picture.line(ends, LIMIT);
    }
}

/// Returns a tick without superfluous zeros.
fn number(value: f64) -> String {
    format!("{value:.*}", (-value.log10().floor()).max(0.0) as usize)
}

/// The most shapes that have a line each.
const MOST_LINES: usize = 48;

/// Returns the ratios of many products over the rows of A.
fn scatter(ratios: &[Ratio]) -> String {
    const TICKS: [f64; 16] =
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0];
    let [left, right, top, bottom] = [60.0, 880.0, 40.0, 330.0];
    let rows = |ratio: &Ratio| ratio.m.unwrap_or(1) as f64;
    let x = Axis::of_sizes(ratios.iter().map(rows), left, right);
    let values = || ratios.iter().map(|ratio| ratio.value().clamp(TICKS[0], TICKS[15]));
    let (least, most) = (values().fold(1.0, f64::min), values().fold(1.0, f64::max));
    let first = TICKS.iter().rposition(|tick| *tick <= least).unwrap_or(0);
    let last = TICKS.iter().position(|tick| *tick >= most).unwrap_or(TICKS.len() - 1);
    let last = last.max(first + 1);
    let (low, high, ticks) = (TICKS[first], TICKS[last], TICKS[first..=last].to_vec());
    let y = Axis { low, high, from: bottom, to: top, ticks };
    let mut picture = Picture(String::new());
    picture.text(left, top - 14.0, "start", "ratio, below 1 devcomm is faster");
    picture.text((left + right) / 2.0, bottom + 36.0, "middle", "rows of A");
    picture.x_grid(&x, [top, bottom], |tick| tick.to_string());
    picture.y_grid(&y, [left, right], Some(1.0), |tick| tick.to_string());
    let colours = COLOURS.iter().map(|(_, colour)| colour).cycle();
    for ((plan, ratios), colour) in by_plan(ratios).into_iter().zip(colours) {
        for ratio in &ratios {
            let value = ratio.value().clamp(low, high);
            picture.dot(x.at(rows(ratio)), y.at(value), 3.0, colour);
        }
        let Some(Standing { mean, .. }) = Standing::of(&ratios) else { continue };
        picture.line([left, y.at(mean), right, y.at(mean)], LIMIT);
        let label = format!("{plan} geometric mean {mean:.3}");
        picture.text(right, y.at(mean) - 4.0, "end", label.trim_start());
    }
    picture.finish(bottom + 50.0)
}

/// Returns a line for each shape, or for each variant of a single shape: rates, or else times.
fn dots(rows: &[&Row], series: &[Series<'_>]) -> Option<String> {
    const LEFT: f64 = 200.0;
    const TOP: f64 = 46.0;
    const STEP: f64 = 18.0;
    let rated = rows.iter().all(|row| row.m.is_some());
    let value = |row: &Row| positive(if rated { rate(row) } else { row.time_us });
    let case = |row: &Row| row.shape().or(row.grid()).unwrap_or_default();
    let single = rows.iter().all(|row| case(row) == case(rows[0]));
    let label = |row: &Row| if single { row.name() } else { case(row) };
    let mut labels: Vec<String> = Vec::new();
    for row in rows {
        if !labels.contains(&label(row)) {
            labels.push(label(row));
        }
    }
    rows.iter().find_map(|row| value(row))?;
    let bottom = TOP + STEP * labels.len() as f64;
    let x = Axis::decimal(rows.iter().filter_map(|row| value(row)), LEFT, 870.0);
    let mut picture = Picture(String::new());
    let heading = if single { case(rows[0]) + ": " } else { String::new() };
    let unit = if rated { "TFLOP/s" } else { "time, us" };
    picture.text(LEFT, 18.0, "start", &format!("{heading}{unit}"));
    for &tick in &x.ticks {
        picture.line([x.at(tick), TOP - 8.0, x.at(tick), bottom], GRID);
        picture.text(x.at(tick), TOP - 12.0, "middle", &number(tick));
    }
    for (i, label) in labels.iter().enumerate() {
        let y = TOP + STEP * (i as f64 + 0.5);
        picture.line([LEFT, y, 870.0, y], GRID);
        picture.text(LEFT - 8.0, y + 4.0, "end", label);
    }
    for series in series {
        for row in &series.rows {
            let line = labels.iter().position(|known| *known == label(row)).unwrap_or(0);
            let y = TOP + STEP * (line as f64 + 0.5);
            if let Some(value) = value(row) {
                let colour = if single { COLOURS[0].1 } else { series.colour };
                picture.dot(x.at(value), y, 4.5, colour);
            }
        }
    }
    let several = series.len() > 1 && !single;
    let lines = if several { series.len().div_ceil(IN_LINE) as f64 } else { 0.0 };
    if several {
        picture.legend(series, bottom + 24.0);
    }
    Some(picture.finish(bottom + 16.0 + 18.0 * lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(values: &[f64]) -> Axis {
        Axis::decimal(values.iter().copied(), 100.0, 200.0)
    }

    #[test]
    fn an_axis_goes_from_step_to_step_around_its_values() {
        assert_eq!(axis(&[10.0]).ticks, [10.0, 20.0]);
        assert_eq!(axis(&[0.3, 4.0]).ticks, [0.2, 0.5, 1.0, 2.0, 5.0]);
        let long = axis(&[3.0, 700.0, 40_000.0]);
        assert_eq!((long.low, long.high), (2.0, 50_000.0));
        assert_eq!(long.ticks, [10.0, 100.0, 1000.0, 10_000.0]);
        let decade = axis(&[1.0, 99.0]);
        assert_eq!([1.0, 10.0, 100.0].map(|value| decade.at(value)), [100.0, 150.0, 200.0]);
        let sizes = Axis::of_sizes([1024.0, 1e9].into_iter(), 0.0, 1.0);
        assert_eq!((sizes.low, sizes.high, sizes.ticks.len()), (1024.0, 2_f64.powi(30), 7));
    }

    #[test]
    fn labels_are_short() {
        assert_eq!([0.05, 0.5, 1.0, 200.0].map(number), ["0.05", "0.5", "1", "200"]);
        assert_eq!([8, 1024, 65_536, 3 << 20, 1 << 30].map(bytes), ["8", "1K", "64K", "3M", "1G"]);
    }
}
