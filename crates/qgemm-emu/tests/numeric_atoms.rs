//! Emulated arithmetic and conversion atoms against other
//! formulations of the instructions.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use qgemm_cuda::KernelSpec;
use qgemm_emu::{Access, Geometry, Region, device_address, launch_spec};
use qgemm_formats::float8::{e4m3_to_f32, e5m2_to_f32, f32_to_e4m3, f32_to_e5m2};
use qgemm_hal::Variant;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const THREADS: usize = 256;
const NAN_F16: u16 = 0x7fff;

/// Kernel parameter `Numeric` in `kernels/numeric.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    inputs: u64,
    outputs: u64,
}

/// Evaluates an expression of `in` (three words) and of `x` and `y`
/// (the first two as floats).
fn evaluate(expression: &str, inputs: &[[u32; 3]]) -> Vec<u32> {
    let blocks = inputs.len().div_ceil(THREADS);
    let mut words = vec![[0u32; 4]; blocks * THREADS];
    for (words, input) in words.iter_mut().zip(inputs) {
        words[..3].copy_from_slice(input);
    }
    let spec = KernelSpec {
        name: format!("numeric {expression}"),
        entry: "numeric.cu",
        text: include_str!("kernels/numeric.cu"),
        symbol: "numeric",
        prelude: format!("#define QG_VARIANT 89\n#define QG_EXPRESSION {expression}\n"),
        arch_specific: false,
    };
    let device = qgemm_emu::open(Variant::Sm89.number()).expect("a C++ compiler");
    let stream = device.default_stream();
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    let mut outputs = vec![0u32; words.len()];
    let mut from = device.allocate(bytes.len(), "the inputs").expect("memory");
    let to = device.allocate(outputs.len() * 4, "the outputs").expect("memory");
    device.upload(&stream, bytes, (&mut from).into()).expect("an upload");
    let address = |view| device_address(&*device, view).expect("an address");
    let params = Params { inputs: address((&from).into()), outputs: address((&to).into()) };
    let geometry = Geometry {
        blocks: [blocks as u32, 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        params: bytemuck::bytes_of(&params),
        starts_early: false,
    };
    let region = |name, start: u64, len, access| Region { name, start: start as usize, len, access };
    let regions = [
        region("the inputs", params.inputs, from.len(), Access::Read),
        region("the outputs", params.outputs, to.len(), Access::Write),
    ];
    // SAFETY: `Params` is the kernel's parameter, and nothing
    // else uses the two buffers.
    unsafe { launch_spec(&*device, &spec, geometry, &regions) }.expect("a launch");
    device.download(&stream, (&to).into(), bytemuck::cast_slice_mut(&mut outputs)).expect("a download");
    outputs.truncate(inputs.len());
    outputs
}

/// Compares an expression with `expected` on all inputs.
fn check(expression: &str, inputs: &[[u32; 3]], expected: impl Fn([u32; 3]) -> u32) {
    for (&input, got) in inputs.iter().zip(evaluate(expression, inputs)) {
        assert_eq!(
            got,
            expected(input),
            "{expression} of {input:#010x?}: {got:#010x}, expected {:#010x}",
            expected(input)
        );
    }
}

fn random_words(count: usize, seed: u64) -> Vec<[u32; 3]> {
    let mut rng = StdRng::seed_from_u64(seed);
    std::iter::repeat_with(|| rng.random()).take(count).collect()
}

/// Every f16, every midpoint of neighbours, and the adjacent f32 values.
fn around_every_f16() -> Vec<[u32; 3]> {
    let mut inputs = Vec::new();
    for bits in 0..=0x7bffu16 {
        let (this, next) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
        // The successor of the largest number would be 2^16.
        let middle = (this + if next.is_finite() { next } else { 65536.0 }) / 2.0;
        for point in [this, middle] {
            for nearby in [point.next_down(), point, point.next_up()] {
                inputs.extend([[nearby.to_bits(), (-nearby).to_bits(), 0], [(-nearby).to_bits(), nearby.to_bits(), 0]]);
            }
        }
    }
    inputs.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX].map(|x| [x.to_bits(), (-x).to_bits(), 0]));
    inputs.extend(random_words(50_000, 1));
    inputs
}

fn canonical(value: f16) -> u16 {
    if value.is_nan() { NAN_F16 } else { value.to_bits() }
}

#[test]
fn f16_to_f32_and_back() {
    let every: Vec<_> = (0..=u32::from(u16::MAX)).map(|bits| [bits, 0, 0]).collect();
    check("f32_to_bits(f16_to_f32(in.x))", &every, |[bits, ..]| {
        let value = f16::from_bits(bits as u16);
        if value.is_nan() { 0x7fff_ffff } else { value.to_f32().to_bits() }
    });
    check("f32_to_f16(x)", &around_every_f16(), |[bits, ..]| canonical(f16::from_f32(f32::from_bits(bits))).into());
}

