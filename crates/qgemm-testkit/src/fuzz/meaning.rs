//! Meaning of a one-layer checkpoint, from the definitions of its
//! formats and independent of the library's readers.
//!
//! A checkpoint has several meanings if settings are ambiguous
//! (absent keys).
//! It has none if settings contradict the tensors or violate the
//! definitions. A reader must then refuse it, or find a safe
//! reading with the values before the mutation.

use std::collections::BTreeMap;

use half::f16;
use serde_json::{Map, Value};

use super::grouped::grouped;
use super::layer::{
    Settings, Stated, Tensor, Tensors, Values, field, floats, python_json, quantization, scales, words,
};

/// Tensors that do not affect the weight.
const BESIDE: [&str; 4] = ["bias", "input_scale", "output_scale", "k_scale"];
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The meanings of the layer called `layer`, given the text of
/// its settings.
pub(super) fn meanings(settings: Option<&str>, tensors: &Tensors) -> Vec<Values> {
    let parsed = match settings {
        None => Map::new(),
        Some(text) => match python_json(text) {
            Some(Value::Object(object)) => object,
            _ => return Vec::new(),
        },
    };
    let stated = Settings(quantization(&parsed));
    let parts = parts(tensors);
    let names: Vec<&str> = parts.keys().copied().collect();
    match names[..] {
        ["g_idx", "qweight", "qzeros", "scales"]
        | ["qweight", "qzeros", "scales"]
        | ["g_idx", "qweight", "scales"]
        | ["qweight", "scales"] => grouped(&stated, &parts),
        ["blocks", "scales"] => mxfp4(parts["blocks"], parts["scales"]),
        ["weight", "weight_scale", "weight_scale_2"] => {
            nvfp4(parts["weight"], parts["weight_scale"], parts["weight_scale_2"], false)
        }
        ["weight_global_scale", "weight_packed", "weight_scale"] => {
            nvfp4(parts["weight_packed"], parts["weight_scale"], parts["weight_global_scale"], true)
        }
        ["weight_packed", "weight_scale"] => mxfp4_rows(parts["weight_packed"], parts["weight_scale"]),
        ["weight", "weight_scale"] if parts["weight"].dtype == "U8" => {
            mxfp4_rows(parts["weight"], parts["weight_scale"])
        }
        ["biases", "scales", "weight"] => mlx_affine(&stated, &parts).into_iter().collect(),
        ["scales", "weight"] => mlx_mxfp4(&stated, &parts),
        ["SCB", "weight"] => llm_int8(&stated, parts["weight"], parts["SCB"]).into_iter().collect(),
        ["scale", "weight"] => mxfp4_rows(parts["weight"], parts["scale"]),
        ["weight_packed", "weight_scale", "weight_shape"]
        | ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]
        | ["weight_g_idx", "weight_packed", "weight_scale", "weight_shape"]
        | ["weight_g_idx", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"] => {
            let all = PACKED_BITS.into_iter().flat_map(|bits| [(bits, false), (bits, true)]);
            all.filter_map(|packing| pack_quantized(&stated, &parts, packing)).collect()
        }
        ["weight", "weight_scale"] => eight_bit(&stated, parts["weight"], Some(parts["weight_scale"]), None),
        ["weight", "weight_scale_inv"] => eight_bit(&stated, parts["weight"], Some(parts["weight_scale_inv"]), None),
        ["weight", scale @ ("weight_scale" | "weight_scale_inv"), "weight_zero_point"] => {
            eight_bit(&stated, parts["weight"], Some(parts[scale]), Some(parts["weight_zero_point"]))
        }
        ["weight", "weight_zero_point"] => eight_bit(&stated, parts["weight"], None, Some(parts["weight_zero_point"])),
        ["weight"] if floats(parts["weight"]).is_none() => eight_bit(&stated, parts["weight"], None, None),
        _ => plain(&parts).into_iter().collect(),
    }
}

