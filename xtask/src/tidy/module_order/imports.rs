//! Imports between the modules of a crate.

use std::collections::BTreeMap;
use std::path::Path;

use crate::tidy::finding::Source;

/// Modules of a crate, by their path below its root.
pub struct Crate<'s> {
    modules: BTreeMap<Vec<&'s str>, Module<'s>>,
}

/// An import of one module from another.
pub struct Import<'s> {
    pub file: &'s Path,
    pub line: usize,
    /// The importing module, and the module that defines the item.
    pub from: Vec<&'s str>,
    pub to: Vec<&'s str>,
}

struct Module<'s> {
    file: &'s Path,
    /// Text before the tests.
    code: &'s str,
    uses: Vec<Use<'s>>,
}

/// One path of a `use` declaration.
struct Use<'s> {
    offset: usize,
    path: Vec<&'s str>,
    /// The name that it gives the item; `*` for all items.
    name: &'s str,
    is_public: bool,
}

impl<'s> Crate<'s> {
    /// The modules in `sources`, files below `root`.
    pub fn new(root: &Path, sources: &[&'s Source]) -> Self {
        let module = |source: &&'s Source| {
            let inner = source.path.strip_prefix(root).ok()?.to_str()?;
            let mut own: Vec<&str> = inner.trim_end_matches(".rs").split('/').collect();
            own.pop_if(|last| matches!(*last, "mod" | "lib" | "main"));
            let code = before_tests(&source.text);
            Some((own, Module { file: &source.path, code, uses: uses(code) }))
        };
        Self { modules: sources.iter().filter_map(module).collect() }
    }

