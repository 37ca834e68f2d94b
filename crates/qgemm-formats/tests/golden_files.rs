//! GGUF formats against bytes of ggml's reference quantizers and values
//! of the Python package `gguf` (see `golden/README.md`).

use std::path::Path;

use qgemm_formats::{ActivationFormat, Encoding, Format, quantize_by_importance};

fn golden(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn golden_f32(file: &str) -> Vec<f32> {
    golden(file).chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// GGUF formats: all but f32 have golden blocks.
fn gguf_formats() -> impl Iterator<Item = Format> {
    Format::all().filter(|f| f.ggml_type.is_some())
}

/// Asserts that all blocks are equal and names the first that differs.
///
/// `unspecified` returns the leading bytes to compare in blocks that
/// ggml leaves undefined.
fn assert_blocks_equal(
    name: &str,
    inputs: &[f32],
    (block_len, block_bytes): (usize, usize),
    got: &[u8],
    expected: &[u8],
    unspecified: impl Fn(&[f32]) -> Option<usize>,
) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let blocks = got.chunks_exact(block_bytes).zip(expected.chunks_exact(block_bytes));
    for (i, ((got, expected), x)) in blocks.zip(inputs.chunks_exact(block_len)).enumerate() {
        let defined = unspecified(x).unwrap_or(block_bytes);
        assert_eq!(got[..defined], expected[..defined], "{name} block {i}, from {}", x[0]);
    }
}

#[test]
fn weights_quantize_as_ggml() {
    let inputs = golden_f32("inputs.f32");
    let mut checked = 0;
    for format in gguf_formats().filter(|f| f.name != "f32") {
        let quantize = format.quantize_blocks.unwrap_or_else(|| panic!("{format} has a quantizer"));
        let mut got = vec![0; inputs.len() / format.block_len * format.block_bytes];
        quantize(&inputs, &mut got);
        let max = |x: &[f32]| x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        let unspecified = |x: &[f32]| match format.name {
            // ggml converts a negative exponent to an unsigned byte.
            "mxfp4" if max(x) < 2f32.powi(-125) && max(x) > 0.0 => Some(0),
            _ => None,
        };
        let expected = golden(&format!("{format}.blocks"));
        let block = (format.block_len, format.block_bytes);
        assert_blocks_equal(format.name, &inputs, block, &got, &expected, unspecified);
        checked += 1;
    }
    assert_eq!(checked, 16);
}

/// Rows 0 and 12 of each format are compared first, so that
/// a difference is found in its block.
#[test]
fn weights_quantize_as_ggml_by_importance() {
    let (inputs, importance) = (golden_f32("inputs.f32"), golden_f32("importance.f32"));
    let importance = |k: usize| match k {
        1024 => &importance[..1024],
        256 => &importance[1024..1280],
        _ => &importance[1280..],
    };
    let hashes = String::from_utf8(golden("by_importance.sha256")).expect("text");
    for line in hashes.lines() {
        let [name, n, k, hash] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let (n, k): (usize, usize) = (n.parse().expect("a number"), k.parse().expect("a number"));
        let (format, values): (Format, _) = (name.parse().expect("a format"), &inputs[..n * k]);
        let got = quantize_by_importance(values, n, k, format, importance(k)).expect("in range").weight;
        if k == 1024 {
            let rows = [&values[..k], &values[12 * k..13 * k]].concat();
            let got = [got.row(0), got.row(12)].concat();
            let block = (format.block_len, format.block_bytes);
            assert_blocks_equal(name, &rows, block, &got, &golden(&format!("{name}.by_importance")), |_| None);
        }
        let digest: String = hmac_sha256::Hash::hash(got.blocks()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, hash, "{name} {n} x {k}");
    }
    assert_eq!(hashes.lines().count(), 27);
}

#[test]
fn activations_quantize_as_ggml() {
    let inputs = golden_f32("inputs.f32");
    for format in ActivationFormat::ALL {
        let mut got = vec![0; inputs.len() / format.block_len() * format.block_bytes()];
        format.quantize_blocks(&inputs, &mut got);
        let expected = golden(&format!("{}.blocks", format.name()));
        let block = (format.block_len(), format.block_bytes());
        assert_blocks_equal(format.name(), &inputs, block, &got, &expected, |_| None);
    }
}

#[test]
fn blocks_decode_as_in_the_gguf_package() {
    let mut checked = 0;
    for format in gguf_formats() {
        let blocks = golden(&format!("{format}.random"));
        let expected = golden_f32(&format!("{format}.decoded"));
        assert_eq!(blocks.len() / format.block_bytes * format.block_len, expected.len(), "{format}");
        let mut got = vec![f32::NAN; format.block_len];
        let pairs = blocks.chunks_exact(format.block_bytes).zip(expected.chunks_exact(format.block_len));
        for (i, (block, expected)) in pairs.enumerate() {
            (format.dequantize_block)(block, &mut got);
            assert_eq!(got, expected, "{format} block {i}");
        }
        checked += 1;
    }
    assert_eq!(checked, 17);
}

#[test]
fn quantized_values_decode_near_the_inputs() {
    let inputs = golden_f32("inputs.f32");
    for format in gguf_formats() {
        let blocks = if format.name == "f32" { golden("inputs.f32") } else { golden(&format!("{format}.blocks")) };
        let mut got = vec![0.0; format.block_len];
        // The first 2560 inputs are normally distributed
        // with σ = 1, 0.001 or 0.02.
        let (mut error, mut power) = (0.0f64, 0.0f64);
        let pairs = blocks.chunks_exact(format.block_bytes).zip(inputs[..2560].chunks_exact(format.block_len));
        for (block, x) in pairs {
            (format.dequantize_block)(block, &mut got);
            for (a, b) in got.iter().zip(x) {
                error += f64::from(a - b).powi(2);
                power += f64::from(*b).powi(2);
            }
        }
        let limit = match format.encoding {
            Encoding::Plain(_) => 1e-5,
            // Normal values are no weights of ternary networks.
            Encoding::IntOffset { offset: 1 } => 0.75,
            // Half the precision of the bit width, because FP4's levels are uneven.
            _ => 4.0 * 4f64.powi(-(format.code_bits() as i32)),
        };
        assert!(error / power < limit, "{format}: NMSE {:.2e}, limit {limit:.2e}", error / power);
    }
}
