//! [`Instance`]: one kernel of a family, from which its source prelude, its shared memory and its launch follow.

use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_formats::{DType, Encoding, Format};
use qgemm_hal::{Math, TileConfig, Variant};

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
            DType::F16 => Variant::Sm75,
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
    /// `row_tiles` tiles of rows a warp.
    Gemm {
        /// Tiles of rows that a warp computes.
        row_tiles: u32,
    },
}

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
/// Words between the sums of neighbouring tokens (`SUM_PITCH`).
const SUM_PADDING: u32 = 4;

impl Instance {
    pub(crate) fn family(&self) -> &'static str {
        match self.shape {
            Shape::Gemv { .. } => "gemv",
            Shape::Gemm { .. } => "gemm",
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
            Shape::Gemm { row_tiles } => self.threads / 32 * row_tiles * self.tile_rows(),
        }
    }

    /// `sizeof(SharedStorage)` of the kernel, which asserts it.
    pub(crate) fn shared_bytes(&self) -> u32 {
        const FLAG: u32 = 4;
        let row = |chunks: u32| chunks * (self.chunk_k() + self.chunk_padding()) * self.engine.x_bytes() + X_PADDING;
        let bytes = match self.shape {
            Shape::Gemv { x_slabs, .. } => {
                let partials = self.threads / 32 * self.tile_n() * self.tile_m * 4;
                self.tile_m * row(x_slabs * self.layout.slab_k as u32 / self.chunk_k()) + partials + FLAG
            }
            Shape::Gemm { .. } => {
                // Activations of two chunks, and afterwards the sums in the same place.
                let sums = self.tile_m * (self.tile_n() + SUM_PADDING) * 4;
                (2 * self.tile_m * row(1)).max(sums).next_multiple_of(SHARED_ALIGN) + FLAG
            }
        };
        bytes.next_multiple_of(SHARED_ALIGN)
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
            max_splits: 16,
            stages: match self.shape {
                Shape::Gemv { x_slabs, .. } => x_slabs,
                Shape::Gemm { .. } => 2,
            },
            shared_bytes: self.shared_bytes(),
            efficiency: self.efficiency,
        }
    }

    pub(crate) fn spec(&self) -> KernelSpec {
        let (entry, symbol, tail) = match self.shape {
            Shape::Gemv { .. } => ("entry/gemv.cu", "qg_gemv", String::new()),
            Shape::Gemm { row_tiles } => ("entry/gemm.cu", "qg_gemm", format!("_r{row_tiles}")),
        };
        let name = format!("{}_nt_{}_{}_m{}{tail}", self.family(), self.format.name, self.x, self.tile_m);
        KernelSpec {
            name,
            entry,
            text: source::entry(entry),
            symbol,
            prelude: prelude::print(self),
            arch_specific: false,
        }
    }
}
