//! Section of time over tokens, with peers.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::bail;
use qgemm_api::printable;

use super::chart::Chart;
use super::input::Results;
use super::page::{Cell, Page};
use super::series::{Mark, Series};

/// Limit of series in a chart; more cannot be told apart.
const MOST_SERIES: usize = 10;
/// Number of our formats drawn before peers.
const OURS: usize = 4;

/// A chart and a table for each shape. Speed-ups are relative to
/// `peer`, or the first one.
///
/// # Errors
/// When no peer is called so.
pub fn tokens(page: &mut Page, results: &Results, peer: Option<&str>) -> anyhow::Result<()> {
    page.section("Time against tokens");
    let mut text = format!("Measured on {} through {}. Lower is better.", results.device, results.through);
    let peers = peers(results);
    let peer = match peer {
        Some(wanted) => Some(peer_of(&peers, wanted)?),
        None => peers.first().map(|(_, name)| name.as_str()),
    };
    if let Some(peer) = peer {
        text += &format!(" Speed-ups (1.5×) are relative to {peer}; option --peer names another.");
    }
    page.text(text);
    for &[n, k] in &results.table.shapes {
        let all = series_of(results, n, k);
        if all.iter().any(|series| series.points.iter().any(|&(m, us)| m > 0.0 && us > 0.0)) {
            page.part(format!("{n} x {k}"));
            page.chart(Chart::new("tokens", "microseconds", all.clone())?);
            times(page, &all, peer);
        }
    }
    Ok(())
}

/// Every peer in the table's columns: its column and its name.
fn peers(results: &Results) -> Vec<(String, String)> {
    let name = |column: &String| {
        let run = results.runs.iter().find(|run| run.by == *column && !run.hidden)?;
        Some((column.clone(), run.name.clone().unwrap_or_else(|| column.clone())))
    };
    results.table.columns.iter().filter_map(name).collect()
}

/// The peer with a name or column.
///
/// # Errors
/// When there is none.
fn peer_of<'a>(names: &'a [(String, String)], wanted: &str) -> anyhow::Result<&'a str> {
    let found = names.iter().find(|(column, name)| column == wanted || name == wanted);
    match found {
        Some((_, name)) => Ok(name),
        None => {
            let known: Vec<String> = names.iter().map(|(column, name)| format!("{column} ({name})")).collect();
            bail!("--peer {}: expected one of {}", printable(wanted), known.join(", "))
        }
    }
}

/// A few of our formats, then all peers, then our other formats.
fn series_of(results: &Results, n: usize, k: usize) -> Vec<Series> {
    let is_peer = |column: &&String| results.runs.iter().any(|run| run.by == **column);
    let (peers, ours): (Vec<_>, Vec<_>) = results.table.columns.iter().partition(is_peer);
    let (first, rest) = ours.split_at(ours.len().min(OURS));
    let columns = first.iter().chain(&peers).chain(rest);
    columns.filter_map(|column| series(results, column, n, k)).take(MOST_SERIES).collect()
}

/// The fastest of several settings for each number of tokens.
fn series(results: &Results, column: &str, n: usize, k: usize) -> Option<Series> {
    let mut points: BTreeMap<usize, f64> = BTreeMap::new();
    let (mut name, mut mark) = (format!("qgemm {column}"), Mark::Line);
    for run in results.runs.iter().filter(|run| !run.hidden) {
        let is_ours = run.by == "qgemm";
        for row in run.rows.iter().filter(|row| (row.n, row.k) == (n, k)) {
            let is_column = if is_ours { row.weights.as_deref() == Some(column) } else { run.by == column };
            if !is_column {
                continue;
            }
            let best = points.entry(row.m).or_insert(f64::INFINITY);
            *best = best.min(row.us.middle());
            if !is_ours {
                (name, mark) = (run.name.clone().unwrap_or_else(|| run.by.clone()), Mark::Dashed);
            }
        }
    }
    let points: Vec<(f64, f64)> = points.into_iter().map(|(m, us)| (m as f64, us)).collect();
    (!points.is_empty()).then_some(Series { name, mark, points })
}

/// Table of the times, with our speed-up over a peer.
fn times(page: &mut Page, all: &[Series], peer: Option<&str>) {
    let tokens: BTreeSet<usize> = all.iter().flat_map(|series| &series.points).map(|point| point.0 as usize).collect();
    let at = |series: &Series, m: usize| series.points.iter().find(|point| point.0 as usize == m).map(|point| point.1);
    let peer = all.iter().find(|series| series.mark == Mark::Dashed && Some(series.name.as_str()) == peer);
    let cell = |series: &Series, m: usize| -> Cell {
        let Some(us) = at(series, m) else { return "".into() };
        let speed_up = peer.filter(|_| series.mark == Mark::Line).and_then(|peer| Some(at(peer, m)? / us));
        match speed_up {
            Some(speed_up) => format!("{us:.1} ({speed_up:.2}×)").into(),
            None => format!("{us:.1}").into(),
        }
    };
    let row = |series: &Series| {
        let cells = tokens.iter().map(|&m| cell(series, m));
        std::iter::once(series.name.as_str().into()).chain(cells).collect()
    };
    let titles = tokens.iter().map(|m| format!("#{m}"));
    let columns: Vec<String> = std::iter::once("us at so many tokens".to_owned()).chain(titles).collect();
    page.table(&columns, all.iter().map(row).collect());
}
