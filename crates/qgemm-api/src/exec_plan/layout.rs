//! Memory planner: places regions in one arena, sharing
//! bytes of disjoint lifetimes.

use super::file::{MEMORY_SCHEMA, MemoryPlan, Region, RegionKind};

/// Alignment of regions, equal to that of a device's buffers.
const ALIGNMENT: usize = 256;
/// Minimum length of a canary in bytes.
const CANARY_BYTES: usize = 256;
/// Byte value of canaries: neither zero nor a pattern of common numbers.
const CANARY_VALUE: u8 = 0xC5;

/// Region to place.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub name: String,
    pub kind: RegionKind,
    pub bytes: usize,
    /// Lifetime: first and last operation, inclusive.
    pub first_op: usize,
    pub last_op: usize,
}

/// Length of a region with its canary. `None` on overflow.
pub(super) fn reserved(bytes: usize) -> Option<usize> {
    bytes.checked_add(CANARY_BYTES)?.checked_next_multiple_of(ALIGNMENT)
}

/// Places all regions. `None` when the sizes overflow.
///
/// Permanent regions come first: weights, then KV caches and
/// recurrent states, which plans of other batches share. The
/// others follow by start of lifetime, longer ones first, each
/// at the lowest free offset.
pub(super) fn place(mut wanted: Vec<Wanted>) -> Option<MemoryPlan> {
    let order = |w: &Wanted| match w.kind {
        RegionKind::Weight => (0, 0),
        kind if kind.is_persistent() => (1, 0),
        RegionKind::Workspace | RegionKind::Input => (2, 0),
        _ => (3, w.first_op),
    };
    wanted.sort_by(|a, b| order(a).cmp(&order(b)).then(b.bytes.cmp(&a.bytes)).then(a.name.cmp(&b.name)));
    let mut regions: Vec<Region> = Vec::with_capacity(wanted.len());
    // Mutable regions that may still be live, by offset.
    let mut living: Vec<(usize, usize, usize)> = Vec::new();
    let (mut end, mut weights_end, mut without_reuse) = (0usize, 0usize, 0usize);
    for Wanted { name, kind, bytes, first_op, last_op } in wanted {
        let reserved = reserved(bytes)?;
        without_reuse = without_reuse.checked_add(reserved)?;
        let offset = if kind == RegionKind::Weight {
            let offset = weights_end;
            weights_end = weights_end.checked_add(reserved)?;
            offset
        } else {
            living.retain(|&(_, _, last)| last >= first_op);
            let mut offset = weights_end;
            let mut at = 0;
            while let Some(&(start, stop, _)) = living.get(at) {
                if start >= offset.checked_add(reserved)? {
                    break;
                }
                offset = offset.max(stop);
                at += 1;
            }
            living.insert(at, (offset, offset.checked_add(reserved)?, last_op));
            living.sort_unstable();
            offset
        };
        end = end.max(offset.checked_add(reserved)?);
        regions.push(Region { name, kind, offset, bytes, reserved, first_op, last_op });
    }
    regions.sort_by_key(|region| (region.offset, region.first_op));
    Some(MemoryPlan {
        schema: MEMORY_SCHEMA.into(),
        arena_bytes: end,
        weights_end,
        alignment: ALIGNMENT,
        canary_bytes: CANARY_BYTES,
        canary_value: CANARY_VALUE,
        bytes_without_reuse: without_reuse,
        regions,
    })
}

/// First two regions with shared bytes and overlapping lifetimes.
pub(super) fn overlap(regions: &[Region]) -> Option<(&Region, &Region)> {
    let mut by_offset: Vec<&Region> = regions.iter().collect();
    by_offset.sort_by_key(|region| region.offset);
    // Regions that extend beyond the start of the current one.
    let mut reaching: Vec<&Region> = Vec::new();
    for region in by_offset {
        reaching.retain(|other| other.offset + other.reserved > region.offset);
        if let Some(other) = reaching.iter().find(|o| o.first_op <= region.last_op && region.first_op <= o.last_op) {
            return Some((other, region));
        }
        reaching.push(region);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(name: &str, kind: RegionKind, bytes: usize, life: (usize, usize)) -> Wanted {
        Wanted { name: name.into(), kind, bytes, first_op: life.0, last_op: life.1 }
    }

    #[test]
    fn bytes_are_used_again_when_a_life_ends_and_never_before() {
        let plan = place(vec![
            wanted("w", RegionKind::Weight, 1000, (0, 9)),
            wanted("a", RegionKind::Activation, 500, (0, 1)),
            wanted("b", RegionKind::Activation, 500, (1, 2)),
            wanted("c", RegionKind::Activation, 400, (2, 3)),
            wanted("ws", RegionKind::Workspace, 10, (0, 9)),
        ])
        .expect("small");
        let at = |name: &str| plan.regions.iter().find(|r| r.name == name).expect("placed");
        assert_eq!(at("w").offset, 0);
        assert!(at("ws").offset == plan.weights_end && plan.weights_end == at("w").reserved);
        assert_eq!(at("a").offset, at("c").offset, "a is dead when c begins");
        assert!(at("b").offset >= at("a").offset + at("a").reserved, "both live in operation 1");
        assert_eq!(overlap(&plan.regions), None);
        assert!(plan.regions.iter().all(|r| r.offset % 256 == 0 && r.reserved >= r.bytes + 256));
        assert!(plan.arena_bytes < plan.bytes_without_reuse);

        let mut longer = plan.regions.clone();
        longer.iter_mut().filter(|r| r.name == "a").for_each(|r| r.last_op = 2);
        assert_eq!(overlap(&longer).map(|(a, b)| (a.name.as_str(), b.name.as_str())), Some(("a", "c")));
    }

    #[test]
    fn sizes_that_overflow_are_no_plan() {
        assert_eq!(reserved(1), Some(512));
        assert_eq!(place(vec![wanted("a", RegionKind::Activation, usize::MAX - 300, (0, 0))]), None);
    }
}
