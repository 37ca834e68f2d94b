//! [`Selection`] of the kernels to build.

use std::path::PathBuf;

use qgemm_formats::Format;
use qgemm_hal::{KernelId, OPERATIONS, Spec};
use serde::Deserialize;
use xtask::workspace;

/// Kernels to build; by default all but those of rare formats.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Selection {
    /// Only kernels of these operations (`gemm,attention`).
    #[arg(long, value_delimiter = ',', value_name = "OPERATION,…", alias = "ops", value_parser = OPERATIONS.iter().map(|info| info.name).collect::<Vec<_>>())]
    op: Vec<String>,
    /// Only kernels of this family (`gemv`).
    #[arg(long)]
    family: Option<String>,
    /// Only kernels of these weight formats (`q4_k,q6_k`).
    #[arg(long, value_delimiter = ',', value_name = "FORMAT,…", alias = "formats")]
    format: Vec<Format>,
    /// Only kernels of the weight formats of this checkpoint, and those that
    /// read no weights.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["format", "family"])]
    model: Option<PathBuf>,
    /// Only kernels whose identity contains this text
    /// (`main_loop=gemm_sliced_k`), or one of several.
    #[arg(long, value_name = "PART")]
    named: Vec<String>,
}

/// `qgemm inspect --json`.
#[derive(Deserialize)]
struct Inspected {
    totals: Vec<Total>,
}

/// Tensors of one format in a checkpoint.
#[derive(Deserialize)]
struct Total {
    format: String,
}

impl Selection {
    /// This selection, with the formats of its checkpoint.
    ///
    /// # Errors
    /// When the checkpoint cannot be read.
    pub fn resolved(&self) -> anyhow::Result<Self> {
        let Some(model) = &self.model else { return Ok(self.clone()) };
        let model = std::path::absolute(model)?;
        let mut inspect = workspace::cargo();
        inspect.args(["run", "--quiet", "--package", "qgemm-cli", "--", "inspect", "--json"]).arg(&model);
        let inspected: Inspected = serde_json::from_str(&workspace::output(&mut inspect)?)?;
        // Totals also name types that are no formats of weights, such as i32.
        let format: Vec<Format> = inspected.totals.iter().filter_map(|total| total.format.parse().ok()).collect();
        println!("{}: weights in {}", model.display(), format.iter().map(|f| f.name).collect::<Vec<_>>().join(", "));
        Ok(Self { format, ..self.clone() })
    }

    /// Whether formats were named, among which may be rare ones.
    pub fn names_formats(&self) -> bool {
        !self.format.is_empty()
    }

    /// Whether the kernel was requested. Conversions of X belong to `gemm` and to every format.
    pub fn has(&self, name: &str) -> bool {
        let Ok(id) = name.parse::<KernelId>() else { return self.is_all() };
        let is_prologue = matches!(id.spec, Spec::Convert(_));
        let of_family = |family: &String| id.family.as_str() == family || is_prologue && family == "gemm";
        let of_format =
            id.spec.weight().map_or(is_prologue || self.model.is_some(), |weight| self.format.contains(&weight));
        self.family.as_ref().is_none_or(of_family)
            && (self.op.is_empty() || self.op.iter().any(|op| id.operation() == op))
            && (!self.names_formats() || of_format)
            && (self.named.is_empty() || self.named.iter().any(|part| name.contains(part)))
    }

    fn is_all(&self) -> bool {
        self.op.is_empty() && self.family.is_none() && self.format.is_empty() && self.named.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use qgemm_cuda::manifest;
    use qgemm_hal::Variant;

    use super::*;

    #[test]
    fn kernels_are_chosen_by_family_and_format() {
        let formats = |names: &[&str]| -> Vec<Format> { names.iter().map(|n| n.parse().unwrap()).collect() };
        let chosen = |family: Option<&str>, of: &[&str]| -> BTreeSet<String> {
            let (family, of) = (family.map(str::to_owned), formats(of));
            let names = manifest(Variant::Sm120).into_iter().map(|spec| spec.name);
            let selection = Selection { family, format: of, ..Selection::default() };
            names.filter(|name| selection.has(name)).collect()
        };
        let all = chosen(None, &[]);
        assert_eq!(all.len(), manifest(Variant::Sm120).len());
        let of = |family, part: &str| chosen(family, &["q4_0"]).iter().filter(|name| name.contains(part)).count();
        assert!(of(None, "w=q4_0") > 10 && of(None, "w=q4_0") == of(None, "w="));
        assert_eq!((of(None, "convert:"), of(None, "probe:"), of(Some("gemv"), "convert:")), (48, 0, 0));
        assert!(of(Some("gemm"), "gemm:gemm:") > 5 && of(Some("gemm"), "gemm:gemv:") == 0);
        assert_eq!((of(Some("gemm"), "convert:"), of(Some("repack"), "pack:repack:")), (48, 1));
        // A format whose name starts with another's name
        // is a different format.
        let fp8 = chosen(None, &["fp8_e4m3"]);
        assert!(fp8.iter().all(|name| !name.contains("block128")));
        let two = chosen(Some("gemv"), &["q4_0", "q6_k"]);
        assert_eq!(two.len(), chosen(Some("gemv"), &["q4_0"]).len() + chosen(Some("gemv"), &["q6_k"]).len());
    }

    #[test]
    fn operations_are_chosen_and_kernels_without_weights_serve_every_model() {
        let names: Vec<String> = manifest(Variant::Sm80).into_iter().map(|spec| spec.name).collect();
        let chosen = |selection: Selection| names.iter().filter(|name| selection.has(name)).collect::<Vec<_>>();
        let norms = chosen(Selection { op: vec!["norm".into()], ..Selection::default() });
        assert!(norms.iter().all(|name| name.starts_with("norm:")) && norms.len() > 5);
        let format: Vec<Format> = vec!["q4_k".parse().unwrap()];
        let of_model = Selection { format: format.clone(), model: Some("model.gguf".into()), ..Selection::default() };
        let of_model = chosen(of_model);
        assert!(of_model.iter().any(|name| name.starts_with("attention:")));
        assert!(!of_model.iter().any(|name| name.contains("w=q6_k")));
        let of_format = chosen(Selection { format, ..Selection::default() });
        assert!(of_format.iter().all(|name| of_model.contains(name)) && of_format.len() < of_model.len());
    }
}
