//! torchao layers, as its safetensors support writes them.
//!
//! ```text
//! _weight_qdata, _weight_scale, …       tensors of module X
//! metadata of the file, `X.weight`      JSON: class (`_type`) and attributes (`_data`)
//! ```
//!
//! | class | codes | scales |
//! |---|---|---|
//! | Float8Tensor | `[N, K]` FP8 | one, or `[N, 1]` |
//! | Int8Tensor | `[N, K]` i8 | one, or `[N, 1]`, with zero points |
//! | IntxUnpackedToInt8Tensor | `[N, K]` i8, of fewer bits | `[N, K / group]`, with zero points i8 |
//! | Int4Tensor | `[N, K / 2]`, signed nibbles, the first one low | `[K / group, N]`, with zeros |
//! | Int4TilePackedTo4dTensor | tiles of the m16n8k16 instruction | `[K / group, N, 2]`: scales and zeros |
//!
//! Zeros of the int4 classes are addends: `scale · code +
//! zero`, with codes from −8.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use safetensors::tensor::Dtype;

use super::centered::{CenteredLayer, Nibbles, Zeros};
use super::eight_bit::{EightBitLayer, EightBitSettings};
use super::groups::{GroupContents, GroupPlan};
use super::json::Json;
use super::layer::{Found, Layer, erase};
use super::raw::{RawTensor, RawTensors, bad, unsupported};
use super::scales::scales_in_f16;
use super::settings::Settings;
use super::stack::layer_or_stack;
use super::stated::Stated;
use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::{HostWeight, SharedBytes};

/// Tensors that concern activations alone.
const OF_ACTIVATIONS: [&str; 2] = ["act_quant_scale", "act_quant_zero_point"];

/// Takes the layer whose codes are tensor `name`.
pub(super) fn take_torchao(
    tensors: &mut RawTensors,
    name: &str,
    settings: &Settings,
    stated: &Stated<'_>,
) -> Option<Found> {
    let base = name.strip_suffix("._weight_qdata")?;
    let prefix = format!("{base}._weight_");
    let names: Vec<String> =
        tensors.range(prefix.clone()..).map(|(n, _)| n.clone()).take_while(|n| n.starts_with(&prefix)).collect();
    let tensors: BTreeMap<String, RawTensor> =
        names.iter().filter_map(|n| Some((n[prefix.len()..].to_owned(), tensors.remove(n)?))).collect();
    let weight = format!("{base}.weight");
    let layer = settings.of_tensor(&weight).and_then(|state| {
        let mut parts = Parts { layer: &weight, prefix, tensors, state };
        OF_ACTIVATIONS.iter().for_each(|part| drop(parts.tensors.remove(*part)));
        let layer = parts.layer(EightBitSettings::of(&settings.layer(base)), stated)?;
        match parts.tensors.into_values().next() {
            Some(other) => {
                Err(unsupported(&other.name, format!("belongs to the torchao layer `{weight}`, but is not understood")))
            }
            None => Ok(layer),
        }
    });
    Some((weight, layer))
}

/// Tensors of a layer by the ends of their names, and its
/// class and attributes.
struct Parts<'a> {
    layer: &'a str,
    prefix: String,
    tensors: BTreeMap<String, RawTensor>,
    state: Json,
}

