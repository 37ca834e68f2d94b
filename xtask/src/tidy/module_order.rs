//! Module order. Modules with circular imports cannot be read,
//! tested or replaced one by one. In every folder, the imports
//! between its modules must not form a cycle.
//!
//! The order is computed, not listed: the modules of a folder are
//! nodes, and so is the own file of the folder. Re-exports lead to
//! the module that defines the item.

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::finding::{Finding, Source};
use imports::Crate;

/// Imports that close a cycle and must still be removed: folder,
/// importing module, imported module. [`ANY`] stands for every
/// module. An entry that closes no cycle is a finding.
const CLOSING: &[(&str, &str, &str)] = &[
    ("crates/qgemm-api/src", ANY, "context"),
    ("crates/qgemm-api/src", "plan_cache", "gemm"),
    ("crates/qgemm-api/src", "plan_cache", "planned"),
    ("crates/qgemm-api/src", "weight", "experts"),
    ("crates/qgemm-api/src/exec_plan", "build", "backward"),
    ("crates/qgemm-api/src/exec_plan", "build", "product"),
    ("crates/qgemm-api/src/exec_plan", "operands", "file"),
    ("crates/qgemm-api/src/exec_plan", "product", "backward"),
    ("crates/qgemm-cli/src", "choice", "operations"),
    ("crates/qgemm-cli/src", "operations", "bench"),
    ("crates/qgemm-cli/src", "operations", "explain"),
    ("crates/qgemm-cli/src", "operations", "verify"),
    ("crates/qgemm-cli/src", "stress", "verify"),
    ("crates/qgemm-cli/src/bench", ANY, OWN),
    ("crates/qgemm-cli/src/support", "x_formats", OWN),
    ("crates/qgemm-cpu/src/families/gemm", ANY, OWN),
    ("crates/qgemm-cuda/src/families", "catalog", OWN),
    ("crates/qgemm-cuda/src/families/attention", ANY, OWN),
    ("crates/qgemm-cuda/src/families/attention", "tile_lists", "wgmma"),
    ("crates/qgemm-cuda/src/families/indexer", ANY, OWN),
    ("crates/qgemm-cuda/src/families/indexer", "gather", "wgmma"),
    ("crates/qgemm-cuda/src/families/matmul", ANY, OWN),
    ("crates/qgemm-cuda/src/families/norm", "gated", OWN),
    ("crates/qgemm-cuda/src/families/norm", "quantized", OWN),
    ("crates/qgemm-emu/src", "families", "device"),
    ("crates/qgemm-emu/src/machine", ANY, "block"),
    ("crates/qgemm-emu/src/machine", "delivery", "tensor_copy"),
    ("crates/qgemm-formats/src", ANY, "desc"),
    ("crates/qgemm-formats/src", "error", ANY),
    ("crates/qgemm-formats/src", "weight", "gated"),
    ("crates/qgemm-formats/src", "weight", "prepack"),
    ("crates/qgemm-formats/src", "x_format", "activation"),
    ("crates/qgemm-formats/src/model", "grouped", "awq"),
    ("crates/qgemm-formats/src/model", "grouped", "gptq"),
    ("crates/qgemm-hal/src", "device", "family"),
    ("crates/qgemm-hal/src", "error", ANY),
    ("crates/qgemm-hal/src", "kernel_id", "op"),
    ("crates/qgemm-hal/src", "kernel_id", OWN),
    ("crates/qgemm-hal/src", "op", "sequence"),
    ("crates/qgemm-hal/src", "operations", "op"),
    ("crates/qgemm-hal/src", "operands", "op"),
    ("crates/qgemm-hal/src", "sequence", "profile"),
    ("crates/qgemm-hal/src/op", "dequantize", "gemm"),
    ("crates/qgemm-hal/src/op", "norm", "gemm"),
    ("crates/qgemm-hal/src/op/gemm", "workspace", "plan"),
    ("crates/qgemm-testkit/src", ANY, "suite"),
    ("crates/qgemm-testkit/src", "weights", "gemm"),
    ("crates/qgemm-testkit/src/attention", "mask", "case"),
    ("crates/qgemm-wgpu/src", "adapter", "device"),
    ("crates/qgemm-wgpu/src", "adapter", "shared"),
    ("crates/qgemm-wgpu/src", "bind_groups", "shared"),
    ("crates/qgemm-wgpu/src", "families", "device"),
    ("crates/qgemm-wgpu/src", "pipeline", "families"),
    ("crates/qgemm-wgpu/src", "pipeline", "shared"),
    ("crates/qgemm-wgpu/src", "shader", "families"),
    ("crates/qgemm-wgpu/src", "shared", "families"),
    ("crates/qgemm-wgpu/src/families/gemm", ANY, OWN),
];

