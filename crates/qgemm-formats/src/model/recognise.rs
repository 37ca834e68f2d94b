//! Layer recognition: finds quantized layers by tensor
//! names, types and settings.

use std::collections::HashMap;
use std::sync::Arc;

use safetensors::tensor::Dtype;

use super::bitsandbytes::take_bitsandbytes;
use super::eight_bit::{EightBitLayer, EightBitSettings};
use super::four_bit::{Mxfp4Layer, Nvfp4Layer};
use super::grouped::take_grouped;
use super::layer::{Found, Layer, erase};
use super::mlx::take_mlx;
use super::options::ModelOptions;
use super::pack_quantized::take_pack_quantized;
use super::raw::{RawTensor, RawTensors, bad, unsupported};
use super::settings::Settings;
use super::stack::{StackLayer, layer_or_stack};
use super::stated::Stated;
use super::torchao::take_torchao;
use super::unserved::{BESIDE_WEIGHT, take_incomplete, take_unserved};
use crate::error::FormatError;

/// Words in names of quantization tensors, for layers that are a tensor
/// of their module and not the module.
const QUANTIZATION_WORDS: [&str; 7] = ["scale", "zero", "blocks", "packed", "g_idx", "shape", "codebook"];

/// Tensors of a module that only a quantized layer has.
const WEIGHT_PARTS: [&str; 12] = [
    "qweight",
    "qzeros",
    "scales",
    "biases",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
];
/// Suffixes of the other tensors of a quantized stack of experts.
const STACK_PARTS: [&str; 6] = ["_blocks", "_scales", "_scale", "_scale_inv", "_weight_scale", "_weight_scale_inv"];

/// Takes the tensors of quantized layers out of `tensors`.
///
/// A layer whose tensors do not match becomes the error of loading it,
/// so that the rest of the model stays usable. So does a layer with
/// an unknown tensor, since that may change every weight, and a plain
/// weight beside tensors of a quantized one.
pub(super) fn take_layers(tensors: &mut RawTensors, settings: &Settings, options: &ModelOptions) -> Vec<Found> {
    let stated = Stated::of(settings);
    let names: Vec<String> = tensors.keys().cloned().collect();
    let mut found: Vec<Found> = names.iter().filter_map(|name| take_mxfp4_rows(tensors, name)).collect();
    found.extend(take_unserved(tensors, &stated));
    found.extend(names.iter().filter_map(|name| {
        take_grouped(tensors, name, settings, options)
            .or_else(|| take_pack_quantized(tensors, name, &stated))
            .or_else(|| take_mlx(tensors, name, settings))
            .or_else(|| take_torchao(tensors, name, settings, &stated))
            .or_else(|| take_bitsandbytes(tensors, name, settings))
            .or_else(|| take_mxfp4(tensors, name))
            .or_else(|| take_nvfp4(tensors, name))
            .or_else(|| take_packed_nvfp4(tensors, name))
    }));
    let is_weight = |name: &&String| name.ends_with(".weight");
    let weights = names.iter().filter(is_weight);
    found.extend(weights.filter_map(|name| take_eight_bit(tensors, name, settings, &stated)));
    // An FP8 tensor of another name may be part of a known layer.
    let mut layers = index_of(&found);
    for name in names.iter().filter(|name| !is_weight(name)) {
        if owner(name, &layers).is_none()
            && let Some(layer) = take_eight_bit(tensors, name, settings, &stated)
        {
            layers.insert(layer.0.clone(), found.len());
            found.push(layer);
        }
    }
    found.extend(take_incomplete(tensors, &stated));
    refuse_ambiguous(tensors, &names, &mut found);
    let layers = index_of(&found);
    for name in tensors.keys() {
        let Some(index) = owner(name, &layers) else { continue };
        let (layer, result) = &mut found[index];
        if result.is_ok() {
            *result =
                Err(unsupported(name, format!("belongs to the quantized layer `{layer}`, but is not understood")));
        }
    }
    found
}

/// Index of each layer by its name.
fn index_of(found: &[Found]) -> HashMap<String, usize> {
    found.iter().enumerate().map(|(i, (layer, _))| (layer.clone(), i)).collect()
}

