//! Quick start, from f16 weights in a file to checked results:
//! `cargo run --release --example quickstart`.
//!
//! It quantizes three layers of `samples/minilm-layer3.safetensors` to
//! several formats. It multiplies them with the sample's activations,
//! at 1 and 58 tokens, on the best device (or `-- --device cpu`).
//! Results are compared with an f64 oracle; the exit code is 1
//! when a number is wrong.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use qgemm_api::{Args, Context, DType, Format, HostWeight, Model, Problem, open_model, quantize};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../samples/minilm-layer3.safetensors");

/// Layers with their activations. `attn_q` has none in the sample;
/// those of `ffn_up` are as wide and stand in for them.
const LAYERS: [(&str, &str); 3] = [("ffn_up", "ffn_up"), ("ffn_down", "ffn_down"), ("attn_q", "ffn_up")];

/// Formats, with the permitted quantization error as a share
/// of the output's energy.
const FORMATS: [(&str, f64); 6] =
    [("q4_0", 0.02), ("q4_k", 0.02), ("int4_g128", 0.02), ("q6_k", 1e-3), ("q8_0", 1e-4), ("fp8_e4m3_block128", 2e-3)];

/// Permitted error of the kernel beyond that, for unquantized
/// activations (with f16 weights for large M on a GPU), and for
/// 8-bit blocks of activations. The latter cost most for tokens
/// with a few large values.
const KERNEL_LOSS: f64 = 1e-6;
const QUANTIZED_X_LOSS: f64 = 3e-4;

/// Activations are rounded to f16; outputs are f32.
const X_DTYPE: DType = DType::F16;

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("{wrong} results are wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<usize, Box<dyn Error>> {
    let ctx = Context::open(&device_argument()?)?;
    println!("{} ({}, {})\n", ctx.info().name, ctx.info().id, ctx.info().arch);
    println!(
        "{:<9} {:<18} {:>5} {:>6}  {:<34} {:>9} {:>9} {:>10} {:>8} {:>8}",
        "layer", "format", "bits", "tokens", "kernel", "vs oracle", "vs layer", "time", "GB/s", "GFLOP/s"
    );
    let model = open_model(SAMPLE)?;
    let mut wrong = 0;
    let mut notes = Vec::new();
    for (name, input) in LAYERS {
        let layer = Layer::read(&model, name, input)?;
        for (format, largest_loss) in FORMATS {
            let format: Format = format.parse()?;
            if let Err(error) = format.check_k(layer.k) {
                notes.push(format!("{name}: {error}"));
                continue;
            }
            let (host, _) = quantize(&layer.weights, layer.n, layer.k, format)?;
            for tokens in [1, layer.tokens] {
                let row = multiply_layer(&ctx, &layer, &host, tokens)?;
                let right = row.kernel_error <= row.kernel_limit && row.layer_error <= largest_loss + row.kernel_limit;
                wrong += usize::from(!right);
                println!("{name:<9} {format:<18} {:>5.2} {tokens:>6}  {row}{}", bits(&host), mark(right));
            }
        }
    }
    println!(
        "\nvs oracle: squared error of the kernel against f64 on the same quantized weights, by energy; 1e-5 to 2e-4 where it"
    );
    println!("           takes activations in blocks of eight bits");
    println!("vs layer:  squared error against the layer before quantization, by energy");
    for note in notes {
        println!("left out:  {note}");
    }
    Ok(wrong)
}

/// `auto`, or the value of `--device`.
fn device_argument() -> Result<String, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Ok("auto".into()),
        ["--device", device] => Ok(device.into()),
        _ => Err(format!("expected `--device <name>`, got `{}`", arguments.join(" "))),
    }
}

/// Linear layer with activations.
struct Layer {
    n: usize,
    k: usize,
    tokens: usize,
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
}

impl Layer {
    fn read(model: &Model, name: &str, input: &str) -> Result<Self, Box<dyn Error>> {
        let weight = model.dense(&format!("{name}.weight"))?;
        let x = model.dense(&format!("{input}.input"))?;
        let (&[n, k], &[tokens, width]) = (&weight.shape[..], &x.shape[..]) else {
            return Err(format!("{name}: expected matrices, got {:?} and {:?}", weight.shape, x.shape).into());
        };
        if width != k {
            return Err(format!("{name}: expected activations of width {k}, got {width}").into());
        }
        let bias = model.dense(&format!("{name}.bias")).ok().map(|bias| bias.to_f32());
        Ok(Self { n, k, tokens, weights: weight.to_f32(), bias, x: x.to_f32() })
    }

