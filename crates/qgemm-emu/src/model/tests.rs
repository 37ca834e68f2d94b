//! Every model against a triple loop over matrices whose elements are
//! placed in registers by the formulas of the PTX ISA.

mod shapes;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use self::shapes::{SHAPES, Shape, e5m2_code};
use super::*;

/// A row-major matrix.
type Matrix = Vec<Vec<f64>>;

impl Shape {
    fn op(&self) -> &'static Collective {
        COLLECTIVES.iter().find(|op| op.name == self.name).expect("in the table")
    }

    fn is_integer(&self) -> bool {
        self.op().class == Class::IntegerMma
    }

    /// The encoder of b, if it differs from a's.
    fn encode_b(&self) -> fn(i32) -> u32 {
        if self.name.ends_with("e4m3_e5m2") { e5m2_code } else { self.encode }
    }

    fn scale_words(&self) -> usize {
        if self.bits == 4 || self.name.ends_with("mxf8") { 3 } else { 0 }
    }

    /// Lanes that hold a product.
    fn lanes(&self, product: usize) -> impl Iterator<Item = usize> {
        let all = self.products == 1;
        (0..32).filter(move |lane| all || lane % 16 / 4 == product)
    }

    /// Elements of a lane for a and b.
    fn elements(&self) -> (usize, usize) {
        (self.m * self.k * self.products / 32, 8 * self.k * self.products / 32)
    }

    /// Runs the operation on matrices of code values, one triple for
    /// each product, with unit scales.
    fn run(&self, a: &[Matrix], b: &[Matrix], c: &[Matrix], precision: &Precision) -> Vec<Matrix> {
        self.run_scaled(a, b, c, &|_| [0; 3], precision)
    }

    fn run_scaled(
        &self,
        a: &[Matrix],
        b: &[Matrix],
        c: &[Matrix],
        scales: &dyn Fn(usize) -> [u32; 3],
        precision: &Precision,
    ) -> Vec<Matrix> {
        let (a_elements, b_elements) = self.elements();
        let per_word = 32 / self.bits;
        let (a_words, b_words) = (a_elements / per_word, b_elements / per_word);
        let d_words = self.m * 8 * self.products / 32;
        let op = self.op();
        assert_eq!(op.inputs, a_words + b_words + d_words + self.scale_words(), "{}", self.name);
        assert_eq!(op.outputs, d_words, "{}", self.name);
        let mut inputs = NO_WORDS;
        for product in 0..self.products {
            for lane in self.lanes(product) {
                let words = &mut inputs[lane];
                for i in 0..a_elements {
                    let (row, column) = (self.a)(lane, i);
                    words[i / per_word] |= (self.encode)(a[product][row][column] as i32) << (i % per_word * self.bits);
                }
                for i in 0..b_elements {
                    let (row, column) = (self.b)(lane, i);
                    let code = self.encode_b()(b[product][row][column] as i32);
                    words[a_words + i / per_word] |= code << (i % per_word * self.bits);
                }
                for i in 0..d_words {
                    let (row, column) = (self.d)(lane, i);
                    let value = c[product][row][column];
                    words[a_words + b_words + i] =
                        if self.is_integer() { value as i64 as u32 } else { (value as f32).to_bits() };
                }
                let scales = scales(lane);
                words[a_words + b_words + d_words..][..self.scale_words()]
                    .copy_from_slice(&scales[..self.scale_words()]);
            }
        }
        let mut outputs = NO_WORDS;
        (op.run)(&inputs, &mut outputs, precision);
        let mut d = vec![vec![vec![f64::NAN; 8]; self.m]; self.products];
        for (product, d) in d.iter_mut().enumerate() {
            for lane in self.lanes(product) {
                for (i, &word) in outputs[lane][..d_words].iter().enumerate() {
                    let (row, column) = (self.d)(lane, i);
                    d[row][column] =
                        if self.is_integer() { f64::from(word as i32) } else { f64::from(f32::from_bits(word)) };
                }
            }
        }
        d
    }

    fn matrices(&self, rows: usize, columns: usize, mut value: impl FnMut(usize, usize, usize) -> f64) -> Vec<Matrix> {
        (0..self.products)
            .map(|p| (0..rows).map(|r| (0..columns).map(|c| value(p, r, c)).collect()).collect())
            .collect()
    }
}

