//! `attention`: a workgroup processes queries of the heads that
//! share a KV head, over all keys.
//!
//! Few workgroups split the keys ([`split`]). Quantized KV caches leave
//! no storage buffer for the log-sum-exp, which then gets a separate
//! launch, nor for a mask, sinks or a gate. Those use the
//! binding of an index buffer that the attention has not.

pub(crate) mod combine;
mod kernel;
mod launch;
mod split;

use std::sync::{Arc, LazyLock};

use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionStep, CheckedAttention, Device, DeviceInfo, Families,
    Family, Geometry, HalError, LaunchSequence, LaunchStep, Math, Unsupported, WorkspaceLayout,
};

use self::kernel::{AttentionKernel, Params, shader, shared_bytes};
use self::launch::{
    NAME, THREADS, WORD, Writes, caches, columns, extra_bindings, gate_bytes, has_extra, kernel_id, row_groups, rows,
    token_bytes,
};
use self::split::Split;
use super::dispatch::{MARGIN, MAX_GROUPS, too_large};
use crate::device::shared_of;
use crate::pipeline::{Compiled, Interface};
use crate::shader::ATTENTION_TEXTS;
#[cfg(test)]
use crate::shader::Shader;
use crate::source_hash::hash_of;

/// wgpu families of `attention`.
pub(super) const FAMILIES: Families<CheckedAttention> = &[&Attention];

/// Kernel interface: the operands of `shaders/attention.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: NAME, bindings: "rrrrrrww", params_bytes: size_of::<Params>() as u32 };

/// Kernel interface with a mask, sinks or a gate.
pub(crate) const EXTRA_INTERFACE: Interface =
    Interface { name: "attention_extra", bindings: "rrrrrrwwr", params_bytes: size_of::<Params>() as u32 };

/// Kernel interface with a quantized KV cache: scales or factors use
/// the binding of the log-sum-exp.
pub(crate) const CODES_INTERFACE: Interface =
    Interface { name: "attention_codes", bindings: "rrrrrrwrr", params_bytes: size_of::<Params>() as u32 };

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(ATTENTION_TEXTS));

/// The kernel family.
#[derive(Debug)]
struct Attention;

/// Launches of `op` before a combine.
fn launches(op: &CheckedAttention, split: Option<Split>) -> &'static [Writes] {
    match (op.kv.are_plain(), op.lse) {
        _ if split.is_some() => &[Writes::Partial],
        (true, _) => &[Writes::All],
        (false, false) => &[Writes::Results],
        (false, true) => &[Writes::LogSumExp, Writes::Results],
    }
}

/// Kernel interface of `op`.
fn interface(op: &CheckedAttention, writes: Writes) -> &'static Interface {
    match (op.kv.are_plain(), has_extra(op, writes)) {
        (true, false) => &INTERFACE,
        (true, true) => &EXTRA_INTERFACE,
        (false, _) => &CODES_INTERFACE,
    }
}

/// Checks that the kernels support `op`.
fn check(op: &CheckedAttention, split: Option<Split>, limit: u64) -> Result<(), Unsupported> {
    let [k, v] = caches(op);
    k.check("K")?;
    v.check("V")?;
    let sizes = [
        ("Q", token_bytes(op, &op.q, op.qk_dim)),
        ("K", k.bytes()),
        ("V", v.bytes()),
        ("the result", token_bytes(op, &op.d, op.v_dim)),
        ("the block table", op.sequences * op.paging().width * WORD),
        ("the log-sum-exp", op.tokens * op.heads * WORD),
        ("the mask", op.mask_words() * WORD),
        ("the gate", gate_bytes(op)),
        ("partial results", split.map_or(0, |split| split.bytes(op))),
    ];
    for (name, bytes) in sizes {
        if bytes as u64 + MARGIN > limit {
            return Err(too_large(name, bytes as u64, limit));
        }
    }
    if split.is_some() && op.mask.is_some() && extra_bindings(op, Writes::Partial)[0].is_none() {
        return Err(Unsupported::new(
            "has no storage buffer for a mask beside a cache in codes, offsets of queries and a block table: give one of them up, \
             or keep keys and values as plain numbers",
        ));
    }
    let parts = split.map_or(1, |split| split.parts);
    let groups = [op.kv_heads, row_groups(op), parts].into_iter().try_fold(op.sequences, usize::checked_mul);
    let rows = [op.most_queries(), op.heads].into_iter().try_fold(op.sequences, usize::checked_mul);
    if groups.is_none_or(|groups| groups >= 1 << 31) || rows.is_none_or(|rows| split.is_some() && rows >= 1 << 31) {
        return Err(Unsupported::new("counts workgroups in 31 bits: attend to fewer sequences at once"));
    }
    Ok(())
}

