//! [`Prelude`]: every constant that Rust tells a kernel.

/// Defines [`Prelude`]. Each constant has a field, a C++ name and a
/// kind: `Macro` for values that an `#if` tests, `Typed` for all others.
macro_rules! prelude {
    ($($(#[doc = $doc:literal])+ $field:ident: $kind:ident $name:literal,)+) => {
        /// Constants of a kernel, set before compilation. A family fills
        /// the fields that its entries read; the others are not printed.
        #[derive(Clone, Copy, Debug)]
        pub(in crate::families) struct Prelude<'a> {
            $($(#[doc = $doc])+ pub $field: Option<u32>,)+
            /// Dequantization source (`dequant/q4_0.cuh`), from `FormatDesc::dequant`.
            pub dequant_file: Option<&'static str>,
            /// Planes of a packed layout.
            pub planes: Option<&'a PackedLayout>,
            /// Bit moves of a packing kernel.
            pub moves: Option<Moves<'a>>,
        }

        impl<'a> Prelude<'a> {
            /// No constant.
            pub const EMPTY: Self =
                Self { $($field: None,)+ dequant_file: None, planes: None, moves: None };

            /// The constants in order, with their values.
            pub(super) fn constants(&self) -> impl Iterator<Item = (Constant, Option<u32>)> {
                let constants = [$((
                    Constant { name: $name, kind: Kind::$kind, doc: &[$($doc),+] },
                    self.$field,
                ),)+];
                constants.into_iter()
            }
        }
    };
}

use qgemm_formats::prepack::PackedLayout;

use super::{Constant, Kind, Moves};

prelude! {
    /// Variant of the instructions: 70, 75, 80, 89, 90 or 120.
    variant: Macro "QG_VARIANT",
    /// Threads of a CTA, or the most that any launch uses.
    threads: Typed "QG_THREADS",
    /// Size of the kernel's `SharedStorage`, which asserts it.
    shared_bytes: Typed "QG_SHARED_BYTES",
    /// CTAs that an SM should hold at once (`__launch_bounds__`).
    /// 0: the compiler decides.
    ctas_per_sm: Macro "QG_CTAS_PER_SM",

    // Weights.
    /// 1: the layout is Volta's `MmaM8N8K4`; 0: `MmaM16`.
    mma_m8n8k4: Macro "QG_MMA_M8N8K4",
    /// Rows of a row tile.
    tile_rows: Typed "QG_TILE_ROWS",
    /// Columns of a packed k-tile.
    k_tile: Typed "QG_K_TILE",
    /// Bytes of a packed k-tile.
    k_tile_bytes: Typed "QG_K_TILE_BYTES",
    /// Columns that share a scale.
    sub_block: Typed "QG_SUB_BLOCK",
    /// 1: each group stores a zero point.
    zero_points: Typed "QG_ZERO_POINTS",
    /// Number of code planes.
    code_planes: Macro "QG_CODE_PLANES",
    /// Number of scale planes.
    scale_planes: Macro "QG_SCALE_PLANES",
    /// Element type of plain weights: 0 f32, 1 f16, 2 bf16; 255 when
    /// quantized.
    plain_dtype: Macro "QG_PLAIN_DTYPE",
    /// Byte offset of the scales in a k-tile, for 8-bit operands.
    scale_offset: Typed "QG_SCALE_OFFSET",
    /// 1: W is E5M2; 0: E4M3.
    w_e5m2: Macro "QG_W_E5M2",
    /// 1: W has f32 scales that the main loop applies.
    w_block_scales: Typed "QG_W_BLOCK_SCALES",
    /// Rows of W that share a scale: 1 or 128.
    w_scale_rows: Typed "QG_W_SCALE_ROWS",
    /// 1: each row of W has a power-of-two scale (UE8M0) for 32 columns.
    w_powers: Macro "QG_W_POWERS",

    // Packing.
    /// Values of a block.
    block_len: Typed "QG_BLOCK_LEN",
    /// Bytes of a block.
    block_bytes: Typed "QG_BLOCK_BYTES",
    /// Code of zero bits (128 for signed bytes), flipped in every code.
    zero_code: Typed "QG_ZERO_CODE",
    /// K-tiles of the strip that a CTA packs.
    strip_k_tiles: Typed "QG_STRIP_K_TILES",
    /// 16-byte chunks of a row of the strip in shared memory.
    row_chunks: Typed "QG_ROW_CHUNKS",

    // Tiles of products.
    /// Tokens of a CTA's tile.
    tile_m: Typed "QG_TILE_M",
    /// Output features of a CTA's tile.
    tile_n: Typed "QG_TILE_N",
    /// Columns along K of a CTA's tile.
    tile_k: Typed "QG_TILE_K",
    /// Row tiles of a warp.
    row_tiles: Typed "QG_ROW_TILES",
    /// Warps side by side along tokens.
    warps_m: Typed "QG_WARPS_M",
    /// Warps side by side along features.
    warps_n: Typed "QG_WARPS_N",
    /// Groups of warps that share the K of a tile.
    k_groups: Typed "QG_K_GROUPS",
    /// Features of one `wgmma`.
    part_n: Typed "QG_PART_N",
    /// `wgmma` instructions side by side in a warpgroup.
    parts: Typed "QG_PARTS",
    /// Threads that hold the accumulators of a tile at its end.
    consumers: Typed "QG_CONSUMERS",
    /// CTAs of a cluster along M, which share a work tile; 1 without clusters.
    cluster: Macro "QG_CLUSTER",
    /// Stages of the ring in shared memory.
    stages: Typed "QG_STAGES",
    /// Stages of the ring of X, if W has another.
    x_stages: Typed "QG_X_STAGES",
    /// Stages of the ring of W, if X has another.
    w_stages: Typed "QG_W_STAGES",
    /// K-blocks of X in a stage.
    stage_k_blocks: Typed "QG_STAGE_K_BLOCKS",
    /// Bytes from one run of W's k-tiles in shared memory to the next;
    /// more than the run if runs keep their offset in a cache line.
    run_pitch: Typed "QG_RUN_PITCH",
    /// 1: W is copied in whole cache lines, for memory-bound kernels
    /// whose packed k-tiles are not whole lines.
    w_lines: Macro "QG_W_LINES",
    /// K-tiles of X in shared memory at once (`gemv`).
    x_k_tiles: Typed "QG_X_K_TILES",
    /// K-tiles of W that a warp loads at once (`gemv`).
    unroll: Typed "QG_UNROLL",
    /// K-blocks of X that shared memory holds; K has no more.
    x_blocks: Typed "QG_X_BLOCKS",
    /// Shared memory beside the rings and X, for bulk copies.
    fixed_bytes: Typed "QG_FIXED_BYTES",
    /// 8-token tiles that pass through a warp's shared memory
    /// together on the way to D.
    staged: Typed "QG_STAGED",

    // Arithmetic of products.
    /// Element type of X: 0 f32, 1 f16, 2 bf16.
    x_dtype: Macro "QG_X_DTYPE",
    /// 1: X is quantized and its planes follow the parameter.
    x_planes: Macro "QG_X_PLANES",
    /// 1: matrix instructions; 0: f32 FMA.
    use_mma: Macro "QG_USE_MMA",
    /// 1: integer codes are operands as stored, and offsets act on sums.
    integer_operands: Macro "QG_INTEGER_OPERANDS",
    /// 1: shared memory holds the operand pair of every pair of codes
    /// (`dequant/operand_table.cuh`).
    operand_table: Macro "QG_OPERAND_TABLE",
    /// 1: operands are codes minus zero points, and scales act on sums.
    code_sums: Macro "QG_CODE_SUMS",
    /// 1: weights are rounded to the type of X before the product.
    rounded: Typed "QG_ROUNDED",
    /// 1: the kernel multiplies signed bytes instead of FP8.
    integers: Macro "QG_INTEGERS",
    /// Bits of a code of X that instructions scale by blocks: 4 or 8;
    /// 0 in other products of 8-bit operands.
    x_bits: Macro "QG_X_BITS",
    /// 1: X has block scales that the main loop applies.
    x_block_scales: Typed "QG_X_BLOCK_SCALES",
    /// Rows of X in shared memory. Kernels for one token keep one; the
    /// other rows of the tile are copies.
    x_rows: Typed "QG_X_ROWS",
    /// 1: scheduler state waits in shared memory during the main loop.
    state_in_shared: Macro "QG_STATE_IN_SHARED",

    // Experts and output segments.
    /// 1: the product has experts (`sched/experts.cuh`).
    experts: Macro "QG_EXPERTS",
    /// 1: a CTA takes tiles of all experts in turn.
    expert_tiles: Macro "QG_EXPERT_TILES",
    /// 1: the kernel writes output segments (`sched/projection.cuh`)
    /// and may normalize X (`mainloop/normalized_x.cuh`).
    projection: Macro "QG_PROJECTION",
    /// 1: all of X stays in shared memory (`mainloop/resident_x.cuh`).
    resident_x: Macro "QG_RESIDENT_X",
    /// 1: CTAs take tiles of output segments in turn.
    segment_tiles: Macro "QG_SEGMENT_TILES",
    /// Output features of a tile of a projection.
    tile_features: Macro "QG_TILE_FEATURES",

    // Products of two matrices.
    /// Bytes of an element of A, for conditions.
    element_bytes: Macro "QG_ELEMENT_BYTES",
    /// Element type that is multiplied: 0 f32, 1 f16, 2 bf16.
    dtype: Typed "QG_DTYPE",
    /// Element type of A: 0 f32, 1 f16, 2 bf16, 3 E4M3.
    a_dtype: Typed "QG_A_DTYPE",
    /// Element type of B: 0 f32, 1 f16, 2 bf16, 3 E4M3.
    b_dtype: Typed "QG_B_DTYPE",
    /// Bytes of an element of A.
    a_bytes: Typed "QG_A_BYTES",
    /// Bytes of an element of B.
    b_bytes: Typed "QG_B_BYTES",
    /// 1: adjacent elements of A are along K.
    a_along_k: Typed "QG_A_ALONG_K",
    /// 1: adjacent elements of B are along K.
    b_along_k: Typed "QG_B_ALONG_K",
    /// 1: both factors have scales for 128 values along K.
    block_scaled: Macro "QG_BLOCK_SCALED",
    /// 1: a factor may have a tensor scale (E4M3).
    may_scale: Typed "QG_MAY_SCALE",
    /// 1: products may take parts of K.
    may_group_k: Typed "QG_MAY_GROUP_K",
    /// 1: products are groups of rows.
    groups_rows: Macro "QG_GROUPS_ROWS",

    // Attention.
    /// Format of keys and values: 0 f32, 1 f16, 2 bf16, 3 E4M3, 4 Q8_0, 5 Q4_0.
    kv: Typed "QG_KV",
    /// Format of values, numbered as `QG_KV` (`attention_simt`).
    v_kv: Typed "QG_V_KV",
    /// Type of Q (`attention_decode`, `kv_append`) or format of queries
    /// and keys (indexer), numbered as `QG_KV`.
    x: Typed "QG_X",
    /// Head dimension of keys, rounded up to the kernel's.
    qk: Typed "QG_QK",
    /// Head dimension of values, rounded up to the kernel's.
    v: Typed "QG_V",
    /// Rows of a CTA: queries, or in decode queries times query heads
    /// of a KV head.
    rows: Typed "QG_ROWS",
    /// Keys of a tile.
    keys: Typed "QG_KEYS",
    /// Keys of a warp's tile (`attention_decode`), or edge of the tile
    /// of the kernel that rounds to TF32.
    tile: Typed "QG_TILE",
    /// Slots of a warp's ring.
    slots: Typed "QG_SLOTS",
    /// Words of the workspace that count the CTAs of split-KV.
    counters: Typed "QG_COUNTERS",
    /// Lanes that hold a key.
    lanes: Typed "QG_LANES",
    /// Features of a lane that holds a part of a key: 8 or 16.
    lane_features: Typed "QG_LANE_FEATURES",
    /// Consumer warpgroups of 64 queries.
    warpgroups: Typed "QG_WARPGROUPS",
    /// 1: scores may be other than the product times a positive factor.
    bounded: Typed "QG_BOUNDED",
    /// 1: the kernel reads a bit mask.
    bits: Macro "QG_BITS",
    /// Paged keys: 1 pieces of pages by TMA, 2 rows by `cp.async`;
    /// 0: contiguous keys.
    pages: Macro "QG_PAGES",
    /// 1: CTAs that share queries and keys each have a slice of the
    /// value features.
    sliced: Typed "QG_SLICED",
    /// 1: a CTA takes two KV heads (Q4_0).
    pairs: Macro "QG_PAIRS",

    // Indexer.
    /// Head dimension.
    features: Typed "QG_FEATURES",
    /// Heads of a query, or of a stage.
    heads: Typed "QG_HEADS",
    /// Groups of columns in shared memory (indexer), or of eight columns
    /// that a thread keeps in registers (norm).
    groups: Typed "QG_GROUPS",
    /// Columns of a stage.
    stage_columns: Typed "QG_STAGE_COLUMNS",
    /// Most queries of a CTA.
    queries: Typed "QG_QUERIES",
    /// 1: keys are gathered while they are scored.
    gathers: Macro "QG_GATHERS",

    // Linear attention.
    /// 1: each feature of a key has its own decay.
    decay_features: Macro "QG_DECAY_FEATURES",

    // Norm, quantize, convert, routing, optimizer.
    /// CTAs that an SM should hold at once (norm).
    least_ctas: Typed "QG_LEAST_CTAS",
    /// Quantized type: 0 INT8, 1 E4M3, 2 E2M1.
    code: Typed "QG_CODE",
    /// Scale type: 0 none, 1 f32, 2 UE8M0, 3 E4M3.
    scale: Typed "QG_SCALE",
    /// Token factor: 0 none, 1 given, 2 computed for each token.
    factor: Typed "QG_FACTOR",
    /// Columns that share a scale. Without block scales 256 in `quantize`
    /// and `norm`, 0 in `dequantize`.
    block: Typed "QG_BLOCK",
    /// Columns that share a stored sum of codes; 0 without sums.
    sum_span: Typed "QG_SUM_SPAN",
    /// 1: a token of a quantized result has one scale.
    scale_of_token: Typed "QG_SCALE_OF_TOKEN",
    /// Element type of the result: 0 f32, 1 f16, 2 bf16.
    d_dtype: Typed "QG_D_DTYPE",
    /// 1: each row is multiplied by a power of two.
    row_factors: Typed "QG_ROW_FACTORS",
    /// 1: rows of D are aligned to 16 bytes and are whole groups of
    /// eight columns.
    whole_groups: Typed "QG_WHOLE_GROUPS",
    /// Experts that the router top-k is compiled for.
    routed_experts: Typed "QG_ROUTED_EXPERTS",
    /// Rows of 32 slots that a warp loads at once, to hide latency.
    rows_at_once: Typed "QG_ROWS_AT_ONCE",
    /// Flag bit of a shared expert.
    flag_shared: Typed "QG_FLAG_SHARED",
    /// Update rule: 0 AdamW, 1 SGD, 2 SGD with momentum.
    rule: Typed "QG_RULE",
}

impl Prelude<'_> {
    /// Base of the products that share `sched/params.cuh`: one
    /// product, one output, no cluster.
    pub const PRODUCT: Self = Self {
        experts: Some(0),
        expert_tiles: Some(0),
        projection: Some(0),
        operand_table: Some(0),
        resident_x: Some(0),
        segment_tiles: Some(0),
        cluster: Some(1),
        ..Self::EMPTY
    };
}
