//! Finds the quantized layers among the tensors of a checkpoint, by names, types and settings.

use std::collections::HashMap;
use std::sync::Arc;

use safetensors::tensor::Dtype;

use super::ModelOptions;
use super::eight_bit::EightBitLayer;
use super::four_bit::{Mxfp4Layer, Nvfp4Layer};
use super::grouped::take_grouped;
use super::layer::Layer;
use super::raw::{RawTensor, RawTensors, unsupported};
use super::settings::Settings;
use crate::error::FormatError;

/// A layer, or why it is none, under the name that users know it by (`….weight`).
pub(super) type Found = (String, Result<Arc<dyn Layer>, FormatError>);

/// What a layer may have beside its weight that leaves the weight as it is: what is added to the product, and the scales
/// that activations and caches were calibrated for.
const BESIDE_WEIGHT: [&str; 15] = [
    "bias",
    "e_score_correction_bias",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "input_amax",
    "activation_scale",
    "output_scale",
    "output_zero_point",
    "output_amax",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "prob_output_scale",
];
/// What names of quantization tensors are made of, where the layer is a tensor of its module and not the module.
const QUANTIZATION_WORDS: [&str; 7] = ["scale", "zero", "blocks", "packed", "g_idx", "shape", "codebook"];

/// Takes the tensors of quantized layers out of `tensors`. A layer whose tensors do not fit together is found
/// too, as the error that loading it gives, so that the rest of the model stays usable; so is one with a tensor that
/// is not understood, since it may change every weight.
pub(super) fn take_layers(tensors: &mut RawTensors, settings: &Settings, options: &ModelOptions) -> Vec<Found> {
    let names: Vec<String> = tensors.keys().cloned().collect();
    let mut found = Vec::new();
    for name in &names {
        let layer = take_grouped(tensors, name, settings, options)
            .or_else(|| take_mxfp4(tensors, name))
            .or_else(|| take_nvfp4(tensors, name))
            .or_else(|| take_packed_nvfp4(tensors, name))
            .or_else(|| take_eight_bit(tensors, name, settings));
        found.extend(layer);
    }
    let layers: HashMap<String, usize> = found.iter().enumerate().map(|(i, (layer, _))| (layer.clone(), i)).collect();
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

/// Index of the layer that the tensor `name` says something of that is not understood.
fn owner(name: &str, layers: &HashMap<String, usize>) -> Option<usize> {
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

pub(super) fn erase<L: Layer + 'static>(layer: Result<L, FormatError>) -> Result<Arc<dyn Layer>, FormatError> {
    layer.map(|layer| Arc::new(layer) as Arc<dyn Layer>)
}

/// Takes `name` and `others`, or nothing when one is not there.
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

fn take_nvfp4(tensors: &mut RawTensors, name: &str) -> Option<Found> {
    if tensors.get(name)?.dtype != Dtype::U8 {
        return None;
    }
    let (codes, [scales, scale]) = take(tensors, name, [&format!("{name}_scale"), &format!("{name}_scale_2")])?;
    Some((name.to_owned(), erase(Nvfp4Layer::new(codes, scales, scale, false))))
}

fn take_packed_nvfp4(tensors: &mut RawTensors, name: &str) -> Option<Found> {
    let base = name.strip_suffix("_packed")?;
    if tensors.get(name)?.dtype != Dtype::U8 {
        return None;
    }
    let (codes, [scales, scale]) = take(tensors, name, [&format!("{base}_scale"), &format!("{base}_global_scale")])?;
    Some((base.to_owned(), erase(Nvfp4Layer::new(codes, scales, scale, true))))
}

fn take_eight_bit(tensors: &mut RawTensors, name: &str, settings: &Settings) -> Option<Found> {
    let tensor = tensors.get(name)?;
    let scale_names = [format!("{name}_scale"), format!("{name}_scale_inv")];
    let scale_name = scale_names.iter().find(|scale| tensors.contains_key(*scale));
    // Scales of FP8 type, and integers without scales, are no layers.
    let is_layer = EightBitLayer::has_type(tensor.dtype)
        && tensor.shape.len() >= 2
        && (scale_name.is_some() || tensor.dtype != Dtype::I8);
    if !is_layer {
        return None;
    }
    let scale = scale_name.and_then(|scale| tensors.remove(scale));
    let zero_point = tensors.remove(&format!("{name}_zero_point"));
    let weight = tensors.remove(name)?;
    let config = settings.layer(name.strip_suffix(".weight").unwrap_or(name));
    Some((name.to_owned(), erase(EightBitLayer::new(weight, scale, zero_point, &config))))
}
