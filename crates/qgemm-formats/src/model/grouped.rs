//! Integer-group layers (`qweight`, `scales`, usually `qzeros`): GPTQ or
//! AWQ, by shapes and settings.
//!
//! AutoRound writes both. Its `packing_format` gives the packing and
//! the storage of zero points.

use std::fmt;
use std::sync::Arc;

use super::awq::AwqLayer;
use super::gptq::GptqLayer;
use super::layer::{Found, Layer, erase};
use super::options::{GptqZeros, ModelOptions};
use super::raw::{RawTensor, RawTensors, bad, unsupported};
use super::settings::{LayerSettings, Settings};
use crate::error::FormatError;

/// Unchecked tensors of a layer.
pub(super) struct GroupedParts {
    pub qweight: RawTensor,
    pub qzeros: Option<RawTensor>,
    pub scales: RawTensor,
    pub g_idx: Option<RawTensor>,
}

/// Settings of a layer. `None` means not stated.
#[derive(Clone, Debug)]
pub(super) struct GroupedSettings {
    pub bits: Option<u32>,
    /// Source of `bits`, for errors.
    pub who_says_bits: String,
    /// Input features per scale. −1 means all.
    pub group_size: Option<i64>,
    /// Source of `group_size`, for errors.
    pub who_says_group: String,
    /// Whether all zero points are `2^(bits − 1)`.
    pub symmetric: Option<bool>,
}

/// Storage of GPTQ zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredZeros {
    LessOne,
    AsIs,
}

/// GPTQ version with this storage.
impl fmt::Display for StoredZeros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::LessOne { "v1" } else { "v2" })
    }
}

enum Packing {
    Gptq(StoredZeros),
    Awq,
}

/// Takes the layer whose codes are tensor `name`.
pub(super) fn take_grouped(
    tensors: &mut RawTensors,
    name: &str,
    settings: &Settings,
    options: &ModelOptions,
) -> Option<Found> {
    let base = name.strip_suffix(".qweight")?;
    let scales = tensors.remove(&format!("{base}.scales"))?;
    let qweight = tensors.remove(name)?;
    let mut other = |part: &str| tensors.remove(&format!("{base}.{part}")).filter(|tensor| tensor.elements() > 0);
    let parts = GroupedParts { qweight, qzeros: other("qzeros"), scales, g_idx: other("g_idx") };
    Some((format!("{base}.weight"), layer(parts, &settings.layer(base), options)))
}

fn layer(
    parts: GroupedParts,
    config: &LayerSettings<'_>,
    options: &ModelOptions,
) -> Result<Arc<dyn Layer>, FormatError> {
    let name = parts.qweight.name.clone();
    let packing = packing(&parts, config)?;
    let mut settings = GroupedSettings {
        bits: config.bits()?,
        who_says_bits: config.who_says(LayerSettings::BITS),
        group_size: config.group_size()?,
        who_says_group: config.who_says(LayerSettings::GROUP_SIZE),
        symmetric: config.flag("sym")?,
    };
    if settings.bits.is_some_and(|bits| bits >= 16) {
        return Err(bad(
            &name,
            format!("{}, so the layer is not quantized, but it has these codes", settings.who_says_bits),
        ));
    }
    match packing {
        Packing::Awq => {
            if let Some(zero_point) = config.flag("zero_point")? {
                settings.symmetric = Some(!zero_point);
            }
            erase(AwqLayer::new(parts, &settings))
        }
        Packing::Gptq(label) => {
            if parts.g_idx.is_none() && needs_order(&parts, config)? {
                return Err(bad(&name, format!("{}, but the layer has no g_idx", config.who_says(&["desc_act"]))));
            }
            let stated = match options.gptq_zeros {
                GptqZeros::FromConfig => None,
                GptqZeros::LessOne => Some(StoredZeros::LessOne),
                GptqZeros::AsIs => Some(StoredZeros::AsIs),
            };
            erase(GptqLayer::new(parts, &settings, label, stated))
        }
    }
}

/// Whether the settings imply act-order, which needs a `g_idx`.
fn needs_order(parts: &GroupedParts, config: &LayerSettings<'_>) -> Result<bool, FormatError> {
    let is_sorted = config.flag("desc_act")? == Some(true) && config.flag("static_groups")? != Some(true);
    Ok(is_sorted && parts.scales.shape.first() != Some(&1))
}

fn packing(parts: &GroupedParts, config: &LayerSettings<'_>) -> Result<Packing, FormatError> {
    let name = &parts.qweight.name;
    let method = config.method()?;
    match method.as_deref() {
        Some("awq") => awq(name, config),
        None if parts.g_idx.is_none() && AwqLayer::has_shape(&parts.qweight, &parts.scales) => awq(name, config),
        None | Some("gptq") => gptq(name, config),
        Some("auto-round" | "auto_round" | "intel/auto-round") => auto_round(name, config),
        Some(other) => Err(unsupported(
            name,
            format!("integer groups of quantization method `{other}`: expected gptq, awq or auto-round"),
        )),
    }
}