/// A plain weight. Tensors that only quantized layers have make it ambiguous.
fn plain(parts: &BTreeMap<&str, &Tensor>) -> Option<Values> {
    const QUANTIZED: [&str; 11] = [
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
    ];
    let weight = parts.get("weight").filter(|weight| weight.shape.len() == 2)?;
    if QUANTIZED.iter().any(|part| parts.contains_key(part)) { None } else { floats(weight) }
}

/// Tensors of the layer, by the ends of their names.
/// If the layer is not a module with tensors, `layer` is the
/// prefix of a stack's names.
fn parts(tensors: &Tensors) -> BTreeMap<&str, &Tensor> {
    let with = |prefix: &str| -> BTreeMap<&str, &Tensor> {
        let of = |(name, tensor)| Some((str::strip_prefix(name, prefix)?, tensor));
        tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
            .filter_map(of)
            .filter(|(part, _)| !BESIDE.contains(part))
            .collect()
    };
    let module = with("layer.");
    if module.is_empty() { with("layer_") } else { module }
}

fn mxfp4(blocks: &Tensor, scales: &Tensor) -> Vec<Values> {
    let [n, per_row, 16] = blocks.shape[..] else { return Vec::new() };
    let is_mx = blocks.dtype == "U8" && scales.dtype == "U8" && scales.shape == [n, per_row] && n * per_row > 0;
    if !is_mx || scales.bytes.contains(&255) {
        return Vec::new();
    }
    let value = |i: usize| {
        let code = blocks.bytes[i / 2] >> (4 * (i % 2)) & 15;
        (f64::from(E2M1[usize::from(code)]) * (f64::from(scales.bytes[i / 32]) - 127.0).exp2()) as f32
    };
    vec![(0..n * per_row * 32).map(value).collect()]
}

/// Bits and group of an MLX layer in this mode, which may have `only` these.
fn mlx_packing(stated: &Settings, mode: &str, only: Option<[usize; 2]>) -> Option<[usize; 2]> {
    let is_mode = match stated.text("mode") {
        Stated::Nothing => mode == "affine",
        Stated::This(other) => other == mode,
        Stated::Nonsense => false,
    };
    let number = |keys, only: Option<usize>| match stated.integer(keys) {
        Stated::Nothing => only,
        Stated::This(number) => usize::try_from(number).ok(),
        Stated::Nonsense => None,
    };
    let bits = number(["bits", "w_bit"], only.map(|only| only[0]));
    let group = number(["group_size", "q_group_size"], only.map(|only| only[1]));
    Some([bits?, group?]).filter(|_| is_mode)
}

fn mlx_words(tensor: &Tensor) -> Option<Vec<u32>> {
    words(&Tensor { dtype: "I32".into(), ..tensor.clone() }).filter(|_| tensor.dtype == "U32")
}

/// MLX affine: scale · code + bias.
fn mlx_affine(stated: &Settings, parts: &BTreeMap<&str, &Tensor>) -> Option<Values> {
    let [bits, group] = mlx_packing(stated, "affine", None)?;
    let is_known = [2, 3, 4, 5, 6, 8].contains(&bits) && [32, 64, 128].contains(&group);
    let codes = mlx_words(parts["weight"]).filter(|_| is_known)?;
    let [n, row] = parts["weight"].shape[..] else { return None };
    let k = row * 32 / bits;
    let groups = k / group;
    let fits = row > 0 && groups * group * bits == row * 32;
    let is_scale = |tensor: &Tensor| tensor.shape == [n, groups];
    let (scales, biases) = (floats(parts["scales"])?, floats(parts["biases"])?);
    if !fits || n == 0 || !is_scale(parts["scales"]) || !is_scale(parts["biases"]) {
        return None;
    }
    let finite = scales.iter().chain(&biases).all(|scale| scale.is_finite());
    let value = |i: usize| {
        let (line, column) = (i / k, i % k);
        let at = line * groups + column / group;
        Some(field(&codes, line * row, 1, column * bits, bits)? as f32 * scales[at] + biases[at])
    };
    (0..n * k).map(value).collect::<Option<_>>().filter(|_| finite)
}

