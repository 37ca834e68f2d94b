//! Result tables: one row for each shape and number of tokens,
//! one column for each format or peer.

use std::collections::{BTreeMap, BTreeSet};

use qgemm_formats::{DType, Format};

use super::results::{Loading, OURS, Results, Roof, Row, Run, Span, Unit};

/// Maximum line length of prose.
const WIDTH: usize = 180;

/// Text between a file's markers: the source of the
/// figures, and the tables.
pub fn text(results: &Results) -> anyhow::Result<String> {
    Ok(wrapped(&origin(results)?) + &products(results)?)
}

/// Runs with a figure on the page.
fn shown(results: &Results) -> impl Iterator<Item = &Run> {
    results.runs.iter().filter(|run| !run.hidden && run.rows.iter().any(|row| is_shown(results, run, row)))
}

/// Whether the row's figure is on the page: f16, with a
/// shape and a column of the table.
fn is_shown(results: &Results, run: &Run, row: &Row) -> bool {
    let has_column = |name: &String| results.table.columns.contains(name);
    let in_table = results.table.shapes.contains(&[row.n, row.k]) && row.x == "f16";
    in_table && !row.hidden && (has_column(&run.by) || row.weights.as_ref().is_some_and(has_column))
}

/// One sentence each on roofs, commits and peers.
fn origin(results: &Results) -> anyhow::Result<String> {
    let mut roofs: Vec<String> = Vec::new();
    let mut ours: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut peers: Vec<String> = Vec::new();
    let add = |list: &mut Vec<String>, text: String| {
        if !list.contains(&text) {
            list.push(text);
        }
    };
    roofs.extend(results.roof.as_ref().map(|roof| format!("{} ({})", roof_text(roof), roof.source)));
    for run in shown(results) {
        if run.by == OURS {
            let setting = run.setting.as_deref().unwrap_or_default();
            roofs.extend(run.roof.as_ref().map(|roof| format!("{setting} {}", roof_text(roof)).trim().to_owned()));
            add(ours.entry(&run.date).or_default(), format!("`{}`", run.commit.as_deref().unwrap_or_default()));
        } else {
            let name = run.name.as_deref().unwrap_or(&run.by);
            add(&mut peers, format!("{name} ({})", run.version.as_deref().unwrap_or_default()));
        }
    }
    let Results { device, through, .. } = results;
    let ours: Vec<String> = ours.iter().map(|(date, commits)| format!("{date} at {}", commits.join(", "))).collect();
    let mut text = format!("{device} ({through}), {}. Roofs: {}.", ours.join(", "), roofs.join("; "));
    if !peers.is_empty() {
        text += &format!(" Peers: {}.", peers.join(", "));
    }
    if let Some(loading) = &results.loading {
        text += &loading_text(loading)?;
    }
    Ok(text)
}

fn roof_text(roof: &Roof) -> String {
    let ops = roof.tera_ops.map_or(String::new(), |ops| format!(", {} TFLOP/s", span(ops, 1.0)));
    format!("{} GB/s{ops}", span(roof.read_gb_per_s, 1.0))
}

/// Packing and loading speed of the slowest and the fastest
/// format; the file has all of them.
fn loading_text(loading: &Loading) -> anyhow::Result<String> {
    let range = |ends: &mut dyn Iterator<Item = [f64; 2]>| {
        ends.fold([f64::INFINITY, 0.0], |[low, high], [l, h]| [low.min(l), high.max(h)])
    };
    let [slow, fast] = range(&mut loading.rows.iter().map(|row| row.packing_gb_per_s.ends()));
    let [least, most] = range(&mut loading.rows.iter().map(|row| row.load_ms.ends()));
    let Loading { date, commit, copy_gb_per_s: copy, .. } = loading;
    let percent = |rate: f64| (100.0 * rate / copy).round();
    Ok(format!(
        " Packing a weight on the device runs at {} to {} % of copying ({copy} GB/s), loading it takes {least} to {most} ms \
         ({date} at `{commit}`).",
        percent(slow),
        percent(fast)
    ))
}

