//! Matrix instructions as the PTX ISA describes them: operands, and the
//! registers of their elements.

/// Row and column of an element, by lane and element number
/// in the lane's fragment, low bits of the first register first.
pub type Place = fn(lane: usize, i: usize) -> (usize, usize);

/// A matrix instruction as the ISA describes it.
pub struct Shape {
    pub name: &'static str,
    pub m: usize,
    pub k: usize,
    /// Bits of an operand element.
    pub bits: usize,
    /// Positions of a, b (as row k, column n) and d.
    pub a: Place,
    pub b: Place,
    pub d: Place,
    /// Codes of -6 to 6, as far as the format has
    /// them (E2M1 lacks 5, which becomes 4).
    pub encode: fn(i32) -> u32,
    /// Independent products of one call.
    pub products: usize,
}

fn f16_code(value: i32) -> u32 {
    u32::from(half::f16::from_f32(value as f32).to_bits())
}

pub fn e5m2_code(value: i32) -> u32 {
    // 5 has three significant bits and 6 two, so the lower
    // byte of the f16 is zero.
    f16_code(value) >> 8
}

fn e4m3_code(value: i32) -> u32 {
    // E4M3's fraction ends one bit lower than
    // E5M2's; its bias is 8 less.
    let f16 = f16_code(value);
    f16 >> 8 & 0x80 | if value == 0 { 0 } else { ((f16 & 0x7fff) >> 7) - (8 << 3) }
}

fn e2m1_code(value: i32) -> u32 {
    let magnitude = [0, 2, 4, 5, 6, 6, 7][value.unsigned_abs() as usize];
    if value < 0 { 8 | magnitude } else { magnitude }
}

/// groupID and threadID_in_group of the ISA.
fn group(lane: usize) -> usize {
    lane >> 2
}
fn within(lane: usize) -> usize {
    lane % 4
}

fn d16(lane: usize, i: usize) -> (usize, usize) {
    (if i < 2 { group(lane) } else { group(lane) + 8 }, within(lane) * 2 + (i & 1))
}

/// Within a quad-pair: row-major A, column-major B; then
/// column-major A, row-major B.
fn quad_pair_row(lane: usize, i: usize) -> (usize, usize) {
    (if lane < 16 { lane % 4 } else { lane % 4 + 4 }, i)
}
fn quad_pair_column(lane: usize, i: usize) -> (usize, usize) {
    (i, if lane < 16 { lane % 4 } else { lane % 4 + 4 })
}
fn quad_pair_across_rows(lane: usize, i: usize) -> (usize, usize) {
    (if lane < 16 { i } else { i + 4 }, lane % 4)
}
fn quad_pair_across_columns(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4, if lane < 16 { i } else { i + 4 })
}
fn quad_pair_d(lane: usize, i: usize) -> (usize, usize) {
    let x = (lane & 1) + (i & 2);
    (if lane < 16 { x } else { x + 4 }, (i & 4) + (lane & 2) + (i & 1))
}

