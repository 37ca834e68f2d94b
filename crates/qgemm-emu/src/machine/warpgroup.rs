//! `wgmma`: asynchronous matrix instructions. Accumulators are
//! NaN until the wait, and shared memory is read at the
//! wait, later than on any hardware.

use std::collections::VecDeque;

use super::block::Block;
use super::shared::{NO_NUMBER, Refused};
use super::tensor_copy::Swizzle;
use crate::fault::{FaultKind, Site};
use crate::model::{NO_WORDS, WgmmaOperands};

/// Rows of one warp, columns of the `mma` model in use,
/// and K elements: 16-bit values, pairs of 8-bit values,
/// or halves of 32-bit values.
const ROWS: usize = 16;
const COLUMNS: usize = 8;
const K: usize = 16;
/// Accumulators of a lane for eight columns.
const PART: usize = 4;
/// Contents of accumulators before the wait.
const POISON: f32 = f32::NAN;

/// One lane's share of an instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneShare {
    /// Address of its accumulators.
    pub d: usize,
    /// Address and contents of its operands; `None`
    /// when A is in shared memory.
    pub a: Option<(usize, [u32; 4])>,
}

impl LaneShare {
    /// Whether the operands are unchanged.
    ///
    /// # Safety
    /// As [`Block::issue`].
    unsafe fn is_intact(&self) -> bool {
        self.a.is_none_or(|(address, before)| {
            let a = std::ptr::with_exposed_provenance::<[u32; 4]>(address);
            // SAFETY: by the contract of this function.
            unsafe { a.read_volatile() == before }
        })
    }
}

/// Operation of a `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wgmma {
    /// Accumulators of a lane.
    pub accumulators: usize,
    /// A in shared memory; `None` for A in registers.
    pub a: Option<Factor>,
    /// B in shared memory.
    pub b: Factor,
    /// Operand types.
    pub operands: WgmmaOperands,
    /// Whether it adds to the accumulators; otherwise they start at zero.
    pub adds: bool,
}

/// An instruction of one warp.
#[derive(Clone, Debug)]
struct Instruction {
    lanes: Vec<LaneShare>,
    what: Wgmma,
    site: Site,
}

/// Accumulators of a warp that are written by instructions in flight.
#[derive(Clone, Debug)]
struct Pending {
    /// Address of each lane's accumulators, which identifies them.
    d: Vec<usize>,
    /// Values of each lane so far.
    values: Vec<Vec<f32>>,
    instructions: usize,
}

/// Instructions of a warp.
#[derive(Debug, Default)]
pub(super) struct WarpInstructions {
    /// Whether there was a `wgmma.fence` since the last wait.
    fenced: bool,
    open: Vec<Instruction>,
    groups: VecDeque<Vec<Instruction>>,
    pending: Vec<Pending>,
    issued: u64,
}

/// An operand in shared memory, as an instruction describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Factor {
    /// PTX ISA, "Matrix Descriptor Format".
    pub descriptor: u64,
    /// MN-major: values along the outer index (rows of A, columns of
    /// B) are contiguous, instead of K.
    pub is_mn_major: bool,
}

/// Decoded location of an operand in shared memory.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    start: usize,
    /// MN-major: bytes between groups of 64 values of the outer index.
    leading: usize,
    /// Bytes between groups of eight of the outer index; MN-major:
    /// between groups of eight of K.
    stride: usize,
    /// K-major: bytes between values of the outer index.
    pitch: usize,
    swizzle: Swizzle,
    is_mn_major: bool,
}

impl Factor {
    fn decode(self) -> Result<Matrix, Refused> {
        let Self { descriptor, is_mn_major } = self;
        let (swizzle, pitch) = match descriptor >> 62 {
            1 => (Swizzle::Bytes128, 128),
            2 if !is_mn_major => (Swizzle::Bytes64, 64),
            _ => {
                let detail = "a wgmma descriptor without the 128-byte swizzle, or K-major the 64-byte one".to_owned();
                return Err((FaultKind::BadOperand, detail));
            }
        };
        let field = |shift: u32| (descriptor >> shift & 0x3fff) as usize * 16;
        Ok(Matrix { start: field(0), leading: field(16), stride: field(32), pitch, swizzle, is_mn_major })
    }
}

impl Matrix {
    /// Offset of the 16-byte unit that starts with a value: eight
    /// along K, or MN-major eight along the outer index.
    fn unit(&self, outer: usize, k: usize) -> usize {
        let place = match self.is_mn_major {
            false => outer / 8 * self.stride + outer % 8 * self.pitch + k * 2,
            true => outer / 64 * self.leading + outer % 64 * 2 + k / 8 * self.stride + k % 8 * 128,
        };
        self.swizzle.apply(self.start + place)
    }
}

