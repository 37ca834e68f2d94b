//! The sections of a report.

use std::collections::BTreeMap;

use qgemm_api::DeviceInfo;
use qgemm_api::exec::ExecPlan;

use super::charts::{Mark, Series, draw, with_unit};
use super::input::{BenchPoint, CasePoint, Results, SweepPoint};
use super::page::Page;
use crate::table::bytes;

/// Limit of series in a chart; more cannot be told apart.
const MOST_SERIES: usize = 10;
/// Color of guides.
const GUIDE: usize = 8;
/// Number of our formats drawn before peers.
const OURS: usize = 4;
/// Limit of rows in a table of faults.
const MOST_ROWS: usize = 200;

/// Description of the device.
pub fn device(page: &mut Page, info: &DeviceInfo) {
    let mut numbers = vec![
        (info.id.to_string(), "device"),
        (info.arch.clone(), "architecture"),
        (info.units.to_string(), "units"),
        (with_unit(info.bandwidth, "B/s"), "read bandwidth"),
        (format!("{:.1} us", info.launch_seconds * 1e6), "launch"),
    ];
    if info.memory_bytes > 0 {
        numbers.push((bytes(info.memory_bytes), "memory"));
    }
    if !info.driver.is_empty() {
        numbers.push((info.driver.clone(), "driver"));
    }
    page.numbers(&numbers);
    let rates = info.rates.iter().map(|(math, rate)| vec![math.name().to_owned(), with_unit(2.0 * rate, "op/s")]);
    page.table(&["arithmetic", "#additions and multiplications"], &rates.collect::<Vec<_>>());
}

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
    let row = |case: &&CasePoint| vec![format!("!{}", case.case), case.detail.clone().unwrap_or_default()];
    if !failed.is_empty() {
        page.part("Failures");
        page.table(&["case", "what"], &failed.iter().take(MOST_ROWS).map(row).collect::<Vec<_>>());
    }
    let mut skipped: BTreeMap<&str, usize> = BTreeMap::new();
    for case in cases.iter().filter(|case| case.verdict.eq_ignore_ascii_case("skip")) {
        *skipped.entry(case.detail.as_deref().unwrap_or("no reason")).or_default() += 1;
    }
    if !skipped.is_empty() {
        page.part("Skipped");
        let rows = skipped.iter().take(MOST_ROWS).map(|(why, count)| vec![count.to_string(), (*why).to_owned()]);
        page.table(&["#cases", "reason"], &rows.collect::<Vec<_>>());
    }
}

/// Roofline of a plan's products on the device.
///
/// # Errors
/// When the plan has no product.
pub fn roofline(page: &mut Page, plan: &ExecPlan, info: &DeviceInfo) -> anyhow::Result<()> {
    page.section("Roofline of a model's layers");
    let model = &plan.model;
    let seconds: f64 = plan.ops.iter().map(|op| op.estimate_seconds).sum();
    page.numbers(&[
        (model.architecture.clone(), "architecture"),
        (model.layers.to_string(), "layers"),
        (model.batch.to_string(), "tokens of a step"),
        (format!("{:.3} ms", seconds * 1e3), "expected"),
        (bytes(plan.memory.arena_bytes as u64), "arena"),
        (
            bytes(plan.memory.bytes_without_reuse.saturating_sub(plan.memory.weights_end) as u64),
            "activations without reuse",
        ),
        (bytes(plan.memory.arena_bytes.saturating_sub(plan.memory.weights_end) as u64), "with reuse"),
    ]);
    page.text("Each dot is a product as the cost model expects it; layers that are alike lie on one another. The lines are what the device can: its bandwidth, and its arithmetic.");
    let mut by_role: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut times: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    for op in plan.ops.iter() {
        let role = op.op_id.rsplit('.').next().unwrap_or(&op.op_id).to_owned();
        let time = times.entry(role.clone()).or_default();
        *time = (time.0 + 1, time.1 + op.estimate_seconds);
        let Some(weight) = &op.weight else { continue };
        let shape = op.shape;
        let rows = if weight.gated { 2.0 } else { 1.0 };
        let operations = 2.0 * rows * shape.m as f64 * shape.n as f64 * shape.k as f64;
        // At most one expert per slot is read.
        let read = weight.experts.map_or(1.0, |experts| shape.m.min(experts) as f64 / experts as f64);
        let moved = weight.bytes as f64 * read + 2.0 * shape.m as f64 * (shape.k as f64 + shape.n as f64);
        by_role.entry(role).or_default().push((operations / moved, operations / op.estimate_seconds));
    }
    for points in by_role.values_mut() {
        points.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        points.dedup();
    }
    let xs: Vec<f64> = by_role.values().flatten().map(|point| point.0).collect();
    let (low, high) = xs.iter().fold((f64::INFINITY, 0.0f64), |(l, h), &x| (l.min(x), h.max(x)));
    let mut series: Vec<Series> = Vec::new();
    for (math, rate) in &info.rates {
        let (roof, knee) = (2.0 * rate, 2.0 * rate / info.bandwidth);
        let mut points = vec![(low / 2.0, (low / 2.0 * info.bandwidth).min(roof))];
        if knee > low / 2.0 && knee < high * 2.0 {
            points.push((knee, roof));
        }
        points.push((high * 2.0, (high * 2.0 * info.bandwidth).min(roof)));
        series.push(Series { name: format!("roof: {}", math.name()), colour: GUIDE, mark: Mark::Guide, points });
    }
    for (colour, (role, points)) in by_role.into_iter().enumerate() {
        series.push(Series { name: role, colour, mark: Mark::Dots, points });
    }
    chart(page, &series, "operations a byte", "operations a second")?;
    let rows = times.iter().map(|(role, (count, seconds))| {
        vec![
            role.clone(),
            count.to_string(),
            format!("{:.1}", seconds * 1e6),
            format!("{:.1}", seconds / (*count).max(1) as f64 * 1e6),
        ]
    });
    page.table(&["operation", "#launches", "#us together", "#us each"], &rows.collect::<Vec<_>>());
    Ok(())
}

