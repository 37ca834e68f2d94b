//! Families of `experts`: those of `gemm`, one expert after the other.
//! Scattered rows are gathered before and scattered after, which costs
//! little, so that each expert's weight is read once.

mod combine;
mod index;

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{
    CheckedExperts, CheckedGemm, Dense, Device, DeviceId, DeviceInfo, ExpertForm, ExpertOperand, ExpertsConfig,
    ExpertsPlan, Families, Family, Geometry, HalError, HostMemory, HostStream, Kernel, LaunchSequence, LaunchStep,
    Operand, Operands, Stream, Unsupported, XOperand, XPlanes,
};

use crate::families::gemm::{CpuGemm, GEMM, GEMM_INT8};
use crate::job::Parts;
use crate::operand::{absent, host_bytes};
use crate::source_hash::SOURCE_HASH;
use index::{Lists, ascending, counted};

/// Families of the CPU.
pub const FAMILIES: Families<CheckedExperts> = &[&EXPERTS, &EXPERTS_INT8];

static EXPERTS: ExpertsFamily = ExpertsFamily(&GEMM);
static EXPERTS_INT8: ExpertsFamily = ExpertsFamily(&GEMM_INT8);

/// MoE version of a `gemm` family.
#[derive(Debug)]
struct ExpertsFamily(&'static dyn Family<CheckedGemm>);

impl Family<CheckedExperts> for ExpertsFamily {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedExperts, info: &DeviceInfo) -> Result<Vec<ExpertsConfig>, Unsupported> {
        let tiles = self.0.configs(&CheckedGemm { m: op.mean_rows(), ..op.each.clone() }, info)?;
        let scratch = Scratch::of(op).ok_or_else(|| Unsupported::new("keeps more rows than memory has addresses"))?;
        let config =
            |tile| ExpertsConfig { tile, grouped: true, scratch_bytes: scratch.bytes, prefetches_early: false };
        Ok(tiles.into_iter().map(config).collect())
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, HalError> {
        let tile = &plan.config.tile;
        let too_large = HalError::Unsupported {
            device: device.info().id,
            what: op.kernel_name(tile.family),
            why: "it keeps more rows than memory has addresses".into(),
        };
        let kernel = CpuExperts {
            gemm: CpuGemm::of_config(device, &op.each, tile)?,
            scratch: Scratch::of(op).ok_or(too_large)?,
            plan: *plan,
            op: op.clone(),
        };
        let grid = [u32::try_from(op.experts).unwrap_or(u32::MAX), 1, 1];
        let geometry = Geometry { grid, threads: tile.threads, shared_bytes: 0 };
        let step = LaunchStep::new::<ExpertOperand>(plan.config.kernel_id(op), geometry, Arc::new(kernel));
        let step = step.of_operation().unbind(ExpertOperand::Products);
        Ok(LaunchSequence::new::<ExpertOperand>(op.kernel_name(tile.family), vec![step]))
    }

    fn source_hash(&self, _: &CheckedExperts, _: &ExpertsConfig) -> u64 {
        SOURCE_HASH
    }
}

/// Rows of an operand that are gathered by slot.
#[derive(Clone, Debug, Default)]
struct Gathered {
    bytes: Range<usize>,
    row_bytes: usize,
}

/// Scratch areas for gathered rows; empty except for
/// [`ExpertForm::Indexed`].
#[derive(Clone, Debug, Default)]
struct Scratch {
    lists: Range<usize>,
    x: Gathered,
    x_scales: Gathered,
    c: Gathered,
    residual: Gathered,
    token_scale: Gathered,
    d: Gathered,
    bytes: usize,
}

impl Scratch {
    /// `None` when the size overflows.
    fn of(op: &CheckedExperts) -> Option<Self> {
        let mut scratch = Self::default();
        if !matches!(op.form, ExpertForm::Indexed { .. }) {
            return Some(scratch);
        }
        let each = &op.each;
        scratch.lists = scratch.part(Lists::words(op).checked_mul(4)?)?;
        let [x_bytes, x_scale_bytes] = x_row_bytes(each)?;
        scratch.x = scratch.gathered(each.m, x_bytes, 1)?;
        if x_scale_bytes > 0 {
            scratch.x_scales = scratch.gathered(each.m, x_scale_bytes, 1)?;
        }
        if let Some(c) = &each.c {
            scratch.c = scratch.gathered(each.m, each.out_features, c.dtype.bytes())?;
        }
        if let Some(residual) = &each.residual {
            scratch.residual = scratch.gathered(each.m, each.out_features, residual.dtype.bytes())?;
        }
        if each.token_scale {
            scratch.token_scale = scratch.gathered(each.m, 1, 4)?;
        }
        scratch.d = scratch.gathered(each.m, each.out_features, each.d.dtype.bytes())?;
        Some(scratch)
    }

    fn part(&mut self, bytes: usize) -> Option<Range<usize>> {
        let start = self.bytes;
        let end = start.checked_add(bytes)?;
        self.bytes = end.checked_next_multiple_of(64)?;
        Some(start..end)
    }

    fn gathered(&mut self, rows: usize, columns: usize, width: usize) -> Option<Gathered> {
        let row_bytes = columns.checked_mul(width)?;
        Some(Gathered { bytes: self.part(rows.checked_mul(row_bytes)?)?, row_bytes })
    }
}

/// A product's loop for all experts.
struct CpuExperts {
    op: CheckedExperts,
    gemm: CpuGemm,
    scratch: Scratch,
    plan: ExpertsPlan,
}

impl std::fmt::Debug for CpuExperts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuExperts").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuExperts {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let op = self.op.of_portion(operands.portion());
        let mut job = Job::new(self, &op, operands)?;
        let mut done = Ok(());
        self.gemm.enter(&mut || done = job.run());
        done
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

/// Operands shared by all experts.
struct Read<'a> {
    x: &'a [u8],
    x_scales: &'a [u8],
    w: &'a [u8],
    row_scale: &'a [u8],
    k_order: &'a [u8],
    c: &'a [u8],
    bias: &'a [u8],
    token_scale: &'a [u8],
    residual: &'a [u8],
    index: &'a [u8],
    router_weights: &'a [u8],
}

