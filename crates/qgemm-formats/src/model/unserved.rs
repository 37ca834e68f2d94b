//! Unsupported quantized formats, recognised by their tensors, so that errors name
//! the format instead of a missing tensor.

use safetensors::tensor::Dtype;

use super::layer::Found;
use super::raw::{RawTensor, RawTensors, unsupported};
use super::stated::Stated;
use crate::error::FormatError;

/// Tensors beside a weight that do not change it: biases, and
/// calibrated scales of activations and caches.
pub(super) const BESIDE_WEIGHT: [&str; 16] = [
    "bias",
    "e_score_correction_bias",
    "input_scale",
    "input_scale_ub",
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
/// Tensor suffix after the module name, and its allowed types. Empty means any.
type Part = (&'static str, &'static [Dtype]);

/// Signature: the tensors and settings that identify a format.
struct Signature {
    /// Tensor that stands for the layer.
    codes: Part,
    /// Other tensors of the module.
    beside: &'static [Part],
    /// Prefix of the stated method. Empty matches any method, or none.
    method: &'static str,
    format: Name,
    /// For supported formats: tensors of which the layer needs one and has none.
    lacks: &'static [&'static str],
}

/// Name of a format in the field's words.
enum Name {
    Is(&'static str),
    /// Name that depends on settings.
    By(fn(&Module<'_>) -> String),
}

/// Module with the tensors of a signature.
struct Module<'a> {
    name: &'a str,
    codes: &'a RawTensor,
    tensors: &'a RawTensors,
    stated: &'a Stated<'a>,
}

const BYTES: &[Dtype] = &[Dtype::U8];
const SIGNED: &[Dtype] = &[Dtype::I8];
const WORDS: &[Dtype] = &[Dtype::I32];
const POWERS: &[Dtype] = &[Dtype::U8, Dtype::F8_E8M0];
const NUMBERS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];
const FP8: &[Dtype] = &[Dtype::F8_E4M3, Dtype::F8_E5M2];
const PACKED: &[Dtype] = &[Dtype::U8, Dtype::F8_E4M3];
const INTEGERS: &[Dtype] =
    &[Dtype::U8, Dtype::I8, Dtype::U16, Dtype::I16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64];

const fn known(codes: Part, beside: &'static [Part], format: &'static str) -> Signature {
    Signature { codes, beside, method: "", format: Name::Is(format), lacks: &[] }
}

const fn named(codes: Part, beside: &'static [Part], format: fn(&Module<'_>) -> String) -> Signature {
    Signature { codes, beside, method: "", format: Name::By(format), lacks: &[] }
}

const fn lacking(
    codes: Part,
    beside: &'static [Part],
    format: &'static str,
    lacks: &'static [&'static str],
) -> Signature {
    Signature { lacks, ..known(codes, beside, format) }
}

/// Matches any stated method of a module.
const ANY_METHOD: &str = "*";