/// Any module of a folder.
const ANY: &str = "*";
/// The folder's own file: `lib.rs`, `main.rs`, `mod.rs` or the
/// file beside the folder.
const OWN: &str = ".";

/// Checks the modules of every crate, except tests.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    check_except(sources, CLOSING)
}

fn check_except(sources: &[Source], closing: &[(&str, &str, &str)]) -> Vec<Finding> {
    let mut unused: BTreeSet<_> = closing.iter().collect();
    let mut findings = Vec::new();
    for (root, sources) in crates(sources) {
        for (folder, mut graph) in graphs(&root, &sources) {
            let of_folder = || closing.iter().filter(|(of, ..)| folder == Path::new(of));
            for entry in of_folder().filter(|(_, from, to)| graph.closes_cycle(from, to)) {
                unused.remove(entry);
            }
            of_folder().for_each(|(_, from, to)| graph.remove(from, to));
            findings.extend(graph.cycle().map(|what| Finding::in_file(&folder, what)));
        }
    }
    let stale = |(folder, from, to): &(&str, &str, &str)| {
        Finding::in_file(folder, format!("{from} -> {to} closes no cycle; remove it from {}", file!()))
    };
    findings.extend(unused.into_iter().map(stale));
    findings
}

/// The Rust files of each crate, by the crate's `src` folder.
fn crates(sources: &[Source]) -> BTreeMap<PathBuf, Vec<&Source>> {
    let mut crates = BTreeMap::<PathBuf, Vec<&Source>>::new();
    for source in sources.iter().filter(|source| source.path.extension().is_some_and(|e| e == "rs")) {
        let is_tests = source.path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"));
        let Some(root) = source.path.ancestors().find(|path| path.ends_with("src")).filter(|_| !is_tests) else {
            continue;
        };
        crates.entry(root.to_owned()).or_default().push(source);
    }
    crates
}

/// Imports between the modules of one folder, each with
/// the file and line of an example.
#[derive(Debug, Default)]
struct Graph<'s> {
    edges: BTreeMap<(&'s str, &'s str), (PathBuf, usize)>,
}

/// The graph of each folder of a crate.
fn graphs<'s>(root: &Path, sources: &[&'s Source]) -> BTreeMap<PathBuf, Graph<'s>> {
    let all = Crate::new(root, sources);
    let mut graphs = BTreeMap::<PathBuf, Graph<'s>>::new();
    for import in all.imports() {
        let shared = import.from.iter().zip(&import.to).take_while(|(a, b)| a == b).count();
        let node = |path: &[&'s str]| path.get(shared).copied().unwrap_or(OWN);
        let folder = import.from[..shared].iter().fold(root.to_owned(), |folder, module| folder.join(module));
        let edge = (node(&import.from), node(&import.to));
        graphs.entry(folder).or_default().edges.entry(edge).or_insert((import.file.to_owned(), import.line));
    }
    graphs
}

/// Whether `name`, perhaps [`ANY`], names the module.
fn is_named(module: &str, name: &str) -> bool {
    module == name || name == ANY
}

impl<'s> Graph<'s> {
    fn remove(&mut self, from: &str, to: &str) {
        self.edges.retain(|(a, b), _| !(is_named(a, from) && is_named(b, to)));
    }

    /// Whether an import from `from` to `to` is part of a cycle.
    fn closes_cycle(&self, from: &str, to: &str) -> bool {
        let matching = self.edges.keys().filter(|(a, b)| is_named(a, from) && is_named(b, to));
        matching.into_iter().any(|(a, b)| self.path(b, a).is_some())
    }

    /// The shortest cycle, as text with the place of each import.
    fn cycle(&self) -> Option<String> {
        let cycles = self.edges.keys().filter_map(|&(a, b)| {
            let path = self.path(b, a)?;
            Some([a].into_iter().chain(path).collect::<Vec<_>>())
        });
        let cycle = cycles.min_by_key(Vec::len)?;
        let edges = cycle.windows(2).map(|edge| {
            let (file, line) = &self.edges[&(edge[0], edge[1])];
            format!("{} -> {} ({}:{line})", edge[0], edge[1], file.display())
        });
        Some(format!("modules import each other: {}", edges.collect::<Vec<_>>().join(", ")))
    }