/// A launch: the kernel with bound operands.
struct Job<'a> {
    kernel: &'a CpuExperts,
    /// The kernel's operation, or a portion of it.
    op: &'a CheckedExperts,
    read: Read<'a>,
    d: &'a mut [u8],
    status: &'a mut [u8],
    workspace: &'a mut [u8],
}

impl<'a> Job<'a> {
    fn new(kernel: &'a CpuExperts, op: &'a CheckedExperts, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use ExpertOperand as O;
        let mut written = |operand: O| match operands.take_mut(operand) {
            Some(view) => HostMemory::of_device_mut(DeviceId::CPU, view, operand.name()),
            None => Err(absent(operand.name(), 1)),
        };
        let d = written(O::D)?;
        let checks_index = kernel.op.checks_index;
        let status = if checks_index { written(O::Status)? } else { Default::default() };
        let has_workspace = kernel.plan.workspace_bytes > 0;
        let workspace = if has_workspace { written(O::Workspace)? } else { Default::default() };
        let mut read =
            |operand: O| operands.take(operand).map_or(Ok(Default::default()), |view| host_bytes(view, operand.name()));
        let read = Read {
            x: read(O::X)?,
            x_scales: read(O::XScales)?,
            w: read(O::W)?,
            row_scale: read(O::RowScale)?,
            k_order: read(O::KOrder)?,
            c: read(O::C)?,
            bias: read(O::Bias)?,
            token_scale: read(O::TokenScale)?,
            residual: read(O::Residual)?,
            index: read(O::Index)?,
            router_weights: read(O::RouterWeights)?,
        };
        let status_len = if checks_index { 8 } else { 0 };
        for (operand, bytes, len) in [(O::Index, read.index, op.index_len() * 4), (O::Status, &*status, status_len)] {
            if bytes.len() < len {
                return Err(HalError::OutOfBounds { what: operand.name(), start: 0, end: len, len: bytes.len() });
            }
        }
        Ok(Self { kernel, op, read, d, status, workspace })
    }

    fn run(&mut self) -> Result<(), HalError> {
        let op = self.op;
        let fault = match op.form {
            ExpertForm::Contiguous => {
                let index = self.read.index;
                for expert in 0..op.experts {
                    let rows = ascending(index, expert, op.each.m);
                    self.multiply_in_place(expert, rows)?;
                }
                index::offset_fault(index, op.experts, op.each.m)
            }
            ExpertForm::Masked { capacity } => {
                let index = self.read.index;
                for expert in 0..op.experts {
                    let first = expert * capacity;
                    self.multiply_in_place(expert, first..first + counted(index, expert, capacity))?;
                }
                index::count_fault(index, op.experts, capacity)
            }
            ExpertForm::Indexed { top_k, x_per_slot } => self.run_indexed(if x_per_slot { 1 } else { top_k })?,
            form => {
                let (what, why) =
                    (format!("experts with rows given as {form:?}"), "it has no code for them".to_owned());
                return Err(HalError::Unsupported { device: DeviceId::CPU, what, why });
            }
        };
        if op.checks_index {
            index::report(fault, &mut *self.status);
        }
        Ok(())
    }

