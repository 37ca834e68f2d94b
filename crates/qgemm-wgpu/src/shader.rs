//! WGSL composition. A shader consists of named constants, the ABI, shared
//! parts, the weight's layout and encoding with `dequant/<stem>.wgsl`, X,
//! the epilogue, D, and the family's main loop.

mod texts;

use std::fmt::Write;

use qgemm_formats::{Encoding, Format, ScaleType, XParts};
use qgemm_hal::RoutingStep;
use qgemm_hal::op::routing::FLAG_SHARED;

use crate::families::gemm::TILE_ROWS;
use crate::families::kv_cache::KvNumbers;
use crate::families::{dequantize, modes};
use crate::template::expand;
use crate::weight_code::WeightCode;

use texts::{
    ABI, ACTIVATION, ATTENTION, ATTENTION_CODES, ATTENTION_COMBINE, ATTENTION_EXTRA, ATTENTION_EXTRA_IN_PLACE,
    ATTENTION_PLAIN, ATTENTION_ROW_END, CODEBOOK, CONVERT, CONVERT_PARAMS, DEQUANTIZE, E4M3, E5M2, EPILOGUE,
    EXPERTS_CHECK, EXPERTS_COMBINE, EXPERTS_GATHER, EXPERTS_PARAMS, EXPONENTIAL, GEMM_SUM, HALF_OF, HALVES,
    INDEXER_CHOOSE, INDEXER_PARAMS, INDEXER_SCORE, INTEGER, INTEGER_BYTES, KV_APPEND, KV_APPEND_BLOCKS,
    KV_APPEND_BYTES, KV_APPEND_CODES, KV_APPEND_ELEMENTS, KV_APPEND_FACTOR, KV_APPEND_HEADS, KV_APPEND_PLAIN, KV_CODES,
    MODES, NORM, NORM_D, NORM_D_PARAMS, NORM_PARAMS, NORM_PLANES, NORM_PLANES_PARAMS, NORM_WRITTEN, NUMBERS, OPERANDS,
    OPTIMIZER, PACKED, PARAMS, PART_OF_K, PLAIN, QUANTIZE_CODES, ROUTING_COUNT, ROUTING_LISTS, ROUTING_PARAMS,
    ROUTING_SCAN, ROUTING_SCATTER, ROUTING_TOP_K, ROWS_BESIDE, ROWS_OF_TILES, SCALE, SCALE_AND_MIN, STORE,
    STORE_VECTORS, STORE_WORDS, TWO_FACTORS, WHOLE_K, X,
};
pub(crate) use texts::{
    ATTENTION_TEXTS, CONVERT_TEXTS, DEQUANTIZE_TEXTS, ENTRY, EXPERTS_ENTRY, EXPERTS_TEXTS, INDEXER_TEXTS,
    KV_APPEND_TEXTS, MATMUL_TEXTS, NORM_TEXTS, OPTIMIZER_TEXTS, QUANTIZE_TEXTS, ROUTING_TEXTS, common_texts, dequant,
};

/// Workgroup memory in bytes that decoding a format needs.
pub(crate) fn table_bytes(format: Format) -> u32 {
    if matches!(format.encoding, Encoding::Codebook(_)) { 16 * 4 } else { 0 }
}

/// A shader's text, and its constants, for errors.
#[derive(Clone, Debug)]
pub(crate) struct Shader {
    pub source: String,
    pub prelude: String,
}

impl Shader {
    /// The shader with every operand declared writable, for buffers
    /// that are both read and written.
    pub fn writable(&self) -> Self {
        Self { source: self.source.replace("var<storage, read>", "var<storage, read_write>"), ..self.clone() }
    }
}

/// Rows of W, four at a time, that an invocation decodes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FourRows {
    /// Adjacent rows of a tile.
    Beside,
    /// One row of each of four tiles.
    OfTiles,
}

/// Output type of decoding.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Codes {
    /// f32.
    Numbers,
    /// INT8, four in a word; integer formats only.
    Bytes,
}

