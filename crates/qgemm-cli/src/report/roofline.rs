//! Section of a plan's products under the roofs of a device.

use std::collections::BTreeMap;

use qgemm_api::DeviceInfo;
use qgemm_api::exec::{ExecPlan, PlannedOp};

use super::chart::{Chart, with_unit};
use super::page::{Cell, Page};
use super::series::{Mark, Series};
use crate::table::bytes;

/// Roofline of a plan's products, and times of its operations. Without
/// a device there are no roofs.
///
/// # Errors
/// When the plan has no product.
pub fn roofline(page: &mut Page, plan: &ExecPlan, roofs: Option<&DeviceInfo>) -> anyhow::Result<()> {
    page.section("Roofline of a model's layers");
    let (model, memory) = (&plan.model, &plan.memory);
    let seconds: f64 = plan.ops.iter().map(|op| op.estimate_seconds).sum();
    page.numbers(&[
        (model.architecture.clone(), "architecture"),
        (model.layers.to_string(), "layers"),
        (model.batch.to_string(), "tokens of a step"),
        (format!("{:.3} ms", seconds * 1e3), "expected"),
        (bytes(memory.arena_bytes as u64), "arena"),
        (bytes(memory.bytes_without_reuse.saturating_sub(memory.weights_end) as u64), "activations without reuse"),
        (bytes(memory.arena_bytes.saturating_sub(memory.weights_end) as u64), "with reuse"),
    ]);
    let mut by_role: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for op in &plan.ops {
        if let Some(point) = intensity(op) {
            by_role.entry(role(op)).or_default().push(point);
        }
    }
    for points in by_role.values_mut() {
        points.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        points.dedup();
    }
    let xs: Vec<f64> = by_role.values().flatten().map(|point| point.0).collect();
    let mut series = roofs.map_or_else(Vec::new, |info| roof_lines(info, &xs));
    let dots = by_role.into_iter().map(|(name, points)| Series { name, mark: Mark::Dots, points });
    series.extend(dots);
    page.text(explanation(plan, roofs));
    page.chart(Chart::new("operations a byte", "operations a second", series)?);
    if let Some(info) = roofs {
        device(page, info);
    }
    times(page, plan);
    Ok(())
}

fn explanation(plan: &ExecPlan, roofs: Option<&DeviceInfo>) -> String {
    let planned = &plan.runtime.device;
    let dots = format!(
        "Each dot is a product as the cost model expects it on {} ({}); layers that are alike lie on one another.",
        planned.name, planned.id
    );
    let lines = match roofs {
        Some(info) => format!(
            "The lines are what {} ({}) can: at the left its bandwidth bounds, which makes the slope; at the right its arithmetic.",
            info.name, info.id
        ),
        None => "The plan does not record the bandwidth and arithmetic of that device, and this machine has none: \
                 option --device states one for the roofs."
            .to_owned(),
    };
    format!("{dots} {lines}")
}

/// The last part of an operation's name.
fn role(op: &PlannedOp) -> String {
    op.op_id.rsplit('.').next().unwrap_or(&op.op_id).to_owned()
}

/// Operations that multiply by their weight; `gather_rows` only reads rows.
const PRODUCTS: [&str; 3] = ["gemm", "experts", "gradient"];

/// Operations a byte and operations a second of a product.
fn intensity(op: &PlannedOp) -> Option<(f64, f64)> {
    if !PRODUCTS.contains(&op.operation.as_str()) {
        return None;
    }
    let (weight, shape) = (op.weight.as_ref()?, op.shape);
    let rows = if weight.gated { 2.0 } else { 1.0 };
    let operations = 2.0 * rows * shape.m as f64 * shape.n as f64 * shape.k as f64;
    // At most one expert per slot is read.
    let read = weight.experts.map_or(1.0, |experts| shape.m.min(experts) as f64 / experts as f64);
    let moved = weight.bytes as f64 * read + 2.0 * shape.m as f64 * (shape.k as f64 + shape.n as f64);
    Some((operations / moved, operations / op.estimate_seconds))
}

/// A line for each arithmetic: the slope of the bandwidth, and a roof.
/// The knees of all lines are shown, whatever the products.
fn roof_lines(info: &DeviceInfo, xs: &[f64]) -> Vec<Series> {
    let knee = |rate: f64| 2.0 * rate / info.bandwidth;
    // Arithmetic that the device lacks has no rate.
    let rates: Vec<_> = info.rates.iter().filter(|(_, rate)| *rate > 0.0).collect();
    let knees = rates.iter().map(|(_, rate)| knee(*rate));
    let ends = xs.iter().copied().chain(knees).filter(|x| x.is_finite() && *x > 0.0);
    let (low, high) = ends.fold((f64::INFINITY, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
    let (left, right) = (low / 3.0, high * 3.0);
    let line = |(name, rate): (&str, f64)| Series {
        name: format!("roof: {name}"),
        mark: Mark::Guide,
        points: vec![(left, left * info.bandwidth), (knee(rate), 2.0 * rate), (right, 2.0 * rate)],
    };
    rates.iter().map(|(math, rate)| line((math.name(), *rate))).collect()
}

/// Description of the device of the roofs.
fn device(page: &mut Page, info: &DeviceInfo) {
    let mut numbers = vec![
        (info.name.clone(), "device of the roofs"),
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
    let rate = |(name, rate): (&str, f64)| vec![Cell::from(name), with_unit(2.0 * rate, "op/s").into()];
    let rates = info.rates.iter().filter(|(_, of)| *of > 0.0).map(|(math, of)| rate((math.name(), *of)));
    page.table(&["arithmetic", "#additions and multiplications"], rates.collect());
}

/// Times by role.
fn times(page: &mut Page, plan: &ExecPlan) {
    let mut times: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    for op in &plan.ops {
        let time = times.entry(role(op)).or_default();
        *time = (time.0 + 1, time.1 + op.estimate_seconds);
    }
    let row = |(role, (count, seconds)): (String, (usize, f64))| {
        let each = seconds / count.max(1) as f64;
        vec![
            role.into(),
            count.to_string().into(),
            format!("{:.1}", seconds * 1e6).into(),
            format!("{:.1}", each * 1e6).into(),
        ]
    };
    page.table(&["operation", "#launches", "#us together", "#us each"], times.into_iter().map(row).collect());
}

#[cfg(test)]
mod tests {
    use qgemm_api::Context;

    use super::*;

    #[test]
    fn every_roof_has_a_slope_and_a_flat_part() {
        let ctx = Context::open("cpu").expect("always there");
        for xs in [&[1.0, 3.5][..], &[1e6], &[]] {
            for Series { points, .. } in roof_lines(ctx.info(), xs) {
                let [(x0, y0), (x1, y1), (x2, y2)] = points[..] else { panic!("{points:?}") };
                assert!(x0 < x1 && x1 < x2 && y0 < y1 && y1 == y2, "{points:?}");
                assert!((y1 / x1 / (y0 / x0) - 1.0).abs() < 1e-9, "the slope is the bandwidth: {points:?}");
            }
        }
    }
}