/// Refuses plain weights with quantization tensors beside them.
/// Nothing tells whether the scales were applied to them already.
/// `names` are all tensors of the checkpoint, sorted.
fn refuse_ambiguous(tensors: &mut RawTensors, names: &[String], found: &mut Vec<Found>) {
    let part_of = |name: &str| -> Option<&String> {
        let parts: Vec<String> = match name.strip_suffix(".weight") {
            Some(module) => WEIGHT_PARTS.iter().map(|part| format!("{module}.{part}")).collect(),
            None => STACK_PARTS.iter().map(|part| format!("{name}{part}")).collect(),
        };
        parts.iter().find_map(|part| names.binary_search(part).ok()).map(|index| &names[index])
    };
    let is_plain = |tensor: &RawTensor| tensor.float_type().is_some() && tensor.shape.len() >= 2;
    let plain = tensors.iter().filter(|(_, tensor)| is_plain(tensor));
    let ambiguous: Vec<(String, String)> =
        plain.filter_map(|(name, _)| Some((name.clone(), part_of(name)?.clone()))).collect();
    for (name, part) in ambiguous {
        let Some(tensor) = tensors.remove(&name) else { continue };
        let what = format!(
            "is plain {:?}, but `{part}` of a quantized layer is beside it: expected one of them",
            tensor.dtype
        );
        let error = Err(bad(&name, what));
        match found.iter_mut().find(|(layer, _)| *layer == name) {
            Some((_, result)) => *result = error,
            None => found.push((name, error)),
        }
    }
}

/// Index of the layer that the unknown tensor `name` belongs to.
pub(super) fn owner(name: &str, layers: &HashMap<String, usize>) -> Option<usize> {
    let position = |layer: &str| layers.get(layer).copied();
    if let Some((module, rest)) = name.rsplit_once('.')
        && !BESIDE_WEIGHT.contains(&rest)
        && let Some(index) = position(&format!("{module}.weight")).or_else(|| position(module))
    {
        return Some(index);
    }
    let is_part = |rest: &str| {
        let beside = BESIDE_WEIGHT.iter().any(|known| rest.ends_with(known));
        !rest.contains('.') && !beside && QUANTIZATION_WORDS.iter().any(|word| rest.contains(word))
    };
    let splits = name.match_indices('_').map(|(at, _)| (&name[..at], &name[at + 1..]));
    splits.filter(|(_, rest)| is_part(rest)).find_map(|(layer, _)| position(layer))
}

/// Takes `name` and `others`, or nothing when one is missing.
fn take<const OTHERS: usize>(
    tensors: &mut RawTensors,
    name: &str,
    others: [&str; OTHERS],
) -> Option<(RawTensor, [RawTensor; OTHERS])> {
    if !others.iter().all(|other| tensors.contains_key(*other)) {
        return None;
    }
    let first = tensors.remove(name)?;
    let rest: Vec<RawTensor> = others.iter().filter_map(|other| tensors.remove(*other)).collect();
    Some((first, rest.try_into().ok()?))
}

fn take_mxfp4(tensors: &mut RawTensors, name: &str) -> Option<Found> {
    let base = name.strip_suffix("_blocks")?;
    if tensors.get(name)?.dtype != Dtype::U8 {
        return None;
    }
    let (blocks, [scales]) = take(tensors, name, [&format!("{base}_scales")])?;
    Some((base.to_owned(), erase(Mxfp4Layer::new(blocks, scales))))
}

/// Takes MXFP4 in rows of codes: two a byte, with sixteen bytes a scale.
fn take_mxfp4_rows(tensors: &mut RawTensors, name: &str) -> Option<Found> {
    let codes = tensors.get(name)?;
    let module = name.strip_suffix(".weight");
    let scales = match (codes.dtype, name.strip_suffix("_packed"), module) {
        // compressed-tensors.
        (Dtype::U8, Some(weight), _) => vec![format!("{weight}_scale")],
        // Quark and ModelOpt, also stacks of experts.
        (Dtype::U8, None, _) => vec![format!("{name}_scale"), format!("{name}_weight_scale")],
        // DeepSeek V4.
        (Dtype::I8 | Dtype::F4, None, Some(module)) => vec![format!("{module}.scale")],
        _ => return None,
    };
    let has_blocks = |scales: &RawTensor| {
        let of_block = if codes.dtype == Dtype::F4 { 32 } else { 16 };
        let scale_types = if codes.dtype == Dtype::U8 { &[Dtype::U8, Dtype::F8_E8M0][..] } else { &[Dtype::F8_E8M0] };
        let blocks = scales.shape.last().and_then(|blocks| blocks.checked_mul(of_block));
        scale_types.contains(&scales.dtype) && blocks.is_some() && blocks == codes.shape.last().copied()
    };
    let scales = scales.into_iter().find(|scales| tensors.get(scales).is_some_and(has_blocks))?;
    let (codes, [scales]) = take(tensors, name, [&scales])?;
    let layer = name.strip_suffix("_packed").unwrap_or(name);
    Some((layer.to_owned(), erase(Mxfp4Layer::of_rows(codes, scales))))
}