/// Known unsupported formats. The first match counts, so signatures with
/// more tensors come first.
static UNSERVED: &[Signature] = &[
    known((".weight_packed", BYTES), &[(".weight_scale", POWERS)], "compressed-tensors MXFP4 (mxfp4-pack-quantized)"),
    known((".weight_packed", &[]), &[(".scale_packed", &[]), (".meta", &[])], "compressed-tensors marlin-24"),
    known((".compressed", &[]), &[(".bitmask", BYTES)], "compressed-tensors sparse-bitmask"),
    known((".weight", &[Dtype::I8, Dtype::F4]), &[(".scale", &[Dtype::F8_E8M0])], "DeepSeek V4 FP4 experts"),
    known((".W_q", INTEGERS), &[], "HQQ"),
    known((".codes", INTEGERS), &[(".codebooks", &[])], "AQLM"),
    known((".Qidxs", INTEGERS), &[], "QuIP#"),
    known((".trellis", INTEGERS), &[(".SU", &[])], "QTIP"),
    known((".trellis", INTEGERS), &[], "EXL3"),
    known((".q_weight", INTEGERS), &[(".q_scale", &[])], "EXL2"),
    known((".weight", SIGNED), &[(".weight_scales", NUMBERS)], "EETQ int8"),
    known((".qweight", SIGNED), &[], "EETQ int8"),
    known((".dense_weights", &[]), &[(".row_offsets", &[])], "SpQR"),
    known((".indices", &[]), &[(".centroids.weight", &[])], "VPTQ"),
    known((".weight", &[]), &[(".scales", &[]), (".tables2", &[])], "HIGGS"),
    known((".qweight", &[]), &[(".forward_hadamard_matrix", &[])], "FP-Quant"),
    known((".weight._data", &[]), &[(".weight._scale", &[])], "quanto"),
    known((".B", WORDS), &[(".s_channel", &[])], "QQQ"),
    known((".B", WORDS), &[(".s", &[])], "Marlin int4"),
    known((".weight", FP8), &[(".qscale_weight", &[])], "Mistral FP8 (`qscale_weight`)"),
    named((".weight", PACKED), &[(".weight_scale", &[]), (".pre_quant_scale", &[])], modelopt_awq),
    Signature { method: "bitnet", ..known((".weight", BYTES), &[(".weight_scale", &[])], "BitNet 1.58 bit") },
    Signature { method: "modelopt", ..named((".weight", BYTES), &[(".weight_scale", NUMBERS)], modelopt_awq) },
    named(("", BYTES), &[("_scale", POWERS)], mxfp4_in_bytes),
    named(("", BYTES), &[("_weight_scale", POWERS)], mxfp4_in_bytes),
];

/// States of bitsandbytes layers.
const BITSANDBYTES_STATES: &[&str] =
    &[".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"];

/// Incomplete layers of supported formats. Matched after complete layers are taken.
static INCOMPLETE: &[Signature] = &[
    lacking((".qweight", WORDS), &[], "GPTQ or AWQ", &[".scales"]),
    lacking((".weight_packed", BYTES), &[(".weight_scale", &[])], "NVFP4", &[".weight_global_scale"]),
    lacking((".weight_packed", &[]), &[], "compressed-tensors pack-quantized", &[".weight_scale"]),
    lacking((".weight", BYTES), &[(".weight_scale", &[Dtype::F8_E4M3])], "NVFP4", &[".weight_scale_2"]),
    lacking(("", BYTES), &[("_scale", &[Dtype::F8_E4M3])], "NVFP4", &["_scale_2"]),
    lacking(("", BYTES), &[("_weight_scale", &[Dtype::F8_E4M3])], "NVFP4", &["_weight_scale_2"]),
    lacking((".weight", BYTES), &[(".weight.absmax", &[])], "bitsandbytes 4 bit", BITSANDBYTES_STATES),
    lacking(("_blocks", BYTES), &[], "MXFP4", &["_scales"]),
    lacking((".weight", &[Dtype::U32]), &[(".biases", &[])], "MLX affine", &[".scales"]),
    Signature { method: "modelopt", ..lacking((".weight", BYTES), &[], "NVFP4", &[".weight_scale"]) },
    Signature { method: "compressed-tensors", ..lacking((".weight", SIGNED), &[], "INT8", &[".weight_scale"]) },
    Signature { method: ANY_METHOD, ..named((".weight", INTEGERS), &[], by_method) },
    Signature { method: ANY_METHOD, ..named((".qweight", INTEGERS), &[], by_method) },
];

/// Takes the tensors of unsupported layers out of `tensors`. Each layer becomes
/// the error of loading it.
pub(super) fn take_unserved(tensors: &mut RawTensors, stated: &Stated<'_>) -> Vec<Found> {
    take(UNSERVED, tensors, stated)
}

/// Takes incomplete layers, and layers of which only a stated method is known.
pub(super) fn take_incomplete(tensors: &mut RawTensors, stated: &Stated<'_>) -> Vec<Found> {
    take(INCOMPLETE, tensors, stated)
}

fn take(signatures: &[Signature], tensors: &mut RawTensors, stated: &Stated<'_>) -> Vec<Found> {
    let names: Vec<String> = tensors.keys().cloned().collect();
    names.iter().filter_map(|name| take_one(signatures, tensors, name, stated)).collect()
}