#[test]
fn f32_to_bf16_pairs() {
    let half = |bits| {
        let value = bf16::from_f32(f32::from_bits(bits));
        u32::from(if value.is_nan() { 0x7fff } else { value.to_bits() })
    };
    let mut inputs = random_words(50_000, 2);
    // Ties and their neighbours.
    inputs.extend(
        random_words(20_000, 3).iter().map(|[a, b, _]| [a & 0xffff_0000 | 0x8000, b & 0xffff_0000 | 0x7fff, 0]),
    );
    check("f32_to_bf16x2(x, y)", &inputs, |[low, high, _]| half(low) | half(high) << 16);
}

#[test]
fn fp8_to_f16_pairs() {
    let every: Vec<_> = (0..=u32::from(u16::MAX)).map(|bits| [bits, 0, 0]).collect();
    for (expression, to_f32) in
        [("cvt_f16x2_e4m3x2(in.x)", e4m3_to_f32 as fn(u8) -> f32), ("cvt_f16x2_e5m2x2(in.x)", e5m2_to_f32)]
    {
        let half = |code: u32| u32::from(canonical(f16::from_f32(to_f32(code as u8))));
        check(expression, &every, |[pair, ..]| half(pair & 0xff) | half(pair >> 8) << 16);
    }
}

#[test]
fn f32_to_fp8_pairs() {
    for (expression, to_fp8) in
        [("cvt_e4m3x2_f32(y, x)", f32_to_e4m3 as fn(f32) -> u8), ("cvt_e5m2x2_f32(y, x)", f32_to_e5m2)]
    {
        let code = |bits| {
            let value = f32::from_bits(bits);
            if value.is_nan() { 0x7f } else { u32::from(to_fp8(value)) }
        };
        check(expression, &around_every_f16(), |[low, high, _]| code(low) | code(high) << 8);
    }
    // Ties, saturation and special values by hand.
    let limits = [464.0, 465.0, -1e30, f32::INFINITY].map(|x: f32| [x.to_bits(), 0x7fc0_0000, 0]);
    assert_eq!(evaluate("cvt_e4m3x2_f32(y, x)", &limits), [0x7f7e, 0x7f7e, 0x7ffe, 0x7f7e]);
    let limits = [61439.0, 61440.0, -1e30, f32::INFINITY].map(|x: f32| [x.to_bits(), 0xffc0_0000, 0]);
    assert_eq!(evaluate("cvt_e5m2x2_f32(y, x)", &limits), [0x7f7b, 0x7f7b, 0x7ffb, 0x7f7b]);
    let ties = [17.0, 19.0, 2f32.powi(-10), 3.0 * 2f32.powi(-10)].map(|x: f32| [x.to_bits(), 0, 0]);
    assert_eq!(evaluate("cvt_e4m3x2_f32(y, x)", &ties), [0x58, 0x5a, 0, 2]);
}

/// f16 nearest to `units` of 2^-48, ties to even, by search.
fn nearest(units: i128, zero_is_negative: bool) -> u16 {
    let magnitude = units.unsigned_abs();
    let code = |code: u32| -> u128 {
        let exponent = (code >> 10).max(1);
        let significand = if code < 0x400 { code } else { code & 0x3ff | 0x400 };
        u128::from(significand) << (exponent - 1 + 24)
    };
    // Codes rise with magnitude. The code after the largest number counts
    // as 2^16 and is infinity.
    let (mut low, mut high) = (0, 0x7c00);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if code(middle) <= magnitude { low = middle } else { high = middle }
    }
    let twice = 2 * magnitude;
    let middle = code(low) + code(high);
    let rounded = if twice > middle || twice == middle && low % 2 == 1 { high } else { low };
    let negative = units < 0 || units == 0 && zero_is_negative;
    rounded as u16 | u16::from(negative) << 15
}

/// Finite f16 in units of 2^-24.
fn units(value: f16) -> i128 {
    i128::from((f64::from(value) * 2f64.powi(24)) as i64)
}

/// a * b + c, rounded once.
fn fma(a: u16, b: u16, c: u16) -> u16 {
    let [a, b, c] = [a, b, c].map(f16::from_bits);
    if ![a, b, c].into_iter().all(f16::is_finite) {
        return canonical(f16::from_f64(f64::from(a) * f64::from(b) + f64::from(c)));
    }
    let product_is_negative = a.is_sign_negative() != b.is_sign_negative();
    nearest(units(a) * units(b) + (units(c) << 24), product_is_negative && c.is_sign_negative())
}