/// Every shape of matrix instructions.
pub const SHAPES: &[Shape] = &[
    Shape {
        name: "mma_m8n8k4_f16",
        m: 8,
        k: 4,
        bits: 16,
        a: quad_pair_row,
        b: quad_pair_column,
        d: quad_pair_d,
        encode: f16_code,
        products: 4,
    },
    Shape {
        name: "mma_m8n8k4_row_row_f16",
        m: 8,
        k: 4,
        bits: 16,
        a: quad_pair_row,
        b: quad_pair_across_columns,
        d: quad_pair_d,
        encode: f16_code,
        products: 4,
    },
    Shape {
        name: "mma_m8n8k4_col_col_f16",
        m: 8,
        k: 4,
        bits: 16,
        a: quad_pair_across_rows,
        b: quad_pair_column,
        d: quad_pair_d,
        encode: f16_code,
        products: 4,
    },
    Shape {
        name: "mma_m8n8k4_col_row_f16",
        m: 8,
        k: 4,
        bits: 16,
        a: quad_pair_across_rows,
        b: quad_pair_across_columns,
        d: quad_pair_d,
        encode: f16_code,
        products: 4,
    },
    Shape {
        name: "mma_m16n8k8_f16",
        m: 16,
        k: 8,
        bits: 16,
        a: |lane, i| (if i < 2 { group(lane) } else { group(lane) + 8 }, within(lane) * 2 + (i & 1)),
        b: |lane, i| (within(lane) * 2 + i, group(lane)),
        d: d16,
        encode: f16_code,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k16_f16",
        m: 16,
        k: 16,
        bits: 16,
        a: a_k16,
        b: b_k16,
        d: d16,
        encode: f16_code,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k16_bf16",
        m: 16,
        k: 16,
        bits: 16,
        a: a_k16,
        b: b_k16,
        d: d16,
        encode: |value| (value as f32).to_bits() >> 16,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k8_tf32",
        m: 16,
        k: 8,
        bits: 32,
        a: |lane, i| (group(lane) + i % 2 * 8, within(lane) + i / 2 * 4),
        b: |lane, i| (within(lane) + i * 4, group(lane)),
        d: d16,
        encode: |value| (value as f32).to_bits(),
        products: 1,
    },
    Shape {
        name: "mma_m8n8k16_s8",
        m: 8,
        k: 16,
        bits: 8,
        a: |lane, i| (group(lane), within(lane) * 4 + i),
        b: |lane, i| (within(lane) * 4 + i, group(lane)),
        d: |lane, i| (group(lane), within(lane) * 2 + i),
        encode: |value| value as u32 & 0xff,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k16_s8",
        m: 16,
        k: 16,
        bits: 8,
        a: |lane, i| (if i < 4 { group(lane) } else { group(lane) + 8 }, within(lane) * 4 + (i & 3)),
        b: |lane, i| (within(lane) * 4 + i, group(lane)),
        d: d16,
        encode: |value| value as u32 & 0xff,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k32_s8",
        m: 16,
        k: 32,
        bits: 8,
        a: a_k32,
        b: b_k32,
        d: d16,
        encode: |value| value as u32 & 0xff,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k32_e4m3",
        m: 16,
        k: 32,
        bits: 8,
        a: a_k32,
        b: b_k32,
        d: d16,
        encode: e4m3_code,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k32_e5m2",
        m: 16,
        k: 32,
        bits: 8,
        a: a_k32,
        b: b_k32,
        d: d16,
        encode: e5m2_code,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k32_e4m3_e5m2",
        m: 16,
        k: 32,
        bits: 8,
        a: a_k32,
        b: b_k32,
        d: d16,
        encode: e4m3_code,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k64_mxf4",
        m: 16,
        k: 64,
        bits: 4,
        a: a_k64,
        b: b_k64,
        d: d16,
        encode: e2m1_code,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k64_nvf4",
        m: 16,
        k: 64,
        bits: 4,
        a: a_k64,
        b: b_k64,
        d: d16,
        encode: e2m1_code,
        products: 1,
    },
    Shape {
        name: "mma_m16n8k32_mxf8",
        m: 16,
        k: 32,
        bits: 8,
        a: a_k32,
        b: b_k32,
        d: d16,
        encode: e4m3_code,
        products: 1,
    },
];

fn a_k16(lane: usize, i: usize) -> (usize, usize) {
    let upper = !(i < 2 || (4..6).contains(&i));
    let column = within(lane) * 2 + (i & 1);
    (if upper { group(lane) + 8 } else { group(lane) }, if i < 4 { column } else { column + 8 })
}
fn b_k16(lane: usize, i: usize) -> (usize, usize) {
    let row = within(lane) * 2 + (i & 1);
    (if i < 2 { row } else { row + 8 }, group(lane))
}
fn a_k32(lane: usize, i: usize) -> (usize, usize) {
    let upper = !(i < 4 || (8..12).contains(&i));
    let column = within(lane) * 4 + (i & 3);
    (if upper { group(lane) + 8 } else { group(lane) }, if i < 8 { column } else { column + 16 })
}
fn b_k32(lane: usize, i: usize) -> (usize, usize) {
    let row = within(lane) * 4 + (i & 3);
    (if i < 4 { row } else { row + 16 }, group(lane))
}
fn a_k64(lane: usize, i: usize) -> (usize, usize) {
    let upper = !(i < 8 || (16..24).contains(&i));
    let column = within(lane) * 8 + (i & 7);
    (if upper { group(lane) + 8 } else { group(lane) }, if i < 16 { column } else { column + 32 })
}
fn b_k64(lane: usize, i: usize) -> (usize, usize) {
    let row = within(lane) * 8 + (i & 7);
    (if i < 8 { row } else { row + 32 }, group(lane))
}
