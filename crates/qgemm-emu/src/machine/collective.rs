//! Warp collectives: lanes deposit their registers, and the
//! last lane computes for all.

use super::block::{Block, Wait};
use super::clock::Knowledge;
use super::shared::{NO_NUMBER, Refused};
use super::warpgroup::{LaneShare, Wgmma};
use crate::counters::Doing;
use crate::fault::{FaultKind, Site};
use crate::model::{COLLECTIVES, Class, MAX_WORDS, WarpWords};

/// The collective that lanes meet for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// An operation on registers: its index in [`COLLECTIVES`].
    Registers(usize),
    /// `ldmatrix`.
    LoadMatrices {
        /// Number of matrices: one, two or four.
        count: usize,
        transposed: bool,
    },
    /// `stmatrix`.
    StoreMatrices {
        /// Number of matrices: one, two or four.
        count: usize,
        transposed: bool,
    },
    /// This warp's share of a `wgmma`.
    Warpgroup(Wgmma),
}

impl Meeting {
    fn name(self) -> String {
        match self {
            Meeting::Registers(op) => COLLECTIVES.get(op).map_or_else(|| format!("operation {op}"), |c| c.name.into()),
            Meeting::LoadMatrices { count, transposed } => {
                format!("ldmatrix_x{count}{}", if transposed { "_trans" } else { "" })
            }
            Meeting::StoreMatrices { count, transposed } => {
                format!("stmatrix_x{count}{}", if transposed { "_trans" } else { "" })
            }
            Meeting::Warpgroup(Wgmma { accumulators, a, b, .. }) => {
                format!("wgmma with {} columns, A in {a:x?} and B in {b:x?}", accumulators * 2)
            }
        }
    }
}

/// A warp with some lanes at a collective.
pub(super) struct Warp {
    lanes: usize,
    arrived: u32,
    meetings: [Option<(Meeting, Site)>; 32],
    inputs: WarpWords,
    outputs: WarpWords,
    /// Row addresses for `ldmatrix` and `stmatrix`.
    rows: [usize; 32],
    /// Lane shares for `wgmma`.
    shares: [LaneShare; 32],
}

impl Warp {
    pub(super) fn new(lanes: usize) -> Self {
        Self {
            lanes,
            arrived: 0,
            meetings: [None; 32],
            inputs: [[0; MAX_WORDS]; 32],
            outputs: [[0; MAX_WORDS]; 32],
            rows: [0; 32],
            shares: [LaneShare { d: 0, a: None }; 32],
        }
    }

    /// Location where some lanes wait for the others, if any.
    pub(super) fn partial_site(&self) -> Option<Site> {
        self.meetings.iter().flatten().map(|&(_, site)| site).next()
    }
}