    /// Multiplies rows that are contiguous in all operands.
    fn multiply_in_place(&mut self, expert: usize, rows: Range<usize>) -> Result<(), HalError> {
        if rows.is_empty() {
            return Ok(());
        }
        let (each, read) = (&self.kernel.op.each, &self.read);
        let first = rows.start;
        let own = CheckedGemm { m: rows.len(), ..each.clone() };
        let of = |bytes: &'a [u8], dense: Option<&Dense>| {
            dense.map_or(Default::default(), |dense| from_row(bytes, dense, first))
        };
        let [x_start, x_scales_start] = x_starts(each, first);
        let parts = Parts {
            x: read.x.get(x_start..).unwrap_or_default(),
            x_scales: read.x_scales.get(x_scales_start..).unwrap_or_default(),
            c: of(read.c, each.c.as_ref()),
            residual: of(read.residual, each.residual.as_ref()),
            token_scale: read.token_scale.get(first * 4..).unwrap_or_default(),
            d: self.d.get_mut(row_start(&each.d, first)..).unwrap_or_default(),
            ..self.kernel.of_expert(read, expert)
        };
        self.kernel.gemm.multiply(&own, parts)
    }

    /// Gathers each expert's rows, multiplies them, and scatters or combines
    /// the products. `slots_of_row` slots share a row of X.
    fn run_indexed(&mut self, slots_of_row: usize) -> Result<index::Fault, HalError> {
        let Self { kernel, op, read, d, workspace, .. } = self;
        let (op, each): (&CheckedExperts, &CheckedGemm) = (op, &op.each);
        let (products, scratch) = workspace.split_at_mut(kernel.plan.scratch.min(workspace.len()));
        let products = products.get_mut(kernel.plan.products..).unwrap_or_default();
        let mut scratch = Areas { rest: scratch, taken: 0 };
        let Scratch { lists, x, x_scales, c, residual, token_scale, d: gathered_d, .. } = &kernel.scratch;
        let lists = Lists::make(op, read.index, bytemuck::cast_slice_mut(scratch.take(lists)?));
        let x_row = |slot: usize| x_starts(each, slot / slots_of_row);
        let x_of = scratch.gather(x, lists.slots(), |slot| (read.x, x_row(slot)[0]))?;
        let x_scales_of = scratch.gather(x_scales, lists.slots(), |slot| (read.x_scales, x_row(slot)[1]))?;
        let c_of = scratch.gather(c, lists.slots(), |slot| (read.c, start_of(each.c.as_ref(), slot)))?;
        let residual_of =
            scratch.gather(residual, lists.slots(), |slot| (read.residual, start_of(each.residual.as_ref(), slot)))?;
        let token_scale_of = scratch.gather(token_scale, lists.slots(), |slot| (read.token_scale, slot * 4))?;
        let d_of = scratch.take(&gathered_d.bytes)?;
        for expert in 0..op.experts {
            let rows = lists.rows(expert);
            if rows.is_empty() {
                continue;
            }
            let part = |of: &Gathered| rows.start * of.row_bytes;
            let parts = Parts {
                x: &x_of[part(x)..],
                x_scales: &x_scales_of[part(x_scales)..],
                c: &c_of[part(c)..],
                residual: &residual_of[part(residual)..],
                token_scale: &token_scale_of[part(token_scale)..],
                d: &mut d_of[rows.start * gathered_d.row_bytes..],
                ..kernel.of_expert(read, expert)
            };
            let own = kernel.gathered_op(rows.len());
            kernel.gemm.multiply(&own, parts)?;
        }
        let (to, dense): (&mut [u8], Dense) = match &op.combine {
            None => (d, each.d),
            Some(_) => (&mut *products, each.d),
        };
        for (row, &slot) in lists.slots().iter().enumerate() {
            let start = row_start(&dense, slot as usize);
            let from = &d_of[row * gathered_d.row_bytes..(row + 1) * gathered_d.row_bytes];
            let to = to.get_mut(start..start + from.len());
            to.ok_or(absent(ExpertOperand::D.name(), start + from.len()))?.copy_from_slice(from);
        }
        let fault = index::id_fault(read.index, op);
        match op.combine {
            None => Ok(fault),
            Some(combine) => {
                let source = combine::Source {
                    products,
                    index: read.index,
                    weights: read.router_weights,
                    residual: read.residual,
                };
                let of_weights = combine::run(op, combine, &source, d)?;
                Ok(if fault.is_some() { fault } else { of_weights })
            }
        }
    }
}

