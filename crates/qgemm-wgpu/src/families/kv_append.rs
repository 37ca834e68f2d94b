//! `kv_append`: separate kernels for queries, keys and values. An
//! invocation has a pair of features, or eight when it quantizes or
//! shares a head norm or a Hadamard rotation.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::op::kv_append::{hadamard_block, hadamard_scale};
use qgemm_hal::{
    Addressing, CheckedKvAppend, Device, DeviceInfo, Families, Family, Geometry, HalError, HeadRows, Kernel, KernelId,
    KvAddressing, KvAppendConfig, KvAppendLaunch, KvAppendOperand, KvAppendSpec, KvAppendStep, KvRows, LaunchSequence,
    LaunchStep, Operand, Operands, Operation, Paging, QueryLengths, RotaryAngles, RotaryPairs, Spec, Stream,
    Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, submit, too_large};
use super::kv_cache::{Cache, KvNumbers, kv_code};
use super::operands::{Bound, Touched};
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{KV_APPEND_TEXTS, Shader, compose_kv_append};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `kv_append`.
pub(super) const FAMILIES: Families<CheckedKvAppend> = &[&KvAppend];

/// Kernel interface: the operands of `shaders/kv_append.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: NAME, bindings: "rrrrrrrw", params_bytes: size_of::<Params>() as u32 };

/// Kernel interface of `shaders/kv_append_factor.wgsl`, with head factors.
pub(crate) const FACTOR_INTERFACE: Interface =
    Interface { name: "kv_append_factor", bindings: "rrrrrrrwr", params_bytes: size_of::<Params>() as u32 };

/// Kernel interface of `shaders/kv_append_blocks.wgsl`,
/// which writes block scales.
pub(crate) const BLOCKS_INTERFACE: Interface =
    Interface { name: "kv_append_blocks", bindings: "rrrrrrrww", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "kv_append";
/// Invocations of a workgroup.
const THREADS: u32 = 64;
/// Bytes of an offset, length, page number, position or angle.
const WORD: usize = 4;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(KV_APPEND_TEXTS));

/// `Params` of `shaders/kv_append.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    sequences: u32,
    tokens: u32,
    most_queries: u32,
    most_keys: u32,
    pages: u32,
    page_size: u32,
    table_width: u32,
    table_positions: u32,
    table_row: u32,
    amplitude: f32,
    sine_amplitude: f32,
    source_base: u32,
    written_base: u32,
    q_offsets_base: u32,
    kv_index_base: u32,
    block_table_base: u32,
    positions_base: u32,
    angles_base: u32,
    sines_or_gamma_base: u32,
    scales_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct KvAppend;

/// Operands of one of the kernels.
#[derive(Clone, Copy, Debug)]
struct Part {
    step: KvAppendStep,
    heads: usize,
    columns: usize,
    /// `None` when heads are rotated in place.
    source: Option<(KvAppendOperand, HeadRows)>,
    written: (KvAppendOperand, KvRows),
    is_rotated: bool,
    has_hadamard: bool,
    /// Gamma of the head norm, if there is one.
    gamma: Option<KvAppendOperand>,
    /// Output format.
    numbers: KvNumbers,
    /// Factors that are read, or scales that are written.
    scales: Option<KvAppendOperand>,
}

impl Part {
    /// Features of an invocation.
    fn features(&self) -> usize {
        if self.numbers == KvNumbers::Plain && !self.has_whole_heads() { 2 } else { 8 }
    }

    /// Whether workgroups have whole heads, whose features meet.
    fn has_whole_heads(&self) -> bool {
        self.has_hadamard || self.gamma.is_some()
    }

    /// Workgroups of a token.
    fn groups_of_token(&self) -> usize {
        let of_head = self.columns / self.features();
        match self.has_whole_heads() {
            true => self.heads.div_ceil(THREADS as usize / of_head),
            false => (self.heads * of_head).div_ceil(THREADS as usize),
        }
    }

    /// Bytes of workgroup memory.
    fn shared_bytes(&self) -> u32 {
        let extremes = if self.numbers == KvNumbers::Blocks { 8 } else { 0 };
        let features = if self.has_whole_heads() { 36 } else { 0 };
        THREADS * (extremes + features)
    }