fn take_nvfp4(tensors: &mut RawTensors, name: &str) -> Option<Found> {
    if tensors.get(name)?.dtype != Dtype::U8 {
        return None;
    }
    // ModelOpt names the scales of fused experts `<name>_scale`
    // or `<name>_weight_scale`.
    let beside = ["", "_weight"].map(|infix| [format!("{name}{infix}_scale"), format!("{name}{infix}_scale_2")]);
    let taken = beside.iter().find_map(|[scales, scale]| take(tensors, name, [scales, scale]));
    let (codes, [scales, scale]) = taken?;
    Some((name.to_owned(), nvfp4(codes, scales, scale, false)))
}

fn take_packed_nvfp4(tensors: &mut RawTensors, name: &str) -> Option<Found> {
    let base = name.strip_suffix("_packed")?;
    if tensors.get(name)?.dtype != Dtype::U8 {
        return None;
    }
    let (codes, [scales, scale]) = take(tensors, name, [&format!("{base}_scale"), &format!("{base}_global_scale")])?;
    Some((base.to_owned(), nvfp4(codes, scales, scale, true)))
}

/// NVFP4 layer, or a stack of them.
fn nvfp4(codes: RawTensor, scales: RawTensor, scale: RawTensor, divides: bool) -> Result<Arc<dyn Layer>, FormatError> {
    layer_or_stack(codes, [scales, scale], move |codes, [scales, scale]| Nvfp4Layer::new(codes, scales, scale, divides))
}

fn take_eight_bit(tensors: &mut RawTensors, name: &str, settings: &Settings, stated: &Stated<'_>) -> Option<Found> {
    let tensor = tensors.get(name)?;
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let scale_names = ["_scale", "_scale_inv", "_weight_scale", "_weight_scale_inv"].map(|end| format!("{name}{end}"));
    // DeepSeek's own files. A scale of this name may
    // be a divisor elsewhere.
    let deep_seek = format!("{module}.scale");
    let is_deep_seek = |scale: &RawTensor| scale.dtype == Dtype::F8_E8M0 || stated.has("weight_block_size");
    let scale_name = scale_names.iter().find(|scale| tensors.contains_key(*scale));
    let scale_name = scale_name.or_else(|| tensors.get(&deep_seek).filter(|s| is_deep_seek(s)).map(|_| &deep_seek));
    let is_float = tensor.dtype != Dtype::I8;
    // FP8 tensors that are scales, and integers without
    // scales, are no layers.
    let is_layer = EightBitLayer::has_type(tensor.dtype)
        && tensor.shape.len() >= 2
        && (scale_name.is_some() || is_float && !is_scale(name));
    if !is_layer {
        return None;
    }
    let scale = scale_name.and_then(|scale| tensors.remove(scale));
    let zero_point = tensors.remove(&format!("{name}_zero_point"));
    let weight = tensors.remove(name)?;
    let config = EightBitSettings::of(&settings.layer(module));
    let promised = if scale.is_none() { stated.promises_scales(module) } else { None };
    let layer = match promised {
        Some(by) => Err(FormatError::missing(name, &format!("FP8 with scales by {by}"), scale_names[..2].to_vec())),
        None => eight_bit(weight, scale, zero_point, &config),
    };
    Some((name.to_owned(), layer))
}

/// Whether a tensor is named as a scale.
fn is_scale(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| last.contains("scale"))
}

/// 8-bit layer, or a stack of them.
fn eight_bit(
    weight: RawTensor,
    scale: Option<RawTensor>,
    zero_point: Option<RawTensor>,
    config: &EightBitSettings,
) -> Result<Arc<dyn Layer>, FormatError> {
    if weight.shape.len() != 3 {
        return erase(EightBitLayer::new(weight, scale, zero_point, config));
    }
    if let Some(zero_point) = zero_point.filter(|zero_point| zero_point.bytes.iter().any(|&byte| byte != 0)) {
        return Err(unsupported(&zero_point.name, "zero points of a stack of experts: expected 0"));
    }
    let config = config.clone();
    match scale {
        None => erase(StackLayer::new(weight, [], move |weight, []| EightBitLayer::new(weight, None, None, &config))),
        Some(scale) => erase(StackLayer::new(weight, [scale], move |weight, [scale]| {
            EightBitLayer::new(weight, Some(scale), None, &config)
        })),
    }
}