/// Unit scales in all four bytes, with byte-id and thread-id 0.
fn ones(name: &str) -> [u32; 3] {
    let one = if name.ends_with("mxf4") || name.ends_with("mxf8") { 0x7f7f_7f7f } else { 0x3838_3838 };
    [one, one, 0]
}

/// The value as E2M1 represents it.
fn representable(shape: &Shape, value: i32) -> f64 {
    f64::from(if shape.bits == 4 && value.abs() == 5 { 4 * value.signum() } else { value })
}

fn naive(a: &Matrix, b: &Matrix, c: &Matrix, weight: impl Fn(usize, usize, usize) -> f64) -> Matrix {
    let mut d = c.clone();
    for (row, a) in a.iter().enumerate() {
        for column in 0..8 {
            for (k, a) in a.iter().enumerate() {
                d[row][column] += a * b[k][column] * weight(row, column, k);
            }
        }
    }
    d
}

fn precisions() -> Vec<Precision> {
    let mut precisions = vec![Precision::WIDE];
    precisions.extend(Variant::ALL.map(Precision::of));
    precisions
}

#[test]
fn places_are_a_bijection() {
    for shape in SHAPES {
        let (a_elements, b_elements) = shape.elements();
        for (place, elements, rows, columns) in
            [(shape.a, a_elements, shape.m, shape.k), (shape.b, b_elements, shape.k, 8)]
        {
            let mut seen = vec![vec![0; columns]; rows];
            for lane in shape.lanes(0) {
                for i in 0..elements {
                    let (row, column) = place(lane, i);
                    seen[row][column] += 1;
                }
            }
            assert!(seen.iter().flatten().all(|&count| count == 1), "{}", shape.name);
        }
    }
}

#[test]
fn identity_carries_every_index() {
    for shape in SHAPES {
        for precision in precisions() {
            // D = A · I picks the first eight columns of
            // A, then the next eight, up to K.
            for first in (0..shape.k).step_by(8) {
                let a = shape.matrices(shape.m, shape.k, |p, r, c| f64::from((p * 5 + r * 3 + c) as i32 % 5 - 2));
                let b = shape.matrices(shape.k, 8, |_, r, c| f64::from(u8::from(r == first + c)));
                let c = shape.matrices(shape.m, 8, |p, r, c| (p * 1000 + r * 8 + c) as f64);
                let d = shape.run_scaled(&a, &b, &c, &|_| ones(shape.name), &precision);
                for p in 0..shape.products {
                    for row in 0..shape.m {
                        let expected: Vec<f64> = (0..8)
                            .map(|n| {
                                (p * 1000 + row * 8 + n) as f64
                                    + a[p][row][(first + n).min(shape.k - 1)] * f64::from(u8::from(first + n < shape.k))
                            })
                            .collect();
                        assert_eq!(d[p][row], expected, "{} product {p} row {row}", shape.name);
                    }
                }
            }
        }
    }
}

#[test]
fn random_integers_are_exact() {
    let mut rng = StdRng::seed_from_u64(3);
    for shape in SHAPES {
        for precision in precisions() {
            for _ in 0..8 {
                let mut code = |_: usize, _: usize, _: usize| representable(shape, rng.random_range(-6..=6));
                let a = shape.matrices(shape.m, shape.k, &mut code);
                let b = shape.matrices(shape.k, 8, &mut code);
                let c = shape.matrices(shape.m, 8, &mut code);
                let d = shape.run_scaled(&a, &b, &c, &|_| ones(shape.name), &precision);
                for p in 0..shape.products {
                    assert_eq!(d[p], naive(&a[p], &b[p], &c[p], |_, _, _| 1.0), "{} product {p}", shape.name);
                }
            }
        }
    }
}

