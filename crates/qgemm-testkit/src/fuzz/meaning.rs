//! Meaning of a one-layer checkpoint, from the definitions of its
//! formats and independent of the library's readers.
//!
//! A checkpoint has several meanings if settings are ambiguous
//! (absent keys).
//! It has none if settings contradict the tensors or violate the
//! definitions. A reader must then refuse it, or find a safe
//! reading with the values before the mutation.

use std::collections::BTreeMap;

use half::{bf16, f16};
use serde_json::{Map, Value};

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub(super) type Tensors = BTreeMap<String, Tensor>;

/// Values `[N][K]`, row after row.
pub(super) type Values = Vec<f32>;

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

/// JSON as Python reads and writes it: with NaN and infinities,
/// and a byte-order mark.
fn python_json(text: &str) -> Option<Value> {
    let mut plain = String::new();
    let (mut in_string, mut escaped) = (false, false);
    let mut rest = text.strip_prefix('\u{feff}').unwrap_or(text);
    while let Some(next) = rest.chars().next() {
        if !in_string && let Some(token) = ["-Infinity", "Infinity", "NaN"].iter().find(|t| rest.starts_with(**t)) {
            plain.push_str("null");
            rest = &rest[token.len()..];
            continue;
        }
        if !escaped && next == '"' {
            in_string = !in_string;
        }
        escaped = in_string && !escaped && next == '\\';
        plain.push(next);
        rest = &rest[next.len_utf8()..];
    }
    serde_json::from_str(&plain).ok()
}

/// The quantization settings within a file of settings.
fn quantization(file: &Map<String, Value>) -> Map<String, Value> {
    let places = [
        Some(file),
        file.get("text_config").and_then(Value::as_object),
        file.get("llm_config").and_then(Value::as_object),
    ];
    for place in places.into_iter().flatten() {
        for key in ["quantization_config", "compression_config"] {
            if let Some(Value::Object(found)) = place.get(key) {
                return found.clone();
            }
        }
    }
    let is_config = ["architectures", "model_type"].iter().any(|key| file.contains_key(*key));
    if is_config { Map::new() } else { file.clone() }
}

struct Settings(Map<String, Value>);

/// Value of a key.
enum Stated<T> {
    Nothing,
    This(T),
    Nonsense,
}

impl Settings {
    fn text(&self, key: &str) -> Stated<String> {
        match self.0.get(key) {
            None | Some(Value::Null) => Stated::Nothing,
            Some(Value::String(text)) => Stated::This(text.trim().to_ascii_lowercase()),
            _ => Stated::Nonsense,
        }
    }

    /// An integer, stored as number or string.
    fn integer(&self, keys: [&str; 2]) -> Stated<i64> {
        let found = keys.iter().find_map(|key| self.0.get(*key).filter(|value| !value.is_null()));
        let number = match found {
            None => return Stated::Nothing,
            Some(Value::String(text)) => text.trim().parse::<f64>().ok(),
            Some(value) => value.as_f64(),
        };
        number.filter(|n| n.fract() == 0.0 && n.abs() < 1e15).map_or(Stated::Nonsense, |n| Stated::This(n as i64))
    }

    /// A truth value, stored as such or as text; `None` for anything else.
    fn flag(&self, key: &str) -> Option<Option<bool>> {
        match self.0.get(key) {
            None | Some(Value::Null) => Some(None),
            Some(Value::Bool(value)) => Some(Some(*value)),
            Some(Value::String(text)) => text.trim().to_ascii_lowercase().parse().ok().map(Some),
            Some(_) => None,
        }
    }

    /// Whether settings declare scales for 8-bit weights.
    fn promises_scales(&self) -> bool {
        let by_method =
            matches!(self.text("quant_method"), Stated::This(m) if m.starts_with("compressed") || m == "modelopt");
        by_method
            || ["weight_block_size", "config_groups"].iter().any(|key| self.0.get(*key).is_some_and(|v| !v.is_null()))
    }
}

/// Values of float tensors; `None` for other types.
fn floats(tensor: &Tensor) -> Option<Values> {
    let pairs = |convert: fn([u8; 2]) -> f32| tensor.bytes.as_chunks::<2>().0.iter().map(|b| convert(*b)).collect();
    Some(match tensor.dtype.as_str() {
        "F32" => tensor.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        "F16" => pairs(|b| f16::from_le_bytes(b).to_f32()),
        "BF16" => pairs(|b| bf16::from_le_bytes(b).to_f32()),
        _ => return None,
    })
}

/// Float scales, or power-of-two scales in bytes.
fn scales(tensor: &Tensor) -> Option<Values> {
    match tensor.dtype.as_str() {
        "F8_E8M0" | "U8" => Some(tensor.bytes.iter().map(|b| (f64::from(*b) - 127.0).exp2() as f32).collect()),
        _ => floats(tensor),
    }
}