    fn interface(&self) -> &'static Interface {
        match self.numbers {
            KvNumbers::Plain => &INTERFACE,
            KvNumbers::Factors => &FACTOR_INTERFACE,
            KvNumbers::Blocks => &BLOCKS_INTERFACE,
        }
    }
}

/// The kernels of `op`.
fn parts(op: &CheckedKvAppend) -> Vec<Part> {
    use KvAppendOperand as O;
    let rotated = op.rotary.is_some();
    let in_place = KvRows { page_stride: 0, rows: op.q };
    let numbers = KvNumbers::of(op.kv);
    let [k_scales, v_scales] = match numbers {
        KvNumbers::Plain => [None; 2],
        KvNumbers::Factors => [Some(O::KFactors), Some(O::VFactors)],
        KvNumbers::Blocks => [Some(O::KScales), Some(O::VScales)],
    };
    let heads = op.kv_heads;
    let of_keys = Part {
        step: KvAppendStep::K,
        heads,
        columns: op.qk_dim,
        source: Some((O::NewK, op.new_k)),
        written: (O::K, op.k),
        is_rotated: rotated,
        has_hadamard: op.rotate_k,
        gamma: op.head_norm.map(|_| O::KGamma),
        numbers,
        scales: k_scales,
    };
    let of_values = Part {
        step: KvAppendStep::V,
        heads,
        columns: op.v_dim,
        source: Some((O::NewV, op.new_v)),
        written: (O::V, op.v),
        is_rotated: false,
        has_hadamard: op.rotate_v,
        gamma: None,
        numbers,
        scales: v_scales,
    };
    let of_queries = Part {
        step: KvAppendStep::Q,
        heads: op.heads,
        columns: op.qk_dim,
        source: None,
        written: (O::Q, in_place),
        is_rotated: rotated,
        has_hadamard: op.rotate_k,
        gamma: op.head_norm.map(|_| O::QGamma),
        numbers: KvNumbers::Plain,
        scales: None,
    };
    let appended = [of_keys, of_values].into_iter().filter(|_| op.appends());
    appended.chain((op.heads > 0 && op.rotates_queries()).then_some(of_queries)).collect()
}

fn kernel_id(op: &CheckedKvAppend, step: KvAppendStep) -> KernelId {
    KernelId::new(NAME, None, Spec::KvAppend(KvAppendSpec { step, x: op.dtype, kv: op.kv }))
}

/// Bytes of the heads of all tokens.
fn token_bytes(op: &CheckedKvAppend, rows: &HeadRows, heads: usize, columns: usize) -> usize {
    let last = (op.addressing.tokens - 1) as u64 * rows.token_stride + (heads - 1) as u64 * rows.head_stride;
    (last as usize + columns) * op.dtype.bytes()
}

/// The cache that a kernel writes.
fn cache(op: &CheckedKvAppend, part: &Part) -> Cache {
    Cache::new(op.kv, part.heads, op.addressing.paging(), &part.written.1, part.columns)
}

/// Bytes that a kernel reads from its source, and
/// bytes that it writes.
fn part_bytes(op: &CheckedKvAppend, part: &Part) -> (usize, usize) {
    let source = part.source.map_or(0, |(_, rows)| token_bytes(op, &rows, part.heads, part.columns));
    let written = match part.source {
        Some(_) => cache(op, part).bytes(),
        None => token_bytes(op, &part.written.1.rows, part.heads, part.columns),
    };
    (source, written)
}

/// Bytes of the cosines (or sines), and of the frequencies.
fn angle_bytes(op: &CheckedKvAppend) -> (usize, usize) {
    let dim = op.rotary.map_or(0, |rotary| rotary.dim);
    match op.angles() {
        Some(RotaryAngles::Tables { positions, row_stride }) if positions > 0 => {
            (((positions - 1) * row_stride as usize + dim / 2) * WORD, 0)
        }
        Some(RotaryAngles::Frequencies) => (0, dim * WORD),
        _ => (0, 0),
    }
}

