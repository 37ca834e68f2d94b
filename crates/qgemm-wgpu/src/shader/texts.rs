//! WGSL files, and which of them each operation uses.

use qgemm_formats::Format;

pub(super) const ABI: &str = include_str!("../../shaders/generated/abi.wgsl");
pub(super) const PARAMS: &str = include_str!("../../shaders/params.wgsl");
pub(super) const CONVERT_PARAMS: &str = include_str!("../../shaders/convert_params.wgsl");
pub(super) const MODES: &str = include_str!("../../shaders/modes.wgsl");
pub(super) const NUMBERS: &str = include_str!("../../shaders/numbers.wgsl");
pub(super) const ROWS_BESIDE: &str = include_str!("../../shaders/rows_beside.wgsl");
pub(super) const ROWS_OF_TILES: &str = include_str!("../../shaders/rows_of_tiles.wgsl");
pub(super) const PACKED: &str = include_str!("../../shaders/packed.wgsl");
pub(super) const INTEGER: &str = include_str!("../../shaders/encoding/integer.wgsl");
pub(super) const CODEBOOK: &str = include_str!("../../shaders/encoding/codebook.wgsl");
pub(super) const INTEGER_BYTES: &str = include_str!("../../shaders/encoding/integer_bytes.wgsl");
pub(super) const E4M3: &str = include_str!("../../shaders/encoding/e4m3.wgsl");
pub(super) const E5M2: &str = include_str!("../../shaders/encoding/e5m2.wgsl");
pub(super) const PLAIN: &str = include_str!("../../shaders/encoding/plain.wgsl");
pub(super) const SCALE: &str = include_str!("../../shaders/scaling/scale.wgsl");
pub(super) const TWO_FACTORS: &str = include_str!("../../shaders/scaling/two_factors.wgsl");
pub(super) const SCALE_AND_MIN: &str = include_str!("../../shaders/scaling/scale_and_min.wgsl");
pub(super) const X: &str = include_str!("../../shaders/x.wgsl");
pub(super) const OPERANDS: &str = include_str!("../../shaders/operands.wgsl");
pub(super) const ACTIVATION: &str = include_str!("../../shaders/activation.wgsl");
pub(super) const EPILOGUE: &str = include_str!("../../shaders/epilogue.wgsl");
pub(super) const WHOLE_K: &str = include_str!("../../shaders/whole_k.wgsl");
pub(super) const PART_OF_K: &str = include_str!("../../shaders/part_of_k.wgsl");
pub(super) const GEMM_SUM: &str = include_str!("../../shaders/gemm_sum.wgsl");
pub(super) const HALVES: &str = include_str!("../../shaders/halves.wgsl");
pub(super) const STORE: &str = include_str!("../../shaders/store.wgsl");
pub(super) const STORE_WORDS: &str = include_str!("../../shaders/store_words.wgsl");
pub(super) const STORE_VECTORS: &str = include_str!("../../shaders/store_vectors.wgsl");
pub(super) const EXPERTS_PARAMS: &str = include_str!("../../shaders/experts_params.wgsl");
pub(super) const EXPERTS_CHECK: &str = include_str!("../../shaders/experts_check.wgsl");
pub(super) const EXPERTS_GATHER: &str = include_str!("../../shaders/experts_gather.wgsl");
pub(super) const EXPERTS_COMBINE: &str = include_str!("../../shaders/experts_combine.wgsl");
/// MoE entry point.
pub(crate) const EXPERTS_ENTRY: &str = include_str!("../../shaders/experts_entry.wgsl");
/// Default entry point.
pub(crate) const ENTRY: &str = include_str!("../../shaders/entry.wgsl");
pub(super) const CONVERT: &str = include_str!("../../shaders/convert.wgsl");
pub(super) const MATMUL: &str = include_str!("../../shaders/matmul.wgsl");
pub(super) const MATMUL_PARAMS: &str = include_str!("../../shaders/matmul_params.wgsl");
pub(super) const ROUTING_PARAMS: &str = include_str!("../../shaders/routing_params.wgsl");
pub(super) const EXPONENTIAL: &str = include_str!("../../shaders/exponential.wgsl");
pub(super) const ROUTING_TOP_K: &str = include_str!("../../shaders/routing_top_k.wgsl");
pub(super) const ROUTING_LISTS: &str = include_str!("../../shaders/routing_lists.wgsl");
pub(super) const ROUTING_COUNT: &str = include_str!("../../shaders/routing_count.wgsl");
pub(super) const ROUTING_SCAN: &str = include_str!("../../shaders/routing_scan.wgsl");
pub(super) const ROUTING_SCATTER: &str = include_str!("../../shaders/routing_scatter.wgsl");
pub(super) const NORM_PARAMS: &str = include_str!("../../shaders/norm_params.wgsl");
pub(super) const NORM_D_PARAMS: &str = include_str!("../../shaders/norm_d_params.wgsl");
pub(super) const NORM_D: &str = include_str!("../../shaders/norm_d.wgsl");
pub(super) const NORM_PLANES_PARAMS: &str = include_str!("../../shaders/norm_planes_params.wgsl");
pub(super) const NORM_PLANES: &str = include_str!("../../shaders/norm_planes.wgsl");
pub(super) const HALF_OF: &str = include_str!("../../shaders/half_of.wgsl");
pub(super) const OPTIMIZER: &str = include_str!("../../shaders/optimizer.wgsl");
pub(super) const NORM_WRITTEN: &str = include_str!("../../shaders/norm_written.wgsl");
pub(super) const NORM: &str = include_str!("../../shaders/norm.wgsl");

