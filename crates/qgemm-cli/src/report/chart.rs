//! Charts with two logarithmic axes, as SVG with values on hover.

use std::fmt::Write as _;
use std::ops::Range;

use anyhow::ensure;
use serde::Serialize;

use super::escape::escape;
use super::series::{Mark, Series};
use super::styles::Styles;
use super::ticks::ticks;

/// Series over two axes.
#[derive(Clone, Debug, Serialize)]
pub struct Chart {
    pub x: &'static str,
    pub y: &'static str,
    pub series: Vec<Series>,
}

/// Width and height of a chart, for a phone's screen with
/// readable text.
const SIZE: (f64, f64) = (480.0, 330.0);
/// Space for the labels of the axes.
const LEFT: f64 = 62.0;
const BOTTOM: f64 = 44.0;
/// Space at the other sides.
const MARGIN: f64 = 10.0;
/// Most labels of an axis.
const MOST_TICKS: usize = 8;

impl Chart {
    /// A chart of the points that have finite logarithms.
    ///
    /// # Errors
    /// When no point is left.
    pub fn new(x: &'static str, y: &'static str, mut series: Vec<Series>) -> anyhow::Result<Self> {
        // Beyond, an axis would end at 0 or infinity.
        let is_within = |v: f64| (1e-30..1e30).contains(&v);
        for series in &mut series {
            series.points.retain(|&(x, y)| is_within(x) && is_within(y));
        }
        series.retain(|series| !series.points.is_empty());
        ensure!(!series.is_empty(), "there is nothing to draw");
        Ok(Self { x, y, series })
    }

    /// The chart as SVG, in the page's colors.
    pub fn svg(&self, styles: &Styles) -> String {
        let axis = |of: fn(&(f64, f64)) -> f64, pixels| Axis::new(self.points().map(of), pixels);
        let x = axis(|point| point.0, LEFT..SIZE.0 - MARGIN);
        let y = axis(|point| point.1, SIZE.1 - BOTTOM..MARGIN);
        let mut svg =
            format!("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\">", SIZE.0, SIZE.1);
        self.axes(&mut svg, &x, &y);
        for series in &self.series {
            series.draw(&mut svg, styles, &x, &y, [self.x, self.y]);
        }
        svg + "</svg>"
    }

    fn points(&self) -> impl Iterator<Item = &(f64, f64)> {
        self.series.iter().flat_map(|series| &series.points)
    }

    fn axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        let (left, right, top, bottom) = (x.pixels.start, x.pixels.end, y.pixels.end, y.pixels.start);
        for value in ticks(&x.values, MOST_TICKS) {
            let at = x.place(value);
            let _ = write!(
                svg,
                "<path class=\"g\" d=\"M{at:.1} {top}V{bottom}\"/><text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                short(value)
            );
        }
        for value in ticks(&y.values, MOST_TICKS) {
            let at = y.place(value);
            let _ = write!(
                svg,
                "<path class=\"g\" d=\"M{left} {at:.1}H{right}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 6.0,
                at + 4.0,
                short(value)
            );
        }
        let _ = write!(svg, "<path class=\"a\" d=\"M{left} {top}V{bottom}H{right}\"/>");
        let _ = write!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(left, right),
            SIZE.1 - 8.0,
            escape(self.x)
        );
        let middle = f64::midpoint(top, bottom);
        let _ = write!(
            svg,
            "<text x=\"14\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 14 {middle})\">{}</text>",
            escape(self.y)
        );
    }
}