/// Triples of f16 pairs: random bits, and nearly equal or
/// very different magnitudes.
fn f16_triples() -> Vec<[u32; 3]> {
    let mut rng = StdRng::seed_from_u64(4);
    let mut triples = random_words(60_000, 5);
    for _ in 0..60_000 {
        let [a, b] = [0, 1].map(|_| f16::from_bits(rng.random_range(0..0x7c00) | rng.random::<u16>() & 0x8000));
        // Near the product, near a tie of the sum, tiny, or large.
        let product = f16::from_f32(-a.to_f32() * b.to_f32()).to_bits();
        let c = match rng.random_range(0..4) {
            0 => product,
            1 => product ^ rng.random_range(0..4),
            2 => rng.random_range(0..0x800),
            _ => rng.random_range(0x7000..0x7c00),
        };
        let upper: u32 = rng.random::<u32>() & 0xffff_0000;
        triples.push([u32::from(a.to_bits()) | upper, u32::from(b.to_bits()) | upper, u32::from(c) | upper]);
    }
    triples
}

fn halves(function: impl Fn([u16; 3]) -> u16) -> impl Fn([u32; 3]) -> u32 {
    move |words| {
        u32::from(function(words.map(|word| word as u16)))
            | u32::from(function(words.map(|word| (word >> 16) as u16))) << 16
    }
}

#[test]
fn f16_pairs_are_rounded_once() {
    let triples = f16_triples();
    check("sub_f16x2(in.x, in.y)", &triples, halves(|[a, b, _]| canonical(f16::from_bits(a) - f16::from_bits(b))));
    check("mul_f16x2(in.x, in.y)", &triples, halves(|[a, b, _]| canonical(f16::from_bits(a) * f16::from_bits(b))));
    check("fma_f16x2(in.x, in.y, in.z)", &triples, halves(|[a, b, c]| fma(a, b, c)));
}

#[test]
fn f32_products_and_sums_are_rounded_once() {
    let expression = "f32_to_bits(fma_f32(bits_to_f32(in.x), bits_to_f32(in.y), bits_to_f32(in.z)))";
    let mut triples = random_words(20_000, 7);
    // Operands of nested scales: 2^23 + byte, times a factor, minus 2^23 times it.
    for [byte, factor, _] in random_words(20_000, 8) {
        let d = f16::from_bits(factor as u16).to_f32();
        let biased = 8_388_608.0 + (byte % 256) as f32;
        triples.push([biased.to_bits(), d.to_bits(), (-8_388_608.0 * d).to_bits()]);
    }
    check(expression, &triples, |words| {
        let [a, b, c] = words.map(f32::from_bits);
        let sum = a.mul_add(b, c);
        if sum.is_nan() { 0x7fff_ffff } else { sum.to_bits() }
    });
}

#[test]
fn square_roots_are_rounded_once() {
    let mut words = random_words(20_000, 9);
    words.extend([0.0, -0.0, -1.0, f32::INFINITY, f32::MIN_POSITIVE, f32::from_bits(1)].map(|x| [x.to_bits(), 0, 0]));
    check("f32_to_bits(sqrt_f32(x))", &words, |[bits, ..]| {
        // The root of a 24-bit number, rounded to 53 bits, is no tie of 24 bits.
        let root = f64::from(f32::from_bits(bits)).sqrt() as f32;
        if root.is_nan() { 0x7fff_ffff } else { root.to_bits() }
    });
}

#[test]
fn integers() {
    let words = random_words(20_000, 6);
    check("prmt(in.x, in.y, in.z)", &words, |[a, b, selector]| {
        let bytes = [a.to_le_bytes(), b.to_le_bytes()].concat();
        u32::from_le_bytes(std::array::from_fn(|i| {
            let nibble = selector as usize >> (4 * i) & 15;
            let byte = bytes[nibble & 7];
            if nibble < 8 { byte } else { (byte as i8 >> 7) as u8 }
        }))
    });
    check("and_or(in.x, in.y, in.z)", &words, |[a, mask, bits]| a & mask | bits);
    check("(u32)dp4a((i32)in.x, (i32)in.y, (i32)in.z)", &words, |[a, b, c]| {
        let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
        products.fold(c, |sum, (a, b)| sum.wrapping_add((i32::from(a as i8) * i32::from(b as i8)) as u32))
    });
    let extreme = [[0x8080_8080, 0x8080_8080, 0x7fff_ffff], [0x8080_8080, 0x7f7f_7f7f, 0x8000_0000]];
    assert_eq!(evaluate("(u32)dp4a((i32)in.x, (i32)in.y, (i32)in.z)", &extreme), [0x8000_ffff, 0x7fff_0200]);
}
