//! Memory and MMA counters of emulated kernels: tables for `qgemm
//! verify --counters`.

use std::collections::BTreeMap;

use qgemm_api::emu::{KernelCounters, Space, Traffic};
use serde::Serialize;

use crate::out::{self, Printing};
use crate::table::{self, Column, Row, numbers, words};

/// Accesses of a kernel to print, the largest excess first.
const WORST_SITES: usize = 6;

/// Accesses, and the least possible.
#[derive(Clone, Copy, Serialize)]
struct Cost {
    requests: u64,
    /// Wavefronts of shared memory, or sectors of global memory.
    units: u64,
    ideal: u64,
}

impl Cost {
    fn excess(self) -> u64 {
        self.units - self.ideal
    }

    /// Accesses relative to the least.
    fn ratio(self) -> String {
        match self.ideal {
            0 => "-".to_owned(),
            ideal => format!("{:.2}", self.units as f64 / ideal as f64),
        }
    }
}

impl From<Traffic> for Cost {
    fn from(traffic: Traffic) -> Self {
        Self { requests: traffic.requests, units: traffic.units, ideal: traffic.ideal }
    }
}

/// Counters of a kernel.
#[derive(Serialize)]
pub struct KernelRow {
    kernel: String,
    launches: u64,
    blocks: u64,
    barriers: u64,
    shared: Cost,
    global: Cost,
    mma: BTreeMap<&'static str, u64>,
    /// By instruction, the largest excess first.
    sites: Vec<Site>,
}

#[derive(Serialize)]
struct Site {
    place: String,
    memory: &'static str,
    #[serde(flatten)]
    cost: Cost,
}

/// One row per kernel.
pub fn rows(counters: BTreeMap<String, KernelCounters>) -> Vec<KernelRow> {
    counters.into_iter().map(row).collect()
}

fn row((kernel, counters): (String, KernelCounters)) -> KernelRow {
    let (shared, global) = (counters.total(Space::Shared).into(), counters.total(Space::Global).into());
    let sites = counters.sites.into_iter().map(|(site, traffic)| Site {
        place: site.place,
        memory: match site.space {
            Space::Shared => "shared",
            Space::Global => "global",
        },
        cost: traffic.into(),
    });
    let mut sites: Vec<Site> = sites.collect();
    sites.sort_by_key(|site| std::cmp::Reverse(site.cost.excess()));
    let KernelCounters { launches, blocks, barriers, mma, .. } = counters;
    KernelRow { kernel, launches, blocks, barriers, shared, global, mma, sites }
}

/// Prints both tables.
///
/// # Errors
/// When a row cannot be serialised.
pub fn print(kernels: Vec<KernelRow>, printing: Printing) -> anyhow::Result<()> {
    let mut worst = Vec::new();
    for row in &kernels {
        let sites = row.sites.iter().filter(|site| site.cost.excess() > 0).take(WORST_SITES);
        worst.extend(sites.map(|site| SiteRow {
            kernel: row.kernel.clone(),
            place: site.place.clone(),
            memory: site.memory,
            cost: site.cost,
        }));
    }
    out::line("")?;
    table::print(kernels, printing)?;
    out::line("")?;
    if worst.is_empty() && printing.is_text() {
        return out::line("every access takes as little as it can");
    }
    table::print(worst, printing)
}

impl Row for KernelRow {
    const COLUMNS: &'static [Column] = &[
        words("kernel", 36),
        numbers("launches", 8),
        numbers("blocks", 7),
        numbers("shared", 9),
        numbers("wavefronts", 10),
        numbers("× ideal", 7),
        numbers("global", 9),
        numbers("sectors", 9),
        numbers("× ideal", 7),
        numbers("barriers", 8),
        words("mma", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let mma = self.mma.iter().map(|(atom, count)| format!("{} {count}", atom.trim_start_matches("mma_")));
        vec![
            self.kernel.clone(),
            self.launches.to_string(),
            self.blocks.to_string(),
            self.shared.requests.to_string(),
            self.shared.units.to_string(),
            self.shared.ratio(),
            self.global.requests.to_string(),
            self.global.units.to_string(),
            self.global.ratio(),
            self.barriers.to_string(),
            mma.collect::<Vec<_>>().join(", "),
        ]
    }
}

/// An instruction with more accesses than necessary.
#[derive(Serialize)]
struct SiteRow {
    kernel: String,
    place: String,
    memory: &'static str,
    #[serde(flatten)]
    cost: Cost,
}

impl Row for SiteRow {
    const COLUMNS: &'static [Column] = &[
        words("kernel", 36),
        words("place", 28),
        words("memory", 6),
        numbers("requests", 9),
        numbers("units", 10),
        numbers("ideal", 10),
        numbers("× ideal", 7),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.kernel.clone(),
            self.place.clone(),
            self.memory.to_owned(),
            self.cost.requests.to_string(),
            self.cost.units.to_string(),
            self.cost.ideal.to_string(),
            self.cost.ratio(),
        ]
    }
}