    /// Output of the layer for `x` with these weights, in f64.
    fn expected(&self, weights: &[f32], x: &[f32]) -> Vec<f64> {
        let bias = |n: usize| self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]));
        let dot = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
        let of_token = |x| weights.chunks_exact(self.k).enumerate().map(move |(n, w)| dot(w, x) + bias(n));
        x.chunks_exact(self.k).flat_map(of_token).collect()
    }
}

/// Table row of one product.
struct Row {
    kernel: String,
    kernel_error: f64,
    kernel_limit: f64,
    layer_error: f64,
    time: Duration,
    bytes: f64,
    macs: f64,
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.time.as_secs_f64();
        write!(
            f,
            "{:<34} {:>9.1e} {:>9.1e} {:>7.1} us {:>8.1} {:>8.1}",
            self.kernel,
            self.kernel_error,
            self.layer_error,
            seconds * 1e6,
            self.bytes / seconds / 1e9,
            2.0 * self.macs / seconds / 1e9,
        )
    }
}

fn multiply_layer(ctx: &Context, layer: &Layer, host: &HostWeight, tokens: usize) -> Result<Row, Box<dyn Error>> {
    let weight = ctx.load(host)?;
    let mut problem = Problem::new(&weight, tokens).x_dtype(X_DTYPE).d_dtype(DType::F32);
    if layer.bias.is_some() {
        problem = problem.bias(DType::F32);
    }
    let plan = ctx.plan(&problem)?;

    let x = &layer.x[..tokens * layer.k];
    let x_buffer = ctx.upload(&X_DTYPE.encode(x))?;
    let bias = layer.bias.as_ref().map(|bias| ctx.upload(&DType::F32.encode(bias))).transpose()?;
    let mut d = ctx.allocate(tokens * layer.n * DType::F32.bytes())?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.default_stream();
    let mut launch = || {
        let mut args = Args::new(&x_buffer, &weight, &mut d).workspace(&mut workspace);
        args.bias = bias.as_ref().map(Into::into);
        plan.run(&stream, args)
    };

    const WARM_UP: u32 = 3;
    const LAUNCHES: u32 = 20;
    for _ in 0..WARM_UP {
        launch()?;
    }
    let start = ctx.device().record(&stream)?;
    for _ in 0..LAUNCHES {
        launch()?;
    }
    let end = ctx.device().record(&stream)?;
    let time = ctx.device().elapsed(&start, &end)? / LAUNCHES;

    let got = DType::F32.decode(&ctx.download(&d)?);
    let config = plan.launch().ok_or("nothing was launched")?.config;
    let kernel_limit = if config.x_format.plain().is_some() { KERNEL_LOSS } else { QUANTIZED_X_LOSS };
    // Activations as given to the kernel.
    let given = X_DTYPE.decode(&X_DTYPE.encode(x));
    Ok(Row {
        kernel: plan.kernel_name().to_owned(),
        kernel_error: squared_error(&got, &layer.expected(&host.dequantize()?, &given)),
        kernel_limit,
        layer_error: squared_error(&got, &layer.expected(&layer.weights, x)),
        time,
        bytes: plan.bytes(),
        macs: plan.macs(),
    })
}

/// Relative error by energy: the sum of squared errors over the
/// sum of squared results.
fn squared_error(got: &[f32], expected: &[f64]) -> f64 {
    let errors = got.iter().zip(expected).map(|(got, expected)| (f64::from(*got) - expected).powi(2));
    errors.sum::<f64>() / expected.iter().map(|expected| expected.powi(2)).sum::<f64>()
}

/// Bits per weight, row scales included.
fn bits(host: &HostWeight) -> f64 {
    let bytes = host.blocks().len() + host.row_scale().map_or(0, |scales| scales.len() * 4);
    bytes as f64 * 8.0 / (host.n() * host.k()) as f64
}

fn mark(right: bool) -> &'static str {
    if right { "" } else { "  WRONG" }
}