/// Checks that the kernels support `op`.
fn check(op: &CheckedKvAppend, limit: u64) -> Result<(), Unsupported> {
    let Addressing { sequences, tokens, .. } = op.addressing;
    // Kernels have no binding for gamma beside two tables.
    if op.head_norm.is_some() && matches!(op.angles(), Some(RotaryAngles::Tables { .. })) {
        let why = "normalizes heads if angles come from frequencies: with tables, run the norm before";
        return Err(Unsupported::new(why));
    }
    let mut sizes = vec![
        ("the block table", sequences * op.addressing.paging().width * WORD),
        ("the tables of angles", angle_bytes(op).0),
    ];
    for part in parts(op) {
        if part.source.is_some() {
            cache(op, &part).check(part.written.0.name())?;
        }
        let (source, written) = part_bytes(op, &part);
        sizes.push((part.source.map_or("nothing", |(operand, _)| operand.name()), source));
        sizes.push((part.written.0.name(), written));
        if part.groups_of_token().checked_mul(tokens).is_none_or(|groups| groups >= 1 << 31) {
            return Err(Unsupported::new("counts workgroups in 31 bits: append fewer tokens at once"));
        }
    }
    match sizes.into_iter().find(|(_, bytes)| *bytes as u64 + MARGIN > limit) {
        Some((name, bytes)) => Err(too_large(name, bytes as u64, limit)),
        None => Ok(()),
    }
}

