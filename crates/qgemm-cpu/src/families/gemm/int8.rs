//! `gemm_int8`: any number of tokens in INT8. A panel is
//! quantized once and shared. Each thread multiplies its packed
//! rows of W with the whole panel, some k-tiles at a
//! time while they are in the L1 cache. For many tokens,
//! it first unpacks their codes.

use std::ops::Range;

use qgemm_formats::{ScaleType, XCode, XFactor, XFormat};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Family, HalError, LaunchPlan, LaunchSequence, Math, Name, TileConfig, Unsupported,
};

use super::share::{MainLoop, Parts};
use super::{CpuGemm, Traits, check_supported, configs, unavailable};
use crate::arena;
use crate::job::Job;
use crate::simd::{BLOCK_ROWS, LANES, Operands, Prefetch, Quantization, Simd, TILES, Tile};
use crate::source_hash::SOURCE_HASH;

/// Tokens of a panel. Enough that unpacking a weight costs little;
/// few enough that the panel stays in the L2 cache. The
/// smaller panel suits small caches, which measuring finds out.
const PANEL_TOKENS: [usize; 2] = [256, 32];

/// Columns of a step, at least a k-tile. Scales are unpacked
/// and kernels called once per step.
const STEP: usize = 256;

/// Columns of a step when one group of tokens is multiplied
/// directly with packed codes. Its kernel unpacks scales itself, so
/// that memory is read in order.
const LONG_STEP: usize = 4096;

/// Columns of a step with two token groups, which read codes
/// and scales from the L1 cache.
const TWO_GROUPS_STEP: usize = 512;

/// Prefetch distance in bytes of packed codes. Shorter distances are
/// slower, and longer ones no faster.
const PREFETCH_BYTES: usize = 7 << 10;

/// Maximum tokens for products directly with packed codes, as two groups.
/// The second group decodes codes again, which are in the L1
/// cache by then; this is faster than unpacking.
const PACKED_TOKENS: usize = 8;

/// The family `gemm_int8`.
pub static GEMM_INT8: GemmInt8Family = GemmInt8Family;

/// Any number of tokens, for integer weights and X that may
/// be quantized. Few tokens are bound by reading weights.
#[derive(Debug)]
pub struct GemmInt8Family;

impl Family<CheckedGemm> for GemmInt8Family {
    fn name(&self) -> &'static str {
        "gemm_int8"
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        check_supported(op)?;
        let offer = |x_format| {
            let (family, main_loop, math) = ("gemm_int8", Name::new("simd16_int8"), Math::DotI8);
            configs(Traits { family, main_loop, math, x_format, panels: PANEL_TOKENS }, op, info)
        };
        if op.x.planes.is_some() {
            let why = || format!("multiplies codes of {} by those of no weights in {}", op.x.format, op.format);
            return given(op).map(|_| offer(op.x.format)).ok_or_else(|| Unsupported::new(why()));
        }
        op.plain_x()?;
        if !op.x_precision.allows_q8() {
            return Err(Unsupported::new("quantizes activations, which the problem does not allow"));
        }
        Quantization::new(op.format, op.format.activation_block()).ok_or_else(|| {
            Unsupported::new(format!("multiplies integers of eight bits, which {} does not hold", op.format))
        })?;
        Ok(offer(op.format.activation_format()))
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        let how = quantization(device, op, &plan.config)?;
        CpuGemm::prepare(device, op, plan, Some(how))
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        SOURCE_HASH
    }
}

/// Quantization of X by a kernel of `config`.
pub(super) fn quantization(
    device: &dyn Device,
    op: &CheckedGemm,
    config: &TileConfig,
) -> Result<Quantization, HalError> {
    let x_format = config.x_format;
    let how = match x_format {
        _ if op.x.planes.is_some() => given(op),
        XFormat::Q8_0 | XFormat::Q8_256 => Quantization::new(op.format, op.format.activation_block()),
        _ => None,
    };
    let why = || format!("has no products of {} with X in {x_format}", op.format);
    how.ok_or_else(|| unavailable(device, op, config.family, why()))
}

/// Quantization of a given INT8 X, with blocks that share a
/// scale. `None` when X is not INT8, or is permuted.
fn given(op: &CheckedGemm) -> Option<Quantization> {
    let parts = op.x.planes.as_ref().map(|planes| planes.parts)?;
    if parts.code != XCode::Int8 || parts.scale != Some(ScaleType::F32) || parts.factor != XFactor::None || op.k_order {
        return None;
    }
    let is_of_scale = |block: &usize| parts.block.is_none_or(|columns| columns.is_multiple_of(*block));
    let blocks = std::iter::once(op.format.activation_block()).chain(Quantization::BLOCKS).filter(is_of_scale);
    { blocks }.find_map(|block| Quantization::new(op.format, block))
}

/// The family's main loop.
#[derive(Debug)]
pub(super) struct Int8 {
    /// Quantization of tokens.
    pub how: Quantization,
    /// Columns of a row of X, and of a k-tile.
    pub columns: usize,
    pub k_tile: usize,
    /// K boundaries of the steps.
    pub parts: Parts,
    /// The SIMD kernels.
    pub simd: &'static Simd,
}

impl MainLoop for Int8 {
    fn x_floats(&self, tokens: usize) -> usize {
        tokens * self.how.row(self.columns).words
    }

    fn tile_floats(&self, tokens: usize) -> usize {
        let [codes, scales, mins] = self.schedule(tokens).scratch(&self.how, self.k_tile);
        codes / 4 + scales + mins
    }

    fn load(&self, job: &Job<'_>, tokens: Range<usize>, shared: bool, x: &mut [f32]) {
        let x = &mut bytemuck::cast_slice_mut(x)[..self.x_floats(tokens.len())];
        let schedule = self.schedule(tokens.len());
        let step = schedule.step_k_tiles * self.k_tile;
        job.quantize_tokens(&self.how, tokens, step, schedule.unpacks, shared, x);
    }

