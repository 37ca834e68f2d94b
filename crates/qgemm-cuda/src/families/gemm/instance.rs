//! [`MainLoop`], the plan of a kernel, and [`Instance`], one kernel with everything that its source prelude, its launch and its
//! place in the ranking follow from.

use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, Encoding, XFormat};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{CheckedGemm, DeviceInfo, KernelId, Math, Schedule, TileConfig};

use super::super::prelude::{constant_line, macro_line, planes};
use super::common;
use super::shares::Shares;
use super::types::Types;
use crate::source;
use crate::spec::KernelSpec;

/// A main loop: what all kernels made of one source have in common. Each has a file, which alone knows it.
#[derive(Debug)]
pub(crate) struct MainLoop {
    /// The family that offers it.
    pub family: &'static str,
    /// Generation and mechanism, as the source is called.
    pub name: &'static str,
    /// Its source.
    pub entry: &'static str,
    /// The kernel in it.
    pub symbol: &'static str,
    /// Whether it uses instructions that only one chip has.
    pub arch_specific: bool,
    /// How CTAs share the tiles.
    pub schedule: Schedule,
    /// How it reads X.
    pub x_access: XAccess,
    /// Tokens beyond which it serves weights that it rounds to the type of X before it multiplies them. `None`: codes are exact
    /// operands, and scales act on sums.
    pub rounds_beyond: Option<usize>,
    /// Tokens of the tiles with which it serves experts, too (`sched/experts.cuh`); none where it does not. Those that read X by TMA
    /// have CTAs that take the tiles of all experts in turn.
    pub experts_tiles: fn(&Types) -> &'static [u32],
    /// Kernels for experts alone, where many small products want others than one large. Where one has as many tokens as a kernel of
    /// `instances` and more rows of W, it stands in its place, else beside it.
    pub for_experts: Option<fn(&Types) -> Vec<Instance>>,
    /// Most tiles along M.
    pub most_m_tiles: usize,
    /// Most bytes of a tile of rows, all along K.
    pub most_tile_bytes: usize,
    /// Its kernels for these types, none where another main loop serves them.
    pub instances: fn(&Types, FitsRegisters<'_>) -> Vec<Instance>,
}

/// Tells whether a kernel's values fit in registers, of those that a main loop chooses from.
pub(crate) type FitsRegisters<'a> = &'a dyn Fn(&Instance) -> bool;

/// How a main loop reads X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XAccess {
    /// Through registers, wherever its elements are.
    Any,
    /// Asynchronously, 16 bytes at a time: rows begin at multiples of 16 bytes, in the order of the weight's columns.
    AlignedRows,
    /// The same by TMA: the kernel's parameter ends with tensor maps of X.
    Tma,
    /// In codes and scales: the kernel's parameter ends with the places of X's planes.
    Planes,
    /// The same, codes by TMA: tensor maps of them follow.
    TmaOfPlanes,
}

/// Most CTAs along the grid's y axis (CUDA C Programming Guide, "Technical Specifications per Compute Capability").
pub(super) const MOST_GRID_Y: usize = 65_535;

/// Most tokens and columns of codes that TMA reads: its coordinates are signed.
pub(super) const MOST_MAPPED: usize = i32::MAX as usize;
/// Most bytes from a row to the next (`cuTensorMapEncodeTiled`).
pub(super) const MOST_STRIDE_BYTES: u64 = 1 << 40;

/// Tokens up to which kernels that round no weight are no slower, but on Hopper.
pub(super) const MOST_EXACT: usize = 16;

/// K-blocks of a stage of X, of those that read it by TMA.
pub(super) const STAGE_K_BLOCKS: &str = "QG_STAGE_K_BLOCKS";

/// Rows of W from which on weights may be rounded: a narrow output has too few values for roundings to cancel out.
const LEAST_ROUNDED_ROWS: usize = 32;

