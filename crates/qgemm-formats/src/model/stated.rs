//! What the settings of a checkpoint state of single layers: which are left as they are, and which have scales.

use regex_lite::Regex;
use serde_json::Value;

use super::config::QuantConfig;

/// Settings that list modules without quantization, by their names in the configurations of their methods.
const UNQUANTIZED: [&str; 6] =
    ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "exclude", "llm_int8_skip_modules"];

/// The settings of a checkpoint, asked layer by layer.
pub(super) struct Stated<'a> {
    settings: &'a Value,
    unquantized: Vec<Pattern>,
    promises: Vec<Promise>,
    groups: Vec<Group>,
}

/// A group of compressed-tensors' settings.
struct Group {
    name: String,
    /// Its modules.
    targets: Vec<Pattern>,
    /// Bits of a weight.
    bits: Option<u64>,
    /// Whether weights are floats.
    is_float: bool,
}

/// A statement that the FP8 weights of some modules have scales.
struct Promise {
    /// The statement, for errors.
    by: String,
    /// The modules; none for all.
    modules: Vec<Pattern>,
}

impl<'a> Stated<'a> {
    /// Looks through the settings once.
    pub fn of(config: &'a QuantConfig) -> Self {
        let settings = &*config.all;
        let unquantized = UNQUANTIZED.iter().flat_map(|list| patterns(&settings[*list])).collect();
        Self { settings, unquantized, promises: promises(config), groups: groups(settings) }
    }

    /// What states that FP8 weights of `module` have scales.
    pub fn promises_scales(&self, module: &str) -> Option<&str> {
        let by_promise = self.promises.iter().find(|p| is_one_of(&p.modules, module)).map(|p| p.by.as_str());
        let floats = self.groups.iter().filter(|group| group.is_float && group.bits == Some(8));
        let by = by_promise.or_else(|| floats.into_iter().find(|g| is_one_of(&g.targets, module)).map(|g| &*g.name))?;
        (!self.is_unquantized(module)).then_some(by)
    }

    /// Whether the settings leave `module` as it is.
    pub fn is_unquantized(&self, module: &str) -> bool {
        self.unquantized.iter().any(|pattern| pattern.matches(module))
    }

    /// The method, in lower case.
    pub fn method(&self) -> Option<String> {
        self.text("quant_method").map(str::to_lowercase)
    }

    /// ModelOpt's name of the algorithm: of `module` where the settings have one for it, else of all.
    pub fn algorithm(&self, module: &str) -> Option<&'a str> {
        self.settings["quantized_layers"][module]["quant_algo"].as_str().or_else(|| self.text("quant_algo"))
    }

    /// The setting `name`, where it is text.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.settings[name].as_str()
    }

    /// The setting `name`, of `module` where the settings have one for it, as MLX writes them.
    pub fn of_module(&self, module: &str, name: &str) -> &'a Value {
        let own = &self.settings[module][name];
        if own.is_null() { &self.settings[name] } else { own }
    }

    /// Bits of the weights of `module` by its group in compressed-tensors' settings.
    pub fn group_bits(&self, module: &str) -> Option<u64> {
        let of_module = self.groups.iter().find(|group| is_one_of(&group.targets, module));
        of_module.or(self.groups.first().filter(|_| self.groups.len() == 1))?.bits
    }
}

/// Whether `module` is in a list, which of no modules is one of all.
fn is_one_of(list: &[Pattern], module: &str) -> bool {
    list.is_empty() || list.iter().any(|pattern| pattern.matches(module))
}

fn groups(settings: &Value) -> Vec<Group> {
    let groups = settings["config_groups"].as_object();
    let group = |(name, group): (&String, &Value)| Group {
        name: format!("`{name}` of `config_groups`"),
        targets: patterns(&group["targets"]).collect(),
        bits: group["weights"]["num_bits"].as_u64(),
        is_float: group["weights"]["type"].as_str() == Some("float"),
    };
    groups.into_iter().flatten().map(group).collect()
}

fn promises(config: &QuantConfig) -> Vec<Promise> {
    let settings = &*config.all;
    let of_all = |by: String| Promise { by, modules: Vec::new() };
    let mut found = Vec::new();
    if let Some(block) = &config.weight_block_size {
        found.push(of_all(format!("`weight_block_size` {block:?}")));
    }
    if let Some(method) = ["fp8", "fbgemm_fp8", "quark"].into_iter().find(|method| config.is(method)) {
        found.push(of_all(format!("`quant_method` {method}")));
    }
    if let Some(algorithm) = settings["quant_algo"].as_str() {
        match settings["quantized_layers"].as_object() {
            None => found.push(of_all(format!("`quant_algo` {algorithm}"))),
            // A list of none is not one of all.
            Some(layers) if layers.is_empty() => {}
            Some(layers) => found.push(Promise {
                by: format!("`quantized_layers` of `quant_algo` {algorithm}"),
                modules: layers.keys().map(|name| Pattern::new(name)).collect(),
            }),
        }
    }
    found
}

/// The names in a list.
fn patterns(list: &Value) -> impl Iterator<Item = Pattern> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(Pattern::new)
}

/// A name in a list of modules, in any of the ways in which writers mean it.
enum Pattern {
    /// `re:` and a regular expression that a module's name begins with (compressed-tensors, Quark).
    Regex(Regex),
    /// A name with `*` and `?`, as a shell reads it (ModelOpt).
    Glob(String),
    /// Whole parts of a module's name, as `lm_head` or `layers.0.mlp` (transformers, vLLM).
    Parts(String),
    /// A class such as `Linear`, which a file does not tell of its layers: all of them.
    Class,
    /// A regular expression that is not understood.
    Unknown,
}

impl Pattern {
    fn new(text: &str) -> Self {
        match text.strip_prefix("re:") {
            // Python's `re.match` looks at the beginning, and asks for no end.
            Some(regex) => Regex::new(&format!("^(?:{regex})")).map_or(Self::Unknown, Self::Regex),
            None if text.contains(['*', '?']) => Self::Glob(text.to_owned()),
            None if text.starts_with(|c: char| c.is_ascii_uppercase()) && !text.contains('.') => Self::Class,
            None => Self::Parts(text.trim_matches('.').to_owned()),
        }
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Regex(regex) => regex.is_match(module),
            Self::Glob(glob) => is_glob_of(glob.as_bytes(), module.as_bytes()),
            Self::Parts(parts) => format!(".{module}.").contains(&format!(".{parts}.")),
            Self::Class => true,
            Self::Unknown => false,
        }
    }
}

/// Whether `name` is as `glob` says, in which `*` stands for any letters and `?` for one.
fn is_glob_of(glob: &[u8], name: &[u8]) -> bool {
    let (mut at, mut of) = (0, 0);
    // Behind the last star, and where the letters that it stands for end.
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
