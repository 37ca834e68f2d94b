//! Charts with two logarithmic axes, as SVG.

use anyhow::ensure;
use plotters::prelude::*;

use super::page::series_colour;

/// Style of a series.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A line with dots.
    Line,
    /// A thin line without dots.
    Guide,
    /// Dots.
    Dots,
}

/// A named series of points.
pub struct Series {
    pub name: String,
    /// Index of its color.
    pub colour: usize,
    pub mark: Mark,
    pub points: Vec<(f64, f64)>,
}

/// Width and height of a chart, for a phone's screen with
/// readable text.
const SIZE: (u32, u32) = (480, 330);
/// Text height.
const TEXT: u32 = 16;
/// Color of grid lines and axes. The page replaces it.
const GRID: RGBColor = RGBColor(0x80, 0x80, 0x80);

/// Draws series over axes with these names. Points that have no
/// finite logarithm are left out.
///
/// # Errors
/// When no point is left.
pub fn draw(series: &[Series], x_name: &str, y_name: &str) -> anyhow::Result<String> {
    // Beyond, an axis would end at 0 or infinity.
    let is_within = |v: f64| (1e-30..1e30).contains(&v);
    let has_place = |&&(x, y): &&(f64, f64)| is_within(x) && is_within(y);
    let all: Vec<(f64, f64)> = series.iter().flat_map(|s| s.points.iter().filter(has_place).copied()).collect();
    ensure!(!all.is_empty(), "there is nothing to draw");
    let range = |of: fn(&(f64, f64)) -> f64| {
        let (low, high) = all.iter().map(of).fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
        low / 1.25..high * 1.25
    };
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(4)
            .margin_right(16)
            .x_label_area_size(44)
            .y_label_area_size(60)
            .build_cartesian_2d(range(|p| p.0).log_scale(), range(|p| p.1).log_scale())?;
        let text = ("sans-serif", TEXT).into_font();
        chart
            .configure_mesh()
            .x_desc(x_name)
            .y_desc(y_name)
            .x_labels(6)
            .y_labels(6)
            .label_style(text.clone())
            .axis_desc_style(text)
            .axis_style(GRID)
            .bold_line_style(GRID.mix(0.6))
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|value| short(*value))
            .y_label_formatter(&|value| short(*value))
            .draw()?;
        for Series { colour, mark, points, .. } in series {
            let (r, g, b) = series_colour(*colour);
            let colour = RGBColor(r, g, b);
            let points: Vec<(f64, f64)> = points.iter().filter(has_place).copied().collect();
            let width = if *mark == Mark::Line { 2 } else { 1 };
            if *mark != Mark::Dots {
                chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(width)))?;
            }
            if *mark != Mark::Guide {
                chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
            }
        }
        root.present()?;
    }
    Ok(svg)
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
    const UNITS: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (scaled, unit) =
        UNITS.iter().find(|(scale, _)| value >= *scale).map_or((value, ""), |(scale, unit)| (value / scale, *unit));
    let text = if scaled >= 100.0 { format!("{scaled:.0}") } else { format!("{scaled:.2}") };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    (text.to_owned(), unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let cases = [(1536.0, "1.54k"), (20.0, "20"), (0.3, "0.3"), (4.8e12, "4.8T"), (100.0, "100"), (1e9, "1G")];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!(with_unit(3.35e12, "B/s"), "3.35 TB/s");
    }

    #[test]
    fn every_point_with_a_place_is_drawn() {
        let points = vec![(1.0, 2.0), (10.0, 3.0), (0.0, 1.0), (5.0, f64::NAN)];
        let series = Series { name: "a".into(), colour: 2, mark: Mark::Dots, points };
        let svg = draw(&[series], "tokens", "us").expect("two points");
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("#FEDC02") && svg.contains("tokens"));
        assert!(draw(&[], "x", "y").is_err());
    }
}
