//! bitsandbytes layers: 4-bit floats in blocks (NF4, FP4),
//! and LLM.int8().
//!
//! ```text
//! weight                  bytes of two codes, the first in the high nibble; blocks run over all of N × K
//! weight.absmax           [blocks] f32      value = absmax · quant_map[code]
//! weight.quant_map        [16] f32
//! weight.quant_state.bitsandbytes__nf4      JSON: blocksize, shape, dtype, …
//! ```
//!
//! With double quantization, `weight.absmax` holds bytes:
//!
//! ```text
//! absmax = nested_quant_map[byte] · nested_absmax + nested_offset
//! ```
//!
//! LLM.int8():
//!
//! ```text
//! weight [N, K] i8, SCB [N] f32             value = SCB / 127 · weight
//! ```
//!
//! No kernel has a codebook of fractions, so 4-bit layers
//! are expanded when loaded, to the `dtype` of their state.
//! bitsandbytes multiplies the same values.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::eight_bit::{EightBitLayer, EightBitSettings};
use super::json::Json;
use super::layer::{Found, Layer, erase};
use super::raw::{RawTensor, RawTensors, bad, unsupported};
use super::settings::{LayerSettings, Settings};
use crate::desc::Format;
use crate::dtype::DType;
use crate::error::FormatError;
use crate::formats::plain;
use crate::weight::{HostWeight, SharedBytes};

/// Tensor suffix of a layer's state, before the kind of its
/// codes.
const STATE: &str = "quant_state.bitsandbytes__";
/// NF4: quantiles of the normal distribution.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
/// Magnitudes of FP4, times 12.
const FP4: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];

/// Takes the layer whose codes are tensor `name`.
pub(super) fn take_bitsandbytes(tensors: &mut RawTensors, name: &str, settings: &Settings) -> Option<Found> {
    let base = name.strip_suffix(".weight")?;
    take_four_bit(tensors, name, base, settings).or_else(|| take_int8(tensors, name, base, settings))
}

fn take_four_bit(tensors: &mut RawTensors, name: &str, base: &str, settings: &Settings) -> Option<Found> {
    let of_state = format!("{name}.{STATE}");
    let state = tensors.range(of_state.clone()..).next().filter(|(other, _)| other.starts_with(&of_state));
    let kind = state?.0[of_state.len()..].to_owned();
    let codes = tensors.remove(name)?;
    let of_weight = format!("{name}.");
    let parts: Vec<String> =
        tensors.range(of_weight.clone()..).map(|(n, _)| n.clone()).take_while(|n| n.starts_with(&of_weight)).collect();
    let parts: BTreeMap<String, RawTensor> =
        parts.iter().filter_map(|part| Some((part[of_weight.len()..].to_owned(), tensors.remove(part)?))).collect();
    Some((name.to_owned(), erase(FourBitLayer::new(codes, parts, &kind, &settings.layer(base)))))
}

fn take_int8(tensors: &mut RawTensors, name: &str, base: &str, settings: &Settings) -> Option<Found> {
    if tensors.get(name)?.dtype != Dtype::I8 {
        return None;
    }
    let scales = tensors.remove(&format!("{base}.SCB"))?;
    let weight = tensors.remove(name)?;
    let order = tensors.remove(&format!("{base}.weight_format"));
    Some((name.to_owned(), int8(weight, scales, order, &settings.layer(base))))
}

/// LLM.int8() layer: INT8 per channel.
fn int8(
    weight: RawTensor,
    scales: RawTensor,
    order: Option<RawTensor>,
    settings: &LayerSettings<'_>,
) -> Result<Arc<dyn Layer>, FormatError> {
    const LARGEST: f32 = 127.0;
    if settings.flag("load_in_8bit")? == Some(false) {
        let what = format!("{}, but the layer is LLM.int8()", settings.who_says(&["load_in_8bit"]));
        return Err(bad(&weight.name, what));
    }
    if let Some(order) = order.filter(|order| order.bytes.iter().any(|&byte| byte != 0)) {
        let what =
            format!("columns in the order {:?} of a kind of GPU: expected 0, rows as they are", &order.bytes[..]);
        return Err(unsupported(&order.name, what));
    }
    scales.expect_type(Dtype::F32)?;
    let of_row: Vec<f32> = DType::F32.decode(&scales.bytes).into_iter().map(|absmax| absmax / LARGEST).collect();
    let scales = RawTensor { bytes: DType::F32.encode(&of_row).into(), ..scales };
    erase(EightBitLayer::new(weight, Some(scales), None, &EightBitSettings::of(settings)))
}

