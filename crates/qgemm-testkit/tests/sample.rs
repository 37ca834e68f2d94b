//! Oracle against the outputs in the sample file, which
//! other software computed.

use qgemm_api::open_model;
use qgemm_formats::{DType, HostWeight};
use qgemm_testkit::{Added, Tolerance, compare, multiply};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../samples/minilm-layer3.safetensors");

#[test]
fn oracle_reproduces_the_samples_outputs() {
    let model = open_model(SAMPLE).expect("the sample opens");
    for layer in ["ffn_up", "ffn_down"] {
        let dense = |part: &str| model.dense(&format!("{layer}.{part}")).expect("the sample has it");
        let (weight, bias) = (dense("weight"), dense("bias").to_f32());
        let [n, k] = weight.shape[..] else { panic!("{layer}: {:?} is no matrix", weight.shape) };
        let format = "f32".parse().expect("a format");
        let weight = HostWeight::new(format, n, k, DType::F32.encode(&weight.to_f32()).into()).expect("valid");
        let added = Added { bias: Some(&bias), ..Added::default() };
        let expected = multiply(&weight, &dense("input").to_f32(), &added);
        // Outputs were computed in f64 and rounded to f32.
        let tolerance = Tolerance::relative(1e-14);
        let comparison = compare(&dense("output").to_f32(), &expected, tolerance);
        assert!(comparison.within(tolerance), "{layer}: {comparison:?}");
    }
}
