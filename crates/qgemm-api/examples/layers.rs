//! Gated feed-forward block as in an engine,
//! `Y += down(silu(gate·X) · up·X)`.
//!
//! Layers plan per number of tokens and share one workspace.
//! X, Y and intermediate activations are in one arena, and Y
//! is accumulated in place.
//!
//! `cargo run --release --example layers -- wgpu:0` (`auto`
//! without a device name).

#![allow(clippy::print_stdout, reason = "prints its results")]

use qgemm_api::{Activation, Context, DType, Error, HostWeight, quantize};

const WIDTH: usize = 256;
const HIDDEN: usize = 512;
const MOST_TOKENS: usize = 16;

fn main() -> Result<(), Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    for (tokens, largest) in run(&Context::open(&device)?)? {
        println!("{tokens:>2} tokens: the largest of Y is {largest:.4}");
    }
    Ok(())
}

/// Token counts, each with the largest magnitude of the result.
pub fn run(ctx: &Context) -> Result<Vec<(usize, f32)>, Error> {
    let [gate, up] = [weight(1, HIDDEN, WIDTH)?, weight(2, HIDDEN, WIDTH)?];
    let gate_up = ctx.load_gated(&gate, &up)?;
    let gate_up = ctx.layer(&gate_up, |problem| problem.activation(Activation::Silu))?;
    let down = ctx.layer(&ctx.load(&weight(3, WIDTH, HIDDEN)?)?, |problem| problem.residual_in_d())?;
    // No later request waits for a kernel, and the workspace is large enough.
    let bytes = gate_up.prepare(1..=MOST_TOKENS)?.max(down.prepare(1..=MOST_TOKENS)?);
    let mut workspace = ctx.workspace(bytes)?;

    let row = |columns: usize| MOST_TOKENS * columns * DType::F32.bytes();
    let mut x = ctx.allocate(2 * row(WIDTH) + row(HIDDEN))?;
    let mut hidden = x.split_off(row(WIDTH))?;
    let mut y = hidden.split_off(row(HIDDEN))?;

    let stream = ctx.default_stream();
    let mut results = Vec::new();
    for tokens in [1, 7, MOST_TOKENS] {
        let values = numbers(tokens, tokens * WIDTH);
        ctx.upload_into(&values, &mut x)?;
        ctx.upload_into(&values, &mut y)?; // the residual: what the block began with
        gate_up.run(&stream, tokens, gate_up.args(&x, &mut hidden).workspace(&mut workspace))?;
        down.run(&stream, tokens, down.args(&hidden, &mut y).workspace(&mut workspace))?;
        let out: Vec<f32> = ctx.download(y.slice(0..tokens * WIDTH * DType::F32.bytes())?)?;
        results.push((tokens, out.iter().fold(0.0, |largest: f32, v| largest.max(v.abs()))));
    }
    Ok(results)
}

fn weight(seed: usize, n: usize, k: usize) -> Result<HostWeight, Error> {
    Ok(quantize(&numbers(seed, n * k), n, k, "q4_k".parse()?)?.0)
}

/// `count` pseudo-random values in −0.1..0.1.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1999) as f32 / 9995.0 - 0.1).collect()
}
