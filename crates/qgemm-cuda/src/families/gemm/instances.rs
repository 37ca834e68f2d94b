//! All GEMM kernels, listed once per process.

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock};

use qgemm_formats::{DType, Format};
use qgemm_hal::Variant;

use super::instance::{FitsRegisters, Instance, InstanceLists};
use super::types::Types;
use super::{
    gemm_simt, gemm_sliced_k, gemv, sm70_s8_two_stage, sm70_two_stage, sm80_cp_async, sm80_s8_cp_async,
    sm90_bulk_sliced_k, sm90_bulk_stream, sm90_s8_groups_wgmma_ws, sm90_w4a8_wgmma_ws, sm90_wgmma_ws, sm120_tma_ws,
    spills,
};
use crate::arch::most_shared;

/// The kernels of every main loop that dequantizes W. A new
/// instruction set adds its file here.
static MAIN_LOOPS: [&InstanceLists; 13] = [
    &gemv::INSTANCES,
    &sm70_two_stage::INSTANCES,
    &gemm_sliced_k::INSTANCES,
    &sm80_cp_async::INSTANCES,
    &sm120_tma_ws::INSTANCES,
    &sm90_wgmma_ws::INSTANCES,
    &sm90_bulk_sliced_k::INSTANCES,
    &sm90_bulk_stream::INSTANCES,
    &gemm_simt::INSTANCES,
    &sm70_s8_two_stage::INSTANCES,
    &sm80_s8_cp_async::INSTANCES,
    &sm90_w4a8_wgmma_ws::INSTANCES,
    &sm90_s8_groups_wgmma_ws::INSTANCES,
];

/// Main loops for a quantized or a plain X.
pub(super) fn main_loops(quantized_x: bool) -> impl Iterator<Item = &'static InstanceLists> {
    MAIN_LOOPS.into_iter().filter(move |lists| lists.main_loop.x_access.is_quantized() == quantized_x)
}

/// Kernels for quantized X, listed once per process. They
/// are listed with f16 as type of X; the epilogue's fast
/// path is for D of that type.
static INSTANCES_OF_PLANES: LazyLock<HashMap<PlanesKey, OnceLock<Vec<Instance>>>> =
    LazyLock::new(|| keys_of_planes().map(|key| (key, OnceLock::new())).collect());

/// Key of these lists.
type PlanesKey = (Format, Variant);

fn keys_of_planes() -> impl Iterator<Item = PlanesKey> {
    Format::all().flat_map(|format| Variant::ALL.map(|variant| (format, variant)))
}

/// All kernels for quantized X and weights of `format`.
pub(crate) fn of_planes(format: Format, variant: Variant) -> &'static [Instance] {
    let list = || list_of_planes((format, variant), &spills::fits_registers);
    INSTANCES_OF_PLANES.get(&(format, variant)).map_or(&[], |kernels| kernels.get_or_init(list))
}

fn list_of_planes((format, variant): PlanesKey, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    let types = Types::new(format, DType::F16, variant);
    types.iter().flat_map(|types| main_loops(true).flat_map(|l| (l.instances)(types, fits_registers))).collect()
}

/// Key of the kernel lists.
pub(in crate::families) type Key = (Format, DType, Variant);

/// Kernels by key, listed once per process because
/// planning asks repeatedly.
pub(in crate::families) struct ListedKernels(LazyLock<HashMap<Key, OnceLock<Vec<Instance>>>>);

impl ListedKernels {
    /// Creates an empty cache.
    pub(in crate::families) const fn new() -> Self {
        Self(LazyLock::new(|| keys().map(|key| (key, OnceLock::new())).collect()))
    }

    /// Kernels of a key. The first call lists them with `list`.
    pub(in crate::families) fn get(&self, key: Key, list: impl FnOnce(Key) -> Vec<Instance>) -> &[Instance] {
        self.0.get(&key).map_or(&[], |kernels| kernels.get_or_init(|| list(key)))
    }
}

static INSTANCES: ListedKernels = ListedKernels::new();

fn keys() -> impl Iterator<Item = Key> {
    let of_format = |format| DType::ALL.into_iter().flat_map(move |x| Variant::ALL.map(|variant| (format, x, variant)));
    Format::all().flat_map(of_format)
}