    fn multiply(
        &self,
        job: &Job<'_>,
        x: &[f32],
        tokens: usize,
        first_row: usize,
        part: Range<usize>,
        sums: &mut [f32],
    ) {
        self.block(job, bytemuck::cast_slice(x), tokens, first_row, part, sums);
    }
}

/// Order in which a thread multiplies a block
/// of rows with a panel.
#[derive(Clone, Copy)]
struct Schedule {
    /// K-tiles of a step.
    step_k_tiles: usize,
    /// Tiles that are processed together in a step.
    tiles: usize,
    /// Whether codes are unpacked first, for all groups of tokens.
    unpacks: bool,
    /// Whether scales are unpacked first; otherwise kernels unpack them.
    unpacks_scales: bool,
}

impl Schedule {
    /// Scratch of a block: bytes of codes, floats of
    /// scales and of minimums.
    fn scratch(&self, how: &Quantization, k_tile: usize) -> [usize; 3] {
        let numbers = LANES * self.step_k_tiles * k_tile;
        let codes = if self.unpacks { numbers } else { 0 };
        let scales = if self.unpacks_scales { numbers / how.sub_block } else { 0 };
        let mins = if how.offset.is_some() { 0 } else { scales };
        [codes, scales, mins].map(|of_tile| self.tiles * of_tile)
    }
}

impl Int8 {
    fn schedule(&self, tokens: usize) -> Schedule {
        let at_once = self.simd.quantized_tokens(false);
        let step = |columns| self.parts.step(columns, self.k_tile);
        if tokens <= (2 * at_once).min(PACKED_TOKENS).max(at_once) {
            // W is read once from end to end: tiles are processed
            // together if a step holds all of their columns.
            let one_group = tokens <= at_once;
            let step_k_tiles = step(if one_group { LONG_STEP } else { TWO_GROUPS_STEP });
            let is_whole = one_group && self.columns <= step_k_tiles * self.k_tile;
            let tiles = if is_whole { TILES } else { 1 };
            Schedule { step_k_tiles, tiles, unpacks: false, unpacks_scales: !one_group }
        } else {
            Schedule { step_k_tiles: step(STEP), tiles: TILES, unpacks: true, unpacks_scales: true }
        }
    }

    /// [`MainLoop::multiply`] on words.
    fn block(&self, job: &Job<'_>, x: &[u32], tokens: usize, first_row: usize, part: Range<usize>, sums: &mut [f32]) {
        let (weight, simd) = (job.weight(), job.simd());
        let layout = weight.layout();
        let (how, schedule) = (&self.how, self.schedule(tokens));
        let Schedule { step_k_tiles, tiles: at_once, unpacks, unpacks_scales } = schedule;
        let [codes, scales, mins] = schedule.scratch(how, layout.k_tile);
        let [codes_of_tile, subs, min_subs] = [codes, scales, mins].map(|of_tiles| of_tiles / at_once);
        arena::with_tile(codes / 4 + scales + mins, |scratch| {
            let (unpacked, rest) = scratch.split_at_mut(codes / 4);
            let (scales, mins) = rest.split_at_mut(scales);
            let unpacked: &mut [u8] = bytemuck::cast_slice_mut(unpacked);
            let tiles = BLOCK_ROWS.min(job.op().stored_rows - first_row).div_ceil(LANES);
            for first_tile in (0..tiles).step_by(at_once) {
                for k_tile in part.clone().step_by(step_k_tiles) {
                    let count = step_k_tiles.min(part.end - k_tile);
                    let group = at_once.min(tiles - first_tile);
                    let k_tiles =
                        |tile: usize| weight.run_of_k_tiles(first_row / LANES + first_tile + tile, k_tile, count);
                    for tile in 0..group {
                        let (scales, mins) = (&mut scales[tile * subs..], &mut mins[tile * min_subs..][..min_subs]);
                        if unpacks_scales {
                            weight.unpack_scales(simd, k_tiles(tile), scales, mins);
                        }
                        if unpacks {
                            simd.unpack_codes(how, layout, k_tiles(tile), &mut unpacked[tile * codes_of_tile..]);
                        }
                    }
                    let prefetch_distance = match unpacks {
                        false => (PREFETCH_BYTES / layout.k_tile_bytes).max(1),
                        true if k_tile + count < weight.k_tiles() => count,
                        // The first step of the next block.
                        true => TILES * weight.k_tiles() - k_tile,
                    };
                    let of_tile = |tile: usize| Tile {
                        codes: match unpacks {
                            true => &unpacked[tile * codes_of_tile..][..count * layout.k_tile * LANES],
                            false => k_tiles(tile),
                        },
                        prefetch: Prefetch::new(k_tiles(tile).as_ptr()).skip(prefetch_distance * layout.k_tile_bytes),
                        scales: &scales[tile * subs..],
                        mins: &mins[tile * min_subs..],
                    };
                    let mut of_tiles = [Tile::default(); TILES];
                    of_tiles.iter_mut().enumerate().take(group).for_each(|(tile, to)| *to = of_tile(tile));
                    let at = Operands {
                        how,
                        layout,
                        unpacked: unpacks,
                        tiles: &of_tiles[..group],
                        prefetch_bytes: step_k_tiles * layout.k_tile_bytes,
                        records: (!unpacks_scales).then(|| weight.scales()),
                        x: &x[tokens * how.row(k_tile * layout.k_tile).words..],
                        row: how.row(count * layout.k_tile),
                    };
                    simd.multiply_codes(tokens, &at, &mut sums[first_tile * LANES..]);
                }
            }
        });
    }
}