impl Parts<'_> {
    fn layer(&mut self, settings: EightBitSettings, stated: &Stated<'_>) -> Result<Arc<dyn Layer>, FormatError> {
        let codes = self.take("qdata")?;
        let is_float8 = matches!(codes.dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2);
        let class = match self.state.get("_type") {
            // Without metadata, the types of the tensors
            // tell the class.
            Json::Null if is_float8 && self.tensors.len() == 1 => "Float8Tensor",
            Json::Null if codes.dtype == Dtype::I8 && self.tensors.len() == 1 => "Int8Tensor",
            class => class.text().unwrap_or_default(),
        };
        let expected: &[Dtype] = match class {
            "Float8Tensor" => &[Dtype::F8_E4M3, Dtype::F8_E5M2],
            "Int8Tensor" | "IntxUnpackedToInt8Tensor" => &[Dtype::I8],
            "Int4Tensor" => &[Dtype::I8, Dtype::U8],
            "Int4TilePackedTo4dTensor" => &[Dtype::I32],
            _ => return Err(self.unknown(class, &codes, stated)),
        };
        if !expected.contains(&codes.dtype) {
            let what = format!("the metadata says {class}, but the codes are {:?}: expected {expected:?}", codes.dtype);
            return Err(bad(&codes.name, what));
        }
        let class = class.to_owned();
        match class.as_str() {
            "Float8Tensor" => {
                let scale = self.take("scale")?;
                layer_or_stack(codes, [scale], move |codes, [scale]| {
                    EightBitLayer::new(codes, Some(scale), None, &settings)
                })
            }
            "Int8Tensor" => {
                let (scale, zeros) = (self.take("scale")?, self.tensors.remove("zero_point"));
                erase(EightBitLayer::new(codes, Some(scale), zeros, &settings))
            }
            "IntxUnpackedToInt8Tensor" => {
                let (scales, zeros) = (self.take("scale")?, self.take("zero_point")?);
                erase(IntxLayer::new(codes, scales, zeros, self.bits()?, self.group()?))
            }
            "Int4Tensor" => {
                let (scales, zeros) = (self.take("scale")?, self.take("zero_point")?);
                let (group, shape) = (self.group()?, self.shape()?);
                layer_or_stack(codes, [scales, zeros], move |codes, [scales, zeros]| {
                    let (n, half) = codes.matrix()?;
                    let k = half.checked_mul(2).filter(|&k| shape.ends_with(&[n, k]));
                    let k = k.ok_or_else(|| differs(&codes, &shape))?;
                    CenteredLayer::new([n, k], group, Nibbles::signed_rows(codes, k), scales, Zeros::Beside(zeros))
                })
            }
            _ => {
                let scales = self.take("scale_and_zero")?;
                let shape = self.shape()?;
                let &[n, k] = &shape[..] else { return Err(differs(&codes, &shape)) };
                let tiles = Nibbles::tiles(codes, [n, k])?;
                erase(CenteredLayer::new([n, k], self.group()?, tiles, scales, Zeros::Interleaved))
            }
        }
    }

    fn take(&mut self, part: &str) -> Result<RawTensor, FormatError> {
        let missing = || FormatError::missing(self.layer, "torchao", [format!("{}{part}", self.prefix)]);
        self.tensors.remove(part).ok_or_else(missing)
    }

    fn attribute<T>(&self, key: &str, read: impl Fn(&Json) -> Option<T>) -> Result<T, FormatError> {
        let value = self.state.get("_data").get(key);
        read(value).ok_or_else(|| bad(self.layer, format!("`{key}` of the metadata is {value}")))
    }

    /// Columns that share a scale.
    fn group(&self) -> Result<usize, FormatError> {
        self.attribute("block_size", |value| {
            let sizes = value.sizes()?;
            let (&group, rows) = sizes.split_last()?;
            (group > 0 && rows.iter().all(|&rows| rows == 1)).then_some(group)
        })
    }

    fn shape(&self) -> Result<Vec<usize>, FormatError> {
        self.attribute("shape", Json::sizes)
    }

    /// Bits of codes that are stored as bytes.
    fn bits(&self) -> Result<usize, FormatError> {
        self.attribute("target_dtype", |value| {
            let bits = value.get("_data").text()?.strip_prefix("int")?.parse().ok()?;
            (1..=8).contains(&bits).then_some(bits)
        })
    }

    /// Error of a class that is not supported.
    fn unknown(&self, class: &str, codes: &RawTensor, stated: &Stated<'_>) -> FormatError {
        let class = if class.is_empty() { kind(stated, codes.dtype) } else { class.to_owned() };
        let what = format!("is torchao {class}, which is not supported: requantize it to a format that is");
        unsupported(self.layer, what)
    }
}

/// Error of codes that do not have the shape of the
/// metadata.
fn differs(codes: &RawTensor, shape: &[usize]) -> FormatError {
    bad(&codes.name, format!("codes have shape {:?}, but the metadata says {shape:?}", codes.shape))
}