impl Series {
    fn draw(&self, svg: &mut String, styles: &Styles, x: &Axis, y: &Axis, names: [&str; 2]) {
        let style = styles.of(self);
        let _ = write!(svg, "<g style=\"--c:{}\">", style.colour());
        if self.mark != Mark::Dots {
            let points = self.points.iter().map(|&point| format!("{:.1},{:.1}", x.place(point.0), y.place(point.1)));
            let points = points.collect::<Vec<_>>().join(" ");
            let (class, dash) = (if self.mark == Mark::Guide { "r" } else { "l" }, style.dash());
            let _ = write!(
                svg,
                "<polyline class=\"{class}\"{dash} points=\"{points}\"><title>{}</title></polyline>",
                escape(&self.name)
            );
        }
        if self.mark != Mark::Guide {
            for &(at_x, at_y) in &self.points {
                let marker = style.marker(x.place(at_x), y.place(at_y));
                let values = format!("{}: {} {}, {} {}", self.name, short(at_x), names[0], short(at_y), names[1]);
                let _ = write!(svg, "<path class=\"m\" d=\"{marker}\"><title>{}</title></path>", escape(&values));
            }
        }
        svg.push_str("</g>");
    }
}

/// A logarithmic axis.
struct Axis {
    values: Range<f64>,
    /// From the lowest value to the highest.
    pixels: Range<f64>,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, pixels: Range<f64>) -> Self {
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        // A single value gets an axis, too.
        Self { values: low / 1.15..high * 1.15, pixels }
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value / self.values.start).ln() / (self.values.end / self.values.start).ln();
        self.pixels.start + share * (self.pixels.end - self.pixels.start)
    }
}

/// A short number: `1.5k`, `20`, `0.3`.
pub fn short(value: f64) -> String {
    let (number, prefix) = scaled(value);
    number + prefix
}

/// A number with its unit: `3.35 TB/s`.
pub fn with_unit(value: f64, unit: &str) -> String {
    let (number, prefix) = scaled(value);
    format!("{number} {prefix}{unit}")
}

/// A short number, and the prefix of its unit.
fn scaled(value: f64) -> (String, &'static str) {
    const UNITS: [(f64, &str); 5] = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (scaled, unit) =
        UNITS.iter().find(|(scale, _)| value >= *scale).map_or((value, ""), |(scale, unit)| (value / scale, *unit));
    // Three digits, but none of an integer less.
    let digits = if scaled >= 100.0 { 0 } else { (2.0 - scaled.log10().floor()).clamp(0.0, 9.0) as usize };
    let text = format!("{scaled:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    (text.to_owned(), unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, mark: Mark, points: &[(f64, f64)]) -> Series {
        Series { name: name.into(), mark, points: points.to_vec() }
    }

    fn svg(chart: &Chart) -> String {
        let mut styles = Styles::default();
        chart.series.iter().for_each(|series| styles.add(series));
        chart.svg(&styles)
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (1536.0, "1.54k"),
            (20.0, "20"),
            (0.3, "0.3"),
            (4.8e12, "4.8T"),
            (100.0, "100"),
            (1e9, "1G"),
            (0.004, "0.004"),
            (0.0, "0"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!(with_unit(3.35e12, "B/s"), "3.35 TB/s");
    }

    #[test]
    fn every_point_with_a_place_is_drawn_with_its_values() {
        let points = [(1.0, 2.0), (10.0, 3.0), (0.0, 1.0), (5.0, f64::NAN)];
        let chart = Chart::new("tokens", "us", vec![series("a <b>", Mark::Dots, &points)]).expect("two points");
        let svg = svg(&chart);
        assert_eq!(svg.matches("class=\"m\"").count(), 2);
        assert!(svg.contains("<title>a &lt;b&gt;: 10 tokens, 3 us</title>"), "{svg}");
        assert!(Chart::new("x", "y", vec![series("none", Mark::Line, &[(0.0, 1.0)])]).is_err());
    }

    #[test]
    fn both_axes_have_labels_even_of_one_point() {
        for points in [&[(8.0, 3.5)][..], &[(1.0, 9.0), (4096.0, 700.0)], &[(1e-3, 1e9), (1e3, 1e15)]] {
            let svg = svg(&Chart::new("x", "y", vec![series("a", Mark::Line, points)]).expect("points"));
            let labels = svg.matches("<text").count();
            assert!((2 + 4..=2 + 2 * MOST_TICKS).contains(&labels), "{labels}: {svg}");
            assert!(!svg.contains("NaN"), "{svg}");
        }
    }
}