pub(super) const QUANTIZE_PARAMS: &str = include_str!("../../shaders/quantize_params.wgsl");
pub(super) const QUANTIZE_CODES: &str = include_str!("../../shaders/quantize_codes.wgsl");
pub(super) const QUANTIZE: &str = include_str!("../../shaders/quantize.wgsl");

pub(super) const DEQUANTIZE: &str = include_str!("../../shaders/dequantize.wgsl");

pub(super) const KV_CODES: &str = include_str!("../../shaders/kv_codes.wgsl");
pub(super) const KV_APPEND: &str = include_str!("../../shaders/kv_append.wgsl");
pub(super) const KV_APPEND_ELEMENTS: &str = include_str!("../../shaders/kv_append_elements.wgsl");
pub(super) const KV_APPEND_PLAIN: &str = include_str!("../../shaders/kv_append_plain.wgsl");
pub(super) const KV_APPEND_BYTES: &str = include_str!("../../shaders/kv_append_bytes.wgsl");
pub(super) const KV_APPEND_CODES: &str = include_str!("../../shaders/kv_append_codes.wgsl");
pub(super) const KV_APPEND_FACTOR: &str = include_str!("../../shaders/kv_append_factor.wgsl");
pub(super) const KV_APPEND_BLOCKS: &str = include_str!("../../shaders/kv_append_blocks.wgsl");
pub(super) const KV_APPEND_HEADS: &str = include_str!("../../shaders/kv_append_heads.wgsl");
pub(super) const INDEXER_PARAMS: &str = include_str!("../../shaders/indexer_params.wgsl");
pub(super) const INDEXER_SCORE: &str = include_str!("../../shaders/indexer_score.wgsl");
pub(super) const INDEXER_CHOOSE: &str = include_str!("../../shaders/indexer_choose.wgsl");
pub(super) const ATTENTION: &str = include_str!("../../shaders/attention.wgsl");
pub(super) const ATTENTION_EXTRA: &str = include_str!("../../shaders/attention_extra.wgsl");
pub(super) const ATTENTION_EXTRA_IN_PLACE: &str = include_str!("../../shaders/attention_extra_in_place.wgsl");
pub(super) const ATTENTION_PLAIN: &str = include_str!("../../shaders/attention_plain.wgsl");
pub(super) const ATTENTION_CODES: &str = include_str!("../../shaders/attention_codes.wgsl");
pub(super) const ATTENTION_ROW_END: &str = include_str!("../../shaders/attention_row_end.wgsl");
pub(super) const ATTENTION_COMBINE: &str = include_str!("../../shaders/attention_combine.wgsl");

/// Texts shared by the product families.
pub(super) const COMMON: [&str; 25] = [
    ABI,
    PARAMS,
    MODES,
    NUMBERS,
    ROWS_BESIDE,
    ROWS_OF_TILES,
    PACKED,
    INTEGER,
    CODEBOOK,
    INTEGER_BYTES,
    E4M3,
    E5M2,
    PLAIN,
    SCALE,
    TWO_FACTORS,
    SCALE_AND_MIN,
    X,
    OPERANDS,
    ACTIVATION,
    EPILOGUE,
    HALVES,
    STORE,
    WHOLE_K,
    PART_OF_K,
    GEMM_SUM,
];

/// All texts of `convert`.
pub(crate) const CONVERT_TEXTS: [&str; 11] =
    [ABI, CONVERT_PARAMS, MODES, NUMBERS, X, OPERANDS, HALVES, STORE, STORE_WORDS, STORE_VECTORS, CONVERT];