impl Family<CheckedKvAppend> for KvAppend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedKvAppend, info: &DeviceInfo) -> Result<Vec<KvAppendConfig>, Unsupported> {
        check(op, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        let launches = parts(op).len() as u32;
        let first = if op.appends() { KvAppendStep::K } else { KvAppendStep::Q };
        Ok(vec![KvAppendConfig { kernel: kernel_id(op, first), launches, efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedKvAppend,
        _: &KvAppendLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "appending on the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        check(op, device.info().max_buffer_bytes).map_err(refused)?;
        let step = |part: Part| {
            let compiled = Compiled::new(shared, part.interface(), NAME.to_owned(), shader(op, &part))?;
            let groups = (part.groups_of_token() * op.addressing.tokens) as u32;
            let x = groups.min(MAX_GROUPS);
            let shared_bytes = part.shared_bytes();
            let geometry = Geometry { grid: [x, groups.div_ceil(x), 1], threads: THREADS, shared_bytes };
            let kernel = PartKernel { compiled, shared: shared.clone(), op: *op, part, grid: geometry.grid };
            let step = LaunchStep::new::<KvAppendOperand>(kernel_id(op, part.step), geometry, Arc::new(kernel));
            let others = |operand: &KvAppendOperand| {
                use KvAppendOperand as O;
                let of_one = [
                    O::Q,
                    O::NewK,
                    O::NewV,
                    O::K,
                    O::V,
                    O::KFactors,
                    O::VFactors,
                    O::KScales,
                    O::VScales,
                    O::QGamma,
                    O::KGamma,
                ];
                let own = [Some(part.written.0), part.source.map(|(source, _)| source), part.scales, part.gamma];
                !of_one.contains(operand) || own.contains(&Some(*operand))
            };
            Ok(step.bind_all(op.operands().into_iter().filter(others)))
        };
        let steps = parts(op).into_iter().map(step).collect::<Result<_, HalError>>()?;
        Ok(LaunchSequence::new::<KvAppendOperand>(format!("{NAME}_{}_{}", op.dtype, op.kv), steps))
    }

    fn source_hash(&self, _: &CheckedKvAppend, _: &KvAppendConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// The shader of a kernel. Values that differ between plans
/// of a model are parameters.
fn shader(op: &CheckedKvAppend, part: &Part) -> Shader {
    let written = if part.source.is_some() { kv_code(op.kv) } else { dtype_code(op.dtype) };
    let pairs = op.rotary.filter(|_| part.is_rotated).map_or(0, |rotary| rotary.dim / 2);
    let (source, to) = (part.source.map_or(part.written.1.rows, |(_, rows)| rows), part.written.1);
    let stride = |stride: u64| stride as u32;
    let block = hadamard_block(part.columns);
    let words = [
        ("THREADS", THREADS),
        ("STEP", u32::from(part.source.is_some())),
        ("GROUPS_A_TOKEN", part.groups_of_token() as u32),
        ("HEADS", part.heads as u32),
        ("COLUMNS", part.columns as u32),
        ("ROTARY_PAIRS", pairs as u32),
        ("HADAMARD_EIGHTS", (block / 8) as u32),
        ("HADAMARD_SCALE", hadamard_scale(block).to_bits()),
        ("EPS", op.head_norm.map_or(0, |norm| norm.eps.to_bits())),
        ("GAMMA_DTYPE", op.head_norm.map_or(0, |norm| dtype_code(norm.gamma))),
        ("DTYPE", dtype_code(op.dtype)),
        ("KV_DTYPE", written),
        ("SOURCE_TOKEN", stride(source.token_stride)),
        ("SOURCE_HEAD", stride(source.head_stride)),
        ("WRITTEN_PAGE", stride(to.page_stride)),
        ("WRITTEN_TOKEN", stride(to.rows.token_stride)),
        ("WRITTEN_HEAD", stride(to.rows.head_stride)),
    ];
    let Addressing { queries, places, .. } = op.addressing;
    let has_table = matches!(places, KvAddressing::Table { .. });
    let choices = [
        ("Q_OFFSETS", matches!(queries, QueryLengths::Offsets { .. })),
        ("KV_OFFSETS", matches!(places, KvAddressing::Offsets { .. })),
        ("KV_LENGTHS", has_table || matches!(places, KvAddressing::Pages { lengths: true, .. })),
        ("TABLE", has_table),
        ("POSITIONS", op.positions),
        ("TABLES", matches!(op.angles(), Some(RotaryAngles::Tables { .. }))),
        ("NORMED", part.gamma.is_some()),
        ("HADAMARD", part.has_hadamard),
        ("TURNS_LAST", op.turns_last()),
        ("INTERLEAVED", op.rotary.is_some_and(|rotary| rotary.pairs == RotaryPairs::Interleaved)),
    ];
    compose_kv_append(&words, &choices, part.numbers, part.has_whole_heads())
}

/// One of the kernels. A launch allocates no device memory.
#[derive(Debug)]
struct PartKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedKvAppend,
    part: Part,
    grid: [u32; 3],
}

impl PartKernel {
    fn dispatch<'a>(&'a self, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use KvAppendOperand as O;
        let Self { shared, op, part, .. } = self;
        let Addressing { sequences, tokens, most_keys, .. } = op.addressing;
        let Paging { pages, page_size, width } = op.addressing.paging();
        let (table_positions, table_row) = match op.angles() {
            Some(RotaryAngles::Tables { positions, row_stride }) => (positions as u32, row_stride as u32),
            _ => (0, 0),
        };
        let mut p = Params {
            sequences: sequences as u32,
            tokens: tokens as u32,
            most_queries: op.addressing.most_queries() as u32,
            most_keys: most_keys as u32,
            pages: pages as u32,
            page_size: page_size as u32,
            table_width: width as u32,
            table_positions,
            table_row,
            amplitude: op.rotary.map_or(1.0, |rotary| rotary.amplitude),
            sine_amplitude: op.rotary.map_or(1.0, |rotary| rotary.sine_amplitude()),
            ..Params::default()
        };
        let touched = |operand: O, bytes: Range<usize>, width: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        let given = op.operands();
        let words = |operand: O, bytes: usize| -> Result<Bound<'a>, HalError> {
            let is_used = given.contains(&operand);
            touched(operand, 0..if is_used { bytes } else { 0 }, WORD).bind(shared)
        };
        let by_offsets = matches!(op.addressing.places, KvAddressing::Offsets { .. });
        let (index, index_len) = if by_offsets { (O::KvOffsets, sequences + 1) } else { (O::KvLengths, sequences) };
        let (source_bytes, written_bytes) = part_bytes(op, part);
        let (table_bytes, frequency_bytes) = angle_bytes(op);
        let (angle_operand, angle_bytes) =
            if table_bytes > 0 { (O::Cos, table_bytes) } else { (O::Frequencies, frequency_bytes) };
        let (source, q_offsets, kv_index, block_table, positions, angles, sines_or_gamma, written);
        let read = part.source.map_or(O::NewK, |(operand, _)| operand);
        (source, p.source_base) = touched(read, 0..source_bytes, op.dtype.bytes()).bind(shared)?;
        (q_offsets, p.q_offsets_base) = words(O::QOffsets, (sequences + 1) * WORD)?;
        (kv_index, p.kv_index_base) = words(index, index_len * WORD)?;
        (block_table, p.block_table_base) = words(O::BlockTable, sequences * width * WORD)?;
        (positions, p.positions_base) = words(O::Positions, tokens * WORD)?;
        (angles, p.angles_base) = words(angle_operand, angle_bytes)?;
        (sines_or_gamma, p.sines_or_gamma_base) = match (part.gamma, op.head_norm) {
            (Some(gamma), Some(norm)) => {
                let width = norm.gamma.bytes();
                touched(gamma, 0..part.columns * width, width).bind(shared)?
            }
            _ => words(O::Sin, table_bytes)?,
        };
        let width = if part.source.is_some() { op.kv.width() } else { op.dtype.bytes() };
        (written, p.written_base) = touched(part.written.0, 0..written_bytes, width).bind_written(shared)?;
        let mut bindings = vec![source, q_offsets, kv_index, block_table, positions, angles, sines_or_gamma, written];
        if let Some(operand) = part.scales {
            let (bytes, width) = cache(op, part).scale_bytes();
            let scales = touched(operand, 0..bytes, width);
            let is_written = part.numbers == KvNumbers::Blocks;
            let (bound, base) = if is_written { scales.bind_written(shared)? } else { scales.bind(shared)? };
            p.scales_base = base;
            bindings.push(bound);
        }
        Ok(Dispatch { params: p, bindings, grid: self.grid })
    }
}

impl Kernel for PartKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatch = self.dispatch(&operands)?;
        submit(&self.shared, self.part.interface(), &self.compiled, &[dispatch])
    }
}