/// Weight type by the settings, else by the type of the
/// codes.
fn kind(stated: &Stated<'_>, codes: Dtype) -> String {
    let by_default = stated.of_module("quant_type", "default");
    let types = if by_default.is_null() { stated.of_module("", "quant_type") } else { by_default };
    let types = texts(types).to_lowercase().replace('_', "");
    // In configuration names the weight type is last:
    // `Int8DynamicActivationInt4WeightConfig`.
    let all = ["int4", "int8", "float8", "nvfp4", "mxfp4", "uintx"];
    let of_weight = all.iter().find(|kind| types.contains(&format!("{kind}weight")));
    let kind = of_weight.or_else(|| all.iter().find(|kind| types.contains(*kind)));
    match (kind, codes) {
        (Some(kind), _) => (*kind).into(),
        (None, Dtype::F8_E4M3 | Dtype::F8_E5M2) => "float8".into(),
        (None, Dtype::I8) => "int8".into(),
        (None, _) => "int4".into(),
    }
}

/// All strings in a value, keys included.
fn texts(value: &Json) -> String {
    match value {
        Json::Text(text) => text.clone(),
        Json::List(values) => values.iter().map(texts).collect::<Vec<_>>().join(" "),
        Json::Object(entries) => {
            entries.iter().map(|(name, value)| format!("{name} {}", texts(value))).collect::<Vec<_>>().join(" ")
        }
        _ => String::new(),
    }
}

/// Layer of codes in bytes with scales of groups: `scale ·
/// (code − zero point)`.
#[derive(Debug)]
struct IntxLayer {
    n: usize,
    plan: GroupPlan,
    /// 2^(bits − 1), which makes codes unsigned.
    middle: i32,
    codes: RawTensor,
    scales: RawTensor,
    zeros: RawTensor,
}

impl IntxLayer {
    fn new(
        codes: RawTensor,
        scales: RawTensor,
        zeros: RawTensor,
        bits: usize,
        group: usize,
    ) -> Result<Self, FormatError> {
        let (n, k) = codes.matrix()?;
        let groups = k.div_ceil(group);
        scales.scale_type()?;
        scales.expect_shape(&[n, groups])?;
        zeros.expect_type(Dtype::I8)?;
        zeros.expect_shape(&[n, groups])?;
        let group_of: Vec<u32> = (0..k).map(|column| (column / group) as u32).collect();
        let stored = [2, 3, 4].into_iter().find(|&stored| bits <= stored).unwrap_or(8);
        let plan = GroupPlan::new(&codes.name, stored, &group_of, groups)?;
        Ok(Self { n, plan, middle: 1 << (stored - 1), codes, scales, zeros })
    }

    /// Checks that all numbers of `tensor` have the bits of a
    /// code.
    fn check(&self, tensor: &RawTensor) -> Result<(), FormatError> {
        let range = -self.middle..self.middle;
        match tensor.bytes.iter().map(|&byte| i32::from(byte as i8)).find(|number| !range.contains(number)) {
            Some(number) => Err(bad(&tensor.name, format!("{number}: expected numbers in {range:?} (`target_dtype`)"))),
            None => Ok(()),
        }
    }

    fn unsigned(&self, byte: u8) -> u8 {
        (i32::from(byte as i8) + self.middle) as u8
    }
}

impl Layer for IntxLayer {
    fn format(&self) -> Format {
        self.plan.format()
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.plan.k()]
    }

    fn bytes(&self) -> usize {
        [&self.codes, &self.scales, &self.zeros].iter().map(|tensor| tensor.bytes.len()).sum()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        self.check(&self.codes)?;
        self.check(&self.zeros)?;
        let (k, groups) = (self.plan.k(), self.scales.elements() / self.n);
        let scale = scales_in_f16(&self.scales, move |group, row| row * groups + group)?;
        let bytes: &SharedBytes = &self.codes.bytes;
        let codes = |rows: Range<usize>, codes: &mut [u8]| {
            for (code, &byte) in codes.iter_mut().zip(&bytes[rows.start * k..rows.end * k]) {
                *code = self.unsigned(byte);
            }
        };
        let zero = |group: usize, row: usize| self.unsigned(self.zeros.bytes[row * groups + group]);
        self.plan.build(self.n, &GroupContents { codes: &codes, scale: &scale, zero: &zero })
    }
}
