//! [`Instance`]: one kernel of a family, from which its source prelude, its shared memory and its launch follow.

use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_formats::{DType, Encoding, Format};
use qgemm_hal::{Math, Schedule, TileConfig, Variant};

use super::prelude;
use crate::source;
use crate::spec::KernelSpec;

/// What the main loop of a kernel issues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// `mma.sync` on f16 or bf16 operands.
    Mma,
    /// f32 fused multiply-adds.
    Fma,
}

impl Engine {
    /// The engine for `format` weights and `x` activations. Codes of quantized formats are exact in f16 and bf16;
    /// plain weights go to matrix instructions only with activations of their own type.
    pub(crate) fn of(format: Format, x: DType, variant: Variant) -> Self {
        let first = match x {
            DType::F16 => Variant::Sm70,
            DType::BF16 => Variant::Sm80,
            DType::F32 => return Engine::Fma,
        };
        let same_type = !matches!(format.encoding, Encoding::Plain(w) if w != x);
        if variant >= first && same_type { Engine::Mma } else { Engine::Fma }
    }

    /// Bytes of an activation in shared memory.
    pub(crate) fn x_bytes(self) -> u32 {
        match self {
            Engine::Mma => 2,
            Engine::Fma => 4,
        }
    }

    pub(crate) fn math(self) -> Math {
        match self {
            Engine::Mma => Math::TensorF16,
            Engine::Fma => Math::FmaF32,
        }
    }
}

/// Whether codes have an offset of their own in every block, which takes registers beside the scale.
pub(crate) fn has_block_offsets(format: Format) -> bool {
    matches!(format.encoding, Encoding::IntAffine | Encoding::IntZero)
}

/// Whether blocks have a minimum, for which exact kernels hold sums of X in registers beside the others.
pub(crate) fn has_minimums(format: Format) -> bool {
    format.encoding == Encoding::IntAffine
}

/// Whether codes are integers with a scale.
pub(crate) fn is_scaled_integers(format: Format) -> bool {
    format.encoding.is_integer() && !format.scale_planes.is_empty()
}

/// Whether slabs have 256 columns: those of formats that nest their scales.
pub(crate) fn has_long_slabs(layout: &PackedLayout) -> bool {
    layout.slab_k > 128
}

/// The layout class that kernels of `variant` read.
pub fn class(variant: Variant) -> PackClass {
    if variant == Variant::Sm70 { PackClass::V } else { PackClass::T }
}

/// Constants that only one family has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `row_tiles` tiles of rows a block.
    Gemv {
        /// Tiles of rows that a warp computes.
        row_tiles: u32,
        /// Slabs of activations in shared memory at once.
        x_slabs: u32,
        /// Slabs of W that a warp loads before it computes.
        unroll: u32,
    },
    /// `row_tiles` tiles of rows a warp, with f32 FMA, and before Ampere also with matrix instructions.
    Gemm {
        /// Tiles of rows that a warp computes.
        row_tiles: u32,
    },
    /// The same on matrix instructions of chips without asynchronous copies.
    GemmSyncCopy {
        /// Tiles of rows that a warp computes.
        row_tiles: u32,
    },
    /// Slices of a block's warps share the K dimension of its rows; X passes through rings of the slices' own: a few
    /// tokens, on Ampere and newer.
    SlicedK {
        /// Tiles of rows that a warp computes.
        row_tiles: u32,
        /// Warps of a slice, along N.
        warps: u32,
        /// Slabs of its rows that a warp holds, and of X that a slice holds.
        stages: u32,
    },
    /// W and X pass through rings in shared memory to matrix instructions: Ampere and newer.
    Ring(Ring),
    /// The same to warpgroups' matrix instructions, with a warpgroup of its own that feeds them: Hopper.
    Warpgroup(Warpgroups),
}

/// The shape of a kernel of warpgroups, whose warps compute all of the block's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Warpgroups {
    /// Tiles of rows that a warp computes.
    pub row_tiles: u32,
    /// Warps of a group, along N.
    pub warps: u32,
    /// Groups of warps that share the K dimension of the block's rows.
    pub k_groups: u32,
    /// Chunks of 64 columns of X in a stage.
    pub stage_chunks: u32,
    /// Stages of X.
    pub stages: u32,
}