/// The table of products.
fn products(results: &Results) -> anyhow::Result<String> {
    let has_settings = shown(results).any(|run| run.setting.is_some());
    let mut header = vec!["N×K".to_owned(), "M".to_owned()];
    if has_settings {
        header.insert(1, results.table.setting.clone().unwrap_or_default());
    }
    header.extend(results.table.columns.iter().map(|column| column_name(results, column)));
    let mut lines = vec![line(&header), "|---".repeat(header.len()) + "|\n"];
    let mut previous = String::new();
    for [n, k] in &results.table.shapes {
        for setting in settings(results) {
            let of = |run: &Run| run.setting.as_deref() == setting;
            let runs: Vec<&Run> = shown(results).filter(|run| of(run)).collect();
            let here = |row: &Row| (row.n, row.k, row.x.as_str(), row.hidden) == (*n, *k, "f16", false);
            let ours = runs.iter().filter(|run| run.by == OURS);
            let rows = ours.flat_map(|run| run.rows.iter().filter(|row| here(row) && is_shown(results, run, row)));
            let tokens: BTreeSet<usize> = rows.map(|row| row.m).collect();
            for m in tokens {
                let mut cells = Vec::new();
                for column in &results.table.columns {
                    cells.push(cell(results, &runs, column, &|row| here(row) && row.m == m)?);
                }
                let place = format!("{n}×{k}");
                let mut lead = vec![place.clone(), m.to_string()];
                if has_settings {
                    lead.insert(1, setting.unwrap_or_default().into());
                }
                // Cells equal to those of the row above are left empty.
                let begin = lead[..lead.len() - 1].join("|");
                if begin == previous {
                    lead[..if has_settings { 2 } else { 1 }].fill(String::new());
                }
                previous = begin;
                lead.extend(cells);
                lines.push(line(&lead));
            }
        }
    }
    Ok(lines.concat())
}

/// Settings in order of first occurrence.
fn settings(results: &Results) -> Vec<Option<&str>> {
    let mut settings = Vec::new();
    for run in shown(results) {
        if !settings.contains(&run.setting.as_deref()) {
            settings.push(run.setting.as_deref());
        }
    }
    settings
}

/// Column heading: `INT4 g128`, or the peer's name.
fn column_name(results: &Results, column: &str) -> String {
    let peer = results.runs.iter().find(|run| run.by == column).and_then(|run| run.name.clone());
    peer.unwrap_or_else(|| format_name(column))
}

fn format_name(name: &str) -> String {
    name.to_uppercase().replace("_G", " g")
}

/// All figures of a cell: ours with the share of the
/// roof, next to those of peers with the same weights.
fn cell(results: &Results, runs: &[&Run], column: &str, here: &dyn Fn(&Row) -> bool) -> anyhow::Result<String> {
    let mut figures = Vec::new();
    for run in runs {
        let of_column = |row: &&Row| {
            here(row) && if run.by == OURS { row.weights.as_deref() == Some(column) } else { run.by == column }
        };
        for row in run.rows.iter().filter(of_column) {
            let mut figure = time(row.us, results.unit);
            if run.by == OURS {
                if let Some(roof) = run.roof.as_ref().or(results.roof.as_ref()) {
                    figure += &share(row, roof)?;
                }
                let beside = runs.iter().filter(|r| r.by != OURS && r.machine == run.machine);
                let rows = beside.flat_map(|r| r.rows.iter());
                for peer in rows.filter(|r| here(r) && r.weights.as_deref() == Some(column)) {
                    figure += &format!(" / {}", time(peer.us, results.unit));
                }
            }
            figures.push(figure);
        }
    }
    Ok(figures.join("; "))
}

/// ` (88 %)`: the time at the roof over the measured
/// time; empty when the roof is unknown.
fn share(row: &Row, roof: &Roof) -> anyhow::Result<String> {
    let (Some(bytes), ops) = (bytes(row)?, 2.0 * row.m as f64 * row.n as f64 * row.k as f64) else {
        return Ok(String::new());
    };
    let [slow_read, fast_read] = roof.read_gb_per_s.ends();
    let [few_ops, many_ops] = match roof.tera_ops {
        Some(rates) => rates.ends(),
        None if row.m == 1 => [f64::INFINITY; 2],
        None => return Ok(String::new()),
    };
    let floor = |read: f64, rate: f64| (bytes / read / 1e3).max(ops / rate / 1e6);
    let [fast, slow] = row.us.ends();
    let ends = [floor(fast_read, many_ops) / slow, floor(slow_read, few_ops) / fast].map(|s| (100.0 * s).round());
    Ok(format!(" ({} %)", if ends[0] == ends[1] { ends[0].to_string() } else { format!("{}–{}", ends[0], ends[1]) }))
}

/// Bytes of the weight, X and D.
fn bytes(row: &Row) -> anyhow::Result<Option<f64>> {
    let Some(weights) = &row.weights else {
        return Ok(None);
    };
    let values = row.m * (row.n + row.k) * row.x.parse::<DType>()?.bytes();
    Ok(Some((weight_bytes(weights, row.n, row.k)? + values) as f64))
}

fn weight_bytes(weights: &str, n: usize, k: usize) -> anyhow::Result<usize> {
    let format: Format = weights.parse()?;
    let desc = format.desc();
    Ok(desc.row_offset(n, k) + if desc.row_scale { 4 * n } else { 0 })
}

fn time(us: Span, unit: Unit) -> String {
    span(us, if matches!(unit, Unit::Ms) { 1000.0 } else { 1.0 })
}

/// `9.4`, or `11.2–11.6`, in units of `unit`.
pub(super) fn span(value: Span, unit: f64) -> String {
    match value {
        Span::One(value) => (value / unit).to_string(),
        Span::Range([low, high]) => format!("{}–{}", low / unit, high / unit),
    }
}

