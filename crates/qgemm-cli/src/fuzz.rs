//! Fuzzers of result files: those of `bench --baseline`, and all inputs of `report`.
//!
//! `QGEMM_FUZZ` and `QGEMM_FUZZ_SEED` are those of the test kit
//! (`qgemm-testkit/tests/fuzz.rs`).

use qgemm_api::Context;
use qgemm_testkit::fuzz::{FuzzCase, FuzzTarget, FuzzVerdict, fuzz, mutate};
use rand::Rng;
use rand::rngs::StdRng;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::bench::baseline::Baseline;
use crate::report::input::{BenchPoint, Results, SweepPoint, cases_of};
use crate::report::page::Page;
use crate::report::{self, sections};

const WORDS: &[&str] =
    &["qgemm", "pass", "fail", "skip", "q4_0", "us", "m", "n", "k", "microseconds", "noise", "shape", "verdict"];
/// Cases over all fuzzers. These run a share of them.
const CASES: u64 = 20_000;
const SHARE: u64 = 10;

/// Reads a text and renders it as a page.
type Reader = fn(&ResultsTarget, &str) -> Option<Page>;

/// Kind of result file: a reader and a valid example.
struct ResultsTarget {
    ctx: Context,
    files: Vec<(Reader, Value)>,
}

fn parsed<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}

fn target() -> ResultsTarget {
    let row = |us: f64| {
        json!({ "device": "a device", "shape": "1x2x3", "format": "q4_0", "x_dtype": "f16", "kernel": "gemv", "microseconds": us,
            "noise": 0.01, "bytes_per_second": 1e9, "flops": 1e12, "bandwidth_share": 0.5, "copies": 2, "graph": false })
    };
    let sweep = |m: usize| {
        json!({ "format": "q4_0", "m": m, "n": 64, "k": 64, "family": "gemm", "microseconds": 2.5, "estimated_microseconds": 3.0,
            "planned": m == 1 })
    };
    let case = |verdict: &str| json!({ "case": "a case", "nmse": 1e-6, "limit": 1e-5, "verdict": verdict, "detail": "a reason" });
    let figure = |weights: Option<&str>, us: Value| json!({ "weights": weights, "n": 64, "k": 64, "m": 8, "us": us });
    let results = json!({ "device": "a device", "through": "an API", "table": { "shapes": [[64, 64]], "columns": ["q4_0", "peer"] },
        "runs": [{ "by": "qgemm", "rows": [figure(Some("q4_0"), json!(3.5))] },
            { "by": "peer", "name": "A peer", "hidden": false, "rows": [figure(None, json!([3.0, 4.0]))] }] });
    let files: Vec<(Reader, Value)> = vec![
        (|_, text| Baseline::parse(text).ok().map(|baseline| judged(&baseline)), json!([row(7.0), row(8.0)])),
        (
            |_, text| {
                let (points, mut page) = (parsed::<Vec<BenchPoint>>(text)?, Page::new("t"));
                sections::regressions(&mut page, &points, Some(&points));
                Some(page)
            },
            json!([row(7.0), row(8.0)]),
        ),
        (
            |_, text| {
                let mut page = Page::new("t");
                sections::predicted(&mut page, &parsed::<Vec<SweepPoint>>(text)?).ok().map(|()| page)
            },
            json!([sweep(1), sweep(8)]),
        ),
        (
            |_, text| {
                let mut page = Page::new("t");
                report::tokens(&mut page, &parsed::<Results>(text)?, None).ok().map(|()| page)
            },
            results,
        ),
        (
            |_, text| {
                let (cases, mut page) = (cases_of(parsed(text)?).ok()?, Page::new("t"));
                sections::conformance(&mut page, &cases);
                Some(page)
            },
            json!({ "cases": [case("pass"), case("fail"), case("skip")] }),
        ),
        (
            |target, text| {
                let mut page = Page::new("t");
                report::roofline(&mut page, &parsed(text)?, Some(target.ctx.info())).ok().map(|()| page)
            },
            plan(),
        ),
    ];
    ResultsTarget { ctx: Context::open("cpu").expect("always there"), files }
}