/// All kernels for these types.
pub(crate) fn instances(format: Format, x: DType, variant: Variant) -> &'static [Instance] {
    INSTANCES.get((format, x, variant), |key| list(key, &spills::fits_registers))
}

/// Lists the kernels of `variant` again. `fits` decides from each line
/// of `kernels.spills` and its kernel whether it fits in registers.
pub(crate) fn ask_registers(variant: Variant, fits: &dyn Fn(String, &Instance) -> bool) {
    let fits = |instance: &Instance| fits(spills::key(instance.id(), instance), instance);
    keys().filter(|key| key.2 == variant).for_each(|key| drop(list(key, &fits)));
    keys_of_planes().filter(|key| key.1 == variant).for_each(|key| drop(list_of_planes(key, &fits)));
}

fn list((format, x, variant): Key, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    let types = Types::new(format, x, variant);
    types.iter().flat_map(|types| main_loops(false).flat_map(|l| (l.instances)(types, fits_registers))).collect()
}

/// MoE kernels for these types: the MoE-only kernels of main loops,
/// and, for each main loop and token tile, the first kernel
/// that no MoE-only kernel replaces. Where only an A100 has the
/// shared memory for it, another follows for the variant's other
/// chips. `fits` must hold for all of them, with and without
/// narrowing to an expert.
pub(crate) fn instances_for_experts(
    format: Format,
    x: DType,
    variant: Variant,
    fits: FitsRegisters<'_>,
) -> Vec<Instance> {
    let of_loop = |types: &Types, main_loop: &InstanceLists| {
        let mut all: Vec<Instance> = (main_loop.for_experts)(types).into_iter().filter(|own| fits(own)).collect();
        let is_served = |tile_m: &&u32| all.iter().any(|own| own.tile_m == **tile_m);
        let tiles = (main_loop.experts_tiles)(types).iter().filter(|tile_m| !is_served(tile_m));
        let fits_all = |i: &Instance| variant != Variant::Sm80 || i.shared_bytes <= most_shared(Variant::Sm89);
        let firsts = tiles.flat_map(|&tile_m| {
            let first = narrowed_first(types, main_loop, tile_m, &|_| true, fits);
            let is_large = first.as_ref().is_some_and(|first| !fits_all(first));
            let smaller = || narrowed_first(types, main_loop, tile_m, &fits_all, fits);
            [first, is_large.then(smaller).flatten()]
        });
        let firsts: Vec<_> = firsts.flatten().collect();
        all.extend(firsts);
        all
    };
    let types = Types::new(format, x, variant);
    types.iter().flat_map(|types| main_loops(false).flat_map(|main_loop| of_loop(types, main_loop))).collect()
}

/// The first kernel of a main loop with this token tile that
/// `has_room`, and `fits` with and without narrowing to an expert.
fn narrowed_first(
    types: &Types,
    main_loop: &InstanceLists,
    tile_m: u32,
    has_room: &dyn Fn(&Instance) -> bool,
    fits: FitsRegisters<'_>,
) -> Option<Instance> {
    // Narrowing the problem to one expert takes registers (`kernels.lock`).
    let narrowed = |instance: &Instance| Instance { ctas_per_sm: instance.ctas_per_sm.min(2), ..instance.clone() };
    // Main loops that never spill list their kernels unasked.
    let unasked = (main_loop.instances)(types, &|_| false);
    if let Some(instance) = unasked.iter().find(|instance| instance.tile_m == tile_m && has_room(instance)) {
        return Some(narrowed(instance));
    }
    let fits =
        |instance: &Instance| has_room(instance) && spills::fits_registers(instance) && fits(&narrowed(instance));
    main_loop.first_of_tokens(types, tile_m, &fits).map(|instance| narrowed(&instance))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_listed_once_and_no_two_have_one_identity() {
        for (format, x, variant) in keys() {
            let listed = instances(format, x, variant);
            assert!(
                !listed.is_empty() && std::ptr::eq(listed, instances(format, x, variant)),
                "{format} {x} {variant}"
            );
            for instance in listed {
                assert_eq!(listed.iter().filter(|other| other.id() == instance.id()).count(), 1, "{}", instance.id());
            }
        }
    }
}