/// MLX in mode `mxfp4`.
fn mlx_mxfp4(stated: &Settings, parts: &BTreeMap<&str, &Tensor>) -> Vec<Values> {
    let codes = parts["weight"];
    let only = [4, 32];
    let is_mx =
        mlx_packing(stated, "mxfp4", Some(only)) == Some(only) && codes.dtype == "U32" && parts["scales"].dtype == "U8";
    let [n, row] = codes.shape[..] else { return Vec::new() };
    let bytes = Tensor { dtype: "U8".into(), shape: vec![n, row * 4], bytes: codes.bytes.clone() };
    if is_mx { mxfp4_rows(&bytes, parts["scales"]) } else { Vec::new() }
}

/// bitsandbytes LLM.int8(): SCB / 127 · code.
fn llm_int8(stated: &Settings, weight: &Tensor, scb: &Tensor) -> Option<Values> {
    let [n, k] = weight.shape[..] else { return None };
    let is_int8 = stated.flag("load_in_8bit")? != Some(false) && weight.dtype == "I8" && scb.dtype == "F32";
    let scales = floats(scb).filter(|scales| is_int8 && k > 0 && scales.iter().all(|scale| scale.is_finite()))?;
    let of_rows = scb.shape == [n] || scb.shape == [n, 1] || scales.len() == 1;
    let scale = |row: usize| if scales.len() == 1 { scales[0] } else { scales[row] } / 127.0;
    of_rows.then(|| (0..n * k).map(|i| scale(i / k) * f32::from(weight.bytes[i] as i8)).collect())
}

/// MXFP4 in rows of codes, two a byte.
fn mxfp4_rows(codes: &Tensor, scales: &Tensor) -> Vec<Values> {
    let ([n, bytes], [_, blocks]) = (&codes.shape[..], &scales.shape[..]) else { return Vec::new() };
    let types = [codes.dtype.as_str(), scales.dtype.as_str()];
    let is_mx = [["U8", "U8"], ["U8", "F8_E8M0"], ["I8", "F8_E8M0"]].contains(&types);
    if !is_mx || blocks.checked_mul(16) != Some(*bytes) {
        return Vec::new();
    }
    let as_bytes =
        |tensor: &Tensor, shape: &[usize]| Tensor { dtype: "U8".into(), shape: shape.to_vec(), ..tensor.clone() };
    mxfp4(&as_bytes(codes, &[*n, *blocks, 16]), &as_bytes(scales, &scales.shape))
}

/// Widths of compressed-tensors pack-quantized.
const PACKED_BITS: [usize; 4] = [2, 3, 4, 8];

