//! Dispatches: their limits, and recording the dispatches of a launch.

use bytemuck::Pod;
use qgemm_hal::{Dense, HalError, Unsupported};

use crate::bind_groups::bind_group;
use crate::pipeline::{Binding, Compiled, Interface};
use crate::shared::Shared;

/// Workgroups along one grid dimension that every adapter supports.
pub(super) const MAX_GROUPS: u32 = 65_535;

/// Maximum distance of a view's start from the adapter's offset alignment.
pub(super) const MARGIN: u64 = 1 << 8;

/// Rows of `columns` elements of `dense` that fit in a binding
/// of `limit` bytes. `name` is for errors.
pub(super) fn rows_that_fit(name: &str, dense: &Dense, columns: usize, limit: u64) -> Result<usize, Unsupported> {
    let width = dense.dtype.bytes() as u64;
    let row = (columns as u64 - 1).checked_mul(dense.col_stride).and_then(|last| (last + 1).checked_mul(width));
    let row = row.ok_or_else(|| Unsupported::new(format!("the extent of {name} overflows")))?;
    let room = limit.saturating_sub(MARGIN).checked_sub(row);
    let room = room.ok_or_else(|| too_large(&format!("a row of {name}"), row, limit))?;
    let stride = dense.row_stride.saturating_mul(width).max(1);
    Ok(usize::try_from(room / stride).unwrap_or(usize::MAX).saturating_add(1))
}

/// Refusal of an operand that exceeds a binding.
pub(super) fn too_large(what: &str, bytes: u64, limit: u64) -> Unsupported {
    let why = format!("{what} takes {bytes} bytes, and the adapter's max_storage_buffer_binding_size is {limit}");
    Unsupported::new(why)
}

/// A stride as u32. With `count` 1 it is unused and
/// becomes 0; otherwise checked extents bound it.
pub(super) fn stride(count: usize, stride: u64) -> u32 {
    if count > 1 { stride as u32 } else { 0 }
}

/// A dispatch with its bindings.
pub(super) struct Dispatch<'a, P> {
    pub params: P,
    /// In the order of the interface.
    pub bindings: Vec<wgpu::BufferBinding<'a>>,
    pub grid: [u32; 3],
}

/// Queues the dispatches of one launch. They are submitted at the
/// latest before other work. Everything is bound before anything is
/// recorded, so that an error in this launch does not spoil
/// the launches that it is recorded with.
pub(super) fn submit<P: Pod>(
    shared: &Shared,
    interface: &Interface,
    compiled: &Compiled,
    dispatches: &[Dispatch<'_, P>],
) -> Result<(), HalError> {
    let name = &compiled.name;
    let _span = tracing::trace_span!("launch", kernel = name).entered();
    let shares = dispatches.iter().any(|dispatch| reads_what_it_writes(interface, &dispatch.bindings));
    let how = if shares { Binding::OneBuffer } else { Binding::Apart };
    let pipeline = compiled.pipeline(shared, how)?;
    let bind = |dispatch: &Dispatch<'_, P>| bind_group(shared, interface, how, name, &dispatch.bindings);
    let groups = dispatches.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
    shared.scoped("launching a kernel", || {
        shared.launch(|pass| {
            pass.set_pipeline(pipeline);
            for (Dispatch { params, grid: [x, y, z], .. }, group) in dispatches.iter().zip(&groups) {
                pass.set_bind_group(0, group, &[]);
                pass.set_immediates(0, bytemuck::bytes_of(params));
                pass.dispatch_workgroups(*x, *y, *z);
            }
        });
    })
}

/// Whether a buffer is both read and written,
/// even in different ranges.
fn reads_what_it_writes(interface: &Interface, bindings: &[wgpu::BufferBinding<'_>]) -> bool {
    let of_kind = |written| {
        let all = interface.bindings().zip(bindings);
        all.filter(move |((_, is_written), _)| *is_written == written).map(|(_, binding)| binding.buffer)
    };
    of_kind(true).any(|written| of_kind(false).any(|read| read == written))
}
