//! Coarsest format of X in a device's kernels under each
//! permission ([`XPrecision`]).

use std::collections::BTreeMap;
use std::fmt::Write;

use qgemm_api::{Context, DType, Format, Problem, XFormat, XPrecision};
use serde::Serialize;

use super::{Support, TOKENS, cells, title};

/// Coarsest format of X, by the permission's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct XFormats(BTreeMap<&'static str, &'static str>);

impl XFormats {
    /// Formats that the device's families offer for `problem`, with X
    /// stored in `x_dtype`.
    pub fn ask(ctx: &Context, problem: &Problem, x_dtype: DType) -> Self {
        let coarsest = |allowed| {
            let candidates = ctx.candidates(&problem.clone().x_precision(allowed)).ok()?;
            let formats = candidates.iter().map(|candidate| candidate.launch().config.x_format);
            formats.max_by_key(|&format| coarseness(format, x_dtype)).map(XFormat::name)
        };
        Self(XPrecision::ALL.into_iter().filter_map(|allowed| Some((allowed.name(), coarsest(allowed)?))).collect())
    }

    /// The format under `allowed`; `None` if no family supports the
    /// problem.
    pub fn of(&self, allowed: XPrecision) -> Option<&'static str> {
        self.0.get(allowed.name()).copied()
    }
}

/// Larger for formats that round more. X's type does not round.
fn coarseness(format: XFormat, x_dtype: DType) -> Option<usize> {
    XFormat::ALL.into_iter().position(|other| other == format && format != x_dtype.into())
}

pub const HEADER: &str = "
## Rounding of X

`Problem::x_precision` is a permission: kernels may always round less. The tables list the coarsest format of X that a device's
kernels use under each permission, for one token. A second format after a comma is for 64 tokens. The planner takes kernels
that round less if they are faster. `auto` is the default. It means `e4m3` for FP8 weights whose checkpoint states dynamic
FP8 activations ([quantized-x.md](../ops/quantized-x.md)). Only `matmul` has `tf32` and `bf16x3` kernels
([matmul.md](../ops/matmul.md)): since sm80, for two f32 operands, by `Matmul::operand_precision`.

- `f32`, `f16`, `bf16`: plain X of this type. X of another type is rounded to it; for f16, each token is first scaled by a
  power of two.
- `q8_0`, `q8_256`: INT8 with an f32 scale per 32 or 256 columns of a token. The CPU and wgpu use it by default, CUDA on request. The error is 1e-5 to
  1e-4 of the output's energy, more than that of 8-bit weights. `f16` avoids it at lower
  speed ([numerics.md](../numerics.md), \"Activations of eight bits\").
- `int8_token`, `e4m3_1x128`: INT8 with a scale per token and, on CUDA, E4M3 with a scale per 128 columns ([quantized-x.md](../ops/quantized-x.md)).
";

/// A table for X stored in `x_dtype`: rows are weights and
/// permissions, columns devices.
pub fn table(devices: &[&str], all: &[Support], x_dtype: DType) -> String {
    let titles = cells(devices.iter().map(|device| title(device)));
    let mut table = format!("\n### X in {x_dtype}\n\n| weights | allowed |{titles}\n|---|---|");
    table.push_str(&"---|".repeat(devices.len()));
    table.push('\n');
    // Formats with equal lines for all permissions share them.
    let mut groups: Vec<(Vec<Line>, Vec<&str>)> = Vec::new();
    for format in Format::all() {
        let lines = lines(devices, all, format, x_dtype);
        match groups.iter_mut().find(|(same, _)| *same == lines) {
            Some((_, formats)) => formats.push(format.desc().name),
            None => groups.push((lines, vec![format.desc().name])),
        }
    }
    for (lines, formats) in groups {
        let mut weights = formats.join(", ");
        for Line { allowed, cells } in lines {
            // Writing to a String cannot fail.
            let _ = writeln!(table, "| {weights} | {} |{cells}", allowed.join(", "));
            // The next lines are about the same weights.
            weights.clear();
        }
    }
    table
}

/// Permissions with the same formats of X, for a format of
/// weights.
#[derive(PartialEq)]
struct Line {
    allowed: Vec<&'static str>,
    cells: String,
}

fn lines(devices: &[&str], all: &[Support], format: Format, x_dtype: DType) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for allowed in XPrecision::ALL {
        let of_device = |device: &&str| {
            let of = |tokens| {
                let support = all.iter().find(|s| s.is_about(device, format, x_dtype, tokens));
                support.and_then(|support| support.x_formats.of(allowed)).unwrap_or("–")
            };
            let [one, many] = TOKENS.map(of);
            if one == many { one.to_owned() } else { format!("{one}, {many}") }
        };
        let cells = cells(devices.iter().map(of_device));
        match lines.iter_mut().find(|line| line.cells == cells) {
            Some(line) => line.allowed.push(allowed.name()),
            None => lines.push(Line { allowed: vec![allowed.name()], cells }),
        }
    }
    lines
}