/// A layer of 4-bit codes.
#[derive(Debug)]
struct FourBitLayer {
    n: usize,
    k: usize,
    dtype: DType,
    table: [f32; 16],
    block: usize,
    codes: SharedBytes,
    scales: Scales,
}

/// Scales of the blocks.
#[derive(Debug)]
enum Scales {
    Plain(SharedBytes),
    Nested { codes: SharedBytes, table: SharedBytes, scales: SharedBytes, block: usize, offset: f32 },
}

impl Scales {
    fn read(&self, index: usize) -> f32 {
        match self {
            Scales::Plain(scales) => DType::F32.read(scales, index),
            Scales::Nested { codes, table, scales, block, offset } => {
                let number = DType::F32.read(table, usize::from(codes[index]));
                number * DType::F32.read(scales, index / block) + offset
            }
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Scales::Plain(scales) => scales.len(),
            Scales::Nested { codes, table, scales, .. } => codes.len() + table.len() + scales.len(),
        }
    }
}

/// State of a layer: the JSON text of a tensor.
struct State {
    tensor: String,
    values: Json,
}

impl State {
    fn read(tensor: &RawTensor) -> Result<Self, FormatError> {
        tensor.expect_type(Dtype::U8)?;
        let text = std::str::from_utf8(&tensor.bytes).map_err(|error| bad(&tensor.name, error.to_string()))?;
        let values = Json::parse(text).map_err(|error| bad(&tensor.name, error.to_string()))?;
        Ok(Self { tensor: tensor.name.clone(), values })
    }

    /// Value of `key` as `read` takes it.
    fn get<'a, T>(&'a self, key: &str, expected: &str, read: impl Fn(&'a Json) -> Option<T>) -> Result<T, FormatError> {
        let value = self.values.get(key);
        read(value).ok_or_else(|| bad(&self.tensor, format!("`{key}` is {value}: expected {expected}")))
    }

    /// Values that share a scale.
    fn block(&self, key: &str) -> Result<usize, FormatError> {
        let even = |size: &usize| *size > 0 && size.is_multiple_of(2);
        self.get(key, "an even number", |value| usize::try_from(value.integer()?).ok().filter(even))
    }
}

impl FourBitLayer {
    /// Checks state and sizes.
    ///
    /// # Errors
    /// [`FormatError::MissingTensor`], and
    /// [`FormatError::BadFile`] when state, settings and tensors
    /// contradict each other. [`FormatError::UnsupportedFile`]
    /// for other codebooks and shapes.
    fn new(
        codes: RawTensor,
        mut parts: BTreeMap<String, RawTensor>,
        kind: &str,
        settings: &LayerSettings<'_>,
    ) -> Result<Self, FormatError> {
        let name = codes.name.clone();
        let label = format!("bitsandbytes {}", kind.to_uppercase());
        let mut take = |part: &str| {
            let missing = || FormatError::missing(&name, &label, [format!("{name}.{part}")]);
            parts.remove(part).ok_or_else(missing)
        };
        let state = State::read(&take(&format!("{STATE}{kind}"))?)?;
        check_kind(&name, kind, &state, settings)?;
        let table = codebook(&take("quant_map")?, kind, &label)?;
        let [n, k] = state.get("shape", "[N, K]", |value| value.sizes()?.try_into().ok())?;
        let block = state.block("blocksize")?;
        let dtype = state.get("dtype", "float32, float16 or bfloat16", |value| dtype_of(value.text()?))?;
        let count = n.checked_mul(k).filter(|&count| count > 0 && count.div_ceil(2) == codes.bytes.len());
        let count = count.ok_or_else(|| {
            bad(&name, format!("has {} bytes of two codes, but its state has shape [{n}, {k}]", codes.bytes.len()))
        })?;
        let scales = scales(&state, count.div_ceil(block), &mut take)?;
        match parts.into_values().next() {
            Some(other) => Err(unsupported(&other.name, format!("belongs to a {label} layer, but is not understood"))),
            None => Ok(Self { n, k, dtype, table, block, codes: codes.bytes, scales }),
        }
    }

    fn format(&self) -> Format {
        Format::new(match self.dtype {
            DType::F32 => &plain::F32,
            DType::F16 => &plain::F16,
            DType::BF16 => &plain::BF16,
        })
    }

