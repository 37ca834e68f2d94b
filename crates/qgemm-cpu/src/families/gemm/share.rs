//! Distribution of a launch over threads.
//!
//! Outputs are split into panels of tokens and blocks of
//! [`BLOCK_ROWS`] rows. A launch is distributed along one axis:
//! by tokens if there are panels for all threads and few
//! blocks; by rows if there are many blocks; by columns if
//! both are few and K is long.
//!
//! Every sum is added in the same order for every axis,
//! so the bits depend neither on the axis nor on the
//! number of threads: where K may be split, it always is,
//! and its parts are added one after the other ([`Parts`]).

use std::ops::Range;

use qgemm_formats::prepack::PackedLayout;
use qgemm_hal::CheckedGemm;
use rayon::prelude::*;

use crate::arena;
use crate::job::{Job, row_columns};
use crate::pool::Scratch;
use crate::simd::BLOCK_ROWS;

/// Blocks per thread from which on rows are distributed. Fewer would
/// leave some threads idle at the end.
const BLOCKS_A_THREAD: usize = 4;

/// A family's work on a panel and a block.
pub trait MainLoop: Sync {
    /// Floats of memory for X of `tokens` tokens.
    fn x_floats(&self, tokens: usize) -> usize;

    /// Floats of scratch memory that [`MainLoop::multiply`]
    /// needs for `tokens` tokens.
    fn tile_floats(&self, tokens: usize) -> usize;

    /// Converts or quantizes X of a panel; on all threads if
    /// `shared`, else on this one.
    fn load(&self, job: &Job<'_>, tokens: Range<usize>, shared: bool, x: &mut [f32]);

    /// Adds the products of a panel in `x` with the columns
    /// `k_tiles` of the row block at `first_row` to the accumulators.
    fn multiply(
        &self,
        job: &Job<'_>,
        x: &[f32],
        tokens: usize,
        first_row: usize,
        k_tiles: Range<usize>,
        sums: &mut [f32],
    );
}

/// Parts of K with separate accumulators, which are then added in
/// order. They depend only on N and K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// K-tiles of each part; the last may have fewer.
    each: usize,
    /// K-tiles in total.
    all: usize,
}

impl Parts {
    /// Minimum columns of a part.
    const COLUMNS: usize = 2048;
    /// Maximum parts times blocks. Beyond it, threads have enough work.
    const MOST: usize = 8;

    /// Parts for a weight with `layout`.
    pub fn new(op: &CheckedGemm, layout: &PackedLayout) -> Self {
        let (columns, blocks) = (row_columns(layout, op.stored_k), op.stored_rows.div_ceil(BLOCK_ROWS).max(1));
        let all = columns / layout.k_tile;
        let most = Self::MOST / blocks;
        if most < 2 || !Self::COLUMNS.is_multiple_of(layout.k_tile) {
            return Self { each: all.max(1), all };
        }
        // Doubled, so that steps, which are powers of
        // two, end where parts do.
        let mut each = Self::COLUMNS;
        while columns.div_ceil(each) > most {
            each *= 2;
        }
        Self { each: each / layout.k_tile, all }
    }

    /// Number of parts.
    pub fn count(&self) -> usize {
        self.all.div_ceil(self.each).max(1)
    }

    /// K-tiles of a part.
    pub fn k_tiles(&self, part: usize) -> Range<usize> {
        (part * self.each).min(self.all)..((part + 1) * self.each).min(self.all)
    }

    /// K-tiles of a step of `columns` columns, but
    /// no more than a part.
    pub fn step(&self, columns: usize, k_tile: usize) -> usize {
        (columns / k_tile).clamp(1, self.each)
    }
}

/// Decisions before a launch.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Threads. With 1, only the calling thread runs.
    pub threads: usize,
    /// Tokens of a panel.
    pub panel_tokens: usize,
    /// Parts of K.
    pub parts: Parts,
}

/// Axis along which threads share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    /// The calling thread does everything.
    None,
    /// Each thread loads and multiplies its own panels.
    Tokens,
    /// This many panels are loaded together, then multiplied block by block.
    Rows { panels: usize },
    /// One panel is loaded, and its blocks are
    /// multiplied part by part of K.
    Columns,
}

impl Share {
    fn axis(&self, op: &CheckedGemm) -> Axis {
        let (threads, panels, blocks) = (self.threads, self.panels(op), blocks(op));
        let even = |tasks: usize| tasks * 100 / tasks.next_multiple_of(threads);
        if threads == 1 {
            Axis::None
        } else if panels >= threads && blocks < BLOCKS_A_THREAD * threads && even(panels) >= even(blocks) {
            Axis::Tokens
        } else if panels * blocks < threads && self.parts.count() > 1 {
            Axis::Columns
        } else {
            Axis::Rows { panels: (2 * threads).div_ceil(blocks).min(panels) }
        }
    }

    fn panels(&self, op: &CheckedGemm) -> usize {
        op.m.div_ceil(self.panel_tokens)
    }