fn awq(name: &str, config: &LayerSettings<'_>) -> Result<Packing, FormatError> {
    // A numeric `version` is that of the settings, not of the packing.
    let version = config.word(&["version"])?.filter(|version| version.parse::<f64>().is_err());
    let packing = config.word(FORMAT)?;
    if let Some(other) = [version, packing].into_iter().flatten().find(|packing| packing != "gemm") {
        return Err(unsupported(name, format!("AWQ packing `{other}`: expected `gemm`")));
    }
    if config.word(&["backend"])?.is_some_and(|backend| backend == "llm-awq") {
        return Err(unsupported(name, "AWQ packing `llm-awq`: expected `gemm`"));
    }
    Ok(Packing::Awq)
}

/// Names of the packing setting in GPTQModel and others.
const FORMAT: &[&str] = &["checkpoint_format", "format"];

fn gptq(name: &str, config: &LayerSettings<'_>) -> Result<Packing, FormatError> {
    match config.word(FORMAT)?.as_deref() {
        None | Some("" | "gptq") => Ok(Packing::Gptq(StoredZeros::LessOne)),
        Some("gptq_v2") => Ok(Packing::Gptq(StoredZeros::AsIs)),
        Some(other) => Err(unsupported(name, format!("checkpoint format `{other}`: expected gptq or gptq_v2"))),
    }
}

fn auto_round(name: &str, config: &LayerSettings<'_>) -> Result<Packing, FormatError> {
    if let Some(kind) = config.word(&["data_type"])?.filter(|kind| !kind.starts_with("int")) {
        return Err(unsupported(name, format!("AutoRound data type `{kind}` in groups: expected int")));
    }
    if !config.who_says(&["rotation_config"]).is_empty() {
        return Err(unsupported(name, "AutoRound with rotated weights (`rotation_config`)"));
    }
    // Before version 0.4 the packing was called `backend`; that name now selects a kernel.
    // Without either, AutoRound and vLLM assume `auto_round:auto_gptq`.
    let packing = match config.word(&["packing_format"])? {
        None => config.word(&["backend"])?.filter(|backend| backend.contains("round") || backend.contains("gptq")),
        packing => packing,
    };
    let packing = packing.unwrap_or_else(|| "auto_round:auto_gptq".into());
    let (family, rest) = packing.split_once(':').unwrap_or((&packing, ""));
    match (family.replace(['_', '-'], "").as_str(), rest.split(':').next().unwrap_or_default()) {
        ("autoround", "" | "gptqmodel" | "exllamav2" | "triton") => Ok(Packing::Gptq(StoredZeros::AsIs)),
        ("autoround", "auto_gptq" | "gptq") | ("autogptq" | "gptq", _) => Ok(Packing::Gptq(StoredZeros::LessOne)),
        ("autoround", "auto_awq" | "awq") => Ok(Packing::Awq),
        _ => Err(unsupported(
            name,
            format!(
                "AutoRound packing `{packing}` in groups: expected auto_round, auto_round:gptqmodel, \
                 auto_round:auto_gptq or auto_round:auto_awq"
            ),
        )),
    }
}

/// Zero point of a symmetric layer without stored zero points.
///
/// # Errors
/// [`FormatError::BadFile`] when the settings do not state symmetry.
pub(super) fn symmetric_zero(name: &str, bits: usize, settings: &GroupedSettings) -> Result<u8, FormatError> {
    match settings.symmetric {
        Some(true) => Ok(1 << (bits - 1)),
        Some(false) => Err(bad(name, "has no qzeros beside it, and the settings say that it is not symmetric")),
        None => Err(bad(name, "has no qzeros beside it, and no settings say that it is symmetric (`sym: true`)")),
    }
}

/// Group of every input feature, without act-order.
///
/// # Errors
/// [`FormatError::BadFile`] when `groups` groups of the stated size do
/// not make up `k` features.
pub(super) fn consecutive_groups(
    name: &str,
    k: usize,
    groups: usize,
    settings: &GroupedSettings,
) -> Result<Vec<u32>, FormatError> {
    let size = match settings.group_size {
        Some(-1) => k,
        Some(size) => usize::try_from(size).unwrap_or(0),
        None if groups > 0 && k.is_multiple_of(groups) => k / groups,
        None => return Err(bad(name, format!("K = {k} does not divide into {groups} groups"))),
    };
    let who = &settings.who_says_group;
    if size == 0 {
        return Err(bad(name, format!("{who}: expected -1 (one group) or a positive number")));
    }
    if k.div_ceil(size) != groups {
        return Err(bad(
            name,
            format!(
                "K = {k} in groups of {size} ({who}) makes {} groups, but there are scales for {groups}",
                k.div_ceil(size)
            ),
        ));
    }
    Ok((0..k).map(|column| (column / size) as u32).collect())
}
