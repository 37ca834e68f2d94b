//! Statements of the settings about single layers: unquantized modules,
//! and modules with scales.

use regex::bytes::Regex;

use super::json::Json;
use super::overrides::layer_regex;
use super::settings::Settings;

/// Settings that list unquantized modules, by method.
const UNQUANTIZED: [&str; 6] =
    ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "exclude", "llm_int8_skip_modules"];

/// Settings of a checkpoint, queried per layer.
pub(super) struct Stated<'a> {
    settings: &'a Settings,
    unquantized: Vec<Pattern>,
    promises: Vec<Promise>,
    groups: Vec<Group<'a>>,
}

/// Group of compressed-tensors settings.
pub(super) struct Group<'a> {
    /// Name, for errors.
    pub name: String,
    /// Modules of the group.
    targets: Vec<Pattern>,
    /// Arguments of weights.
    pub weights: &'a Json,
}

impl Group<'_> {
    /// Whether weights are FP8.
    fn is_float8(&self) -> bool {
        let is_float = self.weights.get("type").word().as_deref() == Some("float");
        is_float && self.weights.get("num_bits").integer() == Some(8)
    }
}

/// Statement that the FP8 weights of some modules have scales.
struct Promise {
    /// Source of the statement, for errors.
    by: String,
    /// Modules. Empty means all.
    modules: Vec<Pattern>,
}

impl<'a> Stated<'a> {
    /// Scans the settings.
    pub fn of(settings: &'a Settings) -> Self {
        let lists = settings.sources().flat_map(|source| UNQUANTIZED.iter().map(|list| source.get(list)));
        Self {
            settings,
            unquantized: lists.flat_map(patterns).collect(),
            promises: settings.sources().flat_map(promises).collect(),
            groups: settings.sources().flat_map(groups).collect(),
        }
    }

    /// Statement that FP8 weights of `module` have scales.
    pub fn promises_scales(&self, module: &str) -> Option<&str> {
        let mut floats = self.groups.iter().filter(|group| group.is_float8());
        let by_group = floats.find(|group| is_one_of(&group.targets, module)).map(|group| group.name.as_str());
        let by_promise = || self.promises.iter().find(|p| is_one_of(&p.modules, module)).map(|p| p.by.as_str());
        let by = by_group.or_else(by_promise)?;
        (!self.is_unquantized(module)).then_some(by)
    }

    /// Whether the settings exempt `module` from quantization.
    pub fn is_unquantized(&self, module: &str) -> bool {
        self.unquantized.iter().any(|pattern| pattern.matches(module))
    }

    /// Method, in lower case.
    pub fn method(&self) -> Option<String> {
        self.first("quant_method").word()
    }

    /// ModelOpt's algorithm name, of `module` if stated, else global.
    pub fn algorithm(&self, module: &str) -> Option<&'a str> {
        let own = self.first("quantized_layers").get(module).get("quant_algo").text();
        own.or_else(|| self.text("quant_algo"))
    }

    /// String setting `name`.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.first(name).text()
    }

    /// Whether any source has the setting `name`.
    pub fn has(&self, name: &str) -> bool {
        !self.first(name).is_null()
    }

    /// Setting `name`, of `module` if stated, else global, as MLX writes them.
    pub fn of_module(&self, module: &str, name: &str) -> &'a Json {
        let own = self.first(module).get(name);
        if own.is_null() { self.first(name) } else { own }
    }

    /// Setting `name` of the first source that has it.
    fn first(&self, name: &str) -> &'a Json {
        self.settings.sources().map(|source| source.get(name)).find(|value| !value.is_null()).unwrap_or(&Json::Null)
    }

    /// The compressed-tensors group of `module`.
    pub fn group_of(&self, module: &str) -> Option<&Group<'a>> {
        let of_module = self.groups.iter().find(|group| is_one_of(&group.targets, module));
        of_module.or(self.groups.first().filter(|_| self.groups.len() == 1))
    }
}

/// Whether `module` is in a list. An empty list means all modules.
fn is_one_of(list: &[Pattern], module: &str) -> bool {
    list.is_empty() || list.iter().any(|pattern| pattern.matches(module))
}

fn groups(source: &Json) -> Vec<Group<'_>> {
    fn of((name, group): &(String, Json)) -> Group<'_> {
        Group {
            name: format!("`{name}` of `config_groups`"),
            targets: patterns(group.get("targets")).collect(),
            weights: group.get("weights"),
        }
    }
    source.get("config_groups").entries().iter().map(of).collect()
}

/// Targets of all groups, if each group has some and all are names of
/// modules or `re:` patterns. Classes such as `Linear` may be any module.
fn named_targets(source: &Json) -> Option<Vec<Pattern>> {
    let is_name = |target: &Json| target.text().is_some_and(|name| name.starts_with("re:") || name.contains('.'));
    let of_group = |(_, group): &(String, Json)| match group.get("targets") {
        Json::List(targets) if !targets.is_empty() && targets.iter().all(is_name) => {
            Some(patterns(group.get("targets")).collect::<Vec<_>>())
        }
        _ => None,
    };
    let groups = source.get("config_groups").entries();
    let all: Vec<_> = groups.iter().map(of_group).collect::<Option<_>>()?;
    (!all.is_empty()).then(|| all.into_iter().flatten().collect())
}

