//! Module order. Modules with circular imports cannot be read,
//! tested or replaced one by one; in the folders below, a
//! module uses only earlier modules.

use std::path::Path;

use super::{Finding, Source};

/// Folders with their modules, lowest first. The folder's `lib.rs`
/// or `mod.rs` may use all of them.
const ORDERS: &[(&str, &[&str])] = &[
    (
        "crates/qgemm-cuda/src",
        &[
            "hash",
            "private",
            "replace",
            "driver",
            "arch",
            "binary",
            "source",
            "spec",
            "target",
            "artifact",
            "stream",
            "memory",
            "chip",
            "nvrtc",
            "tensor_map",
            "jit",
            "function",
            "cache",
            "bundle",
            "store",
            "gpu",
            "launch",
            "address_space",
            "graph",
            "probe",
            "families",
            "device",
            "build",
        ],
    ),
    (
        "crates/qgemm-cuda/src/families",
        &[
            "prelude",
            "launch_params",
            "kernel_launch",
            "convert",
            "unpack",
            "routing",
            "matmul",
            "quantize",
            "dequantize",
            "attention",
            "kv_append",
            "indexer",
            "norm",
            "optimizer",
            "gemm",
            "experts",
            "repack",
            "catalog",
        ],
    ),
    (
        "crates/qgemm-cuda/src/families/gemm",
        &[
            "types",
            "common",
            "shares",
            "instance",
            "spills",
            "gemv",
            "gemm_simt",
            "gemm_sliced_k",
            "sm70_two_stage",
            "sm80_cp_async",
            "sm80_s8_cp_async",
            "sm70_s8_two_stage",
            "sm90_w4a8_wgmma_ws",
            "sm90_s8_groups_wgmma_ws",
            "sm90_wgmma_ws",
            "sm90_bulk_stream",
            "sm90_bulk_sliced_k",
            "sm120_tma_ws",
            "instances",
            "x_prologue",
            "params",
            "fp8",
            "sm89_fp8_cp_async",
            "sm90_fp8_wgmma_ws",
            "sm90_s8_wgmma_ws",
            "fp8_kernels",
            "sm120_block_scaled",
            "projection",
            "sequence",
        ],
    ),
    (
        "crates/qgemm-model/src",
        &[
            "error",
            "philox",
            "sampler",
            "text_stream",
            "stop_strings",
            "page_pool",
            "settings",
            "architecture",
            "hyperparameters",
            "rotary",
            "decoder",
            "kv_cache",
            "forward",
            "tokenizer",
            "chat_template",
            "language_model",
            "session",
            "engine",
        ],
    ),
    ("crates/qgemm-model/src/tokenizer", &["pre_tokenizer", "gguf"]),
];

/// Checks every Rust file of those folders, except its tests.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let is_rust = |path: &Path| path.extension().is_some_and(|e| e == "rs");
    let is_tests = |path: &Path| path.to_string_lossy().ends_with("_tests.rs");
    sources.iter().filter(|s| is_rust(&s.path) && !is_tests(&s.path)).flat_map(file).collect()
}

fn file(source: &Source) -> Vec<Finding> {
    let path = source.path.to_string_lossy();
    let Some((root, inner)) = path.split_once("/src/") else { return Vec::new() };
    let mut own: Vec<&str> = inner.trim_end_matches(".rs").split('/').collect();
    if matches!(own.last(), Some(&("mod" | "lib" | "main"))) {
        own.pop();
    }
    let mut findings = Vec::new();
    for &(folder, order) in ORDERS {
        let Some(within) = folder.strip_prefix(root).and_then(|f| f.strip_prefix("/src")) else { continue };
        let depth = within.split('/').filter(|part| !part.is_empty()).count();
        if !Path::new(&*path).starts_with(folder) || own.len() <= depth {
            continue;
        }
        let module = own[depth];
        let Some(floor) = order.iter().position(|m| *m == module) else {
            findings.push(Finding::in_file(&source.path, format!("`{module}` has no place in {}", file!())));
            continue;
        };
        for (line, used) in imports(&source.text, &own) {
            if used.len() <= depth || used[..depth] != own[..depth] || used[depth] == module {
                continue;
            }
            if !order[..floor].contains(&used[depth]) {
                let what = format!("{module} may not use {}; it may use {:?}", used[depth], &order[..floor]);
                findings.push(Finding::at(&source.path, line, what));
            }
        }
    }
    findings
}