/// Comparison of a fixed measurement with the baseline.
fn judged(baseline: &Baseline) -> Page {
    let now = json!({ "device": "a device", "shape": "1x2x3", "format": "q4_0", "x_dtype": "f16", "kernel": "gemv", "microseconds": 7.0,
        "noise": 0.0, "bytes_per_second": 1.0, "flops": 1.0, "bandwidth_share": 1.0, "copies": 2, "graph": false });
    let mut page = Page::new("t");
    let mut row = serde_json::from_value(now).expect("a row");
    baseline.judge(&mut row);
    page.text(serde_json::to_string(&row).expect("numbers"));
    page
}

/// Plan of a small model.
fn plan() -> Value {
    use qgemm_api::gguf::{GgufHeader, GgufScalar};
    let folder = tempfile::tempdir().expect("writable");
    let path = folder.path().join("m.gguf");
    let mut header = GgufHeader::new();
    header.metadata("general.architecture", "llama".into()).expect("a new key");
    let sizes = [
        ("block_count", 1u32),
        ("embedding_length", 64),
        ("feed_forward_length", 64),
        ("context_length", 64),
        ("attention.head_count", 4),
    ];
    sizes.iter().for_each(|&(name, size)| header.metadata(&format!("llama.{name}"), size.into()).expect("a new key"));
    header.metadata("llama.attention.layer_norm_rms_epsilon", GgufScalar::F32(1e-5).into()).expect("a new key");
    let matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let names = matrices.map(|role| format!("blk.0.{role}")).into_iter().chain(["token_embd".into()]);
    let shapes = names.map(|name| (name, vec![64, 64]));
    let norms = ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"].map(|name| (name.to_owned(), vec![64]));
    let tensors: Vec<(String, Vec<usize>)> = shapes.chain(norms).collect();
    let f32 = "f32".parse().expect("a format");
    let sizes =
        tensors.iter().map(|(name, shape)| header.tensor(&format!("{name}.weight"), shape, f32).expect("it fits"));
    let sizes: Vec<usize> = sizes.collect();
    let mut writer = header.write(std::fs::File::create(&path).expect("writable")).expect("writable");
    sizes.iter().for_each(|size| writer.tensor(&vec![0; *size]).expect("the right size"));
    writer.finish().expect("complete");
    let ctx = Context::open("cpu").expect("always there");
    let plan = ctx.plan_model(&path, &qgemm_api::PlanOptions::new(2)).expect("it is served");
    serde_json::to_value(plan).expect("JSON")
}

impl FuzzTarget for ResultsTarget {
    fn name(&self) -> &'static str {
        "results"
    }

    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a> {
        let (read, file) = &self.files[rng.random_range(0..self.files.len())];
        let mut file = file.clone();
        let mut said: Vec<String> = (0..rng.random_range(1..4)).map(|_| mutate::json(rng, &mut file, WORDS)).collect();
        let mut text = file.to_string();
        if rng.random_ratio(1, 5) {
            said.push(mutate::text(rng, &mut text));
        }
        let judge = move || {
            let Some(page) = read(self, &text) else { return FuzzVerdict::Refused };
            let html = page.html();
            // Coordinates and compared numbers must be finite.
            let wrong = ["=\"NaN", ",NaN", "=\"inf", "\"slower\":null", "NaN %", "inf %"]
                .into_iter()
                .find(|text| html.contains(text));
            wrong.map_or(FuzzVerdict::Accepted, |text| FuzzVerdict::Wrong(format!("the page has {text}")))
        };
        FuzzCase { mutations: said.join("; "), read: Box::new(judge) }
    }
}

#[test]
fn results() {
    let number = |variable: &str, otherwise: u64| match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{variable}={text}: {error}")),
        Err(_) => otherwise,
    };
    let (cases, seed, target) = (number("QGEMM_FUZZ", CASES) * SHARE / 100, number("QGEMM_FUZZ_SEED", 50), target());
    for (read, file) in &target.files {
        assert!(read(&target, &file.to_string()).is_some(), "{file}");
    }
    let outcome = fuzz(&target, seed, 0..cases, |read| allocation_counter::measure(read).bytes_max);
    assert!(outcome.findings.is_empty(), "seed {seed}: {:#?}", outcome.findings);
    assert!(outcome.accepted * 50 > cases, "{} of {cases} accepted", outcome.accepted);
}