fn words(tensor: &Tensor) -> Option<Vec<u32>> {
    let is_words = tensor.dtype == "I32" && tensor.shape.len() == 2;
    is_words.then(|| tensor.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
}

/// Bit field of `bits` bits at bit `at`, in every `stride`-th
/// word from `first`.
fn field(words: &[u32], first: usize, stride: usize, at: usize, bits: usize) -> Option<u32> {
    (0..bits).try_fold(0, |number, bit| {
        let word = words.get(first + (at + bit) / 32 * stride)?;
        Some(number | (word >> ((at + bit) % 32) & 1) << bit)
    })
}

/// GPTQ, AWQ and AutoRound.
fn grouped(stated: &Settings, parts: &BTreeMap<&str, &Tensor>) -> Vec<Values> {
    let as_gptq = |zeros: &[bool]| -> Vec<Values> {
        zeros.iter().filter_map(|less| gptq(stated, parts, *less)).flatten().collect()
    };
    let as_awq = || awq(stated, parts).unwrap_or_default();
    let by_label = |key: &str| match stated.text(key) {
        Stated::Nothing => vec![true],
        Stated::This(format) => match format.as_str() {
            "" | "gptq" => vec![true],
            "gptq_v2" => vec![false],
            _ => Vec::new(),
        },
        Stated::Nonsense => Vec::new(),
    };
    match stated.text("quant_method") {
        Stated::This(method) => match method.as_str() {
            "gptq" => as_gptq(&by_label("checkpoint_format")),
            "awq" => as_awq(),
            "auto-round" | "auto_round" | "autoround" | "intel/auto-round" => match stated.text("packing_format") {
                Stated::This(format) => match format.replace(['-', '_'], "").as_str() {
                    "autoround" | "autoround:gptqmodel" => as_gptq(&[false]),
                    "autoround:autogptq" | "autogptq" | "gptq" => as_gptq(&[true]),
                    "autoround:autoawq" => as_awq(),
                    _ => Vec::new(),
                },
                // Writers always state it. The default is `z` today, and was `z
                // − 1` in older versions.
                Stated::Nothing => as_gptq(&[false, true]),
                Stated::Nonsense => Vec::new(),
            },
            _ => Vec::new(),
        },
        Stated::Nothing => [as_gptq(&by_label("checkpoint_format")), as_awq()].concat(),
        Stated::Nonsense => Vec::new(),
    }
}

/// Widths that the settings allow.
fn widths(stated: &Settings) -> Vec<usize> {
    let all = [2, 3, 4, 8];
    let varies = stated.0.get("dynamic").or_else(|| stated.0.get("extra_config")).is_some_and(|v| !v.is_null());
    match stated.integer(["bits", "w_bit"]) {
        Stated::This(bits) if !varies => all.into_iter().filter(|b| *b as i64 == bits).collect(),
        Stated::Nonsense => Vec::new(),
        _ => all.to_vec(),
    }
}

/// The group of every column.
fn consecutive(stated: &Settings, k: usize, groups: usize) -> Option<Vec<usize>> {
    let varies = stated.0.get("dynamic").or_else(|| stated.0.get("extra_config")).is_some_and(|v| !v.is_null());
    let size = match stated.integer(["group_size", "q_group_size"]) {
        Stated::This(-1) => k,
        Stated::This(size) if size > 0 && !varies => size as usize,
        Stated::Nothing | Stated::This(_) if varies => k.div_ceil(groups.max(1)),
        Stated::Nothing if groups > 0 && k.is_multiple_of(groups) => k / groups,
        _ => return None,
    };
    (size > 0 && k.div_ceil(size) == groups).then(|| (0..k).map(|column| column / size).collect())
}

fn gptq(stated: &Settings, parts: &BTreeMap<&str, &Tensor>, less_one: bool) -> Option<Vec<Values>> {
    let codes = words(parts["qweight"])?;
    let [lines, n] = parts["qweight"].shape[..] else { return None };
    let [groups, _] = parts["scales"].shape[..] else { return None };
    let symmetric = stated.flag("sym")?;
    let scale = group_scales(parts["scales"], groups, n)?;
    let order = match parts.get("g_idx") {
        Some(tensor) if !tensor.bytes.is_empty() => {
            (tensor.dtype == "I32" && tensor.shape.len() == 1).then_some(())?;
            let groups = tensor.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b) as usize);
            Some(groups.collect::<Vec<_>>())
        }
        _ => None,
    };
    let of_width = |bits: usize| -> Option<Values> {
        let k = order.as_ref().map_or(lines * 32 / bits, Vec::len);
        let fits = (k * bits).div_ceil(32) == lines && n * groups > 0;
        let zeros = gptq_zeros(parts, [groups, n], bits, less_one, symmetric)?;
        let group_of = match &order {
            Some(order) => order.clone(),
            None => consecutive(stated, k, groups)?,
        };
        if !fits || k == 0 || group_of.iter().any(|group| *group >= groups) {
            return None;
        }
        let mut values = Vec::with_capacity(n * k);
        for row in 0..n {
            for (column, group) in group_of.iter().enumerate() {
                let code = field(&codes, row, n, column * bits, bits)?;
                values.push(scale[group * n + row] * (code as f32 - zeros[group * n + row] as f32));
            }
        }
        Some(values)
    };
    Some(widths(stated).into_iter().filter_map(of_width).collect())
}