    /// Scratch memory of a launch.
    pub fn scratch(&self, op: &CheckedGemm, main_loop: &impl MainLoop) -> Scratch {
        let most = self.panel_tokens.min(op.m);
        let last = op.m - self.panels(op).saturating_sub(1) * most;
        let tile = main_loop.tile_floats(most).max(main_loop.tile_floats(last));
        let x_floats = main_loop.x_floats(most);
        let of_panel = most * BLOCK_ROWS;
        let sums = if self.parts.count() > 1 { 2 * of_panel } else { of_panel };
        let (caller, activations) = match self.axis(op) {
            Axis::None => (x_floats, 0),
            Axis::Tokens => (0, x_floats),
            Axis::Rows { panels } => (panels * x_floats, 0),
            Axis::Columns => (x_floats + blocks(op) * self.parts.count() * of_panel, 0),
        };
        Scratch { caller, activations, sums, tile }
    }
}

fn blocks(op: &CheckedGemm) -> usize {
    op.stored_rows.div_ceil(BLOCK_ROWS).max(1)
}

/// Computes all outputs of a job. Multi-threaded work runs within `enter`,
/// which calls its argument on a thread of the pool.
pub fn run(job: &Job<'_>, main_loop: &impl MainLoop, share: Share, enter: impl FnOnce(&mut (dyn FnMut() + Send))) {
    let launch = Launch { job, main_loop, share };
    let (op, panels) = (job.op(), share.panels(job.op()));
    let most = share.panel_tokens.min(op.m);
    let x_floats = main_loop.x_floats(most);
    match share.axis(op) {
        Axis::None => (0..panels).for_each(|panel| launch.panel(panel)),
        Axis::Tokens => enter(&mut || (0..panels).into_par_iter().for_each(|panel| launch.panel(panel))),
        Axis::Rows { panels: at_once } => arena::with_activations(at_once * x_floats, |x| {
            enter(&mut || {
                for first in (0..panels).step_by(at_once) {
                    launch.panels_by_rows(first..panels.min(first + at_once), x_floats, x);
                }
            });
        }),
        Axis::Columns => {
            let sums = blocks(op) * share.parts.count() * most * BLOCK_ROWS;
            arena::with_activations(x_floats + sums, |scratch| {
                let (x, sums) = scratch.split_at_mut(x_floats);
                enter(&mut || (0..panels).for_each(|panel| launch.panel_by_columns(panel, x, sums)));
            });
        }
    }
}

struct Launch<'a, L> {
    job: &'a Job<'a>,
    main_loop: &'a L,
    share: Share,
}

impl<L: MainLoop> Launch<'_, L> {
    fn tokens(&self, panel: usize) -> Range<usize> {
        let first = panel * self.share.panel_tokens;
        first..self.job.op().m.min(first + self.share.panel_tokens)
    }

    /// A whole panel, on this thread.
    fn panel(&self, panel: usize) {
        let tokens = self.tokens(panel);
        arena::with_activations(self.main_loop.x_floats(tokens.len()), |x| {
            self.main_loop.load(self.job, tokens.clone(), false, x);
            (0..blocks(self.job.op())).for_each(|block| self.block(x, tokens.clone(), block));
        });
    }

    /// Some panels, all loaded before their blocks are distributed.
    fn panels_by_rows(&self, panels: Range<usize>, x_floats: usize, x: &mut [f32]) {
        let x = &mut x[..panels.len() * x_floats];
        let of_panels = x.par_chunks_mut(x_floats).zip(panels.clone());
        of_panels.for_each(|(x, panel)| self.main_loop.load(self.job, self.tokens(panel), true, x));
        let (x, blocks) = (&*x, blocks(self.job.op()));
        (0..panels.len() * blocks).into_par_iter().for_each(|task| {
            let place = task / blocks;
            self.block(&x[place * x_floats..], self.tokens(panels.start + place), task % blocks);
        });
    }

    /// A panel whose blocks are split along K.
    fn panel_by_columns(&self, panel: usize, x: &mut [f32], sums: &mut [f32]) {
        let (tokens, parts) = (self.tokens(panel), self.share.parts);
        self.main_loop.load(self.job, tokens.clone(), true, x);
        let (x, of_part) = (&*x, tokens.len() * BLOCK_ROWS);
        let sums = &mut sums[..blocks(self.job.op()) * parts.count() * of_part];
        sums.par_chunks_mut(of_part).enumerate().for_each(|(i, sums)| {
            let (block, part) = (i / parts.count(), i % parts.count());
            self.part(x, tokens.len(), block, part, sums);
        });
        sums.par_chunks_mut(parts.count() * of_part).enumerate().for_each(|(block, sums)| {
            let (first, others) = sums.split_at_mut(of_part);
            others.chunks_exact(of_part).for_each(|part| add(first, part));
            self.store(tokens.clone(), block, first);
        });
    }

    /// A row block for a panel in `x`, on this thread.
    fn block(&self, x: &[f32], tokens: Range<usize>, block: usize) {
        let (parts, of_part) = (self.share.parts.count(), tokens.len() * BLOCK_ROWS);
        arena::with_sums(of_part * parts.min(2), |scratch| {
            let (sums, other) = scratch.split_at_mut(of_part);
            self.part(x, tokens.len(), block, 0, sums);
            for part in 1..parts {
                self.part(x, tokens.len(), block, part, other);
                add(sums, other);
            }
            self.store(tokens, block, sums);
        });
    }

    /// Accumulators of a part of K.
    fn part(&self, x: &[f32], tokens: usize, block: usize, part: usize, sums: &mut [f32]) {
        sums.fill(0.0);
        let k_tiles = self.share.parts.k_tiles(part);
        self.main_loop.multiply(self.job, x, tokens, block * BLOCK_ROWS, k_tiles, sums);
    }

    fn store(&self, tokens: Range<usize>, block: usize, sums: &mut [f32]) {
        // SAFETY: every panel's blocks are stored once, so only this
        // thread stores these outputs.
        unsafe { self.job.store(tokens, block * BLOCK_ROWS, sums) };
    }
}