#[test]
fn integers_use_all_eight_bits_and_wrap() {
    for shape in SHAPES.iter().filter(|shape| shape.is_integer()) {
        let a = shape.matrices(shape.m, shape.k, |_, r, _| if r % 2 == 0 { -128.0 } else { 127.0 });
        let b = shape.matrices(shape.k, 8, |_, _, _| -128.0);
        let c =
            shape.matrices(shape.m, 8, |_, r, _| if r % 2 == 0 { f64::from(i32::MAX) } else { f64::from(i32::MIN) });
        let d = shape.run(&a, &b, &c, &Precision::WIDE);
        let k = shape.k as i32;
        for (row, values) in d[0].iter().enumerate() {
            let expected =
                if row % 2 == 0 { i32::MAX.wrapping_add(k * 16384) } else { i32::MIN.wrapping_sub(k * 127 * 128) };
            assert!(values.iter().all(|&value| value == f64::from(expected)), "{} row {row}: {values:?}", shape.name);
        }
    }
}

#[test]
fn block_scales_come_from_the_lanes_and_bytes_of_the_isa() {
    // Every scale byte of every lane differs. Only the lanes and
    // bytes that the ISA names may matter.
    let mut rng = StdRng::seed_from_u64(4);
    for shape in SHAPES.iter().filter(|shape| shape.bits == 4) {
        let mx = shape.name.ends_with("mxf4");
        let block = if mx { 32 } else { 16 };
        let code = |lane: usize, word: usize, byte: usize| (lane * 13 + word * 7 + byte * 3) % 8;
        // 2^(code - 4), or (8 + code) / 8.
        let scale = |lane, word, byte| {
            let code = code(lane, word, byte);
            if mx { 2f64.powi(code as i32 - 4) } else { (8 + code) as f64 / 8.0 }
        };
        let scales = |lane: usize, places: u32| {
            let [a, b] = [0, 1].map(|word| {
                u32::from_le_bytes(std::array::from_fn(|byte| {
                    let code = code(lane, word, byte) as u8;
                    if mx { 127 - 4 + code } else { 7 << 3 | code }
                }))
            });
            [a, b, places]
        };
        // Byte-ids and thread-ids of A, then of B. With four
        // scales the byte-id is fixed.
        let places: &[[u8; 4]] = if mx {
            &[[0; 4], [2, 1, 0, 0], [0, 0, 2, 1], [2, 1, 2, 1]]
        } else {
            &[[0; 4], [0, 1, 0, 0], [0, 0, 0, 1]]
        };
        for (precision, place) in precisions().iter().flat_map(|p| places.iter().map(move |place| (p, place))) {
            let mut value = |_: usize, _: usize, _: usize| representable(shape, rng.random_range(-6..=6));
            let a = shape.matrices(16, 64, &mut value);
            let b = shape.matrices(64, 8, &mut value);
            let c = shape.matrices(16, 8, &mut value);
            let d = shape.run_scaled(&a, &b, &c, &|lane| scales(lane, u32::from_le_bytes(*place)), precision);
            // Row r of A: the first thread of a pair in
            // quad r for the first eight rows, the second thread for
            // the others. Column n of B: one thread of quad n.
            let [byte_a, thread_a, byte_b, thread_b] = place.map(usize::from);
            let expected = naive(&a[0], &b[0], &c[0], |row, column, k| {
                let lane = row % 8 * 4 + 2 * thread_a + row / 8;
                scale(lane, 0, byte_a + k / block) * scale(column * 4 + thread_b, 1, byte_b + k / block)
            });
            assert_eq!(d[0], expected, "{}, {place:?}", shape.name);
        }
    }
}

#[test]
fn bytes_have_one_scale_a_row() {
    // 1.0 in E2M1 (bits 2 to 5 of a byte) and
    // in E4M3; byte-id and thread-id of both operands' scales.
    for (name, one, [byte, thread]) in
        [("mma_m16n8k32_mxf8", 0x3838_3838u32, [0u8, 0]), ("mma_m16n8k32_mxf8_e2m1", 0x0808_0808, [3, 1])]
    {
        let op = COLLECTIVES.iter().find(|op| op.name == name).expect("in the table");
        let mut inputs = NO_WORDS;
        for (lane, words) in inputs.iter_mut().enumerate() {
            words[..4].fill(0x3838_3838);
            words[4..6].fill(one);
            words[6..10].fill(1.0f32.to_bits());
            // Rows of A: lane 4g, and 4g + 1 for row
            // g + 8, or the next two. Columns of B: lane
            // 4g, or the next. Other lanes are ignored.
            let (g, t) = (lane / 4, lane % 4);
            let place = |scale: u32| u32::MAX ^ (0xff ^ scale) << (8 * byte);
            words[10] = if t / 2 == usize::from(thread) { place(127 + (g + t % 2) as u32) } else { u32::MAX };
            words[11] = if t == usize::from(thread) { place(127 - g as u32) } else { u32::MAX };
            words[12] = u32::from_le_bytes([byte, thread, byte, thread]);
        }
        let mut outputs = NO_WORDS;
        (op.run)(&inputs, &mut outputs, &Precision::WIDE);
        for (lane, words) in outputs.iter().enumerate() {
            for (i, &word) in words[..4].iter().enumerate() {
                let (row, column) = (lane / 4 + i / 2, lane % 4 * 2 + i % 2);
                let expected = 1.0 + 32.0 * 2f32.powi(row as i32 - column as i32);
                assert_eq!(f32::from_bits(word), expected, "{name}, lane {lane}, {i}");
            }
        }
    }
}