/// Promised scales of one source.
fn promises(source: &Json) -> Vec<Promise> {
    let of_all = |by: String| Promise { by, modules: Vec::new() };
    let mut found = Vec::new();
    let block = source.get("weight_block_size");
    if !block.is_null() {
        found.push(of_all(format!("`weight_block_size` {block}")));
    }
    let method = source.get("quant_method").word().unwrap_or_default();
    if !source.get("config_groups").is_null() {
        found.push(Promise { by: "`config_groups`".into(), modules: named_targets(source).unwrap_or_default() });
    } else if ["fp8", "fbgemm_fp8", "quark", "compressed-tensors"].contains(&method.as_str()) {
        found.push(of_all(format!("`quant_method` {method}")));
    }
    if let Some(algorithm) = source.get("quant_algo").text() {
        match source.get("quantized_layers") {
            // An empty object has no layers, unlike an empty list, which means all.
            Json::Object(layers) if layers.is_empty() => {}
            Json::Object(layers) => found.push(Promise {
                by: format!("`quantized_layers` of `quant_algo` {algorithm}"),
                modules: layers.iter().map(|(name, _)| Pattern::new(name)).collect(),
            }),
            _ => found.push(of_all(format!("`quant_algo` {algorithm}"))),
        }
    }
    found
}

/// Patterns of a list of names.
fn patterns(list: &Json) -> impl Iterator<Item = Pattern> {
    list.items().iter().filter_map(Json::text).map(Pattern::new)
}

/// Name in a list of modules, in each writer's syntax.
enum Pattern {
    /// `re:` and a regular expression, matched at the start of a module name
    /// (compressed-tensors, Quark).
    Regex(Regex),
    /// Glob with `*` and `?` (ModelOpt).
    Glob(String),
    /// Whole components of a module name, as `lm_head` or
    /// `layers.0.mlp` (transformers, vLLM).
    Parts(String),
    /// Class such as `Linear`. Files do not give the class of a layer, so it matches all.
    Class,
    /// Invalid regular expression.
    Unknown,
}

impl Pattern {
    fn new(text: &str) -> Self {
        match text.strip_prefix("re:") {
            // Python's `re.match` anchors at the start only.
            Some(regex) => layer_regex(&format!("^(?:{regex})")).map_or(Self::Unknown, Self::Regex),
            None if text.contains(['*', '?']) => Self::Glob(text.to_owned()),
            None if text.starts_with(|c: char| c.is_ascii_uppercase()) && !text.contains('.') => Self::Class,
            None => Self::Parts(text.trim_matches('.').to_owned()),
        }
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Regex(regex) => regex.is_match(module.as_bytes()),
            Self::Glob(glob) => is_glob_of(glob.as_bytes(), module.as_bytes()),
            Self::Parts(parts) => format!(".{module}.").contains(&format!(".{parts}.")),
            Self::Class => true,
            Self::Unknown => false,
        }
    }
}

/// Glob match: `*` stands for any characters and `?` for one.
fn is_glob_of(glob: &[u8], name: &[u8]) -> bool {
    let (mut at, mut of) = (0, 0);
    // Position after the last star, and the end of the text that it matches.
    let mut star: Option<(usize, usize)> = None;
    while of < name.len() {
        match (glob.get(at), star) {
            (Some(b'*'), _) => {
                at += 1;
                star = Some((at, of));
            }
            (Some(&letter), _) if letter == b'?' || letter == name[of] => (at, of) = (at + 1, of + 1),
            (_, Some((behind, end))) => {
                star = Some((behind, end + 1));
                (at, of) = (behind, end + 1);
            }
            _ => return false,
        }
    }
    glob[at..].iter().all(|&letter| letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_name_modules_in_every_way() {
        for (pattern, module, expected) in [
            ("lm_head", "lm_head", true),
            ("lm_head", "model.lm_head", true),
            ("lm_head", "lm_head_norm", false),
            ("model.layers.1", "model.layers.1.mlp.up_proj", true),
            ("model.layers.1", "model.layers.10.mlp.up_proj", false),
            ("visual.", "visual.blocks.0.attn", true),
            ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", true),
            ("model.layers.0*", "model.layers.1.self_attn.q_proj", false),
            ("*.gate", "model.layers.3.mlp.gate", true),
            ("*.gate", "model.layers.3.mlp.gate_proj", false),
            ("re:.*lm_head", "model.lm_head", true),
            ("re:.*self_attn\\.(q|k)_proj$", "model.layers.0.self_attn.k_proj", true),
            ("re:.*self_attn\\.(q|k)_proj$", "model.layers.0.self_attn.o_proj", false),
            ("re:mlp", "model.mlp", false),
            ("re:(", "model.mlp", false),
            ("Linear", "model.mlp", true),
        ] {
            assert_eq!(Pattern::new(pattern).matches(module), expected, "{pattern} of {module}");
        }
    }
}