/// compressed-tensors pack-quantized codes of `bits` bits, dense or
/// `whole` in each word.
fn pack_quantized(stated: &Settings, parts: &BTreeMap<&str, &Tensor>, (bits, whole): (usize, bool)) -> Option<Values> {
    let groups = stated.0.get("config_groups").and_then(Value::as_object);
    let weights = groups.filter(|groups| groups.len() == 1).and_then(|groups| groups.values().next()?.get("weights"));
    let says = |key: &str| weights.and_then(|weights| weights.get(key)).filter(|value| !value.is_null());
    if says("num_bits").and_then(Value::as_u64).is_some_and(|stated| stated != bits as u64) {
        return None;
    }
    let shape = parts["weight_shape"];
    let numbers: Vec<i64> = match shape.dtype.as_str() {
        "I64" => shape.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        "I32" => shape.bytes.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
        _ => return None,
    };
    let &[n, k] = &numbers[..] else { return None };
    let (n, k) = (usize::try_from(n).ok()?, usize::try_from(k).ok()?);
    let packed = parts["weight_packed"];
    let codes = words(packed).filter(|_| packed.shape.first() == Some(&n) && n * packed.shape[1] > 0)?;
    let of_word = 32 / bits;
    let words_of = |count: usize| if whole { count.div_ceil(of_word) } else { (count * bits).div_ceil(32) };
    let place = |i: usize| if whole { i / of_word * 32 + i % of_word * bits } else { i * bits };
    // Not more numbers than the file has bits.
    (k > 0 && k <= packed.shape[1] * 32 && words_of(k) == packed.shape[1]).then_some(())?;
    let scales = floats(parts["weight_scale"])?;
    let groups = match parts["weight_scale"].shape[..] {
        _ if scales.len() == 1 => 1,
        [rows] if rows == n => 1,
        [rows, groups] if rows == n && groups > 0 => groups,
        _ => return None,
    };
    let scale_of = |row: usize, group: usize| {
        let scale = scales[if scales.len() == 1 { 0 } else { row * groups + group }];
        Some(f16::from_f32(scale).to_f32()).filter(|scale| scale.is_finite())
    };
    let zeros = match parts.get("weight_zero_point").filter(|tensor| !tensor.bytes.is_empty()) {
        Some(tensor) => Some(words(tensor).filter(|_| tensor.shape == [words_of(n), groups])?),
        None => None,
    };
    let order: Option<Vec<usize>> = match parts.get("weight_g_idx").filter(|tensor| !tensor.bytes.is_empty()) {
        Some(tensor) if tensor.dtype == "I32" && tensor.shape == [k] => {
            let groups = tensor.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
            Some(groups.map(|group| group as usize).collect())
                .filter(|all: &Vec<usize>| all.iter().any(|g| *g != u32::MAX as usize))
        }
        Some(_) => return None,
        None => None,
    };
    let size = match says("group_size").and_then(Value::as_u64) {
        Some(size) if size > 0 && groups > 1 => size as usize,
        _ => k.div_ceil(groups),
    };
    match (&zeros, says("symmetric").and_then(Value::as_bool)) {
        (None, Some(false)) => return None,
        (Some(zeros), Some(true)) => {
            let mut all = (0..n * groups).map(|i| field(zeros, i % groups, groups, place(i / groups), bits));
            all.all(|zero| zero == Some(1 << (bits - 1))).then_some(())?;
        }
        _ => {}
    }
    let mut values = Vec::with_capacity(n * k);
    for row in 0..n {
        for column in 0..k {
            let group = order.as_ref().map_or(column / size, |order| order[column]);
            let zero = match &zeros {
                Some(zeros) if group < groups => field(zeros, group, groups, place(row), bits)?,
                _ => 1 << (bits - 1),
            };
            let code = field(&codes, row * packed.shape[1], 1, place(column), bits)?;
            (group < groups).then_some(())?;
            values.push(scale_of(row, group)? * (code as f32 - zero as f32));
        }
    }
    Some(values)
}

fn nvfp4(codes: &Tensor, scales: &Tensor, factor: &Tensor, divides: bool) -> Vec<Values> {
    let ([n, bytes], Some([factor])) = (
        match codes.shape[..] {
            [n, bytes] => [n, bytes],
            _ => return Vec::new(),
        },
        floats(factor).as_deref().and_then(|f| f.first_chunk::<1>().copied().filter(|_| f.len() == 1)),
    ) else {
        return Vec::new();
    };
    let factor = if divides { 1.0 / factor } else { factor };
    let is_nv =
        codes.dtype == "U8" && scales.dtype == "F8_E4M3" && bytes.is_multiple_of(8) && scales.shape == [n, bytes / 8];
    if !is_nv || n * bytes == 0 || !factor.is_finite() || scales.bytes.iter().any(|b| e4m3(*b).is_nan()) {
        return Vec::new();
    }
    let value = |i: usize| {
        let code = codes.bytes[i / 2] >> (4 * (i % 2)) & 15;
        E2M1[usize::from(code)] * e4m3(scales.bytes[i / 16]) * factor
    };
    vec![(0..n * bytes * 2).map(value).collect()]
}

fn e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { size } else { -size }
}