/// Every path from `crate` or `super` outside of tests, with its
/// line, relative to the crate's root.
fn imports<'t>(text: &'t str, own: &[&'t str]) -> Vec<(usize, Vec<&'t str>)> {
    let code = &text[..text.find("#[cfg(test)]").unwrap_or(text.len())];
    let mut found = Vec::new();
    for (at, start) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        let line_start = code[..at].rfind('\n').map_or(0, |n| n + 1);
        let before = &code[line_start..at];
        if before.contains("//") || before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let mut rest = &code[at + start.len()..];
        let mut base = own.to_vec();
        match start {
            "crate::" => base.clear(),
            _ => drop(base.pop()),
        }
        while let Some(after) = rest.strip_prefix("super::") {
            base.pop();
            rest = after;
        }
        let line = code[..at].lines().count().max(1);
        let mut paths = Vec::new();
        tree(rest, &base, &mut paths);
        found.extend(paths.into_iter().map(|path| (line, path)));
    }
    found
}

/// Adds the paths of the import tree (`a::{b, c::d}`) at the
/// start of `text` to `paths`, and returns the rest.
fn tree<'t>(text: &'t str, base: &[&'t str], paths: &mut Vec<Vec<&'t str>>) -> &'t str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = tree(rest, base, paths).trim_start();
            match rest.strip_prefix(',') {
                Some(after) if !after.trim_start().starts_with('}') => rest = after,
                _ => return rest.trim_start_matches([',', ' ', '\n']).strip_prefix('}').unwrap_or(""),
            }
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let mut path = base.to_vec();
    if end > 0 && &text[..end] != "self" {
        path.push(&text[..end]);
    }
    match text[end..].strip_prefix("::") {
        Some(rest) => tree(rest, &path, paths),
        None => {
            paths.push(path);
            text[end..].strip_prefix('*').unwrap_or(&text[end..])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        file(&Source { path: Path::new("crates/qgemm-cuda/src").join(path), text: text.into() }).len()
    }

    #[test]
    fn modules_use_those_below() {
        assert_eq!(findings("device.rs", "use crate::families::{self, Repack};\nuse crate::gpu::Gpu;\n"), 0);
        assert_eq!(findings("store.rs", "use crate::device::CudaDevice;\n"), 1);
        assert_eq!(findings("store.rs", "fn f(d: &crate::device::CudaDevice) {}\n"), 1);
        assert_eq!(findings("store.rs", "// As `crate::device` does.\n"), 0);
        assert_eq!(findings("store.rs", "#[cfg(test)]\nmod tests { use crate::device::CudaDevice; }\n"), 0);
        assert_eq!(findings("lib.rs", "use device::CudaDevice;\nuse crate::store::KernelStore;\n"), 0);
    }

    #[test]
    fn trees_of_imports_are_followed() {
        let imports = "use super::{\n    gemm::{Engine, instances},\n    kernel_launch,\n};\n";
        assert_eq!(findings("families/catalog.rs", imports), 0);
        assert_eq!(findings("families/kernel_launch.rs", "use super::{\n    convert,\n    prelude,\n};\n"), 1);
        assert_eq!(findings("families/gemm/types.rs", "use super::super::{catalog, prelude::planes};\n"), 1);
        assert_eq!(findings("families/gemm/types.rs", "use super::instance::Instance;\n"), 1);
        assert_eq!(findings("families/gemm/mod.rs", "use super::prelude;\nuse crate::arch;\n"), 0);
    }

    #[test]
    fn a_module_without_a_place_and_items_of_the_folder_itself_are_found() {
        assert_eq!(findings("new.rs", ""), 1);
        assert_eq!(findings("families/kernel_launch.rs", "use super::manifest;\n"), 1);
    }
}
