//! A launch: runs its CTAs one after another, in an
//! order given by a seed.

use std::cell::RefCell;
use std::ffi::c_void;

use super::block::{self, Block, Start};
use super::callbacks::{self, Place};
use super::global::{GlobalMemory, Region};
use super::shared::SharedMemory;
use crate::counters::{self, KernelCounters, LaunchTraffic};
use crate::fault::Fault;
use crate::model::Precision;

/// The kernel to run and its operands.
pub(crate) struct Launch<'a> {
    pub run: unsafe extern "C" fn(*const c_void),
    pub params: &'a [u8],
    pub blocks: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    pub starts_early: bool,
    pub regions: &'a [Region],
    /// Seed of the CTA order.
    pub seed: u64,
    /// Whether memory accesses are counted.
    pub counting: bool,
    pub precision: Precision,
}

/// State shared by the CTAs of a launch.
pub(super) struct Grid {
    pub threads: u32,
    pub memory: GlobalMemory,
    pub shared: SharedMemory,
    pub counters: KernelCounters,
    pub traffic: LaunchTraffic,
    pub counting: bool,
    pub precision: Precision,
    pub place: Place,
    /// Highest clock of the CTAs so far.
    pub last_clock: u32,
}

thread_local! {
    /// Shared memories kept between launches, because their history is large.
    static SHARED: RefCell<Vec<SharedMemory>> = const { RefCell::new(Vec::new()) };
}

/// Runs a launch to its end or its first fault.
///
/// # Errors
/// The fault; or a system error when stacks cannot be allocated.
///
/// # Safety
/// `launch.run` must be a kernel with the parameter `launch.params`.
/// `launch.regions` must be memory that nothing else uses meanwhile, except
/// for reading what the launch only reads.
pub(crate) unsafe fn run(launch: &Launch<'_>) -> std::io::Result<Result<KernelCounters, Fault>> {
    let mut shared = SHARED.with_borrow_mut(Vec::pop).unwrap_or_else(SharedMemory::new);
    shared.reset(launch.shared_bytes as usize);
    let mut grid = Grid {
        threads: launch.threads,
        memory: GlobalMemory::new(launch.regions, launch.starts_early),
        place: Place {
            thread: 0,
            threads: launch.threads,
            block: [0; 3],
            blocks: launch.blocks,
            shared: shared.base().as_ptr(),
        },
        shared,
        counters: KernelCounters { launches: 1, ..KernelCounters::default() },
        traffic: LaunchTraffic::new(),
        counting: launch.counting,
        precision: launch.precision,
        last_clock: 0,
    };
    let params = AlignedParams::new(launch.params);
    let start = Start { run: launch.run, params: params.0.as_ptr().cast() };
    let mut outcome = Ok(());
    for number in order(launch.blocks.iter().map(|&b| u64::from(b)).product(), launch.seed) {
        let [x, y, _] = launch.blocks.map(u64::from);
        let index = [(number % x) as u32, (number / x % y) as u32, (number / x / y) as u32];
        grid.place.block = index;
        let mut block = Block::new(&mut grid, number as u32, index);
        // SAFETY: by the contract of this function. The CTA lives
        // until the end of the statement.
        unsafe { callbacks::with_current(&mut block, |block| block::run(block, start))? };
        let (last_clock, fault) = (block.clocks.highest(), block.fault.take());
        for warp in 0..block.warps.len() {
            block.settle(warp);
        }
        grid.last_clock = last_clock;
        grid.counters.blocks += 1;
        if let Some(fault) = fault {
            outcome = Err(fault);
            break;
        }
    }
    let Grid { shared, mut counters, traffic, .. } = grid;
    counters.sites = counters::by_place(&traffic);
    SHARED.with_borrow_mut(|free| free.push(shared));
    Ok(outcome.map(|()| counters))
}

/// Aligned storage for the parameter: tensor
/// maps in it need 64 bytes.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

struct AlignedParams(Vec<Line>);

impl AlignedParams {
    fn new(params: &[u8]) -> Self {
        let line = |chunk: &[u8]| {
            let mut line = Line([0; 64]);
            line.0[..chunk.len()].copy_from_slice(chunk);
            line
        };
        Self(params.chunks(64).map(line).collect())
    }
}

/// The numbers below `count`, shuffled by the
/// seed; in order for seed 0.
fn order(count: u64, seed: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    let mut state = seed;
    if seed != 0 {
        for i in (1..numbers.len()).rev() {
            // SplitMix64 (Steele, Lea, Flood 2014).
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            numbers.swap(i, ((z ^ (z >> 31)) % (i as u64 + 1)) as usize);
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_seed_runs_every_block_once() {
        assert_eq!(order(4, 0), [0, 1, 2, 3]);
        for seed in 1..20 {
            let mut numbers = order(100, seed);
            assert_ne!(numbers, order(100, seed + 1));
            numbers.sort_unstable();
            assert_eq!(numbers, order(100, 0));
        }
    }
}
