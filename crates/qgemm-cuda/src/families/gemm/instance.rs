//! [`Instance`]: one kernel, from which prelude, launch and
//! ranking follow.

use qgemm_formats::{DType, XFormat};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{CheckedGemm, DeviceInfo, KernelId, Math, TileConfig};

use super::super::prelude::Prelude;
use super::common;
use super::main_loop::{MainLoop, XAccess};
use super::shares::Shares;
use super::types::Types;
use crate::source;
use crate::spec::KernelSpec;

/// The kernels of a main loop, which its file lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InstanceLists {
    /// The main loop.
    pub main_loop: &'static MainLoop,
    /// Kernels for operand types; empty when another main loop
    /// serves them.
    pub instances: fn(&Types, FitsRegisters<'_>) -> Vec<Instance>,
    /// Token tiles that also serve experts
    /// (`sched/experts.cuh`); empty without MoE support.
    pub experts_tiles: fn(&Types) -> &'static [u32],
    /// MoE-only kernels, for many small products instead of one large one.
    /// A kernel with the token tile of one of `instances`
    /// replaces it; others are added.
    pub for_experts: fn(&Types) -> Vec<Instance>,
    /// Kernels that write output segments, beside the token tiles
    /// of [`MainLoop::segments`].
    pub for_projections: fn(&Types, FitsRegisters<'_>) -> Vec<Instance>,
}

/// Tells whether a candidate kernel fits in registers.
pub(crate) type FitsRegisters<'a> = &'a dyn Fn(&Instance) -> bool;

impl InstanceLists {
    /// Lists without kernels for experts and projections.
    pub(super) const fn new(
        main_loop: &'static MainLoop,
        instances: fn(&Types, FitsRegisters<'_>) -> Vec<Instance>,
    ) -> Self {
        Self {
            main_loop,
            instances,
            experts_tiles: |_| &[],
            for_experts: |_| Vec::new(),
            for_projections: |_, _| Vec::new(),
        }
    }

    /// The first kernel with `tokens` tokens in a tile that `fits`.
    pub(super) fn first_of_tokens(&self, types: &Types, tokens: u32, fits: FitsRegisters<'_>) -> Option<Instance> {
        // Main loops prefer the first kernel that fits. The
        // others are not compiled.
        let of = |instance: &Instance| (instance.id(), instance.state_in_shared);
        let mut refused = Vec::new();
        loop {
            let is_open = |instance: &Instance| instance.tile_m == tokens && !refused.contains(&of(instance));
            let first = (self.instances)(types, &is_open).into_iter().find(is_open)?;
            if fits(&first) {
                return Some(first);
            }
            refused.push(of(&first));
        }
    }
}

/// Maximum CTAs along the grid's y axis (CUDA C Programming Guide,
/// "Technical Specifications per Compute Capability").
pub(super) const MOST_GRID_Y: usize = 65_535;

/// Maximum tokens and columns of codes for TMA, whose
/// coordinates are signed.
pub(super) const MOST_MAPPED: usize = i32::MAX as usize;
/// Maximum row stride in bytes (`cuTensorMapEncodeTiled`).
pub(super) const MOST_STRIDE_BYTES: u64 = 1 << 40;

/// Maximum tokens up to which kernels without weight rounding are
/// no slower, except on Hopper.
pub(super) const MOST_EXACT: usize = 16;

/// Minimum rows of W for rounded weights. In a narrow output,
/// rounding errors have too few values to cancel out.
const LEAST_ROUNDED_ROWS: usize = 32;

/// One kernel.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub main_loop: &'static MainLoop,
    pub types: Types,
    pub tile_m: u32,
    pub tile_n: u32,
    /// Columns of a schedule k-tile: whole packed k-tiles.
    pub tile_k: u32,
    pub threads: u32,
    /// Threads that hold a tile's accumulators at its end.
    pub consumers: u32,
    pub ctas_per_sm: u32,
    /// Pipeline stages.
    pub stages: u32,
    /// `sizeof(SharedStorage)` of the kernel, which asserts it.
    pub shared_bytes: u32,
    /// Whether codes become operands unchanged, and offsets apply to sums
    /// (`dequant/integer_operand.cuh`).
    pub integer_operands: bool,
    /// Whether codes minus zero points are exact operands, and scales apply
    /// to sums (`mainloop/sm90/code_sums_product.cuh`).
    pub sums_codes: bool,
    /// Whether scheduler state is parked in shared memory
    /// (`mainloop/scheduler_state.cuh`), because accumulators
    /// leave too few registers.
    pub state_in_shared: bool,
    /// Shared memory in bytes for the tile info that producers of
    /// an MoE kernel pass to consumers (`sched/tile_info.cuh`).
    pub tile_info_bytes: u32,
    /// Whether one row of X is broadcast to
    /// all tokens of a tile.
    pub one_row: bool,
    /// Maximum columns, for kernels that keep all
    /// of X in shared memory.
    pub most_k: usize,
    /// Constants specific to this main loop.
    pub constants: Prelude<'static>,
    /// Format in which X is multiplied, and the arithmetic.
    pub x_format: XFormat,
    pub math: Math,
    /// Warps along N, and warp groups that slice K.
    pub warps_n: u32,
    pub k_groups: u32,
    /// Estimated shares of (arithmetic, bandwidth), per mille, and the rates
    /// they refer to. Good enough for ranking.
    pub efficiency: (u32, u32),
    pub shares: Shares,
}

/// Kernel declaration common to all main loops.
pub(super) struct Parts<'a> {
    pub main_loop: &'static MainLoop,
    pub types: &'a Types,
    /// Tokens and output features of a CTA.
    pub tile: [u32; 2],
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Instance {
    /// A kernel without producer warps and one CTA per SM. Main
    /// loops override what differs.
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
            state_in_shared: false,
            tile_info_bytes: 0,
            one_row: false,
            most_k: usize::MAX,
            constants: Prelude::PRODUCT,
            x_format: XFormat::Plain(types.x),
            math: types.engine.math(),
            warps_n: threads / 32,
            k_groups: 1,
            efficiency: (0, 0),
            shares: Shares::OfChip,
        }
    }

    /// Adds `own` bytes of shared memory before the end-of-tile flag.
    pub(super) fn with_own_bytes(self, own: u32) -> Self {
        // The flag alone fills the last unit of alignment.
        let before = self.shared_bytes - common::ALIGNMENT;
        match own {
            0 => self,
            _ => Self { shared_bytes: (before + own + common::FLAG).next_multiple_of(common::ALIGNMENT), ..self },
        }
    }

    /// Whether the kernel rounds weights to the type
    /// of X before multiplying.
    pub(crate) fn rounds_weights(&self) -> bool {
        self.main_loop.rounds_beyond.is_some() && !self.types.format.scale_planes.is_empty() && !self.sums_codes
    }

    /// Whether the kernel supports `op` within its limits.
    /// `in_order` means that X has aligned rows with columns in
    /// the order of the weight's.
    ///
    /// Small M is bound by bandwidth, so exact weights
    /// are used where they cost nothing. The f16 range
    /// does not hold every weight.
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

    /// K-tiles of W that are copied together, for kernels that
    /// read X by TMA (`RUN_K_TILES`).
    pub(crate) fn run_k_tiles(&self) -> u32 {
        (self.constants.stage_k_blocks.unwrap_or(1) * common::K_BLOCK / self.tile_k).max(1)
    }

    /// Maximum tokens of one launch.
    pub(crate) fn most_tokens(&self) -> usize {
        if self.one_row {
            return 1;
        }
        (self.tile_m as usize).saturating_mul(self.main_loop.most_m_tiles)
    }

    pub(crate) fn config(&self) -> TileConfig {
        let Types { x, variant, .. } = self.types;
        TileConfig {
            family: self.main_loop.kind.family(),
            main_loop: self.main_loop.kind.name(),
            variant: Some(variant),
            math: self.math,
            tile_n: self.tile_n,
            tile_m: self.tile_m,
            tile_k: self.tile_k,
            threads: self.threads,
            ctas_per_unit: self.ctas_per_sm,
            cluster: 1,
            schedule: self.main_loop.schedule,
            // A kernel that keeps all of X processes all of K.
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

    /// The config with efficiencies relative to the chip's rates.
    pub(crate) fn config_on(&self, info: &DeviceInfo) -> TileConfig {
        TileConfig { efficiency: self.shares.on(self.efficiency, self.math, info), ..self.config() }
    }

    /// Kernel identity.
    pub(crate) fn id(&self) -> KernelId {
        self.config().kernel_id(self.types.format)
    }

    pub(crate) fn spec(&self) -> KernelSpec {
        self.spec_with(self.id(), self.constants)
    }

    /// The kernel with another identity and the main loop's
    /// `constants` for it.
    pub(crate) fn spec_with(&self, id: KernelId, constants: Prelude<'static>) -> KernelSpec {
        let MainLoop { entry, symbol, arch_specific, .. } = *self.main_loop;
        KernelSpec {
            name: id.to_string(),
            entry,
            text: source::entry(entry),
            symbol,
            prelude: self.prelude(constants).text(),
            arch_specific,
        }
    }

    /// The constants of the kernel, for its format, layout and tile.
    fn prelude<'a>(&'a self, constants: Prelude<'a>) -> Prelude<'a> {
        let Types { format, x, variant, engine, layout } = &self.types;
        Prelude {
            variant: Some(variant.number()),
            use_mma: Some(engine.is_mma().into()),
            integer_operands: Some(self.integer_operands.into()),
            code_sums: Some(self.sums_codes.into()),
            state_in_shared: Some(self.state_in_shared.into()),
            x_dtype: Some(dtype_code(*x)),
            x_planes: Some(self.main_loop.x_access.is_quantized().into()),
            x_rows: Some(if self.one_row { 1 } else { self.tile_m }),
            tile_m: Some(self.tile_m),
            threads: Some(self.threads),
            consumers: Some(self.consumers),
            ctas_per_sm: Some(self.ctas_per_sm),
            shared_bytes: Some(self.shared_bytes),
            rounded: Some(self.rounds_weights().into()),
            ..constants.with_layout(layout).with_format(*format)
        }
    }
}