fn take_one(signatures: &[Signature], tensors: &mut RawTensors, name: &str, stated: &Stated<'_>) -> Option<Found> {
    let codes = tensors.get(name)?;
    let module_of = |signature: &Signature| name.strip_suffix(signature.codes.0).filter(|module| !module.is_empty());
    let module = |name| Module { name, codes, tensors, stated };
    let fits = |signature: &&Signature| module_of(signature).is_some_and(|name| signature.fits(&module(name)));
    let signature = signatures.iter().find(fits)?;
    let module = module(module_of(signature)?);
    let layer = match format!("{}.weight", module.name) {
        weight if !signature.codes.0.starts_with('.') || name != weight && tensors.contains_key(&weight) => {
            name.to_owned()
        }
        weight => weight,
    };
    let error = signature.error(&layer, &module);
    for part in parts(tensors, module.name, name, signature) {
        tensors.remove(&part);
    }
    Some((layer, Err(error)))
}

/// Tensor names of a layer: codes, other tensors of the signature, and
/// tensors named after the codes.
fn parts(tensors: &RawTensors, module: &str, codes: &str, signature: &Signature) -> Vec<String> {
    let of_module = format!("{module}.");
    let is_part = |rest: &str| (!rest.contains('.') || rest.starts_with("weight.")) && !BESIDE_WEIGHT.contains(&rest);
    let all = tensors.range(of_module.clone()..).map(|(name, _)| name).take_while(|name| name.starts_with(&of_module));
    let mut found: Vec<String> = all.filter(|name| is_part(&name[of_module.len()..])).cloned().collect();
    found.extend(signature.beside.iter().map(|(beside, _)| format!("{module}{beside}")));
    found.push(codes.to_owned());
    found
}

impl Signature {
    fn fits(&self, module: &Module<'_>) -> bool {
        let tensor = |part: &str| module.tensors.get(&format!("{}{part}", module.name));
        let is = |types: &[Dtype], tensor: &RawTensor| types.is_empty() || types.contains(&tensor.dtype);
        let states_method = || match module.stated.method() {
            Some(_) if self.method == ANY_METHOD => {
                module.codes.shape.len() > 1 && !module.stated.is_unquantized(module.name)
            }
            Some(method) => method.starts_with(self.method),
            None => false,
        };
        is(self.codes.1, module.codes)
            && self.beside.iter().all(|(part, types)| tensor(part).is_some_and(|tensor| is(types, tensor)))
            && !self.lacks.iter().any(|part| tensor(part).is_some())
            && (self.method.is_empty() || states_method())
    }

    fn error(&self, layer: &str, module: &Module<'_>) -> FormatError {
        let format = match self.format {
            Name::Is(format) => format.to_owned(),
            Name::By(format) => format(module),
        };
        match self.lacks {
            [] => unsupported(layer, format!("is {format}, which is not supported: requantize it to a format that is")),
            lacks => FormatError::missing(layer, &format, lacks.iter().map(|part| format!("{}{part}", module.name))),
        }
    }
}

fn modelopt_awq(module: &Module<'_>) -> String {
    match module.stated.algorithm(module.name) {
        Some(algorithm) => format!("ModelOpt {algorithm}"),
        None => "ModelOpt AWQ (`pre_quant_scale`)".into(),
    }
}

fn mxfp4_in_bytes(module: &Module<'_>) -> String {
    let method = module.stated.method().unwrap_or_default();
    let kind = module.stated.of_module("global_quant_config", "weight").get("dtype").text();
    match (method.as_str(), kind.filter(|kind| kind.starts_with("fp6"))) {
        ("quark", Some(kind)) => format!("Quark {}", kind.replace("fp6", "MXFP6")),
        ("quark", None) => "Quark MXFP4".into(),
        (method, _) if method.starts_with("modelopt") => "ModelOpt MXFP4".into(),
        _ => "MXFP4 in bytes of two codes, with scales in `weight_scale`".into(),
    }
}

fn by_method(module: &Module<'_>) -> String {
    let method = module.stated.method().unwrap_or_default();
    format!("quantized by `{method}`, whose tensor `{}` is unknown", module.codes.name)
}
