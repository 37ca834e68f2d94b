//! candle's quantized Llama and ours on SmolLM2-135M: tokens and logits.

use std::fs::File;
use std::io::{BufReader, Write};

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use qgemm_candle::{Context, Llama, LlamaOptions};

/// Path of the model; `cargo xtask model smollm2` prints it.
const VARIABLE: &str = "QGEMM_TEST_LANGUAGE_MODEL";
/// "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n".
const PROMPT: &[u32] = &[1, 4093, 198, 1780, 314, 9354, 47, 2, 198, 1, 520, 9531, 198];
const TOKENS: usize = 12;
/// NMSE of the logits: both round activations to eight bits, with scales of other spans.
const NMSE: f64 = 1e-2;

#[test]
fn tokens_are_candles() -> Result<()> {
    let Ok(path) = std::env::var(VARIABLE) else {
        // Not by a macro, whose output tests capture.
        writeln!(std::io::stderr(), "skipped: candle's Llama beside ours: {VARIABLE} is not set")?;
        return Ok(());
    };
    let device = Device::Cpu;
    let mut file = BufReader::new(File::open(path)?);
    let content = Content::read(&mut file)?;
    let ctx = Context::new(&device)?;
    let options = LlamaOptions::new(&device, PROMPT.len() + TOKENS);
    let mut ours = Llama::from_gguf(&ctx, &content, &mut file, options)?;
    let mut theirs = ModelWeights::from_gguf(content, &mut file, &device)?;

    let (mut input, mut position, mut text) = (PROMPT.to_vec(), 0, Vec::new());
    for _ in 0..TOKENS {
        let tokens = Tensor::new(&*input, &device)?.unsqueeze(0)?;
        let expected = theirs.forward(&tokens, position)?.flatten_all()?.to_vec1::<f32>()?;
        let got = ours.forward(&tokens, position)?.flatten_all()?.to_vec1::<f32>()?;
        let nmse = nmse(&expected, &got);
        assert!(nmse <= NMSE, "token {}: an NMSE of {nmse:e} is more than {NMSE:e}", text.len());
        assert_eq!(best(&expected), best(&got), "token {}", text.len());
        position += input.len();
        input = vec![best(&expected)];
        text.push(input[0]);
    }
    // A text, not one token again and again.
    assert!(text.iter().collect::<std::collections::HashSet<_>>().len() > TOKENS / 2, "{text:?}");
    Ok(())
}

fn best(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0) as u32
}

fn nmse(expected: &[f32], got: &[f32]) -> f64 {
    let squares =
        |of: fn(f64, f64) -> f64| expected.iter().zip(got).map(|(&a, &b)| of(a.into(), b.into())).sum::<f64>();
    squares(|a, b| (a - b) * (a - b)) / squares(|a, _| a * a)
}