fn e5m2(byte: u8) -> f32 {
    f16::from_bits(u16::from(byte) << 8).to_f32()
}

/// INT8 and FP8.
fn eight_bit(stated: &Settings, weight: &Tensor, scale: Option<&Tensor>, zero: Option<&Tensor>) -> Vec<Values> {
    let [n, k] = weight.shape[..] else { return Vec::new() };
    let decode: fn(u8) -> f32 = match weight.dtype.as_str() {
        "F8_E4M3" => e4m3,
        "F8_E5M2" => e5m2,
        "I8" => |byte| f32::from(byte as i8),
        _ => return Vec::new(),
    };
    let is_integer = weight.dtype == "I8";
    if n * k == 0 || scale.is_none() && (is_integer || stated.promises_scales()) {
        return Vec::new();
    }
    let zeros: Vec<f32> = match zero {
        None => vec![0.0],
        Some(zero) if zero.bytes.iter().all(|b| *b == 0) => vec![0.0],
        Some(zero) if is_integer && zero.dtype == "I8" => zero.bytes.iter().map(|b| f32::from(*b as i8)).collect(),
        Some(_) => return Vec::new(),
    };
    let row_zeros = zero.is_none_or(|zero| zeros.len() == 1 || zero.shape == [n] || zero.shape == [n, 1]);
    let Some(scaling) =
        scale.map_or(Some(Scaling { values: vec![1.0], block: [n, k] }), |s| scaling(stated, s, n, k, is_integer))
    else {
        return Vec::new();
    };
    if !row_zeros || scaling.values.iter().any(|s| !s.is_finite()) {
        return Vec::new();
    }
    let value = |row: usize, column: usize| {
        let zero = if zeros.len() == 1 { zeros[0] } else { zeros[row] };
        let [rows, columns] = scaling.block;
        let scale = scaling.values[row / rows * k.div_ceil(columns) + column / columns];
        (decode(weight.bytes[row * k + column]) - zero) * scale
    };
    vec![(0..n).flat_map(|row| (0..k).map(move |column| (row, column))).map(|(r, c)| value(r, c)).collect()]
}

/// Block scales.
struct Scaling {
    values: Values,
    /// Rows and columns of a block.
    block: [usize; 2],
}

fn scaling(stated: &Settings, scale: &Tensor, n: usize, k: usize, is_integer: bool) -> Option<Scaling> {
    let values = if is_integer { floats(scale)? } else { scales(scale)? };
    let powers = matches!(stated.text("scale_fmt"), Stated::This(format) if format == "ue8m0");
    let is_power = |v: &f32| *v > 0.0 && (v.to_bits() & 0x7f_ffff == 0 || v.to_bits() == 1 << 22);
    if powers && !is_integer && !values.iter().all(is_power) {
        return None;
    }
    if values.len() == 1 {
        return Some(Scaling { values, block: [n, k] });
    }
    if scale.shape == [n] || scale.shape == [n, 1] {
        return Some(Scaling { values, block: [1, k] });
    }
    let stated: Option<Vec<usize>> = match stated.0.get("weight_block_size") {
        None | Some(Value::Null) => None,
        Some(value) => {
            let size = |value: &Value| {
                let number = value.as_str().map_or_else(|| value.as_f64(), |text| text.trim().parse().ok());
                number.filter(|v| v.fract() == 0.0).map(|v| v as usize)
            };
            Some(value.as_array()?.iter().map(size).collect::<Option<Vec<_>>>()?)
        }
    };
    let blocks = [[128, 128], [32, 32], [1, 32]];
    let mut fits = blocks.into_iter().filter(|block| {
        stated.as_ref().is_none_or(|stated| stated == block)
            && scale.shape == [n.div_ceil(block[0]), k.div_ceil(block[1])]
    });
    let block = fits.next().filter(|_| !is_integer)?;
    // Scales of 32 columns must be powers of two.
    (block[1] == 128 || values.iter().all(is_power)).then_some(Scaling { values, block })
}