impl Family<CheckedAttention> for Attention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        let split = Split::of(op, info);
        check(op, split, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![AttentionConfig {
            kernel: kernel_id(op, AttentionStep::Attend),
            launches: launches(op, split).len() as u32 + u32::from(split.is_some()),
            parts: split.map_or(1, |split| split.parts as u32),
            part_keys: split.map_or(op.most_keys, |split| split.part_keys) as u32,
            workspace_bytes: split.map_or(0, |split| split.workspace_bytes(op)),
            dequantized_bytes: 0,
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (300, 100),
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        _: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "an attention of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let split = Split::of(op, device.info());
        check(op, split, device.info().max_buffer_bytes).map_err(refused)?;
        let parts = split.map_or(1, |split| split.parts);
        let groups = (op.sequences * op.kv_heads * row_groups(op) * parts) as u32;
        let x = groups.min(MAX_GROUPS);
        let grid = [x, groups.div_ceil(x), 1];
        let geometry = Geometry { grid, threads: THREADS, shared_bytes: shared_bytes(rows(op), columns(op)) };
        let step = |&writes: &Writes| {
            use AttentionOperand as O;
            let interface = interface(op, writes);
            let compiled = Compiled::new(shared, interface, NAME.to_owned(), shader(op, writes, split))?;
            let id = kernel_id(
                op,
                if writes == Writes::LogSumExp { AttentionStep::LogSumExp } else { AttentionStep::Attend },
            );
            let kernel =
                AttentionKernel { compiled, interface, shared: shared.clone(), op: op.clone(), writes, split, grid };
            let step = LaunchStep::new::<O>(id, geometry, Arc::new(kernel)).of_operation();
            let unbound: &[O] = match writes {
                Writes::All => &[],
                Writes::Results => &[O::Lse],
                Writes::LogSumExp => &[O::V, O::VFactors, O::VScales, O::Gate, O::D],
                Writes::Partial => &[O::Sinks, O::Gate, O::Lse, O::Workspace],
            };
            let step = unbound.iter().fold(step, |step, &operand| step.unbind(operand));
            Ok(match split {
                Some(split) => step.bind_part(O::D, O::Workspace, WorkspaceLayout::RESERVED..split.workspace_bytes(op)),
                None => step,
            })
        };
        let mut steps = launches(op, split).iter().map(step).collect::<Result<Vec<_>, HalError>>()?;
        if let Some(split) = split {
            steps.push(combine::step(shared, op, split)?);
        }
        Ok(LaunchSequence::new::<AttentionOperand>(NAME, steps))
    }

    fn source_hash(&self, _: &CheckedAttention, _: &AttentionConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// Shaders of a plan with all options and with none, for
/// the test that all shaders are valid.
#[cfg(test)]
pub(crate) fn all_shaders() -> Vec<Shader> {
    use qgemm_formats::DType;
    use qgemm_hal::{HeadRows, KvAddressing, KvFormat, KvFormats, KvRows, MaskBits, QueryLengths};
    let rows = HeadRows { token_stride: 256, head_stride: 64, aligned: true };
    let plain = CheckedAttention {
        sequences: 2,
        tokens: 3,
        queries: QueryLengths::Offsets { most: 2 },
        most_keys: 64,
        places: KvAddressing::Offsets { rows: 100 },
        keys_ready: false,
        heads: 4,
        kv_heads: 2,
        qk_dim: 64,
        v_dim: 64,
        dtype: DType::F16,
        kv: KvFormat::Plain(DType::F16).into(),
        q: rows,
        k: KvRows { page_stride: 0, rows },
        v: KvRows { page_stride: 0, rows },
        d: rows,
        causal: false,
        window: None,
        mask: None,
        sinks: false,
        gate: None,
        scale: 0.125,
        soft_cap: None,
        lse: false,
        batch_invariant: false,
    };
    let table = KvAddressing::Table { pages: 9, page_size: 5, width: 3 };
    let chosen = CheckedAttention { places: table, causal: true, soft_cap: Some(30.0), lse: true, ..plain.clone() };
    let f32 = CheckedAttention {
        dtype: DType::F32,
        kv: KvFormat::Plain(DType::F32).into(),
        window: Some(9),
        ..plain.clone()
    };
    let codes =
        [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].map(|kv| CheckedAttention { kv: kv.into(), ..chosen.clone() });
    let formats = [KvFormat::Plain(DType::F16), KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0];
    let mixed = (0..4).map(|i| KvFormats { k: formats[i], v: formats[(i + 1) % 4] });
    let mixed: Vec<_> = mixed.map(|kv| CheckedAttention { kv, ..chosen.clone() }).collect();
    let masked = [&plain, &codes[0]].map(|op| CheckedAttention {
        queries: QueryLengths::Each(2),
        mask: Some(MaskBits::shared().per_head()),
        ..op.clone()
    });
    let with_sinks = [&plain, &codes[1], &masked[0]].map(|op| CheckedAttention {
        queries: QueryLengths::Each(2),
        sinks: true,
        ..op.clone()
    });
    let long = CheckedAttention { qk_dim: 512, v_dim: 512, ..chosen.clone() };
    let gated = [&plain, &f32, &with_sinks[1]].map(|op| CheckedAttention {
        places: KvAddressing::Pages { capacity: 64, lengths: false },
        gate: Some(rows),
        ..op.clone()
    });
    let all =
        [plain, chosen, f32, long].into_iter().chain(codes).chain(masked).chain(with_sinks).chain(gated).chain(mixed);
    let split = Split { parts: 3, part_keys: 64 };
    let of = |op: CheckedAttention| {
        let whole = launches(&op, None).iter().map(|&writes| shader(&op, writes, None));
        let parts = [shader(&op, Writes::Partial, Some(split)), combine::shader(&op, split)];
        whole.chain(parts).collect::<Vec<_>>()
    };
    all.flat_map(of).collect()
}
