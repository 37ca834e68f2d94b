//! Two streams: one loads weights while the other multiplies,
//! and an event passes a result between them. On a CUDA
//! device the product is also captured in a graph, whose X
//! changes between replays.
//!
//! `cargo run --release --example streams -- cuda:0` (`auto`
//! without a device name).

#![allow(clippy::print_stdout, reason = "prints its results")]

use qgemm_api::{Context, Error, HostWeight, quantize};

const WIDTH: usize = 256;

fn main() -> Result<(), Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let ctx = Context::open(&device)?;
    println!("through {} layers on two streams: {:?}", LAYERS, &run(&ctx)?[..4]);
    #[cfg(feature = "cuda")]
    if ctx.info().id.kind == qgemm_api::DeviceKind::Cuda {
        println!("replayed with X of 1, 2 and 3: {:?}", replays(&ctx)?);
    }
    Ok(())
}

const LAYERS: usize = 3;

/// Output of the layers for a token of ones.
pub fn run(ctx: &Context) -> Result<Vec<f32>, Error> {
    let (loading, multiplying) = (ctx.new_stream()?, ctx.new_stream()?);
    let mut x = ctx.upload(&[1.0f32; WIDTH])?;
    let mut d = ctx.allocate(WIDTH * 4)?;
    let mut next = ctx.load_on(&loading, &weight()?)?;
    for i in 0..LAYERS {
        let layer = ctx.layer(&next, |problem| problem)?;
        let mut workspace = ctx.workspace(layer.prepare([1])?)?;
        layer.run(&multiplying, 1, layer.args(&x, &mut d).workspace(&mut workspace))?;
        if i + 1 < LAYERS {
            // Concurrent with the product. Ready for every stream on return.
            next = ctx.load_on(&loading, &weight()?)?;
        }
        std::mem::swap(&mut x, &mut d);
    }
    // The reading stream waits on the device, not on the host.
    let reading = ctx.new_stream()?;
    ctx.wait(&reading, &ctx.record(&multiplying)?)?;
    ctx.download_on(&reading, &x)
}

/// First output for three X in turn, by one graph.
#[cfg(feature = "cuda")]
fn replays(ctx: &Context) -> Result<Vec<f32>, Error> {
    use qgemm_api::cuda::capture_with;

    let layer = ctx.layer(&ctx.load(&weight()?)?, |problem| problem)?;
    let mut workspace = ctx.workspace(layer.prepare([1])?)?;
    let stream = ctx.new_stream()?;
    let mut buffers = [ctx.upload(&[0.0f32; WIDTH])?, ctx.allocate(WIDTH * 4)?];
    // The first launch of a kernel may load it,
    // which a capture forbids.
    let [x, d] = &mut buffers;
    layer.run(&stream, 1, layer.args(&*x, d).workspace(&mut workspace))?;
    ctx.synchronize(&stream)?;
    let mut graph = capture_with(&**ctx.device(), &stream, buffers, |[x, d]| {
        layer.run(&stream, 1, layer.args(x.view(), d).workspace(&mut workspace))
    })?;
    let replay = |value: f32| {
        let [x, _] = graph.buffers_mut();
        ctx.upload_on(&stream, &[value; WIDTH], x)?;
        graph.replay(&stream)?;
        let [_, d] = graph.buffers();
        Ok(ctx.download_on::<f32>(&stream, d)?[0])
    };
    [1.0, 2.0, 3.0].into_iter().map(replay).collect()
}

/// Identity weight.
fn weight() -> Result<HostWeight, Error> {
    let identity: Vec<f32> = (0..WIDTH * WIDTH).map(|i| f32::from(u8::from(i % (WIDTH + 1) == 0))).collect();
    Ok(quantize(&identity, WIDTH, WIDTH, "q8_0".parse()?)?.0)
}