    /// The shortest path from `start` to `end`, both included.
    fn path(&self, start: &'s str, end: &str) -> Option<Vec<&'s str>> {
        let (mut paths, mut visited) = (vec![vec![start]], BTreeSet::from([start]));
        let mut next = 0;
        while let Some(path) = paths.get(next).cloned() {
            let &last = path.last()?;
            if last == end {
                return Some(path);
            }
            for &(_, to) in self.edges.keys().filter(|(from, _)| *from == last) {
                if visited.insert(to) {
                    paths.push(path.iter().copied().chain([to]).collect());
                }
            }
            next += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(files: &[(&str, &str)], closing: &[(&str, &str, &str)]) -> Vec<String> {
        let source =
            |&(path, text): &(&str, &str)| Source { path: Path::new("crates/a/src").join(path), text: text.into() };
        let sources: Vec<_> = files.iter().map(source).collect();
        check_except(&sources, closing).iter().map(|finding| finding.to_string()).collect()
    }

    #[test]
    fn modules_that_import_each_other_are_found() {
        let one_way = [("a.rs", "use crate::b::B;\n"), ("b.rs", "pub struct B;\n"), ("lib.rs", "mod a;\nmod b;\n")];
        assert_eq!(findings(&one_way, &[]), Vec::<String>::new());
        let circle = [("a.rs", "use crate::b::B;\n"), ("b.rs", "fn f(a: &super::a::A) {}\n"), ("lib.rs", "")];
        let found = findings(&circle, &[]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("a -> b (crates/a/src/a.rs:1), b -> a (crates/a/src/b.rs:1)"), "{found:?}");
    }

    #[test]
    fn comments_and_tests_import_nothing() {
        let b = "// As `crate::a` does.\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n";
        assert_eq!(findings(&[("a.rs", "use crate::b::B;\n"), ("b.rs", b), ("lib.rs", "")], &[]).len(), 0);
        assert_eq!(findings(&[("a.rs", "use crate::b::B;\n"), ("b/tests.rs", "use crate::a::A;\n")], &[]).len(), 0);
    }

    #[test]
    fn trees_of_imports_are_followed() {
        let a = "use crate::{\n    b::{self, c::C},\n    d,\n};\n";
        let d = [("a.rs", a), ("b/mod.rs", "mod c;\n"), ("b/c.rs", ""), ("d.rs", "use super::a::A;\n"), ("lib.rs", "")];
        assert_eq!(findings(&d, &[]).len(), 1);
        let c = [("a.rs", a), ("b/mod.rs", "mod c;\n"), ("b/c.rs", "use crate::a;\n"), ("d.rs", ""), ("lib.rs", "")];
        assert_eq!(findings(&c, &[]).len(), 1);
    }

    #[test]
    fn re_exports_lead_to_the_module_that_defines_the_item() {
        let of = |b| [("a.rs", "use crate::B;\n"), ("b.rs", b), ("lib.rs", "pub use b::{A, B};\nmod a;\nmod b;\n")];
        assert_eq!(findings(&of("pub struct B;\n"), &[]).len(), 0);
        assert_eq!(findings(&of("use crate::a::A;\n"), &[]).len(), 1);
        let external = [("a.rs", "use crate::B;\n"), ("lib.rs", "pub use other::B;\nuse a::A;\n")];
        assert_eq!(findings(&external, &[]).len(), 0);
    }

    #[test]
    fn a_folders_own_file_is_one_of_its_modules() {
        let own = [("a.rs", "use super::B;\n"), ("lib.rs", "mod a;\npub struct B(a::A);\n")];
        assert_eq!(findings(&own, &[]).len(), 1);
        let beside = [("b/a.rs", "use super::B;\n"), ("b.rs", "mod a;\npub struct B;\nfn f() { a::g() }\n")];
        assert_eq!(findings(&beside, &[]).len(), 1);
        let only_re_exported = [("a.rs", "use super::B;\n"), ("lib.rs", "mod a;\npub use a::A;\npub struct B;\n")];
        assert_eq!(findings(&only_re_exported, &[]).len(), 0);
    }

    #[test]
    fn a_listed_import_closes_a_cycle() {
        let circle = [("a.rs", "use crate::b::B;\n"), ("b.rs", "use crate::a::A;\n"), ("lib.rs", "")];
        assert_eq!(findings(&circle, &[("crates/a/src", "b", "a")]).len(), 0);
        assert_eq!(findings(&circle, &[("crates/a/src", ANY, "a")]).len(), 0);
        let open = [("a.rs", "use crate::b::B;\n"), ("b.rs", ""), ("lib.rs", "")];
        assert_eq!(findings(&open, &[("crates/a/src", "b", "a")]).len(), 1);
    }
}
