//! `qgemm support`: operations of each kind of device and
//! arithmetic of each format, as the kernel families report them.

mod families;
mod x_formats;

use std::fmt::Write;

use anyhow::Context as _;
use qgemm_api::tuning::{Math, OPERATIONS, OperationInfo, TileConfig, XPrologue};
use qgemm_api::{Context, DType, Format, HostWeight, Problem, Weight, XPrecision};
use qgemm_testkit::{WeightKind, weight};
use serde::Serialize;

use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::table::{self, Column, Row, words};
use x_formats::XFormats;

#[derive(clap::Args)]
pub struct Args {
    /// Devices. CUDA chips are emulated; these have the same kernels
    /// as real ones.
    #[arg(long, num_args = 1.., default_values = DEVICES)]
    device: Vec<String>,
}

/// Every kind of device.
pub const DEVICES: [&str; 8] =
    ["cpu", "wgpu:0", "emu:sm70", "emu:sm75", "emu:sm80", "emu:sm89", "emu:sm90", "emu:sm120"];

/// Token counts of the two parts of a cell. One token may avoid
/// rounding where many do not.
const TOKENS: [usize; 2] = [1, 64];

/// Rows and columns of W, which every format can store.
const SHAPE: [usize; 2] = [128, 256];

/// Best arithmetic of a device's families for a format and a type
/// of activations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Support {
    device: String,
    format: &'static str,
    x_dtype: String,
    tokens: usize,
    /// The arithmetic: `tensor`, `fma` or `dot`; `None` if no family
    /// supports it.
    math: Option<&'static str>,
    /// The type that weights may be rounded to before the product.
    rounded_weights: Option<String>,
    /// The type to which X is converted first, if no kernel reads X
    /// directly.
    converted_x: Option<String>,
    /// The coarsest format of X in the product, under each
    /// permission.
    x_formats: XFormats,
    /// Why no kernel exists.
    why_not: Option<String>,
}

impl Support {
    fn ask(ctx: &Context, weight: &Weight, x_dtype: DType, tokens: usize) -> Self {
        let unknown = Self {
            device: ctx.info().id.to_string(),
            format: weight.format().name,
            x_dtype: x_dtype.to_string(),
            tokens,
            math: None,
            rounded_weights: None,
            converted_x: None,
            x_formats: XFormats::default(),
            why_not: None,
        };
        let problem = Problem::new(weight, tokens).x_dtype(x_dtype);
        match ctx.candidates(&problem) {
            Err(error) => Self { why_not: Some(error.to_string()), ..unknown },
            Ok(candidates) => {
                let all = candidates.iter().map(|candidate| candidate.launch().config);
                let Some(math) = all.clone().map(|config| config.math).max_by_key(|&math| rank(math)) else {
                    return unknown;
                };
                let with_it: Vec<_> = all.filter(|config| config.math == math).collect();
                let converts = |config: &TileConfig| match config.x_prologue {
                    Some(XPrologue::Convert { .. }) => Some(config.x_format.to_string()),
                    _ => None,
                };
                let all_convert = with_it.iter().all(|config| config.x_prologue.is_some());
                let rounds = with_it.iter().find_map(|config| config.rounded_weights);
                Self {
                    math: Some(math.name()),
                    rounded_weights: rounds.map(|dtype| dtype.to_string()),
                    x_formats: XFormats::ask(ctx, &problem, x_dtype),
                    converted_x: with_it.iter().find_map(converts).filter(|_| all_convert),
                    ..unknown
                }
            }
        }
    }

    /// A short form for tables.
    fn mark(&self) -> String {
        let Some(math) = self.math else { return "–".into() };
        let rounded = if self.rounded_weights.is_some() { "*" } else { "" };
        let converted = self.converted_x.as_ref().map_or(String::new(), |dtype| format!(" ({dtype})"));
        format!("{math}{rounded}{converted}")
    }
}

/// Rank for choosing the arithmetic to name.
fn rank(math: Math) -> u32 {
    match math {
        Math::FmaF32 => 0,
        Math::DotI8 => 1,
        Math::TensorF16 => 2,
        _ => 3,
    }
}

/// Kernel families of an operation that support something on a
/// device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Families {
    device: String,
    operation: &'static str,
    summary: &'static str,
    families: Vec<&'static str>,
}

impl Row for Families {
    const COLUMNS: &'static [Column] =
        &[words("device", 9), words("operation", 10), words("families", 40), words("computes", 0)];

    fn cells(&self) -> Vec<String> {
        vec![self.device.clone(), self.operation.to_owned(), names(&self.families), self.summary.to_owned()]
    }
}

fn names(families: &[&str]) -> String {
    if families.is_empty() { "–".to_owned() } else { families.join(", ") }
}

/// Answers of all devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answers {
    operations: Vec<Families>,
    formats: Vec<Support>,
}

