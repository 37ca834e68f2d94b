//! Colors, markers and dashes of series: one style for a name, in every
//! chart of a page.

use std::collections::BTreeMap;

use super::series::{Mark, Series};

/// Colors on a light and on a dark background, `--s0` to `--s9`. They
/// differ in lightness, too, for grey prints.
pub const COLOURS: [[&str; 2]; 10] = [
    ["#0055b9", "#68a5ff"],
    ["#de6f0e", "#fea66f"],
    ["#08884d", "#29ac68"],
    ["#6d018d", "#b257d7"],
    ["#a98f1f", "#f9dd73"],
    ["#c01242", "#fe5972"],
    ["#0a96af", "#5bdefb"],
    ["#4a3a25", "#c0ae95"],
    ["#db4da7", "#feb9df"],
    ["#425c17", "#96af78"],
];
/// Number of markers. It has no divisor in common with that of the
/// colors, so that 70 series differ.
const MARKERS: usize = 7;
/// Dashes of guides.
const GUIDES: [&str; 4] = ["", "8 4", "2 3", "8 3 2 3"];

/// Styles of the series of a page, in the order of their first use.
#[derive(Clone, Debug, Default)]
pub struct Styles {
    series: BTreeMap<String, usize>,
    guides: BTreeMap<String, usize>,
}

/// Style of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    place: usize,
    mark: Mark,
}

impl Styles {
    /// Gives a series its style, unless its name has one.
    pub fn add(&mut self, series: &Series) {
        let names = if series.mark == Mark::Guide { &mut self.guides } else { &mut self.series };
        let next = names.len();
        names.entry(series.name.clone()).or_insert(next);
    }

    /// The style of a series.
    pub fn of(&self, series: &Series) -> Style {
        let names = if series.mark == Mark::Guide { &self.guides } else { &self.series };
        Style { place: names.get(&series.name).copied().unwrap_or(0), mark: series.mark }
    }
}

impl Style {
    /// The CSS color.
    pub fn colour(self) -> String {
        match self.mark {
            Mark::Guide => "var(--soft)".to_owned(),
            _ => format!("var(--s{})", self.place % COLOURS.len()),
        }
    }

    /// The attribute of a line's dashes; empty for whole lines.
    pub fn dash(self) -> String {
        let dash = match self.mark {
            Mark::Guide => GUIDES[self.place % GUIDES.len()],
            Mark::Dashed => "5 3",
            Mark::Line | Mark::Dots => "",
        };
        if dash.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dash}\"") }
    }

    /// The path of a marker around a point.
    pub fn marker(self, x: f64, y: f64) -> String {
        /// Half of its size.
        const R: f64 = 3.6;
        let moved = |points: &[(f64, f64)]| {
            let points = points.iter().map(|(dx, dy)| format!("{:.1} {:.1}", x + dx * R, y + dy * R));
            format!("M{}Z", points.collect::<Vec<_>>().join("L"))
        };
        match self.place % MARKERS {
            0 => format!("M{:.1} {y:.1}a{R} {R} 0 1 0 {d} 0a{R} {R} 0 1 0 -{d} 0Z", x - R, d = 2.0 * R),
            1 => moved(&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
            2 => moved(&[(0.0, -1.2), (1.1, 0.9), (-1.1, 0.9)]),
            3 => moved(&[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)]),
            4 => moved(&[(0.0, 1.2), (1.1, -0.9), (-1.1, -0.9)]),
            5 => moved(&plus(0.0)),
            _ => moved(&plus(std::f64::consts::FRAC_PI_4)),
        }
    }
}

/// Corners of a plus sign, rotated.
fn plus(angle: f64) -> [(f64, f64); 12] {
    const ARM: f64 = 1.3;
    const HALF: f64 = 0.4;
    let quarter = [(HALF, -ARM), (HALF, -HALF), (ARM, -HALF)];
    std::array::from_fn(|i| {
        let (x, y) = quarter[i % 3];
        let (sin, cos) = (angle + (i / 3) as f64 * std::f64::consts::FRAC_PI_2).sin_cos();
        (x * cos - y * sin, x * sin + y * cos)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: String, mark: Mark) -> Series {
        Series { name, mark, points: Vec::new() }
    }

    #[test]
    fn a_name_keeps_its_style_and_others_differ() {
        let mut styles = Styles::default();
        let all: Vec<Series> = (0..70).map(|i| series(format!("s{i}"), Mark::Line)).collect();
        all.iter().chain(&all).for_each(|series| styles.add(series));
        let drawn = |series: &Series| (styles.of(series).colour(), styles.of(series).marker(0.0, 0.0));
        let different: std::collections::BTreeSet<_> = all.iter().map(drawn).collect();
        assert_eq!(different.len(), all.len());
        assert_eq!(styles.of(&all[3]), styles.of(&series("s3".into(), Mark::Line)));
    }

    #[test]
    fn neighbouring_colours_differ_in_lightness() {
        let lightness = |colour: &str| -> f64 {
            let linear = |at: usize| {
                let value = u8::from_str_radix(&colour[at..at + 2], 16).expect("a color");
                (f64::from(value) / 255.0).powf(2.2)
            };
            116.0 * (0.2126 * linear(1) + 0.7152 * linear(3) + 0.0722 * linear(5)).cbrt() - 16.0
        };
        for mode in 0..2 {
            for pair in COLOURS.windows(2) {
                let difference = (lightness(pair[0][mode]) - lightness(pair[1][mode])).abs();
                assert!(difference >= 8.0, "{} and {}: {difference}", pair[0][mode], pair[1][mode]);
            }
        }
    }
}