/// A family's part of a shader, for one config.
#[derive(Clone)]
pub(crate) struct Part {
    /// Directives that enable WGSL extensions.
    pub extensions: &'static str,
    pub rows: FourRows,
    pub codes: Codes,
    pub sources: Vec<&'static str>,
    /// Invocations of a workgroup.
    pub threads: u32,
    /// Constants beside `THREADS`.
    pub constants: Vec<(&'static str, u32)>,
}

/// A whole shader with entry point `main`. Of its operands only
/// the weight format is a constant. Types and the alignment of
/// X are checked at run time, because compiling a shader takes
/// half a second on software adapters.
pub(crate) fn compose(format: Format, code: &WeightCode, part: &Part) -> Shader {
    compose_with(PARAMS, &WITH_EPILOGUE, format, code, part)
}

/// The split-K shader. Each part begins at a
/// multiple of this many k-tiles.
pub(crate) fn compose_part_of_k(format: Format, code: &WeightCode, part: &Part) -> Shader {
    let mut part = part.clone();
    part.constants.push(("QUANTUM_K_TILES", quantum_k_tiles(code)));
    compose_with(PARAMS, &[PART_OF_K], format, code, &part)
}

/// The shader that reduces split-K partial sums to outputs.
pub(crate) fn compose_gemm_sum(threads: u32) -> Shader {
    let tile = ("TILE_ROWS", TILE_ROWS as u32);
    // No weight is read, so the k-tile constants are dummies.
    let prelude = prelude(&[("THREADS", threads), tile, ("PACKED_K", 1), ("PACKED_VECTORS", 1)]);
    let mut parts = vec![prelude.as_str(), ABI, PARAMS, MODES, NUMBERS];
    parts.extend([ACTIVATION, EPILOGUE, HALVES, STORE, GEMM_SUM]);
    Shader { source: parts.join("\n"), prelude }
}

/// K-tiles of a quantum: the longest block of columns
/// that share a factor of X.
fn quantum_k_tiles(code: &WeightCode) -> u32 {
    QUANTUM_COLUMNS.div_ceil(code.k_tile() as u32)
}

/// Epilogue: sums to outputs.
const WITH_EPILOGUE: [&str; 5] = [ACTIVATION, EPILOGUE, HALVES, STORE, WHOLE_K];

/// Columns of the longest block with one factor of X.
const QUANTUM_COLUMNS: u32 = 256;

/// The MoE GEMM shader; `part` has the MoE entry point.
pub(crate) fn compose_experts(format: Format, code: &WeightCode, part: &Part) -> Shader {
    compose_with(EXPERTS_PARAMS, &WITH_EPILOGUE, format, code, part)
}

/// A shader of these parts, for `threads` invocations a workgroup.
pub(crate) fn compose_parts(threads: u32, parts: &[&str]) -> Shader {
    let prelude = prelude(&[("THREADS", threads)]);
    let source = [&[prelude.as_str()], parts].concat().join("\n");
    Shader { source, prelude }
}

/// The index check shader.
pub(crate) fn compose_experts_check(threads: u32) -> Shader {
    compose_parts(threads, &[ABI, EXPERTS_CHECK])
}

/// The shader that gathers index and row factors.
pub(crate) fn compose_experts_gather(threads: u32) -> Shader {
    compose_parts(threads, &[EXPERTS_GATHER])
}

/// The combine shader.
pub(crate) fn compose_experts_combine(threads: u32) -> Shader {
    compose_parts(threads, &[ABI, NUMBERS, HALVES, STORE, EXPERTS_COMBINE])
}

fn compose_with(params: &'static str, ends: &[&'static str], format: Format, code: &WeightCode, part: &Part) -> Shader {
    let mut constants = code.constants();
    constants.push(("THREADS", part.threads));
    constants.extend_from_slice(&part.constants);
    let prelude = prelude(&constants);
    let declarations = code.declarations();
    let integer = match part.codes {
        Codes::Numbers => INTEGER,
        Codes::Bytes => INTEGER_BYTES,
    };
    let (encoding, scaling) = match format.encoding {
        Encoding::IntOffset { .. } | Encoding::IntAffine | Encoding::IntZero => (integer, SCALE_AND_MIN),
        Encoding::Plain(_) => (PLAIN, ""),
        Encoding::Codebook(_) => (CODEBOOK, scaling(format)),
        Encoding::E4M3 => (E4M3, scaling(format)),
        Encoding::E5M2 => (E5M2, scaling(format)),
    };
    let rows = match part.rows {
        FourRows::Beside => ROWS_BESIDE,
        FourRows::OfTiles => ROWS_OF_TILES,
    };
    let mut parts = vec![
        part.extensions,
        prelude.as_str(),
        ABI,
        params,
        MODES,
        NUMBERS,
        rows,
        PACKED,
        &declarations,
        encoding,
        scaling,
    ];
    parts.extend([dequant(format).unwrap_or_default(), X, OPERANDS]);
    parts.extend(ends);
    let expanded = expand(&part.sources.join("\n"), &constants, |span, quad, i| code.place(span, quad, i));
    parts.push(&expanded);
    Shader { source: parts.join("\n"), prelude }
}

