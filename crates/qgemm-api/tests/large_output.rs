//! Outputs of more than 2³¹ elements on the first CUDA
//! device: offsets are 64 bits wide.
#![cfg(feature = "cuda")]

use qgemm_api::{Args, Context, DType, Error, HalError, Problem, quantize};

const M: usize = 66_000;
const N: usize = 33_000;
const K: usize = 64;

/// Rows of D before, at and after element
/// 2³¹, and the last.
const ROWS: [usize; 4] = [0, (1 << 31) / N - 1, (1 << 31) / N + 1, M - 1];

#[test]
fn rows_beyond_2_to_the_31_are_right() -> Result<(), Error> {
    let ctx = match Context::open("cuda:0") {
        Err(Error::Hal(error @ HalError::NoDevice { .. })) => {
            qgemm_testkit::skipped("large outputs on cuda:0", &error.to_string());
            return Ok(());
        }
        opened => opened?,
    };
    let bytes = M * N * 2;
    if ctx.info().memory_bytes < 2 * bytes as u64 {
        qgemm_testkit::skipped("large outputs on cuda:0", "the device has too little memory");
        return Ok(());
    }
    let values: Vec<f32> = (0..N * K).map(|i| ((i * 7919) % 1999) as f32 / 999.0 - 1.0).collect();
    let (weight, _) = quantize(&values, N, K, "q4_0".parse()?)?;
    let weight = ctx.load(&weight)?;
    let x: Vec<f32> = (0..M * K).map(|i| ((i * 31) % 257) as f32 / 128.0 - 1.0).collect();
    let x = DType::F16.encode(&x);

    let stream = ctx.default_stream();
    let run = |x: &[u8], m: usize| -> Result<_, Error> {
        // One family, whose rows do not depend on the batch.
        let problem = Problem::new(&weight, m).x_dtype(DType::F16).d_dtype(DType::F16).batch_invariant(true);
        let plan = ctx.plan(&problem)?;
        let x = ctx.upload(x)?;
        let mut d = ctx.allocate(m * N * 2)?;
        let mut workspace = ctx.workspace(plan.workspace_bytes())?;
        let args = Args::new(&x, &weight, &mut d).workspace(&mut workspace);
        plan.run(&stream, args)?;
        ctx.synchronize(&stream)?;
        Ok(d)
    };
    let whole = run(&x, M)?;
    for row in ROWS {
        let alone: Vec<u8> = ctx.download(&run(&x[row * K * 2..][..K * 2], 1)?)?;
        let got: Vec<u8> = ctx.download(whole.slice(row * N * 2..(row + 1) * N * 2)?)?;
        assert!(got == alone, "row {row} differs from the same row alone");
        assert!(got.iter().any(|&b| b != 0), "row {row} is not all zeros");
    }
    Ok(())
}