#[test]
fn block_scales_at_their_limits() {
    let mx = SHAPES.iter().find(|shape| shape.name.ends_with("mxf4")).expect("in the table");
    let nv = SHAPES.iter().find(|shape| shape.name.ends_with("nvf4")).expect("in the table");
    let matrix = |rows, columns, value: f64| vec![vec![vec![value; columns]; rows]];
    for precision in precisions() {
        let run = |shape: &Shape, scales: [u32; 2], c: f64| {
            let scales = [scales[0], scales[1], 0];
            shape.run_scaled(&matrix(16, 64, 1.0), &matrix(64, 8, 1.0), &matrix(16, 8, c), &|_| scales, &precision)[0]
                [3][3]
        };
        assert_eq!(run(mx, [0x7f00_7f00, 0x7f7f_7f7f], 1.0), 33.0, "2^-127 in one block");
        assert!(run(mx, [0x7f7f_7fff, 0x7f7f_7f7f], 1.0).is_nan());
        assert_eq!(run(mx, [0xfefe_fefe, 0x8080_8080], 1.0), f64::INFINITY);
        assert_eq!(run(mx, [0x7f7f_7f7f, 0x7f7f_7f7f], f64::NEG_INFINITY), f64::NEG_INFINITY);
        assert_eq!(run(nv, [0; 2], 2.0), 2.0, "scales of zero");
        assert_eq!(run(nv, [0x0101_0101, 0xb8b8_b8b8], 0.0), 0.125, "64 times 2^-9; a sign means nothing");
        assert!(run(nv, [0x7f38_3838, 0x3838_3838], 0.0).is_nan());
    }
}

#[test]
fn block_scaled_terms_are_cut() {
    let mx = SHAPES.iter().find(|shape| shape.name.ends_with("mxf4")).expect("in the table");
    let matrix = |rows, columns, value: f64| vec![vec![vec![value; columns]; rows]];
    let mut a = matrix(16, 64, 0.0);
    // 1 in the first block, whose scale is 2^40 but whose
    // products sum to zero; and 1 in the second.
    for row in &mut a[0] {
        (row[0], row[1], row[32]) = (1.0, -1.0, 1.0);
    }
    let run = |second: u8, fraction_bits| {
        let precision = Precision { block_scaled: ScaledSum::Aligned { fraction_bits }, ..Precision::WIDE };
        let scales = [u32::from_le_bytes([127 + 40, second, 0, 0]), 0x7f7f_7f7f, 0];
        mx.run_scaled(&a, &matrix(64, 8, 1.0), &matrix(16, 8, 0.0), &|_| scales, &precision)[0][0][0]
    };
    assert_eq!(run(127 + 5, 35), 32.0, "35 bits below 2^40 is 2^5");
    assert_eq!(run(127 + 4, 35), 0.0, "cut, though the large block adds nothing");
    assert_eq!(run(127 + 4, 36), 16.0);
}

#[test]
fn the_table_prints_as_constants() {
    let header = header();
    assert_eq!(header.lines().count(), COLLECTIVES.len());
    for (number, op) in COLLECTIVES.iter().enumerate() {
        assert!(header.contains(&format!("constexpr unsigned EMU_{} = {number};\n", op.name)));
        assert!(op.inputs <= MAX_WORDS && op.outputs <= MAX_WORDS);
    }
}
