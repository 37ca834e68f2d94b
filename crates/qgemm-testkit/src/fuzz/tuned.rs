//! Fuzz target: tuned tables. Entries are read as they are in the
//! file, or left out. Plans stay right whatever a table says.

use qgemm_api::tuning::{KernelId, TunedTable};
use qgemm_api::{Budget, Context, DType, Error, Problem, TuneProblem, Weight, quantize};
use rand::Rng;
use rand::rngs::StdRng;
use serde_json::Value;

use super::{FuzzCase, FuzzTarget, FuzzVerdict, mutate};

const WORDS: &[&str] =
    &["cpu", "gemm", "q8_0", "f16", "f32", "tuned", "others", "avoided", "seconds", "kernel", "m", "k", "cut"];
const M: usize = 4;
const N: usize = 64;
const K: usize = 256;

/// Mutated tables of measurements on the CPU.
#[derive(Debug)]
pub struct TunedTarget {
    ctx: Context,
    weight: Weight,
    table: Value,
    expected: Vec<f32>,
}

impl TunedTarget {
    /// Measures a few problems.
    ///
    /// # Errors
    /// When the CPU cannot be opened.
    pub fn new() -> Result<Self, Error> {
        let ctx = Context::open("cpu")?;
        let values: Vec<f32> = (0..N * K).map(|i| (i % 17) as f32 - 8.0).collect();
        let (host, _) = quantize(&values, N, K, "q8_0".parse()?)?;
        let weights = [ctx.load(&host)?];
        let problem = || Problem::new(&weights[0], M).x_dtype(DType::F32);
        let budget = Budget::new(std::time::Duration::from_millis(200));
        let mut table = ctx.tune(&[TuneProblem::new(problem(), &weights)], budget, |_| ())?.table;
        if let Some(kernel) = ctx.candidates(&problem())?.last().map(qgemm_api::tuning::Candidate::kernel_id) {
            table.avoid(qgemm_api::tuning::AvoidedKernel::new(kernel, "for the fuzzer").on("another device"));
        }
        let table = serde_json::from_str(&table.to_json()?).unwrap_or_default();
        let [weight] = weights;
        let expected = Self::product(&ctx, &weight)?;
        Ok(Self { ctx, weight, table, expected })
    }

    fn product(ctx: &Context, weight: &Weight) -> Result<Vec<f32>, Error> {
        ctx.linear(weight, &[0.25; M * K], M, qgemm_api::XPrecision::Exact)
    }

    fn judge(&self, text: &str) -> FuzzVerdict {
        let Ok(table) = TunedTable::from_json(text) else { return FuzzVerdict::Refused };
        if let Some(what) = altered(text, &table) {
            return FuzzVerdict::Wrong(what);
        }
        match Self::product(&self.ctx.clone().with_tuned(table), &self.weight) {
            Ok(product) if product == self.expected => FuzzVerdict::Accepted,
            Ok(_) => FuzzVerdict::Wrong("a product changed by its table".into()),
            Err(error) => FuzzVerdict::Wrong(format!("a table kept a product from being planned: {error}")),
        }
    }
}

/// The first entry of `table` that is not in the file.
fn altered(text: &str, table: &TunedTable) -> Option<String> {
    let written = match table.to_json() {
        Ok(json) => serde_json::from_str::<Value>(&json).unwrap_or_default(),
        Err(error) => return Some(format!("cannot be written again: {error}")),
    };
    let file: Value = serde_json::from_str(text).unwrap_or_default();
    for list in ["tuned", "others", "avoided"] {
        let entries = written[list].as_array().into_iter().flatten();
        for entry in entries {
            let stands = file[list].as_array().into_iter().flatten().any(|other| says(other, entry));
            if !stands {
                return Some(format!("entry {entry} of {list} does not stand in the file: {}", file[list]));
            }
        }
    }
    None
}

/// Whether `entry` has all fields of `read`.
fn says(entry: &Value, read: &Value) -> bool {
    match (entry, read) {
        (Value::Object(entry), Value::Object(read)) => {
            read.iter().all(|(key, value)| entry.get(key).is_some_and(|entry| says(entry, value)))
        }
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        // Numbers in an identity may have leading zeros.
        (Value::String(a), Value::String(b)) => {
            a == b || a.parse::<KernelId>().is_ok_and(|a| b.parse::<KernelId>().is_ok_and(|b| a == b))
        }
        _ => entry == read,
    }
}

impl FuzzTarget for TunedTarget {
    fn name(&self) -> &'static str {
        "tuned tables"
    }

    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a> {
        let mut table = self.table.clone();
        let mut mutations: Vec<String> =
            (0..rng.random_range(1..4)).map(|_| mutate::json(rng, &mut table, WORDS)).collect();
        let mut text = table.to_string();
        if rng.random_ratio(1, 5) {
            mutations.push(mutate::text(rng, &mut text));
        }
        FuzzCase { mutations: mutations.join("; "), read: Box::new(move || self.judge(&text)) }
    }
}