    /// Value `index` of all `N × K`, in f32.
    fn value(&self, index: usize, scale: f32) -> f32 {
        let code = self.codes[index / 2] >> (4 * (1 - index % 2)) & 0xf;
        self.table[usize::from(code)] * scale
    }
}

/// Reads the scales of `blocks` blocks.
fn scales(
    state: &State,
    blocks: usize,
    take: &mut impl FnMut(&str) -> Result<RawTensor, FormatError>,
) -> Result<Scales, FormatError> {
    let absmax = take("absmax")?;
    let sized = |tensor: &RawTensor, count: usize| {
        if tensor.elements() == count {
            return Ok(());
        }
        Err(bad(&tensor.name, format!("expected {count} numbers, got shape {:?}", tensor.shape)))
    };
    sized(&absmax, blocks)?;
    if absmax.dtype != Dtype::U8 {
        absmax.expect_type(Dtype::F32)?;
        return Ok(Scales::Plain(absmax.bytes));
    }
    let (table, scales) = (take("nested_quant_map")?, take("nested_absmax")?);
    let block = state.block("nested_blocksize")?;
    table.expect_type(Dtype::F32)?;
    scales.expect_type(Dtype::F32)?;
    sized(&table, 256)?;
    sized(&scales, blocks.div_ceil(block))?;
    let offset = state.get("nested_offset", "a number", Json::number)? as f32;
    Ok(Scales::Nested { codes: absmax.bytes, table: table.bytes, scales: scales.bytes, block, offset })
}

/// Compares the kind in a tensor's name with state and
/// settings.
fn check_kind(name: &str, kind: &str, state: &State, settings: &LayerSettings<'_>) -> Result<(), FormatError> {
    let own = state.get("quant_type", "a string", Json::text)?;
    if own != kind {
        return Err(bad(&state.tensor, format!("`quant_type` is `{own}`, but the tensor is called `{kind}`")));
    }
    let keys = ["bnb_4bit_quant_type"];
    if settings.word(&keys)?.is_some_and(|stated| stated != kind) {
        return Err(bad(name, format!("{}, but the layer's state is `{kind}`", settings.who_says(&keys))));
    }
    if settings.flag("load_in_4bit")? == Some(false) {
        return Err(bad(name, format!("{}, but the layer is `{kind}`", settings.who_says(&["load_in_4bit"]))));
    }
    Ok(())
}

/// The codebook of a layer, which must be that of its kind.
fn codebook(map: &RawTensor, kind: &str, label: &str) -> Result<[f32; 16], FormatError> {
    let known: [f32; 16] = match kind {
        "nf4" => NF4,
        "fp4" => std::array::from_fn(|code| FP4[code % 8] / 12.0 * if code < 8 { 1.0 } else { -1.0 }),
        _ => return Err(unsupported(&map.name, format!("{label}: expected NF4 or FP4"))),
    };
    map.expect_type(Dtype::F32)?;
    let values = DType::F32.decode(&map.bytes);
    if values != known {
        return Err(unsupported(&map.name, format!("codebook {values:?}: expected {known:?} ({label})")));
    }
    Ok(known)
}

/// Type by its name in torch.
fn dtype_of(name: &str) -> Option<DType> {
    match name {
        "float32" => Some(DType::F32),
        "float16" => Some(DType::F16),
        "bfloat16" => Some(DType::BF16),
        _ => None,
    }
}

impl Layer for FourBitLayer {
    fn format(&self) -> Format {
        self.format()
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.k]
    }

    fn bytes(&self) -> usize {
        self.codes.len() + self.scales.bytes()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        let blocks = (self.n * self.k).div_ceil(self.block);
        if let Some(at) = (0..blocks).find(|&at| !self.scales.read(at).is_finite()) {
            let row = at * self.block / self.k;
            return Err(FormatError::NonFiniteScale { what: "absmax of bitsandbytes".into(), row, block: at });
        }
        let size = self.dtype.bytes();
        let mut bytes = vec![0u8; self.n * self.k * size];
        bytes.par_chunks_mut(self.block * size).enumerate().for_each(|(at, out)| {
            let scale = self.scales.read(at);
            for (i, out) in out.chunks_exact_mut(size).enumerate() {
                self.dtype.write(out, 0, self.value(at * self.block + i, scale));
            }
        });
        HostWeight::new(Layer::format(self), self.n, self.k, bytes.into())
    }
}
