//! The constants that Rust prints before a kernel's source: everything that the kernel knows of its format, layout
//! and tile.

use std::fmt::Write;

use qgemm_formats::Encoding;
use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_hal::abi::dtype_code;

use super::instance::{Engine, Instance, STAGED, Shape};

/// Stands for "codes are not plain numbers" where an element type is expected.
const NOT_PLAIN: u32 = 255;

/// The prelude of `instance`.
pub(super) fn print(instance: &Instance) -> String {
    let mut out = String::new();
    let layout = &instance.layout;
    let format = instance.format;
    let plain = match format.encoding {
        Encoding::Plain(dtype) => dtype_code(dtype),
        _ => NOT_PLAIN,
    };
    // Macros where a preprocessor condition or an #include needs the value; constants otherwise.
    for (name, value) in [
        ("QG_VARIANT", instance.variant.number()),
        ("QG_MMA_M8N8K4", u32::from(layout.class == PackClass::V)),
        ("QG_USE_MMA", u32::from(instance.engine == Engine::Mma)),
        ("QG_INTEGER_OPERANDS", u32::from(instance.takes_raw_codes())),
        ("QG_PARKS_STATE", u32::from(instance.keeps_work())),
        ("QG_X_DTYPE", dtype_code(instance.x)),
        ("QG_PLAIN_DTYPE", plain),
        ("QG_CODE_PLANES", layout.codes.len() as u32),
        ("QG_SCALE_PLANES", layout.scales.len() as u32),
    ] {
        macro_line(&mut out, name, &value.to_string());
    }
    macro_line(&mut out, "QG_DEQUANT_FILE", &format!("\"dequant/{}.cuh\"", format.dequant));

    planes(&mut out, layout);
    let mut constant = |name, value| constant_line(&mut out, name, value);
    constant("QG_TILE_ROWS", instance.tile_rows());
    constant("QG_K_TILE", layout.slab_k as u32);
    constant("QG_K_TILE_BYTES", layout.slab_bytes as u32);
    constant("QG_SUB_BLOCK", format.sub_block as u32);
    constant("QG_TILE_M", instance.tile_m);
    constant("QG_THREADS", instance.threads);
    constant("QG_CONSUMERS", instance.consumers());
    constant("QG_CTAS_PER_SM", instance.blocks_per_sm);
    constant("QG_SHARED_BYTES", instance.shared_bytes());
    constant("QG_ROUNDED", instance.rounds_weights().into());
    constant("QG_ZERO_POINTS", u32::from(format.encoding == Encoding::IntZero));
    match instance.shape {
        Shape::Gemv { row_tiles, x_slabs, unroll } => {
            constant("QG_ROW_TILES", row_tiles);
            constant("QG_WARPS_N", 1);
            constant("QG_X_K_TILES", x_slabs);
            constant("QG_UNROLL", unroll);
        }
        Shape::Gemm { row_tiles } | Shape::GemmSyncCopy { row_tiles } => constant("QG_ROW_TILES", row_tiles),
        Shape::SlicedK { row_tiles, warps, stages } => {
            constant("QG_ROW_TILES", row_tiles);
            constant("QG_WARPS_N", warps);
            constant("QG_STAGES", stages);
        }
        Shape::Ring(ring) => {
            constant("QG_ROW_TILES", ring.row_tiles);
            constant("QG_WARPS_N", ring.warps);
            constant("QG_X_STAGES", ring.x_stages);
            constant("QG_W_STAGES", ring.w_stages(layout));
            constant("QG_STAGED", ring.staged);
            if ring.fed {
                constant("QG_STAGE_K_BLOCKS", 1);
            }
        }
        Shape::Warpgroup(shape) => {
            constant("QG_ROW_TILES", shape.row_tiles);
            constant("QG_WARPS_N", shape.warps);
            constant("QG_K_GROUPS", shape.k_groups);
            constant("QG_STAGE_K_BLOCKS", shape.stage_chunks);
            constant("QG_X_STAGES", shape.stages);
            constant("QG_W_STAGES", shape.w_stages(layout));
            constant("QG_STAGED", STAGED);
        }
    }
    out
}

/// The planes of a layout, as types that kernels know them by.
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
