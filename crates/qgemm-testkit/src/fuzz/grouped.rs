//! Meaning of layers in groups of integers: GPTQ, AWQ and AutoRound.

use std::collections::BTreeMap;

use half::f16;

use super::layer::{Settings, Stated, Tensor, Values, field, floats, words};

/// GPTQ, AWQ and AutoRound.
pub(super) fn grouped(stated: &Settings, parts: &BTreeMap<&str, &Tensor>) -> Vec<Values> {
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

/// Zero points `[groups, N]` of a GPTQ layer.
///
/// A file stores zero points, or zero points minus one. If all
/// stored numbers are those of a symmetric layer, they show which,
/// unless the settings deny the symmetry. A layer that the settings
/// call symmetric needs no zero points.
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