    /// Every import. Re-exports of a module's own submodules
    /// are none.
    pub fn imports(&self) -> Vec<Import<'s>> {
        let mut all = Vec::new();
        for (own, module) in &self.modules {
            let mut add = |offset: usize, path: &[&'s str], re_exports: bool| {
                let Some(absolute) = self.absolute(own, path) else { return };
                if re_exports && absolute.starts_with(own) {
                    return;
                }
                let Some(to) = self.resolve(&absolute, 0).filter(|to| to != own) else { return };
                let line = module.code[..offset].matches('\n').count() + 1;
                all.push(Import { file: module.file, line, from: own.clone(), to });
            };
            module.uses.iter().for_each(|used| add(used.offset, &used.path, used.is_public));
            paths(module.code).for_each(|(offset, path)| add(offset, &path, false));
        }
        all
    }

    /// `path` as written in module `own`, below the crate's root; `None`
    /// for other crates.
    fn absolute(&self, own: &[&'s str], path: &[&'s str]) -> Option<Vec<&'s str>> {
        let first = path.first()?;
        let (mut base, mut rest) = match *first {
            "crate" | "$crate" => (Vec::new(), &path[1..]),
            "self" => (own.to_vec(), &path[1..]),
            "super" => (own.to_vec(), path),
            name => {
                let child: Vec<_> = own.iter().copied().chain([name]).collect();
                return self.is_module(&child).then(|| own.iter().chain(path).copied().collect());
            }
        };
        while rest.first() == Some(&"super") {
            base.pop();
            rest = &rest[1..];
        }
        base.extend(rest);
        Some(base)
    }

    fn is_module(&self, path: &[&str]) -> bool {
        self.modules.range(path.to_vec()..).next().is_some_and(|(first, _)| first.starts_with(path))
    }

    /// The module that defines the item at `path`; `None`
    /// for an item of another crate.
    fn resolve(&self, path: &[&'s str], depth: usize) -> Option<Vec<&'s str>> {
        const MOST_RE_EXPORTS: usize = 16;
        let known = (0..=path.len()).rev().find(|&end| end == 0 || self.is_module(&path[..end]))?;
        let (own, rest) = path.split_at(known);
        let found = own.to_vec();
        let (Some(&name), Some(module)) = (rest.first(), self.modules.get(own)) else { return Some(found) };
        if depth > MOST_RE_EXPORTS || name == "*" {
            return Some(found);
        }
        if let Some(used) = module.uses.iter().find(|used| used.name == name) {
            return self.resolve(&self.absolute(own, &used.path)?, depth + 1);
        }
        let globs = module.uses.iter().filter(|used| used.name == "*" && !defines(module.code, name));
        let globs = globs.filter_map(|used| self.absolute(own, &used.path[..used.path.len() - 1]));
        let of_glob = globs.filter(|glob| self.modules.get(glob).is_some_and(|other| defines(other.code, name)));
        Some(of_glob.into_iter().next().unwrap_or(found))
    }
}

/// Whether `code` defines an item of that name.
fn defines(code: &str, name: &str) -> bool {
    const KEYWORDS: [&str; 9] = ["fn", "struct", "enum", "trait", "const", "static", "type", "union", "macro_rules!"];
    KEYWORDS.iter().any(|keyword| {
        let item = format!("{keyword} {name}");
        code.match_indices(&item).any(|(at, _)| !code[at + item.len()..].starts_with(is_word))
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The code before the test module.
fn before_tests(text: &str) -> &str {
    let attributes = text.match_indices("#[cfg(test)]").chain(text.match_indices("#[cfg(all(test"));
    let tests = attributes.filter(|(at, attribute)| {
        let after = text[at + attribute.len()..].lines().skip(1).map(str::trim);
        let item = after.into_iter().find(|line| !line.is_empty() && !line.starts_with("#["));
        item.is_some_and(|item| item.contains("mod ") && item.ends_with('{'))
    });
    &text[..tests.map(|(at, _)| at).min().unwrap_or(text.len())]
}

/// Whether the text at `at` is in a line comment.
fn is_comment(code: &str, at: usize) -> bool {
    code[code[..at].rfind('\n').map_or(0, |n| n + 1)..at].contains("//")
}

/// The `use` declarations, with offsets of their paths.
fn declarations(code: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    code.match_indices("use ").filter_map(|(at, keyword)| {
        let before = code[..at].rsplit(['\n', ';', '{', '}']).next().unwrap_or("").trim();
        let is_public = before.starts_with("pub");
        let start = at + keyword.len();
        let end = start + code[start..].find(';')?;
        (before.is_empty() || is_public).then(|| (start, &code[start..end], is_public))
    })
}

fn uses(code: &str) -> Vec<Use<'_>> {
    let mut all = Vec::new();
    for (offset, text, is_public) in declarations(code) {
        let mut paths = Vec::new();
        tree(text, &[], &mut paths);
        all.extend(paths.into_iter().map(|(path, name)| Use { offset, path, name, is_public }));
    }
    all
}

/// Adds the paths of the import tree (`a::{b, c::d as e}`) at the
/// start of `text` to `paths` with their names, and returns the rest.
fn tree<'t>(text: &'t str, base: &[&'t str], paths: &mut Vec<(Vec<&'t str>, &'t str)>) -> &'t str {
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
    let end = text.find(|c: char| !is_word(c)).unwrap_or(text.len());
    let mut path = base.to_vec();
    match &text[..end] {
        "" => path.extend(text.starts_with('*').then_some("*")),
        "self" if !base.is_empty() => {}
        name => path.push(name),
    }
    let rest = &text[end..];
    if let Some(rest) = rest.strip_prefix("::") {
        return tree(rest, &path, paths);
    }
    let rest = rest.strip_prefix('*').unwrap_or(rest);
    let alias = rest.trim_start().strip_prefix("as ").map(|alias| {
        let end = alias.find(|c: char| !is_word(c)).unwrap_or(alias.len());
        alias.split_at(end)
    });
    let (name, rest) = alias.unwrap_or((path.last().copied().unwrap_or("*"), rest));
    paths.push((path, name));
    rest
}

/// Paths of two names and more outside of `use` declarations and comments.
fn paths(code: &str) -> impl Iterator<Item = (usize, Vec<&str>)> {
    let in_use: Vec<_> = declarations(code).map(|(start, text, _)| start..start + text.len()).collect();
    let starts = code.match_indices("::").filter_map(move |(at, _)| {
        let start = code[..at]
            .rfind(|c: char| !is_word(c))
            .map_or(0, |n| n + code[n..].chars().next().map_or(1, char::len_utf8));
        let start = if code[..start].ends_with('$') { start - 1 } else { start };
        // `pub(in path)` imports nothing.
        let is_first = start < at && !code[..start].ends_with("::") && !code[..start].ends_with("pub(in ");
        (is_first && !in_use.iter().any(|used| used.contains(&start)) && !is_comment(code, start)).then_some(start)
    });
    starts.map(|start| {
        let end = code[start..].find(|c: char| !is_word(c) && c != ':' && c != '$').map_or(code.len(), |n| start + n);
        (start, code[start..end].split("::").filter(|name| !name.is_empty()).collect())
    })
}