/// Words of A for a warp's lanes, and of B
/// `[column][k pair]`.
type Factors = (Vec<[u32; 4]>, Vec<[u32; K / 2]>);

impl Block<'_> {
    /// `wgmma.fence` of the running thread's warp.
    pub(super) fn fence_warpgroup(&mut self) {
        self.instructions[self.current / 32].fenced = true;
    }

    /// All lanes of a warp have issued an instruction.
    ///
    /// # Safety
    /// Each lane's `d` must be the address of as many floats
    /// as it has accumulators, and `a` that of its operands. They
    /// stay in place until they are waited for.
    pub(super) unsafe fn issue(&mut self, lanes: Vec<LaneShare>, what: Wgmma, site: Site) -> Result<(), Refused> {
        let warp = self.current / 32;
        if !self.instructions[warp].fenced {
            let detail = "wgmma without wgmma.fence since its registers were last waited for".to_owned();
            return Err((FaultKind::BadOperand, detail));
        }
        let instruction = Instruction { lanes, what, site };
        // The inputs must be readable already now.
        self.factors(&instruction)?;
        let state = &mut self.instructions[warp];
        let d: Vec<usize> = instruction.lanes.iter().map(|lane| lane.d).collect();
        match state.pending.iter_mut().find(|p| p.d == d) {
            Some(pending) => pending.instructions += 1,
            None => {
                let take = |&address: &usize| -> Vec<f32> {
                    // SAFETY: by the contract of this function.
                    let floats = unsafe {
                        let start = std::ptr::with_exposed_provenance_mut::<f32>(address);
                        std::slice::from_raw_parts_mut(start, what.accumulators)
                    };
                    let values = floats.to_vec();
                    floats.fill(POISON);
                    values
                };
                let values = d.iter().map(take).collect();
                state.pending.push(Pending { d, values, instructions: 1 });
            }
        }
        state.issued += 1;
        state.open.push(instruction);
        *self.grid.counters.mma.entry("wgmma").or_default() += 1;
        Ok(())
    }

    /// `wgmma.commit_group` for the warp, when its last lane arrives.
    pub(super) fn commit_warpgroup(&mut self) {
        // Every lane calls it; the first one makes the group. Lanes
        // do not run ahead of each other's instructions.
        let state = &mut self.instructions[self.current / 32];
        if !state.open.is_empty() {
            let group = std::mem::take(&mut state.open);
            state.groups.push_back(group);
        }
    }

    /// `wgmma.wait_group`: leaves at most `pending`
    /// groups of the warp in flight.
    pub(super) fn wait_warpgroup(&mut self, pending: usize) -> Result<(), Refused> {
        let warp = self.current / 32;
        while self.instructions[warp].groups.len() > pending {
            let Some(group) = self.instructions[warp].groups.pop_front() else { break };
            for instruction in &group {
                self.execute(instruction)?;
            }
        }
        if pending == 0 {
            self.instructions[warp].fenced = false;
        }
        Ok(())
    }

    /// The operand words of an instruction, checked for
    /// every warp that starts it.
    fn factors(&mut self, instruction: &Instruction) -> Result<Factors, Refused> {
        let b = self.words(instruction.what.b, 0, instruction.what.accumulators / PART * COLUMNS)?;
        let Some(a) = instruction.what.a else {
            let of_lane = |share: &LaneShare| share.a.map_or([0; 4], |(_, words)| words);
            return Ok((instruction.lanes.iter().map(of_lane).collect(), b));
        };
        let rows = self.words(a, self.current / 32 % 4 * ROWS, ROWS)?;
        let of_lane = |lane: usize| {
            let (row, pair) = (lane / 4, lane % 4);
            [rows[row][pair], rows[row + 8][pair], rows[row][pair + 4], rows[row + 8][pair + 4]]
        };
        Ok(((0..instruction.lanes.len()).map(of_lane).collect(), b))
    }

    /// Words of `count` outer indices of an operand from `first` on,
    /// a multiple of eight: `[outer][k pair]`. Unwritten values
    /// become NaN: they only affect the sums of their row or
    /// column, which a kernel may ignore.
    fn words(&mut self, factor: Factor, first: usize, count: usize) -> Result<Vec<[u32; K / 2]>, Refused> {
        let matrix = factor.decode()?;
        let mut values = vec![[0u16; K]; count];
        for outer in (0..count).step_by(8) {
            // The 16 units of eight by sixteen values,
            // and the values of each.
            for unit in 0..K {
                let (of_outer, k) = if matrix.is_mn_major { (0, unit) } else { (unit % 8, unit / 8 * 8) };
                let bytes = self.unit(matrix.unit(first + outer + of_outer, k))?;
                for (i, value) in bytes.into_iter().enumerate() {
                    match matrix.is_mn_major {
                        true => values[outer + i][k] = value,
                        false => values[outer + of_outer][k + i] = value,
                    }
                }
            }
        }
        let pair = |values: &[u16]| u32::from(values[0]) | u32::from(values[1]) << 16;
        Ok(values.iter().map(|row| std::array::from_fn(|i| pair(&row[2 * i..]))).collect())
    }

    /// Eight values from shared memory, checked for the running thread's warp.
    fn unit(&mut self, offset: usize) -> Result<[u16; 8], Refused> {
        let thread = self.current;
        let address = self.grid.shared.base().as_ptr().addr() + offset;
        self.grid.shared.offset(address, 16, "wgmma reads")?;
        match self.grid.shared.read(offset, 16, thread, &self.clocks) {
            Err((FaultKind::Unwritten, _)) => return Ok([NO_NUMBER; 8]),
            result => result?,
        }
        self.grid.shared.check_proxy(offset, 16, &self.clocks)?;
        let bytes = self.grid.shared.get(offset, 16);
        Ok(std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
    }

    /// Computes eight columns at a time like the 16-row `mma`, whose
    /// A and D fragments are the same.
    fn execute(&mut self, instruction: &Instruction) -> Result<(), Refused> {
        // SAFETY: by the contract of `issue`: nobody has
        // waited for it before.
        if let Some(lane) = instruction.lanes.iter().position(|share| !unsafe { share.is_intact() }) {
            let site = instruction.site.text();
            let detail = format!("lane {lane} has changed operands of the wgmma at {site} before this wait for it");
            return Err((FaultKind::BadOperand, detail));
        }
        let (a, words) = self.factors(instruction)?;
        let Wgmma { accumulators, operands, adds, .. } = instruction.what;
        let precision = self.grid.precision;
        let state = &mut self.instructions[self.current / 32];
        let Some(at) = state.pending.iter().position(|p| p.d.iter().eq(instruction.lanes.iter().map(|l| &l.d))) else {
            return Ok(());
        };
        let pending = &mut state.pending[at];
        for part in 0..accumulators / PART {
            let (mut inputs, mut outputs) = (NO_WORDS, NO_WORDS);
            for (lane, a) in a.iter().enumerate() {
                let column = &words[part * COLUMNS + lane / 4];
                inputs[lane][..4].copy_from_slice(a);
                inputs[lane][4..6].copy_from_slice(&[column[lane % 4], column[lane % 4 + 4]]);
                for i in 0..PART {
                    let value = if adds { pending.values[lane][part * PART + i] } else { 0.0 };
                    inputs[lane][6 + i] = value.to_bits();
                }
            }
            operands.multiply(&inputs, &mut outputs, &precision);
            for (values, words) in pending.values.iter_mut().zip(&outputs) {
                for i in 0..PART {
                    values[part * PART + i] = f32::from_bits(words[i]);
                }
            }
        }
        pending.instructions -= 1;
        if pending.instructions == 0 {
            let done = state.pending.swap_remove(at);
            for (&address, values) in done.d.iter().zip(&done.values) {
                // SAFETY: by the contract of `issue`: nobody moves
                // them before this wait.
                unsafe {
                    let start = std::ptr::with_exposed_provenance_mut::<f32>(address);
                    start.copy_from_nonoverlapping(values.as_ptr(), values.len());
                }
            }
        }
        Ok(())
    }

    /// At the end of the CTA: checks that every four warps
    /// have issued the same instructions.
    pub(super) fn check_warpgroups(&self) -> Result<(), (Refused, usize)> {
        for (group, warps) in self.instructions.chunks(4).enumerate() {
            if warps.iter().any(|w| w.issued != warps[0].issued) || (warps.len() < 4 && warps[0].issued > 0) {
                let issued: Vec<u64> = warps.iter().map(|w| w.issued).collect();
                let detail = format!("warps of warpgroup {group} issued {issued:?} wgmma instructions");
                return Err(((FaultKind::Divergence, detail), group * 128));
            }
            if let Some(warp) = warps.iter().position(|w| !w.pending.is_empty()) {
                let site = warps[warp].open.first().or(warps[warp].groups.front().and_then(|g| g.first()));
                let at = site.map_or_else(String::new, |i| format!(" ({})", i.site.text()));
                let detail = format!("warp {warp} of warpgroup {group} ends before its wgmma is waited for{at}");
                return Err(((FaultKind::InFlight, detail), group * 128 + warp * 32));
            }
        }
        Ok(())
    }
}
