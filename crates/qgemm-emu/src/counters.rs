//! What a kernel asked of the memory system and the matrix units, against what it could not do without.
//!
//! Accesses of a warp's lanes belong to one instruction when they are the same use of the same atom for the same time
//! since the lanes last met: exact where lanes do the same, an estimate where they part ways.

use std::collections::{BTreeMap, HashMap};

use crate::fault::Site;

/// Sums over the launches of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Launches.
    pub launches: u64,
    /// Blocks.
    pub blocks: u64,
    /// Accesses to shared memory by warps.
    pub shared_requests: u64,
    /// Passes of shared memory's 32 banks that they take.
    pub shared_wavefronts: u64,
    /// Passes that as many different bytes need at least.
    pub shared_ideal: u64,
    /// Loads from and stores to global memory by warps.
    pub global_requests: u64,
    /// Sectors of 32 bytes that they touch.
    pub global_sectors: u64,
    /// Sectors that as many different bytes need at least.
    pub global_ideal: u64,
    /// Matrix instructions by atom.
    pub mma: BTreeMap<&'static str, u64>,
    /// Barriers of a block that filled.
    pub barriers: u64,
}

impl Counters {
    /// Adds those of further launches.
    pub fn add(&mut self, other: &Counters) {
        self.launches += other.launches;
        self.blocks += other.blocks;
        self.shared_requests += other.shared_requests;
        self.shared_wavefronts += other.shared_wavefronts;
        self.shared_ideal += other.shared_ideal;
        self.global_requests += other.global_requests;
        self.global_sectors += other.global_sectors;
        self.global_ideal += other.global_ideal;
        self.barriers += other.barriers;
        for (name, count) in &other.mma {
            *self.mma.entry(name).or_default() += count;
        }
    }
}

/// Banks of shared memory, each four bytes wide.
const BANKS: usize = 32;
const BANK_BYTES: u64 = 4;
/// Bytes that one pass of shared memory moves.
const WAVEFRONT_BYTES: u64 = BANKS as u64 * BANK_BYTES;
const SECTOR_BYTES: u64 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Shared,
    Global,
}

/// One instruction of a warp: the lanes' addresses.
#[derive(Clone, Debug)]
struct Request {
    bytes: u64,
    addresses: Vec<u64>,
}

/// Accesses of a warp since its lanes last met.
#[derive(Debug, Default)]
pub(crate) struct WarpTrace {
    /// Uses of each site so far, per lane.
    uses: HashMap<(Space, Site, usize), usize>,
    requests: HashMap<(Space, Site, usize), Request>,
}

impl WarpTrace {
    /// A lane's access.
    pub(crate) fn note(&mut self, space: Space, site: Site, lane: usize, address: usize, bytes: usize) {
        let uses = self.uses.entry((space, site, lane)).or_default();
        let key = (space, site, *uses);
        *uses += 1;
        let request = self.requests.entry(key);
        let request = request.or_insert_with(|| Request { bytes: bytes as u64, addresses: Vec::with_capacity(32) });
        request.addresses.push(address as u64);
    }

    /// The lanes have met: counts what they did since.
    pub(crate) fn settle(&mut self, counters: &mut Counters) {
        self.uses.clear();
        for ((space, ..), request) in self.requests.drain() {
            match space {
                Space::Shared => {
                    let (wavefronts, ideal) = request.wavefronts();
                    counters.shared_requests += 1;
                    counters.shared_wavefronts += wavefronts;
                    counters.shared_ideal += ideal;
                }
                Space::Global => {
                    let (sectors, ideal) = request.sectors();
                    counters.global_requests += 1;
                    counters.global_sectors += sectors;
                    counters.global_ideal += ideal;
                }
            }
        }
    }
}

impl Request {
    /// Passes of shared memory, and the least number of them. Accesses of 8 and 16 bytes a lane are served half a warp
    /// and a quarter of a warp at a time.
    fn wavefronts(&self) -> (u64, u64) {
        let lanes = (WAVEFRONT_BYTES / self.bytes.max(BANK_BYTES)) as usize;
        let mut total = 0;
        for part in self.addresses.chunks(lanes) {
            let mut words: Vec<u64> = part.iter().flat_map(|&a| words(a, self.bytes)).collect();
            words.sort_unstable();
            words.dedup();
            let mut load = [0u64; BANKS];
            words.iter().for_each(|word| load[(word % BANKS as u64) as usize] += 1);
            total += load.into_iter().max().unwrap_or(0);
        }
        let mut all: Vec<u64> = self.addresses.iter().flat_map(|&a| words(a, self.bytes)).collect();
        all.sort_unstable();
        all.dedup();
        // Lanes that read the same words still come a part of the warp at a time.
        let ideal = (all.len() as u64 * BANK_BYTES).div_ceil(WAVEFRONT_BYTES);
        (total, ideal.max(self.addresses.len().div_ceil(lanes) as u64).min(total))
    }

    /// Sectors of global memory, and the least number of them.
    fn sectors(&self) -> (u64, u64) {
        let mut sectors: Vec<u64> =
            self.addresses.iter().flat_map(|&a| a / SECTOR_BYTES..=(a + self.bytes - 1) / SECTOR_BYTES).collect();
        sectors.sort_unstable();
        sectors.dedup();
        let mut starts = self.addresses.clone();
        starts.sort_unstable();
        starts.dedup();
        (sectors.len() as u64, (starts.len() as u64 * self.bytes).div_ceil(SECTOR_BYTES))
    }
}

fn words(address: u64, bytes: u64) -> std::ops::RangeInclusive<u64> {
    address / BANK_BYTES..=(address + bytes - 1) / BANK_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(bytes: u64, address: impl Fn(u64) -> u64) -> Request {
        Request { bytes, addresses: (0..32).map(address).collect() }
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
        for lane in 0..32 {
            for round in 0..2 {
                trace.note(Space::Shared, Site::NONE, lane, round * 1024 + lane * 4, 4);
            }
        }
        let mut counters = Counters::default();
        trace.settle(&mut counters);
        assert_eq!((counters.shared_requests, counters.shared_wavefronts, counters.shared_ideal), (2, 2, 2));
    }
}