/// Time over tokens, with peers.
///
/// # Errors
/// When a chart cannot be drawn.
pub fn tokens(page: &mut Page, results: &Results) -> anyhow::Result<()> {
    page.section("Time against tokens");
    page.text(&format!("Measured on {} through {}. Lower is better.", results.device, results.through));
    for [n, k] in &results.table.shapes {
        let mut series: Vec<Series> = Vec::new();
        // A few of our formats, then all peers, then our other formats.
        let is_peer = |column: &&String| results.runs.iter().any(|run| run.by == **column);
        let (peers, ours): (Vec<_>, Vec<_>) = results.table.columns.iter().partition(is_peer);
        let (first, rest) = ours.split_at(ours.len().min(OURS));
        for column in first.iter().chain(&peers).chain(rest).copied() {
            let mut points: BTreeMap<usize, f64> = BTreeMap::new();
            let mut name = column.clone();
            for run in results.runs.iter().filter(|run| !run.hidden) {
                for row in run.rows.iter().filter(|row| (row.n, row.k) == (*n, *k)) {
                    let is_column = match run.by.as_str() {
                        "qgemm" => row.weights.as_ref() == Some(column),
                        peer => peer == column,
                    };
                    if is_column {
                        // The fastest of several settings.
                        let best = points.entry(row.m).or_insert(f64::INFINITY);
                        *best = best.min(row.us.middle());
                        match &run.name {
                            Some(peer) if run.by != "qgemm" => name.clone_from(peer),
                            _ => name = format!("qgemm {column}"),
                        }
                    }
                }
            }
            if !points.is_empty() && series.len() < MOST_SERIES {
                let points = points.into_iter().map(|(m, us)| (m as f64, us)).collect();
                series.push(Series { name, colour: series.len(), mark: Mark::Line, points });
            }
        }
        if !series.is_empty() {
            page.part(&format!("{n} x {k}"));
            chart(page, &series, "tokens", "microseconds")?;
        }
    }
    Ok(())
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
    let mut series = vec![Series { name: "as expected".into(), colour: GUIDE, mark: Mark::Guide, points: exact }];
    for (colour, (name, points)) in by_family.into_iter().take(MOST_SERIES - 2).enumerate() {
        series.push(Series { name, colour, mark: Mark::Dots, points });
    }
    chart(page, &series, "measured microseconds", "expected microseconds")?;
    // Problems with the costliest choices.
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
            vec![shape, p.format.clone(), format!("{:.2}", p.microseconds), format!("{:.1} %", share * 100.0)]
        });
        page.table(&["shape", "format", "#us", "#behind"], &rows.collect::<Vec<_>>());
    }
    Ok(())
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
        let text = match change {
            None => "-".to_owned(),
            Some((change, true)) if change > 0.0 => {
                slower += 1;
                format!("!{:+.1} %", change * 100.0)
            }
            Some((change, beyond)) => {
                faster += usize::from(beyond);
                format!("{:+.1} %", change * 100.0)
            }
        };
        rows.push((
            change.map_or(0.0, |(change, _)| change),
            vec![
                point.shape.clone(),
                point.format.clone(),
                point.x_dtype.clone(),
                format!("{:.2}", point.microseconds),
                format!("{:.0} %", point.bandwidth_share * 100.0),
                text,
            ],
        ));
    }
    if baseline.is_some() {
        page.numbers(&[
            (slower.to_string(), "regressions beyond the noise"),
            (faster.to_string(), "faster beyond the noise"),
            (points.len().to_string(), "results"),
        ]);
        rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    }
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(_, row)| row).collect();
    page.table(&["shape", "format", "X", "#us", "#of read bandwidth", "#change"], &rows);
}

fn chart(page: &mut Page, series: &[Series], x_name: &str, y_name: &str) -> anyhow::Result<()> {
    let svg = draw(series, x_name, y_name)?;
    let named: Vec<(String, usize)> = series.iter().map(|series| (series.name.clone(), series.colour)).collect();
    page.chart(&svg, &named);
    Ok(())
}