/// Texts used only by MoE GEMM.
pub(crate) const EXPERTS_TEXTS: [&str; 5] =
    [EXPERTS_PARAMS, EXPERTS_ENTRY, EXPERTS_CHECK, EXPERTS_GATHER, EXPERTS_COMBINE];

/// All texts of `matmul`.
pub(crate) const MATMUL_TEXTS: [&str; 8] = [ABI, MATMUL_PARAMS, MODES, NUMBERS, ACTIVATION, HALVES, STORE, MATMUL];

/// All texts of `routing`.
pub(crate) const ROUTING_TEXTS: [&str; 9] = [
    ABI,
    ROUTING_PARAMS,
    NUMBERS,
    EXPONENTIAL,
    ROUTING_TOP_K,
    ROUTING_LISTS,
    ROUTING_COUNT,
    ROUTING_SCAN,
    ROUTING_SCATTER,
];

/// All texts of `quantize`.
pub(crate) const QUANTIZE_TEXTS: [&str; 8] =
    [ABI, QUANTIZE_PARAMS, MODES, NUMBERS, X, OPERANDS, QUANTIZE_CODES, QUANTIZE];

/// All texts of `dequantize`.
pub(crate) const DEQUANTIZE_TEXTS: [&str; 3] = [ABI, NUMBERS, DEQUANTIZE];

/// All texts of `attention`.
pub(crate) const ATTENTION_TEXTS: [&str; 9] = [
    NUMBERS,
    KV_CODES,
    ATTENTION_PLAIN,
    ATTENTION_CODES,
    ATTENTION_EXTRA,
    ATTENTION_EXTRA_IN_PLACE,
    ATTENTION_ROW_END,
    ATTENTION,
    ATTENTION_COMBINE,
];

/// All texts of `kv_append`.
pub(crate) const KV_APPEND_TEXTS: [&str; 10] = [
    NUMBERS,
    KV_APPEND,
    KV_APPEND_ELEMENTS,
    KV_APPEND_PLAIN,
    KV_CODES,
    KV_APPEND_FACTOR,
    KV_APPEND_BLOCKS,
    KV_APPEND_BYTES,
    KV_APPEND_CODES,
    KV_APPEND_HEADS,
];

/// All texts of `indexer`.
pub(crate) const INDEXER_TEXTS: [&str; 4] = [NUMBERS, INDEXER_PARAMS, INDEXER_SCORE, INDEXER_CHOOSE];

/// All texts of `norm`.
pub(crate) const NORM_TEXTS: [&str; 11] = [
    ABI,
    NUMBERS,
    HALF_OF,
    NORM_PARAMS,
    NORM_D_PARAMS,
    NORM_PLANES_PARAMS,
    QUANTIZE_CODES,
    NORM_WRITTEN,
    NORM,
    NORM_D,
    NORM_PLANES,
];

/// All texts of `optimizer`.
pub(crate) const OPTIMIZER_TEXTS: [&str; 5] = [ABI, NUMBERS, HALF_OF, NORM_WRITTEN, OPTIMIZER];

/// Texts shared by the product families, including those of all formats.
pub(crate) fn common_texts() -> impl Iterator<Item = &'static str> {
    COMMON.into_iter().chain(DEQUANT.iter().map(|(_, source)| *source))
}

macro_rules! snippets {
    ($($stem:literal)*) => {
        &[$(($stem, include_str!(concat!("../../shaders/dequant/", $stem, ".wgsl"))),)*]
    };
}

/// Stem and source of every dequantization snippet.
pub(super) static DEQUANT: &[(&str, &str)] = snippets![
    "f32" "f16" "bf16"
    "q4_0" "q4_1" "q5_0" "q5_1" "q8_0"
    "q2_k" "q3_k" "q4_k" "q5_k" "q6_k"
    "iq4_nl" "iq4_xs" "mxfp4" "nvfp4"
    "iq1_s" "iq1_m" "iq2" "iq3_xxs" "iq3_s" "q1_0" "ternary"
    "int2" "int3" "int4" "int8" "int8_channel" "affine_group" "centered_group"
    "fp8_e4m3" "fp8_e5m2" "fp8_e4m3_block128" "fp8_e5m2_block128" "mxfp8" "mxfp8_e5m2"
];

/// The snippet of a format, if any.
pub(crate) fn dequant(format: Format) -> Option<&'static str> {
    DEQUANT.iter().find(|(stem, _)| *stem == format.dequant).map(|(_, source)| *source)
}
