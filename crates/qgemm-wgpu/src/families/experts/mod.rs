//! `experts`: MoE GEMM. Kernels of `gemm` whose workgroups find their rows
//! and expert in an index; an index check; a gather of
//! index and row factors into one buffer; and a combine kernel.

mod extents;
mod kernel;

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use qgemm_hal::{
    CheckedExperts, CheckedGemm, Device, DeviceInfo, ExpertForm, ExpertOperand, ExpertsConfig, ExpertsPlan, Families,
    Family, Geometry, HalError, LaunchSequence, LaunchStep, ListedSlots, TileConfig, Unsupported,
};

use super::dispatch::{MARGIN, MAX_GROUPS, too_large};
use super::gemm::gemv_int8::{self, XBytes, of_quantized_x};
use super::gemm::{gemv, int8, of_plain_x, simt, source_hash, weight_code};
use super::routing::{list_steps, list_workspace_bytes};
use crate::device::shared_of;
use crate::pipeline::Compiled;
use crate::shader::{
    self, ENTRY, EXPERTS_ENTRY, EXPERTS_TEXTS, Part, Shader, compose_experts_check, compose_experts_combine,
    compose_experts_gather,
};
use crate::weight_code::{CLASS, WeightCode};
use extents::{Extents, added_c, bound_experts};
pub(crate) use kernel::{CHECK_INTERFACE, COMBINE_INTERFACE, GATHER_INTERFACE, INTERFACE};
use kernel::{ExpertsKernel, What};

/// wgpu families of `experts`.
pub(super) const FAMILIES: Families<CheckedExperts> =
    &[&ExpertsFamily::GemvInt8, &ExpertsFamily::Gemv, &ExpertsFamily::GemmInt8, &ExpertsFamily::Gemm];

/// Invocations of a workgroup: index check, gather, combine.
const CHECK_THREADS: u32 = 256;
const GATHER_THREADS: u32 = 256;
const COMBINE_THREADS: u32 = 64;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| {
    let of_bytes = *gemv_int8::SOURCE_HASH ^ int8::SOURCE_HASH.rotate_left(1);
    source_hash(&[&EXPERTS_TEXTS[..], &simt::SOURCES[..]].concat()) ^ *gemv::SOURCE_HASH ^ of_bytes
});

/// Adds the MoE entry point to `part`.
pub(crate) fn with_entry(mut part: Part) -> Part {
    part.sources.iter_mut().filter(|source| **source == ENTRY).for_each(|source| *source = EXPERTS_ENTRY);
    part
}

/// An MoE family: the main loop of a `gemm` family.
#[derive(Debug)]
enum ExpertsFamily {
    /// For experts with few rows.
    Gemv,
    /// For experts with few rows, in INT8.
    GemvInt8,
    /// For any number of rows.
    Gemm,
    /// For any number of rows, in INT8.
    GemmInt8,
}

impl ExpertsFamily {
    /// The kernel of a config; `None` when it does not
    /// support the format of X.
    fn part(&self, config: &TileConfig, each: &CheckedGemm, code: &WeightCode) -> Option<Part> {
        Some(with_entry(match self {
            ExpertsFamily::Gemv => gemv::part(config, code, false),
            ExpertsFamily::GemvInt8 => gemv_int8::part(config, each.format, XBytes::of(each)?, false),
            ExpertsFamily::Gemm => simt::part(config),
            ExpertsFamily::GemmInt8 => int8::part(config, each.format, XBytes::of(each)?),
        }))
    }
}

