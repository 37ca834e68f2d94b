//! Tensor map of the packed weights of all experts.

use qgemm_formats::prepack::PackedLayout;
use qgemm_hal::CheckedExperts;

use crate::tensor_map::{MapElement, MapSwizzle, TileMap};

/// Maximum elements of a TMA box along a dimension, and required
/// multiple of its row bytes (`cuTensorMapEncodeTiled`).
const MOST_ELEMENTS: usize = 256;
const ROW_UNIT: usize = 16;

/// Map of the weights of `op` without their address. Dimensions:
/// bytes of a k-tile (split into equal parts as needed), k-tiles,
/// row tiles, experts. A box covers `run_k_tiles` k-tiles of a
/// CTA's `tile_n` rows (`WRuns`).
pub(super) fn w_map(op: &CheckedExperts, layout: &PackedLayout, run_k_tiles: u32, tile_n: u32) -> TileMap {
    let element = MapElement::Bytes8;
    let bytes = layout.k_tile_bytes;
    let fits =
        |&parts: &usize| bytes.is_multiple_of(parts * ROW_UNIT) && bytes / parts / element.bytes() <= MOST_ELEMENTS;
    let parts = (1..).find(fits).unwrap_or(1);
    let columns = bytes / parts / element.bytes();
    let (k_tiles, row_tiles) = (layout.k_tiles(op.each.stored_k), op.each.stored_rows.div_ceil(layout.tile_rows));
    let row_tile = (k_tiles * bytes) as u64;
    // Experts that share a weight count as one.
    let expert = if op.row_pitch == 0 {
        row_tiles as u64 * row_tile
    } else {
        layout.bytes(op.row_pitch, op.each.stored_k) as u64
    };
    TileMap {
        address: 0,
        element,
        dimensions: 5,
        size: [columns, parts, k_tiles, row_tiles, op.weights()].map(|elements| elements as u64),
        strides: [(bytes / parts) as u64, bytes as u64, row_tile, expert],
        tile: [columns as u32, parts as u32, run_k_tiles, tile_n / layout.tile_rows as u32, 1],
        swizzle: MapSwizzle::None,
    }
}
