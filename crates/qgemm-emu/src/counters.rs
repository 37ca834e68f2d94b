//! Counters of memory accesses and matrix instructions,
//! with the ideal for comparison.
//!
//! Accesses of a warp's lanes form one instruction if each is
//! the lane's n-th use of the same atom since the lanes
//! last converged. This is exact for uniform control flow, and an
//! estimate for divergent lanes.

use std::collections::{BTreeMap, HashMap};
use std::ops::AddAssign;

use crate::fault::Site;

/// Counters of a kernel's launches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelCounters {
    /// Launches.
    pub launches: u64,
    /// CTAs.
    pub blocks: u64,
    /// Matrix instructions by atom.
    pub mma: BTreeMap<&'static str, u64>,
    /// Completed CTA barriers.
    pub barriers: u64,
    /// Accesses by source location, if [counted](crate::count_accesses).
    pub sites: BTreeMap<AccessSite, Traffic>,
}

impl KernelCounters {
    /// Adds the counters of further launches.
    pub fn add(&mut self, other: &Self) {
        self.launches += other.launches;
        self.blocks += other.blocks;
        self.barriers += other.barriers;
        for (name, count) in &other.mma {
            *self.mma.entry(name).or_default() += count;
        }
        for (site, traffic) in &other.sites {
            *self.sites.entry(site.clone()).or_default() += *traffic;
        }
    }

    /// Total accesses to one memory.
    pub fn total(&self, space: Space) -> Traffic {
        let mut total = Traffic::default();
        self.sites.iter().filter(|(site, _)| site.space == space).for_each(|(_, traffic)| total += *traffic);
        total
    }
}

/// A source location that accesses memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AccessSite {
    /// The memory.
    pub space: Space,
    /// `mainloop/x_tile.cuh:88`.
    pub place: String,
}

/// A memory, and the unit that it serves accesses in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// Shared memory, in wavefronts: passes over its 32 banks.
    Shared,
    /// Global memory, in 32-byte sectors.
    Global,
}

/// Cost of accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Loads and stores of warps.
    pub requests: u64,
    /// Required [wavefronts or sectors](Space).
    pub units: u64,
    /// Wavefronts without bank conflicts, or the minimum sectors
    /// for this many distinct bytes.
    pub ideal: u64,
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.units += other.units;
        self.ideal += other.ideal;
    }
}

/// Traffic of a launch by the kernel's source locations.
pub(crate) type LaunchTraffic = HashMap<(Space, Site), Traffic>;

/// Traffic by the text of the locations.
pub(crate) fn by_place(traffic: &LaunchTraffic) -> BTreeMap<AccessSite, Traffic> {
    let mut sites = BTreeMap::<_, Traffic>::new();
    for (&(space, site), &traffic) in traffic {
        *sites.entry(AccessSite { space, place: site.text() }).or_default() += traffic;
    }
    sites
}

/// Kind of a warp's access, which decides which
/// lanes are served together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Doing {
    Loads,
    Stores,
    /// Loads or stores of matrix rows, eight lanes at a time
    /// (`ldmatrix`, `stmatrix`).
    MovesRows,
}

const LANES: usize = 32;
/// Banks of shared memory, four bytes wide.
const BANKS: usize = 32;
const BANK_BYTES: u64 = 4;
/// Bytes moved by one pass of shared memory.
const WAVEFRONT_BYTES: u64 = BANKS as u64 * BANK_BYTES;
const SECTOR_BYTES: u64 = 32;

/// One instruction of a warp.
#[derive(Clone, Debug)]
struct Request {
    doing: Doing,
    bytes: u64,
    /// Address of each lane; `None` for inactive lanes.
    addresses: [Option<u64>; LANES],
}

/// A warp's requests at one location.
#[derive(Debug, Default)]
struct SiteTrace {
    /// Uses so far, per lane.
    uses: [usize; LANES],
    requests: Vec<Request>,
}

/// Accesses of a warp since its lanes last converged.
#[derive(Debug, Default)]
pub(crate) struct WarpTrace(HashMap<(Space, Doing, Site), SiteTrace>);

impl WarpTrace {
    /// Records an access of a lane.
    pub(crate) fn note(&mut self, space: Space, doing: Doing, site: Site, lane: usize, address: usize, bytes: usize) {
        let trace = self.0.entry((space, doing, site)).or_default();
        let number = trace.uses[lane];
        trace.uses[lane] += 1;
        if number == trace.requests.len() {
            trace.requests.push(Request { doing, bytes: bytes as u64, addresses: [None; LANES] });
        }
        trace.requests[number].addresses[lane] = Some(address as u64);
    }

    /// The lanes have converged: counts their accesses since then.
    pub(crate) fn settle(&mut self, traffic: &mut LaunchTraffic) {
        for ((space, _, site), trace) in self.0.drain() {
            let sum = traffic.entry((space, site)).or_default();
            for request in trace.requests {
                let (units, ideal) = match space {
                    Space::Shared => request.wavefronts(),
                    Space::Global => request.sectors(),
                };
                *sum += Traffic { requests: 1, units, ideal };
            }
        }
    }
}

impl Request {
    fn addresses(&self) -> impl Iterator<Item = u64> {
        self.addresses.iter().copied().flatten()
    }