/// Shaders of plans with all options and with none, for the
/// test that all shaders are valid.
#[cfg(test)]
pub(crate) fn all_shaders() -> Vec<Shader> {
    use qgemm_formats::DType;
    use qgemm_hal::{CheckedRotary, HeadNorm, KvFormat};
    let rows = HeadRows { token_stride: 256, head_stride: 64, aligned: true };
    let cache = KvRows { page_stride: 1024, rows };
    let addressing = Addressing {
        sequences: 2,
        tokens: 3,
        queries: QueryLengths::Offsets { most: 2 },
        most_keys: 64,
        places: KvAddressing::Offsets { rows: 100 },
        keys_ready: false,
    };
    let plain = CheckedKvAppend {
        addressing,
        heads: 4,
        kv_heads: 2,
        qk_dim: 64,
        v_dim: 64,
        dtype: DType::F16,
        kv: KvFormat::Plain(DType::F16),
        q: rows,
        new_k: rows,
        new_v: rows,
        k: cache,
        v: cache,
        head_norm: None,
        rotary: None,
        rotate_k: false,
        rotate_v: false,
        positions: false,
    };
    let rotary = CheckedRotary {
        dim: 32,
        pairs: RotaryPairs::Interleaved,
        angles: RotaryAngles::Tables { positions: 9, row_stride: 16 },
        amplitude: 1.0,
        inverse: false,
    };
    let paged = Addressing { places: KvAddressing::Table { pages: 9, page_size: 5, width: 3 }, ..addressing };
    let chosen = CheckedKvAppend {
        addressing: paged,
        kv: KvFormat::Plain(DType::BF16),
        rotary: Some(rotary),
        positions: true,
        ..plain
    };
    let neox = CheckedRotary { pairs: RotaryPairs::Neox, angles: RotaryAngles::Frequencies, ..rotary };
    let rotated = CheckedKvAppend { rotary: Some(neox), dtype: DType::F32, ..plain };
    let codes = [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].map(|kv| CheckedKvAppend { kv, ..chosen });
    let last = CheckedRotary { inverse: true, ..neox };
    let of_heads = [DType::F32, DType::BF16]
        .map(|gamma| CheckedKvAppend { head_norm: Some(HeadNorm { eps: 1e-6, gamma }), ..rotated });
    let hadamard = [plain, chosen, rotated, CheckedKvAppend { rotary: Some(last), ..plain }].into_iter().chain(codes);
    let hadamard: Vec<_> = hadamard.map(|op| CheckedKvAppend { rotate_k: true, rotate_v: true, ..op }).collect();
    [plain, chosen, rotated]
        .iter()
        .chain(&codes)
        .chain(&hadamard)
        .chain(&of_heads)
        .flat_map(|op| parts(op).into_iter().map(|part| shader(op, &part)))
        .collect()
}
