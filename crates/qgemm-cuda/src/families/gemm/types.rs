//! [`Types`]: operand types and variant of a kernel, and what follows from them.

use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, Encoding, Format};
use qgemm_hal::{Math, Variant};

use crate::arch;

/// Operand type of matrix instructions in main
/// loops with an unquantized X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// `mma.sync` and `wgmma` on f16.
    F16,
    /// `mma.sync` and `wgmma` on bf16.
    BF16,
}

impl Operand {
    /// Bytes of an element.
    fn bytes(self) -> u32 {
        match self {
            Operand::F16 | Operand::BF16 => 2,
        }
    }

    /// Bits of the integers that it represents exactly.
    fn integer_bits(self) -> u32 {
        match self {
            Operand::F16 => 10,
            Operand::BF16 => 7,
        }
    }
}

/// Arithmetic of a main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Matrix instructions with f32 accumulation.
    Mma(Operand),
    /// f32 FMA.
    Fma,
}

impl Engine {
    /// Arithmetic for `format` weights and `x` activations. Quantized codes are
    /// exact in f16 and bf16. Unquantized weights use matrix instructions only
    /// with activations of the same type.
    pub(crate) fn of(format: Format, x: DType, variant: Variant) -> Self {
        let (operand, first) = match x {
            DType::F16 => (Operand::F16, Variant::Sm70),
            DType::BF16 => (Operand::BF16, Variant::Sm80),
            DType::F32 => return Engine::Fma,
        };
        let same_type = !matches!(format.encoding, Encoding::Plain(w) if w != x);
        if variant >= first && same_type { Engine::Mma(operand) } else { Engine::Fma }
    }

    /// Whether it uses matrix instructions.
    pub(crate) fn is_mma(self) -> bool {
        matches!(self, Engine::Mma(_))
    }

    /// Bytes of an element of X in shared memory.
    pub(crate) fn x_bytes(self) -> u32 {
        match self {
            Engine::Mma(operand) => operand.bytes(),
            Engine::Fma => 4,
        }
    }

    pub(crate) fn math(self) -> Math {
        match self {
            Engine::Mma(Operand::F16 | Operand::BF16) => Math::TensorF16,
            Engine::Fma => Math::FmaF32,
        }
    }
}

/// Operand types and variant of a kernel, and
/// what follows from them.
#[derive(Clone, Debug)]
pub(crate) struct Types {
    pub format: Format,
    pub x: DType,
    pub variant: Variant,
    pub engine: Engine,
    pub layout: PackedLayout,
}

impl Types {
    pub(crate) fn new(format: Format, x: DType, variant: Variant) -> Option<Self> {
        let layout = PackedLayout::new(format, arch::fragment_layout(variant))?;
        Some(Self { format, x, variant, engine: Engine::of(format, x, variant), layout })
    }

    /// Rows of a W tile.
    pub(crate) fn tile_rows(&self) -> u32 {
        self.layout.tile_rows as u32
    }

    /// Columns of a packed k-tile.
    pub(crate) fn tile_k(&self) -> u32 {
        self.layout.k_tile as u32
    }

    /// Bytes of a packed k-tile.
    pub(crate) fn k_tile_bytes(&self) -> u32 {
        self.layout.k_tile_bytes as u32
    }

    /// Whether k-tiles have 256 columns, as formats with nested scales need.
    pub(crate) fn has_nested_scales(&self) -> bool {
        self.layout.k_tile > 128
    }

    /// Whether a weight has fewer than seven bits.
    pub(crate) fn is_narrow(&self) -> bool {
        self.layout.k_tile_bytes * 8 < 7 * self.layout.tile_rows * self.layout.k_tile
    }

    /// Whether codes have an offset in every block, which takes
    /// registers beside the scale.
    pub(crate) fn has_block_offsets(&self) -> bool {
        matches!(self.format.encoding, Encoding::IntAffine | Encoding::IntZero)
    }

    /// Whether blocks have a minimum, for which exact kernels
    /// hold X block sums in registers.
    pub(crate) fn has_minimums(&self) -> bool {
        self.format.encoding == Encoding::IntAffine
    }

    /// Whether codes are integers with a scale.
    pub(crate) fn is_scaled_integers(&self) -> bool {
        self.format.encoding.is_integer() && !self.format.scale_planes.is_empty()
    }

    /// Whether codes are integers or index a table of signed bytes
    /// (`dequant/signed_bytes.cuh`).
    pub(crate) fn has_signed_bytes(&self) -> bool {
        self.format.encoding.is_integer() || matches!(self.format.encoding, Encoding::Codebook(_))
    }

    /// Whether a lookup of operands in shared memory takes fewer
    /// instructions than their conversion
    /// (`dequant/operand_table.cuh`).
    ///
    /// Ada and consumer Blackwell have less bandwidth for an SM,
    /// and no shared memory to spare.
    pub(crate) fn looks_up_operands(&self) -> bool {
        let is_codebook = matches!(self.format.encoding, Encoding::Codebook(_));
        let has_room = matches!(self.variant, Variant::Sm80 | Variant::Sm90);
        is_codebook && has_room && (3..=4).contains(&self.format.code_bits())
    }

    /// Whether codes can be operands unchanged, so that offsets apply to
    /// sums (`dequant/integer_operand.cuh`).
    pub(crate) fn has_integer_operands(&self) -> bool {
        let Engine::Mma(operand) = self.engine else { return false };
        // With short sub-blocks, offsets of sums cost as much as offsets
        // of codes; bf16 codes cost more.
        let short = self.format.encoding == Encoding::IntZero && self.format.sub_block <= 32 && operand == Operand::F16;
        self.is_scaled_integers() && !short && self.format.code_bits() <= operand.integer_bits()
    }

    /// Columns of X that a lane's eight quads cover (`CHUNK_K`).
    pub(crate) fn chunk_k(&self) -> u32 {
        1024 / self.tile_rows()
    }

    /// Padding elements between the chunks of a token (`XTile::CHUNK_PITCH`).
    pub(crate) fn chunk_padding(&self) -> u32 {
        if self.layout.class == FragmentLayout::MmaM8N8K4 { 0 } else { 16 }
    }
}