/// Zero points `[groups, N]` of a GPTQ layer. Stored zeros that are all those of a symmetric layer show whether they are
/// less one, unless the settings deny the symmetry. A layer stated to be symmetric needs none.
fn gptq_zeros(
    parts: &BTreeMap<&str, &Tensor>,
    [groups, n]: [usize; 2],
    bits: usize,
    less_one: bool,
    symmetric: Option<bool>,
) -> Option<Vec<u32>> {
    let middle = 1 << (bits - 1);
    let Some(tensor) = parts.get("qzeros").filter(|tensor| !tensor.bytes.is_empty()) else {
        return (symmetric == Some(true)).then(|| vec![middle; groups * n]);
    };
    let zero_words = (n * bits).div_ceil(32);
    let zeros = words(tensor).filter(|_| tensor.shape == [groups, zero_words])?;
    let stored = |group: usize, row: usize| field(&zeros, group * zero_words, 1, row * bits, bits);
    let stored: Vec<u32> =
        (0..groups).flat_map(|g| (0..n).map(move |r| (g, r))).map(|(g, r)| stored(g, r)).collect::<Option<_>>()?;
    let all_are = |zero: u32| stored.iter().all(|stored| *stored == zero);
    let less_one = match symmetric {
        Some(false) => less_one,
        _ if all_are(middle) => false,
        _ if all_are(middle - 1) => true,
        _ => less_one,
    };
    Some(stored.into_iter().map(|zero| (zero + u32::from(less_one)) % (1 << bits)).collect())
}

fn awq(stated: &Settings, parts: &BTreeMap<&str, &Tensor>) -> Option<Vec<Values>> {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    // A number is the version of the settings.
    let is_gemm = match stated.text("version") {
        Stated::Nothing => true,
        Stated::This(version) => version == "gemm" || version.parse::<f64>().is_ok(),
        Stated::Nonsense => stated.0["version"].is_number(),
    };
    let [k, words_of_line] = parts["qweight"].shape[..] else { return None };
    let [groups, _] = parts["scales"].shape[..] else { return None };
    let codes = words(parts["qweight"])?;
    let n = words_of_line * 8;
    let qzeros = parts.get("qzeros").filter(|tensor| !tensor.bytes.is_empty());
    let zeros = qzeros.map(|tensor| words(tensor).filter(|_| tensor.shape == [groups, words_of_line]));
    let zeros = match (zeros, stated.flag("zero_point")?.map(|zero_point| !zero_point).or(stated.flag("sym")?)) {
        (Some(zeros), _) => Some(zeros?),
        (None, Some(true)) => None,
        (None, _) => return None,
    };
    let scale = group_scales(parts["scales"], groups, n)?;
    let is_ordered = parts.get("g_idx").is_some_and(|tensor| !tensor.bytes.is_empty());
    if !is_gemm || is_ordered || !widths(stated).contains(&4) {
        return None;
    }
    let group_of = consecutive(stated, k, groups)?;
    let nibble = |words: &[u32], line: usize, row: usize| {
        let place = ORDER.iter().position(|j| *j == row % 8).unwrap_or(0);
        (words[line * words_of_line + row / 8] >> (4 * place) & 15) as f32
    };
    let value = |row: usize, column: usize| {
        let group = group_of[column];
        let zero = zeros.as_ref().map_or(8.0, |zeros| nibble(zeros, group, row));
        scale[group * n + row] * (nibble(&codes, column, row) - zero)
    };
    Some(vec![(0..n).flat_map(|row| (0..k).map(move |column| (row, column))).map(|(r, c)| value(r, c)).collect()])
}

/// Scales `[groups, N]`, rounded to f16 like those of integer
/// groups.
fn group_scales(tensor: &Tensor, groups: usize, n: usize) -> Option<Values> {
    let scales: Values = floats(tensor)?.into_iter().map(|v| f16::from_f32(v).to_f32()).collect();
    (tensor.shape == [groups, n] && scales.iter().all(|s| s.is_finite())).then_some(scales)
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
