//! Activations are quantized on an adapter as [`QuantizedActivations`] says, bit by bit.

#[path = "common/case.rs"]
mod case;
mod common;

use case::{Case, Options};
use common::adapter;
use qgemm_formats::{DType, Format, HostWeight, QuantizedActivations};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const K: usize = 128;
const TOKENS: usize = 8;

/// The identity in Q8_0: every scale is 1.
fn identity(format: Format) -> HostWeight {
    let mut blocks = Vec::new();
    for (row, block) in (0..K).flat_map(|row| (0..K / 32).map(move |block| (row, block))) {
        blocks.extend([0x00, 0x3c]);
        blocks.extend((0..32).map(|i| u8::from(block * 32 + i == row)));
    }
    HostWeight::new(format, K, K, blocks.into()).expect("well formed")
}

/// Blocks of any magnitude, of few and of many bits, with and without a last block of zeros.
fn values(rng: &mut StdRng) -> Vec<f32> {
    let mut values = Vec::new();
    for block in 0..TOKENS * K / 32 {
        let exponent = rng.random_range(1u32..=250);
        let bits = rng.random_range(0..=23);
        values.extend((0..32).map(|_| {
            let below = exponent.saturating_sub(rng.random_range(0..=8)).max(1);
            let mantissa = rng.random_range(0u32..1 << 23) >> (23 - bits) << (23 - bits);
            let value = f32::from_bits(rng.random_range(0u32..=1) << 31 | below << 23 | mantissa);
            if block == 5 { 0.0 } else { value }
        }));
    }
    values
}

#[test]
fn codes_and_factors_are_those_of_the_model() {
    let Some(device) = adapter() else { return };
    let format: Format = "q8_0".parse().expect("exists");
    let family = device.families().iter().position(|family| family.name() == "gemv_int8").expect("is offered");
    let mut rng = StdRng::seed_from_u64(7);
    for round in 0..40 {
        let mut case = Case::new(format, [TOKENS, K, K], DType::F32, DType::F32, Options::default(), 1);
        let x = values(&mut rng);
        (case.weight, case.x) = (identity(format), DType::F32.encode(&x));
        let configs = case.configs(&*device, family);
        let got = DType::F32.decode(&case.run(&*device, family, configs[round % configs.len()]));
        for (token, (got, x)) in got.chunks(K).zip(x.chunks(K)).enumerate() {
            let expected = QuantizedActivations::new(x, 32, 32).dequantize(K);
            let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            assert_eq!(wrong, None, "round {round}, token {token}: {got:?}, expected {expected:?}");
        }
    }
}