impl Warpgroups {
    /// Threads of a block: the groups', and those that feed them.
    pub(super) fn threads(&self) -> u32 {
        (self.warps * self.k_groups + FEEDING_WARPS) * 32
    }

    /// Runs of slabs of W that a block holds (`QG_W_STAGES`).
    pub(super) fn w_stages(&self, layout: &PackedLayout) -> u32 {
        let slab_stages = ((layout.slab_k / RING_CHUNK_K) as u32 / self.stage_chunks).max(1);
        1 + (self.stages - 1).div_ceil(slab_stages)
    }

    /// Slabs that arrive together (`RUN_SLABS`).
    fn run_slabs(&self, layout: &PackedLayout) -> u32 {
        (self.stage_chunks / (layout.slab_k / RING_CHUNK_K) as u32).max(1)
    }
}

/// The shape of a kernel with rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    /// Tiles of rows that a warp computes.
    pub row_tiles: u32,
    /// Warps along N; all of them compute the block's tokens.
    pub warps: u32,
    /// Stages of 64 columns of X.
    pub x_stages: u32,
    /// Tiles of eight tokens that pass through a warp's shared memory together on their way to D (`QG_STAGED`).
    pub staged: u32,
    /// Whether a warpgroup of its own feeds the rings by the copy engine, Hopper and newer; the threads' own copies otherwise.
    pub fed: bool,
}

impl Ring {
    /// Threads of a block: those that multiply, and those that feed them.
    pub(super) fn threads(&self) -> u32 {
        (self.warps + if self.fed { FEEDING_WARPS } else { 0 }) * 32
    }

    /// Whether staging and, with it, all else takes as little room as it can.
    pub(super) fn is_tight(&self) -> bool {
        !self.fed && self.staged < STAGED
    }

    /// Slabs of W that a block holds: the one in use and those of all chunks on their way (`QG_W_STAGES`). Threads that copy
    /// leave a stage to the slowest of them.
    pub(super) fn w_stages(&self, layout: &PackedLayout) -> u32 {
        let chunks = (layout.slab_k / RING_CHUNK_K) as u32;
        let on_their_way = if self.fed { self.x_stages - 1 } else { self.x_stages - 2 };
        1 + on_their_way.div_ceil(chunks)
    }
}

/// Warps of a warpgroup that feeds the others of its block.
const FEEDING_WARPS: u32 = 4;

/// Columns of a stage of X.
pub(super) const RING_CHUNK_K: usize = 64;

/// One kernel.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub format: Format,
    pub x: DType,
    pub variant: Variant,
    pub engine: Engine,
    pub tile_m: u32,
    pub threads: u32,
    pub blocks_per_sm: u32,
    pub shape: Shape,
    pub layout: PackedLayout,
    /// How near it comes to the chip's rates (arithmetic, bandwidth), per mille: estimates, good enough to rank with.
    pub efficiency: (u32, u32),
}

/// Shared memory is a struct whose alignment is 16 bytes.
const SHARED_ALIGN: u32 = 16;
/// Bytes between the rows of neighbouring tokens (`XTile::PITCH`).
const X_PADDING: u32 = 16;
/// Columns of activations in a stage of `gemm_sync_copy` (`STAGE_K`).
const STAGE_K: u32 = 64;
/// Words of padding between the sums of neighbouring tokens, and of neighbouring sub-blocks (`SUM_PITCH`,
/// `WarpStaging::PITCH`).
const SUM_PADDING: u32 = 4;
/// Tokens of a matrix instruction.
const MMA_TOKENS: u32 = 8;
/// Tiles of so many tokens that pass through shared memory together on their way to D, where there is room (`QG_STAGED`).
pub(super) const STAGED: u32 = 2;

