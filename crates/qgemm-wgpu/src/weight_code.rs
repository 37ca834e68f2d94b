//! Shader constants of a weight format: its layout and encoding.

use std::fmt::Write;

use qgemm_formats::prepack::{CodePlaneLayout, FragmentLayout, PackedLayout};
use qgemm_formats::{Encoding, Format};

/// Fragment layout that the shaders read.
pub(crate) const CLASS: FragmentLayout = FragmentLayout::Simd16;

/// Values in a quad.
const QUAD: usize = 4;

/// Shader specialization for a weight.
pub(crate) struct WeightCode {
    layout: PackedLayout,
    /// Columns of four rows that a `gemv` invocation loads at once.
    pub unit: usize,
    /// Columns of a unit that share scales.
    span: usize,
    /// Columns that share scales.
    sub_block: usize,
}

/// Location of a value's code, in words of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Word of the first plane.
    pub low_word: usize,
    /// First bit in that word.
    pub low_bit: usize,
    /// Word and bit of the second plane, if any.
    pub high: Option<(usize, usize)>,
}

impl WeightCode {
    /// The constants of `format`; `None` for more than two code planes,
    /// which shaders do not support.
    pub fn new(format: Format) -> Option<Self> {
        let layout = PackedLayout::new(format, CLASS)?;
        if !(1..=2).contains(&layout.codes.len()) {
            return None;
        }
        // Unquantized values are wide: a unit of 32 would take 128
        // registers for words alone.
        let unit = if layout.codes[0].bits > 8 { 8 } else { 32 };
        let sub_block = if format.scale_planes.is_empty() { layout.k_tile } else { format.sub_block };
        Some(Self { unit, span: unit.min(sub_block), sub_block, layout })
    }

    /// Columns of a packed k-tile.
    pub fn k_tile(&self) -> usize {
        self.layout.k_tile
    }

    /// Bytes of a row tile of W with `stored_k` columns.
    pub fn row_of_tiles_bytes(&self, stored_k: usize) -> usize {
        self.layout.bytes(self.layout.tile_rows, stored_k)
    }

    /// The integer constants.
    pub fn constants(&self) -> Vec<(&'static str, u32)> {
        let plane = |i: usize| self.layout.codes.get(i);
        let bits = |i| plane(i).map_or(0, |p| p.bits);
        let vectors = |i| plane(i).map_or(0, |p| p.offset / 16);
        let quads = |i| 8usize.checked_div(bits(i)).unwrap_or(0).max(1);
        [
            ("PACKED_K", self.layout.k_tile),
            ("PACKED_VECTORS", self.layout.k_tile_bytes / 16),
            ("PACKED_UNITS", self.layout.k_tile / self.unit),
            ("SUB_BLOCK", self.sub_block),
            ("UNIT", self.unit),
            ("SPANS", self.unit / self.span),
            ("SPANS_A_SUB", self.sub_block / self.span),
            ("SPAN_QUADS", self.span / QUAD),
            ("LOW_BITS", bits(0)),
            ("LOW_PLANE", vectors(0)),
            ("LOW_WORDS", self.unit * bits(0) / 32),
            ("LOW_QUADS", quads(0)),
            ("HIGH_BITS", bits(1)),
            ("HIGH_PLANE", vectors(1)),
            ("HIGH_WORDS", self.unit * bits(1) / 32),
            ("HIGH_QUADS", quads(1)),
            ("CODE_BITS", bits(0) + bits(1)),
        ]
        .map(|(name, value)| (name, value as u32))
        .to_vec()
    }

    /// Location of value `i` of quad `quad` of a span.
    pub fn place(&self, span: u32, quad: u32, i: u32) -> Place {
        let quad = span as usize * self.span / QUAD + quad as usize;
        let at = |plane: &CodePlaneLayout| {
            let bit = plane.lane_bit(quad, i as usize);
            (bit / 32, bit % 32)
        };
        let (low_word, low_bit) = at(&self.layout.codes[0]);
        Place { low_word, low_bit, high: self.layout.codes.get(1).map(at) }
    }

    /// Non-integer declarations: scale planes and the encoding's
    /// values. They follow `packed.wgsl`.
    pub fn declarations(&self) -> String {
        let format = self.layout.format();
        let mut text = String::new();
        for (plane, place) in format.scale_planes.iter().zip(&self.layout.scales) {
            let name = plane.name.to_uppercase();
            let (at, row, rows) = (place.offset, place.row_bytes, place.rows);
            let _ = writeln!(text, "const PLANE_{name} = Plane({at}u, {row}u, {rows}u);");
        }
        let _ = writeln!(text, "const CODES: f32 = {}.0;", 1u64 << format.code_bits());
        match format.encoding {
            Encoding::IntOffset { offset } => {
                let _ = writeln!(text, "const OFFSET: f32 = {offset}.0;");
            }
            Encoding::Codebook(numbers) => {
                let numbers = numbers.map(|number| format!("{number}.0")).join(", ");
                let _ = writeln!(text, "const TABLE = array<f32, 16>({numbers});");
            }
            _ => {}
        }
        text
    }
}