impl CpuExperts {
    /// Operands specific to an expert.
    fn of_expert<'a>(&self, read: &Read<'a>, expert: usize) -> Parts<'a> {
        let (op, each, layout) = (&self.op, &self.op.each, self.gemm.layout());
        let expert = if op.row_pitch > 0 { expert } else { 0 };
        let of = |bytes: &'a [u8], each: usize| bytes.get(expert * each..).unwrap_or_default();
        Parts {
            w: of(read.w, layout.bytes(op.row_pitch, each.stored_k)),
            row_scale: of(read.row_scale, op.row_pitch * 4),
            k_order: of(read.k_order, layout.k_tiles(each.stored_k) * layout.k_tile * 4),
            bias: of(read.bias, each.bias.map_or(0, |dtype| each.bias_len() * dtype.bytes())),
            x: Default::default(),
            x_scales: Default::default(),
            c: Default::default(),
            token_scale: Default::default(),
            residual: Default::default(),
            d: Default::default(),
            others: Vec::new(),
        }
    }

    /// The product of `rows` contiguous gathered rows.
    fn gathered_op(&self, rows: usize) -> CheckedGemm {
        let each = self.gemm.op();
        let dense = |dense: &Dense| Dense::rows_of(dense.dtype, each.out_features);
        let x = match (&each.x.planes, each.x.dense()) {
            (Some(planes), _) => {
                let Scratch { x, x_scales, .. } = &self.scratch;
                let (codes_row, scales_row) = (x.row_bytes as u64, x_scales.row_bytes as u64);
                let planes = XPlanes { codes_row, scales_row, ..*planes };
                XOperand { planes: Some(planes), ..each.x }
            }
            (None, Some(x)) => Dense::rows_of(x.dtype, each.k).into(),
            (None, None) => each.x,
        };
        CheckedGemm {
            m: rows,
            x,
            d: dense(&each.d),
            c: each.c.as_ref().map(dense),
            residual: each.residual.as_ref().map(dense),
            ..each.clone()
        }
    }
}

/// Bytes of a row of X (or of its codes) and
/// of its scales; `None` on overflow.
fn x_row_bytes(each: &CheckedGemm) -> Option<[usize; 2]> {
    match (&each.x.planes, each.x.dense()) {
        (Some(planes), _) => Some([planes.parts.code_bytes(each.k), planes.parts.scale_bytes(each.k)]),
        (None, x) => Some([each.k.checked_mul(x?.dtype.bytes())?, 0]),
    }
}

/// Byte offsets of a row of X (or of its
/// codes) and of its scales.
fn x_starts(each: &CheckedGemm, row: usize) -> [usize; 2] {
    match &each.x.planes {
        Some(planes) => [planes.codes_row, planes.scales_row].map(|stride| row.saturating_mul(stride as usize)),
        None => [start_of(each.x.dense().as_ref(), row), 0],
    }
}

/// Byte offset of a row.
fn row_start(dense: &Dense, row: usize) -> usize {
    row * dense.row_stride as usize * dense.dtype.bytes()
}

fn start_of(dense: Option<&Dense>, row: usize) -> usize {
    dense.map_or(0, |dense| row_start(dense, row))
}

/// The bytes from a row on.
fn from_row<'a>(bytes: &'a [u8], dense: &Dense, row: usize) -> &'a [u8] {
    bytes.get(row_start(dense, row)..).unwrap_or_default()
}

/// Allocates areas of the scratch in order.
struct Areas<'a> {
    rest: &'a mut [u8],
    taken: usize,
}

impl<'a> Areas<'a> {
    /// The bytes `range` of the scratch. It must start at or
    /// after the end of the previous area.
    fn take(&mut self, range: &Range<usize>) -> Result<&'a mut [u8], HalError> {
        let what = ExpertOperand::Workspace.name();
        let (start, end) = (range.start - self.taken, range.end - self.taken);
        if end > self.rest.len() {
            return Err(HalError::OutOfBounds { what, start, end, len: self.rest.len() });
        }
        let (before, rest) = std::mem::take(&mut self.rest).split_at_mut(end);
        self.rest = rest;
        self.taken = range.end;
        Ok(&mut before[start..])
    }

    /// Gathers the rows of `slots` in order, each from the
    /// location given by `from`.
    fn gather<'b>(
        &mut self,
        to: &Gathered,
        slots: &[u32],
        from: impl Fn(usize) -> (&'b [u8], usize),
    ) -> Result<&'a [u8], HalError> {
        if to.row_bytes == 0 {
            return Ok(Default::default());
        }
        let out = self.take(&to.bytes)?;
        for (out, &slot) in out.chunks_exact_mut(to.row_bytes).zip(slots) {
            let (bytes, start) = from(slot as usize);
            let end = start + to.row_bytes;
            let what = ExpertOperand::X.name();
            out.copy_from_slice(bytes.get(start..end).ok_or(HalError::OutOfBounds {
                what,
                start,
                end,
                len: bytes.len(),
            })?);
        }
        Ok(out)
    }
}