/// One kernel.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub main_loop: &'static MainLoop,
    pub types: Types,
    pub tile_m: u32,
    pub tile_n: u32,
    /// Columns of a k-tile of the schedule: whole packed ones.
    pub tile_k: u32,
    pub threads: u32,
    /// Threads that hold the accumulators of a tile in the end.
    pub consumers: u32,
    pub ctas_per_sm: u32,
    /// Buffers of the copy pipeline.
    pub stages: u32,
    /// `sizeof(SharedStorage)` of the kernel, which asserts it.
    pub shared_bytes: u32,
    /// Whether codes become operands as they are, and offsets act on sums (`dequant/integer_operand.cuh`).
    pub integer_operands: bool,
    /// Whether codes less their zero points are operands, exact, and scales act on sums (`mainloop/sm90/code_sums_product.cuh`).
    pub sums_codes: bool,
    /// Whether scheduler state waits in shared memory (`mainloop/parked_state.cuh`), because accumulators leave too few registers.
    pub parks_state: bool,
    /// Bytes of shared memory in which producers of a kernel for experts tell consumers of their tiles (`sched/tile_notes.cuh`).
    pub note_bytes: u32,
    /// Whether it multiplies one row of X, of which those of a tile are copies.
    pub one_row: bool,
    /// Columns up to which X has room in shared memory, of those that keep all of them there.
    pub most_k: usize,
    /// Constants that only this main loop has, by name.
    pub constants: Vec<(&'static str, u32)>,
    /// Format in which X is multiplied, and what with.
    pub x_format: XFormat,
    pub math: Math,
    /// Warps along N, and groups of warps that share K.
    pub warps_n: u32,
    pub k_groups: u32,
    /// How near it comes to rates (arithmetic, bandwidth), per mille, and to which: estimates, good enough to rank with.
    pub efficiency: (u32, u32),
    pub shares: Shares,
}