impl Block<'_> {
    /// The running lane deposits its registers. Returns whether
    /// it must wait for other lanes.
    pub(super) fn meet_lanes(&mut self, meeting: Meeting, words: &[u32], site: Site) -> Result<bool, Refused> {
        let (warp, lane) = (self.current / 32, self.current % 32);
        if let Meeting::Registers(op) = meeting {
            let expected = COLLECTIVES.get(op).map_or(0, |c| c.inputs);
            if words.len() != expected {
                let detail = format!("{} takes {expected} words, not {}", meeting.name(), words.len());
                return Err((FaultKind::BadOperand, detail));
            }
        }
        let state = &mut self.warps[warp];
        state.inputs[lane][..words.len()].copy_from_slice(words);
        self.come(meeting, site)
    }

    /// The running lane deposits a matrix row address, and
    /// for stores its registers.
    pub(super) fn meet_for_matrices(
        &mut self,
        meeting: Meeting,
        registers: &[u32],
        row: usize,
        site: Site,
    ) -> Result<bool, Refused> {
        let (state, lane) = (&mut self.warps[self.current / 32], self.current % 32);
        state.inputs[lane][..registers.len()].copy_from_slice(registers);
        state.rows[lane] = row;
        self.come(meeting, site)
    }

    /// The running lane deposits its share of a `wgmma`.
    ///
    /// # Safety
    /// As [`Block::issue`].
    pub(super) unsafe fn meet_for_wgmma(
        &mut self,
        meeting: Meeting,
        share: LaneShare,
        site: Site,
    ) -> Result<bool, Refused> {
        self.warps[self.current / 32].shares[self.current % 32] = share;
        self.come(meeting, site)
    }

    fn come(&mut self, meeting: Meeting, site: Site) -> Result<bool, Refused> {
        let (warp, lane) = (self.current / 32, self.current % 32);
        let state = &mut self.warps[warp];
        state.meetings[lane] = Some((meeting, site));
        state.arrived += 1;
        if (state.arrived as usize) < state.lanes {
            self.threads[self.current].wait = Wait::Lanes;
            self.threads[self.current].site = site;
            return Ok(true);
        }
        self.check_agreement(warp, meeting, site)?;
        match meeting {
            Meeting::Registers(op) => {
                let collective = &COLLECTIVES[op];
                let state = &mut self.warps[warp];
                (collective.run)(&state.inputs, &mut state.outputs, &self.grid.precision);
                if matches!(collective.class, Class::FloatMma | Class::IntegerMma) {
                    *self.grid.counters.mma.entry(collective.name).or_default() += 1;
                }
            }
            Meeting::LoadMatrices { count, transposed } => self.load_matrices(warp, count, transposed, site)?,
            Meeting::StoreMatrices { count, transposed } => self.store_matrices(warp, count, transposed, site)?,
            Meeting::Warpgroup(what) => {
                let state = &self.warps[warp];
                let lanes = state.shares[..state.lanes].to_vec();
                // SAFETY: lanes meet here through `meet_for_wgmma` only,
                // whose contract is the same.
                unsafe { self.issue(lanes, what, site)? }
            }
        }
        if matches!(meeting, Meeting::Registers(op) if COLLECTIVES[op].class == Class::Barrier) {
            // Only `bar.warp.sync` orders memory.
            let lanes: Vec<usize> = (warp * 32..warp * 32 + self.warps[warp].lanes).collect();
            self.clocks.meet(&lanes, &Knowledge::default());
        }
        self.settle(warp);
        let state = &mut self.warps[warp];
        state.arrived = 0;
        state.meetings = [None; 32];
        let (first, lanes, caller) = (warp * 32, state.lanes, self.current);
        for other in (first..first + lanes).filter(|&t| t != caller) {
            self.wake(other);
        }
        Ok(false)
    }

    /// Checks that all lanes are at the same collective.
    fn check_agreement(&self, warp: usize, meeting: Meeting, site: Site) -> Result<(), Refused> {
        let state = &self.warps[warp];
        for (lane, there) in state.meetings[..state.lanes].iter().enumerate() {
            if *there == Some((meeting, site)) {
                continue;
            }
            let there = there.map_or_else(String::new, |(m, s)| format!("{} at {}", m.name(), s.text()));
            let detail = format!("lane {lane} is in {there}, this one in {}", meeting.name());
            return Err((FaultKind::Divergence, detail));
        }
        Ok(())
    }

    /// Result of the collective for the running lane.
    pub(super) fn result(&self, words: usize) -> &[u32] {
        &self.warps[self.current / 32].outputs[self.current % 32][..words]
    }

    /// `ldmatrix`: matrix i has its rows at the addresses of lanes
    /// 8 i to 8 i + 7. Lane l gets the
    /// two elements of row l / 4 from column 2 (l
    /// % 4) on, or of the transposed matrix (PTX ISA, "ldmatrix").
    /// An unwritten row becomes NaN: it only affects sums of that
    /// row's token, which a kernel may ignore.
    fn load_matrices(&mut self, warp: usize, count: usize, transposed: bool, site: Site) -> Result<(), Refused> {
        let caller = self.current;
        for matrix in 0..count {
            let mut rows = [[0u16; 8]; 8];
            for (r, row) in rows.iter_mut().enumerate() {
                let lane = matrix * 8 + r;
                let address = self.warps[warp].rows[lane];
                self.current = warp * 32 + lane;
                let offset = self.grid.shared.offset(address, 16, "ldmatrix reads")?;
                self.note_shared(Doing::MovesRows, site, self.current, offset, 16);
                match self.grid.shared.read(offset, 16, self.current, &self.clocks) {
                    Err((FaultKind::Unwritten, _)) => {
                        row.fill(NO_NUMBER);
                        continue;
                    }
                    result => result?,
                }
                let bytes = self.grid.shared.get(offset, 16);
                for (element, pair) in row.iter_mut().zip(bytes.chunks_exact(2)) {
                    *element = u16::from_le_bytes([pair[0], pair[1]]);
                }
            }
            for lane in 0..32 {
                let [low, high] = pair_of(lane, transposed).map(|(row, column)| rows[row][column]);
                self.warps[warp].outputs[lane][matrix] = u32::from(low) | u32::from(high) << 16;
            }
        }
        self.current = caller;
        Ok(())
    }

    /// `stmatrix`: stores the registers that `ldmatrix` would load from
    /// the same addresses (PTX ISA, "stmatrix"). The lane that provides
    /// a row's address writes the row.
    fn store_matrices(&mut self, warp: usize, count: usize, transposed: bool, site: Site) -> Result<(), Refused> {
        let caller = self.current;
        for matrix in 0..count {
            let mut rows = [[0u16; 8]; 8];
            for lane in 0..32 {
                let pair = self.warps[warp].inputs[lane][matrix];
                let [low, high] = pair_of(lane, transposed);
                rows[low.0][low.1] = pair as u16;
                rows[high.0][high.1] = (pair >> 16) as u16;
            }
            for (r, row) in rows.iter().enumerate() {
                let lane = matrix * 8 + r;
                let address = self.warps[warp].rows[lane];
                self.current = warp * 32 + lane;
                let offset = self.grid.shared.offset(address, 16, "stmatrix writes")?;
                self.grid.shared.write(offset, 16, self.current, &self.clocks)?;
                self.note_shared(Doing::MovesRows, site, self.current, offset, 16);
                self.grid.shared.set(offset, row.map(u16::to_le_bytes).as_flattened());
            }
        }
        self.current = caller;
        Ok(())
    }
}

/// Row and column of the two elements in a lane's register.
fn pair_of(lane: usize, transposed: bool) -> [(usize, usize); 2] {
    let (row, column) = (lane / 4, lane % 4 * 2);
    [(row, column), (row, column + 1)].map(|(row, column)| if transposed { (column, row) } else { (row, column) })
}