pub(super) fn line(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

/// A paragraph in lines of [`WIDTH`], followed by an empty line.
pub(super) fn wrapped(text: &str) -> String {
    let mut out = String::new();
    let mut length = 0;
    for word in text.split(' ') {
        let width = word.chars().count();
        if length > 0 && length + 1 + width > WIDTH {
            out.push('\n');
            length = 0;
        } else if length > 0 {
            out.push(' ');
            length += 1;
        }
        out += word;
        length += width;
    }
    out + "\n\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(roof: &str, runs: &str) -> Results {
        let text = format!(
            r#"{{"device": "d", "through": "CUDA", "unit": "us", "roof": {roof},
                "table": {{"shapes": [[28672, 8192]], "columns": ["int4_g128", "q4_0", "peer"]}}, "runs": [{runs}]}}"#
        );
        let results: Results = serde_json::from_str(&text).unwrap();
        results.check().unwrap();
        results
    }

    const READ: &str = r#"{"read_gb_per_s": 4530, "source": "s"}"#;
    const BOTH: &str = r#"{"read_gb_per_s": 4530, "tera_ops": 989, "source": "s"}"#;

    fn ours(more: &str, rows: &str) -> String {
        format!(r#"{{"by": "qgemm", "date": "2026-01-01", "commit": "abc", "command": "c", {more} "rows": [{rows}]}}"#)
    }

    fn row(weights: &str, m: usize, us: &str) -> String {
        format!(r#"{{"weights": "{weights}", "n": 28672, "k": 8192, "m": {m}, "us": {us}}}"#)
    }

    fn body(results: &Results) -> Vec<String> {
        products(results).unwrap().lines().skip(2).map(str::to_owned).collect()
    }

    #[test]
    fn memory_bounds_one_token_and_instructions_many() {
        let rows = [row("q4_0", 1, "32.9"), row("q4_0", 512, "320")].join(", ");
        // 132.1 MB of weights and 0.07 MB of X and D
        // over 4530 GB/s are 29.2 µs; 240.5 GFLOP over
        // 989 TFLOP/s are 243 µs.
        let with = results(BOTH, &ours("", &rows));
        assert_eq!(body(&with), ["| 28672×8192 | 1 |  | 32.9 (89 %) |  |", "|  | 512 |  | 320 (76 %) |  |"]);
        let without = results(READ, &ours("", &rows));
        assert_eq!(body(&without)[1], "|  | 512 |  | 320 |  |");
    }

    #[test]
    fn ranges_keep_both_ends_and_shares_follow_them() {
        let results = results(BOTH, &ours("", &row("q4_0", 1, "[32.9, 40]")));
        assert_eq!(body(&results), ["| 28672×8192 | 1 |  | 32.9–40 (73–89 %) |  |"]);
    }

    #[test]
    fn a_peer_has_a_column_or_stands_beside_the_same_weights_of_its_machine() {
        let peer = |id: &str, machine: u32, rows: &str| {
            format!(
                r#"{{"by": "{id}", "name": "Peer", "machine": {machine}, "date": "d", "version": "1", "command": "c", "rows": [{rows}]}}"#
            )
        };
        let column = r#"{"n": 28672, "k": 8192, "m": 1, "us": 5}"#;
        let runs = [
            ours(r#""machine": 1,"#, &row("q4_0", 1, "32.9")),
            ours(r#""machine": 2,"#, &row("q4_0", 1, "33")),
            peer("peer", 1, column),
            peer("ggml", 1, &row("q4_0", 1, "60")),
            peer("ggml", 2, &row("q4_0", 1, "61")),
        ];
        let results = results(BOTH, &runs.join(", "));
        assert_eq!(body(&results), ["| 28672×8192 | 1 |  | 32.9 (89 %) / 60; 33 (88 %) / 61 | 5 |"]);
    }

    #[test]
    fn settings_are_a_column_and_hidden_runs_are_not_shown() {
        let runs = [
            ours(r#""setting": "a","#, &row("q4_0", 1, "32.9")),
            ours(r#""setting": "b","#, &row("q4_0", 1, "34")),
            ours(r#""setting": "c", "hidden": true,"#, &row("q4_0", 1, "35")),
        ];
        let lines = body(&results(BOTH, &runs.join(", ")));
        assert_eq!(lines, ["| 28672×8192 | a | 1 |  | 32.9 (89 %) |  |", "| 28672×8192 | b | 1 |  | 34 (86 %) |  |"]);
    }

    #[test]
    fn the_roof_counts_codes_scales_and_row_scales() {
        assert_eq!(weight_bytes("q4_0", 28672, 8192).unwrap(), 28672 * 8192 / 32 * 18);
        assert_eq!(weight_bytes("fp8_e4m3", 28672, 8192).unwrap(), 28672 * 8192 + 4 * 28672);
    }

    #[test]
    fn prose_is_wrapped() {
        let text = wrapped(&"word ".repeat(60));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
        assert_eq!(text.split_whitespace().count(), 60);
    }
}
