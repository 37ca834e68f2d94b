//! Grids with more tiles than one axis can count.

/// Maximum CTAs along the grid's y and z axes (CUDA C
/// Programming Guide, "Technical Specifications per Compute Capability").
const MOST_GRID_YZ: usize = 65_535;
/// Maximum CTAs along y and z together.
pub(super) const MOST_CTAS_YZ: usize = MOST_GRID_YZ * MOST_GRID_YZ;

/// At least `count` CTAs along y and z.
pub(super) fn two_dimensions(count: usize) -> [u32; 2] {
    let y = count.clamp(1, MOST_GRID_YZ);
    [y as u32, count.div_ceil(y).max(1) as u32]
}
