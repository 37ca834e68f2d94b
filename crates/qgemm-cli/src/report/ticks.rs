//! Labelled values of a logarithmic axis.

use std::ops::Range;

/// Mantissas of labels in a decade, from few to many.
const MANTISSAS: [&[f64]; 4] = [&[1.0], &[1.0, 3.0], &[1.0, 2.0, 5.0], &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0]];
/// Fewest labels that tell the scale of an axis.
const FEWEST: usize = 3;

/// At most `most` round values within a range, as many as fit.
pub fn ticks(values: &Range<f64>, most: usize) -> Vec<f64> {
    let decades = values.start.log10().floor() as i32..=values.end.log10().ceil() as i32;
    let of = |mantissas: &[f64], step: i32| -> Vec<f64> {
        let decades = decades.clone().filter(|decade| decade.rem_euclid(step) == 0);
        let all = decades.flat_map(|decade| mantissas.iter().map(move |m| m * 10f64.powi(decade)));
        all.filter(|tick| values.contains(tick)).collect()
    };
    let within = MANTISSAS.iter().map(|mantissas| of(mantissas, 1)).filter(|ticks| ticks.len() <= most);
    match within.max_by_key(Vec::len) {
        Some(ticks) if ticks.len() >= FEWEST => ticks,
        // Less than a decade.
        Some(_) => linear(values, most),
        // Many decades.
        None => (2..).map(|step| of(&[1.0], step)).find(|ticks| ticks.len() <= most).unwrap_or_default(),
    }
}

/// Multiples of a round step.
fn linear(values: &Range<f64>, most: usize) -> Vec<f64> {
    let rough = (values.end - values.start) / most as f64;
    let scale = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * scale);
    let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(scale * 10.0);
    let first = (values.start / step).ceil();
    (0..most).map(|i| (first + i as f64) * step).filter(|tick| values.contains(tick)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_round_and_few() {
        let of = |from, to| ticks(&(from..to), 7);
        assert_eq!(of(0.9, 5000.0), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(of(1.0, 100.0), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
        assert_eq!(of(80.0, 110.0), [80.0, 85.0, 90.0, 95.0, 100.0, 105.0]);
        for (from, to) in [(1e-30, 1e30), (7.0, 9.3), (3.0, 3.1), (1e9, 1e16)] {
            let ticks = of(from, to);
            assert!((2..=7).contains(&ticks.len()) && ticks.iter().all(|tick| (from..to).contains(tick)), "{ticks:?}");
        }
    }
}
