//! Preludes: the constants before a kernel's source.

mod constants;

use std::fmt::Write;

use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::repack::{Move, Repacking, Window};
use qgemm_formats::{Encoding, Format};
use qgemm_hal::Variant;
use qgemm_hal::abi::dtype_code;

pub(super) use constants::Prelude;

/// A constant of the prelude.
#[derive(Clone, Copy, Debug)]
struct Constant {
    /// C++ name.
    name: &'static str,
    kind: Kind,
    /// Lines of its description.
    doc: &'static [&'static str],
}

/// How a constant is printed.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// `#define`, for values that an `#if` tests.
    Macro,
    /// `constexpr unsigned`.
    Typed,
}

/// Bit moves of a packing kernel, for blocks of `block_bytes` bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moves<'a> {
    pub repacking: &'a Repacking,
    pub block_bytes: usize,
}

impl<'a> Prelude<'a> {
    /// A prelude with the variant alone.
    pub fn of(variant: Variant) -> Self {
        Self { variant: Some(variant.number()), ..Self::EMPTY }
    }

    /// This prelude with the facts of a packed layout.
    pub fn with_layout(self, layout: &'a PackedLayout) -> Self {
        Self {
            mma_m8n8k4: Some((layout.class == FragmentLayout::MmaM8N8K4).into()),
            tile_rows: Some(layout.tile_rows as u32),
            k_tile: Some(layout.k_tile as u32),
            k_tile_bytes: Some(layout.k_tile_bytes as u32),
            code_planes: Some(layout.codes.len() as u32),
            scale_planes: Some(layout.scales.len() as u32),
            planes: Some(layout),
            ..self
        }
    }

    /// This prelude with the facts of a format that is dequantized.
    pub fn with_format(self, format: Format) -> Self {
        /// Element type number of quantized weights.
        const NOT_PLAIN: u32 = 255;
        let plain_dtype = match format.encoding {
            Encoding::Plain(dtype) => dtype_code(dtype),
            _ => NOT_PLAIN,
        };
        Self {
            dequant_file: Some(format.dequant),
            plain_dtype: Some(plain_dtype),
            sub_block: Some(format.sub_block as u32),
            zero_points: Some((format.encoding == Encoding::IntZero).into()),
            ..self
        }
    }

    /// The C++ text: each constant with its description.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for (Constant { name, kind, doc }, value) in self.constants() {
            let Some(value) = value else { continue };
            doc.iter().for_each(|line| push_line(&mut out, &format!("//{line}")));
            push_line(
                &mut out,
                &match kind {
                    Kind::Macro => format!("#define {name} {value}"),
                    Kind::Typed => format!("constexpr unsigned {name} = {value};"),
                },
            );
        }
        if let Some(name) = self.dequant_file {
            push_line(&mut out, "// Dequantization source of the format.");
            push_line(&mut out, &format!("#define QG_DEQUANT_FILE \"dequant/{name}.cuh\""));
        }
        if let Some(layout) = self.planes {
            push_planes(&mut out, layout);
        }
        if let Some(moves) = self.moves {
            moves.push(&mut out);
        }
        out
    }
}

fn push_line(out: &mut String, line: &str) {
    out.push_str(line);
    out.push('\n');
}

/// Planes of a layout, as types for kernels.
fn push_planes(out: &mut String, layout: &PackedLayout) {
    push_line(out, "// Bits of a code, byte offset in the k-tile, bytes of a lane's access.");
    push_line(out, "template <unsigned P> struct QgCodePlane;");
    for (i, plane) in layout.codes.iter().enumerate() {
        let fields = [("BITS", plane.bits), ("OFFSET", plane.offset), ("WORD_BYTES", plane.word_bytes)];
        push_plane(out, "QgCodePlane", i, &fields);
    }
    push_line(out, "// Byte offset in the k-tile, bytes of a row's records, rows that share records.");
    push_line(out, "template <unsigned P> struct QgScalePlane;");
    for (i, plane) in layout.scales.iter().enumerate() {
        let fields = [("OFFSET", plane.offset), ("ROW_BYTES", plane.row_bytes), ("SHARED_BY", plane.rows)];
        push_plane(out, "QgScalePlane", i, &fields);
    }
}

fn push_plane(out: &mut String, name: &str, index: usize, fields: &[(&str, usize)]) {
    let fields: Vec<_> = fields.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    push_line(out, &format!("template <> struct {name}<{index}> {{ enum : unsigned {{ {} }}; }};", fields.join(", ")));
}

impl Moves<'_> {
    /// Records of a block as types, and windows and words as X-macro lists:
    /// `WINDOW(index, row, first bit, bits between lanes)`,
    /// `WORD(index, row, block, MOVE(window, left shift, mask) …)`.
    fn push(&self, out: &mut String) {
        let Self { repacking, block_bytes } = self;
        push_line(out, "// Byte offset and bytes of the scale records in a block.");
        push_line(out, "template <unsigned P> struct QgBlockRecords;");
        for (i, records) in repacking.records.iter().enumerate() {
            push_plane(out, "QgBlockRecords", i, &[("OFFSET", records.offset), ("BYTES", records.bytes)]);
        }
        let mut windows = String::new();
        for (i, Window { row, bit, lane_bits }) in repacking.windows.iter().enumerate() {
            // Writing to a String cannot fail.
            let _ = write!(windows, " WINDOW({i}, {row}, {bit}, {lane_bits})");
        }
        push_line(out, "// Bit windows to load: index, row, first bit, bits between lanes.");
        push_line(out, &format!("#define QG_WINDOWS(WINDOW){windows}"));
        push_line(out, "// Packed words of each plane, with the moves that fill them.");
        for (plane, words) in repacking.words.iter().enumerate() {
            let mut list = String::new();
            for (i, word) in words.iter().enumerate() {
                // Flipped codes fill whole words of one block.
                let first = word.first().map(|m| repacking.windows[m.window]);
                let (row, block) = first.map_or((0, 0), |w| (w.row, w.bit / (block_bytes * 8)));
                let _ = write!(list, " WORD({i}, {row}, {block},");
                for Move { window, shift, mask } in word {
                    let _ = write!(list, " MOVE({window}, {shift}, {mask:#x}u)");
                }
                list.push(')');
            }
            push_line(out, &format!("#define QG_WORDS_{plane}(WORD, MOVE){list}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn constants_are_printed_with_their_descriptions() {
        let prelude = Prelude { threads: Some(256), rule: Some(2), ..Prelude::of(Variant::Sm80) };
        let text = prelude.text();
        let expected = "// Variant of the instructions: 70, 75, 80, 89, 90 or 120.\n#define QG_VARIANT 80\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with("\nconstexpr unsigned QG_RULE = 2;\n"), "{text}");
    }

    #[test]
    fn every_constant_has_a_name_of_its_own_that_a_source_reads() {
        let names: Vec<_> = Prelude::EMPTY.constants().map(|(constant, _)| constant.name).collect();
        let distinct: BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        for name in names {
            let is_read = crate::source::SOURCES.iter().any(|(_, text)| text.contains(name));
            assert!(is_read, "no source reads {name}");
        }
    }
}
