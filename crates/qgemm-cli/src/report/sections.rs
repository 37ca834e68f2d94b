//! Sections of a report: conformance, predictions and regressions.

use std::collections::BTreeMap;

use super::chart::Chart;
use super::input::{BenchPoint, CasePoint, SweepPoint};
use super::page::{Cell, Page};
use super::series::{Mark, Series};
use crate::bench::roof::share_text;

/// Limit of series in a chart; more cannot be told apart.
const MOST_SERIES: usize = 10;
/// Limit of rows in a table of faults.
const MOST_ROWS: usize = 200;

/// Outcomes of conformance cases.
pub fn conformance(page: &mut Page, cases: &[CasePoint]) {
    page.section("Conformance");
    let count = |verdict: &str| cases.iter().filter(|case| case.verdict.eq_ignore_ascii_case(verdict)).count();
    let ratios =
        cases.iter().filter_map(|case| Some(case.nmse? / case.limit?)).filter(|ratio| (100.0 * ratio).is_finite());
    let worst = ratios.fold(0.0, f64::max);
    page.numbers(&[
        (count("pass").to_string(), "passed"),
        (count("fail").to_string(), "failed"),
        (count("skip").to_string(), "skipped"),
        (format!("{:.1} %", 100.0 * worst), "of its limit: the worst error"),
    ]);
    let failed: Vec<_> = cases.iter().filter(|case| case.verdict.eq_ignore_ascii_case("fail")).collect();
    let row = |case: &&CasePoint| vec![Cell::bad(&case.case), case.detail.clone().unwrap_or_default().into()];
    if !failed.is_empty() {
        page.part("Failures");
        page.table(&["case", "what"], failed.iter().take(MOST_ROWS).map(row).collect());
    }
    let mut skipped: BTreeMap<&str, usize> = BTreeMap::new();
    for case in cases.iter().filter(|case| case.verdict.eq_ignore_ascii_case("skip")) {
        *skipped.entry(case.detail.as_deref().unwrap_or("no reason")).or_default() += 1;
    }
    if !skipped.is_empty() {
        page.part("Skipped");
        let rows = skipped.iter().take(MOST_ROWS).map(|(why, count)| vec![count.to_string().into(), (*why).into()]);
        page.table(&["#cases", "reason"], rows.collect());
    }
}

/// Predicted and measured times.
///
/// # Errors
/// When no point is left.
pub fn predicted(page: &mut Page, points: &[SweepPoint]) -> anyhow::Result<()> {
    page.section("Predicted against measured");
    let share = |within: f64| {
        let near = |p: &&SweepPoint| (p.estimated_microseconds / p.microseconds).ln().abs() <= (1.0 + within).ln();
        format!("{:.0} %", points.iter().filter(near).count() as f64 / points.len().max(1) as f64 * 100.0)
    };
    page.numbers(&[
        (points.len().to_string(), "measurements"),
        (share(0.1), "within 10 %"),
        (share(0.25), "within 25 %"),
        (share(1.0), "within a factor of two"),
    ]);
    let mut by_family: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for point in points {
        let place = (point.microseconds, point.estimated_microseconds);
        by_family.entry(format!("{} {}", point.family, point.format)).or_default().push(place);
    }
    let ends = points.iter().fold((f64::INFINITY, 0.0f64), |(l, h), p| (l.min(p.microseconds), h.max(p.microseconds)));
    let exact = vec![(ends.0, ends.0), (ends.1, ends.1)];
    let mut series = vec![Series { name: "as expected".into(), mark: Mark::Guide, points: exact }];
    let dots = by_family.into_iter().map(|(name, points)| Series { name, mark: Mark::Dots, points });
    series.extend(dots.take(MOST_SERIES));
    page.chart(Chart::new("measured microseconds", "expected microseconds", series)?);
    costly_choices(page, points);
    Ok(())
}

/// Table of the problems whose planned candidate is far behind the best.
fn costly_choices(page: &mut Page, points: &[SweepPoint]) {
    let mut best: BTreeMap<(&str, usize, usize, usize), f64> = BTreeMap::new();
    for p in points {
        let time = best.entry((&p.format, p.m, p.n, p.k)).or_insert(f64::INFINITY);
        *time = time.min(p.microseconds);
    }
    let mut behind: Vec<(f64, &SweepPoint)> = points
        .iter()
        .filter(|p| p.planned)
        .map(|p| (p.microseconds / best[&(p.format.as_str(), p.m, p.n, p.k)] - 1.0, p))
        .filter(|(share, _)| *share > 0.1)
        .collect();
    behind.sort_by(|a, b| b.0.total_cmp(&a.0));
    if !behind.is_empty() {
        page.part("Choices more than 10 % behind the best that was measured");
        let rows = behind.iter().take(MOST_ROWS).map(|(share, p)| {
            let shape = format!("{}x{}x{}", p.m, p.n, p.k);
            let (us, share) = (format!("{:.2}", p.microseconds), format!("{:.1} %", share * 100.0));
            vec![shape.into(), p.format.as_str().into(), us.into(), share.into()]
        });
        page.table(&["shape", "format", "#us", "#behind"], rows.collect());
    }
}

/// Smaller differences are no regression; neither are those
/// within three times the noise of both.
const SMALLEST: f64 = 0.03;
const NOISE_FACTOR: f64 = 3.0;

/// Results, compared with earlier ones if any.
pub fn regressions(page: &mut Page, points: &[BenchPoint], baseline: Option<&[BenchPoint]>) {
    page.section(if baseline.is_some() { "Against the baseline" } else { "Results" });
    let key = |p: &BenchPoint| (p.device.clone(), p.shape.clone(), p.format.clone(), p.x_dtype.clone());
    let earlier: BTreeMap<_, _> = baseline.into_iter().flatten().map(|p| (key(p), p)).collect();
    let (mut slower, mut faster, mut rows) = (0, 0, Vec::new());
    for point in points {
        let change = earlier.get(&key(point)).map(|before| {
            let change = point.microseconds / before.microseconds - 1.0;
            (change, change.abs() > SMALLEST.max(NOISE_FACTOR * (point.noise + before.noise)))
        });
        let cell = match change {
            None => "-".into(),
            Some((change, true)) if change > 0.0 => {
                slower += 1;
                Cell::bad(format!("{:+.1} %", change * 100.0))
            }
            Some((change, beyond)) => {
                faster += usize::from(beyond);
                format!("{:+.1} %", change * 100.0).into()
            }
        };
        let row = vec![
            point.shape.as_str().into(),
            point.format.as_str().into(),
            point.x_dtype.as_str().into(),
            format!("{:.2}", point.microseconds).into(),
            format!("{:.1} %", point.noise * 100.0).into(),
            share_text(point.bandwidth_share, point.above_roof).into(),
            cell,
            point.contention.clone().unwrap_or_default().into(),
        ];
        rows.push((change.map_or(0.0, |(change, _)| change), row));
    }
    if baseline.is_some() {
        page.numbers(&[
            (slower.to_string(), "regressions beyond the noise"),
            (faster.to_string(), "faster beyond the noise"),
            (points.len().to_string(), "results"),
        ]);
        rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    }
    let rows: Vec<Vec<Cell>> = rows.into_iter().map(|(_, row)| row).collect();
    page.table(&["shape", "format", "X", "#us", "#noise", "#of read bandwidth", "#change", "other work"], rows);
}