impl Instance {
    pub(crate) fn family(&self) -> &'static str {
        match self.shape {
            Shape::Gemv { .. } => "gemv",
            Shape::Gemm { .. }
            | Shape::GemmSyncCopy { .. }
            | Shape::SlicedK { .. }
            | Shape::Ring(_)
            | Shape::Warpgroup(_) => "gemm",
        }
    }

    /// Rows of a tile.
    pub(crate) fn tile_rows(&self) -> u32 {
        self.layout.tile_rows as u32
    }

    /// Output features of a block.
    fn tile_n(&self) -> u32 {
        match self.shape {
            Shape::Gemv { row_tiles, .. } => row_tiles * self.tile_rows(),
            Shape::SlicedK { row_tiles, warps, .. } => warps * row_tiles * self.tile_rows(),
            Shape::Gemm { row_tiles } | Shape::GemmSyncCopy { row_tiles } => {
                self.threads / 32 * row_tiles * self.tile_rows()
            }
            Shape::Ring(ring) => ring.warps * ring.row_tiles * self.tile_rows(),
            Shape::Warpgroup(shape) => shape.warps * shape.row_tiles * self.tile_rows(),
        }
    }

    /// Whether the kernel rounds weights to the type of X, before it multiplies them.
    pub(crate) fn rounds_weights(&self) -> bool {
        matches!(self.shape, Shape::Ring(_) | Shape::Warpgroup(_)) && !self.format.scale_planes.is_empty()
    }

    /// Whether codes become operands as they are, and offsets act on sums (`dequant/raw.cuh`): integers that the mantissa of
    /// the type of X holds, in kernels whose scales act on sums.
    pub(crate) fn takes_raw_codes(&self) -> bool {
        let mantissa_bits = if self.x == DType::F16 { 10 } else { 7 };
        // Offsets of sums as short as this cost as much as those of codes (measured on an H200); bf16 operands cost more.
        let short = self.format.encoding == Encoding::IntZero && self.format.sub_block <= 32 && self.x == DType::F16;
        matches!(self.shape, Shape::SlicedK { .. })
            && is_scaled_integers(self.format)
            && !short
            && self.format.code_bits() <= mantissa_bits
    }

    /// Whether what warps work on is kept in shared memory (`mainloop/kept_work.cuh`): kernels of 128 tokens that have too few
    /// registers for it, and fed ones, whose registers are fewer.
    pub(crate) fn keeps_work(&self) -> bool {
        const ALWAYS: &[&str] = &["int2_g64", "int3_g32", "int3_g64", "int8_g32", "q8_0"];
        const WITH_F16: &[&str] = &["int2_g32", "int4_g32", "iq4_nl", "q4_0", "q5_0"];
        let needs = ALWAYS.contains(&self.format.name) || self.x == DType::F16 && WITH_F16.contains(&self.format.name);
        match self.shape {
            Shape::Ring(ring) => ring.fed || self.tile_m >= 128 && (needs || ring.is_tight()),
            _ => false,
        }
    }

    /// Whether a warpgroup of the block feeds the others: the kernel then reads X through a tensor map, which its parameter ends
    /// with (`FedGemmParams` in `mainloop/fed_params.cuh`).
    pub(crate) fn has_feeders(&self) -> bool {
        match self.shape {
            Shape::Ring(ring) => ring.fed,
            Shape::Warpgroup(_) => true,
            _ => false,
        }
    }

    /// Threads that hold the sums of a tile in the end.
    pub(super) fn consumers(&self) -> u32 {
        match self.shape {
            Shape::Ring(ring) => ring.warps * 32,
            Shape::Warpgroup(shape) => shape.warps * 32,
            _ => self.threads,
        }
    }

    /// `sizeof(SharedStorage)` of the kernel, which asserts it.
    pub(crate) fn shared_bytes(&self) -> u32 {
        const FLAG: u32 = 4;
        const BARRIER: u32 = 8;
        // A tile and two lists.
        const KEPT_WORK: u32 = 32 + 2 * 16;
        let row = |chunks: u32| chunks * (self.chunk_k() + self.chunk_padding()) * self.engine.x_bytes() + X_PADDING;
        let bytes = match self.shape {
            Shape::Gemv { x_slabs, row_tiles, .. } => {
                let x = self.tile_m * row(x_slabs * self.layout.slab_k as u32 / self.chunk_k());
                x.next_multiple_of(SHARED_ALIGN) + self.threads / 32 * self.warp_sums_bytes(row_tiles) + FLAG
            }
            Shape::SlicedK { row_tiles, warps, stages, .. } => {
                let x = self.tile_m * self.layout.slab_k as u32 * self.engine.x_bytes();
                let w = row_tiles * self.layout.slab_bytes as u32;
                let of_warp = (stages * w).max(self.warp_sums_bytes(row_tiles)) + self.scale_table_bytes(row_tiles);
                self.threads / 32 * (stages * x / warps + of_warp) + FLAG
            }
            Shape::Gemm { .. } => {
                // Activations of two chunks, and afterwards the sums in the same place.
                let sums = self.tile_m * (self.tile_n() + SUM_PADDING) * 4;
                (2 * self.tile_m * row(1)).max(sums).next_multiple_of(SHARED_ALIGN) + FLAG
            }
            Shape::GemmSyncCopy { .. } => {
                let sums = self.tile_m * (self.tile_n() + SUM_PADDING) * 4;
                (2 * self.stage_bytes()).max(sums).next_multiple_of(SHARED_ALIGN) + FLAG
            }
            Shape::Ring(ring) => {
                let x = ring.x_stages * self.x_stage_bytes();
                let w = ring.w_stages(&self.layout) * ring.warps * ring.row_tiles * self.layout.slab_bytes as u32;
                let barriers = ring.x_stages * 2 * BARRIER;
                let kept = if self.keeps_work() { ring.warps * KEPT_WORK } else { 0 };
                x + w + barriers + self.staging_bytes(ring.warps, ring.row_tiles, ring.staged) + kept + FLAG
            }
            Shape::Warpgroup(shape) => {
                let x = shape.stages * shape.stage_chunks * self.x_stage_bytes();
                let run = shape.run_slabs(&self.layout) * self.layout.slab_bytes as u32;
                let w = shape.w_stages(&self.layout) * shape.warps * shape.row_tiles * run;
                let barriers = shape.stages * 2 * BARRIER;
                let exchange = (shape.k_groups - 1) * self.tile_m * self.tile_n() * 4;
                x + w + barriers + self.staging_bytes(shape.warps, shape.row_tiles, STAGED) + exchange + FLAG
            }
        };
        bytes.next_multiple_of(SHARED_ALIGN)
    }

    /// `sizeof(XStage)` of the kernels with rings.
    fn x_stage_bytes(&self) -> u32 {
        self.tile_m * RING_CHUNK_K as u32 * self.engine.x_bytes()
    }

    /// Bytes of `WarpStaging` of all warps.
    fn staging_bytes(&self, warps: u32, row_tiles: u32, staged: u32) -> u32 {
        let rows = row_tiles * self.tile_rows();
        // Sums of the tokens, and a factor and a bias of each row.
        warps * (staged * MMA_TOKENS * (rows + SUM_PADDING) + 2 * rows) * 4
    }

    /// `sizeof(ScaleTableOfWarp)` in `mainloop/scale_table.cuh`.
    fn scale_table_bytes(&self, row_tiles: u32) -> u32 {
        if !has_long_slabs(&self.layout) {
            return 0;
        }
        row_tiles * self.tile_rows() * (self.layout.slab_k / self.format.sub_block) as u32 * 4
    }

    /// `sizeof(WarpSums)` in `epilogue/sliced_k.cuh`.
    fn warp_sums_bytes(&self, row_tiles: u32) -> u32 {
        let padding = if self.tile_m < MMA_TOKENS { 0 } else { SUM_PADDING };
        self.tile_m * (row_tiles * self.tile_rows() + padding) * 4
    }

    /// `sizeof(Stage)` of `gemm_sync_copy`: activations, their sums, and scales and minima of the block's rows.
    fn stage_bytes(&self) -> u32 {
        let subs = (STAGE_K / self.format.sub_block as u32).max(1);
        let floats = |present: bool, pitch: u32| if present { subs * pitch } else { 2 };
        let has_min = has_minimums(self.format);
        let warps = self.threads / 32;
        let x = self.tile_m * STAGE_K * 2 + 4 * floats(has_min, self.tile_m + SUM_PADDING);
        let rows = self.tile_n() / warps;
        let scales = warps * 4 * (floats(!self.layout.scales.is_empty(), rows) + floats(has_min, rows));
        (x.next_multiple_of(SHARED_ALIGN) + scales).next_multiple_of(SHARED_ALIGN)
    }

    /// Columns of a chunk (`CHUNK_K`): eight quads a lane.
    fn chunk_k(&self) -> u32 {
        1024 / self.tile_rows()
    }

    /// Elements between the chunks of a token (`XTile::CHUNK_PITCH`).
    fn chunk_padding(&self) -> u32 {
        if self.layout.class == PackClass::V { 0 } else { 16 }
    }

    pub(crate) fn config(&self) -> TileConfig {
        TileConfig {
            family: self.family(),
            math: self.engine.math(),
            tile_n: self.tile_n(),
            tile_m: self.tile_m,
            tile_k: self.layout.slab_k as u32,
            threads: self.threads,
            blocks_per_unit: self.blocks_per_sm,
            schedule: match self.shape {
                Shape::GemmSyncCopy { .. } | Shape::Ring(_) | Shape::Warpgroup(_) => Schedule::StreamK,
                Shape::Gemv { .. } | Shape::Gemm { .. } | Shape::SlicedK { .. } => Schedule::Grid,
            },
            max_splits: 16,
            stages: match self.shape {
                Shape::Gemv { x_slabs, .. } => x_slabs,
                Shape::SlicedK { stages, .. } => stages,
                Shape::Gemm { .. } | Shape::GemmSyncCopy { .. } => 2,
                Shape::Ring(ring) => ring.x_stages,
                Shape::Warpgroup(shape) => shape.stages,
            },
            shared_bytes: self.shared_bytes(),
            staged_x: None,
            rounded_weights: self.rounds_weights().then_some(self.x),
            efficiency: self.efficiency,
        }
    }

    /// Whether `config` is this kernel's. How activations come to it, and how that changes what is expected of it, are
    /// not the kernel's.
    pub(crate) fn serves(&self, config: &TileConfig) -> bool {
        let own = self.config();
        TileConfig { staged_x: own.staged_x, efficiency: own.efficiency, ..*config } == own
    }

    pub(crate) fn spec(&self) -> KernelSpec {
        let (entry, symbol, tail) = match self.shape {
            Shape::Gemv { .. } => ("entry/gemv.cu", "qg_gemv", String::new()),
            Shape::Gemm { row_tiles } => ("entry/gemm_simt.cu", "qg_gemm_simt", format!("_r{row_tiles}")),
            Shape::GemmSyncCopy { row_tiles } => {
                ("entry/sm70_gemm_two_stage.cu", "qg_sm70_gemm_two_stage", format!("_r{row_tiles}"))
            }
            Shape::SlicedK { row_tiles, warps, .. } => {
                let slices = self.threads / 32 / warps;
                ("entry/gemm_sliced_k.cu", "qg_gemm_sliced_k", format!("_r{row_tiles}_w{warps}_k{slices}"))
            }
            Shape::Ring(Ring { row_tiles, warps, fed: true, .. }) => {
                ("entry/sm120_gemm_tma_ws.cu", "qg_sm120_gemm_tma_ws", format!("_r{row_tiles}_w{warps}_fed"))
            }
            Shape::Ring(ring) => {
                let tight = if ring.is_tight() { "_tight" } else { "" };
                (
                    "entry/sm80_gemm_cp_async.cu",
                    "qg_sm80_gemm_cp_async",
                    format!("_r{}_w{}{tight}", ring.row_tiles, ring.warps),
                )
            }
            Shape::Warpgroup(Warpgroups { row_tiles, warps, k_groups, .. }) => {
                let groups = warps / 4;
                ("entry/sm90_gemm_wgmma_ws.cu", "qg_sm90_gemm_wgmma_ws", format!("_r{row_tiles}_g{groups}_k{k_groups}"))
            }
        };
        let name = format!("{}_nt_{}_{}_m{}{tail}", self.family(), self.format.name, self.x, self.tile_m);
        KernelSpec {
            name,
            entry,
            text: source::entry(entry),
            symbol,
            prelude: prelude::print(self),
            arch_specific: self.has_feeders(),
        }
    }
}