/// What every main loop says of a kernel.
pub(super) struct Parts<'a> {
    pub main_loop: &'static MainLoop,
    pub types: &'a Types,
    /// Tokens and output features of a CTA.
    pub tile: [u32; 2],
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Instance {
    /// A kernel whose threads all consume, one CTA of it on an SM: main loops add what differs.
    pub(super) fn new(parts: Parts<'_>) -> Self {
        let Parts { main_loop, types, tile: [tile_m, tile_n], threads, shared_bytes } = parts;
        Self {
            main_loop,
            types: types.clone(),
            tile_m,
            tile_n,
            tile_k: types.tile_k(),
            threads,
            consumers: threads,
            ctas_per_sm: 1,
            stages: 1,
            shared_bytes: shared_bytes.next_multiple_of(common::ALIGNMENT),
            integer_operands: false,
            sums_codes: false,
            parks_state: false,
            note_bytes: 0,
            one_row: false,
            most_k: usize::MAX,
            constants: Vec::new(),
            x_format: XFormat::Plain(types.x),
            math: types.engine.math(),
            warps_n: threads / 32,
            k_groups: 1,
            efficiency: (0, 0),
            shares: Shares::OfChip,
        }
    }

    /// The same with `own` bytes more of shared memory before what threads tell one another at a tile's end.
    pub(super) fn with_own_bytes(self, own: u32) -> Self {
        // The flag is all that stands in the last unit of alignment.
        let before = self.shared_bytes - common::ALIGNMENT;
        match own {
            0 => self,
            _ => Self { shared_bytes: (before + own + common::FLAG).next_multiple_of(common::ALIGNMENT), ..self },
        }
    }

    /// Whether the kernel rounds weights to the type of X before it multiplies them.
    pub(crate) fn rounds_weights(&self) -> bool {
        self.main_loop.rounds_beyond.is_some() && !self.types.format.scale_planes.is_empty() && !self.sums_codes
    }

    /// Whether the kernel computes `op` within its limits; `in_order` says that X is rows of aligned columns in the order of the
    /// weight's. Few tokens, whose time the weight's bytes decide, get exact weights where these are no slower. F16 has no room
    /// for every weight.
    pub(crate) fn serves(&self, op: &CheckedGemm, in_order: bool) -> bool {
        let MainLoop { rounds_beyond, most_tile_bytes, x_access, .. } = self.main_loop;
        let fits = op.weight_fits_f16 || self.types.x != DType::F16;
        let may_round =
            rounds_beyond.is_some_and(|tokens| op.m > tokens) && op.stored_rows >= LEAST_ROUNDED_ROWS && fits;
        let k_tiles = self.types.layout.k_tiles(op.stored_k);
        let reaches = k_tiles.saturating_mul(self.types.layout.k_tile_bytes) <= *most_tile_bytes;
        let is_mapped = *x_access != XAccess::TmaOfPlanes
            || (op.m.max(op.stored_k) <= MOST_MAPPED && op.x.row_stride < MOST_STRIDE_BYTES);
        (may_round || !self.rounds_weights())
            && reaches
            && op.stored_k <= self.most_k
            && is_mapped
            && (in_order || *x_access == XAccess::Any)
    }

    /// K-tiles of W that arrive together, of those that read X by TMA (`RUN_K_TILES`).
    pub(crate) fn run_k_tiles(&self) -> u32 {
        let of_stage =
            self.constants.iter().find(|(name, _)| *name == STAGE_K_BLOCKS).map_or(1, |(_, k_blocks)| *k_blocks);
        (of_stage * common::K_BLOCK / self.tile_k).max(1)
    }

    /// Most tokens that one launch computes.
    pub(crate) fn most_tokens(&self) -> usize {
        if self.one_row {
            return 1;
        }
        (self.tile_m as usize).saturating_mul(self.main_loop.most_m_tiles)
    }

    pub(crate) fn config(&self) -> TileConfig {
        let Types { x, variant, .. } = self.types;
        TileConfig {
            family: self.main_loop.family,
            main_loop: self.main_loop.name,
            variant: Some(variant),
            math: self.math,
            tile_n: self.tile_n,
            tile_m: self.tile_m,
            tile_k: self.tile_k,
            threads: self.threads,
            ctas_per_unit: self.ctas_per_sm,
            cluster: 1,
            schedule: self.main_loop.schedule,
            // A kernel that keeps all of X has all of K.
            max_splits: if self.most_k == usize::MAX { 16 } else { 1 },
            warps_n: self.warps_n,
            k_groups: self.k_groups,
            stages: self.stages,
            shared_bytes: self.shared_bytes,
            x_format: self.x_format,
            x_prologue: None,
            rounded_weights: self.rounds_weights().then_some(x),
            normalizes_x: false,
            efficiency: self.efficiency,
        }
    }

    /// The same, with the shares that it reaches of a chip's rates.
    pub(crate) fn config_on(&self, info: &DeviceInfo) -> TileConfig {
        TileConfig { efficiency: self.shares.on(self.efficiency, self.math, info), ..self.config() }
    }

    /// What the kernel is.
    pub(crate) fn id(&self) -> KernelId {
        self.config().kernel_id(self.types.format)
    }

    pub(crate) fn spec(&self) -> KernelSpec {
        let MainLoop { entry, symbol, arch_specific, .. } = *self.main_loop;
        KernelSpec {
            name: self.id().to_string(),
            entry,
            text: source::entry(entry),
            symbol,
            prelude: self.prelude(),
            arch_specific,
        }
    }

    /// The kernel's source with `own` before it, and with that a name.
    pub(crate) fn spec_with(&self, id: KernelId, own: &str) -> KernelSpec {
        let spec = self.spec();
        KernelSpec { name: id.to_string(), prelude: spec.prelude + own, ..spec }
    }

    /// The constants that stand before the kernel's source: everything that it knows of its format, layout and tile.
    fn prelude(&self) -> String {
        /// Stands for "codes are not plain numbers" where an element type is expected.
        const NOT_PLAIN: u32 = 255;
        let mut out = String::new();
        let Types { format, x, variant, engine, layout } = &self.types;
        let plain = match format.encoding {
            Encoding::Plain(dtype) => dtype_code(dtype),
            _ => NOT_PLAIN,
        };
        // Macros where a preprocessor condition or an #include needs the value; constants otherwise.
        for (name, value) in [
            ("QG_VARIANT", variant.number()),
            ("QG_MMA_M8N8K4", u32::from(layout.class == FragmentLayout::MmaM8N8K4)),
            ("QG_USE_MMA", u32::from(engine.is_mma())),
            ("QG_INTEGER_OPERANDS", u32::from(self.integer_operands)),
            ("QG_PARKS_STATE", u32::from(self.parks_state)),
            ("QG_X_DTYPE", dtype_code(*x)),
            ("QG_PLAIN_DTYPE", plain),
            ("QG_CODE_PLANES", layout.codes.len() as u32),
            ("QG_SCALE_PLANES", layout.scales.len() as u32),
        ] {
            macro_line(&mut out, name, &value.to_string());
        }
        if self.sums_codes {
            macro_line(&mut out, "QG_CODE_SUMS", "1");
        }
        if self.one_row {
            macro_line(&mut out, "QG_X_ROWS", "1");
        }
        macro_line(&mut out, "QG_DEQUANT_FILE", &format!("\"dequant/{}.cuh\"", format.dequant));

        planes(&mut out, layout);
        let common = [
            ("QG_TILE_ROWS", self.types.tile_rows()),
            ("QG_K_TILE", self.types.tile_k()),
            ("QG_K_TILE_BYTES", self.types.k_tile_bytes()),
            ("QG_SUB_BLOCK", format.sub_block as u32),
            ("QG_TILE_M", self.tile_m),
            ("QG_THREADS", self.threads),
            ("QG_CONSUMERS", self.consumers),
            ("QG_CTAS_PER_SM", self.ctas_per_sm),
            ("QG_SHARED_BYTES", self.shared_bytes),
            ("QG_ROUNDED", self.rounds_weights().into()),
            ("QG_ZERO_POINTS", u32::from(format.encoding == Encoding::IntZero)),
        ];
        for (name, value) in common.iter().chain(&self.constants) {
            constant_line(&mut out, name, *value);
        }
        out
    }
}