fn add(sums: &mut [f32], others: &[f32]) {
    sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += *other);
}

#[cfg(test)]
mod tests {
    use qgemm_formats::prepack::FragmentLayout;
    use qgemm_formats::{DType, Format};
    use qgemm_hal::{Activation, Dense, XPrecision};

    use super::*;

    fn op(m: usize, n: usize, k: usize) -> CheckedGemm {
        CheckedGemm {
            m,
            stored_rows: n,
            out_features: n,
            gated: false,
            k,
            stored_k: k,
            format: "q8_0".parse().expect("a format"),
            class: FragmentLayout::Simd16,
            row_scale: false,
            k_order: false,
            weight_fits_f16: true,
            norm: None,
            x: Dense::rows_of(DType::F32, k).into(),
            x_precision: XPrecision::default(),
            d: Dense::rows_of(DType::F32, n),
            c: None,
            bias: None,
            token_scale: false,
            residual: None,
            segments: Vec::new(),
            residual_in_d: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            batch_invariant: false,
        }
    }

    fn parts(op: &CheckedGemm) -> Parts {
        Parts::new(op, &PackedLayout::new(op.format, op.class).expect("a layout"))
    }

    #[test]
    fn parts_cover_k_and_end_where_steps_do() {
        for format in Format::all() {
            for (n, k) in [(1, 256), (64, 4096), (64, 4352), (65, 16384), (64, 1 << 20), (256, 65536), (320, 65536)] {
                let op = CheckedGemm { format, ..op(1, n, k) };
                let layout = PackedLayout::new(format, op.class).expect("a layout");
                let parts = Parts::new(&op, &layout);
                let ranges: Vec<_> = (0..parts.count()).map(|part| parts.k_tiles(part)).collect();
                assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (0, layout.k_tiles(k)), "{format} {n} {k}");
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start && !pair[1].is_empty()));
                assert!(parts.count() * n.div_ceil(BLOCK_ROWS) <= Parts::MOST.max(n.div_ceil(BLOCK_ROWS)));
                if parts.count() > 1 {
                    let steps = [256, 512, 4096].map(|columns| parts.step(columns, layout.k_tile));
                    assert!(steps.iter().all(|step| ranges[0].len().is_multiple_of(*step)), "{format} {n} {k}");
                }
            }
        }
        let count = |n, k| parts(&op(1, n, k)).count();
        assert_eq!([count(64, 2048), count(64, 4096), count(64, 1 << 20), count(512, 1 << 20)], [1, 2, 8, 1]);
    }

    #[test]
    fn the_axis_suits_the_shape() {
        let axis = |m, n, k, threads, panel_tokens| {
            let op = op(m, n, k);
            Share { threads, panel_tokens, parts: parts(&op) }.axis(&op)
        };
        assert_eq!(axis(4096, 64, 4096, 1, 256), Axis::None);
        assert_eq!(axis(4096, 64, 4096, 2, 256), Axis::Tokens);
        assert_eq!(axis(300, 384, 384, 2, 156), Axis::Tokens);
        assert_eq!(axis(1, 64, 16384, 2, 1), Axis::Columns);
        assert_eq!(axis(1, 4096, 4096, 16, 1), Axis::Rows { panels: 1 });
        assert_eq!(axis(512, 4096, 4096, 2, 256), Axis::Rows { panels: 1 });
        // Three panels for two threads would leave one idle half of
        // the time; eight blocks do not.
        assert_eq!(axis(768, 448, 384, 2, 256), Axis::Rows { panels: 1 });
        // Neither panels nor blocks alone are enough.
        assert_eq!(axis(64, 384, 384, 16, 24), Axis::Rows { panels: 3 });
    }
}