impl Family<CheckedExperts> for ExpertsFamily {
    fn name(&self) -> &'static str {
        match self {
            ExpertsFamily::Gemv => "gemv",
            ExpertsFamily::GemvInt8 => "gemv_int8",
            ExpertsFamily::Gemm => "gemm",
            ExpertsFamily::GemmInt8 => "gemm_int8",
        }
    }

    fn configs(&self, op: &CheckedExperts, info: &DeviceInfo) -> Result<Vec<ExpertsConfig>, Unsupported> {
        check(op, info)?;
        let typical = CheckedGemm { m: op.mean_rows(), ..op.each.clone() };
        let tiles: Vec<TileConfig> = match self {
            ExpertsFamily::Gemv => {
                gemv::check_tokens(&typical)?;
                of_plain_x(&op.each, gemv::fitting(gemv::CONFIGS, &typical, info))?.collect()
            }
            ExpertsFamily::GemvInt8 => {
                gemv::check_tokens(&typical)?;
                of_quantized_x(&op.each, gemv::fitting(gemv_int8::CONFIGS, &typical, info))?.collect()
            }
            ExpertsFamily::Gemm => of_plain_x(&op.each, simt::fitting(&typical, info))?.collect(),
            ExpertsFamily::GemmInt8 => of_quantized_x(&op.each, int8::fitting(info))?.collect(),
        };
        if tiles.is_empty() {
            return Err(Unsupported::new(format!("{} bytes of workgroup memory are too few", info.shared_bytes)));
        }
        let indexed = matches!(op.form, ExpertForm::Indexed { .. });
        let lists = match op.lists {
            true => Some(0),
            false => listed_slots(op, info).map(|listed| listed.bytes()),
        };
        let config = |tile: TileConfig, grouped: bool, lists: usize| {
            let scratch_bytes = gathered(op, grouped, lists).map_or(lists, |gathered| gathered.end);
            ExpertsConfig { tile, grouped, scratch_bytes, prefetches_early: false }
        };
        let configs_of = |tile: TileConfig| {
            let by_expert = if indexed { lists } else { Some(0) };
            let by_expert = by_expert.map(|lists| config(tile, true, lists));
            let by_slot = indexed.then(|| config(tile, false, 0));
            by_slot.into_iter().chain(by_expert)
        };
        Ok(tiles.into_iter().flat_map(configs_of).collect())
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, HalError> {
        use ExpertOperand as O;
        let shared = shared_of(device, "a plan of the wgpu backend")?;
        let config = plan.config.tile;
        let name = op.kernel_name(config.family);
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: name.clone(), why: reason.why };
        check(op, device.info()).map_err(refused)?;
        let code = weight_code(&op.each).map_err(refused)?;
        let part = self.part(&config, &op.each, &code).ok_or_else(|| {
            refused(Unsupported::new(format!("multiplies signed bytes, and X is in {}", op.each.x.format)))
        })?;
        let compiled = |interface, name: &str, shader: Shader| -> Result<Compiled, HalError> {
            Compiled::new(shared, interface, name.to_owned(), shader)
        };
        let id = plan.config.kernel_id(op);
        let grouped = plan.config.grouped && matches!(op.form, ExpertForm::Indexed { .. });
        let extents = Extents::of(op, &code).map_err(refused)?;
        let kernel = |what: What, compiled: Compiled, grid: [u32; 3], threads: u32| {
            let geometry = Geometry { grid, threads, shared_bytes: config.shared_bytes };
            let kernel = ExpertsKernel {
                what,
                compiled,
                shared: shared.clone(),
                op: op.clone(),
                extents,
                grid,
                grouped,
                bound_experts: bound_experts(op, &extents, device.info().max_buffer_bytes),
            };
            LaunchStep::new::<O>(id, geometry, Arc::new(kernel)).of_operation().unbind(O::Workspace)
        };
        let products = plan.products..plan.products + plan.product_bytes;
        let mut listing = Vec::new();
        let mut lists = None;
        let mut scratch = 0;
        if grouped && !op.lists {
            let listed = listed_slots(op, device.info()).filter(|listed| listed.bytes() <= plan.config.scratch_bytes);
            let listed = listed.ok_or_else(|| refused(Unsupported::new("the plan has no room for lists of slots")))?;
            let steps = list_steps(shared, &listed.routing, device.info())?;
            listing.extend(steps.into_iter().map(|step| listed.bound(step, plan)));
            lists = Some(listed.in_workspace(plan));
            scratch = listed.bytes();
        }

        let check = compiled(&CHECK_INTERFACE, "experts_check", compose_experts_check(CHECK_THREADS))?;
        let check = kernel(What::Check, check, [1, 1, 1], CHECK_THREADS).unbind(O::Products);
        let threads = part.threads;
        let product = compiled(&INTERFACE, &name, shader::compose_experts(op.each.format, &code, &part))?;
        let mut product =
            kernel(What::Product, product, product_grid(op, &config, grouped), threads).unbind(O::Products);
        if let Some(gathered) = gathered(op, grouped, scratch) {
            if gathered.end > plan.config.scratch_bytes {
                return Err(refused(Unsupported::new("the plan has no room for the index beside the row factors")));
            }
            let part = plan.scratch + gathered.start..plan.scratch + gathered.end;
            let [x, y] = two_dimensions((gathered.len() / 4).div_ceil(GATHER_THREADS as usize));
            let gather = compiled(&GATHER_INTERFACE, "experts_gather", compose_experts_gather(GATHER_THREADS))?;
            let gather = kernel(What::Gather, gather, [x, y, 1], GATHER_THREADS).unbind(O::Products);
            let gather = lists.iter().fold(gather, |step, lists| step.bind_part(O::Lists, O::Workspace, lists.clone()));
            listing.push(gather.bind_part(O::Workspace, O::Workspace, part.clone()));
            product = product.bind_part(O::TokenScale, O::Workspace, part);
        } else if let Some(lists) = lists {
            product = product.bind_part(O::Lists, O::Workspace, lists);
        }
        let mut steps = if op.checks_index { vec![check] } else { Vec::new() };
        steps.extend(listing);
        if op.combine.is_none() {
            steps.push(product);
        } else {
            // The combine step adds the residual.
            product = product.unbind(O::Residual).bind_part(O::D, O::Workspace, products.clone());
            let combine = compiled(&COMBINE_INTERFACE, "experts_combine", compose_experts_combine(COMBINE_THREADS))?;
            let combine = kernel(What::Combine, combine, combine_grid(op), COMBINE_THREADS);
            steps.extend([product, combine.bind_part(O::Products, O::Workspace, products)]);
        }
        Ok(LaunchSequence::new::<O>(name, steps))
    }

    fn source_hash(&self, _: &CheckedExperts, _: &ExpertsConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// The list step.
fn listed_slots(op: &CheckedExperts, info: &DeviceInfo) -> Option<ListedSlots> {
    let mut bytes = Ok(0);
    let listed = ListedSlots::of(op, |routing| {
        bytes = list_workspace_bytes(routing, info);
        *bytes.as_ref().unwrap_or(&0)
    });
    // Lists that exceed a binding are not supported.
    listed.filter(|_| bytes.is_ok())
}

/// Region with the index and the row factors, after `before` bytes
/// of scratch. It is used when products add C and have
/// row factors, because kernels lack a binding then.
fn gathered(op: &CheckedExperts, grouped: bool, before: usize) -> Option<Range<usize>> {
    if added_c(&op.each).is_none() || !op.each.token_scale {
        return None;
    }
    let index = match op.form {
        ExpertForm::Indexed { .. } if grouped => op.list_parts()?[1].end,
        _ => op.index_len().checked_mul(4)?,
    };
    let start = before.checked_next_multiple_of(MARGIN as usize)?;
    Some(start..start.checked_add(index)?.checked_add(op.each.m.checked_mul(4)?)?)
}

/// Checks that the kernels support `op`.
fn check(op: &CheckedExperts, info: &DeviceInfo) -> Result<(), Unsupported> {
    let each = &op.each;
    if each.class != CLASS {
        return Err(Unsupported::new(format!("reads weights packed as {CLASS:?}, and these are {:?}", each.class)));
    }
    let code = weight_code(each)?;
    let sizes = [
        ("rows", each.m),
        ("stored rows", op.experts.saturating_mul(op.row_pitch)),
        ("columns", each.k.max(each.stored_k)),
    ];
    for (name, size) in sizes {
        if size >= 1 << 31 {
            return Err(Unsupported::new(format!("there are {size} {name}, and kernels count in 31 bits")));
        }
    }
    if each.stored_rows.div_ceil(LEAST_TILE_N) > MAX_GROUPS as usize {
        return Err(Unsupported::new(format!("{} rows of W are too many for a grid", each.stored_rows)));
    }
    let limit = info.max_buffer_bytes;
    let gathered = gathered(op, true, 0).map_or(0, |gathered| gathered.len() as u64);
    if gathered + MARGIN > limit {
        return Err(too_large("the index with the row factors", gathered, limit));
    }
    for (what, bytes) in Extents::of(op, &code)?.all() {
        if bytes as u64 + MARGIN > limit {
            return Err(too_large(what, bytes as u64, limit));
        }
    }
    Ok(())
}

/// Smallest N tile.
const LEAST_TILE_N: usize = 64;

/// Grid: W tiles along x, and the maximum of
/// row tiles along y and z.
fn product_grid(op: &CheckedExperts, config: &TileConfig, grouped: bool) -> [u32; 3] {
    let (m, tile_m) = (op.each.m, config.tile_m as usize);
    let places = match op.form {
        ExpertForm::Indexed { .. } if !grouped => m,
        ExpertForm::Masked { capacity } => op.experts * capacity.div_ceil(tile_m),
        // Each expert with rows may have a partial tile.
        _ => (m + op.experts.min(m) * (tile_m - 1)) / tile_m,
    };
    let [y, z] = two_dimensions(places);
    [(op.each.stored_rows as u32).div_ceil(config.tile_n), y, z]
}

fn combine_grid(op: &CheckedExperts) -> [u32; 3] {
    let [y, z] = two_dimensions(op.tokens());
    [(op.each.out_features as u32).div_ceil(4).div_ceil(COMBINE_THREADS), y, z]
}

/// At least `count` workgroups.
fn two_dimensions(count: usize) -> [u32; 2] {
    let y = count.clamp(1, MAX_GROUPS as usize);
    [y as u32, count.div_ceil(y).max(1) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_have_room_for_every_tile() {
        assert_eq!(two_dimensions(0), [1, 1]);
        for count in [1, 65_535, 65_536, 1_000_000] {
            let [y, z] = two_dimensions(count);
            assert!(y <= MAX_GROUPS && y as usize * z as usize >= count, "{count}");
        }
    }
}