impl Row for Support {
    const COLUMNS: &'static [Column] = &[
        words("device", 9),
        words("format", 18),
        words("x", 4),
        words("tokens", 6),
        words("arithmetic", 10),
        words("weights as", 10),
        words("X as", 4),
        words("X at the coarsest", 17),
        words("why not", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let or_dash = |text: Option<&str>| text.unwrap_or("-").to_owned();
        vec![
            self.device.clone(),
            self.format.to_owned(),
            self.x_dtype.clone(),
            self.tokens.to_string(),
            or_dash(self.math),
            or_dash(self.rounded_weights.as_deref()),
            or_dash(self.converted_x.as_deref()),
            or_dash(self.x_formats.of(XPrecision::default())),
            self.why_not.clone().unwrap_or_default(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When a device cannot be opened, or a weight cannot be loaded.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let devices: Vec<&str> = args.device.iter().map(String::as_str).collect();
    let all = ask_all(&devices)?;
    match printing {
        Printing::Markdown => out::text(&page(&devices, &all))?,
        Printing::Json => out::json(&all)?,
        Printing::Text | Printing::Csv => {
            table::print(all.operations, printing)?;
            out::line("")?;
            table::print(all.formats, printing)?;
        }
    }
    Ok(Holds::Yes)
}

/// Asks every device, operation, format, type of activations and
/// token count.
fn ask_all(devices: &[&str]) -> anyhow::Result<Answers> {
    let mut all = Answers { operations: Vec::new(), formats: Vec::new() };
    for device in devices {
        let ctx = Context::open(device).with_context(|| format!("cannot open {device}"))?;
        let operations = ctx.device().catalog().operations().into_iter();
        for (OperationInfo { name: operation, summary }, families) in operations {
            let families = families::serving(&ctx, operation, families)
                .with_context(|| format!("cannot ask the families of {operation} on {device}"))?;
            all.operations.push(Families { device: ctx.info().id.to_string(), operation, summary, families });
        }
        for format in Format::all() {
            let host = made_up(format)?;
            let weight = ctx.load(&host).with_context(|| format!("cannot load {format} on {device}"))?;
            for x_dtype in DType::ALL {
                all.formats.extend(TOKENS.map(|tokens| Support::ask(&ctx, &weight, x_dtype, tokens)));
            }
        }
    }
    Ok(all)
}

fn made_up(format: Format) -> anyhow::Result<HostWeight> {
    let [n, k] = SHAPE;
    Ok(weight(WeightKind::Quantized, format, n, k, None, 1)?)
}

/// The page `docs/guide/support.md`.
fn page(devices: &[&str], all: &Answers) -> String {
    let mut page = String::from(HEADER);
    // Writing to a String cannot fail.
    let _ = writeln!(
        page,
        "\n## Operations and their kernel families\n\n{FAMILIES_NOTE}\n\n{}",
        head("operation", devices)
    );
    for OperationInfo { name: operation, summary } in OPERATIONS {
        let of_device = |device: &&str| {
            let of = all.operations.iter().find(|of| (of.device.as_str(), of.operation) == (*device, *operation));
            of.map_or_else(String::new, |of| names(&of.families))
        };
        let _ = writeln!(page, "| `{operation}`: {summary} |{}", cells(devices.iter().map(of_device)));
    }
    page.push_str(FORMATS_HEADER);
    for x_dtype in DType::ALL {
        let _ = writeln!(page, "\n### {x_dtype} activations\n\n{}", head("weights", devices));
        // Formats with equal rows share a line.
        let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
        for format in Format::all() {
            let of_device = |device: &&str| {
                let of = |tokens| {
                    all.formats.iter().find(|s| s.is_about(device, format, x_dtype, tokens)).map(Support::mark)
                };
                let [one, many] = TOKENS.map(|tokens| of(tokens).unwrap_or_default());
                if one == many { one } else { format!("{one}, {many}") }
            };
            let cells = cells(devices.iter().map(of_device));
            match lines.iter_mut().find(|(same, _)| *same == cells) {
                Some((_, formats)) => formats.push(format.desc().name),
                None => lines.push((cells, vec![format.desc().name])),
            }
        }
        for (cells, formats) in lines {
            let _ = writeln!(page, "| {} |{cells}", formats.join(", "));
        }
    }
    page.push_str(x_formats::HEADER);
    for x_dtype in DType::ALL {
        page.push_str(&x_formats::table(devices, &all.formats, x_dtype));
    }
    page
}

const HEADER: &str =
    "<!-- Generated by `qgemm support --markdown`; a test compares it with what the kernel families offer. -->
# What each backend supports

The wgpu column is for builds without the feature `experimental-cooperative-matrix`.
";

const FAMILIES_NOTE: &str = "\
A column lists the families that serve some problem on that chip. `matmul` serves all operand formats everywhere. FP8 operands with block scales
(`e4m3_1x128`) use FP8 instructions on sm89, sm90 and sm120 if rows are aligned, f16 on other chips, and f32 on wgpu and the CPU.";

const FORMATS_HEADER: &str = "
## Products (`gemm`)

Every backend supports every weight format with every activation type, any M, N and K, and the whole epilogue. Only
the arithmetic differs. The tables list the fastest arithmetic for one token. A second entry after a comma is for 64 tokens. The planner
may choose another if it is faster. With the feature `experimental-cooperative-matrix`, wgpu adapters with f16 matrix instructions
offer `tensor*` for all but f32 weights:

- `fma`: f32 multiply-adds. Weights and activations are not rounded.
- `dot`: INT8 dot products. Activations are quantized first, which `Problem::x_precision` can forbid (then `fma`).
- `tensor`: f16 or bf16 matrix instructions with f32 sums. Codes are exact operands; scales act on the sums.
- `tensor*`: each weight may be rounded to the type of X ([numerics.md](../numerics.md)).
- (f16), (bf16): X is converted to that type first, which `Problem::x_precision` can forbid ([below](#rounding-of-x)).
";

/// Header of a table with one column per device.
fn head(title_of_rows: &str, devices: &[&str]) -> String {
    let titles = cells(devices.iter().map(|device| title(device)));
    format!("| {title_of_rows} |{titles}\n|---|{}", "---|".repeat(devices.len()))
}

fn cells(cells: impl Iterator<Item = String>) -> String {
    cells.map(|cell| format!(" {cell} |")).collect()
}

/// The device's name for readers.
fn title(device: &str) -> String {
    device.strip_prefix("emu:").unwrap_or(device).trim_end_matches(":0").to_owned()
}

impl Support {
    fn is_about(&self, device: &str, format: Format, x_dtype: DType, tokens: usize) -> bool {
        let same = (self.device.as_str(), self.format, self.tokens) == (device, format.name, tokens);
        same && self.x_dtype == x_dtype.to_string()
    }
}

#[cfg(test)]
mod tests {
    use qgemm_testkit::skipped;

    use super::*;

    /// `docs/guide/support.md` without the column of an absent
    /// device.
    fn without_column(page: &str, title: &str) -> String {
        let mut at = None;
        let mut out = String::new();
        for line in page.lines() {
            let mut cells: Vec<&str> = line.split('|').collect();
            if cells.len() > 2 {
                at = cells.iter().position(|cell| cell.trim() == title).or(at);
                at.map(|at| cells.remove(at));
            }
            out.push_str(&cells.join("|"));
            out.push('\n');
        }
        out
    }

    #[test]
    fn the_page_says_what_the_families_offer() {
        let as_described = |ctx: Context| ctx.info().rate(Math::TensorF16).is_none();
        let there = |device: &&str| !device.starts_with("wgpu") || Context::open(device).is_ok_and(as_described);
        let devices: Vec<&str> = DEVICES.into_iter().filter(there).collect();
        let mut expected = include_str!("../../../docs/guide/support.md").to_owned();
        for absent in DEVICES.into_iter().filter(|device| !devices.contains(device)) {
            skipped(&format!("column {absent} of docs/guide/support.md"), "there is no such device here");
            expected = without_column(&expected, &title(absent));
        }
        let page = page(&devices, &ask_all(&devices).expect("every device loads every format"));
        assert!(
            page == expected,
            "docs/guide/support.md is stale: `cargo run -p qgemm-cli -- support --markdown > docs/guide/support.md`"
        );
    }

    #[test]
    fn families_are_those_that_serve_something_on_the_chip_and_each_has_one() {
        let all = DEVICES.into_iter().filter(|device| device.starts_with("emu:"));
        let mut unserved: Option<Vec<(&str, &str)>> = None;
        for device in all {
            let ctx = Context::open(device).expect("emulated chips are always here");
            let mut not_here = Vec::new();
            for (OperationInfo { name: operation, .. }, families) in ctx.device().catalog().operations() {
                let serving = families::serving(&ctx, operation, families.clone()).expect("problems are valid");
                assert!(!serving.is_empty(), "{operation} on {device}");
                not_here
                    .extend(families.into_iter().filter(|name| !serving.contains(name)).map(|name| (operation, name)));
            }
            match &mut unserved {
                Some(unserved) => unserved.retain(|name| not_here.contains(name)),
                None => unserved = Some(not_here),
            }
        }
        // A family that no chip has would mean that no problem tests it.
        assert_eq!(unserved, Some(Vec::new()));
    }

    #[test]
    fn a_column_can_be_left_out() {
        let page = "text\n| w | cpu | wgpu | sm70 |\n|---|---|---|---|\n| q4_0 | fma | fma | tensor |\n";
        let without = "text\n| w | cpu | sm70 |\n|---|---|---|\n| q4_0 | fma | tensor |\n";
        assert_eq!(without_column(page, "wgpu"), without);
    }
}
