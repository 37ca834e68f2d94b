//! [`MainLoop`]: identity, source and capabilities of a main loop.

use std::ops::RangeInclusive;

use qgemm_hal::{Name, Schedule, Variant};

/// Identity of a main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MainLoopKind {
    Gemv,
    GemmSimt,
    GemmSlicedK,
    GemmSlicedKOneRow,
    Sm70TwoStage,
    Sm70S8TwoStage,
    Sm80CpAsync,
    Sm80S8CpAsync,
    Sm89Fp8CpAsync,
    Sm90BulkOneRow,
    Sm90BulkSlicedK,
    Sm90BulkStream,
    Sm90Fp8WgmmaWs,
    Sm90S8GroupsWgmmaWs,
    Sm90S8WgmmaWs,
    Sm90W4A8WgmmaWs,
    Sm90WgmmaWs,
    Sm120BlockScaledWs,
    Sm120TmaWs,
}

impl MainLoopKind {
    /// Variant and mechanism, as kernel identities print them.
    pub(crate) const fn name(self) -> Name {
        Name::new(match self {
            MainLoopKind::Gemv => "gemv",
            MainLoopKind::GemmSimt => "gemm_simt",
            MainLoopKind::GemmSlicedK => "gemm_sliced_k",
            MainLoopKind::GemmSlicedKOneRow => "gemm_sliced_k_one_row",
            MainLoopKind::Sm70TwoStage => "sm70_two_stage",
            MainLoopKind::Sm70S8TwoStage => "sm70_s8_two_stage",
            MainLoopKind::Sm80CpAsync => "sm80_cp_async",
            MainLoopKind::Sm80S8CpAsync => "sm80_s8_cp_async",
            MainLoopKind::Sm89Fp8CpAsync => "sm89_fp8_cp_async",
            MainLoopKind::Sm90BulkOneRow => "sm90_bulk_one_row",
            MainLoopKind::Sm90BulkSlicedK => "sm90_bulk_sliced_k",
            MainLoopKind::Sm90BulkStream => "sm90_bulk_stream",
            MainLoopKind::Sm90Fp8WgmmaWs => "sm90_fp8_wgmma_ws",
            MainLoopKind::Sm90S8GroupsWgmmaWs => "sm90_s8_groups_wgmma_ws",
            MainLoopKind::Sm90S8WgmmaWs => "sm90_s8_wgmma_ws",
            MainLoopKind::Sm90W4A8WgmmaWs => "sm90_w4a8_wgmma_ws",
            MainLoopKind::Sm90WgmmaWs => "sm90_wgmma_ws",
            MainLoopKind::Sm120BlockScaledWs => "sm120_block_scaled_ws",
            MainLoopKind::Sm120TmaWs => "sm120_tma_ws",
        })
    }

    /// Kernel family.
    pub(crate) const fn family(self) -> &'static str {
        match self {
            MainLoopKind::Gemv => "gemv",
            _ => "gemm",
        }
    }
}

/// A main loop: source and capabilities of its kernels, for
/// plain and quantized X alike. Each has a file that defines it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MainLoop {
    /// Identity.
    pub kind: MainLoopKind,
    /// Source file.
    pub entry: &'static str,
    /// Kernel symbol.
    pub symbol: &'static str,
    /// Whether it uses instructions that only one chip supports.
    pub arch_specific: bool,
    /// How CTAs share the tiles.
    pub schedule: Schedule,
    /// X source.
    pub x_access: XAccess,
    /// Maximum tokens for weights that it rounds to the type of
    /// X before multiplying. `None` when codes are exact
    /// operands and scales apply to sums.
    pub rounds_beyond: Option<usize>,
    /// Maximum M tiles.
    pub most_m_tiles: usize,
    /// Maximum bytes of a row tile over all of K.
    pub most_tile_bytes: usize,
    /// How the CTAs of its MoE kernels share the tiles.
    pub expert_ctas: ExpertCtas,
    /// When its MoE kernels prefetch W before earlier work is done.
    pub expert_prefetch: EarlyPrefetch,
    /// Token tiles that also write output segments.
    pub segments: &'static [SegmentTile],
    /// Whether its kernels for projections normalize X (fused RMSNorm).
    pub normalizes_x: bool,
}

/// How the CTAs of an MoE kernel share the tiles of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertCtas {
    /// Each CTA has one tile of one expert.
    OneTile,
    /// CTAs take tiles of all experts in turn.
    Tiles,
    /// CTAs share the row tiles of all experts.
    RowTiles,
}

/// When an MoE kernel prefetches W before it waits for earlier work.
/// The next launch may start only after that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EarlyPrefetch {
    /// Never.
    Never,
    /// If the index is ready before launch (`QG_TAKE_PROBLEM_EARLY`).
    WithIndex,
    /// If the expert lists are ready before launch
    /// (`mainloop/expert_producer.cuh`).
    WithLists,
}

/// A token tile whose kernel writes output segments.
#[derive(Debug)]
pub(crate) struct SegmentTile {
    /// Supported variants.
    pub variants: &'static [Variant],
    /// Tokens of a tile.
    pub tokens: u32,
    /// Token counts that it serves.
    pub serves: RangeInclusive<usize>,
}

/// X source of a main loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XAccess {
    /// Through registers, with any layout.
    Any,
    /// cp.async, 16 bytes at a time: rows are 16-byte aligned and
    /// in the order of the weight's columns.
    AlignedRows,
    /// TMA. The kernel parameter ends with tensor maps of X;
    /// alignment as for `AlignedRows`.
    Tma,
    /// Quantized X: the kernel parameter ends with the
    /// addresses of X's planes.
    Planes,
    /// Quantized X with codes by TMA: tensor maps follow the addresses.
    TmaOfPlanes,
}

impl XAccess {
    /// Whether X is quantized.
    pub(crate) const fn is_quantized(self) -> bool {
        matches!(self, XAccess::Planes | XAccess::TmaOfPlanes)
    }
}

impl MainLoop {
    /// A main loop with a persistent grid, no limits, and no
    /// capability beside its product.
    pub(super) const fn new(
        kind: MainLoopKind,
        (entry, symbol): (&'static str, &'static str),
        x_access: XAccess,
    ) -> Self {
        Self {
            kind,
            entry,
            symbol,
            arch_specific: false,
            schedule: Schedule::StreamK,
            x_access,
            rounds_beyond: None,
            most_m_tiles: usize::MAX,
            most_tile_bytes: usize::MAX,
            expert_ctas: ExpertCtas::OneTile,
            expert_prefetch: EarlyPrefetch::Never,
            segments: &[],
            normalizes_x: false,
        }
    }
}