/// The `convert` shader with `threads` invocations; `by_vectors`
/// when rows of D are whole vectors.
pub(crate) fn compose_convert(threads: u32, by_vectors: bool) -> Shader {
    let prelude = prelude(&[("THREADS", threads)]);
    let mut parts = vec![prelude.as_str(), ABI, CONVERT_PARAMS, MODES, NUMBERS, X, OPERANDS, HALVES];
    match by_vectors {
        true => parts.push(STORE_VECTORS),
        false => parts.extend([STORE, STORE_WORDS]),
    }
    parts.push(CONVERT);
    Shader { source: parts.join("\n"), prelude }
}

/// The `matmul` shader with these tile constants.
pub(crate) fn compose_matmul(constants: &[(&'static str, u32)]) -> Shader {
    let prelude = prelude(constants);
    let mut parts = vec![prelude.as_str()];
    parts.extend(MATMUL_TEXTS);
    Shader { source: parts.join("\n"), prelude }
}

/// The shader of a `routing` step with `threads` invocations.
/// [`RoutingStep::Lists`] is not used: counting, scanning and
/// writing are separate steps.
pub(crate) fn compose_routing(step: RoutingStep, threads: u32) -> Shader {
    let prelude = prelude(&[("THREADS", threads), ("FLAG_SHARED", FLAG_SHARED)]);
    let mut parts = vec![prelude.as_str(), ABI, ROUTING_PARAMS, NUMBERS];
    match step {
        RoutingStep::TopK => parts.extend([EXPONENTIAL, ROUTING_TOP_K]),
        RoutingStep::Count => parts.extend([ROUTING_LISTS, ROUTING_COUNT]),
        RoutingStep::Scan => parts.extend([ROUTING_LISTS, ROUTING_SCAN]),
        RoutingStep::Scatter | RoutingStep::Lists => parts.extend([ROUTING_LISTS, ROUTING_SCATTER]),
    }
    Shader { source: parts.join("\n"), prelude }
}

/// The `quantize` shader with `threads` invocations;
/// `format` describes the result.
pub(crate) fn compose_quantize(threads: u32, format: &[(&'static str, u32)]) -> Shader {
    let constants: Vec<_> = format.iter().copied().chain([("THREADS", threads)]).collect();
    let prelude = prelude(&constants);
    let mut parts = vec![prelude.as_str()];
    parts.extend(QUANTIZE_TEXTS);
    let source = parts.join("\n");
    Shader { source, prelude }
}

/// The `dequantize` shader for these planes, with `threads` invocations.
pub(crate) fn compose_dequantize(threads: u32, parts: &XParts) -> Shader {
    let constants: Vec<_> = dequantize::constants(parts).chain([("THREADS", threads)]).collect();
    let prelude = prelude(&constants);
    let source = [prelude.as_str(), ABI, NUMBERS, DEQUANTIZE].join("\n");
    Shader { source, prelude }
}

/// The `attention` shader with these constants, for keys and
/// values of which none or some are quantized. A mask has a separate buffer,
/// or uses the binding of an index.
pub(crate) fn compose_attention(
    words: &[(&'static str, u32)],
    choices: &[(&'static str, bool)],
    are_plain: bool,
    extra_has_buffer: bool,
) -> Shader {
    let extra = if extra_has_buffer { ATTENTION_EXTRA } else { ATTENTION_EXTRA_IN_PLACE };
    match are_plain {
        true => compose_chosen(words, choices, &[ATTENTION_PLAIN, extra, ATTENTION_ROW_END, ATTENTION]),
        false => compose_chosen(words, choices, &[KV_CODES, ATTENTION_CODES, extra, ATTENTION_ROW_END, ATTENTION]),
    }
}

/// The shader that combines partial results of `attention`.
pub(crate) fn compose_attention_combine(words: &[(&'static str, u32)], choices: &[(&'static str, bool)]) -> Shader {
    compose_chosen(words, choices, &[ATTENTION_ROW_END, ATTENTION_COMBINE])
}

/// The `kv_append` shader with these constants, for a
/// cache with this scaling, with or without whole heads in workgroups.
pub(crate) fn compose_kv_append(
    words: &[(&'static str, u32)],
    choices: &[(&'static str, bool)],
    numbers: KvNumbers,
    has_whole_heads: bool,
) -> Shader {
    let stores: &[&str] = match numbers {
        KvNumbers::Plain => &[KV_APPEND_ELEMENTS],
        KvNumbers::Factors => &[KV_CODES, KV_APPEND_FACTOR, KV_APPEND_BYTES],
        KvNumbers::Blocks => &[KV_CODES, KV_APPEND_BLOCKS, KV_APPEND_BYTES],
    };
    let main = match numbers {
        _ if has_whole_heads => KV_APPEND_HEADS,
        KvNumbers::Plain => KV_APPEND_PLAIN,
        KvNumbers::Factors | KvNumbers::Blocks => KV_APPEND_CODES,
    };
    compose_chosen(words, choices, &[&[KV_APPEND], stores, &[main]].concat())
}

/// The `indexer` shader with these constants: scoring,
/// or top-k if it `chooses`.
pub(crate) fn compose_indexer(
    words: &[(&'static str, u32)],
    choices: &[(&'static str, bool)],
    chooses: bool,
) -> Shader {
    let main = if chooses { INDEXER_CHOOSE } else { INDEXER_SCORE };
    compose_chosen(words, choices, &[INDEXER_PARAMS, main])
}

/// A shader of these constants and texts.
pub(crate) fn compose_chosen(
    words: &[(&'static str, u32)],
    choices: &[(&'static str, bool)],
    texts: &[&str],
) -> Shader {
    let words = words.iter().map(|(name, value)| format!("const {name}: u32 = {value}u;"));
    let choices = choices.iter().map(|(name, is_made)| format!("const {name}: bool = {is_made};"));
    let prelude = words.chain(choices).collect::<Vec<_>>().join("\n");
    Shader { source: [&[prelude.as_str(), NUMBERS], texts].concat().join("\n"), prelude }
}

/// The `norm` shader with `threads` invocations, whose rows cache
/// `kept` columns in workgroup memory.
pub(crate) fn compose_norm(threads: u32, kept: u32) -> Shader {
    let prelude = prelude(&[("THREADS", threads), ("KEPT", kept)]);
    let [sum, d] = ["sum", "d"].map(|written| NORM_WRITTEN.replace("TARGET", written));
    let source =
        [prelude.as_str(), ABI, NUMBERS, HALF_OF, NORM_PARAMS, NORM_D_PARAMS, &sum, &d, NORM, NORM_D].join("\n");
    Shader { source, prelude }
}

/// The `norm` shader with a quantized result; `format` describes it.
pub(crate) fn compose_norm_quantized(threads: u32, kept: u32, format: &[(&'static str, u32)]) -> Shader {
    let constants: Vec<_> = format.iter().copied().chain([("THREADS", threads), ("KEPT", kept)]).collect();
    let prelude = prelude(&constants);
    let sum = NORM_WRITTEN.replace("TARGET", "sum");
    let shared = [NORM_PARAMS, NORM_PLANES_PARAMS, QUANTIZE_CODES, &sum, NORM, NORM_PLANES].join("\n");
    Shader { source: [prelude.as_str(), ABI, NUMBERS, HALF_OF, &shared].join("\n"), prelude }
}

/// The `optimizer` shader with `threads` invocations, for this rule number.
pub(crate) fn compose_optimizer(threads: u32, rule: u32) -> Shader {
    let prelude = prelude(&[("THREADS", threads), ("RULE", rule)]);
    let copy = NORM_WRITTEN.replace("TARGET", "copy");
    let source = [prelude.as_str(), ABI, NUMBERS, HALF_OF, OPTIMIZER, &copy].join("\n");
    Shader { source, prelude }
}

fn prelude(constants: &[(&'static str, u32)]) -> String {
    constants.iter().copied().chain(modes::constants()).fold(String::new(), |mut text, (name, value)| {
        let _ = writeln!(text, "const {name}: u32 = {value}u;");
        text
    })
}

/// Scaling of non-integer values.
fn scaling(format: Format) -> &'static str {
    if format.float_scales.iter().any(|scale| scale.kind == ScaleType::E8M0) { TWO_FACTORS } else { SCALE }
}

#[cfg(test)]
mod tests {
    use super::texts::DEQUANT;
    use super::*;
    use crate::adapter::CooperativeMatrices;
    use crate::families::gemm::{gemv, gemv_int8, int8, matrix, simt};
    use crate::families::{experts, quantize};
    use qgemm_formats::XFormat;
    use wgpu::naga;

    fn validate(source: &str, what: &str) {
        let module = naga::front::wgsl::parse_str(source)
            .unwrap_or_else(|e| panic!("{what} does not parse:\n{}", e.emit_to_string(source)));
        use naga::valid::Capabilities;
        let capabilities = Capabilities::IMMEDIATES
            | Capabilities::SUBGROUP
            | Capabilities::SHADER_FLOAT16
            | Capabilities::COOPERATIVE_MATRIX;
        naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{what} is invalid:\n{}", e.emit_to_string(source)));
    }

    #[test]
    fn every_shader_is_valid() {
        let x_bytes = [gemv_int8::XBytes::Quantized, gemv_int8::XBytes::Given(32)];
        for (i, format) in Format::all().enumerate() {
            assert!(dequant(format).is_some(), "{format} has no dequant/{}.wgsl", format.dequant);
            let code = WeightCode::new(format).expect("has planes that shaders read");
            for (k, config) in gemv::CONFIGS.iter().enumerate() {
                // Alternates between adapters with and without subgroups.
                let part = gemv::part(config, &code, (i + k) % 2 == 0);
                validate(&compose(format, &code, &part).source, &format!("{config:?} with {format}"));
                validate(
                    &compose_part_of_k(format, &code, &part).source,
                    &format!("a part of {config:?} with {format}"),
                );
            }
            for (k, config) in gemv_int8::CONFIGS.iter().enumerate().filter(|_| gemv_int8::holds_bytes(format)) {
                let part = gemv_int8::part(config, format, x_bytes[k % 2], (i + k) % 2 == 0);
                validate(&compose(format, &code, &part).source, &format!("{config:?} with {format}"));
            }
            for config in int8::CONFIGS.iter().filter(|_| gemv_int8::holds_bytes(format)) {
                let part = int8::part(config, format, x_bytes[i % 2]);
                validate(
                    &compose_part_of_k(format, &code, &part).source,
                    &format!("a part of {config:?} with {format}"),
                );
                validate(&compose(format, &code, &part).source, &format!("{config:?} with {format}"));
            }
            for config in simt::CONFIGS {
                let part = simt::part(config);
                validate(
                    &compose_part_of_k(format, &code, &part).source,
                    &format!("a part of {config:?} with {format}"),
                );
                let shader = compose(format, &code, &part);
                validate(&shader.source, &format!("{config:?} with {format}"));
                validate(&shader.writable().source, &format!("{config:?} with {format} within a buffer"));
                assert!(!shader.writable().source.contains("<storage, read>"));
            }
            for (k, config) in matrix::CONFIGS.iter().enumerate() {
                // Alternates between all sizes of subgroups and matrices.
                let matrices =
                    [(16, 32), (8, 8), (16, 16), (8, 32)].map(|(side, lanes)| CooperativeMatrices { side, lanes });
                let part = matrix::part(config, matrices[(i + k) % 4]);
                validate(&compose(format, &code, &part).source, &format!("{config:?} with {format}"));
            }
        }
        for (i, format) in Format::all().enumerate() {
            let code = WeightCode::new(format).expect("has planes that shaders read");
            let configs = [gemv::CONFIGS[i % 6], simt::CONFIGS[i % 4]];
            for (config, part) in configs.iter().zip([gemv::part(&configs[0], &code, false), simt::part(&configs[1])]) {
                let part = experts::with_entry(part);
                validate(&compose_experts(format, &code, &part).source, &format!("experts, {config:?} with {format}"));
            }
            if !gemv_int8::holds_bytes(format) {
                continue;
            }
            let configs = [gemv_int8::CONFIGS[i % 6], int8::CONFIGS[i % 3]];
            for x in [gemv_int8::XBytes::Quantized, gemv_int8::XBytes::Given(32), gemv_int8::XBytes::Given(0)] {
                let parts = [gemv_int8::part(&configs[0], format, x, false), int8::part(&configs[1], format, x)];
                for part in parts.map(experts::with_entry) {
                    let source = compose_experts(format, &code, &part).source;
                    validate(&source, &format!("experts, {configs:?} with {format} by {x:?}"));
                }
            }
        }
        validate(&compose_gemm_sum(64).source, "the sums of parts");
        validate(&compose_gemm_sum(64).writable().source, "the sums of parts within a buffer");
        validate(&compose_experts_check(256).source, "the check of an index");
        validate(&compose_experts_gather(256).source, "an index beside factors");
        validate(&compose_experts_gather(256).writable().source, "an index beside factors within a buffer");
        validate(&compose_experts_combine(64).source, "the sums of slots");
        for by_vectors in [false, true] {
            let shader = compose_convert(256, by_vectors);
            validate(&shader.source, "a conversion");
            validate(&shader.writable().source, "a conversion within a buffer");
        }
        validate(&compose_matmul(&crate::families::matmul::CONSTANTS).source, "a product of two matrices");
        for shader in crate::families::kv_append::all_shaders() {
            validate(&shader.source, "appending to a cache");
        }
        for shader in crate::families::indexer::all_shaders() {
            validate(&shader.source, "an indexer");
        }
        for shader in crate::families::linear_attention::all_shaders() {
            validate(&shader.source, "linear attention");
            validate(&shader.writable().source, "linear attention within a buffer");
        }
        for shader in crate::families::attention::all_shaders() {
            validate(&shader.source, "an attention");
        }
        for (step, threads) in RoutingStep::ALL.map(|step| (step, if step == RoutingStep::TopK { 64 } else { 256 })) {
            validate(&compose_routing(step, threads).source, step.name());
        }
        for parts in XFormat::ALL.into_iter().filter_map(|format| format.parts(false, None)) {
            validate(&compose_quantize(64, &quantize::constants(&parts)).source, "quantizing");
            validate(&compose_dequantize(64, &parts).source, "dequantizing");
            let norm = compose_norm_quantized(256, 3328, &quantize::constants(&parts));
            validate(&norm.source, "a quantized norm");
            validate(&norm.writable().source, "a quantized norm within a buffer");
        }
        validate(&compose_norm(256, 3328).source, "a norm");
        for rule in 0..3 {
            validate(&compose_optimizer(64, rule).source, "an optimizer");
        }
    }

    #[test]
    fn every_snippet_belongs_to_a_format() {
        for (stem, _) in DEQUANT {
            assert!(Format::all().any(|f| f.dequant == *stem), "no format uses dequant/{stem}.wgsl");
        }
    }
}
