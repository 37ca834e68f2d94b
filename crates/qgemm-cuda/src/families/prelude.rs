//! Prelude lines: the constants before a kernel's source.

use std::fmt::Write;

use qgemm_formats::prepack::PackedLayout;

/// Planes of a layout, as types for kernels.
pub(super) fn planes(out: &mut String, layout: &PackedLayout) {
    out.push_str("template <unsigned P> struct QgCodePlane;\ntemplate <unsigned P> struct QgScalePlane;\n");
    for (i, plane) in layout.codes.iter().enumerate() {
        let fields = [("BITS", plane.bits), ("OFFSET", plane.offset), ("WORD_BYTES", plane.word_bytes)];
        plane_struct(out, "QgCodePlane", i, &fields);
    }
    for (i, plane) in layout.scales.iter().enumerate() {
        let fields = [("OFFSET", plane.offset), ("ROW_BYTES", plane.row_bytes), ("SHARED_BY", plane.rows)];
        plane_struct(out, "QgScalePlane", i, &fields);
    }
}

pub(super) fn constant_line(out: &mut String, name: &str, value: u32) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "constexpr unsigned {name} = {value};");
}

pub(super) fn macro_line(out: &mut String, name: &str, value: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "#define {name} {value}");
}

pub(super) fn plane_struct(out: &mut String, name: &str, index: usize, fields: &[(&str, usize)]) {
    let fields: Vec<_> = fields.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "template <> struct {name}<{index}> {{ enum : unsigned {{ {} }}; }};", fields.join(", "));
}