    /// Passes of shared memory, and passes without bank conflicts.
    fn wavefronts(&self) -> (u64, u64) {
        let passes = self.addresses.chunks(self.lanes_of_a_pass()).map(|lanes| {
            let words = distinct(lanes.iter().flatten().flat_map(|&a| words(a, self.bytes)));
            let mut load = [0u64; BANKS];
            words.iter().for_each(|word| load[(word % BANKS as u64) as usize] += 1);
            load.into_iter().max().unwrap_or(0)
        });
        passes.fold((0, 0), |(total, ideal), pass| (total + pass, ideal + u64::from(pass > 0)))
    }

    /// Lanes that are served together: as many as can fill all
    /// banks, and twice as many for loads where pairs of lanes
    /// read the same address. An H200 counts this way
    /// (tests/recorded/wavefronts.txt), as published for older chips.
    fn lanes_of_a_pass(&self) -> usize {
        let lanes = (WAVEFRONT_BYTES / self.bytes.max(BANK_BYTES)) as usize;
        let in_pairs = |distance: usize| {
            let same = |lane: usize| match (self.addresses[lane], self.addresses[lane ^ distance]) {
                (Some(a), Some(b)) => a == b,
                _ => true,
            };
            (0..LANES).all(same)
        };
        let doubles = lanes < LANES && self.doing == Doing::Loads && (in_pairs(1) || in_pairs(2));
        if doubles { 2 * lanes } else { lanes }
    }

    /// Sectors of global memory, and the minimum.
    fn sectors(&self) -> (u64, u64) {
        let sectors = self.addresses().flat_map(|a| a / SECTOR_BYTES..=(a + self.bytes - 1) / SECTOR_BYTES);
        let starts = distinct(self.addresses());
        (distinct(sectors).len() as u64, (starts.len() as u64 * self.bytes).div_ceil(SECTOR_BYTES))
    }
}

fn distinct(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

fn words(address: u64, bytes: u64) -> std::ops::RangeInclusive<u64> {
    address / BANK_BYTES..=(address + bytes - 1) / BANK_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(bytes: u64, address: impl Fn(u64) -> u64) -> Request {
        let addresses = std::array::from_fn(|lane| Some(address(lane as u64)));
        Request { doing: Doing::Loads, bytes, addresses }
    }

    #[test]
    fn bank_conflicts_are_counted() {
        assert_eq!(request(4, |lane| lane * 4).wavefronts(), (1, 1));
        assert_eq!(request(4, |lane| lane * 8).wavefronts(), (2, 1));
        assert_eq!(request(4, |lane| lane * 128).wavefronts(), (32, 1));
        assert_eq!(request(4, |_| 64).wavefronts(), (1, 1), "one word for all is broadcast");
        assert_eq!(request(2, |lane| lane * 2).wavefronts(), (1, 1));
        assert_eq!(request(16, |lane| lane * 16).wavefronts(), (4, 4));
        assert_eq!(request(16, |lane| lane * 32).wavefronts(), (8, 4));
        assert_eq!(request(8, |lane| lane * 8).wavefronts(), (2, 2));
        assert_eq!(request(16, |_| 64).wavefronts(), (2, 2));
    }

    #[test]
    fn wavefronts_are_those_that_an_h200_counts() {
        let recorded = include_str!("../tests/recorded/wavefronts.txt");
        let mut count = 0;
        for line in recorded.lines().filter(|line| !line.starts_with('#')) {
            let [what, wavefronts, lanes] = line.split(": ").collect::<Vec<_>>()[..] else { panic!("{line}") };
            let (doing, bytes) = match what.split_once(' ').unwrap() {
                ("load", bytes) => (Doing::Loads, bytes.parse().unwrap()),
                ("store", bytes) => (Doing::Stores, bytes.parse().unwrap()),
                ("rows", _) => (Doing::MovesRows, 16),
                other => panic!("{other:?}"),
            };
            let mut request = Request { doing, bytes, addresses: [None; LANES] };
            for (address, lane) in request.addresses.iter_mut().zip(lanes.split(' ')) {
                *address = lane.parse().ok();
            }
            assert_eq!(request.wavefronts().0, wavefronts.parse::<u64>().unwrap(), "{line}");
            count += 1;
        }
        assert!(count > 100);
    }

    #[test]
    fn sectors_are_counted() {
        assert_eq!(request(4, |lane| lane * 4).sectors(), (4, 4));
        assert_eq!(request(16, |lane| lane * 16).sectors(), (16, 16));
        assert_eq!(request(2, |lane| lane * 64).sectors(), (32, 2));
        assert_eq!(request(4, |_| 0).sectors(), (1, 1));
    }

    #[test]
    fn lanes_accesses_are_joined_by_their_place() {
        let mut trace = WarpTrace::default();
        // The order of the lanes does not matter.
        for lane in (0..32).rev() {
            for round in 0..2 {
                trace.note(Space::Shared, Doing::Stores, Site::NONE, lane, round * 1024 + lane * 16, 16);
            }
        }
        let mut traffic = LaunchTraffic::new();
        trace.settle(&mut traffic);
        let sites = by_place(&traffic);
        let two = Traffic { requests: 2, units: 8, ideal: 8 };
        assert_eq!(sites, BTreeMap::from([(AccessSite { space: Space::Shared, place: String::new() }, two)]));
    }
}
